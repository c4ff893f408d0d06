"""Ingress mode: one URL, and the `Mcp-Method` header says whose request it is (docs/ingress.md).

Real proxies with the recipes of `deploy/`, a real broker, and a tool server that says what
reached it. `make ingress` installs the proxies, all but nginx.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.asgi import Receive, Send
from tests.deploy.proxies import PROXIES, PUBLIC_NAME, Ports, running_proxy
from tests.support.processes import BrokerProcess, free_port, running_broker
from tests.support.secrecy import issued, new_token
from tests.support.servers import (
    Behaviour,
    Received,
    Upstream,
    answer_with,
    read_all,
    running_upstream,
)
from tests.support.service import McpClient, ToolServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

ANSWER = b'{"from": "tool server"}'
JSON = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


@dataclass(frozen=True)
class Ingress:
    """What a client has of it: a public URL."""

    http: httpx.AsyncClient
    log: Path

    def client(self) -> McpClient:
        return McpClient(self.http, new_token())


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with running_broker("ingress", allowed_hosts=PUBLIC_NAME) as broker:
        yield broker


@pytest.fixture(scope="module")
async def tools(broker: BrokerProcess) -> AsyncIterator[ToolServer]:
    """The tool server's other side: it reports to the broker directly."""
    async with broker.tool_server("tools") as tools:
        yield tools


@pytest.fixture(scope="module")
async def shared_upstream() -> AsyncIterator[Upstream]:
    async with running_upstream() as upstream:
        upstream.behaviour = answer_with(ANSWER)
        yield upstream


@pytest.fixture(scope="module", params=PROXIES)
async def ingress(
    request: pytest.FixtureRequest, broker: BrokerProcess, shared_upstream: Upstream
) -> AsyncIterator[Ingress]:
    tool_server_port = urlsplit(shared_upstream.url).port
    assert tool_server_port is not None
    ports = Ports(free_port(), broker.port, tool_server_port)
    url = f"http://127.0.0.1:{ports.public}"
    with running_proxy(request.param, ports) as log:
        async with httpx.AsyncClient(base_url=url, headers={"host": PUBLIC_NAME}) as http:
            await eventually(lambda: _routes(http))
            yield Ingress(http, log)


async def _routes(http: httpx.AsyncClient) -> bool:
    return (await http.get("/mcp")).is_success


@pytest.fixture
def upstream(shared_upstream: Upstream) -> Upstream:
    shared_upstream.received.clear()
    shared_upstream.behaviour = answer_with(ANSWER)
    return shared_upstream


def stream_of(events: asyncio.Queue[str]) -> Behaviour:
    """Sends each event when the test puts it into the queue, until the client leaves."""

    async def say(send: Send) -> None:
        while True:
            event = f"data: {await events.get()}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async def behave(request: Received, receive: Receive, send: Send) -> None:
        await read_all(request, receive)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        saying = asyncio.create_task(say(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        saying.cancel()
        request.disconnected.set()

    return behave


async def test_the_broker_answers_for_a_task_with_the_credential_that_it_was_created_for(
    ingress: Ingress, tools: ToolServer, upstream: Upstream
) -> None:
    client = ingress.client()
    task = await tools.create(client)

    assert (await client.get(task.id))["status"] == "working"
    await client.update(task.id, {})
    await client.cancel(task.id)
    refused = await ingress.client().error("tasks/get", task.id)

    assert (await tools.read(task.ref)).json()["cancelRequested"] is True
    assert refused["message"] == "Failed to retrieve task: Task not found"
    assert upstream.received == []


async def test_the_broker_answers_subscriptions(
    ingress: Ingress, tools: ToolServer, upstream: Upstream
) -> None:
    client = ingress.client()
    over = await tools.create(client, status="completed", result={"content": []})

    followed = {"notifications": {"taskIds": [over.id]}}
    answer = await client.request("subscriptions/listen", followed)

    assert '"jsonrpc"' in answer.text
    assert upstream.received == []


@pytest.mark.parametrize(
    "method", ["tools/call", "server/discover", "tasks/list", "tasks/get/x", "Tasks/Get"]
)
async def test_the_tool_server_answers_everything_else(
    ingress: Ingress, upstream: Upstream, method: str
) -> None:
    client = ingress.client()

    answer = await client.request(method, {"name": "resize"}, headers={"mcp-name": "resize"})

    assert answer.content == ANSWER
    (received,) = upstream.received
    assert (received.method, received.path) == ("POST", "/mcp")
    assert received.message["method"] == method
    passed_on = {
        "host": PUBLIC_NAME,
        "authorization": f"Bearer {client.token}",
        "mcp-method": method,
        "mcp-name": "resize",
        "mcp-protocol-version": "2026-07-28",
    }
    assert passed_on.items() <= set(received.headers)


@pytest.mark.parametrize("verb", ["POST", "GET", "DELETE"])
async def test_a_legacy_client_names_no_method_and_meets_the_tool_server(
    ingress: Ingress, upstream: Upstream, verb: str
) -> None:
    legacy = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"taskId": "some-id"}}
    headers = {"mcp-session-id": "some-session", "mcp-protocol-version": "2025-11-25"}

    answer = await ingress.http.request(verb, "/mcp", json=legacy, headers=headers)

    assert answer.content == ANSWER
    assert upstream.last.method == verb
    assert headers.items() <= set(upstream.last.headers)


@pytest.mark.parametrize("name", ["Task-Owner", "task-owner", "Task_Owner", "TASK_OWNER"])
async def test_nobody_outside_says_who_the_owner_is(
    ingress: Ingress, upstream: Upstream, name: str
) -> None:
    await ingress.client().request("tools/call", headers={name: "somebody-else"})

    (received,) = upstream.received
    assert "somebody-else" not in dict(received.headers).values()


async def test_a_stream_arrives_event_by_event_and_ends_with_its_client(
    ingress: Ingress, upstream: Upstream
) -> None:
    events: asyncio.Queue[str] = asyncio.Queue()
    upstream.behaviour = stream_of(events)
    async with ingress.http.stream("POST", "/mcp", json={}, headers=JSON) as answer:
        lines = (line async for line in answer.aiter_lines() if line)
        for event in ("one", "two", "three"):
            events.put_nowait(event)
            assert await anext(lines) == f"data: {event}"
        assert not upstream.last.disconnected.is_set()

    await eventually(upstream.last.disconnected.is_set)


@pytest.mark.parametrize("ingress", sorted(PROXIES.keys() - {"envoy"}), indirect=True)
async def test_a_request_arrives_while_it_is_being_sent(
    ingress: Ingress, upstream: Upstream
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"first": 1, '
        await eventually(lambda: upstream.received and upstream.last.body)
        yield b'"last": 2}'

    await ingress.http.post("/mcp", content=body(), headers=JSON)

    assert upstream.last.message == {"first": 1, "last": 2}


@pytest.mark.parametrize("ingress", sorted(PROXIES.keys() - {"traefik"}), indirect=True)
async def test_a_body_over_the_limit_is_refused(ingress: Ingress) -> None:
    answer = await ingress.http.post("/mcp", content=b" " * (2**20 + 1), headers=JSON)

    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/v1/tasks", "/metrics", "/docs", "/mcp/tools", "/"])
async def test_the_rest_of_the_broker_is_closed(
    ingress: Ingress, upstream: Upstream, path: str
) -> None:
    answer = await ingress.http.get(path, headers={"mcp-method": "tasks/get"})

    assert answer.status_code == 404
    assert upstream.received == []


async def test_the_metadata_of_the_protected_resource_is_the_tool_servers(
    ingress: Ingress, upstream: Upstream
) -> None:
    answer = await ingress.http.get("/.well-known/oauth-protected-resource/mcp")

    assert answer.content == ANSWER


@pytest.mark.parametrize("ingress", ["nginx", "caddy"], indirect=True)
async def test_the_access_log_has_no_task_id_and_no_token(
    ingress: Ingress, tools: ToolServer
) -> None:
    client = ingress.client()
    task = await tools.create(client)
    await client.get(task.id)

    log = ingress.log.read_text()
    assert re.search(r'"POST /mcp |"uri":"/mcp"', log)
    assert not [secret for secret in issued() if secret in log]
