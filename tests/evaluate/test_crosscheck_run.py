"""``crosscheck`` with both sides played by a small script: what is asked, judged, said and left."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import deinfer_jax
from deinfer_jax import cli
from deinfer_jax.evaluate.crosscheck import run, sides
from deinfer_jax.evaluate.crosscheck.job import JAX_STRATEGIES, PERTURBATIONS, STRATEGIES
from deinfer_jax.evaluate.crosscheck.processes import SideFailed
from deinfer_jax.evaluate.crosscheck.variants import LAYOUTS, VARIANTS, write_random

# Answers jobs with numbers that follow from their tokens, and appends each to a log. The PyTorch
# side differs as the PLANTED environment variable says.
SCRIPT = """
import json, os, sys
from pathlib import Path
import numpy as np
side, log = sys.argv[1], Path(sys.argv[2])
def answer(folder):
    job = json.loads((folder / "job.json").read_text())
    flags = os.environ.get("XLA_FLAGS", "")
    with log.open("a") as file:
        file.write(json.dumps({"side": side, "flags": flags, **job}) + "\\n")
    planted = os.environ.get("PLANTED", "")
    if side == "torch" and planted == "fail":
        sys.exit("rank 1 did not answer")
    tokens = np.load(folder / "tokens.npz")
    B, L, D, W = len(tokens.files) - 1, 3, 48, 160
    rng = np.random.default_rng(0)
    arrays = {
        "decode_hidden": rng.standard_normal((job["forced"], L + 1, B, D)),
        "decode_logits": rng.standard_normal((job["forced"], B, W)),
        "greedy_margin": np.ones((job["greedy"], B)),
        "greedy_top": np.ones((job["greedy"], B)),
    }
    for i in range(B):
        P = len(tokens[f"prompt_{i}"])
        arrays[f"prefill_hidden_{i}"] = rng.standard_normal((L + 1, P, D))
        arrays[f"prefill_logits_{i}"] = rng.standard_normal((P, W))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays["greedy_tokens"] = np.zeros((job["greedy"], B), np.int32)
    if side == "torch" and job["dtype"] != "float64":
        if planted == "hidden" or job["perturb"]:
            arrays["decode_hidden"][:, 2] *= 1.001
        if planted == "nan":
            arrays["decode_logits"][0, 0, 0] = np.nan
        if planted == "shape":
            arrays["prefill_logits_0"] = arrays["prefill_logits_0"][1:]
        if planted == "greedy":
            arrays["greedy_tokens"][2, 1] = 5
    info = {"versions": {side: "1.0"}, "device": "abacus", "seconds": 1.5}
    info["kv_cache"] = job["kv_cache"]
    if side == "jax":
        info["machine"] = {"device": "abacus"}
    if planted != "nothing" or side == "jax":
        np.savez(folder / f"{side}.npz", info=np.array(json.dumps(info)), **arrays)
for folder in sys.argv[3:]:
    answer(Path(folder))
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the script in the place of both sides; the file in which it notes the jobs."""
    script, log = tmp_path / "side.py", tmp_path / "jobs"
    script.write_text(SCRIPT)
    for name, side in (("JAX_COMMAND", "jax"), ("TORCH_COMMAND", "torch")):
        monkeypatch.setattr(sides, name, (sys.executable, str(script), side, str(log)))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return log


def jobs(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def check(**options: Any) -> deinfer_jax.CrosscheckReport:
    return deinfer_jax.crosscheck(**{"random": "gqa", "device": "cpu", **options})


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("PLANTED", what)


class TestAsked:
    def test_every_combination_and_jax_once_a_cache_kind(self, log: Path) -> None:
        report = check(strategy=["dense", "naive"], ranks=(1, 2), kv_cache=("full", "latent"))
        expected = []
        for cache in ("full", "latent"):
            expected.append(("jax", cache))
            for ranks in (1, 2):  # a process for each, which answers for both strategies
                expected += [("torch", cache, strategy, ranks) for strategy in ("dense", "naive")]
        found = [(job["side"], job["kv_cache"], job["strategy"], job["ranks"]) for job in jobs(log)]
        assert [key[:2] if key[0] == "jax" else key for key in found] == expected
        assert [(run.kv_cache, run.strategy, run.ranks) for run in report.runs] == [
            (cache, strategy, ranks)
            for cache in ("full", "latent")
            for strategy in ("dense", "naive")
            for ranks in (1, 2)
        ]
        assert report.passed and str(report).endswith("passed: 8 of 8 runs within the limits")

    def test_every_setting_of_jax_against_every_one_of_pytorch(self, log: Path) -> None:
        report = check(jax_strategy=("sharded", "low_rank"), jax_devices=(1, 3), ranks=(1, 2))
        ours = [("sharded", 1), ("sharded", 3), ("low_rank", 1), ("low_rank", 3)]
        asked = [job for job in jobs(log) if job["side"] == "jax"]
        assert [(job["jax_strategy"], job["jax_devices"]) for job in asked] == ours
        for job in asked:
            count = f"--xla_force_host_platform_device_count={job['jax_devices']}"
            assert job["jax_devices"] == 1 or count in job["flags"].split()
        assert [job["ranks"] for job in jobs(log) if job["side"] == "torch"] == [1, 2]
        found = [(run.jax_strategy, run.jax_devices, run.ranks) for run in report.runs]
        assert found == [(*one, ranks) for one in ours for ranks in (1, 2)]
        assert report.runs[3].name == "JAX sharded x3, PyTorch low_rank x2, full"
        assert "sharded x3  low_rank x2, full " in str(report)

    def test_jax_is_one_device_by_default(self, log: Path) -> None:
        check()
        assert (jobs(log)[0]["jax_strategy"], jobs(log)[0]["jax_devices"]) == ("auto", 1)

    def test_multiplied_out_there_are_no_latents(self, log: Path) -> None:
        report = check(jax_strategy=("dense", "naive"), kv_cache=("latent", "full"))
        asked = [
            (job["jax_strategy"], job["kv_cache"]) for job in jobs(log) if job["side"] == "jax"
        ]
        assert asked == [("naive", "latent"), ("dense", "full"), ("naive", "full")]
        assert [(run.jax_strategy, run.kv_cache) for run in report.runs] == asked
        (reason,) = report.left_out
        assert reason.startswith("JAX dense, latent: its factors are multiplied out")
        assert f"left out: {reason}" in str(report)
        assert report.to_json()["left_out"] == (reason,)

    def test_a_cache_that_no_setting_of_jax_has(self, log: Path) -> None:
        report = check(jax_strategy="dense", kv_cache=("full", "full+latent"))
        assert [job["kv_cache"] for job in jobs(log)] == ["full", "full"]  # one a side
        assert len(report.runs) == len(report.left_out) == 1

    def test_settings_reach_the_jax_side_alone(
        self, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
        report = check()
        ours, theirs = (job["flags"] for job in jobs(log))
        assert theirs == "--xla_a=1"
        assert ours == f"--xla_a=1 {report.flags['XLA_FLAGS']}"
        assert "--xla_allow_excess_precision=false" in ours

    @pytest.mark.parametrize(
        ("device", "dtype", "expected"),
        [("cpu", None, "float32"), ("cuda", None, "bfloat16"), ("cuda", "float16", "float16")],
    )
    def test_dtype(self, log: Path, tmp_path: Path, device, dtype, expected: str) -> None:
        path = tmp_path / "model"
        write_random("gqa", path)
        config = path / "config.json"
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
        report = deinfer_jax.crosscheck(path, device=device, dtype=dtype)
        assert {job["dtype"] for job in jobs(log)} == {expected} == {report.dtype}
        assert {job["checkpoint"] for job in jobs(log)} == {str(path)}

    def test_sizes_follow_given_prompts(self, log: Path) -> None:
        report = check(tokens=[[5] * 200, [6] * 9], forced=3, greedy=7)
        job = jobs(log)[0]
        assert (job["max_context"], job["prefill_chunk"]) == (207, 66)
        assert report.prompts == (200, 9)

    def test_device_is_what_jax_finds(self, log: Path) -> None:
        assert check(device=None).device == "cpu"  # conftest has set JAX_PLATFORMS


class TestJudged:
    def test_a_difference(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plant(monkeypatch, "hidden")
        report = check(third_opinion=False)
        assert not report.passed
        (problem,) = report.runs[0].problems
        assert problem.startswith("decode, layer 1: expected a relative norm of at most 1e-05, got")
        text = str(report)
        assert f"! {problem}" in text and "FAILED: 1 of 1 runs past the limits" in text
        assert len(jobs(log)) == 2

    def test_float64_says_which_side_is_off(
        self, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(monkeypatch, "hidden")
        report = check(strategy=["naive", "dense"], ranks=2)
        exact = [job for job in jobs(log) if job["dtype"] == "float64"]
        assert [(job["side"], job["strategy"], job["ranks"]) for job in exact] == [
            ("torch", "low_rank", 1)  # once for both
        ]
        for found in report.runs:
            opinion = found.third_opinion
            assert opinion is not None
            assert opinion.jax["decode"][2].relative == 0.0
            assert opinion.torch["decode"][2].relative == pytest.approx(1e-3, rel=1e-3)
        assert "relative norm to PyTorch in float64" in str(report)

    def test_float64_is_not_broken_with_the_rest(self, log: Path) -> None:
        report = check(perturb="page")
        assert not report.passed
        assert [job["perturb"] for job in jobs(log) if job["side"] == "torch"] == ["page", None]
        assert "PyTorch broken by page" in str(report)

    def test_half_asks_no_third_opinion(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plant(monkeypatch, "greedy")
        report = check(dtype="bfloat16")
        (problem,) = report.runs[0].problems
        assert problem.startswith("greedy, sequence 1: token 2 differs at a margin of 1.00e+00")
        assert len(jobs(log)) == 2

    @pytest.mark.parametrize(
        ("what", "problem"),
        [
            ("nan", "PyTorch: decode_logits: 1 of 5760 values are NaN or infinite"),
            ("shape", "PyTorch: prefill_logits_0: expected shape [53, 160], got [52, 160]"),
        ],
    )
    def test_no_answer(
        self, log: Path, monkeypatch: pytest.MonkeyPatch, what: str, problem: str
    ) -> None:
        plant(monkeypatch, what)
        report = check()
        assert not report.passed
        assert report.runs[0].problems == (problem,) and report.runs[0].comparison is None
        assert problem in str(report)

    def test_json(self, log: Path) -> None:
        report = check(kv_cache=("full", "latent"), seed=3)
        found = json.loads(json.dumps(report.to_json()))
        assert found["passed"] is True and found["machine"] == {"device": "abacus"}
        assert found["seed"] == 3 and found["dtype"] == "float32"
        assert set(found["flags"]) == {
            "XLA_FLAGS",
            "JAX_PLATFORMS",
            "JAX_DEFAULT_MATMUL_PRECISION",
        }
        assert [run["kv_cache"] for run in found["runs"]] == ["full", "latent"]
        assert {(run["jax_strategy"], run["jax_devices"]) for run in found["runs"]} == {("auto", 1)}
        for one in found["runs"]:
            assert one["passed"] is True
            assert one["jax"]["versions"] == {"jax": "1.0"}
            assert one["torch"]["versions"] == {"torch": "1.0"}
            assert len(one["comparison"]["decode"]["layers"]) == 4


class TestFails:
    def test_what_a_side_says_is_passed_on(
        self, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(monkeypatch, "fail")
        message = "the PyTorch side failed with status 1: rank 1 did not answer"
        with pytest.raises(SideFailed, match=message):
            check()
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_nothing_is_left_after_success(self, log: Path, tmp_path: Path) -> None:
        check()
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_a_side_that_writes_nothing(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plant(monkeypatch, "nothing")
        with pytest.raises(RuntimeError, match="PyTorch side ended well, but wrote no torch.npz"):
            check()

    def test_without_torch(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            RuntimeError, match=r"pip install 'deinfer-jax\[torch\]'.*works without"
        ):
            check()
        assert not log.exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strategy": "sharded"}, "strategy: expected some of dense, naive, low_rank, got"),
            ({"strategy": ["naive", "naive"]}, "strategy: expected distinct values"),
            ({"ranks": 0}, "ranks: expected positive integers, got 0"),
            ({"ranks": ()}, "ranks: expected distinct values"),
            (
                {"jax_strategy": "tensor"},
                "jax_strategy: expected some of auto, dense, naive, low_rank, sharded, got 'ten",
            ),
            ({"jax_strategy": ("auto", "auto")}, "jax_strategy: expected distinct values"),
            ({"jax_devices": 0}, "jax_devices: expected positive integers, got 0"),
            ({"jax_devices": True}, "jax_devices: expected positive integers, got True"),
            ({"jax_devices": ()}, "jax_devices: expected distinct values"),
            (
                {"jax_strategy": "sharded", "jax_devices": (2, 5)},
                r"expected a number of devices that divides its width 48 .* got 5",
            ),
            (
                {"jax_strategy": "dense", "kv_cache": "latent"},
                "expected 'full' for jax_strategy dense, which multiplies .* out .*, got latent",
            ),
            ({"kv_cache": "auto"}, r"kv_cache: expected some of full, latent, full\+latent, got"),
            ({"dtype": "float64"}, "dtype: expected one of float32, bfloat16, float16 or None"),
            ({"device": "tpu"}, "device: expected one of cpu, cuda or None, got 'tpu'"),
            ({"cuda_graphs": True}, "cuda_graphs: expected False on a CPU, got True"),
            ({"cuda_graphs": (False, True)}, "cuda_graphs: expected False on a CPU, got True"),
            ({"perturb": "all"}, "perturb: expected one of rope-theta, .* or None, got 'all'"),
            ({"forced": 0}, "forced, greedy: expected at least 1, got 0 and 16"),
            ({"random": None}, "expected a path or a random model, got None and None"),
            ({"path": "x"}, "expected a path or a random model, got 'x' and 'gqa'"),
            ({"random": "bert"}, "expected VARIANT or VARIANT/LAYOUT"),
            ({"tokens": [[1, 2], [3, 160]]}, "prompt 1: expected ids from 0 to 159"),
        ],
    )
    def test_bad_arguments(self, log: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check(**options)
        assert not log.exists()

    def test_bad_paths(self, log: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="expected a model directory"):
            deinfer_jax.crosscheck(tmp_path / "nothing", device="cpu")

    def test_gguf(self, log: Path, smollm2_gguf: Path) -> None:
        with pytest.raises(ValueError, match="expected a Hugging Face directory .* got a GGUF"):
            deinfer_jax.crosscheck(smollm2_gguf, device="cpu")

    def test_jax_finds_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAX_PLATFORMS", "abacus")
        with pytest.raises(RuntimeError, match="JAX finds no device: .*abacus"):
            run._find_device()


class TestCommandLine:
    def main(self, *arguments: str) -> int:
        return cli.main(["crosscheck", "--device", "cpu", *arguments])

    def test_table(self, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.main("--random", "gqa", "--strategy", "dense", "naive", "--seed", "4") == 0
        text = capsys.readouterr().out
        assert "dense x1, full" in text and "naive x1, full" in text
        assert text.endswith("passed: 2 of 2 runs within the limits\n")

    def test_past_the_tolerance(
        self, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "report.json"
        arguments = ("--perturb", "residual", "--no-float64", "--json", "--out", str(out))
        assert self.main("--random", "gqa/shared", *arguments) == 1
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(out.read_text())
        assert printed["passed"] is False and printed["perturb"] == "residual"
        assert printed["model"] == "gqa/shared"

    def test_settings_of_jax(self, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--jax-strategy", "dense", "sharded", "--jax-devices", "2", "4")
        caches = ("--kv-cache", "full", "latent")
        assert self.main("--random", "gqa", *arguments, *caches) == 0
        text = capsys.readouterr().out
        assert "dense x4   low_rank x1, full" in text and "sharded x2 low_rank x1, lat" in text
        assert "left out: JAX dense, latent: " in text
        assert text.endswith("passed: 6 of 6 runs within the limits\n")

    def test_cuda_graphs(self, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["crosscheck", "--random", "gqa", "--device", "cuda", "--dtype", "float32"]
        assert cli.main([*arguments, "--cuda-graphs", "both"]) == 0
        found = [job["cuda_graphs"] for job in jobs(log) if job["side"] == "torch"]
        assert found == [False, True]

    def test_a_side_that_fails(
        self, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plant(monkeypatch, "fail")
        assert self.main("--random", "gqa") == 1
        assert capsys.readouterr().err == (
            "deinfer crosscheck: the PyTorch side failed with status 1: rank 1 did not answer\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "expected a path or a random model, got None and None"),
            (["no/such/model"], "expected a model directory or a GGUF file, found nothing"),
            (["--random", "bert"], "expected VARIANT or VARIANT/LAYOUT"),
            (["--random", "gqa", "--perturb", "all"], "perturb: expected one of"),
            (["--random", "gqa", "--ranks", "0"], "ranks: expected positive integers, got 0"),
            (["--random", "gqa", "--jax-devices", "0"], "jax_devices: expected positive integers"),
        ],
    )
    def test_bad_input(
        self, log: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.main(*arguments) == 1
        assert message in capsys.readouterr().err

    def test_example_parses(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["crosscheck", "--help"])
        _, _, example = capsys.readouterr().out.partition("example: ")
        args = cli._parser().parse_args(example.split()[1:])
        assert args.command == "crosscheck" and args.strategy == ["naive", "low_rank"]

    def test_help_names_everything(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["crosscheck", "--help"])
        words = capsys.readouterr().out.replace("\n", " ").replace("- ", "-").split()
        text = " ".join(words)
        for name in (*VARIANTS, *LAYOUTS, *PERTURBATIONS, *STRATEGIES, *JAX_STRATEGIES):
            assert name in text.replace("- ", "-"), name
