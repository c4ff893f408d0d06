"""Report: a backend says what became of a task."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.broker.context import Broker
from app.broker.read import unexpired
from app.db import tasks as stored
from app.db.decisions import Change, Decide, Stored
from app.domain import events
from app.domain.backends import Backend
from app.domain.events import Report, Verdict
from app.domain.task_ids import peek_ref
from app.domain.tasks import Task
from app.errors import Fault, NotFound, Refused


@dataclass(frozen=True, slots=True)
class TaskName:
    """How a backend names a task: by at least one of these."""

    ref: UUID | None = None
    external_id: str | None = None
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An inbound event: the state that it reports, and when it was sent by the sender's clock."""

    name: TaskName
    report: Report
    sent_at: datetime | None = None
    webhook_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    verdict: Verdict
    task: Task
    """The task as it stands now, with every answer of its client."""
    newest_signal: int | None = None
    """The newest signal whose news are in this; `None` if the backend has all of them."""

    @property
    def is_the_end(self) -> bool:
        """Whether the backend has ended its task by this: there is nothing left for it to learn."""
        return self.verdict is Verdict.APPLIED and self.task.status.terminal


async def report(broker: Broker, backend: Backend, event: Event) -> Reported:
    """Applies an event once; committed when this returns.

    Raises NotFound, Expired, or Refused when the event does not fit the task.
    """
    events.check_payload(event.report)
    events.check_sent_at(event.sent_at, broker.clock())
    ref = await _locate(broker, backend, event.name)
    lifetimes = broker.policy.lifetimes_for(backend)

    def decision(stored: Stored) -> tuple[Reported, Change | None]:
        now = broker.clock()
        task = unexpired(_own(broker, backend, event.name, stored.task), now)
        verdict = events.judge(task, event.report, event.sent_at, stored.seen)
        if verdict is not Verdict.APPLIED:
            return Reported(verdict, task, stored.newest_signal), None
        after = events.apply(
            task, event.report, event.sent_at, now, lifetimes, broker.policy.cancel_grace_ms
        )
        what = "progress" if after.status is task.status and not event.report.outcome else "report"
        change = Change(task, after, what, "backend", now, event.webhook_id)
        return Reported(verdict, after, stored.newest_signal), change

    return await broker.db.decide(Decide(ref, decision, event.webhook_id))


async def _locate(broker: Broker, backend: Backend, name: TaskName) -> UUID:
    if name.ref is not None:
        return name.ref
    if name.task_id is not None:
        return peek_ref(name.task_id)
    assert name.external_id is not None  # a name has at least one part
    async with broker.db.transaction() as connection:
        ref = await stored.ref_of(connection, backend.id, name.external_id)
    if ref is None:
        raise NotFound
    return ref


def _own(broker: Broker, backend: Backend, name: TaskName, task: Task | None) -> Task:
    if task is None or task.backend_id != backend.id:
        raise NotFound
    if name.task_id is not None:
        named = broker.keyring.verify_stored(name.task_id, task.owner)
        if name.ref is None and named is None:
            raise NotFound
        if named != task.ref:
            raise _another("taskId")
    if name.external_id is not None and name.external_id != task.external_id:
        raise _another("externalId")
    return task


def _another(member: str) -> Refused:
    return Refused(
        "The names in the event do not belong to one task.",
        faults=[Fault(f"/{member}", "names another task, or none")],
    )
