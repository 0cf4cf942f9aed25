"""Cases in processes and environments of their own, measured in turn; what the comparisons use.

A comparison lists `Case`s, lets `Bench.measure` run them in shuffled rounds, one process busy at a
time, and adds `Row`s to the table. Peers come from the package index into environments below
`.cache`, with the versions named here. This module is imported in those environments too, so it
needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

HERE = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(os.environ.get("COPC_BENCHMARK_CACHE", ".cache/copc_jax/benchmarks"))
OWN = "copc_jax"

# {jax} and {flax} become this project's own versions: then XLA is the same on both sides.
PEERS: Mapping[str, tuple[str, ...]] = {
    "rlax": ("rlax==0.1.9", "jax=={jax}"),
    "torch": ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0"),
    "tunix": ("google-tunix==0.1.7", "jax=={jax}", "flax=={flax}"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
}
# Compiled from source, which takes minutes: only on request, and once.
SLOW = ("llama.cpp",)


class Missing(Exception):
    """A peer that cannot be measured here, and why."""


def say(text: str) -> None:
    """Report progress; standard output is for the table."""
    print(text, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------- environments


def environment(name: str, *, slow: bool = False) -> pathlib.Path:
    """Return the interpreter of a peer's environment, made now if it is not there.

    Args:
        name: of `PEERS`, or `OWN`.
        slow: allow those that take minutes to compile.

    Raises:
        Missing: it cannot be installed, with pip's last words.
    """
    if name == OWN:
        return pathlib.Path(sys.executable)
    import flax
    import jax

    wanted = [line.format(jax=jax.__version__, flax=flax.__version__) for line in PEERS[name]]
    folder = (CACHE / name).resolve()
    python, stamp = folder / "bin" / "python", folder / "complete"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return python
    if name in SLOW and not slow:
        raise Missing(f"not built; --{name.replace('.', '-')} builds it")
    say(f"installing {' '.join(wanted)} into {folder}")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *wanted],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "failed").splitlines()[-1]
            raise Missing(f"cannot be installed: {last}")
    stamp.write_text("\n".join(wanted))
    return python


# -------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to repeat.

    Attributes:
        label: its name in the results.
        file: `__file__` of the comparison.
        function: of that file, called in the worker as `worker.Worker.prepare` says.
        arguments: its keyword arguments.
        environment: of `PEERS`, or this project's own.
        process: cases with the same name share a process; the label by default.
    """

    label: str
    file: str
    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: str = OWN
    process: str = ""


class Process:
    """A worker."""

    def __init__(self, python: pathlib.Path, log: Any, shortest: float):
        # Half a dozen libraries ask a hub or report usage when they are imported.
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [str(python), str(HERE / "worker.py"), str(shortest)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **offline},
            # Ctrl-C at the terminal is for the runner, which closes its workers in order.
            start_new_session=True,
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Missing: the worker failed or died.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise Missing(f"its process ended with status {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Missing(answer["error"])
        return answer

    def close(self) -> None:
        """End it and wait, so that its CPU time counts as ours."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -------------------------------------------------------------------------------- results


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Measured:
    """Rounds of cases: `samples[label]` holds one `{"cpu_s", "wall_s"}` a round."""

    samples: dict[str, list[dict[str, float]]]
    facts: dict[str, dict[str, Any]]
    missing: dict[str, str]

    def spread(self, label: str, clock: str = "cpu_s") -> Spread:
        """Seconds of one case."""
        return Spread.of([sample[clock] for sample in self.samples[label]])

    def ratios(self, over: str, under: str, clock: str = "cpu_s") -> list[float]:
        """Seconds of `over` divided by those of `under`, round by round."""
        pairs = zip(self.samples[over], self.samples[under], strict=True)
        return [a[clock] / b[clock] for a, b in pairs]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what is measured.
        against: what it is held against.
        shape: of the work.
        measured: what came out; None where nothing could be measured.
        target: the number to reach.
        sense: whether `measured` should be at least or at most `target`.
        unit: "x" for ratios.
        wall: the same by the wall clock, where CPU seconds are the figure.
        note: what a reader must know.
    """

    what: str
    against: str
    shape: str
    measured: Spread | None
    target: float | None = None
    sense: Literal[">=", "<="] = ">="
    unit: str = "x"
    wall: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without either."""
        if self.measured is None or self.target is None:
            return None
        reached = self.measured.median
        return reached >= self.target if self.sense == ">=" else reached <= self.target


@dataclasses.dataclass
class Bench:
    """What a comparison is given.

    Attributes:
        rounds: how often each case is measured.
        tiny: shapes of seconds, for a look at whether everything runs.
        peers: measure others too.
        slow: build peers that take minutes.
        log: where workers' standard error goes.
        out: folder of further pictures.
        rows: the table so far.
        details: everything else that is written as JSON, by comparison.
        curves: `{"title", "x", "y", "lines": {label: [[x, y], ...]}}` to draw.
    """

    rounds: int
    tiny: bool = False
    peers: bool = True
    slow: bool = False
    log: Any = None
    out: pathlib.Path = pathlib.Path()
    seed: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    curves: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def measure(self, name: str, cases: Iterable[Case], *, rounds: int | None = None) -> Measured:
        """Prepare all cases, then measure each once a round, in a new order every round.

        A peer's case that fails is missing, with the reason, and the others go on. An interrupt
        after the first round ends the measurement with the whole rounds that there are.

        Args:
            name: of the comparison, for progress and details.
            cases: with different labels.
            rounds: other than the bench's.
        """
        rounds = self.rounds if rounds is None else rounds
        result = Measured({}, {}, {})
        workers: dict[str, Process] = {}
        ready: list[tuple[Case, Process]] = []
        # Peers are installed before anything starts, so that no idle process waits for pip.
        pythons: dict[str, pathlib.Path | Missing] = {}
        cases = list(cases)
        for case in cases:
            if case.environment not in pythons:
                pythons[case.environment] = self._python(case.environment)
        with contextlib.ExitStack() as stack:
            for case in cases:
                try:
                    python = pythons[case.environment]
                    if isinstance(python, Missing):
                        raise python
                    # Starting interpreters takes longer than tiny shapes.
                    key = case.environment if self.tiny else case.process or case.label
                    if key not in workers:
                        workers[key] = Process(python, self.log, 0.01 if self.tiny else 0.3)
                        stack.callback(workers[key].close)
                    say(f"{name}: preparing {case.label}")
                    answer = workers[key].ask(
                        {
                            "prepare": case.label,
                            "file": case.file,
                            "function": case.function,
                            "arguments": dict(case.arguments),
                        }
                    )
                except Missing as error:
                    self._lose(result, name, case, error)
                    continue
                result.facts[case.label] = answer["facts"]
                if "repetitions" in answer["facts"]:
                    ready.append((case, workers[key]))
                    result.samples[case.label] = []
            order = random.Random(self.seed)
            for number in range(rounds):
                try:
                    say(f"{name}: round {number + 1} of {rounds}")
                    self._round(result, name, order.sample(ready, len(ready)), ready)
                except KeyboardInterrupt:
                    if not number:
                        raise
                    say(f"{name}: stopped; {number} whole rounds count")
                    result.samples = {k: v[:number] for k, v in result.samples.items()}
                    break
        self.details.setdefault(name, {})
        for field in dataclasses.fields(result):
            self.details[name].setdefault(field.name, {}).update(getattr(result, field.name))
        return result

    def _round(
        self,
        result: Measured,
        name: str,
        turns: Sequence[tuple[Case, Process]],
        ready: list[tuple[Case, Process]],
    ) -> None:
        for case, worker in turns:
            try:
                result.samples[case.label].append(worker.ask({"run": case.label}))
            except Missing as error:
                self._lose(result, name, case, error)
                ready.remove((case, worker))
            # Threads that spin for more work are quiet again before the next one starts.
            time.sleep(0.05)

    def _lose(self, result: Measured, name: str, case: Case, error: Missing) -> None:
        if case.environment == OWN:
            raise RuntimeError(f"{name}: {case.label} failed: {error}")
        say(f"{name}: {case.label} is missing: {error}")
        result.missing[case.label] = str(error)
        result.samples.pop(case.label, None)

    def _python(self, name: str) -> pathlib.Path | Missing:
        if name != OWN and not self.peers:
            return Missing("peers are left out")
        try:
            return environment(name, slow=self.slow)
        except Missing as error:
            return error

    def compare(
        self,
        measured: Measured,
        what: str,
        ours: str,
        against: str,
        *,
        shape: str,
        target: float | None = None,
        sense: Literal[">=", "<="] = ">=",
        scale: float = 1.0,
        note: str = "",
        label: str = "",
    ) -> None:
        """Add the row "CPU time of `against` over that of `ours`", or the reverse for "<=".

        Args:
            measured: rounds that hold both.
            what: what is measured.
            ours: label of our case.
            against: label of the other.
            shape: of the work.
            target: the ratio to reach.
            sense: ">=" for how many times less time ours takes, "<=" for how many times as much.
            scale: factor on the ratios, where the two do different amounts of work.
            note: for the reader.
            label: how to call `against`; its label by default.
        """
        row = Row(what, label or against, shape, None, target, sense)
        lost = [name for name in (ours, against) if name in measured.missing]
        if lost:
            reason = f"missing: {lost[0]} ({measured.missing[lost[0]]})"
            self.rows.append(dataclasses.replace(row, note=reason))
            return
        over, under = (against, ours) if sense == ">=" else (ours, against)
        ratios = [scale * ratio for ratio in measured.ratios(over, under)]
        walls = [scale * ratio for ratio in measured.ratios(over, under, "wall_s")]
        wall = statistics.median(walls)
        self.rows.append(dataclasses.replace(row, measured=Spread.of(ratios), wall=wall, note=note))


Comparison = Callable[[Bench], None]
