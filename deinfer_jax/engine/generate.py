"""``generate``: from prompts to completions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from jinja2 import TemplateError

from deinfer_jax.engine.llm import LLM, check_token_ids
from deinfer_jax.engine.load import load
from deinfer_jax.engine.request import FinishReason, Request, Sampling, prompt_hash

__all__ = ["Completion", "Timing", "generate"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[SupportsIndex] | np.ndarray


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
        text: the continuation without special tokens; empty where the model has no tokenizer.
        token_ids: the continuation, a final end or stop token included.
        finish_reason: ``"eos"``, ``"stop"`` (a token of stop_token_ids), ``"length"`` or
            ``"error"``.
        error: what happened, where finish_reason is ``"error"``.
        timing: latencies.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    timing: Timing


def generate(
    llm: LLM | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | np.ndarray = 0,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
) -> list[Completion]:
    """Continues prompts.

    A result depends on the prompt, the parameters and the seed, not on the other prompts or their
    order: other batches round the logits differently, by some 1e-6 of their range in float32, so
    tokens agree up to near-ties. (In bfloat16 near-ties are common.)

    Args:
        llm: from :func:`deinfer_jax.load`, or a path that is loaded for this call.
        prompts: a string (continued as it is), a chat (list of ``{"role": …, "content": …}``, put
            through the model's template), token ids, or a list of those.
        max_new_tokens: most tokens a prompt is continued by.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: then keep the most likely tokens whose mass reaches p; 1 = all.
        min_p: then keep tokens at least this likely relative to the most likely one; 0 = all.
        seed: one, or one a prompt. Equal prompts with equal seeds draw differently: they count as
            samples 0, 1, ….
        stop_token_ids: tokens that end a continuation, besides the model's own.
        ignore_eos: go on past the model's own end tokens.

    Returns:
        A completion a prompt, in order.

    Raises:
        ValueError: a parameter or a prompt is bad (every bad index is named); nothing has run then.
    """
    _check_parameters(max_new_tokens, temperature, top_k, top_p, min_p)
    if not isinstance(llm, LLM):
        with load(llm) as loaded:
            return generate(
                loaded,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            )
    llm.check_open()
    stops = _check_stop_ids(stop_token_ids, llm.config.vocab_size)
    token_ids = _tokenize(llm, _as_list(prompts), max_new_tokens)
    _check_capacity(llm, token_ids, max_new_tokens)
    seeds = _one_each(seed, len(token_ids))

    seen: dict[tuple[int, bytes], int] = {}
    requests = []
    for ids, one_seed in zip(token_ids, seeds, strict=True):
        twin = (one_seed, prompt_hash(ids))
        seen[twin] = seen.get(twin, -1) + 1
        sampling = Sampling(
            max_new_tokens=int(max_new_tokens),
            temperature=float(temperature),
            top_k=min(top_k, llm.config.vocab_size),
            top_p=top_p,
            min_p=min_p,
            seed=one_seed,
            sample_index=seen[twin],
            eos_token_ids=frozenset(() if ignore_eos else llm.eos_token_ids),
            stop_token_ids=stops,
        )
        requests.append(Request(ids, sampling))
    llm.engine.run(requests)
    return [_completion(llm, request) for request in requests]


def _completion(llm: LLM, request: Request) -> Completion:
    assert request.finish_reason is not None
    text = ""
    if llm.tokenizer is not None:
        ended = request.finish_reason in ("eos", "stop")
        visible = request.generated[:-1] if ended else request.generated
        text = _continuation(llm.tokenizer, list(request.prompt), visible)
    submitted, *arrivals = request.times
    return Completion(
        prompt_token_ids=tuple(request.prompt),
        text=text,
        token_ids=tuple(request.generated),
        finish_reason=request.finish_reason,
        error=request.error,
        timing=Timing(
            ttft_s=arrivals[0] - submitted if arrivals else None,
            itl_s=(arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None,
        ),
    )


def _continuation(tokenizer: Any, prompt: list[int], generated: list[int]) -> str:
    """Text of ``generated`` behind ``prompt``; alone, SentencePiece drops its leading space."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *generated], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(generated, skip_special_tokens=True)  # a character spans the seam


def _check_stop_ids(stop_token_ids: Any, vocab_size: int) -> frozenset[int]:
    if not _is_list(stop_token_ids) and not isinstance(stop_token_ids, Set | range):
        raise ValueError(f"stop_token_ids: expected token ids, got {stop_token_ids!r}")
    ids = list(stop_token_ids)
    bad = [token for token in ids if not _is_int(token) or not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"stop_token_ids: expected ids from 0 to {vocab_size - 1}, got {bad[:10]}")
    return frozenset(map(int, ids))


def _check_parameters(
    max_new_tokens: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> None:
    if not _is_int(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected a positive integer, got {max_new_tokens!r}")
    most = float(np.finfo(np.float32).max)
    if not _is_number(temperature) or not 0 <= temperature <= most:
        raise ValueError(f"temperature: expected a float32 number >= 0, got {temperature!r}")
    if not _is_int(top_k) or top_k < 0:
        raise ValueError(f"top_k: expected an integer >= 0, got {top_k!r}")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p!r}")
    if not _is_number(min_p) or not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected a number in [0, 1], got {min_p!r}")


def _is_number(value: object) -> bool:
    real = int | float | np.integer | np.floating
    return isinstance(value, real) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple)


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise ValueError(
            "prompts: expected a string, a chat (a list of messages), token ids, or a list of "
            f"those, got {type(prompts).__name__}"
        )
    items = list(prompts)
    single = items and (
        all(isinstance(item, Mapping) for item in items) or all(_is_int(item) for item in items)
    )
    return [items] if single else items


def _is_int(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _tokenize(llm: LLM, prompts: list[Any], max_new_tokens: int) -> list[list[int]]:
    """Token ids of every prompt; ValueError naming all prompts that have none or are too long."""
    token_ids, problems = [], []
    for index, prompt in enumerate(prompts):
        try:
            ids = _tokenize_one(llm, prompt)
        except ValueError as error:
            problems.append(f"prompt {index}: {error}")
            continue
        token_ids.append(ids)
        if len(ids) + max_new_tokens > llm.max_context:
            problems.append(
                f"prompt {index}: {len(ids)} + {max_new_tokens} new tokens, expected at most "
                f"max_context = {llm.max_context} together"
            )
    if problems:
        raise ValueError("; ".join(problems))
    return token_ids


def _tokenize_one(llm: LLM, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("expected text, got an empty string")
        text, special = prompt, True
    elif not _is_list(prompt):
        raise ValueError(f"expected a string, a chat or token ids, got {type(prompt).__name__}")
    else:
        items = list(prompt)
        if all(_is_int(item) for item in items):
            return check_token_ids(items, llm.config.vocab_size)
        # The template writes the special tokens itself: a second BOS must not be added.
        text, special = _chat_text(llm, items), False
    if llm.tokenizer is None:
        raise ValueError("expected token ids, since this model has no tokenizer, got text")
    try:
        ids = llm.tokenizer(text, add_special_tokens=special)["input_ids"]
    except TypeError:  # what tokenizers says of a lone surrogate
        raise ValueError(f"expected text that UTF-8 can encode, got {text[:40]!r}") from None
    return check_token_ids(ids, llm.config.vocab_size)


def _chat_text(llm: LLM, messages: list[Any]) -> str:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(
                "expected a string, messages with 'role' and 'content', or token ids, got a list "
                f"with {message!r}"
            )
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"expected 'role' and 'content' to be strings, got {message!r}")
    if llm.tokenizer is None:
        raise ValueError("expected token ids, since this model has no tokenizer, got a chat")
    if not llm.tokenizer.chat_template:
        raise ValueError("expected a string or token ids, since this model has no chat template")
    try:
        return llm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:  # templates refuse roles or their order
        raise ValueError(f"the model's chat template refuses the messages: {error}") from error


def _check_capacity(llm: LLM, token_ids: list[list[int]], max_new_tokens: int) -> None:
    scheduler = llm.engine.scheduler
    capacity = scheduler.allocator.num_pages * scheduler.page_size
    too_big = [
        f"prompt {index} ({len(ids)} + {max_new_tokens} tokens)"
        for index, ids in enumerate(token_ids)
        if len(ids) + max_new_tokens - 1 > capacity
    ]
    if too_big:
        needed = max(len(ids) for ids in token_ids) + max_new_tokens
        layout = llm.cache_layout
        least = layout.pages_for(needed) * layout.bytes_per_page
        raise ValueError(
            f"the cache holds {capacity} tokens in all, too few for {', '.join(too_big)}; "
            f"cache_bytes = {least} would do"
        )


def _one_each(seed: Any, count: int) -> list[int]:
    seeds = list(seed) if _is_list(seed) or isinstance(seed, range) else [seed] * count
    if len(seeds) != count:
        raise ValueError(f"seed: expected one, or one a prompt ({count}), got {len(seeds)}")
    bad = [
        f"{value!r} for prompt {index}"
        for index, value in enumerate(seeds)
        if not _is_int(value) or not 0 <= int(value) < 2**64
    ]
    if bad:
        raise ValueError(f"seed: expected integers from 0 to 2^64 - 1, got {', '.join(bad)}")
    return [int(value) for value in seeds]
