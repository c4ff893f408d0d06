"""fastmcp.md with FastMCP's own client, and beside FastMCP's own background tasks."""

from pathlib import Path

import pytest

from tests.recipes.pages import Reader
from tests.support.processes import ROOT, running_broker

pytestmark = pytest.mark.clients

PAGE = "fastmcp.md"
FASTMCP = ROOT / ".venv-recipe-fastmcp/bin"
BOTH_KINDS = {
    "identifier = TASKS": 'identifier = "com.example/durable"',
    "app = server.http_app()": """
from fastmcp_tasks import TasksExtension

server.add_extension(TasksExtension())

@server.tool(task=True)
async def of_fastmcp() -> str:
    return "a task of FastMCP"

app = server.http_app()""",
    "--mcp-url": "--forward-unknown-tasks --mcp-url",
    "        print((await client.call_tool(": """
        print((await client.call_tool("of_fastmcp")).data)
        print((await client.call_tool(""",
}


@pytest.mark.parametrize("changes", [{}, BOTH_KINDS], ids=["alone", "beside TasksExtension"])
def test_the_client_of_the_page(changes: dict[str, str], tmp_path: Path) -> None:
    with running_broker("broker-fastmcp") as broker:
        reader = Reader(PAGE, broker, tmp_path, installed=FASTMCP, changes=changes)
        reader.register()
        with reader.running():
            printed = reader.type("python client.py").splitlines()
    assert [line for line in printed if line != "a task of FastMCP"] == [
        "2 photos are smaller now",
        "Delete a.jpg?",
        "a.jpg is deleted",
    ]
    assert ("a task of FastMCP" in printed) is bool(changes)
