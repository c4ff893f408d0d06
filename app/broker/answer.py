"""Answer: the owner answers questions of a task."""

from collections.abc import Mapping

from app.broker.context import Broker
from app.broker.read import own_ref, unexpired
from app.db.decisions import Change, Decide
from app.domain import tasks
from app.domain.task_ids import Fingerprints
from app.domain.tasks import JsonText, Task


async def answer(
    broker: Broker, task_id: str, owner: Fingerprints, responses: Mapping[str, JsonText]
) -> None:
    """Takes the answers to outstanding questions and ignores the rest; committed on return.

    Raises NotFound or Expired.
    """

    def decision(task: Task | None, _seen: bool) -> tuple[None, Change | None]:
        now = broker.clock()
        task = unexpired(task, now)
        after = tasks.answer(task, responses, now)
        if after is task:
            return None, None
        return None, Change(task, after, "answer", "owner", now)

    await broker.db.decide(Decide(own_ref(broker, task_id, owner), decision))
