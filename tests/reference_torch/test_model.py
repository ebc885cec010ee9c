"""One rank against transformers: prefill in chunks, decode through the pages, every cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reference_torch.group import Group
from tests import tiny
from tests.reference_torch.cases import Case, run
from tests.reference_torch.conftest import Expected, difference, make

STRATEGIES = ("low_rank", "naive", "dense")
CACHES = ("full", "latent", "full+latent")
CLOSE = 3e-6  # of the norm; 8e-7 was the most seen


def check(expected: Expected, strategies: tuple[str, ...] = STRATEGIES) -> None:
    for strategy in strategies:
        for kv_cache in CACHES:
            case = Case(strategy, kv_cache)
            values = run(Group(), expected.path, case, expected.prompts, expected.forced)
            assert difference(expected, values) < CLOSE, case
            assert not values.moved


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_decomposed_variants(variant: str, tmp_path: Path) -> None:
    check(make(variant, ("shared-kv", "separate"), tmp_path), ("low_rank",))


@pytest.mark.full
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_decomposed_variants_with_the_other_strategies(variant: str, tmp_path: Path) -> None:
    check(make(variant, ("shared-kv", "separate"), tmp_path), ("naive", "dense"))


@pytest.mark.parametrize(
    "layouts", [("shared", "only-o"), ("dense-q-up", "dense-k-o-down")], ids=str
)
@pytest.mark.parametrize("variant", ["nine-three-heads", "biases", "qwen3"])
def test_mixtures_of_dense_and_decomposed(
    variant: str, layouts: tuple[str, str], tmp_path: Path
) -> None:
    check(make(variant, layouts, tmp_path))


@pytest.mark.parametrize("variant", ["gqa", "qwen2", "mistral-window", "tied"])
def test_dense_models(variant: str, tmp_path: Path) -> None:
    check(make(variant, None, tmp_path))


def test_float64(tmp_path: Path) -> None:
    expected = make("gqa", ("separate", "shared"), tmp_path)

    def decode(strategy: str, kv_cache: str, dtype: str = "float64") -> np.ndarray:
        case = Case(strategy, kv_cache, dtype)
        return run(Group(), expected.path, case, expected.prompts, expected.forced).decode

    exact = decode("low_rank", "full")
    assert exact.dtype == np.float64
    for strategy in STRATEGIES:
        for kv_cache in CACHES:
            assert np.abs(decode(strategy, kv_cache) - exact).max() < 1e-12 * np.ptp(exact)
    rounded = np.abs(decode("low_rank", "full", "float32") - exact).max() / np.ptp(exact)
    assert 1e-9 < rounded < CLOSE
