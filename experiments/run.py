"""Train a language model with asynchronous off-policy RL.

    python experiments/run.py --task=search --staleness=64

builds the task's data, warms a small model up on demonstrations (cached), starts the embedded
rollout server, trains, evaluates on held-out questions before, during and after, and writes
everything that there is to see into the run folder, whose path it prints. `--help` explains every
setting.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import json
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import assembly
import batch_sources
import jax
import numpy as np
import psutil
import sft

from copc_jax import (
    access,
    data,
    distributed,
    hf,
    memory,
    metrics,
    model,
    run_report,
    sharding,
    staging,
    viewer,
)
from copc_jax.analysis import finish
from copc_jax.checkpoint import Checkpointer, CheckpointError, abstract, config_differences
from copc_jax.config import PAPER_MODELS, parse, refuse, sources, to_dict, to_json
from copc_jax.distributed import PeerError
from copc_jax.learner import Learner, LearnerConfig, build_learner
from copc_jax.methods import METHODS, PAPER_REDUCE
from copc_jax.rollout.collector import CollectorError
from copc_jax.rollout.episode import EpisodeFailed
from copc_jax.rollout.gap import Reference, decode_gap
from copc_jax.rollout.launch import ServerProcess
from copc_jax.settings import DistributedConfig, MeshConfig, RunConfig, require_processes
from copc_jax.types import Batch, Prompt, Targets, Trajectory

# What can become of servers, tools and files while a run goes on: one line, no traceback.
RUN_ERRORS = (
    *(CollectorError, EpisodeFailed, OSError),
    *(e for e in assembly.START_ERRORS if e is not ValueError),
)

# Settings that a resumed run may change: how long and how it is watched, never what is computed.
MAY_DIFFER = (
    *("updates", "resume", "run_dir", "cache_dir", "checkpoint_every", "keep_checkpoints"),
    *("record", "replay", "eval", "viewer", "cpus", "mesh", "distributed", "rollout.api_key"),
    *("rollout.urls", "rollout.control_urls", "rollout.launch"),
    *("rollout.sglang_python", "rollout.sglang_device", "rollout.sglang_args"),
    *("rollout.logprob_gap_limit", "rollout.logprob_gap_trajectories"),
    *("rollout.slots", "rollout.timeout_seconds"),
    *("rollout.deadline_seconds", "rollout.stall_seconds", "rollout.max_in_flight"),
)

# Settings that each process of a run may have of its own.
OWN_SETTINGS = (
    *("distributed.process_id", "run_dir", "resume", "cache_dir", "cpus"),
    *("rollout.urls", "rollout.control_urls"),
)


def main(arguments: list[str] | None = None) -> Path:
    """Run one configuration to its end and return the run folder.

    Raises:
        SystemExit: 2 when the run cannot start, 1 when it cannot go on, 130 after Ctrl-C and
            SIGTERM.
    """
    started = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(arguments)
    if config.check:
        try:
            check(config)
        except assembly.START_ERRORS as error:
            refuse(error)
        raise SystemExit(0)
    run_dir = config.resume or config.run_dir or _new_run_dir(config)
    try:
        with _Interrupts() as interrupts, contextlib.ExitStack() as stack:
            try:
                assembly.prepare_process(config, config.cpus[0] if config.cpus else None)
                processes = stack.enter_context(
                    distributed.start(config.distributed, interrupts.allowed)
                )
                run_dir = _shared_folder(run_dir, processes)
                if not processes.first:
                    log = stack.enter_context(
                        (run_dir / f"process-{processes.index}.log").open("a")
                    )
                    stack.enter_context(contextlib.redirect_stdout(log))
                print(f"run folder: {run_dir}", flush=True)
                run = Run(config, run_dir, " ".join(arguments), interrupts, started, processes)
                stack.enter_context(run)
            except assembly.START_ERRORS as error:
                refuse(error)
            run.train()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if not processes.first:
        return run_dir
    # A run may keep no episodes.
    with contextlib.suppress(FileNotFoundError):
        print(f"episodes: {viewer.write_page(run_dir)}")
    print(f"report: {run_report.report(run_dir)}")
    print(f"{time.monotonic() - started:.0f} s in all")
    return run_dir


def check(config: RunConfig) -> None:
    """Print a preset's sources and the memory of each device, and compile the learner's step.

    Needs no weights: without a checkpoint, the sizes of the paper's models are known. With fewer
    devices than the mesh has, the step is compiled for as many processors of this machine.

    Raises:
        ValueError: neither the model nor its sizes are there.
    """
    needed = config.mesh.data * config.mesh.model
    jax.config.update("jax_num_cpu_devices", needed)
    assembly.prepare_process(config)
    for line in sources(config):
        print(line)
    if config.model in PAPER_MODELS and not Path(config.model).exists():
        sizes = PAPER_MODELS[config.model]
    else:
        folder = assembly.model_folder(config)
        tiny = config.tiny.model(config.rollout.max_tokens)
        sizes = tiny if folder is None else hf.load_config(folder)
    settings = learner_config(config, sizes)
    _say_memory(config, settings)
    devices = jax.devices() if len(jax.devices()) >= needed else jax.devices("cpu")
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.model, devices)
    learner = build_learner(settings, mesh)
    started = time.monotonic()
    step: Any = learner.step_with_targets
    compiled = step.lower(abstract_state(learner, sizes), abstract_batch(learner, config)).compile()
    plan = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    print(
        f"the step compiles for {needed} x {devices[0].device_kind} in "
        f"{time.monotonic() - started:.0f} s; XLA plans "
        f"{(planned - plan.alias_size_in_bytes) / 1e9:.1f} GB on each"
    )


def _say_memory(config: RunConfig, settings: LearnerConfig) -> None:
    print(f"learner's memory on each device of a mesh {config.mesh.data} x {config.mesh.model}, GB")
    mesh = (config.mesh.data, config.mesh.model)
    shape = (config.rows, config.rollout.max_tokens)
    print(memory.device_memory(settings, *mesh, *shape).table(), flush=True)


def learner_config(config: RunConfig, sizes: model.ModelConfig) -> LearnerConfig:
    """Settings of the learner for a run with a model of these sizes."""
    method = METHODS[config.method]
    return LearnerConfig(
        model=sizes,
        method=method,
        loss=config.loss,
        actor=config.actor,
        critic=config.critic,
        updates=config.updates,
        reduce=(method.reduce or PAPER_REDUCE)[config.task],
        critic_warmup_updates=config.critic_warmup_updates if method.critic else 0,
        micro_batches=config.micro_batches,
        remat=config.remat,
        logprob_chunk=config.logprob_chunk,
        lora=config.lora,
        seed=config.seed,
    )


def abstract_state(learner: Learner, sizes: model.ModelConfig) -> Any:
    """Shapes and shardings of the learner's state."""
    params = jax.eval_shape(lambda key: model.init(key, sizes), jax.random.key(0))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(learner.init, params),
        learner.state_sharding,
    )


def abstract_batch(learner: Learner, config: RunConfig) -> Batch:
    """Shapes and shardings of a batch as the run packs it."""
    shape = (config.rows, config.rollout.max_tokens)
    integers, floats, truths = (
        jax.ShapeDtypeStruct(shape, kind, sharding=learner.batch_sharding)
        for kind in (np.int32, np.float32, np.bool_)
    )
    return Batch(
        token_ids=integers,
        segment_ids=integers,
        positions=integers,
        is_action=truths,
        behavior_logprob=floats,
        reward=floats,
        discount=floats,
        weight_version=integers,
    )  # pyright: ignore[reportArgumentType]


class Run:
    """One training run: owns the processes, threads and files, and holds no mathematics."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        command: str,
        interrupts: _Interrupts,
        started: float,
        processes: distributed.Processes,
    ):
        self.config, self.run_dir, self.command = config, run_dir, command
        self.processes = processes
        self._interrupts, self._started = interrupts, started
        self.method = METHODS[config.method]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        """Build everything up to the first update; whatever fails is undone."""
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        """End the episodes, the server and the files, in the order opposite to their start."""
        self._stack.__exit__(*exception)

    def _start(self, stack: contextlib.ExitStack) -> None:
        config, run_dir, processes = self.config, self.run_dir, self.processes
        _check_processes(config, processes)
        checkpoints = Checkpointer(run_dir / "checkpoints", config.keep_checkpoints)
        resumed = processes.decided("the checkpoint", self._resumed_step(checkpoints))
        self.checkpoints = stack.enter_context(checkpoints)
        if config.resume is None and (run_dir / metrics.METRICS_FILE).exists():
            raise FileExistsError(f"{run_dir} holds another run: --resume it, or name another one")
        if processes.first:
            weights = run_dir / "weights"
            # Those of an earlier process too; left last, when no server reads them any more.
            shutil.rmtree(weights, ignore_errors=True)
            stack.callback(shutil.rmtree, weights, ignore_errors=True)

        recording = None if config.replay is None else batch_sources.open_recording(config)
        if sources(config):
            print(f"preset {config.preset}: --check=True says what the paper states of it")
        print("building corpus, questions and tokenizer", flush=True)
        self.parts = assembly.build(config)
        self.learner = self._build_learner()
        host: dict[str, Any] = {}
        if resumed is None:
            folder = self._warm_start()
            params, _ = hf.load_hf(folder, shardings=self.learner.params_sharding)
            self.state = self.learner.init(params)
            # The state has its own copy.
            del params
        else:
            self.state, host = self._restore(checkpoints, resumed)
            if ("recording" in host) != (recording is not None):
                raise CheckpointError(
                    f"--resume {run_dir}: replay must be {'on' if recording is None else 'off'}, "
                    "as it was: a run cannot change between rollouts and a recording"
                )
            # What a server starts with, and again after it died; the warm start may be gone.
            folder = run_dir / "weights" / "start"
            self._export(folder)
            print(f"resumed from update {resumed}", flush=True)
        self.batches = host.get("run", {}).get("batches", 0)
        recorder = None
        if recording is not None:
            batch_sources.check_recording(recording, config, self.parts, folder, host)
        elif config.record:
            recorder = batch_sources.start_recording(config, self.parts, run_dir, folder, host)
        # Only now: a refused resume must not replace the configuration of the run.
        if processes.first:
            (run_dir / metrics.CONFIG_FILE).write_text(to_json(config) + "\n")
        if processes.first and config.resume is None:
            command = f"python experiments/run.py {self.command}\n"
            (run_dir / metrics.COMMAND_FILE).write_text(command)
        self.version = int(self.state.version)
        self._first = True
        self._copied: Any = None

        self._step = self._compile_step(stack)
        self._prompts = {p.prompt_id: p for p in self.parts.environment.train}
        generator = functools.partial(
            batch_sources.Generator,
            config,
            self.parts,
            run_dir,
            snapshot=self._snapshot,
            processes=processes,
        )
        self.source: batch_sources.Source
        if recording is None:
            live = generator(folder=folder, host=host, recorder=recorder)
            self.source = stack.enter_context(live)
        else:
            self.source = stack.enter_context(
                batch_sources.Replay(config, recording, lambda: self._start_evaluations(generator))
            )
        self.log = stack.enter_context(
            metrics.MetricsLogger(
                run_dir,
                total_steps=self._last_version,
                resume_step=-1 if resumed is None and config.resume else resumed,
            )
            if processes.first
            else metrics.NoLog()
        )
        self._started_before = processes.decided("the log", self.log.last_step >= 0)
        self._usage = _Usage(lambda: self.source.server)

    def _start_evaluations(
        self, generator: Callable[..., batch_sources.Generator]
    ) -> batch_sources.Generator:
        """Make a generator that starts from the present weights and trains on nothing."""
        folder = self.run_dir / "weights" / "start"
        self._export(folder)
        return generator(folder=folder, host={}, train=False)

    def _restore(self, checkpoints: Checkpointer, step: int) -> tuple[Any, dict[str, Any]]:
        config = self.config
        like = abstract_state(self.learner, self.parts.model)
        # A decaying learning rate depends on the length of the run.
        decays = {config.actor.schedule, config.critic.schedule} != {"constant"}
        may_differ = [name for name in MAY_DIFFER if not (decays and name == "updates")]
        return checkpoints.restore(step, like, config=to_dict(config), may_differ=may_differ)

    def _compile_step(self, stack: contextlib.ExitStack) -> concurrent.futures.Future[Any]:
        """Compile the learner's step in the background, while the server starts and evaluates."""
        batch = abstract_batch(self.learner, self.config)
        state = abstract(self.state)
        worker = concurrent.futures.ThreadPoolExecutor(1, "compile")
        stack.callback(worker.shutdown, wait=False, cancel_futures=True)
        step: Any = self.learner.step_with_targets
        return worker.submit(lambda: step.lower(state, batch).compile())

    @property
    def _last_version(self) -> int:
        if self.source.length is None:
            return self.config.updates
        return min(self.config.updates, self.source.length * self.method.minibatches)

    def _resumed_step(self, checkpoints: Checkpointer) -> int | None:
        if self.config.resume is None:
            return None
        step = checkpoints.latest()
        if step is None:
            if faults := checkpoints.faults():
                raise CheckpointError(
                    f"--resume {self.config.resume}: no complete checkpoint is left: "
                    + "; ".join(faults.values())
                )
            # A job that is queued again says --resume, however early it was killed.
            print(f"no complete checkpoint in {self.run_dir} yet: starting from the beginning")
        return step

    def _build_learner(self) -> Learner:
        config = self.config
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.model)
        settings = learner_config(config, self.parts.model)
        if self.parts.folder is not None:
            _say_memory(config, settings)
        return build_learner(settings, mesh)

    def _warm_start(self) -> Path:
        """Return the HF folder of the weights before the first update.

        Of several processes the first trains it, on devices of its own: the others have nothing to
        add, and read it from the run folder.
        """
        config, processes = self.config, self.processes
        if processes.count == 1:
            return sft.warm_start(config, self.parts)
        if self.parts.folder is not None and not config.sft.updates:
            return self.parts.folder
        folder = self.run_dir / "weights" / "start"
        alone = dataclasses.replace(
            config,
            mesh=MeshConfig(config.mesh.data // processes.count, config.mesh.model),
            distributed=DistributedConfig(),
        )

        def train() -> None:
            made = sft.warm_start(alone, self.parts)
            shutil.copytree(made, folder)

        self._by_first("the warm start", train)
        return folder

    def _by_first(self, what: str, work: Callable[[], None]) -> None:
        """Have process 0 do what is done once; the others wait until it is done."""
        self.processes.together(what, work if self.processes.first else lambda: None)

    def train(self) -> None:
        """Evaluate, update until the end, evaluate again; Ctrl-C and SIGTERM leave a checkpoint."""
        # Alone, a process may be interrupted anywhere; several stop where all are at one place.
        alone = self.processes.count == 1
        with contextlib.nullcontext() if alone else self._interrupts.held():
            self._train()

    def _train(self) -> None:
        warmup, updates = self.config.critic_warmup_updates, self._last_version
        if self.method.critic and warmup >= updates:
            self._say(
                f"note: the actor stays as it is: critic_warmup_updates {warmup} takes all of the "
                f"{updates} updates"
            )
        if self.config.replay is not None:
            self._say(
                f"replay of {self.config.replay}: {self.source.length} batches are recorded, "
                f"{updates} updates are made"
            )
            if self.method.dynamic_sampling:
                self._say("note: groups of equal rewards stay in a replay, with advantage 0")
        try:
            self.source.publish(self.version)
            self.source.wait_published()
            if not self._started_before:
                self.log.log(0, self._evaluate(final=True))
            while self.version < self._last_version:
                self._update()
            self._save()
            self._export(self.run_dir / "model")
        except KeyboardInterrupt:
            if not self.processes.in_step:
                raise
            self._say(f"stopped at update {self.version}, saving a checkpoint")
            self._leave_checkpoint()
            raise
        except Exception as error:
            self._say(f"error at update {self.version}: {error}")
            self._leave_checkpoint()
            if isinstance(error, RUN_ERRORS):
                raise SystemExit(1) from None
            raise
        self._say(f"trained model: {self.run_dir / 'model'}")

    def _leave_checkpoint(self) -> None:
        """Save what there is: between updates the state is whole, whatever became of the rest."""
        try:
            if not self.processes.in_step:
                raise PeerError("it takes all processes")
            if self.config.staleness_mode == "exact":
                # What is in flight must belong to the version in the checkpoint.
                self.source.publish(self.version)
            self._save()
            self.checkpoints.wait()
        except Exception as fault:
            self._say(
                f"update {self.version} could not be saved ({fault}); the last complete "
                f"checkpoint is of update {self.checkpoints.latest()}"
            )
        self._say(f"continue with --resume {self.run_dir}")

    def _snapshot(self) -> Callable[[Path], None]:
        """Copy the weights of the policy; what is returned writes them, in any thread.

        Every copy goes into the same memory: the one before must have been written.
        """
        params = self.processes.whole(self.learner.policy_params(self.state))
        # The next step is given the state's own memory, which a view of it would keep from it.
        if self.processes.first and self._copied is None:
            self._copied = jax.tree.map(np.array, params)
        elif self.processes.first:
            jax.tree.map(np.copyto, self._copied, params)
        copied = self._copied or {}
        return lambda folder: hf.save_hf(folder, copied, self.parts.model)

    def _export(self, folder: Path) -> None:
        """Write the actor as an HF folder that servers and evaluate.py take."""
        params = self.processes.whole(self.learner.policy_params(self.state))
        self._by_first(
            "the model",
            lambda: hf.save_hf(
                folder,
                params,
                self.parts.model,
                tokenizer_json=self.parts.tokenizer.to_str(),
                extra_files=sft.side_files(self.parts),
            ),
        )

    def _update(self) -> None:
        config, clock = self.config, _Clock()
        self.processes.where = f"update {self.version}"
        self.log.status("waiting for rollouts")
        trajectories = self.source.next_batch(self.batches)
        clock.lap("learner/wait_seconds")

        self.log.status("learner step")
        batch, packed = self._pack(trajectories)
        lag = staging.staleness_stats(trajectories, self.version, updates=self.method.minibatches)
        device_batch = self.processes.place(
            batch, self.method.minibatches, self.learner.batch_sharding
        )
        step = self._step.result()
        values: dict[str, Any] = {}
        complete = False
        try:
            # The step donates the state: between the two there is nothing that could be saved.
            with self._interrupts.held():
                self.state, result, targets = step(self.state, device_batch)
                trained_by, self.version = self.version, self.version + self.method.minibatches
                self.batches += 1
                values |= finish(result)
                values |= metrics.lag_values(lag.tokens, lag.trajectories)
                values |= _episode_figures(trajectories)
                values |= source_figures(trajectories, self._prompts)
                values |= _batch_figures(packed)
            if self.source.sampled_by(trained_by):
                values |= self._compare_logprobs(batch, packed, targets, trained_by)
            clock.lap("learner/seconds")
            if self._first:
                self._first = False
                self._say(f"first update after {time.monotonic() - self._started:.0f} s")
            self.checkpoints.check()

            last = self.version >= self._last_version
            if self.batches % config.publish_every == 0 or last:
                self.source.publish(self.version)
            clock.lap("learner/publish_seconds")

            every = config.eval.every
            if last or (every and self.batches % every == 0):
                values |= self._evaluate(final=last)
            clock.lap("learner/eval_seconds")
            if self.batches % config.checkpoint_every == 0 and not last:
                self._save()
            clock.lap("learner/checkpoint_seconds")
            complete = True
        finally:
            # An update that was made has its line, also when what follows it fails everywhere.
            with self._interrupts.held():
                if values and (complete or self.processes.in_step):
                    values |= clock.laps | self.source.figures() | self._usage.since_last()
                    values = metrics.merged(self.processes.gather("the figures", values))
                    self.log.log(self.version, values, self._histograms(batch, trajectories))
        every = config.viewer.every
        if every is None:
            every = max(config.updates // self.method.minibatches // 50, 1)
        if every and (last or self.batches % every == 0):
            self._record_episodes(device_batch, targets, packed)

    def _pack(self, trajectories: list[Trajectory]) -> tuple[Batch, list[staging.PackStats]]:
        """Pack this process's share of each minibatch to its fixed shape."""
        config, parts = self.config, self.method.minibatches
        size = len(trajectories) // parts
        group = "scaled" if self.method.group else None
        packed = [
            staging.pack(
                trajectories[i * size : (i + 1) * size],
                rows=config.rows // parts // self.processes.count,
                time=config.rollout.max_tokens,
                learner_version=self.version,
                staleness=self.source.staleness,
                gamma=config.loss.gamma,
                truncated=config.truncated,
                pad_id=self.parts.tokenizer.token_to_id(data.PAD_TOKEN) or 0,
                group_advantage=group,
                updates_per_batch=parts,
            )
            for i in range(parts)
        ]
        batch = jax.tree.map(lambda *x: np.concatenate(x), *(b for b, _ in packed))
        return batch, [stats for _, stats in packed]

    def _own_rows(self, array: jax.Array) -> np.ndarray:
        """Return the rows of the whole batch that `_pack` packed here, in the same order."""
        return self.processes.own(array, self.method.minibatches)

    def _compare_logprobs(
        self, batch: Batch, packed: list[staging.PackStats], targets: Targets, version: int
    ) -> dict[str, float]:
        """Compare server and learner on tokens that `version` sampled, and have others scored.

        Raises:
            RolloutError: they differ by more than the limit.
        """
        logprob = self._own_rows(targets.policy_logprob)
        places = _places(len(logprob), packed)
        count = min(self.config.rollout.logprob_gap_trajectories, len(places))
        references = []
        for index in range(count):
            # Others of the batch with every update.
            trajectory, row, place = places[(version + index * len(places) // count) % len(places)]
            own = logprob[row, place].copy()
            references.append(Reference(trajectory.token_ids, trajectory.is_action, own))
        self.source.compare(version, references)
        fresh = batch.is_action & (batch.weight_version == version)
        limit = self.config.rollout.logprob_gap_limit
        figures, _ = self.processes.together(
            "the gap",
            lambda: decode_gap(logprob[fresh], batch.behavior_logprob[fresh], version, limit),
        )
        return figures

    def _record_episodes(
        self, batch: Batch, targets: Targets, packed: list[staging.PackStats]
    ) -> None:
        """Keep some episodes of a trained batch, process 0's, with the figures of their tokens."""
        advantage, gradient = self.learner.contributions(batch, targets)
        figures = {"policy_logprob": targets.policy_logprob, "ratio": targets.ratio}
        if self.method.critic:
            figures |= {"value": targets.value, "value_target": targets.value_target}
        figures |= {"advantage": advantage, "gradient": gradient}
        figures = {name: self._own_rows(values) for name, values in figures.items()}
        places = _places(len(figures["ratio"]), packed) if self.processes.first else []
        wanted = self.config.viewer.episodes
        for trajectory, row, place in places[:: max(len(places) // wanted, 1)][:wanted]:
            record = viewer.record(
                trajectory,
                self.parts.tokenizer,
                {name: values[row, place] for name, values in figures.items()},
                step=self.version,
                trained_by=self.version - self.method.minibatches,
                prompt=self._prompts.get(trajectory.prompt_id),
                extract_answer=self.parts.environment.extract_answer,
            )
            self.log.episode(record)

    def _evaluate(self, *, final: bool) -> dict[str, float]:
        config = self.config
        if not config.eval.enabled:
            return {}
        self.log.status("evaluating")
        # In mode "exact" no update of the servers may come in mid-response.
        if final or config.staleness_mode == "exact":
            self.source.wait_published()
        limit = config.eval.final_questions if final else config.eval.questions
        prompts = self.parts.environment.held_out[: limit or None]
        result = self.source.evaluate(prompts)
        return {f"eval/{name}": value for name, value in result.items()}

    def _save(self) -> None:
        host = {
            "run": {"config": to_dict(self.config), "batches": self.batches},
            **self.source.state(self.batches),
        }
        # A save that was interrupted half started could not be started again.
        with self._interrupts.held():
            self.checkpoints.save(self.version, self.state, host)

    def _histograms(self, batch: Batch, trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
        # Each minibatch has rows of its own, and is trained on one version later than the last one.
        parts = self.method.minibatches
        trained_by = (
            self.version - parts + np.arange(len(batch.is_action)) * parts // len(batch.is_action)
        )
        lags = trained_by[:, None] - batch.weight_version
        return {
            "lag/tokens": lags[np.asarray(batch.is_action)],
            "length/tokens": np.asarray([len(t.token_ids) for t in trajectories]),
            "reward": np.asarray([t.reward for t in trajectories]),
        }

    def _say(self, text: str) -> None:
        print(text, flush=True)


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


class _Usage:
    """Processor time and memory of the learner and of the server that it started."""

    def __init__(self, server: Callable[[], ServerProcess | None]) -> None:
        self._server = server
        self._learner = psutil.Process()
        self._last, self._time = self._read()[0], time.monotonic()

    def since_last(self) -> dict[str, float]:
        """Seconds of work a second (1 is one core) since the last line of the log, memory now."""
        (now, memory), moment = self._read(), time.monotonic()
        seconds = max(moment - self._time, 1e-9)
        # A server that was started again begins at 0.
        values = {
            name: max(now[name] - self._last[name], 0.0) / seconds
            for name in now
            if name in self._last
        }
        self._last, self._time = now, moment
        return values | {"memory/rss_mb": memory / 2**20}

    def _read(self) -> tuple[dict[str, float], float]:
        times = self._learner.cpu_times()
        used = {"learner/cpu_fraction": times.user + times.system}
        memory = float(self._learner.memory_info().rss)
        server = self._server()
        if server is None:
            return used, memory
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(server.process.pid)
            memory += process.memory_info().rss
            times = process.cpu_times()
            used["rollout/cpu_fraction"] = times.user + times.system
        # A server that is starting again, or SGLang, does not tell.
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            headers = access.bearer(server.api_key)
            request = urllib.request.Request(f"{server.url}/server_info", headers=headers)
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                busy = json.load(answer)["internal_states"][0]["busy_seconds"]
            used["rollout/engine_busy_fraction"] = float(busy)
        return used, memory


def _places(rows: int, packed: list[staging.PackStats]) -> list[tuple[Trajectory, int, slice]]:
    """Where each trajectory stands in a batch of so many rows: its row and its slots."""
    rows //= len(packed)
    return [
        (trajectory, part * rows + row, slice(start, start + trajectory.token_ids.size))
        for part, stats in enumerate(packed)
        for trajectory, row, start in stats.places
    ]


def source_figures(
    trajectories: Sequence[Trajectory], prompts: Mapping[str, Prompt]
) -> dict[str, float]:
    """Mean reward and number of a batch's episodes for each source, where there are several."""
    if len({prompt.source for prompt in prompts.values()}) < 2:
        return {}
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        source = prompts[trajectory.prompt_id].source
        rewards.setdefault(source, []).append(trajectory.reward)
    return {
        f"source/{source}/{name}": value
        for source, found in sorted(rewards.items())
        for name, value in (("reward", float(np.mean(found))), ("episodes", float(len(found))))
    }


def _batch_figures(packed: list[staging.PackStats]) -> dict[str, float]:
    figures: dict[str, float] = {
        "batch/tokens": sum(part.tokens for part in packed),
        "batch/action_tokens": sum(part.action_tokens for part in packed),
        "batch/rows": sum(part.rows_used for part in packed),
    }
    for part in packed:
        for reason, prompts in part.dropped.items():
            name = f"batch/dropped_{reason}"
            figures[name] = figures.get(name, 0.0) + len(prompts)
    return figures


def _episode_figures(trajectories: list[Trajectory]) -> dict[str, float]:
    names = sorted({name for trajectory in trajectories for name in trajectory.info})
    figures = {
        f"task/{name}": float(np.mean([t.info.get(name, 0.0) for t in trajectories]))
        for name in names
    }
    figures["reward/mean"] = float(np.mean([t.reward for t in trajectories]))
    for score in metrics.SCORES:
        if f"task/{score}" in figures:
            figures[f"reward/{score}"] = figures[f"task/{score}"]
    figures["task/truncated"] = float(np.mean([t.status == "truncated" for t in trajectories]))
    figures["length/mean"] = float(np.mean([len(t.token_ids) for t in trajectories]))
    figures["length/action_mean"] = float(np.mean([t.is_action.sum() for t in trajectories]))
    return figures


class _Interrupts:
    """Ctrl-C, and a scheduler's SIGTERM as the same; both can be held off.

    A second one while the first is held off interrupts at once, whatever is lost by it.
    """

    def __init__(self) -> None:
        self._held = self._pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let what is inside finish, and interrupt after it."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
        self._interrupt_now()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let what is inside be interrupted, within what is held off."""
        before, self._held = self._held, False
        try:
            self._interrupt_now()
            yield
        finally:
            self._held = before

    def _interrupt_now(self) -> None:
        if self._pending and not self._held:
            self._pending = False
            raise KeyboardInterrupt

    def _interrupt(self, *_: object) -> None:
        if self._held and not self._pending:
            self._pending = True
        else:
            self._pending = False
            raise KeyboardInterrupt


def _shared_folder(run_dir: Path, processes: distributed.Processes) -> Path:
    """Make the run folder, which process 0 names.

    Raises:
        FileNotFoundError: another process does not see it.
    """
    run_dir = Path(processes.decided("the run folder", str(run_dir)))

    def make() -> None:
        if processes.first:
            run_dir.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        if not run_dir.is_dir():
            raise FileNotFoundError(
                f"{run_dir.absolute()}, the run folder of process 0, is not there: it must lie "
                "where all processes see it under the same path"
            )

    processes.together("the run folder", make)
    processes.together("the run folder", look)
    return run_dir


def _check_processes(config: RunConfig, processes: distributed.Processes) -> None:
    """Refuse a run that cannot be split, or whose processes were given different settings."""
    require_processes(config, processes.count)
    mine = to_dict(config)
    for index, other in enumerate(processes.gather("the settings", mine)):
        differences = config_differences(other, mine, OWN_SETTINGS)
        if differences:
            raise ValueError(
                f"processes {index} and {processes.index} have different settings: "
                + "; ".join(differences)
            )


def _new_run_dir(config: RunConfig) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    kind = "" if config.replay is None else "-replay"
    name = f"{config.task}-{config.method}-s{config.staleness}-seed{config.seed}{kind}-{now}"
    return Path("runs") / name


if __name__ == "__main__":
    main()
