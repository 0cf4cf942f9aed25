r"""The math task: a model writes Python, reads what it prints, and answers in a box.

A turn of the formats "short" and "retool" ends with `</code>` or `</answer>`; code is run and what
it printed comes back inside `<interpreter>`. In the format "qwen" a turn is a chat message, which
may hold several calls in `<tool_call>`; they run in order. A turn that calls nothing and holds a
box or an answer ends the episode. Tag names are configuration, and stop strings, parser, reward and
demonstrations all read the same one.

The reward is 1 when the last box that the policy wrote is verified, and 0 otherwise; an episode
that was cut is wrong. Boxes inside code, inside results that the policy invented, and in tool text
are no answers.

Source: the protocol of ReTool (arXiv 2504.11536) and Qwen's chat template.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from copc_jax.rollout.episode import (
    Action,
    ApplyChatTemplate,
    EpisodeFailed,
    Score,
    disarm,
    encode_question,
    special_tokens,
)
from copc_jax.tasks.verify import Verifier, extract_boxed, math_reward
from copc_jax.tools.python import Sandbox, SandboxError
from copc_jax.types import Prompt

__all__ = [
    "FORMATS",
    "Call",
    "MathConfig",
    "MathTask",
    "extract_answer",
    "math_reward",
    "parse_turn",
    "render_answer",
    "render_code",
    "render_prompt",
    "render_results",
]

_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_MESSAGE_START, _MESSAGE_END = "<|im_start|>", "<|im_end|>"

_RULES = (
    "Solve the problem step by step. Leave every calculation that is not trivial to Python: {how}"
    " Each piece of code runs on its own and knows nothing of the ones before it, so print what you"
    " want to see. You may run code as often as you need. {end}"
)
_RETOOL_HOW = (
    "write\n<{code}>\n```python\n# your code\n```\n</{code}>\nand stop; what it prints comes back"
    " between <{interpreter}> and </{interpreter}>."
)
_RETOOL_END = "When you know the result, write\n<{answer}>\n\\boxed{{result}}\n</{answer}>\n"
_QWEN_HOW = (
    "call the function below, and what your code prints is sent back to you.\n\n<tools>\n{tool}\n"
    "</tools>\n\nA call is a JSON object with the name of the function and its arguments:\n"
    '<{code}>\n{{"name": "{name}", "arguments": {{"code": "print(1)"}}}}\n</{code}>\n\n'
)


@dataclasses.dataclass(frozen=True)
class MathConfig:
    """Format of the math task; `FORMATS` has the three that are known.

    The default format is short, because a small model on a laptop pays for every token.
    """

    format: Literal["short", "retool", "qwen"] = "short"
    """How code, results and answers are written."""
    code: str = "code"
    """Tag of a call: Python, or a JSON object in the format "qwen"."""
    interpreter: str = "interpreter"
    """Tag around what the code printed."""
    answer: str = "answer"
    """Tag of the final answer; not used in the format "qwen"."""
    tool: str = "code_interpreter"
    """Name of the function in the format "qwen"."""
    max_calls: int = 4
    """Calls of one turn that are run; the turns of an episode are limited by its budget."""

    def __post_init__(self) -> None:
        names = (self.code, self.interpreter, self.answer)
        for name in names:
            if not _TAG_NAME.fullmatch(name):
                raise ValueError(f"tag name {name!r}: letters, digits, - and _ only, letter first")
        if len(set(names)) != len(names):
            raise ValueError(f"tag names must differ: {names}")
        if self.max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, not {self.max_calls}")

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a turn."""
        if self.format == "qwen":
            return (_MESSAGE_END,)
        return (f"</{self.code}>", f"</{self.answer}>")

    @property
    def texts(self) -> tuple[str, ...]:
        """The strings that structure an episode, each of which is worth a token."""
        names = (self.code, self.interpreter)
        names += () if self.format == "qwen" else (self.answer,)
        marks = (_MESSAGE_START, _MESSAGE_END) if self.format == "qwen" else ()
        return tuple(text for name in names for text in (f"<{name}>", f"</{name}>")) + marks


FORMATS: dict[str, MathConfig] = {
    "short": MathConfig(),
    "retool": MathConfig(format="retool"),
    "qwen": MathConfig(format="qwen", code="tool_call", interpreter="tool_response"),
}
"""For the small default model, for ReTool's models, and for models with Qwen's chat template."""


# --------------------------------------------------------------------------------------------------
# What an episode looks like


def render_prompt(config: MathConfig, question: str) -> str:
    """Return the prompt text of a question; in the format "qwen", up to the assistant's message."""
    if config.format == "short":
        return f"{question}\n"
    names = {"code": config.code, "interpreter": config.interpreter, "answer": config.answer}
    if config.format == "retool":
        rules = _RULES.format(how=_RETOOL_HOW, end=_RETOOL_END).format(**names)
        return f"{rules}\nProblem: {question}\n"
    schema = {
        "type": "function",
        "function": {
            "name": config.tool,
            "description": "Run Python code and return what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code."}},
                "required": ["code"],
            },
        },
    }
    rules = _RULES.format(
        how=_QWEN_HOW.format(tool=json.dumps(schema), name=config.tool, **names),
        end=r"Give the result as \boxed{result}.",
    )
    return (
        f"{_MESSAGE_START}system\n{rules}{_MESSAGE_END}\n"
        f"{_MESSAGE_START}user\n{question}{_MESSAGE_END}\n{_MESSAGE_START}assistant\n"
    )


def render_code(config: MathConfig, code: str) -> str:
    """Return a turn that runs `code`, as demonstrations write it."""
    if config.format == "short":
        return f"<{config.code}>{code}</{config.code}>"
    if config.format == "retool":
        return f"<{config.code}>\n```python\n{code}\n```\n</{config.code}>"
    call = json.dumps({"name": config.tool, "arguments": {"code": code}}, ensure_ascii=False)
    return f"<{config.code}>\n{call}\n</{config.code}>{_MESSAGE_END}"


def render_answer(config: MathConfig, answer: str) -> str:
    """Return a turn that answers, as demonstrations write it."""
    box = rf"\boxed{{{answer}}}"
    if config.format == "short":
        return f"<{config.answer}>{box}</{config.answer}>"
    if config.format == "retool":
        return f"<{config.answer}>\n{box}\n</{config.answer}>"
    return f"{box}{_MESSAGE_END}"


def render_results(config: MathConfig, outputs: Sequence[str]) -> str:
    """Return the observation that shows outputs in call order; no text in them can act."""
    tag = config.interpreter
    outputs = [disarm(output, config.texts).strip() for output in outputs]
    if config.format == "short":
        return "".join(f"<{tag}>{output}</{tag}>" for output in outputs)
    if config.format == "retool":
        return "".join(f"\n<{tag}>\n{output}\n</{tag}>\n" for output in outputs) + "\n"
    results = "\n".join(f"<{tag}>\n{output}\n</{tag}>" for output in outputs)
    return f"\n{_MESSAGE_START}user\n{results}{_MESSAGE_END}\n{_MESSAGE_START}assistant\n"


# --------------------------------------------------------------------------------------------------
# What a turn does


class Call(NamedTuple):
    """One call of the tool: code to run or, when `error` says why not, nothing to run."""

    code: str
    error: str = ""


@functools.lru_cache
def _patterns(config: MathConfig) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of a complete action, and of everything that is no answer, closed or not."""
    code, answer, tool = map(re.escape, (config.code, config.answer, config.interpreter))
    actions = code if config.format == "qwen" else f"{code}|{answer}"
    return (
        re.compile(rf"<({actions})>(.*?)</\1>", re.DOTALL),
        re.compile(rf"<({code}|{tool})>.*?(?:</\1>|\Z)", re.DOTALL),
    )


def parse_turn(text: str, config: MathConfig = FORMATS["short"]) -> tuple[list[Call], bool]:
    """Return the calls of a complete turn in order, and whether it ends the episode.

    Calls after an answer do nothing. A turn that calls nothing ends the episode when it holds a
    complete answer or a box; in the format "qwen" always, as a message without calls does.
    """
    action, _ = _patterns(config)
    calls: list[Call] = []
    for match in action.finditer(text):
        if match[1] != config.code:
            break
        calls.append(
            _parse_json(match[2], config) if config.format == "qwen" else _parse_code(match[2])
        )
    if calls:
        return calls, False
    if config.format == "qwen" and f"<{config.code}>" in text:
        return [Call("", f"</{config.code}> is missing")], False
    ends = config.format == "qwen" or action.search(text) or extract_answer(text, config)
    return [], bool(ends)


# A fence begins a line, or the text; backquotes within a line of code are code.
_FENCED = re.compile(
    r"(?:^[ \t]*|\A\s*)```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def _parse_code(text: str) -> Call:
    """Read what stands in a code tag: the last fenced block, or without any the whole text."""
    fenced = _FENCED.findall(text.replace("\r\n", "\n"))
    code = textwrap.dedent(fenced[-1] if fenced else text).strip()
    return Call(code) if code else Call("", "the code is empty")


def _parse_json(text: str, config: MathConfig) -> Call:
    """Read a JSON call; whatever is wrong with it becomes text that the policy reads."""
    try:
        # Models write line breaks into strings as they are.
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return Call("", f"the call is not valid JSON: {error}")
    if not isinstance(call, dict):
        return Call("", "the call must be a JSON object")
    if call.get("name") != config.tool:
        return Call("", f"the only function is {config.tool}")
    # Llama's name for the same thing.
    arguments = call.get("arguments", call.get("parameters"))
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        return Call("", 'the arguments must be an object with a string "code"')
    return _parse_code(code)


def extract_answer(
    sampled: str | Sequence[str], config: MathConfig = FORMATS["short"]
) -> str | None:
    """Return the content of the last box that the policy wrote as its answer, or None.

    Code and results that the policy invented are left out.
    """
    turns = [sampled] if isinstance(sampled, str) else sampled
    _, no_answer = _patterns(config)
    return extract_boxed([no_answer.sub("", turn) for turn in turns])


# --------------------------------------------------------------------------------------------------
# The task


class MathTask:
    """Mathematics with a Python tool, as `run_episode` plays it."""

    score_name = "accuracy"

    def __init__(
        self,
        tokenizer: Any,
        sandbox: Sandbox,
        verifier: Verifier,
        config: MathConfig = FORMATS["short"],
        *,
        apply_chat_template: ApplyChatTemplate | None = None,
    ):
        """Bind the task to its tools.

        Args:
            tokenizer: `tokenizers.Tokenizer` of the policy.
            sandbox: runs the code.
            verifier: compares answers.
            config: format.
            apply_chat_template: wraps messages for a chat model; without it the prompt is plain
                text. The format "qwen" has its own.
        """
        if apply_chat_template is not None and config.format == "qwen":
            raise ValueError(
                'the format "qwen" writes chat messages itself: no apply_chat_template'
            )
        self.config = config
        self.stop = config.stop
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._verifier = verifier
        self._apply_chat_template = apply_chat_template
        # Neither questions nor printed text may turn into tokens that structure a chat.
        self._special = special_tokens(tokenizer)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; without any, its last message is the question."""
        return encode_question(
            prompt,
            self._tokenizer,
            functools.partial(render_prompt, self.config),
            special=self._special,
            apply_chat_template=self._apply_chat_template,
        )

    async def step(self, text: str, finish: str, matched: str | int | None) -> Action:
        """Act on one turn: run its calls one after the other, or end, or say what a valid turn is.

        A turn that was cut by the length limit runs nothing and ends the episode.

        Raises:
            EpisodeFailed: the sandbox is out of order, which is no fault of the code.
        """
        if finish != "stop":
            return Action("end")
        calls, ends = parse_turn(text, self.config)
        if ends:
            return Action("end", "", {"valid_actions": 1.0})
        if not calls:
            notice = f"Invalid. Use the {self.config.code} or {self.config.answer} tags."
            return Action(
                "observe", render_results(self.config, [notice]), {"invalid_actions": 1.0}
            )
        outputs: list[str] = []
        info = dict.fromkeys(("calls", "failed_calls", "code_errors", "limits"), 0.0)
        for i, (code, error) in enumerate(calls):
            if i >= self.config.max_calls:
                error = f"not run: at most {self.config.max_calls} calls a turn"
            if error:
                outputs.append(f"Error: {error}")
                info["failed_calls"] += 1
                continue
            try:
                execution = await self._sandbox.run(code)
            except SandboxError as error:
                raise EpisodeFailed(f"the sandbox failed: {error}") from error
            outputs.append(disarm(execution.text, self._special) or "Nothing was printed.")
            info["calls"] += 1
            info["code_errors"] += not execution.ok
            info["limits"] += execution.limit is not None
        valid = "invalid_actions" if info["failed_calls"] else "valid_actions"
        return Action("observe", render_results(self.config, outputs), {**info, valid: 1.0})

    async def reward(
        self, prompt: Prompt, sampled: Sequence[str], info: Mapping[str, float]
    ) -> Score:
        """Return 1 for a verified answer, else 0, and the figures of an episode.

        Args:
            prompt: the question with its gold answers, of which one is enough.
            sampled: text of each turn that the policy sampled.
            info: sums of the figures that `step` returned, and whether the episode was cut.
        """
        answer = None if info.get("truncated") else extract_answer(sampled, self.config)
        right = False
        if answer is not None:
            for gold in prompt.gold:
                right = right or await self._verifier.averify(answer, gold)
        counted = ("calls", "failed_calls", "code_errors", "limits", "valid_actions")
        figures = {name: float(info.get(name, 0.0)) for name in counted}
        return float(right), {
            "accuracy": float(right),
            "answered": float(answer is not None),
            **figures,
        }
