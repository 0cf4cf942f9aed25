"""The paper's presets: what they hold, what they need, and their learner at full size."""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import assembly
import jax
import pytest
import run

from copc_jax import memory, model, sharding
from copc_jax.config import PAPER_MODELS, PAPER_SOURCES, PRESETS, parse, sources
from copc_jax.learner import LearnerConfig, OptimizerConfig, build_learner
from copc_jax.methods import METHODS, LossConfig
from copc_jax.settings import RunConfig, TinyModelConfig

PAPER = sorted(PAPER_SOURCES)
H200_GB = 141


def differing(config, other, prefix=""):
    """Yield the dotted names of settings in which two configurations differ."""
    for field in dataclasses.fields(config):
        one, two = getattr(config, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(one):
            yield from differing(one, two, f"{prefix}{field.name}.")
        elif one != two:
            yield f"{prefix}{field.name}"


@pytest.mark.parametrize("name", PAPER)
def test_every_setting_of_a_preset_says_whether_the_paper_states_it(name):
    said = PAPER_SOURCES[name]
    assert set(differing(PRESETS[name], RunConfig())) - {"preset"} <= set(said)
    assert all(source.startswith(("stated", "assumed")) for source in said.values())
    lines = sources(PRESETS[name])
    assert len(lines) == len(said)
    assert "loss.eta_advantage = 0.5: stated in C.2.1" in lines
    assert not any("changed" in line for line in lines)


def test_a_plain_run_has_no_sources():
    assert sources(parse(["--task=math"])) == []


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_holds_what_the_paper_states(name):
    config = PRESETS[name]
    settings = run.learner_config(config, PAPER_MODELS[config.model])
    loss = settings.loss
    for eta in (loss.eta_policy, loss.eta_advantage):
        low, high = 1 - eta * loss.eps_low, 1 + eta * loss.eps_high
        assert (low, high) == pytest.approx((0.80, 1.28))
    assert settings.reduce == {"search": "token", "math": "response"}[config.task]
    assert settings.method.whiten
    assert config.mesh.data * config.mesh.model == 8
    if config.task == "search":
        assert (config.search.reward_no_search, config.search.reward_search) == (1.1, 2.0)


def test_flags_go_over_a_preset_and_a_model_changes_nothing_else():
    preset = PRESETS["paper-search"]
    assert parse(["--preset=paper-search"]) == preset
    assert parse(["--preset", "paper-math"]) == PRESETS["paper-math"]
    changed = parse(["--preset=paper-search", "--model=here/llama", "--staleness=64"])
    assert changed == dataclasses.replace(preset, model="here/llama", staleness=64)
    lines = [line for line in sources(changed) if line.startswith("staleness")]
    assert len(lines) == 1 and lines[0].endswith("changed, the preset has 16")


def test_methods_form_their_batches_as_the_paper_states():
    areal = parse(["--preset=paper-search", "--method=areal"])
    assert (areal.batch_size, areal.actor.warmup_updates) == (1024, 25)
    sao = parse(["--preset=paper-math", "--method=sao"])
    assert (sao.batch_size, sao.samples_per_prompt) == (512, 1)
    for name, method in itertools.product(PAPER, METHODS):
        assert parse([f"--preset={name}", f"--method={method}"]).method == method


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset=paper-search", "--task=math"], "paper-math"),
        (["--preset=paper-chess"], "paper-search"),
    ],
)
def test_a_preset_that_is_not_there_or_not_of_the_task_is_refused(flags, named, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(flags)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", PAPER)
def test_without_its_checkpoint_a_preset_says_which_one_to_download(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse([f"--preset={name}"])
    with pytest.raises(ValueError, match=rf"hf download {config.model} .*--model=FOLDER"):
        assembly.build(config)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAPER)
def test_the_step_compiles_at_full_size_on_eight_devices(name, tmp_path):
    """Without weights: shapes go in, and out comes a program and its plan of the memory."""
    done = subprocess.run(
        [
            sys.executable,
            str(Path(run.__file__)),
            *(f"--preset={name}", "--check=True", f"--cache-dir={tmp_path}"),
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step compiles for 8 x cpu" in done.stdout
    estimate = float(re.findall(r"all together ([\d.]+)", done.stdout)[0])
    planned = float(re.findall(r"XLA plans ([\d.]+) GB", done.stdout)[0])
    assert estimate == pytest.approx(planned, rel=0.2)
    assert planned < 0.75 * H200_GB
    assert ": assumed" in done.stdout and ": stated" in done.stdout
    # Nothing is trained, and no run folder is made.
    assert {path.name for path in tmp_path.iterdir()} <= {"compiled"}


# The parameter counts that the two model cards round to 3.21 and 4.0 billion.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
    ],
)
def test_models_have_the_published_number_of_parameters(name, count):
    table = model.parameter_table(PAPER_MODELS[name])
    assert sum(math.prod(spec.shape) for spec in table.values()) == count


def small(method="copc", **more):
    return LearnerConfig(
        model=TinyModelConfig(vocab_size=512, hidden_size=64).model(256),
        method=METHODS[method],
        loss=LossConfig(),
        actor=OptimizerConfig(),
        critic=OptimizerConfig(),
        updates=10,
        **more,
    )


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("data", "parallel"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_parameters_and_moments_are_counted_as_the_state_is_placed(data, parallel, rank):
    config = small(lora=model.LoraConfig(rank=rank))
    mesh = sharding.make_mesh(data, parallel)
    learner = build_learner(config, mesh)
    actor = model.init(jax.random.key(0), config.model)
    state = learner.init(actor)
    counted = memory.device_memory(config, data, parallel, 8, 256).networks

    def first_shards(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype == jax.numpy.float32]
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    assert counted["actor"].parameters == first_shards(state.actor)
    assert counted["critic"].parameters == first_shards(state.critic)
    assert counted["actor"].moments == first_shards(state.actor_opt)
    assert counted["critic"].moments == first_shards(state.critic_opt)


def test_what_saves_memory_is_seen_to_save_it():
    def total(data=1, parallel=1, **more):
        return memory.device_memory(small(**more), data, parallel, 16, 256).total

    assert total(micro_batches=8) < total(micro_batches=2)
    assert total(remat=True) < total()
    assert total(logprob_chunk=64) < total()
    assert total(data=4) < total() and total(parallel=4) < total()
    assert total(method="dapo") < total()


def test_the_table_names_networks_and_the_sum():
    counted = memory.device_memory(small(), 1, 1, 16, 256)
    text = counted.table()
    assert all(word in text for word in ("parameters", "gradients", "moments", "activations"))
    assert text.index("actor") < text.index("critic")
    assert f"{counted.total / 1e9:.1f}" in text
