"""The gap between the log-probabilities of servers and learner, measured while a run goes on.

With the same weights both compute the same numbers but for their arithmetic. Off-policy training
cannot see such a gap by itself: at staleness it hides in the ratios. So a few trajectories of each
batch, whose log-probabilities under its version the learner has from the update, are given to a
server that still holds this version, which has nothing but the prompt to compute for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from copc_jax.rollout.client import RolloutError, SGLangClient

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A trajectory with the learner's log-probabilities.

    Attributes:
        token_ids: i32[S].
        is_action: bool[S], the tokens to compare.
        logprob: f32[S], anything off action tokens.
    """

    token_ids: np.ndarray
    is_action: np.ndarray
    logprob: np.ndarray


class LogprobGap:
    """Has servers score what the learner has scored, before they get newer weights.

    `publish` stands for the client's, and everything runs on its event loop. The servers take
    turns. A request that fails, or is answered by other weights, is counted and changes nothing
    else.
    """

    def __init__(self, client: SGLangClient, *, limit: float):
        """Prepare; `limit` is the largest mean gap in nats."""
        self._client = client
        self._limit = limit
        self._references: dict[int, Sequence[Reference]] = {}
        self._scored: set[int] = set()
        self._scoring: asyncio.Task[None] | None = None
        self._publishing = False
        self._turn = 0
        self._warned: set[str] = set()
        self._gaps: list[np.ndarray] = []
        self._skipped = 0
        self._error: RolloutError | None = None

    async def publish(self, directory: Path, version: int) -> None:
        """Publish, after what the present version has to be compared with has been compared."""
        self._publishing = True
        try:
            held = self._client.published_version
            if held is not None and held not in self._scored:
                self._start(held)
            if self._scoring is not None:
                await self._scoring
            await self._client.publish(directory, version)
        finally:
            self._publishing = False
        for old in [known for known in self._references if known < version]:
            del self._references[old]
            self._scored.discard(old)

    async def offer(self, version: int, references: Sequence[Reference]) -> None:
        """Keep what the learner computed with the weights of `version`; returns at once.

        What belongs to the version that servers hold now is scored now: with each call, as long as
        they hold it.

        Raises:
            RolloutError: as `check`.
        """
        await self.check()
        held = self._client.published_version
        if references and (held is None or version >= held):
            self._references[version] = references
        if held is not None and not self._publishing:
            self._start(held)

    async def check(self) -> None:
        """Do nothing while all servers agree with the learner.

        Raises:
            RolloutError: the gap of a server was above the limit.
        """
        if self._error is not None:
            raise self._error

    async def since_last(self) -> dict[str, float]:
        """Give the figures of what was compared since the call before."""
        gaps, self._gaps = self._gaps, []
        skipped, self._skipped = self._skipped, 0
        return {
            **_figures("rollout/logprob_gap", np.concatenate([np.zeros(0, np.float32), *gaps])),
            "rollout/logprob_gap_skipped": float(skipped),
        }

    def _start(self, version: int) -> None:
        references = self._references.get(version)
        if references is None or (self._scoring is not None and not self._scoring.done()):
            return
        self._scored.add(version)
        self._scoring = asyncio.create_task(self._score(version, references))

    async def _score(self, version: int, references: Sequence[Reference]) -> None:
        """Share references out to the servers, and compare for each server by itself."""
        urls = self._client.holding(version)
        if not urls:
            self._skipped += len(references)
            return
        order = [urls[(self._turn + i) % len(urls)] for i in range(len(references))]
        self._turn += len(references)
        found = await asyncio.gather(
            *(self._compare(u, version, r) for u, r in zip(order, references, strict=True))
        )
        for url in dict.fromkeys(order):
            gap = np.concatenate([gap for u, gap in zip(order, found, strict=True) if u == url])
            self._gaps.append(gap)
            if gap.size and gap.mean() > self._limit and self._error is None:
                what = f"{gap.size} tokens that {url} scored with version {version}"
                consequence = "Updates may have trained on its samples"
                self._error = _refusal(what, gap, self._limit, consequence)

    async def _compare(self, url: str, version: int, reference: Reference) -> np.ndarray:
        """Give |learner - server| of the action tokens; none when there is nothing to compare."""
        length = len(reference.token_ids)
        if self._client.context_length is not None:
            length = min(length, self._client.context_length - 1)
        try:
            logprob, held = await self._client.score(reference.token_ids[:length], url)
            if held != version:
                raise RolloutError(f"{url} scored with other weights than version {version}")
        except RolloutError as error:
            self._skipped += 1
            if url not in self._warned:
                self._warned.add(url)
                logger.warning("log-probabilities not compared: %s", error)
            return np.zeros(0, np.float32)
        self._warned.discard(url)
        return np.abs(logprob - reference.logprob[:length])[reference.is_action[:length]]


def decode_gap(
    policy_logprob: np.ndarray, behavior_logprob: np.ndarray, version: int, limit: float
) -> dict[str, float]:
    """Compare tokens that `version` sampled with the learner's log-probabilities of them.

    Unlike scores, these come from decoding, one token at a time with cached keys and values.

    Raises:
        RolloutError: the mean gap is above the limit, in nats.
    """
    gap = np.abs(policy_logprob - behavior_logprob)
    if gap.size and gap.mean() > limit:
        what = f"{gap.size} tokens that version {version} sampled"
        raise _refusal(what, gap, limit, "This update has trained on them")
    return _figures("rollout/decode_gap", gap)


def _refusal(what: str, gap: np.ndarray, limit: float, consequence: str) -> RolloutError:
    return RolloutError(
        f"server and learner disagree on {what}: mean |log-prob difference| {gap.mean():.3g} "
        f"nats, largest {gap.max():.3g}, limit {limit:g} (rollout.logprob_gap_limit). "
        "Likely causes: the server keeps other weights than it says, or stale keys and values; "
        "it computes in lower precision (dtype, quantization); it changes logits (temperature, "
        f"penalties, a logit processor). {consequence}"
    )


def _figures(name: str, gap: np.ndarray) -> dict[str, float]:
    counted = {f"{name}_tokens": float(gap.size)}
    if not gap.size:
        return counted
    return {
        f"{name}_mean": float(gap.mean()),
        f"{name}_sd": float(gap.std()),
        f"{name}_p95": float(np.quantile(gap, 0.95)),
        f"{name}_max": float(gap.max()),
        **counted,
    }
