"""Calibration and statistics: what a decomposition knows of a model before ranks are chosen."""

from __future__ import annotations

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
from deinfer_jax.decompose.calibration import Calibration, from_ids, from_text, self_written
from deinfer_jax.decompose.groups import Group
from deinfer_jax.decompose.methods import (
    GRADIENT_DAMPING,
    INPUT_DAMPING,
    METHODS,
    Moments,
    Spectrum,
    decompose,
)
from deinfer_jax.decompose.spectra import SpectrumStore
from deinfer_jax.decompose.statistics import collect
from deinfer_jax.engine.load import load

__all__ = ["CalibrationLike", "Measurement", "PathLike"]

logger = logging.getLogger(__name__)

VERSION = 2  # of what is kept on disk
WINDOW = 512  # calibration tokens that see each other
CALIBRATION_TOKENS = 8192
PathLike = str | os.PathLike[str]
# Text files, token ids [windows, window], or None for what the model writes itself.
CalibrationLike = PathLike | Sequence[PathLike] | np.ndarray | jax.Array | None


class Measurement:
    """Spectra of a model's groups.

    Args:
        checkpoint: dense.
        all_groups: of the whole model.
        method, calibration, calibration_tokens, label_samples, seed: of
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
        calibration: CalibrationLike,
        calibration_tokens: int | None,
        label_samples: int,
        seed: int,
        progress: bool,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed: expected an integer from 0 to 2^32 - 1, got {seed!r}")
        self.checkpoint, self.groups = checkpoint, all_groups
        self.method: Any = method
        if not isinstance(label_samples, int) or label_samples < 1:
            raise ValueError(f"label_samples: expected a positive integer, got {label_samples!r}")
        self.seed, self.label_samples, self.progress = seed, label_samples, progress
        self.seconds: dict[str, float] = {}
        with self._timed("hash"):
            self.base_model = {"name": checkpoint.path.name, "sha256": checkpoint.sha256()}
        # Given calibrations here, so that what is wrong with one is known before anything is
        # written.
        blind = method == "svd"
        self._calibrated = None if blind else self._given(calibration, calibration_tokens)
        source: Any = None
        if self._calibrated is not None:
            source = self._calibrated.description["sha256"]
        elif not blind:
            source = {"source": "self", "tokens": self.tokens}
        self.fingerprint: dict[str, Any] = {
            "version": VERSION,
            "base_model": self.base_model["sha256"],
            "method": method,
            "groups": [list(group.modules) for group in all_groups],
            "calibration": source,
            "seed": None if blind else seed,
            "label_samples": label_samples if method == "fisher" else None,
            # Constants of the code, so that spectra of another version's are not taken for these.
            "damping": [INPUT_DAMPING, GRADIENT_DAMPING] if method == "fisher" else None,
        }

    def _given(
        self, calibration: CalibrationLike, calibration_tokens: int | None
    ) -> Calibration | None:
        """The calibration, unless the model is to write it; sets how it is cut."""
        config = self.checkpoint.config
        if isinstance(calibration, np.ndarray | jax.Array):
            if calibration_tokens not in (None, calibration.size):
                raise ValueError(
                    f"calibration_tokens: expected None or the {calibration.size} token ids that "
                    f"are given, got {calibration_tokens}"
                )
            given = from_ids(
                calibration, vocab_size=config.vocab_size, max_window=config.max_position
            )
            self.tokens, self.window = given.tokens.size, given.tokens.shape[1]
            return given
        tokens = CALIBRATION_TOKENS if calibration_tokens is None else calibration_tokens
        # A power of two, so that a round number of tokens comes out even.
        window = 2 ** (min(WINDOW, config.max_position).bit_length() - 1)
        if tokens < window or tokens % window:
            raise ValueError(f"calibration_tokens: expected a multiple of {window}, got {tokens}")
        self.tokens, self.window = tokens, window
        paths = None if calibration is None else _paths(calibration)
        try:
            tokenizer = self.checkpoint.tokenizer()
        except FileNotFoundError as error:
            raise ValueError(
                f"calibration: expected token ids [windows, window], since the model has no "
                f"tokenizer ({error})"
            ) from error
        if paths is None:
            return None
        with self._timed("calibration"):
            return from_text(tokenizer, paths, tokens=tokens, window=window)

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
                    label_samples=self.label_samples,
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


def _paths(calibration: PathLike | Sequence[PathLike]) -> list[Path]:
    single = isinstance(calibration, str | os.PathLike)
    paths = [Path(path) for path in ([calibration] if single else calibration)]
    if not paths:
        raise ValueError("calibration: expected a text file or several, or None, got none")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"calibration: expected a text file, found none at {path}")
    return paths
