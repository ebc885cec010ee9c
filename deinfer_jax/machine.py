"""The machine that a measurement was made on, and result files that say so."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from deinfer_jax.doctor import version

__all__ = ["machine", "write_result"]

PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """Device, driver and versions, as every result file states them."""
    device = jax.devices()[0]
    found = {package: version(package) for package in PACKAGES}
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else _cpu_name(),
        "devices": jax.device_count(),
        "driver": _driver() if device.platform == "gpu" else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: number for package, number in found.items() if number},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes ``result`` as JSON, with the machine's description in front."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


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
