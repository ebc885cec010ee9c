"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(name: str) -> Path:
    """``~/.cache/deinfer_jax/<name>``, or under ``XDG_CACHE_HOME``; not made."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "deinfer_jax" / name
