"""Word embedding and output head, one table each (or one for both)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deinfer_jax.layers.linear import product
from deinfer_jax.layers.parameter import INIT_SCALE, Rows, parameter
from deinfer_jax.parallel.shares import Share, whole
from deinfer_kernels.precision import einsum_float32

__all__ = ["WordTable"]


class WordTable(nnx.Module):
    """A table [W, D] that looks words up, or turns x into logits.

    *Sharding contract*: split on W under every strategy that splits; a device looks up and scores
    its own words, and the strategy has the collectives.

    Args:
        name: ``model.embed_tokens`` or ``lm_head``.
        words: W, or how it is dealt.
        width: D.
    """

    def __init__(self, name: str, words: int | Share, width: int, *, dtype: jnp.dtype) -> None:
        share = whole(words) if isinstance(words, int) else words
        self.weight = parameter(
            [Rows(f"{name}.weight", share)], dtype, scale=INIT_SCALE, columns=whole(width)
        )
        self.words, self.rows = share.size, share.width

    def look_up(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Rows of the table; 0 <= token < rows."""
        return self.weight.at[tokens].get(mode="clip")

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T w"]:
        """x · tableᵀ, float32."""
        if x.dtype == jnp.float32:
            return product(self.weight[...], x)
        return einsum_float32("td,wd->tw", x, self.weight[...])
