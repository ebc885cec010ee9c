"""The three methods against their definitions: full singular value decompositions, roots and
Cholesky factors of both sides, all in float64 and none of it the code's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deinfer_jax.decompose.methods import (
    GRADIENT_DAMPING,
    INPUT_DAMPING,
    METHODS,
    Moments,
    Spectrum,
    decompose,
)

SHAPES = {"tall": (29, 17), "wide": (13, 23), "square": (19, 19)}
RANKS = (1, 2, 7, 12)
TOKENS = 211


def make(shape: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W [out, in], inputs X [tokens, in] and gradients [tokens, out], columns correlated."""
    rng = np.random.default_rng(seed)
    out, width = SHAPES[shape]
    mix_in = rng.standard_normal((width, width)) * np.geomspace(1, 0.03, width)
    mix_out = rng.standard_normal((out, out)) * np.geomspace(1, 0.03, out)
    return (
        rng.standard_normal((out, width)),
        rng.standard_normal((TOKENS, width)) @ mix_in,
        rng.standard_normal((TOKENS, out)) @ mix_out,
    )


def moments(W: np.ndarray, X: np.ndarray, grads: np.ndarray | None = None) -> Moments:
    """What calibration would give: the smaller side."""
    n = len(X)
    y = X @ W.T
    energy = float((X**2).sum() / n / W.shape[1])
    if grads is None:
        if W.shape[0] > W.shape[1]:
            return Moments(inputs=X.T @ X / n, input_energy=energy)
        return Moments(outputs=y.T @ y / n, input_energy=energy)
    pulled = grads @ W
    energies: dict[str, Any] = {
        "input_energy": energy,
        "gradient_energy": float((grads**2).sum() / n / W.shape[0]),
    }
    if W.shape[0] > W.shape[1]:
        return Moments(inputs=X.T @ X / n, pulled=pulled.T @ pulled / n, **energies)
    return Moments(outputs=y.T @ y / n, gradients=grads.T @ grads / n, **energies)


def product(spectrum: Spectrum, rank: int) -> np.ndarray:
    u, v = spectrum.factors(rank)
    assert u.shape[1] == v.shape[0] == rank
    return u @ v


def output_error(X: np.ndarray, W: np.ndarray, product: np.ndarray) -> float:
    return float(np.linalg.norm(X @ (W - product).T))


def optimum(X: np.ndarray, W: np.ndarray, rank: int) -> float:
    """√ Σ_{i>r} s² of X Wᵀ."""
    s = np.linalg.svd(X @ W.T, compute_uv=False)
    return float(np.sqrt((s[rank:] ** 2).sum()))


def root(symmetric: np.ndarray, power: float = 0.5) -> np.ndarray:
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * values**power) @ vectors.T


def cut_svd(matrix: np.ndarray, rank: int) -> np.ndarray:
    p, s, q = np.linalg.svd(matrix, full_matrices=False)
    return (p[:, :rank] * s[:rank]) @ q[:rank]


@pytest.mark.parametrize("shape", SHAPES)
class TestSVD:
    def test_is_the_truncated_svd(self, shape: str) -> None:
        W, _, _ = make(shape)
        found = decompose(W, None, "svd")
        for rank in RANKS:
            np.testing.assert_allclose(product(found, rank), cut_svd(W, rank), atol=1e-12)

    def test_energies(self, shape: str) -> None:
        W, _, _ = make(shape)
        s = np.linalg.svd(W, compute_uv=False)
        np.testing.assert_allclose(decompose(W, None, "svd").energies, s**2, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
class TestWhitened:
    """At the optimum of ‖X Wᵀ − X W′ᵀ‖."""

    def test_reaches_the_optimum(self, shape: str) -> None:
        W, X, _ = make(shape)
        found = decompose(W, moments(W, X), "whitened")
        for rank in RANKS:
            best = optimum(X, W, rank)
            assert best > 0
            assert output_error(X, W, product(found, rank)) == pytest.approx(best, rel=1e-9)

    def test_equals_the_cholesky_route(self, shape: str) -> None:
        """SVD-LLM: L lower with G = L Lᵀ, svd(W L), and L⁻¹ from the right."""
        W, X, _ = make(shape)
        found = decompose(W, moments(W, X), "whitened")
        lower = np.linalg.cholesky(X.T @ X)
        for rank in RANKS:
            expected = np.linalg.solve(lower.T, cut_svd(W @ lower, rank).T).T
            np.testing.assert_allclose(product(found, rank), expected, atol=1e-9)

    def test_the_upper_factor_is_another_and_worse(self, shape: str) -> None:
        """What the route above must not be mistaken for: it would pass for small mistakes only."""
        W, X, _ = make(shape)
        upper = np.linalg.cholesky(X.T @ X).T
        wrong = np.linalg.solve(upper.T, cut_svd(W @ upper, 7).T).T
        found = decompose(W, moments(W, X), "whitened")
        assert output_error(X, W, wrong) > 1.1 * output_error(X, W, product(found, 7))

    def test_is_better_than_svd(self, shape: str) -> None:
        W, X, _ = make(shape)
        found = decompose(W, moments(W, X), "whitened")
        assert output_error(X, W, product(found, 5)) < 0.9 * output_error(X, W, cut_svd(W, 5))

    def test_energies_are_squared_singular_values_a_token(self, shape: str) -> None:
        W, X, _ = make(shape)
        s = np.linalg.svd(X @ W.T / np.sqrt(TOKENS), compute_uv=False)[: min(W.shape)]
        found = decompose(W, moments(W, X), "whitened")
        np.testing.assert_allclose(found.energies, s**2, rtol=1e-9, atol=1e-12 * s[0] ** 2)

    def test_full_rank_is_the_weight(self, shape: str) -> None:
        W, X, _ = make(shape)
        found = decompose(W, moments(W, X), "whitened")
        np.testing.assert_allclose(product(found, min(W.shape)), W, atol=1e-9)

    # A direction whose share of the output energy is below float64's 1e-16 cannot be seen, so 1e-8
    # of the outputs' norm is what an optimum of 0 comes to.
    @pytest.mark.parametrize("tokens", [1, 3, 9])
    def test_fewer_tokens_than_inputs(self, shape: str, tokens: int) -> None:
        W, X, _ = make(shape)
        X = X[:tokens]
        found = decompose(W, moments(W, X), "whitened")
        for rank in RANKS:
            error = output_error(X, W, product(found, rank))
            assert error <= optimum(X, W, rank) * (1 + 1e-9) + 1e-7 * np.linalg.norm(X @ W.T)

    @pytest.mark.parametrize("kind", ["duplicate", "zero", "zero and duplicate"])
    def test_columns_that_make_the_moments_singular(self, shape: str, kind: str) -> None:
        W, X, _ = make(shape)
        if "duplicate" in kind:
            X[:, 5], X[:, 6] = X[:, 1], -2 * X[:, 2]
        if "zero" in kind:
            X[:, 3] = 0
        found = decompose(W, moments(W, X), "whitened")
        for rank in RANKS:
            error = output_error(X, W, product(found, rank))
            assert error == pytest.approx(optimum(X, W, rank), rel=1e-8)
            assert np.abs(product(found, rank)).max() < 100

    def test_repeated_singular_values(self, shape: str) -> None:
        """W and inputs such that X Wᵀ has singular values 3 (six times) and 1."""
        W, X, _ = make(shape)
        X = np.linalg.qr(X)[0]
        p, _, q = np.linalg.svd(W, full_matrices=False)
        s = np.where(np.arange(min(W.shape)) < 6, 3.0, 1.0)
        W = (p * s) @ q
        found = decompose(W, moments(W, X), "whitened")
        for rank in (1, 3, 6, 8):
            best = np.sqrt((s[rank:] ** 2).sum())
            assert output_error(X, W, product(found, rank)) == pytest.approx(best, rel=1e-10)

    def test_large_and_small_inputs(self, shape: str) -> None:
        """Outlier channels of real models: a thousand times the others."""
        W, X, _ = make(shape)
        X[:, 4] *= 1e3
        found = decompose(W, moments(W, X), "whitened")
        for rank in RANKS:
            error = output_error(X, W, product(found, rank))
            assert error == pytest.approx(optimum(X, W, rank), rel=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
class TestFisher:
    """u v = F^−½ cut(svd(F^½ W G^½)) G^−½ with both sides damped, and formed here in full."""

    def damped(self, W: np.ndarray, X: np.ndarray, grads: np.ndarray) -> tuple[Any, Any]:
        F, G = grads.T @ grads / len(grads), X.T @ X / len(X)
        F += 1e-2 * np.trace(F) / len(F) * np.eye(len(F))
        G += 1e-4 * np.trace(G) / len(G) * np.eye(len(G))
        return F, G

    def test_damping(self, shape: str) -> None:
        assert (GRADIENT_DAMPING, INPUT_DAMPING) == (1e-2, 1e-4)

    def test_equals_the_formula(self, shape: str) -> None:
        W, X, grads = make(shape)
        F, G = self.damped(W, X, grads)
        found = decompose(W, moments(W, X, grads), "fisher")
        for rank in RANKS:
            cut = cut_svd(root(F) @ W @ root(G), rank)
            expected = root(F, -0.5) @ cut @ root(G, -0.5)
            np.testing.assert_allclose(product(found, rank), expected, atol=2e-10)

    def test_energies(self, shape: str) -> None:
        W, X, grads = make(shape)
        F, G = self.damped(W, X, grads)
        s = np.linalg.svd(root(F) @ W @ root(G), compute_uv=False)
        found = decompose(W, moments(W, X, grads), "fisher")
        np.testing.assert_allclose(found.energies, s**2, rtol=1e-9)

    def test_tail_is_the_error_in_both_norms(self, shape: str) -> None:
        W, X, grads = make(shape)
        F, G = self.damped(W, X, grads)
        found = decompose(W, moments(W, X, grads), "fisher")
        for rank in RANKS:
            off = root(F) @ (W - product(found, rank)) @ root(G)
            assert found.tail(rank) == pytest.approx((off**2).sum(), rel=1e-9)

    def test_full_rank_is_the_weight(self, shape: str) -> None:
        W, X, grads = make(shape)
        found = decompose(W, moments(W, X, grads), "fisher")
        np.testing.assert_allclose(product(found, min(W.shape)), W, atol=1e-9)

    def test_isotropic_gradients_are_whitened(self, shape: str) -> None:
        W, X, grads = make(shape)
        q = np.linalg.qr(grads)[0] * 3.0  # F is a multiple of 1
        found = decompose(W, moments(W, X, q), "fisher")
        G = X.T @ X / TOKENS
        lower = np.linalg.cholesky(G + 1e-4 * np.trace(G) / len(G) * np.eye(len(G)))
        expected = np.linalg.solve(lower.T, cut_svd(W @ lower, 6).T).T
        np.testing.assert_allclose(product(found, 6), expected, atol=1e-9)

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_fewer_tokens_than_dimensions(self, shape: str, tokens: int) -> None:
        W, X, grads = (array[:tokens] if i else array for i, array in enumerate(make(shape)))
        F, G = self.damped(W, X, grads)
        found = decompose(W, moments(W, X, grads), "fisher")
        for rank in RANKS:
            expected = root(F, -0.5) @ cut_svd(root(F) @ W @ root(G), rank) @ root(G, -0.5)
            np.testing.assert_allclose(product(found, rank), expected, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
class TestFactors:
    def test_columns_of_u_are_as_long_as_rows_of_v(self, shape: str, method: Any) -> None:
        W, X, grads = make(shape)
        u, v = decompose(W, moments(W, X, grads), method).factors(9)
        np.testing.assert_allclose(np.linalg.norm(u, axis=0), np.linalg.norm(v, axis=1), rtol=1e-12)

    def test_smaller_ranks_are_the_first_of_larger_ones(self, shape: str, method: Any) -> None:
        W, X, grads = make(shape)
        spectrum = decompose(W, moments(W, X, grads), method)
        few, many = spectrum.factors(4), spectrum.factors(9)
        np.testing.assert_array_equal(few[0], many[0][:, :4])
        np.testing.assert_array_equal(few[1], many[1][:4])

    def test_energies_fall_and_are_as_many_as_directions(self, shape: str, method: Any) -> None:
        W, X, grads = make(shape)
        energies = decompose(W, moments(W, X, grads), method).energies
        assert energies.shape == (min(W.shape),) and energies.dtype == np.float64
        assert (np.diff(energies) <= 0).all() and (energies >= 0).all()

    def test_tail(self, shape: str, method: Any) -> None:
        W, X, grads = make(shape)
        spectrum = decompose(W, moments(W, X, grads), method)
        assert spectrum.tail(3) == pytest.approx(sum(sorted(spectrum.energies)[:-3]), rel=1e-12)
        assert spectrum.tail(min(W.shape)) == 0 and spectrum.tail(None) == 0

    def test_a_weight_of_low_rank_is_exact_at_it(self, shape: str, method: Any) -> None:
        W, X, grads = make(shape)
        W = cut_svd(W, 3)
        spectrum = decompose(W, moments(W, X, grads), method)
        # What is beyond the rank is rounding, which sqrt makes 1e-8.
        np.testing.assert_allclose(product(spectrum, 3), W, atol=1e-7)
        np.testing.assert_allclose(product(spectrum, 9), W, atol=1e-7)

    def test_nothing_comes_of_nothing(self, shape: str, method: Any) -> None:
        """A weight of zeros: dead directions on both sides, and not a number nowhere."""
        W, X, grads = make(shape)
        W = np.zeros_like(W)
        u, v = decompose(W, moments(W, X, grads), method).factors(5)
        np.testing.assert_array_equal(u @ v, W)
        assert np.isfinite(u).all() and np.isfinite(v).all()


@pytest.mark.parametrize("method", ["whitened", "fisher"])
@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_and_gradients_that_are_all_zero(shape: str, method: Any) -> None:
    W, X, grads = make(shape)
    u, v = decompose(W, moments(W, 0 * X, 0 * grads), method).factors(5)
    assert np.isfinite(u).all() and np.isfinite(v).all()


def test_a_dead_direction_is_zero_in_both_factors() -> None:
    spectrum = Spectrum(
        energies=np.array([4.0, 0.0, 0.0]),
        left=np.array([[2.0, 0.0, 5.0], [0.0, 0.0, 0.0]]),
        right=np.array([[0.5, 0.0], [3.0, 4.0], [0.0, 0.0]]),
    )
    u, v = spectrum.factors(3)
    np.testing.assert_array_equal(u, [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(v, [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
