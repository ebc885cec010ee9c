"""RoPE frequencies of every scaling against transformers, and what a config of them refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deinfer_jax import ModelConfig, RopeConfig

BASE: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=96,
)
THETA = 20000.0

# kind: its parameters as transformers writes them
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": dict(rope_type="linear", factor=3.0),
    "dynamic": dict(rope_type="dynamic", factor=2.5),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=40,
    ),
    "llama3, other bounds": dict(
        rope_type="llama3",
        factor=3.0,
        low_freq_factor=0.5,
        high_freq_factor=7.0,
        original_max_position_embeddings=64,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=24),
    "yarn, attention factor": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=24, attention_factor=1.7
    ),
    "yarn, betas": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=600,
        beta_fast=20.0,
        beta_slow=2.0,
    ),
    "yarn, mscale": dict(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=24,
        mscale=0.7,
        mscale_all_dim=1.3,
    ),
    "yarn, not truncated": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=600, truncate=False
    ),
    "yarn, factor below 1": dict(
        rope_type="yarn", factor=0.5, original_max_position_embeddings=192
    ),
}


class TestFrequencies:
    @pytest.mark.parametrize("head_dim", [8, 64, 128])
    @pytest.mark.parametrize("name", SCALINGS)
    def test_against_transformers(self, name: str, head_dim: int) -> None:
        pytest.importorskip("torch")
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = {**SCALINGS[name], "rope_theta": THETA}
        sizes = {**BASE, "head_dim": head_dim, "rope_parameters": parameters}
        theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            LlamaConfig(**{k: v for k, v in sizes.items() if k != "model_type"}), seq_len=200
        )
        ours, our_factor = ModelConfig.from_hf(sizes).rope.frequencies(head_dim, 200)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
        assert our_factor == pytest.approx(factor, rel=1e-12)

    @pytest.mark.parametrize("head_dim", [2, 8, 128])
    def test_default(self, head_dim: int) -> None:
        ours, factor = RopeConfig(theta=THETA).frequencies(head_dim, 100)
        expected = [THETA ** (-2 * j / head_dim) for j in range(head_dim // 2)]
        np.testing.assert_allclose(ours, expected, rtol=1e-7)
        assert factor == 1.0

    def test_dtype(self) -> None:
        assert RopeConfig().frequencies(8, 100)[0].dtype == np.float32

    def test_dynamic_within_the_trained_context(self) -> None:
        scaled = RopeConfig(kind="dynamic", factor=2.0, original_max_position=96)
        np.testing.assert_array_equal(
            scaled.frequencies(8, 50)[0], RopeConfig().frequencies(8, 50)[0]
        )

    def test_dynamic_depends_on_the_context(self) -> None:
        scaled = RopeConfig(kind="dynamic", factor=2.0, original_max_position=96)
        assert scaled.frequencies(8, 192)[0][-1] < scaled.frequencies(8, 100)[0][-1]

    def test_divisors(self) -> None:
        divided, _ = RopeConfig(divisors=(1.0, 2.0, 4.0)).frequencies(6, 100)
        plain, _ = RopeConfig().frequencies(6, 100)
        np.testing.assert_allclose(divided, plain / [1, 2, 4], rtol=1e-6)

    def test_wrong_number_of_divisors(self) -> None:
        with pytest.raises(ValueError, match=r"divisors: expected 3 \(half a head\), got 2"):
            RopeConfig(divisors=(1.0, 2.0)).frequencies(6, 100)


class TestRopeConfig:
    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="default, linear, dynamic, llama3, yarn"):
            RopeConfig.from_hf({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}})

    @pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn"])
    def test_kinds_that_need_the_original_context(self, kind: Any) -> None:
        with pytest.raises(ValueError, match=f"'{kind}' needs original_max_position"):
            RopeConfig(kind=kind, factor=2.0)

    @pytest.mark.parametrize(("theta", "factor"), [(1.0, 2.0), (0.0, 2.0), (1e4, 0.0), (1e4, -1.0)])
    def test_bad_numbers(self, theta: float, factor: float) -> None:
        with pytest.raises(ValueError, match=f"got {theta} and {factor}"):
            RopeConfig(theta=theta, factor=factor)

    def test_transformers_4(self) -> None:
        old = {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
        assert RopeConfig.from_hf(old) == RopeConfig(
            theta=5e5,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        )

    def test_transformers_4_with_the_older_key(self) -> None:
        found = RopeConfig.from_hf({"rope_scaling": {"type": "linear", "factor": 2}})
        assert (found.kind, found.factor, found.theta) == ("linear", 2.0, 10000.0)

    def test_transformers_4_without_scaling(self) -> None:
        assert RopeConfig.from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(
            theta=1e6
        )

    def test_transformers_5(self) -> None:
        new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}
        found = RopeConfig.from_hf(new)
        assert (found.kind, found.factor, found.theta) == ("linear", 4.0, 1e6)

    def test_transformers_5_without_scaling(self) -> None:
        new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        assert RopeConfig.from_hf(new) == RopeConfig(theta=1e6)

    def test_nothing_written(self) -> None:
        assert RopeConfig.from_hf({}) == RopeConfig(theta=10000.0)

    def test_yarn_factor_from_the_contexts(self) -> None:
        params = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
        found = RopeConfig.from_hf({"max_position_embeddings": 96, "rope_parameters": params})
        assert found.factor == 3.0

    @pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
    def test_missing_factor(self, kind: str) -> None:
        with pytest.raises(ValueError, match="factor"):
            RopeConfig.from_hf({"max_position_embeddings": 96, "rope_scaling": {"type": kind}})
