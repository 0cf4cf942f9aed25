"""The parts of a run, built from its configuration; the commands beside it share them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Tokenizer

from copc_jax import (
    access,
    data,
    datasets,
    factbook,
    gguf,
    hf,
    phantom,
    problems,
    search_demonstrations,
    wikipedia,
)
from copc_jax.checkpoint import CheckpointError
from copc_jax.config import PAPER_MODELS, TASK_FILE
from copc_jax.distributed import PeerError
from copc_jax.model import ModelConfig
from copc_jax.rollout.client import RolloutError, SGLangClient
from copc_jax.rollout.collector import Collector
from copc_jax.rollout.episode import EpisodeBudget, Task
from copc_jax.rollout.launch import LaunchError, ServerProcess, launch_embedded, launch_sglang
from copc_jax.rollout.recording import RecordingError
from copc_jax.settings import RunConfig
from copc_jax.tasks import math
from copc_jax.tasks.search import SearchConfig, SearchTask, extract_answer, read_tags
from copc_jax.tasks.verify import Verifier, VerifierError, check_gold
from copc_jax.tools.python import Sandbox, SandboxError, make_sandbox
from copc_jax.tools.retriever import HttpRetriever, Passage, RetrieverError, TantivyRetriever
from copc_jax.types import Prompt

# What a wrong setting, folder or address makes of a start: one line, no traceback.
START_ERRORS = (
    LaunchError,
    RolloutError,
    RetrieverError,
    SandboxError,
    VerifierError,
    CheckpointError,
    PeerError,
    RecordingError,
    FileExistsError,
    FileNotFoundError,
    ImportError,
    ValueError,
)


NO_CORPUS = (
    "warning: the questions come from files and the passages from the built-in corpus, which "
    "hardly answers them; name a server of the right corpus with --search.retriever-url"
)


@dataclasses.dataclass(frozen=True)
class Environment:
    """A task with everything it is made of.

    Attributes:
        make_task: prompt format, tools and reward, as episodes play it, for a tokenizer and the
            chat template of its model, if the format takes one.
        train: prompts to train on.
        held_out: prompts to evaluate on.
        texts: what a tokenizer for the task is trained on.
        tags: texts that get one token each.
        demonstrations: yields warm-start episodes, `count` of them.
        tools: to be entered on the loop that plays episodes.
        check: uses each tool once, before anything is trained.
        identity: everything that the text of demonstrations depends on.
        extract_answer: the answer in the texts that the policy sampled, one a turn; None without.
        form: settings that a model trained on this task cannot do without, by their flag.
        pattern: what a token may span, as `data.train_tokenizer` takes it.
    """

    make_task: Callable[..., Task]
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    texts: Callable[[], Iterator[str]]
    tags: tuple[str, ...]
    demonstrations: Callable[[int], Iterator[list[data.Segment]]]
    tools: tuple[contextlib.AbstractAsyncContextManager[Any], ...]
    check: Callable[[], Coroutine[Any, Any, object]]
    identity: object
    extract_answer: Callable[[Sequence[str]], str | None]
    form: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pattern: str | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of before anything is trained.

    Attributes:
        tokenizer: of the model.
        model: its configuration, with every token that ends its turns.
        task: as episodes play it.
        environment: what the task is made of.
        folder: HF folder of a pretrained model; None for the small one.
    """

    tokenizer: Tokenizer
    model: ModelConfig
    task: Task
    environment: Environment
    folder: Path | None = None


def prepare_process(config: RunConfig, core: int | None = None) -> None:
    """Keep compiled programs between runs, and pin this process when the configuration asks.

    Pinning must come before the first use of JAX: the size of its thread pool follows the cores.
    """
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    # orbax reports every step of every save at the level of warnings, and a failed one with a
    # traceback from each of its threads; what a person needs is raised by the save itself.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _say_unraisable
    cache = compiled_programs(config)
    cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _say_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Leave out what tensorstore calls back, many times, when the save that waited has failed."""
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def compiled_programs(config: RunConfig) -> Path:
    """Folder of the persistent compilation cache, shared by learner and embedded server."""
    return (config.cache_dir / "compiled").resolve()


def build(config: RunConfig) -> Parts:
    """Build data, tools, tokenizer and task, the same from the same configuration.

    Raises:
        ValueError: an HF folder that does not hold a model and a tokenizer.
    """
    folder = model_folder(config)
    environment = ENVIRONMENTS[config.task](config)
    chat = None
    if folder is None:
        tokenizer = data.train_tokenizer(
            environment.texts(),
            config.tiny.vocab_size,
            tags=environment.tags,
            pattern=environment.pattern,
        )
        model = config.tiny.model(config.rollout.max_tokens)
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = hf.load_config(folder)
        stops = hf.eos_token_ids(folder, model, tokenizer)
        model = dataclasses.replace(model, eos_token_ids=stops)
        check_form(folder, environment)
        # The short formats are the small model's own, and "qwen" writes its chat itself.
        if getattr(config, config.task).format in ("long", "retool"):
            chat = hf.chat_template(folder)
    if chat is not None:
        environment = dataclasses.replace(
            environment, demonstrations=functools.partial(_chats, environment, chat)
        )
    return Parts(
        tokenizer=tokenizer,
        model=model,
        task=environment.make_task(tokenizer, chat),
        environment=environment,
        folder=folder,
    )


def model_folder(config: RunConfig) -> Path | None:
    """Return the HF folder of a pretrained model, or None for the small one.

    The model that comes as a package is converted on first use, into the cache.

    Raises:
        ImportError: its packages are not installed.
        ValueError: there is no such folder.
    """
    if config.model == "tiny":
        return None
    if config.model != gguf.SMOLLM2:
        folder = Path(config.model)
        if not (folder / "tokenizer.json").exists():
            if config.model in PAPER_MODELS:
                raise ValueError(
                    f"preset {config.preset} needs the checkpoint {config.model}: download it from "
                    f"the Hugging Face hub (hf download {config.model} --local-dir FOLDER) and "
                    "give its folder with --model=FOLDER"
                )
            raise ValueError(
                f'model {config.model!r} is neither "tiny", "{gguf.SMOLLM2}" nor a folder with '
                "tokenizer.json"
            )
        return folder
    folder = config.cache_dir / gguf.SMOLLM2
    if not (folder / "config.json").exists():
        file = gguf.smollm2_file()
        columns = (TextColumn(f"converting {gguf.SMOLLM2}, once"), BarColumn())
        with Progress(*columns, TextColumn("{task.completed}/{task.total} tensors")) as progress:
            bar = progress.add_task("", total=None)
            gguf.convert(
                file,
                folder,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    print(f"model {gguf.SMOLLM2}: {folder}")
    return folder


def _chats(
    environment: Environment, chat: hf.ChatTemplate, count: int
) -> Iterator[list[data.Segment]]:
    """Yield demonstrations whose prompts are written as the model's chat, as in episodes."""
    for (prompt, _), *turns in environment.demonstrations(count):
        yield [(chat([{"role": "user", "content": prompt}]), False), *turns]


def check_form(folder: Path, environment: Environment) -> None:
    """Refuse a model that was trained on another form of the task.

    What a foreign checkpoint was trained on is not known, and a model of another task can be
    trained on this one.

    Raises:
        ValueError: the folder's `TASK_FILE` names other tags or another format; names both.
    """
    file = folder / TASK_FILE
    if not file.exists():
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    if saved.get("task") != environment.form.get("task"):
        return
    for name, value in environment.form.items():
        if saved.get(name, value) != value:
            raise ValueError(
                f"model {folder} was trained with {name}={saved[name]}, and this run has "
                f"{name}={value}: give --{name}={saved[name]}, or another model"
            )


def _corpus(
    config: RunConfig,
) -> tuple[list[Passage], list[factbook.Question], list[factbook.Question]]:
    """Passages, training questions and held-out questions of the search task."""
    if config.search.corpus == "wikipedia":
        print(wikipedia.ATTRIBUTION)
        return wikipedia.build_wikipedia()
    if config.search.phantom_dir is not None and config.search.corpus == "phantom":
        return phantom.build_phantom(config.search.phantom_dir)
    return factbook.build_factbook()


def _search(config: RunConfig) -> Environment:
    make_format = SearchConfig.search_r1 if config.search.format == "long" else SearchConfig
    search = make_format(
        tags=read_tags(config.search.tags),
        topk=config.search.topk,
        reward_search=config.search.reward_search,
        reward_no_search=config.search.reward_no_search,
        reward_wrong=config.search.reward_wrong,
        reward_format=config.search.reward_format,
    )
    passages, train, held_out = _corpus(config)
    if config.search.retriever_url is None:
        retriever, tools = TantivyRetriever(passages), ()
    else:
        key = access.read_key(config.search.retriever_api_key)
        retriever = HttpRetriever(config.search.retriever_url, api_key=key)
        tools = (retriever,)
    asked, held_out_asked = questions(
        config,
        [question.to_prompt() for question in train],
        [question.to_prompt() for question in held_out],
    )
    if config.data.train and config.search.retriever_url is None:
        print(NO_CORPUS)

    def demonstrations(count: int) -> Iterator[list[data.Segment]]:
        return search_demonstrations.demonstrations(
            train,
            retriever,
            passages,
            config=search,
            seed=config.seed,
            count=count,
            one_hop_share=config.search.one_hop_share,
        )

    return Environment(
        make_task=lambda tokenizer, chat=None: SearchTask(
            tokenizer, retriever, search, apply_chat_template=chat
        ),
        train=asked,
        held_out=held_out_asked,
        texts=lambda: search_demonstrations.tokenizer_texts(passages, train, search),
        tags=search.tags.texts,
        demonstrations=demonstrations,
        tools=tools,
        check=lambda: retriever.search(["capital"], 1),
        identity=(dataclasses.asdict(search), config.search.one_hop_share),
        form={
            "task": "search",
            "search.format": config.search.format,
            "search.tags": ",".join(dataclasses.astuple(search.tags)),
        },
        extract_answer=lambda turns: extract_answer(turns, search.tags),
    )


def questions(
    config: RunConfig,
    train: Sequence[Prompt],
    held_out: Sequence[Prompt],
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return what to train on and to evaluate on: the files of `--data`, or what is given.

    Args:
        config: of the run.
        train: built-in training questions.
        held_out: built-in held-out questions.

    Raises:
        ValueError: an unusable file or row, or weights that do not fit its sources.
    """
    if not config.data.train:
        return train, held_out
    sets = [read_files(config, files) for files in (config.data.train, config.data.held_out)]
    asked = [{prompt.messages[-1]["content"] for prompt in prompts} for prompts in sets]
    shared = len(asked[0] & asked[1])
    if shared:
        print(f"warning: {shared} questions are both in data.train and in data.held_out")
    train, held_out = sets
    if config.data.weights:
        train = datasets.mix(train, config.data.source_weights)
    # Evaluations during training take the first ones, which would all be of the first file.
    return train, random.Random(0).sample(held_out, len(held_out))


def read_files(config: RunConfig, files: Sequence[str]) -> list[Prompt]:
    """Read question files as `--data` says, and print what is worth knowing about them.

    Raises:
        ValueError: an unusable file or row; on the math task also a gold answer that no answer
            could equal.
    """
    return datasets.read_questions(
        files,
        instructions=config.data.instructions,
        check_gold=check_gold if config.task == "math" else None,
        note=print,
    )


def _math(config: RunConfig) -> Environment:
    settings = config.math
    form = math.FORMATS[settings.format]
    if settings.tags:
        names = zip(("code", "interpreter", "answer"), settings.tags.split(","), strict=True)
        form = dataclasses.replace(form, **dict(names))
    form = dataclasses.replace(form, max_calls=settings.max_calls)
    wanted = problems.MathProblemsConfig(
        _problem_sources(config), settings.train, settings.held_out
    )
    # With questions from files they are needed for a warm start only, and take seconds to make.
    built = functools.cache(lambda: problems.build_problems(wanted, seed=0))
    asked, held_out_asked = questions(
        config,
        *(
            [problem.to_prompt() for problem in split]
            for split in (((), ()) if config.data.train else built())
        ),
    )
    sandbox = _sandbox(config)
    verifier = Verifier(settings.processes)
    texts: dict[str, Callable[[str], str]] = {
        "render_prompt": functools.partial(math.render_prompt, form),
        "render_code": functools.partial(math.render_code, form),
        "render_answer": functools.partial(math.render_answer, form),
    }

    def demonstrations(count: int) -> Iterator[list[data.Segment]]:
        # A sandbox of its own, because the other belongs to the loop of the episodes.
        with asyncio.Runner() as runner:
            shown = _sandbox(config)
            try:
                yield from problems.demonstrations(
                    built()[0],
                    **texts,
                    render_result=lambda text: math.render_results(form, [text]),
                    run=lambda code: runner.run(shown.run(code)).text,
                    seed=config.seed,
                    count=count,
                    direct_share=settings.direct_share,
                    direct_answer=settings.direct_answer,
                    slip_share=settings.slip_share,
                )
            finally:
                runner.run(shown.close())

    async def check() -> None:
        execution = await sandbox.run("print(6 * 7)")
        if execution.text != "42":
            raise SandboxError(f"{settings.sandbox}: print(6 * 7) gave {execution.text!r}, not 42")

    return Environment(
        make_task=lambda tokenizer, chat=None: math.MathTask(
            tokenizer, sandbox, verifier, form, apply_chat_template=chat
        ),
        train=asked,
        held_out=held_out_asked,
        texts=lambda: problems.tokenizer_texts(built()[0][:2000], **texts),
        tags=(*form.texts, "\\boxed{"),
        demonstrations=demonstrations,
        tools=(sandbox, _closing(verifier)),
        check=check,
        identity=(dataclasses.asdict(form), dataclasses.replace(settings, processes=1)),
        form={
            "task": "math",
            "math.format": settings.format,
            "math.tags": ",".join((form.code, form.interpreter, form.answer)),
        },
        extract_answer=lambda turns: math.extract_answer(turns, form),
        pattern=problems.TOKEN_PATTERN,
    )


def _sandbox(config: RunConfig) -> Sandbox:
    settings = config.math
    return make_sandbox(
        settings.sandbox,
        url=settings.sandbox_url,
        time_limit_s=settings.time_limit_seconds,
        memory_limit_mb=settings.memory_limit_mb,
        output_limit_chars=settings.output_limit,
        processes=settings.processes,
    )


def _problem_sources(config: RunConfig) -> tuple[problems.ProblemSource, ...]:
    """The generators that the flags name, with the difficulty of the default mixture if in it."""
    default = {source.name: source for source in problems.DEFAULT_SOURCES}
    chosen = {}
    for text in config.math.sources or tuple(default):
        name, _, weight = text.partition("=")
        known = default.get(name, problems.ProblemSource(name))
        chosen[name] = dataclasses.replace(known, weight=float(weight or known.weight))
    for text in config.math.options:
        path, _, value = text.partition("=")
        name, _, option = path.partition(".")
        if name not in chosen:
            raise ValueError(f"math.options {text!r}: no such source; there are {list(chosen)}")
        try:
            options = {**chosen[name].options, option: json.loads(value)}
        except ValueError:
            raise ValueError(f"math.options {text!r}: the value is no JSON") from None
        chosen[name] = dataclasses.replace(chosen[name], options=options)
    return tuple(chosen.values())


@contextlib.asynccontextmanager
async def _closing(verifier: Verifier) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.to_thread(verifier.close)


ENVIRONMENTS: dict[str, Callable[[RunConfig], Environment]] = {"search": _search, "math": _math}


def server_key(config: RunConfig) -> str | None:
    """Key of the run's servers: what the configuration points to, or a new one for its own server.

    Raises:
        ValueError: there is no readable key at that place.
    """
    key = access.read_key(config.rollout.api_key)
    return secrets.token_urlsafe(32) if key is None and not config.rollout.urls else key


def launch(
    config: RunConfig, folder: Path, log_file: Path, key: str | None = None
) -> ServerProcess | None:
    """Start the rollout server that the configuration asks for; None when it names running ones.

    Args:
        config: of the run.
        folder: the weights that it starts with.
        log_file: later weights may lie beside it, or deeper.
        key: what its requests must bring.
    """
    if config.rollout.urls:
        return None
    if config.rollout.launch == "sglang":
        return launch_sglang(
            config.rollout.sglang_python,
            folder,
            log_file=log_file,
            device=config.rollout.sglang_device,
            slots=config.rollout.slots,
            max_length=config.rollout.max_tokens,
            api_key=key,
            arguments=shlex.split(config.rollout.sglang_args),
        )
    return launch_embedded(
        folder,
        log_file=log_file,
        slots=config.rollout.slots,
        max_length=config.rollout.max_tokens,
        cpus=config.cpus[1:] if config.cpus else (),
        compilation_cache=compiled_programs(config),
        # Mode "exact" is for controlled comparisons: two runs with one seed are to be the same.
        arguments=["--enable-deterministic-inference"] if config.staleness_mode == "exact" else [],
        weight_roots=[log_file.parent],
        api_key=key,
    )


def client(
    config: RunConfig,
    urls: Sequence[str],
    on_event: Callable[[str, str, str], None] | None = None,
    key: str | None = None,
) -> SGLangClient:
    """Client of the run's servers, with their key; enter it on the loop that uses it."""
    rollout = config.rollout
    return SGLangClient(
        urls,
        control_urls=rollout.control_urls or None,
        timeout_s=rollout.timeout_seconds,
        deadline_s=rollout.deadline_seconds,
        pause_mode=rollout.pause_mode,
        on_event=on_event,
        api_key=key,
    )


def budget(config: RunConfig) -> EpisodeBudget:
    """Limits of one episode."""
    rollout = config.rollout
    limits = EpisodeBudget(
        max_turns=rollout.max_turns,
        max_tokens=rollout.max_tokens,
        max_new_tokens=rollout.max_new_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
    )
    if config.task == "math":
        # Sandboxes end each call themselves. How long it waits for the calls of other episodes
        # before says nothing about the policy, which must not read of it.
        limits = dataclasses.replace(limits, tool_timeout_s=float("inf"))
    return limits


def enter_tools(collector: Collector, parts: Parts) -> None:
    """Open the tools on the collector's loop, and try them before anything is trained."""
    for tool in parts.environment.tools:
        collector.enter(tool)
    collector.call(parts.environment.check())
