"""What does the host do beside the device?

Decodes with all slots in use and takes the time of a step apart: planning, dispatch (host arrays
and the call of the program, which on a GPU returns at once), waiting for the device, and what is
done with the tokens. On a GPU then the same without dispatching ahead, where none of it is hidden.
On a CPU the program runs inside its call; there the call of a program with the same arguments that
computes nothing stands for it in the host's share.

    python -m bench.host_overhead [--model FILE.gguf | --random 8b] [--batch 64]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import deinfer_jax
from bench.common import LLAMA_3_8B, write
from deinfer_jax import LLM
from deinfer_jax.demo import smollm2_path
from deinfer_jax.engine.buckets import fit
from deinfer_jax.engine.request import Request, Sampling

PROMPT, WARM, MEASURED, CONTEXT = 64, 16, 96, 2048  # tokens


class Clock:
    """Adds up the time spent in methods that it is put around."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def around(self, name: str, owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + taken

        setattr(owner, method, timed)
        self._undo.append(lambda: delattr(owner, method))

    def stop(self) -> None:
        for undo in self._undo:
            undo()


def measure(llm: LLM, batch: int, ahead: int) -> dict[str, float]:
    """Microseconds a decoded token position (a step of all rows), by part."""
    core, steps = llm.core, llm.runner.buckets.decode_steps
    core.ahead = ahead
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(llm.config.vocab_size, size=PROMPT).tolist(),
            Sampling(max_new_tokens=CONTEXT - PROMPT),  # nobody ends meanwhile
        )
        for _ in range(batch)
    ]
    core.submit(requests)
    while min(len(request.generated) for request in requests) < WARM:
        core.advance()
    context = PROMPT + WARM + MEASURED + 64 + 2 * steps  # what any row reaches; compiled beforehand
    for pages in llm.runner.buckets.pages:
        if pages <= fit(llm.cache_layout.pages_for(context), llm.runner.buckets.pages):
            llm.runner.executable(("decode", fit(batch, llm.runner.buckets.batch), pages))
    clock = Clock()
    clock.around("plan", core.scheduler, "schedule")
    clock.around("dispatch", core, "_dispatch")
    clock.around("call", core.runner, "_run")
    clock.around("wait", core.runner, "read")
    clock.around("read", core, "_read")
    before, started = len(requests[0].generated), time.perf_counter()
    while len(requests[0].generated) - before < MEASURED:
        core.advance()
    wall = time.perf_counter() - started
    clock.stop()
    count = len(requests[0].generated) - before
    parts = dict(clock.seconds, wall=wall)
    parts["read"] -= parts["wait"]
    parts["dispatch"] -= parts["call"]
    if llm.runner.placement.platform == "cpu":
        parts["call of nothing"] = call_seconds(llm) * count / steps
        parts["host"] = wall - parts["wait"] + parts["call of nothing"] - parts["call"]
    else:
        parts["host"] = parts["plan"] + parts["dispatch"] + parts["read"]
    core.cancel(requests)
    core.settle()
    while core._in_flight:
        core.advance()
    return {name: seconds / count * 1e6 for name, seconds in parts.items()}


def call_seconds(llm: LLM) -> float:
    """Of a program that takes weights, pools and state, and gives pools and state back."""
    runner = llm.runner
    nothing = jax.jit(lambda weights, pools, state: (pools, state), donate_argnums=(1, 2))
    program = nothing.lower(runner.weights, runner.pools, runner.state).compile()
    times = []
    for _ in range(200):
        started = time.perf_counter()
        runner.pools, runner.state = program(runner.weights, runner.pools, runner.state)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="the GGUF file (default: of the package)")
    parser.add_argument("--random", choices=("8b",), help="random weights of this shape instead")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--decode-steps", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--name", default="host_overhead")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    model: Any = LLAMA_3_8B if args.random else args.model or smollm2_path()
    rows = []
    for steps in args.decode_steps:
        with deinfer_jax.load(
            model,
            max_batch=max(args.batch),
            max_context=CONTEXT,
            decode_steps=steps,
            prefix_sharing=False,
        ) as llm:
            gpu = llm.runner.placement.platform == "gpu"
            for batch in args.batch:
                for ahead in (1, 0) if gpu else (0,):
                    found = measure(llm, batch, ahead)
                    rows.append(dict(batch=batch, decode_steps=steps, ahead=ahead, us=found))
                    text = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                    print(f"B {batch}, {steps} a dispatch, ahead {ahead}: {text} µs", flush=True)
    name = "llama-3-8b-shaped" if args.random else Path(model).name
    write(args.name, {"model": name, "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
