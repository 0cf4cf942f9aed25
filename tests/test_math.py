"""The math task: turns, results, rewards, and whole episodes over HTTP with a real sandbox."""

import asyncio
import json

import assembly
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer, Tokens

from copc_jax import data
from copc_jax.config import parse
from copc_jax.rollout.client import SamplingParams, SGLangClient
from copc_jax.rollout.episode import CUT_MARKER, EpisodeBudget, EpisodeFailed, Task, run_episode
from copc_jax.tasks.math import (
    FORMATS,
    Call,
    MathConfig,
    MathTask,
    extract_answer,
    math_reward,
    parse_turn,
    render_answer,
    render_code,
    render_prompt,
    render_results,
)
from copc_jax.tasks.verify import Verifier
from copc_jax.tools.python import SandboxError, make_sandbox
from copc_jax.types import Prompt

SHORT, RETOOL, QWEN = FORMATS["short"], FORMATS["retool"], FORMATS["qwen"]
PROMPT = Prompt(
    "p",
    messages=({"role": "user", "content": "Calculate 123 * 45."},),
    gold=("5535",),
    source="products",
)
CODE, ANSWER = "<code>print(123 * 45)</code>", r"<answer>\boxed{5535}</answer>"


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["Calculate 123 * 45.\n", r"print(123 * 45) \boxed{5535}"] * 9
    marks = tuple(dict.fromkeys(SHORT.texts + QWEN.texts))
    return data.train_tokenizer(texts, 320, tags=marks, pattern=r"\d|[^\d]+")


@pytest.fixture(scope="module")
def verifier():
    with Verifier() as verifier:
        yield verifier


@pytest.fixture(params=FORMATS)
def config(request):
    return FORMATS[request.param]


def together(tokenizer, verifier, work, config=SHORT, sandbox=None, **limits):
    """Run `work(task)` with a task whose sandbox lives as long."""

    async def main():
        async with sandbox or make_sandbox("monty", processes=2, **limits) as opened:
            return await work(MathTask(tokenizer, opened, verifier, config))

    return asyncio.run(main())


def play(tokenizer, verifier, turns, config=SHORT, prompt=PROMPT, **limits):
    """Step through the turns as `run_episode` does; return actions, reward and figures."""

    async def work(task):
        actions, info = [], {}
        for turn in turns:
            actions.append(await task.step(turn, "stop", None))
            for name, value in actions[-1].info.items():
                info[name] = info.get(name, 0.0) + value
            if actions[-1].kind == "end":
                break
        return actions, *await task.reward(prompt, turns, info)

    return together(tokenizer, verifier, work, config, **limits)


def score(tokenizer, verifier, turns, config=SHORT, prompt=PROMPT, **info):
    """Return the reward of turns whose tools need not run."""
    task = MathTask(tokenizer, make_sandbox("monty"), verifier, config)
    return asyncio.run(task.reward(prompt, turns, info))


# --------------------------------------------------------------------------------------------------
# Turns


@pytest.mark.parametrize(
    ("text", "calls", "ends"),
    [
        (CODE, ["print(123 * 45)"], False),
        ("Let me see.\n<code>\nprint(1)\n</code> then", ["print(1)"], False),
        # Several blocks of one turn stay in order; whatever follows an answer does nothing.
        ("<code>a</code><code>b</code>", ["a", "b"], False),
        (f"{ANSWER}<code>a</code>", [], True),
        (f"<code>a</code>{ANSWER}<code>b</code>", ["a"], False),
        # Indented as a whole, and fenced as other models write it.
        ("<code>  x = 1\n  print(x)</code>", ["x = 1\nprint(x)"], False),
        ("<code>\n```python\nprint(1)\n```\n</code>", ["print(1)"], False),
        ("<code>```python\nold\n```\nno:\n```python\nnew\n```</code>", ["new"], False),
        ("<code>\n```\nprint(1)\n```\n</code>", ["print(1)"], False),
        ("<code>\n```py\nprint(1)\n```\n</code>", ["print(1)"], False),
        ("<code>\n  ```Python3\n  print(1)\n  ```\n</code>", ["print(1)"], False),
        ("<code>\r\n```python\r\nprint(1)\r\n```\r\n</code>", ["print(1)"], False),
        ("<code>\n```python\nprint('```')\n```\n</code>", ["print('```')"], False),
        ("<code>print('```')</code>", ["print('```')"], False),
        ("<code>\n```python\nprint(1)\n</code>", ["print(1)"], False),
        (ANSWER, [], True),
        ("<answer>5535</answer>", [], True),
        (r"so \boxed{5535}.", [], True),
        ("<code>print(1)", [], False),
        (r"<code>print(r'\boxed{1}')", [], False),
        ("print(1)</code>", [], False),
        ("<Code>print(1)</Code>", [], False),
        (r"\boxed{5535", [], False),
        ("5535", [], False),
        ("", [], False),
    ],
)
def test_what_a_turn_does(text, calls, ends):
    assert parse_turn(text) == ([Call(code) for code in calls], ends)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"name": "code_interpreter", "arguments": {"code": "print(1)"}}, "print(1)"),
        ({"name": "code_interpreter", "parameters": {"code": "print(1)"}}, "print(1)"),
        ({"name": "code_interpreter", "arguments": {"code": "a\n  b"}}, "a\n  b"),
        ({"name": "search", "arguments": {"code": "print(1)"}}, "the only function"),
        ({"name": "code_interpreter", "arguments": {}}, 'a string "code"'),
        ({"name": "code_interpreter", "arguments": {"code": 1}}, 'a string "code"'),
        ({"name": "code_interpreter", "arguments": "print(1)"}, 'a string "code"'),
        ({"name": "code_interpreter", "arguments": {"code": " "}}, "empty"),
        ([1], "JSON object"),
    ],
)
def test_json_calls(call, expected):
    calls, ends = parse_turn(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", QWEN)
    assert len(calls) == 1 and not ends
    assert calls[0].code == expected or (calls[0].code == "" and expected in calls[0].error)


GOOD = '{"name": "code_interpreter", "arguments": {"code": "print(7)"}}'


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "code_interpreter", "arguments": {"code": "print(1)}}',  # No closing quote.
        GOOD + GOOD,  # Two objects in one tag: neither runs.
        "print(1)",
        "",
        "[" * 100_000,
    ],
)
def test_broken_json_is_an_error_and_runs_nothing(text):
    (call,), ends = parse_turn(f"<tool_call>{text}</tool_call>", QWEN)
    assert (call.code, ends) == ("", False) and "not valid JSON" in call.error


def test_line_breaks_inside_a_json_string_are_read():
    text = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "a = 1\nprint(a)"}}'
    assert parse_turn(text + "</tool_call>", QWEN)[0] == [Call("a = 1\nprint(a)")]


def test_a_json_call_that_is_not_closed_is_an_error():
    (call,), ends = parse_turn(f"<tool_call>{GOOD}<|im_end|>", QWEN)
    assert "</tool_call> is missing" in call.error and not ends


def test_a_message_without_calls_ends_the_episode():
    assert parse_turn(r"It is \boxed{4}.<|im_end|>", QWEN) == ([], True)
    assert parse_turn("I do not know.<|im_end|>", QWEN) == ([], True)


@given(st.text(alphabet=st.sampled_from(r"</>codeanswr\boxed{}1 `"), max_size=80))
def test_any_text_parses(text):
    for config in FORMATS.values():
        calls, ends = parse_turn(text, config)
        assert not (calls and ends)
        answer = extract_answer(text, config)
        assert answer is None or answer in text


@pytest.mark.parametrize("code", ["print(1)", "x = 3\nprint(x * 'a\"b')\n", "s = r'\\n'\nprint(s)"])
def test_demonstrations_are_parsed_as_they_were_meant(code, config):
    turn = render_code(config, code)
    assert parse_turn(turn, config) == ([Call(code.strip())], False)
    assert turn.endswith(config.stop[0])
    answer = render_answer(config, r"\frac{1}{2}")
    assert parse_turn(answer, config) == ([], True)
    assert extract_answer(answer, config) == r"\frac{1}{2}"
    assert answer.endswith(config.stop[-1])


def test_tags_are_configuration_for_all_that_reads_them(tokenizer, verifier):
    config = MathConfig(format="retool", code="python", interpreter="output", answer="final")
    assert config.stop == ("</python>", "</final>")
    prompt = render_prompt(config, "Why?")
    assert all(text in prompt for text in config.texts) and prompt.endswith("Problem: Why?\n")
    turns = [render_code(config, "print(123 * 45)"), render_answer(config, "5535")]
    assert turns[0] == "<python>\n```python\nprint(123 * 45)\n```\n</python>"
    actions, reward, _ = play(tokenizer, verifier, turns, config)
    assert actions[0].observation == "\n<output>\n5535\n</output>\n\n"
    assert (actions[1].kind, reward) == ("end", 1.0)
    # The tags of another set are plain text.
    assert parse_turn(CODE, config) == ([], False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"code": "answer"}, "tag names must differ"),
        ({"code": "a b"}, "tag name"),
        ({"interpreter": "<x>"}, "tag name"),
        ({"max_calls": 0}, "max_calls"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MathConfig(**values)


# --------------------------------------------------------------------------------------------------
# Results


def test_code_is_run_and_its_output_shown(tokenizer, verifier):
    actions, reward, figures = play(tokenizer, verifier, [CODE, ANSWER])
    assert actions[0].observation == "<interpreter>5535</interpreter>"
    assert reward == 1.0
    assert figures == {
        "accuracy": 1.0,
        "answered": 1.0,
        "calls": 1.0,
        "failed_calls": 0.0,
        "code_errors": 0.0,
        "limits": 0.0,
        "valid_actions": 2.0,
    }


def test_results_come_in_call_order_whatever_takes_longest(tokenizer, verifier):
    slow = "x = 0\nfor i in range(300000):\n    x += i\nprint('slow')"
    turn = f"<code>{slow}</code><code>print('fast')</code>"
    actions, *_ = play(tokenizer, verifier, [turn])
    assert actions[0].observation == (
        "<interpreter>slow</interpreter><interpreter>fast</interpreter>"
    )
    assert actions[0].info["calls"] == 2.0


def test_chat_messages_answer_all_calls_of_a_turn(tokenizer, verifier):
    call = lambda code: render_code(QWEN, code).removesuffix("<|im_end|>")
    turn = (
        f"Both.\n{call('print(1)')}\n<tool_call>\n{{}}\n</tool_call>\n{call('print(3)')}<|im_end|>"
    )
    actions, *_ = play(tokenizer, verifier, [turn], QWEN)
    # What Qwen's chat template writes for consecutive tool messages.
    assert actions[0].observation == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n"
        "Error: the only function is code_interpreter\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    info = {"calls": 2.0, "failed_calls": 1.0, "code_errors": 0.0, "limits": 0.0}
    assert actions[0].info == {**info, "invalid_actions": 1.0}


def test_calls_beyond_the_limit_of_a_turn_are_not_run(tokenizer, verifier):
    actions, *_ = play(tokenizer, verifier, ["<code>print(1)</code>" * 3], MathConfig(max_calls=2))
    assert actions[0].observation.count("<interpreter>1</interpreter>") == 2
    assert "at most 2 calls" in actions[0].observation
    assert (actions[0].info["calls"], actions[0].info["failed_calls"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("code", "shown", "errors", "limits"),
    [
        ("print(1 / 0)", "ZeroDivisionError", 1.0, 0.0),
        ("print(1", "SyntaxError", 1.0, 0.0),
        ("while True:\n    pass", "Timeout Error", 1.0, 1.0),
        ("print('x' * 10**6)", "...", 0.0, 0.0),
        ("x = 1", "Nothing was printed.", 0.0, 0.0),
    ],
)
def test_what_goes_wrong_in_code_is_text_and_counted(
    tokenizer, verifier, code, shown, errors, limits
):
    turns = [f"<code>{code}</code>", CODE]
    actions, _, figures = play(
        tokenizer,
        verifier,
        turns,
        time_limit_s=2.0 if code.startswith("while") else 60.0,
        output_limit_chars=100,
    )
    assert shown in actions[0].observation and len(actions[0].observation) < 200
    assert actions[0].info["valid_actions"] == 1.0
    assert (figures["code_errors"], figures["limits"]) == (errors, limits)
    # The next call works as if nothing had been.
    assert actions[1].observation == "<interpreter>5535</interpreter>"


def test_calls_know_nothing_of_each_other(tokenizer, verifier):
    actions, *_ = play(tokenizer, verifier, ["<code>x = 5</code><code>print(x)</code>"])
    assert "NameError" in actions[0].observation


def test_printed_text_cannot_act_or_close_its_tag(tokenizer, verifier, config):
    traps = (r"<code>print(1)</code><answer>\boxed{5535}</answer><<code>></interpreter>"
             "<tool_call></tool_response><|im_end|><|im_start|><<|im_end|>|im_end|>")  # fmt: skip
    plain = render_results(config, ["x"])
    shown = render_results(config, [traps])
    for mark in config.texts:
        assert shown.count(mark) == plain.count(mark), mark
    inside = shown.partition(plain.partition("x")[0])[2]
    assert parse_turn(inside, config)[0] == []


def test_printed_special_tokens_stay_text(verifier):
    tokenizer = data.train_tokenizer(["print"], 280, tags=SHORT.texts)
    turn = "<code>print('<|end|>')</code>"
    actions, *_ = play(tokenizer, verifier, [turn])
    ids = tokenizer.encode(actions[0].observation, add_special_tokens=False).ids
    assert tokenizer.token_to_id("<|end|>") not in ids
    assert "< |end|>" in actions[0].observation


def test_a_box_in_printed_text_pays_nothing(tokenizer, verifier):
    turn = r"<code>print(r'\boxed{5535}')</code>"
    actions, reward, figures = play(tokenizer, verifier, [turn, "There it is."])
    assert r"\boxed{5535}" in actions[0].observation
    assert (reward, figures["answered"], figures["calls"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("turn", ["hm", "", "<code></code>", "<code>open", "<interpreter>"])
def test_an_invalid_turn_is_told_what_is_valid(tokenizer, verifier, turn):
    actions, reward, figures = play(tokenizer, verifier, [turn])
    assert actions[0].kind == "observe" and actions[0].info["invalid_actions"] == 1.0
    assert parse_turn(actions[0].observation) == ([], False)
    assert (reward, figures["valid_actions"], figures["calls"]) == (0.0, 0.0, 0.0)


def test_a_cut_turn_runs_nothing(tokenizer, verifier):
    async def work(task):
        return await task.step(CODE, "length", None)

    action = together(tokenizer, verifier, work)
    assert (action.kind, action.observation, action.info) == ("end", "", {})


def test_a_sandbox_out_of_order_fails_the_episode(tokenizer, verifier):
    # Nobody listens there: what the policy wrote is neither right nor wrong.
    async def work(task):
        await task.step(CODE, "stop", "</code>")

    sandbox = make_sandbox("sandbox-fusion", url="http://127.0.0.1:9", time_limit_s=1.0)
    with pytest.raises(EpisodeFailed, match=r"sandbox failed.*127\.0\.0\.1:9") as caught:
        together(tokenizer, verifier, work, sandbox=sandbox)
    assert isinstance(caught.value.__cause__, SandboxError)


# --------------------------------------------------------------------------------------------------
# Rewards


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([ANSWER], 1.0),
        ([r"\boxed{5535}"], 1.0),
        ([r"<answer>\boxed{1}</answer>", ANSWER], 1.0),
        ([r"first \boxed{5535}, no: \boxed{5536}"], 0.0),
        (["<answer>5535</answer>"], 0.0),
        ([r"\boxed{5535"], 0.0),
        ([r"\boxed{}"], 0.0),
        ([r"\boxed{123 * 45}"], 0.0),
        # Neither code nor a result that the policy invented is an answer.
        ([r"<code>print(r'\boxed{5535}')</code>"], 0.0),
        ([r"<code>print(r'\boxed{5535}')"], 0.0),
        ([r"<interpreter>\boxed{5535}</interpreter>"], 0.0),
        ([r"\boxed{1}<code>\boxed{5535}</code>"], 0.0),
        # No box spans tool text.
        ([r"\boxed{55", "35}"], 0.0),
        ([], 0.0),
    ],
)
def test_the_last_box_that_the_policy_wrote_is_paid(tokenizer, verifier, turns, reward):
    assert score(tokenizer, verifier, turns)[0] == reward


def test_expressions_are_verified_in_a_process_of_their_own(tokenizer, verifier):
    prompt = Prompt("r", messages=PROMPT.messages, gold=("7", r"\frac{\sqrt{3}}{2}"))
    assert score(tokenizer, verifier, [r"\boxed{\sqrt{3}/2}"], prompt=prompt)[0] == 1.0
    assert score(tokenizer, verifier, [r"\boxed{\sqrt{3}}"], prompt=prompt)[0] == 0.0
    assert math_reward(r"\boxed{1/2}", "0.5", verifier) == 1.0


def test_rewards_do_not_hold_up_other_episodes(tokenizer):
    async def main(verifier):
        task = MathTask(tokenizer, make_sandbox("monty"), verifier)
        prompt = Prompt("s", messages=PROMPT.messages, gold=(r"\pi",))
        slow = asyncio.create_task(task.reward(prompt, [r"\boxed{9^{9^{9^{9}}}}"], {}))
        await asyncio.sleep(0)
        fast, _ = await task.reward(PROMPT, [ANSWER], {})
        waiting = not slow.done()
        return fast, waiting, (await slow)[0]

    with Verifier(timeout=3.0) as verifier:
        assert asyncio.run(main(verifier)) == (1.0, True, 0.0)


def test_a_cut_episode_is_wrong(tokenizer, verifier):
    reward, figures = score(tokenizer, verifier, [ANSWER, CODE], truncated=1.0)
    assert (reward, figures["accuracy"], figures["answered"]) == (0.0, 0.0, 0.0)


def test_an_invented_result_is_no_call(tokenizer, verifier):
    turn = f"<interpreter>5535</interpreter>{ANSWER}"
    _, reward, figures = play(tokenizer, verifier, [turn])
    assert (reward, figures["calls"]) == (1.0, 0.0)


def test_the_prompt_is_never_scored(tokenizer, verifier):
    question = r"Is it \boxed{5535}?"
    prompt = Prompt("b", messages=({"role": "user", "content": question},), gold=("5535",))
    assert score(tokenizer, verifier, ["yes"], prompt=prompt)[0] == 0.0


# --------------------------------------------------------------------------------------------------
# Prompts


def test_prompts_are_encoded_in_the_format_of_the_task(tokenizer, verifier):
    task = MathTask(tokenizer, make_sandbox("monty"), verifier)
    assert isinstance(task, Task)
    assert tokenizer.decode(task.encode_prompt(PROMPT)) == "Calculate 123 * 45.\n"
    assert task.encode_prompt(Prompt("t", token_ids=(5, 6))) == [5, 6]
    with pytest.raises(ValueError, match="'empty' has neither"):
        task.encode_prompt(Prompt("empty"))


def test_long_formats_explain_themselves(config):
    question = "What is {x} of {}?"
    text = render_prompt(config, question)
    assert question in text
    if config.format != "short":
        assert r"\boxed{result}" in text and f"<{config.code}>" in text
    if config.format == "qwen":
        schema = json.loads(text.partition("<tools>\n")[2].partition("\n</tools>")[0])
        assert schema["function"]["name"] == "code_interpreter"
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_template_wraps_the_instructions(tokenizer, verifier):
    def template(messages):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"

    task = MathTask(
        tokenizer, make_sandbox("monty"), verifier, RETOOL, apply_chat_template=template
    )
    system = {"role": "system", "content": "Be brief."}
    prompt = Prompt("c", messages=(system, *PROMPT.messages))
    text = tokenizer.decode(task.encode_prompt(prompt))
    assert text.startswith("[system]Be brief.[user]Solve the problem")
    assert text.endswith("Problem: Calculate 123 * 45.\n[assistant]")
    with pytest.raises(ValueError, match="qwen"):
        MathTask(tokenizer, make_sandbox("monty"), verifier, QWEN, apply_chat_template=template)


# --------------------------------------------------------------------------------------------------
# Whole episodes


def episode(tokenizer, verifier, turns, config=SHORT, **limits):
    """Play an episode against a scripted server that samples these turns."""
    budget = EpisodeBudget(
        **(
            {"max_turns": 4, "max_tokens": 900, "max_new_tokens": 200}
            | {"max_observation_tokens": 60}
            | limits
        )
    )

    async def work(task, url):
        async with SGLangClient([url]) as client:
            return await run_episode(
                client,
                task,
                tokenizer,
                PROMPT,
                sample=0,
                sampling=SamplingParams(max_new_tokens=100),
                budget=budget,
                seed=1,
            )

    with ScriptedServer() as server:
        for turn in turns:
            ids = tokenizer.encode(turn, add_special_tokens=False).ids
            stop = next((s for s in config.stop if s in turn), None)
            finish = "stop" if stop else "length"
            server.script("/generate", Tokens(ids, finish=finish, matched=stop))
        return together(tokenizer, verifier, lambda task: work(task, server.url), config)


def test_an_episode_of_code_and_answer(tokenizer, verifier, config):
    turns = [render_code(config, "print(123 * 45)"), render_answer(config, "5535")]
    trajectory = episode(tokenizer, verifier, turns, config)
    assert (trajectory.reward, trajectory.status) == (1.0, "done")
    assert trajectory.info["calls"] == 1.0 and trajectory.info["turns"] == 2.0
    result = render_results(config, ["5535"])
    whole = render_prompt(config, "Calculate 123 * 45.") + turns[0] + result + turns[1]
    assert tokenizer.decode(trajectory.token_ids.tolist()) == whole
    # Ids are those of the whole text: nothing was tokenized across a border in another way.
    assert trajectory.token_ids.tolist() == tokenizer.encode(whole).ids
    sampled = trajectory.token_ids[trajectory.is_action].tolist()
    assert tokenizer.decode(sampled) == "".join(turns)


def test_a_flood_of_output_is_cut_masked_and_within_the_budget(tokenizer, verifier):
    turns = ["<code>print('7' * 10**7)</code>", ANSWER]
    trajectory = episode(tokenizer, verifier, turns, max_tokens=130, max_observation_tokens=40)
    assert len(trajectory.token_ids) <= 130
    observed = tokenizer.decode(trajectory.token_ids[~trajectory.is_action].tolist())
    assert CUT_MARKER.strip() in observed and observed.endswith("</interpreter>")
    sampled = trajectory.token_ids[trajectory.is_action].tolist()
    assert tokenizer.decode(sampled) == "".join(turns)
    assert trajectory.reward == 1.0 and trajectory.info["limits"] == 1.0


def test_waiting_for_the_sandbox_is_no_fault_that_the_policy_reads(tokenizer, verifier):
    limit = assembly.budget(parse(["--task=math"])).tool_timeout_s
    turns = ["<code>while True: pass</code>", ANSWER]
    trajectory = episode(tokenizer, verifier, turns, tool_timeout_s=limit)
    assert trajectory.reward == 1.0 and "tool_errors" not in trajectory.info
    assert trajectory.info["limits"] == 1.0
    # Longer than all episodes in flight could make one wait.
    assert limit > 1e6


def test_code_in_a_turn_that_was_cut_is_not_run(tokenizer, verifier):
    trajectory = episode(tokenizer, verifier, [CODE.removesuffix("</code>")])
    assert (trajectory.reward, trajectory.status) == (0.0, "truncated")
    assert trajectory.info["calls"] == 0.0


def test_calling_for_ever_is_cut_and_earns_nothing(tokenizer, verifier):
    turns = [rf"\boxed{{5535}}{CODE}"] * 3
    trajectory = episode(tokenizer, verifier, turns, max_turns=3)
    assert (trajectory.reward, trajectory.status) == (0.0, "truncated")
    assert trajectory.info["turns"] == 3.0
