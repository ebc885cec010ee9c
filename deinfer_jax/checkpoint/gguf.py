"""GGUF files of the architectures llama, qwen2 and qwen3.

The package ``gguf`` supplies the types and the dequantisation; ``gguf_header`` says why not the
rest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

from deinfer_jax.checkpoint.gguf_header import GGUFTensor, read_header
from deinfer_jax.checkpoint.source import Checkpoint, check_names
from deinfer_jax.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"
PLAIN_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
ROTATED = re.compile(r"self_attn\.[qk]_proj\.(weight|bias)$")

T = TypeVar("T", int, float, bool, str)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file.

    The row order of q and k is restored where llama.cpp interleaves it (architecture llama), and
    ``rope_freqs.weight`` becomes ``config.rope.divisors``. ``config.dtype`` is float32 or float16
    where all matrices are stored in it, float32 for mixtures of the two, bfloat16 otherwise.

    Raises:
        ValueError: a damaged file, an unsupported architecture, type or setting, or a tensor with
            no place in the model; the message names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        version, self.metadata, tensors = read_header(self.path)
        arch = self._get("general.architecture", str)
        if arch not in ARCHITECTURES:
            raise self._error(
                f"architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        if self._get("split.count", int, 1) > 1:
            raise self._error(
                f"it is one of {self.metadata['split.count']} parts; expected a whole file: merge "
                "them with `llama-gguf-split --merge`"
            )
        self._arch = arch
        layers = self._get(f"{arch}.block_count", int)
        freqs = [tensor for tensor in tensors if tensor.name == ROPE_FREQS]
        self._tensors = {
            self._canonical(tensor.name, layers): tensor
            for tensor in tensors
            if tensor not in freqs
        }
        for tensor in tensors:
            self._check_type(tensor)
        divisors = tuple(self._load(freqs[0]).ravel().tolist()) if freqs else None
        self.config = self._read_config(layers, divisors)
        self._check_rotated()
        self.description = f"GGUF v{version}, {self._matrix_types().most_common(1)[0][0]}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See ``Checkpoint.shapes``."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_types(self) -> dict[str, str]:
        """See ``Checkpoint.stored_types``."""
        return {name: tensor.type.name for name, tensor in self._tensors.items()}

    def stored_bytes(self) -> int:
        """See ``Checkpoint.stored_bytes``."""
        return sum(tensor.n_bytes for tensor in self._tensors.values())

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Checkpoint.tensors``."""
        wanted = check_names(self.path, self._tensors if names is None else names, self._tensors)
        for name, tensor in self._tensors.items():
            if name not in wanted:
                continue
            interleaved = self._arch == "llama" and ROTATED.search(name) is not None
            heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            yield name, self._load(tensor, heads if interleaved else None)

    def hf_config(self) -> dict[str, Any]:
        """See ``Checkpoint.hf_config``."""
        return self.config.to_hf()

    def generation_config(self) -> None:
        """None: the file's end tokens are all in ``config``."""

    def files(self) -> list[Path]:
        """See ``Checkpoint.files``."""
        return [self.path]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See ``Checkpoint.tokenizer``."""
        from deinfer_jax.checkpoint.gguf_tokenizer import build_tokenizer

        return build_tokenizer(self.metadata, self.path)

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")

    def _get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.metadata.get(key, default)
        if value is None:
            raise self._error(f"expected metadata {key!r}, the file has none")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind):
            raise self._error(f"metadata {key!r}: expected {kind.__name__}, got {value!r}")
        return value

    def _canonical(self, name: str, layers: int) -> str:
        if name in OUTER_NAMES:
            return OUTER_NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and int(match[1]) < layers:
            module = LINEARS.get(match[2]) or (
                NORMS.get(match[2]) if match[3] == "weight" else None
            )
            if module:
                return f"model.layers.{match[1]}.{module}.{match[3]}"
        raise self._error(
            f"tensor {name!r} has no place in a {self._arch} model of {layers} layers; expected "
            f"{', '.join((*OUTER_NAMES, ROPE_FREQS))}, or blk.N. and {', '.join(LINEARS | NORMS)}"
        )

    def _check_type(self, tensor: GGUFTensor) -> None:
        from gguf import GGML_QUANT_SIZES, quants

        if tensor.type.name in PLAIN_TYPES:
            return
        try:
            block = np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8)
            quants.dequantize(block, tensor.type)
        except NotImplementedError:
            raise self._error(
                f"tensor {tensor.name!r} has type {tensor.type.name}; expected F32, F16, BF16 or a "
                "quantised type that the package gguf can dequantise"
            ) from None
        if len(tensor.shape) < 2:
            raise self._error(
                f"vector {tensor.name!r} is {tensor.type.name}; expected F32, F16 or BF16"
            )

    def _check_rotated(self) -> None:
        config = self.config
        for name, tensor in self._tensors.items():
            if ROTATED.search(name):
                heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
                if tensor.shape[0] != heads * config.head_dim:
                    raise self._error(
                        f"tensor {tensor.name!r}: expected {heads} heads of {config.head_dim} "
                        f"rows, got shape {list(tensor.shape)}"
                    )

    def _load(self, tensor: GGUFTensor, interleaved_heads: int | None = None) -> np.ndarray:
        from gguf import quants

        raw = np.fromfile(self.path, np.uint8, tensor.n_bytes, offset=tensor.offset)
        if raw.size != tensor.n_bytes:  # cut after it was opened
            raise self._error(
                f"tensor {tensor.name!r}: expected {tensor.n_bytes} bytes, got {raw.size}"
            )
        if interleaved_heads is not None:
            # llama.cpp rotates neighbours (2j, 2j+1), the model halves (j, j + H/2). A row is a
            # whole number of bytes, so rows move before they are dequantised, and are small.
            rows = raw.reshape(interleaved_heads, tensor.shape[0] // interleaved_heads // 2, 2, -1)
            raw = rows.swapaxes(1, 2).reshape(-1)
        if (plain := PLAIN_TYPES.get(tensor.type.name)) is not None:
            return raw.view(plain).reshape(tensor.shape)
        out = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), np.float32)
        raw = raw.reshape(len(out), -1)
        step = max(1, (1 << 22) // tensor.shape[-1])  # in pieces: gguf needs the output twice
        for row in range(0, len(out), step):
            out[row : row + step] = quants.dequantize(raw[row : row + step], tensor.type)
        return out.reshape(tensor.shape)

    def _matrix_types(self) -> Counter[str]:
        """Elements by type, without norms and biases, which are float32 in every file."""
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.type.name] += math.prod(tensor.shape)
        return sizes

    def _read_config(self, layers: int, divisors: tuple[float, ...] | None) -> ModelConfig:
        arch, names = self._arch, {tensor.name for tensor in self._tensors.values()}
        embeddings = self._tensors.get(OUTER_NAMES["token_embd.weight"])
        if embeddings is None or len(embeddings.shape) != 2:
            raise self._error("expected a tensor 'token_embd.weight' [words, width]")
        width = self._get(f"{arch}.embedding_length", int)
        heads = self._uniform("attention.head_count", None)
        if heads < 1:
            raise self._error(f"metadata '{arch}.attention.head_count': expected >= 1, got {heads}")
        head_dim = self._get(f"{arch}.attention.key_length", int, width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (got := self._get(f"{arch}.{key}", int, head_dim)) != head_dim:
                raise self._error(
                    f"metadata '{arch}.{key}': expected the head width {head_dim}, got {got}"
                )
        if divisors is not None and len(divisors) != head_dim // 2:
            raise self._error(
                f"tensor {ROPE_FREQS!r}: expected {head_dim // 2} divisors, half a head, "
                f"got {len(divisors)}"
            )
        window = self._get(f"{arch}.attention.sliding_window", int, 0) or None
        if window and f"{arch}.attention.sliding_window_pattern" in self.metadata:
            raise self._error(f"'{arch}.attention.sliding_window_pattern' is not supported")
        types = set(self._matrix_types())
        dtype = "float32" if types <= {"F32", "F16"} else "bfloat16"
        ids = "tokenizer.ggml.{}_token_id"
        eos = [self.metadata.get(ids.format(name)) for name in ("eos", "eot", "eom")]

        def has(pattern: str) -> bool:
            return any(re.search(pattern, name) for name in names)

        fields: dict[str, Any] = {
            "vocab_size": embeddings.shape[0],
            "hidden_size": width,
            "intermediate_size": self._uniform("feed_forward_length", None),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": self._uniform("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._get(f"{arch}.attention.layer_norm_rms_epsilon", float),
            "max_position": self._get(f"{arch}.context_length", int),
            "tie_embeddings": "output.weight" not in names,
            "qkv_bias": has(r"\.attn_[qkv]\.bias$"),
            "o_bias": has(r"\.attn_output\.bias$"),
            "mlp_bias": has(r"\.ffn_\w+\.bias$"),
            "qk_norm": has(r"\.attn_[qk]_norm\.weight$"),
            "windows": (window,) * layers,
            "bos_token_id": self.metadata.get(ids.format("bos")),
            "eos_token_ids": tuple(dict.fromkeys(token for token in eos if token is not None)),
            "dtype": "float16" if types == {"F16"} else dtype,
        }
        rope = self._read_rope()
        try:
            return ModelConfig(rope=RopeConfig(divisors=divisors, **rope), **fields)
        except ValueError as error:
            raise self._error(str(error)) from error

    def _uniform(self, key: str, default: int | None) -> int:
        """An integer that the file may also give layer by layer, if all are equal."""
        value = self.metadata.get(f"{self._arch}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1 or not isinstance(value[0], int):
                raise self._error(
                    f"metadata '{self._arch}.{key}' differs by layer: {value}; expected one"
                )
            return value[0]
        return self._get(f"{self._arch}.{key}", int, default)

    def _read_rope(self) -> dict[str, Any]:
        rope = f"{self._arch}.rope"
        theta = self._get(f"{rope}.freq_base", float, 10000.0)
        factor = self._get(f"{rope}.scaling.factor", float, 0.0)
        factor = factor or self._get(f"{rope}.scale_linear", float, 0.0)  # the old key
        # As in llama.cpp: a factor without a type is linear, 0 and 1 are none.
        kind = self._get(f"{rope}.scaling.type", str, "linear")
        if kind not in ("none", "linear", "yarn"):
            raise self._error(
                f"metadata '{rope}.scaling.type': expected none, linear or yarn, got {kind!r}"
            )
        if kind == "none" or factor in (0.0, 1.0):
            return {"theta": theta}
        if kind == "linear":
            return {"theta": theta, "kind": "linear", "factor": factor}
        if self._get(f"{rope}.scaling.yarn_ext_factor", float, 1.0) != 1.0:
            raise self._error(f"metadata '{rope}.scaling.yarn_ext_factor': only 1 is supported")
        scale = math.prod(
            self._get(f"{rope}.scaling.{name}", float, 1.0)
            for name in ("attn_factor", "yarn_attn_factor")
        )
        context = self._get(f"{self._arch}.context_length", int)
        return {
            "theta": theta,
            "kind": "yarn",
            "factor": factor,
            "original_max_position": self._get(
                f"{rope}.scaling.original_context_length", int, context
            ),
            "beta_fast": self._get(f"{rope}.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": self._get(f"{rope}.scaling.yarn_beta_slow", float, 1.0),
            # llama.cpp multiplies the usual factor
            "attention_factor": None if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
        }
