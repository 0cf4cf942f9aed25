"""Laws of the return operators, against loops in float64, rlax and exact enumeration."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles
import pytest
import rlax
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from copc_jax import returns

ROWS, TIME = 3, 7
OPTIONS = list(itertools.product(["residual", "product"], ["weighted", "unweighted"]))


def floats(low, high):
    return st.floats(low, high, width=32, allow_subnormal=False)


def arrays(low, high, shape=(ROWS, TIME)):
    return hnp.arrays(np.float32, shape, elements=floats(low, high))


# Masks draw every token on its own, so that gaps inside a response come up all the time: a fault in
# what happens there survives tests whose masks are prefixes.
masks = hnp.arrays(np.bool_, (ROWS, TIME))
lambdas = st.sampled_from([0.0, 0.5, 0.75, 1.0])


@st.composite
def batches(draw):
    return {
        "reward": draw(arrays(-2, 2)),
        "value": draw(arrays(-2, 2)),
        "discount": draw(
            hnp.arrays(np.float32, (ROWS, TIME), elements=st.sampled_from([0, 0.5, 0.9, 1]))
        ),
        "ratio": draw(arrays(0.125, 4)),
        "is_action": draw(masks),
    }


def jit_operator(operator):
    """Compile with lambda traced, so that no drawn value compiles again."""
    return jax.jit(lambda lambda_, *arrays: operator(*arrays, lambda_=lambda_))


CORRECTED = {
    (trace, first): jit_operator(
        lambda *a, lambda_, t=trace, f=first: returns.corrected_returns(
            *a, lambda_=lambda_, trace=t, first_residual=f
        )
    )
    for trace, first in OPTIONS
}
COPC = jax.jit(
    lambda eta, lambda_, *a: [
        returns.copc_returns(*a, eta_advantage=eta, lambda_=lambda_, trace=t, first_residual=f)
        for t, f in OPTIONS
    ]
)
GAE = jit_operator(returns.gae)
RETRACE = jit_operator(returns.retrace)
VTRACE = jax.jit(
    lambda lambda_, rho, trace, policy, *a: returns.vtrace(
        *a, lambda_=lambda_, rho_max=rho, trace_max=trace, policy_rho_max=policy
    )
)


def ordered(batch, *names):
    return [batch[name] for name in (*names, "is_action")]


def core(batch, weight="ratio"):
    return ordered(batch, "reward", "value", "discount", weight)


def close(got, want, tolerance=3e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=tolerance)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def sample_batch(seed=0, rows=ROWS, time=TIME):
    rng = np.random.default_rng(seed)
    shape = (rows, time)
    return {
        "reward": rng.normal(size=shape).astype(np.float32),
        "value": rng.normal(size=shape).astype(np.float32),
        "discount": np.where(rng.random(shape) < 0.2, 0, 0.9).astype(np.float32),
        "ratio": np.exp(rng.normal(size=shape) * 0.4).astype(np.float32),
        "is_action": rng.random(shape) < 0.7,
    }


def on_device(batch):
    return {name: jnp.asarray(x) for name, x in batch.items()}


# Against float64 loops.


@pytest.mark.parametrize("trace, first", OPTIONS)
@given(batch=batches(), lambda_=lambdas)
def test_corrected_returns_equal_a_float64_loop(trace, first, batch, lambda_):
    got = CORRECTED[trace, first](lambda_, *core(batch))
    want = oracles.corrected_returns(*core(batch), lambda_, trace, first)
    close(got.advantage, want[0], 2e-4)
    close(got.value_target, want[1], 2e-4)
    assert got.advantage.dtype == got.value_target.dtype == jnp.float32


@given(batch=batches(), lambda_=lambdas, eta=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_copc_returns_clip_the_ratio_on_both_sides(batch, lambda_, eta):
    weight = np.clip(batch["ratio"].astype(np.float64), 1 - eta * 0.4, 1 + eta * 0.56)
    for (trace, first), got in zip(OPTIONS, COPC(eta, lambda_, *core(batch)), strict=True):
        want = oracles.corrected_returns(
            batch["reward"], batch["value"], batch["discount"], weight, batch["is_action"],
            lambda_, trace, first,
        )  # fmt: skip
        close(got.advantage, want[0], 1e-4)
        close(got.value_target, want[1], 1e-4)


@given(
    batch=batches(),
    lambda_=lambdas,
    limits=st.sampled_from([(1, 1, 1), (2, 0.5, 1.5), (0.5, 2, 3)]),
)
def test_vtrace_equals_a_float64_loop(batch, lambda_, limits):
    got = VTRACE(lambda_, *map(float, limits), *core(batch))
    want = oracles.vtrace(*core(batch), lambda_, *limits)
    close(got.advantage, want[0], 2e-4)
    close(got.value_target, want[1], 2e-4)


@given(batch=batches(), lambda_=lambdas)
def test_retrace_weights_later_actions_and_not_the_first(batch, lambda_):
    """Q_t - V_t = sum of td_u * prod of gamma * lambda * min(1, ratio) over t < i <= u."""
    got = RETRACE(lambda_, *core(batch))
    for b, row in enumerate(batch["is_action"]):
        steps = oracles.action_positions(row)
        td = []
        for k, t in enumerate(steps):
            following = float(batch["value"][b, steps[k + 1]]) if k + 1 < len(steps) else 0.0
            td.append(
                batch["reward"][b, t] + batch["discount"][b, t] * following - batch["value"][b, t]
            )
        for k, t in enumerate(steps):
            total, reach = td[k], 1.0
            for j in range(k + 1, len(steps)):
                cut = min(1.0, float(batch["ratio"][b, steps[j]]))
                reach *= float(batch["discount"][b, steps[j - 1]]) * lambda_ * cut
                total += reach * td[j]
            close(got.advantage[b, t], total, 1e-4)
            own = min(1.0, float(batch["ratio"][b, t]))
            close(got.value_target[b, t], batch["value"][b, t] + own * total, 1e-4)


# Against rlax, where the operators coincide.


@given(batch=batches(), lambda_=lambdas)
def test_eta_zero_is_rlax_gae_for_every_option(batch, lambda_):
    batch["is_action"][:] = True
    values = np.concatenate([batch["value"], np.zeros((ROWS, 1), np.float32)], axis=1)
    want = RLAX_GAE(batch["reward"], batch["discount"], lambda_, values)
    for got in COPC(0.0, lambda_, *core(batch)):
        close(got.advantage, want)
        close(got.value_target, want + batch["value"])
    close(GAE(lambda_, *ordered(batch, "reward", "value", "discount")).advantage, want)


RLAX_GAE = jax.jit(
    jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=(0, 0, None, 0))
)


@jax.jit
@jax.numpy_dtype_promotion("standard")
def RLAX_VTRACE(value, following, reward, discount, ratio, lambda_):
    return jax.vmap(
        lambda v, n, r, d, w: rlax.vtrace_td_error_and_advantage(
            v, n, r, d, w, lambda_=lambda_, clip_pg_rho_threshold=1.5
        )
    )(value, following, reward, discount, ratio)


@given(batch=batches(), lambda_=lambdas)
def test_vtrace_equals_rlax(batch, lambda_):
    batch["is_action"][:] = True
    value = batch["value"]
    following = np.concatenate([value[:, 1:], np.zeros((ROWS, 1), np.float32)], axis=1)
    want = RLAX_VTRACE(
        value, following, batch["reward"], batch["discount"], batch["ratio"], lambda_
    )
    got = VTRACE(lambda_, 1.0, 1.0, 1.5, *core(batch))
    close(got.value_target - value, want.errors, 1e-4)
    close(got.advantage, want.pg_advantage, 1e-4)


@given(batch=batches())
def test_product_trace_below_one_is_vtrace_and_plain_traces_only_at_lambda_zero(batch):
    batch["ratio"] = np.minimum(batch["ratio"], 1)
    vtrace = VTRACE(1.0, 1.0, 1.0, 1.0, *core(batch))
    close(CORRECTED["product", "weighted"](1.0, *core(batch)).value_target, vtrace.value_target)
    vtrace = VTRACE(0.0, 1.0, 1.0, 1.0, *core(batch))
    close(CORRECTED["residual", "weighted"](0.0, *core(batch)).value_target, vtrace.value_target)


# Laws.


@given(batch=batches(), lambda_=lambdas, eta=st.sampled_from([0.0, 0.5, 1.0]))
def test_ratio_one_is_gae_for_every_eta(batch, lambda_, eta):
    batch["ratio"][:] = 1
    want = GAE(lambda_, *ordered(batch, "reward", "value", "discount"))
    for got in COPC(eta, lambda_, *core(batch)):
        close(got.advantage, want.advantage)
        close(got.value_target, want.value_target)


@given(batch=batches(), lambda_=lambdas)
def test_weighted_advantage_is_target_minus_value_and_differs_from_unweighted_by_own_residual(
    batch, lambda_
):
    action = batch["is_action"]
    weighted = CORRECTED["residual", "weighted"](lambda_, *core(batch))
    unweighted = CORRECTED["residual", "unweighted"](lambda_, *core(batch))
    same(weighted.value_target, unweighted.value_target)
    close(weighted.advantage, np.where(action, weighted.value_target - batch["value"], 0))
    td = GAE(0.0, *ordered(batch, "reward", "value", "discount")).advantage
    close(weighted.advantage - unweighted.advantage, np.where(action, batch["ratio"] - 1, 0) * td)


@given(batch=batches(), lambda_=lambdas, potential=arrays(-1, 1))
def test_potential_shaping_leaves_advantages_alone(batch, lambda_, potential):
    """V - phi with r + gamma * phi' - phi: every residual is the same."""
    before = [got.advantage for got in COPC(0.5, lambda_, *core(batch))]
    for b, row in enumerate(batch["is_action"]):
        steps = oracles.action_positions(row)
        for t, after in itertools.zip_longest(steps, steps[1:]):
            following = 0 if after is None else potential[b, after]
            batch["reward"][b, t] += batch["discount"][b, t] * following - potential[b, t]
    batch["value"] -= potential
    for old, new in zip(before, COPC(0.5, lambda_, *core(batch)), strict=True):
        close(new.advantage, old, 1e-4)


@given(batch=batches(), lambda_=lambdas)
def test_homogeneous_in_reward_and_value(batch, lambda_):
    before = CORRECTED["residual", "weighted"](lambda_, *core(batch))
    batch["reward"] *= 4
    batch["value"] *= 4
    after = CORRECTED["residual", "weighted"](lambda_, *core(batch))
    same(after.advantage, 4 * before.advantage)
    same(after.value_target, 4 * before.value_target)


def test_only_earlier_and_equal_tokens_feel_a_reward():
    batch = on_device(sample_batch(rows=1, time=6))
    batch["is_action"] = jnp.array([[True, True, False, True, True, True]])
    batch["discount"] = jnp.full((1, 6), 0.9)

    def advantage(reward):
        arguments = core(batch | {"reward": reward[None]})
        return returns.copc_returns(*arguments, lambda_=0.9).advantage[0]

    jacobian = np.asarray(jax.jacobian(advantage)(batch["reward"][0]))
    assert np.all(np.tril(jacobian, -1) == 0)
    acting = np.asarray(batch["is_action"][0])
    assert np.all(np.triu(jacobian)[np.triu(np.outer(acting, acting))] > 0)
    assert np.all(jacobian[:, 2] == 0) and np.all(jacobian[2] == 0)


GARBAGE = [np.nan, np.inf, -np.inf, 1e9, -1e9]


@given(batch=batches(), lambda_=lambdas, garbage=st.sampled_from(GARBAGE))
def test_whatever_stands_off_action_tokens_changes_nothing(batch, lambda_, garbage):
    outside = ~batch["is_action"]
    filled = {
        name: x if name == "is_action" else np.where(outside, np.float32(garbage), x)
        for name, x in batch.items()
    }
    for before, after in zip(
        COPC(0.5, lambda_, *core(batch)), COPC(0.5, lambda_, *core(filled)), strict=True
    ):
        same(after.advantage, before.advantage)
        same(after.value_target, before.value_target)
        assert np.all(np.asarray(after.advantage)[outside] == 0)
        assert np.all(np.asarray(after.value_target)[outside] == 0)
    limits = (lambda_, 1.0, 1.0, 1.0)
    for before, after in zip(
        VTRACE(*limits, *core(batch)), VTRACE(*limits, *core(filled)), strict=True
    ):
        same(after, before)


@given(batch=batches(), lambda_=lambdas)
def test_tokens_between_actions_can_be_deleted(batch, lambda_):
    """Moving all action tokens of a row to its front gives the same numbers, moved."""
    got = CORRECTED["residual", "weighted"](lambda_, *core(batch))
    order = np.argsort(~batch["is_action"], axis=1, kind="stable")
    compact = {name: np.take_along_axis(x, order, axis=1) for name, x in batch.items()}
    moved = CORRECTED["residual", "weighted"](lambda_, *core(compact))
    same(np.take_along_axis(np.asarray(got.advantage), order, axis=1), moved.advantage)
    same(np.take_along_axis(np.asarray(got.value_target), order, axis=1), moved.value_target)


@given(batch=batches(), lambda_=lambdas)
def test_two_episodes_in_a_row_are_two_rows(batch, lambda_):
    """The discount of 0 at the end of the first is all that separates them."""
    first, second = ({name: x[i] for name, x in batch.items()} for i in (0, 1))
    ends = oracles.action_positions(first["is_action"])
    if ends:
        first["discount"][ends[-1]] = 0
    apart = {name: np.stack([first[name], second[name]]) for name in batch}
    packed = {name: x.reshape(1, -1) for name, x in apart.items()}
    for trace, kind in OPTIONS:
        one = CORRECTED[trace, kind](lambda_, *core(packed))
        two = CORRECTED[trace, kind](lambda_, *core(apart))
        for x, y in zip(one, two, strict=True):
            same(np.asarray(x).reshape(2, -1), y)


def test_rows_do_not_mix():
    batch = sample_batch()
    operator = CORRECTED["residual", "weighted"]
    whole = operator(0.9, *core(batch))
    order = np.array([2, 0, 1])
    permuted = operator(0.9, *core({name: x[order] for name, x in batch.items()}))
    same(permuted.advantage, np.asarray(whole.advantage)[order])
    for b in range(ROWS):
        alone = operator(0.9, *core({name: x[b] for name, x in batch.items()}))
        close(alone.value_target, np.asarray(whole.value_target)[b], 1e-6)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_any_number_of_batch_axes_with_jit_vmap_or_eagerly(lead):
    flat = on_device(sample_batch(rows=int(np.prod(lead)) if lead else 1))
    batch = {name: x.reshape(*lead, TIME) for name, x in flat.items()}
    want = jax.vmap(returns.copc_returns)(*core(flat))
    for run in (returns.copc_returns, jax.jit(returns.copc_returns)):
        got = run(*core(batch))
        assert got.advantage.shape == (*lead, TIME)
        close(got.advantage.reshape(-1, TIME), want.advantage, 1e-6)
        close(got.value_target.reshape(-1, TIME), want.value_target, 1e-6)


# Every public function on arrays, as a function of one batch; `group` is an integer a token.
FUNCTIONS = {
    "select_actions": lambda b: returns.select_actions(b["is_action"], x=b["reward"], y=b["value"]),
    "finite_logprob": lambda b: returns.finite_logprob(b["value"], b["is_action"]),
    "log_importance_ratio": lambda b: returns.log_importance_ratio(
        b["value"], b["reward"], b["is_action"]
    ),
    "importance_ratio": lambda b: returns.importance_ratio(b["value"], b["reward"], b["is_action"]),
    "corrected_returns": lambda b: [
        returns.corrected_returns(*core(b), lambda_=0.9, trace=t, first_residual=f)
        for t, f in OPTIONS
    ],
    "copc_returns": lambda b: returns.copc_returns(*core(b), eta_advantage=1.0, lambda_=0.9),
    "gae": lambda b: returns.gae(*ordered(b, "reward", "value", "discount"), lambda_=0.9),
    "vtrace": lambda b: returns.vtrace(
        *core(b), lambda_=0.9, rho_max=1.1, trace_max=1.05, policy_rho_max=1.2
    ),
    "retrace": lambda b: returns.retrace(*core(b), lambda_=0.9, trace_max=1.1),
    "group_advantage": lambda b: [
        returns.group_advantage(
            jnp.where(b["is_action"], b["reward"], jnp.nan).astype(b["reward"].dtype),
            b["group"],
            scale=scale,
            weight=weight,
        )
        for scale, weight in ((True, None), (False, b["ratio"]), (True, b["ratio"]))
    ],
    "whiten": lambda b: returns.whiten(b["reward"], b["is_action"]),
}


def function_batch(rows, garbage=0.0):
    batch = sample_batch(seed=4, rows=rows, time=8)
    batch = {
        name: x if name == "is_action" else np.where(batch["is_action"], x, np.float32(garbage))
        for name, x in batch.items()
    }
    return on_device(batch | {"group": np.tile(np.arange(8) // 4, (rows, 1))})


def close_trees(got, want, tolerance=1e-5):
    jax.tree.map(lambda x, y: close(x, y, tolerance), got, want)


def test_every_function_is_listed():
    listed = set(FUNCTIONS) | {"ratio_interval"}
    public = {name for name in returns.__all__ if inspect.isfunction(getattr(returns, name))}
    assert public == listed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_one_by_one_under_vmap_or_under_shard_map(name):
    function = FUNCTIONS[name]
    batch = function_batch(rows=4)
    alone = jax.jit(function)
    rows = [alone({key: x[b] for key, x in batch.items()}) for b in range(4)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=spec, out_specs=spec)
    close_trees(jax.jit(jax.vmap(function))(batch), want)
    close_trees(jax.jit(mapped)(batch), want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_computes_in_float32(name):
    batch = function_batch(rows=1)
    row = {key: x[0] for key, x in batch.items()}
    half = {k: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for k, x in row.items()}
    full = {k: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for k, x in half.items()}
    function = jax.jit(FUNCTIONS[name])
    low, wide = function(half), function(full)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(low))
    close_trees(low, wide, 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_finite_and_zero_off_action_tokens(name):
    batch = {key: x[0] for key, x in function_batch(rows=1, garbage=np.nan).items()}
    fixed = {key: batch.pop(key) for key in ("is_action", "group")}

    def total(batch):
        leaves = jax.tree.leaves(FUNCTIONS[name](batch | fixed))
        return sum((x * jnp.arange(1.0, 1 + x.size)).sum() for x in leaves)

    gradients = jax.jit(jax.grad(total))(batch)
    outside = ~np.asarray(fixed["is_action"])
    assert outside.any()
    for key, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), key
        assert np.all(np.asarray(gradient)[outside] == 0), key
    assert any(np.any(np.asarray(x) != 0) for x in gradients.values())


@pytest.mark.parametrize("seed", range(3))
def test_derivatives_are_those_of_the_float64_loops(seed):
    """Along one direction through rewards, values, discounts and weights at once."""
    batch = sample_batch(seed)
    direction = sample_batch(seed + 100)
    inputs, tangents = map(tuple, (core(batch)[:4], core(direction)[:4]))
    action, step = batch["is_action"], 1e-6

    def slope(oracle):
        shifted = [
            oracle(*[x.astype(np.float64) + sign * step * v
                     for x, v in zip(inputs, tangents, strict=True)])
            for sign in (1, -1)
        ]  # fmt: skip
        return [(x - y) / (2 * step) for x, y in zip(*shifted, strict=True)]

    for trace, first in OPTIONS:
        run = lambda *a, key=(trace, first): CORRECTED[key](0.9, *a, action)
        _, got = jax.jvp(run, inputs, tangents)
        want = slope(lambda *a, t=trace, f=first: oracles.corrected_returns(*a, action, 0.9, t, f))
        close(got.advantage, want[0], 2e-4)
        close(got.value_target, want[1], 2e-4)
    run = lambda *a: VTRACE(0.9, 1.1, 0.93, 1.27, *a, action)
    _, got = jax.jvp(run, inputs, tangents)
    want = slope(lambda *a: oracles.vtrace(*a, action, 0.9, 1.1, 0.93, 1.27))
    close(got.advantage, want[0], 2e-4)
    close(got.value_target, want[1], 2e-4)


def test_lambda_can_differ_by_token():
    batch = on_device(sample_batch())
    constant = returns.gae(*ordered(batch, "reward", "value", "discount"), lambda_=0.5)
    lambda_ = jnp.where(batch["is_action"], 0.5, 7.0)
    varied = returns.gae(*ordered(batch, "reward", "value", "discount"), lambda_=lambda_)
    close(varied.advantage, constant.advantage, 1e-6)
    lambda_ = jnp.full((ROWS, TIME), 0.5).at[0].set(0.0)
    varied = returns.gae(*ordered(batch, "reward", "value", "discount"), lambda_=lambda_)
    one_step = returns.gae(*ordered(batch, "reward", "value", "discount"), lambda_=0.0)
    close(varied.advantage[0], one_step.advantage[0], 1e-6)
    close(varied.advantage[1:], constant.advantage[1:], 1e-6)


def test_a_diverged_critic_shows_on_action_tokens_only():
    batch = {name: x[0] for name, x in on_device(sample_batch()).items()}
    batch["is_action"] = jnp.array([True, False, True, True, False, True, False])
    batch["value"] = jnp.where(jnp.arange(TIME) == 5, jnp.nan, batch["value"])
    for got in CORRECTED["residual", "weighted"](1.0, *core(batch)):
        assert np.isnan(got[5])
        same(got[~batch["is_action"]], np.zeros(3))


def test_lambda_of_each_token_is_read_on_action_tokens_only():
    batch = {name: x[0] for name, x in on_device(sample_batch()).items()}
    inputs = ordered(batch, "reward", "value", "discount")
    outside = ~np.asarray(batch["is_action"])
    assert outside.any()

    @jax.jit
    def slopes(lambda_):
        run = lambda lambda_, reward: returns.gae(reward, *inputs[1:], lambda_=lambda_).advantage
        return jax.jacobian(run, argnums=(0, 1))(lambda_, inputs[0])

    want = slopes(jnp.where(outside, 0.0, 0.5))
    got = slopes(jnp.where(outside, jnp.nan, 0.5))
    same(got[0], want[0])
    same(got[1], want[1])
    with pytest.raises(ValueError, match="lambda_ has shape"):
        returns.gae(*inputs, lambda_=jnp.ones(1))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_rows_give_the_same_bits(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    batch = on_device(sample_batch(rows=8))
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    run = jax.jit(lambda batch: returns.copc_returns(*core(batch), lambda_=0.9))
    with jax.set_mesh(mesh):
        got = run(spread)
    want = run(batch)
    same(got.advantage, want.advantage)
    same(got.value_target, want.value_target)
    assert len(got.advantage.sharding.device_set) == 4


def test_shard_map_needs_no_communication():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = on_device(sample_batch(rows=8))
    run = lambda *a: returns.copc_returns(*a, lambda_=0.9)
    spec = PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    same(mapped(*core(batch)).advantage, jax.jit(run)(*core(batch)).advantage)


# The fixed point, by enumeration of a tree with two actions and three steps.


class Tree:
    """All eight responses of three binary tokens, with policies that depend on the whole prefix."""

    horizon = 3

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.paths = list(itertools.product((0, 1), repeat=self.horizon))
        self.prefixes = [
            p for t in range(self.horizon) for p in itertools.product((0, 1), repeat=t)
        ]
        softmax = lambda x: np.exp(x) / np.exp(x).sum()
        self.behavior = {p: softmax(rng.normal(size=2)) for p in self.prefixes}
        self.policy = {p: softmax(rng.normal(size=2)) for p in self.prefixes}
        self.rewards = {p + (a,): rng.normal() for p in self.prefixes for a in (0, 1)}
        self.discount = 0.9

    def token_table(self, table):
        return np.array(
            [[table(path[:t], path[t]) for t in range(self.horizon)] for path in self.paths]
        )

    def weight(self, low, high):
        return {p: np.clip(self.policy[p] / self.behavior[p], low, high) for p in self.prefixes}

    def value(self, policy):
        value = {path: 0.0 for path in self.paths}
        for p in reversed(self.prefixes):
            value[p] = sum(
                policy[p][a] * (self.rewards[p + (a,)] + self.discount * value[p + (a,)])
                for a in (0, 1)
            )
        return value

    def batch(self, value, weight):
        discount = np.full((len(self.paths), self.horizon), self.discount)
        discount[:, -1] = 0
        tables = (
            self.token_table(lambda p, a: self.rewards[p + (a,)]),
            self.token_table(lambda p, a: value[p]),
            discount,
            self.token_table(lambda p, a: weight[p][a]),
        )
        return [jnp.asarray(x, jnp.float32) for x in tables] + [jnp.ones(discount.shape, bool)]

    def expectation(self, per_token, prefix, action=None):
        """Mean under the behavior policy over the responses that pass through the prefix."""
        start = prefix if action is None else prefix + (action,)
        total = 0.0
        for i, path in enumerate(self.paths):
            if path[: len(start)] != start:
                continue
            chance = np.prod(
                [self.behavior[path[:t]][path[t]] for t in range(len(start), self.horizon)]
            )
            total += chance * float(per_token[i, len(prefix)])
        return total


INTERVALS = [(0.8, 1.28), (0.0, np.inf), (0.0, 1.0), (0.5, 2.0)]


def mixed_policy(tree, weight):
    return {p: tree.behavior[p] * weight[p] / (tree.behavior[p] @ weight[p]) for p in tree.prefixes}


@pytest.mark.parametrize("low, high", INTERVALS)
@pytest.mark.parametrize("trace", ["residual", "product"])
def test_fixed_point_is_the_value_of_the_clipped_policy(trace, low, high):
    """Weighted residuals have mean 0 there, and unweighted ones leave the true advantage."""
    tree = Tree(seed=1)
    weight = tree.weight(low, high)
    value = tree.value(mixed_policy(tree, weight))
    for lambda_ in (0.0, 0.7, 1.0):
        arguments = tree.batch(value, weight)
        weighted = CORRECTED[trace, "weighted"](lambda_, *arguments)
        unweighted = CORRECTED[trace, "unweighted"](lambda_, *arguments)
        for prefix in tree.prefixes:
            assert abs(tree.expectation(weighted.advantage, prefix)) < 1e-6
            for action in (0, 1):
                after = prefix + (action,)
                truth = tree.rewards[after] + tree.discount * value[after] - value[prefix]
                got = tree.expectation(unweighted.advantage, prefix, action)
                assert abs(got - truth) < 1e-6


@pytest.mark.parametrize("trace", ["residual", "product"])
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_iterating_the_expected_target_converges_to_that_value(trace, lambda_):
    tree = Tree(seed=2)
    weight = tree.weight(0.8, 1.28)
    truth = tree.value(mixed_policy(tree, weight))
    rng = np.random.default_rng(0)
    value = {p: rng.normal() for p in tree.prefixes} | {path: 0.0 for path in tree.paths}
    for _ in range(15):
        target = CORRECTED[trace, "weighted"](lambda_, *tree.batch(value, weight)).value_target
        value |= {p: tree.expectation(target, p) for p in tree.prefixes}
    assert max(abs(value[p] - truth[p]) for p in tree.prefixes) < 1e-5
    wrong = tree.value(tree.behavior)
    assert max(abs(value[p] - wrong[p]) for p in tree.prefixes) > 0.01


# Ratios.


def test_ratio_interval_has_the_paper_s_numbers():
    # Every law above is symmetric in the two margins: only a literal finds them exchanged.
    assert returns.ratio_interval(0.5, 0.4, 0.56) == (0.80, 1.28)
    assert returns.ratio_interval(0.5) == (0.80, 1.28)
    assert returns.ratio_interval(0.0) == (1.0, 1.0)
    assert returns.ratio_interval(1.0) == (0.6, 1.56)
    low, high = jax.jit(returns.ratio_interval)(jnp.float32(0.5))
    close(low, 0.8, 1e-6)
    close(high, 1.28, 1e-6)
    for eta in (-0.1, -1):
        with pytest.raises(ValueError, match="eta must not be negative"):
            returns.ratio_interval(eta)


def test_default_interval_of_copc_returns_is_the_paper_s():
    one = jnp.ones((1, 1))
    for ratio, weight in ((0.1, 0.8), (1.1, 1.1), (9.0, 1.28)):
        got = returns.copc_returns(one, 0 * one, 0 * one, ratio * one, one > 0)
        close(got.advantage[0, 0], weight, 1e-6)


def test_importance_ratio_is_finite_whatever_comes_in():
    specials = [np.nan, np.inf, -np.inf, 200.0, -200.0, 0.0, -1.0]
    policy, behavior = map(np.array, zip(*itertools.product(specials, repeat=2), strict=True))
    policy, behavior = jnp.asarray(policy, jnp.float32), jnp.asarray(behavior, jnp.float32)
    every = jnp.ones(policy.shape, bool)
    ratio = returns.importance_ratio(policy, behavior, every)
    assert np.all(np.isfinite(ratio)) and np.all(np.asarray(ratio) > 0)
    same(returns.importance_ratio(policy, behavior, ~every), np.ones(policy.shape))
    known = returns.importance_ratio(
        jnp.array([-0.5, -jnp.inf, -1.0, -jnp.inf, jnp.nan]),
        jnp.array([-1.0, -1.0, -jnp.inf, -jnp.inf, -1.0]),
        jnp.ones(5, bool),
    )
    close(known, [np.exp(0.5), np.exp(-20), np.exp(20), 1, 1], 1e-5)


def test_log_probabilities_have_a_floor():
    logprob = jnp.array([-jnp.inf, -2e4, -3.0, jnp.nan, -jnp.inf])
    action = jnp.array([True, True, True, True, False])
    same(returns.finite_logprob(logprob, action), [-1e4, -1e4, -3, np.nan, 0])
    # Far below the limit of a ratio, which is what tells tokens of probability 0 from rare ones.
    assert returns.LOG_RATIO_LIMIT == 20


def test_log_importance_ratio_shows_a_diverged_model():
    got = returns.log_importance_ratio(jnp.array([jnp.nan, -1.0]), jnp.zeros(2), jnp.ones(2, bool))
    assert np.isnan(got[0]) and got[1] == -1


@pytest.mark.parametrize("gap", [200.0, -200.0, np.inf, -np.inf, np.nan])
def test_gradient_off_action_tokens_is_zero_and_not_nan(gap):
    behavior = jnp.zeros(3)
    action = jnp.array([True, False, True])
    run = lambda policy: returns.importance_ratio(policy, behavior, action).sum()
    same(jax.grad(run)(jnp.array([0.0, gap, 0.0])), [1, 0, 1])


# Group advantages and whitening.

GROUP_ADVANTAGE = jax.jit(returns.group_advantage, static_argnames="scale")
WHITEN = jax.jit(returns.whiten)
WHITEN_EACH = jax.jit(jax.vmap(returns.whiten))


def test_group_statistics_are_of_the_group():
    reward = jnp.array([1.0, 0, 0, 0, 1, 1, 1, 0])
    group = jnp.array([7, 7, 7, 7, -3, -3, -3, -3])
    root = 3**0.5
    want = [root, *[-1 / root] * 3, *[1 / root] * 3, -root]
    close(GROUP_ADVANTAGE(reward, group), want, 1e-4)
    order = jnp.array([0, 4, 1, 5, 2, 6, 3, 7])
    same(GROUP_ADVANTAGE(reward[order], group[order]),
         GROUP_ADVANTAGE(reward, group)[order])  # fmt: skip
    unscaled = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
    close(GROUP_ADVANTAGE(reward, group, scale=False), unscaled, 1e-6)


def test_groups_without_variance_give_exact_zeros():
    """The mean of equal numbers is rounded, and dividing the rounding by itself gives about 1."""
    sizes, values = (1, 2, 3, 5, 6, 7, 11), (1.0, 0.0, 2.1, 0.1, 0.7, 1.1)
    pairs = list(itertools.product(sizes, values))
    reward = jnp.asarray(np.concatenate([np.full(n, x, np.float32) for n, x in pairs]))
    group = jnp.asarray(np.repeat(np.arange(len(pairs)), [n for n, _ in pairs]))
    same(GROUP_ADVANTAGE(reward, group), np.zeros(reward.shape))
    same(GROUP_ADVANTAGE(reward, group, scale=False), np.zeros(reward.shape))


def test_missing_reward_leaves_its_group_alone():
    reward = jnp.array([1.0, jnp.nan, 0, 0, jnp.nan])
    got = GROUP_ADVANTAGE(reward, jnp.array([0, 0, 0, 0, 1]))
    close(got, [2**0.5, 0, -(0.5**0.5), -(0.5**0.5), 0], 1e-4)


def test_weighted_baseline():
    reward, group = jnp.array([1.0, 0.0, 4.0, 2.0]), jnp.array([0, 0, 1, 1])
    weight = jnp.array([3.0, 1.0, 0.0, 0.0])
    got = GROUP_ADVANTAGE(reward, group, scale=False, weight=weight)
    close(got, [0.25, -0.75, 4, 2], 1e-6)
    scaled = GROUP_ADVANTAGE(reward, group, weight=weight)
    close(scaled, [0.5, -1.5, 4, 2], 1e-5)
    even = GROUP_ADVANTAGE(reward, group, weight=jnp.full(4, 2.0))
    close(even, GROUP_ADVANTAGE(reward, group), 1e-6)


def test_weights_of_a_baseline_need_not_add_up_to_more_than_one():
    reward, group = jnp.array([1.0, 0.0]), jnp.array([0, 0])
    got = GROUP_ADVANTAGE(reward, group, scale=False, weight=jnp.array([0.375, 0.125]))
    close(got, [0.25, -0.75], 1e-6)


def test_tiny_differences_are_not_blown_up():
    """A standard deviation of 1e-6 is doubled, and a variance of 1e-8 too."""
    got = GROUP_ADVANTAGE(jnp.array([1e-6, -1e-6]), jnp.zeros(2, jnp.int32))
    close(got, [0.5, -0.5], 1e-4)
    got = WHITEN(jnp.array([[1e-4, -1e-4]]), jnp.ones((1, 2), bool))
    close(got, [[0.5**0.5, -(0.5**0.5)]], 1e-4)


def test_whiten_over_all_rows_or_over_one():
    advantage = jnp.array([[1.0, 2, 3], [10, 10, 13]])
    action = jnp.array([[True, True, True], [True, True, False]])
    values = np.array([1, 2, 3, 10, 10])
    want = (values - values.mean()) / values.std()
    got = WHITEN(advantage, action)
    close(got, [[*want[:3]], [*want[3:], 0]], 1e-5)
    each = WHITEN_EACH(advantage, action)
    close(each, [[-1.2247449, 0, 1.2247449], [0, 0, 0]], 1e-5)
    square = jnp.array([[1.0, 2, 3], [10, 10, 13], [5, 5, 5]])
    close(
        WHITEN_EACH(square, jnp.ones((3, 3), bool))[0],
        [-1.2247449, 0, 1.2247449],
        1e-5,
    )


def test_whiten_without_tokens_or_with_one_is_zero():
    advantage = jnp.array([[3.0, jnp.nan]])
    same(WHITEN(advantage, jnp.array([[False, False]])), [[0, 0]])
    same(WHITEN(advantage, jnp.array([[True, False]])), [[0, 0]])


def test_whiten_with_all_tokens_on_one_device():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    advantage = jnp.arange(8.0).reshape(2, 4)
    action = jnp.array([[True] * 4, [False] * 4])
    got = WHITEN(*jax.device_put((advantage, action), sharding))
    close(got, WHITEN(advantage, action), 1e-6)
    assert abs(float(got[0].mean())) < 1e-6 and abs(float(got[0].std()) - 1) < 1e-5


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_defaults_are_the_papers():
    copc = {"eps_low": 0.4, "eps_high": 0.56}
    plain = {"trace": "residual", "first_residual": "weighted", "lambda_": 1.0}
    assert defaults(returns.ratio_interval) == copc
    assert defaults(returns.corrected_returns) == plain
    assert defaults(returns.copc_returns) == copc | plain | {"eta_advantage": 0.5}
    assert defaults(returns.gae) == {"lambda_": 1.0}
    assert set(defaults(returns.vtrace).values()) == {1.0}
    assert set(defaults(returns.retrace).values()) == {1.0}
    assert defaults(returns.group_advantage) == {"scale": True, "weight": None}


# Faults that people reported of other code.


def gae_row(reward, value, discount, action, lambda_):
    row = [jnp.asarray(x, jnp.float32) for x in (reward, value, discount)]
    return returns.gae(*row, jnp.asarray(action, bool), lambda_=lambda_)


def test_reward_of_an_episode_that_ends_in_tool_text():
    action, junk = [1, 1, 0, 0], np.nan
    got = gae_row([0, 1, 0, 0], [0.5, 0.6, junk, junk], [1, 0, junk, junk], action, 0.9)
    close(got.advantage, [0.46, 0.4, 0, 0], 1e-6)
    close(got.value_target, [0.96, 1, 0, 0], 1e-6)
    got = gae_row([0, 1, 0, 0], [0.5, 0.6, junk, junk], [0, 0, junk, junk], action, 0.9)
    close(got.advantage, [-0.5, 0.4, 0, 0], 1e-6)


def test_ended_and_cut_episodes():
    ended = gae_row([0, 0, 0], [0.5, 0.6, 0.7], [1, 1, 0], [1, 1, 1], 0.9)
    close(ended.advantage, [-0.377, -0.53, -0.7], 1e-6)
    # gamma * V of what follows is folded into the last reward.
    cut = gae_row([0, 0, 0.8], [0.5, 0.6, 0.7], [1, 1, 0], [1, 1, 1], 0.9)
    close(cut.advantage, [0.271, 0.19, 0.1], 1e-6)


def test_bootstrap_counts_once():
    got = gae_row([0, 0.9 * 3], [1, 2], [0.9, 0], [1, 1], 0.8)
    close(got.advantage, [1.304, 0.7], 1e-6)
    got = gae_row([0, 0.9 * 3], [1, 2], [0.9, 0], [1, 1], 1.0)
    close(got.value_target, [0.81 * 3, 0.9 * 3], 1e-6)


def test_row_without_actions_is_zero_and_alone():
    batch = sample_batch()
    batch["is_action"][0] = False
    batch["is_action"][1] = True
    got = CORRECTED["residual", "weighted"](1.0, *core(batch))
    assert np.all(np.asarray(got.advantage)[0] == 0) and np.all(
        np.asarray(got.value_target)[0] == 0
    )
    alone = CORRECTED["residual", "weighted"](1.0, *core({k: x[1] for k, x in batch.items()}))
    close(got.advantage[1], alone.advantage, 1e-6)


def test_reward_of_a_token_that_the_actor_drops_still_counts():
    row = [jnp.asarray(x, jnp.float32) for x in ([0, 1], [0, 0], [1, 0], [1, 9])]
    got = returns.copc_returns(*row, jnp.ones(2, bool), eta_advantage=0.0)
    same(got.value_target, [1, 1])


@pytest.mark.parametrize("bad", [(3,), (1, 3), (3, 1)])
def test_shapes_that_would_broadcast_are_refused(bad):
    action = jnp.ones((3, 3), bool)
    with pytest.raises(ValueError, match="reward has shape"):
        returns.select_actions(action, reward=jnp.ones(bad))


SHAPED = {
    returns.corrected_returns: ("reward", "value", "discount", "weight"),
    returns.copc_returns: ("reward", "value", "discount", "ratio"),
    returns.gae: ("reward", "value", "discount"),
    returns.vtrace: ("reward", "value", "discount", "ratio"),
    returns.retrace: ("reward", "value", "discount", "ratio"),
    returns.whiten: ("advantage",),
}


@pytest.fixture
def unchecked(monkeypatch):
    """Without the type checks of the tests, as users call the package."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("operator", SHAPED, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("unchecked")
def test_every_operator_names_the_array_of_a_wrong_shape(operator):
    right, action = jnp.ones((3, 3)), jnp.ones((3, 3), bool)
    for wrong in SHAPED[operator]:
        arrays = [jnp.ones(3) if name == wrong else right for name in SHAPED[operator]]
        with pytest.raises(ValueError, match=f"^{wrong} has shape"):
            operator(*arrays, action)


@pytest.mark.usefixtures("unchecked")
def test_weights_of_a_group_have_the_shape_of_its_rewards():
    with pytest.raises(ValueError, match="weight has shape"):
        returns.group_advantage(jnp.ones(3), jnp.zeros(3, jnp.int32), weight=jnp.ones(1))


@pytest.mark.parametrize("option", ["trace", "first_residual"])
@pytest.mark.usefixtures("unchecked")
def test_unknown_options_are_named(option):
    batch = on_device(sample_batch())
    with pytest.raises(ValueError, match=f"{option} must be .* got 'retrace'"):
        returns.corrected_returns(*core(batch), **{option: "retrace"})
