"""Saves a model that is on devices as an Orbax checkpoint of its canonical tensors.

The directory is a plain Orbax checkpoint (OCDBT, zarr, not compressed) of a flat dict, tensors by
canonical name, with ``config.json``, ``generation_config.json`` and the tokenizer's files beside
Orbax's own. Importing this module imports Orbax, which takes most of a second.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from deinfer_jax.checkpoint.canonical import partial_of
from deinfer_jax.checkpoint.orbax_reader import OrbaxCheckpoint
from deinfer_jax.checkpoint.workspace import NO_SPACE, Workspace, sync
from deinfer_jax.config import ModelConfig
from deinfer_jax.layers.parameter import Declaration, Source

__all__ = ["chunk_shape", "save_orbax"]

SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 12, 1 << 22  # bytes
AT_ONCE = 1 << 26  # bytes of tensors that are written together, which share a wait for the disk
# A node of OCDBT's tree is written anew with every tensor; Orbax's default is one node for all.
TREE_NODE_BYTES = 1 << 20
SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # how tensorstore reports the system's


def save_orbax(
    dst: str | os.PathLike[str],
    config: ModelConfig,
    declared: Sequence[Declaration],
    weights: Mapping[Any, Any],
    tokenizer: Any = None,
) -> Path:
    """Writes a model, whole or not at all: until the end it is in ``<dst>.partial``.

    On the host there are at most a parameter, one of its tensors, 64 MiB of others that are being
    written and the copy that tensorstore makes of those.

    Args:
        dst: directory, which must not exist; parents are made.
        config: of the model, with the dtype of its parameters.
        declared: parameters as the model declares them on these devices.
        weights: nested dict of their arrays.
        tokenizer: saved with the model.

    Returns:
        ``dst``.

    Raises:
        FileExistsError: dst exists.
        BlockingIOError: another process is writing it.
        OSError: it cannot be written; where there is no space (``errno.ENOSPC``), with the bytes
            needed and free.
        ValueError: ``<dst>.partial`` is there and is none of ours.
        NotImplementedError: the model is spread over several processes.
    """
    dst = Path(dst).absolute()
    _refuse_existing(dst)
    arrays = {d.path: _at(weights, d.path) for d in declared}
    if not all(array.is_fully_addressable for array in arrays.values()):
        raise NotImplementedError(
            "saving: expected all devices of the model in this process, got a model that is "
            "spread over several"
        )
    tensors = {
        source.name: _Tensor(arrays[d.path], place, source)
        for place, d in enumerate(declared)
        for source in d.sources
    }
    needed = sum(tensor.stored_bytes for tensor in tensors.values())
    workspace = Workspace(partial_of(dst), {"writes": "an Orbax checkpoint"})
    try:
        model = workspace.path / "model"
        for leftover in workspace.path.glob("model*"):  # of a run that was killed
            shutil.rmtree(leftover)
        free = shutil.disk_usage(workspace.path).free
        if free < needed:
            raise _no_space(dst, needed, free)
        _write_tensors(model, tensors, needed)
        if config.eos_token_ids:
            ids = list(config.eos_token_ids)
            generation = {"bos_token_id": config.bos_token_id, "eos_token_id": ids}
            _write_json(model / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save_pretrained(model)
        _write_json(model / "config.json", config.to_hf())
        OrbaxCheckpoint(model)
        for path in (*model.rglob("*"), model):
            sync(path)
        _refuse_existing(dst)
        os.rename(model, dst)
        sync(dst.parent)
    finally:
        workspace.delete()
    return dst


def chunk_shape(shape: Sequence[int], item_size: int) -> tuple[int, ...]:
    """How a tensor is cut on disk, where a chunk is read whole or not at all.

    A device's part is some rows or some columns. Rows are cut into 32 parts, as heads and ranks
    rarely divide; columns into 8, or 24, which most numbers of devices divide; but no chunk is
    below a page of the disk, or above 4 MiB.

    Example: 4096 × 1280 numbers of 2 bytes are 256 chunks of 128 × 160, 41 kB each.

    Args:
        shape: of the tensor, one or two axes.
        item_size: bytes of a number.
    """
    parts = [32, *(24 if size % 24 == 0 else 8 for size in shape[1:])]

    def chunk() -> tuple[int, ...]:
        return tuple(-(-size // count) for size, count in zip(shape, parts, strict=True))

    while max(parts) > 1 and math.prod(chunk()) * item_size < SMALLEST_CHUNK:
        widest = parts.index(max(parts))
        parts[widest] = -(-parts[widest] // 2)
    while math.prod(chunk()) * item_size > LARGEST_CHUNK:
        parts[0] *= 2
    return chunk()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A leaf of the tree that Orbax saves: a tensor that is brought to the host when its turn has
    come.

    Attributes:
        parameter: the array on the devices that has it.
        place: of that parameter among all.
        source: where it stands in there.
    """

    parameter: jax.Array
    place: int
    source: Source

    @property
    def chunk(self) -> tuple[int, ...]:
        return chunk_shape(self.source.shape, self.parameter.dtype.itemsize)

    @property
    def stored_bytes(self) -> int:
        """With the padding of the last chunks."""
        sizes = (
            -(-size // chunk) * chunk
            for size, chunk in zip(self.source.shape, self.chunk, strict=True)
        )
        return math.prod(sizes) * self.parameter.dtype.itemsize


class _TensorHandler(type_handlers.NumpyHandler):
    """Writes tensors in their order, small ones together, as the arrays that they are, in chunks of
    our own."""

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """See ``TypeHandler.serialize``."""
        # Tensors of a parameter follow each other, so that each is fetched once.
        work = sorted(zip(values, infos, strict=True), key=lambda pair: pair[0].place)
        place, parameter = -1, np.empty(0)
        writing: list[Any] = []
        size = 0
        for tensor, info in work:
            await info.await_path_creation()
            if tensor.place != place:
                del parameter
                place, parameter = tensor.place, _on_host(tensor.parameter)
            writing.append(_write(_found(tensor.source, parameter), tensor.chunk, info))
            size += tensor.stored_bytes
            if size >= AT_ONCE:
                await asyncio.gather(*writing)
                writing, size = [], 0
        await asyncio.gather(*writing)
        return []


async def _write(array: np.ndarray, chunk: tuple[int, ...], info: type_handlers.ParamInfo) -> None:
    spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=array.shape,
        local_shape=chunk,
        dtype=array.dtype,
        process_index=0,
    )
    spec["kvstore"]["config"]["max_decoded_node_bytes"] = TREE_NODE_BYTES
    store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    await store.write(array, can_reference_source_data_indefinitely=True)


def _write_tensors(directory: Path, tensors: Mapping[str, _Tensor], needed: int) -> None:
    registry = type_handlers.create_type_handler_registry(
        (_Tensor, _TensorHandler()),
        (jax.Array, type_handlers.ArrayHandler()),  # Orbax warns where it is not there
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(tensors)))
    except Exception as error:
        found = SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        if int(found[1]) in NO_SPACE:
            free = shutil.disk_usage(directory.parent).free
            raise _no_space(directory.parent, needed, free) from error
        raise OSError(int(found[1]), f"{directory.parent}: {error}") from error


def _on_host(array: jax.Array) -> np.ndarray:
    """A parameter, padded as it is, from its parts on the devices."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if len(shards) == 1:
        return _fetched(shards[0].data)
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = _fetched(shard.data)
    return whole


def _fetched(data: jax.Array) -> np.ndarray:
    # An array keeps what it has once given to numpy. One that shares the buffer takes it along when
    # it goes, which happens here.
    shared = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(shared)


def _found(source: Source, parameter: np.ndarray) -> np.ndarray:
    if source.columns is None and len(source.rows) == 1:
        ((row, place, count),) = source.rows
        if (row, count) == (0, source.shape[0]):
            return parameter[place : place + count]
    return source.found(parameter)


def _at(tree: Mapping[Any, Any], path: Sequence[Any]) -> jax.Array:
    node: Any = tree
    for key in path:
        node = node[key]
    return node


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _refuse_existing(dst: Path) -> None:
    if os.path.lexists(dst):
        raise FileExistsError(
            errno.EEXIST,
            "expected a path where nothing is yet, but it exists; choose another or delete it",
            str(dst),
        )


def _no_space(path: Path, needed: int, free: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"{path}: not enough space: expected {needed:,} bytes for the model, got {free:,} free",
    )
