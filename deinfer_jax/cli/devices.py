"""``deinfer plan`` and ``deinfer doctor``."""

from __future__ import annotations

import argparse
from typing import Any

from deinfer_jax.cli.options import DTYPES, KV_CACHES, MODEL, add_command

__all__ = ["add_doctor", "add_plan"]


def add_plan(commands: Any) -> None:
    """Adds the command."""
    plan = add_command(
        commands,
        "plan",
        "predict time, memory and traffic on several devices, and which strategy to take; exit "
        "status 1 where nothing fits",
        "deinfer plan small --devices 8 --link nvlink --batch 64 --context 4096",
        _plan,
    )
    add = plan.add_argument
    add("model", help=f"{MODEL}; only its headers are read")
    add("--devices", type=int, required=True, metavar="N", help="that share the model")
    link = plan.add_mutually_exclusive_group()
    link.add_argument(
        "--link",
        choices=("nvlink", "pcie", "network"),
        default="nvlink",
        help="between them (nvlink); network: 200 Gbit/s a device",
    )
    link.add_argument(
        "--measure", action="store_true", help="the link between the visible devices, in a minute"
    )
    add("--batch", type=int, default=1, metavar="B", help="sequences that decode together (1)")
    add("--context", type=int, default=4096, metavar="TOKENS", help="of each sequence (4096)")
    add("--prompt", type=int, metavar="TOKENS", help="of a prompt (default: the context)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--device", choices=("h200", "cpu"), default="h200", help="whose speed to assume (h200)")
    add("--memory", type=float, metavar="GB", help="a device (default: what such a device has)")
    add("--kv-cache", choices=KV_CACHES, default="auto", help="which to predict (auto: all)")
    add(
        "--objective",
        choices=("decode", "prompt"),
        default="decode",
        help="what the choice goes by: a decode step (default) or a prompt",
    )
    add("--multiply-out", action="store_true", help="the choice may give the factors up")
    add("--json", metavar="FILE", help="a JSON file for the plan")


def _plan(args: argparse.Namespace) -> int:
    from deinfer_jax.planner.command import run

    return run(args)


def add_doctor(commands: Any) -> None:
    """Adds the command."""
    add_command(
        commands,
        "doctor",
        "versions, devices, flags and a verdict on this machine",
        "deinfer doctor",
        _doctor,
    )


def _doctor(args: argparse.Namespace) -> int:
    from deinfer_jax.doctor import report

    text, well = report()
    print(text)
    return 0 if well else 1
