"""What one process measures: all rows of one link."""

from __future__ import annotations

import argparse
import os
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.stack.check import check
from bench.stack.kernels import UNCAPTURED, kernel_times
from bench.stack.layers import ATTENTION, Cell, Layers, no_collectives, noise, own_part
from bench.stack.overlap import schedule
from bench.stack.paged import paged_step
from bench.stack.report import ALL_REDUCES, Results, place_of
from bench.stack.setting import DEVICES, SPLIT, Setting, design_ms
from bench.stack.timing import all_reduce_seconds, attention_seconds, timed
from deinfer_jax.checkpoint.parameters import random_parameters
from deinfer_jax.evaluate.communication import collectives
from deinfer_jax.layers.parameter import Declaration
from deinfer_jax.machine import machine
from deinfer_jax.parallel.mesh import choose_placement
from deinfer_jax.parallel.strategies import get_strategy

Row = dict[str, Any]
READ_BANDWIDTH = 4.42e12  # bytes/s of an H200, the design's
# Bytes/s that one device sends in a plain all-reduce of 16 MB: with two switches set it must be
# under the second, without them over the first.
FAST_LINK, SLOW_LINK = 1e11, 6e10
HUNG = 75  # what a process ends with that hangs


class Bench:
    """Everything that one process measures."""

    def __init__(self, args: argparse.Namespace, setting: Setting, results: Results) -> None:
        self.args, self.setting, self.results = args, setting, results
        self.link: str = args.child
        self.placement = choose_placement(DEVICES)
        self.device = self.placement.mesh.devices.flat[0]
        self.queues = self.placement.platform != "cpu"  # simulated devices must not queue calls
        self.weights: dict[tuple[str, ...], Any] = {}

    # What there is time for.

    def wants(self, key: str) -> bool:
        """Whether a row is missing, and there is time left for it."""
        if key in self.results.data["rows"]:
            return False
        if time.time() > self.args.deadline:
            print(f"no time for {key}", flush=True)
            return False
        return True

    def row(self, key: str, run: Callable[[], Row]) -> None:
        """Runs one row under a watchdog. What goes wrong in it is its result."""
        self.results.begin(key)
        started = time.perf_counter()
        with self.watched(key):
            try:
                row = run()
            except Exception as error:  # whatever it is, the other rows are still to be had
                row = {"error": f"{type(error).__name__}: {error}"[:2000]}
                print(f"{key}: {row['error']}", flush=True)
        row = {**place_of(key), **row, "total_s": round(time.perf_counter() - started, 1)}
        self.results.end(key, row)

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Ends the process if this takes too long, which is how a collective hangs."""
        watchdog = threading.Timer(self.args.row_seconds, _give_up, (what,))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def layers(self, groups: str, ranked: str, strategy: str) -> Layers:
        config = self.setting.config(groups, ranked)
        return Layers(config, get_strategy(strategy, DEVICES), self.placement, self.setting.dtype)

    def loaded(self, layers: Layers, key: tuple[str, ...]) -> Any:
        """Weights, of which those of one stack are kept."""
        if key not in self.weights:
            self.weights.clear()
            started = time.perf_counter()
            # One program a shape; they have no collectives and nothing to tune, so that several
            # may be compiled at a time.
            kinds = {(d.shape, d.spec, _pieces(d)): d for d in layers.declared}
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                list(
                    pool.map(lambda d: random_parameters([d], 0, layers.placement), kinds.values())
                )
            made = random_parameters(layers.declared, 0, layers.placement)
            self.weights[key] = jax.block_until_ready(made)
            print(f"{' '.join(key)}: weights in {time.perf_counter() - started:.1f} s", flush=True)
        return self.weights[key]

    # Parts.

    def prepare(self) -> None:
        """Whether the link is what it should be, and the attention to use."""
        self.results.bury()
        with self.watched("the first all-reduces"):
            self._look_at_link()
        chosen = self.results.data["attention"]
        for name in self.args.cells:
            if name not in chosen:
                with self.watched(f"attention {name}"):
                    chosen[name] = self._choose_attention(name)
                self.results.save()

    def _look_at_link(self) -> None:
        times = {
            size: all_reduce_seconds(size, self.placement, queues=self.queues)
            for size in ALL_REDUCES
        }
        sent = ALL_REDUCES[0] / times[ALL_REDUCES[0]]  # 2(p − 1)/p = 1
        took = sent > FAST_LINK if self.link == "fast" else sent < SLOW_LINK
        about: Row = {
            "machine": machine(),
            "environment": {
                name: os.environ.get(name, "")
                for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE", "XLA_FLAGS")
            },
            "all_reduce_us": {str(size): round(1e6 * s, 1) for size, s in times.items()},
            "as_expected": took if self.queues else None,
        }
        self.results.data["links"][self.link] = about
        self.results.save()
        text = ", ".join(f"{size} bytes {1e6 * s:.1f} µs" for size, s in times.items())
        print(f"{self.link} link: all-reduce of {text}", flush=True)
        if self.queues and not took:
            print(f"WARNING: {sent / 1e9:.0f} GB/s is not what a {self.link} link does", flush=True)

    def cells(self) -> None:
        """The stack, in all forms."""
        self._every_cell("cells", self._cell)

    def split(self) -> None:
        """Of small decode, on one device: all without collectives, and products alone. The link has
        no part in it."""
        for ranked, groups, strategy in self.stacks():
            layers = self.layers(groups, ranked, strategy)
            for name in SPLIT:
                key = "/".join(("split", "any", groups, ranked, strategy, name))
                if name in self.args.cells and self.wants(key):
                    self.row(key, partial(self._split, layers, (groups, ranked, strategy), name))

    def kernels(self) -> None:
        """Where the stack's time goes. A profiler shows kernels that are launched one by one, so
        without command buffers."""
        self._every_cell("kernels", self._kernels)

    def paged(self) -> None:
        """The engine's decode step at B 64."""
        for strategy in self.args.strategies:
            key = "/".join(("paged", self.link, "separate", "rounded", strategy, "64"))
            if self.wants(key):
                self.weights.clear()
                self.row(key, partial(self._paged, strategy))

    def check(self) -> None:
        """All strategies against one device, small and in float32."""
        for groups in self.args.groups:
            if "worst" in self.results.data["check"].get(groups, {}):
                continue
            with self.watched(f"check {groups}"):
                try:
                    found: Row = check(groups, self.placement)
                    found["worst"] = max(found.values())
                except Exception as error:
                    found = {"error": f"{type(error).__name__}: {error}"[:2000]}
                    print(f"CHECK FAILED: {found['error']}", flush=True)
            self.results.data["check"][groups] = found
            self.results.save()

    def _every_cell(self, part: str, run: Callable[[Layers, tuple[str, ...], str], Row]) -> None:
        for ranked, groups, strategy in self.stacks():
            layers = self.layers(groups, ranked, strategy)
            for name in self.args.cells:
                key = "/".join((part, self.link, groups, ranked, strategy, name))
                if self.wants(key):
                    self.row(key, partial(run, layers, (groups, ranked, strategy), name))

    def stacks(self) -> list[tuple[str, str, str]]:
        """Ranks, groups, strategy; dense has no groups."""
        return [
            (ranked, groups, strategy)
            for ranked in self.args.ranks
            for groups in self.args.groups
            for strategy in self.args.strategies
            if strategy != "dense" or (groups, ranked) == (self.args.groups[0], self.args.ranks[0])
        ]

    # Rows.

    def _cell(self, layers: Layers, stack: tuple[str, ...], name: str) -> Row:
        cell, weights = self.setting.cell(name), self.loaded(layers, stack)
        state = layers.arguments(cell, self._residual(cell))
        notes, first = [], ATTENTION.index(self.results.data["attention"][name])
        for kind in ATTENTION[first:]:
            started = time.perf_counter()
            run, how = layers.program(cell, kind)
            try:
                program = run.lower(weights, *state).compile(compiler_options=how)
                compiled = time.perf_counter() - started
                x, pools = jax.block_until_ready(program(weights, *state))
            except Exception as error:
                if kind == ATTENTION[-1] or "memory" in str(error):
                    raise
                notes.append(f"{kind}: {str(error)[:300]}")
                print(f"{layers.strategy.name} {name}: attention {notes[-1]}", flush=True)
                self.results.data["attention"][name] = ATTENTION[ATTENTION.index(kind) + 1]
                state = layers.arguments(cell, self._residual(cell))
                continue
            lengths = state[2]

            def step(x: Any, pools: Any, program: Any = program, lengths: Any = lengths) -> Any:
                return program(weights, x, pools, lengths)

            timing = self._timed(step, (x, pools))
            return self._cell_row(layers, name, kind, program, compiled, timing, notes)
        raise AssertionError("no attention works")

    def _cell_row(
        self,
        layers: Layers,
        name: str,
        kind: str,
        program: Any,
        compiled: float,
        timing: Row,
        notes: list[str],
    ) -> Row:
        limit = 1e3 * layers.weight_bytes / READ_BANDWIDTH / self.setting.layers
        row = {
            **timing,
            "limit_ms": limit,
            "share_of_limit": limit / timing["ms"],
            "weight_bytes": layers.weight_bytes,
            "compile_s": round(compiled, 1),
            "attention": kind,
            "notes": notes,
        }
        strategy = layers.strategy.name
        try:
            row |= self._read(program, f"{self.link}-{strategy}-{name}")
        except Exception as error:  # times are not lost over it
            row["notes"] = [*notes, f"the compiled program could not be read: {error}"]
            print(row["notes"][-1], flush=True)
        counts = row.get("collectives_a_layer", {})
        print(
            f"{self.link} {strategy} {name}: {row['ms']:.4f} ms a layer (design "
            f"{design_ms(self.link, strategy, name)}; {row['low_ms']:.4f} to {row['high_ms']:.4f} "
            f"in {row['blocks']} blocks of {row['calls']}, host {row['host_ms']:.4f}), "
            f"{100 * row['share_of_limit']:.0f} % of the limit, "
            f"{', '.join(f'{n:g} {k}' for k, n in counts.items())} a layer; compiled in "
            f"{compiled:.1f} s, {kind}",
            flush=True,
        )
        return row

    def _read(self, program: Any, name: str) -> Row:
        """What the compiled program says of its collectives."""
        text = program.as_text()
        if self.args.hlo:
            with zipfile.ZipFile(self.args.hlo, "a", zipfile.ZIP_DEFLATED) as texts:
                texts.writestr(f"{name}-{time.time():.0f}.txt", text)
        found = collectives(text)
        counts = Counter(one.kind for one in found)
        return {
            "collectives_a_layer": {k: n / self.setting.layers for k, n in counts.items()},
            "one_buffer_each": all(len(one.operands) == 1 for one in found),
            "overlap": dict(Counter(one.described() for one in schedule(text))),
        }

    def _split(self, layers: Layers, stack: tuple[str, ...], name: str) -> Row:
        cell = self.setting.cell(name)
        weights = own_part(self.loaded(layers, stack))
        x, pools, lengths = layers.arguments(cell, self._residual(cell))
        x, pools, lengths = jax.tree.map(jnp.copy, own_part((x, pools, lengths)))
        kind = self.results.data["attention"][name]
        run, how = layers.alone(cell, kind)
        with no_collectives(DEVICES):
            alone = run.lower(weights, x, pools, lengths).compile(compiler_options=how)
        products = layers.products().lower(weights, x).compile()
        only = self._timed(lambda *outputs: products(weights, x), ())
        rest = self._timed(lambda x, pools: alone(weights, x, pools, lengths), (x, pools))
        print(
            f"{layers.strategy.name} {name}, one device's part: products {only['ms']:.4f}, all but "
            f"collectives {rest['ms']:.4f} ms a layer",
            flush=True,
        )
        return {"products": only, "without_collectives": rest, "attention": kind}

    def _kernels(self, layers: Layers, stack: tuple[str, ...], name: str) -> Row:
        cell, weights = self.setting.cell(name), self.loaded(layers, stack)
        x, pools, lengths = layers.arguments(cell, self._residual(cell))
        run, _ = layers.program(cell, self.results.data["attention"][name])
        lowered = run.lower(weights, x, pools, lengths)
        program = lowered.compile(compiler_options={} if self.setting.small else UNCAPTURED)
        row = kernel_times(
            lambda x, pools: program(weights, x, pools, lengths), (x, pools), self.setting.layers
        )
        print(f"{self.link} {' '.join(stack)} {name}: {row['us_a_layer']} us a layer", flush=True)
        for one in row["longest"]:
            print(
                f"    {one['us_a_layer']:9.2f} us, {one['launches_a_layer']:5.2f} of "
                f"{one['operation']}: {one['kernel']}",
                flush=True,
            )
        return row

    def _paged(self, strategy: str) -> Row:
        row = paged_step(strategy, self.setting, queues=self.queues)
        print(f"{self.link} paged engine, {strategy}: {row['ms_a_step']:.3f} ms a step", flush=True)
        return row

    # Tools.

    def _timed(self, step: Callable[..., Any], state: Any) -> Row:
        return timed(step, state, self.setting, queues=self.queues)

    def _residual(self, cell: Cell) -> np.ndarray:
        width = self.setting.config("separate", "rounded").hidden_size
        return noise((cell.rows, width), jnp.dtype(self.setting.dtype))

    def _choose_attention(self, name: str) -> str:
        """The fastest on one device's heads. A prompt's is not captured, which gains nothing there
        and may fail."""
        cell = self.setting.cell(name)
        kinds = [self.args.attention] if self.args.attention else ["cudnn", "xla"]
        if cell.tokens > 1:
            kinds = ["cudnn, launched" if kind == "cudnn" else kind for kind in kinds]
        if self.placement.platform == "cpu" or self.setting.dtype == "float32":
            return "xla"
        if self.args.attention:
            return kinds[0]
        config = self.setting.config("separate", "rounded")
        times: dict[str, float] = {}
        for kind in kinds:
            try:
                times[kind] = attention_seconds(cell, config, kind, self.device)
            except Exception as error:
                print(f"attention {kind} at {cell.name}: {str(error)[:300]}", flush=True)
        text = ", ".join(f"{kind} {1e6 * s:.1f} µs" for kind, s in times.items())
        best = min(times, key=lambda kind: times[kind]) if times else "xla"
        print(f"attention at {cell.name}, one device: {text}; {best} is used", flush=True)
        trial = {kind: round(1e6 * s, 1) for kind, s in times.items()}
        self.results.data.setdefault("attention_us", {})[name] = trial
        return best


def _pieces(declared: Declaration) -> tuple[Any, ...]:
    return tuple((source.shape, source.rows, source.columns) for source in declared.sources)


def _give_up(key: str) -> None:
    print(f"hung: {key}", flush=True)
    os._exit(HUNG)
