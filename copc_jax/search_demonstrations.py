"""Demonstrations of how to look answers up, for a warm start, and the texts of their tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from copc_jax.data import Segment
from copc_jax.factbook import (
    LIST_SEPARATOR,
    RELATIONS,
    Hop,
    Kind,
    Question,
    read_fact,
    state_fact,
)
from copc_jax.tasks import search
from copc_jax.tools.retriever import Passage, Retriever

logger = logging.getLogger(__name__)


def demonstrations(
    questions: Sequence[Question],
    retriever: Retriever,
    passages: Sequence[Passage],
    *,
    config: search.SearchConfig = search.SHORT_FORMAT,
    seed: int = 0,
    count: int | None = None,
    one_hop_share: float = 0.6,
    no_search_share: float = 0.1,
    shuffle_values: float = 0.8,
) -> Iterator[list[Segment]]:
    """Yield episodes for supervised training, in the very text of `SearchTask`.

    An episode is the prompt, then turns and observations in alternation; turns are marked True. The
    mix leaves room for RL: most episodes of several hops stop too early and answer, wrongly, with
    what they read last.

    Args:
        questions: training questions; those without a chain are left out.
        retriever: answers each query of the chains once; a question whose passage it misses is left
            out.
        passages: corpus, whose names and words stand in when values are exchanged.
        config: format of the episodes.
        seed: seed of all choices.
        count: number of episodes; None never ends.
        one_hop_share: share of the episodes of several hops that stop before their last one.
        no_search_share: share of the episodes that guess at once.
        shuffle_values: share of the episodes in which every name and value is exchanged for
            another, in question, queries, passages and answer alike. They state no true fact: only
            reading can answer them. In longer texts the names and values of the chain are.
    """
    for name, share in (
        ("one_hop_share", one_hop_share),
        ("no_search_share", no_search_share),
        ("shuffle_values", shuffle_values),
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {share}")
    found = _retrieve(questions, retriever, config.topk)
    usable = [
        question
        for question in questions
        if question.chain
        and all(any(p.id == hop.passage_id for p, *_ in found[hop.query]) for hop in question.chain)
    ]
    if not usable:
        raise ValueError("the retriever finds the passages of none of the questions")
    if len(usable) < len(questions):
        missed = len(questions) - len(usable)
        logger.info("no demonstrations of %d of %d questions: not found", missed, len(questions))
    pools = _ValuePools(passages)
    rng = random.Random(seed)
    made = 0
    while count is None or made < count:
        question = rng.choice(usable)
        exchange = _Exchange(pools, rng) if rng.random() < shuffle_values else _keep
        if isinstance(exchange, _Exchange):
            for hop in question.chain:
                # What a text only implies, as "Swiss" does Switzerland, cannot be another name.
                if hop.evidence:
                    exchange.keep(hop.answer)
        yield _demonstrate(
            question, found, config, exchange, pools, rng, one_hop_share, no_search_share
        )
        made += 1


# Passage, and the relation and value that it states ("" for other text).
_Found = tuple[Passage, str, str]
_NO_FACT: tuple[str, str] = ("", "")
_Swap = Callable[[str, Kind], str]


def _keep(text: str, kind: Kind) -> str:
    return text


def _retrieve(
    questions: Sequence[Question], retriever: Retriever, topk: int
) -> dict[str, list[_Found]]:
    queries = list(dict.fromkeys(hop.query for question in questions for hop in question.chain))

    async def ask() -> list[list[Passage]]:
        results: list[list[Passage]] = []
        try:
            for start in range(0, len(queries), 256):
                results += await retriever.search(queries[start : start + 256], topk)
        finally:
            # Connections belong to this event loop and would be of no use in the next one.
            await retriever.close()
        return results

    answers = asyncio.run(ask())
    return {
        query: [(passage, *(read_fact(passage) or _NO_FACT)) for passage in hits]
        for query, hits in zip(queries, answers, strict=True)
    }


def _demonstrate(
    question: Question,
    found: Mapping[str, Sequence[_Found]],
    config: search.SearchConfig,
    swap: _Swap,
    pools: _ValuePools,
    rng: random.Random,
    one_hop_share: float,
    no_search_share: float,
) -> list[Segment]:
    first = question.chain[0]
    entity = swap(first.entity, _entity_kind(first))
    segments = [(search.render_prompt(config, question.template.format(entity)), False)]
    last = question.chain[-1]
    if rng.random() < no_search_share:
        guess = pools.draw(_answer_kind(last), rng)
        return [*segments, (search.render_action(config, "answer", guess), True)]
    chain = question.chain
    if len(chain) > 1 and rng.random() < one_hop_share:
        chain = chain[: 1 if len(chain) == 2 else rng.randint(1, len(chain) - 1)]
    answer = ""
    for hop in chain:
        query = f"{hop.relation} {swap(hop.entity, _entity_kind(hop))}"
        segments.append((search.render_action(config, "search", query), True))
        if any(not relation for _, relation, _ in found[hop.query]):
            # Only names that are known can be exchanged within a text.
            for part in hop.answers:
                swap(part, _answer_kind(hop))
        passages = [_exchanged(*item, swap) for item in found[hop.query]]
        segments.append((search.render_documents(config, passages), False))
        # The last of several searches may hold only a part of the answer.
        parts = question.answers if hop is last else hop.answers
        answer = LIST_SEPARATOR.join(swap(part, _answer_kind(hop)) for part in parts)
    segments.append((search.render_action(config, "answer", answer), True))
    return segments


def _entity_kind(hop: Hop) -> Kind:
    return _kind(hop.relation) if hop.backward else "country"


def _answer_kind(hop: Hop) -> Kind:
    return "country" if hop.backward else _kind(hop.relation)


def _kind(relation: str) -> Kind:
    # Corpora have relations of their own.
    return RELATIONS[relation].kind if relation in RELATIONS else "name"


def _exchanged(passage: Passage, relation: str, value: str, swap: _Swap) -> Passage:
    if not isinstance(swap, _Exchange):
        return passage
    if not relation:
        return dataclasses.replace(
            passage, title=swap.within(passage.title), text=swap.within(passage.text)
        )
    subject = swap(passage.title, "country")
    text = state_fact(relation, subject, swap(value, RELATIONS[relation].kind))
    return Passage(passage.id, subject, text)


class _ValuePools:
    """Names, values and words of a corpus, from which substitutes are drawn by kind."""

    def __init__(self, passages: Sequence[Passage]):
        pools: dict[Kind, dict[str, None]] = {
            kind: {} for kind in ("country", "name", "code", "year")
        }
        for passage in passages:
            fact = read_fact(passage)
            pools["country"][passage.title] = None
            if fact is not None:
                pools[RELATIONS[fact[0]].kind][fact[1]] = None
        self._values = {kind: list(values) for kind, values in pools.items()}
        words = {
            word: None
            for kind in ("country", "name")
            for value in pools[kind]
            for word in value.split()
        }
        self._words = list(words)

    def draw(self, kind: Kind, rng: random.Random) -> str:
        """Return a value of the kind or, half of the time for names, some words of the corpus.

        New names keep the episodes from being a closed list, and give every word its turn.
        """
        values = self._values[kind]
        if not values or (kind in ("country", "name") and rng.random() < 0.5):
            length = rng.choices((1, 2, 3), weights=(5, 4, 1))[0]
            return " ".join(rng.choice(self._words) for _ in range(length))
        return rng.choice(values)


class _Exchange:
    """A mapping of names and values to substitutes, the same throughout one episode."""

    def __init__(self, pools: _ValuePools, rng: random.Random):
        self._pools = pools
        self._rng = rng
        self._substitutes: dict[str, str] = {}

    def __call__(self, text: str, kind: Kind) -> str:
        if text not in self._substitutes:
            taken = self._substitutes.values()
            substitute = self._pools.draw(kind, self._rng)
            while substitute in taken:
                substitute = self._pools.draw(kind, self._rng)
            self._substitutes[text] = substitute
        return self._substitutes[text]

    def keep(self, text: str) -> None:
        """Exchange a name for itself."""
        self._substitutes[text] = text

    def within(self, text: str) -> str:
        """Exchange the names that were exchanged so far wherever they stand in a text."""
        names = "|".join(re.escape(name) for name in sorted(self._substitutes, key=len)[::-1])
        return re.sub(rf"(?<!\w)({names})(?!\w)", lambda m: self._substitutes[m[0]], text)


def tokenizer_texts(
    passages: Iterable[Passage],
    questions: Iterable[Question],
    config: search.SearchConfig = search.SHORT_FORMAT,
) -> Iterator[str]:
    """Yield the texts that a tokenizer for the task is trained on."""
    for passage in passages:
        yield search.render_documents(config, [passage])
    for question in questions:
        yield search.render_prompt(config, question.question)
        for hop in question.chain:
            yield search.render_action(config, "search", hop.query)
        yield search.render_action(config, "answer", question.golds[0])
