"""API keys of HTTP servers, in the form of SGLang's: `Authorization: Bearer KEY`.

A setting never holds a key but says where it is, as "env:NAME" or "file:PATH", because settings are
saved, printed and logged. No message here repeats a key, or what was given in the place of one.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import pathlib
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

# Where keys are by default; a variable that is not set is no key.
ROLLOUT_KEY = "COPC_API_KEY"
RETRIEVER_KEY = "COPC_RETRIEVER_API_KEY"

# Written where a key would have stood.
HIDDEN = "[key]"


def is_place(text: str) -> bool:
    """Whether `text` says where a key is."""
    kind, _, name = text.partition(":")
    return kind in ("env", "file") and bool(name)


def read_key(place: str) -> str | None:
    """Return the key that lies at "env:NAME" or "file:PATH"; None for a variable that is not set.

    Raises:
        ValueError: no such form, a file that cannot be read, or a key that no header can carry.
    """
    if not is_place(place):
        raise ValueError("an API key is given by its place, env:NAME or file:PATH, not by itself")
    kind, _, name = place.partition(":")
    if kind == "env":
        key = os.environ.get(name, "")
        return checked_key(key, place) if key else None
    try:
        key = pathlib.Path(name).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no API key can be read from {place}: {type(error).__name__}") from None
    return checked_key(key, place)


def checked_key(key: str, place: str) -> str:
    """Return a key that a header can carry.

    Raises:
        ValueError: naming `place` alone.
    """
    if not key or not all("!" <= character <= "~" for character in key):
        raise ValueError(
            f"the API key in {place} must be one or more visible ASCII characters without spaces"
        )
    return key


def bearer(key: str | None) -> dict[str, str]:
    """Return the headers that give a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def hide(text: str, key: str | None) -> str:
    """Return `text` without the key."""
    return text if key is None else text.replace(key, HIDDEN)


def require_key(key: str | None, open_paths: Collection[str]):
    """Return the middleware that answers 401 to requests without the key.

    Args:
        key: None lets everybody in.
        open_paths: need no key: a scheduler's probes have none.
    """
    expected = b"" if key is None else key.encode()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if key is not None and request.path not in open_paths and request.method != "OPTIONS":
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            # Compared in a time that does not depend on how much of it is right.
            right = hmac.compare_digest(given.encode(errors="surrogateescape"), expected)
            if scheme.lower() != "bearer" or not right:
                return web.json_response(
                    {"error": "Unauthorized"}, status=401, headers={"WWW-Authenticate": "Bearer"}
                )
        return await handler(request)

    return check


def exposure(host: str, key: str | None) -> str | None:
    """Return a warning where other machines may reach a server that asks for no key."""
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback or key is not None:
        return None
    return (
        f"warning: listening on {host or 'all addresses'} without an API key: whoever reaches this "
        "port can use and change what is served; set a key, or listen on 127.0.0.1"
    )
