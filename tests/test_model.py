"""The decoder against a float64 loop, against itself rearranged, and against hand-made cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copc_jax import model
from copc_jax.model import ModelConfig, RopeScaling

LLAMA = ModelConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
)
CONFIGS = {
    "llama-tied": LLAMA,
    "llama-untied": dataclasses.replace(LLAMA, tie_word_embeddings=False),
    "llama3-scaled": dataclasses.replace(
        LLAMA, rope_theta=100.0, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16)
    ),
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

forward = jax.jit(model.forward, static_argnums=1, static_argnames=("remat", "unroll"))
logprob = jax.jit(model.token_logprob_and_entropy, static_argnums=1, static_argnames="chunk")
values = jax.jit(model.values, static_argnums=1)
prefill = jax.jit(model.prefill, static_argnums=1, static_argnames="attend")
decode_step = jax.jit(model.decode_step, static_argnums=1)


@functools.cache
def random_params(config: ModelConfig, head: model.Head = "lm", scale: float = 0.4):
    """Parameters of which every leaf matters: no zero bias, no unit norm."""
    generator = np.random.default_rng(1)
    return model.unflatten(
        {
            path: jnp.asarray(spec.mean + scale * generator.normal(size=spec.shape), jnp.float32)
            for path, spec in model.parameter_table(config, head).items()
        }
    )


def rows(*segments: list[int], time: int):
    """One row that packs `segments`, padded to `time`."""
    tokens, ids, positions = ([0] * time for _ in range(3))
    at = 0
    for number, segment in enumerate(segments, start=1):
        for position, token in enumerate(segment):
            tokens[at], ids[at], positions[at] = token, number, position
            at += 1
    return tuple(jnp.asarray([x], jnp.int32) for x in (tokens, ids, positions))


def draw(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, length).tolist()


def oracle_logits(params, config: ModelConfig, tokens: list[int]) -> np.ndarray:
    """Logits after each token of one sequence: float64, one token, layer and head at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half = config.head_dim // 2

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + config.rms_norm_eps) * scale

    def turn(head, position):
        out = np.zeros_like(head)
        for i in range(half):
            frequency = config.rope_theta ** (-2 * i / config.head_dim)
            if config.rope_scaling is not None:
                s = config.rope_scaling
                wavelength = 2 * np.pi / frequency
                context = s.original_max_position_embeddings
                if wavelength > context / s.low_freq_factor:
                    frequency /= s.factor
                elif wavelength >= context / s.high_freq_factor:
                    smooth = (context / wavelength - s.low_freq_factor) / (
                        s.high_freq_factor - s.low_freq_factor
                    )
                    frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            a, b = head[i], head[i + half]
            out[i], out[i + half] = a * cos - b * sin, b * cos + a * sin
        return out

    hidden = [params["embed"][token] for token in tokens]
    for number in range(config.num_layers):
        layer = {name: leaf[number] for name, leaf in params["layers"].items()}

        def heads(x, name, count, position, layer=layer):
            out = x @ layer[name]
            if config.attention_bias:
                out = out + layer[f"{name}_bias"]
            out = out.reshape(count, config.head_dim)
            if config.qk_norm and name != "value":
                out = np.stack([norm(head, layer[f"{name}_norm"]) for head in out])
            return out if name == "value" else np.stack([turn(head, position) for head in out])

        normed = [norm(x, layer["attention_norm"]) for x in hidden]
        queries = [heads(x, "query", config.num_heads, t) for t, x in enumerate(normed)]
        keys = [heads(x, "key", config.num_kv_heads, t) for t, x in enumerate(normed)]
        value = [heads(x, "value", config.num_kv_heads, t) for t, x in enumerate(normed)]
        for t, x in enumerate(hidden):
            attended = []
            for head in range(config.num_heads):
                shared = head // (config.num_heads // config.num_kv_heads)
                scores = np.array([queries[t][head] @ keys[s][shared] for s in range(t + 1)])
                weight = np.exp((scores - scores.max()) / np.sqrt(config.head_dim))
                weight /= weight.sum()
                attended.append(sum(weight[s] * value[s][shared] for s in range(t + 1)))
            x = x + np.concatenate(attended) @ layer["attention_output"]
            y = norm(x, layer["mlp_norm"])
            gate = y @ layer["gate"]
            hidden[t] = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
    head = params["embed" if config.tie_word_embeddings else "head"]
    return np.stack([norm(x, params["final_norm"]) @ head.T for x in hidden])


def oracle_logprob(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token from the logits before it; 0 for the first."""
    out = np.zeros(len(tokens))
    for t in range(1, len(tokens)):
        shifted = logits[t - 1] - logits[t - 1].max()
        out[t] = shifted[tokens[t]] - np.log(np.exp(shifted).sum())
    return out


# ------------------------------------------------------------------------------ forward


@each_config
def test_forward_equals_a_loop_over_tokens_layers_and_heads(config):
    params, tokens = random_params(config), draw(2, 9)
    token_ids, segment_ids, positions = rows(tokens, time=11)
    hidden = forward(params, config, token_ids, segment_ids, positions)
    expected = oracle_logits(params, config, tokens)
    logits = model.logits(params, config, hidden)
    np.testing.assert_allclose(logits[:9], expected, atol=2e-5, rtol=2e-5)
    result, entropy = logprob(params, config, hidden, token_ids, segment_ids)
    np.testing.assert_allclose(result[0, :9], oracle_logprob(expected, tokens), atol=2e-5)
    probability = np.exp(expected - np.log(np.exp(expected).sum(1, keepdims=True)))
    expected_entropy = -(probability * np.log(probability)).sum(1)
    np.testing.assert_allclose(entropy[0, 1:9], expected_entropy[:8], atol=2e-5)
    assert entropy[0, 0] == 0.0


@pytest.mark.parametrize("options", [{"remat": True}, {"unroll": 2}])
def test_remat_and_unrolling_change_nothing(options):
    params, batch = random_params(LLAMA), rows(draw(1, 5), draw(2, 4), time=10)

    def loss(params, **options):
        hidden = model.forward(params, LLAMA, *batch, **options)
        return model.token_logprob(params, LLAMA, hidden, *batch[:2]).sum()

    plain = jax.jit(jax.value_and_grad(loss))(params)
    other = jax.jit(jax.value_and_grad(functools.partial(loss, **options)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), plain, other)


def test_quarters_of_a_long_row_give_what_the_whole_row_gives():
    # 128 tokens are attended in quarters, 127 are not.
    params, segments = random_params(LLAMA), [draw(1, 45), draw(2, 60), draw(3, 20)]

    @jax.jit
    def step(params, *batch):
        def loss(params):
            hidden = model.forward(params, LLAMA, *batch)
            score = model.token_logprob(params, LLAMA, hidden, *batch[:2])
            return score.sum(), score

        return jax.grad(loss, has_aux=True)(params)

    whole, quarters = (step(params, *rows(*segments, time=time)) for time in (127, 128))
    np.testing.assert_allclose(quarters[1][:, :127], whole[1], atol=1e-4)
    for path, leaf in model.flatten(quarters[0]).items():
        expected = model.flatten(whole[0])[path]
        np.testing.assert_allclose(leaf, expected, atol=1e-4 * np.abs(expected).max())


def test_a_packed_segment_equals_the_segment_alone_and_ignores_its_neighbor():
    params, first, second = random_params(LLAMA), draw(3, 6), draw(4, 7)

    def score(*segments, time):
        batch = rows(*segments, time=time)
        hidden = forward(params, LLAMA, *batch)
        return np.asarray(logprob(params, LLAMA, hidden, *batch[:2])[0][0])

    alone, packed = score(second, time=16), score(first, second, time=16)
    np.testing.assert_allclose(packed[6:13], alone[:7], atol=1e-5)
    changed = score([(first[0] + 1) % 31, *first[1:]], second, time=16)
    assert np.abs(changed[1:6] - packed[1:6]).max() > 1e-3
    np.testing.assert_array_equal(changed[6:13], packed[6:13])


def test_values_and_logprobs_do_not_depend_on_padding_and_stay_finite_there():
    actor, critic = random_params(LLAMA), random_params(LLAMA, "value")
    tokens = draw(5, 6)
    for time in (6, 14):
        token_ids, segment_ids, positions = rows(tokens, time=time)
        garbage = (
            jnp.where(segment_ids == 0, 17, token_ids),
            jnp.where(segment_ids == 0, 99, positions),
        )
        outputs = []
        for ids, places in ((token_ids, positions), garbage):
            hidden = forward(actor, LLAMA, ids, segment_ids, places)
            assert np.isfinite(hidden).all()
            score = logprob(actor, LLAMA, hidden, ids, segment_ids)[0]
            body = forward(critic, LLAMA, ids, segment_ids, places)
            value = values(critic, LLAMA, body, segment_ids)
            assert (np.asarray(score)[0, 6:] == 0).all() and (np.asarray(value)[0, 6:] == 0).all()
            outputs.append((score[0, :6], value[0, :6]))
        np.testing.assert_array_equal(outputs[0], outputs[1])
        if time == 6:
            reference = outputs[0]
        np.testing.assert_allclose(outputs[0], reference, atol=1e-5)


def test_the_number_of_rows_does_not_move_a_logprob():
    params = random_params(LLAMA)
    batch = [rows(draw(seed, 9), time=12) for seed in range(8)]
    together = [jnp.concatenate(column) for column in zip(*batch, strict=True)]
    hidden = forward(params, LLAMA, *together)
    score = logprob(params, LLAMA, hidden, *together[:2])[0]
    for row, single in enumerate(batch):
        alone = logprob(params, LLAMA, forward(params, LLAMA, *single), *single[:2])[0]
        np.testing.assert_allclose(score[row], alone[0], atol=1e-5)


# ------------------------------------------------------------------------------ heads


def one_hot_model(vocab: int) -> tuple[model.Params, ModelConfig]:
    """A head whose logits are 40 times the hidden state itself."""
    config = dataclasses.replace(
        LLAMA, vocab_size=vocab, hidden_size=vocab, tie_word_embeddings=False
    )
    return {"head": 40.0 * jnp.eye(vocab)}, config


def test_all_mass_on_the_true_next_token_gives_logprob_zero_and_no_shift_does():
    params, config = one_hot_model(8)
    token_ids, segment_ids, _ = rows([3, 5, 1, 7], [2, 6], time=8)
    following = jnp.asarray([5, 1, 7, 0, 6, 0, 0, 0])
    score = logprob(params, config, jax.nn.one_hot(following, 8), token_ids, segment_ids)[0]
    np.testing.assert_allclose(score, np.zeros((1, 8)), atol=1e-6)
    late = jnp.roll(following, 1)
    score = logprob(params, config, jax.nn.one_hot(late, 8), token_ids, segment_ids)[0]
    np.testing.assert_allclose(score[0, [1, 2, 3, 5]], -40.0, atol=1e-4)


def test_the_value_of_a_token_is_that_of_the_state_before_it():
    # The critic returns the index of its position; prompt of 3 and response of 2 tokens, then a
    # second segment. Taken one position late the response would read [3, 4].
    _, segment_ids, _ = rows([1, 1, 1, 1, 1], [1, 1, 1], time=9)
    hidden = jnp.arange(9.0)[:, None] * jnp.eye(1, LLAMA.hidden_size)
    head = {"kernel": jnp.eye(1, LLAMA.hidden_size)[0], "bias": jnp.asarray(0.0)}
    value = values({"value_head": head}, LLAMA, hidden, segment_ids)
    np.testing.assert_array_equal(value, [[0, 0, 1, 2, 3, 0, 5, 6, 0]])


def test_a_wide_vocabulary_keeps_float32_logprobs():
    vocab = 151_936
    config = dataclasses.replace(LLAMA, vocab_size=vocab, hidden_size=2)
    # Logit 8 everywhere but 10 at token 5.
    embed = jnp.full((vocab, 2), 2.0).at[:, 1].set(0.0).at[5, 1].set(0.5)
    params = {"embed": embed.astype(jnp.bfloat16)}
    hidden = jnp.full((2, 2), 4.0)
    score = logprob(params, config, hidden, jnp.asarray([[0, 5]]), jnp.asarray([[1, 1]]))[0]
    assert score.dtype == jnp.float32
    np.testing.assert_allclose(score[0, 1], -9.931256, atol=1e-5)


def test_logprobs_are_exponent_safe():
    params, config = one_hot_model(4)
    token_ids, segment_ids, _ = rows([0, 1, 2], time=3)
    hidden = 1e4 * jax.nn.one_hot(jnp.asarray([1, 3, 0]), 4)
    for chunk in (None, 2):
        score, entropy = logprob(params, config, hidden, token_ids, segment_ids, chunk=chunk)
        np.testing.assert_array_equal(score, [[0.0, 0.0, -4e5]])
        np.testing.assert_array_equal(entropy, np.zeros((1, 3)))


@pytest.mark.parametrize("chunk", [5, 100])
def test_chunks_give_the_same_logprobs_entropies_and_gradients(chunk):
    params, batch = random_params(LLAMA), rows(draw(1, 9), draw(2, 13), time=24)
    hidden = forward(params, LLAMA, *batch)

    @functools.partial(jax.jit, static_argnames="chunk")
    def loss(hidden, params, chunk):
        score, entropy = model.token_logprob_and_entropy(
            params, LLAMA, hidden, *batch[:2], chunk=chunk
        )
        return jnp.sum(jnp.sin(score) + 0.3 * entropy), (score, entropy)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    whole, pieces = grad(hidden, params, chunk=None), grad(hidden, params, chunk=chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), whole, pieces)


@pytest.mark.parametrize("chunk", [None, 4, 7, 100])
def test_tokens_that_are_not_wanted_count_for_nothing(chunk):
    params = random_params(LLAMA)
    each = (
        rows(draw(1, 9), draw(2, 13), time=24),
        rows(draw(3, 20), time=24),
        rows(draw(4, 6), time=24),
    )
    batch = [jnp.concatenate(x) for x in zip(*each, strict=True)]
    wanted = np.random.default_rng(5).random((3, 24)) < 0.4
    wanted[2] = False
    wanted, weight = jnp.asarray(wanted), jnp.asarray(wanted, jnp.float32)
    hidden = forward(params, LLAMA, *batch)

    def loss(hidden, params, **settings):
        score, entropy = model.token_logprob_and_entropy(
            params, LLAMA, hidden, *batch[:2], **settings
        )
        score, entropy = (x * weight if not settings else x for x in (score, entropy))
        return jnp.sum(jnp.sin(score) + 0.3 * entropy), (score, entropy)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    want, got = grad(hidden, params), grad(hidden, params, chunk=chunk, wanted=wanted)
    assert np.count_nonzero(got[0][1][0]) == np.count_nonzero(want[0][1][0]) > 5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), want, got)


def test_chunks_need_less_memory():
    config = dataclasses.replace(LLAMA, vocab_size=4096)
    params = {"embed": jax.ShapeDtypeStruct((4096, 16), jnp.float32)}
    ids = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1024, 16), jnp.float32)

    def temporary_bytes(chunk):
        def loss(params, hidden, token_ids, segment_ids):
            return model.token_logprob(
                params, config, hidden, token_ids, segment_ids, chunk=chunk
            ).sum()

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden, ids, ids)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(64) < temporary_bytes(None) / 8


def test_probabilities_cover_exactly_the_vocabulary():
    params, config = random_params(LLAMA), LLAMA
    logits = model.logits(params, config, jnp.ones((1, 16)))
    assert logits.shape == (1, 31)
    token_ids = jnp.stack([jnp.zeros(31, jnp.int32), jnp.arange(31)], axis=1)
    segment_ids = jnp.ones((31, 2), jnp.int32)
    score = logprob(params, config, jnp.ones((62, 16)), token_ids, segment_ids)[0]
    np.testing.assert_allclose(np.exp(score[:, 1]).sum(), 1.0, rtol=1e-6)


# ------------------------------------------------------------------------------ parameters


@each_config
@pytest.mark.parametrize("head", ["lm", "value"])
def test_parameters_have_the_shapes_of_the_table(config, head):
    table = model.parameter_table(config, head)
    init = lambda key: model.init(key, config, head=head)
    params = model.flatten(jax.eval_shape(init, jax.random.key(0)))
    assert params == {
        path: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for path, spec in table.items()
    }
    assert all(len(spec.axes) == len(spec.shape) for spec in table.values())
    names = [spec.hf_name for spec in table.values() if spec.hf_name is not None]
    assert len(set(names)) == len(names)


def test_init_draws_what_the_table_says_and_leaves_do_not_depend_on_each_other():
    table = model.parameter_table(LLAMA)
    params = model.flatten(model.init(jax.random.key(3), LLAMA))
    for path, spec in table.items():
        if params[path].size > 300:
            np.testing.assert_allclose(params[path].std(), spec.std, rtol=0.2)
            np.testing.assert_allclose(params[path].mean(), spec.mean, atol=spec.std / 5)
    critic = model.flatten(model.init(jax.random.key(3), LLAMA, head="value"))
    np.testing.assert_array_equal(critic["layers", "gate"], params["layers", "gate"])
    assert np.abs(params["layers", "gate"] - params["layers", "up"]).max() > 0.1


def test_a_mimetic_start_looks_at_like_tokens_and_copies_them():
    config = dataclasses.replace(LLAMA, hidden_size=64, head_dim=16)
    params = model.mimetic_init(jax.random.key(0), config)
    shapes = {path: leaf.shape for path, leaf in model.flatten(params).items()}
    table = model.parameter_table(config)
    assert shapes == {path: spec.shape for path, spec in table.items()}
    layers = jax.tree.map(lambda leaf: np.asarray(leaf[1]), params["layers"])
    query = layers["query"].reshape(64, 4, 16)
    key, value = (np.repeat(layers[x].reshape(64, 2, 16), 2, axis=1) for x in ("key", "value"))
    output = layers["attention_output"].reshape(4, 16, 64)
    for head in range(4):
        looking = query[:, head] @ key[:, head].T
        copying = value[:, head] @ output[head]
        assert np.trace(looking) > 8 and np.trace(copying) > 8
    with pytest.raises(ValueError, match="hidden_size"):
        model.mimetic_init(jax.random.key(0), dataclasses.replace(LLAMA, head_dim=10))


def test_a_tied_head_is_one_leaf_that_gets_both_gradients():
    params, batch = random_params(LLAMA), rows(draw(1, 6), time=6)
    names = {name for path in model.flatten(params) for name in path}
    assert "head" not in names and "lm_head" not in names

    def loss(embed, head):
        untied = dataclasses.replace(LLAMA, tie_word_embeddings=False)
        tree = {**params, "embed": embed, "head": head}
        hidden = model.forward(tree, untied, *batch)
        return model.token_logprob(tree, untied, hidden, *batch[:2]).sum()

    def tied_loss(embed):
        tree = {**params, "embed": embed}
        hidden = model.forward(tree, LLAMA, *batch)
        return model.token_logprob(tree, LLAMA, hidden, *batch[:2]).sum()

    parts = jax.jit(jax.grad(loss, argnums=(0, 1)))(params["embed"], params["embed"])
    whole = jax.jit(jax.grad(tied_loss))(params["embed"])
    np.testing.assert_allclose(whole, parts[0] + parts[1], atol=1e-4, rtol=1e-4)


def test_a_critic_starts_at_zero_with_the_actors_body_and_shares_no_buffer():
    actor, batch = random_params(CONFIGS["llama-untied"]), rows(draw(1, 6), time=8)
    config = CONFIGS["llama-untied"]
    critic = model.critic_from_actor(actor, config)
    wanted = model.parameter_table(config, "value")
    assert set(model.flatten(critic)) == set(wanted)
    hidden = forward(critic, config, *batch)
    np.testing.assert_array_equal(hidden, forward(actor, config, *batch))
    np.testing.assert_array_equal(values(critic, config, hidden, batch[1]), np.zeros((1, 8)))
    table = model.parameter_table(config, "value")
    assert table["value_head", "kernel"].mean == table["value_head", "kernel"].std == 0.0
    pointers = [
        {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(t)} for t in (actor, critic)
    ]
    assert not pointers[0] & pointers[1]


@pytest.mark.parametrize(
    ("config", "head"),
    [(LLAMA, "value"), *((CONFIGS[name], "lm") for name in ("llama-untied", "qwen2", "qwen3"))],
    ids=["value", "llama-untied", "qwen2", "qwen3"],
)
def test_gradients_are_finite_and_reach_every_parameter(config, head):
    pair = rows(draw(1, 5), draw(2, 4), time=12), rows(draw(3, 12), time=12)
    batch = [jnp.concatenate(column) for column in zip(*pair, strict=True)]

    def loss(params):
        hidden = model.forward(params, config, *batch)
        if head == "value":
            return jnp.sum(jnp.square(1.0 - model.values(params, config, hidden, batch[1])))
        return model.token_logprob(params, config, hidden, *batch[:2]).sum()

    gradient = jax.jit(jax.grad(loss))(random_params(config, head))
    for path, leaf in model.flatten(gradient).items():
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_head_dim_is_not_derived_by_division():
    config = ModelConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=64,
        num_layers=1,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
    )
    table = model.parameter_table(config)
    shapes = {name: table["layers", name].shape[1:] for name in ("query", "key", "value")}
    assert shapes == {"query": (1024, 2048), "key": (1024, 1024), "value": (1024, 1024)}
    assert table["layers", "attention_output"].shape == (1, 2048, 1024)
    assert table["layers", "query_norm"].shape == (1, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"attention_bias": True, "qk_norm": True}, "qk_norm"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **change)


# ------------------------------------------------------------------------------ decoding


def garbage_cache(config: ModelConfig, slots: int, length: int) -> model.KVCache:
    """A cache full of what other sequences left behind."""
    empty = model.init_cache(config, slots, length)
    fill = lambda seed: lambda x: 3.0 * jax.random.normal(jax.random.key(seed), x.shape)
    return jax.tree.map(fill(7), empty)


@pytest.mark.parametrize(
    ("config", "attend"),
    [(LLAMA, None), (CONFIGS["qwen2"], 16), (CONFIGS["qwen3"], 16)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_cached_decoding_of_several_turns_equals_the_uncached_forward(config, attend):
    params = random_params(config)
    conversations = {3: draw(1, 14), 0: draw(2, 11)}
    reference = {
        slot: oracle_logits(params, config, tokens) for slot, tokens in conversations.items()
    }
    cache, held = garbage_cache(config, 5, 20), {3: 0, 0: 0}

    def check(logits, slot):
        np.testing.assert_allclose(logits, reference[slot][held[slot] - 1], atol=3e-5, rtol=3e-5)

    def extend(cache, turns: dict[int, int]):
        token_ids = np.full((3, 6), 9, np.int32)
        slots, starts, counts = (
            np.full(3, 4, np.int32),
            np.zeros(3, np.int32),
            np.zeros(3, np.int32),
        )
        for row, (slot, count) in enumerate(turns.items(), start=1):
            token_ids[row, :count] = conversations[slot][held[slot] : held[slot] + count]
            slots[row], starts[row], counts[row] = slot, held[slot], count
            held[slot] += count
        inputs = [jnp.asarray(x) for x in (token_ids, slots, starts, counts)]
        cache, logits = prefill(params, config, cache, *inputs, attend=attend)
        for row, slot in enumerate(turns, start=1):
            check(logits[row], slot)
        return cache

    def step(cache, active: tuple[int, ...]):
        token_ids, position, mask = np.full(5, 9), np.full(5, 2), np.zeros(5, bool)
        for slot in active:
            token_ids[slot], position[slot] = conversations[slot][held[slot]], held[slot]
            mask[slot] = True
            held[slot] += 1
        # Of a part: the slots that go on, in another order, and one that does not.
        slots = jnp.arange(5) if attend is None else jnp.asarray([*reversed(active), 2])
        inputs = (jnp.asarray(x)[slots] for x in (token_ids, position, mask))
        part = cache if attend is None else cache.take(slots, attend)
        part, logits = decode_step(params, config, part, *inputs)
        for slot in active:
            check(logits[list(slots).index(slot)], slot)
        return part if attend is None else cache.put(part, slots, jnp.asarray(position)[slots], 3)

    cache = extend(cache, {3: 4, 0: 2})
    cache = step(cache, (0, 3))
    cache = step(cache, (3,))
    cache = extend(cache, {0: 3, 3: 5})
    cache = step(cache, (0,))
    cache = step(cache, (3, 0))
    assert held == {3: 12, 0: 8}


def test_rows_without_tokens_and_idle_slots_touch_nothing():
    params, cache = random_params(LLAMA), garbage_cache(LLAMA, 3, 8)
    before = jax.tree.map(np.asarray, cache)
    token_ids = jnp.asarray([[1, 2, 3, 4]] * 2)
    after, _ = prefill(
        params,
        LLAMA,
        cache,
        token_ids,
        jnp.asarray([1, 1]),
        jnp.asarray([5, 2]),
        jnp.asarray([0, 2]),
    )
    changed = np.argwhere(np.abs(after.k - before.k).sum((0, 3, 4)) > 0)
    np.testing.assert_array_equal(changed, [[1, 2], [1, 3]])
    after, _ = decode_step(
        params,
        LLAMA,
        cache,
        jnp.asarray([1, 2, 3]),
        jnp.asarray([0, 7, 4]),
        jnp.asarray([False, True, False]),
    )
    changed = np.argwhere(np.abs(after.v - before.v).sum((0, 3, 4)) > 0)
    np.testing.assert_array_equal(changed, [[1, 7]])


def test_a_full_slot_drops_what_does_not_fit():
    # A chunk bucket may reach past the end of the cache; only its real tokens must be written.
    params, cache = random_params(LLAMA), model.init_cache(LLAMA, 2, 8)
    tokens = draw(1, 8)
    first = jnp.asarray([tokens[:6]]), jnp.asarray([1]), jnp.asarray([0]), jnp.asarray([6])
    cache, _ = prefill(params, LLAMA, cache, *first)
    second = jnp.asarray([tokens[6:] + [0] * 4])
    cache, logits = prefill(
        params, LLAMA, cache, second, jnp.asarray([1]), jnp.asarray([6]), jnp.asarray([2])
    )
    expected = oracle_logits(params, LLAMA, tokens)
    np.testing.assert_allclose(logits[0], expected[-1], atol=2e-5, rtol=2e-5)


def test_a_donated_cache_is_updated_in_place():
    params, cache = random_params(LLAMA), model.init_cache(LLAMA, 4, 64)
    inputs = jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    step = jax.jit(model.decode_step, static_argnums=1, donate_argnums=2)
    compiled = step.lower(params, LLAMA, cache, *inputs).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def test_bfloat16_parameters_give_float32_results_near_those_of_float32():
    params, batch = random_params(LLAMA, scale=0.1), rows(draw(1, 8), time=8)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    hidden = forward(half, LLAMA, *batch)
    score = logprob(half, LLAMA, hidden, *batch[:2])[0]
    assert hidden.dtype == score.dtype == jnp.float32
    exact = logprob(params, LLAMA, forward(params, LLAMA, *batch), *batch[:2])[0]
    np.testing.assert_allclose(score, exact, atol=0.05)
    cache = model.init_cache(LLAMA, 1, 8, jnp.bfloat16)
    inputs = batch[0], jnp.asarray([0]), jnp.asarray([0]), jnp.asarray([8])
    cache, logits = prefill(half, LLAMA, cache, *inputs)
    assert cache.k.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
