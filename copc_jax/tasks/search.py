"""The search task: how a question is asked, what a turn does, and what an episode earns.

A turn acts by the first `<search>query</search>` or `<answer>text</answer>` in it. A search is
answered with passages inside `<information>`; an answer ends the episode. Tags and templates are
configuration, and stop strings, parser, reward and demonstrations all read the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from copc_jax.rollout.episode import (
    Action,
    ApplyChatTemplate,
    EpisodeFailed,
    disarm,
    encode_question,
    special_tokens,
)
from copc_jax.tools.retriever import Passage, QueryRefused, Retriever, RetrieverError
from copc_jax.types import Prompt

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LEVEL = re.compile(r"(\d+)-hop|difficulty-(\d+)")
_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class TagSet:
    """Names of the tags that carry actions and observations; the default is Search-R1's."""

    search: str = "search"
    """Tag of a query that the policy writes."""
    information: str = "information"
    """Tag around the passages that a search returns."""
    answer: str = "answer"
    """Tag of the final answer; it ends the episode."""
    think: str = "think"
    """Tag of free reasoning, named in the instructions only."""

    def __post_init__(self) -> None:
        names = dataclasses.astuple(self)
        for name in names:
            if not _TAG_NAME.fullmatch(name):
                raise ValueError(f"tag name {name!r}: letters, digits, - and _ only, letter first")
        if len(set(names)) != len(names):
            raise ValueError(f"tag names must differ: {names}")

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a turn."""
        return (f"</{self.search}>", f"</{self.answer}>")

    @property
    def texts(self) -> tuple[str, ...]:
        """Opening and closing tags of search, information and answer."""
        names = (self.search, self.information, self.answer)
        return tuple(text for name in names for text in (f"<{name}>", f"</{name}>"))


SEARCH_R1_TAGS = TagSet()
CHAIN_OF_AGENTS_TAGS = TagSet(search="wiki_search", information="observation")
TAG_SETS: dict[str, TagSet] = {
    "search-r1": SEARCH_R1_TAGS,
    "chain-of-agents": CHAIN_OF_AGENTS_TAGS,
}


def read_tags(text: str) -> TagSet:
    """Return a tag set by its name in `TAG_SETS`, or from four names "search,information,...".

    Args:
        text: "search-r1", "chain-of-agents", or the names of the tags of search, information,
            answer and think, separated by commas.

    Raises:
        ValueError: neither of them; lists what is known.
    """
    if text in TAG_SETS:
        return TAG_SETS[text]
    names = [name.strip() for name in text.split(",")]
    if len(names) != len(dataclasses.fields(TagSet)):
        raise ValueError(
            f"tags {text!r}: must be {' or '.join(TAG_SETS)}, or four names for search,"
            " information, answer and think, such as find,result,reply,think"
        )
    return TagSet(*names)


ANSWER_SEPARATOR = "|"
"""Between the parts of an answer that is a list, as Chain-of-Agents writes it."""

INSTRUCTIONS = (
    "Answer the question below. Think inside <{think}> and </{think}> whenever you learn something"
    " new. To look something up, write <{search}> your query </{search}>: what is found comes back"
    " between <{information}> and </{information}>. You may look things up as often as you need."
    " When you know the answer, write only the answer itself inside <{answer}> and </{answer}>;"
    " if the answer is several things, give all of them with | in between.\n"
    "Question: {question}\n"
)
"""Prompt for a pretrained model that has to be told the rules."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Format and reward of the search task.

    The default format is short, because a small model on a laptop pays for every token.
    """

    tags: TagSet = SEARCH_R1_TAGS
    """Tags of actions and observations."""
    prompt: str = "{question}\n"
    """Template of the prompt; knows {question} and the tag names."""
    action: str = "<{tag}> {text}</{tag}>"
    """Template of a demonstrated action. The space lets a copied word keep its token from the
    middle of a sentence."""
    observation: str = "<{information}>{documents}</{information}>"
    """Template of a search result; knows {documents} and the tag names."""
    document: str = " {text}"
    """Template of one passage in a search result; knows {i} from 1, {title} and {text}."""
    topk: int = 2
    """Passages per search."""
    reward_search: float = 2.0
    """Reward of a right answer after at least one executed search."""
    reward_no_search: float = 1.1
    """Reward of a right answer without one."""
    reward_wrong: float = 0.0
    """Reward of a wrong answer; the paper does not state it."""
    reward_format: float = 0.0
    """Reward of an episode without an answer; the paper does not state it."""
    max_query_characters: int = 512
    """A longer query is no valid action and is not searched for."""
    max_answer_tags: int = 10
    """A right answer among more answer tags than these earns a quarter, as in verl's port of
    Search-R1: it was found by writing down everything."""

    def __post_init__(self) -> None:
        for name in ("topk", "max_query_characters", "max_answer_tags"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for field, needed in (
            ("prompt", "{question}"),
            ("observation", "{documents}"),
            ("document", "{text}"),
        ):
            if needed not in getattr(self, field):
                raise ValueError(f"{field} must contain {needed}: {getattr(self, field)!r}")

    @classmethod
    def search_r1(cls, tags: TagSet | None = None, **overrides: Any) -> SearchConfig:
        """Return the long format for pretrained models: instructions, titled passages, top 3."""
        values: dict[str, Any] = {
            "prompt": INSTRUCTIONS,
            "observation": "\n\n<{information}>{documents}</{information}>\n\n",
            "document": "Doc {i}(Title: {title}) {text}\n",
            "topk": 3,
        }
        return cls(tags=tags or TagSet(), **(values | overrides))


SHORT_FORMAT = SearchConfig()
"""Format of the small default model."""


def render_prompt(config: SearchConfig, question: str) -> str:
    """Return the prompt text of a question."""
    return config.prompt.format(question=question, **dataclasses.asdict(config.tags))


def render_action(config: SearchConfig, kind: Literal["search", "answer"], text: str) -> str:
    """Return a turn that searches for `text` or answers with it, as demonstrations write it."""
    return config.action.format(tag=getattr(config.tags, kind), text=text)


def render_documents(config: SearchConfig, passages: Sequence[Passage]) -> str:
    """Return the observation that shows `passages`; their tags are disarmed, so text cannot act."""
    documents = "".join(
        config.document.format(i=i, title=passage.title, text=passage.text)
        for i, passage in enumerate(passages, start=1)
    )
    documents = documents.rstrip() if passages else " Nothing was found."
    documents = disarm(documents, config.tags.texts)
    return render_notice(config, documents)


def render_notice(config: SearchConfig, text: str) -> str:
    """Return an observation with any text inside the information tag."""
    return config.observation.format(documents=text, **dataclasses.asdict(config.tags))


@functools.lru_cache
def _action_pattern(tags: TagSet) -> re.Pattern[str]:
    return re.compile(
        rf"<({re.escape(tags.search)}|{re.escape(tags.answer)})>(.*?)</\1>", re.DOTALL
    )


def parse_action(text: str, tags: TagSet = SEARCH_R1_TAGS) -> tuple[str, str] | None:
    """Return ("search" | "answer", content) of the first complete action in a turn, or None."""
    match = _action_pattern(tags).search(text)
    if match is None:
        return None
    return "search" if match[1] == tags.search else "answer", match[2].strip()


def extract_answer(sampled: str | Sequence[str], tags: TagSet = SEARCH_R1_TAGS) -> str | None:
    """Return the last complete answer in what the policy sampled, or None.

    Turns are searched one by one, so no answer spans tool text. An unclosed tag after a complete
    answer changes nothing; an answer that is empty or holds another tag is none.
    """
    turns = [sampled] if isinstance(sampled, str) else sampled
    name = re.escape(tags.answer)
    for turn in reversed(turns):
        found = re.findall(rf"<{name}>(.*?)</{name}>", turn, re.DOTALL)
        if found:
            text = found[-1].strip()
            return text if text and not any(tag in text for tag in tags.texts) else None
    return None


def normalize_answer(text: str) -> str:
    """Normalize as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces.

    Unicode is composed first (NFKC), so that equal-looking letters are equal. Punctuation outside
    ASCII stays, as in the official rule: an en dash is not a hyphen.
    """
    text = unicodedata.normalize("NFKC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 when the normalized prediction equals any normalized gold answer, else 0.0.

    A gold answer "A|B" is a list: all of its parts are needed and no others, in any order, as
    Chain-of-Agents scores them. "A|B" is right, "B | A" too, "A" alone or "A|B|C" not.
    """
    return float(
        any(_answer_parts(prediction, gold) == _answer_parts(gold, gold) for gold in golds)
    )


def _answer_parts(text: str, gold: str) -> set[str]:
    # Only a list is taken apart: in any other answer the official rule deletes the separator.
    parts = text.split(ANSWER_SEPARATOR) if ANSWER_SEPARATOR in gold else [text]
    return {normalize_answer(part) for part in parts}


def search_reward(
    sampled: str | Sequence[str],
    golds: Sequence[str],
    searches: float,
    config: SearchConfig = SHORT_FORMAT,
) -> float:
    """Score an episode from sampled text alone.

    Args:
        sampled: text that the policy wrote, as one string or one a turn; neither prompt nor tool
            text.
        golds: acceptable answers.
        searches: searches that were executed. A result that the policy wrote itself is not one, nor
            is a search that failed or whose query was empty or too long.
        config: tags and rewards.

    Source: 2.0 with search and 1.1 without are the paper's; the rewards of a wrong answer and of
    none are assumptions. The quarter above `max_answer_tags` is verl's.
    """
    answer = extract_answer(sampled, config.tags)
    if answer is None:
        return config.reward_format
    if not exact_match(answer, golds):
        return config.reward_wrong
    reward = config.reward_search if searches >= 1 else config.reward_no_search
    turns = [sampled] if isinstance(sampled, str) else sampled
    tags = sum(turn.count(f"<{config.tags.answer}>") for turn in turns)
    return reward / 4 if tags > config.max_answer_tags else reward


class SearchTask:
    """Question answering with a search tool, as `run_episode` plays it."""

    score_name = "em"

    def __init__(
        self,
        tokenizer: Any,
        retriever: Retriever,
        config: SearchConfig = SHORT_FORMAT,
        *,
        apply_chat_template: ApplyChatTemplate | None = None,
    ):
        """Bind the task to its tools.

        Args:
            tokenizer: `tokenizers.Tokenizer` of the policy.
            retriever: answers the searches.
            config: format and reward.
            apply_chat_template: wraps messages for a chat model; without it the prompt is plain
                text.
        """
        self.config = config
        self.stop = config.tags.stop
        self._tokenizer = tokenizer
        self._retriever = retriever
        self._apply_chat_template = apply_chat_template
        # Neither questions nor passages may turn into tokens that structure a chat.
        self._special = special_tokens(tokenizer)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; without any, its last message is the question."""
        return encode_question(
            prompt,
            self._tokenizer,
            functools.partial(render_prompt, self.config),
            special=self._special,
            apply_chat_template=self._apply_chat_template,
        )

    async def step(self, text: str, finish: str, matched: str | int | None) -> Action:
        """Act on one turn: search and observe, answer and end, or explain what a valid turn is.

        A turn that was cut by the length limit executes nothing and ends the episode.

        Raises:
            EpisodeFailed: the search engine is out of order.
        """
        tags = self.config.tags
        action = parse_action(text, tags)
        if finish != "stop":
            # A cut turn can still hold a finished answer; a search in it may be half of what was
            # meant.
            answered = action is not None and action[0] == "answer"
            return Action("end", "", {"valid_actions" if answered else "invalid_actions": 1.0})
        if action is not None and action[0] == "answer":
            return Action("end", "", {"valid_actions": 1.0})
        if action is None or not action[1]:
            return self._refuse(f"Use the {tags.search} or {tags.answer} tags and try again.")
        if len(action[1]) > self.config.max_query_characters:
            return self._refuse("The query is too long. Use a few words.")
        try:
            found = await self._retriever.search([action[1]], self.config.topk)
        except QueryRefused:
            notice = render_notice(self.config, " The search failed. Try again.")
            return Action("observe", notice, {"valid_actions": 1.0, "failed_searches": 1.0})
        except RetrieverError as error:
            # The policy has nothing to do with it, and must not learn that searching is in vain.
            raise EpisodeFailed(f"the search engine failed: {error}") from error
        observation = disarm(render_documents(self.config, found[0]), self._special)
        return Action("observe", observation, {"valid_actions": 1.0, "searches": 1.0})

    def _refuse(self, reason: str) -> Action:
        notice = render_notice(self.config, f" Invalid. {reason}")
        return Action("observe", notice, {"invalid_actions": 1.0})

    def reward(
        self, prompt: Prompt, sampled: Sequence[str], info: Mapping[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Return the outcome reward and the figures of an episode.

        Args:
            prompt: the question with its gold answers.
            sampled: text of each turn that the policy sampled.
            info: sums of the figures that `step` returned.

        Returns:
            The reward, and apart from it: `em`; `answered`; `searched`, 1 with at least one
            executed search, whose mean over episodes is the search rate; `searches`;
            `failed_searches`; `valid_actions`; `valid_action_rate`, their share of all turns that
            acted or tried to; and `hops` or `difficulty`, as the prompt's source says.
        """
        searches = float(info.get("searches", 0.0))
        valid, invalid = (float(info.get(f"{x}_actions", 0.0)) for x in ("valid", "invalid"))
        level = _LEVEL.fullmatch(prompt.source)
        answer = extract_answer(sampled, self.config.tags)
        figures = {
            "em": 0.0 if answer is None else exact_match(answer, prompt.gold),
            "answered": float(answer is not None),
            "searched": float(searches >= 1),
            "searches": searches,
            "failed_searches": float(info.get("failed_searches", 0.0)),
            "valid_actions": valid,
            "valid_action_rate": valid / max(valid + invalid, 1.0),
        }
        if level:
            figures["hops" if level[1] else "difficulty"] = float(level[1] or level[2])
        return search_reward(sampled, prompt.gold, searches, self.config), figures
