"""Finds pages by the tokens they hold, and all tokens before those. Host Python, no jax.

A page's digest covers its tokens and the digest of the page before it, so equal digests mean equal
prefixes. With pages of 4 tokens, prompts "the cat sat on the mat" and "the cat sat on a chair" (a
token a word) share page 0 ("the cat sat on"), whoever computed it first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from deinfer_jax.cache.allocator import PageAllocator

__all__ = ["PrefixIndex", "page_digest", "page_digests"]

NOTHING = b""  # the digest in front of the first page


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """128-bit blake2b of the digest before a page and the page's token ids (little-endian int32),
    a whole page's or only its first ones."""
    return hashlib.blake2b(before + np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


def page_digests(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Digests of all full pages of a sequence.

    Args:
        tokens: of the sequence.
        page_size: S.
        known: of its first pages, which are not computed again.
    """
    digests = list(known)
    for page in range(len(digests), len(tokens) // page_size):
        before = digests[-1] if digests else NOTHING
        digests.append(page_digest(before, tokens[page * page_size : (page + 1) * page_size]))
    return digests


class PrefixIndex:
    """Digest → page, for pages whose content the allocator still has.

    Args:
        allocator: of the pages.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: dict[bytes, tuple[int, int]] = {}  # digest: page, content
        self._digests: dict[int, list[bytes]] = {}  # of each page: whole, or its first tokens

    def add(self, digest: bytes, page: int) -> None:
        """Makes a held page known; the first page of a digest stays the one that is found."""
        if self.find(digest) is not None:
            return
        here = page, self._allocator.keep(page)
        digests = [digest]
        for old in self._digests.get(page, ()):
            known = self._pages.get(old)
            if known == here:
                digests.append(old)
            elif known is not None and known[0] == page:  # of what the page held before
                del self._pages[old]
        self._pages[digest] = here
        self._digests[page] = digests

    def find(self, digest: bytes) -> int | None:
        """The page with these tokens, held or free, or None."""
        if digest not in self._pages:
            return None
        page, content = self._pages[digest]
        return page if self._allocator.content(page) == content else None

    def find_run(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of a sequence from its first one on, as far as they are there."""
        pages = []
        for digest in digests:
            page = self.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def clear(self) -> None:
        """Forgets all pages."""
        self._pages.clear()
        self._digests.clear()
