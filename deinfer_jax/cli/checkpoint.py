"""``deinfer decompose`` and ``deinfer inspect``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deinfer_jax.cli.options import DTYPES, MODEL, add_command

__all__ = ["add_decompose", "add_inspect"]


def add_decompose(commands: Any) -> None:
    """Adds the command."""
    decompose = add_command(
        commands,
        "decompose",
        "decompose a dense model into low-rank factors",
        "deinfer decompose model.gguf small --keep 0.8 --calibration a.txt b.txt --plot ranks.png",
        _decompose,
    )
    add = decompose.add_argument
    add("model", help="a dense Hugging Face directory or GGUF file")
    add("destination", help="the directory to make")
    add("--keep", type=float, default=0.6, metavar="FRACTION", help="of the parameters (0.6)")
    add(
        "--method",
        choices=("fisher", "whitened", "svd"),
        default="fisher",
        help="what is lost least: loss (fisher, default), output or weights",
    )
    add(
        "--allocation",
        choices=("loss", "uniform"),
        default="loss",
        help="of ranks: where they save most loss (default), or the same keep everywhere",
    )
    add("--ranks", metavar="FILE", help="JSON with ranks by module, in the place of --keep")
    add("--multiple-of", type=int, default=1, metavar="N", help="of all ranks (1)")
    add(
        "--groups",
        default="shared",
        metavar="GROUPS",
        help="shared (default), shared-kv, separate, or names: q,k,v+gate,up",
    )
    add("--calibration", nargs="+", metavar="TEXT", help="files (default: the model's own text)")
    add("--calibration-tokens", type=int, metavar="N", help="8192 if not given")
    add("--label-samples", type=int, default=1, metavar="N", help="of fisher, a window (1)")
    add("--seed", type=int, default=0, help="of all that is drawn (0)")
    add("--dtype", choices=DTYPES, help="of the result (default: the checkpoint's)")
    add("--spectra", metavar="FOLDER", help="keep what was measured, for another --keep")
    add("--plot", metavar="FILE", help="draw the ranks by layer")
    add("--json", action="store_true", help="print the report as JSON")


def _decompose(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax

    if args.plot:
        import matplotlib  # noqa: F401 (its absence is better known before the work than after)

    groups = args.groups
    if "," in groups or "+" in groups:
        groups = [names.split(",") for names in groups.split("+")]
    ranks = None
    if args.ranks:
        ranks = json.loads(Path(args.ranks).read_text(encoding="utf-8"))
        if not isinstance(ranks, dict):
            raise ValueError(f"{args.ranks}: expected ranks by module, got {type(ranks).__name__}")
    report = deinfer_jax.decompose(
        args.model,
        args.destination,
        keep=args.keep,
        method=args.method,
        ranks=ranks,
        allocation=args.allocation,
        multiple_of=args.multiple_of,
        groups=groups,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens,
        label_samples=args.label_samples,
        seed=args.seed,
        dtype=args.dtype,
        spectra=args.spectra,
    )
    print(json.dumps(report.to_json(), indent=1) if args.json else report)
    if args.plot:
        report.plot(args.plot)
    return 0


def add_inspect(commands: Any) -> None:
    """Adds the command."""
    inspect = add_command(
        commands,
        "inspect",
        "describe a checkpoint from its headers",
        "deinfer inspect model.gguf",
        _inspect,
    )
    inspect.add_argument("model", help=MODEL)


def _inspect(args: argparse.Namespace) -> int:
    import deinfer_jax

    print(deinfer_jax.inspect(args.model))
    return 0
