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
# # Staleness and ratios on recorded rollouts
#
# Rollouts of a real run, as the learner saw them: for every token the log-probability that the
# server recorded when it sampled it, the one of the learner just before the update that trained
# on it, and both weight versions. The record is `data/rollouts.npz`; point `COPC_ROLLOUTS` at
# another of the same format to read your own run. All arrays are `[N, T]`, `learner_version` may
# be `[N]`.

# %%
import functools
import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from copc_jax import analysis, returns

here = Path("notebooks") if Path("notebooks").is_dir() else Path()
record = dict(np.load(os.environ.get("COPC_ROLLOUTS", here / "data" / "rollouts.npz")))
is_action = record["is_action"].astype(bool)
learner_version = record["learner_version"]
if learner_version.ndim == 1:
    learner_version = np.broadcast_to(learner_version[:, None], is_action.shape)
staleness = np.where(is_action, learner_version - record["weight_version"], -1)
arrays = {
    name: jnp.asarray(record[name], jnp.float32)
    for name in ("policy_logprob", "behavior_logprob", "reward", "value", "discount")
}
action = jnp.asarray(is_action)
log_ratio = np.asarray(
    returns.log_importance_ratio(arrays["policy_logprob"], arrays["behavior_logprob"], action)
)
print(f"{is_action.sum()} sampled tokens in {len(is_action)} rows")
print(f"staleness {staleness[is_action].min()} to {staleness[is_action].max()} learner updates")

# %%
# What staging and the server promise.
assert staleness[is_action].min() >= 0, "a token of weights that did not exist yet"
assert (record["behavior_logprob"][is_action] <= 0).all()
assert np.isfinite(log_ratio).all() and not log_ratio[~is_action].any()


# %%
@functools.partial(jax.jit, static_argnames="eta")
def couple(chosen, eta=0.5):
    """Estimates over the chosen tokens as the learner logs them, both tolerances equal."""
    reward, value, discount = (arrays[name] for name in ("reward", "value", "discount"))
    policy, behavior = arrays["policy_logprob"], arrays["behavior_logprob"]
    ratio = returns.importance_ratio(policy, behavior, chosen)
    plain = returns.gae(reward, value, discount, chosen)
    corrected = returns.copc_returns(reward, value, discount, ratio, chosen, eta_advantage=eta)
    return analysis.coupling_estimates(
        policy,
        behavior,
        value,
        corrected.advantage,
        plain.advantage,
        corrected.value_target,
        chosen,
        reward=reward,
        discount=discount,
        eta_policy=eta,
        eta_advantage=eta,
    )


def figure_of(metrics, *names):
    """Finished figures by name, nan where one cannot be formed."""
    finished = analysis.finish(metrics)
    return [finished.get(f"coupling/{name}", np.nan) for name in names]


# %% [markdown]
# ## How ratios spread with staleness
#
# Tokens are put into classes of staleness. Within each class: the spread of the log ratio, how
# many tokens the mask at eta 0.5 drops on either side, and the effective sample size as a
# fraction of the tokens. Only figures of single tokens are read here, so choosing tokens out of a
# response is fine. The spread at staleness 0 is the gap between the two engines and not an effect
# of training.

# %%
levels = np.unique(staleness[is_action])
edges = levels
if len(levels) > 8:
    # Staleness 0 keeps a class of its own: it shows the gap between engines alone.
    edges = np.unique([levels[0], *np.quantile(levels[1:], np.linspace(0, 1, 8)[:-1]).round()])
chosen_by_class, labels = [], []
for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
    chosen = is_action & (staleness >= low) & (staleness < high)
    if chosen.sum() >= 50:
        chosen_by_class.append(chosen)
        top = int(staleness[chosen].max())
        labels.append(f"{int(low)}" if top == low else f"{int(low)}-{top}")
names = ("log_ratio_std", "mask_low", "mask_high", "effective_sample_size", "kl_k3")
by_class = np.array([figure_of(couple(jnp.asarray(x)), *names) for x in chosen_by_class])
spread, mask_low, mask_high, sample_size, divergence = by_class.T

figure, axes = plt.subplots(1, 4, figsize=(16, 3.6))
axes[0].bar(labels, [x.sum() for x in chosen_by_class], color="0.6")
axes[0].set(ylabel="sampled tokens")
axes[1].plot(labels, spread, "o-", label="standard deviation of log ratio")
axes[1].plot(labels, np.sqrt(2 * np.maximum(divergence, 0)), "s--", label="sqrt(2 KL)")
axes[1].set(ylabel="nats", ylim=(0, None))
axes[1].legend()
axes[2].bar(labels, mask_low, label="below 0.80")
axes[2].bar(labels, mask_high, bottom=mask_low, label="above 1.28")
axes[2].set(ylabel="fraction that the mask drops")
axes[2].legend()
axes[3].plot(labels, sample_size, "o-")
axes[3].set(ylabel="effective sample size", ylim=(0, 1.05))
for axis in axes:
    axis.set_xlabel("staleness (learner updates)")
    axis.tick_params(axis="x", rotation=45)
figure.tight_layout()

# %%
whole = couple(action)
(mean_ratio, square, kept) = figure_of(whole, "ratio", "ratio_square", "mask_kept")
standard_error = np.sqrt(max(square - mean_ratio**2, 0) / is_action.sum())
# Ratios of recorded log-probabilities average to 1 under what was sampled; a wrong temperature, a
# renormalized top-p or log-probabilities of another policy show up here first.
assert abs(mean_ratio - 1) < 0.02 + 5 * standard_error, mean_ratio
assert np.all((sample_size > 0) & (sample_size <= 1 + 1e-5))
if labels[0] == "0":
    assert spread[0] < 0.05, "engine and learner disagree on the same weights"
if len(labels) > 1:
    assert spread[-1] > spread[0], "staleness should widen the ratios"

# %% [markdown]
# ## What the two tolerances do to this batch
#
# The same eta is the tight end of one channel and the loose end of the other: at 0 the mask drops
# every token that moved, and the advantages are those of GAE.

# %%
etas = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
names = ("mask_kept", "rho_clip_low", "rho_clip_high", "correction", "gae_magnitude", "sign_flip")
sweep = np.array([figure_of(couple(action, eta=eta), *names) for eta in etas]).T
kept_fraction, clip_low, clip_high, correction, magnitude, flips = sweep

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
left.plot(etas, kept_fraction, "o-", label="kept by the mask")
left.plot(etas, clip_low + clip_high, "o-", label="residual weights clipped")
left.set(xlabel="eta", ylabel="fraction of tokens", ylim=(0, 1.05))
left.legend()
right.plot(etas, correction / magnitude, "o-", label="mean |A - A_GAE| / mean |A_GAE|")
right.plot(etas, flips, "o-", label="signs flipped")
right.set(xlabel="eta", ylim=(0, None))
right.legend()
figure.tight_layout()

# %%
assert correction[0] == 0 and flips[0] == 0
assert np.all(np.diff(kept_fraction) >= 0)
np.testing.assert_allclose(kept_fraction[etas.index(0.5)], kept)

# %% [markdown]
# ## Where the correction acts
#
# It is the product of a residual and of `rho - 1`. With a critic of zeros all but the last
# residuals are zero and nothing is corrected, so read this beside the explained variance.

# %%
plain = [arrays[name] for name in ("reward", "value", "discount")]
residual = np.asarray(returns.gae(*plain, action, lambda_=0.0).advantage)[is_action]
low, high = returns.ratio_interval(0.5)
deviation = np.clip(np.exp(log_ratio[is_action]), low, high) - 1
explained, correlation = figure_of(whole, "explained_variance", "residual_rho_correlation")

figure, axis = plt.subplots(figsize=(6, 4))
image = axis.hexbin(deviation, residual, gridsize=40, bins="log", cmap="viridis", mincnt=1)
figure.colorbar(image, label="tokens")
axis.set(xlabel="rho - 1", ylabel="residual")
axis.set_title(f"explained variance {explained:.2f}, correlation of sizes {correlation:.2f}")
figure.tight_layout()

# %%
assert deviation.min() >= low - 1 - 1e-6 and deviation.max() <= high - 1 + 1e-6

# %% [markdown]
# ## Credit over real responses
#
# A reward of 1 on the last token, a critic of zeros: what arrives at the tokens before it, under
# each kind of trace?

# %%
ones, zeros = jnp.ones_like(arrays["value"]), jnp.zeros_like(arrays["value"])
ends = jnp.where(action & (arrays["discount"] == 0), 1.0, 0.0)
undiscounted = 1.0 - ends
left_over = np.asarray(returns.gae(ones, zeros, undiscounted, action).value_target)[is_action]
ratio = jnp.exp(jnp.asarray(log_ratio))
operands = (ends, zeros, undiscounted, ratio, action)
credit = {
    "residual weights (default)": returns.copc_returns(*operands),
    "product of clipped ratios": returns.copc_returns(*operands, trace="product"),
    "V-trace": returns.vtrace(*operands),
}
credit = {name: np.asarray(result.value_target)[is_action] for name, result in credit.items()}
bins = np.unique(np.geomspace(1, left_over.max(), 12).astype(int))

figure, axis = plt.subplots(figsize=(7, 3.6))
for name, part in credit.items():
    groups = [part[(left_over >= a) & (left_over < b)] for a, b in itertools.pairwise(bins)]
    quantiles = np.array(
        [np.quantile(g, [0.1, 0.5, 0.9]) if g.size else [np.nan] * 3 for g in groups]
    )
    axis.plot(bins[:-1], quantiles[:, 1], "o-", label=name)
    axis.fill_between(bins[:-1], quantiles[:, 0], quantiles[:, 2], alpha=0.2)
axis.set(xscale="log", xlabel="sampled tokens to the end", ylabel="credit", ylim=(0, None))
axis.legend()
figure.tight_layout()

# %%
assert credit["V-trace"].max() <= 1 + 1e-5
assert low - 1e-5 <= credit["residual weights (default)"].min()
assert credit["residual weights (default)"].max() <= high + 1e-5

# %% [markdown]
# ## Update by update
#
# The figures that every run logs. Sums and counts of the updates add up to those of the whole
# record.

# %%
versions = np.unique(learner_version[is_action])
# A long record is cut into at most 24 spans, each with at least one update.
spans = np.array_split(versions, min(24, len(versions)))
metrics = [couple(jnp.asarray(is_action & np.isin(learner_version, span))) for span in spans]
start = [span[0] for span in spans]
terms = [f"bias_{name}" for name in analysis.BiasTerms._fields]
series = np.array([figure_of(x, *terms, "effective_sample_size", "kl_k3") for x in metrics]).T

figure, axes = plt.subplots(1, 3, figsize=(15, 3.4))
for name, values in zip(terms, series, strict=False):
    axes[0].plot(start, values, ".-", label=name)
axes[0].axhline(0, color="0.8", zorder=0)
axes[0].legend()
axes[1].plot(start, series[3], ".-")
axes[2].plot(start, series[4], ".-")
for axis, title in zip(axes, ("bias terms", "effective sample size", "KL, k3 (nats)"), strict=True):
    axis.set(xlabel="learner version", title=title)
figure.tight_layout()

# %%
summed = jax.tree.map(lambda *parts: sum(parts), *metrics)
for name, (total, count) in whole.items():
    scale = max(float(summed["coupling/ratio"][1]), abs(float(total)))
    assert float(summed[name][1]) == float(count) == is_action.sum()
    assert abs(float(summed[name][0]) - float(total)) < 1e-3 * scale, name
