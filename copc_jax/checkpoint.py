"""Checkpoints of a whole run: learner state and host state in one atomic, asynchronous step.

    DIRECTORY/
      20/            a complete step: orbax renames it into place after the last byte is written
        state/       the pytree of arrays, readable with orbax alone
        host/        everything else, one archive of JSON and numpy arrays (no pickle)

Steps only ascend. To go back to an earlier step, delete the later ones by hand: nothing here
overwrites or removes a later step, so no older run can eat a newer one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

FORMAT = "copc_jax/1"
_METADATA = "_CHECKPOINT_METADATA"


class CheckpointError(Exception):
    """A checkpoint could not be written, found, read or used."""


class Checkpointer:
    """Saves and restores steps in one directory.

    Reading touches nothing on disk, so another process may look at the directory of a running job.
    The first `save` makes this object the directory's only writer: it removes what killed saves
    left behind and sets unfinished steps aside as `STEP.incomplete`.

    Args:
        directory: where the steps go; made at the first save.
        keep: number of complete steps to keep; an old one goes only when a newer one is complete.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file, not a directory of checkpoints")
        self._writer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, ocp.AsyncResponse[bool]] | None = None

    def __enter__(self) -> Checkpointer:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for the last save, also when the block ended in an exception."""
        self.close()

    def steps(self) -> list[int]:
        """Complete steps on disk, ascending. A step that is still being saved is not among them."""
        return [step for step in _numbered(self.directory) if _fault(self._path(step)) is None]

    def faults(self) -> dict[int, str]:
        """What keeps each other step on disk from being a complete one, by step.

        A save that was killed leaves none, because steps appear under their numbers when complete.
        """
        found = {step: _fault(self._path(step)) for step in _numbered(self.directory)}
        return {step: fault for step, fault in found.items() if fault}

    def latest(self) -> int | None:
        """The highest complete step, None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> bool:
        """Starts to save a step in the background.

        Both parts are captured before this returns: `state` may be donated and the objects behind
        `host` may move on at once. A save that is still running is waited for, never skipped over.

        Args:
            step: learner version; must be higher than every step saved before.
            state: pytree of arrays.
            host: dicts with string keys, lists, str, int, float, bool, None, bytes and numpy
                arrays. Tuples come back as lists.

        Returns:
            True if the save was started, False if this very step is already stored.

        Raises:
            CheckpointError: an earlier background save failed, or this one could not be started.
            ValueError: a later step is already stored, or a leaf of `state` was donated before.
            TypeError: `host` holds something else; the message names it.
        """
        self.wait()
        last = self.latest()
        if last == step:
            return False
        if last is not None and last > step:
            raise ValueError(
                f"step {step} comes before step {last}, which {self.directory} already holds; "
                f"use another directory, or delete the later steps to go on from an earlier one"
            )
        for path, leaf in _leaves(state):
            # orbax would find out too, but only after starting threads that then wait for minutes.
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(f"cannot save step {step}: leaf {path} was donated to a program")
        parts = {"state": state, "host": {"archive": encode_host(host)}}
        description = {"format": FORMAT, "leaves": _describe(state)}
        try:
            # Of a folder that takes nothing orbax finds out after starting threads that wait for
            # minutes, and keep the process from ending.
            self.directory.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.directory))
            response = self._open_writer().save_checkpointables_async(
                step, parts, force=True, custom_metadata=description
            )
        except (OSError, ValueError, RuntimeError) as error:
            self._give_writer_up()
            raise self._failed(step, error) from error
        if response is None:
            raise CheckpointError(f"orbax refused to save step {step} to {self.directory}")
        self._pending = (step, response)
        return True

    def check(self) -> None:
        """Raises CheckpointError if a background save has failed; never waits."""
        if self._writer is not None and not self._writer.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the running save. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        step, response = self._pending
        self._pending = None
        try:
            response.result()
        except Exception as error:
            self._give_writer_up()
            raise self._failed(step, error) from error

    def close(self) -> None:
        """Waits for the running save and frees the writer. Raises CheckpointError if it failed."""
        self.wait()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            raise CheckpointError(f"the writer of {self.directory} failed: {error}") from error

    def restore(
        self,
        step: int | None,
        abstract_state: Any,
        *,
        config: Mapping[str, Any] | None = None,
        may_differ: Collection[str] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a step into the given shapes, dtypes and shardings, on any number of devices.

        Everything is compared before an array is read, and nothing on disk changes.

        Args:
            step: which step, None for the latest complete one.
            abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, see `abstract`.
            config: resolved configuration of this run. If given, it must equal the saved
                `host["run"]["config"]`.
            may_differ: dotted names of fields that may differ; a name covers all fields below it.

        Returns:
            (state, host).

        Raises:
            CheckpointError: no such complete step, not written by copc_jax, another tree (the first
                differing leaf is named), another configuration (all differing fields are named),
                or unreadable files.
            ValueError: a leaf of `abstract_state` has no sharding, or `may_differ` names an
                unknown field.
        """
        wanted = _describe(abstract_state)
        for path, leaf in _leaves(abstract_state):
            # Without one, orbax would silently reuse the layout of the machine that saved.
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
                raise ValueError(f"abstract_state: leaf {path} has no sharding")
        step = self._choose(step)
        path = self._path(step)
        saved = _metadata(path)["custom_metadata"]["leaves"]
        difference = _first_difference(saved, wanted)
        if difference:
            raise CheckpointError(f"{path} holds another learner state: {difference}")
        host = self.restore_host(step)
        if config is not None:
            _check_config(host.get("run", {}).get("config"), config, may_differ, path)
        state = self._load(path, {"state": abstract_state})["state"]
        return state, host

    def restore_host(self, step: int | None = None) -> dict[str, Any]:
        """Reads the host part alone, such as the saved configuration; raises as `restore` does."""
        path = self._path(self._choose(step))
        archive = self._load(path, {"host": None})["host"]["archive"]
        try:
            return decode_host(archive)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def _path(self, step: int) -> pathlib.Path:
        return self.directory / str(step)

    def _choose(self, step: int | None) -> int:
        """The step to read, after a look at its files."""
        self.wait()
        faults = self.faults()
        complete = [number for number in _numbered(self.directory) if number not in faults]
        if step is None and complete:
            return complete[-1]
        if step in complete:
            return step
        if step in faults:
            reason = faults[step]
        elif step is None and faults:
            reason = "; ".join(faults.values())
        elif not self.directory.is_dir():
            reason = f"{self.directory} does not exist"
        else:
            reason = f"{self.directory} holds no step {'at all' if step is None else step}"
        known = complete or "none"
        raise CheckpointError(f"no checkpoint to restore: {reason}. Complete steps: {known}")

    def _load(self, path: pathlib.Path, parts: dict[str, Any]) -> dict[str, Any]:
        try:
            return ocp.load_checkpointables(str(path), parts)
        except Exception as error:
            others = [step for step in self.steps() if str(step) != path.name]
            raise CheckpointError(
                f"{path} cannot be read: {error}. Other complete steps: {others or 'none'}; "
                f"delete {path} to resume from the one before"
            ) from error

    def _open_writer(self) -> ocp.training.Checkpointer:
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for step in _numbered(self.directory):
                # Of several processes the first does what is done once.
                if jax.process_index() == 0 and _fault(self._path(step)):
                    _set_aside(self._path(step))
            # orbax declares its policies twice, with types that do not match: hence Any.
            keep: Any = ocp.training.preservation_policies.LatestN(self.keep)
            every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
            self._writer = ocp.training.Checkpointer(
                str(self.directory),
                # orbax's default skips a save, without a word, while another one runs.
                save_decision_policy=every,
                preservation_policy=keep,
                cleanup_tmp_directories=True,
            )
        return self._writer

    def _give_writer_up(self) -> None:
        """Frees the threads of a writer whose save failed."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        # Each part that failed raises its error once more, the first before any thread is freed.
        for free in (writer.wait, writer.close):
            with contextlib.suppress(Exception):
                free()

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        last = self.latest()
        kept = "no complete step is stored" if last is None else f"the last complete step is {last}"
        # What follows is pages of settings.
        reason = str(error).partition(" [tensorstore_spec=")[0]
        return CheckpointError(f"saving step {step} to {self.directory} failed ({kept}): {reason}")


def abstract(state: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, as `Checkpointer.restore` wants them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def encode_host(host: Mapping[str, Any]) -> np.ndarray:
    """Packs plain data, numpy arrays and bytes into one uint8 array; a zip archive without pickle.

    Raises:
        TypeError: an unsupported value or a key that is no string; the message names its place.
    """
    arrays: list[np.ndarray] = []

    def encode(value: Any, place: str) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, str | int | float | bool):
            return value
        if isinstance(value, bytes):
            arrays.append(np.frombuffer(value, np.uint8))
            return {"__bytes__": len(arrays) - 1}
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufcSU":
                raise TypeError(f"{place}: cannot save an array of dtype {value.dtype}")
            arrays.append(value)
            return {"__array__": len(arrays) - 1}
        if isinstance(value, list | tuple):
            return [encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or key in ("__array__", "__bytes__"):
                    raise TypeError(f"{place}: {key!r} cannot be a key, keys are ordinary strings")
            return {key: encode(item, f"{place}.{key}") for key, item in value.items()}
        raise TypeError(f"{place}: cannot save a {type(value).__name__}")

    tree = json.dumps(encode(host, "host"))
    buffer = io.BytesIO()
    members: dict[str, Any] = {f"array_{index}": array for index, array in enumerate(arrays)}
    np.savez(buffer, tree=np.frombuffer(tree.encode(), np.uint8), **members)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def decode_host(archive: np.ndarray) -> dict[str, Any]:
    """Inverse of `encode_host`; tuples come back as lists and numpy scalars as Python's."""
    with np.load(io.BytesIO(archive.tobytes()), allow_pickle=False) as members:

        def decode(value: Any) -> Any:
            if isinstance(value, list):
                return [decode(item) for item in value]
            if isinstance(value, dict):
                if "__array__" in value:
                    return members[f"array_{value['__array__']}"]
                if "__bytes__" in value:
                    return members[f"array_{value['__bytes__']}"].tobytes()
                return {key: decode(item) for key, item in value.items()}
            return value

        return decode(json.loads(members["tree"].tobytes()))


def _numbered(directory: pathlib.Path) -> list[int]:
    """Numbers of the step directories, complete or not, ascending."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def _metadata(path: pathlib.Path) -> dict[str, Any]:
    return json.loads((path / _METADATA).read_text())


def _fault(path: pathlib.Path) -> str | None:
    """What keeps a step directory from being a complete step of ours, None if nothing."""
    try:
        metadata = _metadata(path)
        description = metadata.get("custom_metadata")
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            return f"{path} was not written by copc_jax (format {FORMAT})"
        if not metadata.get("commit_timestamp_nsecs"):
            return f"{path} was not finished"
    except FileNotFoundError:
        return f"{path} is unfinished or foreign: it has no {_METADATA}"
    except (ValueError, AttributeError, NotADirectoryError):
        return f"{path} is damaged: {_METADATA} cannot be read"
    for part in ("state", "host"):
        if not (path / part / "_METADATA").is_file():
            return f"{path} is unfinished: {part}/_METADATA is missing"
    return None


def _set_aside(path: pathlib.Path) -> None:
    """Renames an unfinished or foreign step to a free name: it may be somebody's data."""
    target, attempt = path.with_name(f"{path.name}.incomplete"), 0
    while target.exists():
        attempt += 1
        target = path.with_name(f"{path.name}.incomplete.{attempt}")
    path.rename(target)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _describe(tree: Any) -> dict[str, str]:
    """Name -> "dtype[shape]" of every leaf, in the order of the tree."""
    description = {}
    for path, leaf in _leaves(tree):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        description[path] = f"{array.dtype}{list(array.shape)}"
    return description


def _first_difference(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    for path, kind in wanted.items():
        if path not in saved:
            return f"leaf {path} ({kind}) is not in the checkpoint"
        if saved[path] != kind:
            return f"leaf {path} is {saved[path]} in the checkpoint and {kind} in this run"
    for path, kind in saved.items():
        if path not in wanted:
            return f"leaf {path} ({kind}) of the checkpoint is not in this run"
    return None


def _flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _check_config(
    saved: Any, current: Mapping[str, Any], may_differ: Collection[str], path: pathlib.Path
) -> None:
    """Raises CheckpointError that names every field that differs and may not."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} holds no configuration in run/config")
    differences = config_differences(saved, current, may_differ)
    if differences:
        raise CheckpointError(
            f"{path} was saved with another configuration; " + "; ".join(differences)
        )


def config_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], may_differ: Collection[str]
) -> list[str]:
    """Names every field that differs and may not, with both values.

    Args:
        saved: resolved configuration, JSON values.
        current: resolved configuration.
        may_differ: dotted names of fields that may differ; a name covers all fields below it.

    Raises:
        ValueError: `may_differ` names an unknown field.
    """
    old, new = _flatten(saved), _flatten(json.loads(json.dumps(current, default=str)))
    covers = lambda name, field: field == name or field.startswith(name + ".")
    for name in may_differ:
        if not any(covers(name, field) for field in [*old, *new]):
            raise ValueError(f"may_differ: no field of the configuration is called {name}")
    return [
        f"{field}: saved {old.get(field, 'absent')!r}, now {new.get(field, 'absent')!r}"
        for field in dict.fromkeys([*old, *new])
        if old.get(field, "absent") != new.get(field, "absent")
        and not any(covers(name, field) for name in may_differ)
    ]
