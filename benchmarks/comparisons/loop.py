"""The whole loop: asynchronous against synchronous (staleness 0 of the same code).

Every run is `experiments/run.py` on the search task, learner and rollout server pinned to one core
each in both modes; the colocated baseline is synchronous too, and each process may have all cores
in its turn. Learning rates are next to nothing, so that all runs sample episodes of the same kind.

By the wall clock the times of the parts are those of the synchronous run: waiting for rollouts,
without what of it is waiting for the server to have the weights; the step; and publishing. In
virtual time they are CPU seconds of the two processes an update, put on two clocks of which each
waits for the other's messages: what two free cores would show. The work of client and episodes
counts as the learner's there, whose process does it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
import psutil
from harness import CACHE, HERE, Bench, Row, Spread, say
from worker import cpu_of

AHEAD = 4
# Beyond the preset: what makes either side the slower one.
BALANCES = {
    "search preset": (),
    "learner slower": ("--remat=True", "--batch-size=96", "--rollout.slots=96"),
}
# Updates before the measurement: compiling, filling the queue.
WARMUP = 8
POLL_S = 0.02
WINDOW_S = 8.0


@dataclasses.dataclass
class Run:
    """What a run showed; arrays have one entry an update after the warm-up.

    Attributes:
        seconds: wall time from update to update.
        waited: seconds that the learner waited for rollouts.
        trained: seconds of packing, step and metrics.
        published: seconds that publishing held the learner up.
        loaded: seconds from there until they were written and the server had them.
        learner_cpu: CPU seconds of the learner's process.
        server_cpu: CPU seconds of the server's process.
        tokens: sampled tokens trained on.
        timeline: [when, learner, server] of cores in use, seconds from the middle of the run.
    """

    seconds: np.ndarray
    waited: np.ndarray
    trained: np.ndarray
    published: np.ndarray
    loaded: np.ndarray
    learner_cpu: np.ndarray
    server_cpu: np.ndarray
    tokens: np.ndarray
    timeline: np.ndarray


def run(bench: Bench, staleness: int, updates: int, extra: Sequence[str], *, pinned: bool) -> Run:
    """Run the command and read its log.

    Raises:
        RuntimeError: it failed; the benchmark's log has what it printed.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "run"
        command = [
            *(sys.executable, str(HERE.parent / "experiments" / "run.py"), "--task=search"),
            *(f"--staleness={staleness}", f"--updates={WARMUP + updates}"),
            *("--critic-warmup-updates=0", "--eval.enabled=False", "--viewer.every=0"),
            *("--checkpoint-every=1000000", "--actor.learning-rate=1e-12"),
            *(f"--run-dir={folder}", f"--cache-dir={CACHE.resolve().parent}", *extra),
        ]
        if pinned:
            command += ["--cpus", str(cores[0]), str(cores[-1])]
        watched = subprocess.Popen(
            command,
            stdout=bench.log,
            stderr=bench.log,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        try:
            timeline = _watch(watched)
        finally:
            if watched.poll() is None:
                os.killpg(watched.pid, signal.SIGTERM)
            watched.wait()
        if watched.returncode:
            raise RuntimeError(f"loop: {' '.join(command)} ended with {watched.returncode}")
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "learner/seconds" in line]
    column = lambda name: np.array([row.get(name, 0.0) for row in rows])
    seconds = np.diff(column("time"))
    last = slice(WARMUP, None)
    spent = lambda name: (column(name)[1:] * seconds)[last]
    return Run(
        seconds=seconds[last],
        waited=column("learner/wait_seconds")[1:][last],
        trained=column("learner/seconds")[1:][last],
        published=column("learner/publish_seconds")[1:][last],
        loaded=spent("rollout/publish_fraction"),
        learner_cpu=spent("learner/cpu_fraction"),
        server_cpu=spent("rollout/cpu_fraction"),
        tokens=column("batch/action_tokens")[1:][last],
        timeline=timeline,
    )


def _watch(watched: subprocess.Popen[Any]) -> np.ndarray:
    """Read the CPU clocks of the run and of its server until it ends."""
    readings: list[tuple[float, float, float]] = []
    ended = threading.Event()

    def read() -> None:
        server = None
        while not ended.wait(POLL_S if server else 0.5):
            try:
                server = server or next(
                    child.pid
                    for child in psutil.Process(watched.pid).children()
                    if "copc_jax.rollout.server" in child.cmdline()
                )
                readings.append((time.monotonic(), cpu_of(watched.pid), cpu_of(server)))
            except (StopIteration, OSError, psutil.Error):
                continue

    reader = threading.Thread(target=read)
    reader.start()
    watched.wait()
    ended.set()
    reader.join()
    taken = np.array(readings)
    if len(taken) < 2:
        return np.zeros((0, 3))
    rates = np.diff(taken[:, 1:], axis=0) / np.diff(taken[:, :1], axis=0)
    table = np.column_stack([taken[1:, 0], rates])
    # Some seconds before the last ones, in which the run puts its files away.
    end = table[-1, 0] - 4.0
    table = table[(table[:, 0] > end - WINDOW_S) & (table[:, 0] <= end)]
    table[:, 0] -= table[:1, 0].sum()
    return table


def makespan(generate: np.ndarray, train: np.ndarray, load: np.ndarray, staleness: int) -> float:
    """Virtual seconds an update: two clocks, each of which waits for the other's messages.

    Batch k is sampled after batch k - 1 and once version k - `staleness` is there; update k follows
    update k - 1 and its batch, and its weights are there when the server has loaded them.
    """
    sampled = trained = 0.0
    available: list[float] = [0.0]
    for k in range(len(generate)):
        sampled = max(sampled, available[max(0, k - staleness)]) + generate[k]
        trained = max(trained, sampled) + train[k]
        available.append(trained + load[k])
    return float(trained / len(generate))


def limit(generate: float, train: float, sync: float) -> float:
    """Largest possible speed-up of two processes that never wait."""
    return float((generate + train + sync) / max(generate, train + sync))


def thirds(values: np.ndarray) -> np.ndarray:
    """Means of the first, the second and the last third."""
    return np.array([part.mean() for part in np.array_split(values, min(3, len(values)))])


def compare(bench: Bench) -> None:
    updates = 6 if bench.tiny else 24
    small: tuple[str, ...] = ()
    if bench.tiny:
        small = (
            "--batch-size=4",
            "--rollout.slots=4",
            "--sft.updates=2",
            "--sft.demonstrations=64",
        )
        small += ("--tiny.hidden-size=32", "--tiny.num-layers=1", "--sft.demonstrations=64")
    timelines: list[tuple[str, np.ndarray]] = []
    details = bench.details.setdefault("loop", {})
    for balance, extra in list(BALANCES.items())[: 1 if bench.tiny else None]:
        runs: dict[str, Run] = {}
        modes = {"sync": (0, True), f"async, S={AHEAD}": (AHEAD, True)}
        if balance == "search preset":
            modes["colocated sync"] = (0, False)
        for mode, (staleness, pinned) in modes.items():
            say(f"loop: {balance}, {mode}")
            # In the tiny form the small settings come last: what is given twice counts last.
            runs[mode] = run(bench, staleness, updates, [*extra, *small], pinned=pinned)
            timelines.append((f"{balance}: {mode}", runs[mode].timeline))
        sync, ahead = runs["sync"], runs[f"async, S={AHEAD}"]
        _rows(bench, balance, sync, ahead, runs.get("colocated sync"))
        details[balance] = {
            mode: {
                field.name: getattr(each, field.name).tolist() for field in dataclasses.fields(each)
            }
            for mode, each in runs.items()
        }
    _draw(timelines, bench.out / "loop.png")


def _rows(bench: Bench, balance: str, sync: Run, ahead: Run, colocated: Run | None) -> None:
    # Of its wait for rollouts, a synchronous learner spends the first part on its own weights.
    waited = np.maximum(sync.waited - sync.loaded, 0)
    parts = [x.mean() for x in (waited, sync.trained, sync.published + sync.loaded)]
    names = ("t_gen", "t_train", "t_sync")
    said = ", ".join(f"{n} {1e3 * x:.0f} ms" for n, x in zip(names, parts, strict=True))
    shape = f"{balance}: one core each, {len(ahead.seconds)} updates, {ahead.tokens.mean():.0f} "
    shape += "tokens sampled an update"
    speedups = thirds(sync.seconds).mean() / thirds(ahead.seconds)
    most = limit(*parts)
    virtual = {
        run: makespan(run_.server_cpu, run_.learner_cpu, run_.loaded, staleness)
        for run, run_, staleness in (("sync", sync, 0), ("async", ahead, AHEAD))
    }
    load = sync.loaded.mean()
    virtual_most = limit(sync.server_cpu.mean(), sync.learner_cpu.mean(), load)
    faster = virtual["sync"] / virtual["async"]
    at_balance = balance == "search preset"
    for what, clock, measured, bound, note in (
        ("async loop", "wall clock", Spread.of(speedups.tolist()), most, said),
        (
            "async loop",
            "virtual time",
            Spread(faster, faster, faster),
            virtual_most,
            f"CPU an update: server {1e3 * sync.server_cpu.mean():.0f} ms and learner "
            f"{1e3 * sync.learner_cpu.mean():.0f} ms in sync, {1e3 * ahead.server_cpu.mean():.0f} "
            f"and {1e3 * ahead.learner_cpu.mean():.0f} in async",
        ),
    ):
        bench.rows.append(
            Row(
                f"{what}, {clock}",
                "sync",
                shape,
                measured,
                1.8 if at_balance else None,
                note=f"{note}; limit {bound:.2f}",
            )
        )
        share = [x / bound for x in (measured.median, measured.low, measured.high)]
        bench.rows.append(
            Row(
                f"{what}, {clock}: share of its limit",
                "(t_gen + t_train + t_sync) / max(t_gen, t_train + t_sync)",
                shape,
                Spread(*share),
                0.95,
                unit="",
            )
        )
    if colocated is not None:
        ratios = thirds(colocated.seconds).mean() / thirds(ahead.seconds)
        bench.rows.append(
            Row(
                "async loop, wall clock",
                "colocated sync: all cores for each in turn",
                shape,
                Spread.of(ratios.tolist()),
                note=f"{1e3 * colocated.seconds.mean():.0f} ms an update, async "
                f"{1e3 * ahead.seconds.mean():.0f}, sync {1e3 * sync.seconds.mean():.0f}",
            )
        )


def _draw(timelines: list[tuple[str, np.ndarray]], path: pathlib.Path) -> None:
    """Draw who works and who waits."""
    figure = matplotlib.figure.Figure(figsize=(12, 1.5 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, table) in zip(axes, timelines, strict=True):
        axis.fill_between(table[:, 0], table[:, 1], step="pre", label="learner")
        axis.fill_between(table[:, 0], -table[:, 2], step="pre", label="server")
        axis.set_title(title, fontsize=9)
        axis.set_ylabel("cores in use")
        axis.set_yticks([-1, 0, 1], ["1", "0", "1"])
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("seconds; where one is blank, it waits for the other")
    figure.savefig(path, dpi=120)
