"""What is measured: models, ranks and cells, and the design's figures for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.measured import (
    DESIGN,
    LINK_NAMES,
    LLAMA_3_70B,
    SEPARATE,
    SHARED,
    SITUATIONS,
    all_ranks,
    low_rank,
    ranks,
)
from bench.stack.layers import Cell
from deinfer_jax import ModelConfig

DEVICES, LAYERS, KEEP = 2, 4, 0.6
LINKS = LINK_NAMES
STRATEGIES = ("sharded", "low_rank", "naive", "dense")  # the first ones first, should time run out
GROUPS = {"separate": SEPARATE, "shared": SHARED}
CELLS = ("512", "prefill", "64", "1")
SPLIT = ("1", "64")
ORDER = tuple(situation.short for situation in SITUATIONS)
ROUNDED = all_ranks(2432, 512, 3840)
NEAREST = 128  # what the shared groups' ranks are rounded to
SMALL = LLAMA_3_70B.replace(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    max_position=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured: sizes, and how long to measure.

    Attributes:
        small: tiny widths, for a try on a CPU.
        layers: of the stack.
        dtype: of everything.
        seconds: at most, of timing a program.
        blocks: of calls, whose median is the result.
    """

    small: bool
    layers: int
    dtype: str
    seconds: float
    blocks: int

    def cell(self, name: str) -> Cell:
        """By its short name."""
        one = SITUATIONS[ORDER.index(name)]
        batch, tokens, capacity = one.batch, one.prompt or 1, one.context or one.prompt
        if self.small:
            batch, capacity = {"1": 1, "64": 3, "512": 8, "prefill": 2}[name], 16
            tokens = 1 if one.context else capacity
        return Cell(name=one.name, batch=batch, tokens=tokens, capacity=capacity)

    def config(self, groups: str, ranked: str) -> ModelConfig:
        """The layers' model. Ranks are "true", or rounded as the design's figures have them."""
        config = (SMALL if self.small else LLAMA_3_70B).replace(num_layers=self.layers)
        found: Mapping[str, int] = ranks(config, GROUPS[groups], KEEP)
        if ranked == "rounded" and groups == "separate" and not self.small:
            found = ROUNDED
        elif ranked == "rounded":
            unit = 8 if self.small else NEAREST
            found = {member: max(1, round(rank / unit)) * unit for member, rank in found.items()}
        return low_rank(config, GROUPS[groups], found)


def design_ms(link: str, strategy: str, name: str) -> float:
    """The design's figure, milliseconds a layer."""
    return DESIGN[LINKS[link]][strategy][ORDER.index(name)]
