"""Actor, critic and supervised losses on plain `[..., T]` arrays, time last.

Every loss returns `(loss, metrics)`: a float32 scalar to minimize, and a dictionary of name ->
(sum, count), which adds over micro-batches and devices; divide once at the end. `metrics["loss"]`
is the loss itself in that form. Only action tokens count, and whatever stands elsewhere (NaN and
-inf included) changes neither loss nor gradient nor metrics.

Gradients reach `policy_logprob` (or `value`, `logprob`) and nothing else: behavior and proximal
log-probabilities, advantages and value targets are held fixed here. A token that a mask drops stays
in the denominator unless an option says otherwise.

Shared arguments:
    policy_logprob: of the parameters being trained, in nats.
    proximal_logprob: of the learner before this batch's first update.
    behavior_logprob: as the rollout server recorded it; never recomputed.
    advantage: already normalized, where the method normalizes.
    reduce: "token" is the mean over all action tokens, "response" the mean over responses of each
        one's mean.
    segment_ids: names the response of each token in packed rows; a response is one (row, segment).
        None means that each row is one response.

Shared metrics of actor losses: `ratio`, `log_ratio`, `log_ratio_square` and `kl` (the k3 estimate
of KL(mu || pi)) of policy against behavior; `ratio_capped`, tokens beyond the limit of
`returns.LOG_RATIO_LIMIT`; `clip_low` and `clip_high`, tokens that the loss's lower or upper bound
changed; `kept`, tokens with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from copc_jax.returns import (
    LOG_RATIO_LIMIT,
    Scalar,
    finite_logprob,
    importance_ratio,
    log_importance_ratio,
    ratio_interval,
    select_actions,
)

Reduce = Literal["token", "response"]
Metrics = dict[str, tuple[Array, Array]]


def ratio_mask(
    ratio: Float[Array, "*shape"],
    eta_policy: Scalar = 0.5,
    eps_low: Scalar = 0.4,
    eps_high: Scalar = 0.56,
) -> Bool[Array, "*shape"]:
    """Return True where the ratio lies in the closed `ratio_interval(eta_policy, ...)`.

    Source: COPC section 5, the policy channel. At eta_policy = 0 exactly the tokens of ratio 1 are
        kept.
    """
    low, high = ratio_interval(eta_policy, eps_low, eps_high)
    ratio = jnp.asarray(ratio, jnp.float32)
    return (low <= ratio) & (ratio <= high)


def _response_index(is_action: Array, segment_ids: Array) -> Array:
    """Number the responses of each row by the order in which their segments begin, in [0, T)."""
    if jnp.shape(segment_ids) != jnp.shape(is_action):
        raise ValueError(
            f"segment_ids has shape {jnp.shape(segment_ids)} but is_action has shape "
            f"{jnp.shape(is_action)}"
        )
    begins = segment_ids[..., 1:] != segment_ids[..., :-1]
    first = jnp.zeros_like(segment_ids[..., :1])
    return jnp.concatenate([first, jnp.cumsum(begins, axis=-1, dtype=first.dtype)], axis=-1)


def _response_sums(x: Array, is_action: Array, segment_ids: Array | None) -> tuple[Array, Array]:
    """Sum `x` over the action tokens of each response.

    Returns:
        [..., R], one sum a response (0 where a row has fewer than R), and [..., T], the sum of each
        token's response.
    """
    (x,) = select_actions(is_action, x=x)
    if segment_ids is None:
        total = x.sum(-1, keepdims=True)
        return total, jnp.broadcast_to(total, x.shape)

    def row(x: Array, index: Array) -> tuple[Array, Array]:
        sums = jax.ops.segment_sum(x, index, num_segments=x.shape[0])
        return sums, sums[index]

    for _ in range(x.ndim - 1):
        row = jax.vmap(row)
    return row(x, _response_index(is_action, segment_ids))


def reduction_weights(
    is_action: Bool[Array, "*batch time"],
    *,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, ""]]:
    """Return `(weight, count)`: the reduced value of x is `sum(weight * x) / max(count, 1)`.

    `count` is the number of action tokens, or of responses that have one. Micro-batches and devices
    add `sum(weight * x)` and `count` separately.

    Source: COPC appendix C.2.1 (response mean for mathematics, token mean for search).
    """
    ones = jnp.where(is_action, 1.0, 0.0).astype(jnp.float32)
    if reduce == "token":
        return ones, ones.sum()
    if reduce == "response":
        lengths, length = _response_sums(ones, is_action, segment_ids)
        return ones / jnp.maximum(length, 1.0), jnp.sum(lengths > 0, dtype=jnp.float32)
    raise ValueError(f'reduce must be "token" or "response", got {reduce!r}')


def reduce_tokens(
    x: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> Float[Array, ""]:
    """Average `x` over action tokens ("token"), or within and then over responses ("response").

    Responses without an action token count nowhere; with none at all the result is 0.

    Source: COPC appendix C.2.1 (response mean for mathematics, token mean for search).
    """
    total, count = _reduction(x, is_action, reduce, segment_ids)
    return total / jnp.maximum(count, 1.0)


def _reduction(
    x: Array, is_action: Array, reduce: Reduce, segment_ids: Array | None
) -> tuple[Array, Array]:
    weight, count = reduction_weights(is_action, reduce=reduce, segment_ids=segment_ids)
    (x,) = select_actions(is_action, x=x)
    return (weight * x).sum(), count


def kl_divergence(
    policy_logprob: Float[Array, "*batch time"],
    reference_logprob: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Array, "*batch time"]:
    """Estimate KL(policy || reference) on each token that the policy sampled, 0 off action tokens.

    With `d = reference_logprob - policy_logprob`: k1 is `-d` (unbiased, any sign), k2 is `d**2 / 2`
    (biased), k3 is `exp(d) - 1 - d` (unbiased, never negative). As a loss only the gradient of k2
    points to the reference.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    difference = log_importance_ratio(reference_logprob, policy_logprob, is_action)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    if estimator == "k3":
        return jnp.expm1(difference) - difference
    raise ValueError(f'estimator must be "k1", "k2" or "k3", got {estimator!r}')


def _mean_over_actions(is_action: Array, **arrays: Array) -> Metrics:
    """Pair the sum of each array over action tokens with their number."""
    count = jnp.sum(is_action, dtype=jnp.float32)
    sums = (x.sum() for x in select_actions(is_action, **arrays))
    return {name: (total, count) for name, total in zip(arrays, sums, strict=True)}


def _finish_actor(
    objective: Array,
    policy_logprob: Array,
    behavior_logprob: Array,
    is_action: Array,
    *,
    reduce: Reduce,
    segment_ids: Array | None,
    clip_low: Array,
    clip_high: Array,
    kept: Array,
    counted: Array | None = None,
    **more: Array,
) -> tuple[Array, Metrics]:
    """Reduce the negated objective and add the metrics that all actor losses share.

    `counted` are the tokens of the denominator, all action tokens unless given.
    """
    total, count = _reduction(
        -objective, is_action if counted is None else counted, reduce, segment_ids
    )
    log_ratio = jax.lax.stop_gradient(
        log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    )
    metrics = _mean_over_actions(
        is_action,
        ratio=jnp.exp(log_ratio),
        log_ratio=log_ratio,
        log_ratio_square=jnp.square(log_ratio),
        kl=jnp.expm1(log_ratio) - log_ratio,
        ratio_capped=jnp.abs(log_ratio) >= LOG_RATIO_LIMIT,
        clip_low=clip_low,
        clip_high=clip_high,
        kept=kept,
        **more,
    )
    metrics["loss"] = (jax.lax.stop_gradient(total), count)
    return total / jnp.maximum(count, 1.0), metrics


def _fixed(is_action: Array, **arrays: Array) -> tuple[Array, ...]:
    return jax.lax.stop_gradient(select_actions(is_action, **arrays))


def copc_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    eta_policy: Scalar = 0.5,
    eps_low: Scalar = 0.4,
    eps_high: Scalar = 0.56,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
    frozen_logprob: Float[Array, "*batch time"] | None = None,
    mask_in_denominator: bool = True,
) -> tuple[Float[Array, ""], Metrics]:
    """Weight advantages by the importance ratio and drop tokens whose ratio left the interval.

        loss = -reduce( sg(1[low <= r <= high]) * r * A ),   r = pi / mu

    The mask is not differentiated, and unlike a PPO clip it drops tokens on both sides whatever the
    sign of A. Further metric: `restoring`, tokens outside the interval whose update would lead back
    (A > 0 below it, A < 0 above it).

    Args:
        policy_logprob: see the module.
        behavior_logprob: see the module.
        advantage: see the module.
        is_action: see the module.
        eta_policy: width of the interval; (0.5, 0.4, 0.56) is [0.80, 1.28].
        eps_low: margin below 1 at eta_policy = 1.
        eps_high: margin above 1 at eta_policy = 1.
        reduce: see the module.
        segment_ids: see the module.
        frozen_logprob: of the learner before the first update; the mask is then taken from
            `frozen_logprob` against behavior and stays the same over the updates of a batch. None
            takes it from `policy_logprob`. Both agree when a batch is one update.
        mask_in_denominator: dropped tokens count in the mean; False averages over the kept tokens.

    Source: COPC section 5.
    """
    (advantage,) = _fixed(is_action, advantage=advantage)
    ratio = jnp.exp(log_importance_ratio(policy_logprob, behavior_logprob, is_action))
    mask_ratio = ratio
    if frozen_logprob is not None:
        mask_ratio = importance_ratio(frozen_logprob, behavior_logprob, is_action)
    low, high = ratio_interval(eta_policy, eps_low, eps_high)
    below, above = mask_ratio < low, mask_ratio > high
    dropped = below | above
    return _finish_actor(
        jnp.where(dropped, 0.0, ratio) * advantage,
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=~dropped,
        counted=None if mask_in_denominator else is_action & ~dropped,
        restoring=_restoring(below, above, advantage),
    )


def _restoring(below: Array, above: Array, advantage: Array) -> Array:
    return (below & (advantage > 0)) | (above & (advantage < 0))


def _clipped_objective(
    ratio: Array, advantage: Array, clip_low: Scalar, clip_high: Scalar, dual_clip: Scalar | None
) -> tuple[Array, Array, Array, Array]:
    """Return PPO's `min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` and where it was cut.

    Written as a choice and not with `minimum`: at a tie that splits the gradient between its
    arguments.

    Returns:
        Objective, tokens cut below, tokens cut above, tokens with a gradient.
    """
    below = (advantage < 0) & (ratio < 1.0 - clip_low)
    above = (advantage > 0) & (ratio > 1.0 + clip_high)
    bounded = jnp.where(below, 1.0 - clip_low, jnp.where(above, 1.0 + clip_high, ratio))
    kept = ~(below | above)
    if dual_clip is not None:
        far = (advantage < 0) & (ratio > dual_clip)
        bounded = jnp.where(far, dual_clip, bounded)
        above, kept = above | far, kept & ~far
    return bounded * advantage, below, above, kept


def ppo_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    dual_clip: Scalar | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Clip the surrogate objective, with the ratio against the recorded behavior policy.

        loss = -reduce( min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) ),   r = pi / mu

    With `dual_clip` c, tokens of negative advantage lose at most `-c A`. DAPO uses the same loss.

    Source: Schulman et al., 2017 (arXiv 1707.06347); dual clip: Ye et al., 2020 (arXiv 1912.09729).
    """
    (advantage,) = _fixed(is_action, advantage=advantage)
    ratio = jnp.exp(log_importance_ratio(policy_logprob, behavior_logprob, is_action))
    objective, below, above, kept = _clipped_objective(
        ratio, advantage, clip_low, clip_high, dual_clip
    )
    return _finish_actor(
        objective,
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=kept,
    )


def _decoupled_actor_loss(
    policy_logprob: Array,
    proximal_logprob: Array,
    behavior_logprob: Array,
    advantage: Array,
    is_action: Array,
    weigh: Callable[[Array], Array],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar | None,
    reduce: Reduce,
    segment_ids: Array | None,
) -> tuple[Array, Metrics]:
    """Clip policy against proximal, and weight by a function of proximal over behavior."""
    (advantage,) = _fixed(is_action, advantage=advantage)
    proximal_ratio = jnp.exp(
        log_importance_ratio(policy_logprob, jax.lax.stop_gradient(proximal_logprob), is_action)
    )
    behavior_ratio = jax.lax.stop_gradient(
        jnp.exp(log_importance_ratio(proximal_logprob, behavior_logprob, is_action))
    )
    weight = weigh(behavior_ratio)
    objective, below, above, kept = _clipped_objective(
        proximal_ratio, advantage, clip_low, clip_high, dual_clip
    )
    return _finish_actor(
        weight * objective,
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=kept & (weight > 0),
        behavior_weight=weight,
        behavior_clipped=weight != behavior_ratio,
    )


def decoupled_ppo_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    proximal_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    behavior_cap: Scalar = 5.0,
    dual_clip: Scalar | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Clip the policy against a recent proximal policy and weight by proximal over behavior.

        loss = -reduce( 1[w <= behavior_cap] * w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        )

    with `w = proximal / mu` and `r = pi / proximal`. Tokens above the cap are dropped, not
    truncated, and stay in the denominator. With one update a batch r is 1 and nothing is clipped.
    Further metrics: `behavior_weight`, and `behavior_clipped`, tokens above the cap.

    Source: AReaL (arXiv 2505.24298).
    """
    return _decoupled_actor_loss(
        policy_logprob,
        proximal_logprob,
        behavior_logprob,
        advantage,
        is_action,
        lambda ratio: jnp.where(ratio > behavior_cap, 0.0, ratio),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        reduce=reduce,
        segment_ids=segment_ids,
    )


def tis_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    proximal_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    weight_max: Scalar = 2.0,
    dual_clip: Scalar | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Weight the clipped objective by the truncated ratio of proximal over behavior.

        loss = -reduce( min(w, weight_max) * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) )

    with `w = proximal / mu` and `r = pi / proximal`. Further metrics as in
    `decoupled_ppo_actor_loss`.

    Source: truncated importance sampling, Yao et al., 2025 (fengyao.notion.site/off-policy-rl).
    """
    return _decoupled_actor_loss(
        policy_logprob,
        proximal_logprob,
        behavior_logprob,
        advantage,
        is_action,
        lambda ratio: jnp.minimum(ratio, weight_max),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        reduce=reduce,
        segment_ids=segment_ids,
    )


def icepop_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    proximal_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    weight_min: Scalar = 0.5,
    weight_max: Scalar = 2.0,
    dual_clip: Scalar | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Weight the clipped objective by proximal over behavior and drop tokens far from 1.

        loss = -reduce( 1[weight_min <= w <= weight_max] * w
                        * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) )

    with `w = proximal / mu` and `r = pi / proximal`. Further metrics as in
    `decoupled_ppo_actor_loss`.

    Source: IcePop (ringtech, 2025), bounds as reported for GLM-5.
    """
    return _decoupled_actor_loss(
        policy_logprob,
        proximal_logprob,
        behavior_logprob,
        advantage,
        is_action,
        lambda ratio: jnp.where((ratio < weight_min) | (ratio > weight_max), 0.0, ratio),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        reduce=reduce,
        segment_ids=segment_ids,
    )


def _policy_gradient_loss(
    weight: Array,
    policy_logprob: Array,
    behavior_logprob: Array,
    advantage: Array,
    is_action: Array,
    *,
    reduce: Reduce,
    segment_ids: Array | None,
    clip_low: Array,
    clip_high: Array,
    kept: Array,
    **more: Array,
) -> tuple[Array, Metrics]:
    """Return `-reduce( sg(weight) * A * log pi )`: the gradient of each token is `weight * A`."""
    weight, advantage = _fixed(is_action, weight=weight, advantage=advantage)
    return _finish_actor(
        weight * advantage * finite_logprob(policy_logprob, is_action),
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=clip_low,
        clip_high=clip_high,
        kept=kept,
        **more,
    )


def reinforce_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Follow the policy gradient without any correction.

        loss = -reduce( A * log pi )

    `behavior_logprob` only enters the metrics.

    Source: Williams, 1992.
    """
    none = jnp.zeros_like(is_action)
    return _policy_gradient_loss(
        jnp.ones(jnp.shape(is_action), jnp.float32),
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=none,
        clip_high=none,
        kept=~none,
    )


def vtrace_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Follow V-trace's policy gradient, whose advantages hold their truncated ratio already.

        loss = -reduce( A * log pi ),   A from returns.vtrace

    `behavior_logprob` only enters the metrics. The advantages are not to be whitened.

    Source: Espeholt et al., 2018 (arXiv 1802.01561); COPC appendix C.2.1.
    """
    return reinforce_actor_loss(
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
    )


def sao_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Follow the policy gradient weighted by ratios inside an interval, and drop the rest.

        loss = -reduce( sg(f(r)) * A * log pi ),   f(r) = r if low < r < high else 0

    with `r = pi / mu`, `low = 1 - clip_low` and `high = 1 + clip_high`. The interval is open;
    otherwise the gradient is that of `copc_actor_loss`.

    Source: SAO (arXiv 2607.07508). The stop-gradient is inferred: without it the gradient would
    gain a factor `1 + log pi`. The bounds that COPC's runs of SAO used are not public.
    """
    ratio = jnp.exp(log_importance_ratio(policy_logprob, behavior_logprob, is_action))
    below, above = ratio <= 1.0 - clip_low, ratio >= 1.0 + clip_high
    dropped = below | above
    return _policy_gradient_loss(
        jnp.where(dropped, 0.0, ratio),
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=~dropped,
    )


def copc_restoring_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    eta_policy: Scalar = 0.5,
    eps_low: Scalar = 0.4,
    eps_high: Scalar = 0.56,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Drop only tokens that the update drives further out of the interval, and bound the others.

        loss = -reduce( sg(w) * A * log pi ),   r = pi / mu
        w = 0 where A > 0 and r > high, or A < 0 and r < low;   w = clip(r, low, high) elsewhere

    Inside the interval the gradient is that of `copc_actor_loss`. Outside, tokens whose update
    leads back are kept, as by a PPO clip with these bounds, but with the weight of the bound that
    they passed: PPO's weight r is near 0 where a token became unlikely, and has no bound where it
    became likely. Further metric: `restoring`, as in `copc_actor_loss`.

    Source: none; a variant for large drift that is tried here beside the paper's loss.
    """
    ratio = jnp.exp(log_importance_ratio(policy_logprob, behavior_logprob, is_action))
    low, high = ratio_interval(eta_policy, eps_low, eps_high)
    (advantage,) = _fixed(is_action, advantage=advantage)
    below, above = ratio < low, ratio > high
    dropped = (below & (advantage < 0)) | (above & (advantage > 0))
    return _policy_gradient_loss(
        jnp.where(dropped, 0.0, jnp.clip(ratio, low, high)),
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=~dropped,
        restoring=_restoring(below, above, advantage),
    )


def cispo_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 1.0,
    clip_high: Scalar = 0.2,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Follow the policy gradient of every token, weighted by a truncated ratio.

        loss = -reduce( sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi ),   r = pi / mu

    `clip_low = 1` leaves small ratios alone, as the method does.

    Source: CISPO (arXiv 2506.13585).
    """
    ratio = jnp.exp(log_importance_ratio(policy_logprob, behavior_logprob, is_action))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    return _policy_gradient_loss(
        jnp.clip(ratio, low, high),
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=ratio < low,
        clip_high=ratio > high,
        kept=jnp.ones_like(is_action),
    )


def response_log_ratio(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    mean: bool,
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> Float[Array, "*batch time"]:
    """Give every action token the log-ratio of its whole response, 0 off action tokens.

    `mean=False` sums the log-ratios of the action tokens (the ratio of the responses'
    probabilities), within +-`returns.LOG_RATIO_LIMIT`; `mean=True` averages them (the geometric
    mean of the ratios). Only action tokens count in the length.

    Source: VCPO (arXiv 2602.17616) for the sum, GSPO (arXiv 2507.18071) for the mean.
    """
    log_ratio = log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    _, total = _response_sums(log_ratio, is_action, segment_ids)
    if mean:
        _, length = _response_sums(jnp.ones_like(log_ratio), is_action, segment_ids)
        total = total / jnp.maximum(length, 1.0)
    (total,) = select_actions(is_action, total=total)
    return jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def gspo_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    clip_low: Scalar = 3e-4,
    clip_high: Scalar = 4e-4,
    reduce: Reduce = "response",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Clip one ratio a response, the geometric mean of its tokens' ratios.

        s_t  = sg(s) * pi_t / sg(pi_t),   s = exp(mean over the response of log(pi / mu))
        loss = -reduce( min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A) )

    The token form of the method: each token's gradient is `s * A_t`, for advantages that may
    differ by token.

    Source: GSPO (arXiv 2507.18071).
    """
    (advantage,) = _fixed(is_action, advantage=advantage)
    log_ratio = jax.lax.stop_gradient(
        response_log_ratio(
            policy_logprob, behavior_logprob, is_action, mean=True, segment_ids=segment_ids
        )
    )
    policy = finite_logprob(policy_logprob, is_action)
    ratio = jnp.exp(log_ratio + policy - jax.lax.stop_gradient(policy))
    objective, below, above, kept = _clipped_objective(ratio, advantage, clip_low, clip_high, None)
    return _finish_actor(
        objective,
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=below,
        clip_high=above,
        kept=kept,
    )


def vcpo_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    weight_max: Scalar = 8.0,
    reduce: Reduce = "response",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Follow the policy gradient weighted by the truncated ratio of whole responses.

        loss = -reduce( sg(min(w, weight_max)) * A * log pi )

    with w the product of `pi / mu` over the action tokens of the response. Further metrics, per
    response and before the truncation: `response_weight` and `response_weight_square`, from which
    `effective_sample_share` is formed.

    Source: VCPO (arXiv 2602.17616).
    """
    weight = jax.lax.stop_gradient(
        jnp.exp(
            response_log_ratio(
                policy_logprob, behavior_logprob, is_action, mean=False, segment_ids=segment_ids
            )
        )
    )
    loss, metrics = _policy_gradient_loss(
        jnp.minimum(weight, weight_max),
        policy_logprob,
        behavior_logprob,
        advantage,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=jnp.zeros_like(is_action),
        clip_high=weight > weight_max,
        kept=jnp.ones_like(is_action),
    )
    metrics["response_weight"] = _reduction(weight, is_action, "response", segment_ids)
    metrics["response_weight_square"] = _reduction(
        jnp.square(weight), is_action, "response", segment_ids
    )
    return loss, metrics


def effective_sample_share(
    weight: tuple[Array, Array], weight_square: tuple[Array, Array]
) -> Float[Array, ""]:
    """Return the effective sample size of weighted samples over their number, in [0, 1].

        (sum w)**2 / (n * sum w**2)

    from the (sum, count) pairs of the weights and of their squares; 1 for equal weights, 0 without
    samples.

    Source: Kish, 1965; VCPO (arXiv 2602.17616) for its use on responses.
    """
    total, count = weight
    return jnp.square(total) / jnp.maximum(count * weight_square[0], jnp.finfo(jnp.float32).tiny)


def second_moment_mask(
    log_ratio: Float[Array, "*batch time"],
    candidate: Bool[Array, "*batch time"],
    *,
    threshold: Scalar = 0.04,
) -> Bool[Array, "*batch time"]:
    """Drop the largest squared log-ratios until the mean of the remaining ones is small enough.

    Only `candidate` tokens count and can be dropped; the rest is True. Tokens of exactly the
    smallest dropped square are dropped together, so the result does not depend on the order of
    rows. The tokens of the whole call are ranked; devices gather the squares.

    Source: M2PO (arXiv 2510.01161).
    """
    (log_ratio,) = select_actions(candidate, log_ratio=log_ratio)
    square = jnp.square(log_ratio)
    ranked = jnp.sort(jnp.where(candidate, square, jnp.inf).ravel())
    # The mean of the n smallest grows with n, so the kept ones are a prefix of the ranking.
    means = jnp.cumsum(ranked) / jnp.arange(1, ranked.size + 1, dtype=jnp.float32)
    fits = means <= threshold
    first_dropped = jnp.where(fits, jnp.inf, ranked).min(initial=jnp.inf)
    # Not `square < first_dropped`: NaN must pass, a mask would hide that a model has diverged.
    return ~candidate | ~(square >= first_dropped)


def m2po_mask(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    threshold: Scalar = 0.04,
    harmful_only: bool = False,
) -> Bool[Array, "*batch time"]:
    """Tokens that M2PO trains on, ranked over the whole call; True off action tokens.

    Micro-batches would each have a cut of their own: this is for the batch that they are cut from,
    see `m2po_actor_loss`, whose arguments these are.

    Source: M2PO (arXiv 2510.01161).
    """
    (advantage,) = _fixed(is_action, advantage=advantage)
    log_ratio = jax.lax.stop_gradient(
        log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    )
    candidate = is_action & (advantage * log_ratio > 0) if harmful_only else is_action
    return second_moment_mask(log_ratio, candidate, threshold=threshold)


def m2po_actor_loss(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    threshold: Scalar = 0.04,
    harmful_only: bool = False,
    kept: Bool[Array, "*batch time"] | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Weight by the ratio and drop the tokens that make its second moment too large.

        loss = -reduce( sg(M) * r * A ),   r = pi / mu,   M = m2po_mask(pi, mu, A)

    Args:
        policy_logprob: see the module.
        behavior_logprob: see the module.
        advantage: see the module.
        is_action: see the module.
        threshold: largest mean of `(log r)**2` over the tokens kept, in square nats.
        harmful_only: only tokens that the update moves further away (A > 0 and r > 1, or A < 0 and
            r < 1) count and can be dropped, as in the authors' code, which clips where this masks.
            False ranks all tokens, as AReaL's version does.
        kept: `m2po_mask` of a batch that this call sees a part of; None ranks the tokens of this
            call, by the two settings above.
        reduce: see the module.
        segment_ids: see the module.

    Source: M2PO (arXiv 2510.01161).
    """
    if kept is None:
        kept = m2po_mask(
            policy_logprob,
            behavior_logprob,
            advantage,
            is_action,
            threshold=threshold,
            harmful_only=harmful_only,
        )
    (advantage,) = _fixed(is_action, advantage=advantage)
    log_ratio = log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    return _finish_actor(
        jnp.where(kept, jnp.exp(log_ratio), 0.0) * advantage,
        policy_logprob,
        behavior_logprob,
        is_action,
        reduce=reduce,
        segment_ids=segment_ids,
        clip_low=~kept & (log_ratio < 0),
        clip_high=~kept & (log_ratio > 0),
        kept=kept,
    )


def critic_loss(
    value: Float[Array, "*batch time"],
    value_target: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    old_value: Float[Array, "*batch time"] | None = None,
    value_clip: Scalar | None = None,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Regress values to their targets on all action tokens, those that the actor drops included.

        loss = 0.5 * reduce( max((V - G)^2, (V_old + clip(V - V_old, +-value_clip) - G)^2) )

    Without `value_clip` it is the plain squared error. Metrics: `value`, `value_target`,
    `value_error` (G - V) and the squares of the last two, from which the explained variance is
    formed; `value_clipped`, tokens whose gradient the clip removed.

    Raises:
        ValueError: `value_clip` without the `old_value` that it is measured from.

    Source: Schulman et al., 2017, as implemented in verl and AReaL (value_clip 0.5).
    """
    (value,) = select_actions(is_action, value=value)
    (value_target,) = _fixed(is_action, value_target=value_target)
    error = value - value_target
    square = jnp.square(error)
    clipped = jnp.zeros_like(is_action)
    if value_clip is not None:
        if old_value is None:
            raise ValueError(
                "value_clip needs old_value, the frozen values that it is measured from"
            )
        (old_value,) = _fixed(is_action, old_value=old_value)
        bounded = jnp.clip(value, old_value - value_clip, old_value + value_clip)
        clipped_square = jnp.square(bounded - value_target)
        clipped = clipped_square > square
        # No gradient where clipped: `bounded` is constant there.
        square = jnp.where(clipped, clipped_square, square)
    total, count = _reduction(0.5 * square, is_action, reduce, segment_ids)
    error = jax.lax.stop_gradient(error)
    metrics = _mean_over_actions(
        is_action,
        value=jax.lax.stop_gradient(value),
        value_target=value_target,
        value_target_square=jnp.square(value_target),
        value_error=-error,
        value_error_square=jnp.square(error),
        value_clipped=clipped,
    )
    metrics["loss"] = (jax.lax.stop_gradient(total), count)
    return total / jnp.maximum(count, 1.0), metrics


def sft_loss(
    logprob: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    reduce: Reduce = "token",
    segment_ids: Int[Array, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean negative log-likelihood of the tokens to imitate, in nats.

        loss = -reduce( log pi )

    Those tokens are `is_action`; what stands elsewhere counts nowhere. A token of probability 0
    gives an infinite loss and not a NaN.

    Source: maximum likelihood.
    """
    (logprob,) = select_actions(is_action, logprob=logprob)
    total, count = _reduction(-logprob, is_action, reduce, segment_ids)
    metrics = {"loss": (jax.lax.stop_gradient(total), count)}
    return total / jnp.maximum(count, 1.0), metrics
