"""A task as MCP 2026-07-28 and the Tasks extension (SEP-2663) show it.

What the backend wrote is spliced in as the text that it sent; it is never parsed here.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from app import __version__
from app.domain.clock import iso
from app.domain.tasks import InputRequest, JsonText, Status, Task

VERSION = "2026-07-28"
EXTENSION = "io.modelcontextprotocol/tasks"
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"

_META = json.dumps(
    {"io.modelcontextprotocol/serverInfo": {"name": "task-broker", "version": __version__}},
    separators=(",", ":"),
)

ACKNOWLEDGED = f'{{"resultType":"complete","_meta":{_META}}}'
"""The empty result that acknowledges `tasks/update` and `tasks/cancel`."""


def discovery(versions: Sequence[str]) -> JsonText:
    """The result of `server/discover` where these versions are spoken."""
    return (
        f'{{"resultType":"complete","supportedVersions":{json.dumps(versions)},'
        f'"capabilities":{{"extensions":{{"{EXTENSION}":{{}}}}}},'
        '"instructions":"Poll a task with tasks/get, answer its questions with tasks/update, '
        "end it with tasks/cancel. The id of a task works only with the credential that "
        'created it.",'
        f'"ttlMs":3600000,"cacheScope":"public","_meta":{_META}}}'
    )


def create_task_result(task: Task, task_id: str) -> JsonText:
    """What a tool server returns from `tools/call`: the bare task, flat."""
    return f'{{"resultType":"task",{_members(task, task_id)}}}'


def get_task_result(task: Task, task_id: str) -> JsonText:
    """The result of `tasks/get`: the task with what its status brings along."""
    return f'{{"resultType":"complete",{_members(task, task_id)}{_payload(task)},"_meta":{_META}}}'


def task_notification(task: Task, task_id: str, subscription: JsonText) -> JsonText:
    """The params of `notifications/tasks`: what `tasks/get` would say now."""
    return f"{{{_members(task, task_id)}{_payload(task)},{_subscribed(subscription)}}}"


def expiry_notification(
    task: Task, task_id: str, subscription: JsonText, error: JsonText
) -> JsonText:
    """The same for a task whose time has run out: failed, as a server may say of it ("Task
    Polling"), with the error that `tasks/get` answers now.
    """
    ended = replace(
        task, status=Status.FAILED, status_message=None, error=error,
        updated_at=task.expires_at or task.updated_at,
    )  # fmt: skip
    return task_notification(ended, task_id, subscription)


def acknowledgement(ids: Sequence[str] | None, subscription: JsonText) -> JsonText:
    """The params of `notifications/subscriptions/acknowledged`; `None`: no tasks were named."""
    honoured = {} if ids is None else {"taskIds": ids}
    return f'{{"notifications":{json.dumps(honoured)},{_subscribed(subscription)}}}'


def end_of_subscription(subscription: JsonText) -> JsonText:
    """The result of `subscriptions/listen`, which ends it."""
    return f'{{"resultType":"complete",{_subscribed(subscription)}}}'


def _subscribed(subscription: JsonText) -> str:
    return f'"_meta":{{"{SUBSCRIPTION_ID}":{subscription}}}'


def _members(task: Task, task_id: str) -> str:
    message = "" if task.status_message is None else f',"statusMessage":{task.status_message}'
    interval = "" if task.poll_interval_ms is None else f',"pollIntervalMs":{task.poll_interval_ms}'
    ttl = "null" if task.ttl_ms is None else task.ttl_ms
    return (
        f'"taskId":"{task_id}","status":"{task.status}"{message},'
        f'"createdAt":"{iso(task.created_at)}","lastUpdatedAt":"{iso(task.updated_at)}",'
        f'"ttlMs":{ttl}{interval}'
    )


def _payload(task: Task) -> str:
    if task.result is not None:
        return f',"result":{_typed(task.result, task.result_typed)}'
    if task.error is not None:
        return f',"error":{task.error}'
    if task.status is Status.INPUT_REQUIRED:
        return f',"inputRequests":{{{",".join(map(_request, task.outstanding))}}}'
    return ""


def _request(question: InputRequest) -> str:
    return f"{json.dumps(question.key)}:{question.request}"


def _typed(result: JsonText, typed: bool) -> JsonText:
    """The result with the `resultType` that this era wants inside; nothing else is touched."""
    if typed:
        return result
    members = result[1:]
    comma = "" if members.lstrip(" \t\n\r").startswith("}") else ","
    return f'{{"resultType":"complete"{comma}{members}'
