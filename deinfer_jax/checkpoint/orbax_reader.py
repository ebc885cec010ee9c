"""Orbax checkpoints of canonical tensors, as ``LLM.save`` writes them, with a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deinfer_jax.checkpoint.hf import DTYPES, HuggingFaceCheckpoint, _Entry, _read_json
from deinfer_jax.checkpoint.source import (
    ORBAX_MANIFEST,
    ORBAX_METADATA,
    Block,
    SlicedCheckpoint,
    check_names,
)

__all__ = ["OrbaxCheckpoint"]

# Orbax's own: nodes of OCDBT's tree that are kept, so that each is read once.
CONTEXT = {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}}


class OrbaxCheckpoint(HuggingFaceCheckpoint, SlicedCheckpoint):
    """A directory in which Orbax saved a dict of arrays by canonical name (nested ones have their
    keys joined by dots), with the ``config.json`` of a Hugging Face directory, and perhaps its
    ``generation_config.json`` and tokenizer.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: an unsupported model or data type, or a damaged or unfinished directory; what
            is known of the tensor is said.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if ".orbax-checkpoint-tmp" in self.path.name:
            raise ValueError(
                f"{self.path}: expected a finished Orbax checkpoint, got a directory that Orbax "
                "has not finished writing"
            )
        self._hf = hf = _read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self._generation = _read_json(generation) if generation.is_file() else None
        self._stores = self._open()
        names = {dtype: short for short, dtype in DTYPES.items()}
        self._entries = {}
        for name, store in self._stores.items():
            kind = store.dtype.name
            if kind not in names:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has dtype {kind}, expected one of "
                    f"{', '.join(names)}"
                )
            self._entries[name] = _Entry(self.path, names[kind], tuple(store.shape), 0)
        self.config = self._read_config(hf)
        self._check_head()
        if self.config.low_rank:
            self._check_factors()
        self.description = f"Orbax checkpoint, {len(self._entries)} tensors"

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Checkpoint.tensors``."""
        wanted = check_names(self.path, self._entries if names is None else names, self._entries)
        for name in self._entries:
            if name in wanted:
                yield name, next(self.blocks([(name, ())]))

    def blocks(self, wanted: Sequence[Block]) -> Iterator[np.ndarray]:
        """See ``SlicedCheckpoint.blocks``; a chunk that a block touches is read whole."""
        import tensorstore

        with tensorstore.Batch() as batch:  # one chunk is read once for all blocks that touch it
            reading = [
                (name, self._stores[name][index or ...].read(batch=batch)) for name, index in wanted
            ]
        reading.reverse()
        while reading:
            name, future = reading.pop()
            try:
                block = future.result()
            except ValueError as error:
                raise ValueError(
                    f"{self.path}: tensor {name} cannot be read, the checkpoint is damaged: {error}"
                ) from error
            del future
            yield block

    def files(self) -> list[Path]:
        """See ``Checkpoint.files``: everything but the tokenizer."""
        inner = [path for path in self.path.glob("*/**/*") if path.is_file()]
        names = ("config.json", "generation_config.json", ORBAX_METADATA, ORBAX_MANIFEST)
        return sorted([*inner, *(self.path / n for n in names if (self.path / n).is_file())])

    def _open(self) -> dict[str, Any]:
        """The arrays, of which nothing but their metadata is read."""
        import tensorstore

        path = self.path / ORBAX_METADATA
        metadata = _read_json(path)
        try:
            names = [
                ".".join(str(part["key"]) for part in leaf["key_metadata"])
                for leaf in metadata["tree_metadata"].values()
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected 'tree_metadata' with the keys of every array, got "
                f"{json.dumps(metadata)[:80]} ({error!r})"
            ) from error
        if not names:
            raise ValueError(f"{path}: expected the tensors of a model, got none")
        if metadata.get("use_ocdbt", True) and not (self.path / ORBAX_MANIFEST).is_file():
            raise ValueError(
                f"{self.path}: damaged or unfinished: expected {ORBAX_MANIFEST}, which lists what "
                "Orbax has stored; the file is missing"
            )
        context = tensorstore.Context(CONTEXT)
        opening = {
            name: tensorstore.open(self._spec(name, metadata), read=True, context=context)
            for name in names
        }
        stores = {}
        for name, future in opening.items():
            try:
                stores[name] = future.result()
            except ValueError as error:
                raise ValueError(
                    f"{self.path}: tensor {name} cannot be opened, the checkpoint is damaged: "
                    f"{error}"
                ) from error
        return stores

    def _spec(self, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
        directory: dict[str, Any] = {"driver": "file", "path": f"{self.path.absolute()}/"}
        if metadata.get("use_ocdbt", True):
            kvstore = {"driver": "ocdbt", "base": directory, "path": f"{name}/"}
            kvstore["cache_pool"] = "cache_pool#ocdbt"
        else:
            kvstore = {"driver": "file", "path": f"{self.path.absolute()}/{name}/"}
        return {
            "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
            "kvstore": kvstore,
            "open": True,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,  # a chunk that is missing is no chunk of zeros
        }
