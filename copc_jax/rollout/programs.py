"""What the engine has a device do: compiled programs of a few fixed sizes.

A dispatch computes as many slots, tokens and cache positions as its program was compiled for. The
largest programs are compiled at the start and fit everything; a smaller one that would do is
compiled in the background when it is first wanted, while a larger one serves.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from copc_jax import model
from copc_jax.rollout.sampling import sample

logger = logging.getLogger(__name__)

# A program's kind and static sizes: ("decode", rows, attend, top), ("prefill", rows, chunk, attend)
# or ("score", length, top).
Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes that fix the compiled shapes."""

    slots: int = 32
    max_length: int = 512
    """Tokens of a prompt and its response together."""
    steps_per_dispatch: int = 8
    """Tokens per slot in one decode dispatch; more cost less overhead and waste more past stops."""
    decode_rows: tuple[int, ...] = (1, 4, 16, 32, 128)
    """Allowed numbers of slots in one decode dispatch, beside all of them."""
    prefill_rows: tuple[int, ...] = (1, 4, 8)
    """Allowed numbers of sequences in one prefill dispatch."""
    prefill_chunks: tuple[int, ...] = (32, 64, 128)
    """Allowed numbers of tokens per sequence in one prefill dispatch."""
    attend: tuple[int, ...] = (128, 256, 1024, 4096)
    """Allowed numbers of cache positions that a decode dispatch reads, beside `max_length`. It
    copies them first, so only what is at most half of that is used."""
    deterministic: bool = False
    """Give a request the same bits whatever else runs: the shapes of its programs depend on its
    length alone, and nothing is taken from the cache that an earlier request has computed. Of
    `prefill_rows` only the largest is used, which is that of a decode dispatch too, and of `attend`
    none."""

    def __post_init__(self) -> None:
        """Refuse sizes that no engine can have.

        Raises:
            ValueError: naming the field.
        """
        for name in ("slots", "max_length", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("decode_rows", "prefill_rows", "prefill_chunks", "attend"):
            sizes = getattr(self, name)
            optional = name in ("decode_rows", "attend")
            if (not sizes and not optional) or any(size < 1 for size in sizes):
                raise ValueError(f"{name} must be positive sizes, not {sizes}")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The policy's weights in the forms that programs read.

    Attributes:
        params: as `model.init` builds them.
        apart: the same with a copy of each layer apart, from which decoding need not copy them.
    """

    params: model.Params
    apart: model.Params

    @classmethod
    def of(cls, params: model.Params) -> Weights:
        """Make both forms."""
        return cls(params, {**params, "layers": model.split_layers(params["layers"])})


class Programs:
    """Compiled programs by kind and size; each refuses other shapes instead of recompiling.

    All may be called from one thread at a time.

    Args:
        config: the model.
        sizes: what may be compiled.
        weights: arrays of the shapes that programs will be given.
        cache: the same of the cache of all slots, which programs take and give back.

    Attributes:
        sizes: those in use: deterministic, there are fewer.
    """

    def __init__(
        self, config: model.ModelConfig, sizes: EngineConfig, weights: Weights, cache: model.KVCache
    ):
        if sizes.deterministic:
            rows = (max(sizes.prefill_rows),)
            sizes = dataclasses.replace(sizes, prefill_rows=rows, decode_rows=rows, attend=())
        self.sizes = sizes
        self._config = config
        self._weights, self._cache = _abstract((weights.params, weights.apart)), _abstract(cache)
        self._decode_rows = _allowed(sizes.decode_rows, sizes.slots, sizes.slots - 1)
        self._attend = _allowed(sizes.attend, sizes.max_length, sizes.max_length // 2)
        self._compiled: dict[Key, Any] = {}
        self._ahead: dict[Key, Future] = {}
        self._compiler = ThreadPoolExecutor(1, "engine compiler")

    def compile_largest(self) -> None:
        """Compile what fits every ordinary request; deterministic, all of it."""
        sizes = self.sizes
        self._program("decode", self.decoded_at_once, sizes.max_length, 0)
        # Deterministic, no program stands in for another.
        for chunk in sizes.prefill_chunks if sizes.deterministic else (max(sizes.prefill_chunks),):
            for attend in (0, sizes.max_length) if sizes.deterministic else (sizes.max_length,):
                self._program("prefill", max(sizes.prefill_rows), chunk, attend)

    def close(self) -> None:
        """Compile nothing more; what is being compiled ends by itself."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def counters(self) -> dict[str, int]:
        """How many there are, and how many are being compiled."""
        return {
            "compilations": len(self._compiled),
            "compiling": sum(not each.done() for each in list(self._ahead.values())),
        }

    @property
    def decoded_at_once(self) -> int:
        """Slots of one decode dispatch at most; deterministic, always the same number."""
        return min(self._decode_rows) if self.sizes.deterministic else self.sizes.slots

    def decode(self, rows: int, length: int, top: int) -> tuple[Any, int]:
        """Give a program that decodes at least `rows` slots, and how many it takes.

        Args:
            rows: slots that are busy, at most `decoded_at_once`.
            length: cache positions that have to be read.
            top: likeliest tokens to report, 0 or a `top_bucket`.
        """
        key = self._choose(
            ("decode", more, further, top)
            for more in self._decode_rows
            for further in self._attend
            if more >= rows and further >= min(length, self.sizes.max_length)
        )
        return self._program(*key), key[1]

    def prefill(self, rows: int, count: int, begun: bool) -> tuple[Any, int, int]:
        """Give a program that appends tokens, how many slots it takes, and tokens of each.

        Args:
            rows: slots that need it, no more than the largest of `prefill_rows`.
            count: tokens that the longest of them lacks; no more are taken than the largest chunk.
            begun: whether any of them holds tokens already.
        """
        allowed = sorted(self.sizes.prefill_chunks)
        key = self._choose(
            ("prefill", more, longer, attend)
            for longer in allowed
            for more in sorted(self.sizes.prefill_rows)
            for attend in (0, self.sizes.max_length)
            if more >= rows and longer >= min(count, allowed[-1]) and (attend or not begun)
        )
        return self._program(*key), key[1], key[2]

    def score(self, count: int, top: int) -> tuple[Any, int]:
        """Give a program that scores `count` tokens or more, and how many it takes."""
        length = 32
        while length < count:
            length *= 2
        return self._program("score", length, top), length

    def top_bucket(self, count: int) -> int:
        """Round up to a power of two, so that few programs serve all numbers."""
        return min(1 << (count - 1).bit_length(), self._config.vocab_size) if count else 0

    def _choose(self, keys: Iterable[Key]) -> Key:
        """Give the smallest of these programs that is there, and have the very smallest compiled.

        Args:
            keys: programs that would do, the cheapest first; the last is compiled if none is there.
        """
        keys = list(keys)
        best = keys[0]
        chosen = next((key for key in keys if key in self._compiled), keys[-1])
        if chosen != best and best not in self._ahead:
            self._ahead[best] = self._compiler.submit(self._compile_ahead, best)
        return chosen

    def _compile_ahead(self, key: Key) -> None:
        try:
            self._program(*key)
        except Exception:
            logger.exception("%s does not compile; a larger program goes on in its place", key)

    def _program(self, *key: Any) -> Any:
        if key not in self._compiled:
            kind, *sizes = key
            function, donated, inputs = getattr(self, f"_{kind}_inputs")(*sizes)
            jitted = jax.jit(function, donate_argnums=donated)
            self._compiled[key] = jitted.lower(*_abstract(inputs)).compile()
        return self._compiled[key]

    def _decode_inputs(self, rows: int, attend: int, top: int) -> Any:
        steps = self.sizes.steps_per_dispatch
        function = functools.partial(_decode, config=self._config, attend=attend, top=top)
        arrays = ((5, rows), np.int32), ((3, rows), np.float32), ((steps, rows), np.float32)
        inputs = (np.zeros(*x) for x in arrays)
        return function, (1,), (self._weights[1], self._cache, *inputs, np.int32(0))

    def _prefill_inputs(self, rows: int, chunk: int, attend: int) -> Any:
        function = functools.partial(_prefill, config=self._config, attend=attend)
        integers = np.zeros((rows, chunk), np.int32), np.zeros((3, rows), np.int32)
        return function, (1,), (self._weights[0], self._cache, *integers)

    def _score_inputs(self, length: int, top: int) -> Any:
        function = functools.partial(_score, config=self._config, top=top)
        return function, (), (self._weights[0], np.zeros((1, length), np.int32), np.int32(0))


def _allowed(sizes: Iterable[int], whole: int, largest: int) -> tuple[int, ...]:
    """Order the sizes up to `largest`, with the whole as the last."""
    return (*sorted({size for size in sizes if size <= largest}), whole)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# What is compiled.


def _decode(params, whole, integers, floats, uniforms, steps, *, config, attend, top):
    """Sample `steps` tokens in every active row.

    Args:
        params: the policy.
        whole: cache of all slots, donated.
        integers: i32[5, rows]: slot, newest token, its position, top_k, 1 if active; no slot twice,
            and slot i in row i when there are as many rows as slots.
        floats: f32[3, rows]: temperature, top_p, min_p.
        uniforms: f32[max_steps, rows].
        steps: i32[], at most max_steps.
        config: static.
        attend: static, cache positions to read.
        top: static, how many likeliest tokens to report.

    Returns:
        The cache, tokens i32[max_steps, rows], log-probabilities f32[max_steps, rows], and for
        top > 0 the likeliest tokens [max_steps, rows, top] and their log-probabilities.
    """
    slot, token, start, top_k, active = integers
    temperature, top_p, min_p = floats
    length = attend
    rows = uniforms.shape
    apart = (rows[1], attend) != (whole.slots, whole.length)
    # Copied once for all steps: what is only a part of an array would be copied by every step.
    cache = whole.take(slot, attend) if apart else whole

    def step(index, carry):
        cache, token, position, out = carry
        # A slot at its end goes on to the end of the dispatch without writing past the cache.
        alive = (active > 0) & (position < length)
        cache, logits = model.decode_step(
            params, config, cache, token, jnp.minimum(position, length - 1), alive
        )
        token, chosen, normalizer = sample(
            logits, uniforms[index], temperature, top_k, top_p, min_p
        )
        new = [token, chosen]
        if top:
            logprob = logits / temperature[:, None] - normalizer[:, None]
            best, ids = jax.lax.top_k(logprob, top)
            new += [ids.astype(jnp.int32), best]
        out = tuple(buffer.at[index].set(value) for buffer, value in zip(out, new, strict=True))
        return cache, token, position + 1, out

    out = (jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32))
    if top:
        out += (jnp.zeros((*rows, top), jnp.int32), jnp.zeros((*rows, top), jnp.float32))
    cache, _, _, out = jax.lax.fori_loop(0, steps, step, (cache, token, start, out))
    return whole.put(cache, slot, start, min(rows[0], attend)) if apart else cache, out


def _prefill(params, cache, token_ids, integers, *, config, attend):
    """Append tokens to slots; integers i32[3, n] are slot, start and count."""
    slot, start, count = integers
    return model.prefill(params, config, cache, token_ids, slot, start, count, attend=attend)[0]


def _score(params, token_ids, count, *, config, top):
    """Score one sequence i32[1, length] at temperature 1.

    Returns:
        f32[length], log p(token | prefix), and for top > 0 the likeliest tokens to FOLLOW each one.
    """
    index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    segment_ids = (index < count).astype(jnp.int32)
    hidden = model.forward(params, config, token_ids, segment_ids, index)
    chunk = min(256, token_ids.shape[1])
    logprob = model.token_logprob(params, config, hidden, token_ids, segment_ids, chunk=chunk)[0]
    if not top:
        return (logprob,)
    scores = jax.nn.log_softmax(model.logits(params, config, hidden), axis=1)
    best, ids = jax.lax.top_k(scores, top)
    return logprob, ids.astype(jnp.int32), best
