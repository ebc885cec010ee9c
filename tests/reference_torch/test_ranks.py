"""Several ranks against transformers, and what their collectives move."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from reference_torch.ranks import launch
from tests.reference_torch.cases import Case, Values, run_all
from tests.reference_torch.conftest import Expected, difference, make

# Ranks that divide neither the 9 query heads nor R nor W; and enough that kv heads have copies.
RANKS = (2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (3, 4)))
MODELS = {
    "nine-three-heads": ("shared-kv", "dense-k-o-down"),
    "qwen3-biases": ("separate", "shared"),
    "mqa": ("shared", "dense-q-up"),
}
CASES = [Case(s, c) for s in ("low_rank", "naive", "dense") for c in ("full", "latent")]
CLOSE = 3e-6


class Run(NamedTuple):
    expected: dict[str, Expected]
    values: dict[tuple[str, Case], Values]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def done(ranks: int, tmp_path_factory) -> Run:
    """All models and cases, in one group."""
    folder: Path = tmp_path_factory.mktemp("models")
    expected = {name: make(name, layouts, folder / name) for name, layouts in MODELS.items()}
    some = next(iter(expected.values()))
    keys = [(name, case) for name in MODELS for case in CASES]
    jobs = [(expected[name].path, case) for name, case in keys]
    found = launch(run_all, ranks, jobs, some.prompts, some.forced)
    return Run(expected, dict(zip(keys, found, strict=True)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.kv_cache}")
@pytest.mark.parametrize("model", MODELS)
def test_values(done: Run, model: str, case: Case) -> None:
    assert difference(done.expected[model], done.values[model, case]) < CLOSE


# What a layer of the first model moves a token: D 54, N·H 144, K·H 48, F 80. Its first layer has
# ranks 3 (q), 11 (k and v), 19 (o), 27 (gate and up), 35 (down); its second 43 (q and v), dense k,
# 8 (gate), 16 (up), dense o and down. Beside them an embedding (D) and the logits (W 160).
def padded(width: int, ranks: int) -> int:
    return -(-width // ranks) * ranks


class TestElements:
    """A decoded token's, with the full cache."""

    def moved(self, done: Run, strategy: str) -> dict[str, float]:
        values = done.values["nine-three-heads", Case(strategy, "full")]
        tokens = done.expected["nine-three-heads"].forced.size
        return {name: count / tokens for name, count in values.moved.items()}

    def test_dense_reduces_the_residual_twice_a_layer(self, done: Run, ranks: int) -> None:
        assert self.moved(done, "dense") == {
            "all_reduce": 54 + 2 * 2 * 54,
            "all_gather": padded(160, ranks),
        }

    def test_naive_reduces_every_output(self, done: Run, ranks: int) -> None:
        layer = 144 + 48 + 48 + 54 + 80 + 80 + 54
        assert self.moved(done, "naive") == {
            "all_reduce": 54 + 2 * layer,
            "all_gather": padded(160, ranks),
        }

    def test_low_rank_moves_latents(self, done: Run, ranks: int) -> None:
        gathered = (3 + 11, 27, 43, 8 + 16)
        assert self.moved(done, "low_rank") == {
            "all_reduce": 54 + 19 + 35 + 54 + 54,
            "all_gather": sum(padded(width, ranks) for width in gathered) + padded(160, ranks),
        }

    @pytest.mark.parametrize(("strategy", "count"), [("dense", 2), ("naive", 7), ("low_rank", 4)])
    def test_collectives_a_layer(self, done: Run, strategy: str, count: int) -> None:
        # Something of every block of this model is decomposed.
        calls = done.values["mqa", Case(strategy, "full")].calls
        steps = len(done.expected["mqa"].forced)
        assert sum(calls.values()) == steps * (2 * count + 2)  # embedding and logits

    def test_naive_rebuilds_whole_contexts(self, done: Run) -> None:
        full, latent = (
            done.values["nine-three-heads", Case("naive", kind)].moved["all_reduce"]
            for kind in ("full", "latent")
        )
        assert latent > 5 * full
