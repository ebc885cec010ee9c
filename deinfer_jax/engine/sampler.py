"""Next-token choice on the device, one independent decision a row.

A row's noise is a function of its key, its position and the word alone, so neither its neighbours
in the batch nor (once the head is split) the shard that holds a word can change what is drawn.

What nobody in the batch asked for is skipped on the device. On a GPU that stays within the CUDA
graph only as long as no branch loops or sorts: otherwise the host would wait, in the call of the
program, for the predicate of every step, and could not prepare the next one meanwhile. Loops are
unrolled there, which on a CPU would only take compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

__all__ = [
    "MOST_LOGPROBS",
    "NOT_A_NUMBER",
    "Drawn",
    "SamplingParams",
    "draw",
    "filter_words",
    "gumbel_noise",
    "request_key",
    "sample",
]

NOT_A_NUMBER = -1  # what `sample` returns for a row whose logits are not numbers
MOST_LOGPROBS = 20  # alternatives reported of a token


@struct.dataclass
class SamplingParams:
    """Arrays [B], or scalars for one row.

    Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off.

    The filters act on the tempered distribution in the order top-k, top-p (mass of what top-k
    left), min-p (relative to the most likely word), as transformers' logits processors do.
    """

    # Any, because JAX also rebuilds the dataclass around specs, tracers and None.
    temperature: Any  # float32
    top_k: Any  # int32
    top_p: Any  # float32
    min_p: Any  # float32
    wants_logprobs: Any  # bool


@struct.dataclass
class Drawn:
    """Tokens and how likely they were; arrays [B], or [n, B] of n steps.

    Attributes:
        tokens: int32.
        logprobs: float32, of the tokens, before temperature and filters; 0 where not asked for.
        best: int32 [B, K], the most likely words.
        best_logprobs: float32 [B, K], falling.
    """

    tokens: Any
    logprobs: Any
    best: Any
    best_logprobs: Any


def request_key(words: UInt32[Array, " 5"]) -> UInt32[Array, " 2"]:
    """Key of a request: (seed high, seed low) folded with the prompt's 64-bit hash and the sample
    index.

    Args:
        words: seed high and low, hash high and low, sample index.
    """
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    for word in (words[2], words[3], words[4]):
        key = jax.random.fold_in(key, word)
    return jax.random.key_data(key)


def gumbel_noise(
    keys: UInt32[Array, "B 2"], positions: Int32[Array, " B"], words: UInt32[Array, " W"]
) -> Float[Array, "B W"]:
    """Standard Gumbel noise of each word for the token at each row's position.

    Args:
        keys: of the requests.
        positions: of the token to be drawn.
        words: word numbers, any subset of the vocabulary in any order.
    """

    def row(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        # threefry turns counter pairs (0, word) into bit pairs; the first of each pair is that
        # word's.
        counters = jnp.concatenate([jnp.zeros_like(words), words])
        bits = threefry_2x32(jax.random.key_data(folded), counters)[: words.shape[0]]
        unit = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
        return -jnp.log(-jnp.log(jnp.maximum(unit, jnp.finfo(jnp.float32).tiny)))

    return jax.vmap(row)(keys, positions)


def filter_words(tempered: Float[Array, "B W"], params: SamplingParams) -> Bool[Array, "B W"]:
    """Which words top-k, top-p and min-p keep; words that tie with the last one kept are kept too.

    Instead of sorting, the thresholds are searched for in the float32 bit patterns: 16 passes, two
    bits each, give the exact k-th largest value, and as many the exact value at which the mass
    reaches p.
    """
    order = _ordered_bits(tempered)
    words = tempered.shape[1]

    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, words), words)
    kth = _largest_threshold(lambda t: jnp.sum(order >= t[:, None], axis=1) >= k, order.shape[0])
    keep = order >= kth[:, None]

    mass = jnp.where(keep, jnp.exp(tempered - tempered.max(axis=1, keepdims=True)), 0.0)
    # Never 0, which all thresholds would reach, even the one that keeps no word.
    tiny = jnp.finfo(jnp.float32).tiny
    goal = jnp.maximum(params.top_p * mass.sum(axis=1), tiny)
    cut = _largest_threshold(
        lambda t: jnp.sum(jnp.where(order >= t[:, None], mass, 0.0), axis=1) >= goal, order.shape[0]
    )
    keep &= (order >= cut[:, None]) | (params.top_p >= 1.0)[:, None]

    return keep & (
        mass >= params.min_p[:, None]
    )  # mass is relative to the most likely word already


def draw(
    logits: Float[Array, "B W"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    params: SamplingParams,
) -> Drawn:
    """``sample``, and log-probabilities if any row wants them: of the word drawn and of the
    ``MOST_LOGPROBS`` most likely ones (of all words, if there are fewer)."""
    words = sample(logits, keys, positions, params)
    count = min(MOST_LOGPROBS, logits.shape[1])

    def compare(logits: Array) -> tuple[Array, Array, Array]:
        whole = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        best = _most_likely(logits, count)
        best_logits = jnp.take_along_axis(logits, best, axis=1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(words, 0)[:, None], axis=1)
        return (chosen - whole)[:, 0], best, best_logits - whole

    def nothing(logits: Array) -> tuple[Array, Array, Array]:
        rows = logits.shape[0]
        none = jnp.zeros((rows, count), jnp.float32)
        return jnp.zeros(rows, jnp.float32), none.astype(jnp.int32), none

    found = jax.lax.cond(jnp.any(params.wants_logprobs), compare, nothing, logits)
    return Drawn(words, *found)


def sample(
    logits: Float[Array, "B W"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    params: SamplingParams,
) -> Int32[Array, " B"]:
    """One word a row; NOT_A_NUMBER where a row's logits contain a NaN or +inf, or nothing but −inf.

    Args:
        logits: float32.
        keys: of the requests, see ``request_key``.
        positions: of the token to be drawn, from 0 at the start of the prompt.
        params: per row.
    """

    def noisy(logits: Array, *, filters: bool) -> Array:
        temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
        # From the largest down, so that a tiny temperature cannot overflow all words to infinity.
        tempered = (logits - logits.max(axis=1, keepdims=True)) / temperature[:, None]
        noise = gumbel_noise(keys, positions, jnp.arange(logits.shape[1], dtype=jnp.uint32))
        scores = tempered + noise
        if filters:
            scores = jnp.where(filter_words(tempered, params), scores, -jnp.inf)
        return jnp.where(params.temperature > 0, _argmax(scores), _argmax(logits))

    sampled = params.temperature > 0
    filtered = sampled & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0))
    # The whole batch takes the way that its most demanding row needs.
    way = sum(jnp.any(rows).astype(jnp.int32) for rows in (sampled, filtered))
    words = jax.lax.switch(
        way, [_argmax, partial(noisy, filters=False), partial(noisy, filters=True)], logits
    )
    best = logits.max(axis=1)  # NaN if any logit is
    return jnp.where(jnp.isfinite(best), words, NOT_A_NUMBER)


def _argmax(logits: Array) -> Array:
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


def _ordered_bits(x: Array) -> Array:
    """uint32 in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _most_likely(logits: Array, count: int) -> Array:
    """int32 [B, count], the words with the largest logits, falling; the first of equals first."""

    def by_passes(logits: Array) -> Array:
        order = _ordered_bits(logits)
        numbers = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        found = [_argmax(order)]
        for _ in range(count - 1):
            last = jnp.take_along_axis(order, found[-1][:, None], axis=1)
            after = (order < last) | ((order == last) & (numbers > found[-1][:, None]))
            found.append(_argmax(jnp.where(after, order, 0)))  # 0 is below every float's bits
        return jnp.stack(found, axis=1)

    return jax.lax.platform_dependent(
        logits, cpu=lambda logits: jax.lax.top_k(logits, count)[1], default=by_passes
    )


def _largest_threshold(reaches: Callable[[Array], Array], batch: int) -> Array:
    """Largest uint32 t a row for which ``reaches(t)`` holds, where it holds up to some t and not
    beyond. Two bits a pass, the highest first."""

    def one_pass(i: Array | int, low: Array) -> Array:
        shift = jnp.uint32(30 - 2 * i)
        reached = [reaches(low | (jnp.uint32(digit) << shift)) for digit in (1, 2, 3)]
        return low | (sum(hit.astype(jnp.uint32) for hit in reached) << shift)

    def unrolled(low: Array) -> Array:
        for i in range(16):
            low = one_pass(i, low)
        return low

    return jax.lax.platform_dependent(
        jnp.zeros(batch, jnp.uint32),
        cpu=lambda low: jax.lax.fori_loop(0, 16, one_pass, low),
        default=unrolled,
    )
