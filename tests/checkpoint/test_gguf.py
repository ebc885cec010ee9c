"""GGUF files: configuration, tensors, and what is said of damaged ones."""

import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.gguf import GGUFCheckpoint
from deinfer_jax.config import ModelConfig, RopeConfig

# The real model


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(smollm2_gguf)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


def test_smollm2_config(smollm2):
    assert smollm2.config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position=8192,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


def test_smollm2_headers(smollm2):
    assert smollm2.description == "GGUF v3, Q4_1"
    assert len(smollm2.shapes()) == 272
    assert smollm2.shapes()["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    types = smollm2.stored_types()
    assert types["model.layers.0.self_attn.q_proj.weight"] == "Q4_1"
    assert types["model.embed_tokens.weight"] == "Q8_0"


def test_smollm2_by_the_definition_of_its_types(smollm2, smollm2_gguf):
    """One k projection: Q4_1 is d·q + m in blocks of 32, rows of each head interleaved."""
    import gguf

    stored = gguf.GGUFReader(smollm2_gguf).get_tensor(6)
    assert (stored.name, stored.tensor_type.name) == ("blk.0.attn_k.weight", "Q4_1")
    blocks = np.array(stored.data).reshape(192, 18, 20)
    scale, minimum = (blocks[..., at : at + 2].copy().view(np.float16) for at in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    rows = scale.astype(np.float32) * nibbles + minimum.astype(np.float32)
    expected = np.empty((192, 576), np.float32)
    for head in range(3):
        for j in range(32):
            expected[64 * head + j] = rows[64 * head + 2 * j].ravel()
            expected[64 * head + 32 + j] = rows[64 * head + 2 * j + 1].ravel()
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(dict(smollm2.tensors())[name], expected)


def test_smollm2_weights_are_those_of_transformers(smollm2, smollm2_gguf):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers loads no GGUF model without it")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    state = model.state_dict()
    assert (state.pop("lm_head.weight") == state["model.embed_tokens.weight"]).all()
    for name, array in smollm2.tensors():
        np.testing.assert_allclose(array, state.pop(name).numpy(), rtol=1e-6, err_msg=name)
    assert not state


# Tensors


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"bias": True}),
        ("qwen2", {"bias": True}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_weights_are_those_written(write_gguf, tiny_weights, arch, options):
    weights = tiny_weights(**options)
    read = dict(open_checkpoint(write_gguf(weights, arch)).tensors())
    assert read.keys() == weights.keys()
    for name, array in read.items():
        assert array.dtype == np.float32 and array.flags.writeable
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {}), ("qwen2", {"bias": True}), ("qwen3", {"qk_norm": True})]
)
def test_tiny_models_agree_with_transformers(write_gguf, tiny_weights, arch, options):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers loads no GGUF model without it")
    from transformers import AutoModelForCausalLM

    def words(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"w{i}" for i in range(40)])

    path = write_gguf(
        tiny_weights(**options), arch, tokenizer=words, matrix_type="Q8_0", keys={"vocab_size": 40}
    )
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    state = model.state_dict()
    for name, array in open_checkpoint(path).tensors():
        np.testing.assert_allclose(array, state.pop(name).numpy(), rtol=1e-6, err_msg=name)
    assert not state


@pytest.mark.parametrize(
    ("kind", "levels"), [("Q4_0", 8), ("Q4_1", 15), ("Q5_0", 16), ("Q5_1", 31), ("Q8_0", 127)]
)
def test_quantised_weights_are_within_a_step(write_gguf, tiny_weights, kind, levels):
    weights = tiny_weights()
    checkpoint = open_checkpoint(write_gguf(weights, matrix_type=kind))
    assert checkpoint.description == f"GGUF v3, {kind}"
    for name, array in checkpoint.tensors():
        assert array.dtype == np.float32
        if array.ndim == 1:
            np.testing.assert_array_equal(array, weights[name])
            continue
        rows, wanted = array.reshape(-1, 32), weights[name].reshape(-1, 32)
        spread = np.ptp(wanted, axis=1) if kind.endswith("_1") else np.abs(wanted).max(axis=1)
        # half a step, but a whole one at the asymmetric end of Q4_0 and Q5_0; and float16 scales
        assert (np.abs(rows - wanted) <= 1.05 * spread[:, None] / levels + 1e-3).all(), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_random_blocks_agree_with_transformers(tmp_path, kind):
    torch = pytest.importorskip("torch")
    import gguf
    from transformers.integrations.gguf.dequant import dequantize

    qtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 256, (40, 512 // block, size), np.uint8)
    scales = {"Q8_0": [1], "Q4_K": [1, 3], "Q5_K": [1, 3], "Q6_K": [209]}[kind]
    raw[..., scales] &= 0x3B  # finite float16 scales
    path = tmp_path / "embeddings.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_embedding_length(512)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw.reshape(40, -1), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((_, array),) = open_checkpoint(path).tensors()
    expected = dequantize(torch.from_numpy(raw.reshape(-1)), qtype.value).numpy()
    np.testing.assert_allclose(array.ravel(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)]
)
def test_plain_types_keep_their_dtype(write_gguf, tiny_weights, kind, dtype):
    weights = tiny_weights()
    checkpoint = open_checkpoint(write_gguf(weights, matrix_type=kind))
    for name, array in checkpoint.tensors():
        assert array.dtype == (dtype if array.ndim > 1 else np.float32)
        assert (array == weights[name].astype(array.dtype)).all(), name
    assert checkpoint.config.dtype == np.dtype(dtype).name


def test_quantised_files_are_bfloat16(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), matrix_type="Q8_0")
    assert open_checkpoint(path).config.dtype == "bfloat16"


def test_float32_and_float16_together_are_float32(write_gguf, tiny_weights):
    embeddings = {"model.embed_tokens.weight": tiny_weights()["model.embed_tokens.weight"]}
    rest = {name: w for name, w in tiny_weights().items() if name not in embeddings}
    extra = {"token_embd.weight": embeddings["model.embed_tokens.weight"].astype(np.float16)}
    assert open_checkpoint(write_gguf(rest, tensors=extra)).config.dtype == "float32"


def test_one_tensor_at_a_time_in_memory(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    for key in ("context_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_embedding_length(1024)
    writer.add_block_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quants.quantize(np.zeros((16384, 1024), np.float32), kind)
    for name in ("token_embd", *(f"blk.{i}.ffn_up" for i in range(4))):
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "wide.gguf")
    tracemalloc.start()
    try:
        for _, array in checkpoint.tensors():
            del array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = 4 * 16384 * 1024
    assert size < peak < 2.1 * size  # 64 MiB, their 17 MiB in the file, and a piece in work


def test_rope_freqs_are_divisors_and_no_tensor(write_gguf, tiny_weights):
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    path = write_gguf(tiny_weights(), tensors={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope.divisors == tuple(divisors.tolist())
    assert checkpoint.shapes().keys() == tiny_weights().keys()


def test_rope_freqs_of_another_head_width(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    with pytest.raises(ValueError, match="'rope_freqs.weight': expected 16 divisors.*got 32"):
        open_checkpoint(path)


# Configuration


def test_config_of_a_tiny_model(write_gguf, tiny_weights):
    assert open_checkpoint(write_gguf(tiny_weights())).config == ModelConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0),
        max_position=128,
        dtype="float32",
    )


def test_missing_output_means_tied(write_gguf, tiny_weights):
    assert open_checkpoint(write_gguf(tiny_weights(head=False))).config.tie_embeddings


def test_qwen2_has_biases_on_qkv_only(write_gguf, tiny_weights):
    config = open_checkpoint(write_gguf(tiny_weights(bias=True), "qwen2")).config
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_biases_of_o_and_mlp(write_gguf, tiny_weights):
    biases = {
        "blk.0.attn_output.bias": np.ones(64, np.float32),
        "blk.0.ffn_down.bias": np.ones(64, np.float32),
    }
    checkpoint = open_checkpoint(write_gguf(tiny_weights(), tensors=biases))
    assert (checkpoint.config.o_bias, checkpoint.config.mlp_bias) == (True, True)
    assert "model.layers.0.self_attn.o_proj.bias" in checkpoint.shapes()


def test_qwen3_has_norms_on_q_and_k(write_gguf, tiny_weights):
    assert open_checkpoint(write_gguf(tiny_weights(qk_norm=True), "qwen3")).config.qk_norm


def test_kv_heads_default_to_heads(write_gguf, tiny_weights):
    weights = {n: w for n, w in tiny_weights().items() if "k_proj" not in n and "v_proj" not in n}
    path = write_gguf(weights, keys={"attention.head_count_kv": None})
    assert open_checkpoint(path).config.num_kv_heads == 4


def test_equal_kv_heads_by_layer(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"attention.head_count_kv": [2, 2]})
    assert open_checkpoint(path).config.num_kv_heads == 2


def test_unequal_kv_heads_by_layer(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"attention.head_count_kv": [2, 1]})
    with pytest.raises(ValueError, match=r"head_count_kv' differs by layer: \[2, 1\]"):
        open_checkpoint(path)


def test_head_width_defaults_to_width_by_heads(write_gguf, tiny_weights):
    weights = {n: w for n, w in tiny_weights().items() if "_proj" not in n}
    none = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"))
    assert open_checkpoint(write_gguf(weights, keys=none)).config.head_dim == 16


@pytest.mark.parametrize("key", ["attention.value_length", "rope.dimension_count"])
def test_other_widths_are_refused(write_gguf, tiny_weights, key):
    path = write_gguf(tiny_weights(), keys={key: 16})
    with pytest.raises(ValueError, match=f"{key}': expected the head width 32, got 16"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {}),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, {}),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 32,
                "scaling.yarn_beta_fast": 16.0,
            },
            {"kind": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 16.0},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position": 128,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1.0),
            },
        ),
    ],
)
def test_rope_scaling(write_gguf, tiny_weights, keys, expected):
    keys = {f"rope.{key}": value for key, value in keys.items()}
    config = open_checkpoint(write_gguf(tiny_weights(), keys=keys)).config
    assert config.rope == RopeConfig(theta=50000.0, **expected)


def test_unknown_rope_scaling(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"rope.scaling.type": "longrope"})
    with pytest.raises(ValueError, match="expected none, linear or yarn, got 'longrope'"):
        open_checkpoint(path)


def test_sliding_window(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"attention.sliding_window": 16})
    assert open_checkpoint(path).config.windows == (16, 16)


def test_window_pattern_is_refused(write_gguf, tiny_weights):
    keys = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]}
    with pytest.raises(ValueError, match="sliding_window_pattern' is not supported"):
        open_checkpoint(write_gguf(tiny_weights(), keys=keys))


def test_all_ends_of_a_turn_end_generation(write_gguf, tiny_weights):
    names = {"eos": 2, "eot": 5, "eom": 2, "bos": 1}
    extra = {f"tokenizer.ggml.{name}_token_id": token for name, token in names.items()}
    config = open_checkpoint(write_gguf(tiny_weights(), extra=extra)).config
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)


def test_file_of_version_2(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights())
    patch(path, 4, struct.pack("<I", 2))
    assert open_checkpoint(path).description == "GGUF v2, F32"


# Damaged and unsupported files


def patch(path: Path, at: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(new)] = new
    path.write_bytes(raw)


@pytest.fixture
def tiny(write_gguf, tiny_weights) -> Path:
    return write_gguf(tiny_weights())


def test_bad_magic(tiny):
    patch(tiny, 0, b"GGML")
    with pytest.raises(ValueError, match=r"tiny.gguf: expected .*b'GGUF'\), got b'GGML'"):
        GGUFCheckpoint(tiny)


def test_unknown_version(tiny):
    patch(tiny, 4, struct.pack("<I", 9))
    with pytest.raises(ValueError, match="tiny.gguf: GGUF version 9; expected 2 or 3"):
        open_checkpoint(tiny)


def test_big_endian(tiny):
    patch(tiny, 4, struct.pack(">I", 3))
    with pytest.raises(ValueError, match="big-endian files are not read"):
        open_checkpoint(tiny)


def test_cut_anywhere_in_the_header(tiny):
    raw = tiny.read_bytes()
    for size in range(4, raw.index(b"output.weight"), 7):
        tiny.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=rf"tiny.gguf: .*expected .*the file has {size}"):
            open_checkpoint(tiny)


def test_cut_says_where(tiny):
    raw = tiny.read_bytes()
    tiny.write_bytes(raw[: raw.index(b"llama.embedding_length") + 24])
    with pytest.raises(ValueError, match="at metadata entry 4 of 12, 'llama.embedding_length'"):
        open_checkpoint(tiny)


def test_cut_tensor_data(tiny):
    size = tiny.stat().st_size
    with tiny.open("r+b") as file:
        file.truncate(size - 10)
    with pytest.raises(
        ValueError,
        match=rf"data of tensor 'output.weight': .*{size} bytes, the file has {size - 10}",
    ):
        open_checkpoint(tiny)


def test_cut_after_opening(tiny):
    checkpoint = open_checkpoint(tiny)
    with tiny.open("r+b") as file:
        file.truncate(tiny.stat().st_size - 10)
    with pytest.raises(ValueError, match=r"'output.weight': expected 10240 bytes, got 10230"):
        list(checkpoint.tensors())


def test_corrupt_count_fails_at_once(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), extra={"tokenizer.ggml.tokens": ["a", "b"]})
    at = path.read_bytes().index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    patch(path, at, struct.pack("<Q", 1 << 60))
    with pytest.raises(ValueError, match="corrupt at metadata entry 13 .*'tokenizer.ggml.tokens'"):
        open_checkpoint(path)


def test_corrupt_metadata_type(tiny):
    at = tiny.read_bytes().index(b"llama.block_count") + len("llama.block_count")
    patch(tiny, at, struct.pack("<I", 77))
    with pytest.raises(ValueError, match="'llama.block_count': expected a type 0 to 12, got 77"):
        open_checkpoint(tiny)


def test_corrupt_string(tiny):
    patch(tiny, tiny.read_bytes().index(b"llama.block_count"), b"\xff")
    with pytest.raises(ValueError, match="metadata entry 2 .*expected UTF-8, got"):
        open_checkpoint(tiny)


def test_unknown_tensor_type(tiny):
    at = tiny.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 12
    patch(tiny, at, struct.pack("<I", 999))
    with pytest.raises(ValueError, match="'output_norm.weight' has the unknown type 999"):
        open_checkpoint(tiny)


def test_integer_tensor(write_gguf, tiny_weights):
    path = write_gguf(
        tiny_weights(head=False), tensors={"output.weight": np.ones((40, 64), np.int8)}
    )
    with pytest.raises(ValueError, match="'output.weight' has type I8; expected F32, F16, BF16 or"):
        open_checkpoint(path)


def test_quantised_vector(write_gguf, tiny_weights):
    import gguf

    path = write_gguf(tiny_weights())
    at = path.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 12
    patch(path, at, struct.pack("<I", gguf.GGMLQuantizationType.Q8_0.value))
    with pytest.raises(ValueError, match="vector 'output_norm.weight' is Q8_0"):
        open_checkpoint(path)


def test_rows_that_are_no_whole_blocks(tiny):
    import gguf

    at = tiny.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 12
    patch(tiny, at, struct.pack("<I", gguf.GGMLQuantizationType.Q4_K.value))
    with pytest.raises(ValueError, match=r"multiple of 256 elements \(Q4_K\), got shape \[64\]"):
        open_checkpoint(tiny)


def test_tensor_listed_twice(tiny):
    raw = tiny.read_bytes()
    tiny.write_bytes(raw.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    with pytest.raises(ValueError, match="a tensor is listed twice"):
        open_checkpoint(tiny)


def test_bad_alignment(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), extra={"general.alignment": 0})
    with pytest.raises(ValueError, match="'general.alignment': expected >= 1, got 0"):
        open_checkpoint(path)


def test_unknown_architecture_lists_the_supported(write_gguf):
    with pytest.raises(
        ValueError, match="'mamba' is not supported; supported: llama, qwen2, qwen3"
    ):
        open_checkpoint(write_gguf({}, "mamba"))


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_qkv.weight", "blk.0.attn_norm.bias", "cls"]
)
def test_unmapped_tensor(write_gguf, tiny_weights, name):
    path = write_gguf(tiny_weights(), tensors={name: np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match=f"tensor '{name}' has no place in a llama model of 2"):
        open_checkpoint(path)


def test_tensor_of_a_layer_too_many(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"block_count": 1})
    with pytest.raises(
        ValueError, match="tensor 'blk.1.attn_norm.weight' has no place .* 1 layers"
    ):
        open_checkpoint(path)


def test_missing_embeddings(write_gguf, tiny_weights):
    weights = tiny_weights()
    del weights["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="expected a tensor 'token_embd.weight'"):
        open_checkpoint(write_gguf(weights))


def test_missing_metadata(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"embedding_length": None})
    with pytest.raises(ValueError, match="tiny.gguf: expected metadata 'llama.embedding_length'"):
        open_checkpoint(path)


def test_metadata_of_the_wrong_type(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"context_length": "long"})
    with pytest.raises(ValueError, match="'llama.context_length': expected int, got 'long'"):
        open_checkpoint(path)


def test_impossible_config_names_the_file(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"attention.head_count_kv": 3})
    with pytest.raises(ValueError, match="tiny.gguf: ModelConfig: num_heads must be a multiple"):
        open_checkpoint(path)


def test_impossible_rope_names_the_file(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), keys={"rope.freq_base": 0.5})
    with pytest.raises(ValueError, match="tiny.gguf: rope: expected theta > 1"):
        open_checkpoint(path)


def test_rows_of_q_contradict_the_heads(write_gguf, tiny_weights):
    weights = tiny_weights() | {
        "model.layers.1.self_attn.q_proj.weight": np.ones((64, 64), np.float32)
    }
    with pytest.raises(
        ValueError, match=r"'blk.1.attn_q.weight': expected 4 heads of 32 rows, got"
    ):
        open_checkpoint(write_gguf(weights))


def test_part_of_a_split_file(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), extra={"split.count": 3})
    with pytest.raises(ValueError, match="one of 3 parts; expected a whole file: merge"):
        open_checkpoint(path)
