"""Decompositions of full rank on disk, a file a layer: taken once, cut at any rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from deinfer_jax.checkpoint.workspace import Workspace
from deinfer_jax.decompose.groups import Group
from deinfer_jax.decompose.methods import Moments, Spectrum

__all__ = ["GroupSpectrum", "SpectrumStore"]

SUFFIX = ".safetensors"
CALIBRATION = "calibration"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSpectrum:
    """What is kept of a group: its decomposition up to break-even, and a moment to judge it by.

    Attributes:
        spectrum: cut at break-even, where a group stays dense; its energies are whole.
        inputs: G [in, in] where out > in, else None.
        outputs: C [out, out] where out ≤ in, else None; both None for ``svd``.
    """

    spectrum: Spectrum
    inputs: np.ndarray | None
    outputs: np.ndarray | None

    def relative_errors(
        self, weights: Sequence[np.ndarray], u: np.ndarray, v: np.ndarray
    ) -> list[float | None]:
        """‖(W − u v) G^½‖ / ‖W G^½‖ of each member, over the calibration tokens.

        Where out ≤ in, G is not at hand, and what rounding v adds outside of the rows of W is not
        seen.

        Args:
            weights: [out, in] float64 of each member.
            u: [Σ out, r] and v: [r, in] float64, as they will be stored.
        """
        stacked = np.concatenate(weights)
        if self.inputs is not None:
            off = stacked - u @ v
            wrong = np.einsum("oi,oi->o", off @ self.inputs, off)
            right = np.einsum("oi,oi->o", stacked @ self.inputs, stacked)
        elif self.outputs is not None:
            # The rows of v are combinations of W's, so u v = K W, and G is not needed.
            inverse = np.linalg.pinv(stacked @ stacked.T, rcond=1e-13, hermitian=True)
            reader = v @ stacked.T @ inverse
            off = np.eye(len(stacked)) - u @ reader
            wrong = np.einsum("op,op->o", off @ self.outputs, off)
            right = np.diag(self.outputs)
        else:
            return [None] * len(weights)
        ends = np.cumsum([len(weight) for weight in weights])
        starts = ends - [len(weight) for weight in weights]
        return [
            float(np.sqrt(max(wrong[a:b].sum(), 0.0) / max(right[a:b].sum(), 1e-300)))
            for a, b in zip(starts, ends, strict=True)
        ]


class SpectrumStore:
    """A folder with the spectra of a model, which an interrupted run finds again.

    Args:
        folder: made where it is not there.
        fingerprint: of what fixes the spectra (model, calibration, method, groups, seed).

    Raises:
        ValueError: the folder is of something else; the differing keys are named.
        BlockingIOError: another process works in it.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        self._workspace = Workspace(folder, fingerprint)

    def has(self, layer: int) -> bool:
        """Whether a layer is finished."""
        return self._file(layer).is_file()

    def write(
        self, layer: int, spectra: Mapping[str, Spectrum], moments: Mapping[str, Moments | None]
    ) -> None:
        """Keeps a layer, by group name."""
        arrays: dict[str, np.ndarray] = {}
        for name, spectrum in spectra.items():
            arrays[f"{name}:energies"] = spectrum.energies
            arrays[f"{name}:left"] = spectrum.left.astype(np.float32)
            arrays[f"{name}:right"] = spectrum.right.astype(np.float32)
            known = moments.get(name)
            for side in ("inputs", "outputs"):
                moment = None if known is None else getattr(known, side)
                if moment is not None:
                    arrays[f"{name}:{side}"] = moment
        self._workspace.write_arrays(self._file(layer), arrays)

    def read(self, group: Group) -> GroupSpectrum:
        """A group of a finished layer, float64."""
        from safetensors import safe_open

        def array(part: str) -> Any:
            name = f"{group.name}:{part}"
            return file.get_tensor(name).astype(np.float64) if name in names else None

        with safe_open(self._file(group.layer), framework="numpy") as file:
            names = set(file.keys())
            return GroupSpectrum(
                spectrum=Spectrum(
                    energies=array("energies"), left=array("left"), right=array("right")
                ),
                inputs=array("inputs"),
                outputs=array("outputs"),
            )

    def energies(self, group: Group) -> Float[np.ndarray, " n"]:
        """s² of a group, whole and falling."""
        from safetensors import safe_open

        with safe_open(self._file(group.layer), framework="numpy") as file:
            return file.get_tensor(f"{group.name}:energies")

    def calibration(self) -> tuple[np.ndarray, dict[str, Any]] | None:
        """Token windows and their description as they were kept, or None."""
        from safetensors.numpy import load_file

        tokens, said = self.folder / f"{CALIBRATION}{SUFFIX}", self.folder / f"{CALIBRATION}.json"
        if not (tokens.is_file() and said.is_file()):
            return None
        return load_file(tokens)["tokens"], json.loads(said.read_text())

    def keep_calibration(self, tokens: np.ndarray, description: Mapping[str, Any]) -> None:
        """For :meth:`calibration`."""
        self._workspace.write_arrays(self.folder / f"{CALIBRATION}{SUFFIX}", {"tokens": tokens})
        self._workspace.write_json(self.folder / f"{CALIBRATION}.json", dict(description))

    def close(self) -> None:
        """Lets go of the folder; it stays."""
        self._workspace.close()

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}{SUFFIX}"
