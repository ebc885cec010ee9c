"""The JAX side of a cross-check: ``python -m deinfer_jax.evaluate.crosscheck.jax_side JOB_FOLDER``
answers the job in ``JOB_FOLDER/jax.npz``.

It runs with the settings of :mod:`~deinfer_jax.evaluate.crosscheck.flags`: ``crosscheck`` starts it
with them, and started by hand without them it starts itself anew. Exit status 1 with a line on
stderr where the job cannot be done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from deinfer_jax.engine.generate import generate
from deinfer_jax.engine.llm import LLM
from deinfer_jax.engine.load import load
from deinfer_jax.evaluate.crosscheck.flags import comparable
from deinfer_jax.evaluate.crosscheck.job import Job, Tokens
from deinfer_jax.evaluate.crosscheck.trace import Trace, scattered
from deinfer_jax.machine import machine

__all__ = ["answer", "main"]

MODULE = "deinfer_jax.evaluate.crosscheck.jax_side"


def main(folder: Path) -> int:
    """Answers the job in a folder; returns the exit status."""
    try:
        job, tokens = Job.read(folder)
        environment = comparable(
            os.environ, device=job.device, dtype=job.dtype, devices=job.jax_devices
        )
        if environment != dict(os.environ):
            # This package has imported JAX by now, which is too late for some of them.
            command = [sys.executable, "-m", MODULE, str(folder)]
            os.execve(sys.executable, command, environment)
        np.savez(folder / "jax.npz", **answer(job, tokens))
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def answer(job: Job, tokens: Tokens) -> dict[str, Any]:
    """Everything that the comparison looks at.

    Args:
        job: of which ``strategy``, ``ranks``, ``cuda_graphs`` and ``perturb`` are the other side's.
        tokens: of B sequences.

    Returns:
        Arrays by name, float32 unless said: ``prefill_hidden_i`` [L + 1, P_i, D], the residual
        stream after the embedding and after each layer, and ``prefill_logits_i`` [P_i, W];
        ``decode_hidden`` [forced, L + 1, B, D] and ``decode_logits`` [forced, B, W];
        ``greedy_tokens`` int32 [greedy, B] with ``greedy_top``, the best logit, and
        ``greedy_margin``, its distance to the second best; and ``info``, JSON in a string.
    """
    started = time.perf_counter()
    with load(
        job.checkpoint,
        strategy=job.jax_strategy,
        tensor_parallel=job.jax_devices,
        kv_cache=job.kv_cache,
        dtype=job.dtype,
        max_batch=2 * len(tokens.prompts),  # twice the pages, because half of them are held
        max_context=job.max_context,
        page_size=job.page_size,
        prefill_chunk=job.prefill_chunk,
        prefix_sharing=False,
        progress=False,
    ) as llm:
        with scattered(llm.core.scheduler.allocator):
            found, moved = _forced(llm, tokens)
            found |= _greedy(llm, tokens, job.greedy)
        described = machine()
        info = {
            "versions": described["versions"],
            "device": described["device"],
            "seconds": round(time.perf_counter() - started, 3),
            "strategy": llm.strategy.name,
            "devices": llm.runner.placement.count,
            "kv_cache": llm.cache_layout.kind,
            "elements_a_decoded_token": moved,
            "machine": described,
            "matmul_precision": os.environ.get("JAX_DEFAULT_MATMUL_PRECISION"),
        }
    return found | {"info": np.array(json.dumps(info))}


def _forced(llm: LLM, tokens: Tokens) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Prompts in chunks, then the forced tokens through the cache; and what that has moved."""
    count, each = len(tokens.prompts), llm.runner.max_pages
    found = {}
    with llm.core.borrowed_pages(count * each) as pages:
        order = np.random.default_rng(0).permutation(np.asarray(pages, np.int32))
        trace = Trace(llm, order.reshape(count, each))
        for i, prompt in enumerate(tokens.prompts):
            hidden, logits = trace.prefill(i, prompt)
            found |= {f"prefill_hidden_{i}": hidden, f"prefill_logits_{i}": logits}
        lengths = np.array([len(prompt) for prompt in tokens.prompts], np.int32)
        steps = [trace.decode(row, lengths + np.int32(s)) for s, row in enumerate(tokens.forced)]
    hidden, logits = zip(*steps, strict=True)
    found |= {"decode_hidden": np.stack(hidden), "decode_logits": np.stack(logits)}
    return found, trace.moved


def _greedy(llm: LLM, tokens: Tokens, count: int) -> dict[str, np.ndarray]:
    """What ``generate`` continues the prompts with, its margins, and the best logits."""
    prompts = [prompt.tolist() for prompt in tokens.prompts]
    completions = generate(
        llm, prompts, max_new_tokens=count, ignore_eos=True, logprobs=2, progress=False
    )
    errors = [completion.error for completion in completions if completion.error]
    if errors:
        raise RuntimeError(f"generate: {errors[0]}")
    found, margins, tops = [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        found.append(completion.token_ids)
        logprobs = completion.logprobs
        assert logprobs is not None
        best = [[logprob for _, logprob in entry.best] for entry in logprobs]
        margins.append([first - second for first, second in best])
        logits = llm.logits([*prompt, *completion.token_ids[:-1]])
        tops.append(logits[len(prompt) - 1 :].max(axis=1))
    return {
        "greedy_tokens": np.array(found, np.int32).T,
        "greedy_margin": np.array(margins, np.float32).T,
        "greedy_top": np.array(tops, np.float32).T,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {MODULE} JOB_FOLDER")
    sys.exit(main(Path(sys.argv[1])))
