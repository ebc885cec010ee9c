"""What the views write and attend to, against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.cache.view import DecodeView, PrefillView

N, K, H, S, PAGES = 6, 2, 10, 16, 9
NULL = PAGES  # the pool's last page
SCALE = 0.4


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


def garbage_pool(seed: int = 99) -> np.ndarray:
    """A pool of finite garbage, as former holders leave it; the null page is zero."""
    pool = np.random.default_rng(seed).standard_normal((PAGES + 1, 2, K, S, H)).astype(np.float32)
    pool[NULL] = 0
    return pool


@partial(jax.jit, static_argnames="window")
def attend(view, pool, q, k, v, window):
    return view.attend(pool, q, k, v, scale=SCALE, window=window)


def table(*pages: int, length: int) -> np.ndarray:
    return np.array([*pages, *[NULL] * (length - len(pages))], np.int32)


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
    def test_one_chunk(self, window: int | None) -> None:
        whole = sequence(37)
        out, _ = prefill(garbage_pool(), whole, table(4, 1, 6, length=4), 0, 37, 40, window)
        np.testing.assert_allclose(out, whole.attended(window), atol=1e-5)

    @pytest.mark.parametrize("window", [None, 5, 20])
    def test_later_chunks_attend_to_earlier_pages(self, window: int | None) -> None:
        whole, pages = sequence(45), table(4, 1, 6, length=4)
        pool, outs = garbage_pool(), []
        for start, length in ((0, 16), (16, 13), (29, 16)):
            out, pool = prefill(pool, whole, pages, start, length, 16, window)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs), whole.attended(window), atol=1e-5)

    def test_chunk_within_a_page(self) -> None:
        whole, pages = sequence(9), table(3, length=2)
        _, pool = prefill(garbage_pool(), whole, pages, 0, 4, 8)
        out, _ = prefill(pool, whole, pages, 4, 5, 8)
        np.testing.assert_allclose(out, whole.attended()[4:], atol=1e-5)

    def test_writes_the_chunk(self) -> None:
        whole, pages = sequence(37), table(4, 1, 6, length=4)
        _, pool = prefill(garbage_pool(), whole, pages, 0, 37, 40)
        k, v = cached(pool, pages, 37)
        np.testing.assert_array_equal(k, whole.k)
        np.testing.assert_array_equal(v, whole.v)

    def test_writes_nothing_else(self) -> None:
        before, pages = garbage_pool(), table(4, 1, length=4)
        _, after = prefill(before, sequence(21), pages, 0, 21, 40)
        touched = np.zeros((PAGES + 1, S), bool)
        touched[4, :] = True
        touched[1, :5] = True
        np.testing.assert_array_equal(
            after.transpose(0, 3, 1, 2, 4)[~touched], before.transpose(0, 3, 1, 2, 4)[~touched]
        )

    def test_padding_beyond_the_table_writes_nothing(self) -> None:
        # Positions 20 … 39 with a table of two pages: the last ones are beyond it.
        before, pages = garbage_pool(), table(4, 1, length=2)
        whole = sequence(24)
        _, middle = prefill(before, whole, pages, 0, 20, 20)
        _, after = prefill(middle, whole, pages, 20, 4, 20)
        changed = np.unique(np.argwhere(after != middle)[:, 0])
        assert changed.tolist() == [1]
        np.testing.assert_array_equal(after[1, :, :, 8:], before[1, :, :, 8:])

    def test_null_page_stays_zero(self) -> None:
        _, pool = prefill(garbage_pool(), sequence(3), table(2, length=4), 0, 3, 40)
        assert not pool[NULL].any()

    def test_padding_does_not_change_the_result(self) -> None:
        whole, pages = sequence(12), table(2, length=1)
        exact, _ = prefill(garbage_pool(), whole, pages, 0, 12, 12)
        padded, _ = prefill(garbage_pool(), whole, pages, 0, 12, 40)
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


def two_rows() -> tuple[list[Sequence], np.ndarray, np.ndarray]:
    """Two sequences of 34 and 20 tokens in a pool, with their tables."""
    rows = [sequence(40, seed=1), sequence(40, seed=2)]
    pages = np.stack([table(5, 0, 8, length=4), table(7, 2, length=4)])
    pool = garbage_pool()
    for row, row_pages, tokens in zip(rows, pages, (34, 20), strict=True):
        for t in range(tokens):
            page = row_pages[t // S]
            pool[page, 0, :, t % S], pool[page, 1, :, t % S] = row.k[t], row.v[t]
    return rows, pages, pool


class TestDecode:
    @pytest.mark.parametrize("window", [None, 1, 7, 100])
    def test_attends_to_the_own_sequence_and_itself(self, window: int | None) -> None:
        rows, pages, pool = two_rows()
        out, _ = decode(pool, rows, pages, [34, 20], [True, True], window)
        expected = [rows[0].attended(window)[34], rows[1].attended(window)[20]]
        np.testing.assert_allclose(out, np.stack(expected), atol=1e-5)

    def test_first_token_of_a_page(self) -> None:
        rows, pages, pool = two_rows()
        out, _ = decode(pool, rows, pages, [32, 16], [True, True])
        expected = [rows[0].attended()[32], rows[1].attended()[16]]
        np.testing.assert_allclose(out, np.stack(expected), atol=1e-5)

    def test_first_token_of_a_sequence(self) -> None:
        rows, pages, pool = two_rows()
        out, _ = decode(pool, rows, pages, [0, 20], [True, True])
        np.testing.assert_allclose(out[0], np.repeat(rows[0].v[0], N // K, axis=0), atol=1e-6)

    def test_writes_the_token(self) -> None:
        rows, pages, pool = two_rows()
        _, pool = decode(pool, rows, pages, [34, 20], [True, True])
        np.testing.assert_array_equal(pool[8, 0, :, 2], rows[0].k[34])
        np.testing.assert_array_equal(pool[2, 1, :, 4], rows[1].v[20])

    def test_writes_nothing_else(self) -> None:
        rows, pages, before = two_rows()
        _, after = decode(before, rows, pages, [34, 20], [True, True])
        after = after.copy()
        after[8, :, :, 2], after[2, :, :, 4] = before[8, :, :, 2], before[2, :, :, 4]
        np.testing.assert_array_equal(after, before)

    def test_inactive_rows_write_nothing(self) -> None:
        rows, pages, before = two_rows()
        _, after = decode(before, rows, pages, [34, 20], [False, False])
        np.testing.assert_array_equal(after, before)

    def test_inactive_rows_give_zeros(self) -> None:
        rows, pages, pool = two_rows()
        out, _ = decode(pool, rows, pages, [34, 20], [False, True])
        assert not out[0].any()

    def test_inactive_rows_leave_the_others_alone(self) -> None:
        rows, pages, pool = two_rows()
        both, _ = decode(pool, rows, pages, [34, 20], [True, True])
        one, _ = decode(pool, rows, pages, [34, 20], [False, True])
        np.testing.assert_array_equal(one[1], both[1])

    def test_an_inactive_row_past_its_table_writes_nothing(self) -> None:
        rows, pages, before = two_rows()
        rows[0] = sequence(70)
        _, after = decode(before, rows, pages, [64, 20], [False, False])
        np.testing.assert_array_equal(after, before)

    def test_positions(self) -> None:
        view = DecodeView(
            jnp.zeros((2, 1), jnp.int32), jnp.array([4, 9], jnp.int32), jnp.ones(2, bool)
        )
        assert np.asarray(view.positions(2)).tolist() == [4, 9]

    def test_the_named_implementation_runs(self) -> None:
        view = DecodeView(
            jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32), jnp.ones(2, bool), "mosaic_gpu"
        )
        with pytest.raises(NotImplementedError, match="mosaic_gpu"):
            view.attend(
                jnp.zeros((2, 2, K, S, H)),
                jnp.zeros((2, N, H)),
                jnp.zeros((2, K, H)),
                jnp.zeros((2, K, H)),
                scale=1.0,
                window=None,
            )
