"""``plan``: predictions for every strategy and kind of cache; ``choose``: which one to take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from deinfer_jax.cache.layout import KINDS, PAGE_SIZES, CacheKind, LayerLayout
from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.config import ModelConfig
from deinfer_jax.planner.cost import Memory, Predictor
from deinfer_jax.planner.placement import STRATEGIES, StrategyName, obstacle, split_heads
from deinfer_jax.planner.report import Objective, Option, Plan
from deinfer_jax.planner.speeds import Device, Link, resolve_device, resolve_link

__all__ = ["choose", "plan"]

DTYPES = ("float32", "bfloat16", "float16")


def plan(
    config_or_path: str | os.PathLike[str] | ModelConfig,
    *,
    devices: int,
    link: str | Link = "nvlink",
    batch: int,
    context: int,
    prompt: int | None = None,
    dtype: str | None = None,
    memory: int | None = None,
    device: str | Device = "h200",
    kv_cache: str = "auto",
    page_size: int = 64,
    objective: Objective = "decode",
    multiply_out: bool = False,
) -> Plan:
    """Predicts time, memory and traffic of a model on some devices, for each strategy and kind of
    cache, and picks one. Nothing is loaded or run.

    Every product takes about the longer of reading and computing, every collective its latency and
    the time its bytes need on the wire; sizes are counted layer by layer from the ranks, with what
    is padded and replicated. The parameters were fitted to bare layers of a 70B model on two H200s
    with stock XLA: within 16 % there, further off elsewhere.

    Args:
        config_or_path: a ``ModelConfig``, or a checkpoint, of which the headers are read.
        devices: how many share the model.
        link: between them. ``"nvlink"`` 395 GB/s and ``"pcie"`` (through the host's memory)
            29 GB/s, both measured with two H200s; ``"network"`` 20 GB/s and 30 µs, assumed (a port
            of 200 Gbit/s a device); or a :class:`Link`, see also :func:`measure_link`.
        batch: sequences that decode together.
        context: tokens of each.
        prompt: tokens of a prompt; None = ``context``.
        dtype: of weights, cache and payloads; None = the checkpoint's.
        memory: bytes a device that weights, cache and temporaries may take; None = the device's,
            140 GB for an H200. (``load`` uses 92 % of what a GPU offers.)
        device: ``"h200"``, ``"cpu"`` or a :class:`Device`.
        kv_cache: ``"auto"`` = every kind that the model has; or only ``"full"``, ``"latent"`` or
            ``"full+latent"``.
        page_size: of the cache, in tokens.
        objective: what the choice goes by: ``"decode"``, the time of a step, or ``"prompt"``.
        multiply_out: whether the choice may be ``dense`` for a decomposed model. It is predicted in
            any case, and the plan says whether it is faster.

    Returns:
        A :class:`Plan`; ``print`` shows it as a table.

    Raises:
        ValueError: an argument is wrong, or the model has nothing latent to cache where that is
            asked for.
        FileNotFoundError: no such checkpoint.
    """
    _check_positive(devices=devices, batch=batch, context=context, page_size=page_size)
    _check_positive(
        **{k: v for k, v in dict(prompt=prompt, memory=memory).items() if v is not None}
    )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {page_size}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES)} or None, got {dtype!r}")
    if kv_cache not in ("auto", *KINDS):
        raise ValueError(
            f"kv_cache: expected 'auto', 'full', 'latent' or 'full+latent', got {kv_cache!r}"
        )
    if objective not in get_args(Objective):
        raise ValueError(f"objective: expected 'decode' or 'prompt', got {objective!r}")
    speed, between = resolve_device(device), resolve_link(link)
    if isinstance(config_or_path, ModelConfig):
        config, name = config_or_path, ""
    else:
        checkpoint = open_checkpoint(Path(config_or_path))
        config, name = checkpoint.config, f"{checkpoint.path.name}: "
    dtype = dtype or config.dtype
    prompt = prompt or context
    limit = memory or speed.memory
    options, excluded = [], {}
    for strategy in STRATEGIES:
        why = obstacle(config, strategy, devices)
        if why is not None:
            excluded[strategy] = why
            continue
        rest: Any = dict(devices=devices, device=speed, link=between, dtype=dtype)
        for kind, one in _kinds(config, strategy, kv_cache, page_size=page_size, **rest):
            needed = one.memory(batch, context, prompt)
            options.append(
                Option(
                    strategy=strategy,
                    kv_cache=kind,
                    decode_ms=1e3 * one.decode_seconds(batch, context),
                    prompt_ms=1e3 * one.prompt_seconds(1, prompt),
                    memory=needed,
                    traffic=one.traffic(),
                    problem=_problem(needed, limit, batch),
                )
            )
    if not options:
        raise ValueError(
            f"kv_cache: expected 'full' for a model whose {_needed(kv_cache)} is dense in every "
            f"layer, got {kv_cache!r}"
        )
    return Plan(
        model=name + _words(config),
        decomposed=bool(config.low_rank),
        devices=devices,
        device=speed,
        link=between,
        batch=batch,
        context=context,
        prompt=prompt,
        dtype=dtype,
        limit=limit,
        objective=objective,
        multiply_out=multiply_out,
        options=tuple(options),
        excluded=excluded,
        notes=tuple(_notes(config, devices, context)),
    )


def choose(
    config: ModelConfig,
    *,
    devices: int,
    link: str | Link = "nvlink",
    batch: int,
    context: int,
    memory: int | None = None,
    kv_cache: str = "auto",
    **rest: Any,
) -> tuple[StrategyName, str]:
    """What ``strategy="auto"`` takes.

    Args:
        config, devices, link, batch, context, memory, kv_cache: as of :func:`plan`; ``kv_cache``
            restricts the choice to that kind.
        **rest: further arguments of :func:`plan`, e.g. ``dtype`` and ``multiply_out``.

    Returns:
        Name of the strategy, and the reason in a sentence or two. Where nothing fits, the one that
        takes the least memory, so that the caller can say what is missing. On one device
        ``low_rank`` stands for any strategy that keeps the factors; a model without factors is
        ``dense`` there.

    Raises:
        ValueError: as :func:`plan`.
    """
    found = plan(
        config,
        devices=devices,
        link=link,
        batch=batch,
        context=context,
        memory=memory,
        kv_cache=kv_cache,
        **rest,
    )
    chosen = found.choice or min(found.options, key=lambda option: option.memory.total)
    return chosen.strategy, found.reason


def _kinds(
    config: ModelConfig, strategy: StrategyName, kv_cache: str, **rest: Any
) -> Iterator[tuple[CacheKind, Predictor]]:
    """The asked kinds of cache that the model has and that differ, each with its predictor."""
    seen: set[tuple[LayerLayout, ...]] = set()
    for kind in KINDS:
        if kv_cache not in ("auto", kind):
            continue
        one = Predictor(config, strategy, kind, **rest)
        latent = kind == "full" or one.layout.has_latents
        if latent and one.layout.layers not in seen:
            seen.add(one.layout.layers)
            yield kind, one


def _problem(needed: Memory, limit: int, batch: int) -> str:
    if needed.total <= limit:
        return ""
    text = (
        f"needs {needed.total / 1e9:.4g} GB a device (weights {needed.weights / 1e9:.4g}, cache "
        f"{needed.cache / 1e9:.4g}, temporaries {needed.temporaries / 1e9:.4g}) of "
        f"{limit / 1e9:.4g}; "
    )
    if needed.weights > limit:
        return text + "the weights alone are too large"
    share = (needed.cache + needed.temporaries) / batch
    return text + f"room for about {int((limit - needed.weights) // share)} of {batch} sequences"


def _words(config: ModelConfig) -> str:
    c = config
    text = (
        f"{c.num_layers} layers of width {c.hidden_size}, feed-forward {c.intermediate_size}, "
        f"{c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}, {c.vocab_size} words, "
    )
    if not c.low_rank:
        return text + "dense"
    count, total = len(c.low_rank.slices), len(c.linears())
    ranks = [piece.rank for _, piece in c.low_rank.groups()]
    return text + f"{count} of {total} linears decomposed, ranks {min(ranks)} to {max(ranks)}"


def _notes(config: ModelConfig, devices: int, context: int) -> Iterator[str]:
    if context > config.max_position:
        yield f"note: the model was made for {config.max_position} tokens, not {context}"
    heads, kv, queries = split_heads(config, devices), config.num_kv_heads, config.num_heads
    if heads.copies > 1:
        yield f"note: each of {kv} kv heads is on {heads.copies} devices (but under naive: on all)"
    padded = heads.kv * devices // heads.copies
    groups = heads.queries * devices
    if padded != kv or groups != queries:
        yield (
            f"note: heads are padded from {queries}/{kv} to {groups}/{padded}, so that devices "
            "divide"
        )


def _needed(kv_cache: str) -> str:
    return "k_proj and v_proj" if kv_cache == "latent" else "v_proj"


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value!r}")
