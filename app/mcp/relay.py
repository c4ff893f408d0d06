"""One request passed on to a tool server, and its answer passed back, while they come."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import structlog

from app.asgi import Answer, ClientGone, Send, StreamedBody, while_connected
from app.domain.backends import Backend
from app.errors import BrokerError, TooSlow
from app.mcp import jsonrpc
from app.mcp.advertising import Edit, edited_events, edited_message
from app.mcp.door import INTERNAL, turned_away
from app.mcp.forwarding import RawHeaders, response_headers
from app.mcp.jsonrpc import INTERNAL_ERROR, RpcFailure
from app.mcp.peek import request_id
from app.mcp.upstreams import AnswerTooLarge, BadGateway, Broken, Redirected, Upstreams
from app.telemetry import Metrics

log = structlog.get_logger(__name__)

_BODILESS = (204, 304)  # what a 304 says of a length is about another answer


class Outbound(NamedTuple):
    """A request as the tool server gets it; its body follows."""

    method: str
    url: str
    headers: RawHeaders
    edit: Edit | None = None
    """What to correct in the answer."""
    endless: bool = False
    """The answer ends only when somebody ends it."""


class Relay:
    """Passes requests on to tool servers."""

    def __init__(self, upstreams: Upstreams, metrics: Metrics, *, max_answer_bytes: int) -> None:
        self._upstreams = upstreams
        self._count = metrics.gateway
        self._seconds = metrics.gateway_seconds
        self._max_answer_bytes = max_answer_bytes
        self._endless: set[asyncio.Task[None]] = set()
        self._draining = False

    def drain(self) -> None:
        """Ends the streams that would not end by themselves; the server is about to."""
        self._draining = True
        for stream in self._endless:
            stream.cancel()

    async def __call__(
        self, backend: Backend, request: Outbound, body: StreamedBody, send: Send
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
        except BrokerError as error:
            if isinstance(body.failure, ClientGone):
                outcome = "client_gone"
                raise body.failure from None
            # What the client's body did may look as if the tool server had broken off.
            outcome, answer = _failure(backend, body.failure or error, body, begun=reply.begun)
        except Exception:
            log.exception("a request could not be passed on", backend=backend.name)
            answer = Answer(500, jsonrpc.error_body(request_id(body), INTERNAL))
        finally:
            self._count.labels(backend.name, outcome).inc()
        # What has begun can only be cut off: the server closes an answer that nobody ends.
        return None if reply.begun else answer

    async def _exchange(
        self, backend: Backend, request: Outbound, body: StreamedBody, reply: "_Reply"
    ) -> None:
        if not body.begun:
            await body.grow()
        payload = (body.head or None) if body.complete else body.chunks()
        with self._seconds.labels(backend.name).time():
            response = await self._upstreams.ask(
                backend, request.method, request.url, request.headers, payload, plain=request.edit
            )
        try:
            if not 200 <= response.status < 600:
                raise Broken
            if 300 <= response.status < 400 and response.status != 304:
                raise Redirected
            await self._answer(request, response, reply)
        finally:
            response.close()

    async def _answer(
        self, request: Outbound, response: aiohttp.ClientResponse, reply: "_Reply"
    ) -> None:
        edit = request.edit if response.status == 200 else None
        headers = response_headers(response.raw_headers, edited=edit is not None)
        if response.status in _BODILESS:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        if response.content_type == "text/event-stream":
            events = self._upstreams.read(response, may_be_silent=True)
            await reply.begin(response.status, headers)
            await self._stream(
                reply, events if edit is None else edited_events(events, edit), request.endless
            )
        elif edit is not None:
            whole = b"".join([chunk async for chunk in self._bounded(response)])
            edited = edited_message(whole, edit)
            headers.append((b"content-length", b"%d" % len(edited)))
            await reply.begin(response.status, headers)
            await reply.go_on(edited)
        else:
            if (response.content_length or 0) > self._max_answer_bytes:
                raise AnswerTooLarge
            await reply.begin(response.status, headers)
            await self._stream(reply, self._bounded(response), endless=False)
        await reply.end()

    async def _stream(self, reply: "_Reply", chunks: AsyncIterator[bytes], endless: bool) -> None:
        me = asyncio.current_task()
        assert me is not None
        if endless:
            self._endless.add(me)
        try:
            if not (endless and self._draining):
                async for chunk in chunks:
                    await reply.go_on(chunk)
        except asyncio.CancelledError:
            if not (endless and self._draining):
                raise
            me.uncancel()
        finally:
            self._endless.discard(me)

    async def _bounded(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._upstreams.read(response, may_be_silent=False):
            size += len(chunk)
            if size > self._max_answer_bytes:
                raise AnswerTooLarge
            yield chunk


class _Reply:
    """The answer that goes to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.begun = False

    async def begin(self, status: int, headers: RawHeaders) -> None:
        self.status, self.begun = status, True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def bad_gateway(error: BadGateway, rpc_id: bytes | None) -> Answer:
    failure = RpcFailure(INTERNAL_ERROR, error.detail, error.status)
    return Answer(error.status, jsonrpc.error_body(rpc_id, failure))


def _failure(
    backend: Backend, error: BrokerError, body: StreamedBody, *, begun: bool
) -> tuple[str, Answer]:
    """What to count it as, and the answer."""
    if not isinstance(error, BadGateway):
        outcome = "client_slow" if isinstance(error, TooSlow) else "error"
        return outcome, turned_away(error, {}, request_id(body))
    log.warning(
        "tool server failed",
        backend=backend.name,
        outcome=error.outcome,
        reason=type(error.__cause__ or error).__name__,
        cut_off=begun,
    )
    return error.outcome, bad_gateway(error, request_id(body))
