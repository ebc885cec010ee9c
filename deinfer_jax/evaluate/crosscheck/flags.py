"""The settings that make a JAX run comparable with another implementation's.

- ``--xla_allow_excess_precision=false``: XLA may else keep bfloat16 values in float32 between
  operations, where the other side rounds them.
- ``--xla_gpu_deterministic_ops=true``: sums on a GPU in a fixed order, so that a difference is the
  same in every run. Does nothing on a CPU.
- ``JAX_DEFAULT_MATMUL_PRECISION=highest`` for float32: its products on a GPU would else be
  TensorFloat-32, with 10 bits of mantissa. Does nothing on a CPU.
- ``--xla_force_host_platform_device_count``: simulated devices on a CPU, where several are asked
  for.
- ``JAX_PLATFORMS``: the device that was asked for, or an error, but never another one.

All are environment variables that JAX reads when it is imported, hence of a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PLATFORMS", "XLA", "comparable"]

XLA = {"--xla_allow_excess_precision": "false", "--xla_gpu_deterministic_ops": "true"}
COUNT = "--xla_force_host_platform_device_count"
PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu"}


def comparable(
    environment: Mapping[str, str], *, device: str, dtype: str, devices: int = 1
) -> dict[str, str]:
    """A copy of an environment with the settings in it, other XLA flags kept.

    Args:
        environment: of the process that is to run JAX.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of the run.
        devices: that the run takes.
    """
    ours = dict(XLA)
    if device == "cpu" and devices > 1:
        ours[COUNT] = str(devices)
    kept = [
        flag
        for flag in environment.get("XLA_FLAGS", "").split()
        if flag.partition("=")[0] not in ours
    ]
    flags = [*kept, *(f"{name}={value}" for name, value in ours.items())]
    found = {**environment, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": PLATFORMS[device]}
    if dtype == "float32":
        found["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    return found
