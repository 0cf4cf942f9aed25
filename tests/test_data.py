"""The tokenizer and the stream of prompts."""

import json
import logging

import pytest

from copc_jax import data
from copc_jax.types import Prompt

TAGS = ("<answer>", "</answer>")


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 260"):
        data.train_tokenizer(["text"], 259, tags=TAGS)
    small = data.train_tokenizer(["text"], 260, tags=TAGS)
    assert small.decode(small.encode("ü<answer>").ids) == "ü<answer>"


def test_a_pattern_bounds_what_a_token_spans():
    texts = ["12345678 1234 5678"] * 20
    merged = data.train_tokenizer(texts, 300)
    assert len(merged.encode("12345678").ids) < 8
    single = data.train_tokenizer(texts, 300, pattern=r"\d")
    assert len(single.encode("12345678").ids) == 8
    triples = data.train_tokenizer(["123 456 78 678"] * 20, 300, pattern=r"\d{1,3}|[^\d]+")
    # The same tokens wherever a number stands.
    assert triples.encode("12345678").tokens == ["123", "456", "78"]
    assert triples.encode("x 123+456").tokens[-3:] == ["123", "+", "456"]
    for tokenizer in (merged, single, triples):
        assert tokenizer.decode(tokenizer.encode(" 12 +\n345 ü").ids) == " 12 +\n345 ü"


# Prompts


PROMPTS = [
    Prompt(f"p{i}", messages=({"role": "user", "content": f"q{i}"},), gold=(str(i),))
    for i in range(10)
]


def ids(iterator, count):
    return [next(iterator).prompt_id for _ in range(count)]


def test_every_epoch_holds_each_prompt_once_in_a_new_order():
    iterator = data.prompt_iterator(PROMPTS, 0)
    epochs = [ids(iterator, 10) for _ in range(3)]
    everything = sorted(p.prompt_id for p in PROMPTS)
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(data.prompt_iterator(PROMPTS, 0), 10) == epochs[0]
    assert ids(data.prompt_iterator(PROMPTS, 1), 10) != epochs[0]


@pytest.mark.parametrize("consumed", [0, 1, 10, 17])
def test_a_restored_stream_goes_on_with_the_same_prompts(consumed):
    iterator = data.prompt_iterator(PROMPTS, 5)
    ids(iterator, consumed)
    state = json.loads(json.dumps(iterator.get_state()))
    following = ids(iterator, 15)
    restored = data.prompt_iterator(PROMPTS, 5)
    ids(restored, 3)
    restored.set_state(state)
    assert ids(restored, 15) == following


@pytest.mark.parametrize(
    ("prompts", "seed", "what"),
    [
        (PROMPTS[:9], 0, "count: saved 10, now 9"),
        ([*PROMPTS[:9], Prompt("p9", token_ids=(1,))], 0, "sha256"),
        (PROMPTS[::-1], 0, "sha256"),
        (PROMPTS, 1, "seed: saved 0, now 1"),
    ],
)
def test_a_position_in_other_data_is_refused(prompts, seed, what):
    state = data.prompt_iterator(PROMPTS, 0).get_state()
    with pytest.raises(ValueError, match="another data set") as error:
        data.prompt_iterator(prompts, seed).set_state(state)
    assert what in str(error.value)


def test_processes_share_the_prompts():
    slices = [
        ids(data.prompt_iterator(PROMPTS, 0, process_index=i, process_count=2), 5) for i in (0, 1)
    ]
    assert sorted(slices[0] + slices[1]) == sorted(p.prompt_id for p in PROMPTS)
    with pytest.raises(ValueError, match="not below process_count"):
        data.prompt_iterator(PROMPTS, 0, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="too few"):
        data.prompt_iterator(PROMPTS[:1], 0, process_index=0, process_count=2)


def test_a_position_among_other_processes_is_refused_until_it_is_dealt_anew():
    """C102: as many prompts count as taken as before, and later epochs hold each once."""
    old = [data.prompt_iterator(PROMPTS, 0, process_index=i, process_count=2) for i in (0, 1)]
    assert not set(ids(old[0], 4)) & set(ids(old[1], 3))
    states = [json.loads(json.dumps(iterator.get_state())) for iterator in old]
    (whole,) = [data.prompt_iterator(PROMPTS, 0)]
    with pytest.raises(ValueError, match="process 1 of 2, this is process 0 of 1"):
        whole.set_state(states[1])
    assert ids(whole, 10) == ids(data.prompt_iterator(PROMPTS, 0), 10)
    for count in (1, 2, 5):
        dealt = data.deal_positions(states, count)
        new = [
            data.prompt_iterator(PROMPTS, 0, process_index=i, process_count=count)
            for i in range(count)
        ]
        for iterator, state in zip(new, dealt, strict=True):
            iterator.set_state(state)
        left = [10 // count - state["position"]["next_index"] for state in dealt]
        assert sum(left) == 3
        # After what is left of this epoch comes a whole one.
        for iterator, rest in zip(new, left, strict=True):
            ids(iterator, rest)
        following = [name for iterator in new for name in ids(iterator, 10 // count)]
        assert sorted(following) == sorted(prompt.prompt_id for prompt in PROMPTS)


def test_long_prompts_are_left_out_and_counted(caplog):
    prompts = [Prompt("short", token_ids=(1,) * 5), Prompt("long", token_ids=(1,) * 50)]
    with caplog.at_level(logging.WARNING, logger="copc_jax.data"):
        iterator = data.prompt_iterator(
            prompts, 0, max_prompt_tokens=10, encode=lambda p: p.token_ids
        )
    assert ids(iterator, 3) == ["short"] * 3
    assert "left out 1 of 2 prompts with more than 10 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"all 1 prompts.*rollout\.max_tokens"):
        data.prompt_iterator(prompts[1:], 0, max_prompt_tokens=10, encode=lambda p: p.token_ids)
    with pytest.raises(ValueError, match="needs encode"):
        data.prompt_iterator(prompts, 0, max_prompt_tokens=10)
