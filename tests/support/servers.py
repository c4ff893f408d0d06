"""Servers on loopback that run in the test's own event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from app.asgi import Application, Receive, Scope, Send
from app.http import HttpProtocol
from tests.support.waiting import eventually

Behaviour = Callable[["Received", Receive, Send], Awaitable[None]]


@asynccontextmanager
async def serving(application: Application) -> AsyncIterator[str]:
    """Serves an ASGI application on a free port; its URL."""
    config = uvicorn.Config(
        application,
        http=HttpProtocol,
        port=0,
        log_config=None,
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with (listener := config.bind_socket()):
        port = listener.getsockname()[1]
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started or running.done())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await running


@dataclass
class Received:
    """A request as it reached the upstream. `body` grows while it comes."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[str, str]]
    body: bytes = b""
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        """The value of a header, `None` if it did not come."""
        values = [value for given, value in self.headers if given == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def message(self) -> Any:
        return json.loads(self.body)


class Upstream:
    """A tool server that notes what reaches it, and does what the test says."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.behaviour: Behaviour = answer_with_result({"content": []})

    @property
    def last(self) -> Received:
        return self.received[-1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        request = Received(scope["method"], scope["path"], scope["query_string"], headers)
        self.received.append(request)
        await self.behaviour(request, receive, send)


@asynccontextmanager
async def running_upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    async with serving(upstream) as url:
        upstream.url = f"{url}/mcp"
        yield upstream


async def read_all(request: Received, receive: Receive) -> None:
    more = True
    while more:
        message = await receive()
        assert message["type"] == "http.request", "the request was broken off"
        request.body += message.get("body", b"")
        more = message.get("more_body", False)


async def respond(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    headers: list[tuple[str, str]] | None = None,
) -> None:
    given = headers or [("content-type", "application/json")]
    raw = [(name.encode(), value.encode()) for name, value in given]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def answer_with_result(result: Any) -> Behaviour:
    """Answers each message with this result."""

    async def behave(request: Received, receive: Receive, send: Send) -> None:
        await read_all(request, receive)
        rpc_id = request.message.get("id") if request.body else None
        body = json.dumps({"jsonrpc": "2.0", "id": rpc_id, "result": result}).encode()
        await respond(send, body)

    return behave


def answer_with(
    body: bytes, *, status: int = 200, headers: list[tuple[str, str]] | None = None
) -> Behaviour:
    """Answers each request with this."""

    async def behave(request: Received, receive: Receive, send: Send) -> None:
        await read_all(request, receive)
        await respond(send, body, status=status, headers=headers)

    return behave
