"""MCP client libraries that nobody here wrote, as judges of the wire.

Each driver (a folder beside this file) runs in an environment of its own, which `make clients`
installs. It is handed the ids of five tasks on standard input and prints one JSON summary of
what its library made of them; the test plays the tool server meanwhile.
"""

import asyncio
import json
import secrets
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import CreatedTask, McpClient, ToolServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
DRIVERS: dict[str, list[str | Path]] = {
    "fastmcp": [ROOT / ".venv-client-fastmcp/bin/python", HERE / "fastmcp/drive.py"],
    "mcp": [ROOT / ".venv-client-mcp/bin/python", HERE / "mcp_python/drive.py"],
    "ext-tasks": ["node", HERE / "ext_tasks/drive.mjs"],
}
QUESTION = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Which size?",
        "requestedSchema": {
            "type": "object",
            "properties": {"size": {"type": "string", "enum": ["small", "large"]}},
            "required": ["size"],
        },
    },
}
ERROR = {"code": -32050, "message": "no luck", "data": {"why": "because"}}
NOT_FOUND = -32602


@dataclass
class Tasks:
    completes: CreatedTask
    asks: CreatedTask
    cancels: CreatedTask
    fails: CreatedTask


@pytest.fixture(scope="module")
async def tools() -> AsyncIterator[ToolServer]:
    with running_broker("clients") as broker:
        async with broker.tool_server("demo") as tools:
            yield tools


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> list[str]:
    command = [str(part) for part in DRIVERS[request.param]]
    if command[0] != "node" and not Path(command[0]).exists():
        pytest.fail(f"{command[0]} is not installed: run `make clients`")
    return command


async def test_a_library_follows_answers_and_cancels_tasks_by_their_ids(
    tools: ToolServer, driver: list[str]
) -> None:
    client = McpClient(tools._http, new_token())
    tasks = Tasks(
        completes=await tools.create(client, pollIntervalMs=200),
        asks=await tools.create(
            client, pollIntervalMs=200, status="input_required", inputRequests={"size": QUESTION}
        ),
        cancels=await tools.create(client, pollIntervalMs=200),
        fails=await tools.create(client, status="failed", error=ERROR),
    )
    ids = {name: task.id for name, task in vars(tasks).items()}
    ticket = {
        "url": f"{tools._http.base_url}/mcp",
        "token": client.token,
        "tasks": {**ids, "unknown": secret(secrets.token_urlsafe(48))},
    }
    process = await asyncio.create_subprocess_exec(*driver, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(json.dumps(ticket).encode())
    process.stdin.close()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        output = group.create_task(process.stdout.read())
        errors = group.create_task(_play_the_tool_server(tools, tasks, process.stderr))
        code = await process.wait()

    said = errors.result() + output.result().decode()
    assert code == 0, said
    assert not [word for word in (*ids.values(), client.token) if word and word in said]
    summary = json.loads(output.result())
    _judge(summary)


def _judge(summary: dict[str, Any]) -> None:
    assert summary["completes"]["status"] == "completed"
    assert summary["completes"]["seen"][0] == "working"
    assert "done" in json.dumps(summary["completes"]["result"])
    assert summary["asks"]["status"] == "completed"
    assert "small" in json.dumps(summary["asks"]["result"])
    assert summary["cancels"]["status"] == "cancelled"
    assert summary["fails"]["status"] == "failed"
    assert "no luck" in json.dumps(summary["fails"])
    refusals = [code for code in _numbers(summary["unknown"]) if code < 0]
    assert refusals
    assert set(refusals) == {NOT_FOUND}


def _numbers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    return [value] if isinstance(value, int) else []


async def _play_the_tool_server(
    tools: ToolServer, tasks: Tasks, errors: asyncio.StreamReader
) -> str:
    """Finishes each task when its client has done its part; gives back what the driver said."""
    said: list[str] = []

    async def listen() -> None:
        async for line in errors:
            said.append(line.decode())  # noqa: PERF401 - others look at it meanwhile

    async def complete_when_watched() -> None:
        await eventually(lambda: _is(any(line.strip() == "watching" for line in said)))
        await tools.report(tasks.completes, statusMessage="half way")
        await tools.complete(tasks.completes, {"content": [{"type": "text", "text": "done"}]})

    async def complete_when_answered() -> None:
        await eventually(lambda: _member(tools, tasks.asks, "inputResponses"))
        answers = await _member(tools, tasks.asks, "inputResponses")
        text = {"type": "text", "text": json.dumps(answers)}
        await tools.complete(tasks.asks, {"content": [text]})

    async def stop_when_cancelled() -> None:
        await eventually(lambda: _member(tools, tasks.cancels, "cancelRequested"))
        await tools.report(tasks.cancels, status="cancelled")

    await asyncio.gather(
        listen(), complete_when_watched(), complete_when_answered(), stop_when_cancelled()
    )
    return "".join(said)


async def _is(value: bool) -> bool:
    return value


async def _member(tools: ToolServer, task: CreatedTask, name: str) -> Any:
    return (await tools.read(task.ref)).json()[name]
