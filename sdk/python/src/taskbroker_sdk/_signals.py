"""What a broker tells a tool server about its tasks, as values. No I/O and no clock."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self, cast, get_args

from taskbroker_sdk._errors import CancelRequested, ended_already, gone
from taskbroker_sdk._retry import FIRST_PAUSE
from taskbroker_sdk._wire import TERMINAL, Json, Status, checked

SignalType = Literal["task.cancel_requested", "task.input_received", "task.expired", "task.stalled"]
TYPES: frozenset[str] = frozenset(get_args(SignalType))
REMEMBERED = 10_000

log = logging.getLogger("taskbroker_sdk")


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Something that happened to a task without its tool server."""

    id: str
    """The `webhook-id`: the same whenever this signal comes."""
    type: SignalType
    task_ref: str
    external_id: str | None
    status: Status
    """Of the task, when the signal was made."""
    input_responses: Mapping[str, Any] = field(repr=False)
    """The answers that came with it, by the keys of the questions."""
    at: datetime

    @property
    def reason_to_stop(self) -> CancelRequested | None:
        """Why nobody needs the work any more, if so: in the words of a heartbeat."""
        if self.type == "task.input_received":
            return None
        if self.type == "task.expired":
            return gone("The task has expired")
        if self.status in TERMINAL:
            return ended_already(self.status)
        return CancelRequested()

    @classmethod
    def of(cls, webhook_id: str, message: Json) -> Self | None:
        """From the body of a webhook, or an element of a batch. None if a later broker has sent a
        type that is not known here: nobody could do anything about it, and it is no mistake.
        """
        kind = checked(str, message["type"])
        if kind not in TYPES:
            log.info("a signal of an unknown type was ignored: %.100r", kind)
            return None
        data = message["data"]
        external_id = data.get("externalId")
        return cls(
            id=checked(str, webhook_id),
            type=cast("SignalType", kind),
            task_ref=checked(str, data["taskRef"]),
            external_id=None if external_id is None else checked(str, external_id),
            status=cast("Status", checked(str, data["status"])),
            input_responses=checked(dict, data.get("inputResponses", {})),
            at=datetime.fromisoformat(message["timestamp"]),
        )


@dataclass(frozen=True)
class Batch:
    """Signals that came together; `cursor` acknowledges them."""

    signals: tuple[Signal, ...]
    cursor: str

    @classmethod
    def of(cls, reply: Json) -> Self:
        signals = [Signal.of(each["webhookId"], each) for each in reply["signals"]]
        return cls(tuple(filter(None, signals)), checked(str, reply["cursor"]))


class Memory:
    """The last 10,000 signals that were handled: any of them may come again."""

    def __init__(self) -> None:
        self._handled: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, signal: Signal) -> bool:
        return signal.id in self._handled

    def add(self, signal: Signal) -> None:
        self._handled[signal.id] = None
        if len(self._handled) > REMEMBERED:
            self._handled.popitem(last=False)


class Inbox:
    """How far somebody has come in reading signals."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        """Acknowledges what has been read."""
        self.pause = 0.0
        """Seconds before the next look, so that a broker that does not wait is not flooded."""
        self._read = Memory()

    def new_in(self, batch: Batch) -> Iterator[Signal]:
        """Each signal that has not been read. It counts as read when the next one is asked for:
        a reader that fails in between will get it again.
        """
        new = [signal for signal in batch.signals if signal not in self._read]
        for signal in new:
            yield signal
            self._read.add(signal)
        self.cursor = batch.cursor
        self.pause = 0.0 if new else FIRST_PAUSE
