"""Tiny dense models with a tokenizer of words, a text to calibrate on, and finished runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deinfer_jax.decompose.report import Report
from deinfer_jax.decompose.run import decompose
from tests import tiny
from tests.decompose.reading import CASES, TOKENS, WINDOW, tensors_of

WORDS = 160


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense model on disk."""

    path: Path
    model: Any  # torch

    def tensors(self) -> dict[str, np.ndarray]:
        return tensors_of(self.path)


@dataclasses.dataclass(frozen=True)
class Run:
    """A decomposition of ``dense`` at ``path``."""

    dense: Dense
    path: Path
    report: Report

    def tensors(self) -> dict[str, np.ndarray]:
        return tensors_of(self.path)


def save_tokenizer(directory: Path) -> None:
    """Word ``w17`` is id 17."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, WORDS)}
    inner: Any = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(directory)


def make_dense(variant: str, directory: Path, **changes: Any) -> Dense:
    model = tiny.make(variant, directory, max_position_embeddings=WINDOW, **changes)
    save_tokenizer(directory)
    return Dense(directory, model)


@pytest.fixture(scope="session")
def token_ids() -> np.ndarray:
    """What the text says."""
    return tiny.random_tokens(600, seed=5)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory, token_ids: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in token_ids), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def dense_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Dense]:
    """The dense model of a variant."""

    @cache
    def make(variant: str) -> Dense:
        return make_dense(variant, tmp_path_factory.mktemp("models") / variant)

    return make


@pytest.fixture(scope="session")
def gqa(dense_of: Callable[[str], Dense]) -> Dense:
    return dense_of("gqa")


@pytest.fixture(scope="session")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, dense_of: Callable[[str], Dense], text: Path
) -> Callable[..., Run]:
    """A finished run of a variant with options; the same again is not run again."""

    @cache
    def run(variant: str, **options: Any) -> Run:
        dense = dense_of(variant)
        path = tmp_path_factory.mktemp("runs") / "model"
        defaults: dict[str, Any] = dict(calibration=text, calibration_tokens=TOKENS, progress=False)
        return Run(dense, path, decompose(dense.path, path, **(defaults | options)))

    return run


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, run_of: Callable[..., Run]) -> Run:
    """A run of each of ``CASES``."""
    return run_of(**CASES[request.param])
