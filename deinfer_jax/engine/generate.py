"""``generate``: from prompts to completions."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Unpack, overload

import numpy as np
from tqdm import tqdm

from deinfer_jax.engine.completion import Completion, Increment
from deinfer_jax.engine.engine import Engine
from deinfer_jax.engine.interrupt import noted_ctrl_c
from deinfer_jax.engine.llm import LLM, show_progress
from deinfer_jax.engine.load import load
from deinfer_jax.engine.parameters import Options, Parameters, seeds_of
from deinfer_jax.engine.prompts import Prompt, as_list, tokenize
from deinfer_jax.engine.request import Request, Sampling, prompt_hash

__all__ = ["generate"]

logger = logging.getLogger(__name__)

BAR_SECONDS = 0.1  # between two looks at how far things are


@overload
def generate(
    llm: LLM | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt] | None,
    *,
    stream: Literal[False] = ...,
    **options: Unpack[Options],
) -> list[Completion]: ...
@overload
def generate(
    llm: LLM | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt] | None,
    *,
    stream: Literal[True],
    **options: Unpack[Options],
) -> Iterator[Increment]: ...
def generate(
    llm: LLM | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt] | None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | np.ndarray | None = 0,
    n: int = 1,
    stop: str | Collection[str] | None = (),
    stop_token_ids: Collection[int] | None = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    stream: bool = False,
    progress: bool | None = None,
) -> list[Completion] | Iterator[Increment]:
    """Continues prompts.

    A result depends on the prompt, the parameters and the seed, not on the other prompts or their
    order: other batches round the logits differently, by some 1e-6 of their range in float32, so
    tokens agree up to near-ties. (In bfloat16 near-ties are common.)

    Ctrl-C ends the call after the step that runs: it returns what there is, unfinished prompts with
    finish_reason ``"cancelled"``. A second Ctrl-C raises ``KeyboardInterrupt``, as does the first
    one while streaming.

    Of a model that is spread over several processes, all make the call and return the same; the
    prompts, parameters and seeds are those of process 0, whatever the others pass (None will do for
    their prompts). There Ctrl-C, and an error in a step, end all of them.

    Args:
        llm: from :func:`deinfer_jax.load`, or a path that is loaded for this call.
        prompts: a string (continued as it is), a chat (list of ``{"role": …, "content": …}``, put
            through the model's template), token ids, or a list of those.
        max_new_tokens: most tokens a prompt is continued by.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: then keep the most likely tokens whose mass reaches p; 1 = all.
        min_p: then keep tokens at least this likely relative to the most likely one; 0 = all.
        seed: one, or one a prompt; None = others in every call. Equal prompts with equal seeds draw
            differently: they count as samples 0, 1, ….
        n: samples of each prompt, which is run once.
        stop: strings that end a continuation; the text ends before the one that is complete first,
            also where it spans tokens. Special tokens are not text: name those in
            ``stop_token_ids``.
        stop_token_ids: tokens that end a continuation, besides the model's own.
        ignore_eos: go on past the model's own end tokens.
        logprobs: give the log-probability of each token, before temperature and filters, and the so
            many most likely ones, up to 20; None = none.
        stream: give increments while the tokens come. Ending the iteration early cancels the rest.
        progress: a bar with tokens a second; None = where stderr is a terminal. While streaming
            there is no bar.

    Returns:
        A completion a prompt, in order; with ``stream`` an iterator of :class:`Increment`, which
        runs while it is iterated.

    Raises:
        ValueError: a parameter or a prompt is bad (every bad index is named); nothing has run then.
        NotImplementedError: ``stream``, of a model that is spread over several processes.
    """
    parameters = Parameters(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    if isinstance(llm, LLM):
        prepare = partial(_prepare, llm, prompts, parameters, seed)
        if not stream:
            return _run(llm, prepare, progress)
        if llm.core.processes is not None:
            llm.core.processes.check_called()
        return _stream(llm, prepare())
    if stream:
        return _load_and_stream(llm, prompts, parameters, seed, progress)
    with load(llm, progress=progress) as loaded:
        return _run(loaded, partial(_prepare, loaded, prompts, parameters, seed), progress)


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt to submit, see ``Engine.submit``."""

    ids: list[int]
    samples: list[Sampling]
    stop: tuple[str, ...]


def _prepare(llm: LLM, prompts: Any, parameters: Parameters, seed: Any) -> list[_Prompt]:
    """Checks everything, so that nothing has run if something is wrong."""
    llm.check_open()
    sampling = parameters.sampling(llm)
    token_ids = tokenize(llm, as_list(prompts), parameters.max_new_tokens)
    prepared = []
    seen: dict[tuple[int, bytes], int] = {}
    for ids, one_seed in zip(token_ids, seeds_of(seed, len(token_ids)), strict=True):
        twin = (one_seed, prompt_hash(ids))
        first = seen.get(twin, 0)
        seen[twin] = first + parameters.n
        samples = [
            dataclasses.replace(sampling, seed=one_seed, sample_index=index)
            for index in range(first, seen[twin])
        ]
        prepared.append(_Prompt(ids, samples, parameters.stop_strings))
    return prepared


def _run(llm: LLM, prepare: Callable[[], list[_Prompt]], progress: bool | None) -> list[Completion]:
    engine = Engine(llm)
    with ExitStack() as others:
        prompts = others.enter_context(llm.core.together("generate", prepare))
        interrupt = others.enter_context(noted_ctrl_c())
        try:
            for prompt in prompts:
                engine.submit(prompt.ids, prompt.samples, stop=prompt.stop, text=False)
            requests = engine.requests
            with _Bar(requests, progress) as bar:
                for request in requests:
                    while request.finish_reason is None and not interrupt.asked:
                        llm.core.advance(request)
                        bar.look()
            if interrupt.asked and llm.core.processes is not None:
                raise KeyboardInterrupt  # the others have not heard it, or in another step
        finally:
            engine.cancel_all()
        for request in requests:  # cancelled ones, if another thread was in a step just now
            llm.core.advance(request)
        if interrupt.asked:
            done = sum(request.finish_reason != "cancelled" for request in requests)
            logger.warning("interrupted: %d of %d continuations are finished", done, len(requests))
        return [engine.result(index) for index in range(len(prompts))]


def _stream(llm: LLM, prompts: list[_Prompt]) -> Iterator[Increment]:
    engine = Engine(llm)
    try:
        for prompt in prompts:
            engine.submit(prompt.ids, prompt.samples, stop=prompt.stop)
        yield from engine.stream()
    finally:
        engine.cancel_all()


def _load_and_stream(
    path: str | os.PathLike[str],
    prompts: Any,
    parameters: Parameters,
    seed: Any,
    progress: bool | None,
) -> Iterator[Increment]:
    with load(path, progress=progress) as llm:
        yield from _stream(llm, _prepare(llm, prompts, parameters, seed))


class _Bar:
    """Finished continuations, with tokens a second."""

    def __init__(self, requests: Sequence[Request], progress: bool | None) -> None:
        self._requests = requests
        self._bar = tqdm(
            total=len(requests), desc="generating", unit="seq", disable=not show_progress(progress)
        )
        self._started = self._looked = time.perf_counter()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.look(last=True)
        self._bar.close()

    def look(self, *, last: bool = False) -> None:
        """Shows how far the requests are, unless it was shown just now."""
        now = time.perf_counter()
        if self._bar.disable or (now - self._looked < BAR_SECONDS and not last):
            return
        self._looked = now
        tokens = sum(len(request.generated) for request in self._requests)
        done = sum(request.finish_reason is not None for request in self._requests)
        self._bar.set_postfix_str(f"{tokens / (now - self._started):.1f} tokens/s", refresh=False)
        self._bar.update(done - self._bar.n)
