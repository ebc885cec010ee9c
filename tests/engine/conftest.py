"""A tiny random model for the engine's tests."""

from __future__ import annotations

import signal
from typing import Any

import jaxtyping
import pytest

from deinfer_jax import LLM, ModelConfig
from tests.engine import helpers
from tests.engine.helpers import (
    FILTERED,
    GREEDY,
    SAMPLED,
    Ending,
    check_idle,
    plant_nan,
    prompts,
    run,
)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return helpers.CONFIG


@pytest.fixture(scope="module")
def load_tiny():
    """Loads the tiny model; what was loaded is closed at the end of the module."""
    loaded = []

    def load(**options: Any) -> LLM:
        loaded.append(helpers.load(**options))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


@pytest.fixture(scope="session")
def llm():
    """The model that the tests of several files share; it is as it was after each of them."""
    with helpers.load() as shared:
        yield shared


@pytest.fixture(autouse=True)
def nothing_is_lost(request: pytest.FixtureRequest):
    """Whatever a test did, the shared model has all pages and slots afterwards; what the pages hold
    is not to be found by the next test."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        check_idle(llm)
        llm.core.scheduler.restart([])


@pytest.fixture
def ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the shared model as on a GPU: a step is dispatched before the last one is read."""
    monkeypatch.setattr(llm.core, "ahead", 1)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of any type, as in a user's process: annotations are not checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def together(llm: LLM) -> dict[str, list[tuple[int, ...]]]:
    return {str(s): run(llm, prompts(), **s) for s in (GREEDY, SAMPLED, FILTERED)}


@pytest.fixture(scope="session")
def ending(llm: LLM) -> Ending:
    everything = [[word, 6] for word in range(7, 57)]
    found = run(llm, everything)
    for prompt, ids in zip(everything, found, strict=True):
        for other, other_ids in zip(everything, found, strict=True):
            if ids[3] not in (*prompt, *ids[:3], *other, *other_ids, 2):
                return Ending(prompt, ids, other)
    raise AssertionError("the random model gives no such continuation")


@pytest.fixture(scope="session")
def bad_word(llm: LLM) -> int:
    """A word that occurs in no prompt and no continuation."""
    seen = {
        word
        for setting in (GREEDY, SAMPLED)
        for ids in run(llm, prompts(), **setting)
        for word in ids
    }
    return min(set(range(60, 97)) - seen)


@pytest.fixture
def broken(load_tiny, bad_word: int) -> LLM:
    """The shared model, but for that word."""
    llm = load_tiny(max_batch=3)
    plant_nan(llm, bad_word)
    return llm


@pytest.fixture(scope="session")
def sentencepiece() -> Any:
    """A tokenizer as of Llama 2: words begin with a blank, decoding drops the first one, and
    characters that are not in the vocabulary are bytes. Ids 0 … 96."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xBC>", "ly", ",", *(f"▁w{i}" for i in range(90))]
    model = WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    """As in a terminal: what runs in the background may have been started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def speaking(llm: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The shared model with words."""
    monkeypatch.setattr(llm, "tokenizer", sentencepiece)
    return llm


@pytest.fixture(scope="session")
def halves() -> Any:
    """A tokenizer of half characters: 30 bytes that begin one of two bytes, and 64 that end it."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    # As GPT-2 writes bytes: those of Latin-1 that do not print come from U+0100 on.
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    written = [chr(byte if byte in prints else next(others)) for byte in range(256)]
    pieces = [*special, *written[0xC2:0xE0], *written[0x80:0xC0]]
    assert len(pieces) == helpers.CONFIG.vocab_size
    model = WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    tokenizer: Any = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def stuttering(llm: LLM, halves: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The shared model with half characters."""
    monkeypatch.setattr(llm, "tokenizer", halves)
    return llm
