"""Every loss against a float64 loop and its hand-written derivative, and the laws that all share.

Each actor loss is compiled once, in both reductions: most tests only change what goes in.
"""

import inspect
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
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

    def shares(name, **options):
        run = jax.jit(adapt(getattr(losses, name), **options))
        _, metrics = run(policy, zero, zero, advantage, action)
        return [float(metrics[key][0]) for key in ("clip_low", "clip_high", "kept")]

    assert shares("copc_actor_loss") == [1, 2, 1]
    assert shares("sao_actor_loss") == [1, 2, 1]
    assert shares("ppo_actor_loss") == [0, 1, 3]
    assert shares("ppo_actor_loss", dual_clip=1.2) == [0, 2, 2]
    assert shares("cispo_actor_loss") == [0, 2, 4]
    assert shares("cispo_actor_loss", clip_low=0.5) == [1, 2, 4]
    # A ratio of exactly 1 is at the bound and not beyond it.
    assert shares("cispo_actor_loss", clip_high=0.0) == [0, 2, 4]
    # The product of the four ratios is 0.225.
    assert shares("vcpo_actor_loss", weight_max=0.2) == [0, 4, 4]
    assert shares("vcpo_actor_loss", weight_max=0.3) == [0, 0, 4]
    assert shares("reinforce_actor_loss") == [0, 0, 4]
    assert shares("m2po_actor_loss", threshold=0.2) == [1, 0, 3]


def test_ratio_clipped_below_needs_a_negative_advantage():
    policy, one = jnp.log(jnp.array([[0.5, 0.5]])), jnp.ones((1, 2))
    _, metrics = losses.ppo_actor_loss(policy, 0 * one, jnp.array([[1.0, -1.0]]), one > 0)
    assert float(metrics["clip_low"][0]) == 1 and float(metrics["clip_high"][0]) == 0


@given(batch=batches())
def test_copc_and_sao_have_the_same_gradient(batch):
    results = ALL(*arguments(batch))
    for reduce in REDUCTIONS:
        close(results["copc", reduce][2], results["sao", reduce][2], 1e-6)


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
    for ratio in (0.81, 1.27):
        for loss in (losses.copc_actor_loss, losses.sao_actor_loss):
            close(token_loss(loss, ratio, -1.0)[1], ratio)


def test_the_mask_is_closed():
    edges = jnp.array([0.8, 1.28, 0.7999, 1.2801, 1.0, jnp.nan])
    same(losses.ratio_mask(edges), [True, True, False, False, True, False])
    same(losses.ratio_mask(edges, 0.0), [False, False, False, False, True, False])
    same(losses.ratio_mask(edges, 1.0, 0.25, 0.2), [True, False, True, False, True, False])
    assert bool(losses.ratio_mask(jnp.bfloat16(1.0), 0.0))


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
    policy = jnp.log(jnp.array([[1.0, 9.0, 9.0], [9.0, 9.0, 9.0]]))
    rest = (jnp.zeros((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3), bool))
    for reduce, inside, outside in (("token", -1 / 6, -1.0), ("response", -1 / 6, -1.0)):
        loss, metrics = losses.copc_actor_loss(policy, *rest, reduce=reduce)
        close(loss, inside)
        loss, metrics = losses.copc_actor_loss(
            policy, *rest, reduce=reduce, mask_in_denominator=False
        )
        close(loss, outside)
        assert float(metrics["loss"][1]) == 1


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
    # Squares 0, .49, .49: two would fit, and which of equals goes must not depend on the order.
    ties = jnp.array([[0.0, 0.7, -0.7], [0.0, 0.0, 0.0]])
    same(mask(ties, every.at[1].set(False))[0], [True, False, False])
    same(mask(jnp.full((2, 3), 0.5), every), every)


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
    # Small differences keep their digits: exp(x) - 1 - x has none left at 1e-4.
    tiny = losses.kl_divergence(jnp.array([0.0]), jnp.array([1e-2]), jnp.ones(1, bool))
    close(tiny[0] / 5.0167e-5, 1, 1e-3)
    with pytest.raises(Exception, match="estimator"):
        losses.kl_divergence(policy, reference, action, estimator="k4")


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
    run = lambda *a: losses.copc_actor_loss(*a[:-1], reduce="response", segment_ids=a[-1])[0]
    names = ("policy", "behavior", "advantage", "is_action", "segment_ids")
    row = lambda b: [batch[name][b] for name in names]
    got = jax.jit(jax.vmap(run))(*[batch[name] for name in names])
    close(got, [jax.jit(run)(*row(b)) for b in range(ROWS)], 1e-6)


def test_per_response_arrays_are_refused():
    """[4] against [4, 4] would broadcast to a wrong number."""
    batch = {name: jnp.asarray(x) for name, x in sample_batch(time=ROWS).items()}
    with pytest.raises(Exception, match="advantage"):
        losses.copc_actor_loss(
            batch["policy"], batch["behavior"], batch["advantage"][0], batch["is_action"]
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
        losses.m2po_actor_loss: {"threshold": 0.04, "harmful_only": False} | token,
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


@pytest.mark.parametrize("call", ["reduce", "segments"])
def test_bad_reductions_are_named(call):
    x = jnp.ones((2, 2))
    with pytest.raises(Exception, match="reduce" if call == "reduce" else "segment_ids"):
        if call == "reduce":
            losses.reduce_tokens(x, x > 0, reduce="mean")
        else:
            losses.reduce_tokens(
                x, x > 0, reduce="response", segment_ids=jnp.ones((2, 1), jnp.int32)
            )


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
