"""Read: an owner polls a task by its id, a backend looks at its own by reference."""

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


async def read(broker: Broker, task_id: str, owner: Fingerprints) -> Task:
    """The owner's task. Raises NotFound or Expired."""
    ref = own_ref(broker, task_id, owner)
    task = broker.terminal_tasks.get(ref)
    if task is None or task.expired(broker.clock()):  # which may have been purged meanwhile
        task = await broker.db.read(ref)
        if task is None:
            raise NotFound
        broker.terminal_tasks.add(task)
    if task.expired(broker.clock()):
        raise Expired
    return task


async def read_of_backend(broker: Broker, backend: Backend, ref: UUID) -> Task:
    """A backend's own task, with every question and answer. Raises NotFound or Expired."""
    task = await broker.db.read(ref)
    if task is None or task.backend_id != backend.id:
        raise NotFound
    if task.expired(broker.clock()):
        raise Expired
    return task


async def page(broker: Broker, wanted: Filter) -> tuple[list[Task], UUID | None]:
    """One page of tasks, newest first, and the reference that the next page starts before."""
    one_more = Filter(
        wanted.now,
        wanted.backend_id,
        wanted.status,
        wanted.external_id,
        wanted.before,
        wanted.limit + 1,
    )
    async with broker.db.transaction() as connection:
        found = await stored.page(connection, one_more)
    tasks = found[: wanted.limit]
    return tasks, tasks[-1].ref if len(found) > wanted.limit else None
