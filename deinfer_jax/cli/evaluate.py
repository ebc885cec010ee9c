"""``deinfer perplexity`` and ``deinfer bench serve``."""

from __future__ import annotations

import argparse
from typing import Any

from deinfer_jax.cli.options import MODEL, add_command, add_load_options, load_options

__all__ = ["add_bench", "add_perplexity"]

SERVE_OPTIONS = ("dtype", "max_batch", "kv_cache", "cache_bytes", "page_size")
SERVE_OPTIONS += ("prefill_chunk", "decode_steps")


def add_perplexity(commands: Any) -> None:
    """Adds the command."""
    measure = add_command(
        commands,
        "perplexity",
        "perplexity of a text file under a model",
        "deinfer perplexity model.gguf text.txt --window 512 --predictions 4088",
        _perplexity,
    )
    add = measure.add_argument
    add("model", help=MODEL)
    add("text", help="a UTF-8 text file")
    add("--window", type=int, default=1024, metavar="TOKENS", help="read together (1024)")
    add("--stride", type=int, metavar="TOKENS", help="default: the window")
    add("--predictions", type=int, metavar="N", help="stop after N (default: all)")
    add_load_options(measure, "dtype", "kv_cache")


def _perplexity(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax

    text = Path(args.text).read_text(encoding="utf-8")
    # One window at a time: nothing is decoded, so the cache need not hold more.
    context = max(2, args.window)
    with deinfer_jax.load(
        args.model, max_batch=1, max_context=context, **load_options(args)
    ) as llm:
        result = deinfer_jax.perplexity(
            llm, text, window=args.window, stride=args.stride, predictions=args.predictions
        )
    print(
        f"perplexity {result.value:.4f} ({result.nll:.4f} nats a token, {result.predictions} "
        f"predictions in {result.windows} windows of {args.window})"
    )
    return 0


def add_bench(commands: Any) -> None:
    """Adds the command and its own, the measurements."""
    bench = commands.add_parser("bench", help="measurements")
    _add_serve(bench.add_subparsers(dest="bench", required=True, metavar="BENCH"))


def _add_serve(benches: Any) -> None:
    serve = add_command(
        benches,
        "serve",
        "throughput and latencies of requests that arrive over time",
        "deinfer bench serve model.gguf --requests 128 --rate 2",
        _serve,
    )
    add = serve.add_argument
    add("model", help=MODEL)
    add("--requests", type=int, default=128, metavar="N", help="how many (128)")
    add("--rate", type=float, default=float("inf"), metavar="R", help="a second (all at once)")
    add(
        "--prompt-tokens",
        type=int,
        nargs=2,
        default=(16, 256),
        metavar=("LEAST", "MOST"),
        help="of a request (16 256)",
    )
    add(
        "--new-tokens",
        type=int,
        nargs=2,
        default=(16, 256),
        metavar=("LEAST", "MOST"),
        help="of a request (16 256)",
    )
    add("--seed", type=int, default=0, help="of the workload (0)")
    add("--out", metavar="FILE", help="a JSON file for the result")
    add_load_options(serve, *SERVE_OPTIONS)


def _serve(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax
    from deinfer_jax.checkpoint import open_checkpoint
    from deinfer_jax.evaluate.serving import compare, workload
    from deinfer_jax.machine import write_result

    context = args.prompt_tokens[1] + args.new_tokens[1]
    arrivals = workload(  # before the model is loaded, as it checks its arguments
        open_checkpoint(Path(args.model)).config.vocab_size,
        requests=args.requests,
        rate=args.rate,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        seed=args.seed,
    )
    with deinfer_jax.load(args.model, max_context=context, **load_options(args)) as llm:
        result = compare(llm, arrivals)
    if args.out:
        write_result(Path(args.out), {"model": Path(args.model).name, **result})
    return 0
