"""From a directory to a model."""

from __future__ import annotations

from pathlib import Path

from reference_torch.checkpoint import Checkpoint
from reference_torch.config import read_config
from reference_torch.group import Group
from reference_torch.model import Model
from reference_torch.numerics import DTYPES
from reference_torch.perturb import perturbed
from reference_torch.strategies import get_strategy

__all__ = ["load"]


def load(
    directory: Path,
    group: Group,
    *,
    max_context: int,
    strategy: str = "low_rank",
    dtype: str | None = None,
    perturb: str | None = None,
) -> Model:
    """This rank's part of a dense or decomposed checkpoint.

    Args:
        directory: with config.json and safetensors.
        group: the ranks.
        max_context: longest sequence, in tokens.
        strategy: ``"dense"``, ``"naive"`` or ``"low_rank"``.
        dtype: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``; None = the
            checkpoint's.
        perturb: what is to be broken on purpose, see ``perturb``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an argument, the config or a tensor is not as expected; the message names it.
    """
    config = read_config(directory)
    checkpoint = Checkpoint(directory)
    dtype = config.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    changed, tensors = perturbed(perturb, config, checkpoint)
    model = Model(
        changed,
        tensors,
        get_strategy(strategy, group),
        dtype=DTYPES[dtype],
        max_context=max_context,
    )
    checkpoint.check_all_read()
    return model
