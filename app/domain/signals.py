"""What a backend must learn about a task that did not come from itself, and when to say it again.

A signal is written in the transaction that causes it, and is pending until its backend has it:

    pending ──► delivered   its callback answered 2xx
            ──► seen        it came with a reply, or was fetched and acknowledged
            ──► dead        the last attempt failed; an operator may have it sent again
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from uuid import UUID

from app.domain.clock import after, iso
from app.domain.tasks import JsonText, Task

RETRIES_MS = (5_000, 30_000, 120_000, 300_000, 1_800_000, 7_200_000, 18_000_000, 36_000_000)
"""How long to wait after each attempt that failed; after the attempt that follows, no more."""

JITTER = 0.2
"""By how much of itself a wait may be longer, so that what failed together is not retried so."""

LONGEST_RETRY_AFTER_MS = 3_600_000
_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)


class SignalType(StrEnum):
    CANCEL_REQUESTED = "task.cancel_requested"
    INPUT_RECEIVED = "task.input_received"
    EXPIRED = "task.expired"
    STALLED = "task.stalled"


class SignalStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    SEEN = "seen"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Signal:
    """A new signal. `body` is what the backend gets: the same bytes, however often it is sent."""

    type: SignalType
    backend_id: int
    task_ref: UUID
    at: datetime
    body: JsonText


def cancel_requested(task: Task, now: datetime) -> Signal:
    """Somebody wants the work to stop. The status says whether the task has ended by that."""
    return _signal(SignalType.CANCEL_REQUESTED, task, now)


def input_received(before: Task, task: Task, now: datetime) -> Signal:
    """The client answered; only what is new since `before` is told."""
    known = before.responses.keys()
    new = {key: answer for key, answer in task.responses.items() if key not in known}
    return _signal(SignalType.INPUT_RECEIVED, task, now, inputResponses=_object(new))


def expired(task: Task, now: datetime) -> Signal:
    """The time of a live task has run out."""
    return _signal(SignalType.EXPIRED, task, now)


def stalled(task: Task, now: datetime) -> Signal:
    """A task has failed because nothing was heard of it."""
    return _signal(SignalType.STALLED, task, now)


def _signal(kind: SignalType, task: Task, now: datetime, **more: JsonText) -> Signal:
    data = {"taskRef": json.dumps(str(task.ref))}
    if task.external_id is not None:
        data["externalId"] = json.dumps(task.external_id)
    data["status"] = json.dumps(task.status)
    body = {
        "type": json.dumps(kind),
        "timestamp": json.dumps(iso(now)),
        "data": _object(data | more),
    }
    return Signal(kind, task.backend_id, task.ref, now, _object(body))


def _object(members: Mapping[str, JsonText]) -> JsonText:
    return "{" + ",".join([f"{json.dumps(name)}:{text}" for name, text in members.items()]) + "}"


def next_attempt(
    made: int, now: datetime, chance: float, retry_after_ms: int | None = None
) -> datetime | None:
    """When to try again after `made` attempts, all of them failed; `None` is never.

    `chance` is a random number from 0 to 1. What the backend itself asked for is a least wait.
    """
    if made > len(RETRIES_MS):
        return None
    wait = RETRIES_MS[made - 1] * (1 + JITTER * chance)
    return after(now, int(max(wait, retry_after_ms or 0)))


def retry_after(value: str, now: datetime) -> int | None:
    """The wait that a `Retry-After` header asks for, in milliseconds and up to the cap.

    Seconds or a date (RFC 9110, 10.2.3); `None` for anything else, and for what lies in the past.
    """
    value = value.strip()
    if _SECONDS.fullmatch(value):
        wait = int(value) * 1000
    else:
        try:
            moment = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if moment.tzinfo is None:  # "-0000": UTC, says RFC 5322, from nowhere in particular
            moment = moment.replace(tzinfo=UTC)
        wait = int((moment - now).total_seconds() * 1000)
    return min(wait, LONGEST_RETRY_AFTER_MS) if wait > 0 else None
