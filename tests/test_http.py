"""What an HTTP connection carries, and what it must not: two readers that disagree on it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.asgi import Receive, Scope, Send
from tests.support.servers import serving

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what request it was."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request", "the request was broken off"
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = b",".join(name for name, _ in scope["headers"])
    said = b"%b %b [%b] %b\n" % (scope["method"].encode(), scope["path"].encode(), body, names)
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with serving(echo) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        yield reader, writer
        writer.close()


async def exchange(connection: Connection, *segments: bytes) -> list[bytes]:
    """Sends segments one by one, then asks for the end; the lines that were said."""
    reader, writer = connection
    for segment in segments:
        writer.write(segment)
        await writer.drain()
        await asyncio.sleep(0)  # a segment of its own
    writer.write(b"GET /end HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    received = await asyncio.wait_for(reader.read(), 10)
    return [line for line in received.splitlines() if line.startswith((b"GET ", b"POST "))]


HEAD = (
    b"POST /in HTTP/1.1\r\nhost: x\r\n"
    b"connection: upgrade\r\nupgrade: %b\r\ncontent-length: %d\r\n\r\n"
)


@pytest.mark.parametrize("wish", [b"h2c", b"websocket", b"anything"])
@pytest.mark.parametrize("cut", [None, 0, 1, 10], ids=["one", "head", "one-byte", "middle"])
async def test_the_body_behind_a_wish_to_upgrade_is_a_body(
    connection: Connection, wish: bytes, cut: int | None
) -> None:
    head = HEAD % (wish, len(SMUGGLED))
    segments = [head + SMUGGLED] if cut is None else [head + SMUGGLED[:cut], SMUGGLED[cut:]]
    said = await exchange(connection, *segments)
    assert [line.split()[1] for line in said] == [b"/in", b"/end"]


async def test_a_wish_to_upgrade_without_a_body_is_ignored(connection: Connection) -> None:
    head = b"GET /in HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    said = await exchange(connection, head)
    assert [line.split()[1] for line in said] == [b"/in", b"/end"]


async def test_a_chunked_body_behind_a_wish_to_upgrade_is_refused(connection: Connection) -> None:
    reader, writer = connection
    writer.write(
        b"POST /in HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + SMUGGLED
    )
    received = await asyncio.wait_for(reader.read(), 10)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_trailers_are_no_headers(connection: Connection, apart: bool) -> None:
    head = b"POST /in HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
    trailers = b"authorization: Bearer somebody-else\r\n\r\n"
    segments = [head, trailers] if apart else [head + trailers]
    said = await exchange(connection, *segments)
    assert said[0] == b"POST /in [hi] host,transfer-encoding"
