"""OpenAI's completions and chats as /generate bodies, and its answers as theirs.

Only what SGLang 0.5.23 answers on /v1/completions and /v1/chat/completions is followed, including
its additions: prompts as ids, `return_token_ids`, and the weight version under `metadata`. Fields
that ask for something that this server cannot do are refused; others that it does not know, such
as `user`, change nothing.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from copc_jax.rollout.protocol import Limits, ProtocolError, semantic_error

Kind = Literal["completion", "chat"]
ChatTemplate = Callable[[Sequence[Mapping[str, str]]], str]

# What OpenAI calls otherwise than SGLang's sampling_params.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "no_stop_trim", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "min_tokens", "regex", "ebnf", "json_schema"),
)
_PASSED = ("rid", "stream", "extra_key", "cache_salt")

# Fields that this server lacks, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "best_of": (1,),
    "min_tokens": (0,),
}

# OpenAI's own default for completions; a chat may fill the context.
_COMPLETION_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Call:
    """A request, read.

    Attributes:
        kind: of endpoint.
        body: the /generate body that it comes to.
        model: repeated in the answer.
        samples: answers to each prompt.
        echo: texts begin with the prompt.
        logprobs: the answer holds log-probabilities.
        token_ids: the answer holds the ids of prompt and response.
        include_usage: a stream ends with the numbers of tokens.
    """

    kind: Kind
    body: Mapping[str, Any]
    model: str
    samples: int
    echo: bool
    logprobs: bool
    token_ids: bool
    include_usage: bool
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


def read(kind: Kind, body: Mapping[str, Any], limits: Limits, chat: ChatTemplate | None) -> Call:
    """Read the body of a request.

    Args:
        kind: of endpoint.
        body: the JSON object.
        limits: of the server.
        chat: the model's template, None if it has none.

    Raises:
        ProtocolError: of the semantic shape.
    """
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise semantic_error(f"{name} is not supported by this server, got {body[name]!r}.")
    given = {name: value for name, value in body.items() if value is not None}
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    sampling.pop("min_tokens", None)
    sampling |= {new: given[old] for old, new in _RENAMED.items() if old in given}
    stream = given.get("stream", False)
    echo = kind == "completion" and bool(given.get("echo", False))
    if echo and stream:
        raise semantic_error("echo is not supported by this server in a stream.")
    prompt, room = _prompt(kind, given, limits, chat)
    sampling.setdefault("max_new_tokens", room)
    logprobs = "logprobs" in given and given["logprobs"] is not False
    top = given.get("top_logprobs", 0) if kind == "chat" else given.get("logprobs", 0)
    generate = {
        **{name: given[name] for name in _PASSED if name in given},
        **prompt,
        "sampling_params": sampling,
        "return_logprob": logprobs,
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
        "logprob_start_len": 0 if echo and logprobs else -1,
        "top_logprobs_num": top if logprobs else 0,
    }
    options = given.get("stream_options", {})
    return Call(
        kind=kind,
        body=generate,
        model=str(given.get("model", "default")),
        samples=sampling.get("n", 1),
        echo=echo,
        logprobs=logprobs,
        token_ids=bool(given.get("return_token_ids", False)),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage", False)),
    )


def _prompt(
    kind: Kind, given: Mapping[str, Any], limits: Limits, chat: ChatTemplate | None
) -> tuple[dict[str, Any], int]:
    """Give the prompt as /generate takes it, and the tokens of an answer by default."""
    if kind == "completion":
        prompt = given.get("prompt")
        if not isinstance(prompt, str | list):
            raise semantic_error("prompt must be a text, ids, or a list of either.")
        first = prompt[0] if isinstance(prompt, list) and prompt else prompt
        name = "text" if isinstance(first, str) else "input_ids"
        return {name: prompt}, _COMPLETION_TOKENS
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise semantic_error("messages must be a list of at least one message.")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise semantic_error(f"a message must have a role and a text, got {message!r}.")
    if chat is None:
        raise semantic_error("this model has no chat template: use /v1/completions.")
    try:
        text = chat(messages)
    except ValueError as error:
        raise semantic_error(str(error)) from None
    # The template writes the special tokens itself.
    ids = limits.encode_plain(text)
    return {"input_ids": ids}, max(limits.max_length - len(ids), 1)


def refusal(error: ProtocolError) -> ProtocolError:
    """Give an error of /generate the shape that OpenAI's clients read."""
    detail = error.payload["error"]
    message = detail if isinstance(detail, str) else detail["message"]
    return ProtocolError(
        {
            "object": "error",
            "message": message,
            "type": "BadRequestError" if error.status == 400 else "RateLimitError",
            "param": None,
            "code": error.status,
        },
        error.status,
    )


def answer(
    call: Call, answers: Sequence[Mapping[str, Any]], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Give the JSON object of a whole answer.

    Args:
        call: the request.
        answers: of /generate, the samples of a prompt together.
        decode: ids to text, for `echo`.
    """
    choices = []
    for index, one in enumerate(answers):
        choice: dict[str, Any] = {"index": index}
        if call.kind == "chat":
            choice["message"] = {"role": "assistant", "content": one["text"]}
        else:
            before = decode(one["prompt_token_ids"]) if call.echo else ""
            choice["text"] = before + one["text"]
        choice["logprobs"] = _logprobs(call, one["meta_info"], 0) if call.logprobs else None
        choice |= _finish(one["meta_info"])
        if call.token_ids:
            name = "response_token_ids" if call.kind == "chat" else "token_ids"
            choice |= {name: one["output_ids"], "prompt_token_ids": one["prompt_token_ids"]}
        choices.append(choice)
    meta = answers[0]["meta_info"]
    return {
        **_head(call, "chat.completion" if call.kind == "chat" else "text_completion"),
        "choices": choices,
        "usage": _usage(call, answers),
        "metadata": {name: meta[name] for name in ("weight_version", "weight_versions")},
    }


class Chunks:
    """The chunks of a stream: what is new in each of the answers of /generate, which grow."""

    def __init__(self, call: Call):
        self._call = call
        self._head = _head(
            call, "chat.completion.chunk" if call.kind == "chat" else "text_completion"
        )
        self._last: dict[int, Mapping[str, Any]] = {}

    def add(self, index: int, one: Mapping[str, Any]) -> dict[str, Any]:
        """Give the chunk that follows from answer `index` as it is now."""
        call, last = self._call, self._last.get(index)
        text = one["text"] if last is None else one["text"][len(last["text"]) :]
        reported = 0 if last is None else len(last["output_ids"])
        self._last[index] = one
        logprobs = _logprobs(call, one["meta_info"], reported) if call.logprobs else None
        finish = _finish(one["meta_info"])
        if call.kind == "completion":
            return self._chunk({"index": index, "text": text, "logprobs": logprobs, **finish})
        delta = {"content": text} if last is not None else {"role": "assistant", "content": text}
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, **finish})

    def usage(self) -> dict[str, Any]:
        """Give the chunk with the numbers of tokens, which follows the last answer."""
        answers = [self._last[index] for index in sorted(self._last)]
        return {**self._head, "choices": [], "usage": _usage(self._call, answers)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def _finish(meta: Mapping[str, Any]) -> dict[str, Any]:
    reason = meta["finish_reason"]
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def _usage(call: Call, answers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    prompt = sum(len(one["prompt_token_ids"]) for one in answers[:: call.samples])
    completion = sum(len(one["output_ids"]) for one in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(call: Call, meta: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Give the log-probabilities of output tokens from `start` on, after those of the prompt."""
    triples = [*meta["input_token_logprobs"], *meta["output_token_logprobs"][start:]]
    top = [
        *meta.get("input_top_logprobs", []),
        *meta.get("output_top_logprobs", [])[start:],
    ] or [None] * len(triples)
    if call.kind == "chat":
        return {
            "content": [
                {
                    **_token(one),
                    "top_logprobs": [_token(other) for other in others or ()],
                }
                for one, others in zip(triples, top, strict=True)
            ]
        }
    return {
        "tokens": [text for _, _, text in triples],
        "token_logprobs": [logprob for logprob, _, _ in triples],
        "text_offset": [-1] * len(triples),
        "top_logprobs": [
            None if others is None else {text: logprob for logprob, _, text in others}
            for others in top
        ],
    }


def _token(triple: Sequence[Any]) -> dict[str, Any]:
    logprob, _, text = triple
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}
