"""Next-token choice on the device, one independent decision a row.

A row's noise is a function of its key, its position and the word alone, so neither its neighbours
in the batch nor the device that holds a word can change what is drawn.

Logits may be split over devices, see ``Vocabulary``. What is drawn is the same on all of them then.
A step brings each device 2p elements a row if it is greedy; a sampled one 4p; filters see ``kept``;
log-probabilities take 3p + 2p · ``MOST_LOGPROBS`` more.

What nobody in the batch asked for is skipped on the device. On a GPU that stays within the CUDA
graph only as long as no branch loops, sorts, or talks to other devices: otherwise the host would
wait, in the call of the program, for the predicate of every step, and could not prepare the next
one meanwhile. Loops are unrolled there, which on a CPU would only take compile time. Where logits
are split, programs without filters and log-probabilities (``extras``) have no collective in a
branch; the others have.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int32, UInt32

from deinfer_jax.engine.filters import kept
from deinfer_jax.parallel.vocabulary import WHOLE, Vocabulary

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


def filter_words(
    tempered: Float[Array, "B W"], params: SamplingParams, vocabulary: Vocabulary = WHOLE
) -> Bool[Array, "B W"]:
    """Which words top-k, top-p and min-p keep; words that tie with the last one kept are kept too.
    Of greedy rows, which are not filtered, it may be any.

    Args:
        tempered: float32, logits divided by the temperature.
        params: per row.
        vocabulary: which words the columns are.
    """
    asked = params.temperature > 0
    return kept(tempered, params.top_k, params.top_p, params.min_p, asked, vocabulary)


def draw(
    logits: Float[Array, "B W"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    params: SamplingParams,
    vocabulary: Vocabulary = WHOLE,
    *,
    extras: bool = True,
) -> Drawn:
    """``sample``, and log-probabilities if any row wants them: of the word drawn and of the
    ``MOST_LOGPROBS`` most likely ones (of all words, if there are fewer)."""
    words = sample(logits, keys, positions, params, vocabulary, filters=extras)
    count = min(MOST_LOGPROBS, vocabulary.words(logits.shape[1]))

    def compare(logits: Array) -> tuple[Array, Array, Array]:
        whole = vocabulary.logsumexp(logits)
        best, best_logits = vocabulary.best(logits, count)
        chosen = vocabulary.take(logits, jnp.maximum(words, 0))
        return (chosen - whole)[:, 0], best, best_logits - whole

    def nothing(logits: Array) -> tuple[Array, Array, Array]:
        rows = logits.shape[0]
        none = jnp.zeros((rows, count), jnp.float32)
        return jnp.zeros(rows, jnp.float32), none.astype(jnp.int32), none

    if not extras:
        return Drawn(words, *nothing(logits))
    found = jax.lax.cond(jnp.any(params.wants_logprobs), compare, nothing, logits)
    return Drawn(words, *found)


def sample(
    logits: Float[Array, "B W"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    params: SamplingParams,
    vocabulary: Vocabulary = WHOLE,
    *,
    filters: bool = True,
) -> Int32[Array, " B"]:
    """One word a row; NOT_A_NUMBER where a row's logits contain a NaN or +inf, or nothing but −inf.

    Args:
        logits: float32, of the words that are on this device.
        keys: of the requests, see ``request_key``.
        positions: of the token to be drawn, from 0 at the start of the prompt.
        params: per row.
        vocabulary: which words the columns are.
        filters: False if no row asks for any.
    """
    best, likeliest = vocabulary.largest(logits)  # NaN if any logit is

    def noisy(logits: Array, *, filters: bool) -> Array:
        temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
        # From the largest down, so that a tiny temperature cannot overflow all words to infinity.
        tempered = (logits - best) / temperature[:, None]
        noise = gumbel_noise(keys, positions, vocabulary.numbers(logits.shape[1]))
        scores = tempered + noise
        if filters:
            scores = jnp.where(filter_words(tempered, params, vocabulary), scores, -jnp.inf)
        return scores

    def chosen(scores: Array) -> Array:
        return jnp.where(params.temperature > 0, vocabulary.largest(scores)[1], likeliest)

    sampled = params.temperature > 0
    filtered = sampled & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0))
    plain = partial(noisy, filters=False)
    if filters:
        # The whole batch takes the way that its most demanding row needs.
        way = sum(jnp.any(rows).astype(jnp.int32) for rows in (sampled, filtered))
        ways = [
            lambda _: likeliest,
            lambda logits: chosen(plain(logits)),
            lambda logits: chosen(noisy(logits, filters=True)),
        ]
        words = jax.lax.switch(way, ways, logits)
    else:
        words = chosen(jax.lax.cond(jnp.any(sampled), plain, lambda logits: logits, logits))
    return jnp.where(jnp.isfinite(best[:, 0]), words, NOT_A_NUMBER)
