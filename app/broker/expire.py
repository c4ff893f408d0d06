"""Expire: what the passing of time does to tasks."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from app.broker.context import Broker
from app.db import sweeping
from app.db.decisions import Change
from app.db.engine import Driver
from app.db.statements import Statement
from app.domain import signals, tasks
from app.domain.clock import after
from app.domain.tasks import Task

BATCH = 500
EVENTS_REMEMBERED = timedelta(hours=25)
SIGNALS_KEPT = timedelta(days=7)
_EVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Swept:
    """How many of each one pass took care of."""

    cancelled: int
    stalled: int
    expired: int
    purged: int
    events_forgotten: int
    signals_forgotten: int

    def as_dict(self) -> dict[str, int]:
        return {_camel(name): count for name, count in asdict(self).items()}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


async def sweep(broker: Broker, connection: Driver, since: datetime | None = None) -> Swept:
    """One pass: unanswered cancels end, stalled tasks fail, expired ones are noticed, and what is
    no longer needed is deleted.

    In bounded batches, until one comes back short; other replicas may do the same at once. `since`
    is when the broker could be reached again after it was away: nobody could report before, so
    silence counts from then on.
    """

    async def overdue(due: Statement, **more: object) -> int:
        async def end_batch() -> int:
            ended = await sweeping.end_overdue(
                connection, due, _let_time_pass, broker.clock(), BATCH, **more
            )
            broker.db.tell(ended.changes)
            return ended.taken

        return await _until_short(end_batch)

    now = broker.clock()
    purge_before = after(now, -broker.policy.expired_grace_ms)
    silent_since = since or _EVER
    return Swept(
        cancelled=await overdue(
            sweeping.CANCEL_DUE, silent_since=silent_since, grace_ms=broker.policy.cancel_grace_ms
        ),
        stalled=await overdue(sweeping.STALL_DUE, silent_since=silent_since),
        expired=await overdue(sweeping.EXPIRY_DUE),
        purged=await _until_short(lambda: sweeping.purge(connection, purge_before, BATCH)),
        events_forgotten=await _until_short(
            lambda: sweeping.forget_events(connection, now - EVENTS_REMEMBERED, BATCH)
        ),
        signals_forgotten=await _until_short(
            lambda: sweeping.forget_signals(connection, now - SIGNALS_KEPT, BATCH)
        ),
    )


def _let_time_pass(task: Task, now: datetime) -> Change | None:
    """What time has done to a task, if anything."""
    if (moved := tasks.expire(task, now)) is not task:
        signal = signals.expired(moved, now)
        return Change(task, moved, "expired", "sweeper", now, signal=signal)
    if (moved := tasks.end_unanswered_cancel(task, now)) is not task:
        return Change(task, moved, "cancel unanswered", "sweeper", now)
    if (moved := tasks.stall(task, now)) is not task:
        signal = signals.stalled(moved, now)
        return Change(task, moved, "stalled", "sweeper", now, signal=signal)
    return None


async def _until_short(batch: Callable[[], Awaitable[int]]) -> int:
    total = 0
    while True:
        done = await batch()
        total += done
        if done < BATCH:
            return total
