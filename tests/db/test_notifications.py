"""What one process changes reaches those who wait in another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import pytest
from sqlalchemy import text

from app.db import notifications
from app.db.changes import Watch
from app.db.database import Database
from app.db.engine import Driver
from app.db.notifications import CHANNEL, KEYS_AT_ONCE, MOST_UNSENT, Notifications
from app.db.statements import Statement
from tests.support.clock import ShiftedClock
from tests.support.service import Service
from tests.support.waiting import eventually

AT_ONCE = 2.0
"""Seconds: less than any slow look would take while notifications arrive."""


@asynccontextmanager
async def process(url: str, clock: ShiftedClock) -> AsyncIterator[Database]:
    """A process on this database, as far as notifications go."""
    db = Database(url, clock)
    running = asyncio.create_task(db.notifications.run())
    await eventually(lambda: db.notifications.arrive)
    try:
        yield db
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await db.close()


@pytest.fixture
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "LOOK_SECONDS", 3_600)


@pytest.fixture
async def here(database_url: str, clock: ShiftedClock) -> AsyncIterator[Database]:
    async with process(database_url, clock) as db:
        yield db


@pytest.fixture
async def there(database_url: str, clock: ShiftedClock) -> AsyncIterator[Database]:
    async with process(database_url, clock) as db:
        yield db


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "LOOK_SECONDS", 0.3)


async def quiet(watch: Watch[UUID]) -> None:
    """Lets pass what a watch is told for its own beginning."""
    while await watch.changes(notifications.LOOK_SECONDS * 4):
        pass


async def test_a_change_is_heard_of_at_once(here: Database, there: Database) -> None:
    ref = UUID(int=1)
    with there.changes.watching([ref]) as watch, there.news.watching([7]) as news:
        here.notifications.send([ref, UUID(int=2)], [7, 8])
        async with asyncio.timeout(AT_ONCE):
            assert await watch.changes() == {ref}
            assert await news.changes() == {7}


async def test_many_changes_are_told_in_few_notifications(here: Database, there: Database) -> None:
    refs = [UUID(int=number) for number in range(1, 10 * KEYS_AT_ONCE)]
    heard: list[str] = []
    async with here.own_connection() as connection:
        await connection.add_listener(CHANNEL, lambda *said: heard.append(str(said[3])))
        with there.changes.watching(refs) as watch:
            here.notifications.send(refs, [])
            told: set[UUID] = set()
            async with asyncio.timeout(AT_ONCE):
                while told != set(refs):
                    told |= await watch.changes()
        assert len([said for said in heard if len(said) > 100]) == 10
        assert max(map(len, heard)) < 8_000


async def test_what_is_told_twice_before_it_is_sent_is_sent_once(
    here: Database, there: Database
) -> None:
    heard: list[str] = []
    async with here.own_connection() as connection:
        await connection.add_listener(CHANNEL, lambda *said: heard.append(str(said[3])))
        for _ in range(50):
            here.notifications.send([UUID(int=1)], [])
        await eventually(lambda: any(UUID(int=1).hex in said for said in heard))
    assert sum(said.count(UUID(int=1).hex) for said in heard) == 1


@pytest.mark.parametrize(
    "payload",
    [
        "",
        ".",
        "someone",
        "someone.b",
        "someone.bx",
        "someone.x" * 9,
        "someone." + "z" * 32,
        "\ud7ff",
    ],
)
async def test_what_is_no_notification_of_ours_is_passed_over(
    here: Database, there: Database, payload: str
) -> None:
    ref = UUID(int=1)
    with there.changes.watching([ref]) as watch:
        async with here.own_connection() as connection:
            await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, payload)
        here.notifications.send([ref], [])
        async with asyncio.timeout(AT_ONCE):
            assert await watch.changes() == {ref}


async def test_a_process_that_ends_tells_what_it_has_changed(
    there: Database, database_url: str
) -> None:
    """Commands do not listen, and are gone at once."""
    ref = UUID(int=1)
    with there.changes.watching([ref]) as watch:
        command = Database(database_url)
        command.notifications.send([ref], [])
        await command.close()
        async with asyncio.timeout(AT_ONCE):
            assert await watch.changes() == {ref}


async def test_what_nobody_takes_does_not_pile_up(database_url: str) -> None:
    db = Database(database_url)
    for number in range(3 * MOST_UNSENT):
        db.notifications.send([UUID(int=number)], [])
    assert len(db.notifications._unsent) <= MOST_UNSENT
    await db.close()


# --- when notifications are lost --------------------------------------------------------------


async def test_a_lost_connection_costs_nothing_that_was_said_meanwhile(
    rare_looks: None, here: Database, there: Database
) -> None:
    """Who waits looks again when the connection is back."""
    ref = UUID(int=1)
    with there.changes.watching([ref]) as watch:
        async with here.own_connection() as connection:
            cut = await connection.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert cut >= 2, "the connections of both processes"
        async with asyncio.timeout(AT_ONCE):
            assert await watch.changes() == {ref}


async def test_refused_notifications_leave_the_looks(
    frequent_looks: None,
    service: Service,
    database_url: str,
    clock: ShiftedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a full queue of notifications: no reconnects, and nothing is missed."""
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    refused = Statement(text("SELECT 1 / 0, :channel, :payload"))
    monkeypatch.setattr(notifications, "NOTIFY", refused)
    db = Database(database_url, clock)
    connections: list[Driver] = []

    async def connect() -> Driver:
        connections.append(await db.connect())
        return connections[-1]

    alone = Notifications(connect, db.transaction, db.changes, db.news, clock)
    running = asyncio.create_task(alone.run())
    with db.changes.watching([UUID(task.ref)]) as watch:
        await quiet(watch)
        async with db.own_connection() as connection:
            await connection.execute(
                "UPDATE tasks SET status_message = '\"by hand\"' WHERE task_ref = $1", task.ref
            )
        alone.send([UUID(int=1)], [])
        assert await watch.changes(30) == {UUID(task.ref)}
    assert len(connections) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await db.close()


async def test_a_change_that_nobody_told_of_is_found_by_looking(
    frequent_looks: None, service: Service, database_url: str, clock: ShiftedClock
) -> None:
    """The service's own notifications do not run here; somebody else's look finds it."""
    tools, client = await service.tool_server(), service.client()
    task, other = await tools.create(client), await tools.create(client)
    async with process(database_url, clock) as db:
        with db.changes.watching([UUID(task.ref), UUID(other.ref)]) as watch:
            await quiet(watch)
            async with db.own_connection() as connection:
                await connection.execute(
                    "UPDATE tasks SET status_message = '\"by hand\"' WHERE task_ref = $1", task.ref
                )
            assert await watch.changes(30) == {UUID(task.ref)}


async def test_an_expiry_is_found_by_looking(
    frequent_looks: None, service: Service, database_url: str, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=60_000)
    async with process(database_url, clock) as db:
        with db.changes.watching([UUID(task.ref)]) as watch:
            await quiet(watch)
            clock.advance(seconds=61)
            assert await watch.changes(30) == {UUID(task.ref)}


async def test_new_signals_are_found_by_looking(
    frequent_looks: None, service: Service, database_url: str, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    async with process(database_url, clock) as db:
        async with db.own_connection() as connection:
            backend_id = await connection.fetchval("SELECT id FROM backends")
        with db.news.watching([backend_id]) as news:
            assert await news.changes(3 * notifications.LOOK_SECONDS) == set()
            async with db.own_connection() as connection:
                await connection.execute(
                    "INSERT INTO signals (backend_id, task_ref, type, body, created_at, due_at)"
                    " VALUES ($1, $2, 'task.expired', '{}', now(), now())",
                    backend_id,
                    task.ref,
                )
            assert await news.changes(30) == {backend_id}
