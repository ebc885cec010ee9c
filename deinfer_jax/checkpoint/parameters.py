"""Fills a model's parameters: streamed from a checkpoint, or random on the devices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deinfer_jax.checkpoint.source import Block, Checkpoint, SlicedCheckpoint
from deinfer_jax.layers.parameter import Declaration, Source
from deinfer_jax.parallel.mesh import Placement

__all__ = [
    "Weights",
    "all_finite",
    "load_parameters",
    "nested",
    "random_parameters",
    "read_part",
    "spread_array",
]

Path = tuple[Any, ...]
Index = tuple[slice, ...]
Weights = dict[Any, Any]


def load_parameters(
    checkpoint: Checkpoint,
    declared: Sequence[Declaration],
    placement: Placement,
    *,
    progress: bool = False,
) -> Weights:
    """Streams a checkpoint onto devices.

    On the host there is at most one tensor of the checkpoint and the parameter that is being
    stacked from it (and, on a CPU, the parameters themselves). From a checkpoint that reads parts
    of tensors, every device gets its own part of a parameter after the other, and nothing else is
    read.

    Args:
        checkpoint: where the tensors come from.
        declared: what the model wants; tensors are cast to the declared dtypes.
        placement: where they go, split as declared.
        progress: show a bar with bytes a second.

    Returns:
        Pure dict of arrays, which ``nnx.merge`` takes together with the model's graph.

    Raises:
        ValueError: tensors are missing, left over or of the wrong shape (all are listed, nothing
            has been read), or one contains NaN or infinity (named).
    """
    _check_names_and_shapes(checkpoint, [source for d in declared for source in d.sources])
    loaded: dict[Path, jax.Array] = {}
    total = sum(math.prod(d.shape) * d.dtype.itemsize for d in declared)
    bar = tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress)
    if isinstance(checkpoint, SlicedCheckpoint):
        parameters = _by_part(checkpoint, declared, placement)
    else:
        parameters = _by_tensor(checkpoint, declared, placement)
    with bar:
        for d, array in parameters:
            loaded[d.path] = array
            bar.update(array.nbytes)
    assert len(loaded) == len(declared), "the checkpoint did not yield all tensors that it lists"
    return nested(loaded)


def _by_tensor(
    checkpoint: Checkpoint, declared: Sequence[Declaration], placement: Placement
) -> Iterator[tuple[Declaration, jax.Array]]:
    """Reads tensor by tensor, and gives every device its part of a parameter that is complete."""
    places = {source.name: (d, source) for d in declared for source in d.sources}
    waiting = {d.path: len(d.sources) for d in declared}
    buffers: dict[Path, np.ndarray] = {}
    for name, tensor in checkpoint.tensors():
        d, source = places[name]
        if d.path not in buffers:
            buffers[d.path] = np.zeros(d.shape, d.dtype)
        buffer = buffers[d.path]
        with np.errstate(over="ignore"):  # of a cast to float16, see _check_finite
            source.put(tensor, buffer)
        waiting[d.path] -= 1
        if waiting[d.path] == 0:
            _check_finite(buffer, d, checkpoint)
            # Waiting for the copy keeps one buffer alive, not a queue of them.
            yield d, jax.block_until_ready(spread_array(buffer, placement, d.spec))
            del buffers[d.path], buffer


def _by_part(
    checkpoint: SlicedCheckpoint, declared: Sequence[Declaration], placement: Placement
) -> Iterator[tuple[Declaration, jax.Array]]:
    """Reads of every parameter what each device of this process has, once for those that have the
    same."""
    for d in declared:
        sharding = placement.sharding(d.spec)
        holders: dict[Index, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(d.shape).items():
            holders.setdefault(_bounded(index or (), d.shape), []).append(device)
        arrays: list[jax.Array] = []
        for part, devices in holders.items():
            buffer = read_part(checkpoint, d, part)
            _check_finite(buffer, d, checkpoint)
            arrays += jax.block_until_ready([jax.device_put(buffer, one) for one in devices])
            del buffer
        yield d, jax.make_array_from_single_device_arrays(d.shape, sharding, arrays)


def read_part(checkpoint: SlicedCheckpoint, declared: Declaration, part: Index) -> np.ndarray:
    """A part of a parameter, for which no more is read than what it is made of.

    Args:
        checkpoint: where its tensors are.
        declared: the parameter.
        part: which part, a slice for every axis.
    """
    buffer = np.zeros([axis.stop - axis.start for axis in part], declared.dtype)
    targets: list[Index] = []
    wanted: list[Block] = []
    for source in declared.sources:
        for target, index in source.pieces():
            # Where a piece has all columns, those of the parameter are the tensor's.
            rest = tuple(slice(0, size) for size in source.shape[len(index) :])
            cut = _cut(target + rest, index + rest, part)
            if cut is not None:
                targets.append(cut[0])
                wanted.append((source.name, cut[1]))
    with np.errstate(over="ignore"):  # of a cast to float16, see _check_finite
        for target, block in zip(targets, checkpoint.blocks(wanted), strict=True):
            buffer[target] = block
    return buffer


def _cut(target: Index, index: Index, part: Index) -> tuple[Index, Index] | None:
    """What of a piece is in a part: where in the part, and what of the tensor; None = nothing."""
    places, sources = [], []
    for place, source, bounds in zip(target, index, part, strict=True):
        start, stop = max(place.start, bounds.start), min(place.stop, bounds.stop)
        if start >= stop:
            return None
        shift = source.start - place.start
        places.append(slice(start - bounds.start, stop - bounds.start))
        sources.append(slice(start + shift, stop + shift))
    return tuple(places), tuple(sources)


def _bounded(index: Index, shape: tuple[int, ...]) -> Index:
    """An index with every start and stop written out."""
    every = index + (slice(None),) * (len(shape) - len(index))
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(every, shape, strict=True))


def spread_array(array: np.ndarray, placement: Placement, spec: Any) -> jax.Array:
    """A host array on the devices; each gets its own part only."""
    sharding = placement.sharding(spec)
    if placement.count == 1:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def random_parameters(declared: Sequence[Declaration], seed: int, placement: Placement) -> Weights:
    """Random parameters, made on the devices.

    A tensor's values are a function of its name and the seed, so that a model is the same however
    it is split (but under ``dense``, which wants other tensors). Every device makes whole tensors,
    one at a time, and keeps its part. Compiled once a distinct shape: for 8B shapes on an H200, one
    program with all parameters took 59 s to compile. The generator is ``unsafe_rbg``, which a GPU
    runs at memory speed.

    Args:
        declared: what the model wants.
        seed: of the generator.
        placement: where they go, split as declared.
    """
    key = jax.device_put(jax.random.key(seed, impl="unsafe_rbg"), placement.sharding(jax.P()))
    return nested({d.path: _random(d, placement)(key, _hashes(d)) for d in declared})


def _hashes(declaration: Declaration) -> np.ndarray:
    names = [source.name for source in declaration.sources]
    return np.array([zlib.crc32(name.encode()) for name in names], np.uint32)


def _random(declared: Declaration, placement: Placement) -> Callable[..., jax.Array]:
    """The program that makes a parameter of a key and the hashes of its tensors' names."""
    anonymous = tuple(Source("", s.shape, s.rows, s.columns) for s in declared.sources)
    sharding = placement.sharding(declared.spec)
    return _compiled(declared.shape, declared.dtype, declared.scale, anonymous, sharding)


@cache
def _compiled(
    shape: tuple[int, ...],
    dtype: Any,
    scale: float | None,
    sources: tuple[Source, ...],
    sharding: Any,
) -> Callable[..., jax.Array]:
    def make(key: jax.Array, hashes: jax.Array) -> jax.Array:
        made = jnp.zeros(shape, dtype)
        for index, source in enumerate(sources):
            tensor = jnp.ones(source.shape, dtype)
            if scale is not None:
                own = jax.random.fold_in(key, hashes[index])
                tensor = jax.random.normal(own, source.shape, dtype) * jnp.asarray(scale, dtype)
            if source.shape == shape and source == Source("", shape, ((0, 0, shape[0]),)):
                return tensor
            for target, part in source.pieces():
                made = made.at[target].set(tensor[part])
        return made

    return jax.jit(make, out_shardings=sharding)


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


def _check_finite(buffer: np.ndarray, declared: Declaration, checkpoint: Checkpoint) -> None:
    """Of a parameter or a part of it; where it is not, the tensors are read once more to say so."""
    if all_finite(buffer):
        return
    for name, tensor in checkpoint.tensors([source.name for source in declared.sources]):
        with np.errstate(over="ignore"):
            cast = tensor.astype(declared.dtype)
        bad = int((~np.isfinite(cast.astype(np.float32))).sum())
        if bad:
            raise ValueError(
                f"{checkpoint.path}: tensor {name}: {bad} of {cast.size} values are NaN "
                f"or infinite as {cast.dtype} "
                f"(stored as {checkpoint.stored_types()[name]})"
            )


def nested(flat: Mapping[Path, Any]) -> Weights:
    """A pure dict of arrays, as ``nnx.merge`` takes it, or of what belongs to them, by path."""
    tree: dict[Any, Any] = {}
    for path, array in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return tree
