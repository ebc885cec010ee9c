"""The PyTorch reference on GPUs, in processes of its own: CUDA graphs on and off, NCCL."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from reference_torch.ranks import launch
from tests.reference_torch.cases import Case, run_all
from tests.reference_torch.conftest import difference, make

CLOSE = 1e-5  # of the norm: float32, in other orders of summation than the CPU's
KINDS = ("full", "latent", "full+latent")


def test_graphs_change_nothing(tmp_path: Path) -> None:
    expected = make("qwen3", ("shared-kv", "separate"), tmp_path)
    cases = [
        Case("low_rank", kind, cuda_graphs=graphs) for kind in KINDS for graphs in (False, True)
    ]
    jobs = [(expected.path, case) for case in cases]
    found = launch(run_all, 1, jobs, expected.prompts, expected.forced, device="cuda", patience=60)
    for case, values in zip(cases, found, strict=True):
        assert difference(expected, values) < CLOSE, case


def test_bfloat16_is_close(tmp_path: Path) -> None:
    expected = make("gqa", ("shared", "separate"), tmp_path)
    cases = [
        Case("low_rank", kind, "bfloat16", graphs) for kind in KINDS for graphs in (False, True)
    ]
    jobs = [(expected.path, case) for case in cases]
    found = launch(run_all, 1, jobs, expected.prompts, expected.forced, device="cuda", patience=60)
    for case, values in zip(cases, found, strict=True):
        assert np.isfinite(values.decode).all()
        assert 1e-4 < difference(expected, values) < 0.05, case


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    expected = make("nine-three-heads", ("shared-kv", "dense-k-o-down"), tmp_path)
    cases = [
        Case(strategy, kind, cuda_graphs=graphs)
        for strategy in ("dense", "naive", "low_rank")
        for kind in KINDS
        for graphs in (False, True)
    ]
    jobs = [(expected.path, case) for case in cases]
    found = launch(run_all, 2, jobs, expected.prompts, expected.forced, device="cuda", patience=60)
    for case, values in zip(cases, found, strict=True):
        assert difference(expected, values) < CLOSE, case
