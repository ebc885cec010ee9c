"""What a layer's pool holds, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from deinfer_jax.config import ModelConfig

__all__ = [
    "PAGE_SIZES",
    "CacheKind",
    "CacheLayout",
    "FullLayout",
    "choose_layout",
    "default_page_size",
]

PAGE_SIZES = (16, 32, 64, 128)
CacheKind = Literal["auto", "full", "latent", "full+latent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullLayout:
    """K (after RoPE) and V of one layer, pool [P, 2, K, S, H].

    One page of one head is contiguous, [S, H], so that it is one TMA box.
    """

    kv_heads: int
    head_dim: int

    def pool_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of the layer's pool."""
        return (num_pages, 2, self.kv_heads, page_size, self.head_dim)

    @property
    def elements_per_token(self) -> int:
        """Cached numbers a token."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Layouts of all layers, with page size S in tokens and the dtype of the pools."""

    kind: CacheKind
    layers: tuple[FullLayout, ...]
    page_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes a cached token takes in all layers."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return sum(layer.elements_per_token for layer in self.layers) * itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers."""
        return self.bytes_per_token * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    def pool_bytes(self, num_pages: int) -> int:
        """Device bytes of all pools."""
        return num_pages * self.bytes_per_page


def default_page_size(platform: str) -> int:
    """S where the caller names none: 64 tokens on a GPU, 16 elsewhere."""
    return 64 if platform == "gpu" else 16


def choose_layout(config: ModelConfig, kind: str, page_size: int, dtype: str) -> CacheLayout:
    """The layout that ``kv_cache=kind`` means for a model.

    Raises:
        ValueError: the kind or the page size is unknown, or the model has no latents to cache.
    """
    if kind not in ("auto", "full", "latent", "full+latent"):
        raise ValueError(
            f"kv_cache: expected 'auto', 'full', 'latent' or 'full+latent', got {kind!r}"
        )
    if page_size not in PAGE_SIZES or not isinstance(page_size, int):
        raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {page_size}")
    if kind in ("latent", "full+latent"):
        raise ValueError(f"kv_cache: this version caches full keys and values only, got {kind!r}")
    layer = FullLayout(kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return CacheLayout(
        kind="full", layers=(layer,) * config.num_layers, page_size=page_size, dtype=dtype
    )
