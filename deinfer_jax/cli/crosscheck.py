"""``deinfer crosscheck``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from deinfer_jax.cli.options import DTYPES, add_command

__all__ = ["add_crosscheck"]


def add_crosscheck(commands: Any) -> None:
    """Adds the command."""
    check = add_command(
        commands,
        "crosscheck",
        "compare with the PyTorch reference, layer by layer; exit status 1 past the tolerance",
        "deinfer crosscheck small --jax-strategy sharded --jax-devices 2 "
        "--strategy naive low_rank --kv-cache full latent --ranks 2",
        _crosscheck,
    )
    check.add_argument(
        "model", nargs="?", help="a Hugging Face directory, dense or decomposed (or --random)"
    )
    check.add_argument(
        "--random",
        metavar="VARIANT",
        help="a tiny random model: gqa, mha, mqa, nine-three-heads, tied, biases, gelu, "
        "rope-linear, rope-llama3, rope-yarn, rope-dynamic, rope-dynamic-longer, rope-divisors, "
        "mistral-window, mixed-windows, qwen2, qwen2-windows or qwen3, and "
        "after a slash how it is decomposed: separate (default), shared, shared-kv, mixed or dense",
    )
    check.add_argument(
        "--strategy",
        nargs="+",
        choices=("dense", "naive", "low_rank"),
        default=("low_rank",),
        help="of PyTorch, one or several (default: low_rank)",
    )
    check.add_argument(
        "--ranks", type=int, nargs="+", default=(1,), metavar="N", help="PyTorch processes (1)"
    )
    check.add_argument(
        "--kv-cache",
        nargs="+",
        choices=("full", "latent", "full+latent"),
        default=("full",),
        help="of both sides, one or several (default: full)",
    )
    check.add_argument(
        "--jax-strategy",
        nargs="+",
        choices=("auto", "dense", "naive", "low_rank", "sharded"),
        default=("auto",),
        help="of JAX, one or several, each compared with each of PyTorch (default: auto); dense "
        "is left out beside a cache of latents, as it has none",
    )
    check.add_argument(
        "--jax-devices",
        type=int,
        nargs="+",
        default=(1,),
        metavar="N",
        help="simulated on a CPU (1)",
    )
    check.add_argument("--dtype", choices=DTYPES, help="of both sides (default: as load has it)")
    check.add_argument("--device", choices=("cpu", "cuda"), help="default: the one JAX finds")
    check.add_argument(
        "--cuda-graphs", choices=("on", "off", "both"), default="off", help="in PyTorch's decode"
    )
    check.add_argument(
        "--perturb",
        metavar="NAME",
        help="break one thing in PyTorch, which must be noticed: rope-theta, norm-eps, one-weight, "
        "slice-offset, head-order, position, page or residual",
    )
    check.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
    check.add_argument(
        "--no-float64", action="store_true", help="ask no third opinion where float32 is off"
    )
    check.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of each process (600)"
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--out", metavar="FILE", help="a JSON file for the report")


def _crosscheck(args: argparse.Namespace) -> int:
    import signal
    from pathlib import Path

    import deinfer_jax

    # What ends this process has to end the sides, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = deinfer_jax.crosscheck(
        args.model,
        random=args.random,
        strategy=args.strategy,
        ranks=args.ranks,
        kv_cache=args.kv_cache,
        jax_strategy=args.jax_strategy,
        jax_devices=args.jax_devices,
        dtype=args.dtype,
        device=args.device,
        cuda_graphs={"on": True, "off": False, "both": (False, True)}[args.cuda_graphs],
        perturb=args.perturb,
        seed=args.seed,
        third_opinion=not args.no_float64,
        timeout=args.timeout,
    )
    found = json.dumps(report.to_json(), indent=1)
    print(found if args.json else report)
    if args.out:
        Path(args.out).write_text(found + "\n", encoding="utf-8")
    return 0 if report.passed else 1
