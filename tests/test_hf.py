"""Hugging Face folders: what is written is what transformers reads, and the rest is refused."""

import dataclasses
import datetime
import json
import resource
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken

from copc_jax import data, hf, model, sharding
from copc_jax.model import ModelConfig, RopeScaling

LLAMA = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    bos_token_id=1,
    eos_token_ids=(2, 5),
)
UNTIED = dataclasses.replace(LLAMA, tie_word_embeddings=False)
CONFIGS = {
    "llama-tied": LLAMA,
    "llama-untied": UNTIED,
    "llama3-scaled": dataclasses.replace(
        LLAMA, rope_theta=5e5, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), eos_token_ids=(2,)
    ),
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True, bos_token_id=None),
    "qwen3": dataclasses.replace(UNTIED, qk_norm=True, eos_token_ids=()),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def random_params(config: ModelConfig) -> model.Params:
    generator = np.random.default_rng(0)
    table = model.parameter_table(config)
    leaves = {
        path: jnp.asarray(generator.normal(size=spec.shape), jnp.float32)
        for path, spec in table.items()
    }
    return model.unflatten(leaves)


def assert_equal(left: model.Params, right: model.Params):
    left, right = model.flatten(left), model.flatten(right)
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype
        np.testing.assert_array_equal(left[path], right[path])


def header(path) -> dict:
    """Read a safetensors header from the bytes themselves."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])


def rewrite(directory, change):
    """Apply `change` to the tensors of a saved folder, on disk."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------------ round trips


@each_config
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 1000])
def test_a_saved_folder_reads_back_bit_for_bit(config, max_shard_bytes, tmp_path):
    params = random_params(config)
    hf.save_hf(tmp_path / "model", params, config, max_shard_bytes=max_shard_bytes)
    loaded, loaded_config = hf.load_hf(tmp_path / "model")
    assert loaded_config == config
    assert_equal(loaded, params)


def test_tensors_have_the_names_shapes_and_layout_of_transformers(tmp_path):
    params = random_params(UNTIED)
    hf.save_hf(tmp_path / "model", params, UNTIED)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    shapes = {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (24, 8),
        "self_attn.k_proj.weight": (12, 8),
        "self_attn.v_proj.weight": (12, 8),
        "self_attn.o_proj.weight": (8, 24),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    expected = {f"model.layers.{n}.{name}": shape for n in (0, 1) for name, shape in shapes.items()}
    expected |= {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    expected |= {"lm_head.weight": (10, 8)}
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query, params["layers"]["query"][1].T)
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["head"])
    assert header(tmp_path / "model" / "model.safetensors")["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            CONFIGS["qwen2"],
            {
                "self_attn.q_proj.bias": (24,),
                "self_attn.k_proj.bias": (12,),
                "self_attn.v_proj.bias": (12,),
            },
        ),
        (CONFIGS["qwen3"], {"self_attn.q_norm.weight": (6,), "self_attn.k_norm.weight": (6,)}),
    ],
)
def test_the_other_families_add_their_tensors(config, names, tmp_path):
    hf.save_hf(tmp_path / "model", random_params(config), config)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name, shape in names.items():
        assert tensors[f"model.layers.1.{name}"].shape == shape


def test_a_sharded_export_has_an_index_with_every_tensor_once(tmp_path):
    folder = tmp_path / "model"
    hf.save_hf(folder, random_params(LLAMA), LLAMA, max_shard_bytes=1000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = header(file)
        assert content.pop("__metadata__") == {"format": "pt"}
        for name in content:
            assert name not in found
            found[name] = file.name
        assert len(content) == 1 or sum(t.nbytes for t in load_file(file).values()) <= 1000
    assert index["weight_map"] == found
    assert len(set(found.values())) > 2
    sizes = [t.nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize(("dtype", "tag"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_half_precision_goes_in_and_out_bit_for_bit(dtype, tag, tmp_path):
    hf.save_hf(tmp_path / "first", random_params(LLAMA), LLAMA, dtype=dtype)
    for load_as in ("float32", None):
        params, config = hf.load_hf(tmp_path / "first", dtype=load_as)
        assert params["embed"].dtype == jnp.dtype(load_as or dtype)
        hf.save_hf(tmp_path / "second", params, config, dtype=dtype)
        first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        content = header(first)
        assert {content[name]["dtype"] for name in content if name != "__metadata__"} == {tag}
    assert json.loads((tmp_path / "first" / "config.json").read_text())["torch_dtype"] == dtype


def test_a_tied_model_needs_no_head_and_an_untied_one_does(tmp_path):
    folder = tmp_path / "model"
    hf.save_hf(folder, random_params(LLAMA), LLAMA)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    copy = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})
    rewrite(folder, copy)
    assert_equal(hf.load_hf(folder)[0], random_params(LLAMA))
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1})
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        hf.load_hf(folder)
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head\.weight.*missing"):
        hf.load_weights(folder, UNTIED)


def test_an_export_after_training_keeps_the_logits(tmp_path):
    moved = jax.tree.map(lambda leaf: leaf * 1.25, random_params(LLAMA))
    hf.save_hf(tmp_path / "model", moved, LLAMA)
    loaded, config = hf.load_hf(tmp_path / "model")
    batch = jnp.asarray([[1, 4, 7]]), jnp.asarray([[1, 1, 1]]), jnp.asarray([[0, 1, 2]])
    before, after = (
        model.logits(params, LLAMA, model.forward(params, config, *batch))
        for params in (moved, loaded)
    )
    np.testing.assert_array_equal(before, after)


@each_config
def test_a_critic_takes_the_body_and_starts_at_zero(config, tmp_path):
    params = random_params(config)
    hf.save_hf(tmp_path / "model", params, config)
    critic, _ = hf.load_hf(tmp_path / "model", head="value")
    assert_equal(critic, model.critic_from_actor(params, config))


def test_weights_go_straight_to_their_shardings(tmp_path):
    hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    shardings = jax.tree.map(lambda _: device, random_params(LLAMA))
    params, _ = hf.load_hf(tmp_path / "model", shardings=shardings)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {device}


@each_config
def test_weights_are_split_as_the_learner_wants_them(config, tmp_path):
    hf.save_hf(tmp_path / "model", random_params(config), config, max_shard_bytes=1000)
    for head in ("lm", "value"):
        wanted = sharding.parameter_shardings(sharding.make_mesh(2, 2), config, head)
        params, _ = hf.load_hf(tmp_path / "model", head=head, shardings=wanted)
        assert jax.tree.map(lambda leaf: leaf.sharding, params) == wanted
        whole, _ = hf.load_hf(tmp_path / "model", head=head)
        assert_equal(params, whole)
    assert params["embed"].addressable_shards[0].data.shape == (5, 4)


def test_other_files_come_along_and_a_second_save_replaces_the_first(tmp_path):
    folder = tmp_path / "model"
    extra = {"tokenizer_config.json": "{}"}
    hf.save_hf(folder, random_params(LLAMA), LLAMA, tokenizer_json='{"é": 1}', extra_files=extra)
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == '{"é": 1}'
    assert (folder / "tokenizer_config.json").read_text() == "{}"
    hf.save_hf(folder, random_params(UNTIED), UNTIED)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert hf.load_config(folder) == UNTIED
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_server_of_another_user_can_read_an_export(tmp_path):
    hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA, tokenizer_json="{}")
    for path in (tmp_path / "model", *(tmp_path / "model").iterdir()):
        assert path.stat().st_mode & 0o004, path


def test_a_failed_save_leaves_the_old_folder_and_nothing_else(tmp_path):
    folder = tmp_path / "model"
    hf.save_hf(folder, random_params(LLAMA), LLAMA)
    before = (folder / "model.safetensors").read_bytes()
    broken = random_params(LLAMA)
    # The last tensor of the table: everything before it has been converted when it fails.
    broken["final_norm"] = jnp.ones(9)
    with pytest.raises(ValueError, match="final_norm"):
        hf.save_hf(folder, broken, LLAMA)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_that_find_no_room_raise_an_error_of_the_system_and_leave_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a quota or a full disk: the small files fit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=r"model.safetensors cannot be written: .*too large"):
            hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ strictness


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj.*missing"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((12, 8), "f4")}),
            r"unknown tensor 'model\.layers\.2\.mlp\.up_proj\.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(24, "f4")}),
            r"unknown tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": np.zeros((8, 24), "f4")}),
            r"q_proj\.weight' has shape \(8, 24\), expected \(24, 8\)",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": np.zeros((16, 8), "f4")}),
            r"embed_tokens\.weight' has shape \(16, 8\), expected \(10, 8\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(8, "i4")}),
            r"model\.norm\.weight' has dtype int32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA)
    rewrite(tmp_path / "model", change)
    with pytest.raises(ValueError, match=message):
        hf.load_hf(tmp_path / "model")


def test_shards_that_do_not_fit_their_index_are_refused(tmp_path):
    folder = tmp_path / "model"
    hf.save_hf(folder, random_params(LLAMA), LLAMA, max_shard_bytes=1000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    last = load_file(folder / files[-1])
    again = next(iter(load_file(folder / files[0])))
    save_file({**last, again: np.zeros(3, "f4")}, folder / files[-1])
    with pytest.raises(ValueError, match=f"{again}' is in two files"):
        hf.load_hf(folder)
    name = last.popitem()[0]
    save_file({**last, "unused": np.zeros(3, "f4")}, folder / files[-1])
    with pytest.raises(ValueError, match=f"{name}' is missing"):
        hf.load_hf(folder)


def test_an_old_rotary_buffer_is_ignored(tmp_path):
    hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, "f4")}
    rewrite(tmp_path / "model", lambda tensors: tensors.update(buffer))
    assert_equal(hf.load_hf(tmp_path / "model")[0], random_params(LLAMA))


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load_hf(folder)
    hf.save_hf(folder, random_params(LLAMA), LLAMA)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hf.load_hf(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        hf.load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        hf.load_hf(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(extra=jnp.zeros(1)), "'extra'"),
        (lambda p: p["layers"].pop("gate"), "'layers/gate' is missing"),
        (lambda p: p["layers"].update(gate=jnp.zeros((2, 8, 11))), "'layers/gate' has shape"),
        (lambda p: p.update(value_head={"kernel": jnp.zeros(8)}), "'value_head/kernel'"),
    ],
)
def test_parameters_that_do_not_fit_are_not_written(change, message, tmp_path):
    params = random_params(LLAMA)
    change(params)
    with pytest.raises(ValueError, match=message):
        hf.save_hf(tmp_path / "model", params, LLAMA)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ config.json


def test_a_published_llama_config_is_understood():
    # meta-llama/Llama-3.2-3B-Instruct.
    values = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }
    config = ModelConfig.from_hf(values)
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (24, 8, 128)
    assert {**values, **config.to_hf()} == values
    # transformers 5 writes theta and scaling together.
    rope = {**values.pop("rope_scaling"), "rope_theta": values.pop("rope_theta")}
    assert ModelConfig.from_hf({**values, "rope_parameters": rope}) == config


MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
}


def test_what_config_json_leaves_out_has_the_defaults_of_transformers():
    config = ModelConfig.from_hf(MINIMAL)
    assert (config.num_kv_heads, config.head_dim) == (3, 4)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert not config.tie_word_embeddings
    assert ModelConfig.from_hf({**MINIMAL, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.*GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_field(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**MINIMAL, **change})


def test_numpy_reads_the_bfloat16_that_was_written(tmp_path):
    hf.save_hf(tmp_path / "model", random_params(LLAMA), LLAMA, dtype="bfloat16")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    expected = np.asarray(random_params(LLAMA)["embed"]).astype(ml_dtypes.bfloat16)
    found = tensors["model.embed_tokens.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


# ------------------------------------------------------------------------------ chats and stops


def write_json(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def rendered(folder, *messages):
    chat = hf.chat_template(folder)
    assert chat is not None
    roles = ("user", "assistant", "user")
    return chat([{"role": r, "content": c} for r, c in zip(roles, messages, strict=False)])


def test_a_folder_without_a_template_has_none(tmp_path):
    assert hf.chat_template(tmp_path) is None
    write_json(tmp_path, tokenizer_config={"eos_token": "</s>"})
    assert hf.chat_template(tmp_path) is None


def test_a_template_gets_messages_special_tokens_and_the_prompt_for_an_answer(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.index == 3 %}{% break %}{% endif %}\n"
        "[{{ m['role'] }}]{{ m.content | tojson }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        "{% if tools is not none %}tools{% endif %}{{ unk_token }}"
    )
    bos = {"content": "<s>", "lstrip": False}
    config = {"chat_template": template, "bos_token": bos, "eos_token": "</s>", "unk_token": None}
    write_json(tmp_path, tokenizer_config=config)
    # Lines that hold a statement leave none behind, and nothing is escaped for HTML.
    expected = '<s>[user]"<é & \'x\'>"</s>\n[assistant]"b"</s>\n[assistant]'
    assert rendered(tmp_path, "<é & 'x'>", "b", "c") == expected


def test_the_template_file_comes_before_the_field_and_default_before_other_names(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_json(tmp_path, tokenizer_config={"chat_template": named})
    assert rendered(tmp_path, "a") == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert rendered(tmp_path, "a") == "F"


def test_helpers_of_published_templates_work(tmp_path):
    template = (
        "{%- if messages[0].content == 'bad' %}{{ raise_exception('roles must alternate') }}"
        "{%- endif %}{{ strftime_now('%Y') }}{% generation %}{{ messages[0].content }}"
        "{% endgeneration %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    assert rendered(tmp_path, "hi") == f"{datetime.date.today().year}hi"
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*roles must alternate"):
        rendered(tmp_path, "bad")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in %}", "chat template"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_template_that_is_broken_or_reaches_out_is_refused(template, message, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        rendered(tmp_path, "a")


def test_stops_are_collected_from_everywhere(tmp_path):
    """C109: Llama names three ids, Qwen one in each file, others only the token."""
    tokenizer = data.train_tokenizer(["a"], 300)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    end = tokenizer.token_to_id("<|im_end|>")
    config = dataclasses.replace(LLAMA, eos_token_ids=(151645,))
    write_json(tmp_path, generation_config={"eos_token_id": [151645, 151643]})
    assert hf.eos_token_ids(tmp_path, config, tokenizer) == (151645, 151643)
    (tmp_path / "generation_config.json").unlink()
    config = dataclasses.replace(LLAMA, eos_token_ids=(128001, 128008, 128009))
    assert hf.eos_token_ids(tmp_path, config, tokenizer) == (128001, 128008, 128009)
    config = dataclasses.replace(LLAMA, eos_token_ids=(2, 5))
    write_json(tmp_path, generation_config={"eos_token_id": 9})
    write_json(tmp_path, special_tokens_map={"eos_token": {"content": "<|im_end|>"}})
    assert hf.eos_token_ids(tmp_path, config, tokenizer) == (2, 5, 9, end)
    write_json(tmp_path, tokenizer_config={"eos_token": "<|unknown|>"})
    assert hf.eos_token_ids(tmp_path, config, tokenizer) == (2, 5, 9)


def test_what_lies_beside_the_tokenizer_is_passed_on(tmp_path):
    write_json(tmp_path, generation_config={"eos_token_id": 9}, vocab={}, config={})
    (tmp_path / "chat_template.jinja").write_text("é")
    files = hf.side_files(tmp_path)
    assert files == {"generation_config.json": '{"eos_token_id": 9}', "chat_template.jinja": "é"}
