"""Tiny random models of every variant that a config can say, for a cross-check without a
checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.checkpoint.factors import low_rank_of
from deinfer_jax.config import LowRank, ModelConfig, RopeConfig
from deinfer_jax.layers.parameter import Source, declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.strategy import Single

__all__ = ["LAYOUTS", "VARIANTS", "random_config", "write_random"]

SIZES: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position=96,
    bos_token_id=1,
    eos_token_ids=(2,),
)

# What differs from SIZES.
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "nine-three-heads": {"hidden_size": 54, "num_heads": 9, "num_kv_heads": 3, "head_dim": 16},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "rope-linear": {"rope": RopeConfig(kind="linear", factor=3.0, original_max_position=96)},
    "rope-llama3": {"rope": RopeConfig(kind="llama3", factor=4.0, original_max_position=24)},
    "rope-yarn": {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_position=24)},
    # The context is longer than what these two were made for.
    "rope-dynamic": {
        "max_position": 40,
        "rope": RopeConfig(kind="dynamic", factor=2.0, original_max_position=40),
    },
    "rope-dynamic-longer": {
        "max_position": 60,
        "rope": RopeConfig(kind="dynamic", factor=2.0, original_max_position=40),
    },
    "rope-divisors": {"rope": RopeConfig(divisors=(1.0, 1.5, 2.0, 4.0))},
    "mistral-window": {"windows": (7, 7, 7)},
    "mixed-windows": {"windows": (None, 9, 5)},
    "qwen2": {"qkv_bias": True},
    "qwen2-windows": {"qkv_bias": True, "windows": (None, 5, 5)},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}

# The groups of a block; projections that are not named are dense.
SEPARATE = (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",))
SHARED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
SHARED_KV = (("q",), ("k", "v"), ("o",), ("gate", "up"), ("down",))
LAYOUTS: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {  # by layer
    "dense": ((), (), ()),
    "separate": (SEPARATE,) * 3,
    "shared": (SHARED,) * 3,
    "shared-kv": (SHARED_KV,) * 3,
    "mixed": (
        SHARED,
        (("k", "v"), ("o",), ("gate",), ("down",)),
        (("q", "v"), ("gate",), ("up",)),
    ),
}


def random_config(name: str) -> ModelConfig:
    """The config of ``VARIANT`` (decomposed separately) or ``VARIANT/LAYOUT``.

    Raises:
        ValueError: there is none of that name.
    """
    variant, _, layout = name.partition("/")
    layout = layout or "separate"
    if variant not in VARIANTS or layout not in LAYOUTS:
        raise ValueError(
            f"random model: expected VARIANT or VARIANT/LAYOUT with a variant of "
            f"{', '.join(VARIANTS)} and a layout of {', '.join(LAYOUTS)}, got {name!r}"
        )
    config = ModelConfig(**SIZES | VARIANTS[variant])
    # 3 to 45, no two neighbours alike, some of them above the width of a head or of k and v.
    ranks = (3 + 8 * i % 43 for i in itertools.count())
    groups = [
        ([f"model.layers.{layer}.{_block(short)}.{short}_proj" for short in members], next(ranks))
        for layer, blocks in enumerate(LAYOUTS[layout])
        for members in blocks
    ]
    return config.replace(low_rank=low_rank_of(groups) if groups else LowRank())


def write_random(name: str, dst: Path, *, seed: int = 0) -> ModelConfig:
    """Writes a random model in the canonical form, float32; returns its config.

    Args:
        name: as of :func:`random_config`.
        dst: directory, which must not exist.
        seed: of the weights.
    """
    config = random_config(name)
    model = build(
        config,
        max_context=config.max_position,
        strategy=Single(),
        dtype=jnp.dtype("float32"),
    )
    rng = np.random.default_rng(seed)
    tensors = {
        source.name: _values(source, rng)
        for declaration in declarations(model)
        for source in declaration.sources
    }
    with CanonicalWriter(dst, {"random": name, "seed": seed}) as writer:
        writer.write("model", tensors)
        writer.publish(config.to_hf())
    return config


def _values(source: Source, rng: np.random.Generator) -> np.ndarray:
    """Weights that hide nothing: norms are not 1 and biases not 0, and matrices are large enough
    that attention is not uniform."""
    noise = rng.standard_normal(source.shape)
    if "norm" in source.name:
        noise = 1 + 0.3 * noise
    elif source.name.endswith(".bias"):
        noise = 0.3 * noise
    else:
        noise *= _scale(source)
    return noise.astype(np.float32)


def _scale(source: Source) -> float:
    """Standard deviation of a matrix' elements: 0.15, which that of a product u v is, too."""
    factor = source.name.removesuffix(".weight").rpartition(".")[2]
    if factor not in ("u", "v"):
        return 0.15
    rank = source.shape[0] if factor == "v" else source.shape[1]
    return (0.15 / rank**0.5) ** 0.5


def _block(short: str) -> str:
    return "mlp" if short in ("gate", "up", "down") else "self_attn"
