"""Prepares and repeats cases in a process of its own, one JSON object a line in and out.

    python benchmarks/worker.py SHORTEST_S

`{"prepare": label, "file": ..., "function": ..., "arguments": {...}}` calls a function of a file.
It answers a callable of no arguments that does one repetition and waits for its result, or that
and a dict of facts, or facts alone. The callable is warmed up, and `{"run": label}` answers its CPU
seconds (all threads of this process, and of the processes whose ids stand in its attribute `pids`)
and wall seconds. Only the standard library is needed, so that any environment can be measured.
Standard output is for answers: what libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def cpu_of(pid: int) -> float:
    """CPU seconds of a process that runs, all threads, in nanosecond steps (Linux)."""
    return time.clock_gettime(~pid << 3 | 2)


def timed(function: Callable[[], Any], repetitions: int) -> dict[str, float]:
    pids = getattr(function, "pids", ())
    spent = lambda: time.process_time() + sum(map(cpu_of, pids))
    gc.collect()
    wall, cpu = time.perf_counter(), spent()
    for _ in range(repetitions):
        function()
    cpu, wall = spent() - cpu, time.perf_counter() - wall
    return {"cpu_s": cpu / repetitions, "wall_s": wall / repetitions}


class Worker:
    """Holds prepared cases by label.

    Repetitions shorter than `shortest` CPU seconds are repeated within one measurement, for the
    clock's sake.
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._cases: dict[str, tuple[Callable[[], Any], int]] = {}
        self._modules: dict[str, Any] = {}

    def _function(self, file: str, name: str) -> Callable[..., Any]:
        if file not in self._modules:
            spec = importlib.util.spec_from_file_location("case", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            self._modules[file] = module
        return getattr(self._modules[file], name)

    def prepare(self, label: str, file: str, function: str, arguments: dict[str, Any]) -> Any:
        """Make a case, warm it up, and return its facts."""
        begun = time.process_time()
        made = self._function(file, function)(**arguments)
        if isinstance(made, dict):
            return {"facts": made}
        run, facts = made if isinstance(made, tuple) else (made, {})
        run()
        first = time.process_time() - begun
        once = timed(run, 1)["cpu_s"]
        repetitions = max(1, round(self._shortest / max(once, 1e-6)))
        self._cases[label] = (run, repetitions)
        return {"facts": {**facts, "first_cpu_s": first, "repetitions": repetitions}}

    def run(self, label: str) -> dict[str, float]:
        """Measure a case once."""
        return timed(*self._cases[label])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(float(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                label = request.pop("prepare")
                answer = worker.prepare(label, **request)
            else:
                answer = worker.run(request["run"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
