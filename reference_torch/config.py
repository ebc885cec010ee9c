"""What a checkpoint's config.json says, as far as the maths needs it.

Llama, Mistral, Qwen2 and Qwen3 are one architecture. Which linears have biases, and whether q and k
are normed, is not read here: the checkpoint's tensors show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Config", "Slice", "read_config"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# What transformers assumes where config.json is silent, apart from what all have in common.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "max_position_embeddings": 32768,
    },
}


class Slice(NamedTuple):
    """What the second factor of a decomposed linear reads: rows ``offset`` to ``offset + rank`` of
    ``z = v x``, where ``v`` names a tensor that several linears may share."""

    v: str
    offset: int
    rank: int


@dataclass(frozen=True)
class Config:
    """Sizes and variants of a model.

    Attributes:
        hidden_size: D, width of the residual stream.
        intermediate_size: F.
        heads: N query heads; kv_heads: K, each read by N / K of them; head_dim: H.
        windows: of each layer, how many tokens a query sees, itself included; None = all.
        rope: the parameters of config.json, in the names of transformers 5.
        max_position: tokens that the model was made for.
        slices: by decomposed module, e.g. ``model.layers.0.self_attn.q_proj``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    eps: float
    tied: bool
    windows: tuple[int | None, ...]
    rope: dict[str, Any]
    max_position: int
    dtype: str
    slices: dict[str, Slice]


def read_config(directory: Path) -> Config:
    """Reads ``config.json``.

    Raises:
        ValueError: another architecture, or a missing field.
        FileNotFoundError: there is no such file.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: expected a directory with config.json, found none")
    fields = json.loads(path.read_text())
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type: expected one of {', '.join(FAMILIES)}, got {family}")
    fields = DEFAULTS[family] | {name: value for name, value in fields.items() if value is not None}
    own = fields.get("deinfer") or {}
    try:
        heads = fields["num_attention_heads"]
        config = Config(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads", heads),
            head_dim=fields.get("head_dim", fields["hidden_size"] // heads),
            activation=fields.get("hidden_act", "silu"),
            eps=fields.get("rms_norm_eps", 1e-6),
            tied=fields.get("tie_word_embeddings", False),
            windows=tuple(own["windows"]) if "windows" in own else _windows(family, fields),
            rope=_rope(fields, own),
            max_position=fields.get("max_position_embeddings", 2048),
            dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
            slices=_slices(path, fields.get("low_rank")),
        )
    except KeyError as error:
        raise ValueError(f"{path}: expected the field {error}, found none") from None
    if config.heads % config.kv_heads:
        raise ValueError(
            f"{path}: expected query heads that are a multiple of kv heads, got {config.heads} and "
            f"{config.kv_heads}"
        )
    if len(config.windows) != config.layers:
        raise ValueError(
            f"{path}: expected a window for each of {config.layers} layers, got "
            f"{len(config.windows)}"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{path}: partial_rotary_factor: expected 1, got {fields['partial_rotary_factor']}"
        )
    return config


def _windows(family: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if family == "mistral":
        return (window,) * layers
    if family == "llama" or not fields.get("use_sliding_window"):
        return (None,) * layers
    if fields.get("layer_types"):
        kinds = fields["layer_types"]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = fields.get("max_window_layers", layers)
    return tuple(None if layer < full else window for layer in range(layers))


def _rope(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4 has ``rope_theta`` and ``rope_scaling``, version 5 ``rope_parameters``, and a
    model that came from GGUF may have divisors, under our own key."""
    if "rope" in own:
        rope = dict(own["rope"])
        rope["rope_type"], rope["rope_theta"] = rope.pop("kind"), rope.pop("theta")
        rope["original_max_position_embeddings"] = rope.pop("original_max_position", None)
        return {name: value for name, value in rope.items() if value is not None}
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    if rope["rope_type"] == "dynamic":
        # transformers takes max_position_embeddings, whatever else is written.
        rope.pop("original_max_position_embeddings", None)
    return rope


def _slices(path: Path, block: Any) -> dict[str, Slice]:
    if block is None:
        return {}
    if block.get("version") != 1:
        raise ValueError(f"{path}: low_rank.version: expected 1, got {block.get('version')}")
    return {module: Slice(*piece) for module, piece in block["slices"].items()}
