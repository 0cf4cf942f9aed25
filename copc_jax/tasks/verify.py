r"""The reward of the math task: is the boxed answer the right one?

The reward is 1.0 for a verified answer and 0.0 for everything else. What is verified is the content
of the last complete `\boxed{}` of the sampled text, and nothing besides.

A gold answer that is a plain number is decided here, exactly, in microseconds. Plain numbers are
integers, decimals, fractions, mixed numbers, scientific notation, and any of them with a sign,
thousands separators, a percent sign, a currency, a unit or a leading `x =`. The answer must be a
plain number as well. Arithmetic that is left undone is no answer: the box may not hold the question
again, so `123*456`, `7!`, `2^{10}` and `\frac{10}{5}` are wrong for the integers that they equal.
Equal means equal, with two exceptions. The noise of floating point, a decimal of at least 12 digits
that is off by less than 1e-12 of the value, is forgiven: 0.30000000000000004 is 0.3, and 0.333 is
not 1/3. A percent sign may be left out or worked out on one side: 25% is 25 and 0.25, and 0.25 is
not 25. Units may be left out; two different units are wrong. A final full stop is dropped.

Numbers in a base such as 4343_6 must have the same digits; the base may be left out, and another
one is wrong. Ratios and times (8:30) and words are compared as text; words ignore case, single
letters do not, and a choice may be in parentheses.

Every other pair goes to math-verify in a process of its own, which is killed and replaced when it
takes too long. Expressions may then be written in any equivalent way, `\sqrt{12}` for
`2\sqrt{3}`, since their simplest form is a matter of taste; `y = 2x + 1` is `2x + 1`. Numeric
expressions must agree to 1e-12 of their value, so 2^{-98} is not 2^{-99}, and 6.283185307179586 is
`2\pi` where 6.2832 is not. Lists without parentheses are sets. The comparison is not symmetric: for
the gold answer 0 < x < 3 the interval (0, 3) is right, for an interval an inequality is wrong.
Unicode signs such as √ and π are read as LaTeX.

This file is also the program of the worker process. It runs as a script and imports the standard
library alone, so that a worker costs neither JAX nor the caller's main module.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

_LOG = logging.getLogger(__name__)
_LONGEST = 400  # Characters of an answer; longer ones are no answers.

# --------------------------------------------------------------------------------------------------
# The box

_BOX_PIECES = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<brace>\{)"
    r"|\\boxed\s+(?P<bare>-?\d[\d,]*(?:\.\d+)?)"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)


def extract_boxed(sampled: str | Sequence[str]) -> str | None:
    r"""Return the content of the last complete box in what the policy sampled, or None.

    Turns are searched one by one, from the last, so no box spans tool text. `\fbox{}` is a box too,
    and so is a number after `\boxed` without braces. Of boxes inside one another the innermost
    counts. An unclosed box after a complete one changes nothing; an empty last box is no answer.

    Args:
        sampled: text that the policy wrote, as one string or one a turn; neither prompt nor tool
            text.
    """
    turns = [sampled] if isinstance(sampled, str) else sampled
    for turn in reversed(turns):
        last, content = -1, ""
        opened: list[tuple[int, int]] = []  # Start of a box or -1 for a brace, start of content.
        for match in _BOX_PIECES.finditer(turn):
            if match["brace"]:
                opened.append((match.start(), match.end()))
            elif match["open"]:
                opened.append((-1, match.end()))
            elif match["bare"]:
                last, content = match.start(), match["bare"]
            elif match["close"] and opened:
                start, inside = opened.pop()
                if start > last:
                    last, content = start, turn[inside : match.start()]
        if last >= 0:
            return content.strip() or None
    return None


# --------------------------------------------------------------------------------------------------
# Exact answers

_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}",
        "\xa0": " ", "~": " ", "\u202f": " ",
    }
)  # fmt: skip
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]|\\pi\b))")
_WRAPPERS = re.compile(
    r"(?:\\(?:text|mathrm|textrm|mbox|textbf|mathbf|boldsymbol|textit|mathit)\s*)?\{([^{}]*)\}"
    r"|\*\*(.*)\*\*|\\\((.*)\\\)|\\\[(.*)\\\]",
    re.DOTALL,
)


@functools.lru_cache(maxsize=4096)
def _clean(text: str) -> str:
    """Return LaTeX without spacing, dollar signs, a font around everything, and a full stop."""
    text = text.translate(_SIGNS)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{next(filter(None, m.groups()), '')}}}", text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text).replace("{,}", ",")
    text = re.sub(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b|displaystyle\b)", " ", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).replace(r"\%", "%")
    text = re.sub(r"(?<!\\)\$", "", text) if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0 else text
    previous = None
    while previous != text:
        previous, text = text, text.strip()
        if whole := _WRAPPERS.fullmatch(text):
            text = next(filter(None, whole.groups()), "")
        if text.endswith(".") and len(text) > 1:
            text = text[:-1]
    return text


_PLAIN = r"(?:\d{1,3}(?:[,\ ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_UNITS = (
    "percent|degrees?|dollars?|cents?|euros?|pounds?|mm|cm|km|inch(?:es)?|feet|foot|ft|yards?|miles?"
    "|met(?:er|re)s?|kg|grams?|lit(?:er|re)s?|seconds?|sec|minutes?|min|hours?|days?|weeks?|months?"
    "|years?|mph|units?|people|students?|ways?|points?"
)
_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(
    rf"""
    (?:(?P<variable>[A-Za-z])\s*=\s*)?
    (?P<sign>[+-]?)\s*
    (?:(?:\\?[$€£])\s*)?
    (?:
      (?:(?P<whole>\d+)\s*)?
        \\frac\s*(?:\{{\s*(?P<top>[+-]?{_PLAIN})\s*\}}|(?P<top_digit>\d))
        \s*(?:\{{\s*(?P<bottom>[+-]?{_PLAIN})\s*\}}|(?P<bottom_digit>\d))
      | (?:(?P<slash_whole>\d+)\s+)?(?P<slash_top>{_PLAIN})\s*/\s*(?P<slash_bottom>-?{_PLAIN})
      | (?P<decimal>{_PLAIN})
        (?:[eE](?P<e>[+-]?\d{{1,3}})
          |\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*
            (?:\{{\s*(?P<power>[+-]?\d{{1,3}})\s*\}}|(?P<power_digit>\d)))?
    )
    \s*
    (?:(?P<percent>%|\\text\s*\{{\s*(?:%|percent)\s*\}}|percent)
      |\^\s*(?:\\circ|\{{\s*\\circ\s*\}})
      |(?:\\(?:text|mathrm|textrm|mbox)\s*\{{\s*(?P<unit>[A-Za-z][A-Za-z ./-]*?)\.?\s*\}}
         |(?P<bare_unit>{_UNITS}))
       (?:\s*\^\s*\{{?\s*(?P<unit_power>\d)\s*\}}?)?
    )?
    """,
    re.VERBOSE,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Number:
    value: Fraction
    digits: int  # Of a decimal with point or exponent, else 0.
    undone: bool  # A division that has an integer result.
    percent: bool
    unit: str
    variable: str


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", text).rstrip("."))


@functools.lru_cache(maxsize=4096)
def _number(text: str) -> _Number | None:
    """Parse a plain number, or return None for everything else."""
    if len(text) > _LONGEST:
        return None
    if _INTEGER.fullmatch(text):  # The common case, ten times as fast.
        return _Number(Fraction(int(text)), 0, False, False, "", "")
    match = _NUMBER.fullmatch(_clean(text))
    if match is None:
        return None
    top = match["top"] or match["top_digit"] or match["slash_top"]
    bottom = match["bottom"] or match["bottom_digit"] or match["slash_bottom"]
    digits, undone = 0, False
    if top is not None and bottom is not None:
        if not _fraction(bottom):
            return None
        value = _fraction(top) / _fraction(bottom)
        undone = value.denominator == 1
        value += int(match["whole"] or match["slash_whole"] or 0)
    else:
        exponent = match["e"] or match["power"] or match["power_digit"]
        value = _fraction(match["decimal"]) * Fraction(10) ** int(exponent or 0)
        if exponent or "." in match["decimal"]:
            digits = len(re.sub("[., ]", "", match["decimal"]).lstrip("0"))
    unit = (match["unit"] or match["bare_unit"] or "").strip().lower().rstrip("s")
    return _Number(
        -value if match["sign"] == "-" else value,
        digits,
        undone,
        bool(match["percent"]),
        unit + (match["unit_power"] or ""),
        match["variable"] or "",
    )


def _equal(answer: _Number, gold: _Number) -> bool:
    for name in ("unit", "variable"):
        mine, right = getattr(answer, name), getattr(gold, name)
        if mine and right and mine != right:
            return False
    if answer.undone and not gold.undone:
        return False
    values = [gold.value]
    if answer.percent != gold.percent:
        values.append(gold.value * 100 if answer.percent else gold.value / 100)
    if answer.value in values:
        return True
    return answer.digits >= 12 and any(
        abs(answer.value - value) <= min(abs(value) * Fraction(1, 10**12), Fraction(1, 10**6))
        for value in values
    )


_RATIO = re.compile(r"\d\s*:\s*\d")
_IN_BASE = re.compile(r"(-?[0-9][0-9A-Za-z]*)_(\{.+\}|[0-9])")
_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*\)?")
_SHORT_WORDS = {"yes", "no", "odd", "none"}


def _word(text: str) -> str | None:
    """Return the normalized words that text consists of, or None for anything else."""
    cleaned = _clean(text)
    if letter := _LETTER.fullmatch(cleaned):
        return letter[1]
    if not re.fullmatch(r"[A-Za-z]+(?:(?:[ .,']+|-)[A-Za-z]+)*", cleaned):
        return None
    return " ".join(cleaned.casefold().split())


def _is_word(gold: str) -> bool:
    """Tell words from products of variables: by length, or by a font command around them."""
    word = _word(gold)
    if word is None:
        return False
    plain = word == " ".join(gold.casefold().strip(" .$").split())
    return not plain or len(word) == 1 or word in _SHORT_WORDS or bool(re.search("[a-z]{4}", word))


def _in_base(squeezed: str) -> tuple[str, str] | None:
    r"""Return digits and base of a number such as 4343_6 or 4343_{\text{six}}, without spaces."""
    match = _IN_BASE.fullmatch(squeezed)
    return (match[1], re.sub(r"\\text|[{}]", "", match[2])) if match else None


def verify_exactly(answer: str, gold: str) -> bool | None:
    """Decide what needs no algebra system; None leaves the decision to math-verify."""
    if not answer.strip() or len(answer) > _LONGEST:
        return False
    number = _number(gold)
    if number is not None:
        mine = _number(answer)
        return mine is not None and _equal(mine, number)
    squeezed = [re.sub(r"\s", "", _clean(text)) for text in (answer, gold)]
    if right := _in_base(squeezed[1]):
        # math-verify ignores the base.
        return squeezed[0] == right[0] or _in_base(squeezed[0]) == right
    if any(_RATIO.search(text) for text in squeezed):
        return squeezed[0] == squeezed[1]
    if _is_word(gold):
        return _word(answer) == _word(gold)
    return True if squeezed[0] == squeezed[1] else None


# --------------------------------------------------------------------------------------------------
# Worker processes


class VerifierError(RuntimeError):
    """The verifier cannot work at all, whatever the answer."""


class _NoReplyError(Exception):
    """A worker did not answer in time, or died."""


class _Worker:
    """One process that compares pairs, one after the other."""

    def __init__(self, start_timeout: float):
        if importlib.util.find_spec("math_verify") is None:
            raise VerifierError("math-verify is not installed: install copc-jax[math]")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._ready_by = time.monotonic() + start_timeout
        self._ready = False
        self._received = b""
        # -P keeps this folder, which holds a math.py, off the worker's path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def ask(self, request: dict[str, Any], timeout: float) -> bool | None:
        """Send one request and return the verdict, or None when the worker gave up in time.

        Raises:
            _NoReplyError: no reply in time, or none at all.
            VerifierError: the process never started.
        """
        if not self._ready:
            try:
                self._read(self._ready_by)
            except _NoReplyError as error:
                self._errors.seek(0)
                tail = self._errors.read().decode(errors="replace").strip().splitlines()[-5:]
                raise VerifierError(
                    "a verifier process did not start: " + (" / ".join(tail) or str(error))
                ) from error
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise _NoReplyError("died") from error
        return self._read(time.monotonic() + timeout)

    def _read(self, deadline: float) -> Any:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise _NoReplyError("timed out")
            received = self._process.stdout.read(65536)
            if not received:
                raise _NoReplyError("died")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


class Verifier:
    """Compares answers with gold answers; safe to share between threads and event loops.

    Processes start when the first pair needs one. A comparison that takes too long counts as wrong.
    One whose process dies is made again in a new one, as most die of what no answer can help, and
    counts as wrong when that dies, too. `timeouts` and `crashes` count both; growth is logged.
    """

    def __init__(self, processes: int = 1, *, timeout: float = 6.0, start_timeout: float = 120.0):
        """Set the limits; nothing starts yet.

        Args:
            processes: comparisons that run at a time.
            timeout: seconds until a comparison is killed. math-verify gives up on each parse and
                each comparison after 2 s by itself, except inside long integer arithmetic.
            start_timeout: seconds that a process may take to start.

        Raises:
            ValueError: a number is not positive.
        """
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        if timeout <= 0 or start_timeout <= 0:
            raise ValueError(f"time-outs must be more than 0: {timeout}, {start_timeout}")
        self.timeouts = 0
        self.crashes = 0
        self._counting = threading.Lock()
        self._processes = processes
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._closed = False
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="verifier")

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def verify(self, answer: str, gold: str) -> bool:
        """Return whether the content of a box equals a gold answer.

        Raises:
            VerifierError: no process can be started, or the verifier is closed.
        """
        exact = verify_exactly(answer, gold)
        if exact is not None:
            return exact
        return self._ask({"answer": _clean(answer), "gold": _clean(gold)})

    async def averify(self, answer: str, gold: str) -> bool:
        """Do the same without blocking the event loop."""
        exact = verify_exactly(answer, gold)
        if exact is not None:
            return exact
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.verify, answer, gold)

    def parses(self, gold: str) -> bool:
        """Return whether a gold answer can be compared at all."""
        if _number(gold) or _is_word(gold) or _RATIO.search(_clean(gold)):
            return True
        return self._ask({"gold": _clean(gold)})

    def _ask(self, request: dict[str, Any]) -> bool:
        worker = self._idle.get()
        try:
            if self._closed:
                raise VerifierError("the verifier is closed")
            for _ in range(2):
                worker = worker or _Worker(self._start_timeout)
                try:
                    verdict = worker.ask(request, self._timeout)
                    if verdict is None:
                        self._count("timed out", request)
                    return bool(verdict)
                except _NoReplyError as error:
                    what = str(error)
                except VerifierError:
                    worker.kill()
                    worker = None
                    raise
                self._count(what, request)
                worker.kill()
                worker = None
                # The next one imports its libraries while nobody waits.
                worker = _Worker(self._start_timeout)
                if what == "timed out":
                    break
            return False
        finally:
            self._idle.put(worker)

    def _count(self, what: str, request: dict[str, Any]) -> None:
        with self._counting:
            if what == "timed out":
                self.timeouts += 1
            else:
                self.crashes += 1
            total = self.timeouts + self.crashes
        if total & (total - 1) == 0:  # The 1st, 2nd, 4th, 8th: a policy may provoke many.
            _LOG.warning(
                "%d comparisons timed out, which count as wrong, and %d died, which are made again "
                "once; the last was %.200s",
                *(self.timeouts, self.crashes, request),
            )

    def close(self) -> None:
        """End all processes, after the comparisons that are running."""
        if self._closed:
            return
        self._closed = True
        workers = [self._idle.get() for _ in range(self._processes)]
        for worker in workers:
            if worker is not None:
                worker.kill()
            self._idle.put(None)
        self._threads.shutdown()


@functools.lru_cache(maxsize=1)
def _shared() -> Verifier:
    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier


def math_reward(
    sampled: str | Sequence[str], gold: str | Sequence[str], verifier: Verifier | None = None
) -> float:
    """Return 1.0 when the last boxed answer equals a gold answer, else 0.0.

    Neither the use of tools nor the format earns anything.

    Args:
        sampled: text that the policy wrote, as one string or one a turn; neither prompt nor tool
            text.
        gold: the right answer, or several of which one is enough.
        verifier: does what needs an algebra system; without one, a process that is shared and
            ends with the program.

    Raises:
        VerifierError: a process is needed and none can be started.

    Source: the paper's binary reward of verified correctness; 0 rather than -1 is an assumption.
    """
    answer = extract_boxed(sampled)
    if answer is None:
        return 0.0
    verifier = verifier or _shared()
    golds = [gold] if isinstance(gold, str) else gold
    return float(any(verifier.verify(answer, right) for right in golds))


def check_gold(gold: str, row: str, verifier: Verifier | None = None) -> None:
    """Refuse a gold answer that no answer could equal, before a run starts.

    Args:
        gold: the right answer of a problem.
        row: where it stands, such as "train.jsonl line 17", for the message.
        verifier: as in `math_reward`; numbers and words need none.

    Raises:
        ValueError: names the row, what is wrong with it and what would be right.
    """
    if _number(gold):
        return
    right = r"give the answer alone, as a number or as LaTeX, such as 42, 3/4 or \sqrt{2}"
    if not gold.strip():
        raise ValueError(f"{row}: the gold answer is empty; {right}")
    problem = ""
    if len(gold) > _LONGEST:
        problem = f"is longer than {_LONGEST} characters"
    elif r"\boxed" in gold or "####" in gold:
        problem = "is a whole solution"
    elif not _balanced(gold):
        problem = "has unbalanced braces"
    elif re.search(r"(?:(?<!\\)\b[A-Za-z]{2,}\b[ ,]+){3}", gold) and not _is_word(gold):
        problem = "is a sentence"
    elif not (verifier or _shared()).parses(gold):
        problem = "cannot be read as mathematics"
    if problem:
        raise ValueError(f"{row}: the gold answer {gold!r} {problem}; {right}")


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


# --------------------------------------------------------------------------------------------------
# Inside a worker

_SECONDS = 2  # Limit of one parse or comparison.
_CPU_SECONDS = 30  # A worker whose caller is gone ends by itself after so much work on one pair.
_MEMORY_BYTES = 4 << 30


def _serve() -> None:
    """Answer requests, one JSON line each, until the input ends."""
    from math_verify.errors import TimeoutException

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print must not end up between the replies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The caller decides when to stop.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _compare(r"x^2+\frac{1}{2}", r"\frac{1}{2}+x^2")  # Loads and compiles what the first one needs.
    print("true", file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + _CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            if "answer" in request:
                verdict = _compare(request["answer"], request["gold"])
            else:
                verdict = bool(_parse(request["gold"]))
        except TimeoutException:
            verdict = None
        except BaseException:  # Of other people's code, given the strangest input.
            verdict = False
        print(json.dumps(verdict), file=replies)


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    """Return the expression in text, in a list, or nothing.

    A time-out is raised, and so not cached: on a busy machine it says nothing about the text.
    """
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        rf"\boxed{{{text}}}",
        [LatexExtractionConfig()],
        parsing_timeout=_SECONDS,
        raise_on_error=True,
    )
    return [expression for expression in found if not isinstance(expression, str)]


def _compare(answer: str, gold: str) -> bool:
    from math_verify import verify
    from math_verify.utils import timeout

    right, mine = _parse(gold), _parse(answer)
    if not verify(right, mine, timeout_seconds=_SECONDS, raise_on_error=True):
        return False
    # The library's tolerance is absolute: all tiny numbers are equal to it.
    return timeout(_SECONDS)(_agree)(right[0], mine[0])


def _agree(right: Any, mine: Any) -> bool:
    """Return False when both are numbers that differ by more than 1e-12 of the value."""
    if not (getattr(right, "is_number", False) and getattr(mine, "is_number", False)):
        return True
    return bool(abs((right - mine).evalf(30)) <= abs(right.evalf(30)) * 1e-12)


if __name__ == "__main__":
    _serve()
