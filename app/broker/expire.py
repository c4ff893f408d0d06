"""Expire: what the passing of time does to tasks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from app.broker.context import Broker
from app.db import sweeping
from app.db.engine import Driver
from app.domain import tasks
from app.domain.clock import after

BATCH = 500
EVENTS_REMEMBERED = timedelta(hours=25)


@dataclass(frozen=True, slots=True)
class Swept:
    """How many of each one pass took care of."""

    cancelled: int
    stalled: int
    purged: int
    events_forgotten: int

    def as_dict(self) -> dict[str, int]:
        return {
            "cancelled": self.cancelled,
            "stalled": self.stalled,
            "purged": self.purged,
            "eventsForgotten": self.events_forgotten,
        }


async def sweep(broker: Broker, connection: Driver) -> Swept:
    """One pass: unanswered cancels end, stalled tasks fail, expired ones are purged.

    In bounded batches, until one comes back short; other replicas may do the same at once.
    """

    def overdue(due: sweeping.Overdue) -> Callable[[], Awaitable[int]]:
        async def end_batch() -> int:
            ended = await sweeping.end_overdue(connection, due, broker.clock(), BATCH)
            broker.db.changes.tell(ended)
            return len(ended)

        return end_batch

    now = broker.clock()
    purge_before = after(now, -broker.policy.expired_grace_ms)
    return Swept(
        cancelled=await _until_short(overdue(CANCELS)),
        stalled=await _until_short(overdue(STALLS)),
        purged=await _until_short(lambda: sweeping.purge(connection, purge_before, BATCH)),
        events_forgotten=await _until_short(
            lambda: sweeping.forget_events(connection, now - EVENTS_REMEMBERED, BATCH)
        ),
    )


CANCELS = sweeping.Overdue(sweeping.CANCEL_DUE, tasks.end_unanswered_cancel, "cancel unanswered")
STALLS = sweeping.Overdue(sweeping.STALL_DUE, tasks.stall, "stalled")


async def _until_short(batch: Callable[[], Awaitable[int]]) -> int:
    total = 0
    while True:
        done = await batch()
        total += done
        if done < BATCH:
            return total
