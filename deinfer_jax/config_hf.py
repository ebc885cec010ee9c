"""The fields of a Hugging Face ``config.json``, read and written; nothing else knows them.

Beside them there are two keys of our own: ``low_rank``, the decomposition, and ``deinfer``, fields
of :class:`ModelConfig` that no model type of transformers can say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from deinfer_jax.config import ROPE_KINDS, LowRank, ModelConfig, RopeConfig, Slice

__all__ = [
    "LOW_RANK_VERSION",
    "low_rank_block",
    "read_config",
    "read_low_rank",
    "read_rope",
    "write_config",
]

LOW_RANK_VERSION = 1

# What transformers assumes where a config.json leaves a field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
    | {"max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
    | {"max_position_embeddings": 32768, "head_dim": 128},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _llama_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(hf.get("mlp_bias", False))}


# What a model type fixes without saying so in its config.json.
_FAMILY_FIELDS = {
    "llama": _llama_fields,
    "mistral": lambda hf: {},
    "qwen2": lambda hf: {"qkv_bias": True},
    "qwen3": lambda hf: {**_llama_fields(hf), "mlp_bias": False, "qk_norm": True},
}

_ROPE_OPTIONS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """See ``ModelConfig.from_hf``."""
    model_type = hf.get("model_type")
    if model_type not in _FAMILY_FIELDS:
        raise ValueError(
            f"model_type {model_type!r} (architectures {hf.get('architectures')}) is not "
            f"supported; supported: {', '.join(sorted(_FAMILY_FIELDS))}"
        )
    if "quantization_config" in hf:
        method = (hf["quantization_config"] or {}).get("quant_method")
        raise ValueError(
            f"the checkpoint is quantised ({method}); expected float32, bfloat16 or float16 weights"
        )
    hf = {**_DEFAULTS[model_type], **hf}
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    missing = [name for name in required if hf.get(name) is None]
    if missing:
        raise ValueError(f"config.json of a {model_type} model lacks {', '.join(missing)}")
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"num_attention_heads: expected a positive integer, got {heads!r}")
    fields: dict[str, Any] = dict(
        family="llama",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if hf.get("num_key_value_heads") is None else hf["num_key_value_heads"],
        head_dim=hf["hidden_size"] // heads if hf.get("head_dim") is None else hf["head_dim"],
        hidden_act=hf.get("hidden_act") or "silu",
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope=read_rope(hf),
        max_position=hf.get("max_position_embeddings") or 2048,
        tie_embeddings=hf.get("tie_word_embeddings", False),
        windows=_windows(hf, model_type, layers),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=_as_tuple(hf.get("eos_token_id")),
        dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        **_FAMILY_FIELDS[model_type](hf),
    )
    config = ModelConfig(**fields | _read_own(hf.get("deinfer")))
    if hf.get("low_rank") is None:
        return config
    return config.replace(low_rank=read_low_rank(hf["low_rank"], config))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See ``ModelConfig.to_hf``."""
    model_type = _model_type(config)
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _write_rope(config.rope),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _write_ids(config.eos_token_ids),
        "dtype": config.dtype,
    }
    if model_type in ("llama", "qwen3"):
        hf["attention_bias"] = config.qkv_bias
    if model_type == "llama":
        hf["mlp_bias"] = config.mlp_bias
    else:
        hf |= _write_windows(config, model_type)
    # What this does not say, it says itself.
    read = read_config(hf)
    own = {
        name: dataclasses.asdict(value) if name == "rope" else value
        for name in _OWN_FIELDS
        if (value := getattr(config, name)) != getattr(read, name)
    }
    if own:
        hf["deinfer"] = _listed(own)
    if config.low_rank:
        hf["low_rank"] = low_rank_block(config.low_rank)
    return hf


def low_rank_block(low_rank: LowRank, **metadata: Any) -> dict[str, Any]:
    """The value of config.json's key ``low_rank``.

    Args:
        low_rank: the slices.
        metadata: what else is to be recorded, as JSON values: ``method``, ``keep``, ``base_model``…

    Returns:
        ``{"version": 1, "slices": {module: [v tensor name, offset, rank]}, **metadata}``.
    """
    slices = {module: [piece.v, piece.offset, piece.rank] for module, piece in low_rank.slices}
    return {"version": LOW_RANK_VERSION, "slices": slices, **metadata}


def read_low_rank(block: Any, config: ModelConfig) -> LowRank:
    """The slices of a ``low_rank`` block; other keys of it are metadata and not looked at.

    Args:
        block: as :func:`low_rank_block` makes it.
        config: of the model, whose modules the block may name.

    Raises:
        ValueError: another version, a malformed slice, a module that the model does not have, or
            slices that ``LowRank`` refuses.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f"low_rank: expected a mapping, got {block!r}")
    version = block.get("version")
    if type(version) is not int or version != LOW_RANK_VERSION:
        raise ValueError(f"low_rank.version: expected {LOW_RANK_VERSION}, got {version!r}")
    slices = block.get("slices")
    if not isinstance(slices, Mapping):
        raise ValueError(
            f"low_rank.slices: expected a mapping of module to [v, offset, rank], got {slices!r}"
        )
    linears = config.linears()
    unknown = [module for module in slices if module not in linears]
    if unknown:
        kinds = dict.fromkeys(module.split(".", 3)[3] for module in linears)
        raise ValueError(
            f"low_rank: the model has no modules {', '.join(unknown[:10])}; expected "
            f"model.layers.N with N from 0 to {config.num_layers - 1} and {', '.join(kinds)}"
        )
    return LowRank(tuple((module, _read_slice(module, piece)) for module, piece in slices.items()))


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """See ``RopeConfig.from_hf``."""
    params: dict[str, Any] = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ValueError(f"rope parameters by layer type are not supported, got {params}")
    partial = params.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor: expected 1 (all of a head turns), got {partial}")
    theta = params.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rope scaling {kind!r} is not supported; expected one of {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    max_position = hf.get("max_position_embeddings", 2048)
    original = params.get("original_max_position_embeddings") or max_position
    if kind == "dynamic":  # as transformers, whatever else is written
        original = max_position
    factor = params.get("factor")
    if factor is None and kind != "yarn":
        raise ValueError(f"rope scaling {kind!r} needs a factor, got none")
    optional = {name: params[name] for name in _ROPE_OPTIONS if params.get(name) is not None}
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(factor if factor is not None else max_position / original),
        original_max_position=int(original),
        **optional,
    )


def _read_slice(module: str, piece: Any) -> Slice:
    if (
        not isinstance(piece, list | tuple)
        or len(piece) != 3
        or not isinstance(piece[0], str)
        or any(not isinstance(n, int) or isinstance(n, bool) for n in piece[1:])
    ):
        raise ValueError(
            f"low_rank: slice of {module}: expected [v tensor name, offset, rank], got {piece!r}"
        )
    try:
        return Slice(v=piece[0], offset=piece[1], rank=piece[2])
    except ValueError as error:
        raise ValueError(f"low_rank: module {module}: {error}") from error


# Fields that another program's config.json may be unable to say. The sizes always can be.
_OWN_FIELDS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "windows", "rope")


def _read_own(own: Any) -> dict[str, Any]:
    if own is None:
        return {}
    if not isinstance(own, Mapping) or any(name not in _OWN_FIELDS for name in own):
        raise ValueError(f"deinfer: expected a mapping with {', '.join(_OWN_FIELDS)}, got {own!r}")
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
    if "rope" in fields:
        rope = dict(fields["rope"])
        if rope.get("divisors") is not None:
            rope["divisors"] = tuple(rope["divisors"])
        fields["rope"] = RopeConfig(**rope)
    return fields


def _model_type(config: ModelConfig) -> str:
    """The type whose fields say the most of the config."""
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.o_bias and not config.mlp_bias:
        return "qwen2"
    biased = config.qkv_bias or config.o_bias or config.mlp_bias
    return "mistral" if any(config.windows) and not biased else "llama"


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return params
    params["factor"] = rope.factor
    if rope.original_max_position is not None:
        params["original_max_position_embeddings"] = rope.original_max_position
    names = {"llama3": _ROPE_OPTIONS[:2], "yarn": _ROPE_OPTIONS[2:]}.get(rope.kind, ())
    options = {name: getattr(rope, name) for name in names}
    return params | {name: value for name, value in options.items() if value is not None}


def _write_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _write_windows(config: ModelConfig, model_type: str) -> dict[str, Any]:
    sizes = {window for window in config.windows if window is not None}
    window = min(sizes, default=None)
    if model_type == "mistral":
        return {"sliding_window": window}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    first = next((i for i, w in enumerate(config.windows) if w is not None), config.num_layers)
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": kinds,
    }


def _windows(hf: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window")
    if model_type in ("qwen2", "qwen3"):
        if not hf.get("use_sliding_window", False) or window is None:
            return (None,) * layers
        kinds = hf.get("layer_types")
        if kinds is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = hf.get("max_window_layers", layers)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window if model_type == "mistral" else None,) * layers


def _as_tuple(ids: Any) -> tuple[Any, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
