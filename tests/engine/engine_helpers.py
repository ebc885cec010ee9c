"""What the tests of ``Engine`` and of what ``generate`` takes share."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, Engine, Increment, TokenLogprob
from tests.engine.helpers import tokens

WAIT_S = 60
NEAR = 1e-5  # log-probabilities that are so close are equal, up to rounding


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


def generate(llm: LLM, what: Any, new: int = 12, **options: Any) -> list[Completion]:
    return deinfer_jax.generate(llm, what, max_new_tokens=new, ignore_eos=True, **options)


def stream(llm: LLM, what: Any, new: int = 12, **options: Any) -> Any:
    return deinfer_jax.generate(
        llm, what, max_new_tokens=new, ignore_eos=True, stream=True, **options
    )


def samples(done: Completion) -> list[tuple[int, ...]]:
    return tokens(list(done.samples))


def join(increments: Iterable[Increment]) -> dict[tuple[int, int], Increment]:
    """One increment a sample, of all of them."""
    parts = defaultdict(list)
    for one in increments:
        parts[one.index, one.sample].append(one)
    joined = {}
    for key, some in parts.items():
        assert [one.finish_reason is None for one in some] == [True] * (len(some) - 1) + [False]
        assert all(one.error is None for one in some[:-1])
        joined[key] = Increment(
            index=key[0],
            sample=key[1],
            text="".join(one.text for one in some),
            token_ids=sum((one.token_ids for one in some), ()),
            logprobs=None
            if some[0].logprobs is None
            else sum((one.logprobs or () for one in some), ()),
            finish_reason=some[-1].finish_reason,
            error=some[-1].error,
        )
    return joined


def assert_near(
    ours: Sequence[TokenLogprob] | None, expected: Sequence[TokenLogprob] | None
) -> None:
    """Log-probabilities are equal, up to what other batches round."""
    if ours is None or expected is None:
        assert ours is expected
        return
    assert [one.token_id for one in ours] == [one.token_id for one in expected]
    for one, other in zip(ours, expected, strict=True):
        flat = [
            [logprobs.logprob, *(logprob for _, logprob in logprobs.best)]
            for logprobs in (one, other)
        ]
        np.testing.assert_allclose(*flat, rtol=0, atol=NEAR)


def check_joined(increments: Iterable[Increment], expected: Sequence[Completion]) -> None:
    joined = join(increments)
    wanted = {
        (index, sample): one
        for index, done in enumerate(expected)
        for sample, one in enumerate(done.samples or (done,))
    }
    assert joined.keys() == wanted.keys()
    for key, done in wanted.items():
        for name in ("text", "token_ids", "finish_reason", "error"):
            assert getattr(joined[key], name) == getattr(done, name), (key, name)
        assert_near(joined[key].logprobs, done.logprobs)


def interrupt_at(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *steps: int, where: str = "decode"
) -> None:
    """A real SIGINT before each of these decode steps."""
    method, count = getattr(llm.runner, where), [0]

    def kill(step: Any) -> Any:
        for _ in range(steps.count(count[0])):
            os.kill(os.getpid(), signal.SIGINT)
        count[0] += 1
        return method(step)

    monkeypatch.setattr(llm.runner, where, kill)
