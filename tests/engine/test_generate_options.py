"""Samples, log-probabilities, stop strings, streams, Ctrl-C, the bar."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, Increment, TokenLogprob
from deinfer_jax.engine.scheduler import PrefillStep
from deinfer_jax.engine.text import TextStream
from tests import tiny
from tests.engine import helpers
from tests.engine.helpers import (
    FILTERED,
    GREEDY,
    SAMPLED,
    SETTINGS,
    check_idle,
    prompts,
    run,
    tokens,
)

# The name is the function's, too.
generate_module = importlib.import_module("deinfer_jax.engine.generate")

FLAT: dict[str, Any] = dict(temperature=1e6, seed=5)  # every word is as likely as any other
NEAR = 1e-5  # log-probabilities that are so close are equal, up to rounding
WAIT_S = 60


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


@pytest.fixture(scope="module")
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


def generate(llm: LLM, what: Any, new: int = 12, **options: Any) -> list[Completion]:
    return deinfer_jax.generate(llm, what, max_new_tokens=new, ignore_eos=True, **options)


def stream(llm: LLM, what: Any, new: int = 12, **options: Any) -> Any:
    return deinfer_jax.generate(
        llm, what, max_new_tokens=new, ignore_eos=True, stream=True, **options
    )


def samples(done: Completion) -> list[tuple[int, ...]]:
    return tokens(list(done.samples))


class TestSamples:
    @SETTINGS
    def test_they_are_those_of_equal_prompts(self, llm: LLM, setting: dict[str, Any]) -> None:
        (done,) = generate(llm, [5, 6], n=5, **setting)
        assert samples(done) == run(llm, [[5, 6]] * 5, **setting)

    def test_each_alone(self, llm: LLM) -> None:
        (done,) = generate(llm, prompts()[7], n=4, **SAMPLED)
        for count in (1, 2, 3):
            (fewer,) = generate(llm, prompts()[7], n=count, **SAMPLED)
            assert (samples(fewer) or [fewer.token_ids]) == samples(done)[:count]

    def test_they_differ(self, llm: LLM) -> None:
        (done,) = generate(llm, [5, 6], n=5, **SAMPLED)
        assert len(set(samples(done))) == 5

    def test_greedy_ones_do_not(self, llm: LLM) -> None:
        (done,) = generate(llm, [5, 6], n=3)
        assert samples(done) == run(llm, [5, 6]) * 3

    def test_the_first_is_the_completion(self, llm: LLM) -> None:
        (done,) = generate(llm, [5, 6], n=3, logprobs=1, **SAMPLED)
        first = done.samples[0]
        for name in ("prompt_token_ids", "text", "token_ids", "finish_reason", "logprobs"):
            assert getattr(done, name) == getattr(first, name)
        assert done.timing == first.timing
        assert all(sample.samples == () for sample in done.samples)

    def test_one_has_no_samples(self, llm: LLM) -> None:
        assert generate(llm, [5, 6], n=1)[0].samples == ()

    def test_they_count_on_over_equal_prompts(self, llm: LLM) -> None:
        first, other, second = generate(llm, [[5, 6], [9], [5, 6]], n=2, **SAMPLED)
        (four,) = generate(llm, [5, 6], n=4, **SAMPLED)
        assert samples(first) + samples(second) == samples(four)
        assert samples(other) == samples(generate(llm, [9], n=2, **SAMPLED)[0])

    def test_seeds_are_of_prompts(self, llm: LLM) -> None:
        found = generate(llm, [[5, 6], [5, 6]], n=2, temperature=1.0, seed=[3, 8])
        for done, seed in zip(found, (3, 8), strict=True):
            (alone,) = generate(llm, [5, 6], n=2, temperature=1.0, seed=seed)
            assert samples(done) == samples(alone)

    @pytest.mark.parametrize("length", [1, 2, 16, 17, 48, 70])
    @pytest.mark.parametrize("n", [3, 6])
    def test_the_prompt_runs_once(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch, length: int, n: int
    ) -> None:
        steps: list[PrefillStep] = []
        prefill = llm.runner.prefill

        def spy(step: PrefillStep) -> Any:
            steps.append(step)
            return prefill(step)

        monkeypatch.setattr(llm.runner, "prefill", spy)
        (done,) = generate(llm, [5 + i % 50 for i in range(length)], n=n, **SAMPLED)
        # The last token of each other sample has to run, or there would be no logits.
        assert sum(step.length for step in steps) == length + n - 1
        assert len(done.samples) == n

    def test_each_ends_by_itself(self, llm: LLM) -> None:
        (plain,) = generate(llm, [5, 6], n=4, **SAMPLED)
        word = samples(plain)[1][4]
        (done,) = generate(llm, [5, 6], n=4, stop_token_ids=[word], **SAMPLED)
        for ids, sample in zip(samples(plain), done.samples, strict=True):
            end = ids.index(word) + 1 if word in ids else len(ids)
            assert sample.token_ids == ids[:end]
            assert sample.finish_reason == ("stop" if word in ids else "length")
        assert len({sample.finish_reason for sample in done.samples}) == 2


class TestLogprobs:
    def check(self, llm: LLM, done: Completion, count: int) -> None:
        """Against a float64 log-softmax of the logits of the whole sequence."""
        before = len(done.prompt_token_ids)
        logits = llm.logits([*done.prompt_token_ids, *done.token_ids[:-1]])[before - 1 :]
        logits = logits.astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
        for token, row, found in zip(done.token_ids, expected, done.logprobs, strict=True):
            assert found.token_id == token
            assert abs(found.logprob - row[token]) < NEAR
            words = np.argsort(-row, kind="stable")[:count]
            ids = [word for word, _ in found.best]
            assert len(set(ids)) == len(ids) == count
            given = np.array([logprob for _, logprob in found.best])
            np.testing.assert_allclose(given, row[words], rtol=0, atol=NEAR)
            np.testing.assert_allclose(given, row[ids], rtol=0, atol=NEAR)
            if ids != words.tolist():  # at near-ties only
                assert np.diff(row[words]).max() > -NEAR
            assert (np.diff(given) <= 0).all()

    @pytest.mark.parametrize("count", [0, 1, 5, 20])
    @pytest.mark.parametrize(
        "setting",
        [GREEDY, SAMPLED, FILTERED, dict(temperature=7.0, top_k=3)],
        ids=["greedy", "sampled", "filtered", "hot"],
    )
    def test_against_the_logits(self, llm: LLM, setting: dict[str, Any], count: int) -> None:
        for done in generate(llm, prompts()[:6], logprobs=count, **setting):
            self.check(llm, done, count)

    def test_of_samples(self, llm: LLM) -> None:
        (done,) = generate(llm, prompts()[6], n=5, logprobs=2, **SAMPLED)
        for sample in done.samples:
            self.check(llm, sample, 2)

    def test_several_steps_a_dispatch(self, load_tiny) -> None:
        llm = load_tiny(decode_steps=4)
        for done in generate(llm, prompts()[:6], logprobs=3, **SAMPLED):
            self.check(llm, done, 3)

    def test_with_a_step_in_flight(self, llm: LLM, ahead) -> None:
        for done in generate(llm, prompts()[:6], logprobs=3, **SAMPLED):
            self.check(llm, done, 3)

    def test_after_a_preemption(self, load_tiny) -> None:
        small = load_tiny(cache_bytes=8 * 4096)
        found = generate(small, prompts()[:8], 40, logprobs=3, **SAMPLED)
        assert small.core.scheduler.preemptions > 0
        for done in found:
            self.check(small, done, 3)

    def test_fewer_words_than_asked_for(self, load_tiny, config) -> None:
        llm = load_tiny(config=config.replace(vocab_size=11))
        (done,) = generate(llm, [5, 6], logprobs=20)
        self.check(llm, done, 11)

    def test_the_best_is_what_greedy_takes(self, llm: LLM) -> None:
        (done,) = generate(llm, [5, 6], logprobs=1)
        assert done.logprobs is not None
        assert tuple(one.best[0] for one in done.logprobs) == tuple(
            (one.token_id, one.logprob) for one in done.logprobs
        )

    def test_of_an_end_token(self, llm: LLM) -> None:
        (plain,) = generate(llm, [5, 6])
        (done,) = generate(llm, [5, 6], logprobs=1, stop_token_ids=[plain.token_ids[1]])
        assert done.token_ids == plain.token_ids[:2]
        self.check(llm, done, 1)

    @SETTINGS
    def test_tokens_are_the_same(self, llm: LLM, together, setting: dict[str, Any]) -> None:
        assert run(llm, prompts(), logprobs=4, **setting) == together[str(setting)]

    def test_none_where_not_asked_for(self, llm: LLM) -> None:
        engine = deinfer_jax.Engine(llm)
        plain = engine.add([5, 6], max_new_tokens=4)
        asking = engine.add([7, 8], max_new_tokens=4, logprobs=2)
        increments = list(engine.stream())
        assert engine.result(plain).logprobs is None
        self.check(llm, engine.result(asking), 2)
        assert all((one.logprobs is None) == (one.index == plain) for one in increments)

    def test_python_numbers(self, llm: LLM) -> None:
        (done,) = generate(llm, [5, 6], logprobs=1)
        assert done.logprobs is not None
        for one in done.logprobs:
            values = [one.token_id, one.logprob, *one.best[0]]
            assert [type(value) for value in values] == [int, float, int, float]


def said(tokenizer: Any, done: Completion, count: int) -> str:
    """Text of the first ``count`` tokens of a continuation, by decoding everything at once."""
    before, both = (
        tokenizer.decode([*done.prompt_token_ids, *ids], skip_special_tokens=True)
        for ids in ((), done.token_ids[:count])
    )
    assert both.startswith(before)
    return both[len(before) :]


def check_stopped(tokenizer: Any, plain: Completion, done: Completion, stops: list[str]) -> None:
    """``done`` is ``plain``, ended by the stop string that is complete first."""
    texts = [said(tokenizer, plain, count) for count in range(len(plain.token_ids) + 1)]
    ended = next((i for i, text in enumerate(texts) if any(s in text for s in stops)), None)
    if ended is None:
        assert (done.text, done.token_ids) == (plain.text, plain.token_ids)
        assert done.finish_reason == plain.finish_reason
        return
    found = [(texts[ended].find(s) + len(s), texts[ended].find(s)) for s in stops]
    _, start = min(place for place in found if place[1] >= 0)
    assert done.text == texts[ended][:start]
    assert (done.token_ids, done.finish_reason) == (plain.token_ids[:ended], "stop")


class TestStop:
    PROMPT = "w1 w2 w3"

    @pytest.fixture
    def plain(self, speaking: LLM) -> Completion:
        (done,) = generate(speaking, self.PROMPT, **SAMPLED)
        assert len(set(done.token_ids)) > 6
        return done

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
    @pytest.mark.parametrize("start", [0, 1, 4, 6, 11, 20])
    def test_anywhere_in_the_text(
        self, speaking: LLM, sentencepiece: Any, plain: Completion, start: int, size: int
    ) -> None:
        stop = plain.text[start : start + size]
        (done,) = generate(speaking, self.PROMPT, stop=stop, **SAMPLED)
        check_stopped(sentencepiece, plain, done, [stop])
        assert done.finish_reason == "stop"

    def test_across_tokens(self, speaking: LLM, sentencepiece: Any, plain: Completion) -> None:
        at = len(said(sentencepiece, plain, 5))
        stop = plain.text[at - 2 : at + 2]
        assert plain.text.find(stop) == at - 2
        (done,) = generate(speaking, self.PROMPT, stop=stop, **SAMPLED)
        assert done.text == plain.text[: at - 2]
        assert (done.token_ids, done.finish_reason) == (plain.token_ids[:6], "stop")

    @pytest.mark.parametrize("kind", [list, tuple, set, frozenset], ids=lambda kind: kind.__name__)
    def test_several(
        self,
        speaking: LLM,
        sentencepiece: Any,
        plain: Completion,
        unchecked,
        kind: Callable[[Any], Any],
    ) -> None:
        stops = ["nothing", plain.text[13:17], plain.text[9:20], plain.text[14:16]]
        (done,) = generate(speaking, self.PROMPT, stop=kind(stops), **SAMPLED)
        check_stopped(sentencepiece, plain, done, stops)

    def test_one_that_does_not_occur(self, speaking: LLM, plain: Completion) -> None:
        almost = plain.text[:10] + "!"
        (done,) = generate(speaking, self.PROMPT, stop=almost, **SAMPLED)
        assert (done.text, done.token_ids) == (plain.text, plain.token_ids)
        assert done.finish_reason == "length"

    def test_at_the_last_place(self, speaking: LLM, plain: Completion) -> None:
        stop = plain.text[-7:]
        (done,) = generate(speaking, self.PROMPT, stop=stop, **SAMPLED)
        assert (done.finish_reason, done.token_ids) == ("stop", plain.token_ids)
        assert done.text == plain.text[:-7]

    def test_the_prompt_does_not_count(self, speaking: LLM, plain: Completion) -> None:
        assert "w3 " not in plain.text
        (done,) = generate(speaking, self.PROMPT, stop=["w2 w3", "w3 "], **SAMPLED)
        assert done.token_ids == plain.token_ids

    def test_a_stop_token_before_it(self, speaking: LLM, plain: Completion) -> None:
        word = plain.token_ids[2]
        (done,) = generate(
            speaking, self.PROMPT, stop=plain.text[-7:], stop_token_ids=[word], **SAMPLED
        )
        assert done.token_ids == plain.token_ids[: plain.token_ids.index(word) + 1]
        assert done.finish_reason == "stop"
        assert done.text and plain.text.startswith(done.text)

    def test_samples_and_neighbours(self, speaking: LLM, sentencepiece: Any) -> None:
        many = prompts()[2:8]
        plain = generate(speaking, many, n=3, **SAMPLED)
        stop = plain[2].samples[1].text[8:12]
        found = generate(speaking, many, n=3, stop=stop, **SAMPLED)
        reasons = set()
        for before, after in zip(plain, found, strict=True):
            for one, other in zip(before.samples, after.samples, strict=True):
                check_stopped(sentencepiece, one, other, [stop])
                reasons.add(other.finish_reason)
        assert reasons == {"stop", "length"}

    def test_with_a_step_in_flight(
        self, speaking: LLM, sentencepiece: Any, plain: Completion, ahead
    ) -> None:
        stop = plain.text[10:14]
        (done,) = generate(speaking, self.PROMPT, stop=stop, **SAMPLED)
        check_stopped(sentencepiece, plain, done, [stop])

    def test_logprobs_of_all_tokens(self, speaking: LLM, plain: Completion) -> None:
        (done,) = generate(speaking, self.PROMPT, stop=plain.text[10:14], logprobs=0, **SAMPLED)
        assert done.logprobs is not None
        assert tuple(one.token_id for one in done.logprobs) == done.token_ids

    def test_one_that_is_complete_only_at_the_end(self, stuttering: LLM, halves: Any) -> None:
        # Half a character at the end is broken only because nothing more comes.
        (long,) = generate(stuttering, [3, 40], 40, **FLAT)
        texts = [said(halves, long, count) for count in range(41)]
        first = next(i for i, text in enumerate(texts) if "\ufffd" in text)
        assert texts[first] == texts[first - 1] + "\ufffd"
        (done,) = generate(stuttering, [3, 40], first, stop="\ufffd", **FLAT)
        assert (done.text, done.finish_reason) == (texts[first - 1], "stop")

    def test_without_a_tokenizer(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="^stop: expected none, .* no tokenizer$"):
            generate(llm, [5, 6], stop="w1")


def join(increments: Iterable[Increment]) -> dict[tuple[int, int], Increment]:
    """One increment a sample, of all of them."""
    parts = defaultdict(list)
    for one in increments:
        parts[one.index, one.sample].append(one)
    joined = {}
    for key, some in parts.items():
        assert [one.finish_reason is None for one in some] == [True] * (len(some) - 1) + [False]
        assert all(one.error is None for one in some[:-1])
        joined[key] = Increment(
            index=key[0],
            sample=key[1],
            text="".join(one.text for one in some),
            token_ids=sum((one.token_ids for one in some), ()),
            logprobs=None
            if some[0].logprobs is None
            else sum((one.logprobs or () for one in some), ()),
            finish_reason=some[-1].finish_reason,
            error=some[-1].error,
        )
    return joined


def assert_near(
    ours: Sequence[TokenLogprob] | None, expected: Sequence[TokenLogprob] | None
) -> None:
    """Log-probabilities are equal, up to what other batches round."""
    if ours is None or expected is None:
        assert ours is expected
        return
    assert [one.token_id for one in ours] == [one.token_id for one in expected]
    for one, other in zip(ours, expected, strict=True):
        flat = [
            [logprobs.logprob, *(logprob for _, logprob in logprobs.best)]
            for logprobs in (one, other)
        ]
        np.testing.assert_allclose(*flat, rtol=0, atol=NEAR)


def check_joined(increments: Iterable[Increment], expected: Sequence[Completion]) -> None:
    joined = join(increments)
    wanted = {
        (index, sample): one
        for index, done in enumerate(expected)
        for sample, one in enumerate(done.samples or (done,))
    }
    assert joined.keys() == wanted.keys()
    for key, done in wanted.items():
        for name in ("text", "token_ids", "finish_reason", "error"):
            assert getattr(joined[key], name) == getattr(done, name), (key, name)
        assert_near(joined[key].logprobs, done.logprobs)


class TestStream:
    @pytest.mark.parametrize("in_flight", [0, 1])
    @pytest.mark.parametrize("options", [dict(), dict(n=3, logprobs=2)], ids=["plain", "all"])
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED, FLAT], ids=["greedy", "sampled", "flat"])
    @pytest.mark.parametrize("words", ["speaking", "stuttering"])
    def test_increments_are_the_completion(
        self,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
        words: str,
        setting: dict[str, Any],
        options: dict[str, Any],
        in_flight: int,
    ) -> None:
        llm: LLM = request.getfixturevalue(words)
        expected = generate(llm, prompts()[:7], 20, **options, **setting)
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        check_joined(stream(llm, prompts()[:7], 20, **options, **setting), expected)

    @pytest.mark.parametrize("words", ["speaking", "stuttering"])
    def test_with_stop_strings(self, request: pytest.FixtureRequest, words: str) -> None:
        llm: LLM = request.getfixturevalue(words)
        plain = generate(llm, prompts(), 20, **SAMPLED)
        stops = [plain[1].text[8:16], plain[4].text[8:16]]
        expected = generate(llm, prompts(), 20, stop=stops, **SAMPLED)
        assert {done.finish_reason for done in expected} == {"stop", "length"}
        check_joined(stream(llm, prompts(), 20, stop=stops, **SAMPLED), expected)

    def test_with_end_tokens(self, speaking: LLM) -> None:
        plain = generate(speaking, prompts(), **SAMPLED)
        options: dict[str, Any] = dict(SAMPLED, stop_token_ids=[plain[2].token_ids[5]])
        expected = generate(speaking, prompts(), **options)
        assert {done.finish_reason for done in expected} == {"stop", "length"}
        check_joined(stream(speaking, prompts(), **options), expected)

    def test_several_steps_a_dispatch(
        self, load_tiny, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = load_tiny(decode_steps=4)
        monkeypatch.setattr(llm, "tokenizer", sentencepiece)
        found = list(stream(llm, prompts()[:3], logprobs=1, **SAMPLED))
        check_joined(found, generate(llm, prompts()[:3], logprobs=1, **SAMPLED))
        assert max(len(one.token_ids) for one in found) == 4

    def test_no_half_characters(self, stuttering: LLM) -> None:
        whole = 0
        for one in stream(stuttering, [3, 40], 60, n=4, **FLAT):
            if one.finish_reason is None:
                # A half that waits for the other is not shown, a broken one only with what follows.
                first_byte = 3 <= one.token_ids[-1] < 33
                assert not (first_byte and one.text.replace("\ufffd", ""))
                whole += len(one.text.replace("\ufffd", "")) == 1
        assert whole > 20

    def test_they_come_with_the_tokens(self, speaking: LLM) -> None:
        increments = stream(speaking, prompts()[:2], 30)
        seen = [0, 0]
        for one in increments:
            assert len(one.token_ids) <= 2
            seen[one.index] += len(one.token_ids)
            assert abs(seen[0] - seen[1]) <= 3
            running = sum(len(r.generated) for r in speaking.core.scheduler.running)
            assert one.finish_reason or sum(seen) >= running - 3
        assert seen == [30, 30]

    def test_without_a_tokenizer(self, llm: LLM) -> None:
        check_joined(stream(llm, prompts()[:3], **SAMPLED), generate(llm, prompts()[:3], **SAMPLED))

    def test_no_prompts(self, llm: LLM) -> None:
        assert list(stream(llm, [])) == []

    def test_nothing_runs_before_it_is_iterated(self, llm: LLM) -> None:
        increments = stream(llm, [5, 6])
        llm.core.settle()
        check_idle(llm)
        del increments

    def test_arguments_are_checked_at_once(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="^top_k: "):
            stream(llm, [5, 6], top_k=-1)
        with pytest.raises(ValueError, match="^prompt 1: .*max_context"):
            stream(llm, [[5], [5] * 200])

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_ending_early_cancels_the_rest(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch, in_flight: int
    ) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        increments = stream(llm, prompts(), 30, n=2)
        for _ in range(7):
            next(increments)
        increments.close()
        check_idle(llm)
        assert run(llm, prompts(), **SAMPLED) == together[str(SAMPLED)]

    def test_a_break_cancels_the_rest(self, llm: LLM) -> None:
        for one in stream(llm, prompts(), 30):
            if one.token_ids:
                break
        check_idle(llm)

    def test_two_in_turns(self, llm: LLM) -> None:
        many = [prompts()[:5], prompts()[4:9]]
        streams = [stream(llm, some, n=2, **SAMPLED) for some in many]
        found: list[list[Increment]] = [[], []]
        while any(streams):
            for i, increments in enumerate(streams):
                if increments and (one := next(increments, None)):
                    found[i].append(one)
                else:
                    streams[i] = None
        for some, increments in zip(many, found, strict=True):
            check_joined(increments, generate(llm, some, n=2, **SAMPLED))

    def test_other_calls_in_between(self, llm: LLM, together) -> None:
        found = []
        logits = llm.logits(prompts()[9])
        for number, one in enumerate(stream(llm, prompts()[:5], **SAMPLED)):
            found.append(one)
            if number % 10 == 3:
                assert run(llm, prompts()[5:], **SAMPLED) == together[str(SAMPLED)][5:]
                np.testing.assert_array_equal(llm.logits(prompts()[9]), logits)
        ids = [one.token_ids for one in join(found).values()]
        assert sorted(ids) == sorted(together[str(SAMPLED)][:5])

    def test_an_error(self, broken: LLM, bad_word: int) -> None:
        found = join(stream(broken, [[5, bad_word], prompts()[0]]))
        assert found[0, 0].finish_reason == "error" and found[0, 0].token_ids == ()
        assert "not finite" in str(found[0, 0].error)
        assert (found[1, 0].finish_reason, found[1, 0].error) == ("length", None)
        assert len(found[1, 0].token_ids) == 12

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_ctrl_c(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        interrupt_at(llm, monkeypatch, 5)
        with pytest.raises(KeyboardInterrupt):
            list(stream(llm, prompts(), 30))
        check_idle(llm)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_that_the_garbage_collector_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # It may run in the middle of a step of the same thread. A model of its own: if this fails,
        # nobody can use it again.
        llm = helpers.load()
        expected = run(llm, [7, 8])
        increments = stream(llm, [5, 6])
        next(increments)
        cycle = [increments]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]
        decode = llm.runner.decode

        def collect(step: Any) -> Any:
            gc.collect()
            return decode(step)

        monkeypatch.setattr(llm.runner, "decode", collect)
        found: list[Any] = []
        gc.disable()
        try:
            del increments, cycle
            thread = threading.Thread(target=lambda: found.append(run(llm, [7, 8])), daemon=True)
            thread.start()
            thread.join(20)
        finally:
            gc.enable()
        assert not thread.is_alive(), "deadlock"
        assert found == [expected]
        llm.core.settle()
        check_idle(llm)
        llm.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, sentencepiece: Any) -> Path:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("model")
    tiny.make("gqa", directory)
    sentencepiece.save_pretrained(directory)
    return directory


class TestPath:
    """A path in place of a model."""

    @pytest.fixture
    def loaded(self, monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
        """The models that calls have loaded."""
        found: list[LLM] = []
        load = deinfer_jax.load

        def keep(*arguments: Any, **options: Any) -> LLM:
            found.append(load(*arguments, **options))
            return found[-1]

        monkeypatch.setattr(generate_module, "load", keep)
        return found

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, path: Path) -> list[Completion]:
        with deinfer_jax.load(path) as llm:
            return generate(llm, ["w1 w2", "w3"], 6, logprobs=1, **SAMPLED)

    def test_completions(self, path: Path, expected, loaded: list[LLM]) -> None:
        found = deinfer_jax.generate(
            str(path), ["w1 w2", "w3"], max_new_tokens=6, ignore_eos=True, logprobs=1, **SAMPLED
        )
        for ours, done in zip(found, expected, strict=True):
            assert (ours.text, ours.token_ids) == (done.text, done.token_ids)
            assert ours.logprobs == done.logprobs
        self.check_closed(loaded)

    def test_stream(self, path: Path, expected, loaded: list[LLM]) -> None:
        increments = deinfer_jax.generate(
            path,
            ["w1 w2", "w3"],
            max_new_tokens=6,
            ignore_eos=True,
            logprobs=1,
            stream=True,
            **SAMPLED,
        )
        check_joined(increments, expected)
        self.check_closed(loaded)

    def test_a_stream_that_ends_early_gives_the_memory_back(
        self, path: Path, loaded: list[LLM]
    ) -> None:
        for _ in deinfer_jax.generate(path, "w1 w2", max_new_tokens=20, stream=True):
            break
        self.check_closed(loaded)

    def test_a_bad_prompt_gives_the_memory_back(self, path: Path, loaded: list[LLM]) -> None:
        with pytest.raises(ValueError, match="prompt 1: expected text"):
            deinfer_jax.generate(path, ["w1", ""])
        self.check_closed(loaded)

    def test_parameters_of_a_stream_are_checked_at_once(self, path: Path) -> None:
        with pytest.raises(ValueError, match="^n: .*got 0$"):
            deinfer_jax.generate(path, "w1", n=0, stream=True)

    @pytest.mark.parametrize("wanted", [True, False])
    @pytest.mark.parametrize("streamed", [True, False])
    def test_progress_is_of_loading_too(
        self,
        path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        wanted: bool,
        streamed: bool,
    ) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: not wanted)
        options: dict[str, Any] = dict(max_new_tokens=2, progress=wanted, stream=streamed)
        list(deinfer_jax.generate(path, "w1 w2", **options))
        assert ("\r" in capsys.readouterr().err) == wanted

    def check_closed(self, loaded: list[LLM]) -> None:
        (llm,) = loaded
        with pytest.raises(RuntimeError, match="has been closed"):
            llm.check_open()


def interrupt_at(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *steps: int, where: str = "decode"
) -> None:
    """A real SIGINT before each of these decode steps."""
    method, count = getattr(llm.runner, where), [0]

    def kill(step: Any) -> Any:
        for _ in range(steps.count(count[0])):
            os.kill(os.getpid(), signal.SIGINT)
        count[0] += 1
        return method(step)

    monkeypatch.setattr(llm.runner, where, kill)


class TestCtrlC:
    @pytest.fixture(autouse=True)
    def the_handler_is_back(self):
        before = signal.getsignal(signal.SIGINT)
        assert before is signal.default_int_handler
        yield
        assert signal.getsignal(signal.SIGINT) is before

    def check(self, found: list[Completion], plain: list[Completion]) -> None:
        for done, whole in zip(found, plain, strict=True):
            if done.finish_reason == "cancelled":
                assert len(done.token_ids) < len(whole.token_ids)
                assert done.token_ids == whole.token_ids[: len(done.token_ids)]
                assert whole.text.startswith(done.text)
                assert (done.timing.ttft_s is None) == (not done.token_ids)
            else:
                assert done.token_ids == whole.token_ids and done.text == whole.text
            assert done.error is None
            assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_what_is_finished_is_returned(
        self,
        speaking: LLM,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        in_flight: int,
    ) -> None:
        monkeypatch.setattr(speaking.core, "ahead", in_flight)
        options: dict[str, Any] = dict(new=20, logprobs=0, **SAMPLED)
        plain = generate(speaking, prompts(), **options)
        interrupt_at(speaking, monkeypatch, 30)
        with caplog.at_level(logging.WARNING, "deinfer_jax"):
            found = generate(speaking, prompts(), **options)
        self.check(found, plain)
        reasons = [done.finish_reason for done in found]
        finished = reasons.count("length")
        assert finished >= 4 and reasons == ["length"] * finished + ["cancelled"] * (11 - finished)
        # Some run, some wait.
        kinds = {bool(done.token_ids) for done in found if done.finish_reason == "cancelled"}
        assert kinds == {True, False}
        assert f"interrupted: {finished} of 11 continuations are finished" in caplog.text
        check_idle(speaking)

    def test_from_another_thread(self, speaking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        options: dict[str, Any] = dict(new=100, logprobs=0, **SAMPLED)
        some = [prompt for prompt in prompts() if len(prompt) < 28] * 3
        plain = generate(speaking, some, **options)
        decode, steps, now = speaking.runner.decode, [0], threading.Event()

        def spy(step: Any) -> Any:
            steps[0] += 1
            if steps[0] == 150:
                now.set()
            return decode(step)

        def kill() -> None:
            assert now.wait(WAIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(speaking.runner, "decode", spy)
        killer = threading.Thread(target=kill)
        killer.start()
        found = generate(speaking, some, **options)
        killer.join()
        self.check(found, plain)
        assert {done.finish_reason for done in found} == {"length", "cancelled"}
        check_idle(speaking)

    def test_before_the_first_token(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        interrupt_at(llm, monkeypatch, 0, where="prefill")
        found = generate(llm, [5] * 100, 5)
        assert [(done.finish_reason, done.token_ids) for done in found] == [("cancelled", ())]

    def test_samples(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        interrupt_at(llm, monkeypatch, 8)
        (done,) = generate(llm, [5, 6], n=3, **SAMPLED)
        assert {sample.finish_reason for sample in done.samples} == {"cancelled"}
        assert all(sample.token_ids for sample in done.samples)

    def test_a_second_one_raises(self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            interrupt_at(llm, patch, 5, 5)
            with pytest.raises(KeyboardInterrupt):
                generate(llm, prompts())
        check_idle(llm)
        assert run(llm, prompts(), **SAMPLED) == together[str(SAMPLED)]

    def test_while_texts_are_made(self, speaking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        # All is finished then, but the tokenizer may take its time.
        plain = generate(speaking, prompts(), logprobs=0)
        finish, calls = TextStream.finish, []

        def kill(text: TextStream) -> None:
            calls.append(text)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            finish(text)

        monkeypatch.setattr(TextStream, "finish", kill)
        try:
            found = generate(speaking, prompts(), logprobs=0)
        except KeyboardInterrupt:  # which would end the test run
            pytest.fail("the results are lost")
        self.check(found, plain)
        assert len(calls) >= 3

    def test_the_handler_is_put_back_after_an_error(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(step: Any) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(llm.runner, "decode", fail)
        with pytest.raises(RuntimeError, match="planted"):
            generate(llm, [5, 6])
        check_idle(llm)

    def test_a_handler_of_the_caller_stays(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        heard = []
        interrupt_at(llm, monkeypatch, 3)
        before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
        try:
            (done,) = generate(llm, [5, 6])
        finally:
            signal.signal(signal.SIGINT, before)
        assert heard == [True] and done.finish_reason == "length"

    def test_not_in_the_main_thread(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        expected, found, handlers = run(llm, prompts()), [], set()
        decode = llm.runner.decode

        def spy(step: Any) -> Any:
            handlers.add(signal.getsignal(signal.SIGINT))
            return decode(step)

        monkeypatch.setattr(llm.runner, "decode", spy)
        thread = threading.Thread(target=lambda: found.append(run(llm, prompts())))
        thread.start()
        thread.join(WAIT_S)
        assert found == [expected]
        assert handlers == {signal.default_int_handler}

    def test_another_thread_steps_at_the_end(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cancel, decode = llm.core.cancel, llm.runner.decode
        in_step, go_on = threading.Event(), threading.Event()
        found: list[Any] = []

        def slow(step: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                os.kill(os.getpid(), signal.SIGINT)
            else:
                in_step.set()
                assert go_on.wait(WAIT_S)
            return decode(step)

        def late(requests: Any) -> None:
            cancel(requests)
            thread.start()
            assert in_step.wait(WAIT_S)
            threading.Timer(0.2, go_on.set).start()

        thread = threading.Thread(target=lambda: found.append(run(llm, [7, 8])))
        expected = run(llm, [7, 8])
        monkeypatch.setattr(llm.runner, "decode", slow)
        monkeypatch.setattr(llm.core, "cancel", late)
        (done,) = generate(llm, [5, 6])
        monkeypatch.setattr(llm.core, "cancel", cancel)
        thread.join(WAIT_S)
        assert done.finish_reason == "cancelled" and found == [expected]

    def test_it_ends_only_the_main_threads_call(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run(llm, prompts(), **SAMPLED)))
        decode, killed = llm.runner.decode, []

        def kill(step: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and not killed:
                killed.append(True)
                os.kill(os.getpid(), signal.SIGINT)
            return decode(step)

        monkeypatch.setattr(llm.runner, "decode", kill)
        thread.start()
        done = generate(llm, [[5, 6], [7, 8]], 100)
        thread.join(WAIT_S)
        assert found == [together[str(SAMPLED)]]
        assert killed and {one.finish_reason for one in done} == {"cancelled"}


class TestBar:
    @pytest.mark.parametrize("n", [1, 2])
    def test_it_counts_continuations(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], n: int
    ) -> None:
        generate(llm, prompts(), n=n, progress=True)
        shown = capsys.readouterr().err
        assert "generating: 100%" in shown
        assert f"{11 * n}/{11 * n}" in shown
        assert " tokens/s" in shown

    def test_what_ctrl_c_left(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interrupt_at(llm, monkeypatch, 15)
        found = generate(llm, prompts(), progress=True)
        finished = sum(done.finish_reason == "length" for done in found)
        assert 0 < finished < 11
        assert f" {finished}/11 " in capsys.readouterr().err.rpartition("\r")[2]

    @pytest.mark.parametrize("progress", [False, None])
    def test_none(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], progress: bool | None
    ) -> None:
        generate(llm, prompts()[:2], progress=progress)
        assert capsys.readouterr().err == ""

    def test_on_a_terminal(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        generate(llm, prompts()[:2])
        assert "2/2" in capsys.readouterr().err

    def test_no_prompts(self, llm: LLM) -> None:
        assert generate(llm, [], progress=True) == []

    def test_none_while_streaming(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        list(stream(llm, prompts()[:2]))
        assert capsys.readouterr().err == ""
