"""Where the batches of a run come from, and where its weights go."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import assembly
import evaluate

from copc_jax import data, staging
from copc_jax.config import RunConfig
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
from copc_jax.types import Prompt, Trajectory


class Source(Protocol):
    """What a run asks of the source of its batches."""

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
        save_weights: writes the present weights of the policy into a folder.
        host: host part of the checkpoint that the run goes on from, {} at its start.
        processes: those of the run; each has a generator of its own, for its share of each batch.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: assembly.Parts,
        run_dir: Path,
        *,
        folder: Path,
        save_weights: Callable[[Path], None],
        host: dict[str, Any],
        processes: Processes,
    ):
        self.config, self.parts, self.run_dir = config, parts, run_dir
        self.processes = processes
        self._folder, self._save_weights, self._host = folder, save_weights, host
        self._weights: list[Path] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Generator:
        """Start the servers and the collector; episodes start with the first publication."""
        with contextlib.ExitStack() as stack:
            self.server = self._start_server(stack)
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
            publish=self._gap.publish,
            prompts=self._prompts(),
            admission=staging.Admission(
                config.batch_size // self.processes.count,
                config.staleness,
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
        return self.processes.together("the batch", lambda: self.collector.next_batch(batch))[0]

    def publish(self, version: int) -> None:
        """Write the weights and hand them to the servers; folders that nobody reads go."""
        folder = self.run_dir / "weights" / f"v{version:06d}"
        if self._weights and self._weights[-1] == folder:
            return
        self._save_weights(folder)
        self.collector.publish(folder.resolve(), version)
        self._weights.append(folder)
        published = self.processes.gather("published", self.collector.published_version)
        while (
            None not in published
            and len(self._weights) > 2
            and _number(self._weights[1]) <= min(published)
        ):
            old = self._weights.pop(0)
            if self.processes.first:
                shutil.rmtree(old, ignore_errors=True)

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
                    print(f"the rollout server does not start: {error}", flush=True)

    thread = threading.Thread(target=watch, name="server watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _server_event(event: str, url: str, detail: str) -> None:
    print(f"rollout server {url}: {event}: {detail}", flush=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))
