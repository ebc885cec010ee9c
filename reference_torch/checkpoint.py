"""Tensors of a checkpoint by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["Checkpoint"]


class Checkpoint:
    """The safetensors files of a directory; a tensor is read when it is asked for.

    Args:
        directory: with ``model.safetensors``, or shards and ``model.safetensors.index.json``.

    Raises:
        FileNotFoundError: there is neither, or a shard is missing.
        ValueError: a file is no safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = dict(_files(directory))
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``, on the CPU, in the dtype it is stored in.

        Args:
            name: e.g. ``model.layers.0.self_attn.q_proj.v.weight``.
            shape: what it has to have.

        Raises:
            ValueError: it is not there, of another shape, not of floats or not finite; the message
                names it.
        """
        if name not in self._files:
            raise ValueError(f"{self.directory}: expected a tensor {name}, found none")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{name}: cannot be read from {self._files[name]} ({error})") from None
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected floating-point numbers, got {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
        self._read.add(name)
        return tensor

    def check_all_read(self) -> None:
        """Raises ValueError if there are tensors that nobody asked for: the model would not be what
        the checkpoint says. Two kinds are known to say nothing: a tied model's copy of its
        embedding, and RoPE's frequencies."""
        idle = {name for name in self._files if name.endswith("rotary_emb.inv_freq")}
        left = sorted(self._files.keys() - self._read - idle - {"lm_head.weight"})
        if left:
            raise ValueError(f"{self.directory}: no use for the tensors {', '.join(left[:5])}")


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """(tensor name, file)."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    elif single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                places = dict.fromkeys(file.keys(), single.name)
        except SafetensorError as error:
            raise ValueError(f"{single}: expected a safetensors file ({error})") from None
    else:
        raise FileNotFoundError(f"{directory}: expected {single.name} or {index.name}, found none")
    for name, place in places.items():
        path = directory / place
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which has {name}, is missing")
        yield name, path
