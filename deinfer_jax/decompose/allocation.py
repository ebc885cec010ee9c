"""How many ranks each group gets."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deinfer_jax.decompose.groups import Group

__all__ = ["ALLOCATIONS", "allocate", "check", "explicit", "kept", "whole"]

ALLOCATIONS = ("loss", "uniform")
Ranks = list[int | None]  # by group; None = the group stays dense


def kept(groups: Sequence[Group], ranks: Sequence[int | None]) -> float:
    """Parameters of the factors (a shared v once) and of what stays dense, over the dense
    parameters."""
    return sum(map(_cost, groups, ranks)) / sum(group.parameters for group in groups)


def check(groups: Sequence[Group], keep: float, *, allocation: str, multiple_of: int) -> None:
    """Raises ValueError as :func:`allocate` does, before anything is measured."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep: expected 0 < keep <= 1, got {keep}")
    if allocation not in ALLOCATIONS:
        raise ValueError(f"allocation: expected one of {ALLOCATIONS}, got {allocation!r}")
    if whole("multiple_of", multiple_of) < 1:
        raise ValueError(f"multiple_of: expected a positive integer, got {multiple_of}")
    least = sum(_Steps(group, multiple_of).cost(1) for group in groups)
    if _budget(groups, keep) < least:
        raise ValueError(
            f"keep: {keep} leaves {_budget(groups, keep)} parameters, expected at least {least} "
            f"(rank {multiple_of} in each of {len(groups)} groups)"
        )


def allocate(
    groups: Sequence[Group],
    energies: Sequence[np.ndarray] | None,
    keep: float,
    *,
    allocation: str,
    multiple_of: int = 1,
) -> Ranks:
    """Ranks that spend the budget, never more.

    ``uniform``: each group keeps the same fraction, rank = int(out · in · keep / (out + in)).
    ``loss``: singular directions in falling order of s² / (out + in), at least one a group, until
    the budget is spent; a group that reaches break-even stays dense, at out · in, and the excess
    returns to the pool.

    Args:
        groups: of the whole model.
        energies: s² of each group, falling; unused by ``uniform``.
        keep: parameters over dense parameters, 0 < keep ≤ 1.
        allocation: of ``ALLOCATIONS``.
        multiple_of: ranks are multiples of it, but where a group has fewer directions.

    Raises:
        ValueError: keep is out of range, or smaller than a rank of ``multiple_of`` in every group.
    """
    check(groups, keep, allocation=allocation, multiple_of=multiple_of)
    if keep == 1:
        return [None] * len(groups)
    budget = _budget(groups, keep)
    steps = [_Steps(group, multiple_of) for group in groups]
    if allocation == "loss":
        assert energies is not None
        values = [step.values(energy) for step, energy in zip(steps, energies, strict=True)]
        taken = _fill(steps, [1] * len(groups), values, budget)
        return [step.rank(count) for step, count in zip(steps, taken, strict=True)]
    shares = [keep * group.parameters / (group.rank_cost * multiple_of) for group in groups]
    taken = [max(1, int(share)) for share in shares]

    def spent() -> int:
        return sum(step.cost(count) for step, count in zip(steps, taken, strict=True))

    while spent() > budget:  # where a single rank is more than the share of a small group
        above = [(count > 1, count / share) for count, share in zip(taken, shares, strict=True)]
        taken[above.index(max(above))] -= 1
    if spent() < 0.995 * budget:
        # Rounding down leaves too much, as in tiny models: on to those that lost the most by it.
        falling = [share - np.arange(step.count) for step, share in zip(steps, shares, strict=True)]
        taken = _fill(steps, taken, falling, budget)
    return [step.rank(count) for step, count in zip(steps, taken, strict=True)]


def whole(what: str, value: Any) -> int:
    """An integer of any type as int; ValueError for anything else, a bool included."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}: expected an integer, got {value!r}") from None


def explicit(groups: Sequence[Group], ranks: Mapping[str, int]) -> Ranks:
    """Ranks as they are given by module or group name; what is not named stays dense.

    Raises:
        ValueError: an unknown name, a rank out of range, or members of a group that disagree.
    """
    known = {name for group in groups for name in (*group.modules, group.name)}
    unknown = [name for name in ranks if name not in known]
    if unknown:
        raise ValueError(
            f"ranks: expected module names such as {groups[0].modules[0]!r}, got {unknown[:5]}"
        )
    chosen: Ranks = []
    for group in groups:
        said = {ranks[name] for name in {*group.modules, group.name} if name in ranks}
        missing = [m for m in group.modules if m not in ranks and group.name not in ranks]
        if len(said) > 1 or (said and missing):
            raise ValueError(
                f"ranks: expected one rank for all of {', '.join(group.modules)}, which share a "
                f"factor; got { {m: ranks.get(m) for m in group.modules} }"
            )
        rank = said.pop() if said else None
        if rank is not None and not 1 <= rank <= group.most:
            raise ValueError(f"ranks: {group.name}: expected 1 to {group.most}, got {rank}")
        chosen.append(None if rank is not None and rank > group.break_even else rank)
    return chosen


def _budget(groups: Sequence[Group], keep: float) -> int:
    return int(keep * sum(group.parameters for group in groups))


class _Steps:
    """The sizes that a group can have: ranks in multiples up to break-even, then dense."""

    def __init__(self, group: Group, multiple_of: int) -> None:
        self.group, self.step = group, min(multiple_of, max(1, group.break_even))
        self.last = group.break_even // self.step  # steps that are ranks
        self.count = self.last + 1

    def rank(self, taken: int) -> int | None:
        """After so many steps; None = dense."""
        return None if taken > self.last else taken * self.step

    def cost(self, taken: int) -> int:
        """Parameters after so many steps."""
        return _cost(self.group, self.rank(taken))

    def values(self, energy: np.ndarray) -> np.ndarray:
        """What each step brings a parameter; the last, to dense, brings all that is left."""
        edges = np.arange(self.last + 1) * self.step
        gains = np.append(
            np.add.reduceat(energy[: edges[-1]], edges[:-1]) if self.last else [],
            energy[edges[-1] :].sum(),
        )
        costs = [
            self.cost(taken + 1) - (self.cost(taken) if taken else 0) for taken in range(self.count)
        ]
        return gains / np.maximum(costs, 1)


def _fill(
    steps: Sequence[_Steps], taken: list[int], values: Sequence[np.ndarray], budget: int
) -> list[int]:
    """Takes the most valuable next step of any group, until no step fits in what is left."""
    taken = list(taken)
    left = budget - sum(step.cost(count) for step, count in zip(steps, taken, strict=True))
    queue = [(-values[i][count], i) for i, count in enumerate(taken) if count < steps[i].count]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        cost = steps[i].cost(taken[i] + 1) - steps[i].cost(taken[i])
        if cost > left:
            continue  # nor will a later step of this group: steps but the last cost the same
        left -= cost
        taken[i] += 1
        if taken[i] < steps[i].count:
            heapq.heappush(queue, (-values[i][taken[i]], i))
    return taken


def _cost(group: Group, rank: int | None) -> int:
    return group.parameters if rank is None else rank * group.rank_cost
