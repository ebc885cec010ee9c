"""How requests fare that arrive over time: throughput and latencies of static and of continuous
batching."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from deinfer_jax.engine.engine import Engine
from deinfer_jax.engine.llm import LLM, show_progress
from deinfer_jax.engine.request import Sampling

__all__ = ["DEFINITIONS", "Arrival", "Serving", "compare", "serve", "workload"]

DEFINITIONS = """throughput: generated tokens / time from the first arrival to the last token
TTFT: from a request's arrival to its first token, waiting included
ITL: between two tokens of a request; those that a dispatch brings together share the time evenly
static batching: as many waiting requests as there are slots are run to the last one's end
continuous batching: a waiting request joins as soon as a slot and pages are free"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come.

    Attributes:
        at: seconds after the start.
        prompt: token ids.
        new_tokens: how many it generates; it does not end before.
    """

    at: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A run's figures; see ``DEFINITIONS``.

    Attributes:
        batching: ``"static"`` or ``"continuous"``.
        seconds: from the first arrival to the last token.
        prompt_tokens, new_tokens: in all.
        throughput: generated tokens a second.
        ttft_s, itl_s: percentiles by name, ``"p50"`` and ``"p99"``.
        preemptions: of requests whose pages were needed.
    """

    batching: str
    seconds: float
    prompt_tokens: int
    new_tokens: int
    throughput: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    preemptions: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def workload(
    vocab_size: int,
    *,
    requests: int,
    rate: float,
    prompt_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    seed: int = 0,
) -> list[Arrival]:
    """Requests of random tokens that arrive independently of each other (a Poisson process).

    Args:
        vocab_size: W.
        requests: how many.
        rate: mean arrivals a second; infinity = all at once.
        prompt_tokens, new_tokens: least and most, all lengths between equally often.
        seed: of everything.
    """
    for name, (least, most) in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if not 1 <= least <= most:
            raise ValueError(f"{name}: expected 1 <= least <= most, got {least} and {most}")
    if requests < 1 or not rate > 0:
        raise ValueError(
            f"expected at least one request and a positive rate, got {requests} and {rate}"
        )
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(size=requests) / rate
    times = np.cumsum(gaps) - gaps[0]
    prompts = rng.integers(*prompt_tokens, size=requests, endpoint=True)
    lengths = rng.integers(*new_tokens, size=requests, endpoint=True)
    return [
        Arrival(float(at), rng.integers(vocab_size, size=count).tolist(), int(length))
        for at, count, length in zip(times, prompts, lengths, strict=True)
    ]


def compare(
    llm: LLM, arrivals: Sequence[Arrival], *, progress: bool | None = None
) -> dict[str, Any]:
    """Compiles what serving needs, runs the workload with static and with continuous batching, and
    prints the figures.

    Returns:
        JSON values for a result file.
    """
    llm.warm_up(progress=progress)
    print(DEFINITIONS)
    print(
        f"{len(arrivals)} requests in {arrivals[-1].at:.1f} s, "
        f"{sum(len(arrival.prompt) for arrival in arrivals)} prompt tokens, "
        f"{sum(arrival.new_tokens for arrival in arrivals)} new ones; {llm.max_batch} slots"
    )
    found = []
    for continuous in (False, True):
        run = serve(llm, arrivals, continuous=continuous, progress=progress)
        found.append(run)
        print(
            f"{run.batching:10} {run.throughput:8.1f} tokens/s   "
            f"TTFT p50 {run.ttft_s['p50']:.3f} p99 {run.ttft_s['p99']:.3f} s   "
            f"ITL p50 {run.itl_s['p50'] * 1e3:.1f} p99 {run.itl_s['p99'] * 1e3:.1f} ms   "
            f"{run.preemptions} preemptions",
            flush=True,
        )
    static, continuous = found
    print(
        f"continuous / static: throughput {continuous.throughput / static.throughput:.2f}, "
        f"TTFT p50 {continuous.ttft_s['p50'] / static.ttft_s['p50']:.3f}"
    )
    return {
        "definitions": DEFINITIONS.splitlines(),
        "slots": llm.max_batch,
        "pages": llm.runner.num_pages,
        "decode_steps": llm.runner.buckets.decode_steps,
        "dtype": llm.runner.layout.dtype,
        "requests": len(arrivals),
        "last_arrival_s": arrivals[-1].at,
        "runs": [run.to_json() for run in found],
    }


def serve(
    llm: LLM, arrivals: Sequence[Arrival], *, continuous: bool, progress: bool | None = None
) -> Serving:
    """Runs a workload, as its requests arrive.

    Args:
        llm: nothing else may run on it; best after ``warm_up``.
        arrivals: in order of time.
        continuous: whether requests join while others run.
        progress: a bar; None = where stderr is a terminal.

    Raises:
        RuntimeError: a request ended in an error.
    """
    scheduler = llm.core.scheduler
    scheduler.restart([])  # pages of an earlier run would be found again
    preempted, before = scheduler.preemptions, scheduler.continuous
    scheduler.continuous = continuous
    try:
        times = _run(llm, arrivals, progress)
    finally:
        scheduler.continuous = before
    first = [tokens[0] - arrival.at for arrival, tokens in zip(arrivals, times, strict=True)]
    between = np.concatenate([_shared_gaps(tokens) for tokens in times])
    seconds = max(tokens[-1] for tokens in times)
    count = sum(map(len, times))
    return Serving(
        batching="continuous" if continuous else "static",
        seconds=seconds,
        prompt_tokens=sum(len(arrival.prompt) for arrival in arrivals),
        new_tokens=count,
        throughput=count / seconds,
        ttft_s=_percentiles(first),
        itl_s=_percentiles(between),
        preemptions=scheduler.preemptions - preempted,
    )


def _run(llm: LLM, arrivals: Sequence[Arrival], progress: bool | None) -> list[list[float]]:
    """When each token of each request came, in seconds after the start."""
    engine = Engine(llm)
    coming = deque(arrivals)
    bar = tqdm(
        total=sum(arrival.new_tokens for arrival in arrivals),
        desc="serving",
        unit="token",
        disable=not show_progress(progress),
    )
    started = time.perf_counter()
    with bar:
        while coming or engine.unfinished:
            now = time.perf_counter() - started
            while coming and coming[0].at <= now:
                arrival = coming.popleft()
                engine.submit(
                    arrival.prompt, [Sampling(max_new_tokens=arrival.new_tokens)], text=False
                )
            if engine.unfinished:
                bar.update(sum(len(increment.token_ids) for increment in engine.step()))
            else:
                time.sleep(coming[0].at - now)
    errors = [request.error for request in engine.requests if request.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests ended in an error, the first: {errors[0]}")
    return [[at - started for at in request.times[1:]] for request in engine.requests]


def _shared_gaps(times: Sequence[float]) -> np.ndarray:
    """Time between tokens; where several came at once, they have equal parts of the time since the
    ones before."""
    moments, counts = np.unique(np.asarray(times), return_counts=True)
    return np.repeat(np.diff(moments) / counts[1:], counts[1:])


def _percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50 and p99; 0 of nothing, as where every request has one token."""
    if not len(seconds):
        return {"p50": 0.0, "p99": 0.0}
    return {name: float(np.percentile(seconds, q)) for name, q in (("p50", 50), ("p99", 99))}
