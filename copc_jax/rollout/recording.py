"""The batches that a run trained on, kept so that other runs can train on the same ones.

    DIRECTORY/
      recording.json   what the batches belong to, as whoever records describes it
      000000.npz       the first batch; all its trajectories end to end, no pickle
      000001.npz

Every file is written aside, synced and renamed, so that a batch is there whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copc_jax.types import Trajectory

FORMAT = 1
MANIFEST_FILE = "recording.json"
# What reading cut, overwritten or foreign bytes raises.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
# The arrays of a trajectory, with the type that each has there.
_ARRAYS = {
    "token_ids": np.int32,
    "is_action": np.bool_,
    "behavior_logprob": np.float32,
    "weight_version": np.int32,
}


class RecordingError(Exception):
    """A recording is missing, damaged, incomplete or of another run; the message names it."""


class Recording:
    """The batches in a directory, for reading.

    Args:
        directory: of the recording.

    Attributes:
        description: what was given to the `Recorder`, with JSON's types.

    Raises:
        RecordingError: no recording is there, or one of another format.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        file = directory / MANIFEST_FILE
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            written, self.description = manifest["format"], dict(manifest["description"])
        except FileNotFoundError:
            raise RecordingError(f"no recording is in {directory}: {file} does not exist") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(f"{file} does not describe a recording: {error!r}") from error
        if written != FORMAT:
            raise RecordingError(f"{file} has format {written!r}, this version reads {FORMAT}")

    def __len__(self) -> int:
        """Batches from the first on without a gap."""
        count = 0
        while _file(self.directory, count).exists():
            count += 1
        return count

    def read(self, batch: int) -> list[Trajectory]:
        """Return the trajectories of a batch, counted from 0, as they were trained on.

        Raises:
            RecordingError: the batch is missing or damaged.
        """
        file = _file(self.directory, batch)
        try:
            return _decode(file.read_bytes())
        except FileNotFoundError:
            raise RecordingError(
                f"{file} does not exist: the recording has no batch {batch}"
            ) from None
        except _DAMAGE as error:
            raise RecordingError(f"{file} is damaged: {error!r}") from error


class Recorder:
    """Writes the batches of one run, also of one that goes on after a stop.

    Args:
        directory: made at the start.
        description: JSON values that tell this recording from others.
        batches: batches that the run has been trained on so far, 0 for a new one.

    Attributes:
        removed: batches that were there beyond `batches`. The updates on them are lost with the
            state that they led to, and a run that goes on trains on others in their place.

    Raises:
        RecordingError: the directory holds another recording, or lacks one of the first `batches`
            batches.
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path, description: Mapping[str, Any], *, batches: int):
        self.directory = directory
        description = json.loads(json.dumps(description))
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST_FILE).exists():
            there = Recording(directory)
            if there.description != description:
                differing = [
                    f"{name} was {there.description.get(name)!r}, is {description.get(name)!r}"
                    for name in {**there.description, **description}
                    if there.description.get(name) != description.get(name)
                ]
                raise RecordingError(
                    f"{directory} holds the recording of another run: {'; '.join(differing)}"
                )
            if len(there) < batches:
                raise RecordingError(
                    f"{_file(directory, len(there))} is missing: a recording holds all batches "
                    f"from the first on, and {batches} have been trained on"
                )
        elif batches:
            raise RecordingError(
                f"{directory} has no recording of the first {batches} batches: a recording must "
                "begin with the run"
            )
        else:
            manifest = {"format": FORMAT, "description": description}
            _write(directory / MANIFEST_FILE, json.dumps(manifest, indent=2).encode())
        later = [
            file
            for file in directory.glob("*.npz")
            if file.stem.isdecimal() and int(file.stem) >= batches
        ]
        # The last first, so that a kill in between leaves no gap.
        for file in sorted(later, reverse=True):
            file.unlink()
        self.removed = len(later)

    def write(self, batch: int, trajectories: Sequence[Trajectory]) -> None:
        """Keep a batch, counted from 0; the same one again changes nothing.

        Raises:
            RecordingError: the batch is there with other content.
            OSError: it cannot be written; nothing of it is left then.
        """
        file, content = _file(self.directory, batch), _encode(trajectories)
        if not file.exists():
            _write(file, content)
        elif file.read_bytes() != content:
            raise RecordingError(f"{file} holds another batch {batch} than the one to be recorded")


def _file(directory: Path, batch: int) -> Path:
    return directory / f"{batch:06d}.npz"


def _write(file: Path, content: bytes) -> None:
    aside = file.with_name(file.name + ".part")
    try:
        with aside.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _encode(trajectories: Sequence[Trajectory]) -> bytes:
    names = {
        "prompt_id": [t.prompt_id for t in trajectories],
        "status": [t.status for t in trajectories],
        "info": [{name: float(x) for name, x in t.info.items()} for t in trajectories],
    }
    arrays: dict[str, Any] = {
        name: np.concatenate(
            [np.zeros(0, kind), *(getattr(t, name) for t in trajectories)], dtype=kind
        )
        for name, kind in _ARRAYS.items()
    }
    file = io.BytesIO()
    np.savez_compressed(
        file,
        names=np.frombuffer(json.dumps(names).encode(), np.uint8),
        sample=np.asarray([t.sample for t in trajectories], np.int32),
        reward=np.asarray([t.reward for t in trajectories], np.float64),
        length=np.asarray([t.token_ids.size for t in trajectories], np.int32),
        **arrays,
    )
    return file.getvalue()


def _decode(content: bytes) -> list[Trajectory]:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        names = json.loads(file["names"].tobytes())
        ends = np.cumsum(file["length"])[:-1]
        columns = {name: np.split(file[name], ends) for name in _ARRAYS}
        columns |= {name: file[name].tolist() for name in ("sample", "reward")}
    columns |= {name: names[name] for name in ("prompt_id", "status", "info")}
    rows = zip(*columns.values(), strict=True)
    return [Trajectory(**dict(zip(columns, row, strict=True))) for row in rows]
