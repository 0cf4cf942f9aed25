"""What a run comes to in one record, and what many runs say together: collapse, intervals, tests.

Scores are greedy held-out accuracy, 0 to 1, as `copc_jax.metrics` logs it. Nothing here reads which
method a run is of.

Collapse, as it was fixed before any comparison was run: a run has collapsed if the mean of its last
`COLLAPSE_WINDOW` evaluations is below `COLLAPSE_SHARE` of the best mean of as many consecutive
evaluations before, the warm start among them. Reasons: three evaluations in a row halve the noise
of one (some 3 points for 250 questions) and pass over a dip that a run recovers from; half of the
best is far outside that noise where the best is above `COLLAPSE_FLOOR`, and below that there is
nothing to lose; and measured against the run's own best, it counts what was learned and lost and
not what was never learned. A run that ends with numbers that are not finite has collapsed too. A
run that was cut off by anything else, such as a dead server, is a failed run and not a collapsed
one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from copc_jax.metrics import SCORES, mean_interval, read_metrics, student_t

COLLAPSE_WINDOW = 3
COLLAPSE_SHARE = 0.5
COLLAPSE_FLOOR = 0.1

# Figures of a record that are medians over a window of updates, by the names of metrics.jsonl; the
# first name that a run logged counts.
DRIFT = {
    "explained_variance": ("coupling/explained_variance",),
    "correction": ("coupling/correction",),
    "gae_magnitude": ("coupling/gae_magnitude",),
    "sign_flip": ("coupling/sign_flip",),
    "kept": ("actor/kept",),
    "mask_kept": ("coupling/mask_kept",),
    "restoring": ("actor/restoring",),
    "effective_sample_size": ("coupling/effective_sample_size",),
    "kl": ("coupling/kl_k3", "actor/kl"),
    "sigma": ("coupling/log_ratio_std",),
    "lag": ("lag/mean",),
    "gradient_norm": ("actor/gradient_norm",),
}
_PERMUTATIONS = 9999


@dataclasses.dataclass(frozen=True)
class Collapse:
    """Whether a series of evaluations ends in collapse.

    Attributes:
        collapsed: by the definition of this module.
        since: index of the last evaluation of the first mean from which on all are below the
            bound; None without a collapse.
        best: best mean of `COLLAPSE_WINDOW` evaluations in a row.
        last: mean of the last ones.
    """

    collapsed: bool
    since: int | None
    best: float
    last: float


def collapse(scores: Sequence[float]) -> Collapse | None:
    """Judge the held-out scores of a run, in order, the warm start first.

    Returns:
        None with no more evaluations than one mean takes: such a run is too short to tell.
    """
    window = COLLAPSE_WINDOW
    if len(scores) <= window:
        return None
    means = [float(np.mean(scores[i : i + window])) for i in range(len(scores) - window + 1)]
    # The warm start alone stands for itself: what came before it is not known.
    bests = list(itertools.accumulate(means[:-1], max, initial=float(scores[0])))
    if bests[-1] < COLLAPSE_FLOOR or means[-1] >= COLLAPSE_SHARE * bests[-1]:
        return Collapse(False, None, bests[-1], means[-1])
    since = len(means) - 1
    while since > 0 and means[since - 1] < COLLAPSE_SHARE * bests[since - 1]:
        since -= 1
    return Collapse(True, since + window - 1, bests[-1], means[-1])


def summarize(run_dir: str | pathlib.Path, staleness: int = 0) -> dict[str, Any]:
    """Sum a run up from its metrics.jsonl.

    Args:
        run_dir: the run's folder.
        staleness: bound of the lag, in updates: timings are taken after it has been reached.

    Returns:
        `updates`; `score`, which of em and accuracy the scores are; `start`, `final`, `best`,
        `best_update` and `mean` (over the run) of the held-out score; `train_start` and
        `train_final`, the same score of the sampled training batches in the first and last tenth;
        `collapsed` (None: too short to tell), `collapse_update`; the figures of `DRIFT`, medians
        over the second half of the updates, or of those before the collapse, so that they tell at
        which drift it began and not what it led to; `kl_max` and `sigma_max`, the largest medians
        of a twentieth of that window; `step_seconds`, median of an update with all that it waits
        for, evaluations and checkpoints left out; `learner_seconds`, `wait_seconds`,
        `publish_seconds`, medians of its parts; `tokens_per_second`; `busy_fraction` of the
        generator; `wall_seconds` from the start of the log on, pauses between resumes left out;
        `curve` and `train_curve`, [update, score] pairs. What a run did not log is None.

    Raises:
        ValueError: the metrics are damaged.
    """
    rows = read_metrics(run_dir)
    name = next((s for s in SCORES if any(f"eval/{s}" in row for row in rows)), None)
    curve = [(r["step"], r[f"eval/{name}"]) for r in rows if r.get(f"eval/{name}") is not None]
    train = [(r["step"], r[f"reward/{name}"]) for r in rows if r.get(f"reward/{name}") is not None]
    updates = rows[-1]["step"] if rows else 0
    scores = [score for _, score in curve]
    verdict = collapse(scores)
    broken = bool(rows) and any(
        key in rows[-1] and rows[-1][key] is None for key in ("actor/loss", "critic/loss")
    )
    since = None
    if verdict is not None and verdict.since is not None:
        since = curve[verdict.since][0]
    end = since or updates
    window = [row for row in rows if end / 2 <= row["step"] <= end and row["step"] > 0]
    record: dict[str, Any] = {
        "updates": updates,
        "score": name,
        "start": scores[0] if scores else None,
        "final": scores[-1] if scores else None,
        "best": max(scores, default=None),
        "best_update": max(curve, key=lambda pair: pair[1])[0] if curve else None,
        "mean": float(np.mean(scores)) if scores else None,
        "train_start": _tenth([score for _, score in train], last=False),
        "train_final": _tenth([score for _, score in train], last=True),
        "collapsed": True if broken else None if verdict is None else verdict.collapsed,
        "collapse_update": since,
    }
    for figure, names in DRIFT.items():
        record[figure] = _median(_series(window, *names))
    for figure in ("kl", "sigma"):
        record[f"{figure}_max"] = _largest(_series(window, *DRIFT[figure]))
    record |= _costs(rows, staleness)
    record["curve"] = [list(pair) for pair in curve]
    record["train_curve"] = _thinned(train)
    return record


def _series(rows: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            return values
    return []


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _largest(values: Sequence[float]) -> float | None:
    size = max(len(values) // 20, 1)
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return max((float(np.median(part)) for part in parts), default=None)


def _tenth(values: Sequence[float], *, last: bool) -> float | None:
    if not values:
        return None
    size = max(len(values) // 10, 1)
    return float(np.mean(values[-size:] if last else values[:size]))


def _thinned(pairs: Sequence[tuple[int, float]], points: int = 60) -> list[list[float]]:
    """Means of at most `points` equal parts of a series, at the last update of each."""
    size = max(math.ceil(len(pairs) / points), 1)
    parts = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return [[part[-1][0], round(float(np.mean([y for _, y in part])), 5)] for part in parts]


def _costs(rows: Sequence[Mapping[str, Any]], staleness: int) -> dict[str, float | None]:
    updates = [row for row in rows if row["step"] > 0]
    warm = [row for row in updates if row["step"] > min(staleness, updates[-1]["step"] // 2)]
    # Differences of consecutive lines only: a resume leaves a gap in neither.
    steps = [
        after["time"]
        - before["time"]
        - (after.get("learner/eval_seconds") or 0.0)
        - (after.get("learner/checkpoint_seconds") or 0.0)
        for before, after in itertools.pairwise(warm)
    ]
    step = _median(steps)
    tokens = _median(_series(warm, "batch/action_tokens"))
    return {
        "step_seconds": step,
        "learner_seconds": _median(_series(warm, "learner/seconds")),
        "wait_seconds": _median(_series(warm, "learner/wait_seconds")),
        "publish_seconds": _median(_series(warm, "learner/publish_seconds")),
        "busy_fraction": _median(_series(warm, "rollout/busy_fraction")),
        "tokens_per_second": tokens / step if tokens and step else None,
        "wall_seconds": rows[-1]["time"] if rows else None,
    }


def paired_difference(
    ours: Mapping[Any, float], theirs: Mapping[Any, float]
) -> tuple[int, float, float, float] | None:
    """(pairs, mean, low, high) of ours - theirs over the keys that both have, such as seeds.

    Runs of one seed share warm start, order of questions and held-out questions, so pairs differ
    less than runs do. The interval is Student's, 95%; None without a common key.
    """
    common = [key for key in ours if key in theirs]
    if not common:
        return None
    return len(common), *mean_interval([ours[key] - theirs[key] for key in common])


def paired_ratio(
    ours: Mapping[Any, float], theirs: Mapping[Any, float]
) -> tuple[int, float, float, float] | None:
    """(pairs, geometric mean, low, high) of ours / theirs over the keys that both have."""
    logs = [{key: math.log(value) for key, value in side.items()} for side in (ours, theirs)]
    found = paired_difference(*logs)
    if found is None:
        return None
    pairs, mean, low, high = found
    # An interval of one pair is infinite on both sides.
    return pairs, math.exp(mean), math.exp(low), math.exp(high)


@dataclasses.dataclass(frozen=True)
class Interaction:
    """How the effect of one factor on a score changes with another.

    Attributes:
        contrast: change of the effect of x (from its lowest to its highest level) as z goes from
            its lowest to its highest level, in units of y; negative where x helps at low z and
            hurts at high z.
        low, high: 95% interval of `contrast`, from the residuals of the fit.
        p_value: two-sided, by permutation.
        runs: number of values.
        blocks: number of blocks.
    """

    contrast: float
    low: float
    high: float
    p_value: float
    runs: int
    blocks: int


def interaction(
    x: Sequence[float], z: Sequence[float], block: Sequence[Hashable], y: Sequence[float]
) -> Interaction | None:
    """Test whether the effect of x on y depends on z, with a level of its own for each block.

    Least squares of y on blocks, x, z and (x - mean)(z - mean). The p-value permutes the residuals
    of the fit without the product within blocks (Freedman and Lane, 1983), 9,999 times from a
    fixed seed, and compares |t|; it assumes no distribution.

    Returns:
        None where the product cannot be told apart (fewer than two levels) or no degree of freedom
        is left.
    """
    xs, zs, ys = (np.asarray(v, np.float64) for v in (x, z, y))
    names = {key: i for i, key in enumerate(dict.fromkeys(block))}
    index = np.asarray([names[key] for key in block], int)
    dummies = np.eye(len(names))[index]
    product = (xs - xs.mean()) * (zs - zs.mean()) if xs.size else xs
    reduced = np.column_stack([dummies, xs, zs]) if xs.size else np.zeros((0, 2))
    full = np.column_stack([reduced, product])
    degrees = xs.size - full.shape[1]
    if degrees < 1 or np.linalg.matrix_rank(full) < full.shape[1]:
        return None
    solve, hat = np.linalg.pinv(full), reduced @ np.linalg.pinv(reduced)
    scale = math.sqrt(np.linalg.inv(full.T @ full)[-1, -1])

    def fit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coefficient of the product and its standard error, of each column of values."""
        beta = solve @ values
        rest = values - full @ beta
        return beta[-1], np.sqrt(np.square(rest).sum(0) / degrees) * scale

    fitted = hat @ ys
    residual = ys - fitted
    generator = np.random.default_rng(0)
    permuted = np.empty((ys.size, _PERMUTATIONS))
    for own in range(len(names)):
        rows = np.flatnonzero(index == own)
        # An argsort of random numbers permutes each column on its own.
        order = np.argsort(generator.random((rows.size, _PERMUTATIONS)), axis=0)
        permuted[rows] = residual[rows][order]
    (slope,), (error,) = fit(ys[:, None])
    slopes, errors = fit(fitted[:, None] + permuted)
    # Numbers that differ by rounding count as equal, and data without noise has no error at all.
    tiny = 1e-12 * max(float(np.abs(ys).max()), 1e-12)
    observed = abs(slope) / max(error, tiny)
    beyond = np.abs(slopes) / np.maximum(errors, tiny) >= observed * (1 - 1e-9)
    span = float(np.ptp(xs) * np.ptp(zs))
    half = student_t(degrees) * float(error)
    return Interaction(
        contrast=float(slope) * span,
        low=(float(slope) - half) * span,
        high=(float(slope) + half) * span,
        p_value=(1 + int(beyond.sum())) / (1 + _PERMUTATIONS),
        runs=xs.size,
        blocks=len(names),
    )
