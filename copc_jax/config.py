"""Where the settings of a run come from: presets with their sources, the command line, saved runs.

A flag goes over the preset of its task, or over the settings of the run that is resumed or
replayed.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from copc_jax.learner import OptimizerConfig
from copc_jax.methods import METHODS
from copc_jax.model import ModelConfig, RopeScaling
from copc_jax.settings import (
    DistributedConfig,
    EvalConfig,
    MathTaskConfig,
    MeshConfig,
    RolloutConfig,
    RunConfig,
    SearchTaskConfig,
    SFTConfig,
    TinyModelConfig,
    ViewerConfig,
    require,
)

# Where a run keeps its resolved configuration, inside its folder.
CONFIG_FILE = "config.json"

# What a model was trained on, beside its weights: the task and the form of its text.
TASK_FILE = "task.json"

# Five turns are four searches and the answer. Of the longest passages, 800 characters, the small
# vocabulary makes some 240 tokens.
_LONG_PASSAGES = RolloutConfig(
    max_turns=5, max_tokens=1024, max_new_tokens=48, max_observation_tokens=320
)

# The models of the paper's runs by their names on the Hugging Face hub, with the sizes of their
# config.json: what a preset is checked with before its checkpoint is there.
PAPER_MODELS: dict[str, ModelConfig] = {
    "meta-llama/Llama-3.2-3B-Instruct": ModelConfig(
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        max_position_embeddings=131_072,
    ),
    "Qwen/Qwen3-4B-Instruct-2507": ModelConfig(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=262_144,
        qk_norm=True,
    ),
}

# Each of the paper's presets, and for each of its settings where that comes from: "stated" with
# the section, or "assumed" with the reason. Table 5, which holds the rest, is not public.
_PAPER: dict[str, str] = {
    "loss.eps_low": "stated in C.2.1",
    "loss.eps_high": "stated in C.2.1",
    "loss.eta_policy": "stated in C.2.1",
    "loss.eta_advantage": "stated in C.2.1",
    "loss.gamma": "assumed, the default of public trainers",
    "loss.lambda_": "assumed, the default of public trainers",
    "loss.value_clip": "assumed; C.2.1 implies that there is one",
    "staleness": "assumed, of the 8, 12, 16 and 64 in sections 4.3 and 6.4",
    "batch_size": "assumed, what C.2.1 states for SAO and for a minibatch of AReaL",
    "samples_per_prompt": "assumed, 64 prompts a batch; B.4 has groups of responses",
    "updates": "assumed",
    "critic_warmup_updates": "assumed: return correction needs a critic that explains something",
    "actor.learning_rate": "assumed, as Search-R1 and Chain-of-Agents have it",
    "actor.warmup_updates": "assumed",
    "critic.learning_rate": "assumed, as Search-R1 and Chain-of-Agents have it",
    "rollout.max_in_flight": "assumed, one batch",
    "rollout.slots": "assumed",
    "rollout.launch": "assumed: the embedded server is too slow for this model",
    "rollout.max_new_tokens": "assumed",
    "rollout.max_observation_tokens": "assumed",
    "rollout.deadline_seconds": "assumed, for long turns",
    "rollout.timeout_seconds": "assumed, for long turns",
    "rollout.stall_seconds": "assumed, for long turns",
    "mesh.data": "assumed: C.2 states 8 H200, not how learner and servers share them",
    "mesh.model": "assumed: C.2 states 8 H200, not how learner and servers share them",
    "micro_batches": "assumed, one row a device at a time",
    "remat": "assumed, for memory",
    "logprob_chunk": "assumed, for memory",
    "sft.updates": "stated in C.2 that fine-tuning comes before; sft.py --data does it",
}
PAPER_SOURCES: dict[str, dict[str, str]] = {
    "paper-search": {
        **_PAPER,
        "model": "stated in C.2, fine-tuned on 2,000 Chain-of-Agents examples first",
        "search.reward_search": "stated in C.1",
        "search.reward_no_search": "stated in C.1",
        "search.reward_wrong": "assumed",
        "search.reward_format": "assumed",
        "search.format": "assumed, Search-R1's",
        "search.tags": "assumed, those of the fine-tuning corpus",
        "search.topk": "assumed, as Search-R1 has it",
        "rollout.max_turns": "assumed, as Chain-of-Agents has it",
        "rollout.max_tokens": "assumed, what C.2.2 states for evaluation; the prompt counts here",
    },
    "paper-math": {
        **_PAPER,
        "task": "stated in C.2",
        "model": "stated in C.2 (that it is the 2507 release is assumed), "
        "fine-tuned on ReTool's corpus first",
        "math.format": "assumed, that of the fine-tuning corpus",
        "math.max_calls": "assumed, as ReTool's public port has it",
        "rollout.max_turns": "assumed, as ReTool's public port has it",
        "rollout.max_tokens": "assumed, what C.2.2 states for evaluation; the prompt counts here",
    },
}

_PAPER_RUN = RunConfig(
    samples_per_prompt=8,
    batch_size=512,
    micro_batches=64,
    critic_warmup_updates=20,
    remat=True,
    logprob_chunk=1024,
    actor=OptimizerConfig(learning_rate=1e-6, warmup_updates=10),
    critic=OptimizerConfig(learning_rate=1e-5, warmup_updates=5),
    sft=SFTConfig(updates=0),
)
_PAPER_ROLLOUT = RolloutConfig(
    launch="sglang",
    max_in_flight=512,
    slots=256,
    timeout_seconds=1800.0,
    deadline_seconds=3600.0,
    stall_seconds=3600.0,
)

# The paper's table of training settings is not public: all but the numbers of COPC itself are
# working values found on the laptop task, and README lists them as assumptions.
PRESETS: dict[str, RunConfig] = {
    "search": RunConfig(task="search"),
    "search/wikipedia": RunConfig(
        task="search", rollout=_LONG_PASSAGES, search=SearchTaskConfig(corpus="wikipedia")
    ),
    "search/long": RunConfig(task="search", rollout=_LONG_PASSAGES),
    "search/phantom": RunConfig(task="search", rollout=_LONG_PASSAGES),
    "math": RunConfig(
        task="math",
        tiny=TinyModelConfig(vocab_size=2048),
        rollout=RolloutConfig(max_tokens=96, max_new_tokens=32, max_observation_tokens=24),
        # Signs and parentheses make basic_arithmetic harder to copy than to ask.
        math=MathTaskConfig(sources=("products", "chain_sum", "lcm")),
        # Numbers in a problem are random: learning to foresee them would only add noise.
        sft=SFTConfig(rows=6, updates=1200, demonstrations=12_000, context_weight=0.0),
    ),
    "paper-search": dataclasses.replace(
        _PAPER_RUN,
        preset="paper-search",
        model="meta-llama/Llama-3.2-3B-Instruct",
        rollout=dataclasses.replace(
            _PAPER_ROLLOUT,
            max_turns=8,
            max_tokens=8192,
            max_new_tokens=2048,
            max_observation_tokens=1024,
        ),
        search=SearchTaskConfig(format="long", tags="chain-of-agents", topk=3),
        mesh=MeshConfig(data=8),
    ),
    "paper-math": dataclasses.replace(
        _PAPER_RUN,
        task="math",
        preset="paper-math",
        model="Qwen/Qwen3-4B-Instruct-2507",
        micro_batches=512,
        rollout=dataclasses.replace(
            _PAPER_ROLLOUT,
            max_turns=16,
            max_tokens=38_912,
            max_new_tokens=16_384,
            max_observation_tokens=512,
        ),
        math=MathTaskConfig(format="retool", max_calls=16),
        # Scores of 38,912 tokens fit only where each device has one of the key-value heads.
        mesh=MeshConfig(model=8),
    ),
}

# Half the episodes of an update, and short evaluations, all of the same questions. Model and warm
# start stay those of the task: the warm start of a smaller model knew too little to learn from.
for _task in ("search", "math"):
    PRESETS[f"{_task}/quick"] = dataclasses.replace(
        PRESETS[_task],
        preset="quick",
        updates=120,
        batch_size=32,
        micro_batches=8,
        eval=EvalConfig(every=15, questions=256, final_questions=256),
        viewer=ViewerConfig(every=0),
        checkpoint_every=100,
        keep_checkpoints=1,
    )


def sources(config: RunConfig) -> list[str]:
    """Give one line a setting of the run's preset: its value, and where that comes from."""
    if config.preset not in PAPER_SOURCES:
        return []
    preset = PRESETS[config.preset]
    lines = []
    for name, source in PAPER_SOURCES[config.preset].items():
        value, wanted = (operator.attrgetter(name)(each) for each in (config, preset))
        changed = "" if value == wanted else f"; changed, the preset has {wanted}"
        lines.append(f"{name} = {value}: {source}{changed}")
    return lines


def parse(arguments: Sequence[str], presets: Mapping[str, RunConfig] = PRESETS) -> RunConfig:
    """Read the command line over `--preset`, the defaults of `--task`, or a saved run.

    The last is that of `--resume` or of `--replay`.

    A corpus or a format of the search task may have a preset of its own, "search/<name>".

    Raises:
        SystemExit: with status 2 and a message that names the field, on unknown flags and
            impossible values; with status 0 after `--help`.
    """
    return tyro.cli(
        RunConfig,
        args=list(arguments),
        default=_default(arguments, presets),
        description="Train a language model with asynchronous off-policy RL.",
        config=(tyro.conf.FlagConversionOff,),
    )


Command = TypeVar("Command")


def parse_command(
    kind: type[Command],
    adapt: Callable[[RunConfig, Callable[[str], str | None]], tuple[Command, RunConfig]],
    arguments: Sequence[str],
    description: str,
    presets: Mapping[str, RunConfig] = PRESETS,
) -> tuple[Command, RunConfig]:
    """Read the command line of a command that has flags of its own beside those of a run.

    Args:
        kind: dataclass of the command's own flags.
        adapt: the defaults of both, from the preset of the task and a function that gives the value
            of a flag, such as "--data", or None where it is not there.
        arguments: the command line.
        description: what `--help` says first.
        presets: as for `parse`.

    Raises:
        SystemExit: as `parse` does.
    """
    beside = Annotated[kind, tyro.conf.arg(name="")]
    run = Annotated[RunConfig, tyro.conf.arg(name="")]
    both = dataclasses.make_dataclass("Both", [("command", beside), ("run", run)])
    own, config = adapt(_default(arguments, presets), lambda name: _flag(arguments, name))
    try:
        parsed = tyro.cli(
            both,
            args=list(arguments),
            default=both(own, config),
            description=description,
            config=(tyro.conf.FlagConversionOff,),
        )
    except ValueError as error:
        refuse(error)
    return parsed.command, parsed.run


def _default(arguments: Sequence[str], presets: Mapping[str, RunConfig]) -> RunConfig:
    """What the command line changes: the preset of its task, or a saved run."""
    folder, task = _flag(arguments, "--resume"), _flag(arguments, "--task")
    recorded = _flag(arguments, "--replay")
    first = next(iter(presets))
    special = [
        _flag(arguments, name) for name in ("--preset", "--search.corpus", "--search.format")
    ]
    names = [*(f"{task or first}/{name}" for name in special), task, first]
    default = next(presets[name] for name in names if name in presets)
    if folder is not None:
        return dataclasses.replace(_saved("--resume", Path(folder)), resume=None, run_dir=None)
    if recorded is not None:
        return _for_replay(Path(recorded), presets, _flag(arguments, "--method"))
    preset = _flag(arguments, "--preset")
    if preset in PAPER_SOURCES and preset in presets:
        return _for_paper_method(presets[preset], _flag(arguments, "--method"))
    model = _flag(arguments, "--model")
    if model not in (None, "tiny") and not _is_small(Path(model), default.task):
        default = for_pretrained(default)
    return for_method(default, _flag(arguments, "--method"))


def _is_small(folder: Path, task: str) -> bool:
    """Whether a model was trained here on the short format of the task."""
    try:
        saved = json.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return saved.get(f"{task}.format") == "short"


def for_pretrained(config: RunConfig) -> RunConfig:
    """Put what a model that others trained needs in the place of the small model's defaults.

    Learning rates are the usual ones of RL on such models; flags go over all of it.
    """
    return dataclasses.replace(
        config,
        logprob_chunk=1024,
        actor=dataclasses.replace(config.actor, learning_rate=1e-6),
        critic=dataclasses.replace(config.critic, learning_rate=1e-5),
        rollout=dataclasses.replace(
            config.rollout,
            max_tokens=1024,
            max_new_tokens=192,
            max_observation_tokens=320,
            slots=16,
        ),
        search=dataclasses.replace(config.search, format="long", topk=3),
        math=dataclasses.replace(config.math, format="retool"),
        sft=dataclasses.replace(
            config.sft,
            updates=0,
            context_weight=0.0,
            optimizer=OptimizerConfig(learning_rate=1e-5, warmup_updates=10, schedule="cosine"),
        ),
    )


def for_method(config: RunConfig, method: str | None) -> RunConfig:
    """Put what a method prescribes in the place of the task's defaults; flags go over both.

    An unknown method changes nothing here and is refused where flags are read.
    """
    row = METHODS.get(method or config.method)
    warmup = row.warmup_updates.get(config.task) if row else None
    if warmup is None:
        return config
    actor = dataclasses.replace(config.actor, warmup_updates=warmup)
    return dataclasses.replace(config, actor=actor)


def _for_replay(folder: Path, presets: Mapping[str, RunConfig], method: str | None) -> RunConfig:
    """The settings of a recorded run, but for what its own method prescribed and another does not.

    An unknown method changes nothing here and is refused where flags are read.
    """
    saved = _saved("--replay", folder)
    config = dataclasses.replace(saved, record=False, check=False, resume=None, run_dir=None)
    if method in (None, saved.method):
        return config
    prescribed = METHODS[saved.method].warmup_updates.get(saved.task)
    if prescribed is not None and prescribed == saved.actor.warmup_updates:
        quick = f"{saved.task}/quick" if saved.preset == "quick" else None
        warmup = presets[quick or saved.preset or saved.task].actor.warmup_updates
        actor = dataclasses.replace(saved.actor, warmup_updates=warmup)
        config = dataclasses.replace(config, actor=actor)
    return for_method(config, method)


def _for_paper_method(config: RunConfig, method: str | None) -> RunConfig:
    """Form batches as C.2.1 states: SAO 512 x 1, AReaL two minibatches of 512."""
    row = METHODS.get(method or config.method)
    if row is None:
        return config
    config = dataclasses.replace(
        config,
        batch_size=config.batch_size * row.minibatches,
        samples_per_prompt=min(
            config.samples_per_prompt, row.max_samples_per_prompt or config.samples_per_prompt
        ),
    )
    return for_method(config, method)


def refuse(message: object) -> NoReturn:
    """End the program with one line that says what is wrong, and status 2, as for a wrong flag."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _flag(arguments: Sequence[str], name: str) -> str | None:
    """The value of a flag that decides where all other defaults come from."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(name + "="):
            value = argument.removeprefix(name + "=")
    return value


def _saved(flag: str, folder: Path) -> RunConfig:
    """The configuration of the run in the folder that a flag names."""
    file = folder / CONFIG_FILE
    try:
        saved = from_json(file.read_text(encoding="utf-8"))
        # Processes are those of this start: an old address would be waited for.
        return dataclasses.replace(saved, distributed=DistributedConfig())
    except FileNotFoundError:
        refuse(f"{flag} {folder}: no run is there ({file} does not exist)")
    except (OSError, ValueError) as error:
        refuse(f"{flag} {folder}: {file} is not the configuration of a run: {error}")


def to_json(config: RunConfig) -> str:
    """The resolved configuration as JSON, as it is saved beside the checkpoints."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str, sort_keys=False)


def from_json(text: str) -> RunConfig:
    """Read back what `to_json` wrote.

    Raises:
        ValueError: no JSON object, a key that this version does not know, or a wrong value.
    """
    values = json.loads(text)
    require(isinstance(values, dict), "a configuration is a JSON object")
    return _build(RunConfig, values, "")


def _build(kind: Any, values: dict[str, Any], path: str) -> Any:
    default = kind()
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    require(
        not unknown, f"unknown configuration keys: {', '.join(path + name for name in unknown)}"
    )
    built = {}
    for name, value in values.items():
        old = getattr(default, name)
        if dataclasses.is_dataclass(old):
            require(isinstance(value, dict), f"{path}{name} must be an object, got {value!r}")
            value = _build(type(old), value, f"{path}{name}.")
        elif type(old) in (bool, int, float, str) and value is not None:
            number = type(old) is float and type(value) is int
            require(
                number or type(value) is type(old),
                f"{path}{name} must be of type {type(old).__name__}, got {value!r}",
            )
        elif isinstance(value, list):
            value = tuple(value)
        elif name.endswith("_dir") or name in ("resume", "replay"):
            value = None if value is None else Path(value)
        built[name] = value
    return kind(**built)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values, for checkpoints."""
    return json.loads(to_json(config))
