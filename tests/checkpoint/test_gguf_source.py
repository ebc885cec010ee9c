"""What a GGUF file offers to a decomposition: tensors by name, a config.json, a hash."""

import hashlib
import json

import numpy as np
import pytest

from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.config import ModelConfig, RopeConfig

Q = "model.layers.1.self_attn.q_proj.weight"


def test_tensors_by_name(write_gguf, tiny_weights):
    weights, checkpoint = tiny_weights(), open_checkpoint(write_gguf(tiny_weights()))
    names = ["lm_head.weight", Q, "model.norm.weight"]
    read = dict(checkpoint.tensors(names))
    assert list(read) == [name for name in checkpoint.shapes() if name in names]
    for name, array in read.items():
        np.testing.assert_array_equal(array, weights[name])  # q in Hugging Face's order of rows
        assert array.flags.writeable


def test_a_quantised_tensor_by_name(write_gguf, tiny_weights):
    checkpoint = open_checkpoint(write_gguf(tiny_weights(), matrix_type="Q8_0"))
    np.testing.assert_array_equal(checkpoint.tensor(Q), dict(checkpoint.tensors())[Q])


def test_unknown_tensors_are_named(write_gguf, tiny_weights):
    checkpoint = open_checkpoint(write_gguf(tiny_weights()))
    with pytest.raises(ValueError, match=r"tiny.gguf: there are no tensors blk.0.attn_q.weight$"):
        checkpoint.tensor("blk.0.attn_q.weight")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_config_json_says_the_same(write_gguf, tiny_weights, arch):
    weights = tiny_weights(bias=arch == "qwen2", qk_norm=arch == "qwen3", head=False)
    checkpoint = open_checkpoint(write_gguf(weights, arch))
    hf = json.loads(json.dumps(checkpoint.hf_config()))
    assert hf["model_type"] == arch and "deinfer" not in hf
    assert ModelConfig.from_hf(hf) == checkpoint.config
    assert checkpoint.generation_config() is None


def test_divisors_of_the_frequencies_stand_under_a_key_of_ours(write_gguf, tiny_weights):
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    path = write_gguf(tiny_weights(), tensors={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(path)
    hf = json.loads(json.dumps(checkpoint.hf_config()))
    assert hf["deinfer"].keys() == {"rope"}
    read = ModelConfig.from_hf(hf)
    assert read == checkpoint.config
    assert read.rope == RopeConfig(theta=50000.0, divisors=tuple(map(float, divisors)))


def test_hash_is_that_of_the_file(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights())
    assert open_checkpoint(path).sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
