"""Tags and format of the search task as flags, and models that were trained on others."""

import json

import assembly
import evaluate
import jax
import pytest

from copc_jax import data, hf, model
from copc_jax.config import parse

TINY = model.ModelConfig(
    vocab_size=600,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that was trained on the default form."""
    form = assembly.build(parse(["--task=search", "--tiny.vocab-size=600"])).environment.form
    path = tmp_path_factory.mktemp("models") / "model"
    hf.save_hf(
        path,
        model.init(jax.random.key(0), TINY),
        TINY,
        tokenizer_json=data.train_tokenizer(["a b"], 300).to_str(),
        extra_files={assembly.TASK_FILE: json.dumps(form)},
    )
    return path


def environment(*flags):
    return assembly.ENVIRONMENTS["search"](parse(["--task=search", *flags]))


def test_flags_reach_everything_that_reads_the_form():
    built = environment("--search.tags=find,result,reply,plan", "--search.topk=1")
    tags = ("<find>", "</find>", "<result>", "</result>", "<reply>", "</reply>")
    assert built.tags == tags
    tokenizer = data.train_tokenizer(built.texts(), 600, tags=built.tags)
    assert all(len(tokenizer.encode(tag).ids) == 1 for tag in tags)
    task = built.make_task(tokenizer)
    assert task.stop == ("</find>", "</reply>")
    sampled = [text for episode in built.demonstrations(20) for text, is_action in episode[1:]]
    assert sampled and all(text.startswith(("<find>", "<result>", "<reply>")) for text in sampled)
    assert task.reward(built.train[0], [f"<reply>{built.train[0].gold[0]}</reply>"], {})[0] == 1.1
    assert built.extract_answer(["<reply>x</reply>"]) == "x"


def test_the_long_format_explains_the_rules():
    config = parse(["--task=search", "--search.format=long", "--search.tags=chain-of-agents"])
    built = assembly.ENVIRONMENTS["search"](config)
    tokenizer = data.train_tokenizer(built.texts(), 2048, tags=built.tags)
    longest = max(len(built.make_task(tokenizer).encode_prompt(p)) for p in built.train[:1000])
    assert longest <= config.rollout.max_tokens // 2
    (prompt, _), *_ = next(iter(built.demonstrations(1)))
    assert "<wiki_search>" in prompt and "<observation>" in prompt and "Question: " in prompt
    assert built.form == {
        "task": "search",
        "search.format": "long",
        "search.tags": "wiki_search,observation,answer,think",
    }


def test_warm_starts_of_other_forms_are_not_shared():
    forms = ([], ["--search.format=long"], ["--search.tags=chain-of-agents"])
    assert len({str(environment(*flags).identity) for flags in forms}) == len(forms)


@pytest.mark.parametrize(
    ("flag", "saved", "asked"),
    [
        ("--search.format=long", "search.format=short", "search.format=long"),
        (
            "--search.tags=chain-of-agents",
            "search.tags=search,information,answer,think",
            "search.tags=wiki_search,observation,answer,think",
        ),
    ],
)
def test_a_model_of_another_form_is_refused(folder, capsys, flag, saved, asked):
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--model={folder}", "--task=search", flag])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: model {folder} was trained with {saved}")
    assert f"this run has {asked}" in message
    # The advice works.
    assembly.build(parse(["--task=search", f"--model={folder}", f"--{saved}"]))


@pytest.mark.parametrize("content", [None, {"task": "math"}, {"task": "search"}])
def test_other_models_are_accepted(folder, tmp_path, content):
    for file in folder.iterdir():
        if file.name != assembly.TASK_FILE:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is not None:
        (tmp_path / assembly.TASK_FILE).write_text(json.dumps(content))
    flags = ["--search.format=long", "--search.tags=chain-of-agents"]
    assembly.build(parse(["--task=search", f"--model={tmp_path}", *flags]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--search.tags=verl"], "must be search-r1 or chain-of-agents, or four names"),
        (["--search.format=middle"], "middle"),
        (["--search.corpus=phantom"], "needs phantom_dir"),
        (["--search.corpus=nq"], "nq"),
    ],
)
def test_forms_and_corpora_that_do_not_exist_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        parse(["--task=search", *flags])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert message in " ".join((printed.out + printed.err).replace("│", " ").split())


def test_long_texts_have_a_larger_budget():
    small = parse(["--task=search"]).rollout
    for flags in (
        ["--search.corpus=wikipedia"],
        ["--search.corpus", "phantom"],
        ["--search.format=long"],
        ["--search.format=long", "--search.corpus=wikipedia"],
    ):
        config = parse(["--task=search", *flags, "--search.phantom-dir=x"])
        assert config.rollout.max_tokens > 2 * small.max_tokens
        assert config.rollout.max_turns == 5
    flag = "--rollout.max-tokens=512"
    assert parse(["--search.corpus=wikipedia", flag]).rollout.max_tokens == 512
