"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deinfer_jax.layers.parameter import Source, parameter

__all__ = ["RMSNorm"]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + ε) · w over the last axis; the statistics are float32, the product with w
    is in x's dtype."""

    def __init__(self, name: str, width: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = parameter([Source(f"{name}.weight", 0, (width,))], dtype, scale=None)

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The normalised x, in x's dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        weight = self.weight[...]
        return normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)
