"""Drives the official Python SDK before 2.0, `mcp`, with the tasks of MCP 2025-11-25 that it has.

`../drivers.py` describes the ticket and the summary.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.context import RequestContext
from mcp.types import (
    CallToolResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    GetTaskResult,
)

Json = dict[str, Any]


class Driver:
    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._tasks = session.experimental

    async def call(self, tool: str, arguments: Json) -> Json:
        return said(await self._session.call_tool(tool, arguments))

    async def follow(self, tool: str, arguments: Json) -> Json:
        return await self.resume(await self._start(tool, arguments))

    async def wait(self, tool: str, arguments: Json) -> Json:
        return await self._ending(await self._start(tool, arguments))

    async def cancel(self, tool: str, arguments: Json) -> Json:
        return await self.withdraw(await self._start(tool, arguments))

    async def leave(self, tool: str, arguments: Json, file: str) -> Json:
        task = await self._start(tool, arguments)
        await asyncio.to_thread(Path(file).write_text, task)
        return {}

    async def resume(self, task: str) -> Json:
        async for seen in self._tasks.poll_task(task):
            if seen.status == "input_required":
                break
        return await self._ending(task)

    async def withdraw(self, task: str) -> Json:
        return {"status": (await self._tasks.cancel_task(task)).status}

    async def probe(self, task: str) -> Json:
        return {
            "get": await code_of(lambda: self._tasks.get_task(task)),
            "result": await code_of(lambda: self._tasks.get_task_result(task, CallToolResult)),
            "cancel": await code_of(lambda: self._tasks.cancel_task(task)),
        }

    async def find(self, task: str) -> Json:
        pages, cursor = [], None
        while not pages or cursor:
            page = await self._tasks.list_tasks(cursor)
            pages.append([each.taskId for each in page.tasks])
            cursor = page.nextCursor
        return {"pages": len(pages), "found": any(task in page for page in pages)}

    async def _start(self, tool: str, arguments: Json) -> str:
        """The id of the task that the call becomes."""
        return (await self._tasks.call_tool_as_task(tool, arguments)).task.taskId

    async def _ending(self, task: str) -> Json:
        """Blocks until the task has ended; its questions come meanwhile."""
        try:
            outcome = said(await self._tasks.get_task_result(task, CallToolResult))
        except McpError as error:
            outcome = {"error": {"code": error.error.code, "message": error.error.message}}
        return reason(await self._tasks.get_task(task)) | outcome


def said(result: CallToolResult) -> Json:
    text = "".join(block.text for block in result.content if block.type == "text")
    return {"text": text, "isError": result.isError}


def reason(task: GetTaskResult) -> Json:
    failed = task.status == "failed"
    return {"status": task.status, **({"error": {"message": task.statusMessage}} if failed else {})}


async def code_of(attempt: Callable[[], Awaitable[Any]]) -> int | None:
    try:
        await attempt()
    except McpError as refused:
        return refused.error.code
    return None


async def drive(url: str, token: str | None, acts: dict[str, Json]) -> dict[str, Json]:
    asked: list[str] = []

    async def reply(_: RequestContext[Any, Any], params: ElicitRequestParams) -> ElicitResult:
        assert isinstance(params, ElicitRequestFormParams)
        asked.append(params.message)
        fields = params.requestedSchema["properties"]
        content = {name: field["type"] == "boolean" or "Ada" for name, field in fields.items()}
        return ElicitResult(action="accept", content=content)

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    outcomes: dict[str, Json] = {}
    async with (
        httpx.AsyncClient(headers=headers, timeout=30) as http,
        streamable_http_client(url, http_client=http) as (incoming, outgoing, _),
        ClientSession(incoming, outgoing, elicitation_callback=reply) as session,
    ):
        await session.initialize()
        driver = Driver(session)
        for name, act in acts.items():
            asked.clear()
            outcome = await getattr(driver, act.pop("verb"))(**act)
            outcomes[name] = {**outcome, "asked": list(asked)}
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(**json.load(sys.stdin)))))
