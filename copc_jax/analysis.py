"""The two correction channels, measured: on-line on a batch, exactly on a small token MDP.

The policy channel replaces the ideal ratio of a token by a masked one, the advantage channel
replaces the ideal advantage by an estimate. Their errors meet in a product, so the bias of the
gradient has three terms and cannot be read off one channel at a time:

    w_hat A_hat - w A = (w_hat - w) A + w (A_hat - A) + (w_hat - w) (A_hat - A)

`coupling_estimates` and `finish` are for training. Everything about `TokenMDP` is numpy in float64
whatever JAX's settings are: it enumerates all responses, so its figures carry no sampling error.

Source: COPC (arXiv 2610.09597), Props. 1-3, Cor. 1 and appendix B.3; the formulas are this
repository's reading of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from copc_jax import losses, returns

Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
Trace = Literal["residual", "product"]
FirstResidual = Literal["weighted", "unweighted"]


class BiasTerms(NamedTuple):
    """The terms of `w_hat A_hat - w A`; their sum is exact for every token, not in mean only."""

    policy: Any
    advantage: Any
    interaction: Any

    @property
    def total(self) -> Any:
        """The whole error."""
        return self.policy + self.advantage + self.interaction


def bias_decomposition(
    weight: Float[Array | np.ndarray, "*batch time"],
    ideal_weight: Float[Array | np.ndarray, "*batch time"],
    advantage: Float[Array | np.ndarray, "*batch time"],
    ideal_advantage: Float[Array | np.ndarray, "*batch time"],
) -> BiasTerms:
    """Split the error of each token's policy-gradient coefficient into its three terms.

    Multiply by the score (the gradient of the token's log-probability) and average for the bias of
    the gradient. The arithmetic is elementwise and keeps the type and precision of its arguments.

    Args:
        weight: what the loss multiplies the advantage by, such as mask times ratio.
        ideal_weight: the ratio of this token (token ideal: the best that a token-level method can
            reach) or the product of the ratios up to it (prefix ideal: the true gradient).
        advantage: the estimate that the loss uses.
        ideal_advantage: advantage under the learner's policy.

    Source: Prop. 2.
    """
    weight_error = weight - ideal_weight
    advantage_error = advantage - ideal_advantage
    return BiasTerms(
        policy=weight_error * ideal_advantage,
        advantage=ideal_weight * advantage_error,
        interaction=weight_error * advantage_error,
    )


def coupling_estimates(
    policy_logprob: Float[Array, "*batch time"],
    behavior_logprob: Float[Array, "*batch time"],
    value: Float[Array, "*batch time"],
    advantage: Float[Array, "*batch time"],
    gae_advantage: Float[Array, "*batch time"],
    value_target: Float[Array, "*batch time"],
    is_action: Bool[Array, "*batch time"],
    *,
    reward: Float[Array, "*batch time"],
    discount: Float[Array, "*batch time"],
    eta_policy: float = 0.5,
    eta_advantage: float = 0.5,
    eps_low: float = 0.4,
    eps_high: float = 0.56,
    lambda_: float = 1.0,
    first_residual: FirstResidual = "weighted",
) -> Metrics:
    """Measure both channels and their coupling over all action tokens of a training batch.

    The ideal of the bias terms is what the batch itself offers: the unclipped ratio as weight, and
    as advantage the corrected return (plain traces) whose residuals carry the unclipped ratio, so
    that its fixed point is the learner's own value. The terms are coefficients without the score:
    read their signs and relative sizes; `bias/*_magnitude` is the mean absolute value. Where a few
    ratios are huge (`ratio/effective_sample_size` near 0) they are noise. Masked tokens count
    everywhere, since statistics over retained tokens alone hide the gap that the mask makes.
    No gradient flows through the result, and what stands off action tokens does not matter.

    Args:
        policy_logprob: of the learner before this update, in nats.
        behavior_logprob: of the server, in nats.
        value: frozen critic.
        advantage: as the return operator gave it, before whitening.
        gae_advantage: of `returns.gae` with the same `lambda_`, before whitening.
        value_target: critic target.
        is_action: tokens that count.
        reward: as given to the return operator.
        discount: as given to the return operator.
        eta_policy: tolerance of the ratio mask.
        eta_advantage: tolerance of the residual weights.
        eps_low: lower width of both intervals at tolerance 1.
        eps_high: upper width of both intervals at tolerance 1.
        lambda_: trace decay of the return operator.
        first_residual: as given to the return operator.

    Returns:
        Pairs (sum, count of action tokens), float32 scalars, which add over devices and
        micro-batches. `finish` forms the ratios, and from the raw moments the figures that are no
        plain mean.
    """
    arrays = (
        policy_logprob,
        behavior_logprob,
        value,
        advantage,
        gae_advantage,
        value_target,
        reward,
        discount,
    )
    (
        policy_logprob,
        behavior_logprob,
        value,
        advantage,
        gae_advantage,
        value_target,
        reward,
        discount,
    ) = (
        jax.lax.stop_gradient(jnp.where(is_action, x, jnp.zeros_like(x)).astype(jnp.float32))
        for x in arrays
    )
    ratio = returns.importance_ratio(policy_logprob, behavior_logprob, is_action)
    # By way of the ratio, which is finite by construction; an engine's log-probs need not be.
    log_ratio = jnp.log(ratio)
    policy_low, policy_high = returns.ratio_interval(eta_policy, eps_low, eps_high)
    weight_low, weight_high = returns.ratio_interval(eta_advantage, eps_low, eps_high)
    kept = losses.ratio_mask(ratio, eta_policy, eps_low, eps_high)
    weight = jnp.clip(ratio, weight_low, weight_high)
    residual = returns.gae(reward, value, discount, is_action, lambda_=0.0).advantage
    reference = returns.corrected_returns(
        reward, value, discount, ratio, is_action, lambda_=lambda_, first_residual=first_residual
    ).advantage
    bias = bias_decomposition(jnp.where(kept, ratio, 0.0), ratio, advantage, reference)
    size, deviation = jnp.abs(residual), jnp.abs(weight - 1)
    target_error = value_target - value

    tokens = {
        "ratio/mean": ratio,
        "ratio/square": ratio**2,
        "log_ratio/mean": log_ratio,
        "log_ratio/square": log_ratio**2,
        # expm1(x) - x rather than ratio - 1 - x keeps its digits where the policies nearly agree.
        "kl/k3": jnp.expm1(log_ratio) - log_ratio,
        "mask/kept": kept,
        "mask/low": ratio < policy_low,
        "mask/high": ratio > policy_high,
        "rho/mean": weight,
        "rho/clip_low": ratio < weight_low,
        "rho/clip_high": ratio > weight_high,
        "rho/deviation": deviation,
        "rho/deviation_square": deviation**2,
        "residual/magnitude": size,
        "residual/square": size**2,
        "residual/magnitude_times_rho_deviation": size * deviation,
        "advantage/correction": jnp.abs(advantage - gae_advantage),
        "advantage/gae_magnitude": jnp.abs(gae_advantage),
        "advantage/sign_flip": advantage * gae_advantage < 0,
        "critic/target": value_target,
        "critic/target_square": value_target**2,
        "critic/error": target_error,
        "critic/error_square": target_error**2,
        "bias/policy": bias.policy,
        "bias/advantage": bias.advantage,
        "bias/interaction": bias.interaction,
        "bias/policy_magnitude": jnp.abs(bias.policy),
        "bias/advantage_magnitude": jnp.abs(bias.advantage),
        "bias/interaction_magnitude": jnp.abs(bias.interaction),
    }
    count = jnp.sum(is_action, dtype=jnp.float32)
    return {
        name: (jnp.sum(jnp.where(is_action, x, jnp.zeros_like(x)), dtype=jnp.float32), count)
        for name, x in tokens.items()
    }


def finish(metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Form the ratios of summed (sum, count) metrics, once, on the host.

    Every pair becomes sum / count, nan where nothing was counted. Where the raw moments of
    `coupling_estimates` are present, four figures that are no plain mean are added:
    `ratio/effective_sample_size` (fraction of the tokens), `log_ratio/std`,
    `critic/explained_variance` (of the target by the critic) and `residual/rho_correlation`
    (between |residual| and |rho - 1|); nan where a variance that they divide by is zero.
    """
    mean = {
        name: float(total) / float(count) if float(count) else math.nan
        for name, (total, count) in jax.device_get(dict(metrics)).items()
    }

    def variance(name: str, square: str) -> float:
        # Rounding of the sums can leave a tiny negative number where all values are equal.
        return max(mean[square] - mean[name] ** 2, 0.0)

    def ratio(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator else math.nan

    if "ratio/square" in mean:
        mean["ratio/effective_sample_size"] = ratio(mean["ratio/mean"] ** 2, mean["ratio/square"])
    if "log_ratio/square" in mean:
        mean["log_ratio/std"] = math.sqrt(variance("log_ratio/mean", "log_ratio/square"))
    if "critic/target_square" in mean:
        mean["critic/explained_variance"] = 1.0 - ratio(
            variance("critic/error", "critic/error_square"),
            variance("critic/target", "critic/target_square"),
        )
    if "residual/magnitude_times_rho_deviation" in mean:
        covariance = (
            mean["residual/magnitude_times_rho_deviation"]
            - mean["residual/magnitude"] * mean["rho/deviation"]
        )
        mean["residual/rho_correlation"] = ratio(
            covariance,
            math.sqrt(
                variance("residual/magnitude", "residual/square")
                * variance("rho/deviation", "rho/deviation_square")
            ),
        )
    return mean
