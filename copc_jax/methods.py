"""The methods of the paper, one frozen row each: which returns, which actor loss, which batch.

A row names functions of `returns` and `losses` and says how a batch is formed; it holds no
mathematics. `METHODS[name]` is the whole difference between two runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from copc_jax import losses, returns
from copc_jax.types import Returns


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Numbers of returns and losses, shared by all methods; a method reads those that it has."""

    eta_policy: float = 0.5
    """COPC, width of the actor's ratio mask, 0 to 1; smaller drops more tokens."""
    eta_advantage: float = 0.5
    """COPC, width of the clip on residual weights, 0 to 1; 0 corrects nothing (GAE)."""
    eps_low: float = 0.4
    """COPC, margin below ratio 1 at eta = 1, both channels."""
    eps_high: float = 0.56
    """COPC, margin above ratio 1 at eta = 1, both channels."""
    gamma: float = 1.0
    """Discount per action token, above 0 to 1 (the paper's table is not public: 1 is assumed)."""
    lambda_: float = 1.0
    """Decay of traces per action token, 0 to 1 (the paper's table is not public: 1 is assumed)."""
    trace: returns.Trace = "residual"
    """COPC, whether weights multiply residuals only or also the trace (inferred: residuals)."""
    first_residual: returns.FirstResidual = "weighted"
    """COPC, whether an advantage weights the residual of its own token (inferred: it does)."""
    mask_from: Literal["current", "frozen"] = "current"
    """COPC, which ratio decides the mask: each update's, or the one frozen before the batch."""
    mask_in_denominator: bool = True
    """COPC, whether dropped tokens count in the mean."""
    clip_low: float = 0.2
    """PPO-like clips and SAO's mask, margin below ratio 1."""
    clip_high: float = 0.28
    """PPO-like clips and SAO's mask, margin above ratio 1."""
    dual_clip: float | None = None
    """PPO, bound on the ratio of tokens with a negative advantage; none is off."""
    whiten: bool | None = None
    """Advantages are whitened over the batch; none: as the method prescribes."""
    value_clip: float | None = 0.5
    """Critic, largest move of a value per batch in units of the return; none is off."""
    behavior_cap: float = 5.0
    """AReaL, proximal-to-behavior ratio above which a token leaves the actor loss."""
    tis_weight_max: float = 2.0
    """TIS, bound on the proximal-to-behavior ratio."""
    icepop_weight_min: float = 0.5
    """IcePop, proximal-to-behavior ratio below which a token leaves the actor loss."""
    icepop_weight_max: float = 2.0
    """IcePop, proximal-to-behavior ratio above which a token leaves the actor loss."""
    cispo_clip_low: float = 1.0
    """CISPO, margin below ratio 1 of the weight; 1 leaves small ratios alone."""
    cispo_clip_high: float = 0.2
    """CISPO, margin above ratio 1 of the weight."""
    gspo_clip_low: float = 3e-4
    """GSPO, margin below 1 of a response's geometric-mean ratio."""
    gspo_clip_high: float = 4e-4
    """GSPO, margin above 1 of a response's geometric-mean ratio."""
    m2po_threshold: float = 0.04
    """M2PO, largest mean squared log-ratio of the tokens kept, in square nats."""
    m2po_harmful_only: bool = False
    """M2PO, drop only tokens that the update moves further from the behavior policy."""
    vcpo_weight_max: float = 8.0
    """VCPO, bound on the ratio of a whole response."""
    vcpo_sample_share: float = 0.55
    """VCPO, share of effective samples from which the learning rate is whole; 1 for one turn."""

    def __post_init__(self) -> None:
        """Refuse numbers outside their range."""
        for name, low, high in (
            ("eta_policy", 0.0, 1.0),
            ("eta_advantage", 0.0, 1.0),
            ("eps_low", 0.0, 1.0),
            ("eps_high", 0.0, float("inf")),
            ("lambda_", 0.0, 1.0),
            ("clip_low", 0.0, 1.0),
            ("clip_high", 0.0, float("inf")),
            ("icepop_weight_min", 0.0, 1.0),
            ("icepop_weight_max", 1.0, float("inf")),
            ("cispo_clip_low", 0.0, 1.0),
            ("cispo_clip_high", 0.0, float("inf")),
            ("gspo_clip_low", 0.0, 1.0),
            ("gspo_clip_high", 0.0, float("inf")),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {value}")
        if not 0.0 < self.gamma <= 1.0:
            raise ValueError(f"gamma must be above 0 and at most 1, got {self.gamma}")
        for name, low in (
            ("dual_clip", 1.0),
            ("value_clip", 0.0),
            ("behavior_cap", 0.0),
            ("tis_weight_max", 0.0),
            ("m2po_threshold", 0.0),
            ("vcpo_weight_max", 0.0),
            ("vcpo_sample_share", 0.0),
        ):
            value = getattr(self, name)
            if value is not None and not value > low:
                raise ValueError(f"{name} must be above {low}, got {value}")


TargetsFunction = Callable[[LossConfig, Array, Array, Array, Array, Array], Returns]
ActorLossFunction = Callable[..., tuple[Array, losses.Metrics]]
RatioSource = Literal["behavior", "response", "proximal", "advantage", "none"]

PAPER_REDUCE: Mapping[str, losses.Reduce] = {"search": "token", "math": "response"}


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """One method.

    Attributes:
        name: its key in `METHODS`.
        paper: where it comes from; "none: ..." where no paper has it.
        returns: `(config, reward, value, discount, ratio, is_action) -> Returns`; `ratio` is the
            frozen learner over behavior.
        loss: `(config, policy_logprob, behavior_logprob, proximal_logprob, advantage, is_action, *,
            reduce, segment_ids) -> (loss, metrics)`.
        token_mask: `(config, policy_logprob, behavior_logprob, advantage, is_action) -> bool` of
            the tokens that the actor's loss keeps, where that choice looks at the whole batch: it
            is made once, and the loss takes it as `kept`.
        ratio: what corrects the actor for the policy that sampled: "behavior", each token's ratio
            to what the server recorded; "response", that of whole responses; "proximal", clips
            against the learner before the batch and weighs by its ratio to behavior; "advantage",
            a ratio that the advantage holds already; "none".
        reduce: mean of the actor and critic losses, by task.
        samples_per_prompt: least number of responses to a prompt.
        max_samples_per_prompt: largest, None for no bound.
        group: the outcome is normalized within its prompt before the batch is packed, and stands as
            the reward of a critic-free MDP.
        dynamic_sampling: groups of equal rewards are replaced before the batch is formed.
        critic: a value function is trained.
        critic_steps: critic updates per actor update.
        value_clip: the critic's loss is clipped.
        whiten: advantages are whitened over the batch after the returns.
        minibatches: actor updates a batch, each on its own part.
        warmup_updates: the actor's learning-rate warm-up that the method prescribes, in updates, by
            task: the default of its runs.
        learning_rate_scale: `(config, metrics) -> factor` of the actor's step, from the metrics as
            the learner names them (`actor/...`); None is 1.
        overrides: settings that define the method and that no flag changes.
    """

    name: str
    paper: str
    returns: TargetsFunction
    loss: ActorLossFunction
    token_mask: Callable[[LossConfig, Array, Array, Array, Array], Array] | None = None
    ratio: RatioSource = "behavior"
    reduce: Mapping[str, losses.Reduce] = dataclasses.field(default_factory=lambda: PAPER_REDUCE)
    samples_per_prompt: int = 1
    max_samples_per_prompt: int | None = None
    group: bool = False
    dynamic_sampling: bool = False
    critic: bool = True
    critic_steps: int = 1
    value_clip: bool = True
    whiten: bool = True
    minibatches: int = 1
    warmup_updates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    learning_rate_scale: Callable[[LossConfig, losses.Metrics], Array] | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def settings(self, config: LossConfig) -> LossConfig:
        """Return `config` with what defines this method in place."""
        return dataclasses.replace(config, **self.overrides)

    def targets(
        self,
        config: LossConfig,
        reward: Array,
        value: Array,
        discount: Array,
        ratio: Array,
        is_action: Array,
    ) -> Returns:
        """Return advantages (not yet whitened) and value targets of a batch."""
        return self.returns(self.settings(config), reward, value, discount, ratio, is_action)

    def actor_loss(
        self,
        config: LossConfig,
        policy_logprob: Array,
        behavior_logprob: Array,
        proximal_logprob: Array,
        advantage: Array,
        is_action: Array,
        *,
        reduce: losses.Reduce,
        segment_ids: Array | None = None,
        kept: Array | None = None,
    ) -> tuple[Array, losses.Metrics]:
        """Return the actor loss and its metrics; see `losses` for the arguments."""
        mask = {} if kept is None else {"kept": kept}
        return self.loss(
            self.settings(config),
            policy_logprob,
            behavior_logprob,
            proximal_logprob,
            advantage,
            is_action,
            reduce=reduce,
            segment_ids=segment_ids,
            **mask,
        )


def _copc_returns(config, reward, value, discount, ratio, is_action) -> Returns:
    return returns.copc_returns(
        reward,
        value,
        discount,
        ratio,
        is_action,
        eta_advantage=config.eta_advantage,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        lambda_=config.lambda_,
        trace=config.trace,
        first_residual=config.first_residual,
    )


def _gae(config, reward, value, discount, ratio, is_action) -> Returns:
    del ratio
    return returns.gae(reward, value, discount, is_action, lambda_=config.lambda_)


def _copc_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    return losses.copc_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        eta_policy=config.eta_policy,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        frozen_logprob=proximal if config.mask_from == "frozen" else None,
        mask_in_denominator=config.mask_in_denominator,
        **reduction,
    )


def _copc_restoring_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.copc_restoring_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        eta_policy=config.eta_policy,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        **reduction,
    )


def _ppo_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.ppo_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        **reduction,
    )


def _vtrace_returns(config, reward, value, discount, ratio, is_action) -> Returns:
    return returns.vtrace(reward, value, discount, ratio, is_action, lambda_=config.lambda_)


def _retrace_returns(config, reward, value, discount, ratio, is_action) -> Returns:
    return returns.retrace(reward, value, discount, ratio, is_action, lambda_=config.lambda_)


def _outcome(config, reward, value, discount, ratio, is_action) -> Returns:
    """Give every token the group-normalized outcome of its response: no value, no decay."""
    del config, value, ratio
    # Only the end of an episode is read from the discount, whatever gamma is.
    goes_on = jnp.where(discount > 0, 1.0, 0.0).astype(jnp.float32)
    return returns.gae(reward, jnp.zeros_like(reward), goes_on, is_action, lambda_=1.0)


def _decoupled_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    return losses.decoupled_ppo_actor_loss(
        policy,
        proximal,
        behavior,
        advantage,
        is_action,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        behavior_cap=config.behavior_cap,
        dual_clip=config.dual_clip,
        **reduction,
    )


def _tis_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    return losses.tis_actor_loss(
        policy,
        proximal,
        behavior,
        advantage,
        is_action,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        weight_max=config.tis_weight_max,
        dual_clip=config.dual_clip,
        **reduction,
    )


def _icepop_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    return losses.icepop_actor_loss(
        policy,
        proximal,
        behavior,
        advantage,
        is_action,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        weight_min=config.icepop_weight_min,
        weight_max=config.icepop_weight_max,
        dual_clip=config.dual_clip,
        **reduction,
    )


def _sao_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.sao_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        **reduction,
    )


def _vtrace_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del config, proximal
    return losses.vtrace_actor_loss(policy, behavior, advantage, is_action, **reduction)


def _truncated_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    """Weight the policy gradient by min(1, ratio), which V-trace has in its advantage."""
    del config, proximal
    return losses.cispo_actor_loss(
        policy, behavior, advantage, is_action, clip_low=1.0, clip_high=0.0, **reduction
    )


def _reinforce_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del config, proximal
    return losses.reinforce_actor_loss(policy, behavior, advantage, is_action, **reduction)


def _m2po_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.m2po_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        threshold=config.m2po_threshold,
        harmful_only=config.m2po_harmful_only,
        **reduction,
    )


def _m2po_mask(config, policy, behavior, advantage, is_action) -> Array:
    return losses.m2po_mask(
        policy,
        behavior,
        advantage,
        is_action,
        threshold=config.m2po_threshold,
        harmful_only=config.m2po_harmful_only,
    )


def _vcpo_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.vcpo_actor_loss(
        policy, behavior, advantage, is_action, weight_max=config.vcpo_weight_max, **reduction
    )


def _vcpo_learning_rate_scale(config, metrics) -> Array:
    share = losses.effective_sample_share(
        metrics["actor/response_weight"], metrics["actor/response_weight_square"]
    )
    return jnp.sqrt(jnp.minimum(1.0, share / config.vcpo_sample_share))


def _gspo_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.gspo_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        clip_low=config.gspo_clip_low,
        clip_high=config.gspo_clip_high,
        **reduction,
    )


def _cispo_loss(config, policy, behavior, proximal, advantage, is_action, **reduction):
    del proximal
    return losses.cispo_actor_loss(
        policy,
        behavior,
        advantage,
        is_action,
        clip_low=config.cispo_clip_low,
        clip_high=config.cispo_clip_high,
        **reduction,
    )


_TOKEN: Mapping[str, losses.Reduce] = {"search": "token", "math": "token"}
_RESPONSE: Mapping[str, losses.Reduce] = {"search": "response", "math": "response"}

# Outcomes are normalized within their group, which takes the place of critic and whitening.
_GROUP: Mapping[str, Any] = {
    "samples_per_prompt": 2,
    "group": True,
    "critic": False,
    "whiten": False,
}

_ROWS = (
    Method(
        name="copc",
        paper="COPC, arXiv 2610.09597",
        returns=_copc_returns,
        loss=_copc_loss,
    ),
    Method(
        name="copc_no_rc",
        paper="COPC without return correction, arXiv 2610.09597 section 6.3",
        returns=_copc_returns,
        loss=_copc_loss,
        overrides={"eta_advantage": 0.0},
    ),
    # The next two are not the paper's. To keep those tokens outside COPC's mask whose update leads
    # back into the interval is the gradient of PPO's clip at the same bounds: such a mask is PPO's
    # loss. With COPC's returns it completes the table of mask or clip, corrected or not.
    Method(
        name="ppo_rc",
        paper="none: PPO's clip with the corrected returns of COPC, arXiv 2610.09597",
        returns=_copc_returns,
        loss=_ppo_loss,
    ),
    Method(
        name="copc_restoring",
        paper="none: ppo_rc with the weights outside the interval held at its bounds",
        returns=_copc_returns,
        loss=_copc_restoring_loss,
    ),
    Method(
        name="ppo",
        paper="PPO with GAE, arXiv 1707.06347",
        returns=_gae,
        loss=_ppo_loss,
    ),
    Method(
        name="dapo",
        paper="DAPO, arXiv 2503.14476, without overlong shaping",
        returns=_outcome,
        loss=_ppo_loss,
        reduce=_TOKEN,
        dynamic_sampling=True,
        **_GROUP,
    ),
    Method(
        name="sao",
        paper="SAO, arXiv 2607.07508",
        returns=_gae,
        loss=_sao_loss,
        max_samples_per_prompt=1,
        critic_steps=2,
    ),
    Method(
        name="areal",
        paper="AReaL's decoupled PPO, arXiv 2505.24298",
        returns=_gae,
        loss=_decoupled_loss,
        ratio="proximal",
        minibatches=2,
        warmup_updates={"search": 25},
    ),
    Method(
        name="vtrace",
        paper="V-trace, arXiv 1802.01561",
        returns=_vtrace_returns,
        loss=_vtrace_loss,
        ratio="advantage",
        value_clip=False,
        whiten=False,
    ),
    Method(
        name="m2po",
        paper="M2PO, arXiv 2510.01161",
        returns=_outcome,
        loss=_m2po_loss,
        token_mask=_m2po_mask,
        reduce=_TOKEN,
        **_GROUP,
    ),
    # The paper's baseline weighs rewards by squared gradient norms of whole responses, which take
    # a backward pass each. This row has the plain mean of the group (that baseline for equal
    # norms and ratios); `returns.group_advantage` takes the weights from whoever has them.
    Method(
        name="vcpo",
        paper="VCPO, arXiv 2602.17616, with the group's plain mean as baseline",
        returns=_outcome,
        loss=_vcpo_loss,
        ratio="response",
        reduce=_RESPONSE,
        learning_rate_scale=_vcpo_learning_rate_scale,
        **_GROUP,
    ),
    # Retrace proper needs a critic of actions; see returns.retrace.
    Method(
        name="retrace",
        paper="Retrace(lambda), arXiv 1606.02647, with a critic of states",
        returns=_retrace_returns,
        loss=_truncated_loss,
        value_clip=False,
    ),
    Method(
        name="gspo",
        paper="GSPO, arXiv 2507.18071",
        returns=_outcome,
        loss=_gspo_loss,
        ratio="response",
        reduce=_RESPONSE,
        **_GROUP,
    ),
    Method(
        name="cispo",
        paper="CISPO, arXiv 2506.13585",
        returns=_outcome,
        loss=_cispo_loss,
        reduce=_TOKEN,
        **_GROUP,
    ),
    Method(
        name="tis",
        paper="truncated importance sampling (fengyao.notion.site/off-policy-rl) on PPO",
        returns=_gae,
        loss=_tis_loss,
        ratio="proximal",
    ),
    Method(
        name="icepop",
        paper="IcePop (ringtech) on PPO",
        returns=_gae,
        loss=_icepop_loss,
        ratio="proximal",
    ),
    Method(
        name="reinforce",
        paper="REINFORCE (Williams, 1992) with the batch mean as baseline, no correction",
        returns=_gae,
        loss=_reinforce_loss,
        ratio="none",
        critic=False,
    ),
)

METHODS: Mapping[str, Method] = {row.name: row for row in _ROWS}
