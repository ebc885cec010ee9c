"""The loop: schedule, dispatch, read back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from deinfer_jax.engine.programs import IDLE
from deinfer_jax.engine.request import Request
from deinfer_jax.engine.runner import Runner
from deinfer_jax.engine.sampler import NOT_A_NUMBER
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep, Scheduler

__all__ = ["Engine"]

Step = PrefillStep | DecodeStep


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

    def run(
        self, requests: Sequence[Request], on_token: Callable[[Request], None] | None = None
    ) -> None:
        """Runs the requests to their end; results are in the requests.

        Args:
            requests: queued in order.
            on_token: called after each token that a request got.

        Raises:
            ValueError: a request does not fit in the cache; none has run then.
            OutOfDeviceMemory: a program did not fit; unfinished requests are dropped.
        """
        for request in requests:
            self.scheduler.check_fits(request)
        for request in requests:
            request.times.append(time.perf_counter())
            self.scheduler.add(request)
        in_flight: deque[tuple[Step, jax.Array]] = deque()
        try:
            while True:
                step = self.scheduler.schedule()
                if step is not None:
                    in_flight.append((step, self._dispatch(step)))
                if not in_flight:
                    return
                if step is None or len(in_flight) > self.ahead:
                    self._read(*in_flight.popleft(), on_token)
        except BaseException:
            self.scheduler.drop_all()
            raise

    def _dispatch(self, step: Step) -> jax.Array:
        if isinstance(step, PrefillStep):
            result = self.runner.prefill(step)
        else:
            result = self.runner.decode(step)
        result.copy_to_host_async()
        return result

    def _read(
        self, step: Step, result: jax.Array, on_token: Callable[[Request], None] | None
    ) -> None:
        tokens = np.asarray(result)
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
                    if on_token is not None:
                        on_token(request)

    def _take(self, request: Request, token: int, now: float) -> None:
        sampling = request.sampling
        if token == NOT_A_NUMBER:
            position = len(request.prompt) + len(request.generated)
            request.error = f"the logits of the token at position {position} are not finite"
            request.finish_reason = "error"
            self.scheduler.finish(request)
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
