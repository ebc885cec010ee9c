"""A prompt and how it is to be continued. Host Python, no jax."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

__all__ = ["FinishReason", "Request", "Sampling", "prompt_hash"]

FinishReason = Literal["eos", "stop", "length", "error"]


def prompt_hash(prompt: Sequence[int]) -> bytes:
    """64-bit blake2b of the token ids as little-endian int32."""
    return hashlib.blake2b(np.asarray(prompt, "<i4").tobytes(), digest_size=8).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen and where it ends; see ``deinfer_jax.generate``."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        prompt: token ids.
        generated: tokens read back so far, the final one included.
        prefilled: prompt tokens dispatched.
        dispatched: generated tokens dispatched (they may not be read back yet).
        times: ``time.perf_counter`` of submission and of each token's arrival.
    """

    prompt: Sequence[int]
    sampling: Sampling
    generated: list[int] = field(default_factory=list)
    prefilled: int = 0
    dispatched: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    times: list[float] = field(default_factory=list)

    @cached_property
    def key_words(self) -> Any:
        """uint32 [5] that fix the request's noise: seed (64 bits), hash of the prompt (64 bits),
        sample index."""
        seed = self.sampling.seed & (2**64 - 1)
        digest = int.from_bytes(prompt_hash(self.prompt), "little")
        words = (seed >> 32, seed, digest >> 32, digest, self.sampling.sample_index)
        return np.array([word & (2**32 - 1) for word in words], np.uint32)

    @property
    def max_length(self) -> int:
        """Tokens in the cache when the last one is drawn; that one itself is never run."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1
