"""How a token is drawn: random numbers that depend on a request alone, and the choice by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Vocabulary entries summed together before the search: two short cumulative sums cost a third of
# one over the whole vocabulary.
_SAMPLE_BLOCK = 64

# top_k of a request that keeps the whole vocabulary.
KEEP_ALL = np.iinfo(np.int32).max


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Give random numbers in [0, 1), f32, that depend on seed and token index alone.

    The splitmix64 generator, keyed by the seed and entered at `index`. The key is mixed first, so
    that neighboring seeds do not give shifted copies of one sequence. 24 bits: all that a float32
    can hold evenly spaced.

    Args:
        seed: u64, broadcast against `index`.
        index: u64.
    """
    mixed = _mix(seed) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(mixed) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def derive_seed(seed: int, index: int) -> int:
    """Give the seed of sample `index` under one base seed; index 0 is the base seed itself."""
    if index == 0:
        return seed % 2**64
    base = np.array([seed % 2**64], np.uint64)
    return int(_mix(_mix(base) ^ np.uint64(index))[0])


def _mix(x: np.ndarray) -> np.ndarray:
    """Splitmix64's finalizer: a bijection of u64 whose every input bit changes half the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _search(weight: Float[Array, "n size"], target: Float[Array, " n"]) -> tuple[Array, Array]:
    """Find the first index whose cumulative weight exceeds `target`, and what stands before it.

    `target` is held under the total, so that rounding never picks an entry of weight zero.
    """
    cumulative = jnp.cumsum(weight, axis=1)
    target = jnp.minimum(target, cumulative[:, -1] * np.float32(1 - 2.0**-23))
    index = jnp.sum(cumulative <= target[:, None], axis=1, dtype=jnp.int32)
    index = jnp.minimum(index, weight.shape[1] - 1)
    before = jnp.take_along_axis(jnp.pad(cumulative, ((0, 0), (1, 0))), index[:, None], axis=1)
    return index, target - before[:, 0]


def sample(
    logits: Float[Array, "n vocab"],
    uniform: Float[Array, " n"],
    temperature: Float[Array, " n"],
    top_k: Int[Array, " n"],
    top_p: Float[Array, " n"],
    min_p: Float[Array, " n"],
) -> tuple[Int[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Draw one token a row by inverse CDF.

    top_k 1 takes the likeliest token. Otherwise a token is kept if fewer than top_k are likelier,
    if the likelier ones hold at most top_p, and if it has at least min_p of the largest
    probability.

    Args:
        logits: scores of the next token.
        uniform: in [0, 1).
        temperature: above 0.
        top_k: at least 1; vocab or more keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.

    Returns:
        The tokens; their log-probabilities at the temperature before anything is cut off, in nats;
        and what to subtract from logits / temperature to have those of the whole vocabulary.
    """
    n, vocab = logits.shape
    scaled = logits / temperature[:, None]
    highest = jnp.max(scaled, axis=1, keepdims=True)
    weight = jnp.exp(scaled - highest)
    total = jnp.sum(weight, axis=1)

    blocks = jnp.pad(weight, ((0, 0), (0, -vocab % _SAMPLE_BLOCK))).reshape(n, -1, _SAMPLE_BLOCK)
    block_weight = jnp.sum(blocks, axis=2)
    block, rest = _search(block_weight, uniform * jnp.sum(block_weight, axis=1))
    within, _ = _search(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], rest)
    token = block * _SAMPLE_BLOCK + within

    cuts = ((top_k > 1) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)

    def cut() -> Array:
        ordered, order = jax.lax.sort_key_val(
            -weight, jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), weight.shape)
        )
        probability = -ordered / total[:, None]
        likelier = jnp.cumsum(probability, axis=1) - probability
        kept = (
            (jnp.arange(vocab, dtype=jnp.int32)[None] < top_k[:, None])
            & (likelier <= top_p[:, None])
            & (probability >= min_p[:, None] * probability[:, :1])
        )
        kept_probability = jnp.where(kept, probability, 0.0)
        rank, _ = _search(kept_probability, uniform * jnp.sum(kept_probability, axis=1))
        return jnp.take_along_axis(order, rank[:, None], axis=1)[:, 0]

    def likeliest() -> Array:
        # Two plain reductions: XLA's argmax on a CPU takes four times as long.
        index = jnp.arange(vocab, dtype=jnp.int32)[None]
        best = jnp.max(logits, axis=1, keepdims=True)
        return jnp.min(jnp.where(logits == best, index, vocab - 1), axis=1)

    # Conditionals, so that ordinary training rollouts pay neither for the sort nor for the argmax.
    drawn, greedy = token, top_k == 1
    token = jnp.where(cuts, jax.lax.cond(jnp.any(cuts), cut, lambda: drawn), token)
    token = jnp.where(greedy, jax.lax.cond(jnp.any(greedy), likeliest, lambda: drawn), token)
    normalizer = highest[:, 0] + jnp.log(total)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] / temperature
    return token, chosen - normalizer, normalizer
