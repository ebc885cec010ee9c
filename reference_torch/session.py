"""Sequences on their way through a model: prompts in chunks, then a token of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference_torch.model import Model
from reference_torch.pages import Pages, Step

__all__ = ["Greedy", "Session", "greedy"]

WARM_UPS = 3  # runs before a CUDA graph is recorded, for what libraries do at first


class Session:
    """A batch of sequences and their cache.

    Args:
        model: on this rank.
        batch: B sequences; context: most tokens of each.
        page_size: S, tokens a page.
        kv_cache: ``"full"``, ``"latent"`` or ``"full+latent"``.
        cuda_graphs: whether the decode step is recorded once and replayed. Its tables then span the
            whole context from the start.
        seed: of the order in which pages are handed out.
        disturb: changes the places of decode steps, to break them on purpose.

    Attributes:
        lengths: tokens of each sequence in the cache.

    Raises:
        ValueError: CUDA graphs without a GPU, or a size below 1.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch: int,
        context: int,
        page_size: int = 16,
        kv_cache: str = "full",
        cuda_graphs: bool = False,
        seed: int = 0,
        disturb: Callable[[Step], None] | None = None,
    ) -> None:
        self.model, self.device = model, model.group.device
        if cuda_graphs and self.device.type != "cuda":
            raise ValueError(f"cuda_graphs: expected a CUDA device, got {self.device}")
        for name, value in (("batch", batch), ("context", context), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.context, self.disturb = context, disturb
        self.pages = Pages(batch, context, page_size, seed)
        self.caches = model.cache(self.pages, kv_cache)
        self.lengths = [0] * batch
        self._graph = _Graph() if cuda_graphs else None
        self._step: Step | None = None

    @torch.inference_mode()
    def prefill(
        self, row: int, tokens: Sequence[int], chunk: int, residuals: list[Tensor] | None = None
    ) -> Tensor:
        """Appends a prompt to sequence ``row``.

        Args:
            tokens: ids.
            chunk: most of them in one pass.
            residuals: gets the residual stream [1, T, D] after the embedding and each layer, of one
                chunk after the other.

        Returns:
            The residual stream after the last layer [P, D].
        """
        if not tokens:
            raise ValueError(f"sequence {row}: expected at least one token, got none")
        if chunk < 1:
            raise ValueError(f"chunk: expected at least 1 token, got {chunk}")
        if not 0 <= row < len(self.lengths):
            raise ValueError(f"row: expected 0 to {len(self.lengths) - 1}, got {row}")
        words = self.model.config.vocab_size
        bad = [token for token in tokens if not 0 <= token < words]
        if bad:
            raise ValueError(f"sequence {row}: expected ids from 0 to {words - 1}, got {bad[:10]}")
        if self._graph is not None and self._step is not None:
            raise ValueError("expected no prompt once a CUDA graph has been recorded, got one")
        self._step = None
        self._check_room([row], len(tokens))
        found = []
        for first in range(0, len(tokens), chunk):
            part = torch.tensor([tokens[first : first + chunk]], device=self.device)
            start, count = self.lengths[row], part.shape[1]
            step = self.pages.step([row], [start], count, start + count, self.device)
            found.append(self.model(part, step, self.caches, residuals)[0])
            self.lengths[row] += count
        return torch.cat(found)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, residuals: list[Tensor] | None = None) -> Tensor:
        """Appends a token to every sequence.

        Args:
            tokens: int64 [B], ids of the vocabulary.
            residuals: gets the residual stream [B, 1, D] after the embedding and each layer.

        Returns:
            Logits of the next token [B, W], valid until the next step.
        """
        self._check_room(range(len(self.lengths)), 1)
        step = self._decode_step()
        if self._graph is None:
            x = self.model(tokens[:, None], step, self.caches, residuals)
            logits = self.model.logits(x[:, 0])
        else:
            logits = self._graph.run(self.model, tokens, step, self.caches, residuals)
        self.lengths = [length + 1 for length in self.lengths]
        step.start.add_(1)
        return logits

    def _decode_step(self) -> Step:
        """The step for the sequences as they are. Their pages never change, so from one decode to
        the next only ``start`` does, on the device, until one more page is looked at."""
        span = self.context if self._graph is not None else max(self.lengths) + 1
        if self._step is None or self._step.table.shape[1] != -(-span // self.pages.size):
            rows = list(range(len(self.lengths)))
            fresh = self.pages.step(rows, self.lengths, 1, span, self.device)
            if self.disturb is not None:
                self.disturb(fresh)
            self._step = fresh
        return self._step

    def _check_room(self, rows: Sequence[int], count: int) -> None:
        for row in rows:
            if self.lengths[row] + count > self.context:
                raise ValueError(
                    f"sequence {row}: expected at most {self.context} tokens, got "
                    f"{self.lengths[row] + count}"
                )


class _Graph:
    """A decode step as a CUDA graph: all that changes are the contents of its inputs."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._residuals: list[Tensor] = []

    def run(
        self,
        model: Model,
        tokens: Tensor,
        step: Step,
        caches: list,
        residuals: list[Tensor] | None,
    ) -> Tensor:
        if self._graph is None:
            self._tokens = tokens.clone()
            self._record(model, step, caches)
        self._tokens.copy_(tokens)
        assert self._graph is not None
        self._graph.replay()
        model.group.beat()
        model.group.moved.update(self._moved)
        model.group.calls.update(self._calls)
        if residuals is not None:
            residuals += [x.clone() for x in self._residuals]
        return self._logits

    def _record(self, model: Model, step: Step, caches: list) -> None:
        def run() -> Tensor:
            self._residuals.clear()
            x = model(self._tokens[:, None], step, caches, self._residuals)
            return model.logits(x[:, 0])

        group = model.group
        counted = group.moved.copy(), group.calls.copy()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):  # each writes the same entries of the cache again
                run()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # What is recorded runs nothing yet, and what is replayed counts nothing.
        group.moved.clear()
        group.calls.clear()
        # Only this thread is forbidden what cannot be recorded: NCCL has one that goes on looking.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = run()
        self._moved, self._calls = group.moved, group.calls
        group.moved, group.calls = counted


class Greedy(NamedTuple):
    """Greedy continuations of a batch.

    Attributes:
        tokens: int64 [n, B].
        margins: [n, B], best minus second-best logit; tops: [n, B], the best.
    """

    tokens: Tensor
    margins: Tensor
    tops: Tensor


@torch.inference_mode()
def greedy(session: Session, prompts: Sequence[Sequence[int]], count: int, chunk: int) -> Greedy:
    """Continues prompts by ``count`` tokens each, through an empty session's cache.

    Raises:
        ValueError: not a prompt for every sequence, no tokens wanted, or the session has been used.
    """
    if len(prompts) != len(session.lengths) or any(session.lengths):
        raise ValueError(
            f"expected prompts for {len(session.lengths)} empty sequences, got {len(prompts)} for "
            f"lengths {session.lengths}"
        )
    if count < 1:
        raise ValueError(f"count: expected at least 1 token, got {count}")
    lasts = [session.prefill(row, prompt, chunk)[-1] for row, prompt in enumerate(prompts)]
    logits = session.model.logits(torch.stack(lasts))
    found = []
    for position in range(count):
        best = logits.topk(2, dim=-1)
        found.append((best.indices[:, 0], best.values[:, 0] - best.values[:, 1], best.values[:, 0]))
        if position < count - 1:
            logits = session.decode(best.indices[:, 0])
    return Greedy(*(torch.stack(part) for part in zip(*found, strict=True)))
