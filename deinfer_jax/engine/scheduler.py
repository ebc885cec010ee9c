"""Which tokens run next. Host Python, no jax.

A step has prompt chunks and one decode of all sequences that are past their prompt, so that new
requests join while others decode; chunks take what a budget of tokens leaves them beside decode.
Order is that of arrival, and nobody overtakes.

A request is admitted when a slot is free and the cache has pages for its prompt. Pages for what it
generates are added step by step; where none is left, the request that came last gives its pages up
and is run again later, prompt and generated tokens together. The oldest one is never preempted, so
all get done.

Pages are shared by requests with equal beginnings (``cache/prefix.py``), also with requests that
have ended, as long as their pages have not been needed. Of a page that is equal only in its first
tokens, a copy is taken.

Work is planned from what has been *dispatched*, not from what has been read back, so the next step
can be planned while the device still computes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deinfer_jax.cache.allocator import OutOfPages, PageAllocator
from deinfer_jax.cache.prefix import NOTHING, PrefixIndex, page_digest, page_digests
from deinfer_jax.engine.request import Request

__all__ = ["DecodeStep", "PrefillStep", "Scheduler", "Step"]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Run ``tokens[start : start + length]`` of a request.

    Attributes:
        last: whether the token drawn after it counts.
        copy: (from, to), a page to copy first.
    """

    request: Request
    start: int
    length: int
    last: bool
    copy: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Run the scheduler's ``decode_steps`` tokens of each request, or what it has left of them.

    Attributes:
        requests: a row each.
        contexts: the most tokens that each will have in the cache.
    """

    requests: tuple[Request, ...]
    contexts: tuple[int, ...]

    @property
    def context(self) -> int:
        """The most tokens that any of them will have in the cache."""
        return max(self.contexts)


@dataclass(frozen=True, slots=True)
class Step:
    """What to dispatch, the prompts first."""

    prefills: tuple[PrefillStep, ...]
    decode: DecodeStep | None


class Scheduler:
    """First come, first served, within slots, pages and a budget of tokens.

    Args:
        allocator: of the cache's pages.
        page_size: S.
        max_batch: slots.
        prefill_chunk: most prompt tokens in one chunk; and the budget, most tokens of all chunks
            and of decode in a step (a quarter of it is the prompts' in any case).
        decode_steps: tokens a dispatch.
        share_prefixes: whether pages are shared.

    Attributes:
        continuous: whether requests join while others run; if not, a batch is admitted when the one
            before has ended (static batching, to compare with).
        preemptions: so far.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        decode_steps: int,
        share_prefixes: bool = True,
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.max_batch = max_batch
        self.prefill_chunk, self.decode_steps = prefill_chunk, decode_steps
        self.share_prefixes = share_prefixes
        self.continuous = True
        self.preemptions = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._free_slots = list(range(max_batch))
        self._index = PrefixIndex(allocator)
        self._coming: Counter[bytes] = Counter()  # digests of pages that admitted prompts will fill

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def check_fits(self, request: Request) -> None:
        """Raises ValueError if the request would not fit in an empty cache."""
        needed = self.pages_for(request.max_length)
        if needed > self.allocator.num_pages:
            raise ValueError(
                f"the request needs {needed} pages of {self.page_size} tokens, the cache has "
                f"{self.allocator.num_pages}"
            )

    def add(self, request: Request) -> None:
        """Queues a request that fits, see ``check_fits``."""
        self.waiting.append(request)

    def schedule(self) -> Step | None:
        """The next thing to dispatch, already counted as dispatched; None if nothing can be planned
        before results are read back, or nothing is left."""
        decode, preempted = self._plan_decode()
        # Whoever has just lost its pages must not take them back at once.
        if not preempted and (self.continuous or not self.running):
            self._admit()
        budget = self.prefill_chunk
        if decode is not None:
            budget -= len(decode.requests) * self.decode_steps
        prefills = tuple(self._plan_prefills(max(budget, self.prefill_chunk // 4, 1)))
        return Step(prefills, decode) if prefills or decode else None

    def read(self, request: Request) -> None:
        """Tokens of the request have been read back; pages that are full now can be shared."""
        if request.slot >= 0:
            # The last token has not been run yet.
            self._make_known(request, len(request.tokens) - 1)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is; its slot and pages become free."""
        if request.slot >= 0:
            self._evict(request)
        else:
            self.waiting.remove(request)

    def make_room(self, count: int) -> list[int]:
        """Pages for somebody else, at most all; requests give theirs up where it is necessary. No
        tokens may be in flight."""
        while self.allocator.num_free < count:
            self._preempt(self.running[-1])
        return self.allocator.allocate(count)

    def restart(self, requests: Iterable[Request]) -> None:
        """Empties everything and queues the requests in this order, for when the pages' contents
        are lost: they run again from prompt and generated tokens."""
        self.waiting = deque(requests)
        for request in self.waiting:
            self._forget_place(request)
        self.running.clear()
        self._free_slots = list(range(self.max_batch))
        self.allocator.reset()
        self._index.clear()
        self._coming.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page, slot or request is lost or held twice."""
        self.allocator.check_integrity([r.held_pages for r in self.running])
        slots = sorted([r.slot for r in self.running] + self._free_slots)
        assert slots == list(range(self.max_batch)), f"slots in use and free: {slots}"
        for request in self.running:
            held, most = len(request.pages), self.pages_for(request.max_length)
            assert self.pages_for(request.goal) <= held <= most, f"{held} pages, at most {most}"
        for request in self.waiting:
            assert not request.held_pages and request.slot < 0, (
                "a request waits with pages or a slot"
            )
        places = Counter(map(id, [*self.running, *self.waiting]))
        assert max(places.values(), default=1) == 1, "a request is in two places"
        expected = Counter(digest for r in self.running for digest in self._to_fill(r))
        assert self._coming == expected, f"coming: {len(self._coming)}, not {len(expected)}"

    # Decode

    def _plan_decode(self) -> tuple[DecodeStep | None, bool]:
        """The decode step, and whether somebody was preempted for it."""
        ready, contexts = [], []
        preempted = False
        for request in list(self.running):
            most = request.sampling.max_new_tokens
            if not request.decoding or request.dispatched == most:
                continue
            dispatched = min(request.dispatched + self.decode_steps, most)
            context = len(request.prompt) + dispatched - 1
            while request.slot >= 0 and not self._grow(request, context):
                victim = self.running[-1]
                if victim.in_flight:  # its tokens must not be lost; read them first
                    return self._dispatched(ready, contexts), True
                self._preempt(victim)
                preempted = True
            if request.slot < 0:  # it was the last one itself
                break
            ready.append(request)
            contexts.append(context)
        return self._dispatched(ready, contexts), preempted

    def _dispatched(self, ready: list[Request], contexts: list[int]) -> DecodeStep | None:
        for request, context in zip(ready, contexts, strict=True):
            request.dispatched = context + 1 - len(request.prompt)
        return DecodeStep(tuple(ready), tuple(contexts)) if ready else None

    def _grow(self, request: Request, context: int) -> bool:
        """Pages for so many tokens; False if there are not enough."""
        missing = self.pages_for(context) - len(request.pages)
        if missing > 0:
            try:
                request.pages += self.allocator.allocate(missing, after=request.pages[-1])
            except OutOfPages:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._evict(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _evict(self, request: Request) -> None:
        self._coming -= Counter(self._to_fill(request))
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._free_slots.sort()
        self.allocator.release(request.held_pages)
        self._forget_place(request)

    @staticmethod
    def _forget_place(request: Request) -> None:
        request.slot, request.pages, request.copied_page = -1, [], None
        request.pages_sent = request.known_pages = request.goal = request.prefilled = 0
        request.dispatched = len(request.generated)

    # Prompts

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            shared, partial, wait = self._find_prefix(request)
            if wait and self.continuous:
                return
            if not self._has_room(request, shared, partial):
                partial = None  # it takes a page more for a while
                if not self._has_room(request, shared, partial):
                    return
            self.waiting.popleft()
            self._place(request, shared, partial)

    def _has_room(self, request: Request, shared: list[int], partial: int | None) -> bool:
        missing = self.pages_for(len(request.tokens)) - len(shared)
        found = shared if partial is None else [*shared, partial]
        # Everybody who runs may soon need a page: admit nobody who would be preempted at once.
        needed = missing + sum(map(self.allocator.is_free, found)) + len(self.running)
        return needed <= self.allocator.num_free

    def _place(self, request: Request, shared: list[int], partial: int | None) -> None:
        """Gives a request its slot and pages."""
        request.slot = self._free_slots.pop(0)
        request.goal = len(request.tokens)
        request.known_pages, request.prefilled = len(shared), len(shared) * self.page_size
        self.allocator.share(shared)
        request.pages = list(shared)
        if partial is not None:
            self.allocator.share([partial])  # until it is copied
            request.copied_page = partial
            request.prefilled = request.goal - 1
        missing = self.pages_for(request.goal) - len(shared)
        request.pages += self.allocator.allocate(missing, after=shared[-1] if shared else None)
        self.running.append(request)
        self._coming.update(self._to_fill(request))

    def _find_prefix(self, request: Request) -> tuple[list[int], int | None, bool]:
        """Pages that can be shared, the page to copy for the tokens behind them, and whether it
        pays to wait, because the next page is on its way."""
        if not self.share_prefixes:
            return [], None, False
        request.digests = page_digests(request.tokens, self.page_size, request.digests)
        usable = self._usable_pages(request)
        shared = self._index.find_run(request.digests[:usable])
        if len(shared) < usable:
            return shared, None, self._coming[request.digests[len(shared)]] > 0
        rest = self._rest_digest(request)
        page = self._index.find(rest) if rest else None
        return shared, page, page is None and self._coming[rest] > 0

    def _usable_pages(self, request: Request) -> int:
        """Full pages that need not be run: the last token must be, or there would be no logits."""
        return (len(request.tokens) - 1) // self.page_size

    def _rest_digest(self, request: Request) -> bytes:
        """Digest of the tokens between the usable pages and the last token; NOTHING for none."""
        usable = self._usable_pages(request)
        rest = request.tokens[usable * self.page_size : -1]
        before = request.digests[usable - 1] if usable else NOTHING
        return page_digest(before, rest) if rest else NOTHING

    def _to_fill(self, request: Request) -> list[bytes]:
        """Digests of what an admitted request will have computed at the end of its prompt."""
        if not self.share_prefixes or request.decoding:
            return []
        digests = request.digests[request.known_pages : request.goal // self.page_size]
        rest = self._rest_digest(request)
        return [*digests, rest] if rest else digests

    def _plan_prefills(self, budget: int) -> Iterator[PrefillStep]:
        for request in self.running:
            if request.decoding:
                continue
            start = request.prefilled
            length = min(budget, request.goal - start)
            if length == 0:
                return
            budget -= length
            coming = Counter(self._to_fill(request))
            request.prefilled += length
            request.dispatched += request.decoding
            self._make_known(request, request.prefilled)
            if request.decoding and self.share_prefixes and (rest := self._rest_digest(request)):
                self._index.add(rest, request.pages[self._usable_pages(request)])
            self._coming -= coming - Counter(self._to_fill(request))
            copy = None
            if request.copied_page is not None:
                copy = request.copied_page, request.pages[start // self.page_size]
                self.allocator.release([request.copied_page])
                request.copied_page = None
            yield PrefillStep(request, start, length, request.decoding, copy)

    def _make_known(self, request: Request, cached: int) -> None:
        """Full pages among the first ``cached`` tokens can be shared from now on."""
        full = cached // self.page_size
        if not self.share_prefixes or full <= request.known_pages:
            return
        request.digests = page_digests(request.tokens, self.page_size, request.digests)
        for page in range(request.known_pages, full):
            self._index.add(request.digests[page], request.pages[page])
        request.known_pages = full
