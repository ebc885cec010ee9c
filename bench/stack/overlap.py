"""What each collective of a compiled GPU program overlaps with, read from its schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deinfer_jax.evaluate.communication import KINDS
from deinfer_jax.evaluate.hlo import ARRAY, Instruction, Module, parse

__all__ = ["Scheduled", "schedule"]

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NO_WORK = ("bitcast", "get-tuple-element", "tuple", "parameter", "constant")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A collective in the order in which a program is issued.

    Attributes:
        kind: e.g. ``all-reduce``.
        operands: types of the arrays it takes, ``bf16[64,7680]``.
        synchronous: XLA waits for it at once: it is one instruction, or a pair marked so.
        between: what stands between its start and its done, in order.
    """

    kind: str
    operands: tuple[str, ...]
    synchronous: bool
    between: tuple[str, ...]

    def described(self) -> str:
        """In words."""
        name = f"{self.kind} {' '.join(self.operands)}"
        waits = "synchronous, " if self.synchronous else ""
        return f"{name}: {waits}{', '.join(self.between) or 'nothing between'}"


def schedule(text: str) -> list[Scheduled]:
    """Collectives of a compiled program, in order.

    Args:
        text: of the compiled HLO, whose order of instructions is the schedule.
    """
    module = parse(text)
    order = list(_flat(module, module.entry))
    types = {one.name: one.type for every in module.computations.values() for one in every.values()}
    ends = {
        name: place
        for place, one in enumerate(order)
        if one.opcode.endswith("-done")
        for name in one.operands
    }
    found = []
    for place, one in enumerate(order):
        kind = _kind(one, module)
        if kind is None:
            continue
        end = ends.get(one.name, place)
        operands = tuple(types.get(name, "?").partition("{")[0] for name in one.operands)
        alone = not one.opcode.endswith("-start")
        synchronous = alone or re.search(r'"is_sync":\s*true', one.attributes) is not None
        work = (other for other in order[place + 1 : end] if other.opcode not in _NO_WORK)
        found.append(Scheduled(kind, operands, synchronous, tuple(map(_label, work))))
    return found


def _flat(module: Module, name: str) -> Iterator[Instruction]:
    """A computation's instructions, with those of command buffers, which are calls, in place."""
    for one in module.computations[name].values():
        if one.opcode == "call" and one.called:
            yield from _flat(module, one.called[0][1])
        else:
            yield one


def _kind(one: Instruction, module: Module) -> str | None:
    name = one.opcode.removesuffix("-start")
    if name in KINDS:
        return name
    # XLA's own all-reduce kernels are fusions.
    if one.opcode not in ("async-start", "fusion-start"):
        return None
    inside = module.computations[one.called[0][1]]
    return next((other.opcode for other in inside.values() if other.opcode in KINDS), None)


def _label(one: Instruction) -> str:
    """What an instruction does, in a word or two, and its output's shape."""
    array = ARRAY.search(one.type)
    shape = f" {array[0]}" if array else ""
    target = _TARGET.search(one.attributes)
    if target is not None:
        word = "product" if "gemm" in target[1] or "matmul" in target[1] else target[1]
        return f"{'attention' if 'fmha' in target[1] else word}{shape}"
    if one.opcode == "fusion" and re.search(r"gemm|\bdot\b", one.name):
        return f"product{shape}"
    if one.opcode == "fusion" and re.search(r'"kind":\s*"__triton\w*gemm', one.attributes):
        return f"product{shape}"
    if one.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return one.opcode
    return f"{one.opcode}{shape}"
