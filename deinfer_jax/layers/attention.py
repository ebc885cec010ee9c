"""Self-attention of a decoder block, up to the cache."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deinfer_jax.cache.entry import Cacheable, Rebuild
from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.cache.view import CacheView
from deinfer_jax.config import ModelConfig
from deinfer_jax.layers.linear import Contract, Expand
from deinfer_jax.layers.norm import RMSNorm
from deinfer_jax.layers.rope import Rotary, rotate
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["Attention"]


class Attention(nnx.Module):
    """Norm, q k v, RoPE, attention over the cache, o: MHA, GQA and MQA, with or without a sliding
    window.

    Args:
        name: e.g. ``model.layers.0``; the norm is ``input_layernorm``, the rest is under
            ``self_attn``.
        window: sliding window in tokens, or None.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        window: int | None,
        strategy: Strategy,
        *,
        dtype: jnp.dtype,
    ) -> None:
        D, H, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        inner, heads = f"{name}.self_attn", strategy.heads(config)
        self.norm = RMSNorm(f"{name}.input_layernorm", strategy.residual(D), eps, dtype=dtype)
        self.qkv = Expand(
            inner,
            {"q_proj": heads.queries, "k_proj": heads.kv, "v_proj": heads.kv},
            D,
            bias=config.qkv_bias,
            low_rank=config.low_rank,
            dtype=dtype,
            strategy=strategy,
        )

        def head_norm(short: str) -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(f"{inner}.{short}", H, eps, dtype=dtype)

        self.q_norm, self.k_norm = head_norm("q_norm"), head_norm("k_norm")
        self.o = Contract(
            f"{inner}.o_proj",
            heads.queries,
            D,
            bias=config.o_bias,
            low_rank=config.low_rank,
            dtype=dtype,
            strategy=strategy,
        )
        self.head_dim, self.window, self.strategy = H, window, strategy

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotary: Rotary,
        pool: LayerPool,
        view: CacheView,
    ) -> tuple[Float[Array, "T D"], LayerPool]:
        """What attention adds to the residual x, and the pool with the new tokens in it."""
        outputs, z = self.strategy.expand(x, self.norm, self.qkv)
        self.strategy.check_latents(z)
        q, k, v = (part.reshape(part.shape[0], -1, self.head_dim) for part in outputs)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rotation = rotary(view.positions(x.shape[0]))  # equal in all layers: XLA computes it once
        q, k = rotate(q, rotation), rotate(k, rotation)
        keys = self._cacheable("k_proj", k, z, self.k_norm, rotary)
        values = self._cacheable("v_proj", v, z, None, None)
        scale = self.head_dim**-0.5
        out, pool = view.attend(pool, q, keys, values, scale=scale, window=self.window)
        return self.strategy.contract(out.reshape(out.shape[0], -1), self.o), pool

    def _cacheable(
        self,
        short: str,
        full: Array,  # [T, K, H]
        z: Array | None,  # [T, R]
        norm: RMSNorm | None,
        rotary: Rotary | None,
    ) -> Cacheable:
        second = self.qkv.second_factor(short)
        if second is None:
            return Cacheable(full=full)
        rebuild = Rebuild(
            u=second[0],
            bias=second[1],
            norm=None if norm is None else norm.weight[...],
            kv_heads=full.shape[1],
            eps=0.0 if norm is None else norm.eps,
            rotary=rotary,
            combine=self.strategy.combine_rebuilt,
        )
        return Cacheable(full=full, latent=self.qkv.latent(short, z), rebuild=rebuild)
