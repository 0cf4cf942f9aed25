"""Retrieval: BM25 in process, Search-R1's HTTP protocol on both sides, and corpora as JSONL.

Every retriever answers `search(queries, topk)` with one list of passages a query, best first. The
server answers `POST /retrieve` as the clients of Search-R1 expect, and `GET /health`:

    python -m copc_jax.tools.retriever factbook --out corpus.jsonl    # the default task's passages
    python -m copc_jax.tools.retriever serve --corpus corpus.jsonl --port 8000
    python -m copc_jax.tools.retriever build --corpus wiki-18.jsonl.gz --index wiki    # once, big
    python -m copc_jax.tools.retriever serve --index wiki --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gzip
import io
import json
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import aiohttp
import tantivy
from aiohttp import web

from copc_jax import access

_LOG = logging.getLogger(__name__)
_WORD = re.compile(r"[^\W_]+")
_MAX_TIES = 4096
_MAX_LINE = 16 * 1024 * 1024


class RetrieverError(RuntimeError):
    """A search without an answer: server away, time-out, or an answer of the wrong shape."""


class QueryRefused(RetrieverError):
    """The server refuses this query, and would again; it may answer another one."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """One unit of the corpus, or one search result.

    Attributes:
        id: unique within the corpus.
        title: name of the thing that the passage is about.
        text: the passage itself, without the title.
        score: BM25 or whatever the engine ranks by; 0 outside search results.
        original: `contents` as the corpus has it, where title and text alone would give another.
    """

    id: str
    title: str
    text: str
    score: float = 0.0
    original: str | None = dataclasses.field(default=None, repr=False)

    @property
    def contents(self) -> str:
        """Quoted title and, on the next line, text: the one text field of Search-R1's corpora."""
        return f'"{self.title}"\n{self.text}' if self.original is None else self.original

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        """Split Search-R1's `contents` into title and text; the title's quotes are dropped."""
        title, _, text = contents.partition("\n")
        passage = cls(id, title.strip().removeprefix('"').removesuffix('"'), text.strip(), score)
        if passage.contents == contents:
            return passage
        return dataclasses.replace(passage, original=contents)


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
    if text.isascii():
        return _WORD.findall(text.lower())
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return _WORD.findall(plain.lower())


class WordIndex:
    """Tantivy's BM25 (k1 1.2, b 0.75) over rows of English-stemmed words, in memory or in a folder.

    Queries are reduced to plain words first, so nothing that a model writes is read as query
    syntax. Equal scores rank by row, however the index is split into segments: scores are rounded
    to six digits, because segments add the same terms in different orders.
    """

    def __init__(self, folder: pathlib.Path | None = None):
        """Open the index in `folder`, or make it there; None keeps it in memory.

        Raises:
            ValueError: the folder holds an index that this version of tantivy cannot read.
        """
        builder = tantivy.SchemaBuilder()
        builder.add_unsigned_field("row", fast=True)
        # Positions serve phrases only, and a query here is a bag of words.
        builder.add_text_field("contents", tokenizer_name="en_stem", index_option="freq")
        if folder is None:
            self._index = tantivy.Index(builder.build())
        else:
            folder.mkdir(exist_ok=True)
            self._index = tantivy.Index(builder.build(), path=str(folder))
        self._writer: tantivy.IndexWriter | None = None
        self._refresh()

    def _refresh(self) -> None:
        self._index.reload()
        self._searcher = self._index.searcher()

    @property
    def rows(self) -> int:
        """Number of committed rows."""
        return self._searcher.num_docs

    def write(self, *, memory_mb: int = 64, threads: int = 1) -> None:
        """Start writing; `memory_mb` is shared by the threads, 15 each at least."""
        memory = max(memory_mb, 15 * threads) * 1024 * 1024
        self._writer = _writing(self._index.writer, memory, threads)

    def add(self, row: int, contents: str) -> None:
        """Queue one row; it is found after `commit`."""
        document = tantivy.Document()
        document.add_unsigned("row", row)
        document.add_text("contents", indexed_text(contents))
        assert self._writer is not None, "write() comes first"
        _writing(self._writer.add_document, document)

    def commit(self) -> None:
        """Make every row added so far durable and findable."""
        assert self._writer is not None, "write() comes first"
        _writing(self._writer.commit)
        self._refresh()

    def finish(self) -> None:
        """Commit, wait until segments are merged, and end writing."""
        self.commit()
        assert self._writer is not None
        _writing(self._writer.wait_merging_threads)
        self._writer = None
        self._refresh()

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return at most `topk` (row, score), best first; none when the query has no word."""
        words = " ".join(query_words(query))
        if not words:
            return []
        parsed, _ = self._index.parse_query_lenient(words, ["contents"])
        limit = topk + 1
        while True:
            hits = self._searcher.search(parsed, limit, count=False).hits
            scores = [float(f"{score:.6g}") for score, _ in hits]
            # Of passages that tie for the last place all must be seen to take the first rows.
            if len(hits) < limit or scores[-1] < scores[topk - 1] or limit >= _MAX_TIES:
                break
            limit = min(8 * limit, max(_MAX_TIES, topk + 1))
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        pairs = zip(cast(list[int], rows), scores, strict=True)
        ranked = sorted(pairs, key=lambda hit: (-hit[1], hit[0]))
        return ranked[:topk]


def indexed_text(contents: str) -> str:
    """Return the text whose words are indexed, split as `query_words` splits queries."""
    # Tantivy's own tokenizer agrees on ASCII, where it is much faster.
    return contents if contents.isascii() else " ".join(query_words(contents))


def _writing(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a writer's method; its errors, disk full among them, come as OSError."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise OSError(f"the index cannot be written: {error}") from error


class TantivyRetriever:
    """BM25 over passages in memory.

    Answers are cached, because a policy in training asks the same few thousand questions again and
    again.
    """

    def __init__(self, passages: Iterable[Passage], *, cache_size: int = 50_000):
        self.passages = tuple(passages)
        if not self.passages:
            raise ValueError("the corpus has no passages")
        self._index = WordIndex()
        self._index.write()
        for row, passage in enumerate(self.passages):
            self._index.add(row, passage.contents)
        self._index.finish()
        self._cache_size = cache_size
        self._cache: dict[tuple[str, int], list[Passage]] = {}

    def lookup(self, query: str, topk: int) -> list[Passage]:
        """Return at most `topk` passages for one query; none when the query has no word."""
        if topk < 1:
            raise ValueError(f"topk must be at least 1, not {topk}")
        key = (" ".join(query_words(query)), topk)
        found = self._cache.pop(key, None)
        if found is None:
            found = [
                dataclasses.replace(self.passages[row], score=score)
                for row, score in self._index.search(query, topk)
            ]
            if len(self._cache) >= self._cache_size:
                del self._cache[next(iter(self._cache))]
        # Last in the order of the dictionary: the oldest is the first to go.
        self._cache[key] = found
        return list(found)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Answer each query in turn; a look-up takes well under a millisecond."""
        return [self.lookup(query, topk) for query in queries]

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class HttpRetriever:
    """Client of a Search-R1-compatible server.

    A server that has answered before and does not now is asked again until it does: it may be
    starting again. One that has never answered is an error at once.

    Args:
        url: of the server or of its /retrieve.
        timeout_s: seconds for one request.
        patience_s: seconds after which a search is not tried again.
        api_key: sent with every request; no message shows it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        patience_s: float = 25.0,
        api_key: str | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retriever url must start with http:// or https://, not {url!r}")
        self._url = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._patience_s = patience_s
        self._answered = False
        self._api_key = api_key
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
            QueryRefused: status 400, 413 or 422.
            RetrieverError: no answer in time, any other status but 200, or an answer of the wrong
                shape.
        """
        sent = [i for i, query in enumerate(queries) if query_words(query)]
        results: list[list[Passage]] = [[] for _ in queries]
        if not sent:
            return results
        # Without scores the reference server fails, or answers wrongly for exactly two queries.
        body = {"queries": [queries[i] for i in sent], "topk": topk, "return_scores": True}
        answer = await self._ask(body)
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

    async def _ask(self, body: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        pause = 0.25
        while True:
            try:
                answer = await self._post(body)
            except RetrieverError as error:
                refused = isinstance(error, QueryRefused)
                if refused or not self._answered or loop.time() + pause > deadline:
                    raise
                _LOG.warning("asking again: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                self._answered = True
                return answer

    async def _post(self, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, headers=access.bearer(self._api_key)
            )
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = access.hide(await response.text(errors="replace"), self._api_key)[:200]
                    if response.status == 401:
                        text += f". Set {access.RETRIEVER_KEY} to the key of the retriever"
                    # The server says so of the query itself.
                    kind = QueryRefused if response.status in (400, 413, 422) else RetrieverError
                    raise kind(f"{self._url}: status {response.status}: {text}")
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


def open_corpus(path: str | pathlib.Path) -> io.BufferedIOBase:
    """Open a corpus for reading bytes; a name that ends in .gz is decompressed."""
    if str(path).endswith(".gz"):
        return gzip.GzipFile(path, "rb")
    return open(path, "rb")


def corpus_rows(path: str | pathlib.Path) -> Iterator[tuple[int, bytes, str, str]]:
    """Yield line number, the line's bytes, id and contents of every passage of a JSONL corpus.

    The corpus is read as a stream, .jsonl or .jsonl.gz; blank lines are skipped.

    Raises:
        ValueError: names file and line of the first line that is no passage, and what is wrong.
    """
    number = 0
    with open_corpus(path) as file:
        try:
            while line := file.readline(_MAX_LINE + 1):
                number += 1
                if not line.strip():
                    continue
                try:
                    yield number, line, *_parse_row(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file: {error}") from error


def _parse_row(line: bytes) -> tuple[str, str]:
    if len(line) > _MAX_LINE:
        raise ValueError(f"longer than {_MAX_LINE >> 20} MiB; one passage a line is expected")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict) or "id" not in row or "contents" not in row:
        raise ValueError("needs an object with 'id' and 'contents'")
    id, contents = row["id"], row["contents"]
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise ValueError(f"'id' must be a string or an integer, not {json.dumps(id)[:80]}")
    if not isinstance(contents, str):
        raise ValueError(f"'contents' must be a string, not {json.dumps(contents)[:80]}")
    if b"\\u" in line:
        try:
            (str(id) + contents).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair cannot be written as UTF-8") from error
    return str(id), contents


def read_corpus(path: str | pathlib.Path) -> list[Passage]:
    """Read a whole JSONL corpus in Search-R1's form into memory.

    Raises:
        ValueError: a line is no passage (names file and line), or there is none.
    """
    passages = [Passage.from_contents(id, text) for _, _, id, text in corpus_rows(path)]
    if not passages:
        raise ValueError(f"{path}: no passages")
    return passages


def build_app(
    retriever: Retriever,
    *,
    about: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    max_queries: int = 512,
    max_topk: int = 100,
    max_query_length: int = 8192,
    max_body: int = 4 * 1024 * 1024,
    max_waiting: int = 1024,
) -> web.Application:
    """Return the web application that answers `POST /retrieve` and `GET /health`.

    Args:
        retriever: answers the searches; several at a time may be under way.
        about: what /health says besides status and counts.
        api_key: what /retrieve asks for; None lets everybody search.
        max_queries: queries a request.
        max_topk: passages a query.
        max_query_length: characters a query.
        max_body: bytes a request.
        max_waiting: requests under way at a time; more are refused with status 429.
    """
    counts = {"requests": 0, "refused": 0, "failed": 0}
    waiting = 0

    @web.middleware
    async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            error, status = f"the body is over {max_body} bytes; send fewer queries", 413
        except web.HTTPException as exception:
            error = f"{request.method} {request.path}: {exception.reason}; POST /retrieve and GET"
            error, status = f"{error} /health are answered", exception.status
        except _Refused as refused:
            error, status = str(refused), refused.status
        except RetrieverError as failure:
            counts["failed"] += 1
            print(f"search failed: {failure}", file=sys.stderr, flush=True)
            return web.json_response({"error": str(failure)}, status=503)
        except Exception:
            counts["failed"] += 1
            raise
        counts["refused"] += 1
        return web.json_response({"error": error}, status=status)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **(about or {}), **counts})

    async def retrieve(request: web.Request) -> web.Response:
        nonlocal waiting
        counts["requests"] += 1
        if waiting >= max_waiting:
            raise _Refused(f"{waiting} requests are waiting already; try again later", 429)
        waiting += 1
        try:
            queries, topk, scores = read_request(await request.read())
            found = await retriever.search(queries, topk)
        finally:
            waiting -= 1
        return web.json_response({"result": [[_wire(p, scores) for p in hits] for hits in found]})

    def read_request(data: bytes) -> tuple[list[str], int, bool]:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Refused(f"body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise _Refused("body must be an object")
        queries = body.get("queries")
        topk = body.get("topk", 3)
        scores = body.get("return_scores", False)
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            raise _Refused("'queries' must be a list of strings")
        if len(queries) > max_queries:
            raise _Refused(f"'queries' holds {len(queries)}, at most {max_queries} are allowed")
        for i, query in enumerate(queries):
            if len(query) > max_query_length:
                raise _Refused(
                    f"'queries'[{i}] has {len(query)} characters, at most {max_query_length} are"
                    " allowed"
                )
            try:
                query.encode()
            except UnicodeEncodeError as error:
                raise _Refused(f"'queries'[{i}] is no text: {error.reason}") from error
        # Clients of Search-R1 send null for the default.
        topk = 3 if topk is None else topk
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= max_topk:
            raise _Refused(f"'topk' must be an integer from 1 to {max_topk}")
        if not isinstance(scores, bool):
            raise _Refused("'return_scores' must be true or false")
        return queries, topk, scores

    key_check = access.require_key(api_key, {"/health"})
    app = web.Application(client_max_size=max_body, middlewares=[errors_as_json, key_check])
    app.add_routes([web.get("/health", health), web.post("/retrieve", retrieve)])
    return app


class _Refused(Exception):
    """A request that is not answered, with the status that says why."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def _wire(passage: Passage, scores: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scores else document


async def _serve(
    folder: pathlib.Path, host: str, port: int, threads: int, api_key: str | None, **limits: int
) -> None:
    # Imported late: training never needs more than this module.
    from copc_jax.tools.index import IndexRetriever

    retriever = IndexRetriever(folder, threads=threads)
    about = {"engine": retriever.manifest.engine, "passages": retriever.manifest.passages}
    runner = web.AppRunner(build_app(retriever, about=about, api_key=api_key, **limits))
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        print(f"ready http://{host}:{bound} with {about['passages']} passages", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        await retriever.close()


def _build_command(arguments: argparse.Namespace) -> None:
    from copc_jax.tools import index

    options = {
        name: value
        for name in ("embedding", "query_prefix", "passage_prefix", "max_tokens", "dtype")
        if (value := getattr(arguments, name)) is not None
    }
    manifest = index.build(
        arguments.corpus,
        arguments.index,
        engine=arguments.engine,
        options=options,
        commit_every=arguments.commit_every,
        memory_mb=arguments.memory_mb,
        threads=arguments.threads,
    )
    print(f"{arguments.index}: {manifest.passages} passages, engine {manifest.engine}")


def _serve_command(arguments: argparse.Namespace) -> None:
    limits = {
        "max_queries": arguments.max_queries,
        "max_topk": arguments.max_topk,
        "max_query_length": arguments.max_query_length,
        "max_body": arguments.max_body,
        "max_waiting": arguments.max_waiting,
    }
    if arguments.api_key is None:
        key = access.read_key(f"env:{access.RETRIEVER_KEY}")
    else:
        key = access.checked_key(arguments.api_key, "--api-key")
    if (warning := access.exposure(arguments.host, key)) is not None:
        print(warning, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        folder = arguments.index
        if folder is None:
            from copc_jax.tools import index

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="copc-index-"))
            index.build(arguments.corpus, folder, threads=arguments.threads)
        serving = _serve(
            pathlib.Path(folder), arguments.host, arguments.port, arguments.threads, key, **limits
        )
        asyncio.run(serving)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m copc_jax.tools.retriever",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    threads = min(os.cpu_count() or 1, 16)

    build = commands.add_parser(
        "build",
        help="index a JSONL corpus of any size; a build that was stopped goes on where it was",
    )
    build.add_argument("--corpus", required=True, help="JSONL, or .jsonl.gz, with id and contents")
    build.add_argument("--index", required=True, help="folder of the index; made if missing")
    build.add_argument("--engine", default="tantivy", help="tantivy, bm25s or dense (%(default)s)")
    build.add_argument(
        "--commit-every",
        type=_positive,
        default=100_000,
        help="passages between two safe points (%(default)s)",
    )
    build.add_argument(
        "--memory-mb", type=_positive, default=256, help="tantivy's write buffer (%(default)s)"
    )
    build.add_argument(
        "--threads", type=_positive, default=threads, help="threads that index (%(default)s)"
    )
    dense = build.add_argument_group("dense engine")
    dense.add_argument(
        "--embedding", help="minilm, or a folder of an ONNX or static model (minilm)"
    )
    dense.add_argument("--query-prefix", help="text before every query, 'query: ' for E5")
    dense.add_argument("--passage-prefix", help="text before every passage, 'passage: ' for E5")
    dense.add_argument("--max-tokens", type=_positive, help="tokens read of a text (256)")
    dense.add_argument("--dtype", help="float32 or float16 on disk (float32)")
    build.set_defaults(run=_build_command)

    serve = commands.add_parser("serve", help="serve an index or a small corpus over HTTP")
    source = serve.add_mutually_exclusive_group(required=True)
    source.add_argument("--index", help="folder that `build` made")
    source.add_argument("--corpus", help="JSONL corpus to index now, for as long as it is served")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument(
        "--port", type=int, default=8000, help="TCP port; 0 takes a free one (%(default)s)"
    )
    serve.add_argument(
        "--api-key", help=f"key that requests must bring; better set {access.RETRIEVER_KEY}"
    )
    serve.add_argument(
        "--threads", type=_positive, default=threads, help="searches at a time (%(default)s)"
    )
    serve.add_argument(
        "--max-queries", type=_positive, default=512, help="queries a request (%(default)s)"
    )
    serve.add_argument(
        "--max-topk", type=_positive, default=100, help="passages a query (%(default)s)"
    )
    serve.add_argument(
        "--max-query-length", type=_positive, default=8192, help="characters a query (%(default)s)"
    )
    serve.add_argument(
        "--max-body", type=_positive, default=4 << 20, help="bytes a request (%(default)s)"
    )
    serve.add_argument(
        "--max-waiting",
        type=_positive,
        default=1024,
        help="requests at a time, then status 429 (%(default)s)",
    )
    serve.set_defaults(run=_serve_command)

    factbook = commands.add_parser("factbook", help="write the passages of the default task")
    factbook.add_argument("--out", required=True, help="JSONL file to write")
    factbook.set_defaults(run=_factbook_command)
    return parser


def _factbook_command(arguments: argparse.Namespace) -> None:
    # Imported late: it builds on this module, and serving does without it.
    from copc_jax import factbook as facts

    write_corpus(arguments.out, facts.build_factbook()[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        print("stopped; a build goes on when the same command is given again", file=sys.stderr)
        return 130
    except (OSError, ValueError, RetrieverError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # The module by its own name: index.py imports it, and its classes must not exist twice.
    from copc_jax.tools import retriever

    sys.exit(retriever.main())
