"""Page compactions of real models, for tests, tuning and benches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SHAPES", "CompactShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactShape:
    """A buffer of ``pages`` pages of ``page_size`` rows of ``width`` numbers."""

    pages: int
    page_size: int
    width: int


SHAPES = {
    # 64 sequences of 512 tokens; c_k and c_v of rank 512 each, or one latent of a {k, v} group.
    "llama-3-8b": CompactShape(pages=512, page_size=64, width=1024),
    "llama-3-8b-kv": CompactShape(pages=512, page_size=64, width=960),
    "llama-3-70b-kv": CompactShape(pages=512, page_size=64, width=1024),
}
