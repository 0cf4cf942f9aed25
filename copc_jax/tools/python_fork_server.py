"""Fork server of the "cpython" sandbox: a program, started by `copc_jax.tools.python` alone.

It loads numpy and sympy once and forks a child for each call, so that a call costs a fork and not
an import. Linux on x86-64 only; nothing beyond the standard library is imported here, since the
program runs without site-packages.

Standard input is a SOCK_SEQPACKET socket. `run ID SECONDS` comes with a descriptor of a stream
socket: the child reads its source from it (8 bytes of length, then UTF-8) and has it as standard
output. It may take so many seconds.
`kill ID` ends a call. Each call is answered with one JSON object: `id`, `seconds`, `outcome` ("ok",
"error", "memory", "time" or "crash") and `detail` (how it ended, where the child could not print
that itself); or `id` and `fault` when there was no child.

What holds a child, beside the limits of memory and time:

- the server gives up all capabilities and may read nothing but the Python installation (Landlock),
  before it loads anything; children inherit both. It cannot be traced or opened through /proc.
- a child allows itself a list of system calls (seccomp). No call on it makes a process, a thread, a
  socket or a file, signals another process, or opens a file for writing.
- a child holds the descriptors of its own call alone, and dies with the server.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import io
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from typing import Any

# Exit statuses of a child that has printed what happened.
_OK, _ERROR, _OUT_OF_MEMORY = 0, 1, 2

_CODE_NAME = "<code>"
_LIBC = ctypes.CDLL(None, use_errno=True)

# linux/prctl.h, linux/capability.h, linux/landlock.h, linux/seccomp.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET, _SYS_LANDLOCK = 126, (444, 445, 446)
_LANDLOCK_VERSION_FLAG, _LANDLOCK_PATH_BENEATH = 1, 1
_LANDLOCK_ALL = (1 << 13) - 1  # The rights of the first version, which every later one knows.
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
_SECCOMP_FILTER = 2
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM = 1
_ARCH_X86_64 = 0xC000003E

# System calls of x86-64 that read, compute, sleep or end, and touch nothing but the caller.
_HARMLESS = (
    *(0, 1, 3, 4, 5, 6, 7, 8),  # read write close stat fstat lstat poll lseek
    *(9, 10, 11, 12, 25, 28),  # mmap mprotect munmap brk mremap madvise
    *(13, 14, 15, 131, 219),  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall
    *(17, 19, 20, 21, 23),  # pread64 readv writev access select
    *(24, 204, 309),  # sched_yield sched_getaffinity getcpu
    *(32, 33, 292, 436),  # dup dup2 dup3 close_range
    *(34, 35, 36, 37, 38, 230),  # pause nanosleep getitimer alarm setitimer clock_nanosleep
    *(39, 102, 104, 107, 108, 110, 115, 186),  # getpid and the like
    *(60, 231),  # exit exit_group
    *(63, 79, 89, 267),  # uname getcwd readlink readlinkat
    *(96, 97, 98, 100, 201, 228, 229),  # gettimeofday getrlimit getrusage times time clock_*
    *(202, 218, 273, 334),  # futex set_tid_address set_robust_list rseq
    *(217, 262, 269, 439, 332, 221),  # getdents64 newfstatat faccessat(2) statx fadvise64
    *(270, 271, 318),  # pselect6 ppoll getrandom
)
_OPEN, _OPENAT, _IOCTL, _FCNTL, _PRLIMIT64 = 2, 257, 16, 72, 302
_WRITE_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_IOCTLS = (0x5450, 0x5451)  # FIONCLEX FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _prctl(option: int, value: Any, pointer: Any = 0) -> None:
    arguments = (ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_LIBC.prctl(option, *arguments), f"prctl {option}")


def _landlock_version() -> int:
    flag = ctypes.c_uint32(_LANDLOCK_VERSION_FLAG)
    return max(_LIBC.syscall(_SYS_LANDLOCK[0], None, ctypes.c_size_t(0), flag), 0)


def _restrict_files(readable: list[str]) -> None:
    """Refuse every file but reading those under `readable`, to this process and its children."""
    create, add_rule, restrict_self = _SYS_LANDLOCK
    handled = ctypes.c_uint64(_LANDLOCK_ALL)
    size = ctypes.c_size_t(ctypes.sizeof(handled))
    rules = _check(_LIBC.syscall(create, ctypes.byref(handled), size, 0), "Landlock")
    for path in readable:
        if not os.path.exists(path):
            continue
        directory = os.open(path, os.O_PATH)
        right = _LANDLOCK_READ_DIR if os.path.isdir(path) else 0
        rule = _PathBeneath(_LANDLOCK_READ_FILE | right, directory)
        _check(_LIBC.syscall(add_rule, rules, _LANDLOCK_PATH_BENEATH, ctypes.byref(rule), 0), path)
        os.close(directory)
    _check(_LIBC.syscall(restrict_self, rules, 0), "Landlock")
    os.close(rules)


def _drop_capabilities() -> None:
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    _check(_LIBC.syscall(_SYS_CAPSET, ctypes.byref(header), (ctypes.c_uint32 * 6)()), "capset")


def _build_filter() -> _Program:
    """Return the seccomp filter: what is not allowed fails with EPERM.

    `struct seccomp_data` holds the number of the call at byte 0, the architecture at 4 and the
    arguments, 8 bytes each, from 16 on; arguments that are 32 bits wide are compared as such.
    """
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    refuse = (give, 0, 0, _ERRNO | _EPERM)
    allow = (give, 0, 0, _ALLOW)

    def argument(index: int) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * index)

    def case(number: int, *body: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(equal, 0, len(body), number), *body]

    def one_of(index: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        tests = [step for value in values for step in ((equal, 0, 1, value), allow)]
        return [argument(index), *tests, refuse]

    read_only = ((any_bit, 0, 1, _WRITE_FLAGS), refuse, allow)
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, _ARCH_X86_64),
        (give, 0, 0, _KILL),
        (load, 0, 0, 0),
        *(step for number in _HARMLESS for step in case(number, allow)),
        *case(_OPENAT, argument(2), *read_only),
        *case(_OPEN, argument(1), *read_only),
        *case(_FCNTL, *one_of(1, _FCNTLS)),
        *case(_IOCTL, *one_of(1, _IOCTLS)),
        *case(_PRLIMIT64, *one_of(0, (0,))),  # Of the caller: hard limits only ever fall.
        refuse,
    ]
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    return _Program(len(steps), array)


def _load(name: str, folder: str) -> None:
    """Import a package from its folder; site-packages themselves are out of reach."""
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _warm_up() -> None:
    """Let sympy load what it loads at first use, and fill its caches, before any child is made."""
    import sympy

    x = sympy.Symbol("x")
    sympy.solve(x**2 - 3 * x + 2, x)
    sympy.integrate(sympy.sin(x) * x, x)
    sympy.simplify(sympy.diff(sympy.exp(x) / x, x))
    sympy.factor(x**3 - 1)
    sympy.limit(sympy.sin(x) / x, x, 0)
    sympy.factorint(360)


def _address_space() -> int:
    """Return the bytes of address space in use, without /proc: a lower limit refuses a mapping."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 46
    while high - low > mmap.PAGESIZE:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except OSError:
            low = middle
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


class _Output(io.FileIO):
    """Standard output of a child; knows its last byte."""

    last = b""

    def write(self, data: Any, /) -> int | None:
        self.last = bytes(memoryview(data)[-1:]) or self.last
        return super().write(data)


def _describe(error: BaseException) -> str:
    """Return the last line of a traceback, with the line of the program that it comes from."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:
        message = ""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _CODE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == _CODE_NAME:
        line = error.lineno
    text = f"{name}: {message}" if message else name
    return f"{text} (line {line})" if line else text


def _execute(source: str, error_chars: int) -> int:
    """Run a program, print what it raises, and return the exit status.

    The value of a last statement that is an expression is printed when nothing else was.
    """
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    output = _Output(1, "wb", closefd=False)
    stdout = io.TextIOWrapper(output, "utf-8", errors="replace", line_buffering=True)
    sys.stdout = stdout
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "rb", closefd=False), "utf-8")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), "utf-8", errors="replace")
    status, text = _OK, ""
    try:
        tree = ast.parse(source, _CODE_NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, _CODE_NAME, "exec", dont_inherit=True), module.__dict__)
        if isinstance(last, ast.Expr):
            expression = compile(ast.Expression(last.value), _CODE_NAME, "eval", dont_inherit=True)
            value = eval(expression, module.__dict__)
            stdout.flush()
            if value is not None and not output.last:
                print(repr(value), file=stdout)
    except SystemExit as error:
        if error.code not in (None, 0):
            status, text = _ERROR, f"SystemExit: {error.code}"
    except MemoryError as error:
        # What the program holds goes first, and the limit rises to the hard one: the text of an
        # error needs memory too.
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        module.__dict__.clear()
        status, text = _OUT_OF_MEMORY, _describe(error)
    except BaseException as error:
        status, text = _ERROR, _describe(error)
    for stream in (sys.stdout, stdout):
        with contextlib.suppress(Exception):  # The program may have closed or replaced it.
            stream.flush()
    if text:
        separator = b"" if output.last in (b"", b"\n") else b"\n"
        with contextlib.suppress(OSError):
            os.write(1, separator + text[:error_chars].encode(errors="replace") + b"\n")
    return status


def _ending(status: int, late: bool) -> tuple[str, str]:
    """Return outcome and detail for an exit status, or for minus a signal."""
    if status < 0:
        if late and status == -signal.SIGKILL:
            return "time", ""
        return "crash", f"the interpreter was ended by {signal.Signals(-status).name}"
    printed = {_OK: "ok", _ERROR: "error", _OUT_OF_MEMORY: "memory"}
    if status in printed:
        return printed[status], ""
    return "error", f"the program ended with status {status}"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A child at work."""

    number: int
    pid: int
    started: float
    deadline: float
    late: bool = False


class _Server:
    def __init__(self, control: socket.socket, settings: dict[str, Any]):
        self._control = control
        self._error_chars = int(settings["error_chars"])
        self._pid = os.getpid()
        self._filter = _build_filter()
        limit = _address_space() + settings["memory_limit_mb"] * (1 << 20)
        self._address_limits = (limit, limit + (16 << 20))
        self._calls: dict[int, _Call] = {}  # By the descriptor of their process.
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Answer calls until the other end of the control socket closes."""
        while True:
            deadlines = [call.deadline for call in self._calls.values()]
            first = min(deadlines, default=math.inf)
            wait = None if first == math.inf else max(first - time.monotonic(), 0.0) * 1000.0
            for descriptor, _ in self._poll.poll(wait):
                if descriptor in self._calls:
                    self._reap(descriptor)
                elif not self._read_control():
                    for call in self._calls.values():
                        os.kill(call.pid, signal.SIGKILL)
                    return
            now = time.monotonic()
            for descriptor, call in self._calls.items():
                if call.deadline <= now:
                    os.kill(call.pid, signal.SIGKILL)
                    self._calls[descriptor] = dataclasses.replace(
                        call, deadline=math.inf, late=True
                    )

    def _read_control(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        if not message:
            return False
        command, number, *seconds = message.split()
        if command == b"run":
            self._start(int(number), float(seconds[0]), descriptors[0])
            os.close(descriptors[0])
        else:
            for call in self._calls.values():
                if call.number == int(number):
                    os.kill(call.pid, signal.SIGKILL)
        return True

    def _start(self, number: int, time_limit: float, stream: int) -> None:
        started = time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            self._send({"id": number, "fault": f"no child: {error}"})
            return
        if pid == 0:
            # Whatever happens in a child must end in it, and never come back to the server's loop.
            try:
                self._run_child(stream)
            finally:
                os._exit(_ERROR)
        process = os.pidfd_open(pid)
        self._calls[process] = _Call(number, pid, started, started + time_limit)
        self._poll.register(process, select.POLLIN)

    def _run_child(self, stream: int) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(_ERROR)
        os.dup2(0, 2)  # /dev/null: what a program writes to standard error is lost.
        os.dup2(stream, 1)
        os.closerange(3, 1 << 20)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        resource.setrlimit(resource.RLIMIT_AS, self._address_limits)
        if "numpy.random" in sys.modules:  # The module random reseeds itself after a fork.
            sys.modules["numpy.random"].seed()
        gc.enable()
        _prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(self._filter))
        source = io.FileIO(1, "rb", closefd=False)
        with io.BufferedReader(source) as reader:
            size = int.from_bytes(reader.read(8), "little")
            code = reader.read(size).decode(errors="surrogatepass")
        os._exit(_execute(code, self._error_chars))

    def _reap(self, process: int) -> None:
        call = self._calls.pop(process)
        self._poll.unregister(process)
        os.close(process)
        _, wait_status = os.waitpid(call.pid, 0)
        seconds = time.monotonic() - call.started
        outcome, detail = _ending(os.waitstatus_to_exitcode(wait_status), call.late)
        self._send({"id": call.number, "seconds": seconds, "outcome": outcome, "detail": detail})

    def _send(self, answer: dict[str, Any]) -> None:
        self._control.send(json.dumps(answer).encode())


def main() -> None:
    """Serve until the control socket closes; the settings are one JSON argument."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=0)
    # Children get descriptor 0 for their own; the control socket must not stay there.
    control = socket.socket(fileno=os.dup(control.detach()))
    os.close(0)
    os.dup2(1, 0)
    os.chdir("/")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _drop_capabilities()
    if _landlock_version() > 0:
        _restrict_files(settings["readable"])
    elif not settings["contained"]:
        raise OSError("this kernel has no Landlock (Linux 5.13), and bubblewrap is not in use")
    for name, folder in settings["packages"].items():
        _load(name, folder)
    if "sympy" in settings["packages"]:
        _warm_up()
    os.environ.clear()  # Not earlier: the number of BLAS threads is told by it.
    # The site module, which is not loaded, defines these two.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    gc.collect()
    gc.disable()
    gc.freeze()
    server = _Server(control, settings)
    control.send(b"ready")
    try:
        server.serve()
    except (BrokenPipeError, ConnectionResetError):
        return  # The other side is gone, and children die with this process.


if __name__ == "__main__":
    main()
