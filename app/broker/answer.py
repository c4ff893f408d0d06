"""Answer: the owner answers questions of a task."""

from collections.abc import Mapping

from app.broker.context import Broker, Caller
from app.broker.read import own_ref, own_task
from app.db.decisions import Change, Decide, Stored
from app.domain import signals, tasks
from app.domain.tasks import JsonText


async def answer(
    broker: Broker, task_id: str, caller: Caller, responses: Mapping[str, JsonText]
) -> None:
    """Takes the answers to outstanding questions and ignores the rest; committed on return.

    Raises NotFound or Expired.
    """

    def decision(stored: Stored) -> tuple[None, Change | None]:
        now = broker.clock()
        task = own_task(stored.task, caller, now)
        after = tasks.answer(task, responses, now)
        if after is task:
            return None, None
        signal = signals.input_received(task, after, now)
        return None, Change(task, after, "answer", "owner", now, signal=signal)

    await broker.db.decide(Decide(own_ref(broker, task_id, caller), decision))
