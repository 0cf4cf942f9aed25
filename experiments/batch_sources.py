"""Where the batches of a run come from, and where its weights go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import assembly
import evaluate
import numpy as np

from copc_jax import data, staging
from copc_jax.checkpoint import config_differences
from copc_jax.config import CONFIG_FILE, from_json, to_dict
from copc_jax.distributed import Processes, process_seed
from copc_jax.methods import METHODS
from copc_jax.rollout.client import SamplingParams
from copc_jax.rollout.collector import (
    Collector,
    PromptIterator,
    deal_states,
    decode_state,
    encode_state,
)
from copc_jax.rollout.episode import run_episode
from copc_jax.rollout.gap import LogprobGap, Reference
from copc_jax.rollout.launch import ServerProcess
from copc_jax.rollout.recording import Recorder, Recording, RecordingError
from copc_jax.settings import RunConfig
from copc_jax.types import Prompt, Trajectory

# Inside a run folder: its recording.
RECORDING_DIR = "recording"

# Settings of a recorded run that a replay may change: what is done with the data, never what it is.
REPLAY_MAY_DIFFER = (
    *("method", "loss", "actor", "critic", "critic_warmup_updates", "lora", "truncated"),
    *("updates", "micro_batches", "remat", "logprob_chunk", "cpus", "preset", "check"),
    *("mesh", "distributed"),
    *("record", "replay", "resume", "run_dir", "cache_dir", "checkpoint_every"),
    *("keep_checkpoints", "eval", "viewer", "rollout.urls", "rollout.control_urls"),
    "rollout.api_key",
    *("rollout.launch", "rollout.sglang_python", "rollout.sglang_device", "rollout.sglang_args"),
    *("rollout.max_in_flight", "rollout.slots", "rollout.pause_mode", "rollout.timeout_seconds"),
    *("rollout.logprob_gap_limit", "rollout.logprob_gap_trajectories"),
    *("rollout.deadline_seconds", "rollout.stall_seconds"),
    *("search.retriever_url", "math.sandbox_url", "math.processes"),
)


class Source(Protocol):
    """What a run asks of the source of its batches.

    Attributes:
        staleness: largest lag of its trajectories, in updates of the run that trains on them.
        length: batches that there are; None when they do not end.
    """

    staleness: int
    length: int | None

    @property
    def server(self) -> ServerProcess | None:
        """The server that this process started and that runs now."""
        ...

    def next_batch(self, batch: int) -> list[Trajectory]:
        """Wait for a batch, counted from 0; asking for the same one again gives the same."""
        ...

    def publish(self, version: int) -> None:
        """Let the servers have the present weights as `version`; returns before they do."""
        ...

    def wait_published(self) -> None:
        """Wait until the servers hold the weights that were published last."""
        ...

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Play prompts greedily, as `evaluate.held_out` does."""
        ...

    def sampled_by(self, version: int) -> bool:
        """Whether tokens of this version were sampled by weights that this run has had."""
        ...

    def compare(self, version: int, references: Sequence[Reference]) -> None:
        """Have servers score what the learner scored with the weights of `version`.

        Returns before they do; `figures` has the result. One that is above the limit is raised by
        the next call and by `wait_published`.
        """
        ...

    def state(self, batches: int) -> dict[str, Any]:
        """What a checkpoint after `batches` batches keeps of the source."""
        ...

    def figures(self) -> dict[str, float]:
        """What happened since the last call, for the log."""
        ...


class Generator:
    """Rollout servers, the episodes in flight on them, and the weights that they read.

    Args:
        config: of the run.
        parts: of the run.
        run_dir: for weights and the server's log.
        folder: HF folder that a launched server starts with.
        snapshot: copies the present weights of the policy; what it returns writes the copy into a
            folder, beside the next update. Called again only once that has been done.
        host: host part of the checkpoint that the run goes on from, {} at its start.
        recorder: keeps every batch that is handed out.
        train: whether to sample batches; evaluations alone need none.
        processes: those of the run; each has a generator of its own, for its share of each batch.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: assembly.Parts,
        run_dir: Path,
        *,
        folder: Path,
        snapshot: Callable[[], Callable[[Path], None]],
        host: Mapping[str, Any],
        recorder: Recorder | None = None,
        train: bool = True,
        processes: Processes,
    ):
        self.config, self.parts, self.run_dir = config, parts, run_dir
        self.processes = processes
        self.staleness = config.staleness
        self.length: int | None = None
        self._folder, self._snapshot, self._host = folder, snapshot, host
        self._recorder, self._train = recorder, train
        self._weights: list[Path] = []
        # What ends when a folder is there, and that of the newest one.
        self._writes: dict[Path, Future[None]] = {}
        self._newest: Future[None] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Generator:
        """Start the servers and the collector; episodes start with the first publication."""
        with contextlib.ExitStack() as stack:
            self.server = self._start_server(stack)
            self._writer = stack.enter_context(ThreadPoolExecutor(1, "write-weights"))
            self.collector = self._start_collector(stack)
            self._stack = stack.pop_all()
        self._accounts = _Accounts(self.collector.metrics)
        return self

    def __exit__(self, *exception: Any) -> None:
        """End the episodes, then the server."""
        self._stack.__exit__(*exception)

    def _start_server(self, stack: contextlib.ExitStack) -> ServerProcess | None:
        index, urls = self.processes.index, own_urls(self.config, self.processes)
        self._key = assembly.server_key(self.config)
        log = self.run_dir / ("server.log" if index == 0 else f"server-{index}.log")
        server = assembly.launch(self.config, self._folder, log, self._key)
        if server is not None:
            stack.enter_context(server)
            stack.enter_context(_watch(server))
        self.urls = urls or (server.url,)  # pyright: ignore[reportOptionalMemberAccess]
        return server

    def _start_collector(self, stack: contextlib.ExitStack) -> Collector:
        config, method = self.config, METHODS[self.config.method]
        self.client = assembly.client(config, self.urls, on_event=_server_event, key=self._key)
        self._gap = LogprobGap(self.client, limit=config.rollout.logprob_gap_limit)
        budget = assembly.budget(config)
        sampling = SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            stop_token_ids=self.parts.model.eos_token_ids,
        ).for_training()

        async def episode(prompt: Prompt, sample: int, seed: int) -> Trajectory:
            return await run_episode(
                self.client,
                self.parts.task,
                self.parts.tokenizer,
                prompt,
                sample=sample,
                sampling=sampling,
                budget=budget,
                seed=seed,
            )

        collector = Collector(
            run_episode=episode,
            publish=self._publish,
            prompts=self._prompts(),
            admission=staging.Admission(
                config.batch_size // self.processes.count,
                # A replay may be of less than a method needs, and nothing is admitted then.
                max(config.staleness, method.minibatches - 1),
                mode=config.staleness_mode,
                updates_per_batch=method.minibatches,
            ),
            samples_per_prompt=config.samples_per_prompt,
            seed=process_seed(config.seed, self.processes.index),
            max_in_flight=config.rollout.max_in_flight,
            keep_group=_varied if method.dynamic_sampling else None,
            stall_timeout_s=config.rollout.stall_seconds,
        )
        if self._host:
            collector.restore(self._saved_state())
        stack.enter_context(collector)
        collector.enter(self.client)
        collector.call(self.client.check(wait_s=5.0))
        assembly.enter_tools(collector, self.parts)
        return collector

    def _prompts(self) -> PromptIterator:
        config = self.config
        if not self._train:
            return _NoPrompts()
        return data.prompt_iterator(
            self.parts.environment.train,
            config.seed,
            max_prompt_tokens=config.rollout.max_tokens // 2,
            encode=self.parts.task.encode_prompt,
            process_index=self.processes.index,
            process_count=self.processes.count,
        )

    def _saved_state(self) -> dict[str, Any]:
        """Return the state of this process's collector, dealt anew to another number of them."""
        count = self.processes.count
        states = [decode_state(each) for each in saved_collectors(self._host)]
        if len(states) == count:
            return states[self.processes.index]
        groups = [group for state in states for group in state["groups"]]
        samples = self.config.samples_per_prompt
        flying = sum(len(group["results"]) < samples for group in groups)
        print(
            f"saved by {len(states)} processes, continued by {count}: {len(groups) - flying} "
            f"finished prompts are dealt anew, {flying} in flight start again; until the end of "
            "this epoch some prompts come twice and others not",
            flush=True,
        )
        return deal_states(
            states,
            data.deal_positions([state["prompts"] for state in states], count),
            [process_seed(self.config.seed, index) for index in range(count)],
        )[self.processes.index]

    def next_batch(self, batch: int) -> list[Trajectory]:
        """As `Source` says: this process's share of it, in the order of submission."""
        return self.processes.together("the batch", lambda: self._next_batch(batch))[0]

    def _next_batch(self, batch: int) -> list[Trajectory]:
        trajectories = self.collector.next_batch(batch)
        if self._recorder is not None:
            self._recorder.write(batch, trajectories)
        return trajectories

    def publish(self, version: int) -> None:
        """As `Source` says: weights are copied now and written beside what follows.

        One version at a time is being written. Folders that nobody reads go.
        """
        folder = self.run_dir / "weights" / f"v{version:06d}"
        if self._weights and self._weights[-1] == folder:
            return
        self._wait_written()
        directory = folder.resolve()
        self._newest = self._writer.submit(self._write, self._snapshot(), folder, version)
        self._writes[directory] = self._newest
        self.collector.publish(directory, version)
        self._weights.append(folder)
        published = self.processes.gather("published", self.collector.published_version)
        while (
            None not in published
            and len(self._weights) > 2
            and _number(self._weights[1]) <= min(published)
        ):
            old = self._weights.pop(0)
            self._writes.pop(old.resolve(), None)
            if self.processes.first:
                shutil.rmtree(old, ignore_errors=True)

    def _write(self, write: Callable[[Path], None], folder: Path, version: int) -> None:
        """Write the weights of all processes, or wait until that is done."""
        try:
            self.processes.once(f"weights/{version}", lambda: write(folder))
        except OSError as error:
            # Of a full disk it names no file.
            message = f"the weights of update {version} cannot be written to {folder}: {error}"
            raise OSError(message) from error

    def _wait_written(self) -> None:
        if self._newest is not None:
            self.processes.together("the weights", self._newest.result)

    async def _publish(self, directory: Path, version: int) -> None:
        """Have the servers load a version once it is there."""
        await asyncio.wrap_future(self._writes[directory])
        await self._gap.publish(directory, version)

    def wait_published(self) -> None:
        """As `Source` says."""
        self.processes.together("the publication", self._wait_published)

    def _wait_published(self) -> None:
        self.collector.wait_published()
        self.collector.call(self._gap.check())

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """As `Source` says; training episodes go on beside."""
        return evaluate.held_out(
            self.collector, self.client, self.config, self.parts, prompts, self.processes
        )

    def sampled_by(self, version: int) -> bool:
        """As `Source` says."""
        return True

    def compare(self, version: int, references: Sequence[Reference]) -> None:
        """As `Source` says."""
        self.processes.together(
            "the comparison", lambda: self.collector.call(self._gap.offer(version, references))
        )

    def state(self, batches: int) -> dict[str, Any]:
        """As `Source` says; the states of all processes, each of which has the same then."""
        state, _ = self.processes.together("the state", lambda: self.collector.state(batches))
        states = self.processes.gather_bytes("the state", encode_state(state))
        return {"collector": states[0], "others": states[1:]}

    def figures(self) -> dict[str, float]:
        """As `Source` says."""
        return self._accounts.since_last() | self.collector.call(self._gap.since_last())


def saved_collectors(host: Mapping[str, Any]) -> list[bytes]:
    """Return the encoded collector states of a checkpoint, of process 0 first."""
    return [host["collector"], *host.get("others", ())]


def own_urls(config: RunConfig, processes: Processes) -> tuple[str, ...]:
    """Return the running servers that this process uses; () when it starts one.

    Raises:
        ValueError: they cannot be told apart between the processes.
    """
    urls = config.rollout.urls
    lists = processes.gather("rollout.urls", list(urls))
    everything = [url for one in lists for url in one]
    if processes.count == 1 or not everything:
        return urls
    if all(lists) and len(set(everything)) == len(everything):
        return urls
    same = all(one == lists[0] for one in lists)
    if same and len(urls) >= processes.count and not config.rollout.control_urls:
        return urls[processes.index :: processes.count]
    raise ValueError(
        f"rollout.urls must give each of the {processes.count} processes servers of its own, as it "
        "alone updates their weights: one list of at least as many addresses, of which each takes "
        "its share, or for each process a list of its own (behind routers, a router with its own "
        "workers in control_urls)"
    )


class Replay:
    """The batches that another run recorded; a generator is started for evaluations alone.

    Lag is counted in the updates of the recorded run's policy. Where this run makes another number
    of updates on a batch, versions are converted so that every lag is the same number of batches.

    Args:
        config: of the run.
        recording: what to train on.
        start: makes the generator for evaluations, which is entered at the first of them.
    """

    def __init__(self, config: RunConfig, recording: Recording, start: Callable[[], Generator]):
        self._recording, self._start = recording, start
        self._made = recording.description["updates_per_batch"]
        self._makes = METHODS[config.method].minibatches
        self.staleness = (config.staleness + 1) // self._made * self._makes - 1
        self.length: int | None = len(recording)
        self._version = 0
        self._generator: Generator | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Replay:
        """Return itself."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """End the generator, if it was started."""
        self._stack.__exit__(*exception)

    @property
    def server(self) -> ServerProcess | None:
        """As `Source` says."""
        return None if self._generator is None else self._generator.server

    def next_batch(self, batch: int) -> list[Trajectory]:
        """As `Source` says."""
        trajectories = self._recording.read(batch)
        if self._made == self._makes:
            return trajectories
        return [
            dataclasses.replace(
                trajectory,
                weight_version=np.where(
                    trajectory.is_action,
                    trajectory.weight_version // self._made * self._makes,
                    trajectory.weight_version,
                ),
            )
            for trajectory in trajectories
        ]

    def publish(self, version: int) -> None:
        """Note the version; servers get it when they are needed."""
        self._version = version

    def wait_published(self) -> None:
        """Return at once: `evaluate` waits for the weights that it needs."""

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """As `Source` says; the first call starts the servers."""
        if self._generator is None:
            self._generator = self._stack.enter_context(self._start())
        self._generator.publish(self._version)
        self._generator.wait_published()
        return self._generator.evaluate(prompts)

    def sampled_by(self, version: int) -> bool:
        """Only the first weights are those of the recorded run for certain."""
        return version == 0

    def compare(self, version: int, references: Sequence[Reference]) -> None:
        """Do nothing: no server holds weights that this run trains."""

    def state(self, batches: int) -> dict[str, Any]:
        """As `Source` says."""
        return {"recording": self._recording.description}

    def figures(self) -> dict[str, float]:
        """As `Source` says."""
        return {}


def open_recording(config: RunConfig) -> Recording:
    """Open what `--replay` names, and compare its settings with this run's.

    Raises:
        RecordingError: there is no batch, or the batches were made with other settings; all fields
            that differ are named.
    """
    assert config.replay is not None
    recording = Recording(config.replay / RECORDING_DIR)
    if not len(recording):
        raise RecordingError(f"{recording.directory} holds no batch")
    saved = from_json((config.replay / CONFIG_FILE).read_text(encoding="utf-8"))
    may_differ = REPLAY_MAY_DIFFER
    if config.model != "tiny" and not config.sft.updates:
        # A warm start depends on it, a pretrained model does not.
        may_differ = (*may_differ, "seed")
    differences = config_differences(to_dict(saved), to_dict(config), may_differ)
    if differences:
        raise RecordingError(
            f"{config.replay} was recorded with other settings; " + "; ".join(differences)
        )
    return recording


def check_recording(
    recording: Recording,
    config: RunConfig,
    parts: assembly.Parts,
    folder: Path,
    host: Mapping[str, Any],
) -> None:
    """Compare the contents that a recording belongs to with those of the run that replays it.

    Args:
        recording: what to train on.
        config: of the run.
        parts: of the run.
        folder: HF folder with the weights before the first update.
        host: host part of the checkpoint that the run goes on from, {} at its start.

    Raises:
        RecordingError: all fields that differ are named, with both values.
    """
    now = host["recording"] if host else _describe(config, parts, evaluate.model_digest(folder))
    differences = [
        f"{name}: recorded {there!r}, now {now.get(name)!r}"
        for name, there in recording.description.items()
        if name != "updates_per_batch" and there != now.get(name)
    ]
    if differences:
        raise RecordingError(
            f"{recording.directory} belongs to other data or weights; " + "; ".join(differences)
        )


def start_recording(
    config: RunConfig, parts: assembly.Parts, run_dir: Path, folder: Path, host: Mapping[str, Any]
) -> Recorder:
    """Begin the recording of a run, or go on with it; arguments as for `check_recording`.

    Raises:
        RecordingError: the batches before the checkpoint are not all there.
    """
    directory = run_dir / RECORDING_DIR
    if host:
        # The weights of the start may be gone.
        start, batches = Recording(directory).description["start"], host["run"]["batches"]
    else:
        start, batches = evaluate.model_digest(folder), 0
    recorder = Recorder(directory, _describe(config, parts, start), batches=batches)
    if recorder.removed:
        print(
            f"recording: {recorder.removed} batches after the checkpoint are removed, as their "
            "updates are lost; the run goes on with others"
        )
    return recorder


def _describe(config: RunConfig, parts: assembly.Parts, start: str) -> dict[str, Any]:
    """What a recording belongs to: settings by their names, contents by their hashes."""
    return {
        "task": config.task,
        "batch_size": config.batch_size,
        "samples_per_prompt": config.samples_per_prompt,
        "updates_per_batch": METHODS[config.method].minibatches,
        **parts.environment.form,
        "tokenizer": hashlib.sha256(parts.tokenizer.to_str().encode()).hexdigest(),
        "prompts": data.dataset_fingerprint(parts.environment.train, 0)["sha256"],
        "start": start,
    }


class _NoPrompts:
    """An iterator of no prompts."""

    def __next__(self) -> Prompt:
        raise StopIteration

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class _Accounts:
    """Rates from counters that only grow: what the generator did since the last line of the log."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read
        self._last, self._time = read(), time.monotonic()

    def since_last(self) -> dict[str, float]:
        now, moment = self._read(), time.monotonic()
        seconds = max(moment - self._time, 1e-9)
        change = {name: value - self._last[name] for name, value in now.items()}
        self._last, self._time = now, moment
        counts = ("failed", "aborted", "reissued", "lost", "filtered", "skipped")
        return {
            "rollout/tokens_per_second": change["tokens"] / seconds,
            "rollout/busy_fraction": change["busy_s"] / seconds,
            "rollout/admission_fraction": change["idle_s"] / seconds,
            "rollout/publish_fraction": change["publish_s"] / seconds,
            "rollout/buffered": now["buffered"],
            "rollout/in_flight": now["in_flight"],
            **{f"rollout/{name}": now[name] for name in counts},
        }


def _varied(group: list[Trajectory]) -> bool:
    """Whether the rewards of a group differ: DAPO's dynamic sampling keeps only such groups."""
    return len({trajectory.reward for trajectory in group}) > 1


@contextlib.contextmanager
def _watch(server: ServerProcess) -> Iterator[None]:
    """Start a server that died again; the client gives it the current weights before it uses it."""
    end = threading.Event()

    def watch() -> None:
        while not end.wait(1.0):
            if not server.alive() and not end.is_set():
                print("the rollout server ended; starting it again", flush=True)
                try:
                    server.restart()
                except RuntimeError as error:
                    if not end.is_set():
                        print(f"the rollout server does not start: {error}", flush=True)

    thread = threading.Thread(target=watch, name="server watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        # A start under way takes its time, and nobody waits for that server any more.
        while thread.is_alive():
            server.stop()
            thread.join(0.5)


def _server_event(event: str, url: str, detail: str) -> None:
    print(f"rollout server {url}: {event}: {detail}", flush=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))
