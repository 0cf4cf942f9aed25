"""Who gets in and what gets out: keys, limits and weight folders of servers, runs with a key."""

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse

import assembly
import jax
import psutil
import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from copc_jax import access, hf, model
from copc_jax.config import parse, to_json
from copc_jax.rollout.client import RolloutUnauthorized, SamplingParams, SGLangClient
from copc_jax.rollout.launch import launch_embedded
from copc_jax.tools.retriever import HttpRetriever, RetrieverError

KEY = "sk-7Qm3vN_not-a-word_x9"
CONFIG = model.ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    eos_token_ids=(63,),
)
LENGTH = 64
MAX_BODY, MAX_REQUESTS = 20_000, 8

pytestmark = pytest.mark.timeout(400)


# ------------------------------------------------------------------------------------ keys


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in (access.ROLLOUT_KEY, access.RETRIEVER_KEY):
        monkeypatch.delenv(name, raising=False)


def test_a_key_is_read_from_where_the_setting_says(monkeypatch, tmp_path):
    assert access.read_key("env:COPC_API_KEY") is None
    monkeypatch.setenv("COPC_API_KEY", KEY)
    assert access.read_key("env:COPC_API_KEY") == KEY
    (tmp_path / "key").write_text(KEY + "\n")
    assert access.read_key(f"file:{tmp_path / 'key'}") == KEY


@pytest.mark.parametrize("text", [KEY, "", "env:", "file:", f"value:{KEY}", f"http://{KEY}"])
def test_what_is_no_place_of_a_key_is_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match="env:NAME or file:PATH") as error:
        access.read_key(text)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("content", ["", "two words " + KEY, KEY + "é", f"{KEY}\r\nX-Evil: 1"])
def test_what_no_header_can_carry_is_no_key(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match="visible ASCII characters") as error:
        access.read_key(f"file:{tmp_path / 'key'}")
    assert KEY not in str(error.value)
    with pytest.raises(ValueError, match="no API key can be read"):
        access.read_key(f"file:{tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    "flags",
    [
        [f"--rollout.api-key={KEY}"],
        [f"--search.retriever-api-key={KEY}"],
        [f"--rollout.sglang-args=--tp 2 --api-key {KEY}"],
        [f"--rollout.sglang-args=--admin-api-key={KEY}"],
        ["--rollout.urls", f"http://me:{KEY}@host:30000"],
        [f"--search.retriever-url=https://{KEY}@host/retrieve"],
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(flags, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags)
    assert end.value.code == 2
    said = "".join(capsys.readouterr())
    assert KEY not in said
    assert "saved and logged" in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [
        *((host, None, False) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, None, True) for host in ("0.0.0.0", "::", "10.0.0.1", "", "node7")),
        *((host, KEY, False) for host in ("0.0.0.0", "node7")),
    ],
)
def test_an_address_that_others_reach_without_a_key_is_worth_a_warning(host, key, warns):
    warning = access.exposure(host, key)
    assert (warning is not None) == warns
    if warning is not None:
        assert warning.startswith("warning: listening on") and "127.0.0.1" in warning


# ------------------------------------------------------------------------------------ server


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Folders start and v1 of a root that is allowed, and one of another that is not."""
    root = tmp_path_factory.mktemp("weights")
    vocabulary = {character: i for i, character in enumerate(map(chr, range(33, 97)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    for seed, name in enumerate(("inside/start", "inside/v1", "outside/v2")):
        params = model.init(jax.random.key(seed), CONFIG)
        hf.save_hf(root / name, params, CONFIG, tokenizer_json=tokenizer.to_str())
    return root


@pytest.fixture(scope="module")
def server(weights, tmp_path_factory):
    limits = ("--max-body", str(MAX_BODY), "--max-requests", str(MAX_REQUESTS))
    with launch_embedded(
        weights / "inside/start",
        log_file=tmp_path_factory.mktemp("server") / "log",
        slots=2,
        max_length=LENGTH,
        weight_roots=[weights / "inside"],
        api_key=KEY,
        arguments=[*limits, "--prefill-rows", "1", "--prefill-chunks", "32", "--attend", ""],
        timeout_s=280.0,
    ) as server:
        yield server
        assert server.alive(), server.log_tail()
        assert KEY not in server.log_file.read_text()


def call(url, method, path, body=None, key=None, raw=None, headers=None):
    """Give the status and the text of the answer."""
    raw = json.dumps(body) if raw is None and body is not None else raw
    headers = {**access.bearer(key), **(headers or {})}
    if raw is not None:
        headers["Content-Type"] = "application/json"
    address = urllib.parse.urlsplit(url).netloc
    with contextlib.closing(http.client.HTTPConnection(address, timeout=100.0)) as connection:
        connection.request(method, path, raw, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def generate(server, *, prompt=(1, 2), **more):
    sampling = more.pop("sampling_params", {"max_new_tokens": 2})
    body = {"input_ids": list(prompt), "sampling_params": sampling, **more}
    if "text" in more:
        del body["input_ids"]
    return call(server.url, "POST", "/generate", body, KEY)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in ("/generate", "/v1/completions", "/v1/chat/completions")),
        *(("POST", path) for path in ("/update_weights_from_disk", "/update_weight_version")),
        *(("POST", path) for path in ("/pause_generation", "/abort_request", "/tokenize")),
        *(("GET", path) for path in ("/model_info", "/server_info", "/v1/models", "/v1/loads")),
        *(("GET", path) for path in ("/flush_cache", "/ping", "/nothing", "/health/../model_info")),
    ],
)
def test_without_the_key_nothing_but_health_is_answered(server, method, path):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"X-Api-Key": KEY},
        {"Authorization": "Bearer é".encode("latin-1").decode("latin-1")},
    ):
        status, text = call(server.url, method, path, {}, headers=headers)
        assert (status, json.loads(text)) == (401, {"error": "Unauthorized"})
    assert call(server.url, "GET", f"/model_info?key={KEY}")[0] == 401


def test_what_a_scheduler_asks_needs_no_key(server):
    for path in ("/health", "/health_generate", "/ready"):
        assert call(server.url, "GET", path) == (200, "")


def test_with_the_key_everything_is_answered(server):
    status, text = generate(server)
    assert status == 200 and len(json.loads(text)["output_ids"]) == 2
    for scheme in ("bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} {KEY}"}
        assert call(server.url, "GET", "/model_info", headers=headers)[0] == 200
    status, text = call(server.url, "GET", "/server_info", key=KEY)
    assert status == 200 and KEY not in text and "api_key" not in text


def test_no_process_shows_the_key(server):
    assert all(KEY not in argument for argument in psutil.Process(server.process.pid).cmdline())


def test_the_client_brings_the_key_and_hides_it(server):
    async def sample(key):
        async with SGLangClient([server.url], api_key=key, retries=0) as client:
            await client.check()
            return await client.generate([1, 2], SamplingParams(3))

    assert len(asyncio.run(sample(KEY)).token_ids) == 3
    for key, why in ((None, "none was sent"), ("other", "does not take the one sent")):
        with pytest.raises(RolloutUnauthorized, match=why) as error:
            asyncio.run(sample(key))
        assert "COPC_API_KEY" in str(error.value) and "other" not in str(error.value)


@contextlib.contextmanager
def echo():
    """A server whose refusals repeat all that it was sent; gives its address."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def repeat(request):
        return web.Response(status=400, text=str(dict(request.headers)))

    async def serve():
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", repeat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    runner = loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert ready.wait(20)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def test_a_server_that_repeats_the_key_does_not_bring_it_into_messages():
    async def sample(url):
        async with SGLangClient([url], api_key=KEY, retries=0) as client:
            await client.generate([1, 2], SamplingParams(3))

    async def search(url):
        async with HttpRetriever(url, api_key=KEY) as retriever:
            await retriever.search(["capital"], 1)

    with echo() as url:
        for ask in (sample, search):
            with pytest.raises((RuntimeError, RetrieverError), match=r"Bearer \[key\]") as error:
                asyncio.run(ask(url))
            assert KEY not in str(error.value)


# ------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [[1]] * 9}, "9 responses are asked for in one call, at most 8"),
        ({"text": ["!"] * 9}, "9 responses are asked for in one call, at most 8"),
        ({"sampling_params": {"n": 10**9}}, "1000000000 responses are asked for in one call"),
        ({"prompt": [[1]] * 3, "sampling_params": {"n": 3}}, "9 responses are asked for"),
        ({"prompt": [1] * 65}, "longer than the model's context length (64 tokens)"),
        ({"text": "!" * 65}, "(65 characters) is longer than any text of the model's context"),
        ({"sampling_params": {"max_new_tokens": 10**12}}, "maximum context length of 64 tokens"),
        ({"sampling_params": {"stop": ["a"] * 1025}}, "stop holds 1025 entries, at most 1024"),
        ({"sampling_params": {"stop_token_ids": [1] * 1025}}, "stop_token_ids holds 1025 entries"),
        ({"text": "a\ud800"}, "half of a surrogate pair"),
    ],
)
def test_requests_that_ask_for_too_much_are_refused_in_words(server, body, words):
    status, text = generate(server, **body)
    assert status == 400 and words in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [2**40, -(2**70), 10**6]},
        {"top_k": 2**60},
        {"temperature": 1e300},
        {"sampling_seed": 2**90},
    ],
)
def test_numbers_beyond_the_arrays_of_the_engine_end_nothing(server, sampling):
    status, text = generate(server, sampling_params={"max_new_tokens": 4, **sampling})
    assert status == 200 and 1 <= len(json.loads(text)["output_ids"]) <= 4


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
def test_a_body_over_the_limit_is_refused(server, path):
    raw = json.dumps({"prompt": "!", "text": "!", "padding": "x" * MAX_BODY})
    status, text = call(server.url, "POST", path, key=KEY, raw=raw)
    assert status == 413 and f"over {MAX_BODY} bytes" in json.loads(text)["error"]["message"]


def test_json_that_is_nested_too_deeply_is_no_fault_of_the_server(server):
    status, text = call(server.url, "POST", "/generate", key=KEY, raw="[" * 15_000)
    assert status == 400 and json.loads(text)["object"] == "error"


def test_more_requests_than_the_limit_are_told_to_come_later(server):
    assert call(server.url, "POST", "/pause_generation", {"mode": "retract"}, KEY)[0] == 200
    waiting = []
    try:
        sampling = {"max_new_tokens": 2}
        body = {"input_ids": [[1]] * MAX_REQUESTS, "sampling_params": sampling}
        ask = lambda: waiting.append(call(server.url, "POST", "/generate", body, KEY))
        thread = threading.Thread(target=ask)
        thread.start()
        deadline = time.monotonic() + 60.0
        while (
            json.loads(call(server.url, "GET", "/v1/loads", key=KEY)[1])["loads"][0][
                "num_waiting_reqs"
            ]
            < MAX_REQUESTS
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for stream in (False, True):
            status, text = generate(server, stream=stream)
            assert status == 429 and "try again later" in json.loads(text)["error"]["message"]
        body = {"prompt": [1], "max_tokens": 1}
        status, text = call(server.url, "POST", "/v1/completions", body, KEY)
        assert status == 429 and "try again later" in json.loads(text)["message"]
    finally:
        call(server.url, "POST", "/continue_generation", {}, KEY)
    thread.join(60.0)
    assert [status for status, _ in waiting] == [200]
    assert generate(server)[0] == 200


# ------------------------------------------------------------------------------------ weights


def update(server, path, version="1"):
    body = {"model_path": str(path), "weight_version": version}
    status, text = call(server.url, "POST", "/update_weights_from_disk", body, KEY)
    return status, json.loads(text)["message"]


def held(server):
    return json.loads(call(server.url, "GET", "/model_info", key=KEY)[1])["weight_version"]


def test_weights_come_from_the_allowed_folders_alone(server, weights, tmp_path):
    assert update(server, weights / "inside/v1", "1")[0] == 200 and held(server) == "1"
    inside, outside = weights / "inside", weights / "outside/v2"
    (inside / "link").symlink_to(outside)
    (inside / "files").mkdir()
    for file in (inside / "v1").iterdir():
        (inside / "files" / file.name).symlink_to(outside / file.name)
    (inside / "circle").symlink_to(inside / "circle")
    for path in (
        outside,
        inside / "../outside/v2",
        inside / "link",
        inside / "files",
        inside / "circle",
        tmp_path / "not there",
        "/etc",
        "relative",
    ):
        status, message = update(server, path, "9")
        assert status == 400 and "lies outside of the folders that weights may come from" in message
        assert str(inside) in message and "--weights-root" in message
    assert update(server, "a\0b", "9")[0] == 400
    assert held(server) == "1"
    # A link that leads to where weights may lie is as good as the folder.
    (inside / "good").symlink_to(inside / "v1")
    assert update(server, inside / "good", "2")[0] == 200 and held(server) == "2"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.npz"])
def test_weights_are_safetensors_or_nothing(server, weights, tmp_path, name):
    folder = weights / "inside" / f"only {name}"
    folder.mkdir()
    # What torch.load or pickle would run when it is read.
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR.")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    before = held(server)
    status, message = update(server, folder, "9")
    assert status == 400 and "safetensors" in message
    assert held(server) == before and not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------ start


def start(module, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **variables},
    )


def test_a_start_warns_or_refuses_before_the_long_part(tmp_path):
    """Of servers that end at once, because there is nothing to serve."""
    (tmp_path / "corpus.jsonl").write_text("no passage\n")
    rollout = ("copc_jax.rollout.server", "--port", 0, "--model-path", tmp_path / "nothing")
    retriever = ("copc_jax.tools.retriever", "serve", "--port", 0)
    retriever = (*retriever, "--corpus", tmp_path / "corpus.jsonl")
    for command in (rollout, retriever):
        done = start(*command, "--host", "0.0.0.0")
        assert done.returncode == 2 and "warning: listening on 0.0.0.0 without" in done.stderr
    done = start(*retriever, "--host", "0.0.0.0", **{access.RETRIEVER_KEY: KEY})
    assert done.returncode == 2 and "warning" not in done.stderr
    done = start(*retriever, "--api-key", f"{KEY} {KEY}")
    assert done.returncode == 2 and "visible ASCII" in done.stderr
    assert KEY not in done.stdout + done.stderr


def test_a_retriever_with_a_key(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "\\"Peru\\"\\nThe capital of Peru is Lima."}\n')
    command = ["copc_jax.tools.retriever", "serve", "--corpus", str(corpus), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, access.RETRIEVER_KEY: KEY},
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:"), line
            url = line.split()[1]

            async def search(key):
                async with HttpRetriever(url, api_key=key) as retriever:
                    return await retriever.search(["capital of Peru"], 1)

            assert call(url, "GET", "/health")[0] == 200
            assert call(url, "POST", "/retrieve", {"queries": ["Peru"]})[0] == 401
            assert asyncio.run(search(KEY))[0][0].title == "Peru"
            for key in (None, "other"):
                with pytest.raises(RetrieverError, match=r"401.*COPC_RETRIEVER_API_KEY"):
                    asyncio.run(search(key))
        finally:
            process.terminate()
            said = process.stdout.read()
    assert KEY not in said


# ------------------------------------------------------------------------------------ runs


def test_a_server_that_a_run_starts_gets_a_key_of_its_own(monkeypatch):
    config = parse([])
    keys = {assembly.server_key(config) for _ in range(3)}
    assert len(keys) == 3 and all(key is not None and len(key) >= 40 for key in keys)
    running = parse(["--rollout.urls", "http://127.0.0.1:1"])
    assert assembly.server_key(running) is None
    monkeypatch.setenv("COPC_API_KEY", KEY)
    assert assembly.server_key(config) == assembly.server_key(running) == KEY
    assert KEY not in to_json(config)
