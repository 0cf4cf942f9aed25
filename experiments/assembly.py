"""The parts of a run, built from its configuration; the commands beside it share them."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from tokenizers import Tokenizer

from copc_jax import data, hf
from copc_jax.checkpoint import CheckpointError
from copc_jax.config import RunConfig
from copc_jax.model import ModelConfig
from copc_jax.rollout.client import RolloutError, SGLangClient
from copc_jax.rollout.episode import EpisodeBudget
from copc_jax.rollout.launch import LaunchError, ServerProcess, launch_embedded, launch_sglang
from copc_jax.tasks.search import SearchConfig, SearchTask
from copc_jax.tools.retriever import (
    HttpRetriever,
    Passage,
    Retriever,
    RetrieverError,
    TantivyRetriever,
)

# What a wrong setting, folder or address makes of a start: one line, no traceback.
START_ERRORS = (
    LaunchError,
    RolloutError,
    RetrieverError,
    CheckpointError,
    FileExistsError,
    FileNotFoundError,
    ValueError,
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of before anything is trained."""

    tokenizer: Tokenizer
    task: SearchTask
    search: SearchConfig
    retriever: Retriever
    passages: list[Passage]
    train: list[data.Question]
    held_out: list[data.Question]
    model: ModelConfig


def prepare_process(config: RunConfig, core: int | None = None) -> None:
    """Keep compiled programs between runs, and pin this process when the configuration asks.

    Pinning must come before the first use of JAX: the size of its thread pool follows the cores.
    """
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    # orbax reports every step of every save at the level of warnings.
    logging.getLogger("absl").setLevel(logging.ERROR)
    cache = compiled_programs(config)
    cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compiled_programs(config: RunConfig) -> Path:
    """Folder of the persistent compilation cache, shared by learner and embedded server."""
    return (config.cache_dir / "compiled").resolve()


def build(config: RunConfig) -> Parts:
    """Build corpus, questions, retriever, tokenizer and task, the same from the same configuration.

    Raises:
        ValueError: an HF folder that does not hold a model and a tokenizer.
    """
    search = SearchConfig(
        topk=config.search.topk,
        reward_search=config.search.reward_search,
        reward_no_search=config.search.reward_no_search,
        reward_wrong=config.search.reward_wrong,
        reward_format=config.search.reward_format,
    )
    passages, train, held_out = data.build_factbook()
    if config.search.retriever_url is None:
        retriever: Retriever = TantivyRetriever(passages)
    else:
        retriever = HttpRetriever(config.search.retriever_url)
    if config.model == "tiny":
        tokenizer = data.train_tokenizer(
            data.tokenizer_texts(passages, train, search),
            config.tiny.vocab_size,
            tags=search.tags.texts,
        )
        model = config.tiny.model(config.rollout.max_tokens)
    else:
        folder = Path(config.model)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(
                f'model {config.model!r} is neither "tiny" nor a folder with tokenizer.json'
            )
        tokenizer = Tokenizer.from_file(str(file))
        model = hf.load_config(folder)
    return Parts(
        tokenizer=tokenizer,
        task=SearchTask(tokenizer, retriever, search),
        search=search,
        retriever=retriever,
        passages=passages,
        train=train,
        held_out=held_out,
        model=model,
    )


def launch(config: RunConfig, folder: Path, log_file: Path) -> ServerProcess | None:
    """Start the rollout server that the configuration asks for; None when it names running ones."""
    if config.rollout.urls:
        return None
    if config.rollout.launch == "sglang":
        return launch_sglang(config.rollout.sglang_python, folder, log_file=log_file)
    return launch_embedded(
        folder,
        log_file=log_file,
        slots=config.rollout.slots,
        max_length=config.rollout.max_tokens,
        cpus=config.cpus[1:] if config.cpus else (),
        compilation_cache=compiled_programs(config),
    )


def client(
    config: RunConfig, urls: Sequence[str], on_event: Callable[[str, str, str], None] | None = None
) -> SGLangClient:
    """Client of the run's servers; enter it on the loop that uses it."""
    rollout = config.rollout
    return SGLangClient(
        urls,
        control_urls=rollout.control_urls or None,
        timeout_s=rollout.timeout_seconds,
        deadline_s=rollout.deadline_seconds,
        pause_mode=rollout.pause_mode,
        on_event=on_event,
    )


def budget(config: RunConfig) -> EpisodeBudget:
    """Limits of one episode."""
    rollout = config.rollout
    return EpisodeBudget(
        max_turns=rollout.max_turns,
        max_tokens=rollout.max_tokens,
        max_new_tokens=rollout.max_new_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
    )
