"""The job's files, its tokens, and the settings that make runs comparable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deinfer_jax.evaluate.crosscheck import jax_side
from deinfer_jax.evaluate.crosscheck.flags import comparable
from deinfer_jax.evaluate.crosscheck.job import Job, Tokens

JOB = Job(
    checkpoint="/some/model",
    dtype="bfloat16",
    kv_cache="full+latent",
    page_size=16,
    prefill_chunk=24,
    max_context=77,
    forced=3,
    greedy=4,
    device="cpu",
    jax_strategy="sharded",
    jax_devices=1,
    strategy="naive",
    ranks=2,
    cuda_graphs=False,
    perturb="page",
)
TOKENS = Tokens.random(160, forced=3, seed=1)


class TestJob:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        JOB.write(tmp_path / "job", TOKENS)
        job, tokens = Job.read(tmp_path / "job")
        assert job == JOB
        for ours, theirs in zip(tokens.prompts, TOKENS.prompts, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(tokens.forced, TOKENS.forced)

    def test_files_are_the_contract_with_the_other_side(self, tmp_path: Path) -> None:
        JOB.write(tmp_path / "job", TOKENS)
        fields = json.loads((tmp_path / "job" / "job.json").read_text())
        assert fields == {
            "checkpoint": "/some/model",
            "dtype": "bfloat16",
            "kv_cache": "full+latent",
            "page_size": 16,
            "prefill_chunk": 24,
            "max_context": 77,
            "forced": 3,
            "greedy": 4,
            "strategy": "naive",
            "ranks": 2,
            "device": "cpu",
            "jax_strategy": "sharded",
            "jax_devices": 1,
            "cuda_graphs": False,
            "perturb": "page",
        }
        with np.load(tmp_path / "job" / "tokens.npz") as arrays:
            assert sorted(arrays.files) == ["forced", "prompt_0", "prompt_1", "prompt_2"]
            assert arrays["forced"].shape == (3, 3)
            assert all(arrays[name].dtype == np.int32 for name in arrays.files)

    def test_other_keys(self, tmp_path: Path) -> None:
        JOB.write(tmp_path / "job", TOKENS)
        file = tmp_path / "job" / "job.json"
        file.write_text(file.read_text().replace("ranks", "rank"))
        with pytest.raises(ValueError, match=r"expected the keys .*ranks.* got .*rank,"):
            Job.read(tmp_path / "job")


class TestTokens:
    def test_random_ones_follow_the_seed(self) -> None:
        same, other = (Tokens.random(160, forced=3, seed=seed) for seed in (1, 2))
        np.testing.assert_array_equal(same.prompts[0], TOKENS.prompts[0])
        assert (other.prompts[0] != TOKENS.prompts[0]).any()
        assert len({len(prompt) for prompt in TOKENS.prompts}) == len(TOKENS.prompts)

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([[1, 2]], "expected at least two prompts, got 1"),
            (
                [[1, 2], [3]],
                r"prompt 1: expected a list of at least two token ids, got int64 \[1\]",
            ),
            ([[1, 2], [0.5, 1.0]], "prompt 1: expected a list of at least two token ids, got fl"),
            ([[1, 160], [3, 4]], "prompt 0: expected ids from 0 to 159, got 1 to 160"),
            ([[1, 2], [-1, 4]], "prompt 1: expected ids from 0 to 159, got -1 to 4"),
        ],
    )
    def test_bad_prompts(self, prompts: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Tokens.random(160, forced=3, seed=0, prompts=prompts)


class TestFlags:
    def test_are_added_and_replace_others(self) -> None:
        found = comparable(
            {"XLA_FLAGS": "--xla_a=1 --xla_allow_excess_precision=true", "HOME": "/h"},
            device="cuda",
            dtype="float32",
        )
        assert found == {
            "HOME": "/h",
            "XLA_FLAGS": "--xla_a=1 --xla_allow_excess_precision=false "
            "--xla_gpu_deterministic_ops=true",
            "JAX_PLATFORMS": "cuda,cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        }

    def test_are_stable(self) -> None:
        once = comparable({"XLA_FLAGS": "--xla_a=1"}, device="cpu", dtype="float32")
        assert comparable(once, device="cpu", dtype="float32") == once

    def test_simulated_devices(self) -> None:
        count = "--xla_force_host_platform_device_count"
        given = {"XLA_FLAGS": f"{count}=8 --xla_a=1"}

        def flags(device: str, devices: int) -> list[str]:
            found = comparable(given, device=device, dtype="bfloat16", devices=devices)
            return found["XLA_FLAGS"].split()

        assert flags("cpu", 3)[0] == "--xla_a=1" and flags("cpu", 3)[-1] == f"{count}=3"
        assert flags("cpu", 3).count(f"{count}=8") == 0
        assert flags("cpu", 1)[0] == flags("cuda", 2)[0] == f"{count}=8"

    def test_of_bfloat16(self) -> None:
        assert "JAX_DEFAULT_MATMUL_PRECISION" not in comparable({}, device="cpu", dtype="bfloat16")

    def test_a_process_without_them_starts_itself_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        JOB.write(tmp_path / "job", TOKENS)
        monkeypatch.delenv("XLA_FLAGS", raising=False)

        class Replaced(BaseException):
            pass

        def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
            assert command[1:] == ["-m", jax_side.MODULE, str(tmp_path / "job")]
            assert environment == comparable(os.environ, device="cpu", dtype="bfloat16")
            raise Replaced

        monkeypatch.setattr(os, "execve", execve)
        with pytest.raises(Replaced):
            jax_side.main(tmp_path / "job")
