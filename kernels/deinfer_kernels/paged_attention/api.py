"""Validation and dispatch of paged decode attention."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from deinfer_kernels.decode import check_decode
from deinfer_kernels.dispatch import dispatch
from deinfer_kernels.paged_attention import reference

__all__ = ["paged_attention"]

IMPLEMENTATIONS = {"reference": reference.paged_attention}


def paged_attention(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P 2 K S H"],
    block_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one new token a sequence over the sequence's pages.

    Positions that are not seen may hold anything, NaN included.

    Args:
        q: queries, after RoPE.
        pool: pages of S tokens, K (after RoPE) at index 0 and V at index 1 of the second axis, K
            heads of width H.
        block_table: page numbers of each sequence in order; entry m covers positions m·S … m·S + S
            − 1. Entries past the sequence's last page may name any page of the pool: they are not
            used.
        lengths: tokens in the cache, the new one included; its position is length − 1. A sequence
            of length 0 gives zeros.
        scale: factor on the scores, usually H^−½.
        window: a query sees the last ``window`` positions, its own included; None = all.
        implementation: ``"reference"``, or None for the best that applies.

    Returns:
        [B, N, H] in q's dtype; scores and softmax are float32.

    Raises:
        ValueError: shapes disagree, or N is not a multiple of K.
    """
    if pool.shape[1] != 2 or pool.shape[4] != q.shape[2]:
        raise ValueError(
            f"paged_attention: expected a pool [P, 2, K, S, {q.shape[2]}], got {pool.shape}"
        )
    check_decode("paged_attention", q, pool.shape[2], block_table, lengths, window)
    return dispatch(
        "paged_attention",
        IMPLEMENTATIONS,
        implementation,
        q,
        pool,
        block_table,
        lengths,
        scale=scale,
        window=window,
    )
