"""Answers that take their time: streams of events, or one answer that is waited for."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from app.asgi import Answer, ClientGone, Send, send_answer
from app.errors import StorageUnavailable
from app.mcp import jsonrpc
from app.mcp.door import unavailable
from app.mcp.jsonrpc import INTERNAL_ERROR, RpcFailure

KEEP_ALIVE_SECONDS = 15.0
READER_SECONDS = 30.0
"""How long a reader may leave a piece of what was sent to it unread before it is dropped."""
FAREWELL_SECONDS = 5.0
"""How long all have together, when the server ends, to read what they are still sent."""
_PIECE = 65_536
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
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


class StalledReader(ClientGone):
    """The peer is there, but does not read."""


@dataclass(eq=False)
class Held:
    """A request whose answer is still to come: the last of these messages, each JSON text."""

    rpc_id: bytes
    owner: bytes
    """Whose request it is: a fingerprint."""
    messages: AsyncGenerator[bytes, None]
    source: AsyncGenerator[Any, None]
    """What the messages are made of; closed with them."""
    events: bool
    """Whether the client takes the messages one by one; if not, it gets the last one only."""
    farewell: bytes | None = None
    """The last message when the server ends; without one, an error that says so."""
    anonymous: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody shall wait any longer."""
    cut_off: bool = False
    """Whether it has ended by that, before its own end."""
    deadline: float = math.inf
    """When the last of it must have been read, by the clock of the event loop."""
    reading: asyncio.Timeout | None = None
    """Runs while the reader has not read what was sent before."""

    def end(self, seconds: float) -> None:
        """Ends it as soon as may be, and lets its reader keep it up no longer than that."""
        self.over.set()
        self.deadline = asyncio.get_running_loop().time() + seconds
        if self.reading is not None:
            self.reading.reschedule(self.deadline)

    async def close(self) -> None:
        await self.messages.aclose()
        await self.source.aclose()


class Holding:
    """Gives held answers; ends one when its client withdraws, and all when the server ends.

    In this process it holds at most `in_all`, and `per_owner` of one owner; anonymous ones are
    nobody's.
    """

    def __init__(self, *, per_owner: int, in_all: int) -> None:
        self._open: set[Held] = set()
        self._per_owner = per_owner
        self._in_all = in_all
        self._of_owner: Counter[bytes] = Counter()
        self._draining = False

    def __len__(self) -> int:
        """How many answers are held."""
        return len(self._open)

    def admits(self, held: Held) -> bool:
        """Whether there may be one more, of this owner and in all.

        It has its place from now on, and is to be given.
        """
        full = len(self._open) >= self._in_all
        if full or (not held.anonymous and self._of_owner[held.owner] >= self._per_owner):
            return False
        self._open.add(held)
        self._of_owner[held.owner] += 1
        return True

    def drain(self) -> None:
        self._draining = True
        for held in self._open:
            held.end(FAREWELL_SECONDS)

    def holds(self, owner: bytes, rpc_id: bytes) -> bool:
        """Whether an answer to what this owner asked with this id is still to come."""
        return any((one.owner, one.rpc_id) == (owner, rpc_id) for one in self._open)

    def withdraw(self, owner: bytes, rpc_id: bytes) -> None:
        """Ends what this owner asked with this id."""
        for held in self._open:
            if (held.owner, held.rpc_id) == (owner, rpc_id):
                held.over.set()

    async def give(self, held: Held, send: Send) -> None:
        """Gives an answer that was admitted."""
        if self._draining:
            held.end(FAREWELL_SECONDS)
        try:
            await (self._stream if held.events else self._answer)(held, send)
        finally:
            self._open.discard(held)
            self._of_owner[held.owner] -= 1
            if not self._of_owner[held.owner]:
                del self._of_owner[held.owner]
            await held.close()

    async def _stream(self, held: Held, send: Send) -> None:
        await send(_START)
        async for message in _until_over(held, send):
            await _event(held, send, _as_event(message))
            del message  # it may be large, and the next one far
        if held.cut_off and self._draining:
            failure = RpcFailure(INTERNAL_ERROR, _ENDING.detail, 503)
            last = held.farewell or jsonrpc.error_body(held.rpc_id, failure)
            await _event(held, send, _as_event(last))
        await _patiently(held, send, b"", more=False)

    async def _answer(self, held: Held, send: Send) -> None:
        last = b""
        async for message in _until_over(held, None):
            last = message
        await send_answer(
            send, unavailable(held.rpc_id, _ENDING) if held.cut_off else Answer(200, last)
        )


async def _until_over(held: Held, send: Send | None) -> AsyncGenerator[bytes, None]:
    """The messages as they come, with signs of life between them to who takes events."""
    over = asyncio.ensure_future(held.over.wait())
    coming: asyncio.Future[Any] = asyncio.ensure_future(anext(held.messages, None))
    try:
        while True:
            done, _ = await asyncio.wait(
                (coming, over), timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if coming in done:
                message = coming.result()
                if message is None:
                    return
                coming = over  # a message may be large, and the next one far: keep none
                del done
                yield message
                del message
                coming = asyncio.ensure_future(anext(held.messages, None))
            elif over in done:
                held.cut_off = True
                return
            elif send is not None:
                await _event(held, send, b": \n\n")
    finally:
        for waiting in (coming, over):
            waiting.cancel()
        await asyncio.gather(coming, over, return_exceptions=True)


def _as_event(message: bytes) -> bytes:
    """A message as a server-sent event. What was stored may have line breaks between its tokens."""
    return b"event: message\ndata: %b\n\n" % _LINE_BREAK.sub(b"\ndata: ", message)


async def _event(held: Held, send: Send, event: bytes) -> None:
    """Sends an event, piece by piece: a reader may take its time for all of it, not for one."""
    for start in range(0, len(event), _PIECE):
        await _patiently(held, send, event[start : start + _PIECE], more=True)


async def _patiently(held: Held, send: Send, piece: bytes, *, more: bool) -> None:
    """Raises StalledReader when what was sent before is not read for too long."""
    soon = asyncio.get_running_loop().time() + READER_SECONDS
    try:
        async with asyncio.timeout_at(min(soon, held.deadline)) as held.reading:
            await send({"type": "http.response.body", "body": piece, "more_body": more})
    except TimeoutError:
        raise StalledReader from None
    finally:
        held.reading = None
