"""Client of SGLang's native HTTP protocol: token ids in, token ids with log-probs and versions out.

The embedded server, real SGLang servers and an sglang-router in front of some are driven alike. The
protocol is that of SGLang 0.5.23; servers from 0.5.3 on, which send one version for a whole answer,
are read too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import math
import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from copc_jax import access
from copc_jax.types import Finish, Generation

logger = logging.getLogger(__name__)

# Float rounding can lift the log-probability of a certain token a little above 0.
_LOGPROB_SLACK = 1e-4
# Statuses below 500 that ask to come again: request time-out, too early, too many requests.
_TRY_AGAIN = (408, 425, 429)
_FOREIGN = -1
_STICKY_KEYS = 65536


class RolloutError(RuntimeError):
    """A rollout server refused a request or sent what cannot be trained on; no retry helps."""


class RolloutUnavailable(RolloutError):
    """No server gave a usable answer within the retries and the deadline."""


class RolloutUnauthorized(RolloutError):
    """A server wants an API key, or another one."""


class WeightUpdateError(RolloutError):
    """A server did not take new weights; the published version has not advanced."""


class _Transient(Exception):
    """One attempt failed in a way that another attempt may not."""

    def __init__(self, message: str, *, refused: bool = False, timed_out: bool = False):
        super().__init__(message)
        self.refused = refused
        self.timed_out = timed_out


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a server samples.

    Attributes:
        max_new_tokens: limit of sampled tokens, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of candidates; -1 is off.
        min_p: smallest probability relative to the largest; 0 is off.
        stop: strings that end a generation; the tokens that spell them are kept.
        stop_token_ids: ids that end a generation besides the model's own end-of-sequence ids.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    def for_training(self) -> SamplingParams:
        """Return these parameters if the server's log-probs are those of the sampling policy.

        SGLang reports log-probs at the sampling temperature but before top_p, top_k and min_p, and
        the learner computes its own at temperature 1: any other setting biases every ratio.

        Raises:
            ValueError: naming the field that is not neutral.
        """
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        for name, required in neutral.items():
            value = getattr(self, name)
            if value != required:
                raise ValueError(f"{name} must be {required} for training rollouts, got {value}")
        return self

    def to_json(self, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
        """Return the request's `sampling_params`."""
        fields: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }
        if self.stop:
            fields["stop"] = list(self.stop)
        if self.stop_token_ids:
            fields["stop_token_ids"] = list(self.stop_token_ids)
        if seed is not None:
            fields["sampling_seed"] = seed
        return fields


@dataclasses.dataclass
class ClientCounters:
    """What happened since the client was made.

    Attributes:
        requests: /generate calls sent, retries and resumptions included.
        retries: calls that failed and were sent again.
        timeouts: calls that had no answer in time.
        aborts: answers cut by an abort, which were resumed.
        tokens: sampled tokens handed out.
        foreign: answers thrown away because other weights than the published ones sampled them.
        too_long: prompts that filled the context, so that nothing was sampled.
    """

    requests: int = 0
    retries: int = 0
    timeouts: int = 0
    aborts: int = 0
    tokens: int = 0
    foreign: int = 0
    too_long: int = 0


@dataclasses.dataclass
class _Server:
    """Where to send generations, and the workers behind it that take weights (itself, if alone)."""

    url: str
    workers: list[str]
    version: int | None = None
    healthy: bool = True
    # False after an update that may have left part of its weights: reload whatever it claims.
    trusted: bool = True
    # Counts the moments from which on running requests must not be believed.
    epoch: int = 0
    failures: int = 0
    in_flight: int = 0
    used: int = 0
    last_error: str = ""
    probe: asyncio.Task[None] | None = None


class SGLangClient:
    """Many generations in flight over several servers, and weight updates to all of them.

    Use as an async context manager, in one event loop. Before the first `publish`, tokens of the
    weights that a server was started with (SGLang's version "default") are of version 0; after it,
    that label means a restart: the tokens are thrown away, the server gets the published weights
    again and the request is repeated. A server that refuses connections or fails
    `unhealthy_after` times in a row gets no requests until it answers again and holds the published
    weights. All methods raise RolloutError with the address and the reason.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        control_urls: Sequence[str] | None = None,
        timeout_s: float = 120.0,
        retries: int = 5,
        deadline_s: float = 600.0,
        max_connections: int = 1024,
        update_timeout_s: float = 300.0,
        pause_mode: Literal["retract", "abort", "in_place"] = "retract",
        context_length: int | None = None,
        backoff_s: float = 0.25,
        probe_interval_s: float = 2.0,
        unhealthy_after: int = 3,
        on_event: Callable[[str, str, str], None] | None = None,
        api_key: str | None = None,
    ):
        """Set up; nothing is sent before `__aenter__`.

        Args:
            urls: base addresses such as "http://127.0.0.1:30000".
            control_urls: the workers behind a router given as the only URL; weight updates and
                aborts go to them. `check` asks the router for them when they are not given.
            timeout_s: seconds for one /generate call.
            retries: failed attempts in a row after which one generation is given up.
            deadline_s: seconds for one generation with all its retries, resumptions and waits.
            max_connections: /generate calls in flight, 0 for no limit.
            update_timeout_s: seconds for one server to load weights.
            pause_mode: what an update does to running requests. "retract" recomputes their keys and
                values with the new weights; "abort" cuts them, and the client resumes them;
                "in_place" keeps the old keys and values, so that later tokens come from a mixture
                of two versions (their log-probs are still those of the sampler).
            context_length: tokens of prompt plus response that a server takes; `check` asks for it.
            backoff_s: first pause before a retry; it doubles up to 10 s, with jitter.
            probe_interval_s: seconds between looks at servers that are out.
            unhealthy_after: failures in a row, other than refused connections, that put a server
                out.
            on_event: called with (event, url, detail) for "unhealthy", "readmitted" and
                "foreign weights".
            api_key: sent with every request; no message shows it.

        Raises:
            ValueError: naming the argument that is not usable.
        """
        if not urls:
            raise ValueError("urls must name at least one rollout server, got none")
        for url in (*urls, *(control_urls or ())):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls must look like http://host:port, got {url!r}")
        if control_urls and len(urls) != 1:
            raise ValueError("control_urls needs exactly one address in urls, the router's")
        for name, value in (
            ("timeout_s", timeout_s),
            ("deadline_s", deadline_s),
            ("update_timeout_s", update_timeout_s),
            ("backoff_s", backoff_s),
            ("probe_interval_s", probe_interval_s),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive seconds, got {value}")
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        if max_connections < 0:
            raise ValueError(f"max_connections must not be negative, got {max_connections}")
        if pause_mode not in ("retract", "abort", "in_place"):
            raise ValueError(f"pause_mode must be retract, abort or in_place, got {pause_mode!r}")
        self.timeout_s = timeout_s
        self.retries = retries
        self.deadline_s = deadline_s
        self.max_connections = max_connections
        self.update_timeout_s = update_timeout_s
        self.pause_mode = pause_mode
        self.context_length = context_length
        self.counters = ClientCounters()
        self._backoff_s = backoff_s
        self._probe_interval_s = probe_interval_s
        self._unhealthy_after = unhealthy_after
        self._on_event = on_event
        self._api_key = api_key
        self._servers = [
            _Server(url, [u.rstrip("/") for u in control_urls] if control_urls else [url])
            for url in dict.fromkeys(url.rstrip("/") for url in urls)
        ]
        self._published: tuple[Path, int] | None = None
        # The newest version that any server may hold: above `_published` while an update runs.
        self._newest: int | None = None
        self._sticky: collections.OrderedDict[str, _Server] = collections.OrderedDict()
        self._abort_calls = 0
        self._background: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> SGLangClient:
        # Servers close idle connections after 5 s (uvicorn's default); a reused one that is being
        # closed looks like a dead server, so drop them earlier.
        headers = access.bearer(self._api_key)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.max_connections, keepalive_timeout=3.0),
            headers=headers,
        )
        # Apart from generations, which may hold every connection of theirs for minutes.
        self._control_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0), headers=headers
        )
        self._weights_lock = asyncio.Lock()
        self._monitor_task = asyncio.create_task(self._monitor())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._monitor_task.cancel()
        probes = [server.probe for server in self._servers if server.probe is not None]
        for task in probes:
            task.cancel()
        # Aborts and continues on their way out keep a server from working for nobody.
        if self._background:
            waited = await asyncio.wait(self._background, timeout=min(self.timeout_s, 15.0))
            for late in waited[1]:
                late.cancel()
            await asyncio.gather(*waited[1], return_exceptions=True)
        await asyncio.gather(self._monitor_task, *probes, return_exceptions=True)
        await self._session.close()
        await self._control_session.close()

    @property
    def published_version(self) -> int | None:
        """Version that every usable server has acknowledged; None before the first `publish`."""
        return None if self._published is None else self._published[1]

    def health(self) -> dict[str, str]:
        """Return "ok" or the reason why it is out, for every address of `urls`."""
        return {s.url: "ok" if s.healthy else s.last_error or "out" for s in self._servers}

    # ---------------------------------------------------------------- start

    async def check(self, *, wait_s: float = 0.0) -> None:
        """Make sure that every address is an SGLang server or router that answers.

        Learns the workers of a router and the shortest context length where they were not given.

        Args:
            wait_s: seconds to wait for servers that are still starting.

        Raises:
            RolloutError: naming the address, what was expected and what came.
        """
        give_up = _now() + wait_s
        ask_context = self.context_length is None
        for server in self._servers:
            while True:
                try:
                    await self._check_server(server, ask_context)
                    break
                except _Transient as error:
                    if _now() >= give_up:
                        raise RolloutError(
                            f"no rollout server answers at {server.url}: {error}. Start one there "
                            "(python -m copc_jax.rollout.server, or SGLang) or correct the address"
                        ) from error
                    await asyncio.sleep(min(1.0, self._backoff_s * 2))

    async def _check_server(self, server: _Server, ask_context: bool) -> None:
        if server.workers == [server.url]:
            try:
                await self._label(server.url)
            except RolloutUnauthorized:
                raise
            except RolloutError as error:
                # A router answers 404 here but lists its workers.
                listed = await self._router_workers(server.url)
                if not listed:
                    raise RolloutError(f"{server.url} is not an SGLang server: {error}") from error
                server.workers = listed
        for url in server.workers:
            try:
                await self._label(url)
            except RolloutUnauthorized:
                raise
            except RolloutError as error:
                raise RolloutError(f"{url} is not an SGLang server: {error}") from error
        await self._control("GET", server.url + "/health")
        if ask_context:
            lengths = [await self._context_length(url) for url in server.workers]
            known = [n for n in (self.context_length, *lengths) if n is not None]
            self.context_length = min(known, default=None)

    async def _router_workers(self, url: str) -> list[str]:
        with contextlib.suppress(RolloutError, ValueError, TypeError, KeyError):
            answer = json.loads(await self._control("GET", url + "/workers"))
            return [str(worker["url"]).rstrip("/") for worker in answer["workers"]]
        return []

    async def _context_length(self, url: str) -> int | None:
        """Ask for the longest prompt plus response; None from servers that do not say."""
        with contextlib.suppress(RolloutError, ValueError, AttributeError):
            info = json.loads(await self._control("GET", url + "/server_info"))
            # SGLang leaves context_length null unless it was set on the command line. It refuses
            # prompts of max_req_input_len tokens, six below it, and cuts responses that would come
            # closer than two without telling: the smaller number is what it keeps its word on.
            names = ("context_length", "max_req_input_len")
            return min((info[n] for n in names if isinstance(info.get(n), int)), default=None)
        return None

    # ---------------------------------------------------------------- generation

    async def generate(
        self,
        token_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        rid: str | None = None,
        seed: int | None = None,
        key: str | None = None,
    ) -> Generation:
        """Sample a continuation, across weight updates, aborts and server failures.

        Each attempt is a request id of its own, and one that timed out is aborted before the next
        is sent. A generation cut by an update goes on from its tokens; each token keeps the version
        that sampled it.

        Args:
            token_ids: i32[S] the whole prefix.
            sampling: limits; fewer than `max_new_tokens` are asked for when the context is short.
            rid: request id of the first attempt (a random uuid4 by default). SGLang aborts by
                prefix, so ids must have one length.
            seed: `sampling_seed` of the request.
            key: requests with the same key go to the same server while it is healthy, so that the
                prefix of earlier turns is cached there.

        Returns:
            The tokens. `finish` is "abort" only after `abort_all`; a prompt that fills the context
            gives no token and "length", without a request.

        Raises:
            RolloutUnavailable: no usable answer within `retries` and `deadline_s`.
            RolloutError: the request was refused (4xx), or the answer lacks valid log-probs.
        """
        prefix = [int(token) for token in token_ids]
        if not prefix:
            raise ValueError("token_ids must hold at least one token")
        budget = sampling.max_new_tokens
        if self.context_length is not None:
            budget = min(budget, self.context_length - len(prefix))
        if budget < 1:
            self.counters.too_long += 1
            return _join([], "length")
        deadline = _now() + self.deadline_s
        abort_calls = self._abort_calls
        parts: list[Generation] = []
        sampled = failed = 0
        while True:
            if self._abort_calls != abort_calls:
                return _join(parts, "abort")
            server = await self._choose(key, deadline)
            request: dict[str, Any] = {
                "rid": rid or uuid.uuid4().hex,
                "input_ids": prefix,
                "sampling_params": sampling.to_json(budget - sampled, _part_seed(seed, sampled)),
                "return_logprob": True,
            }
            if self.pause_mode == "in_place":
                request["extra_key"] = str(self.published_version)
            rid = None
            try:
                part = await self._attempt(server, request, deadline, key)
            except _Transient as error:
                failed += 1
                if failed > self.retries or _now() >= deadline:
                    raise RolloutUnavailable(
                        f"request {request['rid']} given up after {failed} failed attempts: {error}"
                    ) from error
                self.counters.retries += 1
                await self._back_off(failed, deadline)
                continue
            if len(part.token_ids):
                failed = 0
                parts.append(part)
                sampled += len(part.token_ids)
                prefix = prefix + part.token_ids.tolist()
                self.counters.tokens += len(part.token_ids)
            if part.finish != "abort":
                return _join(parts, part.finish, part.matched)
            if sampled >= budget:
                return _join(parts, "length")
            self.counters.aborts += 1
            if not len(part.token_ids):
                await self._back_off(1, deadline)

    def holding(self, version: int) -> list[str]:
        """Return the addresses of the workers in use that hold this published version."""
        servers = (s for s in self._servers if s.healthy and s.version == version)
        return [url for server in servers for url in server.workers]

    async def score(
        self, token_ids: Sequence[int] | np.ndarray, url: str
    ) -> tuple[np.ndarray, int]:
        """Have one worker compute the log-probabilities of given tokens, in one attempt.

        Returns:
            f32[S], at temperature 1, 0 for the first token; and the version of the weights, -1 for
            a label that is no version of a run.

        Raises:
            RolloutError: no answer, a refusal, or an answer without a log-probability of each token
                after the first one.
        """
        request = {
            "rid": uuid.uuid4().hex,
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        try:
            text = await self._call(
                self._control_session, "POST", url + "/generate", request, self._short_s
            )
            answer = json.loads(text)
        except (_Transient, ValueError) as error:
            if isinstance(error, _Transient) and error.timed_out:
                await self._abort_worker(url, {"rid": request["rid"]})
            raise RolloutUnavailable(f"{url} did not score: {error}") from error
        return parse_scores(answer, request["rid"], request["input_ids"])

    async def _attempt(
        self, server: _Server, request: dict[str, Any], deadline: float, key: str | None
    ) -> Generation:
        rid = request["rid"]
        # Before the first publish the weights that a server was started with count as version 0;
        # later no token may be older than what the server held when the request was sent.
        started_with = self._published is None
        floor = server.version
        epoch = server.epoch
        seconds = min(self.timeout_s, deadline - _now())
        if seconds <= 0:
            raise _Transient(f"no answer within the deadline of {self.deadline_s:g} s")
        headers = {"X-SMG-Routing-Key": key} if key else None
        self.counters.requests += 1
        server.in_flight += 1
        try:
            text = await self._call(
                self._session, "POST", server.url + "/generate", request, seconds, headers
            )
        except asyncio.CancelledError:
            self._spawn(self._abort(server, rid))
            raise
        except _Transient as error:
            if error.timed_out:
                self.counters.timeouts += 1
                await self._abort(server, rid)
            self._note_failure(server, error)
            raise
        finally:
            server.in_flight -= 1
        try:
            answer = json.loads(text)
        except ValueError as error:
            fault = _Transient(f"{server.url}/generate sent no JSON but {text[:200]!r}")
            self._note_failure(server, fault)
            raise fault from error
        server.failures = 0
        part = parse_generation(answer, rid, request["sampling_params"]["max_new_tokens"])
        if server.epoch != epoch:
            raise _Transient(f"{server.url} lost its weights while request {rid} ran")
        if started_with:
            version = np.where(part.weight_version == _FOREIGN, 0, part.weight_version)
            return dataclasses.replace(part, weight_version=version.astype(np.int32))
        return self._own(server, part, floor)

    def _own(self, server: _Server, part: Generation, floor: int | None) -> Generation:
        """Return `part` if weights of this run sampled every token; else put the server out."""
        assert self._newest is not None
        oldest = 0 if floor is None else floor
        foreign = (part.weight_version < oldest) | (part.weight_version > self._newest)
        if foreign.any():
            self.counters.foreign += 1
            held = int(part.weight_version[foreign][0])
            label = "no version of this run" if held == _FOREIGN else f"version {held}"
            detail = f"sampled with {label}, published is {self.published_version}"
            self._put_out(server, detail, trusted=False)
            self._report("foreign weights", server, detail)
            raise _Transient(detail)
        return part

    async def _choose(self, key: str | None, deadline: float) -> _Server:
        """Return the key's server or the least loaded one, waiting while all are out."""
        waited = 0
        while True:
            healthy = [server for server in self._servers if server.healthy]
            if healthy:
                server = self._sticky.get(key) if key is not None else None
                if server is None or not server.healthy:
                    server = min(healthy, key=lambda s: (s.in_flight, s.used))
                if key is not None:
                    self._sticky[key] = server
                    self._sticky.move_to_end(key)
                    if len(self._sticky) > _STICKY_KEYS:
                        self._sticky.popitem(last=False)
                server.used += 1
                return server
            left = deadline - _now()
            if left <= 0:
                reasons = "; ".join(f"{url}: {reason}" for url, reason in self.health().items())
                raise RolloutUnavailable(
                    f"no rollout server usable within {self.deadline_s:g} s: {reasons}"
                )
            # Waiting does not cancel the probes, which other requests may wait for as well.
            probes = [self._probe(server) for server in self._servers]
            await asyncio.wait(probes, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not any(server.healthy for server in self._servers):
                waited += 1
                await self._back_off(waited, deadline)

    async def abort_all(self) -> None:
        """Abort every running generation; their callers get what was sampled, with "abort"."""
        self._abort_calls += 1
        workers = [url for server in self._servers for url in server.workers]
        await asyncio.gather(*(self._abort_worker(url, {"abort_all": True}) for url in workers))

    async def _abort(self, server: _Server, rid: str) -> None:
        # A router has no /abort_request and does not say which worker has the request.
        await asyncio.gather(*(self._abort_worker(url, {"rid": rid}) for url in server.workers))

    async def _abort_worker(self, url: str, body: dict[str, Any]) -> None:
        try:
            await self._call(
                self._control_session, "POST", url + "/abort_request", body, self._short_s
            )
        except (_Transient, RolloutError) as error:
            logger.warning("abort not delivered: %s", error)

    # ---------------------------------------------------------------- weights

    async def publish(self, directory: str | Path, version: int) -> None:
        """Load a Hugging Face folder into every healthy server, tagged with `version`.

        Each server is paused, updated, asked for its version and continued, whatever happens in
        between. A server found dead is put out and gets the weights before it is used again; if
        all are dead, this waits for one up to `deadline_s`.

        Args:
            directory: folder that the servers can read; it must stay until the next publish.
            version: the learner's version, not below the published one.

        Raises:
            WeightUpdateError: a server refused, timed out, shows another version or stays paused,
                or no server is alive. `published_version` has not changed, and failed servers get
                the weights published before when they are next needed.
            ValueError: `version` is negative or below the published one.
        """
        path = Path(directory).resolve()
        async with self._weights_lock:
            oldest = 0 if self._published is None else self._published[1]
            if version < oldest:
                raise ValueError(f"version must be at least {oldest}, got {version}")
            self._newest = max(version, self._newest or 0)
            deadline = _now() + self.deadline_s
            attempt = 0
            while await self._load_all(path, version) == 0:
                attempt += 1
                if _now() >= deadline:
                    reasons = "; ".join(f"{url}: {why}" for url, why in self.health().items())
                    raise WeightUpdateError(f"version {version} not published: {reasons}")
                await self._back_off(attempt, deadline)
            self._published = (path, version)

    async def _load_all(self, path: Path, version: int) -> int:
        """Give weights to every healthy server, or to every one if none is; return how many took.

        Raises:
            WeightUpdateError: a server that lives did not take them.
        """
        servers = [s for s in self._servers if s.healthy] or self._servers
        results = await asyncio.gather(
            *(self._load(server, path, version) for server in servers), return_exceptions=True
        )
        taken = 0
        failures: list[str] = []
        for server, result in zip(servers, results, strict=True):
            if result is None:
                server.healthy = server.trusted = True
                server.failures = 0
                taken += 1
            elif isinstance(result, (_Transient, RolloutError)):
                self._put_out(server, str(result), trusted=False)
                if not (isinstance(result, _Transient) and result.refused):
                    failures.append(f"{server.url}: {result}")
            else:
                raise result
        if failures:
            raise WeightUpdateError(f"version {version} not published: " + "; ".join(failures))
        return taken

    async def versions(self) -> dict[str, int | None]:
        """Ask every worker for its weight version; None for dead ones and labels not ours."""

        async def ask(url: str) -> int | None:
            try:
                label = _version(await self._label(url))
            except (_Transient, RolloutError):
                return None
            return None if label == _FOREIGN else label

        workers = [url for server in self._servers for url in server.workers]
        return dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))

    async def _load(self, server: _Server, path: Path, version: int) -> None:
        """Give weights to all workers of a server; a dead worker counts only if all are dead."""
        results = await asyncio.gather(
            *(self._load_worker(url, path, version) for url in server.workers),
            return_exceptions=True,
        )
        errors = [result for result in results if result is not None]
        refused = [e for e in errors if isinstance(e, _Transient) and e.refused]
        for error in errors:
            if error not in refused or len(refused) == len(results):
                raise error
        server.version = version

    async def _load_worker(self, url: str, path: Path, version: int) -> None:
        update = {
            "model_path": str(path),
            "weight_version": str(version),
            # Keys and values of the old weights must not serve new requests. SGLang cannot flush
            # under frozen requests; `generate` then keeps versions apart by `extra_key`.
            "flush_cache": self.pause_mode != "in_place",
            "abort_all_requests": False,
        }
        try:
            await self._control("POST", url + "/pause_generation", {"mode": self.pause_mode})
            try:
                text = await self._control(
                    "POST", url + "/update_weights_from_disk", update, self.update_timeout_s
                )
                answer = json.loads(text)
            except (RolloutError, ValueError) as error:
                raise WeightUpdateError(f"{url} refused the weights in {path}: {error}") from error
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise WeightUpdateError(f"{url} refused the weights in {path}: {text[:300]}")
            label = await self._label(url)
            if label != str(version):
                raise WeightUpdateError(f"{url} shows version {label!r} instead of {version}")
        finally:
            # Shielded: cancelling an update must not leave a server paused.
            fault = await asyncio.shield(self._spawn(self._resume(url)))
        if isinstance(fault, _Transient) and fault.refused:
            # It died with the new weights: no other than one that died before.
            raise fault
        if fault is not None:
            raise WeightUpdateError(f"{url} took version {version} but did not continue: {fault}")

    async def _resume(self, url: str) -> _Transient | RolloutError | None:
        """Continue a paused server; return what went wrong."""
        try:
            await self._control("POST", url + "/continue_generation", {})
        except (_Transient, RolloutError) as error:
            logger.warning("%s may be left paused: %s", url, error)
            return error
        return None

    async def _label(self, url: str) -> str:
        """Return the weight version that a server shows.

        Raises:
            RolloutError: the answer is not that of an SGLang server.
        """
        text = await self._control("GET", url + "/model_info")
        try:
            return str(json.loads(text)["weight_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"GET {url}/model_info should give JSON with weight_version, got {text[:200]!r}"
            ) from error

    # ---------------------------------------------------------------- health

    def _note_failure(self, server: _Server, error: _Transient) -> None:
        server.failures += 1
        server.last_error = str(error)
        if error.refused or server.failures >= self._unhealthy_after:
            self._put_out(server, str(error), trusted=server.trusted)

    def _put_out(self, server: _Server, reason: str, *, trusted: bool) -> None:
        was_healthy = server.healthy
        server.healthy = False
        server.last_error = reason
        if not trusted and server.trusted:
            server.trusted = False
            server.epoch += 1
        if was_healthy:
            self._report("unhealthy", server, reason)

    def _probe(self, server: _Server) -> asyncio.Task[None]:
        if server.probe is None or server.probe.done():
            server.probe = asyncio.create_task(self._readmit(server))
        return server.probe

    async def _readmit(self, server: _Server) -> None:
        """Use a server again if it answers, after giving it the published weights if needed."""
        async with self._weights_lock:
            if server.healthy:
                return
            try:
                if self._published is None:
                    if not server.trusted:
                        return
                    await asyncio.gather(*map(self._resume, server.workers))
                else:
                    path, version = self._published
                    if server.trusted and await self._holds(server, version):
                        # An interrupted update may have left it paused, and then /health hangs.
                        await asyncio.gather(*map(self._resume, server.workers))
                        server.version = version
                    else:
                        await self._load(server, path, version)
                await self._control("GET", server.url + "/health")
            except (_Transient, RolloutError) as error:
                server.last_error = str(error)
                return
            server.healthy = server.trusted = True
            server.failures = 0
            self._report("readmitted", server, f"version {self.published_version}")

    async def _holds(self, server: _Server, version: int) -> bool:
        labels = await asyncio.gather(*map(self._label, server.workers), return_exceptions=True)
        for label in labels:
            if isinstance(label, BaseException) and len(labels) == 1:
                raise label
        return all(label == str(version) for label in labels)

    async def _monitor(self) -> None:
        """Look at servers that are out, so that they come back while others serve."""
        while True:
            await asyncio.sleep(self._probe_interval_s)
            for server in self._servers:
                if not server.healthy:
                    self._probe(server)

    def _report(self, event: str, server: _Server, detail: str) -> None:
        logger.warning("rollout server %s: %s (%s)", server.url, event, detail)
        if self._on_event is not None:
            self._on_event(event, server.url, detail)

    # ---------------------------------------------------------------- transport

    @property
    def _short_s(self) -> float:
        return min(self.timeout_s, 30.0)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: Any,
        seconds: float,
        headers: dict[str, str] | None = None,
    ) -> str:
        """Send one request and return the text of a good answer.

        Raises:
            _Transient: no connection, no answer, or one that asks to come again.
            RolloutUnauthorized: status 401.
            RolloutError: any other status below 500 but 2xx.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with session.request(
                method, url, json=body, timeout=timeout, headers=headers
            ) as reply:
                text = (await reply.read()).decode(errors="replace")
                # Messages quote answers, and a server may repeat what it was sent.
                text = access.hide(text, self._api_key)
                status = reply.status
        except TimeoutError as error:
            message = f"{method} {url} had no answer within {seconds:.3g} s"
            raise _Transient(message, timed_out=True) from error
        except aiohttp.ClientConnectorError as error:
            raise _Transient(f"{method} {url} failed: {error}", refused=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient(f"{method} {url} failed: {error or type(error).__name__}") from error
        if 200 <= status < 300:
            return text
        message = f"{method} {url} answered {status}: {text[:300]}"
        if status >= 500 or status in _TRY_AGAIN:
            raise _Transient(message)
        if status == 401:
            wrong = "none was sent" if self._api_key is None else "it does not take the one sent"
            raise RolloutUnauthorized(
                f"{message}. The server wants its API key and {wrong}: set {access.ROLLOUT_KEY}, "
                "or say where the key is with --rollout.api-key=env:NAME or file:PATH"
            )
        raise RolloutError(message)

    async def _control(
        self, method: str, url: str, body: Any = None, seconds: float | None = None
    ) -> str:
        """Call a path other than /generate; faults that pass are retried, dead servers are not."""
        attempt = 0
        while True:
            try:
                return await self._call(
                    self._control_session, method, url, body, seconds or self._short_s
                )
            except _Transient as error:
                attempt += 1
                if error.refused or error.timed_out or attempt > self.retries:
                    raise
                await self._back_off(attempt, math.inf)

    async def _back_off(self, attempt: int, deadline: float) -> None:
        pause = min(10.0, self._backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        await asyncio.sleep(max(0.0, min(pause, deadline - _now())))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        # The event loop holds tasks weakly; this set keeps them until they end.
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def parse_generation(answer: Any, rid: str, limit: int) -> Generation:
    """Read the answer of one /generate call.

    Ids and log-probs come from `meta_info.output_token_logprobs`, which keeps them together, and
    are held against `output_ids` and `completion_tokens`. Versions come from the spans of
    `meta_info.weight_versions`, or from the single `weight_version` of older servers.

    Args:
        answer: the decoded JSON.
        rid: request id, for messages.
        limit: the `max_new_tokens` that was asked for.

    Returns:
        The tokens; the version is -1 where the server's label is not a number.

    Raises:
        RolloutError: naming the request and the field that is missing or contradicts another.
    """

    def wrong(text: str) -> RolloutError:
        return RolloutError(f"answer to request {rid}: {text}")

    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        finish = reason["type"]
    except (KeyError, TypeError) as error:
        raise wrong(f"no meta_info.finish_reason in {str(answer)[:200]}") from error
    if finish not in ("stop", "length", "abort"):
        raise wrong(f"unknown finish_reason {reason}")
    if finish == "abort" and 400 <= (reason.get("status_code") or 0) < 500:
        raise wrong(f"refused: {reason}")
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if finish != "abort" or answer.get("output_ids"):
            raise wrong("no output_token_logprobs; training needs a server that returns them")
        pairs = []
    try:
        ids = [int(pair[1]) for pair in pairs]
        # A null log-prob is how JSON encoders write NaN.
        logprobs = [math.nan if pair[0] is None else float(pair[0]) for pair in pairs]
    except (TypeError, ValueError, IndexError) as error:
        raise wrong(f"output_token_logprobs must hold [log-prob, id] pairs: {error}") from error
    output_ids = answer.get("output_ids")
    if output_ids is not None and output_ids != ids:
        raise wrong(
            f"output_ids ({len(output_ids)} ids) differ from output_token_logprobs ({len(ids)})"
        )
    if meta.get("completion_tokens", len(ids)) != len(ids):
        raise wrong(f"completion_tokens is {meta['completion_tokens']} for {len(ids)} log-probs")
    if len(ids) > limit:
        raise wrong(f"{len(ids)} tokens for max_new_tokens {limit}")
    for index, value in enumerate(logprobs):
        if not math.isfinite(value) or value > _LOGPROB_SLACK:
            raise wrong(f"log-prob of token {index} is {value}; it must be finite and at most 0")
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprob=np.minimum(np.array(logprobs, np.float32), np.float32(0)),
        weight_version=_token_versions(meta, len(ids), wrong),
        finish=finish,
        matched=reason.get("matched"),
    )


def parse_scores(answer: Any, rid: str, token_ids: Sequence[int]) -> tuple[np.ndarray, int]:
    """Read the log-probabilities of a prompt from the answer of one /generate call.

    Args:
        answer: the decoded JSON.
        rid: request id, for messages.
        token_ids: the prompt.

    Returns:
        As `SGLangClient.score`.

    Raises:
        RolloutError: naming the request and what is wrong.
    """
    try:
        meta = answer["meta_info"]
        pairs = meta["input_token_logprobs"]
        version = _version(meta["weight_version"])
        ids = [pair[1] for pair in pairs]
        logprob = np.array([0.0, *(pair[0] for pair in pairs[1:])], np.float32)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RolloutError(
            f"answer to request {rid}: no log-probabilities of the prompt in {str(answer)[:200]}"
        ) from error
    # SGLang 0.5.23 names the last id of the vocabulary 0 here; its log-probability is right.
    if len(ids) != len(token_ids) or any(
        told not in (token, 0) for told, token in zip(ids, token_ids, strict=True)
    ):
        raise RolloutError(f"answer to request {rid}: input_token_logprobs are of other tokens")
    if not np.all(np.isfinite(logprob) & (logprob <= _LOGPROB_SLACK)):
        raise RolloutError(
            f"answer to request {rid}: log-probabilities of a prompt must be finite and at most 0"
        )
    return logprob, version


def _token_versions(
    meta: dict[str, Any], count: int, wrong: Callable[[str], RolloutError]
) -> np.ndarray:
    spans = meta.get("weight_versions")
    if spans is None:
        if "weight_version" not in meta:
            raise wrong("no weight_version; SGLang sends it from 0.5.3 on")
        return np.full(count, _version(meta["weight_version"]), np.int32)
    versions = np.full(count, _FOREIGN, np.int32)
    reached = 0
    try:
        for span in spans:
            start, end = span["start"], span["end"]
            if start != reached or end < start:
                raise ValueError("spans leave a gap or overlap")
            versions[start:end] = _version(span["version"])
            reached = end
        if reached != count:
            raise ValueError(f"spans end at {reached} of {count} tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"weight_versions {spans} unusable: {error}") from error
    return versions


def _version(label: Any) -> int:
    text = str(label)
    return int(text) if text.isdecimal() else _FOREIGN


def _part_seed(seed: int | None, sampled: int) -> int | None:
    """Return the seed of a part that starts after `sampled` tokens.

    A server draws token i of a response from (seed, i) and counts from 0 again when a generation is
    resumed: the same seed would use the same noise twice.
    """
    if seed is None or sampled == 0:
        return seed
    return int(np.random.SeedSequence([seed, sampled]).generate_state(1)[0]) & 0x7FFFFFFF


def _join(
    parts: Sequence[Generation], finish: Finish, matched: str | int | None = None
) -> Generation:
    empty = np.zeros(0, np.int32)
    return Generation(
        token_ids=np.concatenate([empty, *(part.token_ids for part in parts)]),
        logprob=np.concatenate([np.zeros(0, np.float32), *(part.logprob for part in parts)]),
        weight_version=np.concatenate([empty, *(part.weight_version for part in parts)]),
        finish=finish,
        matched=matched,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
