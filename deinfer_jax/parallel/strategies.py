"""The strategies of more than one device, with every collective that they place.

|  | residual x | expanding: v, collective, u | contracting: v, collective, u |
|---|---|---|---|
| ``dense`` | whole | W on out, none | W on in, all-reduce D |
| ``naive`` | whole | R, none, R and all-reduce of the output | the same |
| ``low_rank`` | whole | R, all-gather R, heads or F | heads or F, all-reduce R, whole |
| ``sharded`` | split on D | D, all-reduce R and Σx², heads or F | heads or F, all-reduce R, D |

``dense`` and ``naive`` are the baselines of the DeInfer paper (arXiv 2604.17709), ``low_rank`` is
the paper's, ``sharded`` ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from deinfer_jax.parallel.mesh import AXIS
from deinfer_jax.parallel.riders import add_riders, buffer_width
from deinfer_jax.parallel.strategy import (
    FEW_ROWS,
    Contracting,
    Expanding,
    Norm,
    Single,
    Split,
    Strategy,
    Table,
    check_splits,
)

__all__ = [
    "STRATEGIES",
    "Dense",
    "LowRank",
    "Naive",
    "Sharded",
    "WholeResidual",
    "check_strategy",
    "get_strategy",
    "register_strategy",
]


class WholeResidual(Strategy):
    """What strategies have in common that leave the residual stream whole on every device: word
    tables are split on W.

    *Sharding contract*: an all-reduce of D elements a token brings the embedding together; logits
    stay split.
    """

    def embed(self, tokens: Int32[Array, " T"], table: Table) -> Float[Array, "T D"]:
        """Every device looks up the words it has, and the sum is all."""
        return jax.lax.psum(_own_words(tokens, table), AXIS)

    def logits(self, x: Float[Array, "T D"], norm: Norm, table: Table) -> Float[Array, "T w"]:
        """See ``Strategy.logits``."""
        return _own_logits(norm(x), table)


class Dense(WholeResidual):
    """What tensor parallelism does to a dense model; factors are multiplied out at load.

    *Sharding contract*: W of q, k, v, gate, up split on heads or F, of o and down on their inputs;
    an all-reduce of D elements a token after each of those two.
    """

    name = "dense"
    multiplies_out = True
    expanding = Split(w="out")
    contracting = Split(w="in")

    def expand(
        self, x: Float[Array, "T D"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], None]:
        """See ``Strategy.expand``."""
        return block.outputs(block.products(norm(x), None)), None

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T D"]:
        """See ``Strategy.contract``."""
        return projection.output(jax.lax.psum(projection.product(h, None), AXIS))


class Naive(WholeResidual):
    """The paper's baseline: every pair of factors is a layer of its own, cut in the middle, and
    attention is repeated on every device.

    *Sharding contract*: v and u split on R, dense W on its inputs; an all-reduce of the *whole
    output* after every product with u or W.
    """

    name = "naive"
    expanding = Split(w="in", v="rank", u="rank")
    contracting = Split(w="in", v="rank", u="rank")

    def expand(
        self, x: Float[Array, "T D"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T r"] | None]:
        """As ``Strategy.expand``, but the latents are this device's part of each."""
        h = norm(x)
        z = block.latents(h)
        products = block.products(self._own_part(h), z)
        return block.outputs([jax.lax.psum(y, AXIS) for y in products]), z

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T D"]:
        """See ``Strategy.contract``."""
        z = projection.latents(h)
        product = projection.product(self._own_part(h) if z is None else h, z)
        return projection.output(jax.lax.psum(product, AXIS))

    @staticmethod
    def combine_rebuilt(heads: Array) -> Array:
        """Heads of the whole context, rebuilt from a part of the latents on every device."""
        return jax.lax.psum(heads, AXIS)

    def _own_part(self, h: Array) -> Array:
        """The columns of h that this device's part of a dense weight reads."""
        width = -(-h.shape[1] // self.devices)
        padded = jnp.pad(h, ((0, 0), (0, width * self.devices - h.shape[1])))
        return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(AXIS) * width, width, axis=1)


class LowRank(WholeResidual):
    """The paper's: collectives are as narrow as the latents, attention is split on heads.

    *Sharding contract*: of q k v and gate up, v is split on R (their first factors are one product,
    cut without regard to the slices), an all-gather of R elements a token makes z whole, u is split
    on heads or F; of o and down, v is split on heads or F, an all-reduce of R elements makes z
    whole, u is whole on every device. Dense projections as in ``dense``.
    """

    name = "low_rank"
    expanding = Split(w="out", v="rank", u="out")
    contracting = Split(w="in", v="in", u=None)

    def expand(
        self, x: Float[Array, "T D"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T R"] | None]:
        """See ``Strategy.expand``."""
        h = norm(x)
        z = block.latents(h)
        if z is not None:
            z = jax.lax.all_gather(z, AXIS, axis=1, tiled=True, to="invarying")
        return block.outputs(block.products(h, z)), z

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T D"]:
        """See ``Strategy.contract``."""
        z = projection.latents(h)
        if z is None:
            return projection.output(jax.lax.psum(projection.product(h, None), AXIS))
        return projection.output(projection.product(h, jax.lax.psum(z, AXIS)))


class Sharded(Strategy):
    """Ours: every factor is split, and so is the residual stream, on D. (Where there are fewer kv
    heads than devices, rows of k's and v's u are on as many devices as share a head.)

    The norm's 1/rms is one number a token and commutes with v. So every device multiplies its own
    columns of x by the norm's weight and by its own columns of v, Σx² rides in the buffer of the
    all-reduce that adds up the latents, and 1/rms is applied to their sum, in float32, or where
    there are many tokens to what u makes of it. Layer norms (``layers.norm``) send Σx, too, and two
    rows more.

    *Sharding contract*: of q k v and gate up, v is split on D, an all-reduce of R elements a token
    and some for Σx² (``riders``) makes z whole, u is split on heads or F; of o and down, v is split
    on heads or F, an all-reduce of R elements makes z whole, u is split on D. Dense expanding
    projections read the normed x, all-gathered once a block (D elements), for which Σx² must be
    known: where no projection of the block has latents, it is an all-reduce of its own, of one
    float32. Dense contracting ones end in a reduce-scatter (D elements).
    """

    name = "sharded"
    expanding = Split(w="out", v="in", u="out")
    contracting = Split(w="in", v="in", u="out")

    def expand(
        self, x: Float[Array, "T d"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T R"] | None]:
        """See ``Strategy.expand``."""
        moments, terms = norm.moments(x), block.latents(norm.weighted(x))
        total = z = whole = None
        if terms is None:
            moments = jax.lax.psum(moments, AXIS)
        else:
            total, moments = add_riders(terms, moments, block.rank, self.devices)
            z = norm.finished(total, moments)
        if block.has_dense:
            own = norm.applied(x, moments[: len(x)])
            whole = jax.lax.all_gather(own, AXIS, axis=1, tiled=True, to="invarying")
        if not norm.commutes or len(x) <= FEW_ROWS:
            return block.outputs(block.products(whole, z)), z
        # Behind u, 1/rms joins what comes next, RoPE or the activation, and z stays as it came.
        products = block.products(whole, total)
        groups = [norm.finished(y, moments) for y in products[block.has_dense :]]
        return block.outputs(products[: block.has_dense] + groups), z

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T d"]:
        """See ``Strategy.contract``."""
        z = projection.latents(h)
        if z is None:
            return projection.output(_scattered(projection.product(h, None)))
        return projection.output(projection.product(h, jax.lax.psum(z, AXIS)))

    def embed(self, tokens: Int32[Array, " T"], table: Table) -> Float[Array, "T d"]:
        """Every device looks up the words it has; a reduce-scatter of D elements a token."""
        return _scattered(_own_words(tokens, table))

    def logits(self, x: Float[Array, "T d"], norm: Norm, table: Table) -> Float[Array, "T w"]:
        """See ``Strategy.logits``; an all-gather of D elements a row."""
        x = jax.lax.all_gather(x, AXIS, axis=1, tiled=True, to="invarying")
        return _own_logits(norm(x), table)

    def latent_buffer(self, rank: int, dtype: jnp.dtype) -> int:
        """With rows for Σx², so that the product with v is the buffer of the all-reduce."""
        return buffer_width(rank, 1, dtype, self.devices)


def _own_logits(h: Array, table: Table) -> Array:
    logits = table.logits(h)
    if table.words == table.rows * jax.lax.axis_size(AXIS):
        return logits
    word = jax.lax.axis_index(AXIS) * table.rows + jnp.arange(table.rows, dtype=jnp.int32)
    return jnp.where((word < table.words)[None, :], logits, -jnp.inf)


def _own_words(tokens: Array, table: Table) -> Array:
    local = tokens - jax.lax.axis_index(AXIS) * table.rows
    own = (local >= 0) & (local < table.rows)
    found = table.look_up(jnp.where(own, local, 0))
    return jnp.where(own[:, None], found, jnp.zeros((), found.dtype))


def _scattered(y: Array) -> Array:
    return jax.lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)


STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Dense, Naive, LowRank, Sharded)
}


def register_strategy(kind: type[Strategy]) -> type[Strategy]:
    """Makes a strategy of one's own available by its ``name``; usable as a decorator. The same
    class again, of a notebook's cell, say, takes the place of the one before.

    Raises:
        TypeError: it is no subclass of ``Strategy``.
        ValueError: the name is taken or missing, or its ``Split``s contradict themselves.
    """
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise TypeError(f"strategy: expected a subclass of deinfer_jax.Strategy, got {kind!r}")
    before = STRATEGIES.get(kind.name)
    again = before is not None and _place(before) == _place(kind)
    if not again and kind.name in (*STRATEGIES, "auto", Single.name, ""):
        raise ValueError(f"strategy: expected a new name, got {kind.name!r}")
    check_splits(kind)
    STRATEGIES[kind.name] = kind
    return kind


def _place(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def get_strategy(name: str, devices: int) -> Strategy:
    """The strategy ``name`` for so many devices. On one they are all ``Single``, which ``dense``
    tells to multiply factors out.

    Raises:
        ValueError: there is none of that name.
    """
    check_strategy(name)
    kind = STRATEGIES[name]
    if devices > 1:
        return kind(devices)
    alone = Single()
    alone.name, alone.multiplies_out = kind.name, kind.multiplies_out
    return alone


def check_strategy(name: str) -> None:
    """Raises ValueError if there is no strategy of that name."""
    if not isinstance(name, str) or name not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"strategy: expected 'auto' or one of {known}, got {name!r}")
