"""The runner of the speed comparisons works, on tiny cases of our own; nothing here is timed."""

import _thread
import importlib.util
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"

# Cases as a comparison has them; they need no library.
CASES = """
def counting(start):
    state = [start]
    def run():
        print("libraries print")
        state[0] += sum(range(20_000)) > 0
    return run, {"start": start}

def known():
    return {"answer": 42}

def beside():
    import subprocess, sys
    code = "import sys\\nfor _ in sys.stdin: print(sum(range(2_000_000)), flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    def run():
        child.stdin.write("go\\n")
        child.stdin.flush()
        child.stdout.readline()
    run.pids = (child.pid,)
    return run

def broken():
    raise ValueError("no such thing")
"""


@pytest.fixture
def harness(monkeypatch):
    spec = importlib.util.spec_from_file_location("harness", BENCHMARKS / "harness.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "harness", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cases.py"
    path.write_text(CASES)
    return str(path)


def test_cases_are_measured_once_a_round_and_facts_come_along(harness, file):
    bench = harness.Bench(rounds=3, tiny=True, log=subprocess.DEVNULL)
    cases = [harness.Case(f"from {n}", file, "counting", {"start": n}) for n in (1, 2)]
    measured = bench.measure("counts", [*cases, harness.Case("fact", file, "known")])
    assert {label: len(rounds) for label, rounds in measured.samples.items()} == {
        "from 1": 3,
        "from 2": 3,
    }
    for rounds in measured.samples.values():
        assert all(sample["cpu_s"] > 0 and sample["wall_s"] > 0 for sample in rounds)
    assert measured.facts["from 2"]["start"] == 2 and measured.facts["fact"] == {"answer": 42}
    ratios = measured.ratios("from 1", "from 2")
    inverse = measured.ratios("from 2", "from 1")
    assert [a * b for a, b in zip(ratios, inverse, strict=True)] == pytest.approx([1.0] * 3)
    assert bench.details["counts"]["facts"]["fact"] == {"answer": 42}


def test_processes_that_a_case_names_count_as_its_own(harness, file):
    bench = harness.Bench(rounds=2, tiny=True, log=subprocess.DEVNULL)
    measured = bench.measure("beside", [harness.Case("beside", file, "beside")])
    # The worker itself only waits; summing so many numbers takes milliseconds at the least.
    assert measured.spread("beside").low > 2e-3


def test_a_peer_that_is_not_there_is_named_and_the_others_go_on(harness, file):
    bench = harness.Bench(rounds=1, tiny=True, peers=False, log=subprocess.DEVNULL)
    cases = [
        harness.Case("ours", file, "counting", {"start": 0}),
        harness.Case("theirs", file, "counting", {"start": 0}, environment="rlax"),
    ]
    measured = bench.measure("pair", cases)
    bench.compare(measured, "counting", "ours", "theirs", shape="[1]", target=2.0)
    assert set(measured.samples) == {"ours"}
    (row,) = bench.rows
    assert row.measured is None and row.met is None
    assert "theirs" in row.note and "left out" in row.note


def test_an_interrupt_keeps_the_whole_rounds_that_were_measured(harness, file):
    bench = harness.Bench(rounds=1000, tiny=True, log=subprocess.DEVNULL)
    timer = threading.Timer(0.0, _thread.interrupt_main)
    said = harness.say

    def watch(text):
        said(text)
        if "round 4 of" in text:
            timer.start()

    harness.say = watch
    measured = bench.measure(
        "counts", [harness.Case(f"from {i}", file, "counting", {"start": i}) for i in (1, 2)]
    )
    counts = {len(samples) for samples in measured.samples.values()}
    assert len(counts) == 1 and 3 <= counts.pop() < 1000


def test_a_fault_of_our_own_ends_the_run(harness, file):
    bench = harness.Bench(rounds=1, tiny=True, log=subprocess.DEVNULL)
    with pytest.raises(RuntimeError, match="bad failed: ValueError: no such thing"):
        bench.measure("faults", [harness.Case("bad", file, "broken")])


@pytest.mark.parametrize(
    ("sense", "median", "met"), [(">=", 2.0, True), (">=", 1.9, False), ("<=", 2.1, False)]
)
def test_a_row_is_met_by_its_median(harness, sense, median, met):
    row = harness.Row("a", "b", "c", harness.Spread(median, 0.0, 9.0), 2.0, sense)
    assert row.met is met


@pytest.fixture
def loop(harness, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("comparisons.loop")
    for name in ("comparisons.loop", "comparisons", "worker"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("staleness", "generate", "train", "load", "expected"),
    [
        (0, 1.0, 1.0, 0.25, (4 * 2.0 + 3 * 0.25) / 4),
        (1, 1.0, 1.0, 0.0, 5 / 4),
        (1, 3.0, 1.0, 0.5, 13 / 4),
        (4, 1.0, 3.0, 0.5, 13 / 4),
    ],
)
def test_two_clocks_wait_for_each_other(loop, staleness, generate, train, load, expected):
    each = [np.full(4, x) for x in (generate, train, load)]
    assert loop.makespan(*each, staleness) == pytest.approx(expected)


def run(out, *arguments):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--tiny", "--no-peers", "--rounds=2"]
    return subprocess.run(
        [*command, f"--out={out}", *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_writes_table_and_picture(tmp_path):
    done = run(tmp_path, "--only", "logprobs")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "speed.json").read_text())
    memory, time = written["rows"]
    assert memory["met"] == (memory["measured"]["median"] >= memory["target"])
    assert time["met"] == (time["measured"]["median"] <= time["target"])
    assert written["machine"]["cores"] >= 1
    assert written["load"]["logprobs"]["cores_used"] > 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "token log-probs" in done.stdout


def test_an_unknown_comparison_is_refused_by_name(tmp_path):
    done = run(tmp_path, "--only", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr and "returns" in done.stderr
