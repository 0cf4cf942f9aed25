"""Float64 references in plain Python loops, written as sums over tokens and not as recursions."""

import math

import numpy as np


def action_positions(row):
    return [t for t, is_action in enumerate(row) if is_action]


def residual_sums(reward, value, discount, weight, trace, is_action, lambda_):
    """Return the weighted sums and the sums without the token's own weight and trace, [B, T]."""
    weighted = np.zeros(np.shape(reward))
    unweighted = np.zeros(np.shape(reward))
    for b, row in enumerate(is_action):
        steps = action_positions(row)
        td = []
        for k, t in enumerate(steps):
            following = float(value[b][steps[k + 1]]) if k + 1 < len(steps) else 0.0
            td.append(float(reward[b][t]) + float(discount[b][t]) * following - float(value[b][t]))
        for k, t in enumerate(steps):
            own, later = float(weight[b][t]) * td[k], 0.0
            reach = float(discount[b][t]) * lambda_
            for j in range(k + 1, len(steps)):
                u = steps[j]
                later += reach * float(weight[b][u]) * td[j]
                reach *= float(trace[b][u]) * float(discount[b][u]) * lambda_
            weighted[b][t] = own + float(trace[b][t]) * later
            unweighted[b][t] = td[k] + later
    return weighted, unweighted


def corrected_returns(
    reward, value, discount, weight, is_action, lambda_, trace="residual", first="weighted"
):
    coefficient = weight if trace == "product" else np.ones(np.shape(weight))
    weighted, unweighted = residual_sums(
        reward, value, discount, weight, coefficient, is_action, lambda_
    )
    target = np.where(is_action, np.asarray(value, np.float64) + weighted, 0.0)
    return (weighted if first == "weighted" else unweighted), target


def vtrace(reward, value, discount, ratio, is_action, lambda_, rho_max, trace_max, policy_rho_max):
    ratio = np.asarray(ratio, np.float64)
    weighted, unweighted = residual_sums(
        reward,
        value,
        discount,
        np.minimum(ratio, rho_max),
        np.minimum(ratio, trace_max),
        is_action,
        lambda_,
    )
    target = np.where(is_action, np.asarray(value, np.float64) + weighted, 0.0)
    return np.minimum(ratio, policy_rho_max) * unweighted, target


def responses(is_action, segment_ids):
    """List each response with an action token as the (row, time) of its action tokens."""
    found = {}
    for b, row in enumerate(is_action):
        for t in action_positions(row):
            key = (b, 0 if segment_ids is None else int(segment_ids[b][t]))
            found.setdefault(key, []).append((b, t))
    return list(found.values())


def reduction_weights(is_action, reduce, segment_ids=None):
    """Return w with `reduced value = sum(w * x)`."""
    weight = np.zeros(np.shape(is_action))
    groups = responses(is_action, segment_ids)
    for group in groups:
        for b, t in group:
            if reduce == "token":
                weight[b][t] = 1.0 / sum(len(g) for g in groups)
            else:
                weight[b][t] = 1.0 / len(group) / len(groups)
    return weight


def clipped(ratio, advantage, low, high, dual_clip=None):
    """Return PPO's objective and its derivative by the log of the ratio, of one token."""
    plain = ratio * advantage
    bounded = min(max(ratio, low), high) * advantage
    objective, derivative = (plain, plain) if plain <= bounded else (bounded, 0.0)
    if dual_clip is not None and advantage < 0 and dual_clip * advantage > objective:
        return dual_clip * advantage, 0.0
    return objective, derivative


class ActorOracle:
    """Objective of each token and its hand-written derivative by `policy_logprob`, [B, T].

    Arrays are the inputs of the loss; only action tokens are read.
    """

    def __init__(self, policy, proximal, behavior, advantage, is_action, segment_ids):
        self.policy, self.proximal, self.behavior = (
            np.asarray(x, np.float64) for x in (policy, proximal, behavior)
        )
        self.advantage = np.asarray(advantage, np.float64)
        self.is_action, self.segment_ids = is_action, segment_ids

    def tokens(self, rule):
        objective, derivative = np.zeros(self.policy.shape), np.zeros(self.policy.shape)
        for group in responses(self.is_action, self.segment_ids):
            for at in group:
                objective[at], derivative[at] = rule(at, group)
        return objective, derivative

    def ratio(self, at):
        return math.exp(self.policy[at] - self.behavior[at])

    def copc(self, low, high, frozen=False):
        def rule(at, group):
            r = self.ratio(at)
            judged = math.exp(self.proximal[at] - self.behavior[at]) if frozen else r
            return (r * self.advantage[at],) * 2 if low <= judged <= high else (0.0, 0.0)

        return self.tokens(rule)

    def restoring(self, low, high):
        def rule(at, group):
            r, advantage = self.ratio(at), self.advantage[at]
            if (advantage > 0 and r > high) or (advantage < 0 and r < low):
                return 0.0, 0.0
            derivative = min(max(r, low), high) * advantage
            return derivative * self.policy[at], derivative

        return self.tokens(rule)

    def ppo(self, low, high, dual_clip=None):
        return self.tokens(
            lambda at, group: clipped(self.ratio(at), self.advantage[at], low, high, dual_clip)
        )

    def decoupled(self, low, high, weigh):
        def rule(at, group):
            weight = weigh(math.exp(self.proximal[at] - self.behavior[at]))
            r = math.exp(self.policy[at] - self.proximal[at])
            objective, derivative = clipped(r, self.advantage[at], low, high)
            return weight * objective, weight * derivative

        return self.tokens(rule)

    def policy_gradient(self, weigh):
        """`weigh(ratio of the token, ratio of its response) -> weight`."""

        def rule(at, group):
            whole = math.exp(sum(self.policy[u] - self.behavior[u] for u in group))
            derivative = weigh(self.ratio(at), whole) * self.advantage[at]
            return derivative * self.policy[at], derivative

        return self.tokens(rule)

    def gspo(self, low, high):
        def rule(at, group):
            mean = sum(self.policy[u] - self.behavior[u] for u in group) / len(group)
            return clipped(math.exp(mean), self.advantage[at], low, high)

        return self.tokens(rule)

    def m2po(self, threshold, harmful_only=False):
        squares = {}
        for group in responses(self.is_action, self.segment_ids):
            for at in group:
                d = self.policy[at] - self.behavior[at]
                if not harmful_only or d * self.advantage[at] > 0:
                    squares[at] = d * d
        kept = sorted(squares, key=squares.__getitem__)
        while kept and sum(squares[at] for at in kept) / len(kept) > threshold:
            largest = squares[kept[-1]]
            kept = [at for at in kept if squares[at] < largest]
        dropped = set(squares) - set(kept)

        def rule(at, group):
            return (0.0, 0.0) if at in dropped else (self.ratio(at) * self.advantage[at],) * 2

        return self.tokens(rule)
