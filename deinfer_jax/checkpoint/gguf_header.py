"""The header of a GGUF file, read in one bounds-checked pass.

``gguf.GGUFReader`` makes a numpy view of every word of the vocabulary (2.3 s for 49 k words, where
this takes 0.1 s), believes a corrupt array count, and meets a cut file with IndexErrors. The types
and their block sizes come from the package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deinfer_jax.checkpoint.source import GGUF_MAGIC

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

__all__ = ["GGUFTensor", "read_header"]

VERSIONS = (2, 3)
# struct codes of GGUF's scalar types; 8 is a string and 9 an array.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor's data stands, and what it is."""

    name: str  # in the file
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    n_bytes: int


class _Cursor:
    """Reads a GGUF header front to back; ``what`` says in errors what is being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.what = path, data, 0, "the header"

    def need(self, count: int) -> None:
        if self.position + count > len(self.data):
            raise ValueError(
                f"{self.path}: truncated or corrupt at {self.what}: expected at least "
                f"{self.position + count} bytes, the file has {len(self.data)}"
            )

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.need(size)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += size
        return values

    def string(self) -> str:
        size = self.scalar("Q")
        self.need(size)
        raw = self.data[self.position : self.position + size]
        self.position += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}: corrupt at {self.what}: expected UTF-8, got {raw[:40]!r}"
            ) from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            value = self.scalar(SCALARS[kind])
            # A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06.
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(
                f"{self.path}: corrupt at {self.what}: expected a type 0 to 12, got {kind}"
            )
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            return list(self.scalars(SCALARS[inner], count))
        self.need(8 * count)  # the least a string or an array takes: a corrupt count fails at once
        return [self.value(inner) for _ in range(count)]


def read_header(path: Path) -> tuple[int, dict[str, Any], list[GGUFTensor]]:
    """Version, metadata and tensors, whose data is checked to lie within the file."""
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
        if magic != GGUF_MAGIC:
            raise ValueError(f"{path}: expected a GGUF file (magic {GGUF_MAGIC!r}), got {magic!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(_Cursor(path, data))


def _parse_header(cursor: _Cursor) -> tuple[int, dict[str, Any], list[GGUFTensor]]:
    cursor.position = len(GGUF_MAGIC)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        hint = " (big-endian files are not read)" if version % 65536 == 0 else ""
        raise ValueError(f"{cursor.path}: GGUF version {version}{hint}; expected 2 or 3")
    tensor_count, metadata_count = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for number in range(metadata_count):
        cursor.what = f"metadata entry {number + 1} of {metadata_count}"
        key = cursor.string()
        cursor.what += f", {key!r}"
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for number in range(tensor_count):
        cursor.what = f"tensor header {number + 1} of {tensor_count}"
        name = cursor.string()
        shape = cursor.scalars("Q", cursor.scalar("I"))[::-1]  # innermost first in the file
        infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(
            f"{cursor.path}: metadata 'general.alignment': expected >= 1, got {alignment!r}"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = [_tensor(cursor, name, shape, kind, start + at) for name, shape, kind, at in infos]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError(f"{cursor.path}: corrupt: a tensor is listed twice")
    return version, metadata, tensors


def _tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{cursor.path}: tensor {name!r} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(
            f"{cursor.path}: tensor {name!r}: expected rows of a multiple of {block} elements "
            f"({type_.name}), got shape {list(shape)}"
        )
    n_bytes = math.prod(shape) // block * block_bytes
    cursor.position, cursor.what = offset, f"the data of tensor {name!r}"
    cursor.need(n_bytes)
    return GGUFTensor(name, type_, shape, offset, n_bytes)
