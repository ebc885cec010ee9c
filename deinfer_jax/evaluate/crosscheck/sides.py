"""Both sides of a cross-check, asked and compared."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deinfer_jax.config import ModelConfig
from deinfer_jax.evaluate.crosscheck.compare import Answer, Phase, compare
from deinfer_jax.evaluate.crosscheck.flags import comparable
from deinfer_jax.evaluate.crosscheck.job import Job, Tokens
from deinfer_jax.evaluate.crosscheck.processes import run_side
from deinfer_jax.evaluate.crosscheck.report import CrosscheckRun, ThirdOpinion
from deinfer_jax.evaluate.crosscheck.verdict import Tolerance, tolerance

__all__ = ["JaxChoice", "Sides", "TorchChoice"]

JAX_COMMAND = (sys.executable, "-m", "deinfer_jax.evaluate.crosscheck.jax_side")
TORCH_COMMAND = (sys.executable, "-m", "reference_torch", "probe")


@dataclass(frozen=True, slots=True)
class JaxChoice:
    """What is the JAX side's alone, see ``Job``."""

    strategy: str
    devices: int


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """What is the PyTorch side's alone, see ``Job``."""

    strategy: str
    ranks: int
    cuda_graphs: bool


class Sides:
    """Asks both sides, one after the other, and compares what they answer.

    Args:
        folder: where the jobs are put, each in a folder of its own.
        job: what all have in common.
        tokens: of all jobs.
        config: of the model.
        timeout: seconds that a process may take.
        third_opinion: whether to run PyTorch in float64 where float32 is past the limit.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        tokens: Tokens,
        config: ModelConfig,
        timeout: float,
        third_opinion: bool,
    ) -> None:
        self.folder, self.job, self.tokens, self.config = folder, job, tokens, config
        self.timeout = timeout
        self.third_opinion = third_opinion and job.dtype == "float32"
        self.tolerance: Tolerance = tolerance(job.dtype, config)
        self._asked = itertools.count()

    def of_cache(
        self, cache: str, jax: Sequence[JaxChoice], choices: Sequence[TorchChoice], bar: Any
    ) -> list[CrosscheckRun]:
        """Each PyTorch run with a cache kind against each JAX run with it."""
        job = replace(self.job, kv_cache=cache)
        ours: dict[JaxChoice, Answer] = {}
        for one in jax:
            asked = replace(job, jax_strategy=one.strategy, jax_devices=one.devices)
            (ours[one],) = self._ask("JAX", JAX_COMMAND, "jax.npz", [asked])
            bar.update()
        exact: Answer | None = None
        runs: dict[tuple[JaxChoice, TorchChoice], CrosscheckRun] = {}
        for ranks in dict.fromkeys(choice.ranks for choice in choices):
            # Starting processes takes longer than a small model, so they answer several jobs.
            some = [choice for choice in choices if choice.ranks == ranks]
            jobs = [
                replace(
                    job,
                    strategy=choice.strategy,
                    ranks=choice.ranks,
                    cuda_graphs=choice.cuda_graphs,
                )
                for choice in some
            ]
            answers = self._ask("PyTorch", TORCH_COMMAND, "torch.npz", jobs)
            for choice, theirs in zip(some, answers, strict=True):
                for one, answer in ours.items():
                    run = self._judged(one, choice, cache, answer, theirs)
                    if self.third_opinion and self._off(run):
                        exact = exact or self._float64(job)
                        run = replace(run, third_opinion=_opinion(answer, theirs, exact))
                    runs[one, choice] = run
                bar.update()
        return [runs[pair] for pair in itertools.product(jax, choices)]

    def _judged(
        self, one: JaxChoice, choice: TorchChoice, cache: str, ours: Answer, theirs: Answer
    ) -> CrosscheckRun:
        problems = [
            f"{side}: {problem}"
            for side, answer in (("JAX", ours), ("PyTorch", theirs))
            for problem in self._problems(answer)
        ]
        comparison = None if problems else compare(ours, theirs)
        if comparison is not None:
            problems = self.tolerance.exceeded(comparison)
        return CrosscheckRun(
            jax_strategy=one.strategy,
            jax_devices=one.devices,
            strategy=choice.strategy,
            ranks=choice.ranks,
            cuda_graphs=choice.cuda_graphs,
            kv_cache=cache,
            comparison=comparison,
            problems=tuple(problems),
            third_opinion=None,
            jax=ours.info,
            torch=theirs.info,
        )

    def _off(self, run: CrosscheckRun) -> bool:
        limit, found = self.tolerance.relative, run.comparison
        if limit is None or found is None:
            return False
        return any(phase.worst_layer.relative > limit for phase in (found.prefill, found.decode))

    def _float64(self, job: Job) -> Answer:
        exact = replace(job, dtype="float64", strategy="low_rank", ranks=1, perturb=None)
        (answer,) = self._ask("PyTorch float64", TORCH_COMMAND, "torch.npz", [exact])
        problems = self._problems(answer)
        if problems:
            raise RuntimeError(f"the PyTorch side in float64: {problems[0]}")
        return answer

    def _problems(self, answer: Answer) -> list[str]:
        config = self.config
        return answer.problems(
            self.job,
            self.tokens,
            layers=config.num_layers,
            D=config.hidden_size,
            W=config.vocab_size,
        )

    def _ask(
        self, name: str, command: Sequence[str], result: str, jobs: Sequence[Job]
    ) -> list[Answer]:
        """Answers to jobs, of one process."""
        folders = []
        for job in jobs:
            folders.append(self.folder / f"job-{next(self._asked)}")
            job.write(folders[-1], self.tokens)
        environment = dict(os.environ)
        if command is JAX_COMMAND:
            (job,) = jobs
            environment = comparable(
                environment, device=job.device, dtype=job.dtype, devices=job.jax_devices
            )
        whole = [*command, *map(str, folders)]
        run_side(name, whole, environment=environment, timeout=self.timeout)
        answers = []
        for folder in folders:
            try:
                answers.append(Answer.read(folder / result))
            except FileNotFoundError:
                raise RuntimeError(f"the {name} side ended well, but wrote no {result}") from None
            shutil.rmtree(folder)  # an answer of a large model is some 100 MB
        return answers


def _opinion(ours: Answer, theirs: Answer, exact: Answer) -> ThirdOpinion:
    def distances(side: Answer) -> dict[str, Any]:
        found = {}
        for name in ("prefill", "decode"):
            phase = Phase.of(side.phase(name), exact.phase(name))
            found[name] = (*phase.layers, phase.logits)
        return found

    return ThirdOpinion(jax=distances(ours), torch=distances(theirs))
