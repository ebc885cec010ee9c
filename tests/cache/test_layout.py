"""Shapes and bytes of the cache, full and latent."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax import LowRank, ModelConfig, Slice
from deinfer_jax.cache.choice import choose_layout
from deinfer_jax.cache.layout import (
    PAGE_SIZES,
    CacheLayout,
    LayerLayout,
    Segment,
    default_page_size,
)

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
)


def low_rank(*layers: dict[str, tuple[str, int, int]]) -> ModelConfig:
    """A layer for each mapping from q, k, v to (v's name, offset, rank)."""
    slices = [
        (f"model.layers.{index}.self_attn.{short}_proj", Slice(v=f"{index}{v}", offset=at, rank=r))
        for index, pieces in enumerate(layers)
        for short, (v, at, r) in pieces.items()
    ]
    return CONFIG.replace(num_layers=len(layers), low_rank=LowRank(tuple(slices)))


SEPARATE = low_rank({"q": ("q", 0, 5), "k": ("k", 0, 65), "v": ("v", 0, 64)})
SHARED = low_rank({"q": ("q", 0, 5), "k": ("kv", 0, 7), "v": ("kv", 0, 7)})
ONLY_V = low_rank({"v": ("v", 0, 1)})
ONLY_K = low_rank({"k": ("k", 0, 130)})
FULL = LayerLayout(kv_heads=2, head_dim=10)


def layout(config: ModelConfig, kind: str, page_size: int = 16) -> CacheLayout:
    return choose_layout(config, kind, page_size, "float32")


class TestFull:
    def test_pool_shape_has_exactly_the_pages(self) -> None:
        assert LayerLayout(kv_heads=3, head_dim=10).full_shape(7, 16) == (7, 2, 3, 16, 10)

    def test_there_is_no_latent_pool(self) -> None:
        assert LayerLayout(kv_heads=3, head_dim=10).latent_shape(7, 16) is None

    def test_elements_per_token(self) -> None:
        assert LayerLayout(kv_heads=3, head_dim=10).elements_per_token == 60

    @pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
    def test_bytes_per_token(self, dtype: str, size: int) -> None:
        assert choose_layout(CONFIG, "full", 16, dtype).bytes_per_token == 3 * 2 * 2 * 10 * size

    def test_bytes_per_page(self) -> None:
        assert layout(CONFIG, "full", 32).bytes_per_page == 32 * 480

    @pytest.mark.parametrize("kind", ["auto", "full"])
    def test_kinds_of_a_dense_model(self, kind: str) -> None:
        found = layout(CONFIG, kind)
        assert found.kind == "full" and found.layers == (FULL,) * 3
        assert found.reason == ""  # there was nothing to choose

    def test_a_decomposed_model_may_cache_in_full(self) -> None:
        assert layout(SEPARATE, "full").layers == (FULL,)

    def test_nothing_is_rebuilt(self) -> None:
        found = layout(SEPARATE, "full")
        assert not found.compacts and not found.has_latents


class TestSegments:
    @pytest.mark.parametrize(
        ("rank", "width"), [(1, 64), (63, 64), (64, 64), (65, 128), (2457, 2496)]
    )
    def test_width_is_a_multiple_of_64(self, rank: int, width: int) -> None:
        assert Segment(name="c_k", offset=0, rank=rank).width == width

    def test_separate_latents_lie_side_by_side(self) -> None:
        (layer,) = layout(SEPARATE, "latent").layers
        assert layer.keys == Segment(name="c_k", offset=0, rank=72)  # of 65
        assert layer.values == Segment(name="c_v", offset=128, rank=64)
        assert layer.segments == (layer.keys, layer.values)

    def test_a_shared_latent_is_one_segment(self) -> None:
        (layer,) = layout(SHARED, "latent").layers
        assert layer.keys == layer.values == Segment(name="c_kv", offset=0, rank=8)  # of 7
        assert layer.segments == (layer.keys,)

    def test_two_slices_of_one_factor_are_two_segments(self) -> None:
        config = low_rank({"k": ("kv", 0, 7), "v": ("kv", 7, 5)})
        (layer,) = layout(config, "latent").layers
        assert [segment.offset for segment in layer.segments] == [0, 64]


class TestLatent:
    def test_pools(self) -> None:
        (layer,) = layout(SEPARATE, "latent").layers
        assert layer.full_shape(5, 16) is None
        assert layer.latent_shape(5, 16) == (5, 16, 128 + 64)

    def test_padding_counts(self) -> None:
        assert layout(SHARED, "latent").bytes_per_token == 64 * 4

    @pytest.mark.parametrize(("config", "full_parts"), [(ONLY_V, 1), (ONLY_K, 1), (SEPARATE, 0)])
    def test_a_dense_projection_is_full(self, config: ModelConfig, full_parts: int) -> None:
        (layer,) = layout(config, "latent").layers
        assert layer.full_parts == full_parts
        assert layer.elements_per_token == full_parts * 20 + layer.latent_width

    def test_layers_may_differ(self) -> None:
        config = low_rank({"k": ("k", 0, 3), "v": ("v", 0, 70)}, {}, {"v": ("v", 0, 2)})
        found = layout(config, "latent")
        assert [layer.elements_per_token for layer in found.layers] == [64 + 128, 40, 20 + 64]
        assert found.bytes_per_token == 4 * (192 + 40 + 84)

    @pytest.mark.parametrize(
        ("config", "compacts"), [(SEPARATE, True), (ONLY_K, True), (ONLY_V, False)]
    )
    def test_latent_keys_are_compacted(self, config: ModelConfig, compacts: bool) -> None:
        assert layout(config, "latent").compacts == compacts

    @pytest.mark.parametrize(("rank", "absorbs"), [(64, False), (1, False)])
    def test_wide_latents_beside_latent_keys_are_rebuilt(self, rank: int, absorbs: bool) -> None:
        # 64 columns, and K·H is 20.
        (layer,) = layout(low_rank({"k": ("k", 0, 1), "v": ("v", 0, rank)}), "latent").layers
        assert layer.absorbs_values == absorbs

    def test_narrow_latents_beside_latent_keys_are_absorbed(self) -> None:
        config = SEPARATE.replace(num_kv_heads=6)
        assert layout(config, "latent").layers[0].absorbs_values


class TestFullLatent:
    def test_keys_are_full_and_values_latent(self) -> None:
        (layer,) = layout(SEPARATE, "full+latent").layers
        assert layer.keys is None and layer.values == Segment(name="c_v", offset=0, rank=64)
        assert layer.full_shape(5, 16) == (5, 1, 2, 16, 10)
        assert layer.latent_shape(5, 16) == (5, 16, 64)

    def test_nothing_is_compacted(self) -> None:
        found = layout(SEPARATE, "full+latent")
        assert not found.compacts and found.layers[0].absorbs_values

    def test_a_shared_latent(self) -> None:
        assert layout(SHARED, "full+latent").bytes_per_token == 4 * (20 + 64)


@pytest.mark.parametrize("kind", ["full", "latent", "full+latent"])
@pytest.mark.parametrize("config", [SEPARATE, SHARED, ONLY_V], ids=["separate", "shared", "v"])
def test_pool_bytes_are_those_of_the_arrays(config: ModelConfig, kind: str) -> None:
    found = layout(config, kind)
    shapes = [
        shape
        for layer in found.layers
        for shape in (layer.full_shape(5, 16), layer.latent_shape(5, 16))
        if shape is not None
    ]
    size = sum(np.zeros(shape, np.float32).nbytes for shape in shapes)
    assert found.pool_bytes(5) == size == 5 * found.bytes_per_page


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_pages_for(tokens: int, pages: int) -> None:
    assert layout(CONFIG, "full").pages_for(tokens) == pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(page_size: int) -> None:
    assert layout(CONFIG, "full", page_size).page_size == page_size


def test_layout_is_hashable() -> None:
    layouts = [layout(SEPARATE, "latent") for _ in range(2)]
    assert hash(layouts[0]) == hash(layouts[1])


@pytest.mark.parametrize("page_size", [0, 1, 8, 17, 256, -16])
def test_bad_page_size(page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"page_size.*16, 32, 64, 128.*got {page_size}"):
        layout(CONFIG, "full", page_size)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kv_cache.*'full', 'latent'.*got 'paged'"):
        layout(CONFIG, "paged")


@pytest.mark.parametrize("kind", ["latent", "full+latent"])
def test_kinds_that_need_latents(kind: str) -> None:
    with pytest.raises(ValueError, match="kv_cache.*got one where it is dense in every layer"):
        layout(CONFIG, kind)


def test_full_and_latent_needs_latent_values() -> None:
    with pytest.raises(ValueError, match="a decomposed v_proj for 'full\\+latent'"):
        layout(ONLY_K, "full+latent")


@pytest.mark.parametrize(("platform", "size"), [("gpu", 64), ("cpu", 16)])
def test_default_page_size(platform: str, size: int) -> None:
    assert default_page_size(platform) == size
