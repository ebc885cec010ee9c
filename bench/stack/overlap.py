"""What each collective of a compiled GPU program overlaps with, read from its schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deinfer_jax.evaluate.communication import KINDS

__all__ = ["Scheduled", "schedule"]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ((?:\(.*?\)|\S+)) ([\w-]+)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*\[[\d,]*\])")
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


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes


def schedule(text: str) -> list[Scheduled]:
    """Collectives of a compiled program, in order.

    Args:
        text: of the compiled HLO, whose order of instructions is the schedule.
    """
    computations, entry = _parsed(text)
    order = list(_flat(computations, entry))
    types = {one.name: one.type for every in computations.values() for one in every}
    ends = {}
    for place, one in enumerate(order):
        if one.opcode.endswith("-done"):
            for name in re.findall(r"%([\w.-]+)", one.rest.partition(")")[0]):
                ends[name] = place
    found = []
    for place, one in enumerate(order):
        kind = _kind(one, computations)
        if kind is None:
            continue
        end = ends.get(one.name, place)
        names = re.findall(r"%([\w.-]+)", one.rest.partition(")")[0])
        operands = tuple(types.get(name, "?").partition("{")[0] for name in names)
        alone = not one.opcode.endswith("-start")
        synchronous = alone or re.search(r'"is_sync":\s*true', one.rest) is not None
        work = (other for other in order[place + 1 : end] if other.opcode not in _NO_WORK)
        found.append(Scheduled(kind, operands, synchronous, tuple(map(_label, work))))
    return found


def _parsed(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    entry = ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            current = computations.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(_Instruction(*found.groups()))
    return computations, entry


def _flat(computations: dict[str, list[_Instruction]], name: str) -> Iterator[_Instruction]:
    """A computation's instructions, with those of command buffers, which are calls, in place."""
    for one in computations[name]:
        called = _CALLED.search(one.rest) if one.opcode == "call" else None
        if called is None:
            yield one
        else:
            yield from _flat(computations, called[1])


def _kind(one: _Instruction, computations: dict[str, list[_Instruction]]) -> str | None:
    name = one.opcode.removesuffix("-start")
    if name in KINDS:
        return name
    called = _CALLED.search(one.rest) if one.opcode == "async-start" else None
    inside = computations[called[1]] if called else []
    return next((other.opcode for other in inside if other.opcode in KINDS), None)


def _label(one: _Instruction) -> str:
    """What an instruction does, in a word or two, and its output's shape."""
    array = _ARRAY.search(one.type)
    shape = f" {array[1]}" if array else ""
    target = _TARGET.search(one.rest)
    if target is not None:
        word = "product" if "gemm" in target[1] or "matmul" in target[1] else target[1]
        return f"{'attention' if 'fmha' in target[1] else word}{shape}"
    if one.opcode == "fusion" and re.search(r"gemm|\bdot\b", one.name + one.rest.partition(")")[0]):
        return f"product{shape}"
    if one.opcode == "fusion" and re.search(r'"kind":\s*"__triton\w*gemm', one.rest):
        return f"product{shape}"
    if one.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return one.opcode
    return f"{one.opcode}{shape}"
