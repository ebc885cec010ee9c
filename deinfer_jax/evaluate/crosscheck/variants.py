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


# Weights with two traits of trained ones, which keep half precision's rounding apart from faults.
# The twenty roundings of a layer leave some 1 % of error in what it adds to the residual stream.
#
# - If layers were much longer than the embedding, the stream would be off by as much. Here all
#   three add 1.1 to 1.6 times its length: enough for a fault in any of them to be seen.
# - If logits were mere noise, the best would be hardly above the others, and not the same on both
#   sides. Here a word has three more of its kind, and after one of a kind come those of the next.
#   So rivals are mostly of one kind: large logits with most of their error in common. Which of the
#   four wins is for the layers to say.
EMBEDDING = 0.15  # standard deviation, small enough for the norms' epsilon to matter
GAINS = {"o_proj": 0.13, "down_proj": 0.12, "lm_head": 3.5}  # other linears have 1
KIND = 4  # words
ALIKE = 0.85  # correlation of the embeddings of a kind
FOLLOWS = 0.9  # correlation of a word's row of the head with the kind before


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
    if not config.tie_embeddings:
        embedding, head = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
        tensors["lm_head.weight"] = _following(embedding, head)
    with CanonicalWriter(dst, {"random": name, "seed": seed}) as writer:
        writer.write("model", tensors)
        writer.publish(config.to_hf())
    return config


def _values(source: Source, rng: np.random.Generator) -> np.ndarray:
    """Weights that hide nothing: norms are not 1 and biases not 0, and products of what is normed
    have a variance of 1, so that attention is not uniform."""
    noise = rng.standard_normal(source.shape)
    if source.name.endswith("norm.weight"):
        noise = 1 + 0.3 * noise
    elif source.name.endswith(".bias"):
        noise *= 0.3 * _gain(source.name)
    elif source.name == "model.embed_tokens.weight":
        words, width = source.shape
        kinds = rng.standard_normal((words // KIND, width)).repeat(KIND, axis=0)
        noise = EMBEDDING * (ALIKE**0.5 * kinds + (1 - ALIKE) ** 0.5 * noise)
    else:
        noise *= _gain(source.name) / source.shape[-1] ** 0.5
    return noise.astype(np.float32)


def _following(embedding: np.ndarray, head: np.ndarray) -> np.ndarray:
    """A head as long as ``head`` [W, D] whose words follow those of the kind before."""
    kinds = embedding.reshape(-1, KIND, embedding.shape[1]).mean(axis=1)
    before = np.roll(kinds, 1, axis=0).repeat(KIND, axis=0) * (head.std() / kinds.std())
    return FOLLOWS * before + (1 - FOLLOWS**2) ** 0.5 * head


def _gain(name: str) -> float:
    """By how much a linear changes the length of an activation; all of it is in the last factor."""
    if name.endswith(".v.weight"):
        return 1.0
    return next((gain for module, gain in GAINS.items() if module in name), 1.0)


def _block(short: str) -> str:
    return "mlp" if short in ("gate", "up", "down") else "self_attn"
