"""Ranks that work, die, hang and fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from reference_torch.ranks import RankError, launch
from tests.reference_torch.cases import add_up, fail, hang

ROOT = Path(__file__).resolve().parent.parent.parent


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_collectives() -> None:
    assert launch(add_up, 3, [1.0, 20.0, 300.0]) == (321.0, [1.0, 20.0, 300.0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "rank 1 died with exit code 7"),
        ("hangs", r"rank 1 hangs: no step in 3 s, after \d of \d"),
        ("other", "rank 1 failed: KeyError: 'planted'"),
    ],
)
def test_the_rank_that_is_to_blame_is_named(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        launch(fail, 3, how, 1, patience=3.0)
    assert caught.value.rank == 1


def test_it_takes_less_than_fifteen_seconds(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 hangs"):
        launch(hang, 2, tmp_path / "since")
    assert time.time() - float((tmp_path / "since").read_text()) < 15


def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    code = (
        "from reference_torch.ranks import launch\n"
        "from tests.reference_torch.cases import report_and_sleep\n"
        f"launch(report_and_sleep, 2, {str(tmp_path)!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    process.kill()
    process.wait()
    ranks = [int(file.name) for file in tmp_path.iterdir()]
    wait_for(lambda: not any(psutil.pid_exists(rank) for rank in ranks))


def test_an_error_that_cannot_be_pickled() -> None:
    with pytest.raises(ValueError, match="expected a pickle, got a gherkin"):
        launch(fail, 1, "odd", 0)


def test_bad_input_stays_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected a cat, got a dog"):
        launch(fail, 2, "value", 0)


@pytest.mark.parametrize(("ranks", "device"), [(0, "cpu"), (1, "tpu"), (4096, "cuda")])
def test_what_cannot_be(ranks: int, device: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        launch(fail, ranks, "", 0, device=device)
