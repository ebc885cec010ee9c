"""Reads what a decomposition wrote, and runs the dense model in torch; nothing of the library."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

WINDOW = 32  # the longest that the tiny models take, and so the calibration's window
TOKENS = 4 * WINDOW

# What is run everywhere: variant, method, groups, allocation.
CASES: dict[str, dict[str, Any]] = {
    "gqa-fisher-shared": dict(variant="gqa", method="fisher"),
    "biases-whitened-kv": dict(variant="biases", method="whitened", groups="shared-kv", keep=0.7),
    "tied-svd-uniform": dict(
        variant="tied", method="svd", groups="separate", allocation="uniform", keep=0.8
    ),
    "windows-fisher-own": dict(
        variant="mistral-window", method="fisher", groups=(("q", "v"), ("gate", "up")), keep=0.85
    ),
    "qwen3-whitened-shared": dict(variant="qwen3", method="whitened", allocation="uniform"),
    "heads-whitened-separate": dict(variant="nine-three-heads", method="whitened", groups=()),
}


def block(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["low_rank"]


def factors(path: Path, module: str) -> tuple[np.ndarray, np.ndarray] | None:
    """u and v of a module as config.json and the files say, float64; None where it is dense."""
    piece = block(path)["slices"].get(module)
    if piece is None:
        return None
    name, offset, rank = piece
    tensors = tensors_of(path)
    v = tensors[name][offset : offset + rank]
    return tensors[f"{module}.u.weight"].astype(np.float64), v.astype(np.float64)


def multiplied(dense: Any, path: Path) -> Any:
    """The torch model in which W is u v."""
    import torch

    model = copy.deepcopy(dense.model)
    with torch.no_grad():
        for name, module in model.named_modules():
            found = factors(path, name)
            if found is not None:
                module.weight.copy_(torch.from_numpy((found[0] @ found[1]).astype(np.float32)))
    return model


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def inputs_of(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What every linear of the layers reads, [tokens, in], float64."""
    import torch

    model = copy.deepcopy(model).double()
    seen: dict[str, list[np.ndarray]] = {}

    def hook(name: str) -> Any:
        return lambda module, args: seen.setdefault(name, []).append(args[0][0].numpy())

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for window in tokens.reshape(-1, WINDOW):
            model(torch.from_numpy(window.astype(np.int64))[None], use_cache=False)
    return {name: np.concatenate(found) for name, found in seen.items()}


def weights_of(dense: Any) -> dict[str, np.ndarray]:
    tensors = dense.tensors().items()
    return {name[:-7]: w.astype(np.float64) for name, w in tensors if name.endswith("_proj.weight")}


def spread(ids: np.ndarray, tokens: int) -> np.ndarray:
    """The ids [tokens] that a text of ``ids`` gives: windows at equal distances."""
    starts = np.linspace(0, len(ids) - WINDOW, tokens // WINDOW).astype(int)
    return np.concatenate([ids[start : start + WINDOW] for start in starts])
