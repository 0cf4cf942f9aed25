"""Start-up, compilations and packing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
from harness import Bench, Case, Row, Spread


def imports(bench: Bench, modules: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of new interpreters that import a module, by module, a round each."""
    seconds: dict[str, list[tuple[float, float]]] = {module: [] for module in modules}
    # One more round than asked for: the first one reads files into memory.
    for _ in range(1 + bench.rounds):
        for module in modules:
            before = os.times()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
            after = os.times()
            cpu = after.children_user + after.children_system
            cpu -= before.children_user + before.children_system
            seconds[module].append((cpu, after.elapsed - before.elapsed))
    return {module: rounds[1:] for module, rounds in seconds.items()}


def compilations(updates: int) -> dict[str, Any]:
    """Count the programs that a learner compiles at its first update and at later ones."""
    import jax
    from comparisons.overhead import SIZES, build

    _, functions, state, batch = build("copc", **SIZES["tiny"])
    vocabulary = SIZES["tiny"]["vocabulary"]
    batches = [batch.replace(token_ids=(batch.token_ids + i) % vocabulary) for i in range(updates)]
    counts = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        counts[-1] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    for batch in batches:
        counts.append(0)
        state, metrics = functions.step(state, batch)
        jax.block_until_ready(metrics)
    return {"first": counts[0], "later": sum(counts[1:])}


def packing(batches: int, episodes: int, time: int, mean: float, slices: int) -> dict[str, Any]:
    """Pack episodes of log-normal lengths as a run does; slices without a token are skipped."""
    from copc_jax import staging
    from copc_jax.types import Trajectory

    rng = np.random.default_rng(0)

    def trajectory(index: int) -> Trajectory:
        length = int(np.clip(rng.lognormal(math.log(mean) - 0.125, 0.5), 8, time))
        is_action = np.arange(length) >= 4
        return Trajectory(
            prompt_id=str(index),
            sample=0,
            token_ids=np.ones(length, np.int32),
            is_action=is_action,
            behavior_logprob=np.where(is_action, -1.0, 0.0).astype(np.float32),
            weight_version=np.where(is_action, 0, -1).astype(np.int32),
            reward=1.0,
            status="done",
        )

    packed, computed = [], []
    for _ in range(batches):
        _, stats = staging.pack(
            [trajectory(i) for i in range(episodes)],
            rows=episodes,
            time=time,
            learner_version=0,
            staleness=0,
            gamma=1.0,
            pad_id=0,
        )
        size = episodes // slices
        rows = size * math.ceil(stats.rows_used / size)
        packed.append(stats.tokens / (stats.rows_used * time))
        computed.append(stats.tokens / (rows * time))
    return {"packed": packed, "computed": computed}


def compare(bench: Bench) -> None:
    seconds = imports(bench, ("copc_jax.losses", "jax"))
    for module, target, note in (
        ("copc_jax.losses", 1.5, "CPU seconds of a new interpreter"),
        ("jax", None, "of which this much is jax alone"),
    ):
        cpu, wall = zip(*seconds[module], strict=True)
        bench.rows.append(
            Row(
                f"import {module}",
                "",
                "",
                Spread.of(cpu),
                target,
                "<=",
                "s",
                wall=Spread.of(wall).median,
                note=note,
            )
        )
    updates = 3 if bench.tiny else 10
    batches = 3 if bench.tiny else 50
    episodes = {
        "search preset": {"episodes": 64, "time": 192, "mean": 60.0, "slices": 16},
        "paper-search": {"episodes": 64, "time": 8192, "mean": 2000.0, "slices": 64},
    }
    measured = bench.measure(
        "startup",
        [
            Case("compilations", __file__, "compilations", {"updates": updates}),
            *(
                Case(name, __file__, "packing", {"batches": batches, **arguments}, process="pack")
                for name, arguments in episodes.items()
            ),
        ],
    )
    counted = measured.facts["compilations"]
    later = counted["later"]
    bench.rows.append(
        Row(
            "programs compiled after the first update",
            "",
            f"{updates} updates",
            Spread(later, later, later),
            0.0,
            "<=",
            "",
            note=f"{counted['first']} at the first",
        )
    )
    for name, arguments in episodes.items():
        facts = measured.facts[name]
        bench.rows.append(
            Row(
                "share of computed tokens that are not padding",
                "",
                f"{name}: {arguments['episodes']} episodes, mean {arguments['mean']:.0f} tokens, "
                f"rows of {arguments['time']}",
                Spread.of(facts["computed"]),
                0.9,
                unit="",
                note=f"{np.mean(facts['packed']):.2f} of the rows in use",
            )
        )
