"""The numbers of a cross-check from the answers of two sides. Plain numpy, in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deinfer_jax.evaluate.crosscheck.job import Job, Tokens

__all__ = ["Answer", "Comparison", "Delta", "Distribution", "Greedy", "Phase", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How far a is from b, arrays [positions, width].

    Attributes:
        name: what is compared, ``"embedding"``, ``"layer 3"`` or ``"logits"``.
        max_abs, mean_abs: of |a − b|.
        relative: ‖a − b‖ / ‖b‖ over everything.
        worst: the largest ‖a_t − b_t‖ / ‖b_t‖ of a position t.
    """

    name: str
    max_abs: float
    mean_abs: float
    relative: float
    worst: float

    @classmethod
    def of(cls, name: str, a: np.ndarray, b: np.ndarray) -> Delta:
        """Of arrays [..., width] of any floating dtype, computed in float64."""
        b = b.astype(np.float64)
        difference = a.astype(np.float64) - b
        by_position = _norms(difference), _norms(b)
        return cls(
            name=name,
            max_abs=float(np.abs(difference).max()),
            mean_abs=float(np.abs(difference).mean()),
            relative=float(_ratio(*(np.linalg.norm(norms) for norms in by_position))),
            worst=float(_ratio(*by_position).max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How far next-token distributions are apart, over positions.

    Attributes:
        kl_mean, kl_p99, kl_max: of KL(theirs ‖ ours) = Σ_w p log(p / q), in nats.
        top1: fraction of positions with the same most likely token.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> Distribution:
        """Of logits [positions, W]."""
        q, p = _log_softmax(ours), _log_softmax(theirs)
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        return cls(
            kl_mean=float(kl.mean()),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            top1=float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Prefill or decode.

    Attributes:
        layers: the residual stream after the embedding and after each layer.
        logits: at the end.
        distribution: of the next token.
        logit_range: mean over positions of the other side's largest minus smallest logit.
    """

    layers: tuple[Delta, ...]
    logits: Delta
    distribution: Distribution
    logit_range: float

    @classmethod
    def of(cls, ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> Phase:
        """Of (residual stream [L + 1, positions, D], logits [positions, W]) of both sides."""
        names = ["embedding", *(f"layer {i}" for i in range(len(ours[0]) - 1))]
        pairs = zip(names, ours[0], theirs[0], strict=True)
        return cls(
            layers=tuple(Delta.of(name, a, b) for name, a, b in pairs),
            logits=Delta.of("logits", ours[1], theirs[1]),
            distribution=Distribution.of(ours[1], theirs[1]),
            logit_range=float(np.ptp(theirs[1], axis=1).mean()),
        )

    @property
    def worst_layer(self) -> Delta:
        """The largest relative norm of the layers and the logits."""
        return max((*self.layers, self.logits), key=lambda delta: delta.relative)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Free greedy decoding of a sequence.

    Attributes:
        equal: tokens until the first difference.
        count: tokens decoded.
        margin: at the first difference, the larger of the two sides' best minus second-best logit;
            None without a difference.
        top: the larger |best logit| there.
    """

    equal: int
    count: int
    margin: float | None = None
    top: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of two answers to one job; ``greedy`` by sequence."""

    prefill: Phase
    decode: Phase
    greedy: tuple[Greedy, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a side wrote: arrays by name, and ``info`` read from JSON."""

    arrays: dict[str, np.ndarray]
    info: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Reads ``jax.npz`` or ``torch.npz``."""
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
        info = arrays.pop("info", None)
        if info is None:
            raise ValueError(f"{path}: expected an array info, got {', '.join(arrays)}")
        return cls(arrays, json.loads(str(info)))

    def phase(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Residual stream [L + 1, positions, D] and logits [positions, W], all sequences in a
        row, of ``"prefill"`` or ``"decode"``."""
        if name == "decode":
            hidden, logits = self.arrays["decode_hidden"], self.arrays["decode_logits"]
            # [forced, L + 1, B, D] and [forced, B, W]
            return np.concatenate([*hidden], axis=1), logits.reshape(-1, logits.shape[-1])
        count = sum(key.startswith("prefill_logits_") for key in self.arrays)
        hidden = [self.arrays[f"prefill_hidden_{i}"] for i in range(count)]
        logits = [self.arrays[f"prefill_logits_{i}"] for i in range(count)]
        return np.concatenate(hidden, axis=1), np.concatenate(logits)

    def problems(self, job: Job, tokens: Tokens, *, layers: int, D: int, W: int) -> list[str]:
        """What makes it no answer to the job: arrays that are missing, have another shape or
        contain what is no number."""
        count = len(tokens.prompts)
        shapes: dict[str, tuple[int, ...]] = {
            "decode_hidden": (job.forced, layers + 1, count, D),
            "decode_logits": (job.forced, count, W),
            "greedy_tokens": (job.greedy, count),
            "greedy_margin": (job.greedy, count),
            "greedy_top": (job.greedy, count),
        }
        for i, prompt in enumerate(tokens.prompts):
            shapes[f"prefill_hidden_{i}"] = (layers + 1, len(prompt), D)
            shapes[f"prefill_logits_{i}"] = (len(prompt), W)
        found = []
        for name, shape in shapes.items():
            array = self.arrays.get(name)
            if array is None:
                found.append(f"{name}: expected an array, got none")
            elif array.shape != shape:
                found.append(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
            elif bad := int((~np.isfinite(array)).sum()):
                found.append(f"{name}: {bad} of {array.size} values are NaN or infinite")
        return found


def compare(ours: Answer, theirs: Answer) -> Comparison:
    """Compares two answers to one job that have no :meth:`Answer.problems`.

    Args:
        ours: the JAX side's.
        theirs: what it is measured against.
    """
    return Comparison(
        prefill=Phase.of(ours.phase("prefill"), theirs.phase("prefill")),
        decode=Phase.of(ours.phase("decode"), theirs.phase("decode")),
        greedy=_greedy(ours.arrays, theirs.arrays),
    )


def _greedy(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[Greedy, ...]:
    differ = ours["greedy_tokens"] != theirs["greedy_tokens"]  # [greedy, B]
    count = len(differ)
    found = []
    for b, column in enumerate(differ.T):
        if not column.any():
            found.append(Greedy(equal=count, count=count))
            continue
        step = int(column.argmax())
        # In a near-tie both margins are small; one that is not is a side that was sure.
        margin = max(side["greedy_margin"][step, b] for side in (ours, theirs))
        top = max(abs(side["greedy_top"][step, b]) for side in (ours, theirs))
        found.append(Greedy(equal=step, count=count, margin=float(margin), top=float(top)))
    return tuple(found)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _norms(array: np.ndarray) -> np.ndarray:
    return np.linalg.norm(array.reshape(-1, array.shape[-1]), axis=1)


def _ratio(difference: Any, reference: Any) -> np.ndarray:
    """difference / reference, where 0 / 0 is 0 and anything else / 0 infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(difference) / np.asarray(reference)
    return np.where(np.asarray(difference) == 0, 0.0, ratio)
