"""Device memory: what a model, its cache and its programs take, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from deinfer_jax.cache.layout import CacheLayout
from deinfer_jax.config import ModelConfig

__all__ = [
    "MemoryPlan",
    "OutOfDeviceMemory",
    "available_bytes",
    "choose_pages",
    "explained",
    "format_bytes",
]

CPU_CACHE_BYTES = 512 * 10**6  # default on a CPU, whose memory belongs to others too
GPU_FRACTION = 0.92  # of what a device offers; the rest is for fragmentation and workspaces


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


def available_bytes(device: Any) -> int | None:
    """What JAX may use of a device's memory; None where it does not say (CPU)."""
    return (device.memory_stats() or {}).get("bytes_limit")


@contextmanager
def explained(plan: Callable[[], MemoryPlan]) -> Iterator[None]:
    """Turns an allocation that fails inside into OutOfDeviceMemory with the plan's figures."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfDeviceMemory(f"out of device memory: {plan().describe()}") from error


def choose_pages(
    layout: CacheLayout,
    config: ModelConfig,
    *,
    weights: int,
    batch: int,
    context: int,
    least_context: int,
    cache_bytes: int | None,
    available: int | None,
) -> int:
    """Pages of the cache.

    Args:
        layout: of the cache.
        config: of the model.
        weights: bytes of its parameters.
        batch, context: more pages than ``batch`` sequences of ``context`` tokens are of no use.
        least_context: tokens of one sequence that must fit.
        cache_bytes: what the caller asks for, or None.
        available: bytes of the device, or None.

    Raises:
        ValueError: ``cache_bytes`` is less than a page.
        OutOfDeviceMemory: not even ``least_context`` tokens fit beside the weights.
    """
    wanted, least = batch * layout.pages_for(context), layout.pages_for(least_context)
    if cache_bytes is not None:
        pages = min(cache_bytes // layout.bytes_per_page, wanted)
        if pages < 1:
            raise ValueError(
                f"cache_bytes: expected at least {layout.bytes_per_page} (one page of "
                f"{layout.page_size} tokens), got {cache_bytes}"
            )
        return pages
    if available is None:
        return min(wanted, max(CPU_CACHE_BYTES // layout.bytes_per_page, least))
    temporaries = _guess_temporaries(config, layout, context)
    room = int(available * GPU_FRACTION) - weights - temporaries
    pages = min(wanted, room // layout.bytes_per_page)
    if pages < least:
        MemoryPlan(
            weights=weights,
            cache=layout.pool_bytes(least),
            temporaries=temporaries,
            available=int(available * GPU_FRACTION),
            bytes_per_sequence=layout.bytes_per_page * layout.pages_for(context),
        ).check()
    return pages


def _guess_temporaries(config: ModelConfig, layout: CacheLayout, context: int) -> int:
    """Before anything is compiled: a chunk's scores in float32 twice, activations, and logits."""
    rows = min(2048, context)
    scores = 2 * 4 * config.num_heads * rows * context
    activations = 4 * rows * (4 * config.intermediate_size + 8 * config.hidden_size)
    gathered = 4 * layout.bytes_per_token * context // config.num_layers
    return scores + activations + gathered + 4 * 4 * 256 * config.vocab_size + 256 * 2**20
