"""What a plan says, as objects, text and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deinfer_jax.cache.layout import CacheKind
from deinfer_jax.planner.cost import Memory, Traffic
from deinfer_jax.planner.placement import StrategyName
from deinfer_jax.planner.speeds import Device, Link

__all__ = ["Objective", "Option", "Plan"]

WIDTH = 100
VERSION = 1
Objective = Literal["decode", "prompt"]
FACTORED: tuple[StrategyName, ...] = ("naive", "low_rank", "sharded")
LEGEND = (
    "Predicted ms of a step and a prompt; GB a device of weights, cache and temporaries; elements "
    "a token and layer that collectives move (payload) and each device sends (wire), + padding.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One strategy with one kind of cache.

    Attributes:
        strategy: ``dense`` (factors multiplied out), ``naive``, ``low_rank`` or ``sharded``.
        kv_cache: ``full``, ``latent`` or ``full+latent``.
        decode_ms: predicted milliseconds of a step that gives every sequence one token.
        prompt_ms: predicted milliseconds of one prompt.
        memory: bytes a device.
        traffic: elements that collectives move a token and layer.
        problem: why it does not fit, empty where it does.
    """

    strategy: StrategyName
    kv_cache: CacheKind
    decode_ms: float
    prompt_ms: float
    memory: Memory
    traffic: Traffic
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return not self.problem

    @property
    def name(self) -> str:
        """For people: the strategy, and the cache unless it is full."""
        return self.strategy + ("" if self.kv_cache == "full" else f" ({self.kv_cache} cache)")

    def milliseconds(self, objective: Objective) -> float:
        """The predicted time that a choice goes by."""
        return self.decode_ms if objective == "decode" else self.prompt_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Predictions for every strategy and kind of cache, and the choice among them.

    Attributes:
        model: in words.
        decomposed: whether the model has factors.
        devices: how many; ``device``, ``link``: their speeds.
        batch, context, prompt: sequences, tokens of each, and tokens of a prompt.
        dtype: of weights, cache and payloads.
        limit: bytes a device that may be used.
        objective: what the choice goes by, ``decode`` or ``prompt``.
        multiply_out: whether a decomposed model may be chosen to run ``dense``.
        options: every strategy and kind of cache that can run.
        excluded: why a strategy is not among them, by name.
        notes: what else to know.
    """

    model: str
    decomposed: bool
    devices: int
    device: Device
    link: Link
    batch: int
    context: int
    prompt: int
    dtype: str
    limit: int
    objective: Objective
    multiply_out: bool
    options: tuple[Option, ...]
    excluded: dict[str, str]
    notes: tuple[str, ...] = ()

    def best(
        self,
        objective: Objective | None = None,
        *,
        strategies: Iterable[StrategyName] | None = None,
        kv_cache: CacheKind | None = None,
    ) -> Option | None:
        """The fastest option that fits, or None where none does.

        Args:
            objective: ``"decode"``, ``"prompt"`` or None = the plan's.
            strategies: of these; None = any.
            kv_cache: with that kind; None = any.
        """
        wanted = None if strategies is None else set(strategies)
        fitting = [
            option
            for option in self.options
            if option.fits
            and (wanted is None or option.strategy in wanted)
            and kv_cache in (None, option.kv_cache)
        ]
        key = objective or self.objective
        return min(fitting, key=lambda option: option.milliseconds(key), default=None)

    @property
    def choice(self) -> Option | None:
        """The fastest option that fits. A decomposed model keeps its factors, unless
        ``multiply_out``, or unless only multiplied out it fits. None where nothing fits."""
        if self.decomposed and not self.multiply_out:
            kept = self.best(strategies=FACTORED)
            return kept or self.best()
        return self.best()

    @property
    def dense_is_faster(self) -> bool:
        """Whether the model's factors multiplied out fit, and are predicted to be faster than the
        best option that keeps them."""
        kept = self.best(strategies=FACTORED)
        dense = self.best(strategies=("dense",))
        if not self.decomposed or kept is None or dense is None:
            return False
        return self._time(dense) < self._time(kept)

    @property
    def reason(self) -> str:
        """Why the choice is what it is, with what the other strategies are predicted to take."""
        chosen = self.choice
        if chosen is None:
            return self.finding
        # Of each other strategy the cache that fits and is fastest.
        others: dict[str, Option] = {}
        for option in sorted(self.options, key=lambda o: (not o.fits, self._time(o))):
            if option.strategy != chosen.strategy:
                others.setdefault(option.strategy, option)
        times = [
            f"{option.name} {_figure(self._time(option))} ms"
            + ("" if option.fits else ", does not fit")
            for option in others.values()
        ]
        return self.finding + (f" Others: {'; '.join(times)}." if times else "")

    @property
    def finding(self) -> str:
        """The choice and its time, and whether to multiply the factors out."""
        where = f"{self.devices} x {self.device.name}"
        if self.devices > 1:
            where += f", link {self.link.name}"
        chosen = self.choice
        if chosen is None:
            least = min(self.options, key=lambda option: option.memory.total)
            return f"nothing fits on {where}; {least.name}, the smallest, {least.problem}"
        what = f"one prompt of {self.prompt} tokens"
        if self.objective == "decode":
            what = f"a step of {self.batch} sequences at {self.context} tokens"
        text = f"{chosen.name}: predicted {_figure(self._time(chosen))} ms for {what} on {where}."
        return f"{text} {self.verdict}".rstrip()

    @property
    def verdict(self) -> str:
        """Whether to multiply the factors out; empty for a model without factors, and where a
        latent cache was asked for, which takes factors."""
        kept = self.best(strategies=FACTORED)
        dense = self.best(strategies=("dense",))
        if not self.decomposed or all(option.strategy != "dense" for option in self.options):
            return ""
        if dense is None:
            return "Multiplied out (dense) the model does not fit."
        if kept is None:
            return "Only multiplied out (dense) the model fits."
        times = self._time(dense), self._time(kept)
        return (
            "Multiplying the factors out (dense) is predicted "
            f"{'faster' if times[0] < times[1] else 'slower'}, "
            f"{_figure(times[0])} against {_figure(times[1])} ms "
            f"({max(times) / min(times):.2f}x), and takes "
            f"{dense.memory.weights / 1e9:.3g} GB of weights a device instead of "
            f"{kept.memory.weights / 1e9:.3g}."
        )

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The plan as text; the choice is marked."""
        bandwidth, peak = self.device.speed.bandwidth, self.device.peak(2)
        head = [
            self.model,
            f"{self.devices} x {self.device.name}: {bandwidth / 1e12:.3g} TB/s, "
            f"{peak / 1e12:.3g} TFLOP/s, {self.limit / 1e9:.4g} GB for the model",
            f"link {self.link.name}: {self.link.bandwidth / 1e9:.3g} GB/s, "
            f"{1e6 * self.link.latency:.3g} us",
            f"step: one token for {self.batch} sequences at {self.context}; prompt: one of "
            f"{self.prompt} tokens; {self.dtype}",
        ]
        if self.devices == 1:
            del head[2]
        foot = [f"{name} is left out: {why}" for name, why in self.excluded.items()]
        foot += [f"{one.name} does not fit: {one.problem}" for one in self.options if not one.fits]
        foot += ["=> " + self.finding, *self.notes]
        return "\n".join(
            [*_wrapped(head), "", *self._rows(), *_wrapped(LEGEND), "", *_wrapped(foot)]
        )

    def to_json(self) -> dict[str, Any]:
        """The plan in JSON's types: times in ms, memory in bytes, traffic in elements."""
        chosen = self.choice
        options = [
            asdict(option)
            | {"fits": option.fits, "chosen": option is chosen}
            | {"memory": asdict(option.memory) | {"total": option.memory.total}}
            for option in self.options
        ]
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in ("model", "decomposed", "devices")},
            "device": asdict(self.device),
            "link": asdict(self.link),
            **{name: getattr(self, name) for name in ("batch", "context", "prompt", "dtype")},
            **{name: getattr(self, name) for name in ("limit", "objective", "multiply_out")},
            "options": options,
            "excluded": dict(self.excluded),
            "choice": None
            if chosen is None
            else {"strategy": chosen.strategy, "kv_cache": chosen.kv_cache},
            "reason": self.reason,
            "dense_is_faster": self.dense_is_faster,
            "notes": list(self.notes),
        }

    def _time(self, option: Option) -> float:
        return option.milliseconds(self.objective)

    def _rows(self) -> list[str]:
        chosen = self.choice
        header = (
            "",
            "strategy",
            "cache",
            "step",
            "prompt",
            "weights",
            "cached",
            "temp.",
            "payload",
            "wire",
            "fits",
        )
        rows: list[tuple[str, ...]] = [header]
        for option in self.options:
            memory, traffic = option.memory, option.traffic
            rows.append(
                (
                    "*" if option is chosen else "",
                    option.strategy,
                    option.kv_cache,
                    _figure(option.decode_ms),
                    _figure(option.prompt_ms),
                    f"{memory.weights / 1e9:.2f}",
                    f"{memory.cache / 1e9:.2f}",
                    f"{memory.temporaries / 1e9:.2f}",
                    _padded(traffic.payload, traffic.padding),
                    _padded(traffic.wire, traffic.wire_padding),
                    "yes" if option.fits else "NO",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        left = (0, 1, 2, len(header) - 1)
        return [
            " ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, WIDTH)]


def _figure(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _padded(count: float, padding: float) -> str:
    return f"{count:.0f}" + (f" (+{padding:.0f})" if padding >= 0.5 else "")
