"""Writing the canonical form: what arrives on the disk, what an interruption leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from deinfer_jax.checkpoint import open_checkpoint, tokenizer_sha256
from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.checkpoint.factors import low_rank_of, shared_v_name, v_name
from deinfer_jax.config_hf import low_rank_block
from tests.checkpoint.test_hf import CONFIG

FINGERPRINT: dict[str, Any] = {"source": "abc", "method": "svd", "keep": 0.6}
ATTENTION = "model.layers.0.self_attn"
GROUPS = [([f"{ATTENTION}.{n}_proj" for n in "qkv"], 5), (["model.layers.1.mlp.down_proj"], 7)]


def decomposed(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of GROUPS instead of their dense weights; random factors."""
    rng = np.random.default_rng(1)
    weights = dict(weights)
    dtype = weights["model.norm.weight"].dtype
    for members, rank in GROUPS:
        dense = [weights.pop(f"{member}.weight") for member in members]
        shapes = {v_name(members): (rank, dense[0].shape[1])}
        shapes |= {f"{m}.u.weight": (len(w), rank) for m, w in zip(members, dense, strict=True)}
        weights |= {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    return weights


def config(dtype: str = "float32", **metadata: Any) -> dict[str, Any]:
    block = low_rank_block(low_rank_of(GROUPS), **metadata)
    return CONFIG | {"dtype": dtype, "low_rank": block}


def pieces(weights: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """By layer; what belongs to none is in "0-outer"."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in weights.items():
        parts = name.split(".")
        piece = f"layer-{parts[2]}" if parts[1] == "layers" else "0-outer"
        found.setdefault(piece, {})[name] = array
    return found


def write_all(dst: Path, weights: dict[str, np.ndarray], **options: Any) -> None:
    with CanonicalWriter(dst, FINGERPRINT) as writer:
        for piece, tensors in pieces(weights).items():
            writer.write(piece, tensors)
        writer.publish(**{"hf_config": config(), **options})


@pytest.fixture
def weights(tiny_weights) -> dict[str, np.ndarray]:
    return decomposed(tiny_weights())


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
    def test_every_bit(self, tmp_path: Path, tiny_weights, dtype: Any) -> None:
        dense = {name: array.astype(dtype) for name, array in tiny_weights().items()}
        weights = decomposed(dense)
        name = np.dtype(dtype).name
        write_all(tmp_path / "m", weights, hf_config=config(name))
        checkpoint = open_checkpoint(tmp_path / "m")
        read = dict(checkpoint.tensors())
        assert checkpoint.config.dtype == name
        assert read.keys() == weights.keys()
        for key, array in read.items():
            assert array.dtype == dtype
            np.testing.assert_array_equal(array.view(np.uint8), weights[key].view(np.uint8))

    def test_config_has_the_slices(self, tmp_path: Path, weights) -> None:
        write_all(tmp_path / "m", weights)
        assert open_checkpoint(tmp_path / "m").config.low_rank == low_rank_of(GROUPS)

    def test_arrays_that_are_not_contiguous(self, tmp_path: Path) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("a", {"t": array.T, "s": array[:, ::2]})
            read = load_file(writer.partial / "pieces" / "a.safetensors")
        np.testing.assert_array_equal(read["t"], array.T)
        np.testing.assert_array_equal(read["s"], array[:, ::2])

    def test_shards_follow_the_pieces_in_natural_order(self, tmp_path: Path) -> None:
        names = ["0-outer", "layer-2", "layer-10"]
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            for name in reversed(names):
                writer.write(name, {name: np.ones(3, np.float32)})
            assert writer.pieces() == names
            hf = CONFIG | {"tie_word_embeddings": True}
            writer.publish(hf)
        for number, name in enumerate(names, 1):
            file = tmp_path / "m" / f"model-{number:05}-of-00003.safetensors"
            assert list(load_file(file)) == [name]
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 3 * 3 * 4

    def test_one_piece_is_a_whole_file(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("all", weights)
            writer.publish(config(), generation_config={"eos_token_id": [7, 2]})
        files = {file.name for file in (tmp_path / "m").iterdir()}
        (tmp_path / "new").touch()  # what the process makes has this mode
        modes = {file.stat().st_mode for file in (tmp_path / "m").iterdir()}
        assert modes == {(tmp_path / "new").stat().st_mode}
        assert files == {"model.safetensors", "config.json", "generation_config.json"}
        assert open_checkpoint(tmp_path / "m").config.eos_token_ids == (7, 2)
        assert not (tmp_path / "m.partial").exists()

    def test_of_a_gguf_file_with_its_tokenizer(self, tmp_path: Path, smollm2_gguf: Path) -> None:
        source = open_checkpoint(smollm2_gguf)
        theirs = source.tokenizer()
        outer = ["model.embed_tokens.weight", "model.norm.weight"]
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("outer", dict(source.tensors(outer)))
            writer.publish(source.hf_config(), theirs, source.generation_config())
        read = open_checkpoint(tmp_path / "m")
        assert read.config == source.config
        ours = read.tokenizer()
        assert tokenizer_sha256(ours) == tokenizer_sha256(theirs)
        text = "Étude no. 42: <|im_start|>user\n\tdon't — 价格 1234\n"
        assert ours.encode(text) == theirs.encode(text)
        chat = [{"role": "user", "content": "Hi"}]
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)


def begin(dst: Path, fingerprint: dict[str, Any]) -> None:
    """A run that finishes something, and not all."""
    with CanonicalWriter(dst, fingerprint) as writer:
        writer.write_record("ranks", [1])


class TestInterrupted:
    def test_the_same_run_goes_on(self, tmp_path: Path, weights) -> None:
        held = pieces(weights)
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert not writer.resumed
            writer.write("layer-0", held["layer-0"])
            writer.write_record("ranks", {"q": [1, 2.5]})
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert writer.resumed
            assert (writer.has("layer-0"), writer.has("layer-1")) == (True, False)
            read = load_file(writer.partial / "pieces" / "layer-0.safetensors")
            for name, array in held["layer-0"].items():
                np.testing.assert_array_equal(read[name], array)
            assert writer.read_record("ranks") == {"q": [1, 2.5]}
            assert not writer.has_record("energies")

    def test_records_are_no_part_of_the_model(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            writer.write_record("ranks", [1])
        write_all(tmp_path / "m", weights)
        assert open_checkpoint(tmp_path / "m").shapes().keys() == weights.keys()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]

    def test_where_nothing_is_finished_nothing_is_left(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", FINGERPRINT):
            pass
        assert list(tmp_path.iterdir()) == []
        write_all(tmp_path / "m", weights)  # FINGERPRINT refuses nothing

    def test_what_is_there_is_no_model(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            writer.write("layer-0", pieces(weights)["layer-0"])
        with pytest.raises(ValueError, match=r"m\.partial: .*unfinished.*same command again"):
            open_checkpoint(tmp_path / "m.partial")

    @pytest.mark.parametrize("moved", [0, 1, 3])
    def test_killed_while_it_is_published(self, tmp_path: Path, weights, moved: int) -> None:
        # A process that is killed runs no handler, so the test stops it at a rename.
        held = pieces(weights)
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            for piece, tensors in held.items():
                writer.write(piece, tensors)
        script = f"""
import json, os, sys
from deinfer_jax.checkpoint.canonical import CanonicalWriter
replace, left = os.replace, [{moved}]
def stop(a, b):
    if "pieces" in str(a):
        if not left[0]:
            os._exit(9)
        left[0] -= 1
    replace(a, b)
def rename(a, b):
    os._exit(9)
os.replace, os.rename = stop, rename
writer = CanonicalWriter({str(tmp_path / "m")!r}, {FINGERPRINT!r})
writer.publish(json.loads(sys.stdin.read()))
"""
        done = subprocess.run([sys.executable, "-c", script], input=json.dumps(config()), text=True)
        assert done.returncode == 9
        assert not (tmp_path / "m").exists()
        with pytest.raises(ValueError, match="unfinished"):
            open_checkpoint(tmp_path / "m.partial")
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert writer.resumed and writer.pieces() == sorted(held)
            writer.publish(config())
        assert open_checkpoint(tmp_path / "m").shapes().keys() == weights.keys()

    def test_killed_while_it_is_cleaned_up(self, tmp_path: Path, weights, monkeypatch) -> None:
        def stop(path: Path, **options: Any) -> None:
            raise KeyboardInterrupt

        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            writer.write("all", weights)
            monkeypatch.setattr("deinfer_jax.checkpoint.workspace.shutil.rmtree", stop)
            with pytest.raises(KeyboardInterrupt):
                writer.publish(config())
        monkeypatch.undo()
        assert open_checkpoint(tmp_path / "m").shapes().keys() == weights.keys()
        shutil.rmtree(tmp_path / "m")
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert writer.pieces() == []

    def test_killed_before_it_was_marked(self, tmp_path: Path) -> None:
        (tmp_path / "m.partial").mkdir()
        (tmp_path / "m.partial" / "lock").touch()
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert not writer.resumed

    def test_left_over_temporary_files_are_removed(self, tmp_path: Path) -> None:
        begin(tmp_path / "m", FINGERPRINT)
        (tmp_path / "m.partial" / "writing" / ".tmp1").write_bytes(b"half")
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            assert list((writer.partial / "writing").iterdir()) == []


class TestRefused:
    def test_a_destination_that_exists(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        with pytest.raises(FileExistsError, match="m: .* it exists; choose another or delete it"):
            CanonicalWriter(tmp_path / "m", FINGERPRINT)
        assert not (tmp_path / "m.partial").exists()

    def test_a_destination_that_came_into_being(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", FINGERPRINT) as writer:
            writer.write("all", weights)
            (tmp_path / "m").mkdir()
            with pytest.raises(FileExistsError, match="it exists"):
                writer.publish(config())
            assert writer.has("all")

    def test_another_fingerprint_names_the_keys(self, tmp_path: Path) -> None:
        begin(tmp_path / "m", FINGERPRINT)
        other = {"source": "abc", "method": "fisher", "seed": 0, "keep": 0.6}
        with pytest.raises(
            ValueError,
            match=r"method: expected 'svd', got 'fisher'; seed: expected None, got 0\).*delete .*m",
        ):
            CanonicalWriter(tmp_path / "m", other)

    def test_fingerprints_are_compared_as_json(self, tmp_path: Path) -> None:
        begin(tmp_path / "m", {"groups": (("q", "k"),)})
        with CanonicalWriter(tmp_path / "m", {"groups": [["q", "k"]]}) as writer:
            assert writer.resumed

    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "m.partial").mkdir()
        (tmp_path / "m.partial" / "thesis.tex").touch()
        with pytest.raises(ValueError, match="found thesis.tex; move it away"):
            CanonicalWriter(tmp_path / "m", FINGERPRINT)

    def test_a_second_process(self, tmp_path: Path) -> None:
        script = f"""
from deinfer_jax.checkpoint.canonical import CanonicalWriter
try:
    CanonicalWriter({str(tmp_path / "m")!r}, {FINGERPRINT!r})
except BlockingIOError as error:
    print(error)
"""
        with CanonicalWriter(tmp_path / "m", FINGERPRINT):
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert f"m.partial: expected to be alone in it, but process {os.getpid()} " in done.stdout
        begin(tmp_path / "m", FINGERPRINT)

    @pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
    def test_names_that_are_paths(self, tmp_path: Path, name: str) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            with pytest.raises(ValueError, match="expected letters, digits"):
                writer.write(name, {"w": np.ones(3, np.float32)})

    def test_a_dtype_that_models_do_not_have(self, tmp_path: Path) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            with pytest.raises(ValueError, match="'a', tensor w: expected float32.*got float64"):
                writer.write("a", {"w": np.ones(3)})

    def test_a_tensor_in_two_pieces(self, tmp_path: Path) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            for piece in "ab":
                writer.write(piece, {"w": np.ones(3, np.float32)})
            with pytest.raises(ValueError, match="w is in the pieces 'a' and 'b'; expected it onc"):
                writer.publish(config())

    def test_a_config_of_another_model_keeps_the_pieces(self, tmp_path: Path, weights) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("all", weights)
            with pytest.raises(ValueError, match="q_proj: expected factors|low_rank does not name"):
                writer.publish(CONFIG | {"low_rank": low_rank_block(low_rank_of(GROUPS[:1]))})
            assert writer.pieces() == ["all"]
            writer.publish(config())
        assert open_checkpoint(tmp_path / "m").shapes().keys() == weights.keys()

    def test_nothing_to_publish(self, tmp_path: Path) -> None:
        with CanonicalWriter(tmp_path / "m", {}) as writer:
            with pytest.raises(ValueError, match="m.partial: expected pieces of a model, got none"):
                writer.publish(config())


class TestFullDisk:
    MESSAGE = r"m\.partial: the disk is full: expected [0-9,]+ bytes for .*, got [0-9,]+ bytes free"

    def check(self, writer: CanonicalWriter, write: Any) -> None:
        with pytest.raises(OSError, match=self.MESSAGE) as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
        assert "same command" in str(caught.value)
        assert list((writer.partial / "writing").iterdir()) == []
        assert writer.pieces() == ["a"]

    def test_a_small_file_system(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a file system is not permitted here")
        try:
            with CanonicalWriter(disk / "m", {}) as writer:
                writer.write("a", {"w": np.ones(1000, np.float32)})
                large = {"w": np.ones(1 << 20, np.float32)}
                self.check(writer, lambda: writer.write("b", large))
                self.check(writer, lambda: writer.write_record("r", "x" * (1 << 21)))
                writer.write("b", {"w": np.zeros(5, np.float32)})
        finally:
            subprocess.run(["umount", disk], check=True)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_found_out_when_the_data_is_flushed(self, tmp_path: Path, monkeypatch, code) -> None:
        def full(descriptor: int) -> None:
            raise OSError(code, "no space")

        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("a", {"w": np.ones(3, np.float32)})
            monkeypatch.setattr(os, "fsync", full)
            with pytest.raises(
                OSError, match=self.MESSAGE.replace("[0-9,]+ bytes for", "12 bytes for")
            ):
                writer.write("b", {"w": np.ones(3, np.float32)})
            monkeypatch.undo()
            assert writer.pieces() == ["a"]
            assert list((writer.partial / "writing").iterdir()) == []

    def test_while_the_tokenizer_is_written(self, tmp_path: Path, weights) -> None:
        class Tokenizer:
            def save_pretrained(self, directory: Path) -> None:
                (directory / "tokenizer.json").write_text("half of it")
                raise Exception("No space left on device (os error 28)")  # as tokenizers does

        with CanonicalWriter(tmp_path / "m", {}) as writer:
            writer.write("all", weights)
            with pytest.raises(OSError, match="m.partial: the disk is full: .* for the tokenizer"):
                writer.publish(config(), Tokenizer())  # pyright: ignore[reportArgumentType]
            assert writer.pieces() == ["all"]
            assert not (writer.partial / "model").exists()
        assert not (tmp_path / "m").exists()


class TestNames:
    def test_shared(self) -> None:
        name = shared_v_name(ATTENTION, ("q_proj", "k_proj", "v_proj"))
        assert name == "model.layers.0.self_attn.q_k_v.v.weight"
        assert v_name(["a.mlp.gate_proj", "a.mlp.up_proj"]) == "a.mlp.gate_up.v.weight"

    def test_alone(self) -> None:
        assert shared_v_name(ATTENTION, ["k_proj"]) == "model.layers.0.self_attn.k_proj.v.weight"

    def test_members_of_two_blocks(self) -> None:
        with pytest.raises(ValueError, match="one parent, got a.q_proj, b.k_proj"):
            v_name(["a.q_proj", "b.k_proj"])

    def test_low_rank_of_groups(self) -> None:
        low_rank = low_rank_of(GROUPS)
        assert [(list(modules), piece.rank) for modules, piece in low_rank.groups()] == GROUPS
        assert low_rank.factors() == {
            f"{ATTENTION}.q_k_v.v.weight": 5,
            "model.layers.1.mlp.down_proj.v.weight": 7,
        }
