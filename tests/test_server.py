"""The embedded server as a process of its own, over HTTP, held against captured SGLang traffic."""

import contextlib
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from copc_jax import hf, model
from copc_jax.rollout.launch import LaunchError, launch_embedded

# As many ids as the model that the captures come from, so that their requests fit.
CONFIG = model.ModelConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    eos_token_ids=(511,),
)
MAX_LENGTH = 1024
SLOTS = 4
PROMPT = [53, 283, 316, 30, 312, 314, 305, 264, 306, 35, 328, 30]
CAPTURES = json.loads((Path(__file__).parent / "captures/sglang_0_5_23.json").read_text())
# The log-probabilities of server and test differ by float32 rounding only.
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def make_tokenizer():
    """Bytes, 255 pairs of letters, and one special token: 512 ids that all have a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcumwf"
    pairs = [(a, b) for a in letters for b in letters][:255]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


TOKENIZER = make_tokenizer()


def params_of(seed):
    # Sharper than the default, so that weights of different seeds disagree by whole nats.
    params = model.init(jax.random.key(seed), CONFIG)
    return {**params, "embed": params["embed"] * 20.0}


PARAMS = {version: params_of(seed) for version, seed in (("default", 0), ("1", 1), ("2", 2))}


@jax.jit
def _logits(params, token_ids):
    segments = jnp.ones_like(token_ids)
    positions = jnp.arange(token_ids.shape[1])[None]
    return model.logits(
        params, CONFIG, model.forward(params, CONFIG, token_ids, segments, positions)
    )


def logprobs_of(version, token_ids, temperature=1.0):
    """f32[n, vocab], row i: log-probabilities of what follows token i, by a forward pass."""
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(token_ids)] = token_ids
    logits = _logits(PARAMS[version], jnp.array(padded))[: len(token_ids)]
    return np.asarray(jax.nn.log_softmax(logits / np.float32(temperature), axis=1))


def response_logprobs(version, prompt, output_ids, temperature=1.0):
    rows = logprobs_of(version, [*prompt, *output_ids], temperature)[len(prompt) - 1 : -1]
    return rows[np.arange(len(output_ids)), output_ids]


# ------------------------------------------------------------------------------------ client side


class Api:
    def __init__(self, url):
        self.address = urllib.parse.urlsplit(url).netloc

    def connect(self):
        # Long enough for a program that compiles at its first use on a busy machine.
        return contextlib.closing(http.client.HTTPConnection(self.address, timeout=200.0))

    def request(self, method, path, body=None, raw=None, content_type=None):
        """Give status, content type and text."""
        if body is not None:
            raw, content_type = json.dumps(body), "application/json"
        headers = {"Content-Type": content_type} if content_type else {}
        with self.connect() as connection:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type"), response.read().decode()

    def post(self, path, body, status=200):
        got, _, text = self.request("POST", path, body)
        assert got == status, text
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path):
        status, _, text = self.request("GET", path)
        assert status == 200, text
        return json.loads(text) if text else None

    def generate(self, prompt=PROMPT, *, status=200, body=None, **sampling):
        body = {"input_ids": prompt, "return_logprob": True, **(body or {})}
        return self.post("/generate", {**body, "sampling_params": sampling}, status)

    def stream(self, prompt=PROMPT, *, body=None, **sampling):
        """Yield the events of a stream as they come, without the closing [DONE]."""
        body = {"input_ids": prompt, "return_logprob": True, "stream": True, **(body or {})}
        body["sampling_params"] = sampling
        headers = {"Content-Type": "application/json"}
        with self.connect() as connection:
            connection.request("POST", "/generate", json.dumps(body), headers)
            with contextlib.closing(connection.getresponse()) as response:
                assert response.status == 200
                assert response.getheader("Content-Type", "").startswith("text/event-stream")
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        return
                    if line.strip():
                        yield json.loads(line.removeprefix(b"data: "))

    def state(self):
        return self.get("/server_info")["internal_states"][0]

    def wait_until(self, condition, timeout=20.0):
        deadline = time.monotonic() + timeout
        while not condition(self.state()):
            assert time.monotonic() < deadline, self.state()
            time.sleep(0.01)

    def update(self, directory, version, status=200, **more):
        body = {"model_path": str(directory), "weight_version": version, **more}
        return self.post("/update_weights_from_disk", body, status)


def ids_of(answer):
    return answer["output_ids"]


def logprob_of(answer):
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    assert answer["meta_info"]["output_token_logprobs_length"] == len(triples)
    return np.array([logprob for logprob, _, _ in triples])


# ------------------------------------------------------------------------------------ the server


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Folders of three versions of the weights, by version."""
    root = tmp_path_factory.mktemp("weights")
    for version, params in PARAMS.items():
        hf.save_hf(root / version, params, CONFIG, tokenizer_json=TOKENIZER.to_str())
    return {version: root / version for version in PARAMS}


@pytest.fixture(scope="module")
def compilation_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compilation cache")


def launch(directory, log_file, compilation_cache, **more):
    return launch_embedded(
        directory,
        log_file=log_file,
        slots=SLOTS,
        max_length=MAX_LENGTH,
        compilation_cache=compilation_cache,
        # That of all tests.
        weight_roots=[directory.parents[1]],
        # Two tokens a dispatch, so that control calls land in the middle of responses.
        arguments=[
            *("--steps-per-dispatch", "2", "--prefill-rows", "2"),
            *("--prefill-chunks", "32", "--attend", "128"),
        ],
        timeout_s=280.0,
        **more,
    )


@pytest.fixture(scope="module")
def server(weights, compilation_cache, tmp_path_factory):
    log_file = tmp_path_factory.mktemp("server") / "log"
    with launch(weights["default"], log_file, compilation_cache) as server:
        yield server


@pytest.fixture
def api(server, weights):
    """The server, idle and with its first weights again after every test."""
    api = Api(server.url)
    yield api
    assert server.alive(), server.log_tail()
    api.post("/abort_request", {"abort_all": True})
    api.post("/continue_generation", {})
    info = api.get("/model_info")
    # Both: an update without a version changes the weights alone.
    if (info["weight_version"], info["model_path"]) != ("default", str(weights["default"])):
        api.update(weights["default"], "default")
    api.wait_until(lambda state: not state["running"] and not state["waiting"])


@contextlib.contextmanager
def in_background(*calls):
    """Run calls in threads; gives their futures."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


# ------------------------------------------------------------------------------------ captures


def shape(value):
    """Reduce a JSON value to its structure; null fits anything."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value if value is None else "bool"
    return "number" if isinstance(value, (int, float)) else "string"


def assert_same_shape(ours, theirs, where="answer", *, subset=False):
    """Compare keys and kinds of values; of lists, those entries that both have."""
    if theirs is None or ours is None:
        return
    assert type(ours) is type(theirs), f"{where}: {ours} is not like {theirs}"
    if isinstance(theirs, dict):
        extra, missing = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
        assert not extra, f"{where} has {extra}"
        assert subset or not missing, f"{where} lacks {missing}"
        for key in ours:
            assert_same_shape(ours[key], theirs[key], f"{where}.{key}", subset=subset)
    elif isinstance(theirs, list):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            assert_same_shape(mine, other, f"{where}[{index}]", subset=subset)
    else:
        assert ours == theirs, where


# These show a state that a request alone does not bring about; tests below use their answers.
STATEFUL = (
    *("pa_waiting", "abort_all_gen2", "span_retract_gen", "flush_while_running"),
    *("gen_stream", "gen_stop_token_ids"),
)
# Refusals whose words are SGLang's too.
SAME_WORDS = (
    *("err_empty_ids", "err_max_new_neg", "err_max_new_str", "err_temp_neg", "err_top_k_0"),
    *("err_rid_dup", "err_rid_len"),
)
CAPTURED = {capture["name"]: capture for capture in CAPTURES}


def filled(capture, weights):
    """Give the body to send: other folders, and a long prompt written out."""
    body = capture.get("json")
    if body is None:
        return None
    if str(body.get("model_path", "")).startswith("models/"):
        body = {**body, "model_path": str(weights["1"])}
    if isinstance(body.get("input_ids"), dict):
        long = body["input_ids"]
        body = {**body, "input_ids": [long["repeat"]] * long["times"]}
    return body


@pytest.mark.parametrize("name", [name for name in CAPTURED if name not in STATEFUL])
def test_captured_request_gets_an_answer_of_the_same_shape(api, weights, name):
    capture = CAPTURED[name]
    body = filled(capture, weights)
    theirs = capture.get("answer")
    if name == "gen_logprob_full":
        # The one field of it that this server refuses.
        del body["token_ids_logprob"]
        for key in ("input_token_ids_logprobs", "output_token_ids_logprobs"):
            del theirs["meta_info"][key]
    status, content_type, text = api.request(
        capture["method"], capture["path"], body, capture.get("raw")
    )
    assert status == capture["status"], text
    if theirs is None:
        assert text == capture["text"]
        return
    assert (content_type or "").split(";")[0] == capture["content_type"]
    ours = json.loads(text)
    assert_same_shape(shape(ours), shape(theirs), subset=name in ("info_v1_loads",))
    if name in SAME_WORDS:
        assert ours == theirs


def test_captured_stream_has_the_same_events(api):
    capture = CAPTURED["gen_stream"]
    body = capture["json"]
    events = list(api.stream(body["input_ids"], **body["sampling_params"]))
    for ours, theirs in ((events[0], capture["events"][0]), (events[-1], capture["events"][-1])):
        # SGLang puts the time into the first event only.
        assert ours["meta_info"].pop("response_sent_to_client_ts") > 0
        theirs["meta_info"].pop("response_sent_to_client_ts", None)
        assert_same_shape(shape(ours), shape(theirs))


# ------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_a_forward_pass(api, temperature):
    answer = api.generate(temperature=temperature, max_new_tokens=40, ignore_eos=True)
    ids = ids_of(answer)
    assert len(ids) == answer["meta_info"]["completion_tokens"] == 40
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    # Greedy log-probabilities are those of temperature 1.
    expected = response_logprobs("default", PROMPT, ids, temperature or 1.0)
    np.testing.assert_allclose(logprob_of(answer), expected, **CLOSE)
    if temperature == 0.0:
        rows = logprobs_of("default", [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
        np.testing.assert_array_equal(ids, rows.argmax(axis=1))


def test_truncation_chooses_among_the_likeliest_and_leaves_logprobs_alone(api):
    answer = api.generate(top_k=3, max_new_tokens=40, ignore_eos=True)
    ids = ids_of(answer)
    rows = logprobs_of("default", [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    ranks = (rows > rows[np.arange(40), ids][:, None]).sum(axis=1)
    assert ranks.max() < 3
    np.testing.assert_allclose(logprob_of(answer), rows[np.arange(40), ids], **CLOSE)


@pytest.mark.parametrize("start", [0, 5, 12])
def test_prompt_logprobs_are_at_temperature_one(api, start):
    body = {"logprob_start_len": start, "top_logprobs_num": 3}
    answer = api.generate(body=body, temperature=0.5, max_new_tokens=2)
    meta = answer["meta_info"]
    rows = logprobs_of("default", PROMPT)
    given = meta["input_token_logprobs"]
    assert [token for _, token, _ in given] == PROMPT[start:]
    if not given:
        return
    assert given[0][0] is None
    expected = rows[np.arange(start, 11), PROMPT[start + 1 :]]
    np.testing.assert_allclose([logprob for logprob, _, _ in given[1:]], expected, **CLOSE)
    assert meta["input_top_logprobs"][0] is None
    for row, top in zip(rows[start:11], meta["input_top_logprobs"][1:], strict=True):
        best = np.argsort(-row)[:3]
        assert [token for _, token, _ in top] == best.tolist()
        np.testing.assert_allclose([logprob for logprob, _, _ in top], row[best], **CLOSE)


def test_top_logprobs_of_the_response_are_at_the_sampling_temperature(api):
    # The neighbor in the batch asks for none.
    with in_background(
        lambda: api.generate(
            body={"top_logprobs_num": 3, "return_text_in_logprobs": True},
            temperature=2.0,
            max_new_tokens=9,
            ignore_eos=True,
        ),
        lambda: api.generate(max_new_tokens=30),
    ) as (asked, other):
        answer = asked.result()
        assert "output_top_logprobs" not in other.result()["meta_info"]
    rows = logprobs_of("default", [*PROMPT, *ids_of(answer)], 2.0)[len(PROMPT) - 1 : -1]
    tops = answer["meta_info"]["output_top_logprobs"]
    for row, top in zip(rows, tops, strict=True):
        best = np.argsort(-row)[:3]
        assert [token for _, token, _ in top] == best.tolist()
        assert [text for _, _, text in top] == [TOKENIZER.decode([i]) for i in best]
        np.testing.assert_allclose([logprob for logprob, _, _ in top], row[best], **CLOSE)


def test_scoring_samples_nothing(api):
    answer = api.generate(body={"logprob_start_len": 0}, max_new_tokens=0)
    assert ids_of(answer) == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_seeded_tokens_depend_on_nothing_else(api):
    alone = api.generate(sampling_seed=7, max_new_tokens=60, ignore_eos=True)
    again = api.generate(sampling_seed=7, max_new_tokens=60, ignore_eos=True)
    assert ids_of(alone) == ids_of(again)
    calls = [
        lambda seed=seed: api.generate(sampling_seed=seed, max_new_tokens=60, ignore_eos=True)
        for seed in (3, 4, 7, 5, 6, 8)
    ]
    with in_background(*calls) as futures:
        crowded = futures[2].result()
    assert ids_of(crowded) == ids_of(alone)
    np.testing.assert_allclose(logprob_of(crowded), logprob_of(alone), **CLOSE)
    unseeded = [ids_of(api.generate(max_new_tokens=20)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_samples_of_one_seed_differ_and_repeat(api):
    first = api.generate(sampling_seed=11, n=8, max_new_tokens=12, ignore_eos=True)
    assert len({tuple(ids_of(answer)) for answer in first}) == 8
    again = api.generate(sampling_seed=11, n=8, max_new_tokens=12, ignore_eos=True)
    assert [ids_of(answer) for answer in first] == [ids_of(answer) for answer in again]
    # A group sent as a batch of equal prompts is a group all the same.
    batch = api.generate([PROMPT] * 8, sampling_seed=11, max_new_tokens=12, ignore_eos=True)
    assert [ids_of(answer) for answer in batch] == [ids_of(answer) for answer in first]
    assert ids_of(first[0]) == ids_of(
        api.generate(sampling_seed=11, max_new_tokens=12, ignore_eos=True)
    )


def test_batch_answers_in_order_with_given_and_numbered_names(api):
    prompts = [PROMPT[:3], PROMPT[:7], PROMPT]
    answers = api.generate(prompts, body={"rid": "group"}, max_new_tokens=3)
    assert [answer["meta_info"]["id"] for answer in answers] == ["group_0", "group_1", "group_2"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 7, 12]
    answers = api.generate(prompts, body={"rid": ["a", "b", "c"]}, n=2, max_new_tokens=3)
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6


# ------------------------------------------------------------------------------------ stops


def printable_pair(ids):
    """Find two neighboring tokens of plain letters in a response: index of the second."""
    texts = [TOKENIZER.decode([token]) for token in ids]
    for index in range(4, len(ids)):
        letters = all(text.isascii() and text.isalpha() for text in texts[index - 1 : index + 1])
        if letters and len(texts[index]) == 2:
            return index
    raise AssertionError("no such pair; take another seed")


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_stop_string_across_tokens_and_inside_one(api, no_stop_trim):
    settings = {"sampling_seed": 3, "max_new_tokens": 200, "ignore_eos": True}
    ids = ids_of(api.generate(**settings))
    index = printable_pair(ids)
    # The end of one token and the first of the two letters of the next.
    stop = TOKENIZER.decode([ids[index - 1]])[-1] + TOKENIZER.decode([ids[index]])[0]
    count = next(n for n in range(1, 201) if stop in TOKENIZER.decode(ids[:n]))
    answer = api.generate(**settings, stop=["never there", stop], no_stop_trim=no_stop_trim)
    assert ids_of(answer) == ids[:count]
    assert len(logprob_of(answer)) == count
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    text = TOKENIZER.decode(ids[:count])
    assert answer["text"] == (text if no_stop_trim else text[: text.index(stop)])


def test_stop_string_that_is_a_special_token(api):
    ids = ids_of(api.generate(sampling_seed=3, max_new_tokens=30, ignore_eos=True))
    end = next(i for i, token in enumerate(ids) if ids.index(token) == i and i > 5)
    assert 511 not in ids[:end]
    answer = api.generate(
        [*PROMPT, *ids[:end], 511],
        max_new_tokens=100,
        stop="<eos>",
        ignore_eos=True,
    )
    # In the prompt it is no stop; in the response it is one although the text does not show it.
    finish = answer["meta_info"]["finish_reason"]
    assert 511 not in ids_of(answer)[:-1]
    assert finish["type"] == "length" or finish["matched"] == "<eos>"


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_stop_token_is_kept_in_ids_and_cut_from_text(api, no_stop_trim):
    settings = {"sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True}
    ids = ids_of(api.generate(**settings))
    stop = ids[20]
    count = ids.index(stop) + 1
    answer = api.generate(**settings, stop_token_ids=[stop], no_stop_trim=no_stop_trim)
    assert ids_of(answer) == ids[:count]
    assert len(logprob_of(answer)) == count
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert_same_shape(shape(answer), shape(CAPTURED["gen_stop_token_ids"]["answer"]))
    assert answer["text"] == TOKENIZER.decode(ids[: count if no_stop_trim else count - 1])


def test_stop_on_the_last_allowed_token_is_a_stop(api):
    settings = {"sampling_seed": 3, "ignore_eos": True}
    ids = ids_of(api.generate(**settings, max_new_tokens=21))
    count = ids.index(ids[20]) + 1
    answer = api.generate(**settings, max_new_tokens=count, stop_token_ids=[ids[20]])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_end_of_sequence_ends_unless_ignored(api):
    # Sampled at high temperature until it comes up.
    answers = api.generate(sampling_seed=1, n=32, max_new_tokens=250, temperature=50.0)
    ended = [answer for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for answer in ended:
        assert answer["meta_info"]["finish_reason"]["matched"] == 511
        assert ids_of(answer).index(511) == len(ids_of(answer)) - 1


# ------------------------------------------------------------------------------------ streams


def test_stream_grows_to_the_plain_answer(api):
    settings = {"sampling_seed": 5, "max_new_tokens": 30, "ignore_eos": True}
    plain = api.generate(**settings)
    events = list(api.stream(**settings))
    assert len(events) > 5
    for before, after in itertools.pairwise(events):
        assert ids_of(before) == ids_of(after)[: len(ids_of(before))]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert ids_of(events[-1]) == ids_of(plain)
    assert events[-1]["text"] == plain["text"]
    np.testing.assert_allclose(logprob_of(events[-1]), logprob_of(plain), **CLOSE)


def test_streamed_samples_carry_their_index(api):
    ends = {}
    for event in api.stream(n=3, sampling_seed=9, max_new_tokens=7):
        if event["meta_info"]["finish_reason"]:
            ends[event["index"]] = ids_of(event)
    plain = api.generate(n=3, sampling_seed=9, max_new_tokens=7)
    assert [ends[index] for index in range(3)] == [ids_of(answer) for answer in plain]


def test_refused_stream_tells_so_in_the_stream(api):
    events = list(api.stream(temperature=-1))
    error = {"type": "invalid_request_error", "code": 400, "retryable": False}
    message = "temperature must be a non-negative finite number, got -1."
    assert events == [{"error": {"message": message, **error}}]


# ------------------------------------------------------------------------------------ aborts


LONG = {"max_new_tokens": 900, "ignore_eos": True}


def test_abort_names_one_request_exactly(api):
    with in_background(
        lambda: api.generate(body={"rid": "job-1"}, **LONG),
        lambda: api.generate(body={"rid": "job-10"}, **LONG),
    ) as (first, second):
        api.wait_until(lambda state: state["running"] == 2)
        api.post("/abort_request", {"rid": "job"})
        api.post("/abort_request", {"rid": "job-1"})
        aborted = first.result()
        assert second.result()["meta_info"]["finish_reason"]["type"] == "length"
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert_same_shape(shape(aborted), shape(CAPTURED["abort_all_gen2"]["answer"]))
    ids = ids_of(aborted)
    assert len(ids) < 900
    expected = response_logprobs("default", PROMPT, ids)
    np.testing.assert_allclose(logprob_of(aborted), expected, **CLOSE)


def test_abort_of_all_reaches_the_queue(api):
    calls = [lambda: api.generate(**LONG)] * (SLOTS + 1)
    with in_background(*calls) as futures:
        api.wait_until(lambda state: state["running"] == SLOTS and state["waiting"] == 1)
        status, _, text = api.request("POST", "/flush_cache")
        assert (status, text) == (400, CAPTURED["flush_while_running"]["text"])
        api.post("/abort_request", {"abort_all": True})
        answers = [future.result() for future in futures]
    never_started = [answer for answer in answers if not ids_of(answer)]
    assert len(never_started) == 1
    assert_same_shape(shape(never_started[0]), shape(CAPTURED["pa_waiting"]["answer"]))
    assert never_started[0]["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Abort in waiting queue",
    }


def test_name_in_flight_is_refused_and_free_afterwards(api):
    with in_background(lambda: api.generate(body={"rid": "mine"}, **LONG)) as (future,):
        api.wait_until(lambda state: state["running"] == 1)
        error = api.generate(body={"rid": "mine"}, max_new_tokens=1, status=400)
        assert error["error"]["message"].startswith("Duplicate request ID")
        api.post("/abort_request", {"rid": "mine"})
        future.result()
    assert len(ids_of(api.generate(body={"rid": "mine"}, max_new_tokens=1))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_stops_its_request(api, stream):
    before = api.state()["requests_aborted"]
    body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}
    headers = {"Content-Type": "application/json"}
    with api.connect() as connection:
        connection.request("POST", "/generate", json.dumps(body), headers)
        api.wait_until(lambda state: state["running"] == 1)
    api.wait_until(lambda state: state["running"] == 0)
    assert api.state()["requests_aborted"] == before + 1


# ------------------------------------------------------------------------------------ weights


def spans_of(answer):
    return [
        (span["version"], span["start"], span["end"])
        for span in answer["meta_info"]["weight_versions"]
    ]


@contextlib.contextmanager
def interrupted(api, mode, **sampling):
    """Pause in the middle of one long response; gives the future of the whole answer."""

    def consume():
        last = None
        for event in api.stream(**{**LONG, "sampling_seed": 21, **sampling}):
            last = event
            begun.set()
        return last

    begun = threading.Event()
    with in_background(consume) as (future,):
        assert begun.wait(30.0)
        reply = api.post("/pause_generation", {"mode": mode})
        assert reply == {"message": "Generation paused successfully.", "status": "ok"}
        yield future
        api.post("/continue_generation", {})


def test_retracted_response_goes_on_under_new_weights_exactly(api, weights):
    with interrupted(api, "retract") as future:
        assert not future.done()
        assert api.update(weights["1"], "1") == {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to 1.",
            "num_paused_requests": 0,
        }
        api.post("/continue_generation", {})
        answer = future.result()
    ids, (first, second) = ids_of(answer), spans_of(answer)
    assert first[0] == "default" and second[0] == "1" and second[2] == len(ids) == 900
    assert 0 < first[2] == second[1] < 900 and first[1] == 0
    old = response_logprobs("default", PROMPT, ids)[: first[2]]
    new = response_logprobs("1", PROMPT, ids)[first[2] :]
    np.testing.assert_allclose(logprob_of(answer), np.concatenate([old, new]), **CLOSE)
    assert answer["meta_info"]["weight_version"] == "1"
    assert answer["meta_info"]["num_retractions"] == 1
    assert_same_shape(shape(answer), shape(CAPTURED["span_retract_gen"]["answer"]))


def test_response_frozen_in_place_keeps_its_old_keys_and_values(api, weights):
    with interrupted(api, "in_place") as future:
        refused = api.update(weights["1"], "1", status=400)
        assert not refused["success"] and "flush_cache" in refused["message"]
        assert api.get("/model_info")["weight_version"] == "default"
        assert api.update(weights["1"], "1", flush_cache=False)["num_paused_requests"] == 1
        api.post("/continue_generation", {})
        answer = future.result()
    ids, (first, second) = ids_of(answer), spans_of(answer)
    assert (first[0], second[0], second[2]) == ("default", "1", 900)
    old = response_logprobs("default", PROMPT, ids)
    new = response_logprobs("1", PROMPT, ids)
    np.testing.assert_allclose(logprob_of(answer)[: first[2]], old[: first[2]], **CLOSE)
    # Neither policy alone: new weights over keys and values of the old ones.
    later = logprob_of(answer)[first[2] :]
    assert np.abs(later - new[first[2] :]).max() > 0.1
    assert np.abs(later - old[first[2] :]).max() > 0.1
    # And nothing of that mixture is left for others.
    again = api.generate([*PROMPT, *ids[:-1]], max_new_tokens=5, ignore_eos=True)
    assert again["meta_info"]["cached_tokens"] == 0
    expected = response_logprobs("1", [*PROMPT, *ids[:-1]], ids_of(again))
    np.testing.assert_allclose(logprob_of(again), expected, **CLOSE)


def test_abort_pause_hands_back_the_part_and_holds_new_requests(api, weights):
    with interrupted(api, "abort") as future:
        part = future.result()
        assert part["meta_info"]["finish_reason"]["type"] == "abort"
        assert spans_of(part) == [("default", 0, len(ids_of(part)))]
        with in_background(lambda: api.generate(max_new_tokens=4, ignore_eos=True)) as (new,):
            api.wait_until(lambda state: state["waiting"] == 1)
            started = time.monotonic()
            assert api.request("GET", "/health")[0] == 200
            assert time.monotonic() - started < 5.0
            assert api.get("/v1/loads")["loads"][0]["queues"]["waiting"] == 1
            api.update(weights["2"], "2")
            assert not new.done()
            api.post("/continue_generation", {})
            answer = new.result()
    assert spans_of(answer) == [("2", 0, 4)]
    expected = response_logprobs("2", PROMPT, ids_of(answer))
    np.testing.assert_allclose(logprob_of(answer), expected, **CLOSE)


def test_two_updates_in_one_response_give_three_spans(api, weights):
    with interrupted(api, "retract") as future:
        api.update(weights["1"], "1")
        produced = api.state()["tokens_sampled"]
        api.post("/continue_generation", {})
        api.wait_until(lambda state: state["tokens_sampled"] > produced)
        api.post("/pause_generation", {"mode": "retract"})
        # Two updates with no token between them: the first leaves no span.
        api.update(weights["default"], "unseen")
        api.update(weights["2"], "2")
        api.post("/continue_generation", {})
        answer = future.result()
    spans = spans_of(answer)
    assert [version for version, _, _ in spans] == ["default", "1", "2"]
    rows = {v: response_logprobs(v, PROMPT, ids_of(answer)) for v in ("default", "1", "2")}
    expected = np.concatenate([rows[version][start:end] for version, start, end in spans])
    np.testing.assert_allclose(logprob_of(answer), expected, **CLOSE)
    assert answer["meta_info"]["num_retractions"] == 2


def test_update_without_pause_waits_for_what_runs(api, weights):
    with in_background(lambda: api.generate(**LONG)) as (future,):
        api.wait_until(lambda state: state["running"] == 1)
        api.update(weights["1"], "1")
        answer = future.result()
    assert spans_of(answer) == [("default", 0, 900)]
    assert spans_of(api.generate(max_new_tokens=2, ignore_eos=True)) == [("1", 0, 2)]


def test_update_can_abort_what_runs(api, weights):
    with in_background(lambda: api.generate(**LONG)) as (future,):
        api.wait_until(lambda state: state["running"] == 1)
        api.update(weights["1"], "1", abort_all_requests=True)
        answer = future.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert spans_of(answer) == [("default", 0, len(ids_of(answer)))]


def test_relabeling_can_spare_what_runs(api):
    with in_background(lambda: api.generate(**LONG)) as (future,):
        api.wait_until(lambda state: state["running"] == 1)
        body = {"new_version": "renamed", "abort_all_requests": False}
        api.post("/update_weight_version", body)
        answer = future.result()
    assert [version for version, _, _ in spans_of(answer)] == ["default", "renamed"]
    expected = response_logprobs("default", PROMPT, ids_of(answer))
    np.testing.assert_allclose(logprob_of(answer), expected, **CLOSE)


def broken_folder(root, how):
    params, config = dict(PARAMS["1"]), CONFIG
    if how == "foreign":
        config = model.ModelConfig(**{**vars(CONFIG), "rope_theta": 500.0})
    if how == "not finite":
        params["final_norm"] = params["final_norm"] * jnp.nan
    hf.save_hf(root / how, params, config)
    weights_file = root / how / "model.safetensors"
    if how in ("missing tensor", "other shape"):
        from safetensors.numpy import load_file, save_file

        tensors = load_file(weights_file)
        if how == "missing tensor":
            del tensors["model.norm.weight"]
        else:
            tensors["model.norm.weight"] = np.ones(31, np.float32)
        save_file(tensors, weights_file)
    if how == "cut file":
        weights_file.write_bytes(weights_file.read_bytes()[:500])
    if how == "no folder":
        return root / "nothing"
    return root / how


@pytest.mark.parametrize(
    "how",
    ["no folder", "missing tensor", "other shape", "foreign", "not finite", "cut file"],
)
def test_failed_update_changes_nothing(api, tmp_path, how):
    before = ids_of(api.generate(temperature=0, max_new_tokens=20))
    api.post("/pause_generation", {"mode": "retract"})
    refused = api.update(broken_folder(tmp_path, how), "99", status=400)
    assert refused["success"] is False and refused["message"]
    if how in ("missing tensor", "other shape"):
        assert "model.norm.weight" in refused["message"]
    api.post("/continue_generation", {})
    answer = api.generate(temperature=0, max_new_tokens=20)
    assert ids_of(answer) == before
    assert answer["meta_info"]["weight_version"] == "default"
    assert api.get("/model_info")["weight_version"] == "default"


def test_model_info_follows_the_weights(api, weights):
    api.update(weights["1"], "1")
    info = api.get("/model_info")
    assert (info["model_path"], info["weight_version"]) == (str(weights["1"]), "1")
    assert info["tokenizer_path"] == str(weights["default"])


# ------------------------------------------------------------------------------------ prefixes


def test_next_turn_continues_where_the_last_one_ended(api, weights):
    api.request("POST", "/flush_cache")
    first = api.generate(sampling_seed=1, max_new_tokens=30, ignore_eos=True)
    turn = [*PROMPT, *ids_of(first), *PROMPT[::-1]]
    settings = {"sampling_seed": 2, "max_new_tokens": 30, "ignore_eos": True}
    continued = api.generate(turn, **settings)
    # All but the newest sampled token, whose keys and values no later step has computed.
    assert continued["meta_info"]["cached_tokens"] >= len(PROMPT) + 29
    # Another namespace shares nothing.
    elsewhere = api.generate(turn, body={"extra_key": "other"}, **settings)
    assert elsewhere["meta_info"]["cached_tokens"] == 0
    assert ids_of(elsewhere) == ids_of(continued)
    np.testing.assert_allclose(logprob_of(elsewhere), logprob_of(continued), **CLOSE)
    # Nor do other weights, even if the update does not ask for a flush.
    api.update(weights["1"], "1", flush_cache=False)
    after = api.generate([*turn, *ids_of(continued)], **settings)
    assert after["meta_info"]["cached_tokens"] == 0
    expected = response_logprobs("1", [*turn, *ids_of(continued)], ids_of(after))
    np.testing.assert_allclose(logprob_of(after), expected, **CLOSE)


def test_flush_forgets(api):
    first = api.generate(max_new_tokens=30, ignore_eos=True)
    assert api.request("GET", "/flush_cache?timeout=1")[0] == 200
    after = api.generate([*PROMPT, *ids_of(first)], max_new_tokens=1)
    assert after["meta_info"]["cached_tokens"] == 0


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": ""}, "empty"),
        ({"text": []}, "empty"),
        ({"input_ids": [[1], []]}, "empty"),
        ({"input_ids": [5, 512]}, "vocabulary"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"input_ids": [5] * 1025, "sampling_params": {"max_new_tokens": 0}}, "longer than"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 1024}}, "1025 tokens"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"min_p": 1.5}}, "min_p"),
        ({"input_ids": [5], "sampling_params": {"n": 0}}, "n must"),
        ({"input_ids": [5], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [5], "sampling_params": {"regex": "a+"}}, "regex is not supported"),
        ({"input_ids": [5], "sampling_params": {"logit_bias": {"1": 2.0}}}, "logit_bias"),
        ({"input_ids": [5], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"input_ids": [5], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [5], "return_logprob": True, "top_logprobs_num": 600}, "top_logprobs_num"),
    ],
)
def test_senseless_value_is_refused_with_its_name(api, body, words):
    error = api.post("/generate", body, 400)
    assert words in error["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [5], "sampling_params": {"temperature": "hot"}},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 1.5}},
        {"input_ids": [5], "sampling_params": {"ignore_eos": 1}},
        {"input_ids": [5], "sampling_params": {"stop": 3}},
        {"input_ids": [5], "sampling_params": {"stop_token_ids": [True]}},
        {"input_ids": [5, "6"]},
        {"input_ids": "5"},
        {"text": 5},
        {"input_ids": [5], "stream": "yes"},
    ],
)
def test_wrong_type_is_refused_as_a_contract_error(api, body):
    error = api.post("/generate", body, 400)
    assert error["error"].startswith("invalid type: ")


def test_what_sglang_s_own_frontend_sends_is_taken(api):
    """RuntimeEndpoint of 0.5.9 sends all that it knows, most of which asks for nothing."""
    sampling = {
        **{"max_new_tokens": 3, "n": 1, "stop": [], "stop_token_ids": [], "stop_regex": []},
        **{"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": True},
        **{"regex": None, "json_schema": None},
    }
    answer = api.post("/generate", {"text": "what is", "sampling_params": sampling})
    assert len(ids_of(answer)) == 3


def test_null_and_unknown_top_level_fields_are_no_error(api):
    sampling = {"max_new_tokens": 2, "stop": None, "regex": None, "sampling_seed": None}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "unheard_of": 1, "rid": None}
    assert len(ids_of(api.post("/generate", body))) == 2


@pytest.mark.parametrize("raw", [b"{", b"[]", b"3", b""])
def test_body_that_is_no_object_is_refused_as_such(api, raw):
    status, _, text = api.request("POST", "/generate", raw=raw, content_type="application/json")
    error = json.loads(text)
    assert (status, error["object"], error["code"]) == (400, "error", 400)


# ------------------------------------------------------------------------------------ process


def test_few_programs_serve_all_lengths(api):
    def ask_all() -> int:
        for length in range(100, 165, 4):
            api.generate([5] * length, max_new_tokens=3)
        # Smaller programs are compiled while larger ones serve.
        while api.state()["compiling"]:
            time.sleep(0.05)
        return api.state()["compilations"]

    before = ask_all()
    assert ask_all() == before
    assert before < 16


def test_requests_aborts_and_updates_leave_nothing_behind(server, api, weights):
    """C62: memory stays below 1 MB a round, aborted requests and old weights included."""
    process = psutil.Process(server.process.pid)
    rss, files, threads = [], [], []
    for step in range(300):
        name = f"{step:032x}"
        with in_background(lambda name=name: api.generate(body={"rid": name}, **LONG)) as (future,):
            api.wait_until(lambda state: state["running"] == 1)
            api.post("/abort_request", {"rid": name})
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"
        if step % 10 == 0:
            api.update(weights[str(1 + step // 10 % 2)], str(step))
        rss.append(process.memory_info().rss / 2**20)
        files.append(process.num_fds())
        threads.append(process.num_threads())
    slope = np.polyfit(np.arange(200), rss[100:], 1)[0]
    assert slope < 1.0
    assert max(files[200:]) <= max(files[:100]) and max(threads[200:]) <= max(threads[:100])
    state = api.state()
    assert (state["running"], state["waiting"], state["tokens"]) == (0, 0, 0)


def test_counters_add_up(api):
    before = api.state()
    api.generate(n=3, max_new_tokens=10, ignore_eos=True)
    after = api.state()
    assert after["tokens_sampled"] - before["tokens_sampled"] == 30
    assert after["requests_finished"] - before["requests_finished"] == 3
    for name in ("busy_seconds", "idle_seconds", "process_cpu_seconds"):
        assert after[name] > before[name] > 0
    assert api.get("/server_info")["context_length"] == MAX_LENGTH


def test_sigterm_ends_it_soon_with_running_requests_answered(weights, compilation_cache, tmp_path):
    with launch(weights["default"], tmp_path / "log", compilation_cache) as server:
        api = Api(server.url)
        with in_background(lambda: api.generate(**LONG)) as (future,):
            api.wait_until(lambda state: state["running"] == 1)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"
            assert server.process.wait(10.0) == 0
            assert time.monotonic() - started < 10.0
        assert not server.alive()
        server.restart()
        assert Api(server.url).address == api.address
        assert len(ids_of(api.generate(max_new_tokens=2, ignore_eos=True))) == 2


def test_server_ends_with_its_parent(weights, compilation_cache, tmp_path):
    script = """
import sys, time
from copc_jax.rollout.launch import launch_embedded
model_path, log_file, cache = sys.argv[1:]
sizes = ["--prefill-rows", "1", "--prefill-chunks", "8", "--attend", ""]
server = launch_embedded(model_path, log_file=log_file, slots=1, max_length=64,
                         compilation_cache=cache, arguments=sizes)
print(server.process.pid, flush=True)
time.sleep(600)
"""
    paths = [str(weights["default"]), str(tmp_path / "log"), str(compilation_cache)]
    command = [sys.executable, "-c", script, *paths]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 15.0
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_server_that_cannot_start_says_why(tmp_path, server):
    with pytest.raises(LaunchError, match=r"config\.json"):
        launch_embedded(tmp_path / "nothing", log_file=tmp_path / "log")
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(LaunchError, match="in use"):
        launch_embedded(tmp_path, port=port, log_file=tmp_path / "log")
    with pytest.raises(LaunchError, match=r"within 0\.1 s"):
        launch_embedded(tmp_path, log_file=tmp_path / "log", timeout_s=0.1)
    assert os.listdir(tmp_path) == ["log"]
