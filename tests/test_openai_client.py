"""OpenAI's own client against the embedded server, a process of its own."""

import json

import numpy as np
import pytest
from test_server import (
    CLOSE,
    CONFIG,
    MAX_LENGTH,
    PARAMS,
    PROMPT,
    SLOTS,
    TOKENIZER,
    logprobs_of,
    response_logprobs,
)

from copc_jax import hf
from copc_jax.rollout.launch import launch_embedded

openai = pytest.importorskip("openai", reason="the group test has it: uv sync")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MESSAGES = [{"role": "user", "content": "what is it"}]
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hf.save_hf(
        folder,
        PARAMS["default"],
        CONFIG,
        tokenizer_json=TOKENIZER.to_str(),
        extra_files={"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})},
    )
    with (
        launch_embedded(
            folder,
            log_file=folder / "log",
            slots=SLOTS,
            max_length=MAX_LENGTH,
            arguments=["--steps-per-dispatch", "2", "--prefill-chunks", "32", "--attend", "128"],
            timeout_s=280.0,
        ) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=200.0, max_retries=0
        ) as client,
    ):
        yield client


def complete(client, **more):
    return client.completions.create(**{"model": "m", "prompt": PROMPT, "max_tokens": 5, **more})


def chat(client, **more):
    return client.chat.completions.create(
        **{"model": "m", "messages": MESSAGES, "max_tokens": 5, **more}
    )


def test_models_are_listed(client):
    assert len(client.models.list().data) == 1


def test_completion_of_ids_has_the_logprobs_of_a_forward_pass(client):
    answer = complete(client, logprobs=2, extra_body=IDS)
    [choice] = answer.choices
    assert choice.prompt_token_ids == PROMPT
    assert choice.text == TOKENIZER.decode(choice.token_ids)
    assert choice.finish_reason == "length"
    wanted = response_logprobs("default", PROMPT, choice.token_ids)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, wanted, **CLOSE)
    assert [len(others) for others in choice.logprobs.top_logprobs] == [2] * 5
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 5)
    assert usage.total_tokens == len(PROMPT) + 5
    assert answer.metadata["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]


def test_completion_of_text_repeats_with_a_seed(client):
    answers = [complete(client, prompt="what is", seed=3).choices[0].text for _ in range(2)]
    assert answers[0] == answers[1]
    assert complete(client, prompt="what is", max_tokens=None).usage.completion_tokens <= 16


def test_echo_scores_the_prompt(client):
    choice = complete(client, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == TOKENIZER.decode(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    rows = logprobs_of("default", PROMPT)
    wanted = rows[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], wanted, **CLOSE)


def test_samples_and_prompts_are_numbered_in_order(client):
    prompts = [PROMPT, PROMPT[:4]]
    answer = complete(client, prompt=prompts, n=2, extra_body=IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in answer.choices] == [
        prompt for prompt in prompts for _ in range(2)
    ]
    assert answer.usage.prompt_tokens == len(PROMPT) + 4
    assert answer.usage.completion_tokens == 20


def test_stop_ends_a_text_before_it(client):
    whole = complete(client, temperature=0, max_tokens=12).choices[0].text
    stop = whole[4]
    choice = complete(client, temperature=0, max_tokens=12, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop" and choice.matched_stop == stop
    assert choice.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_adds_up_to_the_whole(client, ask):
    common = {"temperature": 0, "max_tokens": 9}
    whole = ask(client, **common, logprobs=1 if ask is complete else True)
    pieces = list(
        ask(
            client,
            **common,
            logprobs=1 if ask is complete else True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = pieces
    assert len(chunks) > 1
    assert last.choices == [] and last.usage == whole.usage
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    if ask is complete:
        assert "".join(choice.text for choice in choices) == whole.choices[0].text
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        assert tokens == whole.choices[0].logprobs.tokens
    else:
        assert choices[0].delta.role == "assistant"
        text = "".join(choice.delta.content for choice in choices)
        assert text == whole.choices[0].message.content
        tokens = [token.token for choice in choices for token in choice.logprobs.content]
        assert tokens == [token.token for token in whole.choices[0].logprobs.content]


def test_chat_goes_through_the_template_of_the_model(client):
    answer = chat(client, n=2, logprobs=True, top_logprobs=2, extra_body=IDS)
    prompt = TOKENIZER.encode("user: what is it\nassistant:").ids
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.prompt_token_ids == prompt
        assert choice.message.role == "assistant"
        assert choice.message.content == TOKENIZER.decode(choice.response_token_ids)
        wanted = response_logprobs("default", prompt, choice.response_token_ids)
        found = [token.logprob for token in choice.logprobs.content]
        np.testing.assert_allclose(found, wanted, **CLOSE)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.choices[0].response_token_ids != answer.choices[1].response_token_ids
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("ask", "wrong", "words"),
    [
        (complete, {"prompt": [5] * (MAX_LENGTH + 1)}, "context length"),
        (complete, {"prompt": [CONFIG.vocab_size]}, "vocabulary"),
        (complete, {"prompt": ""}, "empty"),
        (complete, {"temperature": -1}, "temperature"),
        (complete, {"max_tokens": "four"}, "four"),
        (complete, {"stream": True, "prompt": []}, "empty"),
        (complete, {"stream": True, "echo": True}, "echo"),
        (complete, {"suffix": "x"}, "suffix"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "role and a text"),
        (chat, {"frequency_penalty": 1.0}, "frequency_penalty"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request_that_says_why(client, ask, wrong, words):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(client, **wrong)
    assert refused.value.status_code == 400
    assert refused.value.type == "BadRequestError"
