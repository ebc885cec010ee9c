"""A tiny random model for the engine's tests."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import deinfer_jax
from deinfer_jax import ModelConfig

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    eos_token_ids=(2,),
)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return CONFIG


@pytest.fixture(scope="module")
def load_tiny():
    """Loads the tiny model; what was loaded is closed at the end of the module."""
    loaded = []

    def load(**options: Any) -> deinfer_jax.LLM:
        arguments: dict[str, Any] = {
            "max_batch": 4,
            "max_context": 128,
            "prefill_chunk": 32,
        } | options
        llm = deinfer_jax.load(arguments.pop("config", CONFIG), **arguments)
        # Random weights are small; larger ones make attention sharp and continuations varied.
        weights = llm.runner.weights
        llm.runner.weights = jax.tree.map(lambda w: 8 * w if w.ndim > 1 else w, weights)
        loaded.append(llm)
        return llm

    yield load
    for llm in loaded:
        llm.close()
