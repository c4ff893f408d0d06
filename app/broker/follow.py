"""Follow: an owner waits for tasks to change.

Who waits holds no connection, and outlives a database that is away.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
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
    """Its time has run out; this is what was last seen of it, without its payload."""


async def own_tasks(broker: Broker, ids: Iterable[str], caller: Caller) -> dict[str, Task]:
    """Those of these ids that name tasks of the caller, in their order and once each. The tasks
    are without their payload, so that many of them take little room.
    """
    refs: dict[UUID, str] = {}
    for task_id in ids:
        try:
            refs.setdefault(own_ref(broker, task_id, caller), task_id)
        except NotFound:
            continue
    known: dict[str, Task] = {}
    every = list(refs)
    for start in range(0, len(every), READ_AT_ONCE):
        some = every[start : start + READ_AT_ONCE]
        for ref, task in zip(some, await asyncio.gather(*map(broker.db.read, some)), strict=True):
            try:
                known[refs[ref]] = _bare(own_task(task, caller, broker.clock()))
            except (NotFound, Expired):
                continue
    return known


def _bare(task: Task) -> Task:
    return replace(task, status_message=None, result=None, error=None, inputs=())


async def follow_all(
    broker: Broker, tasks: Mapping[str, Task], caller: Caller
) -> AsyncGenerator[Seen, None]:
    """What `own_tasks` found, as it is, and each again after it may have changed, to the end of
    all. What changes while nobody asks for the next one is seen once, as it is then.
    """
    refs = {task.ref: task_id for task_id, task in tasks.items()}
    known = {task.ref: task for task in tasks.values()}
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
                yield Seen(refs.pop(ref), known.pop(ref), expired=True)
                continue
            seen = Seen(refs[ref], task, expired=False)
            if task.status.terminal:
                del refs[ref], known[ref]
            else:
                known[ref] = _bare(task)
            yield seen
            del task, seen  # they may be large, and the next one far


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
