"""Perplexity against torch's cross-entropy, window by window, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import cli
from tests import tiny

pytest.importorskip("torch", reason="the independent implementation is transformers on torch")


class Letters:
    """A tokenizer of one token a character, ids 3 and up."""

    chat_template = None
    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 150 for letter in text]}


TEXT = "".join(chr(97 + number % 26) for number in np.random.default_rng(0).integers(0, 26, 203))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[deinfer_jax.LLM, Any]]:
    directory = tmp_path_factory.mktemp("gqa")
    theirs = tiny.make("gqa", directory)
    with deinfer_jax.load(directory, prefill_chunk=16) as llm:
        llm.tokenizer = Letters()
        yield llm, theirs


def log_probabilities(theirs: Any, tokens: list[int]) -> np.ndarray:
    """float64 [T − 1], by torch."""
    import torch

    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0].double()
    chosen = torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return chosen[:, 0].numpy()


def test_score_equals_torch(pair: tuple[deinfer_jax.LLM, Any]) -> None:
    llm, theirs = pair
    tokens = Letters()(TEXT[:75])["input_ids"]
    np.testing.assert_allclose(llm.score(tokens), log_probabilities(theirs, tokens), atol=2e-5)


def test_score_needs_two_tokens(pair: tuple[deinfer_jax.LLM, Any]) -> None:
    with pytest.raises(ValueError, match="expected at least two tokens"):
        pair[0].score([5])


@pytest.mark.parametrize(
    ("window", "stride", "predictions"),
    [(32, None, None), (32, 8, None), (33, 17, None), (96, 1, 60), (32, None, 70), (2, None, None)],
)
def test_every_token_is_predicted_once_in_its_first_window(
    pair: tuple[deinfer_jax.LLM, Any], window: int, stride: int | None, predictions: int | None
) -> None:
    llm, theirs = pair
    tokens = Letters()(TEXT)["input_ids"]
    # Token by token: the first window [start, start + window) that holds it behind its first place.
    expected, step = [], stride or window
    for position in range(1, len(tokens)):
        starts = range(0, position, step)
        holders = [start for start in starts if start < position < start + window]
        if holders:
            context = tokens[holders[0] : position + 1]
            expected.append(log_probabilities(theirs, context)[-1])
    expected = expected[:predictions]
    found = deinfer_jax.perplexity(
        llm, TEXT, window=window, stride=stride, predictions=predictions, progress=False
    )
    assert found.predictions == len(expected)
    assert found.nll == pytest.approx(-np.mean(expected), rel=1e-5)
    assert float(found) == found.value == pytest.approx(math.exp(found.nll))


def test_windows_are_counted(pair: tuple[deinfer_jax.LLM, Any]) -> None:
    found = deinfer_jax.perplexity(pair[0], TEXT[:65], window=32, progress=False)
    # The third window is a single token, which nothing predicts.
    assert (found.windows, found.predictions) == (2, 62)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, r"window: expected 2 to max_context = 96 tokens, got 1"),
        ({"window": 97}, r"window: expected 2 to max_context = 96 tokens, got 97"),
        ({"window": 32, "stride": 33}, r"stride: expected 1 to the window's 32 tokens, got 33"),
        ({"window": 32, "stride": 0}, r"stride: expected 1 to"),
        ({"window": 32, "predictions": 0}, r"predictions: expected a positive number"),
        ({"window": 32, "predictions": 10**6}, r"at least 1000000 predictions, got 196 \(203 tok"),
    ],
)
def test_bad_parameters(
    pair: tuple[deinfer_jax.LLM, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        deinfer_jax.perplexity(pair[0], TEXT, **options)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_too_short_to_predict_anything(pair: tuple[deinfer_jax.LLM, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"at least 1 predictions, got 0"):
        deinfer_jax.perplexity(pair[0], text, window=32)


def test_what_is_not_a_number_is_an_error_that_names_the_token(
    pair: tuple[deinfer_jax.LLM, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = pair
    real = llm.runner.score

    def broken(tokens: Any, targets: Any, start: int, pages: Any) -> tuple[np.ndarray, np.ndarray]:
        scores, greedy = real(tokens, targets, start, pages)
        scores = scores.copy()
        if tokens[0] == Letters()(TEXT[32:])["input_ids"][0] and start == 0:
            scores[4] = np.nan  # the fifth prediction of the second window: token 37
        return scores, greedy

    monkeypatch.setattr(llm.runner, "score", broken)
    with pytest.raises(ValueError, match=r"token 37 \(window 1, tokens 32 to 63\) is nan"):
        deinfer_jax.perplexity(llm, TEXT, window=32, progress=False)


def test_a_model_without_tokenizer(pair: tuple[deinfer_jax.LLM, Any]) -> None:
    llm, _ = pair
    llm.tokenizer, kept = None, llm.tokenizer
    try:
        with pytest.raises(ValueError, match="expected a model with a tokenizer"):
            deinfer_jax.perplexity(llm, TEXT, window=32)
    finally:
        llm.tokenizer = kept


def test_smollm2_on_wikitext(
    smollm2_gguf: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(data_dir / "wikitext2_test.txt")
    options = ["--window", "512", "--predictions", "4088"]
    assert cli.main(["perplexity", str(smollm2_gguf), text, *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("perplexity 27.6") and "4088 predictions in 8 windows of 512" in said


def test_the_command_says_what_is_wrong_with_the_text(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["perplexity", str(smollm2_gguf), str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err
