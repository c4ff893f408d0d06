"""The broker beside a model of it: tool servers, clients, operators and time do what they like,
and after each step the broker says what the contract says.

`Model` is the contract in plain Python. It shares no code with the broker.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.broker.cancel import end_as_operator
from app.domain.clock import iso
from app.domain.tasks import rpc_error
from app.errors import Refused
from tests.support.clock import StoppedClock
from tests.support.databases import Databases
from tests.support.service import (
    ELICITATION,
    CreatedTask,
    McpClient,
    Service,
    ToolServer,
    owner_of,
    running_service,
    test_settings,
)

T = TypeVar("T")
Json = dict[str, Any]

DEFAULT_TTL_MS = 1_000_000
MAX_TTL_MS = 3_000_000
EXPIRED_GRACE_MS = 60_000
CANCEL_GRACE_MS = 30_000
POLL_MS = 2_000
TERMINAL = ("completed", "failed", "cancelled")
UNANSWERED = "Cancelled: the tool server did not answer the request to cancel"
STALLED = "the tool server stopped reporting"


def later(moment: datetime, milliseconds: int) -> datetime:
    return moment + timedelta(milliseconds=milliseconds)


# --- the contract ------------------------------------------------------------------------------


@dataclass
class Question:
    answer: Json | None = None
    superseded: bool = False

    @property
    def open(self) -> bool:
        return self.answer is None and not self.superseded


@dataclass
class Model:
    """One task. A method for each thing that can happen to it; `now` is the broker's time."""

    created_at: datetime
    updated_at: datetime
    status: str = "working"
    message: str | None = None
    result: Json | None = None
    error: Json | None = None
    questions: dict[str, Question] = field(default_factory=dict)
    ttl_ms: int = DEFAULT_TTL_MS
    poll_ms: int = POLL_MS
    stall_ms: int | None = None
    stall_due: datetime | None = None
    newest_report: datetime | None = None
    cancel_requested: bool = False
    cancel_due: datetime | None = None
    purged: bool = False

    # What backends say.

    def report(self, now: datetime, data: Json, sent_at: datetime | None, seen: bool) -> str:
        """The verdict on an event, or the HTTP status of a refusal."""
        if not fits(data):
            return "422"
        if self.purged or self.expired(now):
            return "404" if self.purged else "410"
        if seen or self.terminal:
            return "duplicate" if seen else "terminal"
        outcome = data.get("status") in TERMINAL or "inputRequests" in data
        late = sent_at and self.newest_report and sent_at < self.newest_report
        if late and not outcome:
            return "stale"
        if not self.may_ask(data):
            return "422"
        self.apply(now, data)
        if sent_at:
            self.newest_report = max(sent_at, self.newest_report or sent_at)
        return "applied"

    def may_ask(self, data: Json) -> bool:
        """A key is used once in the life of a task, and who requires input has a question."""
        asked = data.get("inputRequests", {})
        nothing_open = not asked and not self.open_keys
        return not (
            asked.keys() & self.questions.keys()
            or (data.get("status") == "input_required" and nothing_open)
        )

    def apply(self, now: datetime, data: Json) -> None:
        self.poll_ms = data.get("pollIntervalMs", self.poll_ms)
        self.stall_ms = data.get("stallAfterMs", self.stall_ms)
        if "ttlMs" in data:
            self.ttl_ms = min(data["ttlMs"] or MAX_TTL_MS, MAX_TTL_MS)
        if data.get("status") == "working":
            for question in self.questions.values():
                question.superseded = question.superseded or question.open
        self.questions.update({key: Question() for key in data.get("inputRequests", {})})
        self.result, self.error = data.get("result"), data.get("error")
        self.move(now, data.get("status", self.status))
        if self.error:
            self.message = self.error["message"]
        self.message = data.get("statusMessage", self.message)
        if self.cancel_requested:
            self.cancel_due = later(now, CANCEL_GRACE_MS)

    def move(self, now: datetime, status: str) -> None:
        """A message belongs to its status; the stall clock runs while the tool server works."""
        if status != self.status:
            self.message = None
        self.status, self.updated_at = status, now
        runs = status == "working" and self.stall_ms is not None
        self.stall_due = later(now, self.stall_ms or 0) if runs else None

    # What the owner does.

    def answer(self, now: datetime, answers: dict[str, Json]) -> None:
        taken = self.open_keys & answers.keys()
        if self.terminal or not taken:
            return
        for key in taken:
            self.questions[key].answer = answers[key]
        self.move(now, "input_required" if self.open_keys else "working")

    def cancel(self, now: datetime) -> None:
        if not self.terminal and not self.cancel_requested:
            self.cancel_requested, self.cancel_due = True, later(now, CANCEL_GRACE_MS)

    # What the operator and the sweeper do.

    def end(self, now: datetime, status: str, message: str | None = None) -> None:
        self.move(now, status)
        self.message = message
        if status == "failed":
            self.error = {"code": -32603, "message": message}

    def sweep(self, now: datetime) -> None:
        if not self.terminal and self.cancel_due and self.cancel_due <= now:
            self.end(now, "cancelled", UNANSWERED)
        if not self.terminal and self.stall_due and self.stall_due <= now:
            self.end(now, "failed", STALLED)
        self.purged = self.purged or self.expired(later(now, -EXPIRED_GRACE_MS))

    # How it looks.

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def open_keys(self) -> set[str]:
        return {key for key, question in self.questions.items() if question.open}

    def expired(self, now: datetime) -> bool:
        return later(self.created_at, self.ttl_ms) <= now

    def task(self) -> Json:
        """The members of a task without its payload."""
        members: Json = {
            "status": self.status,
            "createdAt": iso(self.created_at),
            "lastUpdatedAt": iso(self.updated_at),
            "ttlMs": self.ttl_ms,
            "pollIntervalMs": self.poll_ms,
        }
        return members if self.message is None else members | {"statusMessage": self.message}

    def payload(self) -> Json:
        payloads: dict[str, Json] = {
            "completed": {"result": self.result},
            "failed": {"error": self.error},
            "input_required": {"inputRequests": dict.fromkeys(self.open_keys, ELICITATION)},
        }
        return payloads.get(self.status, {})

    def signals(self) -> Json:
        """What the tool server must learn."""
        answers = {key: q.answer for key, q in self.questions.items() if q.answer is not None}
        return {"cancelRequested": self.cancel_requested, "inputResponses": answers}


def fits(data: Json) -> bool:
    """A payload comes with its own status, and a terminal status with its payload."""
    payloads = {"result": "completed", "error": "failed", "inputRequests": "input_required"}
    needed = {"completed": "result", "failed": "error"}.get(data.get("status", ""))
    belongs = all(data.get("status") == payloads[name] for name in payloads.keys() & data.keys())
    return belongs and data.get("inputRequests") != {} and (needed is None or needed in data)


# --- what is sent ------------------------------------------------------------------------------

keys = st.sets(st.sampled_from("abcdef"), min_size=1, max_size=3)
terms = st.fixed_dictionaries(
    {},
    optional={
        "statusMessage": st.sampled_from(["reading", "writing"]),
        "pollIntervalMs": st.sampled_from([500, 10_000]),
        "ttlMs": st.sampled_from([50_000, 5_000_000, None, 20_000, 1]),
        "stallAfterMs": st.sampled_from([5_000, 25_000, None]),
    },
)


def state(**members: Any) -> st.SearchStrategy[Json]:
    """A state in a tool server's words, now and then with some of the terms beside."""
    return st.one_of(st.just({}), terms).map(lambda some: members | some)


asking = keys.flatmap(
    lambda some: state(status="input_required", inputRequests=dict.fromkeys(some, ELICITATION))
)
going_on = state() | state(status="working") | state(status="input_required")
ending = (
    state(status="completed", result={"content": [], "isError": True})
    | state(status="failed", error={"code": -32000, "message": "out of paper"})
    | state(status="cancelled")
)
misfit = (
    state(status="completed")
    | state(status="failed", result={"content": []})
    | state(status="input_required", inputRequests={})
    | state(result={"content": []})
)
lateness = st.sampled_from([0, 0, 2_000, 90_000, -1_000, None])
naming = st.sampled_from(["taskRef", "externalId", "taskId"])
passing = st.sampled_from([1, 5_000, 20_000, 20_000, 31_000, 61_000, 600_000])


@dataclass(frozen=True)
class Handle:
    """A task that was created, beside its model."""

    created: CreatedTask
    external_id: str
    model: Model

    def named(self, how: str) -> Json:
        names = {
            "taskRef": self.created.ref,
            "externalId": self.external_id,
            "taskId": self.created.id,
        }
        return {how: names[how]}


@dataclass(frozen=True)
class Sent:
    """An event that was sent, applied or not."""

    webhook_id: str
    data: Json
    sent_at: datetime | None


# --- the broker --------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A broker and its users on a loop of their own: Hypothesis's machines are synchronous."""

    loop: asyncio.AbstractEventLoop
    service: Service
    tools: ToolServer
    other_tools: ToolServer
    client: McpClient
    stranger: McpClient
    numbers: Iterator[int] = field(default_factory=itertools.count)
    verdicts: Counter[str] = field(default_factory=Counter)

    def run(self, action: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(action)

    def now(self) -> datetime:
        return self.service.clock()


async def open_world(
    stack: AsyncExitStack, loop: asyncio.AbstractEventLoop, databases: Databases
) -> World:
    terms = test_settings(
        await stack.enter_async_context(databases.fresh()),
        default_ttl_ms=DEFAULT_TTL_MS,
        max_ttl_ms=MAX_TTL_MS,
        expired_grace_ms=EXPIRED_GRACE_MS,
        cancel_grace_ms=CANCEL_GRACE_MS,
        default_poll_interval_ms=POLL_MS,
        log_level="info",
    )
    service = await stack.enter_async_context(running_service(terms, StoppedClock()))
    tools, other_tools = await service.tool_server(), await service.tool_server("others")
    return World(loop, service, tools, other_tools, service.client(), service.client())


@pytest.fixture
def world(databases: Databases) -> Iterator[World]:
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    try:
        yield loop.run_until_complete(open_world(stack, loop, databases))
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()


# --- the steps ---------------------------------------------------------------------------------


class TaskMachine(RuleBasedStateMachine):
    tasks = Bundle("tasks")
    live_tasks = tasks.filter(lambda task: not task.model.terminal and not task.model.purged)
    sent = Bundle("sent")

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.handles: list[Handle] = []
        self.seen: set[str] = set()

    @property
    def live(self) -> int:
        return sum(not task.model.terminal for task in self.handles)

    # Backends.

    @initialize(target=tasks, some=terms, others=terms)
    def first_tasks(self, some: Json, others: Json) -> Any:
        return multiple(self.create(some), self.create(others))

    @precondition(lambda self: len(self.handles) < 6 and self.live < 3)
    @rule(target=tasks, data=going_on | asking | ending)
    def create(self, data: Json) -> Any:
        """A task begins in any state that fits."""
        now, external_id = self.world.now(), f"job-{next(self.world.numbers)}"
        model = Model(created_at=now, updated_at=now)
        verdict = model.report(now, data, None, seen=False)
        response = self.post_task(self.world.client, external_id, data)
        if verdict != "applied":
            assert response.status_code == int(verdict)
            return multiple()
        assert response.status_code == 201
        made = response.json()["createTaskResult"]
        created = CreatedTask(response.json()["taskRef"], made["taskId"])
        assert made == {"resultType": "task", "taskId": created.id, **model.task()}
        self.handles.append(Handle(created, external_id, model))
        return self.handles[-1]

    @rule(target=sent, task=live_tasks, data=going_on, late=lateness, name=naming)
    def progress(self, task: Handle, data: Json, late: int | None, name: str) -> Sent:
        return self.report(task, data, late, name)

    @rule(target=sent, task=live_tasks, data=asking, late=lateness, name=naming)
    def questions(self, task: Handle, data: Json, late: int | None, name: str) -> Sent:
        return self.report(task, data, late, name)

    @rule(
        target=sent,
        task=tasks,
        data=asking | going_on | ending | misfit,
        late=lateness,
        name=naming,
    )
    def anything(self, task: Handle, data: Json, late: int | None, name: str) -> Sent:
        return self.report(task, data, late, name)

    @rule(event=sent, task=tasks, name=naming)
    def report_again(self, event: Sent, task: Handle, name: str) -> None:
        """One webhook-id is applied once, whatever task it comes for the second time."""
        self.deliver(event, task, name)

    # Clients.

    @rule(task=live_tasks, some=keys)
    def answer(self, task: Handle, some: set[str]) -> None:
        """Any keys, outstanding or not; no two answers are alike."""
        answers = {key: {"content": {"n": next(self.world.numbers)}} for key in sorted(some)}
        if self.ask("tasks/update", task, inputResponses=answers):
            task.model.answer(self.world.now(), answers)

    @rule(task=tasks)
    def cancel(self, task: Handle) -> None:
        if self.ask("tasks/cancel", task):
            task.model.cancel(self.world.now())

    # What changes nothing.

    @rule(task=tasks)
    def strangers(self, task: Handle) -> None:
        """Neither another client nor another tool server learns anything."""
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            params = {"taskId": task.created.id, "inputResponses": {}}
            response = self.world.run(self.world.stranger.request(method, params))
            assert response.json()["error"]["message"].endswith("Task not found")
        read = self.world.run(self.world.other_tools.read(task.created.ref))
        report = self.world.run(self.world.other_tools.report(task.created, status="cancelled"))
        assert read.status_code == report.status_code == 404
        self.create_again(task)

    def create_again(self, task: Handle) -> None:
        """A repeated create finds the first task, and another owner's learns that there is one."""
        if task.model.purged:
            return
        again = self.post_task(self.world.client, task.external_id, {"statusMessage": "again"})
        expired = task.model.expired(self.world.now())
        assert again.status_code == (410 if expired else 200)
        if not expired:
            assert again.json()["taskRef"] == task.created.ref
            assert again.json()["createTaskResult"]["taskId"] == task.created.id
        assert self.post_task(self.world.stranger, task.external_id, {}).status_code == 409

    # Time and the operator.

    @rule(milliseconds=passing)
    def time_passes(self, milliseconds: int) -> None:
        self.world.service.clock.advance(milliseconds=milliseconds)

    @rule(milliseconds=passing)
    def sweep(self, milliseconds: int) -> None:
        self.time_passes(milliseconds)
        self.world.run(self.world.service.sweep())
        for task in self.handles:
            task.model.sweep(self.world.now())

    @precondition(lambda self: self.live > 2)
    @rule(task=tasks, status=st.sampled_from(["cancelled", "failed"]))
    def operator(self, task: Handle, status: str) -> None:
        now = self.world.now()
        if task.model.expired(now):
            return
        message = "ended by hand" if status == "failed" else None
        error = rpc_error(-32603, message) if message else None
        ended = end_as_operator(self.world.service.broker, UUID(task.created.ref), error)
        if task.model.terminal:
            with pytest.raises(Refused):
                self.world.run(ended)
        else:
            self.world.run(ended)
            task.model.end(now, status, message)

    # What everybody sees.

    @invariant()
    def everybody_sees_what_the_contract_says(self) -> None:
        self.world.run(self.look())

    async def look(self) -> None:
        await asyncio.gather(
            *(self.owner_sees(task) for task in self.handles),
            *(self.tool_server_sees(task) for task in self.handles),
        )

    async def owner_sees(self, task: Handle) -> None:
        seen = await self.request(self.world.client, "tasks/get", task)
        if seen is not None:
            payload = task.model.payload()
            if "result" in payload:
                payload = {"result": {"resultType": "complete", **payload["result"]}}
            expected = {"taskId": task.created.id, **task.model.task(), **payload}
            assert seen == {"resultType": "complete", **expected}

    async def tool_server_sees(self, task: Handle) -> None:
        response = await self.world.tools.read(task.created.ref)
        model = task.model
        if model.purged or model.expired(self.world.now()):
            assert response.status_code == (404 if model.purged else 410)
            return
        names = {"taskRef": task.created.ref, "externalId": task.external_id}
        stall = {} if model.stall_ms is None else {"stallAfterMs": model.stall_ms}
        expected = names | model.task() | stall | model.payload() | model.signals()
        assert response.json() == expected

    # How it is asked.

    def post_task(self, owner: McpClient, external_id: str, data: Json) -> httpx.Response:
        body = {"owner": owner_of(owner), "externalId": external_id, **data}
        return self.world.run(self.world.tools.post_task(body))

    def report(self, task: Handle, data: Json, late: int | None, name: str) -> Sent:
        sent_at = None if late is None else later(self.world.now(), -late)
        event = Sent(f"event-{next(self.world.numbers)}", data, sent_at)
        self.deliver(event, task, name)
        return event

    def deliver(self, event: Sent, task: Handle, name: str) -> None:
        tools, model = self.world.tools, task.model
        envelope: Json = {"type": "task.updated", "data": task.named(name) | event.data}
        if event.sent_at is not None:
            envelope["timestamp"] = iso(event.sent_at)
        body = to_bytes(envelope)
        headers = tools.signed(body, webhook_id=event.webhook_id)
        response = self.world.run(tools.post_event(body, headers))

        seen = event.webhook_id in self.seen
        verdict = model.report(self.world.now(), event.data, event.sent_at, seen)
        self.world.verdicts[verdict] += 1
        if verdict.isdigit():
            assert response.status_code == int(verdict)
            return
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer.get("reason", "applied") == verdict
        assert answer["applied"] == (verdict == "applied")
        assert answer["task"]["status"] == model.status
        assert answer.items() >= model.signals().items()
        if verdict == "applied":
            self.seen.add(event.webhook_id)

    def ask(self, method: str, task: Handle, **params: Any) -> Json | None:
        return self.world.run(self.request(self.world.client, method, task, **params))

    async def request(
        self, client: McpClient, method: str, task: Handle, **params: Any
    ) -> Json | None:
        """The result of a request, `None` when the task must be gone for its owner, and is."""
        params = {"taskId": task.created.id, **params}
        message = (await client.request(method, params)).json()
        if task.model.purged or task.model.expired(self.world.now()):
            assert message["error"]["code"] == -32602
            goodbye = "Task not found" if task.model.purged else "Task has expired"
            assert message["error"]["message"] == f"Failed to retrieve task: {goodbye}"
            return None
        result: Json = message["result"]
        del result["_meta"]
        return result


def to_bytes(envelope: Json) -> bytes:

    return json.dumps(envelope).encode()


def test_the_broker_is_what_the_contract_says(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "httpx")  # a line for each of many thousand requests
    run_state_machine_as_test(
        lambda: TaskMachine(world),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Every verdict was met, so the comparison means something.
    assert world.verdicts.keys() == {
        "applied", "duplicate", "terminal", "stale", "404", "410", "422",
    }  # fmt: skip
