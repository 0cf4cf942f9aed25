"""SGLang's native HTTP protocol as data: request bodies to engine requests, outputs to answers.

The protocol is that of SGLang 0.5.23. It is stricter where that server would crash or guess: an
empty prompt, an id outside the vocabulary, and an option that this server lacks are refused.

Errors come in three shapes, with status 400, which clients tell apart:
    semantic  {"error": {"message": ...}}          a value that makes no sense, or does not fit
    contract  {"error": ...}                       an unknown sampling field, or a wrong type
    body      {"object": "error", "message": ...}  no JSON object where one must be, a missing field
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from copc_jax.rollout.requests import Output, Request, Sampling, TopLogprobs
from copc_jax.rollout.sampling import derive_seed


class ProtocolError(Exception):
    """A request that is refused with this JSON body; status 429 if it would be taken later."""

    def __init__(self, payload: dict[str, Any], status: int = 400):
        super().__init__(str(payload))
        self.payload = payload
        self.status = status


def semantic_error(message: str, status: int = 400) -> ProtocolError:
    """Refuse a value."""
    return ProtocolError({"error": {"message": message}}, status)


def contract_error(message: str) -> ProtocolError:
    """Refuse a field or its type."""
    return ProtocolError({"error": message})


def body_error(message: str) -> ProtocolError:
    """Refuse a body."""
    return ProtocolError(
        {
            "object": "error",
            "message": f"1 validation error:\n  {message}",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        }
    )


# -------------------------------------------------------------------------------------- fields


def _describe(value: Any) -> str:
    """Name a JSON value as SGLang's decoder does."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{value}"'
    return "sequence" if isinstance(value, list) else "map"


def _check(value: Any, accepts: Callable[[Any], bool], expected: str) -> Any:
    if not accepts(value):
        raise contract_error(f"invalid type: {_describe(value)}, expected {expected}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(value: Any) -> int:
    return _check(value, _is_int, "i64")


def _number(value: Any) -> float:
    return float(_check(value, lambda x: _is_int(x) or isinstance(x, float), "f64"))


def _boolean(value: Any) -> bool:
    return _check(value, lambda x: isinstance(x, bool), "a boolean")


def _string(value: Any) -> str:
    return _check(value, lambda x: isinstance(x, str), "a string")


def _integers(value: Any) -> tuple[int, ...]:
    items = _check(value, lambda x: isinstance(x, list), "a list")
    # Prompts are long, and nearly always right: look at each item only to name the wrong one.
    if set(map(type, items)) - {int}:
        items = [_integer(item) for item in items]
    return tuple(items)


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(_string(item) for item in _check(value, lambda x: isinstance(x, list), "a list"))


_SAMPLING_FIELDS: dict[str, Callable[[Any], Any]] = {
    "max_new_tokens": _integer,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "min_p": _number,
    "stop": _strings,
    "stop_token_ids": _integers,
    "ignore_eos": _boolean,
    "no_stop_trim": _boolean,
    "skip_special_tokens": _boolean,
}

# Fields that SGLang has and this server does not, with the values that ask for nothing.
_SAMPLING_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([], ""),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "custom_params": ({},),
    "beam_width": (1,),
}

# How text is joined and how often streams report is the server's choice: both change no token.
_SAMPLING_IGNORED = ("spaces_between_special_tokens", "stream_interval")

_SAMPLING_KNOWN = (
    *_SAMPLING_FIELDS,
    "n",
    "sampling_seed",
    *_SAMPLING_UNSUPPORTED,
    *_SAMPLING_IGNORED,
)

# Top-level fields that would change the answer if they were ignored like unknown ones.
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "token_ids_logprob",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
)


# Work that every token costs on top of the model's.
_MAX_STOPS = 1024
_MAX_TOP_LOGPROBS = 1024


def _sampling(values: Mapping[str, Any]) -> tuple[Sampling, int, int | None]:
    """Read `sampling_params`: the settings, the number of samples, and the seed if one is given."""
    for name, value in values.items():
        if name not in _SAMPLING_KNOWN:
            expected = ", ".join(f"`{known}`" for known in _SAMPLING_KNOWN)
            raise contract_error(f"unknown field `{name}`, expected one of {expected}")
        if value is None or name not in _SAMPLING_UNSUPPORTED:
            continue
        if value not in _SAMPLING_UNSUPPORTED[name]:
            raise semantic_error(f"{name} is not supported by this server, got {value!r}.")
    given = {name: value for name, value in values.items() if value is not None}
    sampling = Sampling(
        **{name: read(given[name]) for name, read in _SAMPLING_FIELDS.items() if name in given}
    )
    samples = _integer(given.get("n", 1))
    seed = _integer(given["sampling_seed"]) if "sampling_seed" in given else None
    if sampling.max_new_tokens < 0:
        raise semantic_error(f"max_new_tokens must be at least 0, got {sampling.max_new_tokens}.")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise semantic_error(
            f"temperature must be a non-negative finite number, got {values['temperature']}."
        )
    if not 0 < sampling.top_p <= 1:
        raise semantic_error(f"top_p must be in (0, 1], got {values['top_p']}.")
    if not 0 <= sampling.min_p <= 1:
        raise semantic_error(f"min_p must be in [0, 1], got {values['min_p']}.")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise semantic_error(f"top_k must be -1 (disable) or at least 1, got {sampling.top_k}.")
    if samples < 1:
        raise semantic_error(f"n must be at least 1, got {samples}.")
    if not all(sampling.stop):
        raise semantic_error("stop must not hold an empty string.")
    for name, stops in (("stop", sampling.stop), ("stop_token_ids", sampling.stop_token_ids)):
        if len(stops) > _MAX_STOPS:
            raise semantic_error(f"{name} holds {len(stops)} entries, at most {_MAX_STOPS}.")
    return sampling, samples, seed


# -------------------------------------------------------------------------------------- generate


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request must fit into, and how its text is encoded.

    `max_requests` counts the samples of all prompts of a call; `encode_plain` adds no special
    tokens.
    """

    vocab_size: int
    max_length: int
    max_requests: int
    encode: Callable[[str], list[int]]
    encode_plain: Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class Generate:
    """A parsed /generate body.

    Attributes:
        requests: for the engine; the samples of one prompt stand together.
        single: the answer is one object, not a list.
        stream: the answer is a stream of events.
        return_logprob: for each request.
        return_text: log-probabilities are given with the text of their tokens.
        return_prompt_token_ids: the prompt's ids are repeated in the answer.
    """

    requests: tuple[Request, ...]
    single: bool
    stream: bool
    return_logprob: tuple[bool, ...]
    return_text: bool
    return_prompt_token_ids: bool


def is_stream(body: Mapping[str, Any]) -> bool:
    """Say whether a /generate body asks for a stream; its errors are then sent as one."""
    return body.get("stream") is True


def parse_generate(
    body: Mapping[str, Any], limits: Limits, fresh_seed: Callable[[], int]
) -> Generate:
    """Read a /generate body.

    Requests that share one `sampling_params` with a seed, the n samples of a prompt or the prompts
    of a batch, get different seeds derived from it, the first one the seed itself: equal seeds
    would give a group of equal samples.

    Args:
        body: the JSON object.
        limits: of the server.
        fresh_seed: gives a seed to each request that brings none.

    Raises:
        ProtocolError: in one of the three shapes.
    """
    for name in _UNSUPPORTED:
        if body.get(name):
            raise semantic_error(f"{name} is not supported by this server.")
    prompts, is_batch = _prompts(body, limits)
    count = len(prompts)
    values = body.get("sampling_params")
    shared = not isinstance(values, list)
    if shared:
        parsed = [_sampling(_mapping(values))] * count
    else:
        parsed = [_sampling(_mapping(item)) for item in _listed(values, count, "sampling_params")]

    def each(name: str, default: Any, read: Callable[[Any], Any]) -> list[Any]:
        value = body.get(name)
        if value is None:
            return [default] * count
        if isinstance(value, list):
            return [read(item) for item in _listed(value, count, name)]
        return [read(value)] * count

    return_logprob = each("return_logprob", False, _boolean)
    logprob_start = each("logprob_start_len", -1, _integer)
    top_logprobs = each("top_logprobs_num", 0, _integer)
    extra_key = each("extra_key", "", _string)
    cache_salt = each("cache_salt", "", _string)
    stream = _boolean(body.get("stream") or False)
    samples = [n for _, n, _ in parsed]
    _check_count(sum(samples), limits)
    rids = _rids(body.get("rid"), is_batch, samples)

    requests = []
    for p, (prompt, (sampling, n, seed)) in enumerate(zip(prompts, parsed, strict=True)):
        _check_fit(prompt, sampling, limits)
        if logprob_start[p] > len(prompt):
            raise semantic_error(
                f"logprob_start_len={logprob_start[p]} is higher than the number of input tokens "
                f"{len(prompt)}. Please use a smaller logprob_start_len."
            )
        most = min(limits.vocab_size, _MAX_TOP_LOGPROBS)
        if not 0 <= top_logprobs[p] <= most:
            raise semantic_error(f"top_logprobs_num must be in [0, {most}], got {top_logprobs[p]}.")
        for s in range(n):
            index = len(requests) if shared else s
            requests.append(
                Request(
                    rid=rids[len(requests)],
                    prompt=prompt,
                    sampling=sampling,
                    seed=fresh_seed() if seed is None else derive_seed(seed, index),
                    logprob_start=logprob_start[p] if return_logprob[p] else -1,
                    top_logprobs=top_logprobs[p] if return_logprob[p] else 0,
                    stream=stream,
                    namespace=repr((extra_key[p], cache_salt[p])),
                )
            )
    return Generate(
        requests=tuple(requests),
        single=not is_batch and samples == [1],
        stream=stream,
        return_logprob=tuple(
            itertools.chain.from_iterable(
                [flag] * n for flag, n in zip(return_logprob, samples, strict=True)
            )
        ),
        return_text=_boolean(body.get("return_text_in_logprobs") or False),
        return_prompt_token_ids=_boolean(body.get("return_prompt_token_ids") or False),
    )


def _mapping(values: Any) -> Mapping[str, Any]:
    return {} if values is None else _check(values, lambda x: isinstance(x, dict), "a map")


def _listed(values: Sequence[Any], count: int, name: str) -> Sequence[Any]:
    if len(values) != count:
        raise semantic_error(
            f"{name} has {len(values)} entries, but the batch has {count} prompts."
        )
    return values


def _prompts(body: Mapping[str, Any], limits: Limits) -> tuple[list[np.ndarray], bool]:
    """Read the prompts as ids, and whether they came as a list; ids win over text."""
    text, input_ids = body.get("text"), body.get("input_ids")
    if input_ids is None and text is None:
        raise semantic_error("Either text or input_ids should be provided.")
    if input_ids is not None:
        _check(input_ids, lambda x: isinstance(x, list), "a list")
        is_batch = bool(input_ids) and isinstance(input_ids[0], list)
        lists = input_ids if is_batch else [input_ids]
        _check_count(len(lists), limits)
        name = "input_ids"
    else:
        is_batch = isinstance(text, list)
        texts = text if isinstance(text, list) else [text]
        _check_count(len(texts), limits)
        # A tokenizer may make a first token of nothing.
        lists = [limits.encode(item) if item else [] for item in map(_string, texts)]
        name = "text"
    if not lists or not all(lists):
        raise semantic_error(f"{name} cannot be empty.")
    prompts = []
    for ids in lists:
        tokens = _integers(ids)
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limits.vocab_size:
                raise semantic_error(
                    f"input_ids holds {token}, which is outside the vocabulary "
                    f"[0, {limits.vocab_size})."
                )
        prompts.append(np.array(tokens, np.int32))
    return prompts, is_batch


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.max_requests:
        raise semantic_error(
            f"{count} responses are asked for in one call, at most {limits.max_requests} are given."
        )


def _check_fit(prompt: np.ndarray, sampling: Sampling, limits: Limits) -> None:
    longest = limits.max_length
    if len(prompt) > longest:
        raise semantic_error(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({longest} tokens)."
        )
    total = len(prompt) + sampling.max_new_tokens
    if total > longest:
        raise semantic_error(
            f"Requested token count exceeds the model's maximum context length of {longest} "
            f"tokens. You requested a total of {total} tokens: {len(prompt)} tokens from the input "
            f"messages and {sampling.max_new_tokens} tokens for the completion. Please reduce the "
            "number of tokens in the input messages or the completion to fit within the limit."
        )


def _rids(rid: Any, is_batch: bool, samples: Sequence[int]) -> list[str]:
    """Name requests: given names, numbered ones for a batch, fresh ones for several samples."""
    total = sum(samples)
    if isinstance(rid, list):
        names = list(_strings(rid))
        if len(names) != len(samples):
            raise semantic_error(
                "The specified rids length mismatch with the batch_size for batch processing."
            )
        counts = collections.Counter(names)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise semantic_error(f"Duplicate request IDs detected within the request: {repeated}")
    elif rid is not None:
        name = _string(rid)
        names = [f"{name}_{index}" for index in range(len(samples))] if is_batch else [name]
    else:
        names = []
    return names if len(names) == total else [uuid.uuid4().hex for _ in range(total)]


# -------------------------------------------------------------------------------------- answers


def answer(
    output: Output,
    decode: Callable[[Sequence[int], bool], str],
    *,
    return_logprob: bool,
    return_text: bool,
    return_prompt_token_ids: bool,
    latency_s: float,
) -> dict[str, Any]:
    """Give the JSON object of one response, whole or so far.

    Args:
        output: from the engine.
        decode: ids, and whether to skip special tokens, to text.
        return_logprob: as in `Generate`.
        return_text: as in `Generate`.
        return_prompt_token_ids: as in `Generate`.
        latency_s: since the request came.
    """
    request = output.request
    token_ids = output.token_ids.tolist()
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _finish_reason(output),
        "weight_version": output.version,
    }
    if output.started:
        meta["prompt_tokens"] = len(request.prompt)
        meta["num_retractions"] = output.retractions
    if return_logprob:
        label = (lambda token: decode([token], False)) if return_text else None
        meta.update(_logprobs(output, label))
    meta["completion_tokens"] = len(token_ids)
    if output.started:
        cached = output.cached_tokens
        meta["reasoning_tokens"] = 0
        meta["cached_tokens"] = cached
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        meta["dp_rank"] = None
    if output.finish is not None:
        meta["weight_versions"] = [dataclasses.asdict(span) for span in output.spans]
        meta["e2e_latency"] = latency_s
    meta["response_sent_to_client_ts"] = time.time()
    result = {"text": _text(output, decode), "output_ids": token_ids, "meta_info": meta}
    if return_prompt_token_ids:
        result["prompt_token_ids"] = request.prompt.tolist()
    return result


def _finish_reason(output: Output) -> dict[str, Any] | None:
    finish = output.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if not output.started:
        return {"type": "abort", "message": finish.message}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": None,
        "err_type": None,
    }


def _text(output: Output, decode: Callable[[Sequence[int], bool], str]) -> str:
    """Decode the response, cut before what matched; a stream holds back what may still change."""
    sampling, finish = output.request.sampling, output.finish
    token_ids = output.token_ids.tolist()
    matched = None if finish is None or sampling.no_stop_trim else finish.matched
    if isinstance(matched, int):
        token_ids = token_ids[:-1]
    text = decode(token_ids, sampling.skip_special_tokens)
    if isinstance(matched, str) and matched in text:
        return text[: text.index(matched)]
    if finish is None:
        # The last token may end within a character, and may have begun a stop string.
        text = text.rstrip("\ufffd")
        held = max((_overlap(text, stop) for stop in sampling.stop), default=0)
        return text[: len(text) - held]
    return text


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that begin `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def _logprobs(output: Output, label: Callable[[int], str] | None) -> dict[str, Any]:
    """Give [log-probability, id, text or null] of output tokens, and of prompt tokens if asked."""

    def triples(logprobs: Sequence[float | None], ids: Sequence[int]) -> list[list[Any]]:
        if label is None:
            return [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        return [
            [logprob, token, label(token)] for logprob, token in zip(logprobs, ids, strict=True)
        ]

    def top(candidates: TopLogprobs) -> list[list[list[Any]]]:
        pairs = zip(candidates.logprob.tolist(), candidates.token_ids.tolist(), strict=True)
        return [triples(logprobs, ids) for logprobs, ids in pairs]

    request = output.request
    fields: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": triples(output.logprob.tolist(), output.token_ids.tolist()),
        "output_token_logprobs_length": len(output.token_ids),
    }
    start = request.logprob_start
    reported = request.prompt[start:].tolist() if output.prompt_logprob is not None else []
    if output.prompt_logprob is not None and reported:
        # Nothing is said of the first token: what predicts it is not part of the report.
        logprobs = [None, *output.prompt_logprob[start:].tolist()]
        fields["input_token_logprobs"] = triples(logprobs, reported)
    if request.top_logprobs:
        fields["input_top_logprobs"] = []
        if output.prompt_top is not None and reported:
            fields["input_top_logprobs"] = [None, *top(output.prompt_top)[start:]]
        assert output.top is not None
        fields["output_top_logprobs"] = top(output.top)
    return fields
