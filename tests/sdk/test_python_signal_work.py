"""Signals reach the work that the Python SDK runs, posted or polled, before a heartbeat does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from taskbroker_sdk import (
    AsyncTask,
    AsyncTaskBroker,
    BrokerError,
    Json,
    Problem,
    Signal,
    Task,
    TaskBroker,
    TaskState,
    elicitation,
    text_result,
)
from taskbroker_sdk._retry import FIRST_PAUSE, LONGEST_PAUSE
from taskbroker_sdk._signals import Batch, Inbox
from taskbroker_sdk._talks import Talks
from tests.sdk.signals import SignalQueue, delivery, message, new_id
from tests.support.processes import BrokerProcess, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.servers import serving
from tests.support.service import McpClient, ToolServer, owner_of
from tests.support.waiting import PATIENCE, eventually

FOR_LONG = 3600.0
QUESTION = elicitation("Sure?", {"type": "object", "properties": {"sure": {"type": "boolean"}}})
YES = {"action": "accept", "content": {"sure": True}}
RESULT = text_result("done all the same")

AnyBroker = TaskBroker | AsyncTaskBroker


@pytest.fixture(scope="module")
def process() -> Iterator[BrokerProcess]:
    with running_broker("sdk-signals") as process:
        yield process


@pytest.fixture(scope="module")
async def tools(process: BrokerProcess) -> AsyncIterator[ToolServer]:
    """A registered backend."""
    async with process.tool_server("my-tools") as tools:
        yield tools


@pytest.fixture
async def client(process: BrokerProcess) -> AsyncIterator[McpClient]:
    async with httpx.AsyncClient(base_url=process.url) as http:
        yield McpClient(http, new_token())


@pytest.fixture
async def queue(tools: ToolServer) -> AsyncIterator[tuple[SignalQueue, str]]:
    """What can be polled, and where."""
    queue = SignalQueue(tools.key)
    async with serving(queue) as url:
        yield queue, url
        queue.end()


class Polled:
    """A place to poll, for requests of a client whose broker is elsewhere."""

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)

    def redirect(self, request: httpx.Request) -> None:
        if request.url.path == "/v1/signals":
            request.url = request.url.copy_with(port=self._url.port)

    async def redirect_async(self, request: httpx.Request) -> None:
        self.redirect(request)


@pytest.fixture
async def broker(
    process: BrokerProcess, tools: ToolServer, queue: tuple[SignalQueue, str]
) -> AsyncIterator[AsyncTaskBroker]:
    """A client that looks at its tasks once in an hour."""
    hooks: dict[str, list[Any]] = {"request": [Polled(queue[1]).redirect_async]}
    async with (
        httpx.AsyncClient(event_hooks=hooks) as http,
        AsyncTaskBroker(
            *(process.url, tools.name, tools.key, tools.webhook_secret),
            heartbeat=FOR_LONG,
            grace=1,
            http=http,
        ) as broker,
    ):
        yield broker


@pytest.fixture
async def thread_broker(
    process: BrokerProcess, tools: ToolServer, queue: tuple[SignalQueue, str]
) -> AsyncIterator[TaskBroker]:
    """The same for threads."""
    hooks: dict[str, list[Any]] = {"request": [Polled(queue[1]).redirect]}
    with httpx.Client(event_hooks=hooks) as http:
        broker = TaskBroker(
            *(process.url, tools.name, tools.key, tools.webhook_secret),
            heartbeat=FOR_LONG,
            grace=1,
            http=http,
        )
        yield broker
        await asyncio.to_thread(broker.close)


def signal(kind: str, ref: str, status: str = "working") -> Signal:
    made = Signal.of(new_id(), message(kind, taskRef=ref, status=status))
    assert made is not None
    return made


async def for_ever(_: AsyncTask) -> Json:
    await asyncio.Event().wait()
    return RESULT


async def at_its_end(task: AsyncTask | Task) -> TaskState:
    async def read() -> TaskState:
        if isinstance(task, AsyncTask):
            return await task.read()
        return await asyncio.to_thread(task.read)

    async def is_over() -> bool:
        return (await read()).over

    await eventually(is_over)
    return await read()


# --- work stops ----------------------------------------------------------------------------------


async def test_a_wish_to_cancel_stops_silent_work(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    task = await broker.start(owner_of(client), for_ever)
    assert broker.take(signal("task.cancel_requested", task.ref))
    state = await at_its_end(task)
    assert (state.status, state.status_message) == ("cancelled", "stopped, as the client asked")


async def test_a_wish_to_cancel_stops_a_thread_that_waits_or_checks(
    thread_broker: TaskBroker, client: McpClient
) -> None:
    def checking(task: Task) -> Json:
        while True:
            task.check()

    def asking(task: Task) -> Json:
        return task.ask({"sure": QUESTION})

    for work in (checking, asking):
        task = await asyncio.to_thread(thread_broker.start, owner_of(client), work)
        assert thread_broker.take(signal("task.cancel_requested", task.ref))
        state = await at_its_end(task)
        assert (state.status, state.status_message) == ("cancelled", "stopped, as the client asked")


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("task.expired", "working", "the task is gone: The task has expired"),
        ("task.stalled", "failed", "the task has ended already: failed"),
        ("task.cancel_requested", "cancelled", "the task has ended already: cancelled"),
    ],
)
async def test_work_that_nobody_needs_any_more_stops(
    broker: AsyncTaskBroker,
    thread_broker: TaskBroker,
    client: McpClient,
    kind: str,
    status: str,
    reason: str,
) -> None:
    def checking(task: Task) -> Json:
        while True:
            task.check()

    task = await broker.start(owner_of(client), for_ever)
    broker.take(signal(kind, task.ref, status))
    thread_task = await asyncio.to_thread(thread_broker.start, owner_of(client), checking)
    thread_broker.take(signal(kind, thread_task.ref, status))

    assert (await at_its_end(task)).status_message == reason
    assert (await at_its_end(thread_task)).status_message == reason


async def test_work_that_is_cleaning_up_is_not_disturbed_again(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    cleaning_up, may_end = asyncio.Event(), asyncio.Event()

    async def work(task: AsyncTask) -> Json:
        try:
            return await for_ever(task)
        except asyncio.CancelledError:
            cleaning_up.set()
            await may_end.wait()
            return RESULT

    task = await broker.start(owner_of(client), work)
    await asyncio.sleep(0)  # it begins
    broker.take(signal("task.cancel_requested", task.ref))
    await cleaning_up.wait()
    broker.take(signal("task.expired", task.ref))
    may_end.set()

    assert (await at_its_end(task)).result == RESULT


async def test_work_that_was_told_to_stop_does_not_keep_its_task_alive(
    process: BrokerProcess,
    tools: ToolServer,
    client: McpClient,
) -> None:
    looks: list[httpx.Request] = []
    may_end = asyncio.Event()

    async def note(request: httpx.Request) -> None:
        looks.append(request)

    async def stubborn(_: AsyncTask) -> Json:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                looks.clear()
        return RESULT

    async with (
        httpx.AsyncClient(event_hooks={"request": [note]}) as http,
        AsyncTaskBroker(process.url, tools.name, tools.key, heartbeat=0.01, http=http) as broker,
    ):
        task = await broker.start(owner_of(client), stubborn)
        await eventually(lambda: len(looks) > 3)
        broker.take(signal("task.cancel_requested", task.ref))
        await eventually(lambda: not looks)
        keeper = broker._running[task.ref]
        for _ in range(3):
            assert not await keeper._ends_within(0.01)
        assert looks == []
        may_end.set()
        await eventually(lambda: not broker._running)
        assert [look.method for look in looks] == ["POST"]


async def test_a_signal_for_work_that_runs_elsewhere_is_ignored(
    broker: AsyncTaskBroker, thread_broker: TaskBroker, client: McpClient
) -> None:
    task = await broker.create(owner_of(client))
    for kind in ("task.cancel_requested", "task.input_received"):
        assert not broker.take(signal(kind, task.ref))
        assert not thread_broker.take(signal(kind, task.ref))
    assert (await task.read()).status == "working"


# --- an ask wakes up -----------------------------------------------------------------------------


async def test_an_ask_looks_as_soon_as_answers_have_come(
    broker: AsyncTaskBroker,
    thread_broker: TaskBroker,
    client: McpClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.FIRST_LOOK", FOR_LONG)

    async def asking(task: AsyncTask) -> Json:
        return {"content": [], "structuredContent": await task.ask({"a": QUESTION, "b": QUESTION})}

    def asking_thread(task: Task) -> Json:
        return {"content": [], "structuredContent": task.ask({"a": QUESTION, "b": QUESTION})}

    for task, take in (
        (await broker.start(owner_of(client), asking), broker.take),
        (
            await asyncio.to_thread(thread_broker.start, owner_of(client), asking_thread),
            thread_broker.take,
        ),
    ):
        task_id = secret(str(task.create_task_result["taskId"]))
        await eventually(partial(is_asked, client, task_id))
        for key in ("a", "b"):
            await client.update(task_id, {key: YES})
            assert take(signal("task.input_received", task.ref))
        state = await at_its_end(task)
        assert state.result["structuredContent"] == {"a": YES, "b": YES}


async def is_asked(client: McpClient, task_id: str) -> bool:
    return bool((await client.get(task_id))["status"] == "input_required")


# --- from the wire to the work -------------------------------------------------------------------


async def test_a_client_receives_what_is_posted(
    broker: AsyncTaskBroker, thread_broker: TaskBroker, tools: ToolServer, client: McpClient
) -> None:
    def asking(task: Task) -> Json:
        return task.ask({"sure": QUESTION})

    task = await broker.start(owner_of(client), for_ever)
    sent = delivery(message(taskRef=task.ref), tools.webhook_secret)
    async with serving(broker.receiver()) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/signals", content=sent.body, headers=dict(sent.headers))
    assert response.status_code == 204
    assert (await at_its_end(task)).status == "cancelled"

    thread_task = await asyncio.to_thread(thread_broker.start, owner_of(client), asking)
    sent = delivery(message(taskRef=thread_task.ref), tools.webhook_secret)
    assert thread_broker.receiver().receive(sent.headers, sent.body).status == 204
    assert (await at_its_end(thread_task)).status == "cancelled"


async def test_a_client_follows_what_can_be_polled(
    broker: AsyncTaskBroker,
    thread_broker: TaskBroker,
    queue: tuple[SignalQueue, str],
    client: McpClient,
) -> None:
    def asking(task: Task) -> Json:
        return task.ask({"sure": QUESTION})

    signals, _ = queue
    task = await broker.start(owner_of(client), for_ever)
    for _ in range(2):
        broker.follow_signals()
    polled = signals.put(message(taskRef=task.ref))
    assert (await at_its_end(task)).status == "cancelled"
    await eventually(lambda: signals.acknowledged == [polled])
    await broker.close()

    thread_task = await asyncio.to_thread(thread_broker.start, owner_of(client), asking)
    for _ in range(2):
        thread_broker.follow_signals()
    signals.put(message(taskRef=thread_task.ref))
    assert (await at_its_end(thread_task)).status == "cancelled"


async def test_a_follower_that_is_refused_says_so_and_ends(
    broker: AsyncTaskBroker,
    thread_broker: TaskBroker,
    queue: tuple[SignalQueue, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients: list[AnyBroker] = [broker, thread_broker]
    for number, client in enumerate(clients, start=1):
        queue[0].fates[:] = [404]
        client.follow_signals()
        said = "signals are not followed any more; heartbeats see the same, later: No (404)"
        await eventually(lambda said=said, number=number: caplog.text.count(said) == number)  # type: ignore[misc]


# --- reading by hand -----------------------------------------------------------------------------


class Reading:
    """A consumer of `signals` in the background, of either client."""

    def __init__(self, broker: AnyBroker, handle: Callable[[Signal], None]) -> None:
        self.broker = broker
        self.ended = asyncio.create_task(self._read(handle))

    async def _read(self, handle: Callable[[Signal], None]) -> None:
        if isinstance(self.broker, AsyncTaskBroker):
            async for signal in self.broker.signals(wait=60):
                handle(signal)
        else:
            await asyncio.to_thread(self._read_in_thread, self.broker, handle)

    @staticmethod
    def _read_in_thread(broker: TaskBroker, handle: Callable[[Signal], None]) -> None:
        for signal in broker.signals(wait=60):
            handle(signal)


async def close(broker: AnyBroker) -> None:
    if isinstance(broker, AsyncTaskBroker):
        await broker.close()
    else:
        await asyncio.to_thread(broker.close)


@pytest.fixture(params=[AsyncTaskBroker, TaskBroker])
async def reader(
    request: pytest.FixtureRequest, tools: ToolServer, queue: tuple[SignalQueue, str]
) -> AsyncIterator[AnyBroker]:
    """A client of the queue, of each kind in turn."""
    broker: AnyBroker = request.param(queue[1], tools.name, tools.key, attempts=1)
    yield broker
    await close(broker)


async def test_signals_are_acknowledged_when_all_of_a_batch_are_read(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    sent = [signals.put(message(externalId=f"job-{number}")) for number in range(250)]
    read: list[str] = []
    acknowledged: list[int] = []

    def handle(signal: Signal) -> None:
        assert signal.external_id == f"job-{len(read)}"
        read.append(signal.id)
        acknowledged.append(len(signals.acknowledged))

    Reading(reader, handle)

    await eventually(lambda: len(signals.acknowledged) == 250)
    assert read == signals.acknowledged == sent
    assert acknowledged == [0] * 100 + [100] * 100 + [200] * 50
    sent.append(signals.put(message(externalId="job-250")))
    await eventually(lambda: read == signals.acknowledged == sent)


async def test_a_reader_that_fails_in_the_middle_gets_them_again(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    sent = [signals.put(message()) for _ in range(3)]
    read: list[str] = []

    def handle(signal: Signal) -> None:
        read.append(signal.id)
        if len(read) == 2:
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await Reading(reader, handle).ended
    assert signals.acknowledged == []

    Reading(reader, handle)
    await eventually(lambda: signals.acknowledged == sent)
    assert read == [*sent[:2], *sent]


async def test_what_comes_twice_is_read_once(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    signals.forgets = True
    first = signals.put(message())
    read: list[str] = []
    Reading(reader, lambda signal: read.append(signal.id))

    await eventually(lambda: signals.polled > 2)
    second = signals.put(message())
    signals.forgets = False
    await eventually(lambda: signals.acknowledged == [first, second])
    assert read == [first, second]


async def test_types_of_a_later_broker_are_passed_over(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    unknown = signals.put({"type": "task.praised", "data": None})
    known = signals.put(message())
    read: list[str] = []
    Reading(reader, lambda signal: read.append(signal.id))
    await eventually(lambda: signals.acknowledged == [unknown, known])
    assert read == [known]


async def test_readers_outlive_a_broker_that_is_away_or_does_not_know_them_for_a_while(
    reader: AnyBroker,
    queue: tuple[SignalQueue, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.LONGEST_PAUSE", 0.01)
    signals, _ = queue
    signals.fates[:] = [503, 0, 401, 403, 429]
    sent = signals.put(message())
    read: list[str] = []
    Reading(reader, lambda signal: read.append(signal.id))

    await eventually(lambda: signals.acknowledged == [sent])
    assert read == [sent]
    assert "there are no signals for the time being" in caplog.text
    assert signals.key not in caplog.text


async def test_a_refusal_is_for_the_reader(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    queue[0].fates[:] = [404]
    with pytest.raises(Problem, match="404"):
        await Reading(reader, print).ended


async def test_closing_ends_a_reader_at_once(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    sent = [signals.put(message()) for _ in range(3)]
    read: list[str] = []
    reading = Reading(reader, lambda signal: read.append(signal.id))
    await eventually(lambda: signals.acknowledged == sent)
    await close(reader)

    await asyncio.wait_for(reading.ended, PATIENCE)  # the broker would answer after a minute
    assert read == sent
    with pytest.raises(BrokerError, match="closed"):
        await Reading(reader, print).ended


async def test_a_reader_that_was_busy_when_its_client_was_closed_reads_no_more(
    reader: AnyBroker, queue: tuple[SignalQueue, str]
) -> None:
    signals, _ = queue
    for _ in range(3):
        signals.put(message())
    read: list[str] = []
    may_go_on = threading.Event()

    def handle(signal: Signal) -> None:
        read.append(signal.id)
        if isinstance(reader, TaskBroker):
            may_go_on.wait()
        else:
            reader._closing.set()  # as `close` begins

    reading = Reading(reader, handle)
    await eventually(lambda: read)
    await close(reader)
    may_go_on.set()
    await asyncio.wait_for(reading.ended, PATIENCE)
    assert len(read) == 1
    assert signals.acknowledged == []


# --- small things --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "longest"), [(httpx.Timeout(10), 35), (httpx.Timeout(1, read=None), None)]
)
def test_a_poll_may_take_longer_than_other_requests_by_as_long_as_it_waits(
    usual: httpx.Timeout, longest: float | None
) -> None:
    seen: list[dict[str, Any]] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        said = {"type": "urn:taskbroker:problem:not-found", "title": "No"}
        return httpx.Response(404, json=said)

    transport = httpx.MockTransport(note)
    with (
        httpx.Client(transport=transport, timeout=usual) as http,
        TaskBroker("http://broker.example", "my-tools", "tbk_key", http=http) as broker,
    ):
        with pytest.raises(Problem):
            next(broker.signals())
        with pytest.raises(Problem):
            broker.task("0193").read()
    polling, reading = seen
    assert polling == {**reading, "read": longest}


def test_a_broker_that_does_not_wait_is_not_flooded() -> None:
    talks, inbox = Talks("my-tools", attempts=1, heartbeat=2), Inbox()
    assert next(talks.signals(inbox, 25)).after == 0
    assert list(inbox.new_in(Batch((), "cursor"))) == []
    attempt = next(talks.signals(inbox, 25))
    assert FIRST_PAUSE <= attempt.after < LONGEST_PAUSE
    assert attempt.request.path == "/v1/signals?after=cursor&wait=25"
