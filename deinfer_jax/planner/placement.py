"""What every strategy puts on a device and sends: products, weights and collectives of a layer,
counted from the config alone.

Nothing here knows how ``deinfer_jax.parallel`` is written: these are the formulas that compiled
programs are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from deinfer_jax.config import ModelConfig, Slice

__all__ = [
    "STRATEGIES",
    "Collective",
    "CollectiveKind",
    "Heads",
    "LayerPlacement",
    "Product",
    "StrategyName",
    "layer_shape",
    "obstacle",
    "outer_collectives",
    "place_layer",
    "split_heads",
]

StrategyName = Literal["dense", "naive", "low_rank", "sharded"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]

MODULES = {"self_attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
# Columns that carry Σx² exactly through an all-reduce, for one device: pieces of a float32 in the
# payload's dtype; a float32 payload takes one column that all devices share.
SLOTS_A_DEVICE = {"bfloat16": 3, "float16": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention heads on one device.

    Attributes:
        queries, kv: how many, padded ones included.
        copies: r, devices that hold the same kv head.
    """

    queries: int
    kv: int
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A device's share of a product with a weight [outputs, inputs], padding included."""

    outputs: int
    inputs: int

    @property
    def elements(self) -> int:
        """Of the weight."""
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over all devices; sizes in elements a token.

    Attributes:
        kind: what it does.
        what: moves, for people.
        operands: width of each array in it; XLA merges neighbours that do not wait for each other,
            and a sum over several arrays is one operation.
        padding: zeros beside the operands.
        per: whether it moves that for each token of the step, for each cached token (latents that
            are rebuilt in parts), or for each row that a token is sampled from.
    """

    kind: CollectiveKind
    what: str
    operands: tuple[int, ...]
    padding: int = 0
    per: Literal["token", "cached token", "sampled row"] = "token"

    @property
    def payload(self) -> int:
        """Elements that have a meaning: ranks, outputs, slots."""
        return sum(self.operands)

    def wire(self, elements: float, devices: int) -> float:
        """Of so many elements, what each device sends around a ring."""
        around = (devices - 1) / devices
        return elements * around * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """One layer on one device.

    Attributes:
        heads: of attention.
        products: in order; their weights are the layer's linears.
        collectives: in order.
        small_weights: elements of norms and biases.
        residual: width of the residual stream here, D or its share.
        ffn: width of the activations between gate, up and down here, F or its share.
        latents: widths of all first products together.
    """

    heads: Heads
    products: tuple[Product, ...]
    collectives: tuple[Collective, ...]
    small_weights: int
    residual: int
    ffn: int
    latents: int

    @property
    def linear_elements(self) -> int:
        """Elements of the linears' weights, with what is replicated and padded."""
        return sum(product.elements for product in self.products)


def obstacle(config: ModelConfig, strategy: StrategyName, devices: int) -> str | None:
    """Why the strategy cannot run on so many devices, or is another one there; else None. Heads, F,
    ranks and words are padded until they divide; the residual stream is not."""
    width = config.hidden_size
    if strategy == "low_rank" and not config.low_rank:
        return "without factors it is dense"
    if devices == 1 and strategy in ("naive", "sharded"):
        return f"on one device it is {'low_rank' if config.low_rank else 'dense'}"
    if strategy == "sharded" and width % devices:
        return (
            f"it splits the residual stream, whose width {width} is no multiple of {devices} "
            "devices"
        )
    return None


def split_heads(config: ModelConfig, devices: int) -> Heads:
    """Heads of one of p devices where attention is split by kv head.

    K' is the smallest divisor of p that is at least K if K < p, else the smallest multiple of p
    that is; each kv head is on r = max(1, p/K') devices, and query groups are padded to a multiple
    of r. Example: 9 query and 3 kv heads on 8 devices: K' = 4, r = 2, groups of 3 padded to 4, so
    one kv head and two query heads a device.
    """
    kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if kv >= devices:
        local = -(-kv // devices)
        return Heads(queries=local * group, kv=local)
    padded = next(n for n in range(kv, devices + 1) if devices % n == 0)
    copies = devices // padded
    return Heads(queries=-(-group // copies), kv=1, copies=copies)


def layer_shape(config: ModelConfig, layer: int) -> tuple[tuple[int, int, int] | None, ...]:
    """What tells a layer from others: of each projection None where it is dense, else the v that it
    reads, by order of appearance, with offset and rank."""
    order: dict[str, int] = {}
    shape = []
    for parent, shorts in MODULES.items():
        for short in shorts:
            piece = config.low_rank.get(f"model.layers.{layer}.{parent}.{short}_proj")
            shape.append(
                piece and (order.setdefault(piece.v, len(order)), piece.offset, piece.rank)
            )
    return tuple(shape)


def place_layer(
    config: ModelConfig,
    layer: int,
    strategy: StrategyName,
    devices: int,
    dtype: str,
    latent: frozenset[str] = frozenset(),
) -> LayerPlacement:
    """Products and collectives of one layer.

    Args:
        config: of the model; ``dense`` takes its factors as multiplied out.
        layer: index.
        strategy: see the README.
        devices: p; one device needs no collective.
        dtype: of payloads, which decides how many slots Σx² needs.
        latent: those of ``"k"`` and ``"v"`` whose latents are cached: nobody reads their outputs,
            which under ``naive`` would be collectives.
    """
    H, D = config.head_dim, config.hidden_size
    heads = Heads(queries=config.num_heads, kv=config.num_kv_heads)
    if strategy != "naive":
        heads = split_heads(config, devices)
    ffn = config.intermediate_size
    if strategy != "naive":
        ffn = _share(ffn, devices)
    widths = {"q": heads.queries * H, "k": heads.kv * H, "v": heads.kv * H}
    widths |= {"gate": ffn, "up": ffn}
    place = _Placer(strategy, devices, dtype, D, latent)
    biases = 0
    inputs = {"self_attn": heads.queries * H, "mlp": ffn}
    for parent, (*expanding, contracting) in MODULES.items():

        def piece(short: str, parent: str = parent) -> Slice | None:
            if strategy == "dense":
                return None
            return config.low_rank.get(f"model.layers.{layer}.{parent}.{short}_proj")

        place.expand(
            "+".join(expanding), {short: (widths[short], piece(short)) for short in expanding}
        )
        place.contract(contracting, inputs[parent], piece(contracting))
        if config.qkv_bias if parent == "self_attn" else config.mlp_bias:
            biases += sum(widths[short] for short in expanding)
        if config.o_bias if parent == "self_attn" else config.mlp_bias:
            biases += place.residual
    norms = 2 * place.residual + (2 * H if config.qk_norm else 0)
    return LayerPlacement(
        heads=heads,
        products=tuple(place.products),
        collectives=tuple(place.collectives) if devices > 1 else (),
        small_weights=norms + biases,
        residual=place.residual,
        ffn=ffn,
        latents=place.latents,
    )


def outer_collectives(
    config: ModelConfig, strategy: StrategyName, devices: int
) -> tuple[Collective, ...]:
    """Collectives of a step outside its layers: embedding, head and sampling."""
    if devices == 1:
        return ()
    D = config.hidden_size
    if strategy == "sharded":
        table = [
            Collective(kind="reduce-scatter", what="embedding", operands=(D,)),
            Collective(kind="all-gather", what="head", operands=(D,), per="sampled row"),
        ]
    else:
        table = [Collective(kind="all-reduce", what="embedding", operands=(D,))]
    # The best word and its score from every device.
    words = Collective(
        kind="all-gather", what="sampling", operands=(2 * devices,), per="sampled row"
    )
    return (*table, words)


class _Placer:
    """Collects products and collectives, block by block."""

    def __init__(
        self,
        strategy: StrategyName,
        devices: int,
        dtype: str,
        width: int,
        latent: frozenset[str],
    ) -> None:
        self.strategy, self.devices, self.width, self.latent = strategy, devices, width, latent
        self.slots = SLOTS_A_DEVICE.get(dtype, 0) * devices or 1
        self.products: list[Product] = []
        self.collectives: list[Collective] = []
        self.latents = 0
        self.residual = width // devices if strategy == "sharded" else width

    def expand(self, name: str, members: dict[str, tuple[int, Slice | None]]) -> None:
        """Projections of one input. ``members``: width of the output here, and the slice."""
        dense = sum(width for width, piece in members.values() if piece is None)
        groups: dict[Slice, int] = {}  # width of the stacked u's
        read: set[Slice] = set()  # by others than the cache
        for short, (width, piece) in members.items():
            if piece is not None:
                groups[piece] = groups.get(piece, 0) + width
                if short not in self.latent:
                    read.add(piece)
        if self.strategy == "naive":
            self._expand_naively(name, dense, groups, read)
            return
        total, p = sum(piece.rank for piece in groups), self.devices
        padded = sum(_padded_rank(piece.rank) for piece in groups)
        self.latents += padded
        if self.strategy == "low_rank" and groups:
            gathered = p * _padded_rank(_share(padded, p))
            self._product(gathered // p, self.residual)
            self._collect("all-gather", f"latents of {name}", total, gathered - total)
        elif self.strategy == "sharded" and groups:
            used = padded + self.slots
            buffer = used + _pad(used, 8 * p)
            self._product(buffer, self.residual)  # with rows of zeros that make the slots
            slots = total + self.slots
            self._collect(
                "all-reduce", f"latents of {name} and slots", slots, padding=buffer - slots
            )
        elif groups:
            self._product(padded, self.residual)
        elif self.strategy == "sharded":
            self._collect("all-reduce", f"Σx² of {name}", 1)  # alone, as one float32
        for piece, width in groups.items():
            self._product(width, _padded_rank(piece.rank))
        if dense:
            if self.strategy == "sharded":
                self._collect("all-gather", f"input of {name}", self.width)
            self._product(dense, self.width)

    def contract(self, name: str, inputs: int, piece: Slice | None) -> None:
        """A projection that writes the residual stream. ``inputs``: width of its input here."""
        D, p = self.width, self.devices
        if self.strategy == "naive":
            if piece is None:
                self._product(D, _share(inputs, p))
            else:
                rank = _padded_rank(_share(piece.rank, p))
                self._product(rank, inputs)
                self._product(D, rank)
                self.latents += rank
            self._collect("all-reduce", f"output of {name}", D)
        elif piece is not None:
            rank = _padded_rank(piece.rank)
            self._product(rank, inputs)
            self._collect("all-reduce", f"latents of {name}", piece.rank, rank - piece.rank)
            self._product(self.residual, rank)
            self.latents += rank
        else:
            self._product(D, inputs)
            if self.strategy == "sharded":
                self._collect("reduce-scatter", f"output of {name}", D)
            else:
                self._collect("all-reduce", f"output of {name}", D)

    def _expand_naively(
        self, name: str, dense: int, groups: dict[Slice, int], read: set[Slice]
    ) -> None:
        parts = {piece: _padded_rank(_share(piece.rank, self.devices)) for piece in groups}
        if parts:
            self._product(sum(parts.values()), self.width)
            self.latents += sum(parts.values())
        for piece, width in groups.items():
            self._product(width, parts[piece])
        if dense:
            self._product(dense, _share(self.width, self.devices))
        operands = [width for piece, width in groups.items() if piece in read]
        if dense:
            operands.append(dense)
        if operands:
            self.collectives.append(
                Collective(kind="all-reduce", what=f"outputs of {name}", operands=tuple(operands))
            )

    def _product(self, outputs: int, inputs: int) -> None:
        self.products.append(Product(outputs=outputs, inputs=inputs))

    def _collect(self, kind: CollectiveKind, what: str, width: int, padding: int = 0) -> None:
        self.collectives.append(
            Collective(kind=kind, what=what, operands=(width,), padding=padding)
        )


def _share(count: int, parts: int) -> int:
    """Of ``count`` padded to a multiple of ``parts``, one part."""
    return -(-count // parts)


def _padded_rank(rank: int) -> int:
    """To a multiple of 8."""
    return rank + _pad(rank, 8)


def _pad(count: int, multiple: int) -> int:
    """What is added to make ``count`` a multiple."""
    return -count % multiple
