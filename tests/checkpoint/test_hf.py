"""Hugging Face directories: what is read, and what is said of damaged ones."""

import json
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deinfer_jax.checkpoint import open_checkpoint, tokenizer_sha256

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": "float32",
    "eos_token_id": 2,
}


def write(path: Path, weights: dict[str, np.ndarray], shards: int = 1, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "np"})
        return path
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::shards]}
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    content = {"metadata": {}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def single(tmp_path, tiny_weights) -> Path:
    return write(tmp_path / "m", tiny_weights())


@pytest.fixture
def sharded(tmp_path, tiny_weights) -> Path:
    return write(tmp_path / "m", tiny_weights(), shards=3)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


# What is read


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_written(tmp_path, tiny_weights, shards):
    weights = tiny_weights()
    read = dict(open_checkpoint(write(tmp_path / "m", weights, shards)).tensors())
    assert read.keys() == weights.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_have_the_dtype_of_the_file(tmp_path, tiny_weights, dtype):
    weights = {name: array.astype(dtype) for name, array in tiny_weights().items()}
    for name, array in open_checkpoint(write(tmp_path / "m", weights)).tensors():
        assert array.dtype == dtype
        np.testing.assert_array_equal(array.view(np.uint8), weights[name].view(np.uint8))


def test_tensors_come_shard_by_shard_in_file_order(sharded):
    offsets = []
    for shard in sorted(sharded.glob("*.safetensors")):
        header, _ = header_of(shard)
        header.pop("__metadata__", None)
        offsets += sorted(header, key=lambda name: header[name]["data_offsets"])
    assert [name for name, _ in open_checkpoint(sharded).tensors()] == offsets


def test_shapes_and_types_come_from_headers(tmp_path, tiny_weights):
    weights = {name: array.astype(np.float16) for name, array in tiny_weights().items()}
    checkpoint = open_checkpoint(write(tmp_path / "m", weights, 3))
    assert checkpoint.shapes() == {name: weights[name].shape for name in checkpoint.shapes()}
    assert set(checkpoint.stored_types().values()) == {"F16"}


@pytest.mark.parametrize(("shards", "text"), [(1, "1 shard"), (3, "3 shards")])
def test_description(tmp_path, tiny_weights, shards, text):
    path = write(tmp_path / "m", tiny_weights(), shards)
    assert open_checkpoint(path).description == f"Hugging Face directory, {text}"


def test_whole_file_wins_over_an_index(sharded, tiny_weights):
    write(sharded, tiny_weights(seed=1))
    read = dict(open_checkpoint(sharded).tensors())
    assert (read["lm_head.weight"] == tiny_weights(seed=1)["lm_head.weight"]).all()


def test_redundant_head_of_tied_embeddings_is_skipped(tmp_path, tiny_weights):
    path = write(tmp_path / "m", tiny_weights(), tie_word_embeddings=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.shapes()
    assert "lm_head.weight" not in dict(checkpoint.tensors())


def test_missing_head_is_named(tmp_path, tiny_weights):
    path = write(tmp_path / "m", tiny_weights(head=False))
    with pytest.raises(
        ValueError, match=r"'lm_head.weight'.*tie_word_embeddings = false, got none"
    ):
        open_checkpoint(path)


def test_decomposed_head_is_a_head(tmp_path, tiny_weights):
    factors = {f"lm_head.{factor}.weight": np.ones((2, 2), np.float32) for factor in ("u", "v")}
    path = write(tmp_path / "m", tiny_weights(head=False) | factors)
    assert factors.keys() < open_checkpoint(path).shapes().keys()


def test_rotary_buffers_are_skipped(tmp_path, tiny_weights):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    path = write(tmp_path / "m", tiny_weights() | buffer, 3)
    assert open_checkpoint(path).shapes().keys() == tiny_weights().keys()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, 2, (7, 2)),
        ({"eos_token_id": [2, 9, 8]}, 2, (2, 9, 8)),
        ({"eos_token_id": [9]}, [2, 9], (9, 2)),
        ({}, 2, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_ids_of_both_configs(single, generation, config, expected):
    (single / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": config}))
    (single / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(single).config.eos_token_ids == expected


def test_dtype_of_the_weights_where_config_is_silent(tmp_path, tiny_weights):
    weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny_weights().items()}
    assert open_checkpoint(write(tmp_path / "m", weights, dtype=None)).config.dtype == "bfloat16"


def test_one_tensor_at_a_time_in_memory(tmp_path):
    size = 1 << 20  # elements of each of 8 tensors, 4 MiB
    weights = {f"lm_head.{i}": np.zeros(size, np.float32) for i in range(8)}
    checkpoint = open_checkpoint(write(tmp_path / "m", weights, 2))
    tracemalloc.start()
    try:
        for _, array in checkpoint.tensors():
            del array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4 * size < peak < 1.5 * 4 * size


def test_same_weights_as_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{name: CONFIG[name] for name in CONFIG if name != "model_type"})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    checkpoint = open_checkpoint(tmp_path)
    read = dict(checkpoint.tensors())
    assert "shards" in checkpoint.description and checkpoint.config.dtype == "bfloat16"
    state = model.state_dict()
    assert read.keys() == state.keys()
    for name, array in read.items():
        expected = state[name].view(torch.int16).numpy()
        np.testing.assert_array_equal(array.view(np.int16), expected, err_msg=name)


def write_tokenizer(path: Path, *words: str, **config: Any) -> None:
    from tokenizers import Tokenizer, models

    ids = {word: i for i, word in enumerate(("<unk>", *words))}
    Tokenizer(models.WordLevel(ids, unk_token="<unk>")).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<unk>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokenizer(single):
    write_tokenizer(single, "hello")
    read = open_checkpoint(single).tokenizer()
    assert read.encode("hello") == [1] and read.eos_token == "<unk>"


def test_hash_of_a_tokenizer_survives_use_and_saving(single, tmp_path):
    write_tokenizer(single, "hello", chat_template="{{ messages }}")
    tokenizer = open_checkpoint(single).tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer.pad_token = "<unk>"
    unchanged = open_checkpoint(single).tokenizer()
    unchanged("hello", truncation=True, max_length=1)
    assert tokenizer_sha256(unchanged) == before != tokenizer_sha256(tokenizer)
    unchanged.save_pretrained(single)
    assert tokenizer_sha256(open_checkpoint(single).tokenizer()) == before


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (("hello", "world"), {}),
        (("world",), {}),
        (("hello",), {"eos_token": None}),
        (("hello",), {"chat_template": "{{ messages }}"}),
    ],
    ids=["more words", "other words", "special tokens", "chat template"],
)
def test_hash_of_another_tokenizer(single, words, config):
    write_tokenizer(single, "hello")
    before = tokenizer_sha256(open_checkpoint(single).tokenizer())
    write_tokenizer(single, *words, **config)
    assert tokenizer_sha256(open_checkpoint(single).tokenizer()) != before


def test_tensors_by_name_come_in_file_order(sharded, tiny_weights):
    weights, checkpoint = tiny_weights(), open_checkpoint(sharded)
    names = ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    read = dict(checkpoint.tensors(names))
    assert list(read) == [name for name in checkpoint.shapes() if name in names]
    for name, array in read.items():
        np.testing.assert_array_equal(array, weights[name])
        assert array.flags.writeable


def test_a_tensor_by_name(sharded, tiny_weights):
    read = open_checkpoint(sharded).tensor("model.layers.0.self_attn.o_proj.weight")
    np.testing.assert_array_equal(read, tiny_weights()["model.layers.0.self_attn.o_proj.weight"])


def test_other_tensors_are_not_read(sharded):
    checkpoint = open_checkpoint(sharded)
    name = next(iter(checkpoint.shapes()))
    for shard in sorted(sharded.glob("*.safetensors"))[1:]:
        shard.unlink()
    assert checkpoint.tensor(name).size


def test_configs_as_they_are_written(single):
    (single / "generation_config.json").write_text('{"eos_token_id": 7, "top_p": 0.5}')
    (single / "config.json").write_text(json.dumps(CONFIG | {"its_own": [1]}))
    checkpoint = open_checkpoint(single)
    assert checkpoint.hf_config() == CONFIG | {"its_own": [1]}
    assert checkpoint.generation_config() == {"eos_token_id": 7, "top_p": 0.5}
    checkpoint.hf_config()["its_own"].append(2)
    assert checkpoint.hf_config()["its_own"] == [1]


def test_no_generation_config(single):
    assert open_checkpoint(single).generation_config() is None


def test_hash_is_that_of_coreutils(sharded):
    (sharded / "generation_config.json").write_text("{}")
    (sharded / "README.md").write_text("no part of the model")
    command = "sha256sum config.json generation_config.json model*.safetensors | sha256sum"
    said = subprocess.run(command, shell=True, cwd=sharded, capture_output=True, text=True).stdout
    assert open_checkpoint(sharded).sha256() == said.split()[0]


@pytest.mark.parametrize("file", ["config.json", "model-00002-of-00003.safetensors"])
def test_hash_depends_on_every_file(sharded, file):
    before = open_checkpoint(sharded).sha256()
    raw = bytearray((sharded / file).read_bytes())
    raw[-1] = ord(" ") if file == "config.json" else raw[-1] ^ 1
    (sharded / file).write_bytes(raw + b"}" if file == "config.json" else raw)
    assert open_checkpoint(sharded).sha256() != before


# What is refused


def test_unknown_tensors_are_named(single):
    with pytest.raises(ValueError, match="m: there are no tensors a.weight, b.weight$"):
        list(open_checkpoint(single).tensors(["b.weight", "model.norm.weight", "a.weight"]))


def test_missing_tokenizer(single):
    with pytest.raises(
        FileNotFoundError, match=r"expected a tokenizer \(tokenizer.json.*found con"
    ):
        open_checkpoint(single).tokenizer()


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model-00002-of-00003.safetensors: expected a shard with 7 tens"
    ):
        open_checkpoint(sharded)


def test_truncated_shard(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-100])
    with pytest.raises(
        ValueError,
        match=rf"00002.*truncated: the header says {len(raw)} bytes, it has {len(raw) - 100}",
    ):
        open_checkpoint(sharded)


def test_shard_with_a_tail(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(ValueError, match="00002.*too long: the header says"):
        open_checkpoint(sharded)


def test_header_longer_than_the_file(single):
    (single / "model.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"corrupt header: expected 8 \+ 1000000 bytes.* has 10"):
        open_checkpoint(single)


def test_file_shorter_than_a_header(single):
    (single / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="corrupt header: expected 8 bytes at least.* has 3"):
        open_checkpoint(single)


@pytest.mark.parametrize(
    "header", [b"\xff\xfe\xfd", b"[1, 2]", b'{"w": {"dtype": "F32"}}', b"{bad"]
)
def test_corrupt_header(single, header):
    rewrite(single / "model.safetensors", header, b"")
    with pytest.raises(
        ValueError, match="model.safetensors: corrupt header: expected JSON.* got b"
    ):
        open_checkpoint(single)


def test_header_that_contradicts_itself(single):
    path = single / "model.safetensors"
    header, data = header_of(path)
    header["model.norm.weight"]["shape"] = [65]
    rewrite(path, header, data)
    with pytest.raises(
        ValueError, match=r"'model.norm.weight', F32 \[65\]: expected 260.* got 256"
    ):
        open_checkpoint(single)


def test_indexed_tensor_that_its_shard_lacks(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected tensor 'model.extra' in model-00001.*not have"):
        open_checkpoint(sharded)


def test_tensor_that_the_index_lacks(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="tensor 'model.norm.weight' is in .* the index says None"):
        open_checkpoint(sharded)


def test_wrong_dtype(tmp_path, tiny_weights):
    quantised = {"model.norm.weight": np.ones(64, np.int8)}
    path = write(tmp_path / "m", tiny_weights() | quantised)
    with pytest.raises(
        ValueError, match="'model.norm.weight' has dtype I8, expected one of F32, F16"
    ):
        open_checkpoint(path)


def test_no_safetensors(single):
    (single / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"expected model.safetensors or model.safetensors.index.json, found",
    ):
        open_checkpoint(single)


def test_pickled_weights_are_not_read(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin; pickled .bin .* not read"):
        open_checkpoint(single)


def test_gguf_beside_a_config_is_hinted_at(single):
    (single / "model.safetensors").rename(single / "model.gguf")
    with pytest.raises(FileNotFoundError, match="pass the path of the file"):
        open_checkpoint(single)


def test_file_without_tensors(single):
    save_file({}, single / "model.safetensors")
    with pytest.raises(ValueError, match="expected the tensors of a model, got none"):
        open_checkpoint(single)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_config_that_is_no_object(single, text):
    (single / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json: expected (a )?JSON"):
        open_checkpoint(single)


def test_unsupported_model_names_the_file(tmp_path, tiny_weights):
    path = write(tmp_path / "m", tiny_weights(), model_type="mamba")
    with pytest.raises(ValueError, match="config.json: model_type 'mamba'.*supported: llama"):
        open_checkpoint(path)


def test_index_without_a_map(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json: expected 'weight_map'.*got None"):
        open_checkpoint(sharded)


def test_index_that_leads_elsewhere(sharded):
    content = {"weight_map": {"w": "../other.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected names of files beside it, got '../other"):
        open_checkpoint(sharded)
