"""Two processes give the tokens of one, and none of them outlives another one for long."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.engine import process_worker
from tests.engine.process_worker import values

pytest.importorskip("torch", reason="tiny models are made by transformers")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 15  # in which the others end
COUNT = "--xla_force_host_platform_device_count"
full = pytest.mark.full


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    dense = tiny.make("gqa", folder / "dense", num_hidden_layers=1)
    groups = tiny.groups("separate")
    tiny.decompose(dense, folder / "dense", folder / "low-rank", groups)
    return str(folder / "low-rank")


class Run:
    """Processes that do a job."""

    def __init__(self, job: Path, *, devices: int = 1, processes: int = 2, **what: Any) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.job = job
        job.write_text(json.dumps(dict(port=port, processes=processes) | what))
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # The last of two values counts.
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {COUNT}={devices}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        }
        command = [sys.executable, process_worker.__file__, str(job)]
        self.processes = [
            subprocess.Popen(
                [*command, str(index)], env=environment, stderr=subprocess.PIPE, text=True
            )
            for index in range(processes)
        ]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

    def results(self) -> list[Any]:
        """By process."""
        said = [process.communicate(timeout=250)[1] for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert codes == [0] * len(codes), "\n".join(said)
        names = (self.job.with_suffix(f".{index}") for index in range(len(codes)))
        return [json.loads(name.read_text()) for name in names]

    def wait_until_it_runs(self) -> None:
        marks = [self.job.with_suffix(f".{index}.runs") for index in range(len(self.processes))]
        while not all(mark.exists() for mark in marks):
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.05)
        time.sleep(0.3)  # into the endless part

    def check_others(self, victim: int, words: str, since: float) -> None:
        """All but one process end in time, saying that."""
        for index, process in enumerate(self.processes):
            if index != victim:
                said = process.communicate(timeout=SECONDS + 30)[1]
                assert time.monotonic() - since < SECONDS, said
                assert process.returncode != 0
                assert f"deinfer_jax: process {victim} {words}" in said


@cache
def alone(path: str, strategy: str, devices: int) -> dict[str, Any]:
    return values(path, strategy, devices, scores=devices > 1)


@pytest.mark.parametrize(
    ("devices", "strategies"),
    [
        (1, ["low_rank"]),
        pytest.param(1, ["sharded", "naive", "dense"], marks=full),
        pytest.param(2, ["low_rank", "sharded"], marks=full),
    ],
    ids=["two devices", "two devices, others", "four devices"],
)
def test_values(model: str, tmp_path: Path, devices: int, strategies: list[str]) -> None:
    with Run(
        tmp_path / "job", devices=devices, work="values", path=model, strategies=strategies
    ) as run:
        single = alone(model, "low_rank", 1)
        expected = {name: alone(model, name, 2 * devices) for name in strategies}
        results = run.results()
    for strategy, together in expected.items():
        first, second = (found[strategy] for found in results)
        assert first == second
        once, again = first["unseeded"]
        assert once != again
        assert first["preemptions"] > 0
        for name in ("greedy", "sampled", "filtered"):
            assert first[name] == together[name] == single[name], (strategy, name)
        for name in ("score", "logits"):
            np.testing.assert_allclose(first[name], together[name], rtol=0, atol=1e-4)


def test_errors(model: str, tmp_path: Path) -> None:
    with Run(tmp_path / "job", work="errors", path=model) as run:
        first, second = run.results()
    assert "same max_batch in all processes, got 3 in process 0 and 4" in first["argument"]
    assert "process 1 failed: FileNotFoundError" in first.pop("missing")
    assert "FileNotFoundError" in second.pop("missing")
    assert "expected devices of all 2 processes" in second.pop("some")
    first.pop("some")
    assert first == second
    assert "ValueError: prompt 1: expected token ids" in first["prompt"]
    assert "ValueError: score: expected at most" in first["long"]
    assert first["stream"].startswith("NotImplementedError")
    assert first["engine"].startswith("NotImplementedError")
    assert first["alone"] == "nothing"


DEATHS = {signal.SIGKILL: "died", signal.SIGSTOP: "died or hangs"}


def kill(runs: list[tuple[Run, int]], number: Any) -> None:
    for run, _ in runs:
        run.wait_until_it_runs()
    since = time.monotonic()
    for run, victim in runs:
        run.processes[victim].send_signal(number)
    for run, victim in runs:
        run.check_others(victim, DEATHS[number], since)


def test_death(model: str, tmp_path: Path) -> None:
    with Run(tmp_path / "job", work="endless", path=model, silence=3.0) as run:
        kill([(run, 1)], signal.SIGKILL)


@full
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("number", DEATHS)
def test_every_death(model: str, tmp_path: Path, number: Any, processes: int) -> None:
    job: dict[str, Any] = dict(processes=processes, work="endless", path=model)
    # Two runs at a time, since most of it is waiting.
    with Run(tmp_path / "first", **job) as first, Run(tmp_path / "last", **job) as last:
        kill([(first, 0), (last, processes - 1)], number)


@full
@pytest.mark.parametrize(
    ("what", "victim", "words"),
    [
        ("fails", 0, "failed: OutOfDeviceMemory: no room here"),
        ("fails", 1, "failed: OutOfDeviceMemory: no room here"),
        ("leaves", 0, "has ended"),
        ("leaves", 1, "has ended"),
    ],
)
def test_failure(model: str, tmp_path: Path, what: str, victim: int, words: str) -> None:
    with Run(tmp_path / "job", work="endless", path=model, **{what: victim}) as run:
        run.wait_until_it_runs()
        run.check_others(victim, words, time.monotonic())
        # Nor does it wait for them, as JAX would.
        run.processes[victim].wait(SECONDS)


@full
def test_interrupt(model: str, tmp_path: Path) -> None:
    with Run(tmp_path / "job", work="endless", path=model) as run:
        run.wait_until_it_runs()
        since = time.monotonic()
        run.processes[1].send_signal(signal.SIGINT)
        run.check_others(1, "failed: KeyboardInterrupt", since)
