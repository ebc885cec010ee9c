"""How fast are the strategies on two GPUs?

Four layers of Llama-3-70B's shapes, bfloat16, random weights: the bare stack over a contiguous
cache, decode and prefill, with a fast link between the devices and without, beside the project's
design figures.

Parts: "check" compares the strategies' outputs at a small size in float32; "cells" times the stack;
"split" takes decode apart into products, collectives and the rest; "kernels" profiles the stack;
"paged" is a decode step of the engine, with its paged cache, embedding, head and sampling. A row is
milliseconds a layer.

The link is a matter of environment variables, so every link has a process of its own: slow is
NCCL_P2P_DISABLE=1 and XLA's all-reduce kernels off. Results are written after every row, a process
that dies or hangs is started again behind the row it died in, and a second call with the same name
goes on where the first was stopped.

    python -m bench.tensor_parallel --parts check cells split paged --budget 480 --out FOLDER
    python -m bench.tensor_parallel --small --parts check cells split paged --out FOLDER  # on CPU
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

from bench.common import RESULTS, write
from bench.stack.measure import Bench
from bench.stack.report import Results, Table, plot
from bench.stack.setting import CELLS, DEVICES, GROUPS, LAYERS, LINKS, STRATEGIES, Setting
from deinfer_jax.folders import cache_folder

PARTS = ("check", "cells", "split", "kernels", "paged")
SLOW_ENVIRONMENT = {"NCCL_P2P_DISABLE": "1"}
SLOW_FLAG = "--xla_gpu_experimental_use_collective_kernels="
RESTARTS = 6


def child(args: argparse.Namespace, setting: Setting, results: Results) -> int:
    """Measures one link."""
    if setting.small:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    elif jax.config.jax_compilation_cache_dir is None:
        # What was compiled or tuned for one link, or in an earlier call, is not done again.
        jax.config.update("jax_compilation_cache_dir", str(args.cache or cache_folder("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not setting.small:
        devices = jax.devices()
        if devices[0].platform != "gpu" or len(devices) < DEVICES:
            print(f"expected {DEVICES} GPUs, got {devices}; --small tries it on a CPU", flush=True)
            return 2
    bench = Bench(args, setting, results)
    bench.prepare()
    for part in args.parts:
        if time.time() > args.deadline:
            print(f"no time for {part}", flush=True)
        elif part != "split" or args.child == args.link[0]:
            getattr(bench, part)()
    write(args.name, {k: v for k, v in results.data.items() if k != "machine"}, args.out)
    return 0


def run_link(args: argparse.Namespace, link: str, deadline: float) -> None:
    """Runs children of a link until one ends by itself."""
    environment = dict(os.environ)
    if link == "slow":
        environment |= SLOW_ENVIRONMENT
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {SLOW_FLAG}".strip()
    command = [sys.executable, "-m", "bench.tensor_parallel", *sys.argv[1:]]
    for _ in range(RESTARTS):
        left = deadline - time.time()
        if left < 10:
            print(f"no time for the {link} link", flush=True)
            return
        print(f"\n{link} link, {left:.0f} s", flush=True)
        extra = ["--child", link, "--deadline", str(deadline)]
        process = subprocess.Popen([*command, *extra], env=environment)
        try:
            code = process.wait(left + args.grace)
        except subprocess.TimeoutExpired:
            print(f"{link} link: ended at the deadline", flush=True)
            process.kill()
            process.wait()
            return
        if code in (0, 1, 2):  # done, a fault of this program, no GPUs
            return
        print(f"{link} link: the process ended with {code}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["cells"], choices=PARTS)
    parser.add_argument("--link", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument(
        "--ranks", nargs="+", default=["rounded"], choices=("rounded", "true"), help="at keep 0.6"
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--attention", choices=("cudnn", "xla"), help="default: the faster one")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of all links")
    parser.add_argument(
        "--share", type=float, default=0.6, help="of the budget, for the first of two links"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="at most, of timing a program")
    parser.add_argument("--blocks", type=int, default=20, help="whose median counts")
    parser.add_argument(
        "--row-seconds", type=float, default=75.0, help="until a row counts as hung"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds over the budget")
    parser.add_argument("--cache", type=Path, help="compilation cache (default: the engine's)")
    parser.add_argument(
        "--hlo", type=Path, metavar="ZIP", help="keep the compiled HLO in this file"
    )
    parser.add_argument("--small", action="store_true", help="tiny widths on two simulated devices")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of an earlier call")
    parser.add_argument("--retry", action="store_true", help="forget the rows that failed")
    parser.add_argument("--report", action="store_true", help="only print and plot the result file")
    parser.add_argument("--name", default="tensor_parallel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--child", choices=list(LINKS), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    path = args.out / f"{args.name}.json"
    setting = Setting(
        small=args.small,
        layers=args.layers,
        dtype="bfloat16",
        seconds=args.seconds,
        blocks=args.blocks,
    )
    if args.child:
        return child(args, setting, Results(path))
    if args.fresh and not args.report:
        path.unlink(missing_ok=True)
        sys.argv.remove("--fresh")
    if args.retry:
        Results(path).retry()
    started = time.time()
    if not args.report:
        for number, link in enumerate(args.link):
            last = number == len(args.link) - 1
            share = 1.0 if last else args.share
            run_link(args, link, started + share * args.budget)
    table = Table(Results(path))
    for title in ("overlap", "lines", "split", "paged", "bars"):
        print(f"\n{title}", *getattr(table, title)(), sep="\n")
    try:
        plot(table, args.out / f"{args.name}.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"{time.time() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
