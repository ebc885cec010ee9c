"""Reconstructions of real models, for tests, tuning and benches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHAPES", "ReconstructShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconstructShape:
    """K heads of width H from latents of one rank."""

    rank: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "llama-3-8b": ReconstructShape(rank=491, num_kv_heads=8, head_dim=128),
    "llama-3-8b-bench": ReconstructShape(rank=512, num_kv_heads=8, head_dim=128),
    "llama-3-70b": ReconstructShape(rank=546, num_kv_heads=8, head_dim=128),
    "llama-3-70b-kv": ReconstructShape(rank=983, num_kv_heads=8, head_dim=128),
    "llama-65b": ReconstructShape(rank=2457, num_kv_heads=64, head_dim=128),
}
