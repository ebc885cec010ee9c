"""Rotary position embedding: dimension j of a head and dimension j + H/2 turn together, by
position · θ^(−2j/H)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rope", "Turns"]


class Rope:
    """Frequencies of a model.

    Args:
        parameters: ``rope_theta``, ``rope_type`` and what that type needs, as in config.json.
        head_dim: H.
        max_position: what the model was made for, in tokens.
        max_context: what will be run, in tokens; fixes the frequencies of ``dynamic``.
        dtype: of cosines and sines, float32 or float64.

    Raises:
        ValueError: an unknown type.
    """

    def __init__(
        self,
        parameters: dict[str, Any],
        head_dim: int,
        max_position: int,
        max_context: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kind = parameters["rope_type"]
        if kind not in _KINDS:
            raise ValueError(f"rope_type: expected one of {', '.join(_KINDS)}, got {kind!r}")
        missing = [name for name in _NEEDED.get(kind, ()) if parameters.get(name) is None]
        if missing:
            raise ValueError(f"rope_type {kind!r}: expected {', '.join(missing)}, got none")
        context = {"max_position": max_position, "max_context": max_context}
        frequencies, self.magnitude = _KINDS[kind](parameters, head_dim, context)
        if parameters.get("divisors") is not None:
            frequencies = frequencies / torch.tensor(parameters["divisors"], dtype=torch.float64)
        # The first half turns the other way, so that its sine has the sign that it is added with.
        both = torch.cat((-frequencies, frequencies))
        self.frequencies = both.to(dtype).to(device)  # [H]

    def turns(self, positions: Tensor) -> Turns:
        """How far positions [...] turn a head."""
        angles = positions[..., None, None] * self.frequencies
        return Turns(self.magnitude * angles.cos(), self.magnitude * angles.sin())


class Turns(NamedTuple):
    """Cosines and signed sines [..., 1, H] of some positions, in float32 or float64."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """x [..., heads, H] turned: (a, b) becomes (a cos − b sin, b cos + a sin)."""
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        # The sum in the dtype of the cosines, and in one kernel with the rounding to x's.
        return torch.addcmul(x * self.cos, swapped, self.sin, out=torch.empty_like(x))


def _plain(theta: float, head_dim: int) -> Tensor:
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _default(rope: dict[str, Any], head_dim: int, _: dict[str, int]) -> tuple[Tensor, float]:
    return _plain(rope["rope_theta"], head_dim), 1.0


def _linear(rope: dict[str, Any], head_dim: int, _: dict[str, int]) -> tuple[Tensor, float]:
    return _plain(rope["rope_theta"], head_dim) / rope["factor"], 1.0


def _dynamic(rope: dict[str, Any], head_dim: int, context: dict[str, int]) -> tuple[Tensor, float]:
    """NTK-aware: a longer context has a larger θ."""
    made_for = rope.get("original_max_position_embeddings") or context["max_position"]
    factor = rope["factor"]
    longer = max(context["max_context"], made_for) / made_for
    stretch = (factor * longer - (factor - 1)) ** (head_dim / (head_dim - 2))
    return _plain(rope["rope_theta"] * stretch, head_dim), 1.0


def _llama3(rope: dict[str, Any], head_dim: int, _: dict[str, int]) -> tuple[Tensor, float]:
    """Wavelengths that fit ``high_freq_factor`` times into the original context stay, those that
    fit less than ``low_freq_factor`` times grow by ``factor``, linear between the two."""
    plain = _plain(rope["rope_theta"], head_dim)
    fits = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    stays = ((fits - low) / (high - low)).clamp(0, 1)
    return stays * plain + (1 - stays) * plain / rope["factor"], 1.0


def _yarn(rope: dict[str, Any], head_dim: int, context: dict[str, int]) -> tuple[Tensor, float]:
    """arXiv 2309.00071: dimensions that turn often stay, the others are interpolated."""
    theta = rope["rope_theta"]
    original = rope.get("original_max_position_embeddings") or context["max_position"]
    factor = rope.get("factor") or context["max_position"] / original

    def dimension(turns: float) -> float:
        """Which one turns so many times within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float64)
    interpolated = ((steps - first) / max(last - first, 1e-3)).clamp(0, 1)
    plain = _plain(theta, head_dim)
    frequencies = (1 - interpolated) * plain + interpolated * plain / factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return frequencies, rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return frequencies, magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return frequencies, magnitude(1)


_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
