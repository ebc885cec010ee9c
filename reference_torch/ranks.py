"""Starts the ranks of a group as processes of this machine, and watches them.

    tokens = launch(work, 4, "path/to/checkpoint")      # work(group, path), in every rank

A rank that dies takes nobody with it by itself: the others would wait in a collective for ever. A
rank that hangs looks like those that wait for it. So every rank counts its steps where this process
can see it: if nobody's count moves, the one that is behind is the one that hangs. For Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference_torch.group import Group, LostContact

__all__ = ["RankError", "launch"]

START_UP = 60.0  # seconds for importing torch
# Seconds between two steps. On a GPU some of them load libraries, connect GPUs or plan a kernel.
PATIENCE = {"cpu": 10.0, "cuda": 60.0}
GRACE = 1.0  # seconds in which the cause of a failure shows, among what it causes in other ranks
FOREVER = timedelta(days=1)  # torch's own limit names no rank


class RankError(RuntimeError):
    """A rank died, hung, or raised something; the message has its number.

    Attributes:
        rank: the number.
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


class _Report(NamedTuple):
    """How a rank ended: "done" with what it found, or, with words, because of "bad" input or a
    "missing" file, "failed" otherwise, or "lost" in a collective."""

    kind: str
    value: Any


def launch(
    work: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    device: str = "cpu",
    patience: float | None = None,
) -> Any:
    """Runs ``work(group, *arguments)`` in every rank and returns what it returned in rank 0.

    Args:
        work: a function of a module, which the new processes import.
        ranks: how many.
        arguments: picklable.
        device: ``"cpu"`` (Gloo) or ``"cuda"`` (NCCL; rank i has GPU i).
        patience: seconds without a step of any rank after which the run ends; None = 10 on a CPU,
            60 on a GPU. Between two steps is at most a layer, a collective, the logits, or the
            reading of a tensor.

    Raises:
        ValueError: not as many devices as ranks, or ``work`` raised it.
        OSError: ``work`` raised it.
        RankError: a rank died, hung or raised something else.
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"ranks: expected at most {torch.cuda.device_count()} GPUs, got {ranks}")
    if patience is None:
        patience = PATIENCE[device]
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    steps = context.RawArray("Q", ranks)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_run,
                args=(work, rank, ranks, device, str(Path(folder) / "meet"), steps, pipe[1]),
                kwargs={"arguments": arguments},
                daemon=True,
            )
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()  # the rank has its own; what reads here then ends with it
            return _watch([receiver for receiver, _ in pipes], processes, steps, patience)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _watch(
    receivers: Sequence[Connection], processes: Sequence[Any], steps: Any, patience: float
) -> Any:
    open_ends = dict(enumerate(receivers))
    reports: dict[int, _Report] = {}
    counts, moved, failed_at = list(steps), time.monotonic(), None
    while open_ends:
        ready = wait(list(open_ends.values()), timeout=0.1)
        for rank in [rank for rank, end in open_ends.items() if end in ready]:
            reports[rank] = _received(open_ends.pop(rank), processes[rank])
        now = time.monotonic()
        if failed_at is None and any(report.kind != "done" for report in reports.values()):
            failed_at = now
        if failed_at is not None and (now - failed_at > GRACE or not open_ends):
            _raise_cause(reports)
        if list(steps) != counts:
            counts, moved = list(steps), now
        limit = patience if all(counts) else max(START_UP, patience)
        if failed_at is None and open_ends and now - moved > limit:
            behind = min(open_ends, key=lambda rank: counts[rank])
            raise RankError(
                behind, f"hangs: no step in {limit:.0f} s, after {counts[behind]} of {max(counts)}"
            )
    return reports[0].value


def _received(end: Connection, process: Any) -> _Report:
    try:
        return _Report(*pickle.loads(end.recv_bytes()))
    except EOFError:
        process.join(GRACE)
        return _Report("failed", f"died with exit code {process.exitcode}")


def _raise_cause(reports: dict[int, _Report]) -> None:
    """What failed first by itself, before what failed because of it."""
    for kinds in (("bad", "missing", "failed"), ("lost",)):
        for rank, report in reports.items():  # in the order of their arrival
            if report.kind not in kinds:
                continue
            if report.kind == "bad":
                raise ValueError(report.value)
            if report.kind == "missing":
                raise OSError(report.value)
            raise RankError(rank, report.value)


def _run(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    device: str,
    meeting: str,
    steps: Any,
    report: Connection,
    *,
    arguments: Sequence[Any],
) -> None:
    """A rank's process."""

    def beat() -> None:
        steps[rank] += 1

    def send(kind: str, value: Any) -> None:
        report.send_bytes(pickle.dumps((kind, value)))

    beat()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        beat()
        if ranks > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=ranks,
                timeout=FOREVER,
            )
        beat()
        place = f"cuda:{rank}" if device == "cuda" else "cpu"
        found = work(Group(rank, ranks, place, beat), *arguments)
        send("done", found if rank == 0 else None)
        if ranks > 1:
            dist.destroy_process_group()  # its threads would end the process with an error
    except LostContact as error:
        send("lost", f"failed in a collective: {error}")
    except ValueError as error:
        send("bad", str(error))
    except OSError as error:
        send("missing", str(error))
    except BaseException as error:
        send("failed", f"failed: {type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """Ranks that nobody watches any more would wait for each other for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
