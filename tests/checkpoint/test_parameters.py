"""Loading streams: what it costs on the host, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import deinfer_jax
from tests import tiny

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

# In a process of its own, since the peak of a process never falls. What a load imports or compiles
# is in place before the measurement begins; bytes are those of the process, from the kernel.
MEASURE = """
import resource, sys
import jax
import deinfer_jax

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large, dtype = sys.argv[1:]
with deinfer_jax.load(small, dtype=dtype, max_context=128, max_batch=1):
    pass
before = peak()
llm = deinfer_jax.load(large, dtype=dtype, max_context=128, max_batch=1)
plan = llm.memory_plan()
print(peak() - before, plan.weights, plan.cache)
"""


def write_sharded(directory: Path, config: dict[str, object], shards: int) -> int:
    """A random bfloat16 checkpoint in ``shards`` files; returns the largest file's bytes."""
    import ml_dtypes

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint_config = deinfer_jax.ModelConfig.from_hf(config)
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {}
    D, F = checkpoint_config.hidden_size, checkpoint_config.intermediate_size
    N = checkpoint_config.num_heads * checkpoint_config.head_dim
    K = checkpoint_config.num_kv_heads * checkpoint_config.head_dim
    shapes["model.embed_tokens.weight"] = (checkpoint_config.vocab_size, D)
    shapes["model.norm.weight"] = (D,)
    for layer in range(checkpoint_config.num_layers):
        block = f"model.layers.{layer}"
        rows = {"q_proj": N, "k_proj": K, "v_proj": K}
        shapes |= {f"{block}.self_attn.{name}.weight": (rows[name], D) for name in rows}
        shapes[f"{block}.self_attn.o_proj.weight"] = (D, N)
        shapes |= {f"{block}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (D, F)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{block}.{name}.weight": (D,) for name in norms}
    names = list(shapes)
    index: dict[str, str] = {}
    largest = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        tensors = {
            name: (generator.standard_normal(shapes[name], np.float32) * 0.02).astype(
                ml_dtypes.bfloat16
            )
            for name in mine
        }
        save_file(tensors, directory / file)
        index |= dict.fromkeys(mine, file)
        largest = max(largest, (directory / file).stat().st_size)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # as stored, and widened
def test_host_memory_stays_under_1_3_times_the_parameters_and_a_shard(
    tmp_path: Path, dtype: str
) -> None:
    write_sharded(tmp_path / "small", {**CONFIG, "num_hidden_layers": 1}, 2)
    shard = write_sharded(tmp_path / "large", {**CONFIG, "num_hidden_layers": 24}, 6)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, weights, cache = map(int, run.stdout.split())
    assert weights > 150e6  # large enough that allocators' habits do not decide
    print(f"host grew by {grown / weights:.2f} × the parameters' bytes")
    assert grown - cache < 1.3 * weights + shard


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    tiny.make("gqa", tmp_path)
    return tmp_path


def change(directory: Path, **tensors: np.ndarray | None) -> None:
    """Replaces tensors of a checkpoint; None takes one away. Dots in names are written __."""
    held = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, directory / "model.safetensors")


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Path) -> None:
    change(checkpoint, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(
        ValueError, match=r"missing tensor model\.layers\.1\.self_attn\.k_proj\.weight \[16, 48\]"
    ):
        deinfer_jax.load(checkpoint)


def test_a_tensor_of_the_wrong_shape_is_named_with_both(checkpoint: Path) -> None:
    change(checkpoint, model__layers__0__mlp__up_proj__weight=np.zeros((81, 48), np.float32))
    with pytest.raises(
        ValueError, match=r"up_proj\.weight: expected shape \[80, 48\], got \[81, 48\]"
    ):
        deinfer_jax.load(checkpoint)


def test_a_tensor_that_the_model_does_not_have_is_named(checkpoint: Path) -> None:
    change(checkpoint, model__layers__0__self_attn__k_norm__weight=np.ones(8, np.float32))
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.0\.self_attn\.k_norm"):
        deinfer_jax.load(checkpoint)


def test_all_problems_are_listed_at_once(checkpoint: Path) -> None:
    change(
        checkpoint,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=np.zeros((81, 48), np.float32),
    )
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*up_proj\.weight"):
        deinfer_jax.load(checkpoint)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named_with_a_count(checkpoint: Path, value: float) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    broken = weights["model.layers.1.self_attn.v_proj.weight"].copy()
    broken[3, 5] = broken[7, 1] = value
    change(checkpoint, model__layers__1__self_attn__v_proj__weight=broken)
    with pytest.raises(
        ValueError,
        match=rf"^{re.escape(str(checkpoint))}: tensor model\.layers\.1\.self_attn\.v_proj\.weight"
        r": 2 of 768 values are NaN or infinite as float32 \(stored as F32\)$",
    ):
        deinfer_jax.load(checkpoint)


def test_values_beyond_float16_are_named_with_both_types(checkpoint: Path) -> None:
    large = np.ones(48, np.float32)
    large[[3, 9, 11]] = 7e4
    change(checkpoint, model__norm__weight=large)
    with pytest.raises(
        ValueError,
        match=rf"^{re.escape(str(checkpoint))}: tensor model\.norm\.weight: 3 of 48 values are NaN "
        r"or infinite as float16 \(stored as F32\)$",
    ):
        deinfer_jax.load(checkpoint, dtype="float16")


def test_large_finite_values_are_not_taken_for_infinity(checkpoint: Path) -> None:
    # Their float32 sum overflows, which alone proves nothing.
    change(checkpoint, model__norm__weight=np.full(48, 3e38, np.float32))
    deinfer_jax.load(checkpoint).close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_equal_the_file_in_each_dtype(checkpoint: Path, dtype: str) -> None:
    held = load_file(checkpoint / "model.safetensors")
    with deinfer_jax.load(checkpoint, dtype=dtype) as llm:
        qkv = np.asarray(llm.runner.weights["layers"][1]["attention"]["qkv"]["w"])
    names = [f"model.layers.1.self_attn.{short}_proj.weight" for short in "qkv"]
    expected = np.concatenate([held[name] for name in names]).astype(qkv.dtype)
    assert qkv.dtype.name == dtype
    np.testing.assert_array_equal(qkv, expected)
