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
    the budget is spent; a group stays dense, at out · in, as soon as all that is left of it is
    worth more a parameter than its next direction, which it is before break-even.

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
        taken = _spend(steps, energies, budget)
        return [step.rank(count) for step, count in zip(steps, taken, strict=True)]
    shares = [keep * group.parameters / (group.rank_cost * multiple_of) for group in groups]
    taken = [max(1, int(share)) for share in shares]

    spent = sum(step.cost(count) for step, count in zip(steps, taken, strict=True))
    while spent > budget:  # where a single rank is more than the share of a small group
        above = [(count > 1, count / share) for count, share in zip(taken, shares, strict=True)]
        i = above.index(max(above))
        spent -= steps[i].price(taken[i] - 1)
        taken[i] -= 1
    # Rounding down leaves too much in tiny models and with tidy ranks: one more where it took the
    # most; dense where not even that is enough.
    for most in ([step.last for step in steps], [step.count for step in steps]):
        while spent < 0.995 * budget:
            fitting = [
                (shares[i] - count, i)
                for i, count in enumerate(taken)
                if count < most[i] and steps[i].price(count) <= budget - spent
            ]
            if not fitting:
                break
            i = max(fitting)[1]
            spent += steps[i].price(taken[i])
            taken[i] += 1
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

    def price(self, taken: int) -> int:
        """Parameters of the step after so many."""
        return self.cost(taken + 1) - self.cost(taken)


def _spend(steps: Sequence[_Steps], energies: Sequence[np.ndarray], budget: int) -> list[int]:
    """Takes the step that is worth most a parameter, of any group, until none fits in what is left.

    A group's next step is its next rank, or the jump to dense where that is worth more: it brings
    all that is left of the group, for less and less as break-even comes near. In falling order of
    worth these are the vertices of each group's concave envelope, so but for the last steps, which
    may not fit, no allocation loses less.
    """
    tails = [
        np.append(np.cumsum(energy[::-1])[::-1], 0.0)[: step.last * step.step + 1 : step.step]
        for step, energy in zip(steps, energies, strict=True)
    ]
    taken = [1] * len(steps)
    left = budget - sum(step.cost(1) for step in steps)
    jumps = [True] * len(steps)  # whether a jump to dense may still fit

    def push(i: int) -> None:
        step, count = steps[i], taken[i]
        if count >= step.count:
            return
        price = step.cost(step.count) - step.cost(count)
        moves = [(tails[i][count] / max(price, 1), step.count)] if jumps[i] else []
        if count < step.last:
            gain = tails[i][count] - tails[i][count + 1]
            moves.append((gain / step.price(count), count + 1))
        if moves:
            worth, target = max(moves, key=lambda move: (move[0], move[1]))
            heapq.heappush(queue, (-worth, i, target))

    queue: list[tuple[float, int, int]] = []
    for i in range(len(steps)):
        push(i)
    while queue:
        _, i, target = heapq.heappop(queue)
        price = steps[i].cost(target) - steps[i].cost(taken[i])
        if price <= left:
            left -= price
            taken[i] = target
        elif target == steps[i].count and jumps[i]:
            jumps[i] = False
        else:
            continue  # ranks of a group all cost the same
        push(i)
    return taken


def _cost(group: Group, rank: int | None) -> int:
    return group.parameters if rank is None else rank * group.rank_cost
