"""Settings of a run: frozen dataclasses that say what can be set and what cannot work.

Every field's meaning and unit stand below it and are what `--help` prints. A value that cannot work
is refused where the dataclass is made, before any work, with a message that names the field and the
right form.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import urllib.parse
from pathlib import Path
from typing import Any, Literal

from copc_jax import access
from copc_jax.learner import OptimizerConfig
from copc_jax.methods import METHODS, LossConfig
from copc_jax.model import LoraConfig, ModelConfig
from copc_jax.tasks.search import read_tags


def require(ok: bool, message: str) -> None:
    """Refuse a setting with a message that names it."""
    if not ok:
        raise ValueError(message)


def _require_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= least, f"{name} must be {least} or more, got {value}")


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be more than 0, got {value}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require_urls(name: str, *urls: str) -> None:
    for url in urls:
        # Not quoted: it is the one text here that holds a secret.
        require(
            "@" not in urllib.parse.urlsplit(url).netloc,
            f"{name} must hold no user name and no password: they would be saved and logged",
        )
        require(
            url.startswith(("http://", "https://")),
            f"{name} must look like http://host:port, got {url!r}",
        )


def _require_place_of_key(name: str, place: str) -> None:
    require(
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
        require(
            self.hidden_size % self.num_heads == 0,
            f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}",
        )
        require(
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
        require(
            self.corpus != "phantom" or self.phantom_dir is not None,
            "corpus phantom needs phantom_dir, the folder that phantom-wiki's generator wrote",
        )
        require(
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
            require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
        for name in ("sources", "options"):
            for text in getattr(self, name):
                left, _, right = text.partition("=")
                if name == "options":
                    ok = "." in left.strip(".") and bool(right)
                    form = "name.option=value"
                else:
                    ok, form = bool(left) and (left == text or _is_number(right)), "name=2.5"
                require(ok, f"math.{name} must look like {form}, got {text!r}")
        names = self.tags.split(",")
        require(
            not self.tags or len(names) == 3,
            f"tags must be three names for code, results and answers, got {self.tags!r}",
        )
        if self.sandbox_url is not None:
            _require_urls("sandbox_url", self.sandbox_url)
        require(
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
        require(
            bool(self.train) == bool(self.held_out),
            "data.train and data.held_out must name files together: built-in questions are of "
            "another kind",
        )
        require(bool(self.train) or not self.weights, "data.weights needs files in data.train")
        for weight in self.weights:
            name, _, number = weight.partition("=")
            require(
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
        require(
            self.temperature == 1.0,
            "temperature must be 1 in training (the behavior log-probs are the policy's own only "
            f"there), got {self.temperature}",
        )
        require(
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
        require(
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
        require(
            not any(word.startswith(("--api-key", "--admin-api-key")) for word in words),
            "sglang_args must hold no API key, which would be saved and logged: set "
            f"{access.ROLLOUT_KEY}, or api_key to where it is",
        )
        require(
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
        require(
            0 <= self.process_id < self.processes,
            f"distributed.process_id must be from 0 to {self.processes - 1}, one less than "
            f"distributed.processes, got {self.process_id}",
        )
        require(
            not self.auto or (self.coordinator, self.processes) == (None, 1),
            "distributed.auto takes coordinator, processes and process_id from the environment: "
            "give it alone",
        )
        if self.processes > 1:
            host, _, port = (self.coordinator or "").rpartition(":")
            require(
                bool(host) and port.isdecimal(),
                "distributed.coordinator must be the host:port of process 0 when there are several "
                f"processes, got {self.coordinator!r}",
            )
        else:
            require(
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
        require(
            self.method in METHODS,
            f"method {self.method!r} is unknown; choose one of {', '.join(METHODS)}",
        )
        require(
            self.preset in (None, "quick", f"paper-{self.task}"),
            f"preset {self.preset} is not one of task {self.task}: give paper-{self.task}, or no "
            "task beside it",
        )
        require(
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
        require(
            self.batch_size % self.samples_per_prompt == 0,
            f"batch_size {self.batch_size} must be a multiple of samples_per_prompt "
            f"{self.samples_per_prompt}",
        )
        row = METHODS[self.method]
        require(
            self.samples_per_prompt >= row.samples_per_prompt,
            f"samples_per_prompt must be at least {row.samples_per_prompt} for method "
            f"{self.method}, which compares the samples of a prompt; got {self.samples_per_prompt}",
        )
        most = row.max_samples_per_prompt
        require(
            most is None or self.samples_per_prompt <= most,
            f"samples_per_prompt must be at most {most} for method {self.method}, "
            f"got {self.samples_per_prompt}",
        )
        require(
            self.truncated == "terminal" or row.critic,
            f"truncated must be terminal for method {self.method}: bootstrap needs a critic",
        )
        require(
            self.batch_size % row.minibatches == 0,
            f"batch_size {self.batch_size} must be a multiple of the {row.minibatches} minibatches "
            f"of method {self.method}",
        )
        require(
            not (self.record and self.replay),
            "record must be off with replay: the batches are recorded already",
        )
        require_processes(self, self.distributed.processes)
        # The newest published version may be that many updates behind the last update of a batch.
        behind = self.publish_every * row.minibatches - 1
        require(
            self.replay is not None or behind <= self.staleness,
            f"staleness {self.staleness} must be at least publish_every x minibatches - 1 = "
            f"{self.publish_every} x {row.minibatches} - 1 = {behind}: "
            "otherwise no rollout is ever admitted",
        )
        require(
            self.staleness_mode == "bounded" or self.publish_every == 1,
            f"publish_every must be 1 with staleness_mode exact, got {self.publish_every}",
        )
        if self.cpus is not None and hasattr(os, "sched_getaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            require(
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
    require(
        count == 1 or not (config.record or config.replay),
        f"record and replay are for one process, not for {count}",
    )
    require(
        config.mesh.data % count == 0,
        f"mesh.data {config.mesh.data} must be a multiple of the {count} processes, which split "
        "the rows of a batch",
    )
    for name, each in (
        ("samples_per_prompt", config.samples_per_prompt),
        ("minibatches", row.minibatches),
    ):
        require(
            config.batch_size % (count * each) == 0,
            f"batch_size {config.batch_size} must be a multiple of processes x {name} = "
            f"{count} x {each} = {count * each}",
        )
