"""Reductions over words that are split over devices, against numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from deinfer_jax.parallel.vocabulary import (
    WHOLE,
    Vocabulary,
    most_likely,
    ordered_bits,
    value_of_bits,
)

DEVICES = pytest.mark.parametrize("devices", [None, 1, 2, 3, 4, 8])
WORDS, ROWS, COUNT = 29, 6, 9
SHARDED, WHOLE_ARRAY = PartitionSpec(None, "tp"), PartitionSpec()


def padded(x: np.ndarray, devices: int) -> np.ndarray:
    more = -x.shape[1] % devices
    return np.pad(x, ((0, 0), (0, more)), constant_values=-np.inf)


def reductions(x: jax.Array, words: jax.Array, vocabulary: Vocabulary) -> dict[str, Any]:
    largest, word = vocabulary.largest(x)
    best, values = vocabulary.best(x, min(COUNT, vocabulary.words(x.shape[1])))
    finite = jnp.where(jnp.isneginf(x), 0.0, x)
    return dict(
        max=largest[:, 0],
        argmax=word,
        sums=vocabulary.sum(finite.sum(axis=1), (finite**2).sum(axis=1)),
        logsumexp=vocabulary.logsumexp(x),
        take=vocabulary.take(x, words),
        best=best,
        values=values,
    )


@cache
def program(devices: int | None, size: int) -> Any:
    if devices is None:
        return jax.jit(lambda x, words: reductions(x, words, WHOLE))
    vocabulary = Vocabulary(size=size, axis="tp")
    return on_devices(lambda x, words: reductions(x, words, vocabulary), devices)


def on_devices(function: Any, devices: int, out: PartitionSpec = WHOLE_ARRAY) -> Any:
    mesh = jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])
    specs = (SHARDED, WHOLE_ARRAY)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


def reduce(x: np.ndarray, words: np.ndarray, devices: int | None) -> dict[str, Any]:
    found = program(devices, x.shape[1])(padded(x, devices or 1), jnp.asarray(words, jnp.int32))
    return jax.tree.map(np.asarray, found)


def random(words: int = WORDS, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((ROWS, words))).astype(np.float32)


@DEVICES
class TestReductions:
    @pytest.mark.parametrize("words", [WORDS, 5])
    @pytest.mark.parametrize("equals", [False, True], ids=["distinct", "equals"])
    def test_against_numpy(self, equals: bool, words: int, devices: int | None) -> None:
        x = np.round(random(words)) + np.float32(0) if equals else random(words)
        x[1, :3] = -np.inf
        asked = np.arange(ROWS) * 7 % words
        found = reduce(x, asked, devices)
        np.testing.assert_array_equal(found["max"], x.max(axis=1))
        np.testing.assert_array_equal(found["argmax"], x.argmax(axis=1))
        np.testing.assert_array_equal(found["take"][:, 0], x[np.arange(ROWS), asked])
        order = np.argsort(-x, axis=1, kind="stable")[:, :COUNT]
        np.testing.assert_array_equal(found["best"], order)
        np.testing.assert_array_equal(found["values"], np.take_along_axis(x, order, axis=1))
        x = x.astype(np.float64)
        expected = np.log(np.exp(x).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found["logsumexp"], expected, rtol=1e-6, atol=1e-6)
        finite = np.where(np.isneginf(x), 0, x)
        for total, power in zip(found["sums"], (1, 2), strict=True):
            np.testing.assert_allclose(total, (finite**power).sum(axis=1), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("words", [WORDS, 5])  # 5: some devices have padding alone
    def test_far_from_zero(self, words: int, devices: int | None) -> None:
        x = random(words) + np.float32(-1000)
        x[3:] += 2000
        found = reduce(x, np.zeros(ROWS), devices)["logsumexp"]
        high = x.max(axis=1, keepdims=True).astype(np.float64)
        expected = high + np.log(np.exp(x - high).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found, expected, rtol=2e-7)

    def test_nothing_but_minus_infinity(self, devices: int | None) -> None:
        x = random()
        x[2] = -np.inf
        found = reduce(x, np.zeros(ROWS), devices)
        for name in ("max", "logsumexp", "take"):
            assert np.isneginf(found[name][2]).all(), name
        assert found["argmax"][2] == 0
        assert found["best"][2].tolist() == list(range(COUNT))  # and no padding

    @pytest.mark.parametrize("place", [0, 3, 14, 15, 28])
    def test_a_nan_is_seen_wherever_it_stands(self, place: int, devices: int | None) -> None:
        x = random()
        x[1, place] = np.nan
        found = reduce(x, np.full(ROWS, place), devices)
        for name in ("max", "logsumexp", "take"):
            nan = np.isnan(found[name]).reshape(ROWS)
            assert nan.tolist() == [row == 1 for row in range(ROWS)], name
        assert found["argmax"][1] == place

    def test_plus_infinity(self, devices: int | None) -> None:
        x = random()
        x[1, 20] = np.inf
        found = reduce(x, np.zeros(ROWS), devices)
        assert found["argmax"][1] == 20
        assert np.isposinf([found["max"][1], found["logsumexp"][1, 0]]).all()


def test_a_nan_of_a_large_vocabulary_is_seen() -> None:
    x = np.zeros((2, 20_000), np.float32)
    x[1, 15_000] = np.nan
    split = on_devices(lambda x, _: Vocabulary(axis="tp").largest(x)[0], 2)
    whole = jax.jit(lambda x, _: WHOLE.largest(x)[0])
    for largest in (split, whole):
        found = largest(x, jnp.zeros(2, jnp.int32))
        assert np.isnan(np.asarray(found)[:, 0]).tolist() == [False, True]


class TestWords:
    def test_numbers_go_on_from_device_to_device(self) -> None:
        def numbers(x: jax.Array, _: jax.Array) -> jax.Array:
            return Vocabulary(size=WORDS, axis="tp").numbers(x.shape[1])[None]

        found = on_devices(numbers, 4, SHARDED)(padded(random(), 4), jnp.zeros(1, jnp.int32))
        assert np.asarray(found).tolist() == [list(range(32))]

    def test_one_device(self) -> None:
        assert WHOLE.numbers(5).tolist() == [0, 1, 2, 3, 4]
        assert WHOLE.words(5) == 5

    @pytest.mark.parametrize("size, words", [(None, 32), (29, 29)])
    def test_number_of_words(self, size: int | None, words: int) -> None:
        def check(x: jax.Array, _: jax.Array) -> jax.Array:
            assert Vocabulary(size=size, axis="tp").words(x.shape[1]) == words
            return jnp.zeros(())

        on_devices(check, 4)(padded(random(), 4), jnp.zeros(1, jnp.int32))

    def test_no_room_for_all_words(self) -> None:
        with pytest.raises(AssertionError, match="9 words in 5 columns"):
            Vocabulary(size=9).words(5)

    def test_is_static(self) -> None:
        assert hash(Vocabulary(size=3, axis="tp")) == hash(Vocabulary(size=3, axis="tp"))


# Elements a row that a device ends up with, as the class's docstring states them.
MOVED: dict[str, tuple[Any, list[int]]] = dict(
    largest=(lambda v, x, words: v.largest(x)[1], [8]),
    sum=(lambda v, x, words: v.sum(x.sum(axis=1), x.max(axis=1)), [2]),
    logsumexp=(lambda v, x, words: v.logsumexp(x), [8]),
    take=(lambda v, x, words: v.take(x, words), [4]),
    best=(lambda v, x, words: v.best(x, 5), [40]),
    best_of_all=(lambda v, x, words: v.best(x, 20), [64]),
    gather=(
        lambda v, x, words: v.gather(x, v.numbers(8)[None] + jnp.zeros((ROWS, 1), jnp.uint32)),
        [64],
    ),
)


@pytest.mark.parametrize("name", MOVED)
def test_elements_moved(name: str) -> None:
    reduction, expected = MOVED[name]
    vocabulary = Vocabulary(size=WORDS, axis="tp")
    function = on_devices(lambda x, words: reduction(vocabulary, x, words), 4)
    traced = function.trace(padded(random(), 4), jnp.zeros(ROWS, jnp.int32))

    def moved(jaxpr: Any) -> list[int]:
        found = []
        for equation in jaxpr.eqns:
            if equation.primitive.name.startswith(("all_gather", "psum", "pmax", "ppermute")):
                found += [out.aval.size // ROWS for out in equation.outvars]
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                found += moved(inner) if hasattr(inner, "eqns") else []
        return found

    assert moved(traced.jaxpr) == expected


class TestOneDevice:
    def test_nothing_is_gathered(self) -> None:
        parts = jnp.ones((2, 3)), jnp.zeros((2, 1), jnp.int32)
        assert all(a is b for a, b in zip(WHOLE.gather(*parts), parts, strict=True))
        assert WHOLE.sum(parts[0][:, 0])[0].tolist() == [1.0, 1.0]

    def test_bits_and_back(self) -> None:
        tiny = np.finfo(np.float32).tiny
        values = np.array([-np.inf, -3e38, -1, -tiny, -0.0, 0, tiny, 1, 3e38, np.inf], np.float32)
        order = ordered_bits(jnp.asarray(values))
        assert (np.diff(np.asarray(order).astype(np.int64)) > 0).all() and (order > 0).all()
        back = np.asarray(value_of_bits(order))
        np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))

    def test_most_likely_of_all(self) -> None:
        assert most_likely(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 4).tolist() == [[1, 2, 3, 0]]
