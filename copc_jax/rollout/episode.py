"""One episode: turns of sampling, tool calls and observations, token ids throughout.

What was sampled is never encoded again: the next turn sends the very ids of the turns before it,
and only new observations are tokenized.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer

from copc_jax.rollout.client import RolloutUnavailable, SamplingParams, SGLangClient
from copc_jax.types import Finish, Generation, Prompt, Status, Trajectory

logger = logging.getLogger(__name__)

CUT_MARKER = " [...] "
"""Stands where an observation was shortened."""


class EpisodeFailed(RuntimeError):
    """The episode ended by a fault that is not the policy's: it must not be scored."""


@dataclasses.dataclass(frozen=True)
class Action:
    """What a turn did.

    Attributes:
        kind: "observe" goes on with `observation`, "end" closes the episode.
        observation: text that the policy reads next.
        info: figures to add up over the turns, such as {"searches": 1.0}.
    """

    kind: Literal["observe", "end"]
    observation: str = ""
    info: dict[str, float] = dataclasses.field(default_factory=dict)


Score = tuple[float, dict[str, float]]
"""Reward of an episode, and the task's figures for logs."""

ApplyChatTemplate = Callable[[Sequence[Mapping[str, str]]], str]
"""Writes messages as the text of a model's chat, up to where its answer begins."""


@runtime_checkable
class Task(Protocol):
    """What an environment provides.

    Attributes:
        stop: strings that end a turn.
        score_name: which of the figures of `reward` is the result of an evaluation, 0 to 1.
    """

    stop: tuple[str, ...]
    score_name: str

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the prompt."""
        ...

    async def step(self, text: str, finish: Finish, matched: str | int | None) -> Action:
        """Act on the text of one complete turn.

        An exception becomes an observation, but for `EpisodeFailed`, which ends the episode.
        """
        ...

    def reward(
        self, prompt: Prompt, sampled: Sequence[str], info: dict[str, float]
    ) -> Score | Awaitable[Score]:
        """Score the texts that the policy sampled, one a turn, and return figures for logs.

        `info` holds the sums of what `step` returned, and "truncated": whether a limit cut the
        episode. A coroutine function where scoring takes long enough to hold up other episodes.
        """
        ...


@dataclasses.dataclass(frozen=True)
class EpisodeBudget:
    """Limits of one episode.

    Attributes:
        max_turns: turns that are sampled.
        max_tokens: tokens of prompt, turns and observations together.
        max_new_tokens: sampled tokens of one turn.
        max_observation_tokens: tokens of one observation, its cut marker included.
        tool_timeout_s: seconds for the tools of one turn.
    """

    max_turns: int
    max_tokens: int
    max_new_tokens: int
    max_observation_tokens: int
    tool_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")


async def run_episode(
    client: SGLangClient,
    task: Task,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    sample: int,
    sampling: SamplingParams,
    budget: EpisodeBudget,
    seed: int | None,
) -> Trajectory:
    """Play one episode and score it.

    A turn that is cut by a limit acts no more: the episode is then "truncated", as it is when the
    turns or the token budget run out. A turn that ends exactly at a limit is complete. Tool faults
    and time-outs become text that the policy reads, counted as `tool_errors`.

    Args:
        client: where to sample.
        task: prompt format, tools and reward.
        tokenizer: the policy's, for observations and for the text that tools read.
        prompt: the question.
        sample: index among the samples of the prompt.
        sampling: its `stop` and `max_new_tokens` are replaced by the task's and the budget's; its
            `stop_token_ids` should name every end-of-sequence id of the model.
        budget: limits.
        seed: of the episode, not negative; each turn derives its own. None leaves it to the server.

    Returns:
        The episode; the last token is a sampled one. Without room for a single token it is
        "truncated" and holds the prompt only; after `client.abort_all` it is "aborted" with reward
        0 and must not be trained on.

    Raises:
        EpisodeFailed: no server could be reached, the task's tools are out of order, or the reward
            could not be computed.
        RolloutError: a server refused the request or sent what cannot be used; this concerns every
            episode and should end the run.
    """
    record = _Record(task.encode_prompt(prompt))
    if not record.token_ids:
        raise ValueError(f"prompt {prompt.prompt_id!r} encodes to no tokens")
    limit = budget.max_tokens
    if client.context_length is not None:
        limit = min(limit, client.context_length)
    info: dict[str, float] = {}
    turns: list[str] = []
    status: Status = "truncated"
    # Turns of an episode share a server, which has their common prefix in its cache.
    key = f"{prompt.prompt_id}/{sample}/{seed}"
    for turn in range(budget.max_turns):
        room = min(budget.max_new_tokens, limit - len(record.token_ids))
        if room < 1:
            break
        turn_sampling = dataclasses.replace(sampling, max_new_tokens=room, stop=tuple(task.stop))
        try:
            generation = await client.generate(
                record.token_ids, turn_sampling, seed=turn_seed(seed, turn), key=key
            )
        except RolloutUnavailable as error:
            raise EpisodeFailed(f"prompt {prompt.prompt_id!r}, turn {turn}: {error}") from error
        generation, text = settle(generation, tokenizer, turn_sampling)
        record.add_sampled(generation)
        turns.append(text)
        if generation.finish == "abort":
            status = "aborted"
            break
        if generation.finish == "length":
            break
        action = await _act(task, prompt, text, generation, budget.tool_timeout_s)
        for name, value in action.info.items():
            info[name] = info.get(name, 0.0) + float(value)
        if action.kind == "end":
            status = "done"
            break
        if turn + 1 == budget.max_turns:
            break
        observation = encode_observation(
            tokenizer, action.observation, budget.max_observation_tokens
        )
        # An observation that leaves no room for an answer to it would teach nothing.
        if len(record.token_ids) + len(observation) >= limit:
            break
        record.add_observation(observation)
    reward, figures = 0.0, {}
    if status != "aborted":
        cut = {"truncated": float(status == "truncated")}
        reward, figures = await _score(task, prompt, turns, info | cut)
    return record.trajectory(
        prompt,
        sample,
        reward=reward,
        status=status,
        info={**info, "turns": float(len(turns)), **figures},
    )


def turn_seed(seed: int | None, turn: int) -> int | None:
    """Return the request seed of a turn: 31 bits, the same on every run, another for each turn."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, turn]).generate_state(1)[0]) & 0x7FFFFFFF


def settle(
    generation: Generation, tokenizer: Tokenizer, sampling: SamplingParams
) -> tuple[Generation, str]:
    """Find where a turn really ended, and decode it.

    SGLang tests the length before the stops, so that a turn which ends exactly at its limit comes
    back as cut; and it tests stop strings over one request only, so that a string which straddles
    a resumption is missed and sampling runs on. Both are told from the ids.

    Args:
        generation: as the client returned it.
        tokenizer: the policy's.
        sampling: stops of the turn.

    Returns:
        The generation up to the token that completes the first stop, with "stop" as its finish; or
        as it was. And its text, special tokens included.
    """
    ids = generation.token_ids.tolist()
    text = _decode(tokenizer, ids)
    if any(stop in text for stop in sampling.stop):
        # The shortest prefix with a stop string in it: containing one is monotone in the length.
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            prefix = _decode(tokenizer, ids[:middle])
            if any(stop in prefix for stop in sampling.stop):
                high = middle
            else:
                low = middle + 1
        text = _decode(tokenizer, ids[:low])
        found = [stop for stop in sampling.stop if stop in text]
        return _ended(generation, low, min(found, key=text.index)), text
    if ids and generation.finish == "length" and ids[-1] in sampling.stop_token_ids:
        return _ended(generation, len(ids), ids[-1]), text
    return generation, text


def _ended(generation: Generation, count: int, matched: str | int) -> Generation:
    return Generation(
        token_ids=generation.token_ids[:count],
        logprob=generation.logprob[:count],
        weight_version=generation.weight_version[:count],
        finish="stop",
        matched=matched,
    )


def encode_question(
    prompt: Prompt,
    tokenizer: Tokenizer,
    render: Callable[[str], str],
    *,
    special: Sequence[str],
    apply_chat_template: ApplyChatTemplate | None,
) -> list[int]:
    """Return the token ids of a prompt; without any, its last message is the question.

    Args:
        prompt: with token ids or messages.
        tokenizer: of the policy.
        render: makes the text of the task's prompt from the question.
        special: marks that structure a chat and are disarmed in messages.
        apply_chat_template: wraps the messages for a chat model; None encodes plain text.

    Raises:
        ValueError: the prompt has neither.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    if not prompt.messages:
        raise ValueError(f"prompt {prompt.prompt_id!r} has neither messages nor token_ids")
    *before, last = (
        {**message, "content": disarm(message["content"], special)} for message in prompt.messages
    )
    text = render(last["content"])
    if apply_chat_template is not None:
        text = apply_chat_template([*before, {**last, "content": text}])
    return _encode(tokenizer, text)


def encode_observation(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    """Tokenize tool text, cutting out of its middle what exceeds `limit` tokens.

    The end stays, because tasks close their observations there. Of a huge text only the parts that
    can be shown are tokenized.
    """
    # Characters beyond this many tokens' worth on either side are never shown.
    window = 64 * limit
    if len(text) <= 2 * window:
        head = tail = _encode(tokenizer, text)
        if len(head) <= limit:
            return head
    else:
        head, tail = _encode(tokenizer, text[:window]), _encode(tokenizer, text[-window:])
    marker = _encode(tokenizer, CUT_MARKER)[:limit]
    room = limit - len(marker)
    kept_tail = room // 4
    return head[: room - kept_tail] + marker + tail[len(tail) - kept_tail :]


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """List the tokens that structure a chat, which no text of users and tools may turn into."""
    added = tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special and " " not in token.content)


def disarm(text: str, marks: Sequence[str]) -> str:
    """Return the text with a space after the first character of every mark in it.

    Marks hold no spaces, so that this never makes a new one, as taking one out might.
    """
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text


async def gather_calls(calls: Sequence[Awaitable[str]], timeout_s: float) -> list[str]:
    """Run the tool calls of one turn at once and return their texts in call order.

    A call that fails or takes longer than `timeout_s` seconds gives a text that says so; the others
    are not affected.
    """
    return list(await asyncio.gather(*(_tool_text(call, timeout_s) for call in calls)))


async def _tool_text(call: Awaitable[str], timeout_s: float) -> str:
    try:
        return await asyncio.wait_for(call, timeout_s)
    except Exception as error:
        return _fault_text(error, timeout_s)


async def _act(
    task: Task, prompt: Prompt, text: str, generation: Generation, timeout_s: float
) -> Action:
    try:
        return await asyncio.wait_for(
            task.step(text, generation.finish, generation.matched), timeout_s
        )
    except EpisodeFailed as error:
        raise EpisodeFailed(f"prompt {prompt.prompt_id!r}: {error}") from error
    except Exception as error:
        return Action("observe", _fault_text(error, timeout_s), {"tool_errors": 1.0})


def _fault_text(error: Exception, timeout_s: float) -> str:
    # Tools are other people's code and may raise anything. The policy reads a short text; whoever
    # runs the job finds the traceback in the log.
    logger.warning("a tool failed", exc_info=error)
    if isinstance(error, TimeoutError):
        return f"\nTool error: no result within {timeout_s:g} seconds.\n"
    return f"\nTool error: {type(error).__name__}: {str(error)[:200]}\n"


async def _score(task: Task, prompt: Prompt, turns: Sequence[str], info: dict[str, float]) -> Score:
    try:
        score = task.reward(prompt, turns, info)
        reward, figures = await score if inspect.isawaitable(score) else score
    except Exception as error:
        raise EpisodeFailed(f"no reward for prompt {prompt.prompt_id!r}: {error!r}") from error
    if not math.isfinite(reward):
        raise EpisodeFailed(f"reward of prompt {prompt.prompt_id!r} is {reward}")
    return float(reward), figures


class _Record:
    """The growing arrays of an episode, all of one length."""

    def __init__(self, prompt_ids: Sequence[int]):
        self.token_ids: list[int] = []
        self._is_action: list[bool] = []
        self._logprob: list[float] = []
        self._version: list[int] = []
        self.add_observation(prompt_ids)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self._is_action += [False] * count
        self._logprob += [0.0] * count
        self._version += [-1] * count

    def add_sampled(self, generation: Generation) -> None:
        self.token_ids += generation.token_ids.tolist()
        self._is_action += [True] * len(generation.token_ids)
        self._logprob += generation.logprob.tolist()
        self._version += generation.weight_version.tolist()

    def trajectory(self, prompt: Prompt, sample: int, **rest: Any) -> Trajectory:
        count = len(self.token_ids)
        lengths = {len(self._is_action), len(self._logprob), len(self._version)}
        assert lengths == {count}, f"{prompt.prompt_id}: {count} ids but lengths {lengths}"
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sample=sample,
            token_ids=np.array(self.token_ids, np.int32),
            is_action=np.array(self._is_action, bool),
            behavior_logprob=np.array(self._logprob, np.float32),
            weight_version=np.array(self._version, np.int32),
            **rest,
        )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)
