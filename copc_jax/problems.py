"""Math problems: generated without end, mixed by weights, and shown being solved.

Problems come from reasoning-gym's generators, whose numbers are drawn by seed. The default mixture
needs the tool: products, sums, multiples and expressions of three-digit numbers are beyond a small
model's head, and their wording is regular, so that a small model learns soon to copy the numbers
into code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from copc_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with one right answer.

    Attributes:
        problem_id: unique among the problems of a run.
        question: text as it is asked.
        gold: the right answer, as `math_reward` reads it.
        source: where it comes from, for metrics per source.
        code: Python that prints the answer, or "" where none is known; demonstrations need it.
    """

    problem_id: str
    question: str
    gold: str
    source: str
    code: str = ""

    def to_prompt(self) -> Prompt:
        """Return the record that rollouts take."""
        message = {"role": "user", "content": self.question}
        return Prompt(self.problem_id, messages=(message,), gold=(self.gold,), source=self.source)


# --------------------------------------------------------------------------------------------------
# Generated problems


def _print_expression(metadata: Mapping[str, Any]) -> str:
    # The expression stands in the code as in the question: copying it is all there is to learn.
    return f"print({metadata['expression']})"


def _print_call(function: str) -> Callable[[Mapping[str, Any]], str]:
    def code(metadata: Mapping[str, Any]) -> str:
        numbers = ", ".join(map(str, metadata["numbers"]))
        return f"import math;print(math.{function}({numbers}))"

    return code


def _unknown(metadata: Mapping[str, Any]) -> str:
    return ""


GENERATORS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "basic_arithmetic": _print_expression,
    "chain_sum": _print_expression,
    "products": _print_expression,
    "gcd": _print_call("gcd"),
    "lcm": _print_call("lcm"),
    "decimal_chain_sum": _unknown,
    "gsm_symbolic": _unknown,
    "leg_counting": _unknown,
    "simple_equations": _unknown,
}
"""Generators of reasoning-gym whose answers are plain numbers, and the code that solves an item.

The others need a judge of their own: prime factorizations, puzzles, and fractions to simplify,
which any equal fraction would answer.
"""

_EXACT_OPERATORS = ["+", "-", "*"]


@dataclasses.dataclass(frozen=True)
class ProblemSource:
    """One generator of a mixture."""

    name: str
    """A key of `GENERATORS`."""
    weight: float = 1.0
    """Share of the problems, relative to the other sources."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the generator's own configuration, such as {"max_digits": 3}: the difficulty."""

    def __post_init__(self) -> None:
        if self.name not in GENERATORS:
            raise ValueError(
                f"unknown problem source {self.name!r}; there are {', '.join(GENERATORS)}"
            )
        if self.name == "basic_arithmetic":
            # Its divisions drop remainders, and without parentheses it ignores precedence.
            if "/" in self.options.get("operators", ()):
                raise ValueError(f"operators of {self.name} are {_EXACT_OPERATORS}, without '/'")
            if not self.options.get("allow_parentheses", True):
                raise ValueError(f"{self.name} has wrong answers unless allow_parentheses is True")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"the weight of {self.name} must be more than 0, not {self.weight}")


_THREE_DIGITS = {"min_digits": 3, "max_digits": 3}

DEFAULT_SOURCES = (
    ProblemSource("products", 1.0, _THREE_DIGITS),
    ProblemSource("chain_sum", 1.0, {"min_terms": 3, "max_terms": 3, **_THREE_DIGITS}),
    ProblemSource("lcm", 1.0, {"min_value": 100, "max_value": 999}),
    ProblemSource("basic_arithmetic", 1.0, {"min_terms": 2, "max_terms": 3, **_THREE_DIGITS}),
)
"""Numbers of three digits are single tokens to the small model's tokenizer."""


@dataclasses.dataclass(frozen=True)
class MathProblemsConfig:
    """The generated problems of a run."""

    sources: tuple[ProblemSource, ...] = DEFAULT_SOURCES
    """Generators, their difficulty and their shares."""
    train: int = 20_000
    """Training problems."""
    held_out: int = 1_000
    """Held-out problems; none is asked in training."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(f"sources is empty; there are {', '.join(GENERATORS)}")
        for name in ("train", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def build_problems(config: MathProblemsConfig, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Generate training and held-out problems; the same arguments give the same result.

    No question is asked twice, within a split or across.

    Args:
        config: sources, weights and sizes.
        seed: seed of all draws.

    Returns:
        Training problems and held-out problems, both mixed by the weights and shuffled.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: an option that a generator does not have or refuses, or more problems than it
            has; says what would be right.
    """
    try:
        # It takes seconds, which nobody pays who reads problems from files; and a dependency of it
        # warns when it is compiled.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "reasoning-gym is not installed: install copc-jax[math], or give a file of problems"
        ) from error
    weights = [source.weight for source in config.sources]
    shares = zip(
        config.sources,
        _apportion(config.train, weights),
        _apportion(config.held_out, weights),
        strict=True,
    )
    train: list[Problem] = []
    held_out: list[Problem] = []
    asked: set[str] = set()
    for index, (source, train_share, held_out_share) in enumerate(shares):
        known = {field.name for field in dataclasses.fields(DATASETS[source.name][1])}
        known -= {"seed", "size"}
        unknown = sorted(set(source.options) - known)
        if unknown:
            raise ValueError(
                f"{source.name} has no option {', '.join(unknown)}; there are "
                + ", ".join(sorted(known))
            )
        options = dict(source.options)
        if source.name == "basic_arithmetic":
            options.setdefault("operators", _EXACT_OPERATORS)
        digest = hashlib.sha256(f"{seed}/{index}/{source.name}".encode()).digest()
        # Item i of a generator with seed s is drawn with seed s + i: seeds lie far apart.
        start = int.from_bytes(digest[:6], "big")
        try:
            items = create_dataset(source.name, seed=start, **options)
            items[0]
        except Exception as error:
            raise ValueError(
                f"{source.name} refuses the options {dict(source.options)}: {error}"
            ) from error
        problems = _draw(source.name, items, train_share + held_out_share, asked)
        held_out += problems[:held_out_share]
        train += problems[held_out_share:]
    rng = random.Random(seed)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def _draw(name: str, items: Any, count: int, asked: set[str]) -> list[Problem]:
    """Return so many problems whose questions nobody asked before, and note the questions."""
    problems: list[Problem] = []
    for index in range(20 * count):
        if len(problems) == count:
            return problems
        item = items[index]
        question = " ".join(item["question"].split())
        if question in asked:
            continue
        asked.add(question)
        code = GENERATORS[name](item["metadata"])
        problems.append(Problem(_name(name, question), question, item["answer"], name, code))
    if len(problems) < count:
        raise ValueError(
            f"{name} has only about {len(problems)} different questions with these options, not "
            f"{count}; widen its options, lower its weight or ask for fewer problems"
        )
    return problems


def _name(source: str, question: str) -> str:
    return f"{source}-{hashlib.sha256(question.encode()).hexdigest()[:12]}"


def _apportion(count: int, weights: Sequence[float]) -> list[int]:
    """Split a number by weights, the largest remainders first."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return parts


# --------------------------------------------------------------------------------------------------
# Demonstrations

Segment = tuple[str, bool]
"""Text and whether the policy wrote it."""


GUESS = "0"
"""What demonstrations answer that guess.

It is as wrong as any other number, and takes nothing from what a small model has to learn: to copy
numbers into code, and results of any length into the box.
"""


def demonstrations(
    problems: Sequence[Problem],
    *,
    render_prompt: Callable[[str], str],
    render_code: Callable[[str], str],
    render_result: Callable[[str], str],
    render_answer: Callable[[str], str],
    run: Callable[[str], str],
    seed: int = 0,
    count: int | None = None,
    direct_share: float = 0.6,
    direct_answer: Literal["guess", "right"] = "guess",
    slip_share: float = 0.3,
) -> Iterator[list[Segment]]:
    """Yield episodes for supervised training, in the very text of the task.

    An episode is the prompt, then turns and results in alternation; turns are marked True. The mix
    teaches the format and leaves the rest to RL: most episodes answer at once with a guess, and
    many that do compute confuse an operation on the way. Results are what the code really prints.

    Args:
        problems: training problems; those without code are left out.
        render_prompt: text of a prompt with a question.
        render_code: text of a turn that runs code.
        render_result: text of the observation with what the code printed.
        render_answer: text of a turn that answers.
        run: runs code and returns what it prints.
        seed: seed of all choices.
        count: number of episodes; None never ends.
        direct_share: share of the episodes that answer at once.
        direct_answer: what those answer: `GUESS`, or the right answer, as a control of what a
            model learns without the tool.
        slip_share: share of the others in which the code has one wrong operation.

    Raises:
        ValueError: a share outside 0 to 1, or no problem with code.
    """
    for name, share in (("direct_share", direct_share), ("slip_share", slip_share)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {share}")
    usable = [problem for problem in problems if problem.code]
    if not usable:
        raise ValueError("no problem has code: demonstrations need sources that state it")
    rng = random.Random(seed)
    made = 0
    while count is None or made < count:
        made += 1
        problem = rng.choice(usable)
        prompt = (render_prompt(problem.question), False)
        if rng.random() < direct_share:
            answer = GUESS if direct_answer == "guess" else problem.gold
            yield [prompt, (render_answer(answer), True)]
            continue
        code = _slip(problem.code, rng) if rng.random() < slip_share else problem.code
        printed = run(code).strip()
        yield [
            prompt,
            (render_code(code), True),
            (render_result(printed), False),
            (render_answer(printed), True),
        ]


_OPERATION = re.compile(r"(?<= )[+*-](?= )|gcd|lcm")
_CONFUSED = {"+": "-", "-": "+", "*": "+", "gcd": "lcm", "lcm": "gcd"}


def _slip(code: str, rng: random.Random) -> str:
    """Return the code with one operation confused."""
    found = list(_OPERATION.finditer(code))
    if not found:
        return code
    match = rng.choice(found)
    return code[: match.start()] + _CONFUSED[match[0]] + code[match.end() :]


TOKEN_PATTERN = r"\d{1,3}| ?[^\w\s] ?| ?\p{L}+|\s+"
"""What a token of the small model may span (tokenizers' regular expressions).

Three digits are one token, the same wherever a number stands, and a sign is one token with the
spaces around it. So an operator is next to its numbers, and copying an expression is a matter of
looking at what followed the same two tokens before. A single digit, or a space as a token of its
own, says too little about where it stands.
"""


def tokenizer_texts(
    problems: Iterable[Problem],
    *,
    render_prompt: Callable[[str], str],
    render_code: Callable[[str], str],
    render_answer: Callable[[str], str],
) -> Iterator[str]:
    """Yield the texts that a tokenizer for the task is trained on.

    Every number up to 999 comes often enough for a token of its own.
    """
    for problem in problems:
        yield render_prompt(problem.question)
        yield render_code(problem.code)
        yield render_answer(problem.gold)
    for _ in range(20):
        yield " ".join(map(str, range(1000)))
