"""Return and advantage operators of a token-level MDP.

All of them read `[..., T]` arrays with time last, of which index `t` is the token being predicted,
and answer in float32 whatever comes in. Only action tokens (`is_action`) are steps of the MDP:
prompt, tool text and padding are skipped, cost neither discount nor lambda, may hold anything (NaN
included), and read 0 in the results.

`discount[t]` is gamma, and 0 at the last action token of an ended episode, which separates episodes
that share a row. A cut episode that bootstraps folds `gamma * V` of what follows into its last
reward. The operators are differentiable; the losses, not the operators, hold advantages and targets
fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from copc_jax.types import Returns

__all__ = [
    "LOG_RATIO_LIMIT",
    "FirstResidual",
    "Returns",
    "Scalar",
    "Trace",
    "copc_returns",
    "corrected_returns",
    "finite_logprob",
    "gae",
    "group_advantage",
    "importance_ratio",
    "log_importance_ratio",
    "ratio_interval",
    "retrace",
    "select_actions",
    "vtrace",
    "whiten",
]

Trace = Literal["residual", "product"]
FirstResidual = Literal["weighted", "unweighted"]
# A number of Python, or a traced one: thresholds can be swept under one compilation.
Scalar = float | Float[Array, ""]

# exp(20) = 4.9e8: its square, and sums of many squares, still fit in float32.
LOG_RATIO_LIMIT = 20.0

# A server reports -inf for a token of probability 0. A finite floor keeps the difference of two of
# them defined.
_LOGPROB_FLOOR = -1e4


def select_actions(is_action: Bool[Array, "*batch time"], **arrays: Array) -> tuple[Array, ...]:
    """Return the arrays in float32, in order, with 0 off action tokens.

    Raises:
        ValueError: an array has another shape than `is_action`: broadcasting a per-response array
            over tokens would give a wrong number silently whenever the two axes have the same
            length.
    """
    _require_shape(jnp.shape(is_action), arrays)
    return tuple(_select(is_action, x) for x in arrays.values())


def _require_shape(shape: tuple[int, ...], arrays: Mapping[str, Array]) -> None:
    for name, x in arrays.items():
        if jnp.shape(x) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(x)} but is_action has shape {shape}")


def _select(is_action: Array, x: Array) -> Array:
    return jnp.where(is_action, jnp.asarray(x, jnp.float32), 0.0)


def ratio_interval(
    eta: Scalar, eps_low: Scalar = 0.4, eps_high: Scalar = 0.56
) -> tuple[Scalar, Scalar]:
    """Return the interval of ratios that `eta` allows: `(1 - eta * eps_low, 1 + eta * eps_high)`.

    Both channels of COPC use it. `eta = 0` is the point 1: as a mask it drops every token that
    moved, as a weight it corrects nothing, so a small eta is the tight end of one channel and the
    loose end of the other.

    Raises:
        ValueError: `eta` is a negative number, which would turn the interval around.

    Source: COPC appendix C.2.1, where (0.5, 0.4, 0.56) gives [0.80, 1.28].
    """
    if isinstance(eta, int | float) and eta < 0:
        raise ValueError(f"eta must not be negative, got {eta}")
    return 1.0 - eta * eps_low, 1.0 + eta * eps_high


def finite_logprob(
    logprob: Float[Array, "*batch time"], is_action: Bool[Array, "*batch time"]
) -> Float[Array, "*batch time"]:
    """Return the log-probabilities of action tokens with a floor of -1e4 nats, 0 elsewhere.

    At the floor (a probability of 0) the gradient is 0. NaN on an action token stays NaN: it means
    that a model has diverged, and must not pass for a number.

    Source: this repository; the floor belongs to no method.
    """
    (logprob,) = select_actions(is_action, logprob=logprob)
    return jnp.maximum(logprob, _LOGPROB_FLOOR)


def log_importance_ratio(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
) -> Float[Array, "*batch time"]:
    """Return the log of pi / mu, within +-`LOG_RATIO_LIMIT` nats and 0 off action tokens.

    The mask is applied before the subtraction, so gradients off action tokens are 0 and not `0 *
    inf`; beyond the limit the gradient is 0. -inf is a probability of 0 (two of them give a ratio
    of 1).

    Source: the limit of 20 nats is verl's.
    """
    difference = finite_logprob(policy_logprob, is_action) - finite_logprob(
        behavior_logprob, is_action
    )
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_ratio(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
) -> Float[Array, "*batch time"]:
    """Return `pi / mu` of every action token, 1 off action tokens; always finite and positive.

    Ratios stay within `exp(+-LOG_RATIO_LIMIT)`. Where a log-probability is NaN nothing is known and
    the ratio is 1; the losses do let such a NaN through.

    Source: the limit of 20 nats is verl's.
    """
    log_ratio = log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    return jnp.exp(jnp.where(jnp.isnan(log_ratio), 0.0, log_ratio))


def _backward(
    reward: Array,
    value: Array,
    discount: Array,
    is_action: Array,
    lambda_: float | Array,
    weights: Callable[[Array], tuple[Array | float, Array | float, Array | float | None]],
    **ratio: Array,
) -> Returns:
    """Run the recursion that all operators share, from the last action token to the first.

        td_t   = reward_t + discount_t * V_{t+1} - V_t
        tail_t = discount_t * lambda * acc_{t+1}
        acc_t  = weight_t * td_t + trace_t * tail_t

    t + 1 is the next action token; tokens between leave the carry alone. `weights` gives weight,
    trace and the factor of the advantage, `factor_t * (td_t + tail_t)`, from the ratio of some
    tokens, which is named for its errors; a factor of None stands for an advantage of `acc_t`.

    Everything of a token is computed where it is read: arrays of their own for its parts would
    cost several times as much as the recursion.
    """
    tokens = {"reward": reward, "value": value, "discount": discount, **ratio}
    ((name, _),) = ratio.items()
    per_token = jnp.ndim(lambda_) > 0
    if per_token:
        tokens["lambda_"] = jnp.asarray(lambda_)
    _require_shape(jnp.shape(is_action), tokens)

    def step(carry, token):
        next_value, next_acc = carry
        is_action_t, token = token
        token = {name: _select(is_action_t, x) for name, x in token.items()}
        lambda_t = token["lambda_"] if per_token else jnp.asarray(lambda_, jnp.float32)
        td_t = token["reward"] + token["discount"] * next_value - token["value"]
        tail_t = token["discount"] * lambda_t * next_acc
        weight_t, trace_t, factor_t = weights(token[name])
        acc_t = weight_t * td_t + trace_t * tail_t
        advantage_t = acc_t if factor_t is None else factor_t * (td_t + tail_t)
        result = Returns(
            jnp.where(is_action_t, advantage_t, 0.0),
            jnp.where(is_action_t, token["value"] + acc_t, 0.0),
        )
        next_value = jnp.where(is_action_t, token["value"], next_value)
        return (next_value, jnp.where(is_action_t, acc_t, next_acc)), result

    # The scan slices its leading axis: moving time there once is faster than a gather at every
    # step.
    scanned = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), -1, 0), (is_action, tokens))
    # zeros_like and not 0.0: the carry must have the sharding and batch axes of the data.
    start = jnp.zeros_like(scanned[1]["reward"][0], jnp.float32)
    _, results = jax.lax.scan(step, (start, start), scanned, reverse=True)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), results)


def _corrected(
    reward: Array,
    value: Array,
    discount: Array,
    is_action: Array,
    lambda_: float | Array,
    weigh: Callable[[Array], Array],
    trace: str,
    first_residual: str,
    **ratio: Array,
) -> Returns:
    if trace not in ("residual", "product"):
        raise ValueError(f'trace must be "residual" or "product", got {trace!r}')
    if first_residual not in ("weighted", "unweighted"):
        raise ValueError(
            f'first_residual must be "weighted" or "unweighted", got {first_residual!r}'
        )
    factor = None if first_residual == "weighted" else 1.0

    def weights(ratio_t: Array) -> tuple[Array, Array | float, float | None]:
        weight_t = weigh(ratio_t)
        return weight_t, weight_t if trace == "product" else 1.0, factor

    return _backward(reward, value, discount, is_action, lambda_, weights, **ratio)


def corrected_returns(
    reward: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    weight: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    lambda_: float | Array = 1.0,
    trace: Trace = "residual",
    first_residual: FirstResidual = "weighted",
) -> Returns:
    """Sum temporal-difference residuals, each weighted to correct the policy that sampled it.

    With `acc_t = value_target_t - V_t`:

        acc_t = weight_t * td_t + gamma * lambda * acc_{t+1}      trace="residual"
        acc_t = weight_t * (td_t + gamma * lambda * acc_{t+1})    trace="product"

    For a weight w(s, a) the fixed point of the expected target is the value of the policy `mu * w /
    E_mu[w]`, for any lambda and either trace.

    Args:
        reward: on the token that earned it; an outcome reward on the last action token.
        value: V of the prefix before each token.
        discount: gamma, 0 at the last action token of an ended episode.
        weight: non-negative weight of each residual, usually a clipped importance ratio.
        is_action: True on sampled tokens; the rest is skipped.
        lambda_: in [0, 1]; one number, or one a token.
        trace: "residual" weights residuals only, so credit travels through a response of any
            length; "product" also multiplies the weights along the trace, which is exact for exact
            ratios and lambda = 1 but vanishes or explodes over long responses.
        first_residual: "weighted" has advantage = value_target - value; "unweighted" leaves the
            weight of the token itself out of its advantage (the policy channel corrects that one),
            but not out of its value target.

    Returns:
        Advantage and value target, float32, 0 off action tokens.

    Source: COPC section 5. That traces are plain and the first residual weighted is inferred, hence
        the two options.
    """
    return _corrected(
        reward,
        value,
        discount,
        is_action,
        lambda_,
        lambda x: x,
        trace,
        first_residual,
        weight=weight,
    )


def copc_returns(
    reward: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    ratio: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    eta_advantage: Scalar = 0.5,
    eps_low: Scalar = 0.4,
    eps_high: Scalar = 0.56,
    lambda_: float | Array = 1.0,
    trace: Trace = "residual",
    first_residual: FirstResidual = "weighted",
) -> Returns:
    """Correct returns with the ratio clipped on both sides: the advantage channel of COPC.

    `weight = clip(ratio, *ratio_interval(eta_advantage, eps_low, eps_high))` in
    `corrected_returns`, with `ratio` frozen before the update. `eta_advantage = 0` is GAE for every
    lambda and every option. Tokens that the actor's mask drops take part here like any other.

    Source: COPC section 5.
    """
    low, high = ratio_interval(eta_advantage, eps_low, eps_high)
    clip = lambda x: jnp.clip(x, low, high)
    return _corrected(
        reward, value, discount, is_action, lambda_, clip, trace, first_residual, ratio=ratio
    )


def gae(
    reward: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    lambda_: float | Array = 1.0,
) -> Returns:
    """Estimate advantages of the behavior policy: no correction.

        A_t = td_t + gamma * lambda * A_{t+1},   value_target = V + A

    Source: Schulman et al., 2016 (arXiv 1506.02438).
    """
    weight = jnp.ones(jnp.shape(is_action), jnp.float32)
    return corrected_returns(reward, value, discount, weight, is_action, lambda_=lambda_)


def vtrace(
    reward: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    ratio: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    lambda_: float | Array = 1.0,
    rho_max: Scalar = 1.0,
    trace_max: Scalar = 1.0,
    policy_rho_max: Scalar = 1.0,
) -> Returns:
    """Correct returns with truncated ratios and traces that multiply.

    With `acc_t = value_target_t - V_t` and R the ratio:

        acc_t = min(rho_max, R_t) * td_t + gamma * lambda * min(trace_max, R_t) * acc_{t+1}
        A_t   = min(policy_rho_max, R_t) * (td_t + gamma * lambda * acc_{t+1})

    The advantage already holds its ratio: use it with `losses.vtrace_actor_loss`, which does not
    weight again.

    Source: Espeholt et al., 2018 (arXiv 1802.01561); lambda enters as in rlax.
    """

    def weights(ratio_t: Array) -> tuple[Array, Array, Array]:
        return (
            jnp.minimum(ratio_t, rho_max),
            jnp.minimum(ratio_t, trace_max),
            jnp.minimum(ratio_t, policy_rho_max),
        )

    return _backward(reward, value, discount, is_action, lambda_, weights, ratio=ratio)


def retrace(
    reward: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    ratio: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    lambda_: float | Array = 1.0,
    trace_max: Scalar = 1.0,
) -> Returns:
    """Apply Retrace(lambda) with a critic of states, that is with `Q(s, a) = V(s)`.

    With `c = min(trace_max, R)` and R the ratio:

        A_t            = td_t + gamma * lambda * c_{t+1} * A_{t+1}
        value_target_t = V_t + c_t * A_t

    Retrace proper learns Q; a token-level critic of V leaves this form of it, in which the action
    of the token itself is given and so not weighted.

    Source: Munos et al., 2016 (arXiv 1606.02647).
    """
    cut = lambda x: jnp.minimum(x, trace_max)
    return _corrected(
        reward, value, discount, is_action, lambda_, cut, "product", "unweighted", ratio=ratio
    )


def group_advantage(
    reward: Float[Array, " n"],
    group_id: Int[Array, " n"],
    *,
    scale: bool = True,
    weight: Float[Array, " n"] | None = None,
) -> Float[Array, " n"]:
    """Return each response's outcome relative to the responses to the same prompt.

    `(reward - baseline) / (std + 1e-6)` with the group's mean as baseline and its population
    standard deviation; 0 in a group of one or of equal rewards. A NaN reward is a missing one: its
    advantage is 0 and it leaves the statistics of its group alone. Costs O(n^2), n the number of
    responses.

    Args:
        reward: one outcome a response.
        group_id: any integers, equal for responses to the same prompt.
        scale: divide by the standard deviation; False keeps rewards in their own unit.
        weight: non-negative weights of the baseline, `sum(weight * reward) / sum(weight)`. VCPO's
            baseline has `ratio**2 * |gradient of the response's log-probability|**2` here. None is
            the plain mean; the baseline of a group without any weight is 0.

    Source: DAPO (arXiv 2503.14476); VCPO (arXiv 2602.17616) for the weights.
    """
    present = ~jnp.isnan(reward)
    (reward,) = select_actions(present, reward=reward)
    weight = jnp.ones_like(reward) if weight is None else select_actions(present, weight=weight)[0]
    same = (group_id[:, None] == group_id[None, :]) & present[None, :]

    def group_mean(x: Array, w: Array) -> Array:
        total = jnp.where(same, w[None, :], 0.0).sum(-1)
        return jnp.where(same, (w * x)[None, :], 0.0).sum(-1) / jnp.where(total > 0, total, 1.0)

    lowest = jnp.where(same, reward[None, :], jnp.inf).min(-1)
    highest = jnp.where(same, reward[None, :], -jnp.inf).max(-1)
    # Rounding in the mean of equal rewards would be blown up by the division: equal rewards are
    # found exactly.
    varied = present & (highest > lowest)
    advantage = reward - group_mean(reward, weight)
    if scale:
        mean = group_mean(reward, jnp.ones_like(reward))
        # Each row of `same` has its own mean, so squares are taken pairwise.
        square = jnp.where(same, jnp.square(reward[None, :] - mean[:, None]), 0.0).sum(-1)
        variance = square / jnp.maximum(same.sum(-1).astype(jnp.float32), 1.0)
        advantage = advantage / (jnp.sqrt(jnp.where(varied, variance, 1.0)) + 1e-6)
    return jnp.where(varied, advantage, 0.0)


def whiten(
    advantage: Float[Array, "*batch time"], is_action: Bool[Array, "*batch time"]
) -> Float[Array, "*batch time"]:
    """Shift and scale advantages to mean 0 and variance 1 over all action tokens of the call.

    Tokens that an actor mask will drop count too, so the statistics do not depend on the mask. The
    variance is the population's; 1e-8 is added to it. Without any action token the result is 0.
    Returns and value targets are never whitened: whiten after forming them.

    Source: common practice of PPO, as in verl, whose variance divides by the number less one.
    """
    (advantage,) = select_actions(is_action, advantage=advantage)
    count = jnp.maximum(jnp.sum(is_action, dtype=jnp.float32), 1.0)
    (centered,) = select_actions(is_action, centered=advantage - advantage.sum() / count)
    variance = jnp.square(centered).sum() / count
    return centered * jax.lax.rsqrt(variance + 1e-8)
