"""A bare stack of decoder layers for benches of strategies: residual stream in, residual stream
out, over a contiguous cache, without embedding, head or sampling.

The layers are the engine's own; what is not is the cache, which is as simple as can be: one array
[B, C, K, H] of keys and one of values, all sequences equally long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import PartitionSpec

from deinfer_jax import LowRank, ModelConfig
from deinfer_jax.cache.entry import Cacheable
from deinfer_jax.cache.layout import LayerLayout
from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.checkpoint.parameters import Weights, nested
from deinfer_jax.layers.linear import Contract, Expand
from deinfer_jax.layers.parameter import Declaration, declarations
from deinfer_jax.layers.rope import Rotary
from deinfer_jax.models.llama import DecoderLayer
from deinfer_jax.parallel.mesh import AXIS, Placement
from deinfer_jax.parallel.strategy import Strategy

# Of decode and prefill attention. "cudnn, launched" is cuDNN outside of command buffers, for
# programs in which its capture fails.
ATTENTION = ("cudnn", "cudnn, launched", "xla")
NOT_CAPTURED = "CONDITIONAL,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"  # no CUDNN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a program is for.

    Attributes:
        name: for people.
        batch: B, sequences.
        tokens: of each sequence, that run in a call; 1 = decode.
        capacity: C, tokens of each sequence that the cache holds, those that run included.
    """

    name: str
    batch: int
    tokens: int
    capacity: int

    @property
    def rows(self) -> int:
        """T."""
        return self.batch * self.tokens


@struct.dataclass
class ContiguousView:
    """The last ``tokens`` tokens of sequences that fill the cache to its end.

    Attributes:
        lengths: int32 [B], tokens before those; all are equal.
        tokens: of each sequence.
        attention: "cudnn" or "xla".
    """

    lengths: Any
    tokens: int = struct.field(pytree_node=False)
    attention: str = struct.field(pytree_node=False)

    def positions(self, count: int) -> jax.Array:
        """Of the tokens, sequence by sequence."""
        places = self.lengths[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)[None, :]
        return places.reshape(count)

    def attend(
        self,
        pool: LayerPool,
        q: jax.Array,  # [T, N, H]
        keys: Cacheable,
        values: Cacheable,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[jax.Array, LayerPool]:
        """Decode attends to the sequence's cache, a prompt to itself alone, causally. Keys and
        values are written into the cache in place."""
        assert window is None, "no layer of these has a window"
        batch, decodes = self.lengths.shape[0], self.tokens == 1
        q, k, v = (
            part.reshape(batch, self.tokens, *part.shape[1:])
            for part in (q, keys.full, values.full)
        )
        if decodes:
            rows = jnp.arange(batch, dtype=jnp.int32)
            where: dict[str, Any] = dict(
                mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
            )
            full = tuple(
                cached.at[rows, self.lengths].set(new[:, 0], **where)
                for cached, new in zip(pool.full, (k, v), strict=True)
            )
            k, v = full
        else:
            full = tuple(
                jax.lax.dynamic_update_slice_in_dim(cached, new, self.lengths[0], axis=1)
                for cached, new in zip(pool.full, (k, v), strict=True)
            )
        out = attention(q, k, v, scale, self.attention)
        return out.reshape(-1, *out.shape[2:]), LayerPool(full, None, pool.layout)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, kind: str) -> jax.Array:
    """[B, T, N, H] of q [B, T, N, H] and k, v [B, C, K, H]; causal where there are several
    queries."""
    implementation: Any = kind.partition(",")[0]
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=q.shape[1] > 1, implementation=implementation
    )


class Stack(nnx.Module):
    """The layers of a model."""

    def __init__(self, config: ModelConfig, strategy: Strategy, *, dtype: Any) -> None:
        self.layers = nnx.List(
            [DecoderLayer(i, config, strategy, dtype=dtype) for i in range(config.num_layers)]
        )
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position)

    def __call__(
        self, x: jax.Array, pools: Sequence[LayerPool], view: ContiguousView
    ) -> tuple[jax.Array, list[LayerPool]]:
        new = []
        for layer, pool in zip(self.layers, pools, strict=True):
            x, pool = layer(x, self.rotary, pool, view)
            new.append(pool)
        return x, new


class Layers:
    """A stack under a strategy: its programs, and what they are called with.

    Args:
        config: of the model; factors are forgotten where the strategy multiplies them out.
        strategy: for as many devices as the placement has.
        placement: where it runs.
        dtype: of weights, residual stream and cache.
    """

    def __init__(
        self, config: ModelConfig, strategy: Strategy, placement: Placement, dtype: str
    ) -> None:
        if strategy.multiplies_out:
            config = config.replace(low_rank=LowRank())
        self.config, self.strategy, self.placement = config, strategy, placement
        self.dtype = jnp.dtype(dtype)
        stack = Stack(config, strategy, dtype=self.dtype)
        self.graph = nnx.graphdef(stack)
        self.declared: list[Declaration] = declarations(stack)
        heads = strategy.heads(config).kv
        self.layout = LayerLayout(kv_heads=heads.width // config.head_dim, head_dim=config.head_dim)
        self.kv_heads = heads.padded // config.head_dim  # of all devices
        split = PartitionSpec(None, None, AXIS)
        self.pool_spec = split if strategy.splits_heads else PartitionSpec()
        by_column = PartitionSpec(None, AXIS)
        self.x_spec = by_column if strategy.splits_residual else PartitionSpec()

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        count = self.placement.count
        return sum(math.prod(d.local_shape(count)) * d.dtype.itemsize for d in self.declared)

    def program(self, cell: Cell, kind: str) -> tuple[Any, dict[str, Any]]:
        """(weights, x, pools, lengths) to (x, pools), of which x and pools are donated, and the
        options to compile it with; ``kind`` is the attention's."""
        weights = nested({d.path: d.spec for d in self.declared})
        pools = [self._pool(self.pool_spec, self.pool_spec)] * self.config.num_layers
        run = self.placement.spread(
            partial(_step, self.graph, cell.tokens, kind),
            in_specs=(weights, self.x_spec, pools, PartitionSpec()),
            out_specs=(self.x_spec, pools),
        )
        return jax.jit(run, donate_argnums=(1, 2)), options(kind)

    def alone(self, cell: Cell, kind: str) -> tuple[Any, dict[str, Any]]:
        """The same of one device's part without any collective, for arguments that are all on that
        device (:func:`own_part`). To be traced inside :func:`no_collectives`."""
        run = partial(_step, self.graph, cell.tokens, kind)
        return jax.jit(run, donate_argnums=(1, 2)), options(kind)

    def products(self) -> Any:
        """(weights, x) to the outputs of all products of one device's part, and nothing else but
        what it takes to feed each to the next."""
        return jax.jit(partial(_products, self.graph))

    def arguments(self, cell: Cell, x: np.ndarray) -> tuple[jax.Array, list[LayerPool], jax.Array]:
        """x as given, caches that are not zero, and lengths, on the devices.

        Args:
            cell: what they are for.
            x: [T, D].
        """
        shape = (cell.batch, cell.capacity, self.kv_heads, self.config.head_dim)
        cached = noise(shape, self.dtype)
        pools = [
            self._pool(*(self._put(cached, self.pool_spec) for _ in range(2)))
            for _ in range(self.config.num_layers)
        ]
        lengths = np.full(cell.batch, cell.capacity - cell.tokens, np.int32)
        residual = self._put(x.astype(self.dtype), self.x_spec)
        return residual, pools, self._put(lengths, PartitionSpec())

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(array, self.placement.sharding(spec))

    def _pool(self, keys: Any, values: Any) -> LayerPool:
        return LayerPool((keys, values), None, self.layout)


def _step(
    graph: nnx.GraphDef[Any],
    tokens: int,
    kind: str,
    weights: Weights,
    x: jax.Array,
    pools: list[LayerPool],
    lengths: jax.Array,
) -> tuple[jax.Array, list[LayerPool]]:
    view = ContiguousView(lengths, tokens, kind)
    return nnx.merge(graph, weights)(x, pools, view)


def options(kind: str) -> dict[str, Any]:
    """To compile a program with, that has this kind of attention."""
    return {"xla_gpu_enable_command_buffer": NOT_CAPTURED} if kind.endswith("launched") else {}


def own_part(tree: Any) -> Any:
    """The first device's part of all arrays of a tree, where it is."""
    return jax.tree.map(lambda array: array.addressable_shards[0].data, tree)


@contextmanager
def no_collectives(devices: int) -> Iterator[None]:
    """While this is on, what is traced has no collective, but arrays of the same shapes; barriers
    stand where the collectives were, so that nothing is fused across."""

    def summed(x: Any, axis_name: str) -> Any:
        return jax.lax.optimization_barrier(x)

    def gathered(x: Any, axis_name: str, *, axis: int, tiled: bool, to: str) -> Any:
        return jax.lax.optimization_barrier(jnp.concatenate([x] * devices, axis=axis))

    def scattered(x: Any, axis_name: str, *, scatter_dimension: int, tiled: bool) -> Any:
        x = jax.lax.optimization_barrier(x)
        width = x.shape[scatter_dimension] // devices
        return jax.lax.slice_in_dim(x, 0, width, axis=scatter_dimension)

    stands_for: Mapping[str, Any] = dict(
        psum=summed,
        all_gather=gathered,
        psum_scatter=scattered,
        axis_index=lambda axis_name: jnp.int32(0),
        axis_size=lambda axis_name: devices,
    )
    with mock.patch.multiple(jax.lax, **stands_for):
        yield


def _products(graph: nnx.GraphDef[Any], weights: Weights, x: jax.Array) -> list[jax.Array]:
    found: list[jax.Array] = []

    def expanded(block: Expand, x: jax.Array) -> jax.Array:
        z = block.latents(x)
        if z is not None:
            found.append(z)
            z = _fitted(z, max(start + width for start, width in block.group_slices))
        products = block.products(x if block.has_dense else None, z)
        found.extend(products)
        return block.outputs(products)[0]

    def contracted(projection: Contract, h: jax.Array) -> jax.Array:
        z = projection.latents(h)
        if z is not None:
            found.append(z)
        found.append(projection.product(h, z))
        return found[-1]

    for layer in nnx.merge(graph, weights).layers:
        x = _fitted(x, _inputs(layer.attention.qkv))
        x = contracted(layer.attention.o, expanded(layer.attention.qkv, x))
        x = _fitted(x, _inputs(layer.mlp.gate_up))
        x = contracted(layer.mlp.down, expanded(layer.mlp.gate_up, x))
    return found


def _inputs(block: Expand) -> int:
    first = block.w if block.v is None else block.v
    assert first is not None
    return first[...].shape[1]


def _fitted(x: jax.Array, width: int) -> jax.Array:
    """x, repeated or cut to so many columns; what a collective would have brought."""
    if x.shape[1] >= width:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // x.shape[1]), axis=1)[:, :width]


def noise(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Normal numbers; after some millions they repeat."""
    count = math.prod(shape)
    some = np.random.default_rng(count).standard_normal(min(count, 1 << 22), np.float32)
    repeated = np.resize(some.astype(dtype), count)
    return repeated.reshape(shape)
