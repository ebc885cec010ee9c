"""Writes the canonical form of a decomposed model piece by piece: an interrupted run can go on, and
never leaves anything that loads as a model.

While it is being written, a model ``dst`` is a directory ``dst.partial`` beside it::

    unfinished.json       the run's fingerprint; marks the directory
    lock                  held by the process that writes
    pieces/*.safetensors  finished parts of the model, each a shard of it later
    records/*.json        what a resumed run needs besides, no part of the model
    writing/              what is not finished; emptied at the start
    shards.json, model/   piece by shard, and the model, while it is being published
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from deinfer_jax.checkpoint.hf import HuggingFaceCheckpoint, read_header
from deinfer_jax.checkpoint.workspace import Workspace, sync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MODEL_DTYPES", "CanonicalWriter", "partial_of"]

MODEL_DTYPES = ("float32", "float16", "bfloat16")
SUFFIX = ".safetensors"
PIECES, RECORDS = "pieces", "records"


class CanonicalWriter:
    """A canonical checkpoint in the making. Use it as a context manager: leaving it unpublished
    keeps what is finished, and the same run started again goes on from there; where nothing is
    finished, nothing is left behind.

    Args:
        dst: directory of the model, which must not exist; parents are made.
        fingerprint: what fixes the result (source, method, keep, …), as JSON values.

    Attributes:
        dst: as above.
        partial: ``<dst>.partial``, where the work is kept until :meth:`publish`.
        resumed: whether an earlier run's directory was found.

    Raises:
        FileExistsError: dst exists.
        ValueError: dst.partial is of a run with another fingerprint (the keys are named), or none
            of ours.
        BlockingIOError: another process is writing it.
    """

    def __init__(self, dst: str | os.PathLike[str], fingerprint: Mapping[str, Any]) -> None:
        self.dst = Path(dst)
        self.partial = partial_of(self.dst)
        self._refuse_existing()
        self._workspace = Workspace(self.partial, fingerprint)
        try:
            self._refuse_existing()  # another process may have finished it in the meantime
            self.resumed = self._workspace.resumed
            for folder in (PIECES, RECORDS):
                (self.partial / folder).mkdir(exist_ok=True)
            self._unpublish()
        except BaseException:
            self.close()
            raise

    def has(self, piece: str) -> bool:
        """Whether ``piece`` was finished, in this run or an earlier one."""
        return self._file(piece).is_file()

    def pieces(self) -> list[str]:
        """Finished pieces in natural order: ``layer-2`` comes before ``layer-10``."""
        files = (self.partial / PIECES).glob(f"*{SUFFIX}")
        return sorted((file.name.removesuffix(SUFFIX) for file in files), key=_natural)

    def write(self, piece: str, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes a piece, whole or not at all; one of that name is replaced.

        Args:
            piece: its name, of letters, digits and ``._-``.
            tensors: by canonical name, in the dtype they are to be stored in: float32, float16 or
                bfloat16.

        Raises:
            OSError: it cannot be written. Where the disk is full (``errno.ENOSPC``) the message
                gives the bytes needed and free; what is finished is kept.
        """
        if not tensors:
            raise ValueError(f"piece {piece!r}: expected tensors, got none")
        for name, array in tensors.items():
            if array.dtype.name not in MODEL_DTYPES:
                raise ValueError(
                    f"piece {piece!r}, tensor {name}: expected {', '.join(MODEL_DTYPES)}, "
                    f"got {array.dtype.name}"
                )
        self._workspace.write_arrays(self._file(piece), tensors)

    def has_record(self, name: str) -> bool:
        """Whether a record was written."""
        return self._record(name).is_file()

    def write_record(self, name: str, value: Any) -> None:
        """Writes JSON for a resumed run to read; gone when the model is published.

        Args:
            name: of letters, digits and ``._-``.
            value: of JSON; floats keep every bit.
        """
        self._workspace.write_json(self._record(name), value)

    def read_record(self, name: str) -> Any:
        """What :meth:`write_record` wrote.

        Raises:
            FileNotFoundError: it is not there; see :meth:`has_record`.
        """
        return json.loads(self._record(name).read_bytes())

    def publish(
        self,
        hf_config: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation_config: Mapping[str, Any] | None = None,
        *,
        records: Mapping[str, Any] | None = None,
    ) -> Path:
        """Makes the pieces a model at ``dst``, in one rename, and deletes everything else.

        Args:
            hf_config: content of config.json, with the block ``low_rank``
                (``config_hf.low_rank_block``).
            tokenizer: saved with the model.
            generation_config: content of generation_config.json.
            records: other JSON files of the model, content by file name.

        Returns:
            ``dst``.

        Raises:
            ValueError: the pieces are not the model that the config describes (what opening a
                checkpoint checks), or have a tensor in common. They are kept.
            FileExistsError: dst has come into being meanwhile.
            OSError: see :meth:`write`.
        """
        pieces = self.pieces()
        if not pieces:
            raise ValueError(f"{self.partial}: expected pieces of a model, got none")
        shards, model = _shard_names(pieces), self.partial / "model"
        write_json = self._workspace.write_json
        index = self._index(shards)
        write_json(self.partial / "shards.json", shards)
        try:
            model.mkdir()
            for shard, piece in shards.items():
                os.replace(self._file(piece), model / shard)
            if len(shards) > 1:
                write_json(model / f"model{SUFFIX}.index.json", index)
            if generation_config is not None:
                write_json(model / "generation_config.json", dict(generation_config))
            for name, value in (records or {}).items():
                write_json(model / name, value)
            if tokenizer is not None:
                with self._workspace.needing("a few megabytes for the tokenizer"):
                    tokenizer.save_pretrained(model)
            write_json(model / "config.json", dict(hf_config))
            HuggingFaceCheckpoint(model)
            for path in (*model.rglob("*"), model):
                sync(path)
            self._refuse_existing()
            os.rename(model, self.dst)
        except BaseException:
            self._unpublish()
            raise
        sync(self.dst.parent)
        self._workspace.delete()
        return self.dst

    def close(self) -> None:
        """Lets go of the directory; what is finished stays."""
        self._workspace.close()

    def __enter__(self) -> CanonicalWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.dst):
            raise FileExistsError(
                f"{self.dst}: expected a path where nothing is yet, but it exists; choose another "
                "or delete it"
            )

    def _file(self, piece: str) -> Path:
        return self.partial / PIECES / f"{_checked(piece)}{SUFFIX}"

    def _record(self, name: str) -> Path:
        return self.partial / RECORDS / f"{_checked(name)}.json"

    def _index(self, shards: Mapping[str, str]) -> dict[str, Any]:
        """The content of the shards' index."""
        places: dict[str, str] = {}
        size = 0
        for shard, piece in shards.items():
            entries = read_header(self._file(piece))
            twice = sorted(places.keys() & entries.keys())
            if twice:
                raise ValueError(
                    f"tensor {twice[0]} is in the pieces {shards[places[twice[0]]]!r} and "
                    f"{piece!r}; expected it once"
                )
            places |= dict.fromkeys(entries, shard)
            size += sum(entry.n_bytes for entry in entries.values())
        return {"metadata": {"total_size": size}, "weight_map": places}

    def _unpublish(self) -> None:
        """Gives shards their pieces' names again, after a publication that did not succeed."""
        record, model = self.partial / "shards.json", self.partial / "model"
        if record.is_file():
            for shard, piece in json.loads(record.read_bytes()).items():
                if (model / shard).is_file():
                    os.replace(model / shard, self._file(piece))
        shutil.rmtree(model, ignore_errors=True)
        record.unlink(missing_ok=True)


def partial_of(dst: Path) -> Path:
    """``<dst>.partial``, where a model is while it is being written."""
    if not dst.name:
        raise ValueError(f"expected a path with a name to write a model to, got {str(dst)!r}")
    return dst.with_name(f"{dst.name}.partial")


def _shard_names(pieces: list[str]) -> dict[str, str]:
    """Piece by shard, in order."""
    if len(pieces) == 1:
        return {f"model{SUFFIX}": pieces[0]}
    total = len(pieces)
    return {f"model-{i:05}-of-{total:05}{SUFFIX}": piece for i, piece in enumerate(pieces, 1)}


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"piece or record: expected letters, digits and '._-', got {name!r}")
    return name


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key in which numbers count as such, and before letters."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return [(not number, int(number or 0), text) for number, text in parts]
