"""Read: an owner polls a task by its id, a backend looks at its own by reference."""

from dataclasses import replace
from datetime import datetime
from uuid import UUID

from app.broker.context import Broker, Caller
from app.db import tasks as stored
from app.db.tasks import Filter
from app.domain.backends import Backend
from app.domain.tasks import Task
from app.errors import Expired, NotFound


def own_ref(broker: Broker, task_id: str, caller: Caller) -> UUID:
    """The reference in an id that belongs to the caller. No database is asked; raises NotFound."""
    ref = broker.keyring.verify(task_id, caller.owner)
    if ref is None:
        raise NotFound
    return ref


def own_task(task: Task | None, caller: Caller, now: datetime) -> Task:
    """The task that was found for a caller's id. Raises NotFound or Expired."""
    if task is not None and caller.backend_id not in (None, task.backend_id):
        raise NotFound
    return unexpired(task, now)


def unexpired(task: Task | None, now: datetime) -> Task:
    """The task that was found. Raises NotFound when there is none, Expired when its time is up."""
    if task is None:
        raise NotFound
    if task.expired(now):
        raise Expired
    return task


async def read(broker: Broker, task_id: str, caller: Caller) -> Task:
    """The caller's task. Raises NotFound or Expired."""
    ref = own_ref(broker, task_id, caller)
    ended = broker.terminal_tasks.get(ref)
    if ended is not None and not ended.expired(broker.clock()):  # else it may be purged by now
        return own_task(ended, caller, broker.clock())
    task = own_task(await broker.db.read(ref), caller, broker.clock())
    broker.terminal_tasks.add(task)
    return task


async def read_of_backend(broker: Broker, backend: Backend, ref: UUID) -> Task:
    """A backend's own task, with every question and answer. Raises NotFound or Expired."""
    task = await broker.db.read(ref)
    if task is not None and task.backend_id != backend.id:
        raise NotFound
    return unexpired(task, broker.clock())


async def page_of_owner(
    broker: Broker, caller: Caller, before: UUID | None, limit: int
) -> tuple[list[Task], UUID | None]:
    """One page of the caller's tasks, as `page`."""
    wanted = Filter(
        broker.clock(), caller.backend_id, owner=caller.owner, before=before, limit=limit
    )
    return await page(broker, wanted)


async def page(broker: Broker, wanted: Filter) -> tuple[list[Task], UUID | None]:
    """One page of tasks, newest first, and the reference that the next page starts before."""
    one_more = replace(wanted, limit=wanted.limit + 1)
    async with broker.db.transaction() as connection:
        found = await stored.page(connection, one_more)
    tasks = found[: wanted.limit]
    return tasks, tasks[-1].ref if len(found) > wanted.limit else None
