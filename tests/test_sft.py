"""Fine-tuning on chats of public corpora: what is trained on, what is left out and why."""

import dataclasses
import json

import assembly
import jax
import numpy as np
import pyarrow as pa
import pytest
import sft
from pyarrow import parquet
from small_runs import MODEL

from copc_jax import hf, model
from copc_jax.config import parse
from copc_jax.datasets import UnusableChatError, chat_segments

RETOOL = {
    "messages": [
        {"role": "user", "content": "Solve with Python.\n\n*user question:*\nWhat is 6 * 7?"},
        {
            "role": "assistant",
            "content": (
                "Let me compute.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n"
                "<interpreter>\n42\n</interpreter>\n\nIt is 42.\n"
                "<answer>\n\\boxed{42}\n</answer>"
            ),
        },
    ]
}
CHAIN_OF_AGENTS = {
    "messages": [
        {"role": "system", "content": "Use wiki_search."},
        {"role": "user", "content": "Who are they?"},
        {
            "role": "assistant",
            "content": (
                "<think>Look.</think><plan>Search.</plan><wiki_search>they</wiki_search>"
                "<observation>Page 1: Ann and Bo\nmet.</observation>"
                "<reflection>Good.</reflection><answer>Ann|Bo</answer>"
            ),
        },
    ]
}
ROLES = {
    "messages": [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": "<code>print(6 * 7)</code>"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "<answer>42</answer>"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Who?"},
        {"from": "gpt", "value": "<search>who</search>"},
        {"from": "observation", "value": "<information>Ann</information>"},
        {"from": "gpt", "value": "<answer>Ann</answer>"},
    ]
}


def segments(row, tag, tags=("code", "answer")):
    return chat_segments(row, observation_tag=tag, render_tool=lambda text: f"[{text}]", tags=tags)


def test_retools_inline_results_are_not_trained_on():
    assert segments(RETOOL, "interpreter") == [
        (RETOOL["messages"][0]["content"] + "\n", False),
        ("Let me compute.\n<code>\n```python\nprint(6 * 7)\n```\n</code>", True),
        ("\n<interpreter>\n42\n</interpreter>\n\n", False),
        ("It is 42.\n<answer>\n\\boxed{42}\n</answer>", True),
    ]


def test_chain_of_agents_observations_are_not_trained_on():
    assert segments(CHAIN_OF_AGENTS, "observation", ["wiki_search", "answer"]) == [
        ("Use wiki_search.\nWho are they?\n", False),
        (
            "<think>Look.</think><plan>Search.</plan><wiki_search>they</wiki_search>",
            True,
        ),
        ("<observation>Page 1: Ann and Bo\nmet.</observation>", False),
        ("<reflection>Good.</reflection><answer>Ann|Bo</answer>", True),
    ]


def test_roles_say_who_wrote_what():
    assert segments(ROLES, "interpreter") == [
        ("What is 6 * 7?\n", False),
        ("<code>print(6 * 7)</code>", True),
        ("[42]", False),
        ("<answer>42</answer>", True),
        ("\nSure?\n", False),
        ("Yes.", True),
    ]
    assert segments(SHAREGPT, "information") == [
        ("Who?\n", False),
        ("<search>who</search>", True),
        ("<information>Ann</information>", False),
        ("<answer>Ann</answer>", True),
    ]


def chatml(messages):
    """A chat template like Qwen's."""
    if messages[0]["role"] == "system" and messages[0]["content"] == "refused":
        raise ValueError("no system")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{text}<|im_start|>assistant\n"


def test_chat_models_get_their_template_and_trained_message_ends():
    row = {"messages": [{"role": "system", "content": "Be brief."}, *ROLES["messages"]]}
    form = {"observation_tag": "interpreter", "render_tool": "[{}]".format}
    asked = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # Inside a message, as the retool format has it.
    found = chat_segments(row, **form, apply_chat_template=chatml)
    assert found == [
        (asked, False),
        ("<code>print(6 * 7)</code>", True),
        ("[42]", False),
        ("<answer>42</answer>", True),
        ("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yes.", True),
    ]
    # A message a turn, as the qwen format has it.
    found = chat_segments(row, **form, apply_chat_template=chatml, end="<|im_end|>")
    assert found[:4] == [
        (asked, False),
        ("<code>print(6 * 7)</code><|im_end|>", True),
        ("[42]", False),
        ("<answer>42</answer><|im_end|>", True),
    ]
    assert found[4:] == [
        ("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yes.<|im_end|>", True),
    ]
    forgetful = lambda messages: f"[{len(messages)}]"
    with pytest.raises(UnusableChatError, match="in another way"):
        chat_segments(row, **form, apply_chat_template=forgetful)
    row["messages"][0]["content"] = "refused"
    with pytest.raises(UnusableChatError, match="refuses the messages: no system"):
        chat_segments(row, **form, apply_chat_template=chatml)


def test_a_template_that_drops_thinking_trains_on_nothing_shifted(tmp_path):
    """C111: three turns, and a template like Qwen3's, which forgets earlier thoughts.

    Without thoughts the pieces are the template's own text of the whole chat, mask on the answers
    and their ends; with thoughts its text of the whole chat has other ones, and it is refused.
    """
    (tmp_path / "chat_template.jinja").write_text(
        "{%- for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
        "{% set said = m.content.split('</think>')[-1] %}{% else %}{% set said = m.content %}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = hf.chat_template(tmp_path)

    def turns(thought):
        return [
            message
            for question, answer in (("6 * 7?", "42"), ("6 + 7?", "13"), ("Sure?", "Yes."))
            for message in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": thought + answer},
            )
        ]

    form = {"observation_tag": "interpreter", "render_tool": str, "end": "<|im_end|>"}
    found = chat_segments({"messages": turns("")}, apply_chat_template=template, **form)
    whole = template(turns("")).removesuffix("\n<|im_start|>assistant\n")
    assert "".join(text for text, _ in found) == whole
    written = [text for text, is_written in found if is_written]
    assert written == ["42<|im_end|>", "13<|im_end|>", "Yes.<|im_end|>"]
    thinking = {"messages": turns("<think>Let me see.</think>")}
    with pytest.raises(UnusableChatError, match="in another way"):
        chat_segments(thinking, apply_chat_template=template, **form)


def chat(answer, role="assistant"):
    return {"messages": [{"role": "user", "content": "Q?"}, {"role": role, "content": answer}]}


BAD = {
    "no list of messages": {"question": "Q?", "answer": "A"},
    "no message of the assistant": {"messages": [{"role": "user", "content": "Q?"}]},
    "nothing stands before": {"messages": [{"role": "assistant", "content": "A"}]},
    "a role other than": chat("A", role="critic"),
    "a message without text": chat("  "),
    "a message that is no object": {"messages": ["Q?", "A"]},
    "<interpreter> tags that are not": chat("<code>1</code><interpreter>1"),
    "<answer> tags that are not": chat("<answer>1<answer>2</answer></answer>"),
    "<code> tags that are not": chat("</code>1<code>"),
    "tool text inside <observation>": chat("<code>1</code><observation>1</observation>"),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_trained_on_says_why(reason):
    with pytest.raises(UnusableChatError, match=reason):
        segments(BAD[reason], "interpreter")


def flags(cache, *more):
    return ["--task=search", *MODEL, f"--cache-dir={cache}", *more]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return assembly.build(parse(flags(tmp_path_factory.mktemp("cache"))))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def found(query, text, answer):
    return chat(
        f"<search> {query}</search><information> {text}</information><answer> {answer}</answer>"
    )


def test_masks_survive_packing(parts, tmp_path):
    """The trained tokens of a batch are the model's text and nothing else, chat by chat."""
    config = parse(flags(tmp_path, "--sft.rows=2"))
    rows = [found(f"thing {i}", f"secret {i}", f"word {i}") for i in range(8)]
    chats, tokens = sft.read_corpus([write(tmp_path / "a.jsonl", rows)], config, parts)
    assert tokens == sum(
        len(sft.encode(chat, parts.tokenizer, name="").token_ids) for chat in chats
    )
    batch = next(sft.demonstration_batches(config, with_chats(parts, chats)))
    decode = parts.tokenizer.decode
    trained = decode(batch.token_ids[batch.is_action].tolist(), skip_special_tokens=False)
    context = (batch.segment_ids > 0) & ~batch.is_action
    untrained = decode(batch.token_ids[context].tolist(), skip_special_tokens=False)
    assert "<search> thing" in trained and "<answer> word" in trained
    assert "secret" not in trained and "information>" not in trained and "Q?" not in trained
    assert "<information> secret" in untrained and "word" not in untrained
    count = int(batch.segment_ids.max(axis=1).sum())
    assert trained.count("</answer>") == count == untrained.count("Q?") > 2


def test_a_chat_models_corpus_is_written_in_its_template(parts, tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    folder = tmp_path / "chat"
    hf.save_hf(
        folder,
        jax.jit(lambda key: model.mimetic_init(key, parts.model))(jax.random.key(0)),
        parts.model,
        tokenizer_json=parts.tokenizer.to_str(),
        extra_files={"chat_template.jinja": template},
    )
    config = parse(flags(tmp_path, f"--model={folder}", "--search.format=long"))
    corpus = [write(tmp_path / "a.jsonl", [found("thing", "secret", "word")])]
    (pieces,), _ = sft.read_corpus(corpus, config, assembly.build(config))
    assert pieces[0] == ("[user]Q?[assistant]", False)
    assert pieces[1] == ("<search> thing</search>", True)
    assert pieces[-1][0].startswith("<answer> word</answer>") and pieces[-1][1]


def main(arguments):
    """The command; optax does not follow the strict promotion of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        return sft.main(arguments)


def with_chats(parts, chats):
    environment = dataclasses.replace(parts.environment, demonstrations=lambda count: iter(chats))
    return dataclasses.replace(parts, environment=environment)


def test_a_corpus_becomes_a_model_and_a_report(tmp_path, capsys):
    good = [found(f"thing {i}", f"fact {i}", f"word {i}") for i in range(6)]
    bad = [
        chat("<answer> 1"),
        chat("<answer> 2"),
        chat("<answer> " + "long " * 300 + "</answer>"),
        {"messages": []},
    ]
    first = write(tmp_path / "a.jsonl", good[:3] + bad)
    parquet.write_table(pa.Table.from_pylist(good[3:]), tmp_path / "b.parquet")
    out = tmp_path / "model"
    arguments = flags(
        tmp_path / "cache",
        *("--data", first, str(tmp_path / "b.parquet")),
        *("--sft.updates=3", f"--out={out}"),
    )
    assert main(arguments) == out
    printed = capsys.readouterr().out
    assert "6 chats" in printed and "4 left out" in printed and "3 updates" in printed
    assert (
        f"2 left out: <answer> tags that are not opened and closed in turn (first: {first}:4)"
        in (printed)
    )
    assert f"1 left out: longer than rollout.max_tokens, 192 (first: {first}:6)" in printed
    assert f"1 left out: no list of messages (first: {first}:7)" in printed
    params, model = hf.load_hf(out)
    assert model.hidden_size == 32 and np.isfinite(np.asarray(params["embed"])).all()
    # A model is not written over, and the model that is there can be trained on.
    with pytest.raises(SystemExit) as error:
        sft.main(arguments)
    assert error.value.code == 2 and "name another folder" in capsys.readouterr().err
    again = main([*arguments, f"--model={out}", f"--out={tmp_path / 'second'}"])
    assert hf.load_hf(again)[1] == model


def test_a_corpus_without_a_usable_chat_is_refused(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [RETOOL, RETOOL])
    with pytest.raises(SystemExit) as error:
        sft.main(flags(tmp_path / "cache", "--data", path, f"--out={tmp_path / 'model'}"))
    assert error.value.code == 2
    printed = capsys.readouterr()
    assert "2 left out: tool text inside <interpreter>, where this format has <information>" in (
        printed.out
    )
    assert "can be trained on" in printed.err
    assert not (tmp_path / "model").exists()


def test_a_broken_corpus_is_refused_with_its_place(parts, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(SHAREGPT) + "\n{broken\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2"):
        sft.read_corpus([str(path)], parse(flags(tmp_path)), parts)
