"""Models of transformers, decomposed, and what they should give."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import tiny

pytest.importorskip("torch", reason="the reference is PyTorch")


class Expected(NamedTuple):
    """A checkpoint, prompts and continuations, and transformers' logits [P + n, W] of each."""

    path: Path
    prompts: list[list[int]]
    forced: np.ndarray  # [n, B]
    logits: list[np.ndarray]


def make(variant: str, layouts: tuple[str, ...] | None, folder: Path) -> Expected:
    """A tiny model of a variant, dense or with the layouts of its layers."""
    theirs: Any = tiny.make(variant, folder / "dense")
    path = folder / "dense"
    if layouts is not None:
        path = folder / "decomposed"
        theirs = tiny.decompose(theirs, folder / "dense", path, tiny.groups(*layouts))
    prompts = [tiny.random_tokens(length, seed=length).tolist() for length in (37, 20)]
    forced = np.stack([tiny.random_tokens(9, seed=seed) for seed in (3, 4)], axis=1)
    logits = [
        tiny.torch_logits(theirs, np.concatenate([prompt, tokens]))
        for prompt, tokens in zip(prompts, forced.T, strict=True)
    ]
    return Expected(path, prompts, forced, logits)


def difference(expected: Expected, values: Any) -> float:
    """Largest relative norm of prefill's and decode's logits against transformers'."""
    found = 0.0
    for row, (prompt, theirs) in enumerate(zip(expected.prompts, expected.logits, strict=True)):
        ours = np.concatenate([values.prefill[row], values.decode[:, row]])
        for part in (slice(len(prompt)), slice(len(prompt), None)):
            found = max(
                found, np.linalg.norm(ours[part] - theirs[part]) / np.linalg.norm(theirs[part])
            )
    return float(found)
