"""A tool server that keeps its tasks itself: `fastmcp[tasks]`, as published, without a Redis.

python tool_server.py PORT
"""

import asyncio
import sys

from fastmcp import FastMCP
from fastmcp_tasks import TasksExtension

server = FastMCP("own-tasks")
server.add_extension(TasksExtension(url="memory://"))


@server.tool(task=True)
async def count(to: int) -> str:
    """Counts, ten numbers a second."""
    for _ in range(to):
        await asyncio.sleep(0.1)
    return f"counted to {to}"


if __name__ == "__main__":
    server.run("http", port=int(sys.argv[1]), show_banner=False)
