"""``generate`` and ``load`` as a user sees them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion, OutOfDeviceMemory
from deinfer_jax.engine.request import Request, Sampling

GREEDY: dict[str, Any] = dict()
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=3)
FILTERED: dict[str, Any] = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=4)
SETTINGS = pytest.mark.parametrize(
    "setting", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"]
)
LENGTHS = (1, 3, 5, 16, 17, 31, 32, 33, 48, 70, 90)


def prompts() -> list[list[int]]:
    """Eleven prompts of lengths around pages and chunks; words from 60 on do not occur."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def llm(load_tiny) -> LLM:
    return load_tiny()


@pytest.fixture(autouse=True)
def nothing_is_lost(request: pytest.FixtureRequest):
    """Whatever a test did, the shared model has all pages and slots afterwards."""
    yield
    if "llm" in request.fixturenames:
        check_idle(request.getfixturevalue("llm"))


@pytest.fixture
def ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the shared model as on a GPU: a step is dispatched before the last one is read."""
    monkeypatch.setattr(llm.engine, "ahead", 1)


def check_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def run(llm: LLM, what: Any, new: int = 12, **setting: Any) -> list[tuple[int, ...]]:
    return tokens(deinfer_jax.generate(llm, what, max_new_tokens=new, ignore_eos=True, **setting))


@pytest.fixture(scope="module")
def together(llm: LLM) -> dict[str, list[tuple[int, ...]]]:
    return {str(s): run(llm, prompts(), **s) for s in (GREEDY, SAMPLED, FILTERED)}


class TestIndependence:
    @SETTINGS
    def test_alone(self, llm: LLM, together, setting: dict[str, Any]) -> None:
        alone = [run(llm, [prompt], **setting)[0] for prompt in prompts()]
        assert alone == together[str(setting)]

    @SETTINGS
    def test_shuffled(self, llm: LLM, together, setting: dict[str, Any]) -> None:
        order = np.random.default_rng(1).permutation(len(LENGTHS))
        shuffled = run(llm, [prompts()[i] for i in order], **setting)
        assert shuffled == [together[str(setting)][i] for i in order]

    @SETTINGS
    def test_in_pairs(self, llm: LLM, together, setting: dict[str, Any]) -> None:
        everything = prompts()
        found = [run(llm, everything[i : i + 2], **setting) for i in range(0, 11, 2)]
        assert [ids for pair in found for ids in pair] == together[str(setting)]

    def test_in_a_larger_batch(self, load_tiny, together) -> None:
        wide = load_tiny(max_batch=11)
        assert run(wide, prompts(), **SAMPLED) == together[str(SAMPLED)]

    def test_in_a_cache_that_holds_one_at_a_time(self, load_tiny, together) -> None:
        small = load_tiny(cache_bytes=8 * 4 * 16 * 2 * 2 * 2 * 8)
        assert small.runner.num_pages == 8
        assert run(small, prompts(), **SAMPLED) == together[str(SAMPLED)]

    @SETTINGS
    def test_with_a_step_in_flight(
        self, llm: LLM, together, ahead, setting: dict[str, Any]
    ) -> None:
        assert run(llm, prompts(), **setting) == together[str(setting)]

    def test_repeated(self, llm: LLM, together) -> None:
        assert run(llm, prompts(), **FILTERED) == together[str(FILTERED)]

    def test_continuations_differ(self, together) -> None:
        # All tests above would pass if every prompt gave the same tokens.
        for found in together.values():
            assert len(set(found)) == len(LENGTHS)

    def test_a_prefix_of_a_longer_continuation(self, llm: LLM) -> None:
        long, short = (run(llm, [5, 6, 7], new=new, **SAMPLED)[0] for new in (20, 7))
        assert long[:7] == short


class TestGreedy:
    def test_tokens_are_the_argmax_of_the_logits(self, llm: LLM) -> None:
        prompt = prompts()[4]
        (ids,) = run(llm, prompt, new=10)
        logits = llm.logits([*prompt, *ids[:-1]])
        assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == list(ids)

    def test_the_seed_is_of_no_matter(self, llm: LLM) -> None:
        assert run(llm, [5, 6], seed=1) == run(llm, [5, 6], seed=2)

    @pytest.mark.parametrize("setting", [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)], ids=str)
    def test_filters_that_leave_one_word(self, llm: LLM, setting: dict[str, Any]) -> None:
        assert run(llm, [5, 6], temperature=3.0, **setting) == run(llm, [5, 6])


class TestSeeds:
    def test_same_seed_same_tokens(self, llm: LLM) -> None:
        assert run(llm, [5, 6], **SAMPLED) == run(llm, [5, 6], **SAMPLED)

    @pytest.mark.parametrize("other", [1, 2**32, 2**64 - 1])
    def test_other_seed_other_tokens(self, llm: LLM, other: int) -> None:
        first, second = (run(llm, [5, 6], temperature=1.0, seed=seed) for seed in (0, other))
        assert first != second

    def test_one_seed_a_prompt(self, llm: LLM) -> None:
        pair = [[5, 6], [7, 8, 9]]
        found = run(llm, pair, temperature=1.0, seed=[10, 11])
        alone = [run(llm, pair[i], temperature=1.0, seed=10 + i)[0] for i in (0, 1)]
        assert found == alone

    def test_equal_prompts_are_samples_of_one(self, llm: LLM) -> None:
        found = run(llm, [[5, 6]] * 5, **SAMPLED)
        assert len(set(found)) == 5

    def test_samples_count_on(self, llm: LLM) -> None:
        five, two = (run(llm, [[5, 6]] * count, **SAMPLED) for count in (5, 2))
        assert five[:2] == two

    def test_samples_count_on_past_other_prompts(self, llm: LLM) -> None:
        plain = run(llm, [[5, 6]] * 2, **SAMPLED)
        mixed = run(llm, [[5, 6], [9], [5, 6]], **SAMPLED)
        assert [mixed[0], mixed[2]] == plain

    def test_samples_are_counted_by_seed(self, llm: LLM) -> None:
        found = run(llm, [[5, 6]] * 3, temperature=1.0, seed=[1, 2, 1])
        first, second = (run(llm, [5, 6], temperature=1.0, seed=seed)[0] for seed in (1, 2))
        assert found[:2] == [first, second]
        assert found[2] not in (first, second)

    def test_other_prompts_draw_differently(self, llm: LLM) -> None:
        # At this temperature the distribution is flat, so that noise alone decides.
        first, second = run(llm, [[5, 6], [6, 5]], temperature=1e6)
        assert sum(a == b for a, b in zip(first, second, strict=True)) <= 3

    def test_positions_draw_differently(self, llm: LLM) -> None:
        (ids,) = run(llm, [5, 6], new=40, temperature=1e6)
        assert len(set(ids)) > 20

    @pytest.mark.parametrize("seed", [0, 2**32, 2**63, 2**64 - 1])
    def test_every_64_bit_seed(self, llm: LLM, seed: int) -> None:
        assert len(run(llm, [5, 6], new=2, temperature=1.0, seed=seed)[0]) == 2


@dataclass(frozen=True)
class Ending:
    """A prompt whose greedy continuation has a new word at the fourth place; ``other`` is a prompt
    in whose continuation that word does not occur."""

    prompt: list[int]
    ids: tuple[int, ...]
    other: list[int]

    @property
    def word(self) -> int:
        return self.ids[3]


@pytest.fixture(scope="module")
def ending(llm: LLM) -> Ending:
    everything = [[word, 6] for word in range(7, 57)]
    found = run(llm, everything)
    for prompt, ids in zip(everything, found, strict=True):
        for other, other_ids in zip(everything, found, strict=True):
            if ids[3] not in (*prompt, *ids[:3], *other, *other_ids, 2):
                return Ending(prompt, ids, other)
    raise AssertionError("the random model gives no such continuation")


@pytest.fixture(scope="module")
def ends_early(load_tiny, config, ending: Ending) -> LLM:
    """The same model, whose end token is that word."""
    return load_tiny(config=config.replace(eos_token_ids=(96, ending.word)))


class TestEnds:
    def end(self, llm: LLM, ending: Ending, new: int = 12, **options: Any) -> Completion:
        (done,) = deinfer_jax.generate(llm, ending.prompt, max_new_tokens=new, **options)
        return done

    def test_length(self, llm: LLM, ending: Ending) -> None:
        done = self.end(llm, ending, ignore_eos=True)
        assert (done.finish_reason, done.token_ids) == ("length", ending.ids)

    def test_one_token(self, llm: LLM, ending: Ending) -> None:
        done = self.end(llm, ending, new=1)
        assert (done.finish_reason, done.token_ids) == ("length", ending.ids[:1])

    def test_a_stop_token(self, llm: LLM, ending: Ending) -> None:
        done = self.end(llm, ending, stop_token_ids=[ending.word])
        assert (done.finish_reason, done.token_ids) == ("stop", ending.ids[:4])

    def test_a_stop_token_at_the_last_place(self, llm: LLM, ending: Ending) -> None:
        assert self.end(llm, ending, 4, stop_token_ids=[ending.word]).finish_reason == "stop"

    def test_a_stop_token_at_the_first_place(self, llm: LLM, ending: Ending) -> None:
        done = self.end(llm, ending, stop_token_ids=[ending.ids[0]])
        assert (done.finish_reason, done.token_ids) == ("stop", ending.ids[:1])

    def test_a_stop_token_does_not_end_the_others(self, llm: LLM, ending: Ending) -> None:
        pair = [ending.prompt, ending.other]
        found = run(llm, pair, stop_token_ids=[ending.word])
        assert found == [ending.ids[:4], run(llm, ending.other)[0]]

    def test_eos(self, ends_early: LLM, ending: Ending) -> None:
        done = self.end(ends_early, ending)
        assert (done.finish_reason, done.token_ids) == ("eos", ending.ids[:4])

    def test_ignore_eos(self, ends_early: LLM, ending: Ending) -> None:
        done = self.end(ends_early, ending, ignore_eos=True)
        assert (done.finish_reason, done.token_ids) == ("length", ending.ids)

    def test_ignore_eos_does_not_ignore_stop_tokens(self, ends_early: LLM, ending: Ending) -> None:
        done = self.end(ends_early, ending, ignore_eos=True, stop_token_ids=[ending.word])
        assert done.finish_reason == "stop"

    def test_slots_of_ended_requests_are_used_by_the_next(
        self, ends_early: LLM, ending: Ending
    ) -> None:
        done = deinfer_jax.generate(ends_early, [ending.prompt, *prompts()], max_new_tokens=9)
        assert done[0].finish_reason == "eos"
        assert len(done) == 12
        check_idle(ends_early)

    def test_an_end_with_a_step_in_flight(self, llm: LLM, ahead, ending: Ending) -> None:
        # The step that is in flight runs the ended request once more; nobody may see it.
        everything = [ending.prompt, *prompts()]
        found = run(llm, everything, stop_token_ids=[ending.word])
        llm.engine.ahead = 0
        assert found == run(llm, everything, stop_token_ids=[ending.word])
        assert found[0] == ending.ids[:4]

    def test_the_longest_that_fits(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, [5] * 100, max_new_tokens=28, ignore_eos=True)
        assert len(done.token_ids) == 28

    def test_a_prompt_of_all_but_one_token(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, [5] * 127, max_new_tokens=1)
        assert len(done.token_ids) == 1


class TestCompletion:
    def test_fields(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, [5, 6], max_new_tokens=3)
        assert done.prompt_token_ids == (5, 6)
        assert done.error is None
        assert done.text == ""  # no tokenizer

    def test_timing(self, llm: LLM) -> None:
        first, second = deinfer_jax.generate(llm, [[5, 6], [7]], max_new_tokens=5, ignore_eos=True)
        for timing in (first.timing, second.timing):
            assert timing.ttft_s is not None and 0 < timing.ttft_s < 60
            assert timing.itl_s is not None and 0 < timing.itl_s < 60
        # Prompts run in order.
        assert first.timing.ttft_s < second.timing.ttft_s  # pyright: ignore[reportOperatorIssue]

    def test_one_token_has_no_time_between_tokens(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, [5, 6], max_new_tokens=1)
        assert done.timing.ttft_s is not None and done.timing.itl_s is None

    def test_queueing_counts(self, llm: LLM) -> None:
        done = deinfer_jax.generate(llm, [[5 + i] for i in range(9)], max_new_tokens=5)
        assert done[8].timing.ttft_s > done[0].timing.ttft_s  # pyright: ignore[reportOperatorIssue]


class TestPromptKinds:
    @pytest.mark.parametrize(
        "one",
        [
            [5, 6, 7],
            (5, 6, 7),
            np.array([5, 6, 7]),
            np.array([5, 6, 7], np.uint8),
            [np.int32(5), np.int64(6), 7],
            [[5, 6, 7]],
            [(5, 6, 7)],
            [np.array([5, 6, 7])],
            np.array([[5, 6, 7]]),
        ],
        ids=[
            "list",
            "tuple",
            "array",
            "uint8",
            "numpy ints",
            "list of a list",
            "list of a tuple",
            "list of an array",
            "2-d array",
        ],
    )
    def test_one_prompt_of_ids(self, llm: LLM, one: Any) -> None:
        (done,) = deinfer_jax.generate(llm, one, max_new_tokens=1)
        assert done.prompt_token_ids == (5, 6, 7)

    @pytest.mark.parametrize(
        "several",
        [
            [[5, 6], [7, 8]],
            [np.array([5, 6]), np.array([7, 8])],
            np.array([[5, 6], [7, 8]]),
            [np.array([5, 6]), [7, 8]],
        ],
        ids=["lists", "arrays", "2-d array", "mixed"],
    )
    def test_several_prompts_of_ids(self, llm: LLM, several: Any) -> None:
        done = deinfer_jax.generate(llm, several, max_new_tokens=1)
        assert [one.prompt_token_ids for one in done] == [(5, 6), (7, 8)]

    def test_no_prompts(self, llm: LLM) -> None:
        assert deinfer_jax.generate(llm, [], max_new_tokens=1) == []

    def test_prompts_of_different_lengths_as_arrays(self, llm: LLM) -> None:
        several = [np.array([5, 6]), np.array([7, 8, 9])]
        done = deinfer_jax.generate(llm, several, max_new_tokens=1)
        assert [one.prompt_token_ids for one in done] == [(5, 6), (7, 8, 9)]

    def test_completion_ids_are_python_ints(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, np.array([5, 6, 7]), max_new_tokens=2)
        assert {type(i) for i in (*done.prompt_token_ids, *done.token_ids)} == {int}


# what is wrong: (prompts, options, message)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ([[5], []], {}, "prompt 1: expected at least one token"),
    "several empty prompts": ([[], [5], []], {}, "prompt 0.*prompt 2"),
    "word below": ([[5, -1]], {}, r"prompt 0.*from 0 to 96, got \[-1\]"),
    "word above": ([[5], [97, 5, 98]], {}, r"prompt 1.*got \[97, 98\]"),
    "text without tokenizer": ("hello", {}, "expected token ids.*no tokenizer"),
    "chat without tokenizer": ([{"role": "user", "content": "x"}], {}, "no tokenizer"),
    "too long": (
        [[5], [5] * 120, [5], [5] * 130],
        {"max_new_tokens": 9},
        r"^prompt 1: 120 \+ 9 new tokens, expected at most max_context = 128 together; "
        r"prompt 3: 130 \+ 9 new tokens, expected at most max_context = 128 together$",
    ),
    "too long by one": ([[5] * 120], {"max_new_tokens": 9}, r"^prompt 0: 120 \+ 9 new tokens"),
    "an empty and a long one": (
        [[], [5] * 130],
        {},
        r"^prompt 0: expected at least one token.*; prompt 1: 130 \+ 3 new tokens",
    ),
    "everything at once": (
        [[], [5] * 126, [97], [5], "text", [5.5]],
        {},
        r"^prompt 0: expected at least one token[^;]*; prompt 1: 126 \+ 3 new tokens, expected at "
        r"most max_context = 128 together; prompt 2: [^;]*0 to 96, got \[97\]; prompt 4: [^;]*; "
        r"prompt 5: [^;]*$",
    ),
    "a message by itself": (
        {"role": "user", "content": "x"},
        {},
        r"^prompts: a chat is a list of messages, got a single mapping with \['content', 'role'\]$",
    ),
    "temperature": (
        [[5]],
        {"temperature": -0.1},
        "^temperature: expected a float32 number >= 0, got -0.1$",
    ),
    "temperature nan": ([[5]], {"temperature": float("nan")}, "temperature: .*>= 0, got nan"),
    "temperature inf": ([[5]], {"temperature": float("inf")}, "temperature: .*>= 0, got inf"),
    "temperature beyond float32": (
        [[5]],
        {"temperature": 1e39},
        r"temperature: expected a float32 number >= 0, got 1e\+39",
    ),
    "top_p zero": ([[5]], {"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0.0"),
    "top_p above one": ([[5]], {"top_p": 1.01}, "top_p.*got 1.01"),
    "top_p nan": ([[5]], {"top_p": float("nan")}, "top_p.*got nan"),
    "top_k": ([[5]], {"top_k": -1}, "top_k: expected an integer >= 0, got -1"),
    "top_k fraction": ([[5]], {"top_k": 2.5}, "top_k: expected an integer >= 0, got 2.5"),
    "top_k bool": ([[5]], {"top_k": True}, "top_k: expected an integer >= 0, got True"),
    "min_p below": ([[5]], {"min_p": -0.1}, r"min_p: .*\[0, 1\], got -0.1"),
    "min_p above": ([[5]], {"min_p": 1.5}, r"min_p: .*\[0, 1\], got 1.5"),
    "no new tokens": ([[5]], {"max_new_tokens": 0}, "max_new_tokens: .*positive.*got 0"),
    "new tokens fraction": ([[5]], {"max_new_tokens": 2.0}, "max_new_tokens: .*positive.*got 2.0"),
    "new tokens bool": ([[5]], {"max_new_tokens": True}, "max_new_tokens: .*positive.*got True"),
    "seed below": ([[5]], {"seed": -1}, "^seed: expected integers .*got -1 for prompt 0$"),
    "seed above": ([[5]], {"seed": 2**64}, "^seed: .*got 18446744073709551616 for prompt 0$"),
    "too few seeds": ([[5], [6], [7]], {"seed": [1, 2]}, r"one a prompt \(3\), got 2"),
    "one bad seed": ([[5], [6]], {"seed": [1, -2]}, "^seed: .*got -2 for prompt 1$"),
    "several bad seeds": (
        [[5], [6], [7], [8]],
        {"seed": [-1, 2, 2.5, True]},
        "^seed: .*got -1 for prompt 0, 2.5 for prompt 2, True for prompt 3$",
    ),
    "stop token below": (
        [[5]],
        {"stop_token_ids": [-1]},
        r"stop_token_ids: expected ids from 0 to 96, got \[-1\]",
    ),
    "stop token above": ([[5]], {"stop_token_ids": [3, 97]}, r"stop_token_ids.*96, got \[97\]"),
    "stop token fraction": ([[5]], {"stop_token_ids": [3, 4.0]}, r"stop_token_ids.*got \[4.0\]"),
    "stop token bool": ([[5]], {"stop_token_ids": [True]}, r"stop_token_ids.*got \[True\]"),
    "stop token text": ([[5]], {"stop_token_ids": ["x"]}, r"stop_token_ids.*got \['x'\]"),
}


def refuse(llm: LLM, what: Any, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 3} | options
    deinfer_jax.generate(llm, what, **arguments)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of any type, as in a user's process: annotations are not checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize("name", BAD)
    def test_is_refused(self, llm: LLM, name: str) -> None:
        what, options, message = BAD[name]
        with pytest.raises(ValueError, match=message):
            refuse(llm, what, options)

    def test_nothing_runs_before_everything_is_checked(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dispatched = []
        monkeypatch.setattr(llm.runner, "_run", lambda *arguments: dispatched.append(arguments))
        for what, options, _ in BAD.values():
            with pytest.raises((ValueError, TypeError, OverflowError)):
                refuse(llm, what, options)
        assert dispatched == []

    def test_unknown_argument(self, llm: LLM) -> None:
        with pytest.raises(TypeError, match="top_kk"):
            deinfer_jax.generate(llm, [5], top_kk=3)  # pyright: ignore[reportCallIssue]

    def test_integers_of_numpy(self, llm: LLM, load_tiny) -> None:
        options: dict[str, Any] = dict(
            max_new_tokens=np.int64(4),
            top_k=np.int32(5),
            temperature=np.float32(0.5),
            seed=np.array([2**64 - 1, 7], np.uint64),
            stop_token_ids=np.array([96], np.uint8),
            ignore_eos=True,
        )
        plain: dict[str, Any] = dict(
            max_new_tokens=4,
            top_k=5,
            temperature=0.5,
            seed=[2**64 - 1, 7],
            stop_token_ids=[96],
            ignore_eos=True,
        )
        pair = [[5, 6], [7, 8]]
        expected = deinfer_jax.generate(llm, pair, **plain)
        # A model of its own, since annotations are checked again afterwards.
        assert tokens(deinfer_jax.generate(load_tiny(), pair, **options)) == tokens(expected)

    def test_the_tiniest_temperature_is_greedy(self, llm: LLM) -> None:
        assert run(llm, [5, 6], temperature=1e-30) == run(llm, [5, 6])

    def test_the_largest_temperature(self, llm: LLM) -> None:
        largest = float(np.finfo(np.float32).max)
        (done,) = deinfer_jax.generate(
            llm, [5, 6], max_new_tokens=5, temperature=largest, ignore_eos=True
        )
        assert done.error is None and len(done.token_ids) == 5

    def test_top_k_above_the_vocabulary_keeps_all(self, llm: LLM) -> None:
        assert run(llm, [5, 6], top_k=2**40, **SAMPLED) == run(llm, [5, 6], **SAMPLED)

    def test_the_model_works_afterwards(self, llm: LLM) -> None:
        before = run(llm, [5, 6])
        for what, options, _ in BAD.values():
            with pytest.raises((ValueError, TypeError, OverflowError)):
                refuse(llm, what, options)
        assert run(llm, [5, 6]) == before

    def test_an_interrupted_run_leaves_the_model_usable(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = run(llm, prompts())
        take, taken = llm.engine._take, []

        def interrupt(*arguments: Any) -> None:
            taken.append(arguments)
            if len(taken) == 7:
                raise KeyboardInterrupt
            take(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "_take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(llm, prompts())
        check_idle(llm)
        assert run(llm, prompts()) == before

    def test_a_cache_too_small_for_one_request(self, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        with pytest.raises(
            ValueError, match=r"holds 48 tokens.*prompt 1 \(45 \+ 5 tokens\).*cache_bytes = 16384"
        ):
            deinfer_jax.generate(small, [[5], [5] * 45], max_new_tokens=5)
        check_idle(small)

    def test_the_cache_it_names_would_do(self, load_tiny) -> None:
        enough = load_tiny(cache_bytes=16384)
        assert len(run(enough, [5] * 45, new=5)[0]) == 5


class TestLogits:
    def test_shape_and_dtype(self, llm: LLM) -> None:
        found = llm.logits([5, 6, 7])
        assert found.shape == (3, 97) and found.dtype == np.float32

    def test_chunks_agree_with_prefixes(self, llm: LLM) -> None:
        whole = llm.logits(list(range(3, 80)))
        np.testing.assert_allclose(whole[:40], llm.logits(list(range(3, 43))), atol=1e-5)

    def test_a_whole_context(self, llm: LLM) -> None:
        assert llm.logits([5] * 128).shape == (128, 97)

    def test_too_long(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="max_context = 128 tokens, got 129"):
            llm.logits([5] * 129)

    def test_empty(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            llm.logits([])

    @pytest.mark.parametrize("word", [-1, 97])
    def test_unknown_word(self, llm: LLM, word: int) -> None:
        with pytest.raises(ValueError, match=rf"from 0 to 96, got \[{word}\]"):
            llm.logits([5, word])

    def test_fractions_are_refused(self, llm: LLM) -> None:
        with pytest.raises((ValueError, TypeError), match="5.7|integer|int"):
            llm.logits(np.array([5.7, 6.0]))

    def test_a_sequence_that_the_cache_does_not_hold(self, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        with pytest.raises(ValueError, match="logits: the cache holds 48 tokens, got 49"):
            small.logits([5] * 49)
        check_idle(small)

    def test_a_sequence_that_fills_the_cache(self, llm: LLM, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        sequence = prompts()[8]
        assert len(sequence) == 48
        np.testing.assert_allclose(small.logits(sequence), llm.logits(sequence), atol=1e-5)


def plant_nan(llm: LLM, word: int) -> None:
    """Breaks a word's row of the embedding; the head is another table and stays whole."""
    weights = llm.runner.weights
    table = weights["embedding"]["weight"]
    weights["embedding"]["weight"] = table.at[word].set(jnp.nan)


@pytest.fixture(scope="module")
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


class TestNotANumber:
    def test_only_that_request_ends_with_an_error(self, broken: LLM, bad_word: int) -> None:
        everything = [[5, 6], [5, bad_word, 6], [8, 9, 10]]
        done = deinfer_jax.generate(broken, everything, max_new_tokens=9)
        assert [one.finish_reason == "error" for one in done] == [False, True, False]

    def test_the_error_says_where(self, broken: LLM, bad_word: int) -> None:
        (done,) = deinfer_jax.generate(broken, [5, bad_word, 6], max_new_tokens=9)
        assert done.token_ids == ()
        assert done.error is not None and "position 3" in done.error
        assert done.timing.ttft_s is None and done.timing.itl_s is None

    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_neighbours_are_untouched(
        self, llm: LLM, broken: LLM, bad_word: int, setting: dict[str, Any]
    ) -> None:
        bad, good = [5, bad_word, 6] * 10, prompts()
        found = run(broken, [bad, *good[:2], bad, *good[2:]], **setting)
        assert [found[0], found[3]] == [(), ()]
        assert [*found[1:3], *found[4:]] == run(llm, good, **setting)

    def test_pages_are_clean_for_the_next(self, llm: LLM, broken: LLM, bad_word: int) -> None:
        deinfer_jax.generate(broken, [[bad_word] * 100] * 3, max_new_tokens=9)
        check_idle(broken)
        assert run(broken, prompts()) == run(llm, prompts())

    def test_pages_are_clean_after_logits(self, llm: LLM, broken: LLM, bad_word: int) -> None:
        assert np.isnan(broken.logits([bad_word] * 100)).any()
        assert run(broken, prompts()) == run(llm, prompts())

    def test_pages_are_clean_after_an_interrupted_run(
        self, llm: LLM, broken: LLM, bad_word: int
    ) -> None:
        broken.engine.ahead = 1  # the broken prompt is on the device when the interrupt comes

        def interrupt(request: object) -> None:
            raise KeyboardInterrupt

        requests = [Request(p, Sampling(max_new_tokens=9)) for p in ([5], [bad_word] * 100)]
        with pytest.raises(KeyboardInterrupt):
            broken.engine.run(requests, on_token=interrupt)
        assert run(broken, prompts()) == run(llm, prompts())

    @pytest.mark.parametrize("steps_and_ahead", [(4, 0), (1, 1)], ids=str)
    def test_pages_are_clean_after_an_end_that_breaks(
        self, llm: LLM, load_tiny, ending: Ending, steps_and_ahead: tuple[int, int]
    ) -> None:
        # The device runs the end token before the host knows that it was one.
        other = load_tiny(max_batch=3, decode_steps=steps_and_ahead[0])
        other.engine.ahead = steps_and_ahead[1]
        plant_nan(other, ending.word)
        ((*_, last),) = run(other, ending.prompt, stop_token_ids=[ending.word])
        assert last == ending.word
        assert run(other, ending.other) == run(llm, ending.other)

    @pytest.mark.parametrize("steps_and_ahead", [(1, 0), (4, 0), (1, 1)], ids=str)
    def test_a_word_that_breaks_the_continuation(
        self, load_tiny, ending: Ending, steps_and_ahead: tuple[int, int]
    ) -> None:
        other = load_tiny(max_batch=3, decode_steps=steps_and_ahead[0])
        other.engine.ahead = steps_and_ahead[1]
        plant_nan(other, ending.word)
        (done,) = deinfer_jax.generate(other, ending.prompt, max_new_tokens=12, ignore_eos=True)
        # It is still drawn itself; the token after it cannot be.
        assert (done.finish_reason, done.token_ids) == ("error", ending.ids[:4])
        assert done.error is not None and f"position {len(ending.prompt) + 4}" in done.error

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_what_the_cache_held_before_does_not_matter(
        self, llm: LLM, together, value: float, setting: dict[str, Any]
    ) -> None:
        logits = llm.logits(prompts()[9])
        runner = llm.runner
        runner.pools = [jnp.full_like(pool, value) for pool in runner.pools]
        assert run(llm, prompts(), **setting) == together[str(setting)]
        runner.pools = [jnp.full_like(pool, value) for pool in runner.pools]
        np.testing.assert_array_equal(llm.logits(prompts()[9]), logits)

    def test_all_weights(self, load_tiny) -> None:
        llm = load_tiny(max_batch=2)
        llm.runner.weights["norm"]["weight"] = llm.runner.weights["norm"]["weight"] * jnp.nan
        done = deinfer_jax.generate(llm, prompts(), max_new_tokens=3)
        assert {one.finish_reason for one in done} == {"error"}
        check_idle(llm)


class Planted(jax.stages.Compiled):
    """Stands for a compiled program whose execution fails, with the donated buffers gone or not."""

    def __init__(self, program: Any, message: str, after: int, donated: bool) -> None:
        # Of the base class only the type counts, which is checked in tests.
        self.program, self.message = program, message
        self.after, self.donated = after, donated
        self.failures = 0

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()

    def __call__(self, weights: Any, pools: Any, state: Any, *rest: Any) -> Any:
        if self.after > 0:
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

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")


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
        arrays = [*small.runner.pools, *jax.tree.leaves(small.runner.state)]
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
    ) -> list[Planted]:
        planted = []
        for key, program in list(llm.runner._executables.items()):
            if key[0] == kind:
                planted.append(Planted(program, message, after, donated))
                patch.setitem(llm.runner._executables, key, planted[-1])
        assert planted
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
        monkeypatch.setattr(small.engine, "ahead", ahead)
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
            self.plant(small, patch, "score", "INTERNAL: planted")
            with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                small.logits(prompts()[9])
        check_idle(small)
        np.testing.assert_array_equal(small.logits(prompts()[9]), before)
        assert run(small, prompts()) == together[str(GREEDY)]

    @pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
    @pytest.mark.parametrize("kind", ["prefill", "decode", "score"])
    def test_out_of_memory(
        self, small: LLM, together, monkeypatch: pytest.MonkeyPatch, kind: str, donated: bool
    ) -> None:
        plan = small.memory_plan()
        with monkeypatch.context() as patch:
            message = "RESOURCE_EXHAUSTED: planted"
            planted = self.plant(small, patch, kind, message, donated=donated)
            with pytest.raises(
                OutOfDeviceMemory,
                match=rf"^out of device memory: weights .*\b{plan.weights} bytes.*, cache .*\b"
                rf"{plan.cache} bytes.*, temporaries .*\b\d+ bytes",
            ) as raised:
                if kind == "score":
                    small.logits(prompts()[9])
                else:
                    run(small, prompts())
            # The temporaries are those of the program that failed.
            (failed,) = (one for one in planted if one.failures)
            temporaries = failed.memory_analysis().temp_size_in_bytes
            assert re.search(rf"temporaries .*\b{temporaries} bytes", str(raised.value))
            assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)
        check_idle(small)
        assert run(small, prompts()) == together[str(GREEDY)]

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
        # On a GPU programs run asynchronously: what fails there is raised by the first read, and
        # the pools and the state that the program gave are of no use.
        monkeypatch.setattr(small.engine, "ahead", ahead)
        run_program, pending = small.runner._run, Pending()

        def fail(key: Any, *arguments: Any) -> Any:
            pools, state, tokens = run_program(key, *arguments)
            if key[0] != kind:
                return pools, state, tokens
            for array in jax.tree.leaves((pools, state)):
                array.delete()
            return pools, state, pending

        with monkeypatch.context() as patch:
            patch.setattr(small.runner, "_run", fail)
            # The step that is dispatched next may be the first to notice that the pools are gone.
            with pytest.raises(RuntimeError, match="planted|deleted"):
                run(small, prompts())
        check_idle(small)
        try:
            assert run(small, prompts()) == together[str(GREEDY)]
        finally:
            small.runner._reset()  # for the other tests


@pytest.fixture(scope="module")
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


class TestText:
    """The text is what the continuation adds to the decoded prompt."""

    @pytest.fixture
    def speaking(self, llm: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
        monkeypatch.setattr(llm, "tokenizer", sentencepiece)
        return llm

    def say(
        self,
        llm: LLM,
        monkeypatch: pytest.MonkeyPatch,
        prompt: list[int],
        generated: list[int],
        reason: Any = "length",
    ) -> str:
        """Text of a continuation that the model is made to give."""

        def run(requests: list[Request]) -> None:
            for request in requests:
                request.times.extend(range(len(generated) + 1))
                request.generated.extend(generated)
                request.finish_reason = reason

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "run", run)
            (done,) = deinfer_jax.generate(llm, prompt, max_new_tokens=20)
        assert done.token_ids == tuple(generated)
        return done.text

    def test_the_tokenizer_drops_a_leading_blank(self, sentencepiece: Any) -> None:
        # Otherwise the tests below would show nothing.
        assert sentencepiece.decode([8, 9]) == "w1 w2"
        assert sentencepiece("w1 w2")["input_ids"] == [8, 9]

    @pytest.mark.parametrize(
        ("prompt", "generated", "reason", "text"),
        [
            ([1, 8], [9, 10], "length", " w2 w3"),
            ([1, 8], [5, 9], "length", "ly w2"),
            ([1, 8], [9, 2], "eos", " w2"),
            ([1, 8], [9, 10], "stop", " w2"),
            ([1, 8], [2], "eos", ""),
            ([1, 8], [9, 2, 10], "length", " w2 w3"),
            ([1], [9, 10], "length", "w2 w3"),
            ([1, 8], [3, 4], "length", "ü"),
            ([1, 8], [6, 9], "length", ", w2"),
        ],
        ids=[
            "blank",
            "no blank",
            "end token",
            "stop token",
            "end token alone",
            "special token inside",
            "at the beginning",
            "bytes",
            "comma",
        ],
    )
    def test_text(
        self,
        speaking: LLM,
        monkeypatch: pytest.MonkeyPatch,
        prompt: list[int],
        generated: list[int],
        reason: str,
        text: str,
    ) -> None:
        assert self.say(speaking, monkeypatch, prompt, generated, reason) == text

    def test_an_error_without_tokens(self, speaking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.say(speaking, monkeypatch, [1, 8], [], "error") == ""

    def test_a_character_across_the_seam(
        self, speaking: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Neither part has the character; the prompt may not come again.
        text = self.say(speaking, monkeypatch, [1, 8, 3], [4, 9])
        assert text.endswith(" w2") and "w1" not in text

    def test_prompt_and_text_are_the_whole(self, speaking: LLM, sentencepiece: Any) -> None:
        for done in deinfer_jax.generate(speaking, prompts(), max_new_tokens=12, ignore_eos=True):
            prompt = list(done.prompt_token_ids)
            both = [
                sentencepiece.decode(ids, skip_special_tokens=True)
                for ids in (prompt, [*prompt, *done.token_ids])
            ]
            if both[1].startswith(both[0]):
                assert both[0] + done.text == both[1]
            else:  # a byte at the seam
                assert prompt[-1] in (3, 4)

    def test_a_prompt_of_text(self, speaking: LLM, sentencepiece: Any) -> None:
        (done,) = deinfer_jax.generate(speaking, "w1 w2", max_new_tokens=6, ignore_eos=True)
        assert done.prompt_token_ids == (8, 9)
        assert "w1 w2" + done.text == sentencepiece.decode(
            [8, 9, *done.token_ids], skip_special_tokens=True
        )

    def test_a_message_by_itself(self, speaking: LLM, unchecked) -> None:
        with pytest.raises(ValueError, match="a chat is a list of messages, got a single mapping"):
            deinfer_jax.generate(speaking, {"role": "user", "content": "w1"})  # pyright: ignore[reportArgumentType]


# option, value, message
BAD_LOADS: list[tuple[str, Any, str]] = [
    ("strategy", "magic", "strategy: expected 'auto'.*got 'magic'"),
    ("tensor_parallel", 2, "tensor_parallel.*one device, got 2"),
    ("tensor_parallel", 0, "tensor_parallel.*got 0"),
    ("kv_cache", "paged", "kv_cache.*got 'paged'"),
    ("kv_cache", "latent", "kv_cache.*got 'latent'"),
    ("dtype", "int8", "dtype: expected one of float32, bfloat16, float16.*got 'int8'"),
    ("max_batch", 0, "max_batch: expected a positive.*got 0"),
    ("max_context", -1, "max_context: expected a positive.*got -1"),
    ("max_context", 257, r"max_context: expected at most 256 .*got 257"),
    ("page_size", 24, r"page_size: expected one of \(16, 32, 64, 128\), got 24"),
    ("page_size", 0, r"page_size: expected one of \(16, 32, 64, 128\), got 0"),
    ("cache_bytes", 100, "cache_bytes: expected at least 4096 .*got 100"),
    ("cache_bytes", 4095, "cache_bytes: expected at least 4096 .*got 4095"),
    ("max_batch", 2.0, "max_batch: expected a positive.*got 2.0"),
    ("max_batch", True, "max_batch: expected a positive.*got True"),
    ("max_context", 32.5, "max_context: expected a positive.*got 32.5"),
    ("prefill_chunk", 0, "prefill_chunk: expected a positive.*got 0"),
    ("decode_steps", 0, "decode_steps: expected a positive.*got 0"),
    ("implementation", "cuda", "implementation: expected 'reference'.*got 'cuda'"),
]


class TestLoad:
    @pytest.mark.parametrize(("option", "value", "message"), BAD_LOADS)
    def test_bad_option(self, config, unchecked, option: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            deinfer_jax.load(config, **{option: value})

    def test_unknown_option(self, config) -> None:
        with pytest.raises(TypeError, match="max_contxt"):
            deinfer_jax.load(config, max_contxt=3)  # pyright: ignore[reportCallIssue]

    def test_unknown_family(self, config) -> None:
        with pytest.raises(ValueError, match="family: expected one of llama, got 'gpt'"):
            deinfer_jax.load(config.replace(family="gpt"))

    def test_unknown_activation(self, config) -> None:
        with pytest.raises(ValueError, match="hidden_act: expected one of .*silu, got 'mish'"):
            deinfer_jax.load(config.replace(hidden_act="mish"))

    def test_no_such_path(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError, match="nothing-here"):
            deinfer_jax.load(tmp_path / "nothing-here")

    def test_an_implementation_that_an_op_lacks(self, config) -> None:
        with pytest.raises((NotImplementedError, ValueError), match="mosaic_gpu"):
            deinfer_jax.load(config, implementation="mosaic_gpu", max_context=32)

    def test_defaults(self, config) -> None:
        with deinfer_jax.load(config) as llm:
            assert (llm.max_batch, llm.max_context) == (8, 256)
            assert llm.cache_layout.page_size == 16
            assert llm.cache_layout.dtype == "float32"
            assert llm.runner.num_pages == 8 * 16

    def test_options(self, config) -> None:
        with deinfer_jax.load(
            config, max_batch=3, max_context=100, page_size=32, dtype="bfloat16", kv_cache="full"
        ) as llm:
            assert (llm.max_batch, llm.max_context) == (3, 100)
            assert llm.runner.pools[0].shape == (12, 2, 2, 32, 8)
            arrays = jax.tree.leaves((llm.runner.weights, llm.runner.pools))
            assert {array.dtype.name for array in arrays} == {"bfloat16"}

    def test_the_context_shrinks_to_the_cache(self, config) -> None:
        with deinfer_jax.load(config, cache_bytes=6 * 4096) as llm:
            assert llm.max_context == 6 * 16

    def test_a_long_context_shrinks_to_the_default_cache(self, config) -> None:
        # 4096 bytes a page: what is asked for would take 1.6 GB.
        with deinfer_jax.load(config.replace(max_position=10**5), max_batch=64) as llm:
            layout = llm.cache_layout
            assert layout.bytes_per_page * llm.runner.num_pages <= 512 * 10**6
            assert llm.max_context == 10**5

    def test_seeds_give_other_weights(self, config) -> None:
        found = []
        for seed in (0, 0, 1):
            with deinfer_jax.load(config, max_context=32, seed=seed) as llm:
                found.append(np.asarray(llm.runner.weights["embedding"]["weight"]))
        np.testing.assert_array_equal(found[0], found[1])
        assert not np.array_equal(found[0], found[2])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_generates(self, load_tiny, dtype: str) -> None:
        half = load_tiny(dtype=dtype)
        assert [len(ids) for ids in run(half, prompts(), new=5)] == [5] * 11

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_logits_of_half_precision(self, load_tiny, dtype: str) -> None:
        assert load_tiny(dtype=dtype).logits([5, 6, 7]).dtype == np.float32

    def test_max_batch_of_one(self, load_tiny, llm: LLM) -> None:
        single = load_tiny(max_batch=1)
        assert run(single, prompts()[:3], new=5) == run(llm, prompts()[:3], new=5)

    def test_out_of_device_memory_is_a_public_name(self) -> None:
        assert issubclass(OutOfDeviceMemory, MemoryError)


class TestClose:
    @pytest.fixture
    def closed(self, config) -> LLM:
        llm = deinfer_jax.load(config, max_context=32)
        llm.close()
        return llm

    def test_generate_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            deinfer_jax.generate(closed, [5], max_new_tokens=1)

    def test_logits_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            closed.logits([5])

    def test_warm_up_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            closed.warm_up()

    def test_close_twice(self, closed: LLM) -> None:
        closed.close()

    def test_device_arrays_are_deleted(self, config) -> None:
        llm = deinfer_jax.load(config, max_context=32)
        runner = llm.runner
        arrays = jax.tree.leaves((runner.weights, runner.pools, runner.state))
        assert not any(array.is_deleted() for array in arrays)
        llm.close()
        assert all(array.is_deleted() for array in arrays)

    def test_context_manager(self, config) -> None:
        with deinfer_jax.load(config, max_context=32) as llm:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            llm.logits([5])

    def test_context_manager_closes_after_an_error(self, config) -> None:
        with pytest.raises(KeyError), deinfer_jax.load(config, max_context=32) as llm:
            raise KeyError
        assert llm.runner.pools[0].is_deleted()


def test_loading_says_what_it_did(config, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deinfer_jax"):
        deinfer_jax.load(config, max_batch=2, max_context=32).close()
    assert "random weights" in caplog.text and "4 pages of 16 tokens" in caplog.text
