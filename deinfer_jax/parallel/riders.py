"""Float32 numbers that ride in the buffer of an all-reduce of another dtype.

A collective of two dtypes is two collectives, and bars XLA's one-shot kernel on a GPU. So Σx² of a
token, float32, travels in columns of the payload's dtype, and loses nothing: every device has
columns of its own, in which all others write zeros, so that the sum over devices rounds nothing,
and its number goes as pieces of so many bits as the dtype has. A bfloat16 has 8, three make 24, as
in a float32, whose range it shares. A float16 has 11 and a smaller range: it takes three pieces of
the mantissa, scaled so that none is subnormal, and the exponent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from deinfer_jax.parallel.mesh import AXIS
from deinfer_jax.parallel.strategy import FEW_ROWS

__all__ = ["add_riders", "buffer_width", "rider_columns"]


def rider_columns(dtype: jnp.dtype, devices: int) -> int:
    """Columns that one float32 takes in a buffer of ``dtype``."""
    return 1 if dtype == jnp.float32 else devices * (4 if dtype == jnp.float16 else 3)


def buffer_width(rank: int, riders: int, dtype: jnp.dtype, devices: int) -> int:
    """Columns of the buffer for latents of ``rank``, padded to a multiple of 8·p: whole 16-byte
    pieces for every device."""
    used = rank + riders * rider_columns(dtype, devices)
    return -(-used // (8 * devices)) * 8 * devices


def add_riders(
    z: Array,  # [U, R + zeros], this device's terms
    riders: Array,  # [T, k] float32, this device's terms of the first T rows
    rank: int,  # R
    devices: int,
) -> tuple[Array, Array]:  # [U, R], [U, k]
    """The sums of both over devices, by one all-reduce of one buffer. z itself may be the buffer,
    with room for the riders behind R."""
    riders = jnp.pad(riders, ((0, len(z) - len(riders)), (0, 0)))
    columns = riders if z.dtype == jnp.float32 else _own_columns(riders, z.dtype, devices)
    used = rank + columns.shape[1]
    width = buffer_width(rank, riders.shape[1], z.dtype, devices)
    if len(z) > FEW_ROWS and z.shape[1] == width:
        buffer = jax.lax.dynamic_update_slice(z, columns, (0, rank))  # in place
    else:  # all of z is written once more, but by the kernel that makes the riders
        beside = jnp.concatenate([z[:, :rank], columns], axis=1)
        buffer = jnp.pad(beside, ((0, 0), (0, width - used)))
    total = jax.lax.psum(buffer, AXIS)
    found = total[:, rank:used]
    if z.dtype != jnp.float32:
        found = _read(found.reshape(len(z), devices, riders.shape[1], -1))
    return total[:, :rank], found


def _own_columns(riders: Array, dtype: jnp.dtype, devices: int) -> Array:  # [T, p·k·n]
    pieces = _half_pieces(riders) if dtype == jnp.float16 else _pieces(riders, 8, 7)
    stacked = jnp.stack(pieces, axis=-1).astype(dtype)  # [T, k, n]
    own = jnp.arange(devices, dtype=jnp.int32) == jax.lax.axis_index(AXIS)
    spread = jnp.where(own[None, :, None, None], stacked[:, None], jnp.zeros((), dtype))
    return spread.reshape(len(riders), -1)


def _read(columns: Array) -> Array:  # [T, p, k, n] -> [T, k]
    wide = columns.astype(jnp.float32)
    if columns.dtype == jnp.float16:
        first, second, third, exponent = (wide[..., i] for i in range(4))
        mantissa = first + (second + third * 2.0**-11) * 2.0**-11
        terms = jnp.ldexp(mantissa, exponent.astype(jnp.int32))
    else:
        terms = wide.sum(axis=-1)
    return terms.sum(axis=1)


def _pieces(x: Array, exponent: int, mantissa: int) -> list[Array]:
    """Three floats of a smaller type, as float32, that add up to a float32."""
    first = jax.lax.reduce_precision(x, exponent, mantissa)
    second = jax.lax.reduce_precision(x - first, exponent, mantissa)
    return [first, second, x - first - second]


def _half_pieces(x: Array) -> list[Array]:
    mantissa, exponent = jnp.frexp(x)
    first, second, third = _pieces(mantissa, 8, 10)
    return [first, second * 2.0**11, third * 2.0**22, exponent.astype(jnp.float32)]
