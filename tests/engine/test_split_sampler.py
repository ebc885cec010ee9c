"""Sampling where the words are split over devices, against the sampler on one device."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from deinfer_jax.engine import filters, sampler
from deinfer_jax.engine.sampler import MOST_LOGPROBS, NOT_A_NUMBER, Drawn, SamplingParams
from deinfer_jax.parallel.vocabulary import Vocabulary

DEVICES = [1, 2, 3, 4, 8]
WORDS = 331  # more than the candidates of 8 devices
SMALL = [(8, 5), (4, 61)]  # fewer than devices, fewer than candidates
ROWS = 24
SHARDED, WHOLE = PartitionSpec(None, "tp"), PartitionSpec()
# Many programs are compiled here, and hardly one runs for long: LLVM need not make them fast.
QUICKLY = {"xla_backend_optimization_level": 0}

GREEDY: dict[str, Any] = dict(temperature=0.0)
SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    dict(temperature=1.3),
    dict(top_k=1),
    dict(top_k=20),
    dict(top_p=0.5),
    dict(top_p=1e-7),
    dict(min_p=0.1),
    dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
]
# What candidates cannot tell: too many words, too flat a distribution.
HARD: list[dict[str, Any]] = [
    dict(top_k=300),
    dict(top_p=0.999, temperature=3.0),
    dict(top_k=300, top_p=0.97, min_p=0.001, temperature=2.0),
]


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])


def padded(logits: np.ndarray, devices: int) -> np.ndarray:
    more = -logits.shape[1] % devices
    return np.pad(logits, ((0, 0), (0, more)), constant_values=-np.inf)


def program(
    function: Any,
    devices: int,
    *,
    operands: int = 4,
    out: PartitionSpec = WHOLE,
    quickly: bool = True,
) -> Any:
    """``function`` of arrays the first of which is sharded."""
    specs = (SHARDED,) + (WHOLE,) * (operands - 1)
    mapped = jax.shard_map(
        function, mesh=mesh(devices), in_specs=specs, out_specs=out, check_vma=True
    )
    return jax.jit(mapped, compiler_options=QUICKLY if quickly else None)


@cache
def drawing(devices: int, words: int) -> Any:
    return program(partial(sampler.draw, vocabulary=Vocabulary(size=words, axis="tp")), devices)


drawing_whole = jax.jit(lambda *operands: sampler.draw(*operands), compiler_options=QUICKLY)


def params(rows: int, **setting: Any) -> SamplingParams:
    chosen = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, wants_logprobs=False) | setting
    dtypes: dict[str, Any] = dict(top_k=jnp.int32, wants_logprobs=jnp.bool)
    return SamplingParams(
        **{
            name: jnp.full(rows, value, dtypes.get(name, jnp.float32))
            for name, value in chosen.items()
        }
    )


def mixed(settings: list[dict[str, Any]]) -> SamplingParams:
    """A row of each."""
    rows = [params(1, **setting) for setting in settings]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)


def random_logits(rows: int = ROWS, words: int = WORDS, seed: int = 0, scale: float = 3.0):
    return (scale * np.random.default_rng(seed).standard_normal((rows, words))).astype(np.float32)


def rounded(logits: np.ndarray) -> np.ndarray:
    """Many equal ones; zeros of one sign, for the other one's bits differ."""
    return np.round(logits) + np.float32(0)


def draw_both(
    logits: np.ndarray, how: SamplingParams, devices: int, seed: int = 0
) -> tuple[Drawn, Drawn]:
    """Drawn by that many devices, and by one that has everything."""
    rows, words = logits.shape
    rng = np.random.default_rng(seed)
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    positions = jnp.asarray(rng.integers(0, 1000, rows), jnp.int32)
    split = drawing(devices, words)(padded(logits, devices), keys, positions, how)
    whole = drawing_whole(jnp.asarray(logits), keys, positions, how)
    return jax.tree.map(np.asarray, split), jax.tree.map(np.asarray, whole)


def check_tokens(logits: np.ndarray, how: SamplingParams, devices: int, seed: int = 0) -> None:
    split, whole = draw_both(logits, how, devices, seed)
    np.testing.assert_array_equal(split.tokens, whole.tokens)


def _decided(logits: jax.Array, how: SamplingParams, *, words: int) -> jax.Array:
    vocabulary = Vocabulary(size=words, axis="tp")
    candidates = filters.collect(logits, vocabulary)
    return filters.decide(candidates, how.top_k, how.top_p, words).decided


@cache
def deciding(devices: int, words: int) -> Any:
    return program(partial(_decided, words=words), devices, operands=2)


def decided(logits: np.ndarray, how: SamplingParams, devices: int) -> np.ndarray:
    """Which rows' thresholds are found among the candidates."""
    return np.asarray(deciding(devices, logits.shape[1])(padded(logits, devices), how))


class TestTokens:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("setting", SETTINGS + HARD, ids=str)
    def test_as_on_one_device(self, setting: dict, devices: int) -> None:
        for seed in range(3):
            check_tokens(random_logits(seed=seed), params(ROWS, **setting), devices, seed)

    @pytest.mark.parametrize("devices, words", SMALL)
    @pytest.mark.parametrize("setting", [GREEDY, dict(), *SETTINGS[-1:], *HARD[-1:]], ids=str)
    def test_fewer_words_than_devices_or_candidates(
        self, setting: dict, devices: int, words: int
    ) -> None:
        check_tokens(random_logits(words=words), params(ROWS, **setting), devices)

    @pytest.mark.parametrize("devices", DEVICES)
    def test_rows_of_all_kinds_in_a_batch(self, devices: int) -> None:
        check_tokens(random_logits(), mixed((3 * SETTINGS)[:ROWS]), devices)
        check_tokens(random_logits(), mixed((3 * (SETTINGS + HARD))[:ROWS]), devices)

    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("setting", [GREEDY, *SETTINGS[3:], *HARD], ids=str)
    def test_equal_logits_on_several_devices(
        self, setting: dict, scale: float, devices: int
    ) -> None:
        logits = rounded(random_logits() * np.float32(scale))
        check_tokens(logits, params(ROWS, **setting), devices)

    @pytest.mark.parametrize("devices", DEVICES)
    def test_the_lowest_of_equals_wins(self, devices: int) -> None:
        logits = np.minimum(random_logits(), 1.0)
        split, _ = draw_both(logits, params(ROWS, **GREEDY), devices)
        np.testing.assert_array_equal(split.tokens, logits.argmax(axis=1))

    @pytest.mark.parametrize("devices", [2, 8])
    @pytest.mark.parametrize("setting", [GREEDY, dict(), dict(top_k=5), dict(top_p=0.9)], ids=str)
    def test_words_that_are_impossible(self, setting: dict, devices: int) -> None:
        logits = random_logits()
        logits[np.random.default_rng(5).random(logits.shape) < 0.98] = -np.inf
        logits[:, 17] = 0.0
        logits[0, :-1] = -np.inf  # only the last word of the last device
        logits[0, -1] = -3.0
        check_tokens(logits, params(ROWS, **setting), devices)

    @pytest.mark.parametrize("devices", [2, 8])
    @pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e6])
    def test_temperatures_at_the_limit(self, temperature: float, devices: int) -> None:
        for setting in (dict(), dict(top_k=7, top_p=0.6)):
            how = params(ROWS, temperature=temperature, **setting)
            check_tokens(random_logits(scale=20.0), how, devices)

    @pytest.mark.full
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("words", [1, 2, 7, 8, 31, 33, 64, 127, 256, 1000])
    def test_all_sizes(self, words: int, devices: int) -> None:
        for seed, setting in enumerate(SETTINGS + HARD):
            for scale in (0.3, 3.0, 10.0):
                logits = random_logits(words=words, seed=seed, scale=scale)
                check_tokens(logits, params(ROWS, **setting), devices, seed)
                check_tokens(rounded(logits), params(ROWS, **setting), devices, seed)


class TestNotNumbers:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("setting", [GREEDY, dict(), dict(top_k=300, top_p=0.9)], ids=str)
    def test_wherever_it_stands(self, setting: dict, devices: int) -> None:
        logits = random_logits()
        for row, value in enumerate([np.nan, np.inf, -np.nan] * 5):
            logits[row, row * WORDS // 15] = value
        logits[15] = -np.inf
        logits[16] = np.nan
        how = params(ROWS, **setting)
        split, whole = draw_both(logits, how, devices)
        np.testing.assert_array_equal(split.tokens[:17], NOT_A_NUMBER)
        np.testing.assert_array_equal(split.tokens[17:], whole.tokens[17:])
        assert (split.tokens[17:] >= 0).all()

    def test_every_device_hears_of_one_in_a_large_vocabulary(self) -> None:
        def tokens(*operands: Any) -> jax.Array:
            found = sampler.sample(*operands, vocabulary=Vocabulary(axis="tp"))
            return jax.lax.pcast(found, "tp", to="varying")[:, None]

        logits = random_logits(8, 20_000)
        logits[np.arange(7), [0, 1, 9_999, 10_000, 10_001, 19_000, 19_999]] = np.nan
        keys, positions = jnp.zeros((8, 2), jnp.uint32), jnp.zeros(8, jnp.int32)
        # Compiled as in earnest: XLA's maximum would lose these.
        function = program(tokens, 2, out=SHARDED, quickly=False)
        found = function(logits, keys, positions, params(8, **GREEDY))
        assert np.asarray(found).tolist() == [[NOT_A_NUMBER] * 2] * 7 + [[logits[7].argmax()] * 2]


class TestLogProbabilities:
    @pytest.mark.parametrize("devices", DEVICES)
    @pytest.mark.parametrize("setting", [GREEDY, dict(temperature=2.0)], ids=str)
    @pytest.mark.parametrize("equals", [False, True], ids=["distinct", "equals"])
    def test_as_on_one_device(self, equals: bool, setting: dict, devices: int) -> None:
        logits = rounded(random_logits()) if equals else random_logits() - 40.0
        split, whole = draw_both(logits, params(ROWS, wants_logprobs=True, **setting), devices)
        np.testing.assert_array_equal(split.tokens, whole.tokens)
        np.testing.assert_array_equal(split.best, whole.best)
        np.testing.assert_allclose(split.logprobs, whole.logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(split.best_logprobs, whole.best_logprobs, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("devices, words", SMALL)
    def test_a_small_vocabulary(self, devices: int, words: int) -> None:
        logits = random_logits(words=words)
        logits[0, 1:] = -np.inf
        split, whole = draw_both(logits, params(ROWS, wants_logprobs=True), devices)
        assert split.best.shape == (ROWS, min(words, MOST_LOGPROBS))
        np.testing.assert_array_equal(split.best, whole.best)
        np.testing.assert_allclose(split.logprobs, whole.logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(split.best_logprobs, whole.best_logprobs, rtol=1e-6, atol=1e-6)

    def test_zero_where_nobody_asks(self) -> None:
        split, _ = draw_both(random_logits(), params(ROWS), 2)
        assert not split.logprobs.any() and not split.best_logprobs.any()


def closed_form(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Words kept, by sorting in float64."""
    kept = np.zeros(logits.shape, bool)
    for row, values in enumerate(logits.astype(np.float64)):
        ordered = np.sort(values)[::-1]
        kth = ordered[top_k - 1] if top_k else -np.inf
        weights = np.exp(ordered - ordered[0]) * (ordered >= kth)
        reached = np.cumsum(weights) >= top_p * weights.sum()
        cut = ordered[reached.argmax()] if top_p < 1 else -np.inf
        kept[row] = values >= max(kth, cut)
    return kept


def sampling(devices: int) -> Any:
    """A program of its own, which sees what a test has replaced."""
    vocabulary = Vocabulary(size=WORDS, axis="tp")
    return program(partial(sampler.sample, vocabulary=vocabulary), devices)


@pytest.fixture(scope="module")
def searches() -> Any:
    """How many of two devices search all words for thresholds, given logits [4, W] and
    parameters."""
    calls: list[int] = []
    search, function = filters.kept_by_search, sampling(2)
    keys, positions = jnp.zeros((4, 2), jnp.uint32), jnp.zeros(4, jnp.int32)

    def counted(*operands: Any) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return search(*operands)

    def count(logits: np.ndarray, how: SamplingParams) -> int:
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "kept_by_search", counted)
            jax.block_until_ready(function(padded(logits, 2), keys, positions, how))
        jax.effects_barrier()
        return len(calls)

    return count


class TestDecision:
    """Thresholds among the candidates, and what happens where they are not."""

    @pytest.mark.parametrize("devices", [2, 8])
    def test_easy_rows_are_decided(self, devices: int) -> None:
        for setting in SETTINGS:
            temperature = setting.get("temperature", 1.0) or 1.0
            logits = random_logits() / np.float32(temperature)
            assert decided(logits, params(ROWS, **setting), devices).all(), setting

    @pytest.mark.parametrize("devices", [1, 2, 4, 8])
    def test_hard_rows_are_not(self, devices: int) -> None:
        for setting in HARD:
            logits = random_logits() / np.float32(setting.get("temperature", 1.0))
            assert not decided(logits, params(ROWS, **setting), devices).any(), setting

    def test_more_words_on_one_device_than_it_has_candidates(self) -> None:
        logits = random_logits()
        logits[:12, :160] += 100.0  # the likely ones of these rows are all on the first of two
        found = decided(logits, params(ROWS, top_k=filters.CANDIDATES + 8), 2)
        np.testing.assert_array_equal(found, [False] * 12 + [True] * 12)

    def test_the_last_candidate_of_a_device_proves_nothing_beyond(self) -> None:
        logits = np.tile(np.linspace(5, -5, WORDS, dtype=np.float32), (ROWS, 1))
        for k in (filters.CANDIDATES - 1, filters.CANDIDATES, filters.CANDIDATES + 1):
            found = decided(logits, params(ROWS, top_k=k), 2)
            assert found.all() == (k <= filters.CANDIDATES) and found.any() == found.all()

    def test_all_words_are_candidates(self) -> None:
        how = params(ROWS, top_k=40, top_p=0.99)
        assert decided(random_logits(words=61, scale=0.01), how, 4).all()

    def test_filters_that_are_off_need_no_decision(self) -> None:
        assert decided(random_logits(scale=0.0), params(ROWS, top_k=WORDS, min_p=0.5), 2).all()

    def test_broken_rows_hold_nobody_up(self) -> None:
        logits = random_logits(scale=0.01)
        logits[:, 5] = np.nan
        assert decided(logits, params(ROWS, top_p=0.99), 2).all()

    def test_greedy_rows_hold_nobody_up(self, searches: Any) -> None:
        how = mixed([dict(top_k=3), dict(temperature=0.0, top_p=0.99)] * 2)
        assert searches(random_logits(4, scale=0.01), how) == 0

    @pytest.mark.parametrize("top_p, devices", [(0.2, 0), (0.99, 2)])
    def test_one_row_makes_all_search(self, top_p: float, devices: int, searches: Any) -> None:
        how = mixed([dict(top_k=3), dict(top_p=top_p), dict(top_k=3), dict(temperature=0.0)])
        assert searches(random_logits(4), how) == devices

    @pytest.mark.parametrize("candidates", [1, 200])
    def test_both_ways_keep_the_same(
        self, candidates: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filters, "CANDIDATES", candidates)
        function = partial(sampler.filter_words, vocabulary=Vocabulary(size=WORDS, axis="tp"))
        keeping = program(function, 2, operands=2, out=SHARDED)
        deciding = program(partial(_decided, words=WORDS), 2, operands=2)
        logits = random_logits(scale=2.0)
        logits[12:] = rounded(logits[12:])
        shards = padded(logits, 2)
        for top_k, top_p in [(0, 0.6), (7, 1.0), (50, 0.9), (200, 1.0), (0, 0.95), (0, 1e-46)]:
            how = params(ROWS, top_k=top_k, top_p=top_p)
            kept = np.asarray(keeping(shards, how))[:, :WORDS]
            np.testing.assert_array_equal(kept, closed_form(logits, top_k, top_p))
            # All words are candidates, or one is, which can at most be the only one kept.
            certain = np.asarray(deciding(shards, how))
            assert certain.all() if candidates == 200 else not certain[kept.sum(axis=1) > 2].any()


def collectives(jaxpr: Any) -> Counter:
    """Collectives by primitive, but those under conditions that depend on data."""
    found: Counter = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(("all_gather", "psum", "all_to_all", "ppermute", "pmax")):
            found[name] += 1
        elif name != "cond":
            for inner in inner_jaxprs(equation):
                found += collectives(inner)
        elif equation.params.get("branches_platforms"):
            found += collectives(equation.params["branches"][-1].jaxpr)  # other than CPU
    return found


def inner_jaxprs(equation: Any) -> list[Any]:
    values = [getattr(value, "jaxpr", value) for value in equation.params.values()]
    return [value for value in values if hasattr(value, "eqns")]


def conditions(jaxpr: Any) -> list[list[Any]]:
    """Branches of each condition on data, outermost only."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name != "cond":
            found += [found for inner in inner_jaxprs(equation) for found in conditions(inner)]
        elif not equation.params.get("branches_platforms"):
            found.append([branch.jaxpr for branch in equation.params["branches"]])
    return found


@pytest.fixture(scope="module")
def traced() -> Any:
    operands = jnp.zeros((4, 2), jnp.uint32), jnp.zeros(4, jnp.int32), params(4)
    return drawing(4, WORDS).trace(padded(random_logits(4), 4), *operands)


class TestProgram:
    def test_collectives(self, traced: Any) -> None:
        def gathers(jaxpr: Any) -> int:
            found = collectives(jaxpr)
            assert set(found) <= {"all_gather_invariant"}
            return found["all_gather_invariant"]

        assert gathers(traced.jaxpr) == 1  # all that a greedy step has
        ways, comparison = conditions(traced.jaxpr)
        assert [gathers(way) for way in ways] == [0, 1, 2]
        assert [gathers(way) for way in comparison] == [0, 3]
        assert conditions(ways[0]) == conditions(ways[1]) == []
        ((search, candidates),) = conditions(ways[2])
        assert gathers(candidates) == 0
        assert collectives(search) == {"all_gather_invariant": 1, "psum_invariant": 33}

    def test_a_program_for_a_gpu_neither_loops_nor_sorts(self, traced: Any) -> None:
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        for op in ("stablehlo.while", "stablehlo.sort", "top_k", "custom_call"):
            assert op not in text, op

    def test_nothing_is_rounded(self, traced: Any) -> None:
        text = traced.lower().as_text()
        assert "bf16" not in text and "f16" not in text and "f64" not in text

    def test_draws_the_same_without_loops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *operands, cpu, default: default(*operands)
        )
        monkeypatch.setattr(filters, "CANDIDATES", 20)
        function = sampling(3)
        logits = random_logits()
        logits[12:] = rounded(logits[12:])
        keys, positions = jnp.zeros((ROWS, 2), jnp.uint32), jnp.arange(ROWS)
        for setting in (SETTINGS[-1], dict(top_k=15), HARD[-1]):
            how = params(ROWS, **setting)
            split = np.asarray(function(padded(logits, 3), keys, positions, how))
            whole = drawing_whole(logits, keys, positions, how)
            np.testing.assert_array_equal(split, np.asarray(whole.tokens))
