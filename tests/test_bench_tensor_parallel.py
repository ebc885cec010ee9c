"""The bench of strategies: its layers compute the same under all, and it reads schedules."""

from pathlib import Path

import jax
import numpy as np
import pytest

from bench.stack.check import check
from bench.stack.layers import Layers, no_collectives, noise, own_part
from bench.stack.overlap import schedule
from bench.stack.report import Results, Table
from bench.stack.setting import DEVICES, Setting
from deinfer_jax.checkpoint.parameters import random_parameters
from deinfer_jax.evaluate.communication import collectives
from deinfer_jax.parallel.mesh import choose_placement
from deinfer_jax.parallel.strategies import STRATEGIES, get_strategy

SMALL = Setting(small=True, layers=1, dtype="float32", seconds=0.0, blocks=0)
FULL = Setting(small=False, layers=4, dtype="bfloat16", seconds=0.0, blocks=0)
HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%command_buffer (p: bf16[8,64]) -> bf16[8,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  ROOT %gemm_fusion_dot.1 = bf16[8,64]{1,0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.c
}

ENTRY %main (x: bf16[8,64], y: bf16[8,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  %y = bf16[8,64]{1,0} parameter(1)
  %all-reduce-start.1 = bf16[8,64]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %call = bf16[8,64]{1,0} call(%y), to_apply=%command_buffer
  %all-reduce-done.1 = bf16[8,64]{1,0} all-reduce-done(%all-reduce-start.1)
  %all-gather-start.1 = (bf16[8,64]{1,0}, bf16[8,128]{1,0}) all-gather-start(%call), \
replica_groups={{0,1}}, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-gather-done.1 = bf16[8,128]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %all-reduce.2 = bf16[8,64]{1,0} all-reduce(%all-reduce-done.1), replica_groups={{0,1}}
}
"""


@pytest.mark.parametrize("groups", ["separate", "shared"])
def test_strategies_agree(groups: str) -> None:
    check(groups, choose_placement(DEVICES))


def test_schedule_sees_xlas_own_all_reduce_kernels() -> None:
    text = """\
HloModule jit_run, is_scheduled=true, num_partitions=2

%kernel (p: bf16[512]) -> bf16[512] {
  %p = bf16[512]{0} parameter(0)
  ROOT %sum = bf16[512]{0} all-reduce(%p), channel_id=1, to_apply=%add
}

ENTRY %main (x: bf16[512]) -> bf16[512] {
  %x = bf16[512]{0} parameter(0)
  %fusion-start = ((bf16[512]{0}), bf16[512]{0}) fusion-start(%x), kind=kCustom, calls=%kernel
  ROOT %fusion-done = bf16[512]{0} fusion-done(%fusion-start)
}
"""
    assert [one.described() for one in schedule(text)] == ["all-reduce bf16[512]: nothing between"]


def test_schedule_says_what_stands_between() -> None:
    assert [one.described() for one in schedule(HLO)] == [
        "all-reduce bf16[8,64]: product bf16[8,64]",
        "all-gather bf16[8,64]: synchronous, nothing between",
        "all-reduce bf16[8,64]: synchronous, nothing between",
    ]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_one_part_without_collectives_has_the_shapes_of_all(strategy: str) -> None:
    layers = Layers(
        SMALL.config("separate", "rounded"),
        get_strategy(strategy, DEVICES),
        choose_placement(DEVICES),
        SMALL.dtype,
    )
    cell = SMALL.cell("64")
    state = layers.arguments(cell, noise((cell.rows, layers.config.hidden_size), np.float32))
    weights, *own = own_part((random_parameters(layers.declared, 0, layers.placement), *state))
    with no_collectives(DEVICES):
        run, _ = layers.alone(cell, "xla")
        lowered = run.lower(weights, *own)
    assert collectives(lowered) == []
    assert jax.tree.map(lambda a: a.shape, lowered.out_info) == jax.tree.map(
        lambda a: a.shape, (own[0], own[1])
    )
    # 11 products a layer; in dense q k v are one, gate and up another.
    products = jax.eval_shape(layers.products(), weights, own[0])
    assert len(products) == (4 if strategy == "dense" else 11)


def test_bars_name_what_misses(tmp_path: Path) -> None:
    results = Results(tmp_path / "result.json")
    for strategy, ms in (("dense", 1.0), ("naive", 1.2), ("low_rank", 1.03), ("sharded", 0.8)):
        place = dict(part="cells", link="fast", groups="separate", ranks="rounded", cell="512")
        key = "/".join(["cells", "fast", "separate", "rounded", strategy, "512"])
        results.begin(key)
        results.end(key, {**place, "strategy": strategy, "ms": ms})
    bars = Table(Results(results.path)).bars()
    assert "ok   fast separate rounded 512: sharded is 1.50x naive (bar 1.4)" in bars
    assert "MISS fast separate rounded 512: low_rank is 1.030 of dense" in bars
    assert "MISS 1 of 4 cells within 1.03 of the design's figure" in bars[0]


def test_rounded_ranks_are_the_designs() -> None:
    found = {}
    for groups in ("separate", "shared"):
        low_rank = FULL.config(groups, "rounded").low_rank
        names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
        slices = (low_rank.get(f"model.layers.0.{name}") for name in names)
        found[groups] = [piece.rank for piece in slices if piece is not None]
    assert found == {"separate": [2432, 512, 3840], "shared": [2688, 2688, 4352]}
