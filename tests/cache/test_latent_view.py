"""The views over latent pools, against dense attention in float64 with keys and values computed
token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.cache.entry import Cacheable, Rebuild
from deinfer_jax.cache.layout import LayerLayout, Segment
from deinfer_jax.cache.pool import LayerPool, empty_pool
from deinfer_jax.cache.preparation import prepare
from deinfer_jax.cache.view import DecodeView, PrefillView

N, K, H, S, PAGES = 6, 2, 10, 16, 9
SCALE, EPS = 0.4, 1e-5
TOKENS = 45

# Keys and values: which are latent, and whether values are absorbed.
C_K, C_V = Segment(name="c_k", offset=0, rank=5), Segment(name="c_v", offset=64, rank=3)
C_KV = Segment(name="c_kv", offset=0, rank=5)
LAYOUTS = {
    "latent": LayerLayout(kv_heads=K, head_dim=H, keys=C_K, values=C_V),
    "one latent": LayerLayout(kv_heads=K, head_dim=H, keys=C_KV, values=C_KV),
    "latent keys": LayerLayout(kv_heads=K, head_dim=H, keys=C_K),
    "latent values": LayerLayout(
        kv_heads=K, head_dim=H, values=Segment(name="c_v", offset=0, rank=3)
    ),
    # 64 columns are no more than 2 · 4 · 10: values are absorbed beside latent keys.
    "absorbed beside latent keys": LayerLayout(kv_heads=4, head_dim=H, keys=C_K, values=C_V),
}


def rotary(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies())[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def frequencies() -> np.ndarray:
    return (50.0 ** -(np.arange(H // 2) / (H // 2))).astype(np.float32)


@dataclass(frozen=True)
class Model:
    """Random factors, latents of one sequence, and what follows from them in float64."""

    layout: LayerLayout
    seed: int = 0

    @property
    def kv_heads(self) -> int:
        return self.layout.kv_heads

    @property
    def heads(self) -> int:
        return 3 * self.kv_heads

    def random(self, what: int, *shape: int) -> np.ndarray:
        return np.random.default_rng([self.seed, what]).standard_normal(shape).astype(np.float32)

    def factors(self) -> dict[str, np.ndarray]:
        """The same for all sequences."""
        whole, rows = replace(self, seed=0), self.kv_heads * H
        return {
            "u_k": whole.random(1, rows, 5),
            "b_k": whole.random(2, rows),
            "norm": whole.random(3, H),
            "u_v": whole.random(4, rows, self.rank_v),
            "b_v": whole.random(5, rows),
        }

    @property
    def rank_v(self) -> int:
        return 3 if self.layout.values is None else self.layout.values.rank

    def sequence(self) -> tuple[np.ndarray, ...]:
        """q [T, N, H], c_k [T, 5], c_v [T, Rv], k and v [T, K, H]."""
        f = {name: part.astype(np.float64) for name, part in self.factors().items()}
        q = self.random(6, TOKENS, self.heads, H)
        c_k = self.random(7, TOKENS, 5)
        shared = self.layout.keys is not None and self.layout.keys == self.layout.values
        c_v = c_k if shared else self.random(8, TOKENS, self.rank_v)
        k = (c_k @ f["u_k"].T + f["b_k"]).reshape(TOKENS, self.kv_heads, H)
        k = k / np.sqrt((k**2).mean(axis=-1, keepdims=True) + EPS) * f["norm"]
        turns = np.exp(1j * np.arange(TOKENS)[:, None] * frequencies()[None, :])[:, None]
        turned = (k[..., : H // 2] + 1j * k[..., H // 2 :]) * turns
        k = np.concatenate([turned.real, turned.imag], axis=-1)
        v = (c_v @ f["u_v"].T + f["b_v"]).reshape(TOKENS, self.kv_heads, H)
        return q, c_k, c_v, k, v

    def attended(self, window: int | None) -> np.ndarray:
        """[T, N, H] in float64."""
        q, _, _, k, v = self.sequence()
        out = np.zeros(q.shape)
        for t in range(TOKENS):
            first = 0 if window is None else max(0, t + 1 - window)
            for n in range(self.heads):
                head = n // 3
                scores = np.exp(SCALE * (k[first : t + 1, head] @ q[t, n]))
                out[t, n] = scores @ v[first : t + 1, head] / scores.sum()
        return out

    def entries(self, at: Any) -> tuple[Any, Cacheable, Cacheable]:
        """q, keys and values of the tokens ``at``, as an attention layer hands them over; a form
        that is not cached is NaN, so that using it shows."""
        q, c_k, c_v, k, v = (jnp.asarray(part[at], jnp.float32) for part in self.sequence())
        f = {name: jnp.asarray(part) for name, part in self.factors().items()}
        keys = Rebuild(f["u_k"], f["b_k"], f["norm"], self.kv_heads, EPS, rotary)
        values = Rebuild(f["u_v"], f["b_v"], None, self.kv_heads)

        def entry(segment: Segment | None, full: Any, latent: Any, rebuild: Rebuild) -> Cacheable:
            if segment is None:
                return Cacheable(full=full, latent=latent * jnp.nan, rebuild=rebuild)
            return Cacheable(full=full * jnp.nan, latent=latent, rebuild=rebuild)

        return (
            q,
            entry(self.layout.keys, k, c_k, keys),
            entry(self.layout.values, v, c_v, values),
        )

    def garbage(self, value: float = np.nan) -> LayerPool:
        pool = empty_pool(self.layout, PAGES, S, jnp.float32)
        return jax.tree.map(lambda part: jnp.full_like(part, value), pool)


@partial(jax.jit, static_argnames="window")
def attend(view, pool, q, keys, values, window):
    return view.attend(pool, q, keys, values, scale=SCALE, window=window)


def prefill(model: Model, pool: LayerPool, pages: list[int], start: int, end: int, window=None):
    """Tokens start … end − 1 in a chunk of 32."""
    table = jnp.asarray([*pages, *[0] * (5 - len(pages))], jnp.int32)
    at = np.minimum(np.arange(start, start + 32), TOKENS - 1)
    view = PrefillView(table, jnp.int32(start), jnp.int32(end - start))
    out, pool = attend(view, pool, *model.entries(at), window)
    return np.asarray(out)[: end - start], pool


def stacked(models: list[Model], lengths: list[int]) -> tuple[Any, Any, Any]:
    """One token of each sequence."""
    rows = [model.entries(np.array([at])) for model, at in zip(models, lengths, strict=True)]

    def entry(index: int) -> Cacheable:
        return Cacheable(
            full=jnp.concatenate([row[index].full for row in rows]),
            latent=jnp.concatenate([row[index].latent for row in rows]),
            rebuild=rows[0][index].rebuild,
        )

    return jnp.concatenate([row[0] for row in rows]), entry(1), entry(2)


def decode(
    models: list[Model],
    pool: LayerPool,
    tables: list[list[int]],
    lengths: list[int],
    *,
    active: tuple[bool, ...] = (True, True),
    window: int | None = None,
    sizes: tuple[int, ...] = (8,),
):
    preparation = prepare(tables, page_size=S, rows=2, entries=4, sizes=sizes)
    padded = [[*pages, *[0] * (4 - len(pages))] for pages in tables]
    view = DecodeView(
        jnp.asarray(padded, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(active),
        preparation if models[0].layout.keys is not None else None,
    )
    out, pool = attend(view, pool, *stacked(models, lengths), window)
    return np.asarray(out), pool


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> LayerLayout:
    return LAYOUTS[request.param]


@pytest.fixture
def model(layout: LayerLayout) -> Model:
    return Model(layout)


class TestPrefill:
    @pytest.mark.parametrize("window", [None, 1, 7])
    def test_chunks(self, model: Model, window: int | None) -> None:
        pool, outs = model.garbage(), []
        for start, end in ((0, 16), (16, 29), (29, TOKENS)):
            out, pool = prefill(model, pool, [4, 1, 6], start, end, window)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs), model.attended(window), atol=2e-5)

    def test_writes_latents_and_zeros_beside_them(self, model: Model) -> None:
        _, pool = prefill(model, model.garbage(), [4, 1], 0, 21)
        _, c_k, c_v, k, v = model.sequence()
        for t in range(21):
            page, place = (4, 1)[t // S], t % S
            for segment, latent in ((model.layout.keys, c_k), (model.layout.values, c_v)):
                if segment is not None:
                    row = np.asarray(pool.latent[page, place, segment.offset :][: segment.width])
                    np.testing.assert_array_equal(row[: segment.rank], latent[t])
                    assert not row[segment.rank :].any()
            full = [
                part[t]
                for part, segment in ((k, model.layout.keys), (v, model.layout.values))
                if segment is None
            ]
            if full:
                found = np.asarray(pool.full[page, :, :, place])
                np.testing.assert_allclose(found, np.stack(full), atol=1e-6)

    def test_writes_nothing_else(self, model: Model) -> None:
        _, pool = prefill(model, model.garbage(7.0), [4, 1], 0, 21)
        untouched = [0, 2, 3, 5, 6, 7, 8]
        for part in jax.tree.leaves(pool):
            assert (np.asarray(part)[untouched] == 7.0).all()
        if pool.latent is not None:
            assert (np.asarray(pool.latent)[1, 5:] == 7.0).all()
        if pool.full is not None:
            assert (np.asarray(pool.full)[1, :, :, 5:] == 7.0).all()


class TestDecode:
    TABLES = [[5, 0, 8], [7, 2]]
    LENGTHS = [34, 20]

    def prefilled(self, layout: LayerLayout, value: float = np.nan):
        models = [Model(layout, seed=seed) for seed in (1, 2)]
        pool = models[0].garbage(value)
        for model, pages, length in zip(models, self.TABLES, self.LENGTHS, strict=True):
            for start in range(0, length, 32):
                _, pool = prefill(model, pool, pages, start, min(start + 32, length))
        return models, pool

    def expected(self, models: list[Model], lengths: list[int], window=None) -> np.ndarray:
        return np.stack(
            [model.attended(window)[at] for model, at in zip(models, lengths, strict=True)]
        )

    @pytest.mark.parametrize("window", [None, 1, 7, 20])
    def test_attends_to_the_own_sequence_and_itself(self, layout, window: int | None) -> None:
        models, pool = self.prefilled(layout)
        out, _ = decode(models, pool, self.TABLES, self.LENGTHS, window=window)
        np.testing.assert_allclose(out, self.expected(models, self.LENGTHS, window), atol=2e-5)

    def test_steps_within_and_beyond_a_page(self, layout) -> None:
        models, pool = self.prefilled(layout)
        for step in range(11):
            lengths = [34 + step, 20 + step]
            out, pool = decode(models, pool, self.TABLES, lengths)
            np.testing.assert_allclose(out, self.expected(models, lengths), atol=2e-5)

    @pytest.mark.parametrize("size", [5, 6, 13])
    def test_size_of_the_buffer_makes_no_difference(self, layout, size: int) -> None:
        models, pool = self.prefilled(layout)
        out, _ = decode(models, pool, self.TABLES, self.LENGTHS, sizes=(size,))
        np.testing.assert_allclose(out, self.expected(models, self.LENGTHS), atol=2e-5)

    def test_inactive_rows_give_zeros_and_write_nothing(self, layout) -> None:
        models, before = self.prefilled(layout, 7.0)
        out, after = decode(models, before, self.TABLES, self.LENGTHS, active=(False, False))
        assert not out.any()
        for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_broken_neighbour_does_not_leak(self, layout, value: float) -> None:
        models, pool = self.prefilled(layout)
        clean, _ = decode(models, pool, self.TABLES, self.LENGTHS)
        broken = jax.tree.map(lambda part: part.at[jnp.array([5, 0, 8])].set(value), pool)
        out, _ = decode(models, broken, self.TABLES, self.LENGTHS)
        np.testing.assert_array_equal(out[1], clean[1])
        assert not np.isfinite(out[0]).all()

    def test_a_shared_prefix(self, layout) -> None:
        # Two rows of one sequence that share its first page and own a copy of the second.
        model = Model(layout, seed=1)
        _, pool = prefill(model, model.garbage(), [5, 0], 0, 20)
        pool = jax.tree.map(lambda part: part.at[3].set(part[0]), pool)
        out, _ = decode([model, model], pool, [[5, 0], [5, 3]], [20, 20])
        np.testing.assert_allclose(out, self.expected([model, model], [20, 20]), atol=2e-5)


def test_half_precision_latents_are_rounded_once(layout: LayerLayout) -> None:
    # What decode reads is what prefill read: the pool's own numbers.
    model = Model(layout)
    pool = jax.tree.map(lambda part: part.astype(jnp.bfloat16), model.garbage(0.0))
    q, keys, values = jax.tree.map(
        lambda part: part.astype(jnp.bfloat16), model.entries(np.arange(32))
    )
    view = PrefillView(jnp.asarray([4, 1], jnp.int32), jnp.int32(0), jnp.int32(32))
    out, pool = attend(view, pool, q, keys, values, None)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out, np.float32), model.attended(None)[:32], atol=0.2
    )  # of values up to 8
    if pool.latent is not None and layout.keys is not None:
        stored = np.asarray(pool.latent[4, :, :5], np.float32)
        expected = np.asarray(keys.latent[:16], np.float32)
        np.testing.assert_array_equal(stored, expected)
