"""``load`` and ``close`` as a user sees them."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, LowRank, OutOfDeviceMemory, RopeConfig, Slice
from tests import tiny
from tests.engine.helpers import (
    prompts,
    run,
)

load_module = importlib.import_module("deinfer_jax.engine.load")  # the name is the function's, too

# option, value, message
BAD_LOADS: list[tuple[str, Any, str]] = [
    ("strategy", "magic", "strategy: expected 'auto'.*got 'magic'"),
    ("tensor_parallel", 9, "tensor_parallel: expected at most 8, the cpu devices.*got 9"),
    ("tensor_parallel", 0, "tensor_parallel: expected a positive number.*got 0"),
    ("tensor_parallel", True, "tensor_parallel: expected a positive number.*got True"),
    ("kv_cache", "paged", "kv_cache.*got 'paged'"),
    ("kv_cache", "latent", "kv_cache: expected a model with a decomposed k_proj or v_proj"),
    ("dtype", "int8", "dtype: expected one of float32, bfloat16, float16.*got 'int8'"),
    ("max_batch", 0, "max_batch: expected a positive.*got 0"),
    ("max_context", -1, "max_context: expected a positive.*got -1"),
    ("max_context", 257, r"max_context: expected 2 to 256 .*got 257"),
    ("max_context", 1, r"max_context: expected 2 to 256 .*got 1"),
    ("page_size", 16.0, r"page_size: expected one of \(16, 32, 64, 128\), got 16.0"),
    ("cache_bytes", 0, "cache_bytes: expected a positive.*got 0"),
    ("cache_bytes", 1e6, "cache_bytes: expected a positive.*got 1000000.0"),
    ("prefill_chunk", "32", "prefill_chunk: expected a positive.*got '32'"),
    ("decode_steps", 2.5, "decode_steps: expected a positive.*got 2.5"),
    ("page_size", 24, r"page_size: expected one of \(16, 32, 64, 128\), got 24"),
    ("page_size", 0, r"page_size: expected one of \(16, 32, 64, 128\), got 0"),
    ("cache_bytes", 100, "cache_bytes: expected at least 4096 .*got 100"),
    ("cache_bytes", 4095, "cache_bytes: expected at least 4096 .*got 4095"),
    ("max_batch", 2.0, "max_batch: expected a positive.*got 2.0"),
    ("max_batch", True, "max_batch: expected a positive.*got True"),
    ("max_context", 32.5, "max_context: expected a positive.*got 32.5"),
    ("prefill_chunk", 0, "prefill_chunk: expected a positive.*got 0"),
    ("decode_steps", 0, "decode_steps: expected a positive.*got 0"),
    ("implementation", "cuda", "implementation: expected 'reference'.*got 'cuda'"),
]


class TestLoad:
    @pytest.mark.parametrize(("option", "value", "message"), BAD_LOADS)
    def test_bad_option(self, config, unchecked, option: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            deinfer_jax.load(config, **{option: value})

    @pytest.mark.parametrize("max_context", [2, 256])
    def test_the_bounds_of_the_context(self, config, max_context: int) -> None:
        with deinfer_jax.load(config, max_context=max_context, max_batch=2) as llm:
            prompt = [5] * (max_context - 1)
            (done,) = deinfer_jax.generate(llm, prompt, max_new_tokens=1)
            assert len(done.token_ids) == 1

    def test_dynamic_rope_goes_beyond_the_model_but_not_below_two(self, config) -> None:
        rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position=256)
        with deinfer_jax.load(config.replace(rope=rope), max_context=300, max_batch=2) as llm:
            assert llm.max_context == 300
        with pytest.raises(ValueError, match="max_context: expected at least 2, got 1"):
            deinfer_jax.load(config.replace(rope=rope), max_context=1)

    def test_low_rank_of_a_module_that_the_model_lacks(self, config) -> None:
        low_rank = LowRank((("model.layers.9.mlp.up_proj", Slice(v="v", offset=0, rank=3)),))
        with pytest.raises(ValueError, match="low_rank: the model has no modules model.layers.9"):
            deinfer_jax.load(config.replace(low_rank=low_rank))

    def test_integers_of_numpy(self, config, unchecked) -> None:
        sizes: dict[str, Any] = dict(max_batch=3, max_context=64, prefill_chunk=16, decode_steps=2)
        sizes = {name: np.int64(size) for name, size in sizes.items()}
        with deinfer_jax.load(config, **sizes) as llm:
            assert (llm.max_batch, llm.max_context) == (3, 64)
            assert len(run(llm, [5, 6], new=5)[0]) == 5

    def test_unknown_option(self, config) -> None:
        with pytest.raises(TypeError, match="max_contxt"):
            deinfer_jax.load(config, max_contxt=3)  # pyright: ignore[reportCallIssue]

    def test_unknown_family(self, config) -> None:
        with pytest.raises(ValueError, match="family: expected one of llama, got 'gpt'"):
            deinfer_jax.load(config.replace(family="gpt"))

    def test_unknown_activation(self, config) -> None:
        with pytest.raises(ValueError, match="hidden_act: expected one of .*silu, got 'mish'"):
            deinfer_jax.load(config.replace(hidden_act="mish"))

    def test_no_such_path(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError, match="nothing-here"):
            deinfer_jax.load(tmp_path / "nothing-here")

    def test_an_implementation_that_an_op_lacks(self, config) -> None:
        with pytest.raises((NotImplementedError, ValueError), match="mosaic_gpu"):
            deinfer_jax.load(config, implementation="mosaic_gpu", max_context=32)

    def test_defaults(self, config) -> None:
        with deinfer_jax.load(config) as llm:
            assert (llm.max_batch, llm.max_context) == (8, 256)
            assert llm.cache_layout.page_size == 16
            assert llm.cache_layout.dtype == "float32"
            assert llm.runner.num_pages == 8 * 16

    def test_options(self, config) -> None:
        with deinfer_jax.load(
            config, max_batch=3, max_context=100, page_size=32, dtype="bfloat16", kv_cache="full"
        ) as llm:
            assert (llm.max_batch, llm.max_context) == (3, 100)
            assert llm.runner.pools[0].full.shape == (12, 2, 2, 32, 8)
            arrays = jax.tree.leaves((llm.runner.weights, llm.runner.pools))
            assert {array.dtype.name for array in arrays} == {"bfloat16"}

    def test_the_context_shrinks_to_the_cache(self, config) -> None:
        with deinfer_jax.load(config, cache_bytes=6 * 4096) as llm:
            assert llm.max_context == 6 * 16

    def test_a_long_context_shrinks_to_the_default_cache(self, config) -> None:
        # 4096 bytes a page: what is asked for would take 1.6 GB.
        with deinfer_jax.load(config.replace(max_position=10**5), max_batch=64) as llm:
            layout = llm.cache_layout
            assert layout.bytes_per_page * llm.runner.num_pages <= 512 * 10**6
            assert llm.max_context == 10**5

    def test_seeds_give_other_weights(self, config) -> None:
        found = []
        for seed in (0, 0, 1):
            with deinfer_jax.load(config, max_context=32, seed=seed) as llm:
                found.append(np.asarray(llm.runner.weights["embedding"]["weight"]))
        np.testing.assert_array_equal(found[0], found[1])
        assert not np.array_equal(found[0], found[2])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_generates(self, load_tiny, dtype: str) -> None:
        half = load_tiny(dtype=dtype)
        assert [len(ids) for ids in run(half, prompts(), new=5)] == [5] * 11

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_logits_of_half_precision(self, load_tiny, dtype: str) -> None:
        assert load_tiny(dtype=dtype).logits([5, 6, 7]).dtype == np.float32

    def test_max_batch_of_one(self, load_tiny, llm: LLM) -> None:
        single = load_tiny(max_batch=1)
        assert run(single, prompts()[:3], new=5) == run(llm, prompts()[:3], new=5)

    def test_out_of_device_memory_is_a_public_name(self) -> None:
        assert issubclass(OutOfDeviceMemory, MemoryError)


MIB = 2**20


class TestMemory:
    """The whole plan is checked before any weight is made or read."""

    @pytest.fixture
    def offers(self, monkeypatch: pytest.MonkeyPatch):
        """Makes ``load`` see a device of so many bytes; weights may not be touched any more if the
        plan does not fit."""

        def offer(available: int | None, *, touch: bool) -> None:
            monkeypatch.setattr(load_module, "available_bytes", lambda device: available)
            if not touch:
                for name in ("random_parameters", "load_parameters"):
                    monkeypatch.setattr(load_module, name, refuse)

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("weights before the plan was checked")

        return offer

    def test_weights_that_do_not_fit(self, config, offers) -> None:
        offers(10_000, touch=False)
        with pytest.raises(OutOfDeviceMemory, match="weights .*cache .*temporaries .*offers"):
            deinfer_jax.load(config)

    def test_a_cache_that_does_not_fit(self, config, offers) -> None:
        # 4096 bytes a page; what is asked for is taken as it is, and then refused.
        offers(8 * MIB, touch=False)
        with pytest.raises(OutOfDeviceMemory, match=rf"cache .*\({2048 * 4096} bytes\)"):
            deinfer_jax.load(config, max_batch=128, cache_bytes=2048 * 4096)

    def test_temporaries_that_do_not_fit(self, config, offers) -> None:
        offers(8 * MIB, touch=False)
        long = config.replace(max_position=2**16)
        with pytest.raises(OutOfDeviceMemory, match="temporaries .*the device offers"):
            deinfer_jax.load(long, max_context=2**14, max_batch=1, prefill_chunk=512)

    def test_a_checkpoint_that_does_not_fit(self, tmp_path: Path, offers) -> None:
        pytest.importorskip("torch")
        tiny.make("gqa", tmp_path)
        offers(10_000, touch=False)
        with pytest.raises(OutOfDeviceMemory, match="weights"):
            deinfer_jax.load(tmp_path)

    def test_a_default_context_shrinks_to_the_device(self, config, offers) -> None:
        offers(24 * MIB, touch=True)
        with deinfer_jax.load(config.replace(max_position=2**17), prefill_chunk=32) as llm:
            assert 512 <= llm.max_context < 2**17
            assert llm.max_context & (llm.max_context - 1) == 0
            assert len(run(llm, [5, 6], new=5)[0]) == 5
            plan = llm.memory_plan()
            assert plan.weights + plan.cache + plan.temporaries <= 24 * MIB

    def test_an_allocation_of_weights_that_fails(
        self, config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

        monkeypatch.setattr(load_module, "random_parameters", fail)
        with pytest.raises(OutOfDeviceMemory, match="^out of device memory: weights .*cache"):
            deinfer_jax.load(config)


class TestTokenizer:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkpoint whose weights may not be read."""
        pytest.importorskip("torch")
        tiny.make("gqa", tmp_path)

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("weights before the tokenizer")

        monkeypatch.setattr(load_module, "load_parameters", refuse)
        return tmp_path

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"version": "1.0"}', '{"model": {"type": "Magic"}}', "\0"], ids=ascii
    )
    def test_one_that_cannot_be_read(self, checkpoint: Path, text: str) -> None:
        (checkpoint / "tokenizer.json").write_text(text)
        (checkpoint / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
        with pytest.raises(ValueError, match="the tokenizer cannot be read: ") as raised:
            deinfer_jax.load(checkpoint)
        assert str(raised.value).startswith(f"{checkpoint}: the tokenizer")

    def test_none_at_all_is_no_error(self, checkpoint: Path) -> None:
        with pytest.raises(AssertionError, match="weights before the tokenizer"):
            deinfer_jax.load(checkpoint)  # goes on to the weights


class TestClose:
    @pytest.fixture
    def closed(self, config) -> LLM:
        llm = deinfer_jax.load(config, max_context=32)
        llm.close()
        return llm

    def test_generate_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            deinfer_jax.generate(closed, [5], max_new_tokens=1)

    def test_logits_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            closed.logits([5])

    def test_warm_up_after_close(self, closed: LLM) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            closed.warm_up()

    def test_close_twice(self, closed: LLM) -> None:
        closed.close()

    def test_device_arrays_are_deleted(self, config) -> None:
        llm = deinfer_jax.load(config, max_context=32)
        runner = llm.runner
        arrays = jax.tree.leaves((runner.weights, runner.pools, runner.state))
        assert not any(array.is_deleted() for array in arrays)
        llm.close()
        assert all(array.is_deleted() for array in arrays)

    def test_context_manager(self, config) -> None:
        with deinfer_jax.load(config, max_context=32) as llm:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            llm.logits([5])

    def test_context_manager_closes_after_an_error(self, config) -> None:
        with pytest.raises(KeyError), deinfer_jax.load(config, max_context=32) as llm:
            raise KeyError
        assert llm.runner.pools[0].full.is_deleted()


def test_loading_says_what_it_did(config, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deinfer_jax"):
        deinfer_jax.load(config, max_batch=2, max_context=32).close()
    assert "random weights" in caplog.text and "4 pages of 16 tokens" in caplog.text
