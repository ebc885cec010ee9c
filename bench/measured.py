"""What the planner is held to: times of 70B layers on two H200s, as bench.tensor_parallel found
them and as the design has them, and of the products of an 8B layer on one (design, "Numbers to
beat"). JAX 0.11.2, bfloat16, random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.common import LLAMA_3_8B, LLAMA_3_70B, RESULTS
from deinfer_jax import LowRank, ModelConfig, Slice
from deinfer_jax.cache.layout import CacheKind
from deinfer_jax.planner import LINKS, Device, Link, Predictor

SEPARATE = (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",))
SHARED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
BLOCK = dict.fromkeys("qkvo", "self_attn") | dict.fromkeys(("gate", "up", "down"), "mlp")

# 9/3 heads of 8 in a width of 72: q 72, k and v 24.
SMALL = ModelConfig(
    vocab_size=50,
    hidden_size=72,
    intermediate_size=100,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    dtype="bfloat16",
)


def low_rank(
    config: ModelConfig,
    groups: Sequence[Sequence[str]],
    ranks: Mapping[str, int] | int,
    layers: Sequence[int] | None = None,
) -> ModelConfig:
    """The config with some layers (all unless told) decomposed: groups of projections, and the rank
    of each by its first member."""
    slices = []
    for layer in range(config.num_layers) if layers is None else layers:
        for members in groups:
            rank = ranks if isinstance(ranks, int) else ranks[members[0]]
            parent = f"model.layers.{layer}.{BLOCK[members[0]]}"
            v = f"{parent}.{'_'.join(members)}.v.weight"
            for short in members:
                slices.append((f"{parent}.{short}_proj", Slice(v=v, offset=0, rank=rank)))
    return config.replace(low_rank=LowRank(tuple(slices)))


def ranks(config: ModelConfig, groups: Sequence[Sequence[str]], keep: float) -> dict[str, int]:
    """int(out·in·keep / (out + in)) of the stacked matrix of each group, by its first member."""
    found = {}
    for members in groups:
        modules = [f"model.layers.0.{BLOCK[short]}.{short}_proj" for short in members]
        linears = [config.linears()[module] for module in modules]
        out, inputs = sum(linear.out_features for linear in linears), linears[0].in_features
        found[members[0]] = int(out * inputs * keep / (out + inputs))
    return found


def all_ranks(attention: int, kv: int, mlp: int) -> dict[str, int]:
    return dict(q=attention, o=attention, k=kv, v=kv, gate=mlp, up=mlp, down=mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """``prompt`` = 0: a decode step of ``batch`` sequences at ``context`` tokens; else that many
    prompts. ``short`` is what the bench calls it."""

    name: str
    short: str
    batch: int
    context: int = 0
    prompt: int = 0


SITUATIONS = (
    Situation(name="decode 1", short="1", batch=1, context=512),
    Situation(name="decode 64", short="64", batch=64, context=512),
    Situation(name="decode 512", short="512", batch=512, context=128),
    Situation(name="prefill 16384", short="prefill", batch=32, prompt=512),
)
# The design's milliseconds a layer, in the order of SITUATIONS.
DESIGN: dict[str, dict[str, tuple[float, ...]]] = {
    "nvlink": {
        "dense": (0.259, 0.358, 0.906, 23.4),
        "naive": (0.265, 0.489, 1.17, 20.0),
        "low_rank": (0.297, 0.376, 0.791, 16.6),
        "sharded": (0.309, 0.374, 0.753, 15.0),
    },
    "pcie": {
        "dense": (0.262, 0.453, 1.41, 38.0),
        "naive": (0.268, 0.863, 3.91, 105.0),
        "low_rank": (0.297, 0.486, 1.22, 27.5),
        "sharded": (0.307, 0.50, 1.37, 31.5),
    },
}
LINK_NAMES = {"fast": "nvlink", "slow": "pcie"}  # of the bench, of the planner
MEASURED_70B = low_rank(LLAMA_3_70B.replace(num_layers=1), SEPARATE, all_ranks(2432, 512, 3840))

# Microseconds of all products of one layer, by rows.
PRODUCTS_8B: dict[str, dict[int, float]] = {
    "dense": {1: 120, 64: 137, 256: 220},
    "separate": {1: 175, 64: 130, 256: 187},
    "shared": {1: 176, 64: 120, 256: 167},
}

# Milliseconds of a decode step of 8 layers of that model with separate groups, final norm, tied
# head and argmax on one device, by sequences and context, cache in pages.
STEPS_8B = {(64, 512): 2.42, (8, 4096): 2.18}


Cells = dict[tuple[str, str, str], float]  # milliseconds a layer by link, strategy, situation


def designed() -> Cells:
    """The design's."""
    return {
        (link, strategy, situation.name): time
        for link, by_strategy in DESIGN.items()
        for strategy, times in by_strategy.items()
        for situation, time in zip(SITUATIONS, times, strict=True)
    }


def measured() -> Cells:
    """Ours of the same, from the result file; with separate groups, as the design's."""
    rows = json.loads((RESULTS / "tensor_parallel.json").read_text())["rows"]
    return {
        (link, strategy, situation.name): rows[
            f"cells/{short}/separate/rounded/{strategy}/{situation.short}"
        ]["ms"]
        for short, link in LINK_NAMES.items()
        for strategy in DESIGN[link]
        for situation in SITUATIONS
    }


def predictor(strategy: str, *, device: Device, link: Link) -> Predictor:
    """One of the layers that the cells are about."""
    return Predictor(
        MEASURED_70B,
        strategy,  # pyright: ignore[reportArgumentType]
        "full",
        devices=2,
        device=device,
        link=link,
        dtype="bfloat16",
    )


def product_seconds(kind: str, rows: int, device: Device) -> float:
    """Predicted for the products of ``PRODUCTS_8B``."""
    groups = {"dense": (), "separate": SEPARATE, "shared": SHARED}[kind]
    ranks = {"q": 1280, "k": 512, "v": 512, "o": 1280, "gate": 1920, "up": 1920, "down": 1920}
    if kind == "shared":
        ranks |= {"q": 1474, "gate": 2150}
    config = low_rank(LLAMA_3_8B.replace(num_layers=1), groups, ranks)
    one = Predictor(
        config, "low_rank", "full", devices=1, device=device, link=LINKS["nvlink"], dtype="bfloat16"
    )
    return sum(one.product_seconds(product, rows) for product in one.placements[0].products)


def step_seconds(batch: int, context: int, device: Device, kv_cache: CacheKind = "full") -> float:
    """Predicted for ``STEPS_8B``."""
    config = LLAMA_3_8B.replace(num_layers=8, tie_embeddings=True)
    config = low_rank(config, SEPARATE, all_ranks(1280, 512, 1920))
    one = Predictor(
        config,
        "low_rank",
        kv_cache,
        devices=1,
        device=device,
        link=LINKS["nvlink"],
        dtype="bfloat16",
    )
    return one.decode_seconds(batch, context)
