"""Device memory: what a model, its cache and its programs take, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryPlan", "OutOfDeviceMemory", "format_bytes"]


class OutOfDeviceMemory(MemoryError):
    """Weights, cache and temporaries do not fit on the device; the message gives each in bytes."""


def format_bytes(count: float) -> str:
    """``1.25 GB (1250000000 bytes)``-style text; decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit} ({int(count)} bytes)"
    return f"{int(count)} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        weights, cache, temporaries: what is needed.
        available: what the device offers, None where it does not say (CPU).
        bytes_per_sequence: cache of one sequence of the longest context.
    """

    weights: int
    cache: int
    temporaries: int
    available: int | None
    bytes_per_sequence: int

    @property
    def largest_batch(self) -> int | None:
        """Sequences of the longest context whose cache fits beside weights and temporaries; None
        without a limit."""
        if self.available is None:
            return None
        room = self.available - self.weights - self.temporaries
        return max(0, room // self.bytes_per_sequence)

    def describe(self) -> str:
        """One line with all figures."""
        text = (
            f"weights {format_bytes(self.weights)}, cache {format_bytes(self.cache)}, "
            f"temporaries {format_bytes(self.temporaries)}"
        )
        if self.available is None:
            return text
        return (
            f"{text}; the device offers {format_bytes(self.available)}, enough for a batch of "
            f"{self.largest_batch} at the longest context "
            f"({format_bytes(self.bytes_per_sequence)} each)"
        )

    def check(self) -> None:
        """Raises OutOfDeviceMemory if the sum is more than the device offers."""
        if (
            self.available is not None
            and self.weights + self.cache + self.temporaries > self.available
        ):
            raise OutOfDeviceMemory(
                f"out of device memory: {self.describe()}. Lower max_batch, max_context or "
                "cache_bytes."
            )
