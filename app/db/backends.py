"""Tool servers, their API keys and their webhook secrets."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import schema
from app.db.engine import UniqueViolation, storage_errors
from app.domain.backends import Backend, BackendTerms
from app.errors import Conflict

B = schema.backends
K = schema.backend_keys
S = schema.webhook_secrets


_TERMS = list(BackendTerms.__dataclass_fields__)
_BACKEND = [
    B.c.id,
    B.c.name,
    B.c.disabled_at,
    B.c.created_at,
    B.c.callback_gone_at,
    B.c.callback_rests_until,
    *(B.c[name] for name in _TERMS),
]


_CALLBACK_IS_WELL = {"callback_gone_at": None, "callback_rests_until": None}


def _to_backend(row: Sequence[Any]) -> Backend:
    id_, name, disabled_at, created_at, gone_at, rests_until, *terms = row
    return Backend(id_, name, BackendTerms(*terms), disabled_at, created_at, gone_at, rests_until)


async def add(connection: AsyncConnection, name: str, terms: BackendTerms) -> Backend:
    """Registers a backend. Raises Conflict when the name is taken."""
    values = {"name": name} | {field: getattr(terms, field) for field in _TERMS}
    try:
        with storage_errors():
            rows = await connection.execute(insert(B).values(values).returning(*_BACKEND))
    except UniqueViolation:
        raise Conflict(f"There is a backend {name} already.") from None
    return _to_backend(rows.one())


async def by_name(connection: AsyncConnection, name: str) -> Backend | None:
    row = (await connection.execute(select(*_BACKEND).where(B.c.name == name))).first()
    return None if row is None else _to_backend(row)


async def by_key(connection: AsyncConnection, key_hash: bytes, now: datetime) -> Backend | None:
    """The backend that an API key, given as its SHA-256, belongs to."""
    row = await connection.execute(
        select(*_BACKEND).join(K).where(K.c.key_hash == key_hash, _valid(K, now))
    )
    found = row.first()
    return None if found is None else _to_backend(found)


async def all_of_them(connection: AsyncConnection) -> list[Backend]:
    return [
        _to_backend(row) for row in await connection.execute(select(*_BACKEND).order_by(B.c.name))
    ]


async def any_allows_anonymous(connection: AsyncConnection) -> bool:
    found = await connection.scalar(
        select(exists().where(B.c.allow_anonymous, B.c.disabled_at.is_(None)))
    )
    return bool(found)


async def set_terms(connection: AsyncConnection, backend_id: int, terms: BackendTerms) -> None:
    """What an operator has set is worth trying, also a callback that was gone."""
    values = {field: getattr(terms, field) for field in _TERMS} | _CALLBACK_IS_WELL
    await connection.execute(update(B).where(B.c.id == backend_id).values(values))


async def set_disabled(connection: AsyncConnection, backend_id: int, at: datetime) -> None:
    await connection.execute(update(B).where(B.c.id == backend_id).values(disabled_at=at))


async def set_enabled(connection: AsyncConnection, backend_id: int) -> None:
    """Lets it in, and its callback be tried again."""
    values = {"disabled_at": None} | _CALLBACK_IS_WELL
    await connection.execute(update(B).where(B.c.id == backend_id).values(values))


async def let_callback_rest(
    connection: AsyncConnection, backend_id: int, url: str, until: datetime
) -> None:
    """Notes that the callback `url` has asked to be left alone until then."""
    latest = func.greatest(B.c.callback_rests_until, until)
    await connection.execute(
        update(B)
        .where(B.c.id == backend_id, B.c.callback_url == url)
        .values(callback_rests_until=latest)
    )


async def set_callback_gone(
    connection: AsyncConnection, backend_id: int, url: str, at: datetime
) -> None:
    """Notes that the callback `url` wants no more signals, unless there is another one by now."""
    own = B.c.id == backend_id
    await connection.execute(
        update(B).where(own, B.c.callback_url == url).values(callback_gone_at=at)
    )


async def remove_tasks(connection: AsyncConnection, backend_id: int, limit: int) -> int:
    """Deletes a batch of a backend's tasks; how many."""
    t = schema.tasks.c
    batch = select(t.task_ref).where(t.backend_id == backend_id).limit(limit)
    deleted = await connection.execute(delete(schema.tasks).where(t.task_ref.in_(batch)))
    return deleted.rowcount


async def remove_signals(connection: AsyncConnection, backend_id: int, limit: int) -> int:
    """Deletes a batch of a backend's signals; how many."""
    s = schema.signals.c
    batch = select(s.id).where(s.backend_id == backend_id).limit(limit)
    deleted = await connection.execute(delete(schema.signals).where(s.id.in_(batch)))
    return deleted.rowcount


async def remove(connection: AsyncConnection, backend_id: int) -> int:
    """Deletes a backend with its keys, its secrets and the tasks that are left; how many tasks."""
    # A create that is under way has the row locked, and one that comes later waits here.
    await connection.execute(select(B.c.id).where(B.c.id == backend_id).with_for_update())
    t = schema.tasks.c
    tasks = await connection.execute(delete(schema.tasks).where(t.backend_id == backend_id))
    await connection.execute(delete(B).where(B.c.id == backend_id))
    return tasks.rowcount


async def live_tasks(connection: AsyncConnection, backend_id: int) -> int:
    """How many tasks of a backend are live."""
    t = schema.tasks.c
    count = await connection.scalar(
        select(func.count()).where(
            t.backend_id == backend_id, t.status.in_(["working", "input_required"])
        )
    )
    return int(count or 0)


# --- keys and secrets -------------------------------------------------------------------------


async def add_key(connection: AsyncConnection, backend_id: int, key_hash: bytes) -> None:
    await connection.execute(insert(K).values(backend_id=backend_id, key_hash=key_hash))


async def add_secret(connection: AsyncConnection, backend_id: int, ciphertext: bytes) -> None:
    await connection.execute(insert(S).values(backend_id=backend_id, ciphertext=ciphertext))


async def expire_keys(
    connection: AsyncConnection, backend_id: int, now: datetime, at: datetime
) -> None:
    """Lets the present keys end at `at`, those that end earlier excepted, and drops old ones."""
    await _expire(connection, K, backend_id, now, at)


async def expire_secrets(
    connection: AsyncConnection, backend_id: int, now: datetime, at: datetime
) -> None:
    """Lets the present secrets end at `at`, those that end earlier excepted, and drops old ones."""
    await _expire(connection, S, backend_id, now, at)


async def secrets_of(connection: AsyncConnection, backend_id: int, now: datetime) -> list[bytes]:
    """The encrypted webhook secrets that are valid now, newest first."""
    rows = await connection.scalars(
        select(S.c.ciphertext)
        .where(S.c.backend_id == backend_id, _valid(S, now))
        .order_by(S.c.id.desc())
    )
    return list(rows)


async def all_secrets(connection: AsyncConnection, now: datetime) -> list[bytes]:
    """Every webhook secret that is valid now, still encrypted."""
    return list(await connection.scalars(select(S.c.ciphertext).where(_valid(S, now))))


async def _expire(
    connection: AsyncConnection, table: Any, backend_id: int, now: datetime, at: datetime
) -> None:
    own = table.c.backend_id == backend_id
    await connection.execute(delete(table).where(own, table.c.expires_at <= now))
    later = or_(table.c.expires_at.is_(None), table.c.expires_at > at)
    await connection.execute(update(table).where(own, later).values(expires_at=at))


def _valid(table: Any, now: datetime) -> Any:
    return or_(table.c.expires_at.is_(None), table.c.expires_at > now)
