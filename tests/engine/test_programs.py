"""The compiled programs: donation in the HLO, device-resident state, buckets and the guard."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, OutOfDeviceMemory, RecompilationError
from deinfer_jax.engine import programs
from deinfer_jax.engine.buckets import Buckets, fit, powers_of_two
from deinfer_jax.engine.memory import MemoryPlan
from deinfer_jax.engine.request import Request, Sampling
from deinfer_jax.engine.sampler import NOT_A_NUMBER, Drawn
from deinfer_jax.engine.scheduler import DecodeStep, PrefillStep

PROGRAMS = [("prefill", 32, 8), ("decode", 4, 8), ("logits", 32, 8), ("score", 32, 8)]


@pytest.fixture(scope="module")
def llm(load_tiny) -> LLM:
    return load_tiny(decode_steps=4)


def pool_type(llm: LLM) -> str:
    return "f32[" + ",".join(map(str, llm.runner.pools[0].full.shape)) + "]"


@pytest.fixture(scope="module")
def single(load_tiny) -> LLM:
    return load_tiny(decode_steps=1)


@pytest.fixture(
    scope="module",
    params=[
        (key, steps) for key in PROGRAMS for steps in (1, 4) if steps == 4 or key[0] == "decode"
    ],
    ids=lambda param: f"{param[0][0]}-{param[1]}",
)
def compiled(request: pytest.FixtureRequest, llm: LLM, single: LLM) -> Any:
    key, steps = request.param
    return (llm if steps == 4 else single).runner.executable(key)


class TestDonation:
    def test_every_pool_is_aliased(self, llm: LLM, compiled: Any) -> None:
        text = compiled.as_text()
        header = text.splitlines()[0]
        aliases = {
            int(parameter): int(output)
            for output, parameter in re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)
        }
        entry = text[text.index("\nENTRY") :]
        pools = re.findall(
            rf"= {re.escape(pool_type(llm))}\S* parameter\((\d+)\),.*metadata=\S*pools", entry
        )
        assert len(pools) == 2
        # The first outputs are the pools, in order.
        assert [aliases.get(number) for number in sorted(map(int, pools))] == [0, 1]

    def test_no_pool_is_copied(self, llm: LLM, compiled: Any) -> None:
        copies = re.findall(
            rf"= {re.escape(pool_type(llm))}\S* copy(?:-start)?\(", compiled.as_text()
        )
        assert copies == []

    def test_temporaries_hold_no_second_pool(self, llm: LLM, compiled: Any) -> None:
        # The program reads 8 pages a row, and the pools have 32: a copy would show.
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * llm.runner.pools[0].full.nbytes

    @pytest.mark.parametrize("key", [PROGRAMS[0], PROGRAMS[1]], ids=lambda key: key[0])
    def test_state_is_aliased(self, llm: LLM, key: tuple[str, int, int]) -> None:
        state = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.state))
        pools = sum(pool.nbytes for pool in jax.tree.leaves(llm.runner.pools))
        analysis = llm.runner.executable(key).memory_analysis()
        assert analysis is not None and analysis.alias_size_in_bytes == pools + state

    def test_the_old_buffers_are_gone_after_a_step(self, llm: LLM) -> None:
        before = jax.tree.leaves((llm.runner.pools, llm.runner.state))
        deinfer_jax.generate(llm, [5, 6, 7], max_new_tokens=2)
        assert all(array.is_deleted() for array in before)


def start(llm: LLM, prompt: list[int], slot: int, pages: list[int], **sampling: Any) -> Request:
    request = Request(prompt, Sampling(max_new_tokens=9, **sampling))
    request.slot, request.pages = slot, pages
    return request


class TestState:
    @pytest.fixture
    def prefilled(self, llm: LLM) -> tuple[Request, int]:
        # Tables that name page 7, so that one sees whose entries change.
        state = programs.empty_state(4, 8)
        tables = jnp.full_like(state.block_tables, 7)
        llm.runner.state = replace(state, block_tables=tables)
        request = start(
            llm, [5, 6, 7], 2, [4, 1], temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=8
        )
        token = llm.runner.prefill(PrefillStep(request, 0, 3, True))
        return request, int(token.tokens[0])

    def test_prefill_sets_the_slot_up(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        state = jax.device_get(llm.runner.state)
        assert state.tokens[2] == prefilled[1]
        assert (state.lengths[2], state.limits[2]) == (3, 11)
        assert state.block_tables[2].tolist() == [4, 1, *[0] * 6]

    def test_prefill_sets_the_parameters(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        sampling = jax.device_get(llm.runner.state).sampling
        assert sampling.temperature[2] == 0.5
        assert sampling.top_k[2] == 3
        assert sampling.top_p[2] == 0.75
        assert sampling.min_p[2] == 0.25

    def test_prefill_touches_no_other_slot(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        state = jax.device_get(llm.runner.state)
        others = [0, 1, 3]
        assert not state.tokens[others].any() and not state.limits[others].any()
        assert (state.block_tables[others] == 7).all()

    def test_decode_advances_the_slot(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        request, _ = prefilled
        drawn = np.asarray(llm.runner.decode(DecodeStep((request,), (7,))).tokens)
        state = jax.device_get(llm.runner.state)
        assert state.lengths.tolist() == [0, 0, 7, 0]
        assert state.tokens[2] == drawn[3, 0]

    def test_rows_stop_at_their_limit(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        request, _ = prefilled
        llm.runner.decode(DecodeStep((request,), (7,)))
        llm.runner.decode(DecodeStep((request,), (11,)))
        drawn = np.asarray(llm.runner.decode(DecodeStep((request,), (11,))).tokens)
        assert (drawn[:, 0] == programs.IDLE).all()
        assert jax.device_get(llm.runner.state).lengths[2] == 11

    @pytest.mark.parametrize("new", range(1, 8))
    def test_a_dispatch_stops_inside_at_the_limit(self, llm: LLM, single: LLM, new: int) -> None:
        # Of the four tokens of a dispatch, a row runs those that it has left.
        request = Request([5, 6, 7], Sampling(max_new_tokens=new))
        request.slot, request.pages = 1, [2]
        found = []
        for one, dispatches in ((llm, 2), (single, 8)):
            one.runner.prefill(PrefillStep(request, 0, 3, True))
            step = DecodeStep((request,), (min(3 + new, 10),))
            drawn = [np.asarray(one.runner.decode(step).tokens) for _ in range(dispatches)]
            found.append(np.concatenate(drawn)[:, 0].tolist())
            assert jax.device_get(one.runner.state).lengths[1] == 3 + new - 1
        several, one_at_a_time = found
        assert several == one_at_a_time
        assert several[new - 1 :] == [programs.IDLE] * (8 - (new - 1))
        assert programs.IDLE not in several[: new - 1]

    def test_padding_rows_are_idle(self, llm: LLM, prefilled: tuple[Request, int]) -> None:
        drawn = np.asarray(llm.runner.decode(DecodeStep((prefilled[0],), (7,))).tokens)
        assert drawn.shape == (4, 2) and (drawn[:, 1] == programs.IDLE).all()

    def test_the_host_sends_slot_numbers_and_new_pages_only(
        self, llm: LLM, prefilled: tuple[Request, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[Any] = []
        run = llm.runner._run

        def spy(key: Any, *arguments: Any) -> Any:
            sent.extend(
                leaf for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, jax.Array)
            )
            return run(key, *arguments)

        monkeypatch.setattr(llm.runner, "_run", spy)
        request = prefilled[0]
        llm.runner.decode(DecodeStep((request,), (7,)))
        assert [array.tolist() for array in sent] == [[2, 4], [0, 0], [[-1], [-1]]]
        sent.clear()
        request.pages.append(6)
        llm.runner.decode(DecodeStep((request,), (11,)))
        assert [array.tolist() for array in sent] == [[2, 4], [2, 0], [[6], [-1]]]
        table = jax.device_get(llm.runner.state).block_tables[2]
        assert table.tolist() == [4, 1, 6, *[0] * 5]
        sent.clear()
        llm.runner.decode(DecodeStep((request,), (11,)))  # sent once
        assert [array.tolist() for array in sent] == [[2, 4], [0, 0], [[-1], [-1]]]


class TestBrokenRows:
    """A row whose logits are not numbers stops on the device, before the host has seen it."""

    @pytest.fixture(scope="class")
    @classmethod
    def broken(cls, load_tiny) -> LLM:
        llm = load_tiny(decode_steps=4)
        table = llm.runner.weights["embedding"]["weight"]
        llm.runner.weights["embedding"]["weight"] = table.at[7].set(jnp.nan)
        return llm

    def test_after_a_prompt(self, broken: LLM) -> None:
        request = start(broken, [5, 7, 6], 1, [3])
        token = broken.runner.prefill(PrefillStep(request, 0, 3, True))
        assert int(token.tokens[0]) == NOT_A_NUMBER
        drawn = np.asarray(broken.runner.decode(DecodeStep((request,), (7,))).tokens)
        assert (drawn[:, 0] == programs.IDLE).all()

    def test_while_decoding(self, broken: LLM) -> None:
        request = start(broken, [5, 6], 1, [3])  # the other test's page, which holds NaN
        broken.runner.prefill(PrefillStep(request, 0, 2, True))
        state: Any = broken.runner.state
        broken.runner.state = replace(state, tokens=state.tokens.at[1].set(7))
        drawn = np.asarray(broken.runner.decode(DecodeStep((request,), (6,))).tokens)
        assert drawn[:, 0].tolist() == [NOT_A_NUMBER, *[programs.IDLE] * 3]


@pytest.mark.parametrize("sampling", [dict(), dict(temperature=0.9, top_p=0.9)], ids=str)
def test_several_steps_a_dispatch_give_the_same_tokens(
    llm: LLM, single: LLM, sampling: Any
) -> None:
    prompts = [[5], list(range(3, 40)), [9, 8, 7], [11] * 15, [20, 21]]
    results = [
        deinfer_jax.generate(one, prompts, max_new_tokens=11, ignore_eos=True, **sampling)
        for one in (llm, single)
    ]
    several, one_at_a_time = ([c.token_ids for c in completions] for completions in results)
    assert several == one_at_a_time


@pytest.fixture(scope="module")
def warm(load_tiny, config) -> LLM:
    one_layer = config.replace(num_layers=1, windows=())
    llm = load_tiny(config=one_layer, max_context=256, max_batch=3, prefill_chunk=64)
    llm.warm_up(progress=False)
    return llm


class TestWarmUp:
    def test_every_program_is_compiled_once(self, warm: LLM) -> None:
        keys = set(warm.runner.buckets.programs())
        assert warm.runner.compilations >= len(keys)
        assert keys <= set(warm.runner._executables)

    def test_again_compiles_nothing(self, warm: LLM) -> None:
        compiled = warm.runner.compilations
        warm.warm_up(progress=False)
        assert warm.runner.compilations == compiled

    def test_a_program_that_does_not_fit(self, load_tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = load_tiny(max_batch=2, max_context=64)
        sizes = dict(weights=10, cache=20, available=40, bytes_per_sequence=7)
        monkeypatch.setattr(
            llm.runner, "_plan", lambda temporaries: MemoryPlan(temporaries=temporaries, **sizes)
        )
        with pytest.raises(OutOfDeviceMemory, match="weights 10 bytes, cache 20 bytes"):
            llm.warm_up(progress=False)
        assert llm.runner.compilations == 0


class TestGuard:
    def test_serving_compiles_nothing_more(self, warm: LLM) -> None:
        compiled = warm.runner.compilations
        for lengths in ([1], [200, 3, 70], [64, 65, 127, 128, 129], [31, 32, 33, 247]):
            prompts = [[7] * length for length in lengths]
            deinfer_jax.generate(warm, prompts, max_new_tokens=9, ignore_eos=True)
        assert warm.runner.compilations == compiled > 0

    def test_logits_are_still_allowed(self, warm: LLM) -> None:
        assert warm.logits([5, 6, 7]).shape == (3, 97)

    def test_a_missing_program_is_an_error(self, warm: LLM) -> None:
        with pytest.raises(
            RecompilationError, match="decode with 2 rows and 5 pages was not compiled"
        ):
            warm.runner.executable(("decode", 2, 5))

    def test_the_guard_can_be_switched_off(self, warm: LLM) -> None:
        compiled = warm.runner.compilations
        warm.recompilation_guard = False
        warm.runner.executable(("decode", 2, 5))
        warm.recompilation_guard = True
        assert warm.runner.compilations == compiled + 1

    def test_no_guard_before_the_warm_up(self, llm: LLM) -> None:
        llm.runner.executable(("decode", 2, 8))


class TestBuckets:
    @pytest.mark.parametrize(
        ("low", "high", "sizes"),
        [
            (2, 8, (2, 4, 8)),
            (2, 9, (2, 4, 8, 9)),
            (2, 2, (2,)),
            (1, 1, (1,)),
            (3, 20, (3, 6, 12, 20)),
            (16, 8, (8,)),
        ],
    )
    def test_powers_of_two(self, low: int, high: int, sizes: tuple[int, ...]) -> None:
        assert powers_of_two(low, high) == sizes

    @pytest.mark.parametrize(("value", "bucket"), [(1, 2), (2, 2), (3, 5), (5, 5), (6, 9)])
    def test_fit(self, value: int, bucket: int) -> None:
        assert fit(value, (2, 5, 9)) == bucket

    def test_fit_with_clip(self) -> None:
        assert fit(10, (2, 5, 9), clip=True) == 9

    def test_fit_of_too_much(self) -> None:
        with pytest.raises(ValueError, match="at most 9, got 10"):
            fit(10, (2, 5, 9))

    @pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 13, 64])
    def test_batch(self, max_batch: int) -> None:
        buckets = Buckets.choose(
            max_batch=max_batch, max_context=100, prefill_chunk=32, page_size=16, decode_steps=1
        )
        assert min(buckets.batch) == 2  # with one row a CPU takes another routine
        assert max(buckets.batch) == max(2, max_batch)

    @pytest.mark.parametrize("decode_steps", [1, 8])
    def test_steps(self, decode_steps: int) -> None:
        buckets = Buckets.choose(
            max_batch=2,
            max_context=100,
            prefill_chunk=32,
            page_size=16,
            decode_steps=decode_steps,
        )
        assert buckets.decode_steps == decode_steps
        kinds = [key[0] for key in buckets.programs()]
        assert kinds.count("decode") == len(buckets.batch) * len(buckets.pages)

    @pytest.mark.parametrize("max_context", [1, 5, 16, 33, 100, 500, 2048, 3000])
    @pytest.mark.parametrize("prefill_chunk", [1, 7, 32, 100, 512])
    @pytest.mark.parametrize("page_size", [16, 64, 128])
    def test_every_request_size_is_covered(
        self, max_context: int, prefill_chunk: int, page_size: int
    ) -> None:
        buckets = Buckets.choose(
            max_batch=3,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            page_size=page_size,
            decode_steps=4,
        )
        assert buckets.chunk[-1] == min(prefill_chunk, max_context)
        assert buckets.pages[-1] == -(-max_context // page_size)
        existing = set(buckets.programs())
        for tokens in range(1, max_context + 1):  # in the cache after the step
            length = (tokens - 1) % buckets.chunk[-1] + 1
            rows, pages = buckets.for_chunk(length, tokens)
            assert rows >= length and pages * page_size >= tokens
            assert ("prefill", rows, pages) in existing
            decode_pages = min(p for p in buckets.pages if p * page_size >= tokens)
            assert ("decode", 2, decode_pages) in existing

    def test_no_program_twice(self) -> None:
        buckets = Buckets.choose(
            max_batch=13, max_context=3000, prefill_chunk=500, page_size=16, decode_steps=4
        )
        keys = list(buckets.programs())
        assert len(set(keys)) == len(keys)

    def test_the_number_of_programs_is_moderate(self) -> None:
        # What a GPU compiles by default for a context of 8192.
        buckets = Buckets.choose(
            max_batch=64, max_context=8192, prefill_chunk=2048, page_size=64, decode_steps=8
        )
        assert len(list(buckets.programs())) <= 80

    @pytest.mark.parametrize(
        "options",
        [
            dict(max_context=130, prefill_chunk=40),
            dict(max_context=250, prefill_chunk=512),
            dict(max_context=250, prefill_chunk=64, page_size=32),
            dict(max_context=9, prefill_chunk=4),
        ],
        ids=str,
    )
    def test_the_runner_asks_for_programs_that_exist(
        self, load_tiny, options: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = load_tiny(**options)
        runner, size = llm.runner, llm.cache_layout.page_size
        asked = set()

        def record(key: Any, *arguments: Any) -> Any:
            asked.add(key)
            return runner.pools, runner.state, Drawn(None, None, None, None)

        monkeypatch.setattr(runner, "_run", record)
        chunk = llm.core.scheduler.prefill_chunk
        for tokens in range(1, llm.max_context + 1):
            request = start(llm, [3] * tokens, 0, list(range(-(-tokens // size))))
            begin = (tokens - 1) // chunk * chunk
            runner.prefill(PrefillStep(request, begin, tokens - begin, True))
            for batch in range(1, 5):
                runner.decode(DecodeStep((request,) * batch, (tokens,) * batch))
        assert asked <= set(runner.buckets.programs())


@pytest.mark.parametrize("key", PROGRAMS, ids=lambda key: key[0])
@pytest.mark.parametrize(("dtype", "highest"), [("float32", True), ("bfloat16", False)])
def test_products_of_float32_are_full_precision(
    load_tiny, monkeypatch: pytest.MonkeyPatch, key: Any, dtype: str, highest: bool
) -> None:
    # A GPU would take TensorFloat-32 for them otherwise. The precision is in the StableHLO.
    texts: list[str] = []
    compile_lowered = jax.stages.Lowered.compile

    def spy(lowered: Any, *arguments: Any, **options: Any) -> Any:
        texts.append(lowered.as_text())
        return compile_lowered(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    load_tiny(decode_steps=4, dtype=dtype).runner.executable(key)
    (text,) = (text for text in texts if f"@jit_{key[0]}" in text.splitlines()[0])
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 2 * (4 + 2)  # qkv, o, gate and up, down, and attention itself
    exact = ["precision = [HIGHEST, HIGHEST]" in line for line in products]
    assert exact == [highest] * len(products)


def test_empty_state_is_idle() -> None:
    state = jax.device_get(programs.empty_state(3, 5))
    assert state.block_tables.shape == (3, 5) and state.keys.shape == (3, 2)
    assert (state.lengths >= state.limits).all()


def test_a_program_that_does_not_fit_says_what_it_needs(
    load_tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_tiny(max_batch=2, max_context=64).runner

    def plan(temporaries: int) -> MemoryPlan:
        return MemoryPlan(
            weights=10, cache=20, temporaries=temporaries, available=40, bytes_per_sequence=7
        )

    monkeypatch.setattr(runner, "_plan", plan)
    with pytest.raises(OutOfDeviceMemory, match="weights 10 bytes, cache 20 bytes"):
        runner.executable(("decode", 2, 4))
