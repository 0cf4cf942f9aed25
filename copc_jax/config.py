"""Configuration of a run: frozen dataclasses, presets by task, and the command line.

Every field's meaning and unit stand below it and are what `--help` prints. A value that cannot work
is refused where the dataclass is made, before any work, with a message that names the field and the
right form.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import shlex
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from copc_jax import access
from copc_jax.learner import OptimizerConfig
from copc_jax.methods import METHODS, LossConfig
from copc_jax.model import LoraConfig, ModelConfig, RopeScaling
from copc_jax.tasks.search import read_tags

# Where a run keeps its resolved configuration, inside its folder.
CONFIG_FILE = "config.json"

# What a model was trained on, beside its weights: the task and the form of its text.
TASK_FILE = "task.json"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _require_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value >= least, f"{name} must be {least} or more, got {value}")


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{name} must be more than 0, got {value}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require_urls(name: str, *urls: str) -> None:
    for url in urls:
        # Not quoted: it is the one text here that holds a secret.
        _require(
            "@" not in urllib.parse.urlsplit(url).netloc,
            f"{name} must hold no user name and no password: they would be saved and logged",
        )
        _require(
            url.startswith(("http://", "https://")),
            f"{name} must look like http://host:port, got {url!r}",
        )


def _require_place_of_key(name: str, place: str) -> None:
    _require(
        access.is_place(place),
        f"{name} must say where the key is, as env:NAME or file:PATH, and not be the key itself, "
        "which would be saved and logged",
    )


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
        names = [field.name for field in dataclasses.fields(self)]
        _require_least(self, 1, *names)
        _require(
            self.hidden_size % self.num_heads == 0,
            f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}",
        )


@dataclasses.dataclass(frozen=True)
class SearchTaskConfig:
    """The search task: corpus, format, retrieval, reward."""

    corpus: Literal["factbook", "wikipedia", "phantom"] = "factbook"
    """Passages and questions. "factbook": one fact a passage, 1 and 2 hops. "wikipedia": long real
    passages, up to 3 hops; needs the extra of that name. "phantom": a universe of invented people
    in `phantom_dir`. The last two come with larger token budgets."""
    phantom_dir: Path | None = None
    """Folder that the generator of phantom-wiki wrote: articles.json and questions.json."""
    tags: str = "search-r1"
    """Tags of actions and results: search-r1, chain-of-agents, or four names for search,
    information, answer and think, such as find,result,reply,think."""
    format: Literal["short", "long"] = "short"
    """"short": the bare question, for the small model. "long": instructions and titled passages,
    for a pretrained model; needs some 200 tokens more."""
    retriever_url: str | None = None
    """URL of a Search-R1-compatible /retrieve server; none searches in process with tantivy."""
    retriever_api_key: str = f"env:{access.RETRIEVER_KEY}"
    """Where the key of that server is, as env:NAME or file:PATH; a variable that is not set is no
    key."""
    topk: int = 1
    """Passages a search returns."""
    reward_search: float = 2.0
    """Reward of a right answer after at least one executed search."""
    reward_no_search: float = 1.1
    """Reward of a right answer without a search."""
    reward_wrong: float = 0.0
    """Reward of a wrong answer (not stated in the paper, 0 assumed)."""
    reward_format: float = 0.0
    """Reward of an episode without an answer (not stated in the paper, 0 assumed)."""
    one_hop_share: float = 0.8
    """Share of warm-start demonstrations of several hops that stop too early: what RL has to
    unlearn."""

    def __post_init__(self) -> None:
        """Refuse what cannot search."""
        _require_least(self, 1, "topk")
        read_tags(self.tags)
        _require(
            self.corpus != "phantom" or self.phantom_dir is not None,
            "corpus phantom needs phantom_dir, the folder that phantom-wiki's generator wrote",
        )
        _require(
            0 <= self.one_hop_share <= 1,
            f"one_hop_share must be from 0 to 1, got {self.one_hop_share}",
        )
        _require_place_of_key("retriever_api_key", self.retriever_api_key)
        if self.retriever_url is not None:
            _require_urls("retriever_url", self.retriever_url)


@dataclasses.dataclass(frozen=True)
class MathTaskConfig:
    """The math task: problems, sandbox, format."""

    sources: tuple[str, ...] = ()
    """Generators of the built-in problems (reasoning-gym) and their shares, as name or name=weight:
    basic_arithmetic, chain_sum, products, gcd, lcm, decimal_chain_sum, gsm_symbolic, leg_counting,
    simple_equations; none takes a mixture that the small model can copy and not compute."""
    options: tuple[str, ...] = ()
    """Difficulty of a generator, as name.option=value, such as products.max_digits=4."""
    train: int = 10_000
    """Built-in training problems."""
    held_out: int = 1_000
    """Built-in held-out problems."""
    sandbox: Literal["monty", "cpython", "sandbox-fusion"] = "monty"
    """What runs the code. "monty": a small interpreter, anywhere. "cpython": with numpy and sympy,
    on Linux. "sandbox-fusion": the server at `sandbox_url`."""
    sandbox_url: str | None = None
    """URL of the SandboxFusion server."""
    time_limit_seconds: float = 5.0
    """Seconds that a program may take."""
    memory_limit_mb: int = 256
    """MiB that a program may take."""
    output_limit: int = 400
    """Characters of output that the policy reads; longer output is cut in the middle."""
    processes: int = 2
    """Programs that run at a time, and answers that are verified at a time."""
    format: Literal["short", "retool", "qwen"] = "short"
    """"short": the bare question, for the small model. "retool": ReTool's instructions and fenced
    code. "qwen": Qwen's chat messages and JSON calls."""
    tags: str = ""
    """Names of the tags of code, results and answers, such as python,output,final; empty takes
    those of the format."""
    max_calls: int = 4
    """Calls of one turn that are run."""
    direct_share: float = 0.6
    """Share of warm-start demonstrations that answer without the tool: what RL has to unlearn."""
    direct_answer: Literal["guess", "right"] = "guess"
    """What those answer: always "0", or the right answer. "right" and a share of 1 show what the
    model can do without the tool."""
    slip_share: float = 0.3
    """Share of the other demonstrations in which the code confuses an operation."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        _require_least(self, 1, "train", "held_out", "memory_limit_mb", "processes", "max_calls")
        _require_least(self, 40, "output_limit")
        _require_positive(self, "time_limit_seconds")
        for name in ("direct_share", "slip_share"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
        for name in ("sources", "options"):
            for text in getattr(self, name):
                left, _, right = text.partition("=")
                if name == "options":
                    ok = "." in left.strip(".") and bool(right)
                    form = "name.option=value"
                else:
                    ok, form = bool(left) and (left == text or _is_number(right)), "name=2.5"
                _require(ok, f"math.{name} must look like {form}, got {text!r}")
        names = self.tags.split(",")
        _require(
            not self.tags or len(names) == 3,
            f"tags must be three names for code, results and answers, got {self.tags!r}",
        )
        if self.sandbox_url is not None:
            _require_urls("sandbox_url", self.sandbox_url)
        _require(
            (self.sandbox_url is not None) == (self.sandbox == "sandbox-fusion"),
            'sandbox_url belongs to sandbox "sandbox-fusion", which needs one; got '
            f"{self.sandbox_url!r} for {self.sandbox!r}",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Question files in place of the built-in questions."""

    train: tuple[str, ...] = ()
    """Files of training questions (JSON lines, JSON, CSV, Parquet; their form is told from their
    fields), or name=path to name a set; none takes the built-in questions."""
    held_out: tuple[str, ...] = ()
    """Files of held-out questions, in the same forms; each source gets a score of its own."""
    weights: tuple[str, ...] = ()
    """Share of each training source, as source=number; rows are repeated to reach it. Without any,
    every row is as likely as any other."""
    instructions: Literal["strip", "keep"] = "strip"
    """What to do with instructions that all prompts of a set share: "strip" takes them off, as the
    task has its own."""

    def __post_init__(self) -> None:
        """Refuse half a data set, and weights that are no numbers."""
        _require(
            bool(self.train) == bool(self.held_out),
            "data.train and data.held_out must name files together: built-in questions are of "
            "another kind",
        )
        _require(bool(self.train) or not self.weights, "data.weights needs files in data.train")
        for weight in self.weights:
            name, _, number = weight.partition("=")
            _require(
                bool(name) and _is_number(number),
                f"data.weights must look like source=2.5, got {weight!r}",
            )

    @property
    def source_weights(self) -> dict[str, float]:
        """`weights` as numbers."""
        pairs = (weight.partition("=") for weight in self.weights)
        return {name: float(number) for name, _, number in pairs}


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised warm start on demonstrations, made once and cached."""

    updates: int = 1600
    """Optimizer updates of the warm start; 0 takes the model as it is."""
    rows: int = 3
    """Packed rows an update."""
    demonstrations: int = 20000
    """Distinct demonstrations that are made; they repeat when the updates need more."""
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=5e-3, warmup_updates=50, schedule="cosine", beta2=0.98
        )
    )
    """AdamW of the warm start."""
    context_weight: float = 1.0
    """Weight of the loss on prompt and observation tokens, from which a model that starts from
    nothing learns to read; 0 is plain SFT."""

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        _require_least(self, 1, "rows", "demonstrations")
        _require_least(self, 0, "updates", "context_weight")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Servers and episodes."""

    urls: tuple[str, ...] = ()
    """Rollout servers that already run (real SGLang or embedded), or an sglang-router; none starts
    one."""
    control_urls: tuple[str, ...] = ()
    """Workers behind a router, which passes no control calls on; none: the same as `urls`."""
    api_key: str = f"env:{access.ROLLOUT_KEY}"
    """Where the API key of the servers is, as env:NAME or file:PATH. A variable that is not set is
    no key; a server that the run starts then gets a random one."""
    launch: Literal["embedded", "sglang"] = "embedded"
    """Which server to start when `urls` is empty."""
    sglang_python: str = "python"
    """Interpreter of the environment that holds sglang, for `--rollout.launch=sglang`."""
    sglang_device: Literal["gpu", "cpu"] = "gpu"
    """Where a launched SGLang runs: on what it finds, in bfloat16, or on the CPU, in float32."""
    sglang_args: str = ""
    """More arguments for a launched SGLang, in one string: "--tp 2 --mem-fraction-static 0.8"."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; anything but 1 is refused: ratios would not
    describe the policy."""
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
    """Sequences that a launched server decodes at once."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests at a weight update: recompute their cache, keep it, or abort
    and resend."""
    timeout_seconds: float = 120.0
    """Time-out of one HTTP call, in seconds."""
    logprob_gap_limit: float = 0.05
    """Largest mean of |learner - server| log-prob, in nats, over tokens that both computed with the
    same weights; a run stops above it. inf is no limit."""
    logprob_gap_trajectories: int = 2
    """Trajectories of each batch that a server scores for that comparison, at any staleness; the
    servers take turns. 0 leaves the tokens that the weights in training sampled themselves."""
    deadline_seconds: float = 300.0
    """Seconds after which a request that keeps failing is given up, retries included."""
    stall_seconds: float = 300.0
    """Seconds without any event after which the run stops and says what is in flight."""

    def __post_init__(self) -> None:
        """Refuse what would bias every ratio, and what cannot run."""
        _require(
            self.temperature == 1.0,
            "temperature must be 1 in training (the behavior log-probs are the policy's own only "
            f"there), got {self.temperature}",
        )
        _require(
            self.top_p == 1.0,
            "top_p must be 1 in training (a cut distribution is not the policy's), "
            f"got {self.top_p}",
        )
        _require_least(
            self, 1, "max_turns", "max_tokens", "max_new_tokens", "max_in_flight", "slots"
        )
        _require_least(self, 0, "max_observation_tokens", "logprob_gap_trajectories")
        _require_positive(self, "timeout_seconds", "deadline_seconds", "stall_seconds")
        _require_positive(self, "logprob_gap_limit")
        _require(
            self.max_new_tokens < self.max_tokens,
            f"max_new_tokens {self.max_new_tokens} must leave room for a prompt within max_tokens "
            f"{self.max_tokens}",
        )
        _require_urls("urls", *self.urls)
        _require_urls("control_urls", *self.control_urls)
        _require_place_of_key("api_key", self.api_key)
        try:
            words = shlex.split(self.sglang_args)
        except ValueError as error:
            raise ValueError(f"sglang_args cannot be split into words: {error}") from None
        _require(
            not any(word.startswith(("--api-key", "--admin-api-key")) for word in words),
            "sglang_args must hold no API key, which would be saved and logged: set "
            f"{access.ROLLOUT_KEY}, or api_key to where it is",
        )
        _require(
            not self.control_urls or len(self.urls) == 1,
            "control_urls names the workers behind one router: give its address alone in urls",
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Greedy exact match on held-out questions."""

    enabled: bool = True
    """Whether there are evaluations at all; without any, a replay needs no server."""
    every: int = 100
    """Updates between evaluations; 0 evaluates only before and after."""
    questions: int = 300
    """Held-out questions of one evaluation; 0 takes all."""
    final_questions: int = 0
    """Held-out questions of the first and the last evaluation; 0 takes all."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        _require_least(self, 0, "every", "questions", "final_questions")


@dataclasses.dataclass(frozen=True)
class ViewerConfig:
    """Episodes that are kept token by token, and shown on the page episodes.html."""

    every: int | None = None
    """Batches between those of which episodes are kept; none: about fifty batches of a run, 0: no
    batch."""
    episodes: int = 8
    """Episodes that are kept of such a batch."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        if self.every is not None:
            _require_least(self, 0, "every")
        _require_least(self, 1, "episodes")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of the learner."""

    data: int = 1
    """Devices along which the rows of a batch are split."""
    model: int = 1
    """Devices along which parameters are split."""

    def __post_init__(self) -> None:
        """Refuse an empty mesh."""
        _require_least(self, 1, "data", "model")


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Learner processes, one a host; each has rollout servers, prompts and rows of its own."""

    coordinator: str | None = None
    """Address, as host:port, where process 0 listens and the others find it; none: one process."""
    processes: int = 1
    """Learner processes of the run, process 0 included."""
    process_id: int = 0
    """Number of this process, from 0; process 0 writes the run folder."""
    auto: bool = False
    """Take address, number and count from the environment, as Slurm, Open MPI or Kubernetes give
    them."""
    timeout_seconds: float = 60.0
    """Seconds without a sign of life after which a process counts as dead, and the others end."""
    start_seconds: float = 300.0
    """Seconds that the processes may take to find each other."""

    def __post_init__(self) -> None:
        """Refuse what leaves processes waiting for each other."""
        _require_least(self, 1, "processes", "timeout_seconds", "start_seconds")
        _require(
            0 <= self.process_id < self.processes,
            f"distributed.process_id must be from 0 to {self.processes - 1}, one less than "
            f"distributed.processes, got {self.process_id}",
        )
        _require(
            not self.auto or (self.coordinator, self.processes) == (None, 1),
            "distributed.auto takes coordinator, processes and process_id from the environment: "
            "give it alone",
        )
        if self.processes > 1:
            host, _, port = (self.coordinator or "").rpartition(":")
            _require(
                bool(host) and port.isdecimal(),
                "distributed.coordinator must be the host:port of process 0 when there are several "
                f"processes, got {self.coordinator!r}",
            )
        else:
            _require(
                self.coordinator is None,
                "distributed.coordinator needs distributed.processes, 2 or more",
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    task: Literal["search", "math"] = "search"
    """What is trained on; chooses the defaults of everything else."""
    preset: Literal["quick", "paper-search", "paper-math"] | None = None
    """"quick": the task with half the episodes an update, and short evaluations, for sweeps. The
    others: settings of the paper's runs, those that it states and assumptions for
    the others; need `--model=FOLDER` with the checkpoint. `--check=True` shows which are which."""
    check: bool = False
    """Only print where the settings of a preset come from and what the learner takes of each
    device's memory, compile its step without weights, and stop."""
    method: str = "copc"
    """Row of copc_jax.methods.METHODS: copc, copc_no_rc, ppo and others; a wrong name lists all."""
    staleness: int = 16
    """Largest lag, in learner updates, between the weights that sample a token and those that train
    on it; 0 is synchronous."""
    staleness_mode: Literal["bounded", "exact"] = "bounded"
    """"bounded": at most `staleness`; "exact": always `staleness` (after a ramp), for controlled
    experiments."""
    seed: int = 0
    """Seed of everything random: data order, sampling, initial weights."""
    updates: int = 300
    """Learner updates (batches)."""
    batch_size: int = 64
    """Trajectories of one batch."""
    samples_per_prompt: int = 1
    """Trajectories sampled of each prompt; must divide `batch_size`."""
    critic_warmup_updates: int = 10
    """First updates that train only the critic: return correction is inert until the critic
    explains something."""
    micro_batches: int = 16
    """Slices of a batch that are accumulated one after another; slices without a token are free."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """What an episode that was cut by its budget is worth after the cut: nothing, or the critic's
    value."""
    remat: bool = False
    """Recompute each layer in the backward pass: less memory for some 5% more time."""
    logprob_chunk: int | None = 256
    """Positions whose logits exist at one time; none keeps all. In chunks, tokens that the model
    did not sample get no logits, and memory does not grow with the batch; the backward pass
    computes logits again."""
    model: str = "tiny"
    """"tiny" trains a small Llama from nothing, "smollm2-135m" is a real chat model (extra
    smollm2); otherwise a folder with an HF checkpoint. A pretrained model gets the long format, its
    own chat template, larger token budgets, smaller learning rates and no warm start."""
    run_dir: Path | None = None
    """Folder of this run; by default runs/<task>-<method>-s<staleness>-seed<seed>-<time>."""
    resume: Path | None = None
    """Run folder to continue from its last complete checkpoint, with its own configuration."""
    record: bool = False
    """Keep every batch that is trained on in the run folder, for `--replay`."""
    replay: Path | None = None
    """Run folder with a recording, whose batches are trained on in its order in place of rollouts;
    its settings are the defaults of all others. Servers are started for evaluations only."""
    checkpoint_every: int = 50
    """Updates between checkpoints."""
    keep_checkpoints: int = 2
    """Complete checkpoints that are kept."""
    publish_every: int = 1
    """Updates between weight updates of the servers."""
    cache_dir: Path = Path(".cache/copc_jax")
    """Folder of what is made once: tokenizer, warm start, compiled programs."""
    cpus: tuple[int, int] | None = None
    """Cores that learner and embedded server are pinned to, for timing; none leaves it to the
    system."""
    actor: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-4, warmup_updates=20)
    )
    """AdamW of the actor."""
    critic: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-3, warmup_updates=5)
    )
    """AdamW of the critic."""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    """Adapters in place of all weights, in actor and critic. A warm start still trains all."""
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    """Correction, clipping and return settings."""
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    """Servers and episodes."""
    search: SearchTaskConfig = dataclasses.field(default_factory=SearchTaskConfig)
    """The search task."""
    math: MathTaskConfig = dataclasses.field(default_factory=MathTaskConfig)
    """The math task."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Question files."""
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    """Warm start."""
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    """Evaluation."""
    viewer: ViewerConfig = dataclasses.field(default_factory=ViewerConfig)
    """Episodes to read."""
    tiny: TinyModelConfig = dataclasses.field(default_factory=TinyModelConfig)
    """Size of the default model."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices of the learner."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """Processes of the learner."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, by name."""
        _require(
            self.method in METHODS,
            f"method {self.method!r} is unknown; choose one of {', '.join(METHODS)}",
        )
        _require(
            self.preset in (None, "quick", f"paper-{self.task}"),
            f"preset {self.preset} is not one of task {self.task}: give paper-{self.task}, or no "
            "task beside it",
        )
        _require(
            self.staleness >= 0,
            f"staleness must be 0 (synchronous) or more learner updates, got {self.staleness}",
        )
        _require_least(
            self,
            1,
            *("updates", "batch_size", "samples_per_prompt", "micro_batches"),
            *("checkpoint_every", "keep_checkpoints", "publish_every"),
        )
        _require_least(self, 0, "seed", "critic_warmup_updates")
        if self.logprob_chunk is not None:
            _require_least(self, 1, "logprob_chunk")
        _require(
            self.batch_size % self.samples_per_prompt == 0,
            f"batch_size {self.batch_size} must be a multiple of samples_per_prompt "
            f"{self.samples_per_prompt}",
        )
        row = METHODS[self.method]
        _require(
            self.samples_per_prompt >= row.samples_per_prompt,
            f"samples_per_prompt must be at least {row.samples_per_prompt} for method "
            f"{self.method}, which compares the samples of a prompt; got {self.samples_per_prompt}",
        )
        most = row.max_samples_per_prompt
        _require(
            most is None or self.samples_per_prompt <= most,
            f"samples_per_prompt must be at most {most} for method {self.method}, "
            f"got {self.samples_per_prompt}",
        )
        _require(
            self.truncated == "terminal" or row.critic,
            f"truncated must be terminal for method {self.method}: bootstrap needs a critic",
        )
        _require(
            self.batch_size % row.minibatches == 0,
            f"batch_size {self.batch_size} must be a multiple of the {row.minibatches} minibatches "
            f"of method {self.method}",
        )
        _require(
            not (self.record and self.replay),
            "record must be off with replay: the batches are recorded already",
        )
        require_processes(self, self.distributed.processes)
        # The newest published version may be that many updates behind the last update of a batch.
        behind = self.publish_every * row.minibatches - 1
        _require(
            self.replay is not None or behind <= self.staleness,
            f"staleness {self.staleness} must be at least publish_every x minibatches - 1 = "
            f"{self.publish_every} x {row.minibatches} - 1 = {behind}: "
            "otherwise no rollout is ever admitted",
        )
        _require(
            self.staleness_mode == "bounded" or self.publish_every == 1,
            f"publish_every must be 1 with staleness_mode exact, got {self.publish_every}",
        )
        if self.cpus is not None and hasattr(os, "sched_getaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            _require(
                set(self.cpus) <= set(allowed),
                f"cpus {self.cpus} must be among the cores of this process, {allowed}",
            )

    @property
    def rows(self) -> int:
        """Rows of a batch: one for each trajectory, and empty ones up to a number that divides.

        Each minibatch is cut into micro-batches of equal size, and each of these into equal parts
        for the devices along `mesh.data`.
        """
        minibatches, piece = METHODS[self.method].minibatches, self.micro_batches * self.mesh.data
        return minibatches * piece * math.ceil(self.batch_size // minibatches / piece)


def require_processes(config: RunConfig, count: int) -> None:
    """Check that a run can be split over `count` processes.

    Raises:
        ValueError: names the setting, and what it has to be a multiple of.
    """
    row = METHODS[config.method]
    _require(
        count == 1 or not (config.record or config.replay),
        f"record and replay are for one process, not for {count}",
    )
    _require(
        config.mesh.data % count == 0,
        f"mesh.data {config.mesh.data} must be a multiple of the {count} processes, which split "
        "the rows of a batch",
    )
    for name, each in (
        ("samples_per_prompt", config.samples_per_prompt),
        ("minibatches", row.minibatches),
    ):
        _require(
            config.batch_size % (count * each) == 0,
            f"batch_size {config.batch_size} must be a multiple of processes x {name} = "
            f"{count} x {each} = {count * each}",
        )


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
    _require(isinstance(values, dict), "a configuration is a JSON object")
    return _build(RunConfig, values, "")


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
            _require(isinstance(value, dict), f"{path}{name} must be an object, got {value!r}")
            value = _build(type(old), value, f"{path}{name}.")
        elif type(old) in (bool, int, float, str) and value is not None:
            number = type(old) is float and type(value) is int
            _require(
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
