"""A client that listens: an open `subscriptions/listen` stream, frame by frame."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from tests.support.service import META, VERSION, McpClient
from tests.support.waiting import PATIENCE

SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"


class Stream:
    """What has come on a stream so far, and what comes."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments = 0
        self._frames: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def read(self) -> None:
        with suppress(httpx.TransportError):
            data: list[str] = []
            async for line in self.response.aiter_lines():
                if line.startswith(":"):
                    self.comments += 1
                elif line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                elif not line and data:
                    self._frames.put_nowait(json.loads("\n".join(data)))
                    data.clear()
        self._frames.put_nowait(None)

    async def frame(self) -> dict[str, Any]:
        """The next frame, which must come."""
        async with asyncio.timeout(PATIENCE):
            frame = await self._frames.get()
        assert frame is not None, "the stream has ended"
        return frame

    async def task(self) -> dict[str, Any]:
        """The next frame, which must be about a task."""
        frame = await self.frame()
        assert frame.get("method") == "notifications/tasks", frame
        params: dict[str, Any] = frame["params"]
        return params

    async def acknowledged(self) -> list[str] | None:
        """The first frame: the tasks that the stream is about."""
        frame = await self.frame()
        assert frame["method"] == ACKNOWLEDGED, frame
        ids: list[str] | None = frame["params"]["notifications"].get("taskIds")
        return ids

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        """What comes to its end, as it comes."""
        while True:
            async with asyncio.timeout(PATIENCE):
                frame = await self._frames.get()
            if frame is None:
                return
            yield frame

    async def rest(self) -> list[dict[str, Any]]:
        """What comes to its end."""
        return [frame async for frame in self.frames()]


def listen_request(
    ids: list[str] | None, *, rpc_id: Any = 1, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON-RPC request."""
    wanted = {} if ids is None else {"taskIds": ids}
    params = {"notifications": {**wanted, **(more or {})}, "_meta": META}
    return {"jsonrpc": "2.0", "id": rpc_id, "method": "subscriptions/listen", "params": params}


@asynccontextmanager
async def listening(
    http: httpx.AsyncClient,
    client: McpClient,
    ids: list[str] | None,
    *,
    rpc_id: Any = 1,
    more: dict[str, Any] | None = None,
) -> AsyncIterator[Stream]:
    """An open stream of a client, on a real connection."""
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": VERSION,
        "mcp-method": "subscriptions/listen",
    }
    if client.token is not None:
        headers["authorization"] = f"Bearer {client.token}"
    request = listen_request(ids, rpc_id=rpc_id, more=more)
    async with http.stream(
        "POST", client.path, json=request, headers=headers, timeout=60
    ) as response:
        stream = Stream(response)
        reading = asyncio.create_task(stream.read())
        try:
            yield stream
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
