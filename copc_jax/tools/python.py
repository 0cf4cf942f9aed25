"""The Python tool: sandboxes that run a policy's code and return what the policy reads of it.

`make_sandbox(name, ...)` gives one of three:

- "monty": a Python interpreter in Rust, with the language's core and parts of the standard library;
  nothing to install beside the package. Needs the `math` extra.
- "cpython": CPython with numpy and sympy where they are installed, in a forked process without
  rights, inside bubblewrap when that is installed. Linux on x86-64 only.
- "sandbox-fusion": a SandboxFusion server, by its URL.

Every call starts from nothing: no variable, file or module state outlives it. What a program prints
to standard output is what the policy reads; standard error is dropped. When a program prints
nothing and its last line is an expression, "monty" and "cpython" show its value, as a prompt would.
An error is shown as the last line of its traceback with the line of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import aiohttp

Limit = Literal["time", "memory", "output", "crash"]

# A program that prints more than this many bytes is ended.
MAX_OUTPUT_BYTES = 1 << 20

# Seconds beyond the time limit after which a sandbox that does not answer is at fault itself.
_GRACE_S = 30.0
_START_S = 120.0
_PACKAGES = ("mpmath", "numpy", "sympy")  # In the order in which they must be loaded.
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_LOG = logging.getLogger(__name__)

# Tries what must be refused, and names what is not.
_PROBE = """
import os
for name, forbidden in {
    "a process": os.fork,
    "a signal": lambda: os.kill(os.getppid(), 0),
    "a file of the host": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "a file of a process": lambda: os.open("/proc/self/status", os.O_RDONLY),
    "writing": lambda: os.open("/", os.O_TMPFILE | os.O_RDWR),
}.items():
    try:
        forbidden()
    except OSError:
        continue
    print("not refused:", name)
"""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: no worker, server away, an answer of the wrong shape.

    The episode is to be dropped and counted; the policy never reads this.
    """


@dataclasses.dataclass(frozen=True)
class Execution:
    """What came of one program.

    Attributes:
        text: what the policy reads: standard output, and the error if there was one; cut to the
            limit of the sandbox.
        ok: the program ended by itself and without an error.
        limit: the limit that ended the program; "crash" when it brought its interpreter down.
        seconds: wall time of the program, without the time that it waited for its turn.
    """

    text: str
    ok: bool
    limit: Limit | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        time_s: seconds of wall time.
        memory_mb: MiB of memory, beyond what an idle interpreter takes.
        output_chars: characters of output that the policy reads.
        processes: programs at a time; others wait.
    """

    time_s: float = 5.0
    memory_mb: int = 512
    output_chars: int = 400
    processes: int = 4

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_mb", "processes"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"sandbox limit {name} must be positive, not {value}")
        if self.output_chars < 40:
            raise ValueError(
                f"sandbox limit output_chars must be at least 40, not {self.output_chars}"
            )


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs; many at a time, from one event loop.

    `run` starts what it needs at its first call, and again after a fault. `close` ends every
    process and connection; so does leaving the sandbox as an asynchronous context manager. A
    closed sandbox may be used again, from another loop too.
    """

    async def start(self) -> None:
        """Start workers now, so that faults show before work is lost.

        Raises:
            SandboxError: they cannot be started.
        """
        ...

    async def run(self, code: str) -> Execution:
        """Run a program from nothing and return what came of it.

        Raises:
            SandboxError: the sandbox failed, not the program.
        """
        ...

    async def close(self) -> None:
        """End every process and connection; programs at work end, at their limit at the latest."""
        ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def make_sandbox(
    name: str,
    *,
    url: str | None = None,
    time_limit_s: float = 5.0,
    memory_limit_mb: int = 512,
    output_limit_chars: int = 400,
    processes: int = 4,
) -> Sandbox:
    """Return a sandbox by name; nothing is started yet.

    Args:
        name: "monty", "cpython" or "sandbox-fusion".
        url: of the SandboxFusion server or of its /run_code; for no other sandbox.
        time_limit_s: seconds of wall time that a program may take.
        memory_limit_mb: MiB that a program may take beyond what an idle interpreter does.
        output_limit_chars: characters of output that the policy reads; of longer output it reads
            the first and the last half, with "..." between.
        processes: programs that run at a time; others wait their turn.

    Raises:
        ValueError: unknown name, a URL where none belongs or none where one does, a bad limit.
        SandboxError: this machine cannot have that sandbox.
    """
    limits = Limits(time_limit_s, memory_limit_mb, output_limit_chars, processes)
    if name == "sandbox-fusion":
        if url is None:
            raise ValueError("sandbox 'sandbox-fusion' needs the url of its server")
        return SandboxFusion(url, limits)
    if url is not None:
        raise ValueError(f"sandbox {name!r} takes no url; only 'sandbox-fusion' does")
    if name == "monty":
        return MontySandbox(limits)
    if name == "cpython":
        return CPythonSandbox(limits)
    raise ValueError(f"unknown sandbox {name!r}; known are monty, cpython, sandbox-fusion")


def cut(text: str, limit: int) -> str:
    """Return `text`, or its first and last half when longer than `limit`, with "..." between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...{text[-half:]}"


class _Printed:
    """Standard output of a program, as far as it is kept."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._size = 0

    def add(self, data: bytes) -> bool:
        """Keep the data; False when it was too much, and the program is to be ended."""
        self._kept += data[: max(MAX_OUTPUT_BYTES - self._size, 0)]
        self._size += len(data)
        return self._size <= MAX_OUTPUT_BYTES

    def __bool__(self) -> bool:
        return self._size > 0

    def result(
        self, limits: Limits, seconds: float, *, error: str = "", limit: Limit | None = None
    ) -> Execution:
        """Return the execution; `error` is appended and never cut in its first half."""
        if self._size > MAX_OUTPUT_BYTES:
            limit = "output"
        if limit == "time":
            error = "Timeout Error"
        elif limit == "output":
            error = f"Output Limit Error: more than {MAX_OUTPUT_BYTES} bytes were printed"
        error = error[: limits.output_chars // 2]
        lines = [self._kept.decode(errors="replace").rstrip(), error]
        text = cut("\n".join(line for line in lines if line), limits.output_chars)
        return Execution(text, not error and limit is None, limit, seconds)


class MontySandbox(Sandbox):
    """Programs in Monty's worker processes, which know no files, sockets or processes.

    What Monty does not support is an error that says so: class inheritance, generators, `del`, and
    modules such as fractions, statistics, sympy and numpy.

    Args:
        limits: of each program.

    Raises:
        SandboxError: the package is not installed.
    """

    def __init__(self, limits: Limits):
        try:
            import pydantic_monty
        except ImportError as error:
            raise SandboxError(
                "sandbox 'monty' needs pydantic-monty: pip install 'copc-jax[math]'"
            ) from error
        self._monty = pydantic_monty
        self._limits = limits
        self._resources = pydantic_monty.ResourceLimits(
            max_feed_duration_secs=limits.time_s,
            max_total_sleep_secs=limits.time_s,
            max_memory=limits.memory_mb << 20,
        )
        # What a program may bring about.
        self._failures = (
            pydantic_monty.MontyCrashedError,
            pydantic_monty.MontyRuntimeError,
            pydantic_monty.MontySyntaxError,
        )
        self._pool: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the pool of workers.

        Raises:
            SandboxError: the program of the workers is missing or does not start.
        """
        async with self._starting:
            if self._pool is not None:
                return
            try:
                pool = self._monty.AsyncMonty(
                    max_processes=self._limits.processes, feed_duration_limit_grace=0.5
                )
                await pool.__aenter__()
            except (self._monty.MontyError, OSError, RuntimeError) as error:
                raise SandboxError(f"monty did not start: {error}") from error
            self._pool = pool

    async def close(self) -> None:
        """End the workers."""
        async with self._starting:
            pool, self._pool = self._pool, None
            if pool is not None:
                await pool.__aexit__(None, None, None)
        self._starting = asyncio.Lock()  # The old one belongs to this event loop.

    async def run(self, code: str) -> Execution:
        """Run a program in a fresh session.

        Raises:
            SandboxError: no worker can be had.
        """
        await self.start()
        head, separator, last = code.rstrip().rpartition("\n")
        # Of a last line that is a comment, the parentheses alone would be the value.
        if last and not last[0].isspace() and not last.startswith("#"):
            found = await self._try(code, f"{head}{separator}_=({last}\n)", shows_last=True)
            if found is not None:
                return found
        found = await self._try(code, code, shows_last=False)
        assert found is not None
        return found

    async def _try(self, code: str, program: str, *, shows_last: bool) -> Execution | None:
        """Run `program`, which is `code` or what keeps the value of its last line as `_`.

        That value is printed inside: values that cross into this process may be unbounded in size,
        though small inside. Returns None when the last line turns out to have no value.
        """
        pool = self._pool
        if pool is None:
            raise SandboxError("the sandbox was closed")
        printed = _Printed()

        def write(stream: str, text: str) -> None:
            if stream == "stdout" and not printed.add(text.encode(errors="replace")):
                raise RuntimeError("output limit")

        started = None
        try:
            async with pool.checkout(limits=self._resources) as session:
                started = time.monotonic()
                # Nothing is returned from a program that ends in None.
                await session.feed_run(f"{program}\nNone", print_callback=write)
                if shows_last and not printed:
                    show = "if _ is not None: print(repr(_))\nNone"
                    await session.feed_run(show, print_callback=write)
                return printed.result(self._limits, time.monotonic() - started)
        except (self._monty.MontyError, OSError, RuntimeError) as error:
            if shows_last and isinstance(error, self._monty.MontySyntaxError):
                return None
            if started is None or not isinstance(error, self._failures):
                raise SandboxError(f"monty failed: {error}") from error
            return self._failed(error, code, printed, time.monotonic() - started)

    def _failed(self, error: Any, code: str, printed: _Printed, seconds: float) -> Execution:
        if isinstance(error, self._monty.MontyCrashedError):
            if error.timed_out:
                return printed.result(self._limits, seconds, limit="time")
            text = "the interpreter was brought down"
            return printed.result(self._limits, seconds, error=text, limit="crash")
        message = error.display("type-msg")
        limit: Limit | None = None
        if message.startswith("MemoryError"):
            limit = "memory"
        elif re.match(r"TimeoutError: (feed time|turn time|sleep) limit exceeded", message):
            limit = "time"
        frames = error.traceback()
        if frames and limit is None:
            line = frames[-1].line
            if line > code.count("\n") + 1:  # The parser got as far as the line added here.
                line, message = line - 1, "SyntaxError: unexpected end of the program"
            message += f" (line {line})"
        return printed.result(self._limits, seconds, error=message, limit=limit)


class CPythonSandbox(Sandbox):
    """Programs in forked children of one server process that has numpy and sympy loaded.

    `python_fork_server` says what holds a child. bubblewrap, where it is installed, takes away
    the rest of the file system, the network and the sight of other processes as well. Where it is
    missing the kernel must have Landlock (Linux 5.13), and a program can find out which files the
    host has, though not read them.

    Args:
        limits: of each program.
        bubblewrap: True demands it, False does without; by default it is used where it works.

    Raises:
        SandboxError: not Linux on x86-64, or bubblewrap is demanded and not installed.
    """

    def __init__(self, limits: Limits, *, bubblewrap: bool | None = None):
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise SandboxError(
                "sandbox 'cpython' runs on Linux on x86-64 only, not on "
                f"{sys.platform} on {platform.machine()}; use 'monty' or 'sandbox-fusion'"
            )
        program = None if bubblewrap is False else shutil.which("bwrap")
        if bubblewrap and program is None:
            raise SandboxError("bubblewrap is not installed: no program named bwrap")
        self._limits = limits
        self._bubblewrap = program
        self._may_do_without = bubblewrap is None
        self._server: _ForkServer | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(limits.processes)

    async def start(self) -> None:
        """Start the server, and see that it refuses what it must.

        Raises:
            SandboxError: it does not start, or something is not refused on this machine.
        """
        async with self._starting:
            if self._server is not None and self._server.alive:
                return
            if self._server is not None:
                await self._server.close()
                self._server = None
            try:
                self._server = await _ForkServer.start(self._limits, self._bubblewrap)
            except SandboxError as error:
                if self._bubblewrap is None or not self._may_do_without:
                    raise
                _LOG.warning("sandbox 'cpython' goes on without bubblewrap: %s", error)
                self._bubblewrap = None
                self._server = await _ForkServer.start(self._limits, None)

    async def close(self) -> None:
        """End the server and the programs at work."""
        async with self._starting:
            server, self._server = self._server, None
            if server is not None:
                await server.close()
        # The old ones belong to this event loop.
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(self._limits.processes)

    async def run(self, code: str) -> Execution:
        """Run a program in a fresh child.

        Raises:
            SandboxError: the server ended or does not answer; the next call starts a new one.
        """
        async with self._slots:
            await self.start()
            server = self._server
            if server is None:
                raise SandboxError("the sandbox was closed")
            return await server.run(code, time_s=self._limits.time_s)


class _ForkServer:
    """One running server process, and the calls that it works on.

    Attributes:
        alive: the server has neither ended nor failed to answer.
    """

    def __init__(
        self, limits: Limits, process: subprocess.Popen[bytes], control: socket.socket
    ) -> None:
        self.alive = True
        self._limits = limits
        self._process = process
        self._control = control
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, limits: Limits, bubblewrap: str | None) -> _ForkServer:
        """Start a server and try it.

        Raises:
            SandboxError: it did not come up; the message holds what it printed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                _server_command(limits, bubblewrap),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # One thread: a pool of them does not survive a fork.
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,
            )
        ours.setblocking(False)
        server = cls(limits, process, ours)
        try:
            async with asyncio.timeout(_START_S):
                if await asyncio.get_running_loop().sock_recv(ours, 64) != b"ready":
                    raise SandboxError(f"the fork server did not start: {server._last_words()}")
            server._reader = asyncio.create_task(server._read_answers())
            tried = await server.run(_PROBE, time_s=_START_S)
            if not tried.ok or tried.text:
                raise SandboxError(f"the fork server does not hold on this machine: {tried.text}")
        except TimeoutError as error:
            await server.close()
            raise SandboxError(f"the fork server did not start in {_START_S} s") from error
        except BaseException:
            await server.close()
            raise
        return server

    async def run(self, code: str, *, time_s: float) -> Execution:
        """Have the server run a program in a child, for at most `time_s` seconds."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        answer = self._answers[number] = loop.create_future()
        printed = _Printed()
        ours, theirs = socket.socketpair()
        try:
            async with asyncio.timeout(time_s + _GRACE_S):
                with theirs:
                    order = f"run {number} {time_s}".encode()
                    socket.send_fds(self._control, [order], [theirs.fileno()])
                ours.setblocking(False)
                source = code.encode(errors="surrogatepass")
                # A child that ends before it has read all leaves a broken connection behind.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await loop.sock_sendall(ours, len(source).to_bytes(8, "little") + source)
                with contextlib.suppress(ConnectionResetError):
                    while data := await loop.sock_recv(ours, 1 << 16):
                        if not printed.add(data):
                            self._kill(number)
                            break
                found = await answer
        except TimeoutError as error:
            self._fail("the fork server does not answer")
            raise SandboxError("the fork server does not answer") from error
        except OSError as error:
            self._fail(f"the fork server cannot be reached: {error}")
            raise SandboxError(f"the fork server cannot be reached: {error}") from error
        except asyncio.CancelledError:
            self._kill(number)
            raise
        finally:
            ours.close()
            del self._answers[number]
            # Reading the outcome keeps asyncio from reporting it as never seen.
            with contextlib.suppress(asyncio.CancelledError):
                answer.cancel()
                answer.exception()
        return self._execution(printed, found)

    def _execution(self, printed: _Printed, found: dict[str, Any]) -> Execution:
        if "fault" in found:
            raise SandboxError(f"the fork server failed: {found['fault']}")
        outcome, error = found["outcome"], found["detail"]
        if outcome == "error" and not error and not printed:
            error = "the program ended with status 1"
        limit = None if outcome in ("ok", "error") else outcome
        result = printed.result(self._limits, found["seconds"], error=error, limit=limit)
        return dataclasses.replace(result, ok=result.ok and outcome == "ok")

    def _kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(b"kill %d" % number)

    async def _read_answers(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while message := await loop.sock_recv(self._control, 4096):
                found = json.loads(message)
                answer = self._answers.get(found["id"])
                if answer is not None and not answer.done():
                    answer.set_result(found)
        self._fail(f"the fork server ended: {self._last_words()}")

    def _fail(self, message: str) -> None:
        """End the server, and every call on it with an error."""
        self.alive = False
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxError(message))

    def _last_words(self) -> str:
        stream = self._process.stderr
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        return (stream.read() or b"").decode(errors="replace").strip()[-1000:] or "no message"

    async def close(self) -> None:
        """End the server; it ends its children when the control socket closes."""
        self.alive = False
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        self._fail("the sandbox was closed")
        if self._process.stderr is not None:
            self._process.stderr.close()


def _server_command(limits: Limits, bubblewrap: str | None) -> list[str]:
    """Return the command line of the fork server, in bubblewrap if that is given."""
    interpreter = os.path.realpath(sys.executable)
    program = os.path.realpath(Path(__file__).with_name("python_fork_server.py"))
    packages: dict[str, str] = {}
    readable = {interpreter, os.path.realpath(sysconfig.get_path("stdlib"))}
    readable |= {os.path.realpath(f"{sys.base_prefix}/{name}") for name in ("lib", "lib64")}
    readable |= set(_SYSTEM_LIBRARIES)
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = os.path.realpath(spec.submodule_search_locations[0])
        packages[name] = folder
        # Wheels keep their shared libraries beside the package.
        readable |= {folder, f"{folder}.libs"}
    if "mpmath" not in packages:
        packages.pop("sympy", None)
    present = sorted(path for path in readable if os.path.exists(path))
    settings = {
        "memory_limit_mb": limits.memory_mb,
        "error_chars": limits.output_chars // 2,
        "packages": packages,
        "readable": present,
        "contained": bubblewrap is not None,
    }
    # No environment, no user or site packages, nothing written, UTF-8.
    python = [interpreter, "-I", "-S", "-B", "-X", "utf8", program, json.dumps(settings)]
    if bubblewrap is None:
        return python
    binds = [argument for path in [*present, program] for argument in ("--ro-bind", path, path)]
    return [
        bubblewrap,
        "--unshare-all",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        *("--cap-drop", "ALL"),
        *binds,
        *("--remount-ro", "/"),
        *("--chdir", "/"),
        "--",
        *python,
    ]


class SandboxFusion(Sandbox):
    """Client of a SandboxFusion server.

    Args:
        url: of the server or of its /run_code.
        limits: sent along with each program; output is cut here.
        attempts: tries of a call; only a status of 504 and a failed connection are tried again.
        pause_s: seconds before the second try, doubled before each further one.
    """

    def __init__(self, url: str, limits: Limits, *, attempts: int = 4, pause_s: float = 0.25):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"sandbox url must start with http:// or https://, not {url!r}")
        self._url = url if url.rstrip("/").endswith("/run_code") else url.rstrip("/") + "/run_code"
        self._limits = limits
        self._attempts = attempts
        self._pause_s = pause_s
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(limits.processes)

    async def start(self) -> None:
        """Open the client; the server is first met at the first call."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._limits.time_s + _GRACE_S)
            self._session = aiohttp.ClientSession(timeout=timeout)

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._slots = asyncio.Semaphore(self._limits.processes)  # The old one is of this loop.

    async def run(self, code: str) -> Execution:
        """Have the server run a program.

        Raises:
            SandboxError: no answer after all tries, or one that is a fault of the server.
        """
        body = {
            "language": "python",
            "code": code,
            "compile_timeout": self._limits.time_s,
            "run_timeout": self._limits.time_s,
            "memory_limit_MB": self._limits.memory_mb,
        }
        async with self._slots:
            await self.start()
            attempt = 1
            while True:
                try:
                    return self._read(await self._post(body))
                except (aiohttp.ClientError, TimeoutError) as error:
                    again = isinstance(error, aiohttp.ClientConnectionError) or (
                        isinstance(error, aiohttp.ClientResponseError) and error.status == 504
                    )
                    if again and attempt < self._attempts:
                        await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
                        attempt += 1
                        continue
                    text = f"{self._url}: {type(error).__name__}: {error} ({attempt} tries)"
                    raise SandboxError(text) from error

    async def _post(self, body: dict[str, Any]) -> bytes:
        assert self._session is not None
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            # An answer of a size that no policy reads is cut, and is then no JSON.
            answer = bytearray()
            async for data in response.content.iter_any():
                answer += data
                if len(answer) > 16 * MAX_OUTPUT_BYTES:
                    raise SandboxError(f"{self._url}: an answer of more than {len(answer)} bytes")
            return bytes(answer)

    def _read(self, answer: bytes) -> Execution:
        try:
            found = json.loads(answer)
            status, run = found["status"], found.get("run_result")
            if status == "SandboxError":
                raise SandboxError(f"{self._url}: SandboxError: {found.get('message')}")
            if status not in ("Success", "Failed"):
                raise ValueError(f"unknown status {status!r}")
            stdout, stderr = run["stdout"] or "", run["stderr"] or ""
            seconds, run_status = float(run["execution_time"] or 0.0), run["status"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SandboxError(
                f"{self._url}: no answer of SandboxFusion: {error!r}: {answer[:200]!r}"
            ) from error
        printed = _Printed()
        printed.add(stdout.encode(errors="replace"))
        if run_status == "TimeLimitExceeded":
            return printed.result(self._limits, seconds, limit="time")
        if status == "Success":
            return printed.result(self._limits, seconds)
        message = _last_line(stderr) or f"the program ended with status {run.get('return_code')}"
        limit = "memory" if message.startswith("MemoryError") else None
        return printed.result(self._limits, seconds, error=message, limit=limit)


def _last_line(traceback: str) -> str:
    """Return the last line of a traceback, with the line of the program that it comes from."""
    lines = traceback.strip().splitlines()
    if not lines:
        return ""
    frames = re.findall(r'^ *File "(.*)", line (\d+)', traceback, flags=re.MULTILINE)
    # The first frame is the program's own file; the deepest in that file is where it went wrong.
    own = [line for name, line in frames if name == frames[0][0]]
    return f"{lines[-1]} (line {own[-1]})" if own else lines[-1]
