"""Readers on rows in the exact shape of public files, and everything that they must refuse."""

import csv
import io
import json

import assembly
import pyarrow as pa
import pytest
from pyarrow import parquet

from copc_jax.config import parse
from copc_jax.datasets import DataError, mix, read_questions
from copc_jax.types import Prompt

AFM_INSTRUCTIONS = (
    "Solve the given task step by step.\nYou must take structured functions, including 'think',"
    " 'plan' and 'answer'.\n\nTask:\n"
)


def lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read(path, **options):
    return read_questions([str(path)], **options)


def question(prompt):
    assert [message["role"] for message in prompt.messages] == ["user"]
    return prompt.messages[0]["content"]


def write(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        parquet.write_table(pa.Table.from_pylist(content), path)
    return path


def verl_row(content, ground_truth, **more):
    return {
        "data_source": "aime24",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": {"index": "0", "split": "train"},
        **more,
    }


# The forms. Each is: file name, content, and (question, gold, source) of each row.

FORMS = {
    "FlashRAG": (
        "nq_test.jsonl",
        lines(
            {"id": "test_0", "question": "who was first?", "golden_answers": ["Ann", "Ann B."]},
            {"id": "test_1", "question": "and next?", "golden_answers": ["Bo"]},
        ),
        [("who was first?", ("Ann", "Ann B."), "nq"), ("and next?", ("Bo",), "nq")],
    ),
    "answer lists with a source": (
        "all.jsonl",
        lines(
            {
                "question": "who got the prize",
                "answer": ["Wilhelm Conrad Röntgen"],
                "data_source": "nq",
            },
            {"question": "which mode", "answer": ["Olivia", "MFSK"], "data_source": "popqa"},
        ),
        [
            ("who got the prize", ("Wilhelm Conrad Röntgen",), "nq"),
            ("which mode", ("Olivia", "MFSK"), "popqa"),
        ],
    ),
    "Search-R1": (
        "train.parquet",
        [
            {
                "id": f"train_{i}",
                "question": text,
                "golden_answers": [gold],
                "data_source": source,
                "prompt": [{"role": "user", "content": f"Answer in tags. Question: {text}\n"}],
                "reward_model": {"ground_truth": {"target": [gold]}, "style": "rule"},
            }
            # Two sets in one file share their ids.
            for i, text, gold, source in [
                (0, "where is it?", "Rome", "searchR1_nq"),
                (0, "who is he?", "Bo", "searchR1_hotpotqa"),
            ]
        ],
        [("where is it?", ("Rome",), "nq"), ("who is he?", ("Bo",), "hotpotqa")],
    ),
    "verl, one answer": (
        "test.parquet",
        [
            verl_row(AFM_INSTRUCTIONS + "Find $x$.\nIt is an integer.", "204"),
            verl_row(AFM_INSTRUCTIONS + "Find $y$.", "025"),
        ],
        [
            ("Find $x$.\nIt is an integer.", ("204",), "aime24"),
            ("Find $y$.", ("025",), "aime24"),
        ],
    ),
    "verl, a list": (
        "lists.parquet",
        [verl_row("Where?", ["NYC", "New York"]), verl_row("When?", ["1999"])],
        [("Where?", ("NYC", "New York"), "aime24"), ("When?", ("1999",), "aime24")],
    ),
    "verl, a target": (
        "targets.parquet",
        [verl_row("Where?", {"target": ["NYC"]}), verl_row("When?", {"target": ["1999"]})],
        [("Where?", ("NYC",), "aime24"), ("When?", ("1999",), "aime24")],
    ),
    "verl, question in extra_info": (
        "gsm.parquet",
        [
            verl_row("How many? End with ####.", "3", extra_info={"question": "How many?"}),
            verl_row("How much? End with ####.", "4", extra_info={"question": "How much?"}),
        ],
        [("How many?", ("3",), "aime24"), ("How much?", ("4",), "aime24")],
    ),
    "Chain-of-Agents": (
        "musique_dev.jsonl",
        lines(
            {"question": "Which two?", "answer": "Ann|Bo"}, {"question": "Which?", "answer": "Cy"}
        ),
        [("Which two?", ("Ann|Bo",), "musique"), ("Which?", ("Cy",), "musique")],
    ),
    "MuSiQue": (
        "musique.jsonl",
        lines({"id": "2hop__1", "question": "Who?", "answer": "Ann", "answer_aliases": ["A."]}),
        [("Who?", ("Ann", "A."), "musique")],
    ),
    "HotpotQA": (
        "hotpotqa_dev.json",
        json.dumps(
            [
                {
                    "_id": "5a8b57f2",
                    "question": "Same nation?",
                    "answer": "yes",
                    "context": [["a"]],
                },
                {"_id": "5a8c7595", "question": "Which post?", "answer": "Chief of Protocol"},
            ]
        ).encode(),
        [
            ("Same nation?", ("yes",), "hotpotqa"),
            ("Which post?", ("Chief of Protocol",), "hotpotqa"),
        ],
    ),
    "Bamboogle": (
        "bamboogle_test.csv",
        b'Question,Answer\r\nWho was president?,james madison\r\n"Who, then?","Max ""M"" Ott"\r\n',
        [
            ("Who was president?", ("james madison",), "bamboogle"),
            ("Who, then?", ('Max "M" Ott',), "bamboogle"),
        ],
    ),
    "GSM8K": (
        "gsm8k_test.jsonl",
        lines(
            {"question": "How much?", "answer": "16 - 7 = <<16-7=9>>9 eggs.\n9 * 2 = 18.\n#### 18"},
            {"question": "How many?", "answer": "Many.\n#### 2,125"},
        ),
        [("How much?", ("18",), "gsm8k"), ("How many?", ("2,125",), "gsm8k")],
    ),
    "MATH-500": (
        "math500.jsonl",
        lines(
            {
                "problem": "Convert $(0,3)$.",
                "solution": r"So \boxed{(3, \frac{\pi}{2})}.",
                "answer": r"\left( 3, \frac{\pi}{2} \right)",
                "unique_id": "test/precalculus/807.json",
            }
        ),
        [("Convert $(0,3)$.", (r"\left( 3, \frac{\pi}{2} \right)",), "math500")],
    ),
    "AIME with numbers": (
        "aime_2025.parquet",
        [
            {"ID": "2025-I-1", "Problem": "Sum?", "Answer": 70},
            {"ID": "x", "Problem": "?", "Answer": 5},
        ],
        [("Sum?", ("70",), "aime_2025"), ("?", ("5",), "aime_2025")],
    ),
    "numbers that became floats": (
        "beyond.parquet",
        [{"problem": "Sum?", "answer": 70.0}, {"problem": "Half?", "answer": 0.5}],
        [("Sum?", ("70",), "beyond"), ("Half?", ("0.5",), "beyond")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form, tmp_path):
    name, content, expected = FORMS[form]
    prompts = read(write(tmp_path, name, content))
    assert [(question(p), p.gold, p.source) for p in prompts] == expected
    assert len({p.prompt_id for p in prompts}) == len(prompts)
    # The content tells the form, whatever the file is called; and ids do not change.
    again = read_questions([f"set={write(tmp_path, 'renamed.bin', content)}"])
    assert [(question(p), p.gold) for p in again] == [row[:2] for row in expected]
    assert {p.source for p in again} == {"set"}
    assert read(tmp_path / name) == prompts


def test_a_mark_of_utf8_and_dos_lines_change_nothing(tmp_path):
    content = lines({"question": "Où?", "answer": "là"}, {"question": "Quand?", "answer": "hier"})
    dos = b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n") + b"\r\n"
    plain = read(write(tmp_path, "a.jsonl", content))
    assert read(write(tmp_path, "a.jsonl", dos)) == plain
    table = b"\xef\xbb\xbfquestion,answer\r\nO\xc3\xb9?,l\xc3\xa0\r\n"
    assert question(read(write(tmp_path, "b.csv", table))[0]) == "Où?"


def test_a_text_may_hold_unusual_line_separators(tmp_path):
    text = "one\u2028two\x0bthree\x85four"
    prompts = read(write(tmp_path, "a.jsonl", lines({"question": text, "answer": "1"})))
    assert question(prompts[0]) == text


GOOD = {"question": "Who?", "answer": "Ann"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "Ann"}, "no question"),
        ({"question": "  ", "answer": "Ann"}, "question is empty"),
        ({"question": None, "answer": "Ann"}, "question must be a text"),
        ({"question": ["Who?"], "answer": "Ann"}, "question must be a text"),
        ({"question": "Who?"}, "no gold answer"),
        ({"question": "Who?", "answer": None}, "no gold answer"),
        ({"question": "Who?", "answer": ""}, "answer is empty"),
        ({"question": "Who?", "answer": []}, "empty list"),
        ({"question": "Who?", "answer": ["Ann", " "]}, "answer is empty"),
        ({"question": "Who?", "answer": float("nan")}, "nan"),
        ({"question": "Who?", "answer": ["Ann", float("inf")]}, "inf"),
        ({"question": "Who?", "answer": True}, "answer must be"),
        ({"question": "Who?", "answer": {"value": "Ann"}}, "answer must be"),
        ({"question": "Who?", "golden_answers": [["Ann"]]}, "golden_answers must be"),
        ({"question": "Who?", "reward_model": {"style": "rule"}}, "reward_model must be"),
        ({"question": "Who?", "reward_model": {"ground_truth": {"target": []}}}, "empty list"),
        ({"question": "How many?", "answer": "So 3.\n####  "}, "without an answer"),
        ({"prompt": [], "answer": "Ann"}, "prompt must be"),
        ({"prompt": [{"role": "user"}], "answer": "Ann"}, "a message must have"),
        ({"prompt": [{"role": "tool", "content": "x"}], "answer": "Ann"}, "a message must have"),
        (
            {
                "prompt": [
                    {"role": "user", "content": "Who?"},
                    {"role": "assistant", "content": "Ann"},
                ],
                "answer": "Ann",
            },
            "last message must be of the user",
        ),
        ({"question": "Who?", "answer": "Ann", "id": 1.5}, "an id must be"),
        (["Who?", "Ann"], "no JSON object|a row must be a JSON object"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(row, message, tmp_path):
    path = write(tmp_path, "bad.jsonl", lines(GOOD, row))
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf\r\n\r\n", "empty"),
        (b"[]", "no questions"),
        (b"question,answer\n", "no questions"),
        (b"question,answer\nWho?,Ann,Bo\n", "2 columns"),
        (b"question,answer\nWho?\n", "2 columns"),
        (b'question,answer\nWho?,"Ann\n', "broken CSV"),
        (b'{"question": "Who?", "answer": "Ann"', "no JSON object"),
        (b'{\n "question": "Who?",\n "answer": "Ann"\n}\n', "one complete object a line"),
        (b'[{"question": "Who?", "answer": "Ann"}', "JSON list"),
        (b'{"question": "Wh\xff?", "answer": "Ann"}', "byte 16 is not UTF-8"),
        (b"PAR1" + bytes(40), "broken Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "no question"),
    ],
)
def test_a_bad_file_is_refused_by_name(content, message, tmp_path):
    path = write(tmp_path, "bad", content)
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_cut_parquet_file_is_refused(tmp_path):
    path = write(tmp_path, "a.parquet", [GOOD] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="broken Parquet"):
        read(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="folder"):
        read(tmp_path)
    with pytest.raises(DataError, match="name=path"):
        read("name=")


def test_duplicate_ids_are_refused_with_both_places(tmp_path):
    rows = [{"id": "q1", **GOOD}, {"id": "q2", **GOOD}, {"id": "q1", **GOOD}]
    path = write(tmp_path, "a.jsonl", lines(*rows))
    with pytest.raises(DataError, match="q1") as error:
        read(path)
    assert f"{path}:1" in str(error.value) and f"{path}:3" in str(error.value)


def test_repeated_questions_are_kept_and_said(tmp_path):
    rows = [{"question": question, "answer": "1"} for question in "abab"]
    path = tmp_path / "aime24.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = []
    assert len(read_questions([path], note=notes.append)) == 4
    assert notes == [f"{path}: 2 of 4 questions repeat another one of the file"]


def test_files_of_one_name_need_names_of_their_own(tmp_path):
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(str(write(tmp_path / folder, "dev_set.jsonl", lines(GOOD))))
    with pytest.raises(DataError, match="name=path"):
        read_questions(paths)
    prompts = read_questions([f"one={paths[0]}", f"two={paths[1]}"])
    assert [p.source for p in prompts] == ["one", "two"]
    # A file that is named after a split alone is known by its folder.
    split = write(tmp_path / "one", "test.jsonl", lines(GOOD))
    assert read(split)[0].source == "one"


def test_gold_answers_are_checked_with_their_place(tmp_path):
    path = write(tmp_path, "a.csv", b"problem,answer\none,1\ntwo,2\n")
    seen = []
    read(path, check_gold=lambda gold, where: seen.append((gold, where)))
    assert seen == [("1", f"{path}:2"), ("2", f"{path}:3")]

    def refuse(gold, where):
        raise ValueError(f"{where}: {gold} is wrong")

    with pytest.raises(ValueError, match=r"a\.csv:2: 1 is wrong"):
        read(path, check_gold=refuse)


def test_shared_instructions_are_taken_off_and_said_so(tmp_path):
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "You use tools."},
                {"role": "user", "content": f"Solve this.\n\nFind {x}.\nNow.\n\nUse \\boxed.\n"},
            ],
            "answer": x,
        }
        for x in ("a", "b", "c")
    ]
    path = write(tmp_path, "a.jsonl", lines(*rows))
    notes = []
    prompts = read(path, note=notes.append)
    assert [question(p) for p in prompts] == ["Find a.", "Find b.", "Find c."]
    assert len(notes) == 1 and "3 prompts" in notes[0] and "Solve this." in notes[0]
    kept = read(path, instructions="keep", note=notes.append)
    assert len(notes) == 1
    assert [m["role"] for m in kept[0].messages] == ["system", "user"]
    assert kept[0].messages[1]["content"].startswith("Solve this.")


def test_what_is_not_shared_stays(tmp_path):
    rows = [
        {"prompt": "Find a.\nQuickly.", "answer": "a"},
        {"prompt": "Find a.\nSlowly.\nWell.", "answer": "b", "data_source": "other"},
        {"prompt": "Find b.\nQuickly.", "answer": "c"},
    ]
    prompts = read(write(tmp_path, "a.jsonl", lines(*rows)))
    assert [question(p) for p in prompts] == ["Find a.", "Find a.\nSlowly.\nWell.", "Find b."]
    # The same prompt twice shares everything, and would be left with nothing.
    same = [{"prompt": "Find a.\nNow.", "answer": "a"}] * 2
    prompts = read(write(tmp_path, "b.jsonl", lines(*same)))
    assert [question(p) for p in prompts] == ["Find a.\nNow."] * 2
    # Questions of their own field are never cut.
    own = [{"question": f"If so:\nwhat is {x}?", "answer": "1"} for x in "ab"]
    prompts = read(write(tmp_path, "c.jsonl", lines(*own)))
    assert [question(p) for p in prompts] == ["If so:\nwhat is a?", "If so:\nwhat is b?"]


def test_a_big_table_of_many_lines_keeps_its_row_numbers(tmp_path):
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["question", "answer"])
    writer.writerows([[f"What\nis {i}?", i] for i in range(50)])
    path = write(tmp_path, "a.csv", text.getvalue().encode())
    prompts = read(path)
    assert [p.gold for p in prompts] == [(str(i),) for i in range(50)]
    rows = [{"question": f"What is {i}?", "answer": str(i)} for i in range(10_000)]
    prompts = read(write(tmp_path, "b.parquet", rows))
    assert prompts[9_999].gold == ("9999",) and prompts[9_999].prompt_id == "b/10000"


def prompts_of(**counts):
    return [
        Prompt(f"{source}/{i}", source=source) for source, n in counts.items() for i in range(n)
    ]


def test_a_mixture_has_its_shares_and_leaves_nothing_out():
    prompts = prompts_of(a=10, b=90)
    mixed = mix(prompts, {"a": 1, "b": 3})
    count = {source: sum(p.source == source for p in mixed) for source in "ab"}
    assert count == {"a": 30, "b": 90}
    assert {p.prompt_id for p in mixed} == {p.prompt_id for p in prompts}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "a, b; got a"),
        ({"a": 1, "b": 1, "c": 1}, "got a, b, c"),
        ({"a": 0, "b": 1}, "more than 0"),
        ({"a": float("nan"), "b": 1}, "more than 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        mix(prompts_of(a=2, b=2), weights)


# In a run.


def files_of_a_run(tmp_path):
    first = write(
        tmp_path, "a.jsonl", lines(*[{"question": f"a{i}?", "answer": "x"} for i in "12"])
    )
    second = write(tmp_path, "b.parquet", [{"question": f"b{i}?", "answer": "y"} for i in range(6)])
    held = write(tmp_path, "c.csv", b"question,answer\na1?,x\nc?,z\n")
    return ["--data.train", str(first), f"bee={second}", "--data.held-out", str(held)]


def test_a_run_trains_and_evaluates_on_files(tmp_path, capsys):
    flags = files_of_a_run(tmp_path)
    environment = assembly.build(parse(flags)).environment
    assert [p.source for p in environment.train] == ["a"] * 2 + ["bee"] * 6
    assert {p.prompt_id for p in environment.held_out} == {"c/2", "c/3"}
    printed = capsys.readouterr().out
    assert "--search.retriever-url" in printed
    assert "1 questions are both in data.train and in data.held_out" in printed
    weights = ["--data.weights", "a=1", "bee=1", "--search.retriever-url=http://127.0.0.1:1/r"]
    environment = assembly.build(parse([*flags, *weights])).environment
    assert [p.source for p in environment.train] == ["a"] * 6 + ["bee"] * 6
    assert "--search.retriever-url" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda flags: flags[:3], "data.train and data.held_out must name files together"),
        (lambda flags: [*flags, "--data.weights", "a=x"], "source=2.5"),
        (lambda flags: ["--data.weights", "a=1"], "needs files"),
    ],
)
def test_half_a_data_set_is_refused(change, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(change(files_of_a_run(tmp_path)))
    assert stop.value.code == 2
    # The message is set in a box, which may break a line anywhere between words.
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_weights_must_fit_the_files_of_a_run(tmp_path):
    config = parse([*files_of_a_run(tmp_path), "--data.weights", "a=1"])
    with pytest.raises(ValueError, match="a, bee; got a"):
        assembly.build(config)
