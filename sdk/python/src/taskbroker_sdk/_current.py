"""The task whose work is running."""

from typing import TypeVar, overload

from taskbroker_sdk._async import AsyncTask
from taskbroker_sdk._handle import Handle, running

T = TypeVar("T", bound=Handle)


@overload
def current_task() -> AsyncTask: ...
@overload
def current_task(kind: type[T]) -> T: ...
def current_task(kind: type[Handle] = AsyncTask) -> Handle:
    """The task for which `start` or `resume` runs the calling work, however deep inside.

    `current_task(Task)` where the client is the synchronous one. LookupError when there is none.
    """
    task = running.get()
    if isinstance(task, kind):
        return task
    raise LookupError(f"no work with a task of this kind ({kind.__name__}) is running here")
