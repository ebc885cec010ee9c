"""Which kind of cache: what the user named, or what bytes and operations speak for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from deinfer_jax.cache.layout import (
    KINDS,
    PAGE_SIZES,
    CacheLayout,
    LayerLayout,
    layout_of,
)
from deinfer_jax.config import ModelConfig
from deinfer_jax.parallel.strategy import Single, Strategy

__all__ = ["DEVICES", "Cost", "DeviceSpeed", "Situation", "choose_layout", "cost"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What predictions are made from.

    Attributes:
        bandwidth: bytes/s read from memory.
        half, single: operations/s of large products of 16-bit and of 32-bit floats.
    """

    bandwidth: float
    half: float
    single: float


# GPU: an H200, bandwidth and bf16 products taken as given (see README), full-precision float32 as
# the vendor states it. CPU: two cores of a server, the order of magnitude is what matters.
DEVICES = {
    "gpu": DeviceSpeed(bandwidth=4.42e12, half=8.03e14, single=6.7e13),
    "cpu": DeviceSpeed(bandwidth=2e10, half=1e11, single=1e11),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What ``"auto"`` decides for.

    Attributes:
        speed: of the device.
        batch, context: sequences, and tokens of each, that should fit.
        cache_bytes: what the cache may take, or None.
        room: what it may take together with what decode rebuilds from it, or None.
    """

    speed: DeviceSpeed = DEVICES["cpu"]
    batch: int = 1
    context: int = 1
    cache_bytes: int | None = None
    room: int | None = None

    def holds(self, layout: CacheLayout) -> bool:
        """Whether the batch fits."""
        tokens, cached = self.batch * self.context, layout.bytes_per_token
        if self.cache_bytes is not None and tokens * cached > self.cache_bytes:
            return False
        needed = tokens * (cached + layout.rebuilt_bytes_per_token)
        return self.room is None or needed <= self.room


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a cached token costs on one device, all layers together.

    Attributes:
        bytes: that it takes.
        rebuilt: bytes of temporaries that decode takes for it.
        moved: bytes read and written for it in a decode step.
        operations: of a decode step to rebuild or absorb it, and to attend to it.
        seconds: that a decode step is predicted to spend on it.
    """

    bytes: int
    rebuilt: int
    moved: int
    operations: int
    seconds: float


def cost(layout: CacheLayout, num_heads: int, speed: DeviceSpeed) -> Cost:
    """Bytes, operations and predicted time of a cached token.

    Counts every stage of a decode step (compaction, reconstruction, attention) as one kernel that
    reads its inputs and writes its outputs once, and takes the longer of memory and arithmetic.
    Sharing of prefixes is not counted.
    """
    itemsize = jnp.dtype(layout.dtype).itemsize
    rate = speed.single if itemsize == 4 else speed.half
    moved = operations = 0
    seconds = 0.0
    for layer in layout.layers:
        for elements, work in _stages(layer, num_heads):
            moved += elements * itemsize
            operations += work
            seconds += max(elements * itemsize / speed.bandwidth, work / rate)
    return Cost(
        bytes=layout.bytes_per_token,
        rebuilt=layout.rebuilt_bytes_per_token,
        moved=moved,
        operations=operations,
        seconds=seconds,
    )


def _stages(layer: LayerLayout, num_heads: int) -> list[tuple[int, int]]:
    """Elements moved and operations of each stage, for one cached token."""
    heads = layer.kv_heads * layer.head_dim  # K·H
    stages = []
    if layer.keys is not None:
        copied = layer.latent_width + (layer.full_parts * heads)
        stages.append((2 * copied, 0))
        rebuilt = [layer.keys]
        if layer.values is not None and not layer.absorbs_values:
            rebuilt.append(layer.values)
        stages += [(segment.width + heads, 2 * segment.rank * heads) for segment in rebuilt]
    scores = 2 * num_heads * layer.head_dim
    if layer.values is not None and layer.absorbs_values:
        width, rank = layer.values.width, layer.values.rank
        stages.append((heads + width, scores + 2 * num_heads * rank))
    else:
        stages.append((2 * heads, 2 * scores))
    return stages


def choose_layout(
    config: ModelConfig,
    kind: str,
    page_size: int,
    dtype: str,
    *,
    situation: Situation | None = None,
    strategy: Strategy | None = None,
) -> CacheLayout:
    """The layout that ``kv_cache=kind`` means for a model.

    ``"auto"`` is ``"full"`` for a model without latents. Otherwise it is, of the kinds that hold
    the asked batch and context, the one with the fastest predicted decode step, or, if none does,
    the smallest; the choice and the figures of each kind are logged.

    Args:
        config: of the model.
        kind: ``"auto"``, ``"full"``, ``"latent"`` or ``"full+latent"``.
        page_size: S.
        dtype: of the pools.
        situation: what ``"auto"`` decides for; None = a CPU without limit of memory.
        strategy: on whose devices; None = on one.

    Raises:
        ValueError: the kind or the page size is unknown, or the model has no latents to cache.
    """
    if kind not in ("auto", *KINDS):
        raise ValueError(
            f"kv_cache: expected 'auto', 'full', 'latent' or 'full+latent', got {kind!r}"
        )
    if page_size not in PAGE_SIZES or not isinstance(page_size, int):
        raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {page_size}")
    layouts: dict[str, CacheLayout] = {
        name: layout_of(config, name, page_size, dtype, strategy) for name in KINDS
    }
    if kind != "auto":
        layout = layouts[kind]
        if kind != "full" and not layout.has_latents:
            needed = "k_proj or v_proj" if kind == "latent" else "v_proj"
            raise ValueError(
                f"kv_cache: expected a model with a decomposed {needed} for {kind!r}, got one "
                "where it is dense in every layer; use 'full'"
            )
        return layout
    # Kinds that come to the same, as all do for a dense model, are no choice.
    distinct: dict[tuple[LayerLayout, ...], CacheLayout] = {}
    for layout in layouts.values():
        distinct.setdefault(layout.layers, layout)
    if len(distinct) == 1:
        return layouts["full"]
    candidates = {one.kind: one for one in distinct.values()}
    own_heads = (strategy or Single()).heads(config).queries.width // config.head_dim
    return _cheapest(candidates, own_heads, situation or Situation())


def _cheapest(
    candidates: Mapping[str, CacheLayout], num_heads: int, situation: Situation
) -> CacheLayout:
    costs = {kind: cost(layout, num_heads, situation.speed) for kind, layout in candidates.items()}
    holds = {kind: situation.holds(layout) for kind, layout in candidates.items()}
    fitting = [kind for kind in costs if holds[kind]]
    asked = f"{situation.batch} sequences of {situation.context} tokens"
    if fitting:
        chosen = min(fitting, key=lambda kind: costs[kind].seconds)
        why = "the fastest"
        if len(fitting) < len(costs):
            why += f" that holds {asked}"
    else:
        chosen = min(costs, key=lambda kind: costs[kind].bytes + costs[kind].rebuilt)
        why = f"the smallest, since none holds {asked}"
    figures = "; ".join(
        f"{kind}: {one.bytes} bytes a token, a step moves {one.moved} bytes and computes "
        f"{one.operations / 1e6:.3g} MFLOP for it, predicted {1e9 * one.seconds:.3g} ns"
        + ("" if holds[kind] else f", does not hold {asked}")
        for kind, one in costs.items()
    )
    reason = f"kv_cache: {chosen}, {why} ({figures})"
    logger.info(reason)
    return replace(candidates[chosen], reason=reason)
