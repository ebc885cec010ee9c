"""Seconds and bytes of a model on p devices under one strategy, with one kind of cache.

A product takes about the longer of reading its operands and computing, and a fixed time; a small
kernel the time of what it moves, and a fixed one; decode attention what ``cache.choice`` counts of
a cached token; a collective its latency and the time its bytes need on the wire. These add up:
nothing overlaps. The parameters are data, see ``speeds``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2

import jax.numpy as jnp

from deinfer_jax.cache.choice import DeviceSpeed, cost
from deinfer_jax.cache.chunk import query_block
from deinfer_jax.cache.layout import CacheKind, CacheLayout, LayerLayout, Segment, layout_of
from deinfer_jax.config import LowRank, ModelConfig
from deinfer_jax.parallel.shares import deal_rank
from deinfer_jax.planner.placement import (
    Collective,
    Heads,
    LayerPlacement,
    Product,
    StrategyName,
    layer_shape,
    outer_collectives,
    place_layer,
)
from deinfer_jax.planner.speeds import Device, Link

__all__ = ["Memory", "Predictor", "Traffic"]

PROMPT_CHUNK = 2048  # tokens of a prompt in one program, which temporaries are for
# Small kernels of a layer, whatever its sizes: norms, RoPE, writes to the cache, activation, sums;
# and what `sharded` needs besides, to write Σx² into the payloads and to scale by 1/rms after.
KERNELS = 8
SHARDED_KERNELS = 8
STEP_KERNELS = 6  # embedding, norm, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What collectives move for a token in an average layer, in elements.

    Attributes:
        payload: by the strategies' formulas: ranks, outputs, slots.
        padding: zeros on top, so that devices divide.
        wire: of the payload, what each device sends around a ring.
        wire_padding: of the padding.
        cached: of every *cached* token, in every step: keys and values that ``naive`` rebuilds from
            latents in parts; 0 elsewhere. Not in the others.
    """

    payload: float
    padding: float
    wire: float
    wire_padding: float
    cached: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: linears with what is replicated and padded, norms, biases, word tables.
        cache: of the asked sequences, in whole pages.
        temporaries: of the largest program, a guess.
        sequence: cache of one sequence.
    """

    weights: int
    cache: int
    temporaries: int
    sequence: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.temporaries


class Predictor:
    """Counts and times one strategy with one kind of cache.

    Args:
        config: of the model.
        strategy: ``dense`` multiplies factors out.
        kv_cache: ``full``, ``latent`` or ``full+latent``.
        devices: p.
        device, link: their speeds.
        dtype: of weights, cache and payloads.
        page_size: of the cache, in tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        strategy: StrategyName,
        kv_cache: CacheKind,
        *,
        devices: int,
        device: Device,
        link: Link,
        dtype: str,
        page_size: int = 64,
    ) -> None:
        if strategy == "dense":
            config = config.replace(low_rank=LowRank())
        self.config, self.strategy, self.devices = config, strategy, devices
        self.device, self.link = device, link
        self.itemsize = jnp.dtype(dtype).itemsize
        layout = layout_of(config, kv_cache, page_size, dtype)
        known: dict[object, LayerPlacement] = {}  # most layers are alike
        placements = []
        for layer in range(config.num_layers):
            shape = layer_shape(config, layer)
            if shape not in known:
                cached = {"k": layout.layers[layer].keys, "v": layout.layers[layer].values}
                latent = frozenset(short for short, segment in cached.items() if segment)
                known[shape] = place_layer(config, layer, strategy, devices, dtype, latent)
            placements.append(known[shape])
        self.placements = tuple(placements)
        self.layout = self._local(layout)
        self.outer = outer_collectives(config, strategy, devices)
        self.words = ceil(config.vocab_size / devices)  # W, padded, on this device

    def decode_seconds(self, batch: int, context: int) -> float:
        """Of a step that gives each of ``batch`` sequences, of ``context`` cached tokens, one
        more."""
        seconds = self._outer(batch, batch)
        for kind, times in self._kinds():
            seconds += times * self._decode_layer(*kind, batch, context)
        return seconds

    def prompt_seconds(self, sequences: int, tokens: int) -> float:
        """Of running ``sequences`` prompts of ``tokens`` each, in one call, to their first new
        tokens. That a long prompt goes in chunks is not counted, nor what each chunk rebuilds from
        the latents of those before."""
        rows = sequences * tokens
        seconds = self._outer(rows, sequences)
        for (placement, _, window), times in self._kinds():
            layer = self._layer(placement, rows)
            seen = _attended(tokens, window)
            heads = placement.heads.queries * self.config.head_dim
            operations = 4.0 * heads * seen * sequences
            attention = operations / (self.device.peak(self.itemsize) * self.device.attention)
            seconds += times * (layer + attention + self.device.kernel)
        return seconds

    def layers_seconds(self, *, batch: int, context: int = 0, prompt: int = 0) -> float:
        """Of the bare stack of layers, without embedding, head and sampling, to compare with
        measurements: a decode step, or prompts if ``prompt`` is given."""
        if prompt:
            return self.prompt_seconds(batch, prompt) - self._outer(batch * prompt, batch)
        return self.decode_seconds(batch, context) - self._outer(batch, batch)

    def traffic(self) -> Traffic:
        """What collectives of the layers move."""
        token: list[tuple[Collective, float]] = []  # each with its number in an average layer
        cached = 0.0
        for (placement, layer, _), times in self._kinds():
            share = times / self.config.num_layers
            for one in (*placement.collectives, *self._rebuilding(layer)):
                if one.per == "token":
                    token.append((one, share))
                else:
                    cached += share * one.payload
        return Traffic(
            payload=sum(share * c.payload for c, share in token),
            padding=sum(share * c.padding for c, share in token),
            wire=sum(share * c.wire(c.payload, self.devices) for c, share in token),
            wire_padding=sum(share * c.wire(c.padding, self.devices) for c, share in token),
            cached=cached,
        )

    def memory(self, batch: int, context: int, prompt: int) -> Memory:
        """Bytes on a device for ``batch`` sequences of ``context`` tokens whose prompts have
        ``prompt``."""
        sequence = self.layout.bytes_per_page * self.layout.pages_for(context)
        return Memory(
            weights=self._weights(),
            cache=batch * sequence,
            temporaries=self._temporaries(batch, context, min(prompt, PROMPT_CHUNK)),
            sequence=sequence,
        )

    def _local(self, layout: CacheLayout) -> CacheLayout:
        """A device's share: its heads, and the latents, whole or (``naive``) its part of each."""

        def part(segment: Segment | None) -> Segment | None:
            if segment is None or self.strategy != "naive":
                return segment
            return replace(segment, rank=deal_rank(segment.rank, self.devices).width)

        known: dict[tuple[LayerLayout, Heads], LayerLayout] = {}
        layers = []
        for layer, placement in zip(layout.layers, self.placements, strict=True):
            key = layer, placement.heads
            if key not in known:
                known[key] = replace(
                    layer,
                    kv_heads=placement.heads.kv,
                    keys=part(layer.keys),
                    values=part(layer.values),
                )
            layers.append(known[key])
        return replace(layout, layers=tuple(layers))

    def _kinds(self) -> Iterator[tuple[tuple[LayerPlacement, LayerLayout, int | None], int]]:
        """Layers that differ, each with how often it occurs."""
        kinds = Counter(zip(self.placements, self.layout.layers, self.config.windows, strict=True))
        yield from kinds.items()

    def _rebuilding(self, layer: LayerLayout) -> Iterator[Collective]:
        """``naive`` holds parts of latents: what is rebuilt or absorbed from them is a sum over the
        devices."""
        if self.strategy != "naive" or self.devices == 1:
            return
        kv = layer.kv_heads * layer.head_dim
        rebuilt = [] if layer.keys is None else [kv]
        if layer.values is not None and not layer.absorbs_values:
            rebuilt.append(kv)
        if rebuilt:
            yield Collective(
                kind="all-reduce",
                what="rebuilt keys and values",
                operands=tuple(rebuilt),
                per="cached token",
            )
        if layer.absorbs_values:
            heads = self.config.num_heads * layer.head_dim
            yield Collective(kind="all-reduce", what="absorbed values", operands=(heads,))

    def _decode_layer(
        self,
        placement: LayerPlacement,
        layer: LayerLayout,
        window: int | None,
        batch: int,
        context: int,
    ) -> float:
        seen = batch * (context if window is None else min(window, context))
        speed = self.device.speed
        effective = DeviceSpeed(
            bandwidth=speed.bandwidth * self.device.cache_read,
            half=speed.half * self.device.compute,
            single=speed.single * self.device.compute,
        )
        one = replace(self.layout, layers=(layer,))
        attention = seen * cost(one, placement.heads.queries, effective).seconds
        rebuilding = sum(
            self._collective(c, seen if c.per == "cached token" else batch)
            for c in self._rebuilding(layer)
        )
        kernels = 1 + 2 * (layer.keys is not None)  # attention; compaction and reconstruction
        return self._layer(placement, batch) + attention + rebuilding + kernels * self.device.kernel

    def _layer(self, placement: LayerPlacement, rows: int) -> float:
        """All but attention, for so many tokens."""
        heads = placement.heads
        widths = (
            10 * placement.residual  # two norms, two sums
            + 2 * (heads.queries + 2 * heads.kv) * self.config.head_dim  # RoPE, and into the cache
            + 3 * placement.ffn
        )
        kernels = KERNELS
        if self.strategy == "sharded" and self.devices > 1:
            widths += 2 * placement.latents
            kernels += SHARDED_KERNELS
        return (
            sum(self.product_seconds(product, rows) for product in placement.products)
            + self._moved(rows * widths)
            + kernels * self.device.kernel
            + sum(self._collective(c, rows) for c in placement.collectives)
        )

    def _outer(self, rows: int, sampled: int) -> float:
        """Embedding, the last norm, head and sampling."""
        head = self.product_seconds(
            Product(outputs=self.words, inputs=self.config.hidden_size), sampled
        )
        logits = 3 * sampled * self.words * 4 / self.itemsize  # in float32, read twice
        return (
            head
            + self._moved(2 * rows * self.placements[0].residual + logits)
            + STEP_KERNELS * self.device.kernel
            + sum(
                self._collective(c, sampled if c.per == "sampled row" else rows) for c in self.outer
            )
        )

    def product_seconds(self, product: Product, rows: int) -> float:
        """Of a device's share of a product, with so many rows."""
        moved = product.elements + rows * (product.outputs + product.inputs)
        reading = moved * self.itemsize / (self.device.speed.bandwidth * self.device.read)
        operations = 2.0 * product.elements * rows
        computing = operations / (self.device.peak(self.itemsize) * self.device.compute)
        n = self.device.overlap
        return (reading**n + computing**n) ** (1 / n) + self.device.product

    def _moved(self, elements: float) -> float:
        rate = self.device.speed.bandwidth * self.device.elementwise
        return elements * self.itemsize / rate

    def _collective(self, collective: Collective, count: int) -> float:
        link = self.link
        size = (collective.payload + collective.padding) * count * self.itemsize
        single = collective.kind == "all-reduce" and len(collective.operands) == 1
        latency = link.small_latency if single and size <= link.small else link.latency
        latency += link.hop * (ceil(log2(self.devices)) - 1)
        return latency + collective.wire(size, self.devices) / link.bandwidth

    def _weights(self) -> int:
        layers = sum(p.linear_elements + p.small_weights for p in self.placements)
        tables = 1 if self.config.tie_embeddings else 2
        words = tables * self.words * self.config.hidden_size
        return (layers + words + self.placements[0].residual) * self.itemsize

    def _temporaries(self, batch: int, context: int, rows: int) -> int:
        """The larger of a prompt's chunk (scores in float32 and their softmax, gathered pages,
        activations, logits) and a decode step (gathered or rebuilt cache, activations, logits)."""
        heads, ffn = self.placements[0].heads, self.placements[0].ffn
        layers, itemsize = self.layout.layers, self.itemsize

        def activations(tokens: int) -> int:
            return 4 * tokens * (4 * ffn + 8 * self.config.hidden_size)

        together = min(rows, query_block(heads.queries, context))
        gathered = context * max(
            4 * layer.kv_heads * layer.head_dim * itemsize
            + (layer.rebuilt_bytes(itemsize) if layer.segments else 0)
            for layer in layers
        )
        chunk = 8 * heads.queries * together * context + gathered + activations(rows)
        cached = batch * context
        read = max(layer.elements_per_token * itemsize for layer in layers)
        decode = cached * max(read, self.layout.rebuilt_bytes_per_token) + activations(batch)
        return max(chunk + 8 * self.words, decode + 8 * batch * self.words)


def _attended(tokens: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees, in a prompt."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window
