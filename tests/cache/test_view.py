"""What the views write and attend to, against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.cache import chunk
from deinfer_jax.cache.chunk import query_block
from deinfer_jax.cache.entry import Cacheable
from deinfer_jax.cache.layout import LayerLayout
from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.cache.view import DecodeView, PrefillView

N, K, H, S, PAGES = 6, 2, 10, 16, 9
SCALE = 0.4
LAYOUT = LayerLayout(kv_heads=K, head_dim=H)


@dataclass(frozen=True)
class Sequence:
    """Dense q [T, N, H], k and v [T, K, H] of one sequence."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def attended(self, window: int | None = None) -> np.ndarray:
        """Causal attention [T, N, H] in float64."""
        q, k, v = (part.astype(np.float64) for part in (self.q, self.k, self.v))
        out = np.zeros_like(q)
        for t in range(len(q)):
            first = 0 if window is None else max(0, t + 1 - window)
            for n in range(N):
                head = n // (N // K)
                scores = np.exp(SCALE * (k[first : t + 1, head] @ q[t, n]))
                out[t, n] = scores @ v[first : t + 1, head] / scores.sum()
        return out


def sequence(tokens: int, seed: int = 0) -> Sequence:
    rng = np.random.default_rng(seed)
    shapes = ((tokens, N, H), (tokens, K, H), (tokens, K, H))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return Sequence(q, k, v)


GARBAGE = {"numbers": None, "nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.fixture(params=GARBAGE)
def garbage(request: pytest.FixtureRequest) -> np.ndarray:
    """A pool as former holders leave it."""
    return garbage_pool(GARBAGE[request.param])


def garbage_pool(value: float | None = None) -> np.ndarray:
    """A pool of random numbers, or of one value."""
    shape = (PAGES, 2, K, S, H)
    if value is not None:
        return np.full(shape, value, np.float32)
    return np.random.default_rng(99).standard_normal(shape).astype(np.float32)


def differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two pools do not hold the same; NaN is the same as NaN."""
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


@partial(jax.jit, static_argnames="window")
def attend(view, pool, q, k, v, window):
    """With bare arrays: the pool of a layer whose keys and values are full."""
    pool = LayerPool(full=pool, latent=None, layout=LAYOUT)
    keys, values = Cacheable(full=k), Cacheable(full=v)
    out, pool = view.attend(pool, q, keys, values, scale=SCALE, window=window)
    return out, pool.full


def forget_programs() -> None:
    attend.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def table(*pages: int, length: int, unused: int = 0) -> np.ndarray:
    return np.array([*pages, *[unused] * (length - len(pages))], np.int32)


def prefill(pool, whole: Sequence, pages, start: int, length: int, bucket: int, window=None):
    """One chunk; the padding's q, k and v are garbage."""
    padding = sequence(bucket, seed=7)
    parts = []
    for part, garbage in zip(
        (whole.q, whole.k, whole.v), (padding.q, padding.k, padding.v), strict=True
    ):
        parts.append(np.concatenate([part[start : start + length], garbage[length:]]))
    view = PrefillView(jnp.asarray(pages), jnp.int32(start), jnp.int32(length))
    out, pool = attend(view, jnp.asarray(pool), *map(jnp.asarray, parts), window)
    return np.asarray(out)[:length], np.asarray(pool)


def decode(pool, rows: list[Sequence], pages: np.ndarray, lengths, active, window=None):
    """Token ``lengths[i]`` of each row."""
    parts = [
        np.stack([getattr(row, name)[at] for row, at in zip(rows, lengths, strict=True)])
        for name in "qkv"
    ]
    view = DecodeView(
        jnp.asarray(pages), jnp.asarray(np.array(lengths, np.int32)), jnp.asarray(active)
    )
    out, pool = attend(view, jnp.asarray(pool), *map(jnp.asarray, parts), window)
    return np.asarray(out), np.asarray(pool)


def cached(pool: np.ndarray, pages: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """k and v [T, K, H] of a sequence as the pool holds them."""
    at = range(tokens)
    k, v = (np.stack([pool[pages[t // S], i, :, t % S] for t in at]) for i in (0, 1))
    return k, v


class TestPrefill:
    @pytest.mark.parametrize("window", [None, 1, 7, 100])
    def test_one_chunk(self, garbage: np.ndarray, window: int | None) -> None:
        whole = sequence(37)
        out, _ = prefill(garbage, whole, table(4, 1, 6, length=4), 0, 37, 40, window)
        np.testing.assert_allclose(out, whole.attended(window), atol=1e-5)

    @pytest.mark.parametrize("window", [None, 5, 20])
    def test_later_chunks_attend_to_earlier_pages(
        self, garbage: np.ndarray, window: int | None
    ) -> None:
        whole, pages = sequence(45), table(4, 1, 6, length=4)
        pool, outs = garbage, []
        for start, length in ((0, 16), (16, 13), (29, 16)):
            out, pool = prefill(pool, whole, pages, start, length, 16, window)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs), whole.attended(window), atol=1e-5)

    def test_chunk_within_a_page(self, garbage: np.ndarray) -> None:
        whole, pages = sequence(9), table(3, length=2)
        _, pool = prefill(garbage, whole, pages, 0, 4, 8)
        out, _ = prefill(pool, whole, pages, 4, 5, 8)
        np.testing.assert_allclose(out, whole.attended()[4:], atol=1e-5)

    def test_writes_the_chunk(self, garbage: np.ndarray) -> None:
        whole, pages = sequence(37), table(4, 1, 6, length=4)
        _, pool = prefill(garbage, whole, pages, 0, 37, 40)
        k, v = cached(pool, pages, 37)
        np.testing.assert_array_equal(k, whole.k)
        np.testing.assert_array_equal(v, whole.v)

    def test_writes_nothing_else(self, garbage: np.ndarray) -> None:
        # Padding goes up to position 39, for which the table names page 0.
        before, pages = garbage, table(4, 1, length=4)
        _, after = prefill(before, sequence(21), pages, 0, 21, 40)
        touched = np.zeros((PAGES, S), bool)
        touched[4, :] = True
        touched[1, :5] = True
        np.testing.assert_array_equal(
            after.transpose(0, 3, 1, 2, 4)[~touched], before.transpose(0, 3, 1, 2, 4)[~touched]
        )

    def test_padding_beyond_the_table_writes_nothing(self, garbage: np.ndarray) -> None:
        # Positions 20 … 39 with a table of two pages: the last ones are beyond it.
        before, pages = garbage, table(4, 1, length=2)
        whole = sequence(24)
        _, middle = prefill(before, whole, pages, 0, 20, 20)
        _, after = prefill(middle, whole, pages, 20, 4, 20)
        changed = np.unique(np.argwhere(differs(after, middle))[:, 0])
        assert changed.tolist() == [1]
        np.testing.assert_array_equal(after[1, :, :, 8:], before[1, :, :, 8:])

    @pytest.mark.parametrize("unused", [0, 2, 5, PAGES - 1])
    def test_pages_that_unused_entries_name_stay_as_they_are(
        self, garbage: np.ndarray, unused: int
    ) -> None:
        _, pool = prefill(garbage, sequence(3), table(2, length=4, unused=unused), 0, 3, 40)
        before = garbage.copy()
        pool = pool.copy()
        before[2, :, :, :3] = pool[2, :, :, :3] = 0  # what is written
        np.testing.assert_array_equal(pool, before)

    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_no_token_sees_does_not_change_a_bit(
        self, value: float, window: int | None
    ) -> None:
        # Behind the end of the last page, in the pages of others, and in the page that unused
        # entries of the table name: page 0, and the sequence's own.
        whole = sequence(20)
        outs = []
        for pool, unused in (
            (garbage_pool(), 3),
            (garbage_pool(value), 0),
            (garbage_pool(value), 1),
            (garbage_pool(value), 4),
        ):
            pages = table(4, 1, length=5, unused=unused)
            first, pool = prefill(pool, whole, pages, 0, 13, 16, window)
            second, _ = prefill(pool, whole, pages, 13, 7, 16, window)
            outs.append(np.concatenate([first, second]))
        np.testing.assert_allclose(outs[0], whole.attended(window), atol=1e-5)
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_what_no_token_sees_does_not_leak_in_half_precision(self, dtype: str) -> None:
        whole, outs = sequence(20), []
        view = PrefillView(jnp.asarray(table(4, 1, length=4)), jnp.int32(0), jnp.int32(20))
        for pool in (garbage_pool(), garbage_pool(np.nan)):
            parts = [jnp.asarray(part, dtype) for part in (pool, whole.q, whole.k, whole.v)]
            outs.append(np.asarray(attend(view, *parts, None)[0], np.float32))
        assert np.isfinite(outs[0]).all()
        np.testing.assert_array_equal(outs[1], outs[0])

    def test_padding_does_not_change_the_result(self, garbage: np.ndarray) -> None:
        whole, pages = sequence(12), table(2, length=1)
        exact, _ = prefill(garbage, whole, pages, 0, 12, 12)
        padded, _ = prefill(garbage, whole, pages, 0, 12, 40)
        np.testing.assert_allclose(padded, exact, atol=1e-6)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype: str) -> None:
        whole, pages = sequence(37), table(4, 1, 6, length=4)
        view = PrefillView(jnp.asarray(pages), jnp.int32(0), jnp.int32(37))
        parts = [jnp.asarray(part, dtype) for part in (garbage_pool(), whole.q, whole.k, whole.v)]
        out, _ = attend(view, *parts, None)
        rounded = Sequence(*(np.asarray(part, np.float32) for part in parts[1:]))
        assert out.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(out, np.float64), rounded.attended(), atol=0.03)

    def test_positions(self) -> None:
        view = PrefillView(jnp.zeros(2, jnp.int32), jnp.int32(5), jnp.int32(2))
        assert np.asarray(view.positions(4)).tolist() == [5, 6, 7, 8]


class TestQueryBlocks:
    """A chunk attends in blocks of queries; how many makes no difference."""

    def blocks(
        self,
        monkeypatch: pytest.MonkeyPatch,
        score_bytes: int,
        *,
        window: int | None = None,
        bucket: int = 90,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Outputs of a sequence of 83 tokens in two chunks, and its pool; also the blocks of the
        second chunk."""
        monkeypatch.setattr(chunk, "SCORE_BYTES", score_bytes)
        forget_programs()  # the size is read when a program is traced
        lengths: list[int] = []
        real_map = jax.lax.map

        def spy(function, arguments):
            lengths.append(arguments[0].shape[0])
            return real_map(function, arguments)

        monkeypatch.setattr(jax.lax, "map", spy)
        whole, pages = sequence(83), table(4, 1, 6, 3, 7, 2, length=7)
        first, pool = prefill(garbage_pool(), whole, pages, 0, 10, 16, window)
        second, pool = prefill(pool, whole, pages, 10, 73, bucket, window)
        forget_programs()
        return np.concatenate([first, second]), pool, lengths[-1] if lengths else 1

    # 7 pages of 16 tokens and 6 heads: 2688 bytes a query.
    @pytest.mark.parametrize(
        ("score_bytes", "count"), [(0, 6), (32 * 2688 - 1, 6), (32 * 2688, 3), (64 * 2688, 2)]
    )
    @pytest.mark.parametrize("window", [None, 7, 20])
    def test_several_blocks_equal_one(
        self, monkeypatch: pytest.MonkeyPatch, score_bytes: int, count: int, window: int | None
    ) -> None:
        # 90 rows are no multiple of a block.
        one, one_pool, single = self.blocks(monkeypatch, 2**28, window=window)
        found, pool, blocks = self.blocks(monkeypatch, score_bytes, window=window)
        assert (single, blocks) == (1, count)
        np.testing.assert_allclose(found, one, atol=2e-6)  # of values up to 3
        np.testing.assert_array_equal(pool, one_pool)
        np.testing.assert_allclose(found, sequence(83).attended(window), atol=1e-5)

    @pytest.mark.parametrize("bucket", [80, 81, 95])
    def test_counts_around_a_multiple(self, monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
        found, _, blocks = self.blocks(monkeypatch, 0, bucket=bucket, window=20)
        assert blocks == -(-bucket // 16)
        np.testing.assert_allclose(found, sequence(83).attended(20), atol=1e-5)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_what_no_token_sees_does_not_leak(
        self, monkeypatch: pytest.MonkeyPatch, value: float
    ) -> None:
        monkeypatch.setattr(chunk, "SCORE_BYTES", 0)
        forget_programs()
        whole, pages = sequence(37), table(4, 1, 6, length=5, unused=8)
        outs = [
            prefill(pool, whole, pages, 0, 37, 40)[0]
            for pool in (garbage_pool(), garbage_pool(value))
        ]
        forget_programs()
        np.testing.assert_array_equal(outs[1], outs[0])
        np.testing.assert_allclose(outs[0], whole.attended(), atol=1e-5)

    @pytest.mark.parametrize("heads", [1, 9, 32])
    @pytest.mark.parametrize("context", [16, 8192, 131072, 2**20])
    def test_scores_of_a_block_fit(self, heads: int, context: int) -> None:
        block = query_block(heads, context)
        size = heads * context * 4
        assert block & (block - 1) == 0 and block >= 16
        assert block == 16 or block * size <= chunk.SCORE_BYTES
        assert 2 * block * size > chunk.SCORE_BYTES


Rows = tuple[list[Sequence], np.ndarray, np.ndarray]


@pytest.fixture
def rows_in_pool(garbage: np.ndarray) -> Rows:
    return two_rows(garbage)


def two_rows(pool: np.ndarray) -> Rows:
    """Two sequences of 34 and 20 tokens in a pool, with their tables, which both name page 0, of
    the first one, in their unused entries."""
    pool = pool.copy()
    rows = [sequence(40, seed=1), sequence(40, seed=2)]
    pages = np.stack([table(5, 0, 8, length=4), table(7, 2, length=4)])
    for row, row_pages, tokens in zip(rows, pages, (34, 20), strict=True):
        for t in range(tokens):
            page = row_pages[t // S]
            pool[page, 0, :, t % S], pool[page, 1, :, t % S] = row.k[t], row.v[t]
    return rows, pages, pool


class TestDecode:
    @pytest.mark.parametrize("window", [None, 1, 7, 100])
    def test_attends_to_the_own_sequence_and_itself(
        self, rows_in_pool: Rows, window: int | None
    ) -> None:
        rows, pages, pool = rows_in_pool
        out, _ = decode(pool, rows, pages, [34, 20], [True, True], window)
        expected = [rows[0].attended(window)[34], rows[1].attended(window)[20]]
        np.testing.assert_allclose(out, np.stack(expected), atol=1e-5)

    def test_first_token_of_a_page(self, rows_in_pool: Rows) -> None:
        rows, pages, pool = rows_in_pool
        out, _ = decode(pool, rows, pages, [32, 16], [True, True])
        expected = [rows[0].attended()[32], rows[1].attended()[16]]
        np.testing.assert_allclose(out, np.stack(expected), atol=1e-5)

    def test_first_token_of_a_sequence(self, rows_in_pool: Rows) -> None:
        rows, pages, pool = rows_in_pool
        out, _ = decode(pool, rows, pages, [0, 20], [True, True])
        np.testing.assert_allclose(out[0], np.repeat(rows[0].v[0], N // K, axis=0), atol=1e-6)

    def test_writes_the_token(self, rows_in_pool: Rows) -> None:
        rows, pages, pool = rows_in_pool
        _, pool = decode(pool, rows, pages, [34, 20], [True, True])
        np.testing.assert_array_equal(pool[8, 0, :, 2], rows[0].k[34])
        np.testing.assert_array_equal(pool[2, 1, :, 4], rows[1].v[20])

    def test_writes_nothing_else(self, rows_in_pool: Rows) -> None:
        rows, pages, before = rows_in_pool
        _, after = decode(before, rows, pages, [34, 20], [True, True])
        after = after.copy()
        after[8, :, :, 2], after[2, :, :, 4] = before[8, :, :, 2], before[2, :, :, 4]
        np.testing.assert_array_equal(after, before)

    def test_inactive_rows_write_nothing(self, rows_in_pool: Rows) -> None:
        rows, pages, before = rows_in_pool
        _, after = decode(before, rows, pages, [34, 20], [False, False])
        np.testing.assert_array_equal(after, before)

    def test_inactive_rows_give_zeros(self, rows_in_pool: Rows) -> None:
        rows, pages, pool = rows_in_pool
        out, _ = decode(pool, rows, pages, [34, 20], [False, True])
        assert not out[0].any()

    def test_inactive_rows_leave_the_others_alone(self, rows_in_pool: Rows) -> None:
        rows, pages, pool = rows_in_pool
        both, _ = decode(pool, rows, pages, [34, 20], [True, True])
        one, _ = decode(pool, rows, pages, [34, 20], [False, True])
        np.testing.assert_array_equal(one[1], both[1])

    def test_an_inactive_row_past_its_table_writes_nothing(self, rows_in_pool: Rows) -> None:
        rows, pages, before = rows_in_pool
        rows[0] = sequence(70)
        _, after = decode(before, rows, pages, [64, 20], [False, False])
        np.testing.assert_array_equal(after, before)

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_no_token_sees_does_not_change_a_bit(
        self, value: float, window: int | None
    ) -> None:
        rows, pages, pool = two_rows(garbage_pool())
        clean, _ = decode(pool, rows, pages, [34, 20], [True, True], window)
        expected = [rows[0].attended(window)[34], rows[1].attended(window)[20]]
        np.testing.assert_allclose(clean, np.stack(expected), atol=1e-5)
        rows, pages, pool = two_rows(garbage_pool(value))
        for unused in range(PAGES):  # of nobody, of the other row, its own
            pages[0, 3:] = pages[1, 2:] = unused
            out, _ = decode(pool, rows, pages, [34, 20], [True, True], window)
            np.testing.assert_array_equal(out, clean)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_broken_neighbour_does_not_leak(self, value: float) -> None:
        rows, pages, pool = two_rows(garbage_pool())
        clean, _ = decode(pool, rows, pages, [34, 20], [True, True])
        pool[[5, 0, 8]] = value  # the first row's pages; the second's table ends with page 0
        out, _ = decode(pool, rows, pages, [34, 20], [True, True])
        np.testing.assert_array_equal(out[1], clean[1])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_inactive_rows_over_broken_pages_give_zeros(self, value: float) -> None:
        rows, pages, _ = two_rows(garbage_pool())
        out, _ = decode(garbage_pool(value), rows, pages, [34, 20], [False, False])
        np.testing.assert_array_equal(out, np.zeros_like(out))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_the_window_has_left_behind_does_not_leak(self, value: float) -> None:
        rows, pages, pool = two_rows(garbage_pool())
        clean, _ = decode(pool, rows, pages, [34, 20], [True, True], 7)
        pool[[5, 7]] = value  # positions 0 … 15; the windows begin at 28 and 14
        pool[7, :, :, 14:] = two_rows(garbage_pool())[2][7, :, :, 14:]
        out, _ = decode(pool, rows, pages, [34, 20], [True, True], 7)
        np.testing.assert_array_equal(out, clean)

    def test_positions(self) -> None:
        view = DecodeView(
            jnp.zeros((2, 1), jnp.int32), jnp.array([4, 9], jnp.int32), jnp.ones(2, bool)
        )
        assert np.asarray(view.positions(2)).tolist() == [4, 9]

    def test_the_named_implementation_runs(self) -> None:
        view = DecodeView(
            jnp.zeros((2, 1), jnp.int32),
            jnp.zeros(2, jnp.int32),
            jnp.ones(2, bool),
            implementation="mosaic_gpu",
        )
        with pytest.raises(NotImplementedError, match="mosaic_gpu"):
            view.attend(
                LayerPool(full=jnp.zeros((2, 2, K, S, H)), latent=None, layout=LAYOUT),
                jnp.zeros((2, N, H)),
                Cacheable(full=jnp.zeros((2, K, H))),
                Cacheable(full=jnp.zeros((2, K, H))),
                scale=1.0,
                window=None,
            )
