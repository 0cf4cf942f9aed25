"""Hugging Face checkpoint folders in and out: configuration, weights and chat template, no torch.

Both ways are strict: a tensor that is missing, unknown, given twice or of another shape raises a
`ValueError` that names it, and nothing is guessed.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from copc_jax import model

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# transformers refuses a file that does not say which framework's layout it has.
_METADATA = {"format": "pt"}

_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"

ChatTemplate = Callable[[Sequence[Mapping[str, str]]], str]
"""Turns messages, each with "role" and "content", into the text that the assistant goes on from."""

# Old exports hold this constant of the rotary embedding in every layer.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def save_hf(
    directory: str | os.PathLike[str],
    params: model.Params,
    config: model.ModelConfig,
    *,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that transformers and SGLang load.

    The folder appears whole or not at all: it is written next to its place and then renamed. An
    existing folder of that name is replaced.

    Args:
        directory: the folder to make.
        params: an actor's parameters ("lm" head).
        config: their model.
        tokenizer_json: content of tokenizer.json; a tokenizer_config.json that has it read as it is
            comes with it, unless `extra_files` holds another.
        dtype: of the tensors on disk: "float32", "bfloat16" or "float16".
        extra_files: further text files, content by name, such as tokenizer_config.json.
        max_shard_bytes: size from which on the weights are split over several files.

    Raises:
        ValueError: naming the tensor, when `params` does not fit `config`.
        OSError: a file cannot be written.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    files = {"config.json": json.dumps({**config.to_hf(), "torch_dtype": dtype}, indent=2) + "\n"}
    if tokenizer_json is not None:
        files["tokenizer.json"] = tokenizer_json
        # transformers and SGLang would otherwise guess a class that cuts text in its own way.
        files["tokenizer_config.json"] = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
    files.update(extra_files or {})
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        _save_shards(staging, _hf_tensors(params, config, jnp.dtype(dtype)), max_shard_bytes)
        # Folder and weights are made private; a server may run as somebody else.
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            os.replace(directory, old)
            os.replace(staging, directory)
            shutil.rmtree(old)
        else:
            os.replace(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def load_hf(
    directory: str | os.PathLike[str],
    *,
    head: model.Head = "lm",
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[model.Params, model.ModelConfig]:
    """Read a folder's configuration and weights.

    Args:
        directory: a folder with config.json and safetensors, in one file or several with an index.
        head: "value" takes the body alone and adds a zero value head.
        dtype: of the parameters; None keeps what is on disk.
        shardings: tree like the parameters of where to put each leaf; None is the default device.

    Raises:
        FileNotFoundError: when config.json or the weights are not there.
        ValueError: naming the field, tensor or file that does not fit.
    """
    config = load_config(directory)
    return load_weights(directory, config, head=head, dtype=dtype, shardings=shardings), config


def load_config(directory: str | os.PathLike[str]) -> model.ModelConfig:
    """Read a folder's config.json.

    Raises:
        FileNotFoundError: when there is none.
        ValueError: naming the field that is missing or not supported.
    """
    path = Path(directory) / "config.json"
    try:
        return model.ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_weights(
    directory: str | os.PathLike[str],
    config: model.ModelConfig,
    *,
    head: model.Head = "lm",
    dtype: str | None = "float32",
    shardings: Any = None,
) -> model.Params:
    """Read a folder's weights, which must be exactly those of `config`; arguments as `load_hf`.

    Raises:
        FileNotFoundError: when there are no weights.
        ValueError: naming the tensor or file that does not fit.
    """
    directory = Path(directory)
    table = model.parameter_table(config, head)
    where = _locate(directory)
    expected = {name for spec in table.values() for name in _hf_names(spec)}
    # A critic is read from a whole model, and some exports write a tied head a second time.
    known = expected | {"lm_head.weight"}
    for name in sorted(where):
        if name not in known and not name.endswith(_IGNORED_SUFFIX):
            raise ValueError(f"{directory}: unknown tensor {name!r}")
    for name in sorted(expected):
        if name not in where:
            raise ValueError(f"{directory}: tensor {name!r} is missing")

    def read(name: str) -> np.ndarray:
        tensor = where[name].get_tensor(name)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"{directory}: tensor {name!r} has dtype {tensor.dtype}, not a float")
        return tensor

    if config.tie_word_embeddings and "lm_head.weight" in where:
        embedding, second = read("model.embed_tokens.weight"), read("lm_head.weight")
        if not np.array_equal(embedding, second):
            raise ValueError(
                f"{directory}: tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', "
                "but config.json ties the two"
            )

    def leaf(spec: model.Parameter, sharding: Any) -> jax.Array:
        if spec.hf_name is None:
            value = np.full(spec.shape, spec.mean, jnp.dtype(dtype or "float32"))
            return jax.device_put(value, sharding)
        tensors = []
        for name in _hf_names(spec):
            tensor = read(name)
            if tensor.shape != _hf_shape(spec):
                raise ValueError(
                    f"{directory}: tensor {name!r} has shape {tensor.shape}, "
                    f"expected {_hf_shape(spec)}"
                )
            tensor = tensor.T if spec.layout == "transpose" else tensor
            tensors.append(tensor if dtype is None else tensor.astype(jnp.dtype(dtype)))
        value = np.stack(tensors) if spec.axes[0] == "layer" else tensors[0]
        return jax.device_put(value, sharding)

    places = {} if shardings is None else model.flatten(shardings)
    return model.unflatten({path: leaf(spec, places.get(path)) for path, spec in table.items()})


def side_files(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Read what a folder says beside weights and tokenizer, for `save_hf` to pass on.

    These are special tokens, stops and chat template, in the files of tokenizer and generation.
    """
    names = (_TOKENIZER_CONFIG, "special_tokens_map.json", _GENERATION_CONFIG, _CHAT_TEMPLATE)
    files = (Path(directory) / name for name in names)
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.exists()}


def eos_token_ids(
    directory: str | os.PathLike[str], config: model.ModelConfig, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Collect the tokens that end a response from the places where models name them.

    Chat models often name one in config.json and the others in generation_config.json, or the end
    of a turn in tokenizer_config.json alone.
    """
    ids = list(config.eos_token_ids)
    named = _read_json(directory, _GENERATION_CONFIG).get("eos_token_id")
    ids += [named] if isinstance(named, int) else named or []
    token = _special_tokens(directory).get("eos_token")
    number = None if token is None else tokenizer.token_to_id(token)
    if number is not None:
        ids.append(number)
    return tuple(dict.fromkeys(ids))


def chat_template(directory: str | os.PathLike[str]) -> ChatTemplate | None:
    """Read a folder's own chat template, or None where it has none.

    What it renders ends where the assistant's message begins. Special tokens in it are text: encode
    it without adding any, and take those of users and tools out of their messages before.

    Raises:
        ValueError: the template is no valid Jinja, here, or refuses the messages, when called.
    """
    file = Path(directory) / _CHAT_TEMPLATE
    if file.exists():
        source = file.read_text(encoding="utf-8")
    else:
        file = Path(directory) / _TOKENIZER_CONFIG
        source = _read_json(directory, _TOKENIZER_CONFIG).get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    special = _special_tokens(directory)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{file}: chat template: {error}") from error

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"{file}: chat template: {error}") from error

    return render


class _Generation(jinja2.ext.Extension):
    """Accept the block that marks what the assistant wrote; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the block's content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _read_json(directory: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Read a file that may not be there."""
    file = Path(directory) / name
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _special_tokens(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Texts of special tokens by role, such as "eos_token"."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", _TOKENIZER_CONFIG):
        for role, token in _read_json(directory, name).items():
            token = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(token, str):
                found[role] = token
    return found


def _hf_names(spec: model.Parameter) -> list[str]:
    """Name the tensors that make up one parameter, layer by layer."""
    if spec.hf_name is None:
        return []
    if spec.axes[0] != "layer":
        return [spec.hf_name]
    return [spec.hf_name.format(layer=layer) for layer in range(spec.shape[0])]


def _hf_shape(spec: model.Parameter) -> tuple[int, ...]:
    shape = spec.shape[1:] if spec.axes[0] == "layer" else spec.shape
    return shape[::-1] if spec.layout == "transpose" else shape


def _locate(directory: Path) -> dict[str, Any]:
    """Open the weights: for each tensor name the open safetensors file that holds it."""
    listed: dict[str, str] = {}
    if (directory / _SINGLE).exists():
        names = [_SINGLE]
    elif (directory / _INDEX).exists():
        listed = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(listed.values()))
    else:
        raise FileNotFoundError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    where: dict[str, Any] = {}
    for name in names:
        try:
            file = safe_open(directory / name, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{directory / name}: {error}") from error
        for tensor in file.keys():  # noqa: SIM118 - the file is not a mapping
            if tensor in where:
                raise ValueError(f"{directory}: tensor {tensor!r} is in two files")
            where[tensor] = file
    for tensor in sorted(set(listed) - set(where)):
        raise ValueError(f"{directory}: tensor {tensor!r} is missing from {listed[tensor]}")
    return where


def _hf_tensors(
    params: model.Params, config: model.ModelConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Give the tensors of a checkpoint by name, contiguous and in the order of the table."""
    leaves = model.flatten(params)
    table = model.parameter_table(config)
    for path in leaves:
        if path not in table:
            raise ValueError(f"parameter {'/'.join(path)!r} is not one of this model")
    for path, spec in table.items():
        if path not in leaves:
            raise ValueError(f"parameter {'/'.join(path)!r} is missing")
        value = np.asarray(leaves[path])
        if value.shape != spec.shape:
            raise ValueError(
                f"parameter {'/'.join(path)!r} has shape {value.shape}, expected {spec.shape}"
            )
        layers = value if spec.axes[0] == "layer" else value[None]
        for name, tensor in zip(_hf_names(spec), layers, strict=True):
            tensor = tensor.T if spec.layout == "transpose" else tensor
            # safetensors writes the bytes as they lie in memory, so a mere view would be wrong.
            yield name, np.ascontiguousarray(tensor.astype(dtype))


def _save_file(tensors: dict[str, np.ndarray], file: Path) -> None:
    try:
        save_file(tensors, file, metadata=_METADATA)
    except SafetensorError as error:
        # What the system refuses, such as on a full disk, is an error like that of other files.
        raise OSError(f"{file} cannot be written: {error}") from error


def _save_shards(
    directory: Path, tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int
) -> None:
    """Write one file, or numbered files and their index when one would be too large."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = total = 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        _save_file(shards[0], directory / _SINGLE)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_file(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
