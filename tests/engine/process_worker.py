"""One of several processes that `test_processes.py` starts: `process_worker.py JOB INDEX`.

The job is a JSON file; what is found goes to `<job>.<index>`, and `<job>.<index>.runs` appears when
an endless one has its first tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

SAMPLED: dict[str, Any] = dict(temperature=1.2, seed=5)
FILTERED: dict[str, Any] = dict(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=6, n=2)
UNSEEDED: dict[str, Any] = dict(temperature=1.5, seed=None)
# One program of each kind, and a cache that does not hold two of the longest sequences.
SIZES: dict[str, Any] = dict(max_context=48, max_batch=2, prefill_chunk=32, page_size=16)
PAGES = 4


def prompts() -> list[list[int]]:
    """Equal beginnings, up to the middle of a page and its end, and an equal one."""
    rng = np.random.default_rng(3)
    first = rng.integers(3, 160, 30).tolist()
    return [
        first,
        first[:20] + [9, 8, 7],
        first[:16] + [5],
        first,
        rng.integers(3, 160, 7).tolist(),
    ]


def values(
    path: str, strategy: str, devices: int, index: int = 0, *, scores: bool = True
) -> dict[str, Any]:
    """What a model gives; other processes than 0 pass other arguments."""
    import deinfer_jax

    options: dict[str, Any] = dict(strategy=strategy, tensor_parallel=devices, **SIZES)
    with deinfer_jax.load(path, **options) as llm:
        bytes_ = PAGES * llm.cache_layout.bytes_per_page
    with deinfer_jax.load(path, cache_bytes=bytes_, **options) as llm:

        def tokens(**sampling: Any) -> list[Any]:
            if index:
                sampling["seed"] = 123
            asked = prompts() if index == 0 else None
            done = deinfer_jax.generate(
                llm, asked, max_new_tokens=14, ignore_eos=True, logprobs=2, **sampling
            )
            return [[list(sample.token_ids) for sample in one.samples or (one,)] for one in done]

        found = {
            "greedy": tokens(),
            "sampled": tokens(**SAMPLED),
            "filtered": tokens(**FILTERED),
            "unseeded": [tokens(**UNSEEDED), tokens(**UNSEEDED)],
            "preemptions": llm.core.scheduler.preemptions,
        }
        if scores:
            found["score"] = llm.score(prompts()[0] if index == 0 else [3, 4]).tolist()
            found["logits"] = llm.logits(prompts()[1] if index == 0 else [3]).tolist()
        llm.core.scheduler.check_integrity()
        return found


def errors(path: str, strategy: str, devices: int, index: int) -> dict[str, str]:
    """What is said of mistakes, after each of which the run goes on."""
    import deinfer_jax

    def load(**changes: Any) -> deinfer_jax.LLM:
        options: dict[str, Any] = dict(strategy=strategy, tensor_parallel=devices, **SIZES)
        options |= changes
        return deinfer_jax.load(options.pop("path", path), **options)

    def said(work: Callable[[], Any]) -> str:
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = {
        "argument": said(lambda: load(max_batch=3 + index)),
        "missing": said(lambda: load(path=path if index == 0 else "/nowhere")),
        "some": said(
            lambda: load(tensor_parallel=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",)))
        ),
    }
    asked = [[3], [10**6]] if index == 0 else None
    with load() as llm:
        found |= {
            "prompt": said(lambda: deinfer_jax.generate(llm, asked, max_new_tokens=1)),
            "long": said(lambda: llm.score([3] * (100 if index == 0 else 5))),
            "stream": said(lambda: deinfer_jax.generate(llm, [[3]], stream=True)),
            "engine": said(lambda: deinfer_jax.Engine(llm).add([3], max_new_tokens=1)),
        }
    with load(tensor_parallel=1, strategy="auto") as llm:  # of each process alone
        engine = deinfer_jax.Engine(llm)
        engine.add([3 + index], max_new_tokens=1)
        found["alone"] = said(lambda: list(engine.stream()))
    return found


def endless(job: dict[str, Any], index: int, runs: Path) -> None:
    """Generates until something happens."""
    import deinfer_jax
    from deinfer_jax.engine.memory import OutOfDeviceMemory
    from deinfer_jax.parallel import watch

    watch.SILENCE = job.get("silence", watch.SILENCE)
    llm = deinfer_jax.load(
        job["path"], strategy="low_rank", tensor_parallel=jax.device_count(), **SIZES
    )
    deinfer_jax.generate(llm, prompts()[-1], max_new_tokens=2, ignore_eos=True)
    runs.write_text(str(os.getpid()))
    if index == job.get("leaves"):
        return
    if index == job.get("fails"):

        def fail(*_: object) -> Any:
            raise OutOfDeviceMemory("no room here")

        llm.runner.decode = fail  # pyright: ignore[reportAttributeAccessIssue] (its names differ)
    while True:
        deinfer_jax.generate(llm, prompts()[-1], max_new_tokens=40, ignore_eos=True)


def main() -> None:
    path, index = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    jax.distributed.initialize(f"localhost:{job['port']}", job["processes"], index)
    devices = jax.device_count()
    found: dict[str, Any] = {}
    if job["work"] == "endless":
        endless(job, index, path.with_suffix(f".{index}.runs"))
    elif job["work"] == "errors":
        found = errors(job["path"], "low_rank", devices, index)
    else:
        found = {name: values(job["path"], name, devices, index) for name in job["strategies"]}
    path.with_suffix(f".{index}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
