"""How much does each strategy send? Payload and wire a token and layer, each against ``naive``, of
Llama-3-70B and LLaMA-65B in bfloat16, counted in programs that are lowered from shapes alone.

Elements include padding, and what carries the norm's Σx² in ``sharded``. Wire is what one device
sends when all stand in a ring. Launches are counted in HLO compiled for a CPU, at keep 0.6 on 8
devices; XLA for a GPU may merge others.

    python -m bench.communication [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax

from bench.common import RESULTS, write
from bench.measured import LLAMA_3_70B, SEPARATE, SHARED, low_rank, ranks
from deinfer_jax import ModelConfig
from deinfer_jax.evaluate.communication import collectives, layer_program

MODELS = {
    "Llama-3-70B": LLAMA_3_70B,
    "LLaMA-65B": LLAMA_3_70B.replace(
        vocab_size=32000, intermediate_size=22016, num_kv_heads=64, max_position=2048
    ),
}
GROUPS = {"separate": SEPARATE, "shared": SHARED}
KEEPS = (0.4, 0.6, 0.8)
DEVICES = (2, 4, 8)
STRATEGIES = ("dense", "naive", "low_rank", "sharded")
TOKENS = 2
COMPILED = (0.6, 8)  # where launches are counted
# The machine code is not run, and the HLO is the same.
QUICKLY: Any = {"xla_backend_optimization_level": 0}
Row = dict[str, Any]
# low_rank and sharded have nearly the same payload: the second is a broad line under the first.
STYLES: dict[str, dict[str, Any]] = {
    "dense": dict(color="C0", marker="o"),
    "naive": dict(color="C1", marker="o"),
    "low_rank": dict(color="C2", marker="x", zorder=3),
    "sharded": dict(color="C3", marker="s", markerfacecolor="none", linewidth=4, alpha=0.5),
}


def decomposed(model: str, groups: str, keep: float) -> ModelConfig:
    """One layer."""
    config = MODELS[model].replace(num_layers=1)
    return low_rank(config, GROUPS[groups], ranks(config, GROUPS[groups], keep))


def measure(model: str, groups: str, keep: float, devices: int, strategy: str) -> Row:
    """What the program of a layer sends, elements a token."""
    config = decomposed(model, groups, keep)
    program = layer_program(config, strategy, devices, tokens=TOKENS)
    found = collectives(program)
    launches = None
    if (keep, devices) == COMPILED:
        launches = len(collectives(program.compile(compiler_options=QUICKLY)))
    return {
        "model": model,
        "groups": groups,
        "keep": keep,
        "devices": devices,
        "strategy": strategy,
        "collectives": ", ".join(
            f"{one.kind} {size // TOKENS}" for one in found for size in one.elements
        ),
        "operands": sum(len(one.operands) for one in found),
        "launches": launches,
        "payload": sum(one.payload for one in found) // TOKENS,
        "wire": sum(one.wire for one in found) / TOKENS,
    }


def compared(rows: list[Row]) -> None:
    """Adds what each row is of ``naive``'s."""
    case = ("model", "groups", "keep", "devices")
    naive = {tuple(r[k] for k in case): r for r in rows if r["strategy"] == "naive"}
    for row in rows:
        base = naive[tuple(row[k] for k in case)]
        for what in ("payload", "wire"):
            row[f"{what}_of_naive"] = round(row[what] / base[what], 5)


def table(rows: list[Row], what: str) -> str:
    """Markdown: a line a case, a column a strategy; elements, and the difference to ``naive``."""
    lines = [
        f"{what}, elements a token and layer (difference to naive)",
        "",
        "| model | groups | keep | p | " + " | ".join(STRATEGIES) + " |",
        "|---|---|--:|--:" + "|--:" * len(STRATEGIES) + "|",
    ]
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "groups", "keep", "devices"))
        change = 100 * (row[f"{what}_of_naive"] - 1)
        text = f"{row[what]:.0f}"
        if row["strategy"] != "naive":
            text += f" ({change:+.1f} %)".replace("-", "−")
        cells.setdefault(key, {})[row["strategy"]] = text
    for key, found in cells.items():
        columns = [*map(str, key), *(found[strategy] for strategy in STRATEGIES)]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def counts(rows: list[Row]) -> str:
    """Markdown: operands and launches of a layer."""
    lines = ["| model | groups | strategy | operands | launches |", "|---|---|---|--:|--:|"]
    for row in rows:
        if row["launches"] is not None:
            names = [row[name] for name in ("model", "groups", "strategy", "operands", "launches")]
            lines.append("| " + " | ".join(map(str, names)) + " |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Payload above, wire below, a column a model, on 8 devices."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(MODELS), sharex=True, sharey="row", squeeze=False)
    for across, what in zip(grid, ("payload", "wire"), strict=True):
        for axes, model in zip(across, MODELS, strict=True):
            here = [row for row in rows if (row["model"], row["devices"]) == (model, 8)]
            for strategy in STRATEGIES:
                for groups in GROUPS:
                    some = [r for r in here if (r["strategy"], r["groups"]) == (strategy, groups)]
                    by_groups = strategy in (
                        "low_rank",
                        "sharded",
                    )  # the others do not depend on it
                    if groups == "shared" and not by_groups:
                        continue
                    axes.plot(
                        [row["keep"] for row in some],
                        [row[f"{what}_of_naive"] for row in some],
                        **STYLES[strategy],
                        linestyle="--" if groups == "shared" else "-",
                        label=f"{strategy}, {groups} groups" if by_groups else strategy,
                    )
            absolute = next(row[what] for row in here if row["strategy"] == "naive")
            axes.set_title(f"{model}: {what}, naive = {absolute:.0f}", fontsize="medium")
            axes.set_ylim(bottom=0)
            axes.set_xticks(KEEPS)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.grid(alpha=0.3)
        across[0].set_ylabel("of naive")
    for axes in grid[-1]:
        axes.set_xlabel("keep")
    figure.suptitle("Elements a token and layer on 8 devices, bfloat16")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
    print(f"plotted to {path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default="communication")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    started = time.perf_counter()
    rows = [
        measure(model, groups, keep, devices, strategy)
        for model in MODELS
        for groups in GROUPS
        for keep in KEEPS
        for devices in DEVICES
        for strategy in STRATEGIES
    ]
    compared(rows)
    for what in ("payload", "wire"):
        print(table(rows, what), end="\n\n")
    print(counts(rows), end="\n\n")
    seconds = round(time.perf_counter() - started, 1)
    about = {"dtype": "bfloat16", "tokens": TOKENS, "seconds": seconds}
    write(args.name, {**about, "rows": rows}, args.out)
    try:
        plot(rows, args.out / f"{args.name}.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
