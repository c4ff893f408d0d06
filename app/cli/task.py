"""`taskbroker task`: what an operator needs at 3 a.m."""

import json
from typing import Annotated, Any
from uuid import UUID

import typer

from app.broker.cancel import end_as_operator
from app.broker.context import Broker
from app.broker.read import page
from app.cli.runtime import AsJson, print_members, print_rows, run
from app.db import backends, tasks
from app.db.tasks import Filter, HistoryEntry
from app.domain.clock import iso
from app.domain.tasks import INTERNAL_ERROR, Status, Task, rpc_error
from app.errors import NotFound
from app.settings import Settings

app = typer.Typer(help="Stored tasks, by their non-secret reference.", no_args_is_help=True)

Ref = Annotated[UUID, typer.Argument(help="The task's reference (not the client's id of it).")]


@app.command("list")
def list_tasks(
    backend: Annotated[str | None, typer.Option(help="Only those of this backend.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only those with this status.")] = None,
    external_id: Annotated[str | None, typer.Option(help="Only the backend's own job.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List tasks that have not expired, newest first.

    Example: `taskbroker task list --status working --backend image-tools`
    """

    async def action(broker: Broker, _: Settings) -> tuple[list[Task], dict[int, str]]:
        async with broker.db.transaction() as connection:
            names = {b.id: b.name for b in await backends.all_of_them(connection)}
        backend_id = next((id_ for id_, name in names.items() if name == backend), None)
        if backend is not None and backend_id is None:
            raise NotFound(f"There is no backend {backend}; `taskbroker backend list` shows them.")
        wanted = Filter(broker.clock(), backend_id, status, external_id, None, limit)
        return (await page(broker, wanted))[0], names

    found, names = run(action)
    rows = [_row(task, names[task.backend_id]) for task in found]
    print_rows(rows, as_json=as_json, nothing="No such tasks.")


@app.command()
def show(task_ref: Ref, as_json: AsJson = False) -> None:
    """Show one task and its history; never its result.

    Example: `taskbroker task show 019362c4-…`
    """

    async def action(broker: Broker, _: Settings) -> tuple[Task, list[HistoryEntry], str]:
        task = await broker.db.read(task_ref)
        if task is None:
            raise NotFound(f"There is no task {task_ref}.")
        async with broker.db.transaction() as connection:
            names = {b.id: b.name for b in await backends.all_of_them(connection)}
            return task, await tasks.history(connection, task_ref), names[task.backend_id]

    task, history, backend = run(action)
    entries = [
        {
            "at": iso(entry.at),
            "what": entry.what,
            "from": entry.from_status,
            "to": entry.to_status,
            "by": entry.by,
        }
        for entry in history
    ]
    if as_json:
        print_members(_details(task, backend) | {"history": entries}, as_json=True)
        return
    print_members(_details(task, backend), as_json=False)
    print()
    print_rows(entries, as_json=False)


@app.command()
def cancel(task_ref: Ref) -> None:
    """End a live task as cancelled, at once and without asking its backend.

    Example: `taskbroker task cancel 019362c4-…`
    """

    async def action(broker: Broker, _: Settings) -> Task:
        return await end_as_operator(broker, task_ref, None)

    run(action)
    print(f"{task_ref} is cancelled.")


@app.command()
def fail(
    task_ref: Ref,
    message: Annotated[
        str, typer.Option(help="What the client is told.")
    ] = "The operator ended this task",
) -> None:
    """End a live task as failed, at once and without asking its backend.

    Example: `taskbroker task fail 019362c4-… --message "Lost with the old cluster"`
    """

    async def action(broker: Broker, _: Settings) -> Task:
        return await end_as_operator(broker, task_ref, rpc_error(INTERNAL_ERROR, message))

    run(action)
    print(f"{task_ref} has failed.")


def _row(task: Task, backend: str) -> dict[str, Any]:
    return {
        "taskRef": str(task.ref),
        "backend": backend,
        "externalId": task.external_id,
        "tool": task.tool,
        "status": str(task.status),
        "cancelRequested": task.cancel_requested_at is not None,
        "createdAt": iso(task.created_at),
        "lastUpdatedAt": iso(task.updated_at),
    }


def _details(task: Task, backend: str) -> dict[str, Any]:
    return _row(task, backend) | {
        "statusMessage": None if task.status_message is None else json.loads(task.status_message),
        "ttlMs": task.ttl_ms,
        "expiresAt": None if task.expires_at is None else iso(task.expires_at),
        "pollIntervalMs": task.poll_interval_ms,
        "stallAfterMs": task.stall_after_ms,
        "questions": len(task.inputs),
        "unansweredQuestions": len(task.outstanding),
    }
