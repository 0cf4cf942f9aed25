"""The SGLang client against scripted servers over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import time
from typing import Any

import aiohttp
import jax
import numpy as np
import pytest
from scripted_server import (
    Behave,
    Drop,
    Json,
    ScriptedRouter,
    ScriptedServer,
    Status,
    Tokens,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from copc_jax import hf
from copc_jax.model import ModelConfig, init
from copc_jax.rollout.client import (
    RolloutError,
    RolloutUnavailable,
    SamplingParams,
    SGLangClient,
    WeightUpdateError,
    parse_generation,
)

FAST = {"backoff_s": 0.02, "probe_interval_s": 0.1, "timeout_s": 5.0, "deadline_s": 8.0}


def drive(urls, script, **settings):
    """Run `await script(client)` with a client of `urls`, and return its result."""

    async def main():
        async with SGLangClient(urls, **(FAST | settings)) as client:
            return await script(client)

    return asyncio.run(main())


def generate(server, *, limit=3, seed=None, **settings):
    async def script(client):
        return await client.generate([1, 2], SamplingParams(limit), seed=seed)

    return drive([server.url], script, **settings)


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


def test_token_ids_go_in_and_out_with_logprobs_and_versions(server):
    server.version = "7"
    server.script("/generate", Tokens([5, 6, 9], [-0.25, -1.5, 0.0], finish="stop", matched=9))
    generation = generate(server, seed=11)
    assert generation.token_ids.tolist() == [5, 6, 9]
    assert generation.logprob.tolist() == [-0.25, -1.5, 0.0]
    assert generation.weight_version.tolist() == [7, 7, 7]
    assert (generation.finish, generation.matched) == ("stop", 9)
    (body,) = server.sent("/generate")
    assert body["input_ids"] == [1, 2] and "text" not in body
    assert body["return_logprob"] is True
    assert len(body["rid"]) == 32 and int(body["rid"], 16) >= 0
    expected = {"max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert body["sampling_params"] == expected | {"sampling_seed": 11}


def test_stops_are_sent_only_when_there_are_some():
    sampling = SamplingParams(4, stop=("</a>",), stop_token_ids=(3, 4))
    fields = sampling.to_json(2, None)
    assert (fields["stop"], fields["stop_token_ids"]) == (["</a>"], [3, 4])
    assert fields["max_new_tokens"] == 2 and "sampling_seed" not in fields


def edit(path: str, value: Any):
    """Return a function that sets a field of an answer, or deletes it for the value KeyError."""

    def change(answer: Any) -> None:
        *parents, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        for part in parents:
            answer = answer[part]
        if value is KeyError:
            del answer[last]
        else:
            answer[last] = value

    return change


PAIRS = "meta_info.output_token_logprobs"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(
            edit(PAIRS, [[-1.0, token, None] for token in range(5, 9)]),
            "output_ids",
            id="too few log-probs",
        ),
        pytest.param(edit("output_ids", [5, 6, 7, 8, 10]), "output_ids", id="other ids"),
        pytest.param(edit("meta_info.completion_tokens", 4), "completion_tokens", id="count"),
        pytest.param(edit(PAIRS, KeyError), "output_token_logprobs", id="no log-probs"),
        pytest.param(edit(PAIRS, None), "output_token_logprobs", id="null list"),
        pytest.param(edit(PAIRS + ".0", None), "pairs", id="null pair"),
        pytest.param(edit("meta_info", KeyError), "meta_info", id="no meta_info"),
        pytest.param(edit("meta_info.finish_reason", {"type": "error"}), "finish", id="finish"),
        pytest.param(edit("meta_info.weight_versions", [{"version": "1"}]), "versions", id="span"),
    ],
)
def test_contradicting_answers_are_refused_at_the_first_request(server, change, complaint):
    server.script("/generate", Tokens([5, 6, 7, 8, 9], change=change))
    with pytest.raises(RolloutError, match=complaint) as caught:
        generate(server, limit=5)
    assert not isinstance(caught.value, RolloutUnavailable)
    (body,) = server.sent("/generate")
    assert body["rid"] in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, None, 0.5, -math.inf])
def test_impossible_logprobs_are_refused(server, value):
    server.script("/generate", Tokens([5, 6, 7], [-1.0, value, -1.0]))
    with pytest.raises(RolloutError, match="log-prob of token 1") as caught:
        generate(server)
    assert server.sent("/generate")[0]["rid"] in str(caught.value)


def test_rounding_above_zero_is_zero(server):
    server.script("/generate", Tokens([5, 6, 7], [1e-6, -1.0, 0.0]))
    assert generate(server).logprob.tolist() == [0.0, -1.0, 0.0]


def answer(count: int, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": [4] * count,
        "meta_info": {
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": [[-1.0, 4, None]] * count,
            "completion_tokens": count,
            **meta,
        },
    }


def spans(*edges: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in edges]


def test_versions_come_from_spans_or_from_the_single_label():
    meta = {"weight_version": "9", "weight_versions": spans(("3", 0, 1), ("9", 1, 4))}
    assert parse_generation(answer(4, **meta), "r", 4).weight_version.tolist() == [3, 9, 9, 9]
    older = parse_generation(answer(2, weight_version="6"), "r", 4)
    assert older.weight_version.tolist() == [6, 6]
    unnamed = parse_generation(answer(2, weight_version="default"), "r", 4)
    assert unnamed.weight_version.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "bad",
    [
        spans(("1", 0, 2)),
        spans(("1", 0, 2), ("2", 3, 4)),
        spans(("1", 0, 3), ("2", 2, 4)),
        spans(("1", 0, 5)),
        [],
    ],
)
def test_spans_must_cover_the_tokens(bad):
    with pytest.raises(RolloutError, match="request abc: weight_versions"):
        parse_generation(answer(4, weight_versions=bad), "abc", 4)


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(RolloutError, match="5 tokens for max_new_tokens 4"):
        parse_generation(answer(5, weight_version="1"), "r", 4)


def test_an_abort_that_means_refusal_is_not_resumed():
    refused = answer(0, weight_version="1")
    refused["meta_info"]["finish_reason"] = {"type": "abort", "message": "x", "status_code": 400}
    with pytest.raises(RolloutError, match="refused"):
        parse_generation(refused, "r", 4)


# ---------------------------------------------------------------- updates under generations


async def publish_inside(client, server, count=6):
    """Publish version 1, then version 2 while a generation of `count` tokens runs."""
    await client.publish("/w/1", 1)
    task = asyncio.create_task(client.generate([1, 2], SamplingParams(count), seed=3))
    while not server.running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    await client.publish("/w/2", 2)
    return await task


def test_every_token_keeps_the_version_that_sampled_it(server):
    server.script("/generate", Tokens([1, 2, 3, 4, 5, 6], seconds=1.2))
    generation = drive([server.url], lambda client: publish_inside(client, server))
    versions = generation.weight_version
    assert generation.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert versions[0] == 1 and versions[-1] == 2 and (np.diff(versions) >= 0).all()
    assert len(server.sent("/generate")) == 1


def test_a_generation_cut_by_an_update_is_resumed_from_its_tokens(server):
    # With a server that can only abort.
    server.script("/generate", Tokens([11, 12, 13, 14, 15, 16], seconds=1.2), Behave())
    generation = drive(
        [server.url], lambda client: publish_inside(client, server), pause_mode="abort"
    )
    first, second = server.sent("/generate")
    kept = len(second["input_ids"]) - 2
    assert 0 < kept < 6
    assert second["input_ids"] == [1, 2, *range(11, 11 + kept)]
    assert second["sampling_params"]["max_new_tokens"] == 6 - kept
    assert second["rid"] != first["rid"]
    # Noise of the first part must not be used again.
    seeds = [body["sampling_params"]["sampling_seed"] for body in (first, second)]
    assert seeds[0] == 3 and seeds[1] != 3
    assert len(generation.token_ids) == len(generation.logprob) == 6
    assert generation.weight_version.tolist() == [1] * kept + [2] * (6 - kept)
    assert generation.finish == "length"


def test_an_abort_without_tokens_is_sent_again(server):
    server.script("/generate", Tokens([], finish="abort"), Tokens([], finish="abort"))

    async def script(client):
        generation = await client.generate([1], SamplingParams(2))
        return generation, client.counters

    generation, counters = drive([server.url], script)
    assert len(generation.token_ids) == 2 and generation.finish == "length"
    assert (counters.aborts, counters.requests, counters.tokens) == (2, 3, 2)


def test_abort_all_hands_out_what_was_sampled(server):
    server.script("/generate", Tokens([5] * 50, seconds=5.0))

    async def script(client):
        task = asyncio.create_task(client.generate([1], SamplingParams(50)))
        while not server.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.4)
        await client.abort_all()
        return await task

    generation = drive([server.url], script)
    assert generation.finish == "abort"
    assert 0 < len(generation.token_ids) < 50
    assert len(server.sent("/generate")) == 1


def test_a_cancelled_generation_is_aborted_on_the_server(server):
    server.script("/generate", Tokens([5] * 50, seconds=5.0))

    async def script(client):
        task = asyncio.create_task(client.generate([1], SamplingParams(50)))
        while not server.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    drive([server.url], script)
    (body,) = server.sent("/generate")
    assert {"rid": body["rid"]} in server.sent("/abort_request")


# ---------------------------------------------------------------- faults


def test_256_requests_are_in_flight_at_once(server):
    # None is answered before all have come.
    async def script(client):
        async with aiohttp.ClientSession(server.url) as session:
            await session.post("/pause_generation", json={"mode": "in_place"})
            requests = [client.generate([1], SamplingParams(1)) for _ in range(256)]
            answers = asyncio.gather(*requests)
            while server.running < 256:
                await asyncio.sleep(0.01)
            await session.post("/continue_generation", json={})
            return await answers

    assert len(drive([server.url], script, timeout_s=60.0, deadline_s=60.0)) == 256


def test_the_connection_limit_is_a_setting(server):
    server.policy = lambda body: Tokens([5], seconds=0.05)

    async def script(client):
        await asyncio.gather(*(client.generate([1], SamplingParams(1)) for _ in range(16)))

    drive([server.url], script, max_connections=4)
    assert server.peak == 4


def test_a_timed_out_request_is_aborted_before_its_retry(server):
    server.script("/generate", Tokens([5] * 3, seconds=4.0))

    async def script(client):
        generation = await client.generate([1, 2], SamplingParams(3))
        return generation, client.counters

    generation, counters = drive([server.url], script, timeout_s=1.0)
    first, second = server.sent("/generate")
    assert server.paths() == ["/generate", "/abort_request", "/generate"]
    assert server.sent("/abort_request") == [{"rid": first["rid"]}]
    assert second["rid"] != first["rid"]
    assert server.finished == [second["rid"]] and len(generation.token_ids) == 3
    assert (counters.timeouts, counters.retries) == (1, 1)


@pytest.mark.parametrize(
    "fault",
    [Status(503), Status(500), Status(429), Drop(), Status(200, "<html>not JSON")],
    ids=["503", "500", "429", "dropped connection", "garbage"],
)
def test_faults_that_pass_are_retried(server, fault):
    server.script("/generate", fault, fault)
    assert generate(server).token_ids.tolist() == [3, 4, 5]
    assert len(server.sent("/generate")) == 3


@pytest.mark.parametrize("fault", [Status(503), Drop(), Status(200, "garbage")])
def test_faults_that_stay_end_after_the_retries(server, fault):
    server.script("/generate", *[fault] * 10)
    with pytest.raises(RolloutUnavailable, match="given up after 3 failed attempts"):
        generate(server, retries=2, unhealthy_after=100)
    assert len(server.sent("/generate")) == 3


@pytest.mark.parametrize("code", [400, 403, 404, 422])
def test_refusals_are_not_retried(server, code):
    server.script("/generate", Status(code, "no way"))
    with pytest.raises(RolloutError, match=f"answered {code}: no way") as caught:
        generate(server)
    assert not isinstance(caught.value, RolloutUnavailable)
    assert len(server.sent("/generate")) == 1


def test_a_closed_port_is_an_error_within_the_deadline():
    with ScriptedServer() as server:
        pass
    start = time.monotonic()
    with pytest.raises(RolloutUnavailable, match=server.url):
        generate(server, deadline_s=0.8, retries=1000)
    assert time.monotonic() - start < 3.0


def test_a_server_that_hangs_is_an_error_within_the_deadline(server):
    server.script("/generate", *[Tokens([5], delay=30.0)] * 100)
    start = time.monotonic()
    with pytest.raises(RolloutUnavailable):
        generate(server, timeout_s=0.2, deadline_s=1.0, retries=1000)
    assert time.monotonic() - start < 4.0


@pytest.mark.parametrize("length", [96, 100])
def test_a_prompt_that_fills_the_context_is_not_sent(server, length):
    async def script(client):
        generation = await client.generate([1] * length, SamplingParams(8))
        return generation, client.counters.too_long

    generation, too_long = drive([server.url], script, context_length=96)
    assert (len(generation.token_ids), generation.finish, too_long) == (0, "length", 1)
    assert server.sent("/generate") == []


def test_no_more_is_asked_for_than_the_context_holds():
    with ScriptedServer(context_length=10) as server:

        async def script(client):
            await client.check()
            return await client.generate([1] * 7, SamplingParams(8))

        generation = drive([server.url], script)
    assert (len(generation.token_ids), generation.finish) == (3, "length")


# ---------------------------------------------------------------- weight updates


def test_publish_updates_every_server_in_order():
    with ScriptedServer() as one, ScriptedServer() as two:

        async def script(client):
            assert client.published_version is None
            await client.publish("/w/12", 12)
            return client.published_version, await client.versions()

        published, versions = drive([one.url, two.url], script)
        assert published == 12 and versions == {one.url: 12, two.url: 12}
        for server in (one, two):
            assert server.paths() == [
                "/pause_generation",
                "/update_weights_from_disk",
                "/continue_generation",
            ]
            assert server.sent("/pause_generation") == [{"mode": "retract"}]
            (update,) = server.sent("/update_weights_from_disk")
            # Nothing is aborted, no old cache serves new requests.
            assert update == {
                "model_path": "/w/12",
                "weight_version": "12",
                "flush_cache": True,
                "abort_all_requests": False,
            }
            assert not server.paused


UPDATE = "/update_weights_from_disk"


@pytest.mark.parametrize(
    ("path", "fault", "complaint"),
    [
        (UPDATE, Json({"success": False, "message": "half of the tensors"}), "half of the tensors"),
        (UPDATE, Status(400, '{"success":false,"message":"bad path"}'), "bad path"),
        (UPDATE, Status(200, "fine"), "refused"),
        (UPDATE, Json({"success": True}), "shows version 'default' instead of 5"),
        (UPDATE, Behave(delay=3.0), "no answer within"),
        ("/model_info", Json({"weight_version": "4"}), "shows version '4' instead of 5"),
        ("/pause_generation", Status(400, "bad mode"), "bad mode"),
        ("/continue_generation", Status(400, "no"), "did not continue"),
    ],
)
def test_a_failed_update_continues_and_does_not_advance(server, path, fault, complaint):
    server.script(path, fault)

    async def script(client):
        with pytest.raises(WeightUpdateError, match=complaint):
            await client.publish("/w/5", 5)
        failed = client.published_version
        paths = server.paths()
        await client.publish("/w/5", 5)
        return (
            failed,
            paths,
            client.published_version,
            await client.generate([1], SamplingParams(2)),
        )

    failed, paths, published, generation = drive([server.url], script, update_timeout_s=1.0)
    assert failed is None and paths[-1] == "/continue_generation"
    assert published == 5 and not server.paused
    assert generation.weight_version.tolist() == [5, 5]


def test_a_passing_fault_of_an_update_is_retried(server):
    server.script(UPDATE, Status(503), Drop())
    drive([server.url], lambda client: client.publish("/w/1", 1))
    assert server.loaded == ["/w/1"]


def test_after_a_failed_update_the_published_weights_come_back_first(server):
    # What a refused update left in the server is unknown, whatever version it shows.
    async def script(client):
        await client.publish("/w/1", 1)
        running = asyncio.create_task(client.generate([1], SamplingParams(4)))
        while not server.running:
            await asyncio.sleep(0.01)
        server.script(UPDATE, Json({"success": False, "message": "out of memory"}))
        with pytest.raises(WeightUpdateError):
            await client.publish("/w/2", 2)
        return await running, client.published_version

    server.script("/generate", Tokens([5] * 4, seconds=0.4))
    generation, published = drive([server.url], script)
    assert published == 1 and server.loaded == ["/w/1", "/w/1"]
    assert generation.weight_version.tolist() == [1] * 4
    assert len(server.sent("/generate")) == 2


def test_a_cancelled_update_leaves_no_server_paused(server):
    server.script(UPDATE, Behave(delay=5.0))

    async def script(client):
        task = asyncio.create_task(client.publish("/w/1", 1))
        while not server.sent(UPDATE):
            await asyncio.sleep(0.01)
        assert server.paused
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return client.published_version

    assert drive([server.url], script) is None
    assert not server.paused


def test_two_updates_do_not_interleave(server):
    server.script(UPDATE, Behave(delay=0.2))

    async def script(client):
        await asyncio.gather(client.publish("/w/1", 1), client.publish("/w/2", 2))

    drive([server.url], script)
    update = ["/pause_generation", UPDATE, "/continue_generation"]
    assert server.paths() == update * 2 and server.loaded == ["/w/1", "/w/2"]


def test_versions_do_not_go_back(server):
    async def script(client):
        await client.publish("/w/3", 3)
        with pytest.raises(ValueError, match="version must be at least 3, got 2"):
            await client.publish("/w/2", 2)

    drive([server.url], script)


def test_frozen_requests_keep_their_cache_and_versions_their_own(server):
    async def script(client):
        await client.publish("/w/1", 1)
        await client.generate([1], SamplingParams(1))

    drive([server.url], script, pause_mode="in_place")
    assert server.sent(UPDATE)[0]["flush_cache"] is False
    assert server.sent("/generate")[0]["extra_key"] == "1"


# ---------------------------------------------------------------- several servers, restarts


def test_started_weights_are_version_zero_until_the_first_publish(server):
    assert generate(server).weight_version.tolist() == [0, 0, 0]


def test_the_first_publish_may_come_while_requests_run(server):
    server.script("/generate", Tokens([5, 6, 7, 8], seconds=1.2))

    async def script(client):
        task = asyncio.create_task(client.generate([1], SamplingParams(4)))
        while not server.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await client.publish("/w/1", 1)
        return await task

    versions = drive([server.url], script).weight_version.tolist()
    assert versions[0] == 0 and versions[-1] == 1


@pytest.mark.parametrize("label", ["default", "3", "99", "other"])
def test_a_server_with_other_weights_gets_the_published_ones_before_use(server, label):
    events = []

    async def script(client):
        await client.publish("/w/4", 4)
        server.stop()
        server.start()
        server.version = label
        return await client.generate([1], SamplingParams(2)), client.counters

    generation, counters = drive([server.url], script, on_event=lambda *event: events.append(event))
    assert generation.weight_version.tolist() == [4, 4]
    assert counters.foreign == 1 and counters.tokens == 2
    assert server.loaded == ["/w/4", "/w/4"]
    assert [event for event, _, _ in events] == ["unhealthy", "foreign weights", "readmitted"]


def test_a_dead_server_is_skipped_and_comes_back_with_the_weights():
    with ScriptedServer() as one, ScriptedServer() as two:

        async def script(client):
            await client.publish("/w/1", 1)
            two.stop()
            await asyncio.gather(*(client.generate([1], SamplingParams(1)) for _ in range(6)))
            assert client.health()[one.url] == "ok" and "failed" in client.health()[two.url]
            await client.publish("/w/2", 2)
            assert client.published_version == 2
            before = len(two.sent("/generate"))
            two.start()
            async with asyncio.timeout(5):
                while client.health()[two.url] != "ok":
                    await asyncio.sleep(0.05)
            generations = await asyncio.gather(
                *(client.generate([1], SamplingParams(1)) for _ in range(6))
            )
            return generations, len(two.sent("/generate")) - before

        generations, served = drive([one.url, two.url], script)
        assert {g.weight_version.item() for g in generations} == {2}
        assert served > 0 and two.version == "2"


def test_an_update_waits_for_a_server_that_is_restarting(server):
    async def script(client):
        await client.publish("/w/1", 1)
        server.stop()
        task = asyncio.create_task(client.publish("/w/2", 2))
        await asyncio.sleep(0.3)
        server.start()
        await task
        return client.published_version

    assert drive([server.url], script) == 2
    assert server.version == "2"


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
)
def test_a_server_that_dies_in_the_middle_of_an_update_gets_it_when_it_is_back(server, path):
    async def script(client):
        await client.publish("/w/1", 1)
        server.script(path, Behave(delay=60.0))
        already = len(server.sent(path))
        task = asyncio.create_task(client.publish("/w/2", 2))
        while len(server.sent(path)) == already:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(server.stop)
        # Time for it to be found dead: nobody listens.
        await asyncio.sleep(0.3)
        server.start()
        await task
        return client.published_version

    assert drive([server.url], script) == 2
    assert server.version == "2" and not server.paused


def test_an_update_without_any_server_is_an_error_within_the_deadline():
    with ScriptedServer() as server:
        pass
    with pytest.raises(WeightUpdateError, match=server.url):
        drive([server.url], lambda client: client.publish("/w/1", 1), deadline_s=0.5)


def test_load_is_spread_and_a_key_stays_with_its_server():
    with ScriptedServer() as one, ScriptedServer() as two:

        async def script(client):
            for index in (1, 1, 2, 1, 2, 2):
                await client.generate([index], SamplingParams(1), key=f"episode {index}")
            for _ in range(4):
                await client.generate([9], SamplingParams(1))

        drive([one.url, two.url], script)
        prompts = [sorted(body["input_ids"][0] for body in s.sent("/generate")) for s in (one, two)]
        assert prompts == [[1, 1, 1, 9, 9], [2, 2, 2, 9, 9]]


def test_a_key_moves_when_its_server_dies():
    with ScriptedServer() as one, ScriptedServer() as two:

        async def script(client):
            await client.generate([1], SamplingParams(1), key="a")
            first, other = (one, two) if one.requests else (two, one)
            first.stop()
            await client.generate([1], SamplingParams(1), key="a")
            return len(other.sent("/generate"))

        assert drive([one.url, two.url], script) == 1


# ---------------------------------------------------------------- routers


@contextlib.contextmanager
def routed():
    with (
        ScriptedServer() as one,
        ScriptedServer() as two,
        ScriptedRouter([one.url, two.url]) as router,
    ):
        yield router, one, two


@pytest.mark.parametrize("given", [True, False])
def test_behind_a_router_weights_and_aborts_go_to_each_worker(given):
    with routed() as (router, one, two):

        async def script(client):
            await client.check()
            await client.publish("/w/2", 2)
            calls = [client.generate([1], SamplingParams(2), key="k") for _ in range(4)]
            generations = await asyncio.gather(*calls)
            await client.abort_all()
            return generations

        control = {"control_urls": [one.url, two.url]} if given else {}
        generations = drive([router.url], script, **control)
        assert {v for g in generations for v in g.weight_version.tolist()} == {2}
        assert len(router.sent("/generate")) == 4
        headers = [r.headers for r in router.requests if r.path == "/generate"]
        assert all(h["X-SMG-Routing-Key"] == "k" for h in headers)
        for worker in (one, two):
            assert worker.loaded == ["/w/2"] and not worker.paused
            assert len(worker.sent("/generate")) == 2
            assert {"abort_all": True} in worker.sent("/abort_request")


def test_a_worker_that_restarted_behind_a_router_gets_the_weights():
    with routed() as (router, _, two):

        async def script(client):
            await client.check()
            await client.publish("/w/2", 2)
            two.stop()
            two.start()
            return [await client.generate([1], SamplingParams(1)) for _ in range(4)]

        generations = drive([router.url], script)
        assert [g.weight_version.item() for g in generations] == [2] * 4
        assert two.loaded == ["/w/2"] * 2


# ---------------------------------------------------------------- bad input


def test_check_accepts_servers_and_learns_the_context(server):
    async def script(client):
        await client.check()
        return client.context_length

    assert drive([server.url], script) == 4096


def test_check_tells_a_closed_port():
    with ScriptedServer() as server:
        pass
    with pytest.raises(RolloutError, match=f"no rollout server answers at {server.url}"):
        drive([server.url], lambda client: client.check())


@pytest.mark.parametrize(
    "info", [Status(404, "nothing here"), Status(200, "<html>"), Json({"model": "x"}), Json([1])]
)
def test_check_tells_a_server_that_is_no_sglang(server, info):
    server.script("/model_info", info)
    with pytest.raises(RolloutError, match=f"{server.url} is not an SGLang server: .*model_info"):
        drive([server.url], lambda client: client.check())


def test_check_waits_for_a_server_that_starts(server):
    server.stop()

    async def script(client):
        task = asyncio.create_task(client.check(wait_s=5.0))
        await asyncio.sleep(0.2)
        server.start()
        await task

    drive([server.url], script)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)]
)
def test_training_refuses_sampling_that_bends_the_ratios(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .* for training rollouts, got {value}"):
        SamplingParams(4, **{field: value}).for_training()


def test_neutral_sampling_trains():
    sampling = SamplingParams(4, stop=("x",))
    assert sampling.for_training() is sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("min_p", -0.1),
    ],
)
def test_sampling_out_of_range_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**({"max_new_tokens": 4} | {field: value}))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"urls": []}, "urls"),
        ({"urls": ["localhost:1"]}, "urls"),
        ({"urls": ["http://a", "http://b"], "control_urls": ["http://c"]}, "control_urls"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"retries": -1}, "retries"),
        ({"max_connections": -1}, "max_connections"),
    ],
)
def test_client_settings_out_of_range_name_the_field(settings, name):
    with pytest.raises(ValueError, match=name):
        SGLangClient(**({"urls": ["http://127.0.0.1:1"]} | settings))


def test_an_empty_prompt_is_refused_before_it_is_sent(server):
    # SGLang's scheduler dies of one.
    async def script(client):
        with pytest.raises(ValueError, match="token_ids"):
            await client.generate([], SamplingParams(1))

    drive([server.url], script)
    assert server.requests == []


# ---------------------------------------------------------------- the embedded server


@pytest.fixture
def embedded(tmp_path):
    """Yield the address of an embedded server, and two folders of different weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    config = ModelConfig(len(alphabet), 16, 32, 1, 2, 1, 8)
    for version in (1, 2):
        params = init(jax.random.key(version), config)
        hf.save_hf(tmp_path / f"v{version}", params, config, tokenizer_json=tokenizer.to_str())
    port_file = tmp_path / "port"
    arguments = {
        "--model-path": tmp_path / "v1",
        "--port": 0,
        "--port-file": port_file,
        "--slots": 4,
        "--max-length": 1024,
        "--prefill-rows": 4,
        "--prefill-chunks": 32,
        "--attend": "",
        "--parent-pid": os.getpid(),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "copc_jax.rollout.server"]
        + [str(part) for pair in arguments.items() for part in pair],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        give_up = time.monotonic() + 180
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.1)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        yield url, tmp_path / "v1", tmp_path / "v2"
    finally:
        process.terminate()
        process.wait(20)


async def used_tokens(url: str, count: int) -> None:
    """Wait until a server holds at least so many tokens of running requests."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/v1/loads") as reply:
                if (await reply.json())["loads"][0]["num_used_tokens"] >= count:
                    return


def test_the_embedded_server_is_driven_alike(embedded):
    url, first, second = embedded

    async def script(client):
        await client.check()
        await client.publish(first, 1)
        seeded = [await client.generate([1, 2], SamplingParams(8), seed=5) for _ in range(2)]
        task = asyncio.create_task(client.generate([1, 2], SamplingParams(900), seed=6))
        await used_tokens(url, 40)
        await client.publish(second, 2)
        return client.context_length, seeded, await task, await client.versions()

    context, seeded, long, versions = drive([url], script, timeout_s=60.0, deadline_s=60.0)
    assert context == 1024 and versions == {url: 2}
    assert seeded[0].token_ids.tolist() == seeded[1].token_ids.tolist()
    assert seeded[0].weight_version.tolist() == [1] * 8
    assert len(long.token_ids) == 900 and long.finish == "length"
    assert long.weight_version[0] == 1 and long.weight_version[-1] == 2
    assert np.isfinite(long.logprob).all() and (long.logprob <= 0).all()
