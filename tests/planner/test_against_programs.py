"""The planner's collectives and weights against those of programs, which it knows nothing of."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import pytest

from bench.measured import LLAMA_3_70B, SEPARATE, SHARED, low_rank, ranks
from deinfer_jax import ModelConfig
from deinfer_jax.config import LowRank
from deinfer_jax.evaluate import communication
from deinfer_jax.evaluate.communication import collectives, layer_program, step_program
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.strategies import get_strategy
from deinfer_jax.planner import DEVICES, LINKS, Predictor, outer_collectives, place_layer

TOKENS = 2
ONE = LLAMA_3_70B.replace(num_layers=1, vocab_size=64)
LLAMA_65B = ONE.replace(intermediate_size=22016, num_kv_heads=64)
# 9/3 heads of 8 in a width of 72.
SMALL = ONE.replace(
    vocab_size=50,
    hidden_size=72,
    intermediate_size=100,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
)
SMALL_RANKS = dict(q=5, k=6, v=7, o=9, gate=10, up=11, down=13)
BIASES: dict[str, Any] = dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
MODELS = {
    "70B": low_rank(ONE, SEPARATE, ranks(ONE, SEPARATE, 0.6)),
    "70B-shared": low_rank(ONE, SHARED, ranks(ONE, SHARED, 0.4)),
    "65B": low_rank(LLAMA_65B, SEPARATE, ranks(LLAMA_65B, SEPARATE, 0.8)),
    "small": low_rank(SMALL, SEPARATE, SMALL_RANKS),
    "small-biases": low_rank(SMALL.replace(**BIASES), SHARED, SMALL_RANKS),
    # q, up and down are dense, then k, v and o, gate and up.
    "mixed": low_rank(SMALL, (("k", "v"), ("o",), ("gate",)), SMALL_RANKS),
    "mixed-too": low_rank(SMALL.replace(**BIASES), (("q",), ("up",), ("down",)), SMALL_RANKS),
}
STRATEGIES = ("dense", "naive", "low_rank", "sharded")
QUICK = {"70B": 8, "65B": 2, "small": 8, "mixed": 4, "mixed-too": 2}
CASES = [
    pytest.param(*one, marks=() if QUICK.get(one[0]) == one[2] else pytest.mark.full)
    for one in itertools.product(MODELS, STRATEGIES, (2, 4, 8))
]
Counts = Counter[tuple[str, int]]  # kind and elements a token, of every operand


def planned(found: Iterable[Any]) -> Counts:
    """Padding is of collectives with one operand."""
    counts: Counts = Counter()
    for one in found:
        assert one.padding == 0 or len(one.operands) == 1
        counts.update((one.kind, width + one.padding) for width in one.operands)
    return counts


def counted(found: Iterable[communication.Collective]) -> Counts:
    counts: Counts = Counter()
    for one in found:
        assert all(size % TOKENS == 0 for size in one.elements)
        counts.update((one.kind, size // TOKENS) for size in one.elements)
    return counts


def place(config: ModelConfig, strategy: Any, p: int, dtype: str = "bfloat16"):
    if strategy == "dense":
        config = config.replace(low_rank=LowRank())
    return place_layer(config, 0, strategy, p, dtype)


def program(config: ModelConfig, strategy: str, p: int, **options: Any):
    return collectives(layer_program(config, strategy, p, tokens=TOKENS, **options))


@pytest.mark.parametrize(("model", "strategy", "p"), CASES)
def test_layer(model: str, strategy: str, p: int) -> None:
    config = MODELS[model]
    predicted = place(config, strategy, p).collectives
    found = program(config, strategy, p)
    assert counted(found) == planned(predicted)
    # In wire, too.
    around = sum(c.wire(c.payload + c.padding, p) for c in predicted)
    assert sum(one.wire for one in found) == pytest.approx(TOKENS * around, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("strategy", ["low_rank", "sharded"])
def test_other_dtypes(strategy: str, dtype: str) -> None:
    config = MODELS["small"]
    predicted = place(config, strategy, 4, dtype).collectives
    assert counted(program(config, strategy, 4, dtype=dtype)) == planned(predicted)


@pytest.mark.parametrize("strategy", ["dense", "naive", "low_rank"])
def test_dense_model(strategy: str) -> None:
    predicted = place(SMALL, strategy, 4).collectives
    assert counted(program(SMALL, strategy, 4)) == planned(predicted)


def test_dense_model_in_sharded() -> None:
    predicted = place(SMALL, "sharded", 4).collectives
    assert counted(program(SMALL, "sharded", 4)) == planned(predicted)


@pytest.mark.parametrize(("model", "strategy", "p"), CASES)
def test_weights_of_a_device(model: str, strategy: str, p: int) -> None:
    split = get_strategy(strategy, p)
    config = MODELS[model]
    if split.multiplies_out:
        config = config.replace(low_rank=LowRank())
    built = build(config, max_context=64, strategy=split, dtype=jnp.dtype("bfloat16"))
    own = sum(math.prod(d.local_shape(p)) for d in declarations(built.layers[0]))
    placement = place(config, strategy, p)
    assert own == placement.linear_elements + placement.small_weights


@pytest.mark.parametrize("strategy", ["naive", "sharded"])
def test_outside_the_layers(strategy: Any) -> None:
    config = MODELS["small"]
    whole = collectives(step_program(config, strategy, 4, tokens=TOKENS))
    greedy = counted(one for one in whole if not any(one.branches))
    layer = counted(program(config, strategy, 4))
    assert greedy - layer == planned(outer_collectives(config, strategy, 4))
    assert not layer - greedy


class TestCaches:
    """Of the cache kinds only ``naive`` sends anything for."""

    @staticmethod
    def traffic(model: str, strategy: Any, kind: Any):
        return Predictor(
            MODELS[model],
            strategy,
            kind,
            devices=4,
            device=DEVICES["h200"],
            link=LINKS["nvlink"],
            dtype="bfloat16",
            page_size=16,
        ).traffic()

    @pytest.mark.parametrize("kind", ["latent", "full+latent"])
    @pytest.mark.parametrize("strategy", ["low_rank", "sharded"])
    def test_latents(self, strategy: str, kind: str) -> None:
        found = program(MODELS["small"], strategy, 4, kv_cache=kind)
        predicted = self.traffic("small", strategy, kind)
        assert sum(one.payload for one in found) == TOKENS * (predicted.payload + predicted.padding)
        assert predicted.cached == 0

    @pytest.mark.parametrize("kind", ["latent", "full+latent"])
    @pytest.mark.parametrize("model", ["small-biases", "small"])
    def test_naive(self, model: str, kind: str) -> None:
        context = 32
        found = program(MODELS[model], "naive", 4, kv_cache=kind, context=context)
        predicted = self.traffic(model, "naive", kind)
        every = TOKENS * (predicted.payload + context * predicted.cached)
        assert sum(one.payload for one in found) == every
