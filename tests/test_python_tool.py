"""Sandboxes: what programs give, what attacks do not, and what faults become."""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sandbox_attacks import ENDLESS, QUICK

from copc_jax.tools.python import (
    CPythonSandbox,
    Limits,
    SandboxError,
    SandboxFusion,
    cut,
    make_sandbox,
)

TESTS = Path(__file__).parent
LINUX = sys.platform == "linux" and os.uname().machine == "x86_64"
needs_linux = pytest.mark.skipif(not LINUX, reason="sandbox 'cpython' needs Linux on x86-64")
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)
SANDBOXES = [
    "monty",
    pytest.param("cpython", marks=needs_linux),
    pytest.param("cpython in bubblewrap", marks=[needs_linux, needs_bubblewrap]),
]
LIMITS = Limits(time_s=1.0, memory_mb=64, output_chars=400, processes=4)


def build(name, limits=LIMITS):
    if name == "monty":
        return make_sandbox(
            "monty",
            time_limit_s=limits.time_s,
            memory_limit_mb=limits.memory_mb,
            output_limit_chars=limits.output_chars,
            processes=limits.processes,
        )
    return CPythonSandbox(limits, bubblewrap=name != "cpython")


class Box:
    """A started sandbox with an event loop of its own, for tests without one."""

    def __init__(self, name, limits=LIMITS):
        self.name = name
        self.loop = asyncio.new_event_loop()
        self.sandbox = build(name, limits)
        self.loop.run_until_complete(self.sandbox.start())

    def run(self, code):
        return self.loop.run_until_complete(self.sandbox.run(code))

    def run_all(self, codes):
        async def gather():
            return await asyncio.gather(*(self.sandbox.run(code) for code in codes))

        return self.loop.run_until_complete(gather())

    def close(self):
        self.loop.run_until_complete(self.sandbox.close())
        self.loop.close()


@pytest.fixture(scope="module", params=SANDBOXES)
def box(request):
    before = set(psutil.Process().children(recursive=True))
    found = Box(request.param)
    yield found
    found.close()
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "secret.txt"
    path.write_text("BROKEN: the gold answers")
    return path


# Programs of the kinds that solutions of mathematics problems are, and what they print.
PROGRAMS = {
    "loop": ("s = 0\nfor i in range(1, 101):\n    s += i * i\nprint(s)", "338350"),
    "function": (
        "def cost(n, price):\n    return n * price * (0.9 if n > 10 else 1)\nprint(cost(12, 5))",
        "54.0",
    ),
    "math": ("import math\nprint(math.gcd(84, 36), math.comb(10, 3), math.isqrt(99))", "12 120 9"),
    "itertools": (
        "from itertools import permutations\n"
        "print(sum(1 for p in permutations(range(5)) if p[0] < p[-1]))",
        "60",
    ),
    "big integers": ("print(2 ** 200 % 10 ** 20)", str(2**200 % 10**20)),
    "class": (
        "from functools import lru_cache\nfrom collections import Counter\n"
        "@lru_cache(maxsize=None)\ndef ways(k):\n"
        "    return 1 if k < 2 else ways(k - 1) + ways(k - 2)\n"
        "class Walk:\n    def __init__(self, n):\n        self.n = n\n"
        "    def count(self):\n        return ways(self.n)\n"
        "print(Walk(30).count(), Counter('banana').most_common(1))",
        "1346269 [('a', 3)]",
    ),
    "fractions": ("from fractions import Fraction\nprint(Fraction(1, 3) + Fraction(1, 6))", "1/2"),
    "sympy, an equation": (
        "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))",
        "[2, 3]",
    ),
    "sympy, calculus": (
        "import sympy as sp\nx = sp.Symbol('x')\n"
        "print(sp.integrate(x * sp.exp(x), x), sp.diff(sp.sin(x)**2, x))",
        "(x - 1)*exp(x) 2*sin(x)*cos(x)",
    ),
    "numpy": (
        "import numpy as np\nprint(np.linalg.det(np.array([[1., 2.], [3., 4.]])).round(6))",
        "-2.0",
    ),
}
BEYOND_MONTY = {"fractions", "sympy, an equation", "sympy, calculus", "numpy"}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_print_their_results(box, kind):
    code, printed = PROGRAMS[kind]
    found = box.run(code)
    if box.name == "monty" and kind in BEYOND_MONTY:
        assert not found.ok and found.limit is None
        assert re.fullmatch(
            r"(ModuleNotFoundError: No module named '\w+'|NotImplementedError: Wildcard imports .+)"
            r" \(line 1\)",
            found.text,
        )
    else:
        assert (found.text, found.ok, found.limit) == (printed, True, None)
        assert found.seconds > 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("x = 'a'\nx", "'a'"),
        ("x = [1,\n     2]\nx  # the answer", "[1, 2]"),
        ("print('shown')\n2", "shown"),
        ("x = 3", ""),
        ("x = 3\n# and no more", ""),
        ("# nothing", ""),
        ("None", ""),
        ("x = '''\nabc\n'''", ""),
        ("for i in range(2): i", ""),
        ("print('no line end', end='')", "no line end"),
        ("print('  indented')", "  indented"),
        ("print('é ✓ 数')", "é ✓ 数"),
        ("import sys\nprint('lost', file=sys.stderr)\nprint('kept')", "kept"),
        ("", ""),
    ],
)
def test_a_program_shows_its_output_or_its_last_value(box, code, text):
    found = box.run(code)
    assert (found.text, found.ok, found.limit) == (text, True, None)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("print('before')\n[][1]", "before\nIndexError: list index out of range (line 2)"),
        ("print('a', end='')\nfoo()", "a\nNameError: name 'foo' is not defined (line 2)"),
        (
            "def f(x):\n    return g(x)\n\ndef g(x):\n    return x / 0\n\nf(1)",
            "ZeroDivisionError: division by zero (line 5)",
        ),
        ("raise ValueError('two\\nlines')", "ValueError: two\nlines (line 1)"),
        ("import pandas", "ModuleNotFoundError: No module named 'pandas' (line 1)"),
    ],
)
def test_an_error_is_the_last_line_of_its_traceback(box, code, text):
    found = box.run(code)
    assert (found.text, found.ok, found.limit) == (text, False, None)


def test_an_error_in_text_that_a_program_parses_happens_once(box):
    found = box.run("print('once')\neval('1 +')")
    assert re.fullmatch(r"once\nSyntaxError: .+ \(line 2\)", found.text)


@pytest.mark.parametrize("code", ["x = = 1", "print('a')\nf(1", "if True:\nprint(1)", "x = 'abc"])
def test_a_program_that_does_not_parse_runs_not_at_all(box, code):
    found = box.run(code)
    assert re.fullmatch(r"(Syntax|Indentation)Error: .+ \(line \d\)", found.text)
    assert not found.ok and found.limit is None


def test_monty_names_what_it_does_not_support():
    box = Box("monty")
    try:
        found = box.run("def f():\n    yield 1\nprint(list(f()))")
        assert "not yet support yield" in found.text and "(line 2)" in found.text
        assert not found.ok
        assert "not yet support class inheritance" in box.run("class A(int): pass").text
    finally:
        box.close()


def test_long_output_keeps_both_ends(box):
    found = box.run("print('a' * 300 + '数' * 300)")
    assert found.text == "a" * 200 + "..." + "数" * 200
    assert found.ok
    # What went wrong is always read whole.
    found = box.run("print('a' * 1000)\nraise ValueError('b' * 50)")
    assert found.text.endswith("aaa\nValueError: " + "b" * 50 + " (line 2)")
    assert len(found.text) == 403
    found = box.run("raise ValueError('b' * 1000)")
    assert found.text == "ValueError: " + "b" * 188


def test_cutting_keeps_text_within_the_limit():
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abc...efg"
    assert cut("", 40) == ""


def check_attack(box, attack, found):
    assert "BROKEN" not in found.text, attack.name
    assert len(found.text) <= 403
    if box.name != "monty":
        assert re.search(attack.wanted, found.text, flags=re.DOTALL), (attack.name, found)
        assert re.fullmatch(attack.limit, str(found.limit)), (attack.name, found)


@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
def test_attacks_get_nothing(box, attack, secret):
    found = box.run(attack.code.replace("SECRET", repr(str(secret))))
    check_attack(box, attack, found)
    assert secret.read_text() == "BROKEN: the gold answers"
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]
    assert box.run("print(6 * 7)").text == "42"


def test_programs_without_end_are_ended_beside_others(box):
    """All at once: the short programs between get their own answers all the same."""
    short = [f"print({i})" for i in range(len(ENDLESS))]
    codes = [
        code for attack, other in zip(ENDLESS, short, strict=True) for code in (attack.code, other)
    ]
    found = box.run_all(codes)
    for attack, execution in zip(ENDLESS, found[::2], strict=True):
        check_attack(box, attack, execution)
    assert [execution.text for execution in found[1::2]] == [str(i) for i in range(len(short))]
    assert psutil.Process().memory_info().rss < 4 << 30


def test_output_before_the_limit_is_kept(box):
    found = box.run("print('before')\nwhile True: pass")
    assert (found.text, found.ok, found.limit) == ("before\nTimeout Error", False, "time")


def test_every_call_starts_from_nothing(box):
    box.run("import math\nmath.pi = 3\nx = 1\nmath.left = 1")
    assert box.run("import math\nprint(math.pi > 3.1, hasattr(math, 'left'))").text == "True False"
    assert box.run("print(x)").text == "NameError: name 'x' is not defined (line 1)"
    draws = {box.run("import random\nprint(random.random())").text for _ in range(3)}
    assert len(draws) == 3


def test_cpython_is_the_interpreter_of_the_session_with_numpy(box):
    if box.name == "monty":
        pytest.skip("monty has neither")
    box.run("import builtins\nbuiltins.left = 1")
    assert box.run("import builtins\nprint(hasattr(builtins, 'left'))").text == "False"
    draws = {box.run("import numpy as np\nprint(np.random.rand())").text for _ in range(3)}
    assert len(draws) == 3
    assert box.run("import sys\nprint(sys.version)").text == sys.version
    assert box.run("exit()").ok and box.run("import sys; sys.exit(0)").ok
    # Memory is counted beyond what the server takes, numpy included.
    assert box.run("import numpy as np\nprint(np.ones(4 << 20).sum())").text == "4194304.0"
    found = box.run("import numpy as np\nnp.ones(16 << 20)")
    assert found.limit == "memory" and "Unable to allocate 128. MiB" in found.text


def test_many_calls_in_flight_keep_their_own_results(box):
    found = box.run_all([f"print({i}, 'x' * {i % 7})" for i in range(40)])
    assert [execution.text for execution in found] == [
        f"{i} {'x' * (i % 7)}".rstrip() for i in range(40)
    ]


def test_a_cancelled_call_ends_its_program(box):
    async def cancel(sandbox):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run("while True: pass"), 0.1)
        # All slots are free again, also when every call before was given up.
        for _ in range(LIMITS.processes):
            task = asyncio.create_task(sandbox.run("while True: pass"))
            await asyncio.sleep(0.02)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return await sandbox.run("print('next')")

    found = box.loop.run_until_complete(cancel(box.sandbox))
    assert found.text == "next"


def descendants(name):
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if any(name in part for part in process.cmdline())
    ]


def test_lost_workers_are_replaced(box):
    """A killed server is a fault of the sandbox, and the call after it works."""

    async def lose(sandbox):
        task = asyncio.create_task(sandbox.run("while True: pass"))
        await asyncio.sleep(0.2)
        for process in descendants("monty" if box.name == "monty" else "python_fork_server"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(SandboxError):
            found = await task
            assert box.name == "monty" and found.limit == "crash"
        return await sandbox.run("print('again')")

    found = box.loop.run_until_complete(lose(box.sandbox))
    assert found.text == "again"


@pytest.mark.parametrize("name", SANDBOXES)
def test_nothing_outlives_a_killed_process(name, tmp_path):
    program = (
        "import asyncio, psutil, sys\n"
        "from test_python_tool import build\n"
        "async def main():\n"
        f"    sandbox = build({name!r})\n"
        "    await sandbox.start()\n"
        "    task = asyncio.create_task(sandbox.run('while True: pass'))\n"
        "    await asyncio.sleep(0.3)\n"
        "    found = psutil.Process().children(recursive=True)\n"
        "    print(*(process.pid for process in found), flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        left = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(left) >= 1
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_sandbox_can_be_opened_again():
    sandbox = make_sandbox("monty")

    async def once():
        async with sandbox:
            return (await sandbox.run("print(1)")).text

    assert [asyncio.run(once()), asyncio.run(once())] == ["1", "1"]


@needs_linux
def test_cpython_goes_on_without_a_bubblewrap_that_does_not_work(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    async def ask(sandbox):
        async with sandbox:
            return (await sandbox.run("print('confined')")).text

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(ask(make_sandbox("cpython"))) == "confined"
    assert "No permissions to create a new namespace" in caplog.text
    with pytest.raises(SandboxError, match="No permissions to create a new namespace"):
        asyncio.run(ask(CPythonSandbox(LIMITS, bubblewrap=True)))


def test_a_machine_that_cannot_confine_is_told_so(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SandboxError, match=r"Linux on x86-64 only, not on .* on aarch64"):
        make_sandbox("cpython")


@needs_linux
def test_missing_programs_and_packages_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="bubblewrap is not installed"):
        CPythonSandbox(LIMITS, bubblewrap=True)
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(SandboxError, match=r"pip install 'copc-jax\[math\]'"):
        make_sandbox("monty")


def test_a_monty_without_its_program_is_a_sandbox_error(monkeypatch, tmp_path):
    monkeypatch.setenv("MONTY_BIN", str(tmp_path / "missing"))
    with pytest.raises(SandboxError, match="monty did not start"):
        asyncio.run(make_sandbox("monty").run("1"))


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("docker", {}, "unknown sandbox 'docker'; known are monty, cpython, sandbox-fusion"),
        ("monty", {"url": "http://a"}, "takes no url"),
        ("sandbox-fusion", {}, "needs the url"),
        ("sandbox-fusion", {"url": "localhost:8080"}, "must start with http"),
        ("monty", {"time_limit_s": 0}, "time_s must be positive, not 0"),
        ("monty", {"time_limit_s": float("nan")}, "time_s must be positive, not nan"),
        ("monty", {"memory_limit_mb": -1}, "memory_mb must be positive, not -1"),
        ("monty", {"processes": 0}, "processes must be positive, not 0"),
        ("monty", {"output_limit_chars": 10}, "output_chars must be at least 40, not 10"),
    ],
)
def test_bad_settings_are_refused_at_once(name, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_sandbox(name, **settings)


@pytest.fixture(scope="module")
def fusion_url():
    process = subprocess.Popen(
        [sys.executable, TESTS / "sandbox_fusion_server.py"], stdout=subprocess.PIPE, text=True
    )
    with process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


def ask_fusion(url, *codes, limits=LIMITS):
    async def ask():
        async with SandboxFusion(url, limits, pause_s=0.01) as sandbox:
            return await asyncio.gather(*(sandbox.run(code) for code in codes))

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["", "/", "/run_code"])
def test_fusion_sends_the_program_and_its_limits(fusion_url, path):
    limits = Limits(time_s=3.0, memory_mb=128, output_chars=1000)
    (found,) = ask_fusion(fusion_url + path, "echo 'é'", limits=limits)
    assert json.loads(found.text) == {
        "code": "echo 'é'",
        "language": "python",
        "compile_timeout": 3.0,
        "run_timeout": 3.0,
        "memory_limit_MB": 128,
    }
    assert (found.ok, found.limit, found.seconds) == (True, None, 0.25)


@pytest.mark.parametrize(
    ("code", "text", "ok", "limit"),
    [
        ("success", "hi", True, None),
        ("failed", "before\nValueError: math domain error (line 3)", False, None),
        ("memory", "MemoryError", False, "memory"),
        ("silent", "the program ended with status 9", False, None),
        ("time", "before\nTimeout Error", False, "time"),
        ("long", "é" * 200 + "..." + "é" * 200, True, None),
        ("busy", "late", True, None),
        ("dropped", "try 2", True, None),
    ],
)
def test_fusion_answers_become_executions(fusion_url, code, text, ok, limit):
    (found,) = ask_fusion(fusion_url, code)
    assert (found.text, found.ok, found.limit) == (text, ok, limit)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("fault", "SandboxError: no pod"),
        ("garbage", "no answer of SandboxFusion.*<html>"),
        ("shape", "no answer of SandboxFusion"),
        ("unknown", "unknown status 'Partial'"),
        ("504", r"504.*\(4 tries\)"),
        ("500", r"500.*\(1 tries\)"),
    ],
)
def test_fusion_faults_are_sandbox_errors(fusion_url, code, complaint):
    with pytest.raises(SandboxError, match=complaint):
        ask_fusion(fusion_url, code)


def test_only_504_and_lost_connections_are_tried_again(fusion_url):
    for code in ("fault", "500"):
        before = int(ask_fusion(fusion_url, f"count {code}")[0].text)
        with pytest.raises(SandboxError):
            ask_fusion(fusion_url, code)
        assert int(ask_fusion(fusion_url, f"count {code}")[0].text) == before + 1


def test_fusion_answers_stay_with_their_calls(fusion_url):
    found = ask_fusion(fusion_url, *(f"slow {i}" for i in range(8)))
    assert [execution.text for execution in found] == [str(i) for i in range(8)]


def test_a_closed_sandbox_works_in_another_event_loop(fusion_url):
    sandbox = SandboxFusion(fusion_url, Limits(processes=1))

    async def ask():
        async with sandbox:
            found = await asyncio.gather(*(sandbox.run(f"slow {i}") for i in range(3)))
            return [execution.text for execution in found]

    assert [asyncio.run(ask()), asyncio.run(ask())] == [["0", "1", "2"]] * 2


def test_a_closed_port_is_a_sandbox_error():
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9/run_code.*\(4 tries\)"):
        ask_fusion("http://127.0.0.1:9", "success")
