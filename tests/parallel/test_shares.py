"""Axes dealt to devices, against the rules of the design written out again."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax.parallel.shares import Share, deal, deal_heads, joined, whole

DEVICES = (1, 2, 3, 4, 5, 8)


def places(share: Share) -> np.ndarray:
    """Which place of the axis stands where, [p, width]; −1 where there is a zero."""
    found = np.full((share.devices, share.width), -1)
    for device, part in enumerate(share.parts):
        for source, place, count in part:
            found[device, place : place + count] = np.arange(source, source + count)
    return found


def test_whole() -> None:
    share = whole(7)
    assert not share.split and share.padded == 7
    assert places(share).tolist() == [list(range(7))]


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13, 24])
@pytest.mark.parametrize("devices", DEVICES)
def test_deal(size: int, devices: int) -> None:
    share = deal(size, devices)
    assert share.padded == -(-size // devices) * devices and share.size == size
    flat = places(share).reshape(-1)
    assert flat.tolist() == [*range(size), *[-1] * (share.padded - size)]


def test_runs_are_from_the_axis_to_all_places() -> None:
    share = deal(5, 2)
    assert share.parts == (((0, 0, 3),), ((3, 0, 2),))
    assert share.runs() == ((0, 0, 5),)  # the two lie side by side


def test_neighbours_are_joined() -> None:
    assert joined([(0, 4, 2), (2, 6, 1), (3, 8, 1), (9, 9, 1)]) == ((0, 4, 3), (3, 8, 1), (9, 9, 1))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(6, 6), (6, 2), (9, 3), (8, 1), (12, 4), (10, 5), (14, 2), (1, 1)]
)
def test_heads(heads: int, kv_heads: int, devices: int) -> None:
    """Every query is on one device, beside the kv head that it reads."""
    width = 4
    dealt = deal_heads(heads, kv_heads, width, devices)
    queries, kv = places(dealt.queries), places(dealt.kv)

    if kv_heads < devices:
        slots = next(n for n in range(kv_heads, devices + 1) if devices % n == 0)
    else:
        slots = -(-kv_heads // devices) * devices
    copies = max(1, devices // slots)
    group = heads // kv_heads
    padded = -(-group // copies) * copies
    assert kv.shape == (devices, max(1, slots // devices) * width)
    assert queries.shape == (devices, max(1, slots // devices) * padded // copies * width)

    # In units of heads: all of a head's elements are there, in order.
    by_head = []
    for found in (queries, kv):
        units = found.reshape(devices, -1, width)
        inside = units[units[..., 0] >= 0]
        assert (inside == inside[:, :1] + np.arange(width)).all()
        assert (inside[:, 0] % width == 0).all()
        by_head.append(np.where(units[..., 0] < 0, -1, units[..., 0] // width))
    assert sorted(by_head[0][by_head[0] >= 0].tolist()) == list(range(heads))
    each = by_head[0].shape[1] // by_head[1].shape[1]  # queries of a kv head
    for own_queries, own_kv in zip(*by_head, strict=True):
        for place, query in enumerate(own_queries):
            if query >= 0:
                assert own_kv[place // each] == query // group
    times = np.bincount(by_head[1][by_head[1] >= 0], minlength=kv_heads)
    assert (times == (copies if kv_heads < devices else 1)).all()


def test_the_designs_examples() -> None:
    """9 query and 3 kv heads on 2 and on 8 devices."""
    two = deal_heads(9, 3, 1, 2)
    assert two.kv.width == 2 and two.queries.width == 6
    assert places(two.queries).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, -1, -1, -1]]
    eight = deal_heads(9, 3, 1, 8)
    assert eight.kv.width == 1 and eight.queries.width == 2
    assert places(eight.kv)[:, 0].tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert places(eight.queries)[:2].tolist() == [[0, 1], [2, -1]]
