"""The seam between a model's maths and its placement on devices.

A block's *expanding* projections (q k v, gate up) read the residual stream, its *contracting* one
(o, down) writes it. A strategy says how each is computed, together with the norm in front and the
layout of the residual; models call these methods and never branch on the strategy.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int32

__all__ = ["STRATEGIES", "Strategy", "get_strategy"]


@runtime_checkable
class Norm(Protocol):
    """Normalisation of the residual stream."""

    def __call__(self, x: Array) -> Array: ...


@runtime_checkable
class Projection(Protocol):
    """What a strategy needs of ``layers.linear``: two stages, with the collective of a split
    product between them."""

    def latents(self, x: Array, /) -> Array | None: ...


@runtime_checkable
class Expanding(Projection, Protocol):
    """Several outputs of one input."""

    def outputs(self, x: Array, z: Array | None, /) -> tuple[Array, ...]: ...


@runtime_checkable
class Contracting(Projection, Protocol):
    """One output, added to the residual by the caller."""

    def outputs(self, h: Array, z: Array | None, /) -> Array: ...


@runtime_checkable
class Table(Protocol):
    """Word embedding or head."""

    def look_up(self, tokens: Array) -> Array: ...

    def logits(self, x: Array) -> Array: ...


class Strategy:
    """The interface, and what it means on one device; split strategies override the four methods.

    *Sharding contract* of this one: residual [T, D] whole, every factor whole, no element moves.
    """

    name = "single"

    def expand(
        self, x: Float[Array, "T D"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T R"] | None]:
        """Outputs of the block's projections for the normed residual x, and the latents z that they
        are computed from, whole, as they stand after the collective (None where all are dense)."""
        h = norm(x)
        z = block.latents(h)
        return block.outputs(h, z), z

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T D"]:
        """What is added to the residual."""
        return projection.outputs(h, projection.latents(h))

    def embed(self, tokens: Int32[Array, " T"], table: Table) -> Float[Array, "T D"]:
        """The residual stream's first value."""
        return table.look_up(tokens)

    def logits(self, x: Float[Array, "T D"], norm: Norm, table: Table) -> Float[Array, "T W"]:
        """Float32 logits of the residual's rows that are asked for."""
        return table.logits(norm(x))


STRATEGIES: dict[str, type[Strategy]] = {"single": Strategy}


def get_strategy(name: str, devices: int) -> Strategy:
    """The strategy ``name`` for that many devices; ``"auto"`` takes the only one that fits one
    device.

    Raises:
        ValueError: the name is unknown, or it does not run on that many devices.
    """
    if devices != 1:
        raise ValueError(f"tensor_parallel: this version runs on one device, got {devices}")
    if name == "auto":
        name = "single"
    if name not in STRATEGIES:
        raise ValueError(
            f"strategy: expected 'auto' or one of {', '.join(map(repr, STRATEGIES))}, got {name!r}"
        )
    return STRATEGIES[name]()
