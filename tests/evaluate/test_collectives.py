"""How collectives are read from StableHLO and from compiled HLO."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deinfer_jax.evaluate.communication import Collective, Operand, collectives, step_program
from deinfer_jax.parallel.mesh import choose_placement
from tests.evaluate.test_communication import QUICKLY, SMALL_MODELS, TOKENS, moves


def small_program(function: Any, *shapes: tuple[int, ...]) -> jax.stages.Lowered:
    """A function of whole float32 arrays on 4 devices."""
    spread = jax.shard_map(
        function,
        mesh=choose_placement(4).mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jax.jit(spread).lower(*arrays)


class TestReading:
    """Of both forms of a program."""

    def both(self, function: Any, *shapes: tuple[int, ...]) -> tuple[list[Collective], ...]:
        program = small_program(function, *shapes)
        return collectives(program), collectives(program.compile(compiler_options=QUICKLY))

    def test_every_kind(self) -> None:
        def function(x):
            return (
                jax.lax.psum(x, "tp"),
                jax.lax.all_gather(x, "tp", axis=1, tiled=True),
                jax.lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
                jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)]),
                jax.lax.all_to_all(x, "tp", 0, 0),
            )

        emitted, compiled = self.both(function, (4, 8))
        assert {one.kind: one.payload for one in emitted} == {
            "all-reduce": 32,
            "all-gather": 128,
            "reduce-scatter": 32,
            "collective-permute": 32,
            "all-to-all": 32,
        }
        assert {(one.kind, one.payload, one.devices) for one in compiled} == {
            (one.kind, one.payload, one.devices) for one in emitted
        }

    def test_a_function_counts_at_each_call(self) -> None:
        inner = jax.jit(lambda x: jax.lax.psum(jnp.sin(x), "tp"))
        emitted, compiled = self.both(lambda x: inner(inner(x)), (3, 5))
        assert moves(emitted, 3) == moves(compiled, 3) == [("all-reduce", 5)] * 2

    def test_a_loop_counts_once(self) -> None:
        def function(x):
            return jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(jax.lax.psum(x, "tp")), x)

        emitted, compiled = self.both(function, (3, 5))
        assert moves(emitted, 3) == moves(compiled, 3) == [("all-reduce", 5)]

    def test_without_extras_no_branch_has_a_collective(self) -> None:
        """Which would keep the conditional out of CUDA graphs."""
        config = SMALL_MODELS["separate"]
        program = step_program(config, "sharded", 4, tokens=TOKENS, platform="cuda", extras=False)
        found = collectives(program)
        assert found and not any(one.branches for one in found)

    def test_branches(self) -> None:
        def function(way, x):
            def choose(x, *widths):
                branches = [lambda x, n=n: jax.lax.psum(x[:, :n], "tp").sum() for n in widths]
                return jax.lax.switch(way[0].astype(jnp.int32), branches, x)

            return jax.lax.psum(x, "tp"), choose(x, 1, 2, 3), choose(x, 4, 5)

        for found in self.both(function, (1,), (1, 8)):
            by_width = {one.payload: one.branches for one in found}
            assert by_width == {8: (), 1: (0,), 2: (1,), 3: (2,), 4: (0,), 5: (1,)}

    def test_merged_operands_are_one_launch(self) -> None:
        def function(x, y):
            return jax.lax.psum((x, y), "tp")

        emitted, compiled = self.both(function, (2, 3), (2, 5))
        assert moves(emitted) == moves(compiled) == [("all-reduce", 3), ("all-reduce", 5)]
        assert [len(compiled), compiled[0].payload] == [1, 16]

    def test_wire(self) -> None:
        operands = (Operand((2, 8), "bf16"), Operand((4,), "bf16"))
        assert Collective("all-reduce", operands, 4).wire == 2 * 3 / 4 * 20
        assert Collective("reduce-scatter", operands, 4).wire == 3 / 4 * 20
        gathered = Collective("all-gather", operands, 4)
        assert (gathered.elements, gathered.wire) == ((64, 16), 3 / 4 * 80)
        with pytest.raises(ValueError, match="expected all-reduce.*got all-to-all"):
            _ = Collective("all-to-all", operands, 4).wire

    def test_text_that_is_no_program(self) -> None:
        with pytest.raises(ValueError, match="without an ENTRY"):
            collectives("module @jit_f {\n}")


# As XLA prints them for GPUs: asynchronous pairs, with and without the wrapped computation, and the
# forms of groups that it has.
GPU = """\
HloModule jit_run, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async_computation (param: bf16[64,64]) -> bf16[64,8] {
  %param = bf16[64,64]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = bf16[64,8]{1,0} reduce-scatter(%param), channel_id=3, \
replica_groups=[1,8]<=[8], dimensions={1}, to_apply=%add
}

ENTRY %main.10_spmd (x: bf16[64,437], /*index=1*/y: f32[64]) -> (bf16[64,3496], f32[64]) {
  %x = bf16[64,437]{1,0} parameter(0), metadata={op_name="x"}
  %y = f32[64]{0} parameter(1)
  %z = bf16[64,64]{1,0} fusion(%x), kind=kLoop, calls=%nothing
  %all-gather-start = (bf16[64,437]{1,0}, bf16[64,3496]{0,1}) all-gather-start(%x), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, backend_config={"is_sync":false}
  %all-reduce-start = (f32[64]{0}, bf16[64,437]{1,0}) all-reduce-start(%y, %x), channel_id=2, \
replica_groups=[2,4]<=[8], to_apply=%add
  %all-gather-done = bf16[64,3496]{0,1} all-gather-done(%all-gather-start)
  %all-reduce-done = (f32[64]{0}, bf16[64,437]{1,0}) all-reduce-done(%all-reduce-start)
  %wrapped = ((bf16[64,64]{1,0}), bf16[64,8]{1,0}) async-start(%z), calls=%async_computation
  %wrapped.1 = bf16[64,8]{1,0} async-done(%wrapped), calls=%async_computation
  %short = ((bf16[64,64]{1,0}), bf16[64,8]{1,0}) reduce-scatter-start(%z), channel_id=4, \
replica_groups={}, dimensions={1}, to_apply=%add
  %short.1 = bf16[64,8]{1,0} reduce-scatter-done(%short)
  %part = f32[64]{0} get-tuple-element(%all-reduce-done), index=0
  ROOT %both = (bf16[64,3496]{0,1}, f32[64]{0}) tuple(%all-gather-done, %part)
}

%nothing (p: bf16[64,437]) -> bf16[64,64] {
  %p = bf16[64,437]{1,0} parameter(0)
  ROOT %s = bf16[64,64]{1,0} slice(%p), slice={[0:64], [0:64]}
}
"""


class TestAsynchronousPairs:
    def test_each_counts_once(self) -> None:
        found = [(one.kind, one.elements, one.devices) for one in collectives(GPU)]
        assert found == [
            ("all-gather", (64 * 3496,), 8),
            ("all-reduce", (64, 64 * 437), 4),
            ("reduce-scatter", (64 * 64,), 8),
            ("reduce-scatter", (64 * 64,), 8),
        ]
