"""What is in a checkpoint, from its headers alone."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.config import ModelConfig

__all__ = ["Decomposition", "Inspection", "inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """What is decomposed in a model.

    Attributes:
        metadata: config.json's ``low_rank`` without the slices: method, keep, base model, ….
        dense_parameters: numbers in all tensors of the model if nothing were decomposed.
        keep: parameters of the blocks' linears (a shared v once) ÷ those of the dense ones.
        ranks: lowest and highest rank by projection, e.g. ``{"q_proj": (5, 9)}``.
        dense: how many modules of each projection are dense, where some are.
        groups: members that share a v, without ``_proj``, e.g. ``(("q", "k", "v"),)``.
        latent_k, latent_v: numbers that a token's latents take in all layers, unpadded; a dense
            projection counts with its keys or values in full.
        latent_elements_per_token: both, a latent that k and v share counted once.
    """

    metadata: dict[str, Any]
    dense_parameters: int
    keep: float
    ranks: dict[str, tuple[int, int]]
    dense: dict[str, int]
    groups: tuple[tuple[str, ...], ...]
    latent_k: int
    latent_v: int
    latent_elements_per_token: int

    @classmethod
    def of(
        cls, config: ModelConfig, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]
    ) -> Decomposition:
        """Of a model with slices.

        Args:
            config: of the model.
            metadata: see the class.
            shapes: of all its tensors by name.
        """
        linears, low_rank = config.linears(), config.low_rank
        weights = {f"{module}.{end}" for module in linears for end in ("weight", "u.weight")}
        kept = sum(
            prod(shapes[name]) for name in (weights | low_rank.factors().keys()) & shapes.keys()
        )
        whole = sum(linear.out_features * linear.in_features for linear in linears.values())
        ranks: dict[str, tuple[int, int]] = {}
        dense: Counter[str] = Counter()
        for module in linears:
            short, piece = module.rpartition(".")[2], low_rank.get(module)
            if piece is None:
                dense[short] += 1
            else:
                low, high = ranks.get(short, (piece.rank, piece.rank))
                ranks[short] = (min(low, piece.rank), max(high, piece.rank))
        groups = {
            tuple(member.rpartition(".")[2].removesuffix("_proj") for member in members): None
            for members, _ in low_rank.groups()
            if len(members) > 1
        }
        full = config.num_kv_heads * config.head_dim
        k_width = v_width = both = 0
        for layer in range(config.num_layers):
            k, v = (low_rank.get(f"model.layers.{layer}.self_attn.{n}_proj") for n in "kv")
            widths = [full if piece is None else piece.rank for piece in (k, v)]
            k_width += widths[0]
            v_width += widths[1]
            both += widths[0] if k is not None and k == v else sum(widths)
        return cls(
            metadata=metadata,
            dense_parameters=sum(map(prod, shapes.values())) - kept + whole,
            keep=kept / whole,
            ranks=ranks,
            dense=dict(dense),
            groups=tuple(groups),
            latent_k=k_width,
            latent_v=v_width,
            latent_elements_per_token=both,
        )

    def rows(self) -> dict[str, str]:
        """What :class:`Inspection` prints of it."""
        meta = {name: value for name, value in self.metadata.items() if name != "version"}
        method = meta.pop("method", "method not recorded")
        asked = meta.pop("keep", None)
        keep = f"keep {self.keep:.4f} of the linears" + (
            "" if asked is None else f" (asked for {asked})"
        )
        rows = {"decomposed": f"{_words(method)}, {keep}"}
        rows |= {name.replace("_", " "): _words(value) for name, value in meta.items()}
        rows["shared"] = (
            " and ".join("{" + ", ".join(group) + "}" for group in self.groups) or "none"
        )
        ranges = {
            short: f"{low}" if low == high else f"{low} to {high}"
            for short, (low, high) in self.ranks.items()
        }
        for short, count in self.dense.items():
            held = f"{ranges[short]}, " if short in ranges else ""
            ranges[short] = f"{held}{count} dense"
        rows["ranks"] = "; ".join(
            f"{short.removesuffix('_proj')} {words}" for short, words in ranges.items()
        )
        rows["latents"] = (
            f"k {self.latent_k:,} and v {self.latent_v:,} elements a token, together "
            f"{self.latent_elements_per_token:,}"
        )
        return rows


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
        decomposition: what is decomposed, or None.
    """

    path: Path
    format: str
    config: ModelConfig
    parameters: int
    stored_bytes: int
    tensors_by_type: dict[str, int]
    cache_elements_per_token: int
    decomposition: Decomposition | None

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
            **({} if self.decomposition is None else self.decomposition.rows()),
            "parameters": f"{self.parameters:,}"
            + ("" if self.decomposition is None else _compared(self)),
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
    config, shapes = checkpoint.config, checkpoint.shapes()
    decomposition = None
    if config.low_rank:
        metadata = checkpoint.hf_config()["low_rank"]
        del metadata["slices"]
        decomposition = Decomposition.of(config, metadata, shapes)
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.description,
        config=config,
        parameters=sum(prod(shape) for shape in shapes.values()),
        stored_bytes=checkpoint.stored_bytes(),
        tensors_by_type=dict(Counter(checkpoint.stored_types().values())),
        cache_elements_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
        decomposition=decomposition,
    )


def _compared(inspection: Inspection) -> str:
    assert inspection.decomposition is not None
    dense = inspection.decomposition.dense_parameters
    return f" instead of {dense:,} ({inspection.parameters / dense - 1:+.1%})"


def _words(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
