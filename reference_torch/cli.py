"""The command line, ``python -m reference_torch``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from reference_torch.group import Group
from reference_torch.model import KV_CACHES
from reference_torch.numerics import DTYPES
from reference_torch.opening import load
from reference_torch.perturb import PERTURBATIONS
from reference_torch.probe import probe
from reference_torch.ranks import RankError, launch
from reference_torch.session import Session, greedy
from reference_torch.strategies import STRATEGIES

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a command; 0 = well, 1 = the request was bad or a rank was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m reference_torch", description="The PyTorch reference of decomposed models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="greedy continuations of token ids",
        epilog="example: python -m reference_torch generate small 1 5 9 --ranks 2",
    )
    generate.add_argument("checkpoint", type=Path, help="a directory with config.json")
    generate.add_argument("tokens", type=int, nargs="+", metavar="ID")
    generate.add_argument("--new", type=int, default=16, metavar="N", help="tokens (16)")
    generate.add_argument("--ranks", type=int, default=1)
    generate.add_argument("--strategy", choices=STRATEGIES, default="low_rank")
    generate.add_argument("--kv-cache", choices=KV_CACHES, default="full")
    generate.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    generate.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    generate.add_argument("--cuda-graphs", action="store_true")
    job = commands.add_parser("probe", help="answer jobs of a cross-check")
    job.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    commands.add_parser("perturbations", help="what a cross-check can be asked to break")
    args = parser.parse_args(argv)
    # Else what ends this process would leave its ranks and folders behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.command == "perturbations":
            print("\n".join(f"{name}: {what}" for name, what in PERTURBATIONS.items()))
        elif args.command == "probe":
            probe(args.folders)
        else:
            print(*launch(_generate, args.ranks, args, device=args.device))
    except (ValueError, OSError, RankError) as error:
        print(f"reference_torch: {error}", file=sys.stderr)
        return 1
    return 0


def _generate(group: Group, args: argparse.Namespace) -> list[int]:
    context = len(args.tokens) + args.new
    model = load(
        args.checkpoint, group, max_context=context, strategy=args.strategy, dtype=args.dtype
    )
    session = Session(
        model,
        batch=1,
        context=context,
        kv_cache=args.kv_cache,
        cuda_graphs=args.cuda_graphs,
    )
    return greedy(session, [args.tokens], args.new, chunk=512).tokens[:, 0].tolist()
