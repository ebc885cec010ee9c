"""Attention shapes with latent values of real models, for tests, tuning and benches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHAPES", "AbsorbedShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedShape:
    """N query heads over K kv heads of width H, whose values have latents of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rank: int


SHAPES = {
    "llama-3-8b": AbsorbedShape(num_heads=32, num_kv_heads=8, head_dim=128, rank=491),
    "llama-3-70b": AbsorbedShape(num_heads=64, num_kv_heads=8, head_dim=128, rank=546),
    "llama-65b": AbsorbedShape(num_heads=64, num_kv_heads=64, head_dim=128, rank=2457),
}
