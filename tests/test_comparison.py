"""What runs come to, and what they say together."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from copc_jax import comparison
from copc_jax.metrics import student_t


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "time": float(step), **row}) for step, row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


# Collapse.


@pytest.mark.parametrize(
    "scores, collapsed, since",
    [
        # Learned and lost; the mean of three is below half of the best from the fifth on.
        ([0.2, 0.6, 0.6, 0.6, 0.1, 0.1, 0.1], True, 5),
        # One bad evaluation, and a dip that the run recovers from.
        ([0.2, 0.6, 0.6, 0.6, 0.6, 0.6, 0.0], False, None),
        ([0.2, 0.6, 0.6, 0.6, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5], False, None),
        # Twice: the last time counts.
        ([0.6, 0.6, 0.6, 0.0, 0.0, 0.0, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0], True, 10),
        # What the warm start knew is lost at once.
        ([0.5, 0.1, 0.1, 0.1], True, 2),
        # Never above the floor: there is nothing to lose.
        ([0.05, 0.09, 0.09, 0.09, 0.0, 0.0, 0.0], False, None),
        # Nothing learned, nothing lost.
        ([0.3, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2], False, None),
    ],
)
def test_a_run_collapses_when_it_ends_below_half_of_its_best(scores, collapsed, since):
    found = comparison.collapse(scores)
    assert (found.collapsed, found.since) == (collapsed, since)


def test_a_run_that_is_too_short_is_not_judged():
    assert comparison.collapse([0.5, 0.1, 0.1]) is None
    assert comparison.collapse([]) is None


# One run.


def run_rows(scores, updates=60):
    every = updates // (len(scores) - 1)
    for step in range(updates + 1):
        row = {}
        if step % every == 0:
            row["eval/em"] = scores[step // every]
        if step:
            row |= {
                "reward/em": step / updates,
                "actor/loss": 0.0,
                "actor/kept": 0.5,
                "coupling/kl_k3": step / 1000,
                "coupling/log_ratio_std": 0.1,
                "learner/seconds": 0.25,
                "learner/eval_seconds": 0.5,
                "batch/action_tokens": 100,
            }
        yield step, row


def test_a_run_is_summed_up(tmp_path):
    record = comparison.summarize(write(tmp_path, run_rows([0.1, 0.2, 0.5, 0.4, 0.4])), 4)
    assert record["score"] == "em" and record["updates"] == 60
    assert (record["start"], record["final"], record["best"]) == (0.1, 0.4, 0.5)
    assert record["best_update"] == 30
    assert record["mean"] == pytest.approx(0.32)
    assert record["train_start"] == pytest.approx(3.5 / 60)
    assert record["train_final"] == pytest.approx(57.5 / 60)
    assert record["collapsed"] is False and record["collapse_update"] is None
    # The second half of the run.
    assert record["kl"] == pytest.approx(0.045)
    assert record["kl_max"] == pytest.approx(0.06)
    assert (record["kept"], record["sigma"]) == (0.5, pytest.approx(0.1))
    assert record["explained_variance"] is None
    assert record["curve"] == [[0, 0.1], [15, 0.2], [30, 0.5], [45, 0.4], [60, 0.4]]
    assert record["train_curve"][-1] == [60, 1.0]
    # An update takes a second, half of it for evaluating.
    assert record["step_seconds"] == pytest.approx(0.5)
    assert record["tokens_per_second"] == pytest.approx(200)
    assert record["wall_seconds"] == 60
    json.dumps(record, allow_nan=False)


def test_drift_is_measured_before_the_collapse_and_not_after_it(tmp_path):
    scores = [0.4, 0.4, 0.4, 0.4, 0.0, 0.0, 0.0]
    record = comparison.summarize(write(tmp_path, run_rows(scores)))
    assert record["collapsed"] is True and record["collapse_update"] == 50
    assert record["kl"] == pytest.approx(0.0375)


def test_numbers_that_are_not_finite_are_a_collapse(tmp_path):
    rows = [*run_rows([0.4, 0.4]), (61, {"actor/loss": None})]
    assert comparison.summarize(write(tmp_path, rows))["collapsed"] is True


def test_a_run_without_metrics_has_a_record_without_figures(tmp_path):
    record = comparison.summarize(tmp_path / "none")
    assert record["updates"] == 0 and record["curve"] == []
    assert record["final"] is record["collapsed"] is record["kl"] is record["step_seconds"] is None
    assert set(record) == set(comparison.summarize(write(tmp_path, run_rows([0.1, 0.1]))))


# Many runs.


def test_differences_are_paired():
    ours, theirs = {0: 0.5, 1: 0.7, 2: 0.9, 9: 0.0}, {2: 0.6, 1: 0.5, 0: 0.4, 8: 1.0}
    pairs, mean, low, high = comparison.paired_difference(ours, theirs)
    want = scipy.stats.t.interval(0.95, 2, 0.2, np.std([0.1, 0.2, 0.3], ddof=1) / math.sqrt(3))
    assert (pairs, mean) == (3, pytest.approx(0.2))
    np.testing.assert_allclose((low, high), want, rtol=1e-3)
    assert comparison.paired_difference(ours, {8: 1.0}) is None
    assert comparison.paired_difference({0: 1.0}, {0: 0.5}) == (1, 0.5, -math.inf, math.inf)


def test_ratios_are_paired():
    pairs, mean, low, high = comparison.paired_ratio({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0})
    assert (pairs, mean) == (2, pytest.approx(4.0))
    assert low * high == pytest.approx(16.0) and low < 4 < high
    assert comparison.paired_ratio({0: 2.0}, {0: 1.0})[2:] == (0.0, math.inf)
    assert comparison.paired_ratio({0: 2.0}, {1: 1.0}) is None


def test_student_t_is_scipy_s():
    for degrees in (1, 2, 5, 12, 13, 20, 60, 500):
        assert student_t(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=1e-3)
    with pytest.raises(ValueError, match="degree"):
        student_t(0)


def design(seeds=3, levels=(0.25, 0.5, 0.75)):
    cells = [(x, z, seed) for seed in range(seeds) for x in levels for z in levels]
    x, z, seed = zip(*cells, strict=True)
    return np.array(x), np.array(z), list(seed)


def interaction(x, z, seed, y):
    return comparison.interaction(x.tolist(), z.tolist(), seed, y.tolist())


def test_an_interaction_is_the_change_of_an_effect():
    """At the four corners it is the difference of two differences, whatever else has an effect."""
    x, z, seed = design()
    y = 0.1 * np.array(seed) + 0.3 * x - 0.2 * z - 2.0 * x * z
    found = interaction(x, z, seed, y)
    assert found.contrast == pytest.approx(-2.0 * 0.5 * 0.5)
    assert found.low == pytest.approx(found.contrast) == pytest.approx(found.high)
    assert found.p_value < 0.001 and (found.runs, found.blocks) == (27, 3)


def test_an_interaction_under_noise_is_a_least_squares_fit():
    x, z, seed = design()
    noise = np.random.default_rng(1).normal(0, 0.02, x.size)
    keep = np.arange(x.size) != 4
    y = (0.3 * x - x * z + noise)[keep]
    x, z, seed = x[keep], z[keep], [s for s, k in zip(seed, keep, strict=True) if k]
    found = interaction(x, z, seed, y)
    columns = [np.equal(seed, s) for s in range(3)] + [x, z, x * z]
    beta, rest, _, _ = np.linalg.lstsq(np.column_stack(columns).astype(float), y, rcond=None)
    assert found.contrast == pytest.approx(beta[-1] * 0.25)
    matrix = np.column_stack(columns).astype(float)
    error = math.sqrt(rest[0] / 20 * np.linalg.inv(matrix.T @ matrix)[-1, -1])
    half = scipy.stats.t.ppf(0.975, 20) * error * 0.25
    np.testing.assert_allclose(
        [found.low, found.high], found.contrast + np.array([-half, half]), rtol=1e-4
    )
    # The permutations agree with Student's t, which holds for this noise.
    t = beta[-1] / error
    assert found.p_value == pytest.approx(2 * scipy.stats.t.sf(abs(t), 20), abs=0.01)


def test_without_an_interaction_one_test_in_twenty_finds_one():
    x, z, seed = design()
    generator = np.random.default_rng(0)
    p = [
        interaction(x, z, seed, x + z + generator.standard_t(3, x.size)).p_value for _ in range(60)
    ]
    assert np.mean(np.less(p, 0.05)) < 0.15 and 0.3 < np.mean(p) < 0.7


def test_what_cannot_be_tested_is_not():
    assert comparison.interaction([], [], [], []) is None
    assert comparison.interaction([1, 1, 1], [1, 2, 3], [0, 0, 0], [1, 2, 3]) is None
    corners = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1.0, 2.0, 3.0, 5.0])
    assert comparison.interaction(*corners) is None
