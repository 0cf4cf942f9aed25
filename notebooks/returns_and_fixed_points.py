# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Corrected returns and what they converge to
#
# A server samples with an old policy `mu`, the learner has moved on to `pi`. COPC's advantage
# channel weights each temporal-difference residual by the ratio `pi / mu`, clipped on both sides:
#
# $$G_t = V_t + \sum_l (\gamma\lambda)^l \rho_{t+l} \delta_{t+l}, \qquad
#   \rho = \mathrm{clip}(\pi/\mu,\ 1 - \eta_A \epsilon_l,\ 1 + \eta_A \epsilon_h)$$
#
# This notebook looks at one response, at traces over long responses, and then at the exact
# expected operator of a token MDP small enough to enumerate: which policy's value is its fixed
# point, how fast iteration gets there, and what a wrong critic costs.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from copc_jax import analysis, returns

rng = np.random.default_rng(0)

# %% [markdown]
# ## One response
#
# Ten tokens, of which three are tool text. They are skipped: they cost no discount and no lambda.

# %%
is_action = jnp.asarray([1, 1, 1, 0, 0, 0, 1, 1, 1, 1], bool)
value = jnp.asarray([0.4, 0.45, 0.3, 0, 0, 0, 0.6, 0.65, 0.5, 0.8])
reward = jnp.zeros(10).at[-1].set(1.0)
discount = jnp.ones(10).at[-1].set(0.0)
ratio = jnp.asarray([1.0, 1.1, 0.5, 1, 1, 1, 1.9, 0.9, 1.2, 1.05])

residual = returns.gae(reward, value, discount, is_action, lambda_=0.0).advantage
plain = returns.gae(reward, value, discount, is_action)
corrected = returns.copc_returns(reward, value, discount, ratio, is_action)
low, high = returns.ratio_interval(0.5)

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
time = np.arange(10)
left.bar(time, residual, color="0.7", label="residual")
left.bar(time, jnp.clip(ratio, low, high) * residual, width=0.4, label="weighted residual")
left.set(xlabel="token (3 to 5 are tool text)", title="each residual is weighted once")
left.legend()
right.plot(time[is_action], plain.value_target[is_action], "o-", color="0.5", label="GAE")
right.plot(time[is_action], corrected.value_target[is_action], "o-", label="corrected")
right.plot(time[is_action], value[is_action], ":", color="k", label="critic")
right.set(xlabel="token", title="value target")
right.legend()
figure.tight_layout()

# %%
assert (low, high) == (0.8, 1.28)
uncorrected = returns.copc_returns(reward, value, discount, ratio, is_action, eta_advantage=0.0)
np.testing.assert_allclose(uncorrected.advantage, plain.advantage, atol=1e-6)
np.testing.assert_allclose(plain.value_target[is_action], 1.0, atol=1e-6)  # lambda = gamma = 1

# %% [markdown]
# ## Why the traces are plain
#
# Ratios of nearly equal policies still differ from 1: at sigma = 0.05 the log ratio is that of bf16
# noise between trainer and server. What part of a reward at the end reaches a token far before it?
# With a critic of zeros the advantage of token `t` is exactly that part.

# %%
length, draws, sigma = 2000, 64, 0.05
log_ratio = sigma * rng.normal(size=(draws, length)) - sigma**2 / 2  # mean ratio 1
noisy = jnp.asarray(np.exp(log_ratio), jnp.float32)
zeros = jnp.zeros((draws, length))
arguments = (zeros.at[:, -1].set(1.0), zeros, jnp.ones_like(zeros).at[:, -1].set(0.0), noisy)
everywhere = jnp.ones((draws, length), bool)
credit = {
    "residual weights (default)": returns.copc_returns(*arguments, everywhere),
    "product of clipped ratios": returns.copc_returns(*arguments, everywhere, trace="product"),
    "V-trace": returns.vtrace(*arguments, everywhere, policy_rho_max=jnp.inf),
}

figure, axes = plt.subplots(figsize=(7, 3.6))
distance = length - np.arange(length)
for name, result in credit.items():
    part = np.asarray(result.value_target)
    axes.plot(distance, np.median(part, axis=0), label=name)
    axes.fill_between(distance, *np.quantile(part, [0.1, 0.9], axis=0), alpha=0.2)
axes.set(xscale="log", yscale="log", ylim=(1e-6, 30), xlabel="tokens before the reward")
axes.set(ylabel="credit", title=f"credit that arrives, sigma = {sigma}")
axes.legend()
figure.tight_layout()

# %%
median = {name: np.median(result.value_target, axis=0) for name, result in credit.items()}
assert 0.75 < median["residual weights (default)"][0] < 1.3
assert median["V-trace"][-200] < 0.05 and median["V-trace"][0] < 1e-6
spread = np.quantile(np.asarray(credit["product of clipped ratios"].value_target)[:, 0], [0.1, 0.9])
assert spread[1] / spread[0] > 50, spread

# %% [markdown]
# ## The fixed point
#
# On a token MDP whose responses can be enumerated the expected operator is a matrix. Its fixed
# point is the value of `mu * rho` normalized: the server's policy at eta 0, the learner's with
# exact ratios, and a policy between them when the ratios are clipped (whose value need not lie
# between theirs).

# %%
mdp = analysis.token_mdp(rng, horizon=5, actions=3)
behavior_logits = rng.normal(size=mdp.logits_shape)
policy_logits = behavior_logits + 0.6 * rng.normal(size=mdp.logits_shape)
policy = analysis.token_logprob(mdp, policy_logits)
behavior = analysis.token_logprob(mdp, behavior_logits)
exact_ratio = np.exp(policy - behavior)
print(f"{len(mdp.token)} responses, {len(np.unique(mdp.prefix[mdp.is_action]))} prefixes")


def weight_at(eta):
    """Clipped ratios, or exact ones where `eta` is None."""
    return exact_ratio if eta is None else analysis.clipped_ratio(policy, behavior, eta)


def distance_to(star, value):
    """Largest error over the prefixes."""
    return np.abs(value - star)[mdp.is_action].max()


etas = np.linspace(0, 2.4, 25)
start = [analysis.fixed_point(mdp, behavior, weight_at(eta))[0, 0] for eta in etas]
of_server, of_learner = (analysis.policy_value(mdp, x)[0, 0] for x in (behavior, policy))

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.6))
left.plot(etas, start)
left.axhline(of_server, color="0.5", linestyle="--", label="server")
left.axhline(of_learner, color="k", linestyle=":", label="learner")
left.set(xlabel="eta_advantage", ylabel="value of the prompt", title="fixed point")
left.legend()

critic = np.where(mdp.is_action, rng.normal(size=mdp.prefix.max() + 1)[mdp.prefix], 0.0)
for eta in (0.0, 0.25, 0.5, 1.0, None):
    weight, errors, current = weight_at(eta), [], critic
    star = analysis.fixed_point(mdp, behavior, weight)
    for _ in range(30):
        errors.append(distance_to(star, current))
        current = analysis.expected_target(mdp, behavior, current, weight, lambda_=0.9)
    middle.semilogy(np.maximum(errors, 1e-16), label="exact ratios" if eta is None else f"{eta=}")
    if eta in (0.0, None):
        # Z = 1: the matrix is nilpotent, so as many sweeps as the horizon are enough.
        assert errors[5] < 1e-12
    assert errors[-1] < 1e-8
middle.set(xlabel="sweeps", ylabel="largest error", title="iteration from a random critic")
middle.legend()

matrix, offset = analysis.operator_matrix(mdp, behavior, weight_at(0.5), lambda_=0.9)
deviation = 1 - analysis.mean_weight(mdp, behavior, weight_at(0.5))
_, first = np.unique(mdp.prefix[mdp.is_action], return_index=True)
right.plot(deviation[mdp.is_action][first], np.diag(matrix), ".")
limit = 1.1 * np.abs(np.diag(matrix)).max()
right.plot([-limit, limit], [-limit, limit], color="0.7", zorder=0)
right.set(xlabel="1 - Z of the prefix", ylabel="eigenvalue", title="spectrum at eta 0.5")
figure.tight_layout()

# %%
assert np.isclose(start[0], of_server) and not np.isclose(start[12], of_server)
assert np.isclose(analysis.fixed_point(mdp, behavior, exact_ratio)[0, 0], of_learner)
np.testing.assert_allclose(np.diag(matrix), deviation[mdp.is_action][first], atol=1e-12)
assert np.abs(np.tril(matrix, -1)).max() < 1e-12 and limit < 1

# %% [markdown]
# ## What a wrong critic costs
#
# Plain traces are not unbiased under a wrong critic. Their error has a closed form: only
# differences of the critic's error between neighboring tokens enter, each times `1 - rho`. A
# constant offset does not add up along the response. And a critic that knows the *server's*
# value, which is what a critic trained on stale data learns, leaves an error of second order in
# the change of policy, where GAE's is of first.

# %%
direction = rng.normal(size=mdp.logits_shape)
steps = np.geomspace(0.01, 0.6, 12)
server_value = analysis.policy_value(mdp, behavior)
corrected_error, plain_error = [], []
for step in steps:
    learner = analysis.token_logprob(mdp, behavior_logits + step * direction)
    ideal = analysis.policy_value(mdp, learner)
    target = analysis.expected_target(mdp, behavior, server_value, np.exp(learner - behavior))
    corrected_error.append(distance_to(ideal, target))
    plain_error.append(distance_to(ideal, server_value))

offsets = np.linspace(-5, 5, 11)
weight = weight_at(0.5)
star = analysis.fixed_point(mdp, behavior, weight)
shifted = [
    analysis.expected_target(mdp, behavior, star + offset * mdp.is_action, weight) - star
    for offset in offsets
]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
left.loglog(steps, plain_error, "o-", color="0.5", label="GAE: first order")
left.loglog(steps, corrected_error, "o-", label="corrected: second order")
left.set(xlabel="change of the logits", ylabel="largest error of the target")
left.legend()
right.plot(offsets, [np.abs(error)[mdp.is_action].max() for error in shifted], "o-")
right.plot(offsets, np.abs(offsets), color="0.7", label="error of the critic")
right.set(xlabel="offset of the critic", ylabel="largest error of the target")
right.legend()
figure.tight_layout()

# %%
slope = np.polyfit(np.log(steps[:6]), np.log(np.stack([plain_error, corrected_error], 1)[:6]), 1)[0]
np.testing.assert_allclose(slope, [1, 2], atol=0.1)
for offset, error in zip(offsets, shifted, strict=True):
    predicted = analysis.target_error(mdp, behavior, star + offset * mdp.is_action, weight)
    np.testing.assert_allclose(predicted, error, atol=1e-10)
    assert np.abs(error).max() <= 0.28 * abs(offset) + 1e-10
