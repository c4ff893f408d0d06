"""Follow: an owner waits for a task to change."""

import random
from collections.abc import AsyncGenerator

from app.broker.context import Broker, Caller
from app.broker.read import own_ref, own_task
from app.db.changes import changed
from app.domain.tasks import Task
from app.errors import StorageUnavailable

LOOK_SECONDS = 1.0
"""How often to look without having been woken: another process may have changed the task."""


async def follow(broker: Broker, task_id: str, caller: Caller) -> AsyncGenerator[Task, None]:
    """The caller's task as it is, and as it is after each change, to its end.

    Holds no connection while it waits, and outlives a database that is away. Raises NotFound, or
    Expired, also when the time of the task ends meanwhile.
    """
    ref = own_ref(broker, task_id, caller)
    with broker.db.changes.watching(ref) as change:
        task = own_task(await broker.db.read(ref), caller, broker.clock())
        while True:
            yield task
            if task.status.terminal:
                broker.terminal_tasks.add(task)
                return
            seen = task
            while task == seen:
                await changed(change, slow_look())
                try:
                    task = own_task(await broker.db.read(ref), caller, broker.clock())
                except StorageUnavailable:
                    continue


def slow_look() -> float:
    """Seconds until one who waits looks without having been woken."""
    return LOOK_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
