"""Speed against peers and against this machine's limits, in one run.

    uv run --group bench benchmarks/run.py [--only returns logprobs ...] [--rounds 5]

Every comparison measures its cases in shuffled rounds, one process busy at a time, and prints the
median of the ratios of each round with the smallest and the largest. Ratios are of CPU seconds of
the process, all threads, so that other work on the machine counts little; the wall clock's stands
beside them. Peers are installed from the package index into environments of their own below
`.cache`; one that cannot be is named as missing. Table and figures go to `runs/benchmarks`. Ctrl-C
ends the rounds of the present comparison, and what they have measured counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import matplotlib.figure
import psutil
from harness import SLOW, Bench, Row, say
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table

# In the order of running; each is a file in comparisons/ with `compare(bench)`.
COMPARISONS = (
    "returns",
    "logprobs",
    "overhead",
    "learner_step",
    "startup",
    "decode",
    "engine",
    "http",
    "publish",
    "growth",
    "loop",
)


def machine() -> dict[str, Any]:
    """Say what the figures were taken on."""
    names = [
        line.partition(":")[2].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
    }


def own_cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def watch(load: dict[str, Any]) -> Iterator[None]:
    """Fill `load` with what else the machine did meanwhile."""
    before, cpu, begun = psutil.cpu_times(), own_cpu(), time.perf_counter()
    load["load_average_before"] = os.getloadavg()[0]
    yield
    seconds = time.perf_counter() - begun
    after = psutil.cpu_times()
    busy = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("user", "nice", "system", "irq", "softirq", "steal")
        if hasattr(after, name)
    )
    load["load_average_after"] = os.getloadavg()[0]
    load["seconds"] = seconds
    load["cores_used"] = (own_cpu() - cpu) / seconds
    load["cores_used_by_others"] = max(0.0, busy / seconds - load["cores_used"])


def number(value: float) -> str:
    if 0 < abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def cells(row: Row) -> list[str]:
    spread, unit = row.measured, "" if row.unit == "x" else f" {row.unit}"
    target = "" if row.target is None else f"{row.sense} {number(row.target)}{unit}"
    return [
        row.what,
        row.against,
        row.shape,
        target,
        "missing" if spread is None else f"{number(spread.median)}{unit}",
        "" if spread is None else f"{number(spread.low)} to {number(spread.high)}",
        "" if row.wall is None else number(row.wall),
        {True: "met", False: "not met", None: ""}[row.met],
        row.note,
    ]


# Curves next to each other in a picture.
_ABREAST = 3
COLUMNS = ("what", "against", "shape", "target", "CPU", "rounds", "wall", "", "note")


def show(rows: list[Row], where: str) -> None:
    table = Table(title="Speed", caption=where)
    for name in COLUMNS:
        table.add_column(name)
    for row in rows:
        style = {True: "green", False: "red", None: ""}[row.met]
        table.add_row(*cells(row), style=style)
    Console(width=None if os.isatty(1) else 200).print(table)


def picture(bench: Bench, path: pathlib.Path, where: str) -> None:
    """Draw how far each row is on the good side of its target, and the curves."""
    rows = [row for row in bench.rows if row.measured is not None and row.target]
    height, deep = 1.2 + 0.32 * len(rows), -(-len(bench.curves) // _ABREAST)
    figure = matplotlib.figure.Figure(figsize=(12, height + 3.2 * deep), layout="constrained")
    parts = figure.subfigures(1 + deep, 1, height_ratios=[height, *[3.2] * deep], squeeze=False)
    bars = parts[0, 0].subplots()
    for place, row in enumerate(reversed(rows)):
        assert row.measured is not None and row.target is not None
        # Something that does not grow at all is drawn as ten times as good as asked.
        score = lambda x, row=row: (
            x / row.target if row.sense == ">=" else row.target / max(x, 0.1 * row.target)
        )
        ends = sorted(score(x) for x in (row.measured.low, row.measured.high))
        color = "tab:green" if row.met else "tab:red"
        bars.barh(place, score(row.measured.median), color=color, height=0.6)
        bars.plot(ends, [place, place], color="black", linewidth=1)
    bars.set_yticks(
        range(len(rows)), [f"{row.what}: {row.against}" for row in reversed(rows)], fontsize=8
    )
    bars.axvline(1.0, color="black", linewidth=0.8)
    bars.set_xscale("log")
    bars.set_xlabel("share of the target reached (1 = met; line: smallest to largest round)")
    bars.set_title(where, fontsize=8)
    for number, curve in enumerate(bench.curves):
        part = parts[1 + number // _ABREAST, 0]
        axes = part.add_subplot(1, _ABREAST, 1 + number % _ABREAST)
        for name, points in curve["lines"].items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_title(curve["title"], fontsize=9)
        axes.set(xlabel=curve["x"], ylabel=curve["y"], xscale="log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        highest = max(y for points in curve["lines"].values() for _, y in points)
        axes.set_ylim(0, 1.2 * highest)
        if len(curve["lines"]) > 1:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def write(
    bench: Bench, options: argparse.Namespace, here: dict[str, Any], loads: dict[str, Any]
) -> str:
    """Write what there is to speed.json and speed.png, and say where it was measured."""
    others = [load.get("cores_used_by_others", 0.0) for load in loads.values()]
    where = (
        f"{here['processor']}, {here['cores']} cores; other processes used "
        f"{min(others):.1f} to {max(others):.1f} cores meanwhile; jax {here['jax']}, "
        f"Python {here['python']}, {options.rounds} rounds"
    )
    written = {
        "machine": here,
        "load": loads,
        "rows": [{**dataclasses.asdict(row), "met": row.met} for row in bench.rows],
        "curves": bench.curves,
        "details": bench.details,
    }
    (options.out / "speed.json").write_text(json.dumps(written, indent=1))
    picture(bench, options.out / "speed.png", where)
    return where


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=COMPARISONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="shapes of seconds: does it run?")
    parser.add_argument("--no-peers", action="store_true", help="our own cases alone")
    for name in SLOW:
        flag = f"--{name.replace('.', '-')}"
        parser.add_argument(flag, action="store_true", help=f"build {name} (minutes)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    here, loads = machine(), {}
    with (options.out / "speed.log").open("w") as log:
        bench = Bench(
            options.rounds,
            tiny=options.tiny,
            peers=not options.no_peers,
            slow=any(getattr(options, name.replace(".", "_")) for name in SLOW),
            log=log,
            out=options.out,
        )
        where = ""
        for name in COMPARISONS:
            if name not in options.only:
                continue
            try:
                with watch(loads.setdefault(name, {})):
                    importlib.import_module(f"comparisons.{name}").compare(bench)
            finally:
                # After each comparison, whatever ended it: what was measured is not lost.
                where = write(bench, options, here, loads)
    show(bench.rows, where)
    say(f"written: {options.out / 'speed.json'}, {options.out / 'speed.png'}")


if __name__ == "__main__":
    main()
