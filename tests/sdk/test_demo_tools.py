"""The tools of `demo/tool_server.py`, which authors copy, as a client of the demo sees them."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.support.processes import BrokerProcess, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import McpClient
from tests.support.waiting import eventually

ACCEPTED = {"action": "accept", "content": {"confirm": True, "kind": ".md"}}
UNWILLING: list[dict[str, Any]] = [
    {"action": "decline"},
    {"action": "cancel", "content": None},
    {"action": "accept", "content": None},
]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with running_broker("demo-tools", demo=True) as broker:
        yield broker


@pytest.fixture
async def client(broker: BrokerProcess) -> AsyncIterator[McpClient]:
    async with httpx.AsyncClient(base_url=broker.url, timeout=30) as http:
        yield McpClient(http, new_token(), "/mcp/demo")


async def answered(
    client: McpClient, tool: str, arguments: dict[str, Any], answer: dict[str, Any]
) -> str:
    """What a tool says in the end, after its question had this answer."""
    params = {"name": tool, "arguments": arguments}
    response = await client.request("tools/call", params, headers={"mcp-name": tool})
    task_id = secret(response.json()["result"]["taskId"])
    seen: dict[str, Any] = {}

    async def comes_to(status: str) -> bool:
        seen.update(await client.get(task_id))
        return bool(seen["status"] == status)

    await eventually(lambda: comes_to("input_required"))
    [key] = seen["inputRequests"]
    await client.update(task_id, {key: answer})
    await eventually(lambda: comes_to("completed"))
    [content] = seen["result"]["content"]
    text: str = content["text"]
    return text


@pytest.mark.parametrize("answer", UNWILLING)
async def test_a_user_who_would_rather_not_is_obeyed(
    client: McpClient, answer: dict[str, Any]
) -> None:
    said = await answered(client, "index_project", {"ask": True}, answer)
    assert said == "Nothing is indexed, as you wish."
    said = await answered(client, "confirm_delete", {"filename": "old.txt"}, answer)
    assert said == "old.txt stays."


async def test_a_user_who_agrees_gets_what_was_asked_for(client: McpClient) -> None:
    assert "most of them: " in await answered(client, "index_project", {"ask": True}, ACCEPTED)
    said = await answered(client, "confirm_delete", {"filename": "old.txt"}, ACCEPTED)
    assert said == "old.txt is deleted."


async def test_slow_compute_finds_one_prime_after_the_other(client: McpClient) -> None:
    arguments = {"seconds": 0.1, "label": "found"}
    params = {"name": "slow_compute", "arguments": arguments}
    response = await client.request("tools/call", params, headers={"mcp-name": "slow_compute"})
    task_id = secret(response.json()["result"]["taskId"])
    seen: dict[str, Any] = {}

    async def is_completed() -> bool:
        seen.update(await client.get(task_id))
        return bool(seen["status"] == "completed")

    await eventually(is_completed)
    words = seen["result"]["content"][0]["text"].split()
    assert words[:4] == ["found:", "the", "largest", "of"]
    found, largest = int(words[4]), int(words[-1])
    assert found == sum(all(n % d for d in range(2, n)) for n in range(2, largest + 1))
