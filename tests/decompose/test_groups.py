"""Which linears are decomposed together."""

from __future__ import annotations

from typing import Any

import pytest

from deinfer_jax import ModelConfig
from deinfer_jax.decompose.groups import Group, find_blocks, form_groups

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_position=256,
    eos_token_ids=(1,),
)
WIDTHS = {"q": (24, 24), "k": (8, 24), "v": (8, 24), "o": (24, 24)}
WIDTHS |= {"gate": (40, 24), "up": (40, 24), "down": (24, 40)}


def form(groups: Any) -> tuple[Group, ...]:
    return form_groups(find_blocks(CONFIG), groups)


def members(groups: Any, layer: int = 0) -> list[tuple[str, ...]]:
    """Short names by group."""
    return [
        tuple(m.rpartition(".")[2].removesuffix("_proj") for m in group.modules)
        for group in form(groups)
        if group.layer == layer
    ]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("shared", [("q", "k", "v"), ("o",), ("gate", "up"), ("down",)]),
        ("shared-kv", [("q",), ("k", "v"), ("o",), ("gate", "up"), ("down",)]),
        ("separate", [("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",)]),
        ((), [("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",)]),
        ((("q", "v"),), [("q", "v"), ("k",), ("o",), ("gate",), ("up",), ("down",)]),
        ([["v", "k"], ["up", "gate"]], [("q",), ("k", "v"), ("o",), ("gate", "up"), ("down",)]),
    ],
)
def test_members(groups: Any, expected: list[tuple[str, ...]]) -> None:
    assert members(groups) == members(groups, 1) == expected


@pytest.mark.parametrize("groups", ["shared", "shared-kv", "separate"])
def test_every_linear_is_in_one_group_of_its_layer(groups: str) -> None:
    found = form(groups)
    modules = [module for group in found for module in group.modules]
    blocks = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
    names = [
        f"model.layers.{layer}.{blocks.get(short, 'mlp')}.{short}_proj"
        for layer in range(2)
        for short in WIDTHS
    ]
    assert sorted(modules) == sorted(names)
    for group in found:
        assert all(f".{group.layer}." in module for module in group.modules)


@pytest.mark.parametrize("groups", ["shared", "shared-kv", "separate"])
def test_sizes(groups: str) -> None:
    for group in form(groups):
        shorts = [m.rpartition(".")[2].removesuffix("_proj") for m in group.modules]
        out = sum(WIDTHS[short][0] for short in shorts)
        width = WIDTHS[shorts[0]][1]
        assert group.outputs == tuple(WIDTHS[short][0] for short in shorts)
        assert (group.out_features, group.in_features) == (out, width)
        assert (group.parameters, group.rank_cost) == (out * width, out + width)
        assert group.most == min(out, width)


def test_break_even_is_the_last_rank_that_saves() -> None:
    for out in range(1, 30):
        for width in range(1, 30):
            group = Group(modules=("m.0.q",), outputs=(out,), in_features=width, block="m.0.q")
            saving = [r for r in range(1, 60) if r * (out + width) < out * width]
            assert group.break_even == max(saving, default=0)


def test_names() -> None:
    assert [group.name for group in form("shared") if group.layer == 1] == [
        "model.layers.1.self_attn.q_k_v",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up",
        "model.layers.1.mlp.down_proj",
    ]


def test_the_input_is_named_by_the_first_of_its_readers() -> None:
    inputs = {group.name: group.block for group in form("shared-kv") if group.layer == 1}
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert inputs == {
        f"{attention}.q_proj": f"{attention}.q_proj",
        f"{attention}.k_v": f"{attention}.q_proj",
        f"{attention}.o_proj": f"{attention}.o_proj",
        f"{mlp}.gate_up": f"{mlp}.gate_proj",
        f"{mlp}.down_proj": f"{mlp}.down_proj",
    }


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("all", "expected 'shared', 'shared-kv', 'separate' or names by group, got 'all'"),
        ((("q", "o"),), r"members that read the same input, got \('q', 'o'\); q and k and v"),
        ((("v", "gate"),), "members that read the same input"),
        ((("gate", "up", "down"),), "members that read the same input"),
        ((("k", "w"),), r"expected names among q, k, v, o, gate, up, down, got \['w'\]"),
        ((("q_proj", "k_proj"),), r"expected names among q, k, .*got \['q_proj', 'k_proj'\]"),
        ((("q", "k"), ("k", "v")), "'k' is in two groups, or twice in one"),
        ((("k", "k"),), "'k' is in two groups, or twice in one"),
        ((("k",),), r"expected two names or more in each, such as \('k', 'v'\), got \('k',\)"),
        (((),), r"expected two names or more in each, .* got \(\)"),
        (("kv", "qo"), "expected two names or more in each, .* got 'kv'"),
    ],
)
def test_bad_groups(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form(groups)
