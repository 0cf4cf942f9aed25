"""Numbers of transformers and torch: from committed goldens, and live where they are installed.

`tests/make_goldens.py` made the goldens. The live tests need the extra `parity`.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from copc_jax import hf, model

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = ("llama3", "smollm2", "qwen2", "qwen3")
PACKED = 72

each_family = pytest.mark.parametrize("family", FAMILIES)
live = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers: uv sync --extra parity",
)


@pytest.fixture(params=FAMILIES)
def golden(request):
    """A checkpoint of transformers, as we read it, and what transformers computes with it."""
    folder = GOLDENS / request.param
    params, config = hf.load_hf(folder)
    return params, config, load_file(folder / "golden.safetensors")


def texts(values):
    return [ids[:n] for ids, n in zip(values["token_ids"], values["lengths"], strict=True)]


def padded(values):
    """Every text in a row of its own."""
    length = values["token_ids"].shape[1]
    segments = (np.arange(length) < values["lengths"][:, None]).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), segments.shape)
    return jnp.asarray(values["token_ids"].astype(np.int32)), jnp.asarray(segments), positions


def packed(values):
    """All texts in one row, with padding behind them."""
    token_ids, segments, positions = np.zeros((3, 1, PACKED), np.int32)
    start = 0
    for number, ids in enumerate(texts(values), start=1):
        place = (0, slice(start, start + len(ids)))
        token_ids[place], segments[place], positions[place] = ids, number, np.arange(len(ids))
        start += len(ids)
    assert start < PACKED
    return jnp.asarray(token_ids), jnp.asarray(segments), jnp.asarray(positions)


def take(rows, values):
    """What belongs to the texts, one after another, of an array that is laid out as `padded`."""
    return np.concatenate([row[:n] for row, n in zip(rows, values["lengths"], strict=True)])


def test_the_goldens_cover_what_sets_the_families_apart():
    configs = {family: hf.load_config(GOLDENS / family) for family in FAMILIES}
    assert configs["llama3"].rope_scaling is not None
    assert configs["qwen2"].attention_bias and configs["qwen3"].qk_norm
    assert configs["qwen3"].head_dim * configs["qwen3"].num_heads != configs["qwen3"].hidden_size
    assert {config.tie_word_embeddings for config in configs.values()} == {True, False}
    dtypes = {
        hf.load_hf(GOLDENS / family, dtype=None)[0]["embed"].dtype.name for family in FAMILIES
    }
    assert dtypes == {"float32", "bfloat16", "float16"}
    assert (GOLDENS / "qwen2" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("layout", [padded, packed])
def test_logits_and_logprobs_are_those_of_transformers(golden, layout):
    params, config, values = golden
    batch = layout(values)
    token_ids, segments, _ = batch
    hidden = jax.jit(model.forward, static_argnums=1)(params, config, *batch)
    inside = np.asarray(segments) > 0
    logits = model.logits(params, config, hidden).reshape(*token_ids.shape, -1)[inside]
    np.testing.assert_allclose(logits, take(values["logits"], values), atol=1e-4, rtol=0)
    logprob = model.token_logprob(params, config, hidden, token_ids, segments, chunk=16)
    expected = take(values["logprob"], values)
    np.testing.assert_allclose(np.asarray(logprob)[inside], expected, atol=1e-4, rtol=0)


def test_decoding_with_a_cache_gives_the_logits_of_transformers(golden):
    """A third of each text at once and its next tokens in a second piece, then one by one."""
    params, config, values = golden
    token_ids = np.asarray(padded(values)[0])
    lengths = values["lengths"].astype(np.int32)
    slots, longest = token_ids.shape
    cache = model.init_cache(config, slots, longest)
    slot = jnp.arange(slots)
    held = np.zeros(slots, np.int32)
    prefill = jax.jit(lambda cache, ids, start, count: model.prefill(
        params, config, cache, ids, slot, start, count
    ))  # fmt: skip
    step = jax.jit(lambda cache, ids, position, active: model.decode_step(
        params, config, cache, ids, position, active
    ))  # fmt: skip
    compared = 0

    def compare(logits, active):
        nonlocal compared
        for row in np.flatnonzero(active):
            expected = values["logits"][row, held[row] - 1]
            np.testing.assert_allclose(logits[row], expected, atol=1e-4, rtol=0)
            compared += 1

    for count in (lengths // 3, np.minimum(lengths // 4, 3)):
        index = np.minimum(held[:, None] + np.arange(longest // 3 + 1)[None], longest - 1)
        piece = np.take_along_axis(token_ids, index, axis=1)
        cache, logits = prefill(cache, jnp.asarray(piece), jnp.asarray(held), jnp.asarray(count))
        held = held + count
        compare(np.asarray(logits), count > 0)
    while (active := held < lengths).any():
        newest = token_ids[np.arange(slots), np.minimum(held, longest - 1)]
        cache, logits = step(cache, jnp.asarray(newest), jnp.asarray(held), jnp.asarray(active))
        held = held + active
        compare(np.asarray(logits), active)
    assert compared > 40


def test_gradients_are_those_of_torch(golden):
    params, config, values = golden
    token_ids, segments, positions = packed(values)
    weight = np.zeros(token_ids.shape, np.float32)
    weight[np.asarray(segments) > 0] = take(values["weight"], values)

    def loss(params):
        hidden = model.forward(params, config, token_ids, segments, positions, remat=True)
        return jnp.sum(model.token_logprob(params, config, hidden, token_ids, segments) * weight)

    gradients = model.flatten(jax.jit(jax.grad(loss))(params))
    names = set()
    for path, spec in model.parameter_table(config).items():
        stacked = spec.axes[0] == "layer"
        layers = gradients[path] if stacked else gradients[path][None]
        for number, gradient in enumerate(np.asarray(layers)):
            name = f"gradient.{spec.hf_name.format(layer=number)}"
            names.add(name)
            gradient = gradient.T if spec.layout == "transpose" else gradient
            scale = np.abs(values[name]).max()
            np.testing.assert_allclose(gradient, values[name], atol=2e-5 * scale, rtol=1e-4)
            assert scale > 0, name
    assert names == {name for name in values if name.startswith("gradient.")}


# ------------------------------------------------------------------------------ live


@live
@each_family
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 10_000])
def test_transformers_loads_an_export_bit_for_bit(family, max_shard_bytes, tmp_path):
    import torch
    import transformers

    source = GOLDENS / family
    params, config = hf.load_hf(source)
    moved = jax.tree.map(lambda leaf: leaf * 1.25, params)
    hf.save_hf(tmp_path / "model", moved, config, max_shard_bytes=max_shard_bytes)
    network, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    before = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old, new = before.state_dict(), network.state_dict()
    assert old.keys() == new.keys()
    for name in old:
        assert torch.equal(new[name], old[name] * 1.25), name
    # What changes the computation survives in config.json: equal weights give equal logits.
    network.load_state_dict(old)
    token_ids = torch.arange(48)[None] % config.vocab_size
    assert torch.equal(network(token_ids).logits, before(token_ids).logits)
    assert network.config.eos_token_id == before.config.eos_token_id


# In the style of published ones: ChatML with a default system message, Llama 3's header and date,
# and one that folds the system message into the first turn and refuses others' order.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{- bos_token }}\n"
        "{%- if not date_string is defined %}\n"
        '    {%- set date_string = strftime_now("%d %b %Y") %}\n'
        "{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}{%- set system = '' %}{%- endif %}\n"
        '{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system }}\n'
        "{%- for message in messages %}\n"
        "    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n"
        "    {{- '<|start|>' + message['role'] + '<|end|>\\n' + message['content'] | trim }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
    ),
    "folded": (
        "{% set ns = namespace(system='') %}\n"
        "{% for message in messages %}\n"
        "  {% if message.role == 'system' %}\n"
        "    {% set ns.system = message.content %}\n"
        "    {% continue %}\n"
        "  {% elif message.role not in ['user', 'assistant'] %}\n"
        "    {{ raise_exception('no such role') }}\n"
        "  {% endif %}\n"
        "  <{{ message.role }}>{{ ns.system }} {{ message.content | tojson(indent=2) }}\n"
        "{% endfor %}\n"
        "{{ eos_token }}{{ messages | tojson }}\n"
    ),
}
CHATS = (
    [{"role": "user", "content": " What is 1 < 2 & 'é'?\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "東京"},
    ],
)


@live
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_chat_templates_render_as_in_transformers(template, tmp_path):
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=template,
    )
    wrapped.save_pretrained(tmp_path)
    ours = hf.chat_template(tmp_path)
    assert ours is not None
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for chat in CHATS:
        text = wrapped.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours(chat) == text
        ids = wrapped.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        assert read.encode(text, add_special_tokens=False).ids == ids["input_ids"]
    end = hf.eos_token_ids(tmp_path, hf.load_config(GOLDENS / "smollm2"), read)
    assert end == (2, wrapped.eos_token_id)
