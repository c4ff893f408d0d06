"""A task as MCP 2025-11-25 shows it."""

from app.domain.clock import iso
from app.domain.tasks import JsonText, Status, Task


def create_task_result(task: Task, task_id: str) -> JsonText:
    """What a tool server returns from a `tools/call` with `task`: the task, nested."""
    return f'{{"task":{_task(task, task_id)}}}'


def _task(task: Task, task_id: str) -> JsonText:
    message = "" if task.status_message is None else f',"statusMessage":{task.status_message}'
    interval = "" if task.poll_interval_ms is None else f',"pollInterval":{task.poll_interval_ms}'
    ttl = "null" if task.ttl_ms is None else task.ttl_ms
    return (
        f'{{"taskId":"{task_id}","status":"{_status(task)}"{message},'
        f'"createdAt":"{iso(task.created_at)}","lastUpdatedAt":"{iso(task.updated_at)}",'
        f'"ttl":{ttl}{interval}}}'
    )


def _status(task: Task) -> Status:
    # In this era a tool that ran and reports failure is a failed task.
    return Status.FAILED if task.result_is_error else task.status
