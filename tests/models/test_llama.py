"""Logits of every variant against transformers, in float32: prefill in one chunk and in several,
and decode."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deinfer_jax
from deinfer_jax.cache.view import DecodeView
from tests import tiny

pytest.importorskip("torch", reason="the independent implementation is transformers on torch")

TOKENS = 41  # not a multiple of a page or a chunk
# What `test_prefill_in_several_chunks` and `test_decode` say of every variant, once more.
FEW = ("gqa", "mistral-window", "qwen2-windows", "qwen3-biases")
A_FEW = pytest.mark.parametrize(
    "checkpoint",
    [v if v in FEW else pytest.param(v, marks=pytest.mark.full) for v in tiny.VARIANTS],
    indirect=True,
)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-4 * np.ptp(theirs)


@pytest.fixture(scope="module", params=list(tiny.VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, tiny.make(request.param, directory)


@A_FEW
def test_prefill_in_one_chunk(checkpoint) -> None:
    directory, theirs = checkpoint
    tokens = tiny.random_tokens(TOKENS)
    with deinfer_jax.load(directory) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


def test_prefill_in_several_chunks(checkpoint) -> None:
    directory, theirs = checkpoint
    tokens = tiny.random_tokens(TOKENS, seed=1)
    with deinfer_jax.load(directory, prefill_chunk=16) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


def test_decode(checkpoint) -> None:
    directory, theirs = checkpoint
    rows = [tiny.random_tokens(length, seed=length) for length in (19, 35)]
    page, steps = 16, 35
    with deinfer_jax.load(directory, page_size=page) as llm:
        graph, weights = llm.runner.graph, llm.runner.weights
        pools = jax.tree.map(jnp.zeros_like, llm.runner.pools)
        tables = jnp.asarray([[5, 3, 9], [2, 4, 0]], jnp.int32)  # scattered on purpose
        step = jax.jit(partial(_decode_logits, graph))
        logits = []
        for position in range(steps):
            tokens = jnp.asarray([row[min(position, len(row) - 1)] for row in rows], jnp.int32)
            active = jnp.asarray([position < len(row) for row in rows])
            view = DecodeView(tables, jnp.full(2, position, jnp.int32), active)
            found, pools = step(weights, tokens, pools, view)
            logits.append(np.asarray(found))
    for index, row in enumerate(rows):
        ours = np.stack([logits[t][index] for t in range(len(row))])
        assert_close(ours, tiny.torch_logits(theirs, row))


def _decode_logits(graph, weights, tokens, pools, view):
    model = nnx.merge(graph, weights)
    x, pools = model(tokens, pools, view)
    return model.logits(x), pools


@pytest.mark.parametrize("chunk", [512, 16])
def test_dynamic_ntk_is_fixed_from_max_context(tmp_path: Path, chunk: int) -> None:
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    theirs = tiny.make("gqa", tmp_path, rope_parameters=rope, max_position_embeddings=24)
    tokens = tiny.random_tokens(TOKENS)
    # transformers stretches for the sequence at hand; ours for max_context: the same where the two
    # are equal.
    with deinfer_jax.load(tmp_path, max_context=TOKENS, prefill_chunk=chunk) as llm:
        expected = tiny.torch_logits(theirs, tokens)
        assert_close(llm.logits(tokens), expected)
        # Decode, with the frequencies of 41 tokens from the first step on.
        (done,) = deinfer_jax.generate(llm, tokens[:-2], max_new_tokens=2, ignore_eos=True)
        sequence = np.append(tokens[:-2], done.token_ids[0]).astype(np.int32)
        assert llm.logits(sequence)[-1].argmax() == done.token_ids[1]


@A_FEW
def test_greedy_tokens_equal_a_full_forward_without_cache(checkpoint) -> None:
    directory, theirs = checkpoint
    prompt = tiny.random_tokens(18, seed=5)
    with deinfer_jax.load(directory, prefill_chunk=16, decode_steps=4) as llm:
        (ours,) = deinfer_jax.generate(llm, prompt, max_new_tokens=22, ignore_eos=True)
    sequence = prompt
    for token in ours.token_ids:
        assert token == tiny.torch_logits(theirs, sequence)[-1].argmax()
        sequence = np.append(sequence, np.int32(token))
