"""How fast does the PyTorch reference decode? A reference too slow to be taken seriously proves
nothing.

Layers of Llama-3-8B shape, dense and with the ranks of keep 0.6, rounded up and true; final norm,
head 128256 × 4096 and argmax; on one GPU, with random weights; eager and as a CUDA graph, beside
the time that the memory bandwidth allows. Of an eager step also what its kernels are, and where
its time goes.

    python -m bench.torch_decode [--layers 8] [--batch 64] [--context 512] [--check]
    python -m bench.torch_decode --small --device cpu --check      # tries this file
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from bench.common import write
from reference_torch import Group, Model, Session
from reference_torch.config import Config, Slice
from reference_torch.strategies import get_strategy


class Sizes(NamedTuple):
    """Of a model, and of its ranks of keep 0.6, as they are and rounded up."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    true: tuple[int, ...]
    rounded: tuple[int, ...]


SHORTS = ("q", "k", "v", "o", "gate", "up", "down")
LLAMA_8B = Sizes(
    *(128256, 4096, 14336, 32, 8, 128),
    true=(1228, 491, 491, 1228, 1911, 1911, 1911),
    rounded=(1280, 512, 512, 1280, 1920, 1920, 1920),
)
SMALL = Sizes(
    *(512, 256, 448, 8, 2, 32),
    true=(77, 31, 31, 77, 119, 119, 119),
    rounded=(80, 32, 32, 80, 120, 120, 120),
)
READ_BANDWIDTH = 4.42e12  # bytes a second of an H200, taken as given
WARM, MEASURED = 8, 50
KINDS = {  # of kernels, by names; the first that fits
    "attention": r"attention|sdpa|fmha|flash",
    "products": r"gemm|gemv|nvjet|cublas|splitk|aten::(mm|addmm|bmm)$",
    "gather": r"gather|index_?select",
}
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHECKED = 4, 37, 6  # sequences, tokens of each prompt, and after it
CLOSE = 0.02  # of the norm, in bfloat16


def config_of(sizes: Sizes, layers: int, ranks: tuple[int, ...] | None) -> Config:
    def module(layer: int, short: str) -> str:
        block = "mlp" if short in ("gate", "up", "down") else "self_attn"
        return f"model.layers.{layer}.{block}.{short}_proj"

    slices = {
        module(layer, short): Slice(f"{module(layer, short)}.v.weight", 0, rank)
        for layer in range(layers)
        for short, rank in zip(SHORTS, ranks or (), strict=False)
    }
    return Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        layers=layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        activation="silu",
        eps=1e-5,
        tied=True,
        windows=(None,) * layers,
        rope={"rope_type": "default", "rope_theta": 500000.0},
        max_position=8192,
        dtype="bfloat16",
        slices=slices,
    )


class Random:
    """Weights of any name, made on the device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __contains__(self, name: str) -> bool:
        return not name.endswith((".bias", "_norm.weight"))

    def read(self, name: str, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16) * 0.02


def milliseconds(run: Callable[[], Any], device: str) -> list[float]:
    """Of each call, on the device."""
    for _ in range(WARM):
        run()
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(MEASURED):
            run()
            times.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def profile(run: Callable[[], Any], device: str) -> dict[str, Any]:
    """The kernels of one call; on a CPU operators in their place."""
    cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        run()
        if cuda:
            torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    microseconds: dict[str, float] = defaultdict(float)
    for event in found.events() or ():
        if event.is_user_annotation or (event.device_type.name == "CUDA") != cuda:
            continue
        if not cuda and not event.name.startswith("aten::"):
            continue
        spent = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        launches[event.name] += 1
        microseconds[event.name] += spent
    total = sum(microseconds.values())
    shares: dict[str, float] = defaultdict(float)
    for name, spent in microseconds.items():
        kinds = (kind for kind, words in KINDS.items() if re.search(words, name.lower()))
        shares[next(kinds, "rest")] += spent / total
    longest = [
        {"name": name[:100], "launches": launches[name], "us": round(spent, 1)}
        for name, spent in sorted(microseconds.items(), key=lambda item: -item[1])[:12]
    ]
    return {
        "kernels": launches.total(),
        "ms": total / 1e3,
        "shares": {kind: round(shares[kind], 3) for kind in (*KINDS, "rest")},
        "longest": longest,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens when the last one runs")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--check", action="store_true", help="first, whether graphs change a thing")
    parser.add_argument("--attention", choices=ATTENTION, help="one of torch's kernels")
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    first = args.context - WARM - MEASURED - 1  # a step is left to be profiled
    if first < 1:
        parser.error(f"--context: expected more than {WARM + MEASURED + 1}, got {args.context}")
    sizes = SMALL if args.small else LLAMA_8B
    options = {name: value for name, value in vars(args).items() if name != "out"}
    options |= {"warm_up_steps": WARM, "measured_steps": MEASURED, "sizes": sizes._asdict()}
    rows = []
    kernels = sdpa_kernel(ATTENTION[args.attention]) if args.attention else nullcontext()
    with kernels:
        for name, ranks in (("dense", None), ("rounded", sizes.rounded), ("true", sizes.true)):
            strategy = get_strategy("low_rank", Group(device=args.device))
            model = Model(
                config_of(sizes, args.layers, ranks),
                Random(args.device),
                strategy,
                dtype=torch.bfloat16,
                max_context=args.context,
            )
            for kv_cache in ("full", "latent", "full+latent") if ranks else ("full",):
                if args.check:
                    check(model, kv_cache, args.page_size)
                for graphs in (False, True) if args.device == "cuda" else (False,):
                    row = measure(model, args, first, kv_cache, graphs)
                    rows.append({"ranks": name, **row})
                    print(short(rows[-1]), flush=True)
            del model
            if args.device == "cuda":
                torch.cuda.empty_cache()
    write(
        "gpu_torch_decode" if args.device == "cuda" else "cpu_torch_decode",
        {
            "options": options,
            "rows": rows,
        },
        args.out,
    )
    return 0


def short(row: dict[str, Any]) -> str:
    words = [row["ranks"], row["kv_cache"], "graph" if row["cuda_graphs"] else "eager"]
    if row["limit_ms"] is not None:
        words.append(f"limit {row['limit_ms']:.2f}")
    if row["profile"] is not None:
        shares = (f"{kind} {share:.0%}" for kind, share in row["profile"]["shares"].items())
        words += [f"{row['profile']['kernels']} kernels", *shares]
    return f"{row['ms']:8.3f} ms  {', '.join(words)}"


def check(model: Model, kv_cache: str, page_size: int) -> None:
    """Raises SystemExit if a CUDA graph gives other logits than eager steps do; on a CPU, if other
    pages do."""
    device = model.group.device
    batch, length, steps = CHECKED
    graphs = device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    shape, words = (batch, length + steps), model.config.vocab_size
    tokens = torch.randint(words, shape, generator=generator)

    def logits(changed: bool) -> Tensor:
        session = Session(
            model,
            batch=batch,
            context=length + steps + page_size,
            page_size=page_size,
            kv_cache=kv_cache,
            cuda_graphs=graphs and changed,
            seed=int(changed),
        )
        for row, prompt in enumerate(tokens[:, :length].tolist()):
            session.prefill(row, prompt, chunk=length)
        later = tokens[:, length:].to(device).unbind(1)
        return torch.stack([session.decode(step).clone() for step in later])

    expected, found = logits(False), logits(True)
    difference = ((found - expected).norm() / expected.norm()).item()
    what = "a CUDA graph" if graphs else "other pages"
    print(f"{kv_cache}: {what} moved logits by {difference:.1e} of their norm")
    if not difference < CLOSE:
        raise SystemExit(f"{kv_cache}: expected at most {CLOSE}, got {difference:.1e}")


def measure(
    model: Model, args: argparse.Namespace, first: int, kv_cache: str, graphs: bool
) -> dict[str, Any]:
    session = Session(
        model,
        batch=args.batch,
        context=args.context,
        page_size=args.page_size,
        kv_cache=kv_cache,
        cuda_graphs=graphs,
    )
    session.lengths = [first] * args.batch  # of an empty cache, which takes no other time
    tokens = torch.zeros(args.batch, dtype=torch.int64, device=args.device)

    def step() -> None:
        tokens.copy_(session.decode(tokens).argmax(-1))

    times = milliseconds(step, args.device)
    limit = None
    if kv_cache == "full" and args.device == "cuda":
        limit = bytes_read(model, args) / READ_BANDWIDTH * 1e3
    return {
        "kv_cache": kv_cache,
        "cuda_graphs": graphs,
        "ms": statistics.median(times),
        "limit_ms": limit,
        "profile": None if graphs else profile(step, args.device),
    }


def bytes_read(model: Model, args: argparse.Namespace) -> int:
    """Weights once (of the tied table the head's reading), and keys and values."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif type(value).__module__.startswith("reference_torch"):
            visit(list(vars(value).values()))

    visit([model.embedding, model.layers, model.norm])
    config = model.config
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    return sum(found.values()) + token * args.batch * args.context


if __name__ == "__main__":
    raise SystemExit(main())
