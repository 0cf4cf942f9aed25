"""Indexes on disk: millions of passages, built with bounded memory, opened at once.

A folder holds `manifest.json`, the passages (`passages.jsonl` with `offsets.u64`, the byte where
each row starts) and one subfolder of the engine. `build` first copies and checks the whole corpus,
so that a bad line is found before anything is indexed; then the engine reads the copy row by row
and makes its work durable every so many rows. What was killed goes on from there.

Engines are tantivy (BM25, the default), bm25s (BM25 in processes of its own) and dense (embeddings,
exact search). The last two need the extra `retrieval`.
"""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import mmap
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from copc_jax.tools import bm25s_process, embedding
from copc_jax.tools.retriever import (
    Passage,
    RetrieverError,
    WordIndex,
    corpus_rows,
    open_corpus,
    query_words,
)

FORMAT = 1
_PLAIN_INTERVAL_S = 10.0
# Rows of vectors that are compared at a time: 48 MiB of 384 float32.
_VECTOR_BLOCK = 32 * 1024
# Embeddings are kept in whole groups of rows.
_EMBED_GROUP = 256

Report = Callable[[int], None]
"""Called with the number of rows that are done."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an index folder holds; `manifest.json`.

    Attributes:
        engine: name of the engine.
        engine_version: version of the package behind it.
        settings: what the engine was built with.
        corpus: name, bytes, modification time and SHA-256 (of the decompressed lines).
        passages: number of rows; 0 until the corpus is copied.
        complete: whether every row is indexed.
        format: of the folder.
    """

    engine: str
    engine_version: str
    settings: dict[str, Any]
    corpus: dict[str, Any]
    passages: int = 0
    complete: bool = False
    format: int = FORMAT

    def save(self, folder: pathlib.Path) -> None:
        """Write the manifest so that a crash leaves the old or the new one."""
        temporary = folder / "manifest.json.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / "manifest.json")

    @classmethod
    def load(cls, folder: pathlib.Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            ValueError: there is none, or it is none of this format.
        """
        try:
            fields = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']}, not {FORMAT}")
            return cls(**fields)
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} is no index: it has no manifest.json; `build` makes one"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder}/manifest.json cannot be used ({error}); build the index again"
            ) from error


class Store:
    """The passages of an index folder by row, read through a memory map."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / "passages.jsonl"
        self._offsets = np.memmap(folder / "offsets.u64", dtype="<u8", mode="r")
        with open(self._path, "rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._text) != self._offsets[-1]:
            raise ValueError(f"{self._path} does not fit offsets.u64; build the index again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def passage(self, row: int, score: float = 0.0) -> Passage:
        """Return one passage."""
        fields = json.loads(self._text[int(self._offsets[row]) : int(self._offsets[row + 1])])
        return Passage.from_contents(str(fields["id"]), fields["contents"], score)

    def contents(self, start: int = 0) -> Iterator[str]:
        """Yield the contents of every row from `start` on."""
        with open(self._path, "rb") as file:
            file.seek(int(self._offsets[start]))
            for line in file:
                yield json.loads(line)["contents"]


@runtime_checkable
class Engine(Protocol):
    """How rows are indexed and searched.

    Attributes:
        name: as given on the command line.
        package: the distribution whose version the manifest records.
        batched: whether one call with many queries is faster than many calls.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    batched: ClassVar[bool]

    @classmethod
    def settle(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings to record.

        Raises:
            ValueError: an option is unknown, or a package or model that it needs is missing.
        """
        ...

    @classmethod
    def build(
        cls,
        folder: pathlib.Path,
        settings: Mapping[str, Any],
        store: Store,
        report: Report,
        *,
        commit_every: int,
        memory_mb: int,
        threads: int,
    ) -> None:
        """Index every row of the store, from the last safe point on."""
        ...

    def __init__(
        self, folder: pathlib.Path, settings: Mapping[str, Any], rows: int, *, threads: int
    ): ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return (row, score) for each query, best first; may be called from several threads."""
        ...

    def close(self) -> None:
        """End processes."""
        ...


class _Tantivy:
    name: ClassVar[str] = "tantivy"
    package: ClassVar[str] = "tantivy"
    batched: ClassVar[bool] = False

    @classmethod
    def settle(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return _no_options(cls.name, options)

    @classmethod
    def build(
        cls,
        folder: pathlib.Path,
        settings: Mapping[str, Any],
        store: Store,
        report: Report,
        *,
        commit_every: int,
        memory_mb: int,
        threads: int,
    ) -> None:
        index = WordIndex(folder / "tantivy")
        # Rows are added in order, so what is committed is the first so many of them.
        start = index.rows
        _going_on(start, report)
        index.write(memory_mb=memory_mb, threads=min(threads, 4))
        for row, contents in enumerate(store.contents(start), start=start):
            index.add(row, contents)
            if (row + 1) % commit_every == 0:
                index.commit()
            if row % 1000 == 0:
                report(row)
        index.finish()

    def __init__(
        self, folder: pathlib.Path, settings: Mapping[str, Any], rows: int, *, threads: int
    ):
        self._index = WordIndex(folder / "tantivy")
        _require_rows(self._index.rows, rows)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        return [self._index.search(query, topk) for query in queries]

    def close(self) -> None:
        pass


class _Bm25s:
    name: ClassVar[str] = "bm25s"
    package: ClassVar[str] = "bm25s"
    batched: ClassVar[bool] = False

    @classmethod
    def settle(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        embedding.require("bm25s", "numba")
        return _no_options(cls.name, options)

    @classmethod
    def build(
        cls,
        folder: pathlib.Path,
        settings: Mapping[str, Any],
        store: Store,
        report: Report,
        *,
        commit_every: int,
        memory_mb: int,
        threads: int,
    ) -> None:
        # bm25s has no safe points: its matrix is made in memory, in one go.
        bm25s_process.build(folder, report)

    def __init__(
        self, folder: pathlib.Path, settings: Mapping[str, Any], rows: int, *, threads: int
    ):
        embedding.require("bm25s", "numba")
        self._processes = bm25s_process.Processes(folder / "bm25s", threads)
        _require_rows(self._processes.rows, rows)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        return self._processes.search([query_words(query) for query in queries], topk)

    def close(self) -> None:
        self._processes.close()


class _Dense:
    name: ClassVar[str] = "dense"
    package: ClassVar[str] = "copc-jax"
    batched: ClassVar[bool] = True

    @classmethod
    def settle(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        settings = {
            "embedding": "minilm",
            "query_prefix": "",
            "passage_prefix": "",
            "max_tokens": 256,
            "dtype": "float32",
        }
        unknown = sorted(set(options) - set(settings))
        if unknown:
            raise ValueError(f"engine dense has no option {unknown[0]!r}")
        settings |= options
        if settings["dtype"] not in ("float32", "float16"):
            raise ValueError(f"dtype must be float32 or float16, not {settings['dtype']!r}")
        if settings["embedding"] != "minilm":
            settings["embedding"] = str(pathlib.Path(settings["embedding"]).resolve())
        model = embedding.load(settings["embedding"], settings["max_tokens"])
        return {**settings, "dimension": model.dimension}

    @classmethod
    def build(
        cls,
        folder: pathlib.Path,
        settings: Mapping[str, Any],
        store: Store,
        report: Report,
        *,
        commit_every: int,
        memory_mb: int,
        threads: int,
    ) -> None:
        model = embedding.load(settings["embedding"], settings["max_tokens"], threads)
        path = folder / "vectors.bin"
        row_bytes = settings["dimension"] * np.dtype(settings["dtype"]).itemsize
        with open(path, "ab") as file:
            start = file.tell() // row_bytes
            if start != len(store):
                # A kill may have cut the last group.
                start -= start % _EMBED_GROUP
                file.truncate(start * row_bytes)
            _going_on(start, report)
            texts: list[str] = []
            for row, contents in enumerate(store.contents(start), start=start):
                texts.append(settings["passage_prefix"] + contents)
                if len(texts) == _EMBED_GROUP or row + 1 == len(store):
                    file.write(model.embed(texts).astype(settings["dtype"]).tobytes())
                    texts.clear()
                    report(row + 1)
            file.flush()
            os.fsync(file.fileno())

    def __init__(
        self, folder: pathlib.Path, settings: Mapping[str, Any], rows: int, *, threads: int
    ):
        self._settings = settings
        self._model = embedding.load(settings["embedding"], settings["max_tokens"], threads)
        dimension = settings["dimension"]
        if self._model.dimension != dimension:
            raise ValueError(
                f"{folder} holds vectors of {dimension}, and {settings['embedding']} makes"
                f" {self._model.dimension}; build the index again"
            )
        vectors = np.memmap(folder / "vectors.bin", dtype=settings["dtype"], mode="r")
        self._vectors = vectors.reshape(-1, dimension)
        _require_rows(len(self._vectors), rows)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        asked = [i for i, query in enumerate(queries) if query_words(query)]
        results: list[list[tuple[int, float]]] = [[] for _ in queries]
        if not asked:
            return results
        vectors = self._model.embed([self._settings["query_prefix"] + queries[i] for i in asked])
        rows, scores = nearest(vectors, self._vectors, topk)
        for i, best_rows, best_scores in zip(asked, rows.tolist(), scores.tolist(), strict=True):
            results[i] = list(zip(best_rows, best_scores, strict=True))
        return results

    def close(self) -> None:
        pass


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (_Tantivy, _Bm25s, _Dense)}


def nearest(queries: np.ndarray, vectors: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and inner products of the `topk` vectors nearest to each query, exactly.

    Vectors are compared block by block, by FAISS when it is installed, so a memory map of any size
    will do.

    Args:
        queries: f32[n, d].
        vectors: f32 or f16[rows, d].
        topk: at most that many.

    Returns:
        rows i64[n, k] and products f32[n, k], best first, equal ones by row; k = min(topk, rows).
    """
    product = _inner_products()
    best_rows = np.zeros((len(queries), 0), np.int64)
    best = np.zeros((len(queries), 0), np.float32)
    for start in range(0, len(vectors), _VECTOR_BLOCK):
        block = np.ascontiguousarray(vectors[start : start + _VECTOR_BLOCK], dtype=np.float32)
        scores, rows = product(queries, block, min(topk, len(block)))
        best = np.concatenate([best, scores], axis=1)
        best_rows = np.concatenate([best_rows, rows + start], axis=1)
        order = np.lexsort((best_rows, -best), axis=1)[:, :topk]
        best = np.take_along_axis(best, order, axis=1)
        best_rows = np.take_along_axis(best_rows, order, axis=1)
    return best_rows, best


def _inner_products() -> Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    try:
        import faiss
    except ImportError:
        return _numpy_inner_products

    def search(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)

    return search


def _numpy_inner_products(
    queries: np.ndarray, block: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ block.T
    rows = np.argpartition(scores, len(block) - k, axis=1)[:, len(block) - k :]
    return np.take_along_axis(scores, rows, axis=1), rows


def _going_on(start: int, report: Report) -> None:
    if start:
        print(f"going on after {start} passages", file=sys.stderr, flush=True)
    report(start)


def _require_rows(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{found} rows are indexed, not {expected}; build the index again")


def _no_options(engine: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if options:
        name = next(iter(options))
        raise ValueError(f"engine {engine} has no option {name!r}; engine dense has")
    return {}


def build(
    corpus: str | pathlib.Path,
    folder: str | pathlib.Path,
    *,
    engine: str = "tantivy",
    options: Mapping[str, Any] | None = None,
    commit_every: int = 100_000,
    memory_mb: int = 256,
    threads: int = 1,
) -> Manifest:
    """Index a JSONL corpus in Search-R1's form into a folder, or go on where a build was stopped.

    Memory does not grow with the corpus but for 8 bytes a passage, which find duplicate ids, and
    for engine bm25s, whose matrix is made in memory.

    Args:
        corpus: .jsonl or .jsonl.gz with `id` and `contents` on each line.
        folder: of the index; made if missing, and refused if it holds anything else.
        engine: a name in ENGINES.
        options: of the engine; only dense has any (embedding, query_prefix, passage_prefix,
            max_tokens, dtype).
        commit_every: passages between two points from which a stopped build goes on.
        memory_mb: tantivy's write buffer.
        threads: that index or embed.

    Raises:
        ValueError: a bad line (with file and line), a duplicate id, a folder that holds another
            index, an unknown engine, or a missing package or model.
        OSError: the disk is full, or a file cannot be read or written.
    """
    corpus, folder = pathlib.Path(corpus), pathlib.Path(folder)
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
    kind = ENGINES[engine]
    if not corpus.is_file():
        raise FileNotFoundError(f"{corpus} is no file; a JSONL corpus is expected")
    settings = kind.settle(options or {})
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        wanted = Manifest(
            engine, importlib.metadata.version(kind.package), settings, {"name": corpus.name}
        )
        manifest = _prepare(corpus, folder, wanted)
        if manifest.complete:
            return manifest
        store = Store(folder)
        try:
            with _progress("indexing", len(store)) as report:
                kind.build(
                    folder,
                    settings,
                    store,
                    report,
                    commit_every=commit_every,
                    memory_mb=memory_mb,
                    threads=threads,
                )
                report(len(store))
        except OSError as error:
            raise OSError(
                f"{folder}: {error}; when that is mended, the same command goes on"
            ) from error
        manifest = dataclasses.replace(manifest, complete=True)
        manifest.save(folder)
        return manifest


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Keep other builds out of the folder; the system lets go when the process ends."""
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder}: another build is at work on this index") from error
        yield


def _prepare(corpus: pathlib.Path, folder: pathlib.Path, wanted: Manifest) -> Manifest:
    """Copy the corpus into the folder, or check that what is there is of the same build."""
    stat = corpus.stat()
    stamp = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if (folder / "manifest.json").exists():
        found = Manifest.load(folder)
        for name in ("engine", "engine_version", "settings"):
            old, new = getattr(found, name), getattr(wanted, name)
            if old != new:
                raise ValueError(
                    f"{folder} was begun with {name} {old}, not {new}; name another folder or"
                    " delete this one"
                )
        if found.passages:
            same = all(found.corpus[key] == value for key, value in stamp.items())
            if not same and found.corpus["sha256"] != _digest(corpus):
                raise ValueError(
                    f"{folder} was begun from another text of {found.corpus['name']}; name another"
                    " folder or delete this one"
                )
            return found
    elif any(path.name != "lock" for path in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no manifest.json; name an empty folder")
    wanted.save(folder)
    try:
        passages, digest = _copy(corpus, folder)
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{folder}: the corpus cannot be copied: {error}") from error
    fields = {"name": corpus.name, **stamp, "sha256": digest}
    manifest = dataclasses.replace(wanted, corpus=fields, passages=passages)
    manifest.save(folder)
    return manifest


def _copy(corpus: pathlib.Path, folder: pathlib.Path) -> tuple[int, str]:
    """Check every line, write passages.jsonl and offsets.u64; return the count and a SHA-256."""
    hasher = hashlib.sha256()
    hashes = array.array("Q")
    position = 0
    with (
        open(folder / "passages.jsonl", "wb") as passages,
        open(folder / "offsets.u64", "wb") as offsets,
        _progress("checking", None) as report,
    ):
        offsets.write(position.to_bytes(8, "little"))
        for _, line, id, _ in corpus_rows(corpus):
            line = line.strip() + b"\n"
            hasher.update(line)
            passages.write(line)
            position += len(line)
            offsets.write(position.to_bytes(8, "little"))
            hashes.append(_id_hash(id))
            if len(hashes) % 1000 == 0:
                report(len(hashes))
        if not hashes:
            raise ValueError(f"{corpus}: no passages")
        _refuse_duplicates(corpus, hashes)
        for file in (passages, offsets):
            file.flush()
            os.fsync(file.fileno())
    return len(hashes), hasher.hexdigest()


def _id_hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")


def _refuse_duplicates(corpus: pathlib.Path, hashes: array.array[int]) -> None:
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return
    # Few of them, to stay within memory: one is enough to refuse.
    suspects = set(repeated[:10_000].tolist())
    lines: dict[str, int] = {}
    for number, _, id, _ in corpus_rows(corpus):
        if _id_hash(id) in suspects:
            if id in lines:
                raise ValueError(
                    f"{corpus}:{number}: id {id!r} is also on line {lines[id]}; ids must be unique"
                )
            lines[id] = number


def _digest(corpus: pathlib.Path) -> str:
    hasher = hashlib.sha256()
    with open_corpus(corpus) as file:
        for line in file:
            if line.strip():
                hasher.update(line.strip() + b"\n")
    return hasher.hexdigest()


class _Rate(ProgressColumn):
    """Passages a second, since this build began."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0.0:,.0f}/s")


@contextlib.contextmanager
def _progress(verb: str, total: int | None) -> Iterator[Report]:
    """Show rows done, rows a second and time left: a bar, or a line now and then without one."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(verb, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    begun = told = time.monotonic()
    first: int | None = None

    def report(done: int) -> None:
        nonlocal told, first
        first = done if first is None else first
        now = time.monotonic()
        if now - told < _PLAIN_INTERVAL_S:
            return
        told = now
        rate = (done - first) / (now - begun)
        text = f"{verb} {done:,} passages, {rate:,.0f}/s"
        if total is not None and rate > 0:
            text = f"{verb} {done:,} of {total:,} passages, {rate:,.0f}/s"
            text += f", {(total - done) / rate:,.0f} s left"
        print(text, file=sys.stderr, flush=True)

    yield report


class IndexRetriever:
    """Retriever over an index folder; searches run in threads, off the event loop.

    Args:
        folder: that `build` made.
        threads: searches at a time; for bm25s, processes.

    Raises:
        ValueError: the folder is no index, is not complete, or belongs to another version.
    """

    def __init__(self, folder: str | pathlib.Path, *, threads: int = 1):
        folder = pathlib.Path(folder)
        self.manifest = Manifest.load(folder)
        manifest = self.manifest
        if not manifest.complete:
            raise ValueError(f"{folder} is not complete; run `build` again to go on")
        if manifest.engine not in ENGINES:
            raise ValueError(f"{folder} is of engine {manifest.engine!r}, which is unknown here")
        try:
            self._store = Store(folder)
            self._engine = ENGINES[manifest.engine](
                folder, manifest.settings, len(self._store), threads=threads
            )
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{folder} (engine {manifest.engine} {manifest.engine_version}) cannot be opened:"
                f" {error}"
            ) from error
        self._threads = threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "search")

    def lookup(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Answer queries in the calling thread."""
        return [
            [self._store.passage(row, score) for row, score in hits]
            for hits in self._engine.search(queries, topk)
        ]

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return at most `topk` passages for each query, best first; none for one without words."""
        if topk < 1:
            raise ValueError(f"topk must be at least 1, not {topk}")
        if not queries:
            return []
        parts = 1 if self._engine.batched else min(self._threads, len(queries))
        loop = asyncio.get_running_loop()
        size = -(-len(queries) // parts)
        futures = [
            loop.run_in_executor(self._pool, self.lookup, queries[start : start + size], topk)
            for start in range(0, len(queries), size)
        ]
        try:
            found = await asyncio.gather(*futures)
        except (OSError, ValueError) as error:
            raise RetrieverError(f"{self.manifest.engine}: {error}") from error
        return [hits for part in found for hits in part]

    async def close(self) -> None:
        """End the threads and the engine's processes."""
        self._pool.shutdown()
        self._engine.close()
