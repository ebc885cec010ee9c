"""The definition of paged decode attention in plain jnp; also the CPU path."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from deinfer_kernels.precision import einsum_float32

__all__ = ["paged_attention"]


def paged_attention(
    q: Array,  # [B, N, H]
    pool: Array,  # [P, 2, K, S, H]
    block_table: Array,  # [B, M]
    lengths: Array,  # [B]
    *,
    scale: float,
    window: int | None,
) -> Array:  # [B, N, H]
    """See ``api.paged_attention``; every page that the table names is read, used or not."""
    batch, heads, width = q.shape
    kv_heads, page_size = pool.shape[2:4]
    tokens = block_table.shape[1] * page_size

    pages = pool[block_table]  # [B, M, 2, K, S, H]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = einsum_float32("bkgh,bmksh->bkgms", grouped, pages[:, :, 0]).reshape(
        batch, kv_heads, -1, tokens
    )

    position = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    seen = seen[:, None, None, :]  # [B, 1, 1, M·S]

    # An empty row keeps the mask's finite floor everywhere, so its exponentials are 1 and masked to
    # 0: zeros, not NaN.
    floor = jnp.finfo(jnp.float32).min
    scores = jnp.where(seen, scores * scale, floor)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    weights = (weights / total).astype(pool.dtype)
    # What no token sees may be anything, and a weight of 0 would keep a NaN.
    held = seen.reshape(batch, -1, 1, page_size, 1)
    values = jnp.where(held, pages[:, :, 1], jnp.zeros((), pool.dtype))  # [B, M, K, S, H]
    out = einsum_float32(
        "bkgms,bmksh->bkgh",
        weights.reshape(batch, kv_heads, -1, block_table.shape[1], page_size),
        values,
    )
    return out.reshape(batch, heads, width).astype(q.dtype)
