"""What an attention layer hands to the cache: keys or values in every form that may be cached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from deinfer_jax.cache.layout import Segment
from deinfer_kernels import latent_reconstruct
from deinfer_kernels.latent_reconstruct.reference import finished
from deinfer_kernels.precision import einsum_float32

__all__ = ["Cacheable", "Rebuild"]


@struct.dataclass
class Rebuild:
    """How heads follow from a latent c: rope(norm(u c + b)), as for a new token.

    Attributes:
        u: second factor [K·H, R].
        bias: b [K·H], or None.
        norm: weight [H] of an RMS norm over each head, or None.
        kv_heads: K.
        eps: of the norm.
        rotary: cos and sin [T, H/2] of positions [T], or None for no RoPE.
        combine: where a device has a part of c and u only, the sum over devices of what they give.
    """

    u: Any
    bias: Any
    norm: Any
    kv_heads: int = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False, default=0.0)
    rotary: Callable[[Array], tuple[Array, Array]] | None = struct.field(
        pytree_node=False, default=None
    )
    combine: Callable[[Array], Array] | None = struct.field(pytree_node=False, default=None)

    def heads(
        self,
        latents: Float[Array, "C S W"],
        segment: Segment,
        positions: Int32[Array, " C"],
        *,
        implementation: str | None,
    ) -> Float[Array, "C K S H"]:
        """The heads of whole pages, given the position of each page's first token."""
        pages, page_size = latents.shape[:2]
        rotation = None
        if self.rotary is not None:
            # Equal in all layers, so that XLA computes it once.
            token = positions[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None, :]
            cos, sin = self.rotary(token.reshape(-1))
            shape = (pages, page_size, -1)
            rotation = (cos.reshape(shape), sin.reshape(shape))
        rebuild = partial(
            latent_reconstruct,
            latents,
            self.u,
            kv_heads=self.kv_heads,
            offset=segment.offset,
            implementation=implementation,
        )
        rest: dict[str, Any] = dict(norm=self.norm, eps=self.eps, rotation=rotation)
        if self.combine is None:
            return rebuild(self.bias, **rest)
        return finished(self.combine(rebuild()), self.bias, **rest)

    def absorbed(self, context: Float[Array, "B N R"]) -> Float[Array, "B N H"]:
        """u c + b by head, for weighted sums c of latents whose weights sum to 1."""
        assert self.norm is None and self.rotary is None, "only a linear map can be absorbed"
        batch, heads, rank = context.shape
        u = self.u.reshape(self.kv_heads, -1, rank)  # [K, H, R]
        grouped = context.reshape(batch, self.kv_heads, -1, rank)
        out = einsum_float32("bkgr,khr->bkgh", grouped, u)
        if self.combine is not None:
            out = self.combine(out)
        if self.bias is not None:
            out = out + self.bias.astype(jnp.float32).reshape(1, self.kv_heads, 1, -1)
        return out.reshape(batch, heads, -1).astype(context.dtype)


@struct.dataclass
class Cacheable:
    """Keys or values of the tokens of a step.

    Attributes:
        full: heads [T, K, H], keys after RoPE. Where only the latent is cached, nothing reads it
            and XLA drops what it takes to compute.
        latent: what u reads [T, R], or None where the projection is dense.
        rebuild: from latent to full, or None.
    """

    full: Any
    latent: Any = None
    rebuild: Rebuild | None = None
