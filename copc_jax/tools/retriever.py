"""Retrieval: BM25 in process, Search-R1's HTTP protocol on both sides, and corpora as JSONL.

Every retriever answers `search(queries, topk)` with one list of passages a query, best first. The
server answers `POST /retrieve` as the clients of Search-R1 expect, and `GET /health`:

    python -m copc_jax.tools.retriever factbook --out corpus.jsonl    # the default task's passages
    python -m copc_jax.tools.retriever serve --corpus corpus.jsonl --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import aiohttp
import tantivy
from aiohttp import web

_WORD = re.compile(r"[^\W_]+")
_WRITER_BYTES = 64 * 1024 * 1024


class RetrieverError(RuntimeError):
    """A search without an answer: server away, time-out, or an answer of the wrong shape."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """One unit of the corpus, or one search result.

    Attributes:
        id: unique within the corpus.
        title: name of the thing that the passage is about.
        text: the passage itself, without the title.
        score: BM25 or whatever the engine ranks by; 0 outside search results.
    """

    id: str
    title: str
    text: str
    score: float = 0.0

    @property
    def contents(self) -> str:
        """Quoted title and, on the next line, text: the one text field of Search-R1's corpora."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        """Split Search-R1's `contents` into title and text; the title's quotes are dropped."""
        title, _, text = contents.partition("\n")
        return cls(id, title.strip().removeprefix('"').removesuffix('"'), text.strip(), score)


@runtime_checkable
class Retriever(Protocol):
    """Anything that finds passages for queries."""

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return at most `topk` passages for each query, best first.

        Raises:
            RetrieverError: the search could not be answered.
        """
        ...

    async def close(self) -> None:
        """Release connections; a later search opens them again."""
        ...


def query_words(text: str) -> list[str]:
    """Return the lower-case words of `text` without accents, as indexed and searched for."""
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return _WORD.findall(plain.lower())


class TantivyRetriever:
    """BM25 over an index in memory.

    Queries are reduced to plain words first, so nothing that a model writes is read as query
    syntax. Answers are cached, because a policy in training asks the same few thousand questions
    again and again.
    """

    def __init__(self, passages: Iterable[Passage], *, cache_size: int = 50_000):
        self.passages = tuple(passages)
        if not self.passages:
            raise ValueError("the corpus has no passages")
        builder = tantivy.SchemaBuilder()
        builder.add_unsigned_field("row", stored=True)
        builder.add_text_field("contents", tokenizer_name="en_stem")
        self._index = tantivy.Index(builder.build())
        # One writer thread gives one order of documents, so that equal scores rank the same in
        # every run.
        writer = self._index.writer(heap_size=_WRITER_BYTES, num_threads=1)
        for row, passage in enumerate(self.passages):
            words = " ".join(query_words(passage.contents))
            writer.add_document(tantivy.Document(row=row, contents=words))
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()
        self._cache_size = cache_size
        self._cache: dict[tuple[str, int], list[Passage]] = {}

    def lookup(self, query: str, topk: int) -> list[Passage]:
        """Return at most `topk` passages for one query; none when the query has no word."""
        if topk < 1:
            raise ValueError(f"topk must be at least 1, not {topk}")
        words = " ".join(query_words(query))
        if not words:
            return []
        key = (words, topk)
        found = self._cache.pop(key, None)
        if found is None:
            parsed, _ = self._index.parse_query_lenient(words, ["contents"])
            found = []
            for score, address in self._searcher.search(parsed, topk).hits:
                passage = self.passages[self._searcher.doc(address)["row"][0]]
                found.append(dataclasses.replace(passage, score=float(score)))
            if len(self._cache) >= self._cache_size:
                del self._cache[next(iter(self._cache))]
        self._cache[key] = (
            found  # Last in the order of the dictionary: the oldest is the first to go.
        )
        return list(found)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Answer each query in turn; a look-up takes well under a millisecond."""
        return [self.lookup(query, topk) for query in queries]

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class HttpRetriever:
    """Client of a Search-R1-compatible server.

    Args:
        url: of the server or of its /retrieve.
        timeout_s: seconds for one request.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retriever url must start with http:// or https://, not {url!r}")
        self._url = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpRetriever:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Ask the server; queries without a word are answered with nothing and not sent.

        Raises:
            RetrieverError: no answer in time, a status other than 200, or an answer of the wrong
            shape.
        """
        sent = [i for i, query in enumerate(queries) if query_words(query)]
        results: list[list[Passage]] = [[] for _ in queries]
        if not sent:
            return results
        # Without scores the reference server fails, or answers wrongly for exactly two queries.
        body = {"queries": [queries[i] for i in sent], "topk": topk, "return_scores": True}
        answer = await self._post(body)
        lists = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(lists, list) or len(lists) != len(sent):
            raise RetrieverError(f"{self._url}: expected {len(sent)} lists under 'result'")
        for i, items in zip(sent, lists, strict=True):
            try:
                results[i] = [_passage_from_wire(item) for item in items]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise RetrieverError(
                    f"{self._url}: a result without document: {error!r}"
                ) from error
        return results

    async def _post(self, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:200]
                    raise RetrieverError(f"{self._url}: status {response.status}: {text}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RetrieverError(f"{self._url}: {type(error).__name__}: {error}") from error


def _passage_from_wire(item: dict[str, Any]) -> Passage:
    document = item.get("document", item)
    return Passage.from_contents(
        str(document["id"]), str(document["contents"]), float(item.get("score", 0.0))
    )


def write_corpus(path: str | pathlib.Path, passages: Iterable[Passage]) -> None:
    """Write passages as JSONL in Search-R1's form: id, and contents with the quoted title first."""
    with open(path, "w", encoding="utf-8") as file:
        for passage in passages:
            row = {"id": passage.id, "contents": passage.contents}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_corpus(path: str | pathlib.Path) -> list[Passage]:
    """Read a JSONL corpus in Search-R1's form; blank lines are skipped.

    Raises:
        ValueError: a line is not JSON or lacks `id` or `contents`, or there is no passage; names
        file and line.
    """
    passages = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or "id" not in row or "contents" not in row:
                raise ValueError(f"{path}, line {number}: needs an object with 'id' and 'contents'")
            passages.append(Passage.from_contents(str(row["id"]), str(row["contents"])))
    if not passages:
        raise ValueError(f"{path}: no passages")
    return passages


def build_app(
    retriever: Retriever, *, max_queries: int = 512, max_topk: int = 100
) -> web.Application:
    """Return the web application that answers `POST /retrieve` and `GET /health`."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return _bad_request(f"body is not JSON: {error}")
        if not isinstance(body, dict):
            return _bad_request("body must be an object")
        queries = body.get("queries")
        topk = body.get("topk", 3)
        scores = body.get("return_scores", False)
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            return _bad_request("'queries' must be a list of strings")
        if len(queries) > max_queries:
            return _bad_request(
                f"'queries' holds {len(queries)}, at most {max_queries} are allowed"
            )
        # Clients of Search-R1 send null for the default.
        topk = 3 if topk is None else topk
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= max_topk:
            return _bad_request(f"'topk' must be an integer from 1 to {max_topk}")
        if not isinstance(scores, bool):
            return _bad_request("'return_scores' must be true or false")
        found = await retriever.search(queries, topk)
        return web.json_response({"result": [[_wire(p, scores) for p in hits] for hits in found]})

    app = web.Application(client_max_size=4 * 1024 * 1024)
    app.add_routes([web.get("/health", health), web.post("/retrieve", retrieve)])
    return app


def _wire(passage: Passage, scores: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scores else document


def _bad_request(message: str) -> web.Response:
    return web.json_response({"error": message}, status=400)


async def _serve(corpus: str, host: str, port: int) -> None:
    passages = read_corpus(corpus)
    runner = web.AppRunner(build_app(TantivyRetriever(passages)))
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0][1]
        print(f"ready http://{host}:{bound} with {len(passages)} passages", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m copc_jax.tools.retriever", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a JSONL corpus over HTTP")
    serve.add_argument(
        "--corpus", required=True, help="JSONL file with id and contents on each line"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes a free one")
    factbook = commands.add_parser("factbook", help="write the passages of the default task")
    factbook.add_argument("--out", required=True, help="JSONL file to write")
    arguments = parser.parse_args(argv)
    if arguments.command == "factbook":
        # Imported late: it builds on this module, and serving does without it.
        from copc_jax import factbook as facts

        write_corpus(arguments.out, facts.build_factbook()[0])
        return 0
    try:
        asyncio.run(_serve(arguments.corpus, arguments.host, arguments.port))
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
