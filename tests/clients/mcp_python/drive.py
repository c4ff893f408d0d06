"""Drives the official Python SDK, `mcp`, against tasks that somebody else created, by their ids.

The SDK has no task methods of its own. It lets an application bring an extension: the requests
and results below are that extension; session, transport, headers and errors are the SDK's.

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
from typing import Any, Literal

import httpx2
from mcp import Client, ClientSession, MCPError
from mcp.client import advertise
from mcp.client.session import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    Request,
    RequestParams,
    Result,
)
from pydantic import Field

EXTENSION = "io.modelcontextprotocol/tasks"
PATIENCE_SECONDS = 30.0


class TaskParams(RequestParams):
    task_id: str = Field(serialization_alias="taskId")


class UpdateParams(TaskParams):
    input_responses: dict[str, Any] = Field(serialization_alias="inputResponses")


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class UpdateTask(Request[UpdateParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    name_param = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


class Acknowledgement(Result):
    result_type: Literal["complete"] = Field(alias="resultType")


class Task(Result):
    result_type: Literal["complete"] = Field(alias="resultType")
    task_id: str = Field(alias="taskId")
    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    created_at: str = Field(alias="createdAt")
    last_updated_at: str = Field(alias="lastUpdatedAt")
    ttl_ms: int | None = Field(alias="ttlMs")
    poll_interval_ms: int = Field(default=1000, alias="pollIntervalMs")
    status_message: str = Field(default="", alias="statusMessage")
    input_requests: dict[str, ElicitRequest] = Field(default={}, alias="inputRequests")
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")


class Tasks:
    """The three task methods over one session."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session

    async def get(self, task_id: str) -> Task:
        return await self.session.send_request(GetTask(params=TaskParams(task_id=task_id)), Task)

    async def update(self, task_id: str, responses: dict[str, Any]) -> None:
        params = UpdateParams(task_id=task_id, input_responses=responses)
        await self.session.send_request(UpdateTask(params=params), Acknowledgement)

    async def cancel(self, task_id: str) -> None:
        request = CancelTask(params=TaskParams(task_id=task_id))
        await self.session.send_request(request, Acknowledgement)

    async def answer(self, task: Task) -> None:
        """Puts the task's questions to the session's own callbacks, as `tools/call` would."""
        responses: dict[str, Any] = {}
        for key, question in task.input_requests.items():
            context = ClientRequestContext(session=self.session, request_id=key)
            reply = await self.session.dispatch_input_request(context, question)
            responses[key] = reply.model_dump(by_alias=True, mode="json", exclude_none=True)
        await self.update(task.task_id, responses)


async def follow(tasks: Tasks, task_id: str) -> dict[str, Any]:
    """Polls a task to its end, answering what it asks."""
    seen: list[str] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            task = await tasks.get(task_id)
            if seen[-1:] != [task.status]:
                seen.append(task.status)
                if task.status == "working":
                    print("watching", file=sys.stderr, flush=True)
            if task.is_over:
                break
            if task.status == "input_required":
                await tasks.answer(task)
            else:
                await asyncio.sleep(task.poll_interval_ms / 1000)
    return {"seen": seen, "status": task.status, "result": task.result, "error": task.error}


async def cancel(tasks: Tasks, task_id: str) -> dict[str, Any]:
    before = await tasks.get(task_id)
    await tasks.cancel(task_id)
    after = await follow(tasks, task_id)
    await tasks.cancel(task_id)
    return {"seen": [before.status, after["status"]], "status": after["status"]}


async def refusals(tasks: Tasks, task_id: str) -> dict[str, Any]:
    """The same refusal is due to every method."""
    attempts: dict[str, Callable[[], Awaitable[Any]]] = {
        "get": lambda: tasks.get(task_id),
        "update": lambda: tasks.update(task_id, {"answer": {"action": "cancel"}}),
        "cancel": lambda: tasks.cancel(task_id),
    }
    answers: dict[str, Any] = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
            answers[name] = "accepted"
        except MCPError as refused:
            answers[name] = {"code": refused.error.code, "message": refused.error.message}
    return answers


async def drive(url: str, token: str, ids: dict[str, str]) -> dict[str, Any]:
    questions: list[str] = []

    async def answer(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        assert isinstance(params, ElicitRequestFormParams)
        questions.append(params.message)
        [(field, schema)] = params.requested_schema["properties"].items()
        return ElicitResult(action="accept", content={field: schema.get("enum", ["yes"])[0]})

    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE_SECONDS) as http,
        Client(
            streamable_http_client(url, http_client=http),
            elicitation_callback=answer,
            extensions=[advertise(EXTENSION)],
        ) as client,
    ):
        tasks = Tasks(client.session)
        summary: dict[str, Any] = {
            "protocol": client.protocol_version,
            "server": client.server_info and client.server_info.model_dump(exclude_none=True),
            "extensions": client.server_capabilities.extensions,
        }
        if task_id := ids.get("completes"):
            summary["completes"] = await follow(tasks, task_id)
        if task_id := ids.get("asks"):
            summary["asks"] = {**await follow(tasks, task_id), "questions": questions}
        if task_id := ids.get("cancels"):
            summary["cancels"] = await cancel(tasks, task_id)
        if task_id := ids.get("fails"):
            summary["fails"] = await follow(tasks, task_id)
        if task_id := ids.get("unknown"):
            summary["unknown"] = await refusals(tasks, task_id)
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
