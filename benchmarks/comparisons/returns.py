"""Corrected returns against other people's return operators, and against forms of our own.

The arrays lie time-major, which is how the scan reads them: `jax.vmap(copc_returns, in_axes=1,
out_axes=1)` on [T, B] in one jitted call. Peers get the layout that they are written for, [B, T].
"TRL-style" and "verl-style" are loops over time in torch, written here from what those libraries
do: neither offers its loop apart from a trainer.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
from harness import Bench, Case, Row, Spread

GAMMA, LAMBDA = 0.99, 0.95
NAMES = ("reward", "value", "discount", "ratio", "is_action")


def arrays(rows: int, time: int) -> dict[str, np.ndarray]:
    """Draw one batch, [rows, time]; every token is an action, so that all operators agree."""
    rng = np.random.default_rng(0)
    shape = (rows, time)
    return {
        "reward": rng.standard_normal(shape, np.float32),
        "value": rng.standard_normal(shape, np.float32),
        "discount": np.full(shape, GAMMA, np.float32),
        "ratio": np.exp(0.3 * rng.standard_normal(shape, np.float32)),
        "is_action": np.ones(shape, bool),
    }


def facts(advantage: Any, package: str) -> dict[str, Any]:
    """Show some advantages, [rows, time], to be held against those of others."""
    advantage = np.asarray(advantage, np.float32)
    return {
        "advantage": [*advantage[0, :4].tolist(), *advantage[-1, -4:].tolist()],
        "version": importlib.metadata.version(package),
    }


# -------------------------------------------------------------------------------- our forms


def _run_jax(function: Any, inputs: list[Any], package: str, *, transposed: bool = False) -> Any:
    import jax

    compiled = jax.jit(function)
    inputs = [jax.numpy.asarray(x) for x in inputs]

    def run() -> Any:
        return jax.block_until_ready(compiled(*inputs))

    out = np.asarray(run()[0])
    return run, facts(out.T if transposed else out, package)


def _time_major(rows: int, time: int, names: tuple[str, ...] = NAMES) -> list[np.ndarray]:
    given = arrays(rows, time)
    return [np.ascontiguousarray(given[name].T) for name in names]


def copc_time_major(rows: int, time: int) -> Any:
    import jax

    from copc_jax import returns

    operator = jax.vmap(lambda *x: returns.copc_returns(*x, lambda_=LAMBDA), in_axes=1, out_axes=1)
    return _run_jax(operator, _time_major(rows, time), "jax", transposed=True)


def copc_batch_major(rows: int, time: int) -> Any:
    from copc_jax import returns

    given = arrays(rows, time)
    operator = lambda *x: returns.copc_returns(*x, lambda_=LAMBDA)
    return _run_jax(operator, [given[name] for name in NAMES], "jax")


def copc_associative(rows: int, time: int) -> Any:
    """Run the same recursion by `associative_scan`, time-major: O(log T) steps, more work."""
    import jax
    import jax.numpy as jnp

    from copc_jax import returns

    def operator(reward: Any, value: Any, discount: Any, ratio: Any, is_action: Any) -> Any:
        low, high = returns.ratio_interval(0.5)
        weight = jnp.where(is_action, jnp.clip(ratio, low, high), 0.0)
        following = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
        term = weight * (reward + discount * following - value)

        def join(later: Any, earlier: Any) -> Any:
            return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

        factor = discount * LAMBDA
        advantage = jax.lax.associative_scan(join, (factor, term), reverse=True)[1]
        return advantage, advantage + value

    return _run_jax(operator, _time_major(rows, time), "jax", transposed=True)


def gae_time_major(rows: int, time: int) -> Any:
    import jax

    from copc_jax import returns

    names = ("reward", "value", "discount", "is_action")
    operator = jax.vmap(lambda *x: returns.gae(*x, lambda_=LAMBDA), in_axes=1, out_axes=1)
    run, known = _run_jax(operator, _time_major(rows, time, names), "jax", transposed=True)
    given = arrays(rows, time)
    advantage = returns.gae(*(given[name] for name in names), lambda_=LAMBDA).advantage
    return run, {
        **known,
        "whitened": facts(returns.whiten(advantage, given["is_action"]), "jax")["advantage"],
    }


def vtrace_time_major(rows: int, time: int) -> Any:
    import jax

    from copc_jax import returns

    operator = jax.vmap(lambda *x: returns.vtrace(*x, lambda_=LAMBDA), in_axes=1, out_axes=1)
    return _run_jax(operator, _time_major(rows, time), "jax", transposed=True)


def elementwise(rows: int, time: int) -> Any:
    """Read the five arrays and write two, with no recursion: what XLA makes of the traffic."""
    import jax.numpy as jnp

    def operator(reward: Any, value: Any, discount: Any, ratio: Any, is_action: Any) -> Any:
        first = jnp.where(is_action, reward + discount * value, 0.0)
        return first, first - ratio * value

    return _run_jax(operator, _time_major(rows, time), "jax", transposed=True)


# -------------------------------------------------------------------------------- peers


def rlax_vtrace(rows: int, time: int) -> Any:
    import jax
    import jax.numpy as jnp
    import rlax

    given = arrays(rows, time)
    following = np.pad(given["value"][:, 1:], ((0, 0), (0, 1)))

    def one(value: Any, following: Any, reward: Any, discount: Any, ratio: Any) -> Any:
        out = rlax.vtrace_td_error_and_advantage(
            value, following, reward, discount, ratio, jnp.full_like(value, LAMBDA)
        )
        return out.pg_advantage, out.errors + value

    inputs = [given["value"], following, given["reward"], given["discount"], given["ratio"]]
    return _run_jax(jax.vmap(one), inputs, "rlax")


def rlax_gae(rows: int, time: int) -> Any:
    import jax
    import rlax

    given = arrays(rows, time)
    values = np.pad(given["value"], ((0, 0), (0, 1)))

    def one(reward: Any, discount: Any, values: Any) -> Any:
        advantage = rlax.truncated_generalized_advantage_estimation(
            reward, discount, LAMBDA, values
        )
        return advantage, advantage + values[:-1]

    return _run_jax(jax.vmap(one), [given["reward"], given["discount"], values], "rlax")


def tunix_gae(rows: int, time: int) -> Any:
    """Measure tunix's operator, which whitens too."""
    from tunix.rl import algo_core

    given = arrays(rows, time)
    operator = lambda reward, value, mask: algo_core.compute_gae_advantages(
        reward, value, mask, gamma=GAMMA, gae_lambda=LAMBDA
    )
    inputs = [given[name] for name in ("reward", "value", "is_action")]
    return _run_jax(operator, inputs, "google-tunix")


def _run_torch(loop: Any, rows: int, time: int, package: str) -> Any:
    import torch

    given = {name: torch.from_numpy(x) for name, x in arrays(rows, time).items()}
    mask = given["is_action"].to(torch.float32)

    def run() -> Any:
        with torch.no_grad():
            advantage = loop(torch, given["reward"], given["value"], mask)
            target = advantage + given["value"]
            count = mask.sum()
            mean = (advantage * mask).sum() / count
            variance = ((advantage - mean).square() * mask).sum() / count
            return (advantage - mean) * torch.rsqrt(variance + 1e-8) * mask, target

    return run, facts(run()[0].numpy(), package)


def trl_style(rows: int, time: int) -> Any:
    """Loop over time as TRL's PPO trainer did, whitening at the end; masks come before the loop."""

    def loop(torch: Any, reward: Any, value: Any, mask: Any) -> Any:
        carry = torch.zeros(rows)
        parts = []
        for t in range(time - 1, -1, -1):
            following = value[:, t + 1] if t + 1 < time else 0.0
            residual = reward[:, t] + GAMMA * following - value[:, t]
            carry = residual + GAMMA * LAMBDA * carry
            parts.append(carry)
        return torch.stack(parts[::-1], dim=1)

    return _run_torch(loop, rows, time, "torch")


def verl_style(rows: int, time: int) -> Any:
    """Loop over time as verl does: tokens that are masked hand both carries on."""

    def loop(torch: Any, reward: Any, value: Any, mask: Any) -> Any:
        carry, following = torch.zeros(rows), torch.zeros(rows)
        parts = []
        for t in range(time - 1, -1, -1):
            here = mask[:, t]
            residual = reward[:, t] + GAMMA * following - value[:, t]
            summed = residual + GAMMA * LAMBDA * carry
            following = here * value[:, t] + (1 - here) * following
            carry = here * summed + (1 - here) * carry
            parts.append(carry)
        return torch.stack(parts[::-1], dim=1)

    return _run_torch(loop, rows, time, "torch")


# -------------------------------------------------------------------------------- the comparison


def compare(bench: Bench) -> None:
    _peers(bench)
    _forms(bench)


def _peers(bench: Bench) -> None:
    rows, time = (8, 64) if bench.tiny else (512, 8192)
    environments = {
        "copc_time_major": "copc_jax",
        "gae_time_major": "copc_jax",
        "vtrace_time_major": "copc_jax",
        "elementwise": "copc_jax",
        "rlax_vtrace": "rlax",
        "rlax_gae": "rlax",
        "tunix_gae": "tunix",
        "trl_style": "torch",
        "verl_style": "torch",
    }
    arguments = {"rows": rows, "time": time}
    measured = bench.measure(
        "returns",
        [Case(name, __file__, name, arguments, place) for name, place in environments.items()],
    )
    for peer, own, key in (
        ("rlax_vtrace", "vtrace_time_major", "advantage"),
        ("rlax_gae", "gae_time_major", "advantage"),
        ("tunix_gae", "gae_time_major", "whitened"),
        ("trl_style", "gae_time_major", "whitened"),
        ("verl_style", "gae_time_major", "whitened"),
    ):
        if peer in measured.facts:
            np.testing.assert_allclose(
                measured.facts[peer]["advantage"],
                measured.facts[own][key],
                rtol=1e-3,
                atol=1e-3,
                err_msg=f"{peer} computes something else",
            )
    for peer, name, target in (
        ("rlax_vtrace", "rlax vtrace", 4.0),
        ("rlax_gae", "rlax GAE", 4.0),
        ("tunix_gae", "tunix GAE, whitened", 7.0),
        ("trl_style", "TRL-style torch loop, whitened", 20.0),
        ("verl_style", "verl-style torch loop, whitened", 40.0),
    ):
        bench.compare(
            measured,
            "corrected returns",
            "copc_time_major",
            peer,
            shape=f"[{rows}, {time}] f32",
            target=target,
            label=name,
        )
    bench.compare(
        measured,
        "corrected returns",
        "copc_time_major",
        "elementwise",
        shape=f"[{rows}, {time}] f32",
        target=2.5,
        sense="<=",
        label="XLA element-wise, same arrays",
    )


def _forms(bench: Bench) -> None:
    tokens = 2**12 if bench.tiny else 2**22
    lengths = (64, 256) if bench.tiny else (128, 512, 2048, 8192, 16384, 38912)
    forms = ("copc_time_major", "copc_batch_major", "copc_associative")
    cases = [
        Case(
            f"{form} T={time}",
            __file__,
            form,
            {"rows": round(tokens / time), "time": time},
            process=form,
        )
        for time in lengths
        for form in forms
    ]
    measured = bench.measure("returns by length", cases)
    shape = f"{tokens // 2**20 or tokens} {'M' if tokens >= 2**20 else ''} tokens, T {lengths[0]} "
    shape += f"to {lengths[-1]}"
    # Of every round the worst length: against the best form there, and against the best length.
    against_best, across = [], []
    for number in range(len(measured.samples[cases[0].label])):

        def token_ns(form: str, time: int, number: int = number) -> float:
            seconds = measured.samples[f"{form} T={time}"][number]["cpu_s"]
            return 1e9 * seconds / (round(tokens / time) * time)

        ours = {time: token_ns(forms[0], time) for time in lengths}
        against_best.append(
            max(ours[time] / min(token_ns(form, time) for form in forms) for time in lengths)
        )
        across.append(max(ours.values()) / min(ours.values()))
    bench.rows += [
        Row(
            "corrected returns",
            "best of time-major, batch-major, associative",
            shape,
            Spread.of(against_best),
            1.2,
            "<=",
            note="worst length",
        ),
        Row(
            "corrected returns, cost a token",
            "the cheapest length",
            shape,
            Spread.of(across),
            1.5,
            "<=",
            note="dearest length",
        ),
    ]
    lines = {
        form: [
            [
                time,
                1e9 * measured.spread(f"{form} T={time}").median / (round(tokens / time) * time),
            ]
            for time in lengths
        ]
        for form in forms
    }
    bench.curves.append(
        {
            "title": "Corrected returns",
            "x": "T (tokens in a row)",
            "y": "CPU ns a token",
            "lines": lines,
        }
    )
