"""``load``: from a checkpoint or a config to an ``LLM`` on one device or several."""

from __future__ import annotations

import logging
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.cache.choice import DEVICES, Situation, choose_layout
from deinfer_jax.cache.layout import default_page_size
from deinfer_jax.checkpoint.multiplied import MultipliedOut
from deinfer_jax.checkpoint.parameters import load_parameters, nested, random_parameters
from deinfer_jax.checkpoint.source import Checkpoint, open_checkpoint
from deinfer_jax.config import LowRank, ModelConfig
from deinfer_jax.engine.arrangement import arrange
from deinfer_jax.engine.buckets import Buckets
from deinfer_jax.engine.core import Core
from deinfer_jax.engine.llm import LLM, show_progress
from deinfer_jax.engine.memory import (
    MemoryPlan,
    available_bytes,
    choose_capacity,
    explained,
    guess_temporaries,
    room_for_cache,
)
from deinfer_jax.engine.runner import Runner
from deinfer_jax.engine.scheduler import Scheduler
from deinfer_jax.folders import cache_folder
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.mesh import platform_of
from deinfer_jax.parallel.processes import join, told_to_others
from deinfer_kernels import check_available

__all__ = ["load"]

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


@told_to_others
def load(
    path_or_config: str | os.PathLike[str] | ModelConfig,
    *,
    strategy: str = "auto",
    tensor_parallel: int | Mesh | None = None,
    kv_cache: str = "auto",
    dtype: str | None = None,
    max_batch: int | None = None,
    max_context: int | None = None,
    page_size: int | None = None,
    cache_bytes: int | None = None,
    prefill_chunk: int | None = None,
    decode_steps: int | None = None,
    prefix_sharing: bool = True,
    implementation: str | None = None,
    progress: bool | None = None,
    seed: int = 0,
) -> LLM:
    """Puts a model on a device, or spreads it over several.

    The devices may be those of several processes. Each calls ``jax.distributed.initialize`` first,
    then ``load`` with the same arguments, then :func:`generate`, ``llm.logits`` and so on, all in
    the same order; the prompts and parameters that count are those of process 0. A process that
    dies or hangs ends the others within 15 seconds, with its number on stderr.

    Args:
        path_or_config: a Hugging Face directory (safetensors), a GGUF file or a directory with one,
            or what ``LLM.save`` wrote; or a ``ModelConfig``, which gives random weights made on the
            device, for benches and tests.
        strategy: how products are split over devices: ``"dense"``, ``"naive"``, ``"low_rank"``,
            ``"sharded"`` (see ``docs/strategies.md``), or one that was registered. ``"dense"``
            multiplies factors out, on one device too. ``"auto"``: the planner's choice.
        tensor_parallel: devices, of all processes together, or a mesh whose only axis is ``tp``;
            1 = one of this process; None = all GPUs that the model divides onto, one device on a
            CPU.
        kv_cache: what is cached of a token. ``"full"``: keys and values. ``"latent"``: the latents
            that they are computed from; decode rebuilds keys in every step. ``"full+latent"``: full
            keys and the values' latents; decode rebuilds nothing. A projection that is dense is
            always cached in full. ``"auto"``: the fastest prediction of those that hold the asked
            batch and context; ``llm.cache_layout`` says which, why, and the bytes a token.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for weights, cache and activations;
            None = the checkpoint's on a GPU, float32 on a CPU. Products of float32 are full
            precision, on a GPU too (not TensorFloat-32).
        max_batch: sequences that decode together; None = 64 on a GPU, 8 on a CPU.
        max_context: most tokens of a sequence; None = what the model was made for, or, where that
            does not fit beside the weights, the half of it, the quarter, …
        page_size: cache page in tokens: 16, 32, 64 or 128; None = 64 on a GPU, 16 on a CPU.
        cache_bytes: size of the cache; None = what ``max_batch`` sequences of ``max_context`` need,
            at most what is free on a GPU, at most 512 MB (or one sequence, if that is more) on a
            CPU.
        prefill_chunk: most prompt tokens in one program, and most tokens in a step, prompts and
            decode together (a quarter is left to prompts in any case); None = 2048 on a GPU, 512
            on a CPU.
        decode_steps: tokens a sequence decodes per dispatch; None = 8 on a GPU, 1 on a CPU.
        prefix_sharing: whether requests with equal beginnings share pages of the cache, also with
            requests that have ended. Shared or not, values are the same up to rounding.
        implementation: of the kernels (decode attention, latents): ``"reference"``, the only one so
            far; None = the best that applies.
        progress: bars for what takes long; None = where stderr is a terminal.
        seed: of random weights.

    Raises:
        ValueError: an argument, the checkpoint or a combination is wrong; the message says what was
            expected and came, and of several processes which one has another argument.
        RuntimeError: another process failed; the message has its number.
        NotImplementedError: a named implementation does not exist for every op.
        FileNotFoundError: no such checkpoint, or a part of it is missing.
        OutOfDeviceMemory: weights, cache and temporaries do not fit; all are given in bytes.
    """
    _check_positive(
        max_batch=max_batch,
        max_context=max_context,
        cache_bytes=cache_bytes,
        prefill_chunk=prefill_chunk,
        decode_steps=decode_steps,
    )
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer from 0 to 2^32 - 1, got {seed!r}")
    check_available(implementation)
    on_gpu = platform_of(tensor_parallel) == "gpu"
    _use_compilation_cache()

    checkpoint: Checkpoint | None = None
    if isinstance(path_or_config, ModelConfig):
        config = path_or_config
    else:
        checkpoint = open_checkpoint(Path(path_or_config))
        config = checkpoint.config
    dtype = _choose_dtype(dtype, config, on_gpu)
    tokenizer = _tokenizer(checkpoint)
    max_context = _check_context(config, max_context)
    batch = max_batch or (64 if on_gpu else 8)
    chunk = prefill_chunk or (2048 if on_gpu else 512)
    wanted_context = max_context or config.max_position
    split, placement = arrange(
        config,
        strategy,
        tensor_parallel,
        batch=batch,
        context=wanted_context,
        kv_cache=kv_cache,
        dtype=dtype,
    )
    if split.multiplies_out and config.low_rank:
        count = len(config.low_rank.slices)
        logger.info("strategy %s: the factors of %d linears are multiplied out", split.name, count)
        config = config.replace(low_rank=LowRank())
        checkpoint = None if checkpoint is None else MultipliedOut(checkpoint)
    if page_size is None:
        page_size = default_page_size(placement.platform)
    model = partial(build, config, strategy=split, dtype=jnp.dtype(dtype))
    declared = declarations(model(max_context=config.max_position))
    weight_bytes = sum(
        math.prod(d.local_shape(placement.count)) * d.dtype.itemsize for d in declared
    )
    facts = dict(
        config=config,
        strategy=split.name,
        kv_cache=kv_cache,
        dtype=dtype,
        max_batch=batch,
        max_context=max_context,
        page_size=page_size,
        cache_bytes=cache_bytes,
        prefill_chunk=chunk,
        decode_steps=decode_steps,
        prefix_sharing=prefix_sharing,
        implementation=implementation,
        seed=seed,
    )
    processes, available = join(placement, facts, available_bytes(placement.device))
    own = split.own_sizes(config)
    room = room_for_cache(
        own,
        choose_layout(config, "full", page_size, dtype, strategy=split),
        weights=weight_bytes,
        context=wanted_context,
        available=available,
        prefill_chunk=chunk,
    )
    situation = Situation(
        speed=DEVICES["gpu" if on_gpu else "cpu"],
        batch=batch,
        context=wanted_context,
        cache_bytes=cache_bytes,
        room=room,
    )
    layout = choose_layout(config, kv_cache, page_size, dtype, situation=situation, strategy=split)
    context, pages = choose_capacity(
        layout,
        own,
        weights=weight_bytes,
        batch=batch,
        max_context=max_context,
        cache_bytes=cache_bytes,
        available=available,
        prefill_chunk=chunk,
    )
    buckets = Buckets.choose(
        max_batch=batch,
        max_context=context,
        prefill_chunk=chunk,
        page_size=layout.page_size,
        decode_steps=decode_steps or (8 if on_gpu else 1),
        rebuilt_pages=pages if layout.compacts else None,
        plain=placement.count > 1,
    )
    plan = MemoryPlan(
        weights=weight_bytes,
        cache=layout.pool_bytes(pages),
        temporaries=guess_temporaries(own, layout, context, chunk)
        + pages * layout.rebuilt_bytes_per_page,
        available=available,
        bytes_per_sequence=layout.bytes_per_page * layout.pages_for(context),
    )
    plan.check()
    with explained(lambda: plan):
        if checkpoint is None:
            weights = random_parameters(declared, seed, placement)
        else:
            show = show_progress(progress)
            weights = load_parameters(checkpoint, declared, placement, progress=show)
    runner = Runner(
        nnx.graphdef(model(max_context=context)),
        weights,
        nested({d.path: d.spec for d in declared}),
        layout,
        num_pages=pages,
        max_batch=batch,
        buckets=buckets,
        strategy=split,
        placement=placement,
        implementation=implementation,
    )
    scheduler = Scheduler(
        PageAllocator(pages),
        page_size=layout.page_size,
        max_batch=batch,
        prefill_chunk=buckets.chunk[-1],
        decode_steps=buckets.decode_steps,
        share_prefixes=prefix_sharing,
    )
    core = Core(runner, scheduler, ahead=1 if on_gpu else 0, processes=processes)
    logger.info(
        "%s on %d %s, strategy %s, %s, %s cache: %d pages of %d tokens",
        checkpoint.description if checkpoint else "random weights",
        placement.count,
        placement.device.device_kind,
        split.name,
        dtype,
        layout.kind,
        pages,
        layout.page_size,
    )
    return LLM(config, tokenizer, runner, core, max_context=context)


def _tokenizer(checkpoint: Checkpoint | None) -> Any:
    """The checkpoint's tokenizer; a checkpoint without one still runs on token ids."""
    if checkpoint is None:
        return None
    try:
        return checkpoint.tokenizer()
    except FileNotFoundError as error:
        logger.warning("%s; prompts must be token ids", error)
        return None
    except Exception as error:  # the tokenizer libraries raise all kinds, and none names the file
        raise ValueError(f"{checkpoint.path}: the tokenizer cannot be read: {error}") from error


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (
            not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1
        ):
            raise ValueError(f"{name}: expected a positive integer or None, got {value!r}")


def _choose_dtype(dtype: str | None, config: ModelConfig, on_gpu: bool) -> str:
    if dtype is None:
        return config.dtype if on_gpu else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)} or None, got {dtype!r}")
    return dtype


def _check_context(config: ModelConfig, max_context: int | None) -> int | None:
    if max_context is None:
        return None
    if config.rope.kind == "dynamic":
        if max_context < 2:
            raise ValueError(f"max_context: expected at least 2, got {max_context}")
    elif not 1 < max_context <= config.max_position:
        raise ValueError(
            f"max_context: expected 2 to {config.max_position} (the model's), got {max_context}"
        )
    return max_context


def _use_compilation_cache() -> None:
    """Points JAX's persistent compilation cache at a folder of ours, unless the user has chosen one
    or said no."""
    folder = os.environ.get("DEINFER_COMPILATION_CACHE")
    if folder == "" or jax.config.jax_compilation_cache_dir is not None:
        return
    if folder is None:
        folder = str(cache_folder("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    # The defaults keep out what compiles in under a second; the decode programs of small models do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
