"""From one message about tasks to its answer, whichever door it came through."""

import time
from collections.abc import Awaitable, Callable

import structlog
from msgspec import UNSET

from app.asgi import Answer, Headers, text_header
from app.auth.cursors import Cursors
from app.broker.context import Broker, Caller
from app.errors import StorageUnavailable
from app.mcp import jsonrpc
from app.mcp.door import BOTH, EVENT_STREAM, INTERNAL, accepts, unavailable
from app.mcp.eras import MODERN, Legacy, Modern, classify, mismatch, part, unsupported
from app.mcp.jsonrpc import INTERNAL_ERROR, INVALID_REQUEST, Request, Response, RpcFailure
from app.mcp.legacy import METHODS as LEGACY_METHODS
from app.mcp.legacy import Call, LegacyDispatcher
from app.mcp.modern import METHODS as MODERN_METHODS
from app.mcp.modern import Dispatcher
from app.mcp.streams import Held
from app.telemetry import Metrics
from app.views import legacy

log = structlog.get_logger(__name__)

METHODS = MODERN_METHODS | LEGACY_METHODS


class Answering:
    """Answers MCP clients about tasks."""

    def __init__(
        self,
        broker: Broker,
        cursors: Cursors,
        metrics: Metrics,
        *,
        legacy: bool,
        strict_headers: bool,
    ) -> None:
        self._count = metrics.mcp.count
        self._modern = Dispatcher(
            broker, strict_headers=strict_headers, name_missing=metrics.missing_mcp_name.inc
        )
        self._legacy = LegacyDispatcher(broker, cursors) if legacy else None
        self._methods: dict[type, Callable[..., Awaitable[str | Held]]] = {
            Modern: self._in_modern,
            Legacy: self._in_legacy,
        }

    async def __call__(self, body: bytes, headers: Headers, caller: Caller) -> Answer | Held:
        """The answer to the message in a body; 202 for what needs none."""
        started = time.perf_counter()
        method, era, outcome = "invalid", "none", "ok"
        answer: Answer | Held
        try:
            message = jsonrpc.parse(body)
            if isinstance(message, Response) and self._legacy is not None:
                await self._legacy.take_answer(message, caller)
            if not isinstance(message, Request):
                return Answer(202)
            method = message.method if message.method in METHODS else "other"
            era, answer, outcome = await self._respond(message, headers, caller)
        except jsonrpc.BadMessage as bad:
            answer, outcome = Answer(bad.status, jsonrpc.error_body(bad.id, bad)), str(bad.code)
        except StorageUnavailable as error:
            answer, outcome = unavailable(None, error), "unavailable"
        self._count(method, era, outcome, time.perf_counter() - started)
        return answer

    async def _respond(
        self, request: Request, headers: Headers, caller: Caller
    ) -> tuple[str, Answer | Held, str]:
        """The era of a request, its answer, and what to count that as."""
        name = MODERN
        try:
            era = classify(request, headers)
            name = era.name
            result = await self._methods[type(era)](request, era, headers, caller)
        except RpcFailure as failure:
            body = jsonrpc.error_body(request.id, failure)
            return name, Answer(failure.status, body), str(failure.code)
        except StorageUnavailable as error:
            return name, unavailable(request.id, error), "unavailable"
        except Exception:
            log.exception("mcp request failed", method=request.method[:64])
            body = jsonrpc.error_body(request.id, INTERNAL)
            return name, Answer(500, body), str(INTERNAL_ERROR)
        if isinstance(result, Held):
            return name, result, "ok"
        return name, Answer(200, jsonrpc.result_body(request.id, result)), "ok"

    async def _in_modern(
        self, request: Request, era: Modern, headers: Headers, caller: Caller
    ) -> str | Held:
        if not accepts(headers, EVENT_STREAM):
            raise RpcFailure(INVALID_REQUEST, BOTH, 406)
        return await self._modern(request.method, era, headers, caller)

    async def _in_legacy(
        self, request: Request, era: Legacy, headers: Headers, caller: Caller
    ) -> str | Held:
        version = text_header(headers, b"mcp-protocol-version")
        if self._legacy is None or version not in (None, *legacy.VERSIONS):
            raise _not_spoken(era, version)
        call = Call(request, era, caller, streams=accepts(headers, EVENT_STREAM))
        return await self._legacy(call, headers)


def _not_spoken(request: Legacy, version: str | None) -> RpcFailure:
    if version is not None:
        return unsupported(version)
    if request.params.protocolVersion is not UNSET:
        asked = part(request.params.protocolVersion, str, "params.protocolVersion")
        return unsupported(asked)
    return mismatch("the MCP-Protocol-Version header is missing")
