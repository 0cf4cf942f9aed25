"""Continuous batching on a JAX model: fixed slots, one thread, several tokens a dispatch.

A slot holds the keys and values of one sequence. Requests wait in a queue, take a free slot,
prefill all of their tokens but the last, and then decode together: a decode dispatch feeds each
slot its newest token and samples up to `steps_per_dispatch` tokens on the device. Tokens past a
stop are thrown away on the host, which looks at whole dispatches with numpy and never loops over
tokens.

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
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np

from copc_jax import model
from copc_jax.rollout.programs import EngineConfig, Programs, Weights
from copc_jax.rollout.requests import Finish, Output, Request, Span, TopLogprobs
from copc_jax.rollout.sampling import KEEP_ALL, uniform

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]


class EngineDead(RuntimeError):
    """The engine's thread has ended; nothing can be generated any more."""


class UpdateRefused(ValueError):
    """New weights cannot be taken in the engine's present state; nothing has changed."""


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
    weights: Weights
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
        self.version = version
        self.model_path: str | None = None
        self.error: BaseException | None = None
        self._weights = Weights.of(params)
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
        self._clock = 0
        # Masked attention multiplies what it does not see by zero, which NaN survives: after NaN
        # weights the cache must be made anew.
        self._poisoned = False

        slots, length = engine_config.slots, engine_config.max_length
        self._cache = model.init_cache(config, slots, length)
        self._programs = Programs(config, engine_config, self._weights, self._cache)
        self.sizes = self._programs.sizes
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
        self._top_k = np.full(slots, KEEP_ALL, np.int32)
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
        self._programs.compile_largest()
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
        update = _Update(Weights.of(params), version, flush, path, future)
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
            **self._programs.counters(),
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
            self._programs.close()

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
            self._weights = update.weights
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
        top_k = KEEP_ALL if sampling.top_k < 0 else min(sampling.top_k, KEEP_ALL)
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
        if self.sizes.deterministic:
            # Its own length alone decides what program a sequence gets.
            chunks = np.sort(self.sizes.prefill_chunks)
            kind = np.searchsorted(chunks[:-1], missing[slots]) * 2 + (self._computed[slots] > 0)
            slots = slots[kind == kind[0]]
        slots = slots[: max(self.sizes.prefill_rows)]
        program, rows, chunk = self._programs.prefill(
            len(slots), int(missing[slots[0]]), bool(self._computed[slots].any())
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
        self._cache = program(self._weights.params, self._cache, token_ids, integers)
        # What arrives meanwhile is prefilled next: requests that come together decode together.
        jax.block_until_ready(self._cache)
        return True

    def _decode_some(self) -> None:
        """Sample a dispatch of tokens in all running slots and end those that are done."""
        slots = np.flatnonzero(self._running)
        at_once = self._programs.decoded_at_once
        for first in range(0, len(slots), at_once):
            self._decode_slots(slots[first : first + at_once])

    def _decode_slots(self, slots: np.ndarray) -> None:
        remaining = self._limit[slots] - self._known[slots]
        steps = int(min(self.sizes.steps_per_dispatch, remaining.max()))
        active = np.zeros(self.sizes.slots, bool)
        active[slots] = True
        position = np.where(active, self._known - 1, 0)
        end, top = int(position.max()) + steps, self._top_width(slots)
        program, rows = self._programs.decode(len(slots), end, top)
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
        self._cache, out = program(
            self._weights.apart, self._cache, integers, floats, uniforms, np.int32(steps)
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
        top = self._programs.top_bucket(request.top_logprobs)
        program, length = self._programs.score(count, top)
        token_ids = np.zeros((1, length), np.int32)
        token_ids[0, :count] = request.prompt
        logprob, *tops = jax.device_get(program(self._weights.params, token_ids, np.int32(count)))
        work.prompt_logprob = logprob[1:count]
        if top:
            ids, best = (part[: count - 1, : request.top_logprobs] for part in tops)
            work.prompt_top = TopLogprobs(ids, best)

    def _top_width(self, slots: np.ndarray) -> int:
        works = (self._work[slot] for slot in slots)
        return self._programs.top_bucket(
            max(work.request.top_logprobs for work in works if work is not None)
        )


def _append_span(work: _Work, version: str, start: int) -> None:
    """Note that tokens from `start` on come from `version`."""
    if work.spans[-1][1] == start:
        work.spans.pop()
    if not work.spans or work.spans[-1][0] != version:
        work.spans.append((version, start))
