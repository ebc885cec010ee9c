"""The PyTorch reference on GPUs, in processes of its own: CUDA graphs on and off, NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from reference_torch.ranks import launch
from tests.reference_torch.cases import Case, Values, run_all, run_all_comparably
from tests.reference_torch.conftest import Expected, difference, make

CLOSE = 1e-5  # of the norm: float32, in other orders of summation than the CPU's
KINDS = ("full", "latent", "full+latent")


def values(
    expected: Expected, cases: list[Case], ranks: int = 1, work: Callable[..., Any] = run_all
) -> dict[Case, Values]:
    jobs = [(expected.path, case) for case in cases]
    found = launch(work, ranks, jobs, expected.prompts, expected.forced, device="cuda")
    return dict(zip(cases, found, strict=True))


def both(kv_cache: str, strategy: str = "low_rank", dtype: str = "float32") -> list[Case]:
    """Eager and as a CUDA graph."""
    return [Case(strategy, kv_cache, dtype, graphs) for graphs in (False, True)]


@pytest.mark.parametrize("work", [run_all, run_all_comparably])
def test_graphs_change_nothing(work: Callable[..., Any], tmp_path: Path) -> None:
    expected = make("qwen3", ("shared-kv", "separate"), tmp_path)
    cases = [case for kind in KINDS for case in both(kind)]
    for case, found in values(expected, cases, work=work).items():
        assert difference(expected, found) < CLOSE, case


@pytest.mark.parametrize("work", [run_all, run_all_comparably])
def test_bfloat16_is_close(work: Callable[..., Any], tmp_path: Path) -> None:
    expected = make("gqa", ("shared", "separate"), tmp_path)
    cases = [case for kind in KINDS for case in both(kind, dtype="bfloat16")]
    for case, found in values(expected, cases, work=work).items():
        assert np.isfinite(found.decode).all()
        assert 1e-4 < difference(expected, found) < 0.05, case


def test_windows_in_bfloat16(tmp_path: Path) -> None:
    expected = make("mistral-window", None, tmp_path)
    for case, found in values(expected, both("full", "dense", "bfloat16")).items():
        assert 1e-4 < difference(expected, found) < 0.05, case


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("work", [run_all, run_all_comparably])
def test_two_gpus(work: Callable[..., Any], tmp_path: Path) -> None:
    expected = make("nine-three-heads", ("shared-kv", "dense-k-o-down"), tmp_path)
    strategies = ("dense", "naive", "low_rank")
    cases = [case for name in strategies for kind in KINDS for case in both(kind, name)]
    for case, found in values(expected, cases, 2, work).items():
        assert difference(expected, found) < CLOSE, case
