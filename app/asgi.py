"""The little that the plain ASGI endpoints need: headers, a bounded body, one answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

from app.errors import HeadersTooLarge, Invalid, TooLarge, TooSlow

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Mapping[bytes, bytes]
MAX_HEADER_BYTES = 65_536
BODY_SECONDS = 15.0
_ABORT_SECONDS = 1.0
_LENGTH_DIGITS = 18  # Python converts no more than 4300


ABORT = "taskbroker.abort"
"""In the scope: a function that drops the connection, with what was not read of the answer."""


class Answer(NamedTuple):
    """One HTTP response with its whole body."""

    status: int
    body: bytes = b""
    content_type: bytes | None = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ClientGone(Exception):
    """The peer closed the connection before its request was complete."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Header values by lower-case name; a repeated one is joined with a comma (RFC 9110, 5.3).

    Raises HeadersTooLarge when they are over MAX_HEADER_BYTES, because the server sets no bound.
    """
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    if sum([len(name) + len(value) for name, value in pairs]) > MAX_HEADER_BYTES:
        raise HeadersTooLarge(
            f"The headers are larger than this broker accepts ({MAX_HEADER_BYTES} bytes)."
        )
    headers = dict(pairs)
    if len(headers) != len(pairs):
        values: dict[bytes, list[bytes]] = {}
        for name, value in pairs:
            values.setdefault(name, []).append(value)
        headers = {name: b", ".join(given) for name, given in values.items()}
    return headers


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises TooLarge as soon as it is over `limit` bytes, TooSlow when it is not there after
    BODY_SECONDS, or ClientGone.
    """
    _check_length(headers, limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                body = await _read_on(body, receive, limit)
    except TimeoutError:
        raise _too_slow() from None
    if len(body) > limit:
        raise _too_large(limit)
    return body


def _check_length(headers: Headers, limit: int) -> None:
    declared = headers.get(b"content-length")
    if declared is not None and not declared.isdigit():
        raise Invalid("Content-Length is no number.")
    if declared is not None and (len(declared) > _LENGTH_DIGITS or int(declared) > limit):
        raise _too_large(limit)


async def _read_on(start: bytes, receive: Receive, limit: int) -> bytes:
    chunks, size, more = [start], len(start), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        more = message.get("more_body", False)
        if size > limit:
            raise _too_large(limit)
    return b"".join(chunks)


def _too_slow() -> TooSlow:
    return TooSlow(f"The body did not come within {BODY_SECONDS:g} seconds.")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than this broker accepts ({limit} bytes).")


class StreamedBody:
    """The body of a request that is passed on: its head may be looked at, nothing else is kept."""

    def __init__(self, receive: Receive) -> None:
        self.complete = False
        """Whether the whole body has been received."""
        self.failure: TooSlow | ClientGone | None = None
        """What went wrong with a body that was being passed on."""
        self._pieces: list[bytes] = []
        self._receive = receive
        self._over = asyncio.Event()

    @property
    def head(self) -> bytes:
        """What has been looked at so far."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    @property
    def begun(self) -> bool:
        return self.complete or bool(self._pieces)

    async def grow(self, size: int = 1) -> None:
        """Receives more of the head, `size` bytes in all or what there is.

        Raises ClientGone or TooSlow.
        """
        has = sum(map(len, self._pieces))
        while has < size and not self.complete:
            piece = await self._next()
            self._pieces.append(piece)
            has += len(piece)

    async def read(self, headers: Headers, limit: int) -> None:
        """Receives all that is missing, as `read_body` does."""
        _check_length(headers, limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self.grow(limit + 1)
        except TimeoutError:
            raise _too_slow() from None
        if len(self.head) > limit:
            raise _too_large(limit)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole body, from its first byte. Raises ClientGone or TooSlow."""
        if self.head:
            yield self.head
        while not self.complete:
            try:
                chunk = await self._next()
            except (TooSlow, ClientGone) as error:
                self.failure = error
                raise
            if chunk:
                yield chunk

    async def client_gone(self) -> None:
        """Returns when the client has closed the connection, before its body's end or after."""
        await self._over.wait()
        if self.complete:
            await client_gone(self._receive)

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] == "http.disconnect":
            self._over.set()
            raise ClientGone
        if not message.get("more_body"):
            self.complete = True
            self._over.set()
        chunk: bytes = message.get("body", b"")
        return chunk


async def send_answer(send: Send, answer: Answer) -> None:
    headers: list[tuple[bytes, bytes]] = [(b"content-length", b"%d" % len(answer.body))]
    if answer.content_type is not None and answer.body:
        headers.append((b"content-type", answer.content_type))
    headers.extend(answer.headers)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def text_header(headers: Headers, name: bytes) -> str | None:
    """A header's value as text, without the white space around it (RFC 9110, 5.5)."""
    value = headers.get(name)
    return None if value is None else value.strip(b" \t").decode("latin-1")


async def client_gone(receive: Receive) -> None:
    """Returns when a client whose body has been read closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def abort(scope: Scope, receive: Receive) -> None:
    """Drops the connection of a peer that is gone, or does not read, and waits until it is closed.

    Elsewhere than on our own server, nothing happens.
    """
    if ABORT in scope:
        scope[ABORT]()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await client_gone(receive)


async def still_connected(receive: Receive) -> bool:
    """Whether a client whose body has been read has not closed the connection by now.

    To be asked before the answer is sent.
    """
    gone = asyncio.ensure_future(client_gone(receive))
    await asyncio.sleep(0)  # if it has, the server says so at once
    connected = not gone.done()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    return connected


async def while_connected(gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Works for a client; when it is gone the work is cancelled, and ClientGone is raised."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
