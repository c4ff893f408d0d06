"""What time does to stored tasks: overdue ones are ended, expired ones are purged.

Every pass takes a bounded batch and skips rows that another replica holds, so any number of
sweepers work side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Delete,
    Table,
    TextClause,
    bindparam,
    delete,
    func,
    literal_column,
    select,
    text,
)

from app.db import schema
from app.db.decisions import Change, read_locked, write
from app.db.engine import Driver, storage_errors
from app.db.statements import Statement
from app.domain.tasks import Task

T = schema.tasks
S = schema.signals


def _due(due_at: Column[Any], *conditions: ColumnElement[bool] | TextClause) -> Statement:
    return Statement(
        select(T.c.task_ref)
        .where(due_at <= bindparam("now", type_=schema.Moment), *conditions)
        .order_by(due_at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
    )


_MILLISECOND = text("interval '1 millisecond'")
_since = bindparam("silent_since", type_=schema.Moment)
_now = bindparam("now", type_=schema.Moment)
_grace = bindparam("grace_ms", type_=BigInteger)

EXPIRY_DUE = _due(T.c.expires_at, text(schema.EXPIRING))
CANCEL_DUE = _due(T.c.cancel_due_at, _since + _grace * _MILLISECOND <= _now)
STALL_DUE = _due(T.c.stall_due_at, _since + T.c.stall_after_ms * _MILLISECOND <= _now)


def _delete_batch(table: Table, moment: Column[Any]) -> Statement:
    return Statement(_batch(table, moment).returning(literal_column("1")))


def _batch(
    table: Table, moment: Column[Any], *conditions: ColumnElement[bool] | TextClause
) -> Delete:
    # By row address: whatever the size of the table, no plan but the direct one is possible.
    address: ColumnElement[Any] = literal_column(f"{table.name}.ctid")
    batch = (
        select(address)
        .select_from(table)
        .where(moment <= bindparam("cutoff", type_=schema.Moment), *conditions)
        .order_by(moment)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    return delete(table).where(address == func.any(func.array(batch)))


def _purge() -> Statement:
    """Tasks, and the signals about them that their backends have got."""
    purged = (
        _batch(schema.tasks, T.c.expires_at, text(f"NOT ({schema.EXPIRING})"))
        .returning(T.c.task_ref)
        .cte("purged")
    )
    told = delete(S).where(
        S.c.task_ref.in_(select(purged.c.task_ref)), text("signals.status IN ('delivered', 'seen')")
    )
    return Statement(select(purged.c.task_ref).add_cte(told.cte("told")))


PURGE = _purge()
FORGET_EVENTS = _delete_batch(schema.events_seen, schema.events_seen.c.seen_at)
FORGET_SIGNALS = _delete_batch(schema.signals, schema.signals.c.created_at)


@dataclass(frozen=True, slots=True)
class Ended:
    """A batch of tasks that was taken, and the changes that were made."""

    taken: int
    changes: list[Change]


async def end_overdue(
    connection: Driver,
    due: Statement,
    move: Callable[[Task, datetime], Change | None],
    now: datetime,
    limit: int,
    **more: Any,
) -> Ended:
    """Makes the move that is due for a batch of tasks."""
    with storage_errors():
        async with connection.transaction():
            rows = await due.fetch(connection, now=now, limit=limit, **more)
            stored = await read_locked(connection, {row[0]: None for row in rows})
            tasks = [one.task for one in stored.values() if one.task is not None]
            changes = [change for task in tasks if (change := move(task, now)) is not None]
            if changes:
                await write(connection, changes)
    return Ended(len(rows), changes)


async def purge(connection: Driver, cutoff: datetime, limit: int) -> int:
    """Deletes a batch of tasks, with all that belongs to them, that expired before `cutoff`.

    Not before their backends can learn of it.
    """
    return len(await PURGE.fetch(connection, cutoff=cutoff, limit=limit))


async def forget_events(connection: Driver, cutoff: datetime, limit: int) -> int:
    """Forgets a batch of webhook-ids that were applied before `cutoff`."""
    return len(await FORGET_EVENTS.fetch(connection, cutoff=cutoff, limit=limit))


async def forget_signals(connection: Driver, cutoff: datetime, limit: int) -> int:
    """Forgets a batch of signals that were caused before `cutoff`, whatever became of them."""
    return len(await FORGET_SIGNALS.fetch(connection, cutoff=cutoff, limit=limit))
