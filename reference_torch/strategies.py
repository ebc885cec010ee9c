"""The three ways to split a model over ranks, by name; ``linear`` has what they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from reference_torch.config import Config
from reference_torch.group import Group
from reference_torch.linear import (
    LowRankContract,
    LowRankExpand,
    NaiveContract,
    NaiveExpand,
    Projection,
)
from reference_torch.shares import HeadShare, Share, share_heads, share_range

__all__ = ["STRATEGIES", "Contract", "Expand", "Strategy", "get_strategy"]


class Expand(Protocol):
    """Projections that read the residual stream; what their latents z are is their own affair."""

    def latents(self, x: Tensor) -> Any:
        """z of the block's normed input x [..., D]."""
        ...

    def latent(self, index: int, z: Any) -> Tensor | None:
        """What a cache of latents keeps for projection ``index``; None if it is dense."""
        ...

    def latent_width(self, index: int) -> int | None:
        """Elements of that."""
        ...

    def second(self, index: int, c: Tensor) -> Tensor:
        """The output of projection ``index`` from what the cache kept."""
        ...

    def output(self, index: int, x: Tensor, z: Any) -> Tensor:
        """The output of projection ``index``."""
        ...


class Contract(Protocol):
    """The projection that writes the residual stream."""

    def __call__(self, h: Tensor) -> Tensor:
        """What is added to it."""
        ...


class Strategy:
    """The paper's: factors stay factors, collectives move latents; heads and F are split."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def heads(self, config: Config) -> HeadShare:
        """The heads that this rank computes."""
        sizes = (config.heads, config.kv_heads, config.head_dim)
        return share_heads(*sizes, self.group.size, self.group.rank)

    def units(self, config: Config) -> Share:
        """The part of F that this rank computes."""
        return share_range(config.intermediate_size, self.group.size, self.group.rank)

    def expand(self, projections: Sequence[Projection], shares: Sequence[Share]) -> Expand:
        """Projections of one input; ``shares`` are the parts of their outputs."""
        return LowRankExpand(projections, shares, self.group)

    def contract(self, projection: Projection, share: Share) -> Contract:
        """``share`` is the part of its inputs."""
        return LowRankContract(projection, share, self.group)


class Dense(Strategy):
    """What tensor parallelism does to a dense model: factors are multiplied out beforehand."""

    def expand(self, projections: Sequence[Projection], shares: Sequence[Share]) -> Expand:
        """As above."""
        return super().expand([self._multiplied_out(p) for p in projections], shares)

    def contract(self, projection: Projection, share: Share) -> Contract:
        """As above."""
        return super().contract(self._multiplied_out(projection), share)

    def _multiplied_out(self, projection: Projection) -> Projection:
        self.group.beat()
        return projection.multiplied_out()


class Naive(Strategy):
    """The paper's baseline: every pair of factors is a layer of its own that is split in the
    middle, and all else is repeated on every rank."""

    def heads(self, config: Config) -> HeadShare:
        """All of them."""
        return share_heads(config.heads, config.kv_heads, config.head_dim, 1, 0)

    def units(self, config: Config) -> Share:
        """All of F."""
        return share_range(config.intermediate_size, 1, 0)

    def expand(self, projections: Sequence[Projection], shares: Sequence[Share]) -> Expand:
        """Outputs are whole, whatever the shares."""
        return NaiveExpand(projections, self.group)

    def contract(self, projection: Projection, share: Share) -> Contract:
        """Inputs are whole."""
        return NaiveContract(projection, self.group)


STRATEGIES: dict[str, type[Strategy]] = {"dense": Dense, "naive": Naive, "low_rank": Strategy}


def get_strategy(name: str, group: Group) -> Strategy:
    """Raises ValueError if there is none of that name."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](group)
