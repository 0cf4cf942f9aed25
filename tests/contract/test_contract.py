"""One contract for two servers: the embedded one, and SGLang itself where it is installed.

    COPC_SGLANG_PYTHON=$(python tests/contract/install_sglang.py) pytest tests/contract

Log-probabilities are held against the learner's own forward pass, with the weights that the server
says it used. Everything that the servers answer is read by SGLang's own types.
"""

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import os
import subprocess
import threading
import urllib.parse
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from copc_jax import access, data, hf, model
from copc_jax.rollout.client import SamplingParams, SGLangClient
from copc_jax.rollout.launch import launch_embedded, launch_sglang

KEY = "sk-3Tn8cL_not-a-word_z1"
SGLANG_PYTHON = os.environ.get("COPC_SGLANG_PYTHON")
VOCABULARY, MAX_LENGTH, SLOTS = 512, 512, 8
PROMPT = [53, 283, 316, 30, 312, 314, 305, 264, 306, 35, 328, 30]
# Long enough to be met in the middle.
LONG = {"max_new_tokens": 400, "ignore_eos": True}
# Two implementations in float32.
CLOSE = {"rtol": 0.0, "atol": 2e-4}
LLAMA = model.ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
    eos_token_ids=(1,),
)
QWEN3 = model.ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e6,
    tie_word_embeddings=False,
    qk_norm=True,
    eos_token_ids=(1,),
)
TEXT = "The quick brown fox jumps over 0123456789 lazy dogs. Question: what is 12 + 34? Answer: 46."
TOKENIZER = data.train_tokenizer([TEXT, Path(__file__).read_text()], VOCABULARY)
CAPTURES = {
    capture["name"]: capture
    for capture in json.loads(
        (Path(__file__).parents[1] / "captures/sglang_0_5_23.json").read_text()
    )
}

pytestmark = pytest.mark.timeout(600)


# ------------------------------------------------------------------------------------ the learner


@functools.cache
def params_of(config, version):
    params = model.init(jax.random.key(("default", "1", "2").index(version)), config)
    # Sharper than the default, so that versions disagree by whole nats; the end token is rare.
    return {**params, "head": (params["head"] * 2.0).at[1].set(0.0)}


@functools.partial(jax.jit, static_argnums=1)
def _score(params, config, token_ids, segment_ids):
    positions = jnp.arange(token_ids.shape[1])[None]
    hidden = model.forward(params, config, token_ids, segment_ids, positions)
    logprob = model.token_logprob(params, config, hidden, token_ids, segment_ids)
    return logprob[0], model.logits(params, config, hidden)


def scored(version, prompt, output_ids, config=LLAMA):
    """Log-probability of each output token, and the logits that it was drawn from."""
    ids = [*prompt, *output_ids]
    padded = np.zeros((2, 1, MAX_LENGTH), np.int32)
    padded[0, 0, : len(ids)] = ids
    padded[1, 0, : len(ids)] = 1
    logprob, logits = _score(params_of(config, version), config, *map(jnp.asarray, padded))
    output = slice(len(prompt), len(ids))
    return np.asarray(logprob)[output], np.asarray(logits)[len(prompt) - 1 : len(ids) - 1]


def logprobs(version, prompt, output_ids, config=LLAMA):
    return scored(version, prompt, output_ids, config)[0]


# ------------------------------------------------------------------------------------ the servers


SAID = []


class Api:
    """Plain HTTP with a key; keeps what was said on /generate, for SGLang's types to read."""

    def __init__(self, url, key):
        self.url = url
        self.key = key
        self.address = urllib.parse.urlsplit(url).netloc

    def connect(self):
        return contextlib.closing(http.client.HTTPConnection(self.address, timeout=300.0))

    def request(self, method, path, body=None, raw=None, content_type=None):
        if body is not None:
            raw, content_type = json.dumps(body), "application/json"
        headers = access.bearer(self.key)
        if content_type:
            headers["Content-Type"] = content_type
        with self.connect() as connection:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type"), response.read().decode()

    def post(self, path, body, status=200):
        got, _, text = self.request("POST", path, body)
        assert got == status, text
        answer = json.loads(text) if text.startswith(("{", "[")) else text
        if path == "/generate":
            SAID.append(("GenerateRequest", body))
            if status == 200:
                answers = answer if isinstance(answer, list) else [answer]
                SAID.extend(("GenerateResponse", item) for item in answers)
        return answer

    def get(self, path):
        status, _, text = self.request("GET", path)
        assert status == 200, text
        return json.loads(text) if text else None

    def generate(self, prompt=PROMPT, *, status=200, body=None, **sampling):
        body = {"input_ids": prompt, "return_logprob": True, **(body or {})}
        return self.post("/generate", {**body, "sampling_params": sampling}, status)

    def events(self, prompt=PROMPT, *, body=None, **sampling):
        """Yield the events of a stream."""
        body = {"input_ids": prompt, "return_logprob": True, "stream": True, **(body or {})}
        body["sampling_params"] = sampling
        headers = {"Content-Type": "application/json", **access.bearer(self.key)}
        with self.connect() as connection:
            connection.request("POST", "/generate", json.dumps(body), headers)
            with contextlib.closing(connection.getresponse()) as response:
                assert response.status == 200
                assert response.getheader("Content-Type", "").startswith("text/event-stream")
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        return
                    if line.strip():
                        event = json.loads(line.removeprefix(b"data: "))
                        kind = "GenerateStreamError" if "error" in event else "GenerateResponse"
                        SAID.append((kind, event))
                        yield event

    @contextlib.contextmanager
    def running(self, *bodies, **sampling):
        """Run long responses in the background; gives futures of their last events."""

        def consume(body, begun):
            last = None
            for event in self.events(body=body, **{**LONG, **sampling}):
                last = event
                begun.set()
            return last

        with ThreadPoolExecutor(len(bodies)) as pool:
            begun = [threading.Event() for _ in bodies]
            futures = [pool.submit(consume, *pair) for pair in zip(bodies, begun, strict=True)]
            try:
                assert all(event.wait(120.0) for event in begun)
                yield futures
            finally:
                self.post("/continue_generation", {})
                self.post("/abort_request", {"abort_all": True})

    def update(self, directory, version, status=200, **more):
        body = {"model_path": str(directory), "weight_version": version, **more}
        return self.post("/update_weights_from_disk", body, status)


def write_weights(root, config):
    for version in ("default", "1", "2"):
        hf.save_hf(
            root / version,
            params_of(config, version),
            config,
            tokenizer_json=TOKENIZER.to_str(),
        )
    return {version: root / version for version in ("default", "1", "2")}


def launch(kind, folder, log_file, key=KEY):
    if kind == "sglang":
        if not SGLANG_PYTHON:
            pytest.skip("COPC_SGLANG_PYTHON names no Python that has SGLang")
        return launch_sglang(
            SGLANG_PYTHON,
            folder,
            log_file=log_file,
            device="cpu",
            slots=SLOTS,
            max_length=MAX_LENGTH,
            api_key=key,
            arguments=["--context-length", str(MAX_LENGTH)],
        )
    return launch_embedded(
        folder,
        log_file=log_file,
        slots=SLOTS,
        max_length=MAX_LENGTH,
        api_key=key,
        # Two tokens a dispatch, so that control calls land in the middle of responses.
        arguments=[
            *("--steps-per-dispatch", "2", "--prefill-rows", "2"),
            *("--prefill-chunks", "32", "--attend", "128"),
        ],
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights"), LLAMA)


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def server(request, weights, tmp_path_factory):
    log_file = tmp_path_factory.mktemp("server") / "log"
    with launch(request.param, weights["default"], log_file) as server:
        yield server


@pytest.fixture
def api(server, weights):
    """The server, idle and with its first weights again after every test."""
    api = Api(server.url, KEY)
    yield api
    assert server.alive(), server.log_tail()
    api.post("/continue_generation", {})
    api.post("/abort_request", {"abort_all": True})
    api.update(weights["default"], "default")


# ------------------------------------------------------------------------------------ keys


def test_the_key_is_asked_for_and_shown_to_nobody(server, api):
    """The log of the server too, which repeats all arguments in SGLang's case."""
    for key in (None, "another"):
        stranger = Api(server.url, key)
        assert stranger.request("GET", "/health")[0] == 200
        for method, path, body in (
            ("GET", "/model_info", None),
            ("GET", "/server_info", None),
            ("POST", "/generate", {"input_ids": PROMPT}),
            ("POST", "/pause_generation", {}),
            ("POST", "/update_weights_from_disk", {"model_path": "x"}),
        ):
            status, _, text = stranger.request(method, path, body)
            assert (status, json.loads(text)) == (401, {"error": "Unauthorized"})
    assert api.generate(max_new_tokens=2)["output_ids"]
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        assert not any(KEY in argument for argument in process.cmdline())
    log = server.log_file.read_text()
    assert KEY not in log and KEY not in server.log_tail()
    if "sglang" in log.lower():
        assert access.HIDDEN in log


# ------------------------------------------------------------------------------------ generation


def ids_of(answer):
    return answer["output_ids"]


def logprob_of(answer):
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    assert answer["meta_info"]["output_token_logprobs_length"] == len(triples)
    return np.array([logprob for logprob, _, _ in triples])


def spans_of(answer):
    spans = answer["meta_info"]["weight_versions"]
    return [(span["version"], span["start"], span["end"]) for span in spans]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_learners(api, temperature):
    answer = api.generate(temperature=temperature, max_new_tokens=40, ignore_eos=True)
    ids = ids_of(answer)
    assert len(ids) == answer["meta_info"]["completion_tokens"] == 40
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert spans_of(answer) == [("default", 0, 40)]
    own, logits = scored("default", PROMPT, ids)
    if temperature == 0.0:
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    if temperature == 0.7:
        own = np.asarray(jax.nn.log_softmax(logits / np.float32(0.7)))[np.arange(40), ids]
    np.testing.assert_allclose(logprob_of(answer), own, **CLOSE)


def test_prompt_logprobs_are_at_temperature_one(api):
    answer = api.generate(body={"logprob_start_len": 0}, temperature=0.5, max_new_tokens=1)
    given = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in given] == PROMPT
    assert given[0][0] is None
    own = logprobs("default", PROMPT[:1], PROMPT[1:])
    np.testing.assert_allclose([logprob for logprob, _, _ in given[1:]], own, **CLOSE)


def test_truncated_sampling_leaves_logprobs_alone(api):
    answer = api.generate(top_k=3, max_new_tokens=30, ignore_eos=True)
    own, logits = scored("default", PROMPT, ids_of(answer))
    chosen = logits[np.arange(30), ids_of(answer)][:, None]
    assert (logits > chosen).sum(axis=1).max() < 3
    np.testing.assert_allclose(logprob_of(answer), own, **CLOSE)


def test_batches_and_samples_come_in_order(api):
    prompts = [PROMPT[:3], PROMPT[:7], PROMPT]
    answers = api.generate(prompts, body={"rid": "group"}, max_new_tokens=3)
    assert [answer["meta_info"]["id"] for answer in answers] == ["group_0", "group_1", "group_2"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 7, 12]
    answers = api.generate(prompts[:2], n=2, max_new_tokens=12, ignore_eos=True)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 3, 7, 7]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4
    assert ids_of(answers[0]) != ids_of(answers[1])
    for answer, prompt in zip(
        answers, (prompts[0], prompts[0], prompts[1], prompts[1]), strict=True
    ):
        own = logprobs("default", prompt, ids_of(answer))
        np.testing.assert_allclose(logprob_of(answer), own, **CLOSE)
    assert len(api.generate([PROMPT], max_new_tokens=2)) == 1


def test_many_requests_at_once_keep_their_own_logprobs(api):
    prompts = [PROMPT[:size] for size in range(2, 12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(api.generate, p, max_new_tokens=30, ignore_eos=True) for p in prompts]
        for prompt, call in zip(prompts, calls, strict=True):
            own = logprobs("default", prompt, ids_of(call.result()))
            np.testing.assert_allclose(logprob_of(call.result()), own, **CLOSE)


def test_the_next_turn_continues_from_the_cache_exactly(api):
    first = api.generate(max_new_tokens=60, ignore_eos=True)
    prompt = [*PROMPT, *ids_of(first), 40, 41]
    second = api.generate(prompt, max_new_tokens=20, ignore_eos=True)
    assert second["meta_info"]["cached_tokens"] > 0
    own = logprobs("default", prompt, ids_of(second))
    np.testing.assert_allclose(logprob_of(second), own, **CLOSE)


def test_no_more_than_the_context_can_be_asked_for(api):
    room = MAX_LENGTH - len(PROMPT)
    answer = api.generate(max_new_tokens=room, ignore_eos=True)
    # SGLang keeps two positions to itself, and says nothing of it.
    assert room - 2 <= len(ids_of(answer)) <= room
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": len(ids_of(answer))}
    error = api.generate(max_new_tokens=room + 1, status=400)
    assert "maximum context length" in error["error"]["message"]


# ------------------------------------------------------------------------------------ stops


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_stop_id_is_kept_in_ids_and_cut_from_text(api, no_stop_trim):
    # SGLang's ignore_eos ignores stop ids as well. The likeliest token is never the end token here.
    greedy = {"temperature": 0.0, "max_new_tokens": 40}
    ids = ids_of(api.generate(**greedy))
    stop = ids[20]
    count = ids.index(stop) + 1
    answer = api.generate(**greedy, stop_token_ids=[stop], no_stop_trim=no_stop_trim)
    assert ids_of(answer) == ids[:count]
    assert len(logprob_of(answer)) == answer["meta_info"]["completion_tokens"] == count
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == TOKENIZER.decode(ids[: count if no_stop_trim else count - 1])


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_stop_string_cuts_text_and_keeps_ids(api, no_stop_trim):
    greedy = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    ids = ids_of(api.generate(**greedy))
    texts = [TOKENIZER.decode(ids[:n]) for n in range(61)]
    # The last character of a token and the first one of the next.
    pairs = itertools.pairwise(TOKENIZER.decode([token]) for token in ids)
    stop = next(a[-1] + b[0] for a, b in itertools.islice(pairs, 8, None) if (a + b).isascii())
    count = next(n for n in range(61) if stop in texts[n])
    answer = api.generate(**greedy, stop=["never there", stop], no_stop_trim=no_stop_trim)
    assert ids_of(answer) == ids[:count]
    assert len(logprob_of(answer)) == count
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    text = texts[count]
    assert answer["text"] == (text if no_stop_trim else text[: text.index(stop)])


def test_the_end_token_ends_unless_ignored(api):
    # Hot enough that the end token comes up among 512.
    hot = {"temperature": 50.0, "max_new_tokens": 300}
    answers = api.generate(n=8, **hot)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for answer in ended:
        assert answer["meta_info"]["finish_reason"]["matched"] == 1
        assert ids_of(answer).index(1) == len(ids_of(answer)) - 1
    for answer in api.generate(n=4, ignore_eos=True, **hot):
        assert len(ids_of(answer)) == 300


# ------------------------------------------------------------------------------------ streams


def test_a_stream_grows_to_the_whole_answer(api):
    greedy = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    plain = api.generate(**greedy)
    events = list(api.events(**greedy))
    assert len(events) > 3
    for before, after in itertools.pairwise(events):
        assert ids_of(before) == ids_of(after)[: len(ids_of(before))]
        assert before["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in before["meta_info"]
    assert ids_of(events[-1]) == ids_of(plain)
    assert events[-1]["text"] == plain["text"]
    assert spans_of(events[-1]) == spans_of(plain) == [("default", 0, 30)]
    np.testing.assert_allclose(logprob_of(events[-1]), logprob_of(plain), **CLOSE)


def test_streamed_samples_carry_their_index(api):
    ends = {}
    for event in api.events(n=3, max_new_tokens=7, ignore_eos=True):
        if event["meta_info"]["finish_reason"]:
            ends[event["index"]] = event
    assert sorted(ends) == [0, 1, 2]
    for event in ends.values():
        own = logprobs("default", PROMPT, ids_of(event))
        np.testing.assert_allclose(logprob_of(event), own, **CLOSE)


def test_a_refused_stream_says_so_in_the_stream(api):
    (event,) = api.events(temperature=-1)
    message = "temperature must be a non-negative finite number, got -1."
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    assert event == {"error": error}


# ------------------------------------------------------------------------------------ aborts


def test_an_abort_hands_back_what_there_is(api):
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    with api.running({"rid": first}, {"rid": second}) as (one, other):
        assert api.request("POST", "/abort_request", {"rid": uuid.uuid4().hex})[0] == 200
        assert api.request("POST", "/abort_request", {"rid": first})[::2] == (200, "")
        aborted = one.result()
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        assert not other.done()
        api.post("/abort_request", {"abort_all": True})
        rest = other.result()
    for answer in (aborted, rest):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        ids = ids_of(answer)
        assert 0 < len(ids) < 400
        assert spans_of(answer) == [("default", 0, len(ids))]
        np.testing.assert_allclose(logprob_of(answer), logprobs("default", PROMPT, ids), **CLOSE)


def test_a_name_in_flight_is_refused_and_free_afterwards(api):
    rid = uuid.uuid4().hex
    with api.running({"rid": rid}) as (future,):
        error = api.generate(body={"rid": rid}, max_new_tokens=1, status=400)
        assert error["error"]["message"].startswith("Duplicate request ID")
        api.post("/abort_request", {"rid": rid})
        future.result()
    assert len(ids_of(api.generate(body={"rid": rid}, max_new_tokens=1))) == 1


# ------------------------------------------------------------------------------------ weights


PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


def assert_spans_are_their_weights_own(answer, prompt=PROMPT, config=LLAMA):
    ids, given = ids_of(answer), logprob_of(answer)
    reached = 0
    for version, start, end in spans_of(answer):
        assert start == reached and end > start
        reached = end
        own = logprobs(version, prompt, ids, config)[start:end]
        np.testing.assert_allclose(given[start:end], own, **CLOSE)
        other = logprobs("2" if version != "2" else "1", prompt, ids, config)[start:end]
        assert np.abs(given[start:end] - other).max() > 0.5
    assert reached == len(ids)


def test_a_retracted_response_goes_on_under_new_weights(api, weights):
    with api.running({}) as (future,):
        assert api.post("/pause_generation", {"mode": "retract"}) == PAUSED
        answer = api.update(weights["1"], "1")
        assert answer["success"] and "Weight version updated to 1" in answer["message"]
        assert api.get("/model_info")["weight_version"] == "1"
        assert not future.done()
        assert api.post("/continue_generation", {}) == CONTINUED
        answer = future.result()
    assert [version for version, _, _ in spans_of(answer)] == ["default", "1"]
    assert len(ids_of(answer)) == 400
    assert answer["meta_info"]["weight_version"] == "1"
    assert answer["meta_info"]["num_retractions"] == 1
    assert_spans_are_their_weights_own(answer)


def test_a_response_frozen_in_place_keeps_its_old_cache(api, weights):
    with api.running({}) as (future,):
        assert api.post("/pause_generation", {"mode": "in_place"}) == PAUSED
        assert api.update(weights["1"], "1", flush_cache=False)["success"]
        assert api.post("/continue_generation", {}) == CONTINUED
        answer = future.result()
    (old, _, switch), (new, _, end) = spans_of(answer)
    assert (old, new, end) == ("default", "1", 400)
    given, ids = logprob_of(answer), ids_of(answer)
    before = logprobs("default", PROMPT, ids)
    np.testing.assert_allclose(given[:switch], before[:switch], **CLOSE)
    # New weights over old keys and values: the log-probs of neither.
    for version in ("default", "1"):
        assert np.abs(given[switch:] - logprobs(version, PROMPT, ids)[switch:]).max() > 0.1


def test_an_aborting_pause_hands_back_the_part_and_holds_new_requests(api, weights):
    # On a busy machine a response can end before the pause is there.
    for _ in range(5):
        with api.running({}) as (future,):
            assert api.post("/pause_generation", {"mode": "abort"}) == PAUSED
            part = future.result()
            if part["meta_info"]["finish_reason"]["type"] == "length":
                continue
            assert part["meta_info"]["finish_reason"]["type"] == "abort"
            assert_spans_are_their_weights_own(part)
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(api.generate, max_new_tokens=4, ignore_eos=True)
                assert api.update(weights["2"], "2")["success"]
                assert not late.done()
                assert api.post("/continue_generation", {}) == CONTINUED
                answer = late.result()
            break
    else:
        pytest.fail("every response had ended before the pause")
    assert spans_of(answer) == [("2", 0, 4)]
    np.testing.assert_allclose(logprob_of(answer), logprobs("2", PROMPT, ids_of(answer)), **CLOSE)


def test_an_update_without_a_pause_waits_for_what_runs(api, weights):
    with api.running({}) as (future,):
        assert api.update(weights["1"], "1")["success"]
        # Its last event may still be on the way.
        assert spans_of(future.result(timeout=60.0)) == [("default", 0, 400)]
    assert spans_of(api.generate(max_new_tokens=3, ignore_eos=True)) == [("1", 0, 3)]


def test_an_update_drops_the_cache_of_old_weights(api, weights):
    prompt = [*PROMPT, *ids_of(api.generate(max_new_tokens=80, ignore_eos=True))]
    api.update(weights["1"], "1")
    answer = api.generate(prompt, max_new_tokens=10, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    np.testing.assert_allclose(logprob_of(answer), logprobs("1", prompt, ids_of(answer)), **CLOSE)


def test_a_label_alone_can_change_without_an_abort(api):
    with api.running({}) as (future,):
        body = {"new_version": "7", "abort_all_requests": False}
        answer = api.post("/update_weight_version", body)
        assert answer["success"] and answer["new_version"] == "7"
        assert api.get("/model_info")["weight_version"] == "7"
        assert len(ids_of(future.result())) == 400


def test_a_folder_without_weights_is_refused_and_changes_nothing(api, tmp_path):
    assert api.update(tmp_path / "none", "3", status=400)["success"] is False
    assert api.get("/model_info")["weight_version"] == "default"
    answer = api.generate(max_new_tokens=10, ignore_eos=True)
    own = logprobs("default", PROMPT, ids_of(answer))
    np.testing.assert_allclose(logprob_of(answer), own, **CLOSE)


def test_model_info_follows_the_weights(api, weights):
    api.update(weights["1"], "1")
    info = api.get("/model_info")
    assert (info["model_path"], info["weight_version"]) == (str(weights["1"]), "1")
    assert info["model_type"] == "llama"
    assert api.get("/server_info")["context_length"] == MAX_LENGTH


def test_the_cache_is_flushed_only_when_idle(api):
    api.generate(max_new_tokens=40)
    assert api.request("POST", "/flush_cache")[0] == 200
    assert api.generate(max_new_tokens=1)["meta_info"]["cached_tokens"] == 0
    with api.running({}):
        status, _, text = api.request("POST", "/flush_cache")
        assert (status, text) == (400, CAPTURES["flush_while_running"]["text"])


# ------------------------------------------------------------------------------------ refusals


def kinds(value):
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return "number" if isinstance(value, (int, float)) else type(value).__name__


@pytest.mark.parametrize(
    "name", [n for n in CAPTURES if n.startswith(("err_", "continue_", "abort_u"))]
)
def test_refusals_have_the_recorded_status_and_shape(api, name):
    capture = CAPTURES[name]
    body = capture.get("json")
    if body and isinstance(body.get("input_ids"), dict):
        long = body["input_ids"]
        body = {**body, "input_ids": [long["repeat"]] * long["times"]}
    status, content_type, text = api.request(
        capture["method"], capture["path"], body, capture.get("raw")
    )
    assert status == capture["status"], text
    if "answer" not in capture:
        assert text == capture["text"]
        return
    assert (content_type or "").split(";")[0] == capture["content_type"]
    if status != 200:
        assert kinds(json.loads(text)) == kinds(capture["answer"])


# ------------------------------------------------------------------------------------ the client


@pytest.mark.parametrize("pause_mode", ["retract", "abort", "in_place"])
def test_the_client_updates_in_the_middle_of_a_response(api, weights, pause_mode):
    async def script():
        settings = {"pause_mode": pause_mode, "deadline_s": 120.0, "api_key": KEY}
        async with SGLangClient([api.url], **settings) as client:
            await client.check()
            await client.publish(weights["1"], 1)
            task = asyncio.create_task(client.generate(PROMPT, SamplingParams(400)))
            while not await asyncio.to_thread(
                lambda: api.get("/v1/loads")["loads"][0]["num_used_tokens"] > len(PROMPT) + 8
            ):
                await asyncio.sleep(0.01)
            await client.publish(weights["2"], 2)
            long = await task
            # The same prompt again: nothing of the old weights may serve it.
            again = await client.generate(
                [*PROMPT, *long.token_ids[:100].tolist()], SamplingParams(20)
            )
            return client.context_length, await client.versions(), long, again

    context, versions, long, again = asyncio.run(script())
    assert context <= MAX_LENGTH and versions == {api.url: 2}
    assert long.weight_version[0] == 1
    assert again.weight_version.tolist() == [2] * len(again.token_ids)
    prompt = [*PROMPT, *long.token_ids[:100].tolist()]
    own = logprobs("2", prompt, again.token_ids.tolist())
    np.testing.assert_allclose(again.logprob, own, **CLOSE)
    ids = long.token_ids.tolist()
    own = np.where(long.weight_version == 1, logprobs("1", PROMPT, ids), logprobs("2", PROMPT, ids))
    if len(ids) == 400:
        assert long.weight_version[-1] == 2
    kept = long.weight_version == 1 if pause_mode == "in_place" else np.ones(len(ids), bool)
    np.testing.assert_allclose(long.logprob[kept], own[kept], **CLOSE)


def test_the_client_fills_the_context_without_a_refusal(api):
    async def script():
        async with SGLangClient([api.url], deadline_s=120.0, api_key=KEY) as client:
            await client.check()
            lengths = range(MAX_LENGTH - 9, MAX_LENGTH + 1)
            return [
                await client.generate([10 + i % 500 for i in range(n)], SamplingParams(4))
                for n in lengths
            ]

    generations = asyncio.run(script())
    sampled = [len(generation.token_ids) for generation in generations]
    assert sampled[0] > 0 and sampled == sorted(sampled, reverse=True) and sampled[-1] == 0
    assert all(g.finish == "length" for g in generations if len(g.token_ids) < 4)


# ------------------------------------------------------------------------------------ families


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_another_family_is_served_alike(kind, tmp_path):
    folders = write_weights(tmp_path, QWEN3)
    with launch(kind, folders["default"], tmp_path / "log") as server:
        api = Api(server.url, KEY)
        assert api.get("/model_info")["architectures"] == ["Qwen3ForCausalLM"]
        with api.running({}) as (future,):
            api.post("/pause_generation", {"mode": "retract"})
            assert api.update(folders["1"], "1")["success"]
            api.post("/continue_generation", {})
            answer = future.result()
    assert [version for version, _, _ in spans_of(answer)] == ["default", "1"]
    assert_spans_are_their_weights_own(answer, config=QWEN3)


# ------------------------------------------------------------------------------------ types

READ = """
import importlib.util, json, sys
from pathlib import Path
package = importlib.util.find_spec("sglang")
path = Path(package.submodule_search_locations[0], "api/v1/api_types.py")
spec = importlib.util.spec_from_file_location("api_types", path)
types = importlib.util.module_from_spec(spec)
sys.modules["api_types"] = types
spec.loader.exec_module(types)
faults = []
for name, value in json.load(sys.stdin):
    try:
        getattr(types, name).from_json_value(value)
    except ValueError as error:
        faults.append([name, str(error), value])
print(json.dumps(faults))
"""


@pytest.mark.skipif(not SGLANG_PYTHON, reason="COPC_SGLANG_PYTHON names no Python that has SGLang")
def test_sglangs_own_types_read_everything_that_was_said():
    kinds_said = {kind for kind, _ in SAID}
    assert kinds_said == {"GenerateRequest", "GenerateResponse", "GenerateStreamError"}
    done = subprocess.run(
        [str(SGLANG_PYTHON), "-c", READ],
        input=json.dumps(SAID),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []
