"""`DurableTools` and clients of MCP 2025-11-25, which ask for a task themselves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from mcp.server.mcpserver import MCPServer

from taskbroker_sdk import TaskFailed
from taskbroker_sdk.mcp import DurableTools
from tests.sdk.test_python_mcp import durable_tools
from tests.support.secrecy import new_token, secret
from tests.support.service import Service, lifespan
from tests.support.waiting import eventually

HEADERS = {
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2025-11-25",
}


class Client:
    """Calls tools at the tool server, and reads their tasks at the broker."""

    def __init__(self, tools: httpx.AsyncClient, service: Service) -> None:
        self._tools = tools
        self._broker = service.http
        self._headers = {**HEADERS, "authorization": f"Bearer {new_token()}"}

    async def initialize(self, version: str, **capabilities: Any) -> None:
        """Opens a session, in which a tool server remembers what the client is capable of."""
        params = {
            "protocolVersion": version,
            "capabilities": capabilities,
            "clientInfo": {"name": "tests", "version": "1"},
        }
        message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        self._headers["mcp-protocol-version"] = version
        response = await self._tools.post("/mcp", json=message, headers=self._headers)
        assert response.json()["result"]["protocolVersion"] == version
        self._headers["mcp-session-id"] = response.headers["mcp-session-id"]

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        if method.startswith("tasks/"):
            headers = {**self._headers, "accept": "application/json"}
            response = await self._broker.post("/mcp", json=message, headers=headers)
        else:
            response = await self._tools.post("/mcp", json=message, headers=self._headers)
        answer: dict[str, Any] = response.json()
        return answer

    async def call(self, tool: str, **params: Any) -> dict[str, Any]:
        return await self.ask("tools/call", name=tool, arguments={}, **params)

    async def comes_to(self, task_id: str, status: str) -> None:
        async def there() -> bool:
            seen = (await self.ask("tasks/get", taskId=task_id))["result"]
            return bool(seen["status"] == status)

        await eventually(there)


def server_with(durable: DurableTools, **options: Any) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "tools", extensions=[durable], lifespan=durable.lifespan, **options
    )

    @server.tool()
    def greet() -> str:
        return "hello"

    @server.tool()
    @durable
    async def resize() -> str:
        return "resized"

    @server.tool()
    @durable(required=True)
    async def fail() -> str:
        raise TaskFailed(-32050, "no disk left")

    return server


@asynccontextmanager
async def calling(
    server: MCPServer[Any], service: Service, *, stateless: bool = True
) -> AsyncIterator[Client]:
    app = server.streamable_http_app(stateless_http=stateless, json_response=True)
    async with (
        lifespan(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9"
        ) as http,
    ):
        yield Client(http, service)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    durable = durable_tools(service, await service.tool_server())
    async with calling(server_with(durable, middleware=[durable.middleware]), service) as client:
        yield client


async def test_tools_say_how_they_may_be_called(client: Client) -> None:
    listed = (await client.ask("tools/list"))["result"]["tools"]
    support = {tool["name"]: tool.get("execution", {}).get("taskSupport") for tool in listed}
    assert support == {"greet": None, "resize": "optional", "fail": "required"}


async def test_a_call_with_a_task_becomes_one(client: Client) -> None:
    task = (await client.call("resize", task={"ttl": 60_000}))["result"]["task"]
    assert (task["status"], task["ttl"]) == ("working", 60_000)
    result = (await client.ask("tasks/result", taskId=secret(task["taskId"])))["result"]
    assert result["content"][0]["text"] == "resized"


async def test_a_call_without_one_is_waited_for(client: Client) -> None:
    for tool, said in (("greet", "hello"), ("resize", "resized")):
        result = (await client.call(tool))["result"]
        assert result["content"][0]["text"] == said


async def test_a_tool_that_fails_fails_its_task(client: Client) -> None:
    task_id = secret((await client.call("fail", task={}))["result"]["task"]["taskId"])
    await client.comes_to(task_id, "failed")
    error = (await client.ask("tasks/result", taskId=task_id))["error"]
    assert error == {"code": -32050, "message": "no disk left"}


async def test_a_tool_that_needs_a_task_is_not_called_without(client: Client) -> None:
    assert (await client.call("fail"))["error"]["code"] == -32601


@pytest.mark.parametrize("ttl", [0, -1])
async def test_a_life_that_is_none_is_refused(client: Client, ttl: int) -> None:
    assert (await client.call("resize", task={"ttl": ttl}))["error"]["code"] == -32602


async def test_without_the_middleware_nothing_that_needs_a_task_runs(service: Service) -> None:
    durable = durable_tools(service, await service.tool_server())
    async with calling(server_with(durable), service) as client:
        assert (await client.call("fail"))["error"]["code"] == -32021
        assert "result" in await client.call("resize")


@pytest.mark.parametrize("version", ["2025-11-25", "2025-06-18"])
async def test_a_client_that_knows_tasks_of_a_later_version_is_kept_waiting(
    service: Service, version: str
) -> None:
    durable = durable_tools(service, await service.tool_server())
    server = server_with(durable, middleware=[durable.middleware])
    async with calling(server, service, stateless=False) as client:
        await client.initialize(version, extensions={durable.identifier: {}})
        assert (await client.call("resize"))["result"]["content"][0]["text"] == "resized"
