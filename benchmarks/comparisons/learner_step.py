"""A whole update, against those of others on the same architecture and tokens.

Ours is `learner.step` with everything in it: ratios, returns, whitening, losses, metrics, clip of
the gradient's norm and AdamW. Peers are given advantages and old log-probs. The share of the
machine's matmul rate counts the multiplications that the step needs (three times those of a forward
pass, attention below the diagonal) in CPU seconds, against a product of two square matrices.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from comparisons.overhead import SIZES, build
from harness import Bench, Case, Row, Spread

MATRIX = 1024


def needed_flops(
    embed: int, layers: int, vocabulary: int, rows: int, time: int, *, critic: bool
) -> float:
    """Multiplications and additions of an update in matrix products."""
    tokens = rows * time
    body = layers * (4 * embed * embed + 3 * embed * 4 * embed)
    # Scores and values, each token to those before it.
    attention = layers * 2 * embed * (time + 1) / 2
    forward = 2 * tokens * (body + attention)
    head = 2 * tokens * vocabulary * embed
    return 3 * ((2 if critic else 1) * forward + head)


def step(method: str, **size: Any) -> Any:
    import jax

    _, functions, state, batch = build(method, episodes=1, **size)
    compiled = functions.step.lower(state, batch).compile()

    def run() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))

    parameters = sum(x.size for x in jax.tree.leaves((state.actor, state.critic)))
    return run, {"parameters": parameters, "version": jax.__version__}


def mixed(**size: Any) -> Any:
    """Run the actor's part alone in bfloat16 on float32 weights, as autocast does."""
    import jax
    import jax.numpy as jnp
    import optax

    from copc_jax import losses, model

    config, _, state, batch = build("copc", episodes=1, **size)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95))

    def loss(params: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        hidden = model.forward(
            params, config.model, batch.token_ids, batch.segment_ids, batch.positions
        )
        logprob = model.token_logprob(
            params, config.model, hidden, batch.token_ids, batch.segment_ids
        )
        advantage = batch.reward + batch.discount
        return losses.ppo_actor_loss(
            logprob, batch.behavior_logprob, advantage, batch.is_action, reduce="token"
        )[0]

    def update(params: Any, moments: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        step, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, step), moments

    params, moments = state.actor, optimizer.init(state.actor)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, moments, batch).compile()

    def run() -> None:
        nonlocal params, moments
        params, moments = jax.block_until_ready(compiled(params, moments, batch))

    return run


def matmul(size: int) -> Any:
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(multiply(a, a))


# -------------------------------------------------------------------------------- torch


def _llama(embed: int, layers: int, vocabulary: int, time: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=embed,
        intermediate_size=4 * embed,
        num_hidden_layers=layers,
        num_attention_heads=max(1, embed // 64),
        num_key_value_heads=max(1, embed // 64),
        max_position_embeddings=time,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def transformers_step(
    embed: int,
    layers: int,
    vocabulary: int,
    rows: int,
    time: int,
    critic: bool,
    bfloat16: bool = False,
) -> Any:
    """Run a PPO step with transformers' Llama, scaled-dot-product attention and fused AdamW."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = _llama(embed, layers, vocabulary, time)
    actor = transformers.LlamaForCausalLM(config)
    body, head = transformers.LlamaModel(config), torch.nn.Linear(embed, 1)
    parameters = list(actor.parameters())
    if critic:
        parameters += [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    token_ids = torch.randint(0, vocabulary, (rows, time))
    target = token_ids[:, 1:, None]
    old = torch.full((rows, time - 1), -float(torch.log(torch.tensor(float(vocabulary)))))
    advantage, returns = torch.randn(rows, time - 1), torch.randn(rows, time - 1)

    def loss() -> Any:
        logits = actor(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
        chosen = logits.gather(-1, target)[..., 0] - torch.logsumexp(logits, dim=-1)
        ratio = torch.exp(chosen - old)
        clipped = ratio.clamp(0.8, 1.28)
        total = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        if critic:
            hidden = body(input_ids=token_ids, use_cache=False).last_hidden_state
            value = head(hidden)[:, :-1, 0].float()
            total = total + 0.5 * (value - returns).square().mean()
        return total

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            total = loss()
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run, {
        "parameters": sum(p.numel() for p in parameters),
        "version": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
    }


def trl_step(embed: int, layers: int, vocabulary: int, rows: int, time: int) -> Any:
    """Run TRL's own GRPO loss, its gradient, and the same optimizer."""
    import tempfile

    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

    torch.manual_seed(0)
    prompt = time // 8
    words = {f"w{i}": i for i in range(vocabulary)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w1", unk_token="w0"
    )
    actor = transformers.LlamaForCausalLM(_llama(embed, layers, vocabulary, time))
    trainer = trl.GRPOTrainer(
        model=actor,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=rows,
            num_generations=rows,
            max_completion_length=time - prompt,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w2"] * rows}),
        processing_class=tokenizer,
    )
    # What its training loop sets.
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    token_ids = torch.randint(2, vocabulary, (rows, time))
    inputs = {
        "prompt_ids": token_ids[:, :prompt],
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": token_ids[:, prompt:],
        "completion_mask": torch.ones(rows, time - prompt, dtype=torch.long),
        "advantages": torch.randn(rows),
        "num_items_in_batch": torch.tensor(rows * (time - prompt)),
        "old_per_token_logps": torch.full((rows, time - prompt), -8.0),
    }

    def run() -> None:
        optimizer.zero_grad()
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run, {
        "parameters": sum(p.numel() for p in parameters),
        "version": importlib.metadata.version("trl"),
    }


# -------------------------------------------------------------------------------- tunix


def tunix_step(embed: int, layers: int, vocabulary: int, rows: int, time: int) -> Any:
    """Run tunix's PPO losses by its trainers on its Qwen3, actor and critic; its head is untied."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import algo_core, utils
    from tunix.rl.ppo import ppo_learner
    from tunix.sft import peft_trainer

    heads, prompt = max(1, embed // 64), time // 8
    config = qwen3.ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=embed,
        hidden_dim=4 * embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    critic = utils.create_critic_model(actor)
    settings = ppo_learner.PPOConfig(beta=0.0)
    rng = np.random.default_rng(0)
    shape = (rows, time - prompt)
    token_ids = jnp.asarray(rng.integers(2, vocabulary, (rows, time), np.int32))
    example = ppo_learner.TrainExample(
        prompt_ids=token_ids[:, :prompt],
        prompt_mask=jnp.ones((rows, prompt), jnp.int32),
        completion_ids=token_ids[:, prompt:],
        completion_mask=jnp.ones(shape, bool),
        ref_per_token_logps=None,
        advantages=jnp.asarray(rng.standard_normal(shape, np.float32)),
        returns=jnp.asarray(rng.standard_normal(shape, np.float32)),
        old_per_token_logps=jnp.full(shape, -np.log(vocabulary), jnp.float32),
        old_values=jnp.zeros(shape),
    )

    def trainer(model: Any, loss: Any) -> Any:
        transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95))
        made = peft_trainer.PeftTrainer(
            model, transform, peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
        )
        made.with_loss_fn(loss, has_aux=True)
        made.with_gen_model_input_fn(lambda x: {"train_example": x})
        return made.jit_train_and_eval_step(cache_nnx_graph=True)[0]

    def policy_loss(model: Any, train_example: Any) -> Any:
        return algo_core.ppo_policy_loss_fn(model, train_example, settings, pad_id=0, eos_id=1)

    def value_loss(model: Any, train_example: Any) -> Any:
        return algo_core.ppo_value_loss_fn(
            model, train_example, settings.clip_range_value, pad_id=0, eos_id=1
        )

    steps = trainer(actor, policy_loss), trainer(critic, value_loss)

    def run() -> None:
        losses = [update(example)[0] for update in steps]
        jax.block_until_ready((losses, nnx.state(actor), nnx.state(critic)))

    parameters = sum(x.size for m in (actor, critic) for x in jax.tree.leaves(nnx.state(m)))
    return run, {
        "parameters": parameters,
        "version": importlib.metadata.version("google-tunix"),
        "jax": jax.__version__,
    }


# -------------------------------------------------------------------------------- the comparison


def compare(bench: Bench) -> None:
    size = SIZES["tiny" if bench.tiny else "small"]
    both = {**size, "critic": True}
    cases = [
        Case("copc", __file__, "step", {"method": "copc", **size}),
        Case("dapo", __file__, "step", {"method": "dapo", **size}),
        Case(
            "copc, Qwen3",
            __file__,
            "step",
            {"method": "copc", "qk_norm": True, "tied": False, **size},
        ),
        Case("mixed", __file__, "mixed", size),
        Case("matmul", __file__, "matmul", {"size": 64 if bench.tiny else MATRIX}),
        Case("transformers", __file__, "transformers_step", both, "torch"),
        Case(
            "transformers actor", __file__, "transformers_step", {**both, "critic": False}, "torch"
        ),
        Case(
            "transformers actor bf16",
            __file__,
            "transformers_step",
            {**both, "critic": False, "bfloat16": True},
            "torch",
        ),
        Case("trl", __file__, "trl_step", size, "torch"),
        Case("tunix", __file__, "tunix_step", size, "tunix"),
    ]
    measured = bench.measure("learner_step", cases)
    shape = f"{size['embed']} wide, {size['layers']} layers, vocabulary {size['vocabulary']}, "
    shape += f"[{size['rows']}, {size['time']}]"
    for ours, theirs, what, against, target, note in (
        ("copc", "transformers", "actor and critic", "transformers f32", 1.0, ""),
        ("dapo", "transformers actor", "actor", "transformers f32", 1.0, ""),
        ("dapo", "trl", "actor", "TRL's GRPO loss and AdamW", 1.15, ""),
        (
            "copc, Qwen3",
            "tunix",
            "actor and critic",
            "tunix's PPO losses and trainer",
            1.5,
            "Qwen3 with a head of its own on both sides",
        ),
        (
            "mixed",
            "transformers actor bf16",
            "actor in bfloat16",
            "transformers, bf16 autocast",
            None,
            "what is left to torch on this processor",
        ),
    ):
        bench.compare(
            measured,
            f"learner step, {what}",
            ours,
            theirs,
            shape=shape,
            target=target,
            label=against,
            note=note,
        )
    matrix = dict(cases[4].arguments)["size"]
    rates = [2 * matrix**3 / sample["cpu_s"] for sample in measured.samples["matmul"]]
    for label, critic in (("copc", True), ("dapo", False)):
        flops = needed_flops(**size, critic=critic)
        shares = [
            flops / sample["cpu_s"] / rate
            for sample, rate in zip(measured.samples[label], rates, strict=True)
        ]
        bench.rows.append(
            Row(
                f"learner step, {'actor and critic' if critic else 'actor'}: share of matmul rate",
                f"f32 product of {matrix} x {matrix}",
                shape,
                Spread.of(shares),
                0.7,
                unit="",
                note=f"{flops / 1e9:.0f} GFLOP, {Spread.of(rates).median / 1e9:.0f} GFLOP/s a core",
            )
        )
