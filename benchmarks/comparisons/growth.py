"""Cost as the work grows: episodes, length, staleness, corpus, servers.

The growth of a cost is the exponent of the power of the size that fits it best: 1 is linear. The
curves show the cost of one unit.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from comparisons import returns
from comparisons.engine import LONGEST, Prompts, Served, write_model
from comparisons.overhead import fused
from harness import Bench, Case, Row, Spread

MODEL = {"embed": 256, "layers": 4, "vocabulary": 4096}
UNITS = {"episodes": "episode", "time": "token", "servers": "server"}
SMALL = {"embed": 32, "layers": 1, "vocabulary": 64}


def pack(episodes: int, lag: int) -> Any:
    """Admit, check and pack `episodes` of 96 tokens sampled by `lag` + 1 versions."""
    from copc_jax import staging
    from copc_jax.types import Trajectory

    rng = np.random.default_rng(0)

    def trajectory(index: int) -> Trajectory:
        length = int(rng.integers(32, 160))
        is_action = np.arange(length) >= 4
        versions = rng.integers(0, lag + 1, length)
        return Trajectory(
            prompt_id=str(index),
            sample=0,
            token_ids=np.ones(length, np.int32),
            is_action=is_action,
            behavior_logprob=np.where(is_action, -1.0, 0.0).astype(np.float32),
            weight_version=np.where(is_action, versions, -1).astype(np.int32),
            reward=1.0,
            status="done",
        )

    made = [trajectory(i) for i in range(episodes)]

    def run() -> None:
        staging.pack(
            made,
            rows=episodes,
            time=192,
            learner_version=lag,
            staleness=lag,
            gamma=1.0,
            pad_id=0,
        )

    return run


def returned(time: int, tokens: int) -> Any:
    return returns.copc_time_major(rows=tokens // time, time=time)


def learned(time: int, tokens: int, **size: Any) -> Any:
    return fused("copc", rows=tokens // time, time=time, episodes=1, **size)


def retrieved(passages: int) -> Any:
    """Ask a tantivy index of so many passages 100 questions of six words."""
    import asyncio

    from copc_jax.tools.retriever import Passage, TantivyRetriever

    rng = np.random.default_rng(0)
    # Words by rank, as in text; a larger corpus has more of them.
    words = lambda n: [f"w{int(x)}" for x in np.minimum(rng.zipf(1.3, n), 50_000)]
    texts = [words(30) for _ in range(passages)]
    index = TantivyRetriever([Passage(str(i), "", " ".join(x)) for i, x in enumerate(texts)])
    picked = rng.integers(0, passages, 100)
    queries = [" ".join(rng.choice(texts[i], 6)) for i in picked]
    loop = asyncio.new_event_loop()

    def run() -> None:
        for query in queries:
            found = loop.run_until_complete(index.search([query], 3))
            assert len(found[0]) == 3

    return run


def sampled(servers: int, batch: int, new: int, **size: Any) -> Any:
    """Sample `batch` responses on each of so many servers, by one client."""
    place = tempfile.mkdtemp()
    write_model(f"{place}/model", **size)
    served = Served(f"{place}/model", batch, LONGEST + 2 * new, servers, cache=f"{place}/cache")
    prompts = Prompts(servers * batch, size["vocabulary"])

    def run() -> None:
        served.generate(prompts.next(), new)

    run.pids = served.pids  # pyright: ignore[reportFunctionMemberAccess]
    return run


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Slope of the logarithm of the cost over that of the size, least squares."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def compare(bench: Bench) -> None:
    tiny = bench.tiny
    size, tokens = (SMALL, 128) if tiny else (MODEL, 4096)
    long = 2**12 if tiny else 2**20
    # What grows: function, argument that grows, its values, the others, units of one repetition.
    episodes = (4, 8) if tiny else (64, 256, 1024)
    lengths = (32, 64) if tiny else (128, 512, 2048)
    spans = (64, 256) if tiny else (128, 2048, 32768)
    series: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any], Any]] = {
        "episodes packed": ("pack", "episodes", episodes, {"lag": 4}, lambda n: n),
        "staleness of 256 episodes": (
            "pack",
            "lag",
            (1, 4) if tiny else (1, 16, 256, 4096),
            {"episodes": 8 if tiny else 256},
            None,
        ),
        "length, returns": ("returned", "time", spans, {"tokens": long}, lambda n: n),
        "length, learner step": (
            "learned",
            "time",
            lengths,
            {"tokens": tokens, **size},
            lambda n: n,
        ),
        "passages of the corpus, 100 queries": (
            "retrieved",
            "passages",
            (100, 200) if tiny else (1000, 10_000, 50_000),
            {},
            None,
        ),
        "servers, 16 responses each": (
            "sampled",
            "servers",
            (1, 2),
            {"batch": 2 if tiny else 16, "new": 4 if tiny else 32, **size},
            lambda n: n,
        ),
    }
    cases = [
        Case(f"{what}: {value}", __file__, function, {name: value, **others})
        for what, (function, name, values, others, _) in series.items()
        for value in values
    ]
    # The worst exponent is wanted, not small differences.
    measured = bench.measure("growth", cases, rounds=min(bench.rounds, 3))
    for what, (function, name, values, others, units) in series.items():
        labels = [f"{what}: {value}" for value in values]
        rounds = range(len(measured.samples[labels[0]]))
        # Where the number of tokens is the same for all lengths, a row is what grows.
        tokens_given = others.get("tokens")
        scale = [value / tokens_given if tokens_given else 1.0 for value in values]
        costs = [
            [
                x * measured.samples[label][number]["cpu_s"]
                for label, x in zip(labels, scale, strict=True)
            ]
            for number in rounds
        ]
        grown = [exponent(list(values), each) for each in costs]
        bench.rows.append(
            Row(
                "growth of cost with " + what,
                "exponent 1: linear",
                f"{name} {values[0]} to {values[-1]}",
                Spread.of(grown),
                1.1,
                "<=",
                "",
            )
        )
        middle = np.median(costs, axis=0)
        unit = [float(x) / (n if units else 1) for x, n in zip(middle, values, strict=True)]
        bench.curves.append(
            {
                "title": f"Growth: {what}",
                "x": name,
                "y": f"CPU microseconds a {UNITS[name]}" if units else "CPU ms",
                "lines": {
                    function: [
                        [n, x * (1e6 if units else 1e3)] for n, x in zip(values, unit, strict=True)
                    ]
                },
            }
        )
