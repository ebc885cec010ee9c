"""Tiny random models of every variant, made by transformers and saved as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
