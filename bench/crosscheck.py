"""Does JAX give what PyTorch gives? Cross-checks of tiny random models of every variant, and of a
given checkpoint, with every strategy and cache of the PyTorch side on several ranks, and with those
of the JAX side that are asked for.

    python -m bench.crosscheck [--model DIRECTORY] [--variants gqa qwen3 …] [--device cuda]
        [--jax-strategy dense naive low_rank sharded --jax-devices 2 3]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deinfer_jax
from bench.common import write
from deinfer_jax.evaluate.crosscheck.job import CACHES, JAX_STRATEGIES, STRATEGIES
from deinfer_jax.evaluate.crosscheck.variants import VARIANTS


def row(run: Any) -> dict[str, Any]:
    """A run without its layers: the worst of them."""
    found = run.comparison
    verdict = {"run": run.name, "passed": run.passed, "problems": run.problems}
    if found is None:
        return verdict
    return verdict | {
        "prefill": found.prefill.worst_layer.relative,
        "decode": found.decode.worst_layer.relative,
        "kl_mean": max(p.distribution.kl_mean for p in (found.prefill, found.decode)),
        "kl_p99": max(p.distribution.kl_p99 for p in (found.prefill, found.decode)),
        "greedy": sum(s.equal for s in found.greedy) / sum(s.count for s in found.greedy),
        "elements_a_decoded_token": {
            "jax": run.jax["elements_a_decoded_token"],
            "torch": run.torch["elements_a_decoded_token"],
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a decomposed checkpoint, as well")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--layout", default="mixed")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--kv-cache", nargs="+", choices=CACHES, default=CACHES)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--jax-strategy", nargs="+", choices=JAX_STRATEGIES, default=("auto",))
    parser.add_argument("--jax-devices", type=int, nargs="+", default=(1,))
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--cuda-graphs", action="store_true", help="as well as without")
    parser.add_argument("--name", default="crosscheck")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    asked: list[dict[str, Any]] = [{"random": f"{v}/{args.layout}"} for v in args.variants]
    if args.model:
        asked.append({"path": args.model})
    found = []
    for one in asked:
        report = deinfer_jax.crosscheck(
            **one,
            strategy=args.strategy,
            kv_cache=args.kv_cache,
            ranks=args.ranks,
            jax_strategy=args.jax_strategy,
            jax_devices=args.jax_devices,
            dtype=args.dtype,
            device=args.device,
            cuda_graphs=(False, True) if args.cuda_graphs else False,
        )
        print(f"{report}\n", flush=True)
        found.append(
            {
                "model": one["random"] if "random" in one else args.model.name,
                "passed": report.passed,
                "dtype": report.dtype,
                "device": report.device,
                "flags": report.flags,
                "machine": report.runs[0].jax["machine"],
                "torch": report.runs[0].torch["versions"],
                "runs": [row(run) for run in report.runs],
                "left_out": report.left_out,
            }
        )
        write(args.name, {"models": found}, args.out)  # after each, as all take an hour
    return 0 if all(one["passed"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
