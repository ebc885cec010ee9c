"""What a layer sends under each strategy, counted in programs and computed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import pytest

import deinfer_jax
from bench import measured
from bench.measured import LLAMA_3_70B, SEPARATE, SHARED, low_rank, ranks
from deinfer_jax import ModelConfig
from deinfer_jax.evaluate.communication import (
    Collective,
    Operand,
    collectives,
    layer_program,
    step_program,
)

LLAMA_65B = LLAMA_3_70B.replace(vocab_size=32000, intermediate_size=22016, num_kv_heads=64)
MODELS = {"70B": LLAMA_3_70B, "65B": LLAMA_65B}
GROUPS = {"separate": SEPARATE, "shared": SHARED}
STRATEGIES = ("dense", "naive", "low_rank", "sharded")
KEEPS = (0.4, 0.6, 0.8)
DEVICES = (2, 4, 8)
TOKENS = 2
# Compiles twice as fast; the machine code is not run, and the HLO is the same.
QUICKLY: Any = {"xla_backend_optimization_level": 0}

SMALL = measured.SMALL.replace(max_position=64)  # with ranks that do not divide
KV = (("q",), ("k", "v"), ("o",), ("gate",), ("up",), ("down",))
SMALL_RANKS = dict(q=5, k=6, v=7, o=9, gate=10, up=11, down=13)
SMALL_MODELS = {
    "dense": SMALL,
    "separate": low_rank(SMALL, SEPARATE, SMALL_RANKS),
    "shared-kv": low_rank(SMALL, KV, SMALL_RANKS),
    "shared": low_rank(SMALL, SHARED, SMALL_RANKS),
    # q, up and down are dense.
    "mixed": low_rank(SMALL, (("k", "v"), ("o",), ("gate",)), SMALL_RANKS),
}
Move = tuple[str, float]  # kind, elements a token


class Buffer(NamedTuple):
    """One operand, elements a token: of meaning, and of zeros on top."""

    kind: str
    payload: int
    padding: int = 0


def expected(
    config: ModelConfig, groups: str, keep: float, strategy: str, p: int, riders: int | None = None
) -> list[Buffer]:
    """The design's table, from a model's sizes alone; ``riders`` None = of bfloat16."""
    D, F = config.hidden_size, config.intermediate_size
    N, K = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def rank(out: int, inputs: int) -> int:
        return int(out * inputs * keep / (out + inputs))

    if strategy == "dense":
        return [Buffer("all-reduce", D)] * 2
    outputs = {"q": N, "k": K, "v": K, "gate": F, "up": F}
    blocks = [["qkv"], ["gate up"]]  # what one v reads for
    stacked = {"qkv": N + 2 * K, "gate up": 2 * F}
    if groups == "separate":
        blocks, stacked = [["q", "k", "v"], ["gate", "up"]], outputs
    o, down = rank(D, N), rank(D, F)
    if strategy == "naive":
        widths = [[stacked[group] for group in block] for block in blocks]
        return [Buffer("all-reduce", width) for width in (*widths[0], D, *widths[1], D)]

    def padded(size: int, unit: int = 8) -> int:
        return -(-size // unit) * unit

    more = 0 if strategy == "low_rank" else 3 * p if riders is None else riders
    first = []
    for block in blocks:
        read = [rank(stacked[group], D) for group in block]
        width = padded(sum(padded(R) for R in read) + more, 8 * p)
        kind = "all-gather" if strategy == "low_rank" else "all-reduce"
        first.append(Buffer(kind, sum(read) + more, width - sum(read) - more))
    second = [Buffer("all-reduce", R, padded(R) - R) for R in (o, down)]
    return [first[0], second[0], first[1], second[1]]


@cache
def real(model: str, groups: str, keep: float) -> ModelConfig:
    """One layer of a model."""
    config = MODELS[model].replace(num_layers=1)
    return low_rank(config, GROUPS[groups], ranks(config, GROUPS[groups], keep))


@cache
def lowered(model: str, groups: str, keep: float, strategy: str, p: int) -> jax.stages.Lowered:
    return layer_program(real(model, groups, keep), strategy, p, tokens=TOKENS)


def moves(found: Iterable[Collective], tokens: int = TOKENS) -> list[Move]:
    """Every operand's elements a token, in order."""
    return [(one.kind, size / tokens) for one in found for size in one.elements]


def wire(buffers: Sequence[Buffer], p: int, *, padding: bool) -> float:
    times = {
        "all-reduce": 2 * (p - 1) / p,
        "all-gather": (p - 1) / p,
        "reduce-scatter": (p - 1) / p,
    }
    return sum(times[b.kind] * (b.payload + padding * b.padding) for b in buffers)


@cache
def small(
    model: str, strategy: str, devices: int = 4, kv_cache: str = "full"
) -> jax.stages.Lowered:
    return layer_program(SMALL_MODELS[model], strategy, devices, tokens=TOKENS, kv_cache=kv_cache)


@cache
def small_step(model: str, strategy: str) -> jax.stages.Lowered:
    return step_program(SMALL_MODELS[model], strategy, 4, tokens=TOKENS)


def small_moves(*args: Any, **options: Any) -> list[Move]:
    return moves(collectives(small(*args, **options)))


# Every strategy that a model may have with every kind of cache.
CACHED = [("separate", "dense", "full"), ("mixed", "dense", "full")] + [
    (model, strategy, kind)
    for model in ("separate", "shared-kv", "shared", "mixed")
    for strategy in ("naive", "low_rank", "sharded")
    for kind in ("full", "latent", "full+latent")
]
COVER = [
    *(("70B", "separate", 0.6, strategy, 8) for strategy in STRATEGIES),
    ("65B", "shared", 0.4, "naive", 2),
    ("65B", "shared", 0.8, "sharded", 4),
]
PRODUCT = [
    (model, groups, keep, strategy, p)
    for model in MODELS
    for groups in GROUPS
    for keep in KEEPS
    for strategy in STRATEGIES
    for p in DEVICES
]
SPLIT = ("low_rank", "sharded")  # the others do not depend on p
QUICK = [
    one
    for one in PRODUCT
    if one in COVER or one[0] == "70B" and one[2] == 0.6 and (one[3] in SPLIT or one[4] == 8)
]
REST = [one for one in PRODUCT if one not in QUICK]
CASES = [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in REST)]


class TestLayer:
    """Llama-3-70B and LLaMA-65B, from shapes alone, in the payload's own dtype."""

    @pytest.mark.parametrize(("model", "groups", "keep", "strategy", "p"), CASES)
    def test_what_we_emit(
        self, model: str, groups: str, keep: float, strategy: str, p: int
    ) -> None:
        found = collectives(lowered(model, groups, keep, strategy, p))
        buffers = expected(MODELS[model], groups, keep, strategy, p)
        assert moves(found) == [(b.kind, b.payload + b.padding) for b in buffers]
        operands = {"dense": 2, "naive": 7 if groups == "separate" else 4}.get(strategy, 4)
        assert len(buffers) == operands
        assert {operand.dtype for one in found for operand in one.operands} == {"bf16"}
        assert {one.devices for one in found} == {p}
        whole = wire(buffers, p, padding=True)
        assert sum(one.wire for one in found) == pytest.approx(TOKENS * whole, rel=1e-12)

    @pytest.mark.parametrize(
        ("model", "groups", "keep", "strategy", "p"),
        [
            *COVER,
            *(
                pytest.param(*one, marks=pytest.mark.full)
                for one in PRODUCT
                if one not in COVER and one[2] == 0.6
            ),
        ],
    )
    def test_what_xla_compiles(
        self, model: str, groups: str, keep: float, strategy: str, p: int
    ) -> None:
        program = lowered(model, groups, keep, strategy, p)
        found = collectives(program.compile(compiler_options=QUICKLY))
        assert Counter(moves(found)) == Counter(moves(collectives(program)))
        # Neighbours are merged: q, k, v are one launch, and gate and up.
        assert len(found) == (2 if strategy == "dense" else 4)

    @pytest.mark.parametrize(
        ("groups", "strategy", "payload", "padding", "around"),
        [
            ("separate", "dense", 16384, 0, 28672),
            ("separate", "naive", 83968, 0, 146944),
            ("separate", "low_rank", 17472, 35 + 7 + 36 + 2, 20782),
            ("separate", "sharded", 17472 + 6 * 8, 75 + 7 + 12 + 2, 30660),
            ("shared", "naive", 83968, 0, 146944),
            ("shared", "low_rank", 13309, 22 + 7 + 52 + 2, None),
            ("shared", "sharded", 13309 + 6 * 8, 62 + 7 + 28 + 2, None),
        ],
    )
    def test_figures_of_the_design(
        self, groups: str, strategy: str, payload: int, padding: int, around: int | None
    ) -> None:
        found = collectives(lowered("70B", groups, 0.6, strategy, 8))
        buffers = expected(LLAMA_3_70B, groups, 0.6, strategy, 8)
        assert sum(b.payload for b in buffers) == payload
        assert sum(b.padding for b in buffers) == padding
        assert sum(one.payload for one in found) == TOKENS * (payload + padding)
        zeros = wire(buffers, 8, padding=True) - wire(buffers, 8, padding=False)
        if around is not None:
            sent = sum(one.wire for one in found) / TOKENS - zeros
            assert sent == pytest.approx(around, abs=0.5)

    @pytest.mark.parametrize(("dtype", "riders"), [("float16", 32), ("float32", 1)])
    def test_riders_of_other_dtypes(self, dtype: str, riders: int) -> None:
        config = real("70B", "separate", 0.6)
        found = collectives(layer_program(config, "sharded", 8, tokens=TOKENS, dtype=dtype))
        buffers = expected(LLAMA_3_70B, "separate", 0.6, "sharded", 8, riders)
        assert moves(found) == [(b.kind, b.payload + b.padding) for b in buffers]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_lowered_for_a_gpu(self, strategy: str) -> None:
        config = real("70B", "separate", 0.6)
        program = layer_program(config, strategy, 8, tokens=TOKENS, platform="cuda")
        here = lowered("70B", "separate", 0.6, strategy, 8)
        assert collectives(program) == collectives(here)

    def test_one_device_sends_nothing(self) -> None:
        for strategy in STRATEGIES:
            assert small_moves("separate", strategy, devices=1) == []

    def test_every_layer_counts_by_itself(self) -> None:
        # Layer 0 is dense, layer 1 is not.
        config = low_rank(SMALL.replace(num_layers=2), SHARED, SMALL_RANKS, layers=[1])
        counts = [
            len(collectives(layer_program(config, "low_rank", 4, layer=layer)))
            for layer in range(2)
        ]
        assert counts == [2, 4]


class TestMixed:
    """Dense projections beside decomposed ones, on 4 devices: K = 3 heads are padded to 4."""

    def test_low_rank(self) -> None:
        # Latents of {k, v} and gate, padded to 4 · 8, o's to 8; q and up are column-split, down is
        # row-split.
        assert small_moves("mixed", "low_rank") == [
            ("all-gather", 6 + 26),
            ("all-reduce", 9 + 7),
            ("all-gather", 10 + 22),
            ("all-reduce", 72),
        ]

    def test_sharded(self) -> None:
        # Riders 3 · 4, to multiples of 32; the dense ones read the gathered normed x.
        assert small_moves("mixed", "sharded") == [
            ("all-reduce", 6 + 12 + 14),
            ("all-gather", 72),
            ("all-reduce", 9 + 7),
            ("all-reduce", 10 + 12 + 10),
            ("all-gather", 72),
            ("reduce-scatter", 72),
        ]

    def test_naive(self) -> None:
        # Whole outputs, the dense ones first: q; k and v; o; up; gate; down.
        assert small_moves("mixed", "naive") == [
            ("all-reduce", width) for width in (72, 48, 72, 100, 100, 72)
        ]

    def test_dense_multiplies_out(self) -> None:
        assert small_moves("mixed", "dense") == [("all-reduce", 72)] * 2

    def test_a_dense_model_in_low_rank_is_dense(self) -> None:
        assert small_moves("dense", "low_rank") == [("all-reduce", 72)] * 2

    def test_a_dense_model_in_naive(self) -> None:
        # q, k, v are one product, and so are gate and up.
        assert small_moves("dense", "naive") == [
            ("all-reduce", width) for width in (120, 72, 200, 72)
        ]

    def test_a_dense_model_in_sharded(self) -> None:
        # No latents to ride with: Σx² goes alone, a float32 a token, without padding.
        program = layer_program(SMALL, "sharded", 4, tokens=TOKENS)
        found = collectives(program)
        assert (
            moves(found)
            == [
                ("all-reduce", 1),
                ("all-gather", 72),
                ("reduce-scatter", 72),
            ]
            * 2
        )
        assert [one.operands[0].dtype for one in found] == ["f32", "bf16", "bf16"] * 2

    def test_compiled(self) -> None:
        found = collectives(small("mixed", "sharded").compile(compiler_options=QUICKLY))
        assert Counter(moves(found)) == Counter(small_moves("mixed", "sharded"))
        assert len(found) == 6

    def test_biases_and_norms_of_heads_send_nothing(self) -> None:
        config = SMALL_MODELS["mixed"].replace(
            qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True
        )
        for strategy in ("naive", "sharded"):
            found = collectives(layer_program(config, strategy, 4, tokens=TOKENS))
            assert moves(found) == small_moves("mixed", strategy)


class TestCaches:
    @pytest.mark.parametrize("kind", ["latent", "full+latent"])
    @pytest.mark.parametrize("strategy", ["low_rank", "sharded"])
    def test_latents_cost_nothing(self, strategy: str, kind: str) -> None:
        full = small_moves("separate", strategy)
        assert small_moves("separate", strategy, kv_cache=kind) == full

    def test_naive_sums_what_it_rebuilds(self) -> None:
        """Each device has a part of every latent, so keys and values of *all cached tokens* are
        sums over devices, in every step; k's and v's own outputs are not computed."""
        program = layer_program(
            SMALL_MODELS["separate"], "naive", 4, tokens=3, kv_cache="latent", context=32
        )
        found = collectives(program)
        shapes = [operand.shape for one in found for operand in one.operands]
        rebuilt = (3 * 2, 3, 16, 8)  # pages of three sequences, K, S, H
        assert shapes == [(3, 72), rebuilt, rebuilt, (3, 72), (3, 100), (3, 100), (3, 72)]

    def test_naive_keeps_outputs_of_a_group_with_q(self) -> None:
        found = small_moves("shared", "naive", kv_cache="latent")
        assert found[:3] == [("all-reduce", 120), ("all-reduce", 16 * 24), ("all-reduce", 16 * 24)]

    def test_naive_sums_absorbed_values(self) -> None:
        # One number a query head and column, in float32, beside q and k.
        found = collectives(small("separate", "naive", kv_cache="full+latent"))
        assert moves(found)[:3] == [("all-reduce", 72), ("all-reduce", 24), ("all-reduce", 72)]
        assert [one.operands[0].dtype for one in found[:3]] == ["bf16", "bf16", "f32"]

    @pytest.mark.parametrize(
        ("model", "strategy", "kind"),
        [
            one if one[0] in ("separate", "mixed") else pytest.param(*one, marks=pytest.mark.full)
            for one in CACHED
        ],
    )
    def test_no_other_collective_is_emitted(self, model: str, strategy: str, kind: str) -> None:
        check_kinds(collectives(small(model, strategy, kv_cache=kind)), strategy, model)

    @pytest.mark.parametrize(
        ("model", "strategy", "kind"),
        [
            one
            if one in (("separate", "sharded", "latent"), ("separate", "naive", "latent"))
            else pytest.param(*one, marks=pytest.mark.full)
            for one in CACHED
        ],
    )
    def test_no_other_collective_is_compiled(self, model: str, strategy: str, kind: str) -> None:
        program = small(model, strategy, kv_cache=kind)
        found = collectives(program.compile(compiler_options=QUICKLY))
        check_kinds(found, strategy, model)
        assert Counter(moves(found)) == Counter(moves(collectives(program)))


def check_kinds(found: list[Collective], strategy: str, model: str) -> None:
    kinds = {"all-reduce"}
    if strategy in ("low_rank", "sharded"):
        kinds = {"all-reduce", "all-gather"}
    if strategy == "sharded" and model == "mixed":
        kinds = {"all-reduce", "all-gather", "reduce-scatter"}
    assert {one.kind for one in found} <= kinds


class TestStep:
    """A whole decode step, 50 words on 4 devices."""

    @staticmethod
    def outside(program: Any, strategy: str) -> list[Collective]:
        """Of rows that are greedy and want no log-probabilities, without the layer's."""
        found = [one for one in collectives(program) if not any(one.branches)]
        layer = Counter(small_moves("separate", strategy))
        rest = []
        for one in found:
            sizes = [(one.kind, size / TOKENS) for size in one.elements]
            if all(layer[size] > 0 for size in sizes):
                layer.subtract(sizes)
            else:
                rest.append(one)
        assert not any(layer.values())
        return rest

    @pytest.mark.parametrize(
        "strategy",
        [s if s in SPLIT else pytest.param(s, marks=pytest.mark.full) for s in STRATEGIES],
    )
    def test_greedy(self, strategy: str) -> None:
        program = small_step("separate", strategy)
        table = [("all-reduce", 72)]
        if strategy == "sharded":
            table = [("reduce-scatter", 72), ("all-gather", 72)]
        found = self.outside(program, strategy)
        # A value and a word of each device.
        assert moves(found) == [*table, ("all-gather", 2 * 4)]
        assert found[-1].operands == (Operand((TOKENS, 1, 2), "i32"),)

    @pytest.mark.parametrize(
        "strategy",
        [s if s == "sharded" else pytest.param(s, marks=pytest.mark.full) for s in STRATEGIES],
    )
    def test_compiled(self, strategy: str) -> None:
        program = small_step("separate", strategy)
        compiled = program.compile(compiler_options=QUICKLY)
        found = [moves(self.outside(one, strategy)) for one in (program, compiled)]
        assert Counter(found[0]) == Counter(found[1])
        kinds = {"all-reduce", "all-gather", "reduce-scatter"}
        assert {one.kind for one in collectives(compiled)} <= kinds

    def test_two_layers_send_twice(self) -> None:
        two = low_rank(SMALL.replace(num_layers=2), SEPARATE, SMALL_RANKS)
        programs = small_step("separate", "sharded"), step_program(two, "sharded", 4, tokens=TOKENS)
        counts = [Counter(moves(collectives(program))) for program in programs]
        assert counts[1] - counts[0] == Counter(small_moves("separate", "sharded"))

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("strategy", "kind"), [one[1:] for one in CACHED if one[0] == "separate"]
    )
    def test_it_is_the_engines(self, strategy: str, kind: str) -> None:
        """The programs that ``load`` makes, decode and all others."""
        llm = deinfer_jax.load(
            SMALL_MODELS["separate"],
            strategy=strategy,
            tensor_parallel=4,
            kv_cache=kind,
            dtype="bfloat16",
            max_batch=2,
            max_context=16,
            decode_steps=1,
            progress=False,
        )
        with llm:
            keys = list(llm.runner.buckets.programs())
            found = {key: collectives(llm.runner._lower(key)) for key in keys}
        kinds = {"all-reduce", "all-gather", "reduce-scatter"}
        assert {key[0] for key in keys} >= {"prefill", "decode"}
        for every in found.values():
            assert {one.kind for one in every} <= kinds
        # The largest bucket: no page is shared.
        decode = found[max(key for key in keys if key[0] == "decode" and key[1] == TOKENS)]
        config = SMALL_MODELS["separate"]
        ours = step_program(config, strategy, 4, tokens=TOKENS, kv_cache=kind)
        assert Counter(moves(decode)) == Counter(moves(collectives(ours)))
