"""Text of compiled HLO, as instructions by computation."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ARRAY", "NAME", "Instruction", "Module", "parse"]

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")  # element type and sizes
NAME = re.compile(r"%([\w.-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """``%name = type opcode(%operands), attributes``."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[tuple[str, str]]:
        """Role and name of the computations that it calls, but for the branches of a ``case``."""
        return _CALLED.findall(self.attributes)


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program of one device.

    Attributes:
        computations: by name; instructions by name, in the order in which they are issued.
        entry: where it begins.
        partitions: devices that run it.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    partitions: int


def parse(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
        ValueError: there is no ``ENTRY``.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    header = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            current = computations.setdefault(begins[2], {})
            entry = begins[2] if begins[1] else entry
        elif found := _INSTRUCTION.match(line):
            current[found[1]] = _instruction(found[1], found[2])
    if not entry:
        raise ValueError("expected the text of a compiled HLO module, got one without an ENTRY")
    return Module(computations, entry, int(header[1]) if header else 1)


def _instruction(name: str, text: str) -> Instruction:
    """Of ``(f32[8]{0}, f32[4]{0}) all-reduce(%a, %b), channel_id=1``."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    begin = rest.index("(")
    close = _closing(rest, begin)
    operands = tuple(NAME.findall(rest[begin:close]))
    return Instruction(name, kind, rest[:begin], operands, rest[close:])


def _closing(text: str, begin: int) -> int:
    """Behind the parenthesis that closes the one at ``begin``."""
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"expected balanced parentheses, got {text!r}")
