"""GGUF files of the architectures llama, qwen2 and qwen3.

The header is read here, in one bounds-checked pass: ``gguf.GGUFReader`` makes a numpy view of every
word of the vocabulary (2.3 s for 49 k words, where this takes 0.1 s) and meets a cut file with
IndexErrors. The package ``gguf`` supplies the types and the dequantisation.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

from deinfer_jax.checkpoint.source import GGUF_MAGIC, Checkpoint
from deinfer_jax.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "qwen2", "qwen3")
VERSIONS = (2, 3)
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
# struct codes of GGUF's scalar types; 8 is a string and 9 an array.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str  # in the file
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    n_bytes: int


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
        version, self.metadata, tensors = _read_header(self.path)
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

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """See ``Checkpoint.tensors``."""
        for name, tensor in self._tensors.items():
            interleaved = self._arch == "llama" and ROTATED.search(name) is not None
            heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            yield name, self._load(tensor, heads if interleaved else None)

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

    def _check_type(self, tensor: _Tensor) -> None:
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

    def _load(self, tensor: _Tensor, interleaved_heads: int | None = None) -> np.ndarray:
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
            if len(set(value)) != 1:
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


class _Cursor:
    """Reads a GGUF header front to back; ``what`` says in errors what is being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.what = path, data, 0, "the header"

    def need(self, count: int) -> None:
        if self.position + count > len(self.data):
            raise ValueError(
                f"{self.path}: truncated or corrupt at {self.what}: expected at least "
                f"{self.position + count} bytes, the file has {len(self.data)}"
            )

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self.need(size)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += size
        return values

    def string(self) -> str:
        size = self.scalar("Q")
        self.need(size)
        raw = self.data[self.position : self.position + size]
        self.position += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}: corrupt at {self.what}: expected UTF-8, got {raw[:40]!r}"
            ) from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            value = self.scalar(SCALARS[kind])
            # A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06.
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(
                f"{self.path}: corrupt at {self.what}: expected a type 0 to 12, got {kind}"
            )
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            return list(self.scalars(SCALARS[inner], count))
        self.need(8 * count)  # the least a string or an array takes: a corrupt count fails at once
        return [self.value(inner) for _ in range(count)]


def _read_header(path: Path) -> tuple[int, dict[str, Any], list[_Tensor]]:
    """Version, metadata and tensors, whose data is checked to lie within the file."""
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
        if magic != GGUF_MAGIC:
            raise ValueError(f"{path}: expected a GGUF file (magic {GGUF_MAGIC!r}), got {magic!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(_Cursor(path, data))


def _parse_header(cursor: _Cursor) -> tuple[int, dict[str, Any], list[_Tensor]]:
    cursor.position = len(GGUF_MAGIC)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        hint = " (big-endian files are not read)" if version % 65536 == 0 else ""
        raise ValueError(f"{cursor.path}: GGUF version {version}{hint}; expected 2 or 3")
    tensor_count, metadata_count = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for number in range(metadata_count):
        cursor.what = f"metadata entry {number + 1} of {metadata_count}"
        key = cursor.string()
        cursor.what += f", {key!r}"
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for number in range(tensor_count):
        cursor.what = f"tensor header {number + 1} of {tensor_count}"
        name = cursor.string()
        shape = cursor.scalars("Q", cursor.scalar("I"))[::-1]  # innermost first in the file
        infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(
            f"{cursor.path}: metadata 'general.alignment': expected >= 1, got {alignment!r}"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = [_tensor(cursor, name, shape, kind, start + at) for name, shape, kind, at in infos]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError(f"{cursor.path}: corrupt: a tensor is listed twice")
    return version, metadata, tensors


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> _Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{cursor.path}: tensor {name!r} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(
            f"{cursor.path}: tensor {name!r}: expected rows of a multiple of {block} elements "
            f"({type_.name}), got shape {list(shape)}"
        )
    n_bytes = math.prod(shape) // block * block_bytes
    cursor.position, cursor.what = offset, f"the data of tensor {name!r}"
    cursor.need(n_bytes)
    return _Tensor(name, type_, shape, offset, n_bytes)
