"""Sweeps: which runs a command means, their rows, and a real one that is killed and goes on."""

import contextlib
import csv
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import sweep
from small_runs import RUN

from copc_jax import comparison
from copc_jax.config import parse, to_dict
from copc_jax.metrics import read_metrics

TINY = [
    *RUN,
    "--staleness=0",
    "--updates=3",
    "--checkpoint-every=1",
    "--viewer.every=0",
]


# Which runs a command means.


def test_a_grid_is_the_product_of_its_axes():
    cells = sweep.plan(
        None, "small", ["--grid.seed=0,1", "--grid.loss.eta-policy=0.25,0.5", "--staleness=3"]
    )
    got = [(c.config.seed, c.config.loss.eta_policy, c.config.staleness) for c in cells]
    assert got == [(0, 0.25, 3), (0, 0.5, 3), (1, 0.25, 3), (1, 0.5, 3)]
    assert len({cell.name for cell in cells}) == 4
    for cell in cells:
        assert parse(cell.flags) == cell.config


def test_axes_and_settings_go_over_a_named_experiment():
    def figure1(*arguments):
        return sweep.plan("figure1", "full", arguments)

    seeds = figure1("--grid.seed=7", "--staleness=8", "--grid.loss.eta_advantage=0.1")
    assert [c.config.seed for c in seeds] == [7, 7, 7]
    assert {c.config.staleness for c in seeds} == {8}
    assert [c.config.loss.eta_policy for c in seeds] == [0.25, 0.5, 0.75]
    # An axis that the experiment does not have is added.
    more = figure1("--seed=0", "--staleness=8", "--loss.eta-policy=0.5", "--grid.updates=5,6")
    assert [c.config.updates for c in more] == [5, 6] * 3


@pytest.mark.parametrize("name", sweep.EXPERIMENTS)
def test_every_experiment_can_be_run(name):
    cells = sweep.plan(name, "smoke", [])
    assert 1 < len(cells) <= 20
    assert all(cell.config.updates <= 8 for cell in cells)
    for cell in cells:
        assert cell.config.samples_per_prompt == 1 or cell.config.method != "sao"


def test_sizes_grow():
    sizes = [len(sweep.plan("figure1", size, ["--staleness=8"])) for size in sweep.SIZES]
    assert sizes == [4, 27, 45]


def test_runs_of_two_grids_that_are_the_same_run_once():
    arguments = ["--grid.method=copc,ppo", "--seed=0", "--grid.staleness=16,64"]
    cells = sweep.plan("figure2", "full", arguments)
    assert [(c.config.method, c.config.staleness) for c in cells] == [
        ("copc", 16), ("ppo", 16), ("copc", 64),
    ]  # fmt: skip


def test_a_run_is_known_by_what_it_computes():
    def name(*flags):
        (cell,) = sweep.plan(None, "small", flags)
        return cell.name

    same = name("--cache-dir=elsewhere", "--viewer.every=3", "--checkpoint-every=7")
    assert same == name() == name("--task=search", "--seed=0")
    assert len({name(), name("--seed=1"), name("--eval.questions=9"), name("--method=ppo")}) == 4


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["figure9"], "figure9"),
        (["--grid.seed=0,0"], "grid.seed"),
        (["--grid.seed=0,"], "grid.seed"),
        (["--grid.seed=0,1", "--seed=2"], "seed"),
        (["--run-dir=here"], "run_dir"),
        (["--grid.method=copc,popc"], "popc"),
        (["--grid.loss.eta_policy=0.5,1.5"], "eta_policy"),
        (["--grid.stalness=0,1"], "stalness"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_before_any_run(arguments, named, capsys):
    with pytest.raises(SystemExit) as refused:
        sweep.plan(None, "small", arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_listing_starts_nothing(tmp_path, capsys):
    sweep.main(["figure1", "--size=smoke", "--list", f"--out={tmp_path / 'none'}"])
    assert "runs, " in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


# Rows.


def row(name, state="finished", seed=0, **record):
    config = to_dict(parse(["--preset=quick", f"--seed={seed}", "--cache-dir=x"]))
    empty = comparison.summarize("none")
    return {"run": name, "state": state, "config": config, "record": empty | record}


def test_the_newest_row_of_a_run_counts_and_a_half_one_does_not(tmp_path):
    rows = [row("a", "failed"), row("b"), row("a", final=0.5)]
    text = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path / sweep.ROWS_FILE).write_text(text + '{"run": "c", "sta')
    found = sweep.read_rows(tmp_path)
    assert [(r["run"], r["state"]) for r in found] == [("a", "finished"), ("b", "finished")]
    (tmp_path / sweep.ROWS_FILE).write_text("nonsense\n" + text)
    with pytest.raises(ValueError, match="line 1"):
        sweep.read_rows(tmp_path)
    assert sweep.read_rows(tmp_path / "none") == []


def test_columns_are_what_differs_and_what_was_measured(tmp_path):
    rows = [row("a", seed=3, final=0.5, curve=[[0, 0.1]]), row("b", seed=4)]
    assert sweep.differing(rows) == ["seed"]
    sweep.write_csv(tmp_path, rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["run"], line["seed"], line["final"]) for line in lines] == [
        ("a", "3", "0.5"), ("b", "4", ""),
    ]  # fmt: skip
    assert not {"curve", "cache_dir", "config", "flags"} & set(lines[0])


# A real sweep.


@pytest.fixture
def start(tmp_path, cache):
    """Start the sweep; what a failed test leaves of it is ended."""
    core = sorted(psutil.Process().cpu_affinity())[0]
    command = [sys.executable, sweep.__file__, *TINY, f"--cache-dir={cache}"]
    command += [f"--out={tmp_path / 'sweep'}", f"--cores={core}"]
    command += ["--grid.rollout.logprob-gap-limit=inf,1e-12"]
    with contextlib.ExitStack() as stack:

        def run():
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def running(folder):
    """Processes of the sweep's runs: learners and servers name a file of their run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder / "runs") in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def until(condition, seconds=900):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.timeout(2700)
def test_a_killed_sweep_leaves_no_process_and_goes_on(tmp_path, start):
    folder = tmp_path / "sweep"
    first = start()
    runs = folder / "runs"

    def saved():
        return any(read_metrics(path)[1:] for path in runs.glob("*"))

    until(saved)
    assert len(running(folder)) == 2
    first.kill()
    first.communicate()
    until(lambda: not running(folder))

    done = start()
    text, _ = done.communicate(timeout=900)
    assert done.returncode == 1, text
    finished, failed = sorted(sweep.read_rows(folder), key=lambda r: r["state"], reverse=True)
    assert (finished["state"], failed["state"]) == ("finished", "failed"), text
    assert finished["record"]["updates"] == 3 and finished["attempts"] == 2
    assert finished["cpu_seconds"] > 0.5 and finished["error"] == ""
    assert finished["record"]["kept"] > 0 and finished["record"]["final"] is not None
    steps = [r["step"] for r in read_metrics(runs / finished["run"])]
    assert steps == [0, 1, 2, 3]
    assert failed["exit"] == 1
    # What a person reads names the limit and likely causes.
    for word in ("disagree", "rollout.logprob_gap_limit", "precision", "stale"):
        assert word in failed["error"], word
    assert failed["error"] in text
    about = json.loads((folder / sweep.SWEEP_FILE).read_text())
    assert "--grid.rollout.logprob-gap-limit=inf,1e-12" in about["started"][0]["command"]
    assert about["started"][0]["machine"]["cores"] >= 1
    assert len(sweep.read_rows(folder, sweep.PLANNED_FILE)) == 2
    assert not (runs / finished["run"] / "checkpoints").exists()

    # Once more, and stopped in order: what has finished stays as it is.
    again = start()
    until(lambda: running(folder))
    again.send_signal(signal.SIGTERM)
    text, _ = again.communicate(timeout=900)
    assert again.returncode == 130 and "2 runs, 1 left" in text
    assert not running(folder)
    assert sum(r["state"] == "finished" for r in sweep.read_rows(folder)) == 1
