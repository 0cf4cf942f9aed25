"""What a person sees of a run: files, display, report."""

import html
import io
import json
import math
import os
import pathlib
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from markdown_it import MarkdownIt
from tensorboardX.proto import event_pb2

from copc_jax.metrics import (
    MetricsLogger,
    confidence_interval,
    lag_values,
    mean_interval,
    read_metrics,
)
from copc_jax.run_report import report


def simulated_run(updates: int = 300, staleness: int = 64, seed: int = 0):
    """Lines of a run that learns: (step, seconds since the last line, values)."""
    random = np.random.default_rng(seed)
    before = {"eval/em": 0.312, "eval/em_low": 0.286, "eval/em_high": 0.339, "eval/count": 1190}
    yield 0, 0.0, before
    for step in range(1, updates + 1):
        progress = 1 / (1 + math.exp(-(step - 120) / 40))
        oldest = min(step - 1, staleness)
        spread = min(oldest, 12)
        lags = np.clip(oldest - random.poisson(spread / 3, 600), 0, oldest)
        heads = np.clip(oldest - random.poisson(spread / 6, 32), 0, oldest)
        em = np.clip(0.32 + 0.3 * progress + random.normal(0, 0.07), 0, 1)
        update, wait = abs(random.normal(1.5, 0.1)), abs(random.normal(0.15, 0.1))
        seconds = update + wait + 0.09
        values = lag_values(np.bincount(lags), np.bincount(heads)) | {
            "reward/mean": 1.75 * em + 0.1,
            "reward/em": em,
            "task/searches": 1.05 + 0.8 * progress + random.normal(0, 0.06),
            "learner/seconds": update,
            "learner/wait_seconds": wait,
            "learner/publish_seconds": 0.06,
            "rollout/tokens_per_second": abs(random.normal(900, 60)),
            "rollout/busy_fraction": min(abs(random.normal(0.86, 0.04)), 0.98),
            "rollout/admission_fraction": 0.02,
            "task/searched": 0.5,
            "task/valid_action_rate": 0.9,
            "task/answered": 0.8,
            "actor/kept": 0.985 - 0.05 * progress * random.uniform(),
            "coupling/explained_variance": 0.55 * progress + random.normal(0, 0.05),
            "coupling/kl_k3": 0.012 * progress * random.uniform(0.6, 1.4) + 0.0005,
        }
        if step % 100 == 0:
            values |= {"eval/em": em, "eval/em_low": em - 0.03, "eval/em_high": em + 0.03}
            values |= {"eval/count": 1190, "learner/eval_seconds": 9.0}
            seconds += 9.0
        yield step, seconds, values


def write_run(run_dir: pathlib.Path, **settings) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    elapsed = 0.0
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step, seconds, values in simulated_run(**settings):
            elapsed += seconds
            file.write(json.dumps({"step": step, "time": elapsed, **values}) + "\n")
    config = {"task": "search", "method": "copc", "staleness": 64, "seed": 0, "updates": 300}
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "command.txt").write_text("python experiments/run.py --task=search --staleness=64\n")


def tensorboard_events(run_dir: pathlib.Path) -> list[event_pb2.Event]:
    """All events of a run, files in the order that they were written."""
    events = []
    for file in sorted(
        (run_dir / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns
    ):
        data, position = file.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            events.append(event_pb2.Event.FromString(data[position + 12 : position + 12 + length]))
            position += 12 + length + 4
    return events


def lines_of(path: pathlib.Path) -> list[dict]:
    refuse = lambda text: pytest.fail(f"{text} is not JSON")
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Wilson's bounds as the roots of (p - x)^2 = z^2 x (1 - x) / n, to six digits.
    [
        (0, 10, 0.0, 0.277533),
        (5, 10, 0.236593, 0.763407),
        (10, 10, 0.722467, 1.0),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilson_interval(successes, n, low, high):
    bounds = confidence_interval(successes, n)
    assert bounds == pytest.approx((low, high), abs=1e-6)
    for bound in bounds:
        gap = (successes / n - bound) ** 2 - 1.959964**2 * bound * (1 - bound) / n
        assert bound in (0.0, 1.0) or abs(gap) < 1e-9


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_wilson_interval_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="need 0 <= successes <= n"):
        confidence_interval(successes, n)


def test_mean_interval_over_seeds():
    # Mean 2, sample deviation 1, t(2) = 4.303: half width 4.303 / sqrt(3).
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.484338, 4.484338), abs=1e-6)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)
    assert mean_interval([7.0]) == (7.0, -math.inf, math.inf)
    # t(19) = 2.0930.
    values = list(range(20))
    mean, low, high = mean_interval(values)
    error = np.std(values, ddof=1) / math.sqrt(20)
    assert mean == 9.5 and high - 9.5 == pytest.approx(9.5 - low)
    assert (high - mean) / error == pytest.approx(2.0930, abs=1e-3)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def test_lag_values_are_exact():
    # Tokens: two at lag 0, one at 3, three at 4.
    values = lag_values(np.array([2, 0, 0, 1, 3]), np.array([0, 0, 0, 0, 2]))
    assert values["lag/histogram"] == [2, 0, 0, 1, 3]
    assert values["lag/trajectory_histogram"] == [0, 0, 0, 0, 2]
    assert (values["lag/mean"], values["lag/p50"], values["lag/max"]) == (2.5, 3.0, 4.0)
    assert "lag/mean" not in lag_values(np.array([0]), np.array([0]))


def test_one_line_an_update_readable_at_once_and_strictly_json(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(0, {"eval/em": 0.25})
        logger.log(
            1, {"a/numpy": np.float32(0.5), "a/jax": jnp.float32(2), "a/int": 3, "b": [1, 2]}
        )
        assert len(lines_of(tmp_path / "metrics.jsonl")) == 2, "not flushed"
        logger.log(5, {"nan": float("nan"), "inf": np.inf, "list": [1.0, -np.inf], "yes": True})
    first, second, third = lines_of(tmp_path / "metrics.jsonl")
    assert first["step"] == 0 and first["eval/em"] == 0.25 and first["time"] >= 0
    assert (second["a/numpy"], second["a/jax"], second["a/int"], second["b"]) == (
        0.5,
        2.0,
        3.0,
        [1, 2],
    )
    assert (third["nan"], third["inf"], third["list"], third["yes"]) == (
        None,
        None,
        [1.0, None],
        1.0,
    )
    assert third["time"] >= second["time"]


def test_what_cannot_be_logged_is_named(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        assert logger.last_step == -1
        logger.log(3, {})
        assert logger.last_step == 3
        with pytest.raises(ValueError, match="step 3 comes after step 3"):
            logger.log(3, {"a": 1.0})
        with pytest.raises(TypeError, match="metric name/x: expected a number"):
            logger.log(4, {"name/x": "text"})
        with pytest.raises(TypeError, match="metric square"):
            logger.log(4, {"square": np.ones((2, 2))})
        with pytest.raises(ValueError, match="'time' is reserved"):
            logger.log(4, {"time": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [3]


def test_resume_goes_on_without_double_steps(tmp_path):
    def run(steps, **settings):
        with MetricsLogger(tmp_path, console=False, **settings) as logger:
            for step in steps:
                logger.log(step, {"loss": 10.0 * step}, {"ratio": np.linspace(0, 1, 5)})

    run(range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ti')  # killed in mid-line
    before = read_metrics(tmp_path)
    assert [row["step"] for row in before] == list(range(1, 8))
    run(range(5, 10), resume_step=4)
    rows = lines_of(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[:4] == before[:4]
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    # TensorBoard drops what an earlier file holds at or after the step of a START event.
    events = tensorboard_events(tmp_path)
    starts = [
        (index, event.step)
        for index, event in enumerate(events)
        if event.session_log.status == event_pb2.SessionLog.START
    ]
    index, purge = starts[-1]
    assert purge == 5
    shown = [
        event.step for event in events[:index] if event.HasField("summary") and event.step < purge
    ]
    shown += [event.step for event in events[index:] if event.HasField("summary")]
    assert sorted(shown) == list(range(1, 10))


def test_a_new_run_does_not_overwrite_another(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {})
    with pytest.raises(FileExistsError, match="holds another run"):
        MetricsLogger(tmp_path, console=False)
    MetricsLogger(tmp_path, console=False, resume_step=0).close()
    assert read_metrics(tmp_path) == []


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object with a step"):
        read_metrics(tmp_path)


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        samples = np.array([1.0, 2.0, 3.0, np.nan])
        values = {"loss": 0.5, "bad": math.nan, "lag/histogram": [2, 0, 1], "empty": [0, 0]}
        logger.log(3, values, {"ratio": samples, "nothing": np.array([np.inf])})
    values = {
        value.tag: value for event in tensorboard_events(tmp_path) for value in event.summary.value
    }
    assert set(values) == {"loss", "lag/histogram", "ratio"}
    assert values["loss"].simple_value == 0.5
    lag = values["lag/histogram"].histo
    assert (lag.num, lag.sum, lag.sum_squares, lag.min, lag.max) == (3, 2, 4, 0, 2)
    assert list(lag.bucket_limit) == [0.5, 1.5, 2.5] and list(lag.bucket) == [2, 0, 1]
    assert values["ratio"].histo.num == 3 and values["ratio"].histo.sum == 6


@pytest.mark.parametrize("file", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_is_said_and_blocks_nothing(tmp_path, file):
    """Also where TensorBoard's file alone cannot grow, for more values than any queue holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {"loss": 0.5})
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if file == "tensorboard" else 0, hard))
        try:
            with pytest.raises(
                OSError, match=r"figures of update \d+ cannot be written to .*large"
            ):
                for step in range(2, 2000):
                    samples = {f"h{i}": np.arange(100.0) for i in range(200)}
                    logger.log(step, {}, samples if file == "tensorboard" else {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_metrics(tmp_path)[0]["step"] == 1


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    stream = io.StringIO()
    with MetricsLogger(tmp_path, total_steps=40, console_seconds=1e9, stream=stream) as logger:
        for step, _, values in simulated_run(updates=40):
            logger.log(step, values)
            logger.status("waiting for rollouts")
    lines = stream.getvalue().splitlines()
    # The evaluation before the first update, and the end; nothing in between was due.
    assert len(lines) == 2
    assert lines[0] == "update 0/40 | held-out EM 31.2% [28.6%, 33.9%]"
    for part in ("update 40/40", "reward ", "EM ", "lag ", "max 39", "tokens/s ", "learner waits"):
        assert part in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    code = """
        import sys
        from copc_jax.metrics import MetricsLogger
        with MetricsLogger(sys.argv[1], console_seconds=0, stream=sys.stdout) as logger:
            for step in range(5000):
                logger.log(step, {"loss": 1.0})
        open(sys.argv[1] + "/done", "w").close()
    """
    program = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"update 0")
    process.stdout.close()
    process.wait(timeout=60)
    process.stderr.close()
    assert (tmp_path / "done").exists()
    assert len(read_metrics(tmp_path)) == 5000


def test_ctrl_c_gives_the_terminal_back(tmp_path):
    code = """
        import sys, time
        from copc_jax.metrics import MetricsLogger
        with MetricsLogger(sys.argv[1], total_steps=9) as logger:
            logger.log(1, {"reward/mean": 1.5, "lag/mean": 2.0, "lag/max": 4.0})
            logger.status("waiting for rollouts")
            print("printed")
            time.sleep(60)
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(follower)
    shown = b""
    while b"waiting for rollouts" not in shown:
        shown += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    assert process.returncode != 0 and b"KeyboardInterrupt" in shown
    assert b"update 1/9" in shown and b"lag 2.0  max 4" in shown
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert shown.rfind(show) > shown.rfind(hide) >= 0, "the cursor stayed hidden"
    # What the program prints goes to its own pipe, not into the display.
    assert printed.strip() == b"printed"
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_episodes_stop_at_their_limit_and_say_so(tmp_path):
    record = {"step": 7, "parts": [{"by": "prompt", "text": "Ü\u2028</script>\x1b[31m"}]}
    with MetricsLogger(tmp_path, console=False, episodes_bytes=400) as logger:
        with pytest.raises(ValueError, match="not JSON compliant"):
            logger.episode({"step": 1, "bad": math.nan})
        for step in range(7, 60):
            logger.episode(record | {"step": step})
        logger.log(60, {"reward/mean": 1.0})
    rows = lines_of(tmp_path / "episodes.jsonl")
    assert rows[0] == record and 2 < len(rows) < 10
    assert rows[-1] == {"step": rows[-2]["step"] + 1, "limit_bytes": 400}
    with MetricsLogger(tmp_path, console=False, episodes_bytes=400, resume_step=60) as logger:
        logger.episode(record | {"step": 61})
    assert lines_of(tmp_path / "episodes.jsonl") == rows
    (tmp_path / "episodes.html").touch()
    text = report(tmp_path).read_text()
    assert f"[Episodes, token by token](episodes.html): {len(rows) - 1} of " in text
    assert f"Recording stopped at update {rows[-1]['step']}" in text


def test_episodes_of_a_resumed_run_go_on_without_doubles_or_torn_lines(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        for step in (2, 4, 6):
            logger.log(step, {})
            logger.episode({"step": step, "parts": []})
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"step": 6, "par')  # killed in mid-line
    with MetricsLogger(tmp_path, console=False, resume_step=4) as logger:
        logger.log(6, {})
        logger.episode({"step": 6, "parts": []})
    assert [row["step"] for row in lines_of(tmp_path / "episodes.jsonl")] == [2, 4, 6]


def test_report_states_the_figures(tmp_path):
    write_run(tmp_path)
    text = report(tmp_path).read_text()
    for picture in ("curves.png", "lag.png", "time.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG") and f"({picture})" in text
    assert "# Run: search, copc, staleness 64, seed 0" in text
    assert "python experiments/run.py --task=search --staleness=64" in text
    assert "31.2% of 1190 questions (95% interval 28.6% to 33.9%) at update 0" in text
    rows = [row for row in read_metrics(tmp_path) if "lag/histogram" in row and row["step"] >= 64]
    tokens = np.sum(
        [np.pad(row["lag/histogram"], (0, 65 - len(row["lag/histogram"]))) for row in rows], axis=0
    )
    middle = np.sort(np.repeat(np.arange(65), tokens))[(tokens.sum() - 1) // 2]
    assert f"Lag of sampled tokens from update 64 on: median {middle}," in text
    assert "maximum 64 updates" in text
    waited = sum(row["learner/wait_seconds"] for row in rows[1:]) / (
        rows[-1]["time"] - rows[0]["time"]
    )
    assert f"waiting for rollouts {waited:.0%}" in text
    for name, share in (
        ("Episodes with a search", "50%"),
        ("Valid actions of all actions", "90%"),
        ("Episodes with an answer", "80%"),
    ):
        assert f"{name}: {share} in the first tenth" in text
    assert '"method": "copc"' in text
    assert "cannot say" not in text


def test_report_takes_later_evaluations(tmp_path):
    write_run(tmp_path, updates=5)
    line = {
        "step": 300,
        "eval/em": 0.7,
        "eval/em_low": 0.65,
        "eval/em_high": 0.75,
        "eval/count": 300,
    }
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    assert (
        "70.0% of 300 questions (95% interval 65.0% to 75.0%) at update 300"
        in report(tmp_path).read_text()
    )


def test_report_is_honest_about_what_is_missing(tmp_path):
    with MetricsLogger(tmp_path, console=False) as logger:
        logger.log(1, {"reward/mean": 1.0, "actor/loss": math.nan})
        logger.log(2, {"reward/mean": 1.2, "actor/loss": math.nan})
    (tmp_path / "config.json").write_text('{"staleness": 64, "updates": 300}')
    text = report(tmp_path).read_text()
    assert "no evaluation was logged" in text
    assert "The run stopped early: 2 of 300 updates." in text
    assert "shorter than its staleness bound of 64" in text
    assert "Not logged: lag histogram." in text and "Not logged: time of the generator." in text
    assert "actor/loss was not finite at 2 updates." in text
    assert "command.txt is not in the run directory." in text
    assert not (tmp_path / "lag.png").exists() and "lag.png" not in text
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(("updates", "staleness"), [(1, 0), (40, 64)])
def test_report_of_short_and_synchronous_runs(tmp_path, updates, staleness):
    write_run(tmp_path, updates=updates, staleness=staleness)
    report(tmp_path)
    assert (tmp_path / "lag.png").exists()


def test_report_shows_hostile_text_and_obeys_none_of_it(tmp_path):
    hostile = (
        '<script>window.hit=1</script><img src=x onerror="window.hit=1"> & [read](javascript:hit) '
        "`<b>` \\` ```` <i>"
    )
    write_run(tmp_path, updates=5)
    config = {"task": hostile, "method": "copc", "data": {"train": [hostile]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"python experiments/run.py --data.train={hostile}\n````\n{hostile}\n"
    (tmp_path / "command.txt").write_text(command)
    rows = lines_of(tmp_path / "metrics.jsonl")
    rows[-1][f"source/{hostile}/reward"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = MarkdownIt("commonmark").render(report(tmp_path).read_text())
    pictures = {"curves.png", "lag.png", "time.png"}
    assert set(re.findall(r"<([a-z0-9]+)", page)) == {
        "h1",
        "h2",
        "p",
        "ul",
        "li",
        "pre",
        "code",
        "img",
    }
    assert set(re.findall(r'<img src="([^"]*)"', page)) == pictures
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    # In the heading, the command twice, the configuration and the name of a figure.
    assert text.count("<script>window.hit=1</script><img src=x onerror=") == 6
    assert text.count("[read](javascript:hit)") == 6


def test_report_without_updates_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to report"):
        report(tmp_path)
