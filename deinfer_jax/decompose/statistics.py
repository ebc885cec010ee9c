"""Second moments of a model's linears over calibration text, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from tqdm import tqdm

from deinfer_jax.checkpoint.parameters import Weights
from deinfer_jax.decompose.blocks import BlockRunner
from deinfer_jax.decompose.groups import Group
from deinfer_jax.decompose.methods import Moments

__all__ = ["collect"]


def collect(
    runner: BlockRunner,
    tokens: Int32[np.ndarray, "n T"],
    groups: Sequence[Group],
    *,
    gradients: bool,
    seed: int,
    label_samples: int,
    have: Callable[[int], bool],
    take: Callable[[int, dict[str, Moments]], None],
    progress: bool,
) -> None:
    """Moments of every group, layer by layer.

    With gradients (labels drawn from the model itself) the model is run forwards once, its residual
    kept in front of every layer, and then backwards a layer at a time; otherwise forwards only. On
    the device are a layer or two, the embeddings and one window's activations; on the host,
    besides, the kept residuals (4 · tokens · D bytes a layer) and the moments of one layer.

    Args:
        runner: of the dense model.
        tokens: calibration windows.
        groups: of the whole model.
        gradients: whether ``fisher`` needs them.
        seed: of the labels.
        label_samples: label sequences a window.
        have: layers whose moments are there already; they are run, but not measured.
        take: is given a layer's moments by group name.
        progress: a bar with layers a second.

    Raises:
        ValueError: moments are not finite; the group is named.
    """
    config = runner.config
    layers = range(config.num_layers)
    passes = 2 if gradients else 1
    bar = tqdm(total=passes * len(layers), desc="statistics", unit="layer", disable=not progress)
    with bar:
        weights = runner.load_layer(0)
        xs = [np.asarray(runner.embed(weights, jnp.asarray(window))) for window in tokens]
        fronts = [xs]  # residuals in front of each layer
        for layer in layers:
            weights = runner.load_layer(layer)
            if not gradients and not have(layer):
                take(layer, _measure(runner, layer, weights, groups, fronts[-1], None)[0])
            xs = [np.asarray(runner.forward(layer, weights, jnp.asarray(x))) for x in fronts[-1]]
            if gradients:
                fronts.append(xs)
            else:
                fronts[-1] = xs
            bar.update()
        if not gradients:
            return
        key = jax.random.key(seed)
        gys = []
        for index, x in enumerate(fronts.pop()):
            gy = runner.head(weights, jnp.asarray(x), jax.random.fold_in(key, index), label_samples)
            gys.append(np.asarray(gy))
        for layer in reversed(layers):
            weights = runner.load_layer(layer)
            missing = () if have(layer) else groups
            moments, gys = _measure(runner, layer, weights, missing, fronts.pop(), gys)
            if not have(layer):
                take(layer, moments)
            bar.update()


def _measure(
    runner: BlockRunner,
    layer: int,
    weights: Weights,
    groups: Sequence[Group],
    xs: Sequence[np.ndarray],
    gys: Sequence[np.ndarray] | None,
) -> tuple[dict[str, Moments], list[np.ndarray]]:
    """A layer's moments by group, and the gradients in front of it."""
    sums = [_Sums(runner, weights, group) for group in groups if group.layer == layer]
    fronts = []
    for index, x in enumerate(xs):
        gy = None if gys is None else jnp.asarray(gys[index])
        inputs, gradients, gx = runner.record(layer, weights, jnp.asarray(x), gy)
        for one in sums:
            one.add(inputs, gradients)
        if gx is not None:
            fronts.append(np.asarray(gx))
    return {one.group.name: one.moments() for one in sums}, fronts


class _Sums:
    """What a group adds up over windows, on the side that is smaller."""

    def __init__(self, runner: BlockRunner, weights: Weights, group: Group) -> None:
        self.group = group
        stacked = np.concatenate([runner.weight(weights, module) for module in group.modules])
        self.weight = jnp.asarray(stacked, jnp.float32)
        self.tall = group.out_features > group.in_features
        self.first: Any = 0.0  # G or C
        self.second: Any = 0.0  # A or F
        self.energies = np.zeros(2)  # Σ x², Σ g²
        self.tokens, self.labels = 0, 0

    def add(self, inputs: dict[str, Array], gradients: dict[str, Array]) -> None:
        """A window."""
        x = inputs[self.group.block]
        self.tokens += x.shape[0]
        self.first += _gram(x if self.tall else _product(x, self.weight.T))
        self.energies[0] += float(jnp.vdot(x, x))
        if gradients:
            g = jnp.concatenate([gradients[module] for module in self.group.modules], axis=-1)
            g = g.reshape(-1, g.shape[-1])  # [S·T, out]
            self.labels += g.shape[0]
            self.second += _gram(_product(g, self.weight) if self.tall else g)
            self.energies[1] += float(jnp.vdot(g, g))

    def moments(self) -> Moments:
        """Averages over the tokens."""
        first = self.first / self.tokens
        second = self.second / self.labels if self.labels else None
        for what in (first, second):
            if what is not None and not np.isfinite(what).all():
                raise ValueError(
                    f"{self.group.name}: the moments of its inputs or gradients are not finite"
                )
        sides = (
            {"inputs": first, "pulled": second}
            if self.tall
            else {"outputs": first, "gradients": second}
        )
        return Moments(
            **sides,
            input_energy=float(self.energies[0] / self.tokens / self.group.in_features),
            gradient_energy=float(self.energies[1] / max(1, self.labels) / self.group.out_features),
        )


@jax.jit
def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _gram(rows: Array) -> np.ndarray:
    """Σ over rows of r rᵀ, float64 throughout."""
    with jax.enable_x64(True):
        return np.asarray(_gram64(rows))


@jax.jit
def _gram64(rows: Array) -> Array:
    wide = rows.astype(jnp.float64)
    return jnp.matmul(wide.T, wide, precision="highest")
