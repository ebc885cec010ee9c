"""What devices and links do a second: the data that predictions are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from deinfer_jax.cache.choice import DEVICES as SPEEDS
from deinfer_jax.cache.choice import DeviceSpeed

__all__ = ["DEVICES", "LINKS", "Device", "Link", "resolve_device", "resolve_link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, and how far stock XLA gets on it.

    Attributes:
        name: for people.
        speed: bytes/s and FLOP/s of the device's ceilings.
        memory: bytes that weights, cache and temporaries may take.
        read, compute: shares of the ceilings that products reach.
        overlap: n, how far reading and computing of a product overlap: it takes
            (reading^n + computing^n)^(1/n), their sum for n = 1, the longer of the two for large n.
        product: seconds a product takes beside reading and computing.
        cache_read: share of the bandwidth that decode attention reads the cache at.
        attention: share of the FLOP/s that a prompt's attention computes at.
        elementwise: share of the bandwidth that norms, RoPE, activations and sums reach.
        kernel: seconds of a small kernel beside what it moves.
    """

    name: str
    speed: DeviceSpeed
    memory: int
    read: float
    compute: float
    overlap: float
    product: float
    cache_read: float
    attention: float
    elementwise: float
    kernel: float

    def peak(self, itemsize: int) -> float:
        """FLOP/s of products of so wide numbers."""
        return self.speed.single if itemsize == 4 else self.speed.half


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects the devices. A collective takes latency + wire / bandwidth, where *wire* is
    what one device sends around a ring: 2(p − 1)/p of an all-reduced buffer, (p − 1)/p of a
    gathered or scattered one.

    Attributes:
        name: for people.
        bandwidth: bytes/s that a device sends (and receives at the same time) in a collective.
        latency: seconds between two devices.
        hop: seconds on top for every doubling of the devices.
        small: bytes up to which an all-reduce of a single buffer goes by a faster kernel (XLA's
            one- and two-shot kernels over NVLink, without it NCCL's for few bytes), which has
            ``small_latency``; 0 = there is none.
        small_latency: its seconds.

    Raises:
        ValueError: bandwidth is not positive, or a time or size is negative.
    """

    name: str
    bandwidth: float
    latency: float
    hop: float = 0.0
    small: float = 0.0
    small_latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise ValueError(f"Link.bandwidth: expected bytes/s > 0, got {self.bandwidth}")
        for field in fields(self)[2:]:
            if not (getattr(self, field.name) >= 0 and math.isfinite(getattr(self, field.name))):
                raise ValueError(
                    f"Link.{field.name}: expected a number >= 0, got {getattr(self, field.name)}"
                )


# The shares and times of "h200" are a fit (bench/fit_planner.py) to the bare stack of 70B layers on
# two H200s (bench/results/tensor_parallel.json, JAX 0.11.2), and to the products of one 8B layer
# and steps of 8 of them (bench/measured.py). Not fitted: `elementwise`, which was measured (a + 1:
# 3.66 of 4.42 TB/s), and `attention`, assumed, as short prompts hardly depend on it. The memory is
# what the vendor states. "cpu" is two cores of a server; nothing is fitted, the order of magnitude
# is what matters.
DEVICES = {
    "h200": Device(
        name="h200",
        speed=SPEEDS["gpu"],
        memory=140 * 10**9,
        read=0.95,
        compute=0.881,
        overlap=3.01,
        product=8.03e-6,
        cache_read=0.271,
        attention=0.15,
        elementwise=0.83,
        kernel=1e-6,
    ),
    "cpu": Device(
        name="cpu",
        speed=SPEEDS["cpu"],
        memory=8 * 10**9,
        read=0.8,
        compute=0.8,
        overlap=1.5,
        product=2e-6,
        cache_read=0.5,
        attention=0.3,
        elementwise=0.5,
        kernel=2e-6,
    ),
}

# "nvlink" and "pcie" come from the same fit; "pcie" is what it was measured as, two H200s that talk
# through the host's memory (NCCL_P2P_DISABLE=1). Latencies there are those inside a program, with
# the wait for the slower device in them. `hop` is assumed, since two devices have none.
# "network" is assumed altogether: one 200 Gbit/s port of Ethernet or InfiniBand a device, of whose
# 25 GB/s collectives get 20, and 30 µs between two devices. Pass a Link for other hardware.
LINKS = {
    "nvlink": Link(
        name="nvlink",
        bandwidth=4e11,
        latency=5.64e-6,
        hop=2e-6,
        small=float(4 << 20),
        small_latency=5.04e-6,
    ),
    "pcie": Link(
        name="pcie",
        bandwidth=3.1e10,
        latency=2.1e-5,
        hop=6e-6,
        small=float(128 << 10),
        small_latency=2e-6,
    ),
    "network": Link(name="network", bandwidth=2e10, latency=3e-5, hop=1.5e-5),
}


def resolve_device(device: str | Device) -> Device:
    """A device by name, or the one given.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(
            f"device: expected {', '.join(map(repr, DEVICES))} or a Device, got {device!r}"
        )
    return DEVICES[device]


def resolve_link(link: str | Link) -> Link:
    """A link by name, or the one given.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise ValueError(f"link: expected {', '.join(map(repr, LINKS))} or a Link, got {link!r}")
    return LINKS[link]
