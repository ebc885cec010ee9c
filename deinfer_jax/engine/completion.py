"""What comes out: completions, and increments of them while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deinfer_jax.engine.request import FinishReason, Request, TokenLogprob
from deinfer_jax.engine.text import TextStream

__all__ = ["Completion", "Increment", "Timing", "complete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a request.

    Attributes:
        ttft_s: from submission to the first token (time to first token), queueing included; None if
            there was none.
        itl_s: mean time between later tokens (inter-token latency); None with fewer than two
            tokens.
    """

    ttft_s: float | None
    itl_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model made of a prompt.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: the continuation without special tokens, and without the stop string that ended it;
            empty where the model has no tokenizer.
        token_ids: the continuation, whole: a final end or stop token included, and the tokens of a
            stop string.
        finish_reason: ``"eos"``, ``"stop"`` (a stop token or string), ``"length"``, ``"error"`` or
            ``"cancelled"``.
        logprobs: of each token, where asked for, else None.
        error: what happened, where finish_reason is ``"error"``.
        timing: latencies.
        samples: all ``n`` completions of the prompt, this one first, where ``n`` > 1.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    error: str | None
    timing: Timing
    samples: tuple[Completion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What has been added to a completion. All increments of a sample together are its completion.

    Attributes:
        index: of the prompt.
        sample: of the prompt's ``n``.
        text: of whole characters only (the last one of a continuation that is cut within a
            character ends in U+FFFD), and nothing that may turn out to be a stop string; so it can
            be behind the tokens, or be empty.
        token_ids: new tokens.
        logprobs: of the new tokens, where asked for, else None.
        finish_reason: in the last increment, else None; see :class:`Completion`.
        error: what happened, where finish_reason is ``"error"``.
    """

    index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    error: str | None


def complete(requests: Sequence[Request], tokenizer: Any) -> Completion:
    """The completion of a prompt from its finished requests, a sample each."""
    first, *others = (_sample(request, tokenizer) for request in requests)
    return replace(first, samples=(first, *others)) if others else first


def _sample(request: Request, tokenizer: Any) -> Completion:
    reason, error = request.finish_reason, request.error
    assert reason is not None
    try:
        text = _text(request, tokenizer)
    except Exception as failure:  # of the tokenizer: this one's affair, the others have theirs
        text, reason, error = "", "error", f"{type(failure).__name__}: {failure}"
    submitted, *arrivals = request.times
    return Completion(
        prompt_token_ids=tuple(request.prompt),
        text=text,
        token_ids=tuple(request.generated),
        finish_reason=reason,
        logprobs=None if request.sampling.logprobs is None else tuple(request.logprobs),
        error=error,
        timing=Timing(
            ttft_s=arrivals[0] - submitted if arrivals else None,
            itl_s=(arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None,
        ),
    )


def _text(request: Request, tokenizer: Any) -> str:
    """The text, made now where nobody needed it before."""
    if tokenizer is None:
        return ""
    if request.text is not None:
        return request.text.text
    stream = TextStream(tokenizer, request.prompt)
    ended = request.finish_reason in ("eos", "stop")  # by a token, which is not shown
    for token in request.generated[:-1] if ended else request.generated:
        stream.push(token)
    stream.finish()
    return stream.text
