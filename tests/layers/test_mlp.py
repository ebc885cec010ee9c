"""Activations against torch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_jax.layers.mlp import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-8, 8, 1001, dtype=np.float32)
    theirs = ACT2FN[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(np.asarray(ACTIVATIONS[name](jnp.asarray(x))), theirs, atol=2e-6)
