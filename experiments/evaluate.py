"""Greedy scores on held-out prompts, with a 95% interval.

    python experiments/evaluate.py --model runs/<run>/model

evaluates an HF folder on the held-out prompts of the task; `run.py` calls `held_out` on its own
server.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import assembly
import numpy as np

from copc_jax import data, metrics, staging
from copc_jax.config import RunConfig, parse, refuse
from copc_jax.rollout.client import SamplingParams, SGLangClient
from copc_jax.rollout.collector import Collector
from copc_jax.rollout.episode import run_episode
from copc_jax.types import Prompt, Trajectory


def held_out(
    collector: Collector,
    client: SGLangClient,
    config: RunConfig,
    parts: assembly.Parts,
    prompts: Sequence[Prompt],
) -> dict[str, float]:
    """Play every prompt once, greedily.

    Returns:
        The task's score (`em` or `accuracy`), such as `em` with `em_low` and `em_high` (Wilson
        95%), `em_<source>` for each source, `count`, the mean of each figure of the task an
        episode, and the share of `truncated` episodes.
    """
    budget = assembly.budget(config)
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, temperature=0.0)

    async def answer(prompt: Prompt) -> Trajectory:
        return await run_episode(
            client,
            parts.task,
            parts.tokenizer,
            prompt,
            sample=0,
            sampling=sampling,
            budget=budget,
            seed=0,
        )

    episodes = collector.evaluate(answer, prompts, config.rollout.max_in_flight)
    name = parts.task.score_name
    right = np.asarray([episode.info.get(name, 0.0) for episode in episodes])
    low, high = metrics.confidence_interval(int(right.sum()), len(right))
    result = {
        name: float(right.mean()),
        f"{name}_low": low,
        f"{name}_high": high,
        "count": float(len(right)),
    }
    for source in sorted({prompt.source for prompt in prompts}):
        chosen = np.asarray([prompt.source == source for prompt in prompts])
        result[f"{name}_{source.replace('-', '')}"] = float(right[chosen].mean())
    for figure in sorted({figure for episode in episodes for figure in episode.info} - {name}):
        result[figure] = float(np.mean([episode.info.get(figure, 0.0) for episode in episodes]))
    result["truncated"] = float(np.mean([episode.status == "truncated" for episode in episodes]))
    return result


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Start a server with the model (or use `--rollout.urls`), evaluate and print the figures."""
    config = parse(sys.argv[1:] if arguments is None else arguments)
    if config.model == "tiny":
        refuse("--model must name an HF folder, such as runs/<run>/model")
    try:
        result = _evaluate(config)
    except assembly.START_ERRORS as error:
        refuse(error)
    print(json.dumps(result, indent=2))
    return result


def _evaluate(config: RunConfig) -> dict[str, float]:
    assembly.prepare_process(config)
    parts = assembly.build(config)
    prompts = parts.environment.held_out[: config.eval.final_questions or None]
    with tempfile.TemporaryDirectory() as scratch:
        server = assembly.launch(config, Path(config.model), Path(scratch) / "server.log")
        client = assembly.client(config, config.rollout.urls or (server.url,))  # pyright: ignore[reportOptionalMemberAccess]

        async def nothing(*_: object) -> None:
            """No training rollouts run here, so nothing is ever published."""

        collector = Collector(
            run_episode=nothing,  # pyright: ignore[reportArgumentType]
            publish=nothing,
            prompts=data.prompt_iterator(prompts, config.seed),
            admission=staging.Admission(1, 0),
        )
        try:
            with collector:
                collector.enter(client)
                assembly.enter_tools(collector, parts)
                collector.call(client.check(wait_s=30.0))
                return held_out(collector, client, config, parts, prompts)
        finally:
            if server is not None:
                server.stop()


if __name__ == "__main__":
    main()
