"""Parts of heads and of axes: nothing lost, nothing twice, zeros where they belong."""

from __future__ import annotations

import pytest
import torch

from reference_torch.shares import share_heads, share_range


def shares(heads: int, kv_heads: int, ranks: int) -> list:
    return [share_heads(heads, kv_heads, 4, ranks, rank) for rank in range(ranks)]


class TestHeads:
    def test_of_one_rank(self) -> None:
        (one,) = shares(6, 2, 1)
        assert one.queries.pieces == (0, 1, 2, 3, 4, 5)
        assert one.kv.pieces == (0, 1)

    def test_nine_and_three_on_two(self) -> None:
        first, second = shares(9, 3, 2)
        assert first.queries.pieces == (0, 1, 2, 3, 4, 5)
        assert first.kv.pieces == (0, 1)
        assert second.queries.pieces == (6, 7, 8, None, None, None)
        assert second.kv.pieces == (2, None)

    def test_nine_and_three_on_eight(self) -> None:
        found = shares(9, 3, 8)
        assert [share.kv.pieces for share in found] == [
            (kv,) for kv in (0, 0, 1, 1, 2, 2, None, None)
        ]
        assert [share.queries.pieces for share in found[:4]] == [
            (0, 1),
            (2, None),
            (3, 4),
            (5, None),
        ]
        assert found[7].queries.pieces == (None, None)

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 12])
    @pytest.mark.parametrize("sizes", [(6, 6), (6, 2), (6, 1), (9, 3), (32, 8), (15, 5)], ids=str)
    def test_every_query_once_and_beside_its_kv_head(
        self, sizes: tuple[int, int], ranks: int
    ) -> None:
        heads, kv_heads = sizes
        found = shares(heads, kv_heads, ranks)
        queries = [q for share in found for q in share.queries.pieces if q is not None]
        assert sorted(queries) == list(range(heads))
        assert len({len(share.queries.pieces) for share in found}) == 1
        for share in found:
            each = len(share.queries.pieces) // len(share.kv.pieces)
            for place, query in enumerate(share.queries.pieces):
                if query is not None:
                    assert share.kv.pieces[place // each] == query // (heads // kv_heads)


class TestParts:
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize(("length", "ranks"), [(12, 4), (13, 4), (5, 4), (3, 8)])
    def test_ranges_side_by_side_are_the_whole_and_zeros(
        self, length: int, ranks: int, axis: int
    ) -> None:
        whole = torch.randn(length, 7).movedim(0, axis)
        parts = [share_range(length, ranks, rank).of(whole, axis) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        together = torch.cat(parts, dim=axis).movedim(axis, 0)
        assert torch.equal(together[:length], whole.movedim(axis, 0))
        assert not together[length:].any()

    def test_missing_heads_are_zeros(self) -> None:
        w = torch.randn(36, 5)
        part = share_heads(9, 3, 4, 2, 1).queries.of(w, 0)
        assert torch.equal(part[:12], w[24:])
        assert part.shape == (24, 5)
        assert not part[12:].any()
