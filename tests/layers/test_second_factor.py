"""A projection's own share of a block of linears: its latent, its rows of u and its bias."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers.test_linear import LAYOUTS, WIDTHS, expand, fill, random_x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_u_c_and_bias_is_the_projections_output(layout: str, bias: bool) -> None:
    block = expand(LAYOUTS[layout], bias=bias)
    fill(block)
    x = jnp.asarray(random_x())
    z = block.latents(x)
    outputs = dict(zip(WIDTHS, block.outputs(block.products(x, z)), strict=True))
    decomposed = {name.rpartition(".")[2]: piece for name, piece in LAYOUTS[layout].slices}
    for short in WIDTHS:
        latent, second = block.latent(short, z), block.second_factor(short)
        if short not in decomposed:
            assert latent is None and second is None
            continue
        assert latent is not None and second is not None
        u, b = second
        width = -(-decomposed[short].rank // 8) * 8
        assert latent.shape == (len(x), width) and (b is None) == (not bias)
        expected = np.asarray(latent, np.float64) @ np.asarray(u, np.float64).T
        if b is not None:
            expected += np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(outputs[short]), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", ["shared q k v", "shared k v"])
def test_members_of_a_group_have_their_own_rows(layout: str) -> None:
    block = expand(LAYOUTS[layout], bias=False)
    tensors = fill(block)
    for short in ("k_proj", "v_proj"):
        second = block.second_factor(short)
        assert second is not None
        name = f"model.layers.0.self_attn.{short}.u.weight"
        u = np.asarray(second[0])
        rank = tensors[name].shape[1]
        np.testing.assert_array_equal(u[:, :rank], tensors[name])
        assert not u[:, rank:].any()
