"""``deinfer``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status (0 = well, 1 = the request was bad or something is
    missing)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(f"deinfer {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deinfer",
        description="Inference for low-rank decomposed (and dense) language models in JAX.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = _command(
        commands,
        "generate",
        "continue prompts or answer them",
        'deinfer generate model.gguf --chat "What is the capital of France?"',
        _generate,
    )
    generate.add_argument("model", help="a Hugging Face directory or a GGUF file")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)"
    )
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0 = all (default)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 = all (default)")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 = all (default)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--ignore-eos", action="store_true")
    generate.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    generate.add_argument("--max-batch", type=int, metavar="B")
    generate.add_argument("--max-context", type=int, metavar="TOKENS")
    generate.add_argument(
        "--kv-cache", choices=("auto", "full", "latent", "full+latent"), default="auto"
    )
    generate.add_argument("--cache-bytes", type=int, metavar="BYTES")
    generate.add_argument("--page-size", type=int, metavar="TOKENS")
    generate.add_argument("--prefill-chunk", type=int, metavar="TOKENS")
    generate.add_argument("--decode-steps", type=int, metavar="N", help="tokens a dispatch")
    generate.add_argument(
        "--implementation", help="of the kernels (default: the best that applies)"
    )
    generate.add_argument("--n", type=int, default=1, metavar="N", help="samples of each prompt")
    generate.add_argument("--stop", nargs="+", default=(), metavar="TEXT", help="ends the text")
    generate.add_argument("--stop-token-ids", type=int, nargs="+", default=(), metavar="ID")
    generate.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: of each token and the K best"
    )
    generate.add_argument(
        "--stream", action="store_true", help="print the text as it comes (one prompt, one sample)"
    )
    generate.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, with token ids and times"
    )

    decompose = _command(
        commands,
        "decompose",
        "decompose a dense model into low-rank factors",
        "deinfer decompose model.gguf small --keep 0.6 --calibration a.txt b.txt --plot ranks.png",
        _decompose,
    )
    decompose.add_argument("model", help="a dense Hugging Face directory or GGUF file")
    decompose.add_argument("destination", help="the directory to make")
    decompose.add_argument(
        "--keep", type=float, default=0.6, metavar="FRACTION", help="of the parameters (0.6)"
    )
    decompose.add_argument("--method", choices=("fisher", "whitened", "svd"), default="fisher")
    decompose.add_argument("--allocation", choices=("loss", "uniform"), default="loss")
    decompose.add_argument(
        "--ranks", metavar="FILE", help="JSON with ranks by module, in the place of --keep"
    )
    decompose.add_argument("--multiple-of", type=int, default=1, metavar="N", help="of all ranks")
    decompose.add_argument(
        "--groups",
        default="shared",
        metavar="GROUPS",
        help="shared (default), shared-kv, separate, or names: q,k,v+gate,up",
    )
    decompose.add_argument(
        "--calibration",
        nargs="+",
        metavar="TEXT",
        help="text files (default: the model writes its own)",
    )
    decompose.add_argument("--calibration-tokens", type=int, metavar="N", help="8192 if not given")
    decompose.add_argument(
        "--label-samples", type=int, default=1, metavar="N", help="of fisher, a window (1)"
    )
    decompose.add_argument("--seed", type=int, default=0)
    decompose.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    decompose.add_argument(
        "--spectra", metavar="FOLDER", help="keep what was measured, for another --keep"
    )
    decompose.add_argument("--plot", metavar="FILE", help="draw the ranks by layer")
    decompose.add_argument("--json", action="store_true", help="print the report as JSON")

    inspect = _command(
        commands,
        "inspect",
        "describe a checkpoint from its headers",
        "deinfer inspect model.gguf",
        _inspect,
    )
    inspect.add_argument("model", help="a Hugging Face directory or a GGUF file")

    measure = _command(
        commands,
        "perplexity",
        "perplexity of a text file under a model",
        "deinfer perplexity model.gguf text.txt --window 512 --predictions 4088",
        _perplexity,
    )
    measure.add_argument("model", help="a Hugging Face directory or a GGUF file")
    measure.add_argument("text", help="a UTF-8 text file")
    measure.add_argument("--window", type=int, default=1024, metavar="TOKENS")
    measure.add_argument("--stride", type=int, metavar="TOKENS", help="default: the window")
    measure.add_argument("--predictions", type=int, metavar="N", help="stop after N (default: all)")
    measure.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))

    bench = commands.add_parser("bench", help="measurements").add_subparsers(
        dest="bench", required=True, metavar="BENCH"
    )
    serve = _command(
        bench,
        "serve",
        "throughput and latencies of requests that arrive over time",
        "deinfer bench serve model.gguf --requests 128 --rate 2",
        _serve,
    )
    serve.add_argument("model", help="a Hugging Face directory or a GGUF file")
    serve.add_argument("--requests", type=int, default=128, metavar="N")
    serve.add_argument(
        "--rate", type=float, default=float("inf"), metavar="R", help="a second (default: at once)"
    )
    serve.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=(16, 256), metavar=("LEAST", "MOST")
    )
    serve.add_argument(
        "--new-tokens", type=int, nargs=2, default=(16, 256), metavar=("LEAST", "MOST")
    )
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    serve.add_argument("--max-batch", type=int, metavar="B")
    serve.add_argument("--cache-bytes", type=int, metavar="BYTES")
    serve.add_argument("--prefill-chunk", type=int, metavar="TOKENS")
    serve.add_argument("--decode-steps", type=int, metavar="N", help="tokens a dispatch")
    serve.add_argument("--out", metavar="FILE", help="a JSON file for the result")

    _command(
        commands,
        "doctor",
        "versions, devices, flags and a verdict on this machine",
        "deinfer doctor",
        _doctor,
    )
    return parser


def _command(
    commands: Any, name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, description=summary.capitalize() + ".", epilog=f"example: {example}"
    )
    command.set_defaults(run=run)
    return command


def _generate(args: argparse.Namespace) -> int:
    import deinfer_jax

    if args.stream and (len(args.prompts) > 1 or args.n > 1 or args.json):
        raise ValueError("--stream: expected one prompt, one sample and no --json")
    prompts = args.prompts
    if args.chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    names = "dtype max_batch max_context kv_cache cache_bytes page_size prefill_chunk".split()
    names += ["decode_steps", "implementation"]
    sampling: Any = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "n": args.n,
        "stop": args.stop,
        "stop_token_ids": args.stop_token_ids,
        "ignore_eos": args.ignore_eos,
        "logprobs": args.logprobs,
    }
    with deinfer_jax.load(args.model, **{name: getattr(args, name) for name in names}) as llm:
        if args.stream:
            error = None
            for increment in deinfer_jax.generate(llm, prompts, stream=True, **sampling):
                print(increment.text, end="", flush=True)
                error = increment.error
            print()
            return _say_error(args.prompts[0], error)
        completions = deinfer_jax.generate(llm, prompts, **sampling)
    status = 0
    for prompt, completion in zip(args.prompts, completions, strict=True):
        for sample in completion.samples or (completion,):
            if args.json:
                print(json.dumps({"prompt": prompt, **_record(sample)}))
            elif args.chat:
                print(f"> {prompt}\n{sample.text}\n")
            else:
                print(f"{prompt}{sample.text}\n")
            status |= _say_error(prompt, sample.error)
    return status


def _record(sample: Any) -> dict[str, Any]:
    """A completion as JSON values."""
    names = ("text", "token_ids", "finish_reason", "error", "logprobs")
    record = {name: getattr(sample, name) for name in names}
    if sample.logprobs is None:
        del record["logprobs"]
    return record | {"ttft_s": sample.timing.ttft_s, "itl_s": sample.timing.itl_s}


def _say_error(prompt: str, error: str | None) -> int:
    if error is None:
        return 0
    print(f"deinfer generate: {prompt!r}: {error}", file=sys.stderr)
    return 1


def _serve(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax
    from deinfer_jax.evaluate.serving import compare, workload
    from deinfer_jax.machine import write_result

    names = ("dtype", "max_batch", "cache_bytes", "prefill_chunk", "decode_steps")
    context = args.prompt_tokens[1] + args.new_tokens[1]
    options = {name: getattr(args, name) for name in names}
    with deinfer_jax.load(args.model, max_context=context, **options) as llm:
        arrivals = workload(
            llm.config.vocab_size,
            requests=args.requests,
            rate=args.rate,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            seed=args.seed,
        )
        result = compare(llm, arrivals)
    if args.out:
        write_result(Path(args.out), {"model": Path(args.model).name, **result})
    return 0


def _decompose(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax

    if args.plot:
        import matplotlib  # noqa: F401 (its absence is better known before the work than after)

    groups = args.groups
    if "," in groups or "+" in groups:
        groups = [names.split(",") for names in groups.split("+")]
    ranks = None
    if args.ranks:
        ranks = json.loads(Path(args.ranks).read_text(encoding="utf-8"))
        if not isinstance(ranks, dict):
            raise ValueError(f"{args.ranks}: expected ranks by module, got {type(ranks).__name__}")
    report = deinfer_jax.decompose(
        args.model,
        args.destination,
        keep=args.keep,
        method=args.method,
        ranks=ranks,
        allocation=args.allocation,
        multiple_of=args.multiple_of,
        groups=groups,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens,
        label_samples=args.label_samples,
        seed=args.seed,
        dtype=args.dtype,
        spectra=args.spectra,
    )
    print(json.dumps(report.to_json(), indent=1) if args.json else report)
    if args.plot:
        report.plot(args.plot)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    import deinfer_jax

    print(deinfer_jax.inspect(args.model))
    return 0


def _perplexity(args: argparse.Namespace) -> int:
    from pathlib import Path

    import deinfer_jax

    text = Path(args.text).read_text(encoding="utf-8")
    # One window at a time: nothing is decoded, so the cache need not hold more.
    with deinfer_jax.load(
        args.model, dtype=args.dtype, max_batch=1, max_context=max(2, args.window)
    ) as llm:
        result = deinfer_jax.perplexity(
            llm, text, window=args.window, stride=args.stride, predictions=args.predictions
        )
    print(
        f"perplexity {result.value:.4f} ({result.nll:.4f} nats a token, {result.predictions} "
        f"predictions in {result.windows} windows of {args.window})"
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from deinfer_jax.doctor import report

    text, well = report()
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
