"""The linears of a block, dense or low-rank: y = W x + b, or y = u (v x) + b.

:class:`Expand` holds the projections that read the same input, as stacked products;
:class:`Contract` holds the one that writes the residual stream. A strategy
(``deinfer_jax.parallel``) says how their arrays are split over devices, and calls their stages one
after the other, with the collectives in between. Inside them everything is the device's own part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deinfer_jax.config import LowRank, Slice
from deinfer_jax.layers.parameter import INIT_SCALE, Rows, concatenated, parameter
from deinfer_jax.parallel.shares import Share, deal, deal_rank, whole
from deinfer_jax.parallel.strategy import Strategy

__all__ = ["Contract", "Expand", "product"]

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

    Example: q dense and {k, v} sharing a v of rank 16 give w [Oq, D], v [16, D] and one u [Ok + Ov,
    16] that reads z[:, 0:16]; with a v each, of ranks 10 and 5, which are padded with zeros to 16
    and 8, v is [24, D] and two u's read z[:, 0:16] and z[:, 16:24]. Here R, ``rank``, is 24; below
    these rows v may have more, of zeros, so that z has columns for what a collective brings along.

    *Sharding contract*: w is split on its outputs (heads, F) or on D; v on R or on D; u on its
    outputs or on its rank, and in that case v on the rank of each slice alone, so that the two
    match. Collectives stand between ``latents``, ``products`` and ``outputs``; what they move is
    the strategy's to say.

    Args:
        parent: module the projections belong to, e.g. ``model.layers.0.self_attn``.
        outputs: by projection, in order, its output width or how that is dealt to devices.
        in_features: D.
        bias: whether each projection has a bias.
        low_rank: the slices; a projection not in there is dense.
        strategy: how the arrays are split.
    """

    def __init__(
        self,
        parent: str,
        outputs: Mapping[str, int | Share],
        in_features: int,
        *,
        bias: bool,
        low_rank: LowRank,
        dtype: jnp.dtype,
        strategy: Strategy,
    ) -> None:
        split, devices = strategy.expanding, strategy.devices
        shares = {short: _share(width) for short, width in outputs.items()}
        names = {short: f"{parent}.{short}" for short in outputs}
        slices = {short: low_rank.get(name) for short, name in names.items()}
        every = whole(in_features)

        dense = [short for short in outputs if slices[short] is None]
        self.dense_outputs = tuple((short, shares[short].width) for short in dense)
        weights = [Rows(f"{names[short]}.weight", shares[short]) for short in dense]
        columns = deal(in_features, devices) if split.w == "in" else every
        self.w = parameter(weights, dtype, scale=INIT_SCALE, columns=columns) if dense else None

        # One entry a distinct slice: the members that read it.
        groups: dict[Slice, list[str]] = {}
        for short in outputs:
            piece = slices[short]
            if piece is not None:
                groups.setdefault(piece, []).append(short)
        factor_ranks: dict[str, int] = {}
        for piece in groups:
            factor_ranks[piece.v] = max(factor_ranks.get(piece.v, 0), piece.offset + piece.rank)
        pair = {
            piece: deal_rank(piece.rank, devices if split.u == "rank" else 1) for piece in groups
        }
        rows = [Rows(s.v, pair[s], s.offset, factor_ranks[s.v]) for s in groups]
        widths = [pair[piece].width for piece in groups]
        starts, self.rank = _starts(widths), sum(widths)
        if split.u == "rank":
            first = partial(parameter, rows, columns=every)
        else:
            columns = strategy.residual(in_features) if split.v == "in" else every
            parts = devices if split.v == "rank" else 1
            height = strategy.latent_buffer(self.rank, dtype)
            first = partial(concatenated, rows, parts, columns=columns, height=height)
        self.v = first(dtype=dtype, scale=INIT_SCALE) if groups else None
        self.u = nnx.List([])
        for piece, members in groups.items():
            seconds = [Rows(f"{names[m]}.u.weight", shares[m]) for m in members]
            self.u.append(parameter(seconds, dtype, scale=INIT_SCALE, columns=pair[piece]))
        self.group_outputs = tuple(
            tuple((m, shares[m].width) for m in group) for group in groups.values()
        )
        self.group_slices = tuple(
            (start, pair[piece].width) for start, piece in zip(starts, groups, strict=True)
        )

        biases = [Rows(_bias_name(names[m], slices[m]), shares[m]) for m in outputs]
        self.bias = parameter(biases, dtype, scale=INIT_SCALE) if bias else None
        self.order = tuple(outputs)
        self.widths = tuple(shares[m].width for m in outputs)

    @property
    def has_dense(self) -> bool:
        """Whether any of the projections is dense."""
        return self.w is not None

    def latents(self, x: Float[Array, "T d"]) -> Float[Array, "T R"] | None:
        """First stage: z = v x of all decomposed projections, or None where all are dense."""
        return None if self.v is None else product(self.v[...], _apart(x))

    def products(
        self, x: Float[Array, "T d"] | None, z: Float[Array, "T R"] | None
    ) -> list[Float[Array, "T _"]]:
        """Second stage: the product of the dense projections, then one a group of the others,
        without biases.

        Args:
            x: the input, of which only dense projections read anything.
            z: the latents.
        """
        found = []
        if self.w is not None:
            assert x is not None
            found.append(product(self.w[...], _apart(x)))
        for u, (offset, rank) in zip(self.u, self.group_slices, strict=True):
            assert z is not None
            found.append(product(u[...], z[:, offset : offset + rank]))
        return found

    def outputs(self, products: list[Float[Array, "T _"]]) -> tuple[Float[Array, "T _"], ...]:
        """Third stage: every projection's output with its bias, in declaration order."""
        groups = ((self.dense_outputs,) if self.has_dense else ()) + self.group_outputs
        found: dict[str, Array] = {}
        for y, members in zip(products, groups, strict=True):
            found.update(_split(y, members))
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

    *Sharding contract*: w and v may be split on their inputs (heads, F), or v and u on the rank; u
    may be split on D, or be whole. Collectives stand between ``latents``, ``product`` and
    ``output``.

    Args:
        name: the module, e.g. ``model.layers.0.self_attn.o_proj``.
        inputs: input width, or how that is dealt to devices.
        out_features: D.
        strategy: how the arrays are split.
    """

    def __init__(
        self,
        name: str,
        inputs: int | Share,
        out_features: int,
        *,
        bias: bool,
        low_rank: LowRank,
        dtype: jnp.dtype,
        strategy: Strategy,
    ) -> None:
        split, devices = strategy.contracting, strategy.devices
        outputs, columns = strategy.residual(out_features), _share(inputs)
        every = whole(out_features)
        piece = low_rank.get(name)
        # Where every device has all inputs, a weight that is to be split on them is cut anew.
        own = deal(columns.size, devices if split.w == "in" else 1)
        used = columns if columns.split else own
        # Nothing else reads the input, so ``LowRank`` has seen to it that the slice is all of v.
        rank = 1 if piece is None else piece.rank
        of_v, of_u = (
            deal_rank(rank, devices if axis == "rank" else 1) for axis in (split.v, split.u)
        )

        def single(tensor: str, rows: Share, columns: Share | None) -> nnx.Param[Any]:
            return parameter([Rows(tensor, rows)], dtype, scale=INIT_SCALE, columns=columns)

        self.w = single(f"{name}.weight", every, used) if piece is None else None
        self.v = single(piece.v, of_v, columns) if piece is not None else None
        self.u = single(f"{name}.u.weight", outputs, of_u) if piece is not None else None
        self.bias = single(_bias_name(name, piece), outputs, None) if bias else None

    def latents(self, h: Float[Array, "T I"]) -> Float[Array, "T R"] | None:
        """First stage: z = v h, or None where the projection is dense."""
        return None if self.v is None else product(self.v[...], h)

    def product(self, h: Float[Array, "T I"], z: Float[Array, "T R"] | None) -> Float[Array, "T O"]:
        """Second stage: u z, or w h where the projection is dense, without the bias."""
        if self.w is not None:
            return product(self.w[...], h)
        assert self.u is not None and z is not None
        return product(self.u[...], z)

    def output(self, product: Float[Array, "T O"]) -> Float[Array, "T O"]:
        """Third stage: with the bias, what is added to the residual."""
        return product if self.bias is None else product + self.bias[...][None, :]


def _apart(x: Array) -> Array:
    """x, which XLA is to compute before the product that reads it.

    On a GPU it would take the end of a norm, · w, into the product's fusion; where cuBLAS is faster
    than that fusion, what it took stays behind as a kernel of its own, which reads and writes all
    of x once more.
    """
    return jax.lax.optimization_barrier(x)


def _share(width: int | Share) -> Share:
    return whole(width) if isinstance(width, int) else width


def _bias_name(module: str, piece: Slice | None) -> str:
    return f"{module}.bias" if piece is None else f"{module}.u.bias"


def _starts(widths: Iterable[int]) -> list[int]:
    """Where each of some widths begins that lie side by side."""
    return list(itertools.accumulate(widths, initial=0))[:-1]


def _rows(stack: Array, members: tuple[tuple[str, int], ...], short: str) -> Array:
    """The rows of one of the members that are stacked on the first axis."""
    starts = _starts([width for _, width in members])
    index = [member for member, _ in members].index(short)
    return stack[starts[index] : starts[index] + members[index][1]]


def _split(y: Array, members: tuple[tuple[str, int], ...]) -> dict[str, Array]:
    starts = _starts([width for _, width in members])
    return {
        short: y[:, start : start + width]
        for (short, width), start in zip(members, starts, strict=True)
    }
