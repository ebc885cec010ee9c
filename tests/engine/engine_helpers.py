"""What the tests of ``Engine`` share."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from deinfer_jax import LLM, Completion, Engine, Increment

WAIT_S = 60


def add(engine: Engine, prompt: Any, new: int = 12, **options: Any) -> int:
    return engine.add(prompt, max_new_tokens=new, ignore_eos=True, **options)


def finish(engine: Engine) -> list[Increment]:
    """Steps until nothing is left."""
    found = []
    for _ in range(5000):
        if not engine.unfinished:
            return found
        found += engine.step()
    raise AssertionError(f"{engine.unfinished} are not finished")


def joined(increments: Sequence[Increment]) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Text, tokens and reason of each sample, from its increments."""
    parts: dict[tuple[int, int], list[Increment]] = defaultdict(list)
    for one in increments:
        parts[one.index, one.sample].append(one)
    for some in parts.values():
        assert all(one.finish_reason is None for one in some[:-1])
    return {
        key: (
            "".join(one.text for one in some),
            sum((one.token_ids for one in some), ()),
            some[-1].finish_reason,
        )
        for key, some in parts.items()
    }


def whole(done: Completion) -> tuple[Any, ...]:
    return done.text, done.token_ids, done.finish_reason


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Results of jobs begun at the same time; their exceptions are raised."""
    barrier, results = threading.Barrier(len(jobs)), [None] * len(jobs)
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            barrier.wait()
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def live_arrays(llm: LLM) -> int:
    trees = (llm.runner.weights, llm.runner.pools, llm.runner.state)
    return sum(not array.is_deleted() for array in jax.tree.leaves(trees))


def plant(
    patch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    error: BaseException,
    *,
    after: int = 0,
    late: bool = False,
    once: bool = True,
) -> list[int]:
    """Makes a function raise at a call, before or after it does its work."""
    function, calls = getattr(where, name), [0]

    def fail(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        bad = calls[0] == after + 1 or (calls[0] > after and not once)
        if bad and not late:
            raise error
        result = function(*arguments, **options)
        if bad:
            raise error
        return result

    patch.setattr(where, name, fail)
    return calls
