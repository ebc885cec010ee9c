"""What is left of a run that is interrupted, and how it goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.decompose import measure
from deinfer_jax.decompose.run import decompose
from deinfer_jax.decompose.spectra import SpectrumStore
from tests.decompose.reading import TOKENS, tensors_of

RunOf = Callable[..., Any]


class Stop(BaseException):
    """What no handler of errors expects."""


@pytest.fixture
def options(text: Path) -> dict[str, Any]:
    return dict(calibration=text, calibration_tokens=TOKENS, method="fisher")


def same(ours: Path, theirs: Path) -> None:
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        np.testing.assert_array_equal(tensor, b[name])
    assert json.loads((ours / "config.json").read_text()) == json.loads(
        (theirs / "config.json").read_text()
    )


def nothing_that_loads(path: Path) -> None:
    assert not path.exists()
    with pytest.raises(ValueError, match="expected a model, found an unfinished one"):
        open_checkpoint(path.with_name(f"{path.name}.partial"))


def stopped_at_layer_1(
    monkeypatch: pytest.MonkeyPatch, src: Path, dst: Path, **options: Any
) -> None:
    """A run that ends when it is about to write the second layer."""
    real = CanonicalWriter.write

    def stop(self: Any, piece: str, *arguments: Any, **more: Any) -> None:
        if piece == "layer-1":
            raise Stop
        real(self, piece, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(CanonicalWriter, "write", stop)
        with pytest.raises(Stop):
            decompose(src, dst, **options)


class TestInterrupted:
    """Nothing that loads as a model is left, and the same call goes on from there."""

    @pytest.fixture(scope="class")
    @staticmethod
    def whole(run_of: RunOf) -> Any:
        """The uninterrupted run."""
        return run_of("gqa", method="fisher")

    def test_while_it_measures(
        self, whole: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Backwards, so that layer 1 is done when layer 0 fails."""
        real = SpectrumStore.write
        written: list[int] = []

        def write(self: Any, layer: int, *arguments: Any) -> None:
            if layer == 0:
                raise Stop
            real(self, layer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SpectrumStore, "write", write)
            with pytest.raises(Stop):
                decompose(whole.dense.path, tmp_path / "m", **options)
        nothing_that_loads(tmp_path / "m")

        def note(self: Any, layer: int, *arguments: Any) -> None:
            written.append(layer)
            real(self, layer, *arguments)

        monkeypatch.setattr(SpectrumStore, "write", note)
        decompose(whole.dense.path, tmp_path / "m", **options)
        assert written == [0]
        same(tmp_path / "m", whole.path)
        assert not (tmp_path / "m.partial").exists()

    def test_while_it_writes(
        self, whole: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = CanonicalWriter.write
        written: list[str] = []

        stopped_at_layer_1(monkeypatch, whole.dense.path, tmp_path / "m", **options)
        nothing_that_loads(tmp_path / "m")

        def note(self: Any, piece: str, *arguments: Any, **more: Any) -> None:
            written.append(piece)
            real(self, piece, *arguments, **more)

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("statistics are taken again")

        monkeypatch.setattr(CanonicalWriter, "write", note)
        monkeypatch.setattr(measure, "collect", refuse)
        report = decompose(whole.dense.path, tmp_path / "m", **options)
        assert written == ["layer-1"]
        same(tmp_path / "m", whole.path)
        assert report.modules == whole.report.modules and report.keep == whole.report.keep

    def test_before_it_is_published(
        self, whole: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*arguments: Any, **more: Any) -> None:
            raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(CanonicalWriter, "publish", stop)
            with pytest.raises(Stop):
                decompose(whole.dense.path, tmp_path / "m", **options)
        nothing_that_loads(tmp_path / "m")
        decompose(whole.dense.path, tmp_path / "m", **options)
        same(tmp_path / "m", whole.path)

    def test_a_model_is_never_without_its_report(
        self, gqa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rename is the last thing that can fail."""
        real = os.rename
        seen: list[set[str]] = []

        def rename(source: Any, target: Any) -> None:
            if Path(target) == tmp_path / "m":
                seen.append({entry.name for entry in Path(source).iterdir()})
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        decompose(gqa.path, tmp_path / "m", method="svd")
        assert len(seen) == 1
        assert seen[0] == {entry.name for entry in (tmp_path / "m").iterdir()}
        assert {"report.json", "config.json", "tokenizer.json"} <= seen[0]

    def test_ranks_stay_when_spectra_have_gone(
        self, gqa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Layers that are finished have theirs, so energies that differ a little must not change
        those of the rest."""
        spectra = tmp_path / "spectra"
        energies = SpectrumStore.energies
        stopped_at_layer_1(monkeypatch, gqa.path, tmp_path / "m", method="svd", spectra=spectra)
        shutil.rmtree(spectra)

        def other(self: Any, group: Any) -> np.ndarray:
            return energies(self, group) * (3.0 if group.layer else 1.0)

        monkeypatch.setattr(SpectrumStore, "energies", other)
        decompose(gqa.path, tmp_path / "m", method="svd", spectra=spectra)
        monkeypatch.undo()
        decompose(gqa.path, tmp_path / "n", method="svd")
        same(tmp_path / "m", tmp_path / "n")

    def test_killed(self, gqa: Any, tmp_path: Path) -> None:
        """The process is gone from one instruction to the next."""
        script = f"""
import os, signal
from deinfer_jax.checkpoint.canonical import CanonicalWriter
from deinfer_jax.decompose.run import decompose
real = CanonicalWriter.write
def write(self, piece, tensors, **options):
    if piece == "layer-1":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, piece, tensors, **options)
CanonicalWriter.write = write
decompose({str(gqa.path)!r}, {str(tmp_path / "m")!r}, method="svd")
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True)
        assert done.returncode == -9, done.stderr
        nothing_that_loads(tmp_path / "m")
        assert (tmp_path / "m.partial" / "pieces" / "layer-0.safetensors").is_file()
        decompose(gqa.path, tmp_path / "m", method="svd")
        decompose(gqa.path, tmp_path / "n", method="svd")
        same(tmp_path / "m", tmp_path / "n")

    def test_other_settings_do_not_go_on(
        self, gqa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*arguments: Any, **more: Any) -> None:
            raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(CanonicalWriter, "publish", stop)
            with pytest.raises(Stop):
                decompose(gqa.path, tmp_path / "m", method="svd")
        message = r"m\.partial is of a run with other settings .keep: expected 0.6, got 0.7"
        with pytest.raises(ValueError, match=message):
            decompose(gqa.path, tmp_path / "m", method="svd", keep=0.7)


class TestFullDisk:
    def test_finished_parts_are_kept(
        self, gqa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found out when a layer's factors are flushed; the same call goes on with space."""
        real, reached = os.fsync, []

        def full(descriptor: int) -> None:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.endswith("writing/layer-1.safetensors") and "spectra" not in name:
                reached.append(name)
                raise OSError(errno.ENOSPC, "no space")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=r"m\.partial: the disk is full: expected .* same comma"
        ) as e:
            decompose(gqa.path, tmp_path / "m", method="svd")
        assert e.value.errno == errno.ENOSPC and reached
        nothing_that_loads(tmp_path / "m")
        assert (tmp_path / "m.partial" / "pieces" / "layer-0.safetensors").is_file()
        monkeypatch.undo()
        decompose(gqa.path, tmp_path / "m", method="svd")
        decompose(gqa.path, tmp_path / "n", method="svd")
        same(tmp_path / "m", tmp_path / "n")

    def test_a_small_file_system(self, gqa: Any, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a file system is not permitted here")
        try:
            with pytest.raises(OSError, match="the disk is full: expected [0-9,]+ bytes for"):
                decompose(gqa.path, disk / "m", method="svd")
            nothing_that_loads(disk / "m")
        finally:
            subprocess.run(["umount", disk], check=True)
