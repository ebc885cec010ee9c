"""The paged KV cache: pools of pages, a block table, and the paper's two stages for latents.

A page holds S tokens of one sequence. Of each token a layer keeps K after RoPE and V (*full*), or
what k's and v's second factors read, before RoPE (*latent*).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LayerCache", "Pages", "Pool", "Step"]


class Pages:
    """Which pages each sequence has. Host code.

    Pages are handed out in a shuffled order, so that nothing works by luck on neighbours.

    Args:
        batch: sequences; context: most tokens of each; page_size: S.
        seed: of the order.
    """

    def __init__(self, batch: int, context: int, page_size: int, seed: int = 0) -> None:
        self.size = page_size
        self.per_sequence = -(-context // page_size)
        self.count = batch * self.per_sequence
        order = list(range(self.count))
        random.Random(seed).shuffle(order)
        width = self.per_sequence
        self.tables = [order[row * width : (row + 1) * width] for row in range(batch)]

    def step(
        self, rows: list[int], starts: list[int], tokens: int, span: int, device: torch.device
    ) -> Step:
        """A step that appends ``tokens`` tokens to each of the sequences ``rows``, which have
        ``starts`` in the cache; it looks at the pages of the first ``span`` tokens of each."""
        tables = [self.tables[row][: -(-span // self.size)] for row in rows]
        # The preparation: every page of the batch once, and the tables in terms of that list.
        live = [page for table in tables for page in table]
        places = {page: place for place, page in enumerate(live)}
        begins = [i * self.size for table in tables for i in range(len(table))]

        def tensor(values: list[list[int]] | list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Step(
            table=tensor(tables),
            start=tensor(starts),
            live=tensor(live),
            live_table=tensor([[places[page] for page in table] for table in tables]),
            live_begin=tensor(begins),
            tokens=tokens,
            page_size=self.size,
        )


@dataclass
class Step:
    """Where a step's tokens go, and what they may see. All tensors int64, of constant shapes for a
    batch and a number of tokens: a CUDA graph's static inputs.

    Attributes:
        table: [B, M], the pages of each sequence in order.
        start: [B], tokens in the cache before this step.
        live: [C], the pages to be compacted; live_table: [B, M], the tables in terms of places
            among them; live_begin: [C], the position of each one's first token.
        tokens: T, new ones of each sequence; page_size: S.
    """

    table: Tensor
    start: Tensor
    live: Tensor
    live_table: Tensor
    live_begin: Tensor
    tokens: int
    page_size: int

    @property
    def positions(self) -> Tensor:
        """[B, T], of the new tokens."""
        return self.start[:, None] + torch.arange(self.tokens, device=self.start.device)

    def seen(self, window: int | None) -> Tensor:
        """bool [B, T, M·S]: which cached tokens each new one attends to."""
        context = torch.arange(self.table.shape[1] * self.page_size, device=self.start.device)
        positions = self.positions[..., None]
        seen = context <= positions
        return seen if window is None else seen & (context > positions - window)

    def write(self, pool: Tensor, values: Tensor) -> None:
        """Puts values [B, T, …] of the new tokens into a pool [P, S, …]."""
        positions = self.positions
        page = self.table.gather(1, positions // self.page_size)
        pool[page, positions % self.page_size] = values


class Pool:
    """Pages of one kind of entry [P, S, …]."""

    def __init__(self, pages: Pages, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(pages.count, pages.size, *shape, dtype=dtype, device=device)

    def full(self, step: Step) -> Tensor:
        """Cached heads of every sequence [B, M·S, K, H]."""
        return self.data[step.table].flatten(1, 2)

    def rebuilt(self, step: Step, rebuild: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The same from latents.

        The pages of the batch are copied side by side into one buffer, *one* product with u
        rebuilds all of it, and RoPE turns each token by the position that its page begins at.

        Args:
            step: with the preparation.
            rebuild: from latents [C·S, r] and positions [C·S] to heads [C·S, K, H].
        """
        compact = self.data.index_select(0, step.live)  # [C, S, r]
        slots = torch.arange(step.page_size, device=step.live.device)
        positions = (step.live_begin[:, None] + slots).flatten()
        heads = rebuild(compact.flatten(0, 1), positions)
        heads = heads.unflatten(0, compact.shape[:2])  # [C, S, K, H]
        return heads[step.live_table].flatten(1, 2)


@dataclass
class LayerCache:
    """A layer's pools. ``latent_keys`` and ``latent_values`` say which of them hold latents; both
    are the same pool where k and v read the same latent."""

    keys: Pool
    values: Pool
    latent_keys: bool
    latent_values: bool
