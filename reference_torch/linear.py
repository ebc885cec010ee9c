"""Linears, dense or decomposed (y = u (v x) + b), and how they are split over ranks.

A block's *expanding* projections (q, k, v; gate, up) read the residual stream, its *contracting*
one (o; down) writes it. Between the two, activations are per head or per unit of the feed-forward.
The residual stream x is whole on every rank. There are two ways to split:

``LowRankExpand`` and ``LowRankContract`` are the paper's. v of the expanding projections is cut on
the rank axis R, and an all-gather brings z = v x together; every u is cut on its outputs, so that a
rank gets its own heads, or its own part of F. The contracting v is cut on its inputs, which a rank
has anyway, an all-reduce adds up z, and u is whole everywhere. Both collectives move R elements a
token. A projection that is dense is cut on its outputs, or on its inputs with an all-reduce of D.

``NaiveExpand`` and ``NaiveContract`` are the paper's baseline. Each pair of factors is cut on R in
the middle: z stays on its rank, and the all-reduce adds up the *whole output* of u. So every rank
has all heads, and repeats the attention.

Weights are [out, in] as in checkpoints. Ranks can be odd numbers, and rows of odd lengths make a
GPU's products slow. So a latent that is not moved gets entries without a meaning behind or around
it, up to multiples of ``UNIT``, which u meets with columns of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from reference_torch.config import Slice
from reference_torch.group import Group
from reference_torch.shares import Share, padded, round_up, share_range

__all__ = [
    "LowRankContract",
    "LowRankExpand",
    "NaiveContract",
    "NaiveExpand",
    "Projection",
]


UNIT = 8  # elements: 16 bytes of half precision, the most that a thread reads at once


@dataclass
class Projection:
    """A linear as the checkpoint has it, whole.

    Attributes:
        w: [out, in], of a dense one.
        u: [out, rank], of a decomposed one; slice: what it reads; v: that tensor, [R, in].
        bias: [out], or None.
    """

    w: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None
    slice: Slice | None = None
    bias: Tensor | None = None

    def own_v(self) -> Tensor:
        """The rows of v [rank, in] that u reads."""
        assert self.v is not None and self.slice is not None
        return self.v[self.slice.offset : self.slice.offset + self.slice.rank]

    def multiplied_out(self) -> Projection:
        """As a dense one: W = u v."""
        if self.u is None:
            return self
        w = self.u.double() @ self.own_v().double()
        return Projection(w=w.to(self.u.dtype), bias=self.bias)


class LowRankExpand:
    """y_j = u_j z[slice j] + b_j, with z = v x gathered once for all projections of the block.

    Args:
        projections: in the order in which their outputs are wanted.
        shares: the part of each one's outputs that this rank has.
    """

    def __init__(
        self, projections: Sequence[Projection], shares: Sequence[Share], group: Group
    ) -> None:
        self.group = group
        self.w = [_rows(p.w, share) for p, share in zip(projections, shares, strict=True)]
        self.u = [_rows(p.u, share) for p, share in zip(projections, shares, strict=True)]
        self.bias = [_rows(p.bias, share) for p, share in zip(projections, shares, strict=True)]

        # The distinct v's one after the other are one matrix, and slices are places in there.
        unit = _unit(group)
        factors = {p.slice.v: p.v for p in projections if p.slice is not None and p.v is not None}
        starts, rows = {}, []
        for name, v in factors.items():
            starts[name] = sum(map(len, rows))
            rows.append(padded(v, round_up(len(v), unit)))
        self.slices: list[slice | None] = [None] * len(projections)
        for index, (u, p) in enumerate(zip(self.u, projections, strict=True)):
            if u is not None and p.slice is not None:
                first = starts[p.slice.v] + p.slice.offset
                self.slices[index], self.u[index] = _widened(first, u, unit)
        self.v = None
        if rows:
            v = torch.cat(rows)
            # Parts that are cut without regard to the slices, and gathered in their order.
            self.v = share_range(len(v), group.size, group.rank).of(v, axis=0)

    def latents(self, x: Tensor) -> Tensor | None:
        """z [..., R] of all decomposed projections, whole."""
        if self.v is None:
            return None
        return self.group.all_gather(linear(x, self.v))

    def latent(self, index: int, z: Tensor | None) -> Tensor | None:
        """What projection ``index`` reads of z [..., rank]; None if it is dense."""
        place = self.slices[index]
        if place is None or z is None:
            return None
        return z[..., place]

    def latent_width(self, index: int) -> int | None:
        """Elements of it."""
        place = self.slices[index]
        return None if place is None else place.stop - place.start

    def second(self, index: int, c: Tensor) -> Tensor:
        """The output of projection ``index`` for its latent c [..., rank], this rank's part."""
        u = self.u[index]
        assert u is not None
        return linear(c, u, self.bias[index])

    def output(self, index: int, x: Tensor, z: Tensor | None) -> Tensor:
        """The output of projection ``index``, this rank's part."""
        c, w = self.latent(index, z), self.w[index]
        if c is not None:
            return self.second(index, c)
        assert w is not None
        return linear(x, w, self.bias[index])


class LowRankContract:
    """y = u Σ_ranks (v h) + b.

    Args:
        share: the part of the inputs that this rank has.
    """

    def __init__(self, projection: Projection, share: Share, group: Group) -> None:
        self.group, self.bias, self.u = group, projection.bias, projection.u
        first = projection.w
        if projection.u is not None:
            place, self.u = _widened(0, projection.u, _unit(group))
            first = padded(projection.own_v(), place.stop)
        assert first is not None
        self.first = share.of(first, axis=1)

    def __call__(self, h: Tensor) -> Tensor:
        """What is added to the residual, whole [..., D], of this rank's part of h."""
        z = self.group.all_reduce(linear(h, self.first))  # R wide, or D if it is dense
        if self.u is not None:
            z = linear(z, self.u)
        return z if self.bias is None else z + self.bias


class NaiveExpand:
    """y_j = Σ_ranks u_j z_j + b_j, with z_j this rank's part of v x."""

    def __init__(self, projections: Sequence[Projection], group: Group) -> None:
        self.group = group
        self.parts = [_NaivePart(projection, group) for projection in projections]

    def latents(self, x: Tensor) -> list[Tensor]:
        """This rank's part of every projection's latent, or of x where it is dense."""
        # Projections that share a v have the same part, computed once.
        found: dict[Slice, Tensor] = {}
        for part in self.parts:
            if part.slice is not None and part.slice not in found:
                found[part.slice] = part.first(x)
        return [part.first(x) if part.slice is None else found[part.slice] for part in self.parts]

    def latent(self, index: int, z: list[Tensor]) -> Tensor | None:
        """This rank's part of what projection ``index`` reads; None if it is dense."""
        return None if self.parts[index].v is None else z[index]

    def latent_width(self, index: int) -> int | None:
        """Elements of it."""
        return None if self.parts[index].v is None else self.parts[index].width

    def second(self, index: int, c: Tensor) -> Tensor:
        """The output of projection ``index``, whole, of every rank's part c of its latent."""
        return self.parts[index].second(c)

    def output(self, index: int, x: Tensor, z: list[Tensor]) -> Tensor:
        """The output of projection ``index``, whole."""
        return self.second(index, z[index])


class NaiveContract:
    """The same for the projection that writes the residual: all of h is on every rank."""

    def __init__(self, projection: Projection, group: Group) -> None:
        self.part = _NaivePart(projection, group)

    def __call__(self, h: Tensor) -> Tensor:
        """What is added to the residual, whole [..., D]."""
        return self.part.second(self.part.first(h))


class _NaivePart:
    """One linear cut in the middle: between its factors, or, where it is dense, on its inputs."""

    def __init__(self, projection: Projection, group: Group) -> None:
        self.group, self.bias, self.slice = group, projection.bias, projection.slice
        last = projection.w if projection.u is None else projection.u
        assert last is not None
        unit = 1 if projection.u is None else UNIT
        cut = share_range(last.shape[1], group.size, group.rank, unit)
        self.last = cut.of(last, axis=1)
        self.v = None if projection.u is None else cut.of(projection.own_v(), axis=0)
        self.start, self.width = group.rank * cut.width, cut.width

    def first(self, x: Tensor) -> Tensor:
        if self.v is not None:
            return linear(x, self.v)
        part = x[..., self.start : self.start + self.width]
        return pad(part, (0, self.width - part.shape[-1]))

    def second(self, c: Tensor) -> Tensor:
        y = self.group.all_reduce(linear(c, self.last))  # as wide as the whole output
        return y if self.bias is None else y + self.bias


def _unit(group: Group) -> int:
    """What a collective moves are ranks as they are; on one rank there is none."""
    return UNIT if group.size == 1 else 1


def _widened(first: int, u: Tensor, unit: int) -> tuple[slice, Tensor]:
    """The place from ``first`` on that u [out, rank] reads, widened to multiples of ``unit``, and u
    with columns of zeros for what else is there."""
    end = first + u.shape[1]
    place = slice(first // unit * unit, round_up(end, unit))
    return place, pad(u, (first - place.start, place.stop - end))


def _rows(tensor: Tensor | None, share: Share) -> Tensor | None:
    return None if tensor is None else share.of(tensor, axis=0)
