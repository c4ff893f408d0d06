"""The door of every MCP endpoint: who may knock, and the answers to those who may not come in."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog

from app.asgi import Answer, Headers, text_header
from app.broker.context import Caller
from app.errors import (
    BrokerError,
    HeadersTooLarge,
    Invalid,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
)
from app.mcp import jsonrpc
from app.mcp.jsonrpc import INTERNAL_ERROR, INVALID_REQUEST, RpcFailure
from app.mcp.resources import challenge

log = structlog.get_logger(__name__)

_NOTHING = re.compile(rb"q\s*=\s*0(\.0*)?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
JSON, EVENT_STREAM = b"application/json", b"text/event-stream"
BOTH = "Accept must list application/json and text/event-stream"
INTERNAL = RpcFailure(INTERNAL_ERROR, "Internal error; the broker's log says why", 500)
_STATUS: dict[type[BrokerError], int] = {
    Invalid: 400,
    TooSlow: 408,
    TooLarge: 413,
    HeadersTooLarge: 431,
}


class Visitor(NamedTuple):
    """An MCP client that was let in."""

    caller: Caller
    scopes: frozenset[str] | None
    """What its token was granted, if that is one that has scopes."""
    metadata_url: str | None
    """Where it can read about the door that it came through."""


class Doorkeeper:
    """Which `Host` and `Origin` may knock (DNS rebinding; "Streamable HTTP / Security")."""

    def __init__(
        self, *, bound_to: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]
    ) -> None:
        self._local = bound_to in LOOPBACK
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        self._remembered = lru_cache(maxsize=256)(self._judge)

    def refuses(self, headers: Headers) -> str | None:
        """Why a request may not come in, `None` when it may."""
        return self._remembered(text_header(headers, b"origin"), text_header(headers, b"host"))

    def _judge(self, origin: str | None, host: str | None) -> str | None:
        if origin is not None and not self._origin_allowed(origin):
            return "This Origin is not allowed here; the operator can allow it in ALLOWED_ORIGINS"
        if (self._local or self._hosts) and not self._host_allowed(host or ""):
            return "This Host is not allowed here; the operator can allow it in ALLOWED_HOSTS"
        return None

    def _origin_allowed(self, origin: str) -> bool:
        if origin.lower().rstrip("/") in self._origins:
            return True
        return self._local and _hostname(origin) in LOOPBACK

    def _host_allowed(self, host: str) -> bool:
        name = _hostname(f"//{host}")
        return (
            name in self._hosts or host.lower() in self._hosts or (self._local and name in LOOPBACK)
        )


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=256)
def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def accepts(headers: Headers, media: bytes) -> bool:
    """Whether a client takes answers of a media type."""
    admitted = _admitted(headers.get(b"accept", b"*/*"))
    return not admitted.isdisjoint({media, media.partition(b"/")[0] + b"/*", b"*/*"})


@lru_cache(maxsize=256)
def _admitted(accept: bytes) -> frozenset[bytes]:
    admitted = set()
    for item in accept.lower().split(b","):
        media, *parameters = (part.strip() for part in item.split(b";"))
        if not any(_NOTHING.fullmatch(parameter) for parameter in parameters):
            admitted.add(media)
    return frozenset(admitted)


def unfit(headers: Headers) -> Answer | None:
    """The answer to a request whose body is no JSON, or that takes no JSON back."""
    if not _is_json(headers.get(b"content-type", b"")):
        return refusal(415, "Content-Type must be application/json")
    if not accepts(headers, JSON):
        return refusal(406, BOTH)
    return None


def refusal(
    status: int, why: str, *headers: tuple[bytes, bytes], rpc_id: bytes | None = None
) -> Answer:
    """A request that never became a message: a JSON-RPC error."""
    body = jsonrpc.error_body(rpc_id, RpcFailure(INVALID_REQUEST, why, status))
    return Answer(status, body, headers=headers)


def turned_away(
    error: BrokerError,
    headers: Headers,
    rpc_id: bytes | None = None,
    metadata_url: str | None = None,
) -> Answer:
    """The answer to a request that failed before its message was read.

    `rpc_id` is its id if that was seen: some clients show an error only if it has one.
    `metadata_url` tells where to read about the door.
    """
    if isinstance(error, Unauthenticated):
        invalid = {"error": "invalid_token"} if b"authorization" in headers else {}
        return refusal(401, error.detail, challenge(metadata_url, **invalid), rpc_id=rpc_id)
    if isinstance(error, Unavailable):
        return unavailable(rpc_id, error)
    status = _STATUS.get(type(error))
    if status is None:
        log.error("mcp request failed before its message was read", exc_info=error)
        return Answer(500, jsonrpc.error_body(None, INTERNAL))
    return refusal(status, error.detail)


def insufficient_scope(scope: str, visitor: Visitor, rpc_id: bytes | None) -> Answer:
    """The answer to a request for which a token with another scope is needed."""
    needed = challenge(visitor.metadata_url, error="insufficient_scope", scope=scope)
    why = f"The access token needs the scope {scope} for this"
    return refusal(403, why, needed, rpc_id=rpc_id)


def unavailable(rpc_id: bytes | None, error: BrokerError) -> Answer:
    body = jsonrpc.error_body(rpc_id, RpcFailure(INTERNAL_ERROR, error.detail, 503))
    return Answer(503, body, headers=((b"retry-after", b"1"),))
