"""``deinfer``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main"]


DTYPES = ("float32", "bfloat16", "float16")
KV_CACHES = ("auto", "full", "latent", "full+latent")
MODEL = "a Hugging Face directory or a GGUF file"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status (0 = well, 1 = the request was bad or something is
    missing, 130 = interrupted)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.program}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deinfer",
        description="Inference for low-rank decomposed (and dense) language models in JAX.",
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_decompose(commands)
    inspect = _command(
        commands,
        "inspect",
        "describe a checkpoint from its headers",
        "deinfer inspect model.gguf",
        _inspect,
    )
    inspect.add_argument("model", help=MODEL)
    _add_perplexity(commands)
    _add_crosscheck(commands)
    bench = commands.add_parser("bench", help="measurements")
    _add_serve(bench.add_subparsers(dest="bench", required=True, metavar="BENCH"))
    _command(
        commands,
        "doctor",
        "versions, devices, flags and a verdict on this machine",
        "deinfer doctor",
        _doctor,
    )
    return parser


class _Version(argparse.Action):
    """Prints it; the library, with jax, is imported only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import deinfer_jax

        print(f"deinfer-jax {deinfer_jax.__version__}")
        parser.exit()


def _add_generate(commands: Any) -> None:
    generate = _command(
        commands,
        "generate",
        "continue prompts or answer them",
        'deinfer generate model.gguf --chat "What is the capital of France?"',
        _generate,
    )
    add = generate.add_argument
    add("model", help=MODEL)
    add("prompts", nargs="+", metavar="PROMPT", help="text, continued as it is")
    add("--chat", action="store_true", help="each prompt is a user's message")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of each (256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (0)")
    add("--top-k", type=int, default=0, metavar="K", help="the most likely tokens, 0 = all (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="their mass, 1 = all (1)")
    add("--min-p", type=float, default=0.0, metavar="P", help="relative to the first, 0 = all (0)")
    add("--seed", type=int, default=0, help="of what is drawn (0)")
    add("--n", type=int, default=1, metavar="N", help="samples of each prompt (1)")
    add("--ignore-eos", action="store_true", help="go on past the model's own end")
    add("--stop", action="append", metavar="TEXT", help="ends the text; can be repeated")
    add(
        "--stop-token-ids",
        action="append",
        type=int,
        metavar="ID",
        help="ends a continuation; can be repeated",
    )
    add("--logprobs", type=int, metavar="K", help="with --json: of each token and the K best")
    add("--stream", action="store_true", help="print text as it comes (one prompt, one sample)")
    add("--json", action="store_true", help="one JSON object a sample, with token ids and times")
    _add_load_options(generate, "dtype", "max_batch", "max_context", "kv_cache", "cache_bytes")
    _add_load_options(generate, "page_size", "prefill_chunk", "decode_steps", "implementation")


def _add_decompose(commands: Any) -> None:
    decompose = _command(
        commands,
        "decompose",
        "decompose a dense model into low-rank factors",
        "deinfer decompose model.gguf small --keep 0.8 --calibration a.txt b.txt --plot ranks.png",
        _decompose,
    )
    add = decompose.add_argument
    add("model", help="a dense Hugging Face directory or GGUF file")
    add("destination", help="the directory to make")
    add("--keep", type=float, default=0.6, metavar="FRACTION", help="of the parameters (0.6)")
    add(
        "--method",
        choices=("fisher", "whitened", "svd"),
        default="fisher",
        help="what is lost least: loss (fisher, default), output or weights",
    )
    add(
        "--allocation",
        choices=("loss", "uniform"),
        default="loss",
        help="of ranks: where they save most loss (default), or the same keep everywhere",
    )
    add("--ranks", metavar="FILE", help="JSON with ranks by module, in the place of --keep")
    add("--multiple-of", type=int, default=1, metavar="N", help="of all ranks (1)")
    add(
        "--groups",
        default="shared",
        metavar="GROUPS",
        help="shared (default), shared-kv, separate, or names: q,k,v+gate,up",
    )
    add("--calibration", nargs="+", metavar="TEXT", help="files (default: the model's own text)")
    add("--calibration-tokens", type=int, metavar="N", help="8192 if not given")
    add("--label-samples", type=int, default=1, metavar="N", help="of fisher, a window (1)")
    add("--seed", type=int, default=0, help="of all that is drawn (0)")
    add("--dtype", choices=DTYPES, help="of the result (default: the checkpoint's)")
    add("--spectra", metavar="FOLDER", help="keep what was measured, for another --keep")
    add("--plot", metavar="FILE", help="draw the ranks by layer")
    add("--json", action="store_true", help="print the report as JSON")


def _add_perplexity(commands: Any) -> None:
    measure = _command(
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
    _add_load_options(measure, "dtype", "kv_cache")


def _add_serve(benches: Any) -> None:
    serve = _command(
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
    _add_load_options(serve, *SERVE_OPTIONS)


SERVE_OPTIONS = ("dtype", "max_batch", "kv_cache", "cache_bytes", "page_size")
SERVE_OPTIONS += ("prefill_chunk", "decode_steps")
LOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": dict(choices=DTYPES, help="default: the checkpoint's on a GPU, float32 on a CPU"),
    "max_batch": dict(type=int, metavar="B", help="sequences that decode together"),
    "max_context": dict(type=int, metavar="TOKENS", help="of a sequence, prompt and continuation"),
    "kv_cache": dict(choices=KV_CACHES, default="auto", help="what is cached of a token (auto)"),
    "cache_bytes": dict(type=int, metavar="BYTES", help="of the cache"),
    "page_size": dict(type=int, metavar="TOKENS", help="of the cache: 16, 32, 64 or 128"),
    "prefill_chunk": dict(type=int, metavar="TOKENS", help="of a prompt, in one step"),
    "decode_steps": dict(type=int, metavar="N", help="tokens a dispatch"),
    "implementation": dict(help="of the kernels (default: the best that applies)"),
}


def _add_load_options(command: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        command.add_argument(f"--{name.replace('_', '-')}", **LOAD_OPTIONS[name])


def _load_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in LOAD_OPTIONS if hasattr(args, name)}


def _add_crosscheck(commands: Any) -> None:
    check = _command(
        commands,
        "crosscheck",
        "compare with the PyTorch reference, layer by layer; exit status 1 past the tolerance",
        "deinfer crosscheck small --strategy naive low_rank --kv-cache full latent --ranks 2",
        _crosscheck,
    )
    check.add_argument(
        "model", nargs="?", help="a Hugging Face directory, dense or decomposed (or --random)"
    )
    check.add_argument(
        "--random",
        metavar="VARIANT",
        help="a tiny random model: gqa, mha, mqa, nine-three-heads, tied, biases, gelu, "
        "rope-linear, rope-llama3, rope-yarn, rope-dynamic, rope-dynamic-longer, rope-divisors, "
        "mistral-window, mixed-windows, qwen2, qwen2-windows or qwen3, and "
        "after a slash how it is decomposed: separate (default), shared, shared-kv, mixed or dense",
    )
    check.add_argument(
        "--strategy",
        nargs="+",
        choices=("dense", "naive", "low_rank"),
        default=("low_rank",),
        help="of PyTorch, one or several (default: low_rank)",
    )
    check.add_argument(
        "--ranks", type=int, nargs="+", default=(1,), metavar="N", help="PyTorch processes (1)"
    )
    check.add_argument(
        "--kv-cache",
        nargs="+",
        choices=("full", "latent", "full+latent"),
        default=("full",),
        help="of both sides, one or several (default: full)",
    )
    check.add_argument("--dtype", choices=DTYPES, help="of both sides (default: as load has it)")
    check.add_argument("--device", choices=("cpu", "cuda"), help="default: the one JAX finds")
    check.add_argument(
        "--cuda-graphs", choices=("on", "off", "both"), default="off", help="in PyTorch's decode"
    )
    check.add_argument(
        "--perturb",
        metavar="NAME",
        help="break one thing in PyTorch, which must be noticed: rope-theta, norm-eps, one-weight, "
        "slice-offset, head-order, position, page or residual",
    )
    check.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
    check.add_argument(
        "--no-float64", action="store_true", help="ask no third opinion where float32 is off"
    )
    check.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of each process (600)"
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--out", metavar="FILE", help="a JSON file for the report")


def _command(
    commands: Any, name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, description=summary.capitalize() + ".", epilog=f"example: {example}"
    )
    command.set_defaults(run=run, program=command.prog)
    return command


def _generate(args: argparse.Namespace) -> int:
    import deinfer_jax

    if args.stream and (len(args.prompts) > 1 or args.n > 1 or args.json):
        raise ValueError("--stream: expected one prompt, one sample and no --json")
    prompts = args.prompts
    if args.chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
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
    with deinfer_jax.load(args.model, **_load_options(args)) as llm:
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
    with deinfer_jax.load(args.model, max_context=context, **_load_options(args)) as llm:
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
    context = max(2, args.window)
    with deinfer_jax.load(
        args.model, max_batch=1, max_context=context, **_load_options(args)
    ) as llm:
        result = deinfer_jax.perplexity(
            llm, text, window=args.window, stride=args.stride, predictions=args.predictions
        )
    print(
        f"perplexity {result.value:.4f} ({result.nll:.4f} nats a token, {result.predictions} "
        f"predictions in {result.windows} windows of {args.window})"
    )
    return 0


def _crosscheck(args: argparse.Namespace) -> int:
    import signal
    from pathlib import Path

    import deinfer_jax

    # What ends this process has to end the sides, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = deinfer_jax.crosscheck(
        args.model,
        random=args.random,
        strategy=args.strategy,
        ranks=args.ranks,
        kv_cache=args.kv_cache,
        dtype=args.dtype,
        device=args.device,
        cuda_graphs={"on": True, "off": False, "both": (False, True)}[args.cuda_graphs],
        perturb=args.perturb,
        seed=args.seed,
        third_opinion=not args.no_float64,
        timeout=args.timeout,
    )
    found = json.dumps(report.to_json(), indent=1)
    print(found if args.json else report)
    if args.out:
        Path(args.out).write_text(found + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _doctor(args: argparse.Namespace) -> int:
    from deinfer_jax.doctor import report

    text, well = report()
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
