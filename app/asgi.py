"""The little that the plain ASGI endpoints need: headers, a bounded body, one answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from app.errors import Invalid, TooLarge, TooSlow

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Mapping[bytes, bytes]
MAX_HEADER_BYTES = 65_536
BODY_SECONDS = 15.0
_LENGTH_DIGITS = 18  # Python converts no more than 4300


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

    Raises TooLarge when they are over MAX_HEADER_BYTES, because the server sets no bound.
    """
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    if sum([len(name) + len(value) for name, value in pairs]) > MAX_HEADER_BYTES:
        raise TooLarge(
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
    declared = headers.get(b"content-length")
    if declared is not None and not declared.isdigit():
        raise Invalid("Content-Length is no number.")
    if declared is not None and (len(declared) > _LENGTH_DIGITS or int(declared) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                body = await _read_on(body, receive, limit)
    except TimeoutError:
        raise TooSlow(f"The body did not come within {BODY_SECONDS:g} seconds.") from None
    if len(body) > limit:
        raise _too_large(limit)
    return body


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


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than this broker accepts ({limit} bytes).")


async def send_answer(send: Send, answer: Answer) -> None:
    headers: list[tuple[bytes, bytes]] = [(b"content-length", b"%d" % len(answer.body))]
    if answer.content_type is not None and answer.body:
        headers.append((b"content-type", answer.content_type))
    headers.extend(answer.headers)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def text_header(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
