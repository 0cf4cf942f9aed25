"""Configuration of a run: frozen dataclasses, presets by task, and the command line.

Every field's meaning and unit stand below it and are what `--help` prints. A value that cannot work is refused where
the dataclass is made, before any work, with a message that names the field and the right form.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from copc_jax.learner import OptimizerConfig
from copc_jax.methods import METHODS, LossConfig
from copc_jax.model import ModelConfig


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class TinyModelConfig:
    """The default model, trained from nothing; ignored when `--model` names an HF folder."""

    vocab_size: int = 6144
    """Entries of the byte-level BPE that is trained on the corpus."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 256
    """Width of the SwiGLU layer."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads (grouped-query attention)."""

    def model(self, max_length: int) -> ModelConfig:
        """The Llama configuration of this size."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_position_embeddings=max_length,
        )

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        _require(
            self.hidden_size % self.num_heads == 0,
            f"tiny.hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"tiny.num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}",
        )


@dataclasses.dataclass(frozen=True)
class SearchTaskConfig:
    """The search task: corpus, retrieval, reward."""

    retriever_url: str | None = None
    """URL of a Search-R1-compatible /retrieve server; none searches in process with tantivy."""
    topk: int = 2
    """Passages a search returns."""
    reward_search: float = 2.0
    """Reward of a right answer after at least one executed search."""
    reward_no_search: float = 1.1
    """Reward of a right answer without a search."""
    reward_wrong: float = 0.0
    """Reward of a wrong answer (math.md 3.3: not stated in the paper, 0 assumed)."""
    reward_format: float = 0.0
    """Reward of an episode without an answer (not stated in the paper, 0 assumed)."""


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised warm start on demonstrations, made once and cached."""

    updates: int = 1100
    """Optimizer updates."""
    rows: int = 4
    """Packed rows an update."""
    demonstrations: int = 12000
    """Distinct demonstrations that are made; they repeat when the updates need more."""
    one_hop_share: float = 0.8
    """Share of demonstrations of 2-hop questions that stop after one hop: what RL has to unlearn."""
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=5e-3, warmup_updates=50, schedule="cosine", beta2=0.98
        )
    )
    """AdamW of the warm start."""
    context_weight: float = 1.0
    """Weight of the loss on prompt and observation tokens: a model from nothing learns to read from them; 0 is plain SFT."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Servers and episodes."""

    urls: tuple[str, ...] = ()
    """Rollout servers that already run (real SGLang or embedded), or an sglang-router; none starts the embedded one."""
    control_urls: tuple[str, ...] = ()
    """Workers behind a router, which passes no control calls on; none: the same as `urls`."""
    launch: Literal["embedded", "sglang"] = "embedded"
    """Which server to start when `urls` is empty."""
    sglang_python: str = "python"
    """Interpreter of the environment that holds sglang, for `--rollout.launch=sglang`."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; anything but 1 is refused: ratios would not describe the policy."""
    top_p: float = 1.0
    """Nucleus mass of training rollouts; anything below 1 is refused for the same reason."""
    max_turns: int = 4
    """Turns of an episode, the last of which can only answer."""
    max_tokens: int = 192
    """Tokens of a whole episode: prompt, sampled and observation tokens."""
    max_new_tokens: int = 32
    """Tokens of one turn."""
    max_observation_tokens: int = 96
    """Tokens of one observation, above which it is cut with a marker."""
    max_in_flight: int = 64
    """Episodes that run at once."""
    slots: int = 64
    """Sequences that the embedded server decodes at once."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests at a weight update: recompute their cache, keep it, or abort and resend."""
    timeout_seconds: float = 120.0
    """Time-out of one HTTP call."""
    deadline_seconds: float = 300.0
    """Time after which a request that keeps failing is given up, retries included."""
    stall_seconds: float = 300.0
    """Time without a finished episode after which the run stops and says what is in flight."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Greedy exact match on held-out questions."""

    every: int = 100
    """Updates between evaluations; 0 evaluates only before and after."""
    questions: int = 300
    """Held-out questions of one evaluation; 0 takes all."""
    final_questions: int = 0
    """Held-out questions of the first and the last evaluation; 0 takes all."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of the learner."""

    data: int = 1
    """Devices along which the rows of a batch are split."""
    model: int = 1
    """Devices along which parameters are split."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    task: Literal["search"] = "search"
    """What is trained on; chooses the defaults of everything else."""
    method: str = "copc"
    """Row of copc_jax.methods.METHODS."""
    staleness: int = 16
    """Largest lag, in learner updates, between the weights that sample a token and those that train on it; 0 is synchronous."""
    staleness_mode: Literal["bounded", "exact"] = "bounded"
    """"bounded": at most `staleness`; "exact": always `staleness` (after a ramp), for controlled experiments."""
    seed: int = 0
    """Seed of everything random: data order, sampling, initial weights."""
    updates: int = 300
    """Learner updates (batches)."""
    batch_size: int = 32
    """Trajectories of one batch."""
    samples_per_prompt: int = 1
    """Trajectories sampled of each prompt; must divide `batch_size`."""
    critic_warmup_updates: int = 10
    """First updates that train only the critic: return correction is inert until the critic explains something."""
    micro_batches: int = 8
    """Slices of a batch that are accumulated one after another; slices without a token cost nothing."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """What an episode that was cut by its budget is worth after the cut: nothing, or the critic's value."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory for some 5% more time."""
    logprob_chunk: int | None = None
    """Positions whose logits exist at one time; none keeps all. For large vocabularies."""
    model: str = "tiny"
    """"tiny" trains a small Llama from nothing; otherwise a folder with an HF checkpoint."""
    run_dir: Path | None = None
    """Folder of this run; by default runs/<task>-<method>-s<staleness>-seed<seed>-<time>."""
    resume: Path | None = None
    """Run folder to continue from its last complete checkpoint."""
    checkpoint_every: int = 50
    """Updates between checkpoints."""
    keep_checkpoints: int = 2
    """Complete checkpoints that are kept."""
    publish_every: int = 1
    """Updates between weight updates of the servers."""
    cache_dir: Path = Path(".cache/copc_jax")
    """Folder of what is made once: tokenizer, warm start, compiled programs."""
    cpus: tuple[int, int] | None = None
    """Cores that learner and embedded server are pinned to, for timing; none leaves it to the system."""
    actor: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-4, warmup_updates=20)
    )
    """AdamW of the actor."""
    critic: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-3, warmup_updates=5)
    )
    """AdamW of the critic."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """Correction, clipping and return settings."""
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    """Servers and episodes."""
    search: SearchTaskConfig = dataclasses.field(default_factory=SearchTaskConfig)
    """The search task."""
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    """Warm start."""
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    """Evaluation."""
    tiny: TinyModelConfig = dataclasses.field(default_factory=TinyModelConfig)
    """Size of the default model."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices of the learner."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by name."""
        _require(
            self.method in METHODS,
            f"method {self.method!r} is unknown; choose one of {', '.join(METHODS)}",
        )
        _require(
            self.staleness >= 0,
            f"staleness must be 0 (synchronous) or more learner updates, got {self.staleness}",
        )
        for name in (
            "updates",
            "batch_size",
            "samples_per_prompt",
            "micro_batches",
            "checkpoint_every",
            "keep_checkpoints",
            "publish_every",
        ):
            _require(
                getattr(self, name) >= 1, f"{name} must be 1 or more, got {getattr(self, name)}"
            )
        _require(
            self.critic_warmup_updates >= 0,
            f"critic_warmup_updates must be 0 or more, got {self.critic_warmup_updates}",
        )
        _require(
            self.batch_size % self.samples_per_prompt == 0,
            f"batch_size {self.batch_size} must be a multiple of samples_per_prompt {self.samples_per_prompt}",
        )
        row = METHODS[self.method]
        _require(
            self.samples_per_prompt >= row.samples_per_prompt,
            f"method {self.method} compares the samples of a prompt and needs samples_per_prompt of at least "
            f"{row.samples_per_prompt}, got {self.samples_per_prompt}",
        )
        pieces = row.minibatches * self.micro_batches * self.mesh.data
        _require(
            self.batch_size % pieces == 0,
            f"batch_size {self.batch_size} must be a multiple of minibatches x micro_batches x mesh.data = "
            f"{row.minibatches} x {self.micro_batches} x {self.mesh.data} = {pieces}",
        )
        _require(
            self.rollout.temperature == 1.0,
            f"rollout.temperature must be 1 in training (the behavior log-probs are the policy's own only there), "
            f"got {self.rollout.temperature}",
        )
        _require(
            self.rollout.top_p == 1.0,
            f"rollout.top_p must be 1 in training (a cut distribution is not the policy's), got {self.rollout.top_p}",
        )
        _require(
            self.publish_every <= max(self.staleness, 1),
            f"publish_every {self.publish_every} must not exceed staleness {self.staleness}: the run would wait for ever",
        )
        for url in (*self.rollout.urls, *self.rollout.control_urls):
            _require(
                url.startswith(("http://", "https://")),
                f"rollout.urls must look like http://host:port, got {url!r}",
            )


# Values of the paper stand beside each (math.md 0, 1.4, C.2.1; Table 5 is not available, so the rest are working values
# found on the laptop task and listed as assumptions in README).
PRESETS: dict[str, RunConfig] = {
    "search": RunConfig(task="search"),
}


def parse(arguments: Sequence[str], presets: Mapping[str, RunConfig] = PRESETS) -> RunConfig:
    """Read the command line: `--task` first, then everything else over that task's preset.

    Raises:
        SystemExit: with status 2 and a message that names the field, on unknown flags and impossible values.
    """
    task = "search"
    for index, argument in enumerate(arguments):
        if argument == "--task" and index + 1 < len(arguments):
            task = arguments[index + 1]
        elif argument.startswith("--task="):
            task = argument.removeprefix("--task=")
    default = presets.get(task, next(iter(presets.values())))
    try:
        return tyro.cli(
            RunConfig,
            args=list(arguments),
            default=default,
            description="Train a language model with asynchronous off-policy RL.",
            config=(tyro.conf.FlagConversionOff,),
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def to_json(config: RunConfig) -> str:
    """The resolved configuration as JSON, as it is saved beside the checkpoints."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str, sort_keys=False)


def from_json(text: str) -> RunConfig:
    """Read back what `to_json` wrote.

    Raises:
        ValueError: for a key that this version does not know.
    """
    return _build(RunConfig, json.loads(text), "")


def _build(kind: Any, values: dict[str, Any], path: str) -> Any:
    default = kind()
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    _require(
        not unknown, f"unknown configuration keys: {', '.join(path + name for name in unknown)}"
    )
    built = {}
    for name, value in values.items():
        old = getattr(default, name)
        if dataclasses.is_dataclass(old):
            value = _build(type(old), value, f"{path}{name}.")
        elif isinstance(value, list):
            value = tuple(value)
        elif name.endswith("_dir") or name == "resume":
            value = None if value is None else Path(value)
        built[name] = value
    return kind(**built)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values, for checkpoints."""
    return json.loads(to_json(config))
