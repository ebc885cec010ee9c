"""JAX against the PyTorch reference, each in its process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

import deinfer_jax
from deinfer_jax.evaluate.crosscheck.job import CACHES, PERTURBATIONS, STRATEGIES
from deinfer_jax.evaluate.crosscheck.variants import LAYOUTS, VARIANTS

pytest.importorskip("torch", reason="the reference is PyTorch")
if importlib.util.find_spec("reference_torch.probe") is None:
    pytest.skip("no reference_torch.probe", allow_module_level=True)


def check(random: str, **options: Any) -> deinfer_jax.CrosscheckReport:
    return deinfer_jax.crosscheck(random=random, device="cpu", **options)


def test_a_decomposed_model() -> None:
    report = check("gqa/mixed", strategy=("naive", "low_rank"), kv_cache="full+latent")
    assert report.passed, str(report)
    for run in report.runs:
        assert run.comparison is not None
        assert [sequence.equal for sequence in run.comparison.greedy] == [16, 16, 16]
        flags = run.jax["machine"]["xla_flags"]
        assert "--xla_allow_excess_precision=false" in flags
        assert run.jax["versions"]["jax"] and run.torch["versions"]["torch"]
        assert run.jax["kv_cache"] == run.torch["kv_cache"] == "full+latent"


@pytest.mark.full
def test_float64_says_which_side_is_off() -> None:
    report = check("gqa/mixed", kv_cache="full+latent", perturb="page")
    assert not report.passed
    opinion = report.runs[0].third_opinion
    assert opinion is not None
    logits = opinion.jax["decode"][-1], opinion.torch["decode"][-1]
    assert logits[0].relative < 1e-5 < logits[1].relative


def test_perturbations_are_those_that_the_reference_knows() -> None:
    command = [sys.executable, "-m", "reference_torch", "perturbations"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    known = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert sorted(known) == sorted(PERTURBATIONS)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_cache(layout: str) -> None:
    caches = ("full",) if layout == "dense" else CACHES  # JAX refuses latents of a dense model
    report = check(f"biases/{layout}", strategy=STRATEGIES, kv_cache=caches)
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_on_several_ranks(variant: str) -> None:
    report = check(f"{variant}/mixed", strategy=STRATEGIES, ranks=(1, 2, 4), kv_cache="latent")
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half(dtype: str) -> None:
    report = check("qwen3/shared", kv_cache=("full", "latent"), dtype=dtype)
    assert report.passed, str(report)


@pytest.mark.full
@pytest.mark.parametrize("perturb", PERTURBATIONS)
def test_every_perturbation_is_noticed(perturb: str) -> None:
    report = check("gqa/separate", kv_cache="latent", perturb=perturb, third_opinion=False)
    assert not report.passed, str(report)
