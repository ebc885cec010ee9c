"""Products that accumulate in float32, whatever the operands are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["einsum_float32"]


def einsum_float32(subscripts: str, a: Array, b: Array) -> Array:
    """``jnp.einsum`` of two operands with a float32 result.

    XLA's CPU backend has no product of 16-bit floats with a float32 result, so there the operands
    are widened first; the values are the same: products of 16-bit floats are exact in float32.
    """

    def widened(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32))

    def direct(a: Array, b: Array) -> Any:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype == jnp.float32:
        return direct(a, b)
    return jax.lax.platform_dependent(a, b, cpu=widened, default=direct)
