"""Models for the lm-evaluation-harness, under the name ``deinfer``.

The harness makes token ids from text in its own base class. What is left to a model (windows,
truncation, what ends a continuation) is done as in its adapter for transformers, ``HFLM``, so that
equal models get equal figures. Importing this module registers the name; its command is::

    python -m deinfer_jax.evaluate.lm_eval run --model deinfer --model_args path=… --tasks …
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tqdm import tqdm

from deinfer_jax.checkpoint.source import tokenizer_sha256
from deinfer_jax.engine.generate import generate
from deinfer_jax.engine.llm import LLM
from deinfer_jax.engine.load import load

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "deinfer_jax.evaluate.lm_eval needs the lm-evaluation-harness; install it with "
        f"pip install 'deinfer-jax[lm-eval]' ({error})"
    ) from error

__all__ = ["DeInferLM"]

logger = logging.getLogger(__name__)

SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # the harness's names are generate's


class DeInferLM(TemplateLM):
    """A model as the lm-evaluation-harness wants it.

    Args:
        path: a checkpoint to load, or an LLM, which stays the caller's.
        max_length: most tokens of a sequence; None = the LLM's ``max_context``. What is longer is
            cut from the left.
        max_gen_toks: tokens to generate where a task does not say.
        prefix_token_id: what stands before an empty context and before a text whose perplexity is
            measured; None = the tokenizer's begin token, or its end token where it has none.
        chat_template_args: for the chat template.
        enable_thinking: one of those, because it can be given on the command line.
        seed: of sampling.
        batch_size: not used, like the two below: the harness's command gives them even if its user
            does not. Here ``max_batch`` says how many sequences run together.
        max_batch_size: not used.
        device: not used; JAX chooses it.
        options: of :func:`deinfer_jax.load`, where ``path`` is a path.

    Raises:
        ValueError: the model has no tokenizer, an argument is off, or what ``load`` raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | LLM,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(path, LLM):
            if options:
                raise ValueError(f"expected no options to load with an LLM, got {sorted(options)}")
            self.llm = path
        else:
            self.llm = load(path, **options)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise ValueError("expected a model with a tokenizer, this one has none")
        longest = self.llm.max_context
        self.max_length = longest if max_length is None else max_length
        if not 1 <= self.max_length <= longest:
            raise ValueError(f"max_length: expected 1 to max_context = {longest}, got {max_length}")
        self.max_gen_toks = max_gen_toks
        self._prefix_token_id = prefix_token_id
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        self._seed = seed

    @property
    def eot_token_id(self) -> Any:
        """The tokenizer's end token; None if it has none."""
        return self.tokenizer.eos_token_id

    @cached_property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        tokenizer = self.tokenizer
        for token in (self._prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("prefix_token_id: expected one, since the tokenizer has no begin token")

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness caches requests."""
        name = self.tokenizer.name_or_path or tokenizer_sha256(self.tokenizer)
        return str(name).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as text; without its system messages where the template refuses those.

        Args:
            chat_history: messages with ``role`` and ``content``.
            add_generation_prompt: whether an answer is to begin, or else the last message goes on.
        """

        def apply(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_args,
            )

        try:
            return apply(chat_history)
        except TemplateError as error:
            logger.warning("system messages are left out, the chat template says: %s", error)
            return apply([message for message in chat_history if message["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text.

        Args:
            string: the text.
            add_special_tokens: None = as the tokenizer does, but no second begin token.
            kwargs: of other adapters, there are none here.
        """
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not has_bos_prefix(string, prefix)
        encode = self.tokenizer
        return encode(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one.

        Args:
            requests: (key of the harness's cache or None, context, continuation).
            disable_tqdm: no bar.
            kwargs: of other adapters, there are none here.
        """
        results = []
        for key, context, continuation in tqdm(
            requests, desc="Running loglikelihood requests", disable=disable_tqdm
        ):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"loglikelihood: expected a continuation of 1 to {self.max_length} tokens, got "
                    f"{len(continuation)} ({key!r})"
                )
            # The last token is only predicted, so there is room for one more.
            whole = (context + continuation)[-(self.max_length + 1) :]
            scores, greedy = self.llm.score_with_greedy(whole)
            total = float(scores[-len(continuation) :].sum(dtype=np.float64))
            if not np.isfinite(total):  # comparing it with others would go wrong silently
                raise ValueError(f"loglikelihood: the log-probability is {total} ({key!r})")
            answer = (total, bool(greedy[-len(continuation) :].all()))
            results.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, in windows where they are long.

        Args:
            requests: with ``args`` = (text,).
            disable_tqdm: no bar.
        """
        results = []
        for request in tqdm(
            requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm
        ):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(parts, disable_tqdm=True))
            results.append(float(total))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), float(total))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues texts up to a stop string or an end token, neither of which is in the result.

        Args:
            requests: with ``args`` = (context, generation arguments): ``until``, ``max_gen_toks``
                (or another of the harness's names for it), ``do_sample``, ``temperature``,
                ``top_k``, ``top_p``, ``min_p``; with the defaults of
                :func:`deinfer_jax.generate`.
            disable_tqdm: no bar.

        Raises:
            ValueError: an argument is none of those, or leaves no room for the context.
            RuntimeError: the model gave what is not a number.
        """
        arguments: list[Any] = [request.args for request in requests]
        groups: dict[str, list[int]] = {}  # what is drawn alike runs together
        for index, (_, given) in enumerate(arguments):
            groups.setdefault(json.dumps(given, sort_keys=True), []).append(index)
        results = [""] * len(requests)
        with tqdm(
            total=len(requests), desc="Running generate_until requests", disable=disable_tqdm
        ) as bar:
            for members in groups.values():
                until, options = self._generation(arguments[members[0]][1])
                room = self.max_length - options["max_new_tokens"]
                prompts = [self._prompt(arguments[index][0], room) for index in members]
                generated: list[list[int]] = [[] for _ in members]
                for increment in generate(self.llm, prompts, stream=True, **options):
                    tokens, index = generated[increment.index], members[increment.index]
                    tokens.extend(increment.token_ids)
                    if increment.finish_reason is None:
                        continue
                    if increment.error is not None:
                        raise RuntimeError(f"generate_until: request {index}: {increment.error}")
                    # Decoded alone and cut, as the harness does it for transformers: SentencePiece
                    # then gives no blank before the first word.
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    results[index] = postprocess_generated_text(text, until, None)
                    self.cache_hook.add_partial("generate_until", arguments[index], results[index])
                    bar.update()
        return results

    def _prompt(self, context: str, room: int) -> list[int]:
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _generation(self, given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The strings that a text is cut before, and arguments for ``generate``."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        new_tokens = kwargs.pop("max_gen_toks")
        kwargs.pop("do_sample")  # the temperature says it, since it is 0 where do_sample is False
        if kwargs.get("num_beams") == 1:  # no beam search, as some tasks write
            kwargs.pop("num_beams")
        unknown = sorted(set(kwargs) - set(SAMPLING))
        if unknown:
            raise ValueError(
                "generate_until: expected until, max_gen_toks, do_sample, "
                f"{', '.join(SAMPLING)}, got also {', '.join(unknown)}"
            )
        if not 0 < new_tokens < self.max_length:
            raise ValueError(
                f"generate_until: expected max_gen_toks from 1 to {self.max_length - 1}, so that "
                f"one token of context fits into {self.max_length}, got {new_tokens}"
            )
        return until, dict(
            max_new_tokens=new_tokens,
            stop=[text for text in until if text and text not in self._special],
            # Special tokens are not shown, so no string can find them.
            stop_token_ids=[self._special[text] for text in until if text in self._special],
            seed=self._seed,
            **kwargs,
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {str(token): index for index, token in added if token.special}


register_model("deinfer")(DeInferLM)  # as a decorator it would give the class the type of its base


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
