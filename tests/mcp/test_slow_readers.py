"""Clients that open a stream and read it slowly, or not at all."""

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli.serve import GRACE_SECONDS
from app.mcp import streams
from tests.mcp.test_listening import has_streams
from tests.support.clock import ShiftedClock
from tests.support.listening import listen_request
from tests.support.processes import BrokerProcess, running_broker
from tests.support.secrecy import new_token
from tests.support.service import (
    CreatedTask,
    McpClient,
    Service,
    ToolServer,
    networked_service,
    test_settings,
)
from tests.support.waiting import eventually

LARGE = 900_000
PATIENCE_OF_THE_BROKER = 0.5
LEGACY = "2025-11-25"


@pytest.fixture
async def online(
    database_url: str, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """A broker that soon loses its patience."""
    monkeypatch.setattr(streams, "READER_SECONDS", PATIENCE_OF_THE_BROKER)
    async with networked_service(
        test_settings(database_url, max_body_bytes=20 * LARGE), clock
    ) as service:
        yield service


@pytest.fixture
async def tools(online: Service) -> ToolServer:
    return await online.tool_server()


@pytest.fixture
def client(online: Service) -> McpClient:
    return online.client()


class Reader:
    """A connection on which nothing is read but what the test asks for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def read(self, size: int) -> bytes:
        """What has come, at most so much; nothing at the end."""
        return await asyncio.get_running_loop().sock_recv(self._connection, size)

    async def rest(self) -> bytes:
        """All that is left, until the server ends the connection or breaks it off."""
        read = bytearray()
        with suppress(ConnectionResetError):
            while piece := await self.read(1_000_000):
                read += piece
        return bytes(read)


@asynccontextmanager
async def sent(
    http: httpx.AsyncClient, client: McpClient, message: dict[str, Any]
) -> AsyncIterator[Reader]:
    """A connection on which a request has been sent; its answer is for the test to read."""
    legacy = "_meta" not in message["params"]
    body = json.dumps(message).encode()
    head = (
        "POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        "content-type: application/json\r\naccept: application/json, text/event-stream\r\n"
        f"mcp-protocol-version: {LEGACY if legacy else '2026-07-28'}\r\n"
        f"mcp-method: {message['method']}\r\n"
        f"authorization: Bearer {client.token}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.setblocking(False)
        port = http.base_url.port
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, head.encode() + body)
        yield Reader(connection)


async def completed(tools: ToolServer, client: McpClient, number: int) -> list[CreatedTask]:
    """So many tasks with large results."""
    tasks = [await tools.create(client) for _ in range(number)]
    for task in tasks:
        await tools.complete(task, {"content": [], "text": "x" * LARGE})
    return tasks


async def test_who_does_not_read_is_dropped(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    tasks = await completed(tools, client, 10)
    async with sent(online.http, client, listen_request([task.id for task in tasks])) as reader:
        assert await reader.read(12) == b"HTTP/1.1 200"
        assert await has_streams(online, 1)
        await eventually(lambda: has_streams(online, 0))
        assert len(await reader.rest()) < 10 * LARGE


@pytest.mark.slow
async def test_who_reads_slowly_is_told_everything(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """A single frame takes longer than a reader may stand still; but this one does not."""
    tasks = await completed(tools, client, 6)
    read = bytearray()
    async with sent(online.http, client, listen_request([task.id for task in tasks])) as reader:
        while piece := await reader.read(100_000):
            read += piece
            await asyncio.sleep(0.1)  # makes it slow
    assert read.count(b'"status":"completed"') == 6
    assert read.endswith(b"0\r\n\r\n")


async def test_who_reads_late_is_told_the_newest(
    online: Service, tools: ToolServer, client: McpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task was in between is passed over; how it is now, and how it ended, is not."""
    monkeypatch.setattr(streams, "READER_SECONDS", 60)
    task = await tools.create(client)
    schema = {"type": "object", "properties": {}}
    params = {"message": "?" * LARGE, "requestedSchema": schema}
    long = {"method": "elicitation/create", "params": params}
    await tools.report(task, status="input_required", inputRequests={"long": long})
    async with sent(online.http, client, listen_request([task.id])) as reader:
        assert await reader.read(12) == b"HTTP/1.1 200"
        for number in range(30):
            await tools.report(task, statusMessage=f"step {number}")
        read = b""
        while b"step 29" not in read:
            read += await reader.read(1_000_000)
        assert len(re.findall(rb"step \d+", read)) < 5
        await tools.complete(task)
        assert b'"status":"completed"' in await reader.rest()


async def test_who_waits_for_a_result_and_does_not_read_it_is_dropped(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """The whole answer may be written before anybody notices."""
    task = await tools.create(client)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tasks/result", "params": {"taskId": task.id}}
    async with sent(online.http, client, message) as reader:
        assert await reader.read(12) == b"HTTP/1.1 200"
        assert await has_streams(online, 1)
        await tools.complete(task, {"content": [], "text": "x" * 10 * LARGE})
        await eventually(lambda: has_streams(online, 0), 10)
        assert len(await reader.rest()) < 10 * LARGE


# --- a whole broker ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process in /proc")
async def test_readers_that_do_not_read_take_little_memory_and_do_not_hold_up_the_end() -> None:
    """100 tasks with results of 500 KB each, and 20 streams about all of them."""
    with running_broker("slow-readers") as broker:
        async with broker.tool_server("tools") as tools, AsyncExitStack() as stack:
            client = McpClient(tools._http, new_token())
            tasks = [await tools.create(client) for _ in range(100)]
            for task in tasks:
                await tools.complete(task, {"content": [], "text": "x" * 500_000})
            before = memory(broker)
            request = listen_request([task.id for task in tasks])
            for _ in range(20):
                reader = await stack.enter_async_context(sent(tools._http, client, request))
                assert await reader.read(12) == b"HTTP/1.1 200"
            assert memory(broker) - before < 100_000_000
            async with asyncio.timeout(GRACE_SECONDS / 2):
                code = await asyncio.to_thread(broker.terminate)
            assert code == 0


def memory(broker: BrokerProcess) -> int:
    """The bytes that a process holds."""
    return int(Path(f"/proc/{broker.process.pid}/statm").read_text().split()[1]) * 4_096
