"""Several learner processes, one a host, that train as one.

Each runs the same program and holds whole rows of one mesh. Arrays go through the collectives of
jitted programs. The little that the hosts tell each other beside (versions, figures, errors) goes
through the key-value store of JAX's coordination service, where a wait can be ended: when a process
gives up, the others learn of it at their next exchange. One that dies without a word is missed by
that service, which then ends all the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from copc_jax.config import DistributedConfig
from copc_jax.rollout.collector import decode_state, encode_state
from copc_jax.types import Batch

T = TypeVar("T")
Allowed = Callable[[], contextlib.AbstractContextManager[Any]]

_KEYS = "copc_jax"
_LEFT = f"{_KEYS}/left"
# Between two looks at who has left, in milliseconds.
_POLL_MS = 500
# How long process 0, which holds the store, lets the others read why it leaves, in seconds.
_FAREWELL_S = 5.0


class PeerError(RuntimeError):
    """Another process could not go on; the message says which one and why."""


class Processes:
    """This process among those of the run.

    Alone, every method is the plain thing: nothing is exchanged, and errors pass unchanged.

    Args:
        index: number of this process.
        count: number of all.
        allowed: gives the context in which Ctrl-C may interrupt; it is held off elsewhere, because
            a process that leaves an exchange halfway leaves the others waiting.

    Attributes:
        index: number of this process; 0 writes what all share.
        count: number of all.
        in_step: whether all processes are known to leave together. They then wait for each other at
            the end, and what the arrays hold is the same update everywhere.
    """

    def __init__(
        self, index: int = 0, count: int = 1, allowed: Allowed = contextlib.nullcontext
    ) -> None:
        self.index, self.count = index, count
        self.in_step = count == 1
        self._allowed = allowed
        self._exchanges = 0

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    # What the hosts tell each other.

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process, on every process; none returns before all have come.

        Args:
            value: JSON values, bytes and numpy arrays, a megabyte at most.

        Raises:
            PeerError: a process has left, or process 0 cannot be reached.
        """
        if self.count == 1:
            return [value]
        number, self._exchanges = self._exchanges, self._exchanges + 1
        mine, answer = f"{_KEYS}/{number}/{self.index}", f"{_KEYS}/{number}/all"
        if not self.first:
            self._store.key_value_set_bytes(mine, encode_state({"value": value}))
            return decode_state(self._read(answer))["values"]
        values = [value]
        for index in range(1, self.count):
            key = f"{_KEYS}/{number}/{index}"
            values.append(decode_state(self._read(key))["value"])
            self._store.key_value_delete(key)
        self._store.key_value_set_bytes(answer, encode_state({"values": values}))
        # All have read the answer before, or they would not have come to this exchange.
        self._store.key_value_delete(f"{_KEYS}/{number - 1}/all")
        return values

    def together(
        self, work: Callable[[], T], tell: Callable[[T], Any] = lambda _: None
    ) -> tuple[T, list[Any]]:
        """Do `work` on every process, and return its result with what each process tells of its own.

        What one process cannot do, none has done: errors and Ctrl-C of one end it on all, at the
        same place of the program.

        Args:
            work: runs at once; Ctrl-C may interrupt it.
            tell: what the others are told of its result, as `gather` takes it.

        Raises:
            PeerError: the work of another process failed.
            KeyboardInterrupt: a process was interrupted.
            Exception: what this process's own work raised.
        """
        if self.count == 1:
            result = work()
            return result, [tell(result)]
        outcome: dict[str, Any] = {"error": None, "interrupted": False, "told": None}
        result: Any = None
        own: Exception | None = None
        try:
            with self._allowed():
                result = work()
            outcome["told"] = tell(result)
        except KeyboardInterrupt:
            outcome["interrupted"] = True
        except Exception as error:
            own = error
            outcome["error"] = str(error) or type(error).__name__
        outcomes = self.gather(outcome)
        failed = [
            f"process {index}: {each['error']}"
            for index, each in enumerate(outcomes)
            if each["error"] is not None
        ]
        self.in_step = bool(failed) or any(each["interrupted"] for each in outcomes)
        if own is not None:
            raise own
        if failed:
            raise PeerError("; ".join(failed))
        if self.in_step:
            raise KeyboardInterrupt
        return result, [each["told"] for each in outcomes]

    def agree(self, what: str, value: Any) -> None:
        """Check that `value`, of JSON, is the same on all processes.

        Raises:
            ValueError: it is not; names `what`, and both values where they are short.
        """
        for index, other in enumerate(self.gather(value)):
            if other != value:
                raise ValueError(
                    f"{what} differs: process {index} has {_short(other)}, "
                    f"process {self.index} has {_short(value)}"
                )

    def decided(self, value: T) -> T:
        """Return process 0's value, of JSON, on all processes."""
        return self.gather(value)[0]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the data of every process, on every process, however large it is."""
        if self.count == 1:
            return [data]
        sizes = self.gather(len(data))
        # Powers of two: few programs to compile.
        room = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)
        room[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(room)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def announce(self, name: str, number: int) -> None:
        """Tell the others a number that only grows, outside of the exchanges."""
        if self.count > 1:
            self._store.key_value_set(f"{_KEYS}/{name}", str(number), allow_overwrite=True)

    def await_announced(self, name: str, number: int) -> None:
        """Wait until `name` has been announced with `number` or more.

        Raises:
            PeerError: as `gather`.
        """
        while int(self._read(f"{_KEYS}/{name}")) < number:
            time.sleep(0.05)

    # Arrays.

    def place(self, minibatches: Sequence[Batch], sharding: NamedSharding) -> Batch:
        """Put rows that each process packed on the devices, as one batch.

        Args:
            minibatches: this process's rows of each minibatch, of one shape on all processes.
            sharding: of the batch's rows.

        Returns:
            The minibatches in order; the rows of each are those of process 0, of process 1 and so
            on.
        """
        if self.count == 1:
            return jax.device_put(_concatenate(*minibatches), sharding)
        placed = [
            jax.tree.map(functools.partial(jax.make_array_from_process_local_data, sharding), part)
            for part in minibatches
        ]
        return placed[0] if len(placed) == 1 else _join(sharding)(*placed)

    def rows(self, array: jax.Array) -> np.ndarray:
        """Return the rows of a [rows, ...] array that lie on this process's devices, in order."""
        if self.count == 1:
            return np.asarray(array)
        shards = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
        return np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])

    def whole(self, tree: Any) -> Any:
        """Return a tree of arrays that this process can read whole; all processes must call it."""
        if self.count == 1:
            return tree
        return jax.tree.map(
            lambda leaf: multihost_utils.process_allgather(leaf, tiled=True), tree
        )

    # The store.

    @property
    def _store(self) -> Any:
        # JAX offers no public handle on it.
        from jax._src import distributed

        return distributed.global_state.client

    def _read(self, key: str) -> bytes:
        while True:
            try:
                return self._store.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(f"process 0 cannot be reached: {error}") from error
            for name, reason in self._store.key_value_dir_get(_LEFT):
                raise PeerError(f"process {name.rpartition('/')[2]} has left: {reason}")

    def leave(self, reason: str) -> None:
        """Tell the others why this process ends alone, and let them read it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.key_value_set(f"{_LEFT}/{self.index}", reason)
            end = time.monotonic() + _FAREWELL_S
            while self.first and time.monotonic() < end:
                if len(self._store.key_value_dir_get(_LEFT)) == self.count:
                    return
                time.sleep(0.1)


@contextlib.contextmanager
def start(
    config: DistributedConfig, allowed: Allowed = contextlib.nullcontext
) -> Iterator[Processes]:
    """Connect with the other processes of the run, before anything touches a device.

    An exception that the others do not share ends this process at once: at its end Python would
    wait for them, and they wait for it.

    Raises:
        ValueError: the environment says nothing about processes.
    """
    if config.processes == 1 and not config.auto:
        yield Processes()
        return
    _connect(config)
    from jax._src import distributed

    state = distributed.global_state
    processes = Processes(state.process_id, state.num_processes, allowed)
    try:
        yield processes
    except BaseException as error:
        if processes.in_step:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        elif not isinstance(error, SystemExit):
            traceback.print_exc()
        processes.leave(str(error) if isinstance(error, Exception) else "it was ended")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    jax.distributed.shutdown()


def _connect(config: DistributedConfig) -> None:
    # It would take SIGTERM from the run, which saves a checkpoint then.
    jax.config.update("jax_enable_preemption_service", False)
    settings: dict[str, Any] = {
        "initialization_timeout": int(config.start_seconds),
        "heartbeat_timeout_seconds": int(config.timeout_seconds),
        "shutdown_timeout_seconds": int(config.timeout_seconds),
    }
    if not config.auto:
        assert config.coordinator is not None
        host = config.coordinator.rpartition(":")[0]
        settings |= {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
        }
        if host in ("127.0.0.1", "localhost"):
            settings["coordinator_bind_address"] = config.coordinator
        print(
            f"process {config.process_id} of {config.processes}: meeting the others at "
            f"{config.coordinator}, for up to {config.start_seconds:g} s",
            flush=True,
        )
    try:
        jax.distributed.initialize(**settings)
    except (ValueError, RuntimeError) as error:
        hint = (
            "; distributed.auto needs Slurm, Open MPI or Kubernetes (with jax[k8s]): elsewhere "
            "give distributed.coordinator, processes and process_id"
        )
        raise ValueError(
            f"the processes could not be started: {error}{hint if config.auto else ''}"
        ) from error


def seed(config_seed: int, index: int) -> int:
    """Return the seed of a process's episodes: the run's own for process 0, others for others."""
    if index == 0:
        return config_seed
    return int(np.random.SeedSequence((config_seed, index)).generate_state(1)[0])


def _concatenate(*parts: Batch) -> Batch:
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@functools.cache
def _join(sharding: NamedSharding) -> Callable[..., Batch]:
    def join(*parts: Batch) -> Batch:
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return jax.jit(join, out_shardings=sharding)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def log_file(run_dir: Path, name: str, index: int) -> Path:
    """Return a process's own file of that name: process 0's has no number."""
    path = run_dir / name
    return path if index == 0 else path.with_stem(f"{path.stem}-{index}")
