"""Recorded runs and their replays: the same bits in another process, and what is refused.

The runs are of mode "exact", where two runs with one seed are the same.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
import run
from small_runs import RUN, command

from copc_jax import hf
from copc_jax.metrics import read_metrics
from copc_jax.rollout.recording import Recording

UPDATES = 5
RECORD = [
    *RUN,
    "--record=True",
    "--staleness=1",
    "--staleness-mode=exact",
    f"--updates={UPDATES}",
    "--samples-per-prompt=2",
    "--checkpoint-every=2",
    # The untrained model never answers, and a loss of nothing but zeros would say little.
    "--search.reward-format=1",
    "--eval.enabled=False",
    "--viewer.every=0",
]

pytestmark = pytest.mark.timeout(1800)


def finish(*args):
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def learned(run_dir):
    """What an update computes, of every update; not what depends on the clock."""
    groups = ("actor", "critic", "coupling", "batch", "lag", "reward", "task", "length")
    return [
        {name: value for name, value in row.items() if name.split("/")[0] in groups}
        for row in read_metrics(run_dir)
    ]


def assert_same_learning(ours, theirs):
    assert [len(row) > 10 for row in learned(ours)] == [False] + [True] * UPDATES
    assert any(row.get("actor/loss") for row in learned(ours))
    assert learned(ours) == learned(theirs)
    (one, _), (other, _) = (hf.load_hf(folder / "model") for folder in (ours, theirs))
    assert one.keys() == other.keys()
    for name, value in one.items():
        ours_, theirs_ = (
            tree if isinstance(tree, dict) else {"": tree} for tree in (value, other[name])
        )
        for leaf in ours_:
            np.testing.assert_array_equal(np.asarray(ours_[leaf]), np.asarray(theirs_[leaf]))


@pytest.fixture(scope="module")
def recorded(cache, tmp_path_factory):
    """A run that records, undisturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "recorded"
    finish(*RECORD, f"--cache-dir={cache}", f"--run-dir={run_dir}")
    return run_dir


def test_every_batch_is_recorded(recorded):
    recording = Recording(recorded / "recording")
    assert len(recording) == UPDATES
    rows = read_metrics(recorded)[1:]
    for batch, row in enumerate(rows):
        trajectories = recording.read(batch)
        assert len(trajectories) == 8
        assert len({t.prompt_id for t in trajectories}) == 4
        assert np.mean([t.reward for t in trajectories]) == row["reward/mean"]
        assert sum(t.is_action.sum() for t in trajectories) == row["batch/action_tokens"]
        versions = np.concatenate([t.weight_version[t.is_action] for t in trajectories])
        assert set(versions) == {max(batch - 1, 0)} and row["lag/max"] == min(batch, 1)


def test_two_runs_of_mode_exact_are_the_same_through_a_kill_and_another_load(
    recorded, cache, tmp_path
):
    run_dir = tmp_path / "killed"
    # Other episodes run beside each one: three at a time in place of all.
    start = [*RECORD, f"--cache-dir={cache}", f"--run-dir={run_dir}", "--rollout.max-in-flight=3"]
    process = subprocess.Popen(
        command(*start), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 1500
    while not (run_dir / "checkpoints" / "2").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(f"--resume={run_dir}")
    assert_same_learning(run_dir, recorded)
    for batch in range(UPDATES):
        name = f"recording/{batch:06d}.npz"
        assert (run_dir / name).read_bytes() == (recorded / name).read_bytes(), name


def test_a_replay_by_the_same_method_is_the_same_run_without_a_server(recorded, tmp_path):
    run_dir = tmp_path / "replay"
    process = subprocess.Popen(
        command(f"--replay={recorded}", f"--run-dir={run_dir}", "--updates=2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    children = set()
    while process.poll() is None:
        # Any of them may end at any moment.
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                children.add(" ".join(child.cmdline()))
        time.sleep(0.1)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "5 batches are recorded, 2 updates are made" in output
    assert not any("copc_jax.rollout.server" in child for child in children)
    assert not (run_dir / "server.log").exists()
    # It goes on, and no further than there are batches; a server is started to evaluate the end.
    few = ["--eval.enabled=True", "--eval.every=0", "--eval.final-questions=4"]
    output = finish(f"--resume={run_dir}", "--updates=50", *few)
    assert "resumed from update 2" in output and "5 updates are made" in output
    assert_same_learning(run_dir, recorded)
    assert [row["step"] for row in read_metrics(run_dir) if "eval/em" in row] == [UPDATES]
    assert not (run_dir / "recording").exists()


def test_another_method_sees_the_same_data(recorded, tmp_path):
    run_dir = tmp_path / "ppo"
    finish(f"--replay={recorded}", f"--run-dir={run_dir}", "--updates=2", "--method=ppo")
    assert json.loads((run_dir / "config.json").read_text())["method"] == "ppo"
    rows, others = read_metrics(run_dir)[1:], read_metrics(recorded)[1:3]
    for ours, theirs in zip(rows, others, strict=True):
        for name in ("reward/mean", "length/mean", "batch/tokens", "batch/action_tokens"):
            assert ours[name] == theirs[name], name
        for name in ("lag/histogram", "lag/mean", "task/turns", "reward/em"):
            assert ours[name] == theirs[name], name
    # At the first update both are the warm start.
    for name in ("coupling/ratio", "coupling/log_ratio_std", "coupling/mask_kept"):
        assert rows[0][name] == pytest.approx(others[0][name], abs=1e-6), name
    assert rows[0]["rollout/decode_gap_max"] < 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size=16"], "batch_size: saved 8, now 16"),
        (["--task=math"], "task: saved 'search', now 'math'"),
        (["--samples-per-prompt=4"], "samples_per_prompt: saved 2, now 4"),
        (["--method=sao"], "samples_per_prompt must be at most 1 for method sao"),
        (["--tiny.hidden-size=64"], "tiny.hidden_size: saved 32, now 64"),
        (["--search.tags=chain-of-agents"], "search.tags: saved 'search-r1'"),
        (["--search.reward-search=3"], "search.reward_search: saved 2.0, now 3.0"),
        (["--staleness=8"], "staleness: saved 1, now 8"),
        (["--seed=1"], "seed: saved 0, now 1"),
        (["--record=True"], "record must be off with replay"),
    ],
)
def test_other_data_are_refused_by_name(flags, message, recorded, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main([f"--replay={recorded}", f"--run-dir={tmp_path / 'run'}", *flags])
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_run_without_a_recording_cannot_be_replayed(recorded, tmp_path, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(recorded / "config.json", plain)
    with pytest.raises(SystemExit) as stop:
        run.main([f"--replay={plain}", f"--run-dir={tmp_path / 'run'}"])
    assert stop.value.code == 2
    assert "no recording is in" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        run.main([f"--replay={tmp_path / 'nothing'}"])
    assert stop.value.code == 2
    assert "no run is there" in capsys.readouterr().err
