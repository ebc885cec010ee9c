"""Gated feed-forward block: down(act(gate x) · up x)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deinfer_jax.config import ModelConfig
from deinfer_jax.layers.linear import Contract, Expand
from deinfer_jax.layers.norm import RMSNorm
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["ACTIVATIONS", "GatedMLP"]

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """Norm, gate and up, activation, down.

    Args:
        name: e.g. ``model.layers.0``; the norm is ``post_attention_layernorm``, the rest is under
            ``mlp``.

    Raises:
        ValueError: the config's activation is unknown.
    """

    def __init__(
        self, name: str, config: ModelConfig, strategy: Strategy, *, dtype: jnp.dtype
    ) -> None:
        if config.hidden_act not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ValueError(f"hidden_act: expected one of {known}, got {config.hidden_act!r}")
        D, F = config.hidden_size, strategy.units(config.intermediate_size)
        self.norm = RMSNorm(
            f"{name}.post_attention_layernorm",
            strategy.residual(D),
            config.rms_norm_eps,
            dtype=dtype,
        )
        self.gate_up = Expand(
            f"{name}.mlp",
            {"gate_proj": F, "up_proj": F},
            D,
            bias=config.mlp_bias,
            low_rank=config.low_rank,
            dtype=dtype,
            strategy=strategy,
        )
        self.down = Contract(
            f"{name}.mlp.down_proj",
            F,
            D,
            bias=config.mlp_bias,
            low_rank=config.low_rank,
            dtype=dtype,
            strategy=strategy,
        )
        self.act, self.strategy = config.hidden_act, strategy

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What the block adds to the residual x."""
        (gate, up), _ = self.strategy.expand(x, self.norm, self.gate_up)
        return self.strategy.contract(ACTIVATIONS[self.act](gate) * up, self.down)
