"""What backends get to see: a task without its id, which is the client's alone."""

import json
from collections.abc import Iterable, Mapping

from app.broker.create import Created
from app.broker.report import Reported
from app.domain.clock import iso
from app.domain.events import Verdict
from app.domain.tasks import JsonText, Status, Task
from app.views import legacy, modern


def created(made: Created) -> bytes:
    """The answer to a create: what to return from `tools/call`, for each era."""
    return _object({
        "taskRef": json.dumps(str(made.task.ref)),
        "createTaskResult": modern.create_task_result(made.task, made.task_id),
        "createTaskResultLegacy": legacy.create_task_result(made.task, made.task_id),
    }).encode()  # fmt: skip


def reported(outcome: Reported) -> bytes:
    """The answer to an event, with all that the backend must learn about the task."""
    applied = outcome.verdict is Verdict.APPLIED
    members = {"applied": json.dumps(applied)}
    if not applied:
        members["reason"] = json.dumps(outcome.verdict)
    members["task"] = _object(_state(outcome.task))
    return _object(members | _signals(outcome.task)).encode()


def task(task: Task) -> bytes:
    """One task whole, with its payload."""
    return _whole(task).encode()


def page(tasks: Iterable[Task], next_cursor: str | None) -> bytes:
    members = {"tasks": f"[{','.join(map(_whole, tasks))}]"}
    if next_cursor is not None:
        members["nextCursor"] = json.dumps(next_cursor)
    return _object(members).encode()


def _whole(task: Task) -> JsonText:
    members = _state(task)
    if task.result is not None:
        members["result"] = task.result
    if task.error is not None:
        members["error"] = task.error
    if task.status is Status.INPUT_REQUIRED:
        members["inputRequests"] = _object({q.key: q.request for q in task.outstanding})
    return _object(members | _signals(task))


def _state(task: Task) -> dict[str, JsonText]:
    members: dict[str, JsonText | None] = {
        "taskRef": json.dumps(str(task.ref)),
        "externalId": None if task.external_id is None else json.dumps(task.external_id),
        "tool": None if task.tool is None else json.dumps(task.tool),
        "status": json.dumps(task.status),
        "statusMessage": task.status_message,
        "createdAt": json.dumps(iso(task.created_at)),
        "lastUpdatedAt": json.dumps(iso(task.updated_at)),
        "ttlMs": json.dumps(task.ttl_ms),
        "pollIntervalMs": None if task.poll_interval_ms is None else str(task.poll_interval_ms),
        "stallAfterMs": None if task.stall_after_ms is None else str(task.stall_after_ms),
    }
    return {name: text for name, text in members.items() if text is not None}


def _signals(task: Task) -> dict[str, JsonText]:
    return {
        "cancelRequested": json.dumps(task.cancel_requested_at is not None),
        "inputResponses": _object(task.responses),
    }


def _object(members: Mapping[str, JsonText]) -> JsonText:
    return f"{{{','.join(f'{json.dumps(name)}:{text}' for name, text in members.items())}}}"
