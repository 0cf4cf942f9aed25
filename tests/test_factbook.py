"""Facts, questions, demonstrations, and the tokenizer that is trained on them."""

import asyncio
import itertools
import logging
import sqlite3
import statistics

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from copc_jax import data, search_demonstrations
from copc_jax import factbook as book
from copc_jax.tasks.search import (
    CHAIN_OF_AGENTS_TAGS,
    SearchConfig,
    SearchTask,
    TagSet,
    normalize_answer,
    parse_action,
    render_prompt,
)
from copc_jax.tools.retriever import Passage, TantivyRetriever, read_corpus
from copc_jax.tools.retriever import main as retriever_main


@pytest.fixture(scope="module")
def facts():
    return {(fact.subject, fact.relation): fact for fact in book.country_facts()}


@pytest.fixture(scope="module")
def factbook():
    return book.build_factbook(elements=False)


@pytest.fixture(scope="module")
def retriever(factbook):
    return TantivyRetriever(factbook[0])


@pytest.fixture(scope="module")
def tokenizer(factbook):
    passages, train, _ = factbook
    return data.train_tokenizer(
        search_demonstrations.tokenizer_texts(passages, train), 2048, tags=TagSet().texts
    )


# Facts


@pytest.mark.parametrize(
    ("subject", "relation", "value"),
    [
        ("Switzerland", "capital", "Bern"),
        ("Switzerland", "largest city", "Zurich"),
        ("Switzerland", "highest point", "Dufourspitze on Monte Rosa"),
        ("Switzerland", "internet code", ".ch"),
        ("Switzerland", "currency", "Swiss francs"),
        ("Switzerland", "aircraft prefix", "HB"),
        ("Switzerland", "main export", "gold"),
        ("Switzerland", "export partner", "Germany"),
        ("Switzerland", "border neighbor", "Italy"),
        ("France", "internet code", ".fr"),
        ("France", "anthem", "La Marseillaise"),
        ("Brazil", "capital", "Brasilia"),  # HTML entities and accents.
        ("Brazil", "largest city", "Sao Paulo"),
        ("Fiji", "capital", "Suva"),  # A remark in brackets.
        ("Chile", "capital", "Santiago"),  # A note after a semicolon.
        ("United States", "capital", "Washington D.C."),
        ("United States", "highest point", "Mount McKinley"),
        ("Russia", "lowest point", "Caspian Sea"),
        ("Morocco", "border neighbor", "Algeria"),
        ("Central African Republic", "border neighbor", "DR Congo"),  # Commas for semicolons.
        ("Algeria", "independence year", "1962"),
        ("Kuwait", "official language", "Arabic"),
        ("South Korea", "export partner", "China"),
        ("Guinea-Bissau", "export partner", "India"),
    ],
)
def test_facts_are_read_as_the_factbook_states_them(facts, subject, relation, value):
    assert facts[subject, relation].value == value


@pytest.mark.parametrize(
    ("subject", "relation"),
    [
        ("South Africa", "capital"),  # Three capitals.
        ("Bolivia", "capital"),
        ("Benin", "capital"),
        ("Nauru", "capital"),  # "no official capital".
        ("Burundi", "capital"),
        ("Switzerland", "official language"),  # Four.
        ("Switzerland", "anthem"),  # Four titles.
        ("Australia", "anthem"),  # The royal one, beside the national one.
        ("Saint Helena", "highest point"),  # One for each of its islands.
        ("Senegal", "highest point"),  # Unnamed.
        ("Congo Republic", "nationality"),  # "Congolese or Congo".
    ],
)
def test_facts_without_one_clear_value_are_left_out(facts, subject, relation):
    assert (subject, relation) not in facts


def test_values_are_short_plain_text(facts):
    for fact in facts.values():
        assert fact.value.isascii() and fact.value == fact.value.strip()
        assert 1 <= len(fact.value.split()) <= 4
        assert not set(fact.value) & set('<>{}"()&;'), fact
        if fact.relation in ("highest point", "lowest point", "largest city"):
            # No height or population is left on a name.
            assert not any(c.isdigit() for c in fact.value) or fact.value == "K2", fact


def test_aliases_are_other_wordings(facts):
    assert {"Swiss franc", "CHF"} <= set(facts["Switzerland", "currency"].aliases)
    assert "Brasília" in facts["Brazil", "capital"].aliases
    assert "usa" in facts["Mexico", "export partner"].aliases
    assert "The Song of Marseille" in facts["France", "anthem"].aliases


def test_facts_are_read_back_from_their_passages(facts):
    for fact in facts.values():
        assert book.read_fact(fact.passage) == (fact.relation, fact.value)
    assert book.read_fact(Passage("x", "Bern", "Bern lies on the Aare.")) is None


# Questions


def test_the_build_is_deterministic_and_seeded(factbook):
    assert book.build_factbook(elements=False) == factbook
    other = book.build_factbook(seed=1, elements=False)
    assert other[0] == factbook[0]
    assert other[1] != factbook[1]


def test_there_are_enough_questions_and_half_need_two_hops(factbook):
    passages, train, held_out = factbook
    questions = train + held_out
    assert len(passages) == len({p.id for p in passages}) > 3000
    assert len({q.question for q in questions}) == len(questions) > 3000
    assert len({q.id for q in questions}) == len(questions)
    for split in (train, held_out):
        assert sum(q.hops == 2 for q in split) >= len(split) / 2
        assert {q.hops for q in split} == {1, 2}
    assert len(held_out) > 1000


def test_no_chain_is_shared_between_the_splits(factbook):
    _, train, held_out = factbook
    touched = [{s for q in split for s in q.subjects} for split in (train, held_out)]
    assert not touched[0] & touched[1]
    assert len(touched[1]) > 40
    # `subjects` leaves nothing out: neither passages nor countries that are answers.
    for question in train + held_out:
        for hop in question.chain:
            assert hop.passage_id.split("/")[0] in question.subjects
            if book.RELATIONS[hop.relation].kind == "country":
                assert hop.answer in question.subjects


def test_every_chain_leads_through_its_passages_to_the_answer(factbook):
    passages, train, held_out = factbook
    texts = {p.id: p.text for p in passages}
    for question in train + held_out:
        assert question.golds[0] == question.chain[-1].answer
        assert question.chain[0].entity in question.question
        for hop in question.chain:
            assert hop.answer in texts[hop.passage_id]
            assert hop.entity in texts[hop.passage_id]
        for before, after in itertools.pairwise(question.chain):
            assert after.entity == before.answer


def test_no_question_gives_an_answer_of_its_chain_away(factbook):
    for question in factbook[1] + factbook[2]:
        words = f" {normalize_answer(question.question)} "
        for answer in (*question.golds, *(hop.answer for hop in question.chain)):
            assert f" {normalize_answer(answer)} " not in words, question


def test_descriptions_name_one_subject(factbook):
    passages, train, held_out = factbook
    stated = {(p.id.split("/")[1], normalize_answer(book.read_fact(p)[1])): [] for p in passages}
    for p in passages:
        stated[p.id.split("/")[1], normalize_answer(book.read_fact(p)[1])].append(p.title)
    described = [
        hop
        for question in train + held_out
        for hop in question.chain
        if hop.passage_id != f"{hop.entity}/{hop.relation}"
    ]
    assert described
    for hop in described:
        assert stated[hop.relation, normalize_answer(hop.entity)] == [hop.answer]


def test_guessing_the_commonest_answer_pays_little(factbook):
    _, train, held_out = factbook
    for split in (train, held_out):
        for relation in book.RELATIONS:
            golds = [q.golds[0] for q in split if q.chain[-1].relation == relation]
            answers = [gold for gold in golds if golds.count(gold) > 40]
            assert len(answers) < 0.25 * max(len(split) / 4, 1)


def test_retrieval_finds_the_passages_of_the_chains(factbook, retriever):
    for split in factbook[1:]:
        hops = {hop for question in split for hop in question.chain}
        for topk, least in ((1, 0.97), (2, 0.99)):
            found = [
                hop.passage_id in {p.id for p in retriever.lookup(hop.query, topk)} for hop in hops
            ]
            assert statistics.mean(found) >= least


def test_the_raw_two_hop_question_does_not_find_its_answer(factbook, retriever):
    two_hop = [q for q in factbook[2] if q.hops == 2]
    found = [
        q.chain[-1].passage_id in {p.id for p in retriever.lookup(q.question, 2)} for q in two_hop
    ]
    assert statistics.mean(found) < 0.2


def test_a_share_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match="held_out_share"):
        book.build_factbook(held_out_share=1.0)


@pytest.fixture
def elements_database(tmp_path, monkeypatch):
    package = tmp_path / "mendeleev"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    rows = [
        ("Chromium", "Cr", "Louis Vauquelin", 1797, "France"),
        ("Neon", "Ne", "Sir William Ramsey, M.W. Travers", 1898, "England"),
        ("Helium", "He", "Sir William Ramsey, Nils Langet, P.T.Cleve", 1895, "Scotland/Sweden"),
        ("Iron", "Fe", "Known to the ancients.", None, None),
        *((f"Francium{i}", f"F{i}", "", None, "France") for i in range(8)),
    ]
    with sqlite3.connect(package / "elements.db") as database:
        database.execute(
            "CREATE TABLE elements (atomic_number INTEGER PRIMARY KEY, name, symbol, discoverers,"
            " discovery_year, discovery_location)"
        )
        database.executemany(
            "INSERT INTO elements (name, symbol, discoverers, discovery_year, discovery_location)"
            " VALUES (?, ?, ?, ?, ?)",
            rows,
        )
    database.close()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_elements_are_read_without_importing_the_package(elements_database, factbook):
    facts = {(f.subject, f.relation): f.value for f in book.element_facts(["France"])}
    assert {key: value for key, value in facts.items() if not key[0].startswith("Francium")} == {
        ("Chromium", "chemical symbol"): "Cr",
        ("Chromium", "discoverer"): "Louis Vauquelin",
        ("Chromium", "discovery year"): "1797",
        ("Chromium", "discovery country"): "France",
        ("Neon", "chemical symbol"): "Ne",
        ("Neon", "discovery year"): "1898",
        ("Helium", "chemical symbol"): "He",
        ("Helium", "discovery year"): "1895",
        ("Iron", "chemical symbol"): "Fe",
    }
    _, train, held_out = book.build_factbook()
    bridged = [q for q in train + held_out if "discovery country" in q.question]
    assert any(q.hops == 2 and q.chain[1].entity == "France" for q in bridged)
    # What is asked about the facts of one country does not depend on the elements.
    assert {q for q in held_out if q.hops == 2} >= {q for q in factbook[2] if q.hops == 2}


def test_missing_elements_are_said(monkeypatch, caplog, tmp_path):
    (tmp_path / "mendeleev.py").write_text("")  # A package without the database.
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.INFO, logger="copc_jax.factbook"):
        assert book.element_facts([]) == []
    assert "mendeleev" in caplog.text


def test_the_corpus_can_be_written_for_a_retrieval_server(tmp_path, factbook):
    path = tmp_path / "corpus.jsonl"
    assert retriever_main(["factbook", "--out", str(path)]) == 0
    assert read_corpus(path)[: len(factbook[0])] == factbook[0]


# Demonstrations


def demonstrate(factbook, retriever, **options):
    passages, train, _ = factbook
    options = {"count": 300, "seed": 3} | options
    return list(search_demonstrations.demonstrations(train, retriever, passages, **options))


def replay(task, question, segments):
    """Play a demonstration's turns through the task and check its observations."""
    info, turns = {}, []
    for index in range(1, len(segments), 2):
        text, is_action = segments[index]
        assert is_action and parse_action(text, task.config.tags) is not None
        turns.append(text)
        action = asyncio.run(task.step(text, "stop", None))
        for name, value in action.info.items():
            info[name] = info.get(name, 0.0) + value
        if index + 1 < len(segments):
            assert segments[index + 1] == (action.observation, False)
    assert action.kind == "end"
    return task.reward(question.to_prompt(), turns, info)


CONFIGS = (SearchConfig(), SearchConfig.search_r1(CHAIN_OF_AGENTS_TAGS))


@pytest.mark.parametrize("config", CONFIGS, ids=["short", "long"])
def test_a_full_demonstration_replays_through_the_task(factbook, retriever, tokenizer, config):
    options = {"one_hop_share": 0, "no_search_share": 0, "shuffle_values": 0}
    segments = demonstrate(factbook, retriever, config=config, count=100, **options)
    task = SearchTask(tokenizer, retriever, config)
    by_prompt = {render_prompt(config, q.question): q for q in factbook[1]}
    hops = []
    for episode in segments:
        assert episode[0][1] is False
        question = by_prompt[episode[0][0]]
        assert task.encode_prompt(question.to_prompt()) == tokenizer.encode(episode[0][0]).ids
        reward, figures = replay(task, question, episode)
        assert (reward, figures["em"]) == (2.0, 1.0)
        assert figures["searches"] == question.hops == figures["hops"]
        hops.append(question.hops)
    assert set(hops) == {1, 2}


def searches(episode):
    return sum(text.startswith("<search>") for text, is_action in episode if is_action)


def test_the_mix_leaves_room_to_learn(factbook, retriever):
    passages, train, _ = factbook
    two_hop = [q for q in train if q.hops == 2]
    options = {"count": 1000, "one_hop_share": 0.7, "no_search_share": 0.2}
    episodes = list(search_demonstrations.demonstrations(two_hop, retriever, passages, **options))
    counts = [searches(episode) / 1000 for episode in episodes]
    shares = {n: sum(c == n / 1000 for c in counts) / 1000 for n in (0, 1, 2)}
    assert shares[0] == pytest.approx(0.2, abs=0.05)
    assert shares[1] == pytest.approx(0.8 * 0.7, abs=0.05)
    assert shares[2] == pytest.approx(0.8 * 0.3, abs=0.05)


def test_a_demonstration_that_stops_early_answers_wrongly(factbook, retriever, tokenizer):
    passages, train, _ = factbook
    options = {"count": 50, "one_hop_share": 1, "no_search_share": 0, "shuffle_values": 0}
    two_hop = [q for q in train if q.hops == 2]
    task = SearchTask(tokenizer, retriever)
    by_text = {f"{q.question}\n": q for q in two_hop}
    for episode in search_demonstrations.demonstrations(two_hop, retriever, passages, **options):
        question = by_text[episode[0][0]]
        reward, figures = replay(task, question, episode)
        assert (reward, figures["em"], figures["searches"]) == (0.0, 0.0, 1.0)
        assert episode[-1][0] == f"<answer> {question.chain[0].answer}</answer>"


def test_exchanged_values_agree_within_an_episode(factbook, retriever):
    episodes = demonstrate(
        factbook, retriever, one_hop_share=0, no_search_share=0, shuffle_values=1
    )
    questions = {f"{q.question}\n" for q in factbook[1]}
    assert statistics.mean(e[0][0] in questions for e in episodes) < 0.1
    for episode in episodes:
        _, answer = parse_action(episode[-1][0])
        read = episode[-2][0]
        assert f" {answer}" in read
        for index in range(1, len(episode) - 1, 2):
            # Every word of a query stands in what was read before it, so that it can be copied.
            _, query = parse_action(episode[index][0])
            before = "".join(text for text, _ in episode[:index])
            assert all(word in before for word in query.split())
            assert any(
                all(word in sentence for word in query.split())
                for sentence in episode[index + 1][0].split("The ")
            )


def test_demonstrations_depend_on_the_seed_only(factbook, retriever):
    first, second = (demonstrate(factbook, retriever, count=50) for _ in range(2))
    assert first == second
    assert demonstrate(factbook, retriever, count=50, seed=4) != first


def test_episodes_are_short(factbook, retriever, tokenizer):
    episodes = demonstrate(
        factbook, retriever, count=1000, one_hop_share=0, no_search_share=0, shuffle_values=0
    )
    lengths = [[len(tokenizer.encode(text).ids) for text, _ in episode] for episode in episodes]
    prompts, queries = [n[0] for n in lengths], [n[1] for n in lengths]
    observations, answers = [n[2] for n in lengths], [n[-1] for n in lengths]
    totals = [sum(n) for n in lengths if len(n) == 6]
    assert statistics.mean(totals) < 90 and max(totals) <= 160
    assert statistics.mean(prompts) < 18 and max(prompts) <= 45
    assert statistics.mean(queries) < 9
    assert statistics.mean(observations) < 28 and max(observations) <= 64
    assert statistics.mean(answers) < 8


@pytest.mark.parametrize("name", ["one_hop_share", "no_search_share", "shuffle_values"])
def test_shares_are_checked(factbook, retriever, name):
    with pytest.raises(ValueError, match=name):
        demonstrate(factbook, retriever, **{name: 1.5})


def test_questions_whose_passage_is_not_found_are_left_out(factbook, caplog):
    passages, train, _ = factbook
    wanted = {hop.passage_id for hop in train[0].chain}
    few = TantivyRetriever([p for p in passages if p.id in wanted])
    with caplog.at_level(logging.INFO, logger="copc_jax.search_demonstrations"):
        episodes = list(
            search_demonstrations.demonstrations(
                train[:20], few, passages, count=20, shuffle_values=0
            )
        )
    assert {e[0][0] for e in episodes} == {f"{train[0].question}\n"}
    assert "19 of 20 questions" in caplog.text
    with pytest.raises(ValueError, match="none of the questions"):
        next(
            search_demonstrations.demonstrations(
                train[:1], TantivyRetriever([passages[-1]]), passages
            )
        )


# Tokenizer


def test_special_tokens_and_tags_have_one_id(tokenizer):
    assert tokenizer.get_vocab_size() == 2048
    assert (tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("<|end|>")) == (0, 1)
    for tag in TagSet().texts:
        ids = tokenizer.encode(tag).ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


@given(st.text(max_size=80))
def test_any_text_comes_back_unchanged(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_segments_have_the_same_tokens_alone_and_inside(factbook, retriever, tokenizer):
    for episode in demonstrate(factbook, retriever):
        alone = [i for text, _ in episode for i in tokenizer.encode(text).ids]
        assert alone == tokenizer.encode("".join(text for text, _ in episode)).ids


def test_copied_names_keep_their_tokens(factbook, tokenizer):
    # What a small model has to copy is the same ids in the question, the passage and the answer.
    for passage in factbook[0][::50]:
        _, value = book.read_fact(passage)
        name = tokenizer.encode(f" {value}").ids
        turn = tokenizer.encode(f"<answer> {value}</answer>").ids
        assert turn[1:-1] == name
        text = tokenizer.encode(passage.text).ids
        assert name == text[len(text) - 1 - len(name) : -1] or value.endswith(".")


def test_training_is_deterministic_and_loads(factbook, tokenizer):
    passages, train, _ = factbook
    again = data.train_tokenizer(
        search_demonstrations.tokenizer_texts(passages, train), 2048, tags=TagSet().texts
    )
    assert again.to_str() == tokenizer.to_str()
    loaded = tokenizers.Tokenizer.from_str(again.to_str())
    text = "<search> capital Bern</search>\n.ch"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


def test_questions_become_prompts(factbook):
    question = factbook[1][0]
    prompt = question.to_prompt()
    assert prompt.messages[0]["content"] == question.question
    assert (prompt.gold, prompt.source) == (question.golds, f"{question.hops}-hop")
