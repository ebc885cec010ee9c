"""What a layer's pool holds, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp

from deinfer_jax.config import ModelConfig, Slice
from deinfer_jax.parallel.strategy import Single, Strategy

__all__ = [
    "KINDS",
    "PAGE_SIZES",
    "SEGMENT_ALIGNMENT",
    "CacheKind",
    "CacheLayout",
    "LayerLayout",
    "Segment",
    "default_page_size",
    "layout_of",
]

PAGE_SIZES = (16, 32, 64, 128)
SEGMENT_ALIGNMENT = 64  # elements: a kernel's swizzle, and its copies' strides
CacheKind = Literal["full", "latent", "full+latent"]
KINDS: tuple[CacheKind, ...] = get_args(CacheKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Columns of a latent pool: one latent, padded to a multiple of 64.

    Attributes:
        name: e.g. ``c_k``.
        offset: first column.
        rank: columns in use, R.
    """

    name: str
    offset: int
    rank: int

    @property
    def width(self) -> int:
        """Columns with the padding."""
        return -(-self.rank // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """What is cached of one layer, for keys and values separately: the full heads [K, H] (keys
    after RoPE), or the latent that they are computed from (before RoPE).

    Full parts are a pool [P, n, K, S, H], n of keys and values that are full, keys first: one page
    of one head is contiguous, so that it is one TMA box. Latents are a pool [P, S, width] of
    segments side by side; keys and values that read the same latent share a segment.

    Attributes:
        kv_heads, head_dim: K of the device, and H.
        keys, values: the segment, or None where they are full.
    """

    kv_heads: int
    head_dim: int
    keys: Segment | None = None
    values: Segment | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of the latent pool, in order."""
        return tuple(dict.fromkeys(s for s in (self.keys, self.values) if s is not None))

    @property
    def full_parts(self) -> int:
        """n: how many of keys and values are full."""
        return (self.keys is None) + (self.values is None)

    @property
    def latent_width(self) -> int:
        """Columns of the latent pool, 0 where there is none."""
        return sum(segment.width for segment in self.segments)

    @property
    def elements_per_token(self) -> int:
        """Cached numbers a token, padding included."""
        return self.full_parts * self.kv_heads * self.head_dim + self.latent_width

    @property
    def absorbs_values(self) -> bool:
        """Whether decode attends with the values' latents instead of rebuilding the values.

        Always where keys are full: nothing is rebuilt then. Beside rebuilt keys, where the latent
        is not much wider than the values: rebuilding writes and reads K·H numbers a token,
        absorbing reads the latent once more for each sequence. An 8B step (8 layers, ranks 512) on
        an H200 took 6.7 ms with values rebuilt and 5.7 ms with values absorbed at 64 sequences of
        512 tokens, 5.7 and 4.2 ms at 8 of 4096.
        """
        if self.values is None:
            return False
        return self.keys is None or self.values.width <= 2 * self.kv_heads * self.head_dim

    def rebuilt_bytes(self, itemsize: int) -> int:
        """Bytes that rebuilding takes for a token, beside the cache: its cached numbers copied, its
        keys and values, and the product of one of the two in float32, before it is rounded."""
        heads = self.kv_heads * self.head_dim
        return (self.elements_per_token + 2 * heads) * itemsize + 4 * heads

    def full_shape(self, num_pages: int, page_size: int) -> tuple[int, ...] | None:
        """Shape of the pool of full parts, None where nothing is full."""
        if not self.full_parts:
            return None
        return (num_pages, self.full_parts, self.kv_heads, page_size, self.head_dim)

    def latent_shape(self, num_pages: int, page_size: int) -> tuple[int, ...] | None:
        """Shape of the latent pool, None where everything is full."""
        return (num_pages, page_size, self.latent_width) if self.latent_width else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Layouts of all layers on one device, with page size S in tokens and the dtype of the pools.

    Attributes:
        kind: what was asked for, or chosen. Single layers may differ, since a dense projection is
            always full.
        reason: why ``"auto"`` chose this kind, with its figures; empty where there was no choice.
    """

    kind: CacheKind
    layers: tuple[LayerLayout, ...]
    page_size: int
    dtype: str
    reason: str = ""

    @property
    def bytes_per_token(self) -> int:
        """Bytes a cached token takes in all layers, padding of latents included."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return sum(layer.elements_per_token for layer in self.layers) * itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers."""
        return self.bytes_per_token * self.page_size

    @property
    def rebuilt_bytes_per_token(self) -> int:
        """Bytes of temporaries that decode takes for a token whose keys are rebuilt, in one layer
        at a time: what is rebuilt, and attention's gathering of it by rows of a table that is half
        used. 0 where no keys are latent."""
        itemsize = jnp.dtype(self.dtype).itemsize
        sizes = [
            layer.rebuilt_bytes(itemsize)
            + 2 * (2 * layer.kv_heads * layer.head_dim + layer.latent_width) * itemsize
            for layer in self.layers
            if layer.keys is not None
        ]
        return max(sizes, default=0)

    @property
    def rebuilt_bytes_per_page(self) -> int:
        """The same for a page."""
        return self.rebuilt_bytes_per_token * self.page_size

    @property
    def compacts(self) -> bool:
        """Whether decode copies live pages to a buffer and rebuilds keys from it, in any layer."""
        return any(layer.keys is not None for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        """Whether any layer caches latents."""
        return any(layer.segments for layer in self.layers)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    def pool_bytes(self, num_pages: int) -> int:
        """Device bytes of all pools."""
        return num_pages * self.bytes_per_page


def default_page_size(platform: str) -> int:
    """S where the caller names none: 64 tokens on a GPU, 16 elsewhere."""
    return 64 if platform == "gpu" else 16


def layout_of(
    config: ModelConfig,
    kind: CacheKind,
    page_size: int,
    dtype: str,
    strategy: Strategy | None = None,
) -> CacheLayout:
    """The layout of one kind for a model, on one of the strategy's devices: what the kind makes
    latent is so wherever the projection is decomposed, and full elsewhere."""
    strategy = strategy or Single()
    kv_heads = strategy.heads(config).kv.width // config.head_dim
    layers = []
    for index in range(config.num_layers):
        pieces = {
            short: config.low_rank.get(f"model.layers.{index}.self_attn.{short}_proj")
            for short in ("k", "v")
        }
        if kind != "latent":
            pieces["k"] = None
        if kind == "full":
            pieces["v"] = None
        segments = _segments(pieces, strategy)
        layers.append(
            LayerLayout(
                kv_heads=kv_heads,
                head_dim=config.head_dim,
                keys=segments.get("k"),
                values=segments.get("v"),
            )
        )
    return CacheLayout(kind=kind, layers=tuple(layers), page_size=page_size, dtype=dtype)


def _segments(pieces: dict[str, Slice | None], strategy: Strategy) -> dict[str, Segment]:
    """A segment a distinct slice, named after its readers: c_k and c_v, or c_kv."""
    readers: dict[Slice, list[str]] = {}
    for short, piece in pieces.items():
        if piece is not None:
            readers.setdefault(piece, []).append(short)
    found: dict[str, Segment] = {}
    offset = 0
    for piece, shorts in readers.items():
        rank = strategy.latent_rank(piece.rank)
        segment = Segment(name=f"c_{''.join(shorts)}", offset=offset, rank=rank)
        found |= dict.fromkeys(shorts, segment)
        offset += segment.width
    return found
