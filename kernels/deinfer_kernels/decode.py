"""What every op that attends with one query a sequence checks."""

from __future__ import annotations

from jax import Array

__all__ = ["check_decode"]


def check_decode(
    op: str,
    q: Array,  # [B, N, H]
    kv_heads: int,
    block_table: Array,  # [B, M]
    lengths: Array,  # [B]
    window: int | None,
) -> None:
    """Raises ValueError, naming the op, unless heads, batch and window go together."""
    heads = q.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"{op}: query heads must be a multiple of kv heads, got {heads} and {kv_heads}"
        )
    if not q.shape[0] == block_table.shape[0] == lengths.shape[0]:
        raise ValueError(
            f"{op}: q, block_table and lengths must agree on the batch, got "
            f"{q.shape[0]}, {block_table.shape[0]}, {lengths.shape[0]}"
        )
    if window is not None and window < 1:
        raise ValueError(f"{op}: expected window >= 1 or None, got {window}")
