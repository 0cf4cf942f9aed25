"""bm25s in processes of its own.

`import bm25s` imports JAX where it is installed and starts its backend, which on a host with a GPU
takes the GPU. So nothing here imports it in the calling process, and in the child JAX is kept out.
"""

from __future__ import annotations

import array
import concurrent.futures
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from copc_jax.tools.retriever import RetrieverError, indexed_text

K1, B = 1.2, 0.75  # As in tantivy, so that scores of the two engines can be compared.

_child: dict[str, Any] = {}
"""What a child process holds: its index and counter."""


def _start(counter: Any) -> None:
    """Prepare a child: no JAX, and an end when the parent ends, however it does."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.modules["jax"] = sys.modules["jax.lax"] = None  # type: ignore[assignment]
    _child["counter"] = counter
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _pool(processes: int) -> tuple[concurrent.futures.ProcessPoolExecutor, Any]:
    # A fresh interpreter: a fork would take the caller's JAX along.
    context = multiprocessing.get_context("spawn")
    counter = context.Value(ctypes.c_int64, 0)
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _start, (counter,))
    return pool, counter


def build(folder: pathlib.Path, report: Callable[[int], None]) -> None:
    """Index the passages of an index folder in a child process.

    Raises:
        OSError: the disk is full.
        RetrieverError: the child was killed; of too little memory, most of the time.
    """
    pool, counter = _pool(1)
    with pool:
        future = pool.submit(_build, folder)
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.process.BrokenProcessPool as error:
                raise RetrieverError(
                    "the bm25s process was killed; it holds the whole matrix in memory, engine"
                    " tantivy does not"
                ) from error
            except TimeoutError:
                report(counter.value)


def _build(folder: pathlib.Path) -> None:
    import bm25s
    import tantivy

    from copc_jax.tools.index import Store

    analyze = _analyzer(tantivy).analyze
    vocabulary: dict[str, int] = {}
    documents = []
    for row, contents in enumerate(Store(folder).contents()):
        words = analyze(indexed_text(contents))
        # 4 bytes a word: lists of Python integers would take ten times that.
        documents.append(
            array.array("i", [vocabulary.setdefault(w, len(vocabulary)) for w in words])
        )
        _child["counter"].value = row
    if not vocabulary:
        raise ValueError("no passage has a word to index")
    model = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numba")
    every = list(range(len(vocabulary)))
    model.scores = model.build_index_from_ids(every, documents, show_progress=False)
    model.vocab_dict = vocabulary
    model.unique_token_ids_set = set(every)
    model.save(folder / "bm25s", show_progress=False)


def _analyzer(tantivy: Any) -> Any:
    """Return the steps of tantivy's `en_stem`, so that both engines index the same words."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for step in (
        tantivy.Filter.remove_long(40),
        tantivy.Filter.lowercase(),
        tantivy.Filter.stemmer("english"),
    ):
        builder = builder.filter(step)
    return builder.build()


class Processes:
    """Child processes that search one bm25s index; each maps the same files.

    Args:
        folder: that holds the files of bm25s.
        processes: how many search at a time.

    Raises:
        RetrieverError: a child was killed while it loaded the index.
    """

    def __init__(self, folder: pathlib.Path, processes: int):
        self._folder = folder
        self._processes = processes
        self._lock = threading.Lock()
        self._pool, _ = _pool(processes)
        # Loaded and compiled before the first query has to wait for it.
        futures = [self._pool.submit(_load, folder) for _ in range(processes)]
        try:
            self.rows: int = max(future.result() for future in futures)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RetrieverError(
                f"a bm25s process was killed while it loaded {folder}; {processes} of them take"
                " memory of their own, fewer threads take less"
            ) from error

    def search(self, queries: Sequence[list[str]], topk: int) -> list[list[tuple[int, float]]]:
        """Return (row, score) for each query of plain words.

        Raises:
            RetrieverError: the child was killed; the next search starts another.
        """
        pool = self._pool
        try:
            return pool.submit(_search, self._folder, queries, topk).result()
        except (concurrent.futures.process.BrokenProcessPool, RuntimeError) as error:
            with self._lock:
                if self._pool is pool:
                    pool.shutdown(wait=False)
                    self._pool, _ = _pool(self._processes)
            raise RetrieverError(f"a bm25s process ended and is started again: {error}") from error

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def _load(folder: pathlib.Path) -> int:
    """Load the index into this child once; return its number of rows."""
    if "model" not in _child:
        import bm25s
        import tantivy

        model = bm25s.BM25.load(folder, mmap=True)
        model.retrieve([[next(iter(model.vocab_dict))]], k=1, show_progress=False, n_threads=1)
        _child["analyze"] = _analyzer(tantivy).analyze
        _child["model"] = model
    return _child["model"].scores["num_docs"]


def _search(
    folder: pathlib.Path, queries: Sequence[list[str]], topk: int
) -> list[list[tuple[int, float]]]:
    rows_total = _load(folder)
    model, analyze = _child["model"], _child["analyze"]
    results: list[list[tuple[int, float]]] = [[] for _ in queries]
    asked = []
    for i, query in enumerate(queries):
        # A word counts once, as in tantivy.
        words = dict.fromkeys(analyze(" ".join(query)))
        known = [word for word in words if word in model.vocab_dict]
        if known:
            asked.append((i, known))
    if not asked:
        return results
    rows, scores = model.retrieve(
        [words for _, words in asked],
        k=min(topk, rows_total),
        show_progress=False,
        n_threads=1,
    )
    for (i, _), best_rows, best_scores in zip(asked, rows.tolist(), scores.tolist(), strict=True):
        # The factor that bm25s leaves out of BM25, and tantivy does not.
        pairs = zip(best_rows, best_scores, strict=True)
        hits = [(row, score * (K1 + 1)) for row, score in pairs if score > 0]
        results[i] = sorted(hits, key=lambda hit: (-hit[1], hit[0]))
    return results
