"""What a decomposition did: ranks, errors and bytes of every module, as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ModuleReport", "Report"]

WIDTH = 100
VERSION = 1
MOST_LINES = 56  # a table of more modules than that is shown by projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One linear.

    Attributes:
        module: its name, ``model.layers.0.self_attn.q_proj``.
        group: name of the factor v that it reads, ``model.layers.0.self_attn.q_k_v`` where it is
            shared; the members of a group have rank and break-even in common.
        layer: from 0.
        projection: last part of the name, ``q_proj``.
        shape: (out, in) of the dense weight.
        rank: None = left dense.
        break_even: the largest rank whose factors are smaller than the group's dense weights.
        relative_error: ‖(W − W′) G^½‖ / ‖W G^½‖, the relative error of the outputs over the
            calibration tokens (Frobenius); None where it is not known.
        loss: estimated loss of the group in nats a token, in its first member; None in the others
            and where there is no estimate.
        parameters: what is stored, a shared v in its group's first member.
        dense_parameters: of the dense weight (biases count in neither).
        bytes: of ``parameters`` as they are stored.
        dense_bytes: of ``dense_parameters`` in the same dtype.
        note: anything unusual.
    """

    module: str
    group: str
    layer: int
    projection: str
    shape: tuple[int, int]
    rank: int | None
    break_even: int
    relative_error: float | None
    loss: float | None
    parameters: int
    dense_parameters: int
    bytes: int
    dense_bytes: int
    note: str = ""

    @property
    def share(self) -> float:
        """Rank as a share of the break-even rank; 1 where the module is dense."""
        return 1.0 if self.rank is None else self.rank / max(self.break_even, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A decomposition.

    Attributes:
        modules: every decomposable linear, in the model's order.
        method: ``svd``, ``whitened`` or ``fisher``.
        allocation: how ranks were chosen.
        groups: which projections share a factor.
        keep_asked: fraction of the parameters that was asked for; None where ranks were given.
        keep: the fraction reached.
        calibration: description of the calibration; empty where none was needed.
        seconds: by step.
        peak_bytes: most memory of the process, None where it is not known.
        notes: what else a reader should know.
    """

    modules: tuple[ModuleReport, ...]
    method: str
    allocation: str
    groups: str
    keep_asked: float | None
    keep: float
    calibration: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> float | None:
        """Estimated loss of the whole model, nats a token; None without estimates."""
        return _sum(module.loss for module in self.modules)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, every_module: bool | None = None) -> str:
        """The report as text, at most 100 columns wide.

        Args:
            every_module: a line a module; None = where that makes at most 56 lines. Models of
                several layers are summed up by projection in any case.
        """
        if every_module is None:
            every_module = len(self.modules) <= MOST_LINES
        lines = self._head()
        if every_module:
            lines += ["", *self._module_lines()]
        if len({module.layer for module in self.modules}) > 1:
            lines += ["", *self._projection_lines()]
        return "\n".join(lines + ["", *self._total_lines()])

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types, with a version; :meth:`from_json` reads it."""
        # Through text, so that the result equals what is read from the file.
        return json.loads(_dumps({"version": VERSION, **dataclasses.asdict(self)}))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """A report from :meth:`to_json`.

        Raises:
            ValueError: another version, or fields are missing or unknown.
        """
        if data.get("version") != VERSION:
            raise ValueError(f"report: expected version {VERSION}, got {data.get('version')!r}")
        values = _fields(Report, {name: data[name] for name in data if name != "version"})
        modules = [_fields(ModuleReport, module) for module in values["modules"]]
        values["modules"] = tuple(
            ModuleReport(**{**module, "shape": tuple(module["shape"])}) for module in modules
        )
        return Report(**{**values, "notes": tuple(values.get("notes", ()))})

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes ``report.json`` into a directory that exists; returns its path."""
        path = Path(directory) / "report.json"
        path.write_text(_dumps(self.to_json()) + "\n", encoding="utf-8")
        return path

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the ranks by layer, as a share of the break-even rank, a line a projection.

        Projections that share a factor have one line. Dense modules lie at 1, as hollow squares.

        Args:
            path: of the picture; its ending says the format (``.png``, ``.svg``, ``.pdf``).

        Raises:
            ImportError: matplotlib is not installed.
        """
        _figure(self).savefig(path, dpi=150)

    def _head(self) -> list[str]:
        asked = "ranks given" if self.keep_asked is None else f"keep {self.keep_asked:.4g} asked"
        lines = [
            f"method {self.method}, groups {self.groups}, ranks by {self.allocation}; {asked}, "
            f"{self.keep:.4f} reached"
        ]
        if self.calibration:
            what = ", ".join(f"{key} {_plain(value)}" for key, value in self.calibration.items())
            lines.append(f"calibration: {what}")
        return _wrap(lines)

    def _module_lines(self) -> list[str]:
        rows = [
            (
                module.module.removeprefix("model.layers."),
                f"{module.shape[0]} × {module.shape[1]}",
                "dense" if module.rank is None else str(module.rank),
                f"{module.share:.0%}",
                _number(module.relative_error, ".4f"),
                _number(module.loss, ".2e"),
                f"{module.parameters / module.dense_parameters:.1%}",
                _megabytes(module.bytes),
                "*" if module.note else "",
            )
            for module in self.modules
        ]
        head = ("module", "out × in", "rank", "of b.e.", "error", "loss", "kept", "MB", "")
        noted = [f"* {module.module}: {module.note}" for module in self.modules if module.note]
        return _columns([head, *rows]) + _wrap(noted)

    def _projection_lines(self) -> list[str]:
        rows = []
        for projection in dict.fromkeys(module.projection for module in self.modules):
            of = [module for module in self.modules if module.projection == projection]
            ranks = [module.rank for module in of if module.rank is not None]
            errors = [m.relative_error for m in of if m.relative_error is not None]
            rows.append(
                (
                    projection,
                    f"{len(of) - len(ranks)}/{len(of)}",
                    _spread(ranks, "{:.0f}"),
                    _spread([module.share for module in of], "{:.0%}"),
                    _spread(errors, "{:.3f}"),
                    _number(_sum(module.loss for module in of), ".2e"),
                    f"{_megabytes(sum(m.bytes for m in of))} of "
                    f"{_megabytes(sum(m.dense_bytes for m in of))}",
                )
            )
        head = ("projection", "dense", "rank", "of b.e.", "error", "loss", "MB")
        return [
            *_columns([head, *rows]),
            "rank, share of break-even (b.e.), error: minimum/median/maximum over the layers",
        ]

    def _total_lines(self) -> list[str]:
        parameters = sum(module.parameters for module in self.modules)
        dense = sum(module.dense_parameters for module in self.modules)
        size = sum(module.bytes for module in self.modules)
        dense_size = sum(module.dense_bytes for module in self.modules)
        left = sum(module.rank is None for module in self.modules)
        total = (
            f"total: {len(self.modules)} linears, {left} left dense; {parameters} of {dense} "
            f"parameters ({parameters / max(dense, 1):.2%}), {_megabytes(size)} of "
            f"{_megabytes(dense_size)} MB"
        )
        if self.loss is not None:
            total += (
                f"; estimated loss {self.loss:.4f} nats a token (second order, on the calibration "
                "text; perplexity tells what is really lost)"
            )
        steps = [f"{step} {seconds:.1f} s" for step, seconds in self.seconds.items()]
        if self.peak_bytes is not None:
            steps.append(f"peak memory {_megabytes(self.peak_bytes)} MB")
        return _wrap([total, *([", ".join(steps)] if steps else []), *self.notes])


def _figure(report: Report) -> Any:
    """A matplotlib figure of its own: no pyplot, no global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib; it comes with the extra: pip install 'deinfer-jax[plot]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, modules in _lines(report.modules).items():
        (line,) = axes.plot(
            [module.layer for module in modules],
            [module.share for module in modules],
            marker=".",
            label=label,
        )
        dense = [module.layer for module in modules if module.rank is None]
        axes.plot(
            dense, [1.0] * len(dense), "s", mfc="none", color=line.get_color(), label="_dense"
        )
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--", label="break-even")
    if any(module.rank is None for module in report.modules):
        axes.plot([], [], "s", mfc="none", color="0.3", label="dense")
    axes.set_xlabel("layer")
    axes.set_ylabel("rank, share of break-even")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"{report.method}, groups {report.groups}, keep {report.keep:.3f}")
    figure.legend(loc="outside right upper")
    return figure


def _lines(modules: Iterable[ModuleReport]) -> dict[str, list[ModuleReport]]:
    """First member of every group, under the names of the group's members: ``q, k, v``."""
    members: dict[str, list[ModuleReport]] = {}
    for module in modules:
        members.setdefault(module.group, []).append(module)
    lines: dict[str, list[ModuleReport]] = {}
    for group in members.values():
        label = ", ".join(module.projection.removesuffix("_proj") for module in group)
        lines.setdefault(label, []).append(group[0])
    return {label: sorted(line, key=lambda m: m.layer) for label, line in lines.items()}


def _fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name: f for f in dataclasses.fields(kind)}
    missing = [
        name
        for name, f in known.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    unknown = sorted(set(values) - set(known))
    if missing or unknown:
        raise ValueError(
            f"report: expected the fields of {kind.__name__}, missing {missing}, unknown {unknown}"
        )
    return dict(values)


def _dumps(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g}" if count < 1e8 else f"{count / 1e6:.0f}"


def _spread(values: list[Any], form: str) -> str:
    if not values:
        return "–"
    three = (min(values), statistics.median_low(values), max(values))
    return "/".join(form.format(value) for value in three)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _wrap(lines: Iterable[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""]
    ]
