"""Read: an owner polls a task by its id, a backend looks at its own by reference."""

from dataclasses import replace
from datetime import datetime
from uuid import UUID

from app.broker.context import Broker
from app.db import tasks as stored
from app.db.tasks import Filter
from app.domain.backends import Backend
from app.domain.task_ids import Fingerprints
from app.domain.tasks import Task
from app.errors import Expired, NotFound


def own_ref(broker: Broker, task_id: str, owner: Fingerprints) -> UUID:
    """The reference in an id that belongs to `owner`. No database is asked; raises NotFound."""
    ref = broker.keyring.verify(task_id, owner)
    if ref is None:
        raise NotFound
    return ref


def unexpired(task: Task | None, now: datetime) -> Task:
    """The task that was found. Raises NotFound when there is none, Expired when its time is up."""
    if task is None:
        raise NotFound
    if task.expired(now):
        raise Expired
    return task


async def read(broker: Broker, task_id: str, owner: Fingerprints) -> Task:
    """The owner's task. Raises NotFound or Expired."""
    ref = own_ref(broker, task_id, owner)
    task = broker.terminal_tasks.get(ref)
    if task is None or task.expired(broker.clock()):  # which may have been purged meanwhile
        task = unexpired(await broker.db.read(ref), broker.clock())
        broker.terminal_tasks.add(task)
    return task


async def read_of_backend(broker: Broker, backend: Backend, ref: UUID) -> Task:
    """A backend's own task, with every question and answer. Raises NotFound or Expired."""
    task = await broker.db.read(ref)
    if task is not None and task.backend_id != backend.id:
        raise NotFound
    return unexpired(task, broker.clock())


async def page(broker: Broker, wanted: Filter) -> tuple[list[Task], UUID | None]:
    """One page of tasks, newest first, and the reference that the next page starts before."""
    one_more = replace(wanted, limit=wanted.limit + 1)
    async with broker.db.transaction() as connection:
        found = await stored.page(connection, one_more)
    tasks = found[: wanted.limit]
    return tasks, tasks[-1].ref if len(found) > wanted.limit else None
