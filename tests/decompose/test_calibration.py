"""Calibration tokens: cut from texts, given as ids, and written by a tiny model itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, ModelConfig
from deinfer_jax.decompose import calibration
from deinfer_jax.decompose.calibration import from_ids, from_text, self_written

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<start>system\nw1 w2<end>\n{% endif %}"
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
WORDS = ["<unk>", "<|endoftext|>", "<start>", "<end>", "\n", "system", "user", "assistant"]
UNKNOWN, SEPARATOR, START, END, NEWLINE, SYSTEM, USER, ASSISTANT = range(8)
W1, W2 = 9, 10
SYSTEM_PROMPT = [START, SYSTEM, NEWLINE, W1, W2, END, NEWLINE]
CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_position=256,
    eos_token_ids=(END,),
)


def make_tokenizer(*, template: str | None = TEMPLATE, bos: str | None = None) -> Any:
    """One id a word; w0 … w88 are 8 … 96, line breaks are words, <start> and <end> are special."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(89))])}
    tokenizer: Any = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Split(Regex(" +"), "removed"),
        ]
    )
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<start>", "<|endoftext|>"],
        chat_template=template,
    )


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLM]:
    with deinfer_jax.load(CONFIG, max_batch=4, max_context=256, prefill_chunk=16) as llm:
        # Random weights are small; larger ones make the continuations varied.
        weights = llm.runner.weights
        llm.runner.weights = jax.tree.map(lambda w: 8 * w if w.ndim > 1 else w, weights)
        yield llm


@pytest.fixture
def llm(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The tiny model with a tokenizer that has a chat template; documents are short."""
    monkeypatch.setattr(loaded, "tokenizer", make_tokenizer())
    for name, most in (("MOST_DOCUMENT", 24), ("MOST_QUESTION", 8), ("MOST_ANSWER", 12)):
        monkeypatch.setattr(calibration, name, most)
    return loaded


def write(llm: LLM, *, tokens: int = 256, window: int = 32, seed: int = 0) -> Any:
    return self_written(llm, tokens=tokens, window=window, seed=seed, progress=False)


def split(ids: np.ndarray, at: list[int]) -> list[list[int]]:
    """The pieces that begin with ``at``; what is before the first must be nothing."""
    flat = ids.ravel().tolist()
    starts = [i for i in range(len(flat)) if flat[i : i + len(at)] == at]
    assert starts[0] == 0
    return [flat[a:b] for a, b in zip(starts, [*starts[1:], len(flat)], strict=True)]


def save(path: Path, count: int, first: int = 0) -> Path:
    path.write_text(" ".join(f"w{i % 89}" for i in range(first, first + count)), encoding="utf-8")
    return path


class TestText:
    """Windows spread over each text."""

    def test_from_the_first_word_to_the_last(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.txt", 76)
        found = from_text(make_tokenizer(bos="<start>"), [path], tokens=48, window=16)
        assert found.tokens.dtype == np.int32
        # No BOS: the first word is w0, id 8; windows begin at words 0, 30 and 60.
        starts = np.array([0, 30, 60])
        np.testing.assert_array_equal(found.tokens, 8 + starts[:, None] + np.arange(16))

    def test_a_text_that_just_suffices(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.txt", 48)
        found = from_text(make_tokenizer(), [path], tokens=48, window=16)
        np.testing.assert_array_equal(found.tokens, np.arange(8, 56).reshape(3, 16))

    def test_two_texts_give_half_each(self, tmp_path: Path) -> None:
        paths = [save(tmp_path / "a.txt", 40), save(tmp_path / "b.txt", 40, first=40)]
        found = from_text(make_tokenizer(), paths, tokens=64, window=16)
        assert found.tokens[:, 0].tolist() == [8, 32, 48, 72]

    def test_the_first_gives_the_odd_window(self, tmp_path: Path) -> None:
        paths = [save(tmp_path / "a.txt", 40), save(tmp_path / "b.txt", 16, first=40)]
        found = from_text(make_tokenizer(), paths, tokens=48, window=16)
        assert found.tokens[:, 0].tolist() == [8, 32, 48]

    def test_description(self, tmp_path: Path) -> None:
        paths = [save(tmp_path / "a.txt", 40), save(tmp_path / "b.txt", 40)]
        found = from_text(make_tokenizer(), paths, tokens=64, window=16)
        digest = hashlib.sha256(found.tokens.astype("<i4").tobytes()).hexdigest()
        assert found.description == {
            "source": "text",
            "names": ["a.txt", "b.txt"],
            "tokens": 64,
            "window": 16,
            "sha256": digest,
        }

    def test_a_short_text_says_how_short(self, tmp_path: Path) -> None:
        paths = [save(tmp_path / "a.txt", 40), save(tmp_path / "b.txt", 31)]
        with pytest.raises(ValueError, match=r"b\.txt: expected at least 32 tokens, got 31"):
            from_text(make_tokenizer(), paths, tokens=64, window=16)

    def test_an_empty_text(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a\.txt: expected at least 16 tokens, got 0"):
            from_text(make_tokenizer(), [save(tmp_path / "a.txt", 0)], tokens=16, window=16)

    def test_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes("Bär".encode("latin-1"))
        with pytest.raises(ValueError, match=r"a\.txt: expected UTF-8, got .*0xe4"):
            from_text(make_tokenizer(), [tmp_path / "a.txt"], tokens=16, window=16)

    def test_a_missing_text(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"a\.txt"):
            from_text(make_tokenizer(), [tmp_path / "a.txt"], tokens=16, window=16)

    def test_a_model_without_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="expected a model with a tokenizer"):
            from_text(None, [tmp_path / "a.txt"], tokens=16, window=16)

    @pytest.mark.parametrize(
        ("count", "tokens", "window", "message"),
        [
            (1, 40, 16, "expected a positive multiple of the window of 16 tokens, got 40"),
            (1, 0, 16, "expected a positive multiple of the window of 16 tokens, got 0"),
            (1, 16, 1, "expected windows of two tokens or more, got 1"),
            (3, 32, 16, "expected one to 2 texts .*, got 3"),
            (0, 32, 16, "expected one to 2 texts .*, got 0"),
        ],
    )
    def test_sizes(
        self, tmp_path: Path, count: int, tokens: int, window: int, message: str
    ) -> None:
        paths = [save(tmp_path / "a.txt", 90)] * count
        with pytest.raises(ValueError, match=message):
            from_text(make_tokenizer(), paths, tokens=tokens, window=window)


class TestIds:
    """Ids that are given."""

    def test_an_array(self) -> None:
        ids = np.arange(12, dtype=np.int64).reshape(3, 4)
        found = from_ids(ids, vocab_size=12, max_window=4)
        assert found.tokens.dtype == np.int32
        np.testing.assert_array_equal(found.tokens, ids)
        assert {"source": "ids", "tokens": 12, "window": 4}.items() <= found.description.items()

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([[1.0, 2.0]], "expected integers, got float64"),
            ([1, 2], r"\[windows, window\] .* got shape \[2\]"),
            ([[1], [2]], r"windows of 2 to 5 tokens, got shape \[2, 1\]"),
            ([[1, 2, 3, 4, 5, 6]], r"windows of 2 to 5 tokens, got shape \[1, 6\]"),
            ([[1, 7], [-1, 2]], r"expected ids from 0 to 6, got \[7, -1\]"),
        ],
    )
    def test_bad_ids(self, ids: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            from_ids(ids, vocab_size=7, max_window=5)


class TestSelfWritten:
    """Half documents, half chats, all by the model."""

    def test_windows_are_full(self, llm: LLM) -> None:
        found = write(llm)
        assert found.tokens.shape == (8, 32) and found.tokens.dtype == np.int32
        assert found.tokens.min() >= 0 and found.tokens.max() < 97

    def test_documents_begin_with_the_separator(self, llm: LLM) -> None:
        documents = split(write(llm).tokens[:4], [SEPARATOR])
        assert len(documents) >= 6  # 128 tokens in documents of 24 at most
        assert all(len(document) <= 24 for document in documents)
        assert END not in sum(documents, [])

    def test_documents_begin_with_the_bos_that_the_tokenizer_writes(self, llm: LLM) -> None:
        llm.tokenizer = make_tokenizer(bos="<start>")
        documents = split(write(llm).tokens[:4], [START])
        assert len(documents) >= 6

    def test_chats_follow_the_template(self, llm: LLM) -> None:
        chats = split(write(llm).tokens[4:], SYSTEM_PROMPT)
        assert len(chats) >= 3
        for chat in chats[:-1]:  # the last one is cut off by its window
            question = [START, USER, NEWLINE]
            answer = [END, NEWLINE, START, ASSISTANT, NEWLINE]
            assert chat[7:10] == question
            # At most 8 tokens of question, at most 12 of answer (13 with what closes it).
            starts = [i for i in range(len(chat)) if chat[i : i + 5] == answer]
            assert starts and 11 <= starts[0] <= 18
            assert len(chat) - (starts[0] + 5) <= 12 + 1

    def test_the_model_continues_its_own_tokens(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts: list[list[int]] = []
        real = calibration.generate

        def spy(llm: LLM, asked: Any, **options: Any) -> Any:
            prompts.extend(asked)
            assert options["temperature"] == 1.0
            return real(llm, asked, **options)

        monkeypatch.setattr(calibration, "generate", spy)
        found = write(llm)
        ask = [*SYSTEM_PROMPT, START, USER, NEWLINE]
        answer = [END, NEWLINE, START, ASSISTANT, NEWLINE]
        assert [SEPARATOR] in prompts and ask in prompts
        answered = [p for p in prompts if p[: len(ask)] == ask and p != ask]
        assert answered and all(p[-len(answer) :] == answer for p in answered)
        flat = found.tokens[4:].ravel().tolist()
        assert flat[: len(answered[0])] == answered[0]

    def test_a_finished_answer_is_closed_and_a_cut_one_left_open(self, llm: LLM) -> None:
        chat = calibration._Chat(calibration._Writer(llm, np.random.default_rng(0)))
        assert chat._close([11, 12, END]) == [11, 12, END, NEWLINE]
        assert chat._close([11, 12, 13]) == [11, 12, 13]

    def test_the_seed_decides(self, llm: LLM) -> None:
        one, same, other = write(llm, seed=1), write(llm, seed=1), write(llm, seed=2)
        np.testing.assert_array_equal(one.tokens, same.tokens)
        assert one.description == same.description
        assert (one.tokens != other.tokens).mean() > 0.5

    def test_documents_differ(self, llm: LLM) -> None:
        documents = split(write(llm).tokens[:4], [SEPARATOR])
        assert len({tuple(document[1:4]) for document in documents[:-1]}) == len(documents) - 1

    def test_description(self, llm: LLM) -> None:
        description = write(llm, seed=3).description
        expected = {"source": "self", "names": ["plain text", "chats"], "seed": 3, "tokens": 256}
        assert expected.items() <= description.items()
        assert json.loads(json.dumps(description)) == description

    def test_without_a_template_all_is_plain_text(self, llm: LLM) -> None:
        llm.tokenizer = make_tokenizer(template=None)
        found = write(llm)
        assert found.description["names"] == ["plain text"]
        assert all(len(document) <= 24 for document in split(found.tokens, [SEPARATOR]))

    def test_without_a_tokenizer(self, llm: LLM) -> None:
        llm.tokenizer = None
        with pytest.raises(ValueError, match="no tokenizer.*expected calibration token ids"):
            write(llm)

    def test_a_model_that_says_nothing(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        real = calibration._Writer.sample
        monkeypatch.setattr(
            calibration._Writer, "sample", lambda *a: [[END] for _ in real(*a)], raising=True
        )
        with pytest.raises(ValueError, match="ends its documents before it writes anything"):
            write(llm)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('no users here') }}", "refuses a chat: no users here"),
            ("<start>nothing", "expected a message's content once, .* got '<start>nothing'"),
        ],
    )
    def test_a_template_that_cannot_be_used(self, llm: LLM, template: str, message: str) -> None:
        llm.tokenizer = make_tokenizer(template=template)
        with pytest.raises(ValueError, match=message):
            write(llm)

    def test_sizes_and_seed(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="multiple of the window of 32 tokens, got 40"):
            write(llm, tokens=40)
        with pytest.raises(ValueError, match="seed: expected an integer >= 0, got -1"):
            write(llm, seed=-1)

    def test_a_model_that_fails(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = jax.tree.map(lambda w: w * np.float32("nan"), llm.runner.weights)
        monkeypatch.setattr(llm.runner, "weights", weights)
        with pytest.raises(RuntimeError, match="cannot write its calibration: the logits"):
            write(llm)


@pytest.mark.full
def test_smollm2_writes_in_its_own_distribution(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("MOST_DOCUMENT", 64), ("MOST_QUESTION", 32), ("MOST_ANSWER", 48)):
        monkeypatch.setattr(calibration, name, most)
    with deinfer_jax.load(smollm2_gguf, max_batch=8, max_context=256) as llm:
        found = self_written(llm, tokens=512, window=128, progress=False)
        nll = -np.mean([llm.score(window.tolist()).mean() for window in found.tokens])
        asked = llm.tokenizer("<|im_start|>user\n")["input_ids"]
    # Openings count much in so short documents; text of strangers is at 3.3 nats in windows of 512,
    # and words at random are above 10. Of WikiText's first 512 tokens 182 differ.
    assert 1.0 < nll < 4.0
    assert len(np.unique(found.tokens)) > 200
    assert len(split(found.tokens[:2], [0])) >= 4  # <|endoftext|> before each document
    chats = found.tokens[2:].ravel().tolist()
    assert chats[:2] == llm.tokenizer("<|im_start|>system")["input_ids"]
    assert any(chats[i : i + len(asked)] == asked for i in range(len(chats)))
