"""``deinfer generate``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from deinfer_jax.cli.options import MODEL, add_command, add_load_options, load_options

__all__ = ["add_generate"]


def add_generate(commands: Any) -> None:
    """Adds the command."""
    generate = add_command(
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
    add_load_options(generate, "dtype", "max_batch", "max_context", "kv_cache", "cache_bytes")
    add_load_options(generate, "page_size", "prefill_chunk", "decode_steps", "implementation")
    add_load_options(generate, "strategy", "tensor_parallel")


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
    with deinfer_jax.load(args.model, **load_options(args)) as llm:
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
