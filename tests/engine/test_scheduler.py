"""The scheduler alone, on a model device: order, budget, slots, ends. How it gives pages out is in
``test_scheduler_pages.py``."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from deinfer_jax.engine.request import Request, Sampling, prompt_hash
from deinfer_jax.engine.scheduler import Scheduler
from tests.engine.model_device import (
    Simulation,
    chunks,
    crowded,
    decoded,
    numbered,
    steps_until,
    unlike,
)


class TestPrompts:
    def test_short_prompt_in_one_step(self) -> None:
        s = Simulation()
        s.submit(unlike(5, 0), 4)
        assert chunks(s.step()) == [(0, 5, True)]

    def test_long_prompt_in_chunks(self) -> None:
        s = Simulation(prefill_chunk=16)
        s.submit(unlike(35, 0), 4)
        assert [chunks(s.step()) for _ in range(3)] == [
            [(0, 16, False)],
            [(16, 16, False)],
            [(32, 3, True)],
        ]

    def test_prompt_of_exactly_two_chunks(self) -> None:
        s = Simulation(prefill_chunk=16)
        s.submit(unlike(32, 0), 4)
        assert [chunks(s.step()) for _ in range(2)] == [[(0, 16, False)], [(16, 16, True)]]

    def test_several_prompts_in_one_step(self) -> None:
        s = Simulation(prefill_chunk=16)
        for which in range(3):
            s.submit(unlike(5, which), 4)
        assert chunks(s.step()) == [(0, 5, True)] * 3

    def test_what_one_prompt_leaves_of_the_budget_is_the_next_ones(self) -> None:
        s = Simulation(prefill_chunk=16)
        first, second = s.submit(unlike(20, 0), 4), s.submit(unlike(20, 1), 4)
        steps = [s.step() for _ in range(3)]
        assert [chunks(step, first) for step in steps] == [[(0, 16, False)], [(16, 4, True)], []]
        # Of the third step's budget, decoding the first one takes a token.
        assert [chunks(step, second) for step in steps] == [[], [(0, 12, False)], [(12, 8, True)]]

    def test_in_order_of_arrival(self) -> None:
        s = Simulation(prefill_chunk=16)
        requests = [s.submit(unlike(length, which), 2) for which, length in enumerate((20, 3, 9))]
        begun = [
            prefill.request for _ in range(3) if (step := s.step()) for prefill in step.prefills
        ]
        assert begun == [requests[0], *requests]

    def test_the_context_of_every_chunk_is_in_the_cache(self) -> None:
        s = Simulation(pages=40, page_size=3, prefill_chunk=5)
        for seed in range(4):
            s.submit(numbered(23, seed=seed), 3)
        s.run()

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
    def test_a_prompt_of_any_number_of_pages(self, length: int) -> None:
        s = Simulation(page_size=4)
        s.submit(unlike(length, 0), 9)
        s.run()


class TestBudget:
    def test_decode_takes_its_tokens_from_it(self) -> None:
        s = Simulation(pages=40, prefill_chunk=16, decode_steps=2)
        for which in range(3):
            s.submit(unlike(2, which), 20)
        s.step()
        s.submit(unlike(40, 3), 4)
        step = s.step()
        assert len(decoded(step)) == 3 and chunks(step) == [(0, 16 - 3 * 2, False)]

    def test_a_quarter_is_the_prompts_in_any_case(self) -> None:
        s = Simulation(pages=60, max_batch=5, prefill_chunk=16, decode_steps=4)
        for which in range(4):
            s.submit(unlike(2, which), 20)
        s.step()
        s.submit(unlike(40, 4), 4)
        step = s.step()
        assert len(decoded(step)) == 4 and chunks(step) == [(0, 4, False)]

    @pytest.mark.parametrize("prefill_chunk", [1, 3])
    def test_one_token_at_least(self, prefill_chunk: int) -> None:
        s = Simulation(prefill_chunk=prefill_chunk, decode_steps=4)
        first = s.submit(unlike(1, 0), 20)
        steps_until(s, first, tokens=1)
        s.submit(unlike(5, 1), 4)
        step = s.step()
        assert decoded(step) == [first] and chunks(step) == [(0, 1, False)]

    def test_requests_decode_while_a_prompt_is_run(self) -> None:
        s = Simulation(prefill_chunk=8)
        first = s.submit(unlike(4, 0), 20)
        s.step()
        second = s.submit(unlike(30, 1), 4)
        while not second.decoding:
            step = s.step()
            assert decoded(step) == [first] and chunks(step, second)
        assert len(first.generated) > 4

    def test_a_prompt_decodes_in_the_step_after_its_last_chunk(self) -> None:
        s = Simulation()
        request = s.submit(unlike(5, 0), 4)
        assert [decoded(s.step()) for _ in range(2)] == [[], [request]]


class TestAdmission:
    def test_nothing_to_do(self) -> None:
        assert Simulation().step() is None

    def test_no_more_than_the_slots(self) -> None:
        s = Simulation(max_batch=2)
        requests = [s.submit(unlike(2, which), 4) for which in range(3)]
        s.step()
        assert s.scheduler.running == requests[:2]
        assert list(s.scheduler.waiting) == requests[2:]

    def test_a_slot_is_used_again(self) -> None:
        s = Simulation(max_batch=2)
        first, _, third = (s.submit(unlike(2, which), 9) for which in range(3))
        s.step()
        slot = first.slot
        s.cancel(first)
        s.step()
        assert third.slot == slot

    @pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2)])
    def test_takes_pages_for_the_prompt_only(self, prompt: int, pages: int) -> None:
        s = Simulation(page_size=4)
        request = s.submit(unlike(prompt, 0), 30)
        s.step()
        assert len(request.pages) == pages

    @pytest.mark.parametrize(("free", "admitted"), [(3, True), (2, False)])
    def test_leaves_a_page_to_everybody_who_runs(self, free: int, admitted: bool) -> None:
        s = Simulation(pages=2 + free, page_size=4, prefill_chunk=64)
        s.submit(unlike(4, 0), 4)
        s.submit(unlike(4, 1), 4)
        s.scheduler.schedule()
        late = s.submit(unlike(4, 2), 4)
        s.scheduler._admit()
        assert (late.slot >= 0) == admitted

    def test_nobody_overtakes(self) -> None:
        s = Simulation(pages=8, page_size=4)
        first = s.submit(unlike(16, 0), 8)
        large, small = s.submit(unlike(20, 1), 2), s.submit(unlike(1, 2), 1)
        s.step()
        assert s.scheduler.running == [first]
        assert list(s.scheduler.waiting) == [large, small]
        s.run()

    def test_a_request_that_fits_no_cache(self) -> None:
        s = Simulation(pages=3, page_size=4)
        with pytest.raises(ValueError, match="needs 4 pages of 4 tokens, the cache has 3"):
            s.submit(unlike(8, 0), 6)

    def test_a_request_that_just_fits(self) -> None:
        s = Simulation(pages=3, page_size=4)
        s.submit(unlike(8, 0), 5)
        s.run()


class TestDecode:
    def test_all_ready_requests_together(self) -> None:
        s = Simulation()
        requests = [s.submit(unlike(2, 0), 4), s.submit(unlike(9, 1), 4)]
        s.step()
        step = s.step()
        assert decoded(step) == requests
        assert step is not None and step.decode is not None and step.decode.contexts == (3, 10)

    def test_context_is_that_of_the_longest(self) -> None:
        s = Simulation(decode_steps=4, prefill_chunk=64)
        s.submit(unlike(5, 0), 9)
        s.submit(unlike(30, 1), 3)
        s.step()
        step = s.step()
        # 30 + 2 tokens (its limit) and 5 + 4
        assert step is not None and step.decode is not None
        assert step.decode.contexts == (9, 32) and step.decode.context == 32

    @pytest.mark.parametrize(
        ("new", "contexts"), [(2, [6]), (4, [8]), (5, [9]), (6, [9, 10]), (10, [9, 13, 14])]
    )
    def test_one_dispatch_where_fewer_tokens_are_left(self, new: int, contexts: list[int]) -> None:
        s = Simulation(decode_steps=4, ahead=1)
        s.submit(unlike(5, 0), new)
        s.step()
        found = [step.decode.context for _ in contexts if (step := s.step()) and step.decode]
        assert found == contexts
        assert s.step() is None

    def test_a_request_of_one_token_needs_no_decoding(self) -> None:
        s = Simulation(ahead=1)
        s.submit(unlike(5, 0), 1)
        s.step()
        assert s.step() is None

    def test_a_request_at_its_limit_is_left_out(self) -> None:
        s = Simulation(ahead=1)
        first, second = s.submit(unlike(5, 0), 2), s.submit(unlike(6, 1), 5)
        assert [decoded(s.step()) for _ in range(3)] == [[], [first, second], [second]]

    def test_pages_are_added_as_tokens_come(self) -> None:
        s = Simulation(page_size=4)
        request = s.submit(unlike(3, 0), 9)
        counts = []
        while s.unfinished:
            s.step()
            counts.append(len(request.pages))
        # Tokens in the cache: 3 (the prompt), 4, 5, … 10; the last one drawn is never run.
        assert counts == [1, 1, 2, 2, 2, 2, 3, 3, 0]

    def test_a_step_of_more_tokens_than_a_page(self) -> None:
        s = Simulation(page_size=2, decode_steps=7, ahead=1)
        s.submit(unlike(3, 0), 25)
        s.run()


class TestStaticBatching:
    def test_the_next_batch_comes_when_this_one_has_ended(self) -> None:
        s = Simulation(max_batch=2, continuous=False)
        first, second, third = (s.submit(unlike(2, which), 2 + which) for which in range(3))
        seen = []
        while s.unfinished:
            s.step()
            seen.append(list(s.scheduler.running))
        # First is done after two steps, and its slot stays empty until second is.
        assert seen == [[first, second], [second], [], [third], [third], [third], []]

    def test_prompts_of_many_chunks(self) -> None:
        s = Simulation(max_batch=3, continuous=False, prefill_chunk=4)
        for which in range(6):
            s.submit(unlike(6, which), 5)
        s.run()

    def test_equal_prompts_are_one_batch(self) -> None:
        s = Simulation(max_batch=4, continuous=False, prefill_chunk=64)
        for seed in range(4):
            s.submit(numbered(10), 4, seed=seed)
        most = 0
        while s.unfinished:
            most = max(most, len(decoded(s.step())))
        assert most == 4

    def test_who_was_preempted_waits_for_the_next_batch(self) -> None:
        s = Simulation(pages=5, page_size=4, continuous=False, prefill_chunk=64)
        first, second = s.submit(unlike(4, 0), 16), s.submit(unlike(4, 1), 12)
        while s.scheduler.preemptions == 0:
            s.step()
        while first.slot >= 0:
            s.step()
            assert second.slot < 0
        s.run()

    def test_can_be_changed_between_steps(self) -> None:
        s = Simulation(max_batch=4, continuous=False)
        s.submit(unlike(2, 0), 9)
        s.step()
        late = s.submit(unlike(2, 1), 9)
        s.step()
        assert late.slot < 0
        s.scheduler.continuous = True
        s.step()
        assert late.slot >= 0
        s.run()


class TestRemoval:
    def test_waiting(self) -> None:
        s = Simulation(max_batch=1)
        first, second, third = (s.submit(unlike(2, which), 4) for which in range(3))
        s.step()
        s.cancel(second)
        assert s.scheduler.running == [first] and list(s.scheduler.waiting) == [third]
        s.run()
        assert not second.generated

    def test_before_the_first_step(self) -> None:
        s = Simulation()
        s.cancel(s.submit(unlike(2, 0), 4))
        assert s.step() is None

    def test_within_its_prompt(self) -> None:
        s = Simulation(prefill_chunk=4)
        request = s.submit(unlike(20, 0), 4)
        s.step()
        s.cancel(request)
        s.run()

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_decoding(self, ahead: int) -> None:
        s = Simulation(ahead=ahead)
        request, other = s.submit(unlike(5, 0), 20), s.submit(unlike(5, 1), 20)
        steps_until(s, request, tokens=3)
        s.cancel(request)
        assert len(request.generated) == 3
        s.run()
        assert len(other.generated) == 20

    def test_preempted(self) -> None:
        s = crowded(pages=6)
        *_, last = (s.submit(unlike(4, which), 12) for which in range(3))
        while s.scheduler.preemptions == 0:
            s.step()
        s.cancel(last)
        s.run()
        assert last.generated

    def test_before_its_page_is_copied(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=4, decode_steps=1)
        s.submit(unlike(6, 0), 20)
        s.step()
        s.step()
        s.submit(unlike(30, 1), 2)
        late = s.submit(unlike(6, 0), 4, seed=1)  # admitted, but the budget is the other one's
        s.step()
        assert late.copied_page is not None and late.held_pages[-1] == late.copied_page
        s.cancel(late)
        s.run()

    def test_the_owner_of_shared_pages(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        first = s.submit(numbered(11), 20)
        s.step()
        s.submit(numbered(11), 20, seed=1)
        s.step()
        s.cancel(first)
        s.submit(unlike(30, 0), 2)  # takes whatever is free
        s.run()

    def test_the_owner_of_a_page_that_is_to_be_copied(self) -> None:
        s = Simulation(pages=14, page_size=4, prefill_chunk=4)
        first = s.submit(unlike(6, 0), 20)
        s.step()
        s.step()
        s.submit(unlike(30, 1), 2)
        late = s.submit(unlike(6, 0), 4, seed=1)
        s.step()
        s.cancel(first)
        s.submit(unlike(4, 2), 1)
        s.run()
        assert s.counts.copies == 1 and len(late.generated) == 4

    def test_frees_everything(self) -> None:
        s = Simulation()
        requests = [s.submit(unlike(9, which), 9) for which in range(6)]
        s.step()
        for request in requests:
            s.cancel(request)
            assert (request.slot, request.pages, request.copied_page) == (-1, [], None)
        assert s.scheduler.allocator.num_free == 20
        assert s.step() is None

    def test_of_a_stranger(self) -> None:
        with pytest.raises(ValueError):
            Simulation().scheduler.remove(Request([1], Sampling(max_new_tokens=1)))


class TestRestart:
    def test_goes_on_from_the_tokens_that_were_read(self) -> None:
        s = Simulation(prefill_chunk=64, ahead=1)
        request = s.submit(unlike(5, 0), 9)
        steps_until(s, request, tokens=3)
        s.restart()
        assert len(request.generated) == 3 and not request.in_flight
        assert chunks(s.step(), request) == [(0, 8, True)]
        s.run()

    def test_keeps_the_order(self) -> None:
        s = Simulation(max_batch=2, prefill_chunk=4)
        requests = [s.submit(unlike(6, which), 4) for which in range(4)]
        s.step()
        s.restart()
        assert not s.scheduler.running and list(s.scheduler.waiting) == requests
        s.run()

    def test_frees_everything(self) -> None:
        s = Simulation(prefill_chunk=64)
        for seed in range(3):
            s.submit(numbered(9), 4, seed=seed)
            s.step()
        s.unfinished.clear()
        s.restart()
        assert s.scheduler.allocator.num_free == 20
        assert s.scheduler.schedule() is None

    def test_after_a_step_that_was_not_dispatched(self) -> None:
        s = Simulation(prefill_chunk=64)
        request = s.submit(unlike(5, 0), 4)
        s.step(dispatch=False)
        assert chunks(s.step(), request) == [(0, 5, True)]
        s.run()


class TestIntegrity:
    """The check fails when something is broken."""

    @pytest.fixture
    def scheduler(self) -> Scheduler:
        """Two requests that run and share two pages, one within its prompt, one that waits."""
        s = Simulation(pages=40, page_size=4, max_batch=3, prefill_chunk=16)
        s.submit(unlike(11, 0), 8)
        s.step()
        s.submit(unlike(11, 0), 8, seed=1)
        s.submit(unlike(40, 1), 8)
        s.submit(unlike(2, 2), 8)
        s.step()
        assert len(s.scheduler.running) == 3 and len(s.scheduler.waiting) == 1
        s.scheduler.check_integrity()
        return s.scheduler

    def test_a_lost_page(self, scheduler: Scheduler) -> None:
        scheduler.running[0].pages.pop()
        with pytest.raises(AssertionError, match="page 2: 1 references, but 0 holders"):
            scheduler.check_integrity()

    def test_a_lost_reference_to_a_shared_page(self, scheduler: Scheduler) -> None:
        scheduler.allocator.release([0])
        with pytest.raises(AssertionError, match="page 0: 1 references, but 2 holders"):
            scheduler.check_integrity()

    def test_a_page_that_is_held_and_free(self, scheduler: Scheduler) -> None:
        scheduler.allocator.release([scheduler.running[2].pages[-1]])
        with pytest.raises(AssertionError, match="0 references, but 1 holders"):
            scheduler.check_integrity()

    def test_a_page_to_copy_without_a_reference(self, scheduler: Scheduler) -> None:
        scheduler.running[2].copied_page = 0
        with pytest.raises(AssertionError, match="page 0: 2 references, but 3 holders"):
            scheduler.check_integrity()

    def test_a_slot_held_twice(self, scheduler: Scheduler) -> None:
        scheduler.running[1].slot = scheduler.running[0].slot
        with pytest.raises(AssertionError, match="slots in use and free"):
            scheduler.check_integrity()

    def test_a_lost_slot(self) -> None:
        s = Simulation(max_batch=4).scheduler
        s._free_slots.remove(3)
        with pytest.raises(AssertionError, match="slots"):
            s.check_integrity()

    def test_a_request_without_pages_for_its_prompt(self, scheduler: Scheduler) -> None:
        request = scheduler.running[2]
        scheduler.allocator.release([request.pages.pop()])
        with pytest.raises(AssertionError, match="9 pages, at most 12"):
            scheduler.check_integrity()

    def test_a_request_with_more_pages_than_it_can_need(self, scheduler: Scheduler) -> None:
        scheduler.running[0].pages += scheduler.allocator.allocate(3)
        with pytest.raises(AssertionError, match="pages, at most 5"):
            scheduler.check_integrity()

    def test_one_who_waits_with_pages(self, scheduler: Scheduler) -> None:
        scheduler.waiting[0].pages = [39]
        with pytest.raises(AssertionError, match="a request waits with pages or a slot"):
            scheduler.check_integrity()

    def test_a_request_in_two_places(self, scheduler: Scheduler) -> None:
        scheduler.waiting.append(scheduler.waiting[0])
        with pytest.raises(AssertionError, match="a request is in two places"):
            scheduler.check_integrity()

    def test_a_page_that_nobody_will_fill(self, scheduler: Scheduler) -> None:
        scheduler._coming[b"never"] += 1
        with pytest.raises(AssertionError, match="coming"):
            scheduler.check_integrity()

    def test_a_free_page_that_is_out_of_every_list(self, scheduler: Scheduler) -> None:
        scheduler.allocator._empty[39] = False
        with pytest.raises(AssertionError, match="empty pages"):
            scheduler.check_integrity()


class TestRequest:
    def test_hash_is_blake2b_of_little_endian_ids(self) -> None:
        expected = hashlib.blake2b(b"\x01\x00\x00\x00\x02\x01\x00\x00", digest_size=8).digest()
        assert prompt_hash([1, 258]) == expected

    def test_key_words(self) -> None:
        seed = (7 << 32) + 9
        r = Request([1, 258], Sampling(max_new_tokens=1, seed=seed, sample_index=3))
        digest = int.from_bytes(prompt_hash([1, 258]), "little")
        assert r.key_words.dtype == np.uint32
        assert r.key_words.tolist() == [7, 9, digest >> 32, digest & 0xFFFFFFFF, 3]

    def test_requests_compare_by_identity(self) -> None:
        first, second = (Request([1], Sampling(max_new_tokens=1)) for _ in range(2))
        assert first != second

    @pytest.mark.parametrize(("prompt", "new", "length"), [(1, 1, 1), (16, 2, 17), (5, 4, 8)])
    def test_the_last_token_drawn_needs_no_place(self, prompt: int, new: int, length: int) -> None:
        assert Request([0] * prompt, Sampling(max_new_tokens=new)).max_length == length
