"""The definition of page compaction in plain jnp; also the CPU path."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

__all__ = ["paged_compact", "sources"]


def paged_compact(
    pool: Array,  # [P, S, W]
    copies: Array,  # [C, 3]
) -> Array:  # [C, S, W]
    """See ``api.paged_compact``; pages behind the last run are zeros."""
    return pool.at[sources(copies, pool.shape[0])].get(mode="fill", fill_value=0)


def sources(copies: Array, none: int) -> Array:  # [C, 3] -> [C]
    """The pool's page that each page of the buffer is a copy of; ``none`` behind the last run.

    Example: runs (7, 2, 0) and (3, 1, 2) of a buffer of four pages give 7, 8, 3, none.
    """
    first, count, destination = copies[:, 0], copies[:, 1], copies[:, 2]
    size = copies.shape[0]
    page = jnp.arange(size, dtype=jnp.int32)
    begins = jnp.where(count > 0, destination, size)  # ascending, as the runs are
    run = jnp.maximum(jnp.searchsorted(begins, page, side="right").astype(jnp.int32) - 1, 0)
    inside = page - destination[run]
    return jnp.where(inside < count[run], first[run] + inside, none)
