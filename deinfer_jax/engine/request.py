"""A prompt and how it is to be continued. Host Python, no jax."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from deinfer_jax.engine.text import TextStream

__all__ = ["FinishReason", "Request", "Sampling", "TokenLogprob", "prompt_hash"]

FinishReason = Literal["eos", "stop", "length", "error", "cancelled"]


class TokenLogprob(NamedTuple):
    """How likely a token was, before temperature and filters, natural logarithms.

    Attributes:
        token_id: the token that was chosen.
        logprob: of it.
        best: (token id, logprob) of the most likely ones, the first the most likely.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


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
    logprobs: int | None = None

    @property
    def plain(self) -> bool:
        """Whether neither filters nor log-probabilities are asked for."""
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.logprobs is None and not (self.temperature > 0 and filtered)


@dataclass(eq=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        prompt: token ids.
        text: of the continuation, where it is wanted while tokens come or may end the request.
        generated: tokens read back so far, the final one included.
        in_text: how many of them have been added to ``text``.
        logprobs: of them, where ``sampling`` asks for it.
        news: where it is put whenever it has got a token or has finished, for who waits for that.
        times: ``time.perf_counter`` of submission and of each token's arrival.
        tokens: prompt and generated tokens.
        goal: tokens to run as a prompt before decoding; more than the prompt's after a preemption.
        prefilled: how many of those are dispatched, or found in shared pages.
        dispatched: generated tokens dispatched (they may not be read back yet).
        pages: of its tokens in order, the first ones shared perhaps.
        copied_page: a page held until the beginning of it is copied.
        digests: of the full pages of ``tokens``, as far as they were asked for.
        known_pages: how many of its pages others can find.
        pages_sent: entries of the block table that the device knows.
    """

    prompt: Sequence[int]
    sampling: Sampling
    text: TextStream | None = None
    news: deque[Request] | None = None
    generated: list[int] = field(default_factory=list)
    in_text: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    tokens: list[int] = field(init=False)
    goal: int = 0
    prefilled: int = 0
    dispatched: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    copied_page: int | None = None
    digests: list[bytes] = field(default_factory=list)
    known_pages: int = 0
    pages_sent: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

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

    @property
    def in_flight(self) -> bool:
        """Whether tokens are dispatched that were not read back."""
        return self.dispatched > len(self.generated)

    @property
    def decoding(self) -> bool:
        """Whether all that has to run as a prompt is dispatched."""
        return self.goal > 0 and self.prefilled == self.goal

    @property
    def held_pages(self) -> list[int]:
        """Pages that it has a reference to."""
        return self.pages if self.copied_page is None else [*self.pages, self.copied_page]

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], now: float
    ) -> FinishReason | None:
        """Tokens were read back. Takes them in up to the one that ends the request, if one does,
        and returns why it ends.

        Args:
            tokens: in order.
            logprobs: of them, where ``sampling`` asks for it, else empty.
            now: ``time.perf_counter`` of their arrival.
        """
        sampling = self.sampling
        taken = list(tokens[: sampling.max_new_tokens - len(self.generated)])
        for ends in (sampling.eos_token_ids, sampling.stop_token_ids):
            if not ends.isdisjoint(taken):
                del taken[next(i for i, token in enumerate(taken) if token in ends) + 1 :]
        self.logprobs += logprobs[: len(taken)]
        self.times += [now] * len(taken)
        self.generated += taken
        self.tokens += taken
        return self.end()

    def end(self) -> FinishReason | None:
        """Why the tokens read so far end the request, None if they do not; adds new ones to the
        text, end tokens excepted, and drops those behind a stop string."""
        if not self.generated:
            return None
        sampling, last = self.sampling, self.generated[-1]
        reason: FinishReason | None = None
        if last in sampling.eos_token_ids:
            reason = "eos"
        elif last in sampling.stop_token_ids:
            reason = "stop"
        visible = len(self.generated) - (reason is not None)
        while self.text is not None and self.in_text < visible:
            self.in_text += 1
            if self.text.push(self.generated[self.in_text - 1]):
                self._keep(self.in_text)
                return "stop"
        if reason is None and len(self.generated) >= sampling.max_new_tokens:
            reason = "length"
        return reason

    def mend(self) -> None:
        """Puts right what taking a token in has left, where that failed half-way."""
        self._keep(len(self.generated))
        self.digests.clear()
        if self.text is not None:
            self.text, self.in_text = self.text.again(), 0

    def _keep(self, count: int) -> None:
        """Drops what belongs to tokens behind the first ``count`` generated ones."""
        del self.generated[count:], self.logprobs[count:], self.times[count + 1 :]
        self.tokens[len(self.prompt) :] = self.generated
