"""Llama, Mistral, Qwen2 and Qwen3: one wiring, told apart by the config (biases, q/k norm, windows,
RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.cache.view import CacheView
from deinfer_jax.config import ModelConfig
from deinfer_jax.layers.attention import Attention
from deinfer_jax.layers.embedding import WordTable
from deinfer_jax.layers.mlp import GatedMLP
from deinfer_jax.layers.norm import RMSNorm
from deinfer_jax.layers.rope import Rotary
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["Llama"]


class DecoderLayer(nnx.Module):
    """x + attention(x), then x + mlp(x); each block norms its own input."""

    def __init__(
        self, index: int, config: ModelConfig, strategy: Strategy, *, dtype: jnp.dtype
    ) -> None:
        name = f"model.layers.{index}"
        window = config.windows[index]
        self.attention = Attention(name, config, window, strategy, dtype=dtype)
        self.mlp = GatedMLP(name, config, strategy, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotary: Rotary,
        pool: LayerPool,
        view: CacheView,
    ) -> tuple[Float[Array, "T D"], LayerPool]:
        attended, pool = self.attention(x, rotary, pool, view)
        x = x + attended
        return x + self.mlp(x), pool


class Llama(nnx.Module):
    """Decoder-only transformer with RMSNorm, RoPE and a gated MLP.

    Args:
        config: sizes and variants.
        max_context: longest sequence in tokens; dynamic NTK fixes its frequencies from it.
        strategy: how products are split over devices.
        dtype: of the parameters and the residual stream.
    """

    def __init__(
        self, config: ModelConfig, *, max_context: int, strategy: Strategy, dtype: jnp.dtype
    ) -> None:
        D, W = config.hidden_size, strategy.words(config.vocab_size)
        self.embedding = WordTable("model.embed_tokens", W, D, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(i, config, strategy, dtype=dtype) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm("model.norm", D, config.rms_norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = None if tied else WordTable("lm_head", W, D, dtype=dtype)
        self.rotary = Rotary(config.rope, config.head_dim, max_context)
        self.strategy, self.vocabulary = strategy, strategy.vocabulary(config.vocab_size)

    def __call__(
        self, tokens: Int32[Array, " T"], pools: Sequence[LayerPool], view: CacheView
    ) -> tuple[Float[Array, "T D"], list[LayerPool]]:
        """Runs T tokens, one chunk of a sequence or one token of each sequence, as the view says.

        Returns:
            The residual stream after the last layer [T, D], and the pools with the tokens' keys and
            values, or their latents, in them.
        """
        stream, new_pools = self.residual_stream(tokens, pools, view)
        return stream[-1], new_pools

    def residual_stream(
        self, tokens: Int32[Array, " T"], pools: Sequence[LayerPool], view: CacheView
    ) -> tuple[list[Float[Array, "T D"]], list[LayerPool]]:
        """As a call, with the residual stream after the embedding and after each layer, L + 1 times
        [T, D]; what a program does not use of it costs it nothing."""
        stream = [self.strategy.embed(tokens, self.embedding)]
        self.strategy.check_residual(stream[0], "an embedding")
        new_pools = []
        for layer, pool in zip(self.layers, pools, strict=True):
            x, pool = layer(stream[-1], self.rotary, pool, view)
            self.strategy.check_residual(x, "what contract adds to a residual stream")
            stream.append(x)
            new_pools.append(pool)
        return stream, new_pools

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T w"]:
        """Float32 logits of rows of the residual stream, of the words that this device has."""
        table = self.head if self.head is not None else self.embedding
        return self.strategy.logits(x, self.norm, table)
