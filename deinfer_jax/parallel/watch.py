"""Ends this process when another one of the run dies, hangs or fails, and says which.

JAX leaves the others waiting in a collective, lets it fail without a number, or aborts them a
minute later. So every process counts where all can see it, in the key-value store of JAX's
coordinator, from a thread of its own: who has stopped counting is dead or has been stopped. Neither
a long compilation nor the reading of weights stops that thread. What waits in a collective cannot
be woken by an exception, so the process is ended.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jax._src import distributed  # its store has no public name; Orbax takes it from there too

from deinfer_jax.parallel import last_words

__all__ = ["Watch"]

FOLDER = "deinfer/beats"
PERIOD = 0.5  # seconds between two beats, and between two looks at those of the others
SILENCE = 8.0  # seconds without a beat after which a process counts as dead
GRACE = 2.0  # seconds that process 0, with the store, outlives what it has to tell
FEW = 4  # looks without an answer that may be those of a slow store
LEFT = "left"


class _Beat(NamedTuple):
    """What a process tells: how often it has, the calls it has received, and how it ends: "" not
    yet, LEFT in order, else what the others are to say and end with."""

    count: int
    calls: int
    word: str


class Watch:
    """Its threads: one beats and hears the others, another one judges, should the first hang.

    Args:
        client: of JAX's coordinator.
        address: of the coordinator.
        index: of this process.
        count: of processes.

    Attributes:
        busy: whether the others are needed, so that none of them may have left.
        calls: received so far by this process.
        failed: what has gone wrong in this process.
    """

    def __init__(self, client: Any, address: str, index: int, count: int) -> None:
        self.client, self.index, self.count = client, index, count
        self.busy, self.calls = False, 0
        self.failed: str | None = None
        self._word, self._rounds = "", 0
        self._heard: dict[int, _Beat] = {}
        self._last_words = None if index == 0 else _start_last_words(address, index)
        self._beat()  # from now on this process is watched
        atexit.register(self._leave)  # called before JAX's own, which waits for the others
        self._flushing = threading.Event()
        for target in (self._keep_beating, self._judge, self._limit_flushing):
            threading.Thread(target=target, daemon=True, name=f"deinfer {target.__name__}").start()

    @property
    def received(self) -> int:
        """Calls that all processes have received."""
        heard = [beat.calls for index, beat in self._heard.items() if index != self.index]
        return min(heard) if len(heard) == self.count - 1 else 0

    def explain(self, error: BaseException) -> None:
        """See ``Processes.explain``."""
        if isinstance(error, Exception) and self.failed is None:
            # A lost peer shows as a failed collective at once, and as silence later.
            time.sleep(SILENCE + 4 * PERIOD)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot go on; it ends as soon as Python does."""
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            self._word = f"process {self.index} failed: {self.failed}"
            time.sleep(2 * PERIOD)

    @property
    def _over(self) -> bool:
        """Whether the user has shut ``jax.distributed`` down."""
        return distributed.global_state.client is not self.client

    def _keep_beating(self) -> None:
        while not self._over:
            time.sleep(PERIOD)
            with suppress(Exception):  # of a store that does not answer; _judge counts the rounds
                self._beat()

    def _beat(self) -> None:
        beat = _Beat(self._rounds, self.calls, self._word)
        self.client.key_value_set(f"{FOLDER}/{self.index}", json.dumps(beat), allow_overwrite=True)
        for key, value in self.client.key_value_dir_get(f"{FOLDER}/"):
            self._heard[int(key.rpartition("/")[2])] = _Beat(*json.loads(value))
        self._rounds += 1

    def _judge(self) -> None:
        # Looks rather than seconds: if this process was stopped itself, the others are not silent.
        unheard, silent, missed = 0, Counter[int](), Counter[int]()
        rounds, counts = self._rounds, dict[int, int]()
        while not self._over:
            time.sleep(PERIOD)
            unheard = unheard + 1 if self._rounds == rounds else 0
            heard = {index: beat for index, beat in self._heard.items() if index != self.index}
            for index, beat in heard.items():
                if counts.get(index) != beat.count:
                    silent[index] = 0
                elif unheard < FEW:
                    silent[index] += 1
                missed[index] = missed[index] + 1 if self.busy and beat.word == LEFT else 0
            rounds = self._rounds
            counts = {index: beat.count for index, beat in heard.items()}
            verdict = self._verdict(heard, unheard, silent, missed)
            if verdict is not None and not self._over:
                self._end(verdict)

    def _verdict(
        self,
        heard: dict[int, _Beat],
        unheard: int,
        silent: Counter[int],
        missed: Counter[int],
    ) -> str | None:
        """Who is to blame for what; the counts are of looks: without an answer of the store, and by
        process without a beat, and needed though it had left."""
        for beat in heard.values():
            if beat.word not in ("", LEFT):
                return beat.word
        for index, beat in heard.items():
            if missed[index] * PERIOD >= SILENCE:
                return f"process {index} has ended, and the others still need it"
            if beat.word != LEFT and silent[index] * PERIOD >= SILENCE:
                return f"process {index} died or hangs: not heard of for {SILENCE:.0f} s"
        if self.index > 0 and unheard * PERIOD >= SILENCE:
            return f"process 0 died or hangs: its coordinator has not answered for {SILENCE:.0f} s"
        return None

    def _end(self, verdict: str) -> None:
        if self.failed is None:  # else its traceback has the cause
            self._word = verdict
            with suppress(Exception):
                line = f"deinfer_jax: {verdict}; process {self.index} ends too\n"
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
        self._exit()

    def _exit(self) -> None:
        time.sleep(GRACE if self.index == 0 else 2 * PERIOD)  # to be heard by the others
        self._say_nothing_later()
        self._flushing.set()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    def _limit_flushing(self) -> None:
        # What was printed is to be seen, unless nobody reads it. A thread that waits, since none
        # can be started any more when Python is ending.
        self._flushing.wait()
        time.sleep(1.0)
        os._exit(1)

    def _leave(self) -> None:
        if self._over:
            return
        if self.failed is not None:
            self._exit()  # JAX would wait for the others, which end without it
        self._word = self._word or LEFT
        self._say_nothing_later()

    def _say_nothing_later(self) -> None:
        if self._last_words is not None and self._last_words.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._last_words.stdin.write(b"done\n")
                self._last_words.stdin.close()
                self._last_words.wait(1.0)
            self._last_words = None


def _start_last_words(address: str, index: int) -> subprocess.Popen[bytes]:
    host, _, port = address.rpartition(":")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(last_words.__file__)), host.strip("[]"), port]
        + [str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
