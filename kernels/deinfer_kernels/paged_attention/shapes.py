"""Attention shapes of real models, for tests, tuning and benches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHAPES", "AttentionShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """N query heads over K kv heads of width H, with an optional sliding window in tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


SHAPES = {
    "smollm2-135m": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    "llama-2-7b": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=128),
    "llama-3-8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b": AttentionShape(num_heads=64, num_kv_heads=8, head_dim=128),
    "mistral-7b-v0.1": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, window=4096),
    "qwen2.5-0.5b": AttentionShape(num_heads=14, num_kv_heads=2, head_dim=64),
    "qwen3-0.6b": AttentionShape(num_heads=16, num_kv_heads=8, head_dim=128),
}
