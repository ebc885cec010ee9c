"""Ranks that work, die, hang and fail."""

from __future__ import annotations

import time

import pytest

from reference_torch.launch import RankError, launch
from tests.reference_torch.cases import add_up, fail


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
    started = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        launch(fail, 3, how, 1, patience=3.0)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 60  # most of which is importing torch three times


def test_bad_input_stays_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected a cat, got a dog"):
        launch(fail, 2, "value", 0)


@pytest.mark.parametrize(("ranks", "device"), [(0, "cpu"), (1, "tpu"), (4096, "cuda")])
def test_what_cannot_be(ranks: int, device: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        launch(fail, ranks, "", 0, device=device)
