"""What a checkpoint offers, whatever its format, and how the format is told from the content."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deinfer_jax.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GGUF_MAGIC = b"GGUF"


class Checkpoint(ABC):
    """A model on disk: configuration, tensors and tokenizer.

    Opening reads headers only. Tensors go by their canonical names, those of Hugging Face
    (``model.embed_tokens.weight``, ``model.layers.0.self_attn.q_proj.weight``, ``lm_head.weight``);
    weights of linears are [out, in]. Tied embeddings appear once, without ``lm_head.weight``.

    Attributes:
        path: the directory or file that was opened.
        config: of the model, as the checkpoint states it.
        description: the format in words, e.g. ``GGUF v3, Q4_1``.
    """

    path: Path
    config: ModelConfig
    description: str

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by canonical name, in file order; loads nothing."""

    @abstractmethod
    def stored_types(self) -> dict[str, str]:
        """How every tensor is stored (``BF16``, ``Q4_1``, …) by canonical name; loads nothing."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that the tensors of ``shapes()`` take in the files; loads nothing."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Canonical names and arrays in file order, one array materialised at a time.

        Yields:
            Arrays of the shape in ``shapes()`` that the caller owns: float32, float16 or bfloat16
            (ml_dtypes) as stored; quantised types are dequantised to float32.

        Raises:
            ValueError: the data cannot be read; the message names the file.
        """

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with its chat template, as a transformers tokenizer; needs no torch.

        Raises:
            FileNotFoundError: the checkpoint has no tokenizer.
            ValueError: the tokenizer is of an unsupported kind, or inconsistent.
        """


def import_transformers() -> Any:
    """The package transformers, late because importing it takes seconds.

    Without torch it says at its first import that no models are available, which need not worry
    anybody who wants a tokenizer.
    """
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint, whose format is told from the content.

    Args:
        path: a Hugging Face directory (with ``config.json``), a GGUF file, or a directory with
            exactly one ``.gguf`` file and no ``config.json``.

    Raises:
        FileNotFoundError: the path, or a file it must have, does not exist.
        ValueError: neither format, several GGUF files, an unsupported model, or a damaged file.
    """
    # The readers import this module for its base class.
    from deinfer_jax.checkpoint.gguf import GGUFCheckpoint
    from deinfer_jax.checkpoint.hf import HuggingFaceCheckpoint

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a model directory or a GGUF file, found nothing")
    if path.is_file():
        return GGUFCheckpoint(_checked_magic(path))
    if (path / "config.json").is_file():
        return HuggingFaceCheckpoint(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return GGUFCheckpoint(_checked_magic(ggufs[0]))
    if ggufs:
        raise ValueError(
            f"{path}: expected config.json or exactly one .gguf file, found "
            f"{', '.join(file.name for file in ggufs)}; pass the path of one of them"
        )
    raise FileNotFoundError(
        f"{path}: expected config.json (Hugging Face) or one .gguf file, found {listing(path)}"
    )


def listing(directory: Path, limit: int = 10) -> str:
    """Names in a directory for an error message, the first ``limit`` of them."""
    names = sorted(entry.name for entry in directory.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "an empty directory"


def _checked_magic(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        hint = "; pass the directory instead" if path.suffix in (".safetensors", ".json") else ""
        raise ValueError(
            f"{path}: expected a model directory or a GGUF file (magic {GGUF_MAGIC!r}), "
            f"got a file that starts with {magic!r}{hint}"
        )
    return path
