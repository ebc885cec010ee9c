"""Tiny random models of every variant, made by transformers and saved as checkpoints."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Groups = Sequence[tuple[Sequence[str], int]]  # modules that share a v, and its rank

SIZES = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=96,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=24,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24)

# variant: (transformers model type, changes to SIZES)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 6}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "nine-three-heads": (
        "llama",
        {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "rope-linear": (
        "llama",
        {"rope_parameters": dict(rope_type="linear", rope_theta=1e4, factor=3.0)},
    ),
    "rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope-yarn": ("llama", {"rope_parameters": YARN}),
    "rope-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": (
        "qwen3",
        {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


# What a block shares; projections that are not named stay dense.
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "separate": (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",)),
    "shared": (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
    "shared-kv": (("q",), ("k", "v"), ("o",), ("gate", "up"), ("down",)),
    "dense-q-up": (("k", "v"), ("o",), ("gate",), ("down",)),
    "dense-k-o-down": (("q", "v"), ("gate",), ("up",)),
    "only-o": (("o",),),
}


def make(variant: str, directory: Path, seed: int = 0, **changes: Any) -> Any:
    """Saves a random float32 model of a variant under ``directory`` and returns the torch model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = VARIANTS[variant]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **options, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases start at 0 and norms at 1, which would hide that they are not read; larger
            # weights make attention and logits less uniform than the usual 0.02 does.
            scale = 0.3 if parameter.ndim == 1 else 0.12
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(offset + scale * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, W] of transformers' own forward pass."""
    import torch

    with torch.no_grad():
        return (
            model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False)
            .logits[0]
            .numpy()
        )


def random_tokens(count: int, seed: int = 0, vocab_size: int = 160) -> np.ndarray:
    """int32 ids, end-of-sequence tokens left out."""
    return np.random.default_rng(seed).integers(3, vocab_size, count).astype(np.int32)


def groups(*layouts: str, rank: int | None = None) -> Groups:
    """Groups of a model whose layers have the named layouts.

    Args:
        layouts: one a layer.
        rank: of all; None = another one for each group, 3 to 45, some above the rank of the weight.
    """
    ranks = (3 + 8 * i % 43 for i in itertools.count()) if rank is None else itertools.repeat(rank)
    return [
        (
            [f"model.layers.{layer}.{_block(short)}.{short}_proj" for short in members],
            next(ranks),
        )
        for layer, layout in enumerate(layouts)
        for members in LAYOUTS[layout]
    ]


def decompose(
    model: Any, directory: Path, dst: Path, groups: Groups, *, dtype: str = "float32"
) -> Any:
    """Writes a saved dense model in the canonical form, its weights cut to the groups' ranks.

    The factors are those of a plain SVD of the members' stacked weights; where a rank is above the
    number of singular values, rows of zeros fill it up.

    Args:
        model: the torch model, as ``make`` returns it.
        directory: where it is saved.
        dst: where the canonical form goes.
        groups: what is decomposed.
        dtype: of all tensors that are written, also the dense ones.

    Returns:
        A copy of the model in which W is the product u v, computed in float64 and cast to float32.
    """
    import torch

    from deinfer_jax.checkpoint import open_checkpoint
    from deinfer_jax.checkpoint.canonical import CanonicalWriter
    from deinfer_jax.checkpoint.factors import bias_name, low_rank_of, u_name, v_name
    from deinfer_jax.config_hf import low_rank_block

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    checkpoint = open_checkpoint(directory)
    tensors = {name: array.astype(kind) for name, array in checkpoint.tensors()}
    dense = copy.deepcopy(model)
    parameters = dict(dense.named_parameters())
    with torch.no_grad():
        for name, array in tensors.items():
            parameters[name].copy_(torch.from_numpy(array.astype(np.float32)))
        for members, rank in groups:
            weights = [tensors.pop(f"{module}.weight").astype(np.float64) for module in members]
            p, s, q = np.linalg.svd(np.concatenate(weights), full_matrices=False)
            root = np.sqrt(s[:rank])
            missing = rank - len(root)
            v = np.pad(root[:, None] * q[:rank], ((0, missing), (0, 0))).astype(kind)
            stacked = np.pad(p[:, :rank] * root, ((0, 0), (0, missing))).astype(kind)
            tensors[v_name(members)] = v
            ends = np.cumsum([len(weight) for weight in weights])[:-1]
            for module, u in zip(members, np.split(stacked, ends), strict=True):
                tensors[u_name(module)] = u
                if f"{module}.bias" in tensors:
                    tensors[bias_name(module)] = tensors.pop(f"{module}.bias")
                product = u.astype(np.float64) @ v.astype(np.float64)
                parameters[f"{module}.weight"].copy_(torch.from_numpy(product.astype(np.float32)))
    pieces: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        parts = name.split(".")
        piece = f"layer-{parts[2]}" if parts[1] == "layers" else "0-outer"
        pieces.setdefault(piece, {})[name] = array
    hf = checkpoint.hf_config() | {"dtype": dtype, "low_rank": low_rank_block(low_rank_of(groups))}
    with CanonicalWriter(dst, {"source": str(directory)}) as writer:
        for piece, held in pieces.items():
            writer.write(piece, held)
        writer.publish(hf, generation_config=checkpoint.generation_config())
    return dense


def _block(short: str) -> str:
    return "mlp" if short in ("gate", "up", "down") else "self_attn"
