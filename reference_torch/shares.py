"""Which part of a model a rank has: heads and ranges, padded with zeros so that all have as much.

Zeros are exact: a query of zeros belongs to a head whose output meets columns of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HeadShare", "Share", "padded", "round_up", "share_heads", "share_range"]


@dataclass(frozen=True)
class Share:
    """A rank's part of an axis: pieces of ``width`` by index, None for one of zeros.

    Example: ``Share((6, 7, 8, None), 64)``, the heads of width 64 that a rank has of a projection.
    """

    pieces: tuple[int | None, ...]
    width: int

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        """That part of a tensor."""
        whole = tensor.movedim(axis, 0)
        zeros = whole.new_zeros(self.width, *whole.shape[1:])
        parts = [
            zeros if i is None else padded(whole[i * self.width : (i + 1) * self.width], self.width)
            for i in self.pieces
        ]
        return torch.cat(parts).movedim(0, axis).contiguous()


@dataclass(frozen=True)
class HeadShare:
    """A rank's query heads and the kv heads that they read, the same number of queries for each."""

    queries: Share
    kv: Share


def share_range(length: int, ranks: int, rank: int, unit: int = 1) -> Share:
    """The rank's part of an axis that is cut into as many equal parts as there are ranks, each of
    them a multiple of ``unit`` long."""
    return Share((rank,), round_up(-(-length // ranks), unit))


def share_heads(heads: int, kv_heads: int, head_dim: int, ranks: int, rank: int) -> HeadShare:
    """Whole kv heads a rank where there are enough of them; else several ranks have a copy of the
    same one, and share its queries.

    Example: 9 query and 3 kv heads. On 2 ranks there are 4 groups of 3, the last one zeros: rank 0
    has kv heads 0 and 1, rank 1 has kv head 2 and zeros. On 8 ranks, each of the 4 groups is on 2
    ranks, which have 2 of its queries each, the fourth of them zeros.
    """
    queries = heads // kv_heads  # of a kv head
    if kv_heads < ranks:
        groups = next(n for n in range(kv_heads, ranks + 1) if ranks % n == 0)
    else:
        groups = -(-kv_heads // ranks) * ranks
    copies = max(1, ranks // groups)
    own = range(rank // copies, rank // copies + 1)
    if copies == 1:
        own = range(rank * groups // ranks, (rank + 1) * groups // ranks)
    each = -(-queries // copies)  # queries of a kv head that a rank has
    first = rank % copies * each
    return HeadShare(
        Share(
            tuple(
                kv * queries + query if kv < kv_heads and query < queries else None
                for kv in own
                for query in range(first, first + each)
            ),
            head_dim,
        ),
        Share(tuple(kv if kv < kv_heads else None for kv in own), head_dim),
    )


def padded(part: Tensor, length: int) -> Tensor:
    """``part`` with zeros behind it on its first axis."""
    missing = length - part.shape[0]
    return torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part


def round_up(length: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-length // unit) * unit
