"""Supervised warm start: teaches the format of the task, and leaves the reasoning to RL.

    python experiments/sft.py --task=search --sft.updates=600

writes an HF folder (weights, configuration, tokenizer) into the cache and prints its path. `run.py`
does the same on first use and takes the cached folder afterwards.

    python experiments/sft.py --task=math --model DIR --data corpus.jsonl

trains on chats from files instead, as public corpora have them (`datasets.chat_segments` says which
forms), and on nothing in them that the model did not write.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import assembly
import jax
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from copc_jax import analysis, data, datasets, hf, learner, model, sharding, staging
from copc_jax.config import parse_command, refuse
from copc_jax.learner import OptimizerConfig
from copc_jax.settings import RunConfig
from copc_jax.tasks import math as math_task
from copc_jax.tasks import search
from copc_jax.types import Batch, Trajectory


def warm_start(config: RunConfig, parts: assembly.Parts) -> Path:
    """Return the HF folder of the warm start, training it when the cache does not hold it."""
    if parts.folder is not None and not config.sft.updates:
        print(f"no warm start: {parts.folder} as it is")
        return parts.folder
    folder = config.cache_dir / f"sft-{_key(config, parts)}"
    if (folder / "config.json").exists():
        print(f"warm start: {folder} (cached)")
        return folder
    train_into(folder, config, parts)
    print(f"warm start: {folder}")
    return folder


def train_into(folder: Path, config: RunConfig, parts: assembly.Parts) -> None:
    """Train on demonstrations and write the HF folder."""
    params = train(config, parts)
    hf.save_hf(
        folder,
        params,
        parts.model,
        tokenizer_json=parts.tokenizer.to_str(),
        extra_files={
            **side_files(parts),
            "sft.json": json.dumps(dataclasses.asdict(config.sft), indent=2),
        },
    )


def train(config: RunConfig, parts: assembly.Parts) -> model.Params:
    """Train on demonstrations, with a progress line, and return the parameters."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.model, jax.local_devices())
    init_optimizer, step = learner.build_sft(
        parts.model,
        config.sft.optimizer,
        config.sft.updates,
        mesh,
        context_weight=config.sft.context_weight,
    )
    if parts.folder is None:
        params = jax.jit(
            lambda key: model.mimetic_init(key, parts.model),
            out_shardings=sharding.parameter_shardings(mesh, parts.model),
        )(jax.random.key(config.seed))
    else:
        shardings = sharding.parameter_shardings(mesh, parts.model)
        params, _ = hf.load_hf(parts.folder, shardings=shardings)
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


# --------------------------------------------------------------------------------------------------
# Corpora


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Chats from files, to train on."""

    data: tuple[str, ...] = ()
    """Files of chats (JSON lines, JSON, Parquet); none trains on the task's demonstrations."""
    epochs: float = 4.0
    """Passes over the chats; 0 takes sft.updates."""
    out: Path | None = None
    """HF folder to write; by default runs/sft-<task>-<time>."""

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        if not (math.isfinite(self.epochs) and self.epochs >= 0):
            raise ValueError(f"epochs must be more than 0, or 0 for sft.updates; got {self.epochs}")


def read_corpus(
    files: Sequence[str], config: RunConfig, parts: assembly.Parts
) -> tuple[list[list[data.Segment]], int]:
    """Read chats, print what there is and what was left out.

    Returns:
        The pieces of each chat, and the number of their tokens.

    Raises:
        ValueError: an unreadable file, or no chat that can be trained on.
    """
    form = _form(config, parts)
    end = _end_of_text(parts)
    chats: list[list[data.Segment]] = []
    dropped: dict[str, list[str]] = {}
    total = trained = 0
    for file in files:
        for row, where in datasets.read_rows(Path(file)):
            try:
                chat = datasets.chat_segments(row, **form)
            except datasets.UnusableChatError as error:
                dropped.setdefault(str(error), []).append(where)
                continue
            if end and chat[-1][1] and not chat[-1][0].endswith(end):
                chat[-1] = (chat[-1][0] + end, True)
            encoded = encode(chat, parts.tokenizer, name=where)
            if len(encoded.token_ids) > config.rollout.max_tokens:
                reason = f"longer than rollout.max_tokens, {config.rollout.max_tokens}"
                dropped.setdefault(reason, []).append(where)
                continue
            chats.append(chat)
            total += len(encoded.token_ids)
            trained += int(encoded.is_action.sum())
    left_out = sum(map(len, dropped.values()))
    print(f"{len(chats)} chats: {total} tokens, {trained} of them trained on; {left_out} left out")
    for reason, places in sorted(dropped.items(), key=lambda item: -len(item[1])):
        print(f"  {len(places)} left out: {reason} (first: {places[0]})")
    if not chats:
        raise ValueError(f"no chat of {', '.join(files)} can be trained on; see the reasons above")
    return chats, total


def _form(config: RunConfig, parts: assembly.Parts) -> dict[str, Any]:
    """How episodes write prompts and what tools return, as `datasets.chat_segments` takes it."""
    task: Any = parts.task
    if isinstance(task, search.SearchTask):
        inside = task.config.tags.information
        render = functools.partial(search.render_notice, task.config)
    else:
        inside = task.config.interpreter
        render = lambda text: math_task.render_results(task.config, [text])
    names = (re.fullmatch(r"<([\w-]+)>", text) for text in parts.environment.tags)
    tags = [match[1] for match in names if match]
    form: dict[str, Any] = {"observation_tag": inside, "render_tool": render, "tags": tags}
    name = getattr(config, config.task).format
    if parts.folder is not None and name != "short":
        form["apply_chat_template"] = hf.chat_template(parts.folder)
    if name == "qwen":
        # Each turn is a message, and the model writes its end.
        form["end"] = parts.task.stop[0]
    return form


def _end_of_text(parts: assembly.Parts) -> str:
    """What a model writes after its last word; the default model ends with its answer's tag."""
    ids = parts.model.eos_token_ids
    return (parts.tokenizer.id_to_token(ids[0]) or "") if ids else ""


def prepare_corpus(
    corpus: CorpusConfig, config: RunConfig
) -> tuple[Path, RunConfig, assembly.Parts]:
    """Read the chats of files in place of the task's demonstrations.

    Returns:
        The HF folder to write, and what `train` takes.

    Raises:
        ValueError: unusable files or model.
        FileExistsError: the folder holds a model already.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = corpus.out or Path("runs") / f"sft-{config.task}-{now}"
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds a model already: name another folder with --out")
    parts = assembly.build(config)
    chats, tokens = read_corpus(corpus.data, config, parts)
    updates = config.sft.updates
    if corpus.epochs:
        # Rows are filled to some 95%.
        a_batch = 0.95 * config.sft.rows * config.rollout.max_tokens
        updates = max(1, math.ceil(corpus.epochs * tokens / a_batch))
    print(f"{updates} updates", flush=True)
    warm = dataclasses.replace(config.sft, updates=updates, demonstrations=len(chats))
    environment = dataclasses.replace(
        parts.environment, demonstrations=lambda count: iter(chats[:count])
    )
    return (
        folder,
        dataclasses.replace(config, sft=warm),
        dataclasses.replace(parts, environment=environment),
    )


def side_files(parts: assembly.Parts) -> dict[str, str]:
    """What lies beside weights and tokenizer of a model that was trained on the task."""
    files = {} if parts.folder is None else hf.side_files(parts.folder)
    return {**files, assembly.TASK_FILE: json.dumps(dict(parts.environment.form), indent=2)}


def _defaults(
    config: RunConfig, flag: Callable[[str], str | None]
) -> tuple[CorpusConfig, RunConfig]:
    """With files, plain fine-tuning: Chain-of-Agents' epochs and learning rate, and length."""
    if flag("--data") is None:
        return CorpusConfig(), config
    warm = dataclasses.replace(config.sft, context_weight=0.0)
    if flag("--model") not in (None, "tiny"):
        optimizer = OptimizerConfig(learning_rate=1e-5, warmup_updates=10, schedule="cosine")
        warm = dataclasses.replace(warm, optimizer=optimizer)
        rollout = dataclasses.replace(config.rollout, max_tokens=5120)
        config = dataclasses.replace(config, rollout=rollout)
    epochs = 0.0 if flag("--sft.updates") is not None else CorpusConfig.epochs
    return CorpusConfig(epochs=epochs), dataclasses.replace(config, sft=warm)


def main(arguments: list[str] | None = None) -> Path:
    """Train the warm start of a configuration, or on a corpus, and return its folder."""
    corpus, config = parse_command(
        CorpusConfig,
        _defaults,
        sys.argv[1:] if arguments is None else arguments,
        "Fine-tune a model on the task's demonstrations, or on chats from files.",
    )
    started = time.monotonic()
    try:
        assembly.prepare_process(config)
        if corpus.data:
            folder, config, parts = prepare_corpus(corpus, config)
        else:
            folder, parts = None, assembly.build(config)
    except assembly.START_ERRORS as error:
        refuse(error)
    if folder is None:
        folder = warm_start(config, parts)
    else:
        train_into(folder, config, parts)
        print(f"trained model: {folder}")
    print(f"{time.monotonic() - started:.0f} s")
    return folder


if __name__ == "__main__":
    main()
