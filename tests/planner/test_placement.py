"""What is counted of a layer, against figures computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.measured import LLAMA_3_70B, SEPARATE, SHARED, SMALL, low_rank, ranks
from deinfer_jax import ModelConfig
from deinfer_jax.planner import (
    DEVICES,
    LINKS,
    Collective,
    Heads,
    LayerPlacement,
    Predictor,
    outer_collectives,
    place_layer,
    split_heads,
)

BF16 = "bfloat16"
ONE = LLAMA_3_70B.replace(num_layers=1)
KEEP_60 = low_rank(ONE, SEPARATE, ranks(LLAMA_3_70B, SEPARATE, 0.6))
SHARED_60 = low_rank(ONE, SHARED, ranks(LLAMA_3_70B, SHARED, 0.6))


def place(
    config: ModelConfig, strategy: str, devices: int = 8, dtype: str = BF16
) -> LayerPlacement:
    return place_layer(config, 0, strategy, devices, dtype)  # pyright: ignore[reportArgumentType]


def predictor(config: ModelConfig, strategy: str, devices: int = 8, kv_cache: str = "full"):
    return Predictor(
        config,
        strategy,  # pyright: ignore[reportArgumentType]
        kv_cache,  # pyright: ignore[reportArgumentType]
        devices=devices,
        device=DEVICES["h200"],
        link=LINKS["nvlink"],
        dtype=BF16,
    )


def moves(config: ModelConfig, strategy: str, devices: int = 8, dtype: str = BF16):
    """Kind, operands and padding of each collective."""
    found = place(config, strategy, devices, dtype).collectives
    return [(one.kind, one.operands, one.padding) for one in found]


def weights(config: ModelConfig, strategy: str, devices: int = 8):
    return [(one.outputs, one.inputs) for one in place(config, strategy, devices).products]


class TestTraffic:
    @pytest.mark.parametrize(
        ("strategy", "payload", "wire"),
        [
            ("dense", 16384, 28672),
            ("naive", 83968, 146944),
            ("low_rank", 17472, 20782),
            ("sharded", 17472 + 6 * 8, 30660),
        ],
    )
    def test_70b(self, strategy: str, payload: int, wire: int) -> None:
        traffic = predictor(KEEP_60, strategy).traffic()
        assert traffic.payload == payload
        assert traffic.wire == pytest.approx(wire, abs=0.5)
        assert traffic.cached == 0

    def test_70b_shared(self) -> None:
        assert predictor(SHARED_60, "low_rank").traffic().payload == 13309

    def test_padding_is_apart(self) -> None:
        # Ranks to multiples of 8: 2464 + 2 · 552 = 3568 for 3549, 2 · 3824 = 7648 for 7644; these
        # alone, or with 24 slots, to multiples of 64; 2464 for 2457, 3824 for 3822.
        assert predictor(KEEP_60, "low_rank").traffic().padding == 35 + 7 + 36 + 2
        assert predictor(KEEP_60, "sharded").traffic().padding == 75 + 7 + 12 + 2

    def test_average_of_layers_that_differ(self) -> None:
        two = low_rank(LLAMA_3_70B.replace(num_layers=2), SEPARATE, 100, layers=[1])
        assert predictor(two, "low_rank").traffic().payload == (16384 + 700) / 2

    def test_one_device_moves_nothing(self) -> None:
        for strategy in ("dense", "naive", "low_rank", "sharded"):
            assert place(KEEP_60, strategy, 1).collectives == ()
            assert predictor(KEEP_60, strategy, 1).traffic().wire == 0


class TestCollectives:
    def test_dense(self) -> None:
        assert moves(KEEP_60, "dense") == [("all-reduce", (8192,), 0)] * 2

    def test_naive(self) -> None:
        assert moves(KEEP_60, "naive") == [
            ("all-reduce", (8192, 1024, 1024), 0),
            ("all-reduce", (8192,), 0),
            ("all-reduce", (28672, 28672), 0),
            ("all-reduce", (8192,), 0),
        ]

    def test_naive_shared(self) -> None:
        operands = [moved for _, moved, _ in moves(SHARED_60, "naive")]
        assert operands == [(10240,), (8192,), (57344,), (8192,)]

    def test_low_rank(self) -> None:
        assert moves(KEEP_60, "low_rank") == [
            ("all-gather", (3549,), 35),
            ("all-reduce", (2457,), 7),
            ("all-gather", (7644,), 36),
            ("all-reduce", (3822,), 2),
        ]

    @pytest.mark.parametrize(("dtype", "slots"), [(BF16, 24), ("float16", 32), ("float32", 1)])
    def test_sharded(self, dtype: str, slots: int) -> None:
        assert moves(KEEP_60, "sharded", dtype=dtype) == [
            ("all-reduce", (3549 + slots,), 19 + -(3568 + slots) % 64),
            ("all-reduce", (2457,), 7),
            ("all-reduce", (7644 + slots,), 4 + -(7648 + slots) % 64),
            ("all-reduce", (3822,), 2),
        ]

    def test_outside_the_layers(self) -> None:
        def found(strategy: str):
            one = outer_collectives(SMALL, strategy, 4)  # pyright: ignore[reportArgumentType]
            return [(c.kind, c.payload, c.per) for c in one]

        words = ("all-gather", 8, "sampled row")
        assert found("low_rank") == [("all-reduce", 72, "token"), words]
        assert found("sharded") == [
            ("reduce-scatter", 72, "token"),
            ("all-gather", 72, "sampled row"),
            words,
        ]

    @pytest.mark.parametrize(
        ("kind", "around"), [("all-reduce", 14), ("all-gather", 7), ("reduce-scatter", 7)]
    )
    def test_wire(self, kind: Any, around: int) -> None:
        assert Collective(kind=kind, what="", operands=(8,)).wire(8, 8) == around


class TestMixed:
    """q and up dense, {k, v} shared, gate and o decomposed, down dense."""

    config = low_rank(SMALL, (("k", "v"), ("o",), ("gate",)), dict(k=5, o=6, gate=7))

    def test_low_rank(self) -> None:
        assert moves(self.config, "low_rank", 4) == [
            ("all-gather", (5,), 27),
            ("all-reduce", (6,), 2),
            ("all-gather", (7,), 25),
            ("all-reduce", (72,), 0),
        ]
        # On each of 4 devices one kv head of 8, three query heads, 25 of F.
        assert weights(self.config, "low_rank", 4) == [
            (8, 72),  # v of {k, v}: 8 rows on each of 4 devices
            (16, 8),  # u of k and v
            (24, 72),  # q
            (8, 24),
            (72, 8),
            (8, 72),
            (25, 8),
            (25, 72),
            (72, 25),
        ]

    def test_naive(self) -> None:
        assert moves(self.config, "naive", 4) == [
            ("all-reduce", (48, 72), 0),
            ("all-reduce", (72,), 0),
            ("all-reduce", (100, 100), 0),
            ("all-reduce", (72,), 0),
        ]
        assert weights(self.config, "naive", 4) == [
            (8, 72),  # of a rank of 5, 2 on a device, padded to 8
            (48, 8),
            (72, 18),
            (8, 72),
            (72, 8),
            (8, 72),
            (100, 8),
            (100, 18),
            (72, 25),
        ]

    def test_sharded(self) -> None:
        assert moves(self.config, "sharded", 4) == [
            ("all-reduce", (5 + 12,), 15),
            ("all-gather", (72,), 0),
            ("all-reduce", (6,), 2),
            ("all-reduce", (7 + 12,), 13),
            ("all-gather", (72,), 0),
            ("reduce-scatter", (72,), 0),
        ]
        assert weights(self.config, "sharded", 4) == [
            (32, 18),  # v of {k, v} in the width of its buffer
            (16, 8),
            (24, 72),
            (8, 24),
            (18, 8),
            (32, 18),
            (25, 8),
            (25, 72),
            (72, 25),
        ]

    def test_sharded_without_latents_sends_one_number_alone(self) -> None:
        assert moves(SMALL, "sharded", 4)[:2] == [
            ("all-reduce", (1,), 0),
            ("all-gather", (72,), 0),
        ]

    def test_a_dense_model_is_dense_under_low_rank(self) -> None:
        assert place(SMALL, "low_rank", 4) == place(SMALL, "dense", 4)


class TestWeights:
    @pytest.mark.parametrize(
        ("strategy", "millions"), [("dense", 107.0), ("low_rank", 109.35), ("sharded", 64.34)]
    )
    def test_70b(self, strategy: str, millions: float) -> None:
        found = place(KEEP_60, strategy).linear_elements
        assert found / 1e6 == pytest.approx(millions, abs=0.05)

    def test_products_of_a_layer(self) -> None:
        counts = {name: len(place(KEEP_60, name).products) for name in ("dense", "low_rank")}
        assert counts == {"dense": 4, "low_rank": 11}
        assert len(place(SHARED_60, "sharded").products) == 8

    def test_all_of_a_small_model(self) -> None:
        # 2 devices, 9/3 heads: 2 kv heads and 6 query heads of 8 each; F 50 each; words 25 each.
        linears = (48 + 16 + 16) * 72 + 72 * 48 + 2 * 50 * 72 + 72 * 50
        elements = linears + 2 * 72 + 2 * 25 * 72 + 72
        assert predictor(SMALL, "dense", 2).memory(1, 1, 1).weights == 2 * elements

    def test_tied_table_biases_and_norms_of_heads(self) -> None:
        config = SMALL.replace(tie_embeddings=True, qkv_bias=True, o_bias=True, qk_norm=True)
        one, plain = (predictor(c, "dense", 2).memory(1, 1, 1).weights for c in (config, SMALL))
        assert one - plain == 2 * (80 + 72 + 16 - 25 * 72)


class TestHeads:
    @pytest.mark.parametrize(
        ("devices", "expected"),
        [
            (1, Heads(queries=9, kv=3)),
            (2, Heads(queries=6, kv=2)),
            (4, Heads(queries=3, kv=1)),
            (8, Heads(queries=2, kv=1, copies=2)),
        ],
    )
    def test_nine_and_three(self, devices: int, expected: Heads) -> None:
        assert split_heads(SMALL, devices) == expected

    def test_fewer_kv_heads_than_devices(self) -> None:
        assert split_heads(LLAMA_3_70B, 16) == Heads(queries=4, kv=1, copies=2)

    def test_multi_query(self) -> None:
        config = LLAMA_3_70B.replace(num_kv_heads=1)
        assert split_heads(config, 8) == Heads(queries=8, kv=1, copies=8)
        # Its keys and values are on every device.
        assert place(config.replace(num_layers=1), "dense").products[0].outputs == 10 * 128

    def test_naive_repeats_attention(self) -> None:
        assert place(KEEP_60, "naive").heads == Heads(queries=64, kv=8)


class TestCache:
    """Bytes of 100 sequences of 64 tokens, one page each, in a layer of the 70B model."""

    @pytest.mark.parametrize(
        ("strategy", "kind", "elements"),
        [
            ("dense", "full", 256),
            ("low_rank", "full", 256),
            ("naive", "full", 2048),
            ("sharded", "latent", 2 * 576),  # 546 padded to 64s, on every device
            ("sharded", "full+latent", 128 + 576),
            ("naive", "latent", 2 * 128),  # 69 of 546 each
            ("naive", "full+latent", 1024 + 128),
        ],
    )
    def test_bytes(self, strategy: str, kind: str, elements: int) -> None:
        needed = predictor(KEEP_60, strategy, kv_cache=kind).memory(100, 50, 50)
        assert needed.cache == 100 * 64 * elements * 2
        assert needed.sequence * 100 == needed.cache

    def test_one_latent_of_a_shared_group(self) -> None:
        groups = (("q",), ("k", "v"), ("o",))
        config = low_rank(ONE, groups, ranks(LLAMA_3_70B, groups, 0.6))
        assert predictor(config, "low_rank", kv_cache="latent").layout.bytes_per_token == 2 * 1024

    def test_naive_sums_what_it_rebuilds(self) -> None:
        # Keys are rebuilt for every cached token, values absorbed for every token of the step.
        traffic = predictor(KEEP_60, "naive", kv_cache="latent").traffic()
        assert traffic.cached == 1024
        # Nobody reads the new token's own k and v, of 1024 each.
        assert traffic.payload == 83968 + 8192 - 2048
        traffic = predictor(KEEP_60, "naive", kv_cache="full+latent").traffic()
        assert (traffic.cached, traffic.payload) == (0, 83968 + 8192 - 1024)
