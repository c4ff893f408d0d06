"""What is said to a broker and what it answers, as values. No I/O and no clock."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Any, Literal, Self, TypedDict, TypeVar, cast
from urllib.parse import quote, urlencode

from taskbroker_sdk._errors import CancelRequested, Problem, Unreachable, ended_already

Json = Mapping[str, Any]
"""A JSON object."""

Status = Literal["working", "input_required", "completed", "failed", "cancelled"]
TERMINAL = frozenset({"completed", "failed", "cancelled"})
PAGE = 200
PROBLEMS = "urn:taskbroker:problem:"
"""How the `type` of each problem document of a broker begins, and of nobody else."""

T = TypeVar("T")


# --- What is said ------------------------------------------------------------------------------


class Event(TypedDict, total=False):
    """What can be said about a task. What is left out stays as it is."""

    status: Status
    status_message: str
    result: Json
    error: Json
    input_requests: Mapping[str, Json]
    poll_interval_ms: int
    ttl_ms: int | None
    stall_after_ms: int | None


class NewTask(Event, total=False):
    """What can be said when a task is created."""

    external_id: str
    tool: str


@dataclass(frozen=True)
class Request:
    """One request, whoever sends it and however often."""

    method: str
    path: str
    body: bytes | None = field(default=None, repr=False)
    webhook_id: str | None = None
    """Makes every repetition of an event the same event."""
    wait: int = 0
    """How many seconds longer than usual its answer may take."""


def create(owner: Json, task: NewTask) -> Request:
    return Request("POST", "/v1/tasks", _encode({"owner": owner, **_camel(task, NewTask)}))


def event(
    backend: str, ref: str, said: Event, webhook_id: str, happened_at: datetime | None
) -> Request:
    """An event. Without `happened_at` it is neither late nor makes others late."""
    body: dict[str, Any] = {"type": "task.updated"}
    if happened_at is not None:
        body["timestamp"] = happened_at.isoformat(timespec="milliseconds")
    body["data"] = {"taskRef": ref, **_camel(said, Event)}
    return Request("POST", f"/v1/webhooks/{_segment(backend)}", _encode(body), webhook_id)


def read(ref: str) -> Request:
    return Request("GET", f"/v1/tasks/{_segment(ref)}")


def listing(query: Mapping[str, str | int | None]) -> Request:
    given = {name: value for name, value in query.items() if value is not None}
    return Request("GET", f"/v1/tasks?{urlencode(given)}")


def signals(after: str | None, wait: int) -> Request:
    query = {"wait": wait} if after is None else {"after": after, "wait": wait}
    return Request("GET", f"/v1/signals?{urlencode(query)}", wait=wait)


def _segment(text: str) -> str:
    return quote(text, safe="")


def _camel(members: Mapping[str, Any], shape: type) -> dict[str, Any]:
    """The members under their names on the wire. TypeError for a name that does not exist."""
    unknown = members.keys() - shape.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such argument: {', '.join(sorted(unknown))}")
    return {_camel_name(name): value for name, value in members.items()}


def _camel_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _encode(value: object) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it has half a surrogate pair" if isinstance(error, UnicodeError) else error
        raise ValueError(f"this cannot be sent as JSON: {reason}") from None


# --- What comes back ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, whatever it says."""

    status: int
    body: bytes = field(repr=False)
    retry_after: str | None = None


@dataclass(frozen=True)
class Lost:
    """No answer came; `reason` is the name of what happened."""

    reason: str


@dataclass(frozen=True)
class Created:
    """A task that is kept from now on, and what to return for it from `tools/call`."""

    ref: str
    create_task_result: dict[str, Any] = field(repr=False)
    create_task_result_legacy: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, reply: Json) -> Self:
        created = checked(dict, reply["createTaskResult"])
        checked(str, created["status"])
        return cls(
            ref=checked(str, reply["taskRef"]),
            create_task_result=created,
            create_task_result_legacy=checked(dict, reply["createTaskResultLegacy"]),
        )


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """A task as the broker sees it, and what its client wants."""

    ref: str
    external_id: str | None
    tool: str | None
    status: Status
    status_message: str | None
    created_at: datetime
    last_updated_at: datetime
    ttl_ms: int | None
    """From its creation; None: unlimited."""
    poll_interval_ms: int | None
    stall_after_ms: int | None
    cancel_requested: bool
    input_responses: Mapping[str, Any] = field(repr=False)
    """All answers so far, by the keys of the questions."""
    input_requests: Mapping[str, Any] | None = field(repr=False)
    """The open questions, where one task was read."""
    result: Any = field(repr=False)
    """Where one task was read."""
    error: Any = field(repr=False)
    """Where one task was read."""
    applied: bool | None
    """Whether the event that this answers was applied; None: it answers no event."""
    reason: str | None
    """Why it was not: `duplicate`, `terminal`, `stale`."""

    @property
    def over(self) -> bool:
        """Whether the task has ended and can never change again."""
        return self.status in TERMINAL

    @property
    def reason_to_stop(self) -> CancelRequested | None:
        """Why nobody needs the work any more, if so."""
        if self.cancel_requested:
            return CancelRequested()
        if self.over:
            return ended_already(self.status)
        return None

    @classmethod
    def of(cls, reply: Json) -> Self:
        """From a task as it is read or listed, or from the answer to an event."""
        task = reply.get("task", reply)
        return cls(
            ref=checked(str, task["taskRef"]),
            external_id=task.get("externalId"),
            tool=task.get("tool"),
            status=cast("Status", checked(str, task["status"])),
            status_message=task.get("statusMessage"),
            created_at=datetime.fromisoformat(task["createdAt"]),
            last_updated_at=datetime.fromisoformat(task["lastUpdatedAt"]),
            ttl_ms=task["ttlMs"],
            poll_interval_ms=task.get("pollIntervalMs"),
            stall_after_ms=task.get("stallAfterMs"),
            cancel_requested=checked(bool, reply["cancelRequested"]),
            input_responses=checked(dict, reply["inputResponses"]),
            input_requests=task.get("inputRequests"),
            result=task.get("result"),
            error=task.get("error"),
            applied=reply.get("applied"),
            reason=reply.get("reason"),
        )


@dataclass(frozen=True)
class Page:
    """A part of a list; `cursor` leads to the next one."""

    tasks: tuple[TaskState, ...]
    cursor: str | None

    @classmethod
    def of(cls, reply: Json) -> Self:
        return cls(tuple(map(TaskState.of, reply["tasks"])), reply.get("nextCursor"))


def checked(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def understood(answer: Answer, shape: Callable[[Json], T]) -> T:
    """A good answer as a value. Raises Problem where the broker refuses, and Unreachable for what
    is not in its words: a proxy's own page says nothing of a task, and is not quoted.
    """
    try:
        said = json.loads(answer.body)
        if 200 <= answer.status < 300:
            return shape(said)
        if said["type"].startswith(PROBLEMS):
            raise Problem(answer.status, said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    strange = f"{_phrase(answer.status)}, not a broker's answer"
    if answer.status == 413:  # whoever says so: what was sent will not get smaller
        raise Problem(413, {"title": strange})
    raise Unreachable(f"{strange}; is the URL right?")


def _phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status}"
