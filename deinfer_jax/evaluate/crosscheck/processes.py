"""Runs a side in a process of its own, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

__all__ = ["SideFailed", "run_side"]

GRACE = 3.0  # seconds to end in, before a process is killed


class SideFailed(RuntimeError):
    """A side of a cross-check ended without an answer; the message is its own."""


def run_side(
    name: str, command: Sequence[str], *, environment: Mapping[str, str], timeout: float
) -> None:
    """Runs a command to its end. When this returns or raises, the command and all processes that it
    started are gone.

    Args:
        name: of the side, for messages.
        command: program and arguments.
        environment: of the process.
        timeout: seconds.

    Raises:
        SideFailed: it gave another exit status than 0, or took longer than ``timeout``.
    """
    with tempfile.TemporaryFile() as errors:
        # A session of its own, so that Ctrl-C is ours to handle, and its ranks can be found.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise SideFailed(
                f"the {name} side: expected an answer within {timeout:g} s, got none{_said(errors)}"
            ) from None
        finally:
            _end(process)
        if status < 0:
            kind = signal.Signals(-status).name
            raise SideFailed(f"the {name} side was ended by {kind}{_said(errors)}")
        if status > 0:
            raise SideFailed(f"the {name} side failed with status {status}{_said(errors)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, if it runs, and whoever is left of its session."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _said(errors: IO[bytes]) -> str:
    """The last line that the process wrote, to be put behind a message."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return f": {last}" if last else ""
