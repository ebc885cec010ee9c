"""Static against continuous batching for requests that arrive over time, with random weights.

The same as `deinfer bench serve`, which takes a checkpoint; for machines that have none.

    python -m bench.serve [--requests 128] [--rate 12] [--max-batch 64] [--out FOLDER]
"""

from __future__ import annotations

import argparse

import deinfer_jax
from bench.common import LLAMA_3_8B, write
from deinfer_jax.evaluate.serving import compare, workload


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rate", type=float, default=12.0, help="arrivals a second")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 512))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 512))
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.num_layers)
    parser.add_argument("--name", default="gpu_serve")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    config = LLAMA_3_8B.replace(num_layers=args.layers, windows=())
    context = args.prompt_tokens[1] + args.new_tokens[1]
    with deinfer_jax.load(
        config, max_batch=args.max_batch, max_context=context, prefill_chunk=512
    ) as llm:
        arrivals = workload(
            config.vocab_size,
            requests=args.requests,
            rate=args.rate,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
        )
        result = compare(llm, arrivals)
    write(args.name, {"model": f"llama-3-8b-shaped, {args.layers} layers", **result}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
