"""Digests of prefixes, and the index from them to pages."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.cache.prefix import NOTHING, PrefixIndex, page_digest, page_digests


def held(num_pages: int) -> tuple[PageAllocator, PrefixIndex]:
    """An allocator with all pages held, and an index that knows none of them."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages)
    return allocator, PrefixIndex(allocator)


class TestDigests:
    def test_of_the_first_page(self) -> None:
        expected = hashlib.blake2b(b"\x01\x00\x00\x00\x02\x01\x00\x00", digest_size=16).digest()
        assert page_digest(NOTHING, [1, 258]) == expected

    def test_of_another_page(self) -> None:
        expected = hashlib.blake2b(b"before\x03\x00\x00\x00", digest_size=16).digest()
        assert page_digest(b"before", [3]) == expected

    def test_of_full_pages_only(self) -> None:
        first = page_digest(NOTHING, [5, 6, 7])
        second = page_digest(first, [8, 9, 10])
        assert page_digests([5, 6, 7, 8, 9, 10, 11], 3) == [first, second]
        assert page_digests([5, 6], 3) == []
        assert page_digests([], 3) == []

    @pytest.mark.parametrize("changed", range(6))
    def test_cover_every_token_before(self, changed: int) -> None:
        tokens = [4, 4, 4, 4, 4, 4]
        before = page_digests(tokens, 2)
        tokens[changed] = 5
        after = page_digests(tokens, 2)
        assert [a == b for a, b in zip(before, after, strict=True)] == [
            page < changed // 2 for page in range(3)
        ]

    def test_know_the_page_of_equal_tokens_by_its_place(self) -> None:
        assert len(set(page_digests([1, 2] * 20, 2))) == 20

    def test_those_known_are_not_computed_again(self) -> None:
        tokens = list(range(12))
        known = [b"a", b"b"]
        digests = page_digests(tokens, 4, known)
        assert digests == [b"a", b"b", page_digest(b"b", tokens[8:])]
        assert known == [b"a", b"b"]  # not changed

    def test_a_sequence_that_grows(self) -> None:
        tokens, digests = list(range(50, 90)), []
        for length in range(41):
            digests = page_digests(tokens[:length], 7, digests)
            assert digests == page_digests(tokens[:length], 7)

    def test_a_part_of_a_page_is_not_the_page(self) -> None:
        assert page_digest(NOTHING, [1, 2, 3]) != page_digest(NOTHING, [1, 2, 3, 0])

    def test_large_token_ids(self) -> None:
        assert len(page_digest(NOTHING, [2**31 - 1])) == 16

    def test_token_ids_from_numpy(self) -> None:
        assert page_digest(NOTHING, np.array([1, 2]).tolist()) == page_digest(NOTHING, [1, 2])


class TestFind:
    def test_what_was_never_added(self) -> None:
        _, index = held(2)
        assert index.find(b"a") is None

    def test_a_held_page(self) -> None:
        _, index = held(2)
        index.add(b"a", 1)
        assert index.find(b"a") == 1

    def test_page_0(self) -> None:
        _, index = held(2)
        index.add(b"a", 0)
        assert index.find(b"a") == 0

    def test_a_free_page(self) -> None:
        allocator, index = held(2)
        index.add(b"a", 1)
        allocator.release([0, 1])
        assert index.find(b"a") == 1
        allocator.share([1])
        assert index.find(b"a") == 1

    def test_not_when_it_was_handed_out_anew(self) -> None:
        allocator, index = held(1)
        index.add(b"a", 0)
        allocator.release([0])
        allocator.allocate(1)
        assert index.find(b"a") is None

    def test_nor_when_that_one_is_known_by_another_digest(self) -> None:
        allocator, index = held(1)
        index.add(b"a", 0)
        allocator.release([0])
        allocator.allocate(1)
        index.add(b"b", 0)
        assert (index.find(b"a"), index.find(b"b")) == (None, 0)

    def test_not_after_a_reset_of_the_allocator(self) -> None:
        allocator, index = held(2)
        index.add(b"a", 1)
        allocator.reset()
        assert index.find(b"a") is None
        allocator.allocate(2)
        assert index.find(b"a") is None

    def test_not_after_clear(self) -> None:
        _, index = held(2)
        index.add(b"a", 1)
        index.clear()
        assert index.find(b"a") is None
        index.add(b"a", 0)
        assert index.find(b"a") == 0


class TestAdd:
    def test_the_first_page_of_a_digest_stays(self) -> None:
        _, index = held(3)
        index.add(b"a", 2)
        index.add(b"a", 0)
        assert index.find(b"a") == 2

    def test_another_page_once_the_first_is_gone(self) -> None:
        allocator, index = held(2)
        index.add(b"a", 0)
        allocator.release([0])
        allocator.allocate(1)
        index.add(b"a", 1)
        assert index.find(b"a") == 1

    def test_the_same_page_with_new_content(self) -> None:
        allocator, index = held(1)
        index.add(b"a", 0)
        allocator.release([0])
        allocator.allocate(1)
        index.add(b"a", 0)
        assert index.find(b"a") == 0

    def test_a_page_by_its_first_tokens_and_as_a_whole(self) -> None:
        _, index = held(2)
        index.add(b"part", 1)
        index.add(b"whole", 1)
        assert (index.find(b"part"), index.find(b"whole")) == (1, 1)

    def test_both_end_with_the_content(self) -> None:
        allocator, index = held(1)
        index.add(b"part", 0)
        index.add(b"whole", 0)
        allocator.release([0])
        allocator.allocate(1)
        assert (index.find(b"part"), index.find(b"whole")) == (None, None)

    def test_a_free_page_cannot_be_added(self) -> None:
        with pytest.raises(AssertionError):
            PrefixIndex(PageAllocator(2)).add(b"a", 0)

    def test_a_page_that_is_not_found_is_not_kept(self) -> None:
        allocator, index = held(2)
        index.add(b"a", 0)
        index.add(b"a", 1)  # the same tokens, computed twice
        allocator.release([0, 1])
        with pytest.raises(ValueError, match="page 1 has no references"):
            allocator.share([1])

    def test_does_not_disturb_a_digest_that_has_moved(self) -> None:
        allocator, index = held(2)
        index.add(b"a", 0)
        allocator.release([0])
        allocator.allocate(1)
        index.add(b"a", 1)
        index.add(b"b", 0)  # page 0 was known as a, long ago
        assert (index.find(b"a"), index.find(b"b")) == (1, 0)

    def test_forgets_what_it_cannot_find(self) -> None:
        allocator, index = held(4)
        for round_ in range(100):
            for page in range(4):
                index.add(b"%d %d" % (round_, page), page)
                index.add(b"%d %d part" % (round_, page), page)
            allocator.release(range(4))
            allocator.allocate(4)
        assert len(index._pages) <= 2 * 4 and len(index._digests) <= 4


class TestRun:
    def test_from_the_first_page_on_as_far_as_they_are_there(self) -> None:
        _, index = held(4)
        for digest, page in ((b"a", 3), (b"b", 1), (b"d", 0)):
            index.add(digest, page)
        assert index.find_run([b"a", b"b", b"c", b"d"]) == [3, 1]

    def test_none(self) -> None:
        _, index = held(2)
        index.add(b"b", 0)
        assert index.find_run([b"a", b"b"]) == []
        assert index.find_run([]) == []

    def test_a_hole_where_a_page_was_handed_out(self) -> None:
        allocator, index = held(3)
        for page, digest in enumerate((b"a", b"b", b"c")):
            index.add(digest, page)
        allocator.release([1])
        allocator.allocate(1)
        assert index.find_run([b"a", b"b", b"c"]) == [0]


def test_against_a_naive_model() -> None:
    """Pages come, go and are found again; the model keeps what each page really holds."""
    rng = np.random.default_rng(3)
    allocator = PageAllocator(8)
    index = PrefixIndex(allocator)
    holding: list[int] = []
    truth: dict[int, set[bytes]] = {page: set() for page in range(8)}
    hits = 0
    for _ in range(20_000):
        what = rng.random()
        if what < 0.3 and allocator.num_free:
            (page,) = allocator.allocate(1)
            truth[page] = set()
            holding.append(page)
        elif what < 0.6 and holding:
            allocator.release([holding.pop(rng.integers(len(holding)))])
        elif what < 0.8 and holding:
            page = holding[rng.integers(len(holding))]
            digest = b"%d" % rng.integers(12)
            if index.find(digest) is None:
                truth[page].add(digest)
            index.add(digest, page)
        digest = b"%d" % rng.integers(12)
        where = [page for page, digests in truth.items() if digest in digests]
        page = index.find(digest)
        assert [page] == where if where else page is None
        if page is not None and rng.random() < 0.1:
            hits += allocator.is_free(page)
            allocator.share([page])  # it must be there to be shared
            holding.append(page)
    assert hits > 100
