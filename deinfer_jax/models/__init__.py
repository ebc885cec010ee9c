"""Model families, one file each; ``build`` looks a config's family up in the registry."""

from __future__ import annotations

import jax.numpy as jnp

from deinfer_jax.config import ModelConfig
from deinfer_jax.layers.parameter import declarations
from deinfer_jax.models.llama import Llama
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["FAMILIES", "Model", "build"]

Model = Llama  # becomes a union as families are added
FAMILIES: dict[str, type[Model]] = {"llama": Llama}


def build(config: ModelConfig, *, max_context: int, strategy: Strategy, dtype: jnp.dtype) -> Model:
    """The model of ``config``, declared: its parameters are shapes, see ``layers.parameter``.

    Raises:
        ValueError: the family is unknown, or ``low_rank`` names a module that it does not have.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {config.family!r}")
    family = FAMILIES[config.family]
    model = family(config, max_context=max_context, strategy=strategy, dtype=dtype)
    tensors = {source.name for d in declarations(model) for source in d.sources}
    unknown = [name for name, _ in config.low_rank.slices if f"{name}.u.weight" not in tensors]
    if unknown:
        raise ValueError(f"low_rank: the model has no modules {', '.join(unknown[:10])}")
    return model
