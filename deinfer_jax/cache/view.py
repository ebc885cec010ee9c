"""How a program sees the cache: where new tokens are written, and what they attend to.

A model passes q and its keys and values, in every form that may be cached, to ``view.attend`` and
gets the attention's output and the updated pool back; which forms are written and read is the
pool's layout's business. There are two views: :class:`PrefillView`, a chunk of one sequence, and
:class:`DecodeView`, one token of each of B sequences.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from deinfer_jax.cache.chunk import attend_chunk
from deinfer_jax.cache.entry import Cacheable
from deinfer_jax.cache.layout import LayerLayout
from deinfer_jax.cache.pool import LayerPool, append
from deinfer_jax.cache.preparation import Preparation
from deinfer_kernels import absorbed_attention, paged_attention, paged_compact

__all__ = ["CacheView", "DecodeView", "PrefillView"]


@runtime_checkable
class CacheView(Protocol):
    """What a model needs of either view."""

    def positions(self, count: int) -> Array:
        """Position of each of the ``count`` tokens in its sequence, int32."""
        ...

    def attend(
        self,
        pool: LayerPool,
        q: Array,
        keys: Cacheable,
        values: Cacheable,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Array, LayerPool]:
        """Writes keys and values of T tokens into the pool and attends with q [T, N, H]."""
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
        implementation: of the ops, see ``deinfer_kernels``.
    """

    block_table: Any
    start: Any
    length: Any
    implementation: str | None = struct.field(pytree_node=False, default=None)

    def positions(self, count: int) -> Int32[Array, " T"]:
        """start, start + 1, …"""
        return self.start + jnp.arange(count, dtype=jnp.int32)

    def attend(
        self,
        pool: LayerPool,
        q: Float[Array, "T N H"],
        keys: Cacheable,
        values: Cacheable,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "T N H"], LayerPool]:
        """Each token attends to all pages before it and, causally, to the chunk itself."""
        count = q.shape[0]
        position = self.positions(count)
        real = jnp.arange(count, dtype=jnp.int32) < self.length
        page = self.block_table.at[position // pool.page_size].get(mode="clip")
        pool = append(pool, page, position, keys, values, real)
        end = self.start + self.length
        return attend_chunk(q, self._pages(pool, keys, values), position, end, scale, window), pool

    def _pages(self, pool: LayerPool, keys: Cacheable, values: Cacheable) -> Array:
        """The sequence's pages as full keys and values [M, 2, K, S, H].

        Values are rebuilt rather than absorbed: that is one product with u for the context, 2·R·K·H
        operations a token, where T queries attending to latents would take 2·T·N·(R − H) more.
        """
        table, layout = self.block_table, pool.layout
        if layout.full_parts == 2:
            return pool.full[table]
        full = None if pool.full is None else pool.full[table]
        latent = pool.latent[table]
        begins = jnp.arange(table.shape[0], dtype=jnp.int32) * pool.page_size
        return _full_pages(full, latent, begins, layout, keys, values, self.implementation)


@struct.dataclass
class DecodeView:
    """One new token of each sequence.

    Attributes:
        block_table: int32 [B, M], pages of each sequence, padded with any page.
        lengths: int32 [B], tokens in the cache before this one, which is the new token's position.
        active: rows that are in use; the others write nothing and give zeros.
        preparation: of layers whose keys are latent, else None.
        implementation: of the ops, see ``deinfer_kernels``.
    """

    block_table: Any
    lengths: Any
    active: Any
    preparation: Preparation | None = None
    implementation: str | None = struct.field(pytree_node=False, default=None)

    def positions(self, count: int) -> Int32[Array, " B"]:
        """The new tokens' positions."""
        return self.lengths

    def attend(
        self,
        pool: LayerPool,
        q: Float[Array, "B N H"],
        keys: Cacheable,
        values: Cacheable,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Float[Array, "B N H"], LayerPool]:
        """Each token attends to its own sequence, itself included."""
        entry = (self.lengths // pool.page_size)[:, None]
        page = jnp.take_along_axis(self.block_table, entry, axis=1, mode="clip")[:, 0]
        pool = append(pool, page, self.lengths, keys, values, self.active)
        table, full, latent = self.block_table, pool.full, pool.latent
        if pool.layout.keys is not None:
            table, full, latent = self._compacted(pool, keys, values)
        lengths = jnp.where(self.active, self.lengths + 1, 0)
        options: dict[str, Any] = dict(
            scale=scale, window=window, implementation=self.implementation
        )
        segment = pool.layout.values
        if segment is None or not pool.layout.absorbs_values:
            return paged_attention(q, full, table, lengths, **options), pool
        context = absorbed_attention(
            q,
            full,
            latent,
            table,
            lengths,
            rank=segment.rank,
            offset=segment.offset,
            **options,
        )
        assert values.rebuild is not None
        out = values.rebuild.absorbed(context)
        # The bias is right for weights that sum to 1, not for a row that attends to nothing.
        return jnp.where(self.active[:, None, None], out, jnp.zeros((), out.dtype)), pool

    def _compacted(
        self, pool: LayerPool, keys: Cacheable, values: Cacheable
    ) -> tuple[Array, Array, Array]:
        """The batch's live pages side by side: their table [B, M], full keys and, unless they are
        absorbed, values [C, 1 or 2, K, S, H], and latents [C, S, width].

        Anew in every step: each has one token more, and the pages of all steps are live from the
        first on.
        """
        prepared, layout = self.preparation, pool.layout
        assert prepared is not None, "latent keys need the host's preparation"
        copies = prepared.copies
        latent = paged_compact(pool.latent, copies, implementation=self.implementation)
        full = pool.full
        if full is not None:
            rows = full.reshape(full.shape[0], -1, full.shape[-1])  # [P, K·S, H]
            full = paged_compact(rows, copies, implementation=self.implementation)
            full = full.reshape(-1, *pool.full.shape[1:])
        full = _full_pages(
            full,
            latent,
            prepared.positions,
            layout,
            keys,
            None if layout.absorbs_values else values,
            self.implementation,
        )
        return prepared.table, full, latent


def _full_pages(
    full: Array | None,  # [C, n, K, S, H]
    latent: Array,  # [C, S, width]
    positions: Array,  # [C], of the first token of each page
    layout: LayerLayout,
    keys: Cacheable,
    values: Cacheable | None,
    implementation: str | None,
) -> Array:  # [C, 2, K, S, H], or [C, 1, K, S, H] without values
    """Pages with what is cached in full as it is and the rest rebuilt from latents."""
    found, next_full = [], 0
    for part, segment in ((keys, layout.keys), (values, layout.values)):
        if segment is None:
            assert full is not None
            found.append(full[:, next_full])
            next_full += 1
        elif part is not None:
            assert part.rebuild is not None
            rebuilt = part.rebuild.heads(latent, segment, positions, implementation=implementation)
            found.append(rebuilt)
    return jnp.stack(found, axis=1)
