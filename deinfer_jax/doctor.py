"""Looks at the installation and says in a line whether it is fit for use."""

from __future__ import annotations

import importlib.metadata
import os
import platform

__all__ = ["report", "version"]

PACKAGES = (
    "deinfer-jax jax jaxlib jax-cuda13-plugin flax transformers tokenizers safetensors gguf numpy "
    "torch"
).split()


def report() -> tuple[str, bool]:
    """A text with versions, devices, flags and a verdict, and whether all is well."""
    lines, problems, notes = [], [], []
    lines.append(
        f"python      {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    )
    for name in PACKAGES:
        lines.append(f"{name:<11} {version(name) or 'not installed'}")

    import jax
    import jax.numpy as jnp

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return "\n".join([*lines, f"verdict: no device can be used: {error}"]), False
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        room = f", {limit / 1e9:.1f} GB for JAX" if limit else ""
        capability = getattr(device, "compute_capability", None)
        kind = f", compute capability {capability}" if capability else ""
        lines.append(f"device      {device.id}: {device.platform} {device.device_kind}{kind}{room}")
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        lines.append(f"{variable}  {os.environ.get(variable) or '(not set)'}")
    lines.append(
        "compilation cache  "
        f"{jax.config.jax_compilation_cache_dir or '(set when a model is loaded)'}"
    )

    ones = jnp.ones((128, 128), jnp.bfloat16)
    if float((ones @ ones).sum()) != 128.0**3:
        problems.append("a bfloat16 product of ones came out wrong on this device")
    first = devices[0]
    if first.platform == "cpu" and version("jax-cuda13-plugin"):
        problems.append("the CUDA plugin is installed, but JAX sees no GPU")
    if first.platform == "cpu":
        notes.append("no GPU: models run in float32 on the CPU")
    elif first.platform == "gpu" and float(getattr(first, "compute_capability", "0")) < 9.0:
        notes.append("the GPU is older than Hopper: reference implementations run")
    if problems:
        verdict = "not fit for use: " + "; ".join(problems)
    else:
        verdict = "ready" + (f" ({'; '.join(notes)})" if notes else "")
    return "\n".join([*lines, f"verdict: {verdict}"]), not problems


def version(package: str) -> str | None:
    """Of an installed package, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
