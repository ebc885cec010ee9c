"""The linears of a block, dense or low-rank: y = W x + b, or y = u (v x) + b.

:class:`Expand` holds the projections that read the same input, as stacked products;
:class:`Contract` holds the one that writes the residual stream. How they are split over devices and
where the collectives stand is a strategy's business (``deinfer_jax.parallel``), which calls the two
stages, ``latents`` and ``outputs``, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deinfer_jax.config import LowRank, Slice
from deinfer_jax.layers.parameter import Source, parameter, stacked

__all__ = ["Contract", "Expand", "product"]

INIT_SCALE = 0.02
WEIGHT_FIRST_ROWS = 128  # see `product`
_LAST_AXES = (((1,), (1,)), ((), ()))  # both operands are contracted over their last axis


def product(w: Float[Array, "O I"], x: Float[Array, "T I"]) -> Float[Array, "T O"]:
    """x Wᵀ in x's dtype.

    With few rows in x a CPU streams W about twice as fast when W is the left operand, (W xᵀ)ᵀ; XLA
    would fold the two transposes away, which the barrier prevents. Measured on two cores for
    SmolLM2's products in float32: 32 instead of 53 ms at 8 rows, 194 instead of 216 at 128, but 972
    instead of 751 at 512.
    """

    def weight_first(w: Array, x: Array) -> Array:
        y = jax.lax.dot_general(w, x, _LAST_AXES)
        return jax.lax.optimization_barrier(y).T

    def rows_first(w: Array, x: Array) -> Array:
        return jax.lax.dot_general(x, w, _LAST_AXES)

    if x.shape[0] > WEIGHT_FIRST_ROWS:
        return rows_first(w, x)
    return jax.lax.platform_dependent(w, x, cpu=weight_first, default=rows_first)


class Expand(nnx.Module):
    """Projections that read the same input x [T, D]: {q, k, v}, {gate, up}.

    The dense ones are one product with their weights stacked, the first factors of the others are
    one product z = v x [T, R], and each group of projections that share a slice of z is one product
    with their u's stacked. All three may occur in one block.

    Example: q dense and {k, v} sharing a v of rank 5 give w [Oq, D], v [5, D] and one u [Ok + Ov,
    5] that reads z[:, 0:5]; with a v each, of ranks 5 and 3, v is [8, D] and two u's read z[:, 0:5]
    and z[:, 5:8].

    *Sharding contract*: u and w may be split on their outputs (heads, F), v on R or on D; the
    collective, if any, stands between ``latents`` and ``outputs`` and moves R elements a token. On
    one device all are whole.

    Args:
        parent: module the projections belong to, e.g. ``model.layers.0.self_attn``.
        outputs: output width by projection, in order.
        in_features: D.
        bias: whether each projection has a bias.
        low_rank: the slices; a projection not in there is dense.
    """

    def __init__(
        self,
        parent: str,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        bias: bool,
        low_rank: LowRank,
        dtype: jnp.dtype,
    ) -> None:
        names = {short: f"{parent}.{short}" for short in outputs}
        slices = {short: low_rank.get(name) for short, name in names.items()}

        dense = [short for short in outputs if slices[short] is None]
        self.dense_outputs = tuple((short, outputs[short]) for short in dense)
        weights = stacked(
            [(f"{names[short]}.weight", (outputs[short], in_features)) for short in dense]
        )
        self.w = parameter(weights, dtype, scale=INIT_SCALE) if dense else None

        # One entry a distinct slice: the members that read it.
        groups: dict[Slice, list[str]] = {}
        factor_ranks: dict[str, int] = {}
        for short in outputs:
            piece = slices[short]
            if piece is not None:
                groups.setdefault(piece, []).append(short)
                factor_ranks[piece.v] = max(factor_ranks.get(piece.v, 0), piece.offset + piece.rank)
        factors = stacked([(v, (rank, in_features)) for v, rank in factor_ranks.items()])
        self.v = parameter(factors, dtype, scale=INIT_SCALE) if groups else None
        self.u = nnx.List([])
        for piece, members in groups.items():
            seconds = stacked([(f"{names[m]}.u.weight", (outputs[m], piece.rank)) for m in members])
            self.u.append(parameter(seconds, dtype, scale=INIT_SCALE))
        start = {factor.name: factor.start for factor in factors}
        self.group_outputs = tuple(
            tuple((m, outputs[m]) for m in group) for group in groups.values()
        )
        self.group_slices = tuple((start[piece.v] + piece.offset, piece.rank) for piece in groups)

        biases = stacked([(_bias_name(names[m], slices[m]), (outputs[m],)) for m in outputs])
        self.bias = parameter(biases, dtype, scale=INIT_SCALE) if bias else None
        self.order, self.widths = tuple(outputs), tuple(outputs.values())

    def latents(self, x: Float[Array, "T D"]) -> Float[Array, "T R"] | None:
        """First stage: z = v x of all decomposed projections, or None where all are dense."""
        return None if self.v is None else product(self.v[...], x)

    def outputs(
        self, x: Float[Array, "T D"], z: Float[Array, "T R"] | None
    ) -> tuple[Float[Array, "T O"], ...]:
        """Second stage: every projection's output, in declaration order."""
        found: dict[str, Array] = {}
        if self.w is not None:
            found.update(_split(product(self.w[...], x), self.dense_outputs))
        for u, members, (offset, rank) in zip(
            self.u, self.group_outputs, self.group_slices, strict=True
        ):
            assert z is not None
            found.update(_split(product(u[...], z[:, offset : offset + rank]), members))
        if self.bias is None:
            return tuple(found[short] for short in self.order)
        biases = jnp.split(self.bias[...], _starts(self.widths)[1:])
        return tuple(found[short] + b[None, :] for short, b in zip(self.order, biases, strict=True))

    def latent(self, short: str, z: Float[Array, "T R"] | None) -> Float[Array, "T r"] | None:
        """The slice of z that a projection reads, or None where it is dense."""
        group = self._group(short)
        if group is None:
            return None
        assert z is not None
        offset, rank = self.group_slices[group]
        return z[:, offset : offset + rank]

    def second_factor(
        self, short: str
    ) -> tuple[Float[Array, "O r"], Float[Array, " O"] | None] | None:
        """A projection's own rows of its group's u, and its bias: output = u c + b for its latent
        c. None where it is dense."""
        group = self._group(short)
        if group is None:
            return None
        members = self.group_outputs[group]
        u = _rows(self.u[group][...], members, short)
        if self.bias is None:
            return u, None
        every = tuple(zip(self.order, self.widths, strict=True))
        return u, _rows(self.bias[...], every, short)

    def _group(self, short: str) -> int | None:
        for index, members in enumerate(self.group_outputs):
            if any(short == member for member, _ in members):
                return index
        return None


class Contract(nnx.Module):
    """The projection that writes the residual stream (o, down): dense, or u (v h).

    *Sharding contract*: w and v may be split on their inputs (heads, F), u on D; the collective
    stands between ``latents`` and ``outputs`` (R elements a token), or behind w (D elements). On
    one device all are whole.

    Args:
        name: the module, e.g. ``model.layers.0.self_attn.o_proj``.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        low_rank: LowRank,
        dtype: jnp.dtype,
    ) -> None:
        piece = low_rank.get(name)
        # Nothing else reads its input, so ``LowRank`` has seen to it that the slice is all of v.

        def single(tensor: str, *shape: int) -> nnx.Param[Any]:
            return parameter([Source(tensor, 0, shape)], dtype, scale=INIT_SCALE)

        self.w = single(f"{name}.weight", out_features, in_features) if piece is None else None
        self.v = single(piece.v, piece.rank, in_features) if piece is not None else None
        self.u = single(f"{name}.u.weight", out_features, piece.rank) if piece is not None else None
        self.bias = single(_bias_name(name, piece), out_features) if bias else None

    def latents(self, h: Float[Array, "T I"]) -> Float[Array, "T R"] | None:
        """First stage: z = v h, or None where the projection is dense."""
        return None if self.v is None else product(self.v[...], h)

    def outputs(self, h: Float[Array, "T I"], z: Float[Array, "T R"] | None) -> Float[Array, "T O"]:
        """Second stage: what is added to the residual."""
        if self.w is not None:
            y = product(self.w[...], h)
        else:
            assert self.u is not None and z is not None
            y = product(self.u[...], z)
        return y if self.bias is None else y + self.bias[...][None, :]


def _bias_name(module: str, piece: Slice | None) -> str:
    return f"{module}.bias" if piece is None else f"{module}.u.bias"


def _starts(widths: tuple[int, ...]) -> list[int]:
    starts = [0]
    for width in widths[:-1]:
        starts.append(starts[-1] + width)
    return starts


def _rows(stack: Array, members: tuple[tuple[str, int], ...], short: str) -> Array:
    """The rows of one of the members that are stacked on the first axis."""
    starts = _starts(tuple(width for _, width in members))
    index = [member for member, _ in members].index(short)
    return stack[starts[index] : starts[index] + members[index][1]]


def _split(y: Array, members: tuple[tuple[str, int], ...]) -> dict[str, Array]:
    starts = _starts(tuple(width for _, width in members))
    return {
        short: y[:, start : start + width]
        for (short, width), start in zip(members, starts, strict=True)
    }
