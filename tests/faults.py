"""The faults that a run must survive, each struck at real processes, and what became of the run.

    python tests/faults.py [WORD ...] [--folder runs/faults]

trains a tiny model with `experiments/run.py` once without any disturbance, and then again under the
faults whose names hold one of the words (all without a word), those in the same surroundings one
after the other in one run. It prints a table as it goes, and writes it to FOLDER/faults.md and
FOLDER/faults.json, where rows of earlier commands stay until their fault is struck again. A fault
that this machine cannot have is skipped with the reason. Undisturbed runs that an earlier command
left in FOLDER are used again.

Runs are in mode "exact", with staleness 2, batches of 8 episodes out of 20 questions, so that
epochs end inside batches, a checkpoint every 4 updates, and one checkpoint kept. Tools, servers and
routers are processes of their own. Afterwards every figure of every update but times and rates, all
parameters and all moments are held against the undisturbed run.

What a fault is stands here once; tests/test_faults.py strikes some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from orbax.checkpoint import v1 as ocp
from scripted_server import Behave, Change, Drop, FaultyProxy, ScriptedRouter, Status

from copc_jax import access
from copc_jax.factbook import build_factbook
from copc_jax.metrics import read_metrics
from copc_jax.rollout.launch import ServerProcess, launch_embedded
from copc_jax.tools.retriever import write_corpus

ROOT = Path(__file__).parents[1]
# Longest time in which nothing at all happens; a busy machine takes its time.
PATIENCE_S = 300.0
EVERY, STALENESS = 4, 2
COUNTRIES = (
    *("France", "Peru", "Japan", "Kenya", "Norway", "Chile", "Egypt", "India", "Cuba", "Mali"),
    *("Spain", "Qatar", "Nepal", "Ghana", "Haiti", "Italy", "Laos", "Fiji", "Iran", "Oman"),
    *("Brazil", "Canada", "Poland", "Greece"),
)
RUN = [
    *("--batch-size=8", "--micro-batches=2", "--critic-warmup-updates=1"),
    *(f"--staleness={STALENESS}", "--staleness-mode=exact"),
    *(f"--checkpoint-every={EVERY}", "--keep-checkpoints=1", "--viewer.every=0"),
    *("--tiny.hidden-size=32", "--tiny.intermediate-size=32", "--tiny.num-layers=1"),
    *("--tiny.num-heads=2", "--tiny.num-kv-heads=1", "--sft.demonstrations=200"),
    *("--eval.every=0", "--eval.questions=4", "--eval.final-questions=4"),
    *("--rollout.slots=8", "--rollout.max-in-flight=8"),
    # A request that is not answered costs a run its time-out.
    *("--rollout.timeout-seconds=30", "--rollout.deadline-seconds=120"),
]
TASKS = {
    "search": [
        *("--task=search", "--sft.updates=60", "--tiny.vocab-size=1024"),
        # Answers of so small a model are all wrong; this tells those with an answer from others.
        *("--search.reward-wrong=0.5", "--search.reward-format=-0.5"),
    ],
    "math": [
        *("--task=math", "--sft.updates=60", "--tiny.vocab-size=2048", "--math.sandbox=cpython"),
        *("--math.train=300", "--math.held-out=40", "--math.direct-share=0"),
    ],
}
# Figures that say how a run went and not what it computed.
HOW = ("time", "learner/", "rollout/", "memory/")


class Skipped(Exception):
    """This machine cannot have that fault; the message says why."""


class Trial:
    """One run, what stands around it, and what it has printed; it may be killed and resumed.

    Attributes:
        run_dir: its folder.
        process: the newest process of `run.py`.
        servers: rollout servers that are not the run's own.
        proxy: stands before the first of them, where there is one.
        retriever: the search engine's process.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, world: World, name: str, task: str) -> None:
        self.run_dir = world.folder / re.sub(r"\W+", "-", name)
        self.task = task
        self.arguments: list[str] = []
        self.environment = dict(os.environ)
        self.servers: list[ServerProcess] = []
        self.proxy: FaultyProxy
        self.clock: Path
        self.retriever = world.retriever
        self._world = world
        self._log = self.run_dir.with_suffix(".log")

    def forget(self) -> None:
        """Remove what an earlier command left."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self._log.unlink(missing_ok=True)

    def start(self) -> None:
        where = [f"--cache-dir={self._world.cache}", f"--run-dir={self.run_dir}"]
        known = self._world.arguments(self.task)
        length = f"--updates={self._world.updates}"
        self._open([*TASKS[self.task], *RUN, length, *known, *self.arguments, *where])

    def resume(self, *arguments: str) -> None:
        self._open([f"--resume={self.run_dir}", *arguments])

    def _open(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self.environment, cwd=ROOT
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it and what it started, whatever state they are in."""
        if not hasattr(self, "process"):
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(self.process.pid).children(recursive=True)
            self.kill()
            psutil.wait_procs(left, timeout=15)
        self.process.wait()

    def ended(self) -> int:
        """Wait for its end and return the status."""
        self.until(lambda: self.process.poll() is not None, "its end", to_its_end=True)
        return self.process.returncode

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        *,
        to_its_end: bool = False,
        every_s: float = 0.01,
    ) -> Any:
        """Wait until the condition holds and return its value; fail if the run ends before."""
        seen, moment = "", time.monotonic()
        while not (found := condition()):
            over = self.process.poll() is not None and not to_its_end
            if over and not (found := condition()):
                raise AssertionError(f"the run ended before {what}:\n{self.tail()}")
            if found:
                break
            if (now := time.monotonic()) > moment + PATIENCE_S:
                if self.said() == seen:
                    raise AssertionError(f"waited {PATIENCE_S:g} s for {what}:\n{self.tail()}")
                seen, moment = self.said(), now
            time.sleep(every_s)
        return found

    def until_update(self, number: int) -> None:
        # The last updates may be over at once.
        self.until(lambda: self.updates() >= number, f"update {number}")

    def updates(self) -> int:
        """The newest update in the metrics, -1 before the first line."""
        rows = read_metrics(self.run_dir)
        return int(rows[-1]["step"]) if rows else -1

    def said(self) -> str:
        """Everything that the run has printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def tail(self) -> str:
        return self.said()[-3000:]

    def steps(self) -> set[int]:
        """Numbers of the checkpoints that are complete."""
        names = (path.name for path in (self.run_dir / "checkpoints").glob("*"))
        return {int(name) for name in names if name.isdecimal()}

    def server(self) -> psutil.Process:
        """The rollout server that the run started."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "copc_jax.rollout.server" in child.cmdline():
                        return child
            return None

        return self.until(find, "its rollout server")

    def server_state(self) -> dict[str, Any]:
        """What the run's own rollout server is doing, nothing while it does not answer."""
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            port = int((self.run_dir / "server.log.port").read_text())
            # A run gives its server a key that nobody else is told.
            key = self.server().environ().get(access.ROLLOUT_KEY, "")
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/server_info", headers={"Authorization": f"Bearer {key}"}
            )
            with urllib.request.urlopen(request, timeout=5) as reply:
                return json.load(reply)["internal_states"][0]
        return {}


class World:
    """What all runs share: caches, questions, the search engine, and undisturbed runs.

    Args:
        folder: where everything goes.
        updates: length of each run.
        cache: of warm starts and compiled programs; in the folder by default.
    """

    def __init__(self, folder: Path, updates: int, cache: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.cache, self.updates = folder, cache or folder / "cache", updates
        self._stack = contextlib.ExitStack()
        self._references: dict[str, Trial] = {}
        asked = [
            {"id": name, "question": f"what is the capital of {name}", "answer": f"{name} city"}
            for name in COUNTRIES
        ]
        for name, rows in (("train", asked[4:]), ("held_out", asked[:4])):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text)
        # The warm start looks things up in it.
        write_corpus(folder / "corpus.jsonl", build_factbook()[0])

    def __enter__(self) -> World:
        self.retriever = Retriever(self.folder / "corpus.jsonl", self.folder / "retriever.log")
        self._stack.callback(self.retriever.kill)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def arguments(self, task: str) -> list[str]:
        if task == "math":
            return []
        files = [f"--data.{n.replace('_', '-')}=countries={self.folder / n}.jsonl" for n in FILES]
        return [*files, f"--search.retriever-url={self.retriever.url}"]

    def reference(self, task: str) -> Trial:
        """The undisturbed run of a task, made when it is first asked for."""
        if task not in self._references:
            trial = Trial(self, f"undisturbed {task}", task)
            self._stack.callback(trial.end)
            if trial.updates() != self.updates or not (trial.run_dir / "report.md").exists():
                trial.forget()
                trial.start()
                assert trial.ended() == 0, trial.tail()
            self._references[task] = trial
        return self._references[task]

    @contextlib.contextmanager
    def trial(self, name: str, where: str) -> Iterator[Trial]:
        """A run in the given surroundings, to be started."""
        task = "math" if where == "math" else "search"
        self.reference(task)
        trial = Trial(self, name, task)
        trial.forget()
        with contextlib.ExitStack() as stack:
            stack.callback(trial.end)
            SURROUNDINGS[where](self, trial, stack)
            yield trial

    def launch(self, name: str) -> ServerProcess:
        """A rollout server that no run owns."""
        return launch_embedded(
            self.reference("search").run_dir / "model",
            log_file=self.folder / f"{name}.server.log",
            slots=8,
            max_length=192,
            compilation_cache=self.cache / "compiled",
            weight_roots=[self.folder],
            arguments=["--enable-deterministic-inference"],
        )


FILES = ("train", "held_out")


class Retriever:
    """A search engine in a process of its own, which keeps its address when started again."""

    def __init__(self, corpus: Path, log: Path) -> None:
        self._corpus, self._log, self._port = corpus, log, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/retrieve"

    def start(self) -> None:
        command = [sys.executable, "-m", "copc_jax.tools.retriever", "serve"]
        command += ["--corpus", str(self._corpus), "--port", str(self._port)]
        self._log.write_text("")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"http://[\d.]+:(\d+)", self._log.read_text())):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the search engine did not start"
            time.sleep(0.05)
        self._port = int(found[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# ------------------------------------------------------------------------------ surroundings


def alone(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """The run starts its own server."""


def proxied(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """A server behind a proxy that can spoil any answer."""
    trial.servers = [stack.enter_context(world.launch(trial.run_dir.name))]
    trial.proxy = stack.enter_context(FaultyProxy(trial.servers[0].url))
    # What is never answered is given up after four times the deadline.
    patience = ["--rollout.timeout-seconds=15", "--rollout.deadline-seconds=45"]
    trial.arguments = [f"--rollout.urls={trial.proxy.url}", *patience]


def two_servers(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """Two servers that the client balances itself."""
    names = [f"{trial.run_dir.name}.{number}" for number in (1, 2)]
    trial.servers = [stack.enter_context(world.launch(name)) for name in names]
    trial.arguments = ["--rollout.urls", *(server.url for server in trial.servers)]


def router(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """Two servers behind a router."""
    two_servers(world, trial, stack)
    front = stack.enter_context(ScriptedRouter([server.url for server in trial.servers]))
    trial.arguments = [f"--rollout.urls={front.url}"]


def small_disks(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """Checkpoints and weights are each on a file system of 16 MB."""
    for name in ("checkpoints", "weights"):
        _mount(trial.run_dir / name, stack)


def small_disk(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """The whole run folder is on a file system of 16 MB."""
    _mount(trial.run_dir, stack)


def _mount(folder: Path, stack: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Skipped(f"no file system can be mounted: {done.stderr.strip()}")
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)])


# Read by every Python process before anything else; the C library's own clock stays.
CLOCK = """import time
from pathlib import Path
def shifted(clock, unit):
    return lambda: clock() + type(clock())(float(Path({path!r}).read_text()) * unit)
time.time, time.time_ns = shifted(time.time, 1), shifted(time.time_ns, 10**9)
"""


def own_clock(world: World, trial: Trial, stack: contextlib.ExitStack) -> None:
    """Wall time of all Python code follows a file; monotonic clocks do not."""
    folder = world.folder / "clock"
    folder.mkdir(exist_ok=True)
    trial.clock = folder / "seconds"
    trial.clock.write_text("0")
    (folder / "sitecustomize.py").write_text(CLOCK.format(path=str(trial.clock)))
    trial.environment |= {"PYTHONPATH": str(folder)}


SURROUNDINGS: dict[str, Callable[[World, Trial, contextlib.ExitStack], None]] = {
    "alone": alone,
    "proxied": proxied,
    "two servers": two_servers,
    "router": router,
    "small disks": small_disks,
    "small disk": small_disk,
    "own clock": own_clock,
    "math": alone,
}


# ------------------------------------------------------------------------------------ strikes


def kill_before_the_first_checkpoint(trial: Trial) -> None:
    trial.until_update(0)
    trial.kill()
    assert not trial.steps(), "killed too late"
    trial.resume()


def kill_between_checkpoints(trial: Trial) -> None:
    known = trial.steps()
    trial.until(lambda: trial.steps() - known, "a checkpoint")
    trial.until_update(max(trial.steps()) + 1)
    trial.kill()
    trial.resume()


def kill_during_a_checkpoint(trial: Trial) -> None:
    def writing() -> list[Path]:
        return [path for path in folder.glob("*") if not path.name.isdecimal()]

    folder = trial.run_dir / "checkpoints"
    while True:
        trial.until(writing, "a checkpoint under way", every_s=0.0005)
        # Stopped first, so that it cannot finish between the look and the kill.
        trial.process.send_signal(signal.SIGSTOP)
        if writing():
            break
        trial.process.send_signal(signal.SIGCONT)
    trial.kill()
    trial.resume()


def kill_after_a_checkpoint(trial: Trial) -> None:
    known = trial.steps()
    trial.until(lambda: trial.steps() - known, "a checkpoint", every_s=0.0005)
    trial.kill()
    trial.resume()


def resume_on_four_devices(trial: Trial) -> None:
    known = trial.steps()
    trial.until(lambda: trial.steps() - known, "a checkpoint")
    trial.kill()
    trial.environment["JAX_NUM_CPU_DEVICES"] = "4"
    trial.resume("--mesh.data=2", "--mesh.model=2")


def terminate(trial: Trial) -> None:
    trial.process.terminate()
    assert trial.ended() == 130, trial.tail()
    trial.resume()


def terminate_all(trial: Trial) -> None:
    """As a scheduler does that signals every process of a job."""
    server = trial.server()
    trial.process.terminate()
    server.terminate()
    assert trial.ended() == 130, trial.tail()
    trial.resume()


def kill_server_in_mid_response(trial: Trial) -> None:
    server = trial.server()
    trial.until(lambda: trial.server_state().get("running"), "a response under way", every_s=0)
    server.kill()


def kill_server_in_mid_update(trial: Trial) -> None:
    server = trial.server()
    trial.until(lambda: trial.server_state().get("paused"), "an update under way", every_s=0)
    server.kill()


def kill_one_of_two(trial: Trial) -> None:
    """The other one goes on; the dead one comes back and is used again."""
    before = trial.updates()
    trial.servers[0].process.kill()
    trial.until_update(before + 2)
    trial.servers[0].restart()


def kill_retriever(trial: Trial) -> None:
    trial.retriever.kill()
    time.sleep(2.0)
    trial.retriever.start()


def kill_sandbox(trial: Trial) -> None:
    def workers() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(trial.process.pid).children(recursive=True):
            # Those that have ended have no command line.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "python_fork_server" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    for process in trial.until(workers, "a sandbox"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def files_may_not_grow(trial: Trial) -> None:
    """The learner can write no file beyond 20 kB from now on, as under a quota."""
    psutil.Process(trial.process.pid).rlimit(resource.RLIMIT_FSIZE, (20_000, -1))
    assert trial.ended() == 1, trial.tail()
    trial.resume()


def full(name: str) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        filler = trial.run_dir / name / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 14))
        # Small files still fit.
        os.truncate(filler, filler.stat().st_size - (1 << 16))
        assert trial.ended() == 1, trial.tail()
        # A run removes its weights when it ends.
        filler.unlink(missing_ok=True)
        trial.resume()

    return strike


def unwritable(name: str) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        folder = str(trial.run_dir / name)
        # What a folder's mode says does not bind the superuser.
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        assert trial.ended() == 1, trial.tail()
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        trial.resume()

    return strike


def answers(step: Any, times: int, *, ends: bool = False) -> Callable[[Trial], None]:
    """Spoil the next answers with sampled tokens; without the others, comparisons, it goes on."""

    def strike(trial: Trial) -> None:
        proxy = trial.proxy
        wanted = proxy.spoiled + times

        def fault(path: str, body: Any) -> Any:
            samples = path == "/generate" and "logprob_start_len" not in body
            return step if samples and proxy.spoiled < wanted else None

        proxy.fault = fault
        if ends:
            assert trial.ended() == 1, trial.tail()
            proxy.fault = lambda path, body: None
            trial.resume()
        else:
            trial.until(lambda: proxy.spoiled >= wanted, "the spoiled answers")

    return strike


def too_few(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"].pop()


def not_a_number(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][0][0] = math.nan


def other_version(answer: dict[str, Any]) -> None:
    meta = answer["meta_info"]
    meta["weight_version"] = "default"
    for span in meta.get("weight_versions", ()):
        span["version"] = "default"


def refuse_updates(trial: Trial) -> None:
    """The server answers 500 to every weight update until the run has ended."""
    path = "/update_weights_from_disk"
    trial.proxy.fault = lambda asked, body: Status(500) if asked == path else None
    assert trial.ended() == 1, trial.tail()
    trial.proxy.fault = lambda asked, body: None
    trial.resume()


def hang_one_prompt(trial: Trial) -> None:
    """One prompt is never answered, however often it is sent."""
    stuck: list[list[int]] = []

    def fault(path: str, body: Any) -> Any:
        if path != "/generate":
            return None
        ids = body["input_ids"]
        if not stuck:
            stuck.append(ids)
        return Behave(delay=PATIENCE_S) if ids[: len(stuck[0])] == stuck[0] else None

    trial.proxy.fault = fault
    trial.until(lambda: given_up(trial), "a prompt that is given up")
    trial.proxy.fault = lambda path, body: None


def stop_for_good(trial: Trial) -> None:
    trial.proxy.stop()
    assert trial.ended() == 1, trial.tail()
    trial.proxy.start()
    trial.resume()


def jump(trial: Trial) -> None:
    """A day ahead, then a year back."""
    for days in (1, -365):
        # A file that is being written would be read as no number.
        new = trial.clock.with_name("new")
        new.write_text(str(days * 86400))
        new.replace(trial.clock)
        trial.until_update(trial.updates() + 2)


def given_up(trial: Trial) -> int:
    rows = read_metrics(trial.run_dir)
    return int(rows[-1].get("rollout/lost", 0)) if rows else 0


# ------------------------------------------------------------------------------------- faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: what happens.
        where: name of the surroundings.
        strike: does it to a run that trains, and whatever a person or a scheduler does then.
        says: pattern of the line that tells a person; empty where there is nothing to tell.
        exact: what follows equals the undisturbed run to the bit.
        lost: prompts that may be given up; the stuck one comes again with the next epoch.
    """

    name: str
    where: str
    strike: Callable[[Trial], None]
    says: str = ""
    exact: bool = True
    lost: int = 0


FAULTS = (
    Fault(
        "learner killed before its first checkpoint",
        "alone",
        kill_before_the_first_checkpoint,
        r"no complete checkpoint in .* yet: starting from the beginning",
    ),
    Fault(
        "learner killed while a checkpoint is written",
        "alone",
        kill_during_a_checkpoint,
        r"resumed from update \d+",
    ),
    Fault(
        "learner killed right after a checkpoint",
        "alone",
        kill_after_a_checkpoint,
        r"resumed from update \d+",
    ),
    Fault(
        "learner killed between checkpoints",
        "alone",
        kill_between_checkpoints,
        r"resumed from update \d+",
    ),
    Fault("SIGTERM", "alone", terminate, r"stopped at update \d+, saving a checkpoint"),
    Fault(
        "SIGTERM to learner and server at once",
        "alone",
        terminate_all,
        r"stopped at update \d+, saving a checkpoint",
    ),
    Fault(
        "learner killed, resumed on four devices",
        "alone",
        resume_on_four_devices,
        r"resumed from update \d+",
        exact=False,
    ),
    Fault(
        "server killed in mid-response",
        "alone",
        kill_server_in_mid_response,
        r"the rollout server ended; starting it again",
    ),
    Fault(
        "server killed in mid-update",
        "alone",
        kill_server_in_mid_update,
        r"the rollout server ended; starting it again",
    ),
    Fault(
        "one of two servers killed",
        "two servers",
        kill_one_of_two,
        r"rollout server http\S+: unhealthy: .*",
    ),
    Fault("one of two servers behind a router killed", "router", kill_one_of_two),
    Fault(
        "server answers 500 twelve times",
        "proxied",
        answers(Status(500), 12),
        r"rollout server http\S+: unhealthy: .*",
    ),
    Fault(
        "server answers garbage twelve times",
        "proxied",
        answers(Status(200, "<html>"), 12),
        r"rollout server http\S+: unhealthy: .*",
    ),
    Fault(
        "server closes twelve connections",
        "proxied",
        answers(Drop(), 12),
        r"rollout server http\S+: unhealthy: .*",
    ),
    Fault(
        "server sends too few log-probs",
        "proxied",
        answers(Change(too_few), 1, ends=True),
        r"error at update \d+: answer to request .*",
    ),
    Fault(
        "server sends NaN",
        "proxied",
        answers(Change(not_a_number), 1, ends=True),
        r"error at update \d+: answer to request .*",
    ),
    Fault(
        "server answers with weights of no version of the run",
        "proxied",
        answers(Change(other_version), 1),
        r"rollout server http\S+: foreign weights: .*",
    ),
    Fault("server does not answer four requests", "proxied", answers(Behave(PATIENCE_S), 4)),
    Fault("server is slow, 1 s more for 30 requests", "proxied", answers(Behave(1.0), 30)),
    Fault(
        "server refuses weights",
        "proxied",
        refuse_updates,
        r"error at update \d+: version \d+ not published: .*",
    ),
    Fault(
        "server is gone for good",
        "proxied",
        stop_for_good,
        r"error at update \d+: .*",
    ),
    Fault("one prompt is never answered", "proxied", hang_one_prompt, exact=False, lost=2),
    Fault("search engine killed, back after 2 s", "alone", kill_retriever),
    Fault("sandbox worker killed", "math", kill_sandbox),
    Fault(
        "learner may write no file beyond 20 kB",
        "alone",
        files_may_not_grow,
        r"error at update \d+: .*",
    ),
    Fault(
        "disk full while saving",
        "small disks",
        full("checkpoints"),
        r"error at update \d+: saving step .*",
    ),
    Fault(
        "disk full while publishing",
        "small disks",
        full("weights"),
        r"error at update \d+: the weights of update .*",
    ),
    Fault("disk full, whole run folder", "small disk", full(""), r"error at update \d+: .*"),
    Fault(
        "checkpoints become read-only",
        "small disks",
        unwritable("checkpoints"),
        r"error at update \d+: saving step .*",
    ),
    Fault(
        "weights become read-only",
        "small disks",
        unwritable("weights"),
        r"error at update \d+: the weights of update .*",
    ),
    Fault("clock jumps a day ahead, then a year back", "own clock", jump),
)


@dataclasses.dataclass
class Outcome:
    """What became of a run under a fault.

    Attributes:
        said: the line that tells a person.
        repeated: finished updates that were made again.
        lost: prompts that were given up, and replaced by others.
        seconds: from the strike to the first update that was sampled after it.
        difference: from the undisturbed run.
    """

    fault: str
    said: str
    repeated: int
    lost: int
    seconds: float
    difference: str = ""


def strike(trial: Trial, fault: Fault) -> Outcome:
    """Strike a fault at a run that trains, and wait until it has made an update more.

    Raises:
        AssertionError: the run did not go on, or did not say what it should.
    """
    mark, lost = len(trial.said()), given_up(trial)
    started, process = time.monotonic(), trial.process
    fault.strike(trial)
    # Lines of updates that a resume drops stay until it has got so far.
    before = max(trial.updates(), 0)
    if fault.says:
        trial.until(lambda: re.search(fault.says, trial.said()[mark:]), fault.says)
    # So many were sampled, or on their way, before.
    trial.until_update(before + STALENESS + 2)
    seconds = time.monotonic() - started
    said = trial.said()[mark:]
    line = re.search(fault.says, said) if fault.says else None
    assert "Traceback" not in said, f"it printed a traceback: {said[-3000:]}"
    resumed = re.search(r"resumed from update (\d+)", said)
    repeated = 0
    if trial.process is not process:
        repeated = max(before - (int(resumed[1]) if resumed else 0), 0)
    return Outcome(fault.name, line[0] if line else "", repeated, given_up(trial) - lost, seconds)


def compare(trial: Trial, reference: Trial, updates: int) -> tuple[str, bool]:
    """Say how a finished run differs from the undisturbed one, and whether it equals it."""
    rows, expected = read_metrics(trial.run_dir), read_metrics(reference.run_dir)
    steps = [row["step"] for row in rows]
    assert steps == list(range(updates + 1)), f"not every update is there once: {steps}"
    differing: dict[str, int] = {}
    largest = 0.0
    for row, other in zip(rows, expected, strict=True):
        for name in row.keys() | other.keys():
            if not name.startswith(HOW) and row.get(name) != other.get(name):
                differing.setdefault(name, row["step"])
        if "actor/loss" in row:
            largest = max(largest, abs(row["actor/loss"] - other["actor/loss"]))
            largest = max(largest, abs(row["critic/loss"] - other["critic/loss"]))
    states = [saved_state(run.run_dir, updates) for run in (trial, reference)]
    same = states[0].keys() == states[1].keys() and all(
        np.array_equal(states[0][name], states[1][name]) for name in states[0]
    )
    if not differing and same:
        return "none, to the bit", True
    first = min(differing.values(), default=updates)
    return f"losses by up to {largest:.1g}, from update {first} on", False


def saved_state(run_dir: Path, update: int) -> dict[str, np.ndarray]:
    """Parameters, moments and counters of a checkpoint, by name."""
    folder = run_dir / "checkpoints" / str(update)
    # orbax tells that it takes the shardings that were saved.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        tree = ocp.load_checkpointables(str(folder), {"state": None})
    leaves = jax.tree_util.tree_leaves_with_path(tree["state"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def run_faults(
    world: World, faults: Sequence[Fault], tell: Callable[[Outcome], None] = lambda outcome: None
) -> None:
    """Strike faults of the same surroundings at one run, and hold it against the undisturbed one.

    Raises:
        AssertionError: the run did not go on, did not say what it should, or lost something.
        Skipped: this machine cannot have such surroundings.
    """
    with world.trial(faults[0].name, faults[0].where) as trial:
        trial.start()
        outcomes = []
        for fault in faults:
            if fault.strike is not kill_before_the_first_checkpoint:
                trial.until(trial.steps, "a checkpoint")
            outcomes.append(strike(trial, fault))
            tell(outcomes[-1])
            assert outcomes[-1].lost <= fault.lost, outcomes[-1]
        assert trial.ended() == 0, trial.tail()
        difference, equal = compare(trial, world.reference(trial.task), world.updates)
        for outcome in outcomes:
            outcome.difference = difference
        assert equal or not all(fault.exact for fault in faults), difference


# ------------------------------------------------------------------------------------ command


HEAD = "| fault | what a person reads | recovered | repeated | given up | difference |"
RULE = "| --- | --- | --- | --- | --- | --- |"


def line_of(result: dict[str, Any]) -> str:
    for problem in ("failed", "skipped"):
        if problem in result:
            return f"| {result['fault']} | {problem}: {result[problem].splitlines()[0]} | | | | |"
    return row(Outcome(**result))


def row(outcome: Outcome) -> str:
    said = re.sub(r"(/[\w.+-]+){3,}", "PATH", outcome.said)
    said = re.sub(r"127\.0\.0\.1:\d+", "HOST", re.sub(r"\b[0-9a-f]{32}\b", "ID", said))
    said = said if len(said) <= 160 else said[:157] + "..."
    cells = (
        outcome.fault,
        f"`{said}`" if said else "",
        f"{outcome.seconds:.1f} s",
        f"{outcome.repeated} updates",
        f"{outcome.lost} prompts",
        outcome.difference,
    )
    return "| " + " | ".join(cells) + " |"


def groups(faults: Sequence[Fault], size: int) -> list[list[Fault]]:
    """Faults that one run can suffer: in the same surroundings, and with the same promise."""
    found: list[list[Fault]] = []
    open_: dict[Any, list[Fault]] = {}
    for fault in faults:
        kind = fault.where if fault.exact else fault.name
        group = open_.get(kind, [])
        # That one comes before anything else in a run.
        if not group or len(group) == size or fault.strike is kill_before_the_first_checkpoint:
            group = open_[kind] = []
            found.append(group)
        group.append(fault)
    return found


def write_table(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write what is known of all faults, those of earlier commands too."""
    ordered = [results[fault.name] for fault in FAULTS if fault.name in results]
    (folder / "faults.json").write_text(json.dumps(ordered, indent=2) + "\n")
    (folder / "faults.md").write_text("\n".join([HEAD, RULE, *map(line_of, ordered)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    parser.add_argument("--updates", type=int, default=100, help="length of each run")
    options = parser.parse_args()
    # What it started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    jax.config.update("jax_num_cpu_devices", 4)
    # In the order of the words.
    named = {f.name: f for word in options.words or [""] for f in FAULTS if word in f.name}
    results: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        known = json.loads((options.folder / "faults.json").read_text())
        results = {result["fault"]: result for result in known}
    with World(options.folder.absolute(), options.updates) as world:
        print(f"{HEAD}\n{RULE}", flush=True)
        # Each takes some updates before it, and some after it.
        waiting = groups(list(named.values()), max(options.updates // 16, 1))
        while waiting:
            faults = waiting.pop(0)
            outcomes: list[Outcome] = []

            def tell(outcome: Outcome, outcomes: list[Outcome] = outcomes) -> None:
                outcomes.append(outcome)
                print(row(outcome), flush=True)

            problem: dict[str, str] = {}
            try:
                run_faults(world, faults, tell)
            except Skipped as reason:
                problem = {"skipped": str(reason)}
            except Exception as error:
                # A defect of the product or of this program: the others are struck all the same.
                problem = {"failed": f"{type(error).__name__}: {error}"}
                # Those that have not been struck yet get a run of their own.
                if rest := faults[len(outcomes) + 1 :]:
                    waiting.insert(0, rest)
                    faults = faults[: len(outcomes) + 1]
            for outcome in outcomes:
                results[outcome.fault] = dataclasses.asdict(outcome)
            if problem:
                print(str(problem)[:3000], flush=True)
                struck = faults if "skipped" in problem else faults[-1:]
                results |= {f.name: {"fault": f.name, **problem} for f in struck}
            else:
                print(f"{len(faults)} struck; difference: {outcomes[0].difference}", flush=True)
            write_table(options.folder, results)
    failed = sum("failed" in results[name] for name in named)
    print(f"{len(named)} faults, {failed} failed: {options.folder / 'faults.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
