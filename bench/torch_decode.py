"""How fast does the PyTorch reference decode? A reference too slow to be taken seriously proves
nothing.

Layers of Llama-3-8B shape, dense and with the ranks of keep 0.6, rounded up and true; final norm,
head 128256 × 4096 and argmax; on one GPU, with random weights; eager and as a CUDA graph, beside
the time that the memory bandwidth allows.

    python -m bench.torch_decode [--layers 8] [--batch 64] [--context 512]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.common import write
from reference_torch import Group, Model, Session
from reference_torch.config import Config, Slice
from reference_torch.strategies import get_strategy

SHORTS = ("q", "k", "v", "o", "gate", "up", "down")
RANKS = {
    "rounded": (1280, 512, 512, 1280, 1920, 1920, 1920),
    "true": (1228, 491, 491, 1228, 1911, 1911, 1911),  # of keep 0.6
}
READ_BANDWIDTH = 4.42e12  # bytes a second of an H200, taken as given
WARM, MEASURED = 8, 50


def config_8b(layers: int, ranks: tuple[int, ...] | None) -> Config:
    def module(layer: int, short: str) -> str:
        block = "mlp" if short in ("gate", "up", "down") else "self_attn"
        return f"model.layers.{layer}.{block}.{short}_proj"

    slices = {
        module(layer, short): Slice(f"{module(layer, short)}.v.weight", 0, rank)
        for layer in range(layers)
        for short, rank in zip(SHORTS, ranks or (), strict=False)
    }
    return Config(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=128,
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

    def __contains__(self, name: str) -> bool:
        return not name.endswith((".bias", "_norm.weight"))

    def read(self, name: str, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def milliseconds(run: Callable[[], Any]) -> list[float]:
    """Of each call, on the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
    for _ in range(WARM):
        run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens when the last one runs")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--out", help="folder of the result file")
    args = parser.parse_args()
    if args.context <= WARM + MEASURED:
        parser.error(f"--context: expected more than {WARM + MEASURED}, got {args.context}")
    options = {name: value for name, value in vars(args).items() if name != "out"}
    options |= {"warm_up_steps": WARM, "measured_steps": MEASURED, "ranks": RANKS}
    rows = []
    for name, ranks in {"dense": None, **RANKS}.items():
        config = config_8b(args.layers, ranks)
        strategy = get_strategy("low_rank", Group(device="cuda"))
        model = Model(config, Random(), strategy, dtype=torch.bfloat16, max_context=args.context)
        for kv_cache in ("full", "latent", "full+latent") if ranks else ("full",):
            for graphs in (False, True):
                rows.append(measure(model, args, kv_cache, graphs))
                rows[-1]["ranks"] = name
                print(rows[-1], flush=True)
        del model
        torch.cuda.empty_cache()
    write("gpu_torch_decode", {"options": options, "rows": rows}, args.out)
    return 0


def measure(model: Model, args: argparse.Namespace, kv_cache: str, graphs: bool) -> dict[str, Any]:
    session = Session(
        model,
        batch=args.batch,
        context=args.context,
        page_size=args.page_size,
        kv_cache=kv_cache,
        cuda_graphs=graphs,
    )
    first = args.context - WARM - MEASURED
    session.lengths = [first] * args.batch  # of an empty cache, which takes no other time
    tokens = torch.zeros(args.batch, dtype=torch.int64, device="cuda")

    def step() -> None:
        tokens.copy_(session.decode(tokens).argmax(-1))

    times = milliseconds(step)
    limit = bytes_read(model, args) / READ_BANDWIDTH * 1e3 if kv_cache == "full" else None
    return {
        "kv_cache": kv_cache,
        "cuda_graphs": graphs,
        "ms": statistics.median(times),
        "limit_ms": limit,
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
