"""The records that flow from prompts to updates.

Host records are frozen dataclasses of numpy arrays; device records are pytrees. Time is the last
axis, and index `t` is the token being predicted: `policy_logprob[t]` is of `token_ids[t]` given
what stands before it, `value[t]` is V of that prefix. `is_action` is True on tokens that the policy
sampled; prompt, tool text and padding are False.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    Array = Any
else:
    # Batches are packed by numpy on the host and placed on devices afterwards; a program is
    # compiled from shapes alone.
    Array = jax.Array | np.ndarray | jax.ShapeDtypeStruct

T = TypeVar("T")
Finish = Literal["stop", "length", "abort"]
Status = Literal["done", "truncated", "aborted"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question of a task.

    Attributes:
        prompt_id: unique name within its data set.
        messages: chat messages (`{"role", "content"}`), or () when `token_ids` are given.
        token_ids: the encoded prompt, or () when only `messages` are given.
        gold: the acceptable answers, as the task's reward reads them.
        source: name of the data source, for metrics per source.
    """

    prompt_id: str
    messages: tuple[dict[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    gold: tuple[str, ...] = ()
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one HTTP call sampled.

    Attributes:
        token_ids: i32[n], the sampled ids as the server reported them, stop tokens included.
        logprob: f32[n], log-probability of each at the sampling temperature, in nats.
        weight_version: i32[n], version of the weights that sampled each token: one call can span an
            update.
        finish: why the call ended.
        matched: stop string or stop token id that ended it, None for other endings.
    """

    token_ids: np.ndarray
    logprob: np.ndarray
    weight_version: np.ndarray
    finish: Finish
    matched: str | int | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished episode: prompt, sampled tokens and tool text in the order of the episode.

    Attributes:
        prompt_id: the `Prompt` it answers.
        sample: index among the samples of that prompt.
        token_ids: i32[S].
        is_action: bool[S], True on sampled tokens.
        behavior_logprob: f32[S], the server's log-probability, 0 off action tokens.
        weight_version: i32[S], -1 off action tokens.
        reward: scalar outcome reward.
        status: "done" (ended by itself), "truncated" (budget), "aborted" (not trainable).
        info: task figures for logs, such as {"em": 1.0, "searches": 2.0}.
    """

    prompt_id: str
    sample: int
    token_ids: np.ndarray
    is_action: np.ndarray
    behavior_logprob: np.ndarray
    weight_version: np.ndarray
    reward: float
    status: Status
    info: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass_transform(frozen_default=True)
def _record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that is a pytree, with `replace`.

    As `flax.struct.dataclass` does, which would load all of flax, a sixth of the time that
    importing the losses takes.
    """
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    made.replace = lambda self, **changes: dataclasses.replace(self, **changes)
    return jax.tree_util.register_dataclass(made)


@_record
class Batch:
    """Packed trajectories, the learner's input.

    Segment 0 is padding; segments count from 1 in each row. `pieces` is there only inside the
    learner, which cuts rows into micro-batches.
    """

    token_ids: Int[Array, "*pieces rows time"]
    segment_ids: Int[Array, "*pieces rows time"]
    positions: Int[Array, "*pieces rows time"]
    is_action: Bool[Array, "*pieces rows time"]
    behavior_logprob: Float[Array, "*pieces rows time"]
    reward: Float[Array, "*pieces rows time"]
    discount: Float[Array, "*pieces rows time"]
    weight_version: Int[Array, "*pieces rows time"]


@_record
class Targets:
    """Frozen pre-update quantities: the update differentiates none of them."""

    policy_logprob: Float[Array, "*pieces rows time"]
    value: Float[Array, "*pieces rows time"]
    ratio: Float[Array, "*pieces rows time"]
    advantage: Float[Array, "*pieces rows time"]
    value_target: Float[Array, "*pieces rows time"]


@_record
class LearnerState:
    """Everything that an update changes.

    `version`, an i32 scalar, counts updates. No shapes here: the same tree also holds shardings and
    abstract values.
    """

    version: Any
    actor: Any
    critic: Any
    actor_opt: Any
    critic_opt: Any


class Returns(NamedTuple):
    """Result of a return operator: `advantage` for the actor, `value_target` for the critic."""

    advantage: Float[jax.Array, "*batch time"]
    value_target: Float[jax.Array, "*batch time"]
