"""What backends get to see: a task without its id, which is the client's alone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from app.broker.create import Created
from app.broker.report import Reported
from app.db.signals import Outstanding
from app.domain.clock import iso
from app.domain.events import Verdict
from app.domain.tasks import JsonText, Status, Task
from app.views import legacy, modern


def created(made: Created) -> bytes:
    """The answer to a create: what to return from `tools/call`, for each era."""
    return _object({
        "taskRef": f'"{made.task.ref}"',
        "createTaskResult": modern.create_task_result(made.task, made.task_id),
        "createTaskResultLegacy": legacy.create_task_result(made.task, made.task_id),
    }).encode()  # fmt: skip


def reported(outcome: Reported) -> bytes:
    """The answer to an event, with all that the backend must learn about the task."""
    verdict = outcome.verdict
    members = (
        {"applied": "true"}
        if verdict is Verdict.APPLIED
        else {"applied": "false", "reason": f'"{verdict}"'}
    )
    members["task"] = _object(_state(outcome.task))
    return _object(members | _signals(outcome.task)).encode()


def task(task: Task) -> bytes:
    """One task whole, with its payload."""
    return _whole(task).encode()


def page(tasks: Iterable[Task], next_cursor: str | None) -> bytes:
    """One page of tasks, without what may be large."""
    summaries = [_object(_state(task) | _signals(task)) for task in tasks]
    members = {"tasks": f"[{','.join(summaries)}]"}
    if next_cursor is not None:
        members["nextCursor"] = json.dumps(next_cursor)
    return _object(members).encode()


def news(signals: Sequence[Outstanding]) -> bytes:
    """Signals as their deliveries would carry them, and the cursor that acknowledges them."""
    texts = [f'{{"webhookId":"{one.webhook_id}",{one.body[1:]}' for one in signals]
    cursor = signal_cursor([one.id for one in signals])
    return _object({"signals": f"[{','.join(texts)}]", "cursor": f'"{cursor}"'}).encode()


def signal_cursor(ids: Sequence[int]) -> str:
    """Names exactly these signals, in ascending order: the first one, then the distances.

    A mere "up to here" would take along what was committed late, and never handed out.
    """
    return ".".join(str(id_ - before) for before, id_ in pairwise((0, *ids))) or "0"


def _whole(task: Task) -> JsonText:
    members = _state(task)
    if task.result is not None:
        members["result"] = task.result
    if task.error is not None:
        members["error"] = task.error
    if task.status is Status.INPUT_REQUIRED:
        members["inputRequests"] = _map({q.key: q.request for q in task.outstanding})
    return _object(members | _signals(task))


def _state(task: Task) -> dict[str, JsonText]:
    members = {"taskRef": f'"{task.ref}"'}
    if task.external_id is not None:
        members["externalId"] = json.dumps(task.external_id)
    if task.tool is not None:
        members["tool"] = json.dumps(task.tool)
    members["status"] = f'"{task.status}"'
    if task.status_message is not None:
        members["statusMessage"] = task.status_message
    members["createdAt"] = f'"{iso(task.created_at)}"'
    members["lastUpdatedAt"] = f'"{iso(task.updated_at)}"'
    members["ttlMs"] = "null" if task.ttl_ms is None else str(task.ttl_ms)
    if task.poll_interval_ms is not None:
        members["pollIntervalMs"] = str(task.poll_interval_ms)
    if task.stall_after_ms is not None:
        members["stallAfterMs"] = str(task.stall_after_ms)
    return members


def _signals(task: Task) -> dict[str, JsonText]:
    return {
        "cancelRequested": "false" if task.cancel_requested_at is None else "true",
        "inputResponses": _map(task.responses),
    }


def _object(members: Mapping[str, JsonText]) -> JsonText:
    """An object whose member names are ours."""
    return "{" + ",".join([f'"{name}":{text}' for name, text in members.items()]) + "}"


def _map(entries: Mapping[str, JsonText]) -> JsonText:
    """An object whose member names are the backend's."""
    return "{" + ",".join([f"{json.dumps(key)}:{text}" for key, text in entries.items()]) + "}"
