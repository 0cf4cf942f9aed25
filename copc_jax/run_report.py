"""The report of a run: what it logged, as pictures and words, for a person to read."""

from __future__ import annotations

import collections
import html
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from copc_jax.metrics import (
    COMMAND_FILE,
    CONFIG_FILE,
    EPISODES_FILE,
    EPISODES_PAGE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SCORES,
    median_count,
    read_metrics,
    score_name,
)

# One color for one thing in every picture.
_LEARNER, _GENERATOR, _HELD_OUT, _MUTED = "#2a6fbb", "#d9822b", "#2e8b57", "#9aa0a6"
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 150,
}
_UPDATES = "learner updates"
# Where the learner's time goes: metric, words, color.
_LEARNER_PARTS = (
    ("learner/seconds", "updating", _LEARNER),
    ("learner/wait_seconds", "waiting for rollouts", _GENERATOR),
    ("learner/publish_seconds", "publishing weights", "#7e57c2"),
    ("learner/eval_seconds", "evaluating", _HELD_OUT),
    ("learner/checkpoint_seconds", "checkpoint", "#8d6e63"),
)


class _Run:
    """The logged numbers of a run, as series."""

    def __init__(self, run_dir: pathlib.Path):
        self.rows = read_metrics(run_dir)
        if not self.rows:
            raise FileNotFoundError(f"{run_dir / METRICS_FILE} holds no updates: nothing to report")
        config = run_dir / CONFIG_FILE
        self.config = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        command = run_dir / COMMAND_FILE
        self.command = command.read_text(encoding="utf-8").strip() if command.exists() else None
        later = read_metrics(run_dir, EVALUATIONS_FILE)
        self.score = score_name([*self.rows, *later])
        self.score_label = SCORES[self.score]
        held_out = {
            row["step"]: row
            for row in [*self.rows, *later]
            if row.get(f"eval/{self.score}") is not None
        }
        self.held_out = [held_out[step] for step in sorted(held_out)]
        self.first, self.last = self.rows[0]["step"], self.rows[-1]["step"]
        self.bound = self.config.get("staleness")
        # The lag cannot reach its bound before that many updates.
        self.warm = max((self.first + self.last) // 2, 1)
        if self.bound is not None and self.bound < self.last:
            self.warm = max(self.bound, 1)

    def series(self, *names: str, warm: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the first of the names that was logged, finite values only."""
        for name in names:
            pairs = [
                (row["step"], row[name])
                for row in self.rows
                if row.get(name) is not None and (not warm or row["step"] >= self.warm)
            ]
            if pairs:
                steps, values = zip(*pairs, strict=True)
                return np.asarray(steps), np.asarray(values, np.float64)
        return np.zeros(0, int), np.zeros(0)

    def counts(self, name: str) -> np.ndarray:
        """Sum of the histograms after warm-up."""
        lists = [row[name] for row in self.rows if row.get(name) and row["step"] >= self.warm]
        total = np.zeros(max(map(len, lists), default=0), np.int64)
        for counts in lists:
            total[: len(counts)] += np.asarray(counts, np.int64)
        return total

    def learner_shares(self) -> list[tuple[str, str, float]]:
        """(what, color, share of the time after warm-up) of the learner; [] without timings."""
        rows = [row for row in self.rows if row["step"] >= self.warm]
        elapsed = rows[-1]["time"] - rows[0]["time"] if rows else 0.0
        if elapsed <= 0 or not any("learner/seconds" in row for row in rows):
            return []
        spent = [
            (label, color, sum(row.get(name) or 0.0 for row in rows[1:]))
            for name, label, color in _LEARNER_PARTS
        ]
        rest = elapsed - sum(seconds for _, _, seconds in spent)
        spent.append(("other", _MUTED, max(rest, 0.0)))
        total = sum(seconds for _, _, seconds in spent)
        return [(label, color, seconds / total) for label, color, seconds in spent if seconds > 0]

    def generator_shares(self) -> list[tuple[str, str, float]]:
        """(what, color, share of the time after warm-up) of the generator; [] without timings."""
        busy = self.series("rollout/busy_fraction", warm=True)[1]
        if not busy.size:
            return []
        waits = self.series("rollout/admission_fraction", warm=True)[1]
        parts = [("sampling", _GENERATOR, float(busy.mean()))]
        if waits.size:
            parts.append(("waiting for admission", _LEARNER, float(waits.mean())))
        rest = 1.0 - sum(share for _, _, share in parts)
        return [*parts, ("other", _MUTED, rest)] if rest > 0.005 else parts


def report(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Draws curves.png, lag.png and time.png into the run directory and writes report.md.

    Reads metrics.jsonl and, where they exist, evaluations.jsonl, config.json (the resolved
    configuration) and command.txt. What was not logged is left out of the pictures and named in the
    text. The page of episodes, where there is one, is linked.

    Returns:
        The path of report.md.

    Raises:
        FileNotFoundError: no update was logged.
        ValueError: a line of the metrics cannot be read.
    """
    # matplotlib takes a second to import, which a training run should not pay at its start.
    import matplotlib

    run_dir = pathlib.Path(run_dir)
    run = _Run(run_dir)
    pictures = []
    drawings = {"curves.png": _draw_curves, "lag.png": _draw_lag, "time.png": _draw_time}
    with matplotlib.rc_context(_STYLE):
        for name, draw in drawings.items():
            figure = draw(run)
            if figure is not None:
                figure.savefig(run_dir / name, bbox_inches="tight", facecolor="white")
                pictures.append(name)
    path = run_dir / "report.md"
    path.write_text(_words(run, pictures, _episodes(run_dir)), encoding="utf-8")
    return path


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centered running mean over about a twentieth of the run, shorter at the ends."""
    half = values.size // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(values.size)
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, values.size)
    return (sums[high] - sums[low]) / (high - low)


def _line(axes: Any, series: tuple[np.ndarray, np.ndarray], color: str, label: str = "") -> None:
    """The single updates, faint, under their running mean."""
    steps, values = series
    if not steps.size:
        return
    axes.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
    axes.plot(steps, _smooth(values), color=color, linewidth=1.8, label=label or None)


def _percent(axes: Any) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _draw_held_out(axes: Any, run: _Run) -> bool:
    rows = run.held_out
    if not rows:
        return False
    steps = [row["step"] for row in rows]
    name = f"eval/{run.score}"
    mean = np.asarray([row[name] for row in rows])
    low = np.asarray([row.get(f"{name}_low") or row[name] for row in rows])
    high = np.asarray([row.get(f"{name}_high") or row[name] for row in rows])
    axes.errorbar(
        steps, mean, (mean - low, high - mean), color=_HELD_OUT, marker="o", markersize=4, capsize=3
    )
    # The first figure stands under its interval and the last one above: the line runs between them.
    style = {"textcoords": "offset points", "color": _HELD_OUT}
    axes.annotate(f"{mean[0]:.1%}", (steps[0], low[0]), xytext=(-3, -13), **style)
    if len(rows) > 1:
        axes.annotate(f"{mean[-1]:.1%}", (steps[-1], high[-1]), xytext=(3, 5), ha="right", **style)
    axes.margins(y=0.2)
    axes.set_title(f"Held-out {run.score_label}, greedy, 95% interval")
    _percent(axes)
    return True


def _draw_reward(axes: Any, run: _Run) -> bool:
    reward, score = run.series("reward/mean"), run.series(f"reward/{run.score}")
    _line(axes, reward, _LEARNER, "reward")
    _line(axes, score, _HELD_OUT, run.score_label)
    axes.set_title(f"Training batch: mean reward, {run.score_label}")
    axes.set_ylim(bottom=0 if min(reward[1].min(initial=0), score[1].min(initial=0)) >= 0 else None)
    if reward[0].size and score[0].size:
        axes.legend(loc="upper left", ncols=2)
    return bool(reward[0].size or score[0].size)


def _draw_lag_by_update(axes: Any, run: _Run) -> bool:
    for name, label, color, style in (
        ("lag/max", "max", "#9dc0e6", "-"),
        ("lag/mean", "mean", _LEARNER, "-"),
        # Often nearly the mean: dots leave both visible.
        ("lag/p50", "median", "#0d2b52", ":"),
    ):
        steps, values = run.series(name)
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.6, label=label)
    if run.bound is not None:
        axes.axhline(run.bound, color=_MUTED, linestyle="--", linewidth=1, label="bound")
    axes.set_title("Lag of the trained tokens (updates)")
    axes.legend(loc="lower right", ncols=2)
    axes.set_ylim(bottom=0)
    return bool(run.series("lag/mean", "lag/max")[0].size)


def _draw_explained_variance(axes: Any, run: _Run) -> bool:
    series = run.series("coupling/explained_variance")
    _line(axes, series, _LEARNER)
    title = "Explained variance of the critic"
    # A cold critic can start at minus many, next to which the rest of the run would look flat.
    if series[0].size and series[1].min() < -1.0:
        axes.set_ylim(bottom=-1.0)
        title += " (cut at -1)"
    axes.set_title(title)
    return bool(series[0].size)


def _simple(title: str, color: str, *names: str, percent: bool = False) -> Any:
    """A panel of one series."""

    def draw(axes: Any, run: _Run) -> bool:
        series = run.series(*names)
        _line(axes, series, color)
        axes.set_title(title)
        if percent:
            _percent(axes)
        return bool(series[0].size)

    return draw


_PANELS = (
    _draw_held_out,
    _draw_reward,
    _simple("Searches an episode", _GENERATOR, "task/searches"),
    _simple("Tool calls an episode", _GENERATOR, "task/calls"),
    # Not coupling/mask_kept, which is of COPC's mask whatever the method.
    _simple("Tokens that the actor's loss trains", _LEARNER, "actor/kept", percent=True),
    _draw_explained_variance,
    _simple("KL(behavior, policy), k3 (nats a token)", _LEARNER, "coupling/kl_k3", "actor/kl"),
    _draw_lag_by_update,
    _simple("Tokens sampled a second", _GENERATOR, "rollout/tokens_per_second"),
)


def _draw_curves(run: _Run) -> Any:
    """All curves that have data, two in a row."""
    from matplotlib.figure import Figure

    scratch = Figure()
    panels = [draw for draw in _PANELS if draw(scratch.add_subplot(), run)]
    if not panels:
        return None
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(9.0, 2.35 * rows), layout="constrained")
    for index, draw in enumerate(panels):
        axes = figure.add_subplot(rows, 2, index + 1)
        draw(axes, run)
        axes.set_xlim(-0.015 * run.last, 1.015 * run.last)
        if index >= len(panels) - 2:
            axes.set_xlabel(_UPDATES)
    return figure


def _draw_lag(run: _Run) -> Any:
    """Realized lag after warm-up, of tokens and of trajectories."""
    from matplotlib.figure import Figure

    histograms = (
        ("lag/histogram", "tokens", "Sampled tokens", _LEARNER),
        (
            "lag/trajectory_histogram",
            "trajectories",
            "Trajectories, by their oldest token",
            "#7e57c2",
        ),
    )
    present = [entry for entry in histograms if run.counts(entry[0]).sum()]
    if not present:
        return None
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    for index, (name, unit, title, color) in enumerate(present):
        counts = run.counts(name)
        axes = figure.add_subplot(1, len(present), index + 1)
        axes.bar(np.arange(counts.size), counts / counts.sum(), width=0.9, color=color)
        marks = [(median_count(counts), "median", "#333333", "-")]
        if run.bound is not None:
            marks.append((run.bound, "bound", _MUTED, "--"))
        for value, label, shade, style in marks:
            axes.axvline(
                value, color=shade, linestyle=style, linewidth=1.2, label=f"{label} {value}"
            )
        axes.set_title(title)
        axes.set_xlabel("lag (learner updates)")
        axes.set_ylabel(f"share of {unit}")
        _percent(axes)
        axes.margins(y=0.25)
        axes.legend(loc="upper left", ncols=2)
    return figure


def _draw_time(run: _Run) -> Any:
    """Who waits for whom: shares after warm-up, and by update."""
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    sides = [("learner", run.learner_shares()), ("generator", run.generator_shares())]
    sides = [(name, shares) for name, shares in sides if shares]
    if not sides:
        return None
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    bars, curves = figure.subplots(2, 1, height_ratios=(1.0, 1.5))
    for row, (_, shares) in enumerate(sides):
        left, parts = 0.0, []
        for _, color, share in shares:
            parts += bars.barh(row, share, left=left, color=color, height=0.4)
            left += share
        names = [f"{label} {share:.0%}" for label, _, share in shares]
        style: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (0.0, row + 0.17),
            "bbox_transform": bars.get_yaxis_transform(),
            "ncols": len(names),
            "borderpad": 0.2,
            "handlelength": 0.9,
            "handleheight": 0.9,
            "columnspacing": 1.3,
        }
        bars.add_artist(Legend(bars, parts, names, **style))
    bars.set_yticks(range(len(sides)), [name for name, _ in sides])
    bars.set_ylim(len(sides) - 0.4, -0.3)
    bars.set_xlim(0, 1)
    bars.grid(visible=False)
    bars.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    bars.set_title(f"Share of the time from update {run.warm} on")
    steps, update = run.series("learner/seconds")
    waited = run.series("learner/wait_seconds")
    if steps.size and np.array_equal(steps, waited[0]):
        busy = update / np.maximum(update + waited[1], 1e-9)
        _line(curves, (steps, busy), _LEARNER, "learner: updating, not waiting for rollouts")
    _line(curves, run.series("rollout/busy_fraction"), _GENERATOR, "generator: sampling")
    curves.axhline(0.8, color=_MUTED, linestyle="--", linewidth=1)
    curves.set_ylim(0, 1.02)
    curves.set_xlim(-0.01 * run.last, 1.01 * run.last)
    curves.set_title("Busy share by update")
    curves.set_xlabel(_UPDATES)
    _percent(curves)
    curves.legend(loc="lower right")
    return figure


def _words(run: _Run, pictures: Sequence[str], episodes: str) -> str:
    """The text of report.md."""
    config = run.config
    name = [str(config[key]) for key in ("task", "method") if key in config]
    name += [f"{key} {config[key]}" for key in ("staleness", "seed") if key in config]
    lines = [f"# Run: {_literal(', '.join(name)) or 'unknown configuration'}", ""]
    if run.command:
        lines += [*_fenced("sh", run.command), ""]
    lines += [f"- {sentence}" for sentence in _findings(run)]
    lines += ["", *(f"![{picture}]({picture})" for picture in pictures), ""]
    if episodes:
        lines += [episodes, ""]
    missing = _missing(run)
    if missing:
        lines += ["## What this report cannot say", "", *(f"- {item}" for item in missing), ""]
    if config:
        lines += ["## Resolved configuration", ""]
        lines += [*_fenced("json", json.dumps(config, indent=2)), ""]
    return "\n".join(lines)


def _literal(text: str) -> str:
    """A text of a user or of a data set as Markdown that shows it and does nothing else."""
    return re.sub(r"([\\`*\[\]])", r"\\\1", html.escape(text, quote=False))


def _fenced(language: str, text: str) -> list[str]:
    """A block that no line of the text ends."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 4)
    return [fence + language, text, fence]


def _episodes(run_dir: pathlib.Path) -> str:
    """Where to read episodes, and whether some were left out; "" without a page of them."""
    if not (run_dir / EPISODES_PAGE).exists():
        return ""
    rows = read_metrics(run_dir, EPISODES_FILE)
    steps = [row["step"] for row in rows if "limit_bytes" not in row]
    text = (
        f"[Episodes, token by token]({EPISODES_PAGE}): {len(steps)} of {len(set(steps))} updates."
    )
    for row in rows:
        if "limit_bytes" in row:
            text += (
                f" Recording stopped at update {row['step']}, where {EPISODES_FILE} reached its "
                f"limit of {row['limit_bytes']} bytes."
            )
    return text


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Means over the first and the last tenth."""
    tenth = max(values.size // 10, 1)
    return float(values[:tenth].mean()), float(values[-tenth:].mean())


def _findings(run: _Run) -> list[str]:
    """The main figures in words."""
    found = [f"{run.last} learner updates in {run.rows[-1]['time'] / 60:.1f} minutes."]

    name = f"eval/{run.score}"

    def score(row: Mapping[str, Any]) -> str:
        text = f"{row[name]:.1%}"
        if row.get("eval/count"):
            text += f" of {row['eval/count']:.0f} questions"
        if row.get(f"{name}_low") is not None:
            text += f" (95% interval {row[f'{name}_low']:.1%} to {row[f'{name}_high']:.1%})"
        return text

    if len(run.held_out) > 1:
        before, after = run.held_out[0], run.held_out[-1]
        gain = 100 * (after[name] - before[name])
        found.append(
            f"Held-out {run.score_label}: {score(before)} at update {before['step']}, "
            f"{score(after)} at update {after['step']}: {gain:+.1f} points. The intervals are of "
            f"the questions; how much another seed would differ needs runs with other seeds."
        )
    for label, key, form in (
        ("Mean reward of the training batch", "reward/mean", ".2f"),
        (f"{run.score_label.capitalize()} of the training batch", f"reward/{run.score}", ".1%"),
        ("Searches an episode", "task/searches", ".2f"),
        ("Episodes with a search", "task/searched", ".0%"),
        ("Tool calls an episode", "task/calls", ".2f"),
        ("Valid actions of all actions", "task/valid_action_rate", ".0%"),
        ("Episodes with an answer", "task/answered", ".0%"),
    ):
        values = run.series(key)[1]
        if values.size > 1:
            first, last = _ends(values)
            found.append(f"{label}: {first:{form}} in the first tenth, {last:{form}} in the last.")
    tokens, heads = run.counts("lag/histogram"), run.counts("lag/trajectory_histogram")
    for counts, unit in ((tokens, "sampled tokens"), (heads, "trajectories (oldest token)")):
        if counts.sum():
            mean = np.average(np.arange(counts.size), weights=counts)
            found.append(
                f"Lag of {unit} from update {run.warm} on: median {median_count(counts)}, "
                f"mean {mean:.1f}, maximum {np.flatnonzero(counts)[-1]} updates."
            )
    for who, shares in (("learner", run.learner_shares()), ("generator", run.generator_shares())):
        if shares:
            parts = ", ".join(f"{label} {share:.0%}" for label, _, share in shares)
            found.append(f"Time of the {who} from update {run.warm} on: {parts}.")
    speed = run.series("rollout/tokens_per_second", warm=True)[1]
    if speed.size:
        found.append(f"Sampled tokens a second from update {run.warm} on: {speed.mean():,.0f}.")
    return found


def _missing(run: _Run) -> list[str]:
    """What a reader would look for and not find."""
    missing = []
    if len(run.held_out) < 2:
        number = "one evaluation" if run.held_out else "no evaluation"
        missing.append(f"Held-out {run.score_label} before and after: {number} was logged.")
    planned = run.config.get("updates")
    if isinstance(planned, int) and run.last < planned:
        missing.append(f"The run stopped early: {run.last} of {planned} updates.")
    if run.bound is not None and run.bound >= run.last:
        missing.append(
            f"The run is shorter than its staleness bound of {run.bound}: the lag still warms up, "
            f"and its second half stands for the time after warm-up."
        )
    for text, names in (
        ("training reward", ("reward/mean",)),
        ("lag histogram", ("lag/histogram",)),
        ("time of the learner", ("learner/seconds",)),
        ("time of the generator", ("rollout/busy_fraction",)),
    ):
        if not any(row.get(name) for row in run.rows for name in names):
            missing.append(f"Not logged: {text}.")
    for name, what in ((CONFIG_FILE, run.config), (COMMAND_FILE, run.command)):
        if not what:
            missing.append(f"{name} is not in the run directory.")
    broken = collections.Counter(
        name for row in run.rows for name, value in row.items() if value is None
    )
    missing += [
        f"{_literal(name)} was not finite at {count} updates." for name, count in broken.items()
    ]
    return missing
