"""What the engine is asked for, and what it gives back."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a response are chosen and when it ends; SGLang's names and defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample.

    Attributes:
        rid: its name, for aborting it.
        prompt: i32[n], at least one token.
        sampling: see `Sampling`.
        seed: any integer; equal seeds give equal random numbers.
        logprob_start: first prompt token whose log-probability is wanted, -1 for none.
        top_logprobs: how many of the likeliest tokens to report at each position.
        stream: report after every dispatch, not only at the end.
        namespace: requests share computed prefixes within their namespace only.
    """

    rid: str
    prompt: np.ndarray
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    logprob_start: int = -1
    top_logprobs: int = 0
    stream: bool = False
    namespace: str = ""


@dataclasses.dataclass(frozen=True)
class Span:
    """Output tokens start..end-1 were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """Why a response ended: `matched` is the stop token or string, `message` explains an abort."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each position: ids i32[n, k] and log-probabilities f32[n, k]."""

    token_ids: np.ndarray
    logprob: np.ndarray


@dataclasses.dataclass(frozen=True)
class Output:
    """What is known of a response, at its end or, for a stream, after a dispatch.

    Attributes:
        request: what was asked.
        token_ids: i32[n], with a matched stop token, and with all tokens that reach into a matched
            stop string.
        logprob: f32[n] at the sampling temperature (1 for greedy), before top_k, top_p and min_p.
        spans: which weights sampled which tokens.
        finish: None while the response goes on.
        version: the weights in use now.
        started: False when it was aborted in the queue.
        cached_tokens: prompt tokens that did not have to be prefilled.
        retractions: how often it lost its slot to a pause.
        top: for each output token, if asked for.
        prompt_logprob: f32[n - 1] at temperature 1, of every prompt token but the first, if asked
            for.
        prompt_top: for the same tokens, if asked for.
    """

    request: Request
    token_ids: np.ndarray
    logprob: np.ndarray
    spans: tuple[Span, ...]
    finish: Finish | None
    version: str
    started: bool
    cached_tokens: int
    retractions: int
    top: TopLogprobs | None = None
    prompt_logprob: np.ndarray | None = None
    prompt_top: TopLogprobs | None = None
