"""Follow: an owner waits for tasks to change.

Who waits holds no connection, and outlives a database that is away.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from app.broker.context import Broker, Caller
from app.broker.read import own_ref, own_task
from app.domain.tasks import Task
from app.errors import Expired, NotFound, StorageUnavailable

AWAY_SECONDS = 0.5
"""How soon to try again when the database is away."""
READ_AT_ONCE = 10


async def follow(broker: Broker, task_id: str, caller: Caller) -> AsyncGenerator[Task, None]:
    """The caller's task as it is, and as it is after each change, to its end.

    Raises NotFound, or Expired, also when the time of the task ends meanwhile.
    """
    ref = own_ref(broker, task_id, caller)
    with broker.db.changes.watching([ref]) as watch:
        task = own_task(await broker.db.read(ref), caller, broker.clock())
        while True:
            yield task
            if task.status.terminal:
                broker.terminal_tasks.add(task)
                return
            seen = task
            while task == seen:
                await watch.changes(_seconds_until(broker, task.expires_at))
                task = own_task(await _read(broker, ref), caller, broker.clock())


class Seen(NamedTuple):
    """How a task is now."""

    task_id: str
    task: Task
    expired: bool
    """Its time has run out before it had ended; this is what was last seen of it."""


async def known_ids(broker: Broker, ids: Iterable[str], caller: Caller) -> list[str]:
    """Which of these ids name tasks that the caller may follow, in their order and once each."""
    refs: dict[UUID, str] = {}
    for task_id in ids:
        try:
            refs.setdefault(own_ref(broker, task_id, caller), task_id)
        except NotFound:
            continue
    known: list[str] = []
    every = list(refs)
    for start in range(0, len(every), READ_AT_ONCE):
        some = every[start : start + READ_AT_ONCE]
        for ref, task in zip(some, await asyncio.gather(*map(broker.db.read, some)), strict=True):
            try:
                own_task(task, caller, broker.clock())
            except (NotFound, Expired):
                continue
            known.append(refs[ref])
    return known


async def follow_all(
    broker: Broker, ids: Collection[str], caller: Caller
) -> AsyncGenerator[Seen, None]:
    """These tasks of the caller as they are, and each again after it may have changed, to the end
    of all. What changes while nobody asks for the next one is seen once, as it is then.
    """
    refs = {own_ref(broker, task_id, caller): task_id for task_id in ids}
    known: dict[UUID, Task] = {}
    with broker.db.changes.watching(refs) as watch:
        waiting = dict.fromkeys(refs)
        while refs:
            while not waiting:
                soonest = min(filter(None, (t.expires_at for t in known.values())), default=None)
                waiting |= dict.fromkeys(await watch.changes(_seconds_until(broker, soonest)))
                waiting |= dict.fromkeys(_expired(known, broker.clock()))
            ref = next(iter(waiting))
            del waiting[ref]
            if ref not in refs:
                continue
            try:
                task = own_task(await _read(broker, ref), caller, broker.clock())
            except (NotFound, Expired):
                task_id, last = refs.pop(ref), known.pop(ref, None)
                if last is not None:
                    yield Seen(task_id, last, expired=True)
                continue
            task_id = refs[ref]
            if task.status.terminal:
                del refs[ref]
                known.pop(ref, None)
            else:
                known[ref] = task
            yield Seen(task_id, task, expired=False)


def _expired(known: Mapping[UUID, Task], now: datetime) -> list[UUID]:
    return [ref for ref, task in known.items() if task.expired(now)]


def _seconds_until(broker: Broker, moment: datetime | None) -> float | None:
    return None if moment is None else max(0.0, (moment - broker.clock()).total_seconds())


async def _read(broker: Broker, ref: UUID) -> Task | None:
    while True:
        try:
            return await broker.db.read(ref)
        except StorageUnavailable:
            await asyncio.sleep(AWAY_SECONDS)
