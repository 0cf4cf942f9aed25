"""Questions about invented people: a universe that the generator of phantom-wiki wrote.

PhantomWiki (arXiv 2502.20377, MIT) invents families and friends, an article on each person, and
questions that need many articles. Nothing of it stands in any pretraining data. The package needs
Python 3.12 and SWI-Prolog, and only its files are read here: `articles.json` and `questions.json`.

    python -m phantom_wiki --num-family-trees 20 --max-family-tree-size 20 --question-depth 10 \
        --num-questions-per-type 60 --seed 1 --output-dir DIR --article-format json \
        --question-format json

Answers are lists. All of a list is asked for, as "A | B", in any order: `tasks.search.exact_match`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from copc_jax.factbook import LIST_SEPARATOR, Hop, Question
from copc_jax.tools.retriever import Passage

logger = logging.getLogger(__name__)

ARTICLES, QUESTIONS = "articles.json", "questions.json"

_SPLITS = 100  # That are tried, to find one with enough questions on both sides.

_FACT = re.compile(r'(\w+)\("([^"]*)", "([^"]*)"\)\.?')
_GOAL = re.compile(r'(\w+)\((?:"([^"]*)"|(\w+)), (?:"([^"]*)"|(\w+))\)')
_ATTRIBUTES = {"dob": "date of birth", "job": "occupation", "hobby": "hobby", "gender": "gender"}
_FAMILY = ("mother", "father", "son", "daughter", "sister", "brother", "husband", "wife")
# Relations that articles do not state, step by step in those that they do. What follows is what the
# generator's rules say; a question whose answer it does not give has no chain.
_PARENT, _CHILD = ("mother", "father"), ("son", "daughter")
_SIBLING, _SPOUSE = ("sister", "brother"), ("husband", "wife")
_STEPS: dict[str, tuple[tuple[str, ...], ...]] = {
    **{name: ((name,),) for name in (*_FAMILY, "friend", *_ATTRIBUTES)},
    "parent": (_PARENT,),
    "child": (_CHILD,),
    "sibling": (_SIBLING,),
    "married": (_SPOUSE,),
    "grandparent": (_PARENT, _PARENT),
    "grandmother": (_PARENT, ("mother",)),
    "grandfather": (_PARENT, ("father",)),
    "grandchild": (_CHILD, _CHILD),
    "granddaughter": (_CHILD, ("daughter",)),
    "grandson": (_CHILD, ("son",)),
    "great_grandparent": (_PARENT, _PARENT, _PARENT),
    "great_grandchild": (_CHILD, _CHILD, _CHILD),
    "aunt": (_PARENT, ("sister",)),
    "uncle": (_PARENT, ("brother",)),
    "niece": (_SIBLING, ("daughter",)),
    "nephew": (_SIBLING, ("son",)),
    "cousin": (_PARENT, _SIBLING, _CHILD),
    "mother_in_law": (_SPOUSE, ("mother",)),
    "father_in_law": (_SPOUSE, ("father",)),
    "sister_in_law": (_SPOUSE, ("sister",)),
    "brother_in_law": (_SPOUSE, ("brother",)),
    "daughter_in_law": (_CHILD, ("wife",)),
    "son_in_law": (_CHILD, ("husband",)),
}
_WORDS: dict[tuple[str, ...], str] = {
    _PARENT: "parents",
    _CHILD: "children",
    _SIBLING: "siblings",
    _SPOUSE: "spouse",
}


@dataclasses.dataclass(frozen=True)
class _Person:
    """One article.

    Attributes:
        passage: its text without headings.
        facts: values by relation, as the article states them.
    """

    passage: Passage
    facts: Mapping[str, tuple[str, ...]]


def build_phantom(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    held_out_share: float = 0.25,
    max_answers: int = 5,
    max_searches: int = 4,
) -> tuple[list[Passage], list[Question], list[Question]]:
    """Read a universe; the same files and arguments give the same result.

    Family trees are split, and a question belongs to a split when everybody whom its way touches
    does; the others, which friends lead from one tree into another, are dropped. Questions are told
    apart by the generator's difficulty, the number of articles on the way: the source is
    "difficulty-3". Those with a way of single searches have a chain, from which demonstrations are
    made; the others, such as counts, are only trained and evaluated on.

    Args:
        folder: what the generator wrote.
        seed: seed of the split.
        held_out_share: share of held-out questions, as near as whole family trees allow.
        max_answers: questions with longer lists of answers are dropped.
        max_searches: longest chain.

    Returns:
        Passages, training questions and held-out questions.

    Raises:
        FileNotFoundError: the folder does not hold both files.
        ValueError: a file of another form, or a universe too small to split; names it.
    """
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share must lie between 0 and 1, not {held_out_share}")
    people = {person.passage.title: person for person in _read_people(folder / ARTICLES)}
    rows = _read(folder / QUESTIONS, ("id", "question", "answer", "solution_traces", "prolog"))
    questions: list[Question] = []
    long = told = 0
    for row in rows:
        if len(row["answer"]) > max_answers or not row["answer"]:
            long += 1
        elif any(
            re.search(rf"(?<!\w){re.escape(a)}(?!\w)", row["question"]) for a in row["answer"]
        ):
            told += 1
        else:
            questions.append(_question(row, people, max_searches))
    train, evaluation = _split(questions, _family_trees(people), held_out_share, seed)
    logger.info(
        "phantom: of %d questions, left out %d with more than %d answers, %d that hold an answer,"
        " %d across the split",
        *(len(rows), long, max_answers, told, len(questions) - len(train) - len(evaluation)),
    )
    if not train or not evaluation:
        raise ValueError(
            f"{folder}: {len(questions)} questions on {len(people)} people cannot be split into"
            " training and held-out ones: generate more family trees and more questions a type"
        )
    return [person.passage for person in people.values()], train, evaluation


def _read(file: pathlib.Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist: search.phantom_dir must be a folder that phantom-wiki wrote"
            " with --article-format json --question-format json"
        )
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} must hold a list of objects, as phantom-wiki writes it")
    for number, row in enumerate(rows):
        missing = [key for key in keys if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"{file}: entry {number} has no {', '.join(missing)}")
    return rows


def _read_people(file: pathlib.Path) -> list[_Person]:
    people = []
    for row in _read(file, ("title", "article", "facts")):
        # Headings say nothing that the sentences do not.
        lines = [line for line in row["article"].splitlines() if line and line[0] != "#"]
        facts: dict[str, tuple[str, ...]] = {}
        for text in row["facts"]:
            match = _FACT.fullmatch(text)
            if match is None:
                raise ValueError(f"{file}: {text!r} in the facts on {row['title']!r} is no fact")
            facts[match[1]] = (*facts.get(match[1], ()), match[3])
        passage = Passage(f"phantom/{row['title']}", row["title"], " ".join(lines))
        people.append(_Person(passage, facts))
    return people


def _family_trees(people: Mapping[str, _Person]) -> list[set[str]]:
    """Return the sets of people whom family relations connect."""
    trees: list[set[str]] = []
    left = dict.fromkeys(people)
    while left:
        tree, waiting = set(), [next(iter(left))]
        while waiting:
            name = waiting.pop()
            if name in tree or name not in people:
                continue
            tree.add(name)
            del left[name]
            facts = people[name].facts
            waiting += [value for relation in _FAMILY for value in facts.get(relation, ())]
        # Family relations go both ways, so a tree is complete whoever it began with.
        trees.append(tree)
    return trees


def _split(
    questions: Sequence[Question], trees: Sequence[set[str]], share: float, seed: int
) -> tuple[list[Question], list[Question]]:
    """Return training and held-out questions, or two empty lists where no split has both."""
    rng = random.Random(seed)
    best: tuple[list[Question], list[Question]] = [], []
    distance = math.inf
    for _ in range(_SPLITS):
        order = rng.sample(trees, len(trees))
        held_out = set().union(*order[: rng.randint(1, max(1, len(trees) // 2))])
        train = [q for q in questions if held_out.isdisjoint(q.subjects)]
        evaluation = [q for q in questions if held_out.issuperset(q.subjects)]
        # Questions across the split are lost, so fewer of them is better too.
        lost = 1 - (len(train) + len(evaluation)) / max(len(questions), 1)
        away = abs(len(evaluation) / max(len(train) + len(evaluation), 1) - share) + lost
        if evaluation and any(q.chain for q in train) and away < distance:
            best, distance = (train, evaluation), away
    return best


def _question(row: Mapping[str, Any], people: Mapping[str, _Person], most: int) -> Question:
    answers = [str(answer) for answer in row["answer"]]
    chain = _chain(row, answers, people, most)
    text = row["question"]
    template = text.replace(chain[0].entity, "{}", 1) if chain else text
    traces: Iterable[Mapping[str, Any]] = json.loads(row["solution_traces"])
    mentioned = re.findall(r'"([^"]*)"', " ".join(row["prolog"]["query"]))
    bound = [str(value) for trace in traces for value in trace.values()]
    mentioned += [*bound, *answers, *(hop.passage_id.partition("/")[2] for hop in chain)]
    subjects = tuple(name for name in dict.fromkeys(mentioned) if name in people)
    golds = (LIST_SEPARATOR.join(sorted(answers)),)
    return Question(
        str(row["id"]), template, golds, chain, subjects, f"difficulty-{row.get('difficulty', 0)}"
    )


def _chain(
    row: Mapping[str, Any], answers: Sequence[str], people: Mapping[str, _Person], most: int
) -> tuple[Hop, ...]:
    """Return one search a hop that together give all answers, or () where that takes more.

    The goals of the Prolog query are followed from the last, which names somebody, to the first.
    """
    hops: list[Hop] = []
    reached: list[str] = []
    for goal in reversed(row["prolog"]["query"]):
        match = _GOAL.fullmatch(goal)
        if match is None or match[1] not in _STEPS:
            return ()
        relation, person, _, value, _ = match.groups()
        if value is not None:
            # "the person whose hobby is chess": a search for the value finds the person.
            holders = [n for n in people if value in people[n].facts.get(relation, ())]
            if len(holders) != 1 or relation not in _ATTRIBUTES:
                return ()
            words, passage = _ATTRIBUTES[relation], people[holders[0]].passage
            hops.append(Hop(words, value, passage.id, holders[0], backward=True))
            reached = holders
            continue
        if person is not None:
            reached = [person]
        for names in _STEPS[relation]:
            words = _WORDS.get(names) or _ATTRIBUTES.get(names[0]) or names[0].replace("_", " ")
            found: list[str] = []
            for name in reached:
                if name not in people:
                    return ()
                values = [v for n in names for v in people[name].facts.get(n, ())]
                if not values:
                    return ()
                answer = LIST_SEPARATOR.join(values)
                hops.append(Hop(words, name, people[name].passage.id, answer))
                found += values
            reached = list(dict.fromkeys(found))
            if len(hops) > most:
                return ()
    if set(reached) != set(answers) or row["question"].count(hops[0].entity) != 1:
        return ()
    return tuple(hops)
