"""Several simulated devices give the single device's tokens, under every strategy and cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.engine import arrangement
from tests import tiny

pytest.importorskip("torch", reason="tiny models are made by transformers")

STRATEGIES = ("dense", "naive", "low_rank", "sharded")
KINDS = ("full", "latent", "full+latent")
# Biases, dense linears in front of, beside and behind decomposed ones, q/k norms, several v's and
# shared ones, 6 query heads on 2 kv heads, 9 on 3, ranks from 3 on.
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("biases", ("separate", "dense-q-up", "shared-kv"), {}),
    "qwen3": ("qwen3-biases", ("shared", "dense-k-o-down"), {}),
    "9 on 3 heads": ("nine-three-heads", ("shared-kv", "only-o"), {"hidden_size": 72}),
}
DEVICES = (2, 3, 4, 8)
# One program of each kind: three prompts in two rows, one of which is idle at the end.
SIZES: dict[str, Any] = dict(max_context=48, max_batch=2, prefill_chunk=32, page_size=16)
PROMPTS = [tiny.random_tokens(count, seed=count).tolist() for count in (5, 17, 30)]

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    dict(temperature=1.2, seed=5),
    dict(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=6),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (variant, layouts, changes) in MODELS.items():
        folder = tmp_path_factory.mktemp("models")
        dense = tiny.make(variant, folder / "dense", num_hidden_layers=len(layouts), **changes)
        tiny.decompose(dense, folder / "dense", folder / "low-rank", tiny.groups(*layouts))
        found[name] = folder / "low-rank"
    return found


def tokens(path: Path, **options: Any) -> list[list[int]]:
    """Greedy, plainly sampled and filtered continuations of the prompts."""
    with deinfer_jax.load(path, **SIZES, **options) as llm:
        done = [
            deinfer_jax.generate(llm, PROMPTS, max_new_tokens=12, ignore_eos=True, **sampling)
            for sampling in SAMPLINGS
        ]
    return [one.token_ids for one in itertools.chain(*done)]


@cache
def alone(path: Path) -> list[list[int]]:
    return tokens(path)


def cover() -> Iterator[tuple[str, int, str, str]]:
    """Every pair of a model, a number of devices, a strategy and a cache."""
    for (row, devices), (column, strategy) in itertools.product(
        enumerate(DEVICES), enumerate(STRATEGIES)
    ):
        kind = "full" if strategy == "dense" else KINDS[(2 * row + column) % 3]
        yield list(MODELS)[(row + column) % 3], devices, strategy, kind


def every() -> Iterator[tuple[str, int, str, str]]:
    seen = set(cover())
    for case in itertools.product(MODELS, (1, *DEVICES), STRATEGIES, KINDS):
        _, devices, strategy, kind = case
        latents = strategy != "dense"  # multiplied out, there are none
        same = devices == 1 and strategy in ("naive", "sharded")  # as low_rank, there
        if case not in seen and not same and (latents or kind == "full"):
            yield case


def test_the_cover_has_every_pair() -> None:
    few, rest = (
        {pair for case in cases if case[1] > 1 for pair in itertools.combinations(case, 2)}
        for cases in (cover(), every())
    )
    assert rest <= few


def check(models: dict[str, Path], model: str, devices: int, strategy: str, kind: str) -> None:
    path = models[model]
    found = tokens(path, strategy=strategy, tensor_parallel=devices, kv_cache=kind)
    assert found == alone(path)


@pytest.mark.parametrize(("model", "devices", "strategy", "kind"), list(cover()))
def test_tokens_are_the_single_devices(
    models: dict[str, Path], model: str, devices: int, strategy: str, kind: str
) -> None:
    check(models, model, devices, strategy, kind)


@pytest.mark.full
@pytest.mark.parametrize(("model", "devices", "strategy", "kind"), list(every()))
def test_tokens_of_every_combination(
    models: dict[str, Path], model: str, devices: int, strategy: str, kind: str
) -> None:
    check(models, model, devices, strategy, kind)


def test_one_kv_head_and_ranks_smaller_than_the_devices(tmp_path: Path) -> None:
    dense = tiny.make("mqa", tmp_path / "dense")
    groups = tiny.groups("separate", "shared", rank=2)
    theirs = tiny.decompose(dense, tmp_path / "dense", tmp_path / "m", groups)
    sequence = tiny.random_tokens(30)
    expected = tiny.torch_logits(theirs, sequence)
    for strategy in ("naive", "low_rank", "sharded"):
        with deinfer_jax.load(
            tmp_path / "m", strategy=strategy, tensor_parallel=8, kv_cache="latent", **SIZES
        ) as llm:
            assert np.abs(llm.logits(sequence) - expected).max() <= 3e-6 * np.ptp(expected)


def test_scores_and_logprobs(models: dict[str, Path]) -> None:
    results = []
    for strategy, devices in (("auto", 1), ("sharded", 3)):
        with deinfer_jax.load(
            models["llama"], strategy=strategy, tensor_parallel=devices, **SIZES
        ) as llm:
            scores, greedy = llm.score_with_greedy(PROMPTS[2])
            (done,) = deinfer_jax.generate(
                llm, PROMPTS[1], max_new_tokens=6, ignore_eos=True, logprobs=3
            )
        assert done.logprobs is not None
        results.append((scores, greedy, done.logprobs))
    (scores, greedy, logprobs), (split_scores, split_greedy, split_logprobs) = results
    np.testing.assert_allclose(split_scores, scores, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(split_greedy, greedy)
    for ours, theirs in zip(split_logprobs, logprobs, strict=True):
        assert ours.token_id == theirs.token_id and [w for w, _ in ours.best] == [
            w for w, _ in theirs.best
        ]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(models: dict[str, Path], dtype: str) -> None:
    """As close as one device is, whose own rounding differs."""
    sequence = tiny.random_tokens(30)

    def logits(**options: Any) -> np.ndarray:
        with deinfer_jax.load(models["llama"], **SIZES, **options) as llm:
            return llm.logits(sequence)

    exact = logits(dtype="float32")
    own = np.abs(logits(dtype=dtype) - exact).max()
    for strategy in ("low_rank", "sharded"):
        split = np.abs(logits(dtype=dtype, strategy=strategy, tensor_parallel=4) - exact).max()
        assert 0 < split < 2 * own


def test_random_weights_are_the_same_however_they_are_split(models: dict[str, Path]) -> None:
    config = open_checkpoint(models["qwen3"]).config
    sequence = tiny.random_tokens(20)
    found = []
    for strategy, devices in (("auto", 1), ("naive", 4), ("low_rank", 4), ("sharded", 4)):
        with deinfer_jax.load(
            config, seed=7, strategy=strategy, tensor_parallel=devices, **SIZES
        ) as llm:
            found.append(llm.logits(sequence))
    for split in found[1:]:
        assert np.abs(split - found[0]).max() <= 3e-6 * np.ptp(found[0])


def test_memory_is_a_devices(models: dict[str, Path]) -> None:
    """What is split takes a p-th; only under naive does every device cache all heads."""
    plans = {}
    for strategy, devices in (("sharded", 1), ("sharded", 2), ("naive", 2)):
        with deinfer_jax.load(
            models["llama"],
            strategy=strategy,
            tensor_parallel=devices,
            kv_cache="full",
            cache_bytes=10**6,
            **SIZES,
        ) as llm:
            plans[strategy, devices] = llm.memory_plan(), llm.cache_layout.bytes_per_token
    single, sharded, naive = plans.values()
    # Norms of the final residual stay whole, and v has rows for Σx²: 16 beside some 50 here.
    assert 0.5 < sharded[0].weights / single[0].weights < 0.53
    assert sharded[1] == single[1] / 2 and naive[1] == single[1]


def test_a_mesh_of_the_callers(models: dict[str, Path]) -> None:
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[3:5])  # Explicit axes, the default
    with deinfer_jax.load(models["llama"], tensor_parallel=mesh, **SIZES) as llm:
        held = {d for array in jax.tree.leaves(llm.runner.weights) for d in array.devices()}
        assert held == set(jax.devices()[3:5])
        assert len(deinfer_jax.generate(llm, PROMPTS[0], max_new_tokens=2)[0].token_ids) == 2


class TestRefused:
    def test_a_mesh_without_the_axis(self, models: dict[str, Path]) -> None:
        mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
        with pytest.raises(ValueError, match=r"single axis 'tp', got axes \('x',\)"):
            deinfer_jax.load(models["llama"], tensor_parallel=mesh)

    def test_a_mesh_with_more_axes(self, models: dict[str, Path]) -> None:
        mesh = jax.make_mesh((2, 2), ("tp", "x"), devices=jax.devices()[:4])
        with pytest.raises(ValueError, match=r"single axis 'tp', got axes \('tp', 'x'\)"):
            deinfer_jax.load(models["llama"], tensor_parallel=mesh)

    def test_more_devices_than_there_are(self, models: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match="at most 8, the cpu devices that there are, got 16"):
            deinfer_jax.load(models["llama"], tensor_parallel=16)

    def test_a_width_that_does_not_divide(self, models: dict[str, Path]) -> None:
        message = r"divides its width 48 \(1, 2, 3, 4, 6, 8, 12, 16, 24, 48\), got 5"
        with pytest.raises(ValueError, match=message):
            deinfer_jax.load(models["llama"], strategy="sharded", tensor_parallel=5)

    def test_an_unknown_strategy(self, models: dict[str, Path]) -> None:
        names = "'auto' or one of 'dense', 'naive', 'low_rank', 'sharded'"
        with pytest.raises(ValueError, match=f"strategy: expected {names}.*, got 'ring'"):
            deinfer_jax.load(models["llama"], strategy="ring", tensor_parallel=2)


def test_a_dense_model_under_a_low_rank_strategy(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    dense = models["llama"].parent / "dense"
    with caplog.at_level(logging.INFO, "deinfer_jax"):
        found = tokens(dense, strategy="low_rank", tensor_parallel=2)
    assert found == tokens(dense)
    assert "strategy low_rank: no linear is decomposed; linears are split as under dense\n" in (
        caplog.text
    )


def test_padded_heads_are_logged(models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deinfer_jax"):
        deinfer_jax.load(
            models["9 on 3 heads"], strategy="low_rank", tensor_parallel=8, **SIZES
        ).close()
    assert "8 devices compute 16 query and 8 kv heads, copies and zeros included, of 9 and 3" in (
        caplog.text
    )


def test_multiplying_out_is_logged(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "deinfer_jax"):
        deinfer_jax.load(models["llama"], strategy="dense", **SIZES).close()
    assert "strategy dense: the factors of 19 linears are multiplied out" in caplog.text


def test_auto_is_the_planners_choice(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(config: Any, **options: Any) -> tuple[str, str]:
        asked.append(options)
        return "naive", "because"

    monkeypatch.setattr(arrangement, "choose", choose)
    with deinfer_jax.load(models["llama"], tensor_parallel=4, **SIZES) as llm:
        assert llm.strategy.name == "naive" and llm.strategy.devices == 4
    (options,) = asked
    wanted = dict(devices=4, batch=2, context=48, kv_cache="auto", dtype="float32", device="cpu")
    assert wanted.items() <= options.items()


def test_windows_shared_prefixes_and_a_cache_that_is_too_small(tmp_path: Path) -> None:
    """The scheduler's part of it: requests wait, share pages, give theirs up and run again."""
    dense = tiny.make("qwen2-windows", tmp_path / "dense")
    tiny.decompose(dense, tmp_path / "dense", tmp_path / "m", tiny.groups("shared-kv", "separate"))
    beginning = tiny.random_tokens(20, seed=9).tolist()
    prompts = [beginning + tiny.random_tokens(n, seed=n).tolist() for n in (1, 4, 7, 2)]
    found = []
    for strategy, devices in (("auto", 1), ("sharded", 3)):
        with deinfer_jax.load(
            tmp_path / "m",
            strategy=strategy,
            tensor_parallel=devices,
            kv_cache="latent",
            max_context=64,
            max_batch=4,
            prefill_chunk=16,
            page_size=16,
            cache_bytes=8 * 16 * 1000,
        ) as llm:
            done = deinfer_jax.generate(llm, prompts, max_new_tokens=30, ignore_eos=True)
            found.append([one.token_ids for one in done])
            assert llm.runner.num_pages < 4 * 4
    assert found[1] == found[0]
