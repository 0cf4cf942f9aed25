"""The embedded rollout server: SGLang's protocol over HTTP in front of the JAX engine.

    python -m copc_jax.rollout.server --model-path DIR --port 30000

One process, two threads: asyncio answers HTTP, the engine decodes. They meet once a dispatch, when
the engine hands over what has ended, so that no token costs a hop between threads.

A client sees SGLang 0.5.23, on /generate and on OpenAI's paths, with these deliberate differences:
/health answers at once while paused, prompts are checked against the vocabulary, `sampling_seed` is
honored, an abort names one request exactly, a stop on the last allowed token is a stop,
`ignore_eos` leaves `stop_token_ids` alone, a response may fill the context to its last position,
and weights that do not fit, cannot be flushed or lie outside of the allowed folders leave
everything as it was.

It listens on 127.0.0.1 and asks for no key unless told otherwise. With a key (`--api-key`, or
better the variable COPC_API_KEY, which other users of the machine cannot see) every path but
/health, /health_generate and /ready wants `Authorization: Bearer KEY`, as SGLang's do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import logging
import math
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from aiohttp import web
from tokenizers import Tokenizer

from copc_jax import access, hf
from copc_jax.model import ModelConfig
from copc_jax.rollout import openai
from copc_jax.rollout.engine import Engine, EngineDead, PauseMode
from copc_jax.rollout.programs import EngineConfig
from copc_jax.rollout.protocol import (
    Generate,
    Limits,
    ProtocolError,
    answer,
    body_error,
    is_stream,
    parse_generate,
    semantic_error,
)
from copc_jax.rollout.requests import Output, Request

logger = logging.getLogger(__name__)

# What a scheduler asks, which has no key; SGLang leaves the same open.
_OPEN = frozenset({"/health", "/health_generate", "/ready"})
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)

_EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _json(payload: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode(),
        status=status,
        content_type="application/json",
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the body that SGLang gives it."""
    try:
        return await handler(request)
    except ProtocolError as error:
        return _json(error.payload, status=error.status)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is over {request.client_max_size} bytes; send fewer or shorter prompts"
        return _json({"error": {"message": message}}, status=413)
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status)
    except EngineDead as error:
        return _json({"error": {"message": str(error)}}, status=503)


async def _body(request: web.Request) -> dict[str, Any]:
    """Read the JSON object that every POST must carry.

    Raises:
        ProtocolError: of the body shape.
    """
    raw = await request.read()
    if not raw:
        raise body_error("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required'}")
    if request.content_type != "application/json":
        raise body_error(
            "{'type': 'dataclass_type', 'loc': ('body',), 'msg': 'Input should be a dictionary'}: "
            f"the content type must be application/json, not {request.content_type}"
        )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise body_error(
            f"{{'type': 'json_invalid', 'loc': ('body',), 'msg': '{error}'}}"
        ) from None
    if not isinstance(body, dict):
        raise body_error("{'type': 'dataclass_type', 'loc': ('body',), 'msg': 'not an object'}")
    return body


def _field(body: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """Take a field of a control request.

    Raises:
        ProtocolError: of the body shape, when it is missing or of another type.
    """
    if name not in body and default is ...:
        raise body_error(
            f"{{'type': 'missing', 'loc': ('body', '{name}'), 'msg': 'Field required'}}"
        )
    value = body.get(name, default)
    if value is default or isinstance(value, kind):
        return value
    raise body_error(
        f"{{'type': '{kind.__name__}_type', 'loc': ('body', '{name}'), "
        f"'msg': 'Input should be a valid {kind.__name__}', 'input': {value!r}}}"
    )


# What the engine has said of the requests of one HTTP call, or that it will say no more.
_Outputs = asyncio.Queue[Output | EngineDead]


class Server:
    """The HTTP handlers, and the requests in flight between them and the engine.

    Args:
        model_path: folder with config.json, safetensors and tokenizer.json.
        engine_config: sizes of the engine.
        settings: command line settings, repeated in /server_info.
        api_key: what requests must bring; None asks for none.
        weight_roots: folders in which later weights may lie.
        max_body: bytes of a request.
        max_requests: responses that may be under way or asked for in one call.
    """

    def __init__(
        self,
        model_path: Path,
        engine_config: EngineConfig,
        settings: dict[str, Any],
        *,
        api_key: str | None,
        weight_roots: Sequence[Path],
        max_body: int,
        max_requests: int,
    ):
        self._api_key = api_key
        self._weight_roots = weight_roots
        self._max_body = max_body
        params, config = hf.load_hf(model_path)
        self._config = config
        self._architecture = config.to_hf()
        self._tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._tokenizer_path = str(model_path)
        self._settings = settings
        # No prompt that fits is longer, and tokenizing takes time for what does not fit, too.
        self._max_text = engine_config.max_length * max(map(len, self._tokenizer.get_vocab()))
        self._limits = Limits(
            config.vocab_size,
            engine_config.max_length,
            max_requests,
            lambda text: self._encode(text, add_special_tokens=True),
            lambda text: self._encode(text, add_special_tokens=False),
        )
        self._chat = hf.chat_template(model_path)
        self.engine = Engine(
            params,
            config,
            engine_config,
            decode=lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False),
            on_outputs=self._on_outputs,
            eos_ids=hf.eos_token_ids(model_path, config, self._tokenizer),
            on_death=self._on_death,
        )
        self.engine.model_path = str(model_path)
        self._started = time.time()
        self._loop: asyncio.AbstractEventLoop
        self._update_lock: asyncio.Lock
        self._closing: asyncio.Event
        self._live: dict[str, _Outputs] = {}
        seeds = random.Random(secrets.randbits(128))
        self._draw_seed = functools.partial(seeds.getrandbits, 63)

    # ---------------------------------------------------------------------------- life

    async def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> int:
        """Serve until SIGTERM, SIGINT or the engine's death.

        Args:
            listener: a bound socket.
            on_ready: called when requests are answered.

        Returns:
            The exit status.
        """
        self._loop = asyncio.get_running_loop()
        self._update_lock = asyncio.Lock()
        self._closing = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._closing.set)
        self.engine.start()
        # Clients that go away have their handler cancelled, which aborts what they asked for.
        runner = web.AppRunner(
            self._application(), handler_cancellation=True, shutdown_timeout=2.0, access_log=None
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=1024).start()
        on_ready()
        await self._closing.wait()
        # The aborted requests are answered with what they have before the connections close.
        ended = await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)
        await runner.cleanup()
        return 0 if ended and self.engine.error is None else 1

    def _application(self) -> web.Application:
        app = web.Application(
            middlewares=[_errors, access.require_key(self._api_key, _OPEN)],
            client_max_size=self._max_body,
        )
        both = ("GET", "POST")
        routes: list[tuple[Sequence[str], Sequence[str], Handler]] = [
            (("POST", "PUT"), ("/generate",), self._generate),
            (("POST",), ("/v1/completions",), self._completions),
            (("POST",), ("/v1/chat/completions",), self._chat_completions),
            (("GET",), ("/health", "/health_generate", "/ready", "/ping"), self._health),
            (("GET",), ("/model_info", "/get_model_info"), self._model_info),
            (("GET",), ("/server_info", "/get_server_info"), self._server_info),
            (("GET",), ("/v1/models",), self._models),
            (("GET",), ("/v1/loads",), self._loads),
            (both, ("/flush_cache",), self._flush_cache),
            (both, ("/abort_request",), self._abort_request),
            (both, ("/pause_generation",), self._pause),
            (both, ("/continue_generation",), self._continue),
            (("POST",), ("/update_weights_from_disk",), self._update_weights),
            (("POST",), ("/update_weight_version",), self._update_version),
            (("POST",), ("/tokenize",), self._tokenize),
            (("POST",), ("/detokenize",), self._detokenize),
        ]
        for methods, paths, handler in routes:
            for method in methods:
                for path in paths:
                    app.router.add_route(method, path, handler)
        return app

    def _on_death(self, error: BaseException) -> None:
        """Hear from the engine's thread that it ends."""
        self._loop.call_soon_threadsafe(self._give_up, error)

    def _give_up(self, error: BaseException) -> None:
        for outputs in self._live.values():
            outputs.put_nowait(EngineDead(f"the engine has ended: {error!r}"))
        self._closing.set()

    def _on_outputs(self, outputs: list[Output]) -> None:
        """Take a dispatch's outputs from the engine's thread."""
        self._loop.call_soon_threadsafe(self._hand_out, outputs)

    def _hand_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            # A request whose client has gone away is no longer here.
            if (queue := self._live.get(output.request.rid)) is not None:
                queue.put_nowait(output)

    # ---------------------------------------------------------------------------- generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrival = time.perf_counter()
        body = await _body(request)
        try:
            generate = parse_generate(body, self._limits, self._draw_seed)
            self._refuse_live(generate.requests)
        except ProtocolError as error:
            refused = error.payload["error"]
            if error.status != 400 or not is_stream(body) or not isinstance(refused, dict):
                raise
            return await self._stream_error(request, refused["message"])
        if generate.stream:
            return await self._stream(request, generate, arrival)
        answers = await self._whole(generate, arrival)
        return _json(answers[0] if generate.single else answers)

    async def _whole(self, generate: Generate, arrival: float) -> list[dict[str, Any]]:
        """Wait for the answers to all requests of a call, in their order."""
        answers: list[dict[str, Any]] = [{}] * len(generate.requests)
        async with contextlib.aclosing(self._answers(generate, arrival)) as coming:
            async for index, answered in coming:
                answers[index] = answered
        return answers

    async def _answers(
        self, generate: Generate, arrival: float
    ) -> AsyncGenerator[tuple[int, dict[str, Any]]]:
        """Yield answers with the index of their request as they come, until all have ended."""
        order = {request.rid: index for index, request in enumerate(generate.requests)}
        left = len(order)
        async with self._submitted(generate.requests) as outputs:
            while left:
                output = await _take(outputs)
                index = order[output.request.rid]
                left -= output.finish is not None
                yield index, self._answer(generate, index, output, arrival)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, "completion")

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, "chat")

    async def _openai(self, request: web.Request, kind: openai.Kind) -> web.StreamResponse:
        arrival = time.perf_counter()
        body = await _body(request)
        try:
            call = openai.read(kind, body, self._limits, self._chat)
            generate = parse_generate(call.body, self._limits, self._draw_seed)
            self._refuse_live(generate.requests)
        except ProtocolError as error:
            raise openai.refusal(error) from None
        if not generate.stream:
            answers = await self._whole(generate, arrival)
            decode = lambda ids: self._decode(ids, False)
            return _json(openai.answer(call, answers, decode))
        response = web.StreamResponse(headers=_EVENT_HEADERS)
        await response.prepare(request)
        chunks = openai.Chunks(call)
        async with contextlib.aclosing(self._answers(generate, arrival)) as answers:
            async for index, answered in answers:
                await response.write(_event(chunks.add(index, answered)))
        if call.include_usage:
            await response.write(_event(chunks.usage()))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _refuse_live(self, requests: Sequence[Request]) -> None:
        if len(self._live) + len(requests) > self._limits.max_requests:
            raise semantic_error(
                f"{len(self._live)} requests are under way and {len(requests)} more were sent, "
                f"but at most {self._limits.max_requests} are taken; try again later.",
                status=429,
            )
        for request in requests:
            if request.rid in self._live:
                raise semantic_error(f"Duplicate request ID detected: {request.rid}")

    @contextlib.asynccontextmanager
    async def _submitted(self, requests: Sequence[Request]) -> AsyncIterator[_Outputs]:
        """Queue requests and give the queue of their outputs; leaving early aborts them."""
        outputs: _Outputs = asyncio.Queue()
        rids = [request.rid for request in requests]
        self._live.update(dict.fromkeys(rids, outputs))
        try:
            submitted = self.engine.submit(requests)
            if submitted.done():
                # An engine that has ended refuses at once; one that ends later tells `_live`.
                submitted.result()
            yield outputs
        except BaseException:
            self.engine.abort(rids)
            raise
        finally:
            for rid in rids:
                del self._live[rid]

    async def _stream(
        self, request: web.Request, generate: Generate, arrival: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENT_HEADERS)
        await response.prepare(request)
        async with contextlib.aclosing(self._answers(generate, arrival)) as answers:
            async for index, payload in answers:
                if not generate.single:
                    payload["index"] = index
                await response.write(_event(payload))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream_error(self, request: web.Request, message: str) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENT_HEADERS)
        await response.prepare(request)
        error = {
            "message": message,
            "type": "invalid_request_error",
            "code": 400,
            "retryable": False,
        }
        await response.write(_event({"error": error}) + b"data: [DONE]\n\n")
        return response

    def _answer(
        self, generate: Generate, index: int, output: Output, arrival: float
    ) -> dict[str, Any]:
        return answer(
            output,
            self._decode,
            return_logprob=generate.return_logprob[index],
            return_text=generate.return_text,
            return_prompt_token_ids=generate.return_prompt_token_ids,
            latency_s=time.perf_counter() - arrival,
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self._max_text:
            raise semantic_error(
                f"The input ({len(text)} characters) is longer than any text of the model's "
                f"context length ({self._limits.max_length} tokens)."
            )
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise semantic_error("the text holds half of a surrogate pair.") from None

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    # ---------------------------------------------------------------------------- control

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if _field(body, "abort_all", bool, False):
            await asyncio.wrap_future(self.engine.abort_all())
        elif rid := _field(body, "rid", str, None):
            await asyncio.wrap_future(self.engine.abort([rid]))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = _field(await _body(request), "mode", str, "abort")
        modes: dict[str, PauseMode] = {mode: mode for mode in ("abort", "retract", "in_place")}
        if mode not in modes:
            raise body_error(
                "{'type': 'literal_error', 'loc': ('body', 'mode'), 'msg': \"Input should be "
                f"'abort', 'retract' or 'in_place'\", 'input': {mode!r}}}"
            )
        await asyncio.wrap_future(self.engine.pause(modes[mode]))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request)
        await asyncio.wrap_future(self.engine.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await _body(request)
        path = _field(body, "model_path", str)
        version = _field(body, "weight_version", str, None)
        flush = _field(body, "flush_cache", bool, True)
        if _field(body, "abort_all_requests", bool, False):
            await asyncio.wrap_future(self.engine.abort_all())
        async with self._update_lock:
            try:
                params = await asyncio.to_thread(self._load_weights, Path(path))
                frozen = await asyncio.wrap_future(
                    self.engine.update(params, version, flush=flush, path=path)
                )
            except (OSError, ValueError) as error:
                return _update_answer(False, f"Failed to update model weights: {error}", 0, 400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return _update_answer(True, message, frozen, 200)

    def _load_weights(self, path: Path) -> Any:
        """Read weights of the served model.

        Raises:
            OSError: when there are none.
            ValueError: when they lie elsewhere than they may, are not weights of this model, or not
                finite.
        """
        self._refuse_outside(path)
        if (path / "config.json").exists():
            config = hf.load_config(path)
            if _computation(config) != _computation(self._config):
                raise ValueError(f"{path} is of another model: {config}, not {self._config}")
        params = hf.load_weights(path, self._config)
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
            raise ValueError(f"{path} holds weights that are not finite")
        return params

    def _refuse_outside(self, path: Path) -> None:
        """Raise ValueError when a folder or a file in it lies, links followed, where none may."""
        roots = [root.resolve() for root in self._weight_roots]

        def inside(each: Path) -> bool:
            try:
                place = each.resolve()
            except RuntimeError:
                # A link to itself, on Python 3.12 and before.
                return False
            return any(place.is_relative_to(root) for root in roots)

        # The files only of a folder that may be read: nothing is said of others.
        if not inside(path) or not all(map(inside, path.iterdir() if path.is_dir() else ())):
            raise ValueError(
                f"{path} lies outside of the folders that weights may come from, "
                f"{', '.join(map(str, roots))}; start the server with --weights-root for another"
            )

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = _field(body, "new_version", str)
        if _field(body, "abort_all_requests", bool, True):
            await asyncio.wrap_future(self.engine.abort_all())
        await asyncio.wrap_future(self.engine.relabel(version))
        return _json(
            {
                "success": True,
                "message": f"Weight version updated to {version}",
                "new_version": version,
            }
        )

    async def _flush_cache(self, request: web.Request) -> web.Response:
        try:
            timeout_s = float(request.query.get("timeout", 0))
            if math.isnan(timeout_s):
                raise ValueError
        except ValueError:
            raise body_error(
                "{'type': 'float_parsing', 'loc': ('query', 'timeout'), "
                "'msg': 'Input should be a valid number'}"
            ) from None
        deadline = time.monotonic() + timeout_s
        while not await asyncio.wrap_future(self.engine.flush()):
            if time.monotonic() >= deadline:
                late = "Timed out waiting for idle state." if timeout_s else "Flush cache failed.\n"
                return web.Response(text=late, status=400)
            await asyncio.sleep(0.02)
        return web.Response(text=_FLUSHED)

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._limits.encode(_field(await _body(request), "prompt", str))
        length = self._limits.max_length
        return _json({"tokens": ids, "count": len(ids), "max_model_len": length})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = _field(await _body(request), "tokens", list)
        if not all(isinstance(t, int) and 0 <= t < self._config.vocab_size for t in tokens):
            raise semantic_error("tokens must be ids within the vocabulary.")
        return _json({"text": self._decode(tokens, True)})

    # ---------------------------------------------------------------------------- information

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.error is None else 503)

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": self.engine.model_path,
                "served_model_name": self.engine.model_path,
                "tokenizer_path": self._tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._architecture["model_type"],
                "architectures": self._architecture["architectures"],
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        counters = self.engine.counters()
        sizes = self.engine.sizes
        return _json(
            {
                **self._settings,
                "model_path": self._tokenizer_path,
                "tokenizer_path": self._tokenizer_path,
                "dtype": "float32",
                "device": jax.default_backend(),
                "tp_size": 1,
                "dp_size": 1,
                "context_length": sizes.max_length,
                "max_running_requests": sizes.slots,
                "max_total_num_tokens": sizes.slots * sizes.max_length,
                "max_req_input_len": sizes.max_length,
                "version": f"copc_jax {importlib.metadata.version('copc-jax')}",
                "startup_time": self._started,
                "internal_states": [
                    {
                        **counters,
                        **self.engine.load(),
                        "paused": self.engine.paused,
                        "weight_version": self.engine.version,
                        "process_cpu_seconds": time.process_time(),
                        "uptime_seconds": time.time() - self._started,
                    }
                ],
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        name = self.engine.model_path
        entry = {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "copc_jax",
            "root": name,
            "parent": None,
            "max_model_len": self._limits.max_length,
        }
        return _json({"object": "list", "data": [entry]})

    async def _loads(self, request: web.Request) -> web.Response:
        load, sizes = self.engine.load(), self.engine.sizes
        capacity = sizes.slots * sizes.max_length
        now = datetime.datetime.now(datetime.UTC)
        entry = {
            "timestamp": now.timestamp(),
            "dp_rank": 0,
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_used_tokens": load["tokens"],
            "max_total_num_tokens": capacity,
            "max_running_requests": sizes.slots,
            "token_usage": load["tokens"] / capacity,
            "utilization": load["running"] / sizes.slots,
            "queues": {
                "waiting": load["waiting"],
                "paused": load["frozen"],
                "retracted": load["retracted"],
            },
        }
        return _json({"timestamp": now.isoformat(), "loads": [entry]})


def _computation(config: ModelConfig) -> ModelConfig:
    """Keep of a configuration what changes the computation."""
    return dataclasses.replace(
        config, max_position_embeddings=1, bos_token_id=None, eos_token_ids=()
    )


async def _take(outputs: _Outputs) -> Output:
    output = await outputs.get()
    if isinstance(output, EngineDead):
        raise output
    return output


def _event(payload: dict[str, Any]) -> bytes:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _update_answer(success: bool, message: str, frozen: int, status: int) -> web.Response:
    payload = {"success": success, "message": message, "num_paused_requests": frozen}
    return _json(payload, status)


# -------------------------------------------------------------------------------------- command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m copc_jax.rollout.server",
        description="Serve a model with SGLang's protocol, on JAX.",
    )

    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(",") if part)

    default = EngineConfig()
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="Hugging Face folder with tokenizer.json")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port, 0 for a free one")
    add("--port-file", type=Path, help="file to write the port into when ready")
    add("--slots", type=int, default=default.slots, help="sequences decoded together")
    add(
        "--max-length", type=int, default=default.max_length, help="prompt plus response, in tokens"
    )
    add(
        "--steps-per-dispatch",
        type=int,
        default=default.steps_per_dispatch,
        help="tokens per sequence between two looks at the queue",
    )
    add(
        "--decode-rows",
        type=sizes,
        default=default.decode_rows,
        help="compiled decode batch sizes below --slots, such as 1,16",
    )
    add(
        "--prefill-rows",
        type=sizes,
        default=default.prefill_rows,
        help="compiled prefill batch sizes, such as 1,8",
    )
    add(
        "--prefill-chunks",
        type=sizes,
        default=default.prefill_chunks,
        help="compiled prefill lengths in tokens, such as 32,128",
    )
    add(
        "--attend",
        type=sizes,
        default=default.attend,
        help="compiled decode lengths, up to half of --max-length, such as 128,256",
    )
    add(
        "--enable-deterministic-inference",
        dest="deterministic",
        action="store_true",
        help="same bits for a request whatever else runs; SGLang's flag of that name",
    )
    add("--api-key", help=f"key that requests must bring; better set {access.ROLLOUT_KEY}")
    add(
        "--weights-root",
        type=Path,
        action="append",
        help="folder in which weights of /update_weights_from_disk may lie, links followed; give "
        "it again for more. By default the current folder, and that in which --model-path lies",
    )
    add("--max-body", type=_positive, default=64 << 20, help="bytes of a request")
    add(
        "--max-requests",
        type=_positive,
        default=8192,
        help="responses under way at a time, and of one call, each sample of each prompt counted",
    )
    add("--compilation-cache", type=Path, help="folder that keeps compiled programs between runs")
    add("--cpus", type=sizes, default=(), help="run on these CPUs only, such as 0 or 0,1 (Linux)")
    add("--parent-pid", type=int, help="end when this process does")
    add("--log-level", default="warning", help="debug, info, warning or error")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _default_roots(model_path: Path) -> list[Path]:
    parent = model_path.resolve().parent
    # The root of the file system is no restriction.
    return [Path.cwd(), model_path if parent == parent.parent else parent]


def _watch_parent(pid: int) -> None:
    """End this process within seconds of the end of process `pid`, whatever it is doing."""
    is_parent = os.getppid() == pid

    def alive() -> bool:
        if is_parent:
            return os.getppid() == pid
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def watch() -> None:
        while alive():
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _key(given: str | None) -> str | None:
    if given is not None:
        return access.checked_key(given, "--api-key")
    return access.read_key(f"env:{access.ROLLOUT_KEY}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    if options.parent_pid is not None:
        _watch_parent(options.parent_pid)
    if options.cpus:
        # Before JAX starts its thread pool, whose size follows the mask.
        if not hasattr(os, "sched_setaffinity"):
            parser.error("--cpus needs Linux")
        os.sched_setaffinity(0, options.cpus)
    if options.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Bound before the long part, so that a port in use is told at once; clients are refused
        # until the socket listens.
        listener.bind((options.host, options.port))
        sizes = EngineConfig(
            **{
                field.name: getattr(options, field.name)
                for field in dataclasses.fields(EngineConfig)
            }
        )
        key = _key(options.api_key)
        if (warning := access.exposure(options.host, key)) is not None:
            print(warning, file=sys.stderr, flush=True)
        roots = options.weights_root or _default_roots(options.model_path)
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name != "api_key"
        }
        settings["weights_root"] = [str(root) for root in roots]
        server = Server(
            options.model_path,
            sizes,
            settings,
            api_key=key,
            weight_roots=roots,
            max_body=options.max_body,
            max_requests=options.max_requests,
        )
    except (OSError, ValueError) as error:
        print(f"the rollout server cannot start: {error}", file=sys.stderr)
        return 2
    port = listener.getsockname()[1]

    def ready() -> None:
        if options.port_file is not None:
            # Written aside and renamed, so that nobody reads half a number.
            aside = options.port_file.with_name(f"{options.port_file.name}.{os.getpid()}")
            aside.write_text(f"{port}\n")
            os.replace(aside, options.port_file)
        print(f"ready http://{options.host}:{port}", flush=True)

    status = asyncio.run(server.run(listener, ready))
    if status:
        # The engine's thread may hang in a compilation or on a device that has failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
