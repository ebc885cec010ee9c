"""The scheduler on a model device under random loads, everything checked after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from deinfer_jax.engine.request import Request
from tests.engine.model_device import WORDS, Simulation, numbered, unlike


class TestModelDevice:
    """The device notices what the other tests rely on it to notice."""

    def test_a_stale_page(self) -> None:
        s = Simulation(page_size=4)
        request = s.submit(unlike(9, 0), 9)
        s.step()
        token, digest = s.device.pages[request.pages[0]][2]
        s.device.pages[request.pages[0]][2] = (token, digest + 1)
        with pytest.raises(AssertionError, match="wrong cache"):
            s.step()

    def test_a_page_that_is_shared_though_the_tokens_before_differ(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        first = s.submit([*unlike(4, 0), 1, 2, 3, 4, 0], 9)
        second = s.submit([*unlike(4, 1), 1, 2, 3, 4, 0], 9)
        s.step()
        mine = second.pages[1]
        second.pages[1] = first.pages[1]
        s.scheduler.allocator.share([first.pages[1]])
        s.scheduler.allocator.release([mine])
        with pytest.raises(AssertionError, match="shared by requests that differ"):
            s.step()

    def test_a_missing_copy(self) -> None:
        s = Simulation(page_size=4, prefill_chunk=64)
        s.submit(numbered(11), 4)
        s.run()
        s.submit(numbered(11), 4, seed=1)
        step = s.scheduler.schedule()
        assert step is not None and step.prefills[0].copy
        s.device.pages[step.prefills[0].copy[0]] = [(-1, -1)] * 4
        with pytest.raises(AssertionError, match="wrong cache"):
            s._dispatch(step)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A scheduler, a pool and what comes at it."""

    pages: int
    page_size: int
    max_batch: int
    prefill_chunk: int
    decode_steps: int
    ahead: int
    share: bool = True
    continuous: bool = True


LOADS = [
    Load(pages=3, page_size=1, max_batch=2, prefill_chunk=2, decode_steps=1, ahead=0),
    Load(pages=12, page_size=1, max_batch=6, prefill_chunk=5, decode_steps=4, ahead=1),
    Load(pages=9, page_size=2, max_batch=4, prefill_chunk=3, decode_steps=3, ahead=1),
    Load(pages=8, page_size=3, max_batch=4, prefill_chunk=8, decode_steps=2, ahead=0),
    Load(pages=10, page_size=4, max_batch=6, prefill_chunk=16, decode_steps=1, ahead=1),
    Load(pages=10, page_size=4, max_batch=6, prefill_chunk=40, decode_steps=4, ahead=0),
    Load(pages=24, page_size=4, max_batch=5, prefill_chunk=6, decode_steps=2, ahead=1),
    Load(pages=5, page_size=8, max_batch=3, prefill_chunk=5, decode_steps=4, ahead=1),
    Load(pages=12, page_size=8, max_batch=6, prefill_chunk=16, decode_steps=3, ahead=1),
    Load(pages=1, page_size=7, max_batch=2, prefill_chunk=1, decode_steps=2, ahead=1),
    Load(pages=6, page_size=5, max_batch=1, prefill_chunk=4, decode_steps=2, ahead=1),
    Load(pages=10, page_size=4, max_batch=5, prefill_chunk=8, decode_steps=2, ahead=1, share=False),
    Load(
        pages=9,
        page_size=3,
        max_batch=4,
        prefill_chunk=6,
        decode_steps=2,
        ahead=1,
        continuous=False,
    ),
    Load(
        pages=9,
        page_size=4,
        max_batch=4,
        prefill_chunk=16,
        decode_steps=3,
        ahead=0,
        share=False,
        continuous=False,
    ),
]


class Crowd:
    """Requests at random: stems in common, equal prompts, next turns, whole pages, whole pools."""

    def __init__(self, load: Load, seed: int) -> None:
        self.rng = random.Random(seed)
        self.room = load.pages * load.page_size
        self.page_size = load.page_size
        self.stems = [self.words(self.rng.randint(1, max(1, self.room // 2))) for _ in range(4)]
        self.past: list[Request] = []

    def words(self, length: int) -> list[int]:
        return [self.rng.randrange(WORDS) for _ in range(length)]

    def prompt(self) -> list[int]:
        rng, kind = self.rng, self.rng.random()
        stem = rng.choice(self.stems)
        if kind < 0.25:
            prompt = stem
        elif kind < 0.55 or not self.past:
            prompt = [*stem, *self.words(rng.randint(1, self.room // 3 + 1))]
        elif kind < 0.70:
            prompt = rng.choice(self.past).tokens
        elif kind < 0.85:
            prompt = rng.choice(self.past).prompt
        else:
            prompt = self.words(rng.randint(1, self.room))
        prompt = list(prompt[: self.room])
        if rng.random() < 0.3 and len(prompt) >= self.page_size:
            prompt = prompt[: len(prompt) // self.page_size * self.page_size]
        return prompt

    def submit(self, simulation: Simulation) -> None:
        rng, prompt = self.rng, self.prompt()
        new = rng.randint(1, self.room - len(prompt) + 1)
        if rng.random() < 0.7:
            new = min(new, 12)
        request = simulation.submit(prompt, new, seed=rng.randrange(2), eos=rng.random() < 0.5)
        self.past = [*self.past[-9:], request]


def simulated(load: Load, steps: int, seed: int) -> Simulation:
    """Requests come, are cancelled, and the device is lost, at random."""
    s = Simulation(**{name: getattr(load, name) for name in load.__dataclass_fields__})
    crowd = Crowd(load, seed)
    rng = crowd.rng
    for step in range(steps):
        busy = step % 200 < 150  # between times the pool runs empty, and old pages are found
        if rng.random() < (0.4 if busy else 0.02) and len(s.scheduler.waiting) < 6:
            crowd.submit(s)
        if s.unfinished and rng.random() < 0.02:
            s.cancel(rng.choice(list(s.unfinished)))
        s.step(dispatch=rng.random() >= 0.002)
        if rng.random() < 0.002:
            s.restart()
        if rng.random() < 0.005 and not s.in_flight:
            s.borrow(rng.randint(0, load.pages))
        assert len(s.scheduler._index._pages) <= 2 * load.pages, "the index grows without end"
    s.run()
    return s


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_simulation(load: Load) -> None:
    simulated(load, 500, seed=100 + LOADS.index(load))


@pytest.mark.full
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_long_simulation(load: Load) -> None:
    """100 000 steps in all; what is to be tested does happen."""
    counts = simulated(load, 7200, seed=LOADS.index(load)).counts
    assert counts.steps >= 7200 and sum(counts.endings.values()) > 500
    assert counts.endings["length"] > 100 and counts.cancelled > 20 and counts.restarts > 10
    if load.pages > 1:
        assert counts.endings["eos"] > 10
        assert (counts.shared > 200) == load.share
    if load.pages > 1 and load.max_batch > 1:
        assert counts.preempted > 10
    if load.pages > 3 and load.max_batch > 1 and load.continuous:
        assert counts.chunks_beside_decode > 50
    if load.pages > 3 and load.page_size > 1:
        assert (counts.copies > 20) == load.share
