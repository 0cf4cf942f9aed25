"""Every loss against a float64 loop and its hand-written derivative, and the laws that all share.

Each actor loss is compiled once, in both reductions: most tests only change what goes in.
"""

import inspect
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from copc_jax import losses, returns

ROWS, TIME = 4, 6
REDUCTIONS = ("token", "response")

# Bounds here are away from numbers such as 0.2 and 0.04, which hypothesis likes to draw: at a bound
# float32 and float64 may fall on different sides.
LOW, HIGH = 1 - 0.213, 1 + 0.287
MARGINS = {"clip_low": 0.213, "clip_high": 0.287}


def adapt(loss, order=("policy", "behavior"), **options):
    """Give a loss the argument order that this file uses for all of them."""

    def run(policy, proximal, behavior, advantage, is_action, **reduction):
        named = {"policy": policy, "proximal": proximal, "behavior": behavior}
        return loss(*[named[name] for name in order], advantage, is_action, **options, **reduction)

    return run


def frozen_copc(policy, proximal, behavior, advantage, is_action, **reduction):
    return losses.copc_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        eps_low=0.426,
        eps_high=0.574,
        frozen_logprob=proximal,
        **reduction,
    )


THREE = ("policy", "proximal", "behavior")
ACTOR_LOSSES = {
    "copc": adapt(losses.copc_actor_loss, eps_low=0.426, eps_high=0.574),
    "copc_frozen": frozen_copc,
    "restoring": adapt(losses.copc_restoring_actor_loss, eps_low=0.426, eps_high=0.574),
    "ppo": adapt(losses.ppo_actor_loss, **MARGINS),
    "ppo_dual": adapt(losses.ppo_actor_loss, **MARGINS, dual_clip=1.71),
    "decoupled": adapt(losses.decoupled_ppo_actor_loss, THREE, **MARGINS, behavior_cap=1.57),
    "tis": adapt(losses.tis_actor_loss, THREE, **MARGINS, weight_max=1.57),
    "icepop": adapt(losses.icepop_actor_loss, THREE, **MARGINS, weight_min=0.63, weight_max=1.57),
    "reinforce": adapt(losses.reinforce_actor_loss),
    "vtrace": adapt(losses.vtrace_actor_loss),
    "sao": adapt(losses.sao_actor_loss, **MARGINS),
    "cispo": adapt(losses.cispo_actor_loss, clip_low=0.213, clip_high=0.287),
    "gspo": adapt(losses.gspo_actor_loss, clip_low=0.0713, clip_high=0.0887),
    "vcpo": adapt(losses.vcpo_actor_loss, weight_max=1.57),
    "m2po": adapt(losses.m2po_actor_loss, threshold=0.0437),
    "m2po_harmful": adapt(losses.m2po_actor_loss, threshold=0.0437, harmful_only=True),
}
ORACLES = {
    "copc": lambda o: o.copc(LOW, HIGH),
    "copc_frozen": lambda o: o.copc(LOW, HIGH, frozen=True),
    "restoring": lambda o: o.restoring(LOW, HIGH),
    "ppo": lambda o: o.ppo(LOW, HIGH),
    "ppo_dual": lambda o: o.ppo(LOW, HIGH, dual_clip=1.71),
    "decoupled": lambda o: o.decoupled(LOW, HIGH, lambda w: w if w <= 1.57 else 0.0),
    "tis": lambda o: o.decoupled(LOW, HIGH, lambda w: min(w, 1.57)),
    "icepop": lambda o: o.decoupled(LOW, HIGH, lambda w: w if 0.63 <= w <= 1.57 else 0.0),
    "reinforce": lambda o: o.policy_gradient(lambda r, w: 1.0),
    "vtrace": lambda o: o.policy_gradient(lambda r, w: 1.0),
    "sao": lambda o: o.policy_gradient(lambda r, w: r if LOW < r < HIGH else 0.0),
    "cispo": lambda o: o.policy_gradient(lambda r, w: min(max(r, LOW), HIGH)),
    "gspo": lambda o: o.gspo(1 - 0.0713, 1 + 0.0887),
    "vcpo": lambda o: o.policy_gradient(lambda r, w: min(w, 1.57)),
    "m2po": lambda o: o.m2po(0.0437),
    "m2po_harmful": lambda o: o.m2po(0.0437, harmful_only=True),
}
# A ranking over the whole call does not split into parts.
SEPARABLE = [name for name in ACTOR_LOSSES if not name.startswith("m2po")]


def evaluate(name, policy, proximal, behavior, advantage, is_action, segment_ids):
    """Evaluate a loss: {(name, reduce): (loss, metrics, gradient by policy)}."""
    results = {}
    for reduce in REDUCTIONS:

        def run(policy, reduce=reduce):
            return ACTOR_LOSSES[name](
                policy,
                proximal,
                behavior,
                advantage,
                is_action,
                reduce=reduce,
                segment_ids=segment_ids,
            )

        (loss, metrics), gradient = jax.value_and_grad(run, has_aux=True)(policy)
        results[name, reduce] = (loss, metrics, gradient)
    return results


def every(evaluators, arguments):
    results = {}
    for evaluator in evaluators:
        results |= evaluator(*arguments)
    return results


EVALUATORS = [partial(evaluate, name) for name in ACTOR_LOSSES]
COMPILED = [jax.jit(evaluator) for evaluator in EVALUATORS]


def ALL(*arguments):
    return every(COMPILED, arguments)


def per_response(names, *arguments):
    """Evaluate losses reduced by response, without gradients: {name: (loss, metrics)}."""
    *tokens, segment_ids = arguments
    return {
        name: ACTOR_LOSSES[name](*tokens, reduce="response", segment_ids=segment_ids)
        for name in names
    }


INPUTS = ("policy", "proximal", "behavior", "advantage", "is_action", "segment_ids")


def arguments(batch):
    return [batch[name] for name in INPUTS]


def floats(low, high):
    return st.floats(low, high, width=32, allow_subnormal=False)


def arrays(low, high):
    return hnp.arrays(np.float32, (ROWS, TIME), elements=floats(low, high))


@st.composite
def batches(draw):
    behavior = draw(arrays(-3, -0.75))
    begins = draw(hnp.arrays(np.bool_, (ROWS, TIME), elements=st.booleans()))
    return {
        "policy": behavior + draw(arrays(-0.75, 0.75)),
        "proximal": behavior + draw(arrays(-0.75, 0.75)),
        "behavior": behavior,
        "advantage": draw(arrays(-2, 2)),
        "is_action": draw(hnp.arrays(np.bool_, (ROWS, TIME))),
        "segment_ids": 1 + np.cumsum(begins, axis=1, dtype=np.int32),
    }


def sample_batch(seed=0, rows=ROWS, time=TIME, spread=0.3):
    rng = np.random.default_rng(seed)
    shape = (rows, time)
    behavior = -rng.uniform(0.7, 3, shape)
    batch = {
        "policy": behavior + rng.normal(size=shape) * spread,
        "proximal": behavior + rng.normal(size=shape) * spread,
        "behavior": behavior,
        "advantage": rng.normal(size=shape),
    }
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    batch["is_action"] = rng.random(shape) < 0.7
    batch["segment_ids"] = np.broadcast_to(1 + np.arange(time) // 3, shape).astype(np.int32)
    return batch


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=tolerance)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def same_results(got, want):
    """Compare losses, metrics and gradients bit for bit, and say which loss differs."""
    for key, (loss, metrics, gradient) in got.items():
        for x, y in zip(
            jax.tree.leaves((loss, metrics, gradient)), jax.tree.leaves(want[key]), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(key))


# Values and derivatives.


@given(batch=batches())
def test_every_actor_loss_equals_its_loop_and_its_derivative(batch):
    results = ALL(*arguments(batch))
    oracle = oracles.ActorOracle(*arguments(batch))
    for (name, reduce), (loss, metrics, gradient) in results.items():
        weight = oracles.reduction_weights(batch["is_action"], reduce, batch["segment_ids"])
        objective, derivative = ORACLES[name](oracle)
        message = f"{name} {reduce}"
        want = -(weight * objective).sum()
        np.testing.assert_allclose(loss, want, rtol=1e-4, atol=2e-5, err_msg=message)
        np.testing.assert_allclose(
            gradient, -weight * derivative, rtol=1e-4, atol=2e-5, err_msg=message
        )
        total, count = metrics["loss"]
        np.testing.assert_allclose(total / max(count, 1), want, rtol=1e-4, atol=2e-5)


@given(batch=batches())
def test_shared_metrics(batch):
    action = batch["is_action"]
    batch["advantage"][np.abs(batch["advantage"]) < 1e-3] = 1
    d = (batch["policy"].astype(np.float64) - batch["behavior"])[action]
    r = np.exp(d)
    for (name, reduce), (_, metrics, gradient) in ALL(*arguments(batch)).items():
        sums = {key: float(total) for key, (total, _) in metrics.items()}
        close(sums["ratio"], r.sum(), 1e-4)
        close(sums["log_ratio"], d.sum(), 1e-4)
        close(sums["log_ratio_square"], np.square(d).sum(), 1e-4)
        close(sums["kl"], (r - 1 - d).sum(), 1e-4)
        assert sums["ratio_capped"] == 0
        assert all(
            float(count) == action.sum()
            for key, (_, count) in metrics.items()
            if key not in ("loss", "response_weight", "response_weight_square")
        )
        # Exactly the kept tokens have a gradient.
        moved = np.asarray(gradient) != 0
        assert np.all(~moved[~action])
        assert moved.sum() == sums["kept"], (name, reduce)


def test_metrics_tell_the_two_sides_apart():
    policy = jnp.log(jnp.array([[0.1, 1.0, 1.5, 1.5, 0.5]]))
    zero, action = jnp.zeros((1, 5)), jnp.array([[True, True, True, True, False]])
    advantage = jnp.array([[1.0, 1.0, 1.0, -1.0, 1.0]])

    # Lower bound, upper bound, kept. The product of the four ratios is 0.225; a ratio of exactly 1
    # is at the bound of CISPO without a margin and not beyond it.
    cases = [
        (losses.copc_actor_loss, {}, [1, 2, 1]),
        (losses.sao_actor_loss, {}, [1, 2, 1]),
        (losses.copc_restoring_actor_loss, {}, [1, 2, 3]),
        (losses.ppo_actor_loss, {}, [0, 1, 3]),
        (losses.ppo_actor_loss, {"dual_clip": 1.2}, [0, 2, 2]),
        (losses.cispo_actor_loss, {}, [0, 2, 4]),
        (losses.cispo_actor_loss, {"clip_low": 0.5}, [1, 2, 4]),
        (losses.cispo_actor_loss, {"clip_high": 0.0}, [0, 2, 4]),
        (losses.vcpo_actor_loss, {"weight_max": 0.2}, [0, 4, 4]),
        (losses.vcpo_actor_loss, {"weight_max": 0.3}, [0, 0, 4]),
        (losses.reinforce_actor_loss, {}, [0, 0, 4]),
        (losses.vtrace_actor_loss, {}, [0, 0, 4]),
        (losses.m2po_actor_loss, {"threshold": 9.0}, [0, 0, 4]),
        (losses.m2po_actor_loss, {"threshold": 0.2}, [1, 0, 3]),
        (losses.m2po_actor_loss, {"threshold": 0.05}, [1, 2, 1]),
        (losses.gspo_actor_loss, {}, [1, 0, 3]),
    ]

    @jax.jit
    def run():
        results = [loss(policy, zero, advantage, action, **options) for loss, options, _ in cases]
        return [
            [metrics[name][0] for name in ("clip_low", "clip_high", "kept")]
            for _, metrics in results
        ]

    for (loss, options, want), got in zip(cases, run(), strict=True):
        assert list(map(float, got)) == want, (loss.__name__, options)


def test_tokens_outside_the_interval_that_would_be_led_back_are_counted():
    policy = jnp.log(jnp.array([[0.1, 0.1, 1.0, 1.5, 1.5, 1.5, 0.5]]))
    advantage = jnp.array([[1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 1.0]])
    action = jnp.array([[True] * 6 + [False]])
    for loss in (losses.copc_actor_loss, losses.copc_restoring_actor_loss):
        _, metrics = loss(policy, jnp.zeros((1, 7)), advantage, action)
        assert [float(x) for x in metrics["restoring"]] == [2, 6]


def test_ratio_clipped_below_needs_a_negative_advantage():
    policy, one = jnp.log(jnp.array([[0.5, 0.5]])), jnp.ones((1, 2))
    _, metrics = losses.ppo_actor_loss(policy, 0 * one, jnp.array([[1.0, -1.0]]), one > 0)
    assert float(metrics["clip_low"][0]) == 1 and float(metrics["clip_high"][0]) == 0


@given(batch=batches())
def test_copc_and_sao_have_the_same_gradient(batch):
    results = ALL(*arguments(batch))
    for reduce in REDUCTIONS:
        close(results["copc", reduce][2], results["sao", reduce][2], 1e-6)


@given(batch=batches())
def test_keeping_what_leads_back_is_a_ppo_clip_up_to_the_weight_outside(batch):
    """The same tokens have a gradient, of the same sign, and the same one inside the interval."""
    results = ALL(*arguments(batch))
    with np.errstate(invalid="ignore"):
        ratio = np.exp(batch["policy"].astype(np.float64) - batch["behavior"])
    bounded = np.clip(ratio, LOW, HIGH)
    for reduce in REDUCTIONS:
        ppo = np.asarray(results["ppo", reduce][2], np.float64)
        same(results["restoring", reduce][2] != 0, ppo != 0)
        factor = np.divide(bounded, ratio, where=batch["is_action"], out=np.ones_like(ratio))
        close(results["restoring", reduce][2], ppo * factor)


def token_loss(loss, ratio, advantage, **options):
    """Loss and derivative by the log-probability of one token."""

    def run(policy):
        zero = jnp.zeros((1, 1))
        return loss(policy, zero, jnp.full((1, 1), advantage), zero == 0, **options)[0]

    value, gradient = jax.jit(jax.value_and_grad(run))(jnp.log(jnp.full((1, 1), ratio)))
    return float(value), float(gradient[0, 0])


def test_a_clip_and_a_mask_treat_the_other_side_differently():
    for ratio, advantage, want in ((1.5, -1.0, 1.5), (0.5, 1.0, -0.5)):
        close(token_loss(losses.ppo_actor_loss, ratio, advantage), [want, want])
        close(token_loss(losses.copc_actor_loss, ratio, advantage), [0, 0])
        close(token_loss(losses.sao_actor_loss, ratio, advantage), [0, 0])
        # Kept as by the clip, at the bound that the ratio passed.
        bound = 1.28 if ratio > 1 else 0.8
        got = token_loss(losses.copc_restoring_actor_loss, ratio, advantage)
        close(got, [-bound * advantage * math.log(ratio), -bound * advantage])
        close(token_loss(losses.copc_restoring_actor_loss, ratio, -advantage), [0, 0])
    for ratio in (0.81, 1.27):
        for loss in (losses.copc_actor_loss, losses.sao_actor_loss):
            close(token_loss(loss, ratio, -1.0)[1], ratio)


def test_the_mask_is_closed():
    edges = jnp.array([0.8, 1.28, 0.7999, 1.2801, 1.0, jnp.nan])
    same(losses.ratio_mask(edges), [True, True, False, False, True, False])
    same(losses.ratio_mask(edges, 0.0), [False, False, False, False, True, False])
    same(losses.ratio_mask(edges, 1.0, 0.25, 0.2), [True, False, True, False, True, False])
    assert bool(losses.ratio_mask(jnp.bfloat16(1.0), 0.0))


def test_what_happens_at_a_bound():
    """A ratio of exactly 1, which float32 holds, against bounds of 1: SAO alone drops it."""
    policy, zero = jnp.zeros((1, 1)), jnp.zeros((1, 1))
    sao, copc = adapt(losses.sao_actor_loss), adapt(losses.copc_actor_loss)
    ppo, restoring = adapt(losses.ppo_actor_loss), adapt(losses.copc_restoring_actor_loss)
    decoupled = adapt(losses.decoupled_ppo_actor_loss, THREE)
    icepop = adapt(losses.icepop_actor_loss, THREE)
    cases = [
        (sao, {"clip_low": 0.0}, 1, (0, 0)),
        (sao, {"clip_high": 0.0}, 1, (0, 0)),
        (copc, {"eps_low": 0.0}, 1, (-1, -1)),
        (copc, {"eps_high": 0.0}, 1, (-1, -1)),
        (restoring, {"eps_low": 0.0}, -1, (0, 1)),
        (restoring, {"eps_high": 0.0}, 1, (0, -1)),
        (ppo, {"clip_low": 0.0}, -1, (1, 1)),
        (ppo, {"clip_high": 0.0}, 1, (-1, -1)),
        (ppo, {"dual_clip": 1.0}, -1, (1, 1)),
        (decoupled, {"behavior_cap": 1.0}, 1, (-1, -1)),
        (icepop, {"weight_min": 1.0}, 1, (-1, -1)),
        (icepop, {"weight_max": 1.0}, 1, (-1, -1)),
    ]

    @jax.jit
    def run(policy):
        def value(policy, loss, options, advantage):
            return loss(policy, zero, zero, zero + advantage, zero == 0, **options)[0]

        return [jax.value_and_grad(value)(policy, *case[:3]) for case in cases]

    for (_, options, _, want), (loss, gradient) in zip(cases, run(policy), strict=True):
        assert (float(loss), float(gradient[0, 0])) == want, options


def test_tokens_at_a_bound_or_without_advantage_are_not_clipped():
    zero, true = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    far = jnp.log(jnp.array([[0.1, 9.0]]))
    cases = [
        (losses.ppo_actor_loss, zero, 1.0, {"clip_low": 0.0, "clip_high": 0.0}),
        (losses.cispo_actor_loss, zero, 1.0, {"clip_low": 0.0, "clip_high": 0.0}),
        (losses.copc_actor_loss, zero, 1.0, {"eta_policy": 0.0}),
        (losses.vcpo_actor_loss, zero, 1.0, {"weight_max": 1.0}),
        (losses.ppo_actor_loss, far, 0.0, {}),
        (losses.ppo_actor_loss, far, 0.0, {"dual_clip": 2.0}),
        (losses.gspo_actor_loss, far, 0.0, {}),
    ]

    @jax.jit
    def run():
        results = [
            loss(policy, zero, zero + advantage, true, **options)
            for loss, policy, advantage, options in cases
        ]
        return [(metrics["clip_low"][0], metrics["clip_high"][0]) for _, metrics in results]

    for (loss, _, _, options), clipped in zip(cases, run(), strict=True):
        assert tuple(map(float, clipped)) == (0, 0), (loss.__name__, options)


def test_losses_from_the_proximal_policy_count_their_two_sides():
    """Policy over proximal is 0.1, 1.5, 1.5 and 1, proximal over behavior 1."""
    policy, zero = jnp.log(jnp.array([[0.1, 1.5, 1.5, 1.0]])), jnp.zeros((1, 4))
    advantage = jnp.array([[-1.0, 1.0, -1.0, 1.0]])

    @jax.jit
    def run(dual_clip):
        return [
            loss(policy, zero, zero, advantage, zero == 0, dual_clip=dual_clip)[1]
            for loss in (
                losses.decoupled_ppo_actor_loss,
                losses.tis_actor_loss,
                losses.icepop_actor_loss,
            )
        ]

    for dual_clip, want in ((1.6, [1, 1, 2]), (1.2, [1, 2, 1])):
        for metrics in run(dual_clip):
            names = ("clip_low", "clip_high", "kept", "behavior_weight", "behavior_clipped")
            assert [float(metrics[name][0]) for name in names] == [*want, 4, 0]


def test_dual_clip_bounds_negative_advantages_only():
    close(token_loss(losses.ppo_actor_loss, 1.1, 2.0, dual_clip=3.0), [-2.2, -2.2])
    close(token_loss(losses.ppo_actor_loss, 10.0, -2.0, dual_clip=3.0), [6, 0])
    close(token_loss(losses.ppo_actor_loss, 10.0, 2.0, dual_clip=3.0), [-2.56, 0])
    close(token_loss(losses.ppo_actor_loss, 10.0, -2.0), [20, 20])


def test_behavior_cap_drops_and_truncation_bounds():
    """Proximal over behavior is 6; policy over proximal is 1."""

    def run(loss, **options):
        def value(policy):
            three = [policy, jnp.log(jnp.full((1, 2), 6.0)), jnp.zeros((1, 2))]
            return loss(*three, jnp.ones((1, 2)), jnp.ones((1, 2), bool), **options)

        (value, metrics), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(
            jnp.log(jnp.full((1, 2), 6.0))
        )
        return value, gradient[0, 0], float(metrics["behavior_clipped"][0])

    close(run(losses.decoupled_ppo_actor_loss), [0, 0, 2])
    close(run(losses.decoupled_ppo_actor_loss, behavior_cap=6.5), [-6, -3, 0])
    close(run(losses.tis_actor_loss), [-2, -1, 2])
    close(run(losses.icepop_actor_loss), [0, 0, 2])
    close(run(losses.icepop_actor_loss, weight_max=6.5), [-6, -3, 0])


def test_dropped_tokens_stay_in_the_denominator_unless_asked():
    policy = jnp.log(jnp.array([[1.0, 9.0, 9.0, jnp.nan], [9.0, 9.0, 9.0, 1.0]]))
    action = jnp.array([[True, True, True, False]] * 2)
    rest = (jnp.zeros((2, 4)), jnp.ones((2, 4)), action)

    @jax.jit
    def run():
        return {
            (reduce, whole): losses.copc_actor_loss(
                policy, *rest, reduce=reduce, mask_in_denominator=whole
            )
            for reduce, whole in itertools.product(REDUCTIONS, (True, False))
        }

    for (reduce, whole), (loss, metrics) in run().items():
        close(loss, -1 / 6 if whole else -1)
        assert float(metrics["loss"][1]) == (1 if not whole else 6 if reduce == "token" else 2)


def test_eta_zero_trains_no_moved_token():
    value, gradient = token_loss(losses.copc_actor_loss, 1.01, 1.0, eta_policy=0.0)
    assert (value, gradient) == (0, 0)
    assert token_loss(losses.copc_actor_loss, 1.0, 1.0, eta_policy=0.0) == (-1, -1)
    one = jnp.ones((1, 1))
    assert float(jax.grad(lambda v: losses.critic_loss(v, 2 * one, one > 0)[0])(one)[0, 0]) == -1


def test_second_moment_mask_drops_the_largest_first():
    mask = jax.jit(lambda x, candidate: losses.second_moment_mask(x, candidate, threshold=0.25))
    every = jnp.ones((2, 3), bool)
    x = jnp.array([[0.0, 0.5, -1.0], [0.0, 0.5, 0.5]])
    # Squares 0, 0, .25, .25, .25, 1: the mean of the first five is .15, of all six .29.
    same(mask(x, every), [[True, True, False], [True, True, True]])
    # Tokens that are not candidates neither count nor go.
    same(mask(x, every.at[0, 2].set(False)), every)
    # Only large ones: 1 alone is above the threshold.
    same(mask(2 * jnp.ones((2, 3)), every), ~every)
    # Squares 0, .36, .36: two fit (mean .18), three do (.24).
    ties = jnp.array([[0.0, 0.6, 0.6], [0.0, 0.0, 0.0]])
    same(mask(ties, every.at[1].set(False)), every)
    # 0.50390625**2 = 0.253922, which bfloat16 rounds to 0.253906.
    coarse = jnp.full((2, 3), 0.50390625, jnp.bfloat16)
    same(losses.second_moment_mask(coarse, every, threshold=0.25391), ~every)
    # No mean is below 0, and still only candidates go.
    got = losses.second_moment_mask(ties, every.at[1].set(False), threshold=-1.0)
    same(got, [[False] * 3, [True] * 3])
    # Squares 0, .49, .49: two would fit, and which of equals goes must not depend on the order.
    ties = jnp.array([[0.0, 0.7, -0.7], [0.0, 0.0, 0.0]])
    same(mask(ties, every.at[1].set(False))[0], [True, False, False])
    same(mask(jnp.full((2, 3), 0.5), every), every)


def test_harmful_tokens_alone_are_ranked():
    """Neither a token without advantage nor one that has not moved dilutes the mean."""
    policy = jnp.array([[1.0, 0.1, 0.0, 0.1, 0.1]])
    advantage = jnp.array([[1.0, 0.0, 1.0, -1.0, jnp.nan]])
    action = jnp.array([[True, True, True, True, False]])
    mask = partial(losses.m2po_mask, policy, 0 * policy, advantage, action, threshold=0.6)
    same(mask(harmful_only=True), [[False, True, True, True, True]])
    same(mask(), np.ones((1, 5), bool))


@jax.jit
def m2po_with_masks(policy, behavior, advantage, is_action, masks):
    def run(policy, harmful_only, kept):
        return losses.m2po_actor_loss(
            policy,
            behavior,
            advantage,
            is_action,
            threshold=0.0437,
            harmful_only=harmful_only,
            kept=kept,
        )

    grad = jax.value_and_grad(run, has_aux=True)
    return [grad(policy, harmful_only, masks and masks[harmful_only])
            for harmful_only in (False, True)]  # fmt: skip


def test_a_ranking_of_the_whole_batch_makes_its_parts_add_up():
    batch = {name: jnp.asarray(x) for name, x in sample_batch().items()}
    inputs = [batch[name] for name in ("policy", "behavior", "advantage", "is_action")]
    masks = [
        jax.jit(partial(losses.m2po_mask, threshold=0.0437, harmful_only=harmful_only))(*inputs)
        for harmful_only in (False, True)
    ]
    oracle = oracles.ActorOracle(*arguments(batch))
    whole = m2po_with_masks(*inputs, None)
    parts = [
        m2po_with_masks(*[x[rows] for x in inputs], [mask[rows] for mask in masks])
        for rows in (slice(0, 2), slice(2, 4))
    ]
    for i, name in enumerate(("m2po", "m2po_harmful")):
        _, derivative = ORACLES[name](oracle)
        same(masks[i], (derivative != 0) | ~batch["is_action"])
        (_, metrics), gradient = whole[i]
        for metric, pair in metrics.items():
            added = [sum(part[i][0][1][metric][j] for part in parts) for j in (0, 1)]
            close(added, pair, 1e-5)
        counts = [part[i][0][1]["loss"][1] for part in parts]
        summed = [part[i][1] * count for part, count in zip(parts, counts, strict=True)]
        close(jnp.concatenate(summed) / sum(counts), gradient, 1e-6)


def test_shares_of_parts_add_by_tokens_and_are_no_mean_of_means():
    """2 of 10 tokens are dropped in one part and 3 of 4 in the other."""

    def part(tokens, dropped):
        policy = jnp.where(jnp.arange(tokens) < dropped, 1.0, 0.0)[None]
        rest = (jnp.zeros((1, tokens)), jnp.ones((1, tokens)), jnp.ones((1, tokens), bool))
        return losses.copc_actor_loss(policy, *rest)[1]

    parts = jax.tree.map(jnp.add, part(10, 2), part(4, 3))
    close(parts["clip_high"][0] / parts["clip_high"][1], 0.357143)  # not 0.475
    close(parts["kept"][0] / parts["kept"][1], 9 / 14)


def test_sequence_ratio_counts_action_tokens_only():
    policy = jnp.array([[0.2, 0.4, jnp.nan, 0.7]])
    action = jnp.array([[True, True, False, False]])
    run = lambda mean: losses.response_log_ratio(policy, jnp.zeros((1, 4)), action, mean=mean)
    close(jnp.exp(run(True))[0], [1.349859, 1.349859, 1, 1], 1e-6)
    close(jnp.exp(run(False))[0], [1.822119, 1.822119, 1, 1], 1e-6)
    long = losses.response_log_ratio(
        jnp.full((1, 90), 1.0), jnp.zeros((1, 90)), jnp.ones((1, 90), bool), mean=False
    )
    same(long, np.full((1, 90), returns.LOG_RATIO_LIMIT))


def test_effective_sample_share():
    pair = lambda x: (jnp.sum(jnp.asarray(x)), jnp.float32(len(x)))
    share = lambda w: losses.effective_sample_share(pair(w), pair(np.square(w)))
    close(share(np.array([1.0, 1.0, 1.0, 1.0], np.float32)), 1)
    close(share(np.array([2.0, 0.0, 0.0, 0.0], np.float32)), 0.25)
    close(share(np.array([3.0, 1.0], np.float32)), 16 / 20)
    same(share(np.zeros(0, np.float32)), 0)
    batch = sample_batch()
    _, metrics, _ = ALL(*arguments(batch))["vcpo", "token"]
    groups = oracles.responses(batch["is_action"], batch["segment_ids"])
    gap = batch["policy"].astype(np.float64) - batch["behavior"]
    weight = np.array([math.exp(sum(gap[at] for at in group)) for group in groups])
    close(metrics["response_weight"], [weight.sum(), len(groups)], 1e-4)
    close(metrics["response_weight_square"], [np.square(weight).sum(), len(groups)], 1e-4)


def test_kl_estimators():
    policy, reference = jnp.array([-1.0, -1.0]), jnp.array([-2.0, jnp.nan])
    action = jnp.array([True, False])
    for estimator, want in (("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))):
        got = losses.kl_divergence(policy, reference, action, estimator=estimator)
        close(got, [want, 0], 1e-6)
    far = losses.kl_divergence(jnp.array([-101.0]), jnp.array([-1.0]), jnp.ones(1, bool))
    assert np.isfinite(far[0])
    kl = losses.kl_divergence(
        jnp.array([0.1, 5, 5, 0.1]), jnp.zeros(4), jnp.array([True, False, False, True]),
        estimator="k1",
    )  # fmt: skip
    close(kl.sum(), 0.2, 1e-6)
    for estimator, slope in (("k1", 1.0), ("k2", 1.0), ("k3", 1 - math.exp(-1))):
        run = lambda p, e=estimator: losses.kl_divergence(p, reference, action, estimator=e).sum()
        close(jax.grad(run)(policy), [slope, 0], 1e-6)
    # Small differences keep their digits: exp(x) - 1 - x has none left at 1e-4.
    tiny = losses.kl_divergence(jnp.array([0.0]), jnp.array([1e-2]), jnp.ones(1, bool))
    close(tiny[0] / 5.0167e-5, 1, 1e-3)


# What no loss may depend on.

GARBAGE = [0.0, 1.0, -1e9, 1e9, np.nan, np.inf, -np.inf]


@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_whatever_stands_off_action_tokens_changes_nothing(batch, garbage):
    outside = ~batch["is_action"]
    filled = dict(batch)
    for name in ("policy", "proximal", "behavior", "advantage"):
        filled[name] = np.where(outside, np.float32(garbage), batch[name])
    same_results(ALL(*arguments(filled)), ALL(*arguments(batch)))


SPECIALS = [200.0, -200.0, -np.inf, 0.0, -1e9]


def test_losses_and_gradients_stay_finite_at_any_log_ratio():
    """200 nats overflow exp in float32, and 0 times infinity in the gradient is NaN."""
    pairs = list(itertools.product(SPECIALS, repeat=2))
    pairs += [(0.0, 0.0)] * (-len(pairs) % ROWS)
    grid = np.array(pairs, np.float32)
    # ROWS pairs in turn, in arrays of the shape that is compiled already.
    for start in range(0, len(grid), ROWS):
        part = grid[start : start + ROWS]
        batch = sample_batch()
        batch["is_action"][:] = True
        batch["policy"][:, 2] = part[:, 0]
        batch["behavior"][:, 2] = part[:, 1]
        batch["proximal"][:, 3] = part[:, 0]
        for key, (loss, metrics, gradient) in ALL(*arguments(batch)).items():
            for x in jax.tree.leaves((loss, metrics, gradient)):
                assert np.all(np.isfinite(x)), key


def test_a_diverged_model_is_not_hidden():
    batch = sample_batch()
    batch["is_action"][1, 2] = True
    batch["policy"][1, 2] = np.nan
    for key, (loss, _, _) in ALL(*arguments(batch)).items():
        assert np.isnan(loss), key


def test_capped_ratios_are_counted_and_agree_with_their_log():
    policy = jnp.array([[30.0, -30.0, 0.0]])
    _, metrics = losses.ppo_actor_loss(policy, 0 * policy, 0 * policy, policy == policy)
    assert float(metrics["ratio_capped"][0]) == 2
    _, metrics = losses.ppo_actor_loss(
        policy[:, :1], policy[:, 2:], policy[:, 2:], policy[:, :1] > 0
    )
    close(metrics["ratio"][0], np.exp(metrics["log_ratio"][0]), 1e-6)


def test_only_the_policy_gets_a_gradient():
    batch = {name: jnp.asarray(x) for name, x in sample_batch().items()}

    def total(proximal, behavior, advantage):
        results = []
        for name in ACTOR_LOSSES:
            loss, metrics = ACTOR_LOSSES[name](
                batch["policy"], proximal, behavior, advantage, batch["is_action"]
            )
            results.append(loss + sum(x for x, _ in metrics.values()))
        return sum(results)

    fixed = (batch["proximal"], batch["behavior"], batch["advantage"])
    for gradient in jax.jit(jax.grad(total, argnums=(1, 2)))(*fixed)[1:]:
        same(gradient, np.zeros((ROWS, TIME)))


def test_metrics_have_no_gradient():
    batch = {name: jnp.asarray(x) for name, x in sample_batch().items()}
    old, action = batch["behavior"], batch["is_action"]

    def total(policy):
        results = [
            loss(policy, batch["proximal"], old, batch["advantage"], action)
            for loss in ACTOR_LOSSES.values()
        ]
        results.append(losses.sft_loss(policy, action))
        results.append(
            losses.critic_loss(policy, batch["proximal"], action, old_value=old, value_clip=0.1)
        )
        return sum(x for _, metrics in results for pair in metrics.values() for x in pair)

    same(jax.jit(jax.grad(total))(batch["policy"]), np.zeros((ROWS, TIME)))


def test_gradient_reaches_neither_values_nor_policy_through_the_returns():
    batch = {name: jnp.asarray(x) for name, x in sample_batch().items()}
    action = jnp.ones((ROWS, TIME), bool)
    behavior = batch["behavior"]

    def loss(policy, value, live):
        """With `live` the returns see the policy and value being trained, else frozen copies."""
        seen = (policy, value) if live else jax.lax.stop_gradient((policy, value))
        ratio = returns.importance_ratio(seen[0], behavior, action)
        result = returns.copc_returns(
            batch["advantage"], seen[1], jnp.full((ROWS, TIME), 0.9), ratio, action
        )
        actor, _ = losses.copc_actor_loss(policy, behavior, result.advantage, action)
        critic, _ = losses.critic_loss(
            value, result.value_target, action, old_value=seen[1] + 0.1, value_clip=0.05
        )
        return actor + critic

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    live = grad(batch["policy"], batch["proximal"], True)
    frozen = grad(batch["policy"], batch["proximal"], False)
    same(live[0], frozen[0])
    same(live[1], frozen[1])


def test_batches_without_a_trainable_token_give_zero():
    batch = sample_batch()
    batch["is_action"][:] = False
    for key, (loss, metrics, gradient) in ALL(*arguments(batch)).items():
        assert float(loss) == 0 and np.all(np.asarray(gradient) == 0), key
        assert all(float(x) == 0 for pair in metrics.values() for x in pair), key


def two_rows(batch, start=0):
    """Rows start and start + 1, padded on the right to twice their width."""
    return {
        name: np.pad(x[start : start + 2], ((0, 0), (0, TIME)), constant_values=0)
        for name, x in batch.items()
    }


def test_padding_changes_nothing():
    """Two rows and two empty ones against two wide rows."""
    batch = sample_batch()
    batch["is_action"][2:] = False
    wide, narrow = ALL(*arguments(two_rows(batch))), ALL(*arguments(batch))
    for key, (loss, metrics, gradient) in narrow.items():
        close(wide[key][0], loss, 1e-6)
        close(wide[key][2][:, :TIME], gradient[:2], 1e-6)
        jax.tree.map(lambda x, y: close(x, y, 1e-5), wide[key][1], metrics)


def test_packed_rows_equal_separate_rows():
    """Two responses a row give the loss and gradient of one response a row."""
    batch = sample_batch()
    batch["segment_ids"][:] = 1
    packed = {name: x.reshape(ROWS // 2, 2 * TIME) for name, x in batch.items()}
    packed["segment_ids"] = np.repeat([[1] * TIME + [2] * TIME], ROWS // 2, 0).astype(np.int32)
    apart, together = ALL(*arguments(batch)), ALL(*arguments(packed))
    for key, (loss, metrics, gradient) in apart.items():
        close(together[key][0], loss, 1e-6)
        close(together[key][2].reshape(ROWS, TIME), gradient, 1e-6)
        jax.tree.map(lambda x, y: close(x, y, 1e-5), together[key][1], metrics)


def test_row_order_changes_nothing():
    batch = sample_batch()
    order = np.array([2, 0, 3, 1])
    permuted = ALL(*arguments({name: x[order] for name, x in batch.items()}))
    for key, (loss, _, gradient) in ALL(*arguments(batch)).items():
        close(permuted[key][0], loss, 1e-6)
        close(permuted[key][2], np.asarray(gradient)[order], 1e-6)


def test_micro_batches_add_up():
    """Sums and counts of the parts give the mean of the whole; means of means would not."""
    batch = sample_batch()
    batch["is_action"][:2, 1:] = False
    batch["is_action"][:2, 0] = True
    parts = [ALL(*arguments(two_rows(batch, start))) for start in (0, 2)]
    whole = ALL(*arguments(batch))
    for name, reduce in itertools.product(SEPARABLE, REDUCTIONS):
        key = (name, reduce)
        loss, metrics, gradient = whole[key]
        for metric, (total, count) in metrics.items():
            close(sum(part[key][1][metric][0] for part in parts), total, 1e-5)
            close(sum(part[key][1][metric][1] for part in parts), count, 0)
        total, count = metrics["loss"]
        close(total / count, loss, 1e-6)
        summed = [np.asarray(part[key][2] * part[key][1]["loss"][1])[:, :TIME] for part in parts]
        close(np.concatenate(summed) / float(count), gradient, 1e-6)
    means = [float(part["copc", "token"][0]) for part in parts]
    assert abs(sum(means) / 2 - float(whole["copc", "token"][0])) > 1e-3


def test_bfloat16_computes_in_float32():
    batch = sample_batch()
    half = {
        k: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for k, x in batch.items()
    }
    full = {k: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for k, x in half.items()}
    run = jax.jit(partial(per_response, ACTOR_LOSSES))
    low, wide = run(*arguments(half)), run(*arguments(full))
    for x, y in zip(jax.tree.leaves(low), jax.tree.leaves(wide), strict=True):
        assert x.dtype == jnp.float32
        close(x, y, 1e-6)


def test_sharded_rows_give_the_same_loss():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = sample_batch()
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    every_loss = list(ACTOR_LOSSES)

    def run(policy, *rest):
        results = per_response(every_loss, policy, *rest)
        return jnp.stack([loss for loss, _ in results.values()]), results

    # One compilation for all gradients: the sum of the losses, each with a weight of its own.
    scale = jnp.arange(1.0, 1 + len(every_loss))
    grad = jax.jit(jax.grad(lambda *a: (lambda x, aux: (x @ scale, aux))(*run(*a)), has_aux=True))
    got, want = grad(*arguments(spread)), grad(*arguments(batch))
    assert len(got[0].sharding.device_set) == 4
    jax.tree.map(lambda x, y: close(x, y, 1e-5), got, want)


def test_explicit_meshes_work():
    """Except M2PO, whose ranking over all tokens cannot stay sharded."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    batch = sample_batch()
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    run = partial(per_response, SEPARABLE)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*arguments(spread))
    for name, (loss, _) in got.items():
        close(loss, ALL(*arguments(batch))[name, "response"][0], 1e-6)


def test_shard_map_adds_sums_and_counts():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = sample_batch()
    batch["is_action"][0] = False

    def local(*part):
        results = per_response(SEPARABLE, *part)
        return {
            name: jax.lax.psum(metrics["loss"], "data") for name, (_, metrics) in results.items()
        }

    rows, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=whole))
    for name, (total, count) in run(*arguments(batch)).items():
        close(total / count, ALL(*arguments(batch))[name, "response"][0], 1e-6)


def test_vmap_gives_one_loss_a_row():
    batch = sample_batch()
    got = jax.jit(jax.vmap(partial(per_response, ACTOR_LOSSES)))(*arguments(batch))
    for b in range(ROWS):
        row = {name: x[b : b + 1] for name, x in batch.items()}
        oracle = oracles.ActorOracle(*arguments(row))
        weight = oracles.reduction_weights(row["is_action"], "response", row["segment_ids"])
        for name, (loss, _) in got.items():
            want = -(weight * ORACLES[name](oracle)[0]).sum()
            np.testing.assert_allclose(loss[b], want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_reductions_are_equal_on_any_number_of_devices(devices):
    """Whole and shard by shard, where sums and counts are added; values and gradients."""
    batch = {name: jnp.asarray(x) for name, x in sample_batch().items()}
    batch["is_action"] = batch["is_action"].at[0].set(False)
    mesh = jax.make_mesh(
        (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    rows, whole = PartitionSpec("data"), PartitionSpec()
    weights = {
        reduce: oracles.reduction_weights(batch["is_action"], reduce, batch["segment_ids"])
        for reduce in REDUCTIONS
    }
    inputs = [batch[name] for name in ("advantage", "is_action", "segment_ids")]

    def added(x, action, segments):
        result = {}
        for reduce in REDUCTIONS:
            weight, count = losses.reduction_weights(action, reduce=reduce, segment_ids=segments)
            result[reduce] = jax.lax.psum(((weight * x).sum(), count), "data")
        return result

    def at_once(x, action, segments):
        run = lambda x, reduce: losses.reduce_tokens(x, action, reduce=reduce, segment_ids=segments)
        return {reduce: jax.value_and_grad(run)(x, reduce) for reduce in REDUCTIONS}

    sums = jax.jit(jax.shard_map(added, mesh=mesh, in_specs=rows, out_specs=whole))(*inputs)
    results = jax.jit(at_once)(*jax.device_put(inputs, NamedSharding(mesh, rows)))
    for reduce in REDUCTIONS:
        want = (weights[reduce] * np.asarray(inputs[0])).sum()
        close(sums[reduce][0] / sums[reduce][1], want)
        loss, gradient = results[reduce]
        close(loss, want)
        close(gradient, weights[reduce])
        assert len(gradient.sharding.device_set) == devices


# The other functions on arrays: of [..., T] to one number, or to one a token.
FUNCTIONS = {
    "ratio_mask": lambda b: losses.ratio_mask(b["policy"] / b["behavior"]),
    "reduce_tokens": lambda b: losses.reduce_tokens(
        b["policy"], b["is_action"], reduce="response", segment_ids=b["segment_ids"]
    ),
    "kl_divergence": lambda b: [
        losses.kl_divergence(b["policy"], b["proximal"], b["is_action"], estimator=estimator)
        for estimator in ("k1", "k2", "k3")
    ],
    "response_log_ratio": lambda b: [
        losses.response_log_ratio(
            b["policy"], b["behavior"], b["is_action"], mean=mean, segment_ids=b["segment_ids"]
        )
        for mean in (True, False)
    ],
    "second_moment_mask": lambda b: losses.second_moment_mask(b["advantage"], b["is_action"]),
    "critic_loss": lambda b: losses.critic_loss(
        b["policy"],
        b["proximal"],
        b["is_action"],
        old_value=b["behavior"],
        value_clip=0.21,
        reduce="response",
        segment_ids=b["segment_ids"],
    ),
    "sft_loss": lambda b: losses.sft_loss(
        b["policy"], b["is_action"], reduce="response", segment_ids=b["segment_ids"]
    ),
}


def others(batch):
    return {name: function(batch) for name, function in FUNCTIONS.items()}


def test_other_functions_row_by_row_under_vmap_or_under_shard_map():
    batch, alone = sample_batch(), jax.jit(others)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jax.vmap(others), mesh=mesh, in_specs=spec, out_specs=spec)
    both = [jax.jit(run)(batch) for run in (jax.vmap(others), mapped)]
    for b in range(ROWS):
        want = alone({key: x[b] for key, x in batch.items()})
        for got in both:
            jax.tree.map(lambda x, y, b=b: close(x[b], y), got, want)


def test_other_functions_compute_bfloat16_in_float32():
    batch = sample_batch()
    half = {
        k: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for k, x in batch.items()
    }
    full = {k: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for k, x in half.items()}
    run = jax.jit(others)
    low, wide = run(half), run(full)
    for name in FUNCTIONS.keys() - {"ratio_mask"}:  # Its ratio is formed outside, in bfloat16.
        for x, y in zip(jax.tree.leaves(low[name]), jax.tree.leaves(wide[name]), strict=True):
            assert x.dtype in (jnp.float32, jnp.bool_)
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["kl_divergence", "response_log_ratio", "critic_loss", "sft_loss"])
def test_gradients_are_finite_and_zero_off_action_tokens(name):
    """Between NaN, in rows of which one has no action token, and at probabilities of 0."""
    batch = sample_batch()
    batch["is_action"][1] = False
    batch["is_action"][0, :2] = True
    outside = ~batch["is_action"]
    if name in ("kl_divergence", "response_log_ratio"):
        batch["policy"][0, 0] = batch["proximal"][0, 1] = batch["behavior"][0, 1] = -np.inf
    floats = ("policy", "proximal", "behavior", "advantage")
    moving = {key: np.where(outside, np.float32(np.nan), batch[key]) for key in floats}
    fixed = {key: jnp.asarray(batch[key]) for key in ("is_action", "segment_ids")}

    def total(moving):
        return sum(x.sum() for x in jax.tree.leaves(FUNCTIONS[name](moving | fixed)))

    gradients = jax.jit(jax.grad(total))(moving)
    assert np.any(np.asarray(gradients["policy"]) != 0)
    for key, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), key
        assert np.all(np.asarray(gradient)[outside] == 0), key


# Refused inputs, without the type checks of the tests, as users call the package.


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("name", ACTOR_LOSSES)
@pytest.mark.usefixtures("unchecked")
def test_arrays_that_would_broadcast_are_refused_by_every_actor_loss(name):
    """[4] against [4, 4] would broadcast to a wrong number."""
    batch = {key: jnp.asarray(x) for key, x in sample_batch(time=ROWS).items()}
    read = ["policy", "behavior", "advantage"]
    if name in ("copc_frozen", "decoupled", "tis", "icepop"):
        read.append("proximal")
    for wrong in read:
        arrays = [x[0] if key == wrong else x for key, x in batch.items() if key in INPUTS[:-1]]
        named = "advantage has shape" if wrong == "advantage" else "logprob has shape"
        with pytest.raises(ValueError, match=named):
            jax.eval_shape(ACTOR_LOSSES[name], *arrays)


@pytest.mark.usefixtures("unchecked")
def test_m2po_refuses_arrays_of_another_shape_when_its_mask_is_given():
    right, action = jnp.ones((4, 4)), jnp.ones((4, 4), bool)
    with pytest.raises(ValueError, match="advantage has shape"):
        losses.m2po_actor_loss(right, right, right[0], action, kept=action)
    with jax.numpy_rank_promotion("allow"), pytest.raises(ValueError, match="kept has shape"):
        losses.m2po_actor_loss(right, right, right, action, kept=action[0])


@pytest.mark.usefixtures("unchecked")
def test_critic_and_supervised_losses_name_the_array_of_a_wrong_shape():
    right, action = jnp.ones((4, 4)), jnp.ones((4, 4), bool)
    for wrong in ("value", "value_target", "old_value"):
        arrays = {name: right for name in ("value", "value_target", "old_value")}
        with pytest.raises(ValueError, match=f"^{wrong} has shape"):
            losses.critic_loss(**arrays | {wrong: jnp.ones(4)}, is_action=action, value_clip=0.5)
    with pytest.raises(ValueError, match=r"^logprob has shape"):
        losses.sft_loss(jnp.ones(4), action)


@pytest.mark.usefixtures("unchecked")
def test_unknown_options_are_named():
    one = jnp.ones((2, 2))
    with pytest.raises(ValueError, match='reduce must be "token" or "response", got \'mean\''):
        losses.reduce_tokens(one, one > 0, reduce="mean")
    with pytest.raises(ValueError, match=r"estimator must be .* got 'k4'"):
        losses.kl_divergence(one, one, one > 0, estimator="k4")
    with pytest.raises(ValueError, match="segment_ids has shape"):
        losses.reduce_tokens(
            one, one > 0, reduce="response", segment_ids=jnp.ones((2, 1), jnp.int32)
        )


def test_defaults_are_the_papers():
    clip, token = {"clip_low": 0.2, "clip_high": 0.28}, {"reduce": "token", "segment_ids": None}
    response = token | {"reduce": "response"}
    copc = {"eta_policy": 0.5, "eps_low": 0.4, "eps_high": 0.56}
    options = {"frozen_logprob": None, "mask_in_denominator": True}
    dual = {"dual_clip": None}
    table = {
        losses.ratio_mask: copc,
        losses.copc_actor_loss: copc | options | token,
        losses.copc_restoring_actor_loss: copc | token,
        losses.ppo_actor_loss: clip | dual | token,
        losses.decoupled_ppo_actor_loss: clip | dual | {"behavior_cap": 5.0} | token,
        losses.tis_actor_loss: clip | dual | {"weight_max": 2.0} | token,
        losses.icepop_actor_loss: clip | dual | {"weight_min": 0.5, "weight_max": 2.0} | token,
        losses.reinforce_actor_loss: token,
        losses.vtrace_actor_loss: token,
        losses.sao_actor_loss: clip | token,
        losses.cispo_actor_loss: {"clip_low": 1.0, "clip_high": 0.2} | token,
        losses.gspo_actor_loss: {"clip_low": 3e-4, "clip_high": 4e-4} | response,
        losses.vcpo_actor_loss: {"weight_max": 8.0} | response,
        losses.m2po_actor_loss: {"threshold": 0.04, "harmful_only": False, "kept": None} | token,
        losses.m2po_mask: {"threshold": 0.04, "harmful_only": False},
        losses.second_moment_mask: {"threshold": 0.04},
        losses.critic_loss: {"old_value": None, "value_clip": None} | token,
        losses.sft_loss: token,
        losses.reduce_tokens: token,
        losses.reduction_weights: token,
        losses.kl_divergence: {"estimator": "k3"},
    }
    for function, want in table.items():
        parameters = inspect.signature(function).parameters.values()
        got = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert got == want, function.__name__


# Reductions.


def table(*rows):
    width = max(len(row) for row in rows)
    x = np.array([list(row) + [np.nan] * (width - len(row)) for row in rows], np.float32)
    return jnp.asarray(x), jnp.asarray(~np.isnan(x))


REDUCE = jax.jit(losses.reduce_tokens, static_argnames="reduce")


def test_token_mean_and_response_mean():
    x, action = table([2, 2, 2, 2], [6])
    close(REDUCE(x, action, reduce="token"), 2.8)
    close(REDUCE(x, action, reduce="response"), 4.0)
    close(losses.reduce_tokens(x, action), 2.8)


def test_masked_rows_do_not_divide():
    x, action = table([6], [1, 3], [4, 0, 2], [])
    close(REDUCE(x, action, reduce="token"), 2.666667)  # not 2.285714
    close(REDUCE(x, action, reduce="response"), 3.333333)  # not 2.5
    x, action = table([1, 1], [np.nan] * 8)
    close(REDUCE(x, action, reduce="token"), 1.0)  # not 0.2
    x, action = table([np.nan, np.nan])
    for reduce in REDUCTIONS:
        same(REDUCE(x, action, reduce=reduce), 0)


@given(batch=batches())
def test_reductions_equal_a_loop_with_any_segments(batch):
    action, segments = batch["is_action"], batch["segment_ids"]
    for reduce, ids in itertools.product(REDUCTIONS, (None, segments)):
        weight = oracles.reduction_weights(action, reduce, ids)
        got = REDUCE(batch["advantage"], action, reduce=reduce, segment_ids=ids)
        close(got, (weight * batch["advantage"]).sum(), 1e-5)


def test_segment_names_may_be_any_integers():
    x = jnp.array([[2.0, 2, 2, 2, 6, 9]])
    action = jnp.array([[True] * 5 + [False]])
    for ids in ([1, 1, 1, 1, 2, 0], [70, 70, 70, 70, 10**6, -5], [0, 0, 0, 0, 1, 2]):
        got = REDUCE(x, action, reduce="response", segment_ids=jnp.array([ids]))
        close(got, 4.0)
    # The same name in another row is another response.
    got = REDUCE(jnp.array([[2.0, 2], [6, 6]]), jnp.ones((2, 2), bool), reduce="response",
                 segment_ids=jnp.ones((2, 2), jnp.int32))  # fmt: skip
    close(got, 4.0)


def test_tool_text_inside_a_response_does_not_split_it():
    x = jnp.array([[2.0, 99, 4, 9]])
    action = jnp.array([[True, False, True, True]])
    close(REDUCE(x, action, reduce="response", segment_ids=jnp.array([[1, 1, 1, 2]])), 6.0)


def test_many_equal_responses_are_counted_exactly():
    """Weights of 1/49 add up to 64.0007, and a count of responses is a whole number."""
    action = jnp.ones((64, 49), bool)
    _, count = losses.reduction_weights(action, reduce="response")
    assert float(count) == 64


# Critic and supervised losses.


def critic_reference(value, target, old, clip, weight):
    bounded = old + np.clip(value - old, -clip, clip)
    plain, other = np.square(value - target), np.square(bounded - target)
    loss = 0.5 * (weight * np.maximum(plain, other)).sum()
    moved = (np.abs(value - old) > clip) & (other > plain)
    return loss, weight * np.where(moved, 0, value - target), moved


@jax.jit
def critics(value, target, old, is_action, segment_ids):
    results = {}
    for reduce, clip in itertools.product(REDUCTIONS, (None, 0.31)):

        def run(value, reduce=reduce, clip=clip):
            return losses.critic_loss(
                value,
                target,
                is_action,
                old_value=old,
                value_clip=clip,
                reduce=reduce,
                segment_ids=segment_ids,
            )

        results[reduce, clip or math.inf] = jax.value_and_grad(run, has_aux=True)(value)
    return results


def test_critic_loss_equals_its_loop_and_its_derivative():
    for seed in range(5):
        batch = sample_batch(seed)
        value, target, old = batch["policy"], batch["proximal"], batch["behavior"]
        action = batch["is_action"]
        filled = [np.where(action, x, np.nan) for x in (value, target, old)]
        for (reduce, clip), ((loss, metrics), gradient) in critics(
            *filled, action, batch["segment_ids"]
        ).items():
            weight = oracles.reduction_weights(action, reduce, batch["segment_ids"])
            exact = [x.astype(np.float64) for x in (value, target, old)]
            want, slope, moved = critic_reference(*exact, clip, weight)
            close(loss, want, 1e-5)
            close(gradient, slope, 1e-5)
            assert float(metrics["value_clipped"][0]) == (moved & action).sum()
            error = (target - value)[action]
            close(metrics["value"][0], value[action].sum(), 1e-4)
            close(metrics["value_target"][0], target[action].sum(), 1e-4)
            close(metrics["value_target_square"][0], np.square(target[action]).sum(), 1e-4)
            close(metrics["value_error"][0], error.sum(), 1e-4)
            close(metrics["value_error_square"][0], np.square(error).sum(), 1e-4)
            total, count = metrics["loss"]
            close(total / count, want, 1e-5)


def test_critic_keeps_the_gradient_at_a_tie():
    """The value 3 and its bound 1 are equally far from the target 2."""
    value, target, true = jnp.full((1, 1), 3.0), jnp.full((1, 1), 2.0), jnp.ones((1, 1), bool)

    def run(value):
        return losses.critic_loss(value, target, true, old_value=0 * target, value_clip=1.0)

    (loss, metrics), gradient = jax.value_and_grad(run, has_aux=True)(value)
    assert (float(loss), float(gradient[0, 0])) == (0.5, 1)
    assert float(metrics["value_clipped"][0]) == 0


def test_critic_trains_tokens_that_the_actor_drops():
    one = jnp.ones((1, 2))
    policy = jnp.log(jnp.array([[1.0, 9.0]]))
    actor = jax.grad(lambda p: losses.copc_actor_loss(p, 0 * one, one, one > 0)[0])(policy)
    critic = jax.grad(lambda v: losses.critic_loss(v, 3 * one, one > 0)[0])(one)
    assert float(actor[0, 1]) == 0 and np.all(np.asarray(critic) == -1)


def test_critic_without_tokens_and_without_old_values():
    one = jnp.ones((1, 2))
    loss, gradient = jax.value_and_grad(lambda v: losses.critic_loss(v, one, one < 0)[0])(5 * one)
    assert float(loss) == 0 and np.all(np.asarray(gradient) == 0)
    with pytest.raises(ValueError, match="old_value"):
        losses.critic_loss(one, one, one > 0, value_clip=0.5)


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    logprob = jnp.array([[-1.0, -3.0, jnp.nan], [-5.0, -jnp.inf, jnp.nan]])
    action = jnp.array([[True, True, False], [True, False, False]])

    def run(logprob, reduce):
        return losses.sft_loss(logprob, action, reduce=reduce)

    grad = jax.value_and_grad(run, has_aux=True)
    (loss, metrics), gradient = grad(logprob, "token")
    close(loss, 3.0)
    close(metrics["loss"], [9, 3])
    close(gradient, [[-1 / 3, -1 / 3, 0], [-1 / 3, 0, 0]])
    (loss, metrics), gradient = grad(logprob, "response")
    close(loss, 3.5)
    close(metrics["loss"], [7, 2])
    close(gradient, [[-0.25, -0.25, 0], [-0.5, 0, 0]])


def test_supervised_loss_without_tokens_and_of_an_impossible_one():
    def run(logprob, action):
        return losses.sft_loss(logprob, action, reduce="response")[0]

    logprob = jnp.array([[-jnp.inf, -2.0], [jnp.nan, jnp.nan]])
    loss, gradient = jax.value_and_grad(run)(logprob, logprob > 0)
    assert float(loss) == 0
    same(gradient, np.zeros((2, 2)))
    loss, gradient = jax.value_and_grad(run)(logprob, jnp.isfinite(logprob) | (logprob < 0))
    assert np.isposinf(loss)
    close(gradient, [[-0.5, -0.5], [0, 0]])


def test_a_single_token_is_its_own_mean():
    """Where a guard against division by 0 must not show."""
    one, true = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    for reduce in REDUCTIONS:
        close(losses.sft_loss(-3 * one, true, reduce=reduce)[0], 3)
        close(losses.critic_loss(3 * one, one, true, reduce=reduce)[0], 2)
        close(losses.ppo_actor_loss(one, one, one, true, reduce=reduce)[0], -1)
        close(losses.reduce_tokens(5 * one, true, reduce=reduce), 5)


def test_stored_behavior_gives_the_ratio():
    """A behavior log-prob recomputed with the current weights would make this 1."""
    _, metrics = losses.copc_actor_loss(
        jnp.full((1, 1), -0.5), jnp.full((1, 1), -1.0), jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    )
    close(metrics["ratio"][0], 1.6487, 1e-4)
