"""Logits of decomposed models against transformers' forward pass of the dense model W = u v."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from tests import tiny

pytest.importorskip("torch", reason="the independent implementation is transformers on torch")

TOKENS = 41  # not a multiple of a page or a chunk
SMALL: dict[str, Any] = dict(max_context=48, max_batch=2)
MIXED = ("separate", "shared", "shared-kv", "dense-q-up", "dense-k-o-down")
# They differ in what no linear sees, and `test_llama.py` has them.
BESIDE = ("tied", "gelu", "rope-linear", "rope-llama3", "rope-yarn", "rope-yarn-mscale")


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    # Two products instead of one, in float32: measured 2e-7 to 7e-7 of the range.
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 3e-6 * np.ptp(theirs)


def decomposed(tmp_path: Path, variant: str, groups: tiny.Groups, layers: int):
    """Directory of the decomposed model, and the torch model it must agree with."""
    model = tiny.make(variant, tmp_path / "dense", num_hidden_layers=layers)
    dst = tmp_path / "low-rank"
    return dst, tiny.decompose(model, tmp_path / "dense", dst, groups)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.full) if v in BESIDE else v for v in tiny.VARIANTS],
)
def test_every_variant_with_another_layout_in_each_layer(tmp_path: Path, variant: str) -> None:
    path, theirs = decomposed(tmp_path, variant, tiny.groups(*MIXED), len(MIXED))
    tokens = tiny.random_tokens(TOKENS)
    with deinfer_jax.load(path, prefill_chunk=16, **SMALL) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


# One layer, so that nothing makes up for anything, and with biases, which stand on u.
@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_every_layout_alone(tmp_path: Path, layout: str) -> None:
    path, theirs = decomposed(tmp_path, "biases", tiny.groups(layout), 1)
    tokens = tiny.random_tokens(TOKENS)
    with deinfer_jax.load(path, **SMALL) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


def test_rank_1(tmp_path: Path) -> None:
    layouts = ("separate", "shared", "dense-k-o-down")
    path, theirs = decomposed(tmp_path, "biases", tiny.groups(*layouts, rank=1), 3)
    tokens = tiny.random_tokens(TOKENS)
    with deinfer_jax.load(path, **SMALL) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


def test_factors_stored_in_bfloat16(tmp_path: Path) -> None:
    model = tiny.make("biases", tmp_path / "dense")
    groups = tiny.groups("shared", "dense-q-up")
    theirs = tiny.decompose(model, tmp_path / "dense", tmp_path / "m", groups, dtype="bfloat16")
    tokens = tiny.random_tokens(TOKENS)
    with deinfer_jax.load(tmp_path / "m", dtype="float32", **SMALL) as llm:
        assert_close(llm.logits(tokens), tiny.torch_logits(theirs, tokens))


def test_greedy_tokens_equal_a_full_forward(tmp_path: Path) -> None:
    path, theirs = decomposed(tmp_path, "qwen3", tiny.groups("shared", "dense-q-up"), 2)
    prompt = tiny.random_tokens(18, seed=5)
    with deinfer_jax.load(path, decode_steps=2, kv_cache="full", **SMALL) as llm:
        (ours,) = deinfer_jax.generate(llm, prompt, max_new_tokens=22, ignore_eos=True)
    sequence = prompt
    for token in ours.token_ids:
        assert token == tiny.torch_logits(theirs, sequence)[-1].argmax()
        sequence = np.append(sequence, np.int32(token))


def test_zeros_fill_up_a_rank_exactly(tmp_path: Path) -> None:
    model = tiny.make("gqa", tmp_path / "dense")
    tokens = tiny.random_tokens(TOKENS)
    logits = []
    # k v have 16 + 16 rows and so 32 singular values; the others have more than 40.
    for rank in (32, 40):
        groups = [([f"model.layers.0.self_attn.{n}_proj" for n in "kv"], rank)]
        path = tmp_path / f"rank-{rank}"
        tiny.decompose(model, tmp_path / "dense", path, groups)
        assert open_checkpoint(path).shapes()["model.layers.0.self_attn.k_v.v.weight"][0] == rank
        with deinfer_jax.load(path, **SMALL) as llm:
            logits.append(llm.logits(tokens))
    # Other shapes may sum in another order.
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-6 * np.ptp(logits[0]))
    assert_close(logits[1], tiny.torch_logits(model, tokens))


class TestRandomWeights:
    def test_factors_have_the_declared_shapes(self, tmp_path: Path) -> None:
        path, _ = decomposed(tmp_path, "biases", tiny.groups("shared", "dense-q-up"), 2)
        config = open_checkpoint(path).config
        with deinfer_jax.load(config, seed=3, **SMALL) as llm:
            layers = llm.runner.weights["layers"]
            shared, mixed = layers[0]["attention"]["qkv"], layers[1]["attention"]["qkv"]
            shapes = {
                "shared v": shared["v"].shape,
                "shared u": shared["u"][0].shape,
                "mixed v": mixed["v"].shape,
                "mixed u": mixed["u"][0].shape,
                "mixed w": mixed["w"].shape,
                "o v": layers[0]["attention"]["o"]["v"].shape,
                "down u": layers[0]["mlp"]["down"]["u"].shape,
            }
            spread = float(np.asarray(shared["v"])[:3].std())
        # 6 query heads and 2 kv heads of 8 on a width of 48; ranks are 3, 11, 19, 27, 35, 43,
        # …, padded to multiples of 8
        assert shapes == {
            "shared v": (8, 48),
            "shared u": (80, 8),
            "mixed v": (40, 48),
            "mixed u": (32, 40),
            "mixed w": (48, 48),
            "o v": (16, 48),
            "down u": (48, 32),
        }
        assert 0.01 < spread < 0.04

    def test_it_generates(self, tmp_path: Path) -> None:
        path, _ = decomposed(tmp_path, "gqa", tiny.groups("shared-kv", "separate"), 2)
        with deinfer_jax.load(open_checkpoint(path).config, **SMALL) as llm:
            (done,) = deinfer_jax.generate(llm, [5, 6, 7], max_new_tokens=4, ignore_eos=True)
        assert len(done.token_ids) == 4
