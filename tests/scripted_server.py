"""A scripted SGLang server and router on loopback, for tests that need real HTTP and chosen faults.

    with ScriptedServer() as server:
        server.script("/generate", Tokens([5, 6, 7]), Status(503), Drop())
        ... the first three POST /generate get these answers, in this order ...
        server.sent("/generate")            # the JSON bodies that arrived, oldest first

Each server runs in a thread of its own with its own event loop and a free port. Every request takes
the next step that was scripted for its path; without one the server behaves as a healthy SGLang
0.5.23 does: it keeps a weight version ("default" after a start), blocks /generate while paused,
loads weights on /update_weights_from_disk, and aborts by rid with the partial output.

Steps, all with `delay` seconds before the answer:
    Tokens(ids, seconds=..., finish=..., matched=..., change=...)  a generation. `seconds` spreads
        the tokens over time, so that a pause, an update or an abort can hit in the middle: each
        token is tagged with the version that the server has when it comes. `change` is a function
        that edits the answer before it is sent: too few log-probs, NaN, another version and so on.
    Status(code, body)   an HTTP error, or 200 with any text: garbage.
    Json(object)         200 with this JSON.
    Drop()               closes the connection without an answer.
    Behave()             what the server would do without a script; to let some requests through.

`server.policy = function(body) -> Tokens` replaces the default sampler for unscripted requests, and
`server.scores = function(ids) -> list` gives the log-probs of a prompt that asks for them.
`server.stop()` closes the port, `server.start()` opens the same port again with version "default":
a restart that forgot its weights. `ScriptedRouter([url, url])` answers like sglang-router 0.3.2:
/generate goes round the workers, GET /workers lists them, control paths are 404. `Forgetful(url,
updates, folder)` passes everything on to a real server, but after some updates of the weights it
has the last ones loaded again under each new label. `FaultyProxy(url)` stands before a real server
and lets everything through but what `fault` spoils.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

CONTROL = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/abort_request",
)
LOGPROB = -0.5


@dataclasses.dataclass(frozen=True)
class Tokens:
    ids: list[int]
    logprobs: list[float] | None = None
    seconds: float = 0.0
    finish: str | None = None
    matched: str | int | None = None
    change: Callable[[dict[str, Any]], None] | None = None
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Status:
    code: int
    body: str = '{"error":{"message":"scripted"}}'
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Json:
    value: Any
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Drop:
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Behave:
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Change:
    """The real answer of a proxied server, edited: too few log-probs, NaN, another version."""

    edit: Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Request:
    path: str
    body: Any
    time: float
    headers: dict[str, str]


def count_up(body: dict[str, Any]) -> Tokens:
    """Default sampler: ids that depend on prompt length and seed, until max_new_tokens."""
    sampling = body["sampling_params"]
    first = len(body["input_ids"]) + int(sampling.get("sampling_seed") or 0)
    return Tokens([(first + index) % 50 + 1 for index in range(sampling["max_new_tokens"])])


class _Threaded:
    """An aiohttp application in a thread; `stop` frees the port, `start` takes the same one."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[Request] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, path: str) -> list[Any]:
        return [request.body for request in self.requests if request.path == path]

    def paths(self) -> list[str]:
        """Paths of the requests in the order of arrival, without the information requests."""
        return [r.path for r in self.requests if r.path == "/generate" or r.path in CONTROL]

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10), "the scripted server did not start"

    def stop(self) -> None:
        if self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        assert self._thread is not None
        self._thread.join(10)
        self._loop = None

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            application = web.Application(client_max_size=2**26)
            application.router.add_route("*", "/{path:.*}", self._handle)
            await self._begin()
            # Handlers are cancelled when the peer goes away, as SGLang aborts such requests.
            runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True, backlog=1024)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()
            await self._stop.wait()
            await runner.cleanup()
            await self._end()

        asyncio.run(serve())

    async def _begin(self) -> None: ...

    async def _end(self) -> None: ...

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        self.requests.append(Request(request.path, body, time.monotonic(), dict(request.headers)))
        return await self._answer(request, body)

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        raise NotImplementedError


class ScriptedServer(_Threaded):
    def __init__(self, *, context_length: int = 4096) -> None:
        super().__init__()
        self.context_length = context_length
        self.policy: Callable[[dict[str, Any]], Tokens] = count_up
        self.scores: Callable[[list[int]], list[Any]] = lambda ids: [LOGPROB] * len(ids)
        self.version = "default"
        self.loaded: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.running = 0
        self.peak = 0
        self._steps: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)

    def script(self, path: str, *steps: Any) -> None:
        self._steps[path].extend(steps)

    @property
    def paused(self) -> bool:
        return not self._go.is_set()

    async def _begin(self) -> None:
        self.version = "default"
        self._live: set[str] = set()
        self._cut: set[str] = set()
        self._go = asyncio.Event()
        self._go.set()

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        steps = self._steps[request.path]
        step = steps.popleft() if steps else Behave()
        if step.delay:
            await asyncio.sleep(step.delay)
        if isinstance(step, Status):
            return web.Response(status=step.code, text=step.body)
        if isinstance(step, Json):
            return web.json_response(step.value)
        if isinstance(step, Drop):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if request.path in CONTROL and body is None:
            return web.json_response(
                {"object": "error", "message": "body", "code": 400}, status=400
            )
        match request.path:
            case "/generate":
                return await self._generate(body, step)
            case "/health" | "/health_generate":
                return web.Response()
            case "/model_info" | "/get_model_info":
                return web.json_response({"model_path": "m", "weight_version": self.version})
            case "/server_info" | "/get_server_info":
                return web.json_response({"context_length": self.context_length})
            case "/pause_generation":
                self._go.clear()
                if body.get("mode", "abort") == "abort":
                    self._cut |= self._live
                return web.json_response({"status": "ok"})
            case "/continue_generation":
                self._go.set()
                return web.json_response({"status": "ok"})
            case "/abort_request":
                self._abort(body)
                return web.Response()
            case "/update_weights_from_disk":
                return self._update(body)
            case "/flush_cache":
                return web.Response(text="Cache flushed.\n")
        return web.json_response({"detail": "Not Found"}, status=404)

    def _abort(self, body: dict[str, Any]) -> None:
        rids = self._live if body.get("abort_all") else {body.get("rid")} & self._live
        self.aborted.extend(sorted(rids))
        self._cut |= rids

    def _update(self, body: dict[str, Any]) -> web.Response:
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            return web.json_response({"object": "error", "code": 400}, status=400)
        self.loaded.append(body["model_path"])
        if version is not None:
            self.version = version
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _generate(self, body: dict[str, Any], step: Any) -> web.Response:
        rid = body["rid"]
        if rid in self._live:
            message = f"Duplicate request IDs detected: {rid}"
            return web.json_response({"error": {"message": message}}, status=400)
        limit = body["sampling_params"]["max_new_tokens"]
        if limit < 0 or len(body["input_ids"]) + limit > self.context_length:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self._live.add(rid)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self._go.wait()
            tokens = step if isinstance(step, Tokens) else self.policy(body)
            answer = await self._sample(rid, tokens, limit)
            if body.get("logprob_start_len") == 0:
                pairs = zip(self.scores(body["input_ids"]), body["input_ids"], strict=True)
                scores = [[logprob, token, None] for logprob, token in pairs]
                scores[0][0] = None
                answer["meta_info"]["input_token_logprobs"] = scores
        finally:
            self.running -= 1
            self._live.discard(rid)
            self._cut.discard(rid)
        self.finished.append(rid)
        # dumps and not json_response: Python's encoder writes NaN, which some tests want.
        return web.Response(text=json.dumps(answer), content_type="application/json")

    async def _sample(self, rid: str, tokens: Tokens, limit: int) -> dict[str, Any]:
        ids = tokens.ids[:limit]
        logprobs = tokens.logprobs or [LOGPROB] * len(tokens.ids)
        output: list[list[Any]] = []
        spans: list[dict[str, Any]] = []
        finish: dict[str, Any] | None = None
        for index, token in enumerate(ids):
            if tokens.seconds:
                await asyncio.sleep(tokens.seconds / len(ids))
            if rid in self._cut:
                finish = {"type": "abort", "message": "Aborted", "status_code": None}
                break
            await self._go.wait()
            output.append([logprobs[index], token, None])
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        if finish is None:
            kind = tokens.finish or ("length" if len(ids) == limit else "stop")
            finish = {"type": kind}
            if kind == "stop":
                finish["matched"] = tokens.matched
            elif kind == "length":
                finish["length"] = len(ids)
        answer: dict[str, Any] = {
            "text": "",
            "output_ids": [item[1] for item in output],
            "meta_info": {
                "id": rid,
                "finish_reason": finish,
                "weight_version": self.version,
                "output_token_logprobs": output,
                "completion_tokens": len(output),
                "weight_versions": spans or [{"version": self.version, "start": 0, "end": 0}],
            },
        }
        if tokens.change is not None:
            tokens.change(answer)
        return answer


class ScriptedRouter(_Threaded):
    def __init__(self, workers: list[str]) -> None:
        super().__init__()
        self.workers = workers
        self._turn = 0

    async def _begin(self) -> None:
        self._session = aiohttp.ClientSession()

    async def _end(self) -> None:
        await self._session.close()

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        if request.path == "/workers":
            listed = [{"id": str(i), "url": url} for i, url in enumerate(self.workers)]
            return web.json_response({"workers": listed})
        if request.path == "/health":
            return web.Response()
        if request.path == "/generate":
            for _ in self.workers:
                worker = self.workers[self._turn % len(self.workers)]
                self._turn += 1
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    async with self._session.post(worker + "/generate", json=body) as reply:
                        text = await reply.text()
                        return web.Response(
                            status=reply.status, text=text, content_type="application/json"
                        )
            return web.json_response({"error": {"code": "no_available_workers"}}, status=503)
        return web.Response(status=404)


class Forgetful(_Threaded):
    def __init__(self, server: str, updates: int, folder: Path) -> None:
        super().__init__()
        self.server = server
        self._left = updates
        self._folder = folder

    async def _begin(self) -> None:
        self._session = aiohttp.ClientSession()

    async def _end(self) -> None:
        await self._session.close()

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        if request.path == "/update_weights_from_disk":
            if self._left:
                self._left -= 1
                # The sender removes its folders in time.
                shutil.rmtree(self._folder, ignore_errors=True)
                shutil.copytree(body["model_path"], self._folder)
            else:
                body["model_path"] = str(self._folder)
        async with self._session.request(
            request.method, self.server + request.path, json=body
        ) as reply:
            return web.Response(
                status=reply.status, body=await reply.read(), content_type=reply.content_type
            )


class FaultyProxy(_Threaded):
    """Passes requests on to a real server.

    `fault` is given each path and body, and returns a step (Status, Json, Drop, Change, or Behave
    with a delay) to spoil that request with, or None to leave it alone.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.fault: Callable[[str, Any], Any] = lambda path, body: None
        self.spoiled = 0
        self._server = url

    async def _begin(self) -> None:
        self._session = aiohttp.ClientSession()

    async def _end(self) -> None:
        await self._session.close()

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        step = self.fault(request.path, body)
        if step is not None:
            self.spoiled += 1
        if isinstance(step, Status | Json | Drop | Behave):
            await asyncio.sleep(step.delay)
        if isinstance(step, Status):
            return web.Response(status=step.code, text=step.body)
        if isinstance(step, Json):
            return web.json_response(step.value)
        if isinstance(step, Drop):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        url = self._server + request.path_qs
        async with self._session.request(request.method, url, json=body) as reply:
            text = await reply.text()
            if isinstance(step, Change) and reply.status == 200:
                answer = json.loads(text)
                step.edit(answer)
                # Python's encoder writes NaN, which some tests want.
                text = json.dumps(answer)
            return web.Response(
                status=reply.status, text=text, content_type=reply.content_type or "text/plain"
            )
