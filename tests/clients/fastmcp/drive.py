"""Drives `fastmcp[tasks]`, as published. `../drivers.py` describes the ticket and the summary."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import mcp_types
from fastmcp import Client
from fastmcp_tasks import ToolTask, call_tool_task
from fastmcp_tasks.client_models import (
    ClientCreateTaskResult,
    UpdateTaskRequest,
    UpdateTaskRequestParams,
)
from mcp import MCPError

Json = dict[str, Any]


class Driver:
    def __init__(self, client: Client[Any]) -> None:
        self._client = client

    async def call(self, tool: str, arguments: Json) -> Json:
        """The library waits for the task by itself; its caller does not learn of it."""
        result = await self._client.call_tool(tool, arguments, raise_on_error=False)
        return said(result)

    async def follow(self, tool: str, arguments: Json) -> Json:
        return await self._settle(await self._start(tool, arguments))

    async def cancel(self, tool: str, arguments: Json) -> Json:
        return await self._withdraw(await self._start(tool, arguments))

    async def leave(self, tool: str, arguments: Json, file: str) -> Json:
        task = await self._start(tool, arguments)
        await asyncio.to_thread(Path(file).write_text, task.task_id)
        return {}

    async def resume(self, task: str) -> Json:
        return await self._settle(self._known(task))

    async def withdraw(self, task: str) -> Json:
        return await self._withdraw(self._known(task))

    async def probe(self, task: str) -> Json:
        handle = self._known(task)
        answers = UpdateTaskRequestParams(task_id=task, input_responses={})
        update = UpdateTaskRequest(params=answers)
        return {
            "get": await code_of(handle.status),
            "update": await code_of(
                lambda: self._client.session.send_request(update, mcp_types.Result)
            ),
            "cancel": await code_of(handle.cancel),
        }

    async def _start(self, tool: str, arguments: Json) -> ToolTask:
        return await call_tool_task(self._client, tool, arguments, raise_on_error=False)

    def _known(self, task: str) -> ToolTask:
        """A handle on a task of another process; the library uses nothing but its id."""
        times = {"createdAt": "", "lastUpdatedAt": ""}
        created = {"resultType": "task", "taskId": task, "status": "working", **times}
        handle = ClientCreateTaskResult.model_validate(created)
        return ToolTask(self._client, "resumed", handle, raise_on_error=False)

    async def _withdraw(self, task: ToolTask) -> Json:
        await task.cancel()
        outcome = await self._settle(task)
        await task.cancel()
        return outcome

    async def _settle(self, task: ToolTask) -> Json:
        result = await task.result()
        end = await task.status()
        if end.status == "completed":
            return {"status": end.status, **said(result)}
        return {"status": end.status, "error": end.error}


def said(result: Any) -> Json:
    text = "".join(block.text for block in result.content if block.type == "text")
    return {"text": text, "isError": result.is_error}


async def code_of(attempt: Callable[[], Awaitable[Any]]) -> int | None:
    try:
        await attempt()
    except MCPError as refused:
        return refused.error.code
    return None


async def drive(url: str, token: str | None, acts: dict[str, Json]) -> dict[str, Json]:
    asked: list[str] = []

    async def answer(message: str, _type: Any, params: Any, _context: Any) -> Json:
        asked.append(message)
        fields = params.requested_schema["properties"]
        return {name: field["type"] == "boolean" or "Ada" for name, field in fields.items()}

    outcomes: dict[str, Json] = {}
    async with Client(url, auth=token, elicitation_handler=answer) as client:
        driver = Driver(client)
        for name, act in acts.items():
            asked.clear()
            outcome = await getattr(driver, act.pop("verb"))(**act)
            outcomes[name] = {**outcome, "asked": list(asked)}
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(**json.load(sys.stdin)))))
