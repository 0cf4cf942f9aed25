"""Boxes, exact answers, and the processes that compare expressions."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import psutil
import pytest

from copc_jax.tasks.verify import (
    Verifier,
    VerifierError,
    check_gold,
    extract_boxed,
    math_reward,
    verify_exactly,
)


@pytest.fixture(scope="module")
def verifier():
    with Verifier(processes=2) as verifier:
        yield verifier


def boxed(text):
    return rf"So it is \boxed{{{text}}}."


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{A1} or rather \boxed{B2}", "B2"),
        (r"\boxed{12} and then \boxed{13", "12"),
        (r"\boxed{12", None),
        (r"use \boxed ", None),
        (r"\boxed", None),
        (r"\boxed{}", None),
        (r"\boxed{4} no, \boxed{ }", None),
        (r"\boxed 5", "5"),
        (r"\boxed -1,234.5 apples", "-1,234.5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"{ \boxed{6} } } }", "6"),
        (r"\boxed{8} is less than {9", "8"),
        ("\\boxed{\n10\n}", "10"),
        ("12", None),
        ("", None),
    ],
)
def test_last_complete_box_counts(text, content):
    assert extract_boxed(text) == content


def test_boxes_do_not_span_turns():
    assert extract_boxed([r"\boxed{1", "2}"]) is None
    assert extract_boxed([r"\boxed{1}", "more", r"\boxed{2}", "more"]) == "2"
    assert extract_boxed([]) is None


def test_many_unclosed_boxes_cost_little():
    assert extract_boxed(r"\boxed{" * 50_000) is None
    assert extract_boxed(r"\boxed{" * 50_000 + "3}") == "3"


RIGHT = [
    ("42", "42"),
    ("42", " 42 "),
    ("42", "$42$"),
    ("42", "+42"),
    ("42", "42."),
    ("42", "42.0"),
    ("42", r"\text{42}"),
    ("42", "**42**"),
    ("4", "004"),
    ("-3", "−3"),
    ("1000", "1,000"),
    ("10080", r"10,\!080"),
    ("10080", r"10\,080"),
    ("10080", "10 080"),
    ("1234567", "1{,}234{,}567"),
    ("0.5", "1/2"),
    ("0.5", ".5"),
    ("1/2", r"\dfrac12"),
    (r"\frac{3}{4}", "6/8"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    ("1.8", r"1\frac{4}{5}"),
    ("137.5", "137 1/2"),
    ("300000", r"3 \times 10^{5}"),
    ("0.0000001", "1e-7"),
    ("0.3", "0.30000000000000004"),
    ("1/3", "0.3333333333333333"),
    ("25", r"25\%"),
    (r"25\%", "25"),
    (r"25\%", "0.25"),
    ("0.25", "25%"),
    ("18.90", r"\$18.90"),
    (r"\$32,\!348", "32348"),
    ("5", r"5 \text{ cm}"),
    (r"15\mbox{ cm}^2", "15"),
    ("90", r"90^\circ"),
    (r"90^{\circ}", "90 degrees"),
    ("12", "12 hours"),
    ("5", "x = 5"),
    ("x=5", "5"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(B)}", "B"),
    ("(C)", r"\textbf{(C)}"),
    ("even", r"\text{even}"),
    (r"\text{odd}", "odd"),
    ("odd", r"\text{odd}"),
    ("Yes", "yes"),
    (r"\text{red and blue}", "Red and  blue"),
    ("8:30", "8:30"),
    ("73", "**73**"),
    ("13", r"\text{13}"),
    ("1/3", r"\frac13"),
    ("1/2", r"\cfrac{1}{2}"),
    ("-1/2", "1/-2"),
    ("42", "{42}"),
    ("4343_6", "4343_6"),
    ("4343_6", "4343_{6}"),
    ("4343_6", "4343"),
    ("4343_{6}", r"4343_{\text{6}}"),
]
WRONG = [
    ("42", "43"),
    ("42", "-42"),
    ("42", ""),
    ("42", "42 or 43"),
    ("42", "41, 42"),
    ("42", "42x"),
    ("56088", "123*456"),
    ("56088", r"123 \cdot 456"),
    ("5040", "7!"),
    ("1024", "2^{10}"),
    ("5", r"\frac{25}{5}"),
    ("5", "10/2"),
    ("4", r"\sqrt{16}"),
    ("1/3", "0.333"),
    ("1/3", "0.3333333333"),
    ("0", "1e-7"),
    ("0.0000001", "0"),
    ("1234567890123", "1234567890124"),
    ("1234567890123", "1234567890123.5"),
    ("25", "0.25"),
    ("0.25", "25"),
    (r"25\%", r"0.25\%"),
    (r"5\text{ cm}", r"5\text{ km}"),
    (r"15\text{ cm}^2", r"15\text{ cm}^3"),
    ("x=5", "y=5"),
    ("1/2", "1/0"),
    (r"\text{even}", "odd"),
    (r"\text{no}", "on"),
    ("(B)", "(C)"),
    ("x", "X"),
    ("8:30", "4/15"),
    ("4/15", "8:30"),
    ("2:3", "4:6"),
    ("7", "9" * 5000),
    ("7", "1e999999999"),
    ("3", "9^{9^{9^{9}}}"),
    ("3", "2^{2^{40}}"),
    ("4343_6", "4343_7"),
    ("4343_6", "3343_6"),
    ("11_2", "3"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right_answers_need_no_algebra(gold, answer):
    assert verify_exactly(answer, gold) is True
    assert math_reward(boxed(answer), gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_answers_need_no_algebra(gold, answer):
    assert verify_exactly(answer, gold) is False
    assert math_reward(boxed(answer), gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"3\sqrt{2}", "3√2"),
        (r"2\pi", "2π"),
        (r"2\pi", "6.283185307179586"),
        (r"\frac{\pi}{2}", r"\dfrac{\pi}2"),
        ("x^2 + 1", "1+x^2"),
        ("p - q", "-q+p"),
        ("abc", "cab"),
        ("(a+5)(b+2)", "(b+2)(a+5)"),
        ("y = 2x + 3", "2x+3"),
        ("3, 5, 7", "7,3,5"),
        (r"\{1,2,3\}", r"\{3,2,1\}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
        ("0<x<3", "(0,3)"),
        ("$1331$ and $1728$", "1728, 1331"),
        ("1331 and 1728", "1728 and 1331"),
        ("x=1,y=2", "(1,2)"),
        (r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}-1\\2\end{pmatrix}"),
        ("3+4i", "4i + 3"),
        ("2^{-99}", r"\frac{1}{2^{99}}"),
    ],
)
def test_equivalent_expressions_are_right(verifier, gold, answer):
    assert math_reward(boxed(answer), gold, verifier) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"3\sqrt{2}", "3"),
        (r"2\pi", "6.28"),
        (r"2\pi", "6.2832"),
        ("2^{-99}", "2^{-98}"),
        ("10^{-7}", "0"),
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "(0,1)"),
        ("(0,3)", "0<x<3"),
        (r"[0,\infty)", r"x\ge 0"),
        ("$1331$ and $1728$", "1728"),
        ("1331 and 1728", "1728"),
        ("3, 5, 7", "3, 5"),
        ("p - q", "q - p"),
        ("x+1", "y+1"),
        ("x^2", r"\undefinedcommand{"),
        ("x^2", "(" * 120),
        ("x^2", "ſ\x00\ud800"),
    ],
)
def test_other_expressions_are_wrong(verifier, gold, answer):
    assert verifier.verify(answer, gold) is False


def test_any_of_several_golds_is_enough(verifier):
    assert math_reward(boxed("7"), ("6", "7"), verifier) == 1.0
    assert math_reward(boxed("7"), (), verifier) == 0.0


def test_neither_format_nor_tools_earn_anything():
    attempt = "<code>print(6*7)</code>"
    assert math_reward([attempt, "<answer>42</answer>"], "42") == 0.0
    assert math_reward([attempt, boxed("41")], "42") == 0.0


def test_threads_and_event_loops_share_a_verifier(verifier):
    """math-verify by itself raises outside the main thread."""
    before = (verifier.timeouts, verifier.crashes)
    verdicts = []
    pairs = [("x+y", "y+x"), ("x+y", "x-y")] * 10

    def work(gold, answer):
        verdicts.append(verifier.verify(answer, gold) == (answer == "y+x"))

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def ask_all():
        return await asyncio.gather(*(verifier.averify(answer, gold) for gold, answer in pairs))

    assert verdicts == [True] * 20
    assert asyncio.run(ask_all()) == [True, False] * 10
    assert (verifier.timeouts, verifier.crashes) == before


def test_endless_comparisons_are_killed_and_counted():
    with Verifier(timeout=1.0) as verifier:
        assert verifier.verify("x+1", "1+x")
        start = time.monotonic()
        assert not verifier.verify(r"10^{10^{10}}", r"\sqrt{2}")
        assert time.monotonic() - start < 30
        assert verifier.timeouts == 1
        assert verifier.verify("x+1", "1+x")


@pytest.mark.parametrize("bomb", ["9^{9^{9^{9}}}", "2^{2^{40}}"])
def test_comparisons_that_give_up_by_themselves_are_counted(verifier, bomb):
    timeouts, crashes = verifier.timeouts, verifier.crashes
    assert not verifier.verify(bomb, r"\sqrt{3}")
    assert (verifier.timeouts, verifier.crashes) == (timeouts + 1, crashes)
    assert verifier.verify(r"\frac{3}{\sqrt{3}}", r"\sqrt{3}")


def test_dead_workers_are_replaced_counted_and_logged(caplog):
    """C59: a worker that the system kills makes no right answer wrong, nor a wrong one right."""
    before = set(psutil.Process().children())
    with Verifier() as verifier:
        assert verifier.verify("x+1", "1+x")
        for crashes, answer in ((1, "1+x"), (2, "2+x")):
            (worker,) = set(psutil.Process().children()) - before
            worker.kill()
            psutil.wait_procs([worker], timeout=10)
            assert verifier.verify(answer, "x+1") == (answer == "1+x")
            assert (verifier.crashes, verifier.timeouts) == (crashes, 0)
        assert "0 comparisons timed out, which count as wrong, and 2 died" in caplog.text
    assert set(psutil.Process().children()) == before


def test_workers_that_cannot_start_are_an_error():
    before = set(psutil.Process().children())
    with Verifier(start_timeout=0.001) as verifier:
        with pytest.raises(VerifierError, match="did not start"):
            verifier.verify("x+1", "1+x")
        assert verifier.verify("7", "7")
    assert set(psutil.Process().children()) == before
    with pytest.raises(VerifierError, match="closed"):
        verifier.verify("x+1", "1+x")
    with pytest.raises(ValueError, match="at least 1"):
        Verifier(processes=0)


def test_nothing_starts_for_numbers_and_nothing_heavy_loads():
    program = r"""
import json, sys, psutil
from copc_jax.tasks.verify import check_gold, math_reward
reward = math_reward(r"\boxed{7}", "7")
check_gold("7", "row 1")
heavy = [name for name in ("jax", "numpy", "sympy", "math_verify") if name in sys.modules]
print(json.dumps([reward, heavy, len(psutil.Process().children())]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert json.loads(result.stdout) == [1.0, [], 0]


def test_the_shared_verifier_ends_with_the_program():
    program = r"""
import psutil
from copc_jax.tasks.verify import math_reward
assert math_reward(r"\boxed{x+1}", "1+x") == 1.0
print(psutil.Process().children()[0].pid)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert result.stderr == ""
    assert not psutil.pid_exists(int(result.stdout))


@pytest.mark.parametrize(
    "gold", ["42", r"\frac{1}{2}", r"\text{east}", "8:30", "x^2+1", r"(2,\infty)", "3, 5, 7", "B"]
)
def test_usable_golds_pass(verifier, gold):
    check_gold(gold, "train.jsonl line 1", verifier)


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (r"so \boxed{5}", "whole solution"),
        ("2 + 3 = 5\n#### 5", "whole solution"),
        (r"\frac{1}{2", "unbalanced"),
        ("the answer is about 5", "sentence"),
        ("???", "cannot be read"),
    ],
)
def test_unusable_golds_name_their_row(verifier, gold, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_gold(gold, "train.jsonl line 17", verifier)
    assert str(caught.value).startswith("train.jsonl line 17: ")
    assert "such as 42" in str(caught.value)
