"""The learner: every method steps, every way to cut a batch gives the same update."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from copc_jax import hf, model, sharding, staging
from copc_jax.analysis import finish
from copc_jax.learner import (
    LearnerConfig,
    OptimizerConfig,
    build_learner,
    build_sft,
    learning_rate_schedule,
    optimizer,
)
from copc_jax.methods import METHODS, LossConfig
from copc_jax.model import ModelConfig
from copc_jax.types import Batch, Trajectory

ROWS, TIME = 8, 32
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=TIME,
)
# The large epsilon keeps Adam from turning the rounding of tiny gradients into whole steps.
SGD_LIKE = OptimizerConfig(learning_rate=1e-2, warmup_updates=0, epsilon=1e-3)
LOSS = LossConfig(lambda_=0.95, vcpo_sample_share=1.0)
ACTOR = jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(0), MODEL))


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """Compile without optimizing: these programs run once or twice.

    Optax multiplies floats by its int32 counter, which strict promotion refuses.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def learner_of(
    method="copc",
    *,
    mesh=(1, 1),
    micro_batches=1,
    loss=LOSS,
    actor=SGD_LIKE,
    critic=SGD_LIKE,
    critic_warmup_updates=0,
):
    return build_learner(
        LearnerConfig(
            model=MODEL,
            method=METHODS[method],
            loss=loss,
            actor=actor,
            critic=critic,
            updates=8,
            reduce=METHODS[method].reduce["search"],
            critic_warmup_updates=critic_warmup_updates,
            micro_batches=micro_batches,
        ),
        sharding.make_mesh(*mesh),
    )


def start(learner):
    """Give a state whose critic is not constant: a fresh value head is zero."""
    # From the host, as several processes can place it too.
    state = learner.init(jax.device_put(jax.device_get(ACTOR), learner.params_sharding))
    if not state.critic:
        return state
    kernel = 0.3 * jax.random.normal(jax.random.key(1), (MODEL.hidden_size,))
    head = {"kernel": np.asarray(kernel), "bias": np.float32(0.2)}
    critic = jax.device_put({**state.critic, "value_head": head}, learner.state_sharding.critic)
    return state.replace(critic=critic)


def episodes(count=ROWS, *, status="done", samples=2):
    """Make episodes of two turns with an observation between them and rewards that differ."""
    rng = np.random.default_rng(count)
    made = []
    for index in range(count):
        lengths = rng.integers(2, 5, size=4)
        is_action = np.repeat([False, True, False, True], lengths)
        size = is_action.size
        made.append(
            Trajectory(
                prompt_id=str(index // samples),
                sample=index % samples,
                token_ids=rng.integers(1, MODEL.vocab_size, size).astype(np.int32),
                is_action=is_action,
                behavior_logprob=np.where(is_action, -1.0, 0.0).astype(np.float32),
                weight_version=np.where(is_action, 0, -1).astype(np.int32),
                reward=float(index % 2 + rng.uniform(0, 0.2)),
                status=status,
            )
        )
    return made


@functools.partial(jax.jit, static_argnums=1)
def own_logprob(batch, config=MODEL):
    hidden = model.forward(ACTOR, config, batch.token_ids, batch.segment_ids, batch.positions)
    return model.token_logprob(ACTOR, config, hidden, batch.token_ids, batch.segment_ids)


def pack(trajectories, *, rows=ROWS, behavior=None, **settings):
    """Pack, with behavior log-probs near those of `ACTOR`, so that ratios spread around 1.

    `behavior` maps the actor's log-probs to the recorded ones; the noise depends on the token, not
    on its place.
    """
    batch, _ = staging.pack(
        trajectories,
        rows=rows,
        time=TIME,
        learner_version=0,
        staleness=1,
        gamma=settings.pop("gamma", 0.97),
        pad_id=0,
        **settings,
    )
    noise = 0.4 * np.sin(7.0 * batch.token_ids + 3.0 * batch.positions)
    own = np.asarray(own_logprob(batch))
    recorded = own + noise if behavior is None else behavior(own)
    recorded = np.where(batch.is_action, np.minimum(recorded, 0.0), 0.0)
    return batch.replace(behavior_logprob=recorded.astype(np.float32))


def stack(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def unpacked(trajectories):
    """Give every trajectory a row of its own."""
    padding = pack([], rows=1)
    batch = [pack([t], rows=1) for t in trajectories]
    return stack(batch + [padding] * (ROWS - len(batch)))


def batch_for(method):
    # Halves of the batch are the minibatches, each with rows of its own, as in a run.
    group = "scaled" if METHODS[method].group else None
    made = episodes(16)
    return stack(
        [pack(half, rows=ROWS // 2, group_advantage=group) for half in (made[:8], made[8:])]
    )


@functools.cache
def stepped(method, **settings):
    """Return the state and metrics after one step, on the host."""
    learner = learner_of(method, **settings)
    batch = jax.device_put(batch_for(method), learner.batch_sharding)
    return jax.device_get(learner.step(start(learner), batch))


def assert_close(left, right, tolerance=5e-5):
    """Adam divides by the gradient's size, which enlarges the rounding of sums in another order."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_finite(tree):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def moved(left, right):
    return max(
        float(np.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def networks(state):
    return state.actor, state.critic


# --- Every method ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_step(method):
    row = METHODS[method]
    before = jax.device_get(start(learner_of(method)))
    after, metrics = stepped(method)
    figures = finish(metrics)
    assert_finite((after, metrics))
    assert int(after.version) == row.minibatches
    assert moved(after.actor, before.actor) > 1e-5
    actions = batch_for(method).is_action.sum()
    assert metrics["actor/ratio"][1] == actions
    assert 0.5 < figures["actor/ratio"] < 1.5
    assert figures["actor/gradient_norm"] > 0
    if row.critic:
        assert moved(after.critic, before.critic) > 1e-5
        assert figures["critic/loss"] > 0
    else:
        # No memory and no time goes to a network that nothing reads.
        assert after.critic == {}
        assert not any(name.startswith("critic/") for name in metrics)


def test_what_is_exported_is_weights_alone(tmp_path):
    """C112: counters, moments and rates are in the state, and none of them among the weights."""
    state, _ = stepped("areal")
    for network, head in ((state.actor, "lm"), (state.critic, "value")):
        assert model.flatten(network).keys() == model.parameter_table(MODEL, head).keys()
    hf.save_hf(tmp_path / "model", state.actor, MODEL)
    exported, _ = hf.load_hf(tmp_path / "model")
    assert_equal(exported, state.actor)


def test_minibatches_raise_the_version_once_each():
    state, metrics = stepped("areal")
    assert int(state.version) == 2
    # Both are in the metrics, not the last alone.
    assert metrics["actor/gradient_norm"][1] == 2
    assert metrics["actor/loss"][1] == batch_for("areal").is_action.sum()
    assert metrics["critic/loss"][1] == batch_for("areal").is_action.sum()


def test_sao_takes_two_critic_steps():
    assert int(stepped("sao")[0].critic_opt[1][0].count) == 2
    assert int(stepped("ppo")[0].critic_opt[1][0].count) == 1
    # Same returns and targets: the first of them is PPO's only one.
    sao, ppo = stepped("sao")[0], stepped("ppo")[0]
    assert moved(sao.critic, ppo.critic) > 1e-4


def test_vcpo_scales_its_step_by_the_effective_sample_size():
    state, metrics = stepped("vcpo")
    scale = float(metrics["actor/learning_rate_scale"][0])
    batch = batch_for("vcpo")
    log_ratio = np.where(batch.is_action, own_logprob(batch) - batch.behavior_logprob, 0)
    weights = np.asarray(
        [
            np.exp(log_ratio[row][batch.segment_ids[row] == segment].sum())
            for row in range(ROWS)
            for segment in range(1, batch.segment_ids[row].max() + 1)
        ]
    )
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    np.testing.assert_allclose(scale, np.sqrt(min(1, share / LOSS.vcpo_sample_share)), rtol=1e-4)
    assert 0.1 < scale < 0.99

    # With a weight below 1 for each response, the step is that much shorter and no other.
    learner = learner_of("vcpo")
    start_actor = jax.device_get(learner.init(ACTOR).actor)
    transform = optimizer(SGD_LIKE, 8)
    moments = state.actor_opt[1][0].mu
    gradient = jax.tree.map(lambda m: m / (1 - SGD_LIKE.beta1), moments)
    step, _ = transform.update(gradient, transform.init(start_actor), start_actor)
    want = jax.tree.map(lambda old, new: old + scale * np.asarray(new), start_actor, step)
    assert_close(state.actor, want)


# --- Every way to cut a batch ----------------------------------------------------------------


def prepared_update(method):
    learner = learner_of(method)
    batch = batch_for(method)
    state = start(learner)
    targets = learner.prepare(state, batch)
    return jax.device_get(learner.update(state, batch, targets))


def test_prepare_and_update_are_step():
    whole, metrics = stepped("copc")
    state, parts = prepared_update("copc")
    assert_close(networks(state), networks(whole))
    # Only `step` has the diagnostics of the whole batch.
    assert parts.keys() == {name for name in metrics if not name.startswith("coupling/")}
    assert_close(parts, {name: metrics[name] for name in parts}, tolerance=1e-4)


@pytest.mark.parametrize("method", ["copc", "sao", "vcpo", "m2po"])
def test_micro_batches_change_nothing(method):
    whole, metrics = stepped(method)
    state, added = stepped(method, micro_batches=4)
    assert_close(networks(state), networks(whole))
    assert_close(state.critic_opt, whole.critic_opt)
    assert added.keys() == metrics.keys()
    if method == "m2po":
        # Its tokens are ranked over the whole batch, of which each slice would drop others.
        kept, count = metrics["actor/kept"]
        assert 0 < kept < count
    # Sums and counts, so losses, KL and norms are logged the same however the batch was cut.
    assert_close(added, metrics, tolerance=1e-4)


def test_slices_without_a_token_are_skipped():
    learner = learner_of("copc", micro_batches=4)
    batch = pack(episodes(2))
    assert (batch.segment_ids[1:] == 0).all()
    # Were an empty slice computed, these tokens would be read outside the vocabulary or be NaN.
    empty = np.arange(ROWS) >= 2
    garbage = batch.replace(
        token_ids=np.where(empty[:, None], 63, batch.token_ids).astype(np.int32),
        behavior_logprob=np.where(empty[:, None], np.nan, batch.behavior_logprob).astype(
            np.float32
        ),
        reward=np.where(empty[:, None], np.inf, batch.reward).astype(np.float32),
    )
    clean, dirty = (jax.device_get(learner.step(start(learner), b)) for b in (batch, garbage))
    assert_equal(clean, dirty)
    assert_close(networks(clean[0]), networks(learner_of("copc").step(start(learner), batch)[0]))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_without_any_action_changes_nothing(micro_batches):
    learner = learner_of("copc", micro_batches=micro_batches)
    batch = pack(episodes())
    silent = batch.replace(is_action=np.zeros_like(batch.is_action))
    before = jax.device_get(start(learner))
    for tokens in (silent, pack([])):
        after, metrics = jax.device_get(learner.step(start(learner), tokens))
        assert_equal(networks(after), networks(before))
        assert_finite((after, metrics))
        assert int(after.version) == 1
        for name in ("actor/loss", "critic/loss", "actor/gradient_norm", "critic/gradient_norm"):
            assert float(metrics[name][0]) == 0
        assert "actor/loss" not in finish(metrics)


# --- Where a trajectory stands ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["copc", "dapo"])
def test_packed_rows_equal_unpacked_rows(method):
    learner = learner_of(method)
    made = episodes()
    packed = pack(made)
    assert packed.segment_ids.max() > 1
    apart = unpacked(made)
    order = np.random.default_rng(0).permutation(ROWS)
    permuted = jax.tree.map(lambda x: x[order], apart)
    want, metrics = jax.device_get(learner.step(start(learner), packed))
    for batch in (apart, permuted):
        state, other = jax.device_get(learner.step(start(learner), batch))
        assert_close(networks(state), networks(want))
        assert_close(other, metrics, tolerance=1e-4)


def test_padding_and_observations_hide_what_lies_there():
    learner = learner_of("copc")
    batch = pack(episodes())
    off = ~batch.is_action
    dirty = batch.replace(
        token_ids=np.where(batch.segment_ids == 0, 7, batch.token_ids).astype(np.int32),
        behavior_logprob=np.where(off, np.nan, batch.behavior_logprob).astype(np.float32),
        reward=np.where(off, np.inf, batch.reward).astype(np.float32),
        weight_version=np.where(off, 99, batch.weight_version).astype(np.int32),
    )
    assert_equal(
        *(jax.device_get(learner.step(start(learner), b)) for b in (batch, dirty)),
    )


# --- Devices ---------------------------------------------------------------------------------


# Compiling takes seconds: methods take turns on the meshes, of 2, 4 and 8 devices.
MESHES = ((8, 1), (4, 2), (2, 2), (4, 1), (2, 1), (2, 4), (1, 2))


@pytest.mark.parametrize(
    ("method", "mesh"), list(zip(METHODS, itertools.cycle(MESHES), strict=False))
)
def test_devices_change_nothing(method, mesh):
    state, metrics = stepped(method, mesh=mesh)
    want, single = stepped(method)
    assert_close(networks(state), networks(want))
    assert_close((state.actor_opt, state.critic_opt), (want.actor_opt, want.critic_opt))
    assert_same_metrics(metrics, single)
    assert learner_of(method, mesh=mesh).step._cache_size() == 1


def assert_same_metrics(metrics, others):
    """Compare counts and means: sums may be small differences of large terms."""
    assert metrics.keys() == others.keys()
    for name, (total, count) in metrics.items():
        assert count == pytest.approx(others[name][1], rel=1e-5), name
        if count:
            mean = others[name][0] / count
            assert total / count == pytest.approx(mean, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("trajectories", [1, 5])
def test_rows_that_devices_do_not_divide_are_filled_with_empty_ones(trajectories):
    # With one trajectory, seven of the devices hold no token at all.
    rows = [pack([t], rows=1) for t in episodes(5)[:trajectories]]
    filled = stack([*rows, pack([], rows=ROWS - trajectories)])
    results = []
    for mesh, batch in (((1, 1), stack(rows)), ((8, 1), filled)):
        learner = learner_of("copc", mesh=mesh)
        batch = jax.device_put(batch, learner.batch_sharding)
        results.append(jax.device_get(learner.step(start(learner), batch)))
    (want, single), (state, metrics) = results
    assert_close(networks(state), networks(want))
    assert_same_metrics(metrics, single)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_step_compiles_once_donates_and_keeps_its_sharding(mesh):
    learner = learner_of("copc", mesh=mesh)
    batch = jax.device_put(batch_for("copc"), learner.batch_sharding)
    learner.step(start(learner), batch)
    # Other tests compile this learner for other shapes.
    compiled = learner.step._cache_size()
    state = learner.init(ACTOR)
    for _ in range(3):
        old = state
        state, _ = learner.step(old, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves((old.actor, old.actor_opt, old.critic)))
        same = jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, learner.state_sharding
        )
        assert all(jax.tree.leaves(same))
    assert learner.step._cache_size() == compiled
    # What the caller gave to `init` is the caller's still.
    assert not any(x.is_deleted() for x in jax.tree.leaves(ACTOR))


# --- Single tokens ---------------------------------------------------------------------------


@jax.jit
def pulled(weight, batch):
    """Give the norm of the gradient of sum(weight * log pi)."""

    def total(actor):
        hidden = model.forward(actor, MODEL, batch.token_ids, batch.segment_ids, batch.positions)
        logprob = model.token_logprob(actor, MODEL, hidden, batch.token_ids, batch.segment_ids)
        return jnp.sum(jnp.where(batch.is_action, weight * logprob, 0.0))

    return optax.tree.norm(jax.grad(total)(ACTOR))


# One of each kind: two-sided mask, clip, mask over all tokens, sequence clip, truncated weights.
@pytest.mark.parametrize("method", ["copc", "ppo", "m2po", "gspo", "vcpo"])
def test_contributions_of_the_tokens_make_the_gradient_of_the_actor(method):
    learner, batch = learner_of(method), batch_for(method)
    advantage, weight = jax.device_get(
        learner.contributions(batch, learner.prepare(start(learner), batch))
    )
    _, metrics = stepped(method)
    count = metrics["actor/loss"][1]
    assert pulled(weight, batch) / count == pytest.approx(
        metrics["actor/gradient_norm"][0], rel=1e-4
    )
    assert not weight[~batch.is_action].any()
    assert np.count_nonzero(weight) == metrics["actor/kept"][0]
    assert (np.sign(weight) == np.sign(advantage))[weight != 0].all()


def test_a_step_hands_out_what_it_froze():
    learner = learner_of("copc", micro_batches=4)
    batch = jax.device_put(batch_for("copc"), learner.batch_sharding)
    want = learner_of("copc").prepare(start(learner), batch)
    state, metrics, targets = learner.step_with_targets(start(learner), batch)
    for name, value in vars(want).items():
        got = getattr(targets, name)
        assert_close(np.where(batch.is_action, got, 0), np.where(batch.is_action, value, 0))
    assert_close(jax.device_get((state, metrics)), stepped("copc", micro_batches=4))
    # Cut into pieces or not, every token has its own factor.
    assert_close(
        learner.contributions(batch, targets), learner_of("copc").contributions(batch, targets)
    )


# --- Schedules and precision -----------------------------------------------------------------


def test_the_actor_waits_for_the_critic_and_then_starts_its_own_schedule():
    learner = learner_of(
        "copc",
        critic_warmup_updates=2,
        actor=OptimizerConfig(learning_rate=1e-2, warmup_updates=4),
        critic=OptimizerConfig(learning_rate=2e-2, warmup_updates=3),
    )
    batch = jax.device_put(batch_for("copc"), learner.batch_sharding)
    state = start(learner)
    first = jax.device_get(state)
    actor_rates, critic_rates = [], []
    for update in range(6):
        before = jax.device_get(state)
        if update == 3:
            # As a resumed run: the schedule is in the state, and neither restarts nor advances.
            state = jax.device_put(before, learner.state_sharding)
        state, metrics = learner.step(state, batch)
        after = jax.device_get(state)
        actor_rates.append(float(metrics["actor/learning_rate"][0]))
        critic_rates.append(float(metrics["critic/learning_rate"][0]))
        assert moved(after.critic, before.critic) > 0
        if update == 0:
            # Adam's first step is of the size of its rate: head and body of the critic have one.
            for name in ("value_head", "embed"):
                step = moved(after.critic[name], before.critic[name])
                assert step == pytest.approx(critic_rates[0], rel=1e-3)
        if update < 2:
            assert_equal((after.actor, after.actor_opt), (first.actor, first.actor_opt))
        else:
            assert moved(after.actor, before.actor) > 0
    np.testing.assert_allclose(actor_rates, [0, 0, 2.5e-3, 5e-3, 7.5e-3, 1e-2], rtol=1e-6)
    np.testing.assert_allclose(critic_rates[:4], [2e-2 / 3, 4e-2 / 3, 2e-2, 2e-2], rtol=1e-6)


def test_no_learning_rate_is_zero_and_decays_end_with_the_run():
    first = lambda **settings: float(learning_rate_schedule(OptimizerConfig(**settings), 100)(0))
    assert first(learning_rate=1e-6, warmup_updates=25) == pytest.approx(4e-8)
    assert first(learning_rate=1e-6, warmup_updates=0) == pytest.approx(1e-6)
    assert first(learning_rate=1e-6, warmup_updates=1) == pytest.approx(1e-6)
    for schedule in ("linear", "cosine"):
        for warmup in (0, 1, 10):
            rate = learning_rate_schedule(
                OptimizerConfig(
                    learning_rate=1.0,
                    warmup_updates=warmup,
                    schedule=schedule,
                    final_fraction=0.2,
                ),
                40,
            )
            assert float(rate(max(warmup - 1, 0))) == pytest.approx(1.0)
            assert float(rate(39)) == pytest.approx(0.2)
            assert 0.2 < float(rate(38)) < 1.0


def test_small_steps_are_not_rounded_away():
    learner = learner_of("copc")
    state = jax.eval_shape(learner.init, jax.tree.map(lambda x: x.astype(jnp.bfloat16), ACTOR))
    kept = jax.tree.leaves((state.actor, state.critic))
    assert all(x.dtype == jnp.float32 for x in kept)

    transform = optimizer(OptimizerConfig(learning_rate=1e-6, warmup_updates=0), 1000)

    def update(carry, _):
        weight, state = carry
        step, state = transform.update({"w": jnp.ones(())}, state, weight)
        return (jax.tree.map(jnp.add, weight, step), state), None

    weight = {"w": jnp.float32(0.02)}
    run = jax.jit(lambda carry: jax.lax.scan(update, carry, None, length=1000)[0])
    assert float(run((weight, transform.init(weight)))[0]["w"]) == pytest.approx(0.019, abs=1e-6)


def test_impossible_optimizer_settings_are_refused():
    for settings in (
        {"learning_rate": 0.0},
        {"clip_norm": -1.0},
        {"epsilon": float("nan")},
        {"warmup_updates": -1},
        {"beta1": 1.0},
        {"beta2": -0.1},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            OptimizerConfig(**settings)


# --- Numbers ---------------------------------------------------------------------------------


def derive_copc(batch, logprob, value, loss):
    """Derive returns, advantages and both losses of `batch` by loops over its episodes."""
    low = 1 - loss.eta_policy * loss.eps_low
    high = 1 + loss.eta_policy * loss.eps_high
    advantages, targets, ratios = {}, {}, {}
    for row, segment in {(r, s) for r in range(ROWS) for s in batch.segment_ids[r] if s > 0}:
        times = np.flatnonzero((batch.segment_ids[row] == segment) & batch.is_action[row])
        correction, next_value = 0.0, 0.0
        for t in times[::-1]:
            ratio = np.exp(float(logprob[row, t]) - float(batch.behavior_logprob[row, t]))
            gamma = float(batch.discount[row, t])
            residual = float(batch.reward[row, t]) + gamma * next_value - float(value[row, t])
            correction = np.clip(ratio, low, high) * residual + gamma * loss.lambda_ * correction
            advantages[row, t] = correction
            targets[row, t] = float(value[row, t]) + correction
            ratios[row, t] = ratio
            next_value = float(value[row, t])
    raw = np.asarray(list(advantages.values()))
    scaled = {key: (a - raw.mean()) / raw.std() for key, a in advantages.items()}
    terms = [ratios[k] * scaled[k] * (low <= ratios[k] <= high) for k in advantages]
    errors = [value[k] - targets[k] for k in targets]
    return advantages, -np.mean(terms), 0.5 * np.mean(np.square(errors))


def test_a_copc_step_against_a_derivation_by_loops():
    learner = learner_of("copc")
    batch = pack(episodes(2))
    assert batch.segment_ids[0].max() == 2
    state = start(learner)
    targets = jax.device_get(learner.prepare(state, batch))

    # The log-probabilities, from each episode alone and a plain softmax.
    for segment in (1, 2):
        where = batch.segment_ids[0] == segment
        tokens = jnp.asarray(batch.token_ids[:1, where])
        ones = jnp.ones_like(tokens)
        hidden = model.forward(ACTOR, MODEL, tokens, ones, jnp.arange(tokens.size)[None])
        logits = np.asarray(hidden @ ACTOR["embed"].T, np.float64)
        logprob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        want = logprob[np.arange(tokens.size - 1), np.asarray(tokens[0, 1:])]
        want = np.where(batch.is_action[0, where][1:], want, 0.0)
        got = targets.policy_logprob[0, where][1:]
        np.testing.assert_allclose(got, want, atol=2e-5)

    advantages, actor_loss, critic_loss = derive_copc(
        batch, targets.policy_logprob, targets.value, LOSS
    )
    for place, want in advantages.items():
        np.testing.assert_allclose(targets.advantage[place], want, rtol=1e-4, atol=1e-5)
    figures = finish(jax.device_get(learner.step(state, batch)[1]))
    np.testing.assert_allclose(figures["actor/loss"], actor_loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(figures["critic/loss"], critic_loss, rtol=1e-4)
    assert 0 < figures["actor/kept"] < 1


@pytest.mark.parametrize("method", ["copc", "ppo", "areal"])
def test_ratios_are_against_the_recorded_behavior(method):
    learner = learner_of(method)
    made = episodes(16)
    halves = lambda behavior: stack(
        [pack(half, rows=ROWS // 2, behavior=behavior) for half in (made[:8], made[8:])]
    )
    state = start(learner)
    same = halves(lambda own: own)
    ratio = learner.prepare(state, same).ratio
    np.testing.assert_allclose(ratio, 1.0, atol=2e-5)

    # The server was less sure than the learner is: nothing may recompute what it recorded.
    half = halves(lambda own: own - 0.5)
    ratio = np.asarray(learner.prepare(state, half).ratio)
    np.testing.assert_allclose(ratio[half.is_action], np.exp(0.5), rtol=1e-4)
    figures = finish(jax.device_get(learner.step(state, half)[1]))
    if method == "areal":
        # Its second minibatch has a policy that moved; the weight is of the one before both.
        np.testing.assert_allclose(figures["actor/behavior_weight"], np.exp(0.5), rtol=1e-4)
    else:
        np.testing.assert_allclose(figures["actor/ratio"], np.exp(0.5), rtol=1e-4)
    if method == "copc":
        assert figures["actor/kept"] == 0
        assert figures["actor/loss"] == 0


def test_a_cut_episode_goes_on_to_be_worth_the_value_after_it():
    learner = learner_of("copc")
    gamma = 0.9
    batch = pack(episodes(4, status="truncated"), truncated="bootstrap", gamma=gamma)
    state = start(learner)
    targets = learner.prepare(state, batch)
    value = np.asarray(targets.value)
    reward, discount = batch.reward.copy(), batch.discount.copy()
    after = [(row, t) for row, t in np.argwhere((discount > 0) & ~batch.is_action)]
    assert len(after) == 4
    for row, t in after:
        assert value[row, t] != 0
        reward[row, t - 1] += gamma * value[row, t]
        discount[row, t] = 0
    by_hand = learner.prepare(state, batch.replace(reward=reward, discount=discount))
    assert_close(jax.device_get(targets), jax.device_get(by_hand))
    ended = learner.prepare(state, batch.replace(discount=discount))
    assert moved(jax.device_get(targets.advantage), jax.device_get(ended.advantage)) > 0.01


# --- Supervised warm start -------------------------------------------------------------------


def test_supervised_training_learns_to_copy_and_compiles_once():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(64):
        word = rng.integers(2, 10, 4)
        rows.append(np.concatenate([[1], word, [1], word]))
    tokens = np.zeros((64, TIME), np.int32)
    tokens[:, :10] = rows
    used = np.arange(TIME) < 10
    shape = tokens.shape
    data = Batch(
        token_ids=tokens,
        segment_ids=np.broadcast_to(used, shape).astype(np.int32),
        positions=np.broadcast_to(np.where(used, np.arange(TIME), 0), shape).astype(np.int32),
        is_action=np.broadcast_to((np.arange(TIME) > 5) & used, shape),
        behavior_logprob=np.zeros(shape, np.float32),
        reward=np.zeros(shape, np.float32),
        discount=np.zeros(shape, np.float32),
        weight_version=np.zeros(shape, np.int32),
    )
    mesh = sharding.make_mesh(2, 1)
    config = OptimizerConfig(learning_rate=1e-2, warmup_updates=5)
    init, step = build_sft(MODEL, config, 120, mesh, context_weight=0.1)
    params = jax.device_put(
        model.init(jax.random.key(3), MODEL), sharding.parameter_shardings(mesh, MODEL)
    )
    state, losses = init(params), []
    for update in range(120):
        at = (update * ROWS) % 64
        batch = jax.tree.map(lambda x, at=at: x[at : at + ROWS], data)
        params, state, metrics = step(params, state, batch)
        losses.append(finish(metrics)["loss"])
        assert metrics["loss"][1] == 4 * ROWS
    assert losses[0] > 3.5
    assert np.mean(losses[-8:]) < 0.5
    assert step._cache_size() == 1


def test_context_weight_adds_the_loss_of_what_is_read():
    mesh = sharding.make_mesh(1, 1)
    # Without a clip, the first moment after one step is a tenth of the gradient.
    config = OptimizerConfig(warmup_updates=0, clip_norm=1e9)
    batch = pack(episodes())
    reading = batch.replace(is_action=(batch.segment_ids > 0) & ~batch.is_action)
    plain = build_sft(MODEL, config, 8, mesh)
    both = build_sft(MODEL, config, 8, mesh, context_weight=1.0)

    def gradient(built, batch):
        init, step = built
        params = jax.tree.map(jnp.copy, ACTOR)
        _, state, metrics = step(params, init(params), batch)
        return jax.device_get(state[1][0].mu), float(metrics["loss"][0])

    actions, loss = gradient(plain, batch)
    context, _ = gradient(plain, reading)
    total, same_loss = gradient(both, batch)
    assert_close(total, jax.tree.map(np.add, actions, context))
    # The logged loss is that of the action tokens alone.
    assert same_loss == pytest.approx(loss)
