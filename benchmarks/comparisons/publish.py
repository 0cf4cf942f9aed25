"""From the end of a learner step to the first token of the new version.

As in a run, the learner's thread copies the weights, which keeps it from training; another thread
writes the copy and has the server load it while training may go on. The first token that a request
gets of the new version ends the time. Shares are of a whole learner step (actor and critic) of the
same model.
"""

from __future__ import annotations

import pathlib
import tempfile
import threading
import time
from typing import Any

from comparisons.engine import LONGEST, Prompts, Served, settle
from harness import Bench, Case, Row, Spread

# Sizes of the search preset's model, and of SmolLM2-135M; tokens of a step.
MODELS = {
    "1M": {
        **{"embed": 128, "layers": 2, "vocabulary": 6144, "ratio": 2},
        **{"rows": 20, "time": 192, "method": "copc"},
    },
    "135M": {
        **{"embed": 576, "layers": 30, "vocabulary": 49152, "ratio": 3},
        **{"rows": 2, "time": 256, "method": "dapo"},
    },
}
TINY = {
    "tiny": {
        **{"embed": 32, "layers": 1, "vocabulary": 64, "ratio": 4},
        **{"rows": 2, "time": 32, "method": "copc"},
    }
}


def _build(
    embed: int,
    layers: int,
    vocabulary: int,
    ratio: int,
    rows: int,
    time: int,
    method: str,
) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from copc_jax import learner, model, sharding
    from copc_jax.methods import METHODS, LossConfig
    from copc_jax.types import Batch

    heads = max(1, embed // 64)
    config = learner.LearnerConfig(
        model=model.ModelConfig(
            vocab_size=vocabulary,
            hidden_size=embed,
            intermediate_size=int(embed * (8 / 3 if ratio == 3 else ratio)),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if heads % 3 else heads // 3,
            head_dim=embed // heads,
        ),
        method=METHODS[method],
        loss=LossConfig(),
        actor=learner.OptimizerConfig(),
        critic=learner.OptimizerConfig(),
        updates=1000,
        logprob_chunk=256 if vocabulary > 10_000 else None,
    )
    functions = learner.build_learner(config, sharding.make_mesh(1, 1))
    state = functions.init(model.init(jax.random.key(0), config.model))
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(time, dtype=np.int32), (rows, 1))
    is_action = positions >= time // 8
    batch = Batch(
        token_ids=rng.integers(0, vocabulary, (rows, time), np.int32),
        segment_ids=np.ones((rows, time), np.int32),
        positions=positions,
        is_action=is_action,
        behavior_logprob=np.where(is_action, -np.log(vocabulary), 0).astype(np.float32),
        reward=np.where(positions == time - 1, rng.random((rows, time)), 0).astype(np.float32),
        discount=np.where(is_action & (positions < time - 1), 1, 0).astype(np.float32),
        weight_version=np.where(is_action, 0, -1).astype(np.int32),
    )
    return config, functions, state, jax.tree.map(jnp.asarray, batch)


def publish(updates: int, **size: Any) -> dict[str, Any]:
    """Train, publish and wait for the first new token `updates` times; give all seconds."""
    import jax
    import numpy as np
    import tokenizers

    from copc_jax import hf

    config, functions, state, batch = _build(**size)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(size["vocabulary"])}, unk_token="w0")
    )
    compiled = functions.step.lower(state, batch).compile()

    def step() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))

    parameters = sum(x.size for x in jax.tree.leaves(state.actor))
    seconds: dict[str, list[float]] = {}
    note = lambda name, since: seconds.setdefault(name, []).append(time.perf_counter() - since)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        weights = functions.policy_params(state)
        hf.save_hf(folder / "v0", weights, config.model, tokenizer_json=words.to_str())
        served = Served(str(folder / "v0"), 8, LONGEST + 8)
        prompts = Prompts(2, size["vocabulary"])
        settle(lambda: served.generate(prompts.next(), 8), served.counters)
        settle(lambda: served.generate(prompts.next()[:1], 1), served.counters)
        del weights

        copied = jax.tree.map(np.array, functions.policy_params(state))

        def copy() -> Any:
            jax.tree.map(np.copyto, copied, functions.policy_params(state))
            return copied

        def hand_over(weights: Any, version: int) -> None:
            hf.save_hf(folder / f"v{version}", weights, config.model)
            note("written", ended)
            served.wait(served.client.publish(folder / f"v{version}", version))
            note("loaded", ended)

        step()
        for version in range(1, updates + 1):
            begun = time.perf_counter()
            step()
            note("step", begun)
            ended = time.perf_counter()
            weights = copy()
            note("copied", ended)
            hand_over(weights, version)
            first = served.generate(prompts.next()[:1], 1)[0]
            note("first token", ended)
            assert set(first.weight_version.tolist()) == {version}
        # Once more, with the next step under way meanwhile.
        for version in range(updates + 1, 2 * updates + 1):
            ended = time.perf_counter()
            beside = threading.Thread(target=hand_over, args=(copy(), version))
            begun = time.perf_counter()
            beside.start()
            step()
            note("step beside", begun)
            beside.join()
        served.close()
    return {"parameters": parameters, "seconds": seconds}


def compare(bench: Bench) -> None:
    sizes = TINY if bench.tiny else MODELS
    updates = {"1M": max(bench.rounds, 3), "135M": 1, "tiny": 2}
    cases = [
        Case(name, __file__, "publish", {"updates": updates[name], **size})
        for name, size in sizes.items()
    ]
    measured = bench.measure("publish", cases, rounds=0)
    for name, size in sizes.items():
        facts = measured.facts[name]
        seconds = facts["seconds"]
        shape = f"{facts['parameters'] / 1e6:.1f} M parameters, step of {size['rows']} x "
        shape += f"{size['time']} tokens"
        steps = Spread.of(seconds["step"]).median
        share = lambda key, steps=steps, seconds=seconds: Spread.of(
            [x / steps for x in seconds[key]]
        )
        bench.rows += [
            Row(
                "publish: step done to first new token (wall)",
                "a learner step",
                shape,
                share("first token"),
                0.05 if name == "1M" else None,
                "<=",
                "",
                note=f"step {steps:.2f} s; weights written after "
                f"{Spread.of(seconds['written'][: updates[name]]).median:.3f} s, loaded after "
                f"{Spread.of(seconds['loaded'][: updates[name]]).median:.3f}, first token after "
                f"{Spread.of(seconds['first token']).median:.3f}",
            ),
            Row(
                "publish: part that training waits for (wall)",
                "a learner step",
                shape,
                share("copied"),
                0.05,
                "<=",
                "",
                note="copying the weights; they are written and loaded beside the next step",
            ),
            Row(
                "publish: next step while weights are written and loaded (wall)",
                "a learner step",
                shape,
                share("step beside"),
                None,
                "<=",
                "x",
                note="1 where the server has cores of its own",
            ),
        ]
