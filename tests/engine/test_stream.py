"""Streams, from a model and from a path."""

from __future__ import annotations

import gc
import importlib
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, Increment
from tests import tiny
from tests.engine import helpers
from tests.engine.engine_helpers import check_joined, generate, interrupt_at, join, stream
from tests.engine.helpers import (
    GREEDY,
    SAMPLED,
    check_idle,
    prompts,
    run,
)

# The name is the function's, too.
generate_module = importlib.import_module("deinfer_jax.engine.generate")

FLAT: dict[str, Any] = dict(temperature=1e6, seed=5)  # every word is as likely as any other


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, sentencepiece: Any) -> Path:
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("model")
    tiny.make("gqa", directory)
    sentencepiece.save_pretrained(directory)
    return directory


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
        gc.collect()
        gc.freeze()  # or each collection would look through all of this process
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
            thread.join(120)
        finally:
            gc.enable()
            gc.unfreeze()
        assert not thread.is_alive(), "deadlock"
        assert found == [expected]
        llm.core.settle()
        check_idle(llm)
        llm.close()


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
