"""How much of SmolLM2's quality do the methods keep, at equal size?

Decomposes all linears, calibrated on 8,192 tokens in 16 windows of 512: the first of WikiText-2's
validation text (as figures elsewhere are taken), windows spread over it, windows spread over it and
over novels, or the model's own text. Measures perplexity over the first 4,088 predictions (windows
of 512, no BOS) of WikiText-2's test text and of other novels. `fisher` draws labels, so it runs
with three seeds; the median counts. `--trials` runs what was tried and is not the default, with one
seed. The texts are not part of this repository.

    python -m bench.quality --data FOLDER [--model FILE.gguf] [--keep 0.8 0.6] [--only NAME …]
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import deinfer_jax
from bench.common import write
from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.demo import smollm2_path

WIKITEXT, NOVELS = "wikitext2_valid.txt", "classic_books_calib.txt"
TESTS = {"wikitext": "wikitext2_test.txt", "novels": "classic_books_valid.txt"}
PREDICTIONS, WINDOW = 4088, 512

TOKENS = 8192
FIRST = "the first tokens of WikiText"  # in the place of a list of texts, over which windows spread
UNIFORM = {"allocation": "uniform", "groups": "separate"}
SHARED = {"allocation": "uniform", "groups": "shared"}
SEEDS = [0, 1, 2]

# name: arguments of decompose, calibration (None = the model's own text, or none for svd), seeds
Case = tuple[dict[str, Any], list[str] | str | None, list[int]]
CASES: dict[str, Case] = {
    "svd, uniform, separate": ({"method": "svd", **UNIFORM}, None, [0]),
    "whitened, uniform, separate": ({"method": "whitened", **UNIFORM}, FIRST, [0]),
    "whitened, uniform, shared": ({"method": "whitened", **SHARED}, FIRST, [0]),
    "fisher, uniform, shared": (SHARED, FIRST, [0]),
    "fisher, by loss, shared": ({}, FIRST, SEEDS),
    "fisher, by loss, shared, spread": ({}, [WIKITEXT], [0]),
    "fisher, by loss, shared, mixed": ({}, [WIKITEXT, NOVELS], SEEDS),
    "fisher, by loss, shared, own text": ({}, None, [0]),
}
# What was tried and is not the default: arguments of decompose on mixed text, and constants of its
# modules. One seed.
TRIALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2 label sequences a window": ({"label_samples": 2}, {}),
    "4 label sequences a window": ({"label_samples": 4}, {}),
    "32,768 tokens": ({"calibration_tokens": 4 * TOKENS}, {}),
    "damping of inputs 1e-2": ({}, {"methods.INPUT_DAMPING": 1e-2}),
    "damping of gradients 1e-1": ({}, {"methods.GRADIENT_DAMPING": 1e-1}),
    "damping of gradients 1e-3": ({}, {"methods.GRADIENT_DAMPING": 1e-3}),
    "{k,v} share, q apart": ({"groups": "shared-kv"}, {}),
    "nothing shared": ({"groups": "separate"}, {}),
}


def calibration(case: list[str] | str | None, data: Path, model: Path) -> Any:
    """What ``decompose`` is given."""
    if case is None or case != FIRST:
        return case and [data / text for text in case]
    text = (data / WIKITEXT).read_text(encoding="utf-8")
    ids = open_checkpoint(model).tokenizer()(text, add_special_tokens=False, verbose=False)
    return np.asarray(ids["input_ids"][:TOKENS]).reshape(-1, WINDOW)


def evaluate(model: Path, texts: dict[str, str]) -> dict[str, float]:
    """Perplexity on each text."""
    with deinfer_jax.load(model, dtype="float32", max_batch=1, max_context=WINDOW) as llm:
        return {
            name: deinfer_jax.perplexity(
                llm, text, window=WINDOW, predictions=PREDICTIONS, progress=False
            ).value
            for name, text in texts.items()
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--model", type=Path, help="the GGUF file (default: of the package)")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.8, 0.6])
    parser.add_argument("--only", nargs="+", choices=[*CASES, *TRIALS], metavar="CASE")
    parser.add_argument("--trials", action="store_true", help="what is not the default, instead")
    parser.add_argument("--seeds", type=int, help="at most so many label seeds")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--name", default="quality")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    model = args.model or smollm2_path()
    texts = {name: (args.data / file).read_text(encoding="utf-8") for name, file in TESTS.items()}

    started = time.perf_counter()
    dense = evaluate(model, texts)
    print(f"dense: {dense['wikitext']:.2f} / {dense['novels']:.2f} (WikiText / novels)", flush=True)
    rows: list[dict[str, Any]] = []
    result = {"predictions": PREDICTIONS, "window": WINDOW, "dense": dense, "rows": rows}
    cases: dict[str, Case] = CASES
    if args.trials:
        cases = {name: (options, [WIKITEXT, NOVELS], [0]) for name, (options, _) in TRIALS.items()}
    if unknown := set(args.only or cases) - set(cases):
        parser.error(f"--only: expected one of {', '.join(cases)}, got {', '.join(unknown)}")
    for name in args.only or cases:
        options, given, seeds = cases[name]
        constants = TRIALS[name][1] if args.trials else {}
        found: dict[float, list[dict[str, Any]]] = {keep: [] for keep in args.keep}
        for seed in seeds[: args.seeds]:
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                for constant, value in constants.items():
                    module, attribute = constant.split(".")
                    module = importlib.import_module(f"deinfer_jax.decompose.{module}")
                    stack.enter_context(mock.patch.object(module, attribute, value))
                for keep in args.keep:
                    if time.perf_counter() - started > args.limit:
                        print(f"out of time: {name}, keep {keep}, seed {seed} left out", flush=True)
                        continue
                    dst = Path(folder) / f"{keep}"
                    begun = time.perf_counter()
                    report = deinfer_jax.decompose(
                        model,
                        dst,
                        keep=keep,
                        calibration=calibration(given, args.data, model),
                        seed=seed,
                        dtype="float32",
                        spectra=Path(folder) / "spectra",
                        progress=False,
                        **options,
                    )
                    taken = time.perf_counter() - begun
                    values = evaluate(dst, texts)
                    row = {"seed": seed, "keep_reached": report.keep, "seconds": taken, **values}
                    found[keep].append(row | {"steps_s": report.seconds, "loss": report.loss})
                    print(
                        f"{name}, keep {keep}, seed {seed}: {values['wikitext']:.2f} / "
                        f"{values['novels']:.2f} ({taken:.0f} s)",
                        flush=True,
                    )
        for keep, some in found.items():
            if not some:
                continue
            median = {text: statistics.median(row[text] for row in some) for text in TESTS}
            about = {"case": name, "options": options, "constants": constants, "keep": keep}
            rows.append({**about, "median": median, "runs": some})
        write(args.name, result, args.out)
    print(table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """Markdown: a line a case, perplexity on WikiText / novels by keep."""
    keeps = sorted({row["keep"] for row in result["rows"]}, reverse=True)
    lines = ["| case | " + " | ".join(f"keep {keep}" for keep in keeps) + " |"]
    lines.append("|---" * (len(keeps) + 1) + "|")
    for name in dict.fromkeys(row["case"] for row in result["rows"]):
        cells = {row["keep"]: row["median"] for row in result["rows"] if row["case"] == name}
        texts = [f"{cells[k]['wikitext']:.1f} / {cells[k]['novels']:.1f}" for k in keeps]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
