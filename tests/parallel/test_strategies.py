"""One block under every strategy, on simulated devices, against float64: norm, expanding and
contracting projections, what moves, and the layout of the residual."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import deinfer_jax
from deinfer_jax import LowRank, Slice
from deinfer_jax.checkpoint.parameters import nested, spread_array
from deinfer_jax.evaluate.crosscheck.variants import random_config
from deinfer_jax.layers.linear import Contract, Expand
from deinfer_jax.layers.norm import LayerNorm, RMSNorm
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.parallel import strategies
from deinfer_jax.parallel.mesh import AXIS, choose_placement
from deinfer_jax.parallel.strategies import get_strategy, register_strategy
from deinfer_jax.parallel.strategy import FEW_ROWS, Single, Split, Strategy

D, F, T = 48, 90, 6
PARENT = "model.layers.0.mlp"
MISSPELT: Any = SimpleNamespace(w="outt", v=None, u=None)  # our types are checked in tests
NORMS = {"rms": RMSNorm, "layer": LayerNorm}
STRATEGIES = ("dense", "naive", "low_rank", "sharded")


def low_rank(**ranks: tuple[str, int, int]) -> LowRank:
    return LowRank(
        tuple(
            (f"{PARENT}.{short}_proj", Slice(v=v, offset=offset, rank=rank))
            for short, (v, offset, rank) in ranks.items()
        )
    )


LAYOUTS = {
    "separate": low_rank(gate=("vg", 0, 11), up=("vu", 0, 7), down=("vd", 0, 13)),
    "one v": low_rank(gate=("v", 7, 11), up=("v", 0, 7), down=("vd", 0, 1)),
    "shared": low_rank(gate=("v", 0, 10), up=("v", 0, 10)),
    "gate": low_rank(gate=("vg", 0, 5), down=("vd", 0, 30)),
    "dense": low_rank(),
}


class Block(nnx.Module):
    """x + contract(gate · up of the normed x): the seam between a model and its strategy."""

    def __init__(self, kind: str, layout: LowRank, strategy: Strategy, dtype: str) -> None:
        kinds: dict[str, Any] = dict(bias=True, low_rank=layout, dtype=jnp.dtype(dtype))
        units = strategy.units(F)
        norm = NORMS[kind]
        self.norm = norm("norm", strategy.residual(D), 1e-5, dtype=jnp.dtype(dtype))
        self.expand = Expand(
            PARENT, {"gate_proj": units, "up_proj": units}, D, strategy=strategy, **kinds
        )
        self.contract = Contract(f"{PARENT}.down_proj", units, D, strategy=strategy, **kinds)
        self.strategy = strategy

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        (gate, up), z = self.strategy.expand(x, self.norm, self.expand)
        return x + self.strategy.contract(gate * up, self.contract), z


def tensors(layout: LowRank, seed: int = 0) -> dict[str, np.ndarray]:
    """Of a checkpoint, float64."""
    rng = np.random.default_rng(seed)
    declared = declarations(Block("layer", layout, Single(), "float32"))
    shapes = {source.name: source.shape for d in declared for source in d.sources}
    found = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    found["norm.weight"] += 1
    return found


def exact(kind: str, layout: LowRank, held: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The block in float64, with W = u v."""

    def linear(short: str, h: np.ndarray) -> np.ndarray:
        module = f"{PARENT}.{short}_proj"
        piece = layout.get(module)
        if piece is None:
            return h @ held[f"{module}.weight"].T + held[f"{module}.bias"]
        w = held[f"{module}.u.weight"] @ held[piece.v][piece.offset : piece.offset + piece.rank]
        return h @ w.T + held[f"{module}.u.bias"]

    if kind == "rms":
        h = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * held["norm.weight"]
    else:
        centred = x - x.mean(axis=1, keepdims=True)
        h = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
        h = h * held["norm.weight"] + held["norm.bias"]
    return x + linear("down", linear("gate", h) * linear("up", h))


def run(
    kind: str,
    layout: LowRank,
    strategy: Strategy,
    held: dict[str, np.ndarray],
    x: np.ndarray,
    dtype: str = "float32",
) -> np.ndarray:
    devices = strategy.devices
    placement = choose_placement(devices)
    block = Block(kind, layout, strategy, dtype)
    declared = declarations(block)
    weights = {}
    for d in declared:
        buffer = np.zeros(d.shape, d.dtype)
        for source in d.sources:
            source.put(held[source.name].astype(d.dtype), buffer)
        weights[d.path] = spread_array(buffer, placement, d.spec)
    residual = PartitionSpec(None, AXIS) if strategy.splits_residual else PartitionSpec()
    graph = nnx.graphdef(block)

    def local(weights: Any, x: Any) -> Any:
        return nnx.merge(graph, weights)(x)[0]

    specs = nested({d.path: d.spec for d in declared})
    spread = placement.spread(local, (specs, residual), residual)
    return np.asarray(jax.jit(spread)(nested(weights), jnp.asarray(x, dtype)), np.float64)


def multiplied_out(layout: LowRank, held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(held)
    for module, piece in layout.slices:
        v = held[piece.v][piece.offset : piece.offset + piece.rank]
        found[f"{module}.weight"] = held[f"{module}.u.weight"] @ v
        found[f"{module}.bias"] = held[f"{module}.u.bias"]
    return found


def inputs(rows: int = T) -> np.ndarray:
    """Rows of other scales, with means of the order of their deviations; T, then repeated."""
    rng = np.random.default_rng(1)
    scale = np.array([[0.1], [1], [3], [10], [0.5], [2]])
    x = scale * (rng.standard_normal((T, D)) + rng.normal(size=(T, 1)))
    return np.resize(x, (rows, D))


def check(
    kind: str, name: str, layout: str, devices: int, dtype: str, limit: float, rows: int = T
) -> None:
    chosen, strategy = LAYOUTS[layout], get_strategy(name, devices)
    held, x = tensors(chosen), inputs(rows)
    if dtype != "float32":  # what is compared is the arithmetic, not the rounding of the inputs
        held = {k: v.astype(jnp.dtype(dtype)).astype(np.float64) for k, v in held.items()}
        x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    expected = exact(kind, chosen, held, x)
    if strategy.multiplies_out:
        held, chosen = multiplied_out(chosen, held), low_rank()
    found = run(kind, chosen, strategy, held, x, dtype)
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("layout", ["separate", "one v"])
def test_float32(layout: str, name: str, devices: int) -> None:
    check("rms", name, layout, devices, "float32", 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", NORMS)
def test_every_block(kind: str, layout: str, name: str, devices: int) -> None:
    check(kind, name, layout, devices, "float32", 2e-6)


@pytest.mark.parametrize("layout", ["separate", "gate", "dense"])
def test_layer_norm(layout: str) -> None:
    check("layer", "sharded", layout, 4, "float32", 2e-6)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2**-6), ("float16", 2**-9)])
@pytest.mark.parametrize("kind", NORMS)
def test_half_precision(kind: str, dtype: str, limit: float) -> None:
    """Some four roundings of 2⁻⁹ or 2⁻¹² each, of numbers no larger than the largest result."""
    check(kind, "sharded", "separate", 4, dtype, limit)


@pytest.mark.parametrize("layout", ["separate", "one v", "gate", "dense"])
@pytest.mark.parametrize("kind", NORMS)
def test_many_rows(kind: str, layout: str) -> None:
    check(kind, "sharded", layout, 4, "float32", 2e-6, FEW_ROWS + 8)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2**-6), ("float16", 2**-9)])
@pytest.mark.parametrize("kind", NORMS)
def test_many_rows_in_half_precision(kind: str, dtype: str, limit: float) -> None:
    check(kind, "sharded", "separate", 8, dtype, limit, FEW_ROWS + 3)


@pytest.mark.parametrize("rows", [T, FEW_ROWS + 8])
def test_float16_of_a_loud_channel(rows: int) -> None:
    """x · w, v (x · w) and u v (x · w) before the norm would be infinite in float16."""
    layout = LAYOUTS["separate"]
    held, x = tensors(layout), inputs(rows)
    x[:, 7], held["norm.weight"][7] = 2e4, 4
    held[f"{PARENT}.gate_proj.u.weight"] *= 100
    held[f"{PARENT}.up_proj.u.weight"] /= 100
    held = {k: v.astype(np.float16).astype(np.float64) for k, v in held.items()}
    x = x.astype(np.float16).astype(np.float64)
    expected = exact("rms", layout, held, x)
    found = run("rms", layout, get_strategy("sharded", 4), held, x, "float16")
    assert np.abs(found - expected).max() <= 2**-9 * np.abs(expected).max()


class TestRegister:
    def test_a_name_that_is_taken(self) -> None:
        class Again(Strategy):
            name = "naive"

        with pytest.raises(ValueError, match="strategy: expected a new name, got 'naive'"):
            register_strategy(Again)

    def test_no_name(self) -> None:
        class Nameless(Strategy):
            pass

        with pytest.raises(ValueError, match="strategy: expected a new name, got ''"):
            register_strategy(Nameless)

    def test_no_strategy(self) -> None:
        other: Any = dict
        with pytest.raises(TypeError, match=r"(?s)dict.*Strategy|Strategy.*dict"):
            register_strategy(other)

    def test_the_same_class_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(strategies, "STRATEGIES", dict(strategies.STRATEGIES))
        kinds = []
        for _ in range(2):

            class Again(strategies.WholeResidual):
                name = "again"

            kinds.append(register_strategy(Again))
        assert strategies.STRATEGIES["again"] is kinds[1] is not kinds[0]

    @pytest.mark.parametrize(
        ("expanding", "contracting", "message"),
        [
            (MISSPELT, Split(), r"expanding.w: expected one of .*'in'\), got 'outt'"),
            (Split(w="out", v="in", u="out"), Split(), "expected contracting.u='out'"),
            (Split(), Split(v="in"), "expected expanding projections that are split on their out"),
            (Split(w="out", v="rank", u="rank"), Split(), "expected w and u both split on"),
            (Split(w="in", u="out"), Split(), "expected w and u both split on their outputs"),
            (Split(u="rank"), Split(), "expanding.u is split on the rank: expected v='rank'"),
            (Split(), Split(u="rank", v=None), "contracting.u is split on the rank"),
        ],
    )
    def test_splits_that_contradict(self, expanding: Any, contracting: Any, message: str) -> None:
        kind = type(
            "Odd", (Strategy,), dict(name="odd", expanding=expanding, contracting=contracting)
        )
        with pytest.raises(ValueError, match=f"strategy 'odd': .*{message}"):
            register_strategy(kind)


class TestForgotten:
    """Collectives that a strategy of one's own does not place."""

    @pytest.fixture
    def config(self, monkeypatch: pytest.MonkeyPatch) -> deinfer_jax.ModelConfig:
        monkeypatch.setattr(strategies, "STRATEGIES", dict(strategies.STRATEGIES))
        return random_config("gqa/separate")

    def load(self, config: deinfer_jax.ModelConfig, name: str) -> None:
        with deinfer_jax.load(config, strategy=name, tensor_parallel=2, max_context=32) as llm:
            llm.logits([1, 2, 3])

    def test_after_contracting(self, config: deinfer_jax.ModelConfig) -> None:
        @register_strategy
        class Silent(strategies.LowRank):
            name = "silent"

            def contract(self, h: Any, projection: Any) -> Any:
                return projection.output(projection.product(h, projection.latents(h)))

        message = "strategy 'silent': expected what contract adds to a residual stream to be the"
        with pytest.raises(ValueError, match=message):
            self.load(config, "silent")

    def test_of_latents(self, config: deinfer_jax.ModelConfig) -> None:
        @register_strategy
        class Own(strategies.LowRank):
            name = "own"

            def expand(self, x: Any, norm: Any, block: Any) -> Any:
                h = norm(x)
                z = jax.lax.all_gather(block.latents(h), AXIS, axis=1, tiled=True)
                return block.outputs(block.products(h, z)), z

        with pytest.raises(
            ValueError, match="'own': expected latents to be the same on every device"
        ):
            self.load(config, "own")

    def test_a_method(self, config: deinfer_jax.ModelConfig) -> None:
        @register_strategy
        class Bare(Strategy):
            name = "bare"

        with pytest.raises(NotImplementedError, match="strategy 'bare' does not define embed"):
            self.load(config, "bare")
