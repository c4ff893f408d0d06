"""One request passed on to a tool server, and its answer passed back, while they come."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import structlog

from app.asgi import Answer, ClientGone, Send, StreamedBody, while_connected
from app.domain.backends import Backend
from app.errors import BrokerError
from app.mcp import jsonrpc
from app.mcp.advertising import Edit, edited_events, edited_json
from app.mcp.door import INTERNAL, turned_away
from app.mcp.forwarding import RawHeaders, response_headers
from app.mcp.jsonrpc import INTERNAL_ERROR, RpcFailure
from app.mcp.peek import peek
from app.mcp.upstreams import AnswerTooLarge, BadGateway, Call, Redirected, Upstreams
from app.telemetry import Metrics

log = structlog.get_logger(__name__)


class Onward(NamedTuple):
    """A request as the tool server gets it; its body follows."""

    method: str
    url: str
    headers: RawHeaders
    edit: Edit | None
    """What to correct in the answer, which for that must not be compressed."""


class Passing:
    def __init__(self, upstreams: Upstreams, metrics: Metrics, *, max_answer_bytes: int) -> None:
        self._upstreams = upstreams
        self._count = metrics.gateway
        self._seconds = metrics.gateway_seconds
        self._max_answer_bytes = max_answer_bytes

    async def __call__(
        self, backend: Backend, request: Onward, body: StreamedBody, send: Send
    ) -> Answer | None:
        """Passes everything on. The gateway's own answer if the tool server gave none."""
        reply = _Reply(send)
        outcome, answer = "error", None
        try:
            await while_connected(body.client_gone(), self._exchange(backend, request, body, reply))
            outcome = f"{reply.status // 100}xx"
        except ClientGone:
            outcome = "client_gone"
            raise
        except BadGateway as error:
            outcome = error.outcome
            log.warning(
                "tool server failed",
                backend=backend.name,
                outcome=outcome,
                reason=type(error.__cause__ or error).__name__,
                cut_off=bool(reply.status),
            )
            answer = _bad_gateway(error, body)
        except BrokerError as error:
            answer = turned_away(error, {})
        except Exception:
            log.exception("a request could not be passed on", backend=backend.name)
            answer = Answer(500, jsonrpc.error_body(_id(body), INTERNAL))
        finally:
            self._count.labels(backend.name, outcome).inc()
        # What has begun can only be cut off: the server closes an answer that nobody ends.
        return None if reply.status else answer

    async def _exchange(
        self, backend: Backend, request: Onward, body: StreamedBody, reply: "_Reply"
    ) -> None:
        if not body.head and not body.complete:
            await body.grow()
        payload = (body.head or None) if body.complete else body.chunks()
        started = time.perf_counter()
        call = Call(request.method, request.url, request.headers, payload)
        async with self._upstreams.call(backend, call) as response:
            self._seconds.labels(backend.name).observe(time.perf_counter() - started)
            if 300 <= response.status < 400 and response.status != 304:
                raise Redirected
            edit = request.edit if response.status == 200 else None
            streams = response.content_type == "text/event-stream"
            if not streams and (response.content_length or 0) > self._max_answer_bytes:
                raise AnswerTooLarge
            chunks = self._chunks(response, endless=streams)
            if edit is not None:
                chunks = (edited_events if streams else edited_json)(chunks, edit)
            headers = response_headers(response.raw_headers, edited=edit is not None)
            await reply.begin(response.status, headers)
            async for chunk in chunks:
                await reply.go_on(chunk)
            await reply.end()

    async def _chunks(
        self, response: aiohttp.ClientResponse, *, endless: bool
    ) -> AsyncIterator[bytes]:
        """The body as it comes. A stream of events may be silent, and long; no other body may."""
        size = 0
        while True:
            async with asyncio.timeout(None if endless else self._upstreams.answer_seconds):
                chunk = await response.content.readany()
            if not chunk:
                return
            size += len(chunk)
            if size > self._max_answer_bytes and not endless:
                raise AnswerTooLarge
            yield chunk


class _Reply:
    """The answer that goes to the client. `status` is 0 until it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def begin(self, status: int, headers: RawHeaders) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def _bad_gateway(error: BadGateway, body: StreamedBody) -> Answer:
    failure = RpcFailure(INTERNAL_ERROR, error.detail, error.status)
    return Answer(error.status, jsonrpc.error_body(_id(body), failure))


def _id(body: StreamedBody) -> bytes | None:
    return peek(body.head, complete=body.complete).id
