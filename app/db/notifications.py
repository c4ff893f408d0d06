"""What one process changes, told to the others: NOTIFY, on one connection of each process.

A notification is a hint, and carries keys only. It is sent after the commit that it tells of, many
in one where many come together, because inside the writing transactions it would have their
commits queue up. None is needed: after each reconnect everybody who waits looks again, and a slow
look of each process finds what was not heard of.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import datetime
from itertools import islice
from typing import NamedTuple
from uuid import UUID

import asyncpg
import structlog
from sqlalchemy import ARRAY, Integer, Uuid, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import schema
from app.db.changes import Changes
from app.db.engine import Driver, StorageFault, close, storage_errors
from app.db.statements import Statement
from app.domain.clock import Clock
from app.errors import BrokerError

CHANNEL = "taskbroker_changes"
KEYS_AT_ONCE = 200
"""In one notification: its payload has to be shorter than 8,000 bytes."""
MOST_UNSENT = 50_000
LOOKED_AT_ONCE = 1_000
LOOK_SECONDS = 5.0
LOOK_SECONDS_DEAF = 1.0
"""How often to look at what is waited for; the second is for when notifications do not arrive."""
PING_SECONDS = 5.0
DEAF_AFTER_SECONDS = 12.0
LONGEST_PAUSE = 5.0

log = structlog.get_logger(__name__)

SEEN = Statement(
    text("""
    SELECT task_ref, xmin::text AS version, expires_at FROM tasks WHERE task_ref = ANY(:refs)
""").bindparams(bindparam("refs", type_=ARRAY(Uuid)))
)
WITH_NEWS = Statement(
    text(f"""
    SELECT id FROM unnest(:ids) AS backend (id)
    WHERE EXISTS (SELECT FROM signals WHERE backend_id = backend.id AND signals.{schema.PENDING})
""").bindparams(bindparam("ids", type_=ARRAY(Integer)))  # noqa: S608 - nothing of anybody else's
)
PING = "SELECT pg_notify(:channel, :payload)"
NOTIFY = Statement(
    # A hint need not be on disk before it is given. Set for the statement only: behind a pooler,
    # the session may be another's next.
    text(
        "SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel, :payload)"
    ).bindparams(
        bindparam("channel", type_=schema.tasks.c.tool.type),
        bindparam("payload", type_=schema.tasks.c.tool.type),
    )
)


class Notifications:
    """Carries changes between the processes that share a database."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Driver]],
        transaction: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        tasks: Changes[UUID],
        news: Changes[int],
        clock: Clock,
    ) -> None:
        self._connect = connect
        self._transaction = transaction
        self._tasks = tasks
        self._news = news
        self._clock = clock
        self._me = secrets.token_hex(4)
        self._unsent: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._versions: dict[UUID, str] = {}
        self._heard_at = -math.inf
        self._pinged = False
        self._said_deaf = False

    @property
    def arrive(self) -> bool:
        """Whether notifications have come through lately."""
        return time.monotonic() - self._heard_at < DEAF_AFTER_SECONDS

    def send(self, refs: Iterable[UUID], backend_ids: Iterable[int]) -> None:
        """Lets the other processes know, soon, of tasks and of backends with new signals."""
        for ref in refs:
            self._unsent[ref.hex] = None
        for id_ in backend_ids:
            self._unsent[f"b{id_}"] = None
        if len(self._unsent) > MOST_UNSENT:  # nobody takes them; a look finds what they told of
            self._unsent.clear()
        if self._unsent:
            self._wake.set()

    async def run(self) -> None:
        """Sends, hears and looks until it is cancelled; a database that is away is waited for."""
        pause = 0.1
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._listen(connection)
                    while not connection.is_closed():
                        await self._round(connection)
                        pause = 0.1
                finally:
                    await close(connection)
            except (BrokerError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
                log.warning("changes of other processes cannot be heard", reason=_reason(error))
            except Exception:
                log.exception("notifications failed")
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            pause = min(2 * pause, LONGEST_PAUSE)

    async def flush(self) -> None:
        """Sends what is left, where `run` does not: for a process that is about to end."""
        if not self._unsent:
            return
        try:
            connection = await self._connect()
            try:
                await self._send(connection)
            finally:
                await close(connection)
        except BrokerError as error:
            log.debug("changes were not told", reason=error.detail)

    async def _listen(self, connection: Driver) -> None:
        connection.add_termination_listener(lambda *_: self._wake.set())
        self._ping_at = time.monotonic()
        self._look_at = time.monotonic()  # who knows what was said meanwhile
        with self._refusals(), storage_errors():
            await connection.add_listener(CHANNEL, self._hear)

    async def _round(self, connection: Driver) -> None:
        """Waits until there is something to do, and does it."""
        now = time.monotonic()
        wait = min(self._look_at, self._ping_at) - now
        if wait > 0 and not self._wake.is_set():
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        if time.monotonic() >= self._look_at:
            await self._look(connection)
            self._look_at = time.monotonic() + self._between_looks()
        with self._refusals():
            await self._send(connection)
            if time.monotonic() >= self._ping_at:
                self._ping_at = time.monotonic() + PING_SECONDS
                self._tell_if_deaf()
                await self._ping()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the database refuses (LISTEN on a standby, NOTIFY with a full queue) leaves us
        deaf or dumb; the looks go on.
        """
        try:
            yield
        except StorageFault as fault:
            log.warning("a notification was refused", reason=fault.detail)

    def _between_looks(self) -> float:
        seconds = LOOK_SECONDS if self.arrive else LOOK_SECONDS_DEAF
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - no secret

    async def _send(self, connection: Driver) -> None:
        while self._unsent:
            keys = list(islice(self._unsent, KEYS_AT_ONCE))
            for key in keys:
                del self._unsent[key]
            await self._notify(connection, keys)

    async def _notify(self, connection: Driver, keys: list[str]) -> None:
        payload = ".".join([self._me, *keys])
        await NOTIFY.fetch(connection, channel=CHANNEL, payload=payload)

    async def _ping(self) -> None:
        """Says something to ourselves, on another connection. Behind a pooler that lends sessions
        out for a transaction, this one would hear itself, and nobody else.
        """
        said = {"channel": CHANNEL, "payload": f"{self._me}.p"}
        with suppress(BrokerError):  # `arrive` will tell
            async with self._transaction() as connection:
                await connection.execute(text(PING), said)

    def _hear(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        said = _said(str(payload))
        if said.by == self._me:  # those who wait here were told at once
            if said.is_ping:
                self._heard_at = time.monotonic()
            return
        self._tasks.tell(said.refs)
        self._news.tell(said.backend_ids)

    async def _look(self, connection: Driver) -> None:
        """Wakes those who wait for what has changed, whoever told of it or did not."""
        watched = self._tasks.keys()
        versions: dict[UUID, str] = {}
        now = self._clock()
        for refs in _portions(watched, LOOKED_AT_ONCE):
            versions |= dict.fromkeys(refs, "gone")
            for ref, version, expires_at in await SEEN.fetch(connection, refs=refs):
                versions[ref] = "expired" if _over(expires_at, now) else version
            self._tasks.tell(ref for ref in refs if versions[ref] != self._versions.get(ref))
        self._versions = versions
        backends = self._news.keys()
        if backends:
            rows_ = await WITH_NEWS.fetch(connection, ids=backends)
            self._news.tell(row[0] for row in rows_)

    def _tell_if_deaf(self) -> None:
        if not self._pinged:  # there was nothing to hear yet
            self._pinged = True
        elif self.arrive == self._said_deaf:
            self._said_deaf = not self.arrive
            if self._said_deaf:
                log.warning(
                    "notifications do not arrive: what other processes change is seen a second "
                    "late; LISTEN needs a session, so connect past the pooler or have it pool "
                    "sessions"
                )
            else:
                log.info("notifications arrive again")


class _Said(NamedTuple):
    by: str
    is_ping: bool
    refs: list[UUID]
    backend_ids: list[int]


def _said(payload: str) -> _Said:
    """What a payload says; what is not of our making is left out."""
    by, *keys = payload.split(".")
    refs, backend_ids = [], []
    for key in keys:
        try:
            if key.startswith("b") and len(key) < 32:
                backend_ids.append(int(key[1:]))
            elif len(key) == 32:
                refs.append(UUID(hex=key))
        except ValueError:
            continue
    return _Said(by, keys == ["p"], refs, backend_ids)


def _over(expires_at: datetime | None, now: datetime) -> bool:
    return expires_at is not None and expires_at <= now


def _portions(keys: list[UUID], size: int) -> Iterator[list[UUID]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _reason(error: Exception) -> str:
    return error.detail if isinstance(error, BrokerError) else type(error).__name__
