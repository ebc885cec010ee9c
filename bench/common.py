"""What every bench shares: a description of the machine, models by name, and the result file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from deinfer_jax import ModelConfig, RopeConfig

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


def machine() -> dict[str, Any]:
    """Device, driver and versions, as every result file states them."""
    device = jax.devices()[0]
    versions = {}
    for package in ("jax", "jaxlib", "flax", "torch", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else _cpu_name(),
        "devices": jax.device_count(),
        "driver": _driver() if device.platform == "gpu" else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(name: str, result: dict[str, Any], folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes ``result`` with the machine's description to ``<folder>/<name>.json``."""
    path = Path(folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    print(f"written to {path.name}")
    return path


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
