"""The host's preparation against plain loops."""

from __future__ import annotations

import time

import numpy as np
import pytest

from deinfer_jax.cache.preparation import Preparation, prepare

S = 16


def naive(page_lists: list[list[int]]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Live pages in order, and their runs."""
    live = sorted({page for pages in page_lists for page in pages})
    runs: list[tuple[int, int, int]] = []
    for index, page in enumerate(live):
        if runs and runs[-1][0] + runs[-1][1] == page:
            first, count, destination = runs[-1]
            runs[-1] = (first, count + 1, destination)
        else:
            runs.append((page, 1, index))
    return live, runs


def random_lists(seed: int, *, shared: int) -> list[list[int]]:
    """Lists of 0 to 9 pages; some rows begin with the same ``shared`` pages."""
    rng = np.random.default_rng(seed)
    order = iter(rng.permutation(90).tolist())
    prefix = [next(order) for _ in range(shared)]
    lists = []
    for row in range(8):
        start = prefix if row % 2 else []
        lists.append([*start, *(next(order) for _ in range(rng.integers(0, 10 - len(start))))])
    return lists


def check(page_lists: list[list[int]], found: Preparation, rows: int, entries: int) -> None:
    live, runs = naive(page_lists)
    size = len(found.copies)
    assert all(part.dtype == np.int32 for part in found)
    assert int(found.live) == len(live) <= size
    assert [tuple(run) for run in found.copies[: len(runs)].tolist()] == runs
    assert not found.copies[len(runs) :].any()
    table = np.zeros((rows, entries), np.int32)
    positions = np.zeros(size, np.int32)
    for row, pages in enumerate(page_lists):
        for entry, page in enumerate(pages):
            table[row, entry] = live.index(page)
            positions[live.index(page)] = entry * S
    np.testing.assert_array_equal(found.table, table)
    np.testing.assert_array_equal(found.positions, positions)


@pytest.mark.parametrize("shared", [0, 1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_tables(seed: int, shared: int) -> None:
    lists = random_lists(seed, shared=shared)
    found = prepare(lists, page_size=S, rows=9, entries=11, sizes=(20, 40, 99))
    check(lists, found, 9, 11)


@pytest.mark.parametrize(
    "lists",
    [
        [[5, 6, 7]],  # one run
        [[7, 6, 5]],  # a run of the pool, backwards in the sequence
        [[0], [1], [2]],  # a run over several sequences
        [[3, 9], [3, 9]],  # all shared
        [[], [4]],
        [[], []],
    ],
    ids=str,
)
def test_tables(lists: list[list[int]]) -> None:
    check(lists, prepare(lists, page_size=S, rows=3, entries=4, sizes=(3, 6)), 3, 4)


def test_the_example() -> None:
    found = prepare([[7, 8, 3], [7, 4]], page_size=16, rows=2, entries=3, sizes=(4,))
    assert found.copies.tolist() == [[3, 2, 0], [7, 2, 2], [0, 0, 0], [0, 0, 0]]
    assert found.table.tolist() == [[2, 3, 0], [2, 1, 0]]
    assert found.positions.tolist() == [32, 16, 0, 16]


def test_no_sequence_at_all() -> None:
    found = prepare([], page_size=S, rows=2, entries=3, sizes=(4,))
    assert found.live == 0 and not found.copies.any() and found.table.shape == (2, 3)


@pytest.mark.parametrize(("live", "size"), [(0, 2), (2, 2), (3, 5), (5, 5), (6, 8)])
def test_the_smallest_size_that_holds_the_pages(live: int, size: int) -> None:
    found = prepare([list(range(live))], page_size=S, rows=2, entries=8, sizes=(2, 5, 8))
    assert len(found.copies) == len(found.positions) == size


def test_a_page_at_two_positions_is_refused() -> None:
    with pytest.raises(AssertionError, match="different entries of two tables"):
        prepare([[3, 4], [4]], page_size=S, rows=2, entries=2, sizes=(4,))


def test_pages_of_many_sequences_take_little_time() -> None:
    # 64 sequences of 64 pages; well under a millisecond where it was measured.
    pages = np.random.default_rng(0).permutation(64 * 64).reshape(64, 64).tolist()
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        prepare(pages, page_size=64, rows=64, entries=64, sizes=(1024, 2048, 4096))
        best = min(best, time.perf_counter() - started)
    assert best < 5e-3  # a loop in Python takes longer
