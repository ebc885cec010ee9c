"""The device arrays of one layer's cache, and how tokens get into them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32

from deinfer_jax.cache.entry import Cacheable
from deinfer_jax.cache.layout import LayerLayout

__all__ = ["LayerPool", "append", "empty_pool", "pool_specs"]


@struct.dataclass
class LayerPool:
    """One layer's pages.

    Attributes:
        full: [P, n, K, S, H], or None where nothing is full.
        latent: [P, S, width], or None where everything is full.
        layout: what is in them.
    """

    full: Any
    latent: Any
    layout: LayerLayout = struct.field(pytree_node=False)

    @property
    def num_pages(self) -> int:
        """P."""
        return (self.full if self.full is not None else self.latent).shape[0]

    @property
    def page_size(self) -> int:
        """S."""
        return self.full.shape[3] if self.full is not None else self.latent.shape[1]


def empty_pool(layout: LayerLayout, num_pages: int, page_size: int, dtype: Any) -> LayerPool:
    """Pages of zeros on the default device."""

    def zeros(shape: tuple[int, ...] | None) -> Array | None:
        return None if shape is None else jnp.zeros(shape, dtype)

    return LayerPool(
        full=zeros(layout.full_shape(num_pages, page_size)),
        latent=zeros(layout.latent_shape(num_pages, page_size)),
        layout=layout,
    )


def pool_specs(layout: LayerLayout, full: PartitionSpec, latent: PartitionSpec) -> LayerPool:
    """How a pool is split over devices, in its own structure."""
    return LayerPool(
        full=full if layout.full_parts else None,
        latent=latent if layout.latent_width else None,
        layout=layout,
    )


def append(
    pool: LayerPool,
    page: Int32[Array, " T"],
    position: Int32[Array, " T"],
    keys: Cacheable,
    values: Cacheable,
    real: Bool[Array, " T"],
) -> LayerPool:
    """Writes one token a row into its page, in the forms that the layout names; rows that are not
    real go past the pool's end, where writes are dropped."""
    layout = pool.layout
    page, place = jnp.where(real, page, pool.num_pages), position % pool.page_size
    full, latent = pool.full, pool.latent
    parts = [
        part.full
        for part, segment in ((keys, layout.keys), (values, layout.values))
        if segment is None
    ]
    if parts:
        rows = jnp.stack(parts, axis=1).astype(full.dtype)  # [T, n, K, H]
        full = full.at[page, :, :, place].set(rows, mode="drop")
    if latent is not None:
        latents = {layout.keys: keys.latent, layout.values: values.latent}
        columns = []
        for segment in layout.segments:
            padding = segment.width - segment.rank
            columns.append(jnp.pad(latents[segment], ((0, 0), (0, padding))))
        rows = jnp.concatenate(columns, axis=1).astype(latent.dtype)  # [T, width]
        latent = latent.at[page, place].set(rows, mode="drop")
    return LayerPool(full=full, latent=latent, layout=layout)
