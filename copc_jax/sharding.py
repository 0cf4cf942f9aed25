"""Where arrays live: a mesh of (data, model), and a rule for each logical axis of the parameters.

Rows of a batch are split over `data`. Parameters and the optimizer's moments are split over `data`
along their embedding axis (FSDP) and over `model` along heads, MLP and vocabulary (tensor
parallelism). One device is the mesh (1, 1), and the same code. With several processes each holds
whole rows of the mesh, and so the rows of a batch that it packed itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from copc_jax import model

# Logical axis -> mesh axis; axes that are not named here are not split.
RULES = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model"}


def make_mesh(data: int, model: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay out data * model devices: the first ones of each process, process by process.

    Raises:
        ValueError: when there are not as many, or when `data` does not split over the processes.
    """
    available = jax.devices() if devices is None else devices
    processes = sorted({device.process_index for device in available})
    needed, each = data * model, data * model // len(processes)
    chosen = [
        device
        for process in processes
        for device in [x for x in available if x.process_index == process][:each]
    ]
    if data % len(processes):
        raise ValueError(
            f"a mesh of {data} x {model} cannot split its rows over {len(processes)} processes: "
            f"data must be a multiple of {len(processes)}"
        )
    if needed < 1 or len(chosen) < needed:
        raise ValueError(
            f"a mesh of {data} x {model} needs {needed} devices, {len(available)} are available"
        )
    # The default axis type, Explicit, refuses gathers from a split embedding.
    return Mesh(
        np.asarray(chosen, dtype=object).reshape(data, model),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Place the whole of an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Split [rows, time] arrays by rows. Time stays whole: the returns scan over it."""
    return NamedSharding(mesh, PartitionSpec("data"))


def parameter_shardings(
    mesh: Mesh | AbstractMesh,
    config: model.ModelConfig,
    head: model.Head = "lm",
    lora: model.LoraConfig | None = None,
) -> dict[str, Any]:
    """Give the sharding of each parameter, or leaf of `lora`, as a tree like them."""
    table = _table(config, head, lora)
    return model.unflatten({path: _sharding(mesh, spec) for path, spec in table.items()})


def optimizer_shardings(
    mesh: Mesh,
    config: model.ModelConfig,
    head: model.Head,
    state: Any,
    lora: model.LoraConfig | None = None,
) -> Any:
    """Give the sharding of an optimizer's state: moments lie with their parameters.

    Without it `jit(optimizer.init)` puts the moments on one device and the first update compiles
    twice.

    Args:
        mesh: from `make_mesh`.
        config: the model.
        head: of the parameters that the optimizer moves.
        state: the state or its shapes, `jax.eval_shape(optimizer.init, params)`. A leaf belongs to
            the parameter whose path ends its own and whose shape it has; others are replicated.
        lora: what is trained in place of all parameters.
    """
    table = _table(config, head, lora)
    longest = max(len(path) for path in table)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        for length in range(longest, 0, -1):
            spec = table.get(names[-length:])
            if spec is not None and spec.shape == leaf.shape:
                return _sharding(mesh, spec)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def _table(
    config: model.ModelConfig, head: model.Head, lora: model.LoraConfig | None
) -> dict[model.Path, model.Parameter]:
    if lora is None:
        return model.parameter_table(config, head)
    return model.lora_table(config, lora, head)


def _sharding(mesh: Mesh | AbstractMesh, spec: model.Parameter) -> NamedSharding:
    """Apply the rules; an axis that the mesh does not divide stays whole."""

    def mesh_axis(size: int, axis: str) -> str | None:
        name = RULES.get(axis)
        return name if name is not None and size % mesh.shape[name] == 0 else None

    axes = zip(spec.shape, spec.axes, strict=True)
    return NamedSharding(mesh, PartitionSpec(*(mesh_axis(size, axis) for size, axis in axes)))
