"""What ``generate`` gives: tokens, ends, completions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, Completion
from deinfer_jax.engine.request import Request
from tests.engine.helpers import (
    FILTERED,
    GREEDY,
    LENGTHS,
    SAMPLED,
    SETTINGS,
    Ending,
    check_idle,
    prompts,
    run,
    tokens,
)


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


class TestThreads:
    """Calls from several threads take turns."""

    THREADS = 6

    def in_threads(self, work: Callable[[int], Any]) -> list[Any]:
        """Results of ``work(i)``, begun at the same time."""
        start = threading.Barrier(self.THREADS)

        def one(index: int) -> Any:
            start.wait()
            return work(index)

        with ThreadPoolExecutor(self.THREADS) as pool:
            return [job.result() for job in [pool.submit(one, i) for i in range(self.THREADS)]]

    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_generate(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch, in_flight: int
    ) -> None:
        monkeypatch.setattr(llm.core, "ahead", in_flight)
        settings = [GREEDY, SAMPLED, FILTERED]

        def work(index: int) -> list[list[tuple[int, ...]]]:
            setting = settings[index % 3]
            return [run(llm, prompts()[index:], **setting) for _ in range(3)]

        for index, found in enumerate(self.in_threads(work)):
            assert found == [together[str(settings[index % 3])][index:]] * 3

    def test_generate_beside_logits(self, llm: LLM, together) -> None:
        expected = llm.logits(prompts()[9])

        def work(index: int) -> Any:
            if index % 2:
                return run(llm, prompts(), **SAMPLED)
            return [llm.logits(prompts()[9]) for _ in range(5)]

        for index, found in enumerate(self.in_threads(work)):
            if index % 2:
                assert found == together[str(SAMPLED)]
            else:
                for logits in found:
                    np.testing.assert_array_equal(logits, expected)

    def test_an_error_in_one_leaves_the_others_alone(
        self, llm: LLM, together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = llm.core._take

        def interrupt(request: Request, *rest: Any) -> None:
            if list(request.prompt) == [7, 7, 7] and len(request.generated) == 3:
                raise KeyError("planted")
            take(request, *rest)

        monkeypatch.setattr(llm.core, "_take", interrupt)

        def work(index: int) -> Any:
            if index % 2:
                return run(llm, prompts(), **GREEDY)
            *others, planted = deinfer_jax.generate(
                llm, [*prompts(), [7, 7, 7]], max_new_tokens=12, ignore_eos=True
            )
            assert (planted.finish_reason, planted.error) == ("error", "KeyError: 'planted'")
            assert len(planted.token_ids) == 3
            return tokens(others)

        for found in self.in_threads(work):
            assert found == together[str(GREEDY)]


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
        llm.core.ahead = 0
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

    def test_one_token_has_no_time_between_tokens(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, [5, 6], max_new_tokens=1)
        assert done.timing.ttft_s is not None and done.timing.itl_s is None

    def test_queueing_counts(self, llm: LLM) -> None:
        done = deinfer_jax.generate(llm, [[5 + i] for i in range(9)], max_new_tokens=5)
        assert done[8].timing.ttft_s > done[0].timing.ttft_s  # pyright: ignore[reportOperatorIssue]
