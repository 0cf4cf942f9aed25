"""What the learner's step takes of each device's memory, computed from shapes, before it starts.

Parameters, gradients and moments are counted exactly. Activations are an estimate: what the
compiler keeps at one time is its own choice. For the models of the paper's presets on 8 devices the
whole comes within a tenth of what XLA plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from copc_jax import sharding
from copc_jax.learner import LearnerConfig
from copc_jax.model import Head, LoraConfig, ModelConfig, flatten, lora_table, parameter_table

# The learner computes in float32.
_BYTES = 4


@dataclasses.dataclass(frozen=True)
class NetworkMemory:
    """Bytes of one network on each device.

    Attributes:
        parameters: its share of the weights.
        gradients: accumulated over micro-batches, and those of the micro-batch at work.
        moments: both of AdamW.
        activations: inputs of layers that are kept for the backward pass, and the embedding
            gathered from other devices, with its gradient.
    """

    parameters: int
    gradients: int
    moments: int
    activations: int


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a learner's step on each device.

    Attributes:
        networks: "actor" and, where the method has one, "critic".
        working: the layer or the piece of the vocabulary that is computed at one time.
        batch: the rows of the whole batch.
    """

    networks: Mapping[str, NetworkMemory]
    working: int
    batch: int

    @property
    def total(self) -> int:
        """Everything together."""
        networks = sum(sum(dataclasses.astuple(network)) for network in self.networks.values())
        return networks + self.working + self.batch

    def table(self) -> str:
        """Lines for people to read, in GB of 10^9 bytes."""
        columns = [field.name for field in dataclasses.fields(NetworkMemory)]
        lines = [" " * 8 + "".join(f"{name:>13}" for name in columns)]
        for name, network in self.networks.items():
            cells = (f"{getattr(network, column) / 1e9:>13.2f}" for column in columns)
            lines.append(f"{name:<8}" + "".join(cells))
        lines.append(
            f"one layer at work {self.working / 1e9:.2f}, batch {self.batch / 1e9:.2f}, "
            f"all together {self.total / 1e9:.1f} (activations and work are estimates)"
        )
        return "\n".join(lines)


def device_memory(
    config: LearnerConfig, data: int, model: int, rows: int, time: int
) -> DeviceMemory:
    """Count what one step takes on each device of a mesh.

    Args:
        config: the learner's settings.
        data: devices along the rows.
        model: devices along the parameters.
        rows: trajectories of a batch.
        time: tokens of a row.
    """
    mesh = AbstractMesh((data, model), ("data", "model"))
    heads: dict[str, Head] = {"actor": "lm", "critic": "value"}
    if not config.method.critic:
        del heads["critic"]
    pieces = config.micro_batches * config.method.minibatches
    tokens = math.ceil(rows / pieces / data) * time
    scores, mlp, logits = _layer(config, model, tokens, time)
    hidden = tokens * config.model.hidden_size * _BYTES
    kept = hidden if config.remat else 8 * hidden + 2 * scores + 3 * mlp
    lora = config.lora if config.lora.rank else None
    networks = {}
    for name, head in heads.items():
        trained = _parameter_bytes(config.model, mesh, head, lora)
        # Both networks run on one frozen model, which is counted with the actor.
        frozen = _parameter_bytes(config.model, mesh, head) if lora and head == "lm" else 0
        embedding = config.model.vocab_size * config.model.hidden_size * _BYTES
        # Split over "data", the embedding is gathered for its use, and its gradient before it is
        # scattered; for the body of the critic the lookup alone is.
        gathered = 0 if data == 1 else embedding // _split(config.model.vocab_size, model)
        networks[name] = NetworkMemory(
            parameters=trained + frozen,
            gradients=trained * (2 if config.micro_batches > 1 else 1),
            moments=2 * trained,
            activations=config.model.num_layers * kept + gathered * (2 if head == "lm" else 1),
        )
    # Five integers or floats, a truth value and three results for each token.
    batch = math.ceil(rows / data) * time * (10 * _BYTES + 1)
    # Of scores, their exponentials and a gradient live together; likewise in the other layers.
    return DeviceMemory(networks, 3 * scores + 4 * mlp + 3 * logits, batch)


def _split(size: int, devices: int) -> int:
    """Parts of an axis: one that the mesh does not divide stays whole."""
    return devices if size % devices == 0 else 1


def _parameter_bytes(
    config: ModelConfig, mesh: AbstractMesh, head: Head, lora: LoraConfig | None = None
) -> int:
    table = lora_table(config, lora, head) if lora else parameter_table(config, head)
    placed: Mapping[Any, jax.sharding.NamedSharding] = flatten(
        sharding.parameter_shardings(mesh, config, head, lora)
    )
    return sum(
        math.prod(placed[path].shard_shape(spec.shape)) * _BYTES for path, spec in table.items()
    )


def _layer(config: LearnerConfig, devices: int, tokens: int, time: int) -> tuple[int, int, int]:
    """Bytes of one layer's attention scores and of its MLP, and of the logits at one time."""
    model = config.model
    # Attention in quarters leaves out what no query of a quarter may see.
    seen = 0.625 if time % 4 == 0 and time >= 128 else 1.0
    heads = model.num_heads / _split(model.num_kv_heads, devices)
    scores = int(heads * tokens * time * seen) * _BYTES
    mlp = tokens * model.intermediate_size // _split(model.intermediate_size, devices) * _BYTES
    positions = min(tokens, config.logprob_chunk or tokens)
    logits = positions * model.vocab_size // _split(model.vocab_size, devices) * _BYTES
    return scores, mlp, logits
