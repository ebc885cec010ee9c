"""Scheduling on a GPU: shared and recomputed pages hold what they should, and the host does not
wait for the device where it need not."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import pytest

import deinfer_jax
from deinfer_jax.engine.request import Request, Sampling
from tests.engine.helpers import check_idle, load
from tests.engine.test_under_pressure import PAGE_BYTES, cases, crowd
from tests.gpu.test_generate import SMALL

REQUESTS = 200


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_requests_under_pressure_get_what_they_get_alone(decode_steps: int) -> None:
    options: dict[str, Any] = dict(dtype="float32", page_size=16, decode_steps=decode_steps)
    with (
        load(**options) as llm,
        load(**options, cache_bytes=10 * PAGE_BYTES) as small,
    ):
        alone = [
            deinfer_jax.generate(llm, case.prompt, **case.options)[0] for case in cases(REQUESTS)
        ]
        assert small.core.ahead == 1
        near = crowd(small, llm, alone, seed=0)
        assert small.core.scheduler.preemptions > 5
        assert near <= 2


def test_samples_share_their_prompt() -> None:
    prompt = [5 + index % 50 for index in range(90)]
    setting: dict[str, Any] = dict(temperature=1.0, seed=3, max_new_tokens=12, ignore_eos=True)
    with load(dtype="float32", page_size=16, prefix_sharing=False) as llm:
        (expected,) = deinfer_jax.generate(llm, prompt, n=4, **setting)
    with load(dtype="float32", page_size=16) as llm:
        (done,) = deinfer_jax.generate(llm, prompt, n=4, **setting)
        (again,) = deinfer_jax.generate(llm, prompt, n=4, **setting)
        check_idle(llm)
    ids = [sample.token_ids for sample in expected.samples]
    assert len(set(ids)) == 4
    assert [sample.token_ids for sample in done.samples] == ids
    assert [sample.token_ids for sample in again.samples] == ids


def waiting_share(setting: dict[str, Any], **options: Any) -> float:
    """How much of a decode dispatch's time the host spends in the call of its program."""
    # A step of over 1 ms, several times what launching two layers takes.
    config = replace(SMALL, vocab_size=128256, hidden_size=8192, intermediate_size=32768)
    with deinfer_jax.load(
        config, max_batch=64, decode_steps=8, prefix_sharing=False, **options
    ) as llm:
        core = llm.core
        requests = [Request([5, 6], Sampling(max_new_tokens=200, **setting)) for _ in range(64)]
        core.submit(requests)
        while len(requests[-1].generated) < 64:  # the graph is recorded in the first calls
            core.advance()
        while core._in_flight:
            core._read(*core._in_flight.popleft())
        step = core.scheduler.schedule()
        assert step is not None and step.decode is not None
        jax.block_until_ready(llm.runner.state)
        started = time.perf_counter()
        drawn = llm.runner.decode(step.decode)
        called = time.perf_counter()
        drawn.tokens.block_until_ready()
        done = time.perf_counter()
    return (called - started) / (done - started)


@pytest.mark.parametrize(
    "setting",
    [{}, dict(temperature=1.0), dict(temperature=1.0, top_p=0.9), dict(logprobs=5)],
    ids=["greedy", "sampled", "filtered", "logprobs"],
)
def test_the_call_of_a_decode_program_does_not_wait_for_it(setting: dict[str, Any]) -> None:
    assert waiting_share(setting) < 0.5
