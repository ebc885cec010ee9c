"""One thing broken on purpose: a check that does not see these sees nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference_torch.config import Config
from reference_torch.loading import Tensors
from reference_torch.pages import Step

__all__ = ["PERTURBATIONS", "perturbed", "step_disturbance"]

PERTURBATIONS = {
    "rope-theta": "RoPE's base is four times what it should be",
    "norm-eps": "the norms' epsilon is a thousand times what it should be",
    "one-weight": "the largest weight of the first layer's down projection has the wrong sign",
    "slice-offset": "the first decomposed linear reads its latent one row off",
    "head-order": "the first and the last query head of the last layer have each other's weights",
    "residual": "the last layer's feed-forward adds nothing",
    "position": "decoded tokens stand one position too early",
    "page": "decoding, the first sequence's first page is the second sequence's",
}


def perturbed(name: str | None, config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A model with one thing wrong in its config or its weights.

    Raises:
        ValueError: no perturbation of that name, or the model has nothing to break like that.
    """
    if name is not None and name not in PERTURBATIONS:
        raise ValueError(f"perturb: expected one of {', '.join(PERTURBATIONS)}, got {name!r}")
    last = f"model.layers.{config.layers - 1}"
    first_down = "model.layers.0.mlp.down_proj"
    if name == "rope-theta":
        rope = {**config.rope, "rope_theta": config.rope["rope_theta"] * 4}
        config = replace(config, rope=rope)
    elif name == "norm-eps":
        config = replace(config, eps=1000 * config.eps)
    elif name == "one-weight":
        tensors = _Changed(tensors, _last_factor(first_down, config), _negate_largest)
    elif name == "slice-offset":
        if not config.slices:
            raise ValueError("perturb: slice-offset needs a decomposed model, this one is dense")
        module, piece = next(iter(config.slices.items()))
        if piece.rank < 2:
            raise ValueError(f"perturb: slice-offset needs a rank above 1, {module} has 1")
        tensors = _Changed(tensors, f"{module}.u.weight", lambda u: u.roll(1, dims=1))
    elif name == "head-order":
        width = config.head_dim
        query = _last_factor(f"{last}.self_attn.q_proj", config)
        tensors = _Changed(tensors, query, lambda w: _swap_ends(w, width))
    elif name == "residual":
        tensors = _Changed(tensors, _last_factor(f"{last}.mlp.down_proj", config), torch.zeros_like)
    return config, tensors


def step_disturbance(name: str | None) -> Callable[[Step], None] | None:
    """What goes wrong with every decode step's places, if that is what is to be broken."""
    return {"position": _one_back, "page": _other_page}.get(name or "")


class _Changed:
    """Tensors one of which is changed when it is read."""

    def __init__(self, tensors: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> None:
        assert name in tensors, f"nothing to change: there is no {name}"
        self._tensors, self._name, self._change = tensors, name, change

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.read(name, *shape)
        return self._change(tensor) if name == self._name else tensor


def _last_factor(module: str, config: Config) -> str:
    return f"{module}.u.weight" if module in config.slices else f"{module}.weight"


def _negate_largest(w: Tensor) -> Tensor:
    changed = w.clone().flatten()
    changed[changed.abs().argmax()] *= -1
    return changed.view(w.shape)


def _swap_ends(w: Tensor, width: int) -> Tensor:
    return torch.cat((w[-width:], w[width:-width], w[:width])) if len(w) > width else -w


def _one_back(step: Step) -> None:
    step.start -= 1


def _other_page(step: Step) -> None:
    if step.table.shape[0] < 2:
        raise ValueError("perturb: page needs two sequences, got one")
    step.table[0, 0] = step.table[1, 0]
    step.live_table[0, 0] = step.live_table[1, 0]
