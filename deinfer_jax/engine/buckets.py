"""The shapes that compiled programs exist for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Buckets", "Key", "described", "fit", "powers_of_two"]

# Program, rows (T or b), pages; of a decode program over latents also the compact pages.
Key = tuple[str, int, int] | tuple[str, int, int, int]


def described(key: Key) -> str:
    """A key in words."""
    compact = f" and {key[3]} compact pages" if len(key) > 3 else ""
    return f"{key[0]} with {key[1]} rows and {key[2]} pages{compact}"


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2·low, 4·low, … and high itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


def fit(value: int, buckets: Sequence[int], *, clip: bool = False) -> int:
    """The smallest bucket that holds ``value``; with ``clip`` the largest where none does."""
    for bucket in buckets:
        if bucket >= value:
            return bucket
    if clip:
        return buckets[-1]
    raise ValueError(f"expected at most {buckets[-1]}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The shapes that programs exist for.

    Attributes:
        batch: decode rows. At least 2, because with one row a CPU takes another routine.
        chunk: prompt tokens.
        pages: table entries a decode program reads.
        chunk_pages: table entries a prompt program reads; half as many sizes, because attention
            over unused pages is a small part of a chunk.
        decode_steps: tokens a decode program runs.
        page_size: S.
        rebuilt_pages: pages of the pools, where decode rebuilds keys from latents in a buffer of
            live pages; else None.
        plain: whether there are decode programs, ``decode-plain``, that have neither filters nor
            log-probabilities (see ``sampler``), besides those that have.
    """

    batch: tuple[int, ...]
    chunk: tuple[int, ...]
    pages: tuple[int, ...]
    chunk_pages: tuple[int, ...]
    decode_steps: int
    page_size: int
    rebuilt_pages: int | None = None
    plain: bool = False

    @classmethod
    def choose(
        cls,
        *,
        max_batch: int,
        max_context: int,
        prefill_chunk: int,
        page_size: int,
        decode_steps: int,
        rebuilt_pages: int | None = None,
        plain: bool = False,
    ) -> Buckets:
        """Powers of two, from 2 rows, 32 prompt tokens and 128 tokens' pages on."""
        max_pages = -(-max_context // page_size)
        longest = min(prefill_chunk, max_context)
        pages = powers_of_two(min(-(-128 // page_size), max_pages), max_pages)
        return cls(
            batch=powers_of_two(2, max(2, max_batch)),
            chunk=powers_of_two(min(32, longest), longest),
            pages=pages,
            chunk_pages=pages[::-2][::-1],
            decode_steps=decode_steps,
            page_size=page_size,
            rebuilt_pages=rebuilt_pages,
            plain=plain,
        )

    def for_chunk(self, tokens: int, context: int) -> tuple[int, int]:
        """Rows and pages of the program for a chunk that ends at token ``context``."""
        rows = fit(tokens, self.chunk)
        # At least the pages of a whole chunk, so that there are fewer programs.
        return rows, fit(-(-max(context, rows) // self.page_size), self.chunk_pages, clip=True)

    def compact(self, rows: int, pages: int) -> tuple[int, ...]:
        """Sizes of the buffer of live pages in decode programs, ascending; none where nothing is
        rebuilt.

        All entries of all tables, and quarters of that: equal lengths just above a bucket of pages
        fill a little over half of the next one. Sizes below ``pages`` would hardly be asked for,
        since some row has more than half of them; and no more pages are live than there are.
        """
        if self.rebuilt_pages is None:
            return ()
        every = rows * pages
        smaller = {size for size in (every // 4, every // 2, 3 * every // 4) if size >= pages}
        largest = min(every, self.rebuilt_pages)
        return (*sorted(size for size in smaller if size < largest), largest)

    def programs(self) -> Iterator[Key]:
        """Every program that serving requests can ask for."""
        yield ("copy", 1, 1)
        for rows in self.chunk:
            least = self.for_chunk(rows, rows)[1]
            for pages in self.chunk_pages:
                if pages >= least:
                    yield ("prefill", rows, pages)
        kinds = ("decode", "decode-plain") if self.plain else ("decode",)
        for kind, rows, pages in itertools.product(kinds, self.batch, self.pages):
            if self.rebuilt_pages is None:
                yield (kind, rows, pages)
            for size in self.compact(rows, pages):
                yield (kind, rows, pages, size)
