"""What every bench shares: models by name, and the result file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deinfer_jax import ModelConfig, RopeConfig
from deinfer_jax.machine import write_result

RESULTS = Path(__file__).parent / "results"

LLAMA_3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_position=8192,
    dtype="bfloat16",
)

LLAMA_3_70B = LLAMA_3_8B.replace(
    hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)


def write(name: str, result: dict[str, Any], folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes ``result`` with the machine's description to ``<folder>/<name>.json``."""
    path = Path(folder or RESULTS) / f"{name}.json"
    write_result(path, result)
    print(f"written to {path.name}")
    return path


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
