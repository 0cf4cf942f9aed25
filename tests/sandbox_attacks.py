"""Programs that try to get more from a sandbox than a calculation.

Each prints BROKEN when it gets what it wants. `wanted` is what the "cpython" sandbox must say
instead; `limit` the limit that must end the program there. `{secret}` is a file of the host.
"""

import dataclasses

# How CPython reports a refusal.
REFUSED = (
    r"PermissionError|FileNotFoundError|BlockingIOError|can't start new thread|"
    r"OSError: \[Errno (1|2|9|13)\]|refused"
)


@dataclasses.dataclass(frozen=True)
class Attack:
    name: str
    code: str
    wanted: str = REFUSED
    limit: str = "None"


def syscall(name: str, *arguments: object) -> Attack:
    """A raw system call, which no wrapper of Python's can soften."""
    number = SYSCALLS[name]
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = libc.syscall({', '.join(map(repr, (number, *arguments)))})\n"
        "print('refused', ctypes.get_errno()) if result == -1 else print('BROKEN', result)"
    )
    return Attack(f"raw {name}", code, r"refused (1|38)\b")


SYSCALLS = {
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "clone3": 435,
    "socket": 41,
    "socketpair": 53,
    "kill": 62,
    "tkill": 200,
    "tgkill": 234,
    "ptrace": 101,
    "personality": 135,
    "mount": 165,
    "prctl": 157,
    "keyctl": 250,
    "unshare": 272,
    "setns": 308,
    "process_vm_writev": 311,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "pidfd_open": 434,
    "openat2": 437,
    "shmget": 29,
    "setsid": 112,
    "chroot": 161,
}


def endless(name: str, code: str, *, limit: str) -> Attack:
    return Attack(name, code, "Error", limit)


# Programs that only a limit ends; each takes up to the time limit.
ENDLESS = [
    endless("loop", "while True:\n    pass", limit="time"),
    endless(
        "loop that catches everything",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        limit="time",
    ),
    endless("sleep", "import time\ntime.sleep(1000)", limit="time"),
    endless(
        "loop that ignores signals",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        limit="time",
    ),
    endless("regular expression", "import re\nre.match('(a|aa)+$', 'a' * 60 + 'b')", limit="time"),
    endless("squaring", "x = 3\nwhile True: x = x * x", limit="time|memory"),
    endless("big power", "x = 10 ** 10 ** 8", limit="time|memory"),
    endless("sum in C", "import itertools\nsum(itertools.repeat(1))", limit="time"),
    endless("closed output", "import os\nos.close(1)\nwhile True: pass", limit="time"),
    endless(
        "value of a last line", "a = []\nfor i in range(50): a = [a, a]\na", limit="time|memory"
    ),
    endless("print", "while True: print('y' * 1000)", limit="output"),
    endless(
        "print that catches everything",
        "while True:\n    try:\n        print('y' * 1000)\n    except BaseException: pass",
        limit="output",
    ),
    endless("raw output", "import os\nwhile True: os.write(1, b'y' * 65536)", limit="output"),
    endless("list", "x = []\nwhile True: x.append('y' * 10 ** 7)", limit="memory"),
    endless(
        "list of an iterator", "import itertools\nlist(itertools.count())", limit="memory|time"
    ),
]

QUICK = [
    # Memory and the interpreter.
    Attack("long string", "x = 'y' * 10 ** 10", limit="memory", wanted="MemoryError"),
    Attack("long bytes", "x = bytearray(10 ** 11)", limit="memory", wanted="MemoryError"),
    Attack("shift", "x = 1 << 10 ** 11", limit="memory", wanted="MemoryError"),
    Attack(
        "mapping",
        "import mmap\nmmap.mmap(-1, 10 ** 10)\nprint('BROKEN')",
        wanted="Cannot allocate memory",
    ),
    Attack("print of 10 MB", "print('y' * 10 ** 7)", limit="output", wanted="yyy.*Output Limit"),
    Attack("recursion", "def f(n): return f(n + 1)\nf(0)", wanted="RecursionError"),
    Attack(
        "recursion without bound",
        "import sys\nsys.setrecursionlimit(10 ** 9)\n"
        "class A:\n    def __getattr__(self, name): return getattr(self, name)\nA().x",
        wanted="SIGSEGV|MemoryError|RecursionError",
        limit="crash|memory|None",
    ),
    Attack(
        "nested source",
        "x = " + "(" * 100_000,
        wanted="SyntaxError|MemoryError",
        limit="None|memory",
    ),
    Attack("wild read", "import ctypes\nctypes.string_at(0)", wanted="SIGSEGV", limit="crash"),
    Attack("abort", "import os\nos.abort()", wanted="SIG", limit="crash"),
    Attack("digits", "int('9' * 10 ** 6)", wanted="ValueError"),
    Attack("exit", "import sys\nprint('before')\nsys.exit(3)", wanted="before\nSystemExit: 3"),
    Attack("hard exit", "import os\nos._exit(7)", wanted="status 7"),
    Attack("hard exit as if refused", "import os\nos._exit(1)", wanted="status 1"),
    Attack("input", "input()", wanted="EOFError"),
    Attack("null byte", "x = 'a\x00b'", wanted="ValueError|SyntaxError"),
    Attack("no print", "import builtins\ndel builtins.print\nprint(1)", wanted="NameError"),
    Attack("no output", "import sys\nsys.stdout = None\nraise ValueError('kept')", wanted="kept"),
    Attack(
        "error that fails", "class E(Exception):\n    def __str__(self): 1/0\nraise E", wanted="E"
    ),
    Attack("exotic error", "raise BaseException('\\ud800')", wanted="BaseException"),
    # Processes and threads.
    Attack("fork", "import os\nos.fork()\nprint('BROKEN')"),
    Attack("forkpty", "import os\nos.forkpty()\nprint('BROKEN')"),
    Attack("system", "import os\nprint('refused' if os.system('true') != 0 else 'BROKEN')"),
    Attack("exec", "import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'echo BROKEN'])"),
    Attack(
        "exec of itself",
        "import os, sys\nos.execv(sys.executable, ['p', '-c', 'print(\"BROKEN\")'])",
    ),
    Attack("subprocess", "import subprocess\nprint('BROKEN', subprocess.run(['true']))"),
    Attack("spawn", "import os\nprint('BROKEN', os.posix_spawn('/bin/true', ['true'], {}))"),
    Attack(
        "multiprocessing",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()\n"
        "print('BROKEN')",
    ),
    Attack(
        "thread",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
        "print('BROKEN')",
    ),
    Attack(
        "daemon in a new session",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nprint('BROKEN')",
    ),
    syscall("clone", 17, 0, 0, 0, 0),
    syscall("clone", 0x10000 | 0x100 | 0x800 | 0x200, 0, 0, 0, 0),
    syscall("fork"),
    syscall("vfork"),
    syscall("clone3", 0, 0),
    syscall("setsid"),
    # Signals.
    Attack("kill the parent", "import os\nos.kill(os.getppid(), 9)\nprint('BROKEN')"),
    Attack("kill everybody", "import os\nos.kill(-1, 9)\nprint('BROKEN')"),
    Attack("kill the group", "import os\nos.killpg(0, 9)\nprint('BROKEN')"),
    Attack(
        "signal by a descriptor's owner",
        "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())\nprint('BROKEN')",
    ),
    syscall("kill", 1, 9),
    syscall("tkill", 1, 9),
    syscall("tgkill", 1, 1, 9),
    syscall("pidfd_open", 1, 0),
    # The network.
    Attack("socket", "import socket\nsocket.socket()\nprint('BROKEN')"),
    Attack("local socket", "import socket\nsocket.socket(socket.AF_UNIX)\nprint('BROKEN')"),
    Attack(
        "web",
        "import urllib.request\nprint('BROKEN', urllib.request.urlopen('http://127.0.0.1:1/'))",
        wanted="Operation not permitted",
    ),
    syscall("socket", 2, 1, 0),
    syscall("socketpair", 1, 1, 0, 0),
    # Files.
    Attack("read a file of the host", "print('BROKEN', open(SECRET).read())"),
    Attack("read /etc/passwd", "print('BROKEN', open('/etc/passwd').read())"),
    Attack("list a folder of the host", "import os\nprint('BROKEN', os.listdir('/root'))"),
    Attack("write a file of the host", "open(SECRET, 'a').write('x')\nprint('BROKEN')"),
    Attack("write a new file", "open(SECRET + '.new', 'w')\nprint('BROKEN')"),
    Attack("write where it stands", "open('new', 'w')\nprint('BROKEN')"),
    Attack("write in /dev/shm", "open('/dev/shm/new', 'w')\nprint('BROKEN')"),
    Attack("write beside the interpreter", "import os\nopen(os.__file__, 'a')\nprint('BROKEN')"),
    Attack("temporary file", "import tempfile\ntempfile.TemporaryFile()\nprint('BROKEN')"),
    Attack(
        "nameless file",
        "import os\nos.open('/', os.O_TMPFILE | os.O_RDWR)\nprint('BROKEN')",
    ),
    Attack("make a folder", "import os\nos.mkdir(SECRET + '.folder')\nprint('BROKEN')"),
    Attack("remove", "import os\nos.unlink(SECRET)\nprint('BROKEN')"),
    Attack("rename", "import os\nos.rename(SECRET, SECRET + '.old')\nprint('BROKEN')"),
    Attack("link", "import os\nos.link(SECRET, SECRET + '.link')\nprint('BROKEN')"),
    Attack("symbolic link", "import os\nos.symlink('/', SECRET + '.link')\nprint('BROKEN')"),
    Attack("change the mode", "import os\nos.chmod(SECRET, 0o777)\nprint('BROKEN')"),
    Attack("truncate", "import os\nos.truncate(SECRET, 0)\nprint('BROKEN')"),
    Attack("set times", "import os\nos.utime(SECRET)\nprint('BROKEN')"),
    Attack("named pipe", "import os\nos.mkfifo(SECRET + '.pipe')\nprint('BROKEN')"),
    Attack(
        "shared memory",
        "from multiprocessing.shared_memory import SharedMemory as S\n"
        "S('copc', create=True, size=8)\nprint('BROKEN')",
        wanted=REFUSED + "|ImportError",
    ),
    Attack("read /proc", "print('BROKEN', open('/proc/self/maps').read())"),
    Attack(
        "write the memory of the server",
        "import os\nos.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)\nprint('BROKEN')",
    ),
    Attack(
        "read the memory of the server",
        "import os\nos.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY)\nprint('BROKEN')",
    ),
    Attack(
        "descriptors of the server",
        "import os\nprint('BROKEN', os.listdir(f'/proc/{os.getppid()}/fd'))",
    ),
    syscall("memfd_create", 0, 0),
    syscall("openat2", -100, 0, 0, 24),
    syscall("shmget", 0, 4096, 0o1600),
    syscall("mount", 0, 0, 0, 0, 0),
    syscall("chroot", 0),
    # Rights.
    Attack(
        "raise the limit of memory",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('BROKEN')",
        wanted="ValueError|PermissionError",
    ),
    Attack(
        "raise the limit of files",
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\nprint('BROKEN')",
        wanted="ValueError|PermissionError",
    ),
    Attack(
        "limit the server",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\n"
        "print('BROKEN')",
    ),
    Attack("choose processors", "import os\nos.sched_setaffinity(0, {0})\nprint('BROKEN')"),
    Attack("be more important", "import os\nos.setpriority(0, 0, -20)\nprint('BROKEN')"),
    Attack("be somebody else", "import os\nos.setuid(1)\nprint('BROKEN')"),
    syscall("ptrace", 16, 1, 0, 0),
    syscall("process_vm_writev", 1, 0, 0, 0, 0, 0),
    syscall("prctl", 4, 1, 0, 0, 0),
    syscall("personality", 0x0040000),
    syscall("unshare", 0x10000000),
    syscall("setns", 0, 0),
    syscall("bpf", 0, 0, 0),
    syscall("userfaultfd", 0),
    syscall("io_uring_setup", 1, 0),
    syscall("keyctl", 0, 0, 0),
    Attack(
        "call of the other ABI",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print('refused' if libc.syscall(0x40000000 + 57) == -1 else 'BROKEN')",
    ),
    Attack(
        "call of 32 bits",
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        # mov eax, 2 (fork); int 0x80; ret
        "page.write(bytes.fromhex('b802000000cd80c3'))\n"
        "run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "print('BROKEN', run())",
        wanted="SIGSYS",
        limit="crash",
    ),
    # What the server and other calls hold.
    Attack(
        "descriptors",
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'kill 1')\n"
        "    except OSError: continue\n"
        "    print('BROKEN', fd)\n"
        "print('refused')",
    ),
    Attack(
        "objects of the server",
        "import gc, socket\nfor found in gc.get_objects():\n"
        "    if isinstance(found, socket.socket): found.send(b'{}'); print('BROKEN')\n"
        "import sys\nframe = sys._getframe()\n"
        "while frame:\n"
        "    for found in list(frame.f_locals.values()):\n"
        "        if hasattr(found, '_control'): found._control.send(b'ready'); print('BROKEN')\n"
        "    frame = frame.f_back",
    ),
    Attack("environment", "import os\nprint('BROKEN' if os.environ else 'refused')"),
    Attack("other packages", "import psutil\nprint('BROKEN')", wanted="ModuleNotFoundError"),
]
