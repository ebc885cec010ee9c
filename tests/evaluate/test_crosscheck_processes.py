"""A side's process: what it says when it fails, and that nothing of it is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deinfer_jax.evaluate.crosscheck.processes import SideFailed, run_side

# Starts a child that writes its process id and sleeps; then does what the test says.
WITH_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(100)
''', sys.argv[1]])
import pathlib
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def run(code: str, *arguments: str, timeout: float = 30.0) -> None:
    run_side(
        "other",
        [sys.executable, "-c", code, *arguments],
        environment=os.environ,
        timeout=timeout,
    )


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_success_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run("import sys; print('hello'); print('warning', file=sys.stderr)")
    assert capfd.readouterr() == ("", "")


def test_environment_is_the_given_one() -> None:
    code = "import os, sys; sys.exit(os.environ['ONLY'] != 'this' or 'HOME' in os.environ)"
    run_side("other", [sys.executable, "-c", code], environment={"ONLY": "this"}, timeout=30)


def test_last_line_is_passed_on() -> None:
    code = "import sys; print('a warning\\nrank 2 is dead\\n', file=sys.stderr); sys.exit(1)"
    with pytest.raises(SideFailed, match=r"^the other side failed with status 1: rank 2 is dead$"):
        run(code)


def test_silent_failure() -> None:
    with pytest.raises(SideFailed, match=r"^the other side failed with status 7$"):
        run("import sys; sys.exit(7)")


def test_ended_by_a_signal() -> None:
    with pytest.raises(SideFailed, match=r"^the other side was ended by SIGKILL: before$"):
        run("import os; print('before', flush=True); os.kill(os.getpid(), 9)")


def test_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(SideFailed, match=r"expected an answer within 1.5 s, got none: busy$"):
        run("import time; print('busy', flush=True); time.sleep(100)", timeout=1.5)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(3)", 3), ("time.sleep(100)", None), ("", 0)]
)
def test_children_are_ended_too(tmp_path: Path, end: str, status: int | None) -> None:
    file = tmp_path / "pid"
    if status == 0:
        run(WITH_CHILD + end, str(file))
    else:
        with pytest.raises(SideFailed):
            run(WITH_CHILD + end, str(file), timeout=30.0 if status else 3.0)
    assert within(5, lambda: gone(int(file.read_text())))


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    file, wait, calls = tmp_path / "pid", subprocess.Popen.wait, []

    def interrupted(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        calls.append(timeout)
        if len(calls) == 1:
            assert within(20, file.exists)
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(WITH_CHILD + "time.sleep(100)", str(file))
    assert within(5, lambda: gone(int(file.read_text())))
