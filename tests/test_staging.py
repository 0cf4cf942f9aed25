import dataclasses
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from copc_jax import returns
from copc_jax.staging import Admission, fitting, pack, staleness, staleness_stats
from copc_jax.types import Trajectory

DEFAULTS = {
    "rows": 4,
    "time": 16,
    "learner_version": 5,
    "staleness": 2,
    "gamma": 1.0,
    "pad_id": 9,
}


def trajectory(mask, *, prompt="q", sample=0, version=5, reward=1.0, status="done", **fields):
    is_action = np.asarray(mask, bool)
    versions = np.where(is_action, version, -1).astype(np.int32)
    defaults = {
        "token_ids": np.arange(10, 10 + len(is_action), dtype=np.int32),
        "behavior_logprob": np.where(is_action, -0.5, 0).astype(np.float32),
        "weight_version": versions,
    }
    return Trajectory(
        prompt, sample, is_action=is_action, reward=reward, status=status, **(defaults | fields)
    )


def packed(trajectories, **overrides):
    return pack(trajectories, **(DEFAULTS | overrides))


@st.composite
def trajectories(draw):
    """Ragged episodes with interior gaps, garbage off action tokens, and more than one version."""
    found = []
    for index in range(draw(st.integers(1, 8))):
        mask = [False, *draw(st.lists(st.booleans(), min_size=0, max_size=13)), True]
        mask += [False] * draw(st.integers(0, 1))
        rng = np.random.default_rng(draw(st.integers(0, 2**20)))
        action = np.asarray(mask)
        logprob = np.where(action, -rng.random(action.size), np.nan).astype(np.float32)
        found.append(
            trajectory(
                mask,
                prompt=f"q{index}",
                reward=float(rng.normal()),
                status=draw(st.sampled_from(["done", "truncated"])),
                token_ids=rng.integers(0, 1000, action.size).astype(np.int32),
                behavior_logprob=logprob,
                weight_version=np.where(action, rng.integers(3, 6, action.size), 77).astype(
                    np.int32
                ),
            )
        )
    return found


gae = jax.jit(returns.gae, static_argnames="lambda_")


def advantage(batch, reward, value, lambda_):
    arrays = (reward, value, batch.discount, batch.is_action)
    return np.asarray(gae(*map(jnp.asarray, arrays), lambda_=lambda_).advantage)


def segments(batch):
    """Return (row, slice) of every segment, row by row."""
    for row, ids in enumerate(batch.segment_ids):
        for segment in range(1, ids.max() + 1):
            where = np.flatnonzero(ids == segment)
            assert np.array_equal(where, np.arange(where[0], where[-1] + 1))
            yield row, slice(where[0], where[-1] + 1)


# Admission.


@pytest.mark.parametrize("limit", [0, 1, 2, 64])
def test_admission_is_the_largest_that_keeps_every_update_within_the_limit(limit):
    for updates, warmup in itertools.product([1, 2], [0, 3]):
        if limit < updates - 1:
            continue
        admission = Admission(4, limit, updates_per_batch=updates, warmup_batches=warmup)
        for published in range(0, 3 * updates, updates):
            batches, rest = divmod(admission.limit(published), 4)
            assert rest == 0

            def last_lag(batch, updates=updates, warmup=warmup, published=published):
                first = max(0, batch - warmup) * updates
                return first + (updates - 1 if batch >= warmup else 0) - published

            assert last_lag(batches - 1) <= limit < last_lag(batches)


def test_synchronous_admission_allows_one_batch_a_version():
    assert [Admission(8, 0).limit(version) for version in range(4)] == [8, 16, 24, 32]


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_sampling_version_is_the_first_at_which_the_batch_is_admitted(updates):
    admission = Admission(2, 7, mode="exact", updates_per_batch=updates, warmup_batches=1)
    for batch in range(20):
        versions = [v for v in range(0, 60, updates) if admission.limit(v) >= 2 * (batch + 1)]
        assert admission.sampling_version(batch) == versions[0]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"staleness": -1}, "staleness"),
        ({"batch_size": 0}, "batch_size"),
        ({"updates_per_batch": 0}, "updates_per_batch"),
        ({"updates_per_batch": 2}, "staleness"),
        ({"warmup_batches": -1}, "warmup_batches"),
    ],
)
def test_admission_refuses_by_name(fields, name):
    with pytest.raises(ValueError, match=f"^{name} must be at least"):
        Admission(**({"batch_size": 4, "staleness": 0} | fields))


def test_admission_refuses_an_unknown_mode_and_a_negative_version():
    # A TypeError where the types are checked at run time.
    with pytest.raises((ValueError, TypeError), match="mode"):
        Admission(4, 1, mode="fixed")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="published_version"):
        Admission(4, 1).limit(-1)


# Staleness.


def test_the_limit_is_strict_and_the_future_is_an_error():
    fresh, old = trajectory([0, 1], version=3), trajectory([0, 1], version=2, prompt="old")
    batch, stats = packed([fresh, old])
    assert stats.trajectories == 1 and stats.dropped == {"late": ("old",)}
    assert batch.weight_version[0, 1] == 3
    with pytest.raises(ValueError, match="prompt 'q' sample 0 was sampled by version 6"):
        packed([trajectory([0, 1], version=6)])
    for version in range(5):
        assert packed([trajectory([0, 1], version=version)], staleness=0)[1].trajectories == 0
    assert packed([trajectory([0, 1], version=5)], staleness=0)[1].trajectories == 1


def test_the_oldest_token_decides_and_every_version_is_checked():
    mixed = trajectory([0, 1, 1, 0, 1], weight_version=np.asarray([-1, 4, 2, -1, 5], np.int32))
    assert staleness(mixed, 5) == 3
    assert packed([mixed])[1].dropped == {"late": ("q",)}
    ahead = dataclasses.replace(mixed, weight_version=np.asarray([-1, 4, 6, -1, 5], np.int32))
    with pytest.raises(ValueError, match="version 6"):
        packed([ahead])
    untagged = dataclasses.replace(mixed, weight_version=np.asarray([-1, 4, -1, -1, 5], np.int32))
    with pytest.raises(ValueError, match="without a weight version"):
        packed([untagged])


def test_time_in_the_queue_counts():
    waiting = trajectory([0, 1], version=3)
    assert staleness(waiting, 6) == 3
    assert packed([waiting], learner_version=5)[1].dropped == {}
    assert packed([waiting], learner_version=6)[1].dropped == {"late": ("q",)}


def test_late_policies():
    old = trajectory([0, 1], version=1)
    assert packed([old], late="accept")[1].staleness.summary()["trajectory_max"] == 4
    with pytest.raises(ValueError, match="prompt 'q' sample 0 is 4 updates old, the limit is 2"):
        packed([old], late="error")


def test_later_updates_on_the_same_batch_are_within_the_limit_too():
    at_the_limit = trajectory([0, 1], version=3)
    assert packed([at_the_limit], updates_per_batch=1)[1].trajectories == 1
    assert packed([at_the_limit], updates_per_batch=2)[1].dropped == {"late": ("q",)}
    assert staleness_stats([at_the_limit], 6).summary()["token_max"] == 3


def test_what_a_second_update_trains_on_is_older_by_one():
    """C41: of two minibatches the second trains at the next version."""
    batch = [trajectory([0, 1], version=3) for _ in range(4)]
    assert staleness_stats(batch, 5).tokens.tolist() == [0, 0, 4]
    two = staleness_stats(batch, 5, updates=2)
    assert two.tokens.tolist() == two.trajectories.tolist() == [0, 0, 2, 2]
    assert two.summary()["token_mean"] == 2.5


def test_staleness_is_counted_per_token_and_per_trajectory():
    first = trajectory([0, 1, 1, 0, 1], weight_version=np.asarray([99, 3, 3, 99, 5], np.int32))
    second = trajectory([0, 1], version=5)
    stats = staleness_stats([first, second], 5)
    assert stats.tokens.tolist() == [2, 0, 2]
    assert stats.trajectories.tolist() == [1, 0, 1]
    assert stats.summary() == {
        "token_mean": 1.0,
        "token_p50": 0.0,
        "token_max": 2.0,
        "trajectory_mean": 1.0,
        "trajectory_p50": 0.0,
        "trajectory_max": 2.0,
    }
    assert staleness_stats([], 5).summary() == {}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_the_summary_is_that_of_the_samples(lags):
    stats = staleness_stats([trajectory([0, 1], version=20 - lag) for lag in lags], 20)
    summary = stats.summary()
    assert summary["token_mean"] == pytest.approx(np.mean(lags))
    assert summary["token_p50"] == np.sort(lags)[(len(lags) - 1) // 2]
    assert summary["token_max"] == max(lags)


# Packing.


@given(trajectories(), st.sampled_from(["terminal", "bootstrap"]), st.sampled_from([1.0, 0.9]))
def test_every_token_is_packed_once_and_unchanged(episodes, truncated, gamma):
    batch, stats = packed(episodes, rows=8, time=17, truncated=truncated, gamma=gamma)
    for array in dataclasses.astuple(batch):
        assert isinstance(array, np.ndarray) and array.shape == (8, 17)
        assert np.isfinite(array).all()
    remaining = dict(enumerate(episodes))
    for row, place in segments(batch):
        ids = batch.token_ids[row, place]
        key, episode = next(
            (key, episode)
            for key, episode in remaining.items()
            if np.array_equal(ids[: episode.token_ids.size], episode.token_ids)
            and ids.size - episode.token_ids.size in (0, 1)
        )
        del remaining[key]
        size = episode.token_ids.size
        cut = truncated == "bootstrap" and episode.status == "truncated"
        extra = int(cut and episode.is_action[-1])
        assert ids.size == size + extra
        assert np.array_equal(batch.positions[row, place], np.arange(ids.size))
        mask = np.append(episode.is_action, [False] * extra)
        last = np.flatnonzero(mask)[-1]
        assert np.array_equal(batch.is_action[row, place], mask)
        logprob, version, discount = np.zeros(ids.size), np.full(ids.size, -1), np.zeros(ids.size)
        for t in np.flatnonzero(mask):
            logprob[t] = episode.behavior_logprob[t]
            version[t] = episode.weight_version[t]
            discount[t] = 0 if t == last else gamma
        if cut:
            discount[last + 1] = gamma
        reward = np.zeros(ids.size)
        reward[last] = episode.reward
        np.testing.assert_array_equal(
            batch.behavior_logprob[row, place], logprob.astype(np.float32)
        )
        np.testing.assert_array_equal(batch.weight_version[row, place], version)
        np.testing.assert_array_equal(batch.discount[row, place], discount.astype(np.float32))
        np.testing.assert_array_equal(batch.reward[row, place], reward.astype(np.float32))
    assert not remaining
    free = batch.segment_ids == 0
    assert (batch.token_ids[free] == 9).all() and (batch.weight_version[free] == -1).all()
    for name in ("positions", "is_action", "behavior_logprob", "reward", "discount"):
        assert not getattr(batch, name)[free].any()
    assert stats.tokens == (~free).sum() and stats.fill == pytest.approx((~free).mean())
    assert stats.action_tokens == sum(int(episode.is_action.sum()) for episode in episodes)
    assert stats.rows_used == batch.segment_ids.any(axis=1).sum()
    for episode, row, first in stats.places:
        place = slice(first, first + episode.token_ids.size)
        np.testing.assert_array_equal(batch.token_ids[row, place], episode.token_ids)
    assert [id(episode) for episode, _, _ in stats.places] == [id(e) for e in episodes]


@given(trajectories())
def test_packed_returns_equal_those_of_each_episode_alone(episodes):
    batch, _ = packed(episodes, rows=8, time=16, gamma=0.9)
    value = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    together = advantage(batch, batch.reward, value, lambda_=0.8)
    for row, place in segments(batch):

        def alone(x, row=row, place=place):
            row_of_one = np.zeros((8, 16), x.dtype)
            row_of_one[0, : place.stop - place.start] = x[row, place]
            return row_of_one

        single = dataclasses.replace(
            batch, discount=alone(batch.discount), is_action=alone(batch.is_action)
        )
        expected = advantage(single, alone(batch.reward), alone(value), lambda_=0.8)
        np.testing.assert_array_equal(together[row, place], expected[0, : place.stop - place.start])


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [0.46, 0.4]), (0.0, [-0.5, 0.4])])
def test_reward_of_an_episode_that_ends_in_tool_text_is_on_the_last_sampled_token(gamma, expected):
    batch, _ = packed([trajectory([0, 1, 1, 0, 0])], rows=1, time=6, gamma=gamma)
    assert batch.reward.tolist() == [[0, 0, 1, 0, 0, 0]]
    value = np.asarray([[7, 0.5, 0.6, 7, 7, 7]], np.float32)
    result = advantage(batch, batch.reward, value, lambda_=0.9)
    np.testing.assert_allclose(result[0, 1:3], expected, atol=1e-6)
    assert not result[0, 3:].any() and result[0, 0] == 0


@pytest.mark.parametrize("trailing", [0, 2])
@pytest.mark.parametrize(
    ("truncated", "status", "expected"),
    [
        ("terminal", "truncated", [-0.377, -0.53, -0.7]),
        ("bootstrap", "done", [-0.377, -0.53, -0.7]),
        ("bootstrap", "truncated", [0.271, 0.19, 0.1]),
    ],
)
def test_a_cut_episode_ends_or_bootstraps_by_a_setting(truncated, status, expected, trailing):
    cut = trajectory([0, 1, 1, 1] + [0] * trailing, reward=0.0, status=status)
    # A second episode in the row: its value must not leak into the first one.
    batch, _ = packed(
        [cut, trajectory([0, 1], prompt="next")], rows=1, time=10, truncated=truncated
    )
    value = np.full((1, 10), 50, np.float32)
    value[0, 1:5] = [0.5, 0.6, 0.7, 0.8]
    reward = batch.reward.copy()
    reward[:, :-1] += np.where(batch.is_action[:, 1:], 0, batch.discount[:, 1:] * value[:, 1:])
    result = advantage(batch, reward, value, lambda_=0.9)
    np.testing.assert_allclose(result[0, 1:4], expected, atol=1e-6)
    np.testing.assert_allclose(result[batch.is_action][3], 1 - 50, atol=1e-6)


def test_empty_aborted_and_unscored_episodes_are_left_out_and_counted():
    good = trajectory([0, 1, 1], prompt="good")
    rest = [
        trajectory([0, 0, 0], prompt="empty", reward=10.0, status="truncated"),
        trajectory([], prompt="nothing", reward=10.0),
        trajectory([0, 1], prompt="cut", status="aborted"),
        trajectory([0, 1], prompt="unscored", reward=float("nan")),
    ]
    batch, stats = packed([rest[0], good, *rest[1:]])
    alone, _ = packed([good])
    for array, expected in zip(dataclasses.astuple(batch), dataclasses.astuple(alone), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert stats.dropped == {
        "empty": ("empty", "nothing"),
        "aborted": ("cut",),
        "missing_reward": ("unscored",),
    }
    batch, stats = packed(rest)
    assert stats.trajectories == stats.action_tokens == stats.tokens == 0
    assert not batch.segment_ids.any()


def test_the_longest_come_first_and_the_rest_takes_what_room_is_left():
    lengths = [2, 3, 4, 5, 6]
    episodes = [trajectory([0] + [1] * (n - 1), prompt=f"q{n}", reward=float(n)) for n in lengths]
    batch, stats = packed(episodes, rows=3, time=10)
    assert stats.rows_used == 2 and stats.fill == pytest.approx(20 / 30)
    assert batch.reward[0].tolist() == [0, 0, 0, 0, 0, 6, 0, 0, 0, 4]
    assert batch.reward[1].tolist() == [0, 0, 0, 0, 5, 0, 0, 3, 0, 2]
    assert batch.segment_ids[1].tolist() == [1] * 5 + [2] * 3 + [3] * 2
    assert not batch.segment_ids[2].any()
    assert [(t.prompt_id, *place) for t, *place in stats.places] == [
        ("q2", 1, 8),
        ("q3", 1, 5),
        ("q4", 0, 6),
        ("q5", 1, 0),
        ("q6", 0, 0),
    ]


def test_packing_never_takes_more_rows_than_the_order_of_submission():
    # The longest first would take three rows of ten.
    lengths = [4, 3, 3, 4, 3, 3]
    episodes = [trajectory([0] + [1] * (n - 1), prompt=f"q{i}") for i, n in enumerate(lengths)]
    assert fitting(episodes, rows=2, time=10) == len(episodes)
    assert packed(episodes, rows=2, time=10)[1].rows_used == 2


def test_too_few_rows_says_how_many_would_do():
    episodes = [trajectory([0, 1, 1, 1], prompt=f"q{i}") for i in range(5)]
    with pytest.raises(ValueError, match="do not fit into 2 rows of 8 slots: 3 rows would do"):
        packed(episodes, rows=2, time=8)
    assert packed(episodes, rows=3, time=8)[1].rows_used == 3


def test_too_long_names_the_prompt_and_counts_the_bootstrap_slot():
    cut = trajectory([0, 1, 1], status="truncated", prompt="long")
    assert packed([cut], time=3)[1].fill == 3 / 12
    with pytest.raises(ValueError, match="prompt 'long' sample 0 takes 4 slots, a row has 3"):
        packed([cut], time=3, truncated="bootstrap")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e-3])
def test_impossible_log_probabilities_are_refused_by_prompt(bad):
    logprob = np.asarray([0, -0.1, bad], np.float32)
    with pytest.raises(ValueError, match="prompt 'q' sample 0: behavior log-prob"):
        packed([trajectory([0, 1, 1], behavior_logprob=logprob)])
    # Off action tokens anything goes.
    assert packed([trajectory([0, 1, 0], behavior_logprob=logprob)])[0].behavior_logprob[0, 2] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"behavior_logprob": np.zeros(2, np.float32)}, "behavior_logprob has shape"),
        ({"weight_version": np.zeros(4, np.int32)}, "weight_version has shape"),
        ({"token_ids": np.zeros((1, 3), np.int32)}, "one-dimensional"),
        ({"token_ids": np.asarray([1, -2, 3], np.int32)}, "negative token id"),
    ],
)
def test_malformed_episodes_are_refused_by_prompt(fields, message):
    with pytest.raises(ValueError, match=f"prompt 'q' sample 0: .*{message}"):
        packed([trajectory([0, 1, 1], **fields)])


def test_an_unknown_status_is_refused():
    episode = trajectory([0, 1])
    object.__setattr__(episode, "status", "finished")  # As a foreign state file could hold it.
    with pytest.raises(ValueError, match="prompt 'q' sample 0: unknown status 'finished'"):
        packed([episode])


def test_an_action_needs_a_prompt_before_it_and_a_boolean_mask():
    with pytest.raises(ValueError, match="the first token is sampled"):
        packed([trajectory([1, 1])])
    episode = dataclasses.replace(trajectory([0, 1]), is_action=np.asarray([0, 1]))
    with pytest.raises(ValueError, match="is_action must be bool"):
        packed([episode])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rows": 0}, "rows must be at least 1"),
        ({"time": 0}, "time must be at least 1"),
        ({"learner_version": -1}, "learner_version must be at least 0"),
        ({"staleness": -1}, "staleness must be at least 0"),
        ({"updates_per_batch": 4}, "staleness must be at least 3"),
        ({"gamma": 1.1}, "gamma must be from 0 to 1"),
        ({"group_advantage": "scaled", "truncated": "bootstrap"}, "needs a critic"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        packed([trajectory([0, 1])], **overrides)


def test_packing_is_deterministic():
    episodes = [trajectory([0, 1, 0, 1], prompt=f"q{i}", reward=float(i)) for i in range(6)]
    first, again = packed(episodes)[0], packed(episodes)[0]
    for a, b in zip(dataclasses.astuple(first), dataclasses.astuple(again), strict=True):
        assert a.tobytes() == b.tobytes()


# Group advantages.


def group_rewards(rewards, **overrides):
    """Pack one-token episodes and return what stands in the place of their rewards."""
    episodes = [
        trajectory([0, 1], prompt=prompt, sample=sample, reward=float("nan") if r is None else r)
        for prompt, values in rewards.items()
        for sample, r in enumerate(values)
    ]
    batch, stats = packed(episodes, **({"group_advantage": "scaled"} | overrides))
    return batch.reward[batch.is_action].tolist(), stats


def test_group_advantage_is_per_prompt_with_the_population_deviation():
    values, stats = group_rewards({"a": [1, 0, 0, 0], "b": [1, 1, 1, 0]})
    np.testing.assert_allclose(values[:4], [1.7320508, *[-0.5773503] * 3], atol=1e-4)
    np.testing.assert_allclose(values[4:], [*[0.5773503] * 3, -1.7320508], atol=1e-4)
    assert stats.groups == 2 and stats.constant_groups == ()
    centered, _ = group_rewards({"a": [1, 0, 0, 0]}, group_advantage="centered")
    assert centered == [0.75, -0.25, -0.25, -0.25]


def test_members_of_a_group_need_not_be_neighbors():
    episodes = [
        trajectory([0, 1], prompt=prompt, reward=reward)
        for prompt, reward in [("a", 1.0), ("b", 0.0), ("a", 0.0), ("b", 2.0)]
    ]
    batch, _ = packed(episodes, group_advantage="centered")
    assert batch.reward[batch.is_action].tolist() == [0.5, -1.0, -0.5, 1.0]


def test_group_advantage_equals_the_one_for_arrays():
    rewards = np.random.default_rng(0).normal(size=12).astype(np.float32)
    prompts = np.repeat([0, 1, 2], 4)
    values, _ = group_rewards({str(p): rewards[prompts == p].tolist() for p in range(3)})
    expected = returns.group_advantage(jnp.asarray(rewards), jnp.asarray(prompts), scale=True)
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_equal_rewards_give_exactly_zero_and_are_flagged():
    values, stats = group_rewards({"a": [0.1] * 3, "b": [1e8 + 0.1] * 3, "c": [0, 1]})
    assert values[:6] == [0] * 6 and values[6] == -values[7] != 0
    assert stats.constant_groups == ("a", "b")


def test_a_missing_reward_leaves_the_group_and_its_statistics():
    values, stats = group_rewards({"a": [1, None, 0, 0]})
    np.testing.assert_allclose(values, [1.4142136, -0.7071068, -0.7071068], atol=1e-4)
    assert stats.dropped == {"missing_reward": ("a",)}
    values, stats = group_rewards({"a": [1, None], "b": [1, 0]})
    np.testing.assert_allclose(values, [1, -1], atol=1e-4)
    assert stats.dropped == {"missing_reward": ("a",), "alone": ("a",)}


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="prompt 'b' has one sample"):
        group_rewards({"a": [1, 0], "b": [1]})
