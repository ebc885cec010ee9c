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
    them. A page that nobody holds may still have content worth finding again (:meth:`keep`): it is
    free, but is handed out only when no other page is, the longest unused first.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"PageAllocator: expected at least one page, got {num_pages}")
        self._references = np.zeros(num_pages, np.int32)
        self._kept = np.zeros(num_pages, bool)
        self._empty = np.ones(num_pages, bool)  # free and not kept
        self._contents = np.zeros(num_pages, np.int64)
        self._kept_free: dict[int, None] = {}  # free and kept, longest unused first
        self._free = num_pages

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages nobody holds, those that are kept included."""
        return self._free

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page."""
        return bool(self._references[page] == 0)

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
        for _ in range(len(self._kept_free) + count - self._free):
            self._forget(next(iter(self._kept_free)))
        pages = self._choose(count, after)
        self._references[pages] = 1
        self._empty[pages] = False
        self._contents[pages] += 1
        self._free -= count
        return pages.tolist()

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to pages that somebody holds, or that are free and kept."""
        for page in pages:
            if not self._references[page] and not self._kept[page]:
                raise ValueError(f"share: page {page} has no references, expected at least 1")
        for page in pages:
            if not self._references[page]:
                del self._kept_free[page]
                self._free -= 1
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops a reference to each page; returns those that became free."""
        for page, count in Counter(pages).items():  # before anything changes
            if self._references[page] < count:
                raise ValueError(
                    f"release: page {page} has {self._references[page]} references, expected at "
                    f"least {count}"
                )
        freed = []
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                freed.append(page)
        self._free += len(freed)
        # A prefix is found from its first page on, so the last ones are given up first.
        for page in reversed(freed):
            if self._kept[page]:
                self._kept_free[page] = None
            else:
                self._empty[page] = True
        return freed

    def keep(self, page: int) -> int:
        """Says that a held page's content is worth finding again.

        Returns:
            A number of the content; while :meth:`content` gives the same, it is still there.
        """
        assert self._references[page] > 0
        self._kept[page] = True
        return self.content(page)

    def content(self, page: int) -> int:
        """Number of a page's content, another one whenever it is handed out anew."""
        return int(self._contents[page])

    def reset(self) -> None:
        """Frees everything and keeps nothing, for when the pages' contents are lost."""
        self._contents += 1
        self._references[:] = 0
        self._kept[:] = False
        self._empty[:] = True
        self._kept_free.clear()
        self._free = self.num_pages

    def _forget(self, page: int) -> None:
        """A free page is no longer worth keeping."""
        del self._kept_free[page]
        self._kept[page] = False
        self._empty[page] = True

    def _choose(self, count: int, after: int | None) -> np.ndarray:
        if after is not None:
            behind = self._empty[after + 1 : after + 1 + count]
            if len(behind) == count and behind.all():
                return np.arange(after + 1, after + 1 + count)
        if count == 1:  # every growing request asks for one: no need to look at runs
            return self._empty.argmax(keepdims=True)
        return _lowest_run(self._empty, count)

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
        free = self._references == 0
        assert (self._empty == (free & ~self._kept)).all(), "empty pages are not those free"
        kept = np.flatnonzero(free & self._kept).tolist()
        assert sorted(self._kept_free) == kept, f"kept {sorted(self._kept_free)}, expected {kept}"


def _lowest_run(free: np.ndarray, count: int) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False]))))
    starts, ends = edges[::2], edges[1::2]
    fits = np.flatnonzero(ends - starts >= count)
    if len(fits):
        start = int(starts[fits[0]])
        return np.arange(start, start + count)
    return np.flatnonzero(free)[:count]
