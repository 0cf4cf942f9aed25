"""The decoder on a (2, 2) mesh of fake devices against one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from copc_jax import hf, model, sharding
from copc_jax.model import ModelConfig

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)


def batch(rows: int = 4, time: int = 8):
    token_ids = jax.random.randint(jax.random.key(1), (rows, time), 0, 20, jnp.int32)
    # Two segments and then padding in each row.
    segment_ids = jnp.broadcast_to(
        jnp.asarray([1, 1, 1, 2, 2, 2, 2, 0], jnp.int32)[None], (rows, time)
    )
    positions = jnp.broadcast_to(
        jnp.asarray([0, 1, 2, 0, 1, 2, 3, 0], jnp.int32)[None], (rows, time)
    )
    return token_ids, segment_ids, positions


def random_params(config: ModelConfig) -> model.Params:
    generator = np.random.default_rng(0)
    return model.unflatten(
        {
            path: jnp.asarray(spec.mean + 0.3 * generator.normal(size=spec.shape), jnp.float32)
            for path, spec in model.parameter_table(config).items()
        }
    )


def loss(params, config, token_ids, segment_ids, positions):
    hidden = model.forward(params, config, token_ids, segment_ids, positions)
    score = model.token_logprob(params, config, hidden, token_ids, segment_ids)
    return -jnp.sum(score) / 20, score


def test_rules_split_embedding_over_data_and_heads_over_model():
    mesh = sharding.make_mesh(2, 2)
    shardings = sharding.parameter_shardings(mesh, CONFIG)
    specs = jax.tree.map(lambda s: s.spec, shardings)
    assert specs["embed"] == PartitionSpec("model", "data")
    assert specs["layers"]["query"] == PartitionSpec(None, "data", "model")
    assert specs["layers"]["attention_output"] == PartitionSpec(None, "model", "data")
    assert specs["layers"]["down"] == PartitionSpec(None, "model", "data")
    assert specs["layers"]["attention_norm"] == PartitionSpec(None, None)
    assert jax.tree.structure(shardings) == jax.tree.structure(
        jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))
    )


@pytest.mark.parametrize("vocab_size", [24, 21])
def test_forward_and_gradient_equal_those_of_one_device(vocab_size, tmp_path):
    # 21 words cannot be split in two: they stay whole and are not padded, so the probabilities of
    # exactly 21 words sum to 1 and an export has 21 rows.
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    params = random_params(config)
    step = jax.value_and_grad(loss, has_aux=True)
    expected = jax.jit(step, static_argnums=1)(params, config, *batch())

    mesh = sharding.make_mesh(2, 2)
    placed = jax.device_put(params, sharding.parameter_shardings(mesh, config))
    inputs = jax.device_put(batch(), sharding.batch_sharding(mesh))
    result = jax.jit(step, static_argnums=1)(placed, config, *inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, expected)

    hf.save_hf(tmp_path / "model", placed, config)
    loaded, _ = hf.load_hf(tmp_path / "model")
    assert loaded["embed"].shape == (vocab_size, 16)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_training_compiles_once_and_keeps_moments_with_their_parameters():
    mesh = sharding.make_mesh(2, 2)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-2))
    )
    shardings = sharding.parameter_shardings(mesh, CONFIG)
    params = jax.device_put(random_params(CONFIG), shardings)
    state_shapes = jax.eval_shape(optimizer.init, params)
    state_shardings = sharding.optimizer_shardings(mesh, CONFIG, "lm", state_shapes)
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    adam = state[1][0]
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moments) == shardings
    assert adam.count.sharding == sharding.replicated(mesh)
    # A quarter of all of it, and the norms, which are small and whole.
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((params, adam)))
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves((params, adam)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(set(held.values())) == 1
    assert whole / 4 <= held[mesh.devices[0, 0]] < 0.27 * whole

    traces = []

    def step(params, state, *inputs):
        traces.append(1)
        gradient, _ = jax.grad(loss, has_aux=True)(params, CONFIG, *inputs)
        # optax raises its decay to an integer step.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, out_shardings=(shardings, state_shardings), donate_argnums=(0, 1))
    inputs = jax.device_put(batch(), sharding.batch_sharding(mesh))
    for _ in range(3):
        params, state = step(params, state, *inputs)
    assert len(traces) == 1 and step._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_moments_of_a_critic_follow_its_table_and_other_leaves_are_replicated():
    mesh = sharding.make_mesh(2, 2)
    critic = jax.eval_shape(lambda key: model.init(key, CONFIG, head="value"), jax.random.key(0))
    # A factored moment has a parameter's path but not its shape.
    factored = {"layers": {"gate": jax.ShapeDtypeStruct((2, 16), jnp.float32)}}
    state = (critic, {"count": jax.ShapeDtypeStruct((), jnp.int32)}, factored)
    shardings = sharding.optimizer_shardings(mesh, CONFIG, "value", state)
    assert shardings[0] == sharding.parameter_shardings(mesh, CONFIG, "value")
    whole = sharding.replicated(mesh)
    assert shardings[1:] == ({"count": whole}, {"layers": {"gate": whole}})


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    assert sharding.make_mesh(1, 1).size == 1
    with pytest.raises(ValueError, match=r"5 x 2 needs 10 devices, 8 are available"):
        sharding.make_mesh(5, 2)
    with pytest.raises(ValueError, match="needs 0 devices"):
        sharding.make_mesh(0, 2)
