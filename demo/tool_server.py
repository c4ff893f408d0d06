"""A tool server whose slow tools are durable tasks: what you would write yourself.

It speaks MCP by the official Python SDK and keeps its tasks in the broker that BROKER_URL,
BROKER_BACKEND, BROKER_API_KEY and BROKER_WEBHOOK_SECRET name:

    uvicorn demo.tool_server:app
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, islice
from math import isqrt
from pathlib import Path
from time import monotonic
from typing import Any

from mcp.server.mcpserver import MCPServer
from starlette.routing import Route

from taskbroker_sdk import AsyncTaskBroker, current_task, elicitation
from taskbroker_sdk.mcp import DurableTools

broker = AsyncTaskBroker.from_env(heartbeat=10)  # signals come at once
durable = DurableTools(broker, stall_after_ms=30_000)
server = MCPServer(
    "demo-tools",
    version="1.0",
    extensions=[durable],
    middleware=[durable.middleware],
    lifespan=durable.lifespan,  # closes the broker's client: tasks that still run are reported
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
    end, found, primes = monotonic() + seconds, [2], filter(is_prime, count(3, 2))
    while monotonic() < end:
        found += islice(primes, 50)
        await asyncio.sleep(0.05)
    return f"{label}: the largest of {len(found)} primes is {found[-1]}"


def is_prime(odd: int) -> bool:
    return all(odd % divisor for divisor in range(3, isqrt(odd) + 1, 2))


@server.tool()
@durable(required=True)
async def index_project(ask: bool = False) -> str:
    """Counts the words in this project's files, and tells how far it is."""
    files = sorted(text_files())
    if ask:
        wanted = await choose_kind(files)
        if wanted is None:
            return "Nothing is indexed, as you wish."
        files = [file for file in files if file.suffix == wanted]
    words: Counter[str] = Counter()
    for number, file in enumerate(files, start=1):
        words.update(re.findall(r"[a-z]{3,}", file.read_text(encoding="utf-8").lower()))
        if number % 10 == 0:
            await current_task().progress(f"{number} of {len(files)} files")
        await asyncio.sleep(5 / len(files))  # so that there is something to watch
    common = ", ".join(f"{word} ({times})" for word, times in words.most_common(6))
    return f"{len(files)} files, {words.total():,} words, most of them: {common}"


async def choose_kind(files: list[Path]) -> str | None:
    """Asks the user which kind of file to index; None if they would rather not."""
    kinds = [kind for kind, _ in Counter(file.suffix for file in files).most_common(4)]
    schema = {"type": "object", "properties": {"kind": {"type": "string", "enum": kinds}}}
    question = elicitation("Which files shall I index?", schema)
    answers = await current_task().ask({"kind": question})
    return filled_in(answers["kind"]).get("kind")


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
    answers = await current_task().ask({"confirm": question})
    agreed = filled_in(answers["confirm"]).get("confirm") is True
    return f"{filename} is deleted." if agreed else f"{filename} stays."


def filled_in(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the user has filled in: nothing, if they declined or put the question away."""
    content: Mapping[str, Any] | None = answer.get("content")
    return content if content and answer["action"] == "accept" else {}


app = server.streamable_http_app()
app.router.routes.append(Route("/signals", broker.receiver()))  # the backend's callback URL
