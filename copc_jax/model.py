"""A Llama-style decoder as plain pytrees and functions.

Parameters are nested dicts of arrays whose layers are stacked on a leading axis. One table,
`parameter_table`, says for each of them its shape, logical axes, initial distribution and Hugging
Face name; `init`, sharding.py and hf.py read it.

Activations stay flat, [rows * time, embed], outside attention: XLA's CPU backend runs the backward
pass of the dense layers about 1.4 times faster on matrices than on [rows, time, embed].
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Head = Literal["lm", "value"]
Path = tuple[str, ...]
Params = dict[str, Any]

# Finite, so that a query without any key to look at gives a uniform softmax and not NaN.
_MASKED = -1e30
# Models of at most so many layers are compiled layer by layer.
_SHALLOW = 4


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretch of the rotary embedding (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder, named as in Hugging Face's config.json where the two agree.

    `attention_bias` and `qk_norm` choose the family: neither is Llama, biases on query, key and
    value are Qwen2, a norm on each query and key head is Qwen3.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have.

        Raises:
            ValueError: naming the field.
        """
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.attention_bias and self.qk_norm:
            raise ValueError("attention_bias and qk_norm belong to different families")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json.

        Raises:
            ValueError: naming the field, when one is missing or asks for something that is not
                implemented.
        """
        architectures = values.get("architectures") or ["(none)"]
        architecture = architectures[0]
        if architecture not in _ARCHITECTURES:
            known = ", ".join(sorted(_ARCHITECTURES))
            raise ValueError(f"architectures: {architecture!r} is not supported, only {known}")
        for name, wanted in _FIXED_HF_FIELDS.items():
            if values.get(name, wanted) != wanted:
                raise ValueError(f"{name}: only {wanted!r} is supported, not {values[name]!r}")
        kinds = set(values.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"layer_types: only 'full_attention' is supported, not {min(kinds)!r}")
        attention_bias, qk_norm = _ARCHITECTURES[architecture]
        # Qwen2 has its biases whatever the field says; elsewhere it would add one to the output
        # projection too.
        if not attention_bias and values.get("attention_bias", False):
            raise ValueError(f"attention_bias: true is not supported for {architecture}")

        def required(name: str) -> Any:
            if values.get(name) is None:
                raise ValueError(f"{name} is missing from config.json")
            return values[name]

        hidden_size, num_heads = required("hidden_size"), required("num_attention_heads")
        head_dim = values.get("head_dim") or (128 if qk_norm else hidden_size // num_heads)
        # transformers 5 keeps theta and scaling together under rope_parameters.
        rope = values.get("rope_parameters") or values.get("rope_scaling")
        theta = (rope or {}).get("rope_theta") or values.get("rope_theta") or 10000.0
        eos = values.get("eos_token_id")
        return cls(
            vocab_size=required("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=required("intermediate_size"),
            num_layers=required("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=values.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rope_theta=float(theta),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_position_embeddings=values.get("max_position_embeddings", 2048),
            attention_bias=attention_bias,
            qk_norm=qk_norm,
            rope_scaling=_rope_scaling_from_hf(rope),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the config.json that `from_hf` reads back to an equal configuration."""
        family = (self.attention_bias, self.qk_norm)
        architecture = next(name for name, flags in _ARCHITECTURES.items() if flags == family)
        values: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
        }
        if self.rope_scaling is not None:
            values["rope_scaling"] = {
                "rope_type": "llama3",
                **dataclasses.asdict(self.rope_scaling),
            }
        if self.bos_token_id is not None:
            values["bos_token_id"] = self.bos_token_id
        if self.eos_token_ids:
            several = len(self.eos_token_ids) > 1
            values["eos_token_id"] = list(self.eos_token_ids) if several else self.eos_token_ids[0]
        return values


# Architecture name of config.json -> (attention_bias, qk_norm).
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}

# Fields of config.json that change the computation and are implemented for one value only.
_FIXED_HF_FIELDS = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen model.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
    """

    rank: int = 0
    """Rank of the adapters that are trained in place of the weights, which stay as they are; 0
    trains all weights. Adapters usually take a learning rate some ten times as high."""
    alpha: float = 16.0
    """Adapters count alpha / rank times."""
    targets: str = "q,k,v,o,gate,up,down"
    """Projections that get an adapter, in every layer."""

    def __post_init__(self) -> None:
        """Refuse what no adapter can be.

        Raises:
            ValueError: naming the field.
        """
        if self.rank < 0:
            raise ValueError(f"lora.rank must be 0 (off) or more, got {self.rank}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.alpha must be a positive number, got {self.alpha}")
        for name in self.targets.split(","):
            if name not in _LORA_TARGETS:
                known = ",".join(_LORA_TARGETS)
                raise ValueError(f"lora.targets: {name!r} is unknown; choose from {known}")

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / self.rank


# Names that people give the projections -> names of their parameters.
_LORA_TARGETS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "attention_output",
    "gate": "gate",
    "up": "up",
    "down": "down",
}


def _rope_scaling_from_hf(rope: Mapping[str, Any] | None) -> RopeScaling | None:
    if not rope:
        return None
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: only 1.0 is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling: type {kind!r} is not supported, only 'llama3'")
    fields = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in fields if name not in rope]
    if missing:
        raise ValueError(f"rope_scaling: {', '.join(missing)} missing")
    return RopeScaling(**{name: rope[name] for name in fields})


# -------------------------------------------------------------------------------- parameters


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the parameter tree.

    Attributes:
        shape: as stored here; a leading "layer" axis stacks the layers.
        axes: a logical name for each axis, which sharding.py maps to mesh axes.
        hf_name: its name in a Hugging Face checkpoint, with `{layer}` where layers are stacked;
            None if it has none.
        layout: "transpose" for dense kernels, which are [in, out] here and [out, in] there.
        mean: mean of its initial distribution.
        std: standard deviation of its initial distribution; 0 makes it constant.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str | None
    layout: Literal["same", "transpose"] = "same"
    mean: float = 0.0
    std: float = 0.0


def parameter_table(config: ModelConfig, head: Head = "lm") -> dict[Path, Parameter]:
    """List every parameter by its path in the tree.

    Dense kernels start at standard deviation fan_in ** -0.5, those that write into the residual
    stream at a further (2 * num_layers) ** -0.5, the embedding at 0.02; the value head starts at
    zero, so that V starts at 0.
    """
    layers, embed, mlp = config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table: dict[Path, Parameter] = {}

    def layer(name: str, hf_name: str, shape: tuple[int, ...], axes: tuple[str, ...], **more: Any):
        hf_name = f"model.layers.{{layer}}.{hf_name}"
        table["layers", name] = Parameter((layers, *shape), ("layer", *axes), hf_name, **more)

    def dense(name: str, hf_name: str, sizes: tuple[int, int], axes: tuple[str, str]):
        residual = (2 * layers) ** -0.5 if axes[1] == "embed" else 1.0
        std = sizes[0] ** -0.5 * residual
        layer(name, f"{hf_name}.weight", sizes, axes, layout="transpose", std=std)

    table["embed",] = Parameter(
        (config.vocab_size, embed), ("vocab", "embed"), "model.embed_tokens.weight", std=0.02
    )
    layer("attention_norm", "input_layernorm.weight", (embed,), ("norm",), mean=1.0)
    dense("query", "self_attn.q_proj", (embed, heads), ("embed", "heads"))
    dense("key", "self_attn.k_proj", (embed, kv_heads), ("embed", "heads"))
    dense("value", "self_attn.v_proj", (embed, kv_heads), ("embed", "heads"))
    if config.attention_bias:
        layer("query_bias", "self_attn.q_proj.bias", (heads,), ("heads",))
        layer("key_bias", "self_attn.k_proj.bias", (kv_heads,), ("heads",))
        layer("value_bias", "self_attn.v_proj.bias", (kv_heads,), ("heads",))
    if config.qk_norm:
        layer("query_norm", "self_attn.q_norm.weight", (config.head_dim,), ("norm",), mean=1.0)
        layer("key_norm", "self_attn.k_norm.weight", (config.head_dim,), ("norm",), mean=1.0)
    dense("attention_output", "self_attn.o_proj", (heads, embed), ("heads", "embed"))
    layer("mlp_norm", "post_attention_layernorm.weight", (embed,), ("norm",), mean=1.0)
    dense("gate", "mlp.gate_proj", (embed, mlp), ("embed", "mlp"))
    dense("up", "mlp.up_proj", (embed, mlp), ("embed", "mlp"))
    dense("down", "mlp.down_proj", (mlp, embed), ("mlp", "embed"))
    table["final_norm",] = Parameter((embed,), ("norm",), "model.norm.weight", mean=1.0)
    if head == "value":
        table["value_head", "kernel"] = Parameter((embed,), ("norm",), None)
        table["value_head", "bias"] = Parameter((), (), None)
    elif not config.tie_word_embeddings:
        table["head",] = Parameter(
            (config.vocab_size, embed), ("vocab", "embed"), "lm_head.weight", std=embed**-0.5
        )
    return table


def lora_table(config: ModelConfig, lora: LoraConfig, head: Head = "lm") -> dict[Path, Parameter]:
    """List what is trained beside a frozen body: adapters and, for a critic, its value head.

    Next to a kernel W [in, out] stand A [in, rank], which starts at standard deviation
    in ** -0.5, and B [rank, out], which starts at zero: training starts from W.
    """
    whole = parameter_table(config, head)
    table: dict[Path, Parameter] = {}
    for target in lora.targets.split(","):
        name = _LORA_TARGETS[target]
        kernel = whole["layers", name]
        (layers, inputs, outputs), (_, from_axis, to_axis) = kernel.shape, kernel.axes
        table["layers", f"{name}_lora_a"] = Parameter(
            (layers, inputs, lora.rank), ("layer", from_axis, "rank"), None, std=inputs**-0.5
        )
        table["layers", f"{name}_lora_b"] = Parameter(
            (layers, lora.rank, outputs), ("layer", "rank", to_axis), None
        )
    return table | {path: spec for path, spec in whole.items() if path[0] == "value_head"}


def unflatten(leaves: Mapping[Path, Any]) -> Params:
    """Build the nested tree of `leaves`, which are keyed by path."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """List the leaves of a nested tree by path; the inverse of `unflatten`."""
    leaves: dict[Path, Any] = {}
    for name, node in tree.items():
        below = flatten(node) if isinstance(node, Mapping) else {(): node}
        leaves.update({(name, *path): leaf for path, leaf in below.items()})
    return leaves


def init(key: Array, config: ModelConfig, *, head: Head = "lm") -> Params:
    """Draw float32 parameters; each leaf depends on `key` and its own path only."""
    return _draw(key, parameter_table(config, head))


def init_lora(key: Array, config: ModelConfig, lora: LoraConfig, *, head: Head = "lm") -> Params:
    """Draw the leaves of `lora_table`, as `init` does; they change nothing yet."""
    return _draw(key, lora_table(config, lora, head))


def _draw(key: Array, table: Mapping[Path, Parameter]) -> Params:
    def draw(path: Path, spec: Parameter) -> Array:
        if spec.std == 0.0:
            return jnp.full(spec.shape, spec.mean, jnp.float32)
        leaf_key = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        return spec.mean + spec.std * jax.random.normal(leaf_key, spec.shape, jnp.float32)

    return unflatten({path: draw(path, spec) for path, spec in table.items()})


def with_lora(base: Params, trained: Params, scale: float) -> Params:
    """Give parameters for `forward` that hold adapters beside the weights they adapt.

    Nothing of the size of a weight is made, neither here nor by a gradient for `trained`.

    Args:
        base: parameters of a whole model.
        trained: tree of `lora_table`; its value head, if any, is added.
        scale: from the `LoraConfig`.
    """
    adapters = {
        name: scale * leaf if name.endswith("_lora_b") else leaf
        for name, leaf in trained["layers"].items()
    }
    return {**base, **trained, "layers": {**base["layers"], **adapters}}


def merge_lora(base: Params, trained: Params, scale: float) -> Params:
    """Add the adapters to the weights, W + scale * A B, for those who know of no adapters."""
    merged = dict(base["layers"])
    for name, a in trained["layers"].items():
        if name.endswith("_lora_a"):
            kernel = name.removesuffix("_lora_a")
            merged[kernel] = merged[kernel] + scale * (a @ trained["layers"][f"{kernel}_lora_b"])
    return {**base, **trained, "layers": merged}


def mimetic_init(key: Array, config: ModelConfig, *, embed_offset: float = 0.1) -> Params:
    """Draw parameters from which a small model learns to read and copy several times sooner.

    To the usual draw it adds, per head, one orthonormal projection to both query and key, so that a
    token first looks at its likes, and another to value and output, so that it copies what it looks
    at. Embeddings start at a standard deviation of `hidden_size ** -0.5` and share a constant
    direction, without which no head without biases can attend by distance alone.

    Args:
        key: PRNG key.
        config: the model; heads * head_dim must not exceed hidden_size.
        embed_offset: size of the constant direction in each coordinate.

    Source: Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", arXiv
    2305.09828.
    """
    base, look, copy = jax.random.split(key, 3)
    params = init(base, config)
    size, kv_heads, head_dim = config.hidden_size, config.num_kv_heads, config.head_dim
    if kv_heads * head_dim > size:
        raise ValueError(
            f"mimetic_init needs num_kv_heads x head_dim of at most hidden_size, got {kv_heads} x "
            f"{head_dim} > {size}"
        )

    def projections(key: Array) -> Array:
        draws = jax.random.normal(key, (config.num_layers, size, size))
        return jnp.linalg.qr(draws)[0][:, :, : kv_heads * head_dim]

    def to_heads(x: Array) -> Array:
        """Give every query head the projection of its key-value head."""
        x = x.reshape(config.num_layers, size, kv_heads, head_dim)
        x = jnp.repeat(x, config.num_heads // kv_heads, axis=2)
        return x.reshape(config.num_layers, size, -1)

    looks, copies = projections(look), projections(copy)
    added = {
        "query": to_heads(looks),
        "key": looks,
        "value": copies,
        "attention_output": jnp.swapaxes(to_heads(copies), 1, 2),
    }
    layers = {name: x + added[name] if name in added else x for name, x in params["layers"].items()}
    scale = params["embed"].std()
    embed = params["embed"] * (size**-0.5 / scale)
    sign = jnp.where(jnp.arange(size) % 2 == 0, 1.0, -1.0)
    return params | {"layers": layers, "embed": embed + embed_offset * sign[None]}


def critic_from_actor(actor: Params, config: ModelConfig) -> Params:
    """Copy the actor's body and give it a zero value head. No leaf is shared: donate both."""
    body = {name: leaf for name, leaf in actor.items() if name != "head"}
    value_head = {
        "kernel": jnp.zeros(config.hidden_size, jnp.float32),
        "bias": jnp.zeros((), jnp.float32),
    }
    return {**jax.tree.map(jnp.copy, body), "value_head": value_head}


# -------------------------------------------------------------------------------- layers


def _rms_norm(x: Float[Array, "*n embed"], scale: Float[Array, " embed"], eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def _inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotary frequencies in radians per position, f32[head_dim / 2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = 1.0 / np.float32(config.rope_theta) ** exponent
    scaling = config.rope_scaling
    if scaling is not None:
        # Waves that turn often within the original context stay, those that do not are slowed by
        # `factor`.
        turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = (keep + (1.0 - keep) / scaling.factor) * frequency
    return frequency.astype(np.float32)


def _rotary(
    config: ModelConfig, positions: Int[Array, " n"]
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    angle = positions.astype(jnp.float32)[:, None, None] * _inverse_frequencies(config)[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: Float[Array, "n heads head_dim"], rotary: tuple[Array, Array]) -> Array:
    """Rotate channel i with channel i + head_dim / 2, as Hugging Face's checkpoints expect."""
    cos, sin = (
        jnp.broadcast_to(table.astype(x.dtype), (*x.shape[:2], x.shape[2] // 2)) for table in rotary
    )
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _dense(layer: Params, name: str, x: Float[Array, "n inputs"]) -> Float[Array, "n outputs"]:
    """Apply a kernel, and its adapter where there is one."""
    out = x @ layer[name]
    if f"{name}_lora_a" in layer:
        out = out + x @ layer[f"{name}_lora_a"] @ layer[f"{name}_lora_b"]
    return out


def _query_key_value(
    layer: Params, config: ModelConfig, x: Float[Array, "n embed"], rotary: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Project flat activations to [n, heads, head_dim] and twice [n, kv_heads, head_dim]."""
    x = _rms_norm(x, layer["attention_norm"], config.rms_norm_eps)

    def project(name: str, heads: int) -> Array:
        out = _dense(layer, name, x)
        if config.attention_bias:
            out = out + layer[f"{name}_bias"][None]
        return out.reshape(-1, heads, config.head_dim)

    query, key = project("query", config.num_heads), project("key", config.num_kv_heads)
    if config.qk_norm:
        query = _rms_norm(query, layer["query_norm"], config.rms_norm_eps)
        key = _rms_norm(key, layer["key_norm"], config.rms_norm_eps)
    return _rotate(query, rotary), _rotate(key, rotary), project("value", config.num_kv_heads)


def _residual(layer: Params, config: ModelConfig, x: Array, attended: Array) -> Array:
    """Finish a layer: output projection of `attended` [n, heads * head_dim], then the gated MLP."""
    x = x + _dense(layer, "attention_output", attended)
    y = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    y = jax.nn.silu(_dense(layer, "gate", y)) * _dense(layer, "up", y)
    return x + _dense(layer, "down", y)


def _attention(
    query: Float[Array, "n kv_heads queries head_dim"],
    parts: Sequence[tuple[Array, Array, Array]],
) -> Float[Array, "n kv_heads queries head_dim"]:
    """Attend to sets of keys under one softmax; they are not joined, which would copy them.

    A part is keys [n, kv_heads, head_dim, keys], values [n, kv_heads, keys, head_dim] and a mask
    that broadcasts against [n, kv_heads, queries, keys]. Scores and softmax are float32 whatever
    the inputs are.
    """
    dtype = query.dtype
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    scores = [
        jnp.where(mask, multiply(query, key.astype(dtype)), _MASKED) for key, _, mask in parts
    ]
    top = functools.reduce(jnp.maximum, [part.max(axis=-1, keepdims=True) for part in scores])
    top = jax.lax.stop_gradient(top)
    weights = [jnp.exp(part - top) for part in scores]
    total = functools.reduce(jnp.add, [part.sum(axis=-1, keepdims=True) for part in weights])
    attended = [
        multiply(weight.astype(dtype), value.astype(dtype))
        for weight, (_, value, _) in zip(weights, parts, strict=True)
    ]
    return (functools.reduce(jnp.add, attended) / total).astype(dtype)


def _group_queries(
    query: Float[Array, "rows time heads head_dim"], kv_heads: int
) -> Float[Array, "rows kv_heads queries head_dim"]:
    """Gather the queries of a key-value head, head by head and then token by token, and scale."""
    rows, time, heads, head_dim = query.shape
    query = query.reshape(rows, time, kv_heads, heads // kv_heads, head_dim)
    query = query.transpose(0, 2, 3, 1, 4) * head_dim**-0.5
    return query.reshape(rows, kv_heads, -1, head_dim)


def _ungroup(
    attended: Float[Array, "rows kv_heads queries head_dim"], time: int
) -> Float[Array, "rows time heads_by_head_dim"]:
    """Undo `_group_queries` and join the heads."""
    rows, kv_heads, _, head_dim = attended.shape
    attended = attended.reshape(rows, kv_heads, -1, time, head_dim).transpose(0, 3, 1, 2, 4)
    return attended.reshape(rows, time, -1)


def _causal_attention(
    query: Float[Array, "rows time heads head_dim"],
    key: Float[Array, "rows time kv_heads head_dim"],
    value: Float[Array, "rows time kv_heads head_dim"],
    segment_ids: Int[Array, "rows time"],
) -> Float[Array, "rows time heads_by_head_dim"]:
    """Attend within each segment to tokens at and before one's own."""
    time, kv_heads = key.shape[1:3]
    # Quarters of the queries, each against the keys up to its end: three eighths of the scores are
    # never computed, which halves the time of attention on a CPU.
    size = time // 4 if time % 4 == 0 and time >= 128 else time
    key, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    index = jnp.arange(time)
    attended = []
    for start in range(0, time, size):
        end = start + size
        allowed = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
        allowed &= (index[start:end, None] >= index[None, :end])[None]
        allowed = jnp.tile(allowed, (1, query.shape[2] // kv_heads, 1))[:, None]
        grouped = _group_queries(query[:, start:end], kv_heads)
        part = _attention(grouped, [(key[..., :end], value[:, :, :end], allowed)])
        attended.append(_ungroup(part, size))
    return jnp.concatenate(attended, axis=1)


# -------------------------------------------------------------------------------- training


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: Int[Array, "rows time"],
    segment_ids: Int[Array, "rows time"],
    positions: Int[Array, "rows time"],
    *,
    remat: bool = False,
    unroll: int | None = None,
) -> Float[Array, "tokens embed"]:
    """Run the decoder body on packed rows.

    A token attends to the tokens of its own segment at and before its index, so segments of one row
    do not see each other; padding (segment 0) is a segment too and gives finite output that nothing
    else reads.

    Args:
        params: from `init`, with either head; the computation runs in their dtype.
        config: the model.
        token_ids: padded rows.
        segment_ids: 0 is padding.
        positions: index of the token within its segment.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        unroll: layers per step of the scan; None takes all of a shallow model, else one.

    Returns:
        Float32 hidden states after the final norm, flat: row r, index t is at r * time + t.
    """
    rows, time = token_ids.shape
    rotary = _rotary(config, positions.reshape(-1))

    def block(x: Array, layer: Params) -> tuple[Array, None]:
        heads = _query_key_value(layer, config, x, rotary)
        query, key, value = (y.reshape(rows, time, *y.shape[1:]) for y in heads)
        attended = _causal_attention(query, key, value, segment_ids)
        return _residual(layer, config, x, attended.reshape(rows * time, -1)), None

    x = params["embed"][token_ids.reshape(-1)]
    if unroll is None:
        # A scan copies what the backward pass needs of a layer into one array for all layers.
        unroll = config.num_layers if config.num_layers <= _SHALLOW else 1
    x, _ = jax.lax.scan(
        jax.checkpoint(block) if remat else block, x, params["layers"], unroll=unroll
    )
    return _final(params, config, x)


def logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "n embed"]
) -> Float[Array, "n vocab"]:
    """Score every next token, in float32."""
    return _logits(params["embed" if config.tie_word_embeddings else "head"], hidden)


def _logits(
    kernel: Float[Array, "vocab embed"], hidden: Float[Array, "n embed"]
) -> Float[Array, "n vocab"]:
    hidden = hidden.astype(kernel.dtype)
    return jnp.einsum("nd,vd->nv", hidden, kernel, preferred_element_type=jnp.float32)


def _is_target(scores: Float[Array, "n vocab"], target: Int[Array, " n"]) -> Bool[Array, "n vocab"]:
    # A comparison in place of a gather: its gradient joins the softmax's loop, a scatter would not.
    return target[:, None] == jnp.arange(scores.shape[1], dtype=target.dtype)[None]


def _score(
    scores: Float[Array, "n vocab"], target: Int[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Give the log-probability of each target, the entropy, and the log of the normalizer."""
    normalizer = jax.nn.logsumexp(scores, axis=-1)
    logprob = jnp.sum(jnp.where(_is_target(scores, target), scores, 0.0), axis=-1) - normalizer
    probability = jnp.exp(scores - normalizer[:, None])
    return logprob, normalizer - jnp.sum(probability * scores, axis=-1), normalizer


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _score_in_chunks(
    kernel: Float[Array, "vocab embed"],
    hidden: Float[Array, "rows time embed"],
    target: Int[Array, "rows time"],
    wanted: Bool[Array, "rows time"] | None,
    chunk: int,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Give log-probability and entropy from the logits of about `chunk` positions at a time.

    The backward pass computes the logits of a chunk again, but no maximum and no sum: the saved
    normalizer makes them probabilities, and they give both gradients before the next chunk.
    Positions that are not wanted go to the end of their row, and chunks of nothing else cost
    nothing; what is given for them means nothing.
    """
    logprob, entropy, _ = _score_pieces(kernel, hidden, target, wanted, chunk)
    return logprob, entropy


def _score_pieces(
    kernel: Array, hidden: Array, target: Array, wanted: Array | None, chunk: int
) -> tuple[Array, Array, Array]:
    cut, join, used = _chunks(wanted, target.shape, chunk)

    def step(_: None, piece: Any) -> tuple[None, Any]:
        used, hidden, target = piece
        nothing = (jnp.zeros(target.shape, jnp.float32),) * 3
        score = lambda: _score(_logits(kernel, hidden), target)
        return None, jax.lax.cond(used, score, lambda: nothing)

    _, scored = jax.lax.scan(step, None, (used, cut(hidden), cut(target)))
    logprob, entropy, normalizer = map(join, scored)
    return logprob, entropy, normalizer


def _score_forward(
    kernel: Any, hidden: Any, target: Any, wanted: Any, chunk: int
) -> tuple[Any, Any]:
    # Symbolic zeros, below, come with arguments that are wrapped.
    given = kernel.value, hidden.value, target.value, None if wanted is None else wanted.value
    logprob, entropy, normalizer = _score_pieces(*given, chunk)
    return (logprob, entropy), (*given, entropy, normalizer)


def _score_backward(chunk: int, saved: Any, cotangents: Any) -> tuple[Any, Any, None, None]:
    kernel, hidden, target, wanted, entropy, normalizer = saved
    by_logprob, by_entropy = cotangents
    # The entropy is logged and seldom differentiated: then its part of the gradient is left out.
    use_entropy = not isinstance(by_entropy, jax.custom_derivatives.SymbolicZero)
    if isinstance(by_logprob, jax.custom_derivatives.SymbolicZero):
        by_logprob = jnp.zeros_like(normalizer)
    pieces = {"hidden": hidden, "target": target, "normalizer": normalizer}
    pieces["by_logprob"] = by_logprob
    if use_entropy:
        pieces |= {"entropy": entropy, "by_entropy": by_entropy}

    def differentiate(kernel_grad: Array, piece: dict[str, Array]) -> tuple[Array, Array]:
        scores = _logits(kernel, piece["hidden"])
        logprob = scores - piece["normalizer"][:, None]
        probability = jnp.exp(logprob)
        chosen = _is_target(scores, piece["target"]).astype(jnp.float32)
        by_scores = piece["by_logprob"][:, None] * (chosen - probability)
        if use_entropy:
            surprise = logprob + piece["entropy"][:, None]
            by_scores -= piece["by_entropy"][:, None] * probability * surprise
        by_scores = by_scores.astype(kernel.dtype)
        multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        kernel_grad += multiply("nv,nd->vd", by_scores, piece["hidden"].astype(kernel.dtype))
        return kernel_grad, multiply("nv,vd->nd", by_scores, kernel)

    def step(kernel_grad: Array, piece: Any) -> tuple[Array, Array]:
        used, piece = piece
        nothing = jnp.zeros(piece["hidden"].shape, jnp.float32)
        return jax.lax.cond(
            used, lambda: differentiate(kernel_grad, piece), lambda: (kernel_grad, nothing)
        )

    cut, join, used = _chunks(wanted, target.shape, chunk)
    start = jnp.zeros(kernel.shape, jnp.float32)
    kernel_grad, hidden_grad = jax.lax.scan(step, start, (used, jax.tree.map(cut, pieces)))
    return kernel_grad.astype(kernel.dtype), join(hidden_grad).astype(hidden.dtype), None, None


_score_in_chunks.defvjp(_score_forward, _score_backward, symbolic_zeros=True)


def _chunks(
    wanted: Bool[Array, "rows time"] | None, shape: tuple[int, ...], chunk: int
) -> tuple[Callable[[Array], Array], Callable[[Array], Array], Bool[Array, " chunks"]]:
    """Return what cuts [rows, time, ...] into [chunks, positions, ...], its reverse, and its use.

    A chunk is a stretch of every row, so that rows may lie on different devices. The last result
    tells which chunks hold a position that is wanted.
    """
    rows, time = shape
    length = min(math.ceil(chunk / rows), time)
    count = math.ceil(time / length)
    missing = count * length - time
    if wanted is None:
        order = back = None
        used = jnp.ones(count, bool)
    else:
        order = jnp.argsort(~wanted, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        used = jnp.arange(count) * length < jnp.max(jnp.sum(wanted, axis=1))

    def along(x: Array, index: Array | None) -> Array:
        if index is None:
            return x
        return jnp.take_along_axis(x, index.reshape(rows, -1, *(1,) * (x.ndim - 2)), axis=1)

    def cut(x: Array) -> Array:
        x = jnp.pad(along(x, order), ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        x = jnp.moveaxis(x.reshape(rows, count, length, *x.shape[2:]), 1, 0)
        return x.reshape(count, rows * length, *x.shape[3:])

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(count, rows, length, *x.shape[2:]), 0, 1)
        return along(x.reshape(rows, count * length, *x.shape[3:])[:, :time], back)

    return cut, join, used


def _shift(
    x: Float[Array, " tokens"], segment_ids: Int[Array, "rows time"]
) -> Float[Array, "rows time"]:
    """Move what a position says of the next token to that token.

    First tokens of segments, which nothing predicts, and padding get 0.
    """
    x = x.reshape(segment_ids.shape)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    seen = (segment_ids > 0) & (segment_ids == before)
    return jnp.where(seen, jnp.pad(x, ((0, 0), (1, 0)))[:, :-1], 0.0)


def token_logprob_and_entropy(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "tokens embed"],
    token_ids: Int[Array, "rows time"],
    segment_ids: Int[Array, "rows time"],
    *,
    chunk: int | None = None,
    wanted: Bool[Array, "rows time"] | None = None,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Give log p(token | what stands before it) and that distribution's entropy, in nats.

    Both are 0 on the first token of a segment, which nothing predicts, on padding, and on tokens
    that are not wanted. The entropy costs one more pass over the vocabulary, which XLA drops when
    the result is not used.

    Args:
        params: with the "lm" head.
        config: the model.
        hidden: from `forward`.
        token_ids: as given to `forward`.
        segment_ids: as given to `forward`.
        chunk: positions whose logits exist at one time, rounded up to a multiple of the rows, and
            computed again in the backward pass; None keeps all of them.
        wanted: tokens to score, all by default. Those that are not wanted cost nothing where
            logits come in chunks: half of a conversation or more is what a tool said.
    """
    target = jnp.roll(token_ids, -1, axis=1)
    if chunk is None:
        logprob, entropy, _ = _score(logits(params, config, hidden), target.reshape(-1))
    else:
        kernel = params["embed" if config.tie_word_embeddings else "head"]
        before = None if wanted is None else jnp.roll(wanted, -1, axis=1)
        by_row = hidden.reshape(*target.shape, -1)
        # custom_vjp hides the type of its result.
        scored: Any = _score_in_chunks(kernel, by_row, target, before, chunk)
        logprob, entropy = (x.reshape(-1) for x in scored)
    seen = _shift(logprob, segment_ids), _shift(entropy, segment_ids)
    if wanted is None:
        return seen
    return jnp.where(wanted, seen[0], 0.0), jnp.where(wanted, seen[1], 0.0)


def token_logprob(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "tokens embed"],
    token_ids: Int[Array, "rows time"],
    segment_ids: Int[Array, "rows time"],
    *,
    chunk: int | None = None,
) -> Float[Array, "rows time"]:
    """Give log p(token | what stands before it) in nats; see `token_logprob_and_entropy`."""
    return token_logprob_and_entropy(params, config, hidden, token_ids, segment_ids, chunk=chunk)[0]


def values(
    params: Params,
    config: ModelConfig,
    hidden: Float[Array, "tokens embed"],
    segment_ids: Int[Array, "rows time"],
) -> Float[Array, "rows time"]:
    """Give V of what stands before each token; 0 on first tokens of segments and on padding.

    Args:
        params: with the "value" head.
        config: the model.
        hidden: from `forward` with the same parameters.
        segment_ids: as given to `forward`.
    """
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["value_head"])
    return _shift(hidden @ head["kernel"] + head["bias"], segment_ids)


# -------------------------------------------------------------------------------- decoding


@flax.struct.dataclass
class KVCache:
    """Rotated keys and values of each slot; what lies past a slot's own sequence is never read.

    A tuple has an array a layer: keys [slots, kv_heads, head_dim, length] and values [slots,
    kv_heads, length, head_dim]. The products of decoding then run along contiguous memory, and read
    a whole array where it lies: a slice of it, or of one for all layers, would be copied first.
    """

    # Not typed by shape: trees of shapes or shardings of a cache are caches too.
    key: tuple[Any, ...]
    value: tuple[Any, ...]

    @property
    def slots(self) -> int:
        """Sequences that it holds."""
        return self.key[0].shape[0]

    @property
    def length(self) -> int:
        """Tokens that each slot has room for."""
        return self.key[0].shape[3]

    def take(self, slots: Int[Array, " n"], length: int) -> KVCache:
        """Copy the first `length` tokens of some slots, no slot twice."""
        key = (x.at[slots, :, :, :length] for x in self.key)
        value = (x.at[slots, :, :length] for x in self.value)
        read = lambda at: at.get(mode="promise_in_bounds", unique_indices=True)
        return KVCache(tuple(map(read, key)), tuple(map(read, value)))

    def put(
        self, part: KVCache, slots: Int[Array, " n"], start: Int[Array, " n"], count: int
    ) -> KVCache:
        """Write back what `take` copied: of each slot, `count` tokens from `start` on."""
        rows = jnp.arange(part.slots, dtype=slots.dtype)[:, None]
        start = jnp.minimum(start, part.length - count)
        position = start[:, None] + jnp.arange(count, dtype=start.dtype)[None]
        target = jnp.broadcast_to(slots[:, None], position.shape)
        read = lambda at: at.get(mode="promise_in_bounds")
        written = [
            _write(
                old,
                (read(key.at[rows, :, :, position]), read(value.at[rows, :, position])),
                target,
                position,
            )
            for old, key, value in zip(
                zip(self.key, self.value, strict=True), part.key, part.value, strict=True
            )
        ]
        return KVCache(*map(tuple, zip(*written, strict=True)))

    @property
    def k(self) -> Float[Array, "layer slots length kv_heads head_dim"]:
        """The keys in reading order."""
        return jnp.stack([jnp.transpose(x, (0, 3, 1, 2)) for x in self.key])

    @property
    def v(self) -> Float[Array, "layer slots length kv_heads head_dim"]:
        """The values in reading order."""
        return jnp.stack([jnp.transpose(x, (0, 2, 1, 3)) for x in self.value])


def init_cache(config: ModelConfig, slots: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """Make an empty cache for `slots` sequences of at most `length` tokens each."""
    outer, head_dim = (slots, config.num_kv_heads), config.head_dim
    # Made one by one: a donated cache must not hold the same array twice.
    return KVCache(
        tuple(jnp.zeros((*outer, head_dim, length), dtype) for _ in range(config.num_layers)),
        tuple(jnp.zeros((*outer, length, head_dim), dtype) for _ in range(config.num_layers)),
    )


@jax.jit
def split_layers(layers: Params) -> tuple[Params, ...]:
    """Give the parameters of each layer apart, for `decode_step`."""
    count = len(jax.tree.leaves(layers)[0])
    return tuple(jax.tree.map(lambda x, index=index: x[index], layers) for index in range(count))


def prefill(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    token_ids: Int[Array, "n chunk"],
    slot: Int[Array, " n"],
    start: Int[Array, " n"],
    count: Int[Array, " n"],
    *,
    attend: int | None = None,
) -> tuple[KVCache, Float[Array, "n vocab"]]:
    """Append tokens to slots, each slot continuing what it holds.

    Args:
        params: with the "lm" head.
        config: the model.
        cache: donate it; it is updated in place.
        token_ids: row i holds count[i] tokens and then padding.
        slot: the slot of each row; rows with tokens must have different slots.
        start: tokens that the slot holds already, 0 for a new sequence.
        count: tokens to append; a row with 0 changes nothing.
        attend: static bound on `start`: cache positions from here on are not read. None reads all.

    Returns:
        The cache, and the logits that follow the last token of each row (meaningless where count is
        0).
    """
    n, chunk = token_ids.shape
    attend = cache.length if attend is None else min(attend, cache.length)
    index = jnp.arange(chunk, dtype=start.dtype)
    positions = start[:, None] + index[None]
    given = index[None] < count[:, None]
    rotary = _rotary(config, positions.reshape(-1))
    group = config.num_heads // config.num_kv_heads
    held = (jnp.arange(attend, dtype=start.dtype)[None] < start[:, None])[:, None, None]
    causal = jnp.tile(jnp.tril(jnp.ones((chunk, chunk), bool)), (group, 1))[None, None]

    def block(x: Array, scanned: tuple[Params, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        layer, old_key, old_value = scanned
        heads = _query_key_value(layer, config, x, rotary)
        query, key, value = (y.reshape(n, chunk, *y.shape[1:]) for y in heads)
        parts = [(key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3), causal)]
        if attend:
            parts.append((old_key, old_value, held))
        attended = _ungroup(_attention(_group_queries(query, config.num_kv_heads), parts), chunk)
        return _residual(layer, config, x, attended.reshape(n * chunk, -1)), (key, value)

    old_key = jnp.stack([x[slot, :, :, :attend] for x in cache.key])
    old_value = jnp.stack([x[slot, :, :attend] for x in cache.value])
    x = params["embed"][token_ids.reshape(-1)]
    x, (key, value) = jax.lax.scan(block, x, (params["layers"], old_key, old_value))
    last = _final(params, config, x).reshape(n, chunk, -1)[jnp.arange(n), jnp.maximum(count - 1, 0)]
    # An index past the end makes the scatter drop the write.
    target = jnp.where(given, slot[:, None], cache.slots)
    written = [
        _write(old, new, target, positions)
        for old, new in zip(
            zip(cache.key, cache.value, strict=True), zip(key, value, strict=True), strict=True
        )
    ]
    return KVCache(*map(tuple, zip(*written, strict=True))), logits(params, config, last)


def decode_step(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    token_ids: Int[Array, " slots"],
    position: Int[Array, " slots"],
    active: Bool[Array, " slots"],
) -> tuple[KVCache, Float[Array, "slots vocab"]]:
    """Append one token to every active slot.

    Args:
        params: with the "lm" head. With "layers" as `split_layers` gives them, no weights are
            copied.
        config: the model.
        cache: donate it; it is updated in place.
        token_ids: the newest token of each slot.
        position: tokens that each slot held before, which is the new token's position.
        active: slots that are not active change nothing.

    Returns:
        The cache, and the logits that follow each slot's token (meaningless where not active).
    """
    slots = token_ids.shape[0]
    rotary = _rotary(config, position)
    held = jnp.arange(cache.length, dtype=position.dtype)
    seen = (held[None] <= position[:, None])[:, None, None]
    target = jnp.where(active, jnp.arange(slots, dtype=position.dtype), slots)[:, None]
    x = params["embed"][token_ids]
    layers = params["layers"]
    if not isinstance(layers, tuple):
        layers = split_layers(layers)
    written = []
    # Not a scan, which would copy the weights and the cache of a layer out of those of all.
    for layer, *old in zip(layers, cache.key, cache.value, strict=True):
        query, key, value = (y[:, None] for y in _query_key_value(layer, config, x, rotary))
        keys, values = _write((old[0], old[1]), (key, value), target, position[:, None])
        written.append((keys, values))
        parts = [(keys, values, seen)]
        attended = _ungroup(_attention(_group_queries(query, config.num_kv_heads), parts), 1)
        x = _residual(layer, config, x, attended.reshape(slots, -1))
    cache = KVCache(*map(tuple, zip(*written, strict=True)))
    return cache, logits(params, config, _final(params, config, x))


def _final(params: Params, config: ModelConfig, x: Float[Array, "n embed"]) -> Array:
    return _rms_norm(x, params["final_norm"], config.rms_norm_eps).astype(jnp.float32)


def _write(
    old: tuple[Array, Array],
    new: tuple[
        Float[Array, "n chunk kv_heads head_dim"], Float[Array, "n chunk kv_heads head_dim"]
    ],
    slot: Int[Array, "n chunk"],
    position: Int[Array, "n chunk"],
) -> tuple[Array, Array]:
    """Put new keys and values into the arrays of a layer, where `slot` is in range."""
    key, value = (x.astype(y.dtype) for x, y in zip(new, old, strict=True))
    return (
        old[0].at[slot, :, :, position].set(key, mode="drop"),
        old[1].at[slot, :, position].set(value, mode="drop"),
    )
