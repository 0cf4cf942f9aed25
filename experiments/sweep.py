"""Run a grid of experiments: one core a run, resumable, one row a finished run.

    python experiments/sweep.py figure1 --size=small
    python experiments/sweep.py --preset=quick --grid.method=copc,ppo --grid.seed=0,1,2

The first form runs an experiment of the paper (`EXPERIMENTS` below, experiments/README.md), the
second a grid of one's own. `--grid.NAME=A,B` makes an axis of any setting of run.py, and every
other setting of run.py holds for all runs; both go over what a named experiment has, and a plain
setting takes the place of an axis of that name. `--list` prints the runs and their cost and starts
nothing.

Everything stays in one folder, runs/sweeps/<experiment>-<size> or `--out`: runs/ with a run folder
each, logs/, rows.jsonl (a row is the resolved configuration, how the run ended, and its record from
`copc_jax.comparison`), rows.csv with the same in columns, planned.jsonl with all runs that were
asked for, sweep.json with commands and machine. The same command again skips what has finished,
goes on with what was cut off, and tries again what has failed. Ctrl-C and SIGTERM let the runs save
themselves first; a killed sweep takes its runs along. A run shares one core between learner and
server, unless `--cpus A B` gives them one each: then one run goes at a time.
`experiments/report.py` makes a page of the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from copc_jax import comparison, metrics
from copc_jax.checkpoint import Checkpointer
from copc_jax.config import parse, refuse, to_dict
from copc_jax.methods import METHODS
from copc_jax.settings import RunConfig

ROWS_FILE = "rows.jsonl"
PLANNED_FILE = "planned.jsonl"
SWEEP_FILE = "sweep.json"
SIZES = ("smoke", "small", "full")

# Settings that say where and how a run is watched, and not what it computes.
_WATCHED = ("run_dir", "resume", "cache_dir", "checkpoint_every", "keep_checkpoints", "viewer")
# Characters at the end of a run's name that say what it computes.
_DIGEST = 8
_POLL_S = 0.3
_PROGRESS_S = 30.0
_SAVE_S = 60.0
# Processor seconds of a run of preset quick, start and evaluations apart from updates: an estimate,
# by half of what an update of the task's own preset takes (README).
QUICK_START_S = 60.0
QUICK_UPDATE_S = 1.0

Axes = Mapping[str, Sequence[str]]
Settings = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The product of some axes under some settings.

    Attributes:
        axes: values by setting.
        settings: what all of these runs have beside those of the experiment.
        label: name of the grid, where its settings alone do not say what it is.
    """

    axes: Axes = dataclasses.field(default_factory=dict)
    settings: tuple[str, ...] = ()
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What it takes to try a claim of the paper.

    Attributes:
        title: of the page.
        settings: of all runs, at size full.
        grids: whose runs are made, one after another; seeds are their outermost axis.
        small: axes that are shorter at size small.
        small_settings: settings that change at size small.
    """

    title: str
    settings: tuple[str, ...]
    grids: tuple[Grid, ...]
    small: Axes = dataclasses.field(default_factory=dict)
    small_settings: tuple[str, ...] = ()


_EXACT = ("--preset=quick", "--staleness-mode=exact")
# Groups for all methods, as the paper samples them for all but SAO: group-relative advantages do
# not exist without, and a method of single samples takes one (see `plan`).
_GROUPS = "--samples-per-prompt=4"
_FIVE, _THREE = ("0", "1", "2", "3", "4"), ("0", "1", "2")
# The methods that the paper compares.
_PAPERS = ("copc", "copc_no_rc", "ppo", "areal", "vtrace", "dapo", "sao", "m2po", "vcpo")


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


# Learner and server on a core each.
_APART = ("--cpus", str(_cores()[0]), str(_cores()[-1]))


def _table(task: str, title: str) -> Experiment:
    return Experiment(
        title,
        (f"--task={task}", *_EXACT, _GROUPS),
        (Grid({"seed": _FIVE, "staleness": ("16", "64"), "method": tuple(METHODS)}),),
        {"seed": _THREE, "staleness": ("16",), "method": _PAPERS},
    )


_ABLATIONS = (
    ("COPC", ()),
    ("without return correction", ("--method=copc_no_rc",)),
    ("product of ratios along the trace", ("--loss.trace=product",)),
    ("own residual not weighted", ("--loss.first-residual=unweighted",)),
    ("masked tokens out of the denominator", ("--loss.mask-in-denominator=False",)),
    ("no critic warm-up", ("--critic-warmup-updates=0",)),
    ("critic warm-up of 40 updates", ("--critic-warmup-updates=40",)),
    ("advantages not whitened", ("--loss.whiten=False",)),
)

EXPERIMENTS: dict[str, Experiment] = {
    "figure1": Experiment(
        "Figure 1: both channels, swept jointly",
        ("--task=search", "--method=copc", *_EXACT),
        (
            Grid(
                {
                    "seed": _FIVE,
                    "staleness": ("8", "12", "16"),
                    "loss.eta_policy": ("0.25", "0.5", "0.75"),
                    "loss.eta_advantage": ("0.25", "0.5", "0.75"),
                }
            ),
        ),
        {"seed": _THREE, "staleness": ("16",)},
    ),
    "table1": _table("math", "Table 1: all methods on math"),
    "table2": _table("search", "Table 2: all methods on search"),
    "figure2": Experiment(
        "Figure 2: long runs of all methods, and COPC by staleness",
        ("--task=search", *_EXACT, _GROUPS, "--updates=1000", "--eval.every=50"),
        (
            Grid({"seed": _THREE, "method": tuple(METHODS)}),
            Grid({"seed": _THREE, "staleness": ("8", "16", "32", "64")}, ("--method=copc",)),
        ),
        {"seed": ("0",), "method": _PAPERS},
        ("--updates=500",),
    ),
    "ablations": Experiment(
        "Ablations of COPC, with the figures of coupling",
        ("--task=search", *_EXACT),
        tuple(
            Grid({"seed": _FIVE, "staleness": ("16", "64")}, settings, label)
            for label, settings in _ABLATIONS
        ),
        {"seed": _THREE, "staleness": ("16",)},
    ),
    "table3": Experiment(
        "Table 3: step time and throughput",
        ("--updates=120", "--eval.every=0", "--eval.final-questions=16", *_APART),
        tuple(
            Grid({"seed": _FIVE, "task": ("search", "math")}, settings, label)
            for label, settings in (
                ("COPC, asynchronous", ("--method=copc", "--staleness=16")),
                ("PPO, asynchronous", ("--method=ppo", "--staleness=16")),
                ("PPO, synchronous", ("--method=ppo", "--staleness=0")),
            )
        ),
        {"seed": _THREE, "task": ("search",)},
        ("--updates=60",),
    ),
    "drift": Experiment(
        "Drift: larger steps on older rollouts, where each method breaks",
        ("--task=search", *_EXACT),
        (
            Grid(
                {
                    "seed": _FIVE,
                    "actor.learning_rate": ("3e-4", "1e-3", "2e-3", "4e-3"),
                    "staleness": ("4", "16", "64"),
                    "method": (
                        *("copc", "copc_no_rc", "ppo", "ppo_rc", "copc_restoring"),
                        *("areal", "vtrace", "reinforce"),
                    ),
                }
            ),
        ),
        {
            "seed": _THREE,
            "actor.learning_rate": ("3e-4", "1e-3", "2e-3"),
            "staleness": ("64",),
            "method": ("copc", "copc_no_rc", "ppo", "ppo_rc", "copc_restoring"),
        },
    ),
}
# At size smoke every axis has its ends only, and one seed: it shows that a command works.
_SMOKE = ("--updates=8", "--eval.every=2", "--eval.questions=16", "--eval.final-questions=16")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: of its folder, unique within the sweep.
        label: of its grid.
        flags: its command line.
        config: what that resolves to.
    """

    name: str
    label: str
    flags: tuple[str, ...]
    config: RunConfig


# --- From the command line to runs --------------------------------------------------------------


def read_settings(arguments: Sequence[str]) -> Settings:
    """Settings of run.py by name, with the words of their values.

    Raises:
        SystemExit: a word that belongs to no flag.
    """
    settings: Settings = {}
    words: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            words = settings[name.replace("-", "_")] = [value] if equals else []
        elif words is None:
            refuse(
                f"{argument!r} is neither an experiment nor a setting; experiments are "
                f"{', '.join(EXPERIMENTS)}, settings look like --staleness=16"
            )
        else:
            words.append(argument)
    return settings


def write_settings(settings: Settings) -> tuple[str, ...]:
    """The command line of settings."""
    return tuple(
        itertools.chain.from_iterable(
            (f"--{name}={words[0]}",) if len(words) == 1 else (f"--{name}", *words)
            for name, words in settings.items()
        )
    )


def plan(name: str | None, size: str, arguments: Sequence[str]) -> list[Cell]:
    """All runs of an experiment or of a grid, each checked as run.py would check it.

    Args:
        name: of an experiment, or None.
        size: one of SIZES, of an experiment.
        arguments: settings of run.py and axes.

    Raises:
        SystemExit: with a message, where a setting, a value or an axis cannot be.
    """
    given = read_settings(arguments)
    axes = {
        setting.removeprefix("grid."): [v for word in given.pop(setting) for v in word.split(",")]
        for setting in list(given)
        if setting.startswith("grid.")
    }
    for setting, values in axes.items():
        if not all(values) or len(set(values)) < len(values):
            refuse(f"--grid.{setting} must be different values, such as A,B; got {values}")
        if setting in given:
            refuse(f"--{setting} and --grid.{setting} are both there: give one of them")
    for setting in ("run_dir", "resume", "check"):
        if setting in given or setting in axes:
            refuse(f"--{setting} is not a sweep's to choose")
    experiment = EXPERIMENTS[name] if name else Experiment("", (), (Grid(),))
    base = [*experiment.settings]
    if size == "small":
        base += experiment.small_settings
    if size == "smoke":
        base += _SMOKE
    held = {setting for grid in experiment.grids for setting in grid.axes}
    added = {k: v for k, v in axes.items() if k not in held}
    cells: dict[str, Cell] = {}
    for grid in experiment.grids:
        own = {**grid.axes}
        if size == "small":
            own = {k: experiment.small.get(k, v) for k, v in own.items()}
        if size == "smoke":
            own = {k: v[:1] if k == "seed" else tuple({v[0]: 0, v[-1]: 0}) for k, v in own.items()}
        own = {k: axes.get(k, v) for k, v in own.items() if k not in given} | added
        for values in itertools.product(*own.values()):
            choice = dict(zip(own, values, strict=True))
            settings = read_settings([*base, *grid.settings])
            settings |= {setting: [value] for setting, value in choice.items()} | given
            if "samples_per_prompt" not in given:
                _hold_samples(settings)
            cell = _cell(grid.label, choice, settings)
            cells.setdefault(cell.name[-_DIGEST:], cell)
    return list(cells.values())


def _hold_samples(settings: Settings) -> None:
    """Give a method no larger groups than it takes."""
    row = METHODS.get(settings.get("method", ["copc"])[-1])
    if row is not None and row.max_samples_per_prompt and "samples_per_prompt" in settings:
        settings["samples_per_prompt"] = [str(row.max_samples_per_prompt)]


def _cell(label: str, choice: Mapping[str, str], settings: Settings) -> Cell:
    flags = write_settings(settings)
    config = parse(flags)
    computed = {k: v for k, v in to_dict(config).items() if k not in _WATCHED}
    if len(set(computed.pop("cpus") or ())) > 1:
        computed["cpus"] = 2
    digest = hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:_DIGEST]
    words = [label, *(f"{name.rpartition('.')[2]}-{value}" for name, value in choice.items())]
    name = re.sub(r"[^\w.+-]+", "_", "-".join(word for word in words if word))[:100]
    return Cell(f"{name or 'run'}-{digest}", label, flags, config)


# --- Rows ---------------------------------------------------------------------------------------


def read_rows(folder: str | Path, name: str = ROWS_FILE) -> list[dict[str, Any]]:
    """The rows of a sweep, the newest of each run, in the order in which runs first ended.

    A last line that a killed process left unfinished is passed over. `name` may be PLANNED_FILE,
    whose rows are of runs that were asked for: state "missing", and a record without figures.

    Raises:
        ValueError: any other line is not a row.
    """
    path = Path(folder) / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows[row["run"]] = row
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a row of a sweep") from error
    return list(rows.values())


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; lists stay as they are."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings in which the configurations of these rows differ."""
    configs = [flat(row["config"]) for row in rows]
    names = dict.fromkeys(itertools.chain.from_iterable(configs))
    ignored = tuple(name for name in _WATCHED if name != "cpus")
    return [
        name
        for name in names
        if name.partition(".")[0] not in ignored
        and len({json.dumps(config.get(name)) for config in configs}) > 1
    ]


def write_csv(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows.csv: settings that differ, then how runs ended, then their figures."""
    settings = differing(rows)
    records = [
        {
            **{k: v for k, v in row.items() if k not in ("config", "flags", "record")},
            **{name: flat(row["config"]).get(name) for name in settings},
            **{k: v for k, v in row["record"].items() if not isinstance(v, list)},
        }
        for row in rows
    ]
    names = list(dict.fromkeys(itertools.chain.from_iterable(records)))
    partial = folder / "rows.csv.partial"
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    partial.replace(folder / "rows.csv")


def _last_error(log: Path) -> str:
    """The line of a log that says why a run failed: the last that names an error, or the last."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    lines = [line.strip() for line in lines[-200:] if line.strip()]
    errors = [line for line in lines if re.match(r"error\b|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["(no output)"])[-1][:500]


# --- Runs ---------------------------------------------------------------------------------------


class Job:
    """A run in a process of its own, with its server, on the cores that it was given."""

    def __init__(self, cell: Cell, folder: Path, cores: Sequence[int] | None):
        self.cell, self.cores = cell, cores
        self.run_dir = folder / "runs" / cell.name
        self._log_file = folder / "logs" / f"{cell.name}.log"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        # What earlier attempts took; a sweep that was killed could not add its last one.
        self._spent_file = self._log_file.with_suffix(".json")
        self._spent = {"attempts": 0, "seconds": 0.0, "cpu_seconds": 0.0}
        with contextlib.suppress(OSError, ValueError):
            self._spent |= json.loads(self._spent_file.read_text())
        self._spent["attempts"] += 1
        self._spent_file.write_text(json.dumps(self._spent))
        flags = [*cell.flags, f"--run-dir={self.run_dir}"]
        if Checkpointer(self.run_dir / "checkpoints").latest() is not None:
            flags = [f"--resume={self.run_dir}"]
        elif self.run_dir.exists():
            # Nothing that could be gone on with: metrics alone would make run.py refuse.
            shutil.rmtree(self.run_dir)
        if cores is not None:
            flags += ["--cpus", str(cores[0]), str(cores[-1])]
        self.first_step = self.step()
        self.started = time.monotonic()
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--run", str(os.getpid()), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for the sweep, which then ends its runs in order.
                start_new_session=True,
            )

    def step(self) -> int:
        """The last update that the run has logged."""
        path = self.run_dir / metrics.METRICS_FILE
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 65_536, 0))
            steps = re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def warm(self) -> bool:
        """Whether the run is past its warm start, which others may then share."""
        return (self.run_dir / metrics.METRICS_FILE).exists()

    def poll(self) -> dict[str, Any] | None:
        """The row of the run once its process has ended; None before."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._spent["seconds"] += round(time.monotonic() - self.started, 2)
        self._spent["cpu_seconds"] += round(usage.ru_utime + usage.ru_stime, 2)
        self._spent_file.write_text(json.dumps(self._spent))
        ended = self.process.returncode
        config = self.cell.config
        try:
            record, fault = comparison.summarize(self.run_dir, config.staleness), ""
        except ValueError as error:
            # A run without metrics has the same record without figures.
            record, fault = comparison.summarize(self.run_dir / "none"), str(error)
        finished = ended == 0 and record["updates"] >= config.updates
        return {
            "run": self.cell.name,
            "label": self.cell.label,
            "state": "finished" if finished else "failed",
            "exit": ended,
            "error": "" if finished else fault or _last_error(self._log_file),
            **self._spent,
            "config": to_dict(config),
            "flags": list(self.cell.flags),
            "record": record,
        }

    def stop(self) -> None:
        """Ask the run to save itself and end."""
        # Not through Popen, which would take the end of the process from `poll` and its figures.
        os.kill(self.process.pid, signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Let a stopped run save itself until the deadline, then end it with all its processes."""
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_for(parent: int, flags: Sequence[str]) -> None:
    """Be one run of the sweep `parent`: run.py, ended in order when the sweep is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sweep watch", daemon=True).start()
    import run

    run.main(list(flags))


def _warm_start(cell: Cell) -> str:
    """What the warm start of a run depends on: runs that share it wait for the first of them."""
    config = to_dict(cell.config)
    names = ("task", "seed", "model", "tiny", "sft", "search", "math", "data", "rollout", "preset")
    return json.dumps([config[name] for name in names])


class Sweep:
    """Runs cells, a core each, and writes a row as each ends."""

    def __init__(
        self, folder: Path, cells: Sequence[Cell], cores: Sequence[int] | None, keep: bool
    ):
        self.folder, self.keep = folder, keep
        done = {row["run"] for row in read_rows(folder) if row["state"] == "finished"}
        self.pending = [cell for cell in cells if cell.name not in done]
        self.total = len(cells)
        self.failed = 0
        self.active: list[Job] = []
        # Runs that choose two cores take the machine for themselves.
        self.apart = any(len(set(cell.config.cpus or ())) > 1 for cell in cells)
        self.slots: list[int | None] = [None] if self.apart or not cores else list(cores)
        self._warm: set[str] = set()
        self._work = self._worked = 0.0
        self._said = -_PROGRESS_S

    def run(self) -> None:
        """Go on until nothing is left; whatever ends this ends all runs too."""
        try:
            while self.pending or self.active:
                self._start_some()
                self._take_finished()
                if time.monotonic() - self._said >= _PROGRESS_S:
                    self._say()
                time.sleep(_POLL_S)
        finally:
            deadline = time.monotonic() + _SAVE_S
            for job in self.active:
                job.stop()
            for job in self.active:
                job.end(deadline)

    def _start_some(self) -> None:
        while self.pending and len(self.active) < len(self.slots):
            self._warm |= {_warm_start(job.cell) for job in self.active if job.warm()}
            busy = {_warm_start(job.cell) for job in self.active} - self._warm
            cell = next((c for c in self.pending if _warm_start(c) not in busy), None)
            if cell is None:
                return
            self.pending.remove(cell)
            used = [job.cores[0] for job in self.active if job.cores]
            core = next(slot for slot in self.slots if slot not in used)
            self.active.append(Job(cell, self.folder, None if core is None else [core]))

    def _take_finished(self) -> None:
        for job in list(self.active):
            row = job.poll()
            if row is None:
                continue
            self.active.remove(job)
            self._work += row["record"]["updates"] - job.first_step
            self._worked += time.monotonic() - job.started
            with (self.folder / ROWS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            write_csv(self.folder, read_rows(self.folder))
            if row["state"] == "finished":
                if not self.keep:
                    shutil.rmtree(job.run_dir / "checkpoints", ignore_errors=True)
                record = row["record"]
                told = (
                    f"{record['score']} {_percent(record['start'])} to {_percent(record['final'])}"
                )
                told += ", collapsed" if record["collapsed"] else ""
            else:
                self.failed += 1
                told = f"failed: {row['error']}"
            print(f"{job.cell.name}: {told} ({row['cpu_seconds']:.0f} CPU seconds)", flush=True)
            self._said = -_PROGRESS_S

    def _say(self) -> None:
        self._said = time.monotonic()
        done = self.total - len(self.pending) - len(self.active) - self.failed
        running = ", ".join(
            f"{job.cell.name} {job.step()}/{job.cell.config.updates}" for job in self.active
        )
        text = f"[{done}/{self.total} finished, {self.failed} failed] {running}"
        now = time.monotonic()
        work = self._work + sum(job.step() - job.first_step for job in self.active)
        worked = self._worked + sum(now - job.started for job in self.active)
        left = sum(cell.config.updates for cell in self.pending)
        left += sum(job.cell.config.updates - job.step() for job in self.active)
        if work and left:
            seconds = round(left * worked / work / len(self.slots))
            text += f" | {datetime.timedelta(seconds=seconds)} left"
        print(text, flush=True)


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"


def machine() -> dict[str, Any]:
    """What the figures of a sweep were measured on."""
    import jax

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    return {
        "processor": name,
        "cores": len(_cores()),
        "system": platform.system(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _commit() -> str | None:
    """The state of the code, where it is a git checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against a second sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(f"{folder}: another sweep is at work there")
        yield


def _note(folder: Path, name: str | None, size: str, command: str, cells: Sequence[Cell]) -> None:
    """Write sweep.json and planned.jsonl: what was asked for, each time, and on what it ran."""
    known = {row["run"] for row in read_rows(folder, PLANNED_FILE)}
    empty = comparison.summarize(folder / "none")
    with (folder / PLANNED_FILE).open("a", encoding="utf-8") as file:
        for cell in cells:
            if cell.name not in known:
                row = {"run": cell.name, "label": cell.label, "state": "missing"}
                row |= {"config": to_dict(cell.config), "record": empty}
                file.write(json.dumps(row) + "\n")
    path = folder / SWEEP_FILE
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"started": []}
    asked = {"command": command, "commit": _commit(), "machine": machine()}
    started = [*(each for each in before["started"] if each != asked), asked]
    note = {"experiment": name, "size": size, "started": started}
    path.write_text(json.dumps(note, indent=2) + "\n")


def _list(folder: Path, cells: Sequence[Cell], out: IO[str]) -> None:
    states = {row["run"]: row["state"] for row in read_rows(folder)}
    for cell in cells:
        state = states.get(cell.name, "begun" if (folder / "runs" / cell.name).exists() else "")
        print(f"{cell.name}  {state}".rstrip(), file=out)
    left = [cell.config for cell in cells if states.get(cell.name) != "finished"]
    text = f"{len(cells)} runs, {len(left)} left"
    if left and all(config.preset == "quick" for config in left):
        seconds = sum(QUICK_START_S + QUICK_UPDATE_S * config.updates for config in left)
        text += f", some {seconds / 60:.0f} CPU minutes by estimate"
    print(text, file=out)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run or list a sweep and return its folder.

    Raises:
        SystemExit: 2 for a wrong command, 1 when a run has failed, 130 after Ctrl-C and SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--run"]:
        run_for(int(arguments[1]), arguments[2:])
        raise SystemExit(0)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other settings are those of run.py: see its --help.",
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of a named experiment")
    parser.add_argument("--out", type=Path, help="folder of the sweep")
    parser.add_argument("--cores", help="cores to use, such as 0,1; all of this process by default")
    parser.add_argument("--list", action="store_true", help="print the runs and start none")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints of finished runs")
    own, rest = parser.parse_known_args(arguments)
    name = rest.pop(0) if rest and rest[0] in EXPERIMENTS else None
    cells = plan(name, own.size, rest)
    folder = own.out or Path("runs/sweeps") / (f"{name}-{own.size}" if name else "grid")
    if own.list:
        _list(folder, cells, sys.stdout)
        return folder
    cores = _cores()
    if name == "table3" and len(cores) < 2:
        refuse("table3 needs two cores, one for the learner and one for the server")
    if own.cores is not None:
        try:
            cores = [int(core) for core in own.cores.split(",")]
        except ValueError:
            refuse(f"--cores must look like 0,1; got {own.cores!r}")
        if not set(cores) <= set(_cores()):
            refuse(f"--cores {own.cores} must be among the cores of this process, {_cores()}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pinned = cores if hasattr(os, "sched_setaffinity") else None
    with _alone(folder):
        command = f"python experiments/sweep.py {shlex.join(arguments)}"
        _note(folder, name, own.size, command, cells)
        sweep = Sweep(folder, cells, pinned, own.keep)
        print(f"{folder}: {len(cells)} runs, {len(sweep.pending)} left", flush=True)
        try:
            sweep.run()
        except KeyboardInterrupt:
            print("stopped; the same command goes on", flush=True)
            raise SystemExit(130) from None
    print(f"rows: {folder / ROWS_FILE}", flush=True)
    if sweep.failed:
        raise SystemExit(1)
    return folder


if __name__ == "__main__":
    main()
