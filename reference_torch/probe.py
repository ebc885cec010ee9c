"""The torch side of a cross-check: answers a job with the values of every layer.

A job is a folder with ``job.json`` and ``tokens.npz``; the answer is ``torch.npz`` in it, float32
(float64 for a job in float64). For B prompts, W words, L layers, n forced tokens, m greedy ones:

    prefill_hidden_i [L + 1, P_i, D], prefill_logits_i [P_i, W]
    decode_hidden [n, L + 1, B, D], decode_logits [n, B, W]     token forced[s, b] at P_b + s
    greedy_tokens int32 [m, B], greedy_margin [m, B], greedy_top [m, B]
    info                                                        a string of JSON
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_torch.group import Group
from reference_torch.numerics import DTYPES, attention_kernels, make_comparable
from reference_torch.opening import load
from reference_torch.perturb import step_disturbance
from reference_torch.ranks import launch
from reference_torch.session import Session, greedy

__all__ = ["answer", "probe"]


def probe(folders: Sequence[Path]) -> None:
    """Answers the jobs in ``folders`` one after the other, in the same processes.

    Raises:
        ValueError: a job or its checkpoint is wrong, or they are for different ranks or devices.
        RankError: a rank died or hung.
    """
    jobs = [json.loads((folder / "job.json").read_text()) for folder in folders]
    places = {(job["ranks"], job["device"]) for job in jobs}
    if len(places) != 1:
        raise ValueError(f"probe: expected jobs of the same ranks and device, got {places}")
    ((ranks, device),) = places
    launch(_answer_all, ranks, folders, jobs, device=device)


def _answer_all(group: Group, folders: Sequence[Path], jobs: Sequence[dict[str, Any]]) -> None:
    make_comparable()
    for folder, job in zip(folders, jobs, strict=True):
        answer(group, folder, job)


@torch.inference_mode()
def answer(group: Group, folder: Path, job: dict[str, Any]) -> None:
    """Answers a job, as one of its ranks."""
    started = time.perf_counter()
    with attention_kernels(DTYPES[job["dtype"]]):
        found = _values(group, folder, job)
    if group.rank == 0:
        info = {
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "device": torch.cuda.get_device_name() if group.device.type == "cuda" else "cpu",
            "seconds": time.perf_counter() - started,
            "kv_cache": job["kv_cache"],
            "elements_a_decoded_token": found.pop("moved"),
        }
        np.savez(folder / "torch.npz", info=json.dumps(info), **found)


def _values(group: Group, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    with np.load(folder / "tokens.npz") as given:
        prompts = [given[f"prompt_{i}"].tolist() for i in range(len(given.files) - 1)]
        forced = torch.from_numpy(given["forced"].astype(np.int64)).to(group.device)
    model = load(
        Path(job["checkpoint"]),
        group,
        max_context=job["max_context"],
        strategy=job["strategy"],
        dtype=job["dtype"],
        perturb=job["perturb"],
    )

    def session() -> Session:
        return Session(
            model,
            batch=len(prompts),
            context=job["max_context"],
            page_size=job["page_size"],
            kv_cache=job["kv_cache"],
            cuda_graphs=job["cuda_graphs"],
            disturb=step_disturbance(job["perturb"]),
        )

    found: dict[str, Any] = {}
    chunk = job["prefill_chunk"]
    probed = session()
    for i, prompt in enumerate(prompts):
        residuals: list[Tensor] = []
        last = probed.prefill(i, prompt, chunk, residuals)
        found[f"prefill_logits_{i}"] = _numpy(model.logits(last))
        found[f"prefill_hidden_{i}"] = _by_layer(residuals, model.config.layers + 1)
    hidden, logits = [], []
    group.moved.clear()
    for tokens in forced:
        residuals = []
        logits.append(_numpy(probed.decode(tokens, residuals)))
        hidden.append(np.stack([_numpy(x[:, 0]) for x in residuals]))
    found["moved"] = {name: count / forced.numel() for name, count in group.moved.items()}
    found |= {"decode_hidden": np.stack(hidden), "decode_logits": np.stack(logits)}
    del probed
    free = greedy(session(), prompts, job["greedy"], chunk)
    found["greedy_tokens"] = free.tokens.cpu().numpy().astype(np.int32)
    found["greedy_margin"], found["greedy_top"] = _numpy(free.margins), _numpy(free.tops)
    return found


def _numpy(x: Tensor) -> np.ndarray:
    return x.to(torch.promote_types(x.dtype, torch.float32)).cpu().numpy()


def _by_layer(residuals: list[Tensor], count: int) -> np.ndarray:
    """[count, P, D] of residuals [1, T, D] that come chunk by chunk."""
    return np.stack([_numpy(torch.cat(residuals[i::count], dim=1)[0]) for i in range(count)])
