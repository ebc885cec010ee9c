"""``Engine``: requests that come and go, several engines and threads, the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, Engine, Increment
from deinfer_jax.engine.text import TextStream
from tests.engine import helpers
from tests.engine.engine_helpers import (
    WAIT_S,
    add,
    finish,
    in_threads,
    joined,
    live_arrays,
    plant,
    whole,
)
from tests.engine.helpers import FILTERED, GREEDY, SAMPLED, check_idle, prompts, run, tokens


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    engine = Engine(llm)
    yield engine
    engine.cancel_all()


class TestRequests:
    def test_indices_and_results(self, engine: Engine, llm: LLM) -> None:
        indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()]
        assert indices == list(range(11))
        finish(engine)
        found = [engine.result(index) for index in reversed(indices)]
        assert tokens(found[::-1]) == run(llm, prompts(), **SAMPLED)

    def test_added_while_others_run(self, engine: Engine, together) -> None:
        every, indices = prompts(), []
        for number in range(200):
            if number % 3 == 0 and len(indices) < 11:
                indices.append(add(engine, every[len(indices)], **SAMPLED))
            engine.step()
            engine.llm.core.scheduler.check_integrity()
        assert not engine.unfinished
        assert tokens([engine.result(i) for i in indices]) == together[str(SAMPLED)]

    def test_different_options_beside_each_other(self, engine: Engine, together) -> None:
        settings = [GREEDY, SAMPLED, FILTERED]
        indices = [add(engine, p, **settings[i % 3]) for i, p in enumerate(prompts())]
        finish(engine)
        for i, index in enumerate(indices):
            assert engine.result(index).token_ids == together[str(settings[i % 3])][i]

    def test_equal_prompts_are_independent(self, engine: Engine) -> None:
        first, second = (add(engine, [5, 6], n=2, **SAMPLED) for _ in range(2))
        finish(engine)
        assert tokens(list(engine.result(first).samples)) == tokens(
            list(engine.result(second).samples)
        )

    def test_a_result_can_be_taken_once(self, engine: Engine) -> None:
        index = add(engine, [5, 6])
        finish(engine)
        engine.result(index)
        for method in (engine.result, engine.cancel):
            with pytest.raises(KeyError):
                method(index)

    def test_an_unknown_index(self, engine: Engine) -> None:
        for method in (engine.result, engine.cancel):
            with pytest.raises(KeyError):
                method(7)
        with pytest.raises(KeyError):
            list(engine.stream(7))

    def test_a_result_that_is_not_there_yet(self, engine: Engine) -> None:
        index = add(engine, [5, 6])
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^prompt 0: expected a finished one"):
                engine.result(index)
            engine.step()
        finish(engine)
        assert engine.result(index).finish_reason == "length"

    def test_a_result_before_its_increments(self, engine: Engine, llm: LLM) -> None:
        first, second = add(engine, [5, 6]), add(engine, [7, 8])
        run(llm, [9])
        engine.result(first)
        assert engine.unfinished == 1
        assert {one.index for one in engine.step()} == {second}

    def test_unfinished_counts_samples(self, engine: Engine) -> None:
        assert engine.unfinished == 0
        add(engine, [5, 6], 3, n=3)
        add(engine, [7], 3)
        assert engine.unfinished == 4
        finish(engine)
        assert engine.unfinished == 0

    def test_nothing_to_do(self, engine: Engine) -> None:
        assert engine.step() == []
        assert list(engine.stream()) == []
        assert engine.collect() == []

    def test_increments_are_the_results(self, speaking: LLM) -> None:
        engine = Engine(speaking)
        plain = deinfer_jax.generate(speaking, prompts()[:6], max_new_tokens=12, **SAMPLED)
        options: dict[str, Any] = dict(SAMPLED, n=2, stop=plain[3].text[6:10])
        indices = [engine.add(p, max_new_tokens=12, **options) for p in prompts()[:6]]
        found = joined(finish(engine))
        for index in indices:
            for sample, done in enumerate(engine.result(index).samples):
                assert found[index, sample] == whole(done)
        assert {reason for *_, reason in found.values()} > {"length"}

    def test_a_chat_and_text(self, speaking: LLM, sentencepiece: Any) -> None:
        engine = Engine(speaking)
        index = engine.add("w1 w2", max_new_tokens=3)
        finish(engine)
        assert engine.result(index).prompt_token_ids == (8, 9)

    @pytest.mark.parametrize(
        ("prompt", "options", "message"),
        [
            ([], {}, "expected at least one token"),
            ([97], {}, "expected token ids from 0 to 96"),
            ([5] * 120, {}, "max_context = 128"),
            ("w1", {}, "no tokenizer"),
            (5, {}, "expected a string, a chat or token ids, got int"),
            ({"role": "user", "content": "w1"}, {}, "expected .* a chat .*, got dict"),
            ([[5, 6], [7]], {}, "expected a string, messages"),
            ([5], {"n": 0}, "^n: .*got 0"),
            ([5], {"seed": -1}, "^seed: .*got -1"),
            ([5], {"seed": [1, 2]}, "^seed: "),
            ([5], {"stop": "w1"}, "^stop: "),
            ([5], {"logprobs": 21}, "^logprobs: .*got 21"),
        ],
    )
    def test_what_is_refused_leaves_nothing(
        self, engine: Engine, unchecked, prompt: Any, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            add(engine, prompt, **options)
        assert (engine.unfinished, engine.requests) == (0, [])
        assert add(engine, [5, 6]) == 0


class TestCancel:
    @pytest.fixture
    def indices(self, engine: Engine) -> list[int]:
        """Four of them run, seven wait, none is finished."""
        indices = [add(engine, prompt, 20, **SAMPLED) for prompt in prompts()]
        for _ in range(8):
            engine.step()
        assert len(engine.llm.core.scheduler.running) == 4
        return indices

    def check(self, engine: Engine, llm: LLM, cancelled: dict[int, Any]) -> None:
        increments = finish(engine)
        expected = run(llm, prompts(), 20, **SAMPLED)
        for index, ids in enumerate(expected):
            done = engine.result(index)
            if index in cancelled:
                assert done.finish_reason == "cancelled" and done.error is None
                assert done.token_ids == ids[: len(done.token_ids)]
                assert bool(done.token_ids) == cancelled[index]
                last = [one for one in increments if one.index == index]
                assert [one.finish_reason for one in last] == ["cancelled"]
            else:
                assert (done.finish_reason, done.token_ids) == ("length", ids)

    @pytest.mark.parametrize("which", [0, 3])
    def test_a_running_one(self, engine: Engine, llm: LLM, indices: list[int], which: int) -> None:
        engine.cancel(indices[which])
        engine.step()
        assert len(llm.core.scheduler.running) == 4  # the next one has its slot
        assert engine._requests[which][0].finish_reason == "cancelled"
        # Its increment came with that step.
        finish(engine)
        assert engine.result(which).token_ids
        assert tokens([engine.result(i) for i in indices if i != which]) == [
            ids for i, ids in enumerate(run(llm, prompts(), 20, **SAMPLED)) if i != which
        ]

    def test_a_waiting_one(self, engine: Engine, llm: LLM, indices: list[int]) -> None:
        engine.cancel(indices[7])
        self.check(engine, llm, {7: False})

    def test_several_at_once(self, engine: Engine, llm: LLM, indices: list[int]) -> None:
        for index in (2, 9, 0, 5):
            engine.cancel(indices[index])
        self.check(engine, llm, {0: True, 2: True, 5: False, 9: False})

    def test_with_a_step_in_flight(self, ahead, engine: Engine, llm: LLM, indices) -> None:
        engine.cancel(indices[1])
        engine.cancel(indices[8])
        self.check(engine, llm, {1: True, 8: False})

    def test_a_finished_one_stays(self, engine: Engine) -> None:
        index = add(engine, [5, 6])
        finish(engine)
        engine.cancel(index)
        assert finish(engine) == []
        assert engine.result(index).finish_reason == "length"

    def test_twice(self, engine: Engine, indices: list[int], llm: LLM) -> None:
        for _ in range(2):
            engine.cancel(indices[4])
        self.check(engine, llm, {4: False})

    def test_before_the_first_step(self, engine: Engine) -> None:
        index = add(engine, [5, 6], n=3)
        engine.cancel(index)
        assert engine.unfinished == 3
        found = engine.step()
        assert [(one.sample, one.finish_reason) for one in found] == [
            (i, "cancelled") for i in range(3)
        ]
        assert engine.result(index).timing.ttft_s is None

    def test_all(self, engine: Engine, indices: list[int], llm: LLM) -> None:
        engine.cancel_all()
        check_idle(llm)
        assert {one.finish_reason for one in engine.collect()} == {"cancelled"}
        assert engine.unfinished == 0

    def test_text_of_a_cancelled_one(self, speaking: LLM, sentencepiece: Any) -> None:
        engine = Engine(speaking)
        index = add(engine, "w1 w2", **SAMPLED)
        for _ in range(5):
            engine.step()
        engine.cancel(index)
        engine.step()
        done = engine.result(index)
        assert done.token_ids
        both = sentencepiece.decode([8, 9, *done.token_ids], skip_special_tokens=True)
        assert "w1 w2" + done.text == both

    def test_added_and_cancelled_while_others_are_taken_in(
        self, engine: Engine, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As by another thread.
        take_in, late = llm.core.scheduler.add, []

        def more(request: Any) -> None:
            if not late:
                late.append(add(engine, [7, 8]))
                engine.cancel(late[0])
            take_in(request)

        monkeypatch.setattr(llm.core.scheduler, "add", more)
        first = add(engine, [5, 6])
        finish(engine)
        assert engine.result(late[0]).finish_reason == "cancelled"
        assert engine.result(first).finish_reason == "length"


class TestStream:
    def test_one_among_several(self, engine: Engine, together) -> None:
        indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()]
        found = list(engine.stream(indices[6]))
        assert {one.index for one in found} == {6}
        assert joined(found)[6, 0][1:] == (together[str(SAMPLED)][6], "length")
        assert list(engine.stream(indices[6])) == []
        others = joined(finish(engine))
        assert [others[i, 0][1] for i in indices if i != 6] == [
            ids for i, ids in enumerate(together[str(SAMPLED)]) if i != 6
        ]

    def test_of_a_finished_one(self, engine: Engine, llm: LLM) -> None:
        first, second = add(engine, [5, 6], 3), add(engine, [7, 8], 12)
        list(engine.stream(second))
        (one,) = engine.stream(first)
        assert (one.token_ids, one.finish_reason) == (run(llm, [5, 6], 3)[0], "length")

    def test_what_is_added_meanwhile(self, engine: Engine, together) -> None:
        every = prompts()
        add(engine, every[0], **SAMPLED)
        found = []
        for one in engine.stream():
            found.append(one)
            if len(found) % 4 == 0 and len(found) <= 40:
                add(engine, every[len(found) // 4], **SAMPLED)
        assert [joined(found)[i, 0][1] for i in range(11)] == together[str(SAMPLED)]

    @pytest.mark.parametrize("of_one", [True, False])
    def test_the_result_is_taken_inside(self, engine: Engine, llm: LLM, of_one: bool) -> None:
        index = add(engine, [5, 6])
        done = [
            engine.result(one.index)
            for one in engine.stream(index if of_one else None)
            if one.finish_reason
        ]
        assert tokens(done) == run(llm, [5, 6])

    def test_cancelled_inside(self, engine: Engine) -> None:
        index = add(engine, [5, 6], 50)
        found = []
        for one in engine.stream(index):
            found.append(one)
            if len(found) == 3:
                engine.cancel(index)
        assert found[-1].finish_reason == "cancelled" and len(found) <= 5

    def test_left_and_taken_up_again(self, engine: Engine, llm: LLM) -> None:
        index = add(engine, [5, 6])
        found = []
        for one in engine.stream(index):
            found.append(one)
            break
        found += engine.stream()
        assert joined(found)[0, 0][1] == run(llm, [5, 6])[0]


class TestSeveralEngines:
    def test_in_turns(self, llm: LLM, together) -> None:
        engines = [Engine(llm) for _ in range(3)]
        for i, prompt in enumerate(prompts()):
            assert add(engines[i % 3], prompt, **SAMPLED) == i // 3
        found: list[list[Increment]] = [[], [], []]
        while any(engine.unfinished for engine in engines):
            for increments, engine in zip(found, engines, strict=True):
                increments += engine.step()
        for i, ids in enumerate(together[str(SAMPLED)]):
            assert joined(found[i % 3])[i // 3, 0][1] == ids
            assert engines[i % 3].result(i // 3).token_ids == ids

    def test_one_moves_all_on(self, llm: LLM) -> None:
        first, second = Engine(llm), Engine(llm)
        add(first, [5, 6])
        add(second, [7, 8])
        finish(first)
        assert second.unfinished == 1
        (one,) = second.step()
        assert (one.token_ids, one.finish_reason) == (run(llm, [7, 8])[0], "length")

    def test_generate_beside(self, llm: LLM, together) -> None:
        engine = Engine(llm)
        indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()[:6]]
        engine.step()
        assert run(llm, prompts(), **GREEDY) == together[str(GREEDY)]
        finish(engine)
        found = tokens([engine.result(index) for index in indices])
        assert found == together[str(SAMPLED)][:6]

    def test_cancel_all_is_of_one(self, llm: LLM, together) -> None:
        first, second = Engine(llm), Engine(llm)
        for prompt in prompts():
            add(first, prompt)
            add(second, prompt, **SAMPLED)
        first.step()
        first.cancel_all()
        assert {one.finish_reason for one in first.step()} == {"cancelled"}
        found = joined(finish(second))
        assert [found[i, 0][1] for i in range(11)] == together[str(SAMPLED)]


class TestThreads:
    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_everything_at_once(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch, in_flight: int
    ) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        logits = llm.logits(prompts()[8])

        def stepping() -> None:
            engine = Engine(llm)
            indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()]
            found = joined(finish(engine))
            for index, ids in zip(indices, together[str(SAMPLED)], strict=True):
                assert found[index, 0][1] == engine.result(index).token_ids == ids

        def streaming() -> None:
            engine = Engine(llm)
            for _ in range(3):
                index = add(engine, prompts()[6], n=2, **FILTERED)
                found = joined(list(engine.stream(index)))
                assert found[index, 0][1] == together[str(FILTERED)][6]

        def cancelling() -> None:
            engine = Engine(llm)
            for number, prompt in enumerate(prompts()):
                index = add(engine, prompt, 30)
                for _ in range(number % 5):
                    engine.step()
                engine.cancel(index)
                finish(engine)
                assert engine.result(index).finish_reason == "cancelled"

        def generating() -> None:
            for _ in range(2):
                assert run(llm, prompts(), **GREEDY) == together[str(GREEDY)]

        def scoring() -> None:
            for _ in range(10):
                np.testing.assert_array_equal(llm.logits(prompts()[8]), logits)

        for _ in range(2):
            in_threads(stepping, streaming, cancelling, generating, scoring, stepping)
        check_idle(llm)

    def test_many_add_and_one_steps(self, llm: LLM, together) -> None:
        engine = Engine(llm)
        indices: dict[int, list[int]] = {}
        adding = [True] * 4

        def submit(number: int) -> None:
            indices[number] = [add(engine, prompt, **SAMPLED) for prompt in prompts()]
            adding[number] = False

        def steps() -> list[Increment]:
            found = []
            while any(adding) or engine.unfinished:
                found += engine.step()
            return found

        *_, found = in_threads(*(lambda i=i: submit(i) for i in range(4)), steps)
        assert sorted(sum(indices.values(), [])) == list(range(44))
        parts = joined(found)
        for some in indices.values():
            assert [parts[index, 0][1] for index in some] == together[str(SAMPLED)]
            assert tokens([engine.result(index) for index in some]) == together[str(SAMPLED)]

    def test_results_are_taken_while_one_steps(self, llm: LLM) -> None:
        engine, waiting, over = Engine(llm), [True] * 3, threading.Event()
        expected = run(llm, [[5 + number, 6] for number in range(3)], 2)

        def steps() -> None:
            try:
                while any(waiting):
                    engine.step()
            finally:
                over.set()

        def result(index: int) -> Completion:
            while not over.is_set():
                with suppress(ValueError):
                    return engine.result(index)
                time.sleep(0)
            raise AssertionError("nobody steps any more")

        def wait(number: int) -> None:
            try:
                for _ in range(60):
                    index = add(engine, [5 + number, 6], 2)
                    assert result(index).token_ids == expected[number]
            finally:
                waiting[number] = False

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            in_threads(steps, *(lambda i=i: wait(i) for i in range(3)))
        finally:
            sys.setswitchinterval(before)

    def test_streams_of_one_engine(self, llm: LLM, together) -> None:
        engine = Engine(llm)
        indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()[:6]]
        found = in_threads(*(lambda i=i: list(engine.stream(i)) for i in indices))
        for index, increments in zip(indices, found, strict=True):
            assert joined(increments)[index, 0][1] == together[str(SAMPLED)][index]

    def test_a_step_holds_up_neither_add_nor_cancel(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode, inside, go_on = llm.runner.decode, threading.Event(), threading.Event()

        def slow(step: Any) -> Any:
            inside.set()
            assert go_on.wait(WAIT_S)
            return decode(step)

        monkeypatch.setattr(llm.runner, "decode", slow)
        engine = Engine(llm)
        first = add(engine, [5, 6])
        thread = threading.Thread(target=lambda: finish(engine), daemon=True)
        thread.start()
        try:
            assert inside.wait(WAIT_S)
            second, third = add(engine, [7, 8]), add(engine, [9])
            engine.cancel(second)
            engine.cancel(first)
            assert engine.unfinished == 3
        finally:
            go_on.set()
        thread.join(WAIT_S)
        reasons = [engine.result(index).finish_reason for index in (first, second, third)]
        assert reasons == ["cancelled", "cancelled", "length"]

    def test_a_short_call_does_not_wait_for_a_long_one(self, llm: LLM) -> None:
        begun, over = threading.Event(), threading.Event()

        def long() -> None:
            engine = Engine(llm)
            for prompt in ([5, 6], [7, 8]):
                add(engine, prompt, 126)
            for _ in range(3):
                engine.step()
            begun.set()
            for _ in range(20):
                finish(engine)
                for prompt in ([5, 6], [7, 8]):
                    add(engine, prompt, 126)
                if over.is_set():
                    break
            finish(engine)

        def short() -> bool:
            assert begun.wait(WAIT_S)
            run(llm, [9], 3)
            llm.logits([9])
            over.set()
            return engine_is_busy()

        def engine_is_busy() -> bool:
            return bool(llm.core.scheduler.running)

        assert in_threads(long, short)[1]


class TestClose:
    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_unfinished_requests_are_cancelled(self, together, in_flight: int) -> None:
        llm = helpers.load()
        llm.core.ahead = in_flight
        engine = Engine(llm)
        indices = [add(engine, prompt, **SAMPLED) for prompt in prompts()]
        found = []
        for _ in range(20):
            found += engine.step()
        late = add(engine, [5, 6])
        llm.close()
        assert live_arrays(llm) == 0
        check_idle(llm)
        reasons = set()
        for index, ids in zip(indices, together[str(SAMPLED)], strict=True):
            done = engine.result(index)
            assert done.token_ids == ids[: len(done.token_ids)]
            reasons.add((done.finish_reason, bool(done.token_ids)))
        assert reasons == {("length", True), ("cancelled", True), ("cancelled", False)}
        assert engine.result(late).finish_reason == "cancelled"

    def test_nothing_works_afterwards(self) -> None:
        llm = helpers.load()
        engine = Engine(llm)
        index = add(engine, [5, 6])
        engine.step()
        llm.close()
        llm.close()
        for use in (
            lambda: add(engine, [5, 6]),
            lambda: run(llm, [5, 6]),
            lambda: list(deinfer_jax.generate(llm, [5, 6], stream=True)),
            lambda: llm.logits([5, 6]),
            lambda: llm.score([5, 6]),
            llm.warm_up,
        ):
            with pytest.raises(RuntimeError, match="^this LLM has been closed"):
                use()
        engine.cancel(index)
        engine.cancel_all()
        (last,) = engine.stream(index)
        assert last.finish_reason == "cancelled" and engine.step() == []
        assert engine.result(index).finish_reason == "cancelled"
        assert live_arrays(llm) == 0

    def test_context_manager(self) -> None:
        with pytest.raises(ZeroDivisionError), helpers.load() as llm:
            add(Engine(llm), [5, 6])
            raise ZeroDivisionError
        assert live_arrays(llm) == 0

    def test_a_call_in_another_thread_ends(self, together) -> None:
        llm = helpers.load()
        begun, decode = threading.Event(), llm.runner.decode

        def spy(step: Any) -> Any:
            begun.set()
            return decode(step)

        llm.runner.decode = spy

        def close() -> None:
            assert begun.wait(WAIT_S)
            llm.close()

        def generate() -> list[Completion]:
            return deinfer_jax.generate(llm, prompts(), max_new_tokens=30, ignore_eos=True)

        done, _ = in_threads(generate, close)
        assert len(done) == 11
        assert {one.finish_reason for one in done} >= {"cancelled"}
        for one, ids in zip(done, together[str(GREEDY)], strict=True):
            assert one.token_ids[:12] == ids[: len(one.token_ids)]
        assert live_arrays(llm) == 0

    @pytest.mark.parametrize("what", ["logits", "score", "generate", "step"])
    def test_somebody_waits_for_a_step(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who has passed the check of an open model waits for the lock; then it is closed."""
        llm = helpers.load()
        engine = Engine(llm)
        add(engine, [5, 6])
        name = "borrowed_pages" if what in ("logits", "score") else "advance"
        go_on = getattr(llm.core, name)

        def close(*arguments: Any) -> Any:
            llm.close()
            return go_on(*arguments)

        monkeypatch.setattr(llm.core, name, close)
        if what == "generate":  # its requests were there at the end
            assert run(llm, [5, 6]) == [()]
        elif what == "step":
            assert [one.finish_reason for one in engine.step()] == ["cancelled"]
        else:
            with pytest.raises(RuntimeError, match="has been closed"):
                getattr(llm, what)([5, 6])
        assert live_arrays(llm) == 0

    def test_one_that_is_interrupted_can_be_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = helpers.load()
        add(Engine(llm), [5, 6])
        with monkeypatch.context() as patch:
            plant(patch, llm.core.scheduler, "remove", KeyboardInterrupt())
            Engine(llm).step()
            llm.core.settle()
            with pytest.raises(KeyboardInterrupt):
                llm.close()
        llm.close()
        assert live_arrays(llm) == 0

    def test_a_tokenizer_that_fails(
        self, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = helpers.load()
        llm.tokenizer = sentencepiece
        engine = Engine(llm)
        index = add(engine, "w1 w2")
        for _ in range(4):
            engine.step()
        plant(monkeypatch, TextStream, "finish", ZeroDivisionError(), once=False)
        llm.close()
        assert live_arrays(llm) == 0
        assert engine.result(index).finish_reason in ("cancelled", "error")
