"""The learner step of COPC against that of asynchronous PPO with GAE, in the same code.

Both cases of a pair live in one process and run on the same batch. "Fused" is one program: ratios,
returns and losses come from the update's own forward pass. "Pre-pass" freezes log-probs and values
first, as for several minibatches; PPO recomputes its old log-probs there as verl, AReaL and NeMo-RL
do by default. A PPO that takes the server's log-probs for its old ones saves that forward pass: the
last case.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import Bench, Case, Row, Spread

SIZES = {
    "tiny": {"embed": 32, "layers": 1, "vocabulary": 64, "rows": 2, "time": 32},
    "small": {"embed": 256, "layers": 4, "vocabulary": 4096, "rows": 8, "time": 256},
    "medium": {"embed": 512, "layers": 6, "vocabulary": 8192, "rows": 8, "time": 256},
}


def build(
    method: str,
    embed: int,
    layers: int,
    vocabulary: int,
    rows: int,
    time: int,
    episodes: int = 2,
    qk_norm: bool = False,
    tied: bool = True,
) -> tuple[Any, Any, Any, Any]:
    """Return the learner's configuration, its functions, a new state and a batch.

    The model has heads of 64 (or one), and an MLP four times as wide as the rest. Every row is
    filled by as many episodes, whose first eighth is prompt.
    """
    import jax
    import jax.numpy as jnp

    from copc_jax import learner, model, sharding
    from copc_jax.methods import METHODS, LossConfig
    from copc_jax.types import Batch

    heads = max(1, embed // 64)
    config = learner.LearnerConfig(
        model=model.ModelConfig(
            vocab_size=vocabulary,
            hidden_size=embed,
            intermediate_size=4 * embed,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=embed // heads,
            max_position_embeddings=time,
            qk_norm=qk_norm,
            tie_word_embeddings=tied,
        ),
        method=METHODS[method],
        loss=LossConfig(lambda_=0.95),
        actor=learner.OptimizerConfig(),
        critic=learner.OptimizerConfig(),
        updates=1000,
    )
    functions = learner.build_learner(config, sharding.make_mesh(1, 1))
    state = functions.init(model.init(jax.random.key(0), config.model))
    rng = np.random.default_rng(0)
    length = time // episodes
    positions = np.tile(np.arange(time, dtype=np.int32) % length, (rows, 1))
    is_action = positions >= length // 8
    last = positions == length - 1
    batch = Batch(
        token_ids=rng.integers(0, vocabulary, (rows, time), np.int32),
        segment_ids=np.tile(1 + np.arange(time, dtype=np.int32) // length, (rows, 1)),
        positions=positions,
        is_action=is_action,
        behavior_logprob=np.where(is_action, -np.log(vocabulary), 0).astype(np.float32),
        reward=np.where(last, rng.random((rows, time)), 0).astype(np.float32),
        discount=np.where(is_action & ~last, 1, 0).astype(np.float32),
        weight_version=np.where(is_action, 0, -1).astype(np.int32),
    )
    return config, functions, state, jax.tree.map(jnp.asarray, batch)


def _cost(*compiled: Any) -> dict[str, float]:
    costs = [program.cost_analysis() for program in compiled]
    return {
        "flops": sum(cost["flops"] for cost in costs),
        "bytes": sum(cost["bytes accessed"] for cost in costs),
        "temporary_mb": max(p.memory_analysis().temp_size_in_bytes for p in compiled) / 2**20,
    }


def fused(method: str, **size: Any) -> Any:
    import jax

    _, functions, state, batch = build(method, **size)
    step = functions.step.lower(state, batch).compile()

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return run, _cost(step)


def prepass(method: str, **size: Any) -> Any:
    import jax

    _, functions, state, batch = build(method, **size)
    prepare = functions.prepare.lower(state, batch).compile()
    update = functions.update.lower(state, batch, prepare(state, batch)).compile()

    def run() -> None:
        nonlocal state
        targets = prepare(state, batch)
        state, metrics = update(state, batch, targets)
        jax.block_until_ready((state, metrics))

    return run, _cost(prepare, update)


def recorded(**size: Any) -> Any:
    """PPO whose old log-probs are the server's: its pre-pass runs the critic alone."""
    import jax
    import jax.numpy as jnp

    from copc_jax import model, returns
    from copc_jax.types import Targets

    config, functions, state, batch = build("ppo", **size)

    def values(critic: Any, batch: Any) -> Any:
        hidden = model.forward(
            critic, config.model, batch.token_ids, batch.segment_ids, batch.positions
        )
        value = model.values(critic, config.model, hidden, batch.segment_ids)
        result = returns.gae(
            batch.reward, value, batch.discount, batch.is_action, lambda_=config.loss.lambda_
        )
        return Targets(
            policy_logprob=batch.behavior_logprob,
            value=value,
            ratio=jnp.ones_like(value),
            advantage=result.advantage,
            value_target=result.value_target,
        )

    prepare = jax.jit(values).lower(state.critic, batch).compile()
    targets = prepare(state.critic, batch)
    update = functions.update.lower(state, batch, targets).compile()

    def run() -> None:
        nonlocal state
        targets = prepare(state.critic, batch)
        state, metrics = update(state, batch, targets)
        jax.block_until_ready((state, metrics))

    return run, _cost(prepare, update)


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrap a 95% interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def compare(bench: Bench) -> None:
    for size in ("tiny",) if bench.tiny else ("small", "medium"):
        arguments = SIZES[size]
        shape = f"{size}: {arguments['embed']} wide, {arguments['layers']} layers, "
        shape += f"[{arguments['rows']}, {arguments['time']}] tokens"
        cases = [
            Case(
                f"{method} {form} {size}",
                __file__,
                form,
                {"method": method, **arguments},
                process=size,
            )
            for form in ("fused", "prepass")
            for method in ("copc", "ppo")
        ]
        last = Case(f"ppo recorded {size}", __file__, "recorded", arguments, process=size)
        # Pairs need many rounds: the difference sought is a hundredth.
        rounds = 3 * bench.rounds if size == "small" else bench.rounds
        measured = bench.measure("overhead", [*cases, last], rounds=rounds)
        for form, name in (("fused", "fused"), ("prepass", "with pre-pass")):
            ours, theirs = f"copc {form} {size}", f"ppo {form} {size}"
            facts = measured.facts
            flops = facts[ours]["flops"] / facts[theirs]["flops"]
            moved = facts[ours]["bytes"] / facts[theirs]["bytes"]
            bench.rows.append(
                Row(
                    f"COPC step, {name}: compiled FLOPs",
                    f"async PPO + GAE, {name}",
                    shape,
                    Spread(flops, flops, flops),
                    1.001,
                    "<=",
                    note=f"bytes accessed {moved:.4f}",
                )
            )
            low, high = interval(measured.ratios(ours, theirs))
            bench.compare(
                measured,
                f"COPC step, {name}",
                ours,
                theirs,
                shape=shape,
                target=1.01,
                sense="<=",
                label=f"async PPO + GAE, {name}",
                note=f"95% interval of the median {low:.3f} to {high:.3f}",
            )
        bench.compare(
            measured,
            "COPC step, with pre-pass",
            f"copc prepass {size}",
            last.label,
            shape=shape,
            sense="<=",
            label="async PPO + GAE on the server's log-probs",
            note="one forward pass of the actor fewer on the other side",
        )
