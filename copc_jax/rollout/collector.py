"""Keeps rollouts in flight in the background and hands finished batches to the learner.

The collector owns an asyncio loop in a thread of its own, and all state of what is in flight lives
on that loop. The learner's thread asks for batches, gives new weights, and takes a snapshot for the
checkpoint. What an episode is, and how weights reach a server, are two coroutine functions that it
is given.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from copc_jax.rollout.episode import EpisodeFailed
from copc_jax.staging import Admission
from copc_jax.types import Prompt, Trajectory

T = TypeVar("T")
RunEpisode = Callable[[Prompt, int, int], Awaitable[Trajectory]]
Publish = Callable[[Path, int], Awaitable[None]]

_LOG = logging.getLogger(__name__)
# The learner's thread waits in slices of this length, so that Ctrl-C and a dead loop are noticed at
# once.
_WAIT_S = 0.2
_LONGEST_DELAY_S = 10.0
_STATE_FORMAT = 1


class CollectorError(RuntimeError):
    """Rollouts cannot go on; the message says what was in flight."""


@runtime_checkable
class PromptIterator(Protocol):
    """An iterator of prompts that can be saved and restored, as grain's are."""

    def __next__(self) -> Prompt:
        """Return the next prompt; StopIteration ends the run once all in flight has finished."""
        ...

    def get_state(self) -> Any:
        """Return the position as something that JSON can hold."""
        ...

    def set_state(self, state: Any) -> None:
        """Continue from a position that `get_state` returned."""
        ...


def episode_seed(run_seed: int, submission: int, sample: int) -> int:
    """Return the sampling seed of one episode: the first 31 bits of SHA-256 over the three numbers.

    It depends on nothing else, so it is the same in a rerun, in a second attempt and after a
    resume, and another one for each sample of a group. The episode derives the seed of each of its
    requests from it and the turn.
    """
    digest = hashlib.sha256(f"{run_seed}:{submission}:{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclasses.dataclass
class Counters:
    """What happened since the start of the run, resumes included. Times are in seconds."""

    episodes: int = 0
    """Finished episodes, those of groups filtered out later included."""
    tokens: int = 0
    """Sampled tokens of finished episodes."""
    failed: int = 0
    """Attempts that ended in an infrastructure failure, an abort or a lost task."""
    aborted: int = 0
    """Those of `failed` that came back with status "aborted"."""
    reissued: int = 0
    """Failed attempts that were started again."""
    lost: int = 0
    """Prompts given up after too many failures and replaced by the next one."""
    filtered: int = 0
    """Groups that `keep_group` turned down."""
    published: int = 0
    """Publications that every server acknowledged."""
    skipped: int = 0
    """Versions never published, as a newer one was there before their turn."""
    busy_s: float = 0.0
    """Time with at least one episode in flight."""
    idle_s: float = 0.0
    """Time with none in flight: all that is admitted has finished."""
    episode_s: float = 0.0
    """Episodes in flight, integrated over time; divided by it, their mean number."""
    publish_s: float = 0.0
    """Time with a publication under way."""
    learner_wait_s: float = 0.0
    """Time that `next_batch` waited."""


@dataclasses.dataclass
class _Group:
    """One submission: a prompt and its samples. It is kept once all of them are there."""

    index: int
    prompt: Prompt
    failures: list[int]
    results: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class _Flight:
    group: _Group
    sample: int
    since: float


class Collector:
    """Rollouts in the background: admission, order, replacement, publication and exact resume.

    A submission is one prompt with `samples_per_prompt` episodes, a group. Groups get an index when
    they are submitted and reach the learner in that order, `admission.batch_size` trajectories at a
    time, however long each takes: a slow episode holds its batch back and is never starved or
    thrown away.

    Admission. With k kept groups so far (consumed ones included) and r undecided ones, the next
    group is submitted if (k + r + 1) * samples_per_prompt is within `admission.limit(published
    version)`. k + r is the largest position that the new group can get among the kept ones. Groups
    that are given up or filtered out before it only lower its position, so that it is trained on
    earlier than assumed and is less stale, never more: the bound of `Admission` holds with
    filtering too, and the replacement of a dropped group is admitted at once. Nothing is submitted
    before the first publication.

    Mode "exact". A publication waits until all that is admitted has been kept. Replacements are
    sampled before it as well, so that batch k comes from exactly `admission.sampling_version(k)`.

    Failures. An episode that raises `EpisodeFailed`, comes back aborted or whose task is lost is
    started again with the same prompt and seed, `max_failures` times; then its whole group is given
    up and the next prompt takes its place. Any other exception ends the run: `next_batch` raises
    it.

    Filtering. `keep_group` decides on complete groups (dynamic sampling of DAPO); dropped ones are
    replaced by further prompts until the batch is full.
    """

    def __init__(
        self,
        *,
        run_episode: RunEpisode,
        publish: Publish,
        prompts: PromptIterator,
        admission: Admission,
        samples_per_prompt: int = 1,
        seed: int = 0,
        max_in_flight: int = 32,
        max_failures: int = 3,
        max_lost: int = 8,
        retry_delay_s: float = 0.1,
        keep_group: Callable[[list[Trajectory]], bool] | None = None,
        max_filter_attempts: int = 10,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """Prepare; `start` begins the work.

        Args:
            run_episode: called with prompt, sample index and seed.
            publish: called with a directory and a version; returns once every server has loaded it.
            prompts: where submissions come from.
            admission: how far ahead of the learner they may run.
            samples_per_prompt: episodes of each prompt; divides the batch size.
            seed: seed of the run.
            max_in_flight: episodes at a time.
            max_failures: how often an episode is started again before its group is given up.
            max_lost: groups given up in a row, with none finished between, that end the run.
            retry_delay_s: delay before the first new attempt, doubled for each further one.
            keep_group: whether a complete group is trained on; all are without it.
            max_filter_attempts: batches' worth of groups turned down while one batch fills that end
                the run.
            stall_timeout_s: longest time without any event while the learner waits.

        Raises:
            ValueError: an argument out of range.
        """
        for name, value, least in (
            ("samples_per_prompt", samples_per_prompt, 1),
            ("max_in_flight", max_in_flight, 1),
            ("max_failures", max_failures, 0),
            ("max_lost", max_lost, 1),
            ("retry_delay_s", retry_delay_s, 0),
            ("max_filter_attempts", max_filter_attempts, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if stall_timeout_s <= 0:
            raise ValueError(f"stall_timeout_s must be positive, got {stall_timeout_s}")
        if admission.batch_size % samples_per_prompt:
            raise ValueError(
                f"batch_size {admission.batch_size} is not divisible by samples_per_prompt "
                f"{samples_per_prompt}"
            )
        self._run_episode = run_episode
        self._publish = publish
        self._prompts = prompts
        self._admission = admission
        self._samples = samples_per_prompt
        self._groups_per_batch = admission.batch_size // samples_per_prompt
        self._seed = seed
        self._max_in_flight = max_in_flight
        self._max_failures = max_failures
        self._max_lost = max_lost
        self._retry_delay_s = retry_delay_s
        self._keep_group = keep_group
        self._max_filter_attempts = max_filter_attempts
        self._stall_timeout_s = stall_timeout_s

        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._newest_version: int | None = None  # Of the learner's thread; all below is the loop's.

        self._groups: dict[
            int, _Group
        ] = {}  # Undecided and kept, by index; consumed ones are gone.
        self._consumed = 0  # Batches that the learner has finished with.
        self._submitted = 0  # Groups ever submitted: the next index.
        self._kept = 0  # Groups ever kept.
        self._undecided = 0  # Groups in `_groups` that are not kept yet.
        self._lost_in_a_row = 0
        self._filtered_since_batch = 0
        self._exhausted = False
        self._ready: collections.deque[tuple[_Group, int]] = collections.deque()
        self._flights: dict[asyncio.Task[Trajectory], _Flight] = {}
        self._versions: collections.deque[tuple[Path, int]] = collections.deque()
        self._publication: asyncio.Task[Any] | None = None
        self._publishing: int | None = None
        self._published: int | None = None
        self._fatal: BaseException | None = None
        self._closing = False
        self._changed = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()
        self._counters = Counters()
        self._clock = self._last_event = time.monotonic()

    # The learner's thread.

    def start(self) -> None:
        """Start the loop's thread; episodes start with the first publication."""
        if self._thread is not None:
            raise CollectorError("the collector has been started already")
        self._loop = asyncio.new_event_loop()
        self._clock = self._last_event = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="collector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what is in flight and end the thread. Safe to call twice."""
        if self._loop is None or self._thread is None or self._loop.is_closed():
            return
        try:
            if self._thread.is_alive():
                self.call(self._shut_down())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collector's loop and return its result.

        Raises:
            CollectorError: the loop is not running.
        """
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            coroutine.close()
            raise CollectorError("the collector is not running")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=_WAIT_S).done:
                if not self._thread.is_alive():
                    raise CollectorError("the collector's thread has ended")
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def enter(self, manager: contextlib.AbstractAsyncContextManager[T]) -> T:
        """Enter an asynchronous context on the loop; `close` leaves it once the episodes are gone.

        It is the way to give the episodes a client whose connections live on this loop.
        """
        return self.call(self._stack.enter_async_context(manager))

    def publish(self, directory: str | Path, version: int) -> None:
        """Have the servers load `directory` as `version`; returns at once.

        Versions are published in order, one at a time. In mode "bounded" one that has not been
        started when a newer one arrives is skipped. The same version again changes nothing.
        Directories of versions below `published_version` are no longer read by anybody.

        Raises:
            ValueError: a version older than one given before.
        """
        if version < 0:
            raise ValueError(f"version must not be negative, got {version}")
        if self._newest_version is not None:
            if version < self._newest_version:
                raise ValueError(f"version {version} comes after version {self._newest_version}")
            if version == self._newest_version:
                return
        if self._loop is None:
            raise CollectorError("the collector is not running")
        self._newest_version = version
        self._loop.call_soon_threadsafe(self._enqueue, Path(directory), version)

    def wait_published(self) -> int:
        """Wait until the servers hold the newest version given to `publish`, and return it.

        Raises:
            CollectorError: no version was given, or no progress within the stall time-out.
            Exception: the first exception of an episode or a publication.
        """
        if self._newest_version is None:
            raise CollectorError("no version has been given to publish")
        self.call(self._wait_until(self._all_published, "the publication"))
        return self._newest_version

    @property
    def published_version(self) -> int | None:
        """The newest version that every server has acknowledged."""
        return self._published

    def next_batch(self, batch: int) -> list[Trajectory]:
        """Wait for a batch and return its trajectories in submission order.

        Args:
            batch: index of the batch from 0, the number of batches trained on so far. (It equals
                the learner's version if every batch is one update of the actor.) Asking for a batch
                says that those before it are finished with; asking for it again returns the same
                one, so that nothing is lost when an update is interrupted.

        Raises:
            ValueError: `batch` is neither the last one handed out nor the next.
            CollectorError: no progress within the stall time-out, prompts exhausted, or too many
                failures.
            Exception: the first exception of an episode or a publication.
        """
        started = time.monotonic()
        trajectories = self.call(self._next_batch(batch))
        self._counters.learner_wait_s += time.monotonic() - started
        return trajectories

    def evaluate(
        self,
        run_one: Callable[[Prompt], Awaitable[Trajectory]],
        prompts: Iterable[Prompt],
        concurrency: int,
    ) -> list[Trajectory]:
        """Run episodes outside of training, neither admitted nor counted; keep their order.

        Training rollouts go on meanwhile. A failed episode is started again as in training.

        Raises:
            EpisodeFailed: an episode failed more than `max_failures` times.
            CollectorError: none finished within the stall time-out.
            Exception: any other exception of an episode.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        return self.call(self._evaluate(run_one, list(prompts), concurrency))

    def metrics(self) -> dict[str, float]:
        """Return the counters, and what is in flight, buffered and published now."""

        async def read() -> dict[str, float]:
            self._account()
            return {
                **dataclasses.asdict(self._counters),
                "submitted": self._submitted,
                "in_flight": len(self._flights),
                "buffered": sum(len(group.results) for group in self._groups.values()),
                "published_version": -1 if self._published is None else self._published,
            }

        return self.call(read())

    def state(self, batches: int) -> dict[str, Any]:
        """Return what an exact resume needs: JSON values and numpy arrays (see `encode_state`).

        Batches that were handed out but not trained on are part of it. Prompts in flight are kept
        whole with their submission index, finished samples of unfinished groups as well. In mode
        "exact" it waits for the publications given so far, so that what is in flight belongs to the
        version in the checkpoint: call it after `publish`.

        Args:
            batches: batches that the learner in the checkpoint has been trained on.

        Raises:
            ValueError: `batches` is not the number of the last batch handed out, nor one more.
            CollectorError: no progress within the stall time-out.
        """
        return self.call(self._state(batches))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state, before `start`; prompts in flight go first, with their old seeds.

        Raises:
            ValueError: the state is of another seed, batch size or group size.
            CollectorError: the collector has been started already.
        """
        if self._thread is not None:
            raise CollectorError("restore comes before start")
        if state.get("format") != _STATE_FORMAT:
            raise ValueError(f"unknown format of collector state: {state.get('format')!r}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(f"the saved run has {name}={state[name]}, this one {value}")
        self._prompts.set_state(state["prompts"])
        self._consumed = state["consumed"]
        self._submitted = state["submitted"]
        self._kept = state["kept"]
        self._lost_in_a_row = state["lost_in_a_row"]
        self._filtered_since_batch = state["filtered_since_batch"]
        self._counters = Counters(**state["counters"])
        for saved in state["groups"]:
            group = _Group(saved["index"], _prompt_from(saved["prompt"]), list(saved["failures"]))
            group.results = {t["sample"]: Trajectory(**t) for t in saved["results"]}
            group.kept = len(group.results) == self._samples
            self._groups[group.index] = group
            if not group.kept:
                self._undecided += 1
                self._ready.extend(
                    (group, sample)
                    for sample in range(self._samples)
                    if sample not in group.results
                )

    # The loop's thread.

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _shut_down(self) -> None:
        self._closing = True
        own: list[asyncio.Task[Any]] = list(self._flights)
        if self._publication is not None:
            own.append(self._publication)
        await _cancel(own)
        try:
            await self._stack.aclose()
        finally:
            await _cancel(asyncio.all_tasks() - {asyncio.current_task()})

    def _account(self) -> None:
        """Book the time since the last event; called before anything changes."""
        now = time.monotonic()
        passed, self._clock = now - self._clock, now
        if self._published is not None:
            if self._flights:
                self._counters.busy_s += passed
            else:
                self._counters.idle_s += passed
        self._counters.episode_s += passed * len(self._flights)
        if self._publication is not None:
            self._counters.publish_s += passed

    def _advance(self) -> None:
        """Start whatever may start now, and wake who waits; called after every event."""
        self._last_event = time.monotonic()
        if self._fatal is None and not self._closing:
            try:
                self._submit()
                self._start_publication()
            except Exception as error:
                self._fatal = error
        self._changed.set()
        self._changed = asyncio.Event()

    def _submit(self) -> None:
        if self._published is None:
            return
        while len(self._flights) < self._max_in_flight:
            if not self._ready and not self._admit():
                return
            group, sample = self._ready.popleft()
            task = asyncio.get_running_loop().create_task(self._episode(group, sample))
            self._flights[task] = _Flight(group, sample, time.monotonic())
            task.add_done_callback(self._episode_done)

    def _admissible(self) -> bool:
        assert self._published is not None
        after = (self._kept + self._undecided + 1) * self._samples
        return not self._exhausted and after <= self._admission.limit(self._published)

    def _admit(self) -> bool:
        if not self._admissible():
            return False
        try:
            prompt = next(self._prompts)
        except StopIteration:
            self._exhausted = True
            return False
        group = _Group(self._submitted, prompt, [0] * self._samples)
        self._submitted += 1
        self._undecided += 1
        self._groups[group.index] = group
        self._ready.extend((group, sample) for sample in range(self._samples))
        return True

    async def _episode(self, group: _Group, sample: int) -> Trajectory:
        failures = group.failures[sample]
        if failures:
            await asyncio.sleep(self._delay(failures))
        return await self._run_episode(
            group.prompt, sample, episode_seed(self._seed, group.index, sample)
        )

    def _delay(self, failures: int) -> float:
        return min(self._retry_delay_s * 2 ** (failures - 1), _LONGEST_DELAY_S)

    def _episode_done(self, task: asyncio.Task[Trajectory]) -> None:
        self._account()
        flight = self._flights.pop(task)
        group, sample = flight.group, flight.sample
        # Also retrieves the exception, which asyncio would otherwise report as forgotten.
        error = None if task.cancelled() else task.exception()
        if self._closing or self._fatal is not None:
            return
        try:
            if self._groups.get(group.index) is not group:
                pass  # The rest of a group that was given up: only its place in flight is free.
            elif task.cancelled():
                self._failed(group, sample, "its task was lost")
            elif isinstance(error, EpisodeFailed):
                self._failed(group, sample, str(error))
            elif error is not None:
                raise error
            elif task.result().status == "aborted":
                self._counters.aborted += 1
                self._failed(group, sample, "it was aborted")
            else:
                self._finished(group, sample, task.result())
        except Exception as fault:
            self._fatal = fault
        self._advance()

    def _finished(self, group: _Group, sample: int, trajectory: Trajectory) -> None:
        self._counters.episodes += 1
        self._counters.tokens += int(np.sum(trajectory.is_action))
        group.results[sample] = trajectory
        if len(group.results) < self._samples:
            return
        self._lost_in_a_row = 0
        members = [group.results[i] for i in range(self._samples)]
        if self._keep_group is None or self._keep_group(members):
            group.kept = True
            self._kept += 1
            self._undecided -= 1
            if self._kept % self._groups_per_batch == 0:
                self._filtered_since_batch = 0
            return
        self._drop(group)
        self._counters.filtered += 1
        self._filtered_since_batch += 1
        if self._filtered_since_batch >= self._max_filter_attempts * self._groups_per_batch:
            raise CollectorError(
                f"{self._filtered_since_batch} groups were filtered out while one batch of "
                f"{self._groups_per_batch} groups filled ({self._max_filter_attempts} attempts): "
                "the prompts are too easy or too hard for the policy, or need more samples"
            )

    def _failed(self, group: _Group, sample: int, reason: str) -> None:
        self._counters.failed += 1
        group.failures[sample] += 1
        _LOG.warning("prompt %r sample %d failed: %s", group.prompt.prompt_id, sample, reason)
        if group.failures[sample] <= self._max_failures:
            self._counters.reissued += 1
            self._ready.appendleft((group, sample))
            return
        self._drop(group)
        self._counters.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= self._max_lost:
            raise CollectorError(
                f"{self._lost_in_a_row} prompts in a row were given up after "
                f"{self._max_failures + 1} attempts each; "
                f"the last one is {group.prompt.prompt_id!r}: {reason}"
            )

    def _drop(self, group: _Group) -> None:
        del self._groups[group.index]
        self._undecided -= 1
        self._ready = collections.deque(item for item in self._ready if item[0] is not group)
        for task, flight in self._flights.items():
            if flight.group is group:
                task.cancel()

    def _enqueue(self, directory: Path, version: int) -> None:
        self._account()
        self._versions.append((directory, version))
        self._advance()

    def _start_publication(self) -> None:
        if not self._versions or self._publication is not None:
            return
        if self._admission.mode == "bounded":
            while len(self._versions) > 1:
                self._versions.popleft()
                self._counters.skipped += 1
        elif self._published is not None and (self._undecided or self._admissible()):
            return
        directory, self._publishing = self._versions.popleft()
        self._publication = asyncio.get_running_loop().create_task(
            self._publish_one(directory, self._publishing)
        )
        self._publication.add_done_callback(self._publication_done)

    async def _publish_one(self, directory: Path, version: int) -> None:
        await self._publish(directory, version)

    def _publication_done(self, task: asyncio.Task[None]) -> None:
        self._account()
        version, self._publishing, self._publication = self._publishing, None, None
        error = None if task.cancelled() else task.exception()
        if self._closing:
            return
        if task.cancelled():
            error = CollectorError(f"the publication of version {version} was lost")
        if error is not None:
            self._fatal = self._fatal or error
        else:
            self._counters.published += 1
            self._published = version
        self._advance()

    def _all_published(self) -> bool:
        return not self._versions and self._publication is None

    async def _next_batch(self, batch: int) -> list[Trajectory]:
        self._consume(batch)
        await self._wait_until(self._batch_is_there, f"batch {batch}")
        return [group.results[i] for group in self._first_groups() for i in range(self._samples)]

    def _consume(self, batch: int) -> None:
        """Let go of the batch before `batch`."""
        for group in self._trained_on(batch):
            del self._groups[group.index]
        self._consumed = batch

    def _trained_on(self, batch: int) -> list[_Group]:
        """Return the groups that come before `batch` and are still held."""
        if batch == self._consumed:
            return []
        if batch != self._consumed + 1 or not self._batch_is_there():
            raise ValueError(
                f"batch {batch} cannot follow batch {self._consumed}, which is the current one"
            )
        return self._first_groups()

    def _first_groups(self) -> list[_Group]:
        return list(itertools.islice(self._groups.values(), self._groups_per_batch))

    def _batch_is_there(self) -> bool:
        first = self._first_groups()
        if len(first) == self._groups_per_batch and all(group.kept for group in first):
            return True
        if self._exhausted and not self._undecided:
            raise CollectorError(
                f"the prompts ran out: {len(first)} of {self._groups_per_batch} groups of the next "
                "batch are there"
            )
        return False

    async def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        while True:
            if self._fatal is not None:
                raise self._fatal
            if condition():
                return
            left = max(self._last_event, started) + self._stall_timeout_s - time.monotonic()
            if left <= 0:
                raise CollectorError(self._stalled(what))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _stalled(self, what: str) -> str:
        now = time.monotonic()
        lines = [f"nothing happened for {self._stall_timeout_s:g} s while waiting for {what};"]
        if self._publication is not None:
            lines.append(f"version {self._publishing} is being published;")
        oldest = sorted(self._flights.values(), key=lambda flight: flight.since)
        lines.append(f"{len(oldest)} episodes are in flight")
        lines += [
            f"- prompt {flight.group.prompt.prompt_id!r} sample {flight.sample} "
            f"(submission {flight.group.index}) for {now - flight.since:.1f} s"
            for flight in oldest[:8]
        ]
        if self._published is None:
            lines.append("no version has been published yet")
        else:
            limit = self._admission.limit(self._published)
            lines.append(
                f"{(self._kept + self._undecided) * self._samples} trajectories are admitted, "
                f"the limit at the published version {self._published} is {limit}"
            )
        return "\n".join(lines)

    async def _evaluate(
        self,
        run_one: Callable[[Prompt], Awaitable[Trajectory]],
        prompts: Sequence[Prompt],
        concurrency: int,
    ) -> list[Trajectory]:
        slots = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> Trajectory:
            failures = 0
            async with slots:
                while True:
                    try:
                        return await run_one(prompt)
                    except EpisodeFailed:
                        failures += 1
                        if failures > self._max_failures:
                            raise
                    await asyncio.sleep(self._delay(failures))

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=self._stall_timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise CollectorError(
                        f"no evaluation episode finished for {self._stall_timeout_s:g} s; "
                        f"{len(waiting)} are left"
                    )
                for task in done:
                    task.result()
        finally:
            await _cancel(tasks)
        return [task.result() for task in tasks]

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "batch_size": self._admission.batch_size,
            "samples_per_prompt": self._samples,
        }

    async def _state(self, batches: int) -> dict[str, Any]:
        # After a fault nothing more is published; what is in flight may be of the version already.
        if self._admission.mode == "exact" and not self._all_published():
            await self._wait_until(self._all_published, "the publication")
        self._account()
        gone = {group.index for group in self._trained_on(batches)}
        return {
            "format": _STATE_FORMAT,
            **self._identity(),
            "prompts": self._prompts.get_state(),
            "consumed": batches,
            "submitted": self._submitted,
            "kept": self._kept,
            "lost_in_a_row": self._lost_in_a_row,
            "filtered_since_batch": self._filtered_since_batch,
            "counters": dataclasses.asdict(self._counters),
            "groups": [
                {
                    "index": group.index,
                    "prompt": dataclasses.asdict(group.prompt),
                    "failures": list(group.failures),
                    "results": [_fields(group.results[i]) for i in sorted(group.results)],
                }
                for group in self._groups.values()
                if group.index not in gone
            ],
        }


def deal_states(
    states: Sequence[dict[str, Any]], prompts: Sequence[Any], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Deal the rollouts of some collectors to another number of them.

    Finished groups and groups in flight keep their order, in which they are dealt out in turn; none
    is lost, and none is trained on later than it would have been. Those in flight start again, with
    new seeds.

    Args:
        states: of the collectors of all processes, after the same batch.
        prompts: states of the new prompt iterators.
        seeds: those of the new collectors.

    Raises:
        ValueError: the states are not of one batch.
    """
    batches = {state["consumed"] for state in states}
    if len(batches) != 1:
        raise ValueError(f"the states are of different batches: {sorted(batches)}")
    count, samples = len(seeds), states[0]["samples_per_prompt"]
    batch_size = sum(state["batch_size"] for state in states) // count
    # Above all that were given: no seed comes twice.
    first = max(state["submitted"] for state in states)
    groups = sorted(
        (group for state in states for group in state["groups"]), key=lambda group: group["index"]
    )
    nothing = dict.fromkeys(states[0]["counters"], 0)
    total = {name: sum(state["counters"][name] for state in states) for name in nothing}
    dealt = []
    for process, (position, seed) in enumerate(zip(prompts, seeds, strict=True)):
        own = [
            {**group, "index": first + number}
            for number, group in enumerate(groups[process::count])
        ]
        finished = sum(len(group["results"]) == samples for group in own)
        dealt.append(
            {
                **states[0],
                "seed": seed,
                "batch_size": batch_size,
                "prompts": position,
                "submitted": first + len(own),
                "kept": states[0]["consumed"] * batch_size // samples + finished,
                "lost_in_a_row": 0,
                "filtered_since_batch": 0,
                "counters": nothing if process else total,
                "groups": own,
            }
        )
    return dealt


def encode_state(state: dict[str, Any]) -> bytes:
    """Return a state as the bytes of one npz file: a JSON text, and all its arrays end to end.

    Raises:
        TypeError: a value that is neither JSON, bytes nor a numpy array.
    """
    parts: list[bytes] = []
    offset = 0

    def encode(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, bytes):
            return {"__bytes__": base64.b64encode(value).decode()}
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a state cannot hold a {type(value).__name__}")
        place = {"__array__": [value.dtype.str, offset, list(value.shape)]}
        parts.append(value.tobytes())
        offset += value.nbytes
        return place

    text = json.dumps(state, default=encode).encode()
    file = io.BytesIO()
    np.savez(
        file, json=np.frombuffer(text, np.uint8), arrays=np.frombuffer(b"".join(parts), np.uint8)
    )
    return file.getvalue()


def decode_state(data: bytes) -> dict[str, Any]:
    """Return the state that `encode_state` was given; tuples come back as lists."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        text, arrays = file["json"].tobytes(), file["arrays"].tobytes()

    def decode(value: dict[str, Any]) -> Any:
        if "__bytes__" in value:
            return base64.b64decode(value["__bytes__"])
        if "__array__" not in value:
            return value
        dtype, offset, shape = value["__array__"]
        count = math.prod(shape)
        return np.frombuffer(arrays, dtype, count, offset).reshape(shape).copy()

    return json.loads(text, object_hook=decode)


async def _cancel(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _fields(record: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a dict, without the copies of `dataclasses.asdict`."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _prompt_from(fields: dict[str, Any]) -> Prompt:
    """Return a prompt whose sequences went through JSON."""
    return Prompt(
        prompt_id=fields["prompt_id"],
        messages=tuple(fields["messages"]),
        token_ids=tuple(fields["token_ids"]),
        gold=tuple(fields["gold"]),
        source=fields["source"],
    )
