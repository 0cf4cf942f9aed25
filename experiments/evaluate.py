"""Greedy exact match on held-out questions, with a 95% interval.

    python experiments/evaluate.py --model runs/<run>/model

evaluates an HF folder on the held-out questions of the task; `run.py` calls `exact_match` on its
own server.
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


def exact_match(
    collector: Collector,
    client: SGLangClient,
    config: RunConfig,
    parts: assembly.Parts,
    questions: Sequence[data.Question],
) -> dict[str, float]:
    """Answer every question once, greedily, and score the answers.

    Returns:
        `em` with `em_low` and `em_high` (Wilson 95%), `count`, `em_1hop`, `em_2hop`, `searches` an
        episode, and the share of `answered` and `truncated` episodes.
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

    prompts = [question.to_prompt() for question in questions]
    episodes = collector.evaluate(answer, prompts, config.rollout.max_in_flight)
    right = np.asarray([episode.info.get("em", 0.0) for episode in episodes])
    low, high = metrics.confidence_interval(int(right.sum()), len(right))
    result = {"em": float(right.mean()), "em_low": low, "em_high": high, "count": float(len(right))}
    for source in sorted({prompt.source for prompt in prompts}):
        chosen = np.asarray([prompt.source == source for prompt in prompts])
        result[f"em_{source.replace('-', '')}"] = float(right[chosen].mean())
    for name in ("searches", "answered"):
        result[name] = float(np.mean([episode.info.get(name, 0.0) for episode in episodes]))
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
    questions = parts.held_out[: config.eval.final_questions or None]
    with tempfile.TemporaryDirectory() as scratch:
        server = assembly.launch(config, Path(config.model), Path(scratch) / "server.log")
        client = assembly.client(config, config.rollout.urls or (server.url,))  # pyright: ignore[reportOptionalMemberAccess]

        async def nothing(*_: object) -> None:
            """No training rollouts run here, so nothing is ever published."""

        collector = Collector(
            run_episode=nothing,  # pyright: ignore[reportArgumentType]
            publish=nothing,
            prompts=data.prompt_iterator(parts.held_out, config.seed),
            admission=staging.Admission(1, 0),
        )
        try:
            with collector:
                collector.enter(client)
                collector.call(client.check(wait_s=30.0))
                return exact_match(collector, client, config, parts, questions)
        finally:
            if server is not None:
                server.stop()


if __name__ == "__main__":
    main()
