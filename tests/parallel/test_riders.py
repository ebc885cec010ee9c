"""Float32 numbers in the buffer of an all-reduce of another dtype: nothing of them is lost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deinfer_jax.parallel.mesh import choose_placement
from deinfer_jax.parallel.riders import add_riders, buffer_width, rider_columns
from deinfer_jax.parallel.strategy import FEW_ROWS

P = PartitionSpec


def summed(
    z: np.ndarray, riders: np.ndarray, dtype: str, *, room: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Of terms z [p, T, R] and riders float32 [p, T, k]: the sums that all devices get. ``room`` is
    how many riders z has zeros for."""
    devices, _, rank = z.shape
    width = buffer_width(rank, room, jnp.dtype(dtype), devices) if room else rank
    z = np.pad(z, ((0, 0), (0, 0), (0, width - rank)))
    placement = choose_placement(devices)

    def local(z: Any, riders: Any) -> Any:
        return add_riders(z[0], riders[0], rank, devices)

    both = placement.spread(local, (P("tp"), P("tp")), (P(), P()))
    total, found = jax.jit(both)(jnp.asarray(z, dtype), jnp.asarray(riders))
    return np.asarray(total), np.asarray(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize(("rows", "room"), [(5, 0), (5, 2), (FEW_ROWS + 3, 2), (FEW_ROWS + 3, 1)])
def test_riders_are_summed_in_float32(rows: int, room: int, dtype: str, devices: int) -> None:
    rng = np.random.default_rng(devices)
    # Sums of squares of all sizes, far beyond what float16 can hold, and zero.
    exponents = rng.uniform(-20, 25, (devices, rows, 2))
    riders = (2.0**exponents * rng.uniform(1, 2, exponents.shape)).astype(np.float32)
    riders[:, 0] = 0
    z = rng.integers(-8, 8, (devices, rows, 11))  # sums are exact in every dtype
    total, found = summed(z, riders, dtype, room=room)
    np.testing.assert_array_equal(total.astype(np.float64), z.sum(axis=0))
    # p − 1 additions in float32 are all that may round.
    exact = riders.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(found, exact, rtol=devices * 2.0**-24, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_term_comes_back_to_the_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    riders = np.zeros((4, 1000, 1), np.float32)
    bits = rng.integers(0x20000000, 0x5F000000, 1000, dtype=np.uint32)
    riders[2, :, 0] = bits.view(np.float32)
    _, found = summed(np.zeros((4, 1000, 3)), riders, dtype)
    np.testing.assert_array_equal(found[:, 0], riders[2, :, 0])


@pytest.mark.parametrize(
    ("dtype", "devices", "columns", "width"),
    [
        ("float32", 2, 1, 112),  # 100 + 1, to a multiple of 16
        ("bfloat16", 2, 6, 112),
        ("bfloat16", 8, 24, 128),  # 100 + 24, to a multiple of 64
        ("float16", 8, 32, 192),  # 100 + 32
    ],
)
def test_widths(dtype: str, devices: int, columns: int, width: int) -> None:
    assert rider_columns(jnp.dtype(dtype), devices) == columns
    assert buffer_width(100, 1, jnp.dtype(dtype), devices) == width
