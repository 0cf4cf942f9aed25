"""Make a page of sweeps: figures, tables, and beside each result what the paper has.

    python experiments/report.py [SWEEP_FOLDER ...] [-o FOLDER]

reads the rows of sweeps (all of runs/sweeps by default; folders of the same experiment are read as
one) and writes report.html, which holds its figures and loads nothing, and each figure as a PNG.

Scores are held-out, greedy, in percent. Intervals are Student's, 95%, over seeds; differences are
paired by seed, since runs of a seed share warm start, questions and order. Neither is corrected for
the number of comparisons. What was asked for and has not finished is shown as missing.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import sweep
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from copc_jax import comparison
from copc_jax.methods import METHODS
from copc_jax.metrics import mean_interval

Row = Mapping[str, Any]
# (pairs, mean, low, high), None where nothing is paired.
Found = tuple[int, float, float, float] | None

_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
_COLORS = {
    "copc": "#1b5fa8",
    "copc_no_rc": "#56b4e9",
    "ppo": "#d55e00",
    "ppo_rc": "#e8a33d",
    "copc_restoring": "#009e73",
    "areal": "#7e57c2",
    "vtrace": "#cc79a7",
    "dapo": "#8d6e63",
    "sao": "#444444",
    "m2po": "#9aa000",
    "vcpo": "#00838f",
}
_OTHER = ("#b0bec5", "#a1887f", "#90a4ae", "#c5a880", "#78909c", "#aed581", "#f48fb1")
# Rows that no paper has: no baselines of the paper's.
_OURS = frozenset(name for name, row in METHODS.items() if row.paper.startswith("none: "))
_COPC = frozenset({"copc", "copc_no_rc"}) | _OURS

_COUPLING = (
    ("explained_variance", "explained variance", ".2f"),
    ("correction", "mean |A_RC - A_GAE|", ".3f"),
    ("kept", "kept by the loss", ".1%"),
    ("restoring", "outside, but leading back", ".1%"),
    ("effective_sample_size", "ESS", ".2f"),
    ("kl", "KL, nats a token", ".4f"),
    ("sigma", "sigma of log r", ".3f"),
)


# --- Rows -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Results:
    """All rows of one experiment.

    Attributes:
        name: of the experiment, None for grids of one's own.
        rows: finished, failed and missing ones.
        sweeps: (folder, what sweep.json says) of each.
    """

    name: str | None
    rows: list[dict[str, Any]]
    sweeps: list[tuple[Path, dict[str, Any]]]


def read(folders: Sequence[Path]) -> list[Results]:
    """Read sweeps, those of one experiment together.

    Raises:
        FileNotFoundError: a folder is not of a sweep.
        ValueError: rows that are none.
    """
    found: dict[str | None, Results] = {}
    for folder in folders:
        path = folder / sweep.SWEEP_FILE
        if not path.exists():
            raise FileNotFoundError(f"{folder} is no sweep: {path} does not exist")
        about = json.loads(path.read_text(encoding="utf-8"))
        planned = {row["run"]: row for row in sweep.read_rows(folder, sweep.PLANNED_FILE)}
        rows = planned | {row["run"]: row for row in sweep.read_rows(folder)}
        results = found.setdefault(about["experiment"], Results(about["experiment"], [], []))
        # The same run in two sweeps counts once, a finished one before any other.
        known = {row["run"]: i for i, row in enumerate(results.rows)}
        for name, row in rows.items():
            if name not in known:
                results.rows.append(row)
            elif row["state"] == "finished":
                results.rows[known[name]] = row
        results.sweeps.append((folder, about))
    order = {name: i for i, name in enumerate(sweep.EXPERIMENTS)}
    return sorted(found.values(), key=lambda r: order.get(r.name or "", len(order)))


def setting(row: Row, name: str) -> Any:
    """A setting of a run by its dotted name."""
    return sweep.flat(row["config"]).get(name)


def groups(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Rows by the values of settings, sorted; one name gives plain keys."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(setting(row, name) for name in names)
        found.setdefault(key[0] if len(names) == 1 else key, []).append(row)
    return dict(sorted(found.items(), key=lambda pair: str(pair[0]) if _text(pair[0]) else pair[0]))


def _text(key: Any) -> bool:
    return any(not isinstance(k, (int, float)) for k in (key if isinstance(key, tuple) else (key,)))


def by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by method, in the order of METHODS."""
    found = groups(rows, "method")
    return {name: found[name] for name in METHODS if name in found}


def by_label(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the label of their grid, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["label"], []).append(row)
    return found


def by_seed(rows: Iterable[Row], figure: str = "final") -> dict[Any, float]:
    """A figure of the finished runs, by seed, staleness and task."""
    found: dict[Any, float] = {}
    for row in rows:
        value = row["record"].get(figure)
        if row["state"] == "finished" and value is not None:
            config = row["config"]
            found[config["seed"], config["staleness"], config["task"]] = value
    return found


# --- Text -----------------------------------------------------------------------------------------


def interval(values: Iterable[float], scale: float = 100.0, form: str = ".1f") -> str:
    """Mean, interval and number of values."""
    values = list(values)
    if not values:
        return "missing"
    mean, low, high = (scale * x for x in mean_interval(values))
    if math.isinf(low):
        return f"{mean:{form}} (1 seed)"
    return f"{mean:{form}} [{low:{form}}, {high:{form}}] ({len(values)})"


def paired(ours: Iterable[Row], theirs: Iterable[Row], figure: str = "final") -> Found:
    """Difference of a figure between runs of the same seed, staleness and task."""
    return comparison.paired_difference(by_seed(ours, figure), by_seed(theirs, figure))


def points(found: Found) -> str:
    """A difference in points with its interval and the number of pairs."""
    if found is None:
        return "missing"
    pairs, mean, low, high = found
    if pairs == 1:
        return f"{100 * mean:+.1f} (1 pair)"
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] ({pairs} pairs)"


def difference(ours: Iterable[Row], theirs: Iterable[Row], figure: str = "final") -> str:
    """Paired difference in points, as text."""
    return points(paired(ours, theirs, figure))


def collapses(rows: Sequence[Row]) -> str:
    """How many of the finished runs have collapsed, and how many failed or are missing."""
    judged = [r["record"]["collapsed"] for r in rows if r["state"] == "finished"]
    judged = [value for value in judged if value is not None]
    text = f"{sum(judged)} of {len(judged)}" if judged else "not told"
    for state in ("failed", "missing"):
        count = sum(row["state"] == state for row in rows)
        text += f", {count} {state}" if count else ""
    return text


def coupling(rows: Sequence[Row]) -> list[str]:
    """Means over runs of the figures of coupling."""
    cells = []
    for name, _, form in _COUPLING:
        values = [r["record"].get(name) for r in rows if r["state"] == "finished"]
        values = [value for value in values if value is not None]
        cells.append(f"{statistics.fmean(values):{form}}" if values else "-")
    return cells


def element(tag: str, *content: str, **attributes: str) -> str:
    """An HTML element; attributes are escaped, content is HTML."""
    text = "".join(f' {k.rstrip("_")}="{html.escape(v)}"' for k, v in attributes.items())
    return f"<{tag}{text}>{''.join(content)}</{tag}>"


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return element("p", html.escape(text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain texts as a table that scrolls by itself."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return element("tr", *(element(tag, html.escape(cell)) for cell in cells))

    body = "".join(line("td", cells) for cells in rows)
    return element("div", element("table", line("th", head), body), class_="scroll")


def claim(paper: str, here: str, verdict: str) -> str:
    """What the paper says, what was measured, and how they compare: the same for any outcome."""
    rows = (("paper", paper), ("here", here), ("verdict", verdict))
    inner = "".join(
        element("dt", html.escape(name)) + element("dd", html.escape(text)) for name, text in rows
    )
    return element("dl", inner, class_=f"claim {verdict.split(':')[0].replace(' ', '-')}")


def judge(found: Found, sign: int) -> str:
    """Whether a difference has the sign that the paper gives it."""
    if found is None:
        return "missing: no pair of finished runs"
    pairs, mean, low, high = found
    if pairs == 1:
        return "open: one pair says nothing about other seeds"
    if low <= 0 <= high:
        return "open: the interval holds 0"
    if mean * sign > 0:
        return "agrees: same sign, interval without 0"
    return "contradicts: opposite sign, interval without 0"


def judge_bound(found: Found, bound: float, sign: int) -> str:
    """Whether a ratio is at most (sign -1) or at least (sign 1) a bound, its whole interval."""
    if found is None:
        return "missing: no pair of finished runs"
    pairs, _, low, high = found
    side = "at least" if sign > 0 else "at most"
    if pairs == 1:
        return "open: one pair has no interval"
    if (low if sign > 0 else -high) >= sign * bound:
        return f"agrees: {side} {bound:g} with the whole interval"
    if (high if sign > 0 else -low) < sign * bound:
        return f"contradicts: not {side} {bound:g}"
    return f"open: the interval holds {bound:g}"


# --- Pictures -------------------------------------------------------------------------------------


class Pictures:
    """Saves figures and gives them as elements that hold their own data."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, figure: Figure, name: str, caption: str) -> str:
        """Save one figure."""
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(caption)}">'
        return element("figure", image, element("figcaption", html.escape(caption)))


def _canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def color(method: str) -> str:
    """One color a method on the whole page."""
    rest = [name for name in METHODS if name not in _COLORS]
    return _COLORS.get(method) or _OTHER[rest.index(method) % len(_OTHER)]


def _heat(axes: Any, rows: Sequence[Row], title: str) -> None:
    policy = sorted({setting(r, "loss.eta_policy") for r in rows})
    advantage = sorted({setting(r, "loss.eta_advantage") for r in rows})
    cells = groups(rows, "loss.eta_policy", "loss.eta_advantage")
    means = [
        [
            statistics.fmean(values)
            if (values := by_seed(cells.get((p, a), [])).values())
            else math.nan
            for a in advantage
        ]
        for p in policy
    ]
    axes.set_facecolor("#d9d9d9")
    axes.imshow(means, cmap="YlGnBu", origin="lower", aspect="auto")
    known = [x for line in means for x in line if not math.isnan(x)]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    for (i, p), (j, a) in itertools.product(enumerate(policy), enumerate(advantage)):
        values = list(by_seed(cells.get((p, a), [])).values())
        text = "missing"
        if values:
            mean, low, high = mean_interval(values)
            half = "" if math.isinf(high) else f"\n±{50 * (high - low):.1f}"
            text = f"{100 * mean:.1f}{half}\nn={len(values)}"
        ink = "white" if values and means[i][j] > middle else "black"
        axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(advantage)), [f"{a:g}" for a in advantage])
    axes.set_yticks(range(len(policy)), [f"{p:g}" for p in policy])
    axes.set_xlabel("eta_A (advantage side)")
    axes.set_ylabel("eta_P (policy side)")
    axes.grid(visible=False)
    axes.set_title(title)


def _dots(axes: Any, entries: Mapping[str, Sequence[Row]], figure: str = "final") -> None:
    """Each run's figure, and its mean with the interval, a line an entry."""
    names = list(entries)
    for place, name in enumerate(names):
        shade = color(name) if name in METHODS else _COLORS["copc"]
        values = [100 * x for x in by_seed(entries[name], figure).values()]
        axes.plot(values, [place] * len(values), "o", color=shade, alpha=0.35, markersize=4)
        if not values:
            axes.text(0.02, place, "missing", va="center", transform=axes.get_yaxis_transform())
            continue
        mean, _, high = mean_interval(values)
        half = 0.0 if math.isinf(high) else high - mean
        axes.errorbar(mean, place, xerr=half, color=shade, marker="D", markersize=5, capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("held-out score after training, percent")


def _curves(axes: Any, entries: Mapping[str, Sequence[Row]], shades: Sequence[Any]) -> None:
    """Mean held-out score by update, with the range over seeds and collapses marked."""
    for (name, rows), shade in zip(entries.items(), shades, strict=True):
        curves = [dict(map(tuple, r["record"]["curve"])) for r in rows if r["record"]["curve"]]
        if not curves:
            axes.plot([], [], color=shade, label=f"{name}: missing")
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[100 * curve[step] for curve in curves] for step in steps]
        axes.plot(steps, [statistics.fmean(v) for v in values], color=shade, label=name)
        axes.fill_between(
            steps, [min(v) for v in values], [max(v) for v in values], color=shade, alpha=0.12
        )
        for row in rows:
            at = row["record"]["collapse_update"]
            if at is not None:
                height = dict(map(tuple, row["record"]["curve"])).get(at)
                if height is not None:
                    axes.plot(at, 100 * height, "x", color=shade, markersize=8)
    axes.set_xlabel("learner updates")
    axes.set_ylabel("held-out score, percent")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)


# --- Sections -------------------------------------------------------------------------------------


def figure1(results: Results, pictures: Pictures) -> list[str]:
    """Heat maps of both channels, and whether the effect of one turns with the other."""
    name, low, high = "loss.eta_policy", 0.25, 0.75
    levels = groups(results.rows, "staleness")
    figure, axes = _canvas(3.4 * len(levels), 3.2, len(levels))
    for place, (staleness, rows) in zip(axes, levels.items(), strict=True):
        _heat(place, rows, f"s = {staleness}")
    blocks = [
        pictures(
            figure,
            "figure1",
            "Held-out score after training, mean over seeds, half the width of its 95% interval "
            "and number of seeds; gray: missing.",
        )
    ]

    def effect(rows: Sequence[Row], eta_policy: float) -> Found:
        at = [r for r in rows if setting(r, name) == eta_policy]
        sides = groups(at, "loss.eta_advantage")
        return paired(sides.get(high, []), sides.get(low, []))

    everything = [("all levels of staleness", results.rows)] if len(levels) > 1 else []
    for title, rows in [(f"s = {s}", rows) for s, rows in levels.items()] + everything:
        for eta_policy, sign, word in ((low, 1, "helps"), (high, -1, "hurts")):
            found = effect(rows, eta_policy)
            blocks.append(
                claim(
                    f"raising eta_A from 0.25 to 0.75 {word} at eta_P = {eta_policy} "
                    "(section 6.2, on AIME 2025, s = 8, 12, 16)",
                    f"{title}: {points(found)}",
                    judge(found, sign),
                )
            )
        finished = [
            r for r in rows if r["state"] == "finished" and r["record"]["final"] is not None
        ]
        test = comparison.interaction(
            [setting(r, "loss.eta_advantage") for r in finished],
            [setting(r, name) for r in finished],
            [(setting(r, "seed"), setting(r, "staleness")) for r in finished],
            [r["record"]["final"] for r in finished],
        )
        here, verdict = "not enough finished runs for a test", "missing: no test"
        if test is not None:
            here = (
                f"the effect changes by {100 * test.contrast:+.1f} points "
                f"[{100 * test.low:+.1f}, {100 * test.high:+.1f}] from the lowest to the highest "
                f"eta_P; p = {test.p_value:.4f} (permutation), {test.runs} runs, {test.blocks} "
                "blocks"
            )
            verdict = "open: p is 0.05 or more"
            if test.p_value < 0.05:
                verdict = "agrees" if test.contrast < 0 else "contradicts"
                verdict += ": p below 0.05"
        blocks.append(
            claim(
                "the effect of eta_A turns from gain to loss as eta_P grows (interaction)",
                f"{title}: {here}",
                verdict,
            )
        )
    blocks.append(
        paragraph(
            "The interaction is the product term of a least-squares fit of the score on seeds "
            "(and staleness) as blocks, eta_A, eta_P and their centered product, in points "
            "between the ends of both; its interval is from the residuals, its p-value from 9,999 "
            "permutations of the residuals of the fit without it, within blocks (Freedman and "
            "Lane)."
        )
    )
    return blocks


def table1(results: Results, pictures: Pictures) -> list[str]:
    """All methods on one task."""
    task = setting(results.rows[0], "task")
    paper = {"math": (50.29, 48.11, 48.26), "search": (44.57, 40.80, 41.80)}[task]
    levels = groups(results.rows, "staleness")
    most = max(len(by_method(rows)) for rows in levels.values())
    figure, axes = _canvas(4.6 * len(levels), 1.2 + 0.28 * most, len(levels))
    curves, below = _canvas(5.8 * len(levels), 4.4, len(levels))
    blocks: list[str] = []
    for place, course, (staleness, rows) in zip(axes, below, levels.items(), strict=True):
        methods = by_method(rows)
        _dots(place, methods)
        _curves(course, methods, [color(name) for name in methods])
        for each in (place, course):
            each.set_title(f"{task}, s = {staleness}")
        means = {
            name: statistics.fmean(found.values())
            for name, own in methods.items()
            if (found := by_seed(own)) and name not in _COPC
        }
        best = max(means, key=lambda name: means[name], default=None)
        copc = methods.get("copc", [])
        for other, said in (
            ("copc_no_rc", f"return correction: {paper[1]} to {paper[0]}"),
            ("ppo", "COPC is ahead of asynchronous PPO (section 6.3)"),
            (best, f"COPC {paper[0]}, strongest asynchronous baseline {paper[2]}"),
        ):
            theirs = methods.get(other or "", [])
            here = f"s = {staleness}: COPC {interval(by_seed(copc).values())}, "
            here += f"{other or 'no baseline'} {interval(by_seed(theirs).values())}, "
            here += f"difference {difference(copc, theirs)}"
            blocks.append(claim(said, here, judge(paired(copc, theirs), 1)))
        blocks.append(
            table(
                (
                    *("method", "after training", "best evaluation", "mean of the run"),
                    *("warm start", "sampled, end", "minus PPO", "minus PPO, mean of the run"),
                    *(f"minus strongest baseline ({best or 'missing'})", "collapsed"),
                    *(title for _, title, _ in _COUPLING),
                ),
                (
                    (
                        name,
                        interval(by_seed(own).values()),
                        interval(by_seed(own, "best").values()),
                        interval(by_seed(own, "mean").values()),
                        interval(by_seed(own, "start").values()),
                        interval(by_seed(own, "train_final").values()),
                        *(
                            "" if name == "ppo" else difference(own, methods.get("ppo", []), figure)
                            for figure in ("final", "mean")
                        ),
                        "" if name == best else difference(own, methods.get(best or "", [])),
                        collapses(own),
                        *coupling(own),
                    )
                    for name, own in methods.items()
                ),
            )
        )
    blocks.append(
        paragraph(
            "The strongest baseline is chosen by these same runs, which favors it. Its rows leave "
            f"out {', '.join(sorted(_COPC - {'copc'}))}. The mean of a run is that of all its "
            "evaluations: it tells who learns sooner where all end alike."
        )
    )
    name = f"table-{task}"
    return [
        pictures(figure, name, "Each run, and mean with 95% interval over seeds."),
        pictures(curves, f"{name}-curves", "Held-out score, mean and range over seeds."),
        *blocks,
    ]


def figure2(results: Results, pictures: Pictures) -> list[str]:
    """Long curves of all methods, and of COPC by staleness."""
    default = min(
        (s for s, rows in groups(results.rows, "staleness").items() if len(by_method(rows)) > 1),
        default=None,
    )
    methods = by_method(r for r in results.rows if setting(r, "staleness") == default)
    copc = groups((r for r in results.rows if setting(r, "method") == "copc"), "staleness")
    figure, (left, right) = _canvas(11.5, 4.4, 2)
    _curves(left, methods, [color(name) for name in methods])
    left.set_title(f"All methods, s = {default}; x: collapse")
    shades = matplotlib.colormaps["viridis"]
    named = {f"s = {s}": rows for s, rows in copc.items()}
    _curves(right, named, [shades(i / max(len(named), 1)) for i in range(len(named))])
    right.set_title("COPC by staleness")
    baselines = [r for name, rows in methods.items() if name not in _COPC for r in rows]
    judged = [r["record"]["collapsed"] for r in baselines if r["state"] == "finished"]
    judged = [value for value in judged if value is not None]
    copc_judged = [
        r["record"]["collapsed"] for r in methods.get("copc", []) if r["state"] == "finished"
    ]
    verdict = "missing: no finished runs of both"
    if judged and copc_judged:
        agrees = sum(judged) > len(judged) / 2 and not any(copc_judged)
        verdict = "agrees" if agrees else "contradicts"
        verdict += ": by the definition of collapse below"
    blocks = [
        pictures(figure, "figure2", "Held-out score, mean and range over seeds."),
        claim(
            "COPC stays stable on search while most asynchronous baselines collapse late "
            "(section 6.4)",
            f"collapsed: COPC {collapses(methods.get('copc', []))}, baselines "
            f"{collapses(baselines)}",
            verdict,
        ),
    ]
    if len(copc) > 1:
        least, most = min(copc), max(copc)

        def of(rows: Sequence[Row]) -> dict[Any, float]:
            # Paired by seed across levels of staleness.
            return {key[0]: value for key, value in by_seed(rows).items()}

        found = comparison.paired_difference(of(copc[most]), of(copc[least]))
        verdict = judge(found, 1)
        if found is not None and found[0] > 1:
            near = max(-found[2], found[3]) <= 0.05
            wide = found[2] <= 0 <= found[3]
            verdict = "open: the interval holds 0 and is wider than 5 points"
            if near or not wide:
                verdict = "agrees: within 5 points" if near else "contradicts: an interval beyond 0"
        told = ", ".join(f"s = {s} {collapses(rows)}" for s, rows in copc.items())
        blocks.append(
            claim(
                "COPC from s = 8 to s = 64 is stable with comparable final scores (AIME 2025)",
                f"s = {most} minus s = {least}: {points(found)}; collapsed: {told}",
                verdict,
            )
        )
    blocks.append(
        table(
            (
                "runs",
                "after training",
                "best evaluation",
                "sampled, end",
                "collapsed",
                *(title for _, title, _ in _COUPLING),
            ),
            (
                (
                    name,
                    interval(by_seed(own).values()),
                    interval(by_seed(own, "best").values()),
                    interval(by_seed(own, "train_final").values()),
                    collapses(own),
                    *coupling(own),
                )
                for name, own in {
                    **methods,
                    **{f"copc, s = {s}": r for s, r in copc.items()},
                }.items()
            ),
        )
    )
    return blocks


def ablations(results: Results, pictures: Pictures) -> list[str]:
    """COPC with one thing changed at a time."""
    levels = groups(results.rows, "staleness")
    figure, axes = _canvas(6.2 * len(levels), 3.4, len(levels))
    blocks: list[str] = []
    for place, (staleness, rows) in zip(axes, levels.items(), strict=True):
        labels = by_label(rows)
        _dots(place, labels)
        place.set_title(f"s = {staleness}")
        whole = labels.get("COPC", [])
        without = labels.get("without return correction", [])
        found = comparison.paired_difference(by_seed(whole), by_seed(without))
        blocks.append(
            claim(
                "return correction raises math from 48.11 to 50.29 and search from 40.80 to 44.57",
                f"s = {staleness}: COPC minus COPC without it {difference(whole, without)}",
                judge(found, 1),
            )
        )
        blocks.append(
            table(
                (
                    "change",
                    "after training",
                    "minus COPC",
                    "mean over the run, minus COPC",
                    "collapsed",
                    *(title for _, title, _ in _COUPLING),
                ),
                (
                    (
                        label,
                        interval(by_seed(own).values()),
                        "" if label == "COPC" else difference(own, whole),
                        "" if label == "COPC" else difference(own, whole, "mean"),
                        collapses(own),
                        *coupling(own),
                    )
                    for label, own in labels.items()
                ),
            )
        )
    return [pictures(figure, "ablations", "Each run, and mean with 95% interval."), *blocks]


def _timing(rows: Sequence[Row]) -> list[str]:
    parts = ("step_seconds", "learner_seconds", "wait_seconds", "publish_seconds")
    return [
        *(interval(by_seed(rows, name).values(), 1.0, ".3f") for name in parts),
        interval(by_seed(rows, "tokens_per_second").values(), 1.0, ".0f"),
        interval(by_seed(rows, "busy_fraction").values(), 100.0, ".0f"),
    ]


def table3(results: Results, pictures: Pictures) -> list[str]:
    """Step time and throughput."""
    del pictures
    blocks: list[str] = []
    for task, rows in groups(results.rows, "task").items():
        labels = by_label(rows)
        sides = {
            key: {seed[0]: value for seed, value in by_seed(own, "step_seconds").items()}
            for key, own in labels.items()
        }
        copc = sides.get("COPC, asynchronous", {})
        for top, bottom, bound, sign, said in (
            (copc, sides.get("PPO, asynchronous", {}), 1.02, -1, "COPC over asynchronous PPO"),
            (sides.get("PPO, synchronous", {}), copc, 1.5, 1, "synchronous PPO over COPC"),
        ):
            found = comparison.paired_ratio(top, bottom)
            here = f"{task}: step time of {said} "
            here += "missing" if found is None else f"{found[1]:.3f}"
            if found is not None and found[0] > 1:
                here += f" [{found[2]:.3f}, {found[3]:.3f}] ({found[0]} pairs)"
            paper = "COPC adds about 1% step time to asynchronous PPO"
            if sign > 0:
                paper = "COPC is about 1.7 times as fast as synchronous PPO"
            blocks.append(claim(paper, here, judge_bound(found, bound, sign)))
        blocks.append(
            table(
                (
                    *(task, "seconds an update", "updating", "waiting for rollouts", "publishing"),
                    *("sampled tokens a second", "generator busy, percent"),
                ),
                ((label, *_timing(own)) for label, own in labels.items()),
            )
        )
    blocks.append(
        paragraph(
            "Learner and rollout server have one core each. The limit of asynchronous over "
            "synchronous is 2.0, where both sides take the same time."
        )
    )
    return blocks


def drift(results: Results, pictures: Pictures) -> list[str]:
    """At which drift each method breaks."""
    methods = by_method(results.rows)
    axes_of = (
        ("sigma", "sigma of log r", "log"),
        ("kl", "KL(behavior, policy), nats a token", "log"),
        ("effective_sample_size", "effective sample size, share of tokens", "linear"),
    )
    figure, axes = _canvas(13.0, 4.2, 3)
    for place, (name, title, scale) in zip(axes, axes_of, strict=True):
        for method, rows in methods.items():
            points = [
                (
                    r["record"][name],
                    100 * (r["record"]["final"] - r["record"]["start"]),
                    r["record"]["collapsed"],
                )
                for r in rows
                if r["state"] == "finished" and r["record"][name] is not None
            ]
            for collapsed, mark in ((False, "o"), (True, "x")):
                chosen = [(x, y) for x, y, broke in points if bool(broke) == collapsed]
                if chosen:
                    x, y = zip(*chosen, strict=True)
                    place.plot(x, y, mark, color=color(method), alpha=0.7, markersize=5)
            place.plot([], [], "o", color=color(method), label=method)
        place.set_xscale(scale)
        if scale == "log":
            place.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            place.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            place.xaxis.set_minor_formatter(NullFormatter())
        place.axhline(0, color="#9aa0a6", linewidth=1)
        place.set_xlabel(title)
        place.set_ylabel("points gained over the warm start")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    axes[0].set_title("x: collapsed")
    rates = groups(results.rows, "actor.learning_rate", "staleness")
    lines = []
    for (rate, staleness), rows in rates.items():
        for method, own in by_method(rows).items():
            gain = {key: value - by_seed(own, "start")[key] for key, value in by_seed(own).items()}
            lines.append(
                (
                    f"{rate:g}",
                    str(staleness),
                    method,
                    interval(gain.values()),
                    "" if method == "ppo" else difference(own, by_method(rows).get("ppo", [])),
                    collapses(own),
                    *coupling(own),
                )
            )
    ends = []
    for method, rows in methods.items():
        done = [r["record"] for r in rows if r["state"] == "finished" and r["record"]["sigma"]]
        broke = [d["sigma"] for d in done if d["collapsed"]]
        held = [d["sigma"] for d in done if d["collapsed"] is False]
        ends.append(
            (
                method,
                f"{min(broke):.3f}" if broke else "none collapsed" if done else "missing",
                f"{max(held):.3f}" if held else "none held" if done else "missing",
                collapses(rows),
            )
        )
    broken = {
        method: {
            (setting(r, "seed"), setting(r, "staleness"), setting(r, "actor.learning_rate")): float(
                r["record"]["collapsed"]
            )
            for r in rows
            if r["state"] == "finished" and r["record"]["collapsed"] is not None
        }
        for method, rows in methods.items()
    }
    found = comparison.paired_difference(broken.get("copc", {}), broken.get("ppo", {}))
    here = "missing"
    if found is not None:
        here = f"COPC collapses in {100 * found[1]:+.0f} points more of the cells than PPO "
        here += f"[{100 * found[2]:+.0f}, {100 * found[3]:+.0f}], {found[0]} pairs"
    return [
        pictures(
            figure, "drift", "Points gained, by the drift before any collapse; one mark a run."
        ),
        claim("COPC is the more stable method under staleness (abstract)", here, judge(found, -1)),
        table(
            (
                "method",
                "least sigma of a collapsed run",
                "largest sigma of a run that held",
                "collapsed",
            ),
            ends,
        ),
        table(
            (
                "step size",
                "s",
                "method",
                "points gained",
                "minus PPO",
                "collapsed",
                *(title for _, title, _ in _COUPLING),
            ),
            lines,
        ),
    ]


def grid(results: Results, pictures: Pictures) -> list[str]:
    """Runs of one's own: a line for each choice of the settings that differ, over seeds."""
    del pictures
    names = [name for name in sweep.differing(results.rows) if name != "seed"]
    found = groups(results.rows, *names) if names else {(): list(results.rows)}
    return [
        table(
            (
                *names,
                "warm start",
                "after training",
                "best evaluation",
                "sampled, end",
                "collapsed",
                *(title for _, title, _ in _COUPLING),
            ),
            (
                (
                    *(str(k) for k in (key if len(names) != 1 else (key,))),
                    interval(by_seed(own, "start").values()),
                    interval(by_seed(own).values()),
                    interval(by_seed(own, "best").values()),
                    interval(by_seed(own, "train_final").values()),
                    collapses(own),
                    *coupling(own),
                )
                for key, own in found.items()
            ),
        )
    ]


_SECTIONS: dict[str | None, Callable[[Results, Pictures], list[str]]] = {
    "figure1": figure1,
    "table1": table1,
    "table2": table1,
    "figure2": figure2,
    "ablations": ablations,
    "table3": table3,
    "drift": drift,
}


def _differs(rows: Sequence[Row]) -> str:
    """What is different here from the paper, from the configuration of the runs."""

    def of(name: str) -> str:
        values = list(dict.fromkeys(setting(row, name) for row in rows))
        return " or ".join(str(value) for value in values)

    return (
        f"What differs from the paper: a Llama of {of('tiny.num_layers')} layers of width "
        f"{of('tiny.hidden_size')}, trained from nothing on demonstrations, in place of "
        f"Llama-3.2-3B and Qwen3-4B; task {of('task')} with built-in questions in place of seven "
        f"search benchmarks and AIME; {of('updates')} updates of {of('batch_size')} episodes of at "
        f"most {of('rollout.max_tokens')} tokens; actor's step size "
        f"{of('actor.learning_rate')} in place of about 1e-6; staleness {of('staleness')}, mode "
        f"{of('staleness_mode')}; seeds {of('seed')}. Formulas that the paper does not print are "
        "inferred (README, assumptions)."
    )


def _behind(results: Results) -> str:
    """Commands, machines, failures and configurations of an experiment."""
    parts = []
    for folder, about in results.sweeps:
        for start in about["started"]:
            on = ", ".join(f"{k} {v}" for k, v in start["machine"].items())
            parts.append(element("pre", html.escape(start["command"])))
            parts.append(
                paragraph(f"{folder.name}, size {about['size']}, code {start['commit']}; {on}")
            )
    seconds = sum(row.get("cpu_seconds", 0.0) for row in results.rows)
    counts = {
        s: sum(r["state"] == s for r in results.rows) for s in ("finished", "failed", "missing")
    }
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    parts.append(paragraph(f"{len(results.rows)} runs: {text}; {seconds / 60:.0f} CPU minutes."))
    trouble = [(r["run"], r["error"]) for r in results.rows if r["state"] == "failed"]
    if trouble:
        parts.append(table(("failed run", "its last error"), trouble))
    differing = sweep.differing(results.rows) if len(results.rows) > 1 else []
    shared = {k: v for k, v in sweep.flat(results.rows[0]["config"]).items() if k not in differing}
    parts.append(paragraph(f"Settings that differ between runs: {', '.join(differing) or 'none'}."))
    parts.append(element("pre", html.escape(json.dumps(shared, indent=1))))
    summary = element("summary", "Commands, seeds, machine, configuration")
    return element("details", summary, *parts)


def page(all_results: Sequence[Results], pictures: Pictures) -> str:
    """The whole page."""
    body = []
    for results in all_results:
        title = "Grids of one's own"
        if results.name is not None:
            title = sweep.EXPERIMENTS[results.name].title
        body.append(element("h2", html.escape(title)))
        body.append(paragraph(_differs(results.rows)))
        build = _SECTIONS.get(results.name, grid)
        body += build(results, pictures)
        body.append(_behind(results))
    collapse = (comparison.__doc__ or "").split("\n\n")[2]
    return _PAGE.format(
        about=paragraph((__doc__ or "").split("\n\n")[-1].replace("\n", " ")),
        collapse=paragraph(
            collapse.replace("\n", " ").replace("`", "")
            + f" COLLAPSE_WINDOW is {comparison.COLLAPSE_WINDOW}, COLLAPSE_SHARE "
            f"{comparison.COLLAPSE_SHARE}, COLLAPSE_FLOOR {comparison.COLLAPSE_FLOOR}."
        ),
        body="\n".join(body),
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The paper's experiments</title>
<style>
:root {{
  color-scheme: light dark;
  --ground: light-dark(#ffffff, #14171c);
  --panel: light-dark(#f5f6f8, #1c2027);
  --edge: light-dark(#d5d9e0, #363c47);
  --ink: light-dark(#16181d, #e9ebef);
  --faint: light-dark(#5a6270, #a0a8b5);
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 76rem; padding: 0 1rem 2rem; background: var(--ground);
  color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
}}
h1 {{ font-size: 1.3rem; }}
h2 {{
  font-size: 1.1rem; margin-top: 2.5rem; border-top: 1px solid var(--edge); padding-top: 1rem;
}}
figure {{ margin: 1rem 0; }}
figure img {{ max-width: 100%; background: #fff; border-radius: 4px; }}
figcaption, summary {{ color: var(--faint); }}
.scroll {{ overflow-x: auto; margin: 1rem 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{
  border: 1px solid var(--edge); padding: .2rem .5rem; text-align: left; vertical-align: top;
  white-space: nowrap;
}}
th {{ white-space: normal; background: var(--panel); font-weight: 600; min-width: 4rem; }}
.claim {{
  display: grid; grid-template-columns: 5rem 1fr; gap: .1rem .6rem; margin: .6rem 0;
  background: var(--panel); border-left: 5px solid var(--edge); padding: .5rem .8rem;
}}
.claim dt {{ color: var(--faint); }}
.claim dd {{ margin: 0; overflow-wrap: anywhere; }}
.claim.agrees {{ border-color: #2e8b57; }}
.claim.contradicts {{ border-color: #c0392b; }}
pre {{ overflow: auto; max-height: 22rem; background: var(--panel); padding: .5rem; }}
</style>
</head>
<body>
<h1>The paper's experiments, at laptop scale</h1>
{about}
{collapse}
{body}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page and return its path.

    Raises:
        SystemExit: 2 where there is nothing to report, or a folder is no sweep.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="*", type=Path, help="folders of sweeps")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("runs/report"), help="folder to write"
    )
    options = parser.parse_args(arguments)
    folders = options.sweeps or sorted(
        path.parent for path in Path("runs/sweeps").glob(f"*/{sweep.SWEEP_FILE}")
    )
    try:
        results = [found for found in read(folders) if found.rows]
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if not results:
        parser.error("no rows: give the folder of a sweep, or run experiments/sweep.py first")
    with matplotlib.rc_context(_STYLE):
        text = page(results, Pictures(options.out))
    path = options.out / "report.html"
    path.write_text(text, encoding="utf-8")
    print(f"report: {path}")
    return path


if __name__ == "__main__":
    main()
