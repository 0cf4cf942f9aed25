"""Log-probabilities of tokens and their gradient over a large vocabulary, against the plain form.

The plain form keeps all logits: `log_softmax` and a gather. Ours is `model.token_logprob` with
`chunk`. Both give the gradient of a weighted sum for hidden states and head. Memory is the
compiler's own figure for temporaries, which does not depend on the machine's load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from harness import Bench, Case, Row, Spread

EMBED = 256
CHUNK = 512


def _case(function: Any, rows: int, time: int, vocabulary: int) -> Any:
    """Compile value and gradient of `function(hidden, kernel, token_ids) -> logprob`."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((rows * time, EMBED), np.float32))
    kernel = jnp.asarray(0.05 * rng.standard_normal((vocabulary, EMBED), np.float32))
    token_ids = jnp.asarray(rng.integers(0, vocabulary, (rows, time), np.int32))
    weight = jnp.asarray(rng.standard_normal((rows, time), np.float32))

    def loss(hidden: Any, kernel: Any, token_ids: Any, weight: Any) -> Any:
        return jnp.sum(weight * function(hidden, kernel, token_ids))

    inputs = (hidden, kernel, token_ids, weight)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*inputs).compile()
    memory = compiled.memory_analysis()

    def run() -> Any:
        return jax.block_until_ready(compiled(*inputs))

    value, (hidden_grad, kernel_grad) = run()
    return run, {
        "temporary_mb": memory.temp_size_in_bytes / 2**20,
        "sample": [
            float(value),
            *np.asarray(hidden_grad[3, :3]).tolist(),
            *np.asarray(kernel_grad[token_ids[0, 5], :3]).tolist(),
        ],
    }


def plain(rows: int, time: int, vocabulary: int) -> Any:
    import jax
    import jax.numpy as jnp

    def logprob(hidden: Any, kernel: Any, token_ids: Any) -> Any:
        logits = (hidden @ kernel.T).reshape(rows, time, vocabulary)
        scores = jax.nn.log_softmax(logits, axis=-1)[:, :-1]
        chosen = jnp.take_along_axis(scores, token_ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.pad(chosen, ((0, 0), (1, 0)))

    return _case(logprob, rows, time, vocabulary)


def chunked(rows: int, time: int, vocabulary: int, chunk: int | None) -> Any:
    import jax.numpy as jnp

    from copc_jax import model

    config = model.ModelConfig(
        vocab_size=vocabulary,
        hidden_size=EMBED,
        intermediate_size=4 * EMBED,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=EMBED // 4,
    )

    def logprob(hidden: Any, kernel: Any, token_ids: Any) -> Any:
        segments = jnp.ones_like(token_ids)
        return model.token_logprob(
            {"embed": kernel}, config, hidden, token_ids, segments, chunk=chunk
        )

    return _case(logprob, rows, time, vocabulary)


def compare(bench: Bench) -> None:
    sizes = ((2, 16, 512),) if bench.tiny else ((16, 256, 49_152), (16, 256, 151_936))
    chunk = 8 if bench.tiny else CHUNK
    for rows, time, vocabulary in sizes:
        arguments = {"rows": rows, "time": time, "vocabulary": vocabulary}
        names = [f"{name} V={vocabulary}" for name in ("plain", "chunked")]
        measured = bench.measure(
            "logprobs",
            [
                Case(names[0], __file__, "plain", arguments),
                Case(names[1], __file__, "chunked", {**arguments, "chunk": chunk}),
            ],
        )
        theirs, ours = (measured.facts[name] for name in names)
        np.testing.assert_allclose(ours["sample"], theirs["sample"], rtol=1e-3, atol=1e-4)
        shape = f"{rows * time} tokens, vocabulary {vocabulary:,}, chunks of {chunk}"
        saved = theirs["temporary_mb"] / ours["temporary_mb"]
        bench.rows.append(
            Row(
                "token log-probs and gradient: temporary memory",
                "log_softmax and gather",
                shape,
                Spread(saved, saved, saved),
                12.0,
                note=f"{theirs['temporary_mb']:,.0f} MB to {ours['temporary_mb']:,.0f} MB",
            )
        )
        bench.compare(
            measured,
            "token log-probs and gradient",
            names[1],
            names[0],
            shape=shape,
            target=1.0,
            sense="<=",
            label="log_softmax and gather",
        )
