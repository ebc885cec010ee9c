"""A device that the scheduler cannot fool, and a loop around both, in plain Python.

Its cache holds, for every position of every page, the token and a digest of all tokens before it,
as real keys and values depend on the whole prefix. The next token is drawn from the digest found
in the cache, so a page that is stale, wrongly shared, not copied or not computed again shows as a
wrong token, and before that as a failed check.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.engine.request import Request, Sampling
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep, Scheduler, Step

Cell = tuple[int, int]  # token, digest of it and of everything before
Chunk = tuple[int, int, bool]  # start, length, last

WORDS = 6  # token ids 0 … 5
EOS = 5
NEVER_WRITTEN: Cell = (-1, -1)
BEFORE_ALL = 0  # the digest in front of the first token


def _extended(digest: int, token: int) -> int:
    return hash((digest, token))  # of numbers, so the same in every process


def _drawn(digest: int, seed: int) -> int:
    """The token after a prefix; one in thirty is EOS."""
    number = hash((digest, seed)) % 30
    return number % EOS if number else EOS


@dataclass(eq=False)
class Job:
    """A request and what must come of it.

    Attributes:
        cells: of prompt and continuation, as far as a device may run them.
        answer: the tokens that it must get.
        serial: its place in the order of arrival.
        idle: steps in which it could have decoded and did not, the last ones in a row.
        endings: how many times it was finished.
    """

    request: Request
    serial: int
    cells: list[Cell]
    answer: list[int]
    idle: int = 0
    endings: int = 0
    cancelled: bool = False

    @classmethod
    def of(cls, request: Request, serial: int) -> Job:
        """Follows the true prefix, token by token."""
        cells: list[Cell] = []
        digest = BEFORE_ALL
        for token in request.prompt:
            digest = _extended(digest, token)
            cells.append((token, digest))
        drawn: list[int] = []
        for _ in range(request.sampling.max_new_tokens):
            token = _drawn(digest, request.sampling.seed)
            drawn.append(token)
            digest = _extended(digest, token)
            cells.append((token, digest))
        answer = drawn
        for ending in request.sampling.eos_token_ids:
            if ending in answer:
                answer = answer[: answer.index(ending) + 1]
        return cls(request, serial, cells[:-1], answer)


@dataclass
class Row:
    """What the device knows of a slot."""

    table: list[int]
    length: int
    limit: int
    seed: int
    token: int


class Device:
    """Runs steps in the order in which they are dispatched.

    Attributes:
        written: pages that the steps since the last ``clear()`` of it wrote tokens to.
    """

    def __init__(self, *, num_pages: int, page_size: int, decode_steps: int) -> None:
        self.num_pages, self.page_size, self.decode_steps = num_pages, page_size, decode_steps
        self.written: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Loses everything."""
        self.pages = [[NEVER_WRITTEN] * self.page_size for _ in range(self.num_pages)]
        self.rows: dict[int, Row] = {}

    def prefill(self, step: PrefillStep, job: Job) -> int:
        """Copies, checks what is there, runs a chunk; returns the token drawn after it."""
        request = step.request
        table = list(request.pages)
        if step.copy is not None:
            source, target = step.copy
            assert table[step.start // self.page_size] == target, "the copy is not where it starts"
            self.pages[target] = list(self.pages[source])
        self._check(table, step.start, job)
        tokens = request.tokens[step.start : step.start + step.length]
        assert len(tokens) == step.length > 0
        for position, token in enumerate(tokens, step.start):
            self._write(table, position, token)
        end = step.start + step.length
        token = _drawn(self._digest(table, end), request.sampling.seed)
        self.rows[request.slot] = Row(table, end, request.max_length, request.sampling.seed, token)
        request.pages_sent = len(table)
        return token

    def decode(self, step: DecodeStep, jobs: Sequence[Job]) -> list[list[int]]:
        """Runs ``decode_steps`` tokens of each row, or up to its limit; returns them by row."""
        for request in step.requests:  # the host sends what has come to the tables
            new = request.pages[request.pages_sent :]
            assert len(new) <= -(-self.decode_steps // self.page_size), "more than fits in a step"
            self.rows[request.slot].table.extend(new)
            request.pages_sent += len(new)
        results = []
        for request, context, job in zip(step.requests, step.contexts, jobs, strict=True):
            row = self.rows[request.slot]
            assert row.table == request.pages, "the device has another table"
            results.append([])
            for _ in range(self.decode_steps):
                if row.length == row.limit:
                    break
                self._check(row.table, row.length, job)
                self._write(row.table, row.length, row.token)
                row.length += 1
                row.token = _drawn(self._digest(row.table, row.length), row.seed)
                results[-1].append(row.token)
            assert results[-1], "a row that has nothing to run"
            assert row.length == context, f"{row.length} tokens in the cache, not {context}"
        return results

    def _check(self, table: list[int], length: int, job: Job) -> None:
        """Everything before a position must be what this request's own prefix says."""
        found = [cell for page in table for cell in self.pages[page]][:length]
        assert found == job.cells[:length], f"request {job.serial}: wrong cache before {length}"

    def _digest(self, table: list[int], length: int) -> int:
        page, offset = divmod(length - 1, self.page_size)
        return self.pages[table[page]][offset][1] if length else BEFORE_ALL

    def _write(self, table: list[int], position: int, token: int) -> None:
        page, offset = divmod(position, self.page_size)
        digest = _extended(self._digest(table, position), token)
        self.pages[table[page]][offset] = (token, digest)
        self.written.add(table[page])


@dataclass
class Counts:
    """What a simulation has seen."""

    steps: int = 0
    prefilled: int = 0
    shared: int = 0
    copies: int = 0
    preempted: int = 0
    chunks_beside_decode: int = 0
    cancelled: int = 0
    restarts: int = 0
    endings: Counter[str] = field(default_factory=Counter)


class Simulation:
    """Scheduler and model device, driven as ``Core`` drives a real one, everything checked.

    Args:
        ahead: steps dispatched before the oldest is read back.
        others: of the scheduler.
    """

    def __init__(
        self,
        *,
        pages: int = 20,
        page_size: int = 4,
        max_batch: int = 4,
        prefill_chunk: int = 16,
        decode_steps: int = 1,
        share: bool = True,
        continuous: bool = True,
        ahead: int = 0,
    ) -> None:
        self.scheduler = Scheduler(
            PageAllocator(pages),
            page_size=page_size,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            decode_steps=decode_steps,
            share_prefixes=share,
        )
        self.scheduler.continuous = continuous
        self.device = Device(num_pages=pages, page_size=page_size, decode_steps=decode_steps)
        self.ahead = ahead
        self.jobs: dict[Request, Job] = {}
        self.unfinished: dict[Request, None] = {}
        self.counts = Counts()
        self.in_flight: deque[tuple[Step, list[list[int]]]] = deque()
        self._unread: Counter[Request] = Counter()  # tokens dispatched and not read, our count

    def submit(
        self, prompt: Sequence[int], new: int, *, seed: int = 0, eos: bool = False
    ) -> Request:
        """Queues a request."""
        endings = frozenset({EOS} if eos else ())
        sampling = Sampling(max_new_tokens=new, seed=seed, eos_token_ids=endings)
        request = Request(list(prompt), sampling)
        self.scheduler.check_fits(request)
        self.jobs[request] = Job.of(request, len(self.jobs))
        self.unfinished[request] = None
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request that is not finished."""
        self.jobs[request].cancelled = True
        self._finish(request, "cancelled")
        self.counts.cancelled += 1
        self.check()

    def restart(self) -> None:
        """What is on the device, and what was not read, is lost."""
        self.in_flight.clear()
        self._unread.clear()
        self.device.reset()
        for job in self.jobs.values():
            job.idle = 0
        self.scheduler.restart(self.unfinished)
        self.counts.restarts += 1
        self.check()

    def borrow(self, count: int) -> None:
        """Somebody else writes to so many pages and gives them back; nothing may be in flight."""
        assert not self.in_flight
        pages = self.scheduler.make_room(count)
        assert len(set(pages)) == count
        for page in pages:
            self.device.pages[page] = [NEVER_WRITTEN] * self.device.page_size
        self.scheduler.allocator.release(pages)
        for job in self.jobs.values():
            job.idle = 0
        self.check()

    def run(self, *, limit: int = 10_000) -> None:
        """Steps until all requests are finished, and checks what came of them."""
        for _ in range(limit):
            if not self.unfinished and not self.in_flight:
                break
            self.step()
        self.check_answers()

    def step(self, *, dispatch: bool = True) -> Step | None:
        """Schedules, dispatches, reads back; returns the step dispatched.

        Args:
            dispatch: if not, the step is lost, as when a program cannot be started.
        """
        scheduler = self.scheduler
        before, preemptions = list(scheduler.running), scheduler.preemptions
        due = [r for r in before if r.decoding and r.dispatched < r.sampling.max_new_tokens]
        step = scheduler.schedule()
        self.counts.steps += 1
        self._check_preempted(before, scheduler.preemptions - preemptions)
        holders = self.check()
        if step is not None:
            self._check_prefills(step)
        self._check_nobody_starves(before, due, step)
        if not dispatch:
            self.restart()
            return None
        if step is not None:
            self.in_flight.append((step, self._dispatch(step)))
            for page in self.device.written:
                assert len(holders[page]) == 1, f"page {page} is written and shared"
            self.device.written.clear()
        if self.in_flight and (step is None or len(self.in_flight) > self.ahead):
            self._read(*self.in_flight.popleft())
            scheduler.check_integrity()
        elif step is None:
            assert not self.unfinished, "nothing can be planned, and somebody waits"
        return step

    def _dispatch(self, step: Step) -> list[list[int]]:
        results = []
        for prefill in step.prefills:
            results.append([self.device.prefill(prefill, self.jobs[prefill.request])])
            self._unread[prefill.request] += prefill.last
            self.counts.prefilled += prefill.length
            self.counts.copies += prefill.copy is not None
        if step.decode is not None:
            jobs = [self.jobs[request] for request in step.decode.requests]
            results += self.device.decode(step.decode, jobs)
            for request, tokens in zip(step.decode.requests, results[-len(jobs) :], strict=True):
                self._unread[request] += len(tokens)
            self.counts.chunks_beside_decode += bool(step.prefills)
        return results

    def _read(self, step: Step, results: list[list[int]]) -> None:
        requests = [prefill.request for prefill in step.prefills if prefill.last]
        count = len(step.prefills)
        drawn = [
            tokens
            for prefill, tokens in zip(step.prefills, results[:count], strict=True)
            if prefill.last
        ]
        if step.decode is not None:
            requests += step.decode.requests
            drawn += results[count:]
        for request, tokens in zip(requests, drawn, strict=True):
            self._unread[request] -= len(tokens)
            if request not in self.unfinished:
                continue
            room = request.sampling.max_new_tokens - len(request.generated)
            ends = [i for i, t in enumerate(tokens) if t in request.sampling.eos_token_ids]
            count = min(ends[0] + 1 if ends else len(tokens), room)
            expected = [*request.generated, *tokens[:count]]
            reason = request.take(tokens, [], 0.0)
            self.scheduler.read(request)
            assert request.generated == expected
            assert request.tokens == [*request.prompt, *expected]
            if ends and ends[0] < count:
                assert reason == "eos"
                self._finish(request, reason)
            elif count == room:
                assert reason == "length"
                self._finish(request, reason)
            else:
                assert reason is None

    def _finish(self, request: Request, why: str) -> None:
        self.scheduler.remove(request)
        del self.unfinished[request]
        self.jobs[request].endings += 1
        self.counts.endings[why] += 1

    # Checks, none of which uses the scheduler's own bookkeeping where the test has its own.

    def check(self) -> dict[int, list[tuple[Request, int]]]:
        """Order, pages and slots, counted anew; returns who has a page in its table, and where."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        order = [self.jobs[request].serial for request in (*scheduler.running, *scheduler.waiting)]
        assert order == [self.jobs[request].serial for request in self.unfinished], order
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(scheduler.max_batch))
        holders: dict[int, list[tuple[Request, int]]] = {}
        references: Counter[int] = Counter()
        for request in scheduler.running:
            assert len(set(request.pages)) == len(request.pages), "a page twice in a table"
            for place, page in enumerate(request.pages):
                holders.setdefault(page, []).append((request, place))
            references.update(request.pages)
            if request.copied_page is not None:
                references[request.copied_page] += 1
        for request in scheduler.waiting:
            assert not request.pages and request.copied_page is None and request.slot == -1
        allocator = scheduler.allocator
        counted = [references[page] for page in range(allocator.num_pages)]
        assert counted == allocator._references.tolist(), "references are not those of requests"
        assert allocator.num_free == counted.count(0), "the count of free pages is wrong"
        for page, found in holders.items():
            if len(found) > 1:
                self._check_shared(page, found)
        return holders

    def _check_shared(self, page: int, found: list[tuple[Request, int]]) -> None:
        (place,) = {place for _, place in found}  # at the same place of every table
        last = (place + 1) * self.scheduler.page_size - 1
        prefixes = {self.jobs[request].cells[last] for request, _ in found}
        assert len(prefixes) == 1, f"page {page} is shared by requests that differ"

    def check_answers(self) -> None:
        """Everything is over: all finished once, with the right tokens, and all is free."""
        assert not self.unfinished, f"{len(self.unfinished)} requests are not finished"
        for job in self.jobs.values():
            got = job.request.generated
            assert job.endings == 1, f"request {job.serial} was finished {job.endings} times"
            assert job.request.tokens == [*job.request.prompt, *got]
            assert got == (job.answer[: len(got)] if job.cancelled else job.answer), job.serial
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.waiting
        assert scheduler.allocator.num_free == scheduler.allocator.num_pages
        assert not scheduler._coming
        self.check()

    def _check_preempted(self, before: list[Request], count: int) -> None:
        running = set(self.scheduler.running)
        gone = [request for request in before if request not in running]
        assert len(gone) == count, "somebody lost its pages and took them back in one step"
        self.counts.preempted += count
        assert gone == before[len(before) - count :], "not the last ones were preempted"
        assert count == 0 or count < len(before), "the oldest one was preempted"
        for request in gone:
            assert not self._unread[request], "preempted with tokens in flight"

    def _check_prefills(self, step: Step) -> None:
        scheduler = self.scheduler
        rows = len(step.decode.requests) if step.decode else 0
        assert rows <= scheduler.max_batch and (step.prefills or rows)
        budget = max(
            scheduler.prefill_chunk - rows * scheduler.decode_steps, scheduler.prefill_chunk // 4, 1
        )
        spent = sum(prefill.length for prefill in step.prefills)
        assert spent <= budget, f"{spent} prompt tokens, at most {budget}"
        serials = [self.jobs[prefill.request].serial for prefill in step.prefills]
        assert serials == sorted(set(serials)), "prompts out of order"
        for prefill in step.prefills:
            request = prefill.request
            assert prefill.last == (prefill.start + prefill.length == len(request.tokens))
            row = self.device.rows.get(request.slot)
            if request.pages_sent:  # not its first chunk
                assert row is not None and prefill.start == row.length, "chunks have gaps"
                assert prefill.copy is None, "a copy after the first chunk"
            else:
                self.counts.shared += prefill.start
        assert all(prefill.last for prefill in step.prefills[:-1]), "overtaken within a step"
        if spent < budget:
            assert all(request.decoding for request in scheduler.running), "budget was left over"
        if step.decode is not None:
            assert len(set(step.decode.requests)) == rows
            begun = {prefill.request for prefill in step.prefills}
            assert begun.isdisjoint(step.decode.requests)
            assert step.decode.context == max(step.decode.contexts)

    def _check_nobody_starves(
        self, before: list[Request], due: Iterable[Request], step: Step | None
    ) -> None:
        scheduler = self.scheduler
        assert scheduler.running or not scheduler.waiting, "all wait, and nobody runs"
        if not scheduler.continuous and before:
            assert set(scheduler.running) <= set(before), "joined a static batch"
        decoded = set(step.decode.requests) if step and step.decode else set()
        for request in due:
            job = self.jobs[request]
            job.idle = 0 if request in decoded or request.slot < 0 else job.idle + 1
            # Whose pages are needed may have tokens in flight; they are read in one step.
            assert job.idle <= self.ahead, f"request {job.serial} was left out"


# For tests of one behaviour.


def numbered(length: int, *, seed: int = 0) -> list[int]:
    """A prompt like no other: the seed decides its first tokens already."""
    return np.random.default_rng([seed, 7]).integers(0, WORDS, length).tolist()


def unlike(length: int, which: int) -> list[int]:
    """Prompts of which no two begin with the same token, for up to ``WORDS`` of them."""
    return [which, *[0] * (length - 1)]


def crowded(*, pages: int, ahead: int = 0, **others: Any) -> Simulation:
    """For requests that will need more pages than there are, their prompts never."""
    return Simulation(pages=pages, page_size=4, prefill_chunk=64, ahead=ahead, **others)


def chunks(step: Step | None, request: Request | None = None) -> list[Chunk]:
    """What a step runs of a request's prompt, or of all prompts."""
    assert step is not None
    return [
        (prefill.start, prefill.length, prefill.last)
        for prefill in step.prefills
        if request is None or prefill.request is request
    ]


def decoded(step: Step | None) -> list[Request]:
    """The requests that a step decodes."""
    return list(step.decode.requests) if step is not None and step.decode is not None else []


def steps_until(simulation: Simulation, request: Request, *, tokens: int) -> None:
    """Steps until a request has so many tokens."""
    for _ in range(1000):
        if len(request.generated) >= tokens:
            return
        simulation.step()
    raise AssertionError("it never got there")
