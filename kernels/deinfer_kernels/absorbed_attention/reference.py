"""The definition of decode attention with absorbed values in plain jnp; also the CPU path."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from deinfer_kernels.paged_attention.reference import attention_weights
from deinfer_kernels.precision import einsum_float32

__all__ = ["absorbed_attention"]


def absorbed_attention(
    q: Array,  # [B, N, H]
    keys: Array,  # [P, 1, K, S, H]
    latents: Array,  # [P, S, W]
    block_table: Array,  # [B, M]
    lengths: Array,  # [B]
    *,
    rank: int,
    offset: int,
    scale: float,
    window: int | None,
) -> Array:  # [B, N, R]
    """See ``api.absorbed_attention``; every page that the table names is read, used or not."""
    pages = keys[block_table][:, :, 0]  # [B, M, K, S, H]
    weights, seen = attention_weights(q, pages, lengths, scale=scale, window=window)
    values = latents[block_table][..., offset : offset + rank]  # [B, M, S, R]
    # What no token sees may be anything, and a weight of 0 would keep a NaN.
    values = jnp.where(seen[..., None], values, jnp.zeros((), values.dtype))
    out = einsum_float32("bkgms,bmsr->bkgr", weights.astype(values.dtype), values)
    return out.reshape(*q.shape[:2], rank).astype(q.dtype)
