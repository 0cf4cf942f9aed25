"""Universes of invented people: files, splits, lists of answers, and demonstrations."""

import asyncio
import json
import pathlib
import shutil

import pytest

from copc_jax import data, phantom, search_demonstrations
from copc_jax.tasks.search import SearchConfig, SearchTask, TagSet, exact_match
from copc_jax.tools.retriever import TantivyRetriever

UNIVERSE = pathlib.Path(__file__).parent / "phantom_universe"


@pytest.fixture(scope="module")
def universe():
    return phantom.build_phantom(UNIVERSE)


@pytest.fixture(scope="module")
def rows():
    return {row["id"]: row for row in json.loads((UNIVERSE / "questions.json").read_text())}


def chains(universe):
    return [question for split in universe[1:] for question in split if question.chain]


def test_articles_become_passages_without_headings(universe):
    passages = {p.title: p for p in universe[0]}
    assert len(passages) == len(universe[0]) == 41
    for name, passage in passages.items():
        assert passage.id == f"phantom/{name}"
        assert "#" not in passage.text and "\n" not in passage.text
        assert f"The gender of {name} is " in passage.text


def test_the_build_is_deterministic(universe):
    assert phantom.build_phantom(UNIVERSE) == universe


def test_about_the_asked_share_is_held_out(universe):
    _, train, held_out = universe
    assert len(train) >= len(held_out) > 5


def test_no_person_is_shared_between_the_splits(universe, rows):
    _, train, held_out = universe
    touched = [{s for q in split for s in q.subjects} for split in (train, held_out)]
    assert touched[0] and touched[1] and not touched[0] & touched[1]
    # Everybody whom the generator's own solution passes is among them.
    names = {p.title for p in universe[0]}
    for question in train + held_out:
        traces = json.loads(rows[question.id]["solution_traces"])
        passed = {value for trace in traces for value in trace.values() if value in names}
        assert passed <= set(question.subjects)


def test_questions_are_the_generators(universe, rows):
    for question in universe[1] + universe[2]:
        row = rows[question.id]
        assert question.question == row["question"]
        assert question.to_prompt().source == f"difficulty-{row['difficulty']}"
        assert exact_match(" | ".join(reversed(row["answer"])), question.golds) == 1.0


def test_no_question_holds_its_answer(universe, rows):
    kept = {q.id for q in universe[1] + universe[2]}
    telling = [
        row for row in rows.values() if any(answer in row["question"] for answer in row["answer"])
    ]
    assert telling
    assert not kept & {row["id"] for row in telling if not row["is_aggregation_question"]}


def test_chains_lead_through_articles_to_all_answers(universe, rows):
    texts = {p.id: p.contents for p in universe[0]}
    assert len(chains(universe)) > 5
    assert max(q.hops for q in chains(universe)) >= 3
    for question in chains(universe):
        assert question.hops <= 4
        assert question.chain[0].entity in question.question
        seen = {question.chain[0].entity}
        for hop in question.chain:
            assert hop.entity in seen
            assert hop.entity in texts[hop.passage_id]
            assert all(answer in texts[hop.passage_id] for answer in hop.answers)
            seen |= set(hop.answers)
        assert set(rows[question.id]["answer"]) <= seen


def test_counts_have_no_chain(universe, rows):
    counts = [q for q in universe[1] + universe[2] if rows[q.id]["is_aggregation_question"]]
    assert counts and all(q.chain == () for q in counts)


def test_each_search_of_a_chain_finds_its_article(universe):
    retriever = TantivyRetriever(universe[0])
    for question in chains(universe):
        for hop in question.chain:
            assert retriever.lookup(hop.query, 1)[0].id == hop.passage_id


def write_universe(folder, articles, questions):
    (folder / "articles.json").write_text(json.dumps(articles))
    (folder / "questions.json").write_text(json.dumps(questions))
    return folder


def person(name, **facts):
    lines = [f"{relation}({json.dumps(name)}, {json.dumps(v)})." for relation, v in facts.items()]
    text = "".join(f"The {r} of {name} is {v}.\n" for r, v in facts.items())
    return {"title": name, "article": f"# {name}\n\n## Family\n{text}", "facts": lines}


def question(text, answer, *goals):
    return {
        "id": text,
        "question": text,
        "answer": answer,
        "solution_traces": "[]",
        "prolog": {"query": list(goals), "answer": "Y_1"},
        "difficulty": len(goals),
    }


def small_universe(folder, *extra):
    articles = [
        person("Ann", mother="Bea", hobby="chess"),
        person("Bea", daughter="Ann", mother="Cleo"),
        person("Cleo", daughter="Bea", hobby="golf"),
        person("Xen", hobby="rowing"),
        person("Dot", son="Eli", daughter="Flo"),
    ]
    questions = [
        question("Who is the mother of Ann?", ["Bea"], 'mother("Ann", Y_1)'),
        question("What is the hobby of Xen?", ["rowing"], 'hobby("Xen", Y_1)'),
        *extra,
    ]
    return write_universe(folder, articles, questions)


def test_lists_are_asked_for_in_full(tmp_path):
    text = "Who is the child of Dot?"
    folder = small_universe(tmp_path, question(text, ["Flo", "Eli"], 'child("Dot", Y_1)'))
    asked = find(folder, text)
    assert [hop.query for hop in asked.chain] == ["children Dot"]
    answers = ("Eli|Flo", "flo | eli", "Eli", "Flo", "Eli|Flo|Ann", "Eli and Flo")
    assert [exact_match(answer, asked.golds) for answer in answers] == [1, 1, 0, 0, 0, 0]
    for split in phantom.build_phantom(folder, max_answers=1)[1:]:
        assert text not in {q.id for q in split}


def find(folder, text):
    for seed in range(100):  # Until the people of the question are in one split.
        _, train, held_out = phantom.build_phantom(folder, seed=seed, held_out_share=0.2)
        found = [q for q in train + held_out if q.id == text]
        if found:
            return found[0]


def test_relations_that_no_article_states_are_followed_step_by_step(tmp_path):
    text = "Who is the grandmother of the person whose hobby is chess?"
    goals = ("grandmother(Y_3, Y_1)", 'hobby(Y_3, "chess")')
    folder = small_universe(tmp_path, question(text, ["Cleo"], *goals))
    queries = [hop.query for hop in find(folder, text).chain]
    assert queries == ["hobby chess", "parents Ann", "mother Bea"]


def test_a_way_that_gives_another_answer_is_no_chain(tmp_path):
    text = "Who is the grandmother of Ann?"
    wrong = question(text, ["Xen"], 'grandmother("Ann", Y_1)')
    unknown = question("Who is the rival of Ann?", ["Cleo"], 'rival("Ann", Y_1)')
    folder = small_universe(tmp_path, wrong, unknown)
    for split in phantom.build_phantom(folder)[1:]:
        assert all(q.chain == () for q in split if q.id in (text, unknown["id"]))


# Faults


@pytest.mark.parametrize("name", ["articles.json", "questions.json"])
def test_a_missing_file_is_named(tmp_path, name):
    shutil.copytree(UNIVERSE, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist.*--article-format json"):
        phantom.build_phantom(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("questions.json", "{", "is no JSON"),
        ("questions.json", "[]", "must hold a list of objects"),
        ("questions.json", '{"id": 1}', "must hold a list of objects"),
        ("questions.json", '[{"id": "1", "question": "?"}]', "entry 0 has no answer, solution_tra"),
        ("articles.json", '[{"title": "A", "article": "x"}]', "entry 0 has no facts"),
        ("articles.json", '[{"title": "A", "article": "x", "facts": ["h(1)"]}]', "is no fact"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, name, content, message):
    shutil.copytree(UNIVERSE, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        phantom.build_phantom(tmp_path)
    assert name in str(error.value)


def test_a_universe_that_cannot_be_split_is_refused(tmp_path):
    one = question("Who is the mother of Ann?", ["Bea"], 'mother("Ann", Y_1)')
    folder = write_universe(tmp_path, [person("Ann", mother="Bea")], [one])
    with pytest.raises(ValueError, match="generate more family trees"):
        phantom.build_phantom(folder)


# Demonstrations


def test_demonstrations_replay_through_the_task(universe):
    passages, train, _ = universe
    retriever = TantivyRetriever(passages)
    tokenizer = data.train_tokenizer(
        search_demonstrations.tokenizer_texts(passages, train), 600, tags=TagSet().texts
    )
    config = SearchConfig(topk=1)
    task = SearchTask(tokenizer, retriever, config)
    by_prompt = {f"{q.question}\n": q for q in train}
    options = {"one_hop_share": 0, "no_search_share": 0, "shuffle_values": 0, "count": 60}
    seen = set()
    for episode in search_demonstrations.demonstrations(
        train, retriever, passages, config=config, **options
    ):
        asked = by_prompt[episode[0][0]]
        seen.add(asked.id)
        info: dict[str, float] = {}
        for index in range(1, len(episode), 2):
            action = asyncio.run(task.step(episode[index][0], "stop", None))
            for name, value in action.info.items():
                info[name] = info.get(name, 0.0) + value
            if action.kind == "observe":
                assert episode[index + 1] == (action.observation, False)
        turns = [text for text, sampled in episode if sampled]
        assert task.reward(asked.to_prompt(), turns, info)[0] == 2.0
    assert seen == {q.id for q in train if q.chain}


def test_exchanged_people_agree_within_an_episode(universe):
    passages, train, _ = universe
    retriever = TantivyRetriever(passages)
    options = {"one_hop_share": 0, "no_search_share": 0, "shuffle_values": 1, "count": 60}
    config = SearchConfig(topk=1)
    for episode in search_demonstrations.demonstrations(
        train, retriever, passages, config=config, **options
    ):
        read = "".join(text for text, sampled in episode if not sampled)
        answer = episode[-1][0].removeprefix("<answer> ").removesuffix("</answer>")
        assert all(part in read for part in answer.split(" | "))
