"""What time does to stored tasks: overdue ones are ended, expired ones are purged.

Every pass takes a bounded batch and skips rows that another replica holds, so any number of
sweepers work side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Column, ColumnElement, Table, bindparam, delete, func, literal_column, select

from app.db import schema
from app.db.decisions import Change, read_locked, write
from app.db.engine import Driver, storage_errors
from app.db.statements import Statement
from app.domain.tasks import Task

T = schema.tasks


def _due(due_at: Column[Any]) -> Statement:
    return Statement(
        select(T.c.task_ref)
        .where(due_at <= bindparam("now", type_=schema.Moment))
        .order_by(due_at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
    )


CANCEL_DUE = _due(T.c.cancel_due_at)
STALL_DUE = _due(T.c.stall_due_at)


def _delete_batch(table: Table, moment: Column[Any]) -> Statement:
    # By row address: whatever the size of the table, no plan but the direct one is possible.
    address: ColumnElement[Any] = literal_column(f"{table.name}.ctid")
    batch = (
        select(address)
        .select_from(table)
        .where(moment <= bindparam("cutoff", type_=schema.Moment))
        .order_by(moment)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    doomed = address == func.any(func.array(batch))
    return Statement(delete(table).where(doomed).returning(literal_column("1")))


PURGE = _delete_batch(schema.tasks, T.c.expires_at)
FORGET = _delete_batch(schema.events_seen, schema.events_seen.c.seen_at)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A kind of overdue task: how a batch is found and locked, and the move that ends one."""

    batch: Statement
    move: Callable[[Task, datetime], Task]
    what: str


async def end_overdue(
    connection: Driver, overdue: Overdue, now: datetime, limit: int
) -> list[UUID]:
    """Makes the move for a batch of overdue tasks; which ones were taken."""
    with storage_errors():
        async with connection.transaction():
            rows = await overdue.batch.fetch(connection, now=now, limit=limit)
            stored = await read_locked(connection, {row[0]: None for row in rows})
            changes = [
                Change(before=task, after=moved, what=overdue.what, by="sweeper", at=now)
                for task, _ in stored.values()
                if (moved := overdue.move(task, now)) is not task
            ]
            if changes:
                await write(connection, changes)
    return [row[0] for row in rows]


async def purge(connection: Driver, cutoff: datetime, limit: int) -> int:
    """Deletes a batch of tasks, with all that belongs to them, that expired before `cutoff`."""
    return len(await PURGE.fetch(connection, cutoff=cutoff, limit=limit))


async def forget_events(connection: Driver, cutoff: datetime, limit: int) -> int:
    """Forgets a batch of webhook-ids that were applied before `cutoff`."""
    return len(await FORGET.fetch(connection, cutoff=cutoff, limit=limit))
