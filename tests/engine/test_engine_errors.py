"""Whatever goes wrong while requests run, nothing is lost by it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, Engine, Increment
from deinfer_jax.engine.request import Sampling
from deinfer_jax.engine.text import TextStream
from tests.engine.engine_helpers import (
    NEAR,
    add,
    finish,
    joined,
    plant,
    whole,
)
from tests.engine.helpers import FILTERED, GREEDY, SAMPLED, check_idle, prompts, run, tokens

PAGE_BYTES = 4096


SEAMS = {
    "schedule": lambda llm: (llm.core.scheduler, "schedule"),
    "prefill": lambda llm: (llm.runner, "prefill"),
    "decode": lambda llm: (llm.runner, "decode"),
    "read": lambda llm: (llm.runner, "read"),
    "rows": lambda llm: (llm.core, "_read_rows"),
    "take": lambda llm: (llm.core, "_take"),
    "token": lambda llm: (llm.core.scheduler, "read"),
    "push": lambda llm: (TextStream, "push"),
    "finish text": lambda llm: (TextStream, "finish"),
    "finish": lambda llm: (llm.core, "_finish"),
    "remove": lambda llm: (llm.core.scheduler, "remove"),
    "add": lambda llm: (llm.core.scheduler, "add"),
}


# An Exception (and not an interrupt) at these ends one request.
OF_ONE_REQUEST = ("token", "push", "finish text", "take", "finish", "remove")
SEAMS_AND_ERRORS: list[tuple[str, type[BaseException]]] = [
    *((seam, KeyboardInterrupt) for seam in SEAMS),
    *((seam, MemoryError) for seam in SEAMS if seam not in OF_ONE_REQUEST),
]


def every_exception() -> Iterator[Any]:
    """Of the four ways that each of them can fall, two in turn, so that every pair occurs; `full`
    are the others."""
    for number, (seam, error) in enumerate(SEAMS_AND_ERRORS):
        for late, in_flight in itertools.product((0, 1), (0, 1)):
            marks = () if (late + in_flight + number) % 2 else pytest.mark.full
            when = ("before", "after")[late]
            yield pytest.param(seam, error, when, in_flight, marks=marks)


class Work:
    """Requests of all kinds, and what each gives undisturbed."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        some = prompts()[1:8]
        plain = deinfer_jax.generate(llm, some, max_new_tokens=10, ignore_eos=True, **SAMPLED)
        self.options: list[dict[str, Any]] = [
            dict(SAMPLED, logprobs=2),
            dict(SAMPLED, stop=plain[1].text[7:12]),
            dict(GREEDY, n=2),
            dict(SAMPLED, stop_token_ids=[plain[3].token_ids[4]]),
            dict(FILTERED, n=2, logprobs=0),
            dict(SAMPLED, logprobs=1, stop=plain[5].text[9:12]),
            dict(SAMPLED),
        ]
        self.prompts = some
        engine = Engine(llm)
        self.submit(engine)
        finish(engine)
        self.expected = self.results(engine)
        assert {done.finish_reason for done in self.expected} == {"stop", "length"}

    def submit(self, engine: Engine) -> None:
        for prompt, options in zip(self.prompts, self.options, strict=True):
            add(engine, prompt, 10, **options)

    def results(self, engine: Engine) -> list[Completion]:
        done = [engine.result(index) for index in range(len(self.prompts))]
        return [sample for one in done for sample in (one.samples or (one,))]

    def check(self, engine: Engine, increments: list[Increment]) -> None:
        """All is as undisturbed, in results and in increments."""
        keys = [
            (index, sample)
            for index, options in enumerate(self.options)
            for sample in range(options.get("n", 1))
        ]
        parts = joined(increments)
        for key, done, expected in zip(keys, self.results(engine), self.expected, strict=True):
            assert (key, *whole(done)) == (key, *whole(expected))
            assert done.error is None
            assert parts[key] == whole(expected)
            self.check_logprobs(done, expected)

    @staticmethod
    def check_logprobs(done: Completion, expected: Completion) -> None:
        if done.logprobs is None or expected.logprobs is None:
            assert done.logprobs is expected.logprobs
            return
        assert tuple(one.token_id for one in done.logprobs) == done.token_ids
        for one, other in zip(done.logprobs, expected.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < NEAR


class TestNothingIsLost:
    """What goes wrong in a step is raised; requests go on with the same tokens."""

    @pytest.fixture
    def work(self, speaking: LLM) -> Work:
        return Work(speaking)

    @pytest.mark.parametrize(("seam", "error", "when", "in_flight"), list(every_exception()))
    def test_an_exception_somewhere(
        self,
        work: Work,
        monkeypatch: pytest.MonkeyPatch,
        seam: str,
        error: type[BaseException],
        when: str,
        in_flight: int,
    ) -> None:
        llm, late = work.llm, when == "after"
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        for after in (0, 1, 4, 9):
            engine = Engine(llm)
            work.submit(engine)
            found: list[Increment] = []
            with monkeypatch.context() as patch:
                where, name = SEAMS[seam](llm)
                calls = plant(patch, where, name, error("planted"), after=after, late=late)
                raised = 0
                for _ in range(400):
                    if not engine.unfinished:
                        break
                    try:
                        found += engine.step()
                    except error:
                        raised += 1
                    llm.core.scheduler.check_integrity()
            unfinished, enough = engine.unfinished, calls[0] > after
            engine.cancel_all()
            assert not unfinished, f"call {after}: never finished"
            assert raised == enough
            work.check(engine, found)
            check_idle(llm)

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_a_storm_of_ctrl_c(
        self, work: Work, monkeypatch: pytest.MonkeyPatch, in_flight: int
    ) -> None:
        """Real signals wherever they fall in a step."""
        monkeypatch.setattr(work.llm.core, "ahead", in_flight)
        rng, over = np.random.default_rng(0), threading.Event()
        armed, raised = [False], 0

        def interrupt(number: int, frame: FrameType | None) -> None:
            if armed[0]:
                armed[0] = False
                raise KeyboardInterrupt

        def storm() -> None:
            while not over.wait(rng.uniform(0.0005, 0.005)):
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, interrupt)
        thread = threading.Thread(target=storm)
        thread.start()
        try:
            for batch in range(1, 31):
                engine = Engine(work.llm)
                work.submit(engine)
                while engine.unfinished and raised < 10 * batch:
                    try:
                        armed[0] = True
                        engine.step()
                        armed[0] = False
                    except KeyboardInterrupt:
                        raised += 1
                    work.llm.core.scheduler.check_integrity()
                finish(engine)
                for done, expected in zip(work.results(engine), work.expected, strict=True):
                    assert whole(done) == whole(expected)
                    work.check_logprobs(done, expected)
        finally:
            over.set()
            thread.join()
            signal.signal(signal.SIGINT, before)
        assert raised > 100

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("seam", ["reset", "restart"])
    def test_again_while_it_recovers(
        self,
        work: Work,
        monkeypatch: pytest.MonkeyPatch,
        seam: str,
        late: bool,
        error: type[BaseException],
    ) -> None:
        llm = work.llm
        engine = Engine(llm)
        work.submit(engine)
        found = []
        for _ in range(4):
            found += engine.step()
        with monkeypatch.context() as patch:
            plant(patch, llm.runner, "decode", KeyboardInterrupt())
            where = llm.runner if seam == "reset" else llm.core.scheduler
            plant(patch, where, seam, error("planted"), late=late)
            with pytest.raises(error):
                engine.step()
        found += finish(engine)
        work.check(engine, found)

    @pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
    def test_while_it_is_cancelled(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch, late: bool
    ) -> None:
        engine = Engine(llm)
        for prompt in prompts():
            add(engine, prompt, 30)
        for _ in range(8):
            engine.step()
        with monkeypatch.context() as patch:
            plant(patch, llm.core.scheduler, "_evict", KeyboardInterrupt(), after=1, late=late)
            with pytest.raises(KeyboardInterrupt):
                engine.cancel_all()
        engine.cancel_all()
        check_idle(llm)
        assert {one.finish_reason for one in engine.collect()} == {"cancelled"}
        assert run(llm, prompts(), **SAMPLED) == together[str(SAMPLED)]

    def test_a_cancel_outlives_an_error(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(llm)
        index, other = add(engine, [5, 6]), add(engine, [7, 8])
        for _ in range(4):
            engine.step()
        engine.cancel(index)
        with monkeypatch.context() as patch:
            plant(patch, llm.core, "_finish", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        finish(engine)
        assert engine.result(index).finish_reason == "cancelled"
        assert engine.result(other).token_ids == run(llm, [7, 8])[0]

    def test_add_that_is_interrupted(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(llm)
        with monkeypatch.context() as patch:
            plant(patch, llm.core, "submit", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                add(engine, [5, 6])
        finish(engine)

    def test_a_tokenizer_that_fails_for_one(
        self, work: Work, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(work.llm)
        work.submit(engine)
        with monkeypatch.context() as patch:
            plant(patch, TextStream, "push", ZeroDivisionError("planted"), after=20)
            finish(engine)
        found = work.results(engine)
        failed = [done for done in found if done.finish_reason == "error"]
        assert [done.error for done in failed] == ["ZeroDivisionError: planted"]
        for done, expected in zip(found, work.expected, strict=True):
            if done.finish_reason != "error":
                assert whole(done) == whole(expected)

    def test_a_tokenizer_that_fails_for_a_cancelled_one(
        self, work: Work, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(work.llm)
        work.submit(engine)
        for _ in range(4):
            engine.step()
        with monkeypatch.context() as patch:
            plant(patch, TextStream, "finish", ZeroDivisionError("planted"))
            engine.cancel(0)
            engine.step()
        finish(engine)
        cancelled, *found = work.results(engine)
        assert cancelled.finish_reason in ("cancelled", "error")
        for done, expected in zip(found, work.expected[1:], strict=True):
            assert whole(done) == whole(expected)

    def test_a_result_whose_text_fails_can_be_asked_for_again(
        self, speaking: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(speaking)
        index = engine.submit([5, 6], [Sampling(max_new_tokens=12)], text=False)
        finish(engine)
        with monkeypatch.context() as patch:
            plant(patch, TextStream, "push", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.result(index)
        assert engine.result(index).token_ids == run(speaking, [5, 6])[0]


class TestBorrowedPages:
    """``llm.logits`` in the middle of requests."""

    @contextmanager
    def running(self, llm: LLM, steps: int) -> Iterator[Engine]:
        engine = Engine(llm)
        for prompt in prompts():
            add(engine, prompt, **SAMPLED)
        for _ in range(steps):
            engine.step()
        yield engine
        finish(engine)
        check_idle(llm)

    def check(self, engine: Engine, together: Any) -> None:
        finish(engine)
        found = tokens([engine.result(index) for index in range(11)])
        assert found == together[str(SAMPLED)]

    @pytest.mark.parametrize("in_flight", [0, 1])
    @pytest.mark.parametrize("steps", [0, 1, 3, 12, 20])
    def test_both_are_as_alone(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch, steps: int, in_flight: int
    ) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        expected = llm.logits(prompts()[10])
        with self.running(llm, steps) as engine:
            np.testing.assert_array_equal(llm.logits(prompts()[10]), expected)
            self.check(engine, together)

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_after_every_step_of_a_small_cache(
        self, load_tiny, together, llm: LLM, in_flight: int
    ) -> None:
        small = load_tiny(cache_bytes=8 * PAGE_BYTES)
        small.core.ahead = in_flight
        expected = small.logits(prompts()[10])
        engine = Engine(small)
        for prompt in prompts():
            add(engine, prompt, **SAMPLED)
        before = small.core.scheduler.preemptions
        number = 0
        while engine.unfinished:
            engine.step()
            number += 1
            if number % 3 == 0:  # takes pages away from those that run
                np.testing.assert_array_equal(small.logits(prompts()[10]), expected)
                small.core.scheduler.check_integrity()
        assert small.core.scheduler.preemptions - before > 5
        self.check(engine, together)

    # The first read is of the step in flight, if there is one.
    @pytest.mark.parametrize(("in_flight", "after"), [(0, 0), (1, 0), (1, 1)])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
    def test_a_failure(
        self,
        llm: LLM,
        together,
        monkeypatch: pytest.MonkeyPatch,
        error: type[BaseException],
        after: int,
        late: bool,
        in_flight: int,
    ) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        with self.running(llm, 6) as engine:
            with monkeypatch.context() as patch:
                plant(patch, llm.runner, "read", error("planted"), after=after, late=late)
                with pytest.raises(error, match="planted"):
                    llm.logits(prompts()[10])
            self.check(engine, together)
