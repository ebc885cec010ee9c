"""Rotary embedding against the closed form and transformers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax import RopeConfig
from deinfer_jax.layers.rope import Rotary, rotate

T, N, H = 5, 3, 10
POSITIONS = np.array([0, 1, 7, 100, 4095], np.int32)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotated(x: np.ndarray, positions: np.ndarray, config: RopeConfig = RopeConfig()) -> np.ndarray:  # noqa: B008 (frozen)
    rotary = Rotary(config, x.shape[-1], 8192)
    return np.asarray(rotate(jnp.asarray(x), rotary(jnp.asarray(positions))))


def test_complex_multiplication() -> None:
    x = random(T, N, H)
    frequencies = 10000.0 ** (-np.arange(0, H, 2) / H)
    turn = np.exp(1j * POSITIONS[:, None, None] * frequencies)
    pairs = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotated(x, POSITIONS), expected, atol=2e-3)


def test_small_positions_are_exact_to_float32() -> None:
    x, positions = random(3, N, H), np.array([0, 1, 7], np.int32)
    turn = np.exp(1j * positions[:, None, None] * 500.0 ** (-np.arange(0, H, 2) / H))
    pairs = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    ours = rotated(x, positions, RopeConfig(theta=500.0))
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_position_zero_changes_nothing() -> None:
    x = random(2, N, H)
    np.testing.assert_array_equal(rotated(x, np.zeros(2, np.int32)), x)


def test_against_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=N * H, num_attention_heads=N, head_dim=H))
    q, k = random(T, N, H), random(T, N, H, seed=1)
    q_torch, k_torch = (torch.from_numpy(x.transpose(1, 0, 2)[None].copy()) for x in (q, k))
    cos, sin = theirs(q_torch, torch.from_numpy(POSITIONS.astype(np.int64))[None])
    expected = apply_rotary_pos_emb(q_torch, k_torch, cos, sin)
    for x, theirs_out in zip((q, k), expected, strict=True):
        np.testing.assert_allclose(
            rotated(x, POSITIONS), theirs_out[0].numpy().transpose(1, 0, 2), atol=2e-3
        )


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, H), random(1, 1, H, seed=1)

    def score(query: int, key: int) -> float:
        at_query = rotated(q, np.array([query], np.int32))
        at_key = rotated(k, np.array([key], np.int32))
        return float((at_query * at_key).sum())

    assert score(19, 7) == pytest.approx(score(1019, 1007), abs=1e-3)


def test_attention_factor_scales_cos_and_sin() -> None:
    config = RopeConfig(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.5)
    x = random(1, N, H)
    np.testing.assert_allclose(rotated(x, np.zeros(1, np.int32), config), 1.5 * x, rtol=1e-6)


def test_bfloat16_is_rotated_in_float32() -> None:
    x = jnp.asarray(random(T, N, H), jnp.bfloat16)
    rotation = Rotary(RopeConfig(), H, 8192)(jnp.asarray(POSITIONS))
    wide = rotate(x.astype(jnp.float32), rotation)
    ours = rotate(x, rotation)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(wide.astype(jnp.bfloat16)))
