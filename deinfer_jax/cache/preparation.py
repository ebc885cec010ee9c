"""The host's part of decoding over latents: which pages are alive, where runs of them begin, and
what the block table becomes once they lie side by side. Plain numpy, no jax.

Example: sequences with pages [7, 8, 3] and [7, 4] (page 7 is a shared prefix) have the live pages
3, 4, 7, 8. They are two runs, so the copies are (3, 2, 0) and (7, 2, 2), the table becomes
[2, 3, 0] and [2, 1, 0], and with pages of 16 tokens the compact pages begin at positions 32, 16, 0
and 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Preparation", "prepare"]


class Preparation(NamedTuple):
    """Arguments of a decode program over latents (a pytree, as a named tuple is).

    Attributes:
        copies: int32 [C, 3], runs as ``paged_compact`` takes them: first page, pages, first page of
            the compact buffer.
        table: int32 [b, M], the compact page of each entry, 0 where there is none.
        positions: int32 [C], position of the first token of each compact page.
        live: int32 (), compact pages in use.
    """

    copies: Any
    table: Any
    positions: Any
    live: Any


def prepare(
    page_lists: Sequence[Sequence[int]],
    *,
    page_size: int,
    rows: int,
    entries: int,
    sizes: Sequence[int],
) -> Preparation:
    """Collects the pages of a batch, each once.

    Args:
        page_lists: pages of each sequence from position 0 on: those of all tokens that the dispatch
            may write.
        page_size: S.
        rows, entries: b and M of the program, at least the sequences and the longest list.
        sizes: possible C, ascending; the smallest one that holds the live pages is taken.
    """
    counts = np.fromiter((len(pages) for pages in page_lists), np.int64, len(page_lists))
    total = int(counts.sum())
    page = np.fromiter(chain.from_iterable(page_lists), np.int64, total)
    row = np.repeat(np.arange(len(counts)), counts)
    entry = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)

    alive = np.zeros(int(page.max(initial=-1)) + 1, bool)
    alive[page] = True
    live = np.flatnonzero(alive)  # ascending
    compact = (np.cumsum(alive) - 1)[page]  # of each page in the lists
    size = next(size for size in sizes if size >= len(live))

    positions = np.zeros(size, np.int32)
    positions[compact] = entry * page_size
    assert (positions[compact] == entry * page_size).all(), (
        "a page stands at different entries of two tables"
    )
    table = np.zeros((rows, entries), np.int32)
    table[row, entry] = compact

    first = np.flatnonzero(np.diff(live, prepend=-2) != 1)  # of each run, within `live`
    copies = np.zeros((size, 3), np.int32)
    copies[: len(first), 0] = live[first]
    copies[: len(first), 1] = np.diff(first, append=len(live))
    copies[: len(first), 2] = first
    return Preparation(copies, table, positions, np.asarray(len(live), np.int32))
