"""Generated problems, mixtures and demonstrations."""

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter

import pytest

from copc_jax.problems import (
    DEFAULT_SOURCES,
    GENERATORS,
    MathProblemsConfig,
    Problem,
    ProblemSource,
    build_problems,
    demonstrations,
    tokenizer_texts,
)
from copc_jax.tasks.verify import check_gold, extract_boxed, math_reward

SMALL = MathProblemsConfig(train=400, held_out=100)
FORMAT = {
    "render_prompt": lambda question: question + "\n",
    "render_code": lambda code: f"<code>{code}</code>",
    "render_result": lambda text: f"<interpreter>{text}</interpreter>",
    "render_answer": lambda text: rf"<answer>\boxed{{{text}}}</answer>",
}


def run(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue()


def box(text):
    return rf"\boxed{{{text}}}"


@pytest.fixture(scope="module")
def splits():
    return build_problems(SMALL, seed=3)


def test_splits_have_their_sizes_and_share_no_question(splits):
    train, held_out = splits
    assert (len(train), len(held_out)) == (400, 100)
    assert len({problem.question for problem in train + held_out}) == 500
    assert len({problem.problem_id for problem in train + held_out}) == 500


def test_the_same_seed_gives_the_same_problems(splits):
    assert build_problems(SMALL, seed=3) == splits
    other, _ = build_problems(SMALL, seed=4)
    assert {p.question for p in other}.isdisjoint({p.question for p in splits[0]})


def test_another_process_gives_the_same_problems(splits):
    program = (
        "import json; from copc_jax.problems import *; "
        "train, _ = build_problems(MathProblemsConfig(train=400, held_out=100), 3); "
        "print(json.dumps([problem.question for problem in train]))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [problem.question for problem in splits[0]]


def test_weights_set_the_shares():
    sources = (ProblemSource("gcd", 3.0), ProblemSource("products", 1.0, {"min_digits": 3}))
    train, held_out = build_problems(MathProblemsConfig(sources, train=101, held_out=40), seed=0)
    assert Counter(problem.source for problem in train) == {"gcd": 76, "products": 25}
    assert Counter(problem.source for problem in held_out) == {"gcd": 30, "products": 10}


def test_options_set_the_difficulty():
    sources = (ProblemSource("products", 1.0, {"min_digits": 6, "max_digits": 6}),)
    train, _ = build_problems(MathProblemsConfig(sources, train=20, held_out=1), seed=0)
    assert all(len(problem.gold) >= 11 for problem in train)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_has_answers_that_verify_and_code_that_finds_them(name):
    config = MathProblemsConfig((ProblemSource(name),), train=40, held_out=1)
    train, _ = build_problems(config, seed=5)
    for problem in train:
        check_gold(problem.gold, problem.problem_id)
        assert math_reward(box(problem.gold), problem.gold) == 1.0
        assert math_reward(box(problem.gold + "1"), problem.gold) == 0.0
        if problem.code:
            assert math_reward(box(run(problem.code)), problem.gold) == 1.0


def test_the_default_mixture_cannot_be_guessed():
    train, _ = build_problems(MathProblemsConfig(train=4000, held_out=1), seed=0)
    assert {problem.source for problem in train} == {source.name for source in DEFAULT_SOURCES}
    (_, commonest), *_ = Counter(problem.gold for problem in train).most_common(1)
    assert commonest < 0.01 * len(train)
    assert all(problem.code for problem in train)


def test_a_problem_becomes_a_prompt():
    prompt = Problem("id-1", "1 + 1?", "2", "sums").to_prompt()
    assert prompt.prompt_id == "id-1"
    assert prompt.messages == ({"role": "user", "content": "1 + 1?"},)
    assert (prompt.gold, prompt.source) == (("2",), "sums")


def test_wrong_sources_are_refused_with_the_right_ones():
    with pytest.raises(ValueError, match=r"'product'.*products"):
        ProblemSource("product")
    with pytest.raises(ValueError, match="weight of gcd"):
        ProblemSource("gcd", 0.0)
    with pytest.raises(ValueError, match="without '/'"):
        ProblemSource("basic_arithmetic", options={"operators": ["+", "/"]})
    with pytest.raises(ValueError, match="unless allow_parentheses is True"):
        ProblemSource("basic_arithmetic", options={"allow_parentheses": False})
    with pytest.raises(ValueError, match="sources is empty"):
        MathProblemsConfig(sources=())
    with pytest.raises(ValueError, match="held_out must be at least 1"):
        MathProblemsConfig(held_out=0)
    for options, message in (
        ({"digits": 3}, "products has no option digits; there are .*max_digits"),
        ({"seed": 3}, "products has no option seed"),
        ({"min_digits": 4, "max_digits": 3}, "products refuses .*max_digits must be >= min_digits"),
        ({"min_digits": "four"}, "products refuses"),
        ({"min_digits": 1, "max_digits": 1}, "only about 100 different questions"),
    ):
        sources = (ProblemSource("products", options=options),)
        with pytest.raises(ValueError, match=message):
            build_problems(MathProblemsConfig(sources, train=200, held_out=10), seed=0)


def test_demonstrations_compute_and_answer_what_was_printed(splits):
    golds = {problem.question + "\n": problem for problem in splits[0]}
    episodes = demonstrations(
        splits[0], **FORMAT, run=run, count=200, direct_share=0.0, slip_share=0.0
    )
    for prompt, code, result, answer in episodes:
        problem = golds[prompt[0]]
        assert code == (f"<code>{problem.code}</code>", True)
        assert result == (f"<interpreter>{problem.gold}</interpreter>", False)
        assert math_reward(answer[0], problem.gold) == 1.0
        assert (prompt[1], answer[1]) == (False, True)


def test_guesses_are_wrong_and_do_not_compute(splits):
    golds = {problem.question + "\n": problem.gold for problem in splits[0]}
    episodes = demonstrations(splits[0], **FORMAT, run=run, count=200, direct_share=1.0)
    for prompt, answer in episodes:
        assert extract_boxed(answer[0]) == "0" and answer[1] is True
        assert math_reward(answer[0], golds[prompt[0]]) == float(golds[prompt[0]] == "0")
    assert Counter(golds.values())["0"] < 0.01 * len(golds)


def test_the_control_answers_right_without_the_tool(splits):
    golds = {problem.question + "\n": problem.gold for problem in splits[0]}
    episodes = demonstrations(
        splits[0], **FORMAT, run=run, count=200, direct_share=1.0, direct_answer="right"
    )
    for prompt, answer in episodes:
        assert math_reward(answer[0], golds[prompt[0]]) == 1.0


def test_slips_compute_something_else(splits):
    golds = {problem.question + "\n": problem for problem in splits[0]}
    episodes = demonstrations(
        splits[0], **FORMAT, run=run, count=300, direct_share=0.0, slip_share=1.0
    )
    rewards = []
    for prompt, code, result, answer in episodes:
        problem = golds[prompt[0]]
        assert code[0] != f"<code>{problem.code}</code>"
        assert result[0].removeprefix("<interpreter>").removesuffix("</interpreter>") in answer[0]
        rewards.append(math_reward(answer[0], problem.gold))
    # A slip beside a zero or between equal numbers changes nothing.
    assert sum(rewards) < 0.05 * len(rewards)


def test_shares_of_demonstrations(splits):
    episodes = list(
        demonstrations(
            splits[0], **FORMAT, run=run, seed=1, count=2000, direct_share=0.7, slip_share=0.5
        )
    )
    guessed = sum(len(episode) == 2 for episode in episodes)
    assert 0.65 < guessed / 2000 < 0.75
    again = demonstrations(
        splits[0], **FORMAT, run=run, seed=1, count=2000, direct_share=0.7, slip_share=0.5
    )
    assert list(again) == episodes


def test_demonstrations_need_code_and_shares():
    with pytest.raises(ValueError, match="no problem has code"):
        next(demonstrations([Problem("a", "a?", "1", "a")], **FORMAT, run=run))
    problem = Problem("a", "1 + 1?", "2", "sums", "print(1 + 1)")
    with pytest.raises(ValueError, match="direct_share"):
        next(demonstrations([problem], **FORMAT, run=run, direct_share=1.5))


def test_tokenizer_texts_hold_all_parts_and_numbers(splits):
    render = {name: FORMAT[name] for name in ("render_prompt", "render_code", "render_answer")}
    texts = list(tokenizer_texts(splits[0][:5], **render))
    for problem in splits[0][:5]:
        assert problem.question + "\n" in texts
        assert f"<code>{problem.code}</code>" in texts
    words = Counter(" ".join(texts[15:]).split())
    assert all(words[str(number)] >= 10 for number in range(1000))
