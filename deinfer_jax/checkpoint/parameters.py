"""Fills a model's parameters: streamed from a checkpoint, or random on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deinfer_jax.checkpoint.source import Checkpoint
from deinfer_jax.layers.parameter import Declaration, Source

__all__ = ["Weights", "all_finite", "load_parameters", "nested", "random_parameters"]

Path = tuple[Any, ...]
Weights = dict[Any, Any]


def load_parameters(
    checkpoint: Checkpoint,
    declared: Sequence[Declaration],
    device: Any,
    *,
    progress: bool = False,
) -> Weights:
    """Streams a checkpoint onto a device.

    On the host there is at most one tensor of the checkpoint and the parameter that is being
    stacked from it (and, on a CPU, the parameters themselves).

    Args:
        checkpoint: where the tensors come from.
        declared: what the model wants; tensors are cast to the declared dtypes.
        device: where they go.
        progress: show a bar with bytes a second.

    Returns:
        Pure dict of arrays, which ``nnx.merge`` takes together with the model's graph.

    Raises:
        ValueError: tensors are missing, left over or of the wrong shape (all are listed, nothing
            has been read), or one contains NaN or infinity (named).
    """
    places = {source.name: (d, source) for d in declared for source in d.sources}
    _check_names_and_shapes(checkpoint, [source for _, source in places.values()])

    waiting = {d.path: len(d.sources) for d in declared}
    buffers: dict[Path, np.ndarray] = {}
    loaded: dict[Path, jax.Array] = {}
    total = sum(math.prod(d.shape) * d.dtype.itemsize for d in declared)
    bar = tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress)
    with bar:
        for name, tensor in checkpoint.tensors():
            d, source = places[name]
            if d.path not in buffers:
                buffers[d.path] = np.empty(d.shape, d.dtype)
            buffer = buffers[d.path]
            with np.errstate(over="ignore"):  # of a cast to float16, see _check_finite
                buffer[source.start : source.start + source.shape[0]] = tensor
            waiting[d.path] -= 1
            if waiting[d.path] == 0:
                _check_finite(buffer, d.sources, checkpoint)
                # Waiting for the copy keeps one buffer alive, not a queue of them.
                loaded[d.path] = jax.block_until_ready(jax.device_put(buffer, device))
                bar.update(buffer.nbytes)
                del buffers[d.path], buffer
    assert len(loaded) == len(declared), "the checkpoint did not yield all tensors that it lists"
    return nested(loaded)


def random_parameters(declared: Sequence[Declaration], seed: int, device: Any) -> Weights:
    """Random parameters, made on the device.

    Compiled once a distinct shape: for 8B shapes on an H200, one program with all parameters took
    59 s to compile. The generator is ``unsafe_rbg``, which a GPU runs at memory speed.

    Args:
        declared: what the model wants.
        seed: of the generator.
        device: where they go.
    """
    with jax.default_device(device):
        key = jax.random.key(seed, impl="unsafe_rbg")
        return nested(
            {
                d.path: _random(jax.random.fold_in(key, index), d.shape, d.dtype, d.scale)
                for index, d in enumerate(declared)
            }
        )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float | None) -> jax.Array:
    if scale is None:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def _check_names_and_shapes(checkpoint: Checkpoint, sources: Iterable[Source]) -> None:
    found, expected = checkpoint.shapes(), {source.name: source.shape for source in sources}
    problems = [
        f"missing tensor {name} {list(expected[name])}" for name in expected if name not in found
    ]
    problems += [
        f"unexpected tensor {name} {list(found[name])}" for name in found if name not in expected
    ]
    problems += [
        f"tensor {name}: expected shape {list(expected[name])}, got {list(found[name])}"
        for name in expected
        if name in found and tuple(found[name]) != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{checkpoint.path}: {shown}{more}")


def all_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite."""
    # One pass without a temporary: a sum of finite numbers is finite unless it overflows, which the
    # second, exact look tells from a bad value.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=np.float32)):
            return True
    return bool(np.isfinite(array.astype(np.float32)).all())


def _check_finite(buffer: np.ndarray, sources: Iterable[Source], checkpoint: Checkpoint) -> None:
    if all_finite(buffer):
        return
    for source in sources:
        rows = buffer[source.start : source.start + source.shape[0]]
        bad = int((~np.isfinite(rows.astype(np.float32))).sum())
        if bad:
            raise ValueError(
                f"{checkpoint.path}: tensor {source.name}: {bad} of {rows.size} values are NaN or "
                f"infinite as {buffer.dtype} (stored as {checkpoint.stored_types()[source.name]})"
            )


def nested(flat: dict[Path, jax.Array]) -> Weights:
    """A pure dict of arrays, as ``nnx.merge`` takes it, from arrays by path."""
    tree: dict[Any, Any] = {}
    for path, array in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return tree
