"""Fills a model's parameters: streamed from a checkpoint, or random on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from deinfer_jax.checkpoint.source import Checkpoint
from deinfer_jax.layers.parameter import Source, sources_of

__all__ = ["load_parameters", "random_parameters"]

Path = tuple[Any, ...]


def load_parameters(
    checkpoint: Checkpoint,
    abstract: nnx.State,
    dtype: jnp.dtype,
    device: Any,
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """Streams a checkpoint onto a device.

    On the host there is at most one tensor of the checkpoint and the parameter that is being
    stacked from it (and, on a CPU, the parameters themselves).

    Args:
        checkpoint: where the tensors come from.
        abstract: state of the model under ``nnx.eval_shape``; each variable says which tensors it
            stacks.
        dtype: the parameters get this dtype.
        device: where they go.
        progress: show a bar with bytes a second.

    Returns:
        Pure dict of arrays, as ``nnx.replace_by_pure_dict`` takes it.

    Raises:
        ValueError: tensors are missing, left over or of the wrong shape (all are listed, nothing
            has been read), or one contains NaN or infinity (named).
    """
    destinations: dict[str, tuple[Path, Source]] = {}
    shapes: dict[Path, tuple[int, ...]] = {}
    sources_by_path: dict[Path, tuple[Source, ...]] = {}
    for path, variable, sources in sources_of(abstract):
        shapes[path] = variable.get_value().shape
        sources_by_path[path] = sources
        destinations.update({source.name: (path, source) for source in sources})
    _check_names_and_shapes(checkpoint, [source for _, source in destinations.values()])

    waiting = Counter(path for path, _ in destinations.values())
    buffers: dict[Path, np.ndarray] = {}
    loaded: dict[Path, jax.Array] = {}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    bar = tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress)
    with bar:
        for name, tensor in checkpoint.tensors():
            path, source = destinations[name]
            if path not in buffers:
                buffers[path] = np.empty(shapes[path], dtype)
            rows = slice(source.start, source.start + source.shape[0])
            buffers[path][rows] = tensor  # casts
            waiting[path] -= 1
            if waiting[path] == 0:
                buffer = buffers.pop(path)
                _check_finite(buffer, sources_by_path[path])
                # Waiting for the copy keeps one buffer alive, not a queue of them.
                loaded[path] = jax.block_until_ready(jax.device_put(buffer, device))
                bar.update(buffer.nbytes)
    unfinished = [path for path in shapes if path not in loaded]
    assert not unfinished, f"the checkpoint listed tensors that it did not yield, for {unfinished}"
    return _nested(loaded)


def random_parameters(model: Any, device: Any) -> dict[Any, Any]:
    """Parameters of ``model(rngs)``, made on the device in one program.

    Args:
        model: builds the model from ``nnx.Rngs``; the ``unsafe_rbg`` generator is meant, which a
            GPU runs at memory speed.
        device: where they go.
    """
    with jax.default_device(device):
        return jax.jit(lambda: nnx.to_pure_dict(nnx.state(model())))()


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


def _check_finite(buffer: np.ndarray, sources: Iterable[Source]) -> None:
    # The sum of a float array is finite unless an element is not (or it overflows, hence the
    # second, exact look).
    if np.isfinite(buffer.sum(dtype=np.float32)):
        return
    for source in sources:
        rows = buffer[source.start : source.start + source.shape[0]]
        bad = int((~np.isfinite(rows.astype(np.float32))).sum())
        if bad:
            raise ValueError(
                f"tensor {source.name}: {bad} of {rows.size} values are NaN or infinite"
            )


def _nested(flat: dict[Path, jax.Array]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, array in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return tree
