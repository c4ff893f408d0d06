"""Drives `fastmcp[tasks]` against tasks that somebody else created: it knows only their ids.

Standard input, one JSON object:

    {"url": "http://…/mcp", "token": "…",
     "tasks": {"completes": id, "asks": id, "cancels": id, "fails": id, "unknown": id}}

* `completes`: working now, completed once this driver has said on standard error that it watches
* `asks`: has one elicitation outstanding; ends when the answer has arrived
* `cancels`: working; ends `cancelled` once the cancellation has been asked for
* `fails`: ends `failed` with a JSON-RPC error
* `unknown`: names no task of this caller

Every member of `tasks` is optional. Prints one JSON summary, without any id; exit code 1 if a
step could not be carried out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types
from fastmcp import Client
from fastmcp_tasks import ToolTask
from fastmcp_tasks.client_models import (
    ClientCreateTaskResult,
    ClientGetTaskResult,
    UpdateTaskRequest,
    UpdateTaskRequestParams,
)
from mcp import MCPError

PATIENCE_SECONDS = 30.0


def resume(client: Client[Any], task_id: str) -> ToolTask:
    """A handle on a task that another process was given; only the id in it is ever used."""
    created = ClientCreateTaskResult.model_validate(
        {
            "resultType": "task",
            "taskId": task_id,
            "status": "working",
            "createdAt": "",
            "lastUpdatedAt": "",
        }
    )
    return ToolTask(client, "resumed", created, raise_on_error=False)


async def follow(task: ToolTask) -> dict[str, Any]:
    """Lets the library drive the task to its end, and watches every status on the way."""
    seen: list[str] = []

    def note(now: ClientGetTaskResult) -> None:
        if seen[-1:] != [now.status]:
            seen.append(now.status)
            if now.status == "working":
                print("watching", file=sys.stderr, flush=True)

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        ending = group.create_task(task.result())
        while not ending.done():
            note(await task.status())
            await asyncio.wait([ending], timeout=0.1)
        now = await task.status()
        note(now)
    parsed = ending.result()
    return {
        "seen": seen,
        "status": now.status,
        "result": now.result,
        "error": now.error,
        "text": [block.text for block in parsed.content if block.type == "text"],
        "isError": parsed.is_error,
    }


async def cancel(task: ToolTask) -> dict[str, Any]:
    before = await task.status()
    await task.cancel()
    after = await task.wait(timeout=PATIENCE_SECONDS)
    await task.cancel()
    return {"seen": [before.status, after.status], "status": after.status}


async def refusals(client: Client[Any], task: ToolTask) -> dict[str, Any]:
    """The same refusal is due to every method."""
    answer = UpdateTaskRequest(
        params=UpdateTaskRequestParams(
            task_id=task.task_id, input_responses={"answer": {"action": "cancel"}}
        )
    )
    attempts: dict[str, Callable[[], Awaitable[Any]]] = {
        "get": task.status,
        "update": lambda: client.session.send_request(answer, mcp_types.Result),
        "cancel": task.cancel,
        "result": task.result,
    }
    answers: dict[str, Any] = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
            answers[name] = "accepted"
        except MCPError as refused:
            answers[name] = {"code": refused.error.code, "message": refused.error.message}
    return answers


async def drive(url: str, token: str, tasks: dict[str, str]) -> dict[str, Any]:
    questions: list[str] = []

    async def answer(message: str, _type: Any, params: Any, _context: Any) -> dict[str, Any]:
        questions.append(message)
        [(field, schema)] = params.requested_schema["properties"].items()
        return {field: schema.get("enum", ["yes"])[0]}

    async with Client(url, auth=token, elicitation_handler=answer) as client:
        session = client.session
        summary: dict[str, Any] = {
            "protocol": session.protocol_version,
            "server": session.server_info and session.server_info.model_dump(exclude_none=True),
            "extensions": session.server_capabilities and session.server_capabilities.extensions,
        }
        if task_id := tasks.get("completes"):
            summary["completes"] = await follow(resume(client, task_id))
        if task_id := tasks.get("asks"):
            summary["asks"] = {**await follow(resume(client, task_id)), "questions": questions}
        if task_id := tasks.get("cancels"):
            summary["cancels"] = await cancel(resume(client, task_id))
        if task_id := tasks.get("fails"):
            summary["fails"] = await follow(resume(client, task_id))
        if task_id := tasks.get("unknown"):
            summary["unknown"] = await refusals(client, resume(client, task_id))
    return summary


def main() -> int:
    given = json.load(sys.stdin)
    try:
        print(json.dumps(asyncio.run(drive(given["url"], given["token"], given["tasks"]))))
    except Exception:  # noqa: BLE001 - whatever it was, it is shown without the secrets
        trace = traceback.format_exc()
        for secret in (given["token"], *given["tasks"].values()):
            trace = trace.replace(secret, "…")
        print(trace, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
