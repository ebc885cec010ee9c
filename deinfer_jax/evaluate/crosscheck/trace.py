"""Runs given tokens through a loaded model's own weights, cache and views, and keeps the residual
stream after every layer.

The programs here are to ``engine.programs`` what a debugger's are to a release's: the same model,
pools and views, with more outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.cache.preparation import Preparation, prepare
from deinfer_jax.cache.view import CacheView, DecodeView, PrefillView
from deinfer_jax.engine.buckets import fit
from deinfer_jax.engine.llm import LLM
from deinfer_jax.engine.programs import Weights
from deinfer_jax.evaluate.communication import collectives
from deinfer_jax.parallel.mesh import AXIS

__all__ = ["Trace", "scattered"]

Traced = tuple[np.ndarray, np.ndarray]  # residual stream [L + 1, T, D], logits [T, W]


class Trace:
    """A model whose layers are looked at.

    Args:
        llm: loaded; nothing else may run on it meanwhile.
        tables: int32 [B, M], the pages of each sequence, which the caller has borrowed.

    Attributes:
        moved: elements of a decoded token's collectives at their full size, by name, as its program
            has them: with padding, and where heads of the context are added up, those of the
            bucket. Logits are read in parts and not gathered.
    """

    def __init__(self, llm: LLM, tables: np.ndarray) -> None:
        runner = llm.runner
        options: dict[str, Any] = dict(implementation=runner.implementation)
        self.runner, self.tables, self.vocab_size = runner, tables, llm.config.vocab_size
        self.moved: dict[str, float] = {}
        self._chunk = self._program(partial(_chunk, runner.graph, **options), arguments=4)
        self._step = self._program(partial(_step, runner.graph, **options), arguments=5)

    def prefill(self, sequence: int, prompt: np.ndarray) -> Traced:
        """Runs a prompt, int32 [T], in chunks."""
        step = self.runner.buckets.chunk[-1]
        chunks = []
        for start in range(0, len(prompt), step):
            tokens = prompt[start : start + step]
            rows, entries = self.runner.buckets.for_chunk(len(tokens), start + len(tokens))
            hidden, logits = self._run(
                self._chunk,
                np.pad(tokens, (0, rows - len(tokens))),
                np.asarray(start, np.int32),
                np.asarray(len(tokens), np.int32),
                self.tables[sequence, :entries],
            )
            chunks.append((hidden[:, : len(tokens)], logits[: len(tokens)]))
        hidden, logits = zip(*chunks, strict=True)
        return np.concatenate(hidden, axis=1), np.concatenate(logits)

    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> Traced:
        """Runs one token of every sequence.

        Args:
            tokens: int32 [B].
            lengths: int32 [B], tokens in the cache before it.
        """
        buckets, layout = self.runner.buckets, self.runner.layout
        count, entries = self.tables.shape
        rows = fit(count, buckets.batch)
        preparation = None
        if layout.compacts:
            preparation = prepare(
                [
                    table[: layout.pages_for(int(length) + 1)].tolist()
                    for table, length in zip(self.tables, lengths, strict=True)
                ],
                page_size=layout.page_size,
                rows=rows,
                entries=entries,
                sizes=buckets.compact(rows, entries)[-1:],  # one program for all steps
            )
        idle = (0, rows - count)
        arguments = (
            np.pad(tokens, idle),
            np.pad(self.tables, (idle, (0, 0))),
            np.pad(lengths, idle),
            np.arange(rows) < count,
            preparation,
        )
        if self.runner.placement.count > 1 and not self.moved:
            self.moved = self._moved(rows, arguments)
        hidden, logits = self._run(self._step, *arguments)
        return hidden[:, :count], logits[:count]

    def _moved(self, rows: int, arguments: tuple[Any, ...]) -> dict[str, float]:
        """Of the decode program, a row."""
        program = self._step.lower(self.runner.weights, self.runner.pools, *arguments)
        found = Counter[str]()
        for one in collectives(program):
            found[one.kind.replace("-", "_")] += one.payload
        return {name: count / rows for name, count in found.items()}

    def _program(self, function: Any, *, arguments: int) -> Any:
        runner, same = self.runner, PartitionSpec()
        residual = AXIS if runner.strategy.splits_residual else None
        spread = runner.placement.spread(
            function,
            (runner.weight_specs, runner.pool_specs, *arguments * (same,)),
            (runner.pool_specs, PartitionSpec(None, None, residual), PartitionSpec(None, AXIS)),
        )
        return jax.jit(spread, donate_argnums=1)

    def _run(self, program: Any, *arguments: Any) -> Traced:
        runner = self.runner
        # As the runner compiles its own; does nothing on a CPU.
        exact = "highest" if runner.layout.dtype == "float32" else None
        with jax.default_matmul_precision(exact or jax.config.jax_default_matmul_precision):
            runner.pools, *results = program(runner.weights, runner.pools, *arguments)
        hidden, logits = (np.asarray(result) for result in results)
        return hidden, logits[:, : self.vocab_size]  # the rest is padding of a split axis


@contextmanager
def scattered(allocator: PageAllocator) -> Iterator[None]:
    """Holds every second free page, so that nothing that is allocated meanwhile is a run."""
    every = allocator.allocate(allocator.num_free)
    allocator.release(every[1::2])
    yield
    allocator.release(every[::2])


def _chunk(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    tokens: Any,  # [T]
    start: Any,  # ()
    length: Any,  # ()
    block_table: Any,  # [M]
    *,
    implementation: str | None,
) -> Any:
    view = PrefillView(block_table, start, length, implementation)
    return _traced(graph, weights, pools, tokens, view)


def _step(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    tokens: Any,  # [b]
    block_tables: Any,  # [b, M]
    lengths: Any,  # [b]
    active: Any,  # [b]
    preparation: Preparation | None,
    *,
    implementation: str | None,
) -> Any:
    view = DecodeView(block_tables, lengths, active, preparation, implementation)
    return _traced(graph, weights, pools, tokens, view)


def _traced(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: Sequence[LayerPool],
    tokens: Any,
    view: CacheView,
) -> Any:
    """Pools, the residual stream [L + 1, T, D] and logits [T, W] in float32."""
    model = nnx.merge(graph, weights)
    stream, pools = model.residual_stream(tokens, pools, view)
    hidden = jnp.stack([x.astype(jnp.float32) for x in stream])
    return pools, hidden, model.logits(stream[-1])
