"""What a run logs, and how a person sees it go on: metrics.jsonl, TensorBoard, episodes, progress.

One line of metrics.jsonl is one learner update (or, at step 0, the state before the first one):

    step                      learner version after the update
    time                      seconds since the start of the run, pauses between resumes left out
    reward/mean, reward/em    of the trained batch: mean reward, exact match (0 to 1); the math
                              task has accuracy where the search task has em, here and below
    task/*                    figures of the task, mean of an episode, such as searches
    source/*/reward, episodes  mean reward and number of the batch's episodes of each source, where
                              there are several
    lag/mean, p50, max        staleness of the batch's action tokens, in learner updates
    lag/histogram             list, number of action tokens at lag 0, 1, ...
    lag/trajectory_histogram  list, number of trajectories by the lag of their oldest action token
    learner/seconds           time in the update program
    learner/wait_seconds      time that the learner waited for rollouts
    learner/publish_seconds, learner/eval_seconds, learner/checkpoint_seconds
    rollout/tokens_per_second sampled tokens
    rollout/busy_fraction     share of the time since the last line in which the generator sampled
    rollout/admission_fraction  share of that time in which it waited for admission
    rollout/publish_fraction  share of that time in which servers were being given new weights
    rollout/logprob_gap_mean, sd, p95, max  |learner - server| log-prob, in nats, of the
                              logprob_gap_tokens action tokens that servers scored since the last
                              line with a version that the learner has trained from; without
                              logprob_gap_skipped trajectories that gave no comparison
    rollout/decode_gap_mean, sd, p95, max  the same of the decode_gap_tokens action tokens of the
                              batch at lag 0, as they were sampled
    eval/em, em_low, em_high  greedy held-out exact match (0 to 1) and its 95% interval
    eval/count                held-out questions of that evaluation
    actor/*, critic/*         loss metrics by the names of copc_jax.losses
    coupling/*                figures by the names of copc_jax.analysis, of COPC's mask and weights
                              at the run's tolerances whatever the method

Every name but step and time may be absent, and unknown names are kept as they are. A value is a
number or a list of numbers; null stands for one that is not finite. evaluations.jsonl, if there is
one, holds evaluations made later, in lines of the same form.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EPISODES_FILE = "episodes.jsonl"
EPISODES_PAGE = "episodes.html"
CONFIG_FILE = "config.json"
COMMAND_FILE = "command.txt"

# What an evaluation results in, by the name that the tasks give it (0 to 1).
SCORES = {"em": "exact match", "accuracy": "accuracy"}
_SCORED = ("eval", "reward")
# protobuf makes these classes at import, where type checkers do not see them.
_EVENTS: Any = event_pb2
_SUMMARIES: Any = summary_pb2
# Between two flushes of TensorBoard's file, in seconds.
_FLUSH_S = 10.0

# Two-sided 95% points of Student's t by degrees of freedom, then of the normal distribution.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_NORMAL = 1.959964


def confidence_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion.

    Unlike mean ± 1.96 standard errors it stays within [0, 1] and has a width at 0 and n successes.

    Raises:
        ValueError: n is not positive or successes lie outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got {successes} of {n}")
    share, z = successes / n, _NORMAL
    center = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # At the ends the exact bounds are 0 and 1, which rounding misses.
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == n else center + half


def student_t(degrees: int) -> float:
    """Two-sided 95% point of Student's t, for intervals of what has that many degrees of freedom.

    Raises:
        ValueError: degrees is not positive.
    """
    if degrees < 1:
        raise ValueError(f"need at least one degree of freedom, got {degrees}")
    if degrees <= len(_STUDENT_T):
        return _STUDENT_T[degrees - 1]
    # Past the table, the expansion of t around the normal point z: good to a thousandth.
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95% interval of the mean of independent values, such as seeds.

    With one value the interval is infinite: one seed says nothing about other seeds.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("mean_interval needs at least one value")
    sample = np.asarray(values, np.float64)
    mean, degrees = float(sample.mean()), sample.size - 1
    if degrees == 0:
        return mean, -math.inf, math.inf
    half = student_t(degrees) * float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return mean, mean - half, mean + half


def lag_values(tokens: np.ndarray, trajectories: np.ndarray) -> dict[str, Any]:
    """The `lag/*` values of one line from counts by lag: of action tokens and of trajectories."""
    values: dict[str, Any] = {
        "lag/histogram": tokens.tolist(),
        "lag/trajectory_histogram": trajectories.tolist(),
    }
    if tokens.sum():
        values["lag/mean"] = float(np.average(np.arange(tokens.size), weights=tokens))
        values["lag/p50"] = float(median_count(tokens))
        values["lag/max"] = float(np.flatnonzero(tokens)[-1])
    return values


def median_count(counts: np.ndarray) -> int:
    """Lower median of a histogram over 0, 1, ..."""
    return int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))


# Of several processes: what is added up, and what is a mean over as many episodes on each. All
# other values are those of process 0, or the same on all.
_ADDED = (
    *("batch/", "lag/histogram", "lag/trajectory_histogram", "rollout/tokens_per_second"),
    *("rollout/buffered", "rollout/in_flight", "rollout/failed", "rollout/aborted"),
    *("rollout/reissued", "rollout/lost", "rollout/filtered", "rollout/skipped"),
    "rollout/logprob_gap_skipped",
)
_AVERAGED = ("reward/", "task/", "length/", "rollout/busy_fraction", "rollout/admission_fraction")


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of one line from those of several processes, which trained on equal shares.

    Counts and rates of the generator are added up; figures of episodes and shares of time are
    means; the log-prob gap is that of all tokens, but for its p95, the largest of the processes'.
    Times, memory and everything that the learner computes are those of process 0.
    """
    result = dict(rows[0])
    if len(rows) == 1:
        return result
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        if name.startswith(_ADDED):
            result[name] = _sum(values)
        elif name.startswith(_AVERAGED):
            # A figure that a process does not name is 0 in its episodes.
            result[name] = sum(values) / len(rows)
    for name in {name for row in rows for name in row if _of_source(name)}:
        reward = name.removesuffix("/episodes") + "/reward"
        counts = [row.get(name, 0.0) for row in rows]
        result[reward] = float(np.average([row.get(reward, 0.0) for row in rows], weights=counts))
        result[name] = sum(counts)
    if "lag/histogram" in result:
        counts = (result["lag/histogram"], result["lag/trajectory_histogram"])
        result |= lag_values(*(np.asarray(each) for each in counts))
    return (
        result | _merged_gap(rows, "rollout/logprob_gap") | _merged_gap(rows, "rollout/decode_gap")
    )


def _of_source(name: str) -> bool:
    return name.startswith("source/") and name.endswith("/episodes")


def _sum(values: Sequence[Any]) -> Any:
    """Sum of numbers, or of histograms of any length."""
    if not isinstance(values[0], list):
        return sum(values)
    total = np.zeros(max(map(len, values)), np.int64)
    for value in values:
        total[: len(value)] += np.asarray(value, np.int64)
    return total.tolist()


def _merged_gap(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    rows = [row for row in rows if f"{name}_mean" in row]
    if not rows:
        return {}
    tokens = [row[f"{name}_tokens"] for row in rows]
    means, sds = (np.asarray([row[f"{name}_{kind}"] for row in rows]) for kind in ("mean", "sd"))
    mean = float(np.average(means, weights=tokens))
    square = float(np.average(sds**2 + means**2, weights=tokens))
    return {
        f"{name}_tokens": float(sum(tokens)),
        f"{name}_mean": mean,
        f"{name}_sd": math.sqrt(max(square - mean**2, 0.0)),
        **{f"{name}_{kind}": max(row[f"{name}_{kind}"] for row in rows) for kind in ("p95", "max")},
    }


def read_metrics(run_dir: str | pathlib.Path, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The lines of a metrics file, [] if there is none.

    A last line that a killed process left unfinished is passed over.

    Raises:
        ValueError: any other line is not a JSON object with a step.
    """
    path = pathlib.Path(run_dir) / name
    if not path.exists():
        return []
    lines, rows = path.read_text(encoding="utf-8").splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: not a JSON object with a step")
    return rows


def score_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which of SCORES these rows hold; the first when they hold none."""
    held = [
        score
        for score in SCORES
        if any(row.get(f"{group}/{score}") is not None for row in rows for group in _SCORED)
    ]
    return (held or list(SCORES))[0]


class MetricsLogger:
    """Writes the metrics of a run and shows its progress.

    Args:
        run_dir: the run's directory; made if missing.
        total_steps: updates of the whole run, for the bar and the time left.
        resume_step: None for a new run. When a run goes on from the checkpoint of this step, later
            lines of its files are dropped, so that no step appears twice.
        console: show progress: a live display on a terminal, otherwise plain lines.
        console_seconds: shortest time between two plain lines.
        episodes_bytes: size that episodes.jsonl does not grow beyond.
        stream: text stream of the display. Standard error by default, which leaves pipes alone.

    Raises:
        FileExistsError: `run_dir` already holds metrics and `resume_step` is None.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        *,
        total_steps: int | None = None,
        resume_step: int | None = None,
        console: bool = True,
        console_seconds: float = 5.0,
        episodes_bytes: int = 64_000_000,
        stream: Any = None,
    ):
        self.run_dir = pathlib.Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        kept = _prepare(path, resume_step)
        self._last_step = kept[-1]["step"] if kept else -1
        self._start = time.monotonic() - (kept[-1]["time"] if kept else 0.0)
        self._file = path.open("a", encoding="utf-8")
        episodes = _prepare(self.run_dir / EPISODES_FILE, resume_step)
        self._episodes_bytes = episodes_bytes
        self._episodes_full = any("limit_bytes" in row for row in episodes)
        # Written here and not by tensorboardX's thread: when that cannot write, it ends, and
        # whoever logs waits for it for ever.
        folder = self.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        # The name holds only host and second: a quick resume would overwrite the file.
        self._tensorboard = EventsWriter(str(folder / "events"), f".after{self._last_step}")
        self._flushed = time.monotonic()
        if resume_step is not None:
            start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
            self._tensorboard.write_event(_EVENTS.Event(step=resume_step + 1, session_log=start))
        self._display = _Display(stream or sys.stderr, total_steps, console, console_seconds)
        for row in kept:
            self._display.update(row)
        self._display.start()

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl, those kept by a resume included; -1 if there is none."""
        return self._last_step

    def __enter__(self) -> MetricsLogger:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Gives the terminal back and closes the files, also after Ctrl-C."""
        self.close()

    def log(
        self,
        step: int,
        values: Mapping[str, Any],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Writes one line, and the same values to TensorBoard and the display.

        Args:
            step: learner version; must grow from call to call.
            values: numbers (Python's, numpy's, 0-d arrays) and lists of counts by name.
            histograms: samples by name; they go to TensorBoard only.

        Raises:
            ValueError: the step is already logged, or a name is reserved.
            TypeError: a value is neither a number nor a list of numbers; the message names it.
            OSError: the line cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}, already logged")
        row: dict[str, Any] = {"step": step, "time": round(time.monotonic() - self._start, 3)}
        for name, value in values.items():
            if name in ("step", "time"):
                raise ValueError(f"the metric name {name!r} is reserved")
            row[name] = _plain(name, value)
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            self._last_step = step
            self._write_tensorboard(row, histograms or {})
        except OSError as error:
            # Of a full disk it names no file.
            message = f"the figures of update {step} cannot be written to {self.run_dir}: {error}"
            raise OSError(message) from error
        self._display.update(row)
        self._display.show(force=any(f"eval/{score}" in row for score in SCORES))

    def status(self, text: str) -> None:
        """Says what the run is doing or waiting for until the next call."""
        self._display.say(text)

    def episode(self, record: Mapping[str, Any]) -> None:
        """Appends an episode to episodes.jsonl, unless the file has reached its limit.

        The last line of a file at its limit says so, as `{"step", "limit_bytes"}`.

        Args:
            record: as `copc_jax.viewer.record` makes it, with the learner version as its step.
        """
        if self._episodes_full:
            return
        path = self.run_dir / EPISODES_FILE
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        size = path.stat().st_size if path.exists() else 0
        if size + len(line) > self._episodes_bytes:
            self._episodes_full = True
            line = json.dumps({"step": record["step"], "limit_bytes": self._episodes_bytes}) + "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    def close(self) -> None:
        """Ends the display and closes all files; may be called twice."""
        self._display.stop()
        for file in (self._file, self._tensorboard):
            # What could not be written was said when it was logged.
            with contextlib.suppress(OSError, ValueError):
                file.close()

    def _write_tensorboard(
        self, row: Mapping[str, Any], histograms: Mapping[str, np.ndarray]
    ) -> None:
        values: list[Any] = []
        for name, value in row.items():
            if name in ("step", "time") or value is None:
                continue
            if not isinstance(value, list):
                values += summary.scalar(name, value).value
            elif any(value):
                counts, bins = np.asarray(value, np.float64), np.arange(len(value))
                values += summary.histogram_raw(
                    name,
                    min=float(np.flatnonzero(counts)[0]),
                    max=float(np.flatnonzero(counts)[-1]),
                    num=float(counts.sum()),
                    sum=float(counts @ bins),
                    sum_squares=float(counts @ bins**2),
                    bucket_limits=(bins + 0.5).tolist(),
                    bucket_counts=counts.tolist(),
                ).value
        for name, samples in histograms.items():
            finite = np.asarray(samples, np.float64).ravel()
            finite = finite[np.isfinite(finite)]
            if finite.size:
                values += summary.histogram(name, finite, bins="auto").value
        shown = _SUMMARIES.Summary(value=values)
        event = _EVENTS.Event(wall_time=time.time(), step=row["step"], summary=shown)
        self._tensorboard.write_event(event)
        # A flush goes to the disk itself.
        if time.monotonic() > self._flushed + _FLUSH_S:
            self._tensorboard.flush()
            self._flushed = time.monotonic()


class NoLog:
    """What a process that is not the first has in place of a `MetricsLogger`: nothing is kept."""

    last_step = -1

    def __enter__(self) -> NoLog:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""

    def log(
        self,
        step: int,
        values: Mapping[str, Any],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Does nothing."""

    def status(self, text: str) -> None:
        """Does nothing."""

    def episode(self, record: Mapping[str, Any]) -> None:
        """Does nothing."""


def _prepare(path: pathlib.Path, resume_step: int | None) -> list[dict[str, Any]]:
    """Drops the lines after the resumed step from the file, and returns the lines that stay."""
    rows = read_metrics(path.parent, path.name)
    if resume_step is None:
        if rows:
            raise FileExistsError(f"{path} holds another run: resume it or choose another run_dir")
        return []
    if not path.exists():
        return []
    kept = [row for row in rows if row["step"] <= resume_step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)
    return kept


def _plain(name: str, value: Any) -> Any:
    """A float, or a list of numbers, as JSON can hold it: None for what is not finite."""
    array = np.asarray(value)
    if array.ndim > 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"metric {name}: expected a number or a list of numbers, got {value!r}")
    if array.ndim == 1:
        return [item if math.isfinite(item) else None for item in array.tolist()]
    number = float(array)
    return number if math.isfinite(number) else None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _Display:
    """The progress of a run, on a terminal or as plain lines. Its failures never reach the run."""

    def __init__(self, stream: Any, total: int | None, enabled: bool, seconds: float):
        self._status, self._since = "", time.monotonic()
        self._stream, self._total, self._seconds = stream, total, seconds
        self._enabled = enabled
        self._row: dict[str, Any] = {}
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=20)
        self._shown = -math.inf
        self._live: rich.live.Live | None = None

    def start(self) -> None:
        console = rich.console.Console(file=self._stream)
        if not (self._enabled and console.is_terminal):
            return
        self._live = rich.live.Live(
            get_renderable=self._picture,
            console=console,
            refresh_per_second=2,
            # What the program prints belongs above the display only if both share the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def say(self, status: str) -> None:
        self._status, self._since = status, time.monotonic()
        self.show()

    def stop(self) -> None:
        self._status = ""
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        else:
            self.show(force=True)
        self._enabled = False

    def update(self, row: Mapping[str, Any]) -> None:
        self._row |= row
        self._recent.append(dict(row))

    def show(self, force: bool = False) -> None:
        """Prints a plain line if one is due. A terminal is redrawn by its own thread."""
        now = time.monotonic()
        due = force or now - self._shown >= self._seconds
        if not self._enabled or self._live is not None or not due or not self._row:
            return
        text = " | ".join([self._position(), *self._groups(), self._status]).removesuffix(" | ")
        self._shown = now
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader has gone, as in `run.py | head`: the run itself goes on.
            self._enabled = False

    def _position(self) -> str:
        step = self._row.get("step", 0)
        if self._total is None:
            return f"update {step}"
        left = self._seconds_left()
        return f"update {step}/{self._total}" + ("" if left is None else f" | {_clock(left)} left")

    def _seconds_left(self) -> float | None:
        if self._total is None or len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        pace = (last["time"] - first["time"]) / max(last["step"] - first["step"], 1)
        return pace * max(self._total - last["step"], 0)

    def _mean(self, name: str) -> float | None:
        """Mean over the recent updates: a single batch says little."""
        values = [row[name] for row in self._recent if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _groups(self) -> list[str]:
        """The figures in words, grouped by subject; what is not known yet is left out."""

        def join(*parts: tuple[str, float | None, str]) -> str:
            known = (f"{word} {value:{form}}" for word, value, form in parts if value is not None)
            return "  ".join(known)

        row, mean = self._row, self._mean
        score = score_name([row])
        word = "EM" if score == "em" else SCORES[score]
        held_out = join((f"held-out {word}", row.get(f"eval/{score}"), ".1%"))
        if held_out and row.get(f"eval/{score}_low") is not None:
            held_out += f" [{row[f'eval/{score}_low']:.1%}, {row[f'eval/{score}_high']:.1%}]"
        update, wait = mean("learner/seconds"), mean("learner/wait_seconds")
        waiting = None if update is None or wait is None else wait / max(update + wait, 1e-9)
        groups = (
            join(
                ("reward", mean("reward/mean"), ".2f"),
                (word, mean(f"reward/{score}"), ".1%"),
                ("searches", mean("task/searches"), ".1f"),
                ("calls", mean("task/calls"), ".1f"),
            ),
            held_out,
            join(("lag", row.get("lag/mean"), ".1f"), ("max", row.get("lag/max"), ".0f")),
            join(("tokens/s", mean("rollout/tokens_per_second"), ",.0f")),
            join(
                ("learner waits", waiting, ".0%"),
                ("generator busy", mean("rollout/busy_fraction"), ".0%"),
                ("waits for admission", mean("rollout/admission_fraction"), ".0%"),
            ),
        )
        return [group for group in groups if group]

    def _picture(self) -> rich.console.RenderableType:
        table = rich.table.Table.grid(padding=(0, 1))
        bar = rich.progress_bar.ProgressBar(
            total=self._total or 1, completed=self._row.get("step", 0), width=40
        )
        head = rich.table.Table.grid(padding=(0, 1))
        head.add_row(bar, rich.text.Text(self._position()))
        table.add_row(head)
        for group in self._groups():
            table.add_row(rich.text.Text(group))
        if self._status:
            seconds = time.monotonic() - self._since
            text = f"now: {self._status}" + (f" ({seconds:.0f} s)" if seconds >= 2 else "")
            table.add_row(rich.text.Text(text, style="dim"))
        return table
