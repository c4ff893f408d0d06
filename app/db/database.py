"""The database as the rest of the broker sees it: a pool, and the grouped hot statements."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection as Connection

from app.db import signals, tasks
from app.db.changes import Changes
from app.db.decisions import Answer, Change, Decide, decide
from app.db.engine import Driver, close, connect, create_engine, transaction
from app.db.grouping import Grouping
from app.db.notifications import Notifications
from app.db.signals import Attempt, Outstanding
from app.domain.clock import Clock, utc_now
from app.domain.tasks import Task
from app.errors import BrokerError

__all__ = ["Connection", "Database"]

READ_CONNECTIONS = 3
WRITE_CONNECTIONS = 3
CREATE_CONNECTIONS = 1


class Database:
    """One process's way to Postgres. Everything raises StorageUnavailable when there is none."""

    def __init__(self, database_url: str, clock: Clock = utc_now, *, pooled: bool = False) -> None:
        self._url = database_url
        self._pooled = pooled
        self._engine = create_engine(database_url, pooled=pooled)
        self.changes: Changes[UUID] = Changes()
        """Of tasks, by their references."""
        self.news: Changes[int] = Changes()
        """New signals, by the backends that they are for."""
        self.notifications = Notifications(
            self.connect, self.transaction, self.changes, self.news, clock
        )
        self._reads: Grouping[UUID, Task | None] = Grouping(
            self.connect, tasks.read, connections=READ_CONNECTIONS, largest=256
        )
        self._creations: Grouping[Task, bool] = Grouping(
            self.connect, tasks.create, connections=CREATE_CONNECTIONS, largest=64
        )
        self._decisions: Grouping[Decide[Any], Any] = Grouping(
            self.connect,
            self._decide,
            connections=WRITE_CONNECTIONS,
            largest=64,
            key=lambda call: call.ref,
        )
        self._outstanding: Grouping[int, list[Outstanding]] = Grouping(
            self.connect, signals.outstanding, connections=1, largest=64
        )
        self._attempts: Grouping[Attempt, bool] = Grouping(
            self.connect, signals.record, connections=1, largest=64
        )

    async def read(self, ref: UUID) -> Task | None:
        """A task by its reference."""
        return await self._reads.call(ref)

    async def create(self, task: Task) -> bool:
        """Stores a new task; False if its backend has used its `external_id` before."""
        return await self._creations.call(task)

    async def decide(self, call: Decide[Answer]) -> Answer:
        """Decides about a task, commits what changes, and gives the decision's answer."""
        answer: Answer = await self._decisions.call(call)
        return answer

    async def _decide(
        self, connection: Driver, calls: Sequence[Decide[Any]]
    ) -> list[Any | BrokerError]:
        answers, changes = await decide(connection, calls)
        self.tell(changes)
        return answers

    @property
    def waiters(self) -> int:
        """How many requests wait for something to change."""
        return len(self.changes) + len(self.news)

    def tell(self, changes: Sequence[Change]) -> None:
        """Wakes those who wait for what has been committed, in every process."""
        refs = [change.after.ref for change in changes]
        backend_ids = [change.after.backend_id for change in changes if change.signal]
        self.changes.tell(refs)
        self.news.tell(backend_ids)
        self.notifications.send(refs, backend_ids)

    async def outstanding(self, backend_id: int) -> list[Outstanding]:
        """The oldest signals that a backend has not got yet."""
        return await self._outstanding.call(backend_id)

    async def record(self, attempt: Attempt) -> bool:
        """Notes what became of a signal that was sent; False if somebody else has said it."""
        return await self._attempts.call(attempt)

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        """One transaction on the pool, for everything that is not hot."""
        return transaction(self._engine)

    async def connect(self) -> Driver:
        """A driver connection of one's own."""
        return await connect(self._url, pooled=self._pooled)

    @asynccontextmanager
    async def own_connection(self) -> AsyncIterator[Driver]:
        """A driver connection for the length of a block."""
        connection = await self.connect()
        try:
            yield connection
        finally:
            await close(connection)

    async def close(self) -> None:
        """Answers the calls that wait, tells others what has changed, and lets go."""
        for grouping in (
            self._reads,
            self._creations,
            self._decisions,
            self._outstanding,
            self._attempts,
        ):
            await grouping.close()
        await self.notifications.flush()
        await self._engine.dispose()
