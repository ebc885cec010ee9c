"""Memory arithmetic and messages, with limits that no device has."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from deinfer_jax import OutOfDeviceMemory
from deinfer_jax.cache.choice import choose_layout
from deinfer_jax.cache.chunk import query_block
from deinfer_jax.engine import memory
from deinfer_jax.engine.memory import (
    MemoryPlan,
    choose_capacity,
    choose_pages,
    explained,
    format_bytes,
    guess_temporaries,
)


def plan(available: int | None, *, cache: int = 400, temporaries: int = 50) -> MemoryPlan:
    return MemoryPlan(
        weights=1000,
        cache=cache,
        temporaries=temporaries,
        available=available,
        bytes_per_sequence=100,
    )


class TestMemoryPlan:
    def test_what_fits_passes(self) -> None:
        plan(1450).check()

    def test_one_byte_too_many(self) -> None:
        with pytest.raises(OutOfDeviceMemory):
            plan(1449).check()

    def test_no_limit_passes(self) -> None:
        plan(None, cache=10**15).check()

    def test_no_limit_has_no_largest_batch(self) -> None:
        assert plan(None).largest_batch is None

    def test_largest_batch_is_not_negative(self) -> None:
        assert plan(10).largest_batch == 0

    def test_the_message_gives_every_size(self) -> None:
        with pytest.raises(
            OutOfDeviceMemory,
            match=r"weights 1.00 kB \(1000 bytes\), cache 400 bytes, temporaries 50 bytes; "
            r"the device offers 1.25 kB \(1250 bytes\)",
        ):
            plan(1250).check()

    def test_the_message_gives_the_largest_batch(self) -> None:
        with pytest.raises(OutOfDeviceMemory, match=r"a batch of \d+ at the longest context"):
            plan(1250).check()

    def test_without_limit_the_description_ends_with_the_temporaries(self) -> None:
        assert plan(None).describe().endswith("temporaries 50 bytes")

    def test_it_is_a_memory_error(self) -> None:
        assert issubclass(OutOfDeviceMemory, MemoryError)

    @pytest.mark.parametrize("spare", [-1, 0, 1])
    def test_the_largest_batch_does_fit(self, config, spare: int) -> None:
        layout = choose_layout(config, "full", 16, "float32")
        pages = layout.pages_for(128)
        best = MemoryPlan(
            weights=1000,
            cache=layout.pool_bytes(9 * pages),
            temporaries=50,
            available=1050 + layout.pool_bytes(3 * pages) + spare,
            bytes_per_sequence=pages * layout.bytes_per_page,
        )
        batch = best.largest_batch
        assert batch is not None
        assert 1050 + layout.pool_bytes(batch * pages) <= best.available  # pyright: ignore[reportOperatorIssue]
        assert batch == (3 if spare >= 0 else 2)

    def test_a_batch_more_does_not_fit(self, config) -> None:
        layout = choose_layout(config, "full", 16, "float32")
        pages = layout.pages_for(128)
        available = 1050 + layout.pool_bytes(3 * pages)
        found = MemoryPlan(
            weights=1000,
            cache=0,
            temporaries=50,
            available=available,
            bytes_per_sequence=pages * layout.bytes_per_page,
        ).largest_batch
        assert found is not None
        assert 1050 + layout.pool_bytes((found + 1) * pages) > available


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB (1000 bytes)"),
        (1_250_000, "1.25 MB (1250000 bytes)"),
        (98_765_432_100, "98.77 GB (98765432100 bytes)"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_plan_of_a_loaded_model(load_tiny) -> None:
    llm = load_tiny(max_batch=2, max_context=64)
    found = llm.memory_plan()
    weights = 97 * 24 * 2 + 24  # embedding, head, last norm
    weights += 2 * (24 * 2 + 24 * (48 + 16 + 16) + 48 * 24 + 3 * 24 * 40)
    assert found.weights == 4 * weights
    assert found.cache == 4 * 2 * (2 * 4) * 16 * 2 * 2 * 8  # 2 · 4 pages
    assert found.bytes_per_sequence == 4 * 2 * 64 * 2 * 2 * 8


def test_temporaries_are_those_of_the_largest_program(load_tiny) -> None:
    llm = load_tiny(max_batch=2, max_context=64)
    assert llm.memory_plan().temporaries == 0
    small = llm.runner.executable(("decode", 2, 4)).memory_analysis().temp_size_in_bytes
    assert llm.memory_plan().temporaries == small > 0


GIB = 2**30


class TestChoosePages:
    """Pages of 4096 bytes; weights of 1 GiB."""

    def choose(self, config, **changes: Any) -> int:
        arguments: dict[str, Any] = dict(
            weights=GIB,
            batch=4,
            context=128,
            least_context=128,
            cache_bytes=None,
            available=None,
            prefill_chunk=32,
        )
        layout = choose_layout(config, "full", 16, "float32")
        return choose_pages(layout, config, **(arguments | changes))

    def test_no_more_than_the_batch_can_use(self, config) -> None:
        assert self.choose(config) == 4 * 8

    @pytest.mark.parametrize("spare", [0, 1, 4095])
    def test_cache_bytes_buy_whole_pages(self, config, spare: int) -> None:
        assert self.choose(config, cache_bytes=10 * 4096 + spare) == 10

    def test_cache_bytes_of_one_page(self, config) -> None:
        assert self.choose(config, cache_bytes=4096) == 1

    def test_cache_bytes_beyond_use(self, config) -> None:
        assert self.choose(config, cache_bytes=GIB) == 4 * 8

    def test_cache_bytes_of_less_than_a_page(self, config) -> None:
        with pytest.raises(ValueError, match="cache_bytes: expected at least 4096 .*got 4095"):
            self.choose(config, cache_bytes=4095)

    def test_a_roomy_device(self, config) -> None:
        assert self.choose(config, available=80 * GIB) == 4 * 8

    def test_a_full_device_gets_fewer_pages_that_do_fit(self, config) -> None:
        available = 2 * GIB
        pages = self.choose(config, available=available, batch=10**6)
        assert pages >= 8
        assert GIB + pages * 4096 < available

    def test_weights_alone_are_too_much(self, config) -> None:
        with pytest.raises(
            OutOfDeviceMemory, match=rf"weights 1.07 GB \({GIB} bytes\).*cache.*temporaries.*offers"
        ):
            self.choose(config, available=GIB)

    @pytest.mark.parametrize("spare", [-1, 0])
    def test_the_smallest_device_that_does(self, config, spare: int) -> None:
        layout = choose_layout(config, "full", 16, "float32")
        needed = GIB + layout.pool_bytes(8) + guess_temporaries(config, layout, 128, 32)
        available = next(
            size
            for size in range(int(needed / memory.GPU_FRACTION) - 2, 2 * needed)
            if int(size * memory.GPU_FRACTION) == needed
        )
        while int((available - 1) * memory.GPU_FRACTION) == needed:
            available -= 1
        if spare < 0:
            with pytest.raises(OutOfDeviceMemory):
                self.choose(config, available=available - 1)
        else:
            assert self.choose(config, available=available) == 8

    def test_a_longer_chunk_leaves_fewer_pages(self, config) -> None:
        found = [
            self.choose(config, batch=10**6, context=10**4, available=2 * GIB, prefill_chunk=chunk)
            for chunk in (32, 512, 4096)
        ]
        assert found[0] > found[1] > found[2]


class TestGuessTemporaries:
    def guess(self, config, context: int = 1024, chunk: int = 64) -> int:
        layout = choose_layout(config, "full", 16, "float32")
        return guess_temporaries(config, layout, context, chunk)

    def test_scores_count_at_most_a_block_of_queries(self, config) -> None:
        # 40 000 tokens of context: not all of the chunk attends together.
        context = 40_000
        block = query_block(config.num_heads, context)
        assert block < 2048
        activations = 4 * (4 * config.intermediate_size + 8 * config.hidden_size)
        more = self.guess(config, context, 2048) - self.guess(config, context, block)
        assert more == (2048 - block) * activations

    def test_scores_of_a_chunk_that_attends_together(self, config) -> None:
        more = self.guess(config, 1024, 128) - self.guess(config, 1024, 64)
        activations = 4 * (4 * config.intermediate_size + 8 * config.hidden_size)
        assert more == 64 * (2 * 4 * config.num_heads * 1024 + activations)

    def test_a_chunk_is_no_longer_than_the_context(self, config) -> None:
        assert self.guess(config, 256, 256) == self.guess(config, 256, 4096)

    @pytest.mark.parametrize(("context", "chunk"), [(128, 32), (256, 256), (1024, 512)])
    def test_it_is_not_less_than_what_xla_takes(
        self, load_tiny, config, context: int, chunk: int
    ) -> None:
        wide = config.replace(max_position=1024)
        llm = load_tiny(config=wide, max_context=context, prefill_chunk=chunk, max_batch=2)
        llm.runner.executable(("prefill", chunk, context // 16))
        assert 0 < llm.memory_plan().temporaries <= self.guess(wide, context, chunk)


class TestChooseCapacity:
    """Pages of 4096 bytes; a context of 2^16 tokens takes 4096 of them."""

    LONG = 2**16

    def choose(self, config, **changes: Any) -> tuple[int, int]:
        layout = choose_layout(config, "full", 16, "float32")
        arguments: dict[str, Any] = dict(
            weights=GIB,
            batch=4,
            max_context=None,
            cache_bytes=None,
            available=None,
            prefill_chunk=32,
        )
        return choose_capacity(
            layout, config.replace(max_position=self.LONG), **(arguments | changes)
        )

    def room(self, config, context: int) -> int:
        """The smallest device, about, on which one sequence of ``context`` tokens fits."""
        layout = choose_layout(config, "full", 16, "float32")
        needed = GIB + layout.pool_bytes(context // 16)
        needed += guess_temporaries(config, layout, context, 32)
        return int(needed / memory.GPU_FRACTION) + 2

    def test_a_roomy_device(self, config) -> None:
        assert self.choose(config, available=80 * GIB) == (self.LONG, 4 * 4096)

    @pytest.mark.parametrize("context", [LONG, LONG // 2, LONG // 4, 1024, 512])
    def test_a_default_context_is_halved_until_it_fits(self, config, context: int) -> None:
        found, pages = self.choose(config, available=self.room(config, context))
        assert found == context
        assert pages in (context // 16, context // 16 + 1)

    @pytest.mark.parametrize("context", [LONG // 2, 1024])
    def test_it_is_not_halved_once_more_than_needed(self, config, context: int) -> None:
        assert self.choose(config, available=self.room(config, context) - 3)[0] == context // 2

    def test_not_below_512(self, config) -> None:
        with pytest.raises(OutOfDeviceMemory, match=rf"weights 1.07 GB \({GIB} bytes\)"):
            self.choose(config, available=self.room(config, 512) - 3)

    def test_a_context_that_is_no_power_of_two_goes_down_to_512(self, config) -> None:
        layout = choose_layout(config, "full", 16, "float32")
        found, _ = choose_capacity(
            layout,
            config.replace(max_position=600),
            weights=GIB,
            batch=4,
            max_context=None,
            cache_bytes=None,
            available=self.room(config, 512),
            prefill_chunk=32,
        )
        assert found == 512

    def test_a_context_that_was_asked_for_is_not_halved(self, config) -> None:
        available = self.room(config, self.LONG // 2)
        with pytest.raises(OutOfDeviceMemory):
            self.choose(config, available=available, max_context=self.LONG)
        assert self.choose(config, available=available, max_context=1000)[0] == 1000

    def test_cache_bytes_cut_the_default_context(self, config) -> None:
        assert self.choose(config, cache_bytes=10 * 4096) == (160, 10)

    def test_cache_bytes_leave_a_context_that_was_asked_for(self, config) -> None:
        assert self.choose(config, cache_bytes=10 * 4096, max_context=1000) == (1000, 10)

    def test_a_cpu_cuts_a_default_context_to_its_default_cache(
        self, config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 100 * 4096)
        assert self.choose(config) == (1600, 100)

    def test_a_cpu_holds_one_sequence_that_was_asked_for(
        self, config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 100 * 4096)
        assert self.choose(config, max_context=3200) == (3200, 200)


class TestExplained:
    def test_an_allocation_that_fails(self) -> None:
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        with (
            pytest.raises(OutOfDeviceMemory, match="out of device memory: weights 1.00 kB"),
            explained(lambda: plan(1250)),
        ):
            raise error

    def test_other_errors_pass(self) -> None:
        with (
            pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
            explained(lambda: plan(1250)),
        ):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")
