"""Reconstruction of heads from latents, every implementation against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_kernels import latent_reconstruct
from deinfer_kernels.latent_reconstruct import api

# Of values around sqrt(R), at most 12.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}
EPS = 1e-5

reconstruct = jax.jit(
    latent_reconstruct, static_argnames=("kv_heads", "offset", "eps", "implementation")
)


@pytest.fixture(params=list(api.IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    """Arguments of the op; positions stand for the rotation's tables."""

    latents: Any  # [C, S, W]
    u: Any  # [K·H, R]
    bias: Any  # [K·H] or None
    norm: Any  # [H] or None
    positions: np.ndarray | None  # [C, S]
    kv_heads: int
    offset: int

    def angles(self) -> np.ndarray:
        """[C, S, H/2] in float64."""
        assert self.positions is not None
        half = self.u.shape[0] // self.kv_heads // 2
        return self.positions[:, :, None] * 100.0 ** -(np.arange(half) / half)


def make(
    *,
    pages: int = 3,
    page_size: int = 7,
    kv_heads: int = 2,
    width: int = 10,
    rank: int = 11,
    offset: int = 0,
    spare: int = 5,
    bias: bool = False,
    norm: bool = False,
    rope: bool = False,
    dtype: str = "float32",
) -> Case:
    rng = np.random.default_rng(rank)

    def random(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    begins = rng.integers(0, 90, (pages, 1))
    return Case(
        latents=random(pages, page_size, offset + rank + spare),
        u=random(kv_heads * width, rank),
        bias=random(kv_heads * width) if bias else None,
        norm=random(width) if norm else None,
        positions=begins + np.arange(page_size)[None, :] if rope else None,
        kv_heads=kv_heads,
        offset=offset,
    )


def run(case: Case, implementation: str) -> Any:
    rotation = None
    if case.positions is not None:
        angles = case.angles()
        rotation = (jnp.asarray(np.cos(angles), "float32"), jnp.asarray(np.sin(angles), "float32"))
    return reconstruct(
        case.latents,
        case.u,
        case.bias,
        kv_heads=case.kv_heads,
        offset=case.offset,
        norm=case.norm,
        eps=EPS,
        rotation=rotation,
        implementation=implementation,
    )


def expected(case: Case) -> np.ndarray:
    """[C, K, S, H] in float64; RoPE as a product of complex numbers."""
    latents, u = np.asarray(case.latents, np.float64), np.asarray(case.u, np.float64)
    y = latents[:, :, case.offset : case.offset + u.shape[1]] @ u.T
    if case.bias is not None:
        y = y + np.asarray(case.bias, np.float64)
    width = u.shape[0] // case.kv_heads
    heads = y.reshape(*y.shape[:2], case.kv_heads, width).transpose(0, 2, 1, 3)
    if case.norm is not None:
        scale = np.sqrt((heads**2).mean(axis=-1, keepdims=True) + EPS)
        heads = heads / scale * np.asarray(case.norm, np.float64)
    if case.positions is not None:
        half = heads.shape[-1] // 2
        turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * case.angles())[:, None]
        heads = np.concatenate([turned.real, turned.imag], axis=-1)
    return heads


class TestLatentReconstruct:
    def check(self, case: Case, implementation: str) -> None:
        found = run(case, implementation)
        assert found.dtype == case.latents.dtype
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected(case), atol=TOLERANCE[str(found.dtype)]
        )

    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
    @pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
    def test_what_follows_the_product(
        self, implementation: str, bias: bool, norm: bool, rope: bool
    ) -> None:
        self.check(make(bias=bias, norm=norm, rope=rope), implementation)

    @pytest.mark.parametrize("rank", [1, 2, 64, 67])
    def test_ranks(self, implementation: str, rank: int) -> None:
        self.check(make(rank=rank, rope=True), implementation)

    @pytest.mark.parametrize(("offset", "spare"), [(0, 0), (64, 0), (3, 9)])
    def test_columns(self, implementation: str, offset: int, spare: int) -> None:
        self.check(make(offset=offset, spare=spare), implementation)

    @pytest.mark.parametrize(("kv_heads", "width"), [(1, 2), (3, 13), (7, 64)])
    def test_heads(self, implementation: str, kv_heads: int, width: int) -> None:
        self.check(make(kv_heads=kv_heads, width=width), implementation)

    @pytest.mark.parametrize("pages", [0, 1, 5])
    def test_pages(self, implementation: str, pages: int) -> None:
        self.check(make(pages=pages, rope=True), implementation)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, implementation: str, dtype: str) -> None:
        self.check(make(dtype=dtype, bias=True, norm=True, rope=True), implementation)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_what_is_no_number_stays_where_it_is(self, implementation: str, value: float) -> None:
        case = make(bias=True, norm=True, rope=True)
        latents = np.array(case.latents)
        latents[1, 3] = value  # a token
        latents[:, :, case.offset + case.u.shape[1] :] = value  # columns that are not read
        broken = Case(**{**vars(case), "latents": jnp.asarray(latents)})
        found, clean = np.array(run(broken, implementation)), np.array(run(case, implementation))
        assert not np.isfinite(found[1, :, 3]).any()
        found[1, :, 3] = clean[1, :, 3]
        np.testing.assert_array_equal(found, clean)


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def call(self, case: Case, **changes: Any) -> None:
        arguments: dict[str, Any] = {"kv_heads": case.kv_heads, "offset": case.offset}
        api.latent_reconstruct(case.latents, case.u, case.bias, **(arguments | changes))

    def test_heads_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="a multiple of 3 rows, got 20"):
            self.call(make(), kv_heads=3)

    def test_columns_beyond_the_latents(self) -> None:
        with pytest.raises(ValueError, match="columns 6 to 17 within the latents' 16"):
            self.call(make(), offset=6)

    def test_tables_of_another_size(self) -> None:
        table = jnp.zeros((3, 6, 5))
        with pytest.raises(ValueError, match=r"cos and sin \(3, 7, 5\)"):
            self.call(make(), rotation=(table, table))

    def test_norm_of_another_width(self) -> None:
        with pytest.raises(ValueError, match=r"norm \[10\], got \(9,\)"):
            self.call(make(), norm=jnp.ones(9))

    def test_unknown_implementation(self) -> None:
        with pytest.raises(ValueError, match="got 'triton'"):
            self.call(make(), implementation="triton")
