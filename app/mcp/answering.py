"""From one message about tasks to its answer, whichever door it came through."""

import time
from collections.abc import Awaitable, Callable

import structlog
from msgspec import UNSET

from app.asgi import Answer, Headers, text_header
from app.auth.cursors import Cursors
from app.broker.context import Broker, Caller
from app.errors import Unavailable
from app.mcp import jsonrpc
from app.mcp.door import (
    BOTH,
    EVENT_STREAM,
    INTERNAL,
    Visitor,
    accepts,
    insufficient_scope,
    unavailable,
)
from app.mcp.eras import MODERN, Legacy, Modern, UnsupportedVersion, classify, mismatch, part
from app.mcp.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    Notification,
    Request,
    Response,
    RpcFailure,
)
from app.mcp.legacy import METHODS as LEGACY_METHODS
from app.mcp.legacy import Call, LegacyDispatcher, withdrawn_request
from app.mcp.listening import Listening
from app.mcp.modern import METHODS as MODERN_METHODS
from app.mcp.modern import Dispatcher
from app.mcp.rechecking import Rechecking
from app.mcp.scopes import ANSWER, Scopes
from app.mcp.streams import Held, Holding
from app.telemetry import Metrics
from app.views import legacy as legacy_view
from app.views import modern

log = structlog.get_logger(__name__)

METHODS = MODERN_METHODS | LEGACY_METHODS


class Answering:
    """Answers MCP clients about tasks."""

    def __init__(
        self,
        broker: Broker,
        cursors: Cursors,
        holding: Holding,
        listening: Listening,
        rechecking: Rechecking,
        scopes: Scopes,
        metrics: Metrics,
        *,
        legacy: bool,
        strict_headers: bool,
    ) -> None:
        self._count = metrics.mcp.count
        self.versions = (modern.VERSION, *(legacy_view.VERSIONS if legacy else ()))
        self._holding = holding
        self._scopes = scopes
        self._modern = Dispatcher(
            broker,
            self.versions,
            listening,
            strict_headers=strict_headers,
            name_missing=metrics.missing_mcp_name.inc,
        )
        self._legacy = LegacyDispatcher(broker, rechecking, cursors) if legacy else None
        self._methods: dict[type, Callable[..., Awaitable[str | Held]]] = {
            Modern: self._in_modern,
            Legacy: self._in_legacy,
        }

    async def __call__(self, body: bytes, headers: Headers, visitor: Visitor) -> Answer | Held:
        """The answer to the message in a body; 202 for what needs none."""
        started = time.perf_counter()
        method, era = "invalid", "none"
        answer: Answer | Held
        try:
            message = jsonrpc.parse(body)
            lacking = self._scopes.lacking(_wanted(message), visitor.scopes)
            if isinstance(message, Request):
                method = message.method if message.method in METHODS else "other"
            else:
                method = "message"
            if lacking is not None:
                rpc_id = message.id if isinstance(message, Request) else None
                answer, outcome = insufficient_scope(lacking, visitor, rpc_id), "403"
            elif isinstance(message, Request):
                era, answer, outcome = await self._respond(message, headers, visitor.caller)
            else:
                answer, outcome = await self._take(message, visitor.caller), "ok"
        except jsonrpc.BadMessage as bad:
            answer, outcome = Answer(bad.status, jsonrpc.error_body(bad.id, bad)), str(bad.code)
        self._count(method, era, outcome, time.perf_counter() - started)
        return answer

    @property
    def takes_answers(self) -> bool:
        """Whether clients answer questions by messages of their own."""
        return self._legacy is not None

    async def _take(self, message: Notification | Response, caller: Caller) -> Answer:
        """Takes a message that needs no answer."""
        try:
            if isinstance(message, Response) and self._legacy is not None:
                await self._legacy.take_answer(message, caller)
            if isinstance(message, Notification):
                withdrawn = withdrawn_request(message)
                if withdrawn is not None:
                    self._holding.withdraw(caller.owner[0], withdrawn)
        except Unavailable as error:
            return unavailable(None, error)
        except Exception:
            log.exception("a message could not be taken")
            return Answer(500, jsonrpc.error_body(None, INTERNAL))
        return Answer(202)

    async def _respond(
        self, request: Request, headers: Headers, caller: Caller
    ) -> tuple[str, Answer | Held, str]:
        """The era of a request, its answer, and what to count that as."""
        name = MODERN
        try:
            era = classify(request, headers)
            name = era.name
            result = await self._methods[type(era)](request, era, headers, caller)
        except UnsupportedVersion as asked:
            failure = asked.failure(self.versions)
            return name, _failed(request, failure), str(failure.code)
        except jsonrpc.StoredFailure as failure:  # given as it was stored: that went well
            return name, _failed(request, failure), "ok"
        except RpcFailure as failure:
            return name, _failed(request, failure), str(failure.code)
        except Unavailable as error:
            return name, unavailable(request.id, error), "unavailable"
        except Exception:
            log.exception("mcp request failed", method=request.method[:64])
            body = jsonrpc.error_body(request.id, INTERNAL)
            return name, Answer(500, body), str(INTERNAL_ERROR)
        if isinstance(result, Held):
            if not self._holding.admits(result):
                await result.close()
                return name, _too_many(request), "429"
            return name, result, "ok"
        return name, Answer(200, jsonrpc.result_body(request.id, result)), "ok"

    async def _in_modern(
        self, request: Request, era: Modern, headers: Headers, caller: Caller
    ) -> str | Held:
        if not accepts(headers, EVENT_STREAM):
            raise RpcFailure(INVALID_REQUEST, BOTH, 406)
        return await self._modern(request, era, headers, caller)

    async def _in_legacy(
        self, request: Request, era: Legacy, headers: Headers, caller: Caller
    ) -> str | Held:
        version = text_header(headers, b"mcp-protocol-version")
        if self._legacy is None or version not in (None, *legacy_view.VERSIONS):
            raise _not_spoken(era, version)
        call = Call(
            request.id,
            request.method,
            era.params,
            version or legacy_view.VERSION,
            caller,
            text_header(headers, b"authorization"),
            streams=accepts(headers, EVENT_STREAM),
        )
        return await self._legacy(call)


def _wanted(message: Request | Notification | Response) -> str:
    """The method whose scope a message needs."""
    return ANSWER if isinstance(message, Response) else message.method


def _too_many(request: Request) -> Answer:
    why = "Too many requests wait here, or too many of yours; end some, or poll with tasks/get"
    body = jsonrpc.error_body(request.id, RpcFailure(INTERNAL_ERROR, why, 429))
    return Answer(429, body, headers=((b"retry-after", b"5"),))


def _failed(request: Request, failure: RpcFailure) -> Answer:
    return Answer(failure.status, jsonrpc.error_body(request.id, failure))


def _not_spoken(request: Legacy, version: str | None) -> RpcFailure | UnsupportedVersion:
    if version is not None:
        return UnsupportedVersion(version)
    if request.params.protocolVersion is not UNSET:
        asked = part(request.params.protocolVersion, str, "params.protocolVersion")
        return UnsupportedVersion(asked)
    return mismatch("the MCP-Protocol-Version header is missing")
