"""Make tests/goldens: what transformers and torch compute with tiny models of every family.

    python tests/make_goldens.py

needs torch and transformers (the extra `parity`). Each folder is a checkpoint as transformers saves
it; golden.safetensors in it holds three texts of different lengths, padded on the right, with their
logits and log-probs, and the gradient of a weighted sum of the log-probs with respect to every
tensor, by its name. The files are committed, so that the suite compares numbers without torch.
"""

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

GOLDENS = Path(__file__).parent / "goldens"
LENGTHS = (40, 17, 6)
VOCAB = 80
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Family -> configuration, dtype on disk, largest file.
FAMILIES = {
    "llama3": (
        transformers.LlamaConfig(
            **SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False, eos_token_id=[2, 5, 7]
        ),
        torch.float32,
        "5GB",
    ),
    "smollm2": (
        transformers.LlamaConfig(
            **(SIZES | {"num_attention_heads": 6}),
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
            eos_token_id=2,
        ),
        torch.float32,
        "5GB",
    ),
    "qwen2": (
        transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, eos_token_id=2),
        torch.bfloat16,
        "8KB",
    ),
    "qwen3": (
        transformers.Qwen3Config(
            **SIZES, head_dim=16, tie_word_embeddings=False, eos_token_id=[2, 5]
        ),
        torch.float16,
        "5GB",
    ),
}


def make(name: str) -> None:
    """Write one family's folder."""
    config, dtype, largest = FAMILIES[name]
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, tensor in network.named_parameters():
            # Biases and norms too, whose usual start would hide a mistake.
            tensor.normal_(1.0 if "norm" in key else 0.0, 0.3)
    network.to(dtype)
    folder = GOLDENS / name
    shutil.rmtree(folder, ignore_errors=True)
    network.save_pretrained(folder, max_shard_size=largest)
    # Read back, because `to` rounded the rotary frequencies too.
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    lengths = torch.tensor(LENGTHS)
    token_ids = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS)) < lengths[:, None]
    token_ids = torch.where(mask, token_ids, 0)
    logits = network(input_ids=token_ids, attention_mask=mask.long()).logits
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, token_ids[:, 1:, None])[..., 0]
    chosen = torch.where(mask[:, 1:], chosen, 0.0)
    logprob = torch.nn.functional.pad(chosen, (1, 0))
    weight = torch.linspace(-1.0, 1.0, token_ids.numel()).reshape(token_ids.shape)
    (logprob * weight).sum().backward()
    golden = {
        "token_ids": token_ids,
        "lengths": lengths,
        "logits": torch.where(mask[..., None], logits, 0.0),
        "logprob": logprob,
        "weight": weight,
    }
    for key, tensor in network.named_parameters():
        golden[f"gradient.{key}"] = tensor.grad
    golden = {key: tensor.detach().contiguous().clone() for key, tensor in golden.items()}
    save_file(golden, folder / "golden.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    for family in FAMILIES:
        make(family)
        print(family, sum(file.stat().st_size for file in (GOLDENS / family).iterdir()), "bytes")
