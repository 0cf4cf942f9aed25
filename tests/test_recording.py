"""Recordings: read as they were written, whole or not at all, and of one run."""

import dataclasses
import json

import batch_sources
import numpy as np
import pytest

from copc_jax import staging
from copc_jax.rollout.recording import MANIFEST_FILE, Recorder, Recording, RecordingError
from copc_jax.settings import RunConfig
from copc_jax.types import Trajectory

DESCRIPTION = {"task": "search", "batch_size": 3, "updates_per_batch": 1, "start": "abc"}


def trajectory(index, version=0, status="done", length=6):
    is_action = np.arange(length) >= 2 + index % 2
    return Trajectory(
        prompt_id=f"frage-{index}-ü",
        sample=index % 2,
        token_ids=np.arange(length, dtype=np.int32) + 7 * index,
        is_action=is_action,
        behavior_logprob=np.where(is_action, -0.1 * (index + 1), 0).astype(np.float32),
        weight_version=np.where(is_action, version + np.arange(length) // 5, -1).astype(np.int32),
        reward=0.1 * index,
        status=status,
        info={"em": float(index), "share": 1 / 3} if index else {},
    )


def batch(number):
    return [
        trajectory(number),
        trajectory(number + 1, version=max(number - 1, 0), status="truncated", length=9),
        trajectory(number + 2, length=3),
    ]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for field in dataclasses.fields(Trajectory):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype, field.name
                np.testing.assert_array_equal(a, b, err_msg=field.name)
            else:
                assert type(a) is type(b) and a == b, field.name


@pytest.fixture
def recorded(tmp_path):
    recorder = Recorder(tmp_path / "run", DESCRIPTION, batches=0)
    for number in range(3):
        recorder.write(number, batch(number))
    return tmp_path / "run"


def test_what_is_read_is_what_was_written(recorded):
    recording = Recording(recorded)
    assert len(recording) == 3 and recording.description == DESCRIPTION
    for number in range(3):
        assert_same(recording.read(number), batch(number))


def test_packing_what_is_read_gives_the_same_batch(recorded):
    pack = lambda trajectories: staging.pack(
        trajectories,
        rows=3,
        time=16,
        learner_version=9,
        staleness=9,
        gamma=0.9,
        pad_id=0,
        truncated="bootstrap",
    )[0]
    ours, theirs = pack(Recording(recorded).read(1)), pack(batch(1))
    for field in dataclasses.fields(ours):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))


def test_the_files_hold_no_pickle(recorded):
    with np.load(recorded / "000000.npz", allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


def test_the_same_batch_again_changes_nothing_and_another_one_is_refused(recorded):
    recorder = Recorder(recorded, DESCRIPTION, batches=3)
    before = (recorded / "000002.npz").stat().st_mtime_ns
    recorder.write(2, batch(2))
    assert (recorded / "000002.npz").stat().st_mtime_ns == before
    with pytest.raises(RecordingError, match=r"000002\.npz"):
        recorder.write(2, batch(0))
    assert_same(Recording(recorded).read(2), batch(2))


def test_a_run_that_goes_on_replaces_what_came_after_its_checkpoint(recorded):
    recorder = Recorder(recorded, DESCRIPTION, batches=1)
    assert recorder.removed == 2 and len(Recording(recorded)) == 1
    recorder.write(1, batch(5))
    assert_same(Recording(recorded).read(1), batch(5))
    assert_same(Recording(recorded).read(0), batch(0))


def test_a_run_goes_on_only_with_all_batches_before_its_checkpoint(recorded, tmp_path):
    (recorded / "000001.npz").unlink()
    with pytest.raises(RecordingError, match=r"000001\.npz is missing"):
        Recorder(recorded, DESCRIPTION, batches=3)
    assert (recorded / "000002.npz").exists()
    with pytest.raises(RecordingError, match="must begin with the run"):
        Recorder(tmp_path / "new", DESCRIPTION, batches=2)


def test_a_recording_of_another_run_is_refused_by_name(recorded):
    with pytest.raises(RecordingError, match="batch_size was 3, is 4"):
        Recorder(recorded, {**DESCRIPTION, "batch_size": 4}, batches=0)
    assert len(Recording(recorded)) == 3


def test_a_batch_that_was_cut_while_it_was_written_is_not_there(recorded):
    (recorded / "000003.npz.part").write_bytes((recorded / "000002.npz").read_bytes()[:100])
    assert len(Recording(recorded)) == 3
    recorder = Recorder(recorded, DESCRIPTION, batches=3)
    recorder.write(3, batch(3))
    assert_same(Recording(recorded).read(3), batch(3))


@pytest.mark.parametrize("damage", [lambda old: old[:200], lambda _: b"", lambda _: b"no archive"])
def test_a_damaged_batch_is_named(recorded, damage):
    file = recorded / "000001.npz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RecordingError, match=r"000001\.npz is damaged"):
        Recording(recorded).read(1)


def test_a_flipped_byte_is_found(recorded):
    file = recorded / "000001.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=r"000001\.npz is damaged"):
        Recording(recorded).read(1)


def test_a_missing_or_foreign_recording_is_named(recorded, tmp_path):
    with pytest.raises(RecordingError, match="no recording"):
        Recording(tmp_path / "nothing")
    with pytest.raises(RecordingError, match="no batch 9"):
        Recording(recorded).read(9)
    manifest = recorded / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": 99, "description": {}}))
    with pytest.raises(RecordingError, match="format 99"):
        Recording(recorded)
    manifest.write_text("[]")
    with pytest.raises(RecordingError, match=MANIFEST_FILE):
        Recording(recorded)


def test_another_number_of_updates_a_batch_keeps_the_lag_in_batches(recorded):
    def lag(method, number):
        config = RunConfig(method=method, staleness=4, replay=recorded)
        source = batch_sources.Replay(config, Recording(recorded), start=lambda: None)
        trajectories = source.next_batch(number)
        updates = 2 if method == "areal" else 1
        version = number * updates
        # None is too old for the limit that the recorded run had.
        packed = staging.pack(
            trajectories,
            rows=3,
            time=16,
            learner_version=version,
            staleness=source.staleness,
            gamma=1.0,
            pad_id=0,
            updates_per_batch=updates,
        )[1]
        assert packed.trajectories == 3
        return [version - t.weight_version[t.is_action] for t in trajectories]

    for ours, theirs in zip(lag("areal", 2), lag("ppo", 2), strict=True):
        np.testing.assert_array_equal(ours, 2 * theirs)


def test_other_contents_are_refused_by_name(recorded):
    recording, config = Recording(recorded), RunConfig(replay=recorded)
    check = lambda now: batch_sources.check_recording(
        recording, config, None, None, {"recording": now}
    )
    # A method may make another number of updates on a batch.
    check({**DESCRIPTION, "updates_per_batch": 2})
    with pytest.raises(RecordingError) as refused:
        check({**DESCRIPTION, "start": "def", "batch_size": 4})
    assert "batch_size: recorded 3, now 4; start: recorded 'abc', now 'def'" in str(refused.value)
