"""Several learner processes: real ones on loopback, with the collectives of CPUs."""

import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest
import run
import test_learner
from small_runs import RUN, command

from copc_jax import data
from copc_jax.checkpoint import Checkpointer
from copc_jax.metrics import merged, read_metrics
from copc_jax.rollout.collector import deal_states, decode_state

HERE = pathlib.Path(__file__).parent
TINY = [
    *RUN,
    # Not the same number for each of two processes.
    "--eval.questions=3",
    "--eval.final-questions=3",
    "--staleness=0",
    "--staleness-mode=exact",
    "--checkpoint-every=2",
    # So small a model never answers, and learns from that.
    "--search.reward-format=-0.5",
]

pytestmark = pytest.mark.timeout(900)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """The processes of one run, and what they print."""

    def __init__(self, folder, arguments, count=2, *, alone=False):
        folder.mkdir()
        where = [f"--distributed.coordinator=127.0.0.1:{free_port()}"]
        where += [f"--distributed.processes={count}", "--distributed.timeout-seconds=40"]
        self.outputs = [folder / f"{index}.txt" for index in range(count)]
        self.processes = []
        for index, output in enumerate(self.outputs):
            own = [] if alone else [*where, f"--distributed.process-id={index}"]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        command(*arguments, *own),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self):
        return "\n".join(output.read_text() for output in self.outputs)

    def wait(self, timeout=600):
        """Return the exit codes."""
        deadline = time.monotonic() + timeout
        return [process.wait(deadline - time.monotonic()) for process in self.processes]

    def until(self, condition, timeout=600):
        deadline = time.monotonic() + timeout
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    """Four updates of two processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*TINY, "--updates=4", "--mesh.data=2", f"--cache-dir={cache}"]
    with Job(folder / "said", [*arguments, f"--run-dir={folder / 'run'}"]) as job:
        assert job.wait() == [0, 0], job.text()
    return folder / "run"


def states(run_dir, step):
    host = Checkpointer(run_dir / "checkpoints").restore_host(step)
    return [decode_state(each) for each in [host["collector"], *host.get("others", [])]]


def trained(run_dir):
    names = ("batch/tokens", "actor/loss", "critic/loss", "actor/gradient_norm")
    return [[row[name] for name in names] for row in read_metrics(run_dir) if row["step"]]


def test_a_step_of_two_processes_on_four_devices_is_that_of_one_device(tmp_path):
    file, coordinator = tmp_path / "step.npz", f"127.0.0.1:{free_port()}"
    program = [sys.executable, str(HERE / "processes_step.py"), "areal", str(file), coordinator]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(run.__file__).parent)}
    processes = [
        subprocess.Popen([*program, "2", str(index)], env=environment) for index in range(2)
    ]
    # Optax multiplies floats by its int32 counter, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        learner = test_learner.learner_of("areal")
        batch = test_learner.batch_for("areal")
        state, metrics = jax.device_get(learner.step(test_learner.start(learner), batch))
    assert [process.wait(600) for process in processes] == [0, 0]
    want = ({"actor": state.actor, "critic": state.critic}, metrics)
    with np.load(file) as saved:
        networks, others = jax.tree.unflatten(jax.tree.structure(want), list(saved.values()))
    test_learner.assert_close(networks, want[0])
    test_learner.assert_same_metrics(others, metrics)


def test_two_processes_leave_one_run(undisturbed):
    for name in ("config.json", "report.md", "episodes.html", "model/config.json"):
        assert (undisturbed / name).stat().st_size > 0, name
    assert {path.name for path in undisturbed.glob("server*.log")} == {"server.log", "server-1.log"}
    rows = read_metrics(undisturbed)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        # Both shares of each batch, of the weights in training.
        assert sum(row["lag/trajectory_histogram"]) == 8 and row["lag/max"] == 0
        assert row["coupling/ratio"] == pytest.approx(1.0, abs=1e-3)
        assert row["rollout/decode_gap_tokens"] == row["batch/action_tokens"]
    assert rows[0]["eval/count"] == rows[-1]["eval/count"] == 3
    # Process 0 removes the weights when no server reads them any more.
    assert not (undisturbed / "weights").exists()


def test_processes_ask_different_prompts_with_different_seeds(undisturbed):
    saved = states(undisturbed, 4)
    assert [state["batch_size"] for state in saved] == [4, 4]
    assert saved[0]["seed"] == 0 != saved[1]["seed"]
    # Four batches, and what the last weights may begin.
    for state in saved:
        assert 16 <= state["prompts"]["position"]["next_index"] == state["submitted"] <= 20
    prompts = [data.Prompt(str(i)) for i in range(11)]
    shares = [
        [next(stream).prompt_id for _ in range(-(-(11 - index) // 3))]
        for index in range(3)
        for stream in [data.prompt_iterator(prompts, 0, process_index=index, process_count=3)]
    ]
    assert sorted(itertools.chain(*shares)) == sorted(prompt.prompt_id for prompt in prompts)


def test_a_killed_process_ends_the_job_which_resumes_exactly(undisturbed, cache, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [*TINY, "--updates=4", "--mesh.data=2", f"--cache-dir={cache}"]
    with Job(tmp_path / "killed", [*arguments, f"--run-dir={run_dir}"]) as job:
        job.until(lambda: (run_dir / "checkpoints" / "2").exists())
        children = [psutil.Process(p.pid).children(recursive=True) for p in job.processes]
        job.processes[1].kill()
        codes = job.wait(300)
        assert codes[0] not in (0, None) and codes[1] == -signal.SIGKILL, job.text()
        assert "another task died" in job.text() or "process 0 ends alone" in job.text()
        _, alive = psutil.wait_procs([*itertools.chain(*children)], timeout=60)
        assert not alive

    more = [f"--resume={run_dir}", "--updates=2000"]
    with Job(tmp_path / "resumed", more) as job:
        # The killed job may have logged all of its four.
        job.until(lambda: read_metrics(run_dir)[-1]["step"] >= 5)
        # As a scheduler does, and not at one moment.
        for process in job.processes:
            process.terminate()
            time.sleep(0.3)
        assert job.wait(300) == [130, 130], job.text()
        assert "resumed from update 2" in job.text() and "--resume" in job.text()
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    want, found = np.asarray(trained(undisturbed)), np.asarray(trained(run_dir)[:4])
    assert (want[:, 2] > 0).all() and want[-1, 3] > 0
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    last = rows[-1]["step"]
    assert [state["consumed"] for state in states(run_dir, last)] == [last, last]

    alone = [f"--resume={run_dir}", f"--updates={last + 1}", "--mesh.data=1"]
    with Job(tmp_path / "alone", alone, 1, alone=True) as job:
        assert job.wait() == [0], job.text()
        assert "saved by 2 processes, continued by 1" in job.text()
    assert read_metrics(run_dir)[-1]["step"] == last + 1
    assert sum(read_metrics(run_dir)[-1]["lag/trajectory_histogram"]) == 8


def test_processes_with_different_settings_are_refused(cache, tmp_path):
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                *command(*TINY, f"--cache-dir={cache}", "--mesh.data=2"),
                *(f"--run-dir={tmp_path / 'run'}", f"--seed={index}"),
                f"--distributed.coordinator=127.0.0.1:{port}",
                *("--distributed.processes=2", f"--distributed.process-id={index}"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 2, error
        assert "seed" in error and "Traceback" not in error


def test_rollouts_are_dealt_to_another_number_of_processes():
    def group(index, finished):
        return {"index": index, "prompt": {"prompt_id": f"{index}"}, "results": [{}] * finished}

    def state(consumed, indices, seed):
        return {
            "seed": seed,
            "batch_size": 4,
            "samples_per_prompt": 2,
            "prompts": None,
            "consumed": consumed,
            "submitted": max(indices) + 1,
            "kept": 0,
            "lost_in_a_row": 1,
            "filtered_since_batch": 1,
            "counters": {"episodes": 10},
            "groups": [group(index, 2 - index % 2) for index in indices],
        }

    old = [state(3, range(6, 11), 0), state(3, range(6, 9), 1)]
    dealt = deal_states(old, [None] * 4, [0, 5, 6, 7])
    assert [each["batch_size"] for each in dealt] == [2] * 4
    assert [len(each["groups"]) for each in dealt] == [2] * 4
    turns = zip(*(each["groups"] for each in dealt), strict=True)
    names = [group["prompt"]["prompt_id"] for turn in turns for group in turn]
    # In the order in which they would have been trained on.
    assert names == ["6", "6", "7", "7", "8", "8", "9", "10"]
    for each in dealt:
        finished = sum(len(group["results"]) == 2 for group in each["groups"])
        assert each["kept"] == 3 * 1 + finished
        assert min(group["index"] for group in each["groups"]) == 11
        assert each["submitted"] == 13
    assert sum(each["counters"]["episodes"] for each in dealt) == 20
    with pytest.raises(ValueError, match="different batches"):
        deal_states([state(3, [6], 0), state(4, [8], 1)], [None], [0])
    json.dumps(dealt)


def test_figures_of_processes_add_up_or_average():
    rows = [
        {
            "actor/loss": 0.5,
            "reward/mean": 1.0,
            "task/searches": 2.0,
            "batch/tokens": 10,
            "lag/histogram": [4],
            "lag/trajectory_histogram": [1, 1],
            "source/a/reward": 1.0,
            "source/a/episodes": 3.0,
            "rollout/tokens_per_second": 5.0,
            "learner/seconds": 1.0,
            "rollout/logprob_gap_tokens": 1.0,
            "rollout/logprob_gap_mean": 1.0,
            "rollout/logprob_gap_sd": 0.0,
            "rollout/logprob_gap_p95": 1.0,
            "rollout/logprob_gap_max": 1.0,
        },
        {
            "actor/loss": 0.5,
            "reward/mean": 0.0,
            "batch/tokens": 6,
            "lag/histogram": [0, 4],
            "lag/trajectory_histogram": [2],
            "source/a/reward": 0.0,
            "source/a/episodes": 1.0,
            "source/b/reward": 0.25,
            "source/b/episodes": 2.0,
            "rollout/tokens_per_second": 7.0,
            "learner/seconds": 9.0,
            "rollout/logprob_gap_tokens": 3.0,
            "rollout/logprob_gap_mean": 0.0,
            "rollout/logprob_gap_sd": 0.0,
            "rollout/logprob_gap_p95": 0.0,
            "rollout/logprob_gap_max": 0.0,
        },
    ]
    assert merged(rows[:1]) == rows[0]
    result = merged(rows)
    want = {
        "actor/loss": 0.5,
        "reward/mean": 0.5,
        "task/searches": 1.0,
        "batch/tokens": 16,
        "lag/histogram": [4, 4],
        "lag/trajectory_histogram": [3, 1],
        "lag/mean": 0.5,
        "lag/max": 1.0,
        "source/a/reward": 0.75,
        "source/a/episodes": 4.0,
        "source/b/reward": 0.25,
        "rollout/tokens_per_second": 12.0,
        "learner/seconds": 1.0,
        "rollout/logprob_gap_mean": 0.25,
        "rollout/logprob_gap_max": 1.0,
    }
    assert {name: result[name] for name in want} == want
    # That of the four tokens 1, 0, 0, 0.
    assert result["rollout/logprob_gap_sd"] == pytest.approx(np.std([1, 0, 0, 0]))
