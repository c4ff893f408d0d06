"""The recipes in Python: python-sdk.md and fastmcp.md have the same three tools."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.recipes.pages import Reader, end
from tests.support.processes import ROOT, BrokerProcess, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import CAPABILITIES_KEY, VERSION, VERSION_KEY, McpClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

FASTMCP = ROOT / ".venv-recipe-fastmcp/bin"
PAGES = {"python-sdk.md": ROOT / ".venv/bin", "fastmcp.md": FASTMCP}
MANY = [f"{number}.jpg" for number in range(1000)]


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not (PAGES[name] / "python").exists():
        pytest.fail(f"{PAGES[name]} is not installed: run `make clients`")
    return name


@pytest.fixture(scope="module")
def broker(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker, and the page's server behind its gateway."""
    with running_broker(f"broker-{page}") as broker:
        reader = Reader(page, broker, tmp_path_factory.mktemp("reader"), installed=PAGES[page])
        reader.register()
        with reader.running():
            yield broker


@pytest.fixture
async def client(broker: BrokerProcess) -> AsyncIterator[McpClient]:
    async with client_of(broker) as client:
        yield client


@asynccontextmanager
async def client_of(broker: BrokerProcess) -> AsyncIterator[McpClient]:
    """A client with nothing but the URL that the page names."""
    async with httpx.AsyncClient(base_url=broker.url, timeout=30) as http:
        yield McpClient(http, new_token(), "/mcp/photos")


async def call(client: McpClient, tool: str, **arguments: Any) -> str:
    """The id of the task that the call became."""
    params = {"name": tool, "arguments": arguments}
    response = await client.request("tools/call", params, headers={"mcp-name": tool})
    created = response.json()["result"]
    assert created["resultType"] == "task"
    return secret(created["taskId"])


async def until_it_is(client: McpClient, task_id: str, status: str) -> dict[str, Any]:
    async def reached() -> bool:
        task = await client.get(task_id)
        return bool(task["status"] == status)

    await eventually(reached)
    return await client.get(task_id)


async def test_progress_and_result(client: McpClient) -> None:
    task_id = await call(client, "resize", photos=["a.jpg", "b.jpg", "c.jpg"])

    async def tells_how_far_it_is() -> bool:
        return "of 3" in (await client.get(task_id)).get("statusMessage", "")

    await eventually(tells_how_far_it_is)
    done = await until_it_is(client, task_id, "completed")
    assert done["result"]["content"][0]["text"] == "3 photos are smaller now"


@pytest.mark.parametrize(("agree", "outcome"), [(True, "is deleted"), (False, "stays")])
async def test_a_question(client: McpClient, agree: bool, outcome: str) -> None:
    task_id = await call(client, "delete", photo="a.jpg")
    asked = await until_it_is(client, task_id, "input_required")
    assert asked["inputRequests"]["sure"]["params"]["message"] == "Delete a.jpg?"
    await client.update(task_id, {"sure": {"action": "accept", "content": {"agree": agree}}})
    done = await until_it_is(client, task_id, "completed")
    assert done["result"]["content"][0]["text"] == f"a.jpg {outcome}"


async def test_a_client_cancels(client: McpClient) -> None:
    task_id = await call(client, "resize", photos=MANY)
    await client.cancel(task_id)
    assert "result" not in await until_it_is(client, task_id, "cancelled")


async def test_an_error_of_the_protocol(client: McpClient) -> None:
    task_id = await call(client, "resize", photos=["a.txt"])
    failed = await until_it_is(client, task_id, "failed")
    assert failed["error"] == {"code": -32602, "message": "a.txt is no photo"}


async def test_a_tool_error_is_a_result(client: McpClient) -> None:
    task_id = await call(client, "resize", photos="none of the kind")
    done = await until_it_is(client, task_id, "completed")
    assert done["result"]["isError"] is True


async def test_nobody_else_has_the_task(client: McpClient, broker: BrokerProcess) -> None:
    task_id = await call(client, "delete", photo="a.jpg")
    async with client_of(broker) as somebody_else:
        assert (await somebody_else.error("tasks/get", task_id))["code"] == -32602
    await until_it_is(client, task_id, "input_required")


async def test_a_client_without_tasks(client: McpClient) -> None:
    meta = {VERSION_KEY: VERSION, CAPABILITIES_KEY: {}}
    calls = {"describe": {"photo": "a.jpg"}, "resize": {"photos": ["a.jpg"]}}
    described, refused = [
        await client.request(
            "tools/call",
            {"name": tool, "arguments": arguments},
            headers={"mcp-name": tool},
            meta=meta,
        )
        for tool, arguments in calls.items()
    ]
    assert described.json()["result"]["content"][0]["text"] == "a.jpg shows a cat"
    assert refused.json()["error"]["code"] == -32021


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGTERM, "the tool server was stopped"),
        (signal.SIGKILL, "the tool server stopped reporting"),
    ],
)
async def test_the_server_ends(
    page: str,
    number: signal.Signals,
    says: str,
    tmp_path: Path,
) -> None:
    with running_broker(f"broker-ends-{page}") as broker:
        sooner = {"60_000": "2_000"}
        reader = Reader(page, broker, tmp_path, installed=PAGES[page], changes=sooner)
        reader.register()
        async with client_of(broker) as client:
            with reader.running() as server:
                task_id = await call(client, "resize", photos=MANY)
                end(server, number)
            failed = await until_it_is(client, task_id, "failed")
    assert failed["error"] == {"code": -32603, "message": says}
