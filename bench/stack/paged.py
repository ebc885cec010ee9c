"""The engine beside the bare stack."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import deinfer_jax
from bench.stack.setting import DEVICES, Setting
from deinfer_jax.engine.buckets import Key, fit
from deinfer_jax.engine.programs import BatchState, Growth
from deinfer_jax.engine.runner import Runner
from deinfer_jax.evaluate.communication import collectives

Row = dict[str, Any]


def paged_step(strategy: str, setting: Setting, *, queues: bool) -> Row:
    """Milliseconds of a decode step of the cell "64", through the engine's own decode program, up
    to the cell's context; with embedding, sampling and a head of 1024 words."""
    cell = setting.cell("64")
    config = setting.config("separate", "rounded").replace(vocab_size=1024)
    page_size = 16 if setting.small else 64
    with deinfer_jax.load(
        config,
        strategy=strategy,
        tensor_parallel=DEVICES,
        kv_cache="full",
        dtype=setting.dtype,
        max_batch=cell.batch,
        max_context=2 * cell.capacity,
        page_size=page_size,
        decode_steps=4 if setting.small else 8,
        prefix_sharing=False,
    ) as llm:
        runner = llm.runner
        steps, rows = runner.buckets.decode_steps, fit(cell.batch, runner.buckets.batch)
        pages = fit(runner.layout.pages_for(cell.capacity), runner.buckets.pages)
        key: Key = ("decode", rows, pages)
        started = time.perf_counter()
        program = runner.executable(key)
        compiled = time.perf_counter() - started
        calls = max(1, min(8, cell.capacity // 2 // steps))
        same = runner.placement.sharding(PartitionSpec())
        slots = jax.device_put(np.arange(rows, dtype=np.int32) % runner.max_batch, same)
        growth = Growth(
            np.zeros(rows, np.int32),
            np.full((rows, runner.layout.pages_for(steps)), -1, np.int32),
        )

        def block() -> float:
            state = jax.device_put(_decoding(runner, cell.capacity - calls * steps), same)
            jax.block_until_ready(state)
            started = time.perf_counter()
            for _ in range(calls):
                runner.pools, state, _ = program(
                    runner.weights, runner.pools, state, slots, growth, None
                )
                if not queues:
                    jax.block_until_ready(state)
            jax.block_until_ready((runner.pools, state))
            return time.perf_counter() - started

        for _ in range(2):  # warm-up
            block()
        times = sorted(1e3 * block() / calls / steps for _ in range(10))
        row = {
            "ms_a_step": statistics.median(times),
            "low_ms": times[0],
            "high_ms": times[-1],
            "steps_a_call": steps,
            "context": [cell.capacity - calls * steps, cell.capacity],
            "page_size": page_size,
            "implementation": "reference",
            "compile_s": round(compiled, 1),
            "collectives": dict(Counter(one.kind for one in collectives(program))),
        }
    row["ms"] = row["ms_a_step"] / setting.layers
    return row


def _decoding(runner: Runner, length: int) -> BatchState:
    """All slots in use, each with pages of its own and so many tokens."""
    state: BatchState = jax.tree.map(np.asarray, runner.state)
    own = runner.num_pages // runner.max_batch
    tables = np.arange(runner.max_batch)[:, None] * own + np.arange(runner.max_pages) % own
    batch = runner.max_batch
    return replace(
        state,
        lengths=np.full(batch, length, np.int32),
        limits=np.full(batch, 1 << 20, np.int32),
        block_tables=tables.astype(np.int32),
    )
