"""Samples, log-probabilities, stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion
from deinfer_jax.engine.scheduler import PrefillStep
from tests.engine.engine_helpers import NEAR, generate, samples
from tests.engine.helpers import (
    FILTERED,
    GREEDY,
    SAMPLED,
    SETTINGS,
    prompts,
    run,
)

FLAT: dict[str, Any] = dict(temperature=1e6, seed=5)  # every word is as likely as any other


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
        last = next(i for i, token in enumerate(plain.token_ids) if token != plain.token_ids[0])
        end = plain.token_ids[last]
        (done,) = generate(llm, [5, 6], logprobs=1, stop_token_ids=[end])
        assert done.token_ids == plain.token_ids[: last + 1]
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
