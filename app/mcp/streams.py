"""Answers that take their time: streams of events, or one answer that is waited for."""

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from app.asgi import Answer, Send, send_answer
from app.errors import StorageUnavailable
from app.mcp.door import unavailable

KEEP_ALIVE_SECONDS = 15.0
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
_ENDING = StorageUnavailable("This server is about to end; ask again.")


class Held(NamedTuple):
    """A request whose answer is still to come: the last of these messages, each JSON text."""

    messages: AsyncGenerator[bytes, None]
    events: bool
    """Whether the client takes the messages one by one; if not, it gets the last one only."""


class Holding:
    """Gives held answers, and ends them all when the server does."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()

    def drain(self) -> None:
        self._draining.set()

    async def give(self, held: Held, send: Send) -> None:
        coming = None
        try:
            if held.events:
                await send(_START)
            last = b""
            coming = asyncio.ensure_future(anext(held.messages, None))
            while (message := await self._next(coming, held, send)) is not None:
                last = message
                if held.events:
                    await _event(send, b"event: message\ndata: %b\n\n" % message)
                coming = asyncio.ensure_future(anext(held.messages, None))
            if held.events:
                await send({"type": "http.response.body", "body": b""})
            else:
                answer = Answer(200, last) if coming.done() else unavailable(None, _ENDING)
                await send_answer(send, answer)
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await held.messages.aclose()

    async def _next(
        self, coming: "asyncio.Future[bytes | None]", held: Held, send: Send
    ) -> bytes | None:
        """The next message; `None` when there is none, or when the server is about to end."""
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            while not coming.done() and not draining.done():
                await asyncio.wait(
                    (coming, draining),
                    timeout=KEEP_ALIVE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not coming.done() and held.events:
                    await _event(send, b": \n\n")
            return coming.result() if coming.done() else None
        finally:
            draining.cancel()


async def _event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
