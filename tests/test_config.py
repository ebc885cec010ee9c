"""Configurations: RoPE frequencies against transformers, config.json of transformers 4 and 5."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax.numpy as jnp
import jaxtyping
import pytest

from deinfer_jax import LowRank, ModelConfig, RopeConfig, Slice
from tests.test_rope_config import BASE, SCALINGS


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of any type, as in a user's process: annotations are not checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class TestFromHf:
    def test_sizes(self) -> None:
        found = config()
        sizes = dict(
            vocab_size=160,
            hidden_size=48,
            intermediate_size=80,
            num_layers=3,
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            max_position=96,
        )
        assert {name: getattr(found, name) for name in sizes} == sizes

    def test_head_dim_is_read(self) -> None:
        assert config(head_dim=20).head_dim == 20

    def test_no_kv_heads_means_as_many_as_query_heads(self) -> None:
        assert config(num_key_value_heads=None).num_kv_heads == 6

    def test_other_fields(self) -> None:
        found = config(
            hidden_act="gelu", rms_norm_eps=1e-4, tie_word_embeddings=True, bos_token_id=5
        )
        assert found.hidden_act == "gelu"
        assert found.rms_norm_eps == 1e-4
        assert found.tie_embeddings
        assert found.bos_token_id == 5

    @pytest.mark.parametrize(("written", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
    def test_end_tokens(self, written: Any, ids: tuple[int, ...]) -> None:
        assert config(eos_token_id=written).eos_token_ids == ids

    @pytest.mark.parametrize(
        "written", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}]
    )
    def test_dtype(self, written: dict[str, str]) -> None:
        assert config(**written).dtype == "bfloat16"

    @pytest.mark.parametrize(
        ("changes", "biases"),
        [
            ({}, (False, False, False)),
            ({"attention_bias": True}, (True, True, False)),
            ({"mlp_bias": True}, (False, False, True)),
            ({"model_type": "mistral", "attention_bias": True}, (False, False, False)),
            ({"model_type": "qwen2"}, (True, False, False)),
            ({"model_type": "qwen3"}, (False, False, False)),
            ({"model_type": "qwen3", "attention_bias": True}, (True, True, False)),
        ],
    )
    def test_biases(self, changes: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
        found = config(**changes)
        assert (found.qkv_bias, found.o_bias, found.mlp_bias) == biases

    @pytest.mark.parametrize(
        ("model_type", "normed"),
        [("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", True)],
    )
    def test_qk_norm(self, model_type: str, normed: bool) -> None:
        assert config(model_type=model_type).qk_norm == normed

    # Every field that a family may leave out, one at a time and all together.
    @pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize(
        "written",
        [
            {},
            {"num_attention_heads": 64},
            {"head_dim": 16},
            {"num_key_value_heads": 4},
            {"max_position_embeddings": 8192},
            {"sliding_window": 7},
            {"sliding_window": None},
            {"rope_theta": 5e5},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            {"tie_word_embeddings": True},
            {"use_sliding_window": True},
            {"use_sliding_window": True, "sliding_window": 7},
            {"use_sliding_window": True, "max_window_layers": 3},
        ],
        ids=str,
    )
    def test_fields_that_are_left_out(self, model_type: str, written: dict[str, Any]) -> None:
        pytest.importorskip("torch")
        from transformers import AutoConfig

        sizes: dict[str, Any] = dict(
            vocab_size=160,
            hidden_size=4096,
            intermediate_size=80,
            num_hidden_layers=30,
            num_attention_heads=32,
        )
        sizes |= written
        theirs = AutoConfig.for_model(model_type, **copy.deepcopy(sizes))  # it writes into them
        found = ModelConfig.from_hf({"model_type": model_type, **sizes})
        heads = theirs.num_attention_heads
        assert found.num_heads == heads
        assert found.num_kv_heads == theirs.num_key_value_heads
        assert found.head_dim == (getattr(theirs, "head_dim", None) or 4096 // heads)
        assert found.hidden_act == theirs.hidden_act
        assert found.rms_norm_eps == theirs.rms_norm_eps
        assert found.max_position == theirs.max_position_embeddings
        assert found.tie_embeddings == theirs.tie_word_embeddings
        bias = getattr(theirs, "attention_bias", model_type == "qwen2")
        assert (found.qkv_bias, found.mlp_bias) == (bias, getattr(theirs, "mlp_bias", False))
        assert found.o_bias == getattr(theirs, "attention_bias", False)
        parameters = theirs.rope_parameters
        assert (found.rope.theta, found.rope.kind) == (
            parameters["rope_theta"],
            parameters["rope_type"],
        )
        if found.rope.kind != "default":
            assert found.rope.original_max_position == theirs.max_position_embeddings
        window = getattr(theirs, "sliding_window", None)
        if model_type == "mistral":
            assert found.windows == (window,) * 30
        else:
            kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 30
            assert found.windows == tuple(
                window if kind == "sliding_attention" else None for kind in kinds
            )

    def test_mistral_has_a_window_unless_it_says_otherwise(self) -> None:
        left_out = config(model_type="mistral")
        assert left_out.windows == (4096,) * 3
        assert config(model_type="mistral", sliding_window=None).windows == (None,) * 3

    def test_mistral_has_eight_kv_heads_unless_it_says_otherwise(self) -> None:
        sizes = {**BASE, "model_type": "mistral", "num_attention_heads": 24}
        del sizes["num_key_value_heads"]
        assert ModelConfig.from_hf(sizes).num_kv_heads == 8
        assert ModelConfig.from_hf({**sizes, "num_key_value_heads": None}).num_kv_heads == 24

    @pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
    def test_what_transformers_writes(self, model_type: str) -> None:
        pytest.importorskip("torch")
        from transformers import AutoConfig

        sizes = {name: value for name, value in BASE.items() if name != "model_type"}
        written = AutoConfig.for_model(
            model_type, **sizes, head_dim=8, rope_theta=5e5, eos_token_id=[2, 3]
        ).to_dict()
        found = ModelConfig.from_hf(written)
        assert (found.head_dim, found.rope.theta, found.eos_token_ids) == (8, 5e5, (2, 3))


class TestWindows:
    def test_llama_has_none(self) -> None:
        assert config(sliding_window=7).windows == (None, None, None)

    def test_mistral_has_one_in_every_layer(self) -> None:
        assert config(model_type="mistral", sliding_window=7).windows == (7, 7, 7)

    def test_mistral_without(self) -> None:
        assert config(model_type="mistral", sliding_window=None).windows == (None, None, None)

    @pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
    def test_qwen_from_a_layer_on(self, model_type: str) -> None:
        found = config(
            model_type=model_type, use_sliding_window=True, sliding_window=7, max_window_layers=2
        )
        assert found.windows == (None, None, 7)

    def test_qwen_by_layer_type(self) -> None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        found = config(
            model_type="qwen2",
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=2,
            layer_types=kinds,
        )
        assert found.windows == (7, None, 7)

    def test_qwen_switched_off(self) -> None:
        found = config(
            model_type="qwen2", use_sliding_window=False, sliding_window=7, max_window_layers=0
        )
        assert found.windows == (None, None, None)

    def test_layer_types_of_another_model(self) -> None:
        with pytest.raises(ValueError, match="windows: expected 3, one a layer, got 2"):
            config(
                model_type="qwen2",
                use_sliding_window=True,
                sliding_window=7,
                layer_types=["full_attention"] * 2,
            )


class TestErrors:
    def test_unknown_model_type_lists_the_supported(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"'bloom' .*BloomForCausalLM.*supported: llama, mistral, qwen2, qwen3",
        ):
            config(model_type="bloom", architectures=["BloomForCausalLM"])

    def test_no_model_type(self) -> None:
        with pytest.raises(ValueError, match="model_type None .*supported: llama"):
            ModelConfig.from_hf({})

    def test_every_missing_field_is_named(self) -> None:
        with pytest.raises(ValueError, match="llama model lacks vocab_size, num_hidden_layers"):
            config(vocab_size=None, num_hidden_layers=None)

    def test_quantised(self) -> None:
        with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
            config(quantization_config={"quant_method": "gptq"})

    def test_rope_kind(self) -> None:
        with pytest.raises(
            ValueError, match="'longrope' is not supported; expected one of default"
        ):
            config(rope_scaling={"rope_type": "longrope"})

    @pytest.mark.parametrize(
        "written",
        [
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default"}},
        ],
        ids=str,
    )
    def test_part_of_a_head_turns(self, written: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="partial_rotary_factor: expected 1 .*got 0.5"):
            config(**written)

    @pytest.mark.parametrize("written", [1, 1.0, None])
    def test_all_of_a_head_turns(self, written: float | None) -> None:
        assert config(partial_rotary_factor=written) == config()

    @pytest.mark.parametrize(
        "written",
        [
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                }
            },
            {"rope_scaling": {"rope_type": "default", "full_attention": {"factor": 2.0}}},
        ],
        ids=["one layer type", "two layer types", "rope_scaling"],
    )
    def test_rope_by_layer_type(self, written: dict[str, Any]) -> None:
        with pytest.raises(
            ValueError,
            match="rope parameters by layer type are not supported, got .*full_attention",
        ):
            config(**written)

    @pytest.mark.parametrize("value", [0.0, -1e-6, float("nan"), "1e-5", None, 1, True])
    def test_rms_norm_eps_must_be_a_positive_float(self, unchecked, value: Any) -> None:
        with pytest.raises(
            ValueError, match=f"rms_norm_eps: expected a positive float, got {value!r}"
        ):
            config(rms_norm_eps=value)

    @pytest.mark.parametrize(
        ("written", "bad"),
        [
            (160, "160"),
            (-1, "-1"),
            ([2, 160], "160"),
            ("2", "'2'"),
            ([2, None], "None"),
            (2.0, "2.0"),
        ],
        ids=str,
    )
    def test_end_tokens_must_be_words(self, unchecked, written: Any, bad: str) -> None:
        with pytest.raises(
            ValueError, match=f"eos_token_ids: expected ids from 0 to 159, got {bad}$"
        ):
            config(eos_token_id=written)

    @pytest.mark.parametrize(
        ("written", "name"), [("head_dim", "head_dim"), ("num_key_value_heads", "num_kv_heads")]
    )
    def test_zero_is_not_taken_for_left_out(self, written: str, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}: expected a positive integer, got 0"):
            config(**{written: 0})

    def test_heads_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple of num_kv_heads, got 6 and 4"):
            config(num_key_value_heads=4)

    def test_odd_head_width(self) -> None:
        with pytest.raises(ValueError, match="even width, got 7"):
            config(head_dim=7)

    @pytest.mark.parametrize("value", [0, -3, True])
    def test_sizes_must_be_positive(self, value: int) -> None:
        with pytest.raises(ValueError, match=f"num_layers: expected a positive.*got {value}"):
            config(num_hidden_layers=value)

    def test_dtype(self) -> None:
        with pytest.raises(ValueError, match="float32, bfloat16 or float16, got 'int8'"):
            config(dtype="int8")

    def test_windows_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="positive sizes or None"):
            config(model_type="mistral", sliding_window=0)

    def test_unknown_field(self) -> None:
        with pytest.raises(TypeError, match="hidden"):
            config().replace(hidden=3)


class TestValues:
    def test_equal_configs_hash_alike(self) -> None:
        scaling = SCALINGS["yarn"]
        assert hash(config(rope_scaling=scaling)) == hash(config(rope_scaling=scaling))

    def test_a_config_with_every_kind_of_field_is_hashable(self) -> None:
        piece = Slice(v="v", offset=0, rank=3)
        full = config(eos_token_id=[1, 2], model_type="mistral", sliding_window=7).replace(
            rope=RopeConfig(divisors=(1.0, 2.0, 3.0, 4.0)), low_rank=LowRank((("a", piece),))
        )
        assert len({full, full.replace(), config()}) == 2

    def test_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().vocab_size = 3  # pyright: ignore[reportAttributeAccessIssue]

    def test_replace_checks_again(self) -> None:
        with pytest.raises(ValueError, match="vocab_size"):
            config().replace(vocab_size=0)

    def test_replace_the_number_of_layers(self) -> None:
        assert config().replace(num_layers=5).windows == (None,) * 5

    def test_replace_the_number_of_layers_of_a_model_with_one_window(self) -> None:
        windowed = config(model_type="mistral", sliding_window=7)
        assert windowed.replace(num_layers=5).windows == (7,) * 5
        assert windowed.replace(num_layers=2, windows=(7, None)).windows == (7, None)

    def test_replace_the_number_of_layers_of_a_model_with_windows(self) -> None:
        with pytest.raises(ValueError, match="windows: expected 2, one a layer, got 3"):
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            windowed = dict(use_sliding_window=True, sliding_window=7, layer_types=kinds)
            config(model_type="qwen2", **windowed).replace(num_layers=2)

    def test_low_rank_by_module(self) -> None:
        piece = Slice(v="v", offset=0, rank=3)
        low_rank = LowRank((("model.layers.0.mlp.up_proj", piece),))
        assert low_rank.get("model.layers.0.mlp.up_proj") == piece
        assert low_rank.get("model.layers.0.mlp.up") is None


class TestBuild:
    """``models.build`` refuses what its model does not have."""

    def build(self, low_rank: LowRank) -> Any:
        from deinfer_jax.models import build
        from deinfer_jax.parallel.strategy import Single

        return build(
            config().replace(low_rank=low_rank),
            max_context=32,
            strategy=Single(),
            dtype=jnp.dtype("float32"),
        )

    @pytest.mark.parametrize(
        "module",
        [
            "model.layers.3.mlp.up_proj",
            "model.layers.0.mlp.up",
            "model.layers.0.self_attn.q_norm",
            "up_proj",
            "lm_head",
        ],
    )
    def test_a_module_that_it_lacks(self, module: str) -> None:
        good = ("model.layers.0.mlp.up_proj", Slice(v="v", offset=0, rank=3))
        with pytest.raises(ValueError, match=f"low_rank: the model has no modules {module}$"):
            self.build(LowRank((good, (module, Slice(v="w", offset=0, rank=3)))))

    def test_all_that_it_lacks_are_named(self) -> None:
        pieces = (("a", Slice(v="v", offset=0, rank=3)), ("b", Slice(v="w", offset=0, rank=3)))
        with pytest.raises(ValueError, match="no modules a, b$"):
            self.build(LowRank(pieces))

    @pytest.mark.parametrize(
        "module",
        ["mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"]
        + [f"self_attn.{name}_proj" for name in "qkvo"],
    )
    def test_modules_that_it_has(self, module: str) -> None:
        name = f"model.layers.2.{module}"
        self.build(LowRank(((name, Slice(v="v", offset=0, rank=3)),)))
