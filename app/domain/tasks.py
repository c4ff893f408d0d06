"""A task, and every move that it can make.

                 ask                       complete | fail | cancel
    ┌─────────┐ ─────► ┌────────────────┐ ─────────────────────────► ╔═══════════╗
    │ working │        │ input_required │                            ║ completed ║
    └─────────┘ ◄───── └────────────────┘                            ║ failed    ║
         │   answer (all of them), resume                            ║ cancelled ║
         └─────────────────────────────────────────────────────────► ╚═══════════╝
                          complete | fail | cancel                     (terminal)

A terminal task never changes again. One function per move; each takes a task and returns the
next one, or raises Refused. The database's CHECK constraints restate what is written here.
(MCP Tasks extension, "Task Status"; SEP-2663.)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from app.domain.clock import after
from app.errors import Fault, Refused

JsonText = str
"""A JSON value as the text that came in: validated, never re-serialised."""

INTERNAL_ERROR = -32603


class Status(StrEnum):
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


LIVE = (Status.WORKING, Status.INPUT_REQUIRED)
TERMINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class InputRequest:
    """A question to the client. Its key is unique for the life of the task."""

    key: str
    request: JsonText
    response: JsonText | None = None
    superseded: bool = False

    @property
    def outstanding(self) -> bool:
        return self.response is None and not self.superseded


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the tool returned, and two facts about the text so that nobody need read it again.

    `typed`: it has a `resultType` of its own; `is_error`: it has `"isError": true`.
    """

    text: JsonText
    typed: bool
    is_error: bool


@dataclass(frozen=True, slots=True)
class RpcError:
    """A JSON-RPC error object as the backend wrote it, and the message inside, as JSON text."""

    text: JsonText
    message: JsonText


def rpc_error(code: int, message: str) -> RpcError:
    """An error of the broker's own making."""
    return RpcError(json.dumps({"code": code, "message": message}), json.dumps(message))


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Times are UTC, durations milliseconds; the field order is that of the table."""

    ref: UUID
    backend_id: int
    owner: bytes
    key_id: int
    external_id: str | None
    tool: str | None
    status: Status
    status_message: JsonText | None
    result: JsonText | None
    result_typed: bool
    result_is_error: bool
    error: JsonText | None
    created_at: datetime
    updated_at: datetime
    ttl_ms: int | None
    expires_at: datetime | None
    poll_interval_ms: int | None
    reported_at: datetime | None
    cancel_requested_at: datetime | None
    cancel_due_at: datetime | None
    stall_after_ms: int | None
    stall_due_at: datetime | None
    expired_at: datetime | None = None
    """When it was noticed that the time of the live task had run out."""
    asked: bool = False
    inputs: tuple[InputRequest, ...] = ()

    def expired(self, now: datetime) -> bool:
        # What one replica has noticed holds for others, whose clocks may be behind.
        over = self.expires_at is not None and self.expires_at <= now
        return over or self.expired_at is not None

    @property
    def outstanding(self) -> tuple[InputRequest, ...]:
        return tuple(question for question in self.inputs if question.outstanding)

    @property
    def responses(self) -> dict[str, JsonText]:
        """Every answer that the client has given so far, by key."""
        return {q.key: q.response for q in self.inputs if q.response is not None}


def begin(
    *,
    ref: UUID,
    backend_id: int,
    owner: bytes,
    key_id: int,
    external_id: str | None,
    tool: str | None,
    poll_interval_ms: int | None,
    now: datetime,
) -> Task:
    """A new task, working. `owner` is a fingerprint under the server key `key_id`."""
    return Task(
        ref=ref,
        backend_id=backend_id,
        owner=owner,
        key_id=key_id,
        external_id=external_id,
        tool=tool,
        status=Status.WORKING,
        status_message=None,
        result=None,
        result_typed=False,
        result_is_error=False,
        error=None,
        created_at=now,
        updated_at=now,
        ttl_ms=None,
        expires_at=None,
        poll_interval_ms=poll_interval_ms,
        reported_at=None,
        cancel_requested_at=None,
        cancel_due_at=None,
        stall_after_ms=None,
        stall_due_at=None,
    )


# --- moves of the backend ---------------------------------------------------------------------


def ask(task: Task, requests: Mapping[str, JsonText], now: datetime) -> Task:
    """→ input_required. Questions add to those still outstanding; a used key is refused."""
    _must_be_live(task)
    used = {question.key for question in task.inputs}
    faults = [
        Fault(f"/inputRequests/{pointer_token(key)}", "this key was already used on this task")
        for key in requests
        if key in used
    ]
    if faults:
        raise Refused("An input request key is unique for the life of a task.", faults=faults)
    asked = tuple(InputRequest(key, request) for key, request in requests.items())
    inputs = task.inputs + asked
    if not any(question.outstanding for question in inputs):
        raise Refused(
            "A task in input_required needs at least one outstanding input request.",
            faults=[Fault("/inputRequests", "name at least one request")],
        )
    return _moved(task, now, Status.INPUT_REQUIRED, inputs=inputs, asked=True, stall_due_at=None)


def resume(task: Task, now: datetime) -> Task:
    """→ working. Questions that nobody answered are superseded."""
    _must_be_live(task)
    inputs = tuple(replace(q, superseded=True) if q.outstanding else q for q in task.inputs)
    return _moved(task, now, Status.WORKING, inputs=inputs, stall_due_at=_stall_due(task, now))


def complete(task: Task, result: ToolResult, now: datetime) -> Task:
    """→ completed."""
    return _ended(
        task,
        now,
        Status.COMPLETED,
        result=result.text,
        result_typed=result.typed,
        result_is_error=result.is_error,
    )


def fail(task: Task, error: RpcError, now: datetime) -> Task:
    """→ failed. Only for JSON-RPC errors: a tool that ran and reports failure has completed.

    The status message says what went wrong unless the backend says it better.
    """
    return _ended(task, now, Status.FAILED, error=error.text, status_message=error.message)


def cancel(task: Task, now: datetime) -> Task:
    """→ cancelled."""
    return _ended(task, now, Status.CANCELLED)


def touch(task: Task, now: datetime) -> Task:
    """No other status: a progress report."""
    _must_be_live(task)
    waits_for_client = task.status is Status.INPUT_REQUIRED
    return _touched(task, now, stall_due_at=None if waits_for_client else _stall_due(task, now))


# --- moves of the client ----------------------------------------------------------------------


def answer(task: Task, responses: Mapping[str, JsonText], now: datetime) -> Task:
    """Takes the answers to outstanding questions; → working when none is left.

    Keys that are not outstanding are ignored, and nothing changes on a terminal task.
    """
    open_keys = {question.key for question in task.outstanding} & responses.keys()
    if task.status.terminal or not open_keys:
        return task
    inputs = tuple(
        replace(q, response=responses[q.key]) if q.key in open_keys else q for q in task.inputs
    )
    if any(question.outstanding for question in inputs):
        return _touched(task, now, inputs=inputs)
    return _moved(task, now, Status.WORKING, inputs=inputs, stall_due_at=_stall_due(task, now))


def request_cancel(task: Task, now: datetime, grace_ms: int) -> Task:
    """Records the wish. The backend has `grace_ms` to answer it; asking twice changes nothing."""
    if task.status.terminal or task.cancel_requested_at is not None:
        return task
    return replace(task, cancel_requested_at=now, cancel_due_at=after(now, grace_ms))


def cancel_at_once(task: Task, now: datetime) -> Task:
    """→ cancelled, by the wish alone; the backend learns of it when it reports."""
    wish = task.cancel_requested_at or now
    return cancel(replace(task, cancel_requested_at=wish), now)


# --- moves of the clock -----------------------------------------------------------------------


def end_unanswered_cancel(task: Task, now: datetime) -> Task:
    """→ cancelled, when the backend let the grace of a cancel wish pass in silence."""
    if task.status.terminal or task.cancel_due_at is None or task.cancel_due_at > now:
        return task
    message = json.dumps("Cancelled: the tool server did not answer the request to cancel")
    return replace(cancel(task, now), status_message=message)


def expire(task: Task, now: datetime) -> Task:
    """Ends all waiting for a live task whose time has run out. Its status stays as it was."""
    if task.status.terminal or task.expired_at is not None or not task.expired(now):
        return task
    return replace(task, expired_at=now, cancel_due_at=None, stall_due_at=None)


def stall(task: Task, now: datetime) -> Task:
    """→ failed, when no event came for as long as the backend had promised one."""
    if task.status.terminal or task.stall_due_at is None or task.stall_due_at > now:
        return task
    return fail(task, rpc_error(INTERNAL_ERROR, "the tool server stopped reporting"), now)


# --- what the moves share ---------------------------------------------------------------------


def pointer_token(key: str) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _must_be_live(task: Task) -> None:
    if task.status.terminal:
        raise Refused(f"The task is already {task.status} and never changes again.")


def _stall_due(task: Task, now: datetime) -> datetime | None:
    # The clock stands still while the task waits for its client, not for its tool server.
    if task.stall_after_ms is None:
        return None
    return after(now, task.stall_after_ms)


def _touched(task: Task, now: datetime, **fields: object) -> Task:
    return replace(task, updated_at=max(now, task.updated_at), **fields)  # type: ignore[arg-type]


def _moved(task: Task, now: datetime, status: Status, **fields: object) -> Task:
    # A message describes the status that it came with; it does not outlive a change of it.
    message = task.status_message if status is task.status else None
    return _touched(task, now, **{"status_message": message} | fields, status=status)


def _ended(task: Task, now: datetime, status: Status, **fields: object) -> Task:
    _must_be_live(task)
    return _moved(task, now, status, cancel_due_at=None, stall_due_at=None, **fields)
