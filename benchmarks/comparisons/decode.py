"""What a decode step costs by how many slots are busy, and what programs of fewer rows save.

The engine in process: no HTTP, no client. Every busy slot samples the same number of tokens after a
short prompt. Beside it runs the same engine whose dispatches always compute all slots.
"""

from __future__ import annotations

import atexit
import queue
from typing import Any

import numpy as np
from comparisons import engine as engines
from harness import Bench, Case, Row, Spread

SIZES = {
    "search preset": {"embed": 128, "layers": 2, "vocabulary": 6144},
    "256 wide, 4 layers": engines.MODEL,
}
SLOTS, MAX_LENGTH, PROMPT, NEW = 64, 192, 16, 64
BUSY = (1, 4, 16, 64)


def decode(
    embed: int, layers: int, vocabulary: int, slots: int, busy: int, new: int, every: bool
) -> Any:
    """Have `busy` of the slots sample `new` tokens; `every` computes all slots each time."""
    from copc_jax.rollout.engine import Engine
    from copc_jax.rollout.programs import EngineConfig
    from copc_jax.rollout.requests import Output, Request, Sampling

    config, params = engines.random_model(embed, layers, vocabulary)
    outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
    rows = {"decode_rows": ()} if every else {}
    made = Engine(
        params,
        config,
        EngineConfig(slots=slots, max_length=MAX_LENGTH, **rows),
        decode=lambda ids: " ".join(map(str, ids)),
        on_outputs=outputs.put,
    )
    made.start()
    atexit.register(made.stop)
    prompts = np.random.default_rng(0).integers(0, vocabulary, (busy, PROMPT), np.int32)
    sampling = Sampling(max_new_tokens=new)

    def run() -> None:
        made.submit([Request(str(i), x, sampling, seed=i) for i, x in enumerate(prompts)]).result()
        ended = 0
        while ended < busy:
            ended += sum(each.finish is not None for each in outputs.get())

    engines.settle(run, made.counters)
    return run


def compare(bench: Bench) -> None:
    sizes = {"tiny": engines.TINY} if bench.tiny else SIZES
    slots, new, busy = (4, 4, (1, 4)) if bench.tiny else (SLOTS, NEW, BUSY)
    lines = {}
    for name, size in sizes.items():
        measured = bench.measure(
            f"decode, {name}",
            [
                Case(
                    f"{count} of {slots}{', all computed' if every else ''}",
                    __file__,
                    "decode",
                    {**size, "slots": slots, "busy": count, "new": new, "every": every},
                    process="all computed" if every else "busy computed",
                )
                for count in busy
                for every in (False, True)
            ],
        )
        lines[name] = []
        for count in busy:
            ours = f"{count} of {slots}"
            milliseconds = [1e3 * each["cpu_s"] / new for each in measured.samples[ours]]
            lines[name].append([count, Spread.of(milliseconds).median])
            shape = f"{ours} slots busy, {name}"
            bench.rows.append(
                Row("decode step", "", shape, Spread.of(milliseconds), unit="CPU ms", sense="<=")
            )
            bench.compare(
                measured,
                "decode step",
                ours,
                f"{ours}, all computed",
                shape=shape,
                label="all slots computed",
            )
    bench.curves.append(
        {"title": "Decode step", "x": "busy slots", "y": "CPU milliseconds", "lines": lines}
    )
