"""The devices that a model is spread over: a mesh with one axis, ``tp``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

__all__ = ["AXIS", "Placement", "choose_placement", "platform_of"]

AXIS = "tp"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives.

    Attributes:
        mesh: of one axis ``tp``; a single device is a mesh of one.
    """

    mesh: Mesh

    @property
    def count(self) -> int:
        """p, the devices."""
        return self.mesh.size

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of those that have its devices, in order."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))

    @property
    def device(self) -> Any:
        """One of them, of this process, that stands for all."""
        return self.mesh.local_devices[0]

    @property
    def platform(self) -> str:
        """``"cpu"`` or ``"gpu"``."""
        return self.device.platform

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """Of an array that is split like that."""
        if self.count == 1:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)

    def spread(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """A function of local arrays as one of whole ones; on one device they are the same."""
        if self.count == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


def platform_of(tensor_parallel: int | Mesh | None) -> str:
    """Of the devices that a caller asks for: ``"cpu"`` or ``"gpu"``."""
    if isinstance(tensor_parallel, Mesh):
        return tensor_parallel.devices.flat[0].platform
    return jax.devices()[0].platform


def choose_placement(tensor_parallel: int | Mesh | None) -> Placement:
    """The devices that a caller asks for.

    Args:
        tensor_parallel: how many, or a mesh with the single axis ``tp``; None = one. One is this
            process's own; several are those of all processes, or a mesh says which.

    Raises:
        ValueError: there are not so many, the mesh has other axes, it is no positive number, or
            there are devices of some processes only.
    """
    if isinstance(tensor_parallel, Mesh):
        if tensor_parallel.axis_names != (AXIS,):
            raise ValueError(
                f"tensor_parallel: expected a mesh with the single axis {AXIS!r}, got axes "
                f"{tensor_parallel.axis_names}"
            )
        # A mesh of Explicit axes, JAX's default, would refuse arrays that are not split yet.
        return _checked(Mesh(tensor_parallel.devices, (AXIS,), axis_types=(AxisType.Auto,)))
    count = 1 if tensor_parallel is None else tensor_parallel
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"tensor_parallel: expected a positive number of devices, a mesh or None, got {count!r}"
        )
    devices = jax.local_devices() if count == 1 else jax.devices()
    if count > len(devices):
        raise ValueError(
            f"tensor_parallel: expected at most {len(devices)}, the {devices[0].platform} devices "
            f"that there are, got {count}"
        )
    return _checked(
        jax.make_mesh((int(count),), (AXIS,), (AxisType.Auto,), devices=devices[: int(count)])
    )


def _checked(mesh: Mesh) -> Placement:
    placement = Placement(mesh)
    own, every = jax.process_index(), tuple(range(jax.process_count()))
    if placement.processes not in ((own,), every):
        raise ValueError(
            f"tensor_parallel: expected devices of all {len(every)} processes, or of process {own} "
            f"alone, got devices of processes {', '.join(map(str, placement.processes))}"
        )
    return placement
