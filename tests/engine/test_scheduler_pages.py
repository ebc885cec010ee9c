"""How the scheduler gives out pages, on a model device: preemption, sharing, what is kept."""

from __future__ import annotations

import pytest

from tests.engine.model_device import (
    Simulation,
    chunks,
    crowded,
    decoded,
    numbered,
    steps_until,
    unlike,
)


class TestPreemption:
    def test_the_last_one_gives_its_pages_up(self) -> None:
        s = crowded(pages=6)
        first, second, third = (s.submit(unlike(4, which), 12) for which in range(3))
        s.step()
        while s.scheduler.preemptions == 0:
            s.step()
        assert s.scheduler.running == [first, second]
        assert list(s.scheduler.waiting) == [third]
        assert not third.pages and third.slot == -1
        s.run()

    def test_stands_before_those_who_have_not_run(self) -> None:
        s = crowded(pages=6)
        _, _, third, late = (s.submit(unlike(4, which), 12) for which in range(4))
        s.step()
        while s.scheduler.preemptions == 0:
            s.step()
        assert list(s.scheduler.waiting) == [third, late]

    def test_several_may_be_needed(self) -> None:
        s = crowded(pages=5, decode_steps=16)
        first, *others = (s.submit(unlike(4, which), 17) for which in range(3))
        s.step()
        assert s.scheduler.running == [first, *others]
        # The first takes four pages, one page each is what the others have.
        assert decoded(s.step()) == [first] and s.scheduler.preemptions == 2
        assert list(s.scheduler.waiting) == others
        s.run()

    def test_it_goes_on_from_its_tokens(self) -> None:
        s = crowded(pages=6, share=False)
        *_, last = (s.submit(unlike(4, which), 12) for which in range(3))
        while s.scheduler.preemptions == 0:
            s.step()
        kept = list(last.generated)
        assert kept and last.tokens == [*last.prompt, *kept]
        while last.slot < 0:
            step = s.step()
        assert chunks(step, last) == [(0, 4 + len(kept), True)]
        assert last.generated[: len(kept)] == kept
        s.run()

    def test_it_finds_its_own_pages_again(self) -> None:
        s = crowded(pages=8)
        s.submit(unlike(4, 0), 9)
        last = s.submit(unlike(16, 1), 12)
        steps_until(s, last, tokens=3)
        s.scheduler._preempt(last)  # though nobody needs a page, so none of its pages is lost
        assert chunks(s.step(), last) == [(16, 3, True)]
        s.run()

    def test_never_with_tokens_in_flight(self) -> None:
        s = crowded(pages=4, ahead=1)
        first, second = s.submit(unlike(4, 0), 13), s.submit(unlike(4, 1), 13)
        blocked = 0
        for _ in range(8):
            in_flight = second.in_flight
            step = s.step()
            if in_flight and second.slot >= 0 and not decoded(step):
                blocked += 1
                assert second.dispatched == len(second.generated)  # now they are read
        assert blocked == 1 and s.scheduler.preemptions == 1
        assert s.scheduler.running == [first]
        s.run()

    def test_those_before_the_one_in_need_go_on(self) -> None:
        s = crowded(pages=6, ahead=1)
        first, second, third = (
            s.submit(unlike(length, which), 12) for which, length in enumerate((2, 4, 4))
        )
        found = [decoded(s.step()) for _ in range(7)]
        # In the sixth step the second has 8 tokens, and there is no page for the ninth.
        assert found[1:5] == [[first, second, third]] * 4
        assert found[5:] == [[first], [first, second]]
        assert s.scheduler.preemptions == 1
        s.run()

    def test_a_prompt_that_is_not_through_may_be_preempted(self) -> None:
        s = Simulation(pages=8, page_size=4, prefill_chunk=2, share=False)
        first = s.submit(unlike(4, 0), 17)
        steps_until(s, first, tokens=1)
        long = s.submit(unlike(20, 1), 2)
        while s.scheduler.preemptions == 0:
            s.step()
            assert long.slot < 0 or 0 < long.prefilled < 20
        assert s.scheduler.running == [first] and not long.generated
        s.run()

    def test_who_lost_its_pages_does_not_take_them_back_at_once(self) -> None:
        s = Simulation(pages=8, page_size=1, decode_steps=4)
        first, second = s.submit([0], 8), s.submit([1], 8)
        s.step()
        # The first takes four pages of six. The second wants four too and gives its one up; then
        # there would be room for its two tokens, and a page for the first.
        assert decoded(s.step()) == [first] and s.scheduler.preemptions == 1
        assert s.scheduler.allocator.num_free == 3 and second.slot < 0
        s.run()

    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("decode_steps", [1, 4])
    def test_no_thrashing(self, ahead: int, decode_steps: int) -> None:
        """Six requests, which take a page every four tokens until each has 16 of 24 pages."""
        s = crowded(pages=24, ahead=ahead, decode_steps=decode_steps)
        for which in range(6):
            s.submit(unlike(4, which), 61)
        s.run()
        assert 0 < s.scheduler.preemptions <= 2 * 6
        # Whoever comes back finds some of its pages: the last ones have gone.
        assert s.counts.shared > s.counts.prefilled / 2

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_no_thrashing_without_sharing(self, ahead: int) -> None:
        s = crowded(pages=24, ahead=ahead, share=False)
        for which in range(6):
            s.submit(unlike(4, which), 61)
        s.run()
        assert 0 < s.scheduler.preemptions <= 2 * 6

    def test_the_first_one_is_as_fast_as_alone(self) -> None:
        alone = crowded(pages=16)
        alone.submit(unlike(4, 0), 60)
        alone.run()
        s = crowded(pages=16)
        first = s.submit(unlike(4, 0), 60)
        for which in range(1, 6):
            s.submit(unlike(4, which), 60)
        steps_until(s, first, tokens=60)
        assert s.counts.steps == alone.counts.steps and s.counts.preempted

    def test_all_want_every_page(self) -> None:
        s = crowded(pages=5, decode_steps=3, ahead=1)
        for which in range(5):
            s.submit(unlike(1 + which, which), 20 - which)
        s.run()
        assert s.counts.preempted


class TestMakeRoom:
    def test_takes_free_pages_first(self) -> None:
        s = crowded(pages=6)
        request = s.submit(unlike(5, 0), 4)
        s.step()
        s.borrow(4)
        assert s.scheduler.running == [request]
        s.run()

    @pytest.mark.parametrize(("count", "left"), [(3, 1), (5, 0), (6, 0)])
    def test_the_last_ones_give_theirs_up(self, count: int, left: int) -> None:
        s = crowded(pages=6)
        requests = [s.submit(unlike(5, which), 8) for which in range(3)]
        s.step()
        assert s.scheduler.running == requests[:2]
        s.borrow(count)
        assert s.scheduler.running == requests[:left]
        assert list(s.scheduler.waiting) == requests[left:]
        s.run()

    def test_what_was_there_is_not_found_again(self) -> None:
        s = crowded(pages=6)
        request = s.submit(unlike(20, 0), 4)
        steps_until(s, request, tokens=2)
        s.borrow(6)
        assert chunks(s.step(), request) == [(0, 22, True)]
        s.run()

    def test_pages_that_are_not_needed_are_found_again(self) -> None:
        s = crowded(pages=8)
        request = s.submit(unlike(16, 0), 4)
        steps_until(s, request, tokens=2)
        s.borrow(5)  # of five pages in use, the last is given up
        assert chunks(s.step(), request)[0][0] in (8, 12)
        s.run()


class TestSharing:
    def test_full_pages_and_a_copy_of_the_rest(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        prompt = numbered(11)
        first = s.submit(prompt, 8)
        s.step()
        second = s.submit(prompt, 8, seed=1)
        step = s.step()
        assert second.pages[:2] == first.pages[:2]
        assert second.pages[2] != first.pages[2]
        assert chunks(step, second) == [(10, 1, True)]
        assert step is not None and step.prefills[0].copy == (first.pages[2], second.pages[2])
        s.run()

    @pytest.mark.parametrize(("length", "start", "copies"), [(8, 7, 1), (9, 8, 0), (10, 9, 1)])
    def test_equal_prompts_around_a_page(self, length: int, start: int, copies: int) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        s.submit(numbered(length), 8)
        s.step()
        second = s.submit(numbered(length), 8, seed=1)
        assert chunks(s.step(), second) == [(start, length - start, True)]
        assert s.counts.copies == copies
        s.run()

    @pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 30])
    @pytest.mark.parametrize("count", [2, 4, 9])
    def test_equal_prompts_run_once(self, length: int, count: int) -> None:
        s = Simulation(pages=60, page_size=4, max_batch=4, prefill_chunk=7)
        for seed in range(count):
            s.submit(numbered(length), 3, seed=seed)
        s.run()
        # Everybody runs the last token, or there would be nothing to draw from.
        assert s.counts.prefilled == length + count - 1

    def test_equal_prompts_decode_together(self) -> None:
        s = Simulation(pages=60, page_size=4, max_batch=4, prefill_chunk=64)
        requests = [s.submit(numbered(10), 5, seed=seed) for seed in range(4)]
        steps = [s.step() for _ in range(3)]
        assert decoded(steps[-1]) == requests

    def test_a_common_beginning(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        stem = numbered(10)
        first = s.submit([*stem, 0, 1], 4)
        s.step()
        second = s.submit([*stem, 1, 1, 1], 4)
        assert chunks(s.step(), second) == [(8, 5, True)]
        assert second.pages[:2] == first.pages[:2]
        s.run()

    def test_a_difference_in_the_first_token_shares_nothing(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        s.submit(unlike(12, 0), 4)
        s.step()
        second = s.submit(unlike(12, 1), 4)
        assert chunks(s.step(), second) == [(0, 12, True)]

    def test_the_same_page_behind_another_one_is_not_shared(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        first = s.submit([*unlike(4, 0), 1, 2, 3, 4, 0], 4)
        s.step()
        second = s.submit([*unlike(4, 1), 1, 2, 3, 4, 0], 4)
        s.step()
        assert not set(first.pages) & set(second.pages)
        s.run()

    def test_the_copied_page_goes_on_being_written_by_its_owner(self) -> None:
        s = Simulation(page_size=8, prefill_chunk=64, decode_steps=2, ahead=1)
        s.submit(numbered(4), 16)
        s.step()
        s.step()
        s.submit(numbered(4), 16, seed=1)
        s.run()
        assert s.counts.copies == 1

    def test_prompt_and_answer_are_found_by_the_next_turn(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        first = s.submit(numbered(6), 12)
        s.run()
        # 6 + 11 tokens were run.
        second = s.submit([*first.tokens, 0, 1], 4)
        assert chunks(s.step(), second) == [(16, 4, True)]
        s.run()

    def test_what_is_generated_is_shared_while_its_owner_runs(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        first = s.submit(numbered(6), 30)
        steps_until(s, first, tokens=8)  # 6 + 7 tokens are in the cache
        second = s.submit([*first.tokens[:13], 0], 4)
        s.step()
        assert second.pages[:3] == first.pages[:3]
        s.run()

    def test_tokens_that_are_not_read_are_not_shared(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64, ahead=1)
        first = s.submit(numbered(6), 30)
        while s.unfinished:
            s.step()
            # The last token read has not been run, or not surely: it is in no page yet.
            assert first.slot < 0 or first.known_pages == max(6, len(first.tokens) - 1) // 4

    def test_off(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64, share=False)
        for seed in range(3):
            s.submit(numbered(10), 3, seed=seed)
        s.run()
        assert (s.counts.prefilled, s.counts.copies) == (30, 0)

    def test_pages_count_once(self) -> None:
        s = Simulation(pages=20, page_size=4, prefill_chunk=64)
        for seed in range(4):
            s.submit(numbered(17), 3, seed=seed)
        s.step()
        s.step()
        assert s.scheduler.allocator.num_free == 20 - (4 + 4 * 1)
        s.run()


class TestOnItsWay:
    def test_waits_for_a_page_that_another_will_fill(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=4)
        first, second = s.submit(numbered(14), 4), s.submit(numbered(14), 4, seed=1)
        while not first.decoding:
            s.step()
            assert s.scheduler.running == [first] and list(s.scheduler.waiting) == [second]
        assert chunks(s.step(), second) == [(13, 1, True)]
        s.run()

    def test_as_long_as_the_beginnings_are_equal_and_no_longer(self) -> None:
        s = Simulation(pages=40, page_size=4, prefill_chunk=4)
        stem = numbered(8)
        first = s.submit([*stem, *[0] * 24], 4)
        second = s.submit([*stem, *[1] * 6], 4)
        found = []
        while second.slot < 0:
            s.step()
            found.append(first.prefilled)
        assert found == [4, 8, 12]
        assert second.pages[:2] == first.pages[:2]
        s.run()

    def test_nobody_overtakes_who_waits(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=4)
        first, second = s.submit(unlike(14, 0), 4), s.submit(unlike(14, 0), 4, seed=1)
        other = s.submit(unlike(2, 1), 4)
        s.step()
        assert s.scheduler.running == [first]
        assert list(s.scheduler.waiting) == [second, other]
        s.run()

    def test_other_prompts_do_not_wait(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=4)
        first, second = s.submit(unlike(14, 0), 4), s.submit(unlike(14, 1), 4)
        s.step()
        assert s.scheduler.running == [first, second]

    @pytest.mark.parametrize("how", ["cancelled", "preempted", "restarted"])
    def test_not_for_ever(self, how: str) -> None:
        s = Simulation(page_size=4, prefill_chunk=4)
        first, second = s.submit(numbered(14), 4), s.submit(numbered(14), 4, seed=1)
        s.step()
        s.step()
        if how == "cancelled":
            s.cancel(first)
        elif how == "preempted":
            s.scheduler._preempt(first)
        else:
            s.restart()
        s.check()
        step = s.step()
        if how == "cancelled":  # two pages were run, and are found
            assert chunks(step, second) == [(8, 4, False)]
        s.run()


class TestKeptPages:
    def test_found_after_the_owner_has_ended(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        s.submit(numbered(11), 4)
        s.run()
        s.submit(numbered(11), 4, seed=1)
        assert chunks(s.step()) == [(10, 1, True)] and s.counts.copies == 1
        s.run()

    def test_found_after_the_owner_was_cancelled_within_its_prompt(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=8)
        first = s.submit(numbered(20), 4)
        s.step()
        s.cancel(first)
        second = s.submit(numbered(20), 4)
        assert chunks(s.step(), second) == [(8, 8, False)]
        s.run()

    def test_a_page_that_was_not_dispatched_is_not_found(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=6)
        first = s.submit(numbered(20), 4)
        s.step()  # six tokens: one page, and half of the next
        s.cancel(first)
        second = s.submit(numbered(20), 4)
        assert chunks(s.step(), second) == [(4, 6, False)]
        s.run()

    def test_others_are_handed_out_first(self) -> None:
        s = Simulation(pages=10, page_size=4, prefill_chunk=64)
        s.submit(unlike(8, 0), 1)
        s.run()
        s.submit(unlike(20, 1), 1)  # five pages of eight that hold nothing
        s.run()
        again = s.submit(unlike(8, 0), 1, seed=1)
        s.step()
        assert s.counts.shared == 7
        assert again.generated

    def test_the_longest_unused_goes_first(self) -> None:
        s = Simulation(pages=6, page_size=4, prefill_chunk=64)
        for which in range(3):
            s.submit(unlike(8, which), 1)
            s.run()
        s.submit(unlike(8, 0), 1, seed=1)  # used again, so now 1 is the longest unused
        s.run()
        s.submit(unlike(4, 3), 1)
        s.run()
        shared = []
        for which in (0, 2, 1):
            before = s.counts.shared
            s.submit(unlike(8, which), 1, seed=2)
            s.run()
            shared.append(s.counts.shared - before)
        assert shared[:2] == [7, 7] and shared[2] < 7

    def test_the_end_of_a_sequence_goes_before_its_beginning(self) -> None:
        s = Simulation(pages=6, page_size=4, prefill_chunk=64)
        s.submit(unlike(24, 0), 1)
        s.run()
        s.submit(unlike(8, 1), 1)
        s.run()
        again = s.submit(unlike(24, 0), 1, seed=1)
        assert chunks(s.step(), again) == [(16, 8, True)]
        s.run()

    def test_a_page_handed_out_is_not_found(self) -> None:
        s = Simulation(pages=3, page_size=4, prefill_chunk=64)
        s.submit(unlike(12, 0), 1)
        s.run()
        s.submit(unlike(12, 1), 1)
        s.run()
        again = s.submit(unlike(12, 0), 1, seed=1)
        assert chunks(s.step(), again) == [(0, 12, True)]

    def test_a_restart_forgets_everything(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        s.submit(numbered(11), 4)
        s.run()
        s.restart()
        second = s.submit(numbered(11), 4)
        assert chunks(s.step(), second) == [(0, 11, True)]
        s.run()


class TestEveryPage:
    """A request that needs the whole pool is never stuck."""

    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("prompt", [1, 4, 7, 8, 11, 12])
    def test_alone(self, prompt: int, ahead: int) -> None:
        s = Simulation(pages=3, page_size=4, ahead=ahead)
        s.submit(unlike(prompt, 0), 13 - prompt)
        s.run()

    @pytest.mark.parametrize("length", [9, 10, 11, 12])
    def test_where_a_part_page_could_be_copied(self, length: int) -> None:
        s = Simulation(pages=3, page_size=4, prefill_chunk=64)
        s.submit(unlike(length, 0), 1)
        s.run()
        request = s.submit(unlike(length, 0), 13 - length, seed=1)
        # The copy would take a fourth page for a while, so the rest is run again.
        assert chunks(s.step(), request) == [(8, length - 8, True)]
        s.run()
        assert s.counts.copies == 0

    def test_one_page_more_is_enough_for_the_copy(self) -> None:
        s = Simulation(pages=4, page_size=4, prefill_chunk=64)
        s.submit(unlike(11, 0), 1)
        s.run()
        s.submit(unlike(11, 0), 2, seed=1)
        s.run()
        assert s.counts.copies == 1

    def test_behind_others(self) -> None:
        s = Simulation(pages=3, page_size=4, max_batch=3, ahead=1)
        for which in range(3):
            s.submit(unlike(2, which), 5)
            s.submit(unlike(6, which), 7)
        s.run()

    def test_equal_ones(self) -> None:
        s = Simulation(pages=3, page_size=4, ahead=1)
        for seed in range(4):
            s.submit(unlike(9, 0), 4, seed=seed)
        s.run()

    def test_a_pool_of_one_page(self) -> None:
        s = Simulation(pages=1, page_size=4, decode_steps=3, ahead=1)
        for seed in range(4):
            s.submit(unlike(2, seed % 2), 3, seed=seed)
        s.run()
