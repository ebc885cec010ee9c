"""Logits that are not numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM
from deinfer_jax.engine.request import Request, Sampling
from tests.engine.helpers import (
    GREEDY,
    SAMPLED,
    Ending,
    check_idle,
    plant_nan,
    prompts,
    run,
)


class TestNotANumber:
    def test_only_that_request_ends_with_an_error(self, broken: LLM, bad_word: int) -> None:
        everything = [[5, 6], [5, bad_word, 6], [8, 9, 10]]
        done = deinfer_jax.generate(broken, everything, max_new_tokens=9)
        assert [one.finish_reason == "error" for one in done] == [False, True, False]

    def test_the_error_says_where(self, broken: LLM, bad_word: int) -> None:
        (done,) = deinfer_jax.generate(broken, [5, bad_word, 6], max_new_tokens=9)
        assert done.token_ids == ()
        assert done.error is not None and "position 3" in done.error
        assert done.timing.ttft_s is None and done.timing.itl_s is None

    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_neighbours_are_untouched(
        self, llm: LLM, broken: LLM, bad_word: int, setting: dict[str, Any]
    ) -> None:
        bad, good = [5, bad_word, 6] * 10, prompts()
        found = run(broken, [bad, *good[:2], bad, *good[2:]], **setting)
        assert [found[0], found[3]] == [(), ()]
        assert [*found[1:3], *found[4:]] == run(llm, good, **setting)

    def test_pages_are_clean_for_the_next(self, llm: LLM, broken: LLM, bad_word: int) -> None:
        deinfer_jax.generate(broken, [[bad_word] * 100] * 3, max_new_tokens=9)
        check_idle(broken)
        assert run(broken, prompts()) == run(llm, prompts())

    def test_pages_are_clean_after_logits(self, llm: LLM, broken: LLM, bad_word: int) -> None:
        assert np.isnan(broken.logits([bad_word] * 100)).any()
        assert run(broken, prompts()) == run(llm, prompts())

    def test_pages_are_clean_after_an_interrupted_run(
        self, llm: LLM, broken: LLM, bad_word: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken.core.ahead = 1  # the broken prompt is on the device when the interrupt comes

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        requests = [Request(p, Sampling(max_new_tokens=9)) for p in ([5], [bad_word] * 100)]
        broken.core.submit(requests)
        with monkeypatch.context() as patch:
            patch.setattr(broken.core, "_take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(10):
                    broken.core.advance()
        broken.core.cancel(requests)
        broken.core.settle()
        check_idle(broken)
        assert run(broken, prompts()) == run(llm, prompts())

    @pytest.mark.parametrize("steps_and_ahead", [(4, 0), (1, 1)], ids=str)
    def test_pages_are_clean_after_an_end_that_breaks(
        self, llm: LLM, load_tiny, ending: Ending, steps_and_ahead: tuple[int, int]
    ) -> None:
        # The device runs the end token before the host knows that it was one.
        other = load_tiny(max_batch=3, decode_steps=steps_and_ahead[0])
        other.core.ahead = steps_and_ahead[1]
        plant_nan(other, ending.word)
        ((*_, last),) = run(other, ending.prompt, stop_token_ids=[ending.word])
        assert last == ending.word
        assert run(other, ending.other) == run(llm, ending.other)

    @pytest.mark.parametrize("steps_and_ahead", [(1, 0), (4, 0), (1, 1)], ids=str)
    def test_a_word_that_breaks_the_continuation(
        self, load_tiny, ending: Ending, steps_and_ahead: tuple[int, int]
    ) -> None:
        other = load_tiny(max_batch=3, decode_steps=steps_and_ahead[0])
        other.core.ahead = steps_and_ahead[1]
        plant_nan(other, ending.word)
        (done,) = deinfer_jax.generate(other, ending.prompt, max_new_tokens=12, ignore_eos=True)
        # It is still drawn itself; the token after it cannot be.
        assert (done.finish_reason, done.token_ids) == ("error", ending.ids[:4])
        assert done.error is not None and f"position {len(ending.prompt) + 4}" in done.error

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_what_the_cache_held_before_does_not_matter(
        self, llm: LLM, together, value: float, setting: dict[str, Any]
    ) -> None:
        logits = llm.logits(prompts()[9])
        runner = llm.runner
        runner.pools = jax.tree.map(lambda pool: jnp.full_like(pool, value), runner.pools)
        llm.core.scheduler.restart([])  # or pages of earlier runs would be found again
        assert run(llm, prompts(), **setting) == together[str(setting)]
        runner.pools = jax.tree.map(lambda pool: jnp.full_like(pool, value), runner.pools)
        np.testing.assert_array_equal(llm.logits(prompts()[9]), logits)

    def test_all_weights(self, load_tiny) -> None:
        llm = load_tiny(max_batch=2)
        llm.runner.weights["norm"]["weight"] = llm.runner.weights["norm"]["weight"] * jnp.nan
        done = deinfer_jax.generate(llm, prompts(), max_new_tokens=3)
        assert {one.finish_reason for one in done} == {"error"}
        check_idle(llm)
