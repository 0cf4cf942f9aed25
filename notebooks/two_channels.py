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
# # Two channels, one error
#
# COPC corrects staleness in two places: `eta_policy` sets which ratios the actor keeps,
# `eta_advantage` how far residuals are weighted toward the learner. The gradient multiplies the
# two, so its error is
#
# $$\hat w \hat A - w A = (\hat w - w) A + w (\hat A - A) + (\hat w - w)(\hat A - A)$$
#
# and its square mixes all three terms. Everything here is enumerated on random token MDPs: there
# is no sampling error in any figure. The question is whether the two tolerances can be tuned one
# at a time.

# %%
import matplotlib.pyplot as plt
import numpy as np

from copc_jax import analysis

RESPONSES = 64  # batch over which the gradient is averaged


def problem(seed, gap=0.4):
    """A random MDP whose critic knows the server's value, as one trained on stale data would."""
    rng = np.random.default_rng(seed)
    mdp = analysis.token_mdp(rng, horizon=5, actions=3)
    server = rng.normal(size=mdp.logits_shape)
    learner = server + gap * rng.normal(size=mdp.logits_shape)
    return mdp, learner, server, analysis.policy_value(mdp, analysis.token_logprob(mdp, server))


def surface(instance, eta_policy, eta_advantage):
    """Error of every pair of tolerances, [policy, advantage]."""
    return [
        [
            analysis.gradient_error(*instance, eta_policy=policy, eta_advantage=advantage)
            for advantage in eta_advantage
        ]
        for policy in eta_policy
    ]


# %% [markdown]
# ## The joint error surface of one MDP

# %%
etas = np.linspace(0, 2, 21)
errors = surface(problem(5), etas, etas)
squared_bias = np.array([[error.bias.total @ error.bias.total for error in row] for row in errors])
variance = np.array([[error.variance / RESPONSES for error in row] for row in errors])
total = np.array([[error.squared_error(RESPONSES) for error in row] for row in errors])
best = np.unravel_index(total.argmin(), total.shape)

figure, axes = plt.subplots(1, 3, figsize=(14, 4), sharey=True)
tables = {"squared bias": squared_bias, f"variance / {RESPONSES}": variance, "mean squared": total}
for axis, (title, table) in zip(axes, tables.items(), strict=True):
    image = axis.pcolormesh(etas, etas, table, shading="nearest")
    figure.colorbar(image, ax=axis)
    axis.set(xlabel="eta_advantage", title=title)
axes[0].set_ylabel("eta_policy")
axes[2].plot(etas[total.argmin(1)], etas, "w.-", label="best eta_advantage of the row")
axes[2].plot(etas[best[1]], etas[best[0]], "r*", markersize=14, label="best pair")
axes[2].legend(loc="upper right")
figure.tight_layout()

# %%
np.testing.assert_allclose(total, squared_bias + variance)
assert len(set(total.argmin(1))) > 3, "the best eta_advantage should move with eta_policy"

# %% [markdown]
# ## Where the bias comes from
#
# Left: the size of each term along the diagonal. Right: the squared bias split into the squares
# of the terms and the products between them. The products are what tuning one channel at a time
# cannot see.

# %%
diagonal = [errors[i][i].bias for i in range(len(etas))]
pairs = [("policy", "advantage"), ("policy", "interaction"), ("advantage", "interaction")]
products = {
    pair: np.array([2 * getattr(bias, pair[0]) @ getattr(bias, pair[1]) for bias in diagonal])
    for pair in pairs
}
squares = sum(np.array([term @ term for term in terms]) for terms in zip(*diagonal, strict=True))

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8))
for name in analysis.BiasTerms._fields:
    left.plot(etas, [np.linalg.norm(getattr(bias, name)) for bias in diagonal], label=name)
left.plot(
    etas, [np.linalg.norm(bias.total) for bias in diagonal], "k--", label="all three together"
)
left.set(xlabel="both tolerances", ylabel="length of the bias", ylim=(0, None))
left.legend()
right.plot(etas, squares, "k", label="squares")
for pair, product in products.items():
    right.plot(etas, product, label=" x ".join(pair))
right.axhline(0, color="0.8", zorder=0)
right.set(xlabel="both tolerances", ylabel="part of the squared bias")
right.legend()
figure.tight_layout()

# %%
np.testing.assert_allclose(squares + sum(products.values()), np.diag(squared_bias), atol=1e-12)

# %% [markdown]
# ## Signs of the interaction over many MDPs
#
# Left: is a larger `eta_advantage` (0.75 rather than 0.25) better? The answer for a tight mask
# against the answer for a loose one: points off the two diagonal quadrants change their mind.
# Right: the cosine between the interaction and the policy term of the bias, at (0.5, 0.5): it may
# cancel or add.

# %%
pair = (0.25, 0.75)
change, cosine, coupling = [], [], []
for seed in range(60):
    instance = problem(seed)
    table = np.array(
        [[e.squared_error(RESPONSES) for e in row] for row in surface(instance, pair, pair)]
    )
    change.append((table[:, 1] - table[:, 0]) / table.max(axis=1))
    coupling.append((table[0, 0] - table[0, 1] - table[1, 0] + table[1, 1]) / table.mean())
    bias = analysis.gradient_error(*instance).bias
    lengths = np.linalg.norm(bias.policy) * np.linalg.norm(bias.interaction)
    cosine.append(bias.policy @ bias.interaction / max(lengths, 1e-12))
change, cosine, coupling = np.array(change), np.array(cosine), np.array(coupling)
reversed_sign = change[:, 0] * change[:, 1] < 0

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
for chosen, color, name in ((~reversed_sign, "0.5", "same"), (reversed_sign, "C3", "reversed")):
    left.plot(*change[chosen].T, "o", color=color, label=f"{name}: {chosen.sum()}")
left.axhline(0, color="0.8", zorder=0)
left.axvline(0, color="0.8", zorder=0)
left.set_xscale("symlog", linthresh=1e-3)
left.set_yscale("symlog", linthresh=1e-3)
left.set(xlabel="relative change of the error, eta_policy 0.25", ylabel="eta_policy 0.75")
left.legend()
right.hist(cosine, bins=np.linspace(-1, 1, 21), color="0.6")
right.set(xlabel="cosine of interaction and policy term", ylabel="MDPs")
figure.tight_layout()
print(f"{reversed_sign.sum()} of 60 reversed; median coupling {np.median(np.abs(coupling)):.3f}")

# %%
assert 5 < reversed_sign.sum() < 55, "a reversal exists, and is not the rule"
assert (cosine < -0.5).sum() >= 5 and (cosine > 0.5).sum() >= 5, "both signs occur"

# %% [markdown]
# ## The picture over MDPs, and how far to believe it
#
# The median over MDPs of the error relative to the smallest of each. The mask matters more: along
# `eta_policy` the error changes by factors, along `eta_advantage` by tens of percent. And what
# the toy prefers depends on the distance of the policies. It shows *that* the channels are
# coupled; it does not say which pair is best for a language model.

# %%
grid = np.linspace(0.25, 1.5, 6)
figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), sharey=True)
spread = {}
for axis, gap in zip(axes, (0.1, 0.4, 0.8), strict=True):
    tables = np.array(
        [
            [[e.squared_error(RESPONSES) for e in row] for row in surface(instance, grid, grid)]
            for instance in (problem(seed, gap) for seed in range(20))
        ]
    )
    relative = np.median(tables / tables.min(axis=(1, 2), keepdims=True), axis=0)
    image = axis.pcolormesh(grid, grid, relative, shading="nearest")
    figure.colorbar(image, ax=axis)
    axis.set(xlabel="eta_advantage", title=f"logits differ by {gap}")
    spread[gap] = [np.ptp(relative, axis=0).mean(), np.ptp(relative, axis=1).mean()]
axes[0].set_ylabel("eta_policy")
figure.tight_layout()
print({gap: [f"{x:.2f}" for x in both] for gap, both in spread.items()})

# %%
for along_policy, along_advantage in spread.values():
    assert along_policy > along_advantage > 0
