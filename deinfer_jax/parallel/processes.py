"""Several processes, joined by ``jax.distributed``, that a model is spread over.

Every process runs the same script and makes the same calls on the model; what counts are the
arguments of process 0, which the others get through the key-value store of JAX's coordinator. From
there on they take the same decisions by themselves: scheduler and page allocator read nothing but
the requests and the tokens, which are the same everywhere.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax._src import distributed

from deinfer_jax.parallel.mesh import Placement
from deinfer_jax.parallel.watch import Watch

__all__ = ["Processes", "join", "told_to_others"]

WAIT_MS = 1000  # of one look for a key; in between Ctrl-C is heard


class Processes:
    """All processes of the run. Made once, by :func:`join`.

    Attributes:
        index: of this process.
        count: of processes.
    """

    def __init__(self, client: Any, address: str, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._client = client
        self._watch = Watch(client, address, index, count)
        self._calling = threading.Lock()
        self._caller: int | None = None  # thread
        self._deleted = 0

    @contextmanager
    def call[Value](self, what: str, make: Callable[[], Value]) -> Iterator[Value]:
        """A block that all processes run with what process 0 has made; an error of ``make`` there
        is raised in all of them. Ctrl-C in the block ends the run, an exception does not by itself:
        one that process 0's arguments cause comes in all of them, for others see ``explain``.

        Args:
            what: name of the call, which has to be the same everywhere.
            make: called in process 0 only; its result is pickled.

        Raises:
            RuntimeError: another thread is in a call, process 0 makes another one, or the run has
                failed.
        """
        if not self._calling.acquire(blocking=False):
            raise RuntimeError(
                f"{what}: expected one call at a time of a model that is spread over several "
                "processes, since the order of two could differ between them"
            )
        watch = self._watch
        try:
            if watch.failed is not None:
                raise RuntimeError(f"{what}: the run over several processes failed: {watch.failed}")
            watch.busy = True
            called, value, error = self._broadcast(what, make)
            if called != what:
                different = RuntimeError(
                    f"expected the same calls in all processes, got {what} in process "
                    f"{self.index} and {called} in process 0"
                )
                watch.fail(different)
                raise different
            if error is not None:
                raise error
            self._caller = threading.get_ident()
            yield value
        except Exception:
            raise
        except BaseException as error:
            watch.fail(error)
            raise
        finally:
            self._caller, watch.busy = None, False
            self._calling.release()

    def check_called(self) -> None:
        """Raises NotImplementedError outside of ``call``, where requests would be this process's
        only."""
        if self._caller != threading.get_ident():
            raise NotImplementedError(
                "requests to a model that is spread over several processes: expected them through "
                "generate without stream, which gives all processes the same ones"
            )

    def gather(self, key: str, value: Any) -> list[Any]:
        """Everybody's values, by process.

        Args:
            key: of this occasion.
            value: of this process, picklable.

        Raises:
            RuntimeError: a process has failed before it came here; the error has its number.
        """
        self._client.key_value_set_bytes(f"{key}/{self.index}", pickle.dumps((value, None)))
        found = []
        self._watch.busy = True
        try:
            for index in range(self.count):
                one, error = pickle.loads(self._get(f"{key}/{index}"))
                if error is not None:
                    raise RuntimeError(f"process {index} failed: {error}")
                found.append(one)
        finally:
            self._watch.busy = False
        return found

    def explain(self, error: BaseException) -> None:
        """After an error in what all processes compute together. If another one is its cause, this
        one ends here with that one's number on stderr; if not, the others are told, so that they
        end, and the caller raises it."""
        self._watch.explain(error)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot go on, so that they end."""
        self._watch.fail(error)

    def _broadcast[Value](
        self, what: str, make: Callable[[], Value]
    ) -> tuple[str, Value, Exception | None]:
        key = f"deinfer/calls/{self._watch.calls}"
        if self.index == 0:
            self._client.key_value_set_bytes(key, _outcome(what, make))
            while self._deleted < self._watch.received:
                self._client.key_value_delete(f"deinfer/calls/{self._deleted}")
                self._deleted += 1
        data = self._get(key)
        self._watch.calls += 1
        return pickle.loads(data)

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _outcome(what: str, make: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((what, make(), None))
    except Exception as error:
        with suppress(Exception):
            data = pickle.dumps((what, None, error))
            pickle.loads(data)  # some exceptions can be written and not read
            return data
        return pickle.dumps((what, None, RuntimeError(f"{type(error).__name__}: {error}")))


_joined: Processes | None = None
_loads = itertools.count()
_load = 0  # the one that runs, counted the same in all processes
_agreed = -1  # the last one whose processes have met in `join`


def join(
    placement: Placement, facts: dict[str, Any], available: int | None
) -> tuple[Processes | None, int | None]:
    """What a model's processes have to know of each other before they load it.

    Args:
        placement: of the model.
        facts: what has to be the same in all of them, by name.
        available: bytes of the device, None where it does not say.

    Returns:
        The processes, None where the model is on this one's devices only, and the bytes of the
        device that has the fewest.

    Raises:
        ValueError: facts differ.
        RuntimeError: another process has failed.
    """
    global _joined, _agreed
    if len(placement.processes) == 1:
        return None, available
    state = distributed.global_state
    assert state.client is not None and state.coordinator_address is not None
    if _joined is None:
        address = state.coordinator_address
        _joined = Processes(state.client, address, jax.process_index(), jax.process_count())
    texts = {name: repr(value) for name, value in facts.items()}
    everybody = _joined.gather(_load_key(), (texts, available))
    expected = everybody[0][0]
    for index, (others, _) in enumerate(everybody):
        for name, text in others.items():
            if text != expected[name]:
                raise ValueError(
                    f"load: expected the same {name} in all processes, got {expected[name]} in "
                    f"process 0 and {text} in process {index}"
                )
    _agreed = _load
    known = [room for _, room in everybody if room is not None]
    return _joined, min(known, default=None)


def told_to_others[**Arguments, Value](
    load: Callable[Arguments, Value],
) -> Callable[Arguments, Value]:
    """For what calls ``join``: an error in one process reaches those that wait for it."""

    @functools.wraps(load)
    def telling(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        global _load
        client = distributed.global_state.client
        if client is None:
            return load(*args, **kwargs)
        _load = next(_loads)
        try:
            return load(*args, **kwargs)
        except Exception as error:
            if _joined is not None and _agreed == _load:  # the others have gone on
                _joined.fail(error)
            with suppress(jax.errors.JaxRuntimeError):  # there is one: all know what is wrong
                words = f"{type(error).__name__}: {error}"
                key = f"{_load_key()}/{distributed.global_state.process_id}"
                client.key_value_set_bytes(key, pickle.dumps((None, words)))
            raise

    return telling


def _load_key() -> str:
    return f"deinfer/loads/{_load}"
