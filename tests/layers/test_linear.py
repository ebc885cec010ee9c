"""Expand and Contract, dense and decomposed, against float64 products with W = u v."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deinfer_jax import LowRank, Slice
from deinfer_jax.layers.linear import Contract, Expand, product
from deinfer_jax.layers.parameter import Source
from deinfer_jax.parallel.strategy import Single

D, T = 13, 5
WIDTHS = {"q_proj": 12, "k_proj": 6, "v_proj": 7}
PARENT = "model.layers.0.self_attn"


def slices(**pieces: tuple[str, int, int]) -> LowRank:
    """LowRank from short names and (v, offset, rank)."""
    return LowRank(
        tuple(
            (f"{PARENT}.{short}", Slice(v=v, offset=offset, rank=rank))
            for short, (v, offset, rank) in pieces.items()
        )
    )


LAYOUTS = {
    "dense": slices(),
    "separate": slices(q_proj=("vq", 0, 5), k_proj=("vk", 0, 3), v_proj=("vv", 0, 4)),
    "separate slices of one v": slices(
        q_proj=("vqkv", 0, 5), k_proj=("vqkv", 5, 3), v_proj=("vqkv", 8, 4)
    ),
    "slices in another order": slices(
        q_proj=("vqkv", 7, 5), k_proj=("vqkv", 0, 3), v_proj=("vqkv", 3, 4)
    ),
    "shared q k v": slices(q_proj=("z", 0, 6), k_proj=("z", 0, 6), v_proj=("z", 0, 6)),
    "shared k v": slices(q_proj=("vq", 0, 5), k_proj=("vkv", 0, 4), v_proj=("vkv", 0, 4)),
    "shared q v, k alone": slices(q_proj=("a", 0, 5), k_proj=("b", 0, 3), v_proj=("a", 0, 5)),
    "k dense": slices(q_proj=("vq", 0, 5), v_proj=("vv", 0, 4)),
    "only k decomposed": slices(k_proj=("vk", 0, 3)),
    "k v shared, q dense": slices(k_proj=("vkv", 0, 4), v_proj=("vkv", 0, 4)),
    "rank 1": slices(q_proj=("vq", 0, 1), k_proj=("vk", 0, 1), v_proj=("vv", 0, 1)),
    "rank above the widths": slices(q_proj=("vq", 0, 17), k_proj=("vk", 0, 19)),
}


def expand(low_rank: LowRank, *, bias: bool, dtype: str = "float32") -> Expand:
    """Declared, without values; see ``fill``."""
    kinds: dict[str, Any] = dict(low_rank=low_rank, dtype=jnp.dtype(dtype), strategy=Single())
    return Expand(PARENT, WIDTHS, D, bias=bias, **kinds)


def variables(module: nnx.Module) -> Iterator[tuple[Any, tuple[Source, ...]]]:
    """Every parameter with the tensors that it stacks."""
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        yield variable, variable.get_metadata()["sources"]


def sources(module: nnx.Module) -> dict[str, Source]:
    return {source.name: source for _, pieces in variables(module) for source in pieces}


def fill(module: nnx.Module, seed: int = 1) -> dict[str, np.ndarray]:
    """Puts random tensors where the declared sources say; returns them by checkpoint name."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for variable, pieces in variables(module):
        value = variable.get_value()
        whole = np.zeros(value.shape, np.float32)
        for piece in pieces:
            tensors[piece.name] = rng.standard_normal(piece.shape).astype(np.float32)
            piece.put(tensors[piece.name], whole)
        variable.set_value(jnp.asarray(whole, value.dtype))
    return tensors


def rows(name: str, start: int, shape: tuple[int, ...]) -> Source:
    """A whole tensor at some row of a parameter; the columns of a u are padded."""
    columns = ((0, 0, shape[1]),) if name.endswith(".u.weight") else None
    return Source(name, shape, ((0, start, shape[0]),), columns)


def dense_weight(name: str, low_rank: LowRank, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The module's [out, in] in float64."""
    for module, piece in low_rank.slices:
        if module == name:
            v = tensors[piece.v].astype(np.float64)[piece.offset : piece.offset + piece.rank]
            return tensors[f"{name}.u.weight"].astype(np.float64) @ v
    return tensors[f"{name}.weight"].astype(np.float64)


@nnx.jit
def all_stages(block: Any, x: Any) -> Any:
    z = block.latents(x)
    if isinstance(block, Expand):
        return block.outputs(block.products(x, z))
    return block.output(block.product(x, z))


def run(block: Expand | Contract, x: np.ndarray) -> Any:
    return all_stages(block, jnp.asarray(x))


def random_x(width: int = D) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((T, width)).astype(np.float32)


class TestExpand:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_equals_the_dense_product(self, layout: str, bias: bool) -> None:
        low_rank = LAYOUTS[layout]
        block = expand(low_rank, bias=bias)
        tensors, x = fill(block), random_x()
        outputs = run(block, x)
        decomposed = dict(low_rank.slices)
        for short, ours in zip(WIDTHS, outputs, strict=True):
            name = f"{PARENT}.{short}"
            expected = x.astype(np.float64) @ dense_weight(name, low_rank, tensors).T
            if bias:
                expected += tensors[f"{name}.u.bias" if name in decomposed else f"{name}.bias"]
            assert ours.shape == (T, WIDTHS[short])
            np.testing.assert_allclose(np.asarray(ours), expected, atol=2e-4, rtol=2e-5)

    def test_latents_of_a_dense_block(self) -> None:
        block = expand(LAYOUTS["dense"], bias=False)
        fill(block)
        assert block.latents(jnp.asarray(random_x())) is None

    @pytest.mark.parametrize(
        ("layout", "ranks"),
        # Each is padded to a multiple of 8.
        [
            ("separate", 24),
            ("separate slices of one v", 24),
            ("shared q k v", 8),
            ("k dense", 16),
            ("rank above the widths", 48),
        ],
    )
    def test_width_of_the_latents(self, layout: str, ranks: int) -> None:
        block = expand(LAYOUTS[layout], bias=False)
        fill(block)
        z = block.latents(jnp.asarray(random_x()))
        assert z is not None and z.shape == (T, ranks)

    @pytest.mark.parametrize(
        ("layout", "products"),
        [("separate", 3), ("shared q k v", 1), ("shared k v", 2), ("shared q v, k alone", 2)],
    )
    def test_a_group_is_one_product(self, layout: str, products: int) -> None:
        assert len(expand(LAYOUTS[layout], bias=False).u) == products

    def test_no_rows_are_left_without_a_source(self) -> None:
        for low_rank in LAYOUTS.values():
            block = expand(low_rank, bias=True)
            for variable, pieces in variables(block):
                runs = sorted((begin, n) for piece in pieces for _, begin, n in piece.rows)
                unit = 8 if variable is block.v else 1  # what a rank is padded to
                ends = [-(-(begin + n) // unit) * unit for begin, n in runs]
                assert [begin for begin, _ in runs] == [0, *ends[:-1]]
                assert ends[-1] == variable.get_value().shape[0]

    def test_sources_of_a_dense_block(self) -> None:
        assert sources(expand(LAYOUTS["dense"], bias=True)) == {
            f"{PARENT}.q_proj.weight": rows(f"{PARENT}.q_proj.weight", 0, (12, D)),
            f"{PARENT}.k_proj.weight": rows(f"{PARENT}.k_proj.weight", 12, (6, D)),
            f"{PARENT}.v_proj.weight": rows(f"{PARENT}.v_proj.weight", 18, (7, D)),
            f"{PARENT}.q_proj.bias": rows(f"{PARENT}.q_proj.bias", 0, (12,)),
            f"{PARENT}.k_proj.bias": rows(f"{PARENT}.k_proj.bias", 12, (6,)),
            f"{PARENT}.v_proj.bias": rows(f"{PARENT}.v_proj.bias", 18, (7,)),
        }

    def test_sources_of_a_mixed_block(self) -> None:
        found = sources(expand(LAYOUTS["k v shared, q dense"], bias=True))
        assert found == {
            f"{PARENT}.q_proj.weight": rows(f"{PARENT}.q_proj.weight", 0, (12, D)),
            "vkv": rows("vkv", 0, (4, D)),
            f"{PARENT}.k_proj.u.weight": rows(f"{PARENT}.k_proj.u.weight", 0, (6, 4)),
            f"{PARENT}.v_proj.u.weight": rows(f"{PARENT}.v_proj.u.weight", 6, (7, 4)),
            f"{PARENT}.q_proj.bias": rows(f"{PARENT}.q_proj.bias", 0, (12,)),
            f"{PARENT}.k_proj.u.bias": rows(f"{PARENT}.k_proj.u.bias", 12, (6,)),
            f"{PARENT}.v_proj.u.bias": rows(f"{PARENT}.v_proj.u.bias", 18, (7,)),
        }

    def test_a_v_of_several_slices_is_read_once(self) -> None:
        found = sources(expand(LAYOUTS["slices in another order"], bias=False))
        runs = ((7, 0, 5), (0, 8, 3), (3, 16, 4))  # q, k, v
        assert found["vqkv"] == Source("vqkv", (12, D), runs)

    def test_latents_are_in_the_dtype_of_the_model(self) -> None:
        block = expand(LAYOUTS["separate"], bias=False, dtype="bfloat16")
        fill(block)
        z = block.latents(jnp.asarray(random_x(), jnp.bfloat16))
        assert z is not None and z.dtype == jnp.bfloat16


def contract(low_rank: LowRank, *, bias: bool) -> Contract:
    name = f"{PARENT}.o_proj"
    kinds: dict[str, Any] = dict(low_rank=low_rank, dtype=jnp.dtype("float32"), strategy=Single())
    return Contract(name, D, 11, bias=bias, **kinds)


class TestContract:
    @pytest.mark.parametrize("rank", [None, 1, 4, 20])
    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_equals_the_dense_product(self, rank: int | None, bias: bool) -> None:
        low_rank = slices() if rank is None else slices(o_proj=("vo", 0, rank))
        block, h = contract(low_rank, bias=bias), random_x()
        tensors = fill(block)
        ours = run(block, h)
        expected = h.astype(np.float64) @ dense_weight(f"{PARENT}.o_proj", low_rank, tensors).T
        if bias:
            expected += tensors[f"{PARENT}.o_proj.{'' if rank is None else 'u.'}bias"]
        np.testing.assert_allclose(np.asarray(ours), expected, atol=2e-4, rtol=2e-5)

    def test_sources(self) -> None:
        found = sources(contract(slices(o_proj=("vo", 0, 4)), bias=True))
        assert found == {
            "vo": rows("vo", 0, (4, D)),
            f"{PARENT}.o_proj.u.weight": rows(f"{PARENT}.o_proj.u.weight", 0, (11, 4)),
            f"{PARENT}.o_proj.u.bias": rows(f"{PARENT}.o_proj.u.bias", 0, (11,)),
        }


class TestProduct:
    @pytest.mark.parametrize("rows", [1, 2, 7, 128, 129, 300])
    def test_float32(self, rows: int) -> None:
        rng = np.random.default_rng(0)
        w, x = (rng.standard_normal((n, D)).astype(np.float32) for n in (7, rows))
        ours = jax.jit(product)(jnp.asarray(w), jnp.asarray(x))
        np.testing.assert_allclose(np.asarray(ours), x @ w.T, atol=1e-5)

    def test_bfloat16_accumulates_in_float32(self) -> None:
        # 1 + 1/512 · 512 = 2 in float32; in bfloat16 each small term would be lost.
        w = jnp.concatenate([jnp.ones((1, 1)), jnp.full((1, 512), 1 / 512)], axis=1)
        ours = product(w.astype(jnp.bfloat16), jnp.ones((1, 513), jnp.bfloat16))
        assert ours.dtype == jnp.bfloat16 and float(ours[0, 0]) == 2.0


class TestSlice:
    @pytest.mark.parametrize(("offset", "rank"), [(0, 0), (-1, 3), (2, -2)])
    def test_bad_sizes(self, offset: int, rank: int) -> None:
        with pytest.raises(ValueError, match=f"'v'.*rank >= 1 and offset >= 0, got {rank}, "):
            Slice(v="v", offset=offset, rank=rank)
