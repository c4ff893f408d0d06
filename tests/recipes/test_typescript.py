"""typescript-sdk.md: it quotes examples/typescript, which has tests of its own, and runs it."""

from pathlib import Path

import httpx
import pytest

from tests.recipes.pages import Reader, blocks
from tests.support.processes import ROOT, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import McpClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

PAGE = "typescript-sdk.md"
EXAMPLE = ROOT / "examples/typescript"


def test_the_page_quotes_the_example() -> None:
    [quoted] = [block.code for block in blocks(PAGE) if block.name == "server.ts"]
    rest = iter((EXAMPLE / "server.ts").read_text().splitlines())
    changed = [line for line in quoted.splitlines() if line and line not in rest]
    assert changed == []


async def test_the_example_behind_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    with running_broker("broker-typescript") as broker:
        reader = Reader(PAGE, broker, tmp_path)
        reader.register()
        async with httpx.AsyncClient(base_url=broker.url, timeout=30) as http:
            client = McpClient(http, new_token(), "/mcp/primes")
            with reader.running():
                called = await client.request(
                    "tools/call",
                    {"name": "count_primes", "arguments": {"limit": 100}},
                    headers={"mcp-name": "count_primes"},
                )
                task_id = secret(called.json()["result"]["taskId"])

                async def is_completed() -> bool:
                    return bool((await client.get(task_id))["status"] == "completed")

                await eventually(is_completed)
            task = await client.get(task_id)
    assert task["result"]["content"][0]["text"] == "There are 25 primes below 100."
