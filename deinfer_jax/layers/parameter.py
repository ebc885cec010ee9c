"""Declaration of a parameter: shape, initial value and where its rows stand in a checkpoint, said
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["Source", "parameter", "sources_of", "stacked"]


@dataclass(frozen=True, slots=True)
class Source:
    """Rows ``start : start + shape[0]`` of a parameter are the checkpoint's tensor ``name``, whose
    shape is ``shape``."""

    name: str
    start: int
    shape: tuple[int, ...]


def parameter(
    rngs: nnx.Rngs, sources: Sequence[Source], dtype: jnp.dtype, *, scale: float | None
) -> nnx.Param[Any]:
    """A parameter that stacks the tensors of ``sources`` on their first axis.

    Args:
        rngs: of the initial values.
        sources: gap-free, in order; all shapes equal but for the first axis.
        dtype: of the parameter.
        scale: standard deviation of random initial values; None = all ones (norm weights).
    """
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    if scale is None:
        value = jnp.ones(shape, dtype)
    else:
        value = jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(scale, dtype)
    return nnx.Param(value, sources=tuple(sources))


def stacked(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> list[Source]:
    """Sources for (name, shape) pairs laid under each other."""
    sources, start = [], 0
    for name, shape in tensors:
        sources.append(Source(name, start, shape))
        start += shape[0]
    return sources


def sources_of(state: nnx.State) -> Iterator[tuple[tuple[Any, ...], Any, tuple[Source, ...]]]:
    """(path, variable, sources) of every parameter in a state, in a fixed order."""
    for path, variable in nnx.to_flat_state(state):
        yield path, variable, variable.get_metadata()["sources"]
