"""Whether a long run holds: memory, threads, open files and compilations of every process.

    uv run python benchmarks/long_run.py --task=search
    uv run python benchmarks/long_run.py --task=math --full=True

trains the smallest model for 2,000 updates with the real command, embedded server included. The
search task asks a retrieval server of its own, the math task starts the workers of its sandbox and
its verifier; `--full=True` adds checkpoints, evaluations and recorded episodes. Every process is
looked at once a second. After warm-up the samples are averaged over 20 equal stretches of updates,
and a line is laid through the means: its slope is memory an update, with the 95% interval of
Student's t, for resident memory and for its anonymous part with what was swapped out: of mapped
files a busy machine takes pages back. Counts are compared by their medians over the first and the
last quarter. Ends with status 1 when a slope is at the limit or above it, or a count has grown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.table import Table

RUN = pathlib.Path(__file__).parent.parent / "experiments" / "run.py"
SMALLEST = (
    *("--batch-size=4", "--micro-batches=1", "--staleness=4", "--critic-warmup-updates=2"),
    *("--tiny.hidden-size=32", "--tiny.intermediate-size=64", "--tiny.num-layers=1"),
    *("--tiny.num-heads=2", "--tiny.num-kv-heads=1", "--sft.demonstrations=500"),
    *("--rollout.slots=8", "--rollout.max-in-flight=8"),
)
STRETCHES = 20
# Student's t, two sides, 95%, for a line through that many means.
STUDENT_T = 2.101
# What is counted, and by how much it may differ: pools of libraries start and end threads now and
# then, and open files are connections, too. One that leaks with each checkpoint makes 25 of them.
COUNTS = {"threads": 2, "files": 2, "compilations": 0}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    task: Literal["search", "math"] = "search"
    """Task of the run; decides which workers there are."""
    full: bool = False
    """Checkpoints every 50 updates, evaluations every 100, recorded episodes every 10."""
    updates: int = 2000
    """Learner updates."""
    warm_up: int = 300
    """First updates, which are left out."""
    limit: float = 0.1
    """Largest slope, in MB an update."""
    out: pathlib.Path = pathlib.Path("runs/benchmarks")
    """Folder for the JSON file and the picture."""
    cache_dir: pathlib.Path = pathlib.Path(".cache/copc_jax")
    """Folder of what is made once: tokenizer, warm start, compiled programs."""


@dataclasses.dataclass
class Track:
    """What was seen of one process: of each look the update, resident and anonymous MB, counts."""

    role: str
    rows: list[tuple[float, ...]] = dataclasses.field(default_factory=list)


def role_of(process: psutil.Process, learner: int) -> str:
    """Say what a process does, by its command line."""
    if process.pid == learner:
        return "learner"
    command = process.cmdline()
    for word, role in (
        ("copc_jax.rollout.server", "server"),
        ("copc_jax.tools.retriever", "retriever"),
        ("verify.py", "verifier"),
        ("monty", "sandbox"),
    ):
        if any(word in argument for argument in command):
            return role
    return pathlib.Path(command[0]).name if command else "?"


class Watch:
    """Looks at all processes of a run; every process keeps its name, such as "sandbox 2"."""

    def __init__(self, roots: Sequence[subprocess.Popen[Any]], run_dir: pathlib.Path):
        self._roots = [psutil.Process(root.pid) for root in roots]
        self._metrics = run_dir / "metrics.jsonl"
        # Processes that compile say so, a line a program.
        self._logs = {"learner": run_dir.parent / "output", "server": run_dir / "server.log"}
        self._positions: dict[pathlib.Path, tuple[int, int]] = {}
        self.tracks: dict[int, Track] = {}
        self._numbers: dict[str, int] = {}

    def lines(self, path: pathlib.Path, word: bytes) -> int:
        """Count the lines of a growing file that hold a word."""
        position, count = self._positions.get(path, (0, 0))
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            count += sum(word in line for line in whole.splitlines())
            position += len(whole)
            self._positions[path] = position, count
        return count

    def look(self) -> int:
        """Take one look; gives the number of updates so far."""
        update = max(self.lines(self._metrics, b'"learner/seconds"'), 0)
        compiled = {
            role: self.lines(path, b"Finished XLA compilation") for role, path in self._logs.items()
        }
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                for process in (root, *root.children(recursive=True)):
                    # It may end between two questions.
                    with contextlib.suppress(psutil.Error, OSError):
                        self._look_at(process, update, compiled)
        return update

    def _look_at(self, process: psutil.Process, update: int, compiled: dict[str, int]) -> None:
        if process.pid not in self.tracks:
            role = role_of(process, self._roots[0].pid)
            number = self._numbers[role] = self._numbers.get(role, 0) + 1
            self.tracks[process.pid] = Track(role if number == 1 else f"{role} {number}")
        track = self.tracks[process.pid]
        with process.oneshot():
            memory = process.memory_info().rss / 2**20
            threads, files = process.num_threads(), process.num_fds()
        own = anonymous(process.pid)
        track.rows.append((update, memory, own, threads, files, compiled.get(track.role, 0)))


def anonymous(pid: int) -> float:
    """Give the memory of a process that no file backs, resident or swapped out, in MB.

    Raises:
        psutil.ZombieProcess: it has ended and holds none.
    """
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in sizes:
        raise psutil.ZombieProcess(pid)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


@contextlib.contextmanager
def retriever(folder: pathlib.Path) -> Iterator[tuple[subprocess.Popen[Any], str]]:
    """Serve the passages of the default task; gives the process and its address."""
    command = [sys.executable, "-m", "copc_jax.tools.retriever"]
    corpus = folder / "corpus.jsonl"
    subprocess.run([*command, "factbook", "--out", str(corpus)], check=True)
    serve = [*command, "serve", "--corpus", str(corpus), "--port", "0"]
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def command_of(settings: Settings, run_dir: pathlib.Path) -> list[str]:
    """Give the command line of the run."""
    sizes = {"search": ("1024", "160", "300"), "math": ("512", "96", "300")}[settings.task]
    vocabulary, tokens, warm_start = sizes
    options = [f"--tiny.vocab-size={vocabulary}", f"--rollout.max-tokens={tokens}"]
    options += [f"--sft.updates={warm_start}", f"--updates={settings.updates}"]
    options += [f"--cache-dir={settings.cache_dir}", f"--run-dir={run_dir}"]
    if settings.full:
        options += ["--checkpoint-every=50", "--eval.every=100", "--eval.questions=16"]
        options += ["--viewer.every=10", "--eval.final-questions=64"]
    else:
        options += [f"--checkpoint-every={settings.updates}", "--eval.every=0", "--viewer.every=0"]
        options += ["--eval.final-questions=16"]
    return [sys.executable, str(RUN), f"--task={settings.task}", *SMALLEST, *options]


def measure(settings: Settings, folder: pathlib.Path) -> tuple[list[Track], list[str], float]:
    """Run and look; gives what was seen, the command line, and CPU seconds of all processes."""
    run_dir = folder / "run"
    command = command_of(settings, run_dir)
    with contextlib.ExitStack() as stack:
        others = []
        if settings.task == "search":
            process, url = stack.enter_context(retriever(folder))
            others.append(process)
            command += [f"--search.retriever-url={url}"]
        output = stack.enter_context((folder / "output").open("wb"))
        environment = {**os.environ, "JAX_LOG_COMPILES": "1"}
        learner = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            watch = Watch([learner, *others], run_dir)
            shown = 0
            while learner.poll() is None:
                update = watch.look()
                if update >= shown + 100:
                    shown = update
                    print(f"update {update}", flush=True)
                time.sleep(1.0)
        finally:
            if learner.poll() is None:
                learner.terminate()
                learner.wait()
        if learner.returncode:
            raise SystemExit((folder / "output").read_text()[-3000:])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return list(watch.tracks.values()), command, json.loads(lines[-1])["time"]


def judge(track: Track, settings: Settings) -> dict[str, Any] | None:
    """Give slope and counts of one process; None if it did not live through the measured time."""
    rows = np.array(track.rows)
    rows = rows[(rows[:, 0] >= settings.warm_up) & (rows[:, 0] < settings.updates)]
    edges = np.linspace(settings.warm_up, settings.updates, STRETCHES + 1)
    stretch = np.searchsorted(edges, rows[:, 0], side="right") - 1 if len(rows) else np.zeros(0)
    parts = [rows[stretch == index] for index in range(STRETCHES)]
    if not all(map(len, parts)):
        return None
    x, resident, own = np.array([part[:, :3].mean(axis=0) for part in parts]).T
    quarters = [np.concatenate(parts[: STRETCHES // 4]), np.concatenate(parts[-STRETCHES // 4 :])]
    counts = {
        name: [float(np.median(quarter[:, 3 + column])) for quarter in quarters]
        for column, name in enumerate(COUNTS)
    }
    lines = {"resident": line_through(x, resident), "anonymous": line_through(x, own)}
    grown = [name for name, (first, last) in counts.items() if last > first + COUNTS[name]]
    steep = [name for name, line in lines.items() if line["slope_mb"] >= settings.limit]
    return {"process": track.role, **lines, **counts, "grown": steep + grown, "looks": len(rows)}


def line_through(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Give the slope of memory by update and its interval, and the memory at both ends."""
    centered = x - x.mean()
    slope = float(centered @ y / (centered @ centered))
    rest = y - y.mean() - slope * centered
    error = float(np.sqrt(rest @ rest / (STRETCHES - 2) / (centered @ centered)))
    interval = [slope - STUDENT_T * error, slope + STUDENT_T * error]
    return {"mb": [float(y[0]), float(y[-1])], "slope_mb": slope, "interval_mb": interval}


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """Show the results; each pair is the first and the last stretch."""
    table = Table("process", "memory, MB", "MB an update", "95% interval", *COUNTS, "grown")
    for result in results:
        for name in ("resident", "anonymous"):
            line = result[name]
            first = name == "resident"
            table.add_row(
                result["process"] if first else f"  {name}",
                "{:.0f} to {:.0f}".format(*line["mb"]),
                f"{line['slope_mb']:+.5f}",
                "{:+.5f} to {:+.5f}".format(*line["interval_mb"]),
                *("{:.0f} to {:.0f}".format(*result[each]) if first else "" for each in COUNTS),
                (", ".join(result["grown"]) or "nothing") if first else "",
            )
    return table


def draw(tracks: Sequence[Track], settings: Settings, path: pathlib.Path) -> None:
    """Draw memory by update, a curve a process."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for track in tracks:
        update, memory = np.array(track.rows)[:, :2].T
        axes.plot(update, memory, label=track.role, linewidth=1)
    axes.axvline(settings.warm_up, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="update", ylabel="resident memory, MB", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__, config=(tyro.conf.FlagConversionOff,))
    name = f"long_run-{settings.task}{'-full' if settings.full else ''}"
    settings.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        tracks, command, seconds = measure(settings, pathlib.Path(folder))
    judged = [(track, judge(track, settings)) for track in tracks]
    whole = [(track, result) for track, result in judged if result is not None]
    results = [result for _, result in whole]
    Console(width=140).print(table_of(results))
    print(f"{settings.updates} updates in {seconds:.0f} s")
    short = len(judged) - len(whole)
    print(f"{short} processes that ended before the end or began after warm-up are left out")
    draw([track for track, _ in whole], settings, settings.out / f"{name}.png")
    report = {
        "command": command,
        "machine": platform.platform(),
        "python": platform.python_version(),
        "updates": settings.updates,
        "warm_up": settings.warm_up,
        "seconds": time.monotonic() - started,
        "processes": results,
        "left_out": short,
    }
    path = settings.out / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{path}\n{path.with_suffix('.png')}")
    if not results or any(result["grown"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
