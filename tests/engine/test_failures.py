"""Programs that fail on the device."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, OutOfDeviceMemory
from deinfer_jax.engine.sampler import Drawn
from tests.engine.helpers import (
    GREEDY,
    SAMPLED,
    check_idle,
    prompts,
    run,
)

EXHAUSTED = "RESOURCE_EXHAUSTED: planted"


class Planted(jax.stages.Compiled):
    """Stands for a compiled program whose execution fails, with the donated buffers gone or not."""

    def __init__(self, program: Any, message: str, after: int, donated: bool, once: bool) -> None:
        # Of the base class only the type counts, which is checked in tests.
        self.program, self.message = program, message
        self.after, self.donated, self.once = after, donated, once
        self.failures = 0
        self.group: list[Planted] = [self]

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()

    def __call__(self, weights: Any, pools: Any, state: Any, *rest: Any) -> Any:
        if self.after > 0 or (self.once and any(one.failures for one in self.group)):
            self.after -= 1
            return self.program(weights, pools, state, *rest)
        self.failures += 1
        if self.donated:
            for array in jax.tree.leaves((pools, state)):
                if isinstance(array, jax.Array):
                    array.delete()
        raise jax.errors.JaxRuntimeError(self.message)


class Pending:
    """Stands for the tokens of a program that fails after it was dispatched."""

    def __init__(self, message: str) -> None:
        self.message = message

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(self.message)


class TestDeviceFailures:
    """After a program failed on the device, everything starts from empty pools."""

    @pytest.fixture(scope="class")
    @classmethod
    def small(cls, load_tiny) -> LLM:
        """Three slots; every program that the tests below run is compiled."""
        llm = load_tiny(max_batch=3)
        run(llm, prompts())
        llm.logits(prompts()[9])
        return llm

    @pytest.fixture(autouse=True)
    def nothing_is_held(self, small: LLM):
        yield
        check_idle(small)
        assert len(small.runner.pools) == 2
        arrays = jax.tree.leaves((small.runner.pools, small.runner.state))
        assert not any(array.is_deleted() for array in arrays)

    def plant(
        self,
        llm: LLM,
        patch: pytest.MonkeyPatch,
        kind: str,
        message: str,
        *,
        after: int = 0,
        donated: bool = True,
        once: bool = False,
    ) -> list[Planted]:
        planted: list[Planted] = []
        for key, program in list(llm.runner._executables.items()):
            if key[0] == kind:
                planted.append(Planted(program, message, after, donated, once))
                patch.setitem(llm.runner._executables, key, planted[-1])
        assert planted
        for one in planted:
            one.group = planted
        return planted

    @pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("kind_and_after", [("prefill", 0), ("prefill", 2), ("decode", 0)])
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_the_model_works_afterwards(
        self,
        small: LLM,
        together,
        monkeypatch: pytest.MonkeyPatch,
        kind_and_after: tuple[str, int],
        ahead: int,
        donated: bool,
        setting: dict[str, Any],
    ) -> None:
        kind, after = kind_and_after
        monkeypatch.setattr(small.core, "ahead", ahead)
        with monkeypatch.context() as patch:
            planted = self.plant(
                small, patch, kind, "INTERNAL: planted", after=after, donated=donated
            )
            with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: planted"):
                run(small, prompts(), **setting)
            assert sum(one.failures for one in planted) == 1
        check_idle(small)
        assert run(small, prompts(), **setting) == together[str(setting)]

    def test_in_the_middle_of_decoding(
        self, small: LLM, together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            self.plant(small, patch, "decode", "INTERNAL: planted", after=4)
            with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                run(small, prompts())
        assert run(small, prompts()) == together[str(GREEDY)]

    def test_twice(self, small: LLM, together, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            self.plant(small, patch, "decode", "INTERNAL: planted")
            for _ in range(2):
                with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                    run(small, prompts())
        assert run(small, prompts()) == together[str(GREEDY)]

    def test_logits(self, small: LLM, together, monkeypatch: pytest.MonkeyPatch) -> None:
        before = small.logits(prompts()[9])
        with monkeypatch.context() as patch:
            self.plant(small, patch, "logits", "INTERNAL: planted")
            with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                small.logits(prompts()[9])
        check_idle(small)
        np.testing.assert_array_equal(small.logits(prompts()[9]), before)
        assert run(small, prompts()) == together[str(GREEDY)]

    @pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
    def test_out_of_memory_of_logits(
        self, small: LLM, together, monkeypatch: pytest.MonkeyPatch, donated: bool
    ) -> None:
        with monkeypatch.context() as patch:
            planted = self.plant(small, patch, "logits", EXHAUSTED, donated=donated)
            with pytest.raises(OutOfDeviceMemory) as raised:
                small.logits(prompts()[9])
            check_message(small, str(raised.value), planted)
            assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)
        check_idle(small)
        assert run(small, prompts()) == together[str(GREEDY)]

    @pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize(
        ("kind", "after"), [("prefill", 0), ("prefill", 2), ("decode", 0), ("decode", 4)]
    )
    def test_out_of_memory_at_a_dispatch(
        self,
        small: LLM,
        together,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        after: int,
        setting: dict[str, Any],
        ahead: int,
        donated: bool,
    ) -> None:
        monkeypatch.setattr(small.core, "ahead", ahead)
        expected = together[str(setting)]
        with monkeypatch.context() as patch:
            planted = self.plant(
                small, patch, kind, EXHAUSTED, after=after, donated=donated, once=True
            )
            done = generate(small, **setting)
            (error,) = check_some_failed(done, expected)
            check_message(small, error, planted)
        check_idle(small)
        assert run(small, prompts(), **setting) == expected

    def test_out_of_memory_again_and_again(
        self, small: LLM, together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            self.plant(small, patch, "decode", EXHAUSTED)
            done = generate(small)
        # Every request got the token of its prompt, and nothing more.
        assert {one.finish_reason for one in done} == {"error"}
        assert all(len(one.token_ids) <= 1 for one in done)
        assert run(small, prompts()) == together[str(GREEDY)]

    def test_what_was_read_before_is_kept(
        self, small: LLM, together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = together[str(GREEDY)]
        with monkeypatch.context() as patch:
            self.plant(small, patch, "decode", EXHAUSTED, after=3, once=True)
            done = generate(small)
        failed = [one for one in done if one.finish_reason == "error"]
        assert len(failed) == 3  # the slots
        for one, ids in zip(done[:3], expected, strict=False):
            assert one.token_ids == ids[:4]
            assert one.timing.ttft_s is not None and one.timing.itl_s is not None

    def test_a_program_that_cannot_be_compiled(
        self, small: LLM, together, load_tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh = load_tiny(max_batch=3)
        with monkeypatch.context() as patch:

            def refuse(lowered: Any, *_: Any, **__: Any) -> Any:
                raise jax.errors.JaxRuntimeError(EXHAUSTED)

            patch.setattr(jax.stages.Lowered, "compile", refuse)
            done = generate(fresh)
        assert {one.finish_reason for one in done} == {"error"}
        assert all(one.error and one.error.startswith("out of device memory: ") for one in done)
        check_idle(fresh)
        assert run(fresh, prompts()) == together[str(GREEDY)]

    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    def test_a_failure_that_shows_when_the_tokens_are_read(
        self,
        small: LLM,
        together,
        unchecked,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        ahead: int,
    ) -> None:
        monkeypatch.setattr(small.core, "ahead", ahead)
        with monkeypatch.context() as patch:
            self.fail_at_the_read(small, patch, kind, "INTERNAL: planted")
            # The step that is dispatched next may be the first to notice that the pools are gone.
            with pytest.raises(RuntimeError, match="planted|deleted"):
                run(small, prompts())
        check_idle(small)
        assert run(small, prompts()) == together[str(GREEDY)]

    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("kind", ["prefill", "decode"])
    def test_out_of_memory_that_shows_when_the_tokens_are_read(
        self,
        small: LLM,
        together,
        unchecked,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        ahead: int,
    ) -> None:
        monkeypatch.setattr(small.core, "ahead", ahead)
        with monkeypatch.context() as patch:
            self.fail_at_the_read(small, patch, kind, EXHAUSTED, deleted=False)
            done = generate(small)
        (error,) = check_some_failed(done, together[str(GREEDY)])
        assert error.startswith("out of device memory: weights ")
        check_idle(small)
        assert run(small, prompts()) == together[str(GREEDY)]

    def fail_at_the_read(
        self,
        llm: LLM,
        patch: pytest.MonkeyPatch,
        kind: str,
        message: str,
        *,
        deleted: bool = True,
    ) -> None:
        """Makes one program fail as on a GPU, where they run asynchronously: the first read raises,
        and the pools and the state that the program gave are of no use."""
        run_program, failed = llm.runner._run, []

        def fail(key: Any, *arguments: Any) -> Any:
            pools, state, tokens = run_program(key, *arguments)
            if key[0] != kind or failed:
                return pools, state, tokens
            failed.append(key)
            if deleted:
                for array in jax.tree.leaves((pools, state)):
                    array.delete()
            else:
                pools = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pools)
            return pools, state, Drawn(Pending(message), None, None, None)

        patch.setattr(llm.runner, "_run", fail)


def generate(llm: LLM, **setting: Any) -> list[Completion]:
    return deinfer_jax.generate(llm, prompts(), max_new_tokens=12, ignore_eos=True, **setting)


def check_some_failed(done: list[Completion], expected: list[tuple[int, ...]]) -> set[str]:
    """The running requests failed, at most three; the others are as without the failure. Returns
    the messages."""
    failed = [one for one in done if one.finish_reason == "error"]
    assert 1 <= len(failed) <= 3
    for one, ids in zip(done, expected, strict=True):
        if one.finish_reason == "error":
            assert one.token_ids == ids[: len(one.token_ids)] and len(one.token_ids) < 12
        else:
            assert (one.finish_reason, one.token_ids, one.error) == ("length", ids, None)
    return {str(one.error) for one in failed}


def check_message(llm: LLM, message: str, planted: list[Planted]) -> None:
    """The bytes are those of the program that failed."""
    plan = llm.memory_plan()
    (failed,) = (one for one in planted if one.failures)
    temporaries = failed.memory_analysis().temp_size_in_bytes
    assert re.match(
        rf"out of device memory: weights .*\b{plan.weights} bytes.*, cache .*\b{plan.cache} bytes"
        rf".*, temporaries .*\b{temporaries} bytes",
        message,
    )
