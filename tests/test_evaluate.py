"""Evaluation through the command: real files, a real server, a model that knows some answers."""

import csv
import fcntl
import json
import pathlib
import signal
import subprocess
import sys
import time

import evaluate
import jax
import numpy as np
import psutil
import pyarrow as pa
import pytest
import sft
from pyarrow import parquet
from scripted_server import Behave, ScriptedServer, Status

from copc_jax import hf, metrics
from copc_jax.config import PRESETS
from copc_jax.rollout.launch import launch_embedded

# What the model of these tests has learned by heart, without searching and with a search.
KNOWN = {"What is red?": "apple", "What is green?": "pear", "What is blue?": "plum"}
SEARCHED = {"Where is gold?": "river"}

pytestmark = pytest.mark.timeout(600)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def learn(task, rows, folder, cache):
    """Fine-tune a tiny model, through the command, until it knows the chats by heart."""
    arguments = [
        f"--task={task}",
        "--data",
        str(write(folder / "corpus.jsonl", rows)),
        f"--out={folder / 'model'}",
        f"--cache-dir={cache}",
        "--sft.updates=150",
        "--sft.rows=1",
        "--tiny.vocab-size=1024",
        "--tiny.hidden-size=32",
        "--tiny.intermediate-size=64",
        "--tiny.num-layers=2",
        "--tiny.num-heads=2",
        "--tiny.num-kv-heads=1",
    ]
    # optax does not follow the strict promotion of the other tests.
    with jax.numpy_dtype_promotion("standard"):
        return sft.main(arguments)


@pytest.fixture(scope="module")
def model(cache, tmp_path_factory):
    rows = [chat(q, f"<answer> {a}</answer>") for q, a in KNOWN.items()]
    rows += [chat(q, f"<search> {a}</search>") for q, a in SEARCHED.items()]
    return learn("search", rows, tmp_path_factory.mktemp("model"), cache)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two sets with two rights of three and one right of one; a question that is never answered."""
    folder = tmp_path_factory.mktemp("data")
    nq = [
        {"question": "What is red?", "golden_answers": ["fruit", "The Apple!"]},
        {"question": "What is green?", "golden_answers": ["pear"]},
        {"question": "What is blue?", "golden_answers": ["sky"]},
    ]
    (folder / "bamboogle_test.csv").write_text("Question,Answer\r\nWhat is blue?,plum\r\n")
    own = [{"question": "Where is gold?", "answer": "river"}]
    return [
        str(write(folder / "nq_test.jsonl", nq)),
        str(folder / "bamboogle_test.csv"),
        f"mine={write(folder / 'own.jsonl', own)}",
    ]


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """A server that runs already, for the evaluations that need none of their own."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with launch_embedded(model, log_file=log, slots=4, max_length=192) as process:
        yield f"--rollout.urls={process.url}"


def arguments(model, files, cache, out, *more):
    return [
        "--task=search",
        f"--model={model}",
        "--data",
        *files,
        f"--out={out}",
        f"--cache-dir={cache}",
        "--rollout.slots=4",
        *more,
    ]


@pytest.fixture(scope="module")
def undisturbed(model, files, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "whole"
    return out, evaluate.main(arguments(model, files, cache, out))


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_scores_are_those_of_what_the_model_knows(undisturbed):
    out, results = undisturbed
    scores = {name: figures["score"] for name, figures in results["sets"].items()}
    assert scores == {"nq": pytest.approx(2 / 3), "bamboogle": 1.0, "mine": 0.0}
    assert results["average"]["score"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert results["count"] == 5 and results["em"] == pytest.approx(3 / 5)
    low, high = metrics.confidence_interval(2, 3)
    assert results["sets"]["nq"]["low"] == pytest.approx(low)
    assert results["sets"]["nq"]["high"] == pytest.approx(high)
    assert results["sets"]["mine"]["searches"] >= 1 and results["sets"]["nq"]["searches"] == 0
    assert results["sets"]["mine"]["truncated"] == 1.0
    assert results["missing"] == 0 and results["failures"] == 0
    assert json.loads((out / "results.json").read_text()) == results


def test_the_table_has_the_papers_columns(undisturbed):
    out, _ = undisturbed
    head, _, score, *_ = (out / "table.md").read_text().splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        *("", "NQ", "Bamboogle", "mine", "average")
    ]
    assert [cell.strip() for cell in score.strip("|").split("|")] == [
        *("EM", "66.67", "100.00", "0.00", "55.56")
    ]


def test_every_sample_is_kept(undisturbed):
    out, _ = undisturbed
    by_id = {row["prompt_id"]: row for row in samples(out)}
    assert len(by_id) == 5
    red = by_id["nq_test/1"]
    assert red["answer"] == "apple" and red["correct"] == 1.0 and red["status"] == "done"
    assert red["text"] == "<answer> apple</answer>" and red["turns"] == 1
    assert red["tokens"] == red["sampled_tokens"] > 2 and red["searches"] == 0
    gold = by_id["mine/1"]
    assert gold["answer"] is None and gold["correct"] == 0.0 and gold["status"] == "truncated"
    assert "<information>" in gold["text"] and gold["tokens"] > gold["sampled_tokens"]
    with (out / "problems.csv").open(newline="") as file:
        rows = {row["prompt_id"]: row for row in csv.DictReader(file)}
    assert rows["nq_test/3"]["correct"] == "0.0" and json.loads(rows["nq_test/3"]["answers"]) == [
        "plum"
    ]
    assert rows["nq_test/1"]["gold"] == '["fruit", "The Apple!"]'


def test_a_stopped_evaluation_asks_only_for_what_is_missing(
    undisturbed, model, files, cache, server, tmp_path
):
    whole, results = undisturbed
    out = tmp_path / "part"
    out.mkdir()
    (out / "settings.json").write_text((whole / "settings.json").read_text())
    lines = (whole / "samples.jsonl").read_text().splitlines(keepends=True)
    # As a kill leaves it: two samples, and the beginning of a third.
    (out / "samples.jsonl").write_text("".join(lines[:2]) + lines[2][:30])
    assert evaluate.main(arguments(model, files, cache, out, server)) == results
    assert (out / "samples.jsonl").read_text().startswith("".join(lines[:2]))
    assert len(samples(out)) == 5
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()
    # Once all is there, nothing is asked and no server is started.
    assert evaluate.main(arguments(model, files, cache, out)) == results
    assert not (out / "server.log").exists()


def test_a_second_process_changes_nothing(undisturbed, model, files, cache, tmp_path, capsys):
    whole, _ = undisturbed
    out = tmp_path / "busy"
    out.mkdir()
    (out / "settings.json").write_text((whole / "settings.json").read_text())
    text = (whole / "samples.jsonl").read_text()[:-30]  # The other is writing a line.
    (out / "samples.jsonl").write_text(text)
    with (out / "samples.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as error:
            evaluate.main(arguments(model, files, cache, out))
    assert error.value.code == 2 and "another process" in capsys.readouterr().err
    assert (out / "samples.jsonl").read_text() == text


def test_a_scheduler_ends_it_in_order_and_it_goes_on(
    undisturbed, model, files, cache, server, tmp_path
):
    _, results = undisturbed
    out = tmp_path / "ended"
    rows = [{"question": f"Where is gold? {i}", "answer": "river"} for i in range(200)]
    many = str(write(tmp_path / "many.jsonl", rows))
    args = arguments(model, [*files, many], cache, out, "--limit=40")
    command = [sys.executable, str(pathlib.Path(evaluate.__file__)), *args]
    process = subprocess.Popen(
        [*command, "--rollout.max-in-flight=1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 200
    file = out / "samples.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130 and b"goes on" in errors
    assert children and not psutil.wait_procs(children, timeout=10)[1]
    assert 3 <= len(samples(out)) < 45
    again = evaluate.main([*args, server])
    assert again["sets"]["nq"] == results["sets"]["nq"] and again["missing"] == 0
    assert again["sets"]["many"]["problems"] == 40
    keys = [(row["prompt_id"], row["sample"]) for row in samples(out)]
    assert len(set(keys)) == len(keys) == 45


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--temperature=0.6"], "temperature (was 0.0, is 0.6)"),
        (["--limit=2"], "limit (was 0, is 2)"),
        (["--rollout.max-turns=3"], "rollout.max_turns"),
        (["--search.topk=2"], "search.topk"),
    ],
)
def test_another_configuration_in_the_same_folder_is_refused(
    more, named, undisturbed, model, files, cache, capsys
):
    out, _ = undisturbed
    before = (out / "samples.jsonl").read_text()
    with pytest.raises(SystemExit) as error:
        evaluate.main(arguments(model, files, cache, out, *more))
    assert error.value.code == 2
    assert named in capsys.readouterr().err
    assert (out / "samples.jsonl").read_text() == before


def test_another_model_or_other_questions_in_the_same_folder_are_refused(
    undisturbed, model, files, cache, tmp_path, capsys
):
    out, _ = undisturbed
    params, config = hf.load_hf(model)
    params["embed"] = params["embed"] * 2
    text = (model / "tokenizer.json").read_text()
    hf.save_hf(tmp_path / "other", params, config, tokenizer_json=text)
    with pytest.raises(SystemExit):
        evaluate.main(arguments(tmp_path / "other", files, cache, out))
    assert "contents of --model" in capsys.readouterr().err
    (tmp_path / "nq_test.jsonl").write_text('{"question": "Which?", "answer": "x"}\n')
    with pytest.raises(SystemExit):
        evaluate.main(arguments(model, [str(tmp_path / "nq_test.jsonl")], cache, out))
    assert "contents of --data" in capsys.readouterr().err


def test_several_samples_are_averaged_problem_by_problem(model, files, cache, server, tmp_path):
    more = [server, "--samples=3", "--temperature=1", "--limit=1", "--rollout.max-tokens=64"]
    results = evaluate.main(arguments(model, files[:2], cache, tmp_path / "a", *more))
    rows = samples(tmp_path / "a")
    assert sorted((row["prompt_id"], row["sample"]) for row in rows) == [
        (name, sample) for name in ("bamboogle_test/2", "nq_test/1") for sample in range(3)
    ]
    for name in ("nq", "bamboogle"):
        right = [row["correct"] for row in rows if row["source"] == name]
        assert results["sets"][name]["score"] == pytest.approx(np.mean(right))
        assert results["sets"][name]["low"] <= np.mean(right) <= results["sets"][name]["high"]
    # Seeds belong to prompts and samples, not to the order of things.
    evaluate.main(arguments(model, files[:2][::-1], cache, tmp_path / "b", *more))
    texts = {(row["prompt_id"], row["sample"]): row["text"] for row in rows}
    assert {(r["prompt_id"], r["sample"]): r["text"] for r in samples(tmp_path / "b")} == texts


def test_the_servers_get_the_sampling_that_was_asked_for(model, files, cache, tmp_path):
    with ScriptedServer() as server:
        run = arguments(model, files[1:2], cache, tmp_path / "out", f"--rollout.urls={server.url}")
        evaluate.main([*run, "--samples=2", "--temperature=0.6", "--top-p=0.9"])
        sent = [body["sampling_params"] for body in server.sent("/generate")]
        evaluate.main([*run, f"--out={tmp_path / 'default'}"])
        default = [body["sampling_params"] for body in server.sent("/generate")][len(sent) :]
    assert sent and all(p["temperature"] == 0.6 and p["top_p"] == 0.9 for p in sent)
    assert len({p["sampling_seed"] for p in sent}) == len(sent)
    # Greedy, and one sample of the only question.
    assert default and all(p["temperature"] == 0.0 and p["top_p"] == 1.0 for p in default)
    assert len(samples(tmp_path / "default")) == 1


@pytest.mark.parametrize(
    ("task", "samples", "temperature"), [("search", 1, 0.0), ("math", 32, 0.6)]
)
def test_the_protocol_of_the_paper_is_not_that_of_training(task, samples, temperature):
    """C113: whatever training samples with, evaluation has settings of its own."""
    preset = PRESETS[task]
    how, config = evaluate._defaults(preset, {"--data": "x.jsonl"}.get)
    assert (how.samples, how.temperature, how.top_p) == (samples, temperature, 1.0)
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 1.0)
    assert preset == PRESETS[task]


def test_failed_episodes_are_retried_and_never_scored(model, files, cache, tmp_path, capsys):
    faults = ["--rollout.deadline-seconds=0.2", "--rollout.max-in-flight=1", "--limit=1"]
    with ScriptedServer() as server:
        run = arguments(
            model, files[:2], cache, tmp_path / "out", *faults, f"--rollout.urls={server.url}"
        )
        server.script("/generate", Behave(), *[Status(503)] * 400)
        with pytest.raises(SystemExit) as error:
            evaluate.main(run)
        assert error.value.code == 1
        partly = json.loads((tmp_path / "out" / "results.json").read_text())
        assert partly["missing"] == 1 and partly["failures"] == 4 and partly["count"] == 1
        assert "1 SAMPLES ARE MISSING" in capsys.readouterr().out
        assert len(samples(tmp_path / "out")) == 1
    with ScriptedServer() as server:
        results = evaluate.main([*run, f"--rollout.urls={server.url}"])
    assert results["missing"] == 0 and results["count"] == 2
    assert [row["prompt_id"] for row in samples(tmp_path / "out")] == [
        "nq_test/1",
        "bamboogle_test/2",
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples=4"], "samples must be 1 at temperature 0"),
        (["--samples=0"], "samples must be 1 or more"),
        (["--temperature=-1"], "temperature"),
        (["--top-p=0"], "top_p"),
        (["--limit=-1"], "limit"),
        (["--data", "nothing.jsonl"], "nothing.jsonl"),
        (["--model=tiny"], "--model must name an HF folder"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_words(
    more, message, model, files, cache, tmp_path, capsys
):
    with pytest.raises(SystemExit) as error:
        evaluate.main(arguments(model, files, cache, tmp_path / "out", *more))
    assert error.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_the_math_table_averages_samples_and_counts_calls(cache, tmp_path, capsys):
    """A model that computes one product with Python, and knows one sum."""
    product = [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": "<code>print(6 * 7)</code>"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "<answer>\\boxed{42}</answer>"},
    ]
    rows = [{"messages": product}, chat("What is 1 + 1?", "<answer>\\boxed{2}</answer>")]
    model = learn("math", rows, tmp_path, cache)
    verl = [
        {
            "data_source": "aime24",
            "prompt": [{"role": "user", "content": f"Solve it.\n\nTask:\n{question}"}],
            "reward_model": {"ground_truth": gold, "style": "rule"},
        }
        for question, gold in [("What is 6 * 7?", "042"), ("What is 1 + 1?", "2")]
    ]
    parquet.write_table(pa.Table.from_pylist(verl), tmp_path / "aime.parquet")
    wrong = write(tmp_path / "BeyondAIME.jsonl", [{"problem": "What is 1 + 1?", "answer": 3}])
    run = [
        *("--task=math", f"--model={model}", f"--cache-dir={cache}", "--samples=2"),
        *("--data", str(wrong), str(tmp_path / "aime.parquet"), f"--out={tmp_path / 'out'}"),
        *("--temperature=0.05", "--rollout.slots=4"),
    ]
    results = evaluate.main(run)
    assert results["sets"]["aime24"]["score"] == 1.0 and results["sets"]["aime24"]["calls"] == 0.5
    assert results["sets"]["BeyondAIME"]["score"] == 0.0
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert table[0].split("|")[2:-1] == [" AIME24 ", " BeyondAIME ", " average "]
    assert table[2].startswith("| avg@2 | 100.00 | 0.00 | 50.00")
    assert "| pass@2 | 100.00 | 0.00 |  |" in table
    product = [row for row in samples(tmp_path / "out") if row["prompt_id"] == "aime/1"]
    assert sorted(row["sample"] for row in product) == [0, 1]
    for row in product:
        assert row["answer"] == "42" and row["calls"] == 1 and row["turns"] == 2
        assert "<interpreter>42</interpreter>" in row["text"]
    # An episode that the budget cuts is wrong; here right after the call.
    cut = max(row["prompt_tokens"] + row["tokens"] for row in product) - 3
    short = evaluate.main([*run, f"--out={tmp_path / 'cut'}", f"--rollout.max-tokens={cut}"])
    assert short["sets"]["aime24"]["score"] == 0.5 == short["sets"]["aime24"]["truncated"]
    # Gold answers that nothing could equal are refused before anything starts.
    write(tmp_path / "bad.jsonl", [{"problem": "Why?", "answer": "\\frac{1}{2"}])
    with pytest.raises(SystemExit):
        evaluate.main([*run, "--data", str(tmp_path / "bad.jsonl"), f"--out={tmp_path / 'bad'}"])
    assert f"{tmp_path / 'bad.jsonl'}:1" in capsys.readouterr().err


# Statistics.


def test_some_of_k_samples_are_right():
    """C114: of n samples of one problem, not of n problems."""
    assert evaluate.pass_at(4, samples=8, right=3) == pytest.approx(0.928571, abs=1e-6)
    assert evaluate.pass_at(1, samples=8, right=3) == pytest.approx(3 / 8)
    assert evaluate.pass_at(6, samples=8, right=3) == 1.0
    assert evaluate.pass_at(8, samples=8, right=0) == 0.0
    for k, samples, right in ((9, 8, 3), (0, 8, 3), (2, 8, 9)):
        with pytest.raises(ValueError, match=f"pass@{k}"):
            evaluate.pass_at(k, samples=samples, right=right)


def test_one_sample_each_has_wilsons_interval():
    for right, count in [(0, 5), (2, 5), (5, 5), (30, 100)]:
        means = [1.0] * right + [0.0] * (count - right)
        assert evaluate.clustered_interval(means, 1) == pytest.approx(
            metrics.confidence_interval(right, count)
        )


def test_equal_samples_count_once_and_independent_ones_all():
    # Problems that are right always or never: 32 samples say no more than one.
    alike = [1.0] * 12 + [0.0] * 18
    assert evaluate.clustered_interval(alike, 32) == pytest.approx(
        metrics.confidence_interval(12, 30)
    )
    # Problems that are all equally hard: every sample counts.
    assert evaluate.clustered_interval([0.25] * 30, 32) == pytest.approx(
        metrics.confidence_interval(240, 960)
    )
    # A set that is never right still has a width.
    assert evaluate.clustered_interval([0.0] * 30, 32) == pytest.approx(
        metrics.confidence_interval(0, 30)
    )


@pytest.mark.parametrize("hardness", [(0.5, 0.5), (2.0, 6.0), (20.0, 20.0)])
def test_the_interval_holds_the_truth_about_19_times_of_20(hardness):
    """Problems drawn from a population of any spread; the truth is the population's mean."""
    rng = np.random.default_rng(0)
    truth = hardness[0] / sum(hardness)
    held = []
    for _ in range(2000):
        means = (rng.binomial(8, rng.beta(*hardness, size=40)) / 8).tolist()
        low, high = evaluate.clustered_interval(means, 8)
        held.append(low <= truth <= high)
    assert 0.92 < np.mean(held) < 0.98
