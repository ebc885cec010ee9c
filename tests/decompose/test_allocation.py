"""How many ranks each group gets: the budget is met, and spent where it is worth most."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from deinfer_jax.decompose.allocation import allocate, explicit, kept
from deinfer_jax.decompose.groups import Group

LAYOUTS = {
    "separate": (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",)),
    "shared": (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
    "shared-kv": (("q",), ("k", "v"), ("o",), ("gate", "up"), ("down",)),
}


def model(layers: int, D: int, kv: int, F: int, layout: str) -> list[Group]:
    """Groups of a Llama: width D, keys and values of width kv, feed-forward F."""
    shapes = {"q": (D, D), "k": (kv, D), "v": (kv, D), "o": (D, D)}
    shapes |= {"gate": (F, D), "up": (F, D), "down": (D, F)}
    return [
        Group(
            modules=tuple(f"model.layers.{layer}.x.{short}_proj" for short in members),
            outputs=tuple(shapes[short][0] for short in members),
            in_features=shapes[members[0]][1],
            block="unused",
        )
        for layer in range(layers)
        for members in LAYOUTS[layout]
    ]


def group(out: int, width: int, index: int = 0) -> Group:
    name = f"model.layers.{index}.x.o_proj"
    return Group(modules=(name,), outputs=(out,), in_features=width, block=name)


MODELS = {
    "SmolLM2-135M": (30, 576, 192, 1536),
    "Llama-3-8B": (32, 4096, 1024, 14336),
    "Llama-2-7B": (32, 4096, 4096, 11008),
}


def falling(groups: Sequence[Group], seed: int = 0) -> list[np.ndarray]:
    """Spectra like a model's: powers of many steepnesses and scales."""
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(0.01, 10) * (1.0 + np.arange(g.most)) ** -rng.uniform(0.2, 2.0) for g in groups
    ]


def spent(groups: Sequence[Group], ranks: Sequence[int | None]) -> int:
    """Parameters, counted here."""
    total = 0
    for g, rank in zip(groups, ranks, strict=True):
        out, width = sum(g.outputs), g.in_features
        total += out * width if rank is None else rank * (out + width)
    return total


def whole(groups: Sequence[Group]) -> int:
    return sum(sum(g.outputs) * g.in_features for g in groups)


def lost(energies: Sequence[np.ndarray], ranks: Sequence[int | None]) -> float:
    """Σ s² that is cut."""
    pairs = zip(energies, ranks, strict=True)
    return float(sum(e[rank:].sum() for e, rank in pairs if rank is not None))


def budget_cases() -> list[Any]:
    """Models, allocations and steps; those of very many steps are slow."""
    cases = itertools.product(MODELS, ("loss", "uniform"), (1, 8, 64))
    slow = [(name, "loss", step) for name in MODELS if name != "SmolLM2-135M" for step in (1, 8)]
    slow += [("SmolLM2-135M", "uniform", 8)]
    return [pytest.param(*case, marks=pytest.mark.full if case in slow else ()) for case in cases]


class TestBudget:
    """Met within +0 / −0.5 %."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("name", "allocation", "multiple_of"), budget_cases())
    def test_is_met(self, name: str, allocation: str, multiple_of: int, layout: str) -> None:
        layers, D, kv, F = MODELS[name]
        if allocation == "loss":  # so many steps take a while
            layers = min(layers, max(1, layers * 20 * multiple_of // D))
        elif D > 1000:
            layers = 8
        groups = model(layers, D, kv, F, layout)
        energies = falling(groups)
        for keep in (0.2, 0.6, 0.97):
            ranks = allocate(groups, energies, keep, allocation=allocation, multiple_of=multiple_of)
            reached = spent(groups, ranks) / whole(groups)
            assert keep * 0.995 <= reached <= keep, (keep, reached)
            assert kept(groups, ranks) == reached
            assert all(rank is None or rank >= 1 for rank in ranks)

    @pytest.mark.parametrize("allocation", ["loss", "uniform"])
    @pytest.mark.parametrize("multiple_of", [8, 64])
    def test_ranks_are_multiples(self, allocation: str, multiple_of: int) -> None:
        groups = model(*MODELS["SmolLM2-135M"], "shared")
        ranks = allocate(
            groups, falling(groups), 0.6, allocation=allocation, multiple_of=multiple_of
        )
        assert all(rank is None or rank % multiple_of == 0 for rank in ranks)

    @pytest.mark.parametrize("allocation", ["loss", "uniform"])
    def test_groups_of_few_directions_get_what_they_have(self, allocation: str) -> None:
        groups = [group(4, 40), group(600, 500, 1)]  # break-even of the first: 3
        ranks = allocate(groups, falling(groups), 0.6, allocation=allocation, multiple_of=8)
        assert ranks[0] in (None, 3) and ranks[1] is not None and ranks[1] % 8 == 0

    def test_never_above_break_even(self) -> None:
        groups = model(2, 96, 32, 256, "separate")
        for keep in (0.6, 0.9, 0.99):
            for rank, g in zip(
                allocate(groups, falling(groups), keep, allocation="loss"), groups, strict=True
            ):
                assert rank is None or rank * (sum(g.outputs) + g.in_features) < g.parameters

    @pytest.mark.parametrize("allocation", ["loss", "uniform"])
    def test_keep_of_1_is_the_dense_model(self, allocation: str) -> None:
        groups = model(*MODELS["SmolLM2-135M"], "shared")
        ranks = allocate(groups, falling(groups), 1, allocation=allocation)
        assert ranks == [None] * len(groups) and kept(groups, ranks) == 1

    @pytest.mark.parametrize("allocation", ["loss", "uniform"])
    def test_almost_1(self, allocation: str) -> None:
        groups = model(2, 96, 32, 256, "shared")
        ranks = allocate(groups, falling(groups), 1 - 1e-9, allocation=allocation)
        assert 0.995 <= spent(groups, ranks) / whole(groups) < 1

    @pytest.mark.parametrize("allocation", ["loss", "uniform"])
    def test_the_smallest_keep_is_one_rank_each(self, allocation: str) -> None:
        groups = [group(30, 20, i) for i in range(4)]
        ranks = allocate(groups, falling(groups), 50 / 600, allocation=allocation)
        assert ranks == [1, 1, 1, 1]

    def test_spectra_with_nothing_left_still_spend_it(self) -> None:
        groups = [group(300, 200, i) for i in range(4)]
        energies = [np.where(np.arange(200) < 5, 1.0, 0.0) for _ in groups]
        ranks = allocate(groups, energies, 0.5, allocation="loss")
        assert 0.4975 <= spent(groups, ranks) / whole(groups) <= 0.5


class TestUniform:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", MODELS)
    def test_the_formula(self, name: str, layout: str) -> None:
        """Unless it leaves more than half a percent, which 30 small layers do at low keeps."""
        groups = model(*MODELS[name], layout)
        for keep in (0.3, 0.6, 0.8):
            formula: list[int | None] = []
            for g in groups:
                out, width = sum(g.outputs), g.in_features
                formula.append(int(out * width * keep / (out + width)))
            ranks = allocate(groups, None, keep, allocation="uniform")
            if name != "SmolLM2-135M" or spent(groups, formula) >= 0.995 * keep * whole(groups):
                assert ranks == formula
            else:
                pairs = zip(ranks, formula, strict=True)
                assert all(rank in (least, (least or 0) + 1) for rank, least in pairs)

    @pytest.mark.parametrize(
        ("out", "width", "keep", "rank"),
        [(4096, 4096, 0.8, 1638), (11008, 4096, 0.8, 2388), (1024, 4096, 0.8, 655)]
        + [(4096, 4096, 0.6, 1228), (11008, 4096, 0.6, 1791), (1024, 4096, 0.6, 491)],
    )
    def test_ranks_of_published_checkpoints(
        self, out: int, width: int, keep: float, rank: int
    ) -> None:
        assert allocate([group(out, width)], None, keep, allocation="uniform") == [rank]

    def test_what_rounding_leaves_goes_to_those_that_lost_the_most(self) -> None:
        groups = [group(48, 48, 0), group(32, 48, 1), group(80, 48, 2)]
        # 14.4, 11.52 and 18 ranks at 96, 80 and 128 parameters: 80 are left, for the second.
        assert allocate(groups, None, 0.6, allocation="uniform") == [14, 12, 18]
        # In steps of 8 1.8, 1.44 and 2.25: 8, 8 and 16 leave 1584, and the first lost the most.
        ranks = allocate(groups, None, 0.6, allocation="uniform", multiple_of=8)
        assert ranks == [16, 8, 16]


class TestLoss:
    def brute_force(self, groups: list[Group], energies: list[np.ndarray], keep: float) -> float:
        """The least loss of any ranks in the budget."""
        budget = keep * whole(groups)
        choices = []
        for g in groups:
            cost = sum(g.outputs) + g.in_features
            most = (g.parameters - 1) // cost
            choices.append([*range(1, most + 1), None])
        return min(
            lost(energies, ranks)
            for ranks in itertools.product(*choices)
            if spent(groups, ranks) <= budget
        )

    @pytest.mark.parametrize("seed", range(8))
    def test_equal_shapes_are_optimal(self, seed: int) -> None:
        """With steps of one price, falling order is the optimum (no group reaches break-even)."""
        groups = [group(24, 12, i) for i in range(4)]
        energies = [e * np.exp(-np.arange(12)) for e in falling(groups, seed)]
        for keep in (0.3, 0.45, 0.6):
            ranks = allocate(groups, energies, keep, allocation="loss")
            if None not in ranks:
                best = self.brute_force(groups, energies, keep)
                assert lost(energies, ranks) == pytest.approx(best, rel=1e-12)

    @pytest.mark.parametrize("seed", range(8))
    def test_unequal_shapes_are_optimal_but_for_the_last_step(self, seed: int) -> None:
        """Falling order of gain a parameter solves the problem without its integers, so what it
        misses is less than a step (spectra so steep that being dense is worth nothing much)."""
        groups = [group(24, 12, 0), group(10, 14, 1), group(8, 30, 2), group(14, 13, 3)]
        energies = [e * np.exp(-np.arange(len(e))) for e in falling(groups, seed)]
        for keep in (0.3, 0.4, 0.5):
            ranks = allocate(groups, energies, keep, allocation="loss")
            step = max(
                float(e[rank:].sum()) if rank == g.break_even else float(e[rank])
                for e, rank, g in zip(energies, ranks, groups, strict=True)
                if rank is not None
            )
            assert lost(energies, ranks) <= self.brute_force(groups, energies, keep) + step

    @pytest.mark.parametrize("keep", [0.5, 0.8, 0.9])
    def test_near_the_bound_of_every_allocation(self, keep: float) -> None:
        """Beyond break-even a group is dense, which frees all its directions for less than the
        price of one more: to stop just short of it wastes a lot."""
        groups = model(6, 96, 32, 256, "shared")
        energies = falling(groups, seed=2)
        costs = [
            np.append(np.arange(1, g.break_even + 1) * g.rank_cost, g.parameters) for g in groups
        ]
        tails = [
            np.append(e.sum() - np.cumsum(e)[: g.break_even], 0.0)
            for e, g in zip(energies, groups, strict=True)
        ]
        # Lagrange: for any price of a parameter, no allocation in the budget loses less than this.
        bound = max(
            sum(float((t + price * c).min()) for t, c in zip(tails, costs, strict=True))
            - price * keep * whole(groups)
            for price in np.geomspace(1e-8, 1e-1, 400).tolist()
        )
        ranks = allocate(groups, energies, keep, allocation="loss")
        assert bound <= lost(energies, ranks) <= 1.02 * bound

    def test_the_order_is_energy_a_parameter(self) -> None:
        """A direction of 3 in a group of double the price is worth less than one of 2."""
        groups = [group(20, 20, 0), group(40, 40, 1)]
        energies = [np.repeat([2.0, 0.0], [6, 14]), np.repeat([3.0, 0.0], [6, 34])]
        # 2000 parameters, of which 40 + 80 are the first ranks; the budget has 5 more of the first.
        ranks = allocate(groups, energies, 321 / 2000, allocation="loss")
        assert ranks == [6, 1]
        ranks = allocate(groups, [energies[0], energies[1] * 2], 521 / 2000, allocation="loss")
        assert ranks == [1, 6]

    def test_one_rank_at_least(self) -> None:
        groups = [group(30, 20, i) for i in range(3)]
        energies = [np.full(20, 1.0), np.zeros(20), np.full(20, 1e-30)]
        ranks = allocate(groups, energies, 0.4, allocation="loss")
        assert ranks[1] == ranks[2] == 1

    def test_break_even_becomes_dense_and_the_excess_is_spent(self) -> None:
        """Break-even of 30 × 20 is 11 ranks, 550 of 600 parameters."""
        groups = [group(30, 20, 0), group(30, 20, 1)]
        energies = [np.full(20, 100.0), 2.0 ** -np.arange(20)]
        # 1200 parameters: dense is 600, of the other 300 6 ranks.
        assert allocate(groups, energies, 900 / 1200, allocation="loss") == [None, 6]
        # One parameter less than dense and a rank: the best is to stay below break-even.
        assert allocate(groups, energies, 649 / 1200, allocation="loss") == [11, 1]
        assert allocate(groups, energies, 651 / 1200, allocation="loss") == [None, 1]

    def test_dense_is_never_dearer_than_its_weights(self) -> None:
        groups = model(3, 192, 64, 512, "shared")
        energies = falling(groups)
        energies[0] = energies[0] * 1e6
        ranks = allocate(groups, energies, 0.6, allocation="loss")
        assert ranks[0] is None
        assert 0.597 <= spent(groups, ranks) / whole(groups) <= 0.6

    def test_more_keep_is_less_loss(self) -> None:
        groups = model(2, 48, 16, 80, "shared")
        energies = falling(groups)
        losses = [
            lost(energies, allocate(groups, energies, keep, allocation="loss"))
            for keep in np.linspace(0.1, 1, 19).tolist()
        ]
        assert losses[-1] == 0 and all(b < a for a, b in itertools.pairwise(losses))

    def test_beats_uniform(self) -> None:
        groups = model(3, 192, 64, 512, "shared")
        energies = falling(groups)
        by_loss = allocate(groups, energies, 0.6, allocation="loss")
        uniform = allocate(groups, energies, 0.6, allocation="uniform")
        assert lost(energies, by_loss) < 0.9 * lost(energies, uniform)

    def test_a_scale_common_to_all_changes_nothing(self) -> None:
        groups = model(*MODELS["SmolLM2-135M"], "separate")
        energies = falling(groups)
        ranks = allocate(groups, energies, 0.6, allocation="loss", multiple_of=8)
        scaled = [energy * 2.0**-40 for energy in energies]
        assert allocate(groups, scaled, 0.6, allocation="loss", multiple_of=8) == ranks


class TestExplicit:
    GROUPS = model(2, 48, 16, 80, "shared")
    Q, K, V, OUT = (f"model.layers.0.x.{short}_proj" for short in "qkvo")

    def test_by_module_and_by_group(self) -> None:
        by_group = {"model.layers.1.x.q_k_v": 7, self.OUT: 5}
        assert explicit(self.GROUPS, by_group) == [None, 5, None, None, 7, None, None, None]
        by_module = dict.fromkeys((self.Q, self.K, self.V), 9)
        assert explicit(self.GROUPS, by_module)[:2] == [9, None]

    def test_none_is_all_dense(self) -> None:
        assert explicit(self.GROUPS, {}) == [None] * 8

    def test_above_break_even_is_dense(self) -> None:
        # o is 48 × 48: 23 ranks are 2208 of 2304 parameters, 24 are 2304.
        assert explicit(self.GROUPS, {self.OUT: 23})[1] == 23
        assert explicit(self.GROUPS, {self.OUT: 24})[1] is None

    @pytest.mark.parametrize(
        ("ranks", "message"),
        [
            ({"model.layers.0.x.w_proj": 3}, r"expected module names such as .* \['model.*w_proj'"),
            ({"q": 3}, r"expected module names .* got \['q'\]"),
            ({OUT: 0}, "o_proj: expected 1 to 48, got 0"),
            ({OUT: 49}, "o_proj: expected 1 to 48, got 49"),
            ({OUT: -3}, "o_proj: expected 1 to 48, got -3"),
            ({Q: 3, K: 3, V: 4}, r"one rank for all of .*q_proj, .*v_proj.*: 4"),
            ({Q: 3}, r"one rank for all of .*q_proj.*'model.layers.0.x.k_proj': None"),
            ({Q: 3, "model.layers.0.x.q_k_v": 4}, "one rank for all of"),
        ],
    )
    def test_bad_ranks(self, ranks: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            explicit(self.GROUPS, ranks)


class TestRefused:
    GROUPS = model(2, 48, 16, 80, "shared")

    @pytest.mark.parametrize("keep", [0, 0.0, -0.5, 1.01, 60, float("nan"), float("inf")])
    def test_keep(self, keep: float) -> None:
        with pytest.raises(ValueError, match=r"keep: expected 0 < keep <= 1, got"):
            allocate(self.GROUPS, None, keep, allocation="uniform")

    def test_keep_below_a_rank_each(self) -> None:
        # 2 · (128 + 96 + 208 + 128) = 1120 of 35328 parameters.
        with pytest.raises(ValueError, match="0.03 leaves 1059 parameters, .* at least 1120 "):
            allocate(self.GROUPS, None, 0.03, allocation="uniform")
        with pytest.raises(ValueError, match=r"at least 8960 \(rank 8 in each of 8 groups\)"):
            allocate(self.GROUPS, None, 0.25, allocation="uniform", multiple_of=8)

    def test_allocation(self) -> None:
        with pytest.raises(ValueError, match="allocation: expected .*loss.*uniform.*, got 'best'"):
            allocate(self.GROUPS, None, 0.5, allocation="best")

    @pytest.mark.parametrize("multiple_of", [0, -8])
    def test_multiple_of(self, multiple_of: Any) -> None:
        with pytest.raises(ValueError, match="multiple_of: expected a positive integer, got"):
            allocate(self.GROUPS, None, 0.5, allocation="uniform", multiple_of=multiple_of)
