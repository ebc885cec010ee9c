"""Word embedding and output head, one table each (or one for both)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deinfer_jax.layers.linear import INIT_SCALE, product
from deinfer_jax.layers.parameter import Source, parameter
from deinfer_kernels.precision import einsum_float32

__all__ = ["WordTable"]


class WordTable(nnx.Module):
    """A table [W, D] that looks words up, or turns x into logits.

    *Sharding contract*: split on W under every strategy that splits; whole on one device.

    Args:
        name: ``model.embed_tokens`` or ``lm_head``.
    """

    def __init__(self, name: str, vocab_size: int, width: int, *, dtype: jnp.dtype) -> None:
        source = Source(f"{name}.weight", 0, (vocab_size, width))
        self.weight = parameter([source], dtype, scale=INIT_SCALE)

    def look_up(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Rows of the table; the engine has checked that 0 <= token < W."""
        return self.weight.at[tokens].get(mode="clip")

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T W"]:
        """x · tableᵀ, float32."""
        if x.dtype == jnp.float32:
            return product(self.weight[...], x)
        return einsum_float32("td,wd->tw", x, self.weight[...])
