"""What a tool server does with a broker, told once for both ways of doing I/O."""

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from taskbroker_sdk import _wire as wire
from taskbroker_sdk._errors import (
    BrokerError,
    CancelRequested,
    Problem,
    Stopped,
    TaskFailed,
    Unreachable,
    gone,
)
from taskbroker_sdk._retry import LONGEST_PAUSE, Talk, exchange
from taskbroker_sdk._signals import Batch, Inbox
from taskbroker_sdk._wire import Created, Event, Json, NewTask, Page, Request, TaskState

INTERNAL_ERROR = -32603
FIRST_LOOK = 0.2
SIGNS_BEFORE_STALL = 3

log = logging.getLogger("taskbroker_sdk")


@dataclass(frozen=True)
class Talks:
    """The conversations of one backend. `heartbeat` is in seconds."""

    backend: str
    attempts: int
    heartbeat: float

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.heartbeat <= 0:
            raise ValueError("attempts must be at least 1, and heartbeat more than 0 seconds")

    def create(self, owner: Json, task: NewTask) -> Talk[Created]:
        # A create whose answer was lost is repeated; the name leads to the same task.
        name = task.get("external_id")
        named: NewTask = {**task, "external_id": uuid.uuid4().hex if name is None else name}
        return exchange(wire.create(owner, named), Created.of, attempts=self.attempts)

    def read(self, ref: str) -> Talk[TaskState]:
        return exchange(wire.read(ref), TaskState.of, attempts=self.attempts)

    def page(
        self,
        *,
        status: str | None = None,
        external_id: str | None = None,
        cursor: str | None = None,
    ) -> Talk[Page]:
        query = {"status": status, "externalId": external_id, "limit": wire.PAGE, "cursor": cursor}
        return exchange(wire.listing(query), Page.of, attempts=self.attempts)

    def find(self, external_id: str) -> Talk[TaskState | None]:
        page = yield from self.page(external_id=external_id)
        return page.tasks[0] if page.tasks else None

    def report(self, ref: str, said: Event) -> Talk[TaskState]:
        return exchange(self._event(ref, said), TaskState.of, attempts=self.attempts)

    def progress(self, ref: str, message: str) -> Talk[TaskState | None]:
        """News is worth some attempts, but not the work: without an answer it is let go."""
        try:
            return (yield from self.report(ref, {"status_message": message}))
        except Unreachable as problem:
            log.warning("progress of task %s was not reported: %s", ref, problem)
            return None

    def ask(
        self, ref: str, questions: Mapping[str, Json], message: str | None
    ) -> Talk[dict[str, Any]]:
        """All answers, however long they take. Once the questions are asked, a broker that is
        away is waited for. Raises CancelRequested when nobody will answer any more.
        """
        asked: Event = {"status": "input_required", "input_requests": questions}
        if message is not None:
            asked["status_message"] = message
        state = yield from self.report(ref, asked)
        for pause in self._looks():
            if state.reason_to_stop is not None:
                raise state.reason_to_stop
            if questions.keys() <= state.input_responses.keys():
                break
            state = (yield from self._look(ref, pause)) or state
        return {key: state.input_responses[key] for key in questions}

    def _looks(self) -> Iterator[float]:
        """Seconds between looks at a question: soon at first, then with each heartbeat."""
        pause = FIRST_LOOK
        while True:
            yield min(pause, self.heartbeat)
            pause = min(pause * 1.5, self.heartbeat)

    def _look(self, ref: str, pause: float) -> Talk[TaskState | None]:
        try:
            return (
                yield from exchange(
                    wire.read(ref), TaskState.of, attempts=self.attempts, after=pause
                )
            )
        except Unreachable as problem:
            log.warning("task %s waits for answers, and the broker is away: %s", ref, problem)
            return None

    def signals(self, inbox: Inbox, wait: int) -> Talk[Batch]:
        """The next signals, or none after `wait` seconds. A broker that is away is waited for, as
        is one that refuses the key (401) or the backend (403): both may pass.
        """
        pause = inbox.pause
        while True:
            request = wire.signals(inbox.cursor, wait)
            try:
                return (yield from exchange(request, Batch.of, attempts=self.attempts, after=pause))
            except (Unreachable, Problem) as problem:
                if not _may_pass(problem):
                    raise
                log.warning("there are no signals for the time being: %s", problem)
                pause = LONGEST_PAUSE

    # --- for work that is watched over ---------------------------------------------------------

    def pulse(self, stall_after_ms: int | None) -> "Pulse":
        return Pulse(self.heartbeat, stall_after_ms)

    def beat(self, ref: str, *, lively: bool) -> Talk[CancelRequested | None]:
        """A look at the task, or a sign of life; a reason to stop, if there is one."""
        request = self._event(ref, {}, dated=False) if lively else wire.read(ref)
        try:
            state = yield from exchange(request, TaskState.of, attempts=1)
        except Problem as problem:
            if problem.status in (404, 410):
                return gone(problem.title)
            log.warning("the heartbeat of task %s was refused: %s", ref, problem)
            return None
        except BrokerError as problem:
            log.warning("the heartbeat of task %s failed: %s", ref, problem)
            return None
        return state.reason_to_stop

    def ending(self, ref: str, outcome: Json | BaseException) -> Request:
        """The event that says how work ended: what it returned, or what it raised."""
        try:
            return self._event(ref, _last_words(ref, outcome))
        except ValueError:
            log.exception("the outcome of task %s cannot be sent", ref)
            return self._event(ref, _failed("the outcome of the tool cannot be sent"))

    def deliver(self, ref: str, ending: Request, give_up: Callable[[], bool]) -> Talk[None]:
        """Sees to it that an ending gets known; raises nothing, but logs what cannot be helped."""
        try:
            try:
                yield from self._insist(ref, ending, give_up)
            except Problem as problem:
                if problem.status not in (400, 413, 422):
                    raise
                log.error("the outcome of task %s was refused: %s", ref, problem)  # noqa: TRY400
                refused = _failed("the broker refused the outcome of the tool")
                yield from self._insist(ref, self._event(ref, refused), give_up)
        except BrokerError as problem:
            unreported(ref, problem)

    def _insist(self, ref: str, ending: Request, give_up: Callable[[], bool]) -> Talk[TaskState]:
        """Outlives a broker that is away. From `give_up()` on, there is one more round of attempts.
        The webhook-id stays the same.

        It outlives a key that is being rotated and a backend that is disabled for a while, too.
        """
        pause = 0.0
        while True:
            last = give_up()
            try:
                return (
                    yield from exchange(ending, TaskState.of, attempts=self.attempts, after=pause)
                )
            except (Unreachable, Problem) as problem:
                if last or not _may_pass(problem):
                    raise
                log.warning("the end of task %s is not reported yet: %s", ref, problem)
                pause = 0.0 if give_up() else LONGEST_PAUSE

    def _event(self, ref: str, said: Event, *, dated: bool = True) -> Request:
        # Signs of life have no date: one could make a message stale that was sent before it.
        happened_at = datetime.now(UTC) if dated else None
        return wire.event(self.backend, ref, said, f"msg_{uuid.uuid4().hex}", happened_at)


class Pulse:
    """How often work looks at its task, and when a look has to be a sign of life.

    A look costs the broker a read, a sign of life is an event: it is sent no more often than the
    promise of `stall_after_ms` needs. Times are in seconds.
    """

    def __init__(self, heartbeat: float, stall_after_ms: int | None) -> None:
        promised = math.inf if stall_after_ms is None else stall_after_ms / 1000
        self._between_signs = promised / SIGNS_BEFORE_STALL
        self.pause = min(heartbeat, self._between_signs)
        self._last_sign = time.monotonic()

    def wants_sign(self) -> bool:
        """Whether this beat is to be a sign of life, as the next one would come too late."""
        now = time.monotonic()
        if now + self.pause - self._last_sign <= self._between_signs:
            return False
        self._last_sign = now
        return True


def unreported(ref: str, reason: object) -> None:
    log.error("the end of task %s was not reported: %s", ref, reason)


def unfollowed(reason: object) -> None:
    log.error("signals are not followed any more; heartbeats see the same, later: %s", reason)


def _may_pass(problem: Unreachable | Problem) -> bool:
    return isinstance(problem, Unreachable) or problem.status in (401, 403)


def completed(result: Json) -> Event:
    return {"status": "completed", "result": result}


def failed(code: int, message: str, data: Any = None) -> Event:
    error = {"code": code, "message": message}
    return {"status": "failed", "error": error if data is None else {**error, "data": data}}


def cancelled(message: str | None) -> Event:
    if message is None:
        return {"status": "cancelled"}
    return {"status": "cancelled", "status_message": message}


def _failed(message: str) -> Event:
    return failed(INTERNAL_ERROR, message)


def _last_words(ref: str, outcome: Json | BaseException) -> Event:
    match outcome:
        case Stopped():
            return _failed(str(outcome))
        case CancelRequested():
            return cancelled(str(outcome))
        case TaskFailed():
            return failed(outcome.code, outcome.message, outcome.data)
        case BaseException():
            # Its text is for the operator: it may hold what no client should read.
            log.error("the work of task %s failed", ref, exc_info=outcome)
            return _failed("internal error in the tool server")
        case _:
            return completed(outcome)
