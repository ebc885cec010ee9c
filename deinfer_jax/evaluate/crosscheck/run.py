"""``crosscheck``: asks both sides and compares."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deinfer_jax.checkpoint.hf import HuggingFaceCheckpoint
from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.config import ModelConfig
from deinfer_jax.engine.llm import show_progress
from deinfer_jax.evaluate.crosscheck.flags import comparable
from deinfer_jax.evaluate.crosscheck.job import (
    CACHES,
    DEVICES,
    DTYPES,
    PERTURBATIONS,
    STRATEGIES,
    Job,
    Tokens,
)
from deinfer_jax.evaluate.crosscheck.report import CrosscheckReport
from deinfer_jax.evaluate.crosscheck.sides import Choice, Sides
from deinfer_jax.evaluate.crosscheck.variants import write_random

__all__ = ["crosscheck"]

PAGE_SIZE = 16


def crosscheck(
    path: str | os.PathLike[str] | None = None,
    *,
    random: str | None = None,
    strategy: str | Sequence[str] = "low_rank",
    ranks: int | Sequence[int] = 1,
    kv_cache: str | Sequence[str] = "full",
    dtype: str | None = None,
    device: str | None = None,
    cuda_graphs: bool | Sequence[bool] = False,
    perturb: str | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    forced: int = 12,
    greedy: int = 16,
    seed: int = 0,
    third_opinion: bool = True,
    timeout: float = 600.0,
    progress: bool | None = None,
) -> CrosscheckReport:
    """Compares JAX with the PyTorch reference on the same tokens, layer by layer and at the end, in
    prefill and in decode through the paged cache.

    Each side runs in processes of its own, one after the other, so that each has the device to
    itself; the JAX side once a cache kind, the PyTorch side for every combination of ``strategy``,
    ``ranks``, ``kv_cache`` and ``cuda_graphs``.

    Args:
        path: a Hugging Face directory, dense or in the canonical form.
        random: in the place of a path, a tiny random model: ``"qwen3"`` or ``"qwen3/shared-kv"``,
            see ``deinfer crosscheck --help``.
        strategy: of the PyTorch side, ``"dense"``, ``"naive"``, ``"low_rank"``, or several.
        ranks: processes of the PyTorch side, or several numbers.
        kv_cache: of both sides, ``"full"``, ``"latent"``, ``"full+latent"``, or several.
        dtype: of both sides; None = float32 on a CPU, the checkpoint's on a GPU.
        device: ``"cpu"`` or ``"cuda"``; None = the one that JAX finds.
        cuda_graphs: whether the PyTorch side decodes by CUDA graphs, or both.
        perturb: a thing that the PyTorch side breaks in itself, which must be noticed.
        tokens: prompts of at least two tokens, at least two of them; None = random ones.
        forced: decode steps with given tokens, at least 1.
        greedy: tokens that each prompt is continued by, at least 1.
        seed: of random weights and tokens.
        third_opinion: where float32 is past the limit of the relative norm, run PyTorch in float64
            and say how far both sides are from it.
        timeout: seconds that a process may take.
        progress: a bar; None = where stderr is a terminal.

    Returns:
        The report; ``report.passed`` says whether all is within the tolerance.

    Raises:
        ValueError: an argument or the checkpoint is wrong.
        FileNotFoundError: no such checkpoint.
        RuntimeError: PyTorch is not installed, or a side failed (``SideFailed``, with what it
            said).
    """
    settings = itertools.product(
        _several("strategy", strategy, STRATEGIES),
        _several("ranks", ranks, None),
        _several("cuda_graphs", cuda_graphs, (False, True)),
    )
    caches = _several("kv_cache", kv_cache, CACHES)
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("device", device, DEVICES),
        ("perturb", perturb, PERTURBATIONS),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)} or None, got {value!r}")
    if (path is None) == (random is None):
        raise ValueError(f"expected a path or a random model, got {path!r} and {random!r}")
    if forced < 1 or greedy < 1:
        raise ValueError(f"forced, greedy: expected at least 1, got {forced} and {greedy}")
    _check_torch()
    with tempfile.TemporaryDirectory(prefix="deinfer-crosscheck-") as name:
        folder = Path(name)
        if random is not None:
            model = folder / "model"
            config = write_random(random, model, seed=seed)
        else:
            assert path is not None
            model = Path(path).resolve()
            config = _config(model)
        device = device or _find_device()
        choices = [Choice(*setting) for setting in settings]
        if device == "cpu" and any(choice.cuda_graphs for choice in choices):
            raise ValueError("cuda_graphs: expected False on a CPU, got True")
        asked = Tokens.random(config.vocab_size, forced=forced, seed=seed, prompts=tokens)
        longest = max(len(prompt) for prompt in asked.prompts)
        job = Job(
            checkpoint=str(model),
            dtype=dtype or ("float32" if device == "cpu" else config.dtype),
            kv_cache=caches[0],
            page_size=PAGE_SIZE,
            prefill_chunk=max(24, longest // 3),  # no multiple of a page; long prompts in 3 or 4
            max_context=longest + max(forced, greedy),
            forced=forced,
            greedy=greedy,
            device=device,
            perturb=perturb,
        )
        sides = Sides(folder, job, asked, config, timeout, third_opinion)
        bar = tqdm(
            total=len(caches) * (1 + len(choices)),
            desc="crosscheck",
            unit="run",
            disable=not show_progress(progress),
        )
        with bar:
            runs = [run for cache in caches for run in sides.of_cache(cache, choices, bar)]
    return CrosscheckReport(
        model=random or str(path),
        dtype=job.dtype,
        device=device,
        perturb=perturb,
        seed=seed,
        prompts=tuple(len(prompt) for prompt in asked.prompts),
        forced=forced,
        greedy=greedy,
        tolerance=sides.tolerance,
        flags=comparable({}, device=device, dtype=job.dtype),
        runs=tuple(runs),
    )


def _several(name: str, values: Any, known: Sequence[Any] | None) -> tuple[Any, ...]:
    """One value or several as a tuple of known ones; without ``known``, positive integers."""
    found = (values,) if isinstance(values, str | int) else tuple(values)
    for value in found:
        if known is None:
            well = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            expected = "positive integers"
        else:
            well, expected = value in known, f"some of {', '.join(map(str, known))}"
        if not well:
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
    if not found or len(set(found)) != len(found):
        raise ValueError(f"{name}: expected distinct values, got {list(found)}")
    return found


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError(
            "the cross-check needs PyTorch, which is not installed: "
            "pip install 'deinfer-jax[torch]'. Everything else works without it; "
            "`deinfer perplexity` and `deinfer generate` are two ways to judge a model meanwhile"
        )


def _config(model: Path) -> ModelConfig:
    checkpoint = open_checkpoint(model)
    if not isinstance(checkpoint, HuggingFaceCheckpoint):
        raise ValueError(
            f"{model}: expected a Hugging Face directory (config.json and safetensors), which the "
            "reference reads, got a GGUF model; `deinfer decompose` makes one of it"
        )
    return checkpoint.config


def _find_device() -> str:
    """The device that JAX takes by default, asked in another process: one that has looked at a GPU
    holds most of its memory, and here the sides need it."""
    code = "import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"JAX finds no device: {done.stderr.strip().splitlines()[-1]}")
    return "cuda" if done.stdout.split()[-1] == "gpu" else "cpu"
