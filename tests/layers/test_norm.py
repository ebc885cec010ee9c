"""RMSNorm against float64 and torch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.layers.norm import RMSNorm
from deinfer_jax.layers.parameter import Source, declarations

WIDTH, EPS = 13, 1e-3


def norm(weight: np.ndarray, eps: float = EPS, dtype: str = "float32") -> RMSNorm:
    module = RMSNorm("model.norm", len(weight), eps, dtype=jnp.dtype(dtype))
    module.weight.set_value(jnp.asarray(weight, dtype))
    return module


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, WIDTH), (3, 4, WIDTH)])
def test_against_float64(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(WIDTH, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(np.asarray(norm(weight)(jnp.asarray(x))), expected, atol=1e-5)


def test_bfloat16_against_torch() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(WIDTH, eps=EPS).to(torch.bfloat16)
    weight, x = random(WIDTH, seed=1), random(7, WIDTH)
    theirs.weight.data = torch.from_numpy(weight).to(torch.bfloat16)
    expected = theirs(torch.from_numpy(x).to(torch.bfloat16)).float().detach().numpy()
    ours = norm(weight, dtype="bfloat16")(jnp.asarray(x, jnp.bfloat16))
    assert ours.dtype == jnp.bfloat16
    # Equal but for single roundings of the statistics' last bit.
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=2**-7)


def test_epsilon_counts_for_small_inputs() -> None:
    x = np.full((1, WIDTH), 1e-3, np.float32)
    ours = np.asarray(norm(np.ones(WIDTH), eps=1e-2)(jnp.asarray(x)))
    np.testing.assert_allclose(ours, x / np.sqrt(1e-6 + 1e-2), rtol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert not np.asarray(norm(np.ones(WIDTH))(jnp.zeros((2, WIDTH)))).any()


def test_large_bfloat16_values_do_not_overflow() -> None:
    x = jnp.full((1, WIDTH), 1e18, jnp.bfloat16)
    ours = norm(np.ones(WIDTH), dtype="bfloat16")(x)
    np.testing.assert_allclose(np.asarray(ours, np.float32), 1.0, rtol=1e-2)


def test_declaration() -> None:
    module = RMSNorm("model.norm", WIDTH, EPS, dtype=jnp.dtype("bfloat16"))
    (found,) = declarations(module)
    assert found.path == ("weight",)
    assert (found.shape, found.dtype) == ((WIDTH,), jnp.dtype("bfloat16"))
    assert found.sources == (Source("model.norm.weight", (WIDTH,), ((0, 0, WIDTH),)),)
    assert found.scale is None  # starts at ones
