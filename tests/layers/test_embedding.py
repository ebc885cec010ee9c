"""Word tables: look-up and logits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from deinfer_jax.layers.embedding import WordTable
from deinfer_jax.layers.parameter import Source, declarations

W, D = 11, 6


def table(dtype: str = "float32") -> tuple[WordTable, np.ndarray]:
    module = WordTable("lm_head", W, D, dtype=jnp.dtype(dtype))
    weight = np.random.default_rng(0).standard_normal((W, D)).astype(np.float32)
    module.weight.set_value(jnp.asarray(weight, dtype))
    return module, weight


def test_look_up() -> None:
    module, weight = table()
    found = module.look_up(jnp.array([3, 0, 10, 3], jnp.int32))
    np.testing.assert_array_equal(np.asarray(found), weight[[3, 0, 10, 3]])


def test_logits() -> None:
    module, weight = table()
    x = np.random.default_rng(1).standard_normal((4, D)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(module.logits(jnp.asarray(x))), x @ weight.T, atol=1e-5)


def test_logits_of_bfloat16_are_not_rounded() -> None:
    module, _ = table("bfloat16")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, D)), jnp.bfloat16)
    found = module.logits(x)
    wide = np.asarray(x, np.float64) @ np.asarray(module.weight[...], np.float64).T
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found), wide, atol=1e-5)


def test_declaration() -> None:
    (found,) = declarations(WordTable("lm_head", W, D, dtype=jnp.dtype("float32")))
    assert found.sources == (Source("lm_head.weight", (W, D), ((0, 0, W),)),)
    assert found.scale is not None
