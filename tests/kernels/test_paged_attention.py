"""Paged decode attention, every implementation against a loop in float64."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deinfer_kernels import paged_attention
from deinfer_kernels.paged_attention import api

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Case:
    """Arguments of the op; the garbage that no row sees is large, or not finite."""

    q: Array  # [B, N, H]
    pool: Array  # [P, 2, K, S, H]
    table: np.ndarray  # [B, M]
    lengths: np.ndarray  # [B]


def make(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    width: int = 10,
    page_size: int = 16,
    spare_entries: int = 2,
    dtype: str = "float32",
    seed: int = 0,
    garbage: float | None = None,
) -> Case:
    """Sequences in pages that are scattered over a pool whose unused places hold garbage."""
    rng = np.random.default_rng(seed)
    used = [-(-length // page_size) for length in lengths]
    num_pages = sum(used) + 5
    order = rng.permutation(num_pages)
    # Entries past the last page name any page, those of others too.
    table = rng.integers(0, num_pages, (len(lengths), max(used) + spare_entries)).astype(np.int32)
    pool = 50 * rng.standard_normal((num_pages, 2, kv_heads, page_size, width))
    if garbage is not None:
        pool[:] = garbage
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, used, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        for position in range(length):
            page, place = table[row, position // page_size], position % page_size
            pool[page, :, :, place] = rng.standard_normal((2, kv_heads, width))
    q = rng.standard_normal((len(lengths), heads, width))
    return Case(
        jnp.asarray(q, dtype), jnp.asarray(pool, dtype), table, np.asarray(lengths, np.int32)
    )


def expected(case: Case, scale: float, window: int | None = None) -> np.ndarray:
    """[B, N, H] in float64, a token at a time."""
    q, pool = np.asarray(case.q, np.float64), np.asarray(case.pool, np.float64)
    group = q.shape[1] // pool.shape[2]
    page_size = pool.shape[3]
    out = np.zeros_like(q)
    for row, length in enumerate(case.lengths):
        first = 0 if window is None else max(0, length - window)
        for head in range(q.shape[1]):
            weights, values = [], []
            for position in range(first, length):
                page = pool[case.table[row, position // page_size], :, head // group]
                key, value = page[:, position % page_size]
                weights.append(np.exp(scale * (q[row, head] @ key)))
                values.append(value)
            if weights:
                out[row, head] = np.average(values, axis=0, weights=weights)
    return out


GARBAGE = pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])

# One compilation a call instead of one an operation.
attention = jax.jit(paged_attention, static_argnames=("scale", "window", "implementation"))


@pytest.fixture(params=list(api.IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


class TestPagedAttention:
    def check(
        self, case: Case, implementation: str, *, scale: float = 0.3, window: int | None = None
    ) -> None:
        ours = attention(
            case.q,
            case.pool,
            jnp.asarray(case.table),
            jnp.asarray(case.lengths),
            scale=scale,
            window=window,
            implementation=implementation,
        )
        assert ours.dtype == case.q.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float64),
            expected(case, scale, window),
            atol=TOLERANCE[str(case.pool.dtype)] * 4,
        )

    @pytest.mark.parametrize(
        ("heads", "kv_heads"), [(5, 5), (6, 2), (7, 1), (9, 3)], ids=["mha", "gqa", "mqa", "9/3"]
    )
    def test_heads(self, implementation: str, heads: int, kv_heads: int) -> None:
        self.check(make([37, 5, 16], heads=heads, kv_heads=kv_heads), implementation)

    @pytest.mark.parametrize("width", [2, 13, 64])
    def test_head_widths(self, implementation: str, width: int) -> None:
        self.check(make([19, 3], width=width), implementation)

    @pytest.mark.parametrize("page_size", [7, 16, 64, 128])
    def test_page_sizes(self, implementation: str, page_size: int) -> None:
        self.check(make([65, 1, 31], page_size=page_size), implementation)

    def test_lengths_at_the_edges_of_pages(self, implementation: str) -> None:
        self.check(make([1, 15, 16, 17, 31, 32, 33]), implementation)

    def test_a_table_without_spare_entries(self, implementation: str) -> None:
        self.check(make([48, 32], spare_entries=0), implementation)

    def test_one_sequence(self, implementation: str) -> None:
        self.check(make([23]), implementation)

    def test_empty_sequences_give_zeros(self, implementation: str) -> None:
        case = make([0, 21, 0])
        out = attention(
            case.q,
            case.pool,
            jnp.asarray(case.table),
            jnp.asarray(case.lengths),
            scale=1.0,
            implementation=implementation,
        )
        assert not np.asarray(out[0]).any() and not np.asarray(out[2]).any()

    def test_neighbours_of_empty_sequences(self, implementation: str) -> None:
        self.check(make([0, 21, 0]), implementation)

    @pytest.mark.parametrize("window", [1, 3, 16, 17, 40, 1000])
    def test_windows(self, implementation: str, window: int) -> None:
        self.check(make([40, 2, 16, 0]), implementation, window=window)

    @pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
    def test_scales(self, implementation: str, scale: float) -> None:
        self.check(make([33, 8], seed=3), implementation, scale=scale)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, implementation: str, dtype: str) -> None:
        self.check(make([37, 5, 0], dtype=dtype), implementation)

    def same(self, case: Case, other: Case, implementation: str, window: int | None = None) -> None:
        """The second case gives the first one's bits."""
        first, second = [
            attention(
                one.q,
                one.pool,
                jnp.asarray(one.table),
                jnp.asarray(one.lengths),
                scale=0.3,
                window=window,
                implementation=implementation,
            )
            for one in (case, other)
        ]
        assert np.isfinite(np.asarray(first, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(second), np.asarray(first))

    @GARBAGE
    @pytest.mark.parametrize("window", [None, 3, 16])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_what_no_row_sees_may_be_anything(
        self, implementation: str, garbage: float, window: int | None, dtype: str
    ) -> None:
        lengths = [1, 0, 15, 16, 17, 40]
        broken = make(lengths, garbage=garbage, dtype=dtype)
        self.check(broken, implementation, window=window)
        self.same(make(lengths, dtype=dtype), broken, implementation, window)

    @GARBAGE
    def test_unused_entries_may_name_any_page(self, implementation: str, garbage: float) -> None:
        broken = make([20, 37, 0], garbage=garbage)
        for page in range(broken.pool.shape[0]):
            table = broken.table.copy()
            table[0, 2:] = table[1, 3:] = table[2] = page
            other = Case(broken.q, broken.pool, table, broken.lengths)
            self.same(broken, other, implementation)

    @GARBAGE
    @pytest.mark.parametrize("window", [1, 3, 16, 17])
    def test_what_the_window_has_left_behind_may_be_anything(
        self, implementation: str, garbage: float, window: int
    ) -> None:
        case = make([40, 2, 16, 33])
        pool = np.array(case.pool)
        for row, length in enumerate(case.lengths):
            for position in range(max(0, length - window)):
                pool[case.table[row, position // 16], :, :, position % 16] = garbage
        broken = Case(case.q, jnp.asarray(pool), case.table, case.lengths)
        self.check(broken, implementation, window=window)
        self.same(case, broken, implementation, window)

    @GARBAGE
    def test_a_broken_sequence_does_not_leak(self, implementation: str, garbage: float) -> None:
        case = make([20, 37])
        table = case.table.copy()
        table[1, 3:] = table[0, 0]  # a broken page in the unused entries
        pool = np.array(case.pool)
        pool[case.table[0, :2]] = garbage
        first, second = [
            attention(
                case.q,
                jnp.asarray(one),
                jnp.asarray(table),
                jnp.asarray(case.lengths),
                scale=0.3,
                implementation=implementation,
            )
            for one in (case.pool, pool)
        ]
        np.testing.assert_array_equal(np.asarray(second[1]), np.asarray(first[1]))
        np.testing.assert_allclose(np.asarray(second[1]), expected(case, 0.3)[1], atol=1e-5)

    def test_very_large_scores(self, implementation: str) -> None:
        case = make([30, 4])
        large = Case(case.q * 100, case.pool, case.table, case.lengths)
        out = attention(
            large.q,
            large.pool,
            jnp.asarray(case.table),
            jnp.asarray(case.lengths),
            scale=10.0,
            implementation=implementation,
        )
        assert np.isfinite(np.asarray(out)).all()

    def test_a_sequence_does_not_depend_on_its_neighbours(self, implementation: str) -> None:
        case = make([23, 40, 7])
        both, fewer = [
            attention(
                case.q[rows],
                case.pool,
                jnp.asarray(case.table[rows]),
                jnp.asarray(case.lengths[rows]),
                scale=0.3,
                implementation=implementation,
            )
            for rows in (slice(0, 3), slice(0, 2))
        ]
        np.testing.assert_array_equal(np.asarray(both[:2]), np.asarray(fewer))

    def test_sequences_that_share_pages(self, implementation: str) -> None:
        case = make([40, 40])
        table = np.stack([case.table[0], case.table[0]])
        self.check(Case(case.q, case.pool, table, np.array([40, 20], np.int32)), implementation)


class TestErrors:
    def call(self, case: Case, **changes: object) -> None:
        arguments = {
            "q": case.q,
            "pool": case.pool,
            "block_table": jnp.asarray(case.table),
            "lengths": jnp.asarray(case.lengths),
            "scale": 1.0,
        }
        api.paged_attention(**(arguments | changes))  # pyright: ignore[reportArgumentType]

    def test_kv_heads_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple of kv heads, got 5 and 2"):
            self.call(make([3], heads=5, kv_heads=2))

    @pytest.mark.parametrize("window", [0, -1])
    def test_window(self, window: int) -> None:
        with pytest.raises(ValueError, match=f"window >= 1 or None, got {window}"):
            self.call(make([3]), window=window)

    def test_mosaic_gpu_does_not_fall_back(self) -> None:
        if "mosaic_gpu" in api.IMPLEMENTATIONS:
            pytest.skip("the kernel exists")
        with pytest.raises(NotImplementedError, match="'mosaic_gpu' does not exist"):
            self.call(make([3]), implementation="mosaic_gpu")

    def test_unknown_implementation(self) -> None:
        with pytest.raises(ValueError, match="got 'triton'"):
            self.call(make([3]), implementation="triton")
