"""Declaration of a parameter: shape, initial value, its place in a checkpoint and on the devices,
said once.

Models are built from declarations alone, without a single array; ``checkpoint.parameters`` reads
the declarations back and makes the arrays, from a file or at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from deinfer_jax.parallel.mesh import AXIS
from deinfer_jax.parallel.shares import Run, Share, deal_rank, joined, whole

__all__ = [
    "INIT_SCALE",
    "Declaration",
    "Rows",
    "Source",
    "concatenated",
    "declarations",
    "parameter",
]

Index = tuple[slice, ...]
INIT_SCALE = 0.02  # standard deviation of random weights


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and where it stands in a parameter.

    Attributes:
        name, shape: of the tensor.
        rows: runs of its first axis, (row of the tensor, row of the parameter, count). A row may
            stand in several places.
        columns: the same of its second axis; None = all of them, in their places.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[Run, ...]
    columns: tuple[Run, ...] | None = None

    def pieces(self) -> Iterator[tuple[Index, Index]]:
        """Where in the parameter, and what of the tensor: blocks that make up all of it."""
        for row, place, count in self.rows:
            first = (slice(place, place + count), slice(row, row + count))
            if self.columns is None:
                yield (first[0],), (first[1],)
                continue
            for column, at, width in self.columns:
                yield (first[0], slice(at, at + width)), (first[1], slice(column, column + width))

    def put(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        """Copies the tensor into the parameter."""
        for target, source in self.pieces():
            parameter[target] = tensor[source]

    def found(self, parameter: np.ndarray) -> np.ndarray:
        """The tensor, as the parameter has it."""
        tensor = np.empty(self.shape, parameter.dtype)
        for target, source in self.pieces():
            tensor[source] = parameter[target]
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A parameter of a model.

    Attributes:
        path: in the model's state.
        shape, dtype: of the whole array, padding included.
        sources: tensors that it is made of; what they do not cover is zero.
        scale: standard deviation of random initial values; None = all ones (norm weights).
        spec: which axis is split over devices.
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    sources: tuple[Source, ...]
    scale: float | None
    spec: PartitionSpec

    def local_shape(self, devices: int) -> tuple[int, ...]:
        """Of a device's part."""
        axes = tuple(self.spec) + (None,) * (len(self.shape) - len(self.spec))
        return tuple(
            size if axis is None else size // devices
            for size, axis in zip(self.shape, axes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor that go into a parameter.

    Attributes:
        name: of the tensor.
        share: how they are dealt to devices.
        first: where in the tensor they begin; count: how many it has, None = the share's size.
    """

    name: str
    share: Share
    first: int = 0
    count: int | None = None


def parameter(
    rows: Sequence[Rows], dtype: jnp.dtype, *, scale: float | None, columns: Share | None = None
) -> nnx.Param[Any]:
    """Declares a parameter in which every device has its share of each of some tensors, one under
    the other.

    Example: the shares ``deal(4, 2)`` of q and ``deal(2, 2)`` of k give the rows q0 q1 k0 | q2 q3
    k1.

    Args:
        rows: tensors in order; all are split, or none is.
        dtype: of the parameter.
        scale: see ``Declaration``.
        columns: how the second axis is dealt, at most one of the two is split; None = there is none
            (biases, weights of norms).
    """
    devices = {piece.share.devices for piece in rows}
    assert len(devices) == 1, "expected rows that are all split, or all whole"
    stride, offset = sum(piece.share.width for piece in rows), 0
    runs: dict[str, list[Run]] = {}
    counts: dict[str, int] = {}
    for piece in rows:
        counts[piece.name] = piece.count or piece.share.size
        runs.setdefault(piece.name, []).extend(
            (piece.first + source, device * stride + offset + place, count)
            for device, part in enumerate(piece.share.parts)
            for source, place, count in part
        )
        offset += piece.share.width
    (parts,) = devices
    return _declared(runs, counts, stride * parts, parts > 1, columns, dtype, scale)


def concatenated(
    rows: Sequence[Rows],
    devices: int,
    dtype: jnp.dtype,
    *,
    scale: float | None,
    columns: Share,
    height: int,
) -> nnx.Param[Any]:
    """Declares a parameter of rows of some tensors, one under the other, that is cut into equal
    parts without regard to where one ends; parts are padded as ranks are.

    Args:
        rows: in order, each with a share that is whole.
        devices: parts.
        dtype, scale, columns: as of :func:`parameter`.
        height: of all rows together, or more, for rows of zeros below them.
    """
    runs: dict[str, list[Run]] = {}
    counts: dict[str, int] = {}
    end = 0
    for piece in rows:
        counts[piece.name] = piece.count or piece.share.size
        runs.setdefault(piece.name, []).append((piece.first, end, piece.share.size))
        end += piece.share.width
    assert height >= end
    padded = deal_rank(height, devices).padded
    return _declared(runs, counts, padded, devices > 1, columns, dtype, scale)


def _declared(
    runs: dict[str, list[Run]],
    counts: dict[str, int],
    height: int,
    split: bool,
    columns: Share | None,
    dtype: jnp.dtype,
    scale: float | None,
) -> nnx.Param[Any]:
    assert not (split and columns is not None and columns.split), "expected one split axis"
    beside = () if columns is None else (columns.size,)
    places = None if columns is None or columns == whole(columns.size) else columns.runs()
    sources = tuple(
        Source(name, (counts[name], *beside), joined(found), places) for name, found in runs.items()
    )
    shape = (height,) if columns is None else (height, columns.padded)
    spec = PartitionSpec()
    if split:
        spec = PartitionSpec(AXIS)
    elif columns is not None and columns.split:
        spec = PartitionSpec(None, AXIS)
    value: Any = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(value, sources=sources, scale=scale, spec=spec)


def declarations(model: nnx.Module) -> list[Declaration]:
    """All parameters of a model as it was built, in a fixed order."""
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        metadata, value = variable.get_metadata(), variable.get_value()
        found.append(
            Declaration(
                path=path,
                shape=value.shape,
                dtype=jnp.dtype(value.dtype),
                sources=metadata["sources"],
                scale=metadata["scale"],
                spec=metadata["spec"],
            )
        )
    return found
