"""From a checkpoint's tensors to the parts of them that a rank has, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from reference_torch.config import Config
from reference_torch.linear import Projection
from reference_torch.shares import Share, share_range
from reference_torch.strategies import Contract, Expand, Strategy

__all__ = ["Loader", "Tensors"]


class Tensors(Protocol):
    """Where tensors come from: a ``Checkpoint``, or something in its place."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, *shape: int) -> Tensor:
        """A whole tensor of that shape."""
        ...


class Loader:
    """Makes layers of tensors by name.

    Args:
        tensors: whole, as stored.
        config: of the model.
        strategy: how linears are split.
        dtype: of weights and activations.
    """

    def __init__(
        self, tensors: Tensors, config: Config, strategy: Strategy, dtype: torch.dtype
    ) -> None:
        self.tensors, self.config, self.strategy, self.dtype = tensors, config, strategy, dtype
        self.device = strategy.group.device
        self.heads, self.units = strategy.heads(config), strategy.units(config)
        rows: dict[str, int] = {}
        for piece in config.slices.values():
            rows[piece.v] = max(rows.get(piece.v, 0), piece.offset + piece.rank)
        self._rows = rows

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A whole tensor."""
        self.strategy.group.beat()
        return self.tensors.read(name, *shape).to(self.device, self.dtype)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """A whole tensor, or None where there is none of that name."""
        return self.tensor(name, *shape) if name in self.tensors else None

    def expand(self, outputs: Mapping[str, tuple[int, Share]], in_features: int) -> Expand:
        """Projections of one input.

        Args:
            outputs: by full name, the whole width and this rank's part of it.
        """
        factors: dict[str, Tensor] = {}  # read once, also those that several share
        projections = [
            self._projection(name, width, in_features, factors)
            for name, (width, _) in outputs.items()
        ]
        return self.strategy.expand(projections, [share for _, share in outputs.values()])

    def contract(self, name: str, in_features: int, share: Share) -> Contract:
        """The projection that writes the residual; ``share`` is this rank's part of its input."""
        projection = self._projection(name, self.config.hidden_size, in_features, {})
        return self.strategy.contract(projection, share)

    def words(self, name: str) -> Tensor:
        """This rank's rows of a table [W, D], padded so that all ranks have as many."""
        group, config = self.strategy.group, self.config
        group.beat()
        share = share_range(config.vocab_size, group.size, group.rank)
        whole = self.tensors.read(name, config.vocab_size, config.hidden_size)
        return share.of(whole, axis=0).to(self.device, self.dtype)

    def _projection(self, name: str, out: int, into: int, factors: dict[str, Tensor]) -> Projection:
        piece = self.config.slices.get(name)
        if piece is None:
            w = self.tensor(f"{name}.weight", out, into)
            return Projection(w=w, bias=self.optional(f"{name}.bias", out))
        if piece.v not in factors:
            factors[piece.v] = self.tensor(piece.v, self._rows[piece.v], into)
        return Projection(
            u=self.tensor(f"{name}.u.weight", out, piece.rank),
            v=factors[piece.v],
            slice=piece,
            bias=self.optional(f"{name}.u.bias", out),
        )
