"""``Engine``: requests that come and go while others run."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from deinfer_jax.engine.completion import Completion, Increment, complete
from deinfer_jax.engine.interrupt import uninterrupted
from deinfer_jax.engine.llm import LLM
from deinfer_jax.engine.parameters import Parameters, seeds_of
from deinfer_jax.engine.prompts import Prompt, tokenize
from deinfer_jax.engine.request import Request, Sampling
from deinfer_jax.engine.text import TextStream

__all__ = ["Engine"]


@dataclasses.dataclass(slots=True)
class _Reported:
    """Whose a request is, and how many of its tokens have been given in increments."""

    index: int
    sample: int
    tokens: int = 0


class Engine:
    """Takes prompts as they come and continues all of them together.

    Several engines, and calls of :func:`deinfer_jax.generate`, can use one model at the same time,
    from several threads: their requests run in the same batches, and whoever asks for a step moves
    everybody's on. :meth:`add` and :meth:`cancel` do not wait for a step that runs.

    Example::

        engine = deinfer_jax.Engine(llm)
        first = engine.add("Once upon a time", max_new_tokens=50)
        while engine.unfinished:
            for increment in engine.step():
                print(increment.index, increment.text)
        print(engine.result(first).text)

    Args:
        llm: from :func:`deinfer_jax.load`.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._lock = threading.Lock()  # of what follows; held for a moment only
        self._indices = count()
        self._requests: dict[int, list[Request]] = {}  # by prompt, results not yet asked for
        self._live: dict[Request, _Reported] = {}  # until the last increment is given
        self._news: deque[Request] = deque()  # who has got something, from the core

    @property
    def unfinished(self) -> int:
        """Samples whose last increment is still to come."""
        return len(self._live)

    @property
    def requests(self) -> list[Request]:
        """Of all prompts whose result has not been taken, one a sample."""
        with self._lock:
            return [request for some in self._requests.values() for request in some]

    def add(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = 0,
        n: int = 1,
        stop: str | Collection[str] | None = (),
        stop_token_ids: Collection[int] | None = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
    ) -> int:
        """Submits a prompt.

        Args:
            prompt: a string, a chat or token ids; it, and the other arguments, as for
                :func:`deinfer_jax.generate`. Prompts are independent of each other: equal ones with
                equal seeds give equal samples.

        Returns:
            The prompt's index: 0, 1, ….

        Raises:
            ValueError: an argument is bad.
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
        self.llm.check_open()
        (ids,) = tokenize(self.llm, [prompt], max_new_tokens)
        (seed,) = seeds_of(seed, 1)
        sampling = dataclasses.replace(parameters.sampling(self.llm), seed=seed)
        samples = [dataclasses.replace(sampling, sample_index=index) for index in range(n)]
        return self.submit(ids, samples, stop=parameters.stop_strings)

    def submit(
        self,
        ids: list[int],
        samples: Sequence[Sampling],
        *,
        stop: Sequence[str] = (),
        text: bool = True,
    ) -> int:
        """``add`` for arguments that are checked: a prompt's token ids, how each of its samples is
        drawn, and whether text is wanted in increments."""
        tokenizer = self.llm.tokenizer
        wanted = tokenizer is not None and (text or stop)
        requests = [
            Request(ids, sampling, TextStream(tokenizer, ids, stop) if wanted else None, self._news)
            for sampling in samples
        ]
        with uninterrupted(), self._lock:
            self.llm.core.submit(requests)
            index = next(self._indices)
            self._requests[index] = requests
            for sample, request in enumerate(requests):
                self._live[request] = _Reported(index, sample)
        return index

    def cancel(self, index: int) -> None:
        """Ends a prompt's samples, with finish_reason ``"cancelled"``, at the next step; finished
        ones stay as they are.

        Raises:
            KeyError: there is no such prompt, or its result has been taken.
        """
        self.llm.core.cancel(self._requests[index])

    def cancel_all(self) -> None:
        """``cancel`` for all prompts, at once if no step runs, else before the next one."""
        self.llm.core.cancel(self.requests)
        self.llm.core.settle()

    def step(self) -> list[Increment]:
        """Moves everything on by a step, and gives what has been added since the last call; waits
        for the device. Empty where nothing is to be done, and now and then in between. Ctrl-C can
        come between the two; what it keeps from the caller, ``result`` has."""
        pending = self._pending(None)
        if pending is not None:
            self.llm.core.advance(pending)
        return self.collect()

    def collect(self, index: int | None = None) -> list[Increment]:
        """What has been added since it was last given, of all prompts or of one; runs nothing."""
        found = []
        with self.llm.core.lock, self._lock:  # another thread may add to it
            kept = []
            for request in dict.fromkeys(self._news):
                reported = self._live.get(request)
                if reported is not None and index in (None, reported.index):
                    found += self._increment(request, reported)
                elif reported is not None:
                    kept.append(request)
            self._news.clear()
            self._news.extend(kept)
        return found

    def stream(self, index: int | None = None) -> Iterator[Increment]:
        """Runs until all prompts are finished, or one is, and gives increments as they come.
        Prompts added meanwhile run too.

        Raises:
            KeyError: there is no such prompt, or its result has been taken.
        """
        if index is not None and index not in self._requests:
            raise KeyError(index)
        while (pending := self._pending(index)) is not None:
            self.llm.core.advance(pending)
            yield from self.collect(index)

    def _pending(self, index: int | None) -> Request | None:
        """A request of any prompt, or of one, whose last increment is still to come."""
        with self._lock:
            every = self._live if index is None else self._requests.get(index, ())
            return next((request for request in every if request in self._live), None)

    def result(self, index: int) -> Completion:
        """The completion of a prompt, once all its samples are finished; it can be asked for once.

        Raises:
            KeyError: there is no such prompt, or its result has been taken.
            ValueError: it is not finished.
        """
        with self._lock:
            requests = self._requests[index]
        if any(request.finish_reason is None for request in requests):
            raise ValueError(f"prompt {index}: expected a finished one; call step() until it is")
        completion = complete(requests, self.llm.tokenizer)
        with self._lock:
            del self._requests[index]
            for request in requests:
                self._live.pop(request, None)
        return completion

    def _increment(self, request: Request, reported: _Reported) -> list[Increment]:
        reason = request.finish_reason
        tokens = request.generated[reported.tokens :]
        if not tokens and reason is None:
            return []
        wants_logprobs = request.sampling.logprobs is not None
        increment = Increment(
            index=reported.index,
            sample=reported.sample,
            text="" if request.text is None else request.text.take(),
            token_ids=tuple(tokens),
            logprobs=tuple(request.logprobs[reported.tokens :]) if wants_logprobs else None,
            finish_reason=reason,
            error=request.error,
        )
        reported.tokens += len(tokens)
        if reason is not None:
            del self._live[request]
        return [increment]
