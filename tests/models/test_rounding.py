"""How much a row's logits depend on the batch that it is decoded in: rounding, and no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deinfer_jax
from deinfer_jax import LLM, ModelConfig
from deinfer_jax.cache.view import DecodeView

PAGE, PAGES = 16, 300
STEPS = 6
BUCKETS = [(4, 8), (8, 8), (2, 32), (8, 32)]  # rows and pages; all against 2 rows of 8 pages
BOUND = 1e-5  # of the range of the logits

CONFIGS = {
    "grouped": ModelConfig(
        vocab_size=499,
        hidden_size=192,
        intermediate_size=512,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_position=512,
    ),
    "tiny": ModelConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
    ),
    "windows": ModelConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=6,
        num_kv_heads=6,
        head_dim=16,
        max_position=512,
        qk_norm=True,
        qkv_bias=True,
        windows=(None, 24, None),
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def llm(request: pytest.FixtureRequest):
    with deinfer_jax.load(CONFIGS[request.param], max_batch=2, page_size=PAGE, seed=5) as llm:
        # Random weights are small; larger ones make attention sharp and logits varied.
        scale = 4.0 if request.param != "tiny" else 8.0
        weights = jax.tree.map(lambda w: scale * w if w.ndim > 1 else w, llm.runner.weights)
        llm.runner.weights = weights
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[int, np.ndarray]:
    return {tokens: row_logits(llm, 2, 8, tokens) for tokens in (1, 37, 100)}


def row_logits(llm: LLM, rows: int, pages: int, tokens: int) -> np.ndarray:
    """Logits [STEPS, W] of row 0, which has ``tokens`` tokens in the cache at first, beside rows of
    other sequences, up to as many tokens as the pages hold."""
    rng = np.random.default_rng(0)

    def random_pages(pool: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal((PAGES, *pool.shape[1:])), jnp.float32)

    pools = jax.tree.map(random_pages, llm.runner.pools)
    words = rng.integers(3, llm.config.vocab_size, (STEPS, 8)).astype(np.int32)
    # Row 0 has the same pages everywhere; the others differ by bucket.
    tables = 8 + np.random.default_rng(pages).permutation(PAGES - 8)[: rows * pages]
    tables = tables.reshape(rows, pages).astype(np.int32)
    tables[0] = np.resize([3, 0, 5, 1, 7, 2, 6, 4], pages)
    lengths = np.random.default_rng(rows).integers(0, pages * PAGE - STEPS, rows).astype(np.int32)
    lengths[0], lengths[-1] = tokens, pages * PAGE - STEPS
    step: Any = jax.jit(partial(_decode_logits, llm.runner.graph))
    found = []
    for index in range(STEPS):
        view = DecodeView(
            jnp.asarray(tables), jnp.asarray(lengths + np.int32(index)), jnp.ones(rows, bool)
        )
        word = jnp.asarray(words[index, :rows])
        logits, pools = step(llm.runner.weights, word, pools, view)
        found.append(np.asarray(logits)[0])
    return np.stack(found)


def _decode_logits(graph, weights, tokens, pools, view):
    model = nnx.merge(graph, weights)
    x, pools = model(tokens, pools, view)
    return model.logits(x), pools


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the range of the logits of each token."""
    return float((np.abs(found - expected).max(axis=1) / np.ptp(expected, axis=1)).max())


@pytest.mark.parametrize("tokens", [1, 37, 100])
@pytest.mark.parametrize(("rows", "pages"), BUCKETS)
def test_logits_in_other_buckets_differ_by_rounding(
    llm: LLM, alone: dict[int, np.ndarray], rows: int, pages: int, tokens: int
) -> None:
    found = row_logits(llm, rows, pages, tokens)
    assert largest_difference(found, alone[tokens]) <= BOUND


def test_logits_are_varied(llm: LLM, alone: dict[int, np.ndarray]) -> None:
    # Otherwise the bound would say little: other words and other contexts differ by far more.
    logits = alone[37]
    for other in (np.roll(logits, 1, axis=0), alone[1], alone[100]):
        assert largest_difference(other, logits) > 0.05
