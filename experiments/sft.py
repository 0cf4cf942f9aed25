"""Supervised warm start: teaches the format of the task, and leaves the reasoning to RL.

    python experiments/sft.py --task=search --sft.updates=600

writes an HF folder (weights, configuration, tokenizer) into the cache and prints its path. `run.py`
does the same on first use and takes the cached folder afterwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import assembly
import jax
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from copc_jax import analysis, data, hf, learner, model, sharding, staging
from copc_jax.config import RunConfig, parse
from copc_jax.types import Batch, Trajectory


def warm_start(config: RunConfig, parts: assembly.Parts) -> Path:
    """Return the HF folder of the warm start, training it when the cache does not hold it."""
    folder = config.cache_dir / f"sft-{_key(config, parts)}"
    if (folder / "config.json").exists():
        print(f"warm start: {folder} (cached)")
        return folder
    params = train(config, parts)
    hf.save_hf(
        folder,
        params,
        parts.model,
        tokenizer_json=parts.tokenizer.to_str(),
        extra_files={"sft.json": json.dumps(dataclasses.asdict(config.sft), indent=2)},
    )
    print(f"warm start: {folder}")
    return folder


def train(config: RunConfig, parts: assembly.Parts) -> model.Params:
    """Train on demonstrations, with a progress line, and return the parameters."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.model)
    init_optimizer, step = learner.build_sft(
        parts.model,
        config.sft.optimizer,
        config.sft.updates,
        mesh,
        context_weight=config.sft.context_weight,
    )
    if config.model == "tiny":
        params = jax.jit(
            lambda key: model.mimetic_init(key, parts.model),
            out_shardings=sharding.parameter_shardings(mesh, parts.model),
        )(jax.random.key(config.seed))
    else:
        params, _ = hf.load_hf(config.model)
    optimizer_state = init_optimizer(params)
    batches = demonstration_batches(config, parts)
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
    )
    with Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=config.sft.updates)
        for update in range(config.sft.updates):
            params, optimizer_state, metrics = step(params, optimizer_state, next(batches))
            if update % 10 == 9 or update == config.sft.updates - 1:
                loss = analysis.finish(metrics)["loss"]
                progress.update(
                    bar, completed=update + 1, description=f"loss {loss:.3f} nats a token"
                )
                if not np.isfinite(loss):
                    raise FloatingPointError(
                        f"the warm start diverged at update {update}: "
                        "lower sft.optimizer.learning_rate"
                    )
    return params


def demonstration_batches(config: RunConfig, parts: assembly.Parts) -> Iterator[Batch]:
    """Yield packed batches for ever; the demonstrations are made once and repeat in a new order."""
    time_ = config.rollout.max_tokens
    episodes = [
        encode(segments, parts.tokenizer, name=str(i))
        for i, segments in enumerate(parts.environment.demonstrations(config.sft.demonstrations))
    ]
    episodes = [episode for episode in episodes if len(episode.token_ids) <= time_]
    rng = np.random.default_rng(config.seed)
    waiting: list[Trajectory] = []
    while True:
        waiting += [episodes[i] for i in rng.permutation(len(episodes))]
        while sum(len(t.token_ids) for t in waiting) > 2 * config.sft.rows * time_:
            # Looking at more than could ever fit would only cost time.
            head = waiting[: config.sft.rows * max(8, time_ // 16)]
            count = staging.fitting(head, rows=config.sft.rows, time=time_)
            batch, _ = staging.pack(
                waiting[:count],
                rows=config.sft.rows,
                time=time_,
                learner_version=0,
                staleness=0,
                gamma=1.0,
                pad_id=parts.tokenizer.token_to_id(data.PAD_TOKEN) or 0,
            )
            yield batch
            del waiting[:count]


def encode(segments: list[data.Segment], tokenizer: Tokenizer, *, name: str) -> Trajectory:
    """Encode a demonstration piece by piece, as an episode is built; sampled pieces are actions."""
    pieces = [
        (tokenizer.encode(text, add_special_tokens=False).ids, action) for text, action in segments
    ]
    token_ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in pieces])
    is_action = np.concatenate([np.full(len(ids), action) for ids, action in pieces])
    return Trajectory(
        prompt_id=name,
        sample=0,
        token_ids=token_ids,
        is_action=is_action,
        behavior_logprob=np.zeros(len(token_ids), np.float32),
        weight_version=np.where(is_action, 0, -1).astype(np.int32),
        reward=0.0,
        status="done",
    )


def _key(config: RunConfig, parts: assembly.Parts) -> str:
    """Name everything that the warm start depends on."""
    parts_of_key = (
        dataclasses.asdict(config.sft),
        dataclasses.asdict(parts.model),
        parts.environment.identity,
        config.model,
        config.seed,
        config.rollout.max_tokens,
        hashlib.sha256(parts.tokenizer.to_str().encode()).hexdigest(),
        data.dataset_fingerprint(parts.environment.train, 0),
    )
    return hashlib.sha256(
        json.dumps(parts_of_key, default=str, sort_keys=True).encode()
    ).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> None:
    """Train the warm start of a configuration and say where it is."""
    config = parse(sys.argv[1:] if arguments is None else arguments)
    assembly.prepare_process(config)
    started = time.monotonic()
    warm_start(config, assembly.build(config))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
