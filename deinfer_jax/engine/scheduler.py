"""Which request runs next. Host Python, no jax.

A request is admitted when a slot is free and the cache has pages for its prompt and all tokens it
may generate, so an admitted request always finishes. Prompts run first, in arrival order, in
chunks; then all admitted requests decode together. Work is planned from what has been *dispatched*,
not from what has been read back, so the next step can be planned while the device still computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.engine.request import Request

__all__ = ["DecodeStep", "PrefillStep", "Scheduler"]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Run ``prompt[start : start + length]`` of a request; ``last`` if its first token comes
    out."""

    request: Request
    start: int
    length: int
    last: bool


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


class Scheduler:
    """First come, first served, within slots and pages.

    Args:
        allocator: of the cache's pages.
        page_size: S.
        max_batch: slots.
        prefill_chunk: most prompt tokens in one step.
        decode_steps: tokens a dispatch.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_batch: int,
        prefill_chunk: int,
        decode_steps: int,
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.max_batch = max_batch
        self.prefill_chunk, self.decode_steps = prefill_chunk, decode_steps
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_batch))

    def pages_needed(self, request: Request) -> int:
        """Pages that hold the whole request."""
        return -(-request.max_length // self.page_size)

    def check_fits(self, request: Request) -> None:
        """Raises ValueError if the request would not fit in an empty cache."""
        needed = self.pages_needed(request)
        if needed > self.allocator.num_pages:
            raise ValueError(
                f"the request needs {needed} pages of {self.page_size} tokens, the cache has "
                f"{self.allocator.num_pages}"
            )

    def add(self, request: Request) -> None:
        """Queues a request that fits, see ``check_fits``."""
        self.waiting.append(request)

    def schedule(self) -> PrefillStep | DecodeStep | None:
        """The next thing to dispatch, already counted as dispatched; None if nothing can be planned
        before results are read back."""
        self._admit()
        for request in self.running:
            if request.prefilled < len(request.prompt):
                start = request.prefilled
                length = min(self.prefill_chunk, len(request.prompt) - start)
                request.prefilled += length
                last = request.prefilled == len(request.prompt)
                request.dispatched += last
                return PrefillStep(request, start, length, last)
        ready = [r for r in self.running if r.dispatched < r.sampling.max_new_tokens]
        if not ready:
            return None
        for request in ready:
            most = request.sampling.max_new_tokens
            request.dispatched = min(request.dispatched + self.decode_steps, most)
        return DecodeStep(tuple(ready), tuple(len(r.prompt) + r.dispatched - 1 for r in ready))

    def finish(self, request: Request) -> list[int]:
        """Gives slot and pages back; returns the pages that became free."""
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._free_slots.sort()
        freed = self.allocator.release(request.pages)
        request.slot, request.pages = -1, []
        return freed

    def drop_all(self) -> list[Request]:
        """Empties queue and slots, for when a run is abandoned; returns the requests."""
        dropped = [*self.running, *self.waiting]
        for request in list(self.running):
            self.finish(request)
        self.waiting.clear()
        return dropped

    def check_integrity(self) -> None:
        """Raises AssertionError if a page or slot is lost or held twice."""
        self.allocator.check_integrity([r.pages for r in self.running])
        slots = sorted([r.slot for r in self.running] + self._free_slots)
        assert slots == list(range(self.max_batch)), f"slots in use and free: {slots}"

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            needed = self.pages_needed(request)
            if needed > self.allocator.num_free:
                return  # in order: nobody overtakes
            self.waiting.popleft()
            request.pages = self.allocator.allocate(needed)
            request.slot = self._free_slots.pop(0)
            self.running.append(request)
