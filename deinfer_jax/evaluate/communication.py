"""What programs send: their collectives, counted in the StableHLO that we emit and in the HLO that
XLA compiles; and the programs to count in, made from shapes alone.

Tests read it against the strategies' formulas, ``python -m bench.communication`` prints it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from deinfer_jax.cache.choice import choose_layout
from deinfer_jax.cache.layout import CacheLayout, LayerLayout
from deinfer_jax.cache.pool import LayerPool, pool_specs
from deinfer_jax.cache.preparation import Preparation
from deinfer_jax.cache.view import DecodeView
from deinfer_jax.checkpoint.parameters import nested
from deinfer_jax.config import LowRank, ModelConfig
from deinfer_jax.engine import programs
from deinfer_jax.engine.programs import BatchState, Growth
from deinfer_jax.evaluate.hlo import ARRAY, NAME, parse
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.models import Model, build
from deinfer_jax.parallel.mesh import AXIS, Placement, choose_placement
from deinfer_jax.parallel.strategies import get_strategy
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["Collective", "Kind", "Operand", "collectives", "layer_program", "step_program"]

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that a collective takes.

    Attributes:
        shape: of the device's own array.
        dtype: as the program spells it: ``bf16``, ``f32``, ``i32`` (StableHLO) or ``s32`` (HLO).
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Of the device's own array."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation, which is one launch however many operands XLA merged into it.

    Attributes:
        kind: what it does.
        operands: of one device.
        devices: how many take part.
        branches: it stands in these branches of conditionals, the outermost first; none: it runs in
            any case.
    """

    kind: Kind
    operands: tuple[Operand, ...]
    devices: int
    branches: tuple[int, ...] = ()

    @property
    def elements(self) -> tuple[int, ...]:
        """Of each operand at its full size: of an all-reduce the buffer, of an all-gather what
        comes out, of a reduce-scatter what goes in."""
        times = self.devices if self.kind == "all-gather" else 1
        return tuple(operand.elements * times for operand in self.operands)

    @property
    def payload(self) -> int:
        """Elements of all operands."""
        return sum(self.elements)

    @property
    def wire(self) -> float:
        """Elements that each device sends when all stand in a ring.

        Raises:
            ValueError: the kind has no ring.
        """
        around = (self.devices - 1) / self.devices
        if self.kind == "all-reduce":
            return 2 * around * self.payload
        if self.kind in ("all-gather", "reduce-scatter"):
            return around * self.payload
        raise ValueError(f"wire: expected all-reduce, all-gather, reduce-scatter, got {self.kind}")


def collectives(program: jax.stages.Lowered | jax.stages.Compiled | str) -> list[Collective]:
    """Collectives of a program, in its order.

    What a function does counts at each of its calls, what a loop does once. An asynchronous pair
    (``all-gather-start``, ``all-gather-done``) is one collective.

    Args:
        program: lowered, which is read as StableHLO, or compiled, or the text of compiled HLO.
    """
    if isinstance(program, jax.stages.Lowered):
        module: Any = program.compiler_ir("stablehlo")
        return list(_StableHlo(module).walk())
    text = program if isinstance(program, str) else program.as_text()
    assert text is not None, "the compiled program has no text"
    return list(_Hlo(text).walk())


# Programs, from shapes alone.


def layer_program(
    config: ModelConfig,
    strategy: str,
    devices: int,
    *,
    tokens: int = 2,
    dtype: str | None = None,
    kv_cache: str = "full",
    layer: int = 0,
    context: int = 16,
    page_size: int = 16,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """One decoder layer of a decode step, as the engine runs it: its part of the residual stream
    and of the cache in, and out. Nothing is allocated.

    Args:
        config: of the model, which is built as declarations of shapes; one layer will do.
        strategy: a registered one.
        devices: p, of which one process needs as many (simulated) devices.
        tokens: sequences that decode.
        dtype: of weights, cache and payloads; None = the checkpoint's.
        kv_cache: ``"full"``, ``"latent"`` or ``"full+latent"``.
        layer: which one.
        context: tokens of each sequence that attention reads, in whole pages.
        page_size: S.
        platform: to lower for, ``"cpu"`` or ``"cuda"``; None = where the devices are.
    """
    shapes = _Shapes(config, strategy, devices, dtype, kv_cache, page_size)
    model = shapes.model()
    one, rotary, layout = model.layers[layer], model.rotary, shapes.layout.layers[layer]
    graph = nnx.graphdef(one)

    def run(weights: Any, pool: LayerPool, x: Array, view: DecodeView) -> tuple[Array, LayerPool]:
        return nnx.merge(graph, weights)(x, rotary, pool, view)

    pages = shapes.layout.pages_for(context)
    compacts = layout.keys is not None
    view = DecodeView(
        block_table=_ints(tokens, pages),
        lengths=_ints(tokens),
        active=jax.ShapeDtypeStruct((tokens,), jnp.bool),
        preparation=_preparation(tokens, pages) if compacts else None,
    )
    weights, weight_specs = shapes.weights(one)
    pool, pools = shapes.pool(layout, tokens * pages)
    by_column = PartitionSpec(None, AXIS) if shapes.strategy.splits_residual else PartitionSpec()
    x = jax.ShapeDtypeStruct((tokens, shapes.config.hidden_size), shapes.dtype)
    in_specs = (weight_specs, pools, by_column, PartitionSpec())
    return shapes.lower(run, (weights, pool, x, view), in_specs, (by_column, pools), platform)


def step_program(
    config: ModelConfig,
    strategy: str,
    devices: int,
    *,
    tokens: int = 2,
    dtype: str | None = None,
    kv_cache: str = "full",
    context: int = 16,
    page_size: int = 16,
    platform: str | None = None,
    extras: bool = True,
) -> jax.stages.Lowered:
    """A whole decode step of all layers, with embedding, head and sampling: the engine's program.
    Collectives in no branch, or in branches 0 only, are those of greedy rows without
    log-probabilities. Arguments as of :func:`layer_program`, and ``extras`` as of the program."""
    shapes = _Shapes(config, strategy, devices, dtype, kv_cache, page_size)
    model, pages = shapes.model(), shapes.layout.pages_for(context)
    weights, weight_specs = shapes.weights(model)
    found = [shapes.pool(layout, tokens * pages) for layout in shapes.layout.layers]
    pools, specs = [pool for pool, _ in found], [spec for _, spec in found]
    state: BatchState = jax.eval_shape(lambda: programs.empty_state(tokens, pages))
    growth = Growth(_ints(tokens), _ints(tokens, 1))
    preparation = _preparation(tokens, pages) if shapes.layout.compacts else None
    options: dict[str, Any] = dict(pages=pages, steps=1, implementation=None, extras=extras)
    run = partial(programs.decode, nnx.graphdef(model), **options)
    arguments = (weights, pools, state, _ints(tokens), growth, preparation)
    return shapes.lower(run, arguments, *programs.specs("decode", weight_specs, specs), platform)


class _Shapes:
    """A model on simulated devices: its arrays as shapes, and how they are split."""

    def __init__(
        self,
        config: ModelConfig,
        strategy: str,
        devices: int,
        dtype: str | None,
        kv_cache: str,
        page_size: int,
    ) -> None:
        dtype = dtype or config.dtype
        self.strategy: Strategy = get_strategy(strategy, devices)
        if self.strategy.multiplies_out:
            config = config.replace(low_rank=LowRank())
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.placement: Placement = choose_placement(devices)
        self.layout: CacheLayout = choose_layout(
            config, kv_cache, page_size, dtype, strategy=self.strategy
        )

    def model(self) -> Model:
        """Declared."""
        limit = self.config.max_position
        return build(self.config, max_context=limit, strategy=self.strategy, dtype=self.dtype)

    def weights(self, module: nnx.Module) -> tuple[Any, Any]:
        """Whole arrays of a module, and their specs."""
        declared = declarations(module)
        arrays: dict[Any, Any] = {d.path: jax.ShapeDtypeStruct(d.shape, d.dtype) for d in declared}
        specs: dict[Any, Any] = {d.path: d.spec for d in declared}
        return nested(arrays), nested(specs)

    def pool(self, layout: LayerLayout, pages: int) -> tuple[LayerPool, LayerPool]:
        """A layer's pool on all devices, and its specs."""
        specs = pool_specs(layout, *self.strategy.pool_specs())
        size = self.layout.page_size
        own = (layout.full_shape(pages, size), layout.latent_shape(pages, size))
        whole = [self._whole(*pair) for pair in zip(own, (specs.full, specs.latent), strict=True)]
        return LayerPool(full=whole[0], latent=whole[1], layout=layout), specs

    def lower(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: tuple[Any, ...],
        platform: str | None,
    ) -> jax.stages.Lowered:
        """The program of a function of local arrays."""
        placed = tuple(
            jax.tree.map(self._placed, self._spread_spec(spec, one), one)
            for spec, one in zip(in_specs, arguments, strict=True)
        )
        traced = jax.jit(self.placement.spread(function, in_specs, out_specs)).trace(*placed)
        return traced.lower(lowering_platforms=None if platform is None else (platform,))

    def _whole(self, own: tuple[int, ...] | None, spec: Any) -> Any:
        if own is None:
            return None
        axes = tuple(spec) + (None,) * (len(own) - len(spec))
        counts = (1 if axis is None else self.placement.count for axis in axes)
        shape = tuple(size * count for size, count in zip(own, counts, strict=True))
        return jax.ShapeDtypeStruct(shape, self.dtype)

    @staticmethod
    def _spread_spec(spec: Any, tree: Any) -> Any:
        """One spec for a whole tree as a tree of it."""
        return jax.tree.map(lambda _: spec, tree) if isinstance(spec, PartitionSpec) else spec

    def _placed(self, spec: PartitionSpec, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = self.placement.sharding(spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _preparation(rows: int, pages: int) -> Preparation:
    """Of a batch that shares no page."""
    size = rows * pages
    return Preparation(_ints(size, 3), _ints(rows, pages), _ints(size), _ints())


# StableHLO, as a tree of operations.

_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_BRANCHING = ("stablehlo.case", "stablehlo.if")


class _StableHlo:
    def __init__(self, module: Any) -> None:
        operations = list(module.body.operations)
        functions = [op for op in operations if op.operation.name == "func.func"]
        self._functions = {op.attributes["sym_name"].value: op for op in functions}
        meshes = [op for op in operations if op.operation.name == "sdy.mesh"]
        self._meshes = {
            op.attributes["sym_name"].value: str(op.attributes["mesh"]) for op in meshes
        }

    def walk(self) -> Iterator[Collective]:
        yield from self._within(self._functions["main"], ())

    def _within(self, op: Any, branches: tuple[int, ...]) -> Iterator[Collective]:
        name = op.operation.name
        kind = _kind(name.removeprefix("stablehlo.").replace("_", "-"))
        if kind is not None:
            operands = tuple(_tensor(str(value.type)) for value in op.operation.operands)
            yield Collective(kind, operands, self._devices(op, kind), branches)
            return
        if name == "func.call":
            yield from self._within(self._functions[op.attributes["callee"].value], branches)
        for number, region in enumerate(op.operation.regions):
            # The first region of an `if` is for true, which a `case` calls 1.
            index = 1 - number if name == "stablehlo.if" else number
            inside = (*branches, index) if name in _BRANCHING else branches
            for block in region.blocks:
                for inner in block.operations:
                    yield from self._within(inner, inside)

    def _devices(self, op: Any, kind: Kind) -> int:
        if kind == "collective-permute":
            return 2
        groups = str(op.attributes["replica_groups"])
        axes = re.search(r"mesh = @(\w+), axes = \[(.*)\]", groups)
        if axes is not None:
            sizes = dict(re.findall(r'"(\w+)"=(\d+)', self._meshes[axes[1]]))
            names = re.findall(r'name = "(\w+)"', axes[2])
            return math.prod(int(sizes[name]) for name in names)
        shape = re.search(r"tensor<\d+x(\d+)xi64>", groups)
        assert shape is not None, f"unknown form of {groups}"
        return int(shape[1])


def _tensor(text: str) -> Operand:
    found = _TENSOR.fullmatch(text)
    assert found is not None, f"expected the type of a tensor, got {text}"
    return Operand(tuple(int(size) for size in found[1].split("x")[:-1]), found[2])


# Compiled HLO, as text.

_CASES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class _Hlo:
    def __init__(self, text: str) -> None:
        self._module = parse(text)

    def walk(self) -> Iterator[Collective]:
        yield from self._within(self._module.entry, ())

    def _within(self, computation: str, branches: tuple[int, ...]) -> Iterator[Collective]:
        here = self._module.computations[computation]
        for one in here.values():
            kind = _kind(one.opcode.removesuffix("-start"))
            if kind is not None:
                arrays = (_array(here[name].type) for name in one.operands)
                devices = self._devices(one.attributes, kind)
                yield Collective(kind, tuple(arrays), devices, branches)
                continue
            if one.opcode.endswith(("-done", "-update")):
                continue  # names what its start has called
            cases = _CASES.search(one.attributes)
            for index, name in enumerate(NAME.findall(cases[1]) if cases else ()):
                yield from self._within(name, (*branches, index))
            for role, name in one.called:
                index = {"true_computation": (1,), "false_computation": (0,)}.get(role, ())
                yield from self._within(name, (*branches, *index))

    def _devices(self, rest: str, kind: Kind) -> int:
        if kind == "collective-permute":
            return 2
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest)
        if mesh is not None:
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
        if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
            return int(iota[1])
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
            return len(listed[1].split(","))
        return self._module.partitions


def _array(text: str) -> Operand:
    (found,) = ARRAY.findall(text)  # no tuple
    return Operand(tuple(int(size) for size in found[1].split(",") if size), found[0])


def _kind(name: str) -> Kind | None:
    return next((kind for kind in KINDS if kind == name), None)
