"""The report: what the table says, that JSON keeps everything, and what the plot draws."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deinfer_jax.decompose.report import ModuleReport, Report

OUTPUTS = {"self_attn": {"q_proj": 48, "k_proj": 16, "v_proj": 16}, "mlp": {"down_proj": 48}}


def module(layer: int, part: str, projection: str, rank: int | None, **changes: Any) -> Any:
    """A linear of width 48; q, k and v are a group whose v is counted with q."""
    out = OUTPUTS[part][projection]
    group_out = sum(OUTPUTS[part].values())
    shared = part == "self_attn"
    first = projection in ("q_proj", "down_proj")
    parameters = out * 48 if rank is None else out * rank + (48 * rank if first else 0)
    name = f"model.layers.{layer}.{part}"
    values: dict[str, Any] = dict(
        module=f"{name}.{projection}",
        group=f"{name}.q_k_v" if shared else f"{name}.{projection}",
        layer=layer,
        projection=projection,
        shape=(out, 48),
        rank=rank,
        break_even=(group_out * 48 - 1) // (group_out + 48),
        relative_error=None if rank is None else 1 / rank,
        loss=0.25 / rank if rank is not None and first else None,
        parameters=parameters,
        dense_parameters=out * 48,
        bytes=2 * parameters,
        dense_bytes=2 * out * 48,
    )
    return ModuleReport(**{**values, **changes})


def make(layers: int = 2, **changes: Any) -> Report:
    modules = []
    for layer in range(layers):
        rank = 8 + layer % 16
        modules += [module(layer, "self_attn", name, rank) for name in OUTPUTS["self_attn"]]
        modules.append(module(layer, "mlp", "down_proj", 5 if layer else None))
    values: dict[str, Any] = dict(
        modules=tuple(modules),
        method="fisher",
        allocation="loss",
        groups="shared",
        keep_asked=0.5,
        keep=0.49812,
        calibration={"source": "text", "names": ["a.txt", "b.txt"], "tokens": 1024},
        seconds={"statistics": 1.25, "factors": 0.5},
        peak_bytes=3_000_000,
        notes=("everything is small",),
    )
    return Report(**{**values, **changes})


def test_json_keeps_everything() -> None:
    report = make()
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_the_saved_file_holds_the_report(tmp_path: Path) -> None:
    report = make()
    path = report.save(tmp_path)
    assert path == tmp_path / "report.json"
    assert Report.from_json(json.loads(path.read_text(encoding="utf-8"))) == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "expected version 1, got 2"),
        ({"colour": "red"}, r"fields of Report, missing \[\], unknown \['colour'\]"),
        ({"modules": [{}]}, r"fields of ModuleReport, missing \['module', 'group', 'layer'"),
    ],
)
def test_other_json_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Report.from_json({**make().to_json(), **change})


def test_what_is_not_a_number_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        make(keep=float("nan")).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_module_has_a_line() -> None:
    (line,) = [line for line in str(make()).splitlines() if line.startswith("1.self_attn.q_proj")]
    # (48 + 48) · 9 of 48 · 48 parameters, in two bytes; break-even 80 · 48 / 128 = 30, less one.
    assert line.split() == "1.self_attn.q_proj 48 × 48 9 31% 0.1111 2.78e-02 37.5% 0.00173".split()


def test_a_dense_module_says_so() -> None:
    (line,) = [line for line in str(make()).splitlines() if line.startswith("0.mlp.down_proj")]
    assert line.split()[4:8] == ["dense", "100%", "–", "–"]


def test_head_and_totals() -> None:
    text = str(make())
    assert text.startswith("method fisher, groups shared, ranks by loss; keep 0.5 asked, 0.4981")
    assert "calibration: source text, names a.txt, b.txt, tokens 1024" in text
    # Layer 0: 128 · 8 + 48 · 48; layer 1: 128 · 9 + 96 · 5. Loss: .25 (1/8 + 1/9 + 1/5).
    parameters, dense = 128 * 8 + 48 * 48 + 128 * 9 + 96 * 5, 2 * 128 * 48
    said = " ".join(text.split())
    assert f"8 linears, 1 left dense; {parameters} of {dense} parameters (40.36%)" in said
    assert "estimated loss 0.1090 nats a token (second order" in said
    assert text.endswith("statistics 1.2 s, factors 0.5 s, peak memory 3 MB\neverything is small")


def test_ranks_that_were_given() -> None:
    assert "ranks given" in str(make(keep_asked=None))


def test_without_calibration_or_estimates() -> None:
    modules = tuple(replace(one, loss=None, relative_error=None) for one in make().modules)
    text = str(make(method="svd", modules=modules, calibration={}, peak_bytes=None, seconds={}))
    assert "calibration" not in text and "estimated loss" not in text and "memory" not in text


def test_layers_are_summed_up_by_projection() -> None:
    lines = str(make(layers=2)).splitlines()
    (k,) = [line for line in lines if line.startswith("k_proj")]
    assert k.split()[1:4] == ["0/2", "8/8/9", "28%/28%/31%"]
    (down,) = [line for line in lines if line.startswith("down_proj")]
    assert down.split()[1:5] == ["1/2", "5/5/5", "22%/22%/100%", "0.200/0.200/0.200"]


def test_a_deep_model_is_shown_by_projection_only() -> None:
    report = make(layers=32)
    assert "31.mlp.down_proj" not in str(report)
    assert "31.mlp.down_proj" in report.table(every_module=True)


def test_notes_are_below_the_modules() -> None:
    noted = module(0, "self_attn", "q_proj", 8, note="padded " * 30)
    lines = str(make(modules=(noted,))).splitlines()
    assert lines[4].endswith("*")
    assert lines[5].startswith("* model.layers.0.self_attn.q_proj: padded")


@pytest.mark.parametrize("every_module", [False, True])
def test_a_large_model_fits_100_columns(every_module: bool) -> None:
    large = replace(
        make().modules[0],
        module="model.layers.100.self_attn.down_proj",
        layer=100,
        shape=(128256, 16384),
        rank=12345,
        break_even=14526,
        relative_error=0.123456,
        loss=-1.234e-12,
        bytes=4 * 128256 * 16384,
        dense_bytes=4 * 128256 * 16384,
        note="x y" * 60,
    )
    calibration = {"sha256": "0" * 64, "names": ["some-long-name.txt"] * 9}
    report = make(modules=(large, replace(large, layer=99)), calibration=calibration)
    lines = report.table(every_module=every_module).splitlines()
    assert max(map(len, lines)) <= 100


class TestPlot:
    """Ranks by layer as shares of break-even."""

    @pytest.fixture
    def axes(self) -> Any:
        pytest.importorskip("matplotlib")
        from deinfer_jax.decompose.report import _figure

        return _figure(make(layers=3)).axes[0]

    def test_a_group_is_a_line_of_its_ranks(self, axes: Any) -> None:
        (line,) = [line for line in axes.lines if line.get_label() == "q, k, v"]
        assert line.get_xdata().tolist() == [0, 1, 2]
        assert line.get_ydata() * 29 == pytest.approx([8, 9, 10])  # 80 · 48 / 128 = 30, less one

    def test_dense_modules_are_marked(self, axes: Any) -> None:
        (line,) = [line for line in axes.lines if line.get_label() == "down"]
        assert line.get_ydata() == pytest.approx([1, 5 / 23, 5 / 23])
        marks = [line for line in axes.lines if line.get_label() == "_dense"]
        assert [mark.get_xdata().tolist() for mark in marks] == [[], [0]]

    def test_the_file_is_a_picture(self, tmp_path: Path) -> None:
        image = pytest.importorskip("matplotlib.image")
        make().plot(tmp_path / "ranks.png")
        pixels = image.imread(tmp_path / "ranks.png")
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600
        assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4)}) > 50  # lines and letters

    def test_pyplot_is_left_alone(self, tmp_path: Path) -> None:
        pyplot = pytest.importorskip("matplotlib.pyplot")
        before = pyplot.get_fignums()
        make().plot(tmp_path / "ranks.svg")
        assert pyplot.get_fignums() == before

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"deinfer-jax\[plot\]"):
            make().plot(tmp_path / "ranks.png")
