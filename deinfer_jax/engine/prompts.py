"""What callers write as prompts, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
from jinja2 import TemplateError

from deinfer_jax.engine.llm import LLM, check_token_ids
from deinfer_jax.engine.parameters import is_int, is_list

__all__ = ["Message", "Prompt", "as_list", "tokenize"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[SupportsIndex] | np.ndarray


def tokenize(llm: LLM, prompts: Sequence[Any], max_new_tokens: int) -> list[list[int]]:
    """Token ids of prompts.

    Raises:
        ValueError: naming all prompts that are none, or are too long with what they may generate
            for the model's context or for the whole cache.
    """
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
    _check_capacity(llm, token_ids, max_new_tokens)
    return token_ids


def _check_capacity(llm: LLM, token_ids: list[list[int]], max_new_tokens: int) -> None:
    scheduler = llm.core.scheduler
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


def _tokenize_one(llm: LLM, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("expected text, got an empty string")
        text, special = prompt, True
    elif not is_list(prompt):
        raise ValueError(f"expected a string, a chat or token ids, got {type(prompt).__name__}")
    else:
        items = list(prompt)
        if all(is_int(item) for item in items):
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


def as_list(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise ValueError(
            "prompts: expected a string, a chat (a list of messages), token ids, or a list of "
            f"those, got {type(prompts).__name__}"
        )
    items = list(prompts)
    single = items and (
        all(isinstance(item, Mapping) for item in items) or all(is_int(item) for item in items)
    )
    return [items] if single else items
