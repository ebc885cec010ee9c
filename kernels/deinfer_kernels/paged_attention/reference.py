"""The definition of paged decode attention in plain jnp; also the CPU path."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from deinfer_kernels.precision import einsum_float32

__all__ = ["attention_weights", "paged_attention"]


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
    pages = pool[block_table]  # [B, M, 2, K, S, H]
    weights, seen = attention_weights(q, pages[:, :, 0], lengths, scale=scale, window=window)
    # What no token sees may be anything, and a weight of 0 would keep a NaN.
    held = seen[:, :, None, :, None]
    values = jnp.where(held, pages[:, :, 1], jnp.zeros((), pool.dtype))  # [B, M, K, S, H]
    out = einsum_float32("bkgms,bmksh->bkgh", weights.astype(pool.dtype), values)
    return out.reshape(q.shape).astype(q.dtype)


def attention_weights(
    q: Array,  # [B, N, H]
    keys: Array,  # [B, M, K, S, H]
    lengths: Array,  # [B]
    *,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:  # [B, K, N/K, M, S] float32, [B, M, S] bool
    """Softmax of the scores over the positions that a row sees, and which those are; the weights
    of the others, and of a row of length 0, are zero."""
    batch, heads, width = q.shape
    entries, kv_heads, page_size = keys.shape[1:4]
    tokens = entries * page_size
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = einsum_float32("bkgh,bmksh->bkgms", grouped, keys).reshape(batch, kv_heads, -1, tokens)

    position = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    mask = seen[:, None, None, :]  # [B, 1, 1, M·S]

    # An empty row keeps the mask's finite floor everywhere, so its exponentials are 1 and masked to
    # 0: zeros, not NaN.
    floor = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask, scores * scale, floor)
    weights = jnp.where(mask, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    shape = (batch, kv_heads, heads // kv_heads, entries, page_size)
    return (weights / total).reshape(shape), seen.reshape(batch, entries, page_size)
