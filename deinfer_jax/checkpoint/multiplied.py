"""A decomposed checkpoint as the dense one that it approximates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deinfer_jax.checkpoint.factors import u_name
from deinfer_jax.checkpoint.source import Checkpoint, check_names
from deinfer_jax.config import LowRank

__all__ = ["MultipliedOut"]


class MultipliedOut(Checkpoint):
    """Every pair of factors as W = u v, computed in float32 and rounded to the factors' dtype.

    Args:
        checkpoint: decomposed; its files are read as tensors are asked for.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._factors = checkpoint
        self._slices = dict(checkpoint.config.low_rank.slices)
        self.path = checkpoint.path
        self.config = checkpoint.config.replace(low_rank=LowRank())
        self.description = f"{checkpoint.description}, factors multiplied out"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint``."""
        held, linears = self._factors.shapes(), self.config.linears()
        found: dict[str, tuple[int, ...]] = {}
        for name in held:
            ours = self._ours(name)
            if ours is None:
                continue
            module = ours.removesuffix(".weight")
            linear = linears.get(module) if module in self._slices else None
            shape = held[name] if linear is None else (linear.out_features, linear.in_features)
            found[ours] = shape
        return found

    def stored_types(self) -> dict[str, str]:
        """See ``Checkpoint``; of a product, its u's."""
        types = self._factors.stored_types()
        names = ((self._ours(name), kind) for name, kind in types.items())
        return {name: kind for name, kind in names if name is not None}

    def stored_bytes(self) -> int:
        """See ``Checkpoint``; of the factors."""
        return self._factors.stored_bytes()

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Checkpoint``; a pair of factors is read for each product."""
        known = self.shapes()
        wanted = set(known) if names is None else check_names(self.path, names, known)
        products = {u_name(module) for module in self._slices}
        plain = [
            name
            for name in self._factors.shapes()
            if name not in products and self._ours(name) in wanted
        ]
        for name, tensor in self._factors.tensors(plain):
            ours = self._ours(name)
            assert ours is not None
            yield ours, tensor
        for module, piece in self._slices.items():
            if f"{module}.weight" in wanted:
                u, v = self._factors.tensor(u_name(module)), self._factors.tensor(piece.v)
                own = v[piece.offset : piece.offset + piece.rank].astype(np.float32)
                yield f"{module}.weight", (u.astype(np.float32) @ own).astype(u.dtype)

    def hf_config(self) -> dict[str, Any]:
        """See ``Checkpoint``."""
        hf = self._factors.hf_config()
        hf.pop("low_rank", None)
        return hf

    def generation_config(self) -> dict[str, Any] | None:
        """See ``Checkpoint``."""
        return self._factors.generation_config()

    def files(self) -> list[Path]:
        """See ``Checkpoint``."""
        return self._factors.files()

    def tokenizer(self) -> Any:
        """See ``Checkpoint``."""
        return self._factors.tokenizer()

    def _ours(self, name: str) -> str | None:
        """Under which name a tensor of the factors' checkpoint, or what is made of it, is here;
        None of a v."""
        module, _, kind = name.rpartition(".u.")
        if module in self._slices:
            return f"{module}.{kind}"
        vs = {piece.v for piece in self._slices.values()}
        return None if name in vs else name
