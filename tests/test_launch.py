"""Starting SGLang: its command line, its environment, and what becomes of a start that fails.

The interpreter is a small program that serves /health and says how it was called; SGLang itself is
started in tests/contract.
"""

import itertools
import json
import os
import signal
import sys
import urllib.request

import pytest

from copc_jax.rollout.launch import LaunchError, launch_sglang

SERVE = """
import http.server, json, os, sys

arguments = sys.argv[1:]
print("key:", os.environ.get("COPC_API_KEY", ""), flush=True)
if "--fail" in arguments:
    sys.exit("no module named sglang")
port = int(arguments[arguments.index("--port") + 1])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        hangs = "--never-ready" in arguments and self.path == "/health"
        self.send_response(503 if hangs else 200)
        self.end_headers()
        names = ("HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE", "EXTRA")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        self.wfile.write(json.dumps([arguments, environment]).encode())

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path):
    """An interpreter that runs the program above, whatever module it is told to run."""
    (tmp_path / "serve.py").write_text(SERVE)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/serve.py "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)


def called(server):
    with urllib.request.urlopen(server.url, timeout=10.0) as answer:
        return json.load(answer)


def options(arguments):
    """Arguments by name; of those given twice the last one, as argparse takes them."""
    assert arguments[:2] == ["-m", "sglang.launch_server"]
    found: dict[str, str] = {}
    for word, value in itertools.pairwise([*arguments[2:], ""]):
        if word.startswith("--"):
            found[word] = "" if value.startswith("--") else value
    return found


def test_on_a_gpu_it_serves_in_bfloat16_and_the_rest_is_its_own_choice(python, tmp_path):
    with launch_sglang(python, tmp_path / "model", log_file=tmp_path / "log") as server:
        arguments, environment = called(server)
    assert options(arguments) == {
        "--model-path": str(tmp_path / "model"),
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--port": server.url.rpartition(":")[2],
    }
    assert environment == {"HF_HUB_OFFLINE": "1"}


def test_on_a_cpu_it_gets_what_it_needs_there(python, tmp_path):
    settings = {"device": "cpu", "slots": 4, "max_length": 100}
    with launch_sglang(python, "model", log_file=tmp_path / "log", **settings) as server:
        arguments, environment = called(server)
    given = options(arguments)
    assert (given["--device"], given["--dtype"]) == ("cpu", "float32")
    assert given["--attention-backend"] == "torch_native"
    assert given["--max-running-requests"] == "4"
    # Idle, its scheduler would keep one of the cores busy.
    assert given["--sleep-on-idle"] == ""
    # Four whole sequences fit, with what SGLang keeps to itself.
    assert 400 < int(given["--max-total-tokens"]) < 500
    assert environment == {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}


def test_own_arguments_and_variables_win(python, tmp_path):
    with launch_sglang(
        python,
        "model",
        log_file=tmp_path / "log",
        arguments=["--dtype", "float16", "--tp", "2"],
        environment={"HF_HUB_OFFLINE": "0", "EXTRA": "yes"},
    ) as server:
        arguments, environment = called(server)
    assert options(arguments)["--dtype"] == "float16" and options(arguments)["--tp"] == "2"
    assert environment == {"HF_HUB_OFFLINE": "0", "EXTRA": "yes"}


def test_a_key_stands_neither_on_the_command_line_nor_in_the_log(python, tmp_path, monkeypatch):
    # A key of another server does not go to one that asks for none.
    monkeypatch.setenv("COPC_API_KEY", "secret-of-another")
    key = "secret-9xQ2"
    for given, logged in ((key, "key: [key]"), (None, "key:")):
        log = tmp_path / f"log of {given is not None}"
        with launch_sglang(python, tmp_path / "m", log_file=log, api_key=given) as server:
            assert server.api_key == given
            arguments, _ = called(server)
        # Ended, it has written all of its log.
        assert arguments[0] == ("-m" if given is None else "-c")
        assert not any("secret" in argument for argument in arguments)
        assert log.read_text().splitlines()[0].strip() == logged
        assert "secret" not in log.read_text()


def test_a_restart_keeps_address_and_arguments(python, tmp_path):
    with launch_sglang(python, "model", log_file=tmp_path / "log") as server:
        first, url = called(server), server.url
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert not server.alive()
        server.restart()
        assert (called(server), server.url) == (first, url)
    assert not server.alive()


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    missing = tmp_path / "bin" / "python"
    with pytest.raises(LaunchError, match=f"{missing} is no interpreter"):
        launch_sglang(missing, "model", log_file=tmp_path / "log")


def test_a_server_that_ends_shows_its_log(python, tmp_path):
    with pytest.raises(LaunchError, match=r"(?s)ended with 1.*no module named sglang"):
        launch_sglang(python, "model", log_file=tmp_path / "log", arguments=["--fail"])


def test_a_server_that_is_not_ready_in_time_is_ended(python, tmp_path):
    arguments = ["--never-ready"]
    with pytest.raises(LaunchError, match="not ready within 1 s"):
        launch_sglang(
            python, "model", log_file=tmp_path / "log", arguments=arguments, timeout_s=1.0
        )
