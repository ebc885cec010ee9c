"""The sampler against transformers' logits processors, softmax and numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.engine import sampler
from deinfer_jax.engine.sampler import (
    NOT_A_NUMBER,
    SamplingParams,
    filter_words,
    gumbel_noise,
    request_key,
    sample,
)
from deinfer_jax.parallel.vocabulary import most_likely, ordered_bits

WORDS = 53
jitted_filter = jax.jit(filter_words)
jitted_sample = jax.jit(sample)
jitted_noise = jax.jit(gumbel_noise)


def params(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    wants_logprobs: bool = False,
) -> SamplingParams:
    return SamplingParams(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_k=jnp.full(rows, top_k, jnp.int32),
        top_p=jnp.full(rows, top_p, jnp.float32),
        min_p=jnp.full(rows, min_p, jnp.float32),
        wants_logprobs=jnp.full(rows, wants_logprobs),
    )


def random_logits(rows: int, words: int = WORDS, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Distinct values in a row, so that nothing depends on how ties are broken."""
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((rows, words))).astype(np.float32)
    assert all(len(set(row)) == words for row in logits)
    return logits


def keys(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def draw(
    logits: np.ndarray, row_keys: np.ndarray, positions: np.ndarray, how: SamplingParams
) -> np.ndarray:
    return np.asarray(
        jitted_sample(
            jnp.asarray(logits), jnp.asarray(row_keys), jnp.asarray(positions, jnp.int32), how
        )
    )


def noise(row_keys: np.ndarray, positions: list[int], words: np.ndarray) -> np.ndarray:
    return np.asarray(
        jitted_noise(
            jnp.asarray(row_keys),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(words, jnp.uint32),
        )
    )


class TestFilters:
    @pytest.mark.parametrize(
        "setting",
        [
            dict(top_k=1),
            dict(top_k=5),
            dict(top_k=WORDS),
            dict(top_k=WORDS + 100),
            dict(top_p=0.01),
            dict(top_p=1e-7),
            dict(top_p=0.5),
            dict(top_p=0.9),
            dict(top_p=0.999),
            dict(min_p=0.02),
            dict(min_p=0.3),
            dict(top_k=20, top_p=0.7),
            dict(top_k=20, min_p=0.05),
            dict(top_p=0.8, min_p=0.1),
            dict(top_k=30, top_p=0.95, min_p=0.01),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
    def test_against_transformers(self, setting: dict, scale: float) -> None:
        torch = pytest.importorskip("torch")
        from transformers.generation.logits_process import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList()
        for name, warper in (
            ("top_k", TopKLogitsWarper),
            ("top_p", TopPLogitsWarper),
            ("min_p", MinPLogitsWarper),
        ):
            if name in setting:
                warpers.append(warper(setting[name]))
        logits = random_logits(200, scale=scale)
        # In float64, so that theirs is exact where the mass comes close to p.
        scores = torch.from_numpy(logits.astype(np.float64))
        theirs = torch.isfinite(warpers(None, scores)).numpy()  # pyright: ignore[reportArgumentType]
        ours = np.asarray(jitted_filter(jnp.asarray(logits), params(200, **setting)))
        np.testing.assert_array_equal(ours, theirs)

    def test_off_keeps_everything(self) -> None:
        assert np.asarray(jitted_filter(jnp.asarray(random_logits(9)), params(9))).all()

    def test_settings_by_row(self) -> None:
        logits = jnp.asarray(random_logits(4))
        mixed = SamplingParams(
            temperature=jnp.ones(4, jnp.float32),
            top_k=jnp.array([0, 3, 0, 0], jnp.int32),
            top_p=jnp.array([1, 1, 0.3, 1], jnp.float32),
            min_p=jnp.array([0, 0, 0, 0.2], jnp.float32),
            wants_logprobs=jnp.zeros(4, bool),
        )
        ours = np.asarray(jitted_filter(logits, mixed))
        settings: list[Any] = [dict(), dict(top_k=3), dict(top_p=0.3), dict(min_p=0.2)]
        for row, setting in enumerate(settings):
            alone = jitted_filter(logits[row : row + 1], params(1, **setting))
            np.testing.assert_array_equal(ours[row], np.asarray(alone)[0])

    def test_words_that_tie_with_the_last_are_kept(self) -> None:
        logits = jnp.array([[3.0, 1.0, 2.0, 2.0, 2.0]])
        assert np.asarray(filter_words(logits, params(1, top_k=2))).tolist() == [
            [True, False, True, True, True]
        ]

    def test_all_words_equal(self) -> None:
        assert np.asarray(filter_words(jnp.zeros((1, 7)), params(1, top_p=0.5))).all()

    def test_impossible_words_are_not_among_the_top(self) -> None:
        logits = jnp.array([[-jnp.inf, 1.0, 0.5, -jnp.inf]])
        kept = np.asarray(filter_words(logits, params(1, top_k=2)))
        assert kept.tolist() == [[False, True, True, False]]

    def test_negative_logits(self) -> None:
        logits = jnp.array([[-5.0, -1.0, -3.0, -0.5]])
        kept = np.asarray(filter_words(logits, params(1, top_k=2)))
        assert kept.tolist() == [[False, True, False, True]]

    def test_a_vocabulary_of_one_word(self) -> None:
        assert np.asarray(filter_words(jnp.zeros((1, 1)), params(1, top_k=1, top_p=0.1))).all()


class TestOrderedBits:
    def test_order_of_floats(self) -> None:
        tiny = float(np.finfo(np.float32).tiny)
        values = [-np.inf, -3e38, -1.5, -1.0, -tiny, 0.0, tiny, 0.3, 1.0, 3e38, np.inf]
        bits = np.asarray(ordered_bits(jnp.asarray(values, jnp.float32)))
        assert (np.diff(bits.astype(np.int64)) > 0).all()

    def test_equal_values_have_equal_bits(self) -> None:
        bits = np.asarray(ordered_bits(jnp.array([1.5, -2.0, 1.5, -2.0])))
        assert bits[0] == bits[2] and bits[1] == bits[3]


class TestWithoutLoops:
    """What runs on GPUs, whose graphs hold neither loops nor sorting."""

    @pytest.fixture
    def unrolled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def other_platform(*operands: Any, cpu: Any, default: Any) -> Any:
            return default(*operands)

        monkeypatch.setattr(sampler.jax.lax, "platform_dependent", other_platform)

    @pytest.mark.parametrize("scale", [0.0, 0.01, 2.0, 100.0])
    @pytest.mark.parametrize(
        "setting", [dict(top_k=7), dict(top_p=0.6), dict(top_k=20, top_p=0.9, min_p=0.01)], ids=str
    )
    def test_filters_are_the_same(self, setting: dict, scale: float, request) -> None:
        logits = jnp.asarray(random_logits(8) * np.float32(scale))
        expected = np.asarray(filter_words(logits, params(8, **setting)))
        request.getfixturevalue("unrolled")
        found = np.asarray(filter_words(logits, params(8, **setting)))
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("count", [1, 20, WORDS])
    def test_most_likely_words_are_the_same(self, count: int, unrolled: None) -> None:
        logits = random_logits(8)
        logits[1] = np.round(logits[1])  # many equal ones
        logits[2] = 0.0
        logits[3, 4:] = -np.inf
        logits[4] = -np.abs(logits[4])
        found = np.asarray(most_likely(jnp.asarray(logits), count))
        expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(found, expected)

    def test_a_program_for_a_gpu_neither_loops_nor_sorts(self) -> None:
        arguments = (jnp.zeros((4, WORDS)), jnp.zeros((4, 2), jnp.uint32), jnp.zeros(4, jnp.int32))
        traced = jax.jit(sampler.draw).trace(*arguments, params(4))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        for op in ("stablehlo.while", "stablehlo.sort", "top_k", "custom_call"):
            assert op not in text, op
        assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text()


class TestNoise:
    def test_a_word_does_not_depend_on_which_words_are_asked(self) -> None:
        everything = noise(keys(3), [4, 5, 6], np.arange(WORDS))
        shard = noise(keys(3), [4, 5, 6], np.arange(20, 41))
        np.testing.assert_array_equal(shard, everything[:, 20:41])

    def test_a_word_does_not_depend_on_the_order(self) -> None:
        order = np.random.default_rng(0).permutation(WORDS)
        shuffled = noise(keys(2), [1, 2], order)
        np.testing.assert_array_equal(shuffled, noise(keys(2), [1, 2], np.arange(WORDS))[:, order])

    def test_a_row_does_not_depend_on_the_batch(self) -> None:
        many = noise(keys(5), [3, 1, 4, 1, 5], np.arange(WORDS))
        one = noise(keys(5)[2:3], [4], np.arange(WORDS))
        np.testing.assert_array_equal(one[0], many[2])

    def test_a_padded_vocabulary_has_the_same_noise(self) -> None:
        longer = noise(keys(1), [3], np.arange(WORDS + 11))
        np.testing.assert_array_equal(longer[:, :WORDS], noise(keys(1), [3], np.arange(WORDS)))

    def test_positions_differ(self) -> None:
        same_key = np.repeat(keys(1), 2, axis=0)
        first, second = noise(same_key, [3, 4], np.arange(WORDS))
        assert (first == second).sum() <= 1

    def test_keys_differ(self) -> None:
        first, second = noise(keys(2), [3, 3], np.arange(WORDS))
        assert (first == second).sum() <= 1

    def test_words_differ(self) -> None:
        assert len(np.unique(noise(keys(1), [3], np.arange(2000)))) > 1990

    def test_large_word_numbers(self) -> None:
        found = noise(keys(1), [3], np.array([0, 2**17, 2**31, 2**32 - 1]))
        assert len(np.unique(found)) == 4

    def test_distribution_is_gumbel(self) -> None:
        found = np.sort(noise(keys(1), [0], np.arange(40_000))[0].astype(np.float64))
        uniform = np.exp(-np.exp(-found))
        distance = np.abs(uniform - (np.arange(len(found)) + 0.5) / len(found)).max()
        assert distance < 1.95 / np.sqrt(len(found))  # Kolmogorov–Smirnov, p = 0.001

    def test_finite(self) -> None:
        assert np.isfinite(noise(keys(8), list(range(8)), np.arange(20_000))).all()


class TestRequestKey:
    def test_every_word_counts(self) -> None:
        base = np.array([1, 2, 3, 4, 5], np.uint32)
        found = {tuple(np.asarray(request_key(jnp.asarray(base))).tolist())}
        for index in range(5):
            changed = base.copy()
            changed[index] += 1
            found.add(tuple(np.asarray(request_key(jnp.asarray(changed))).tolist()))
        assert len(found) == 6

    def test_order_of_words_counts(self) -> None:
        there = request_key(jnp.array([1, 2, 3, 4, 5], jnp.uint32))
        back = request_key(jnp.array([1, 2, 4, 3, 5], jnp.uint32))
        assert np.asarray(there).tolist() != np.asarray(back).tolist()

    def test_same_words_same_key(self) -> None:
        words = jnp.array([1, 2, 3, 4, 5], jnp.uint32)
        np.testing.assert_array_equal(
            np.asarray(request_key(words)), np.asarray(request_key(words))
        )


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Statistic over words expected at least five times, in units of its standard deviation."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    statistic = ((counts - expected) ** 2 / np.where(common, expected, 1))[common].sum()
    degrees = common.sum() - 1
    return (statistic - degrees) / np.sqrt(2 * degrees)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def many_draws(logits: np.ndarray, rows: int = 20_000, **setting: Any) -> np.ndarray:
    """Counts of words drawn by one request at ``rows`` positions."""
    tiled = np.tile(logits, (rows, 1))
    same_key = np.repeat(keys(1, seed=5), rows, axis=0)
    drawn = draw(tiled, same_key, np.arange(rows), params(rows, **setting))
    return np.bincount(drawn, minlength=len(logits))


class TestDistribution:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_follows_softmax(self, temperature: float) -> None:
        logits = random_logits(1, 31)[0]
        counts = many_draws(logits, temperature=temperature)
        assert abs(chi_square(counts, softmax(logits / temperature))) < 4

    def test_follows_what_the_filters_leave(self) -> None:
        logits = random_logits(1, 31)[0]
        kept = np.argsort(logits)[-6:]
        expected = np.zeros(31)
        expected[kept] = softmax(logits[kept])
        counts = many_draws(logits, top_k=6)
        assert counts[expected == 0].sum() == 0
        assert abs(chi_square(counts[kept], expected[kept])) < 4

    def test_different_requests_draw_independently(self) -> None:
        logits = np.zeros((20_000, 7), np.float32)
        drawn = draw(logits, keys(20_000), np.zeros(20_000), params(20_000))
        assert abs(chi_square(np.bincount(drawn, minlength=7), np.full(7, 1 / 7))) < 4

    def test_successive_positions_are_independent(self) -> None:
        drawn = draw(
            np.zeros((20_000, 5), np.float32),
            np.repeat(keys(1), 20_000, axis=0),
            np.arange(20_000),
            params(20_000),
        )
        pairs = np.bincount(drawn[:-1] * 5 + drawn[1:], minlength=25)
        assert abs(chi_square(pairs, np.full(25, 1 / 25))) < 4


class TestSample:
    def test_temperature_zero_is_argmax(self) -> None:
        logits = random_logits(40)
        drawn = draw(logits, keys(40), np.arange(40), params(40, temperature=0.0))
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1))

    @pytest.mark.parametrize(
        "setting",
        [dict(top_k=1), dict(top_p=1e-6), dict(top_p=1e-38), dict(top_p=1e-46), dict(min_p=1.0)],
        ids=str,
    )
    def test_filters_that_leave_one_word(self, setting: dict) -> None:
        logits = random_logits(40)
        drawn = draw(logits, keys(40), np.arange(40), params(40, temperature=5.0, **setting))
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1))

    @pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-37, 1e-40])
    def test_temperatures_near_zero_are_greedy(self, temperature: float) -> None:
        logits = random_logits(40, scale=20.0)
        drawn = draw(logits, keys(40), np.arange(40), params(40, temperature=temperature))
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1))

    def test_a_very_high_temperature_is_uniform(self) -> None:
        counts = many_draws(random_logits(1, 7)[0], temperature=1e6)
        assert abs(chi_square(counts, np.full(7, 1 / 7))) < 4

    def test_greedy_rows_beside_sampled_ones(self) -> None:
        logits = random_logits(6)
        mixed = params(6)
        mixed = mixed.replace(temperature=jnp.array([0, 1, 0, 2, 0, 1], jnp.float32))  # pyright: ignore[reportAttributeAccessIssue]
        drawn = draw(logits, keys(6), np.arange(6), mixed)
        np.testing.assert_array_equal(drawn[[0, 2, 4]], logits.argmax(axis=1)[[0, 2, 4]])

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        logits, row_keys, positions = random_logits(9), keys(9), np.arange(9)
        many = draw(logits, row_keys, positions, params(9))
        for row in (0, 4, 8):
            one = slice(row, row + 1)
            alone = draw(logits[one], row_keys[one], positions[one], params(1))
            assert alone[0] == many[row]

    def test_a_row_does_not_depend_on_filters_of_others(self) -> None:
        logits, row_keys, positions = random_logits(5), keys(5), np.arange(5)
        plain = draw(logits, row_keys, positions, params(5))
        filtered = params(5).replace(top_k=jnp.array([0, 0, 2, 0, 0], jnp.int32))  # pyright: ignore[reportAttributeAccessIssue]
        drawn = draw(logits, row_keys, positions, filtered)
        others = [0, 1, 3, 4]
        np.testing.assert_array_equal(drawn[others], plain[others])

    def test_order_of_rows(self) -> None:
        logits, row_keys, positions = random_logits(9), keys(9), np.arange(9)
        order = np.random.default_rng(1).permutation(9)
        shuffled = draw(logits[order], row_keys[order], positions[order], params(9))
        np.testing.assert_array_equal(shuffled, draw(logits, row_keys, positions, params(9))[order])

    def test_impossible_words_are_never_drawn(self) -> None:
        logits = np.full(7, -np.inf, np.float32)
        logits[3] = 0.0
        counts = many_draws(logits, rows=200, temperature=1.0)
        assert counts[3] == 200

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "bad",
        [dict(at=slice(3, 4), value=np.nan), dict(at=slice(17, 18), value=np.inf)]
        + [dict(at=slice(None), value=-np.inf), dict(at=slice(None), value=np.nan)],
        ids=["one nan", "one inf", "all minus inf", "all nan"],
    )
    def test_rows_that_are_not_numbers(self, temperature: float, bad: dict) -> None:
        logits = random_logits(3)
        logits[1, bad["at"]] = bad["value"]
        drawn = draw(logits, keys(3), np.arange(3), params(3, temperature=temperature))
        assert drawn[1] == NOT_A_NUMBER

    @pytest.mark.parametrize("place", range(0, WORDS, 4))
    def test_a_nan_is_found_wherever_it_stands(self, place: int) -> None:
        logits = random_logits(2)
        logits[1, place] = np.nan
        drawn = draw(logits, keys(2), np.arange(2), params(2, temperature=0.0))
        assert drawn[1] == NOT_A_NUMBER

    @pytest.mark.parametrize("setting", [dict(temperature=0.0), dict(), dict(top_p=0.5)], ids=str)
    def test_broken_rows_do_not_touch_their_neighbours(self, setting: dict) -> None:
        logits = random_logits(3)
        well = draw(logits, keys(3), np.arange(3), params(3, **setting))
        logits[1] = np.nan
        broken = draw(logits, keys(3), np.arange(3), params(3, **setting))
        np.testing.assert_array_equal(broken[[0, 2]], well[[0, 2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number_in_a_large_vocabulary_is_seen(temperature: float) -> None:
    """XLA's maximum over more than some 4,000 numbers loses a NaN on a CPU."""
    logits = np.tile(np.linspace(-3, 3, 20_000, dtype=np.float32), (2, 1))
    logits[1, 15_000] = np.nan
    drawn = draw(logits, keys(2), np.zeros(2), params(2, temperature=temperature))
    assert drawn[0] != NOT_A_NUMBER == drawn[1]
