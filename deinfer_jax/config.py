"""Model descriptions: frozen, hashable, and so usable as static arguments of a jitted program.

``ModelConfig.from_hf`` (in ``config_hf``) is the only place that reads the fields of a Hugging Face
``config.json``; everything else in the library reads :class:`ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["Linear", "LowRank", "ModelConfig", "RopeConfig", "Slice"]

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
        from deinfer_jax.config_hf import read_rope  # which imports this module

        return read_rope(hf)


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


# Projections that read the same input, so that their first factors can be one product and shared.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class LowRank:
    """Slices by module name (``model.layers.0.self_attn.q_proj``); modules not named are dense.

    Modules that name the same v read the same input (:data:`SAME_INPUT`, one parent), and their
    slices tile its rows: each two are the same or lie side by side, the first starts at 0.

    Raises:
        ValueError: a module is named twice, or a v is not used like that.
    """

    slices: tuple[tuple[str, Slice], ...] = ()
    _by_module: dict[str, Slice] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_module = dict(self.slices)
        object.__setattr__(self, "_by_module", by_module)
        if len(by_module) != len(self.slices):
            count = Counter(module for module, _ in self.slices)
            twice = sorted(module for module, times in count.items() if times > 1)
            raise ValueError(f"low_rank: expected each module once, got {', '.join(twice)} again")
        readers: dict[str, list[str]] = {}
        for module, piece in self.slices:
            readers.setdefault(piece.v, []).append(module)
        for v, modules in readers.items():
            self._check_readers(v, modules)

    def get(self, module: str) -> Slice | None:
        """The slice that ``module`` reads, or None where it is dense."""
        return self._by_module.get(module)

    def __bool__(self) -> bool:
        return bool(self.slices)

    def groups(self) -> tuple[tuple[tuple[str, ...], Slice], ...]:
        """Every distinct slice with the modules that read it; more than one are a shared group."""
        members: dict[Slice, list[str]] = {}
        for module, piece in self.slices:
            members.setdefault(piece, []).append(module)
        return tuple((tuple(modules), piece) for piece, modules in members.items())

    def factors(self) -> dict[str, int]:
        """Rows R of every v by tensor name."""
        rows: dict[str, int] = {}
        for _, piece in self.slices:
            rows[piece.v] = max(rows.get(piece.v, 0), piece.offset + piece.rank)
        return rows

    def _check_readers(self, v: str, modules: Sequence[str]) -> None:
        if len(modules) > 1:
            parents = {module.rpartition(".")[0] for module in modules}
            shorts = {module.rpartition(".")[2] for module in modules}
            if len(parents) > 1 or not any(shorts <= set(names) for names in SAME_INPUT):
                kinds = " or ".join("{" + ", ".join(names) + "}" for names in SAME_INPUT)
                raise ValueError(
                    f"low_rank: {v!r} is read by {', '.join(modules)}; expected projections of the "
                    f"same input, {kinds} of one block"
                )
        end = 0
        spans = {(piece.offset, piece.rank) for piece in map(self._by_module.__getitem__, modules)}
        for offset, rank in sorted(spans):
            if offset != end:
                raise ValueError(
                    f"low_rank: slices of {v!r} (of {', '.join(modules)}): expected the same or "
                    f"adjacent ones from 0 on, got offset {offset} where {end} ends the one before"
                )
            end = offset + rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear as the model's config has it, y = W x + b with W [out_features, in_features]."""

    out_features: int
    in_features: int
    bias: bool


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

        A ``low_rank`` block makes the config that of a decomposed model, and the key ``deinfer``
        carries fields that no model type has, see :meth:`to_hf`.

        Raises:
            ValueError: the model type or rope scaling is unknown (the message lists
                what is supported), a field the family needs is missing, or the ``low_rank`` block
                is of another version, malformed, or names a module that the model does not have.
        """
        from deinfer_jax.config_hf import read_config  # which imports this module

        return read_config(hf)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of this config, which :meth:`from_hf` reads back as an equal one.

        Fields that no Hugging Face model type can say (rope divisors of a GGUF file, biases or
        windows in a combination that none has) stand under our own key ``deinfer``; transformers
        would ignore them.
        """
        from deinfer_jax.config_hf import write_config  # which imports this module

        return write_config(self)

    def linears(self) -> dict[str, Linear]:
        """Every linear of the blocks by module name, in the model's order: what may be
        decomposed."""
        D, F = self.hidden_size, self.intermediate_size
        N, K = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        found: dict[str, Linear] = {}
        for layer in range(self.num_layers):
            for name, outputs, inputs, bias in (
                ("self_attn.q_proj", N, D, self.qkv_bias),
                ("self_attn.k_proj", K, D, self.qkv_bias),
                ("self_attn.v_proj", K, D, self.qkv_bias),
                ("self_attn.o_proj", D, N, self.o_bias),
                ("mlp.gate_proj", F, D, self.mlp_bias),
                ("mlp.up_proj", F, D, self.mlp_bias),
                ("mlp.down_proj", D, F, self.mlp_bias),
            ):
                found[f"model.layers.{layer}.{name}"] = Linear(
                    out_features=outputs, in_features=inputs, bias=bias
                )
        return found

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; windows that are all equal follow ``num_layers``."""
        if "num_layers" in changes and len(set(self.windows)) == 1:
            changes.setdefault("windows", self.windows[:1] * changes["num_layers"])
        return dataclasses.replace(self, **changes)
