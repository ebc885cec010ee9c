"""What do the cache kinds cost a decomposed model on a GPU?

A Llama-3-8B-shaped model with random bfloat16 weights: dense, and decomposed with every kind of
cache, at several batches and contexts. A row gives the time of a decode step, its ratio to the
dense model's, the share of the bandwidth limit (see ``bench.gpu_generate``), bytes a cached token
and how many sequences would fit. Before that, greedy tokens of a small float32 model must be the
same in all kinds on this device.

    python -m bench.gpu_latent --out FOLDER
    JAX_PLATFORMS=cpu python -m bench.gpu_latent --layers 1 --tiny --out FOLDER   # to try it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import deinfer_jax
from bench.common import LLAMA_3_8B, write
from bench.gpu_generate import measure
from deinfer_jax import LowRank, ModelConfig, Slice

KINDS = ("full", "latent", "full+latent")
# The ranks of the design's "8B": keep 0.6, rounded.
RANKS = {"q": 1280, "k": 512, "v": 512, "o": 1280, "gate": 1920, "up": 1920, "down": 1920}
SHAPES = ((1, 512), (8, 512), (64, 512), (8, 4096))  # batch, tokens of context
SMALL = ModelConfig(
    vocab_size=499,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
)


def decomposed(config: ModelConfig, ranks: Mapping[str, int], groups: list[str]) -> ModelConfig:
    """Every linear of the blocks low-rank; a group such as ``"k+v"`` shares one first factor, of
    the rank of its first member."""
    blocks = {"self_attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
    slices = []
    for layer in range(config.num_layers):
        for block, members in blocks.items():
            parent = f"model.layers.{layer}.{block}"
            for short in members:
                group = next((g.split("+") for g in groups if short in g.split("+")), [short])
                name = group[0] + "_proj" if len(group) == 1 else "_".join(group)
                piece = Slice(v=f"{parent}.{name}.v.weight", offset=0, rank=ranks[group[0]])
                slices.append((f"{parent}.{short}_proj", piece))
    return config.replace(low_rank=LowRank(tuple(slices)))


def check_kinds_agree() -> None:
    """Raises AssertionError unless greedy tokens are the same in all kinds, in float32."""
    ranks = dict(zip(RANKS, (19, 13, 9, 19, 30, 30, 30), strict=True))
    for groups in ([], ["k+v"], ["q+k+v", "gate+up"]):
        config = decomposed(SMALL, ranks, groups)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in (1, 63, 65, 200)]
        found = {}
        for kind in KINDS:
            with deinfer_jax.load(
                config, kv_cache=kind, dtype="float32", max_batch=4, prefill_chunk=64
            ) as llm:
                # Random weights are small; larger ones make attention sharp and tokens varied.
                llm.runner.weights = jax.tree.map(
                    lambda w: 6 * w if w.ndim > 1 else w, llm.runner.weights
                )
                done = deinfer_jax.generate(llm, prompts, max_new_tokens=40, ignore_eos=True)
            found[kind] = [completion.token_ids for completion in done]
        assert found["latent"] == found["full+latent"] == found["full"], (groups, found)
        distinct = {token for ids in found["full"] for token in ids}
        print(f"greedy tokens agree, groups {groups}: {len(distinct)} distinct", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shapes", nargs="+", help="batchxcontext, e.g. 64x512")
    parser.add_argument("--tokens", type=int, default=64, help="decoded, a multiple of 8")
    parser.add_argument(
        "--shared-kv", type=int, metavar="RANK", help="{k,v} and {gate,up} share, of this rank"
    )
    parser.add_argument("--shared-gate-up", type=int, default=2880, metavar="RANK")
    parser.add_argument("--kinds", nargs="+", default=["dense", *KINDS], choices=["dense", *KINDS])
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for each kind")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try it on a CPU")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--name", default="gpu_latent")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()

    if not args.skip_check:
        check_kinds_agree()
    shapes = [(2, 24)] if args.tiny else list(SHAPES)
    if args.shapes:
        pairs = [shape.split("x") for shape in args.shapes]
        shapes = [(int(batch), int(context)) for batch, context in pairs]
    config = (SMALL if args.tiny else LLAMA_3_8B).replace(num_layers=args.layers, windows=())
    ranks, groups = dict(RANKS), []
    if args.shared_kv:
        ranks |= {"k": args.shared_kv, "gate": args.shared_gate_up}
        groups = ["k+v", "gate+up"]
    if args.tiny:
        ranks = {short: rank // 40 for short, rank in ranks.items()}
    low_rank = decomposed(config, ranks, groups)

    rows: list[dict[str, Any]] = []
    dense: dict[tuple[int, int], float] = {}
    options = {
        "max_batch": max(batch for batch, _ in shapes),
        "max_context": max(context for _, context in shapes) + args.tokens + 1,
        "dtype": "bfloat16",
        "prefix_sharing": False,  # the prompts are the same every time
    }
    for kind in args.kinds:
        started = time.perf_counter()
        source, cache = (config, "full") if kind == "dense" else (low_rank, kind)
        with deinfer_jax.load(source, kv_cache=cache, **options) as llm:
            print(f"{kind}: {llm.memory_plan().describe()}", flush=True)
            for shape in shapes:
                if time.perf_counter() - started > args.limit:
                    print(f"  {kind}: the time is up before {shape}", flush=True)
                    break
                row = {"kind": kind, **measure(llm, *shape, tokens=args.tokens)}
                if kind == "dense":
                    dense[shape] = row["ms_per_step"]
                ratio = row["ms_per_step"] / dense[shape] if shape in dense else None
                row["ratio_to_dense"] = ratio
                row["cache_bytes_per_token"] = llm.cache_layout.bytes_per_token
                row["largest_batch"] = llm.memory_plan().largest_batch
                ratio_text = "" if ratio is None else f"{ratio:.3f} of dense, "
                print(
                    f"    {ratio_text}{row['cache_bytes_per_token']} bytes a token, "
                    f"{row['largest_batch']} sequences of {options['max_context']} tokens fit",
                    flush=True,
                )
                rows.append(row)
                setting = {"layers": args.layers, "ranks": ranks, "groups": groups, **options}
                write(args.name, {"setting": setting, "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
