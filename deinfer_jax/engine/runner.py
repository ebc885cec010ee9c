"""Owns what lives on the devices (weights, pools, batch state) and the compiled programs that run
there."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from tqdm import tqdm

from deinfer_jax.cache.layout import CacheLayout
from deinfer_jax.cache.pool import LayerPool, empty_pool, pool_specs
from deinfer_jax.cache.preparation import Preparation, prepare
from deinfer_jax.engine import programs
from deinfer_jax.engine.buckets import Buckets, Key, described, fit
from deinfer_jax.engine.memory import MemoryPlan, available_bytes, explained
from deinfer_jax.engine.programs import Growth, PromptChunk
from deinfer_jax.engine.request import Request, Sampling
from deinfer_jax.engine.sampler import Drawn, SamplingParams
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep
from deinfer_jax.parallel.mesh import Placement
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["RecompilationError", "Runner"]

logger = logging.getLogger(__name__)


class RecompilationError(RuntimeError):
    """A program that the warm-up did not compile was asked for after it."""


class Runner:
    """Compiles programs ahead of time and dispatches them.

    Args:
        graph: structure of the model.
        weights: its parameters, on the devices.
        specs: how they are split, in the same tree.
        layout: of the cache, on one device.
        num_pages: pages of each pool.
        max_batch: slots.
        buckets: shapes of the programs.
        strategy: by which the model is split.
        placement: where everything lives.
        implementation: of the kernels, see ``deinfer_kernels``.

    Attributes:
        guard: whether a compilation after ``warm_up`` is an error.
        compilations: programs compiled so far.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Any],
        weights: programs.Weights,
        specs: Any,
        layout: CacheLayout,
        *,
        num_pages: int,
        max_batch: int,
        buckets: Buckets,
        strategy: Strategy,
        placement: Placement,
        implementation: str | None,
    ) -> None:
        self.graph, self.weights, self.layout = graph, weights, layout
        self.buckets, self.strategy, self.placement = buckets, strategy, placement
        self.implementation = implementation
        self.weight_specs = specs
        self.pool_specs = [pool_specs(layer, *strategy.pool_specs()) for layer in layout.layers]
        self.num_pages = num_pages
        self.max_batch = max(2, max_batch)
        self.max_pages = buckets.pages[-1]
        self.guard = True
        self.compilations = 0
        self._sealed = False
        self._executables: dict[Key, jax.stages.Compiled] = {}
        self.pools: list[LayerPool] = []
        self.state: programs.BatchState | None = None
        self.reset()

    # What the engine dispatches. Results are device arrays: reading them is the caller's business.

    def prefill(self, step: PrefillStep) -> Drawn:
        """Dispatches a prompt chunk; returns the token drawn after it, arrays [1]."""
        request = step.request
        if step.copy is not None:
            source, target = (_scalar(page, np.int32) for page in step.copy)
            self.pools = self._run(_COPY, self.pools, source, target)
        rows, pages = self.buckets.for_chunk(step.length, step.start + step.length)
        chunk = self._prompt_chunk(request, step.start, step.length, rows)
        self.pools, self.state, drawn = self._run(
            ("prefill", rows, pages), self.weights, self.pools, self.state, chunk
        )
        request.pages_sent = len(request.pages)
        return drawn

    def decode(self, step: DecodeStep) -> Drawn:
        """Dispatches decode steps; returns tokens, arrays [steps, b], column j for
        ``step.requests[j]``."""
        rows = fit(len(step.requests), self.buckets.batch)
        pages = fit(self.layout.pages_for(step.context), self.buckets.pages)
        slots = np.full(rows, self.max_batch, np.int32)
        slots[: len(step.requests)] = [request.slot for request in step.requests]
        plain = self.buckets.plain and all(r.sampling.plain for r in step.requests)
        key: Key = ("decode-plain" if plain else "decode", rows, pages)
        preparation = None
        if self.layout.compacts:
            preparation = prepare(
                [
                    request.pages[: self.layout.pages_for(context)]
                    for request, context in zip(step.requests, step.contexts, strict=True)
                ],
                page_size=self.layout.page_size,
                rows=rows,
                entries=pages,
                sizes=self.buckets.compact(rows, pages),
            )
            key = (*key, len(preparation.copies))
        growth = self._growth(step.requests, rows)
        self.pools, self.state, drawn = self._run(
            key, self.weights, self.pools, self.state, slots, growth, preparation
        )
        return drawn

    def logits(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> np.ndarray:
        """Logits float32 [len(tokens), ≥ W] of a chunk at ``start`` whose sequence owns ``pages``;
        −inf behind W, where the vocabulary does not divide."""
        (logits,) = self._read_chunk("logits", [tokens], start, pages)
        return logits

    def score(
        self, tokens: Sequence[int], targets: Sequence[int], start: int, pages: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the token after each one of a chunk: log-probabilities float32 [len(tokens)], and
        whether it is the most likely one, bool [len(tokens)]."""
        scores, greedy = self._read_chunk("score", [tokens, targets], start, pages)
        return scores, greedy

    def _read_chunk(
        self, kind: str, ids: Sequence[Sequence[int]], start: int, pages: Sequence[int]
    ) -> list[np.ndarray]:
        count = len(ids[0])
        rows, bucket = self.buckets.for_chunk(count, start + count)
        self.pools, *results = self._run(
            (kind, rows, bucket),
            self.weights,
            self.pools,
            *(_padded(some, rows) for some in ids),
            _scalar(start, np.int32),
            _scalar(count, np.int32),
            self._table(pages, bucket),
        )
        return [self.read(result)[:count] for result in results]

    def read(self, result: Any) -> np.ndarray:
        """Waits for a program's result; a program that ran out of memory says so here."""
        with explained(self.memory_plan):
            if len(self.placement.processes) > 1 and not result.is_fully_replicated:
                return multihost_utils.process_allgather(result, tiled=True)
            return np.asarray(result)

    def reset(self) -> None:
        """Empty pools and idle slots, for after a step that failed: what it was given is gone."""
        self._delete(self.pools, self.state)  # first, or there would be no room for the new ones
        with explained(lambda: self._plan(0)):
            self.pools = self._made(self._empty_pools, self.pool_specs)
            self.state = self._made(self._empty_state, PartitionSpec())

    def warm_up(self, *, progress: bool) -> None:
        """Compiles every program that serving can need; from then on the guard holds."""
        keys = [key for key in self.buckets.programs() if key not in self._executables]
        # XLA compiles without Python's lock: one program is traced while others are compiled. On a
        # GPU one at a time, because compiling there includes timing candidates.
        on_cpu = self.placement.platform == "cpu"
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2) if on_cpu else 1) as pool:
            jobs = {pool.submit(self._lower(key).compile): key for key in keys}
            bar = tqdm(total=len(jobs), desc="compiling", unit="program", disable=not progress)
            with bar, explained(lambda: self._plan(0)):
                for job in as_completed(jobs):
                    self._keep(jobs[job], job.result())
                    bar.update()
        self._sealed = True

    def memory_plan(self) -> MemoryPlan:
        """Bytes by use, with the temporaries of the largest program compiled so far."""
        sizes = [_temporary_bytes(executable) for executable in self._executables.values()]
        return self._plan(max(sizes, default=0))

    def close(self) -> None:
        """Frees weights, pools and state on the device."""
        self._delete(self.weights, self.pools, self.state)
        self._executables.clear()

    @staticmethod
    def _delete(*trees: Any) -> None:
        for array in jax.tree.leaves(trees):
            if not array.is_deleted():
                array.delete()

    # Compilation

    def executable(self, key: Key) -> jax.stages.Compiled:
        """The compiled program for a key; compiles it now if there is none and the guard allows."""
        if key not in self._executables:
            if self._sealed and self.guard and key[0] in _SERVING:
                raise RecompilationError(
                    f"program {described(key)} was not compiled by the warm-up; set "
                    "llm.recompilation_guard = False to allow it"
                )
            logger.debug("compiling %s", described(key))
            with explained(lambda: self._plan(0)):
                self._keep(key, self._lower(key).compile())
        return self._executables[key]

    def _lower(self, key: Key) -> jax.stages.Lowered:
        function, arguments = self._signature(key)
        # A GPU would compute float32 products in TensorFloat-32, with 10 bits of mantissa.
        exact = "highest" if self.layout.dtype == "float32" else None
        with jax.default_matmul_precision(exact or jax.config.jax_default_matmul_precision):
            specs = programs.specs(key[0], self.weight_specs, self.pool_specs)
            spread = self.placement.spread(function, *specs)
            return jax.jit(spread, donate_argnums=_DONATED[key[0]]).lower(*arguments)

    def _keep(self, key: Key, executable: jax.stages.Compiled) -> None:
        self._plan(_temporary_bytes(executable)).check()
        self._executables[key] = executable
        self.compilations += 1

    def _signature(self, key: Key) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function to jit and example arguments (device arrays and host arrays of the right
        shapes)."""
        kind, rows, pages = key[:3]
        scalar, tokens = _scalar(0, np.int32), np.zeros(rows, np.int32)
        if kind == "prefill":
            function = partial(
                programs.prefill, self.graph, pages=pages, implementation=self.implementation
            )
            request = Request([0], _ANY_SAMPLING)
            chunk = self._prompt_chunk(request, 0, 1, rows)
            return function, (self.weights, self.pools, self.state, chunk)
        if kind in _DECODE:
            function = partial(
                programs.decode,
                self.graph,
                pages=pages,
                steps=self.buckets.decode_steps,
                implementation=self.implementation,
                extras=kind == "decode",
            )
            preparation = _no_pages(rows, pages, key[3]) if len(key) > 3 else None
            growth = self._growth([], rows)
            return function, (self.weights, self.pools, self.state, tokens, growth, preparation)
        if kind == "copy":
            return programs.copy_page, (self.pools, scalar, scalar)
        assert kind in ("logits", "score")
        program = programs.logits if kind == "logits" else programs.score
        function = partial(program, self.graph, implementation=self.implementation)
        ids = (tokens,) if kind == "logits" else (tokens, tokens)
        rest = (scalar, scalar, self._table([], pages))
        return function, (self.weights, self.pools, *ids, *rest)

    def _run(self, key: Key, *arguments: Any) -> Any:
        executable = self.executable(key)
        with explained(lambda: self._plan(_temporary_bytes(executable))):
            results = executable(*arguments)
            if self.placement.count > 1 and self.placement.platform == "cpu":
                # Programs with collectives that queue up on simulated devices wait for each other
                # forever: 40 pass, 64 do not.
                jax.block_until_ready(results)
            return results

    def _made(self, function: Callable[[], Any], specs: Any) -> Any:
        """What a function of nothing makes, on the devices; each makes its own part."""
        placement = self.placement
        spread = placement.spread(function, (), specs)
        shardings = jax.tree.map(placement.sharding, specs)
        return jax.jit(spread, out_shardings=shardings)()

    def _empty_pools(self) -> list[LayerPool]:
        page_size, dtype = self.layout.page_size, jnp.dtype(self.layout.dtype)
        return [empty_pool(one, self.num_pages, page_size, dtype) for one in self.layout.layers]

    def _empty_state(self) -> programs.BatchState:
        return programs.empty_state(self.max_batch, self.max_pages)

    def _plan(self, temporaries: int) -> MemoryPlan:
        return MemoryPlan(
            weights=sum(map(_own_bytes, jax.tree.leaves(self.weights))),
            cache=self.layout.pool_bytes(self.num_pages),
            temporaries=temporaries,
            available=available_bytes(self.placement.device),
            bytes_per_sequence=self.layout.bytes_per_page * self.max_pages,
        )

    # Host arrays

    def _prompt_chunk(self, request: Request, start: int, length: int, rows: int) -> PromptChunk:
        sampling = request.sampling
        return PromptChunk(
            tokens=_padded(request.tokens[start : start + length], rows),
            start=_scalar(start, np.int32),
            length=_scalar(length, np.int32),
            slot=_scalar(request.slot, np.int32),
            limit=_scalar(request.max_length, np.int32),
            block_table=self._table(request.pages, self.max_pages),
            key_words=request.key_words,
            sampling=SamplingParams(
                temperature=_scalar(sampling.temperature, np.float32),
                top_k=_scalar(sampling.top_k, np.int32),
                top_p=_scalar(sampling.top_p, np.float32),
                min_p=_scalar(sampling.min_p, np.float32),
                wants_logprobs=_scalar(sampling.logprobs is not None, np.bool),
            ),
        )

    def _growth(self, requests: Sequence[Request], rows: int) -> Growth:
        """What the rows' block tables have got since they were last sent."""
        most = self.layout.pages_for(self.buckets.decode_steps)
        first, pages = np.zeros(rows, np.int32), np.full((rows, most), -1, np.int32)
        for row, request in enumerate(requests):
            new = request.pages[request.pages_sent :]
            if new:
                first[row], pages[row, : len(new)] = request.pages_sent, new
                request.pages_sent += len(new)
        return Growth(first, pages)

    def _table(self, pages: Sequence[int], length: int) -> Any:
        table = np.zeros(length, np.int32)
        count = min(len(pages), length)
        table[:count] = pages[:count]
        return table


_DECODE = ("decode", "decode-plain")
_SERVING = ("copy", "prefill", *_DECODE)
# Positions of pools and state among a program's arguments (the graph is bound already).
_DONATED = {"copy": (0,), "prefill": (1, 2), "logits": (1,), "score": (1,)}
_DONATED |= dict.fromkeys(_DECODE, (1, 2))
_ANY_SAMPLING = Sampling(max_new_tokens=1)
_COPY: Key = ("copy", 1, 1)


def _no_pages(rows: int, entries: int, size: int) -> Preparation:
    return prepare([], page_size=1, rows=rows, entries=entries, sizes=(size,))


def _scalar(value: float, dtype: type[np.generic]) -> Any:
    return np.asarray(value, dtype)


def _padded(tokens: Sequence[int], length: int) -> Any:
    padded = np.zeros(length, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def _own_bytes(array: jax.Array) -> int:
    """Of a device's part."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _temporary_bytes(executable: jax.stages.Compiled) -> int:
    analysis = executable.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
