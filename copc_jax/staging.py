"""Between rollouts and updates: how many may be sampled ahead, their age, and their packing.

Staleness is counted in learner updates: the version that trains on a token minus the version that
sampled it; that of a trajectory is the one of its oldest action token. Admission keeps it within
the limit before anything is sampled, the check in `pack` is the guarantee when the batch is formed
(time spent in a queue counts). Pure numpy, no IO.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from copc_jax.types import Batch, Trajectory

GroupAdvantage = Literal["scaled", "centered"]
Late = Literal["drop", "error", "accept"]
Mode = Literal["bounded", "exact"]
Truncated = Literal["terminal", "bootstrap"]

# Added to a group's standard deviation, as verl does for DAPO; rewards are of order 1.
_GROUP_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Admission:
    """How many trajectories may have been submitted, so that none is trained on when it is too old.

    Batch `k` (from 0) takes the trajectories `k * batch_size` to `(k + 1) * batch_size - 1` in
    submission order, and its last update runs at version `(k - warmup_batches) * updates_per_batch
    + updates_per_batch - 1`. It may be submitted once that version minus the published one is at
    most `staleness`. As a server never samples with a version older than the published one, the
    bound holds strictly; `staleness=0` is synchronous.

    In mode "exact" the same limit is combined with a publication that waits until everything
    admitted has finished (`rollout.collector`): batch `k` is then sampled at exactly
    `sampling_version(k)`. With several updates a batch, the exact lag of the last update is the
    largest one not above `staleness` that whole batches can give.
    """

    batch_size: int
    """Trajectories a batch."""
    staleness: int
    """Largest staleness, in learner updates."""
    mode: Mode = "bounded"
    """Whether `staleness` is an upper bound or the lag itself."""
    updates_per_batch: int = 1
    """Learner updates (version steps) that train on one batch."""
    warmup_batches: int = 0
    """First batches that train the critic only and so leave the version at 0."""

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("staleness", 0),
            ("updates_per_batch", 1),
            ("warmup_batches", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.mode not in ("bounded", "exact"):
            raise ValueError(f"mode must be 'bounded' or 'exact', got {self.mode!r}")
        if self.staleness < self.updates_per_batch - 1:
            raise ValueError(
                f"staleness must be at least updates_per_batch - 1 = {self.updates_per_batch - 1}, "
                "as the last update on a batch is that many versions after the first; "
                f"got {self.staleness}"
            )

    def limit(self, published_version: int) -> int:
        """Return how many trajectories may have been submitted in all.

        Args:
            published_version: newest version that every rollout server has acknowledged.
        """
        if published_version < 0:
            raise ValueError(f"published_version must not be negative, got {published_version}")
        batches = (published_version + self.staleness + 1) // self.updates_per_batch
        return self.batch_size * (self.warmup_batches + batches)

    def sampling_version(self, batch: int) -> int:
        """Return the version that samples a batch in mode "exact", the oldest one in "bounded".

        Args:
            batch: index of the batch, from 0.
        """
        ahead = (self.staleness + 1) // self.updates_per_batch - 1
        return max(0, batch - self.warmup_batches - ahead) * self.updates_per_batch


def staleness(trajectory: Trajectory, version: int) -> int:
    """Return how many updates old the oldest action token is when `version` trains on it.

    Raises:
        ValueError: no action token, a token without a version, or one from the future.
    """
    versions = trajectory.weight_version[trajectory.is_action]
    name = _name(trajectory)
    if versions.size == 0:
        raise ValueError(f"{name} has no action token")
    if versions.min() < 0:
        raise ValueError(f"{name} has an action token without a weight version ({versions.min()})")
    if versions.max() > version:
        raise ValueError(
            f"{name} was sampled by version {versions.max()}, "
            f"which is ahead of the learner's version {version}"
        )
    return int(version - versions.min())


@dataclasses.dataclass(frozen=True)
class StalenessStats:
    """Realized staleness in learner updates.

    Attributes:
        tokens: i64[max + 1], number of action tokens at each staleness 0, 1, ...
        trajectories: i64[max + 1], number of trajectories at each staleness of their oldest action
            token.
    """

    tokens: np.ndarray
    trajectories: np.ndarray

    def summary(self) -> dict[str, float]:
        """Return mean, p50 and max of both histograms; {} when there is nothing to summarize."""
        figures = {}
        for name, histogram in (("token", self.tokens), ("trajectory", self.trajectories)):
            count = int(histogram.sum())
            if count == 0:
                continue
            lags = np.arange(histogram.size)
            figures[f"{name}_mean"] = float((lags * histogram).sum() / count)
            # The lower median: a staleness that occurred, also for an even count.
            figures[f"{name}_p50"] = float(np.searchsorted(np.cumsum(histogram), count / 2))
            figures[f"{name}_max"] = float(np.flatnonzero(histogram)[-1])
        return figures


def staleness_stats(
    trajectories: Sequence[Trajectory], version: int, *, updates: int = 1
) -> StalenessStats:
    """Count the staleness of every action token and every trajectory that is trained on.

    Args:
        trajectories: a batch.
        version: the learner's before the first update on it.
        updates: updates on it, each on one of as many equal parts, in order: what the second update
            trains on is older by one than at the first.

    Raises:
        ValueError: as `staleness`.
    """
    size = max(len(trajectories) // updates, 1)
    trained = [(t, version + min(i // size, updates - 1)) for i, t in enumerate(trajectories)]
    heads = [staleness(trajectory, by) for trajectory, by in trained]
    lags = [by - t.weight_version[t.is_action].astype(np.int64) for t, by in trained]
    tokens = np.concatenate(lags) if lags else np.zeros(0, np.int64)
    return StalenessStats(np.bincount(tokens), np.bincount(np.asarray(heads, np.int64)))


@dataclasses.dataclass(frozen=True)
class PackStats:
    """What `pack` put into the batch, and what it left out.

    Attributes:
        trajectories: trajectories in the batch.
        tokens: filled slots.
        action_tokens: slots that are trained on.
        fill: filled share of all slots.
        rows_used: rows that hold at least one trajectory.
        dropped: prompt ids left out, by reason: "aborted", "empty" (no action token),
            "missing_reward", "late" (staler than the limit), "alone" (the only one left of its
            group).
        groups: groups with a group advantage, 0 without `group_advantage`.
        constant_groups: prompt ids whose rewards were all equal, so that their advantage is exactly
            0.
        staleness: realized staleness of what is in the batch, at its first update.
        places: each trajectory of the batch with its row and its first slot there.
    """

    trajectories: int
    tokens: int
    action_tokens: int
    fill: float
    rows_used: int
    dropped: dict[str, tuple[str, ...]]
    groups: int
    constant_groups: tuple[str, ...]
    staleness: StalenessStats
    places: tuple[tuple[Trajectory, int, int], ...]


def pack(
    trajectories: Sequence[Trajectory],
    *,
    rows: int,
    time: int,
    learner_version: int,
    staleness: int,
    gamma: float,
    pad_id: int,
    truncated: Truncated = "terminal",
    group_advantage: GroupAdvantage | None = None,
    late: Late = "drop",
    updates_per_batch: int = 1,
) -> tuple[Batch, PackStats]:
    """Pack trajectories into one batch of numpy arrays of the fixed shape `[rows, time]`.

    The longest come first, those of one length in their order, and each goes into the first row
    with room; segments count from 1 in each row, positions from 0 in each segment. Unused slots
    hold `pad_id`, segment 0 and zeros, so they are never trained on. The reward stands on the last
    action token and nowhere else, `discount` is `gamma` on action tokens and 0 on the last one. Off
    action tokens the behavior log-probability is 0 and the weight version -1, whatever the
    trajectory holds there.

    With `truncated="bootstrap"` a cut episode goes on to be worth V of the whole of what was
    sampled, which only the learner knows. `value[t]` is V of the prefix before token t, so that V
    stands one slot after the last action token: on the first observation after it, or else on one
    more slot (`pad_id`) that `pack` adds to the segment. `discount` is `gamma` on that one slot and
    0 on all others that are no action, so that the learner folds every bootstrap into the last
    reward with one line, which changes nothing in batches without cut episodes:

        reward[:, :-1] += where(is_action[:, 1:], 0, discount[:, 1:] * stop_gradient(value[:, 1:]))

    Args:
        trajectories: finished episodes. Those that cannot be trained on are left out and counted.
        rows: rows of the batch.
        time: slots a row.
        learner_version: version that the first update on this batch starts from.
        staleness: largest staleness, in learner updates, at the last update on this batch.
        gamma: discount a sampled token, 0 to 1.
        pad_id: token id of unused slots.
        truncated: whether an episode cut by its budget is worth nothing after the cut or V.
        group_advantage: put the advantage over the other samples of the prompt in the place of the
            reward: reward minus the group's mean, "scaled" by its population standard deviation or
            only "centered". Exactly 0 for a group of equal rewards. What is left out takes no part
            in the statistics.
        late: what happens to a trajectory above the limit: left out, refused, or trained on.
        updates_per_batch: updates on this batch; the last one sees everything `updates_per_batch -
            1` versions later.

    Raises:
        ValueError: an argument out of range; a malformed trajectory (named by its prompt id); a
            version ahead of the learner's; a group of one; a trajectory longer than `time`; too few
            rows (the message says how many).
    """
    _check_arguments(rows, time, learner_version, staleness, gamma, updates_per_batch)
    if truncated not in ("terminal", "bootstrap"):
        raise ValueError(f"truncated must be 'terminal' or 'bootstrap', got {truncated!r}")
    if late not in ("drop", "error", "accept"):
        raise ValueError(f"late must be 'drop', 'error' or 'accept', got {late!r}")
    if group_advantage is not None and truncated == "bootstrap":
        raise ValueError("truncated='bootstrap' needs a critic, group_advantage has none")

    kept, dropped = _select(trajectories, learner_version, staleness + 1 - updates_per_batch, late)
    rewards = np.asarray([t.reward for t in kept], np.float64)
    groups: dict[str, list[int]] = {}
    constant = ()
    if group_advantage is not None:
        _refuse_single_samples(trajectories)
        kept, alone = _without_singles(kept)
        if alone:
            dropped["alone"] = alone
        rewards, groups, constant = _group_advantages(kept, scale=group_advantage == "scaled")

    slots = [t.token_ids.size + (truncated == "bootstrap" and _needs_slot(t)) for t in kept]
    for trajectory, needed in zip(kept, slots, strict=True):
        if needed > time:
            raise ValueError(f"{_name(trajectory)} takes {needed} slots, a row has {time}")
    places = _fit(slots, time)
    rows_used = 1 + max((row for row, _, _ in places), default=-1)
    if rows_used > rows:
        raise ValueError(
            f"{len(kept)} trajectories do not fit into {rows} rows of {time} slots: "
            f"{rows_used} rows would do"
        )

    shape = (rows, time)
    token_ids = np.full(shape, pad_id, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    is_action = np.zeros(shape, bool)
    behavior_logprob = np.zeros(shape, np.float32)
    reward = np.zeros(shape, np.float32)
    discount = np.zeros(shape, np.float32)
    weight_version = np.full(shape, -1, np.int32)
    for trajectory, outcome, needed, (row, start, segment) in zip(
        kept, rewards, slots, places, strict=True
    ):
        whole = slice(start, start + needed)
        sampled = slice(start, start + trajectory.token_ids.size)
        mask = trajectory.is_action
        last = start + int(np.flatnonzero(mask)[-1])
        token_ids[row, sampled] = trajectory.token_ids
        segment_ids[row, whole] = segment
        positions[row, whole] = np.arange(needed)
        is_action[row, sampled] = mask
        behavior_logprob[row, sampled] = np.where(mask, trajectory.behavior_logprob, 0)
        weight_version[row, sampled] = np.where(mask, trajectory.weight_version, -1)
        discount[row, sampled] = np.where(mask, gamma, 0)
        discount[row, last] = 0
        reward[row, last] = outcome
        if truncated == "bootstrap" and trajectory.status == "truncated":
            discount[row, last + 1] = gamma

    batch = Batch(
        token_ids=token_ids,
        segment_ids=segment_ids,
        positions=positions,
        is_action=is_action,
        behavior_logprob=behavior_logprob,
        reward=reward,
        discount=discount,
        weight_version=weight_version,
    )
    stats = PackStats(
        trajectories=len(kept),
        tokens=sum(slots),
        action_tokens=int(is_action.sum()),
        fill=sum(slots) / (rows * time),
        rows_used=rows_used,
        dropped=dropped,
        groups=len(groups),
        constant_groups=constant,
        staleness=staleness_stats(kept, learner_version),
        places=tuple((t, row, start) for t, (row, start, _) in zip(kept, places, strict=True)),
    )
    return batch, stats


def _name(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt_id!r} sample {trajectory.sample}"


def _check_arguments(
    rows: int, time: int, learner_version: int, staleness: int, gamma: float, updates_per_batch: int
) -> None:
    for name, value, least in (
        ("rows", rows, 1),
        ("time", time, 1),
        ("learner_version", learner_version, 0),
        ("updates_per_batch", updates_per_batch, 1),
        ("staleness", staleness, updates_per_batch - 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be from 0 to 1, got {gamma}")


def _select(
    trajectories: Sequence[Trajectory], version: int, limit: int, late: Late
) -> tuple[list[Trajectory], dict[str, tuple[str, ...]]]:
    """Split into what can be trained on and, by reason, the prompt ids of the rest."""
    kept: list[Trajectory] = []
    dropped: dict[str, list[str]] = {}
    for trajectory in trajectories:
        _check_trajectory(trajectory)
        if trajectory.status == "aborted":
            reason = "aborted"
        elif not trajectory.is_action.any():
            reason = "empty"
        else:
            # Before any reason to leave it out: a version from the future is a fault of the run,
            # never of a sample.
            lag = staleness(trajectory, version)
            if lag > limit and late == "error":
                raise ValueError(f"{_name(trajectory)} is {lag} updates old, the limit is {limit}")
            if not np.isfinite(trajectory.reward):
                reason = "missing_reward"
            elif lag > limit and late == "drop":
                reason = "late"
            else:
                kept.append(trajectory)
                continue
        dropped.setdefault(reason, []).append(trajectory.prompt_id)
    return kept, {reason: tuple(ids) for reason, ids in dropped.items()}


def _check_trajectory(trajectory: Trajectory) -> None:
    """Refuse what would become NaN or a wrong gradient once it is on a device."""
    name = _name(trajectory)
    shape = trajectory.token_ids.shape
    for field in ("token_ids", "is_action", "behavior_logprob", "weight_version"):
        if len(shape) != 1 or getattr(trajectory, field).shape != shape:
            raise ValueError(
                f"{name}: {field} has shape {getattr(trajectory, field).shape}, token_ids {shape}; "
                "all must be one-dimensional and of equal length"
            )
    if trajectory.is_action.dtype != bool:
        raise ValueError(f"{name}: is_action must be bool, got {trajectory.is_action.dtype}")
    if trajectory.status not in ("done", "truncated", "aborted"):
        raise ValueError(f"{name}: unknown status {trajectory.status!r}")
    if shape[0] and trajectory.token_ids.min() < 0:
        raise ValueError(f"{name}: negative token id {trajectory.token_ids.min()}")
    if not trajectory.is_action.any():
        return
    if trajectory.is_action[0]:
        raise ValueError(f"{name}: the first token is sampled; a prompt needs at least one token")
    logprob = trajectory.behavior_logprob[trajectory.is_action]
    bad = ~(np.isfinite(logprob) & (logprob <= 0))
    if bad.any():
        raise ValueError(
            f"{name}: behavior log-probabilities of sampled tokens must be finite and at most 0, "
            f"got {logprob[bad][0]}"
        )


def _refuse_single_samples(trajectories: Sequence[Trajectory]) -> None:
    for prompt_id, members in _by_prompt(trajectories).items():
        if len(members) == 1:
            raise ValueError(
                f"prompt {prompt_id!r} has one sample, whose group advantage is always 0; "
                "sample each prompt at least twice"
            )


def _without_singles(kept: list[Trajectory]) -> tuple[list[Trajectory], tuple[str, ...]]:
    """Leave out the last of a group whose others were left out: its advantage is 0 and dilutes."""
    alone = {prompt_id for prompt_id, members in _by_prompt(kept).items() if len(members) == 1}
    return [t for t in kept if t.prompt_id not in alone], tuple(
        t.prompt_id for t in kept if t.prompt_id in alone
    )


def _by_prompt(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.prompt_id, []).append(index)
    return groups


def _group_advantages(
    kept: Sequence[Trajectory], *, scale: bool
) -> tuple[np.ndarray, dict[str, list[int]], tuple[str, ...]]:
    groups = _by_prompt(kept)
    advantage = np.zeros(len(kept), np.float64)
    constant = []
    for prompt_id, members in groups.items():
        rewards = np.asarray([kept[i].reward for i in members], np.float64)
        if np.ptp(rewards) == 0:
            # Not through the mean: that of equal rewards need not equal them in floating point.
            constant.append(prompt_id)
            continue
        advantage[members] = rewards - rewards.mean()
        if scale:
            advantage[members] /= rewards.std() + _GROUP_EPSILON
    return advantage, groups, tuple(constant)


def _needs_slot(trajectory: Trajectory) -> bool:
    return trajectory.status == "truncated" and bool(trajectory.is_action[-1])


def _fit(lengths: Sequence[int], time: int) -> list[tuple[int, int, int]]:
    """Return (row, first slot, segment id) of each length, the longest placed first.

    Where that takes more rows than their own order, which happens, their order stands: what
    `fitting` counted must fit.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    placed = _first_fit([lengths[index] for index in order], time)
    plain = _first_fit(lengths, time)
    if max((row for row, *_ in placed), default=0) > max((row for row, *_ in plain), default=0):
        return plain
    return [place for _, place in sorted(zip(order, placed, strict=True))]


def _first_fit(lengths: Sequence[int], time: int) -> list[tuple[int, int, int]]:
    """Return (row, first slot, segment id) of each length, in as many rows as that takes."""
    used: list[int] = []
    segments: list[int] = []
    places = []
    # Rows that nothing fits into any more are not looked at again.
    shortest = min(lengths, default=0)
    with_room: list[int] = []
    for length in lengths:
        row = next((r for r in with_room if used[r] + length <= time), len(used))
        if row == len(used):
            used.append(0)
            segments.append(0)
            with_room.append(row)
        segments[row] += 1
        places.append((row, used[row], segments[row]))
        used[row] += length
        if used[row] + shortest > time:
            with_room.remove(row)
    return places


def fitting(trajectories: Sequence[Trajectory], *, rows: int, time: int) -> int:
    """Return how many trajectories, from the first on, `pack` can put into `[rows, time]`."""
    placed = _first_fit([len(trajectory.token_ids) for trajectory in trajectories], time)
    return next((index for index, (row, *_) in enumerate(placed) if row >= rows), len(placed))
