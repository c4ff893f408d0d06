"""Stored tasks: read, created, listed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Select,
    Text,
    Uuid,
    bindparam,
    case,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects.postgresql import array, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import schema
from app.db.engine import Driver
from app.db.statements import Statement, arrays_of, columns_of, rows_of
from app.domain.tasks import InputRequest, Status, Task

T = schema.tasks
Q = schema.input_requests


def _inputs() -> ColumnElement[Any]:
    columns: list[ColumnElement[Any]] = [
        Q.c.key,
        Q.c.request,
        Q.c.response,
        cast(Q.c.superseded, Text),
    ]
    rows = (
        select(array[Any](columns, type_=Text))
        .where(Q.c.task_ref == T.c.task_ref)
        .order_by(Q.c.position)
        .scalar_subquery()
    )
    return case((T.c.asked, func.array(rows, type_=ARRAY(Text))), else_=null())


TASK = (*T.c, _inputs().label("inputs"))
"""What is selected for a Task: its columns in the order of its fields, then its questions."""

_LISTED = (
    *(null().label(c.name) if c.name in ("result", "error") else c for c in T.c),
    TASK[-1],
)
"""The same without the results and errors, which may be large: a list does not show them."""

_STATUS = list(T.c.keys()).index("status")


def to_task(row: Sequence[Any]) -> Task:
    """A row of TASK as the domain's task."""
    values: list[Any]
    *values, asked = row
    values[_STATUS] = Status(values[_STATUS])
    values.append(
        tuple(
            InputRequest(key, request, response, superseded == "true")
            for key, request, response, superseded in asked or ()
        )
    )
    return Task(*values)


# --- reading ----------------------------------------------------------------------------------

READ_ONE = Statement(select(*TASK).where(T.c.task_ref == bindparam("ref", type_=Uuid)))
READ_MANY = Statement(
    select(*TASK).where(T.c.task_ref == func.any(bindparam("refs", type_=ARRAY(Uuid))))
)


async def read(connection: Driver, refs: Sequence[UUID]) -> list[Task | None]:
    """The tasks with these references, in their order; `None` where there is none."""
    if len(refs) == 1:
        row = await READ_ONE.fetch_one(connection, ref=refs[0])
        return [None if row is None else to_task(row)]
    rows = await READ_MANY.fetch(connection, refs=list(set(refs)))
    found = {row[0]: to_task(row) for row in rows}
    return [found.get(ref) for ref in refs]


# --- creating ---------------------------------------------------------------------------------

_HISTORY = columns_of(schema.task_history, "task_ref", "at", "what", "to_status", "by")
_INPUTS = columns_of(Q, "task_ref", "key", "position", "request")


def _create() -> Statement:
    task, event, question = (
        rows_of("new", [*T.c]),
        rows_of("event", _HISTORY),
        rows_of("q", _INPUTS),
    )
    created = (
        insert(T)
        .from_select([*T.c.keys()], select(*task.c))
        .on_conflict_do_nothing(
            index_elements=[T.c.backend_id, T.c.external_id],
            index_where=T.c.external_id.is_not(None),
        )
        .returning(T.c.task_ref)
        .cte("created")
    )
    recorded = insert(schema.task_history).from_select(
        [c.name for c in _HISTORY],
        select(*event.c).join_from(event, created, event.c.task_ref == created.c.task_ref),
    )
    asked = insert(Q).from_select(
        [c.name for c in _INPUTS],
        select(*question.c).join_from(question, created, question.c.task_ref == created.c.task_ref),
    )
    return Statement(
        select(created.c.task_ref).add_cte(recorded.cte("recorded"), asked.cte("asked"))
    )


CREATE = _create()
_row = attrgetter(*(field.name for field in fields(Task) if field.name != "inputs"))


async def create(connection: Driver, tasks: Sequence[Task]) -> list[bool]:
    """Stores new tasks. False for one whose `external_id` its backend has used before."""
    rows = await CREATE.fetch(
        connection,
        **arrays_of("new", [*T.c], [_row(task) for task in tasks]),
        **arrays_of(
            "event",
            _HISTORY,
            [(task.ref, task.created_at, "created", task.status, "backend") for task in tasks],
        ),
        **arrays_of(
            "q",
            _INPUTS,
            [
                (task.ref, question.key, position, question.request)
                for task in tasks
                for position, question in enumerate(task.inputs)
            ],
        ),
    )
    created = {row[0] for row in rows}
    return [task.ref in created for task in tasks]


# --- looking up -------------------------------------------------------------------------------


async def ref_of(connection: AsyncConnection, backend_id: int, external_id: str) -> UUID | None:
    """The reference of a backend's task by the backend's own name for it."""
    found: UUID | None = await connection.scalar(
        select(T.c.task_ref).where(T.c.backend_id == backend_id, T.c.external_id == external_id)
    )
    return found


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tasks to list: of a backend, of an owner; newest first, not yet expired at `now`."""

    now: datetime
    backend_id: int | None = None
    status: Status | None = None
    external_id: str | None = None
    before: UUID | None = None
    limit: int = 50
    owner: Sequence[bytes] | None = None
    """The owner's fingerprint under each key of the ring."""


def listing(wanted: Filter) -> Select[Any]:
    """The statement behind `page`."""
    listed = select(*_LISTED).order_by(T.c.task_ref.desc()).limit(wanted.limit)
    if wanted.owner is None:
        return _matching(listed, wanted)
    # One ordered scan of the index for each fingerprint: a list of them would have all rows read.
    refs = select(T.c.task_ref).order_by(T.c.task_ref.desc()).limit(wanted.limit)
    each = [_matching(refs.where(T.c.owner == owner), wanted) for owner in wanted.owner]
    return listed.where(T.c.task_ref.in_(union_all(*(one.subquery().select() for one in each))))


def _matching(statement: Select[Any], wanted: Filter) -> Select[Any]:
    statement = statement.where(or_(T.c.expires_at.is_(None), T.c.expires_at > wanted.now))
    if wanted.backend_id is not None:
        statement = statement.where(T.c.backend_id == wanted.backend_id)
    if wanted.status is not None:
        # Written out, so that the planner sees when the partial index of live tasks will do.
        statement = statement.where(T.c.status == literal(wanted.status, literal_execute=True))
    if wanted.external_id is not None:
        statement = statement.where(T.c.external_id == wanted.external_id)
    if wanted.before is not None:
        statement = statement.where(T.c.task_ref < wanted.before)
    return statement


async def page(connection: AsyncConnection, wanted: Filter) -> list[Task]:
    """One page of tasks without results and errors, newest first.

    The next page starts before the last reference of this one.
    """
    return [to_task(row) for row in await connection.execute(listing(wanted))]


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    at: datetime
    what: str
    from_status: str | None
    to_status: str
    by: str


async def history(connection: AsyncConnection, ref: UUID) -> list[HistoryEntry]:
    """What happened to a task, in order."""
    h = schema.task_history.c
    rows = await connection.execute(
        select(h.at, h.what, h.from_status, h.to_status, h.by)
        .where(h.task_ref == ref)
        .order_by(h.id)
    )
    return [HistoryEntry(*row) for row in rows]
