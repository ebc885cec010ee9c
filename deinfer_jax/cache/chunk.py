"""Attention of a prompt chunk over gathered pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from deinfer_kernels.precision import einsum_float32

__all__ = ["attend_chunk", "query_block"]

SCORE_BYTES = 2**28


def query_block(heads: int, context: int) -> int:
    """Queries of a chunk that attend together: a power of two whose float32 scores fit in 256 MB,
    but at least 16."""
    block = 16
    while 2 * block * heads * context * 4 <= SCORE_BYTES:
        block *= 2
    return block


def attend_chunk(
    q: Array,  # [T, N, H]
    pages: Array,  # [M, 2, K, S, H]
    position: Array,  # [T]
    end: Array,  # (), tokens of the sequence in the cache
    scale: float,
    window: int | None,
) -> Array:  # [T, N, H]
    """Attention of a chunk over gathered pages, in blocks of queries whose scores are bounded.

    XLA's path on every platform for now; not an op of ``deinfer_kernels``, since what replaces it
    on a GPU is cuDNN's attention.
    """
    heads, width = q.shape[1:]
    kv_heads = pages.shape[2]
    kv = pages.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, width)  # [2, K, M·S, H]
    context = jnp.arange(kv.shape[2], dtype=jnp.int32)
    # What lies behind the end is somebody else's and may be NaN, which a weight of 0 would keep.
    values = jnp.where((context < end)[None, :, None], kv[1], jnp.zeros((), kv.dtype))

    def block(some: tuple[Array, Array]) -> Array:
        q, position = some
        grouped = q.reshape(q.shape[0], kv_heads, heads // kv_heads, width)
        scores = einsum_float32("tkgh,kch->kgtc", grouped, kv[0])
        seen = context[None, :] <= position[:, None]
        if window is not None:
            seen &= context[None, :] > position[:, None] - window
        scores = jnp.where(seen[None, None], scores * scale, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(kv.dtype)
        return einsum_float32("kgtc,kch->tkgh", weights, values).reshape(q.shape).astype(q.dtype)

    count, rows = q.shape[0], query_block(heads, kv.shape[2])
    if count <= rows:
        return block((q, position))
    blocks = -(-count // rows)
    padding = blocks * rows - count
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(blocks, rows, heads, width)
    position = jnp.pad(position, (0, padding)).reshape(blocks, rows)
    return jax.lax.map(block, (q, position)).reshape(-1, heads, width)[:count]
