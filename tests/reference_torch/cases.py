"""What the ranks run in these tests; imported by new processes, so without jax."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reference_torch.group import Group
from reference_torch.numerics import DTYPES, attention_kernels, make_comparable
from reference_torch.opening import load
from reference_torch.session import Session

CONTEXT = 96


class Case(NamedTuple):
    """How a model is run."""

    strategy: str
    kv_cache: str
    dtype: str = "float32"
    cuda_graphs: bool = False


class Values(NamedTuple):
    """Logits [P, W] of each prompt and [n, B, W] of decoding, and what the collectives of decoding
    moved, and how many there were."""

    prefill: list[np.ndarray]
    decode: np.ndarray
    moved: dict[str, int]
    calls: dict[str, int]


def run(
    group: Group, path: Path, case: Case, prompts: list[list[int]], forced: np.ndarray
) -> Values:
    model = load(path, group, max_context=CONTEXT, strategy=case.strategy, dtype=case.dtype)
    session = Session(
        model,
        batch=len(prompts),
        context=CONTEXT,
        kv_cache=case.kv_cache,
        cuda_graphs=case.cuda_graphs,
    )
    with torch.inference_mode(), attention_kernels(DTYPES[case.dtype]):
        prefill = [
            model.logits(session.prefill(row, prompt, chunk=13)).cpu().numpy()
            for row, prompt in enumerate(prompts)
        ]
        group.moved.clear()
        group.calls.clear()
        decode = [
            session.decode(torch.from_numpy(tokens.astype(np.int64)).to(group.device)).cpu().numpy()
            for tokens in forced
        ]
    return Values(prefill, np.stack(decode), dict(group.moved), dict(group.calls))


def run_all(
    group: Group, jobs: list[tuple[Path, Case]], prompts: list[list[int]], forced: np.ndarray
) -> list[Values]:
    """Several in one group, since starting a process takes seconds."""
    return [run(group, path, case, prompts, forced) for path, case in jobs]


def run_all_comparably(
    group: Group, jobs: list[tuple[Path, Case]], prompts: list[list[int]], forced: np.ndarray
) -> list[Values]:
    """As a cross-check does."""
    make_comparable()
    return run_all(group, jobs, prompts, forced)


def add_up(group: Group, numbers: list[float]) -> tuple[float, list[float]]:
    mine = torch.tensor([numbers[group.rank]])
    return group.all_reduce(mine.clone()).item(), group.all_gather(mine[None])[0].tolist()


def fail(group: Group, how: str, rank: int) -> Any:
    """Does something wrong in one rank; the others wait for it."""
    group.all_reduce(torch.ones(3))
    if group.rank == rank:
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            time.sleep(600)
        if how == "value":
            raise ValueError("expected a cat, got a dog")
        if how == "odd":
            raise Odd("a pickle", "a gherkin")
        if how == "other":
            raise KeyError("planted")
    group.all_reduce(torch.ones(3))
    return "all is well"


class Odd(ValueError):
    """An error whose pickle cannot be read: it is made of two things and has one."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")


def hang(group: Group, since: Path) -> None:
    """In rank 1, after writing the time into a file."""
    group.all_reduce(torch.ones(3))
    if group.rank == 1:
        since.write_text(str(time.time()))
        time.sleep(600)
    group.all_reduce(torch.ones(3))


def report_and_sleep(group: Group, folder: str) -> None:
    """Leaves a file with the name of the process's number."""
    group.all_reduce(torch.ones(3))
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
