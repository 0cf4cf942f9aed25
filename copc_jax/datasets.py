r"""Reads question files, as their publishers keep them, into prompts.

What a file holds is told from its content, never from its name: Parquet, a JSON list, JSON lines
or CSV; and in each row the question and the gold answers from the fields that are there.

The question is `question` or `problem`; otherwise it comes from `prompt`, a text or a list of chat
messages. The gold answers are the first there is of `golden_answers` (FlashRAG, Search-R1),
`reward_model.ground_truth` (verl: a text, a list, or `{"target": ...}`), `answer`, `answers` and
`ground_truth`; `answer_aliases` (MuSiQue) adds to them. Field names ignore case.

A list of gold answers holds alternatives, of which any one is right. The solution of GSM8K ends in
"#### n", and n is the gold answer. Chain-of-Agents joins several answers, all of which are
required, by "|": they stay one text, "A|B", which the search task's exact match takes apart.

Files of other projects wrap each question into their own instructions, which would contradict the
task's. Lines that all prompts of a set begin or end with, and a system message that they share, are
taken off, and said so.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from copc_jax.types import Prompt

logger = logging.getLogger(__name__)

Message = dict[str, str]
Instructions = Literal["strip", "keep"]

_QUESTION = ("question", "problem")
_GOLD = ("golden_answers", "reward_model", "answer", "answers", "ground_truth")
_ID = ("id", "_id", "unique_id", "qid")
# Other columns can be large, such as the paragraphs of HotpotQA, and are not read.
_FIELDS = {*_QUESTION, *_GOLD, *_ID, "prompt", "answer_aliases", "data_source", "extra_info"}
_SPLIT = re.compile(r"[_-](test|dev|train|val|valid|validation|full)$", re.IGNORECASE)

_PLAIN = 'a text such as "Paris", a number, or a list of them such as ["NYC", "New York"]'


class DataError(ValueError):
    """A file or a row that cannot be used; names it and says what would be right."""


@dataclasses.dataclass(frozen=True)
class _Question:
    """One row as read: `question` is text, or the chat messages of another system's prompt."""

    where: str
    prompt_id: str
    source: str
    question: str | tuple[Message, ...]
    gold: tuple[str, ...]


def read_questions(
    files: Sequence[str | Path],
    *,
    instructions: Instructions = "strip",
    check_gold: Callable[[str, str], object] | None = None,
    note: Callable[[str], object] = logger.info,
) -> list[Prompt]:
    """Read files, one after another, in the order of their rows.

    The source of a prompt is the name given to its file, else the row's `data_source`, else the
    name of the file without its split, or that of its folder where the file is named after a split
    alone. Its id is the source with the row's own id, or else the file's name with the number of
    the row, so that it is the same whenever the file is read.

    Args:
        files: paths, or texts such as "nq=data/dev.jsonl", which name the set.
        instructions: "strip" takes off instructions that all questions of a set share.
        check_gold: called with each gold answer and its place; raises ValueError to refuse it.
        note: called with what a reader should know about the files.

    Raises:
        DataError: an unusable file or row.
        FileNotFoundError: naming the file.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for file in files:
        name, path = _name_and_path(file)
        rows = [_question(row, where, name, path) for row, where in _rows(path)]
        if not rows:
            raise DataError(f"{path}: the file holds no questions")
        if instructions == "strip":
            rows = _without_instructions(rows, path, note)
        # Some publishers write a set several times over, for so many samples of each question.
        repeats = len(rows) - len({str(row.question) for row in rows})
        if repeats:
            note(f"{path}: {repeats} of {len(rows)} questions repeat another one of the file")
        for row in rows:
            if row.prompt_id in places:
                raise DataError(
                    f"{row.where}: the id {row.prompt_id!r} is that of {places[row.prompt_id]} "
                    "too; ids must differ within a set, and files of one name need different "
                    "names: --data name=path"
                )
            places[row.prompt_id] = row.where
            if check_gold is not None:
                for gold in row.gold:
                    check_gold(gold, row.where)
            prompts.append(_prompt(row))
    return prompts


def mix(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> list[Prompt]:
    """Repeat prompts so that each source has its share of the list, and none of them is left out.

    Args:
        prompts: of several sources.
        weights: for each source, its weight in proportion to the others'.

    Raises:
        ValueError: the weights do not name exactly the sources, or one is not positive.
    """
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    if set(weights) != set(by_source):
        raise ValueError(
            f"weights must name each source once, {', '.join(by_source)}; got {', '.join(weights)}"
        )
    for source, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {source} must be more than 0, got {weight}")
    unit = max(len(group) / weights[source] for source, group in by_source.items())
    return [
        prompt
        for source, group in by_source.items()
        for prompt in itertools.islice(itertools.cycle(group), round(unit * weights[source]))
    ]


# --------------------------------------------------------------------------------------------------
# Files


def _name_and_path(file: str | Path) -> tuple[str | None, Path]:
    """Split "name=path"; a path that exists is never split."""
    name, equals, rest = str(file).partition("=")
    if equals and not Path(file).exists():
        if not name or not rest:
            raise DataError(f"{str(file)!r}: give a path, or a name and a path as name=path")
        return name, Path(rest)
    return None, Path(file)


def read_rows(path: Path, fields: set[str] | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a file with their places, such as "dev.jsonl:17".

    Args:
        path: Parquet, a JSON list of objects, JSON lines, or CSV with a header.
        fields: columns of a Parquet file that are needed, in lower case; None reads all.

    Raises:
        DataError: the file cannot be read as any of them.
        FileNotFoundError: naming the file.
    """
    if path.is_dir():
        raise DataError(f"{path}: this is a folder; name its files")
    with path.open("rb") as file:
        head = file.read(4)
    if head == b"PAR1":
        yield from _parquet_rows(path, fields)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8, and the file is no Parquet file either; "
            "save it as UTF-8"
        ) from None
    start = text.lstrip()[:1]
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start == "[":
        yield from _json_rows(path, text)
    elif start == "{":
        yield from _json_lines(path, text)
    else:
        yield from _csv_rows(path, text)


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    return read_rows(path, _FIELDS)


def _parquet_rows(path: Path, fields: set[str] | None) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if fields is None or name.lower() in fields]
            number = 0
            for batch in file.iter_batches(batch_size=4096, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}:{number}"
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: broken Parquet file: {str(error).splitlines()[0]}") from None


def _json_rows(path: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: the file begins as a JSON list but is none: {error}") from None
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{path}:{number}"), f"{path}:{number}"


def _json_lines(path: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    # Only line feeds end a row: str.splitlines would also cut at signs that JSON texts may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: this line is no JSON object ({error}); a file of JSON lines holds one "
                "complete object a line"
            ) from None
        yield _object(row, where), where


def _csv_rows(path: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{where}: the row must have the {len(reader.fieldnames or ())} columns of the "
                    "header; quote texts that hold commas or quotation marks"
                )
            yield row, where
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: broken CSV: {error}") from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, got {_short(row)}")
    return row


# --------------------------------------------------------------------------------------------------
# Rows


def _question(row: Mapping[str, Any], where: str, name: str | None, path: Path) -> _Question:
    fields = {str(key).strip().lower(): value for key, value in row.items()}
    stem = path.stem
    if _SPLIT.fullmatch("_" + stem):
        stem = f"{path.absolute().parent.name}_{stem}"
    inside = _source(fields.get("data_source"))
    source = name or inside or _SPLIT.sub("", stem)
    own = next((fields[key] for key in _ID if fields.get(key) not in (None, "")), None)
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
        raise DataError(f"{where}: an id must be a text or a whole number, got {_short(own)}")
    number = where.rpartition(":")[2]
    return _Question(
        where=where,
        # The sets of a mixture may use the same ids, also when the file has a name of its own.
        prompt_id="/".join(
            [name or stem, number]
            if own is None
            else [source, *([inside] if name and inside else []), str(own)]
        ),
        source=source,
        question=_asked(fields, where),
        gold=_gold(fields, where),
    )


def _source(value: Any) -> str:
    """The name of a set without the owner ("openai/gsm8k") or the project ("searchR1_nq")."""
    if not isinstance(value, str):
        return ""
    return re.sub(r"^searchR1_", "", value.strip().rpartition("/")[2])


def _asked(fields: Mapping[str, Any], where: str) -> str | tuple[Message, ...]:
    for key in _QUESTION:
        if key in fields:
            return _text(fields[key], where, key)
    extra = fields.get("extra_info")
    if isinstance(extra, dict):
        for key in _QUESTION:
            if isinstance(extra.get(key), str) and extra[key].strip():
                return extra[key].strip()
    if "prompt" not in fields:
        raise DataError(
            f"{where}: no question: give it as `question`, `problem` or `prompt`; the row has "
            f"{', '.join(fields) or 'no fields'}"
        )
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return ({"role": "user", "content": _text(prompt, where, "prompt")},)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f'{where}: prompt must be a text or a list of messages such as {{"role": "user", '
            f'"content": "..."}}, got {_short(prompt)}'
        )
    return chat_messages(prompt, where, roles=("system", "user", "assistant"), last="user")


def chat_messages(
    messages: Sequence[Any], where: str, *, roles: Sequence[str], last: str | None = None
) -> tuple[Message, ...]:
    """Check chat messages and return them with role and content alone.

    Raises:
        DataError: no list of objects with a known role and a text, or another role at the end.
    """
    result = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(content, str) or role not in roles:
            raise DataError(
                f"{where}: a message must have a text as its content and one of "
                f"{', '.join(roles)} as its role, got {_short(message)}"
            )
        result.append({"role": role, "content": content})
    if last is not None and result[-1]["role"] != last:
        raise DataError(
            f"{where}: the last message must be of the {last}, got {_short(result[-1])}"
        )
    if last is not None:
        _text(result[-1]["content"], where, "the last message")
    return tuple(result)


def _gold(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    key = next((key for key in _GOLD if fields.get(key) is not None), None)
    if key is None:
        raise DataError(
            f"{where}: no gold answer: give it as {', '.join(f'`{k}`' for k in _GOLD)}; the row "
            f"has {', '.join(name for name, value in fields.items() if value is not None)}"
        )
    value = fields[key]
    if key == "reward_model":
        key, value = "reward_model.ground_truth", _ground_truth(value, where)
    if isinstance(value, dict) and set(value) == {"target"}:
        key, value = f"{key}.target", value["target"]
    if isinstance(value, list):
        if not value:
            raise DataError(f"{where}: {key} is an empty list; it must hold {_PLAIN}")
        golds = [_answer(item, where, key) for item in value]
    else:
        golds = [_final(_answer(value, where, key), where)]
    aliases = fields.get("answer_aliases")
    if isinstance(aliases, list):
        golds += [_answer(item, where, "answer_aliases") for item in aliases]
    return tuple(dict.fromkeys(golds))


def _ground_truth(value: Any, where: str) -> Any:
    if not isinstance(value, dict) or value.get("ground_truth") is None:
        raise DataError(
            f'{where}: reward_model must be an object such as {{"ground_truth": "42"}}, '
            f"got {_short(value)}"
        )
    return value["ground_truth"]


def _final(answer: str, where: str) -> str:
    """The answer at the end of a solution in GSM8K's form; any other text as it is."""
    _, mark, end = answer.rpartition("####")
    if mark and not end.strip():
        raise DataError(f'{where}: the solution ends in "####" without an answer after it')
    return end.strip()


def _answer(value: Any, where: str, key: str) -> str:
    if isinstance(value, str):
        return _text(value, where, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: {key} must be {_PLAIN}, got {_short(value)}")
    if not math.isfinite(value):
        raise DataError(f"{where}: {key} is {value}, which is no answer; it must be {_PLAIN}")
    # A column of whole numbers becomes one of floats as soon as pandas meets a gap in it.
    return str(int(value)) if value == int(value) else repr(value)


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be a text, got {_short(value)}")
    if not value.strip():
        raise DataError(f"{where}: {key} is empty")
    return value.strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _prompt(row: _Question) -> Prompt:
    messages = row.question
    if isinstance(messages, str):
        messages = ({"role": "user", "content": messages},)
    return Prompt(
        prompt_id=row.prompt_id, messages=tuple(messages), gold=row.gold, source=row.source
    )


# --------------------------------------------------------------------------------------------------
# Instructions


def _without_instructions(
    rows: list[_Question], path: Path, note: Callable[[str], object]
) -> list[_Question]:
    """Take off what the prompts of each source share; questions of their own field stay."""
    result = list(rows)
    for source in dict.fromkeys(row.source for row in rows):
        chosen = {
            i: row.question
            for i, row in enumerate(rows)
            if row.source == source and not isinstance(row.question, str)
        }
        last = [messages[-1]["content"] for messages in chosen.values()]
        head, tail = _shared_lines(last)
        systems = {_system(messages) for messages in chosen.values()}
        system = len(chosen) > 1 and len(systems) == 1 and systems != {()}
        for i, messages in chosen.items():
            content = messages[-1]["content"]
            content = content[len(head) : len(content) - len(tail)].strip()
            before = [m for m in messages[:-1] if not (system and m["role"] == "system")]
            result[i] = dataclasses.replace(
                result[i], question=(*before, {"role": "user", "content": content})
            )
        if head.strip() or tail.strip() or system:
            first = (head.strip() or tail.strip() or systems.pop()[0]).splitlines()[0]
            note(
                f"{path}: all {len(chosen)} prompts of {source} share instructions, which are "
                f"taken off; they begin with {_short(first)} (data.instructions=keep leaves them)"
            )
    return result


def _system(messages: tuple[Message, ...]) -> tuple[str, ...]:
    return tuple(m["content"] for m in messages if m["role"] == "system")


def _shared_lines(texts: Sequence[str]) -> tuple[str, str]:
    """Whole lines that all texts begin and end with, as long as something is left of each."""
    if len(set(texts)) < 2:
        return "", ""
    head = _shared_start(texts)
    head = head[: head.rfind("\n") + 1]
    tail = _shared_start([text[len(head) :][::-1] for text in texts])[::-1]
    cut = tail.find("\n")
    tail = "" if cut < 0 else tail[cut:]
    if any(not text[len(head) : len(text) - len(tail)].strip() for text in texts):
        return "", ""
    return head, tail


def _shared_start(texts: Sequence[str]) -> str:
    # What the first and the last in order share, all between them share too.
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), len(first))]


# --------------------------------------------------------------------------------------------------
# Chats to fine-tune on


class UnusableChatError(ValueError):
    """A chat that cannot be trained on; the message is the reason, the same for all of its kind."""


_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
_SHAREGPT |= {"observation": "tool", "function_response": "tool"}
_ROLES = ("system", "user", "assistant", "tool")
# How public corpora tag what tools returned.
_OBSERVATION_TAGS = ("information", "observation", "interpreter", "tool_response")


def chat_segments(
    row: Mapping[str, Any],
    *,
    observation_tag: str,
    render_tool: Callable[[str], str],
    tags: Sequence[str] = (),
    apply_chat_template: Callable[[Sequence[Message]], str] | None = None,
    end: str = "",
) -> list[tuple[str, bool]]:
    """Cut a chat into pieces of text, each with whether the model wrote it.

    Only text of the assistant is the model's, and of it not what stands inside the observation tag,
    nor the tag itself, nor the white space around: that comes from the tool, as in an episode.

    Args:
        row: `messages` with `role` and `content` (ReTool-SFT, Chain-of-Agents), or `conversations`
            with `from` and `value` (ShareGPT). Roles are system, user, assistant and tool.
        observation_tag: name of the tag around tool text, such as "interpreter".
        render_tool: makes a tool's message without this tag what an episode would show.
        tags: names of tags that must be opened and closed in turn, besides.
        apply_chat_template: writes the messages up to the assistant's, as episodes of a chat model
            begin; without it each is a line of its own. What tools return continues the message.
        end: what the assistant writes at the end of each of its messages.

    Raises:
        UnusableChatError: no messages, an unknown role, no text, no assistant or nothing before it,
            tags that do not match, the observation tag of another format, or a chat template that
            refuses the messages or writes earlier ones anew.
    """
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise UnusableChatError("no list of messages")
    pieces: list[tuple[str, bool]] = []
    asked: list[Message] = []  # What the chat template is given, and where its text ended.
    for role, text in map(_role_and_text, messages):
        if role == "assistant":
            if not pieces and not asked:
                raise UnusableChatError("nothing stands before the assistant's first message")
            if asked and asked[-1]["role"] != role:
                assert apply_chat_template is not None
                pieces.append((_template_piece(apply_chat_template, asked, pieces), False))
                asked.append({"role": role, "content": ""})
            added = [*_assistant_pieces(text, observation_tag, tags), *([(end, True)] * bool(end))]
        elif role == "tool":
            marked = f"<{observation_tag}>" in text
            added = [(text if marked else render_tool(text), False)]
        elif apply_chat_template is not None:
            if asked and asked[-1]["role"] == "assistant":  # The template writes this end itself.
                asked[-1]["content"] = asked[-1]["content"].removesuffix(end)
            asked.append({"role": role, "content": text})
            continue
        else:
            # A question that follows an answer starts a line of its own.
            added = [(f"\n{text}\n" if pieces and pieces[-1][1] else f"{text}\n", False)]
        pieces += added
        if asked:
            asked[-1]["content"] += "".join(piece for piece, _ in added)
    if not any(written for _, written in pieces):
        raise UnusableChatError("no message of the assistant")
    return [
        ("".join(text for text, _ in group), written)
        for written, group in itertools.groupby(pieces, key=lambda piece: piece[1])
    ]


def _template_piece(
    apply_chat_template: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    pieces: Sequence[tuple[str, bool]],
) -> str:
    """Return what the template adds to the pieces that are there."""
    try:
        whole = apply_chat_template(messages)
    except ValueError as error:
        raise UnusableChatError(f"the chat template refuses the messages: {error}") from None
    so_far = "".join(text for text, _ in pieces)
    if not whole.startswith(so_far):
        raise UnusableChatError("the chat template writes earlier messages in another way")
    return whole[len(so_far) :]


def _role_and_text(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise UnusableChatError("a message that is no object")
    role = message.get("role", message.get("from"))
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise UnusableChatError(f"a role other than {', '.join(_ROLES)}")
    text = message.get("content", message.get("value"))
    if not isinstance(text, str) or not text.strip():
        raise UnusableChatError("a message without text")
    return role, text


def _assistant_pieces(
    text: str, observation_tag: str, tags: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    foreign = [tag for tag in _OBSERVATION_TAGS if tag != observation_tag and f"</{tag}>" in text]
    if foreign:
        raise UnusableChatError(
            f"tool text inside <{foreign[0]}>, where this format has <{observation_tag}>"
        )
    for tag in dict.fromkeys([observation_tag, *tags]):
        marks = re.findall(rf"<(/?){re.escape(tag)}>", text)
        if marks != ["", "/"] * (len(marks) // 2):
            raise UnusableChatError(f"<{tag}> tags that are not opened and closed in turn")
    name = re.escape(observation_tag)
    end = 0
    for match in re.finditer(rf"\s*<{name}>.*?</{name}>\s*", text, re.DOTALL):
        if match.start() > end:
            yield text[end : match.start()], True
        yield match[0], False
        end = match.end()
    if end < len(text):
        yield text[end:], True
