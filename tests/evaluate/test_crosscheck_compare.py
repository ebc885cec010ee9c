"""The numbers of a cross-check against closed forms, and verdicts on planted differences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deinfer_jax.config import ModelConfig
from deinfer_jax.evaluate.crosscheck.compare import (
    Answer,
    Comparison,
    Delta,
    Distribution,
    Greedy,
    Phase,
    compare,
)
from deinfer_jax.evaluate.crosscheck.job import Job, Tokens
from deinfer_jax.evaluate.crosscheck.verdict import Tolerance, tolerance

LENGTHS, STEPS, GREEDY, LAYERS, D, W = (5, 3), 4, 6, 2, 7, 11
TOKENS = Tokens(
    tuple(np.arange(length, dtype=np.int32) for length in LENGTHS), np.zeros((STEPS, 2), np.int32)
)
JOB = Job(
    checkpoint="/nowhere",
    dtype="float32",
    kv_cache="full",
    page_size=16,
    prefill_chunk=4,
    max_context=20,
    forced=STEPS,
    greedy=GREEDY,
    device="cpu",
)
CONFIG = ModelConfig(
    vocab_size=W,
    hidden_size=D,
    intermediate_size=8,
    num_layers=LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
)


def answer(seed: int = 0) -> Answer:
    rng = np.random.default_rng(seed)
    arrays = {
        "decode_hidden": rng.standard_normal((STEPS, LAYERS + 1, 2, D)),
        "decode_logits": rng.standard_normal((STEPS, 2, W)),
        "greedy_margin": np.full((GREEDY, 2), 0.5),
        "greedy_top": np.full((GREEDY, 2), 2.0),
    }
    for i, length in enumerate(LENGTHS):
        arrays[f"prefill_hidden_{i}"] = rng.standard_normal((LAYERS + 1, length, D))
        arrays[f"prefill_logits_{i}"] = rng.standard_normal((length, W))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays["greedy_tokens"] = rng.integers(0, W, (GREEDY, 2)).astype(np.int32)
    return Answer(arrays, {})


def problems(some: Answer) -> list[str]:
    return some.problems(JOB, TOKENS, layers=LAYERS, D=D, W=W)


class TestDelta:
    def test_by_hand(self) -> None:
        a, b = np.array([[3.0, 5.0], [1.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 0.0]])
        delta = Delta.of("x", a, b)
        assert delta.max_abs == 1.0 and delta.mean_abs == 0.5
        assert delta.relative == pytest.approx(math.sqrt(2) / 5)
        assert delta.worst == math.inf  # the second position is 0 and should be

    def test_worst_is_of_a_position_and_relative_of_all(self) -> None:
        b = np.array([[100.0, 0.0], [0.0, 1.0]])
        delta = Delta.of("x", b + [[0.0, 0.0], [0.0, 0.25]], b)
        assert delta.worst == 0.25
        assert delta.relative == pytest.approx(0.25 / math.sqrt(10001))

    def test_equal_zeros_do_not_differ(self) -> None:
        delta = Delta.of("x", np.zeros((2, 3)), np.zeros((2, 3)))
        assert (delta.relative, delta.worst) == (0.0, 0.0)

    def test_is_computed_in_float64(self) -> None:
        a = np.full((1, 4), 1e30, np.float32)
        assert Delta.of("x", a * np.float32(1.5), a).relative == pytest.approx(0.5)


class TestDistribution:
    def test_two_words_in_closed_form(self) -> None:
        p, q = 0.9, 0.6
        theirs, ours = (np.log([[x, 1 - x]]) + 3.0 for x in (p, q))
        found = Distribution.of(ours, theirs)
        expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        assert found.kl_mean == pytest.approx(expected, rel=1e-12)
        assert found.kl_max == found.kl_p99 == found.kl_mean
        assert found.top1 == 1.0

    def test_resolves_small_differences(self) -> None:
        # To second order the divergence is half the variance of the logits' difference.
        rng = np.random.default_rng(0)
        theirs = rng.standard_normal((1, 50))
        difference = 1e-6 * rng.standard_normal((1, 50))
        p = np.exp(theirs) / np.exp(theirs).sum()
        variance = (p * difference**2).sum() - (p * difference).sum() ** 2
        found = Distribution.of(theirs + difference, theirs)
        assert found.kl_mean == pytest.approx(variance / 2, rel=1e-2)

    def test_large_logits_do_not_overflow(self) -> None:
        logits = np.array([[1e4, -1e4, 0.0]], np.float32)
        assert Distribution.of(logits, logits).kl_mean == 0.0

    def test_statistics_over_positions(self) -> None:
        theirs = np.zeros((200, 2))
        ours = theirs.copy()
        ours[0, 1] = 1.0  # one position in 200 differs
        found = Distribution.of(ours, theirs)
        kl = math.log((1 + math.e) / 2) - 0.5
        assert found.kl_max == pytest.approx(kl)
        assert found.kl_mean == pytest.approx(kl / 200)
        assert found.kl_p99 == 0.0
        assert found.top1 == 199 / 200


class TestCompare:
    def test_equal_answers(self) -> None:
        found = compare(answer(), answer())
        for phase in (found.prefill, found.decode):
            assert phase.worst_layer.max_abs == 0.0
            assert phase.distribution == Distribution(kl_mean=0, kl_p99=0, kl_max=0, top1=1)
        assert found.greedy == (Greedy(equal=GREEDY, count=GREEDY),) * 2

    @pytest.mark.parametrize("layer", range(LAYERS + 1))
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_difference_shows_in_its_layer_and_phase_alone(self, phase: str, layer: int) -> None:
        ours = answer()
        if phase == "decode":
            ours.arrays["decode_hidden"][2, layer, 1, 3] += 1
        else:
            ours.arrays["prefill_hidden_1"][layer, 2, 3] += 1
        found = compare(ours, answer())
        for name, one in (("prefill", found.prefill), ("decode", found.decode)):
            for index, delta in enumerate((*one.layers, one.logits)):
                differs = (name, index) == (phase, layer)
                assert delta.max_abs == pytest.approx(1.0 if differs else 0.0, abs=1e-6)

    def test_positions_of_decode_are_rows_of_the_batch(self) -> None:
        ours, theirs = answer(), answer(1)
        found = compare(ours, theirs).decode.layers[1]
        a, b = (side.arrays["decode_hidden"][:, 1].astype(np.float64) for side in (ours, theirs))
        ratios = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
        assert found.worst == pytest.approx(ratios.max())
        assert found.relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
        assert found.mean_abs == pytest.approx(np.abs(a - b).mean())

    def test_names(self) -> None:
        found = compare(answer(), answer())
        assert [delta.name for delta in found.prefill.layers] == ["embedding", "layer 0", "layer 1"]

    def test_greedy_tokens_until_the_first_difference(self) -> None:
        ours, theirs = answer(), answer()
        ours.arrays["greedy_tokens"][3:, 1] = -1  # whatever follows a difference may differ
        ours.arrays["greedy_margin"][3, 1] = 0.125
        theirs.arrays["greedy_margin"][3, 1] = 0.25
        theirs.arrays["greedy_top"][3, 1] = -4.0
        first, second = compare(ours, theirs).greedy
        assert first.equal == GREEDY and first.margin is None
        assert second == Greedy(equal=3, count=GREEDY, margin=0.25, top=4.0)


class TestAnswer:
    def test_a_whole_one_has_no_problems(self) -> None:
        assert problems(answer()) == []

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_no_numbers(self, value: float) -> None:
        some = answer()
        some.arrays["prefill_logits_1"][0, 2] = value
        (problem,) = problems(some)
        assert problem == "prefill_logits_1: 1 of 33 values are NaN or infinite"

    def test_another_shape(self) -> None:
        some = answer()
        some.arrays["decode_hidden"] = some.arrays["decode_hidden"][:-1]
        (problem,) = problems(some)
        assert problem == "decode_hidden: expected shape [4, 3, 2, 7], got [3, 3, 2, 7]"

    def test_a_missing_array(self) -> None:
        some = answer()
        del some.arrays["greedy_top"]
        assert problems(some) == ["greedy_top: expected an array, got none"]

    def test_read_without_info(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "torch.npz", x=np.zeros(1))
        with pytest.raises(ValueError, match=r"torch.npz: expected an array info, got x"):
            Answer.read(tmp_path / "torch.npz")


class TestVerdict:
    def found(self, relative: float = 0.0, kl: float = 0.0, **greedy: float) -> Comparison:
        """A comparison whose decode logits differ by so much."""
        base = compare(answer(), answer())
        decode: Phase = replace(
            base.decode,
            logits=replace(base.decode.logits, relative=relative),
            distribution=replace(base.decode.distribution, kl_mean=kl, kl_p99=kl),
            logit_range=10.0,
        )
        sequences = base.greedy
        if greedy:
            sequences = (*sequences[:1], Greedy(equal=3, count=GREEDY, **greedy))
        return replace(base, decode=decode, greedy=sequences)

    @pytest.mark.parametrize(
        ("layers", "width", "limit"), [(2, 48, 1e-5), (5, 54, 1e-5), (30, 576, 5e-5)]
    )
    def test_float32_by_size(self, layers: int, width: int, limit: float) -> None:
        config = CONFIG.replace(num_layers=layers, hidden_size=width)
        allowed = tolerance("float32", config)
        assert allowed.exceeded(self.found(relative=0.99 * limit)) == []
        (problem,) = allowed.exceeded(self.found(relative=1.01 * limit))
        assert problem.startswith("decode, logits: expected a relative norm of at most")

    def test_float32_looks_at_every_layer(self) -> None:
        found = self.found()
        layers = list(found.prefill.layers)
        layers[1] = replace(layers[1], relative=1e-3)
        found = replace(found, prefill=replace(found.prefill, layers=tuple(layers)))
        (problem,) = tolerance("float32", CONFIG).exceeded(found)
        assert problem == (
            "prefill, layer 0: expected a relative norm of at most 1e-05, got 1.00e-03"
        )

    def test_float32_greedy_margin(self) -> None:
        allowed = tolerance("float32", CONFIG)
        assert allowed.exceeded(self.found(margin=0.99e-3, top=5.0)) == []
        (problem,) = allowed.exceeded(self.found(margin=1.01e-3, top=5.0))
        assert problem == (
            "greedy, sequence 1: token 3 differs at a margin of 1.01e-03, expected at most "
            "1.00e-03 there"
        )

    def test_float32_looks_at_every_position(self) -> None:
        found = self.found()
        logits = replace(found.decode.logits, worst=2e-4)
        found = replace(found, decode=replace(found.decode, logits=logits))
        (problem,) = tolerance("float32", CONFIG).exceeded(found)
        assert problem == (
            "decode, logits: expected a relative norm of at most 1e-04 at every position, got "
            "2.00e-04"
        )

    @pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
    def test_half(self, dtype: str, bits: int) -> None:
        allowed = tolerance(dtype, CONFIG)
        limit = 1e-3 * 4.0 ** (8 - bits)
        assert allowed.exceeded(self.found(relative=0.1, kl=limit)) == []
        (problem,) = allowed.exceeded(self.found(kl=2 * limit))
        assert problem.startswith(
            f"decode: expected a KL divergence of at most {limit:.0e} (mean), got"
        )
        assert len(allowed.exceeded(self.found(kl=20 * limit))) == 2  # the 99th percentile, too
        margin = 4 * 2**-bits * 5.0
        assert allowed.exceeded(self.found(margin=margin, top=5.0)) == []
        assert len(allowed.exceeded(self.found(margin=1.01 * margin, top=5.0))) == 1

    def test_no_number_is_within_no_limit(self) -> None:
        assert len(Tolerance(relative=1.0).exceeded(self.found(relative=math.nan))) == 1
        assert len(Tolerance(kl_mean=1.0).exceeded(self.found(kl=math.nan))) == 1
        assert len(tolerance("float32", CONFIG).exceeded(self.found(margin=math.nan, top=1))) == 1
