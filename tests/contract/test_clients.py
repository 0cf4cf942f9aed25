"""Clients that others wrote against the embedded server, each a process of its own.

    COPC_CLIENTS_PYTHON=$(python tests/contract/install_clients.py) pytest tests/contract

Log-probabilities and texts are held against the learner's own forward pass.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_contract import CLOSE, LLAMA, TOKENIZER, launch, logprobs, scored, write_weights

CLIENTS_PYTHON = os.environ.get("COPC_CLIENTS_PYTHON")
PROMPTS = ["Question: what is 12 + 34?", "The quick brown fox", "lazy dogs"]
CHOICES = [" 46.", " jumps over the lazy dogs", " no"]
TOKENS = 12
QUESTIONS = [
    {"question": "Question: what is", "options": [" 12", " the fox"], "answer": 0},
    {"question": "The quick brown", "options": [" fox jumps", " answer", " 46."], "answer": 2},
]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not CLIENTS_PYTHON, reason="COPC_CLIENTS_PYTHON names no Python that has the clients"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights"), LLAMA)["default"]


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log_file = tmp_path_factory.mktemp("server") / "log"
    # Not all of the clients can give a key.
    with launch("embedded", folder, log_file, key=None) as server:
        yield server


def call(cache, *arguments):
    """Run a program of the clients' environment; gives what it prints."""
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(CLIENTS_PYTHON), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def program(name, server, cache, **settings):
    path = Path(__file__).with_name("client_program.py")
    return json.loads(call(cache, path, name, server.url, json.dumps(settings)))


def encode(text):
    return TOKENIZER.encode(text).ids


def greedy(prompt, count, stops=()):
    """What the model says, token by token, and its log-probabilities."""
    ids = []
    while len(ids) < count and (not ids or ids[-1] not in LLAMA.eos_token_ids):
        if any(stop in TOKENIZER.decode(ids) for stop in stops):
            break
        _, logits = scored("default", prompt, [*ids, 0])
        ids.append(int(logits[-1].argmax()))
    return ids


def test_sglangs_frontend_generates_batches_streams_and_chooses(server, folder, tmp_path):
    said = program(
        "frontend", server, tmp_path, prompts=PROMPTS, choices=CHOICES, max_tokens=TOKENS
    )
    assert said["model"] == str(folder) and said["version"]
    answers = [greedy(encode(prompt), TOKENS) for prompt in PROMPTS]
    texts = [TOKENIZER.decode(ids) for ids in answers]
    assert said["single"] == texts[0] and said["batch"] == texts
    for meta in (said["meta_info"], said["streamed"]):
        triples = meta["output_token_logprobs"]
        assert [token for _, token, _ in triples] == answers[0]
        own = logprobs("default", encode(PROMPTS[0]), answers[0])
        np.testing.assert_allclose([value for value, _, _ in triples], own, **CLOSE)
    assert "".join(said["pieces"]) == texts[0] and len(said["pieces"]) > 1
    means = []
    # It asks from the last but one token of the prompt on, of which nothing is said.
    start = len(encode(PROMPTS[0])) - 2
    for choice, found in zip(CHOICES, said["choices"]["input_token_logprobs"], strict=True):
        whole = encode(PROMPTS[0] + choice)
        own = logprobs("default", whole[: start + 1], whole[start + 1 :])
        assert [token for _, token, _ in found] == whole[start:]
        np.testing.assert_allclose([value for value, _, _ in found[1:]], own, **CLOSE)
        means.append(own.mean())
    assert said["choice"] == CHOICES[int(np.argmax(means))]


def test_sglangs_benchmark_streams_from_it(server, folder, tmp_path):
    results = tmp_path / "results.jsonl"
    call(
        tmp_path / "cache",
        *("-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url),
        *("--dataset-name", "random-ids", "--tokenizer", folder, "--num-prompts", 6),
        *("--random-input-len", 8, "--random-output-len", 8, "--random-range-ratio", 1.0),
        *("--disable-tqdm", "--flush-cache", "--output-file", results),
    )
    found = json.loads(results.read_text())
    assert found["completed"] == 6 and found["total_output_tokens"] == 48
    assert found["mean_ttft_ms"] > 0 and found["mean_itl_ms"] > 0


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: "{{options}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WRITE = """
output_type: generate_until
doc_to_target: "{{question}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def test_lm_eval_scores_and_generates(server, folder, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, more in (("choose", CHOOSE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + more)
    settings = {"tokenizer": str(folder), "tasks": str(tmp_path), "limit": 400}
    said = program("lm_eval", server, tmp_path / "cache", **settings)
    correct = []
    for row, sample in zip(QUESTIONS, said["samples"]["choose"], strict=True):
        likelihoods = []
        for option, response in zip(row["options"], sample["resps"], strict=True):
            context, whole = encode(row["question"]), encode(row["question"] + option)
            own = logprobs("default", whole[: len(context)], whole[len(context) :]).sum()
            assert float(response[0][0]) == pytest.approx(own, abs=1e-3)
            likelihoods.append(own)
        correct.append(int(np.argmax(likelihoods)) == row["answer"])
    assert said["results"]["choose"]["acc,none"] == np.mean(correct)
    for row, sample in zip(QUESTIONS, said["samples"]["write"], strict=True):
        assert sample["resps"] == [[TOKENIZER.decode(greedy(encode(row["question"]), TOKENS))]]
