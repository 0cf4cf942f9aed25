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

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from copc_jax import losses, returns

Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


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
    first_residual: returns.FirstResidual = "weighted",
) -> Metrics:
    """Measure both channels and their coupling over all action tokens of a training batch.

    The ideal of the bias terms is what the batch itself offers: the unclipped ratio as weight, and
    as advantage the corrected return (plain traces) whose residuals carry the unclipped ratio, so
    that its fixed point is the learner's own value. The terms are coefficients without the score:
    read their signs and relative sizes; `bias_*_magnitude` is the mean absolute value. Where a few
    ratios are huge (`effective_sample_size` near 0) they are noise. Masked tokens count
    everywhere, since statistics over retained tokens alone hide the gap that the mask makes.
    Mask and residual weights are COPC's at the given tolerances, whatever loss a run trains with:
    what that loss itself keeps is in its own metrics.
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
        micro-batches, by name: `coupling/ratio`, `coupling/mask_low` and so on. `finish` forms the
        ratios, and from the raw moments the figures that are no plain mean.
    """
    (
        policy_logprob,
        behavior_logprob,
        value,
        advantage,
        gae_advantage,
        value_target,
        reward,
        discount,
    ) = jax.lax.stop_gradient(
        returns.select_actions(
            is_action,
            policy_logprob=policy_logprob,
            behavior_logprob=behavior_logprob,
            value=value,
            advantage=advantage,
            gae_advantage=gae_advantage,
            value_target=value_target,
            reward=reward,
            discount=discount,
        )
    )
    log_ratio = returns.log_importance_ratio(policy_logprob, behavior_logprob, is_action)
    ratio = jnp.exp(log_ratio)
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
    value_error = value_target - value

    tokens = {
        "ratio": ratio,
        "ratio_square": ratio**2,
        "log_ratio": log_ratio,
        "log_ratio_square": log_ratio**2,
        # expm1(x) - x rather than ratio - 1 - x keeps its digits where the policies nearly agree.
        "kl_k3": jnp.expm1(log_ratio) - log_ratio,
        "mask_kept": kept,
        "mask_low": ratio < policy_low,
        "mask_high": ratio > policy_high,
        "rho": weight,
        "rho_clip_low": ratio < weight_low,
        "rho_clip_high": ratio > weight_high,
        "rho_deviation": deviation,
        "rho_deviation_square": deviation**2,
        "residual_magnitude": size,
        "residual_square": size**2,
        "residual_times_rho_deviation": size * deviation,
        "correction": jnp.abs(advantage - gae_advantage),
        "gae_magnitude": jnp.abs(gae_advantage),
        "sign_flip": advantage * gae_advantage < 0,
        "value_target": value_target,
        "value_target_square": value_target**2,
        "value_error": value_error,
        "value_error_square": value_error**2,
        "bias_policy": bias.policy,
        "bias_advantage": bias.advantage,
        "bias_interaction": bias.interaction,
        "bias_policy_magnitude": jnp.abs(bias.policy),
        "bias_advantage_magnitude": jnp.abs(bias.advantage),
        "bias_interaction_magnitude": jnp.abs(bias.interaction),
    }
    count = jnp.sum(is_action, dtype=jnp.float32)
    return {
        f"coupling/{name}": (
            jnp.sum(jnp.where(is_action, x, jnp.zeros_like(x)), dtype=jnp.float32),
            count,
        )
        for name, x in tokens.items()
    }


def finish(metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Form the ratios of summed (sum, count) metrics, once, on the host.

    Every pair, whatever its name, becomes sum / count, and is left out where nothing was counted.
    With the raw moments of `coupling_estimates` come four figures that are no plain mean:
    `coupling/effective_sample_size` (fraction of the tokens), `coupling/log_ratio_std`,
    `coupling/explained_variance` (of the target by the critic) and
    `coupling/residual_rho_correlation` (between |residual| and |rho - 1|). A figure that would
    divide by a variance of zero, or whose moments are not there, is left out.
    """
    mean = {
        name: float(total) / float(count)
        for name, (total, count) in jax.device_get(dict(metrics)).items()
        if float(count)
    }
    if "coupling/ratio" not in mean:
        return mean

    def moment(name: str) -> float:
        return mean[f"coupling/{name}"]

    def variance(name: str, square: str) -> float:
        spread = moment(square) - moment(name) ** 2
        # Less than this of the mean square is the rounding of float32 sums: all values are equal.
        return spread if spread > 1e-6 * moment(square) else 0.0

    mean["coupling/log_ratio_std"] = math.sqrt(variance("log_ratio", "log_ratio_square"))
    mean["coupling/effective_sample_size"] = moment("ratio") ** 2 / moment("ratio_square")
    if "coupling/value_target" in mean:
        target = variance("value_target", "value_target_square")
        if target > 0:
            unexplained = variance("value_error", "value_error_square")
            mean["coupling/explained_variance"] = 1.0 - unexplained / target
    spread = math.sqrt(
        variance("residual_magnitude", "residual_square")
        * variance("rho_deviation", "rho_deviation_square")
    )
    if spread > 0:
        covariance = moment("residual_times_rho_deviation") - moment("residual_magnitude") * moment(
            "rho_deviation"
        )
        mean["coupling/residual_rho_correlation"] = covariance / spread
    return mean


# --- A token MDP small enough to enumerate ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenMDP:
    """All responses of a small token MDP, one a row, padded to the horizon.

    A policy is a table of logits whose row is chosen by the last token, so distinct prefixes share
    parameters. With one row of logits a prefix the scores of two tokens would be orthogonal, and
    every covariance between tokens zero: nothing about them could be tested.

    Attributes:
        token: i[response, time], the sampled tokens, 0 off action tokens.
        state: i[response, time], row of the logits: 0 at the start, else 1 + last token.
        prefix: i[response, time], id of the prefix before the token; equal ids, equal prefixes.
            Ids are sorted by time.
        choice: i[response, time], id of the prefix with the token.
        is_action: bool[response, time], False past the end of a response.
        reward: f64[response, time].
        discount: f64[response, time], 0 at the last token of a response.
        actions: size of the vocabulary.
    """

    token: np.ndarray
    state: np.ndarray
    prefix: np.ndarray
    choice: np.ndarray
    is_action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    actions: int

    @property
    def logits_shape(self) -> tuple[int, int]:
        """Shape of a policy's table of logits."""
        return self.actions + 1, self.actions

    @property
    def length(self) -> np.ndarray:
        """Action tokens of each response."""
        return self.is_action.sum(axis=1)


def token_mdp(
    rng: np.random.Generator,
    *,
    horizon: int = 4,
    actions: int = 2,
    stop: bool = True,
    terminal_reward: bool = True,
    gamma: float = 1.0,
) -> TokenMDP:
    """Enumerate the responses of a random MDP.

    Args:
        rng: draws the rewards, standard normal.
        horizon: longest response, at most 6.
        actions: size of the vocabulary, at most 3.
        stop: whether token 0 ends a response, which makes its length random.
        terminal_reward: reward on the last token only; else on every token.
        gamma: discount between tokens.

    Raises:
        ValueError: if the MDP is too large to enumerate comfortably.
    """
    if not (1 <= horizon <= 6 and 2 <= actions <= 3):
        raise ValueError(f"{horizon=} must be in 1..6 and {actions=} in 2..3")
    responses: list[tuple[int, ...]] = [()]
    for _ in range(horizon):
        responses = [
            longer
            for response in responses
            for longer in (
                [response]
                if stop and response[-1:] == (0,)
                else [response + (action,) for action in range(actions)]
            )
        ]
    length = np.array([len(response) for response in responses])
    is_action = np.arange(horizon) < length[:, None]
    token = np.array([response + (0,) * (horizon - len(response)) for response in responses])
    state = np.pad(token + 1, ((0, 0), (1, 0)))[:, :-1]

    heads = [[response[:time] for time in range(horizon + 1)] for response in responses]
    by_length = sorted({head for row in heads for head in row}, key=lambda head: (len(head), head))
    ids = {head: index for index, head in enumerate(by_length)}
    known = np.array([[ids[head] for head in row] for row in heads])
    last = np.arange(horizon) == length[:, None] - 1
    reward = rng.normal(size=len(ids))[known[:, 1:]]
    return TokenMDP(
        token=token,
        state=state,
        prefix=known[:, :-1],
        choice=known[:, 1:],
        is_action=is_action,
        reward=np.where(last if terminal_reward else is_action, reward, 0.0),
        discount=np.where(is_action & ~last, gamma, 0.0),
        actions=actions,
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_logprob(mdp: TokenMDP, logits: np.ndarray) -> np.ndarray:
    """Log-probability of every token under the policy `logits`, 0 off action tokens."""
    return np.where(mdp.is_action, _log_softmax(logits)[mdp.state, mdp.token], 0.0)


def token_score(mdp: TokenMDP, logits: np.ndarray) -> np.ndarray:
    """Gradient of every token's log-probability: f64[response, time, logits.size]."""
    rows, actions = logits.shape
    in_row = np.eye(actions)[mdp.token] - np.exp(_log_softmax(logits))[mdp.state]
    score = np.eye(rows)[mdp.state][..., None] * in_row[:, :, None, :]
    return score.reshape(*mdp.token.shape, -1) * mdp.is_action[..., None]


def conditional_mean(x: np.ndarray, known: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """E[x | known] for every row: `x`, integer `known` >= 0 and `probability` are [row]."""
    total = np.bincount(known, weights=probability * x)
    return (total / np.bincount(known, weights=probability).clip(min=1e-300))[known]


def _conditional_means(x: np.ndarray, known: np.ndarray, probability: np.ndarray) -> np.ndarray:
    columns = zip(x.T, known.T, strict=True)
    return np.stack([conditional_mean(a, b, probability) for a, b in columns], axis=1)


def _discounted_sums(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """`acc[t] = x[t] + factor[t] acc[t + 1]` along time, 0 past the end."""
    accumulated = np.zeros_like(x)
    carry = np.zeros(len(x))
    for time in reversed(range(x.shape[1])):
        carry = x[:, time] + factor[:, time] * carry
        accumulated[:, time] = carry
    return accumulated


def policy_value(mdp: TokenMDP, logprob: np.ndarray) -> np.ndarray:
    """Exact value of every prefix under the policy with these token log-probabilities."""
    to_go = _discounted_sums(mdp.reward, mdp.discount)
    value = _conditional_means(to_go, mdp.prefix, np.exp(logprob.sum(axis=1)))
    return np.where(mdp.is_action, value, 0.0)


def policy_advantage(mdp: TokenMDP, logprob: np.ndarray) -> np.ndarray:
    """Exact advantage of every token under the policy with these token log-probabilities."""
    to_go = _discounted_sums(mdp.reward, mdp.discount)
    action_value = _conditional_means(to_go, mdp.choice, np.exp(logprob.sum(axis=1)))
    return np.where(mdp.is_action, action_value, 0.0) - policy_value(mdp, logprob)


def clipped_ratio(
    policy_logprob: np.ndarray,
    behavior_logprob: np.ndarray,
    eta: float,
    eps_low: float = 0.4,
    eps_high: float = 0.56,
) -> np.ndarray:
    """Residual weights: the ratio clipped to `returns.ratio_interval`."""
    low, high = returns.ratio_interval(eta, eps_low, eps_high)
    return np.clip(np.exp(policy_logprob - behavior_logprob), low, high)


def masked_ratio(
    policy_logprob: np.ndarray,
    behavior_logprob: np.ndarray,
    eta: float,
    eps_low: float = 0.4,
    eps_high: float = 0.56,
) -> np.ndarray:
    """Actor weights: the ratio where it lies in the closed `returns.ratio_interval`, else 0."""
    low, high = returns.ratio_interval(eta, eps_low, eps_high)
    ratio = np.exp(policy_logprob - behavior_logprob)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# --- The corrected-return operator, in expectation -------------------------------------------


def corrected_advantage(
    mdp: TokenMDP,
    value: np.ndarray,
    weight: np.ndarray,
    *,
    lambda_: float = 1.0,
    trace: returns.Trace = "residual",
    first_residual: returns.FirstResidual = "weighted",
) -> np.ndarray:
    """`returns.corrected_returns(...).advantage` of every response, in float64.

    Kept apart from the training operator on purpose: it is what that operator is tested against.
    """
    next_value = np.pad(value, ((0, 0), (0, 1)))[:, 1:]
    residual = mdp.reward + mdp.discount * next_value - value
    factor = mdp.discount * lambda_ * (weight if trace == "product" else 1.0)
    corrected = _discounted_sums(weight * residual, factor)
    if first_residual == "weighted":
        return corrected
    later = np.pad(corrected, ((0, 0), (0, 1)))[:, 1:]
    return residual + mdp.discount * lambda_ * later


def expected_target(
    mdp: TokenMDP,
    behavior_logprob: np.ndarray,
    value: np.ndarray,
    weight: np.ndarray,
    *,
    lambda_: float = 1.0,
    trace: returns.Trace = "residual",
) -> np.ndarray:
    """The operator: expected value target of every prefix under the behavior policy.

    T V(s_t) = V(s_t) + E[sum_l (gamma lambda)^l c_{t..t+l-1} rho_{t+l} delta_{t+l} | s_t], with
    c = 1 for trace "residual" and c = rho for "product".

    Source: Prop. 1.
    """
    corrected = corrected_advantage(mdp, value, weight, lambda_=lambda_, trace=trace)
    probability = np.exp(behavior_logprob.sum(axis=1))
    expected = _conditional_means(corrected, mdp.prefix, probability)
    return value + np.where(mdp.is_action, expected, 0.0)


def mean_weight(mdp: TokenMDP, behavior_logprob: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Z of every prefix, the mean weight under the behavior policy; 1 off action tokens."""
    probability = np.exp(behavior_logprob.sum(axis=1))
    return np.where(mdp.is_action, _conditional_means(weight, mdp.prefix, probability), 1.0)


def fixed_point(mdp: TokenMDP, behavior_logprob: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Value of the policy that the operator evaluates: behavior times weight, normalized.

    Source: Prop. 1.
    """
    normalized = weight / mean_weight(mdp, behavior_logprob, weight)
    return policy_value(mdp, behavior_logprob + np.log(normalized))


def operator_matrix(
    mdp: TokenMDP,
    behavior_logprob: np.ndarray,
    weight: np.ndarray,
    *,
    lambda_: float = 1.0,
    trace: returns.Trace = "residual",
) -> tuple[np.ndarray, np.ndarray]:
    """The operator as `T v = matrix @ v + offset` over the values of the distinct prefixes.

    Prefixes come in time order, so the matrix is upper triangular; its eigenvalues are 1 - Z.
    """
    _, first, back = np.unique(mdp.prefix[mdp.is_action], return_index=True, return_inverse=True)

    def apply(prefix_value: np.ndarray) -> np.ndarray:
        value = np.zeros(mdp.prefix.shape)
        value[mdp.is_action] = prefix_value[back]
        target = expected_target(mdp, behavior_logprob, value, weight, lambda_=lambda_, trace=trace)
        return target[mdp.is_action][first]

    offset = apply(np.zeros(len(first)))
    columns = [apply(unit) - offset for unit in np.eye(len(first))]
    return np.stack(columns, axis=1), offset


def target_error(
    mdp: TokenMDP,
    behavior_logprob: np.ndarray,
    value: np.ndarray,
    weight: np.ndarray,
    *,
    lambda_: float = 1.0,
) -> np.ndarray:
    """T V - V* for any critic V, from its own error e = V - V* alone (plain traces).

    E[sum_l (gamma lambda)^l ((1 - rho_{t+l}) e_{t+l} - gamma (lambda - rho_{t+l}) e_{t+l+1})]
    with V* the fixed point. A constant offset of the critic therefore stays bounded.
    """
    error = value - fixed_point(mdp, behavior_logprob, weight)
    next_error = np.pad(error, ((0, 0), (0, 1)))[:, 1:]
    term = (1 - weight) * error - mdp.discount * (lambda_ - weight) * next_error
    total = _discounted_sums(term, mdp.discount * lambda_)
    probability = np.exp(behavior_logprob.sum(axis=1))
    return np.where(mdp.is_action, _conditional_means(total, mdp.prefix, probability), 0.0)


# --- Bias and variance of the gradient -------------------------------------------------------


def _row_probability(probability: np.ndarray | None, rows: int) -> np.ndarray:
    return np.full(rows, 1 / rows) if probability is None else probability


class VarianceTerms(NamedTuple):
    """Trace covariances between token contributions, f64[time, time], split by what is known.

    Attributes:
        advantage: what the noise of the advantage estimate adds, once the later of the two tokens
            and all before it are known.
        signal: covariance of what can be foreseen then.
    """

    advantage: np.ndarray
    signal: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The trace covariance of every pair of tokens; its sum is that of their sum."""
        return self.advantage + self.signal


def variance_decomposition(
    weight: Float[np.ndarray, "row time"],
    advantage: Float[np.ndarray, "row time"],
    score: Float[np.ndarray, "row time parameter"],
    known: Int[np.ndarray, "row time"],
    probability: Float[np.ndarray, " row"] | None = None,
) -> VarianceTerms:
    """Split the covariances of z_t = weight_t advantage_t score_t by the law of total variance.

    With H_t all that is known once token t is drawn, and m = E[advantage | H_t]:

        tr Cov(z_t) = E[weight_t^2 |score_t|^2 Var(advantage_t | H_t)] + tr Cov(weight_t m score_t)

    and for t < u the same with H_u. Exact for enumerated rows with their probabilities, and for
    samples as the statement about their empirical distribution. `weight` and `score` must be
    functions of H_t. A factor 1 / length is not: it belongs into `advantage`.

    Args:
        weight: 0 off action tokens.
        advantage: estimate of each token, any finite number off action tokens.
        score: gradient of each token's log-probability, or projections of it.
        known: id >= 0 of H_t; rows with equal ids at t agree in everything up to token t.
        probability: of each row, sums to 1; uniform if None.

    Source: Prop. 3, and B.3 for the pairs.
    """
    rows, time = weight.shape
    probability = _row_probability(probability, rows)
    noise, signal = np.zeros((time, time)), np.zeros((time, time))
    for later in range(time):
        expected = np.stack(
            [conditional_mean(column, known[:, later], probability) for column in advantage.T], 1
        )
        surprise = weight * (advantage - expected)
        foreseen = (weight * expected)[..., None] * score
        foreseen = foreseen - np.einsum("n,ntp->tp", probability, foreseen)
        for earlier in range(later + 1):
            pair = [earlier, later]
            product = surprise[:, pair].prod(1) * (score[:, earlier] * score[:, later]).sum(-1)
            noise[pair, pair[::-1]] = probability @ product
            signal[pair, pair[::-1]] = probability @ foreseen[:, pair].prod(1).sum(-1)
    return VarianceTerms(noise, signal)


class ResponseVariance(NamedTuple):
    """Trace covariance of a response's gradient, counted in two ways with one total.

    Attributes:
        pairs: f64[time, time], trace covariance of every pair of tokens; the sum is the total.
        given_length: part left when the length is known.
        between_lengths: variance of what the length alone foretells.
    """

    pairs: np.ndarray
    given_length: float
    between_lengths: float


def response_variance(
    contribution: Float[np.ndarray, "row time parameter"],
    length: Int[np.ndarray, " row"],
    probability: Float[np.ndarray, " row"] | None = None,
) -> ResponseVariance:
    """Trace covariance of X = sum_t contribution_t over responses of random length.

    Args:
        contribution: of each token, zero past the end of the response, with the factor 1 / length
            in it where the loss averages over responses.
        length: of each response.
        probability: of each row, sums to 1; uniform if None.

    Source: B.3.
    """
    probability = _row_probability(probability, len(length))
    centered = contribution - np.einsum("n,ntp->tp", probability, contribution)
    pairs = np.einsum("n,ntp,nup->tu", probability, centered, centered)
    whole = centered.sum(axis=1)
    foretold = np.stack([conditional_mean(x, length, probability) for x in whole.T], axis=1)
    return ResponseVariance(
        pairs=pairs,
        given_length=float(probability @ ((whole - foretold) ** 2).sum(-1)),
        between_lengths=float(probability @ (foretold**2).sum(-1)),
    )


def group_average_error(
    bias: Float[np.ndarray, " parameter"],
    covariance: Float[np.ndarray, "sample sample"],
    groups: int,
) -> float:
    """Mean squared error of a gradient averaged over prompt groups.

    E|g_hat - g|^2 = |bias|^2 + (1 / groups) (1 / K^2) sum_{k,l} tr Cov(X_k, X_l)

    The bias is squared after its three terms are added: that is why neither tolerance can be tuned
    on its own.

    Args:
        bias: the sum of the three terms of `bias_decomposition`, in expectation.
        covariance: trace covariances of the K responses of one group, whatever their dependence.
        groups: independent groups in the batch.

    Source: Cor. 1.
    """
    return float(bias @ bias + covariance.mean() / groups)


class GradientError(NamedTuple):
    """Exact error of one response's gradient estimate.

    Attributes:
        ideal: f64[parameter], the ideal gradient.
        bias: three vectors f64[parameter].
        variance: trace covariance of one response's estimate.
    """

    ideal: np.ndarray
    bias: BiasTerms
    variance: float

    def squared_error(self, groups: int = 1) -> float:
        """Mean squared error of the average over this many independent responses."""
        return group_average_error(self.bias.total, np.array([[self.variance]]), groups)


def gradient_error(
    mdp: TokenMDP,
    policy_logits: np.ndarray,
    behavior_logits: np.ndarray,
    value: np.ndarray,
    *,
    eta_policy: float = 0.5,
    eta_advantage: float = 0.5,
    eps_low: float = 0.4,
    eps_high: float = 0.56,
    lambda_: float = 1.0,
    trace: returns.Trace = "residual",
    first_residual: returns.FirstResidual = "weighted",
    ideal: Literal["token", "prefix"] = "token",
    reduce: Literal["token", "response"] = "response",
) -> GradientError:
    """Enumerate the bias and variance of COPC's actor gradient for both tolerances.

    Args:
        mdp: the responses.
        policy_logits: the learner.
        behavior_logits: what sampled the responses.
        value: critic, f64[response, time], as from `policy_value`.
        eta_policy: tolerance of the ratio mask.
        eta_advantage: tolerance of the residual weights.
        eps_low: lower width of both intervals at tolerance 1.
        eps_high: upper width of both intervals at tolerance 1.
        lambda_: trace decay.
        trace: as in `returns.corrected_returns`.
        first_residual: as in `returns.corrected_returns`.
        ideal: weight of the ideal gradient, the token's own ratio or the product up to it.
        reduce: "response" averages each response over its tokens; "token" divides by the expected
            length, the limit of a large batch.
    """
    policy, behavior = token_logprob(mdp, policy_logits), token_logprob(mdp, behavior_logits)
    probability = np.exp(behavior.sum(axis=1))
    ratio = np.exp(policy - behavior)
    weight = masked_ratio(policy, behavior, eta_policy, eps_low, eps_high)
    advantage = corrected_advantage(
        mdp,
        value,
        clipped_ratio(policy, behavior, eta_advantage, eps_low, eps_high),
        lambda_=lambda_,
        trace=trace,
        first_residual=first_residual,
    )
    ideal_weight = ratio if ideal == "token" else np.cumprod(ratio, axis=1)
    ideal_advantage = policy_advantage(mdp, policy)
    length = mdp.length if reduce == "response" else probability @ mdp.length * np.ones(len(ratio))
    scaled_score = token_score(mdp, policy_logits) / length[:, None, None]

    def expectation(coefficient: np.ndarray) -> np.ndarray:
        return np.einsum("n,nt,ntp->p", probability, coefficient, scaled_score)

    terms = bias_decomposition(weight, ideal_weight, advantage, ideal_advantage)
    contribution = (weight * advantage)[..., None] * scaled_score
    return GradientError(
        ideal=expectation(ideal_weight * ideal_advantage),
        bias=BiasTerms(*(expectation(term) for term in terms)),
        variance=float(response_variance(contribution, mdp.length, probability).pairs.sum()),
    )
