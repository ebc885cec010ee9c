"""Runs a dense model one layer at a time, with its inputs and gradients in sight.

The maths is the model's own: a strategy, :class:`Recorder`, stands where products are split over
devices otherwise, notes what every block of linears reads, and adds a zero to what it writes, whose
gradient is that of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from deinfer_jax.cache.chunk import attend_chunk
from deinfer_jax.cache.layout import LayerLayout
from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.checkpoint.parameters import Weights, all_finite, nested
from deinfer_jax.checkpoint.source import Checkpoint
from deinfer_jax.decompose.groups import find_blocks, of_layer
from deinfer_jax.layers.parameter import Declaration, Source, declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.strategy import Contracting, Expanding, Norm, Single

__all__ = ["BlockRunner"]

Tokens = Int32[Array, " T"]
Residual = Float[Array, "T D"]


class Recorder(Single):
    """One device; notes inputs of blocks and lets zeros be added to their outputs."""

    name = "recorder"

    def __init__(self) -> None:
        self._inputs: dict[str, Array] | None = None
        self._zeros: Mapping[str, Array] = {}

    @contextmanager
    def recording(self, zeros: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """While a layer is traced: gives the inputs by the block's first module; adds ``zeros``, by
        module, to the outputs."""
        self._inputs, self._zeros = {}, zeros
        try:
            yield self._inputs
        finally:
            self._inputs, self._zeros = None, {}

    def expand(self, x: Array, norm: Norm, block: Expanding) -> Any:
        """See ``Strategy.expand``."""
        h = norm(x)
        outputs = block.outputs(block.products(h, None))
        names = self._note(block, h)
        return tuple(self._marked(name, y) for name, y in zip(names, outputs, strict=True)), None

    def contract(self, h: Array, projection: Contracting) -> Array:
        """See ``Strategy.contract``."""
        (name,) = self._note(projection, h)
        return self._marked(name, projection.output(projection.product(h, None)))

    def _note(self, block: Any, h: Array) -> tuple[str, ...]:
        sources = block.w.get_metadata()["sources"]
        names = tuple(source.name.removesuffix(".weight") for source in sources)
        if self._inputs is not None:
            self._inputs[names[0]] = h
        return names

    def _marked(self, name: str, y: Array) -> Array:
        return y + self._zeros[name] if name in self._zeros else y


class WindowView:
    """A whole sequence that attends to itself, without a cache."""

    def positions(self, count: int) -> Array:
        """0, 1, …"""
        return jnp.arange(count, dtype=jnp.int32)

    def attend(
        self, pool: LayerPool, q: Array, keys: Any, values: Any, *, scale: float, window: int | None
    ) -> tuple[Array, LayerPool]:
        """Causal attention of q [T, N, H] over keys and values [T, K, H]; differentiable."""
        count = q.shape[0]
        heads = jnp.stack([keys.full, values.full]).transpose(0, 2, 1, 3)  # [2, K, T, H]
        # Under checkpoint, scores are made again for the gradient instead of being kept.
        attend = jax.checkpoint(partial(attend_chunk, scale=scale, window=window))
        end = jnp.asarray(count, jnp.int32)
        return attend(q, heads[None], self.positions(count), end), pool  # one page of T tokens


class BlockRunner:
    """A dense checkpoint, run a layer at a time in float32.

    On the device are the embeddings, the head and the layers that the caller holds. Weights are
    pure dicts; those of a layer come together with the ones outside of the layers.

    Args:
        checkpoint: dense.
        max_context: longest window in tokens.
        device: where it runs.
    """

    def __init__(self, checkpoint: Checkpoint, *, max_context: int, device: Any) -> None:
        self.checkpoint, self.config, self.device = checkpoint, checkpoint.config, device
        self._recorder = Recorder()
        # The layers of a model are alike but for their windows: one of each stands for them all.
        models = {
            window: build(
                self.config.replace(num_layers=1, windows=(window,)),
                max_context=max_context,
                strategy=self._recorder,
                dtype=jnp.dtype(jnp.float32),
            )
            for window in dict.fromkeys(self.config.windows)
        }
        self._graphs = {window: nnx.graphdef(model) for window, model in models.items()}
        model = models[self.config.windows[0]]
        declared = declarations(model)
        self._layer_declared = [d for d in declared if d.path[0] == "layers"]
        self._blocks = find_blocks(self.config.replace(num_layers=1, windows=()))
        self._outer = self._load([d for d in declared if d.path[0] != "layers"], 0)

    def load_layer(self, layer: int) -> Weights:
        """Reads a layer's weights onto the device."""
        return self._outer | self._load(self._layer_declared, layer)

    def weight(self, weights: Weights, module: str) -> Float[np.ndarray, "O I"]:
        """A linear's weight, float64, out of its layer's weights."""
        d, source = self._place(module)
        array = _at(weights, d.path)
        ((_, start, count),) = source.rows
        return np.asarray(array[start : start + count], np.float64)

    # What runs on the device, a window of T tokens at a time.

    def embed(self, weights: Weights, tokens: Tokens) -> Residual:
        """The residual stream in front of the first layer; any layer's weights will do."""
        return _embed(self._graph(0), weights, tokens)

    def forward(self, layer: int, weights: Weights, x: Residual) -> Residual:
        """The residual stream behind a layer."""
        return _forward(self._graph(layer), weights, x)

    def head(
        self, weights: Weights, x: Residual, key: jax.Array, samples: int
    ) -> Float[Array, "S T D"]:
        """∂loss/∂x of each of ``samples`` label sequences drawn from the model itself; the loss is
        summed over positions."""
        return _head(self._graph(0), weights, x, key, samples)

    def record(
        self, layer: int, weights: Weights, x: Residual, gy: Float[Array, "S T D"] | None
    ) -> tuple[dict[str, Array], dict[str, Array], Float[Array, "S T D"] | None]:
        """Inputs and output gradients of a layer's linears.

        Args:
            layer: its index.
            weights: of the layer.
            x: residual in front of it.
            gy: gradients with respect to the residual behind it, or None.

        Returns:
            Inputs [T, in] by the block's first module; gradients [S, T, out] by module, and those
            with respect to x (none without ``gy``).
        """
        graph = self._graph(layer)
        if gy is None:
            inputs, gradients, gx = _inputs(graph, weights, x), {}, None
        else:
            zeros = {
                module: jnp.zeros((x.shape[0], width), x.dtype)
                for block in self._blocks
                for module, width in zip(block.modules, block.outputs, strict=True)
            }
            inputs, gradients, gx = _gradients(graph, weights, x, gy, zeros)
        named = [
            {of_layer(module, layer): value for module, value in found.items()}
            for found in (inputs, gradients)
        ]
        return named[0], named[1], gx

    def _graph(self, layer: int) -> Any:
        return self._graphs[self.config.windows[layer]]

    def _load(self, declared: list[Declaration], layer: int) -> Weights:
        places = {of_layer(s.name, layer): (d, s) for d in declared for s in d.sources}
        arrays = {d.path: np.empty(d.shape, d.dtype) for d in declared}
        for name, tensor in self.checkpoint.tensors(places):
            if not all_finite(tensor):
                raise ValueError(f"{self.checkpoint.path}: tensor {name} is not finite")
            d, source = places[name]
            source.put(tensor, arrays[d.path])
        return nested({path: jax.device_put(a, self.device) for path, a in arrays.items()})

    def _place(self, module: str) -> tuple[Declaration, Source]:
        wanted = f"{of_layer(module, 0)}.weight"
        for d in self._layer_declared:
            for source in d.sources:
                if source.name == wanted:
                    return d, source
        raise KeyError(module)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _run(graph: Any, weights: Weights, x: Array, zeros: Mapping[str, Array]) -> Any:
    """The layer's output, and what its blocks read."""
    model = nnx.merge(graph, weights)
    layout = LayerLayout(kv_heads=1, head_dim=2)  # of no consequence: the view writes nothing
    nothing = LayerPool(full=None, latent=None, layout=layout)
    with model.strategy.recording(zeros) as inputs:
        y, _ = model.layers[0](x, model.rotary, nothing, WindowView())
    return y, inputs


def _exact(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``jax.jit`` with products in full float32: a GPU would take TensorFloat-32."""

    def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(function, **options)

        @wraps(function)
        def run(*arguments: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                return compiled(*arguments)

        return run

    return jitted


@_exact(static_argnums=0)
def _embed(graph: Any, weights: Weights, tokens: Array) -> Array:
    model = nnx.merge(graph, weights)
    return model.strategy.embed(tokens, model.embedding)


@_exact(static_argnums=0)
def _forward(graph: Any, weights: Weights, x: Array) -> Array:
    return _run(graph, weights, x, {})[0]


@_exact(static_argnums=0)
def _inputs(graph: Any, weights: Weights, x: Array) -> dict[str, Array]:
    return _run(graph, weights, x, {})[1]


@_exact(static_argnums=0)
def _gradients(
    graph: Any, weights: Weights, x: Array, gy: Array, zeros: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array], Array]:
    run = partial(_run, graph, weights)
    _, pull, inputs = jax.vjp(run, x, zeros, has_aux=True)
    gx, gradients = jax.vmap(pull)(gy)
    return inputs, gradients, gx


@_exact(static_argnums=(0, 4))
def _head(graph: Any, weights: Weights, x: Array, key: jax.Array, samples: int) -> Array:
    model = nnx.merge(graph, weights)
    logits, pull = jax.vjp(model.logits, x)
    p = jax.nn.softmax(logits, axis=-1)

    def pulled(key: jax.Array) -> Array:
        labels = jax.random.categorical(key, logits, axis=-1)
        chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        return pull(p - chosen)[0]

    return jax.lax.map(pulled, jax.random.split(key, samples))
