"""A tool server whose slow tools are durable tasks: what you would write yourself.

It speaks MCP by the official Python SDK and keeps its tasks in the broker that BROKER_URL,
BROKER_BACKEND, BROKER_API_KEY and BROKER_WEBHOOK_SECRET name:

    uvicorn demo.tool_server:app
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mcp.server.mcpserver import MCPServer

from taskbroker_sdk import AsyncTask, AsyncTaskBroker, current_task, elicitation
from taskbroker_sdk.mcp import DurableTools

broker = AsyncTaskBroker.from_env(heartbeat=0.5)
durable = DurableTools(broker, stall_after_ms=30_000)
server = MCPServer(
    "demo-tools",
    version="1.0",
    extensions=[durable],
    lifespan=durable.lifespan,
    log_level="WARNING",
)

PROJECT = Path(__file__).resolve().parents[1]


@server.tool()
def greet(name: str) -> str:
    """Says hello: done at once, so no task."""
    return f"Hello, {name}!"


@server.tool()
@durable
async def slow_compute(seconds: float = 5, label: str = "") -> str:
    """Looks for prime numbers, for as long as you say. Clients without tasks wait for it."""
    found, until = [2], asyncio.get_running_loop().time() + seconds
    for candidate in range(3, 10**9, 2):
        if all(candidate % prime for prime in found if prime * prime <= candidate):
            found.append(candidate)
        if len(found) % 50 == 0:
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(0.05)
    return f"{label}: the largest of {len(found)} primes is {found[-1]}"


@server.tool()
@durable(required=True)
async def index_project(ask: bool = False) -> str:
    """Counts the words in this project's files, and tells how far it is."""
    task = current_task()
    files = sorted(text_files())
    if ask:
        wanted = await choose_kind(task, files)
        files = [file for file in files if file.suffix == wanted]
    words: Counter[str] = Counter()
    for number, file in enumerate(files, start=1):
        words.update(re.findall(r"[a-z]{3,}", file.read_text().lower()))
        if number % 10 == 0:
            await task.progress(f"{number} of {len(files)} files")
        await asyncio.sleep(5 / len(files))  # so that there is something to watch
    common = ", ".join(f"{word} ({count})" for word, count in words.most_common(6))
    return f"{len(files)} files, {words.total():,} words, most of them: {common}"


async def choose_kind(task: AsyncTask, files: list[Path]) -> str:
    """Asks the user which kind of file to index."""
    kinds = [kind for kind, _ in Counter(file.suffix for file in files).most_common(4)]
    schema = {"type": "object", "properties": {"kind": {"type": "string", "enum": kinds}}}
    answers = await task.ask({"kind": elicitation("Which files shall I index?", schema)})
    return str(answers["kind"].get("content", {}).get("kind", kinds[0]))


def text_files() -> Iterator[Path]:
    for kind in ("app", "demo", "docs", "migrations"):
        for pattern in ("*.py", "*.md"):
            yield from (PROJECT / kind).rglob(pattern)


@server.tool()
@durable(required=True)
async def confirm_delete(filename: str) -> str:
    """Asks before it does it (it does not really)."""
    schema = {"type": "object", "properties": {"confirm": {"type": "boolean"}}}
    question = elicitation(f"Delete {filename}?", schema)
    answer = (await current_task().ask({"confirm": question}))["confirm"]
    agreed = answer["action"] == "accept" and answer.get("content", {}).get("confirm")
    return f"{filename} is deleted." if agreed else f"{filename} stays."


app = server.streamable_http_app()
