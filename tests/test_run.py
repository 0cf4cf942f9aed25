"""Whole runs through the command: a real embedded server, a tiny model, kills and resumes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import assembly
import evaluate
import numpy as np
import psutil
import pytest
import run
from batch_sources import Generator
from scripted_server import Behave, ScriptedServer
from small_runs import RUN, command

from copc_jax import hf
from copc_jax.checkpoint import config_differences
from copc_jax.config import parse, to_dict, to_json
from copc_jax.distributed import Processes
from copc_jax.metrics import read_metrics

KEY = "sk-5Rk2wE_not-a-word_q8"

pytestmark = pytest.mark.timeout(400)


def arguments(cache, run_dir, *more):
    return [*RUN, f"--cache-dir={cache}", f"--run-dir={run_dir}", *more]


@pytest.fixture(scope="module")
def synchronous(cache, tmp_path_factory):
    """Four synchronous updates without any disturbance, with an API key of the person's own."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = subprocess.run(
        command(*arguments(cache, run_dir, "--staleness=0", "--updates=4", "--checkpoint-every=2")),
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "COPC_API_KEY": KEY},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir.parent / "output").write_text(done.stdout + done.stderr)
    return run_dir


def test_a_run_leaves_everything_that_a_person_is_promised(synchronous):
    for name in (
        "config.json",
        "command.txt",
        "metrics.jsonl",
        "episodes.jsonl",
        "episodes.html",
        "report.md",
        "curves.png",
        "lag.png",
        "time.png",
        "model/config.json",
        "model/tokenizer.json",
        "server.log",
    ):
        assert (synchronous / name).stat().st_size > 0, name
    assert list((synchronous / "tensorboard").iterdir())
    assert list((synchronous / "checkpoints").iterdir())
    params, config = hf.load_hf(synchronous / "model")
    assert config.hidden_size == 32 and np.isfinite(np.asarray(params["embed"])).all()
    rows = read_metrics(synchronous)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {"eval/em", "eval/em_low", "eval/em_high"} <= rows[0].keys() & rows[-1].keys()
    for name in (
        "reward/mean",
        "lag/histogram",
        "coupling/effective_sample_size",
        "coupling/mask_kept",
        "coupling/rho",
        "coupling/correction",
        "coupling/sign_flip",
        "coupling/log_ratio_std",
        "actor/kl",
        "critic/loss",
        "learner/seconds",
        "learner/wait_seconds",
        "rollout/busy_fraction",
        "memory/rss_mb",
    ):
        assert name in rows[-1], name


def test_a_run_leaves_no_trace_of_its_key(synchronous, cache):
    files = [p for folder in (synchronous.parent, cache) for p in folder.rglob("*") if p.is_file()]
    assert {"config.json", "command.txt", "server.log", "report.md", "output"} <= {
        path.name for path in files
    }
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    saved = json.loads((synchronous / "config.json").read_text())
    assert saved["rollout"]["api_key"] == "env:COPC_API_KEY"
    # The server asked for the key, and got it from whoever asks in the run's name.
    assert "rollout/engine_busy_fraction" in read_metrics(synchronous)[-1]


def generator(server, cache, folder, write):
    """A generator in front of a server, whose weights are whatever `write` makes of a folder."""
    config = parse([*arguments(cache, folder / "run"), "--rollout.urls", server.url])
    return Generator(
        config,
        assembly.build(config),
        folder / "run",
        folder=folder,
        snapshot=lambda: write,
        host={},
        processes=Processes(),
    )


def test_weights_stay_until_every_server_has_taken_newer_ones(cache, tmp_path):
    """C60: what a server holds or is about to read is never removed."""
    weights = tmp_path / "run" / "weights"
    folders = lambda: sorted(folder.name for folder in weights.iterdir())
    write = lambda folder: folder.mkdir(parents=True)
    with ScriptedServer() as server, generator(server, cache, tmp_path, write) as source:
        source.publish(0)
        source.wait_published()
        server.script("/update_weights_from_disk", Behave(delay=10.0))
        source.publish(1)
        while len(server.sent("/update_weights_from_disk")) < 2:
            time.sleep(0.01)
        for version in (2, 3, 4):
            source.publish(version)
        while "v000004" not in folders():
            time.sleep(0.01)
        assert source.collector.published_version == 0
        assert {"v000000", "v000001"} <= set(folders())
        source.wait_published()
        source.publish(5)
        source.wait_published()
        assert folders() == ["v000004", "v000005"]


def test_weights_are_written_beside_training_one_version_at_a_time(cache, tmp_path):
    begun: list[str] = []
    go_on = {f"v{version:06d}": threading.Event() for version in range(4)}
    go_on["v000000"].set()

    def write(folder: Path) -> None:
        begun.append(folder.name)
        go_on[folder.name].wait(60)
        if folder.name == "v000003":
            raise OSError(28, "No space left on device")
        folder.mkdir(parents=True)

    with ScriptedServer() as server:
        told = lambda: [
            Path(sent["model_path"]).name for sent in server.sent("/update_weights_from_disk")
        ]
        with generator(server, cache, tmp_path, write) as source:
            source.publish(0)
            source.wait_published()
            source.publish(1)
            # Here the next update would be made: its weights wait for those before.
            follows = threading.Thread(target=source.publish, args=(2,))
            follows.start()
            while len(begun) < 2:
                time.sleep(0.01)
            assert follows.is_alive()
            assert (begun, told()) == (["v000000", "v000001"], ["v000000"])
            go_on["v000001"].set()
            follows.join(60)
            go_on["v000002"].set()
            source.wait_published()
            assert told()[-1] == "v000002"
            source.publish(3)
            go_on["v000003"].set()
            with pytest.raises(
                OSError, match=r"the weights of update 3 cannot be written to .*v000003: .*No space"
            ):
                source.wait_published()
            # It stays so, whatever is asked of it.
            with pytest.raises(OSError, match="the weights of update 3 cannot be written"):
                source.publish(4)
            assert told()[-1] == "v000002"


def test_a_run_that_cannot_go_on_saves_itself_and_says_why_in_one_line(cache, tmp_path):
    # An untrained model is never right: no group has rewards that differ, and DAPO trains on no
    # other.
    run_dir = tmp_path / "filtered"
    done = subprocess.run(
        command(
            *arguments(cache, run_dir, "--method=dapo", "--samples-per-prompt=2", "--updates=2")
        ),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("error at update 0")]
    assert len(said) == 1 and "groups" in said[0]
    assert f"continue with --resume {run_dir}" in done.stdout
    assert list((run_dir / "checkpoints").iterdir())


def test_a_run_without_an_update_of_the_actor_says_so(cache, tmp_path):
    more = ("--critic-warmup-updates=1", "--updates=1", "--staleness=0")
    done = subprocess.run(
        command(*arguments(cache, tmp_path / "run", *more)),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the actor stays as it is: critic_warmup_updates 1" in done.stdout


def test_staleness_zero_is_synchronous_and_on_policy(synchronous):
    for row in read_metrics(synchronous)[1:]:
        assert row["lag/max"] == 0
        # Server and learner compute the same log-probs.
        assert row["coupling/ratio"] == pytest.approx(1.0, abs=1e-3)
        assert row["coupling/log_ratio_std"] < 0.05
        assert row["coupling/mask_kept"] > 0.995


def test_a_math_run_writes_and_runs_code(cache, tmp_path):
    run_dir = tmp_path / "math"
    math = ["--task=math", "--math.train=300", "--math.held-out=40", "--math.direct-share=0"]
    more = ["--staleness=1", "--updates=2", "--sft.updates=60", "--tiny.vocab-size=2048"]
    done = subprocess.run(
        command(*arguments(cache, run_dir, *math, *more, "--eval.final-questions=20")),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_products"} <= rows[0].keys()
    for name in ("reward/accuracy", "task/answered", "task/code_errors", "task/valid_actions"):
        assert name in rows[-1], name
    # The warm start has learned to open a code tag, if not yet what to write in it.
    assert sum(row["task/calls"] + row["task/failed_calls"] for row in rows[1:]) > 0
    assert all(row["reward/mean"] == row["reward/accuracy"] for row in rows[1:])
    # The sources of a batch together are the batch.
    for row in rows[1:]:
        names = [name.removesuffix("/episodes") for name in row if name.endswith("/episodes")]
        assert names and all(name.startswith("source/") for name in names)
        total = sum(row[f"{name}/reward"] * row[f"{name}/episodes"] for name in names)
        count = sum(row[f"{name}/episodes"] for name in names)
        assert total / count == pytest.approx(row["reward/mean"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--math.sandbox=sandbox-fusion", "--math.sandbox-url=http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--math.options", "products.digits=3"], "products has no option digits"),
    ],
)
def test_a_math_run_that_cannot_work_is_refused_at_the_start(flags, message, cache, tmp_path):
    math = ["--task=math", "--math.train=50", "--math.held-out=10", *flags]
    done = subprocess.run(
        command(*arguments(cache, tmp_path / "refused", *math)),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


def test_evaluate_takes_the_model_of_a_run(synchronous, cache):
    result = evaluate.main(
        [
            "--task=search",
            f"--model={synchronous / 'model'}",
            f"--cache-dir={cache}",
            "--eval.final-questions=6",
            "--rollout.slots=8",
        ]
    )
    assert result["count"] == 6 and 0 <= result["em_low"] <= result["em"] <= result["em_high"] <= 1


def test_an_interrupt_leaves_a_checkpoint_and_no_process(cache, tmp_path):
    run_dir = tmp_path / "interrupted"
    process = subprocess.Popen(
        command(*arguments(cache, run_dir, "--staleness=4", "--updates=2000")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while len(read_metrics(run_dir)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"--resume {run_dir}" in output or f"--resume={run_dir}" in output
    steps = [int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(steps) >= 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize("kind", ["closed", "not SGLang"])
def test_a_wrong_server_address_is_refused_at_the_start(kind, cache, tmp_path, synchronous):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        web = None
        if kind == "closed":
            listener.close()
        else:
            listener.close()
            web = subprocess.Popen(
                [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(1.0)
        try:
            done = subprocess.run(
                command(
                    *arguments(
                        cache,
                        tmp_path / "refused",
                        "--staleness=0",
                        f"--rollout.urls=http://127.0.0.1:{port}",
                    )
                ),
                capture_output=True,
                text=True,
                timeout=200,
            )
        finally:
            if web is not None:
                web.kill()
                web.wait()
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"127.0.0.1:{port}" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_resuming_what_is_no_run_is_refused_in_one_line(tmp_path):
    done = subprocess.run(
        command(f"--resume={tmp_path / 'nothing'}"), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr + done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "differing"),
    [
        (["--updates=9", "--checkpoint-every=1", "--eval.every=3", "--rollout.slots=2"], []),
        (["--staleness=3"], ["staleness: saved 0, now 3"]),
        (["--actor.learning-rate=1"], ["actor.learning_rate: saved 0.0003, now 1.0"]),
        (["--batch-size=16", "--seed=1"], ["batch_size: saved 8, now 16", "seed: saved 0, now 1"]),
    ],
)
def test_a_resumed_run_changes_how_it_is_watched_and_not_what_it_computes(
    flags, differing, tmp_path
):
    """C103: a setting that cannot have its effect any more is refused, not ignored."""
    saved = parse([*RUN, "--staleness=0"])
    (tmp_path / "config.json").write_text(to_json(saved))
    resumed = parse([f"--resume={tmp_path}", *flags])
    found = config_differences(to_dict(saved), to_dict(resumed), run.MAY_DIFFER)
    assert sorted(found) == differing


def test_a_run_whose_only_checkpoint_is_damaged_is_not_started_anew(synchronous, tmp_path):
    run_dir = tmp_path / "damaged"
    shutil.copytree(synchronous, run_dir)
    (last,) = list((run_dir / "checkpoints").glob("4"))
    shutil.rmtree(run_dir / "checkpoints" / "2")
    shutil.rmtree(last / "host")
    done = subprocess.run(
        command(f"--resume={run_dir}"), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "checkpoints/4 is unfinished: host/_METADATA is missing" in done.stderr
    assert read_metrics(run_dir) == read_metrics(synchronous)


def test_the_saved_configuration_is_resolved(synchronous):
    saved = json.loads((synchronous / "config.json").read_text())
    assert saved["staleness"] == 0 and saved["loss"]["eta_policy"] == 0.5
