"""The numbers of a run's report, against the files and torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from deinfer_jax.decompose.report import Report
from deinfer_jax.decompose.run import decompose
from tests.decompose.reading import (
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


class TestReport:
    def test_ranks_and_shapes(self, case: Any) -> None:
        slices = block(case.path)["slices"]
        weights = weights_of(case.dense)
        assert {m.module for m in case.report.modules} == set(weights)
        for m in case.report.modules:
            assert m.rank == (slices[m.module][2] if m.module in slices else None)
            assert m.shape == weights[m.module].shape
            assert m.layer == int(m.module.split(".")[2]) and m.module.endswith(m.projection)

    def test_parameters_and_bytes_are_those_of_the_files(self, case: Any) -> None:
        tensors = {
            name: tensor
            for name, tensor in tensors_of(case.path).items()
            if "_proj" in name or ".v.weight" in name
            if not name.endswith("bias")
        }
        report = case.report
        count = sum(tensor.size for tensor in tensors.values())
        assert sum(m.parameters for m in report.modules) == count
        assert sum(m.bytes for m in report.modules) == sum(t.nbytes for t in tensors.values())
        dense = sum(weight.size for weight in weights_of(case.dense).values())
        assert sum(m.dense_parameters for m in report.modules) == dense
        assert report.keep == count / dense
        assert report.keep_asked is not None
        assert 0.995 * report.keep_asked <= report.keep <= report.keep_asked

    def test_relative_errors(self, case: Any, token_ids: np.ndarray) -> None:
        """‖X Wᵀ − X W′ᵀ‖ / ‖X Wᵀ‖ of every member."""
        if case.report.method == "svd":
            assert {m.relative_error for m in case.report.modules} == {None}
            return
        inputs = inputs_of(case.dense.model, spread(token_ids, TOKENS))
        for m in case.report.modules:
            X, W = inputs[m.module], weights_of(case.dense)[m.module]
            found = factors(case.path, m.module)
            off = 0 * W if found is None else W - found[0] @ found[1]
            expected = np.linalg.norm(X @ off.T) / np.linalg.norm(X @ W.T)
            assert m.relative_error == pytest.approx(expected, rel=1e-3, abs=1e-6)

    def test_it_is_saved_with_the_model(self, case: Any) -> None:
        data = json.loads((case.path / "report.json").read_text())
        assert Report.from_json(data) == Report.from_json(case.report.to_json())

    def test_losses_are_of_fisher_alone(self, case: Any) -> None:
        losses = [m.loss for m in case.report.modules]
        if case.report.method != "fisher":
            assert set(losses) == {None} and case.report.loss is None
            return
        firsts: dict[str, str] = {}
        for m in case.report.modules:
            firsts.setdefault(m.group, m.module)
        for m in case.report.modules:
            assert (m.loss is None) == (m.module != firsts[m.group])
            if m.loss is not None:
                assert m.loss > 0 if m.rank is not None else m.loss == 0

    def test_the_loss_is_in_nats_a_token(
        self, gqa: Any, text: Path, token_ids: np.ndarray, tmp_path: Path
    ) -> None:
        """The estimate of a group against the divergence that cutting it alone makes: second
        order, so of the same size for a small cut, where a wrong factor (½, tokens, windows)
        would not be."""
        import torch

        tokens = spread(token_ids, 16 * WINDOW)
        rows = torch.from_numpy(tokens.astype(np.int64)).reshape(-1, WINDOW)

        def log_p(model: Any) -> Any:
            with torch.no_grad():
                return model(rows, use_cache=False).logits.double().log_softmax(-1)

        base = log_p(gqa.model)
        ratios = []
        for index, (group, rank) in enumerate(
            (f"model.layers.{layer}.{name}", rank)
            for layer in range(2)
            for name, rank in (("self_attn.q_k_v", 22), ("self_attn.o_proj", 20),
                               ("mlp.gate_up", 27), ("mlp.down_proj", 22))
        ):  # fmt: skip
            report = decompose(
                gqa.path,
                tmp_path / str(index),
                ranks={group: rank},
                calibration=text,
                calibration_tokens=len(tokens),
                spectra=tmp_path / "spectra",
            )
            other = log_p(multiplied(gqa, tmp_path / str(index)))
            layer = group.split(".")[2]
            spectra = load_file(tmp_path / "spectra" / f"layer-{layer}.safetensors")
            tail = spectra[f"{group}:energies"][rank:].sum()
            assert report.loss == pytest.approx(tail / 2, rel=1e-12)
            truth = float((base.exp() * (base - other)).sum(-1).mean())
            assert report.loss is not None
            ratios.append(report.loss / truth)
        # Kronecker factors leave out how inputs and gradients go together: 0.65 to 0.94 of it here.
        assert 0.7 < np.exp(np.mean(np.log(ratios))) < 1.2, ratios

    def test_errors_count_the_rounding(self, run_of: RunOf, token_ids: np.ndarray) -> None:
        """The relative error is that of the factors as they are stored."""
        run = run_of("biases", method="whitened", groups="shared-kv", keep=0.7, dtype="bfloat16")
        inputs = inputs_of(run.dense.model, spread(token_ids, TOKENS))
        weights = weights_of(run.dense)
        for m in run.report.modules:
            found = factors(run.path, m.module)
            if found is not None:
                X, W = inputs[m.module], weights[m.module]
                off = np.linalg.norm(X @ (W - found[0] @ found[1]).T) / np.linalg.norm(X @ W.T)
                assert m.relative_error == pytest.approx(off, rel=5e-3)
