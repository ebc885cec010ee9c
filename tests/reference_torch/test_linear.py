"""Latents of odd ranks: widened where that is free, and never on the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference_torch.config import Slice
from reference_torch.group import Group
from reference_torch.linear import UNIT, LowRankContract, LowRankExpand, Projection
from reference_torch.shares import share_range
from reference_torch.strategies import get_strategy

IN, OUT = 24, 10
ALL = share_range(OUT, 1, 0)
# Of two tensors: one's slices overlap and begin at odd places, the other is one slice.
SLICES = (Slice("a", 0, 13), Slice("a", 13, 5), Slice("a", 3, 15), Slice("b", 0, 7))


def projections() -> list[Projection]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    v = {"a": random(18, IN), "b": random(7, IN)}
    return [Projection(u=random(OUT, s.rank), v=v[s.v], slice=s) for s in SLICES]


@pytest.mark.parametrize("kind", ["low_rank", "naive"])
def test_expanding(kind: str) -> None:
    given = projections()
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    expand = get_strategy(kind, Group()).expand(given, [ALL] * len(given))
    z = expand.latents(x)
    for index, p in enumerate(given):
        w = p.multiplied_out().w
        assert w is not None
        torch.testing.assert_close(expand.output(index, x, z), x @ w.T)
        c = expand.latent(index, z)
        assert c is not None
        assert c.shape[-1] == expand.latent_width(index)
        torch.testing.assert_close(expand.second(index, c), x @ w.T)
        # Where rows begin, how far apart they are, and how much is read of each.
        assert c.storage_offset() % UNIT == 0
        assert c.stride(-2) % UNIT == 0
        assert c.shape[-1] % UNIT == 0


@pytest.mark.parametrize("kind", ["low_rank", "naive"])
def test_contracting(kind: str) -> None:
    (p, *_) = projections()
    h = torch.randn(2, 3, IN, dtype=torch.float64)
    w = p.multiplied_out().w
    assert w is not None
    contract = get_strategy(kind, Group()).contract(p, share_range(IN, 1, 0))
    torch.testing.assert_close(contract(h), h @ w.T)


def test_what_moves_is_not_widened() -> None:
    expand = LowRankExpand(projections(), [ALL] * len(SLICES), Group(0, 5))
    assert expand.v is not None
    assert len(expand.v) == 5  # of 18 + 7 rows, a fifth
    assert [expand.latent_width(index) for index in range(len(SLICES))] == [13, 5, 15, 7]
    contract = LowRankContract(projections()[0], share_range(IN, 5, 0), Group(0, 5))
    assert len(contract.first) == 13
