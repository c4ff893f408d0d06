"""Changing stored tasks: lock, read, decide, write, in one short transaction for a whole group.

A decision is made by the rules of `domain/` on the state that it is written over, because the
row is locked first; the UPDATE restates that only a live task may change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Generic, TypeVar
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    Text,
    Uuid,
    bindparam,
    column,
    exists,
    func,
    insert,
    select,
    text,
    update,
)

from app.db import schema
from app.db.engine import Driver, UniqueViolation, storage_errors
from app.db.statements import Statement, arrays_of, columns_of, rows_of
from app.db.tasks import TASK, to_task
from app.domain.signals import Signal
from app.domain.tasks import Task
from app.errors import BrokerError

T = schema.tasks
Q = schema.input_requests
SEEN = schema.events_seen
SIGNALS = schema.signals
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Change:
    """One decided change of a stored task, and what is remembered of it."""

    before: Task
    after: Task
    what: str
    by: str
    at: datetime
    webhook_id: str | None = None
    signal: Signal | None = None
    """What its backend must learn of it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a decision is made on, locked until it is written."""

    task: Task | None = None
    seen: bool = False
    """Whether the webhook-id was applied before."""
    newest_signal: int | None = None
    """The newest signal about the task that its backend may not have got yet."""


Decision = Callable[[Stored], tuple[Answer, Change | None]]
"""Gives the caller's answer and the change to write. Raises a BrokerError to refuse."""


@dataclass(frozen=True, slots=True)
class Decide(Generic[Answer]):
    """A call for one task to be decided upon."""

    ref: UUID
    decision: Decision[Answer]
    webhook_id: str | None = None


LOCK = Statement(
    select(T.c.task_ref)
    .where(T.c.task_ref == func.any(bindparam("refs", type_=ARRAY(Uuid))))
    .order_by(T.c.task_ref)
    .with_for_update()
)

_wanted = (
    func.unnest(bindparam("refs", type_=ARRAY(Uuid)), bindparam("webhook_ids", type_=ARRAY(Text)))
    .table_valued(column("ref", Uuid), column("webhook_id", Text))
    .render_derived(name="wanted")
)
_seen = exists().where(
    SEEN.c.backend_id == T.c.backend_id, SEEN.c.webhook_id == _wanted.c.webhook_id
)
_newest_signal = (
    select(func.max(SIGNALS.c.id))
    .where(SIGNALS.c.task_ref == T.c.task_ref, text(f"signals.{schema.PENDING}"))
    .scalar_subquery()
)
READ = Statement(
    select(*TASK, _seen.label("seen"), _newest_signal.label("newest_signal")).join_from(
        _wanted, T, T.c.task_ref == _wanted.c.ref
    )
)

_MUTABLE = columns_of(
    T,
    "status",
    "status_message",
    "result",
    "result_typed",
    "result_is_error",
    "error",
    "updated_at",
    "ttl_ms",
    "expires_at",
    "poll_interval_ms",
    "reported_at",
    "cancel_requested_at",
    "cancel_due_at",
    "stall_after_ms",
    "stall_due_at",
    "expired_at",
    "asked",
)
_NEW = [T.c.task_ref, *_MUTABLE]
_HISTORY = columns_of(
    schema.task_history, "task_ref", "at", "what", "from_status", "to_status", "by"
)
_ASKED = columns_of(Q, "task_ref", "key", "position", "request")
_CLOSED = columns_of(Q, "task_ref", "key", "response", "superseded")
_SEEN = [*SEEN.c]
_SIGNAL = columns_of(SIGNALS, "backend_id", "task_ref", "type", "body", "created_at", "due_at")


def _write() -> Statement:
    new, closed = rows_of("new", _NEW), rows_of("closed", _CLOSED)
    written = (
        update(T)
        .values({c.name: new.c[c.name] for c in _MUTABLE})
        .where(T.c.task_ref == new.c.task_ref, text(f"tasks.{schema.LIVE}"))
        .returning(T.c.task_ref)
        .cte("written")
    )
    answered = (
        update(Q)
        .values(response=closed.c.response, superseded=closed.c.superseded)
        .where(Q.c.task_ref == closed.c.task_ref, Q.c.key == closed.c.key)
    )
    inserts = [
        insert(table).from_select([c.name for c in columns], select(*rows_of(name, columns).c))
        for name, table, columns in (
            ("history", schema.task_history, _HISTORY),
            ("asked", Q, _ASKED),
            ("seen", SEEN, _SEEN),
            ("signal", SIGNALS, _SIGNAL),
        )
    ]
    return Statement(
        select(func.count())
        .select_from(written)
        .add_cte(answered.cte("answer"), *(one.cte(f"insert_{i}") for i, one in enumerate(inserts)))
    )


WRITE = _write()
_new_row = attrgetter("ref", *(c.name for c in _MUTABLE))


async def decide(
    connection: Driver, calls: Sequence[Decide[Any]]
) -> tuple[list[Any | BrokerError], list[Change]]:
    """Decides each call and commits what changes; a refusal is the answer of its own call only."""
    try:
        return await _decide(connection, calls)
    except UniqueViolation:
        if len(calls) > 1:
            raise
        # The same webhook-id was committed meanwhile, for another task: now it will be seen.
        return await _decide(connection, calls)


async def _decide(
    connection: Driver, calls: Sequence[Decide[Any]]
) -> tuple[list[Any | BrokerError], list[Change]]:
    with storage_errors():
        async with connection.transaction():
            await LOCK.fetch(connection, refs=sorted(call.ref for call in calls))
            stored = await read_locked(connection, {c.ref: c.webhook_id for c in calls})
            answers: list[Any | BrokerError] = []
            changes: list[Change] = []
            for call in calls:
                answer, change = _decide_one(call, stored.get(call.ref, Stored()))
                answers.append(answer)
                changes += [] if change is None else [change]
            if changes:
                await write(connection, changes)
    return answers, changes


def _decide_one(call: Decide[Any], stored: Stored) -> tuple[Any, Change | None]:
    try:
        return call.decision(stored)
    except BrokerError as refusal:
        return refusal, None


async def read_locked(connection: Driver, wanted: Mapping[UUID, str | None]) -> dict[UUID, Stored]:
    """Tasks that this transaction has locked, by reference; each is wanted for a webhook-id.

    A statement of its own after the one that locks, so that it sees what was committed while the
    lock was awaited.
    """
    rows = await READ.fetch(connection, refs=list(wanted.keys()), webhook_ids=list(wanted.values()))
    return {
        row["task_ref"]: Stored(to_task(tuple(row)[:-2]), row["seen"], row["newest_signal"])
        for row in rows
    }


async def write(connection: Driver, changes: Sequence[Change]) -> None:
    """Writes changes of locked, live tasks: the rows, history, questions, answers, webhook-ids,
    signals.
    """
    history, asked, closed = [], [], []
    for change in changes:
        task, before = change.after, change.before
        if change.what != "progress":
            history.append(
                (task.ref, change.at, change.what, before.status, task.status, change.by)
            )
        known = {question.key: question for question in before.inputs}
        for position, q in enumerate(task.inputs):
            if q.key not in known:
                asked.append((task.ref, q.key, position, q.request))
            elif q != known[q.key]:
                closed.append((task.ref, q.key, q.response, q.superseded))
    row = await WRITE.fetch_one(
        connection,
        **arrays_of("new", _NEW, [_new_row(change.after) for change in changes]),
        **arrays_of("history", _HISTORY, history),
        **arrays_of("asked", _ASKED, asked),
        **arrays_of("closed", _CLOSED, closed),
        **arrays_of(
            "seen",
            _SEEN,
            [(c.after.backend_id, c.webhook_id, c.at) for c in changes if c.webhook_id],
        ),
        **arrays_of(
            "signal",
            _SIGNAL,
            [
                (s.backend_id, s.task_ref, s.type, s.body, s.at, s.at)
                for c in changes
                if (s := c.signal) is not None
            ],
        ),
    )
    if row[0] != len(changes):
        raise AssertionError("a locked task was no longer live")
