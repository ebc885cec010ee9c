"""Which words a device's columns are when the head is split, and reductions over all words."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped, UInt32

__all__ = [
    "WHOLE",
    "Vocabulary",
    "joint_mass",
    "local_mass",
    "most_likely",
    "ordered_bits",
    "value_of_bits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The words that the columns of an array [B, W′/p] stand for, and reductions of its rows over
    all words.

    *Sharding contract*: without an axis, the columns are all words and every method is the plain
    local operation. With one, the methods run inside ``shard_map`` on each of its p devices, whose
    columns are the contiguous range of words that begins at axis index × columns; columns past
    ``size`` are padding and hold −inf (for ``sum``: 0). Operands may vary over the axis; results do
    not, bit for bit, so that devices can branch on them together. What each collective brings to a
    device, elements of 4 bytes a row:

    ===============  ============================================
    ``largest``      one all-gather, 2p
    ``sum``          one all-reduce, 1 an argument
    ``logsumexp``    one all-gather, 2p
    ``take``         one all-gather, p
    ``best``         one all-gather, 2p · min(count, columns)
    ``gather``       one all-gather, p · columns of all arguments
    ===============  ============================================

    All-gathers move int32 whatever the values are, so that XLA may merge neighbouring ones.

    Args:
        size: number of words; None where no column is padding.
        axis: name of the mesh axis that the words are split over.
    """

    size: int | None = None
    axis: str | None = None

    def words(self, columns: int) -> int:
        """Number of words in all, for so many columns on a device."""
        held = columns if self.axis is None else columns * jax.lax.axis_size(self.axis)
        assert self.size is None or self.size <= held, f"{self.size} words in {held} columns"
        return held if self.size is None else self.size

    def numbers(self, columns: int) -> UInt32[Array, " columns"]:
        """Numbers of the words that this device's columns stand for, padding counted on."""
        here = jnp.arange(columns, dtype=jnp.uint32)
        return here if self.axis is None else here + self._first(columns).astype(jnp.uint32)

    def largest(self, x: Float[Array, "B W"]) -> tuple[Float[Array, "B 1"], Int32[Array, " B"]]:
        """Largest value of each row and its word, the first of equals; NaN if any value is."""
        value, column = _largest(x)
        if self.axis is None:
            return value, column[:, 0]
        values, words = self.gather(value, column + self._first(x.shape[1]))
        # Devices hold ascending ranges: the first of equals has the lowest word here too.
        value, place = _largest(values)
        return value, jnp.take_along_axis(words, place, axis=1)[:, 0]

    def sum(self, *parts: Shaped[Array, " B"]) -> tuple[Array, ...]:
        """Sums over the devices, of numbers of one type that each has added up over its columns."""
        if self.axis is None:
            return parts
        total = jax.lax.psum(jnp.stack(parts, axis=1), self.axis)
        return tuple(total[:, i] for i in range(len(parts)))

    def logsumexp(self, x: Float[Array, "B W"]) -> Float[Array, "B 1"]:
        """log Σ exp of each row."""
        if self.axis is None:
            return jax.nn.logsumexp(x, axis=1, keepdims=True)
        largest, mass = joint_mass(*self.gather(*local_mass(x)))
        return largest + jnp.log(mass)

    def take(self, x: Float[Array, "B W"], words: Int32[Array, " B"]) -> Float[Array, "B 1"]:
        """Value of one word a row, whichever device holds it."""
        if self.axis is None:
            return jnp.take_along_axis(x, words[:, None], axis=1)
        numbers = self.numbers(x.shape[1]).astype(jnp.int32)
        mine = jnp.where(numbers[None] == words[:, None], x, 0.0)
        (values,) = self.gather(mine.sum(axis=1, keepdims=True))
        return values.sum(axis=1, keepdims=True)  # one of them and zeros

    def best(self, x: Float[Array, "B W"], count: int) -> tuple[Array, Array]:
        """The words with the largest values, int32 [B, count], falling, the first of equals first,
        and the values; ``count`` is at most the number of words."""
        columns = most_likely(x, min(count, x.shape[1]))
        if self.axis is None:
            return columns, jnp.take_along_axis(x, columns, axis=1)
        values = jnp.take_along_axis(x, columns, axis=1)
        values, words = self.gather(values, columns + self._first(x.shape[1]))
        # Equal values stand in the order of their words here too.
        found = most_likely(values, count)
        return (
            jnp.take_along_axis(words, found, axis=1),
            jnp.take_along_axis(values, found, axis=1),
        )

    def gather(self, *parts: Shaped[Array, "B _"]) -> tuple[Array, ...]:
        """Each part [B, n] of all devices side by side, [B, p·n], by a single collective; elements
        of 4 bytes."""
        if self.axis is None:
            return parts
        rows = parts[0].shape[0]
        packed = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts]
        shards = jax.lax.all_gather(
            jnp.concatenate(packed, axis=1), self.axis, axis=1, to="invarying"
        )  # [B, p, Σn]
        found, start = [], 0
        for part in parts:
            piece = shards[:, :, start : start + part.shape[1]].reshape(rows, -1)
            found.append(jax.lax.bitcast_convert_type(piece, part.dtype))
            start += part.shape[1]
        return tuple(found)

    def _first(self, columns: int) -> Array:
        """Number of the first word here."""
        assert self.axis is not None
        return (jax.lax.axis_index(self.axis) * columns).astype(jnp.int32)


WHOLE = Vocabulary()  # all words on one device


def most_likely(x: Float[Array, "B W"], count: int) -> Int32[Array, "B count"]:
    """Columns of the largest values, falling; the first of equals first.

    On a GPU without a sort, which could not be part of a CUDA graph's conditional.
    """

    def by_passes(x: Array) -> Array:
        order = ordered_bits(x)
        numbers = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        found = [_argmax(order)]
        for _ in range(count - 1):
            last = jnp.take_along_axis(order, found[-1][:, None], axis=1)
            after = (order < last) | ((order == last) & (numbers > found[-1][:, None]))
            found.append(_argmax(jnp.where(after, order, 0)))  # 0 is below every float's bits
        return jnp.stack(found, axis=1)

    return jax.lax.platform_dependent(
        x, cpu=lambda x: jax.lax.top_k(x, count)[1], default=by_passes
    )


def local_mass(x: Float[Array, "B W"]) -> tuple[Array, Array]:
    """Largest value and sum of exp relative to it, [B, 1] each; (−inf, 0) where no other is."""
    largest = x.max(axis=1, keepdims=True)
    return largest, jnp.exp(x - _finite(largest)).sum(axis=1, keepdims=True)


def joint_mass(largest: Float[Array, "B p"], mass: Float[Array, "B p"]) -> tuple[Array, Array]:
    """``local_mass`` of all columns from those of p groups of columns."""
    overall = largest.max(axis=1, keepdims=True)
    scaled = mass * jnp.exp(largest - _finite(overall))
    return overall, scaled.sum(axis=1, keepdims=True)


def ordered_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """uint32 in the order of the float32 values, none of them 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def value_of_bits(order: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """float32 whose ``ordered_bits`` these are."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32(0x7FFFFFFF), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=1).astype(jnp.int32)


def _largest(x: Array) -> tuple[Array, Array]:
    """Largest value of each row and its column, [B, 1] each; a NaN is the largest."""
    # XLA's maximum loses NaNs of larger arrays on CPUs, its argmax does not.
    column = _argmax(x)[:, None]
    return jnp.take_along_axis(x, column, axis=1), column


def _finite(x: Array) -> Array:
    """0 in place of infinities, which cannot be subtracted from themselves."""
    return jnp.where(jnp.isfinite(x), x, 0.0)
