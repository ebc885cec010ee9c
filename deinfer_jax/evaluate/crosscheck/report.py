"""What a cross-check found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deinfer_jax.evaluate.crosscheck.compare import Comparison, Delta, Phase
from deinfer_jax.evaluate.crosscheck.verdict import Tolerance

__all__ = ["CrosscheckReport", "CrosscheckRun", "ThirdOpinion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdOpinion:
    """How far both sides are from PyTorch in float64, unbroken, on one device.

    Attributes:
        jax, torch: relative norms by ``"prefill"`` or ``"decode"``, of the embedding, each layer
            and the logits.
    """

    jax: dict[str, tuple[Delta, ...]]
    torch: dict[str, tuple[Delta, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrosscheckRun:
    """A PyTorch run against a JAX run of the same cache kind.

    Attributes:
        jax_strategy, jax_devices: of the JAX side, as asked for.
        strategy, ranks, cuda_graphs, kv_cache: of the PyTorch side; the cache is the JAX side's,
            too.
        comparison: the numbers; None where an answer was none, and ``problems`` say why.
        problems: what is past the tolerance, in words.
        third_opinion: where float32 was past the relative norm.
        jax, torch: what the sides say of themselves: versions, device, seconds, and elements of the
            collectives of a decoded token (of PyTorch with the logits' W, which JAX reads in
            parts); of JAX also the strategy that ``"auto"`` took.
    """

    jax_strategy: str
    jax_devices: int
    strategy: str
    ranks: int
    cuda_graphs: bool
    kv_cache: str
    comparison: Comparison | None
    problems: tuple[str, ...]
    third_opinion: ThirdOpinion | None
    jax: dict[str, Any]
    torch: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether nothing is past the tolerance."""
        return not self.problems

    @property
    def name(self) -> str:
        """E.g. ``JAX sharded x2, PyTorch low_rank x2, latent, graphs``."""
        return f"JAX {self.jax_name}, PyTorch {self.torch_name}"

    @property
    def jax_name(self) -> str:
        """E.g. ``sharded x2``."""
        return f"{self.jax_strategy} x{self.jax_devices}"

    @property
    def torch_name(self) -> str:
        """E.g. ``low_rank x2, latent, graphs``."""
        graphs = ", graphs" if self.cuda_graphs else ""
        return f"{self.strategy} x{self.ranks}, {self.kv_cache}{graphs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrosscheckReport:
    """Result of :func:`deinfer_jax.crosscheck`; as a string a table.

    Attributes:
        model: path, or name of the random model.
        dtype, device: of both sides.
        perturb: what the PyTorch side broke in itself, or None.
        seed: of random weights and tokens.
        prompts: their lengths in tokens.
        forced, greedy: decode steps with given tokens, and tokens decoded freely, a sequence.
        tolerance: the limits.
        flags: that the JAX side ran with, beside the number of simulated devices.
        runs: every JAX setting, PyTorch setting and cache kind.
        left_out: settings that there are none of, in words.
    """

    model: str
    dtype: str
    device: str
    perturb: str | None
    seed: int
    prompts: tuple[int, ...]
    forced: int
    greedy: int
    tolerance: Tolerance
    flags: dict[str, str]
    runs: tuple[CrosscheckRun, ...]
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every run is within the tolerance."""
        return all(run.passed for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with the machine and the versions of both sides."""
        runs = []
        for run in self.runs:
            jax = {name: value for name, value in run.jax.items() if name != "machine"}
            runs.append(asdict(run) | {"jax": jax, "passed": run.passed})
        machine = self.runs[0].jax.get("machine")
        return {"machine": machine, "passed": self.passed} | asdict(self) | {"runs": runs}

    def __str__(self) -> str:
        broken = "" if self.perturb is None else f", PyTorch broken by {self.perturb}"
        lines = [
            f"{self.model}, {self.dtype} on {self.device}{broken}: prompts of "
            f"{', '.join(map(str, self.prompts))} tokens, {self.forced} decode steps, "
            f"{self.greedy} greedy tokens",
            f"limits: {_limits(self.tolerance)}",
            "",
            *_summary(self.runs),
            *(f"left out: {one}" for one in self.left_out),
        ]
        for run in self.runs:
            if len(self.runs) == 1 or not run.passed:
                lines += ["", *_details(run)]
        return "\n".join([*lines, "", _verdict(self)])


def _verdict(report: CrosscheckReport) -> str:
    bad = sum(not run.passed for run in report.runs)
    if not bad:
        return f"passed: {len(report.runs)} of {len(report.runs)} runs within the limits"
    return f"FAILED: {bad} of {len(report.runs)} runs past the limits"


def _limits(limits: Tolerance) -> str:
    if limits.relative is not None:
        return (
            f"relative norm {limits.relative:.0e}, greedy margin {limits.margin_of_range:.0e} of "
            "the logits' range"
        )
    return (
        f"KL mean {limits.kl_mean:.0e}, 99th percentile {limits.kl_p99:.0e}, greedy margin "
        f"{limits.margin_of_top:.4f} of the best logit"
    )


def _summary(runs: Sequence[CrosscheckRun]) -> list[str]:
    """A line a run: the worst of the layers, and the distributions."""
    ours = max(len(run.jax_name) for run in runs)
    width = max(22, *(len(run.torch_name) for run in runs))
    lines = [
        f"{'JAX':{ours}} {'PyTorch':{width}} {'prefill':>9} {'decode':>9} {'KL mean':>9} "
        f"{'KL p99':>9} {'top-1':>7} {'greedy':>9}"
    ]
    for run in runs:
        verdict = "passed" if run.passed else "FAILED"
        name = f"{run.jax_name:{ours}} {run.torch_name:{width}}"
        found = run.comparison
        if found is None:
            lines.append(f"{name} {verdict}: {run.problems[0]}")
            continue
        phases = (found.prefill, found.decode)
        equal = sum(sequence.equal for sequence in found.greedy)
        count = sum(sequence.count for sequence in found.greedy)
        lines.append(
            f"{name} {found.prefill.worst_layer.relative:9.1e} "
            f"{found.decode.worst_layer.relative:9.1e} "
            f"{max(phase.distribution.kl_mean for phase in phases):9.1e} "
            f"{max(phase.distribution.kl_p99 for phase in phases):9.1e} "
            f"{min(phase.distribution.top1 for phase in phases):7.2%} "
            f"{f'{equal}/{count}':>9} {verdict}"
        )
    return lines


def _details(run: CrosscheckRun) -> list[str]:
    """A run layer by layer."""
    lines = [run.name]
    if run.comparison is not None:
        prefill, decode = run.comparison.prefill, run.comparison.decode
        lines += [
            f"{'':11} {'prefill':^39}   {'decode':^39}",
            f"{'':11} {_HEADS}   {_HEADS}",
        ]
        rows = zip((*prefill.layers, prefill.logits), (*decode.layers, decode.logits), strict=True)
        lines += [f"{a.name:11} {_numbers(a)}   {_numbers(b)}" for a, b in rows]
        lines += [_distribution("prefill", prefill), _distribution("decode", decode)]
        lines.append(f"greedy tokens until the first difference: {_greedy(run.comparison)}")
    lines += _moved(run)
    if run.third_opinion is not None:
        lines += _opinion(run.third_opinion)
    return [*lines, *(f"! {problem}" for problem in run.problems)]


_HEADS = f"{'max|d|':>9} {'mean|d|':>9} {'rel norm':>9} {'worst pos':>9}"


def _numbers(delta: Delta) -> str:
    values = (delta.max_abs, delta.mean_abs, delta.relative, delta.worst)
    return " ".join(f"{value:9.2e}" for value in values)


def _distribution(name: str, phase: Phase) -> str:
    found = phase.distribution
    return (
        f"{name:11} KL mean {found.kl_mean:.2e}, 99th percentile {found.kl_p99:.2e}, max "
        f"{found.kl_max:.2e}; top-1 agreement {found.top1:.2%}"
    )


def _greedy(found: Comparison) -> str:
    return ", ".join(
        f"{sequence.equal} of {sequence.count}"
        + ("" if sequence.margin is None else f" (margin {sequence.margin:.2e})")
        for sequence in found.greedy
    )


def _moved(run: CrosscheckRun) -> list[str]:
    """Elements a decoded token, where a side has several devices."""
    lines = []
    for name, side in (("JAX", run.jax), ("PyTorch", run.torch)):
        moved = side.get("elements_a_decoded_token")
        if moved:
            counts = ", ".join(f"{kind} {count:g}" for kind, count in sorted(moved.items()))
            lines.append(f"elements a decoded token, {name}: {counts}")
    return lines


def _opinion(opinion: ThirdOpinion) -> list[str]:
    """Which side is off, by the relative norm to float64."""
    lines = ["relative norm to PyTorch in float64"]
    lines.append(f"{'':11} {'prefill JAX':>12} {'PyTorch':>9}   {'decode JAX':>12} {'PyTorch':>9}")
    sides = (opinion.jax["prefill"], opinion.torch["prefill"])
    sides += (opinion.jax["decode"], opinion.torch["decode"])
    for a, b, c, d in zip(*sides, strict=True):
        lines.append(
            f"{a.name:11} {a.relative:12.2e} {b.relative:9.2e}   {c.relative:12.2e} "
            f"{d.relative:9.2e}"
        )
    return lines
