"""The page allocator: which pages, reference counts, and faults it must notice."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax.cache.allocator import OutOfPages, PageAllocator


def fragmented(num_pages: int, held: list[int]) -> PageAllocator:
    """An allocator in which exactly ``held`` are taken."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages)
    allocator.release([page for page in range(num_pages) if page not in held])
    return allocator


class TestAllocate:
    def test_first_pages_of_an_empty_cache(self) -> None:
        assert PageAllocator(5).allocate(3) == [0, 1, 2]

    def test_next_request_follows(self) -> None:
        allocator = PageAllocator(5)
        allocator.allocate(3)
        assert allocator.allocate(2) == [3, 4]

    def test_lowest_run_that_fits(self) -> None:
        # free: 1, 3 4, 6 7 8, 10 11
        assert fragmented(12, [0, 2, 5, 9]).allocate(2) == [3, 4]

    def test_a_longer_run_is_cut_from_its_start(self) -> None:
        assert fragmented(12, [0, 2, 5]).allocate(5) == [6, 7, 8, 9, 10]

    def test_lowest_pages_where_no_run_fits(self) -> None:
        assert fragmented(8, [1, 3, 5]).allocate(4) == [0, 2, 4, 6]

    def test_a_run_at_the_end(self) -> None:
        assert fragmented(8, [0, 2, 4]).allocate(3) == [5, 6, 7]

    def test_released_pages_are_taken_again(self) -> None:
        allocator = fragmented(6, [0, 1, 2, 3, 4, 5])
        allocator.release([4, 1, 3])
        assert allocator.allocate(2) == [3, 4]

    def test_all_pages(self) -> None:
        allocator = PageAllocator(7)
        assert allocator.allocate(7) == list(range(7))
        assert allocator.num_free == 0

    def test_nothing(self) -> None:
        allocator = fragmented(3, [0, 1, 2])
        assert allocator.allocate(0) == []

    def test_counts(self) -> None:
        allocator = PageAllocator(9)
        allocator.allocate(4)
        assert (allocator.num_pages, allocator.num_free) == (9, 5)

    def test_pages_are_python_ints(self) -> None:
        assert [type(page) for page in PageAllocator(2).allocate(2)] == [int, int]

    def test_negative_count(self) -> None:
        with pytest.raises(ValueError, match="count >= 0, got -1"):
            PageAllocator(2).allocate(-1)

    def test_empty_cache(self) -> None:
        with pytest.raises(ValueError, match="at least one page, got 0"):
            PageAllocator(0)


class TestAfter:
    def test_goes_on_behind_the_last_page(self) -> None:
        # free: 0, 3 4 5; the lowest page would be 0
        assert fragmented(6, [1, 2]).allocate(2, after=2) == [3, 4]

    def test_falls_back_where_the_next_page_is_taken(self) -> None:
        assert fragmented(6, [1, 2, 3]).allocate(1, after=2) == [0]

    def test_falls_back_where_the_run_is_too_short(self) -> None:
        # free: 0 1 2, 5 and then a held page
        assert fragmented(7, [3, 4, 6]).allocate(2, after=4) == [0, 1]

    def test_falls_back_at_the_end_of_the_cache(self) -> None:
        assert fragmented(5, [2, 3, 4]).allocate(1, after=4) == [0]

    def test_does_not_run_over_the_end(self) -> None:
        assert fragmented(6, [3, 4]).allocate(2, after=4) == [0, 1]


class TestOutOfPages:
    def test_says_both_counts(self) -> None:
        allocator = PageAllocator(4)
        allocator.allocate(3)
        with pytest.raises(OutOfPages, match="expected 2 free pages, got 1 of 4"):
            allocator.allocate(2)

    def test_takes_nothing(self) -> None:
        allocator = fragmented(6, [1, 4])
        with pytest.raises(OutOfPages):
            allocator.allocate(5)
        assert allocator.num_free == 4
        allocator.check_integrity([[1, 4]])


class TestReferences:
    def test_a_shared_page_is_freed_by_the_last_holder(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(2)
        allocator.share(pages)
        assert allocator.release(pages) == []
        assert allocator.release(pages) == pages

    def test_a_shared_page_is_not_handed_out(self) -> None:
        allocator = PageAllocator(3)
        allocator.share(allocator.allocate(2))
        allocator.release([0, 1])
        assert allocator.allocate(1) == [2]

    def test_release_says_which_became_free(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(4)
        allocator.share([1, 2])
        assert allocator.release(pages) == [0, 3]

    def test_free_count_of_shared_pages(self) -> None:
        allocator = PageAllocator(4)
        allocator.share(allocator.allocate(3))
        allocator.release([0, 1])
        assert allocator.num_free == 1

    def test_sharing_a_free_page(self) -> None:
        with pytest.raises(
            ValueError, match="^share: page 1 has 0 references, expected at least 1$"
        ):
            PageAllocator(2).share([1])

    def test_double_release(self) -> None:
        allocator = PageAllocator(2)
        pages = allocator.allocate(1)
        allocator.release(pages)
        with pytest.raises(
            ValueError, match="^release: page 0 has 0 references, expected at least 1$"
        ):
            allocator.release(pages)

    def test_double_release_within_one_call(self) -> None:
        allocator = PageAllocator(2)
        allocator.allocate(1)
        with pytest.raises(
            ValueError, match="^release: page 0 has 1 references, expected at least 2$"
        ):
            allocator.release([0, 0])
        allocator.check_integrity([[0]])

    def test_a_shared_page_may_be_released_twice_within_one_call(self) -> None:
        allocator = PageAllocator(2)
        allocator.share(allocator.allocate(1))
        assert allocator.release([0, 0]) == [0]
        assert allocator.num_free == 2
        allocator.check_integrity([])

    def test_a_failed_release_drops_nothing(self) -> None:
        allocator = PageAllocator(3)
        allocator.allocate(1)
        with pytest.raises(
            ValueError, match="^release: page 2 has 0 references, expected at least 1$"
        ):
            allocator.release([0, 2])
        assert allocator.num_free == 2
        allocator.check_integrity([[0]])

    def test_a_failed_share_adds_nothing(self) -> None:
        allocator = PageAllocator(3)
        allocator.allocate(1)
        with pytest.raises(
            ValueError, match="^share: page 2 has 0 references, expected at least 1$"
        ):
            allocator.share([0, 2])
        allocator.check_integrity([[0]])


class TestIntegrity:
    def test_passes_with_the_right_holders(self) -> None:
        allocator = PageAllocator(6)
        first, second = allocator.allocate(2), allocator.allocate(3)
        allocator.share(first)
        allocator.check_integrity([first, second, first])

    def test_a_lost_page(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(3)
        with pytest.raises(AssertionError, match="page 2: 1 references, but 0 holders"):
            allocator.check_integrity([pages[:2]])

    def test_a_page_held_twice_with_one_reference(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(2)
        with pytest.raises(AssertionError, match="page 1: 1 references, but 2 holders"):
            allocator.check_integrity([pages, [1]])

    def test_a_held_page_that_is_free(self) -> None:
        allocator = PageAllocator(4)
        with pytest.raises(AssertionError, match="page 3: 0 references, but 1 holders"):
            allocator.check_integrity([[3]])

    def test_a_page_outside_the_cache(self) -> None:
        with pytest.raises(AssertionError, match="free 4 .* held 1 != 4 pages"):
            PageAllocator(4).check_integrity([[4]])

    def test_a_wrong_free_count(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.allocate(2)
        allocator._free += 1
        with pytest.raises(AssertionError, match="free 3 .* held 2 != 4 pages"):
            allocator.check_integrity([pages])


def naive_choice(free: set[int], count: int, after: int | None) -> list[int]:
    """The documented choice, by trying every start."""
    if after is not None and all(after + 1 + i in free for i in range(count)):
        return [after + 1 + i for i in range(count)]
    for start in sorted(free):
        if all(start + i in free for i in range(count)):
            return [start + i for i in range(count)]
    return sorted(free)[:count]


def test_against_a_naive_model() -> None:
    rng = np.random.default_rng(0)
    total = 37
    allocator, free, holders = PageAllocator(total), set(range(total)), []
    refused = 0
    for step in range(20_000):
        what = rng.random()
        if what < 0.5 or not holders:
            count = int(rng.integers(0, 9))
            after = None
            if holders and rng.random() < 0.5:
                after = holders[rng.integers(len(holders))][-1]
            if count > len(free):
                refused += 1
                with pytest.raises(OutOfPages):
                    allocator.allocate(count, after=after)
            else:
                pages = allocator.allocate(count, after=after)
                assert pages == (naive_choice(free, count, after) if count else [])
                free -= set(pages)
                if pages:
                    holders.append(pages)
        elif what < 0.6:
            pages = holders[rng.integers(len(holders))]
            allocator.share(pages)
            holders.append(list(pages))
        else:
            pages = holders.pop(rng.integers(len(holders)))
            still = {page for other in holders for page in other}
            freed = [page for page in pages if page not in still]
            assert allocator.release(pages) == freed
            free |= set(freed)
        assert allocator.num_free == len(free)
        if step % 10 == 0:
            allocator.check_integrity(holders)
    assert refused > 100  # the run did reach a full cache
