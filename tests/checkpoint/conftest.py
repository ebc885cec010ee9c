"""Writers of tiny checkpoints, through libraries that are independent of the reader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

D, F, LAYERS, HEADS, KV_HEADS, H, WORDS = 64, 96, 2, 4, 2, 32, 40

WriteGGUF = Callable[..., Path]


def tiny_weights(seed: int = 0, *, bias: bool = False, qk_norm: bool = False, head: bool = True):
    """Float32 weights of a tiny model by Hugging Face name, in the layout of Hugging Face."""
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"model.embed_tokens.weight": make(WORDS, D)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        weights |= {
            f"{block}input_layernorm.weight": make(D),
            f"{block}self_attn.q_proj.weight": make(HEADS * H, D),
            f"{block}self_attn.k_proj.weight": make(KV_HEADS * H, D),
            f"{block}self_attn.v_proj.weight": make(KV_HEADS * H, D),
            f"{block}self_attn.o_proj.weight": make(D, HEADS * H),
            f"{block}post_attention_layernorm.weight": make(D),
            f"{block}mlp.gate_proj.weight": make(F, D),
            f"{block}mlp.up_proj.weight": make(F, D),
            f"{block}mlp.down_proj.weight": make(D, F),
        }
        if bias:
            for name, rows in (("q", HEADS * H), ("k", KV_HEADS * H), ("v", KV_HEADS * H)):
                weights[f"{block}self_attn.{name}_proj.bias"] = make(rows)
        if qk_norm:
            weights |= {f"{block}self_attn.{name}_norm.weight": make(H) for name in "qk"}
    weights["model.norm.weight"] = make(D)
    if head:
        weights["lm_head.weight"] = make(WORDS, D)
    return weights


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp stores them: row j of a head's first half, then of its second."""
    out = np.empty_like(weight)
    width = weight.shape[0] // heads
    for head in range(heads):
        for j in range(width // 2):
            out[head * width + 2 * j] = weight[head * width + j]
            out[head * width + 2 * j + 1] = weight[head * width + width // 2 + j]
    return out


def _gguf_name(name: str) -> str:
    short = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    for long, word in short.items():
        name = name.replace(long, word)
    return name


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes a tiny GGUF file.

    ``keys`` overrides metadata ({key without architecture: value}, None removes), ``extra`` adds
    full keys, ``tensors`` adds tensors by GGUF name, ``tokenizer`` is a function of the writer.
    """
    import gguf

    def write(
        weights: dict[str, np.ndarray],
        arch: str = "llama",
        *,
        name: str = "tiny.gguf",
        matrix_type: str = "F32",
        keys: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        values: dict[str, Any] = {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": D,
            "feed_forward_length": F,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": H,
            "attention.value_length": H,
            "rope.dimension_count": H,
            "rope.freq_base": 50000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **(keys or {}),
        }
        metadata = {f"{arch}.{key}": value for key, value in values.items()} | (extra or {})
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        if tokenizer is not None:
            tokenizer(writer)
        for hf_name, weight in weights.items():
            if arch == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
                weight = interleave(weight, HEADS if ".q_proj." in hf_name else KV_HEADS)
            qtype = gguf.GGMLQuantizationType[matrix_type if weight.ndim > 1 else "F32"]
            if qtype.name == "F16":
                writer.add_tensor(_gguf_name(hf_name), weight.astype(np.float16))
            else:
                data = gguf.quants.quantize(weight, qtype)
                writer.add_tensor(_gguf_name(hf_name), data, raw_dtype=qtype)
        for gguf_name, weight in (tensors or {}).items():
            writer.add_tensor(gguf_name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(name="tiny_weights")
def tiny_weights_fixture() -> Callable[..., dict[str, np.ndarray]]:
    return tiny_weights
