"""Continuous batching on a JAX model: fixed slots, one thread, several tokens a dispatch.

A slot holds the keys and values of one sequence. Requests wait in a queue, take a free slot,
prefill all of their tokens but the last, and then decode together: a decode dispatch feeds each
slot its newest token and samples up to `steps_per_dispatch` tokens on the device. Tokens past a
stop are thrown away on the host, which looks at whole dispatches with numpy and never loops over
tokens.

A dispatch computes as many slots, tokens and cache positions as its program was compiled for. The
largest programs are compiled at the start and fit everything; a smaller one that would do is
compiled in the background when it is first wanted.

A finished slot keeps its tokens. A later request that begins with them, such as the next turn of
the episode, goes on there and prefills the rest only.

The sampled token depends on the logits, the request's seed and the index of the token in the
response, so results do not depend on the slot, on what else runs, or on the dispatch size, but for
the rounding of the logits: programs of different shapes add in different orders, and what else runs
decides which shape is taken and what of a prompt is computed already. `EngineConfig.deterministic`
takes that away too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copc_jax import model

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]

# A program's kind and static sizes: ("decode", rows, attend, top), ("prefill", rows, chunk, attend)
# or ("score", length, top).
Key = tuple[Any, ...]

# Vocabulary entries summed together before the search: two short cumulative sums cost a third of
# one over the whole vocabulary.
_SAMPLE_BLOCK = 64

# top_k of a request that keeps the whole vocabulary.
_ALL = np.iinfo(np.int32).max


# -------------------------------------------------------------------------------------- records


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a response are chosen and when it ends; SGLang's names and defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample.

    Attributes:
        rid: its name, for aborting it.
        prompt: i32[n], at least one token.
        sampling: see `Sampling`.
        seed: any integer; equal seeds give equal random numbers.
        logprob_start: first prompt token whose log-probability is wanted, -1 for none.
        top_logprobs: how many of the likeliest tokens to report at each position.
        stream: report after every dispatch, not only at the end.
        namespace: requests share computed prefixes within their namespace only.
    """

    rid: str
    prompt: np.ndarray
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    logprob_start: int = -1
    top_logprobs: int = 0
    stream: bool = False
    namespace: str = ""


@dataclasses.dataclass(frozen=True)
class Span:
    """Output tokens start..end-1 were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """Why a response ended: `matched` is the stop token or string, `message` explains an abort."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each position: ids i32[n, k] and log-probabilities f32[n, k]."""

    token_ids: np.ndarray
    logprob: np.ndarray


@dataclasses.dataclass(frozen=True)
class Output:
    """What is known of a response, at its end or, for a stream, after a dispatch.

    Attributes:
        request: what was asked.
        token_ids: i32[n], with a matched stop token, and with all tokens that reach into a matched
            stop string.
        logprob: f32[n] at the sampling temperature (1 for greedy), before top_k, top_p and min_p.
        spans: which weights sampled which tokens.
        finish: None while the response goes on.
        version: the weights in use now.
        started: False when it was aborted in the queue.
        cached_tokens: prompt tokens that did not have to be prefilled.
        retractions: how often it lost its slot to a pause.
        top: for each output token, if asked for.
        prompt_logprob: f32[n - 1] at temperature 1, of every prompt token but the first, if asked
            for.
        prompt_top: for the same tokens, if asked for.
    """

    request: Request
    token_ids: np.ndarray
    logprob: np.ndarray
    spans: tuple[Span, ...]
    finish: Finish | None
    version: str
    started: bool
    cached_tokens: int
    retractions: int
    top: TopLogprobs | None = None
    prompt_logprob: np.ndarray | None = None
    prompt_top: TopLogprobs | None = None


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


class EngineDead(RuntimeError):
    """The engine's thread has ended; nothing can be generated any more."""


class UpdateRefused(ValueError):
    """New weights cannot be taken in the engine's present state; nothing has changed."""


# -------------------------------------------------------------------------------------- sampling


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


# -------------------------------------------------------------------------------------- programs


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


def _bucket(size: int, buckets: Iterable[int], largest: int) -> int:
    return min((bucket for bucket in buckets if size <= bucket < largest), default=largest)


def _allowed(sizes: Iterable[int], whole: int, largest: int) -> tuple[int, ...]:
    """Order the sizes up to `largest`, with the whole as the last."""
    return (*sorted({size for size in sizes if size <= largest}), whole)


# -------------------------------------------------------------------------------------- engine


@dataclasses.dataclass
class _Work:
    """A request on its way; the arrays hold its tokens while it has no slot."""

    request: Request
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    logprob: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    spans: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    started: bool = False
    cached_tokens: int = 0
    retractions: int = 0
    top: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    prompt_logprob: np.ndarray | None = None
    prompt_top: TopLogprobs | None = None


@dataclasses.dataclass
class _Update:
    params: Any
    decoding_params: Any
    version: str | None
    flush: bool
    path: str | None
    future: Future


class Engine:
    """The decode loop and its thread.

    Public methods may be called from any thread. Those that return a `Future` are carried out
    between two dispatches.

    Args:
        params: policy weights, as `model.init` builds them.
        config: the model.
        engine_config: sizes.
        decode: token ids to text with special tokens shown, for stop strings.
        on_outputs: called in the engine's thread with the outputs of one dispatch.
        eos_ids: tokens that end every response that does not ignore them.
        version: name of the first weights.
        on_death: called in the engine's thread when it ends by an error.
    """

    def __init__(
        self,
        params: Any,
        config: model.ModelConfig,
        engine_config: EngineConfig,
        *,
        decode: Callable[[Sequence[int]], str],
        on_outputs: Callable[[list[Output]], None],
        eos_ids: Sequence[int] = (),
        version: str = "default",
        on_death: Callable[[BaseException], None] | None = None,
    ):
        self.config = config
        if engine_config.deterministic:
            rows = (max(engine_config.prefill_rows),)
            engine_config = dataclasses.replace(
                engine_config, prefill_rows=rows, decode_rows=rows, attend=()
            )
        self.sizes = engine_config
        self.version = version
        self.model_path: str | None = None
        self.error: BaseException | None = None
        self._params, self._decoding_params = params, _for_decoding(params)
        self._decode_text = decode
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._eos_ids = tuple(eos_ids)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._updates: deque[_Update] = deque()
        self._waiting: deque[_Work] = deque()
        self._paused: PauseMode | None = None
        self._stopping = False
        self._outbox: list[Output] = []
        self._programs: dict[Key, Any] = {}
        self._ahead: dict[Key, Future] = {}
        self._compiler = ThreadPoolExecutor(1, "engine compiler")
        self._clock = 0
        # Masked attention multiplies what it does not see by zero, which NaN survives: after NaN
        # weights the cache must be made anew.
        self._poisoned = False

        slots, length = engine_config.slots, engine_config.max_length
        self._cache = model.init_cache(config, slots, length)
        self._cache_shape = _abstract(self._cache)
        self._decode_rows = _allowed(engine_config.decode_rows, slots, slots - 1)
        self._attend = _allowed(engine_config.attend, length, length // 2)
        # What each slot holds. `_known` tokens are in the history; the cache has the `_computed`
        # first of them, which for a decoding slot is all but the newest, and the weights that
        # computed them carry the number `_generation`.
        self._work: list[_Work | None] = [None] * slots
        self._running = np.zeros(slots, bool)
        self._history = np.zeros((slots, length), np.int32)
        self._logprob = np.zeros((slots, length), np.float32)
        self._known = np.zeros(slots, np.int32)
        self._computed = np.zeros(slots, np.int32)
        self._generation = np.zeros(slots, np.int64)
        self._weights_generation = 0
        self._last_used = np.zeros(slots, np.int64)
        self._namespace = [""] * slots
        # Copies of the request's settings, one row a slot, for numpy and the device.
        self._prompt_length = np.zeros(slots, np.int32)
        self._limit = np.zeros(slots, np.int32)
        self._seed = np.zeros(slots, np.uint64)
        self._temperature = np.ones(slots, np.float32)
        self._top_k = np.full(slots, _ALL, np.int32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._stop_ids = np.full((slots, 4), -1, np.int32)
        self._stop_window = np.zeros(slots, np.int32)

        self._tokens_sampled = 0
        self._tokens_prefilled = 0
        self._tokens_cached = 0
        self._tokens_discarded = 0
        self._tokens_computed = 0
        self._decode_steps = 0
        self._finished = 0
        self._aborted = 0
        self._busy_seconds = 0.0
        self._idle_seconds = 0.0

    # ---------------------------------------------------------------------------- from outside

    def start(self) -> None:
        """Compile the largest programs, which fit every ordinary request, and start the thread."""
        sizes = self.sizes
        rows = min(self._decode_rows) if sizes.deterministic else sizes.slots
        self._program("decode", rows, sizes.max_length, 0)
        # Deterministic, no program stands in for another.
        for chunk in sizes.prefill_chunks if sizes.deterministic else (max(sizes.prefill_chunks),):
            for attend in (0, sizes.max_length) if sizes.deterministic else (sizes.max_length,):
                self._program("prefill", max(sizes.prefill_rows), chunk, attend)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Abort everything and end the thread; False if it did not end in time."""
        if not self._thread.is_alive():
            return True

        def stop() -> None:
            self._abort_all()
            self._stopping = True

        self._call(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Future:
        """Queue requests in this order. Prompt and response of each must fit `max_length`."""
        return self._call(lambda: self._waiting.extend(_Work(request) for request in requests))

    def abort(self, rids: Iterable[str]) -> Future:
        """End these requests with what they have; unknown names are ignored."""
        names = frozenset(rids)
        return self._call(lambda: self._abort(lambda work: work.request.rid in names))

    def abort_all(self) -> Future:
        """End all requests with what they have."""
        return self._call(self._abort_all)

    def pause(self, mode: PauseMode) -> Future:
        """Stop generating; new requests queue.

        "abort" ends all requests, "retract" puts running ones back at the head of the queue with
        their tokens, "in_place" freezes them with their keys and values.
        """
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future:
        """Go on after `pause`; nothing happens when not paused."""

        def resume() -> None:
            self._paused = None

        return self._call(resume)

    def update(
        self, params: Any, version: str | None, *, flush: bool = True, path: str | None = None
    ) -> Future:
        """Exchange the weights: at once when paused, else when all running requests have ended.

        Args:
            params: like the present ones.
            version: their name; None keeps the present name.
            flush: insist that no keys and values of the old weights stay in use. Refused while
                requests are frozen in place.
            path: where they came from, for information.

        Returns:
            A future of the number of requests frozen in place, or of `UpdateRefused`.
        """
        future: Future = Future()
        update = _Update(params, _for_decoding(params), version, flush, path, future)
        with self._wake:
            if self.error is not None or self._stopping:
                future.set_exception(EngineDead(f"the engine has ended: {self.error!r}"))
            else:
                self._updates.append(update)
                self._wake.notify()
        return future

    def relabel(self, version: str) -> Future:
        """Name the present weights; what is computed stays valid."""
        return self._call(lambda: self._set_version(version))

    def flush(self) -> Future:
        """Forget what finished slots hold; False, and nothing done, if requests are left."""
        return self._call(self._flush)

    @property
    def paused(self) -> PauseMode | None:
        """How it is paused, None if it is not."""
        return self._paused

    def load(self) -> dict[str, int]:
        """Count running, waiting and retracted requests, and the tokens that running ones hold."""
        waiting = list(self._waiting)
        return {
            "running": int(self._running.sum()),
            "waiting": len(waiting),
            "retracted": sum(work.retractions > 0 for work in waiting),
            "frozen": int(self._running.sum()) if self._paused == "in_place" else 0,
            "tokens": int(self._known[self._running].sum()),
        }

    def counters(self) -> dict[str, float]:
        """Totals since the start; seconds are wall time of the engine's thread."""
        computed = self._tokens_computed
        return {
            "tokens_sampled": self._tokens_sampled,
            "tokens_prefilled": self._tokens_prefilled,
            "tokens_cached": self._tokens_cached,
            "tokens_discarded": self._tokens_discarded,
            "tokens_computed": computed,
            "decode_steps": self._decode_steps,
            "decode_occupancy": self._tokens_sampled / computed if computed else 0.0,
            "requests_finished": self._finished,
            "requests_aborted": self._aborted,
            "busy_seconds": self._busy_seconds,
            "idle_seconds": self._idle_seconds,
            "compilations": len(self._programs),
            "compiling": sum(not each.done() for each in list(self._ahead.values())),
        }

    def _call(self, action: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._wake:
            if self.error is not None or self._stopping:
                future.set_exception(EngineDead(f"the engine has ended: {self.error!r}"))
            else:
                self._commands.append((action, future))
                self._wake.notify()
        return future

    # ---------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                started = time.perf_counter()
                self._execute_commands()
                self._execute_updates()
                if self._paused is None:
                    if not self._updates:
                        self._admit()
                    if not self._prefill_some():
                        self._decode_some()
                self._deliver()
                self._busy_seconds += time.perf_counter() - started
        except BaseException as error:
            logger.exception("the engine ends")
            with self._wake:
                self.error = error
            self._fail(error)
            if self._on_death is not None:
                self._on_death(error)
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        started = time.perf_counter()

        def has_work() -> bool:
            if self._commands or self._updates:
                return True
            return self._paused is None and (bool(self._waiting) or bool(self._running.any()))

        with self._wake:
            self._wake.wait_for(has_work)
        self._idle_seconds += time.perf_counter() - started

    def _execute_commands(self) -> None:
        while self._commands:
            action, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    def _execute_updates(self) -> None:
        while self._updates and (self._paused is not None or not self._running.any()):
            update = self._updates.popleft()
            if not update.future.set_running_or_notify_cancel():
                continue
            frozen = int(self._running.sum())
            if frozen and update.flush:
                update.future.set_exception(
                    UpdateRefused(
                        f"{frozen} requests are paused in place, so their keys and values cannot "
                        "be flushed: pause with mode retract, or send flush_cache false"
                    )
                )
                continue
            self._params, self._decoding_params = update.params, update.decoding_params
            self.model_path = update.path or self.model_path
            # Finished slots are never reused under other weights, whether flushed or not.
            self._weights_generation += 1
            if self._poisoned and not frozen:
                self._cache = model.init_cache(self.config, *self._history.shape)
                self._poisoned = False
            if update.version is not None:
                self._set_version(update.version)
            update.future.set_result(frozen)

    def _deliver(self) -> None:
        if self._outbox:
            outputs, self._outbox = self._outbox, []
            self._on_outputs(outputs)

    def _fail(self, error: BaseException) -> None:
        for _, future in self._commands:
            future.set_exception(EngineDead(f"the engine has ended: {error!r}"))
        for update in self._updates:
            update.future.set_exception(EngineDead(f"the engine has ended: {error!r}"))
        self._commands.clear()
        self._updates.clear()

    # ---------------------------------------------------------------------------- commands

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode == "abort":
            self._abort_all()
        elif mode == "retract":
            slots = np.flatnonzero(self._running)
            # Back in the order in which they came.
            for slot in sorted(slots, key=lambda slot: -self._last_used[slot]):
                work = self._leave(int(slot))
                work.retractions += 1
                self._waiting.appendleft(work)

    def _abort_all(self) -> None:
        self._abort(lambda work: True)

    def _abort(self, chosen: Callable[[_Work], bool]) -> None:
        kept: deque[_Work] = deque()
        for work in self._waiting:
            if not chosen(work):
                kept.append(work)
                continue
            message = "Aborted" if work.started else "Abort in waiting queue"
            self._finish(work, Finish("abort", message=message))
        self._waiting = kept
        for slot in np.flatnonzero(self._running):
            work = self._work[slot]
            assert work is not None
            if chosen(work):
                self._finish(self._leave(int(slot)), Finish("abort", message="Aborted"))

    def _set_version(self, version: str) -> None:
        self.version = version
        for slot in np.flatnonzero(self._running):
            work = self._work[slot]
            assert work is not None
            _append_span(work, version, int(self._known[slot] - self._prompt_length[slot]))
        for work in self._waiting:
            if work.started:
                _append_span(work, version, len(work.token_ids))

    def _flush(self) -> bool:
        if self._waiting or self._running.any():
            return False
        self._computed[:] = 0
        return True

    # ---------------------------------------------------------------------------- slots

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served."""
        while self._waiting:
            free = np.flatnonzero(~self._running)
            if not len(free):
                return
            work = self._waiting.popleft()
            if not work.started:
                work.started = True
                work.spans = [(self.version, 0)]
                if work.request.logprob_start >= 0:
                    self._score_prompt(work)
            if work.request.sampling.max_new_tokens == 0:
                self._finish(work, Finish("length"))
                continue
            self._occupy(work, free)

    def _occupy(self, work: _Work, free: np.ndarray) -> None:
        request, sampling = work.request, work.request.sampling
        token_ids = np.concatenate([request.prompt, work.token_ids]).astype(np.int32)
        shared = self._shared_prefix(token_ids, request.namespace, free)
        # A slot that holds nothing but our beginning is an episode's earlier turn. Any other slot
        # may still be wanted by its own episode, so the one used longest ago gives way.
        whole = (shared > 0) & (shared == self._computed[free])
        if whole.any():
            best = int(np.argmax(np.where(whole, shared, -1)))
        else:
            best = int(np.argmin(np.where(self._computed[free] > 0, self._last_used[free], -1)))
        slot, cached = int(free[best]), int(shared[best])
        known = len(token_ids)
        if not work.retractions:
            work.cached_tokens = cached
        self._tokens_cached += cached

        self._work[slot] = work
        self._running[slot] = True
        self._history[slot, :known] = token_ids
        self._logprob[slot, known - len(work.logprob) : known] = work.logprob
        self._known[slot] = known
        self._computed[slot] = cached
        self._generation[slot] = self._weights_generation
        self._namespace[slot] = request.namespace
        self._clock += 1
        self._last_used[slot] = self._clock

        greedy = sampling.temperature < 1e-6
        self._prompt_length[slot] = len(request.prompt)
        self._limit[slot] = len(request.prompt) + sampling.max_new_tokens
        self._seed[slot] = request.seed % 2**64
        self._temperature[slot] = 1.0 if greedy else sampling.temperature
        top_k = _ALL if sampling.top_k < 0 else min(sampling.top_k, _ALL)
        self._top_k[slot] = 1 if greedy else top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_ids)
        # Other ids are never sampled, and may be too large for the array.
        stop_ids = [token for token in stop_ids if 0 <= token < self.config.vocab_size]
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
        # A token has at least one byte, so this many tokens hold the longest stop string.
        self._stop_window[slot] = max((len(stop.encode()) for stop in sampling.stop), default=0)

    def _shared_prefix(self, token_ids: np.ndarray, namespace: str, free: np.ndarray) -> np.ndarray:
        """Count the leading tokens that each free slot has computed with the present weights.

        The last token is never counted: decoding begins with it. Returns i32[free].
        """
        if self.sizes.deterministic:
            return np.zeros(len(free), np.int64)
        length = len(token_ids) - 1
        usable = self._generation[free] == self._weights_generation
        usable &= np.array([self._namespace[slot] == namespace for slot in free])
        differs = self._history[free, :length] != token_ids[None, :length]
        differs |= np.arange(length)[None] >= self._computed[free, None]
        # A last column that differs, so that argmax finds the length when everything agrees.
        differs = np.concatenate([differs, np.ones((len(free), 1), bool)], axis=1)
        return np.where(usable, np.argmax(differs, axis=1), 0)

    def _leave(self, slot: int) -> _Work:
        """Take the request out of its slot with its tokens; the slot keeps what it computed."""
        work = self._work[slot]
        assert work is not None
        start, end = int(self._prompt_length[slot]), int(self._known[slot])
        work.token_ids = self._history[slot, start:end].copy()
        work.logprob = self._logprob[slot, start:end].copy()
        self._work[slot] = None
        self._running[slot] = False
        self._clock += 1
        self._last_used[slot] = self._clock
        return work

    def _finish(self, work: _Work, finish: Finish | None) -> None:
        if finish is not None:
            self._finished += 1
            self._aborted += finish.kind == "abort"
        count = len(work.token_ids)
        spans = work.spans or [(self.version, 0)]
        ends = [start for _, start in spans[1:]] + [count]
        top = None
        if width := work.request.top_logprobs:
            ids, best = zip(*work.top, strict=True) if work.top else ((), ())
            top = TopLogprobs(
                np.concatenate([np.zeros((0, width), np.int32), *ids]),
                np.concatenate([np.zeros((0, width), np.float32), *best]),
            )
        self._outbox.append(
            Output(
                request=work.request,
                token_ids=work.token_ids,
                logprob=work.logprob,
                spans=tuple(
                    Span(version, start, end)
                    for (version, start), end in zip(spans, ends, strict=True)
                    if end > start or count == 0
                ),
                finish=finish,
                version=self.version,
                started=work.started,
                cached_tokens=work.cached_tokens,
                retractions=work.retractions,
                top=top,
                prompt_logprob=work.prompt_logprob,
                prompt_top=work.prompt_top,
            )
        )

    # ---------------------------------------------------------------------------- dispatches

    def _prefill_some(self) -> bool:
        """Prefill one bucket of rows; False if no slot needs it."""
        missing = np.where(self._running, self._known - 1 - self._computed, 0)
        slots = np.flatnonzero(missing)
        if not len(slots):
            return False
        # Rows of like length together, the longest first, so that little of the bucket is padding.
        slots = slots[np.argsort(-missing[slots], kind="stable")]
        rows_allowed, chunks_allowed = self.sizes.prefill_rows, self.sizes.prefill_chunks
        chunk_of = lambda slot: _bucket(int(missing[slot]), chunks_allowed, max(chunks_allowed))
        chunk = chunk_of(slots[0])
        if self.sizes.deterministic:
            begun = self._computed > 0
            alike = [chunk_of(x) == chunk and begun[x] == begun[slots[0]] for x in slots]
            slots = slots[alike]
        rows = _bucket(len(slots), rows_allowed, max(rows_allowed))
        slots = slots[:rows]
        attend = self.sizes.max_length if self._computed[slots].any() else 0
        _, rows, chunk, attend = key = self._choose(
            ("prefill", more, longer, further)
            for longer in sorted(chunks_allowed)
            for more in sorted(rows_allowed)
            for further in (0, self.sizes.max_length)
            if more >= rows and longer >= chunk and further >= attend
        )
        token_ids = np.zeros((rows, chunk), np.int32)
        integers = np.zeros((3, rows), np.int32)
        for row, slot in enumerate(slots):
            start = int(self._computed[slot])
            count = min(chunk, int(missing[slot]))
            token_ids[row, :count] = self._history[slot, start : start + count]
            integers[:, row] = slot, start, count
            self._computed[slot] += count
            self._tokens_prefilled += count
        program = self._program(*key)
        self._cache = program(self._params, self._cache, token_ids, integers)
        # What arrives meanwhile is prefilled next: requests that come together decode together.
        jax.block_until_ready(self._cache)
        return True

    def _decode_some(self) -> None:
        """Sample a dispatch of tokens in all running slots and end those that are done."""
        slots = np.flatnonzero(self._running)
        # All in one, but where the program must not depend on how many there are.
        at_once = min(self._decode_rows) if self.sizes.deterministic else self.sizes.slots
        for first in range(0, len(slots), at_once):
            self._decode_slots(slots[first : first + at_once])

    def _decode_slots(self, slots: np.ndarray) -> None:
        remaining = self._limit[slots] - self._known[slots]
        steps = int(min(self.sizes.steps_per_dispatch, remaining.max()))
        active = np.zeros(self.sizes.slots, bool)
        active[slots] = True
        position = np.where(active, self._known - 1, 0)
        end, top = int(position.max()) + steps, self._top_width(slots)
        key = self._choose(
            ("decode", more, further, top)
            for more in self._decode_rows
            for further in self._attend
            if more >= len(slots) and further >= min(end, self.sizes.max_length)
        )
        rows = key[1]
        if rows == self.sizes.slots:
            order, place = np.arange(rows), slots
        else:
            # Rows that are left over take other slots, and change nothing in them.
            others = np.flatnonzero(~active)[: rows - len(slots)]
            order, place = np.concatenate([slots, others]), np.arange(len(slots))
        newest = self._history[order, position[order]]
        settings = np.stack([position, self._top_k, active])[:, order]
        integers = np.concatenate([[order, newest], settings]).astype(np.int32)
        floats = np.stack([self._temperature, self._top_p, self._min_p])[:, order]
        index = (self._known - self._prompt_length)[order].astype(np.uint64)[None]
        index = index + np.arange(self.sizes.steps_per_dispatch, dtype=np.uint64)[:, None]
        uniforms = uniform(self._seed[order][None], index)
        self._cache, out = self._program(*key)(
            self._decoding_params, self._cache, integers, floats, uniforms, np.int32(steps)
        )
        tokens, logprobs, *tops = (x[:, place] for x in jax.device_get(out))
        self._decode_steps += steps
        self._tokens_computed += steps * rows
        self._collect(slots, steps, tokens, logprobs, tops)

    def _collect(
        self,
        slots: np.ndarray,
        steps: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        tops: list[np.ndarray],
    ) -> None:
        """Keep each slot's tokens up to its end, and finish what has ended."""
        tokens, logprobs = tokens[:steps].T, logprobs[:steps].T  # [running, steps]
        known = self._known[slots]
        remaining = self._limit[slots] - known
        hits = (tokens[:, :, None] == self._stop_ids[slots][:, None]).any(axis=2)
        stopped = hits.any(axis=1) & (np.argmax(hits, axis=1) < remaining)
        kept = np.minimum(np.where(stopped, np.argmax(hits, axis=1) + 1, steps), remaining)
        bad = ~np.isfinite(logprobs) & (np.arange(steps)[None] < kept[:, None])
        broken: np.ndarray = np.any(bad, axis=1)
        kept = np.where(broken, np.argmax(bad, axis=1), kept)
        stopped &= ~broken
        self._poisoned |= bool(broken.any())
        row, column = np.nonzero(np.arange(steps)[None] < kept[:, None])
        self._history[slots[row], known[row] + column] = tokens[row, column]
        self._logprob[slots[row], known[row] + column] = logprobs[row, column]

        matched: dict[int, str] = {}
        for i in map(int, np.flatnonzero(self._stop_window[slots])):
            match = self._match_stop_string(int(slots[i]), int(kept[i]))
            # A stop token that ends the string too is reported as the token, as SGLang does.
            if match is not None and not (stopped[i] and match[0] == kept[i]):
                kept[i], matched[i] = match
                stopped[i] = True

        self._known[slots] = known + kept
        self._computed[slots] = known + kept - 1
        total = int(kept.sum())
        self._tokens_sampled += total
        self._tokens_discarded += kept.size * steps - total
        for i, slot in enumerate(slots if tops else ()):
            work = self._work[slot]
            assert work is not None
            if work.request.top_logprobs:
                ids, best = (part[: kept[i], i, : work.request.top_logprobs] for part in tops)
                work.top.append((ids, best))

        done = stopped | (kept == remaining) | broken
        for i in map(int, np.flatnonzero(done)):
            slot = int(slots[i])
            if i in matched:
                finish = Finish("stop", matched[i])
            elif stopped[i]:
                finish = Finish("stop", int(tokens[i, kept[i] - 1]))
            elif broken[i]:
                finish = Finish(
                    "abort", message="the model gave a log-probability that is not finite"
                )
            else:
                finish = Finish("length")
            self._finish(self._leave(slot), finish)
            self._computed[slot] *= not bool(broken[i])
        for slot in slots[~done]:
            work = self._work[slot]
            assert work is not None
            if work.request.stream:
                start, end = int(self._prompt_length[slot]), int(self._known[slot])
                work.token_ids = self._history[slot, start:end].copy()
                work.logprob = self._logprob[slot, start:end].copy()
                self._finish(work, None)

    def _match_stop_string(self, slot: int, count: int) -> tuple[int, str] | None:
        """Find how many of the `count` newest tokens complete a stop string, and which string."""
        work = self._work[slot]
        assert work is not None
        known = int(self._known[slot])
        start = max(int(self._prompt_length[slot]), known - int(self._stop_window[slot]))
        stops = work.request.sampling.stop
        text = self._decode_text(self._history[slot, start : known + count].tolist())
        if not any(stop in text for stop in stops):
            return None
        for new in range(1, count + 1):
            text = self._decode_text(self._history[slot, start : known + new].tolist())
            for stop in stops:
                if stop in text:
                    return new, stop
        return None

    def _score_prompt(self, work: _Work) -> None:
        request = work.request
        count = len(request.prompt)
        length = 32
        while length < count:
            length *= 2
        top = self._top_bucket(request.top_logprobs)
        token_ids = np.zeros((1, length), np.int32)
        token_ids[0, :count] = request.prompt
        program = self._program("score", length, top)
        logprob, *tops = jax.device_get(program(self._params, token_ids, np.int32(count)))
        work.prompt_logprob = logprob[1:count]
        if top:
            ids, best = (part[: count - 1, : request.top_logprobs] for part in tops)
            work.prompt_top = TopLogprobs(ids, best)

    def _top_width(self, slots: np.ndarray) -> int:
        works = (self._work[slot] for slot in slots)
        return self._top_bucket(
            max(work.request.top_logprobs for work in works if work is not None)
        )

    def _top_bucket(self, count: int) -> int:
        """Round up to a power of two, so that few programs serve all numbers."""
        return min(1 << (count - 1).bit_length(), self.config.vocab_size) if count else 0

    # ---------------------------------------------------------------------------- compilation

    def _choose(self, keys: Iterable[Key]) -> Key:
        """Give the smallest of these programs that is there, and have the very smallest compiled.

        Args:
            keys: programs that would do, the cheapest first; the last is compiled if none is there.
        """
        keys = list(keys)
        best = keys[0]
        chosen = next((key for key in keys if key in self._programs), keys[-1])
        if chosen != best and best not in self._ahead:
            self._ahead[best] = self._compiler.submit(self._compile_ahead, best)
        return chosen

    def _compile_ahead(self, key: Key) -> None:
        try:
            self._program(*key)
        except Exception:
            logger.exception("%s does not compile; a larger program goes on in its place", key)

    def _program(self, *key: Any) -> Any:
        """Compile once per key; a compiled program refuses other shapes instead of recompiling."""
        if key not in self._programs:
            kind, *sizes = key
            function, donated, inputs = getattr(self, f"_{kind}_inputs")(*sizes)
            jitted = jax.jit(function, donate_argnums=donated)
            self._programs[key] = jitted.lower(*_abstract(inputs)).compile()
        return self._programs[key]

    def _decode_inputs(self, rows: int, attend: int, top: int) -> Any:
        steps = self.sizes.steps_per_dispatch
        function = functools.partial(_decode, config=self.config, attend=attend, top=top)
        arrays = ((5, rows), np.int32), ((3, rows), np.float32), ((steps, rows), np.float32)
        inputs = (np.zeros(*x) for x in arrays)
        return function, (1,), (self._decoding_params, self._cache_shape, *inputs, np.int32(0))

    def _prefill_inputs(self, rows: int, chunk: int, attend: int) -> Any:
        function = functools.partial(_prefill, config=self.config, attend=attend)
        integers = np.zeros((rows, chunk), np.int32), np.zeros((3, rows), np.int32)
        return function, (1,), (self._params, self._cache_shape, *integers)

    def _score_inputs(self, length: int, top: int) -> Any:
        function = functools.partial(_score, config=self.config, top=top)
        return function, (), (self._params, np.zeros((1, length), np.int32), np.int32(0))


def _for_decoding(params: model.Params) -> model.Params:
    """The same weights with a copy of each layer apart, from which decoding need not copy them."""
    return {**params, "layers": model.split_layers(params["layers"])}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _append_span(work: _Work, version: str, start: int) -> None:
    """Note that tokens from `start` on come from `version`."""
    if work.spans[-1][1] == start:
        work.spans.pop()
    if not work.spans or work.spans[-1][0] != version:
        work.spans.append((version, start))
