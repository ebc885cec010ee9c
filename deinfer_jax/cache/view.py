"""How a program sees the cache: where new tokens are written, and what they attend to.

A model passes q, k and v to ``view.attend`` and gets the attention's output and the updated pool
back. There are two views: :class:`PrefillView`, a chunk of one sequence, and :class:`DecodeView`,
one token of each of B sequences.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from deinfer_kernels import paged_attention
from deinfer_kernels.precision import einsum_float32

__all__ = ["CacheView", "DecodeView", "LayerPool", "PrefillView", "query_block"]

SCORE_BYTES = 2**28
LayerPool = Array  # full layout: [P, 2, K, S, H]


@runtime_checkable
class CacheView(Protocol):
    """What a model needs of either view."""

    def positions(self, count: int) -> Array:
        """Position of each of the ``count`` tokens in its sequence, int32."""
        ...

    def attend(
        self, pool: LayerPool, q: Array, k: Array, v: Array, *, scale: float, window: int | None
    ) -> tuple[Array, LayerPool]:
        """Writes k and v [T, K, H] (k after RoPE) into the pool and attends with q [T, N, H]."""
        ...


@struct.dataclass
class PrefillView:
    """A chunk of one sequence: tokens at positions ``start`` … ``start + length − 1``, padded to
    the bucket's T.

    Attributes:
        block_table: int32 [M], the sequence's pages from position 0 on, padded with any page.
        start: tokens of the sequence that are in the cache already.
        length: real tokens in the chunk; the rest is padding, is written nowhere and gives garbage
            out.
    """

    block_table: Any
    start: Any
    length: Any

    def positions(self, count: int) -> Int32[Array, " T"]:
        """start, start + 1, …"""
        return self.start + jnp.arange(count, dtype=jnp.int32)

    def attend(
        self,
        pool: LayerPool,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "T N H"], LayerPool]:
        """Each token attends to all pages before it and, causally, to the chunk itself."""
        count = q.shape[0]
        position = self.positions(count)
        real = jnp.arange(count, dtype=jnp.int32) < self.length
        page = self.block_table.at[position // pool.shape[3]].get(mode="clip")
        pool = _append(pool, page, position, k, v, real)
        end = self.start + self.length
        return _attend_chunk(q, pool[self.block_table], position, end, scale, window), pool


@struct.dataclass
class DecodeView:
    """One new token of each sequence.

    Attributes:
        block_table: int32 [B, M], pages of each sequence, padded with any page.
        lengths: int32 [B], tokens in the cache before this one, which is the new token's position.
        active: rows that are in use; the others write nothing and give zeros.
        implementation: of paged attention, see ``deinfer_kernels``.
    """

    block_table: Any
    lengths: Any
    active: Any
    implementation: str | None = struct.field(pytree_node=False, default=None)

    def positions(self, count: int) -> Int32[Array, " B"]:
        """The new tokens' positions."""
        return self.lengths

    def attend(
        self,
        pool: LayerPool,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B N H"], LayerPool]:
        """Each token attends to its own sequence, itself included."""
        entry = (self.lengths // pool.shape[3])[:, None]
        page = jnp.take_along_axis(self.block_table, entry, axis=1, mode="clip")[:, 0]
        pool = _append(pool, page, self.lengths, k, v, self.active)
        out = paged_attention(
            q,
            pool,
            self.block_table,
            jnp.where(self.active, self.lengths + 1, 0),
            scale=scale,
            window=window,
            implementation=self.implementation,
        )
        return out, pool


def _append(
    pool: LayerPool,  # [P, 2, K, S, H]
    page: Array,  # [T]
    position: Array,  # [T]
    k: Array,  # [T, K, H]
    v: Array,  # [T, K, H]
    real: Array,  # [T]
) -> LayerPool:
    """Writes one token a row into its page; rows that are not real go past the pool's end, where
    writes are dropped."""
    page = jnp.where(real, page, pool.shape[0])
    rows = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [T, 2, K, H]
    return pool.at[page, :, :, position % pool.shape[3]].set(rows, mode="drop")


def query_block(heads: int, context: int) -> int:
    """Queries of a chunk that attend together: a power of two whose float32 scores fit in 256 MB,
    but at least 16."""
    block = 16
    while 2 * block * heads * context * 4 <= SCORE_BYTES:
        block *= 2
    return block


def _attend_chunk(
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
