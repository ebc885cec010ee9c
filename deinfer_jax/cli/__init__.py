"""``deinfer``: the command line.

A module for each group of commands, with their options and what they do; what is slow to import is
imported by the functions that run them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from deinfer_jax.cli.checkpoint import add_decompose, add_inspect
from deinfer_jax.cli.crosscheck import add_crosscheck
from deinfer_jax.cli.devices import add_doctor, add_plan
from deinfer_jax.cli.evaluate import add_bench, add_perplexity
from deinfer_jax.cli.generate import add_generate

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status (0 = well, 1 = the request was bad or something is
    missing, 130 = interrupted)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.program}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deinfer",
        description="Inference for low-rank decomposed (and dense) language models in JAX.",
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands)
    add_decompose(commands)
    add_inspect(commands)
    add_perplexity(commands)
    add_plan(commands)
    add_crosscheck(commands)
    add_bench(commands)
    add_doctor(commands)
    return parser


class _Version(argparse.Action):
    """Prints it; the library, with jax, is imported only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import deinfer_jax

        print(f"deinfer-jax {deinfer_jax.__version__}")
        parser.exit()
