"""What HTTP costs the rollouts: the engine in process against server and rollout client.

Both sample the same number of tokens with the same programs and always have 64 requests in flight:
one that ends makes room for the next, as in training. The less a model computes, the more of the
rest shows: the smaller one is that of the search preset.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from comparisons import engine as engines
from harness import Bench, Case

IN_FLIGHT, SHORTEST, LONGEST = 64, 8, 32
SIZES = {
    "search preset": {"embed": 128, "layers": 2, "vocabulary": 6144},
    "256 wide, 4 layers": {"embed": 256, "layers": 4, "vocabulary": 6144},
}


class Requests:
    """Four times as many requests as are in flight, the same lengths every time.

    Args:
        in_flight: at one time.
        longest: most tokens that one samples.
        vocabulary: of the model.
    """

    def __init__(self, in_flight: int, longest: int, vocabulary: int):
        self._prompts = engines.Prompts(4 * in_flight, vocabulary)
        shortest = min(SHORTEST, longest)
        self.new = np.random.default_rng(1).integers(shortest, longest + 1, 4 * in_flight)

    def next(self) -> Iterator[tuple[Sequence[int], int]]:
        """Give prompts and how many tokens to sample after each."""
        return zip(self._prompts.next(), map(int, self.new), strict=True)


def served(folder: str, in_flight: int, longest: int, vocabulary: int) -> Any:
    """Ask the server through the rollout client."""
    from copc_jax.rollout.client import SamplingParams

    both = engines.server(folder, in_flight, engines.LONGEST + longest)
    requests = Requests(in_flight, longest, vocabulary)

    async def work(left: Iterator[tuple[Sequence[int], int]]) -> int:
        total = 0
        for prompt, new in left:
            given = await both.client.generate(prompt, SamplingParams(max_new_tokens=new))
            total += len(given.token_ids)
        return total

    async def all_of_them() -> int:
        left = requests.next()
        return sum(await asyncio.gather(*(work(left) for _ in range(in_flight))))

    def run() -> None:
        assert both.wait(all_of_them()) == requests.new.sum()

    run.pids = both.pids  # pyright: ignore[reportFunctionMemberAccess]
    engines.settle(run, both.counters)
    return run


def direct(folder: str, in_flight: int, longest: int, vocabulary: int) -> Any:
    """Drive the same engine in this process: neither HTTP nor client."""
    from copc_jax import hf
    from copc_jax.rollout.engine import Engine
    from copc_jax.rollout.programs import EngineConfig
    from copc_jax.rollout.requests import Output, Request, Sampling

    params, config = hf.load_hf(folder)
    outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
    sizes = EngineConfig(slots=in_flight, max_length=engines.LONGEST + longest)
    made = Engine(
        params, config, sizes, decode=lambda ids: " ".join(map(str, ids)), on_outputs=outputs.put
    )
    made.start()
    atexit.register(made.stop)
    requests = Requests(in_flight, longest, vocabulary)

    def request(number: int, prompt: Sequence[int], new: int) -> Request:
        sampling = Sampling(max_new_tokens=new)
        return Request(str(number), np.asarray(prompt, np.int32), sampling, seed=number)

    def run() -> None:
        todo = [request(number, *each) for number, each in enumerate(requests.next())]
        running, total = 0, 0
        while todo or running:
            begun, todo = todo[: in_flight - running], todo[in_flight - running :]
            made.submit(begun)
            running += len(begun)
            ended = [each for each in outputs.get() if each.finish is not None]
            running -= len(ended)
            total += sum(len(each.token_ids) for each in ended)
        assert total == requests.new.sum()

    engines.settle(run, made.counters)
    return run


def compare(bench: Bench) -> None:
    in_flight, longest = (2, 4) if bench.tiny else (IN_FLIGHT, LONGEST)
    sizes = {"tiny": engines.TINY} if bench.tiny else SIZES
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as place:
            arguments = {"folder": f"{place}/model", "in_flight": in_flight, "longest": longest}
            arguments["vocabulary"] = size["vocabulary"]
            measured = bench.measure(
                f"http, {name}",
                [
                    Case(
                        "model",
                        engines.__file__,
                        "write_model",
                        {"folder": f"{place}/model", **size},
                    ),
                    Case("served", __file__, "served", arguments),
                    Case("in process", __file__, "direct", arguments),
                ],
            )
        bench.compare(
            measured,
            "rollouts through HTTP",
            "served",
            "in process",
            shape=f"{in_flight} in flight, {min(SHORTEST, longest)} to {longest} new, {name}",
            target=1.1,
            sense="<=",
            label="the engine in process",
            note="server, client and JSON included",
        )
