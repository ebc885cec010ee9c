"""Model descriptions: frozen, hashable, and so usable as static arguments of a jitted program.

``ModelConfig.from_hf`` is the only place that reads the fields of a Hugging Face ``config.json``;
everything else in the library reads :class:`ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["LowRank", "ModelConfig", "RopeConfig", "Slice"]

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is scaled for long contexts.

    Attributes:
        theta: base θ; pair j of a head of width H turns by position · θ^(−2j/H).
        kind: the scaling. ``linear`` divides all frequencies by ``factor``; ``dynamic`` (NTK)
            raises θ as a function of the context, which is fixed at load from ``max_context``;
            ``llama3`` divides low frequencies only; ``yarn`` blends (arXiv 2309.00071) and scales
            cos and sin by ``attention_factor``.
        factor: how many times longer the context becomes.
        original_max_position: context of the pretraining, in tokens (``llama3``, ``yarn``,
            ``dynamic``).
        divisors: one divisor a frequency, H/2 of them (GGUF's ``rope_freqs.weight``), applied after
            ``kind``.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"rope scaling: expected one of {', '.join(ROPE_KINDS)}, got {self.kind!r}"
            )
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_max_position is None:
            raise ValueError(f"rope scaling {self.kind!r} needs original_max_position, got None")
        if not self.theta > 1 or not self.factor > 0:
            raise ValueError(
                f"rope: expected theta > 1 and factor > 0, got {self.theta} and {self.factor}"
            )

    def frequencies(self, head_dim: int, max_context: int) -> tuple[np.ndarray, float]:
        """Angular frequencies and the factor on cos and sin.

        Args:
            head_dim: H, the rotated width.
            max_context: longest sequence the model will see, in tokens; only ``dynamic`` depends on
                it.

        Returns:
            float32 [H/2] radians a position, computed in float64; and the attention factor (1
            except for ``yarn``).
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        theta = self.theta
        if self.kind == "dynamic":
            trained = self._trained()
            stretch = self.factor * max(max_context, trained) / trained - (self.factor - 1)
            theta *= stretch ** (head_dim / (head_dim - 2))
        freqs = theta**-exponents
        attention_factor = 1.0
        if self.kind == "linear":
            freqs = freqs / self.factor
        elif self.kind == "llama3":
            freqs = self._llama3(freqs)
        elif self.kind == "yarn":
            freqs = self._yarn(freqs, head_dim)
            attention_factor = self._yarn_attention_factor()
        if self.divisors is not None:
            if len(self.divisors) != head_dim // 2:
                raise ValueError(
                    f"rope divisors: expected {head_dim // 2} (half a head), "
                    f"got {len(self.divisors)}"
                )
            freqs = freqs / np.asarray(self.divisors)
        return freqs.astype(np.float32), attention_factor

    def _trained(self) -> int:
        assert self.original_max_position is not None  # __post_init__ checked
        return self.original_max_position

    def _llama3(self, freqs: np.ndarray) -> np.ndarray:
        # Wavelengths beyond trained/low are stretched by `factor`, those under trained/high stay,
        # linear in between.
        turns = self._trained() * freqs / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return freqs * (keep + (1 - keep) / self.factor)

    def _yarn(self, freqs: np.ndarray, head_dim: int) -> np.ndarray:
        def dim_that_turns(count: float) -> float:
            return (
                head_dim
                * math.log(self._trained() / (count * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = dim_that_turns(self.beta_fast), dim_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return freqs * (1 - ramp) + freqs / self.factor * ramp

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def mscale(weight: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return mscale(self.mscale) / mscale(self.mscale_all_dim)
        return mscale(1.0)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """From a config.json of transformers 4 (``rope_theta``, ``rope_scaling``) or 5
        (``rope_parameters``)."""
        params: dict[str, Any] = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in params.values()):
            raise ValueError(f"rope parameters by layer type are not supported, got {params}")
        partial = params.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor: expected 1 (all of a head turns), got {partial}"
            )
        theta = params.get("rope_theta", hf.get("rope_theta", 10000.0))
        kind = params.get("rope_type", params.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ValueError(
                f"rope scaling {kind!r} is not supported; expected one of {', '.join(ROPE_KINDS)}"
            )
        if kind == "default":
            return cls(theta=theta)
        max_position = hf.get("max_position_embeddings", 2048)
        original = params.get("original_max_position_embeddings") or max_position
        if kind == "dynamic":  # as transformers, whatever else is written
            original = max_position
        factor = params.get("factor")
        if factor is None and kind != "yarn":
            raise ValueError(f"rope scaling {kind!r} needs a factor, got none")
        optional = {
            name: params[name]
            for name in (
                "low_freq_factor",
                "high_freq_factor",
                "beta_fast",
                "beta_slow",
                "truncate",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
            )
            if params.get(name) is not None
        }
        return cls(
            theta=theta,
            kind=kind,
            factor=float(factor if factor is not None else max_position / original),
            original_max_position=int(original),
            **optional,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a decomposed projection's u reads: rows ``offset : offset + rank`` of the product with
    factor ``v``.

    Projections that name the same ``v`` and the same offset form a *shared* group: one latent, one
    v, u's stacked.
    """

    v: str
    offset: int
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1 or self.offset < 0:
            raise ValueError(
                f"slice of {self.v!r}: expected rank >= 1 and offset >= 0, "
                f"got {self.rank}, {self.offset}"
            )


@dataclass(frozen=True, slots=True)
class LowRank:
    """Slices by module name (``model.layers.0.self_attn.q_proj``); modules not named are dense."""

    slices: tuple[tuple[str, Slice], ...] = ()

    def get(self, module: str) -> Slice | None:
        """The slice that ``module`` reads, or None where it is dense."""
        for name, piece in self.slices:
            if name == module:
                return piece
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that fixes a model's parameters and its forward pass.

    Attributes:
        family: key of the registry in ``deinfer_jax.models``.
        vocab_size: W; hidden_size: D; intermediate_size: F; num_layers: L; num_heads: N;
            num_kv_heads: K; head_dim: H.
        qkv_bias, o_bias, mlp_bias: which linears carry a bias.
        qk_norm: RMSNorm over H on q and k before RoPE (Qwen3).
        windows: sliding window of each layer in tokens (a query sees itself and the window − 1
            tokens before), None = full.
        max_position: longest position the checkpoint was made for.
        bos_token_id: None where the model has none; eos_token_ids: generation ends at any of them.
        dtype: of the checkpoint, ``float32``, ``bfloat16`` or ``float16``.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    low_rank: LowRank = LowRank()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_position"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ModelConfig.{name}: expected a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "ModelConfig: num_heads must be a multiple of num_kv_heads, got "
                f"{self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim: RoPE needs an even width, got {self.head_dim}")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"ModelConfig.windows: expected {self.num_layers}, one a layer, "
                f"got {len(self.windows)}"
            )
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(
                f"ModelConfig.windows: expected positive sizes or None, got {self.windows}"
            )
        if not isinstance(self.rms_norm_eps, float) or not self.rms_norm_eps > 0:
            raise ValueError(
                f"ModelConfig.rms_norm_eps: expected a positive float, got {self.rms_norm_eps!r}"
            )
        for token in self.eos_token_ids:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"ModelConfig.eos_token_ids: expected ids from 0 to {self.vocab_size - 1}, "
                    f"got {token!r}"
                )
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(
                f"ModelConfig.dtype: expected float32, bfloat16 or float16, got {self.dtype!r}"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face ``config.json`` (as a mapping) of a supported ``model_type``.

        Raises:
            ValueError: the model type or rope scaling is unknown (the message lists
                what is supported), or a field the family needs is missing.
        """
        model_type = hf.get("model_type")
        if model_type not in _FAMILY_FIELDS:
            raise ValueError(
                f"model_type {model_type!r} (architectures {hf.get('architectures')}) is not "
                f"supported; supported: {', '.join(sorted(_FAMILY_FIELDS))}"
            )
        if "quantization_config" in hf:
            method = (hf["quantization_config"] or {}).get("quant_method")
            raise ValueError(
                f"the checkpoint is quantised ({method}); expected float32, bfloat16 or float16 "
                "weights"
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
        return cls(
            family="llama",
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads
            if hf.get("num_key_value_heads") is None
            else hf["num_key_value_heads"],
            head_dim=hf["hidden_size"] // heads if hf.get("head_dim") is None else hf["head_dim"],
            hidden_act=hf.get("hidden_act") or "silu",
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(hf),
            max_position=hf.get("max_position_embeddings") or 2048,
            tie_embeddings=hf.get("tie_word_embeddings", False),
            windows=_windows(hf, model_type, layers),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=_as_tuple(hf.get("eos_token_id")),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            **_FAMILY_FIELDS[model_type](hf),
        )

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; windows that are all equal follow ``num_layers``."""
        if "num_layers" in changes and len(set(self.windows)) == 1:
            changes.setdefault("windows", self.windows[:1] * changes["num_layers"])
        return dataclasses.replace(self, **changes)


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
