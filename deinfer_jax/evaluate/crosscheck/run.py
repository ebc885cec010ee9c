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
    JAX_STRATEGIES,
    PERTURBATIONS,
    STRATEGIES,
    Job,
    Tokens,
)
from deinfer_jax.evaluate.crosscheck.report import CrosscheckReport
from deinfer_jax.evaluate.crosscheck.sides import JaxChoice, Sides, TorchChoice
from deinfer_jax.evaluate.crosscheck.variants import write_random
from deinfer_jax.parallel.strategies import get_strategy

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
    jax_strategy: str | Sequence[str] = "auto",
    jax_devices: int | Sequence[int] = 1,
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
    itself; the JAX side for every combination of ``jax_strategy``, ``jax_devices`` and
    ``kv_cache``, the PyTorch side for every one of ``strategy``, ``ranks``, ``cuda_graphs`` and
    ``kv_cache``. All answers with the same cache are compared with each other.

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
        jax_strategy: of the JAX side, ``"auto"``, ``"dense"``, ``"naive"``, ``"low_rank"``,
            ``"sharded"``, or several. ``"dense"`` multiplies the factors out and has no latents:
            of several settings, it is left out where the cache has some, and ``report.left_out``
            says so.
        jax_devices: of the JAX side, or several numbers; on a CPU its processes simulate them.
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
        ValueError: an argument or the checkpoint is wrong, or no JAX setting goes with any cache.
        FileNotFoundError: no such checkpoint.
        RuntimeError: PyTorch is not installed, or a side failed (``SideFailed``, with what it
            said).
    """
    settings = itertools.product(
        _several("strategy", strategy, STRATEGIES),
        _several("ranks", ranks, None),
        _several("cuda_graphs", cuda_graphs, (False, True)),
    )
    ours = itertools.product(
        _several("jax_strategy", jax_strategy, JAX_STRATEGIES),
        _several("jax_devices", jax_devices, None),
    )
    caches = _several("kv_cache", kv_cache, CACHES)
    by_cache, left_out = _possible([JaxChoice(*setting) for setting in ours], caches)
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
        _check_width(by_cache, config)
        choices = [TorchChoice(*setting) for setting in settings]
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
            total=sum(len(some) + len(choices) for some in by_cache.values()),
            desc="crosscheck",
            unit="run",
            disable=not show_progress(progress),
        )
        with bar:
            runs = [
                run
                for cache, some in by_cache.items()
                for run in sides.of_cache(cache, some, choices, bar)
            ]
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
        left_out=left_out,
    )


def _possible(
    ours: Sequence[JaxChoice], caches: Sequence[str]
) -> tuple[dict[str, list[JaxChoice]], tuple[str, ...]]:
    """JAX settings by the cache kinds that they can have, and in words what cannot be."""
    names = dict.fromkeys(one.strategy for one in ours if one.strategy != "auto")
    without = [name for name in names if get_strategy(name, 1).multiplies_out]
    by_cache = {
        cache: [one for one in ours if cache == "full" or one.strategy not in without]
        for cache in caches
    }
    if not any(by_cache.values()):
        raise ValueError(
            f"kv_cache: expected 'full' for jax_strategy {' and '.join(without)}, which multiplies "
            f"the factors out and has no latents to cache, got {', '.join(caches)}"
        )
    left_out = tuple(
        f"JAX {name}, {cache}: its factors are multiplied out, it has no latents to cache"
        for cache in caches
        if cache != "full"
        for name in without
    )
    return {cache: some for cache, some in by_cache.items() if some}, left_out


def _check_width(by_cache: dict[str, list[JaxChoice]], config: ModelConfig) -> None:
    """Raises ValueError where a strategy cannot split the model over so many devices."""
    for one in itertools.chain(*by_cache.values()):
        if one.strategy != "auto":
            get_strategy(one.strategy, one.devices).residual(config.hidden_size)


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
