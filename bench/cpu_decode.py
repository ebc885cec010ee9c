"""Does generate decode faster than transformers on a CPU?

SmolLM2-135M, float32, the same weights, prompts and threads. A round times both, one after the
other; decode time is the difference between generating N + 1 tokens and 1 token, so prefill is
excluded on both sides. Best of five rounds.

    python -m bench.cpu_decode
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import deinfer_jax
from bench.common import seconds, write
from deinfer_jax.checkpoint.source import Checkpoint, open_checkpoint
from deinfer_jax.demo import smollm2_path

BARS = {1: 1.0, 8: 1.5}  # batch: how much faster we mean to be


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' Llama with the checkpoint's weights, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    model = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(np.array(array)) for name, array in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens a sequence")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()

    import torch

    # XLA's CPU client takes every core that the process may use; so does torch here.
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(smollm2_path())
    theirs = transformers_model(checkpoint)
    rows = []
    with deinfer_jax.load(smollm2_path(), max_context=256, prefix_sharing=False) as llm:
        for batch, bar in BARS.items():
            prompts = np.random.default_rng(batch).integers(100, 40000, (batch, args.prompt))
            ids = torch.from_numpy(prompts)

            def ours(count: int, prompts: Any = prompts) -> list[list[int]]:
                done = deinfer_jax.generate(
                    llm, prompts.tolist(), max_new_tokens=count, ignore_eos=True
                )
                return [list(completion.token_ids) for completion in done]

            def transformers(count: int, ids: Any = ids) -> list[list[int]]:
                done = theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
                return done[:, ids.shape[1] :].tolist()

            same = ours(args.tokens + 1) == transformers(args.tokens + 1)  # and warms both up
            ours(1)
            transformers(1)
            runs = {"deinfer_jax": ours, "transformers": transformers}
            long, short = dict.fromkeys(runs, math.inf), dict.fromkeys(runs, math.inf)
            for turn in range(args.rounds):
                for name in sorted(runs, reverse=turn % 2 == 1):  # who goes first alternates
                    long[name] = min(long[name], seconds(partial(runs[name], args.tokens + 1)))
                    short[name] = min(short[name], seconds(partial(runs[name], 1)))
            best = {name: (long[name] - short[name]) / args.tokens for name in runs}
            ratio = best["transformers"] / best["deinfer_jax"]
            row = {
                "batch": batch,
                "ms_per_step": {name: 1e3 * step for name, step in best.items()},
                "tokens_per_s": {name: batch / step for name, step in best.items()},
                "speedup": ratio,
                "bar": bar,
                "same_tokens": same,
            }
            rows.append(row)
            print(
                f"batch {batch}: deinfer_jax {row['ms_per_step']['deinfer_jax']:.1f} ms/step, "
                f"transformers {row['ms_per_step']['transformers']:.1f} ms/step, "
                f"{ratio:.2f} times as fast (bar {bar}), "
                f"{'same' if same else 'DIFFERENT'} tokens",
                flush=True,
            )
    settings = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "threads": threads,
        "warm_up": "one call of each length on each side",
    }
    sizes = {"prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds}
    write("cpu_decode", {**settings, **sizes, "rows": rows}, args.out)
    return 0 if all(row["speedup"] >= row["bar"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
