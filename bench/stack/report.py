"""The result file of both links, its tables and its plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.stack.setting import GROUPS, LINKS, ORDER, design_ms

Row = dict[str, Any]
ALL_REDUCES = (16 << 20, 64 << 10)  # bytes
BARS = {"fast": {"512": 1.4, "prefill": 1.25}, "slow": {"512": 3.0, "prefill": 3.0}}  # over naive
WITHIN, OF_DENSE = 1.03, 1.02  # of the design's figures; of dense


def place_of(key: str) -> Row:
    """What a row is of."""
    names = ("part", "link", "groups", "ranks", "strategy", "cell")
    return dict(zip(names, key.split("/"), strict=True))


class Results:
    """Rows by what they are of, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {}
        if path.exists():
            self.data = json.loads(path.read_text())
        for name in ("links", "attention", "check", "rows"):
            self.data.setdefault(name, {})

    def save(self) -> None:
        """Writes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        other = self.path.with_suffix(".part")
        other.write_text(json.dumps(self.data, indent=1) + "\n")
        other.replace(self.path)

    def begin(self, key: str) -> None:
        """Notes what is about to run, for the process that comes after one that dies in it."""
        self.data["running"] = key
        self.save()

    def end(self, key: str, row: Row) -> None:
        """What came of it."""
        self.data["rows"][key] = row
        self.data["running"] = None
        self.save()

    def bury(self) -> None:
        """What ran when a process died is run again with the plainest attention, or given up."""
        key = self.data.get("running")
        if not key:
            return
        name = place_of(key)["cell"]
        if key.startswith("cells") and self.data["attention"].get(name, "xla") != "xla":
            self.data["attention"][name], self.data["running"] = "xla", None
            print(f"died or hung in {key}: from now on with XLA's attention", flush=True)
            return
        self.end(key, {**place_of(key), "error": "the process died or hung in it"})
        print(f"given up: {key}", flush=True)

    def retry(self) -> None:
        """Forgets rows that failed."""
        rows = self.data["rows"].items()
        self.data["rows"] = {key: row for key, row in rows if "error" not in row}
        self.save()

    def find(self, *key: str) -> Row:
        """A row, empty where there is none."""
        return self.data["rows"].get("/".join(key), {})


@dataclass(frozen=True, slots=True)
class Table:
    """What the rows say."""

    results: Results

    def ms(self, link: str, groups: str, ranked: str, strategy: str, name: str) -> float | None:
        """Of a cell; dense is the same in all groups."""
        row = self.results.find("cells", link, groups, ranked, strategy, name)
        if not row and strategy == "dense":
            rows = self.results.data["rows"].values()
            same = dict(part="cells", link=link, strategy="dense", cell=name)
            row = next((r for r in rows if same.items() <= r.items()), {})
        return row.get("ms")

    def lines(self) -> list[str]:
        """A line a cell."""
        found = [
            "| link | groups | ranks | strategy | cell | ms a layer | design | of design | of "
        ]
        found[0] += "naive | of dense | of limit | attention |"
        found.append("|---|---|---|---|---|--:|--:|--:|--:|--:|--:|---|")
        for row in self.of("cells"):
            place = [row[key] for key in ("link", "groups", "ranks", "strategy", "cell")]
            if "error" in row:
                found.append(f"| {' | '.join(place)} | {row['error'][:100]} |")
                continue
            link, groups, ranked, strategy, name = place
            design = design_ms(link, strategy, name)
            ratios = [
                _ratio(row["ms"], self.ms(link, groups, ranked, other, name))
                for other in ("naive", "dense")
            ]
            figures = [f"{row['ms']:.4f}", f"{design}", _ratio(row["ms"], design), *ratios]
            figures += [f"{100 * row['share_of_limit']:.0f} %", row["attention"]]
            found.append(f"| {' | '.join(place + figures)} |")
        return found

    def bars(self) -> list[str]:
        """What is asked for, and whether it holds."""
        found = []
        rows = [row for row in self.of("cells") if "ms" in row]
        ratios = [
            (row["ms"] / design_ms(row["link"], row["strategy"], row["cell"]), row) for row in rows
        ]
        missed = sorted((r for r in ratios if r[0] > WITHIN), key=lambda r: -r[0])
        found.append(f"{_passed(not missed)} {len(rows) - len(missed)} of {len(rows)} cells within")
        found[-1] += f" {WITHIN} of the design's figure"
        for ratio, row in missed:
            place = " ".join(row[key] for key in ("link", "groups", "ranks", "strategy", "cell"))
            found.append(f"       {place}: {ratio:.3f}")
        settings = sorted({(r["link"], r["groups"], r["ranks"]) for r in rows})
        for link, groups, ranked in settings:
            for name, bar in BARS[link].items():
                at = partial(self.ms, link, groups, ranked)
                naive, dense = at("naive", name), at("dense", name)
                ours = {s: at(s, name) for s in ("low_rank", "sharded")}
                times = {s: ms for s, ms in ours.items() if ms is not None}
                place = f"{link} {groups} {ranked} {name}"
                if naive is not None and times:
                    best = min(times, key=times.__getitem__)
                    over = naive / times[best]
                    found.append(
                        f"{_passed(over >= bar)} {place}: {best} is {over:.2f}x naive (bar {bar})"
                    )
                for strategy, ms in times.items() if dense is not None else ():
                    assert dense is not None
                    share = ms / dense
                    holds = _passed(share <= OF_DENSE)
                    found.append(f"{holds} {place}: {strategy} is {share:.3f} of dense")
        sharded = [row for row in rows if row["strategy"] == "sharded"]
        counted = all(
            row.get("collectives_a_layer") == {"all-reduce": 4} and row["one_buffer_each"]
            for row in sharded
        )
        for groups, differences in self.results.data["check"].items():
            worst = differences.get("worst")
            text = differences.get("error", f"all strategies agree within {worst}, in float32")
            found.append(f"{_passed(worst is not None)} {groups} groups: {text}")
        if sharded:
            found.append(f"{_passed(counted)} sharded: 4 all-reduces a layer of one buffer each")
        for link, about in self.results.data["links"].items():
            times = ", ".join(f"{b} bytes {us} µs" for b, us in about["all_reduce_us"].items())
            verdict = {True: "ok  ", False: "MISS", None: "    "}[about["as_expected"]]
            found.append(f"{verdict} {link} link: all-reduce of {times}")
        small = [
            about["all_reduce_us"][str(ALL_REDUCES[1])]
            for about in map(self.results.data["links"].get, LINKS)
            if about is not None and about["as_expected"] is not None
        ]
        if len(small) == 2:
            moved = small[1] > small[0] * 1.1
            found.append(f"{_passed(moved)} the small one moved, too: XLA's kernels are off")
        return found

    def split(self) -> list[str]:
        """Of decode at B 1 and 64: products, collectives, rest, and what that is of dense's
        total."""
        found = ["| link | groups | ranks | strategy | B | ms | of dense | products | collectives "]
        found[0] += "| rest | share of dense's total: products, collectives, rest |"
        found.append("|---|---|---|---|--:|--:|--:|--:|--:|--:|---|")
        for row in self.of("cells"):
            groups, ranked, strategy, name = (
                row[key] for key in ("groups", "ranks", "strategy", "cell")
            )
            place = [groups, ranked, strategy, name]
            parts = self.results.find("split", "any", *place)
            dense = self.ms(row["link"], groups, ranked, "dense", name)
            if "products" not in parts or "ms" not in row:
                continue
            products = parts["products"]["ms"]
            without = parts["without_collectives"]["ms"]
            three = [products, row["ms"] - without, without - products]
            shares = "" if dense is None else ", ".join(_ratio(ms, dense) for ms in three)
            figures = [f"{row['ms']:.4f}", _ratio(row["ms"], dense), *(f"{t:.4f}" for t in three)]
            found.append(f"| {' | '.join([row['link'], *place, *figures, shares])} |")
        return found

    def paged(self) -> list[str]:
        """The engine beside the bare stack."""
        found = [
            "| link | strategy | ms a step | a layer | the bare stack's |",
            "|---|---|--:|--:|--:|",
        ]
        for row in self.of("paged"):
            place = [row["link"], row["strategy"]]
            if "ms" not in row:
                found.append(f"| {' | '.join(place)} | {row['error'][:100]} |")
                continue
            bare = self.ms(row["link"], "separate", "rounded", row["strategy"], "64")
            figures = [
                f"{row['ms_a_step']:.3f}",
                f"{row['ms']:.4f}",
                "" if bare is None else f"{bare:.4f}",
            ]
            found.append(f"| {' | '.join(place + figures)} |")
        return found

    def overlap(self) -> list[str]:
        """What each collective overlaps with; equal ones are counted."""
        found = []
        for row in self.of("cells"):
            if "overlap" not in row:
                continue
            found.append(" ".join(row[k] for k in ("link", "groups", "ranks", "strategy", "cell")))
            found += [f"    {count} × {text}" for text, count in row["overlap"].items()]
        return found

    def of(self, part: str) -> list[Row]:
        """Its rows."""
        return [row for row in self.results.data["rows"].values() if row["part"] == part]


def _ratio(ms: float, other: float | None) -> str:
    return "" if other is None else f"{ms / other:.3f}"


def _passed(holds: bool) -> str:
    return "ok  " if holds else "MISS"


def plot(table: Table, path: Path) -> None:
    """Milliseconds a layer: a row a link, a column a cell, a group of bars a strategy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(LINKS), len(ORDER), squeeze=False)
    order = ("dense", "naive", "low_rank", "sharded")
    for across, link in zip(grid, LINKS, strict=True):
        for axes, name in zip(across, ORDER, strict=True):
            series: dict[str, Sequence[float | None]] = {
                "design": [design_ms(link, strategy, name) for strategy in order],
                **{
                    f"{groups} groups": [table.ms(link, groups, "rounded", s, name) for s in order]
                    for groups in GROUPS
                },
            }
            for number, (label, heights) in enumerate(series.items()):
                places = np.arange(len(order)) + (number - 1) * 0.27
                bars = [height or 0.0 for height in heights]
                colour = ("0.75", "C0", "C2")[number]
                axes.bar(places, bars, 0.25, color=colour, label=label)
            axes.set_xticks(range(len(order)), order, fontsize="small")
            title = "prefill, 16384 tokens" if name == "prefill" else f"decode, B {name}"
            axes.set_title(f"{title}, {link} link", fontsize="medium")
            axes.grid(axis="y", alpha=0.3)
        across[0].set_ylabel("ms a layer")
    figure.suptitle("Llama-3-70B layers on two GPUs, bfloat16: the bare stack")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
    print(f"plotted to {path.name}")
