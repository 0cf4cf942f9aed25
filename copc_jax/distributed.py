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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from copc_jax.rollout.collector import decode_state, encode_state
from copc_jax.settings import DistributedConfig
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
        in_step: whether all processes are known to stop at the same place. What the arrays hold is
            then the same update everywhere, and can be saved.
        where: what the run is at, such as "update 7": processes that meet elsewhere are refused.
    """

    def __init__(
        self, index: int = 0, count: int = 1, allowed: Allowed = contextlib.nullcontext
    ) -> None:
        self.index, self.count = index, count
        self.in_step = count == 1
        self.where = "the start"
        self._allowed = allowed
        self._exchanges = 0

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    # What the hosts tell each other.

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the value of every process, on every process; none returns before all have come.

        Args:
            what: name of the exchange; all must be at the same one.
            value: JSON values, bytes and numpy arrays, a megabyte at most.

        Raises:
            PeerError: a process has left, is at another place, or cannot be reached.
        """
        if self.count == 1:
            return [value]
        place = f"{what} at {self.where}"
        number, self._exchanges = self._exchanges, self._exchanges + 1
        mine, answer = f"{_KEYS}/{number}/{self.index}", f"{_KEYS}/{number}/all"
        message = {"place": place, "value": value}
        if not self.first:
            self._store.key_value_set_bytes(mine, encode_state(message))
            messages = decode_state(self._read(answer))["all"]
        else:
            messages = [message]
            for index in range(1, self.count):
                key = f"{_KEYS}/{number}/{index}"
                messages.append(decode_state(self._read(key)))
                self._store.key_value_delete(key)
            self._store.key_value_set_bytes(answer, encode_state({"all": messages}))
            # All have read the answer before, or they would not have come to this exchange.
            self._store.key_value_delete(f"{_KEYS}/{number - 1}/all")
        for index, other in enumerate(messages):
            if other["place"] != place:
                raise PeerError(
                    f"the processes are not in step: process {index} is at {other['place']}, "
                    f"process {self.index} at {place}"
                )
        return [other["value"] for other in messages]

    def together(
        self, what: str, work: Callable[[], T], tell: Callable[[T], Any] = lambda _: None
    ) -> tuple[T, list[Any]]:
        """Do `work` on every process; return its result, and what each process tells of its own.

        What one process cannot do, none has done: errors and Ctrl-C of one end it on all, at the
        same place of the program.

        Args:
            what: name of the work, as for `gather`.
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
        outcomes = self.gather(what, outcome)
        failed = [
            f"process {index}: {each['error']}"
            for index, each in enumerate(outcomes)
            if each["error"] is not None
        ]
        interrupted = any(each["interrupted"] for each in outcomes)
        self.in_step = self.in_step or bool(failed) or interrupted
        if own is not None:
            raise own
        if failed:
            raise PeerError("; ".join(failed))
        if interrupted:
            raise KeyboardInterrupt
        return result, [each["told"] for each in outcomes]

    def once(self, what: str, work: Callable[[], None]) -> None:
        """Have process 0 do `work`; returns on every process when it is done.

        Unlike `together` it may run in any thread, beside other exchanges.

        Args:
            what: name of the work; no other work of the run has it.
            work: what process 0 does.

        Raises:
            PeerError: process 0 could not do it, has left or cannot be reached.
            Exception: what the work raised, on process 0.
        """
        if self.count == 1:
            work()
            return
        key, error = f"{_KEYS}/once/{what}", None
        if not self.first:
            error = decode_state(self._read(key))["error"]
            if error is not None:
                raise PeerError(f"process 0: {error}")
            return
        try:
            work()
        except Exception as fault:
            error = str(fault) or type(fault).__name__
            raise
        finally:
            self._store.key_value_set_bytes(key, encode_state({"error": error}))

    def decided(self, what: str, value: T) -> T:
        """Return process 0's value, of JSON, on all processes."""
        return self.gather(what, value)[0]

    def gather_bytes(self, what: str, data: bytes) -> list[bytes]:
        """Return the data of every process, on every process, however large it is."""
        if self.count == 1:
            return [data]
        sizes = self.gather(what, len(data))
        # Powers of two: few programs to compile.
        room = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)
        room[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(room)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    # Arrays.

    def place(self, batch: Batch, minibatches: int, sharding: NamedSharding) -> Batch:
        """Put the rows that each process packed on the devices, as one batch.

        Args:
            batch: this process's rows of each minibatch, one after the other; of one shape on all
                processes.
            minibatches: of the whole batch.
            sharding: of its rows.

        Returns:
            The minibatches in order; the rows of each are those of process 0, of process 1 and so
            on.
        """
        if self.count == 1:
            return jax.device_put(batch, sharding)
        parts = [
            jax.tree.map(lambda x, i=i: np.split(x, minibatches)[i], batch)
            for i in range(minibatches)
        ]
        placed = [
            jax.tree.map(functools.partial(jax.make_array_from_process_local_data, sharding), part)
            for part in parts
        ]
        return placed[0] if minibatches == 1 else _join(sharding)(*placed)

    def own(self, array: jax.Array, minibatches: int) -> np.ndarray:
        """Return the rows of an array that stand where `place` put this process's, in its order."""
        if self.count == 1:
            return np.asarray(array)
        sharding = array.sharding
        parts = [array] if minibatches == 1 else _cut(sharding, minibatches)(array)
        rows = []
        for part in parts:
            shards = {shard.index[0].start or 0: shard for shard in part.addressable_shards}
            rows += [np.asarray(shards[start].data) for start in sorted(shards)]
        return np.concatenate(rows)

    def whole(self, tree: Any) -> Any:
        """Return a tree of arrays that this process can read whole; all processes must call it."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda leaf: multihost_utils.process_allgather(leaf, tiled=True), tree)

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
        # What ends the program may have been said already, and stands before it.
        cause = (error.__context__ if isinstance(error, SystemExit) else None) or error
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        else:
            traceback.print_exc()
            code = 1
        reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        print(f"process {processes.index} ends alone: {reason}", file=sys.stderr)
        processes.leave(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
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


def process_seed(seed: int, index: int) -> int:
    """Return the seed of a process's episodes: the run's own for process 0, others for others."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])


@functools.cache
def _join(sharding: NamedSharding) -> Callable[..., Batch]:
    def join(*parts: Batch) -> Batch:
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return jax.jit(join, out_shardings=sharding)


@functools.cache
def _cut(sharding: Any, count: int) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda x: jnp.split(x, count), out_shardings=[sharding] * count)
