"""The loop: schedule, dispatch, read back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from deinfer_jax.engine.interrupt import uninterrupted
from deinfer_jax.engine.memory import OutOfDeviceMemory
from deinfer_jax.engine.request import FinishReason, Request, TokenLogprob
from deinfer_jax.engine.runner import Runner
from deinfer_jax.engine.sampler import NOT_A_NUMBER, Drawn
from deinfer_jax.engine.scheduler import Scheduler, Step
from deinfer_jax.parallel.processes import Processes

__all__ = ["Core"]

logger = logging.getLogger(__name__)


class Core:
    """Runs requests of any number of callers together.

    Callers submit requests and call :meth:`advance` until theirs are finished; whoever calls moves
    everybody's on. Results are in the requests.

    Args:
        runner: dispatches steps to the device.
        scheduler: says which.
        ahead: steps dispatched before the oldest is read back: 1 on a GPU, whose queue then never
            runs dry; 0 on a CPU, where simulated devices deadlock if programs queue up.
        processes: all that run the same steps, None for this one alone. What goes wrong in a step
            may go wrong in some of them only, so nothing is run again then.

    Attributes:
        lock: held while scheduler, pools and state are in use.
        closed: whether :meth:`close` was called.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        ahead: int,
        processes: Processes | None = None,
    ) -> None:
        self.runner, self.scheduler, self.ahead = runner, scheduler, ahead
        self.processes = processes
        self.lock = threading.Lock()
        self.closed = False
        self._in_flight: deque[tuple[Step, list[Drawn]]] = deque()
        self._unfinished: dict[Request, None] = {}  # in order of arrival
        # (request, whether it is to end), from any thread, also while another one holds the lock.
        self._orders: deque[tuple[Request, bool]] = deque()
        self._broken = False  # a step has failed, and what is left of it was not cleared away yet

    @contextmanager
    def together[Value](self, what: str, make: Callable[[], Value]) -> Iterator[Value]:
        """A block that runs with what ``make`` gives; where there are several processes, all run it
        with what it gives in process 0, see ``Processes.call``."""
        if self.processes is None:
            yield make()
        else:
            with self.processes.call(what, make) as value:
                yield value

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests in order; safe from any thread.

        Raises:
            ValueError: a request does not fit in the cache; none is queued then.
            NotImplementedError: there are several processes, and this one alone submits.
        """
        if self.processes is not None:
            self.processes.check_called()
        for request in requests:
            self.scheduler.check_fits(request)
        now = time.perf_counter()
        for request in requests:
            request.times.append(now)
        self._orders.extend((request, False) for request in requests)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests at the next step, with ``finish_reason`` "cancelled"; what they have is
        kept. Safe from any thread; a finished request stays as it is."""
        self._orders.extend((request, True) for request in list(requests))

    def advance(self, request: Request | None = None) -> None:
        """Does what was asked for by ``submit`` and ``cancel``, dispatches a step, and reads one
        back, if there is any. Waits while another thread does. Ctrl-C is held back until the end.

        A request whose logits are not numbers, or whose step ran out of device memory, ends with
        ``finish_reason`` "error"; the others go on. What else goes wrong in a step is raised, and
        nothing is lost by it: the next step runs all requests again from the tokens read so far.

        Args:
            request: do nothing if it is finished when the lock is free.

        Raises:
            RuntimeError: the model has been closed.
        """
        with self.lock, uninterrupted():
            if request is not None and request.finish_reason is not None:
                return
            self._check_open()
            with self._recovering():
                self._follow_orders()
                try:
                    self._step()
                except OutOfDeviceMemory as error:
                    if self.processes is not None:
                        self.processes.fail(error)  # the others may have had room
                        raise
                    running = list(self.scheduler.running)
                    self._recover()  # the failed program took pools and state with it
                    for failed in running:
                        if failed in self._unfinished:  # recovering may have ended it already
                            self._finish(failed, "error", str(error))

    def settle(self) -> None:
        """Does what was asked for by ``submit`` and ``cancel``, and no step; does nothing while a
        step runs, be it in this thread (a collected stream ends anywhere)."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    with uninterrupted(), self._recovering():
                        self._follow_orders()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Cancels everything, after the step that runs, and frees what is on the device."""
        with self.lock, uninterrupted():
            if self.closed:
                return
            self.closed = True
            try:
                self._follow_orders()
                for request in list(self._unfinished):
                    self._finish(request, "cancelled")
            finally:
                self._in_flight.clear()
                self.runner.close()

    @contextmanager
    def borrowed_pages(self, count: int) -> Iterator[list[int]]:
        """Pages for a sequence outside of any request, at most all of the cache; nothing else runs
        meanwhile. Requests that have to give theirs up run again later.

        Raises:
            RuntimeError: the model has been closed.
        """
        with self.lock:
            self._check_open()
            with self._recovering():
                with uninterrupted():
                    while self._in_flight:
                        self._read(*self._in_flight.popleft())
                    pages = self.scheduler.make_room(count)
                yield pages
                self.scheduler.allocator.release(pages)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this LLM has been closed; load it again")

    def _follow_orders(self) -> None:
        while self._orders:
            request, end = self._orders[0]  # taken out when it is done
            if not end and request not in self._unfinished and request.finish_reason is None:
                self._unfinished[request] = None
                self.scheduler.add(request)
            elif end and request in self._unfinished:
                self._finish(request, "cancelled")
            self._orders.popleft()

    def _step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            self._in_flight.append((step, self._dispatch(step)))
        if self._in_flight and (step is None or len(self._in_flight) > self.ahead):
            self._read(*self._in_flight.popleft())
        elif step is None:
            assert not self.scheduler.waiting, "requests wait, and nothing can be planned"

    def _dispatch(self, step: Step) -> list[Drawn]:
        results = [self.runner.prefill(prefill) for prefill in step.prefills]
        if step.decode is not None:
            results.append(self.runner.decode(step.decode))
        for drawn in results:
            drawn.tokens.copy_to_host_async()
        return results

    def _read(self, step: Step, results: list[Drawn]) -> None:
        for prefill, drawn in zip(step.prefills, results, strict=False):
            if prefill.last:
                self._read_rows([prefill.request], drawn)
        if step.decode is not None:
            self._read_rows(step.decode.requests, results[-1])

    def _read_rows(self, requests: Sequence[Request], drawn: Drawn) -> None:
        tokens = self.runner.read(drawn.tokens).reshape(-1, drawn.tokens.shape[-1])
        # What is no token is negative, and no token comes behind it.
        counts = (tokens >= 0).sum(axis=0).tolist()
        broken = (tokens == NOT_A_NUMBER).any(axis=0).tolist()
        logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        if any(request.sampling.logprobs is not None for request in requests):
            parts = (drawn.logprobs, drawn.best, drawn.best_logprobs)
            likely = (
                array.reshape(*tokens.shape, *array.shape[drawn.tokens.ndim :])
                for array in map(self.runner.read, parts)
            )
            logprobs = _logprobs(requests, tokens, *likely)
        now = time.perf_counter()
        for row, request in enumerate(requests):
            # It may have ended in a step that was read after this one was dispatched.
            if request.finish_reason is None:
                with self._failing_alone(request):
                    column = tokens[: counts[row], row].tolist()
                    self._take(request, column, logprobs[row], broken[row], now)

    def _take(
        self,
        request: Request,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        broken: bool,
        now: float,
    ) -> None:
        """New tokens of a request; ``broken`` if the logits behind them were not numbers."""
        reason = request.take(tokens, logprobs, now)
        self.scheduler.read(request)
        if tokens and request.news is not None:
            request.news.append(request)
        if reason is not None:
            self._finish(request, reason)
        elif broken:
            position = len(request.tokens)
            error = f"the logits of the token at position {position} are not finite"
            self._finish(request, "error", error)

    @contextmanager
    def _failing_alone(self, request: Request) -> Iterator[None]:
        """An error in the block, of a tokenizer, say, is one request's affair."""
        try:
            yield
        except Exception as error:
            logger.exception("a request failed")
            self._finish(request, "error", f"{type(error).__name__}: {error}")

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.text is not None:
            # What failed may be the tokenizer, which would fail again.
            failed = reason in ("error", "cancelled")
            with suppress(Exception) if failed else nullcontext():
                request.text.finish()
            if request.text.found is not None and not failed:
                reason = "stop"  # it can be complete only now, at the end of broken characters
        request.error, request.finish_reason = error, reason
        self.scheduler.remove(request)
        del self._unfinished[request]
        if request.news is not None:
            request.news.append(request)

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Clears away what a block leaves that fails, now or, if that fails too, before the next
        one."""
        if self._broken:
            self._recover()
        try:
            yield
        except BaseException as error:
            if self.processes is None:
                self._recover()
            else:
                self.processes.explain(error)
            raise

    def _recover(self) -> None:
        """After a step that failed somewhere: what is on the device counts no more."""
        self._broken = True
        self._in_flight.clear()
        self._unfinished = {r: None for r in self._unfinished if r.finish_reason is None}
        self.scheduler.restart(self._unfinished)
        for request in list(self._unfinished):
            with self._failing_alone(request):
                request.mend()
                reason = request.end()
                if reason is not None:
                    self._finish(request, reason)
        self.runner.reset()
        self._broken = False


def _logprobs(
    requests: Sequence[Request], tokens: Any, chosen: Any, best: Any, best_logprobs: Any
) -> list[list[TokenLogprob]]:
    """Of each request what it asked for, an entry a token; the arrays are [n, B] and [n, B, K]."""
    found: list[list[TokenLogprob]] = []
    for row, request in enumerate(requests):
        count = request.sampling.logprobs
        if count is None:
            found.append([])
            continue
        columns = (
            tokens[:, row],
            chosen[:, row],
            best[:, row, :count],
            best_logprobs[:, row, :count],
        )
        entries = zip(*(column.tolist() for column in columns), strict=True)
        found.append(
            [
                TokenLogprob(token, logprob, tuple(zip(words, others, strict=True)))
                for token, logprob, words, others in entries
            ]
        )
    return found
