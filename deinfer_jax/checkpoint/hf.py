"""Hugging Face directories: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deinfer_jax.checkpoint.factors import factor_problems
from deinfer_jax.checkpoint.source import (
    Checkpoint,
    check_names,
    import_transformers,
    listing,
)
from deinfer_jax.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Buffers that old versions of transformers saved; the model computes them from its config.
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class HuggingFaceCheckpoint(Checkpoint):
    """A directory with ``config.json`` and ``model.safetensors`` or an index of shards.

    ``eos_token_id`` of ``generation_config.json`` comes first in ``config.eos_token_ids``, then
    that of ``config.json``. Names are not interpreted; a redundant ``lm_head.weight`` of tied
    embeddings and known buffers are left out.

    Raises:
        FileNotFoundError: no config.json, no safetensors, or a shard of the index is missing.
        ValueError: an unsupported model or data type, or a damaged file, which is named.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._hf = hf = _read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self._generation = _read_json(generation) if generation.is_file() else None
        shards, index = _find_shards(self.path)
        entries = [item for shard in shards for item in read_header(shard).items()]
        if index is not None:
            _check_index(self.path / INDEX, index, entries)
        self._entries = {name: entry for name, entry in entries if not IGNORED.search(name)}
        for name, entry in self._entries.items():
            if entry.dtype not in DTYPES:
                raise ValueError(
                    f"{entry.shard}: tensor {name!r} has dtype {entry.dtype}, expected one of "
                    f"{', '.join(DTYPES)}"
                )
        if not self._entries:
            raise ValueError(f"{shards[0]}: expected the tensors of a model, got none")
        self.config = self._read_config(hf)
        self._check_head()
        if self.config.low_rank:
            self._check_factors()
        plural = "" if len(shards) == 1 else "s"
        self.description = f"Hugging Face directory, {len(shards)} shard{plural}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint.shapes``."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def stored_types(self) -> dict[str, str]:
        """See ``Checkpoint.stored_types``."""
        return {name: entry.dtype for name, entry in self._entries.items()}

    def stored_bytes(self) -> int:
        """See ``Checkpoint.stored_bytes``."""
        return sum(entry.n_bytes for entry in self._entries.values())

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Checkpoint.tensors``."""
        from safetensors import SafetensorError, safe_open

        wanted = check_names(self.path, self._entries if names is None else names, self._entries)
        by_shard: dict[Path, list[str]] = {}
        for name, entry in self._entries.items():
            if name in wanted:
                by_shard.setdefault(entry.shard, []).append(name)
        for shard, held in by_shard.items():
            try:
                file = safe_open(shard, framework="numpy")
            except SafetensorError as error:
                raise ValueError(f"{shard}: safetensors cannot read it: {error}") from error
            with file:
                for name in held:
                    # Not kept in a local name, which would outlive the caller's.
                    yield name, file.get_tensor(name)

    def hf_config(self) -> dict[str, Any]:
        """See ``Checkpoint.hf_config``."""
        return copy.deepcopy(self._hf)

    def generation_config(self) -> dict[str, Any] | None:
        """See ``Checkpoint.generation_config``."""
        return copy.deepcopy(self._generation)

    def files(self) -> list[Path]:
        """See ``Checkpoint.files``."""
        read = [self.path / "config.json", *{entry.shard for entry in self._entries.values()}]
        if self._generation is not None:
            read.append(self.path / "generation_config.json")
        return sorted(read)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See ``Checkpoint.tokenizer``."""
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            raise FileNotFoundError(
                f"{self.path}: expected a tokenizer ({', '.join(TOKENIZER_FILES)}), "
                f"found {listing(self.path)}"
            )
        tokenizers = import_transformers().AutoTokenizer
        return tokenizers.from_pretrained(self.path, local_files_only=True)

    def _read_config(self, hf: dict[str, Any]) -> ModelConfig:
        try:
            config = ModelConfig.from_hf(hf)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path / 'config.json'}: {error}") from error
        if (hf.get("dtype") or hf.get("torch_dtype")) is None:  # then the weights say it
            sizes: Counter[str] = Counter()
            for entry in self._entries.values():
                sizes[entry.dtype] += math.prod(entry.shape)
            config = config.replace(dtype=DTYPES[sizes.most_common(1)[0][0]])
        if self._generation is not None:
            ids = self._generation.get("eos_token_id")
            ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
            eos = tuple(dict.fromkeys([*ids, *config.eos_token_ids]))
            config = config.replace(eos_token_ids=eos)
        return config

    def _check_head(self) -> None:
        if self.config.tie_embeddings:
            self._entries.pop("lm_head.weight", None)  # the embeddings once more
        elif "lm_head.weight" not in self._entries:
            # A decomposed head is not called lm_head.weight, but starts with lm_head.
            if not any(name.startswith("lm_head.") for name in self._entries):
                raise ValueError(
                    f"{self.path}: expected a tensor 'lm_head.weight', as config.json says "
                    "tie_word_embeddings = false, got none"
                )

    def _check_factors(self) -> None:
        problems = factor_problems(self.config, self.shapes())
        if problems:
            more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ValueError(f"{self.path}: {'; '.join(problems[:20])}{more}")


def _find_shards(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with the tensors, and the index (file by tensor) if there is one."""
    if (directory / SINGLE).is_file():  # transformers prefers it to an index as well
        return [directory / SINGLE], None
    path = directory / INDEX
    if not path.is_file():
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
        hint = "; pickled .bin and .pt files are not read, convert them to safetensors"
        gguf = "; to read a .gguf file beside config.json, pass the path of the file"
        raise FileNotFoundError(
            f"{directory}: expected {SINGLE} or {INDEX}, found {listing(directory)}"
            f"{hint if pickled else ''}{gguf if any(directory.glob('*.gguf')) else ''}"
        )
    index = _read_json(path).get("weight_map")
    if not isinstance(index, dict) or not {str} == {type(v) for v in index.values()}:
        raise ValueError(f"{path}: expected 'weight_map', a file name by tensor, got {index!r}")
    shards = []
    for name in sorted(set(index.values())):
        if Path(name).name != name:  # an index never leads out of its directory
            raise ValueError(f"{path}: expected names of files beside it, got {name!r}")
        if not (directory / name).is_file():
            tensors = sum(shard == name for shard in index.values())
            raise FileNotFoundError(
                f"{directory / name}: expected a shard with {tensors} tensors, as {INDEX} says; "
                "the file is missing"
            )
        shards.append(directory / name)
    return shards, index


def _check_index(path: Path, index: dict[str, str], entries: list[tuple[str, _Entry]]) -> None:
    found = {(name, entry.shard.name) for name, entry in entries}
    for name, shard in index.items():
        if (name, shard) not in found and not IGNORED.search(name):
            raise ValueError(f"{path}: expected tensor {name!r} in {shard}, which does not have it")
    for name, shard in found:
        if index.get(name) != shard and not IGNORED.search(name):
            raise ValueError(
                f"{path}: tensor {name!r} is in {shard}, but the index says {index.get(name)}"
            )


def read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of a file in the order of their data, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            said = f"8 + {length} bytes" if len(prefix) == 8 else "8 bytes at least"
            raise ValueError(f"{path}: corrupt header: expected {said}, the file has {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            start, stop = item["data_offsets"]
            entries[name] = (
                item["dtype"],
                tuple(int(n) for n in item["shape"]),
                int(start),
                int(stop),
            )
        end = max((stop for *_, stop in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: corrupt header: expected JSON with dtype, shape and data_offsets by tensor, "
            f"got {raw[:40]!r} ({error})"
        ) from error
    if 8 + length + end != size:
        kind = "truncated" if 8 + length + end > size else "too long"
        raise ValueError(f"{path}: {kind}: the header says {8 + length + end} bytes, it has {size}")
    for name, (dtype, shape, start, stop) in entries.items():
        expected = math.prod(shape) * ITEM_SIZES.get(dtype, 0)
        if dtype in ITEM_SIZES and stop - start != expected:
            raise ValueError(
                f"{path}: corrupt header: tensor {name!r}, {dtype} {list(shape)}: expected "
                f"{expected} bytes, got {stop - start}"
            )
    return {
        name: _Entry(path, dtype, shape, start)
        for name, (dtype, shape, start, _) in entries.items()
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a JSON file, found nothing")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
