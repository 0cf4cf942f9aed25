"""The long-run benchmark tells what grows from what does not."""

import pathlib
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import long_run


def judged(**columns):
    """Judge a process that was looked at twice an update; a column is a function of the update."""
    noise = np.random.default_rng(0).normal(size=(2000, 2))
    names = ("resident", "anonymous", "threads", "files", "compilations")
    flat = dict.fromkeys(names, lambda update: 100.0)
    made = {**flat, **columns}
    rows = [
        (float(update), *(made[name](update) + (name == "resident") * extra for name in names))
        for update in range(2000)
        for extra in noise[update]
    ]
    return long_run.judge(long_run.Track("learner", rows), long_run.Settings())


def test_what_does_not_grow_holds():
    result = judged()
    assert result["grown"] == []
    low, high = result["resident"]["interval_mb"]
    assert low < 0 < high < 0.001
    # What comes before the measured time does not count, nor what came and went.
    start_up = lambda update: 500.0 - min(update, 300)
    passing = lambda update: 8.0 if 900 < update < 1100 else 7.0
    saving = lambda update: 40.0 + (update > 1000) + 12 * (update % 50 < 10)
    assert judged(anonymous=start_up, files=passing, threads=saving)["grown"] == []


@pytest.mark.parametrize("slope", [0.09, 0.11])
def test_a_slope_is_found_and_held_against_the_limit(slope):
    result = judged(resident=lambda update: 300.0 + slope * update)
    low, high = result["resident"]["interval_mb"]
    assert low < slope < high and high - low < 0.002
    assert result["grown"] == (["resident"] if slope > 0.1 else [])


def test_growing_counts_are_named():
    more = {
        "threads": lambda update: 40.0 + update // 400 + 12 * (update % 50 < 10),
        "files": lambda update: 7.0 + update // 400,
        "compilations": lambda update: 7.0 + (update > 1700),
    }
    assert judged(**more)["grown"] == ["threads", "files", "compilations"]


def test_a_process_that_was_not_there_all_the_time_is_left_out():
    rows = [(float(update), 1.0, 1.0, 1.0, 1.0, 0.0) for update in range(300, 1200)]
    assert long_run.judge(long_run.Track("sandbox", rows), long_run.Settings()) is None


def test_an_ended_process_has_no_memory():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        with pytest.raises(psutil.ZombieProcess):
            long_run.anonymous(process.pid)
