"""`POST /mcp`: a plain ASGI callable, from bytes to bytes."""

import re
import time
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import structlog
from msgspec import UNSET

from app.asgi import (
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    headers_of,
    read_body,
    send_answer,
    text_header,
)
from app.auth.callers import Callers
from app.broker.context import Broker
from app.domain.task_ids import Fingerprints
from app.errors import (
    BrokerError,
    Invalid,
    StorageUnavailable,
    TooLarge,
    TooSlow,
    Unauthenticated,
)
from app.mcp import jsonrpc
from app.mcp.eras import Legacy, classify, mismatch, part, unsupported
from app.mcp.jsonrpc import INTERNAL_ERROR, INVALID_REQUEST, Request, RpcFailure
from app.mcp.modern import METHODS, Dispatcher
from app.telemetry import Metrics

log = structlog.get_logger(__name__)

_INTERNAL = RpcFailure(INTERNAL_ERROR, "Internal error; the broker's log says why", 500)
_BAD_BODY: dict[type[BrokerError], int] = {Invalid: 400, TooSlow: 408, TooLarge: 413}
_NOTHING = re.compile(rb"q\s*=\s*0(\.0*)?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


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


class McpEndpoint:
    """Answers MCP clients about the tasks of every backend."""

    def __init__(
        self,
        broker: Broker,
        callers: Callers,
        doorkeeper: Doorkeeper,
        metrics: Metrics,
        *,
        max_body_bytes: int,
        strict_headers: bool,
    ) -> None:
        self._broker = broker
        self._callers = callers
        self._doorkeeper = doorkeeper
        self._count = metrics.mcp.count
        self._max_body_bytes = max_body_bytes
        self._dispatch = Dispatcher(
            broker, strict_headers=strict_headers, name_missing=metrics.missing_mcp_name.inc
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        await send_answer(send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        try:
            headers = headers_of(scope)
        except TooLarge as error:
            return _refusal(431, error.detail)
        refusal = self._refuse(scope["method"], headers)
        if refusal is not None:
            return refusal
        try:
            body = await read_body(headers, receive, self._max_body_bytes)
            owner = await self._callers.owner(text_header(headers, b"authorization"))
        except Unauthenticated as error:
            return _unauthenticated(error, anonymous=b"authorization" not in headers)
        except StorageUnavailable as error:
            return _unavailable(None, error)
        except (Invalid, TooLarge, TooSlow) as error:
            return _refusal(_BAD_BODY[type(error)], error.detail)
        except ClientGone:
            raise
        except Exception:
            log.exception("mcp request failed before its message was read")
            return Answer(500, jsonrpc.error_body(None, _INTERNAL))
        return await self._carry_out(body, headers, self._broker.keyring.fingerprints(owner))

    def _refuse(self, method: str, headers: Headers) -> Answer | None:
        """The answer to a request that is turned away before its body is read."""
        why = self._doorkeeper.refuses(headers)
        if why is not None:
            return _refusal(403, why)
        if method != "POST":
            body = _refusal(405, "Send each message as a POST of its own").body
            return Answer(405, body, headers=((b"allow", b"POST"),))
        if not _is_json(headers.get(b"content-type", b"")):
            return _refusal(415, "Content-Type must be application/json")
        if not _accepts_both(headers.get(b"accept", b"*/*")):
            return _refusal(406, "Accept must list application/json and text/event-stream")
        return None

    async def _carry_out(self, body: bytes, headers: Headers, owner: Fingerprints) -> Answer:
        started = time.perf_counter()
        method = "invalid"
        try:
            message = jsonrpc.parse(body)
            if not isinstance(message, Request):
                return Answer(202)
            method = message.method if message.method in METHODS else "other"
            answer, outcome = await self._respond(message, headers, owner)
        except jsonrpc.BadMessage as bad:
            answer, outcome = Answer(bad.status, jsonrpc.error_body(bad.id, bad)), str(bad.code)
        self._count(method, outcome, time.perf_counter() - started)
        return answer

    async def _respond(
        self, request: Request, headers: Headers, owner: Fingerprints
    ) -> tuple[Answer, str]:
        """The answer to a request, and what to count it as."""
        try:
            return Answer(200, await self._result(request, headers, owner)), "ok"
        except RpcFailure as failure:
            body = jsonrpc.error_body(request.id, failure)
            return Answer(failure.status, body), str(failure.code)
        except StorageUnavailable as error:
            return _unavailable(request.id, error), "unavailable"
        except Exception:
            log.exception("mcp request failed", method=request.method[:64])
            return Answer(500, jsonrpc.error_body(request.id, _INTERNAL)), str(INTERNAL_ERROR)

    async def _result(self, request: Request, headers: Headers, owner: Fingerprints) -> bytes:
        era = classify(request, headers)
        if isinstance(era, RpcFailure):
            raise era
        if isinstance(era, Legacy):
            raise _not_modern(era, headers)
        result = await self._dispatch(request.method, era, headers, owner)
        return jsonrpc.result_body(request.id, result)


def _not_modern(request: Legacy, headers: Headers) -> RpcFailure:
    version = text_header(headers, b"mcp-protocol-version")
    if version is not None:
        return unsupported(version)
    if request.params.protocolVersion is not UNSET:
        return unsupported(part(request.params.protocolVersion, str, "params.protocolVersion"))
    return mismatch("the MCP-Protocol-Version header is missing")


@lru_cache(maxsize=256)
def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


@lru_cache(maxsize=256)
def _accepts_both(accept: bytes) -> bool:
    admitted = set()
    for item in accept.lower().split(b","):
        media, *parameters = (part.strip() for part in item.split(b";"))
        if not any(_NOTHING.fullmatch(parameter) for parameter in parameters):
            admitted.add(media)
    return all(
        not admitted.isdisjoint({exact, exact.partition(b"/")[0] + b"/*", b"*/*"})
        for exact in (b"application/json", b"text/event-stream")
    )


def _refusal(status: int, why: str) -> Answer:
    """A request that never became a message: a JSON-RPC error without an id."""
    return Answer(status, jsonrpc.error_body(None, RpcFailure(INVALID_REQUEST, why, status)))


def _unauthenticated(error: BrokerError, *, anonymous: bool) -> Answer:
    challenge = b"Bearer" if anonymous else b'Bearer error="invalid_token"'
    body = jsonrpc.error_body(None, RpcFailure(INVALID_REQUEST, error.detail, 401))
    return Answer(401, body, headers=((b"www-authenticate", challenge),))


def _unavailable(rpc_id: bytes | None, error: BrokerError) -> Answer:
    body = jsonrpc.error_body(rpc_id, RpcFailure(INTERNAL_ERROR, error.detail, 503))
    return Answer(503, body, headers=((b"retry-after", b"1"),))
