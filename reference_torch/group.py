"""The ranks that share a model, and the collectives between them: all of them are in this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "LostContact"]


class LostContact(RuntimeError):
    """A collective failed, mostly because another rank is gone."""


class Group:
    """One rank's view of all.

    Args:
        rank: of this process; size: of the group; device: of this rank.
        beat: called whenever something has moved on, which tells a rank that hangs from those that
            wait for it, see ``launch``.

    Attributes:
        moved: elements of the collectives so far, by name: of an all-reduce the sum's, of an
            all-gather the result's. calls: how many there were.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: str = "cpu",
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.beat = rank, size, beat
        self.device = torch.device(device)
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of x [..., n], which may be overwritten with it."""
        self.beat()
        if self.size == 1:
            return x
        self._count("all_reduce", x.numel())
        x = x.contiguous()
        self._wait_for(lambda: dist.all_reduce(x))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The parts x [..., n] of all ranks side by side [..., size · n]."""
        self.beat()
        if self.size == 1:
            return x
        self._count("all_gather", x.numel() * self.size)
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])  # one after the other on axis 0
        self._wait_for(lambda: dist.all_gather_into_tensor(parts, x.contiguous()))
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def _count(self, name: str, elements: int) -> None:
        self.moved[name] += elements
        self.calls[name] += 1

    def _wait_for(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise LostContact(str(error)) from error
