"""Which linears are decomposed together.

The projections of a block that read the same input may share a first factor; such a *group* is
decomposed as one matrix, its members' weights stacked, [Σ out, in].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deinfer_jax.checkpoint.factors import v_name
from deinfer_jax.config import SAME_INPUT, ModelConfig

__all__ = [
    "GROUPS",
    "Block",
    "Group",
    "find_blocks",
    "form_groups",
    "is_in_layer",
    "layer_of",
    "of_layer",
    "short_name",
]

# Names of the public argument; projections that are in no group are on their own.
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "shared": (("q", "k", "v"), ("gate", "up")),
    "shared-kv": (("k", "v"), ("gate", "up")),
    "separate": (),
}
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The linears of a layer that read one input.

    Attributes:
        modules: full names, in the order of the layer.
        outputs: output width of each.
        in_features: width of the input.
    """

    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    in_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Linears that are decomposed as one matrix with one first factor.

    Attributes:
        modules: full names of the members, in the order of the layer.
        outputs: output width of each.
        in_features: width of their input.
        block: first module of the block that they belong to, which names their input.
    """

    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    in_features: int
    block: str

    @property
    def out_features(self) -> int:
        """Rows of the stacked weight."""
        return sum(self.outputs)

    @property
    def parameters(self) -> int:
        """Of the dense weights."""
        return self.out_features * self.in_features

    @property
    def rank_cost(self) -> int:
        """Parameters of one rank."""
        return self.out_features + self.in_features

    @property
    def break_even(self) -> int:
        """The largest rank whose factors are smaller than the dense weights."""
        return (self.parameters - 1) // self.rank_cost

    @property
    def most(self) -> int:
        """The largest rank that means anything."""
        return min(self.out_features, self.in_features)

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return layer_of(self.modules[0])

    @property
    def name(self) -> str:
        """``model.layers.0.self_attn.q_k_v``; of a single module its own name."""
        return v_name(self.modules).removesuffix(".v.weight")


def short_name(module: str) -> str:
    """``q`` of ``model.layers.0.self_attn.q_proj``."""
    return module.rpartition(".")[2].removesuffix("_proj")


def is_in_layer(name: str) -> bool:
    """Whether a module or tensor belongs to a layer."""
    return _LAYER.search(name) is not None


def layer_of(module: str) -> int:
    """Index of the layer that a module belongs to."""
    found = _LAYER.search(module)
    if found is None:
        raise ValueError(f"{module!r} is in no layer")
    return int(found[1])


def of_layer(name: str, layer: int) -> str:
    """The same module or tensor of another layer; names outside of the layers stay."""
    return _LAYER.sub(f".{layer}.", name, count=1)


def find_blocks(config: ModelConfig) -> tuple[Block, ...]:
    """The blocks of all layers, in the order in which a model runs them."""
    blocks: dict[tuple[str, Any], list[str]] = {}
    linears = config.linears()
    for module in linears:
        parent, _, name = module.rpartition(".")
        together = next((names for names in SAME_INPUT if name in names), name)
        blocks.setdefault((parent, together), []).append(module)
    return tuple(
        Block(
            modules=tuple(modules),
            outputs=tuple(linears[module].out_features for module in modules),
            in_features=linears[modules[0]].in_features,
        )
        for modules in blocks.values()
    )


def form_groups(
    blocks: Sequence[Block], groups: str | Sequence[Sequence[str]]
) -> tuple[Group, ...]:
    """Groups of all layers.

    Args:
        blocks: of the layers, which are alike.
        groups: a key of ``GROUPS``, or short names by group, e.g. ``(("q", "k", "v"),)``.

    Raises:
        ValueError: an unknown name, a projection in two groups, a group of one, or members that
            read different inputs.
    """
    if isinstance(groups, str):
        if groups not in GROUPS:
            raise ValueError(
                f"groups: expected {', '.join(map(repr, GROUPS))} or names by group, got {groups!r}"
            )
        wanted: Sequence[Sequence[str]] = GROUPS[groups]
    else:
        wanted = groups
    known = {short_name(m): block for block in _distinct(blocks) for m in block.modules}
    group_of: dict[str, int] = {}
    for index, names in enumerate(wanted):
        if isinstance(names, str) or len(names) < 2:
            raise ValueError(
                f"groups: expected two names or more in each, such as ('k', 'v'), got {names!r}"
            )
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"groups: expected names among {', '.join(known)}, got {unknown}")
        inputs = {known[name].modules[0] for name in names}
        if len(inputs) > 1:
            raise ValueError(
                f"groups: expected members that read the same input, got {tuple(names)}; "
                + "; ".join(
                    " and ".join(short_name(m) for m in block.modules) + " read one"
                    for block in _distinct(blocks)
                )
            )
        for name in names:
            if name in group_of:
                raise ValueError(f"groups: {name!r} is in two groups, or twice in one")
            group_of[name] = index
    return tuple(group for block in blocks for group in _groups_of(block, group_of))


def _groups_of(block: Block, group_of: dict[str, int]) -> list[Group]:
    members: dict[str | int, list[int]] = {}
    for index, module in enumerate(block.modules):
        members.setdefault(group_of.get(short_name(module), module), []).append(index)
    return [
        Group(
            modules=tuple(block.modules[i] for i in indices),
            outputs=tuple(block.outputs[i] for i in indices),
            in_features=block.in_features,
            block=block.modules[0],
        )
        for indices in members.values()
    ]


def _distinct(blocks: Sequence[Block]) -> list[Block]:
    """One block of each kind: layers repeat them."""
    return list(
        {tuple(short_name(module) for module in block.modules): block for block in blocks}.values()
    )
