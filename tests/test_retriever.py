"""BM25, the Search-R1 wire format on both sides, and corpora."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from copc_jax.tools.retriever import (
    HttpRetriever,
    Passage,
    QueryRefused,
    RetrieverError,
    TantivyRetriever,
    build_app,
    query_words,
    read_corpus,
    write_corpus,
)

CORPUS = [
    Passage("sz", "Switzerland", "The capital of Switzerland is Bern."),
    Passage("sz2", "Switzerland", "The internet code of Switzerland is .ch."),
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("br", "Brazil", "The capital of Brazil is Brasília."),
    Passage("iv", "Cote d'Ivoire", "The anthem of Cote d'Ivoire is L'Abidjanaise."),
]


@pytest.fixture(scope="module")
def retriever():
    return TantivyRetriever(CORPUS)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("capital Bern", "sz"),
        ("internet code .ch", "sz2"),
        ("CAPITALS of brasilia", "br"),
        ("capital Brasília", "br"),
        ("anthem Cote d'Ivoire", "iv"),
    ],
)
def test_the_right_passage_comes_first(retriever, query, first):
    found = retriever.lookup(query, 3)
    assert found[0].id == first
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)


@pytest.mark.parametrize(
    "query", ['What is "x', "a:b AND (", "NOT", "capital^9 OR -Bern", "contents:[a TO", "\0 \\"]
)
def test_text_of_a_model_is_never_query_syntax(retriever, query):
    assert isinstance(retriever.lookup(query, 2), list)


def test_operators_are_words(retriever):
    assert retriever.lookup("NOT capital Bern", 1)[0].id == "sz"


@pytest.mark.parametrize("query", ["", "  ", ".,!?", "🙂"])
def test_a_query_without_a_word_finds_nothing(retriever, query):
    assert query_words(query) == []
    assert asyncio.run(retriever.search([query, "Bern"], 2))[0] == []


def test_no_more_than_topk_and_topk_is_checked(retriever):
    assert len(retriever.lookup("capital", 2)) == 2
    with pytest.raises(ValueError, match="topk must be at least 1"):
        retriever.lookup("capital", 0)


def test_equal_scores_rank_in_corpus_order():
    same = [Passage(str(i), f"thing{i}", "same words") for i in range(50)]
    ranks = [[p.id for p in TantivyRetriever(same).lookup("same words", 5)] for _ in range(2)]
    assert ranks == [["0", "1", "2", "3", "4"]] * 2


def test_ties_beyond_the_first_look_still_rank_in_corpus_order():
    crowd = [Passage(str(i), "thing", "same words") for i in range(6000)]
    last = Passage("x", "thing", "same words, and more words")
    assert [p.id for p in TantivyRetriever([last, *crowd]).lookup("same", 3)] == ["0", "1", "2"]


def test_contents_survive_as_the_corpus_has_them():
    for contents in ('"T"\ntext', "no title at all", '"T"\n text \n', "T\ntext", ""):
        assert Passage.from_contents("1", contents).contents == contents
    assert Passage.from_contents("1", "T\ntext") != Passage.from_contents("1", '"T"\ntext')


def test_the_cache_changes_no_answer_and_stays_small():
    small = TantivyRetriever(CORPUS, cache_size=2)
    queries = ["Bern", "Paris", "anthem", "Bern", "capital", "Paris"]
    cached = [small.lookup(query, 2) for query in queries]
    cached[0].clear()  # The caller owns the list.
    assert [small.lookup(query, 2) for query in queries] == [
        TantivyRetriever(CORPUS).lookup(query, 2) for query in queries
    ]
    assert len(small._cache) <= 2


def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match="no passages"):
        TantivyRetriever([])


def test_a_corpus_comes_back_as_written(tmp_path):
    path = tmp_path / "corpus.jsonl"
    corpus = [*CORPUS, Passage("q", 'The "quoted" one', "First line.\nSecond line.")]
    write_corpus(path, corpus)
    assert read_corpus(path) == corpus
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {
        "id": "sz",
        "contents": '"Switzerland"\nThe capital of Switzerland is Bern.',
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "2", "contents": ', "corpus.jsonl:3: not JSON"),
        ("[1, 2]", "jsonl:3: needs an object"),
        ('{"id": "2"}', "jsonl:3: needs an object with 'id' and 'contents'"),
        ('{"id": 1.5, "contents": "a"}', "jsonl:3: 'id' must be a string or an integer, not 1.5"),
        ('{"id": "2", "contents": ["a"]}', "jsonl:3: 'contents' must be a string, not"),
        ('{"id": "2", "contents": "\\ud800"}', "jsonl:3: half of a surrogate pair"),
        ("[" * 100_000, "jsonl:3: not JSON"),
    ],
)
def test_a_bad_corpus_line_is_named(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": 1, "contents": "a\\nb"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_corpus(path)
    assert str(path) in str(error.value)


@contextlib.contextmanager
def serve(corpus, *arguments):
    command = [sys.executable, "-m", "copc_jax.tools.retriever", "serve"]
    process = subprocess.Popen(
        [*command, "--corpus", str(corpus), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, CORPUS)
    with serve(path) as (process, line):
        assert line.startswith("ready http://"), process.stderr.read()
        assert line.strip().endswith("with 5 passages")
        yield line.split()[1]


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/retrieve", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_server_answers_as_clients_of_search_r1_expect(url):
    queries = ["capital Bern", "capital Paris"]
    status, scored = post(url, {"queries": queries, "topk": 2, "return_scores": True})
    assert status == 200
    assert [len(items) for items in scored["result"]] == [2, 2]
    best = scored["result"][0][0]
    assert best["document"] == {"id": "sz", "contents": CORPUS[0].contents}
    assert best["score"] > scored["result"][0][1]["score"]
    _, plain = post(url, {"queries": queries, "topk": 2, "return_scores": False})
    assert plain["result"] == [[item["document"] for item in row] for row in scored["result"]]
    _, default = post(url, {"queries": ["capital"], "topk": None})
    assert len(default["result"][0]) == 3
    assert post(url, {"queries": []}) == (200, {"result": []})
    with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
        health = json.load(response)
    assert (health["status"], health["engine"], health["passages"]) == ("ok", "tantivy", 5)
    assert health["requests"] >= 4 and health["failed"] == 0


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([1], "must be an object"),
        ({}, "'queries' must be"),
        ({"queries": "capital"}, "'queries' must be"),
        ({"queries": [1]}, "'queries' must be"),
        ({"queries": ["a"] * 513}, "at most 512"),
        ({"queries": ["a"], "topk": 0}, "'topk' must be"),
        ({"queries": ["a"], "topk": True}, "'topk' must be"),
        ({"queries": ["a"], "topk": 101}, "'topk' must be an integer from 1 to 100"),
        ({"queries": ["a"], "return_scores": "yes"}, "'return_scores' must be"),
        ({"queries": ["a", "b" * 8193]}, "'queries'[1] has 8193 characters, at most 8192"),
        ({"queries": ["\ud800"]}, "'queries'[0] is no text: surrogates not allowed"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_requests_get_a_clear_4xx(url, body, complaint):
    status, answer = post(url, body)
    assert status == 400
    assert complaint in answer["error"]


def test_other_refusals_are_json_too(url):
    assert post(url, b" " * (4 * 1024 * 1024 + 1))[0] == 413
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"{url}/retrieve", timeout=30).close()
    assert post(f"{url}/elsewhere", {})[0] == 404
    assert "POST /retrieve" in post(f"{url}/elsewhere", {})[1]["error"]


def test_requests_at_a_time_are_answered_each_with_its_own(url):
    queries = ["capital Bern", "capital Paris", "anthem", "internet code"] * 16

    async def ask():
        async with HttpRetriever(url) as client:
            return await asyncio.gather(*(client.search([query], 1) for query in queries))

    firsts = [rows[0][0].id for rows in asyncio.run(ask())]
    assert firsts == ["sz", "fr", "iv", "sz2"] * 16


class Slow:
    """A retriever that waits until it is told to answer, or fails."""

    def __init__(self):
        self.release = asyncio.Event()

    async def search(self, queries, topk):
        if queries == ["broken"]:
            raise RetrieverError("the engine is away")
        await self.release.wait()
        return [[] for _ in queries]

    async def close(self):
        pass


def test_too_many_requests_and_a_failing_engine_have_statuses_of_their_own():
    async def ask():
        slow = Slow()
        async with TestClient(TestServer(build_app(slow, max_waiting=2))) as client:

            async def send(query):
                async with client.post("/retrieve", json={"queries": [query]}) as response:
                    return response.status, await response.json()

            failed = await send("broken")
            waiting = [asyncio.create_task(send("a")) for _ in range(5)]
            refused = [await task for task in waiting[2:]]
            slow.release.set()
            answered = [await task for task in waiting[:2]]
            health = await (await client.get("/health")).json()
            return failed, refused, answered, health

    failed, refused, answered, health = asyncio.run(ask())
    assert failed == (503, {"error": "the engine is away"})
    assert [status for status, _ in refused] == [429] * 3
    assert answered == [(200, {"result": [[]]})] * 2
    assert health == {"status": "ok", "requests": 6, "refused": 3, "failed": 1}


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_the_client_reads_what_the_server_says(url, retriever, path):
    queries = ["capital Bern", "", "capital Paris", "..."]

    async def ask():
        async with HttpRetriever(url + path) as client:
            return await client.search(queries, 2), await client.search(["", "?"], 2)

    found, empty = asyncio.run(ask())
    expected = [retriever.lookup(query, 2) for query in queries]
    assert [[p.id for p in row] for row in found] == [[p.id for p in row] for row in expected]
    assert found[0][0] == expected[0][0]
    assert empty == [[], []]


def test_the_client_outlives_an_event_loop(url):
    client = HttpRetriever(url)

    async def ask():
        found = await client.search(["capital Bern"], 1)
        await client.close()
        return found[0][0].id

    assert [asyncio.run(ask()), asyncio.run(ask())] == ["sz", "sz"]


@contextlib.contextmanager
def answering(handler):
    """A server on loopback whose /retrieve is `handler`."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/retrieve", handler)
    runner = web.AppRunner(app)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def search_once(url, queries, timeout_s=5.0):
    async with HttpRetriever(url, timeout_s=timeout_s) as client:
        return await client.search(queries, 2)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (web.Response(status=500, text="boom"), "status 500: boom"),
        (web.Response(text="<html>"), "JSONDecodeError"),
        (web.json_response([1]), "expected 1 lists"),
        (web.json_response({"result": []}), "expected 1 lists"),
        (web.json_response({"result": [[{"score": 1.0}]]}), "without document"),
        (web.json_response({"result": [["text"]]}), "without document"),
        (web.json_response({"result": [7]}), "without document"),
    ],
)
def test_faults_of_a_server_are_retriever_errors(answer, complaint):
    async def handler(_):
        return answer

    with answering(handler) as url, pytest.raises(RetrieverError, match=complaint):
        asyncio.run(search_once(url, ["capital"]))


@pytest.mark.parametrize("fault", [(503, True), (429, True), (400, False), (None, True)])
def test_an_engine_that_has_answered_is_asked_again_until_it_does(fault):
    status, passes = fault
    asked = []

    async def handler(request):
        asked.append(await request.json())
        if len(asked) == 2 and status is None:
            request.transport.close()
        if len(asked) == 2 and status is not None:
            return web.Response(status=status, text="not now")
        return web.json_response({"result": [[]]})

    async def search():
        async with HttpRetriever(url, timeout_s=5.0) as client:
            return [await client.search([query], 1) for query in ("first", "second")]

    with answering(handler) as url:
        if passes:
            assert asyncio.run(search()) == [[[]], [[]]]
            assert [body["queries"] for body in asked] == [["first"], ["second"], ["second"]]
        else:
            with pytest.raises(QueryRefused, match="status 400: not now"):
                asyncio.run(search())
            assert len(asked) == 2


def test_patience_with_an_engine_ends():
    async def search():
        async with HttpRetriever(url, patience_s=0.5) as client:
            await client.search(["first"], 1)
            stop()
            await client.search(["second"], 1)

    async def handler(_):
        return web.json_response({"result": [[]]})

    with contextlib.ExitStack() as stack:
        url = stack.enter_context(answering(handler))
        stop = stack.pop_all().close
        with pytest.raises(RetrieverError, match="/retrieve: Client"):
            asyncio.run(search())


def test_scores_are_always_asked_for():
    # The reference server fails without, and silently answers wrongly for exactly two queries.
    bodies = []

    async def handler(request):
        bodies.append(await request.json())
        return web.json_response({"result": [[], []]})

    with answering(handler) as url:
        assert asyncio.run(search_once(url, ["a", "", "b"])) == [[], [], []]
    assert bodies == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_a_silent_server_times_out():
    async def handler(_):
        await asyncio.sleep(1.0)
        return web.json_response({"result": [[]]})

    with answering(handler) as url, pytest.raises(RetrieverError, match="Timeout"):
        asyncio.run(search_once(url, ["a"], timeout_s=0.1))


def test_a_closed_port_is_an_error():
    with pytest.raises(RetrieverError, match=r"127\.0\.0\.1:9/retrieve"):
        asyncio.run(search_once("http://127.0.0.1:9", ["a"]))


def test_a_url_needs_its_scheme():
    with pytest.raises(ValueError, match="must start with http"):
        HttpRetriever("localhost:8000")


def test_a_bad_corpus_ends_the_server_with_a_message(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("oops\n")
    with serve(path) as (process, line):
        assert line == ""
        assert process.wait(60) == 2
        assert "corpus.jsonl:1: not JSON" in process.stderr.read()
