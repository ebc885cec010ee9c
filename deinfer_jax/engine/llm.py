"""``load`` and what it returns: a model on a device, ready to generate and score."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deinfer_jax.cache.allocator import PageAllocator
from deinfer_jax.cache.layout import CacheLayout, choose_layout, default_page_size
from deinfer_jax.checkpoint.parameters import load_parameters, random_parameters
from deinfer_jax.checkpoint.source import Checkpoint, open_checkpoint
from deinfer_jax.config import ModelConfig
from deinfer_jax.engine.engine import Engine
from deinfer_jax.engine.memory import MemoryPlan, OutOfDeviceMemory
from deinfer_jax.engine.runner import Buckets, Runner
from deinfer_jax.engine.scheduler import Scheduler
from deinfer_jax.models import Model, build
from deinfer_jax.parallel.strategy import get_strategy
from deinfer_kernels.dispatch import check_implementation

__all__ = ["LLM", "load"]

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
CPU_CACHE_BYTES = 512 * 10**6  # default on a CPU, whose memory belongs to others too
GPU_FRACTION = (
    0.92  # of the device's limit; the rest is left to fragmentation and cuBLAS workspaces
)


class LLM:
    """A model on a device. Made by :func:`load`; a context manager that frees the device's memory.

    Attributes:
        config: of the model.
        tokenizer: a ``transformers`` tokenizer, or None for random weights.
        max_batch: sequences that decode together.
        max_context: most tokens of a sequence, prompt and continuation together.
        recompilation_guard: whether compiling after :meth:`warm_up` is an error.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Any,
        runner: Runner,
        engine: Engine,
        *,
        max_context: int,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.runner, self.engine = runner, engine
        self.max_context = max_context
        self._closed = False

    @property
    def max_batch(self) -> int:
        """Sequences that decode together."""
        return self.engine.scheduler.max_batch

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: the checkpoint's, else the tokenizer's."""
        if self.config.eos_token_ids:
            return self.config.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos is None else (eos,)

    @property
    def recompilation_guard(self) -> bool:
        """Whether compiling a program after :meth:`warm_up` is an error."""
        return self.runner.guard

    @recompilation_guard.setter
    def recompilation_guard(self, value: bool) -> None:
        self.runner.guard = value

    @property
    def cache_layout(self) -> CacheLayout:
        """What is cached, and how many bytes a token takes."""
        return self.runner.layout

    def memory_plan(self) -> MemoryPlan:
        """Bytes of weights, cache and temporaries of the programs compiled so far."""
        return self.runner.memory_plan()

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles all programs that :func:`deinfer_jax.generate` can need; afterwards compiling is
        an error.

        Args:
            progress: show a bar; None = where stderr is a terminal.
        """
        self.check_open()
        self.runner.warm_up(progress=_show(progress))

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits after each token of a sequence.

        Args:
            token_ids: 1 to ``max_context`` ids.

        Returns:
            float32 [T, W]; row t is about token t + 1.

        Raises:
            ValueError: the sequence is empty or too long, or an id is not in the vocabulary.
        """
        self.check_open()
        tokens = check_token_ids(token_ids, self.config.vocab_size, "logits")
        if len(tokens) > self.max_context:
            raise ValueError(
                f"logits: expected at most max_context = {self.max_context} tokens, "
                f"got {len(tokens)}"
            )
        scheduler, layout = self.engine.scheduler, self.runner.layout
        pages = scheduler.allocator.allocate(layout.pages_for(len(tokens)))
        try:
            step = self.runner.buckets.chunk[-1]
            parts = [
                self.runner.score(tokens[start : start + step], start, pages)
                for start in range(0, len(tokens), step)
            ]
        finally:
            scheduler.allocator.release(pages)
        return np.concatenate(parts)

    def close(self) -> None:
        """Frees weights and cache on the device; the object is of no use afterwards."""
        if not self._closed:
            self._closed = True
            self.runner.close()

    def check_open(self) -> None:
        """Raises RuntimeError after :meth:`close`."""
        if self._closed:
            raise RuntimeError("this LLM has been closed; load it again")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def load(
    path_or_config: str | os.PathLike[str] | ModelConfig,
    *,
    strategy: str = "auto",
    tensor_parallel: int | None = None,
    kv_cache: str = "auto",
    dtype: str | None = None,
    max_batch: int | None = None,
    max_context: int | None = None,
    page_size: int | None = None,
    cache_bytes: int | None = None,
    prefill_chunk: int | None = None,
    decode_steps: int | None = None,
    implementation: str | None = None,
    progress: bool | None = None,
    seed: int = 0,
) -> LLM:
    """Puts a model on a device.

    Args:
        path_or_config: a Hugging Face directory (safetensors), a GGUF file or a directory with one;
            or a ``ModelConfig``, which gives random weights made on the device, for benches and
            tests.
        strategy: how products are split over devices; this version runs on one, so ``"auto"``.
        tensor_parallel: devices; None or 1.
        kv_cache: ``"full"``, or ``"auto"`` which is the same until a model has latents.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for weights, cache and activations;
            None = the checkpoint's on a GPU, float32 on a CPU.
        max_batch: sequences that decode together; None = 64 on a GPU, 8 on a CPU.
        max_context: most tokens of a sequence; None = what the model was made for, or what the
            cache holds if less.
        page_size: cache page in tokens: 16, 32, 64 or 128; None = 64 on a GPU, 16 on a CPU.
        cache_bytes: size of the cache; None = what ``max_batch`` sequences of ``max_context`` need,
            at most what is free on a GPU, at most 512 MB (or one sequence, if that is more) on a
            CPU.
        prefill_chunk: most prompt tokens in one program; None = 2048 on a GPU, 512 on a CPU.
        decode_steps: tokens a sequence decodes per dispatch; None = 8 on a GPU, 1 on a CPU.
        implementation: of the kernels, ``"reference"`` or ``"mosaic_gpu"``; None = the best that
            applies.
        progress: bars for what takes long; None = where stderr is a terminal.
        seed: of random weights.

    Raises:
        ValueError: an argument, the checkpoint or a combination is wrong; the message says what was
            expected and came.
        FileNotFoundError: no such checkpoint, or a part of it is missing.
        OutOfDeviceMemory: weights, cache and temporaries do not fit; all are given in bytes.
    """
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    _check_positive(
        max_batch=max_batch,
        max_context=max_context,
        cache_bytes=cache_bytes,
        prefill_chunk=prefill_chunk,
        decode_steps=decode_steps,
    )
    check_implementation(implementation)
    placement = get_strategy(strategy, 1 if tensor_parallel is None else tensor_parallel)
    _use_compilation_cache()

    checkpoint: Checkpoint | None = None
    if isinstance(path_or_config, ModelConfig):
        config = path_or_config
    else:
        checkpoint = open_checkpoint(Path(path_or_config))
        config = checkpoint.config
    dtype = _choose_dtype(dtype, config, on_gpu)
    if (
        max_context is not None
        and max_context > config.max_position
        and config.rope.kind != "dynamic"
    ):
        raise ValueError(
            f"max_context: expected at most {config.max_position} (the model's), got {max_context}"
        )
    context = max_context or config.max_position
    batch = max_batch or (64 if on_gpu else 8)
    layout = choose_layout(config, kv_cache, page_size or default_page_size(device.platform), dtype)

    def model(rngs: nnx.Rngs, longest: int) -> Model:
        return build(
            config, max_context=longest, strategy=placement, dtype=jnp.dtype(dtype), rngs=rngs
        )

    shapes = nnx.eval_shape(lambda: nnx.state(model(nnx.Rngs(0), context)))
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in _leaves(shapes))
    pages = _choose_pages(
        layout,
        config,
        device,
        batch,
        context,
        weight_bytes,
        cache_bytes,
        exact=max_context is not None,
    )
    if max_context is None:
        context = min(context, pages * layout.page_size)

    graph = nnx.graphdef(nnx.eval_shape(lambda: model(nnx.Rngs(0), context)))
    try:
        if checkpoint is None:

            def random_model() -> Model:
                rngs = nnx.Rngs(params=jax.random.key(seed, impl="unsafe_rbg"))
                return model(rngs, context)

            weights = random_parameters(random_model, device)
        else:
            weights = load_parameters(
                checkpoint, shapes, jnp.dtype(dtype), device, progress=_show(progress)
            )
        buckets = Buckets.choose(
            max_batch=batch,
            max_context=context,
            prefill_chunk=prefill_chunk or (2048 if on_gpu else 512),
            page_size=layout.page_size,
            decode_steps=decode_steps or (8 if on_gpu else 1),
        )
        runner = Runner(
            graph,
            weights,
            layout,
            num_pages=pages,
            max_batch=batch,
            buckets=buckets,
            device=device,
            implementation=implementation,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        plan = _plan(layout, device, context, weight_bytes, layout.pool_bytes(pages), 0)
        raise OutOfDeviceMemory(f"out of device memory: {plan.describe()}") from error
    scheduler = Scheduler(
        PageAllocator(pages),
        page_size=layout.page_size,
        max_batch=batch,
        prefill_chunk=buckets.chunk[-1],
        decode_steps=buckets.steps[-1],
    )
    engine = Engine(runner, scheduler, ahead=1 if on_gpu else 0)
    logger.info(
        "%s on %s, %s, %s cache: %d pages of %d tokens",
        checkpoint.description if checkpoint else "random weights",
        device.device_kind,
        dtype,
        layout.kind,
        pages,
        layout.page_size,
    )
    return LLM(config, _tokenizer(checkpoint), runner, engine, max_context=context)


def _tokenizer(checkpoint: Checkpoint | None) -> Any:
    """The checkpoint's tokenizer; a checkpoint without one still runs on token ids."""
    if checkpoint is None:
        return None
    try:
        return checkpoint.tokenizer()
    except FileNotFoundError as error:
        logger.warning("%s; prompts must be token ids", error)
        return None


def check_token_ids(token_ids: Iterable[Any], vocab_size: int, what: str) -> list[int]:
    """Token ids as a list of int; ValueError if there are none or one is not in 0 … vocab_size −
    1."""
    tokens = [int(token) for token in token_ids]
    if not tokens:
        raise ValueError(f"{what}: expected at least one token, got none")
    bad = [token for token in tokens if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"{what}: expected token ids from 0 to {vocab_size - 1}, got {bad[:10]}")
    return tokens


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise ValueError(f"{name}: expected a positive integer or None, got {value!r}")


def _choose_dtype(dtype: str | None, config: ModelConfig, on_gpu: bool) -> str:
    if dtype is None:
        return config.dtype if on_gpu else "float32"
    name = jnp.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)} or None, got {dtype!r}")
    return name


def _choose_pages(
    layout: CacheLayout,
    config: ModelConfig,
    device: Any,
    batch: int,
    context: int,
    weight_bytes: int,
    cache_bytes: int | None,
    *,
    exact: bool,
) -> int:
    """Usable pages; one page more is the null page."""
    wanted = batch * layout.pages_for(context)
    if cache_bytes is not None:
        pages = min(cache_bytes // layout.bytes_per_page - 1, wanted)
        if pages < 1:
            raise ValueError(
                f"cache_bytes: expected at least {2 * layout.bytes_per_page} (one page of "
                f"{layout.page_size} tokens and the null page), got {cache_bytes}"
            )
        return pages
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        one = layout.pages_for(context) if exact else 1
        return min(wanted, max(CPU_CACHE_BYTES // layout.bytes_per_page, one))
    temporaries = _guess_temporaries(config, layout, context)
    room = int(limit * GPU_FRACTION) - weight_bytes - temporaries
    pages = min(wanted, room // layout.bytes_per_page - 1)
    needed = layout.pages_for(context) if exact else 1
    if pages < needed:
        least = (needed + 1) * layout.bytes_per_page
        plan = _plan(layout, device, context, weight_bytes, least, temporaries)
        raise OutOfDeviceMemory(
            f"out of device memory: {plan.describe()}. Lower max_context or take a smaller dtype."
        )
    return pages


def _guess_temporaries(config: ModelConfig, layout: CacheLayout, context: int) -> int:
    """Before anything is compiled: scores of a prompt chunk in float32 twice, its activations, and
    the logits."""
    rows = min(2048, context)
    scores = 2 * 4 * config.num_heads * rows * context
    activations = 4 * rows * (4 * config.intermediate_size + 8 * config.hidden_size)
    gathered = 4 * layout.bytes_per_token * context // config.num_layers
    return scores + activations + gathered + 4 * 4 * 256 * config.vocab_size + 256 * 2**20


def _plan(
    layout: CacheLayout,
    device: Any,
    context: int,
    weights: int,
    cache: int,
    temporaries: int,
) -> MemoryPlan:
    return MemoryPlan(
        weights=weights,
        cache=cache,
        temporaries=temporaries,
        available=(device.memory_stats() or {}).get("bytes_limit"),
        bytes_per_sequence=layout.bytes_per_page * layout.pages_for(context),
    )


def _leaves(state: nnx.State) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(nnx.to_pure_dict(state))


def _use_compilation_cache() -> None:
    """Points JAX's persistent compilation cache at a folder of ours, unless the user has chosen one
    or said no."""
    folder = os.environ.get("DEINFER_COMPILATION_CACHE")
    if folder == "" or jax.config.jax_compilation_cache_dir is not None:
        return
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder = os.path.join(base, "deinfer_jax", "xla")
    jax.config.update("jax_compilation_cache_dir", folder)
    # The defaults keep out what compiles in under a second; the decode programs of small models do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _show(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
