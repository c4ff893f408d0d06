"""What a backend may say about a task, and what becomes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from app.domain import tasks
from app.domain.clock import after
from app.domain.lifetimes import UNSET, Lifetimes, Unset
from app.domain.signing import TOLERANCE_SECONDS
from app.domain.tasks import JsonText, RpcError, Status, Task, ToolResult
from app.errors import Fault, Refused


@dataclass(frozen=True, slots=True)
class Report:
    """A state of a task in a backend's words. Without a status it is progress."""

    status: Status | None = None
    status_message: JsonText | None = None
    result: ToolResult | None = None
    error: RpcError | None = None
    input_requests: Mapping[str, JsonText] | None = None
    poll_interval_ms: int | None = None
    ttl_ms: int | None | Unset = UNSET
    stall_after_ms: int | None | Unset = UNSET

    @property
    def outcome(self) -> bool:
        """Outcomes are never dropped for being late: a terminal status, new questions."""
        return self.input_requests is not None or (self.status is not None and self.status.terminal)


class Verdict(StrEnum):
    APPLIED = "applied"
    DUPLICATE = "duplicate"
    TERMINAL = "terminal"
    STALE = "stale"


_PAYLOADS = {
    "result": (Status.COMPLETED, "result"),
    "error": (Status.FAILED, "error"),
    "input_requests": (Status.INPUT_REQUIRED, "inputRequests"),
}


def check_payload(report: Report) -> None:
    """Refuses a payload without its status, and a terminal status without its payload."""
    faults = []
    for field, (status, member) in _PAYLOADS.items():
        given = getattr(report, field) is not None
        if given and report.status is not status:
            faults.append(Fault(f"/{member}", f"belongs to status {status} and to no other"))
        if not given and report.status is status and status.terminal:
            faults.append(Fault(f"/{member}", f"status {status} needs it"))
    if report.input_requests is not None and not report.input_requests:
        faults.append(Fault("/inputRequests", "name at least one request"))
    if faults:
        raise Refused("The payload does not fit the status.", faults=faults)


def check_sent_at(sent_at: datetime | None, now: datetime) -> None:
    """Refuses a time in the future: later progress would look stale beside it."""
    if sent_at is not None and (sent_at - now).total_seconds() > TOLERANCE_SECONDS:
        raise Refused("The event's timestamp lies in the future; check the sender's clock.")


def judge(task: Task, report: Report, sent_at: datetime | None, seen: bool) -> Verdict:
    """What to do with a report that is well formed.

    `sent_at` is the sender's own time of the event; `seen` says that its webhook-id was
    applied before.
    """
    if seen:
        return Verdict.DUPLICATE
    if task.status.terminal:
        return Verdict.TERMINAL
    late = sent_at is not None and task.reported_at is not None and sent_at < task.reported_at
    if late and not report.outcome:
        return Verdict.STALE
    return Verdict.APPLIED


def apply(
    task: Task,
    report: Report,
    sent_at: datetime | None,
    now: datetime,
    lifetimes: Lifetimes,
    cancel_grace_ms: int,
) -> Task:
    """The task after a report whose payload was checked; raises Refused when it does not fit."""
    task = _with_terms(task, report, lifetimes)
    moved = _moved(task, report, now)
    if report.status_message is not None:
        moved = replace(moved, status_message=report.status_message)
    if moved.cancel_due_at is not None:
        # The backend is alive and now knows of the wish: the grace counts from here.
        moved = replace(moved, cancel_due_at=after(now, cancel_grace_ms))
    if sent_at is not None and (task.reported_at is None or sent_at > task.reported_at):
        moved = replace(moved, reported_at=sent_at)
    return moved


def _moved(task: Task, report: Report, now: datetime) -> Task:
    if report.result is not None:
        return tasks.complete(task, report.result, now)
    if report.error is not None:
        return tasks.fail(task, report.error, now)
    if report.status is Status.CANCELLED:
        return tasks.cancel(task, now)
    if report.status is Status.INPUT_REQUIRED:
        return tasks.ask(task, report.input_requests or {}, now)
    if report.status is Status.WORKING:
        return tasks.resume(task, now)
    return tasks.touch(task, now)


def _with_terms(task: Task, report: Report, lifetimes: Lifetimes) -> Task:
    if report.poll_interval_ms is not None:
        task = replace(task, poll_interval_ms=report.poll_interval_ms)
    if report.stall_after_ms is not UNSET:
        task = replace(task, stall_after_ms=report.stall_after_ms)
    if report.ttl_ms is not UNSET:
        task = with_ttl(task, report.ttl_ms, lifetimes)
    return task


def with_ttl(task: Task, asked: int | None | Unset, lifetimes: Lifetimes) -> Task:
    """The task with the time to live that it is granted, counted from its creation."""
    granted = lifetimes.grant(asked)
    expires_at = None if granted is None else after(task.created_at, granted)
    return replace(task, ttl_ms=granted, expires_at=expires_at)
