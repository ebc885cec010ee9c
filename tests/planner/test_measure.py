"""The link measured on simulated devices, and ``deinfer plan``."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from deinfer_jax import LowRank, ModelConfig, Slice, cli
from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.planner import Link, measure_link
from deinfer_jax.planner import command as plan_command
from deinfer_jax.planner.measure import KINDS, Sample, fit_link

SIZES = (1 << 12, 1 << 18)


class TestMeasureLink:
    def test_simulated_devices(self) -> None:
        link = measure_link(4, sizes=SIZES)
        assert link.name == "measured between 4 cpu devices"
        assert 1e6 < link.bandwidth <= 1e15
        assert link.small == SIZES[-1]

    def test_fewer_are_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        two = jax.devices()[:2]
        monkeypatch.setattr(jax, "devices", lambda: two)
        assert measure_link(8, sizes=SIZES).name == "measured between 2 of 8 cpu devices"
        monkeypatch.setattr(jax, "devices", lambda: two[:1])
        with pytest.raises(ValueError, match="at least 2 devices, got 8 asked for and 1 visible"):
            measure_link(8)

    def test_sizes(self) -> None:
        with pytest.raises(ValueError, match="sizes: expected at least two"):
            measure_link(2, sizes=(8, 8))


class TestFitLink:
    def test_recovers_what_made_the_samples(self) -> None:
        samples = [
            Sample(kind=kind, size=size, seconds=latency + around * size / 2e10)
            for size in (1 << 13, 1 << 18, 1 << 22)
            for kind, latency, around in zip(KINDS, (1e-5, 3e-5), (1.5, 0.75), strict=True)
        ]
        link = fit_link(samples, 4, "made up")
        assert link.bandwidth == pytest.approx(2e10)
        assert link.latency == pytest.approx(3e-5)
        assert link.small_latency == pytest.approx(1e-5)

    def test_noise_gives_nothing_negative(self) -> None:
        samples = [
            Sample(kind=kind, size=size, seconds=seconds)
            for kind in KINDS
            for size, seconds in ((1000, 2e-5), (10**6, 1e-5))
        ]
        link = fit_link(samples, 2, "noise")
        assert link.bandwidth > 0 and link.latency > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decomposed checkpoint of zeros."""
    config = ModelConfig(
        vocab_size=11,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        low_rank=LowRank((("model.layers.0.mlp.up_proj", Slice(v="up.v", offset=0, rank=5)),)),
    )
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (linear.out_features, linear.in_features)
        for name, linear in config.linears().items()
    }
    del shapes["model.layers.0.mlp.up_proj.weight"]
    shapes |= {"up.v": (5, 48), "model.layers.0.mlp.up_proj.u.weight": (80, 5)}
    shapes |= {"model.embed_tokens.weight": (11, 48), "lm_head.weight": (11, 48)}
    norms = [f"layers.{n}.{at}_layernorm" for n in (0, 1) for at in ("input", "post_attention")]
    shapes |= {f"model.{name}.weight": (48,) for name in (*norms, "norm")}
    folder = tmp_path_factory.mktemp("models") / "small"
    with CanonicalWriter(folder, {}) as writer:
        writer.write("all", {name: np.zeros(s, np.float32) for name, s in shapes.items()})
        writer.publish(config.to_hf())
    return folder


class TestCommand:
    def test_table_and_file(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "plan.json"
        arguments = f"plan {model} --devices 4 --link pcie --batch 8 --context 64 --json {file}"
        assert cli.main(arguments.split()) == 0
        out = capsys.readouterr().out
        assert out.startswith("small: 2 layers of width 48")
        assert "=> " in out and "link pcie" in out
        data = json.loads(file.read_text())
        assert (data["devices"], data["batch"], data["context"]) == (4, 8, 64)
        assert data["decomposed"]

    def test_measure(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def quick(devices: int) -> Link:
            return measure_link(devices, sizes=SIZES)

        monkeypatch.setattr(plan_command, "measure_link", quick)
        assert cli.main(f"plan {model} --devices 16 --measure".split()) == 0
        out = capsys.readouterr().out
        assert "only 8 of 16 devices are visible" in out
        assert "simulated devices" in out
        assert "link measured between 8 of 16 cpu devices" in out

    def test_nothing_fits(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(f"plan {model} --devices 2 --memory 1e-6".split()) == 1
        assert "nothing fits" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--devices 0", "devices: expected a positive integer, got 0"),
            ("--devices 2 --memory -1", "--memory: expected GB > 0, got -1"),
            ("--devices 1 --measure", "measuring a link: expected at least 2 devices"),
        ],
    )
    def test_errors(
        self, model: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(f"plan {model} {arguments}".split()) == 1
        assert f"deinfer plan: {message}" in capsys.readouterr().err

    def test_no_such_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", str(tmp_path / "none"), "--devices", "2"]) == 1
        assert "deinfer plan:" in capsys.readouterr().err

    def test_example_parses(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["plan", "--help"])
        _, _, example = capsys.readouterr().out.partition("example: deinfer ")
        assert cli._parser().parse_args(example.split()).command == "plan"
