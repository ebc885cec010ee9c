"""Validation and dispatch of the reconstruction of keys and values."""

from __future__ import annotations

from jaxtyping import Array, Float

from deinfer_kernels.dispatch import dispatch
from deinfer_kernels.latent_reconstruct import reference

__all__ = ["latent_reconstruct"]

IMPLEMENTATIONS = {"reference": reference.latent_reconstruct}


def latent_reconstruct(
    latents: Float[Array, "C S W"],
    u: Float[Array, "O R"],
    bias: Float[Array, " O"] | None = None,
    *,
    kv_heads: int,
    offset: int = 0,
    norm: Float[Array, " H"] | None = None,
    eps: float = 0.0,
    rotation: tuple[Float[Array, "C S h"], Float[Array, "C S h"]] | None = None,
    implementation: str | None = None,
) -> Float[Array, "C K S H"]:
    """rope(norm(u c + b)) of every cached token, by head: one product, and what follows it.

    Each token's result depends on its own latent alone, so what is not a number stays where it is.

    Args:
        latents: pages of S tokens; columns ``offset`` … ``offset + R − 1`` are c, the rest is not
            read.
        u: second factor, O = K·H rows.
        bias: b.
        kv_heads: K.
        offset: see ``latents``.
        norm: weight of an RMS norm over each head (Qwen3's k norm), or None for no norm.
        eps: of the norm.
        rotation: cos and sin of every token's position [C, S, H/2], float32, half-split pairs;
            None = no RoPE. Tables rather than positions: they are the same in all layers, and a
            kernel has no accurate sine of a large angle.
        implementation: ``"reference"``, or None for the best that applies.

    Returns:
        [C, K, S, H] in the latents' dtype: the layout of a page of a full pool.

    Raises:
        ValueError: shapes disagree.
    """
    rows, rank = u.shape
    if rows % kv_heads:
        raise ValueError(
            f"latent_reconstruct: expected u with a multiple of {kv_heads} rows, got {rows}"
        )
    if offset < 0 or offset + rank > latents.shape[2]:
        raise ValueError(
            f"latent_reconstruct: expected columns {offset} to {offset + rank} within the latents' "
            f"{latents.shape[2]}"
        )
    width = rows // kv_heads
    if norm is not None and norm.shape != (width,):
        raise ValueError(f"latent_reconstruct: expected a norm [{width}], got {norm.shape}")
    if rotation is not None:
        expected = (*latents.shape[:2], width // 2)
        if any(part.shape != expected for part in rotation) or width % 2:
            raise ValueError(
                f"latent_reconstruct: expected cos and sin {expected} and an even head width, got "
                f"{rotation[0].shape}, {rotation[1].shape} and {width}"
            )
    return dispatch(
        "latent_reconstruct",
        IMPLEMENTATIONS,
        implementation,
        latents,
        u,
        bias,
        kv_heads=kv_heads,
        offset=offset,
        norm=norm,
        eps=eps,
        rotation=rotation,
    )
