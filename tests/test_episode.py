"""Episodes against a scripted server over real HTTP, with a small byte-level tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time

import numpy as np
import pytest
from scripted_server import ScriptedServer, Status, Tokens
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from copc_jax.rollout.client import RolloutError, SamplingParams, SGLangClient
from copc_jax.rollout.episode import (
    CUT_MARKER,
    Action,
    EpisodeBudget,
    EpisodeFailed,
    encode_observation,
    gather_calls,
    run_episode,
    turn_seed,
)
from copc_jax.types import Prompt, Trajectory

STOP = ("</search>", "</answer>")
PROMPT = Prompt("q1", messages=({"role": "user", "content": "who?"},), gold=("hello",))
BUDGET = EpisodeBudget(max_turns=4, max_tokens=400, max_new_tokens=60, max_observation_tokens=80)


def make_tokenizer() -> Tokenizer:
    """Bytes, a few merges ("he" + "llo" is "hello", ">" + "\\n" is one token) and two EOS ids."""
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), (">", "Ċ")]
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    model = models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|eos|>"), AddedToken("<|eot|>")])
    return tokenizer


TOKENIZER = make_tokenizer()
EOS, EOT = TOKENIZER.token_to_id("<|eos|>"), TOKENIZER.token_to_id("<|eot|>")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@dataclasses.dataclass
class LookUp:
    """Searches echo their query in capitals; an answer or an unknown turn ends the episode."""

    result: str | None = None
    error: Exception | None = None
    seconds: float = 0.0
    score: float = 2.0
    stop: tuple[str, ...] = STOP
    score_name: str = "em"
    calls: list[str] = dataclasses.field(default_factory=list)
    seen: list[tuple[str, object]] = dataclasses.field(default_factory=list)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return encode(prompt.messages[0]["content"])

    async def step(self, text, finish, matched) -> Action:
        self.seen.append((finish, matched))
        found = re.search(r"<search>(.*?)</search>", text, re.DOTALL)
        if found is None:
            return Action("end")
        self.calls.append(found[1])
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        text = found[1].upper() if self.result is None else self.result
        return Action("observe", f"[{text}]", {"searches": 1.0})

    def reward(self, prompt, sampled, info):
        answers = re.findall(r"<answer>(.*?)</answer>", "\n".join(sampled), re.DOTALL)
        right = bool(answers) and answers[-1] in prompt.gold
        return self.score if right else 0.0, {"em": float(right)}


@pytest.fixture
def server():
    with ScriptedServer() as server:
        server.version = "1"
        yield server


def play(server, *turns, task=None, budget=BUDGET, seed=7, **settings) -> Trajectory:
    """Play one episode whose turns are scripted as texts, ids or `Tokens`."""
    for turn in turns:
        if isinstance(turn, str):
            turn = Tokens(encode(turn), finish="stop")
        elif isinstance(turn, list):
            turn = Tokens(turn, finish="stop")
        server.script("/generate", turn)

    async def main():
        options = {"backoff_s": 0.02, "deadline_s": 2.0, "retries": 2} | settings
        async with SGLangClient([server.url], **options) as client:
            return await run_episode(
                client,
                task or LookUp(),
                TOKENIZER,
                PROMPT,
                sample=3,
                sampling=SamplingParams(1, stop_token_ids=(EOS, EOT)),
                budget=budget,
                seed=seed,
            )

    return asyncio.run(main())


def test_turns_and_observations_make_one_trajectory(server):
    search, answer = encode("<search>a</search>"), encode("<answer>hello</answer>")
    task = LookUp()
    trajectory = play(
        server,
        Tokens(search, [-0.25] * len(search), finish="stop", matched="</search>"),
        Tokens(answer, [-0.5] * len(answer), finish="stop", matched="</answer>"),
        task=task,
    )
    prompt, observation = encode("who?"), encode("[A]")
    assert trajectory.token_ids.tolist() == prompt + search + observation + answer
    sizes = [len(prompt), len(search), len(observation), len(answer)]
    parts = lambda values: np.repeat(values, sizes).tolist()
    assert trajectory.is_action.tolist() == parts([False, True, False, True])
    assert trajectory.behavior_logprob.tolist() == parts([0.0, -0.25, 0.0, -0.5])
    assert trajectory.weight_version.tolist() == parts([-1, 1, -1, 1])
    assert trajectory.behavior_logprob.dtype == np.float32
    assert trajectory.token_ids.dtype == trajectory.weight_version.dtype == np.int32
    assert (trajectory.reward, trajectory.status) == (2.0, "done")
    assert (trajectory.prompt_id, trajectory.sample) == ("q1", 3)
    assert trajectory.info == {"searches": 1.0, "turns": 2.0, "em": 1.0}
    assert task.seen == [("stop", "</search>"), ("stop", "</answer>")]


def test_sampled_ids_are_sent_back_as_they_were_sampled(server):
    # "he" + "llo" decodes to "hello", which encodes to one other id.
    pieces = [TOKENIZER.token_to_id("he"), TOKENIZER.token_to_id("llo")]
    assert encode(TOKENIZER.decode(pieces)) == [TOKENIZER.token_to_id("hello")]
    turn = encode("<search>") + pieces + encode("</search>")
    trajectory = play(server, turn, "<answer>x</answer>")
    first, second = (body["input_ids"] for body in server.sent("/generate"))
    assert second == first + turn + encode("[HELLO]")
    actions = trajectory.token_ids[trajectory.is_action].tolist()
    assert actions == turn + encode("<answer>x</answer>")


def test_lengths_agree_after_every_turn(server):
    for searches in range(3):
        trajectory = play(server, *["<search>b</search>"] * searches, "<answer>x</answer>")
        lengths = {
            len(getattr(trajectory, name))
            for name in ("token_ids", "is_action", "behavior_logprob", "weight_version")
        }
        assert len(lengths) == 1 and trajectory.info["turns"] == searches + 1


def test_a_token_that_runs_past_the_stop_string_is_kept(server):
    # The token ">\n" completes "</search>" and more.
    turn = encode("<search>a</search") + [TOKENIZER.token_to_id(">Ċ")]
    task = LookUp()
    trajectory = play(server, turn, "<answer>x</answer>", task=task)
    assert task.calls == ["a"]
    assert trajectory.token_ids[trajectory.is_action][: len(turn)].tolist() == turn


def test_a_turn_cut_in_a_tool_call_executes_nothing(server):
    task = LookUp()
    trajectory = play(server, Tokens(encode("<search>a</sea"), finish="length"), task=task)
    assert task.calls == [] and task.seen == []
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.0)
    assert trajectory.info["turns"] == 1 and trajectory.is_action[-1]
    assert len(server.sent("/generate")) == 1


def test_an_answer_that_ends_exactly_at_the_budget_is_complete(server):
    # SGLang says "length" then, because it looks at the length first.
    answer = encode("<answer>hello</answer>")
    budget = dataclasses.replace(BUDGET, max_tokens=len(encode("who?")) + len(answer))
    task = LookUp()
    trajectory = play(server, Tokens(answer, finish="length"), budget=budget, task=task)
    assert (trajectory.status, trajectory.reward) == ("done", 2.0)
    assert task.seen == [("stop", "</answer>")]
    (body,) = server.sent("/generate")
    assert body["sampling_params"]["max_new_tokens"] == len(answer)


@pytest.mark.parametrize("end", [EOS, EOT])
def test_every_end_of_sequence_id_ends_the_turn_and_is_trained(server, end):
    turn = [*encode("<answer>hello</answer>"), end]
    trajectory = play(server, Tokens(turn, finish="stop", matched=end), task=LookUp(stop=()))
    assert (trajectory.status, trajectory.reward) == ("done", 2.0)
    assert trajectory.token_ids[-1] == end and trajectory.is_action[-1]
    assert (trajectory.token_ids == end).sum() == 1
    assert trajectory.behavior_logprob[-1] < 0
    assert server.sent("/generate")[0]["sampling_params"]["stop_token_ids"] == [EOS, EOT]


@pytest.mark.parametrize("end", [EOS, EOT])
def test_an_end_of_sequence_id_exactly_at_the_limit_is_no_cut(server, end):
    turn = [*encode("hm"), end]
    task = LookUp()
    assert play(server, Tokens(turn, finish="length"), task=task).status == "done"
    assert task.seen == [("stop", end)]


def test_a_stop_string_across_a_resumption_ends_the_turn(server):
    # The server looks for stop strings in what one request sampled, so it misses this one.
    head, tail = encode("<search>a</sea"), encode("rch>")
    task = LookUp()
    trajectory = play(
        server,
        Tokens(head, finish="abort"),
        Tokens(tail + encode("and more"), finish="length"),
        "<answer>x</answer>",
        task=task,
    )
    assert task.calls == ["a"]
    assert server.sent("/generate")[2]["input_ids"] == encode("who?") + head + tail + encode("[A]")
    assert trajectory.token_ids[trajectory.is_action].tolist() == head + tail + encode(
        "<answer>x</answer>"
    )


# ---------------------------------------------------------------- budgets


def test_limits_of_a_turn_shrink_with_the_budget(server):
    budget = dataclasses.replace(BUDGET, max_tokens=60, max_new_tokens=40)
    play(server, "<search>a</search>", "<answer>x</answer>", budget=budget)
    limits = [body["sampling_params"]["max_new_tokens"] for body in server.sent("/generate")]
    used = len(encode("who?<search>a</search>[A]"))
    assert limits == [40, 60 - used] and limits[1] < 40


def test_no_token_limit_is_exceeded_by_observations(server):
    budget = dataclasses.replace(BUDGET, max_tokens=60)
    trajectory = play(server, "<search>a</search>", budget=budget, task=LookUp(result="x" * 300))
    assert trajectory.status == "truncated" and len(trajectory.token_ids) <= 60
    # A result that nobody answers to is not kept.
    assert trajectory.is_action[-1] and trajectory.info["searches"] == 1


def test_the_last_turn_has_no_observation(server):
    budget = dataclasses.replace(BUDGET, max_turns=2)
    trajectory = play(server, *["<search>a</search>"] * 2, budget=budget)
    assert (trajectory.status, trajectory.info["turns"]) == ("truncated", 2.0)
    assert trajectory.is_action[-1] and len(server.sent("/generate")) == 2


@pytest.mark.parametrize("context", [4, 3])
def test_a_prompt_without_room_is_truncated_and_never_sent(server, context):
    trajectory = play(server, context_length=context)
    assert (trajectory.status, trajectory.is_action.any()) == ("truncated", np.False_)
    assert trajectory.token_ids.tolist() == encode("who?") and server.requests == []


def test_a_huge_observation_is_cut_and_marked(server):
    start = time.monotonic()
    trajectory = play(server, "<search>a</search>", "x", task=LookUp(result="x" * 10**7))
    assert time.monotonic() - start < 5
    actions = np.flatnonzero(trajectory.is_action)
    gap = int(np.flatnonzero(np.diff(actions) > 1)[0])
    observed = trajectory.token_ids[actions[gap] + 1 : actions[gap + 1]].tolist()
    text = TOKENIZER.decode(observed)
    assert len(observed) == BUDGET.max_observation_tokens
    assert text.startswith("[xx") and CUT_MARKER in text and text.endswith("x]")


def test_observations_up_to_the_limit_are_whole():
    assert encode_observation(TOKENIZER, "a" * 20, 20) == encode("a" * 20)
    cut = encode_observation(TOKENIZER, "a" * 21 + "b", 20)
    assert len(cut) == 20 and TOKENIZER.decode(cut).endswith("b")
    assert len(encode_observation(TOKENIZER, "a" * 50, 3)) == 3


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(EpisodeBudget)])
def test_a_budget_of_nothing_names_the_field(name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(BUDGET, **{name: 0})


# ---------------------------------------------------------------- tools


def test_a_failing_tool_becomes_text_that_the_policy_reads(server):
    task = LookUp(error=ConnectionError("index is down"))
    trajectory = play(server, "<search>a</search>", "<answer>hello</answer>", task=task)
    assert "index is down" in TOKENIZER.decode(server.sent("/generate")[1]["input_ids"])
    assert (trajectory.status, trajectory.reward) == ("done", 2.0)
    assert trajectory.info["tool_errors"] == 1.0 and "searches" not in trajectory.info


def test_a_tool_that_hangs_is_cut_off(server):
    budget = dataclasses.replace(BUDGET, tool_timeout_s=0.2)
    trajectory = play(
        server, "<search>a</search>", "<answer>x</answer>", task=LookUp(seconds=60), budget=budget
    )
    assert "no result within 0.2 seconds" in TOKENIZER.decode(
        server.sent("/generate")[1]["input_ids"]
    )
    assert trajectory.info["tool_errors"] == 1.0


def test_parallel_calls_answer_in_call_order_and_apart():
    async def call(text: str, seconds: float) -> str:
        await asyncio.sleep(seconds)
        if text == "bad":
            raise ValueError("no such page")
        return text

    async def main():
        calls = [call("slow", 0.2), call("bad", 0.0), call("hangs", 60.0), call("fast", 0.0)]
        return await gather_calls(calls, 0.5)

    slow, bad, hangs, fast = asyncio.run(main())
    assert (slow, fast) == ("slow", "fast")
    assert "no such page" in bad and "no result within 0.5 seconds" in hangs


# ---------------------------------------------------------------- failures


def test_an_unreachable_server_fails_the_episode(server):
    with pytest.raises(EpisodeFailed, match=r"'q1', turn 1.*given up after 3 failed attempts"):
        play(server, "<search>a</search>", *[Status(503)] * 3, unhealthy_after=9)


def test_a_refusal_concerns_the_run(server):
    with pytest.raises(RolloutError, match="answered 403"):
        play(server, Status(403))


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_reward_that_is_no_number_fails_the_episode(server, score):
    with pytest.raises(EpisodeFailed, match="reward of prompt 'q1'"):
        play(server, "<answer>hello</answer>", task=LookUp(score=score))


def test_a_crash_of_the_reward_fails_the_episode(server):
    # Neither 0 nor 1.
    class Broken(LookUp):
        def reward(self, prompt, sampled, info):
            raise RuntimeError("verifier died")

    with pytest.raises(EpisodeFailed, match="verifier died"):
        play(server, "<answer>hello</answer>", task=Broken())


def test_tools_out_of_order_fail_the_episode(server):
    # What the policy had nothing to do with must not be scored, nor shown to it.
    task = LookUp(error=EpisodeFailed("the sandbox is gone"))
    with pytest.raises(EpisodeFailed, match=r"'q1'.*the sandbox is gone"):
        play(server, "<search>a</search>", task=task)


def test_a_reward_is_told_whether_the_episode_was_cut(server):
    class Told(LookUp):
        def reward(self, prompt, sampled, info):
            return info["truncated"], {}

    assert play(server, "<answer>hello</answer>", task=Told()).reward == 0.0
    cut = play(server, Tokens(encode("<answer>he"), finish="length"), task=Told())
    assert (cut.reward, cut.status, cut.info) == (1.0, "truncated", {"turns": 1.0})


def test_a_reward_may_be_awaited(server):
    class Slow(LookUp):
        async def reward(self, prompt, sampled, info):
            await asyncio.sleep(0.01)
            return super().reward(prompt, sampled, info)

    trajectory = play(server, "<answer>hello</answer>", task=Slow())
    assert (trajectory.reward, trajectory.info["em"]) == (2.0, 1.0)

    class Broken(LookUp):
        async def reward(self, prompt, sampled, info):
            raise RuntimeError("verifier died")

    with pytest.raises(EpisodeFailed, match="verifier died"):
        play(server, "<answer>hello</answer>", task=Broken())


def test_an_aborted_episode_is_marked_and_not_scored(server):
    server.script("/generate", Tokens(encode("<answer>hello</answer>"), seconds=5.0))

    async def main():
        async with SGLangClient([server.url]) as client:
            episode = asyncio.create_task(
                run_episode(
                    client,
                    LookUp(),
                    TOKENIZER,
                    PROMPT,
                    sample=0,
                    sampling=SamplingParams(1),
                    budget=BUDGET,
                    seed=1,
                )
            )
            while not server.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.6)
            await client.abort_all()
            return await episode

    trajectory = asyncio.run(main())
    assert (trajectory.status, trajectory.reward) == ("aborted", 0.0)
    assert trajectory.is_action.any()


# ---------------------------------------------------------------- seeds


def test_turns_have_seeds_of_their_own_that_a_rerun_repeats(server):
    turns = ["<search>a</search>", "<search>b</search>", "<answer>x</answer>"]
    for seed in (7, 7, 8):
        play(server, *turns, seed=seed)
    seeds = [body["sampling_params"]["sampling_seed"] for body in server.sent("/generate")]
    assert seeds[:3] == seeds[3:6] and len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert turn_seed(None, 0) is None
