"""The definition of reconstruction in plain jnp; also the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from deinfer_kernels.precision import einsum_float32

__all__ = ["finished", "latent_reconstruct"]


def latent_reconstruct(
    latents: Array,  # [C, S, W]
    u: Array,  # [K·H, R]
    bias: Array | None,  # [K·H]
    *,
    kv_heads: int,
    offset: int,
    norm: Array | None,  # [H]
    eps: float,
    rotation: tuple[Array, Array] | None,  # [C, S, H/2] each
) -> Array:  # [C, K, S, H]
    """See ``api.latent_reconstruct``; rounds to the latents' dtype where a model's layers do: after
    the product, the bias, the norm, its weight and RoPE."""
    pages, page_size, _ = latents.shape
    rows, rank = u.shape
    tokens = latents[:, :, offset : offset + rank].reshape(pages * page_size, rank)
    y = einsum_float32("tr,or->to", tokens, u).astype(latents.dtype)
    heads = y.reshape(pages, page_size, kv_heads, rows // kv_heads).transpose(0, 2, 1, 3)
    return finished(heads, bias, norm=norm, eps=eps, rotation=rotation)


def finished(
    heads: Array,  # [C, K, S, H], u c
    bias: Array | None,  # [K·H]
    *,
    norm: Array | None,  # [H]
    eps: float,
    rotation: tuple[Array, Array] | None,  # [C, S, H/2] each
) -> Array:  # [C, K, S, H]
    """What follows the product."""
    dtype = heads.dtype
    if bias is not None:
        heads = heads + bias.reshape(1, heads.shape[1], 1, heads.shape[3])
    if norm is not None:
        wide = heads.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        heads = (wide * jax.lax.rsqrt(mean_square + eps)).astype(dtype) * norm[None, None, None, :]
    if rotation is not None:
        cos, sin = (part[:, None, :, :] for part in rotation)
        first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        heads = jnp.concatenate(turned, axis=-1).astype(dtype)
    return heads
