"""The static programs: pure functions of (weights, pools, batch state, a few small arrays from the
host), written for one device's part of weights, pools and vocabulary.

Shapes come from buckets, so a handful of compilations serve every request; what changes from step
to step is data. Weights are arguments, pools and state are donated and updated in place, and
sampling happens here, on the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from deinfer_jax.cache.pool import LayerPool
from deinfer_jax.cache.preparation import Preparation
from deinfer_jax.cache.view import CacheView, DecodeView, PrefillView
from deinfer_jax.engine.sampler import NOT_A_NUMBER, Drawn, SamplingParams, draw, request_key
from deinfer_jax.parallel.mesh import AXIS

__all__ = [
    "IDLE",
    "BatchState",
    "Growth",
    "PromptChunk",
    "copy_page",
    "decode",
    "empty_state",
    "logits",
    "prefill",
    "score",
    "specs",
]

Weights = Any  # pure dict of arrays, as nnx.to_pure_dict gives it
IDLE = -2  # token reported for a row that did not run in a step


@struct.dataclass
class BatchState:
    """What the device remembers of each slot between programs: row i is slot i.

    Attributes:
        tokens: int32 [B], last token drawn, the next one to run.
        lengths: int32 [B], tokens in the cache.
        limits: int32 [B], the row runs while lengths < limits.
        block_tables: int32 [B, M], pages in order, padded with any page.
        keys: uint32 [B, 2], see ``sampler.request_key``.
        sampling: parameters, a row each.
    """

    tokens: Any
    lengths: Any
    limits: Any
    block_tables: Any
    keys: Any
    sampling: SamplingParams


@struct.dataclass
class PromptChunk:
    """Part of a prompt, with everything its slot needs to know of the request (a few hundred
    bytes).

    Attributes:
        tokens: int32 [T], padded to the bucket.
        start: int32 (), tokens of the prompt that are in the cache already.
        length: int32 (), real tokens here.
        slot: int32 ().
        limit: int32 (), tokens in the cache at which the request ends.
        block_table: int32 [M], padded with any page.
        key_words: uint32 [5], see ``sampler.request_key``.
        sampling: parameters, scalars.
    """

    tokens: Any
    start: Any
    length: Any
    slot: Any
    limit: Any
    block_table: Any
    key_words: Any
    sampling: SamplingParams


@struct.dataclass
class Growth:
    """Pages that rows have got since the device last heard of them.

    Attributes:
        first: int32 [b], entry of the block table that the first one takes.
        pages: int32 [b, g], padded with −1.
    """

    first: Any
    pages: Any


def specs(kind: str, weights: Any, pools: Any) -> tuple[Any, Any]:
    """How arguments and results of a program are split over devices; what is neither weights, pools
    nor logits is the same on all.

    Args:
        kind: ``"copy"``, ``"prefill"``, ``"decode"``, ``"decode-plain"``, ``"logits"`` or
            ``"score"``.
        weights, pools: how those are.
    """
    same = PartitionSpec()
    arguments, results = {
        "copy": ((pools, same, same), pools),
        "prefill": ((weights, pools, same, same), (pools, same, same)),
        "decode": ((weights, pools, *4 * (same,)), (pools, same, same)),
        "logits": ((weights, pools, *4 * (same,)), (pools, PartitionSpec(None, AXIS))),
        "score": ((weights, pools, *5 * (same,)), (pools, same, same)),
    }[kind.removesuffix("-plain")]
    return arguments, results


def empty_state(max_batch: int, max_pages: int) -> BatchState:
    """State of ``max_batch`` idle slots with tables of ``max_pages`` entries."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((max_batch, *shape), dtype)  # a buffer each, or they could not be donated

    return BatchState(
        tokens=zeros(),
        lengths=zeros(),
        limits=zeros(),
        block_tables=zeros(max_pages),
        keys=zeros(2, dtype=jnp.uint32),
        sampling=SamplingParams(
            temperature=zeros(dtype=jnp.float32),
            top_k=zeros(),
            top_p=jnp.ones(max_batch, jnp.float32),
            min_p=zeros(dtype=jnp.float32),
            wants_logprobs=zeros(dtype=jnp.bool),
        ),
    )


def prefill(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    state: BatchState,
    chunk: PromptChunk,
    *,
    pages: int,
    implementation: str | None,
) -> tuple[list[LayerPool], BatchState, Drawn]:
    """Runs one chunk of one prompt and draws the token after it (which counts only if the chunk is
    the prompt's last).

    Args:
        graph: structure of the model.
        weights: its parameters.
        pools: donated.
        state: donated; the chunk's slot is set up for decoding.
        chunk: from the host.
        pages: table entries that the program reads, the bucket M' ≤ M.
        implementation: of the ops that rebuild keys and values.

    Returns:
        Pools, state, and the token [1].
    """
    model = nnx.merge(graph, weights)
    view = PrefillView(chunk.block_table[:pages], chunk.start, chunk.length, implementation)
    x, pools = model(chunk.tokens, pools, view)
    last = jax.lax.dynamic_slice_in_dim(x, chunk.length - 1, 1)

    key = request_key(chunk.key_words)
    end = chunk.start + chunk.length
    one_row = jax.tree.map(lambda scalar: scalar[None], chunk.sampling)
    drawn = draw(model.logits(last), key[None], end[None], one_row, model.vocabulary)

    token = drawn.tokens[0]
    broken = token == NOT_A_NUMBER
    row = BatchState(
        tokens=jnp.maximum(token, 0),
        lengths=end,
        limits=jnp.where(broken, 0, chunk.limit),
        block_tables=chunk.block_table,
        keys=key,
        sampling=chunk.sampling,
    )
    state = jax.tree.map(lambda all_rows, one: all_rows.at[chunk.slot].set(one), state, row)
    return pools, state, drawn


def decode(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    state: BatchState,
    slots: Int32[Array, " b"],
    growth: Growth,
    preparation: Preparation | None,
    *,
    pages: int,
    steps: int,
    implementation: str | None,
    extras: bool = True,
) -> tuple[list[LayerPool], BatchState, Drawn]:
    """Runs ``steps`` tokens of each slot in ``slots``; a row stops at its limit or at logits that
    are not numbers.

    Args:
        graph: structure of the model.
        weights: its parameters.
        pools: donated.
        state: donated; its rows advance.
        slots: int32 [b] slot numbers; entries ≥ B are padding.
        growth: new pages of those rows.
        preparation: the pages of the rows in ``slots``, up to the last step's, where the layout
            compacts them; else None.
        pages: table entries that the program reads.
        steps: n.
        implementation: of the ops.
        extras: False if no row asks for filters or log-probabilities, see ``sampler``.

    Returns:
        Pools, state, and the tokens [n, b]: IDLE where a row did not run, NOT_A_NUMBER where it
        broke.
    """
    max_batch = state.tokens.shape[0]
    entries = growth.first[:, None] + jnp.arange(growth.pages.shape[1], dtype=jnp.int32)[None]
    entries = jnp.where(growth.pages >= 0, entries, state.block_tables.shape[1])
    block_tables = state.block_tables.at[slots[:, None], entries].set(growth.pages, mode="drop")
    state = replace(state, block_tables=block_tables)
    rows = jax.tree.map(lambda field: field.at[slots].get(mode="clip"), state)
    tables = rows.block_tables[:, :pages]
    model = nnx.merge(graph, weights)

    def step(carry: Any, _: None) -> tuple[Any, Drawn]:
        tokens, lengths, limits, pools = carry
        active = (slots < max_batch) & (lengths < limits)
        view: CacheView = DecodeView(tables, lengths, active, preparation, implementation)
        x, pools = model(tokens, pools, view)
        logits, place = model.logits(x), lengths + 1
        words = model.vocabulary
        drawn = draw(logits, rows.keys, place, rows.sampling, words, extras=extras)
        broken = active & (drawn.tokens == NOT_A_NUMBER)
        tokens = jnp.where(active & ~broken, drawn.tokens, tokens)
        lengths = lengths + active.astype(jnp.int32)
        limits = jnp.where(broken, 0, limits)
        drawn = replace(drawn, tokens=jnp.where(active, drawn.tokens, IDLE))
        return (tokens, lengths, limits, pools), drawn

    carry = (rows.tokens, rows.lengths, rows.limits, pools)
    (tokens, lengths, limits, pools), drawn = jax.lax.scan(step, carry, None, length=steps)
    state = replace(
        state,
        tokens=state.tokens.at[slots].set(tokens, mode="drop"),
        lengths=state.lengths.at[slots].set(lengths, mode="drop"),
        limits=state.limits.at[slots].set(limits, mode="drop"),
    )
    return pools, state, drawn


def copy_page(
    pools: list[LayerPool], source: Int32[Array, ""], target: Int32[Array, ""]
) -> list[LayerPool]:
    """Copies a page of every pool; for a request that begins like another one within a page."""
    return jax.tree.map(lambda pool: pool.at[target].set(pool[source]), pools)


def logits(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    tokens: Int32[Array, " T"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    block_table: Int32[Array, " M"],
    *,
    implementation: str | None,
) -> tuple[list[LayerPool], Float[Array, "T w"]]:
    """Logits after each token of a chunk, float32, of the words that this device has; like
    ``prefill`` otherwise, but for no slot."""
    model = nnx.merge(graph, weights)
    x, pools = model(tokens, pools, PrefillView(block_table, start, length, implementation))
    return pools, model.logits(x)


def score(
    graph: nnx.GraphDef[Any],
    weights: Weights,
    pools: list[LayerPool],
    tokens: Int32[Array, " T"],
    targets: Int32[Array, " T"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    block_table: Int32[Array, " M"],
    *,
    implementation: str | None,
) -> tuple[list[LayerPool], Float[Array, " T"], Bool[Array, " T"]]:
    """Log-probability of ``targets[t]`` after ``tokens[: t + 1]``, float32, and whether it is the
    most likely word (the first of equals), so that the host gets two numbers a token and not a
    vocabulary."""
    model = nnx.merge(graph, weights)
    x, pools = model(tokens, pools, PrefillView(block_table, start, length, implementation))
    every, vocabulary = model.logits(x), model.vocabulary
    scores = vocabulary.take(every, targets) - vocabulary.logsumexp(every)
    return pools, scores[:, 0], vocabulary.largest(every)[1] == targets
