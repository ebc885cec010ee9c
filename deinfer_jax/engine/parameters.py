"""How continuations are drawn, checked once for all prompts of a call."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from deinfer_jax.engine.llm import LLM
from deinfer_jax.engine.request import Sampling
from deinfer_jax.engine.sampler import MOST_LOGPROBS

__all__ = ["Options", "Parameters", "is_int", "is_list", "seeds_of"]


class Options(TypedDict, total=False):
    """What :func:`deinfer_jax.generate` takes besides model, prompts and ``stream``, for its
    overloads."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | Sequence[int] | np.ndarray | None
    n: int
    stop: str | Collection[str] | None
    stop_token_ids: Collection[int] | None
    ignore_eos: bool
    logprobs: int | None
    progress: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments of :func:`deinfer_jax.generate`, by the same names.

    Raises:
        ValueError: one is wrong; expected and got are named.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    n: int
    stop: str | Collection[str] | None
    stop_token_ids: Collection[int] | None
    ignore_eos: bool
    logprobs: int | None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n"):
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        most = float(np.finfo(np.float32).max)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= most:
            raise ValueError(
                f"temperature: expected a float32 number >= 0, got {self.temperature!r}"
            )
        if not is_int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k: expected an integer >= 0, got {self.top_k!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p!r}")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a number in [0, 1], got {self.min_p!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: expected True or False, got {self.ignore_eos!r}")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(f"stop: expected a string or several, none empty, got {self.stop!r}")
        if self.logprobs is not None and (
            not is_int(self.logprobs) or not 0 <= self.logprobs <= MOST_LOGPROBS
        ):
            raise ValueError(
                f"logprobs: expected None or an integer from 0 to {MOST_LOGPROBS}, "
                f"got {self.logprobs!r}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end a continuation."""
        if self.stop is None:
            return ()
        if isinstance(self.stop, str):
            return (self.stop,)
        if not is_list(self.stop) and not isinstance(self.stop, Set):
            raise ValueError(f"stop: expected a string or several, got {self.stop!r}")
        return tuple(self.stop)

    def sampling(self, llm: LLM) -> Sampling:
        """For requests to a model; without seed.

        Raises:
            ValueError: what only the model can tell is wrong.
        """
        if self.stop_strings and llm.tokenizer is None:
            raise ValueError("stop: expected none, since this model has no tokenizer")
        words = llm.config.vocab_size
        return Sampling(
            max_new_tokens=int(self.max_new_tokens),
            temperature=float(self.temperature),
            top_k=min(int(self.top_k), words),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            eos_token_ids=frozenset(() if self.ignore_eos else llm.eos_token_ids),
            stop_token_ids=_stop_ids(self.stop_token_ids, words),
            logprobs=None if self.logprobs is None else min(int(self.logprobs), words),
        )


def seeds_of(seed: Any, count: int) -> list[int]:
    """A seed a prompt, from one for all or one each; None = another one for each in every call.

    Raises:
        ValueError: another number of them, or one that is none.
    """
    if seed is None:
        return [secrets.randbits(64) for _ in range(count)]
    seeds = list(seed) if is_list(seed) or isinstance(seed, range) else [seed] * count
    if len(seeds) != count:
        raise ValueError(f"seed: expected one, or one a prompt ({count}), got {len(seeds)}")
    bad = [
        f"{value!r} for prompt {index}"
        for index, value in enumerate(seeds)
        if not is_int(value) or not 0 <= int(value) < 2**64
    ]
    if bad:
        raise ValueError(f"seed: expected integers from 0 to 2^64 - 1, got {', '.join(bad)}")
    return [int(value) for value in seeds]


def is_int(value: object) -> bool:
    """An integer that is no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """A list, a tuple or an array with an axis."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple)


def _is_number(value: object) -> bool:
    real = int | float | np.integer | np.floating
    return isinstance(value, real) and not isinstance(value, bool)


def _stop_ids(stop_token_ids: Any, words: int) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset()
    if not is_list(stop_token_ids) and not isinstance(stop_token_ids, Set | range):
        raise ValueError(f"stop_token_ids: expected token ids, got {stop_token_ids!r}")
    ids = list(stop_token_ids)
    bad = [token for token in ids if not is_int(token) or not 0 <= token < words]
    if bad:
        raise ValueError(f"stop_token_ids: expected ids from 0 to {words - 1}, got {bad[:10]}")
    return frozenset(map(int, ids))
