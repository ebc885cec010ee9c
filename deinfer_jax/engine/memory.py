"""Device memory: what a model, its cache and its programs take, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from deinfer_jax.cache.chunk import query_block
from deinfer_jax.cache.layout import CacheLayout
from deinfer_jax.config import ModelConfig

__all__ = [
    "MemoryPlan",
    "OutOfDeviceMemory",
    "available_bytes",
    "choose_capacity",
    "choose_pages",
    "explained",
    "format_bytes",
    "guess_temporaries",
    "room_for_cache",
]

SHORTEST_CONTEXT = 512  # a default context is not halved below this
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


def choose_capacity(
    layout: CacheLayout,
    config: ModelConfig,
    *,
    max_context: int | None,
    available: int | None,
    **rest: Any,
) -> tuple[int, int]:
    """Longest context and pages of the cache.

    Args:
        layout: of the cache.
        config: of the model.
        max_context: what the caller asks for, or None, which halves the model's until it fits.
        available: bytes of the device, or None.
        **rest: of :func:`choose_pages`.

    Raises:
        ValueError, OutOfDeviceMemory: as :func:`choose_pages`.
    """
    context = max_context or config.max_position
    # On a CPU the default cache has a fixed size, and a context longer than that is cut to it.
    least = context if max_context is not None or available is not None else 1
    while True:
        try:
            pages = choose_pages(
                layout, config, context=context, least_context=least, available=available, **rest
            )
        except OutOfDeviceMemory:
            if max_context is not None or context <= SHORTEST_CONTEXT:
                raise
            context = least = max(SHORTEST_CONTEXT, context // 2)
        else:
            if max_context is None:
                context = min(context, pages * layout.page_size)
            return context, pages


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
    prefill_chunk: int,
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
        prefill_chunk: most prompt tokens in one program.

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
    room = room_for_cache(
        config,
        layout,
        weights=weights,
        context=context,
        available=available,
        prefill_chunk=prefill_chunk,
    )
    if room is None or available is None:
        return min(wanted, max(CPU_CACHE_BYTES // layout.bytes_per_page, least))
    pages = min(wanted, room // (layout.bytes_per_page + layout.rebuilt_bytes_per_page))
    if pages < least:
        MemoryPlan(
            weights=weights,
            cache=layout.pool_bytes(least),
            temporaries=guess_temporaries(config, layout, context, prefill_chunk)
            + least * layout.rebuilt_bytes_per_page,
            available=int(available * GPU_FRACTION),
            bytes_per_sequence=layout.bytes_per_page * layout.pages_for(context),
        ).check()
    return pages


def room_for_cache(
    config: ModelConfig,
    layout: CacheLayout,
    *,
    weights: int,
    context: int,
    available: int | None,
    prefill_chunk: int,
) -> int | None:
    """Bytes that weights and prompts leave for the cache, and for what decode rebuilds from it;
    None where the device does not say. Arguments as of :func:`choose_pages`."""
    if available is None:
        return None
    temporaries = guess_temporaries(config, layout, context, prefill_chunk)
    return max(0, int(available * GPU_FRACTION) - weights - temporaries)


def guess_temporaries(
    config: ModelConfig, layout: CacheLayout, context: int, prefill_chunk: int
) -> int:
    """Bytes of temporaries of the largest program, before anything is compiled.

    A prompt chunk's attention (scores in float32 and their softmax, gathered pages twice, with what
    is rebuilt from latents in them), its activations, and float32 logits of a few hundred rows.
    Decode over latents comes on top, see ``CacheLayout.rebuilt_bytes_per_page``.
    """
    itemsize = jnp.dtype(layout.dtype).itemsize
    rows = min(prefill_chunk, context)
    together = min(rows, query_block(config.num_heads, context))
    scores = 2 * 4 * config.num_heads * together * context
    gathered = context * max(
        2 * 2 * layer.kv_heads * layer.head_dim * itemsize
        + (layer.rebuilt_bytes(itemsize) if layer.segments else 0)
        for layer in layout.layers
    )
    activations = 4 * rows * (4 * config.intermediate_size + 8 * config.hidden_size)
    logits = 4 * 2 * 256 * config.vocab_size
    return scores + gathered + activations + logits
