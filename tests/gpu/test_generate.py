"""The whole path on a GPU: values in float32 against transformers on the CPU, memory, and
bfloat16."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import ModelConfig, OutOfDeviceMemory
from tests import tiny

pytest.importorskip("torch", reason="the independent implementation is transformers on torch")

HUGE = ModelConfig(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
)
SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position=1024,
    dtype="bfloat16",
)


def in_use() -> int:
    return (jax.devices()[0].memory_stats() or {})["bytes_in_use"]


@pytest.mark.parametrize("variant", ["gqa", "mistral-window", "qwen2", "qwen3-biases"])
def test_logits_equal_transformers_in_float32(variant: str, tmp_path: Path) -> None:
    theirs = tiny.make(variant, tmp_path)
    tokens = tiny.random_tokens(75)
    expected = tiny.torch_logits(theirs, tokens)
    with deinfer_jax.load(tmp_path, dtype="float32", prefill_chunk=32, page_size=16) as llm:
        assert np.abs(llm.logits(tokens) - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_greedy_tokens_equal_transformers_in_float32(tmp_path: Path, decode_steps: int) -> None:
    theirs = tiny.make("gqa", tmp_path)
    prompts = [tiny.random_tokens(count, seed=count) for count in (5, 18, 33)]
    with deinfer_jax.load(tmp_path, dtype="float32", decode_steps=decode_steps) as llm:
        done = deinfer_jax.generate(
            llm, [prompt.tolist() for prompt in prompts], max_new_tokens=21, ignore_eos=True
        )
    for prompt, ours in zip(prompts, done, strict=True):
        sequence = prompt
        for token in ours.token_ids:
            assert token == tiny.torch_logits(theirs, sequence)[-1].argmax()
            sequence = np.append(sequence, np.int32(token))


def test_end_of_sequence_while_a_step_is_in_flight(tmp_path: Path) -> None:
    tiny.make("gqa", tmp_path)
    prompts = [tiny.random_tokens(9, seed=seed).tolist() for seed in range(7)]
    with deinfer_jax.load(tmp_path, dtype="float32", max_batch=2) as llm:
        free = deinfer_jax.generate(llm, prompts, max_new_tokens=40, ignore_eos=True)
        ends = [list(completion.token_ids)[11] for completion in free]
        done = deinfer_jax.generate(llm, prompts, max_new_tokens=40, stop_token_ids=ends)
        assert llm.core.scheduler.allocator.num_free == llm.runner.num_pages
    for short, long in zip(done, free, strict=True):
        cut = next((i for i, token in enumerate(long.token_ids) if token in {*ends, 2}), 39) + 1
        assert short.token_ids == long.token_ids[:cut]


def test_bfloat16_is_the_default_and_close_to_float32() -> None:
    tokens = tiny.random_tokens(64, vocab_size=512)
    with deinfer_jax.load(SMALL) as llm:
        assert llm.cache_layout.dtype == "bfloat16"
        rounded = llm.logits(tokens)
    with deinfer_jax.load(SMALL, dtype="float32") as llm:
        exact = llm.logits(tokens)
    # The two draw different random numbers for the weights, so only the scale is comparable.
    assert np.isfinite(rounded).all() and 0.5 < np.std(rounded) / np.std(exact) < 2


def test_close_gives_the_memory_back() -> None:
    before = in_use()
    llm = deinfer_jax.load(SMALL)
    assert in_use() > before
    llm.close()
    assert in_use() == before


def test_a_model_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"weights 8\d\d\.\d+ GB .* cache .* temporaries"):
        deinfer_jax.load(HUGE)


def test_a_cache_that_does_not_fit_says_which_batch_would() -> None:
    before = in_use()
    with pytest.raises(OutOfDeviceMemory, match=r"enough for a batch of [1-9]\d*"):
        deinfer_jax.load(SMALL, max_batch=10**7, cache_bytes=10**12)
    assert in_use() == before
