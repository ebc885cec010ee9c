"""Predictions against times that were measured."""

from __future__ import annotations

import itertools
import math

import pytest

from bench import measured
from bench.measured import DESIGN, SITUATIONS, Cells, Situation
from deinfer_jax import plan
from deinfer_jax.planner import DEVICES, LINKS, Plan

H200 = DEVICES["h200"]
OURS = measured.measured()


def predicted(link: str, strategy: str, situation: Situation) -> float:
    one = measured.predictor(strategy, device=H200, link=LINKS[link])
    return 1e3 * one.layers_seconds(
        batch=situation.batch, context=situation.context, prompt=situation.prompt
    )


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
@pytest.mark.parametrize("link", DESIGN)
class TestTwoGpus:
    @pytest.mark.parametrize("strategy", DESIGN["nvlink"])
    @pytest.mark.parametrize(
        ("table", "tolerance"), [(OURS, 0.1), (measured.designed(), 0.25)], ids=["ours", "design"]
    )
    def test_time(
        self, link: str, strategy: str, situation: Situation, table: Cells, tolerance: float
    ) -> None:
        true = table[link, strategy, situation.name]
        assert predicted(link, strategy, situation) == pytest.approx(true, rel=tolerance)

    def test_ranking(self, link: str, situation: Situation) -> None:
        for fast, slow in itertools.permutations(DESIGN[link], 2):
            times = [OURS[link, strategy, situation.name] for strategy in (fast, slow)]
            if times[1] > 1.1 * times[0]:
                assert predicted(link, fast, situation) < predicted(link, slow, situation)


def stack(link: str, situation: Situation) -> Plan:
    """A plan for layers without a head to speak of."""
    config = measured.MEASURED_70B.replace(vocab_size=2)
    return plan(
        config,
        devices=2,
        link=link,
        batch=situation.batch,
        context=situation.context,
        kv_cache="full",
    )


class TestChoice:
    @pytest.mark.parametrize(("link", "strategy"), [("nvlink", "sharded"), ("pcie", "low_rank")])
    def test_large_batch(self, link: str, strategy: str) -> None:
        found = stack(link, SITUATIONS[2])
        assert found.choice is not None and found.choice.strategy == strategy
        assert not found.dense_is_faster
        assert "is predicted slower" in found.reason

    @pytest.mark.parametrize(("link", "strategy"), [("nvlink", "sharded"), ("pcie", "low_rank")])
    def test_prompts(self, link: str, strategy: str) -> None:
        times = {name: predicted(link, name, SITUATIONS[3]) for name in DESIGN[link]}
        assert min(times, key=lambda name: times[name]) == strategy
        config = measured.MEASURED_70B.replace(vocab_size=2)
        found = plan(
            config, devices=2, link=link, batch=1, context=4096, objective="prompt", kv_cache="full"
        )
        assert found.choice is not None and found.choice.strategy == strategy

    @pytest.mark.parametrize("situation", SITUATIONS[:2], ids=lambda s: s.name)
    def test_small_batches_with_a_fast_link(self, situation: Situation) -> None:
        # The design had dense first here, by 19 and 4 %. Now sharded is, by 10 % at 1, and as fast
        # at 64.
        found = stack("nvlink", situation)
        times = {
            strategy: OURS["nvlink", strategy, situation.name] for strategy in DESIGN["nvlink"]
        }
        assert times["sharded"] < 1.005 * times["dense"]
        assert not found.dense_is_faster
        assert found.choice is not None
        assert times[found.choice.strategy] < 1.04 * min(times.values())


class TestOneGpu:
    @pytest.mark.parametrize("kind", measured.PRODUCTS_8B)
    def test_products(self, kind: str) -> None:
        # A single row takes other kernels, which depend on more than bytes.
        for rows, true in measured.PRODUCTS_8B[kind].items():
            tolerance = 0.3 if rows == 1 else 0.2
            seconds = measured.product_seconds(kind, rows, H200)
            assert 1e6 * seconds == pytest.approx(true, rel=tolerance)

    def test_steps(self) -> None:
        for (batch, context), true in measured.STEPS_8B.items():
            seconds = measured.step_seconds(batch, context, H200)
            assert 1e3 * seconds == pytest.approx(true, rel=0.2)

    def test_step_with_values_absorbed(self) -> None:
        # Not in the fit.
        seconds = measured.step_seconds(64, 512, H200, "latent")
        assert 1e3 * seconds == pytest.approx(3.61, rel=0.25)


def test_parameters_are_physical() -> None:
    assert all(0 < share <= 1 for share in (H200.read, H200.compute, H200.cache_read))
    assert LINKS["nvlink"].bandwidth < 4.5e11  # NVLink 4, one direction
    assert LINKS["nvlink"].small_latency < LINKS["nvlink"].latency < LINKS["network"].latency
    assert all(math.isfinite(link.bandwidth) for link in LINKS.values())
