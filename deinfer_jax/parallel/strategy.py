"""The seam between a model's maths and its placement on devices.

A block's *expanding* projections (q k v, gate up) read the residual stream, its *contracting* one
(o, down) writes it. A strategy says on which axis their arrays are split, and how each is computed,
together with the norm in front and the layout of the residual; models call these methods and never
branch on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from deinfer_jax.config import ModelConfig
from deinfer_jax.parallel.mesh import AXIS
from deinfer_jax.parallel.shares import Heads, Share, deal, deal_heads, deal_rank, whole
from deinfer_jax.parallel.vocabulary import WHOLE, Vocabulary

__all__ = [
    "FEW_ROWS",
    "Contracting",
    "Expanding",
    "Norm",
    "Single",
    "Split",
    "Strategy",
    "Table",
    "check_splits",
]

# With so many tokens or fewer, a GPU spends a step on reading weights and on launching kernels;
# with more, on activations, too, so that a kernel more that saves a copy of them pays.
FEW_ROWS = 128


@runtime_checkable
class Norm(Protocol):
    """Normalisation of the residual stream, in one go or taken apart: see ``layers.norm``."""

    def __call__(self, x: Array, /) -> Array:
        """Of an x that is whole."""
        ...

    def moments(self, x: Array, /) -> Array:
        """What is to be summed over D, float32 [T, k]."""
        ...

    def applied(self, x: Array, moments: Array, /) -> Array:
        """The own part [T, d] of the normed x, given the moments of the whole one."""
        ...

    def weighted(self, x: Array, /) -> Array:
        """What goes through v before the moments are known, [T, d] and perhaps more rows."""
        ...

    @property
    def commutes(self) -> bool:
        """Whether ``finished`` may be applied to u v of that as well as to v of it."""
        ...

    def finished(self, z: Array, moments: Array, /) -> Array:
        """v of the normed x [T, R], of v of that, summed over devices."""
        ...


@runtime_checkable
class Expanding(Protocol):
    """Several outputs of one input: the stages of ``layers.linear.Expand``, between which the
    collectives stand."""

    @property
    def has_dense(self) -> bool:
        """Whether any projection is dense."""
        ...

    @property
    def rank(self) -> int:
        """R, the latents of all decomposed ones."""
        ...

    def latents(self, x: Array, /) -> Array | None:
        """v x of all decomposed ones, and zeros behind that where v has room for more."""
        ...

    def products(self, x: Array | None, z: Array | None, /) -> list[Array]:
        """W x of the dense ones, if any, then u z of each group."""
        ...

    def outputs(self, products: list[Array], /) -> tuple[Array, ...]:
        """With biases, in the order of the projections."""
        ...


@runtime_checkable
class Contracting(Protocol):
    """One output, added to the residual by the caller: the stages of ``layers.linear.Contract``."""

    def latents(self, h: Array, /) -> Array | None:
        """v h, or None of a dense one."""
        ...

    def product(self, h: Array, z: Array | None, /) -> Array:
        """u z, or W h of a dense one."""
        ...

    def output(self, product: Array, /) -> Array:
        """With the bias."""
        ...


@runtime_checkable
class Table(Protocol):
    """Word embedding or head: ``rows`` of the table of all ``words``, on this device."""

    @property
    def words(self) -> int:
        """W."""
        ...

    @property
    def rows(self) -> int:
        """Those of this device, padding included."""
        ...

    def look_up(self, tokens: Array, /) -> Array:
        """Rows by their place on this device."""
        ...

    def logits(self, x: Array, /) -> Array:
        """Of the words that this device has, float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """On which axis the arrays of a linear are split; None = whole on every device.

    Attributes:
        w: of a dense one, [out, in].
        v: first factor [rank, in]; u: second factor [out, rank]. Where expanding ones have u split
            on the rank, v is split on the rank of every slice, so that the two match; else v is
            split on the rank of all slices side by side.
    """

    w: Literal["out", "in"] | None = None
    v: Literal["rank", "in"] | None = None
    u: Literal["out", "rank"] | None = None


class Strategy:
    """How arrays are split over devices, and how a block is computed with them: subclasses say the
    first with two ``Split``s and define the four methods that compute.

    Everything inside these methods is local to a device, as under ``jax.shard_map`` over the axis
    ``tp``.

    Attributes:
        name: by which it is asked for.
        expanding, contracting: how the arrays of such projections are split. Where expanding ones
            are split on their outputs, heads and F are; where contracting ones are, the residual is
            split on D.
        multiplies_out: whether a decomposed model is made dense when it is loaded.
        devices: p.
    """

    name: str = ""
    expanding: Split = Split()
    contracting: Split = Split()
    multiplies_out: bool = False
    devices: int = 1

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices

    # What a model computes.

    def expand(
        self, x: Float[Array, "T d"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T R"] | None]:
        """Outputs of the block's projections for the normed residual x, and the latents z that they
        are computed from, whole, as they stand after the collective (None where all are dense)."""
        raise NotImplementedError(f"strategy {self.name!r} does not define expand")

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T d"]:
        """What is added to the residual."""
        raise NotImplementedError(f"strategy {self.name!r} does not define contract")

    def embed(self, tokens: Int32[Array, " T"], table: Table) -> Float[Array, "T d"]:
        """The residual stream's first value."""
        raise NotImplementedError(f"strategy {self.name!r} does not define embed")

    def logits(self, x: Float[Array, "T d"], norm: Norm, table: Table) -> Float[Array, "T w"]:
        """Float32 logits of the residual's rows that are asked for, of the words that this device
        has."""
        raise NotImplementedError(f"strategy {self.name!r} does not define logits")

    # Of a strategy that leaves latents in parts: makes whole what a device's part of cached latents
    # gives, keys and values of the context or absorbed values of a token.
    combine_rebuilt: Callable[[Array], Array] | None = None

    # Whether what was computed is whole where it must be; as far as JAX can tell while it traces. A
    # forgotten collective would make all else wrong without a word.

    def check_residual(self, x: Array, what: str) -> None:
        """Raises ValueError if the residual stream is to be the same on every device and x is
        not."""
        if not self.splits_residual:
            self._check_same(x, what)

    def check_latents(self, z: Array | None) -> None:
        """Raises ValueError if latents, which may be cached, are to be the same on every device and
        z are not."""
        if z is not None and not self.splits_pairs:
            self._check_same(z, "latents")

    def _check_same(self, x: Array, what: str) -> None:
        if self.devices > 1 and AXIS in jax.typeof(x).manual_axis_type.varying:
            raise ValueError(
                f"strategy {self.name!r}: expected {what} to be the same on every device, got "
                "each device's own; bring them together with jax.lax.psum(x, 'tp') or "
                "jax.lax.all_gather(x, 'tp', axis=1, tiled=True, to='invarying')"
            )

    # How a model's axes are dealt.

    @property
    def splits_heads(self) -> bool:
        """Whether a device has its own heads, and its own part of F."""
        return self.devices > 1 and "out" in (self.expanding.w, self.expanding.u)

    @property
    def splits_residual(self) -> bool:
        """Whether a device has its own part of D."""
        return self.devices > 1 and self.contracting.u == "out"

    @property
    def splits_pairs(self) -> bool:
        """Whether a device has its own part of every single latent."""
        return self.devices > 1 and self.expanding.u == "rank"

    def heads(self, config: ModelConfig) -> Heads:
        """Of attention."""
        devices = self.devices if self.splits_heads else 1
        return deal_heads(config.num_heads, config.num_kv_heads, config.head_dim, devices)

    def units(self, size: int) -> Share:
        """Of F."""
        return deal(size, self.devices if self.splits_heads else 1)

    def residual(self, size: int) -> Share:
        """Of D.

        Raises:
            ValueError: D does not divide, and cannot be padded, since the residual is summed over.
        """
        if not self.splits_residual:
            return whole(size)
        if size % self.devices:
            counts = [n for n in range(1, 65) if size % n == 0]
            raise ValueError(
                f"strategy {self.name!r} splits the residual: expected a number of devices that "
                f"divides its width {size} ({', '.join(map(str, counts))}), got {self.devices}"
            )
        return deal(size, self.devices)

    def words(self, size: int) -> Share:
        """Of W."""
        return deal(size, self.devices)

    def vocabulary(self, size: int) -> Vocabulary:
        """Which of W words' logits a device has."""
        return Vocabulary(size=size, axis=AXIS) if self.devices > 1 else WHOLE

    def own_sizes(self, config: ModelConfig) -> ModelConfig:
        """A config of the sizes that a device computes, D aside; for estimates of memory."""
        heads, width = self.heads(config), config.head_dim
        return config.replace(
            num_heads=heads.queries.width // width,
            num_kv_heads=heads.kv.width // width,
            intermediate_size=self.units(config.intermediate_size).width,
            vocab_size=self.words(config.vocab_size).width,
            eos_token_ids=(),
        )

    def latent_rank(self, rank: int) -> int:
        """How wide a latent is on a device."""
        return deal_rank(rank, self.devices if self.splits_pairs else 1).width

    def latent_buffer(self, rank: int, dtype: jnp.dtype) -> int:
        """Rows of an expanding v of so many latents: as many, or more of zeros where its product is
        a collective's buffer."""
        return rank

    def pool_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How pools of heads [P, n, K, S, H] and of latents [P, S, width] are split."""
        by_third = PartitionSpec(None, None, AXIS)
        return (
            by_third if self.splits_heads else PartitionSpec(),
            by_third if self.splits_pairs else PartitionSpec(),
        )


class Single(Strategy):
    """One device.

    *Sharding contract*: residual [T, D] whole, every array whole, no element moves.
    """

    name = "single"

    def expand(
        self, x: Float[Array, "T D"], norm: Norm, block: Expanding
    ) -> tuple[tuple[Array, ...], Float[Array, "T R"] | None]:
        """See ``Strategy.expand``."""
        h = norm(x)
        z = block.latents(h)
        return block.outputs(block.products(h, z)), z

    def contract(self, h: Float[Array, "T I"], projection: Contracting) -> Float[Array, "T D"]:
        """See ``Strategy.contract``."""
        return projection.output(projection.product(h, projection.latents(h)))

    def embed(self, tokens: Int32[Array, " T"], table: Table) -> Float[Array, "T D"]:
        """See ``Strategy.embed``."""
        return table.look_up(tokens)

    def logits(self, x: Float[Array, "T D"], norm: Norm, table: Table) -> Float[Array, "T W"]:
        """See ``Strategy.logits``."""
        return table.logits(norm(x))


def check_splits(kind: type[Strategy]) -> None:
    """Raises ValueError where a strategy's ``Split``s contradict themselves or each other."""
    known = {"w": (None, "out", "in"), "v": (None, "rank", "in"), "u": (None, "out", "rank")}
    expanding, contracting = kind.expanding, kind.contracting
    problems = [
        f"{where}.{field}: expected one of {values}, got {getattr(split, field)!r}"
        for where, split in (("expanding", expanding), ("contracting", contracting))
        for field, values in known.items()
        if getattr(split, field) not in values
    ]
    heads = "out" in (expanding.w, expanding.u)
    if expanding.v == "in" and contracting.u != "out":
        problems.append(
            "expanding.v is split on its inputs: expected contracting.u='out', which splits the "
            f"residual stream that they are, got {contracting.u!r}"
        )
    if contracting.v == "in" and not heads:
        problems.append(
            "contracting.v is split on its inputs: expected expanding projections that are split "
            f"on their outputs, which those are, got {expanding}"
        )
    if heads and (expanding.w == "in" or expanding.u == "rank"):
        problems.append(f"expanding: expected w and u both split on their outputs, got {expanding}")
    for where, split in (("expanding", expanding), ("contracting", contracting)):
        if split.u == "rank" and split.v != "rank":
            problems.append(f"{where}.u is split on the rank: expected v='rank', got {split.v!r}")
    if problems:
        raise ValueError(f"strategy {kind.name!r}: {'; '.join(problems)}")
