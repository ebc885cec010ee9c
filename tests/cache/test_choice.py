"""What ``kv_cache="auto"`` takes, and what it says."""

from __future__ import annotations

import logging

import pytest

from deinfer_jax import LowRank, ModelConfig, Slice
from deinfer_jax.cache.choice import DEVICES, Situation, choose_layout, cost

GPU = DEVICES["gpu"]


def decomposed(
    *,
    kv_heads: int = 8,
    heads: int = 32,
    layers: int = 2,
    ranks: tuple[int, int] = (512, 512),
    shared: str = "",
) -> ModelConfig:
    """Heads of 128 and the ranks of k and v, or the rank of the projections that share a latent;
    two layers unless told."""
    slices = []
    for layer in range(layers):
        parent = f"model.layers.{layer}.self_attn"
        for short, rank in zip("kv", ranks, strict=True):
            name = shared if short in shared else short
            slices.append(
                (f"{parent}.{short}_proj", Slice(v=f"{parent}.{name}", rank=rank, offset=0))
            )
    return ModelConfig(
        vocab_size=11,
        hidden_size=heads * 128,
        intermediate_size=40,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        low_rank=LowRank(tuple(slices)),
    )


def auto(config: ModelConfig, **situation: object) -> str:
    options = dict(speed=GPU, batch=64, context=1024) | situation
    return choose(config, Situation(**options)).kind  # pyright: ignore[reportArgumentType]


def choose(config: ModelConfig, situation: Situation):
    return choose_layout(config, "auto", 64, "bfloat16", situation=situation)


class TestCost:
    """By hand, for one layer pair of K·H = 1024 and ranks of 512, in bfloat16."""

    def found(self, kind: str):
        return cost(choose_layout(decomposed(), kind, 64, "bfloat16"), 32, GPU)

    def test_full(self) -> None:
        one = self.found("full")
        assert (one.bytes, one.moved) == (2 * 2 * 2048, 2 * 2 * 2048)
        assert one.operations == 2 * 4 * 32 * 128

    def test_values_absorbed(self) -> None:
        one = self.found("full+latent")
        assert one.moved == one.bytes == 2 * 2 * (1024 + 512)
        assert one.operations == 2 * 2 * 32 * (128 + 512)

    def test_keys_rebuilt(self) -> None:
        one = self.found("latent")
        assert one.bytes == 2 * 2 * 1024
        # Copied; c_k read and K written; K and c_v read.
        assert one.moved == 2 * 2 * (2 * 1024 + (512 + 1024) + (1024 + 512))
        assert one.operations == 2 * (2 * 512 * 1024 + 2 * 32 * (128 + 512))

    def test_seconds_are_those_of_memory_where_there_is_little_to_compute(self) -> None:
        for kind in ("full", "full+latent"):
            one = self.found(kind)
            assert one.seconds == pytest.approx(one.moved / GPU.bandwidth)

    def test_seconds_count_the_arithmetic_of_rebuilding(self) -> None:
        one = cost(choose_layout(decomposed(), "latent", 64, "float32"), 32, GPU)
        assert one.seconds > one.moved / GPU.bandwidth


class TestAuto:
    def test_values_whose_latents_are_narrow(self) -> None:
        # 1024 + 512 numbers a token instead of 2048, and nothing is rebuilt.
        assert auto(decomposed()) == "full+latent"

    def test_values_whose_latents_are_wide(self) -> None:
        assert auto(decomposed(ranks=(2730, 2730), shared="qkv")) == "full"

    @pytest.mark.parametrize(("rank", "kind"), [(700, "full+latent"), (983, "full")])
    def test_keys_and_values_of_one_latent(self, rank: int, kind: str) -> None:
        # 983 columns are padded to 1024, as many as the values have.
        assert auto(decomposed(ranks=(rank, rank), shared="kv")) == kind

    def test_a_slow_processor_does_not_absorb(self) -> None:
        # Scores and sums over 512 columns instead of 128 cost more than the bytes they save.
        assert auto(decomposed(), speed=DEVICES["cpu"]) == "full"

    def test_memory_decides_where_full_caches_do_not_fit(self) -> None:
        tokens = 64 * 1024
        assert auto(decomposed(), cache_bytes=tokens * 2 * 2 * 1536) == "full+latent"
        assert auto(decomposed(), cache_bytes=tokens * 2 * 2 * 1536 - 1) == "latent"

    def test_on_a_device_what_is_rebuilt_takes_room_too(self) -> None:
        # 32 layers cache 65536 bytes a token in latents; one at a time rebuilds 22528 more.
        config = decomposed(layers=32)
        tokens, needed = 64 * 1024, 65536 + 22528
        assert auto(config, room=tokens * needed) == "latent"
        reason = choose(config, Situation(speed=GPU, batch=64, context=1024, room=1)).reason
        assert "latent, the smallest" in reason
        assert not Situation(batch=64, context=1024, room=tokens * needed - 1).holds(
            choose_layout(config, "latent", 64, "bfloat16")
        )

    def test_where_nothing_fits_the_smallest(self) -> None:
        assert auto(decomposed(layers=32), room=1000) == "latent"
        assert auto(decomposed(layers=2), room=1000) == "full+latent"

    def test_the_smallest_is_not_always_latent(self) -> None:
        assert auto(decomposed(kv_heads=2), cache_bytes=1000) == "full"

    def test_only_keys_decomposed(self) -> None:
        config = decomposed()
        keys = tuple(one for one in config.low_rank.slices if "k_proj" in one[0])
        assert auto(config.replace(low_rank=LowRank(keys))) == "full"

    def test_without_a_situation_there_is_no_limit(self) -> None:
        assert "hold" not in choose_layout(decomposed(), "auto", 64, "bfloat16").reason


class TestReason:
    def test_gives_the_figures_of_every_kind(self) -> None:
        reason = choose(decomposed(), Situation(speed=GPU, batch=64, context=1024)).reason
        for text in (
            "kv_cache: full+latent, the fastest (",
            "full: 8192 bytes a token, a step moves 8192 bytes and computes 0.0328 MFLOP",
            "latent: 4096 bytes a token, a step moves 20480 bytes",
            "full+latent: 6144 bytes a token",
            "predicted",
        ):
            assert text in reason

    def test_says_what_does_not_fit(self) -> None:
        situation = Situation(speed=GPU, batch=64, context=1024, cache_bytes=64 * 1024 * 5000)
        reason = choose(decomposed(), situation).reason
        assert "latent, the fastest that holds 64 sequences of 1024 tokens" in reason
        assert reason.count("does not hold") == 2

    def test_says_that_nothing_fits(self) -> None:
        reason = choose(decomposed(), Situation(batch=3, context=50, cache_bytes=1)).reason
        assert "the smallest, since none holds 3 sequences of 50 tokens" in reason

    def test_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="deinfer_jax"):
            found = choose(decomposed(), Situation())
        assert [record.getMessage() for record in caplog.records] == [found.reason]

    def test_a_dense_model_is_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="deinfer_jax"):
            found = choose(decomposed().replace(low_rank=LowRank()), Situation())
        assert found.kind == "full" and found.reason == "" and not caplog.records

    @pytest.mark.parametrize("kind", ["full", "latent", "full+latent"])
    def test_a_named_kind_needs_no_reason(self, kind: str) -> None:
        assert choose_layout(decomposed(), kind, 64, "bfloat16").reason == ""
