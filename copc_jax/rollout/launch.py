"""Rollout servers as child processes: start, wait until they answer, restart, end.

A server lives in a session of its own, so that Ctrl-C at the terminal reaches this process only,
which then ends the server in order.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from copc_jax import access

# Between two looks at a server that is starting, in seconds.
_POLL_S = 0.05
_LOG_TAIL_BYTES = 3000
# SGLang without a GPU: attention of plain torch, no CUDA graphs, and little memory for the cache.
_SGLANG_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--mem-fraction-static", "0.1"),
    # Otherwise its scheduler keeps a core busy while there is nothing to do.
    "--sleep-on-idle",
)
# SGLang takes a key as an argument only, which every user of the machine sees, and passes variables
# on to its children: this gives it the key of a variable, and takes that away.
_SGLANG_WITH_KEY = f"""
import os, runpy, sys
sys.argv += ["--api-key", os.environ.pop({access.ROLLOUT_KEY!r})]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


class LaunchError(RuntimeError):
    """A server did not start; the message holds the end of its log."""


class ServerProcess:
    """A running rollout server; made by `launch_embedded` or `launch_sglang`.

    Leaving it as a context manager ends it.

    Args:
        command: the command line that serves at a given port.
        host: where it listens.
        port: for the first start; 0 if the server chooses.
        probe: given the port asked for, the port that it serves at, or None while it is not ready.
        log_file: file to append its output to.
        timeout_s: seconds that a start may take.
        environment: variables to set for it.
        api_key: what its requests must bring, given to it in the variable COPC_API_KEY.
        hides_key: it does not print its key; otherwise its output is written without it.

    Attributes:
        url: where it answers; a restart keeps it.
        api_key: as above; None if it asks for none.
        process: the newest process.
        log_file: everything that its processes print.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        host: str,
        port: int,
        probe: Callable[[int], int | None],
        *,
        log_file: Path,
        timeout_s: float,
        environment: Mapping[str, str],
        api_key: str | None = None,
        hides_key: bool = True,
    ):
        self.log_file = log_file
        self.api_key = api_key
        self._hides_key = hides_key or api_key is None
        self._command = command
        self._host = host
        self._port = port
        self._probe = probe
        self._timeout_s = timeout_s
        # A key of ours is not for a server that asks for none, or for another one.
        self._environment = {**environment, access.ROLLOUT_KEY: api_key or ""}
        self._start()
        self.url = f"http://{host}:{self._port}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def alive(self) -> bool:
        """Say whether the process runs; it may still not answer."""
        return self.process.poll() is None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process and its children: SIGTERM, and SIGKILL after `timeout_s`."""
        if self.alive():
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        # Children that outlive it, and the process itself when it does not listen. There is no
        # such group when all have ended in order.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._finish_log()

    def restart(self) -> None:
        """End the process if it runs, and start it again at the same address.

        It then holds the weights that it was first started with.

        Raises:
            LaunchError: as at the first start.
        """
        self.stop()
        self._start()

    def log_tail(self) -> str:
        """Give the end of the log."""
        if not self.log_file.exists():
            return "(no log)"
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(the log is empty)"

    def _start(self) -> None:
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            self._command_line = list(self._command(self._port))
            with self.log_file.open("ab") as log:
                self.process = subprocess.Popen(
                    self._command_line,
                    stdin=subprocess.DEVNULL,
                    stdout=log if self._hides_key else subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
        except OSError as error:
            # Such as no space for its log, or no memory for another process.
            raise LaunchError(f"the rollout server cannot be started: {error}") from error
        self._copying = None
        if self.process.stdout is not None:
            self._copying = threading.Thread(
                target=self._copy, args=(self.process.stdout,), name="server log", daemon=True
            )
            self._copying.start()
        deadline = time.monotonic() + self._timeout_s
        try:
            while (port := self._probe(self._port)) is None:
                if not self.alive():
                    raise LaunchError(self._failure(f"ended with {self.process.returncode}"))
                if time.monotonic() > deadline:
                    raise LaunchError(self._failure(f"was not ready within {self._timeout_s:g} s"))
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        self._port = port

    def _copy(self, output: IO[bytes]) -> None:
        """Write what a server prints into its log, line by line and without the key."""
        with output, self.log_file.open("ab", buffering=0) as log:
            for line in output:
                # A server whose output nobody took, as on a full disk, would stop in the end.
                with contextlib.suppress(OSError):
                    log.write(access.hide(line.decode(errors="replace"), self.api_key).encode())

    def _finish_log(self) -> None:
        """Wait for what an ended process has printed."""
        if self._copying is not None:
            self._copying.join(5.0)

    def _failure(self, what: str) -> str:
        if not self.alive():
            self._finish_log()
        return (
            f"the rollout server {what}: {shlex.join(self._command_line)}\n"
            f"Its log, {self.log_file}, ends with:\n{self.log_tail()}"
        )


def launch_embedded(
    model_path: str | os.PathLike[str],
    *,
    log_file: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    slots: int | None = None,
    max_length: int | None = None,
    cpus: Sequence[int] = (),
    compilation_cache: str | os.PathLike[str] | None = None,
    weight_roots: Sequence[str | os.PathLike[str]] = (),
    api_key: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> ServerProcess:
    """Start the embedded server and wait until it is ready. It ends when this process does.

    Args:
        model_path: Hugging Face folder with tokenizer.json.
        log_file: file to append its output to; the port is written next to it.
        host: address to listen on.
        port: 0 takes a free one.
        slots: sequences decoded together; None is the server's default.
        max_length: tokens of a prompt and its response; None is the server's default.
        cpus: CPUs to run on, all if empty.
        compilation_cache: folder that keeps compiled programs between runs.
        weight_roots: folders that later weights may lie in; empty is the server's default.
        api_key: what requests must bring; None asks for none.
        arguments: further command line arguments of the server.
        environment: variables to set for it.
        timeout_s: seconds that it may take to be ready; compiling takes most of them.

    Raises:
        LaunchError: with the end of the log, when it ends or is not ready in time.
    """
    log_file = Path(log_file)
    port_file = log_file.with_name(log_file.name + ".port")
    options = ["--model-path", str(model_path), "--host", host, "--port-file", str(port_file)]
    options += ["--parent-pid", str(os.getpid())]
    if slots is not None:
        options += ["--slots", str(slots)]
    if max_length is not None:
        options += ["--max-length", str(max_length)]
    if cpus:
        options += ["--cpus", ",".join(map(str, cpus))]
    if compilation_cache is not None:
        options += ["--compilation-cache", str(compilation_cache)]
    for root in weight_roots:
        options += ["--weights-root", str(root)]

    def command(port: int) -> list[str]:
        # An old file would make a new server look ready.
        port_file.unlink(missing_ok=True)
        server = [sys.executable, "-m", "copc_jax.rollout.server"]
        return [*server, *options, "--port", str(port), *arguments]

    def probe(port: int) -> int | None:
        return int(port_file.read_text()) if port_file.exists() else None

    return ServerProcess(
        command,
        host,
        port,
        probe,
        log_file=log_file,
        timeout_s=timeout_s,
        environment=environment or {},
        api_key=api_key,
    )


def launch_sglang(
    python: str | os.PathLike[str],
    model_path: str | os.PathLike[str],
    *,
    log_file: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    device: Literal["gpu", "cpu"] = "gpu",
    slots: int | None = None,
    max_length: int | None = None,
    api_key: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> ServerProcess:
    """Start a real SGLang server from its own Python environment and wait until it answers.

    Args:
        python: interpreter of the environment that holds sglang.
        model_path: Hugging Face folder.
        log_file: file to append its output to.
        host: address to listen on.
        port: 0 takes one that is free now.
        device: "gpu" is what SGLang finds, in bfloat16; "cpu" is plain torch in float32.
        slots: sequences decoded together; None is the server's default.
        max_length: tokens of the longest sequences, for the size of the cache on a CPU; None leaves
            it to SGLang.
        api_key: what requests must bring; None asks for none. Neither its command line nor its log
            shows it.
        arguments: further command line arguments of `sglang.launch_server`; of those given twice
            the last one counts.
        environment: variables to set for it.
        timeout_s: seconds that it may take to be ready.

    Raises:
        LaunchError: when there is no such interpreter; with the end of the log, when it ends or is
            not ready in time.
    """
    if shutil.which(python) is None:
        raise LaunchError(
            f"{python} is no interpreter: name the Python of the environment that holds sglang"
        )
    options = ["--model-path", str(model_path), "--host", host]
    # Left alone, SGLang serves weights that are stored as float32 in float16.
    options += ["--dtype", "float32", *_SGLANG_CPU] if device == "cpu" else ["--dtype", "bfloat16"]
    if slots is not None:
        options += ["--max-running-requests", str(slots)]
    if device == "cpu" and slots is not None and max_length is not None:
        # A cache for what can run at once; by default it takes a share of the memory. SGLang keeps
        # some positions of a sequence to itself.
        options += ["--max-total-tokens", str(slots * (max_length + 8))]

    def command(port: int) -> list[str]:
        start = ["-m", "sglang.launch_server"] if api_key is None else ["-c", _SGLANG_WITH_KEY]
        server = [str(python), *start]
        return [*server, *options, "--port", str(port), *arguments]

    def probe(port: int) -> int | None:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=30.0):
                return port
        except (OSError, urllib.error.URLError):
            return None

    return ServerProcess(
        command,
        host,
        port or _free_port(host),
        probe,
        log_file=Path(log_file),
        timeout_s=timeout_s,
        environment={
            # A folder on disk needs nothing from the hub.
            "HF_HUB_OFFLINE": "1",
            **({"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}),
            **(environment or {}),
        },
        api_key=api_key,
        # It logs all of its arguments.
        hides_key=False,
    )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
