"""The torch side of a cross-check: what it answers, what can be broken, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_torch import probe as probe_module
from reference_torch.cli import main
from reference_torch.group import Group
from reference_torch.perturb import PERTURBATIONS
from tests.reference_torch.conftest import Expected, make

JOB: dict[str, Any] = dict(
    dtype="float32",
    kv_cache="full",
    page_size=16,
    prefill_chunk=13,
    max_context=64,
    forced=9,
    greedy=6,
    strategy="low_rank",
    ranks=1,
    device="cpu",
    cuda_graphs=False,
    perturb=None,
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Expected:
    return make("gqa", ("shared-kv", "separate"), tmp_path_factory.mktemp("model"))


def write_job(folder: Path, expected: Expected, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    job = {**JOB, "checkpoint": str(expected.path), **changes}
    (folder / "job.json").write_text(json.dumps(job))
    arrays: dict[str, Any] = {
        f"prompt_{i}": np.asarray(prompt, np.int32) for i, prompt in enumerate(expected.prompts)
    }
    np.savez(folder / "tokens.npz", forced=expected.forced, **arrays)
    return job


def answer(folder: Path, expected: Expected, **changes: Any) -> dict[str, np.ndarray]:
    """In this process, without starting a rank."""
    job = write_job(folder, expected, **changes)
    probe_module.answer(Group(), folder, job)
    with np.load(folder / "torch.npz") as found:
        return dict(found)


class TestAnswer:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, expected: Expected, tmp_path_factory) -> dict[str, np.ndarray]:
        return answer(tmp_path_factory.mktemp("job"), expected)

    def test_shapes_and_dtypes(self, found: dict[str, np.ndarray]) -> None:
        shapes = {name: array.shape for name, array in found.items()}
        assert shapes == {
            "prefill_hidden_0": (3, 37, 48),
            "prefill_hidden_1": (3, 20, 48),
            "prefill_logits_0": (37, 160),
            "prefill_logits_1": (20, 160),
            "decode_hidden": (9, 3, 2, 48),
            "decode_logits": (9, 2, 160),
            "greedy_tokens": (6, 2),
            "greedy_margin": (6, 2),
            "greedy_top": (6, 2),
            "info": (),
        }
        assert found["greedy_tokens"].dtype == np.int32
        dtypes = {found[name].dtype for name in shapes if name not in ("greedy_tokens", "info")}
        assert dtypes == {np.dtype(np.float32)}

    def test_logits(self, found: dict[str, np.ndarray], expected: Expected) -> None:
        for i, (prompt, theirs) in enumerate(zip(expected.prompts, expected.logits, strict=True)):
            ours = np.concatenate([found[f"prefill_logits_{i}"], found["decode_logits"][:, i]])
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.ptp(theirs))
            assert found["greedy_tokens"][0, i] == theirs[len(prompt) - 1].argmax()

    def test_margins(self, found: dict[str, np.ndarray], expected: Expected) -> None:
        for i, prompt in enumerate(expected.prompts):
            second, best = np.sort(expected.logits[i][len(prompt) - 1])[-2:]
            assert abs(found["greedy_top"][0, i] - best) < 1e-5
            assert abs(found["greedy_margin"][0, i] - (best - second)) < 1e-5

    def test_info(self, found: dict[str, np.ndarray]) -> None:
        info = json.loads(str(found["info"]))
        assert info["versions"]["torch"] == torch.__version__
        assert info["elements_a_decoded_token"] == {}


class TestBroken:
    @pytest.mark.parametrize("kv_cache", ["full", "latent"])
    @pytest.mark.parametrize("name", PERTURBATIONS)
    def test_everything_that_can_be_broken_shows(
        self, name: str, kv_cache: str, expected: Expected, tmp_path: Path
    ) -> None:
        well = answer(tmp_path, expected, kv_cache=kv_cache)
        broken = answer(tmp_path, expected, kv_cache=kv_cache, perturb=name)
        norm = np.linalg.norm(well["decode_logits"])
        change = np.linalg.norm(broken["decode_logits"] - well["decode_logits"]) / norm
        assert change > 1e-4  # ten times what a cross-check tolerates
        in_decode_only = name in ("position", "page")
        same = np.array_equal(broken["prefill_logits_0"], well["prefill_logits_0"])
        assert same == in_decode_only

    def test_unknown(self, expected: Expected, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="perturb: expected one of rope-theta.*got 'gremlins'"):
            answer(tmp_path, expected, perturb="gremlins")


class TestCommand:
    def test_probe(self, expected: Expected, tmp_path: Path) -> None:
        folders = [tmp_path / "full", tmp_path / "latent"]
        for folder in folders:
            write_job(folder, expected, kv_cache=folder.name)
        assert main(["probe", *map(str, folders)]) == 0
        assert all((folder / "torch.npz").is_file() for folder in folders)

    def test_jobs_of_different_ranks(
        self, expected: Expected, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folders = [tmp_path / "1", tmp_path / "2"]
        for folder in folders:
            write_job(folder, expected, ranks=int(folder.name))
        assert main(["probe", *map(str, folders)]) == 1
        assert "expected jobs of the same ranks and device" in capsys.readouterr().err

    def test_generate_on_two_ranks(
        self, expected: Expected, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompt = expected.prompts[0]
        command = ["generate", str(expected.path), *map(str, prompt), "--new", "1", "--ranks", "2"]
        assert main(command) == 0
        assert capsys.readouterr().out == f"{expected.logits[0][len(prompt) - 1].argmax()}\n"

    def test_perturbations(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["perturbations"]) == 0
        names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
        assert names == list(PERTURBATIONS)


class TestBadCheckpoints:
    """The message names the tensor."""

    def changed(self, expected: Expected, folder: Path, change: Any) -> Expected:
        path = folder / "changed"
        shutil.copytree(expected.path, path)
        (file, *_) = sorted(path.glob("*.safetensors"))
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        for index in path.glob("*.index.json"):
            places = json.loads(index.read_text())
            kept = {n: f for n, f in places["weight_map"].items() if f != file.name}
            places["weight_map"] = kept | dict.fromkeys(tensors, file.name)
            index.write_text(json.dumps(places))
        return expected._replace(path=path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda t: t.pop("model.norm.weight"),
                "expected a tensor model.norm.weight, found none",
            ),
            (
                lambda t: t.update({"model.norm.weight": torch.ones(3)}),
                r"model.norm.weight: expected shape \[48\], got \[3\]",
            ),
            (
                lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}),
                "model.norm.weight: expected floating-point numbers, got torch.int32",
            ),
            (
                lambda t: t.update({"model.norm.weight": torch.full((48,), torch.nan)}),
                "model.norm.weight: expected finite numbers",
            ),
            (lambda t: t.update({"stray": torch.ones(3)}), "no use for the tensors stray"),
        ],
        ids=["missing", "shape", "integers", "nan", "stray"],
    )
    def test_tensors(self, change: Any, message: str, expected: Expected, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            answer(tmp_path, self.changed(expected, tmp_path, change))

    def test_no_directory(self, expected: Expected, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="expected a directory with config.json"):
            answer(tmp_path, expected, checkpoint=str(tmp_path / "nowhere"))

    def test_another_architecture(self, expected: Expected, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        with pytest.raises(ValueError, match="model_type: expected one of llama.*got bert"):
            answer(tmp_path, expected, checkpoint=str(tmp_path))
