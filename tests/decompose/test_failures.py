"""What a decomposition refuses, and what is left of one that is interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deinfer_jax.decompose.run import decompose
from tests.decompose.reading import TOKENS

RunOf = Callable[..., Any]


def changed(dense: Any, directory: Path, **tensors: Callable[[np.ndarray], Any]) -> Path:
    """A copy of a model with tensors changed in place; in names dots are written ``__``."""
    shutil.copytree(dense.path, directory)
    file = directory / "model.safetensors"
    found = {name: tensor.copy() for name, tensor in load_file(file).items()}
    for name, change in tensors.items():
        change(found[name.replace("__", ".")])
    save_file(found, file, metadata={"format": "pt"})
    return directory


class TestRefused:
    """Said before anything is written."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"keep": 0}, "keep: expected 0 < keep <= 1, got 0"),
            ({"keep": -0.2}, "keep: expected 0 < keep <= 1, got -0.2"),
            ({"keep": 1.2}, "keep: expected 0 < keep <= 1, got 1.2"),
            ({"keep": 0.01}, "keep: 0.01 leaves .* parameters, expected at least"),
            ({"method": "asvd"}, "method: expected one of fisher, whitened, svd, got 'asvd'"),
            ({"allocation": "even"}, "allocation: expected .* got 'even'"),
            ({"dtype": "int8"}, "dtype: expected one of .*bfloat16.* got 'int8'"),
            ({"dtype": "float64"}, "dtype: expected one of .* got 'float64'"),
            ({"groups": "all"}, "groups: expected 'shared', .* got 'all'"),
            ({"groups": (("q", "o"),)}, "members that read the same input, got .*'q', 'o'"),
            ({"groups": (("up", "down"),)}, "members that read the same input"),
            ({"multiple_of": 0}, "multiple_of: expected a positive integer, got 0"),
            ({"seed": -1}, "seed: expected an integer .* got -1"),
            ({"seed": 2**32}, "seed: expected an integer .* got 4294967296"),
            ({"calibration_tokens": 100}, "calibration_tokens: expected a multiple of 32, got 100"),
            ({"calibration_tokens": 0}, "calibration_tokens: expected a multiple of 32, got 0"),
            ({"calibration": []}, "calibration: expected a text file or several"),
            (
                {"calibration": np.zeros((2, 16), int), "calibration_tokens": 64},
                "calibration_tokens: expected None or the 32 token ids that are given, got 64",
            ),
            (
                {"calibration": np.full((2, 16), 10**6), "calibration_tokens": None},
                "calibration ids: expected ids from 0 to",
            ),
            ({"calibration_tokens": 640}, r"text\.txt: expected at least 640 tokens, got 600"),
            ({"ranks": {"lm_head": 4}}, r"ranks: expected module names .* got \['lm_head'\]"),
            ({"ranks": {"model.layers.0.mlp.down_proj": 0}}, "down_proj: expected 1 to 48, got 0"),
        ],
    )
    def test_arguments(
        self, gqa: Any, text: Path, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        defaults: dict[str, Any] = dict(calibration=text, calibration_tokens=TOKENS)
        with pytest.raises(ValueError, match=message):
            decompose(gqa.path, tmp_path / "m", **(defaults | options))
        assert list(tmp_path.iterdir()) == []

    def test_a_rank_that_is_a_truth_value(self, gqa: Any, tmp_path: Path) -> None:
        with pytest.raises((ValueError, TypeError), match="ranks: .*down_proj.*expected"):
            decompose(gqa.path, tmp_path / "m", ranks={"model.layers.0.mlp.down_proj": True})

    def test_a_destination_that_exists(self, gqa: Any, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        with pytest.raises(FileExistsError, match="m: expected .*exists"):
            decompose(gqa.path, tmp_path / "m", method="svd")
        assert [entry.name for entry in tmp_path.iterdir()] == ["m"]

    def test_a_decomposed_source(self, run_of: RunOf, tmp_path: Path) -> None:
        run = run_of("gqa", method="svd")
        with pytest.raises(ValueError, match="expected a dense model, got a decomposed one"):
            decompose(run.path, tmp_path / "m", method="svd")

    def test_a_missing_text(self, gqa: Any, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"expected a text file, .* at .*none\.txt"):
            decompose(gqa.path, tmp_path / "m", calibration=tmp_path / "none.txt")

    def test_a_text_without_a_tokenizer(self, gqa: Any, text: Path, tmp_path: Path) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(gqa.path / name, bare)
        for calibration in (text, None):
            with pytest.raises(
                ValueError, match="expected token ids .* the model has no tokenizer"
            ):
                decompose(bare, tmp_path / "m", calibration=calibration, calibration_tokens=TOKENS)
        assert not (tmp_path / "m.partial").exists()
        ids = np.arange(64).reshape(2, 32) % 50
        decompose(bare, tmp_path / "m", method="whitened", calibration=ids)

    def test_a_corrected_call_goes_through(self, gqa: Any, text: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = dict(calibration=text, method="whitened")
        with pytest.raises(ValueError, match="expected at least 640 tokens, got 600"):
            decompose(gqa.path, tmp_path / "m", calibration_tokens=640, **options)
        decompose(gqa.path, tmp_path / "m", calibration_tokens=TOKENS, **options)

    @pytest.mark.parametrize("place", ["m", "m/spectra", "m.partial", "m.partial/spectra"])
    def test_spectra_inside_of_the_model(self, gqa: Any, tmp_path: Path, place: str) -> None:
        with pytest.raises(ValueError, match="spectra: expected a folder outside of"):
            decompose(gqa.path, tmp_path / "m", method="svd", spectra=tmp_path / place)
        assert list(tmp_path.iterdir()) == []


class TestSpectra:
    """A folder of something else is refused, and stays as it is."""

    @pytest.fixture
    def folder(self, gqa: Any, tmp_path: Path) -> Path:
        decompose(gqa.path, tmp_path / "first", method="svd", spectra=tmp_path / "spectra")
        return tmp_path / "spectra"

    def test_of_another_model(self, dense_of: Any, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="spectra is of a run with other settings .base_model"):
            decompose(dense_of("mha").path, tmp_path / "m", method="svd", spectra=folder)

    def test_of_other_groups(self, gqa: Any, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="spectra is of a run with other settings .groups"):
            decompose(gqa.path, tmp_path / "m", method="svd", spectra=folder, groups="separate")

    def test_of_another_method(self, gqa: Any, folder: Path, text: Path, tmp_path: Path) -> None:
        before = {file.name: file.read_bytes() for file in folder.glob("layer*")}
        with pytest.raises(ValueError, match="other settings .method: expected 'svd', got 'whit"):
            decompose(
                gqa.path,
                tmp_path / "m",
                method="whitened",
                calibration=text,
                calibration_tokens=TOKENS,
                spectra=folder,
            )
        assert {file.name: file.read_bytes() for file in folder.glob("layer*")} == before

    def test_of_a_text_that_has_changed(
        self, gqa: Any, token_ids: np.ndarray, tmp_path: Path
    ) -> None:
        file = tmp_path / "t.txt"
        options: dict[str, Any] = dict(
            method="whitened",
            calibration=file,
            calibration_tokens=TOKENS,
            spectra=tmp_path / "spectra",
        )
        file.write_text(" ".join(f"w{i}" for i in token_ids))
        decompose(gqa.path, tmp_path / "a", **options)
        file.write_text(" ".join(f"w{i}" for i in token_ids[::-1]))
        with pytest.raises(ValueError, match="spectra is of a run with other settings .calibrat"):
            decompose(gqa.path, tmp_path / "b", **options)

    def test_of_another_seed(self, gqa: Any, text: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = dict(
            calibration=text, calibration_tokens=32, spectra=tmp_path / "spectra"
        )
        decompose(gqa.path, tmp_path / "a", **options)
        with pytest.raises(ValueError, match="other settings .seed: expected 0, got 1"):
            decompose(gqa.path, tmp_path / "b", seed=1, **options)

    def test_the_refused_call_leaves_nothing(
        self, dense_of: Any, folder: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match="other settings"):
            decompose(dense_of("mha").path, tmp_path / "m", method="svd", spectra=folder)
        assert not (tmp_path / "m.partial").exists()


class TestNotFinite:
    """Stopped, with the module's name."""

    @pytest.mark.parametrize("method", ["svd", "whitened", "fisher"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_weights(self, gqa: Any, text: Path, tmp_path: Path, method: str, value: float) -> None:
        name = "model.layers.1.mlp.up_proj.weight"

        def spoil(weight: np.ndarray) -> None:
            weight[3, 4] = value

        source = changed(gqa, tmp_path / "s", **{name.replace(".", "__"): spoil})
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj.*not.* finite"):
            decompose(
                source,
                tmp_path / "m",
                method=method,
                calibration=text,
                calibration_tokens=TOKENS,
            )
        assert not (tmp_path / "m").exists()

    @pytest.mark.parametrize(
        "name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    )
    def test_what_lies_outside_of_the_layers(self, gqa: Any, tmp_path: Path, name: str) -> None:
        def spoil(weight: np.ndarray) -> None:
            weight.flat[0] = np.nan

        source = changed(gqa, tmp_path / "s", **{name.replace(".", "__"): spoil})
        with pytest.raises(ValueError, match=f"{name}.*not.* finite"):
            decompose(source, tmp_path / "m", method="svd", spectra=tmp_path / "spectra")

    def test_activations(self, gqa: Any, text: Path, tmp_path: Path) -> None:
        """Weights that are finite, and products of them that are not: gate · up is 1e52."""

        def enlarge(weight: np.ndarray) -> None:
            weight *= 1e26

        source = changed(
            gqa, tmp_path / "s", model__layers__1__post_attention_layernorm__weight=enlarge
        )
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj.* not finite"):
            decompose(
                source, tmp_path / "m", method="whitened", calibration=text, calibration_tokens=32
            )

    def test_a_dtype_too_narrow(self, gqa: Any, tmp_path: Path) -> None:
        def enlarge(weight: np.ndarray) -> None:
            weight[0] = 1e5

        source = changed(gqa, tmp_path / "s", model__norm__weight=enlarge)
        with pytest.raises(ValueError, match=r"model\.norm\.weight: not .* finite in float16"):
            decompose(source, tmp_path / "m", method="svd", dtype="float16")
        decompose(source, tmp_path / "b", method="svd", dtype="bfloat16")
