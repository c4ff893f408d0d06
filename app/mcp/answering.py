"""From one message about tasks to its answer, whichever door it came through."""

import time

import structlog
from msgspec import UNSET

from app.asgi import Answer, Headers, text_header
from app.broker.context import Broker, Caller
from app.errors import StorageUnavailable
from app.mcp import jsonrpc
from app.mcp.door import INTERNAL, unavailable
from app.mcp.eras import Legacy, classify, mismatch, part, unsupported
from app.mcp.jsonrpc import INTERNAL_ERROR, Request, RpcFailure
from app.mcp.modern import METHODS, Dispatcher
from app.telemetry import Metrics

log = structlog.get_logger(__name__)


class Answering:
    """Answers MCP clients about tasks."""

    def __init__(self, broker: Broker, metrics: Metrics, *, strict_headers: bool) -> None:
        self._count = metrics.mcp.count
        self._dispatch = Dispatcher(
            broker, strict_headers=strict_headers, name_missing=metrics.missing_mcp_name.inc
        )

    async def __call__(self, body: bytes, headers: Headers, caller: Caller) -> Answer:
        """The answer to the message in a body; 202 for a notification."""
        started = time.perf_counter()
        method = "invalid"
        try:
            message = jsonrpc.parse(body)
            if not isinstance(message, Request):
                return Answer(202)
            method = message.method if message.method in METHODS else "other"
            answer, outcome = await self._respond(message, headers, caller)
        except jsonrpc.BadMessage as bad:
            answer, outcome = Answer(bad.status, jsonrpc.error_body(bad.id, bad)), str(bad.code)
        self._count(method, outcome, time.perf_counter() - started)
        return answer

    async def _respond(
        self, request: Request, headers: Headers, caller: Caller
    ) -> tuple[Answer, str]:
        """The answer to a request, and what to count it as."""
        try:
            return Answer(200, await self._result(request, headers, caller)), "ok"
        except RpcFailure as failure:
            body = jsonrpc.error_body(request.id, failure)
            return Answer(failure.status, body), str(failure.code)
        except StorageUnavailable as error:
            return unavailable(request.id, error), "unavailable"
        except Exception:
            log.exception("mcp request failed", method=request.method[:64])
            return Answer(500, jsonrpc.error_body(request.id, INTERNAL)), str(INTERNAL_ERROR)

    async def _result(self, request: Request, headers: Headers, caller: Caller) -> bytes:
        era = classify(request, headers)
        if isinstance(era, RpcFailure):
            raise era
        if isinstance(era, Legacy):
            raise _not_modern(era, headers)
        result = await self._dispatch(request.method, era, headers, caller)
        return jsonrpc.result_body(request.id, result)


def _not_modern(request: Legacy, headers: Headers) -> RpcFailure:
    version = text_header(headers, b"mcp-protocol-version")
    if version is not None:
        return unsupported(version)
    if request.params.protocolVersion is not UNSET:
        return unsupported(part(request.params.protocolVersion, str, "params.protocolVersion"))
    return mismatch("the MCP-Protocol-Version header is missing")
