"""The scheduler alone, with simulated results."""

from __future__ import annotations

import numpy as np
import pytest

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.engine.request import Request, Sampling, prompt_hash
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep, Scheduler

PAGE = 16


def scheduler(
    *, pages: int = 20, max_batch: int = 4, prefill_chunk: int = 32, decode_steps: int = 1
) -> Scheduler:
    return Scheduler(
        PageAllocator(pages),
        page_size=PAGE,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        decode_steps=decode_steps,
    )


def request(prompt: int = 5, new: int = 4) -> Request:
    return Request(list(range(prompt)), Sampling(max_new_tokens=new))


def added(to: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for one in requests:
        to.check_fits(one)
        to.add(one)
    return requests


def prefill_all(of: Scheduler) -> list[PrefillStep]:
    """Schedules until a decode step would come; the requests that are running then are ready."""
    steps = []
    while any(r.prefilled < len(r.prompt) for r in of.running) or not steps:
        step = of.schedule()
        assert isinstance(step, PrefillStep)
        steps.append(step)
    return steps


class TestPrefill:
    def test_short_prompt_in_one_step(self) -> None:
        s = scheduler()
        (r,) = added(s, request(5))
        assert s.schedule() == PrefillStep(r, 0, 5, True)

    def test_long_prompt_in_chunks(self) -> None:
        s = scheduler(prefill_chunk=32)
        (r,) = added(s, request(70))
        assert [s.schedule() for _ in range(3)] == [
            PrefillStep(r, 0, 32, False),
            PrefillStep(r, 32, 32, False),
            PrefillStep(r, 64, 6, True),
        ]

    def test_prompt_of_exactly_two_chunks(self) -> None:
        s = scheduler(prefill_chunk=32)
        (r,) = added(s, request(64))
        assert [s.schedule() for _ in range(2)] == [
            PrefillStep(r, 0, 32, False),
            PrefillStep(r, 32, 32, True),
        ]

    def test_arrival_order(self) -> None:
        s = scheduler()
        requests = added(s, request(40), request(3), request(10))
        steps = prefill_all(s)
        assert [step.request for step in steps] == [requests[0], *requests]

    def test_prompts_before_decoding(self) -> None:
        s = scheduler()
        added(s, request())
        prefill_all(s)
        (late,) = added(s, request(40))
        assert s.schedule() == PrefillStep(late, 0, 32, False)


class TestAdmission:
    def test_nothing_to_do(self) -> None:
        assert scheduler().schedule() is None

    def test_slots_are_distinct(self) -> None:
        s = scheduler(max_batch=3)
        requests = added(s, request(), request(), request())
        s.schedule()
        assert sorted(r.slot for r in requests) == [0, 1, 2]

    def test_no_more_than_the_slots(self) -> None:
        s = scheduler(max_batch=2)
        requests = added(s, request(), request(), request())
        s.schedule()
        assert s.running == list(requests[:2])
        assert list(s.waiting) == [requests[2]]

    @pytest.mark.parametrize(
        ("prompt", "new", "pages"), [(1, 1, 1), (16, 1, 1), (16, 2, 2), (10, 7, 1), (10, 8, 2)]
    )
    def test_pages_for_the_whole_request(self, prompt: int, new: int, pages: int) -> None:
        # The last token drawn is never run, so it needs no place.
        s = scheduler()
        (r,) = added(s, request(prompt, new))
        s.schedule()
        assert len(r.pages) == pages

    def test_waits_for_pages(self) -> None:
        s = scheduler(pages=5)
        first, second = added(s, request(40, 10), request(40, 10))
        s.schedule()
        assert s.running == [first]
        s.finish(first)
        s.schedule()
        assert s.running == [second]

    def test_nobody_overtakes(self) -> None:
        s = scheduler(pages=5)
        first, large, small = added(s, request(40, 10), request(60, 10), request(3, 2))
        s.schedule()
        assert s.running == [first]
        assert list(s.waiting) == [large, small]

    def test_takes_free_pages_to_the_last(self) -> None:
        s = scheduler(pages=4)
        added(s, request(30, 2), request(30, 2))
        s.schedule()
        assert s.allocator.num_free == 0 and len(s.running) == 2

    def test_a_request_that_fits_no_cache(self) -> None:
        s = scheduler(pages=3)
        with pytest.raises(ValueError, match="needs 4 pages of 16 tokens, the cache has 3"):
            s.check_fits(request(40, 10))

    def test_a_request_that_just_fits(self) -> None:
        s = scheduler(pages=3)
        (r,) = added(s, request(40, 9))
        s.schedule()
        assert len(r.pages) == 3


class TestDecode:
    def test_all_ready_requests_together(self) -> None:
        s = scheduler()
        requests = added(s, request(5, 4), request(9, 4))
        prefill_all(s)
        assert s.schedule() == DecodeStep(requests, (6, 10))

    def test_context_is_that_of_the_longest(self) -> None:
        s = scheduler(decode_steps=4)
        added(s, request(5, 9), request(30, 3))
        prefill_all(s)
        step = s.schedule()
        # 30 + 2 tokens (its limit) and 5 + 4
        assert isinstance(step, DecodeStep) and step.context == 32
        assert step.contexts == (9, 32)

    def test_several_steps(self) -> None:
        s = scheduler(decode_steps=4)
        added(s, request(5, 9))
        prefill_all(s)
        steps = [s.schedule() for _ in range(3)]
        # 8 tokens after the first one, in two dispatches
        assert [step.context for step in steps if isinstance(step, DecodeStep)] == [9, 13]
        assert steps[2] is None

    @pytest.mark.parametrize(
        ("new", "contexts"), [(2, [6]), (4, [8]), (5, [9]), (6, [9, 10]), (10, [9, 13, 14])]
    )
    def test_one_dispatch_where_fewer_tokens_are_left(self, new: int, contexts: list[int]) -> None:
        s = scheduler(decode_steps=4)
        (r,) = added(s, request(5, new))
        prefill_all(s)
        steps = [s.schedule() for _ in contexts]
        assert steps == [DecodeStep((r,), (context,)) for context in contexts]
        assert s.schedule() is None
        assert r.dispatched == new

    def test_nothing_beyond_the_limit(self) -> None:
        s = scheduler()
        added(s, request(5, 3))
        prefill_all(s)
        assert [isinstance(s.schedule(), DecodeStep) for _ in range(3)] == [True, True, False]

    def test_a_request_of_one_token_needs_no_decoding(self) -> None:
        s = scheduler()
        added(s, request(5, 1))
        prefill_all(s)
        assert s.schedule() is None

    def test_a_request_at_its_limit_is_left_out(self) -> None:
        s = scheduler()
        _, longer = added(s, request(5, 2), request(6, 5))
        prefill_all(s)
        s.schedule()
        step = s.schedule()
        assert isinstance(step, DecodeStep) and step.requests == (longer,)


class TestFinish:
    def test_gives_slot_and_pages_back(self) -> None:
        s = scheduler(pages=5)
        (r,) = added(s, request(40, 4))
        s.schedule()
        assert s.finish(r) == [0, 1, 2]
        assert (s.allocator.num_free, r.slot, r.pages) == (5, -1, [])

    def test_the_slot_is_used_again(self) -> None:
        s = scheduler(max_batch=2)
        first, _ = added(s, request(), request())
        prefill_all(s)
        s.finish(first)
        (third,) = added(s, request())
        s.schedule()
        assert third.slot == 0

    def test_drop_all_returns_everything(self) -> None:
        s = scheduler(max_batch=2)
        requests = added(s, request(), request(), request())
        s.schedule()
        assert sorted(map(id, s.drop_all())) == sorted(map(id, requests))

    def test_drop_all_frees_everything(self) -> None:
        s = scheduler(max_batch=2)
        added(s, request(), request(), request())
        s.schedule()
        s.drop_all()
        assert s.allocator.num_free == 20 and not s.running and not s.waiting
        s.check_integrity()
        assert s.schedule() is None


class TestIntegrity:
    def test_a_lost_page(self) -> None:
        s = scheduler()
        (r,) = added(s, request(40))
        s.schedule()
        r.pages.pop()
        with pytest.raises(AssertionError, match="page 2: 1 references, but 0 holders"):
            s.check_integrity()

    def test_a_slot_held_twice(self) -> None:
        s = scheduler()
        first, second = added(s, request(), request())
        s.schedule()
        second.slot = first.slot
        with pytest.raises(AssertionError, match="slots in use and free"):
            s.check_integrity()

    def test_a_lost_slot(self) -> None:
        s = scheduler(max_batch=4)
        s._free_slots.remove(3)
        with pytest.raises(AssertionError, match="slots"):
            s.check_integrity()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_simulation(ahead: int, decode_steps: int) -> None:
    """3000 random steps; results are read ``ahead`` steps late, and requests end at random."""
    rng = np.random.default_rng(ahead + 2 * decode_steps)
    s = scheduler(pages=24, max_batch=5, prefill_chunk=32, decode_steps=decode_steps)
    started: list[Request] = []  # in the order of their first chunk
    submitted: list[Request] = []
    ended: set[int] = set()
    in_flight: list[PrefillStep | DecodeStep] = []
    cached: dict[int, int] = {}  # tokens in the cache, by request
    tokens: dict[int, int] = {}  # tokens drawn and read

    def read(step: PrefillStep | DecodeStep) -> None:
        drawn = (
            {step.request: int(step.last)}
            if isinstance(step, PrefillStep)
            else dict.fromkeys(step.requests, decode_steps)
        )
        for r, count in drawn.items():
            for _ in range(count):
                if id(r) in ended or tokens[id(r)] == r.sampling.max_new_tokens:
                    break
                tokens[id(r)] += 1
                if tokens[id(r)] == r.sampling.max_new_tokens or rng.random() < 0.03:
                    ended.add(id(r))
                    s.finish(r)

    for _ in range(3000):
        if rng.random() < 0.25 and len(s.waiting) < 10:
            r = request(int(rng.integers(1, 150)), int(rng.integers(1, 40)))
            tokens[id(r)] = cached[id(r)] = 0
            submitted.extend(added(s, r))
        step = s.schedule()
        s.check_integrity()
        assert len(s.running) <= 5
        if isinstance(step, PrefillStep):
            r = step.request
            if step.start == 0:
                started.append(r)
            assert step.start == cached[id(r)] and 1 <= step.length <= 32
            cached[id(r)] += step.length
            assert step.last == (cached[id(r)] == len(r.prompt))
        elif isinstance(step, DecodeStep):
            assert step.requests
            for r in step.requests:
                assert len(r.prompt) <= cached[id(r)] < r.max_length
                cached[id(r)] = min(cached[id(r)] + decode_steps, r.max_length)
                assert cached[id(r)] <= len(r.pages) * PAGE
            assert step.contexts == tuple(cached[id(r)] for r in step.requests)
        if step is not None:
            in_flight.append(step)
        if in_flight and (step is None or len(in_flight) > ahead):
            read(in_flight.pop(0))
            s.check_integrity()

    while s.waiting or s.running or in_flight:  # no new requests: all end
        step = s.schedule()
        if isinstance(step, PrefillStep) and step.start == 0:
            started.append(step.request)
        if step is not None:
            in_flight.append(step)
        read(in_flight.pop(0))
        s.check_integrity()
    assert len(submitted) > 150
    assert started == submitted  # nobody overtook, nobody was lost
    assert ended == {id(r) for r in submitted}
    assert s.allocator.num_free == 24


class TestRequest:
    def test_hash_is_blake2b_of_little_endian_ids(self) -> None:
        import hashlib

        expected = hashlib.blake2b(b"\x01\x00\x00\x00\x02\x01\x00\x00", digest_size=8).digest()
        assert prompt_hash([1, 258]) == expected

    def test_key_words(self) -> None:
        seed = (7 << 32) + 9
        r = Request([1, 258], Sampling(max_new_tokens=1, seed=seed, sample_index=3))
        digest = int.from_bytes(prompt_hash([1, 258]), "little")
        assert r.key_words.dtype == np.uint32
        assert r.key_words.tolist() == [7, 9, digest >> 32, digest & 0xFFFFFFFF, 3]

    def test_requests_compare_by_identity(self) -> None:
        assert request() != request()
