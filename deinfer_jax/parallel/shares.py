"""How the axes of a model are dealt to devices: evenly, or by head.

An axis that does not divide is padded with zeros, which is exact: a rank of zeros adds nothing, a
query head of zeros meets columns of zeros in o, and so on. Host code, no jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Heads", "Run", "Share", "deal", "deal_heads", "deal_rank", "joined", "whole"]

Run = tuple[int, int, int]  # first place in the source, first place in the target, how many
# Latents begin and end at multiples of 16 bytes of a 16-bit type, as matrix units want their rows.
# On a GPU XLA pads what does not before each product of cuBLAS, weights too: it reads and writes
# them once more in every step.
RANK_UNIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What every device has of an axis.

    Example: ``deal(5, 2)`` has width 3 and parts ``((0, 0, 3),)`` and ``((3, 0, 2),)``: the second
    device's last place is a zero.

    Attributes:
        size: of the axis, without padding.
        width: places on each device.
        parts: by device, runs of (place in the axis, place on the device, count); what no run
            covers is zero. A single part: the axis is whole on every device.
    """

    size: int
    width: int
    parts: tuple[tuple[Run, ...], ...]

    @property
    def devices(self) -> int:
        """How many parts there are."""
        return len(self.parts)

    @property
    def split(self) -> bool:
        """Whether devices have different parts."""
        return len(self.parts) > 1

    @property
    def padded(self) -> int:
        """Places on all devices together."""
        return self.width * self.devices

    def runs(self) -> tuple[Run, ...]:
        """From the axis to the devices' places side by side."""
        return joined(
            (source, device * self.width + place, count)
            for device, part in enumerate(self.parts)
            for source, place, count in part
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What every device has of attention, in elements: ``queries`` of the axis [N·H], ``kv`` of
    [K·H]."""

    queries: Share
    kv: Share


def whole(size: int) -> Share:
    """An axis that every device has."""
    return Share(size=size, width=size, parts=(((0, 0, size),),))


def deal(size: int, devices: int) -> Share:
    """Equal contiguous parts, the last ones padded."""
    width = -(-size // devices)
    starts = [min(device * width, size) for device in range(devices + 1)]
    parts = (
        ((start, 0, end - start),) if end > start else ()
        for start, end in zip(starts, starts[1:], strict=False)
    )
    return Share(size=size, width=width, parts=tuple(parts))


def deal_rank(size: int, devices: int) -> Share:
    """As :func:`deal`, each part padded to a multiple of ``RANK_UNIT``.

    Example: a rank of 11 on 2 devices has width 8 and parts of 6 and 5.
    """
    share = deal(size, devices)
    return replace(share, width=-(-share.width // RANK_UNIT) * RANK_UNIT)


def deal_heads(heads: int, kv_heads: int, head_dim: int, devices: int) -> Heads:
    """Whole kv heads a device where there are enough of them, padded to a multiple of the devices;
    else the kv heads are padded to a divisor of the devices, several devices have a copy of each,
    and share its queries, whose number is padded to a multiple of the copies.

    Example: 9 query and 3 kv heads. On 2 devices there are 4 groups of 3, the last one zeros. On 8,
    each of 4 groups is on 2 devices, which have 2 of its queries each, the fourth of them zeros.
    """
    group = heads // kv_heads
    if kv_heads >= devices:
        own, copies = -(-kv_heads // devices), 1
    else:
        slots = next(n for n in range(kv_heads, devices + 1) if devices % n == 0)
        own, copies = 1, devices // slots
    each = -(-group // copies)  # queries of a kv head on a device
    queries, kv = [], []
    for device in range(devices):
        first = device // copies * own
        some: list[Run] = []
        theirs: list[Run] = []
        for place in range(own):
            head = first + place
            if head >= kv_heads:
                continue
            some.append((head, place, 1))
            begin = device % copies * each
            count = min(each, group - begin)
            if count > 0:
                theirs.append((head * group + begin, place * each, count))
        kv.append(_times(head_dim, some))
        queries.append(_times(head_dim, theirs))
    return Heads(
        queries=Share(size=heads * head_dim, width=own * each * head_dim, parts=tuple(queries)),
        kv=Share(size=kv_heads * head_dim, width=own * head_dim, parts=tuple(kv)),
    )


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours that go on in source and target as one run."""
    found: list[Run] = []
    for source, place, count in runs:
        if found:
            before, at, so_far = found[-1]
            if (before + so_far, at + so_far) == (source, place):
                found[-1] = (before, at, so_far + count)
                continue
        found.append((source, place, count))
    return tuple(found)


def _times(width: int, runs: Sequence[Run]) -> tuple[Run, ...]:
    return joined((a * width, b * width, n * width) for a, b, n in runs)
