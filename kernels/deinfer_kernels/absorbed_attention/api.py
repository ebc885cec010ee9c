"""Validation and dispatch of decode attention with absorbed values."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from deinfer_kernels.absorbed_attention import reference
from deinfer_kernels.decode import check_decode
from deinfer_kernels.dispatch import dispatch

__all__ = ["absorbed_attention"]

IMPLEMENTATIONS = {"reference": reference.absorbed_attention}


def absorbed_attention(
    q: Float[Array, "B N H"],
    keys: Float[Array, "P 1 K S H"],
    latents: Float[Array, "P S W"],
    block_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    rank: int,
    offset: int = 0,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N R"]:
    """The latents of a sequence, weighted by each head's attention: Σ_j p_j c_j.

    Values are u c + b and the weights sum to 1, so the attention's output is u (Σ_j p_j c_j) + b
    with the rows of u that belong to the head's kv head: exact, and u is applied to one vector a
    head instead of to every cached token.

    Positions that are not seen may hold anything, NaN included.

    Args:
        q: queries, after RoPE.
        keys: pages of S tokens, after RoPE, K heads of width H.
        latents: the same pages; columns ``offset`` … ``offset + rank − 1`` are c.
        block_table: page numbers of each sequence in order, as in ``paged_attention``.
        lengths: tokens in the cache, the new one included. A sequence of length 0 gives zeros.
        rank: R.
        offset: see ``latents``.
        scale: factor on the scores, usually H^−½.
        window: a query sees the last ``window`` positions, its own included; None = all.
        implementation: ``"reference"``, or None for the best that applies.

    Returns:
        [B, N, R] in q's dtype; scores, softmax and sums are float32.

    Raises:
        ValueError: shapes disagree, or N is not a multiple of K.
    """
    if keys.shape[1] != 1 or keys.shape[4] != q.shape[2]:
        raise ValueError(
            f"absorbed_attention: expected keys [P, 1, K, S, {q.shape[2]}], got {keys.shape}"
        )
    if latents.shape[:2] != (keys.shape[0], keys.shape[3]):
        raise ValueError(
            "absorbed_attention: keys and latents must agree on pages and page size, got "
            f"{keys.shape} and {latents.shape}"
        )
    if rank < 1 or offset < 0 or offset + rank > latents.shape[2]:
        raise ValueError(
            f"absorbed_attention: expected columns {offset} to {offset + rank} within the latents' "
            f"{latents.shape[2]}"
        )
    check_decode("absorbed_attention", q, keys.shape[2], block_table, lengths, window)
    return dispatch(
        "absorbed_attention",
        IMPLEMENTATIONS,
        implementation,
        q,
        keys,
        latents,
        block_table,
        lengths,
        rank=rank,
        offset=offset,
        scale=scale,
        window=window,
    )
