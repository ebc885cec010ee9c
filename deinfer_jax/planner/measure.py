"""The link between the visible devices, measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deinfer_jax.planner.placement import Collective, CollectiveKind
from deinfer_jax.planner.speeds import Link

__all__ = ["Sample", "fit_link", "measure_link"]

AXIS = "tp"
KINDS: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather")
SIZES = (1 << 13, 1 << 16, 1 << 19, 1 << 22)  # bytes
CHAINS = (2, 10)  # collectives in a program; the difference is free of what a call costs
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement.

    Attributes:
        kind: of the collective.
        size: bytes of the whole buffer.
        seconds: of one collective.
    """

    kind: CollectiveKind
    size: int
    seconds: float


def measure_link(devices: int, *, sizes: Sequence[int] = SIZES, seconds: float = 60.0) -> Link:
    """Latency and bandwidth of all-reduces and all-gathers between the visible devices.

    Runs chains of them inside compiled programs, at a few sizes, and waits for each call, since
    simulated CPU devices deadlock where calls queue up. Between simulated devices it measures the
    host's memory and its idle cores, which says nothing about GPUs.

    Args:
        devices: how many the plan is for. Where fewer are visible, those are measured, and the
            link's name says so.
        sizes: of the buffers in bytes, at least two.
        seconds: no further size is begun after so many; the two smallest are measured in any case.

    Returns:
        A :class:`Link` called ``measured between …``; its ``small_latency`` is that of all-reduces,
        its ``latency`` that of all-gathers.

    Raises:
        ValueError: only one device is visible or asked for, or sizes are fewer than two.
    """
    visible = jax.devices()
    count = min(devices, len(visible))
    if count < 2:
        raise ValueError(
            f"measuring a link: expected at least 2 devices, got {devices} asked for and "
            f"{len(visible)} visible ({visible[0].platform}); name a link instead"
        )
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes: expected at least two, got {tuple(sizes)}")
    mesh = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=visible[:count])
    started, samples = time.perf_counter(), []
    for index, size in enumerate(sorted(set(sizes))):
        if index > 1 and time.perf_counter() - started > seconds:
            break
        for kind in KINDS:
            samples.append(_measure(mesh, kind, size))
    of = "" if count == devices else f" of {devices}"
    return fit_link(samples, count, f"measured between {count}{of} {visible[0].platform} devices")


def fit_link(samples: Sequence[Sample], devices: int, name: str) -> Link:
    """The link that explains the samples best: a latency for each kind and a common bandwidth, by
    least squares of relative errors."""
    rows = []
    for sample in samples:
        wire = Collective(kind=sample.kind, what="", operands=()).wire(sample.size, devices)
        row = [float(sample.kind == kind) for kind in KINDS] + [wire]
        rows.append(np.array(row) / sample.seconds)
    scale = np.max(rows, axis=0)  # of columns, as latencies and bandwidths differ by 1e15
    free = list(range(len(KINDS) + 1))
    while True:  # what would come out negative is 0
        columns = np.array(rows)[:, free] / scale[free]
        values = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0] / scale[free]
        if (values > 0).all():
            break
        free = [index for index, value in zip(free, values, strict=True) if value > 0]
    found = dict(zip(free, values.tolist(), strict=True))
    largest = max(sample.size for sample in samples)
    return Link(
        name=name,
        bandwidth=1 / found[2] if 2 in found else 1e15,
        latency=found.get(1, 0.0),
        small=float(largest),
        small_latency=found.get(0, 0.0),
    )


def _measure(mesh: jax.sharding.Mesh, kind: CollectiveKind, size: int) -> Sample:
    devices = mesh.devices.size
    width = max(1, size // 4 // devices)  # float32
    if kind == "all-reduce":
        width *= devices
    split = NamedSharding(mesh, P(AXIS))
    x = jax.device_put(jnp.ones(width * devices, jnp.float32), split)
    factor = jax.device_put(jnp.full(devices, 1.0 / devices, jnp.float32), split)
    times = []
    for chain in CHAINS:
        program = jax.jit(
            jax.shard_map(
                _chain(kind, chain, devices),
                mesh=mesh,
                in_specs=(
                    P(AXIS),  # x
                    P(AXIS),  # factor
                ),
                out_specs=P(AXIS),
            )
        )
        jax.block_until_ready(program(x, factor))
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            jax.block_until_ready(program(x, factor))
            best = min(best, time.perf_counter() - started)
        times.append(best)
    each = (times[1] - times[0]) / (CHAINS[1] - CHAINS[0])
    # Noise can make the long chain look faster; the time of one call is then all that is known.
    return Sample(
        kind=kind,
        size=width * 4 * (devices if kind == "all-gather" else 1),
        seconds=each if each > 0 else times[1] / CHAINS[1],
    )


def _chain(
    kind: CollectiveKind, length: int, devices: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """That many collectives, each of which needs the one before; ``factor`` [1] differs by device,
    as far as JAX knows, so that none is simplified away."""

    def all_reduces(x: jax.Array, factor: jax.Array) -> jax.Array:
        for _ in range(length):
            x = jax.lax.psum(x, AXIS) * factor
        return x

    def all_gathers(x: jax.Array, factor: jax.Array) -> jax.Array:
        for _ in range(length):
            gathered = jax.lax.all_gather(x, AXIS)  # [p, width]
            x = gathered.sum(axis=0) * factor
        return x

    return all_reduces if kind == "all-reduce" else all_gathers
