"""What HTTP costs the rollouts: the engine in process against server and rollout client.

Both sample the same tokens with the same programs, with 64 requests in flight; the model is that of
the search preset, small enough for the rest to show.
"""

from __future__ import annotations

import tempfile

from comparisons.engine import LONGEST, SHORTEST
from harness import Bench, Case

IN_FLIGHT, NEW = 64, 32


def compare(bench: Bench) -> None:
    batch, new = (2, 4) if bench.tiny else (IN_FLIGHT, NEW)
    size = {"embed": 32, "layers": 1, "vocabulary": 64}
    if not bench.tiny:
        size = {"embed": 128, "layers": 2, "vocabulary": 6144}
    engine = __file__.replace("http.py", "engine.py")
    with tempfile.TemporaryDirectory() as place:
        arguments = {"folder": f"{place}/model", "batch": batch, "new": new}
        arguments["vocabulary"] = size["vocabulary"]
        measured = bench.measure(
            "http",
            [
                Case("model", engine, "write_model", {"folder": f"{place}/model", **size}),
                Case("served", engine, "served", arguments),
                Case("in process", engine, "direct", arguments),
            ],
        )
    bench.compare(
        measured,
        "rollouts through HTTP",
        "served",
        "in process",
        shape=f"{batch} in flight, prompts of {SHORTEST} to {LONGEST}, {new} new, search preset",
        target=1.1,
        sense="<=",
        label="the engine in process",
        note="server, client and JSON included",
    )
