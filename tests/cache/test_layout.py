"""Shapes and bytes of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax import ModelConfig
from deinfer_jax.cache.layout import PAGE_SIZES, FullLayout, choose_layout, default_page_size

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
)


def test_pool_shape_has_exactly_the_pages() -> None:
    assert FullLayout(kv_heads=3, head_dim=10).pool_shape(7, 16) == (7, 2, 3, 16, 10)


def test_elements_per_token() -> None:
    assert FullLayout(kv_heads=3, head_dim=10).elements_per_token == 60


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_per_token(dtype: str, size: int) -> None:
    assert choose_layout(CONFIG, "full", 16, dtype).bytes_per_token == 3 * 2 * 2 * 10 * size


def test_bytes_per_page() -> None:
    assert choose_layout(CONFIG, "full", 32, "float32").bytes_per_page == 32 * 480


def test_pool_bytes_are_those_of_the_arrays() -> None:
    layout = choose_layout(CONFIG, "full", 16, "float32")
    pools = [np.zeros(layer.pool_shape(5, 16), np.float32) for layer in layout.layers]
    assert layout.pool_bytes(5) == sum(pool.nbytes for pool in pools) == 5 * layout.bytes_per_page


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_pages_for(tokens: int, pages: int) -> None:
    assert choose_layout(CONFIG, "full", 16, "float32").pages_for(tokens) == pages


@pytest.mark.parametrize("kind", ["auto", "full"])
def test_kinds_of_a_dense_model(kind: str) -> None:
    layout = choose_layout(CONFIG, kind, 16, "float32")
    assert layout.kind == "full"
    assert layout.layers == (FullLayout(kv_heads=2, head_dim=10),) * 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(page_size: int) -> None:
    assert choose_layout(CONFIG, "full", page_size, "float32").page_size == page_size


def test_layout_is_hashable() -> None:
    layouts = [choose_layout(CONFIG, "full", 16, "float32") for _ in range(2)]
    assert hash(layouts[0]) == hash(layouts[1])


@pytest.mark.parametrize("page_size", [0, 1, 8, 17, 256, -16])
def test_bad_page_size(page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"page_size.*16, 32, 64, 128.*got {page_size}"):
        choose_layout(CONFIG, "full", page_size, "float32")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kv_cache.*'full', 'latent'.*got 'paged'"):
        choose_layout(CONFIG, "paged", 16, "float32")


@pytest.mark.parametrize("kind", ["latent", "full+latent"])
def test_kinds_that_need_latents(kind: str) -> None:
    with pytest.raises(ValueError, match="kv_cache.*" + kind.replace("+", r"\+")):
        choose_layout(CONFIG, kind, 16, "float32")


@pytest.mark.parametrize(("platform", "size"), [("gpu", 64), ("cpu", 16)])
def test_default_page_size(platform: str, size: int) -> None:
    assert default_page_size(platform) == size
