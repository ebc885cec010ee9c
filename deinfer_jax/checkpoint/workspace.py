"""A directory that a long run keeps its finished work in, so that it can go on after an end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from deinfer_jax.checkpoint.source import UNFINISHED

__all__ = ["Workspace", "sync"]

LOCK, WRITING = "lock", "writing"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
RUST_ERROR = re.compile(r"os error (\d+)")  # how safetensors and tokenizers report the system's


class Workspace:
    """One run's directory: locked, marked with the run's fingerprint, files whole or not there.

    Args:
        path: the directory; made where it is not there.
        fingerprint: what fixes the result of the run, as JSON values.

    Attributes:
        path: as above.
        resumed: whether it was there with the same fingerprint.

    Raises:
        ValueError: it is of a run with another fingerprint (the keys are named), or none of ours.
        BlockingIOError: another process works in it.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = self._acquire()
        self._marked = False  # known to be ours
        try:
            self.resumed = self._check_fingerprint(json.loads(json.dumps(dict(fingerprint))))
            shutil.rmtree(path / WRITING, ignore_errors=True)
            (path / WRITING).mkdir()
            self._marked = True
        except BaseException:
            self.close()
            raise

    @contextmanager
    def finished(self, file: Path, size: int) -> Iterator[Path]:
        """A temporary path that becomes ``file``, on the disk, when the block is left well.

        Args:
            file: in this directory.
            size: bytes it will take, for the message when the disk is full.
        """
        temporary = self.path / WRITING / file.name
        try:
            with self.needing(f"{size:,} bytes for {file.name}"):
                yield temporary
                temporary.chmod(0o666 & ~_umask())  # safetensors' files are the writer's alone
                sync(temporary)
                os.replace(temporary, file)
                sync(file.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def needing(self, what: str) -> Iterator[None]:
        """Says what was needed, and what to do, when the disk is full in the block.

        Raises:
            OSError: any error of the system, also those that a library reports in words.
        """
        try:
            yield
        except Exception as error:
            code = RUST_ERROR.search(str(error))
            number = error.errno if isinstance(error, OSError) else code and int(code[1])
            if number in NO_SPACE:
                free = shutil.disk_usage(self.path).free
                raise OSError(
                    number,
                    f"{self.path}: the disk is full: expected {what}, got {free:,} bytes free; "
                    "finished parts are kept, make space and run the same command to go on",
                ) from error
            if number is not None and not isinstance(error, OSError):
                raise OSError(number, f"{self.path}: {error}") from error
            raise

    def write_arrays(self, file: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save_file

        # safetensors writes the memory as it lies, whatever the strides say.
        whole = {name: np.require(array, requirements="C") for name, array in arrays.items()}
        with self.finished(file, sum(array.nbytes for array in whole.values())) as temporary:
            save_file(whole, temporary)

    def write_json(self, file: Path, value: Any) -> None:
        """Writes a JSON file."""
        raw = json.dumps(value, indent=2).encode() + b"\n"
        with self.finished(file, len(raw)) as temporary:
            temporary.write_bytes(raw)

    def close(self) -> None:
        """Lets go of the directory; what is finished stays. Where nothing is, the directory goes
        too: its mark would only refuse the same run with its mistake put right."""
        if self._lock is None:
            return
        files = (path for path in self.path.rglob("*") if not path.is_dir())
        if self._marked and all(path.name in (UNFINISHED, LOCK) for path in files):
            self.delete()
        else:
            self._unlock()

    def delete(self) -> None:
        """Deletes the directory, the mark last, so that it is known for what it is until then."""
        if not self.path.is_dir():  # it went with a directory around it
            self._unlock()
            return
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in (UNFINISHED, LOCK):
                entry.unlink()
        (self.path / UNFINISHED).unlink()
        (self.path / LOCK).unlink()
        with suppress(OSError):  # another process has just opened a lock in it
            self.path.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> IO[str]:
        """The lock, which the system takes back when the process ends, however it does."""
        lock = (self.path / LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise BlockingIOError(
                error.errno,
                f"{self.path}: expected to be alone in it, but process {holder} is writing it; "
                "wait for it or end it",
            ) from error
        except BaseException:
            lock.close()
            raise
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _check_fingerprint(self, ours: dict[str, Any]) -> bool:
        """Whether an earlier run with this fingerprint was here; marks a new directory with it."""
        marker = self.path / UNFINISHED
        if not marker.is_file():
            # New, or its run ended before it was marked.
            others = {entry.name for entry in self.path.iterdir()} - {LOCK, WRITING}
            if others:
                raise ValueError(
                    f"{self.path}: expected an empty directory or one with {UNFINISHED}, found "
                    f"{', '.join(sorted(others)[:10])}; move it away or choose another destination"
                )
            (self.path / WRITING).mkdir(exist_ok=True)
            self.write_json(marker, ours)
            return False
        theirs = json.loads(marker.read_bytes())
        differing = [
            f"{key}: expected {theirs.get(key)!r}, got {ours.get(key)!r}"
            for key in dict.fromkeys([*theirs, *ours])
            if (key in theirs, theirs.get(key)) != (key in ours, ours.get(key))
        ]
        if differing:
            raise ValueError(
                f"{self.path} is of a run with other settings ({'; '.join(differing)}); repeat "
                f"those to go on from there, or delete {self.path} to start anew"
            )
        return True


def _umask() -> int:
    """The process's mask of file modes, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
