"""Brokers behind a pooler in transaction mode: slower, blind to one another, and right."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.cli.doctor import CHECKS
from app.db import notifications
from app.db.database import Database
from app.db.engine import connect
from app.db.notifications import LOOK_SECONDS
from app.errors import BrokerError
from app.main import create_broker
from tests.support.clock import ShiftedClock
from tests.support.listening import listening
from tests.support.pooler import transaction_pooler
from tests.support.service import ELICITATION, Service, networked_service, test_settings
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
async def pooled_url(database_url: str) -> AsyncIterator[str]:
    async with transaction_pooler(database_url) as url:
        yield url


@pytest.fixture
async def replicas(pooled_url: str, clock: ShiftedClock) -> AsyncIterator[tuple[Service, Service]]:
    """Two brokers, which share a database through the pooler."""
    settings = test_settings(pooled_url, pooler="transaction")
    async with networked_service(settings, clock) as a, networked_service(settings, clock) as b:
        yield a, b


async def metric(service: Service, name: str) -> float:
    lines = (await service.http.get("/metrics")).text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


async def test_who_does_not_expect_a_pooler_is_told_of_the_setting(pooled_url: str) -> None:
    with pytest.raises(BrokerError, match="TASKBROKER_POOLER"):
        await connect(pooled_url)


async def test_everything_works_many_at_a_time(replicas: tuple[Service, Service]) -> None:
    """Many calls at once share the few sessions of the pooler, in whatever order."""
    a, b = replicas
    tools = await a.tool_server()

    async def one_life(number: int) -> None:
        client = a.client()
        task = await tools.create(client, externalId=str(number))
        await tools.ask(task, "sure")
        assert (await client.at(b).get(task.id))["inputRequests"] == {"sure": ELICITATION}
        await client.at(b).update(task.id, {"sure": {"action": "decline"}})
        await client.cancel(task.id)
        await tools.at(b).complete(task, {"content": [], "n": number})
        assert (await client.at(b).get(task.id))["result"]["n"] == number
        assert (await tools.list(status="completed")).status_code == 200

    for round_ in range(5):
        await asyncio.gather(*(one_life(20 * round_ + number) for number in range(20)))
    await a.sweep()


async def test_changes_of_other_replicas_are_seen_by_looking(
    replicas: tuple[Service, Service],
) -> None:
    """LISTEN is lost in the pooler: the broker says so, looks more often, and misses nothing."""
    a, b = replicas
    tools, client = await a.tool_server(), a.client()

    async def deaf() -> bool:
        return await metric(b, "taskbroker_notifications_arrive") == 0

    await eventually(deaf)
    tasks = [await tools.create(client) for _ in range(30)]
    async with listening(b.http, client, [task.id for task in tasks]) as stream:
        assert len(await stream.acknowledged() or []) == len(tasks)
        for _ in tasks:
            await stream.task()
        for number, task in enumerate(tasks):
            await tools.complete(task, {"content": [], "n": number})
        async with asyncio.timeout(LOOK_SECONDS):
            *told, end = await stream.rest()
    assert {frame["params"]["taskId"] for frame in told} == {task.id for task in tasks}
    assert all(frame["params"]["status"] == "completed" for frame in told)
    assert end["result"]["resultType"] == "complete"
    assert await deaf(), "however often it has looked"


async def test_who_hears_only_itself_knows_that_it_is_deaf(
    database_url: str, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the only session there is, LISTEN seems to work: what it is told comes when it speaks."""
    monkeypatch.setattr(notifications, "PING_SECONDS", 0.2)
    monkeypatch.setattr(notifications, "DEAF_AFTER_SECONDS", 2)
    async with transaction_pooler(database_url, sessions=1) as url:
        db = Database(url, clock, pooled=True)
        running = asyncio.create_task(db.notifications.run())
        await eventually(lambda: db.notifications._said_deaf)
        assert not db.notifications.arrive
        async with db.own_connection() as another:
            left = await another.fetch("SELECT name FROM pg_settings WHERE source = 'session'")
        assert "synchronous_commit" not in {row["name"] for row in left}, "others want it"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await db.close()


async def test_the_doctor_finds_the_pooler(pooled_url: str) -> None:
    settings = test_settings(pooled_url, pooler="transaction")
    broker = create_broker(settings)
    try:
        finding = await CHECKS["listen"](broker, settings)
    finally:
        await broker.db.close()
    assert not finding.ok
    assert "pooler" in str(finding.mend)
