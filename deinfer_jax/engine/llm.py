"""A model on one device or several, ready to generate and score."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from deinfer_jax.cache.layout import CacheLayout
from deinfer_jax.config import ModelConfig
from deinfer_jax.engine.core import Core
from deinfer_jax.engine.memory import MemoryPlan
from deinfer_jax.engine.runner import Runner
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["LLM", "check_token_ids", "show_progress"]

Result = TypeVar("Result")


class LLM:
    """A model on one device or several. Made by :func:`load`; a context manager that frees the
    devices' memory.

    Attributes:
        config: of the model.
        tokenizer: a ``transformers`` tokenizer, or None for random weights.
        max_batch: sequences that decode together.
        max_context: most tokens of a sequence, prompt and continuation together.
        recompilation_guard: whether compiling after :meth:`warm_up` is an error.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Any,
        runner: Runner,
        core: Core,
        *,
        max_context: int,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.runner, self.core = runner, core
        self.max_context = max_context

    def __repr__(self) -> str:
        model, layout = self.config, self.cache_layout
        return (
            f"LLM({model.num_layers} layers of width {model.hidden_size}, {layout.dtype}, "
            f"max_batch={self.max_batch}, max_context={self.max_context}, {layout.kind} cache, "
            f"{self.strategy.name} on {self.runner.placement.count})"
        )

    @property
    def max_batch(self) -> int:
        """Sequences that decode together."""
        return self.core.scheduler.max_batch

    @property
    def strategy(self) -> Strategy:
        """By which the model is split over its ``strategy.devices``."""
        return self.runner.strategy

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: the checkpoint's, else the tokenizer's."""
        if self.config.eos_token_ids:
            return self.config.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos is None else (eos,)

    @property
    def recompilation_guard(self) -> bool:
        """Whether compiling a program after :meth:`warm_up` is an error."""
        return self.runner.guard

    @recompilation_guard.setter
    def recompilation_guard(self, value: bool) -> None:
        self.runner.guard = value

    @property
    def cache_layout(self) -> CacheLayout:
        """What is cached, how many bytes a token takes, and why ``"auto"`` chose it."""
        return self.runner.layout

    def memory_plan(self) -> MemoryPlan:
        """Bytes of weights, cache and temporaries of the programs compiled so far, on a device."""
        self.check_open()
        return self.runner.memory_plan()

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles all programs that :func:`deinfer_jax.generate` can need; afterwards compiling is
        an error.

        Args:
            progress: show a bar; None = where stderr is a terminal.
        """
        self.check_open()
        self.runner.warm_up(progress=show_progress(progress))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the model as an Orbax checkpoint, which :func:`load` takes like any other, for any
        number of devices and any strategy; each device then reads its own part only.

        It has the arrays in their canonical form, by the checkpoint's names and without padding,
        whatever the strategy and the devices that this model runs on, in the dtype that it runs in.
        Under the strategy ``dense`` factors have been multiplied out: what is saved of a decomposed
        model is the dense one. ``config.json``, ``generation_config.json`` and the tokenizer are
        written beside the arrays; Orbax alone restores those as a dict by name
        (``PyTreeCheckpointer().restore(path)``).

        Args:
            path: directory, which must not exist; parents are made. Until all is written it is
                called ``<path>.partial``.

        Returns:
            The directory.

        Raises:
            FileExistsError: there is something at ``path``.
            BlockingIOError: another process is writing it.
            OSError: it cannot be written; where there is not enough space (``errno.ENOSPC``), with
                the bytes needed and free.
            RuntimeError: the model is closed.
            NotImplementedError: the model is spread over several processes.
        """
        self.check_open()
        from deinfer_jax.checkpoint.orbax_writer import save_orbax  # imports Orbax, which is slow

        runner, dtype = self.runner, self.cache_layout.dtype
        model = build(
            self.config,
            strategy=runner.strategy,
            dtype=jnp.dtype(dtype),
            max_context=self.max_context,
        )
        return save_orbax(
            path,
            self.config.replace(dtype=dtype),
            declarations(model),
            runner.weights,
            self.tokenizer,
        )

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits after each token of a sequence.

        Args:
            token_ids: 1 to ``max_context`` ids.

        Returns:
            float32 [T, W]; row t is about token t + 1.

        Raises:
            ValueError: the sequence is empty or too long, or an id is not in the vocabulary.
        """
        words = self.config.vocab_size
        with self.core.together("logits", partial(check_token_ids, token_ids, words)) as tokens:
            logits = np.concatenate(self._in_chunks("logits", tokens, self.runner.logits))
        return logits[:, :words]

    def score(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Log-probability of each token of a sequence given those before it, the first left out.

        Args:
            token_ids: 2 to ``max_context`` + 1 ids; the last one is not run.

        Returns:
            float32 [T − 1], natural logarithms; NaN where the model's logits are not numbers.

        Raises:
            ValueError: the sequence is too short or too long, or an id is not in the vocabulary.
        """
        return self.score_with_greedy(token_ids)[0]

    def score_with_greedy(
        self, token_ids: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What :meth:`score` gives, and whether greedy decoding would have taken the same token.

        Args:
            token_ids: as of :meth:`score`.

        Returns:
            Log-probabilities float32 [T − 1], and bool [T − 1]: whether the token is the most
            likely one, of equals the one with the lowest id.

        Raises:
            ValueError: as :meth:`score`.
        """

        def checked() -> list[int]:
            tokens = check_token_ids(token_ids, self.config.vocab_size)
            if len(tokens) < 2:
                raise ValueError("score: expected at least two tokens, got one")
            return tokens

        def chunk(some: list[int], start: int, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
            after = start + 1
            return self.runner.score(some, tokens[after : after + len(some)], start, pages)

        with self.core.together("score", checked) as tokens:
            scores, greedy = zip(*self._in_chunks("score", tokens[:-1], chunk), strict=True)
        return np.concatenate(scores), np.concatenate(greedy)

    def _in_chunks(
        self,
        what: str,
        tokens: list[int],
        run: Callable[[list[int], int, list[int]], Result],
    ) -> list[Result]:
        """Runs a sequence through the cache outside of any request, chunk by chunk; what ``run``
        gave of each."""
        self.check_open()
        if len(tokens) > self.max_context:
            raise ValueError(
                f"{what}: expected at most max_context = {self.max_context} tokens, "
                f"got {len(tokens)}"
            )
        layout, step = self.runner.layout, self.runner.buckets.chunk[-1]
        if layout.pages_for(len(tokens)) > self.runner.num_pages:
            raise ValueError(
                f"{what}: the cache holds {self.runner.num_pages * layout.page_size} tokens, got "
                f"{len(tokens)}"
            )
        with self.core.borrowed_pages(layout.pages_for(len(tokens))) as pages:
            starts = range(0, len(tokens), step)
            return [run(tokens[start : start + step], start, pages) for start in starts]

    def close(self) -> None:
        """Frees weights and cache on the device; the object is of no use afterwards. Requests that
        are not finished end as cancelled."""
        self.core.close()

    def check_open(self) -> None:
        """Raises RuntimeError after :meth:`close`."""
        if self.core.closed:
            raise RuntimeError("this LLM has been closed; load it again")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_token_ids(token_ids: Iterable[Any], vocab_size: int) -> list[int]:
    """Token ids as a list of int; ValueError if there are none or one is not in 0 … vocab_size −
    1."""
    try:
        tokens = [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise ValueError(f"expected integer token ids ({error})") from None
    if not tokens:
        raise ValueError("expected at least one token, got none")
    bad = [token for token in tokens if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"expected token ids from 0 to {vocab_size - 1}, got {bad[:10]}")
    return tokens


def show_progress(progress: bool | None) -> bool:
    """Whether to show a bar: as asked, or where stderr is a terminal."""
    return sys.stderr.isatty() if progress is None else progress
