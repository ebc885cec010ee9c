"""What the tests of generation share: prompts, settings, short ways to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, ModelConfig

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
GREEDY: dict[str, Any] = dict()
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=3)
FILTERED: dict[str, Any] = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=4)
SETTINGS = pytest.mark.parametrize(
    "setting", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"]
)
LENGTHS = (1, 3, 5, 16, 17, 31, 32, 33, 48, 70, 90)


def prompts() -> list[list[int]]:
    """Eleven prompts of lengths around pages and chunks; words from 60 on do not occur."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, length).tolist() for length in LENGTHS]


def load(**options: Any) -> LLM:
    """The tiny model, with options of its own."""
    arguments: dict[str, Any] = {
        "max_batch": 4,
        "max_context": 128,
        "prefill_chunk": 32,
    } | options
    llm = deinfer_jax.load(arguments.pop("config", CONFIG), **arguments)
    # Random weights are small; larger ones make attention sharp and continuations varied.
    weights = llm.runner.weights
    llm.runner.weights = jax.tree.map(lambda w: 8 * w if w.ndim > 1 else w, weights)
    return llm


def check_idle(llm: LLM) -> None:
    scheduler = llm.core.scheduler
    scheduler.check_integrity()
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def run(llm: LLM, what: Any, new: int = 12, **setting: Any) -> list[tuple[int, ...]]:
    return tokens(deinfer_jax.generate(llm, what, max_new_tokens=new, ignore_eos=True, **setting))


@dataclass(frozen=True)
class Ending:
    """A prompt whose greedy continuation has a new word at the fourth place; ``other`` is a prompt
    in whose continuation that word does not occur."""

    prompt: list[int]
    ids: tuple[int, ...]
    other: list[int]

    @property
    def word(self) -> int:
        return self.ids[3]


def plant_nan(llm: LLM, word: int) -> None:
    """Breaks a word's row of the embedding; the head is another table and stays whole."""
    weights = llm.runner.weights
    table = weights["embedding"]["weight"]
    weights["embedding"]["weight"] = table.at[word].set(jnp.nan)
