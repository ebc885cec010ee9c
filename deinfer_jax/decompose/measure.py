"""Calibration and statistics: what a decomposition knows of a model before ranks are chosen."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deinfer_jax.checkpoint.parameters import all_finite
from deinfer_jax.checkpoint.source import Checkpoint
from deinfer_jax.decompose.blocks import BlockRunner
from deinfer_jax.decompose.calibration import Calibration, from_text, self_written
from deinfer_jax.decompose.groups import Group
from deinfer_jax.decompose.methods import METHODS, Moments, Spectrum, decompose
from deinfer_jax.decompose.spectra import SpectrumStore
from deinfer_jax.decompose.statistics import collect
from deinfer_jax.engine.load import load

__all__ = ["Measurement", "PathLike"]

logger = logging.getLogger(__name__)

VERSION = 1  # of what is kept on disk
WINDOW = 512  # calibration tokens that see each other
LABEL_SAMPLES = 1  # label sequences a window
PathLike = str | os.PathLike[str]


class Measurement:
    """Spectra of a model's groups.

    Args:
        checkpoint: dense.
        all_groups: of the whole model.
        method, calibration, calibration_tokens, seed: of
            :func:`deinfer_jax.decompose`.
        progress: bars.

    Attributes:
        base_model: name and hash of the checkpoint.
        fingerprint: of all that fixes the spectra.
        seconds: by step.

    Raises:
        ValueError, FileNotFoundError: an argument is wrong, or a text is missing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        all_groups: Sequence[Group],
        *,
        method: str,
        calibration: PathLike | Sequence[PathLike] | None,
        calibration_tokens: int,
        seed: int,
        progress: bool,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed: expected an integer from 0 to 2^32 - 1, got {seed!r}")
        self.checkpoint, self.groups = checkpoint, all_groups
        self.method: Any = method
        self.seed, self.progress = seed, progress
        self.seconds: dict[str, float] = {}
        # A power of two, so that a round number of tokens comes out even.
        self.window = 2 ** (min(WINDOW, checkpoint.config.max_position).bit_length() - 1)
        if calibration_tokens < self.window or calibration_tokens % self.window:
            raise ValueError(
                f"calibration_tokens: expected a multiple of {self.window}, "
                f"got {calibration_tokens}"
            )
        self.tokens = calibration_tokens
        self.texts = None if method == "svd" else _paths(calibration)
        with self._timed("hash"):
            self.base_model = {"name": checkpoint.path.name, "sha256": checkpoint.sha256()}
            hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.texts or ()]
        blind = method == "svd"
        self.fingerprint: dict[str, Any] = {
            "version": VERSION,
            "base_model": self.base_model["sha256"],
            "method": method,
            "groups": [list(group.modules) for group in all_groups],
            "calibration": None if blind else hashes or "self",
            "calibration_tokens": None if blind else calibration_tokens,
            "seed": None if blind else seed,
        }

        # Here, so that a text that is too short is known before anything is written.
        self._calibrated: Calibration | None = None
        if self.texts is not None:
            with self._timed("calibration"):
                self._calibrated = from_text(
                    checkpoint.tokenizer(), self.texts, tokens=self.tokens, window=self.window
                )

    def take(self, store: SpectrumStore) -> dict[str, Any]:
        """Fills the store with what it lacks; returns the calibration's description."""
        config = self.checkpoint.config
        missing = [layer for layer in range(config.num_layers) if not store.has(layer)]
        if self.method == "svd":
            for layer in missing:
                self._keep(store, layer, {})
            return {}
        tokens, description = self._calibration(store)
        if missing:
            logger.info("statistics on %d tokens: %s", tokens.size, description)
            with self._timed("statistics"):
                collect(
                    BlockRunner(self.checkpoint, max_context=self.window, device=jax.devices()[0]),
                    tokens,
                    self.groups,
                    gradients=self.method == "fisher",
                    seed=self.seed,
                    label_samples=LABEL_SAMPLES,
                    have=store.has,
                    take=lambda layer, moments: self._keep(store, layer, moments),
                    progress=self.progress,
                )
        return description

    def _keep(self, store: SpectrumStore, layer: int, moments: dict[str, Moments]) -> None:
        spectra = {}
        for group in self.groups:
            if group.layer == layer:
                names = [f"{module}.weight" for module in group.modules]
                found = dict(self.checkpoint.tensors(names))
                for name, weight in found.items():
                    if not all_finite(weight):
                        raise ValueError(f"{self.checkpoint.path}: tensor {name} is not finite")
                stacked = np.concatenate([found[name].astype(np.float64) for name in names])
                try:
                    whole = decompose(stacked, moments.get(group.name), self.method)
                except np.linalg.LinAlgError as error:
                    raise ValueError(f"{group.name}: {error}") from error
                if not (np.isfinite(whole.left).all() and np.isfinite(whole.right).all()):
                    raise ValueError(f"{group.name}: its factors are not finite")
                most = group.break_even
                spectra[group.name] = Spectrum(
                    energies=whole.energies, left=whole.left[:, :most], right=whole.right[:most]
                )
        store.write(layer, spectra, moments)

    def _calibration(self, store: SpectrumStore) -> tuple[np.ndarray, dict[str, Any]]:
        """Token windows and their description; what the model wrote is kept for a resumed run."""
        if self._calibrated is not None:
            return self._calibrated.tokens, self._calibrated.description
        kept = store.calibration()
        if kept is None:
            with self._timed("calibration"):
                written = self._self_written()
            kept = written.tokens, written.description
            store.keep_calibration(*kept)
        return kept

    def _self_written(self) -> Calibration:
        logger.info("no calibration text: the model writes %d tokens itself", self.tokens)
        with load(
            self.checkpoint.path,
            dtype="float32",
            max_context=self.window,
            max_batch=32,
            progress=self.progress,
        ) as llm:
            return self_written(
                llm, tokens=self.tokens, window=self.window, seed=self.seed, progress=self.progress
            )

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - started


def _paths(calibration: PathLike | Sequence[PathLike] | None) -> list[Path] | None:
    if calibration is None:
        return None
    single = isinstance(calibration, str | os.PathLike)
    paths = [Path(path) for path in ([calibration] if single else calibration)]
    if not paths:
        raise ValueError("calibration: expected a text file or several, or None, got none")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"calibration: expected a text file, found none at {path}")
    return paths
