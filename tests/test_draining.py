"""What those who wait are told when the broker ends."""

import asyncio
import signal
from contextlib import AsyncExitStack

import httpx
import pytest

from app.cli.serve import GRACE_SECONDS
from tests.support.listening import SUBSCRIPTION, listening
from tests.support.processes import running_broker
from tests.support.secrecy import new_token
from tests.support.service import McpClient

pytestmark = pytest.mark.slow  # starts a broker for each case

HEADERS = {"content-type": "application/json", "mcp-protocol-version": "2025-11-25"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "application/json"])
async def test_a_wait_for_a_result_ends_with_an_answer(workers: int, accept: str) -> None:
    with running_broker("draining", workers=workers) as broker:
        async with broker.tool_server("tools") as tools:
            client = McpClient(tools._http, new_token())
            task = await tools.create(client)
            message = {
                "jsonrpc": "2.0", "id": 7, "method": "tasks/result", "params": {"taskId": task.id},
            }  # fmt: skip
            headers = {**HEADERS, "accept": accept, "authorization": f"Bearer {client.token}"}
            async with httpx.AsyncClient(base_url=broker.url, timeout=60) as http:
                waiting = asyncio.create_task(http.post("/mcp", json=message, headers=headers))
                while not waiting.done() and not await _waits(http):
                    pass
                broker.process.send_signal(signal.SIGTERM)
                answer = await waiting
        assert '"id":7,"error"' in answer.text
        assert "ask again" in answer.text
        assert broker.process.wait(60) == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_wait_for_signals_ends_with_none(workers: int) -> None:
    with running_broker("draining", workers=workers) as broker:
        async with (
            broker.tool_server("tools") as tools,
            httpx.AsyncClient(base_url=broker.url, timeout=60) as http,
        ):
            waiting = asyncio.create_task(
                http.get("/v1/signals", params={"wait": 60}, headers=tools.authorization)
            )
            while not waiting.done() and not await _waits(http):
                pass
            broker.process.send_signal(signal.SIGTERM)
            answer = await waiting
        assert answer.json() == {"signals": [], "cursor": "0"}
        assert broker.process.wait(60) == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_stream_ends_with_its_result(workers: int) -> None:
    """Long before the server would break connections off, and whatever the streams are about."""
    with running_broker("draining", workers=workers) as broker:
        async with (
            broker.tool_server("tools") as tools,
            httpx.AsyncClient(base_url=broker.url, timeout=60) as http,
            AsyncExitStack() as stack,
        ):
            client = McpClient(tools._http, new_token())
            tasks = [await tools.create(client) for _ in range(3)]
            streams = {
                rpc_id: await stack.enter_async_context(listening(http, client, ids, rpc_id=rpc_id))
                for rpc_id, ids in [
                    *((f"listen-{number}", [task.id]) for number, task in enumerate(tasks)),
                    ("all", [task.id for task in tasks]),
                    (5, None),
                ]
            }
            for stream in streams.values():
                await stream.acknowledged()
            async with asyncio.timeout(GRACE_SECONDS / 2):
                broker.process.send_signal(signal.SIGTERM)
                ends = {rpc_id: (await stream.rest())[-1] for rpc_id, stream in streams.items()}
        for rpc_id, end in ends.items():
            assert end["id"] == rpc_id
            assert end["result"] == {"resultType": "complete", "_meta": {SUBSCRIPTION: rpc_id}}
        assert broker.process.wait(60) == 0


async def _waits(http: httpx.AsyncClient) -> bool:
    """Whether the worker that answers has somebody waiting."""
    async with httpx.AsyncClient(base_url=http.base_url) as another:
        return "taskbroker_waiters 1.0" in (await another.get("/metrics")).text
