"""Ctrl-C at a moment that suits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["noted_ctrl_c", "uninterrupted"]


class Note:
    """Whether Ctrl-C has come.

    Attributes:
        asked: so far.
    """

    def __init__(self) -> None:
        self.asked = False


class Held:
    """Signals that wait for their handler.

    Not functions inside `uninterrupted`: where annotations are checked, each of those is compiled
    anew whenever it is defined, which took as long as a step of a small model.

    Args:
        handler: of the signals.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.signals: list[tuple[int, FrameType | None]] = []

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal by keeping it, but the second one and what came before it at once."""
        self.signals.append((number, frame))
        if len(self.signals) > 1:
            self.deliver()

    def deliver(self) -> None:
        """Gives the handler all that waits."""
        while True:
            try:
                one = self.signals.pop(0)
            except IndexError:  # a signal that came meanwhile may have delivered all
                return
            self.handler(*one)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds the first SIGINT back until the block is left, whatever handles it then; a second one
    goes through. Python runs handlers in the main thread, so elsewhere there is nothing to do."""
    before = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(before):
        yield
        return
    held = Held(before)
    signal.signal(signal.SIGINT, held.hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        held.deliver()


@contextmanager
def noted_ctrl_c() -> Iterator[Note]:
    """Notes the first Ctrl-C instead of raising KeyboardInterrupt; a second one raises. Only in the
    main thread, and only where nobody else handles it."""
    note = Note()
    default = signal.default_int_handler
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield note
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if note.asked:
            default(number, frame)
        note.asked = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield note
    finally:
        signal.signal(signal.SIGINT, default)
