"""The outbox: what backends must learn, from the transaction that caused it to their receipt.

Signals about one task go out in their order: a later one waits for the end of those before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Integer,
    and_,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import schema
from app.db.engine import Driver
from app.db.statements import Statement, arrays_of, columns_of, rows_of
from app.domain.signals import SignalStatus
from app.domain.tasks import JsonText

B = schema.backends
S = schema.signals
_PENDING = text(f"signals.{schema.PENDING}")


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A signal that its backend has not got yet."""

    id: int
    uuid: UUID
    body: JsonText

    @property
    def webhook_id(self) -> str:
        """The name that it keeps, however often and whichever way it is sent."""
        return f"msg_{self.uuid.hex}"


@dataclass(frozen=True, slots=True)
class Claimed(Outstanding):
    """One that a worker has taken, to send it before its lease ends, after so many `attempts`."""

    backend_id: int
    backend: str
    url: str
    task_ref: UUID
    type: str
    attempts: int
    created_at: datetime


LOOKED_AT = 64
"""How many due signals of one backend a claim looks at, to find some that may be sent."""

# --- sending ----------------------------------------------------------------------------------

# A lease is a `due_at` in the future: if nobody records what became of it, it is due again.
# Candidates are chosen before they are locked. One that waits for an older signal about its task
# is put off until that one is tried again, so that it is not looked at each time.
CLAIM = Statement(
    text(f"""
    WITH ready AS (
        SELECT b.id, b.name, b.callback_url, coalesce(free.n, :each) AS free
        FROM backends b LEFT JOIN unnest(:ids, :frees) AS free (id, n) ON free.id = b.id
        WHERE b.callback_url IS NOT NULL AND b.callback_gone_at IS NULL AND b.disabled_at IS NULL
            AND coalesce(b.callback_rests_until <= :now, true) AND coalesce(free.n, :each) > 0
            AND EXISTS (
                SELECT FROM signals s
                WHERE s.backend_id = b.id AND s.{schema.PENDING} AND s.due_at <= :now
            )
        ORDER BY random()
        LIMIT :room
    ), seen AS MATERIALIZED (
        SELECT ready.*, s.id AS signal_id, s.size, first.id AS first_id, first.attempts AS tried,
            first.due_at AS first_due_at, row_number() OVER (PARTITION BY ready.id, first.id = s.id
                ORDER BY s.due_at, s.id) AS place
        FROM ready CROSS JOIN LATERAL (
            SELECT id, task_ref, due_at, octet_length(body) AS size FROM signals
            WHERE backend_id = ready.id AND {schema.PENDING} AND due_at <= :now
            ORDER BY due_at, id
            LIMIT {LOOKED_AT}
        ) s CROSS JOIN LATERAL (
            SELECT id, attempts, due_at FROM signals
            WHERE task_ref = s.task_ref AND {schema.PENDING}
            ORDER BY id
            LIMIT 1
        ) first
    ), behind AS (
        SELECT s.id, seen.first_due_at FROM signals s JOIN seen ON seen.signal_id = s.id
        WHERE seen.first_id <> s.id AND seen.tried > 0 AND seen.first_due_at > :now
            AND s.{schema.PENDING}
        FOR UPDATE OF s SKIP LOCKED
    ), put_off AS (
        UPDATE signals s SET due_at = behind.first_due_at FROM behind WHERE s.id = behind.id
    ), chosen AS (
        SELECT signal_id, name, callback_url FROM (
            SELECT *, sum(size) OVER (ORDER BY place, signal_id) - size AS size_before
            FROM seen WHERE first_id = signal_id AND place <= free
        ) candidates
        WHERE size_before < :bytes
        ORDER BY place, signal_id
        LIMIT :room
    ), due AS (
        SELECT s.id, chosen.name, chosen.callback_url
        FROM signals s JOIN chosen ON chosen.signal_id = s.id
        WHERE s.{schema.PENDING} AND s.due_at <= :now
        FOR UPDATE OF s SKIP LOCKED
    )
    UPDATE signals s SET due_at = :lease_end
    FROM due WHERE s.id = due.id
    RETURNING s.id, s.webhook_id, s.body, s.backend_id, due.name, due.callback_url, s.task_ref,
        s.type, s.attempts, s.created_at
""").bindparams(  # noqa: S608 - nothing of anybody else's is in it
        bindparam("ids", type_=ARRAY(Integer)),
        bindparam("frees", type_=ARRAY(Integer)),
        bindparam("each", type_=Integer),
        bindparam("room", type_=Integer),
        bindparam("bytes", type_=BigInteger),
        bindparam("now", type_=schema.Moment),
        bindparam("lease_end", type_=schema.Moment),
    )
)


async def claim(
    connection: Driver,
    now: datetime,
    lease_end: datetime,
    *,
    each: int,
    free: Mapping[int, int],
    room: int,
    size: int,
) -> list[Claimed]:
    """Takes signals that are due: at most `room`, and about `size` bytes; of one backend as many
    as it has `free`, or `each`.
    """
    rows = await CLAIM.fetch(
        connection,
        now=now,
        lease_end=lease_end,
        ids=list(free.keys()),
        frees=list(free.values()),
        each=each,
        room=room,
        bytes=size,
    )
    return [Claimed(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a claimed signal. While it is pending, `due_at` says when to try again."""

    id: int
    attempts: int
    attempted_at: datetime
    outcome: str
    status: SignalStatus
    due_at: datetime | None
    ended_at: datetime | None


_ATTEMPT = columns_of(
    S, "id", "attempts", "attempted_at", "outcome", "status", "due_at", "ended_at"
)


def _record() -> Statement:
    made = rows_of("made", _ATTEMPT)
    # A delivery counts in any case. A failure does only if nobody has taken the signal over.
    delivered = made.c.status == literal_column(f"'{SignalStatus.DELIVERED}'")
    counts = or_(delivered, S.c.attempts == made.c.attempts - literal_column("1"))
    recorded = (
        update(S)
        .values({c.name: made.c[c.name] for c in _ATTEMPT if c.name != "id"})
        .where(S.c.id == made.c.id, _PENDING, counts)
        .returning(S.c.id, S.c.task_ref, S.c.ended_at)
        .cte("recorded")
    )
    # Those behind one that has ended need not wait until it would have been tried again.
    behind = S.alias("behind")
    freed = (
        update(behind)  # type: ignore[arg-type]  # an alias of a table is one, whatever it says
        .values(due_at=recorded.c.ended_at)
        .where(
            behind.c.task_ref == recorded.c.task_ref,
            behind.c.id > recorded.c.id,
            text(f"behind.{schema.PENDING}"),
            behind.c.due_at > recorded.c.ended_at,
        )
    )
    return Statement(select(recorded.c.id).add_cte(freed.cte("freed")))


RECORD = _record()


async def record(connection: Driver, attempts: Sequence[Attempt]) -> list[bool]:
    """Notes what became of attempts. False where somebody else has said it already."""
    rows = await RECORD.fetch(
        connection,
        **arrays_of(
            "made", _ATTEMPT, [tuple(getattr(one, c.name) for c in _ATTEMPT) for one in attempts]
        ),
    )
    noted = {row[0] for row in rows}
    return [one.id in noted for one in attempts]


RELEASE = Statement(
    update(S)
    .values(due_at=bindparam("now", type_=schema.Moment))
    .where(S.c.id == func.any(bindparam("ids", type_=ARRAY(BigInteger))), _PENDING)
)


async def release(connection: Driver, ids: Sequence[int], now: datetime) -> None:
    """Gives claimed signals back."""
    await RELEASE.fetch(connection, ids=ids, now=now)


# --- what a backend has got otherwise ---------------------------------------------------------

OUTSTANDING = Statement(
    text(f"""
    SELECT wanted.id AS backend_id, s.id, s.webhook_id, s.body
    FROM (SELECT DISTINCT unnest(:backends) AS id) wanted CROSS JOIN LATERAL (
        SELECT id, webhook_id, body FROM (
            SELECT *, sum(octet_length(body)) OVER (ORDER BY id) - octet_length(body) AS before
            FROM (
                SELECT id, webhook_id, body FROM signals
                WHERE backend_id = wanted.id AND {schema.PENDING} ORDER BY id LIMIT :limit
            ) oldest
        ) sized
        WHERE before < :bytes
    ) s
    ORDER BY s.id
""").bindparams(  # noqa: S608 - nothing of anybody else's is in it
        bindparam("backends", type_=ARRAY(Integer)),
        bindparam("limit", type_=Integer),
        bindparam("bytes", type_=BigInteger),
    )
)
LARGEST_BATCH = 100
LARGEST_BATCH_BYTES = 2 * 1024 * 1024


async def outstanding(connection: Driver, backend_ids: Sequence[int]) -> list[list[Outstanding]]:
    """For each of these backends its oldest outstanding signals, in their order: a bounded number,
    of a bounded size, but at least one if there is any.
    """
    rows = await OUTSTANDING.fetch(
        connection,
        backends=list(backend_ids),
        limit=LARGEST_BATCH,
        bytes=LARGEST_BATCH_BYTES,
    )
    found: dict[int, list[Outstanding]] = {id_: [] for id_ in backend_ids}
    for backend_id, *signal in rows:
        found[backend_id].append(Outstanding(*signal))
    return [found[id_] for id_ in backend_ids]


async def acknowledge(
    connection: AsyncConnection, backend_id: int, ids: Sequence[int], now: datetime
) -> None:
    """Ends signals that the backend has fetched."""
    await connection.execute(_seen(now).where(S.c.backend_id == backend_id, S.c.id.in_(ids)))


async def settle(connection: AsyncConnection, task_ref: UUID, newest: int, now: datetime) -> None:
    """Ends the signals about a task up to `newest`: their backend knows what they say."""
    await connection.execute(_seen(now).where(S.c.task_ref == task_ref, S.c.id <= newest))


def _seen(now: datetime) -> Any:
    return update(S).where(_PENDING).values(status=SignalStatus.SEEN, ended_at=now, due_at=None)


# --- for the operator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """A signal as the operator sees it; never its body."""

    id: int
    backend: str
    task_ref: UUID
    type: str
    status: SignalStatus
    created_at: datetime
    attempts: int
    attempted_at: datetime | None
    outcome: str | None
    due_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class DeliveryFilter:
    backend_id: int | None = None
    status: SignalStatus | None = None
    task_ref: UUID | None = None
    limit: int = 50


_LISTED = columns_of(
    S, "task_ref", "type", "status", "created_at", "attempts", "attempted_at", "outcome",
    "due_at", "ended_at",
)  # fmt: skip


async def listing(connection: AsyncConnection, wanted: DeliveryFilter) -> list[Delivery]:
    """Signals, newest first."""
    given = {
        S.c.backend_id: wanted.backend_id,
        S.c.status: wanted.status,
        S.c.task_ref: wanted.task_ref,
    }
    statement = (
        select(S.c.id, B.c.name, *_LISTED)
        .join(B)
        .where(
            and_(True, *(column == value for column, value in given.items() if value is not None))
        )
        .order_by(S.c.id.desc())
        .limit(wanted.limit)
    )
    return [
        Delivery(id_, backend, ref, kind, SignalStatus(status), *rest)
        for id_, backend, ref, kind, status, *rest in await connection.execute(statement)
    ]


async def send_again(
    connection: AsyncConnection, now: datetime, *, ids: Sequence[int] | None, backend_id: int | None
) -> list[int]:
    """Lets signals be sent now, as if they were new: these, or all of a backend that are dead or
    wait for another attempt; which ones.
    """
    statement = (
        update(S)
        .values(status=SignalStatus.PENDING, due_at=now, ended_at=None, attempts=0)
        .returning(S.c.id)
    )
    if ids is not None:
        statement = statement.where(S.c.id.in_(ids))
    if backend_id is not None:
        waits = and_(_PENDING, S.c.attempts > 0)
        statement = statement.where(
            S.c.backend_id == backend_id, or_(S.c.status == SignalStatus.DEAD, waits)
        )
        await connection.execute(
            update(B).where(B.c.id == backend_id).values(callback_rests_until=None)
        )
    return sorted(await connection.scalars(statement))


@dataclass(frozen=True, slots=True)
class Trouble:
    """Signals of one backend that did not get there."""

    backend: str
    dead: int
    failing: int
    """Still pending, after several attempts."""


SEVERAL = 3


async def troubles(connection: AsyncConnection) -> list[Trouble]:
    """The backends that signals do not get to, by name."""
    dead = func.count().filter(S.c.status == SignalStatus.DEAD)
    failing = func.count().filter(_PENDING)
    wrong = or_(S.c.status == SignalStatus.DEAD, and_(_PENDING, S.c.attempts >= SEVERAL))
    rows = await connection.execute(
        select(B.c.name, dead, failing).join(S).where(wrong).group_by(B.c.name).order_by(B.c.name)
    )
    return [Trouble(*row) for row in rows]
