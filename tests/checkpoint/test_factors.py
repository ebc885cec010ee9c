"""What is said at opening of a decomposed checkpoint whose tensors are not what low_rank says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.factors import low_rank_of
from deinfer_jax.config_hf import low_rank_block
from tests.checkpoint.test_canonical import ATTENTION, config, decomposed
from tests.checkpoint.test_hf import CONFIG

DOWN = "model.layers.1.mlp.down_proj"
DENSE = "model.layers.1.mlp.up_proj"


@pytest.fixture
def weights(tiny_weights) -> dict[str, np.ndarray]:
    return decomposed(tiny_weights())


def write(path: Path, weights: dict[str, np.ndarray], hf: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf or config()))
    save_file(weights, path / "model.safetensors")
    return path


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_a_whole_one_is_opened_and_loads(tmp_path: Path, weights) -> None:
    with deinfer_jax.load(write(tmp_path / "m", weights), max_context=16, max_batch=2) as llm:
        qkv = llm.runner.weights["layers"][0]["attention"]["qkv"]
        v = np.asarray(qkv["v"])  # rank 5, padded to 8
        np.testing.assert_array_equal(v[:5], weights[f"{ATTENTION}.q_k_v.v.weight"])
        assert v.shape[0] == 8 and not v[5:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{DOWN}.v.weight": None},
            rf"module {DOWN}: expected {DOWN}.v.weight \[7, 96\] \(low_rank .* 7 rows.*got none",
        ),
        (
            {f"{ATTENTION}.q_k_v.v.weight": None},
            rf"module {ATTENTION}.q_proj: expected {ATTENTION}.q_k_v.v.weight \[5, 64\].*got none",
        ),
        (
            {f"{ATTENTION}.k_proj.u.weight": None},
            rf"module {ATTENTION}.k_proj: expected .*k_proj.u.weight \[64, 5\].*got none",
        ),
        (
            {f"{ATTENTION}.k_proj.u.weight": zeros(64, 4)},
            r"k_proj: expected .*u.weight \[64, 5\] \(rank 5 in low_rank\), got \[64, 4\]",
        ),
        (
            {f"{ATTENTION}.q_k_v.v.weight": zeros(6, 64)},
            r"q_proj: expected .*q_k_v.v.weight \[5, 64\].*5 rows of it\), got \[6, 64\]",
        ),
        (
            {f"{DOWN}.v.weight": zeros(7, 64)},
            r"down_proj: expected .*down_proj.v.weight \[7, 96\].*got \[7, 64\]",
        ),
        (
            {f"{DOWN}.weight": zeros(64, 96)},
            rf"module {DOWN}: expected factors, .*not a dense weight too, got .*weight \[64, 96\]",
        ),
        (
            {f"{DENSE}.weight": None},
            rf"module {DENSE}: expected {DENSE}.weight \[96, 64\] \(.*it is dense\), got none",
        ),
        (
            {f"{DENSE}.u.weight": zeros(96, 3), f"{DENSE}.v.weight": zeros(3, 64)},
            rf"module {DENSE}: low_rank does not name it, expected no factors, got {DENSE}.v.weig",
        ),
        (
            {f"{ATTENTION}.q_proj.v.weight": zeros(5, 64)},
            r"q_proj: expected no v of its own, it reads .*q_k_v.v.weight, got .*\[5, 64\]",
        ),
        (
            {f"{ATTENTION}.k_v.v.weight": zeros(5, 64)},
            r"tensor model.layers.0.self_attn.k_v.v.weight \[5, 64\] is read by no module",
        ),
    ],
    ids=[
        "no v",
        "no shared v",
        "no u",
        "rank of u",
        "rank of v",
        "width of v",
        "dense too",
        "dense one missing",
        "factors of a dense one",
        "own v beside a shared",
        "a v that nobody reads",
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, weights, changes, message: str) -> None:
    changed = {n: array for n, array in (weights | changes).items() if array is not None}
    path = write(tmp_path / "m", changed)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("place", ["bias", "v.bias"])
def test_bias_at_the_wrong_place(tmp_path: Path, weights, place: str) -> None:
    hf = config() | {"attention_bias": True}
    for layer in range(2):
        for short, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 64)):
            module = f"model.layers.{layer}.self_attn.{short}_proj"
            inner = "u.bias" if layer == 0 and short != "o" else "bias"
            weights[f"{module}.{inner}"] = zeros(rows)
    open_checkpoint(write(tmp_path / "good", weights, hf))
    q = f"{ATTENTION}.q_proj"
    weights[f"{q}.{place}"] = weights.pop(f"{q}.u.bias")
    with pytest.raises(
        ValueError,
        match=rf"{q}: expected {q}.u.bias \[128\].*got none; "
        rf"module {q}: expected its bias as {q}.u.bias, got {q}.{place} \[128\]|"
        rf"{q}: expected its bias as {q}.u.bias, got {q}.{place} \[128\]; .*u.bias.*got none",
    ):
        open_checkpoint(write(tmp_path / "bad", weights, hf))


def test_a_bias_that_the_model_does_not_have(tmp_path: Path, weights) -> None:
    weights[f"{DOWN}.u.bias"] = zeros(64)
    with pytest.raises(ValueError, match=rf"{DOWN}: expected no bias, got {DOWN}.u.bias \[64\]"):
        open_checkpoint(write(tmp_path / "m", weights))


def test_a_group_of_different_inputs(tmp_path: Path, weights) -> None:
    hf = config()
    hf["low_rank"]["slices"][f"{ATTENTION}.o_proj"] = [f"{ATTENTION}.q_k_v.v.weight", 0, 5]
    with pytest.raises(ValueError, match=r"config.json: low_rank: .*o_proj; expected .*same input"):
        open_checkpoint(write(tmp_path / "m", weights, hf))


def test_all_problems_are_listed_and_the_rest_counted(tmp_path: Path, weights) -> None:
    few = {n: array for n, array in weights.items() if "mlp" not in n and ".u." not in n}
    with pytest.raises(ValueError, match=r"q_proj.*k_proj.*gate_proj") as caught:
        open_checkpoint(write(tmp_path / "m", few))
    assert str(caught.value).count("module ") == 10
    few = {n: array for n, array in few.items() if "layers" not in n}
    with pytest.raises(ValueError, match=r"; and [0-9]+ more$") as caught:
        open_checkpoint(write(tmp_path / "n", few, hf_of_many(20)))
    assert str(caught.value).count("module ") == 20


def hf_of_many(layers: int) -> dict[str, Any]:
    groups = [([f"model.layers.{i}.mlp.down_proj"], 3) for i in range(layers)]
    return CONFIG | {
        "num_hidden_layers": layers,
        "low_rank": low_rank_block(low_rank_of(groups)),
    }
