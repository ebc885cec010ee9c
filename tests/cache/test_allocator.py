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
            ValueError, match="^share: page 1 has no references, expected at least 1$"
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
            ValueError, match="^share: page 2 has no references, expected at least 1$"
        ):
            allocator.share([0, 2])
        allocator.check_integrity([[0]])


def kept(num_pages: int, pages: list[int]) -> PageAllocator:
    """An allocator with nothing held, in which ``pages`` are worth finding again: released one by
    one in this order, so the first is the longest unused."""
    allocator = PageAllocator(num_pages)
    allocator.allocate(num_pages)
    for page in pages:
        allocator.keep(page)
        allocator.release([page])
    allocator.release([page for page in range(num_pages) if page not in pages])
    return allocator


class TestKeep:
    def test_a_kept_page_is_free_once_it_is_released(self) -> None:
        allocator = PageAllocator(3)
        allocator.allocate(2)
        allocator.keep(1)
        assert allocator.num_free == 1 and not allocator.is_free(1)
        assert allocator.release([0, 1]) == [0, 1]
        assert allocator.num_free == 3 and allocator.is_free(1)

    def test_others_are_handed_out_first(self) -> None:
        assert kept(5, [0, 1, 3]).allocate(2) == [2, 4]

    def test_not_even_a_run_is_worth_one(self) -> None:
        # 1 and 2 would be a run; 0 and 3 are those that hold nothing.
        assert kept(4, [1, 2]).allocate(2) == [0, 3]

    def test_nor_is_the_page_behind_the_last_one(self) -> None:
        allocator = kept(5, [2])
        assert allocator.allocate(2) == [0, 1]
        assert allocator.allocate(1, after=1) == [3]

    def test_the_longest_unused_goes_first(self) -> None:
        allocator = kept(4, [2, 0, 3, 1])
        assert [allocator.allocate(1) for _ in range(4)] == [[2], [0], [3], [1]]

    def test_use_makes_a_page_young(self) -> None:
        allocator = kept(4, [2, 0, 3, 1])
        allocator.share([2])
        allocator.release([2])
        assert [allocator.allocate(1) for _ in range(4)] == [[0], [3], [1], [2]]

    def test_of_pages_released_together_the_last_goes_first(self) -> None:
        allocator = PageAllocator(4)
        for page in allocator.allocate(4):
            allocator.keep(page)
        allocator.release([2, 0, 3, 1])  # a sequence, from its beginning
        assert [allocator.allocate(1) for _ in range(4)] == [[1], [3], [0], [2]]

    def test_no_more_are_given_up_than_are_needed(self) -> None:
        allocator = kept(6, [0, 1, 2, 3])
        contents = [allocator.content(page) for page in range(4)]
        assert sorted(allocator.allocate(3)) == [0, 4, 5]
        assert [allocator.content(page) for page in (1, 2, 3)] == contents[1:]
        allocator.share([1, 2, 3])
        assert allocator.num_free == 0

    def test_all_pages(self) -> None:
        allocator = kept(6, [4, 0, 5, 2])
        assert sorted(allocator.allocate(6)) == [0, 1, 2, 3, 4, 5]

    def test_more_than_there_are_gives_none_up(self) -> None:
        allocator = kept(4, [1, 2])
        allocator.share([1])
        with pytest.raises(OutOfPages, match="expected 4 free pages, got 3 of 4"):
            allocator.allocate(4)
        allocator.share([2])
        allocator.check_integrity([[1], [2]])

    def test_a_page_handed_out_anew_is_not_kept(self) -> None:
        allocator = kept(1, [0])
        allocator.release(allocator.allocate(1))
        with pytest.raises(ValueError, match="^share: page 0 has no references"):
            allocator.share([0])

    def test_a_shared_page_stays_kept(self) -> None:
        allocator = kept(2, [0])
        allocator.share([0])
        allocator.share([0])
        assert allocator.release([0, 0]) == [0]
        allocator.share([0])
        allocator.check_integrity([[0]])

    def test_a_free_page_counts_once_however_often_it_is_shared_at_once(self) -> None:
        allocator = kept(3, [1])
        allocator.share([1, 1])
        assert allocator.num_free == 2
        allocator.check_integrity([[1], [1]])

    def test_sharing_a_free_page_that_is_not_kept_takes_nothing(self) -> None:
        allocator = kept(3, [1])
        with pytest.raises(ValueError, match="^share: page 2 has no references"):
            allocator.share([1, 2])
        assert allocator.num_free == 3
        allocator.check_integrity([])

    def test_a_free_page_cannot_be_kept(self) -> None:
        with pytest.raises(AssertionError):
            PageAllocator(2).keep(0)


class TestContent:
    def test_stays_while_the_page_is_held_and_free(self) -> None:
        allocator = PageAllocator(2)
        allocator.allocate(1)
        content = allocator.keep(0)
        assert content == allocator.content(0)
        allocator.share([0])
        allocator.release([0, 0])
        assert allocator.content(0) == content
        allocator.share([0])
        assert allocator.content(0) == content

    def test_is_another_one_when_the_page_is_handed_out_anew(self) -> None:
        allocator = kept(1, [0])
        seen = {allocator.content(0)}
        for _ in range(4):
            allocator.release(allocator.allocate(1))
            seen.add(allocator.content(0))
        assert len(seen) == 5

    def test_of_other_pages_stays(self) -> None:
        allocator = kept(3, [0, 2])
        contents = allocator.content(0), allocator.content(2)
        allocator.allocate(1)
        assert (allocator.content(0), allocator.content(2)) == contents


class TestReset:
    def test_frees_everything_and_keeps_nothing(self) -> None:
        allocator = kept(4, [0, 1])
        allocator.share([0])
        allocator.allocate(2)
        allocator.reset()
        assert allocator.num_free == 4
        allocator.check_integrity([])
        with pytest.raises(ValueError, match="^share: page 0 has no references"):
            allocator.share([0])
        assert allocator.allocate(4) == [0, 1, 2, 3]

    def test_no_content_survives(self) -> None:
        allocator = kept(3, [0])
        allocator.share([0])
        contents = [allocator.content(page) for page in range(3)]
        allocator.reset()
        assert all(allocator.content(page) != contents[page] for page in range(3))


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

    def test_a_free_page_that_cannot_be_handed_out(self) -> None:
        allocator = PageAllocator(4)
        allocator._empty[2] = False
        with pytest.raises(AssertionError, match="empty pages are not those free"):
            allocator.check_integrity([])

    def test_a_held_page_that_may_be_handed_out(self) -> None:
        allocator = PageAllocator(4)
        allocator._empty[allocator.allocate(1)] = True
        with pytest.raises(AssertionError, match="empty pages are not those free"):
            allocator.check_integrity([[0]])

    def test_a_kept_page_that_is_in_no_list(self) -> None:
        allocator = kept(4, [1, 3])
        del allocator._kept_free[3]
        with pytest.raises(AssertionError, match=r"kept \[1\], expected \[1, 3\]"):
            allocator.check_integrity([])

    def test_a_held_page_in_the_list_of_free_ones(self) -> None:
        allocator = kept(4, [1])
        allocator.share([1])
        allocator._kept_free[1] = None
        with pytest.raises(AssertionError, match=r"kept \[1\], expected \[\]"):
            allocator.check_integrity([[1]])


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
    allocator = PageAllocator(total)
    empty, unused = set(range(total)), []  # free pages: without content; kept, longest unused first
    holders: list[list[int]] = []
    keeping: dict[int, int] = {}  # page: content
    refused = given_up = found = 0
    for step in range(20_000):
        what = rng.random()
        if what < 0.45 or not holders:
            count = int(rng.integers(0, 9))
            after = None
            if holders and rng.random() < 0.5:
                after = holders[rng.integers(len(holders))][-1]
            if count > len(empty) + len(unused):
                refused += 1
                with pytest.raises(OutOfPages):
                    allocator.allocate(count, after=after)
            elif count:
                while len(empty) < count:
                    given_up += 1
                    page = unused.pop(0)
                    empty.add(page)
                    content = keeping.pop(page)
                    assert allocator.content(page) == content
                pages = allocator.allocate(count, after=after)
                assert pages == naive_choice(empty, count, after)
                empty -= set(pages)
                holders.append(pages)
            else:
                assert allocator.allocate(count, after=after) == []
        elif what < 0.55:
            pages = holders[rng.integers(len(holders))]
            allocator.share(pages)
            holders.append(list(pages))
        elif what < 0.6 and unused:
            found += 1
            chosen = rng.choice(unused, min(len(unused), 3), replace=False).tolist()
            allocator.share(chosen)
            unused = [page for page in unused if page not in chosen]
            holders.append(chosen)
        elif what < 0.7:
            page = int(rng.choice(holders[rng.integers(len(holders))]))
            keeping[page] = allocator.keep(page)
        elif what < 0.999:
            pages = holders.pop(rng.integers(len(holders)))
            still = {page for other in holders for page in other}
            freed = [page for page in pages if page not in still]
            assert allocator.release(pages) == freed
            empty |= set(freed) - set(keeping)
            unused += [page for page in reversed(freed) if page in keeping]
        else:
            allocator.reset()
            empty, unused, holders, keeping = set(range(total)), [], [], {}
        assert allocator.num_free == len(empty) + len(unused)
        assert all(allocator.content(page) == content for page, content in keeping.items())
        if step % 10 == 0:
            allocator.check_integrity(holders)
    assert min(refused, given_up, found) > 100  # the run did reach a full cache
