"""Retrieval at size: build time, memory, queries a second, latency and recall of every engine.

    uv run python benchmarks/retrieval.py [--passages 1000000]

The corpus is synthetic: 30 to 90 words a passage out of a Zipf vocabulary. A query is six words of
one passage. Recall is against BM25 computed by its formula over the whole corpus, without an index;
for dense, against the same vectors compared one query at a time in float64. Builds and servers are
the real commands, in processes of their own. `dense` embeds with MiniLM, which takes most of its
time; `static` is the engine dense with a random vector a word (model2vec's form), which shows what
the vectors themselves cost at size.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import psutil
import tokenizers
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from copc_jax.tools import embedding
from copc_jax.tools.index import IndexRetriever
from copc_jax.tools.retriever import Passage, write_corpus

VOCABULARY = 200_000
EXPONENT = 1.05
SHORTEST, LONGEST = 30, 90
QUERY_WORDS = 6
TOPK = 3
BATCH = 64
CLIENTS = 16
COMMAND = [sys.executable, "-m", "copc_jax.tools.retriever"]


class Corpus:
    """Word numbers of all passages in one array, and which passage each belongs to."""

    def __init__(self, passages: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(SHORTEST, LONGEST + 1, passages)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        weights = np.cumsum(1 / np.arange(1, VOCABULARY + 1) ** EXPONENT)
        draws = rng.random(self.starts[-1], dtype=np.float32) * weights[-1]
        self.words = np.searchsorted(weights, draws).clip(max=VOCABULARY - 1).astype(np.int32)
        self.rows = np.repeat(np.arange(passages, dtype=np.int32), self.lengths)
        self._rng = rng

    def passage(self, row: int) -> Passage:
        """Return one passage; its first word is the title."""
        # A w and digits: no stemmer changes it.
        first, *rest = [f"w{i}" for i in self.words[self.starts[row] : self.starts[row + 1]]]
        return Passage(str(row), first, " ".join(rest))

    def passages(self) -> Iterator[Passage]:
        """Yield every passage."""
        return (self.passage(row) for row in range(len(self.lengths)))

    def queries(self, count: int) -> list[list[int]]:
        """Draw queries of different words of one passage each."""
        rows = self._rng.integers(0, len(self.lengths), count)
        return [self._query(self.words[self.starts[r] : self.starts[r + 1]]) for r in rows]

    def _query(self, words: np.ndarray) -> list[int]:
        different = np.unique(words)
        return self._rng.permutation(different)[:QUERY_WORDS].tolist()

    def exact_bm25(self, query: Sequence[int], k1: float = 1.2, b: float = 0.75) -> np.ndarray:
        """Score every passage by the formula: f64[passages]."""
        norm = k1 * (1 - b + b * self.lengths / self.lengths.mean())
        scores = np.zeros(len(self.lengths))
        for word in query:
            frequency = np.bincount(self.rows[self.words == word], minlength=len(scores))
            df = np.count_nonzero(frequency)
            idf = np.log(1 + (len(scores) - df + 0.5) / (df + 0.5))
            scores += idf * frequency * (k1 + 1) / (frequency + norm)
        return scores


def recall(found: Sequence[Passage], exact: np.ndarray) -> float:
    """Share of the first TOPK that are as good as the exact TOPK, ties included."""
    least = np.partition(exact, -TOPK)[-TOPK]
    return sum(exact[int(hit.id)] >= least - 1e-6 * abs(least) for hit in found) / TOPK


def exact_dense(folder: pathlib.Path, settings: dict[str, Any], query: str) -> np.ndarray:
    vectors = np.fromfile(folder / "vectors.bin", settings["dtype"])
    vectors = vectors.reshape(-1, settings["dimension"]).astype(np.float64)
    model = embedding.load(settings["embedding"], settings["max_tokens"])
    return vectors @ model.embed([query])[0].astype(np.float64)


def usage(process: psutil.Process) -> tuple[int, float]:
    """Resident bytes and CPU seconds of a process and its children, shared pages in each."""
    family = [process, *process.children(recursive=True)]
    times = [member.cpu_times() for member in family]
    seconds = sum(t.user + t.system for t in times)
    return sum(member.memory_info().rss for member in family), seconds


def write_static_model(folder: pathlib.Path, dimension: int = 256) -> pathlib.Path:
    """Write a random vector for every word in model2vec's form, once."""
    if not folder.exists():
        folder.mkdir()
        words = {"[UNK]": 0} | {f"w{i}": i + 1 for i in range(VOCABULARY)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        vectors = np.random.default_rng(0).standard_normal((len(words), dimension), np.float32)
        save_file({"embeddings": vectors}, folder / "model.safetensors")
    return folder


def build(
    corpus: pathlib.Path, folder: pathlib.Path, engine: Sequence[str], threads: int
) -> dict[str, Any]:
    command = [*COMMAND, "build", "--corpus", str(corpus), "--index", str(folder)]
    begun = time.perf_counter()
    process = psutil.Popen([*command, "--engine", *engine, "--threads", str(threads)])
    peak, cpu = 0, 0.0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            rss, seconds = usage(process)
            peak, cpu = max(peak, rss), max(cpu, seconds)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"building {engine} failed")
    seconds = time.perf_counter() - begun
    own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    store = sum((folder / name).stat().st_size for name in ("passages.jsonl", "offsets.u64"))
    return {
        "build_s": seconds,
        "build_cpu_s": cpu,
        "build_peak_rss_mb": peak / 2**20,
        "passages_mb": store / 2**20,
        "index_mb": (own - store) / 2**20,
    }


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"qps": len(seconds) / sum(seconds), "p50_ms": float(p50), "p99_ms": float(p99)}


def timed(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def direct(folder: pathlib.Path, queries: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Search in this process, in one thread."""
    opening = time.perf_counter()
    retriever = IndexRetriever(folder, threads=1)
    opened = time.perf_counter() - opening
    try:
        retriever.lookup(queries[:8], TOPK)
        alone = [timed(lambda q=query: retriever.lookup([q], TOPK)) for query in queries]
        groups = [queries[i : i + BATCH] for i in range(0, len(queries), BATCH)]
        batched = sum(timed(lambda g=group: retriever.lookup(g, TOPK)) for group in groups)
        found = retriever.lookup(queries, TOPK)
    finally:
        asyncio.run(retriever.close())
    figures = {"open_s": opened, **latencies(alone), "batched_qps": len(queries) / batched}
    return figures, found


async def over_http(url: str, queries: Sequence[str]) -> dict[str, Any]:
    """One request at a time, requests of many queries, and many requests at a time."""
    connector = aiohttp.TCPConnector(limit=CLIENTS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def send(group: Sequence[str]) -> float:
            body = {"queries": list(group), "topk": TOPK, "return_scores": True}
            begun = time.perf_counter()
            async with session.post(f"{url}/retrieve", json=body) as response:
                response.raise_for_status()
                await response.json()
            return time.perf_counter() - begun

        await send(queries[:8])
        alone = [await send([query]) for query in queries]
        groups = [queries[i : i + BATCH] for i in range(0, len(queries), BATCH)]
        batched = sum([await send(group) for group in groups])
        waiting = list(queries)
        together: list[float] = []

        async def client() -> None:
            while waiting:
                together.append(await send([waiting.pop()]))

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        seconds = time.perf_counter() - begun
    return {
        "http": latencies(alone),
        "http_batched_qps": len(queries) / batched,
        "http_concurrent": {**latencies(together), "qps": len(queries) / seconds},
    }


def serve(folder: pathlib.Path, queries: Sequence[str], threads: int) -> dict[str, Any]:
    command = [*COMMAND, "serve", "--index", str(folder), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        figures = asyncio.run(over_http(url, queries))
        figures["serve_rss_mb"] = usage(psutil.Process(process.pid))[0] / 2**20
        process.terminate()
    return figures


def measure(
    engine: str, count: int, options: argparse.Namespace, work: pathlib.Path
) -> dict[str, Any]:
    corpus = Corpus(count)
    path = work / f"corpus-{count}.jsonl"
    if not path.exists():
        write_corpus(path, corpus.passages())
    folder = work / f"{engine}-{count}"
    figures = {"engine": engine, "passages": count, "words": int(corpus.starts[-1])}
    command = [engine]
    if engine == "static":
        command = ["dense", "--embedding", str(write_static_model(work / "model"))]
    figures |= build(path, folder, command, options.threads)
    queries = corpus.queries(options.queries)
    texts = [" ".join(f"w{word}" for word in query) for query in queries]
    figures["direct"], found = direct(folder, texts)
    figures |= serve(folder, texts, options.threads)
    checked = range(min(options.exact, len(queries)))
    if command[0] == "dense":
        settings = json.loads((folder / "manifest.json").read_text())["settings"]
        exact = [exact_dense(folder, settings, texts[i]) for i in checked]
    else:
        exact = [corpus.exact_bm25(queries[i]) for i in checked]
    shares = [recall(found[i], scores) for i, scores in zip(checked, exact, strict=True)]
    figures[f"recall@{TOPK}"] = float(np.mean(shares))
    return figures


def table(rows: Sequence[dict[str, Any]]) -> Table:
    out = Table(title="Retrieval")
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "engine": lambda r: r["engine"],
        "passages": lambda r: f"{r['passages']:,}",
        "build s (CPU s)": lambda r: f"{r['build_s']:.0f} ({r['build_cpu_s']:.0f})",
        "build RSS MB": lambda r: f"{r['build_peak_rss_mb']:.0f}",
        "index MB": lambda r: f"{r['index_mb']:.0f}",
        "open ms": lambda r: f"{r['direct']['open_s'] * 1e3:.0f}",
        "direct q/s": lambda r: f"{r['direct']['qps']:.0f}",
        "p50/p99 ms": lambda r: f"{r['direct']['p50_ms']:.1f}/{r['direct']['p99_ms']:.1f}",
        f"batch {BATCH} q/s": lambda r: f"{r['direct']['batched_qps']:.0f}",
        "HTTP q/s": lambda r: f"{r['http']['qps']:.0f}",
        "HTTP p50/p99 ms": lambda r: f"{r['http']['p50_ms']:.1f}/{r['http']['p99_ms']:.1f}",
        f"HTTP batch {BATCH} q/s": lambda r: f"{r['http_batched_qps']:.0f}",
        f"HTTP {CLIENTS} clients q/s": lambda r: f"{r['http_concurrent']['qps']:.0f}",
        "serve RSS MB": lambda r: f"{r['serve_rss_mb']:.0f}",
        f"recall@{TOPK}": lambda r: f"{r[f'recall@{TOPK}']:.3f}",
    }
    for name in columns:
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(*(show(row) for show in columns.values()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=1_000_000, help="for all but dense")
    parser.add_argument("--dense-passages", type=int, default=1_000, help="for dense")
    engines = ["tantivy", "bm25s", "static", "dense"]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--exact", type=int, default=50, help="queries checked for recall")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", default="runs/benchmarks/retrieval.json")
    parser.add_argument("--work", help="folder for corpora and indexes; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(options.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        rows = []
        for engine in options.engines:
            count = options.dense_passages if engine == "dense" else options.passages
            rows.append(measure(engine, count, options, work))
            machine = {
                "cores": len(os.sched_getaffinity(0)),
                "load_average": os.getloadavg(),
                "python": platform.python_version(),
            }
            out = pathlib.Path(options.out)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"machine": machine, "results": rows}, indent=1))
    Console(width=200).print(table(rows))


if __name__ == "__main__":
    main()
