"""Whole decompositions of tiny models, against transformers, numpy and the files."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.decompose import measure
from deinfer_jax.decompose.run import decompose
from tests import tiny
from tests.decompose.reading import (
    CASES,
    TOKENS,
    WINDOW,
    block,
    factors,
    inputs_of,
    multiplied,
    spread,
    tensors_of,
    weights_of,
)

RunOf = Callable[..., Any]


def members(groups: Any) -> list[tuple[str, ...]]:
    presets = {
        "shared": (("q", "k", "v"), ("gate", "up")),
        "shared-kv": (("k", "v"), ("gate", "up")),
        "separate": (),
    }
    return list(presets[groups] if isinstance(groups, str) else groups)


class TestModel:
    @pytest.mark.parametrize("name", ["gqa-fisher-shared", "windows-fisher-own"])
    def test_logits_are_those_of_the_products(self, name: str, run_of: RunOf) -> None:
        run = run_of(**CASES[name])
        tokens = tiny.random_tokens(20, seed=9)
        expected = tiny.torch_logits(multiplied(run.dense, run.path), tokens)
        with deinfer_jax.load(run.path, dtype="float32", max_batch=2) as llm:
            logits = llm.logits(tokens.tolist())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.ptp(expected))
        dense = tiny.torch_logits(run.dense.model, tokens)
        assert np.abs(dense - expected).max() > 1e-3 * np.ptp(expected)

    def test_it_opens(self, case: Any) -> None:
        checkpoint = open_checkpoint(case.path)
        assert checkpoint.config.low_rank and checkpoint.config.dtype == "float32"
        kinds = {tensor.dtype.name for tensor in case.tensors().values()}
        assert kinds == {"float32"}

    def test_everything_else_is_as_it_was(self, case: Any) -> None:
        """Embeddings, norms, dense linears, and biases of decomposed ones, to the bit."""
        source, result = case.dense.tensors(), case.tensors()
        slices = block(case.path)["slices"]
        for name, tensor in source.items():
            module, _, kind = name.rpartition(".")
            if module in slices and kind == "weight":
                assert name not in result
            else:
                new = f"{module}.u.bias" if module in slices else name
                np.testing.assert_array_equal(result[new], tensor)

    def test_config_is_the_source_s_but_for_the_block(self, case: Any) -> None:
        source = json.loads((case.dense.path / "config.json").read_text())
        result = json.loads((case.path / "config.json").read_text())
        result.pop("low_rank")
        assert result == source

    def test_tokenizer_and_generation_config(self, case: Any) -> None:
        ours, theirs = (open_checkpoint(p).tokenizer() for p in (case.path, case.dense.path))
        assert ours("w5 w9 w155")["input_ids"] == [5, 9, 155]
        assert ours.get_vocab() == theirs.get_vocab()
        generation = [p / "generation_config.json" for p in (case.path, case.dense.path)]
        assert json.loads(generation[0].read_text()) == json.loads(generation[1].read_text())

    def test_nothing_else_is_left(self, case: Any) -> None:
        assert [entry.name for entry in case.path.parent.iterdir()] == ["model"]
        kinds = {entry.name.split(".")[-1] for entry in case.path.iterdir()}
        assert kinds <= {"json", "safetensors", "jinja"}


class TestBlock:
    """What config.json says of the decomposition."""

    def test_where_it_is_from(self, run_of: RunOf, text: Path, token_ids: np.ndarray) -> None:
        run = run_of(**CASES["gqa-fisher-shared"])
        found = block(run.path)
        said = {key: found[key] for key in ("version", "method", "keep", "allocation", "seed")}
        assert said == {
            "version": 1, "method": "fisher", "keep": 0.6, "allocation": "loss", "seed": 0
        }  # fmt: skip
        assert found["groups"] == "shared"
        ids = spread(token_ids, TOKENS).astype("<i4")
        assert found["calibration"] == {
            "source": "text",
            "names": ["text.txt"],
            "tokens": TOKENS,
            "window": WINDOW,
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        }

    def test_the_base_model_s_hash(self, run_of: RunOf) -> None:
        run = run_of(**CASES["gqa-fisher-shared"])
        lines = ""
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            digest = hashlib.sha256((run.dense.path / name).read_bytes()).hexdigest()
            lines += f"{digest}  {name}\n"
        digest = hashlib.sha256(lines.encode()).hexdigest()
        assert block(run.path)["base_model"] == {"name": "gqa", "sha256": digest}

    def test_the_tokenizer_s_hash(self, case: Any) -> None:
        from deinfer_jax.checkpoint.source import tokenizer_sha256

        tokenizer = open_checkpoint(case.path).tokenizer()
        assert block(case.path)["tokenizer_sha256"] == tokenizer_sha256(tokenizer)

    def test_svd_needs_no_calibration(self, run_of: RunOf) -> None:
        assert block(run_of(**CASES["tied-svd-uniform"]).path)["calibration"] == {}

    @pytest.mark.parametrize("name", CASES)
    def test_groups_share_a_v(self, name: str, run_of: RunOf) -> None:
        slices = block(run_of(**CASES[name]).path)["slices"]
        for module, (v, offset, _) in slices.items():
            parent, _, projection = module.rpartition(".")
            short = projection.removesuffix("_proj")
            group = next(
                (g for g in members(CASES[name].get("groups", "shared")) if short in g), (short,)
            )
            stem = "_".join(group) if len(group) > 1 else f"{short}_proj"
            assert (v, offset) == (f"{parent}.{stem}.v.weight", 0)


class TestFactors:
    """Against the definitions, with the inputs that torch has."""

    def test_whitened_is_at_the_optimum(self, run_of: RunOf, token_ids: np.ndarray) -> None:
        run = run_of(**CASES["biases-whitened-kv"])
        inputs = inputs_of(run.dense.model, spread(token_ids, TOKENS))
        weights = weights_of(run.dense)
        groups: dict[str, list[str]] = {}
        for module, (v, _, _) in block(run.path)["slices"].items():
            groups.setdefault(v, []).append(module)
        assert len(groups) >= 5
        for modules in groups.values():
            X, W = inputs[modules[0]], np.concatenate([weights[m] for m in modules])
            pairs = [factors(run.path, module) for module in modules]
            product = np.concatenate([pair[0] @ pair[1] for pair in pairs if pair is not None])
            rank = pairs[0][1].shape[0] if pairs[0] is not None else 0
            s = np.linalg.svd(X @ W.T, compute_uv=False)
            best = np.sqrt((s[rank:] ** 2).sum())
            assert np.linalg.norm(X @ (W - product).T) == pytest.approx(best, rel=1e-4)

    def test_svd_is_the_truncated_one(self, run_of: RunOf) -> None:
        run = run_of(**CASES["tied-svd-uniform"])
        for module, W in weights_of(run.dense).items():
            found = factors(run.path, module)
            assert found is not None
            u, v = found
            p, s, q = np.linalg.svd(W)
            rank = len(v)
            np.testing.assert_allclose(u @ v, (p[:, :rank] * s[:rank]) @ q[:rank], atol=1e-6)

    def test_both_factors_are_of_one_size(self, case: Any) -> None:
        by_v: dict[str, list[str]] = {}
        for module, (v, _, _) in block(case.path)["slices"].items():
            by_v.setdefault(v, []).append(module)
        tensors = case.tensors()
        for v, modules in by_v.items():
            u = np.concatenate([tensors[f"{module}.u.weight"] for module in modules])
            np.testing.assert_allclose(
                np.linalg.norm(u, axis=0), np.linalg.norm(tensors[v], axis=1), rtol=1e-5
            )


class TestRanks:
    OUT, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"

    def test_explicit_ones(self, run_of: RunOf, gqa: Any, tmp_path: Path) -> None:
        ranks = {self.OUT: 5, self.DOWN: 29, "model.layers.1.self_attn.q_k_v": 7}
        report = decompose(gqa.path, tmp_path / "m", ranks=ranks, method="svd")
        found = {name: piece[2] for name, piece in block(tmp_path / "m")["slices"].items()}
        qkv = {f"model.layers.1.self_attn.{short}_proj": 7 for short in "qkv"}
        assert found == {self.OUT: 5, self.DOWN: 29, **qkv}
        assert report.keep_asked is None and report.allocation == "explicit"
        assert block(tmp_path / "m")["keep"] == report.keep

    def test_above_break_even_is_dense_with_a_note(self, gqa: Any, tmp_path: Path) -> None:
        # 48 × 80: 30 ranks have 3840 parameters, as many as the weight.
        report = decompose(
            gqa.path, tmp_path / "m", ranks={self.DOWN: 30, self.OUT: 3}, method="svd"
        )
        notes = {m.module: m.note for m in report.modules if m.note}
        assert list(notes) == [self.DOWN] and "30 is above break-even" in notes[self.DOWN]
        source, result = gqa.tensors(), tensors_of(tmp_path / "m")
        name = f"{self.DOWN}.weight"
        np.testing.assert_array_equal(result[name], source[name])

    def test_multiples(self, gqa: Any, tmp_path: Path) -> None:
        decompose(gqa.path, tmp_path / "m", method="svd", multiple_of=8)
        assert {rank % 8 for _, _, rank in block(tmp_path / "m")["slices"].values()} == {0}

    def test_rank_1(self, gqa: Any, tmp_path: Path) -> None:
        decompose(gqa.path, tmp_path / "m", method="svd", ranks={self.OUT: 1})
        run = {name: t.shape for name, t in tensors_of(tmp_path / "m").items() if self.OUT in name}
        assert run == {f"{self.OUT}.v.weight": (1, 48), f"{self.OUT}.u.weight": (48, 1)}

    @pytest.mark.parametrize("options", [{"keep": 1}, {"keep": 1.0}, {"ranks": {}}])
    def test_all_dense_is_the_source(self, gqa: Any, tmp_path: Path, options: Any) -> None:
        report = decompose(gqa.path, tmp_path / "m", method="svd", **options)
        source, result = gqa.tensors(), tensors_of(tmp_path / "m")
        assert source.keys() == result.keys() and report.keep == 1
        for name, tensor in source.items():
            np.testing.assert_array_equal(result[name], tensor)
        assert not open_checkpoint(tmp_path / "m").config.low_rank


class TestDtype:
    @pytest.mark.parametrize(
        ("dtype", "kind", "step"),
        [("bfloat16", ml_dtypes.bfloat16, 2.0**-8), ("float16", np.float16, 2.0**-11)],
    )
    def test_is_what_was_asked_for(
        self, gqa: Any, tmp_path: Path, dtype: str, kind: Any, step: float
    ) -> None:
        decompose(gqa.path, tmp_path / "exact", method="svd")
        report = decompose(gqa.path, tmp_path / "m", method="svd", dtype=dtype)
        exact, found = tensors_of(tmp_path / "exact"), tensors_of(tmp_path / "m")
        assert exact.keys() == found.keys()
        for name, tensor in found.items():
            assert tensor.dtype == kind
            near = np.abs(exact[name]) * step * 1.01 + 2.0**-25
            assert (np.abs(tensor.astype(np.float32) - exact[name]) <= near).all()
        assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == dtype
        assert sum(m.bytes for m in report.modules) == 2 * sum(m.parameters for m in report.modules)

    def test_is_the_source_s_otherwise(self, gqa: Any, tmp_path: Path) -> None:
        import torch

        half = copy.deepcopy(gqa.model).to(torch.bfloat16)
        half.save_pretrained(tmp_path / "half")
        decompose(tmp_path / "half", tmp_path / "m", method="svd")
        assert {t.dtype.name for t in tensors_of(tmp_path / "m").values()} == {"bfloat16"}
        assert open_checkpoint(tmp_path / "m").config.dtype == "bfloat16"


class TestAgain:
    def test_the_same_call_gives_the_same_bits(
        self, run_of: RunOf, text: Path, tmp_path: Path
    ) -> None:
        run = run_of(**CASES["gqa-fisher-shared"])
        decompose(run.dense.path, tmp_path / "m", calibration=text, calibration_tokens=TOKENS)
        ours, theirs = tensors_of(tmp_path / "m"), run.tensors()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor, theirs[name])
        assert block(tmp_path / "m") == block(run.path)

    def test_another_seed_has_other_labels(self, run_of: RunOf) -> None:
        one = run_of(**CASES["gqa-fisher-shared"])
        other = run_of(**CASES["gqa-fisher-shared"], seed=1)
        assert block(other.path)["seed"] == 1
        losses = [[m.loss for m in run.report.modules if m.loss] for run in (one, other)]
        assert not set(losses[0]) & set(losses[1])

    def test_another_keep_from_kept_spectra(
        self, run_of: RunOf, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is measured again, and nothing differs from a run of its own."""
        run = run_of(**CASES["gqa-fisher-shared"])
        options: dict[str, Any] = dict(
            calibration=text, calibration_tokens=TOKENS, spectra=tmp_path / "spectra"
        )
        decompose(run.dense.path, tmp_path / "a", keep=0.9, dtype="bfloat16", **options)

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("statistics are taken again")

        for name in ("collect", "decompose", "BlockRunner"):
            monkeypatch.setattr(measure, name, refuse)
        decompose(run.dense.path, tmp_path / "b", **options)
        ours, theirs = tensors_of(tmp_path / "b"), run.tensors()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor, theirs[name])
        mine = json.loads((tmp_path / "b" / "report.json").read_text())
        other = run.report.to_json()
        measured = {"seconds": None, "peak_bytes": None}  # of this process, and so never the same
        assert mine | measured == other | measured


class TestCalibration:
    def test_several_texts(self, gqa: Any, token_ids: np.ndarray, tmp_path: Path) -> None:
        for name, start in (("a.txt", 0), ("b.txt", 200)):
            words = " ".join(f"w{i}" for i in token_ids[start : start + 100])
            (tmp_path / name).write_text(words)
        paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
        report = decompose(
            gqa.path, tmp_path / "m", method="whitened", calibration=paths, calibration_tokens=128
        )
        ids = np.concatenate([spread(token_ids[start : start + 100], 64) for start in (0, 200)])
        ids = ids.astype("<i4")
        assert report.calibration["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
        assert report.calibration["names"] == ["a.txt", "b.txt"]

    def test_the_model_writes_its_own(
        self, gqa: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO", logger="deinfer_jax"):
            report = decompose(
                gqa.path, tmp_path / "m", method="whitened", calibration_tokens=2 * WINDOW, seed=3
            )
        assert "no calibration text: the model writes 64 tokens itself" in caplog.text
        said = {"source": "self", "names": ["plain text"], "seed": 3, "tokens": 64, "window": 32}
        assert said.items() <= report.calibration.items()
        assert said.items() <= block(tmp_path / "m")["calibration"].items()
