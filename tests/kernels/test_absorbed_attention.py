"""Decode attention over latent values, every implementation against a loop in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_kernels import absorbed_attention
from deinfer_kernels.absorbed_attention import api

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-2, "float16": 1e-2}
SCALE = 0.3

attention = jax.jit(
    absorbed_attention, static_argnames=("rank", "offset", "scale", "window", "implementation")
)


@pytest.fixture(params=list(api.IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass(frozen=True)
class Case:
    """Arguments of the op; what no row sees is garbage."""

    q: np.ndarray  # [B, N, H]
    keys: np.ndarray  # [P, 1, K, S, H]
    latents: np.ndarray  # [P, S, W]
    table: np.ndarray  # [B, M]
    lengths: np.ndarray  # [B]
    rank: int
    offset: int


def make(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 10,
    rank: int = 11,
    offset: int = 0,
    page_size: int = 16,
    garbage: float | None = None,
) -> Case:
    rng = np.random.default_rng(0)
    used = [-(-length // page_size) for length in lengths]
    num_pages = sum(used) + 5
    order = iter(rng.permutation(num_pages))
    table = rng.integers(0, num_pages, (len(lengths), max(used) + 2)).astype(np.int32)
    keys = 50 * rng.standard_normal((num_pages, 1, kv_heads, page_size, width))
    latents = 50 * rng.standard_normal((num_pages, page_size, offset + rank + 3))
    if garbage is not None:
        keys[:], latents[:] = garbage, garbage
    for row, length in enumerate(lengths):
        for position in range(length):
            entry, place = divmod(position, page_size)
            if place == 0:
                table[row, entry] = next(order)
            page = table[row, entry]
            keys[page, 0, :, place] = rng.standard_normal((kv_heads, width))
            latents[page, place, offset : offset + rank] = rng.standard_normal(rank)
    q = rng.standard_normal((len(lengths), heads, width))
    return Case(q, keys, latents, table, np.asarray(lengths, np.int32), rank, offset)


def run(
    case: Case, implementation: str, *, dtype: str = "float32", window: int | None = None
) -> Any:
    return attention(
        *(jnp.asarray(part, dtype) for part in (case.q, case.keys, case.latents)),
        jnp.asarray(case.table),
        jnp.asarray(case.lengths),
        rank=case.rank,
        offset=case.offset,
        scale=SCALE,
        window=window,
        implementation=implementation,
    )


def expected(case: Case, dtype: str, window: int | None) -> np.ndarray:
    """[B, N, R] in float64, of the rounded arguments, a token at a time."""
    q, keys, latents = (
        np.asarray(jnp.asarray(part, dtype), np.float64)
        for part in (case.q, case.keys, case.latents)
    )
    group, page_size = q.shape[1] // keys.shape[2], keys.shape[3]
    out = np.zeros((*q.shape[:2], case.rank))
    for row, length in enumerate(case.lengths):
        positions = range(0 if window is None else max(0, length - window), length)
        places = [(case.table[row, p // page_size], p % page_size) for p in positions]
        for head in range(q.shape[1]) if places else ():
            scores = [q[row, head] @ keys[page, 0, head // group, at] for page, at in places]
            rows = [latents[page, at, case.offset :][: case.rank] for page, at in places]
            out[row, head] = np.average(rows, axis=0, weights=np.exp(SCALE * np.array(scores)))
    return out


class TestAbsorbedAttention:
    def check(
        self,
        case: Case,
        implementation: str,
        *,
        dtype: str = "float32",
        window: int | None = None,
    ) -> None:
        found = run(case, implementation, dtype=dtype, window=window)
        assert found.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected(case, dtype, window), atol=TOLERANCE[dtype]
        )

    @pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (6, 2), (7, 1)])
    def test_heads(self, implementation: str, heads: int, kv_heads: int) -> None:
        self.check(make([37, 5, 16], heads=heads, kv_heads=kv_heads), implementation)

    @pytest.mark.parametrize(("rank", "offset"), [(1, 0), (64, 0), (67, 64), (5, 3)])
    def test_columns(self, implementation: str, rank: int, offset: int) -> None:
        self.check(make([19, 3], rank=rank, offset=offset), implementation)

    @pytest.mark.parametrize("page_size", [7, 16, 64])
    def test_page_sizes(self, implementation: str, page_size: int) -> None:
        self.check(make([65, 1, 31], page_size=page_size), implementation)

    def test_lengths_at_the_edges_of_pages(self, implementation: str) -> None:
        self.check(make([1, 15, 16, 17, 31, 32, 33]), implementation)

    @pytest.mark.parametrize("window", [1, 3, 16, 17, 40, 1000])
    def test_windows(self, implementation: str, window: int) -> None:
        self.check(make([40, 2, 16, 0]), implementation, window=window)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, implementation: str, dtype: str) -> None:
        self.check(make([37, 5, 0]), implementation, dtype=dtype)

    def test_empty_sequences_give_zeros(self, implementation: str) -> None:
        found = run(make([0, 21, 0], garbage=np.nan), implementation)
        assert not np.asarray(found[::2]).any() and np.asarray(found[1]).any()

    @pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("window", [None, 3, 16])
    def test_what_no_row_sees_may_be_anything(
        self, implementation: str, garbage: float, window: int | None
    ) -> None:
        lengths = [1, 0, 15, 16, 17, 40]
        clean, broken = make(lengths, offset=4), make(lengths, offset=4, garbage=garbage)
        found = [np.asarray(run(case, implementation, window=window)) for case in (clean, broken)]
        np.testing.assert_array_equal(found[1], found[0])
        self.check(broken, implementation, window=window)

    @pytest.mark.parametrize("garbage", [np.nan, np.inf])
    def test_what_the_window_has_left_behind_may_be_anything(
        self, implementation: str, garbage: float
    ) -> None:
        case = make([40, 2, 33])
        keys, latents = case.keys.copy(), case.latents.copy()
        for row, length in enumerate(case.lengths):
            for position in range(max(0, length - 5)):
                page, place = case.table[row, position // 16], position % 16
                keys[page, :, :, place], latents[page, place] = garbage, garbage
        broken = replace(case, keys=keys, latents=latents)
        self.check(broken, implementation, window=5)


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def call(self, case: Case, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "q": jnp.asarray(case.q, "float32"),
            "keys": jnp.asarray(case.keys, "float32"),
            "latents": jnp.asarray(case.latents, "float32"),
            "block_table": jnp.asarray(case.table),
            "lengths": jnp.asarray(case.lengths),
            "rank": case.rank,
            "scale": 1.0,
        }
        api.absorbed_attention(**(arguments | changes))

    def test_kv_heads_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple of kv heads, got 5 and 2"):
            self.call(make([3], heads=5))

    @pytest.mark.parametrize("window", [0, -1])
    def test_window(self, window: int) -> None:
        with pytest.raises(ValueError, match=f"window >= 1 or None, got {window}"):
            self.call(make([3]), window=window)

    @pytest.mark.parametrize(("rank", "offset"), [(15, 0), (0, 0), (11, 4), (5, -1)])
    def test_columns(self, rank: int, offset: int) -> None:
        with pytest.raises(ValueError, match=f"columns {offset} to {offset + rank} within"):
            self.call(make([3]), rank=rank, offset=offset)

    def test_unknown_implementation(self) -> None:
        with pytest.raises(ValueError, match="got 'triton'"):
            self.call(make([3]), implementation="triton")
