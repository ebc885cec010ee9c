"""What saving and restoring refuse, and what they leave behind."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.orbax_writer import chunk_shape
from tests import tiny

pytest.importorskip("torch")

OPTIONS: dict[str, Any] = dict(max_batch=2, max_context=32, page_size=16, cache_bytes=1 << 16)
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    tiny.make("gqa", path)
    return path


@pytest.fixture(scope="module")
def llm(dense: Path) -> Iterator[deinfer_jax.LLM]:
    with deinfer_jax.load(dense, strategy="sharded", tensor_parallel=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def saved(llm: deinfer_jax.LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llm.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def write(path: Path, dense: Path, **changes: np.ndarray | None) -> Path:
    """What Orbax saves of the model with some tensors changed, or left out."""
    import orbax.checkpoint as ocp

    held: dict[str, Any] = dict(open_checkpoint(dense).tensors())
    for name, array in changes.items():
        held[name] = array
    held = {name: array for name, array in held.items() if array is not None}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, held)
    shutil.copy(dense / "config.json", path)
    return path


# Saving


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_an_existing_path_is_refused(llm: deinfer_jax.LLM, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="nothing is yet, but it exists.*there"):
        llm.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_too_little_space_is_seen_beforehand(
    llm: deinfer_jax.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2000, 1000, 1000))
    with pytest.raises(OSError, match=r"model: .*expected [\d,]+ bytes .* got 1,000 free") as error:
        llm.save(tmp_path / "model")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_while_writing(
    llm: deinfer_jax.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deinfer_jax.checkpoint import orbax_writer

    async def full(*arguments: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")

    monkeypatch.setattr(orbax_writer, "_write", full)
    with pytest.raises(OSError, match="not enough space: expected") as error:
        llm.save(tmp_path / "model")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(
    llm: deinfer_jax.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def save_pretrained(self, path: Path) -> None:
            raise RuntimeError("no tokenizer today")

    monkeypatch.setattr(llm, "tokenizer", Broken())
    with pytest.raises(RuntimeError, match="no tokenizer today"):
        llm.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_replaced(
    llm: deinfer_jax.LLM, tmp_path: Path, saved: Path
) -> None:
    partial = tmp_path / "model.partial"
    shutil.copytree(saved, partial / "model")
    (partial / "unfinished.json").write_text(json.dumps({"writes": "an Orbax checkpoint"}))
    with pytest.raises(ValueError, match="expected a model, found an unfinished one"):
        open_checkpoint(partial)
    llm.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_of_another_run_is_left_alone(llm: deinfer_jax.LLM, tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"model.partial: expected an empty directory.*thesis.txt"):
        llm.save(tmp_path / "model")
    assert (tmp_path / "model.partial" / "thesis.txt").is_file()


def test_a_closed_model_is_refused(dense: Path, tmp_path: Path) -> None:
    with deinfer_jax.load(dense, **OPTIONS) as llm:
        pass
    with pytest.raises(RuntimeError, match="has been closed"):
        llm.save(tmp_path / "model")


def test_chunks() -> None:
    assert chunk_shape((4096, 1280), 2) == (128, 160)
    assert chunk_shape((1229, 4096), 2) == (39, 512)  # 1229 is prime
    assert chunk_shape((576, 576), 4) == (36, 48)  # 32 × 24 would be below 4 KiB
    assert chunk_shape((128256, 8192), 2) == (2004, 1024)
    assert chunk_shape((8192,), 2) == (2048,)
    assert chunk_shape((3, 5), 4) == (3, 5)


# Restoring


def test_a_missing_config_is_named(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json: expected a JSON file"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_a_missing_file_of_orbax_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        open_checkpoint(copy)


def test_metadata_that_are_none(copy: Path) -> None:
    (copy / "_METADATA").write_text("{}")
    with pytest.raises(ValueError, match="_METADATA: expected 'tree_metadata'"):
        open_checkpoint(copy)


def test_a_directory_that_orbax_has_not_finished(copy: Path) -> None:
    path = copy.rename(copy.with_name("model.orbax-checkpoint-tmp-3"))
    with pytest.raises(ValueError, match="has not finished writing"):
        open_checkpoint(path)


def test_an_array_that_is_not_there_is_named(copy: Path) -> None:
    metadata = json.loads((copy / "_METADATA").read_text())
    leaf = {"key_metadata": [{"key": "extra.weight", "key_type": 2}], "value_metadata": {}}
    metadata["tree_metadata"]["('extra.weight',)"] = leaf
    (copy / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match="tensor extra.weight cannot be opened.*damaged"):
        open_checkpoint(copy)


@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_damaged_data_are_named(copy: Path, damage: str) -> None:
    for file in (copy / "ocdbt.process_0" / "d").iterdir():
        if damage == "deleted":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"tensor \S+ cannot be (read|opened).* damaged"):
        deinfer_jax.load(copy, strategy="sharded", tensor_parallel=4, **OPTIONS)


def test_missing_and_misshapen_tensors_are_named(dense: Path, tmp_path: Path) -> None:
    changes = {NAME: None, "model.norm.weight": np.ones(47, np.float32)}
    path = write(tmp_path / "model", dense, **changes)
    with pytest.raises(ValueError, match=f"missing tensor {NAME}") as error:
        deinfer_jax.load(path, **OPTIONS)
    assert "tensor model.norm.weight: expected shape [48], got [47]" in str(error.value)


def test_another_dtype_is_named(dense: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model", dense, **{NAME: np.ones((16, 48), np.int32)})
    with pytest.raises(ValueError, match=f"tensor '{NAME}' has dtype int32, expected one of"):
        open_checkpoint(path)


@pytest.mark.parametrize("devices", [1, 4])
def test_values_that_are_no_numbers_are_refused(dense: Path, tmp_path: Path, devices: int) -> None:
    tensor = open_checkpoint(dense).tensor(NAME)
    tensor[-1, -2:] = np.nan, np.inf
    path = write(tmp_path / "model", dense, **{NAME: tensor})
    with pytest.raises(ValueError, match=f"tensor {NAME}: 2 of 768 values are NaN or infinite"):
        deinfer_jax.load(path, strategy="sharded", tensor_parallel=devices, **OPTIONS)


def test_values_that_a_cast_makes_infinite_are_refused(dense: Path, tmp_path: Path) -> None:
    tensor = open_checkpoint(dense).tensor(NAME)
    tensor[3, 3] = 1e6
    path = write(tmp_path / "model", dense, **{NAME: tensor})
    with pytest.raises(ValueError, match=f"{NAME}: 1 of 768 .* as float16 .stored as F32"):
        deinfer_jax.load(path, dtype="float16", **OPTIONS)
