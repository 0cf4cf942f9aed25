"""Tokens that the embedded engine samples a CPU second, through HTTP, against other engines.

Ours is the real server in a process of its own, asked by the rollout client; CPU seconds are those
of both. Prompts are of mixed length, everybody samples at temperature 1 and the same number of
tokens a prompt. One random model for all, but tunix's, which is its own of the same shape.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from harness import Bench, Case, Row, Spread

MODEL = {"embed": 256, "layers": 4, "vocabulary": 4096}
TINY = {"embed": 32, "layers": 1, "vocabulary": 64}
# Sequences at once, and tokens that each samples.
NEW = {1: 96, 16: 96, 64: 64, 256: 32}
NEW_TINY = {2: 4}
SHORTEST, LONGEST = 8, 56


class Prompts:
    """Prompts of mixed length; other ones every time, so that no prefix has been computed before.

    Args:
        batch: how many.
        vocabulary: ids are from 2 up to it.
    """

    def __init__(self, batch: int, vocabulary: int):
        rng = np.random.default_rng(batch)
        middle = (SHORTEST + LONGEST) // 2
        lengths = rng.integers(SHORTEST, LONGEST + 1, batch) if batch > 1 else [middle]
        self._ids = [rng.integers(2, vocabulary, length) for length in lengths]
        self._vocabulary, self._calls = vocabulary, 0

    def next(self) -> list[list[int]]:
        """Give them, their first tokens changed."""
        self._calls += 1
        span = self._vocabulary - 2
        return [[2 + (self._calls + int(i[0])) % span, *i[1:].tolist()] for i in self._ids]


def random_model(embed: int, layers: int, vocabulary: int) -> tuple[Any, Any]:
    """Give the configuration and the random weights of a Llama with heads of 64."""
    import jax

    from copc_jax import model

    heads = max(1, embed // 64)
    config = model.ModelConfig(
        vocab_size=vocabulary,
        hidden_size=embed,
        intermediate_size=4 * embed,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
    )
    return config, model.init(jax.random.key(0), config)


def write_model(folder: str, embed: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Write a random Llama with heads of 64 as a Hugging Face folder."""
    import jax
    import tokenizers

    from copc_jax import hf

    config, params = random_model(embed, layers, vocabulary)
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hf.save_hf(folder, params, config, tokenizer_json=tokenizer.to_str())
    return {"parameters": sum(x.size for x in jax.tree.leaves(params))}


# -------------------------------------------------------------------------------- ours


class Served:
    """The embedded server as a process of its own, and the rollout client.

    Args:
        folder: Hugging Face folder.
        slots: sequences at once.
        max_length: of prompt and response.
        servers: how many.
        cache: folder of compiled programs, so that a second server need not compile.
    """

    def __init__(
        self, folder: str, slots: int, max_length: int, servers: int = 1, cache: str | None = None
    ):
        from copc_jax.rollout import client, launch

        logs = pathlib.Path(tempfile.mkdtemp())
        self.servers = [
            launch.launch_embedded(
                folder,
                log_file=logs / f"server{number}.log",
                slots=slots,
                max_length=max_length,
                compilation_cache=cache,
                weight_roots=(pathlib.Path(folder).parent,),
            )
            for number in range(servers)
        ]
        self.pids = tuple(server.process.pid for server in self.servers)
        self.urls = [server.url for server in self.servers]
        self._loop = asyncio.new_event_loop()
        self.client = client.SGLangClient(self.urls)
        self.wait(self.client.__aenter__())
        self.wait(self.client.check())
        atexit.register(self.close)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the client's loop."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """End client and servers."""
        self.wait(self.client.__aexit__())
        for server in self.servers:
            server.stop()

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[Any]:
        """Sample `new` tokens after each prompt, all in flight at once."""
        from copc_jax.rollout.client import SamplingParams

        sampling = SamplingParams(max_new_tokens=new)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(self.client.generate(prompt, sampling) for prompt in prompts)
            )

        return self.wait(all_of_them())

    def counters(self) -> dict[str, float]:
        """Totals of all servers."""
        import json
        import urllib.request

        total: dict[str, float] = {}
        for url in self.urls:
            with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
                state = json.load(answer)["internal_states"][0]
            names = (
                "tokens_sampled",
                "tokens_prefilled",
                "tokens_cached",
                "busy_seconds",
                "compiling",
            )
            for name in names:
                total[name] = total.get(name, 0) + state[name]
        return total


_served: dict[tuple[Any, ...], Served] = {}


def server(folder: str, slots: int, max_length: int) -> Served:
    """Give the server of this process for a model and sizes, started when first asked for."""
    key = folder, slots, max_length
    if key not in _served:
        _served[key] = Served(folder, slots, max_length)
    return _served[key]


def served(folder: str, batch: int, new: int, vocabulary: int) -> Any:
    """Ask the server through the rollout client."""
    both = server(folder, batch, LONGEST + 2 * new)
    prompts = Prompts(batch, vocabulary)

    def run() -> None:
        given = both.generate(prompts.next(), new)
        assert all(len(each.token_ids) == new for each in given)

    run.pids = both.pids  # pyright: ignore[reportFunctionMemberAccess]
    settle(run, both.counters)
    return run


def settle(run: Callable[[], None], counters: Callable[[], Mapping[str, float]]) -> None:
    """Repeat what is to be measured until its programs are compiled, which goes on beside it."""
    run()
    while counters()["compiling"]:
        run()


def latency(folder: str, batch: int, new: int, vocabulary: int, calls: int) -> dict[str, Any]:
    """Stream `calls` responses, `batch` at a time: milliseconds to first and last token."""
    import aiohttp

    both = server(folder, batch, LONGEST + 2 * new)
    prompts = Prompts(batch, vocabulary)
    first, last = [], []

    async def one(session: Any, prompt: list[int]) -> None:
        settings = {"max_new_tokens": new, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": settings, "stream": True}
        begun, seen = time.perf_counter(), None
        async with session.post(f"{both.urls[0]}/generate", json=body) as answer:
            async for line in answer.content:
                if seen is None and line.startswith(b"data: {"):
                    seen = time.perf_counter() - begun
        assert seen is not None
        first.append(1e3 * seen)
        last.append(1e3 * (time.perf_counter() - begun))

    async def all_of_them() -> None:
        todo = [prompt for _ in range(-(-calls // batch)) for prompt in prompts.next()][:calls]

        async def worker() -> None:
            while todo:
                await one(session, todo.pop())

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(worker() for _ in range(batch)))

    both.wait(all_of_them())
    return {
        "first_token_ms": [float(x) for x in np.percentile(first, (50, 99))],
        "whole_response_ms": [float(x) for x in np.percentile(last, (50, 99))],
    }


def next_turn(folder: str, batch: int, new: int, vocabulary: int) -> dict[str, Any]:
    """Count what a second turn prefills: the first turn and eight tokens of an observation."""
    both = server(folder, batch, LONGEST + 2 * new)
    prompts = Prompts(batch, vocabulary).next()
    given = both.generate(prompts, new)
    observation = [2 + i for i in range(8)]
    second = [
        [*prompt, *map(int, each.token_ids), *observation]
        for prompt, each in zip(prompts, given, strict=True)
    ]
    before = both.counters()
    both.generate(second, new // 2)
    after = both.counters()
    counted = {name: after[name] - before[name] for name in after}
    # Of a prompt's tokens the last is fed to decoding, and so is the last one of the first turn.
    return {
        **counted,
        "prompt_tokens": sum(map(len, second)),
        "new_tokens": batch * (1 + len(observation) - 1),
    }


def prompt(vocabulary: int) -> list[int]:
    """Tokens after which everybody scores the next one."""
    return np.random.default_rng(7).integers(2, vocabulary, LONGEST).tolist()


def _scores(logits: Any) -> dict[str, Any]:
    """Log-probs of the first tokens of the vocabulary, in float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max()
    return {"logprob": (shifted - np.log(np.exp(shifted).sum()))[:64].tolist()}


def scores(folder: str, vocabulary: int) -> dict[str, Any]:
    """Score the next token with the programs of the engine."""
    import jax.numpy as jnp

    from copc_jax import hf, model

    params, config = hf.load_hf(folder)
    ids = jnp.asarray([prompt(vocabulary)], jnp.int32)
    zero, count = jnp.zeros(1, jnp.int32), jnp.full(1, ids.shape[1], jnp.int32)
    cache = model.init_cache(config, 1, ids.shape[1])
    return _scores(model.prefill(params, config, cache, ids, zero, zero, count)[1][0])


# -------------------------------------------------------------------------------- transformers


def transformers_scores(folder: str, vocabulary: int) -> dict[str, Any]:
    """Score the next token."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return _scores(model(torch.tensor([prompt(vocabulary)])).logits[0, -1].numpy())


def transformers_generate(folder: str, batch: int, new: int, vocabulary: int) -> Any:
    """Run `generate` on prompts padded on the left."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    prompts = Prompts(batch, vocabulary)

    def run() -> None:
        given = prompts.next()
        width = max(map(len, given))
        ids = torch.tensor([[0] * (width - len(each)) + each for each in given])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in given])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=settings)
        assert made.shape == (batch, width + new)

    return run, {"version": transformers.__version__, "torch": torch.__version__}


# -------------------------------------------------------------------------------- llama.cpp


GGUF_NAMES = {
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: str, file: str, bfloat16: bool) -> dict[str, Any]:
    """Write the model of a folder as llama.cpp reads it, without a tokenizer."""
    import gguf
    import safetensors.numpy

    from copc_jax import hf

    config = hf.load_config(folder)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType.BF16 if bfloat16 else gguf.GGMLQuantizationType.F32
    for name, value in safetensors.numpy.load_file(f"{folder}/model.safetensors").items():
        for theirs, written in GGUF_NAMES.items():
            name = name.replace(theirs, written)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.num_heads if "attn_q" in name else config.num_kv_heads
            # llama.cpp rotates neighboring channels, Hugging Face those half a head apart.
            halves = value.reshape(heads, 2, -1, value.shape[1])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if bfloat16 and value.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"bytes": os.path.getsize(file)}


def _llama_cpp(file: str, batch: int, length: int) -> tuple[Any, Any, int]:
    """Load a model for sequences of a length: the library, a context, its largest batch."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    assert model, "the GGUF file cannot be loaded"
    settings = lib.llama_context_default_params()
    # Whole prompts at a time; the cache is divided between the sequences.
    settings.n_ctx = batch * length
    settings.n_batch = settings.n_ubatch = max(512, batch)
    settings.n_seq_max = batch
    if "f32" in pathlib.Path(file).name:
        # It keeps keys and values in float16 unless asked.
        settings.type_k = settings.type_v = lib.GGML_TYPE_F32
    settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
    context = lib.llama_init_from_model(model, settings)
    assert context, f"no context for {batch} sequences"
    return lib, context, settings.n_batch


def _fill(arrays: Any, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
    """Write (id, position, sequence, whether its logits are wanted) into a batch."""
    arrays.n_tokens = len(tokens)
    for i, (token, position, sequence, wanted) in enumerate(tokens):
        arrays.token[i], arrays.pos[i] = token, position
        arrays.n_seq_id[i], arrays.seq_id[i][0] = 1, sequence
        arrays.logits[i] = wanted


def llama_cpp_scores(file: str, vocabulary: int) -> dict[str, Any]:
    """Score the next token."""
    lib, context, room = _llama_cpp(file, 1, LONGEST + 8)
    arrays, ids = lib.llama_batch_init(room, 0, 1), prompt(vocabulary)
    _fill(arrays, [(token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids)])
    assert lib.llama_decode(context, arrays) == 0
    logits = lib.llama_get_logits_ith(context, len(ids) - 1)
    return _scores(np.ctypeslib.as_array(logits, (vocabulary,)))


def llama_cpp(file: str, batch: int, new: int, vocabulary: int) -> Any:
    """Decode all sequences in one batch a step, with llama.cpp's own sampler."""
    lib, context, room = _llama_cpp(file, batch, LONGEST + new + 8)
    sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(0))
    arrays = lib.llama_batch_init(room, 0, 1)
    prompts = Prompts(batch, vocabulary)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Feed (id, position, sequence, sample) and give what was sampled, in order."""
        _fill(arrays, tokens)
        assert lib.llama_decode(context, arrays) == 0
        wanted = [i for i, each in enumerate(tokens) if each[3]]
        return [lib.llama_sampler_sample(sampler, context, i) for i in wanted]

    def run() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        given = prompts.next()
        todo = [
            (token, position, sequence, position == len(each) - 1)
            for sequence, each in enumerate(given)
            for position, token in enumerate(each)
        ]
        newest: list[int] = []
        for start in range(0, len(todo), room):
            newest += decode(todo[start : start + room])
        lengths = list(map(len, given))
        for step in range(new - 1):
            rows = zip(newest, lengths, strict=True)
            newest = decode(
                [(token, length + step, i, True) for i, (token, length) in enumerate(rows)]
            )
        assert len(newest) == batch

    return run, {"version": lib.__version__}


# -------------------------------------------------------------------------------- tunix


def tunix_sample(batch: int, new: int, embed: int, layers: int, vocabulary: int) -> Any:
    """Run tunix's own sampler, as its rollout does, on its Llama of the same shape."""
    import importlib.metadata

    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.llama3 import model as llama3

    heads = max(1, embed // 64)
    config = llama3.ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=embed,
        hidden_dim=4 * embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=True,
    )

    class Words:
        """Ids as numbers between spaces."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(str(int(i)) for i in ids)

        def bos_id(self) -> int:
            return 0

        def eos_id(self) -> int:
            return 1

        def pad_id(self) -> int:
            return 0

    sample = sampler.Sampler(
        llama3.Llama3(config, rngs=nnx.Rngs(0)),
        Words(),
        sampler.CacheConfig(
            cache_size=LONGEST + new + 8,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=embed // heads,
        ),
    )
    prompts = Prompts(batch, vocabulary)

    def run() -> None:
        sample(
            [" ".join(map(str, each)) for each in prompts.next()],
            max_generation_steps=new,
            max_prompt_length=LONGEST + 8,
            temperature=1.0,
            top_p=1.0,
            seed=0,
        )

    return run, {"version": importlib.metadata.version("google-tunix")}


# -------------------------------------------------------------------------------- the comparison


def compare(bench: Bench) -> None:
    size, sizes = (TINY, NEW_TINY) if bench.tiny else (MODEL, NEW)
    vocabulary = size["vocabulary"]
    with tempfile.TemporaryDirectory() as place:
        folder = f"{place}/model"
        files = {name: f"{place}/{name}.gguf" for name in ("f32", "bf16")}
        cases = [Case("model", __file__, "write_model", {"folder": folder, **size})]
        cases += [
            Case(
                f"gguf {name}",
                __file__,
                "write_gguf",
                {"folder": folder, "file": file, "bfloat16": name == "bf16"},
                process="model",
            )
            for name, file in files.items()
        ]
        scored = {"vocabulary": vocabulary}
        cases += [
            Case("ours scored", __file__, "scores", {"folder": folder, **scored}, process="model"),
            Case(
                "transformers scored",
                __file__,
                "transformers_scores",
                {"folder": folder, **scored},
                "torch",
                process="transformers",
            ),
            *(
                Case(
                    f"llama.cpp {name} scored",
                    __file__,
                    "llama_cpp_scores",
                    {"file": file, **scored},
                    "llama.cpp",
                    process=f"llama.cpp {name}",
                )
                for name, file in files.items()
            ),
        ]
        for batch, new in sizes.items():
            common = {"batch": batch, "new": new, "vocabulary": vocabulary}
            ours = {"folder": folder, **common}
            own = f"server {batch}"
            calls = 2 * batch if bench.tiny else max(4 * batch, 32)
            cases += [
                Case(f"ours {batch}", __file__, "served", ours, process=own),
                Case(f"next turn {batch}", __file__, "next_turn", ours, process=own),
                Case(
                    f"latency {batch}", __file__, "latency", {**ours, "calls": calls}, process=own
                ),
                Case(
                    f"transformers {batch}",
                    __file__,
                    "transformers_generate",
                    ours,
                    "torch",
                    process="transformers",
                ),
                *(
                    Case(
                        f"llama.cpp {name} {batch}",
                        __file__,
                        "llama_cpp",
                        {"file": file, **common},
                        "llama.cpp",
                        process=f"llama.cpp {name}",
                    )
                    for name, file in files.items()
                ),
                Case(
                    f"tunix {batch}",
                    __file__,
                    "tunix_sample",
                    {**size, **common},
                    "tunix",
                    process="tunix",
                ),
            ]
        # Seconds a repetition: three rounds tell enough.
        measured = bench.measure("engine", cases, rounds=min(bench.rounds, 3))
    for peer, target in (("transformers", 1e-5), ("llama.cpp f32", 1e-3), ("llama.cpp bf16", None)):
        if f"{peer} scored" in measured.facts:
            found, ours = (measured.facts[f"{x} scored"]["logprob"] for x in (peer, "ours"))
            far = float(np.max(np.abs(np.subtract(found, ours))))
            bench.rows.append(
                Row(
                    "largest difference of log-probs",
                    peer,
                    f"next token after {LONGEST}",
                    Spread(far, far, far),
                    target,
                    "<=",
                    unit="nats",
                )
            )
    for batch, new in sizes.items():
        shape = f"batch {batch}, prompts of {SHORTEST} to {LONGEST}, {new} new"
        tokens = [batch * new / sample["cpu_s"] for sample in measured.samples[f"ours {batch}"]]
        facts = measured.facts[f"latency {batch}"]
        (first, first_tail), (whole, whole_tail) = (
            facts["first_token_ms"],
            facts["whole_response_ms"],
        )
        bench.rows.append(
            Row(
                "engine through HTTP",
                "",
                shape,
                Spread.of(tokens),
                unit="tokens/s",
                note=f"ms to the first token p50 {first:.0f}, p99 {first_tail:.0f}; to the last "
                f"{whole:.0f}, {whole_tail:.0f}",
            )
        )
        for peer, name, target in (
            ("transformers", "transformers.generate f32", 2.6),
            ("tunix", "tunix's sampler f32", 2.4),
            ("llama.cpp f32", "llama.cpp f32", 1.0 if batch >= 16 else None),
            ("llama.cpp bf16", "llama.cpp bf16", 0.9 if batch >= 16 else None),
        ):
            bench.compare(
                measured,
                "engine through HTTP",
                f"ours {batch}",
                f"{peer} {batch}",
                shape=shape,
                target=target,
                label=name,
            )
        turn = measured.facts[f"next turn {batch}"]
        again = turn["tokens_prefilled"] / turn["new_tokens"]
        bench.rows.append(
            Row(
                "next turn: tokens prefilled",
                "those that are new",
                shape,
                Spread(again, again, again),
                1.0,
                "<=",
                note=f"{turn['tokens_cached']:.0f} of {turn['prompt_tokens']} taken from the cache",
            )
        )
    bench.curves.append(
        {
            "title": "Sampling",
            "x": "sequences at once",
            "y": "tokens a CPU second",
            "lines": {
                name: [
                    [batch, batch * new / measured.spread(f"{name} {batch}").median]
                    for batch, new in sizes.items()
                    if measured.samples.get(f"{name} {batch}")
                ]
                for name in ("ours", "transformers", "tunix", "llama.cpp f32", "llama.cpp bf16")
                if any(measured.samples.get(f"{name} {batch}") for batch in sizes)
            },
        }
    )
