"""A balancer that knows nothing of HTTP: each new connection goes to the next replica."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def round_robin(*ports: int) -> AsyncIterator[str]:
    """Where it listens. A replica that takes no connection is passed over."""
    turns = cycle(ports)

    async def next_replica() -> Ends:
        for _ in ports:
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", next(turns))
        raise ConnectionRefusedError

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await next_replica()
            await _first_of(_pass_on(reader, back), _pass_on(there, writer))
            back.transport.abort()
        writer.transport.abort()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(65_536):
            to.write(piece)
            await to.drain()


async def _first_of(*ways: Coroutine[Any, Any, None]) -> None:
    """When one side is done with a connection, the other one need not go on."""
    passing = [asyncio.ensure_future(way) for way in ways]
    await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
    for one in passing:
        one.cancel()
    await asyncio.gather(*passing, return_exceptions=True)
