"""What ``inspect`` says of a decomposed checkpoint, from its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.checkpoint.factors import low_rank_of, u_name, v_name
from deinfer_jax.config_hf import low_rank_block
from tests.checkpoint.test_hf import CONFIG

# D 64, F 96, 2 layers, 4 query and 2 kv heads of 32, 40 words; see conftest.
SIZES = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
SIZES |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
LINEARS = 2 * sum(out * into for out, into in SIZES.values())
METADATA: dict[str, Any] = dict(
    method="fisher",
    keep=0.6,
    allocation="loss",
    base_model={"name": "tiny", "sha256": "0" * 64},
    calibration={"tokens": 8192, "files": ["a.txt", "b.txt"]},
)


def module(layer: int, short: str) -> str:
    block = "mlp" if short in ("gate", "up", "down") else "self_attn"
    return f"model.layers.{layer}.{block}.{short}_proj"


def write(path: Path, weights: dict[str, np.ndarray], groups: Any, **metadata: Any) -> Path:
    for members, rank in groups:
        into = weights[f"{members[0]}.weight"].shape[1]
        weights[v_name(members)] = np.zeros((rank, into), np.float32)
        for member in members:
            out = len(weights.pop(f"{member}.weight"))
            weights[u_name(member)] = np.zeros((out, rank), np.float32)
    with CanonicalWriter(path, {}) as writer:
        writer.write("all", weights)
        writer.publish(CONFIG | {"low_rank": low_rank_block(low_rank_of(groups), **metadata)})
    return path


@pytest.fixture
def shared(tmp_path: Path, tiny_weights) -> Path:
    """{k, v} in both layers, with ranks 5 and 9; q in the first, rank 7."""
    groups = [([module(0, "k"), module(0, "v")], 5), ([module(1, "k"), module(1, "v")], 9)]
    groups.append(([module(0, "q")], 7))
    return write(tmp_path / "m", tiny_weights(), groups, **METADATA)


def test_numbers(shared: Path, tiny_weights) -> None:
    found = deinfer_jax.inspect(shared)
    factors = (5 + 9) * (64 + 64 + 64) + 7 * (128 + 64)
    saved = 2 * (64 * 64 + 64 * 64) + 128 * 64 - factors
    dense = sum(array.size for array in tiny_weights().values())
    decomposition = found.decomposition
    assert decomposition is not None
    assert decomposition.dense_parameters == dense
    assert found.parameters == dense - saved
    assert found.stored_bytes == 4 * (dense - saved)
    assert decomposition.keep == pytest.approx(1 - saved / LINEARS, rel=1e-12)
    assert decomposition.ranks == {"q_proj": (7, 7), "k_proj": (5, 9), "v_proj": (5, 9)}
    assert decomposition.dense["q_proj"] == 1 and decomposition.dense["up_proj"] == 2
    assert decomposition.groups == (("k", "v"),)
    assert decomposition.metadata == METADATA | {"version": 1}


def test_a_shared_latent_counts_once(shared: Path) -> None:
    found = deinfer_jax.inspect(shared)
    assert found.cache_elements_per_token == 2 * 2 * 64
    assert found.decomposition is not None
    assert (found.decomposition.latent_k, found.decomposition.latent_v) == (14, 14)
    assert found.decomposition.latent_elements_per_token == 14


def test_separate_latents_add_up_and_dense_ones_are_full(tmp_path: Path, tiny_weights) -> None:
    groups = [([module(0, "k")], 5), ([module(0, "v")], 11), ([module(1, "v")], 3)]
    found = deinfer_jax.inspect(write(tmp_path / "m", tiny_weights(), groups)).decomposition
    assert found is not None
    assert (found.latent_k, found.latent_v) == (5 + 64, 11 + 3)
    assert found.latent_elements_per_token == 5 + 64 + 11 + 3


def test_what_is_printed(shared: Path) -> None:
    lines = dict(line.split("  ", 1) for line in str(deinfer_jax.inspect(shared)).splitlines())
    printed = {name: value.strip() for name, value in lines.items()}
    keep = deinfer_jax.inspect(shared).decomposition.keep  # pyright: ignore[reportOptionalMemberAccess]
    assert printed["decomposed"] == f"fisher, keep {keep:.4f} of the linears (asked for 0.6)"
    assert printed["allocation"] == "loss"
    assert printed["base model"] == f"name tiny, sha256 {'0' * 64}"
    assert printed["calibration"] == "tokens 8,192, files a.txt, b.txt"
    assert printed["shared"] == "{k, v}"
    assert printed["ranks"].startswith("q 7, 1 dense; k 5 to 9; v 5 to 9; o 2 dense;")
    assert printed["latents"] == "k 14 and v 14 elements a token, together 14"
    assert "instead of" in printed["parameters"]


def test_nothing_of_it_where_nothing_is_decomposed(tmp_path: Path, tiny_weights) -> None:
    with CanonicalWriter(tmp_path / "m", {}) as writer:
        writer.write("all", tiny_weights())
        writer.publish(CONFIG)
    found = deinfer_jax.inspect(tmp_path / "m")
    assert found.decomposition is None
    assert "decomposed" not in str(found) and "instead of" not in str(found)
