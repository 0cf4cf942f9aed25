"""The engine in process: random numbers, the choice of tokens, slots, scheduling and faults."""

import contextlib
import queue
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copc_jax import model
from copc_jax.rollout.engine import Engine, EngineDead
from copc_jax.rollout.programs import EngineConfig
from copc_jax.rollout.requests import Request, Sampling
from copc_jax.rollout.sampling import derive_seed, sample, uniform

# Not a multiple of the sampler's block of 64.
VOCAB = 300
CONFIG = model.ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
SIZES = EngineConfig(
    slots=3,
    max_length=96,
    steps_per_dispatch=4,
    prefill_rows=(2,),
    prefill_chunks=(8,),
    attend=(16,),
)


def make_params(seed):
    params = model.init(jax.random.key(seed), CONFIG)
    return {**params, "embed": params["embed"] * 20.0}


PARAMS = make_params(0)


def decode(ids):
    """One letter a token, so that tests can write stop strings."""
    return "".join(chr(ord("a") + token % 26) for token in ids)


class Running:
    """An engine and its outputs as they come."""

    def __init__(self, sizes=SIZES, params=PARAMS, decode=decode):
        self.outputs = queue.Queue()
        self.deaths = queue.Queue()
        self.engine = Engine(
            params,
            CONFIG,
            sizes,
            decode=decode,
            on_outputs=lambda outputs: [self.outputs.put(output) for output in outputs],
            on_death=self.deaths.put,
            eos_ids=(VOCAB - 1,),
        )
        self.engine.start()

    def finish(self, *requests):
        """Run requests to their ends and give the outputs in order of the requests."""
        self.engine.submit(requests).result(60)
        return self.collect(*requests)

    def collect(self, *requests):
        done, rids = {}, {request.rid for request in requests}
        while len(done) < len(rids):
            output = self.outputs.get(timeout=60)
            if output.finish is not None and output.request.rid in rids:
                done[output.request.rid] = output
        return [done[request.rid] for request in requests]


@contextlib.contextmanager
def engine(**more):
    running = Running(**more)
    try:
        yield running
    finally:
        assert running.engine.stop(30)


@pytest.fixture(scope="module")
def shared():
    with engine() as running:
        yield running


@pytest.fixture
def running(shared):
    """One engine for most tests, paused by none and with nothing cached."""
    shared.engine.resume().result(60)
    assert shared.engine.flush().result(60)
    return shared


def request(rid, prompt=(1, 2, 3), *, seed=0, stream=False, namespace="", **sampling):
    settings = Sampling(**{"ignore_eos": True, **sampling})
    ids = np.array(prompt, np.int32)
    return Request(rid, ids, settings, seed=seed, stream=stream, namespace=namespace)


# ------------------------------------------------------------------------------------ randomness


def test_random_numbers_are_uniform_and_depend_on_seed_and_index_alone():
    seeds = np.arange(200, dtype=np.uint64)[None]
    index = np.arange(100, dtype=np.uint64)[:, None]
    numbers = uniform(seeds, index)
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0 and numbers.max() < 1
    # 20,000 numbers: each tenth holds 2,000, with a standard deviation of 42.
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 2000).max() < 5 * 42
    # Neighbors in either direction, and along the diagonal, are not correlated: deviation 0.007.
    for other in (np.roll(numbers, 1, 0), np.roll(numbers, 1, 1), np.roll(numbers, (1, 1), (0, 1))):
        assert abs(np.corrcoef(numbers.ravel(), other.ravel())[0, 1]) < 5 * 0.0071
    one = uniform(np.array([17], np.uint64), np.array([42], np.uint64))
    assert one[0] == numbers[42, 17]


def test_derived_seeds_are_distinct_and_begin_with_their_base():
    seeds = [derive_seed(base, index) for base in (0, 1, 2) for index in range(100)]
    assert len(set(seeds)) == 300
    assert (seeds[0], seeds[100]) == (0, 1)
    assert derive_seed(-1, 0) == 2**64 - 1
    assert 0 <= derive_seed(-1, 5) < 2**64


# ------------------------------------------------------------------------------------ sampling

LOGITS = np.random.default_rng(0).normal(0.0, 2.0, VOCAB).astype(np.float32)
sample_jit = jax.jit(sample)


def draw(numbers, *, logits=LOGITS, temperature=1.0, top_k=2**31 - 1, top_p=1.0, min_p=0.0):
    """Draw one token for each random number; gives tokens and log-probabilities."""
    n = len(numbers)
    token, logprob, _ = sample_jit(
        jnp.broadcast_to(jnp.array(logits), (n, len(logits))),
        jnp.array(numbers, jnp.float32),
        jnp.full(n, temperature, jnp.float32),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
        jnp.full(n, min_p, jnp.float32),
    )
    return np.asarray(token), np.asarray(logprob)


EVEN = (np.arange(20_000) + 0.5) / 20_000


def softmax(logits, temperature):
    weight = np.exp(logits.astype(np.float64) / temperature)
    return weight / weight.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_their_probability(temperature):
    token, logprob = draw(EVEN, temperature=temperature)
    expected = softmax(LOGITS, temperature)
    counts = np.bincount(token, minlength=VOCAB)
    # Evenly spaced numbers meet every interval of the CDF within one.
    assert np.abs(counts - expected * len(EVEN)).max() < 1.5
    np.testing.assert_allclose(logprob, np.log(expected)[token], atol=1e-5)


def kept_tokens(top_k, top_p, min_p):
    """Say in float64 which tokens the three rules leave."""
    probability = softmax(LOGITS, 1.0)
    order = np.argsort(-probability)
    sorted_probability = probability[order]
    likelier = np.cumsum(sorted_probability) - sorted_probability
    kept = (np.arange(VOCAB) < top_k) & (likelier <= top_p)
    return order[kept & (sorted_probability >= min_p * sorted_probability[0])]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (VOCAB + 9, 0.7, 0.0), (VOCAB + 9, 1.0, 0.2), (10, 0.6, 0.1)],
)
def test_truncation_leaves_the_right_tokens_in_proportion(top_k, top_p, min_p):
    token, logprob = draw(EVEN, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_tokens(top_k, top_p, min_p)
    assert set(token.tolist()) == set(kept.tolist())
    probability = softmax(LOGITS, 1.0)
    expected = np.where(np.isin(np.arange(VOCAB), kept), probability, 0.0)
    counts = np.bincount(token, minlength=VOCAB) / len(EVEN)
    np.testing.assert_allclose(counts, expected / expected.sum(), atol=2e-4)
    # The log-probability is that before the truncation.
    np.testing.assert_allclose(logprob, np.log(probability)[token], atol=1e-5)


def test_rows_do_not_feel_the_settings_of_other_rows():
    plain, _ = draw(EVEN[::200])
    n = len(plain)
    mixed, _, _ = sample_jit(
        jnp.broadcast_to(jnp.array(LOGITS), (n, VOCAB)),
        jnp.array(EVEN[::200], jnp.float32),
        jnp.ones(n, jnp.float32),
        jnp.array([1, 2**31 - 1, 3, 2**31 - 1] * (n // 4), jnp.int32),
        jnp.ones(n, jnp.float32),
        jnp.zeros(n, jnp.float32),
    )
    np.testing.assert_array_equal(np.asarray(mixed)[1::2], plain[1::2])
    assert (np.asarray(mixed)[::4] == LOGITS.argmax()).all()


@pytest.mark.parametrize("size", [1, 3, 64, 65, 300])
def test_impossible_tokens_are_never_drawn(size):
    # One possible token, wherever it stands, at both ends of the random numbers.
    for place in {0, size // 2, size - 1}:
        logits = np.full(size, -np.inf, np.float32)
        logits[place] = 3.0
        token, logprob = draw([0.0, 0.5, 1 - 2**-24], logits=logits)
        assert token.tolist() == [place] * 3
        np.testing.assert_allclose(logprob, 0.0, atol=1e-6)


# ------------------------------------------------------------------------------------ slots


def test_tokens_do_not_depend_on_sizes_of_the_engine(running):
    requests = [request(str(i), range(1, 4 + 7 * i), seed=i, max_new_tokens=30) for i in range(6)]
    here = running.finish(*requests)
    sizes = EngineConfig(
        slots=5,
        max_length=80,
        steps_per_dispatch=7,
        prefill_rows=(1,),
        prefill_chunks=(16,),
        attend=(),
    )
    with engine(sizes=sizes) as other:
        there = other.finish(*reversed(requests))[::-1]
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_allclose(mine.logprob, theirs.logprob, atol=1e-4)


def test_few_requests_compute_few_rows_once_a_smaller_program_is_compiled():
    sizes = EngineConfig(
        slots=8,
        max_length=96,
        steps_per_dispatch=4,
        decode_rows=(1, 2),
        prefill_rows=(1, 4),
        prefill_chunks=(8, 32),
        attend=(32,),
    )
    asked = [
        request("one", range(1, 5), seed=1, max_new_tokens=16),
        request("two", range(2, 30), seed=2, max_new_tokens=32),
    ]
    with engine(sizes=sizes) as running:
        computed = lambda: running.engine.counters()["tokens_computed"]
        first = [running.finish(each)[0] for each in asked]
        # The largest program stood in, if the smaller one was not ready.
        deadline = time.monotonic() + 60
        while running.engine.counters()["compiling"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = computed()
        alone = [running.finish(each)[0] for each in asked]
        assert computed() - before == 16 + 32
        # Keys and values that one-row programs wrote back are those of the next turn.
        prompt = [*range(2, 30), *alone[1].token_ids.tolist(), 5]
        (turn,) = running.finish(request("turn", prompt, max_new_tokens=8))
        (apart,) = running.finish(request("x", prompt, max_new_tokens=8, namespace="other"))
        assert (turn.cached_tokens, apart.cached_tokens) == (28 + 32 - 1, 0)
        np.testing.assert_array_equal(turn.token_ids, apart.token_ids)
        before = computed()
        running.finish(*(request(f"r{i}", max_new_tokens=4) for i in range(8)))
        assert computed() - before == 8 * 4
    for one, other in zip(first, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)


def test_requests_start_in_the_order_they_came(running):
    requests = [request(f"{i}", max_new_tokens=8, stream=True) for i in range(7)]
    running.engine.submit(requests).result(60)
    seen, ended = [], 0
    while ended < 7:
        output = running.outputs.get(timeout=60)
        ended += output.finish is not None
        if output.request.rid not in seen:
            seen.append(output.request.rid)
    assert seen == [r.rid for r in requests]


def test_full_length_can_be_used(running):
    whole = SIZES.max_length
    (output,) = running.finish(request("a", range(1, 11), max_new_tokens=whole - 10))
    assert len(output.token_ids) == whole - 10
    (output,) = running.finish(request("b", range(1, whole), max_new_tokens=1))
    assert len(output.token_ids) == 1
    (output,) = running.finish(request("c", [5] * whole, max_new_tokens=0))
    assert output.finish.kind == "length" and len(output.token_ids) == 0


def test_next_turn_goes_on_in_its_own_slot_while_others_come_and_go(running):
    # Two episodes; between their turns, other requests pass through the third slot, which has then
    # been idle for longest.
    turns = {name: [3, 1, 4, ord(name)] for name in "xy"}
    for turn in range(3):
        for name, ids in turns.items():
            (output,) = running.finish(
                request(f"{name}{turn}", ids, seed=ord(name), max_new_tokens=9)
            )
            # All that the last turn computed; its newest token was sampled but not fed.
            assert output.cached_tokens == (0 if turn == 0 else len(ids) - 1 - 5)
            turns[name] = [*ids, *output.token_ids.tolist(), 7, 7, 7, 7, 7]
        running.finish(request(f"other {turn}", [9, 9, turn], max_new_tokens=3))


def test_cached_prefix_gives_the_tokens_of_a_fresh_start(running):
    (first,) = running.finish(request("a", range(1, 20), max_new_tokens=20))
    prompt = [*range(1, 20), *first.token_ids.tolist(), 8, 8]
    (cached,) = running.finish(request("b", prompt, seed=5, max_new_tokens=20))
    assert cached.cached_tokens == 19 + 20 - 1
    (apart,) = running.finish(request("c", prompt, seed=5, max_new_tokens=20, namespace="other"))
    assert apart.cached_tokens == 0
    np.testing.assert_array_equal(apart.token_ids, cached.token_ids)
    np.testing.assert_allclose(apart.logprob, cached.logprob, atol=1e-4)


def test_other_weights_share_no_prefix_and_bring_their_name(running):
    (first,) = running.finish(request("a", max_new_tokens=9))
    assert running.engine.update(make_params(1), "next", flush=False).result(60) == 0
    prompt = [1, 2, 3, *first.token_ids.tolist()]
    (after,) = running.finish(request("b", prompt, max_new_tokens=4))
    assert after.cached_tokens == 0
    assert [(s.version, s.start, s.end) for s in after.spans] == [("next", 0, 4)]
    running.engine.update(PARAMS, "default").result(60)


def test_pause_takes_hold_between_two_dispatches(running):
    """Pause from the engine's own thread at the first sign of tokens: no timing involved."""
    taken = []
    original = running.engine._on_outputs

    def pause_once(outputs):
        if not taken:
            taken.extend(outputs)
            running.engine.pause("retract")
        original(outputs)

    running.engine._on_outputs = pause_once
    long = request("a", seed=1, max_new_tokens=40, stream=True)
    running.engine.submit([long]).result(60)
    assert running.outputs.get(timeout=60).finish is None
    running.engine.relabel("next").result(60)
    assert running.engine.load() | {"tokens": 0} == {
        "running": 0,
        "waiting": 1,
        "retracted": 1,
        "frozen": 0,
        "tokens": 0,
    }
    running.engine.resume().result(60)
    (output,) = running.collect(long)
    running.engine._on_outputs = original
    running.engine.relabel("default").result(60)
    count = len(taken[0].token_ids)
    assert [(s.version, s.start, s.end) for s in output.spans] == [
        ("default", 0, count),
        ("next", count, 40),
    ]
    # Retraction and a cached continuation leave no trace in the tokens.
    (plain,) = running.finish(request("b", seed=1, max_new_tokens=40))
    np.testing.assert_array_equal(output.token_ids, plain.token_ids)
    np.testing.assert_allclose(output.logprob, plain.logprob, atol=1e-4)


def test_stop_string_is_found_at_every_offset_in_a_dispatch(running):
    (plain,) = running.finish(request("plain", seed=4, max_new_tokens=40))
    text = decode(plain.token_ids.tolist())
    requests, expected = [], []
    for end in range(3, 20):
        stop = text[end - 3 : end]
        requests.append(request(f"{end}", seed=4, max_new_tokens=40, stop=("nothing", stop)))
        expected.append((text.index(stop) + 3, stop))
    outputs = running.finish(*requests)
    assert [(len(o.token_ids), o.finish.matched) for o in outputs] == expected


def test_more_stop_tokens_than_usual(running):
    (plain,) = running.finish(request("plain", seed=4, max_new_tokens=30))
    wanted = int(plain.token_ids[10])
    first = plain.token_ids.tolist().index(wanted)
    others = tuple(token for token in range(VOCAB) if token not in plain.token_ids)[:20]
    (output,) = running.finish(
        request("stop", seed=4, max_new_tokens=30, stop_token_ids=(*others, wanted))
    )
    assert len(output.token_ids) == first + 1
    assert output.finish.matched == wanted


# ------------------------------------------------------------------------------------ faults


def test_weights_that_give_nan_abort_and_leave_nothing_behind(running):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, PARAMS)
    (before,) = running.finish(request("a", seed=3, max_new_tokens=10))
    running.engine.update(broken, "broken").result(60)
    outputs = running.finish(*(request(f"{i}", range(1, 9), max_new_tokens=5) for i in range(6)))
    assert all(o.finish.kind == "abort" and "not finite" in o.finish.message for o in outputs)
    assert all(len(o.token_ids) == len(o.logprob) == 0 for o in outputs)
    running.engine.update(PARAMS, "default").result(60)
    afterwards = running.finish(
        *(request(f"{i}", seed=3, max_new_tokens=10) for i in range(SIZES.slots))
    )
    for output in afterwards:
        np.testing.assert_array_equal(output.token_ids, before.token_ids)


def test_dead_engine_says_so():
    def broken_decode(ids):
        raise RuntimeError("no text today")

    running = Running(decode=broken_decode)
    running.engine.submit([request("a", max_new_tokens=5, stop=("x",))]).result(60)
    assert "no text today" in str(running.deaths.get(timeout=60))
    with pytest.raises(EngineDead, match="no text today"):
        running.engine.submit([request("b")]).result(60)
    with pytest.raises(EngineDead):
        running.engine.update(PARAMS, "1").result(60)
    assert running.engine.stop(30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 0),
        ("max_length", 0),
        ("steps_per_dispatch", 0),
        ("prefill_rows", ()),
        ("attend", (0,)),
    ],
)
def test_impossible_sizes_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})


# ----------------------------------------------------------------------------------- determinism


def test_a_deterministic_engine_gives_the_same_bits_whatever_runs_beside():
    sizes = EngineConfig(
        slots=3,
        max_length=96,
        steps_per_dispatch=4,
        prefill_rows=(1, 2),
        prefill_chunks=(8, 32),
        attend=(16, 32),
        deterministic=True,
    )
    lengths = (5, 12, 40, 3, 20)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, VOCAB - 1, n).tolist()) for n in lengths]
    asked = [
        request(f"r{i}", prompt, seed=i, max_new_tokens=9 + 4 * i)
        for i, prompt in enumerate(prompts)
    ]
    with engine(sizes=sizes) as alone:
        expected = [alone.finish(one)[0] for one in asked]
        # The next turn of an episode, whose beginning the last one has left in its slot.
        turn = (*prompts[4], *expected[4].token_ids.tolist(), 1, 2, 3)
        follow = request("next", turn, seed=9, max_new_tokens=8)
        expected.append(alone.finish(follow)[0])
    with engine(sizes=sizes) as crowded:
        # Another order, all at once, with three slots for five.
        found = crowded.finish(*asked[::-1])[::-1]
        found += crowded.finish(follow, request("beside", prompts[2], seed=5, max_new_tokens=6))[:1]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprob, other.logprob)
        assert one.cached_tokens == other.cached_tokens == 0
