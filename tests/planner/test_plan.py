"""``plan`` and ``choose``: what they say, what fits, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.measured import LLAMA_3_8B, LLAMA_3_70B, SEPARATE, low_rank, ranks
from deinfer_jax import ModelConfig, plan
from deinfer_jax.planner import LINKS, Link, Plan, choose

RANKS_70B = ranks(LLAMA_3_70B, SEPARATE, 0.6)
WHOLE_70B = low_rank(LLAMA_3_70B, SEPARATE, RANKS_70B)
KEEP_60 = low_rank(LLAMA_3_70B.replace(num_layers=2), SEPARATE, RANKS_70B)
FEW = low_rank(LLAMA_3_8B.replace(num_layers=2), SEPARATE, ranks(LLAMA_3_8B, SEPARATE, 0.6))


def planned(config: ModelConfig = FEW, **changes: Any) -> Plan:
    options: dict[str, Any] = dict(devices=4, batch=8, context=1024)
    return plan(config, **(options | changes))


def option(found: Plan, strategy: str, kv_cache: str = "full"):
    (one,) = (o for o in found.options if (o.strategy, o.kv_cache) == (strategy, kv_cache))
    return one


class TestOptions:
    def test_every_strategy_and_cache(self) -> None:
        names = [(one.strategy, one.kv_cache) for one in planned().options]
        kinds = ("full", "latent", "full+latent")
        factored = [(name, kind) for name in ("naive", "low_rank", "sharded") for kind in kinds]
        assert names == [("dense", "full"), *factored]

    def test_kinds_that_are_the_same_come_once(self) -> None:
        config = low_rank(LLAMA_3_8B.replace(num_layers=2), (("v",),), 100)
        kinds = [one.kv_cache for one in planned(config).options if one.strategy == "sharded"]
        assert kinds == ["full", "latent"]
        kinds = [one.kv_cache for one in planned(config, kv_cache="full+latent").options]
        assert kinds == ["full+latent"] * 3

    def test_dense_model(self) -> None:
        found = planned(LLAMA_3_8B)
        assert [one.strategy for one in found.options] == ["dense", "naive", "sharded"]
        assert "without factors" in found.excluded["low_rank"]
        assert found.choice is not None and found.choice.strategy == "dense"
        assert found.verdict == ""

    def test_one_device(self) -> None:
        found = planned(devices=1)
        assert {one.strategy for one in found.options} == {"dense", "low_rank"}
        assert "link" not in str(found)

    def test_width_that_does_not_divide(self) -> None:
        found = planned(devices=3)
        assert "4096 is no multiple of 3" in found.excluded["sharded"]
        assert "sharded is left out" in str(found)

    def test_link_of_ones_own(self) -> None:
        slow = planned(link=replace(LINKS["network"], bandwidth=1e9))
        assert option(slow, "naive").decode_ms > option(planned(), "naive").decode_ms


class TestMonotone:
    @pytest.mark.parametrize("link", ["nvlink", "network"])
    @pytest.mark.parametrize("name", ["batch", "context"])
    def test_more_work_takes_longer(self, name: str, link: str) -> None:
        sizes = (1, 2, 64, 1024)
        sizes_by_name: list[dict[str, Any]] = [{name: size} for size in sizes]
        plans = [planned(link=link, **one) for one in sizes_by_name]
        for before, after in zip(plans, plans[1:], strict=False):
            for one, other in zip(before.options, after.options, strict=True):
                assert one.decode_ms <= other.decode_ms
                assert one.memory.cache <= other.memory.cache
                assert one.memory.temporaries <= other.memory.temporaries
                assert one.memory.weights == other.memory.weights

    def test_longer_prompts_take_longer(self) -> None:
        times = [option(planned(prompt=n), "sharded").prompt_ms for n in (1, 100, 1000, 10000)]
        assert times == sorted(times)

    def test_more_devices_hold_less(self) -> None:
        plans = [planned(devices=devices) for devices in (2, 4, 8)]
        for before, after in zip(plans, plans[1:], strict=False):
            for one, other in zip(before.options, after.options, strict=True):
                assert other.memory.weights < one.memory.weights
                assert other.memory.cache <= one.memory.cache

    def test_slower_links_take_longer(self) -> None:
        plans = [planned(link=link, devices=8) for link in ("nvlink", "pcie", "network")]
        for fast, slow in zip(plans, plans[1:], strict=False):
            for one, other in zip(fast.options, slow.options, strict=True):
                assert one.decode_ms < other.decode_ms
                assert one.prompt_ms < other.prompt_ms

    def test_window_bounds_what_is_read(self) -> None:
        windowed = FEW.replace(windows=(64, 64))
        near, far = (option(planned(windowed, context=n), "dense").decode_ms for n in (64, 4096))
        assert near == far


class TestFit:
    def test_70b_on_one_device(self) -> None:
        # 70.55e9 parameters dense, 43.2e9 with factors, in two bytes.
        found = planned(WHOLE_70B, devices=1, batch=1, kv_cache="full")
        dense, factored = option(found, "dense"), option(found, "low_rank")
        assert dense.memory.weights == pytest.approx(141.1e9, rel=0.001)
        assert not dense.fits and "the weights alone are too large" in dense.problem
        assert factored.memory.weights == pytest.approx(86.3e9, rel=0.002)
        assert factored.fits
        assert found.choice is not None and found.choice.strategy == "low_rank"
        assert "Multiplied out (dense) the model does not fit." in found.reason

    def test_cache_that_does_not_fit(self) -> None:
        found = planned(WHOLE_70B, devices=1, batch=256, context=4096, kv_cache="full")
        one = option(found, "low_rank")
        assert not one.fits
        # 1.34 GB a sequence, beside 86 GB of weights in 140 GB.
        assert "room for about 3" in one.problem and "of 256 sequences" in one.problem
        assert one.problem in str(found).replace("\n", " ")

    def test_nothing_fits(self) -> None:
        found = planned(KEEP_60, memory=10**9)
        assert found.choice is None and found.best() is None
        assert "nothing fits on 4 x h200" in found.reason
        assert not found.dense_is_faster
        assert found.to_json()["choice"] is None

    def test_memory_that_is_just_enough(self) -> None:
        needed = option(planned(), "sharded").memory.total
        assert option(planned(memory=needed), "sharded").fits
        assert not option(planned(memory=needed - 1), "sharded").fits

    def test_best_leaves_out_what_does_not_fit(self) -> None:
        limit = option(planned(KEEP_60, devices=8), "dense").memory.total - 1
        found = planned(KEEP_60, devices=8, memory=limit)
        assert found.best(strategies=["dense"]) is None
        best = found.best("prompt", kv_cache="latent")
        assert best is not None and best.kv_cache == "latent"


class TestChoice:
    def test_multiply_out(self) -> None:
        found = planned(KEEP_60, devices=2, link="network", batch=1, multiply_out=True)
        assert found.dense_is_faster
        assert found.choice is not None and found.choice.strategy == "dense"

    def test_choose_agrees_with_plan(self) -> None:
        for link in LINKS:
            options: Any = dict(devices=8, link=link, batch=256, context=512)
            found = plan(KEEP_60, **options)
            strategy, reason = choose(KEEP_60, **options)
            assert found.choice is not None
            assert (strategy, reason) == (found.choice.strategy, found.reason)

    def test_choose_with_a_cache(self) -> None:
        _, reason = choose(KEEP_60, devices=8, batch=4, context=512, kv_cache="latent")
        assert "(latent cache)" in reason and "dense" not in reason

    def test_choose_where_nothing_fits(self) -> None:
        strategy, reason = choose(KEEP_60, devices=8, batch=4, context=512, memory=1000)
        assert strategy == "sharded"
        assert reason.startswith("nothing fits")


class TestText:
    def test_table(self) -> None:
        lines = str(planned()).splitlines()
        assert all(len(line) <= 100 for line in lines)
        (marked,) = (line for line in lines if line.startswith("* "))
        chosen = planned().choice
        assert chosen is not None and marked.split()[1:3] == [chosen.strategy, chosen.kv_cache]
        assert sum(line.startswith("=> ") for line in lines) == 1

    def test_json(self) -> None:
        found = planned()
        data = json.loads(json.dumps(found.to_json()))
        assert len(data["options"]) == len(found.options)
        assert [one["chosen"] for one in data["options"]].count(True) == 1
        first, one = data["options"][0], found.options[0]
        assert first["memory"]["total"] == one.memory.total
        assert first["traffic"]["payload"] == one.traffic.payload
        assert data["link"]["bandwidth"] == LINKS["nvlink"].bandwidth
        assert data["choice"] == {"strategy": found.choice.strategy, "kv_cache": "full"}  # pyright: ignore[reportOptionalMemberAccess]

    def test_notes(self) -> None:
        config = FEW.replace(num_heads=9, num_kv_heads=3)
        text = str(planned(config, devices=8, context=10000))
        assert "made for 8192 tokens, not 10000" in text
        assert "padded from 9/3 to 16/4" in text
        assert "each of 3 kv heads is on 2 devices" in text


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(devices=0), "devices: expected a positive integer, got 0"),
            (dict(batch=True), "batch: expected a positive integer, got True"),
            (dict(context=-1), "context: expected a positive integer, got -1"),
            (dict(prompt=0), "prompt: expected a positive integer, got 0"),
            (dict(memory=True), "memory: expected a positive integer, got True"),
            (dict(link="usb"), "link: expected 'nvlink', 'pcie', 'network' or a Link, got 'usb'"),
            (dict(device="abacus"), "device: expected 'h200', 'cpu' or a Device, got 'abacus'"),
            (dict(dtype="int8"), "dtype: expected float32, bfloat16, float16 or None"),
            (dict(page_size=10), "page_size: expected one of"),
            (dict(kv_cache="half"), "kv_cache: expected 'auto'"),
        ],
    )
    def test_argument(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            planned(**changes)

    def test_latents_of_a_dense_model(self) -> None:
        with pytest.raises(ValueError, match="k_proj and v_proj is dense in every layer"):
            planned(LLAMA_3_8B, kv_cache="latent")

    def test_link(self) -> None:
        with pytest.raises(ValueError, match="Link.bandwidth: expected bytes/s > 0, got 0"):
            Link(name="cut", bandwidth=0, latency=0)
        with pytest.raises(ValueError, match="Link.latency: expected a number >= 0, got -1"):
            Link(name="early", bandwidth=1, latency=-1)
