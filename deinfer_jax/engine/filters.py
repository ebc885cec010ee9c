"""Which words top-k, top-p and min-p leave, on one device or where words are split over several.

Instead of sorting, thresholds are searched for in the float32 bit patterns: 16 passes, two bits
each, give the exact k-th largest value, and as many the exact value at which the mass reaches p.
Over several devices each pass would cost a collective. So the thresholds are looked for among each
device's most likely words first, which a single collective brings together. Most often they are
there, which can be proved from what is there; if that fails for a row, the search is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from deinfer_jax.parallel.vocabulary import (
    Vocabulary,
    joint_mass,
    local_mass,
    ordered_bits,
    value_of_bits,
)

__all__ = ["CANDIDATES", "Candidates", "Thresholds", "collect", "decide", "kept", "kept_by_search"]

CANDIDATES = 32  # values a row and device; one pass over the words each


@struct.dataclass
class Candidates:
    """The largest values of all devices, n of each; a value that several words share may stand
    once, with their number.

    Attributes:
        order: uint32 [B, p·n], bits as of ``ordered_bits``; 0 for none.
        counts: int32 [B, p·n], words that have the value.
        rest: uint32 [B, 1], bits of the largest value of words that are not counted; 0 for none.
        largest: float32 [B, 1].
        mass: float32 [B, 1], sum of exp relative to the largest, of all words.
    """

    order: Any
    counts: Any
    rest: Any
    largest: Any
    mass: Any


@struct.dataclass
class Thresholds:
    """What a row's words have to reach.

    Attributes:
        order: uint32 [B, 1], bits that top-k and top-p ask for; 0 for none.
        largest: float32 [B, 1], most likely word's value.
        decided: bool [B], whether ``order`` is certain.
    """

    order: Any
    largest: Any
    decided: Any


def kept(
    tempered: Float[Array, "B W"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    asked: Bool[Array, " B"],
    vocabulary: Vocabulary,
) -> Bool[Array, "B W"]:
    """Which of the device's words top-k, then top-p, then min-p keep; words that tie with the last
    one kept are kept too. Of rows that are not asked for, it may be any.

    Split over p devices: one all-gather of p · (2n + 3) elements a row, n = ``CANDIDATES`` or all
    columns if those are fewer; where that does not decide every row, 33 all-reduces of 1 to 3 and
    an all-gather of 2p elements on top.
    """
    if vocabulary.axis is None:
        return kept_by_search(tempered, top_k, top_p, min_p, vocabulary)
    candidates = collect(tempered, vocabulary)
    thresholds = decide(candidates, top_k, top_p, vocabulary.words(tempered.shape[1]))

    def by_candidates() -> Array:
        likely = jnp.exp(tempered - thresholds.largest) >= min_p[:, None]
        return likely & (ordered_bits(tempered) >= thresholds.order)

    def by_search() -> Array:
        return kept_by_search(tempered, top_k, top_p, min_p, vocabulary)

    # Gathered numbers are the same on all devices, so all take the same branch.
    return jax.lax.cond(jnp.all(thresholds.decided | ~asked), by_candidates, by_search)


def kept_by_search(
    tempered: Float[Array, "B W"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    vocabulary: Vocabulary,
) -> Bool[Array, "B W"]:
    """``kept``, whatever the distribution."""
    order = ordered_bits(tempered)
    words = vocabulary.words(tempered.shape[1])

    k = jnp.where(top_k > 0, jnp.minimum(top_k, words), words)
    kth = _largest_threshold(lambda t: jnp.sum(order >= t[:, None], axis=1), k, vocabulary)
    keep = order >= kth[:, None]

    mass = jnp.where(keep, jnp.exp(tempered - vocabulary.largest(tempered)[0]), 0.0)
    (whole,) = vocabulary.sum(mass.sum(axis=1))
    cut = _largest_threshold(
        lambda t: jnp.sum(jnp.where(order >= t[:, None], mass, 0.0), axis=1),
        _goal(top_p, whole),
        vocabulary,
    )
    keep &= (order >= cut[:, None]) | (top_p >= 1.0)[:, None]

    return keep & (mass >= min_p[:, None])  # mass is relative to the most likely word already


def collect(tempered: Float[Array, "B W"], vocabulary: Vocabulary) -> Candidates:
    """The likeliest values of every device, by one all-gather."""
    n = min(CANDIDATES, tempered.shape[1])

    def sorted_(tempered: Array) -> tuple[Array, Array]:
        values = jax.lax.top_k(tempered, min(n + 1, tempered.shape[1]))[0]
        order = jnp.pad(ordered_bits(values), ((0, 0), (0, n + 1 - values.shape[1])))
        return order, jnp.ones_like(order[:, :n], jnp.int32)

    def by_passes(tempered: Array) -> tuple[Array, Array]:
        # One pass finds the next smaller value, and how many words share the one before.
        order = ordered_bits(tempered)
        found, counts = [order.max(axis=1, keepdims=True)], []
        for _ in range(n):
            last = found[-1]
            found.append(jnp.where(order < last, order, 0).max(axis=1, keepdims=True))
            counts.append(jnp.sum(order == last, axis=1, keepdims=True))
        return jnp.concatenate(found, axis=1), jnp.concatenate(counts, axis=1)

    found, counts = jax.lax.platform_dependent(tempered, cpu=sorted_, default=by_passes)
    order, counts, rest, largest, mass = vocabulary.gather(
        found[:, :n], counts, found[:, n:], *local_mass(tempered)
    )
    return Candidates(order, counts, rest.max(axis=1, keepdims=True), *joint_mass(largest, mass))


def decide(
    candidates: Candidates, top_k: Int32[Array, " B"], top_p: Float[Array, " B"], words: int
) -> Thresholds:
    """Thresholds of top-k and top-p as far as the candidates tell them.

    Every word above ``rest`` is counted among the candidates. So what is found above it is found
    among all words, and what is not may be wrong.
    """
    order, counts = candidates.order, candidates.counts
    above = order[:, None, :] >= order[:, :, None]  # [B, value, word that is at least that large]
    number = jnp.sum(jnp.where(above, counts[:, None, :], 0), axis=2)
    kth = jnp.where(number >= top_k[:, None], order, 0).max(axis=1, keepdims=True)
    has_k = ((top_k > 0) & (top_k < words))[:, None]
    kth = jnp.where(has_k, kth, 0)

    mass = jnp.exp(value_of_bits(order) - candidates.largest) * counts.astype(jnp.float32)
    mass = jnp.where((counts > 0) & (order >= kth), mass, 0.0)
    whole = jnp.where(has_k, mass.sum(axis=1, keepdims=True), candidates.mass)
    reached = jnp.sum(jnp.where(above, mass[:, None, :], 0.0), axis=2)
    goal = _goal(top_p[:, None], whole)
    cut = jnp.where(reached >= goal, order, 0).max(axis=1, keepdims=True)
    has_p = (top_p < 1.0)[:, None]
    cut = jnp.where(has_p, cut, 0)

    certain = (~has_k | (kth > candidates.rest)) & (~has_p | (cut > candidates.rest))
    # Of a row that is not numbers nobody will see the words.
    certain |= ~(jnp.isfinite(candidates.largest) & jnp.isfinite(candidates.mass))
    return Thresholds(jnp.maximum(kth, cut), candidates.largest, certain[:, 0])


def _goal(top_p: Array, whole: Array) -> Array:
    """Mass to be reached. Never 0, which all thresholds would reach, even the one that keeps no
    word."""
    return jnp.maximum(top_p * whole, jnp.finfo(jnp.float32).tiny)


def _largest_threshold(
    amount: Callable[[Array], Array], goal: Array, vocabulary: Vocabulary
) -> Array:
    """Largest uint32 t a row at which ``amount(t)``, summed over the devices, is at least the goal
    [B]; it falls as t grows. Two bits a pass, the highest first."""

    def one_pass(i: Array | int, low: Array) -> Array:
        shift = jnp.uint32(30 - 2 * i)
        amounts = [amount(low | (jnp.uint32(digit) << shift)) for digit in (1, 2, 3)]
        reached = [total >= goal for total in vocabulary.sum(*amounts)]
        return low | (sum(hit.astype(jnp.uint32) for hit in reached) << shift)

    def unrolled(low: Array) -> Array:
        for i in range(16):
            low = one_pass(i, low)
        return low

    return jax.lax.platform_dependent(
        jnp.zeros(goal.shape[0], jnp.uint32),
        cpu=lambda low: jax.lax.fori_loop(0, 16, one_pass, low),
        default=unrolled,
    )
