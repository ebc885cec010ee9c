"""What a device computes under each strategy, by XLA's own count.

Under ``shard_map`` the compiled module is one device's, and so is what ``cost_analysis`` says.
Where the cached context is longer, only attention computes more: the difference of two contexts is
attention's alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from bench.measured import SEPARATE, low_rank
from deinfer_jax import ModelConfig
from deinfer_jax.evaluate.communication import layer_program

T = 4
# Everything divides by 8. Products are large beside norms, heads wide beside masks, and ranks
# beside the rows that Σx² needs under sharded: on 8 devices 1.3 % of all products, of
# Llama-3-70B's 0.2 %.
D, F, N, K, H = 1024, 2048, 16, 8, 64
RANKS = dict(q=512, k=256, v=256, o=512, gate=768, up=768, down=768)
DENSE = ModelConfig(
    vocab_size=64,
    hidden_size=D,
    intermediate_size=F,
    num_layers=1,
    num_heads=N,
    num_kv_heads=K,
    head_dim=H,
    max_position=512,
)
CONFIG = low_rank(DENSE, SEPARATE, RANKS)
SHORT, LONG = 64, 192
# Compiles twice as fast; the machine code is not run, and the HLO is the same.
QUICKLY: Any = {"xla_backend_optimization_level": 0}
DEVICES = [8, *(pytest.param(p, marks=pytest.mark.full) for p in (2, 4))]


@cache
def flops(strategy: str, devices: int, context: int) -> float:
    """Of a layer on one device; it is one device's, see ``test_counts_are_of_one_device``."""
    if devices == 1 and strategy != "dense":
        strategy = "low_rank"  # on one device they are the same
    program = layer_program(CONFIG, strategy, devices, tokens=T, context=context)
    # XLA cannot see into a call of another's code, as a Pallas kernel is.
    assert "custom_call" not in program.as_text()
    analysis = program.compile(compiler_options=QUICKLY).cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def attention(strategy: str, devices: int) -> float:
    return flops(strategy, devices, LONG) - flops(strategy, devices, SHORT)


def products(strategy: str, p: int) -> float:
    """Multiply-adds of T rows, two operations each, from the table of the design."""
    if strategy == "dense":
        return 2 * T * (D * (N + 2 * K) * H + N * H * D + 3 * D * F) / p
    read = D * sum(RANKS[short] for short in ("q", "k", "v", "gate", "up"))
    write = H * (N * RANKS["q"] + K * RANKS["k"] + K * RANKS["v"])
    write += F * (RANKS["gate"] + RANKS["up"])
    contracted = N * H * RANKS["o"] + F * RANKS["down"]
    restored = D * (RANKS["o"] + RANKS["down"])
    # low_rank: the second factors of o and down are whole on every device.
    return (
        2 * T * ((read + write + contracted) / p + restored / (1 if strategy == "low_rank" else p))
    )


class TestAttention:
    @pytest.mark.parametrize("p", DEVICES)
    @pytest.mark.parametrize("strategy", ["dense", "low_rank", "sharded"])
    def test_it_is_split(self, strategy: str, p: int) -> None:
        ratio = attention(strategy, 1) / attention(strategy, p)
        assert ratio == pytest.approx(p, rel=0.02)

    @pytest.mark.parametrize("p", DEVICES)
    def test_naive_repeats_it(self, p: int) -> None:
        assert attention("naive", p) == attention("naive", 1)

    @pytest.mark.parametrize("strategy", ["dense", "naive"])
    def test_it_is_two_products_of_every_head(self, strategy: str) -> None:
        # Scores and weighted sums, and softmax: a few operations a score.
        least = 2 * 2 * T * N * H * (LONG - SHORT)
        assert least < attention(strategy, 1) < 1.2 * least


class TestAll:
    @pytest.mark.parametrize("strategy", ["dense", "low_rank"])
    def test_counts_are_of_one_device(self, strategy: str) -> None:
        """Products and attention are nearly all there is."""
        predicted = products(strategy, 1) + 4 * T * N * H * SHORT
        assert flops(strategy, 1, SHORT) == pytest.approx(predicted, rel=0.02)

    @pytest.mark.parametrize("p", DEVICES)
    @pytest.mark.parametrize("strategy", ["dense", "sharded"])
    def test_everything_is_split(self, strategy: str, p: int) -> None:
        for context in (SHORT, LONG):
            ratio = flops(strategy, 1, context) / flops(strategy, p, context)
            assert ratio == pytest.approx(p, rel=0.02)

    @pytest.mark.parametrize("p", DEVICES)
    def test_low_rank_repeats_second_factors(self, p: int) -> None:
        predicted = products("low_rank", p) + 4 * T * N * H * SHORT / p
        assert flops("low_rank", p, SHORT) == pytest.approx(predicted, rel=0.02)
        assert flops("low_rank", p, SHORT) > 1.3 * flops("sharded", p, SHORT) or p < 8

    @pytest.mark.parametrize("p", DEVICES)
    def test_naive_splits_products_only(self, p: int) -> None:
        rest = flops("naive", 1, SHORT) - products("naive", 1)
        predicted = products("naive", p) + rest
        assert flops("naive", p, SHORT) == pytest.approx(predicted, rel=0.01)
