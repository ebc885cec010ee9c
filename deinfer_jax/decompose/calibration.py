"""Calibration tokens: from texts, from given ids, or written by the model itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from jinja2 import TemplateError
from tqdm import tqdm

from deinfer_jax.engine.generate import generate
from deinfer_jax.engine.llm import LLM, show_progress

__all__ = ["Calibration", "from_ids", "from_text", "self_written"]

# At temperature 1 a model's own text is what its loss is an expectation over; the rarest words are
# left out because one of them leads a small model astray for the rest of the document.
TEMPERATURE, TOP_P = 1.0, 0.95
MOST_DOCUMENT, MOST_QUESTION, MOST_ANSWER = 256, 96, 192  # tokens
SEPARATOR = "<|endoftext|>"  # between documents of the pretraining, where no BOS is in use
MARKER = "CONTENT GOES HERE"  # never a message of anybody's
MOST_EMPTY_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Tokens on which a decomposition measures what matters.

    Attributes:
        tokens: int32 [windows, window], each row run as a sequence of its own.
        description: what they are, in JSON's types, for config.json and the log; no paths.
    """

    tokens: Int32[np.ndarray, "windows window"]
    description: dict[str, Any]


def from_ids(ids: Any, *, vocab_size: int, max_window: int) -> Calibration:
    """Calibration tokens that are given.

    Args:
        ids: integers [windows, window].
        vocab_size: W; ids lie below it.
        max_window: tokens that the model's context holds.

    Raises:
        ValueError: not integers, another shape, or ids outside the vocabulary.
    """
    array = np.asarray(ids)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"calibration ids: expected integers, got {array.dtype}")
    if array.ndim != 2 or array.shape[0] < 1 or not 2 <= array.shape[1] <= max_window:
        raise ValueError(
            f"calibration ids: expected [windows, window] with windows of 2 to {max_window} "
            f"tokens, got shape {list(array.shape)}"
        )
    bad = array[(array < 0) | (array >= vocab_size)]
    if bad.size:
        raise ValueError(
            f"calibration ids: expected ids from 0 to {vocab_size - 1}, got {bad[:5].tolist()}"
        )
    return _calibration(array, {"source": "ids"})


def from_text(tokenizer: Any, paths: Sequence[Path], *, tokens: int, window: int) -> Calibration:
    """Windows spread evenly over one or more texts, an equal number of each.

    A text is tokenised as a whole, without special tokens. Its first window begins it, its last one
    ends it, and the others lie at equal distances: what a text is about changes along it, and its
    beginning alone is a worse sample (docs/quality.md). Where the windows cannot be shared out
    equally, the first texts give one more.

    Args:
        tokenizer: of ``transformers``.
        paths: files in UTF-8.
        tokens: in all, a multiple of ``window``.
        window: tokens of a sequence.

    Raises:
        ValueError: there is no tokenizer, a text is too short, empty or not UTF-8, or the sizes do
            not fit together.
        FileNotFoundError: a file is missing.
    """
    windows = _windows(tokens, window)
    if tokenizer is None:
        raise ValueError("calibration text: expected a model with a tokenizer, this one has none")
    if not 1 <= len(paths) <= windows:
        raise ValueError(
            f"calibration text: expected one to {windows} texts (a window of {window} of "
            f"{tokens} tokens each at least), got {len(paths)}"
        )
    share, more = divmod(windows, len(paths))
    counts = [share + (index < more) for index in range(len(paths))]
    parts = [
        _spread(_ids(tokenizer, Path(path), count * window), window, count)
        for path, count in zip(paths, counts, strict=True)
    ]
    names = [Path(path).name for path in paths]
    return _calibration(np.concatenate(parts), {"source": "text", "names": names})


def self_written(
    llm: LLM, *, tokens: int, window: int, seed: int = 0, progress: bool | None = None
) -> Calibration:
    """Calibration tokens written by the model that is to be decomposed; no data is needed.

    Half of the windows are plain text: documents that begin with what precedes a document in the
    model's training, its BOS if the tokenizer writes one, else ``<|endoftext|>``, else the end
    token. The other half are chats in the model's template, in which it writes the user's message
    (the prompt is the template up to where that begins) and then answers it. Everything is sampled
    at temperature 1 with top-p 0.95, and stays token ids: nothing is decoded and tokenised again.
    Documents and chats are joined, each with its special tokens, and cut into windows. Without a
    chat template all of it is plain text.

    Args:
        llm: loaded with ``max_context`` of at least 512 (or ``window``, if that is less) and a
            ``max_batch`` of 32, as many documents as are written at once for 8,192 tokens.
        tokens: in all, a multiple of ``window``.
        window: tokens of a sequence.
        seed: the same one writes the same, up to near-ties (see ``generate``).
        progress: a bar with tokens a second; None = where stderr is a terminal.

    Raises:
        ValueError: no tokenizer, sizes that do not fit, a chat template that cannot be used, or a
            model that ends every document at once.
        RuntimeError: generation failed.
    """
    windows = _windows(tokens, window)
    if llm.tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, so it cannot write its own calibration; expected "
            "calibration token ids, or a tokenizer and a text"
        )
    if seed < 0:
        raise ValueError(f"seed: expected an integer >= 0, got {seed}")
    writer = _Writer(llm, np.random.default_rng(seed))
    chats = windows // 2 if llm.tokenizer.chat_template else 0
    bar = tqdm(total=tokens, desc="calibration", unit="token", disable=not show_progress(progress))
    with bar:
        ids = _collect(writer.documents, (windows - chats) * window, 0.85 * MOST_DOCUMENT, bar)
        if chats:
            chat = _Chat(writer)
            ids += _collect(chat.conversations, chats * window, chat.guess, bar)
    description = {
        "source": "self",
        "names": ["plain text", "chats"] if chats else ["plain text"],
        "seed": seed,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    return _calibration(np.asarray(ids).reshape(windows, window), description)


def _calibration(array: np.ndarray, description: dict[str, Any]) -> Calibration:
    array = np.ascontiguousarray(array, dtype=np.int32)
    digest = hashlib.sha256(array.astype("<i4").tobytes()).hexdigest()
    sizes = {"tokens": array.size, "window": array.shape[1], "sha256": digest}
    return Calibration(tokens=array, description=description | sizes)


def _windows(tokens: int, window: int) -> int:
    if window < 2:
        raise ValueError(f"calibration: expected windows of two tokens or more, got {window}")
    if tokens < window or tokens % window:
        raise ValueError(
            f"calibration: expected a positive multiple of the window of {window} tokens, got "
            f"{tokens} tokens"
        )
    return tokens // window


def _ids(tokenizer: Any, path: Path, count: int) -> np.ndarray:
    """All of a text's ids, ``count`` at least."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration text {path}: expected UTF-8, got {error}") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < count:
        raise ValueError(
            f"calibration text {path}: expected at least {count} tokens, got {len(ids)}"
        )
    return np.asarray(ids)


def _spread(ids: np.ndarray, window: int, count: int) -> np.ndarray:
    """[count, window], from the first id to the last."""
    starts = np.linspace(0, len(ids) - window, count).astype(np.int64)
    return np.stack([ids[start : start + window] for start in starts])


def _collect(
    write: Callable[[int], list[list[int]]], count: int, guess: float, bar: Any
) -> list[int]:
    """``count`` ids of documents that ``write(how many)`` gives, written until they suffice;
    ``guess`` is how long one becomes."""
    ids: list[int] = []
    documents = empty = 0
    while len(ids) < count:
        length = len(ids) / documents if documents else guess
        written = write(max(1, round((count - len(ids)) / length)))
        documents += len(written)
        added = [token for document in written for token in document]
        bar.update(min(len(added), count - len(ids)))
        ids += added
        empty = 0 if added else empty + 1
        if empty == MOST_EMPTY_ROUNDS:
            raise ValueError(
                f"the model ends its documents before it writes anything ({empty} rounds without a "
                "token); expected a model that continues, or a calibration text"
            )
    return ids[:count]


class _Writer:
    """Samples from a model.

    Args:
        llm: with a tokenizer.
        rng: of the documents' seeds.
    """

    def __init__(self, llm: LLM, rng: np.random.Generator) -> None:
        self.llm, self.rng = llm, rng
        self.opening = _opening(llm)
        self.ends = {*llm.eos_token_ids, self.opening}

    def sample(self, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Continuations of at most that many tokens, end tokens included."""
        seeds = self.rng.integers(0, 2**63, len(prompts), dtype=np.uint64).tolist()
        longest = self.llm.max_context - max(map(len, prompts))
        if longest < 1:
            raise ValueError(
                f"max_context = {self.llm.max_context} is too small for a prompt of "
                f"{max(map(len, prompts))} tokens; load the model with a larger one"
            )
        done = generate(
            self.llm,
            prompts,
            max_new_tokens=min(most, longest),
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=seeds,
            stop_token_ids=sorted(self.ends),
        )
        errors = [completion.error for completion in done if completion.finish_reason == "error"]
        if errors:
            raise RuntimeError(f"the model cannot write its calibration: {errors[0]}")
        return [list(completion.token_ids) for completion in done]

    def documents(self, count: int) -> list[list[int]]:
        """Plain texts, each begun by the opening token and without the token that ended it."""
        most = MOST_DOCUMENT - 1
        written = [self.strip(ids) for ids in self.sample([[self.opening]] * count, most)]
        return [[self.opening, *ids] for ids in written if ids]

    def strip(self, ids: list[int]) -> list[int]:
        """Without the end token."""
        return ids[:-1] if ids[-1] in self.ends else ids


class _Chat:
    """The model talks to itself in its own template, which is cut up around the two messages."""

    def __init__(self, writer: _Writer) -> None:
        self.writer = writer
        tokenizer = writer.llm.tokenizer
        marker = {"content": MARKER}
        before, between = _around_marker(tokenizer, [{"role": "user"} | marker], generation=True)
        said = [{"role": "user", "content": "Hello!"}, {"role": "assistant"} | marker]
        _, after = _around_marker(tokenizer, said, generation=False)
        self.before, self.between, self.after = (
            list(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (before, between, after)
        )
        # What closes a message in the template ends it here too, if it is a token of that purpose.
        closing = {*self.between[:1], *self.after[:1]}
        writer.ends |= closing & set(tokenizer.get_added_vocab().values())

    @property
    def guess(self) -> float:
        """Tokens of a conversation, about."""
        template = len(self.before) + len(self.between) + len(self.after)
        return template + 0.4 * MOST_QUESTION + 0.8 * MOST_ANSWER

    def conversations(self, count: int) -> list[list[int]]:
        """System prompt if the template has one, question, answer, special tokens included."""
        asked = self.writer.sample([self.before] * count, MOST_QUESTION)
        prompts = [
            [*self.before, *question, *self.between]
            for question in map(self.writer.strip, asked)
            if question
        ]
        answers = self.writer.sample(prompts, MOST_ANSWER) if prompts else []
        return [
            prompt + self._close(answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _close(self, answer: list[int]) -> list[int]:
        """An answer as the template ends it; one that is cut off is left open."""
        stripped = self.writer.strip(answer)
        return stripped if len(stripped) == len(answer) else stripped + self.after


def _opening(llm: LLM) -> int:
    """The token that precedes a document."""
    added = llm.tokenizer("")["input_ids"]  # the BOS, where the tokenizer writes one
    if len(added):
        return int(added[0])
    separator = llm.tokenizer.get_vocab().get(SEPARATOR)
    if separator is not None:
        return int(separator)
    if llm.eos_token_ids:
        return llm.eos_token_ids[0]
    raise ValueError(
        "the model has neither BOS nor end token, so it cannot begin a document; expected a "
        "calibration text"
    )


def _around_marker(tokenizer: Any, messages: list[Any], *, generation: bool) -> tuple[str, str]:
    """The rendered chat before and after the message whose content is the marker."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses a chat: {error}") from error
    before, *rest = text.split(MARKER)
    if not before or len(rest) != 1:
        raise ValueError(
            f"the model's chat template: expected a message's content once, behind something, got "
            f"{text!r}"
        )
    return before, rest[0]
