"""Ctrl-C, and the bar."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import pytest

from deinfer_jax import LLM, Completion
from deinfer_jax.engine.text import TextStream
from tests.engine.engine_helpers import WAIT_S, generate, interrupt_at, stream
from tests.engine.helpers import (
    SAMPLED,
    check_idle,
    prompts,
    run,
)


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
