"""What several commands have in common: their beginning, and options of ``load``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["DTYPES", "KV_CACHES", "MODEL", "add_command", "add_load_options", "load_options"]

DTYPES = ("float32", "bfloat16", "float16")
KV_CACHES = ("auto", "full", "latent", "full+latent")
MODEL = "a Hugging Face directory, a GGUF file, or what LLM.save wrote"

LOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": dict(choices=DTYPES, help="default: the checkpoint's on a GPU, float32 on a CPU"),
    "max_batch": dict(type=int, metavar="B", help="sequences that decode together"),
    "max_context": dict(type=int, metavar="TOKENS", help="of a sequence, prompt and continuation"),
    "strategy": dict(default="auto", help="how it is split over devices (auto)"),
    "tensor_parallel": dict(type=int, metavar="P", help="devices (all GPUs, or one CPU)"),
    "kv_cache": dict(choices=KV_CACHES, default="auto", help="what is cached of a token (auto)"),
    "cache_bytes": dict(type=int, metavar="BYTES", help="of the cache"),
    "page_size": dict(type=int, metavar="TOKENS", help="of the cache: 16, 32, 64 or 128"),
    "prefill_chunk": dict(type=int, metavar="TOKENS", help="of a prompt, in one step"),
    "decode_steps": dict(type=int, metavar="N", help="tokens a dispatch"),
    "implementation": dict(help="of the kernels (default: the best that applies)"),
}


def add_command(
    commands: Any, name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand with a summary and an example in its help; ``run`` gets what was parsed and
    returns the exit status."""
    command = commands.add_parser(
        name, help=summary, description=summary.capitalize() + ".", epilog=f"example: {example}"
    )
    command.set_defaults(run=run, program=command.prog)
    return command


def add_load_options(command: argparse.ArgumentParser, *names: str) -> None:
    """Options that ``load`` takes, by its names for them."""
    for name in names:
        command.add_argument(f"--{name.replace('_', '-')}", **LOAD_OPTIONS[name])


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that the command has, as ``load`` takes them."""
    return {name: getattr(args, name) for name in LOAD_OPTIONS if hasattr(args, name)}
