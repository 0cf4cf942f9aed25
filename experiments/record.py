"""Record the rollouts that a run holds at its last checkpoint, scored by its learner.

    python experiments/record.py runs/<run> notebooks/data/rollouts.npz --count 192

The checkpoint keeps every finished rollout that the learner has not trained on yet: with a
staleness of s they were sampled by up to s + 1 different versions. Written are arrays of shape
[count, time], as notebooks/staleness_and_ratios.py reads them.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import assembly
import batch_sources
import jax
import jax.numpy as jnp
import numpy as np
import tyro

from copc_jax import data, model, sharding, staging
from copc_jax.checkpoint import Checkpointer
from copc_jax.config import from_json
from copc_jax.learner import LearnerConfig, build_learner
from copc_jax.methods import METHODS
from copc_jax.rollout.collector import decode_state
from copc_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to record."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run folder with a checkpoint."""
    out: Annotated[Path, tyro.conf.Positional]
    """File to write."""
    count: int = 192
    """Rollouts to take, spread evenly over those that the checkpoint holds."""


def main(arguments: list[str] | None = None) -> None:
    """Read the checkpoint, score its rollouts, write the file."""
    options = tyro.cli(Arguments, args=sys.argv[1:] if arguments is None else arguments)
    config = from_json((options.run_dir / "config.json").read_text())
    parts = assembly.build(config)
    learner = build_learner(
        LearnerConfig(
            model=parts.model,
            method=METHODS[config.method],
            loss=config.loss,
            actor=config.actor,
            critic=config.critic,
            updates=config.updates,
            lora=config.lora,
        ),
        sharding.make_mesh(1, 1),
    )
    shapes = jax.eval_shape(
        learner.init, jax.eval_shape(lambda key: model.init(key, parts.model), jax.random.key(0))
    )
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        learner.state_sharding,
    )
    state, host = Checkpointer(options.run_dir / "checkpoints").restore(None, like)
    held = [
        Trajectory(**fields)
        for state in batch_sources.saved_collectors(host)
        for group in decode_state(state)["groups"]
        for fields in group["results"]
    ]
    chosen = [
        held[i] for i in np.linspace(0, len(held) - 1, min(options.count, len(held))).astype(int)
    ]
    time = max(len(trajectory.token_ids) for trajectory in chosen)
    rows = [
        staging.pack(
            [trajectory],
            rows=1,
            time=time,
            learner_version=int(state.version),
            staleness=config.staleness,
            gamma=config.loss.gamma,
            pad_id=parts.tokenizer.token_to_id(data.PAD_TOKEN) or 0,
        )[0]
        for trajectory in chosen
    ]
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    targets = learner.prepare(state, batch)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.out,
        policy_logprob=np.asarray(targets.policy_logprob),
        behavior_logprob=np.asarray(batch.behavior_logprob),
        is_action=np.asarray(batch.is_action),
        weight_version=np.asarray(batch.weight_version),
        learner_version=np.full(batch.token_ids.shape, int(state.version), np.int32),
        reward=np.asarray(batch.reward),
        value=np.asarray(targets.value),
        discount=np.asarray(batch.discount),
    )
    print(f"{len(chosen)} of {len(held)} rollouts: {options.out}")


if __name__ == "__main__":
    main()
