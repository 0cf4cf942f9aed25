"""Scores of servers against the learner's, over HTTP with scripted servers."""

import asyncio
import math

import numpy as np
import pytest
from scripted_server import LOGPROB, Behave, Json, ScriptedServer, Status, Tokens

from copc_jax.rollout.client import RolloutError, SGLangClient
from copc_jax.rollout.gap import LogprobGap, Reference, decode_gap

IDS = [3, 4, 5, 6, 7]
ACTION = [False, False, True, True, False]


def reference(logprob=LOGPROB, ids=IDS, action=ACTION):
    values = np.full(len(ids), logprob, np.float32)
    return Reference(np.array(ids, np.int32), np.array(action), values)


def measure(servers, steps, *, limit=0.05, **settings):
    """Run a coroutine function with a client and a gap, where version 1 is published."""

    async def inside():
        settings.setdefault("backoff_s", 0.01)
        async with SGLangClient([server.url for server in servers], **settings) as client:
            gap = LogprobGap(client, limit=limit)
            await gap.publish("weights", 1)
            return await steps(gap)

    return asyncio.run(inside())


async def settled(gap):
    """Publish once more, which waits for what is being scored, and give the figures."""
    await gap.publish("weights", 100)
    return await gap.since_last()


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


def test_a_server_scores_the_action_tokens_of_what_the_learner_has_scored(server):
    server.scores = lambda ids: [-0.1 * token for token in ids]
    own = Reference(
        np.array(IDS, np.int32), np.array(ACTION), np.array([9, 9, -0.51, -0.63, 9], np.float32)
    )

    async def steps(gap):
        await gap.offer(1, [own])
        return await settled(gap)

    found = measure([server], steps)
    assert found["rollout/logprob_gap_tokens"] == 2 and found["rollout/logprob_gap_skipped"] == 0
    for name, value in {"mean": 0.02, "sd": 0.01, "p95": 0.029, "max": 0.03}.items():
        assert found[f"rollout/logprob_gap_{name}"] == pytest.approx(value, abs=1e-6)
    (body,) = server.sent("/generate")
    assert body["input_ids"] == IDS and body["logprob_start_len"] == 0 and body["return_logprob"]
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


def test_figures_are_of_what_was_compared_since_the_call_before(server):
    async def steps(gap):
        await gap.offer(1, [reference()])
        first = await settled(gap)
        return first, await gap.since_last()

    first, second = measure([server], steps)
    assert first["rollout/logprob_gap_tokens"] == 2
    assert second == {"rollout/logprob_gap_tokens": 0, "rollout/logprob_gap_skipped": 0}


def test_a_version_is_scored_before_servers_get_the_next_one(server):
    """Also when the learner had trained from it long before it was published."""

    async def steps(gap):
        await gap.offer(2, [reference(ids=[2, 2], action=[False, True])])
        await gap.offer(3, [reference(ids=[3, 3], action=[False, True])])
        for version in (2, 3, 4):
            await gap.publish("weights", version)
        return await gap.since_last()

    assert measure([server], steps)["rollout/logprob_gap_tokens"] == 2
    update = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert server.paths() == update * 2 + ["/generate", *update, "/generate", *update]
    assert [body["input_ids"][0] for body in server.sent("/generate")] == [2, 3]


def test_an_update_waits_for_what_is_being_scored(server):
    server.script("/generate", Behave(delay=0.3))

    async def steps(gap):
        await gap.offer(1, [reference()])
        return await settled(gap)

    assert measure([server], steps)["rollout/logprob_gap_tokens"] == 2


def test_while_servers_keep_a_version_they_are_asked_in_turn():
    with ScriptedServer() as one, ScriptedServer() as other:

        async def steps(gap):
            for _ in range(4):
                await gap.offer(1, [reference()])
                while not (found := await gap.since_last())["rollout/logprob_gap_tokens"]:
                    await asyncio.sleep(0.01)
            return found

        measure([one, other], steps)
        assert len(one.sent("/generate")) == len(other.sent("/generate")) == 2


def test_what_belongs_to_no_version_of_a_server_is_not_sent(server):
    async def steps(gap):
        await gap.publish("weights", 3)
        await gap.offer(2, [reference()])
        await gap.offer(4, [reference()])
        await gap.offer(3, [])
        return await settled(gap)

    assert measure([server], steps)["rollout/logprob_gap_tokens"] == 0
    assert server.sent("/generate") == []


def change(path, value):
    def edit(answer):
        answer["meta_info"][path] = value

    return Tokens([], change=edit)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Status(500), id="fault"),
        pytest.param(Status(400), id="refusal"),
        pytest.param(Status(200, "garbage"), id="no JSON"),
        pytest.param(Status(200, "{}"), id="empty"),
        pytest.param(change("weight_version", "default"), id="restarted"),
        pytest.param(change("weight_version", "7"), id="other version"),
    ],
)
def test_a_request_that_fails_is_counted_and_changes_nothing_else(server, fault):
    server.script("/generate", fault)

    async def steps(gap):
        await gap.offer(1, [reference(), reference()])
        return await settled(gap)

    found = measure([server], steps)
    assert found["rollout/logprob_gap_tokens"] == 2 and found["rollout/logprob_gap_skipped"] == 1


@pytest.mark.parametrize("value", [math.nan, None, 0.5, -math.inf])
def test_impossible_scores_are_not_compared(server, value):
    server.scores = lambda ids: [value] * len(ids)

    async def steps(gap):
        await gap.offer(1, [reference()])
        return await settled(gap)

    found = measure([server], steps)
    assert found["rollout/logprob_gap_tokens"] == 0 and found["rollout/logprob_gap_skipped"] == 1


def scores_of(ids):
    pairs = [[None if i == 0 else LOGPROB, token, None] for i, token in enumerate(ids)]
    return Json({"meta_info": {"input_token_logprobs": pairs, "weight_version": "1"}})


def test_scores_are_held_to_the_tokens_that_were_sent(server):
    async def steps(client):
        async with client:
            return await client.score(IDS, server.url)

    scores, version = asyncio.run(steps(SGLangClient([server.url])))
    assert scores.tolist() == [0.0, *[LOGPROB] * 4] and version == -1
    # SGLang 0.5.23 reports the last id of the vocabulary as 0.
    server.script("/generate", scores_of([3, 4, 0, 6, 7]))
    assert asyncio.run(steps(SGLangClient([server.url])))[0].tolist() == scores.tolist()
    for ids in ([3, 4, 4, 6, 7], IDS[:4], [*IDS, 8]):
        server.script("/generate", scores_of(ids))
        with pytest.raises(RolloutError, match="other tokens"):
            asyncio.run(steps(SGLangClient([server.url])))


def test_a_dead_server_stops_neither_scores_nor_updates():
    with ScriptedServer() as one, ScriptedServer() as other:

        async def steps(gap):
            other.stop()
            await gap.offer(1, [reference(), reference()])
            return await settled(gap)

        found = measure([one, other], steps)
    assert found["rollout/logprob_gap_tokens"] == 2 and found["rollout/logprob_gap_skipped"] == 1


def test_a_server_that_hangs_holds_an_update_up_for_one_time_out_only(server):
    server.script("/generate", Behave(delay=60.0))

    async def steps(gap):
        await gap.offer(1, [reference()])
        return await settled(gap)

    found = measure([server], steps, timeout_s=0.3)
    assert found["rollout/logprob_gap_skipped"] == 1 and server.version == "100"
    (body,) = server.sent("/generate")
    assert server.sent("/abort_request") == [{"rid": body["rid"]}]


def test_long_trajectories_are_scored_as_far_as_the_context_goes(server):
    async def steps(gap):
        await gap.offer(1, [reference()])
        return await settled(gap)

    assert measure([server], steps, context_length=4)["rollout/logprob_gap_tokens"] == 1
    assert server.sent("/generate")[0]["input_ids"] == IDS[:3]


def test_one_server_above_the_limit_is_an_error_that_names_it():
    with ScriptedServer() as one, ScriptedServer() as other:
        other.scores = lambda ids: [LOGPROB - 0.3] * len(ids)

        async def steps(gap):
            await gap.offer(1, [reference()] * 8)
            found = await settled(gap)
            await gap.check()
            return found

        async def again(gap):
            await gap.offer(1, [reference()] * 8)
            assert (await settled(gap))["rollout/logprob_gap_max"] == pytest.approx(0.3)
            await gap.offer(100, [reference()])

        with pytest.raises(RolloutError, match=r"rollout\.logprob_gap_limit") as refused:
            measure([one, other], steps, limit=0.2)
        with pytest.raises(RolloutError, match=r"rollout\.logprob_gap_limit"):
            measure([one, other], again, limit=0.2)
        assert other.url in str(refused.value) and one.url not in str(refused.value)
        assert "8 tokens" in str(refused.value) and "version 1" in str(refused.value)
        assert measure([one, other], steps, limit=math.inf)["rollout/logprob_gap_tokens"] == 16


def test_sampled_tokens_are_held_to_the_same_limit():
    near, far = np.float32([-1.0, -2.0]), np.float32([-1.0, -2.2])
    found = decode_gap(near, far, 5, 0.15)
    assert found["rollout/decode_gap_mean"] == pytest.approx(0.1)
    assert found["rollout/decode_gap_max"] == pytest.approx(0.2)
    assert decode_gap(near[:0], far[:0], 5, 0.15) == {"rollout/decode_gap_tokens": 0}
    with pytest.raises(RolloutError, match="2 tokens that version 5 sampled"):
        decode_gap(near, far - 0.1, 5, 0.15)
