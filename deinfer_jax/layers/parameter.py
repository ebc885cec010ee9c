"""Declaration of a parameter: shape, initial value and its place in a checkpoint, said once.

Models are built from declarations alone, without a single array; ``checkpoint.parameters`` reads
the declarations back and makes the arrays, from a file or at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["Declaration", "Source", "declarations", "parameter", "stacked"]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the parameter's row that it starts at."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A parameter of a model.

    Attributes:
        path: in the model's state.
        shape, dtype: of the array.
        sources: tensors that it stacks, in order.
        scale: standard deviation of random initial values; None = all ones (norm weights).
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    sources: tuple[Source, ...]
    scale: float | None


def parameter(
    sources: Sequence[Source], dtype: jnp.dtype, *, scale: float | None
) -> nnx.Param[Any]:
    """Declares a parameter that stacks the tensors of ``sources`` on their first axis.

    Args:
        sources: gap-free, in order; all shapes equal but for the first axis.
        dtype: of the parameter.
        scale: see ``Declaration``.
    """
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    value: Any = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(value, sources=tuple(sources), scale=scale)


def stacked(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> list[Source]:
    """Sources for (name, shape) pairs laid under each other."""
    sources, start = [], 0
    for name, shape in tensors:
        sources.append(Source(name, start, shape))
        start += shape[0]
    return sources


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
            )
        )
    return found
