"""Whether all strategies compute the same, at a small size in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bench.stack.layers import Cell, Layers, noise
from bench.stack.setting import DEVICES, STRATEGIES, Setting
from deinfer_jax import ModelConfig
from deinfer_jax.checkpoint.parameters import nested, spread_array
from deinfer_jax.parallel.mesh import Placement, choose_placement
from deinfer_jax.parallel.strategies import get_strategy
from deinfer_jax.parallel.strategy import Single

TOLERANCE = 2e-5  # of the largest value, in float32


def check(groups: str, placement: Placement) -> dict[str, float]:
    """The largest difference between each strategy's residual stream and one device's, of decode
    and of prefill, two calls of each, as a part of the largest value. Caches have to be equal
    too: the second call reads what the first one wrote.

    Raises:
        AssertionError: it is more than ``TOLERANCE``.
    """
    setting = Setting(small=True, layers=1, dtype="float32", seconds=0.0, blocks=0)
    config = setting.config(groups, "rounded")
    one = choose_placement(1)
    alone = Layers(config, Single(), one, "float32")
    tensors = _tensors(alone, config)
    found = {}
    for name in ("64", "prefill"):
        expected = _two_calls(alone, tensors, setting.cell(name))
        for strategy in STRATEGIES:
            layers = Layers(config, get_strategy(strategy, DEVICES), placement, "float32")
            got = _two_calls(layers, tensors, setting.cell(name))
            off = float(np.abs(got - expected).max() / np.abs(expected).max())
            found[f"{strategy} {name}"] = off
            assert off < TOLERANCE, f"{groups} {strategy} {name}: off by {off} of the largest value"
    worst = max(found.values())
    print(f"check, {groups} groups: all strategies agree within {worst:.1e}", flush=True)
    return found


def _tensors(layers: Layers, config: ModelConfig) -> dict[str, np.ndarray]:
    """Random factors by name, and their products for dense layers."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for source in (source for d in layers.declared for source in d.sources):
        if len(source.shape) == 1:
            found[source.name] = rng.uniform(0.5, 1.5, source.shape).astype(np.float32)
        else:
            scaled = rng.standard_normal(source.shape) / np.sqrt(source.shape[1])
            found[source.name] = scaled.astype(np.float32)
    for module, piece in config.low_rank.slices:
        v = found[piece.v][piece.offset : piece.offset + piece.rank]
        found[f"{module}.weight"] = found[f"{module}.u.weight"] @ v
    return found


def _two_calls(layers: Layers, tensors: Mapping[str, np.ndarray], cell: Cell) -> np.ndarray:
    arrays = {}
    for d in layers.declared:
        whole = np.zeros(d.shape, np.float32)
        for source in d.sources:
            source.put(tensors[source.name], whole)
        arrays[d.path] = spread_array(whole, layers.placement, d.spec)
    weights = nested(arrays)
    x, pools, lengths = layers.arguments(
        cell, noise((cell.rows, layers.config.hidden_size), np.float32)
    )
    run, _ = layers.program(cell, "xla")
    with jax.default_matmul_precision("highest"):
        quick: Any = {"xla_gpu_autotune_level": 0}
        program = run.lower(weights, x, pools, lengths).compile(compiler_options=quick)
        x, pools = jax.block_until_ready(program(weights, x, pools, lengths))
        lengths = lengths - (1 if cell.tokens == 1 else 0)
        x, pools = jax.block_until_ready(program(weights, x, pools, lengths))
    return np.concatenate([np.asarray(x).ravel(), np.asarray(pools[-1].full[0]).ravel()])
