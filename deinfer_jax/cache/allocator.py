"""Reference-counted pages; host Python, no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["OutOfPages", "PageAllocator"]


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out pages 0 … num_pages − 1, contiguous where possible.

    Contiguity is worth having: a run of neighbouring pages is one copy for kernels that compact
    them.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"PageAllocator: expected at least one page, got {num_pages}")
        self._references = np.zeros(num_pages, np.int32)
        self._free = num_pages

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._free

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Takes ``count`` pages with one reference each, in ascending order where they form a run.

        Args:
            count: how many, 0 allowed.
            after: the holder's last page; the pages behind it are taken if they are free, so that
                its run goes on.

        Returns:
            Page numbers: the lowest free run that fits, or the lowest free pages where no run does.

        Raises:
            OutOfPages: fewer are free.
        """
        if count < 0:
            raise ValueError(f"allocate: expected count >= 0, got {count}")
        if count > self._free:
            raise OutOfPages(f"expected {count} free pages, got {self._free} of {self.num_pages}")
        if count == 0:
            return []
        free = self._references == 0
        pages = None
        if after is not None:
            behind = free[after + 1 : after + 1 + count]
            if len(behind) == count and behind.all():
                pages = np.arange(after + 1, after + 1 + count)
        if pages is None:
            pages = _lowest_run(free, count)
        self._references[pages] = 1
        self._free -= count
        return pages.tolist()

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to pages that somebody holds."""
        self._check_held("share", Counter(dict.fromkeys(pages, 1)))
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops a reference to each page; returns those that became free."""
        self._check_held("release", Counter(pages))
        freed = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                freed.append(page)
        self._free += len(freed)
        return freed

    def _check_held(self, what: str, wanted: Counter[int]) -> None:
        """Before anything changes, so that a wrong call loses nothing."""
        for page, count in wanted.items():
            if self._references[page] < count:
                raise ValueError(
                    f"{what}: page {page} has {self._references[page]} references, expected at "
                    f"least {count}"
                )

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError, with the counts, unless the references are exactly what
        ``holders`` hold."""
        held = Counter(page for pages in holders for page in pages)
        for page, references in enumerate(self._references.tolist()):
            assert references == held.get(page, 0), (
                f"page {page}: {references} references, but {held.get(page, 0)} holders"
            )
        assert self._free + len(held) == self.num_pages, (
            f"free {self._free} + held {len(held)} != {self.num_pages} pages"
        )


def _lowest_run(free: np.ndarray, count: int) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False]))))
    starts, ends = edges[::2], edges[1::2]
    fits = np.flatnonzero(ends - starts >= count)
    if len(fits):
        start = int(starts[fits[0]])
        return np.arange(start, start + count)
    return np.flatnonzero(free)[:count]
