"""What a checkpoint offers, whatever its format, and how the format is told from the content."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from deinfer_jax.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GGUF_MAGIC = b"GGUF"
UNFINISHED = "unfinished.json"  # marks the directory that a CanonicalWriter works in
ORBAX_METADATA, ORBAX_MANIFEST = "_METADATA", "manifest.ocdbt"

# A tensor's name and what of it, a slice for every axis; () = all.
Block = tuple[str, tuple[slice, ...]]


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
    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Canonical names and arrays in file order, one array materialised at a time.

        Args:
            names: which ones, read without reading the others; None = all.

        Yields:
            Arrays of the shape in ``shapes()`` that the caller owns: float32, float16 or bfloat16
            (ml_dtypes) as stored; quantised types are dequantised to float32.

        Raises:
            ValueError: the data cannot be read, or there is no such tensor; the message names the
                file.
        """

    def tensor(self, name: str) -> np.ndarray:
        """One array, see ``tensors``."""
        ((_, array),) = self.tensors([name])
        return array

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The ``config.json`` that describes the model: as it is written in a Hugging Face
        directory, with ``low_rank`` and fields that we do not read; ``config.to_hf()`` for GGUF."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any] | None:
        """``generation_config.json`` as it is written, or None where there is none."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that configuration and tensors come from, in the order of their names."""

    def sha256(self, *, progress: bool = False) -> str:
        """Hash of all bytes of ``files()``, which tells one model from another.

        Every byte is read, at about the disk's speed. For GGUF it is what ``sha256sum model.gguf``
        prints; for a directory it is the hash of what ``sha256sum`` prints of its files, e.g.
        ``sha256sum config.json generation_config.json model*.safetensors | sha256sum``.

        Args:
            progress: show a bar with bytes a second.
        """
        files = self.files()
        total = sum(file.stat().st_size for file in files)
        bar = tqdm(total=total, desc="hashing", unit="B", unit_scale=True, disable=not progress)
        with bar:
            sums = [(_file_sha256(file, bar), file.name) for file in files]
        if self.path.is_file():
            return sums[0][0]
        return hashlib.sha256("".join(f"{s}  {name}\n" for s, name in sums).encode()).hexdigest()

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with its chat template, as a transformers tokenizer; needs no torch.

        Raises:
            FileNotFoundError: the checkpoint has no tokenizer.
            ValueError: the tokenizer is of an unsupported kind, or inconsistent.
        """


class SlicedCheckpoint(Checkpoint):
    """A checkpoint that reads parts of tensors, so that every device gets its own and no more."""

    @abstractmethod
    def blocks(self, wanted: Sequence[Block]) -> Iterator[np.ndarray]:
        """Parts of tensors, all of which are being read at once.

        Args:
            wanted: which ones.

        Yields:
            One array for each, in order, as ``tensors`` would have it.

        Raises:
            ValueError: the data cannot be read; the message names the tensor.
        """


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what a tokenizer does, whatever files it comes from: words, merges and rules, special
    tokens and chat template.

    Args:
        tokenizer: as ``Checkpoint.tokenizer`` gives it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # those written in Python
        rules = {"class": type(tokenizer).__name__, "words": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        for state in ("padding", "truncation"):  # of the last call, no property of the tokenizer
            rules.pop(state, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = {"rules": rules, "special": special, "chat": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
        path: a Hugging Face directory (with ``config.json``), a directory that ``LLM.save`` or
            Orbax wrote (with ``config.json`` too), a GGUF file, or a directory with exactly one
            ``.gguf`` file and no ``config.json``.

    Raises:
        FileNotFoundError: the path, or a file it must have, does not exist.
        ValueError: none of these formats, several GGUF files, an unsupported model, or a damaged
            or unfinished one.
    """
    # The readers import this module for its base class.
    from deinfer_jax.checkpoint.gguf import GGUFCheckpoint
    from deinfer_jax.checkpoint.hf import HuggingFaceCheckpoint
    from deinfer_jax.checkpoint.orbax_reader import OrbaxCheckpoint

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a model directory or a GGUF file, found nothing "
            "(models are not downloaded)"
        )
    if path.is_file():
        return GGUFCheckpoint(_checked_magic(path))
    if (path / UNFINISHED).is_file():
        raise ValueError(
            f"{path}: expected a model, found an unfinished one: the run that writes it is still "
            "going or was interrupted; run the same command again to go on from there, or delete "
            "the directory"
        )
    if any((path / name).is_file() for name in (ORBAX_METADATA, ORBAX_MANIFEST)):
        return OrbaxCheckpoint(path)
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


def check_names(path: Path, names: Iterable[str], known: Iterable[str]) -> set[str]:
    """``names`` as a set, of which each must be known."""
    wanted = set(names)
    unknown = sorted(wanted.difference(known))
    if unknown:
        raise ValueError(f"{path}: there are no tensors {', '.join(unknown[:10])}")
    return wanted


def _file_sha256(path: Path, bar: tqdm[Any]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            bar.update(size)
    return digest.hexdigest()


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
