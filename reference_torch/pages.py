"""The paged KV cache: pools of pages, a block table, and the paper's two stages for latents.

A page holds S tokens of one sequence. Of each token a layer keeps K after RoPE and V (*full*), or
what k's and v's second factors read, before RoPE (*latent*).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from reference_torch.rope import Rope, Turns

__all__ = ["FullPool", "LatentPool", "LayerCache", "Pages", "Pool", "Step", "View"]


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

    @property
    def live_positions(self) -> Tensor:
        """[C · S], of the tokens in the live pages."""
        slots = torch.arange(self.page_size, device=self.start.device)
        return (self.live_begin[:, None] + slots).flatten()


class View:
    """What all layers of a step have in common, computed once.

    Args:
        windows: of the layers.
        queries: query heads that read one kv head.
        dtype: of the masks.

    Attributes:
        turns: of the new tokens.
        masks: by window, what is added to scores [B, 1, queries · T, M·S]: 0 where a new token sees
            a cached one, else −inf; the same for each query head.
    """

    def __init__(
        self,
        step: Step,
        rope: Rope,
        windows: Iterable[int | None],
        queries: int,
        dtype: torch.dtype,
    ) -> None:
        positions = step.positions
        self.step, self._rope = step, rope
        self.turns = rope.turns(positions)
        self._page = step.table.gather(1, positions // step.page_size)
        self._slot = positions % step.page_size

        context = torch.arange(step.table.shape[1] * step.page_size, device=positions.device)

        def mask(window: int | None) -> Tensor:
            hidden = context > positions[..., None]
            if window is not None:
                hidden |= context <= positions[..., None] - window
            seen = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            # Rows of their own: fused attention on a GPU wants no stride of 0 there.
            return seen.masked_fill_(hidden, -torch.inf).repeat(1, queries, 1)[:, None]

        self.masks = {window: mask(window) for window in set(windows)}

    @cached_property
    def live_turns(self) -> Turns:
        """Of the tokens in the live pages; only latent keys need them."""
        return self._rope.turns(self.step.live_positions)

    def write(self, pool: Tensor, values: Tensor) -> None:
        """Puts values [B, T, …] of the new tokens into their pages of a pool [P, S, …]."""
        pool[self._page, self._slot] = values


class Pool(Protocol):
    """Keys or values of all sequences of a layer, in whatever form they are kept."""

    def extended(
        self,
        view: View,
        *,
        heads: Callable[[], Tensor],
        latent: Callable[[], Tensor],
        rebuild: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Puts the new tokens in, and gives what is cached of every sequence [B, M·S, K, H].

        Args:
            view: where, and of what.
            heads: the new tokens' [B, T, K, H].
            latent: what they are computed from [B, T, r].
            rebuild: from latents [C·S, r] of the live pages to heads [C·S, K, H].
        """
        ...


class FullPool:
    """Pages of heads [P, S, K, H]."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def extended(
        self,
        view: View,
        *,
        heads: Callable[[], Tensor],
        latent: Callable[[], Tensor],
        rebuild: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """As they are."""
        view.write(self.data, heads())
        return _by_sequence(self.data, view.step.table)


class LatentPool:
    """Pages of latents [P, S, r].

    Args:
        data: of both k and v, perhaps; then only one of the two pools is to write.
        writes: whether this one does.
    """

    def __init__(self, data: Tensor, *, writes: bool = True) -> None:
        self.data, self.writes = data, writes

    def extended(
        self,
        view: View,
        *,
        heads: Callable[[], Tensor],
        latent: Callable[[], Tensor],
        rebuild: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The pages of the batch are copied side by side into one buffer, and *one* product with u
        rebuilds all of it."""
        if self.writes:
            view.write(self.data, latent())
        compact = self.data.index_select(0, view.step.live)  # [C, S, r]
        found = rebuild(compact.flatten(0, 1)).unflatten(0, compact.shape[:2])  # [C, S, K, H]
        return _by_sequence(found, view.step.live_table)


def _by_sequence(pages: Tensor, table: Tensor) -> Tensor:
    """Pages [P, S, K, H] in the order of a table [B, M]: [B, M·S, K, H]."""
    found = pages.index_select(0, table.flatten())
    return found.unflatten(0, table.shape).flatten(1, 2)


class LayerCache(NamedTuple):
    """A layer's pools."""

    keys: Pool
    values: Pool
