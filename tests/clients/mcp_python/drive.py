"""Drives the official Python SDK, `mcp`. `../drivers.py` describes the ticket and the summary.

The SDK knows no tasks; it has hooks for extensions. `Tasks` is what an application writes with
them: session, transport, headers, the claim of a result, the notifications and the questions to
the user are the SDK's. Its `Client.listen()` has no place for the ids of tasks, so the request of
a subscription is sent as any other.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2
from mcp import Client, ClientSession, MCPError
from mcp.client import ClaimContext, ClientExtension, NotificationBinding, ResultClaim
from mcp.client.session import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    NotificationParams,
    Request,
    RequestParams,
    Result,
    SubscriptionFilter,
    SubscriptionsAcknowledgedNotification,
    SubscriptionsListenRequest,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
)
from pydantic import Field

Json = dict[str, Any]
Status = Literal["working", "input_required", "completed", "failed", "cancelled"]


class TaskParams(RequestParams):
    task_id: str = Field(serialization_alias="taskId")


class UpdateParams(TaskParams):
    input_responses: Json = Field(serialization_alias="inputResponses")


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


class TaskFields(Result):
    task_id: str = Field(alias="taskId")
    status: Status
    created_at: str = Field(alias="createdAt")
    last_updated_at: str = Field(alias="lastUpdatedAt")
    ttl_ms: int | None = Field(alias="ttlMs")
    poll_interval_ms: int = Field(default=1000, alias="pollIntervalMs")
    status_message: str = Field(default="", alias="statusMessage")


class CreatedTask(TaskFields):
    result_type: Literal["task"] = Field(alias="resultType")


class Task(TaskFields):
    result_type: Literal["complete"] = Field(alias="resultType")
    input_requests: dict[str, ElicitRequest] = Field(default={}, alias="inputRequests")
    result: CallToolResult | None = None
    error: Json | None = None


class TaskNotification(NotificationParams):
    task_id: str = Field(alias="taskId")
    status: Status
    input_requests: dict[str, ElicitRequest] = Field(default={}, alias="inputRequests")
    result: CallToolResult | None = None
    error: Json | None = None


class Tasks(ClientExtension):
    """Waits for the task that a call has become, so that `call_tool` gives its result; and hears
    what is told of tasks.
    """

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self.acknowledged: dict[str, Any] = {}
        self.told: asyncio.Queue[TaskNotification | None] = asyncio.Queue()

    def notifications(self) -> Sequence[NotificationBinding[Any]]:
        method = "notifications/tasks"
        binding = NotificationBinding(
            method=method, params_type=TaskNotification, handler=self.told.put
        )
        return [binding]

    async def hear(self, message: object) -> None:
        """Messages for which there is no binding."""
        if isinstance(message, SubscriptionsAcknowledgedNotification):
            self.acknowledged = message.params.notifications.model_extra or {}

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self._resolve)]

    async def _resolve(self, created: CreatedTask, context: ClaimContext) -> CallToolResult:
        end = await settled(context.session, created.task_id)
        if end.error is not None:
            raise MCPError(end.error["code"], end.error["message"], end.error.get("data"))
        assert end.result, f"the task is {end.status}"
        return end.result


async def get(session: ClientSession, task_id: str) -> Task:
    return await session.send_request(GetTask(params=TaskParams(task_id=task_id)), Task)


async def update(session: ClientSession, task_id: str, responses: Json) -> None:
    params = UpdateParams(task_id=task_id, input_responses=responses)
    await session.send_request(UpdateTask(params=params), Acknowledgement)


async def cancel(session: ClientSession, task_id: str) -> None:
    request = CancelTask(params=TaskParams(task_id=task_id))
    await session.send_request(request, Acknowledgement)


async def answer(session: ClientSession, task: Task | TaskNotification) -> None:
    """Puts the task's questions to the client's own callbacks."""
    responses: Json = {}
    for key, question in task.input_requests.items():
        context = ClientRequestContext(session=session, request_id=key)
        reply = await session.dispatch_input_request(context, question)
        responses[key] = reply.model_dump(by_alias=True, mode="json", exclude_none=True)
    await update(session, task.task_id, responses)


async def settled(session: ClientSession, task_id: str) -> Task:
    while (task := await get(session, task_id)).status in ("working", "input_required"):
        if task.status == "input_required":
            await answer(session, task)
        else:
            await asyncio.sleep(task.poll_interval_ms / 1000)
    return task


async def subscribe(session: ClientSession, task_id: str) -> None:
    """Returns when the stream ends."""
    wanted = SubscriptionFilter.model_validate({"taskIds": [task_id]})
    params = SubscriptionsListenRequestParams(notifications=wanted)
    request = SubscriptionsListenRequest(params=params)
    await session.send_request(request, SubscriptionsListenResult)


class Driver:
    def __init__(self, client: Client, tasks: Tasks) -> None:
        self._client = client
        self._tasks = tasks

    async def call(self, tool: str, arguments: Json) -> Json:
        return said(await self._client.call_tool(tool, arguments))

    async def follow(self, tool: str, arguments: Json) -> Json:
        return await self.resume(await self._start(tool, arguments))

    async def cancel(self, tool: str, arguments: Json) -> Json:
        return await self.withdraw(await self._start(tool, arguments))

    async def leave(self, tool: str, arguments: Json, file: str) -> Json:
        task = await self._start(tool, arguments)
        await asyncio.to_thread(Path(file).write_text, task)
        return {}

    async def resume(self, task: str) -> Json:
        end = await settled(self._client.session, task)
        if end.result is not None:
            return {"status": end.status, **said(end.result)}
        return {"status": end.status, "error": end.error}

    async def withdraw(self, task: str) -> Json:
        await cancel(self._client.session, task)
        outcome = await self.resume(task)
        await cancel(self._client.session, task)
        return outcome

    async def probe(self, task: str) -> Json:
        session = self._client.session
        return {
            "get": await code_of(lambda: get(session, task)),
            "update": await code_of(lambda: update(session, task, {})),
            "cancel": await code_of(lambda: cancel(session, task)),
        }

    async def listen(self, task: str, file: str) -> Json:
        session, told = self._client.session, self._tasks.told
        last: TaskNotification | None = None

        async def hear() -> None:
            nonlocal last
            while (news := await told.get()) is not None:
                last = news
                await asyncio.to_thread(note, file, news.status)
                if news.status == "input_required":
                    await answer(session, news)

        async with asyncio.TaskGroup() as group:
            group.create_task(hear())
            refused = await code_of(lambda: subscribe(session, task))
            # The SDK hands notifications on beside the answer that comes after them.
            await anyio.wait_all_tasks_blocked()
            await told.put(None)
        heard = {
            "acknowledged": self._tasks.acknowledged.get("taskIds") == [task],
            "end": "graceful" if refused is None else refused,
        }
        if last is None:
            return heard
        end = said(last.result) if last.result else {}
        return {**heard, "status": last.status, "error": last.error, **end}

    async def _start(self, tool: str, arguments: Json) -> str:
        """The id of the task that the call becomes."""
        created = await self._client.session.call_tool(tool, arguments, allow_claimed=True)
        assert isinstance(created, CreatedTask), f"{tool} did not become a task"
        return created.task_id


def note(file: str, status: str) -> None:
    with Path(file).open("a") as notes:
        notes.write(f"{status}\n")


def said(result: CallToolResult) -> Json:
    text = "".join(block.text for block in result.content if block.type == "text")
    return {"text": text, "isError": bool(result.is_error)}


async def code_of(attempt: Callable[[], Awaitable[Any]]) -> int | None:
    try:
        await attempt()
    except MCPError as refused:
        return refused.error.code
    return None


async def drive(url: str, token: str | None, acts: dict[str, Json]) -> dict[str, Json]:
    asked: list[str] = []

    async def reply(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        assert isinstance(params, ElicitRequestFormParams)
        asked.append(params.message)
        fields = params.requested_schema["properties"]
        content = {name: field["type"] == "boolean" or "Ada" for name, field in fields.items()}
        return ElicitResult(action="accept", content=content)

    tasks = Tasks()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    outcomes: dict[str, Json] = {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(
            streamable_http_client(url, http_client=http),
            elicitation_callback=reply,
            message_handler=tasks.hear,
            extensions=[tasks],
        ) as client,
    ):
        driver = Driver(client, tasks)
        for name, act in acts.items():
            asked.clear()
            outcome = await getattr(driver, act.pop("verb"))(**act)
            outcomes[name] = {**outcome, "asked": list(asked)}
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(**json.load(sys.stdin)))))
