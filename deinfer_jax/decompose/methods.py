"""The mathematics of a decomposition: W ≈ u v, in float64.

For a linear y = W x with input moments G = E[x xᵀ] and gradients g = ∂loss/∂y of moments
F = E[g gᵀ], all three methods minimise ‖F^½ (W − u v) G^½‖ over factors of a rank: ``svd`` with
F = G = 1, ``whitened`` with F = 1 (the output error), ``fisher`` with both (the Kronecker-factored
second-order estimate of the loss, ½ Σ over the singular values that are cut of s²). The optimum
comes from P S Qᵀ = svd(F^½ W G^½); see :func:`decompose` for how it is reached without forming the
larger of F and G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

__all__ = ["METHODS", "Method", "Moments", "Spectrum", "decompose"]

Method = Literal["fisher", "whitened", "svd"]
METHODS: tuple[Method, ...] = ("fisher", "whitened", "svd")
Matrix = Float[np.ndarray, "_ _"]

# Damping of fisher, in units of the mean of the diagonal; taken as given, not tuned.
INPUT_DAMPING = 1e-4
GRADIENT_DAMPING = 1e-2
# Directions of less than this share of the largest eigenvalue are rounding noise of float64.
NULL_SPACE = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """Second moments of a group over the calibration tokens, averaged, float64; one side only, the
    smaller.

    Attributes:
        inputs: G = E[x xᵀ] [in, in], where out > in.
        pulled: A = E[(Wᵀg)(Wᵀg)ᵀ] [in, in], where out > in; None without gradients.
        outputs: C = E[(W x)(W x)ᵀ] [out, out], where out ≤ in.
        gradients: F = E[g gᵀ] [out, out], where out ≤ in; None without gradients.
        input_energy: mean of G's diagonal.
        gradient_energy: mean of F's diagonal; 0 without gradients.
    """

    inputs: Matrix | None = None
    pulled: Matrix | None = None
    outputs: Matrix | None = None
    gradients: Matrix | None = None
    input_energy: float = 0.0
    gradient_energy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spectrum:
    """A decomposition of full rank, to be cut at any.

    Attributes:
        energies: s² [min(out, in)], falling: twice the estimated loss of a direction (``fisher``),
            its share of the output energy (``whitened``), of the weights' energy (``svd``).
        left: [out, n] float64, right: [n, in] float64; W ≈ left[:, :r] @ right[:r].
    """

    energies: Float[np.ndarray, " n"]
    left: Matrix
    right: Matrix

    def factors(self, rank: int) -> tuple[Matrix, Matrix]:
        """u [out, r] and v [r, in] of the best approximation of that rank, their scales balanced:
        column j of u and row j of v are of equal norm, which bounds the range of 16-bit floats."""
        u, v = self.left[:, :rank], self.right[:rank]
        norms = np.linalg.norm(u, axis=0), np.linalg.norm(v, axis=1)
        # A direction beyond the rank of W or of the calibration is 0 on one side: then both are.
        dead = (norms[0] == 0) | (norms[1] == 0)
        scale = np.sqrt(np.where(dead, 0.0, norms[1]) / np.where(dead, 1.0, norms[0]))
        return u * scale, v * np.where(dead, 0.0, 1 / np.where(dead, 1.0, scale))[:, None]

    def tail(self, rank: int | None) -> float:
        """Σ s² beyond a rank; 0 for None, a group that stays dense."""
        return 0.0 if rank is None else float(self.energies[rank:].sum())


def decompose(weight: Matrix, moments: Moments | None, method: Method) -> Spectrum:
    """The best approximations of a weight, of all ranks at once.

    With out > in, everything follows from G^½ A G^½ = Q S² Qᵀ: u v = W G^½ Q_r · Q_rᵀ G^−½, without
    a root of F. Otherwise from F^½ C F^½ = P S² Pᵀ: u v = F^−½ P_r · P_rᵀ F^½ W, without a root of
    G. ``whitened`` is the same with A = WᵀW and F = 1. Equal to the formula in the module's
    docstring; a singular G needs no inverse where out ≤ in, and its null space is left out
    elsewhere.

    Args:
        weight: W [out, in] float64.
        moments: of the group, on the side that is smaller; unused by ``svd``.
        method: of ``METHODS``.
    """
    out_features, in_features = weight.shape
    if method == "svd":
        left, s, right = np.linalg.svd(weight, full_matrices=False)
        return Spectrum(energies=s**2, left=left * s, right=right)
    assert moments is not None
    fisher = method == "fisher"
    if out_features > in_features:
        assert moments.inputs is not None
        G, A = moments.inputs, weight.T @ weight
        if fisher:
            assert moments.pulled is not None
            G = _damped(G, INPUT_DAMPING * moments.input_energy)
            A = moments.pulled + GRADIENT_DAMPING * moments.gradient_energy * A
        root, inverse_root = _roots(G)
        energies, Q = _eigh(root @ A @ root)
        return Spectrum(energies=energies, left=weight @ (root @ Q), right=Q.T @ inverse_root)
    assert moments.outputs is not None
    if not fisher:
        energies, P = _eigh(moments.outputs)
        return Spectrum(energies=energies, left=P, right=P.T @ weight)
    assert moments.gradients is not None
    C = moments.outputs + INPUT_DAMPING * moments.input_energy * (weight @ weight.T)
    F = _damped(moments.gradients, GRADIENT_DAMPING * moments.gradient_energy)
    root, inverse_root = _roots(F)
    energies, P = _eigh(root @ C @ root)
    return Spectrum(energies=energies, left=inverse_root @ P, right=P.T @ root @ weight)


def _damped(moments: Matrix, amount: float) -> Matrix:
    return moments + amount * np.eye(len(moments))


def _eigh(symmetric: Matrix) -> tuple[np.ndarray, Matrix]:
    """Eigenvalues, falling and not below 0, and eigenvectors in columns."""
    values, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2)
    return np.maximum(values[::-1], 0.0), np.ascontiguousarray(vectors[:, ::-1])


def _roots(moments: Matrix) -> tuple[Matrix, Matrix]:
    """Symmetric M^½ and its pseudo-inverse."""
    values, vectors = _eigh(moments)
    kept = values > NULL_SPACE * values[0]
    roots = np.where(kept, np.sqrt(values), 0.0)
    inverses = np.where(kept, 1 / np.where(kept, roots, 1.0), 0.0)
    return (vectors * roots) @ vectors.T, (vectors * inverses) @ vectors.T
