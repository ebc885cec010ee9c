"""``LLM.logits``, ``LLM.score`` and ``LLM.score_with_greedy``."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax import LLM
from tests.engine.helpers import (
    check_idle,
    prompts,
    run,
)


class TestLogits:
    def test_shape_and_dtype(self, llm: LLM) -> None:
        found = llm.logits([5, 6, 7])
        assert found.shape == (3, 97) and found.dtype == np.float32

    def test_chunks_agree_with_prefixes(self, llm: LLM) -> None:
        whole = llm.logits(list(range(3, 80)))
        np.testing.assert_allclose(whole[:40], llm.logits(list(range(3, 43))), atol=1e-5)

    def test_a_whole_context(self, llm: LLM) -> None:
        assert llm.logits([5] * 128).shape == (128, 97)

    def test_too_long(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="max_context = 128 tokens, got 129"):
            llm.logits([5] * 129)

    def test_empty(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            llm.logits([])

    @pytest.mark.parametrize("word", [-1, 97])
    def test_unknown_word(self, llm: LLM, word: int) -> None:
        with pytest.raises(ValueError, match=rf"from 0 to 96, got \[{word}\]"):
            llm.logits([5, word])

    def test_fractions_are_refused(self, llm: LLM) -> None:
        with pytest.raises((ValueError, TypeError), match="5.7|integer|int"):
            llm.logits(np.array([5.7, 6.0]))

    def test_a_sequence_that_the_cache_does_not_hold(self, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        with pytest.raises(ValueError, match="logits: the cache holds 48 tokens, got 49"):
            small.logits([5] * 49)
        check_idle(small)

    def test_a_sequence_that_fills_the_cache(self, llm: LLM, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        sequence = prompts()[8]
        assert len(sequence) == 48
        np.testing.assert_allclose(small.logits(sequence), llm.logits(sequence), atol=1e-5)


class TestScoreWithGreedy:
    @pytest.fixture
    def sequence(self, llm: LLM) -> list[int]:
        """Half of it is what the model would say, over several chunks."""
        (said,) = run(llm, [prompts()[8]], new=40)
        return [*prompts()[8], *said]

    def test_against_logits(self, llm: LLM, sequence: list[int]) -> None:
        logits = llm.logits(sequence[:-1]).astype(np.float64)
        scores, greedy = llm.score_with_greedy(sequence)
        assert len(sequence) == 88 and llm.runner.buckets.chunk[-1] == 32
        assert scores.dtype == np.float32 and greedy.dtype == np.bool_
        expected = logits[np.arange(87), sequence[1:]] - np.log(np.exp(logits).sum(axis=1))
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        assert greedy.tolist() == (logits.argmax(axis=1) == sequence[1:]).tolist()
        assert 39 <= greedy.sum() < 87  # the first 47 are random, in the others a near-tie may turn

    def test_the_scores_are_those_of_score(self, llm: LLM, sequence: list[int]) -> None:
        assert llm.score(sequence).tolist() == llm.score_with_greedy(sequence)[0].tolist()

    def test_two_tokens(self, llm: LLM) -> None:
        best = int(llm.logits([5])[0].argmax())
        scores, greedy = llm.score_with_greedy([5, best])
        assert scores.shape == (1,) and greedy.tolist() == [True]
        assert llm.score_with_greedy([5, (best + 1) % 97])[1].tolist() == [False]

    def test_of_equals_the_first_is_the_most_likely(self, load_tiny) -> None:
        equal = load_tiny()
        head = equal.runner.weights["head"]
        head["weight"] = jnp.zeros_like(head["weight"])
        scores, greedy = equal.score_with_greedy([5, 0, 1, 96, 0])
        np.testing.assert_allclose(scores, np.full(4, -np.log(97)), rtol=1e-6)
        assert greedy.tolist() == [True, False, False, True]

    def test_the_last_token_takes_no_room(self, llm: LLM) -> None:
        scores, greedy = llm.score_with_greedy([5] * 129)
        assert scores.shape == greedy.shape == (128,)

    def test_too_long(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="score: expected at most max_context = 128 tokens"):
            llm.score_with_greedy([5] * 130)

    def test_one_token(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="score: expected at least two tokens, got one"):
            llm.score_with_greedy([5])
