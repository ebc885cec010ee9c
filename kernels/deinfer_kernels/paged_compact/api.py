"""Validation and dispatch of page compaction."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from deinfer_kernels.dispatch import dispatch
from deinfer_kernels.paged_compact import reference

__all__ = ["paged_compact"]

IMPLEMENTATIONS = {"reference": reference.paged_compact}


def paged_compact(
    pool: Float[Array, "P S W"],
    copies: Int32[Array, "C 3"],
    *,
    implementation: str | None = None,
) -> Float[Array, "C S W"]:
    """Pages of a pool, copied run by run to the front of a buffer of C pages.

    Args:
        pool: pages of S rows of W numbers.
        copies: (first page, number of pages, first page of the buffer), one contiguous run a row:
            buffer pages d … d + n − 1 are pool pages p … p + n − 1. The runs follow each other
            without a gap, from 0 on; rows with n = 0 come last and copy nothing.
        implementation: ``"reference"``, or None for the best that applies.

    Returns:
        The buffer; what lies behind the last run is unspecified, and finite.

    Raises:
        ValueError: a shape is wrong.
    """
    if pool.ndim != 3 or copies.ndim != 2 or copies.shape[1] != 3:
        raise ValueError(
            "paged_compact: expected a pool [P, S, W] and copies [C, 3], got "
            f"{pool.shape} and {copies.shape}"
        )
    return dispatch("paged_compact", IMPLEMENTATIONS, implementation, pool, copies)
