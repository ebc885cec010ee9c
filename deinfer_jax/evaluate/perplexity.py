"""Perplexity of a text under a model, in windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from deinfer_jax.engine.llm import LLM, show_progress

__all__ = ["Perplexity", "perplexity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Result of :func:`perplexity`.

    Attributes:
        value: exp of the mean negative log-likelihood.
        nll: that mean, in nats a token.
        predictions: tokens that were predicted.
        windows: sequences that were run.
    """

    value: float
    nll: float
    predictions: int
    windows: int

    def __float__(self) -> float:
        return self.value


def perplexity(
    llm: LLM,
    text: str,
    *,
    window: int = 1024,
    stride: int | None = None,
    predictions: int | None = None,
    progress: bool | None = None,
) -> Perplexity:
    """exp(−mean log p(token | tokens before it in its window)).

    The text is tokenised once, without special tokens, and cut into windows. A token is predicted
    once, in the first window that has it; the first token of the text never is, nor, where windows
    do not overlap, the first of a window.

    Args:
        llm: the model, with a tokenizer.
        text: what is predicted.
        window: tokens of a sequence, at most ``llm.max_context``.
        stride: from one window's start to the next's; None = ``window``, no overlap. A smaller
            stride gives later tokens more context, at more cost.
        predictions: stop after so many; None = the whole text. Must be reached.
        progress: a bar with tokens a second; None = where stderr is a terminal.

    Raises:
        ValueError: a parameter is off, the text is too short, or the model gives something that is
            not a number (the window and the token are named; nothing is skipped).
    """
    stride = window if stride is None else stride
    if not 2 <= window <= llm.max_context:
        raise ValueError(
            f"window: expected 2 to max_context = {llm.max_context} tokens, got {window}"
        )
    if not 1 <= stride <= window:
        raise ValueError(f"stride: expected 1 to the window's {window} tokens, got {stride}")
    if predictions is not None and predictions < 1:
        raise ValueError(f"predictions: expected a positive number or None, got {predictions}")
    if llm.tokenizer is None:
        raise ValueError("perplexity: expected a model with a tokenizer, this one has none")
    tokens = llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    total = sum(count for _, _, count in _windows(len(tokens), window, stride))
    if total < (predictions or 1):
        raise ValueError(
            f"perplexity: expected a text with at least {predictions or 1} predictions, got "
            f"{total} ({len(tokens)} tokens)"
        )
    left = total if predictions is None else predictions
    nll, windows = 0.0, 0
    bar = tqdm(total=left, desc="perplexity", unit="token", disable=not show_progress(progress))
    with bar:
        for start, end, count in _windows(len(tokens), window, stride):
            scores = llm.score(tokens[start:end])[-count:][:left].astype(np.float64)
            bad = np.flatnonzero(~np.isfinite(scores))
            if bad.size:
                at = end - count + int(bad[0])
                raise ValueError(
                    f"perplexity: the log-probability of token {at} (window {windows}, tokens "
                    f"{start} to {end - 1}) is {scores[bad[0]]}"
                )
            nll -= float(scores.sum())
            left -= len(scores)
            windows += 1
            bar.update(len(scores))
            if left == 0:
                break
    predicted = total if predictions is None else predictions
    mean = nll / predicted
    return Perplexity(value=math.exp(mean), nll=mean, predictions=predicted, windows=windows)


def _windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, tokens predicted) of each window; the predicted ones are its last."""
    predicted = 1  # tokens that need no prediction any more; the first cannot have one
    for start in range(0, tokens, stride):
        end = min(start + window, tokens)
        count = end - max(predicted, start + 1)
        if count > 0:
            yield start, end, count
        predicted = end
        if end == tokens:
            return
