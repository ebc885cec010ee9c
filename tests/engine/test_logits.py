"""``LLM.logits``."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax import LLM
from tests.engine.helpers import (
    check_idle,
    prompts,
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
