"""Which reader opens a path, and what it says when none does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.gguf import GGUFCheckpoint
from deinfer_jax.checkpoint.hf import HuggingFaceCheckpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hf_dir(tmp_path, tiny_weights) -> Path:
    path = tmp_path / "hf"
    path.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(), path / "model.safetensors")
    return path


def test_directory_with_config_is_hugging_face(hf_dir):
    assert isinstance(open_checkpoint(hf_dir), HuggingFaceCheckpoint)


def test_config_wins_over_a_gguf_beside_it(hf_dir, write_gguf, tiny_weights):
    write_gguf(tiny_weights()).rename(hf_dir / "model.gguf")
    assert isinstance(open_checkpoint(hf_dir), HuggingFaceCheckpoint)


def test_gguf_file(write_gguf, tiny_weights):
    assert isinstance(open_checkpoint(str(write_gguf(tiny_weights()))), GGUFCheckpoint)


def test_gguf_is_known_by_its_content(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights(), name="model.bin")
    assert isinstance(open_checkpoint(path), GGUFCheckpoint)


def test_directory_with_one_gguf(write_gguf, tiny_weights):
    path = write_gguf(tiny_weights())
    assert open_checkpoint(path.parent).path == path


def test_directory_with_several_ggufs_lists_them(write_gguf, tiny_weights):
    write_gguf(tiny_weights(), name="b.gguf")
    path = write_gguf(tiny_weights(), name="a.gguf")
    with pytest.raises(ValueError, match=r"exactly one .gguf file, found a.gguf, b.gguf"):
        open_checkpoint(path.parent)


def test_missing_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: expected a model directory or a GGUF"):
        open_checkpoint(tmp_path / "nowhere")


def test_directory_with_neither_says_what_it_found(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match=r"expected config.json .* found notes.txt"):
        open_checkpoint(tmp_path)


def test_empty_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="found an empty directory"):
        open_checkpoint(tmp_path)


def test_other_file_shows_how_it_starts(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK\x03\x04rest")
    with pytest.raises(ValueError, match=r"model.pt: .*magic b'GGUF'\), got .* b'PK"):
        open_checkpoint(path)


def test_empty_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ValueError, match=r"magic b'GGUF'\), got a file that starts with b''"):
        open_checkpoint(path)


def test_safetensors_file_hints_at_its_directory(hf_dir):
    with pytest.raises(ValueError, match="pass the directory instead"):
        open_checkpoint(hf_dir / "model.safetensors")


def test_tensors_agree_with_headers(hf_dir, write_gguf, tiny_weights):
    for path in (hf_dir, write_gguf(tiny_weights())):
        checkpoint = open_checkpoint(path)
        shapes = {name: array.shape for name, array in checkpoint.tensors()}
        assert shapes == checkpoint.shapes()
        assert set(checkpoint.stored_types()) == set(shapes)


def test_formats_of_one_model_agree(hf_dir, write_gguf, tiny_weights):
    hf = dict(open_checkpoint(hf_dir).tensors())
    gguf = dict(open_checkpoint(write_gguf(tiny_weights())).tensors())
    assert hf.keys() == gguf.keys()
    for name, array in hf.items():
        np.testing.assert_array_equal(array, gguf[name], err_msg=name)


def test_gguf_and_its_tokenizer_need_no_torch(smollm2_gguf):
    script = f"""
import sys
sys.modules["torch"] = None  # an import of it raises
from deinfer_jax.checkpoint.source import open_checkpoint
checkpoint = open_checkpoint({str(smollm2_gguf)!r})
name, tensor = next(checkpoint.tensors())
print(name, tensor.shape, checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("Hi 42")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "model.embed_tokens.weight (49152, 576) Hi 42\n"
