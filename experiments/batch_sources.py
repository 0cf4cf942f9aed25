"""Where the batches of a run come from, and where its weights go."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import assembly
import evaluate

from copc_jax import data, staging
from copc_jax.config import RunConfig
from copc_jax.methods import METHODS
from copc_jax.rollout.client import SamplingParams
from copc_jax.rollout.collector import Collector, PromptIterator, decode_state, encode_state
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
    ):
        self.config, self.parts, self.run_dir = config, parts, run_dir
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
        self._key = assembly.server_key(self.config)
        log = self.run_dir / "server.log"
        server = assembly.launch(self.config, self._folder, log, self._key)
        if server is not None:
            stack.enter_context(server)
            stack.enter_context(_watch(server))
        self.urls = self.config.rollout.urls or (server.url,)  # pyright: ignore[reportOptionalMemberAccess]
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
                config.batch_size,
                config.staleness,
                mode=config.staleness_mode,
                updates_per_batch=method.minibatches,
            ),
            samples_per_prompt=config.samples_per_prompt,
            seed=config.seed,
            max_in_flight=config.rollout.max_in_flight,
            keep_group=_varied if method.dynamic_sampling else None,
            stall_timeout_s=config.rollout.stall_seconds,
        )
        if "collector" in self._host:
            collector.restore(decode_state(self._host["collector"]))
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
        )

    def next_batch(self, batch: int) -> list[Trajectory]:
        """As `Source` says; its trajectories are in the order of submission."""
        return self.collector.next_batch(batch)

    def publish(self, version: int) -> None:
        """Write the weights and hand them to the servers; folders that nobody reads go."""
        folder = self.run_dir / "weights" / f"v{version:06d}"
        if self._weights and self._weights[-1] == folder:
            return
        self._save_weights(folder)
        self.collector.publish(folder.resolve(), version)
        self._weights.append(folder)
        published = self.collector.published_version
        while (
            published is not None
            and len(self._weights) > 2
            and _number(self._weights[1]) <= published
        ):
            shutil.rmtree(self._weights.pop(0), ignore_errors=True)

    def wait_published(self) -> None:
        """As `Source` says."""
        self.collector.wait_published()
        self.collector.call(self._gap.check())

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """As `Source` says; training episodes go on beside."""
        return evaluate.held_out(self.collector, self.client, self.config, self.parts, prompts)

    def compare(self, version: int, references: Sequence[Reference]) -> None:
        """As `Source` says."""
        self.collector.call(self._gap.offer(version, references))

    def state(self, batches: int) -> dict[str, Any]:
        """As `Source` says."""
        return {"collector": encode_state(self.collector.state(batches))}

    def figures(self) -> dict[str, float]:
        """As `Source` says."""
        return self._accounts.since_last() | self.collector.call(self._gap.since_last())


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
