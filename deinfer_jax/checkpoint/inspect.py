"""What is in a checkpoint, from its headers alone."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.config import ModelConfig

__all__ = ["Inspection", "inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint's description.

    Attributes:
        path: what was opened.
        format: e.g. ``Hugging Face directory, 3 shards``.
        config: of the model.
        parameters: numbers in all tensors.
        stored_bytes: size of the files' tensors.
        tensors_by_type: how many tensors are stored in which type.
        cache_elements_per_token: numbers a cached token takes in all layers, full keys and values.
    """

    path: Path
    format: str
    config: ModelConfig
    parameters: int
    stored_bytes: int
    tensors_by_type: dict[str, int]
    cache_elements_per_token: int

    def __str__(self) -> str:
        c = self.config
        windows = sorted({w for w in c.windows if w is not None})
        rows = {
            "path": str(self.path),
            "format": self.format,
            "family": c.family,
            "layers": f"{c.num_layers} of width {c.hidden_size}, "
            f"feed-forward {c.intermediate_size} ({c.hidden_act})",
            "attention": f"{c.num_heads} query and {c.num_kv_heads} kv heads of width {c.head_dim}"
            + (f", windows {windows}" if windows else ""),
            "biases": ", ".join(
                name for name in ("qkv_bias", "o_bias", "mlp_bias") if getattr(c, name)
            )
            or "none",
            "q/k norm": "yes" if c.qk_norm else "no",
            "rope": f"{c.rope.kind}, theta {c.rope.theta:g}"
            + (f", factor {c.rope.factor:g}" if c.rope.kind != "default" else ""),
            "context": f"{c.max_position} tokens",
            "words": f"{c.vocab_size}, {'tied' if c.tie_embeddings else 'separate'} head",
            "end tokens": ", ".join(map(str, c.eos_token_ids)) or "none",
            "parameters": f"{self.parameters:,}",
            "stored": f"{self.stored_bytes / 1e6:,.1f} MB ("
            + ", ".join(f"{count} {kind}" for kind, count in sorted(self.tensors_by_type.items()))
            + ")",
            "cache": f"{self.cache_elements_per_token:,} elements a token "
            f"({self.cache_elements_per_token * 2:,} bytes in bfloat16)",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describes a checkpoint without loading it.

    Args:
        path: as for :func:`deinfer_jax.load`.

    Raises:
        ValueError, FileNotFoundError: the checkpoint is broken or unknown, see
            :func:`deinfer_jax.load`.
    """
    checkpoint = open_checkpoint(Path(path))
    config = checkpoint.config
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.description,
        config=config,
        parameters=sum(prod(shape) for shape in checkpoint.shapes().values()),
        stored_bytes=checkpoint.stored_bytes(),
        tensors_by_type=dict(Counter(checkpoint.stored_types().values())),
        cache_elements_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
    )
