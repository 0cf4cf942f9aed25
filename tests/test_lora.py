"""Adapters on a frozen model: what they compute, what is trained and held, and a whole run."""

import functools
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import RUN, command

from copc_jax import hf, model, sharding, staging
from copc_jax.checkpoint import Checkpointer, abstract
from copc_jax.config import parse
from copc_jax.learner import LearnerConfig, OptimizerConfig, build_learner
from copc_jax.methods import METHODS, LossConfig
from copc_jax.metrics import read_metrics
from copc_jax.model import LoraConfig, ModelConfig
from copc_jax.types import Trajectory

ROWS, TIME = 8, 24
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
    tie_word_embeddings=False,
    max_position_embeddings=TIME,
)
LORA = LoraConfig(rank=3, alpha=6.0)
MESH = {"mesh": (2, 2), "micro_batches": 2}
# The large epsilon keeps Adam from turning the rounding of tiny gradients into whole steps.
ADAM = OptimizerConfig(learning_rate=1e-2, warmup_updates=0, epsilon=1e-3)
BASE = jax.tree.map(lambda x: 2.0 * x, model.init(jax.random.key(0), MODEL))


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
def learner_of(method="copc", *, mesh=(1, 1), lora=LORA, **settings):
    config = LearnerConfig(
        model=MODEL,
        method=METHODS[method],
        loss=LossConfig(lambda_=0.95),
        actor=ADAM,
        critic=ADAM,
        updates=8,
        reduce=METHODS[method].reduce["search"],
        lora=lora,
        **settings,
    )
    return build_learner(config, sharding.make_mesh(*mesh))


@jax.jit
def log_probs(params, batch):
    hidden = model.forward(params, MODEL, batch.token_ids, batch.segment_ids, batch.positions)
    return model.token_logprob(params, MODEL, hidden, batch.token_ids, batch.segment_ids)


@functools.cache
def make_batch():
    """Pack episodes with behavior log-probs near those of `BASE`: ratios spread around 1."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(ROWS):
        is_action = np.repeat([False, True, False, True], rng.integers(2, 5, size=4))
        episode = Trajectory(
            prompt_id=str(index),
            sample=0,
            token_ids=rng.integers(1, MODEL.vocab_size, is_action.size).astype(np.int32),
            is_action=is_action,
            behavior_logprob=np.where(is_action, -1.0, 0.0).astype(np.float32),
            weight_version=np.where(is_action, 0, -1).astype(np.int32),
            reward=float(index % 2),
            status="done",
        )
        packed, _ = staging.pack(
            [episode],
            rows=1,
            time=TIME,
            learner_version=0,
            staleness=1,
            gamma=0.97,
            pad_id=0,
        )
        rows.append(packed)
    batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    noise = 0.2 * np.sin(7.0 * batch.token_ids + 3.0 * batch.positions)
    recorded = np.minimum(np.asarray(log_probs(BASE, batch)) + noise, 0.0)
    recorded = np.where(batch.is_action, recorded, 0.0).astype(np.float32)
    return batch.replace(behavior_logprob=recorded)


@functools.cache
def stepped(updates=2, **settings):
    """Return the state, on the host, and the metrics of the last of some steps."""
    learner = learner_of(**settings)
    batch = jax.device_put(make_batch(), learner.batch_sharding)
    state, metrics = learner.init(BASE), {}
    for _ in range(updates):
        state, metrics = learner.step(state, batch)
    return jax.device_get((state, metrics))


def sizes(tree):
    """Count the entries of a tree's arrays, scalars left out."""
    return sum(x.size for x in jax.tree.leaves(tree) if x.ndim)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left, right, tolerance=5e-5):
    close = functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance)
    jax.tree.map(close, left, right)


def random_adapters():
    """Give adapters both of whose matrices are not zero."""
    drawn = model.init_lora(jax.random.key(5), MODEL, LORA)
    noise = lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    return jax.tree.map(lambda x: jnp.where(x == 0, noise(x), x), drawn)


# --- What adapters compute -------------------------------------------------------------------


def test_fresh_adapters_change_no_bit():
    drawn = model.init_lora(jax.random.key(1), MODEL, LORA)
    a, b = drawn["layers"]["gate_lora_a"], drawn["layers"]["gate_lora_b"]
    assert float(a.std()) == pytest.approx(MODEL.hidden_size**-0.5, rel=0.2)
    assert not b.any()
    adapted = model.with_lora(BASE, drawn, LORA.scale)
    assert_equal(log_probs(adapted, make_batch()), log_probs(BASE, make_batch()))
    assert_equal(model.merge_lora(BASE, drawn, LORA.scale), BASE)


def test_merged_weights_are_the_sum_and_give_the_same_log_probs():
    adapters = random_adapters()
    merged = model.merge_lora(BASE, adapters, LORA.scale)
    leaves = adapters["layers"]
    for name in ("query", "key", "value", "attention_output", "gate", "up", "down"):
        product = np.einsum("lir,lro->lio", leaves[f"{name}_lora_a"], leaves[f"{name}_lora_b"])
        want = BASE["layers"][name] + 2.0 * product
        np.testing.assert_allclose(merged["layers"][name], want, atol=1e-5)
    # alpha / rank is 2; nothing else is in the merged tree.
    assert jax.tree.structure(merged) == jax.tree.structure(BASE)
    together = log_probs(model.with_lora(BASE, adapters, LORA.scale), make_batch())
    assert np.abs(np.asarray(together) - log_probs(BASE, make_batch())).max() > 0.1
    # Log-probs are about -10: this is some ten roundings of float32.
    np.testing.assert_allclose(together, log_probs(merged, make_batch()), atol=1e-4)


def test_gradients_are_those_of_the_weight_projected_on_the_adapter():
    adapters = random_adapters()
    total = lambda params: jnp.sum(log_probs(params, make_batch()))
    got = jax.grad(lambda x: total(model.with_lora(BASE, x, LORA.scale)))(adapters)["layers"]
    whole = jax.grad(total)(model.merge_lora(BASE, adapters, LORA.scale))["layers"]
    for name in ("query", "key", "value", "attention_output", "gate", "up", "down"):
        a, b = (adapters["layers"][f"{name}_lora_{x}"] for x in "ab")
        for matrix, form, other in (("a", "lio,lro->lir", b), ("b", "lio,lir->lro", a)):
            want = 2.0 * np.einsum(form, whole[name], other)
            scale = np.abs(want).max()
            np.testing.assert_allclose(
                got[f"{name}_lora_{matrix}"] / scale, want / scale, atol=1e-4
            )


def test_the_first_step_follows_the_projected_gradient():
    start = jax.device_get(learner_of().init(BASE))
    after, metrics = stepped(updates=1)
    # With B = 0 the start is that of training all weights.
    targets = jax.device_get(learner_of().prepare(learner_of().init(BASE), make_batch()))
    sampled = make_batch().is_action
    assert_close(targets.policy_logprob, np.where(sampled, log_probs(BASE, make_batch()), 0.0))
    _, factor = learner_of().contributions(make_batch(), targets)
    count = metrics["actor/loss"][1]
    total = lambda params: -jnp.sum(factor * log_probs(params, make_batch())) / count
    whole = jax.grad(total)(BASE)["layers"]
    grads = {}
    for name, leaf in start.actor["lora"]["layers"].items():
        kernel, matrix = name.split("_lora_")
        # With B = 0 nothing moves A.
        grads[name] = jnp.zeros_like(leaf)
        if matrix == "b":
            a = start.actor["lora"]["layers"][f"{kernel}_lora_a"]
            grads[name] = 2.0 * jnp.einsum("lio,lir->lro", whole[kernel], a)
    norm = float(optax.tree.norm(grads))
    assert norm == pytest.approx(float(metrics["actor/gradient_norm"][0]), rel=1e-4)
    moments = after.actor_opt[1][0].mu["layers"]
    clip = min(1.0, ADAM.clip_norm / norm)
    assert_close(moments, {name: (1 - ADAM.beta1) * clip * x for name, x in grads.items()}, 1e-5)


# --- What is trained and held ----------------------------------------------------------------


def test_the_base_stays_and_adapters_and_value_head_move():
    start = jax.device_get(learner_of().init(BASE))
    # The value head starts at zero: B of the critic moves from the second update on, A later.
    after, _ = stepped(updates=3)
    assert_equal(after.actor["base"], BASE)
    assert set(after.critic) == {"layers", "value_head"}
    for old, new in (
        (start.actor["lora"], after.actor["lora"]),
        (start.critic, after.critic),
    ):
        for path, leaf in model.flatten(old).items():
            assert not np.array_equal(leaf, model.flatten(new)[path]), path
    # Actor and critic do not start alike.
    a = lambda network: network["layers"]["query_lora_a"]
    assert not np.array_equal(a(start.actor["lora"]), a(start.critic))


def test_moments_and_gradients_are_of_the_size_of_the_adapters():
    state, _ = stepped()
    per_layer = sum(
        LORA.rank * (inputs + outputs)
        for inputs, outputs in (
            *((32, 32), (32, 16), (32, 16), (32, 32)),
            *((32, 48), (32, 48), (48, 32)),
        )
    )
    assert sizes(state.actor["lora"]) == 2 * per_layer
    assert sizes(state.actor_opt) == 2 * 2 * per_layer
    assert sizes(state.critic_opt) == 2 * (2 * per_layer + MODEL.hidden_size)
    assert sizes(state) == sizes(BASE) + 3 * (4 * per_layer + MODEL.hidden_size)


def test_chosen_targets_alone_are_trained():
    lora = LoraConfig(rank=2, targets="q,down")
    state = jax.eval_shape(learner_of(lora=lora).init, BASE)
    names = {"query_lora_a", "query_lora_b", "down_lora_a", "down_lora_b"}
    assert set(state.actor["lora"]["layers"]) == set(state.critic["layers"]) == names


def test_a_method_without_a_critic_holds_none():
    state = jax.eval_shape(learner_of("gspo").init, BASE)
    assert state.critic == {}
    assert sizes(state.critic_opt) == 0


def test_without_adapters_the_state_is_as_ever():
    learner = learner_of(lora=LoraConfig())
    state = learner.init(BASE)
    assert jax.tree.structure(state.actor) == jax.tree.structure(BASE)
    assert learner.policy_params(state) is state.actor


@pytest.mark.parametrize(
    "settings", [{"micro_batches": 4, "remat": True, "logprob_chunk": 5}, MESH], ids=str
)
def test_however_the_work_is_cut_the_update_is_the_same(settings):
    (whole, figures), (cut, others) = stepped(), stepped(**settings)
    assert_close(cut, whole)
    assert_close(others, figures, tolerance=2e-4)
    assert_equal(cut.actor["base"], BASE)


def test_adapters_and_their_moments_are_split_like_their_weights():
    learner = learner_of(**MESH)
    state = learner.init(BASE)
    actor = state.actor["lora"]["layers"]
    moments = state.actor_opt[1][0].nu["layers"]
    for leaves in (actor, moments, state.critic["layers"]):
        # in x rank, "embed" over data; rank x out, "heads" over model.
        assert leaves["query_lora_a"].sharding.shard_shape((2, 32, 3)) == (2, 16, 3)
        assert leaves["query_lora_b"].sharding.shard_shape((2, 3, 32)) == (2, 3, 16)
        assert leaves["down_lora_a"].sharding.shard_shape((2, 48, 3)) == (2, 24, 3)
    state, _ = learner.step(state, jax.device_put(make_batch(), learner.batch_sharding))
    same = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, learner.state_sharding
    )
    assert all(jax.tree.leaves(same))


def test_a_method_with_further_steps_of_the_critic_takes_them_on_the_same_base():
    sao, _ = stepped(method="sao", updates=1)
    assert int(sao.critic_opt[1][0].count) == 2
    assert_equal(sao.actor["base"], BASE)


# --- Export, resume, refusals ----------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, MESH], ids=str)
def test_an_exported_model_gives_the_log_probs_of_the_learner(settings, tmp_path):
    learner = learner_of(**settings)
    state = jax.device_put(stepped()[0], learner.state_sharding)
    hf.save_hf(tmp_path / "model", learner.policy_params(state), MODEL)
    loaded, config = hf.load_hf(tmp_path / "model")
    assert config == MODEL
    batch = jax.device_put(make_batch(), learner.batch_sharding)
    want = jax.device_get(learner.prepare(state, batch).policy_logprob)
    sampled = make_batch().is_action
    np.testing.assert_allclose(log_probs(loaded, make_batch())[sampled], want[sampled], atol=2e-4)
    assert np.abs(want - log_probs(BASE, make_batch()))[sampled].max() > 1e-2
    # Reading the weights donates nothing.
    assert int(learner.step(state, batch)[0].version) == 3


def test_resume_is_exact(tmp_path):
    learner = learner_of()
    batch = jax.device_put(make_batch(), learner.batch_sharding)
    state = jax.device_put(stepped()[0], learner.state_sharding)
    like = abstract(state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
    restored, _ = Checkpointer(tmp_path).restore(2, like)
    assert_equal(jax.device_get(learner.step(restored, batch)), stepped(updates=3))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--lora.rank=-1", "lora.rank must be 0"),
        ("--lora.alpha=0", "lora.alpha must be"),
        ("--lora.targets=q,embed", "lora.targets: 'embed' is unknown"),
        ("--lora.targets=", "lora.targets: '' is unknown"),
    ],
)
def test_impossible_adapters_are_refused_by_name(flag, message, capsys):
    with pytest.raises(SystemExit) as refused:
        parse([flag])
    assert refused.value.code == 2
    assert message in " ".join("".join(capsys.readouterr()).split())


# --- A whole run -----------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_a_run_trains_adapters_and_hands_out_whole_models(tmp_path, cache):
    arguments = [
        *(*RUN, "--lora.rank=2", "--lora.alpha=8", "--updates=2", "--staleness=0"),
        *("--critic-warmup-updates=0", "--checkpoint-every=1"),
        # Nothing is answered yet, and a reward of 0 would move nothing.
        *("--search.reward-format=1", "--actor.learning-rate=0.1", "--actor.warmup-updates=0"),
        f"--cache-dir={cache}",
    ]

    def finish(*more):
        done = subprocess.run(command(*more), capture_output=True, text=True, timeout=380)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folder = tmp_path / "run"
    said = finish(*arguments, f"--run-dir={folder}")
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["actor/gradient_norm"] > 0
    # After an update servers sample from merged weights, and agree with the learner's adapters.
    assert rows[2]["rollout/decode_gap_max"] < 1e-4
    assert json.loads((folder / "config.json").read_text())["lora"]["rank"] == 2
    trained, config = hf.load_hf(folder / "model")
    (start,) = re.findall(r"warm start: (\S+)", said)
    before, _ = hf.load_hf(start)
    assert_equal(trained["embed"], before["embed"])
    moved = np.asarray(trained["layers"]["query"] - before["layers"]["query"])
    assert np.linalg.matrix_rank(moved[0], tol=1e-5) == 2
    assert moved.shape == (1, config.hidden_size, config.hidden_size)

    assert "resumed from update 2" in finish(f"--resume={folder}", "--updates=3")
