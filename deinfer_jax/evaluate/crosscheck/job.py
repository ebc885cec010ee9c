"""What both sides are asked, in a folder: ``job.json`` and ``tokens.npz``, answers beside them.

The other side reads the same files with code of its own; docs/architecture.md describes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "CACHES",
    "DEVICES",
    "DTYPES",
    "JAX_STRATEGIES",
    "PERTURBATIONS",
    "STRATEGIES",
    "Job",
    "Tokens",
]

DTYPES = ("float32", "bfloat16", "float16")
CACHES = ("full", "latent", "full+latent")
STRATEGIES = ("dense", "naive", "low_rank")  # of the PyTorch side
JAX_STRATEGIES = ("auto", "dense", "naive", "low_rank", "sharded")
DEVICES = ("cpu", "cuda")
# What the other side can break in itself, by the names that it knows.
PERTURBATIONS = (
    "rope-theta",
    "norm-eps",
    "one-weight",
    "slice-offset",
    "head-order",
    "position",
    "page",
    "residual",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A question to one side.

    Attributes:
        checkpoint: absolute path of a Hugging Face directory, dense or in the canonical form.
        dtype: of weights, activations and cache. ``"float64"`` is for the PyTorch side only.
        kv_cache: ``"full"``, ``"latent"`` or ``"full+latent"``.
        page_size: S.
        prefill_chunk: tokens of a prompt that run at once; fewer than the longest has.
        max_context: most tokens of a sequence.
        forced: decode steps whose tokens are given.
        greedy: tokens that each sequence decodes freely.
        device: ``"cpu"`` or ``"cuda"``.
        jax_strategy, jax_devices: of the JAX side.
        strategy, ranks, cuda_graphs: of the PyTorch side.
        perturb: what the PyTorch side breaks in itself, or None.
    """

    checkpoint: str
    dtype: str
    kv_cache: str
    page_size: int
    prefill_chunk: int
    max_context: int
    forced: int
    greedy: int
    device: str
    jax_strategy: str = "auto"
    jax_devices: int = 1
    strategy: str = "low_rank"
    ranks: int = 1
    cuda_graphs: bool = False
    perturb: str | None = None

    def write(self, folder: Path, tokens: Tokens) -> None:
        """Makes the folder with the job in it."""
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        arrays: dict[str, Any] = {f"prompt_{i}": ids for i, ids in enumerate(tokens.prompts)}
        np.savez(folder / "tokens.npz", forced=tokens.forced, **arrays)

    @classmethod
    def read(cls, folder: Path) -> tuple[Job, Tokens]:
        """What :meth:`write` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: ``job.json`` has other keys.
        """
        fields = json.loads((folder / "job.json").read_text())
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != expected:
            raise ValueError(
                f"{folder / 'job.json'}: expected the keys {', '.join(sorted(expected))}, "
                f"got {', '.join(sorted(fields))}"
            )
        with np.load(folder / "tokens.npz") as arrays:
            count = len(arrays.files) - 1
            prompts = tuple(arrays[f"prompt_{i}"] for i in range(count))
            return cls(**fields), Tokens(prompts, arrays["forced"])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a job.

    Attributes:
        prompts: int32 [P_i], B of them, of different lengths.
        forced: int32 [forced, B]; row s is run at position P_b + s of sequence b.
    """

    prompts: tuple[np.ndarray, ...]
    forced: np.ndarray

    @classmethod
    def random(
        cls, vocab_size: int, *, forced: int, seed: int, prompts: Sequence[Any] | None = None
    ) -> Tokens:
        """Given or random prompts, and random tokens to decode after them.

        Args:
            vocab_size: W.
            forced: decode steps.
            seed: of all random ids.
            prompts: token ids; None = :data:`PROMPTS` random ones.

        Raises:
            ValueError: fewer than two prompts, a prompt of fewer than two tokens, or an id that is
                not in the vocabulary.
        """
        rng = np.random.default_rng(seed)
        if prompts is None:
            prompts = [rng.integers(vocab_size, size=length) for length in PROMPTS]
        arrays = tuple(np.asarray(prompt) for prompt in prompts)
        if len(arrays) < 2:
            raise ValueError(f"tokens: expected at least two prompts, got {len(arrays)}")
        for i, array in enumerate(arrays):
            if array.ndim != 1 or len(array) < 2 or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(
                    f"tokens: prompt {i}: expected a list of at least two token ids, "
                    f"got {array.dtype} {list(array.shape)}"
                )
            if array.min() < 0 or array.max() >= vocab_size:
                raise ValueError(
                    f"tokens: prompt {i}: expected ids from 0 to {vocab_size - 1}, "
                    f"got {array.min()} to {array.max()}"
                )
        steps = rng.integers(vocab_size, size=(forced, len(arrays)))
        return cls(tuple(array.astype(np.int32) for array in arrays), steps.astype(np.int32))


# No multiple of a page or of a chunk, and the second one ends just behind a page's end.
PROMPTS = (53, 33, 61)
