"""The command line and the saved configuration: what is refused, explained, kept and resumed."""

import dataclasses
import json
from pathlib import Path

import pytest

from copc_jax.config import PRESETS, from_json, parse, to_dict, to_json
from copc_jax.learner import OptimizerConfig
from copc_jax.methods import METHODS
from copc_jax.settings import MeshConfig, RolloutConfig, RunConfig


def _fields(kind, prefix=""):
    """Yield the dotted name of every value of a configuration."""
    default = kind()
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(type(value), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_task_alone_gives_its_preset():
    assert parse([]) == PRESETS["search"]
    assert parse(["--task=search"]) == parse(["--task", "search"]) == PRESETS["search"]


def test_the_quick_preset_is_the_task_s_own_with_smaller_updates(tmp_path):
    for task in ("search", "math"):
        quick, whole = parse([f"--task={task}", "--preset=quick"]), parse([f"--task={task}"])
        assert 2 * quick.batch_size == whole.batch_size and quick.task == task
        # They share a warm start.
        for name in ("tiny", "sft", "rollout", "search", "math"):
            assert getattr(quick, name) == getattr(whole, name)
        assert from_json(to_json(quick)) == quick
    assert parse(["--preset=quick", "--updates=7"]).updates == 7
    # A recording of it can be trained on by a method that warms up in another way.
    (tmp_path / "config.json").write_text(to_json(parse(["--preset=quick", "--method=areal"])))
    replayed = parse([f"--replay={tmp_path}", "--method=ppo"])
    assert replayed.actor.warmup_updates == parse(["--preset=quick"]).actor.warmup_updates


def test_a_preset_supplies_the_defaults_that_flags_replace():
    presets = {"search": dataclasses.replace(RunConfig(), updates=7, seed=5)}
    config = parse(["--task=search", "--seed=3"], presets)
    assert (config.updates, config.seed) == (7, 3)


TWO_PROCESSES = ("--distributed.coordinator=host:1", "--distributed.processes=2")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["--batch-size=64"], 64),
        (["--batch-size=12"], 16),
        (["--batch-size=12", "--micro-batches=1", "--mesh.data=8"], 16),
        (["--batch-size=10", "--micro-batches=2", "--mesh.data=2", "--method=areal"], 16),
    ],
)
def test_a_batch_has_a_row_a_trajectory_and_empty_ones_up_to_what_divides(arguments, rows):
    assert parse(arguments).rows == rows


@pytest.mark.parametrize("spelling", ["--batch-size=16", "--batch_size=16"])
def test_flags_reach_their_fields(spelling):
    config = parse(
        [
            spelling,
            "--rollout.urls",
            "http://a:1",
            "https://b:2",
            "--loss.eta-policy=0.25",
            "--actor.learning-rate=1e-5",
            "--mesh.data=2",
            "--micro-batches=4",
            "--loss.value-clip=None",
        ]
    )
    assert config.batch_size == 16
    assert config.rollout.urls == ("http://a:1", "https://b:2")
    assert config.loss.eta_policy == 0.25
    assert config.loss.value_clip is None
    assert config.actor.learning_rate == 1e-5
    assert config.mesh == MeshConfig(data=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--stalenes=3"], "--stalenes"),
        (["--task=chess"], "--task"),
        (["--method=copcc"], "copc_no_rc"),
        (["--staleness=-1"], "staleness"),
        (["--staleness-mode=loose"], "--staleness-mode"),
        (["--batch-size=apple"], "--batch-size"),
        (["--batch-size=0"], "batch_size"),
        (["--batch-size=13", "--method=areal"], "minibatches"),
        (["--batch-size=16", "--samples-per-prompt=3"], "samples_per_prompt"),
        (["--samples-per-prompt=0"], "samples_per_prompt"),
        (["--method=dapo"], "samples_per_prompt"),
        (["--method=sao", "--samples-per-prompt=2"], "samples_per_prompt"),
        (["--method=areal", "--staleness=0"], "minibatches"),
        (["--method=gspo", "--samples-per-prompt=4", "--truncated=bootstrap"], "critic"),
        (["--distributed.processes=2"], "coordinator"),
        (["--distributed.processes=2", "--distributed.coordinator=host"], "host:port"),
        (["--distributed.coordinator=host:1"], "processes"),
        (["--distributed.process-id=1"], "process_id"),
        (["--distributed.auto=True", "--distributed.coordinator=host:1"], "auto"),
        ([*TWO_PROCESSES, "--mesh.data=3"], "mesh.data"),
        ([*TWO_PROCESSES, "--mesh.data=2", "--batch-size=15"], "batch_size"),
        (
            [*TWO_PROCESSES, "--mesh.data=2", "--batch-size=12", "--samples-per-prompt=4"],
            "samples_per_prompt",
        ),
        (["--mesh.model=0"], "model"),
        (["--updates=0"], "updates"),
        (["--publish-every=4", "--staleness=2"], "publish_every"),
        (["--publish-every=2", "--staleness-mode=exact"], "publish_every"),
        (["--rollout.temperature=0.9"], "temperature"),
        (["--rollout.top-p=0.95"], "top_p"),
        (["--rollout.urls=localhost:30000"], "http://host:port"),
        (["--rollout.control-urls=http://a:1"], "control_urls"),
        (["--rollout.timeout-seconds=0"], "timeout_seconds"),
        (["--rollout.max-new-tokens=500"], "max_new_tokens"),
        (["--search.retriever-url=ftp://x"], "retriever_url"),
        (["--search.topk=0"], "topk"),
        (["--loss.eps-low=1.5"], "eps_low"),
        (["--loss.eta-policy=-0.1"], "eta_policy"),
        (["--actor.learning-rate=0"], "learning_rate"),
        (["--search.one-hop-share=2"], "one_hop_share"),
        (["--sft.updates=-1"], "updates"),
        (["--eval.every=-1"], "every"),
        (["--viewer.every=-1"], "every"),
        (["--viewer.episodes=0"], "episodes"),
        (["--tiny.num-heads=3"], "num_heads"),
        (["--tiny.num-kv-heads=3"], "num_kv_heads"),
        (["--cpus", "0", "4096"], "cpus"),
    ],
)
def test_what_cannot_work_is_refused_by_name(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    # The message is set in a box, which may break a line anywhere between words.
    assert named in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_method_brings_its_warm_up_and_flags_go_over_it():
    preset = parse([]).actor.warmup_updates
    assert preset != 25
    assert parse(["--method=areal"]).actor.warmup_updates == 25
    assert parse(["--method=areal", "--actor.warmup-updates=3"]).actor.warmup_updates == 3
    assert parse(["--method=copc"]).actor.warmup_updates == preset


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    # One entry a field: the flag, its value, and then a sentence before the default.
    entries = " ".join(text.replace("│", " ").split()).split(" --")
    for name in _fields(RunConfig):
        flag = name.replace("_", "-").rstrip("-")
        # A trailing underscore, as in lambda_, is kept.
        found = [entry for entry in entries if entry.split(" ", 1)[0] in (flag, name)]
        assert found, f"--help does not list {name}"
        words = found[0].split("(default", 1)[0].split()
        assert len(words) >= 4, f"--help does not explain {name}: {found[0]}"


def test_json_round_trip_keeps_every_value():
    config = parse(
        [
            "--method=ppo",
            "--cpus",
            "0",
            "0",
            "--run-dir=runs/x",
            "--rollout.urls",
            "http://a:1",
            "--loss.value-clip=None",
            "--logprob-chunk=8",
            "--actor.schedule=cosine",
        ]
    )
    again = from_json(to_json(config))
    assert again == config
    assert isinstance(again.run_dir, Path)
    assert to_dict(again) == json.loads(to_json(config))


def test_json_with_an_unknown_key_is_refused_by_its_full_name():
    saved = to_dict(RunConfig())
    saved["rollout"]["tempreature"] = 1.0
    with pytest.raises(ValueError, match=r"rollout\.tempreature"):
        from_json(json.dumps(saved))


@pytest.mark.parametrize("text", ["[]", "{", '{"batch_size": "apple"}', '{"staleness": -1}'])
def test_json_that_is_no_configuration_is_refused(text):
    with pytest.raises(ValueError):
        from_json(text)


def test_resume_takes_the_configuration_of_the_run(tmp_path):
    saved = dataclasses.replace(
        RunConfig(),
        method="ppo",
        updates=40,
        run_dir=tmp_path,
        actor=OptimizerConfig(learning_rate=1e-5),
        rollout=RolloutConfig(urls=("http://a:1",)),
    )
    (tmp_path / "config.json").write_text(to_json(saved))
    config = parse([f"--resume={tmp_path}"])
    assert config == dataclasses.replace(saved, resume=tmp_path, run_dir=None)
    longer = parse(["--resume", str(tmp_path), "--updates=60", "--task=search"])
    assert longer == dataclasses.replace(config, updates=60)


def test_resume_without_a_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse([f"--resume={tmp_path / 'nothing'}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --resume") and error.count("\n") == 1


@pytest.mark.parametrize("text", ["{", '{"color": "red"}', '{"batch_size": "apple"}'])
def test_resume_of_a_foreign_folder_is_one_line(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse(["--resume", str(tmp_path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --resume") and error.count("\n") == 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_configured(method):
    row = METHODS[method]
    samples = max(row.samples_per_prompt, 1)
    config = RunConfig(method=method, samples_per_prompt=samples, batch_size=16 * samples)
    assert from_json(to_json(config)) == config


def test_a_replay_takes_the_recorded_settings_but_for_what_its_method_prescribes(tmp_path):
    recorded = parse(["--method=areal", "--batch-size=32", "--record=True", "--staleness=4"])
    assert recorded.actor.warmup_updates == METHODS["areal"].warmup_updates["search"]
    (tmp_path / "config.json").write_text(to_json(recorded))
    same = parse([f"--replay={tmp_path}"])
    assert same == dataclasses.replace(recorded, record=False, replay=tmp_path)
    other = parse([f"--replay={tmp_path}", "--method=ppo", "--seed=3"])
    assert (other.method, other.batch_size, other.seed) == ("ppo", 32, 3)
    assert other.actor.warmup_updates == parse(["--method=ppo"]).actor.warmup_updates
    # What a person has set stays.
    chosen = dataclasses.replace(recorded.actor, warmup_updates=7)
    (tmp_path / "config.json").write_text(to_json(dataclasses.replace(recorded, actor=chosen)))
    assert parse([f"--replay={tmp_path}", "--method=ppo"]).actor.warmup_updates == 7
    assert from_json(to_json(other)) == other
