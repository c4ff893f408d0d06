"""What backends send, from JSON to the domain: shapes first (400), then what must fit (422)."""

import json
import re
from datetime import UTC, datetime
from itertools import accumulate
from typing import Annotated, TypeVar
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app import rawjson
from app.broker.create import NewTask
from app.broker.report import Event, TaskName
from app.domain import lifetimes
from app.domain.events import Report
from app.domain.tasks import RpcError, Status, ToolResult, pointer_token
from app.errors import Fault, Invalid, Refused

MAX_TEXT = 255
MAX_POLL_INTERVAL_MS = 86_400_000
MAX_STALL_MS = 3_155_760_000_000
MAX_INPUT_REQUESTS = 100
EVENT_TYPE = "task.updated"
_SIGNAL_CURSOR = re.compile(r"[0-9]{1,19}(?:\.[0-9]{1,19}){0,99}", re.ASCII)
_LARGEST_ID = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)

T = TypeVar("T")
Text = str | UnsetType
Number = int | UnsetType
NullableNumber = int | None | UnsetType
Part = Raw | UnsetType


class State(Struct, rename="camel", kw_only=True):
    """The members of a task's state, on create and in events."""

    status: Text = UNSET
    status_message: Part = UNSET
    result: Part = UNSET
    error: Part = UNSET
    input_requests: Part = UNSET
    poll_interval_ms: Number = UNSET
    ttl_ms: NullableNumber = UNSET
    stall_after_ms: NullableNumber = UNSET


class CreateBody(State, kw_only=True):
    owner: Raw
    external_id: Text = UNSET
    tool: Text = UNSET


class OwnerBody(Struct, rename="camel", kw_only=True):
    authorization: Text = UNSET
    token_sha256: Text = UNSET
    anonymous: bool | UnsetType = UNSET
    handle: Text = UNSET
    issuer: Text = UNSET
    subject: Text = UNSET
    client_id: Text = UNSET


class EventBody(Struct):
    type: str
    data: Raw
    timestamp: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET


class EventData(State, kw_only=True):
    task_ref: Text = UNSET
    external_id: Text = UNSET
    task_id: Text = UNSET


class _Error(Struct):
    code: int
    message: Raw


class _Result(Struct):
    resultType: Part = UNSET  # noqa: N815 - the wire's name
    isError: Part = UNSET  # noqa: N815 - the wire's name


class _InputRequest(Struct):
    method: str
    params: Part = UNSET


class _Elicitation(Struct):
    mode: str = "form"
    message: Part = UNSET
    requestedSchema: Part = UNSET  # noqa: N815 - the wire's name
    url: Part = UNSET


INPUT_METHODS = ("elicitation/create", "sampling/createMessage", "roots/list")


def new_task(body: bytes) -> tuple[NewTask, OwnerBody]:
    """A create request. Raises Invalid or Refused."""
    wanted = rawjson.decode_body(body, CreateBody)
    owner = _object(wanted.owner, OwnerBody, "/owner")
    task = NewTask(
        state=_report(wanted, ""),
        external_id=_short_text(wanted.external_id, "/externalId"),
        tool=_short_text(wanted.tool, "/tool"),
    )
    return task, owner


def event(body: bytes, webhook_id: str | None) -> Event:
    """An inbound event. Raises Invalid or Refused."""
    envelope = rawjson.decode_body(body, EventBody)
    if envelope.type != EVENT_TYPE:
        raise Refused(
            "Unknown type of event.",
            faults=[Fault("/type", f'the one known type is "{EVENT_TYPE}"')],
        )
    data = _object(envelope.data, EventData, "/data")
    return Event(
        name=_name(data),
        report=_report(data, "/data"),
        sent_at=None if envelope.timestamp is UNSET else _in_utc(envelope.timestamp),
        webhook_id=webhook_id,
    )


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise _unfit("/timestamp", "must be in the years 1 to 9999 of UTC") from None


def _name(data: EventData) -> TaskName:
    name = TaskName(
        ref=None if data.task_ref is UNSET else task_ref(data.task_ref),
        external_id=_short_text(data.external_id, "/data/externalId"),
        task_id=None if data.task_id is UNSET else data.task_id,
    )
    if name == TaskName():
        raise Invalid(
            "The event names no task.",
            faults=[Fault("/data", "give one of taskRef, externalId, taskId")],
        )
    return name


def task_ref(text: str) -> UUID:
    """A task reference; what is no UUID is the reference of no task."""
    try:
        return UUID(text)
    except ValueError:
        return UUID(int=0)


def signal_ids(cursor: str) -> list[int]:
    """The signals that a cursor of `outputs.signal_cursor` names. Raises Invalid."""
    if _SIGNAL_CURSOR.fullmatch(cursor) is None:
        raise _foreign_cursor()
    ids = list(accumulate(map(int, cursor.split("."))))
    if ids[-1] > _LARGEST_ID:
        raise _foreign_cursor()
    return ids


def _foreign_cursor() -> Invalid:
    return Invalid(
        "The cursor is not one of this broker's; pass the cursor of an answer on as it is.",
        faults=[Fault("/after", "malformed")],
    )


def token_hash(owner: OwnerBody) -> str:
    """The checked `tokenSha256` of an owner."""
    assert owner.token_sha256 is not UNSET
    if _SHA256.fullmatch(owner.token_sha256) is None:
        raise Refused(
            "The owner is not well formed.",
            faults=[Fault("/owner/tokenSha256", "must be the SHA-256 in 64 hexadecimal digits")],
        )
    return owner.token_sha256


def _report(state: State, at: str) -> Report:
    return Report(
        status=_status(state.status, at),
        status_message=_message(state.status_message, at),
        result=_result(state.result, at),
        error=_error(state.error, at),
        input_requests=_input_requests(state.input_requests, at),
        poll_interval_ms=_bounded(
            state.poll_interval_ms, f"{at}/pollIntervalMs", MAX_POLL_INTERVAL_MS
        ),
        ttl_ms=_nullable(state.ttl_ms, f"{at}/ttlMs", None),
        stall_after_ms=_nullable(state.stall_after_ms, f"{at}/stallAfterMs", MAX_STALL_MS),
    )


def _status(value: Text, at: str) -> Status | None:
    if value is UNSET:
        return None
    try:
        return Status(value)
    except ValueError:
        raise Refused(
            "Unknown status.", faults=[Fault(f"{at}/status", f"must be one of {', '.join(Status)}")]
        ) from None


def _message(value: Part, at: str) -> str | None:
    if value is UNSET:
        return None
    if not rawjson.is_text(value):
        raise _wrong(f"{at}/statusMessage", "must be a text")
    return rawjson.text(value)


def _result(value: Part, at: str) -> ToolResult | None:
    if value is UNSET:
        return None
    shape = _object(value, _Result, f"{at}/result")
    if shape.resultType is not UNSET and not _says(shape.resultType, "complete"):
        raise Refused(
            "A task ends with a complete result.",
            faults=[Fault(f"{at}/result/resultType", 'must be "complete", or absent')],
        )
    is_error = shape.isError is not UNSET and bytes(shape.isError) == b"true"
    return ToolResult(rawjson.text(value), shape.resultType is not UNSET, is_error)


def _says(raw: Raw, text: str) -> bool:
    return rawjson.is_text(raw) and json.loads(bytes(raw)) == text


def _error(value: Part, at: str) -> RpcError | None:
    if value is UNSET:
        return None
    shape = _object(value, _Error, f"{at}/error")
    if not rawjson.is_text(shape.message):
        raise _wrong(f"{at}/error/message", "must be a text")
    return RpcError(rawjson.text(value), rawjson.text(shape.message))


def _input_requests(value: Part, at: str) -> dict[str, str] | None:
    if value is UNSET:
        return None
    at = f"{at}/inputRequests"
    requests = _object(value, dict[str, Raw], at)
    if len(requests) > MAX_INPUT_REQUESTS:
        raise Refused(f"A task may ask at most {MAX_INPUT_REQUESTS} questions at once.")
    for key, request in requests.items():
        _check_input_request(key, request, f"{at}/{pointer_token(key)}")
    return {key: rawjson.text(request) for key, request in requests.items()}


def _check_input_request(key: str, raw: Raw, at: str) -> None:
    if not 1 <= len(key) <= MAX_TEXT or not rawjson.storable(key):
        raise _unfit(at, f"a key has 1 to {MAX_TEXT} characters, none of them NUL")
    request = _object(raw, _InputRequest, at)
    if request.method not in INPUT_METHODS:
        raise _unfit(f"{at}/method", f"must be one of {', '.join(INPUT_METHODS)}")
    if request.params is not UNSET and not rawjson.is_object(request.params):
        raise _wrong(f"{at}/params", "must be an object")
    if request.method == "elicitation/create":
        _check_elicitation(request.params, f"{at}/params")


def _check_elicitation(raw: Part, at: str) -> None:
    """Clients refuse the whole task when one of these is missing."""
    params = _Elicitation() if raw is UNSET else _object(raw, _Elicitation, at)
    if params.message is UNSET:
        raise _unfit(f"{at}/message", "an elicitation needs a message")
    if params.mode == "form" and (
        params.requestedSchema is UNSET or not rawjson.is_object(params.requestedSchema)
    ):
        raise _unfit(f"{at}/requestedSchema", "an elicitation by form needs a schema object")
    if params.mode == "url" and params.url is UNSET:
        raise _unfit(f"{at}/url", "an elicitation by URL needs a url")


def _short_text(value: Text, at: str) -> str | None:
    if value is UNSET:
        return None
    if not 1 <= len(value) <= MAX_TEXT or not rawjson.storable(value):
        raise _unfit(at, f"must have 1 to {MAX_TEXT} characters, none of them NUL")
    return value


def _bounded(value: Number, at: str, most: int) -> int | None:
    if value is UNSET:
        return None
    if not 1 <= value <= most:
        raise _unfit(at, f"must be from 1 to {most}")
    return value


def _nullable(value: NullableNumber, at: str, most: int | None) -> int | None | lifetimes.Unset:
    if value is UNSET:
        return lifetimes.UNSET
    if value is not None and (value < 1 or (most is not None and value > most)):
        raise _unfit(at, "must be at least 1" if most is None else f"must be from 1 to {most}")
    return value


def _object(raw: Raw, shape: type[T], at: str) -> T:
    if not rawjson.is_object(raw):
        raise _wrong(at, "must be an object")
    return rawjson.decode(raw, shape, at)


def _wrong(at: str, detail: str) -> Invalid:
    return Invalid("A member has the wrong type.", faults=[Fault(at, detail)])


def _unfit(at: str, detail: str) -> Refused:
    return Refused("A member does not fit.", faults=[Fault(at, detail)])
