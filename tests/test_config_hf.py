"""config.json written from a config, and its block low_rank."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from deinfer_jax import LowRank, ModelConfig, RopeConfig, Slice
from deinfer_jax.config_hf import low_rank_block
from tests import tiny
from tests.test_rope_config import BASE, SCALINGS

Q, K, OUT = (f"model.layers.0.self_attn.{n}_proj" for n in "qko")
SLICES = {Q: ["z", 0, 3], K: ["z", 3, 2], OUT: ["y", 0, 4]}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


def through_json(config: ModelConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_hf()))


class TestToHf:
    @pytest.mark.parametrize("variant", tiny.VARIANTS)
    def test_of_every_variant(self, variant: str) -> None:
        kind, options = tiny.VARIANTS[variant]
        read = ModelConfig.from_hf({"model_type": kind, **tiny.SIZES, **options})
        written = through_json(read)
        assert written["model_type"] == kind and "deinfer" not in written
        assert ModelConfig.from_hf(written) == read

    @pytest.mark.parametrize("name", SCALINGS)
    def test_of_every_rope_scaling(self, name: str) -> None:
        read = config(rope_scaling=SCALINGS[name], rope_theta=5e5)
        written = through_json(read)
        assert "deinfer" not in written
        assert ModelConfig.from_hf(written) == read

    @pytest.mark.parametrize("variant", ["gqa", "biases", "mistral-window", "qwen2", "qwen3"])
    def test_transformers_reads_it_as_its_own(self, variant: str) -> None:
        pytest.importorskip("torch")
        from transformers import AutoConfig

        kind, options = tiny.VARIANTS[variant]
        theirs = AutoConfig.for_model(kind, **{**tiny.SIZES, **options}).to_dict()
        written = through_json(ModelConfig.from_hf(theirs))
        read = AutoConfig.for_model(**written).to_dict()
        assert written["architectures"] == [f"{kind.capitalize()}ForCausalLM"]
        # Without windows max_window_layers says nothing; dtype is one of torch's in theirs.
        for name in written.keys() - {"architectures", "head_dim", "dtype", "max_window_layers"}:
            assert read[name] == theirs.get(name, read[name]), name

    # No model type says all of these; what is left goes under a key of our own.
    def test_of_any_config(self) -> None:
        ropes = [
            RopeConfig(),
            RopeConfig(divisors=(1.0, 1.1, 3.0, 8.0)),
            RopeConfig(kind="linear", factor=2.0, divisors=(1.0, 1.1, 3.0, 8.0)),
            RopeConfig(kind="dynamic", factor=2.0, original_max_position=77),
        ]
        windows = [(None,) * 3, (5,) * 3, (None, 5, 5), (5, None, 5), (5, None, 3)]
        flags = itertools.product([False, True], repeat=4)
        names = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
        for values, rope, window in itertools.product(flags, ropes, windows):
            changes: dict[str, Any] = dict(zip(names, values, strict=True))
            one = config().replace(rope=rope, windows=window, **changes)
            assert ModelConfig.from_hf(through_json(one)) == one

    @pytest.mark.parametrize("ids", [(), (2,), (2, 7)])
    def test_end_tokens(self, ids: tuple[int, ...]) -> None:
        one = config().replace(eos_token_ids=ids, bos_token_id=None)
        assert ModelConfig.from_hf(through_json(one)) == one

    def test_of_a_decomposed_model(self) -> None:
        one = config(low_rank={"version": 1, "slices": SLICES})
        assert through_json(one)["low_rank"] == {"version": 1, "slices": SLICES}
        assert ModelConfig.from_hf(through_json(one)) == one

    def test_every_field_is_written(self) -> None:
        # A field that to_hf forgot would come back as its default: none of these is one.
        changes: dict[str, Any] = dict(
            hidden_act="gelu",
            rms_norm_eps=1e-4,
            rope=RopeConfig(theta=5e5, kind="yarn", factor=3.0, original_max_position=32),
            max_position=80,
            tie_embeddings=True,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            qk_norm=True,
            windows=(4, None, 4),
            bos_token_id=9,
            eos_token_ids=(3, 4),
            dtype="float16",
            low_rank=LowRank(((Q, Slice(v="z", offset=0, rank=3)),)),
        )
        defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
        optional = {n for n, value in defaults.items() if value is not dataclasses.MISSING}
        assert changes.keys() == optional - {"family"}  # of which there is one
        one = config().replace(**changes)
        assert all(getattr(one, name) != defaults[name] for name in changes)
        assert ModelConfig.from_hf(through_json(one)) == one

    @pytest.mark.parametrize("own", [3, {"hidden_size": 3}, {"rope": None, "x": 1}])
    def test_unknown_fields_under_our_key(self, own: Any) -> None:
        with pytest.raises(ValueError, match="deinfer: expected a mapping with qkv_bias, .*got"):
            config(deinfer=own)


class TestLowRankBlock:
    def test_slices(self) -> None:
        read = config(low_rank={"version": 1, "slices": SLICES, "method": "svd"}).low_rank
        assert read == LowRank(
            tuple((m, Slice(v=v, offset=at, rank=r)) for m, (v, at, r) in SLICES.items())  # pyright: ignore[reportArgumentType]
        )

    def test_metadata_is_kept(self) -> None:
        block = low_rank_block(LowRank(), method="fisher", base_model={"name": "x"})
        assert block == {
            "version": 1,
            "slices": {},
            "method": "fisher",
            "base_model": {"name": "x"},
        }

    @pytest.mark.parametrize("block", [None, {"version": 1, "slices": {}}])
    def test_none(self, block: Any) -> None:
        assert config(low_rank=block) == config()

    @pytest.mark.parametrize("version", [2, 0, "1", None, 1.0, True])
    def test_another_version(self, version: Any) -> None:
        with pytest.raises(ValueError, match=rf"low_rank.version: expected 1, got {version!r}$"):
            config(low_rank={"version": version, "slices": {}})

    @pytest.mark.parametrize("block", [[], "x", 3])
    def test_no_mapping(self, block: Any) -> None:
        with pytest.raises(ValueError, match="low_rank: expected a mapping, got"):
            config(low_rank=block)

    @pytest.mark.parametrize("slices", [None, [], [[Q, "z", 0, 3]]])
    def test_no_slices(self, slices: Any) -> None:
        with pytest.raises(ValueError, match=r"low_rank.slices: expected a mapping of .*got"):
            config(low_rank={"version": 1, "slices": slices})

    @pytest.mark.parametrize(
        "piece",
        [None, "z", [], ["z", 0], ["z", 0, 3, 1], [0, 0, 3], ["z", "0", 3], ["z", 0, 3.0]]
        + [["z", 0, True], {"v": "z", "offset": 0, "rank": 3}],
        ids=str,
    )
    def test_a_malformed_slice(self, piece: Any) -> None:
        with pytest.raises(
            ValueError, match=rf"slice of {Q}: expected \[v tensor name, offset, rank\], got"
        ):
            config(low_rank={"version": 1, "slices": {Q: piece}})

    @pytest.mark.parametrize("piece", [["z", 0, 0], ["z", -1, 3]])
    def test_a_slice_of_nothing(self, piece: Any) -> None:
        with pytest.raises(ValueError, match=rf"module {Q}: .*rank >= 1 and offset >= 0, got"):
            config(low_rank={"version": 1, "slices": {Q: piece}})

    @pytest.mark.parametrize(
        "module",
        ["model.layers.3.mlp.up_proj", "model.layers.0.mlp.up", "lm_head", "mlp.up_proj"],
    )
    def test_a_module_that_the_model_lacks(self, module: str) -> None:
        with pytest.raises(
            ValueError,
            match=rf"no modules {module}; expected model.layers.N with N from 0 to 2 and "
            r"self_attn.q_proj, .*mlp.down_proj$",
        ):
            config(low_rank={"version": 1, "slices": {module: ["z", 0, 3]}})


class TestLowRank:
    def low_rank(self, **pieces: tuple[str, int, int]) -> LowRank:
        blocks = {"g": "mlp.gate_proj", "u": "mlp.up_proj", "d": "mlp.down_proj"}
        return LowRank(
            tuple(
                (
                    f"model.layers.{short[1:] or 0}."
                    + blocks.get(short[0], f"self_attn.{short[0]}_proj"),
                    Slice(v=v, offset=offset, rank=rank),
                )
                for short, (v, offset, rank) in pieces.items()
            )
        )

    def test_groups(self) -> None:
        found = self.low_rank(q=("a", 0, 3), k=("b", 0, 4), v=("a", 0, 3), o=("c", 0, 5)).groups()
        assert [(len(members), piece.v) for members, piece in found] == [
            (2, "a"),
            (1, "b"),
            (1, "c"),
        ]

    def test_factors(self) -> None:
        low_rank = self.low_rank(k=("a", 3, 4), q=("a", 0, 3), v=("a", 3, 4), o=("c", 0, 5))
        assert low_rank.factors() == {"a": 7, "c": 5}

    def test_truth(self) -> None:
        assert self.low_rank(q=("a", 0, 3)) and not LowRank()

    def test_equal_ones_hash_alike(self) -> None:
        one, two = (self.low_rank(q=("a", 0, 3), k=("b", 0, 4)) for _ in range(2))
        assert hash(one) == hash(two) and one == two
        assert one != self.low_rank(k=("b", 0, 4), q=("a", 0, 3), v=("c", 0, 1))

    def test_a_module_twice(self) -> None:
        piece = Slice(v="a", offset=0, rank=3)
        with pytest.raises(ValueError, match=rf"expected each module once, got {Q} again"):
            LowRank(((Q, piece), (K, piece), (Q, piece)))

    @pytest.mark.parametrize(
        ("pieces", "offset", "end"),
        [
            (dict(q=("a", 0, 3), k=("a", 2, 3)), 2, 3),
            (dict(q=("a", 0, 3), k=("a", 0, 5)), 0, 3),
            (dict(q=("a", 0, 3), k=("a", 4, 3)), 4, 3),
            (dict(q=("a", 2, 3)), 2, 0),
            (dict(o=("a", 2, 3)), 2, 0),
        ],
        ids=["overlap", "one within another", "a gap", "not from 0", "contracting"],
    )
    def test_slices_that_do_not_tile(self, pieces: Any, offset: int, end: int) -> None:
        with pytest.raises(
            ValueError, match=rf"slices of 'a' .*got offset {offset} where {end} ends the one befo"
        ):
            self.low_rank(**pieces)

    @pytest.mark.parametrize(
        "pieces",
        [
            dict(q=("a", 0, 3), o=("a", 0, 3)),
            dict(g=("a", 0, 3), d=("a", 3, 3)),
            dict(q=("a", 0, 3), g=("a", 0, 3)),
            dict(k0=("a", 0, 3), k1=("a", 0, 3)),
        ],
        ids=["q o", "gate down", "two blocks", "two layers"],
    )
    def test_readers_of_different_inputs(self, pieces: Any) -> None:
        with pytest.raises(
            ValueError, match=r"'a' is read by .*expected projections of the same input, \{q_proj"
        ):
            self.low_rank(**pieces)

    @pytest.mark.parametrize("shorts", ["qkv", "kv", "qv", "gu"])
    def test_readers_of_one_input(self, shorts: str) -> None:
        assert len(self.low_rank(**dict.fromkeys(shorts, ("a", 0, 3))).groups()) == 1


class TestLinears:
    @pytest.mark.parametrize("variant", ["gqa", "nine-three-heads", "biases", "qwen2", "qwen3"])
    def test_are_those_of_transformers(self, variant: str) -> None:
        torch = pytest.importorskip("torch")
        from transformers import AutoConfig, AutoModelForCausalLM

        kind, options = tiny.VARIANTS[variant]
        theirs = AutoConfig.for_model(kind, **{**tiny.SIZES, **options})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
        expected = {
            name: (module.out_features, module.in_features, module.bias is not None)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        }
        found = ModelConfig.from_hf(theirs.to_dict()).linears()
        assert {
            name: (linear.out_features, linear.in_features, linear.bias)
            for name, linear in found.items()
        } == expected
