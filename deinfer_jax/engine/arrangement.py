"""Which devices a model is put on, and by which strategy it is split over them."""

from __future__ import annotations

import logging

import jax
from jax.sharding import Mesh

from deinfer_jax.config import ModelConfig
from deinfer_jax.engine.memory import available_bytes
from deinfer_jax.parallel.mesh import Placement, choose_placement
from deinfer_jax.parallel.strategies import check_strategy, get_strategy
from deinfer_jax.parallel.strategy import Strategy
from deinfer_jax.planner import choose

__all__ = ["arrange"]

logger = logging.getLogger(__name__)


def arrange(
    config: ModelConfig,
    strategy: str,
    tensor_parallel: int | Mesh | None,
    *,
    batch: int,
    context: int,
    kv_cache: str,
    dtype: str,
) -> tuple[Strategy, Placement]:
    """What ``strategy`` and ``tensor_parallel`` mean for a model.

    Args:
        config: of the model.
        strategy: a name; ``"auto"`` = what the planner predicts to decode fastest.
        tensor_parallel: devices, or a mesh with the single axis ``tp``; None = as many of the
            visible GPUs as the strategy can split the model over, one device on a CPU.
        batch, context, kv_cache, dtype: what is to be run, for the planner.

    Raises:
        ValueError: the strategy is unknown or does not run on so many devices, there are not so
            many, or the mesh has other axes.
    """
    if strategy != "auto":
        check_strategy(strategy)
    if tensor_parallel is None:
        tensor_parallel = _most_devices(config, strategy)
    placement = choose_placement(tensor_parallel)
    if strategy == "auto":
        strategy = _planned(
            config, placement, batch=batch, context=context, kv_cache=kv_cache, dtype=dtype
        )
    split = get_strategy(strategy, placement.count)
    split.residual(config.hidden_size)  # raises where the model does not divide
    if placement.count > 1:
        _log_what_is_odd(config, split)
    return split, placement


def _log_what_is_odd(config: ModelConfig, split: Strategy) -> None:
    if not config.low_rank and not split.multiplies_out:
        how = "on their inputs" if split.splits_pairs else "as under dense"
        rest = ", and the residual stream on its width" if split.splits_residual else ""
        logger.info(
            "strategy %s: no linear is decomposed; linears are split %s%s", split.name, how, rest
        )
    if split.splits_heads:
        heads, width = split.heads(config), config.head_dim
        queries, kv = (share.padded // width for share in (heads.queries, heads.kv))
        if (queries, kv) != (config.num_heads, config.num_kv_heads):
            logger.info(
                "%d devices compute %d query and %d kv heads, copies and zeros included, of %d and "
                "%d",
                split.devices,
                queries,
                kv,
                config.num_heads,
                config.num_kv_heads,
            )


def _planned(
    config: ModelConfig,
    placement: Placement,
    *,
    batch: int,
    context: int,
    kv_cache: str,
    dtype: str,
) -> str:
    if placement.count == 1 or not config.low_rank:
        return "low_rank"  # keeps factors where there are any, and splits what is dense as "dense"
    gpu = placement.platform == "gpu"
    name, reason = choose(
        config,
        devices=placement.count,
        link="nvlink" if gpu else "pcie",
        batch=batch,
        context=context,
        kv_cache=kv_cache,
        dtype=dtype,
        device="h200" if gpu else "cpu",
        memory=available_bytes(placement.mesh.devices.flat[0]),
    )
    logger.info("strategy: %s, %s", name, reason)
    return name


def _most_devices(config: ModelConfig, strategy: str) -> int:
    """All GPUs, or as many as divide what the strategy cannot pad."""
    count = len(jax.devices()) if jax.devices()[0].platform == "gpu" else 1
    name = "low_rank" if strategy == "auto" else strategy
    for devices in range(count, 1, -1):
        try:
            get_strategy(name, devices).residual(config.hidden_size)
        except ValueError as error:
            logger.info("%d of %d devices are not used: %s", count - devices + 1, count, error)
        else:
            return devices
    return 1
