"""Checkpoints: what is saved comes back, whole or not at all, and nothing good is ever lost."""

import contextlib
import gc
import json
import logging
import pathlib
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from copc_jax.checkpoint import Checkpointer, CheckpointError, abstract, decode_host, encode_host
from copc_jax.learner import OptimizerConfig, learning_rate_schedule, optimizer
from copc_jax.types import LearnerState

# Warms up as AReaL does in search.
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_updates=25)
OPTIMIZER = optimizer(SETTINGS, 30)
HOST = {
    "rollout": b"\x00collector\xff",
    "data": {"next_index": 12, "fingerprint": "abc"},
    "run": {"seed": 3, "config": {"staleness": 64, "loss": {"eta": 0.5, "clip": [0.2, 0.28]}}},
}


def small_state(scale: float = 1.0, width: int = 8) -> LearnerState:
    actor = {"embed": scale * jnp.arange(4.0 * width).reshape(4, width) / 7, "norm": jnp.ones(4)}
    critic = {"head": scale * jnp.linspace(-1.0, 1.0, width)}
    return LearnerState(
        version=jnp.int32(0),
        actor=actor,
        critic=critic,
        actor_opt={"optax": OPTIMIZER.init(actor), "key": jax.random.key(5)},
        critic_opt=OPTIMIZER.init(critic),
    )


@jax.numpy_dtype_promotion("standard")  # optax mixes floats with its int32 counter
def one_step(state: LearnerState) -> LearnerState:
    loss = lambda params: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(params))
    updates, optimizer = OPTIMIZER.update(
        jax.grad(loss)(state.actor), state.actor_opt["optax"], state.actor
    )
    return state.replace(
        version=state.version + 1,
        actor=optax.apply_updates(state.actor, updates),
        actor_opt={**state.actor_opt, "optax": optimizer},
    )


def numbers(tree) -> list[np.ndarray]:
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [
        np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def assert_equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(numbers(left), numbers(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def place(state: LearnerState, devices: int) -> LearnerState:
    """Two-dimensional leaves are split over columns, everything else is replicated."""
    mesh = jax.make_mesh(
        (devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    split = lambda leaf: NamedSharding(mesh, P(None, "model") if leaf.ndim == 2 else P())
    return jax.device_put(state, jax.tree.map(split, state))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_saved_on_four_devices_restores_on_any_number(tmp_path, devices):
    state = one_step(place(small_state(), 4))
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, state, HOST)
    target = abstract(place(small_state(), devices))
    restored, host = Checkpointer(tmp_path).restore(None, target)
    assert_equal(restored, state)
    assert host == HOST
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    moments = restored.actor_opt["optax"][1][0]
    assert len(moments.mu["embed"].sharding.device_set) == devices
    assert moments.nu["embed"].sharding.spec == P(None, "model")


def test_donated_right_after_the_save(tmp_path):
    state = place(small_state(width=4096), 4)
    expected = numbers(state)
    overwrite = jax.jit(one_step, donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, HOST)
        moved = overwrite(overwrite(overwrite(state)))
        checkpointer.wait()
        restored, _ = checkpointer.restore(7, abstract(moved))
        with pytest.raises(ValueError, match=r"cannot save step 8: leaf actor/embed was donated"):
            checkpointer.save(8, state.replace(version=moved.version), HOST)
    for a, b in zip(numbers(restored), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_host_objects_may_move_on_during_the_save(tmp_path):
    position = np.array([3])
    host = {"run": {"position": position}, "data": {"next_index": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(), host)
        position[0], host["data"]["next_index"] = 99, 99
        checkpointer.wait()
        saved = checkpointer.restore_host()
    assert saved["run"]["position"].tolist() == [3] and saved["data"]["next_index"] == 1


def test_resumed_run_is_bit_equal_schedule_and_moments_included(tmp_path):
    step = jax.jit(one_step)
    uninterrupted = [place(small_state(), 1)]
    for _ in range(30):
        uninterrupted.append(step(uninterrupted[-1]))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(13, uninterrupted[13], HOST)
    state, _ = Checkpointer(tmp_path).restore(None, abstract(uninterrupted[0]))
    for version in range(14, 31):
        state = step(state)
        assert_equal(state, uninterrupted[version])
    # Neither restarted nor advanced twice: of 25 updates, the 13th has 13/25 of the rate.
    rate = learning_rate_schedule(SETTINGS, 30)
    rates = [float(rate(s.actor_opt["optax"][1][2].count)) for s in uninterrupted[:-1]]
    assert rates == pytest.approx([1e-2 * min(update / 25, 1) for update in range(1, 31)], rel=1e-5)
    assert int(state.actor_opt["optax"][1][2].count) == 30


def test_saves_in_a_row_are_never_skipped_and_old_steps_go(tmp_path):
    state = small_state(width=4096)
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        assert all(checkpointer.save(step, state, HOST) for step in range(1, 7))
    assert checkpointer.steps() == [4, 5, 6] and checkpointer.latest() == 6


def test_a_stored_step_is_not_written_again(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(5, small_state(), HOST)
        assert not checkpointer.save(5, small_state(scale=2.0), HOST)
        with pytest.raises(ValueError, match="step 4 comes before step 5"):
            checkpointer.save(4, small_state(), HOST)
        restored, _ = checkpointer.restore(5, abstract(small_state()))
    assert_equal(restored, small_state())


@contextlib.contextmanager
def files_of_at_most(size: int):
    """The system refuses larger files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def incompressible(step: int) -> LearnerState:
    noise = np.random.default_rng(step).normal(size=(64, 1024)).astype(np.float32)
    return small_state().replace(critic={"noise": jnp.asarray(noise)})


@pytest.mark.parametrize("notice", ["check", "wait", "close", "save"])
def test_failed_background_save_is_reported_and_the_last_good_step_stays(tmp_path, notice):
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, incompressible(1), HOST)
    checkpointer.wait()
    refused = pytest.raises(CheckpointError, match=r"saving step 2 .*last complete step is 1")
    with files_of_at_most(20_000), refused:
        checkpointer.save(2, incompressible(2), HOST)
        if notice == "check":
            for _ in range(1_000):
                checkpointer.check()
                time.sleep(0.01)
        elif notice == "save":
            checkpointer.save(3, incompressible(3), HOST)
        else:
            getattr(checkpointer, notice)()
    checkpointer.check()
    assert checkpointer.steps() == [1]
    checkpointer.save(3, incompressible(3), HOST)
    checkpointer.close()
    assert checkpointer.steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]


# Callbacks of a failed save find its event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_of_which_nothing_can_be_written_is_reported_as_such(tmp_path, caplog):
    """Also what describes the step fails, and does so again when the writer is closed."""
    # What is logged goes into a file too.
    caplog.set_level(logging.CRITICAL, "absl")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small_state(), HOST)
    checkpointer.wait()
    refused = pytest.raises(CheckpointError, match=r"saving step 2 .*last complete step is 1")
    with files_of_at_most(0), refused:
        checkpointer.save(2, small_state(), HOST)
        checkpointer.wait()
    assert checkpointer.steps() == [1]


def test_a_folder_that_takes_nothing_is_said_at_once_and_leaves_no_thread(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, small_state(), HOST)
    checkpointer.wait()
    known = set(threading.enumerate())
    # A file system that takes no folder, from the superuser neither.
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").symlink_to("/proc/sys")
    with pytest.raises(CheckpointError, match=r"saving step 2 to .*Errno"):
        checkpointer.save(2, small_state(), HOST)
    assert set(threading.enumerate()) <= known


def empty_directory(path: pathlib.Path, good: pathlib.Path) -> None:
    path.mkdir()


def killed_save(path: pathlib.Path, good: pathlib.Path) -> None:
    shutil.copytree(good, path.with_name(path.name + ".orbax-checkpoint-tmp"))


def uncommitted(path: pathlib.Path, good: pathlib.Path) -> None:
    shutil.copytree(good, path)
    file = path / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit_timestamp_nsecs": None}))


def cut_metadata(path: pathlib.Path, good: pathlib.Path) -> None:
    shutil.copytree(good, path)
    file = path / "_CHECKPOINT_METADATA"
    file.write_bytes(file.read_bytes()[:40])


def half_copied(path: pathlib.Path, good: pathlib.Path) -> None:
    shutil.copytree(good, path, ignore=shutil.ignore_patterns("host"))


@pytest.mark.parametrize(
    "damage", [empty_directory, killed_save, uncommitted, cut_metadata, half_copied]
)
def test_half_written_higher_step_is_ignored_and_can_be_saved_anew(tmp_path, damage):
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(20, small_state(), HOST)
    damage(tmp_path / "30", tmp_path / "20")
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        before = sorted(path.name for path in tmp_path.iterdir())
        assert checkpointer.latest() == 20
        restored, _ = checkpointer.restore(None, abstract(small_state()))
        assert_equal(restored, small_state())
        assert sorted(path.name for path in tmp_path.iterdir()) == before, "reading moved a file"
        checkpointer.save(30, small_state(scale=3.0), HOST)
    assert checkpointer.steps() == [30]
    restored, _ = checkpointer.restore(30, abstract(small_state()))
    assert_equal(restored, small_state(scale=3.0))


def test_missing_and_foreign_checkpoints(tmp_path):
    target = abstract(small_state())
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        Checkpointer(tmp_path / "nowhere").restore(None, target)
    assert (
        not (tmp_path / "nowhere").exists() and Checkpointer(tmp_path / "nowhere").latest() is None
    )
    with pytest.raises(CheckpointError, match="no step at all"):
        Checkpointer(tmp_path).restore(None, target)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpointer(tmp_path / "file")
    foreign = tmp_path / "foreign"
    (foreign / "9").mkdir(parents=True)
    (foreign / "9" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    with pytest.raises(CheckpointError, match="9 was not written by copc_jax"):
        Checkpointer(foreign).restore(None, target)
    with Checkpointer(foreign) as checkpointer:
        checkpointer.save(9, small_state(), HOST)
        with pytest.raises(CheckpointError, match=r"no step 8.*Complete steps: \[9\]"):
            checkpointer.restore(8, target)
    assert (foreign / "9.incomplete" / "_CHECKPOINT_METADATA").exists(), "foreign data was deleted"
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize("part", ["state", "host"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_corrupted_files_are_reported_with_the_way_out(tmp_path, part):
    # A single leaf: with more, the reads that orbax abandons would make noise in later tests.
    noise = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    states = [None, {"noise": jnp.asarray(noise)}, {"noise": jnp.asarray(2 * noise)}]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, states[1], HOST)
        checkpointer.save(2, states[2], HOST)
    for file in (tmp_path / "2" / part).rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"2 cannot be read.*Other complete steps: \[1\]"):
        checkpointer.restore(None, abstract(states[1]))
    restored, _ = checkpointer.restore(1, abstract(states[1]))
    assert_equal(restored, states[1])
    gc.collect()


def test_another_learner_state_is_refused_by_name(tmp_path):
    state = small_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, HOST)
    restore = lambda wanted: checkpointer.restore(None, abstract(wanted))
    with pytest.raises(
        CheckpointError, match=r"actor/embed is float32\[4, 8\] .* float32\[4, 16\]"
    ):
        restore(small_state(width=16))
    half = state.replace(critic={"head": state.critic["head"].astype(jnp.bfloat16)})
    with pytest.raises(CheckpointError, match=r"critic/head is float32\[8\] .* bfloat16\[8\]"):
        restore(half)
    with pytest.raises(CheckpointError, match=r"leaf actor/bias \(float32\[2\]\) is not in the"):
        restore(state.replace(actor={**state.actor, "bias": jnp.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"critic/head .* is not in this run"):
        restore(state.replace(critic={}))
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    with pytest.raises(ValueError, match="leaf version has no sharding"):
        checkpointer.restore(None, bare)


def test_another_configuration_is_refused_unless_allowed(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(), HOST)
    target = abstract(small_state())
    same = {"staleness": 64, "loss": {"eta": 0.5, "clip": (0.2, 0.28)}}
    checkpointer.restore(None, target, config=same)
    other = {"staleness": 8, "loss": {"eta": 0.25, "clip": (0.2, 0.28)}, "steps": 9}
    with pytest.raises(CheckpointError) as refusal:
        checkpointer.restore(None, target, config=other)
    for part in (
        "staleness: saved 64, now 8",
        "loss.eta: saved 0.5, now 0.25",
        "steps: saved 'absent'",
    ):
        assert part in str(refusal.value)
    assert "clip" not in str(refusal.value)
    _, host = checkpointer.restore(
        None, target, config=other, may_differ=("staleness", "loss", "steps")
    )
    assert host == HOST
    with pytest.raises(ValueError, match="no field of the configuration is called stalenes"):
        checkpointer.restore(None, target, config=other, may_differ=("stalenes",))


def test_host_data_round_trip():
    host = {
        "none": None,
        "numbers": [1, -2.5, True, 2**60],
        "text": "Ü\n",
        "empty": {"list": [], "dict": {}, "bytes": b""},
        "arrays": [np.arange(6, dtype=np.int64).reshape(2, 3), np.array([], np.float32)],
        "mask": np.array([True, False]),
        "scalar": np.float32(0.5),
    }
    decoded = decode_host(encode_host(host))
    assert decoded["arrays"][0].dtype == np.int64 and decoded["arrays"][0].shape == (2, 3)
    assert decoded["arrays"][1].dtype == np.float32 and decoded["arrays"][1].shape == (0,)
    assert decoded["mask"].tolist() == [True, False] and decoded["scalar"] == 0.5
    plain = ("none", "numbers", "text", "empty")
    assert {name: decoded[name] for name in plain} == {name: host[name] for name in plain}


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"host\.a\.b\[1\]: cannot save a object"),
        ({"a": np.array([None])}, r"host\.a: cannot save an array of dtype object"),
        ({"a": {1: 2}}, r"host\.a: 1 cannot be a key"),
        ({"__array__": 0}, "'__array__' cannot be a key"),
    ],
)
def test_host_data_that_cannot_be_saved_is_named(host, message):
    with pytest.raises(TypeError, match=message):
        encode_host(host)
