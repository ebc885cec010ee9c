"""How fast does generate decode on a GPU, and what share of the memory bandwidth is that?

SmolLM2-135M (where its GGUF file is at hand) and a Llama-3-8B-shaped model with random weights,
both bfloat16. Decode time is the difference between generating N + 1 tokens and 1 token. The limit
counts the bytes a step must read, weights once and every sequence's cache, at the device's read
bandwidth, which is a constant here and not measured by this script.

    python -m bench.gpu_generate --out FOLDER
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import deinfer_jax
from bench.common import LLAMA_3_8B, seconds, write

REPEATS = 3  # after one call of each length to compile and warm up
READ_BANDWIDTH = {"NVIDIA H200": 4.42e12}  # bytes/s, the project's design figure


def measure(llm: deinfer_jax.LLM, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
    """One row: decode time of ``batch`` sequences, from ``prompt`` tokens of context on."""
    rng = np.random.default_rng(batch)
    prompts = rng.integers(100, llm.config.vocab_size - 100, (batch, prompt)).tolist()

    def run(count: int) -> None:
        deinfer_jax.generate(llm, prompts, max_new_tokens=count, ignore_eos=True)

    compiling = seconds(lambda: (run(tokens + 1), run(1)))
    long = min(seconds(lambda: run(tokens + 1)) for _ in range(REPEATS))
    short = min(seconds(lambda: run(1)) for _ in range(REPEATS))
    step = (long - short) / tokens

    plan, layout = llm.memory_plan(), llm.cache_layout
    table = llm.config.vocab_size * llm.config.hidden_size * 2
    read = plan.weights - (0 if llm.config.tie_embeddings else table)  # one row of it a sequence
    read += batch * (prompt + tokens // 2) * layout.bytes_per_token
    bandwidth = READ_BANDWIDTH.get(jax.devices()[0].device_kind)
    row = {
        "batch": batch,
        "prompt_tokens": prompt,
        "decoded_tokens": tokens,
        "first_call_s": compiling,
        "ms_per_step": 1e3 * step,
        "tokens_per_s": batch / step,
        "prefill_tokens_per_s": batch * prompt / short,
        "bytes_per_step": read,
        "share_of_bandwidth": None if bandwidth is None else read / step / bandwidth,
    }
    share = "" if bandwidth is None else f", {100 * row['share_of_bandwidth']:.0f} % of the limit"
    print(
        f"  batch {batch:3d}: {row['ms_per_step']:.2f} ms/step, "
        f"{row['tokens_per_s']:.0f} tokens/s{share}; "
        f"prefill {row['prefill_tokens_per_s']:.0f} tokens/s; first call {compiling:.0f} s",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smollm2", type=Path, help="the GGUF file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B-shaped model")
    parser.add_argument("--skip-8b", action="store_true")
    parser.add_argument("--name", default="gpu_generate")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()

    models: dict[str, Any] = {}
    if not args.skip_8b:
        models["llama-3-8b-shaped, random weights"] = LLAMA_3_8B.replace(
            num_layers=args.layers, windows=()
        )
    if args.smollm2:
        models["SmolLM2-135M-Instruct"] = args.smollm2
    results = {}
    for name, source in models.items():
        started = time.perf_counter()
        with deinfer_jax.load(
            source,
            max_context=2048,
            max_batch=max(args.batches),
            prefix_sharing=False,  # the prompts are the same every time
        ) as llm:
            loading = time.perf_counter() - started
            print(f"{name}: loaded in {loading:.1f} s; {llm.memory_plan().describe()}", flush=True)
            rows = [measure(llm, batch, args.prompt, args.tokens) for batch in args.batches]
            print(f"  {llm.memory_plan().describe()}", flush=True)
            results[name] = {"load_s": loading, "rows": rows}
        write(args.name, {"dtype": "bfloat16", "repeats": REPEATS, "results": results}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
