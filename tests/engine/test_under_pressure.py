"""Requests that crowd each other out of a small cache get what each gets alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion
from deinfer_jax.engine.request import Request, Sampling
from deinfer_jax.engine.sampler import gumbel_noise, request_key
from tests.engine.helpers import check_idle, load

REQUESTS = (200, pytest.param(1000, marks=pytest.mark.full))
PREEMPTIONS = {200: 5, 1000: 50}  # of so many requests, at least
NEAR = 1e-5  # of the range of the logits: where two words are so close, rounding decides
STEMS = 5
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Case:
    """A request: a prompt and how it is continued."""

    prompt: list[int]
    options: dict[str, Any]


def cases(count: int) -> list[Case]:
    """Prompts of 1 to 80 tokens, three in four of which begin with one of a few stems; equal ones
    too; greedy, sampled and filtered."""
    rng = np.random.default_rng(7)
    stems = [rng.integers(3, 97, length).tolist() for length in (5, 16, 33, 48, 60)]
    found: list[Case] = []
    for index in range(count):
        stem = stems[rng.integers(STEMS)] if rng.random() < 0.75 else []
        tail = rng.integers(3, 97, rng.integers(1, 20)).tolist()
        prompt = stem if stem and rng.random() < 0.2 else [*stem, *tail]
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 40))}
        if index % 3:
            options |= {"temperature": 1.0, "seed": int(rng.integers(5))}
        if index % 3 == 2:
            options |= {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
        found.append(Case(prompt, options))
    return found


class TestExactlyAsAlone:
    """Under preemption, sharing, chunking and whatever comes along."""

    @pytest.fixture(scope="class")
    @classmethod
    def small(cls):
        """Four slots and ten pages: the longest request takes eight. Warmed up, so that the guard
        would see a program that nobody thought of."""
        with load(cache_bytes=10 * PAGE_BYTES) as llm:
            llm.warm_up(progress=False)
            assert llm.runner.num_pages == 10
            yield llm

    @pytest.fixture(scope="class", params=REQUESTS)
    @classmethod
    def alone(cls, request: pytest.FixtureRequest, llm: LLM) -> list[Completion]:
        work = cases(request.param)
        return [deinfer_jax.generate(llm, case.prompt, **case.options)[0] for case in work]

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_many_requests(
        self,
        small: LLM,
        llm: LLM,
        alone: list[Completion],
        ahead: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(small.core, "ahead", ahead)
        preempted = small.core.scheduler.preemptions
        near = crowd(small, llm, alone, seed=ahead)
        assert small.core.scheduler.preemptions - preempted > PREEMPTIONS[len(alone)]
        assert near <= 5


def crowd(small: LLM, llm: LLM, alone: list[Completion], seed: int) -> int:
    """Runs as many cases as are in ``alone`` together in ``small``, a few more every step, and
    compares them; returns how many differ, all at near-ties."""
    work = cases(len(alone))
    engine = deinfer_jax.Engine(small)
    indices: list[int] = []
    rng = np.random.default_rng(seed)
    while len(indices) < len(work) or engine.unfinished:
        for case in work[len(indices) : len(indices) + int(rng.integers(4))]:
            indices.append(engine.add(case.prompt, **case.options))
        engine.step()
        small.core.scheduler.check_integrity()
    check_idle(small)

    near = 0
    for index, case, expected in zip(indices, work, alone, strict=True):
        done = engine.result(index)
        assert done.error is None
        if done.token_ids != expected.token_ids:
            assert_near_tie(llm, case, done.token_ids, expected.token_ids)
            near += 1
        else:
            assert done.finish_reason == expected.finish_reason
    print(f"{near} of {len(work)} requests differ, at near-ties")
    return near


def assert_near_tie(llm: LLM, case: Case, ours: tuple[int, ...], alone: tuple[int, ...]) -> None:
    """At the first difference, the two words' noisy logits are within rounding of each other."""
    at = next(i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b)
    logits = llm.logits([*case.prompt, *ours[:at]])[-1].astype(np.float64)
    temperature = case.options.get("temperature", 0.0)
    noisy = logits / (temperature or 1.0)
    if temperature:
        noisy = noisy + noise(case, len(case.prompt) + at, len(logits))
    gap = abs(noisy[ours[at]] - noisy[alone[at]])
    assert gap <= NEAR * np.ptp(logits), f"token {at}: {gap} of {np.ptp(logits)}"


def noise(case: Case, position: int, words: int) -> np.ndarray:
    """Gumbel noise of every word, float64 of what the sampler draws."""
    request = Request(case.prompt, Sampling(max_new_tokens=1, seed=case.options["seed"]))
    keys = request_key(request.key_words)[None]
    places, numbers = jnp.array([position], jnp.int32), jnp.arange(words, dtype=jnp.uint32)
    found = gumbel_noise(keys, places, numbers)
    return np.asarray(found[0], np.float64)
