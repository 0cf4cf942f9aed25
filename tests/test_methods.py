"""Each row of METHODS is what its paper says: which returns, which loss, which batch."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copc_jax import losses, returns
from copc_jax.methods import METHODS, LossConfig, Method

ROWS, TIME = 4, 20
CONFIG = LossConfig(lambda_=0.9)


def sample():
    rng = np.random.default_rng(0)
    shape = (ROWS, TIME)
    behavior = -rng.uniform(0.7, 2, shape)
    arrays = {
        "reward": rng.normal(size=shape),
        "value": rng.normal(size=shape),
        "discount": np.where(rng.random(shape) < 0.2, 0, 1),
        "behavior": behavior,
        "proximal": behavior + 0.6 * rng.normal(size=shape),
        "policy": behavior + 0.6 * rng.normal(size=shape),
        "advantage": rng.normal(size=shape),
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    arrays["is_action"] = jnp.asarray(rng.random(shape) < 0.8)
    arrays["ratio"] = returns.importance_ratio(
        arrays["policy"], arrays["behavior"], arrays["is_action"]
    )
    return arrays


BATCH = sample()


def pick(*names):
    return [BATCH[name] for name in names]


def targets(name, config=CONFIG):
    run = jax.jit(lambda *a: METHODS[name].targets(config, *a))
    return run(*pick("reward", "value", "discount", "ratio", "is_action"))


@functools.cache
def actor(name, config=CONFIG):
    def run(*arguments):
        return METHODS[name].actor_loss(config, *arguments, reduce="token", segment_ids=None)[0]

    return float(jax.jit(run)(*pick("policy", "behavior", "proximal", "advantage", "is_action")))


def direct(loss, *names, **options):
    return jax.jit(lambda *a: loss(*a, **options)[0])(*pick(*names, "advantage", "is_action"))


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6, atol=1e-6)


# Rows that no paper has.
OURS = {"ppo_rc", "copc_restoring"}


def test_the_methods_of_the_paper_are_all_here():
    assert set(METHODS) == {
        "copc", "copc_no_rc", "ppo", "dapo", "sao", "areal", "vtrace", "m2po", "vcpo",
        "retrace", "gspo", "cispo", "tis", "icepop", "reinforce",
        *OURS,
    }  # fmt: skip
    for name, row in METHODS.items():
        assert row.name == name and row.paper
        assert row.paper.startswith("none: ") == (name in OURS)
        assert set(row.reduce) == {"search", "math"}


TWO, THREE = ("policy", "behavior"), ("policy", "proximal", "behavior")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
EXPECTED_LOSS = {
    "copc": lambda: direct(losses.copc_actor_loss, *TWO, eta_policy=0.5),
    "copc_no_rc": lambda: direct(losses.copc_actor_loss, *TWO, eta_policy=0.5),
    "ppo_rc": lambda: direct(losses.ppo_actor_loss, *TWO, **CLIP),
    "copc_restoring": lambda: direct(losses.copc_restoring_actor_loss, *TWO, eta_policy=0.5),
    "ppo": lambda: direct(losses.ppo_actor_loss, *TWO, **CLIP),
    "dapo": lambda: direct(losses.ppo_actor_loss, *TWO, **CLIP),
    "sao": lambda: direct(losses.sao_actor_loss, *TWO, **CLIP),
    "areal": lambda: direct(losses.decoupled_ppo_actor_loss, *THREE, **CLIP, behavior_cap=5.0),
    "vtrace": lambda: direct(losses.vtrace_actor_loss, *TWO),
    "m2po": lambda: direct(losses.m2po_actor_loss, *TWO, threshold=0.04),
    "vcpo": lambda: direct(losses.vcpo_actor_loss, *TWO, weight_max=8.0, reduce="token"),
    "retrace": lambda: direct(losses.cispo_actor_loss, *TWO, clip_low=1.0, clip_high=0.0),
    "gspo": lambda: direct(
        losses.gspo_actor_loss, *TWO, clip_low=3e-4, clip_high=4e-4, reduce="token"
    ),
    "cispo": lambda: direct(losses.cispo_actor_loss, *TWO, clip_low=1.0, clip_high=0.2),
    "tis": lambda: direct(losses.tis_actor_loss, *THREE, **CLIP, weight_max=2.0),
    "icepop": lambda: direct(losses.icepop_actor_loss, *THREE, **CLIP, weight_max=2.0),
    "reinforce": lambda: direct(losses.reinforce_actor_loss, *TWO),
}


@pytest.mark.parametrize("name", METHODS)
def test_rows_call_their_loss_with_the_paper_s_numbers(name):
    close(actor(name), EXPECTED_LOSS[name]())


def test_rows_that_share_mathematics_agree_and_the_rest_do_not():
    values = {name: actor(name) for name in METHODS}
    same = [{"copc", "copc_no_rc"}, {"ppo", "ppo_rc", "dapo"}, {"vtrace", "reinforce"}]
    for a in METHODS:
        for b in METHODS:
            if a < b and not any({a, b} <= group for group in same):
                assert abs(values[a] - values[b]) > 1e-6, (a, b)


def gradient(name, **changed):
    """Of the actor's loss by the log-probability of each token."""
    arrays = BATCH | changed

    def run(policy):
        rest = [arrays[key] for key in ("behavior", "proximal", "advantage", "is_action")]
        return METHODS[name].actor_loss(CONFIG, policy, *rest, reduce="token")[0]

    return np.asarray(jax.jit(jax.grad(run))(arrays["policy"]))


@pytest.mark.parametrize("name", METHODS)
def test_the_ratio_of_a_row_is_what_its_loss_reads(name):
    ratio, before = METHODS[name].ratio, gradient(name)
    away = 0.3 * jnp.sin(jnp.arange(ROWS * TIME)).reshape(ROWS, TIME)
    for key, readers in (
        ("behavior", ("behavior", "response", "proximal")),
        ("proximal", ("proximal",)),
    ):
        after = gradient(name, **{key: BATCH[key] + away})
        assert (np.abs(after - before).max() > 1e-6) == (ratio in readers), key
    # One token of a response tells on the others only where the ratio is the response's.
    token = int(np.argmax(np.asarray(BATCH["is_action"][0])))
    after = gradient(name, behavior=BATCH["behavior"].at[0, token].add(0.01))
    others = np.delete(np.abs(after - before)[0], token)
    assert (others.max() > 1e-6) == (ratio == "response")
    # What V-trace's loss does not read is in its advantages.
    assert (name == "vtrace") == (ratio == "advantage")


@pytest.mark.parametrize("name", METHODS)
def test_rows_have_their_returns(name):
    row = METHODS[name]
    got = targets(name)
    core = pick("reward", "value", "discount", "ratio", "is_action")
    plain = pick("reward", "value", "discount", "is_action")
    if name == "copc" or name in OURS:
        want = returns.copc_returns(*core, eta_advantage=0.5, lambda_=0.9)
    elif name == "vtrace":
        want = returns.vtrace(*core, lambda_=0.9)
    elif name == "retrace":
        want = returns.retrace(*core, lambda_=0.9)
    elif row.group:
        want = returns.gae(plain[0], 0 * plain[1], *plain[2:], lambda_=1.0)
    else:
        want = returns.gae(*plain, lambda_=0.9)
    close(got.advantage, want.advantage)
    close(got.value_target, want.value_target)


def test_group_outcome_reaches_every_token_of_its_response():
    """Staging puts the normalized outcome on the last action token, with discount 1 before it."""
    action = jnp.array([[False, True, False, True, True]])
    reward = jnp.array([[0.0, 0, 0, 0, 1.5]])
    discount = jnp.array([[0.0, 1, 0, 1, 0]])
    for name in ("dapo", "m2po", "vcpo", "gspo", "cispo"):
        junk = jnp.full((1, 5), 7.0)
        got = METHODS[name].targets(CONFIG, reward, junk, discount, junk, action)
        np.testing.assert_array_equal(got.advantage, [[0, 1.5, 0, 1.5, 1.5]])


def test_copc_options_reach_the_mathematics():
    core = pick("reward", "value", "discount", "ratio", "is_action")
    default = targets("copc")
    for option, value in (
        ("trace", "product"),
        ("first_residual", "unweighted"),
        ("eta_advantage", 0.25),
        ("eps_low", 0.1),
        ("eps_high", 0.1),
    ):
        got = targets("copc", dataclasses.replace(CONFIG, **{option: value}))
        close(got.advantage, returns.copc_returns(*core, lambda_=0.9, **{option: value}).advantage)
        assert np.any(np.asarray(got.advantage) != np.asarray(default.advantage)), option


@pytest.mark.parametrize(
    "option, value",
    [
        ("mask_from", "frozen"),
        ("mask_in_denominator", False),
        ("eta_policy", 0.25),
        ("eps_low", 0.1),
        ("eps_high", 0.1),
    ],
)
def test_copc_actor_options_reach_the_loss(option, value):
    got = actor("copc", dataclasses.replace(CONFIG, **{option: value}))
    named = {"frozen_logprob": BATCH["proximal"]} if option == "mask_from" else {option: value}
    close(got, direct(losses.copc_actor_loss, *TWO, **named))
    assert abs(got - actor("copc")) > 1e-6


def test_frozen_and_current_masks_agree_in_the_first_update():
    arguments = pick("policy", "behavior", "policy", "advantage", "is_action")
    values = [
        METHODS["copc"].actor_loss(LossConfig(mask_from=source), *arguments, reduce="token")[0]
        for source in ("current", "frozen")
    ]
    assert float(values[0]) == float(values[1])


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("copc_restoring", "eta_policy", 0.25),
        ("copc_restoring", "eps_low", 0.1),
        ("copc_restoring", "eps_high", 0.1),
        ("ppo_rc", "clip_high", 0.05),
        ("ppo", "clip_low", 0.05),
        ("ppo", "clip_high", 0.05),
        ("ppo", "dual_clip", 1.05),
        ("dapo", "clip_high", 0.05),
        ("sao", "clip_low", 0.05),
        ("sao", "clip_high", 0.05),
        ("areal", "clip_low", 0.05),
        ("areal", "clip_high", 0.05),
        ("areal", "dual_clip", 1.05),
        ("areal", "behavior_cap", 1.05),
        ("tis", "clip_low", 0.05),
        ("tis", "clip_high", 0.05),
        ("tis", "dual_clip", 1.05),
        ("tis", "tis_weight_max", 1.05),
        ("icepop", "clip_low", 0.05),
        ("icepop", "clip_high", 0.05),
        ("icepop", "dual_clip", 1.05),
        ("icepop", "icepop_weight_min", 0.95),
        ("icepop", "icepop_weight_max", 1.05),
        ("m2po", "m2po_threshold", 0.2),
        ("m2po", "m2po_harmful_only", True),
        ("gspo", "gspo_clip_low", 0.2),
        ("gspo", "gspo_clip_high", 0.2),
        ("vcpo", "vcpo_weight_max", 0.5),
        ("cispo", "cispo_clip_low", 0.05),
        ("cispo", "cispo_clip_high", 0.05),
    ],
)
def test_options_reach_the_loss_of_their_method(name, option, value):
    changed = dataclasses.replace(CONFIG, **{option: value})
    assert abs(actor(name, changed) - actor(name)) > 1e-6


def test_the_ablation_keeps_its_definition_whatever_the_flags():
    loud = LossConfig(eta_advantage=1.0, lambda_=0.9)
    close(targets("copc_no_rc", loud).advantage, targets("ppo").advantage)
    assert METHODS["copc_no_rc"].settings(loud).eta_policy == loud.eta_policy


def test_how_batches_are_formed():
    """COPC appendix C.2.1, as far as it goes."""
    group = {name for name, row in METHODS.items() if row.group}
    assert group == {"dapo", "m2po", "vcpo", "gspo", "cispo"}
    for name, row in METHODS.items():
        # A group of one has no advantage at all: it must be refused.
        assert row.samples_per_prompt == (2 if row.group else 1), name
        assert row.critic == (not row.group and name != "reinforce"), name
        assert row.whiten == (not row.group and name != "vtrace"), name
        assert row.minibatches == (2 if name == "areal" else 1), name
        assert row.critic_steps == (2 if name == "sao" else 1), name
        assert row.dynamic_sampling == (name == "dapo"), name
        assert row.max_samples_per_prompt == (1 if name == "sao" else None), name
        assert row.value_clip == (name not in ("vtrace", "retrace")), name
    assert METHODS["areal"].warmup_updates == {"search": 25}


def test_reductions():
    paper = {"search": "token", "math": "response"}
    for name, row in METHODS.items():
        if name in ("dapo", "m2po", "cispo"):
            assert set(row.reduce.values()) == {"token"}
        elif name in ("gspo", "vcpo"):
            assert set(row.reduce.values()) == {"response"}
        else:
            assert row.reduce == paper, name


@pytest.mark.parametrize("name", METHODS)
def test_reduction_and_segments_reach_the_loss(name):
    arguments = pick("policy", "behavior", "proximal", "advantage", "is_action")
    segments = jnp.asarray(np.broadcast_to(1 + np.arange(TIME) // 7, (ROWS, TIME)), jnp.int32)

    def run(reduce, segment_ids):
        return METHODS[name].actor_loss(CONFIG, *arguments, reduce=reduce, segment_ids=segment_ids)[
            0
        ]

    ways = (("token", None), ("response", None), ("response", segments))
    values = [float(x) for x in jax.jit(lambda: [run(*way) for way in ways])()]
    assert len(set(values)) == 3, values


def test_vcpo_slows_down_when_few_samples_count():
    scale = METHODS["vcpo"].learning_rate_scale
    assert scale is not None

    def of(weights, config=CONFIG):
        weights = jnp.asarray(weights)
        count = jnp.float32(weights.size)
        pairs = {
            "actor/response_weight": (weights.sum(), count),
            "actor/response_weight_square": (jnp.square(weights).sum(), count),
        }
        return float(scale(config, pairs))

    assert of([1.0, 1.0, 1.0, 1.0]) == 1
    close(of([4.0, 0.0, 0.0, 0.0]), (0.25 / 0.55) ** 0.5)
    close(of([4.0, 0.0, 0.0, 0.0], LossConfig(vcpo_sample_share=1.0)), 0.5)
    assert all(row.learning_rate_scale is None for n, row in METHODS.items() if n != "vcpo")
    # The names that the loss reports are those that the scale reads.
    metrics = METHODS["vcpo"].actor_loss(
        CONFIG, *pick("policy", "behavior", "proximal", "advantage", "is_action"), reduce="token"
    )[1]
    assert 0 < float(scale(CONFIG, {f"actor/{key}": pair for key, pair in metrics.items()})) <= 1


@pytest.mark.parametrize(
    "bad",
    [
        {"eta_policy": -0.1},
        {"eta_policy": 1.5},
        {"eta_advantage": -0.1},
        {"eps_low": 1.2},
        {"eps_high": -1.0},
        {"gamma": 0.0},
        {"gamma": 1.1},
        {"lambda_": -0.1},
        {"clip_low": 1.5},
        {"clip_high": float("nan")},
        {"dual_clip": 1.0},
        {"value_clip": 0.0},
        {"behavior_cap": 0.0},
        {"vcpo_sample_share": 0.0},
    ],
)
def test_numbers_out_of_range_are_refused_by_name(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        LossConfig(**bad)


def test_rows_are_frozen_and_complete():
    with pytest.raises(dataclasses.FrozenInstanceError):
        METHODS["copc"].whiten = False  # pyright: ignore[reportAttributeAccessIssue]
    source = inspect.getsource(Method)
    documented = source.split('"""')[1]
    for field in dataclasses.fields(Method):
        assert f"        {field.name}: " in documented, field.name
