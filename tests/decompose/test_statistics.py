"""Moments of inputs and gradients against torch's own autograd through transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.decompose.blocks import BlockRunner
from deinfer_jax.decompose.groups import find_blocks, form_groups
from deinfer_jax.decompose.methods import Moments
from deinfer_jax.decompose.statistics import collect
from tests import tiny

SAMPLES = 20_000
WINDOWS, LENGTH = 3, 22  # longer than the windows of attention, 5 and 7
VARIANTS = ("gqa", "biases", "qwen3", "mistral-window", "qwen2-windows")


def improbable(key: Any, logits: Any, axis: int = -1) -> Any:
    """In the place of sampling: the least probable label, which torch finds as well."""
    return jnp.argmin(logits, axis=axis)


class Case:
    """A tiny model, and what torch says of it: float64 inputs and gradients of every linear."""

    def __init__(self, variant: str, directory: Path) -> None:
        self.model = tiny.make(variant, directory)
        self.tokens = tiny.random_tokens(WINDOWS * LENGTH).reshape(WINDOWS, LENGTH)
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        device = jax.devices()[0]
        self.runner = BlockRunner(checkpoint, max_context=LENGTH, device=device)
        # Another, because what was compiled with other labels keeps them.
        self._labelled = BlockRunner(checkpoint, max_context=LENGTH, device=device)
        self.model.double()
        self.weights = {
            name.removesuffix(".weight"): parameter.detach().numpy()
            for name, parameter in self.model.named_parameters()
        }
        self.inputs: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self._run()

    def _run(self) -> None:
        import torch

        names = self.config.linears()
        seen: dict[str, list[Any]] = {name: [] for name in names}

        def hook(name: str) -> Any:
            def keep(module: Any, args: Any, output: Any) -> None:
                output.retain_grad()
                seen[name].append((args[0].detach(), output))

            return keep

        handles = [
            module.register_forward_hook(hook(name))
            for name, module in self.model.named_modules()
            if name in names
        ]
        for window in self.tokens:
            ids = torch.from_numpy(window.astype(np.int64))[None]
            logits = self.model(ids, use_cache=False).logits
            low = logits.topk(2, largest=False).values
            assert (low[..., 1] - low[..., 0]).min() > 1e-4  # else float32 might choose another
            labels = logits.argmin(-1)
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
            loss.backward()
        for handle in handles:
            handle.remove()
        for name, calls in seen.items():
            self.inputs[name] = np.concatenate([x[0].numpy() for x, _ in calls])
            self.gradients[name] = np.concatenate([y.grad[0].numpy() for _, y in calls])

    def collect_labelled(self, groups: Any = "shared", **options: Any) -> dict[str, Moments]:
        """With the labels that torch took."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "categorical", improbable)
            return self.collect(groups, runner=self._labelled, **options)

    def collect(self, groups: Any = "shared", **options: Any) -> dict[str, Moments]:
        found: dict[str, Moments] = {}
        defaults: dict[str, Any] = dict(
            gradients=True,
            seed=0,
            label_samples=1,
            have=lambda layer: False,
            take=lambda layer, moments: found.update(moments),
            progress=False,
            runner=self.runner,
            tokens=self.tokens,
            groups=form_groups(find_blocks(self.config), groups),
        )
        collect(**(defaults | options))
        return found


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("gqa", tmp_path_factory.mktemp("gqa"))


def second(rows: np.ndarray) -> np.ndarray:
    return rows.T @ rows / len(rows)


def close(found: Any, expected: np.ndarray) -> None:
    """To 2e-5 of the largest element: float32 through two layers, squared."""
    assert isinstance(found, np.ndarray) and found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("groups", ["shared", "separate"])
def test_moments(case: Case, groups: str) -> None:
    found = case.collect_labelled(groups)
    formed = form_groups(find_blocks(case.config), groups)
    assert found.keys() == {group.name for group in formed}
    for group in formed:
        moments = found[group.name]
        x = case.inputs[group.modules[0]]
        g = np.concatenate([case.gradients[module] for module in group.modules], axis=1)
        W = np.concatenate([case.weights[module] for module in group.modules])
        if W.shape[0] > W.shape[1]:
            close(moments.inputs, second(x))
            close(moments.pulled, second(g @ W))
            assert moments.outputs is None and moments.gradients is None
        else:
            close(moments.outputs, second(x @ W.T))
            close(moments.gradients, second(g))
            assert moments.inputs is None and moments.pulled is None
        assert moments.input_energy == pytest.approx((x**2).mean(), rel=1e-5)
        assert moments.gradient_energy == pytest.approx((g**2).mean(), rel=1e-4)


def test_without_gradients(case: Case) -> None:
    found = case.collect("shared-kv", gradients=False)
    for group in form_groups(find_blocks(case.config), "shared-kv"):
        moments = found[group.name]
        x = case.inputs[group.modules[0]]
        W = np.concatenate([case.weights[module] for module in group.modules])
        if W.shape[0] > W.shape[1]:
            close(moments.inputs, second(x))
        else:
            close(moments.outputs, second(x @ W.T))
        assert moments.pulled is None and moments.gradients is None
        assert moments.gradient_energy == 0


class TestWindows:
    """A window is a sequence of its own; all count alike."""

    def test_moments_are_the_mean_over_windows(self, gqa: Case) -> None:
        together = gqa.collect_labelled()
        alone = [gqa.collect_labelled(tokens=gqa.tokens[i : i + 1]) for i in range(WINDOWS)]
        for name, moments in together.items():
            for side in ("inputs", "pulled", "outputs", "gradients"):
                if getattr(moments, side) is not None:
                    mean = np.mean([getattr(one[name], side) for one in alone], axis=0)
                    scale = np.abs(mean).max()
                    np.testing.assert_allclose(
                        getattr(moments, side), mean, rtol=0, atol=1e-12 * scale
                    )
            assert moments.input_energy == pytest.approx(
                np.mean([one[name].input_energy for one in alone]), rel=1e-12
            )

    def test_their_order_does_not_count_for_inputs(self, gqa: Case) -> None:
        there = gqa.collect(gradients=False)
        back = gqa.collect(gradients=False, tokens=gqa.tokens[::-1].copy())
        for name, moments in there.items():
            side = "inputs" if moments.inputs is not None else "outputs"
            a, b = getattr(moments, side), getattr(back[name], side)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * np.abs(a).max())


def test_label_sequences_are_averaged(gqa: Case) -> None:
    """Two that are equal count as one."""
    one, two = gqa.collect_labelled(), gqa.collect_labelled(label_samples=2)
    for name, moments in two.items():
        for side in ("pulled", "gradients"):
            if getattr(moments, side) is not None:
                close(getattr(moments, side), getattr(one[name], side))
        assert moments.gradient_energy == pytest.approx(one[name].gradient_energy, rel=1e-5)


@pytest.fixture(scope="module")
def drawn(gqa: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients [samples, T, D] for many labels of a few positions, the exact logits [T, W] and
    their derivatives [T, W, D]."""
    import torch

    x = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    weights = gqa.runner.load_layer(0)
    found = gqa.runner.head(weights, jnp.asarray(x), jax.random.key(7), SAMPLES)

    def head(row: Any) -> Any:
        return gqa.model.lm_head(gqa.model.model.norm(row))

    rows = torch.from_numpy(x.astype(np.float64))
    logits = head(rows).detach().numpy()
    slopes = np.stack([torch.autograd.functional.jacobian(head, row).numpy() for row in rows])
    return np.asarray(found, np.float64), logits, slopes


class TestLabels:
    """Drawn from the model itself."""

    def test_the_gradient_is_that_of_some_label(self, drawn: Any) -> None:
        """(p − onehot) pulled through head and norm; which label it was is found by trying all."""
        found, logits, slopes = drawn
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        for t in range(3):
            candidates = p[t] @ slopes[t] - slopes[t]  # [W, D]
            distance = np.abs(found[:200, t, None, :] - candidates[None]).max(-1).min(-1)
            assert distance.max() < 1e-5 * np.abs(candidates).max()

    def test_labels_are_as_frequent_as_they_are_probable(self, drawn: Any) -> None:
        found, logits, slopes = drawn
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        for t in range(3):
            candidates = p[t] @ slopes[t] - slopes[t]
            # The nearest candidate, by |a − b|² = a² − 2ab + b².
            scores = (candidates**2).sum(-1) - 2 * found[:, t] @ candidates.T
            counts = np.bincount(scores.argmin(-1), minlength=p.shape[1])
            expected = p[t] * SAMPLES
            off = (counts - expected) / np.sqrt(expected * (1 - p[t]) + 1e-9)
            assert np.abs(off[expected > 5]).max() < 5
            assert counts[expected <= 5].sum() <= 3 * expected[expected <= 5].sum() + 10

    def test_positions_draw_for_themselves(self, drawn: Any) -> None:
        found, logits, slopes = drawn
        centred = found - found.mean(0)
        cross = np.einsum("sd,se->de", centred[:, 0], centred[:, 1]) / SAMPLES
        sizes = np.sqrt((centred**2).mean(0))
        assert np.abs(cross / (sizes[0][:, None] * sizes[1][None])).max() < 0.05

    def test_equal_windows_draw_different_labels(self, gqa: Case) -> None:
        """Else two windows of one text would count as one seen twice."""
        twice = gqa.collect(tokens=np.repeat(gqa.tokens[:1], 2, axis=0))
        once = gqa.collect(tokens=gqa.tokens[:1])
        name = "model.layers.0.mlp.down_proj"
        assert twice[name].gradient_energy != pytest.approx(once[name].gradient_energy, rel=1e-3)
        assert twice[name].input_energy == pytest.approx(once[name].input_energy, rel=1e-6)

    def test_the_seed_decides(self, gqa: Case) -> None:
        name = "model.layers.0.mlp.down_proj"
        one, same, other = (gqa.collect(seed=seed)[name].gradients for seed in (3, 3, 4))
        assert one is not None and other is not None
        np.testing.assert_array_equal(one, same)
        assert np.abs(one - other).max() > 1e-2 * np.abs(one).max()


class TestResume:
    @pytest.mark.parametrize("gradients", [False, True])
    @pytest.mark.parametrize("done", [{0}, {1}])
    def test_finished_layers_are_not_measured_again(
        self, gqa: Case, gradients: bool, done: set[int]
    ) -> None:
        whole = gqa.collect(gradients=gradients)
        taken: list[int] = []
        rest: dict[str, Moments] = {}

        def take(layer: int, moments: dict[str, Moments]) -> None:
            taken.append(layer)
            rest.update(moments)

        gqa.collect(gradients=gradients, have=lambda layer: layer in done, take=take)
        assert taken == sorted({0, 1} - done)
        assert rest.keys() == {name for name in whole if f"layers.{taken[0]}." in name}
        for name, moments in rest.items():
            for side in ("inputs", "pulled", "outputs", "gradients"):
                np.testing.assert_array_equal(getattr(moments, side), getattr(whole[name], side))

    @pytest.mark.parametrize(("gradients", "order"), [(False, [0, 1]), (True, [1, 0])])
    def test_every_layer_is_given_when_it_is_ready(
        self, gqa: Case, gradients: bool, order: list[int]
    ) -> None:
        taken: list[int] = []
        gqa.collect(gradients=gradients, take=lambda layer, moments: taken.append(layer))
        assert taken == order


def test_moments_that_are_not_finite_name_the_group(
    gqa: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlockRunner.record

    def spoil(self: Any, layer: int, *arguments: Any) -> Any:
        inputs, gradients, gx = real(self, layer, *arguments)
        if layer == 1:
            inputs["model.layers.1.mlp.down_proj"] *= jnp.float32("inf")
        return inputs, gradients, gx

    monkeypatch.setattr(BlockRunner, "record", spoil)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj.* not finite"):
        gqa.collect(gradients=False)
