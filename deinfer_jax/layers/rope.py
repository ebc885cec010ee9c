"""Rotary position embedding (arXiv 2104.09864), half-split ("NeoX") pairs: dimension j turns with j
+ H/2."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deinfer_jax.config import RopeConfig

__all__ = ["Rotary", "rotate"]


class Rotary(nnx.Module):
    """Cosines and sines of a batch of positions; the frequencies are constants of the program."""

    def __init__(self, config: RopeConfig, head_dim: int, max_context: int) -> None:
        freqs, factor = config.frequencies(head_dim, max_context)
        self.frequencies = tuple(map(float, freqs))  # a static attribute must be hashable
        self.attention_factor = factor

    def __call__(
        self, positions: Int32[Array, " T"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T h"]]:
        """cos and sin [T, H/2], float32."""
        freqs = jnp.asarray(self.frequencies, jnp.float32)
        angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def rotate(
    x: Float[Array, "T N H"], rotation: tuple[Float[Array, "T h"], Float[Array, "T h"]]
) -> Float[Array, "T N H"]:
    """x with every pair (j, j + H/2) turned by its position's angle; float32 inside, x's dtype
    out."""
    cos, sin = (part[:, None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
