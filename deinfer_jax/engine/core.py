"""The loop: schedule, dispatch, read back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import jax

from deinfer_jax.engine.memory import OutOfDeviceMemory
from deinfer_jax.engine.programs import IDLE
from deinfer_jax.engine.request import Request
from deinfer_jax.engine.runner import Runner
from deinfer_jax.engine.sampler import NOT_A_NUMBER
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep, Scheduler

__all__ = ["Engine"]

Step = PrefillStep | DecodeStep
InFlight = deque[tuple[Step, jax.Array]]


class Engine:
    """Runs requests to their end.

    Args:
        runner: dispatches steps to the device.
        scheduler: says which.
        ahead: steps dispatched before the oldest is read back: 1 on a GPU, whose queue then never
            runs dry; 0 on a CPU, where simulated devices deadlock if programs queue up.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, *, ahead: int) -> None:
        self.runner, self.scheduler, self.ahead = runner, scheduler, ahead
        self.lock = threading.Lock()  # held while pools and state are in use

    def run(self, requests: Sequence[Request]) -> None:
        """Runs the requests to their end; results are in the requests.

        A request whose logits are not numbers, or whose step ran out of device memory, ends with
        ``finish_reason`` "error"; the others go on. Calls from several threads take turns.

        Args:
            requests: queued in order.

        Raises:
            ValueError: a request does not fit in the cache; none has run then.
        """
        for request in requests:
            self.scheduler.check_fits(request)
        with self.lock:
            for request in requests:
                request.times.append(time.perf_counter())
                self.scheduler.add(request)
            in_flight: InFlight = deque()
            try:
                while self._advance(in_flight):
                    pass
            except BaseException:
                self.scheduler.drop_all()
                self.runner.reset()
                raise

    def _advance(self, in_flight: InFlight) -> bool:
        """Dispatches a step, reads one back, or both; False if there is nothing left to do."""
        try:
            step = self.scheduler.schedule()
            if step is not None:
                in_flight.append((step, self._dispatch(step)))
            if not in_flight:
                return False
            if step is None or len(in_flight) > self.ahead:
                self._read(*in_flight.popleft())
        except OutOfDeviceMemory as error:
            in_flight.clear()
            self.runner.reset()  # the failed program took pools and state with it
            for request in list(self.scheduler.running):
                self._fail(request, str(error))
        return True

    def _dispatch(self, step: Step) -> jax.Array:
        if isinstance(step, PrefillStep):
            result = self.runner.prefill(step)
        else:
            result = self.runner.decode(step)
        result.copy_to_host_async()
        return result

    def _read(self, step: Step, result: jax.Array) -> None:
        tokens = self.runner.read(result)
        if isinstance(step, PrefillStep):
            columns = [(step.request, tokens.reshape(1))] if step.last else []
        else:
            columns = [(request, tokens[:, j]) for j, request in enumerate(step.requests)]
        now = time.perf_counter()
        for request, column in columns:
            for token in column.tolist():
                # A request may have ended in a step that was read after this one was dispatched.
                if request.finish_reason is None and token != IDLE:
                    self._take(request, token, now)

    def _fail(self, request: Request, error: str) -> None:
        request.error, request.finish_reason = error, "error"
        self.scheduler.finish(request)

    def _take(self, request: Request, token: int, now: float) -> None:
        sampling = request.sampling
        if token == NOT_A_NUMBER:
            position = len(request.prompt) + len(request.generated)
            self._fail(request, f"the logits of the token at position {position} are not finite")
            return
        request.generated.append(token)
        request.times.append(now)
        if token in sampling.eos_token_ids:
            request.finish_reason = "eos"
        elif token in sampling.stop_token_ids:
            request.finish_reason = "stop"
        elif len(request.generated) == sampling.max_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            self.scheduler.finish(request)
