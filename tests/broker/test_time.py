"""What the passing of time does to tasks, and what it must not do."""

from app.broker.expire import SIGNALS_KEPT, sweep
from app.db import signals
from app.db.signals import DeliveryFilter
from tests.support.clock import ShiftedClock
from tests.support.service import Service, running_service

STALL_MS = 5_000
DAY_MS = 86_400_000


async def test_silence_counts_from_the_return_of_a_broker_that_was_away(
    service: Service, clock: ShiftedClock
) -> None:
    """Nobody could report meanwhile: each tool server has its promised time once more."""
    tools, client = await service.tool_server(), service.client()
    silent, heard, cancelled = [await tools.create(client, stallAfterMs=STALL_MS) for _ in range(3)]
    await client.cancel(cancelled.id)
    clock.advance(seconds=60)
    back_since = clock()

    async def sweep_of_one_that_is_back() -> tuple[int, int]:
        async with service.broker.db.own_connection() as connection:
            swept = await sweep(service.broker, connection, back_since)
        return swept.stalled, swept.cancelled

    assert await sweep_of_one_that_is_back() == (0, 0)
    clock.advance(milliseconds=STALL_MS // 2)
    await tools.report(heard, statusMessage="here I am")
    await tools.report(cancelled, stallAfterMs=None)
    assert await sweep_of_one_that_is_back() == (0, 0)
    clock.advance(milliseconds=STALL_MS // 2 + 1)
    assert await sweep_of_one_that_is_back() == (1, 0), "the one that is silent"
    assert (await client.get(silent.id))["status"] == "failed"
    clock.advance(milliseconds=STALL_MS)
    assert await sweep_of_one_that_is_back() == (1, 0)
    clock.advance(milliseconds=service.settings.cancel_grace_ms)
    assert await sweep_of_one_that_is_back() == (0, 1)


async def test_an_unanswered_wish_has_its_grace_after_the_return(
    service: Service, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await client.cancel(task.id)
    grace_ms = service.settings.cancel_grace_ms
    clock.advance(milliseconds=2 * grace_ms)
    back_since = clock()
    async with service.broker.db.own_connection() as connection:
        assert (await sweep(service.broker, connection, back_since)).cancelled == 0
        clock.advance(milliseconds=grace_ms)
        assert (await sweep(service.broker, connection, back_since)).cancelled == 1


async def test_what_one_replica_has_noticed_holds_for_one_whose_clock_is_behind(
    service: Service, database_url: str, clock: ShiftedClock
) -> None:
    behind = ShiftedClock()
    async with running_service(service.settings, behind) as late:
        tools, client = await service.tool_server(), service.client()
        task = await tools.create(client, ttlMs=60_000)
        clock.advance(seconds=61)
        assert (await service.sweep()).expired == 1
        there = client.at(late)
        assert "expired" in (await there.error("tasks/cancel", task.id))["message"]
        assert "expired" in (await there.error("tasks/get", task.id))["message"]
        assert (await tools.at(late).report(task, stallAfterMs=1_000)).status_code == 410


async def test_a_broker_that_was_not_away_stalls_at_once(
    service: Service, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    back_since = clock()
    await tools.create(client, stallAfterMs=STALL_MS)
    clock.advance(milliseconds=STALL_MS + 1)
    async with service.broker.db.own_connection() as connection:
        swept = await sweep(service.broker, connection, back_since)
    assert swept.stalled == 1


async def test_an_expired_task_does_not_stall_nor_end_by_its_wish(
    service: Service, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=1_000, stallAfterMs=STALL_MS)
    await client.cancel(task.id)
    clock.advance(seconds=60)
    await service.sweep()
    assert [entry.what for entry in await service.history(task)] == [
        "created",
        "cancel requested",
        "expired",
    ]


async def test_polling_does_not_change_when_a_task_was_updated(
    service: Service, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    before = (await client.get(task.id))["lastUpdatedAt"]
    clock.advance(seconds=10)
    assert (await client.get(task.id))["lastUpdatedAt"] == before
    await client.cancel(task.id)
    await client.cancel(task.id)
    assert (await client.get(task.id))["lastUpdatedAt"] == before, "a wish changes nothing yet"
    await tools.report(task, statusMessage="half way")
    assert (await client.get(task.id))["lastUpdatedAt"] > before


async def test_signals_are_forgotten_after_a_week(service: Service, clock: ShiftedClock) -> None:
    tools, client = await service.tool_server(), service.client()
    old, young = [await tools.create(client, ttlMs=6 * DAY_MS) for _ in range(2)]
    await client.cancel(old.id)
    clock.advance(milliseconds=DAY_MS)
    await client.cancel(young.id)
    clock.advance(milliseconds=int(SIGNALS_KEPT.total_seconds() * 1000) - DAY_MS)
    swept = await service.sweep()
    assert swept.signals_forgotten == 1
    async with service.broker.db.transaction() as connection:
        kept = await signals.listing(connection, DeliveryFilter())
    wishes = [signal for signal in kept if signal.type == "task.cancel_requested"]
    assert [str(wish.task_ref) for wish in wishes] == [young.ref]
