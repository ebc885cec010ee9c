"""Clocks: of a program, of an all-reduce and of attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bench.stack.layers import Cell, attention, noise, options
from bench.stack.setting import DEVICES, Setting
from deinfer_jax import ModelConfig
from deinfer_jax.parallel.mesh import AXIS, Placement

Row = dict[str, Any]


def timed(step: Callable[..., Any], state: Any, setting: Setting, *, queues: bool) -> Row:
    """Milliseconds a layer of calls that are chained by their state, in blocks.

    Args:
        step: takes what it gave the last time.
        state: what it takes the first time, which is donated.
        setting: how many layers there are, and how long to measure.
        queues: whether calls of a block may queue up on the device.
    """
    output = jax.block_until_ready(step(*state))
    started, count = time.perf_counter(), 0
    while count < 3 or (count < 20 and time.perf_counter() - started < 0.3):
        output = jax.block_until_ready(step(*output))
        count += 1
    one = (time.perf_counter() - started) / count
    calls = max(1 if setting.small else 2, min(50, int(0.2 / one)))  # few waits of the host
    times, host = [], []
    begun = time.perf_counter()
    while len(times) < setting.blocks:
        if len(times) >= 5 and time.perf_counter() - begun > setting.seconds:
            break
        started = time.perf_counter()
        for _ in range(calls):
            output = step(*output)
            if not queues:
                jax.block_until_ready(output)
        host.append(time.perf_counter() - started)
        jax.block_until_ready(output)
        times.append(time.perf_counter() - started)
    a_layer = 1e3 / calls / setting.layers
    return {
        "ms": statistics.median(times) * a_layer,
        "low_ms": min(times) * a_layer,
        "high_ms": max(times) * a_layer,
        "host_ms": statistics.median(host) * a_layer,
        "blocks": len(times),
        "calls": calls,
        "warm_up": count + 1,
    }


def all_reduce_seconds(size: int, placement: Placement, *, queues: bool) -> float:
    """Of one plain all-reduce of so many bytes of bfloat16, in a chain of them."""
    chain = 8
    columns = size // 2 // 8

    def run(x: jax.Array) -> jax.Array:
        for _ in range(chain):
            x = jax.lax.pcast(jax.lax.psum(x, AXIS) * 0.5, AXIS, to="varying")
        return x

    spread = placement.spread(run, PartitionSpec(AXIS), PartitionSpec(AXIS))
    whole = noise((8 * placement.count, columns), jnp.dtype("bfloat16"))
    x = jax.device_put(whole, placement.sharding(PartitionSpec(AXIS)))
    program = jax.jit(spread).lower(x).compile()
    found = []
    for _ in range(20):
        started = time.perf_counter()
        y = x
        for _ in range(4):
            y = jax.block_until_ready(program(y)) if not queues else program(y)
        jax.block_until_ready(y)
        found.append((time.perf_counter() - started) / 4 / chain)
    return statistics.median(found[5:])


def attention_seconds(cell: Cell, config: ModelConfig, kind: str, device: Any) -> float:
    """Of one device's heads, in a chain of attentions on that device alone."""
    heads, kv, width = config.num_heads // DEVICES, config.num_kv_heads // DEVICES, config.head_dim
    chain = 4 if cell.tokens == 1 else 1
    dtype = jnp.dtype(config.dtype)

    def run(q: jax.Array, caches: list[Any]) -> jax.Array:
        for k, v in caches:
            q = attention(q, k, v, width**-0.5, kind)
        return q

    q = jax.device_put(noise((cell.batch, cell.tokens, heads, width), dtype), device)
    cached = noise((cell.batch, cell.capacity, kv, width), dtype)
    caches = [tuple(jax.device_put(cached, device) for _ in "kv") for _ in range(chain)]
    program = jax.jit(run).lower(q, caches).compile(compiler_options=options(kind))
    found = []
    for _ in range(12):
        started = time.perf_counter()
        y = q
        for _ in range(10):
            y = program(y, caches)
        jax.block_until_ready(y)
        found.append((time.perf_counter() - started) / 10 / chain)
    return statistics.median(found[4:])
