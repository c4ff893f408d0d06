"""What the passing of time does to tasks, and what it must not do."""

from app.broker.expire import RETURN_GRACE, SIGNALS_KEPT, Swept, sweep
from app.db import signals
from app.db.signals import DeliveryFilter
from tests.support.clock import ShiftedClock
from tests.support.service import Service

STALL_MS = 5_000
DAY_MS = 86_400_000


async def test_a_task_is_not_stalled_because_the_broker_was_away(
    service: Service, clock: ShiftedClock
) -> None:
    """Nobody could report meanwhile: its tool server has some time to be heard again."""
    tools, client = await service.tool_server(), service.client()
    silent, heard = [await tools.create(client, stallAfterMs=STALL_MS) for _ in range(2)]
    clock.advance(seconds=60)
    back_since = clock()

    async def sweep_of_one_that_is_back() -> Swept:
        async with service.broker.db.own_connection() as connection:
            return await sweep(service.broker, connection, back_since)

    assert (await sweep_of_one_that_is_back()).stalled == 0
    await tools.report(heard, statusMessage="here I am")
    clock.advance(milliseconds=STALL_MS // 2)
    assert (await sweep_of_one_that_is_back()).stalled == 0
    clock.advance(milliseconds=STALL_MS // 2)
    assert (await sweep_of_one_that_is_back()).stalled == 1, "it was heard, and has fallen silent"
    clock.advance(milliseconds=int(RETURN_GRACE.total_seconds() * 1000))
    assert (await sweep_of_one_that_is_back()).stalled == 1
    assert (await client.get(silent.id))["status"] == "failed"


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
