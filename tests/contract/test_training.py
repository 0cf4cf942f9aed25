"""Whole runs against servers that already run: both kinds, and two of which one dies.

At staleness 0 every trained token was sampled by the weights in training, so that the gap between
the log-probabilities of server and learner shows any sample of other weights. At other values
servers score what the learner has scored.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import assembly
import jax
import pytest
import small_runs
from scripted_server import Forgetful

from copc_jax import hf, model
from copc_jax.config import parse
from copc_jax.metrics import read_metrics

SGLANG_PYTHON = os.environ.get("COPC_SGLANG_PYTHON")
BATCH, UPDATES = 8, 4
TINY = [*small_runs.RUN, f"--batch-size={BATCH}", "--rollout.timeout-seconds=60"]
# Float32 on both sides.
SAME = 1e-3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def config(cache):
    return parse([*TINY, f"--cache-dir={cache}"])


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    """What servers start with: other weights than those that any run publishes."""
    parts = assembly.build(config)
    folder = tmp_path_factory.mktemp("start") / "model"
    params = model.init(jax.random.key(99), parts.model)
    hf.save_hf(folder, params, parts.model, tokenizer_json=parts.tokenizer.to_str())
    return folder


def launch(config, folder, log_file, kind):
    if kind == "sglang":
        if not SGLANG_PYTHON:
            pytest.skip("COPC_SGLANG_PYTHON names no Python that has SGLang")
        settings = {"launch": "sglang", "sglang_python": SGLANG_PYTHON, "sglang_device": "cpu"}
        rollout = dataclasses.replace(config.rollout, **settings)
        config = dataclasses.replace(config, rollout=rollout)
    server = assembly.launch(config, folder, log_file)
    assert server is not None
    return server


def command(config, run_dir, servers, *more):
    options = [f"--cache-dir={config.cache_dir}", f"--run-dir={run_dir}"]
    if servers:
        options += ["--rollout.urls", *(server.url for server in servers)]
    return small_runs.command(*TINY, *options, *more)


def train(config, run_dir, servers, *more):
    return subprocess.run(
        command(config, run_dir, servers, *more), capture_output=True, text=True, timeout=550
    )


@pytest.fixture(params=["embedded", "sglang"])
def server(request, config, folder, tmp_path):
    with launch(config, folder, tmp_path / "server.log", request.param) as server:
        yield server


def test_a_run_trains_on_what_either_server_samples(config, server, tmp_path):
    stale = ["--staleness=2", "--staleness-mode=exact"]
    done = train(config, tmp_path / "run", [server], f"--updates={UPDATES}", *stale)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1))
    assert 0 <= first["eval/em"] <= 1
    for row in rows:
        assert 0 <= row["reward/mean"] <= 1
        assert row["lag/trajectory_histogram"] == [0] * min(row["step"] - 1, 2) + [BATCH]
        assert row["rollout/failed"] == 0
        fresh = row["batch/action_tokens"] if row["step"] == 1 else 0
        assert row["rollout/decode_gap_tokens"] == fresh
        assert row["rollout/logprob_gap_skipped"] == 0
    for name in ("logprob", "decode"):
        measured = [row for row in rows if row[f"rollout/{name}_gap_tokens"]]
        assert measured
        for row in measured:
            mean, sd, p95, largest = (
                row[f"rollout/{name}_gap_{figure}"] for figure in ("mean", "sd", "p95", "max")
            )
            assert 0 <= mean <= largest < SAME and p95 <= largest and sd <= largest
    # Two trajectories of each version, each with at least one token.
    assert sum(row["rollout/logprob_gap_tokens"] for row in rows) >= 2 * UPDATES


def test_a_server_that_keeps_old_weights_is_refused_at_any_staleness(config, folder, tmp_path):
    """No token at lag 0 is trained on after the first update, and the labels are as they should."""
    moving = ["--actor.learning-rate=0.01", "--actor.warmup-updates=0", "--search.reward-format=1"]
    stale = ["--staleness=2", "--staleness-mode=exact", "--critic-warmup-updates=0"]
    with (
        launch(config, folder, tmp_path / "server.log", "embedded") as server,
        Forgetful(server.url, 2, tmp_path / "kept") as forgetful,
    ):
        done = train(config, tmp_path / "run", [forgetful], "--updates=20", *moving, *stale)
    assert done.returncode == 1, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("error at update")]
    assert f"tokens that {forgetful.url} scored with version" in said
    assert "rollout.logprob_gap_limit" in said and "other weights than it says" in said
    assert "continue with --resume" in done.stdout and "Traceback" not in done.stdout + done.stderr
    # The two updates that it took pass.
    _, *rows = read_metrics(tmp_path / "run")
    assert len(rows) >= 2 and sum(row["rollout/logprob_gap_tokens"] for row in rows) > 0


@contextlib.contextmanager
def router(workers, log_file):
    """An sglang-router in front of two servers, when both have joined; gives its address."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, prometheus = one.getsockname()[1], other.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)]
    options += ["--worker-urls", *(worker.url for worker in workers)]
    url = f"http://127.0.0.1:{port}"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [str(SGLANG_PYTHON), "-m", "sglang_router.launch_router", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 120.0
            joined = 0
            while joined < len(workers):
                assert process.poll() is None and time.monotonic() < deadline, log_file.read_text()
                time.sleep(0.2)
                # It listens before it knows its workers.
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"{url}/workers", timeout=10.0) as answer,
                ):
                    joined = sum(worker["is_healthy"] for worker in json.load(answer)["workers"])
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.skipif(not SGLANG_PYTHON, reason="COPC_SGLANG_PYTHON names no Python that has SGLang")
def test_a_router_in_front_gives_both_servers_work_and_weights(config, folder, tmp_path):
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(launch(config, folder, tmp_path / f"{name}.log", "embedded"))
            for name in ("one", "other")
        ]
        url = stack.enter_context(router(workers, tmp_path / "router.log"))
        control = ["--rollout.control-urls", *(worker.url for worker in workers)]
        options = ["--updates=3", "--staleness=0", "--rollout.urls", url, *control]
        done = train(config, tmp_path / "run", [], *options)
        assert done.returncode == 0, done.stdout + done.stderr
        states = [information(worker) for worker in workers]
    _, *rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/decode_gap_tokens"] == row["batch/action_tokens"]
        assert row["rollout/decode_gap_max"] < SAME
        assert row.get("rollout/logprob_gap_max", 0.0) < SAME
    for state in states:
        assert state["weight_version"] == "3" and state["tokens_sampled"] > 0


def information(server):
    with urllib.request.urlopen(server.url + "/server_info", timeout=30.0) as answer:
        return json.load(answer)["internal_states"][0]


def answered(server, kind):
    """Whether a server has generated since its last start."""
    if kind == "embedded":
        return information(server)["tokens_sampled"] > 0
    return "POST /generate" in server.log_file.read_text().rpartition("Started server process")[2]


def held_version(server):
    with urllib.request.urlopen(server.url + "/model_info", timeout=30.0) as answer:
        return json.load(answer)["weight_version"]


@pytest.mark.parametrize(
    "kinds",
    [
        ("embedded", "embedded"),
        pytest.param(
            ("sglang", "sglang"),
            marks=pytest.mark.skipif(
                not os.environ.get("COPC_TWO_SGLANG"),
                reason="two of SGLang take 4 GB and minutes: set COPC_TWO_SGLANG=1",
            ),
        ),
    ],
    ids=lambda kinds: kinds[0],
)
def test_one_of_two_servers_dies_and_comes_back(config, folder, tmp_path, kinds):
    """Every batch stays whole, and no token is of weights other than those in training."""
    run_dir, said = tmp_path / "run", tmp_path / "said"

    def wait_for(what, seconds=200.0):
        deadline = time.monotonic() + seconds
        while not what():
            assert running.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)

    def steps():
        # The log of a run that is starting is not there yet.
        with contextlib.suppress(FileNotFoundError):
            return len(read_metrics(run_dir))
        return 0

    with (
        launch(config, folder, tmp_path / "one.log", kinds[0]) as one,
        launch(config, folder, tmp_path / "other.log", kinds[1]) as other,
        said.open("w") as output,
    ):
        running = subprocess.Popen(
            command(config, run_dir, [one, other], "--updates=100000", "--staleness=0"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: steps() > 3)
            # SGLang is several processes.
            os.killpg(one.process.pid, signal.SIGKILL)
            wait_for(lambda: "unhealthy" in said.read_text())
            dead = steps()
            wait_for(lambda: steps() > dead + 2)
            one.restart()
            wait_for(lambda: "readmitted" in said.read_text())
            back = steps()
            wait_for(lambda: steps() > back + 2)
            # The one that came back had forgotten its weights: it works again, with the version
            # that the other one has.
            wait_for(lambda: held_version(one) == held_version(other) and steps() > back + 2)
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 130, said.read_text()
        finally:
            running.kill()
            running.wait()
        assert answered(one, kinds[0]) and answered(other, kinds[1])
    _, *rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    # The interrupt may have come in the last update, after its step and before its comparison.
    for row in rows[:-1]:
        assert row["lag/trajectory_histogram"] == [BATCH]
        assert row["rollout/decode_gap_tokens"] == row["batch/action_tokens"]
        assert row["rollout/decode_gap_max"] < SAME
        assert row.get("rollout/logprob_gap_max", 0.0) < SAME
        assert row["rollout/lost"] == 0
