"""The learner: one jitted step from a packed batch to new weights, over a (data, model) mesh.

`prepare` freezes what the paper calls pre-update quantities (log-probs, values, ratios, corrected
returns, advantages); `update` differentiates the actor and critic losses against them. When a batch
is one update in one piece, both are one program: the update's own forward pass gives log-probs and
values, and everything frozen is taken from them behind a stop-gradient, which saves the second
forward pass. With several minibatches, or with micro-batches, `prepare` runs once and its results
are held.

Micro-batches are slices of rows that are accumulated one after another; a slice without any token
is skipped, so that a batch costs what it holds and not what its fixed shape could hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from copc_jax import analysis, losses, model, returns, sharding
from copc_jax.methods import LossConfig, Method
from copc_jax.model import LoraConfig, ModelConfig
from copc_jax.types import Batch, LearnerState, Targets

Metrics = dict[str, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW of one network."""

    learning_rate: float = 3e-4
    """Step size after warm-up."""
    warmup_updates: int = 10
    """Updates of linear warm-up; the first one uses learning_rate / warmup_updates, the last one
    learning_rate. 0 starts at full size."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine reach `final_fraction` at the network's last update
    of the run."""
    final_fraction: float = 0.1
    """Fraction of the learning rate left at the end of a decaying schedule."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Global gradient norm above which a gradient is scaled down."""

    def __post_init__(self) -> None:
        """Refuse values that cannot train."""
        for name in ("learning_rate", "clip_norm", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.warmup_updates < 0:
            raise ValueError(f"warmup_updates must be 0 or more, got {self.warmup_updates}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """What the learner compiles: everything here is static."""

    model: ModelConfig
    method: Method
    loss: LossConfig
    actor: OptimizerConfig
    critic: OptimizerConfig
    updates: int
    reduce: Literal["token", "response"] = "token"
    critic_warmup_updates: int = 0
    micro_batches: int = 1
    remat: bool = False
    logprob_chunk: int | None = None
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    seed: int = 0


class ActorInputs(NamedTuple):
    """What the actor's loss reads of a whole batch, frozen before it is cut into pieces.

    Attributes:
        advantage: f32[rows, time], whitened where the method does so.
        kept: bool[rows, time] of the method's `token_mask`, None where it has none.
    """

    advantage: Array
    kept: Array | None


class Learner(NamedTuple):
    """Pure functions over `LearnerState`; updates and steps donate the state they are given.

    `step_with_targets` is `step` that also hands out what it froze, for people who look at single
    tokens, and `contributions(batch, targets)` gives two f32[rows, time] to go with it: the
    advantage that the actor's loss reads, and the factor on each token's grad log pi in the sum of
    that loss's terms at the start of the batch. The factor is 0 where a mask or a clip removed the
    token, and positive where the update raises its probability. Neither runs the model again.

    `policy_params(state)` gives the actor as a whole model, its adapters merged; without adapters
    it is the state's own. `init` takes parameters that lie as `params_sharding` says.
    """

    init: Callable[[PyTree], LearnerState]
    prepare: Callable[[LearnerState, Batch], Targets]
    update: Callable[[LearnerState, Batch, Targets], tuple[LearnerState, Metrics]]
    step: Callable[[LearnerState, Batch], tuple[LearnerState, Metrics]]
    step_with_targets: Callable[[LearnerState, Batch], tuple[LearnerState, Metrics, Targets]]
    contributions: Callable[[Batch, Targets], tuple[Array, Array]]
    policy_params: Callable[[LearnerState], PyTree]
    params_sharding: PyTree
    state_sharding: LearnerState
    batch_sharding: NamedSharding


def learning_rate_schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Give the learning rate by the number of updates already made, of `updates` in all.

    Warm-up is counted from 1: its first update moves, and its last one has the full rate, from
    which a decaying schedule starts.
    """
    warmup = max(config.warmup_updates, 1)
    decay_steps = max(updates - warmup, 1)
    match config.schedule:
        case "constant":
            main = optax.constant_schedule(config.learning_rate)
        case "linear":
            main = optax.linear_schedule(
                config.learning_rate, config.learning_rate * config.final_fraction, decay_steps
            )
        case "cosine":
            main = optax.cosine_decay_schedule(
                config.learning_rate, decay_steps, alpha=config.final_fraction
            )
    if warmup == 1:
        return main
    rise = optax.linear_schedule(
        config.learning_rate / warmup, config.learning_rate, transition_steps=warmup - 1
    )
    return optax.join_schedules([rise, main], [warmup - 1])


def optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        ),
    )


def build_learner(config: LearnerConfig, mesh: Mesh) -> Learner:
    """Compile nothing yet, bind the configuration, and return the learner's functions.

    Args:
        config: static settings.
        mesh: axes "data" (rows of a batch) and "model"; one device is a (1, 1) mesh.

    Returns:
        `init` takes actor parameters and starts the critic from the actor's body; a method without
        a critic has an empty one. `step` runs a whole batch: `config.method.minibatches` updates,
        each of which raises `version` by one. `update` is one update on all of the batch.

        With `config.lora`, `state.actor` is `{"base", "lora"}` and `state.critic` holds adapters of
        its own and a value head. Both networks run on the one base, which nothing changes;
        gradients and moments are those of adapters and value head.
    """
    method, loss_config = config.method, config.method.settings(config.loss)
    # Each schedule is as long as its network has updates, so that a decay ends with the run.
    actor_updates = config.updates - config.critic_warmup_updates
    critic_updates = config.updates * method.critic_steps
    actor_optimizer = optimizer(config.actor, actor_updates)
    critic_optimizer = optimizer(config.critic, critic_updates)
    actor_rate = learning_rate_schedule(config.actor, actor_updates)
    critic_rate = learning_rate_schedule(config.critic, critic_updates)
    rows_sharding = sharding.batch_sharding(mesh)
    micro_sharding = NamedSharding(mesh, PartitionSpec(None, *rows_sharding.spec))
    lora = config.lora if config.lora.rank else None

    def frozen(state: LearnerState) -> PyTree:
        """Return the weights under the adapters, None where all weights are trained."""
        return state.actor["base"] if lora else None

    def trained(state: LearnerState) -> tuple[PyTree, PyTree]:
        """Return what gradients and optimizers see of actor and critic."""
        return (state.actor["lora"] if lora else state.actor), state.critic

    def whole(network: PyTree, base: PyTree) -> PyTree:
        return model.with_lora(base, network, lora.scale) if lora else network

    def policy(actor: PyTree, base: PyTree, batch: Batch) -> tuple[Array, Array]:
        actor = whole(actor, base)
        hidden = model.forward(
            actor,
            config.model,
            batch.token_ids,
            batch.segment_ids,
            batch.positions,
            remat=config.remat,
        )
        return model.token_logprob_and_entropy(
            actor,
            config.model,
            hidden,
            batch.token_ids,
            batch.segment_ids,
            chunk=config.logprob_chunk,
            wanted=batch.is_action,
        )

    def value_of(critic: PyTree, base: PyTree, batch: Batch) -> Float[Array, "rows time"]:
        if not method.critic:
            return jnp.zeros_like(batch.reward)
        critic = whole(critic, base)
        hidden = model.forward(
            critic,
            config.model,
            batch.token_ids,
            batch.segment_ids,
            batch.positions,
            remat=config.remat,
        )
        return model.values(critic, config.model, hidden, batch.segment_ids)

    def freeze(policy_logprob: Array, value: Array, batch: Batch) -> Targets:
        policy_logprob, value = jax.lax.stop_gradient((policy_logprob, value))
        batch = fold_bootstrap(batch, value)
        ratio = returns.importance_ratio(policy_logprob, batch.behavior_logprob, batch.is_action)
        result = method.targets(
            loss_config, batch.reward, value, batch.discount, ratio, batch.is_action
        )
        return Targets(
            policy_logprob=policy_logprob,
            value=value,
            ratio=ratio,
            advantage=result.advantage,
            value_target=result.value_target,
        )

    def fold_bootstrap(batch: Batch, value: Array) -> Batch:
        """Add V after a cut to the last reward; `staging.pack` marks the slot after it."""
        after = jnp.where(batch.is_action, 0.0, batch.discount) * value
        reward = batch.reward + jnp.pad(after[:, 1:], ((0, 0), (0, 1)))
        return dataclasses.replace(batch, reward=reward)

    def for_actor(targets: Targets, batch: Batch) -> ActorInputs:
        """Whiten last and over the whole batch: returns themselves stay linear in the reward."""
        advantage = targets.advantage
        if method.whiten if loss_config.whiten is None else loss_config.whiten:
            advantage = returns.whiten(advantage, batch.is_action)
        kept = None
        if method.token_mask is not None:
            kept = method.token_mask(
                loss_config,
                targets.policy_logprob,
                batch.behavior_logprob,
                advantage,
                batch.is_action,
            )
        return ActorInputs(advantage, kept)

    def actor_loss(
        logprob: Array, batch: Batch, targets: Targets, inputs: ActorInputs
    ) -> tuple[Array, Metrics]:
        return method.actor_loss(
            loss_config,
            logprob,
            batch.behavior_logprob,
            targets.policy_logprob,
            inputs.advantage,
            batch.is_action,
            reduce=config.reduce,
            segment_ids=batch.segment_ids,
            kept=inputs.kept,
        )

    def critic_loss(value: Array, targets: Targets, batch: Batch) -> tuple[Array, Metrics]:
        return losses.critic_loss(
            value,
            targets.value_target,
            batch.is_action,
            old_value=targets.value,
            value_clip=loss_config.value_clip if method.value_clip else None,
            reduce=config.reduce,
            segment_ids=batch.segment_ids,
        )

    def diagnostics(batch: Batch, targets: Targets) -> Metrics:
        batch = fold_bootstrap(batch, targets.value)
        plain = returns.gae(
            batch.reward,
            targets.value,
            batch.discount,
            batch.is_action,
            lambda_=loss_config.lambda_,
        )
        estimates = analysis.coupling_estimates(
            targets.policy_logprob,
            batch.behavior_logprob,
            targets.value,
            targets.advantage,
            plain.advantage,
            targets.value_target,
            batch.is_action,
            eta_policy=loss_config.eta_policy,
            eta_advantage=loss_config.eta_advantage,
            eps_low=loss_config.eps_low,
            eps_high=loss_config.eps_high,
            reward=batch.reward,
            discount=batch.discount,
            lambda_=loss_config.lambda_,
            first_residual=loss_config.first_residual,
        )
        if method.critic:
            return estimates
        # Without a critic its value and its error mean nothing.
        return {k: v for k, v in estimates.items() if not k.startswith("coupling/value_")}

    def losses_of(
        networks: tuple[PyTree, PyTree],
        base: PyTree,
        batch: Batch,
        targets: Targets | None,
        inputs: ActorInputs | None,
    ) -> tuple[Array, tuple[tuple[Array, Array], Metrics, Targets]]:
        """Sum both losses times their denominators: micro-batches add before they divide."""
        actor, critic = networks
        logprob, entropy = policy(actor, base, batch)
        value = value_of(critic, base, batch)
        if targets is None:
            targets = freeze(logprob, value, batch)
        if inputs is None:
            inputs = for_actor(targets, batch)
        loss, actor_metrics = actor_loss(logprob, batch, targets, inputs)
        actor_count = jax.lax.stop_gradient(actor_metrics["loss"][1])
        total = loss * actor_count
        metrics = {f"actor/{name}": pair for name, pair in actor_metrics.items()}
        metrics["actor/entropy"] = (
            jnp.sum(jnp.where(batch.is_action, entropy, 0.0)),
            jnp.sum(batch.is_action, dtype=jnp.float32),
        )
        critic_count = jnp.zeros_like(actor_count)
        if method.critic:
            loss, critic_metrics = critic_loss(value, targets, batch)
            critic_count = jax.lax.stop_gradient(critic_metrics["loss"][1])
            total += loss * critic_count
            metrics |= {f"critic/{name}": pair for name, pair in critic_metrics.items()}
        metrics = jax.lax.stop_gradient(metrics)
        return total, ((actor_count, critic_count), metrics, targets)

    differentiate = jax.grad(losses_of, has_aux=True)

    def divide(grads: PyTree, count: Array) -> PyTree:
        """Divide by the denominator of a loss; nothing counted leaves gradients of 0, not NaN."""
        return jax.tree.map(lambda g: g / jnp.where(count > 0, count, 1.0), grads)

    def micro(batch: Any) -> Any:
        """Cut [rows, time] into [micro_batches, rows / micro_batches, time], rows over "data"."""

        def split(x: Array) -> Array:
            x = x.reshape(config.micro_batches, x.shape[0] // config.micro_batches, *x.shape[1:])
            return jax.lax.with_sharding_constraint(x, micro_sharding)

        return jax.tree.map(split, batch)

    def unmicro(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x.reshape(-1, x.shape[-1]), rows_sharding)

    def accumulate(one: Callable[..., Any], batch: Batch, *rest: Any) -> Any:
        """Sum `one(batch, *rest)` over the micro-batches that hold a token."""
        if config.micro_batches == 1:
            return one(batch, *rest)
        pieces = micro((batch, *rest))
        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(one, *jax.tree.map(lambda x: x[0], pieces)),
        )

        def add(total: Any, piece: Any) -> tuple[Any, None]:
            used = jnp.any(piece[0].segment_ids > 0)
            more = jax.lax.cond(used, lambda: one(*piece), lambda: zero)
            return jax.tree.map(jnp.add, total, more), None

        return jax.lax.scan(add, zero, pieces)[0]

    def gradients(
        state: LearnerState, batch: Batch, targets: Targets, inputs: ActorInputs
    ) -> tuple[tuple[PyTree, PyTree], Metrics]:
        def one(*piece: Any) -> Any:
            grads, (counts, metrics, _) = differentiate(trained(state), frozen(state), *piece)
            return grads, counts, metrics

        grads, counts, metrics = accumulate(one, batch, targets, inputs)
        return (divide(grads[0], counts[0]), divide(grads[1], counts[1])), metrics

    def apply(
        state: LearnerState, grads: tuple[PyTree, PyTree], metrics: Metrics
    ) -> tuple[LearnerState, Metrics]:
        actor_grad, critic_grad = grads
        one = jnp.ones((), jnp.float32)
        learns = state.version >= config.critic_warmup_updates

        old_actor, critic = trained(state)
        actor_step, actor_opt = actor_optimizer.update(actor_grad, state.actor_opt, old_actor)
        if method.learning_rate_scale is not None:
            scale = method.learning_rate_scale(loss_config, metrics)
            actor_step = jax.tree.map(lambda x: x * scale, actor_step)
            metrics["actor/learning_rate_scale"] = (scale, one)
        moved = optax.apply_updates(old_actor, actor_step)
        keep = lambda new, old: jnp.where(learns, new, old)
        actor = jax.tree.map(keep, moved, old_actor)
        # The critic's warm-up leaves the actor's moments and schedule where they were: its first
        # real update is update one.
        actor_opt = jax.tree.map(keep, actor_opt, state.actor_opt)

        rate = jnp.where(learns, actor_rate(_count(state.actor_opt)), 0.0)
        metrics |= {
            "actor/gradient_norm": (optax.tree.norm(actor_grad), one),
            "actor/learning_rate": (rate.astype(jnp.float32), one),
        }

        critic_opt = state.critic_opt
        if method.critic:
            critic_step, critic_opt = critic_optimizer.update(critic_grad, critic_opt, critic)
            critic = optax.apply_updates(critic, critic_step)
            rate = jnp.asarray(critic_rate(_count(state.critic_opt)), jnp.float32)
            metrics |= {
                "critic/gradient_norm": (optax.tree.norm(critic_grad), one),
                "critic/learning_rate": (rate, one),
            }
        new = LearnerState(
            version=state.version + 1,
            actor={**state.actor, "lora": actor} if lora else actor,
            critic=critic,
            actor_opt=actor_opt,
            critic_opt=critic_opt,
        )
        return new, metrics

    def extra_critic_steps(state: LearnerState, batch: Batch, targets: Targets) -> LearnerState:
        """Update the critic further on the same frozen targets, for methods like SAO."""
        base = frozen(state)

        def one(critic: PyTree, batch: Batch, targets: Targets) -> tuple[PyTree, Array]:
            def total(critic: PyTree) -> tuple[Array, Array]:
                value = value_of(critic, base, batch)
                loss, metrics = critic_loss(value, targets, batch)
                count = jax.lax.stop_gradient(metrics["loss"][1])
                return loss * count, count

            return jax.grad(total, has_aux=True)(critic)

        for _ in range(method.critic_steps - 1):
            grad, count = accumulate(partial(one, state.critic), batch, targets)
            step, critic_opt = critic_optimizer.update(
                divide(grad, count), state.critic_opt, state.critic
            )
            state = dataclasses.replace(
                state, critic=optax.apply_updates(state.critic, step), critic_opt=critic_opt
            )
        return state

    def prepare(state: LearnerState, batch: Batch) -> Targets:
        (actor, critic), base = trained(state), frozen(state)
        if config.micro_batches == 1:
            logprob, value = policy(actor, base, batch)[0], value_of(critic, base, batch)
            return freeze(logprob, value, batch)

        def forward(_: None, piece: Batch) -> tuple[None, tuple[Array, Array]]:
            used = jnp.any(piece.segment_ids > 0)
            run = lambda: (policy(actor, base, piece)[0], value_of(critic, base, piece))
            skip = lambda: (jnp.zeros_like(piece.reward), jnp.zeros_like(piece.reward))
            return None, jax.lax.cond(used, run, skip)

        _, (logprob, value) = jax.lax.scan(forward, None, micro(batch))
        return freeze(unmicro(logprob), unmicro(value), batch)

    def update(state: LearnerState, batch: Batch, targets: Targets) -> tuple[LearnerState, Metrics]:
        return update_part(state, batch, targets, for_actor(targets, batch))

    def update_part(
        state: LearnerState, batch: Batch, targets: Targets, inputs: ActorInputs
    ) -> tuple[LearnerState, Metrics]:
        grads, metrics = gradients(state, batch, targets, inputs)
        state, metrics = apply(state, grads, metrics)
        return extra_critic_steps(state, batch, targets), metrics

    def contributions(batch: Batch, targets: Targets) -> tuple[Array, Array]:
        inputs = for_actor(targets, batch)

        def total(logprob: Array) -> Array:
            loss, metrics = actor_loss(logprob, batch, targets, inputs)
            return -loss * jax.lax.stop_gradient(metrics["loss"][1])

        factor = jax.grad(total)(targets.policy_logprob)
        return inputs.advantage, jnp.where(batch.is_action, factor, 0.0)

    def step(state: LearnerState, batch: Batch) -> tuple[LearnerState, Metrics, Targets]:
        if config.micro_batches == 1 and method.minibatches == 1:
            grads, (counts, metrics, targets) = differentiate(
                trained(state), frozen(state), batch, None, None
            )
            grads = (divide(grads[0], counts[0]), divide(grads[1], counts[1]))
            metrics |= diagnostics(batch, targets)
            state, metrics = apply(state, grads, metrics)
            return extra_critic_steps(state, batch, targets), metrics, targets

        targets = prepare(state, batch)
        inputs = for_actor(targets, batch)
        totals: Metrics = diagnostics(batch, targets)
        count = method.minibatches
        size = batch.reward.shape[0] // count
        for index in range(count):
            part = jax.tree.map(
                lambda x, i=index: jax.lax.with_sharding_constraint(
                    x[i * size : (i + 1) * size], rows_sharding
                ),
                (batch, targets, inputs),
            )
            state, metrics = update_part(state, *part)
            # Sums and counts add, so that the log shows all minibatches and not the last.
            for name, (total, number) in metrics.items():
                old = totals.get(name, (jnp.zeros_like(total), jnp.zeros_like(number)))
                totals[name] = (old[0] + total, old[1] + number)
        return state, totals, targets

    def fresh(actor: PyTree) -> LearnerState:
        # A copy: the state is donated by every update, the caller's parameters are not.
        actor = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), actor)
        if lora:
            keys = jax.random.split(jax.random.key(config.seed))
            adapters = model.init_lora(keys[0], config.model, lora)
            critic = model.init_lora(keys[1], config.model, lora, head="value")
            moving, actor = adapters, {"base": actor, "lora": adapters}
        else:
            critic = model.critic_from_actor(actor, config.model)
            moving = actor
        if not method.critic:
            critic = {}
        return LearnerState(
            version=jnp.zeros((), jnp.int32),
            actor=actor,
            critic=critic,
            actor_opt=actor_optimizer.init(moving),
            critic_opt=critic_optimizer.init(critic),
        )

    params_sharding = sharding.parameter_shardings(mesh, config.model, "lm")
    merge = jax.jit(
        lambda base, adapters: model.merge_lora(base, adapters, config.lora.scale),
        out_shardings=params_sharding,
    )

    def policy_params(state: LearnerState) -> PyTree:
        if lora is None:
            return state.actor
        return merge(state.actor["base"], state.actor["lora"])

    state_sharding = _state_sharding(config, lora, mesh, fresh)
    replicated = sharding.replicated(mesh)
    jit = partial(jax.jit, donate_argnums=(0,))
    shard_in = (state_sharding, rows_sharding)
    return Learner(
        init=jax.jit(fresh, out_shardings=state_sharding),
        prepare=jax.jit(prepare, in_shardings=shard_in, out_shardings=rows_sharding),
        update=jit(
            update,
            in_shardings=(*shard_in, rows_sharding),
            out_shardings=(state_sharding, replicated),
        ),
        step=jit(
            lambda state, batch: step(state, batch)[:2],
            in_shardings=shard_in,
            out_shardings=(state_sharding, replicated),
        ),
        step_with_targets=jit(
            step,
            in_shardings=shard_in,
            out_shardings=(state_sharding, replicated, rows_sharding),
        ),
        contributions=jax.jit(
            contributions,
            in_shardings=(rows_sharding, rows_sharding),
            out_shardings=rows_sharding,
        ),
        policy_params=policy_params,
        params_sharding=params_sharding,
        state_sharding=state_sharding,
        batch_sharding=rows_sharding,
    )


def build_sft(
    config: ModelConfig,
    optimizer_config: OptimizerConfig,
    updates: int,
    mesh: Mesh,
    *,
    context_weight: float = 0.0,
) -> tuple[Callable, Callable]:
    """Fine-tune on demonstrations, packed as other batches are.

    Args:
        config: the model.
        optimizer_config: its AdamW.
        updates: length of the schedule.
        mesh: axes "data" and "model".
        context_weight: weight of the loss on prompt and observation tokens beside that of the
            action tokens: 0 for a pretrained model; a model that starts from nothing learns to read
            from them.

    Returns:
        `init(params)` gives the optimizer's state. `step(params, opt_state, batch)` gives
        `(params, opt_state, metrics)` with the mean negative log-likelihood of the action tokens,
        in nats, as `metrics["loss"] = (sum, count)`; it donates `params` and `opt_state`.
    """
    transform = optimizer(optimizer_config, updates)
    params_sharding = sharding.parameter_shardings(mesh, config, "lm")

    def loss(params: PyTree, batch: Batch) -> tuple[Array, Metrics]:
        hidden = model.forward(params, config, batch.token_ids, batch.segment_ids, batch.positions)
        logprob = model.token_logprob(params, config, hidden, batch.token_ids, batch.segment_ids)
        total, metrics = losses.sft_loss(logprob, batch.is_action)
        if context_weight:
            context = (batch.segment_ids > 0) & ~batch.is_action
            reading, _ = losses.sft_loss(logprob, context)
            total = total + context_weight * reading
        return total, metrics

    def step(params: PyTree, opt_state: PyTree, batch: Batch) -> tuple[PyTree, PyTree, Metrics]:
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates_, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates_), opt_state, metrics

    abstract = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    opt_state = jax.eval_shape(transform.init, abstract)
    opt_sharding = sharding.optimizer_shardings(mesh, config, "lm", opt_state)
    return (
        jax.jit(transform.init, out_shardings=opt_sharding),
        jax.jit(
            step,
            donate_argnums=(0, 1),
            in_shardings=(params_sharding, opt_sharding, sharding.batch_sharding(mesh)),
            out_shardings=(params_sharding, opt_sharding, None),
        ),
    )


def _count(opt_state: PyTree) -> Array:
    """Return how many updates an optimizer made; its next learning rate is the schedule there."""
    return optax.tree_utils.tree_get(opt_state[1][0], "count")


def _state_sharding(
    config: LearnerConfig,
    lora: LoraConfig | None,
    mesh: Mesh,
    fresh: Callable[[PyTree], LearnerState],
) -> LearnerState:
    abstract_actor = jax.eval_shape(partial(model.init, config=config.model), jax.random.key(0))
    state = jax.eval_shape(fresh, abstract_actor)
    moments = partial(sharding.optimizer_shardings, mesh, config.model, lora=lora)
    actor = sharding.parameter_shardings(mesh, config.model, "lm")
    if lora:
        adapters = sharding.parameter_shardings(mesh, config.model, "lm", lora)
        actor = {"base": actor, "lora": adapters}
    critic = sharding.parameter_shardings(mesh, config.model, "value", lora)
    if not config.method.critic:
        critic = {}
    return LearnerState(
        version=sharding.replicated(mesh),
        actor=actor,
        critic=critic,
        actor_opt=moments("lm", state.actor_opt),
        critic_opt=moments("value", state.critic_opt),
    )
