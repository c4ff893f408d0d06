"""Cancel: the owner wishes it, the operator does it."""

from uuid import UUID

from app.broker.context import Broker, Caller
from app.broker.read import own_ref, own_task
from app.db.decisions import Change, Decide, Stored
from app.domain import signals, tasks
from app.domain.tasks import RpcError, Task
from app.errors import NotFound, Refused


class Ended(Refused):
    """The task is terminal already."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


async def request_cancel(broker: Broker, task_id: str, caller: Caller) -> None:
    """Records the owner's wish, once, for the backend to see; committed on return.

    Nothing changes on a terminal task. Raises NotFound or Expired.
    """

    def decision(stored: Stored) -> tuple[None, Change | None]:
        now = broker.clock()
        task = own_task(stored.task, caller, now)
        after = tasks.request_cancel(task, now, broker.policy.cancel_grace_ms)
        if after is task:
            return None, None
        signal = signals.cancel_requested(after, now)
        return None, Change(task, after, "cancel requested", "owner", now, signal=signal)

    await broker.db.decide(Decide(own_ref(broker, task_id, caller), decision))


async def cancel_now(broker: Broker, task_id: str, caller: Caller) -> Task:
    """Cancels without waiting for the backend; committed on return.

    Raises NotFound or Expired, and Ended for a task that is terminal already.
    """

    def decision(stored: Stored) -> tuple[Task, Change | None]:
        now = broker.clock()
        task = own_task(stored.task, caller, now)
        if task.status.terminal:
            raise Ended(task)
        after = tasks.cancel_at_once(task, now)
        wished_before = task.cancel_requested_at is not None
        signal = None if wished_before else signals.cancel_requested(after, now)
        return after, Change(task, after, "cancelled", "owner", now, signal=signal)

    return await broker.db.decide(Decide(own_ref(broker, task_id, caller), decision))


async def end_as_operator(broker: Broker, ref: UUID, error: RpcError | None) -> Task:
    """Ends a live task: cancelled, or failed with an error. Raises NotFound or Refused.

    Its backend is told to stop, either way.
    """

    def decision(stored: Stored) -> tuple[Task, Change | None]:
        now, task = broker.clock(), stored.task
        if task is None:
            raise NotFound
        after = tasks.cancel(task, now) if error is None else tasks.fail(task, error, now)
        what = "cancelled" if error is None else "failed"
        signal = signals.cancel_requested(after, now)
        return after, Change(task, after, what, "operator", now, signal=signal)

    return await broker.db.decide(Decide(ref, decision))
