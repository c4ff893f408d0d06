"""The Python SDK over a real network to a real broker: threads, retries, the README."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from app.domain import signing
from taskbroker_sdk import (
    AsyncTask,
    AsyncTaskBroker,
    BrokerError,
    CreatedTask,
    Json,
    Problem,
    Task,
    TaskBroker,
    TaskFailed,
    TaskState,
    Unreachable,
    current_task,
    elicitation,
    owner_from,
    text_result,
)
from tests.sdk.flaky import Fate, FlakyNetwork, Seen, flaky_network
from tests.support.processes import ROOT, BrokerProcess, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import McpClient, ToolServer
from tests.support.waiting import eventually, until

QUESTION = elicitation("Sure?", {"type": "object", "properties": {"sure": {"type": "boolean"}}})
YES = {"action": "accept", "content": {"sure": True}}
RESULT = text_result("größer ✓")
SOON = 5.0
"""Less than the 10 seconds that one attempt may take."""


@pytest.fixture(scope="module")
def process() -> Iterator[BrokerProcess]:
    with running_broker("sdk-python") as process:
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
def broker(process: BrokerProcess, tools: ToolServer) -> Iterator[TaskBroker]:
    """The synchronous client; whatever it runs is over when the test is."""
    with TaskBroker(
        process.url, tools.name, tools.key, tools.webhook_secret, heartbeat=0.05, grace=1
    ) as broker:
        yield broker


@pytest.fixture
def network(process: BrokerProcess) -> Iterator[FlakyNetwork]:
    with flaky_network(process.url) as network:
        yield network


@pytest.fixture
def far_broker(network: FlakyNetwork, tools: ToolServer) -> Iterator[TaskBroker]:
    """A client whose way to the broker leads over the bad network."""
    with TaskBroker(network.url, tools.name, tools.key, tools.webhook_secret, attempts=3) as broker:
        yield broker


def owner_of(client: McpClient) -> dict[str, Any]:
    return owner_from({"Authorization": f"Bearer {client.token}"})


def task_id(task: CreatedTask) -> str:
    return secret(str(task.create_task_result["taskId"]))


def at_its_end(task: Task) -> TaskState:
    until(lambda: task.read().over)
    return task.read()


# --- threads -------------------------------------------------------------------------------------


def test_work_in_a_thread_completes_its_task(broker: TaskBroker, client: McpClient) -> None:
    def work(task: Task) -> Json:
        assert current_task(Task) is task
        with pytest.raises(LookupError):
            current_task()
        task.progress("half way")
        return text_result(f"half way: {task.read().status_message}")

    task = broker.start(owner_of(client), work, tool="resize")

    assert task.create_task_result["status"] == "working"
    state = at_its_end(task)
    assert (state.status, state.tool) == ("completed", "resize")
    assert state.result == text_result("half way: half way")
    with pytest.raises(LookupError):
        current_task(Task)


def test_errors_in_a_thread_fail_the_task(broker: TaskBroker, client: McpClient) -> None:
    def chosen(_: Task) -> Json:
        raise TaskFailed(-32000, "no disk left")

    def unforeseen(_: Task) -> Json:
        raise SystemExit("the door code is 4711")

    first, second = (broker.start(owner_of(client), work) for work in (chosen, unforeseen))

    assert at_its_end(first).error == {"code": -32000, "message": "no disk left"}
    assert at_its_end(second).error == {
        "code": -32603,
        "message": "internal error in the tool server",
    }


async def test_a_cancel_wish_reaches_a_thread_that_only_checks(
    broker: TaskBroker, client: McpClient
) -> None:
    may_end = threading.Event()

    def work(task: Task) -> Json:
        while not may_end.is_set():
            task.check()
        return RESULT

    task = broker.start(owner_of(client), work)
    await client.cancel(task_id(task))

    state = await asyncio.to_thread(at_its_end, task)
    assert (state.status, state.status_message) == ("cancelled", "stopped, as the client asked")


async def test_a_thread_asks_and_waits_for_all_answers(
    broker: TaskBroker, client: McpClient
) -> None:
    def work(task: Task) -> Json:
        answers = task.ask({"first": QUESTION, "second": QUESTION})
        return {"content": [], "structuredContent": answers}

    task = broker.start(owner_of(client), work, stall_after_ms=60_000)
    await eventually(lambda: task.read().status == "input_required")
    await client.update(task_id(task), {"second": YES})
    assert task.read().status == "input_required"
    await client.update(task_id(task), {"first": YES})

    state = await asyncio.to_thread(at_its_end, task)
    assert state.result["structuredContent"] == {"first": YES, "second": YES}


def test_the_heartbeat_of_a_silent_thread_looks_and_now_and_then_is_a_sign_of_life(
    network: FlakyNetwork, tools: ToolServer, client: McpClient
) -> None:
    may_end = threading.Event()

    def work(_: Task) -> Json:
        may_end.wait()
        return RESULT

    with TaskBroker(
        network.url, tools.name, tools.key, tools.webhook_secret, heartbeat=0.05
    ) as broker:
        task = broker.start(owner_of(client), work, stall_after_ms=3_000)
        network.seen.clear()
        until(lambda: [seen.method for seen in network.seen].count("POST") == 2)
        beats = [*network.seen]
        may_end.set()
        assert at_its_end(task).status == "completed"

    methods = [beat.method for beat in beats]
    first, second = (number for number, method in enumerate(methods) if method == "POST")
    assert first > 3, "between the signs of life it looks"
    assert second - first > 3
    for sign in (beats[first], beats[second]):
        assert json.loads(sign.body) == {"type": "task.updated", "data": {"taskRef": task.ref}}


def test_a_task_that_is_created_while_closing_is_not_left_behind(
    network: FlakyNetwork, tools: ToolServer, broker: TaskBroker, client: McpClient
) -> None:
    started: list[CreatedTask] = []

    def work(_: Task) -> Json:
        pytest.fail("nobody will wait for it")

    network.fates[:] = ["busy", "busy"]
    with TaskBroker(network.url, tools.name, tools.key) as closing:
        thread = threading.Thread(
            target=lambda: started.append(closing.start(owner_of(client), work))
        )
        thread.start()
        until(lambda: network.seen)
    thread.join(30)

    error = broker.task(started[0].ref).read().error
    assert error == {"code": -32603, "message": "the tool server was stopped"}
    with pytest.raises(BrokerError, match="client is closed"):
        closing.task(started[0].ref).read()


def test_closing_stops_threads_that_look_and_leaves_those_that_do_not(
    process: BrokerProcess, tools: ToolServer, client: McpClient
) -> None:
    may_end, stopped = threading.Event(), threading.Event()

    def asking(task: Task) -> Json:
        try:
            return task.ask({"sure": QUESTION})
        finally:
            stopped.set()

    def silent(_: Task) -> Json:
        may_end.wait()
        return RESULT

    with TaskBroker(process.url, tools.name, tools.key, heartbeat=3600, grace=0.2) as broker:
        tasks = [broker.start(owner_of(client), work) for work in (asking, silent)]
        until(lambda: tasks[0].read().status == "input_required")

    assert stopped.is_set()
    may_end.set()
    with TaskBroker(process.url, tools.name, tools.key) as broker:
        for task in tasks:
            error = broker.task(task.ref).read().error
            assert error == {"code": -32603, "message": "the tool server was stopped"}


def test_a_restarted_server_finds_its_jobs_and_goes_on(
    broker: TaskBroker, client: McpClient
) -> None:
    task = broker.create(owner_of(client), external_id="job-81", stall_after_ms=60_000)
    assert task.ref in [state.ref for state in broker.list(status="working")]
    found = broker.find("job-81")
    assert found is not None
    broker.resume(found.ref, lambda _: RESULT)
    assert at_its_end(task).result == RESULT
    assert broker.resume(found.ref, lambda _: text_result("never")).read().result == RESULT
    assert broker.find("job-82") is None


# --- a bad network -------------------------------------------------------------------------------


def signed_by(tools: ToolServer, request: Seen) -> bool:
    headers = {name: value.encode() for name, value in request.headers.items()}
    return signing.verify(
        [signing.decode_secret(tools.webhook_secret)],
        headers["webhook-id"],
        headers["webhook-timestamp"],
        headers["webhook-signature"],
        request.body,
    )


def test_an_event_that_was_not_taken_is_sent_again(
    far_broker: TaskBroker, network: FlakyNetwork, tools: ToolServer, client: McpClient
) -> None:
    task = far_broker.create(owner_of(client))
    network.seen.clear()
    network.fates[:] = ["busy", "lose the request"]

    state = task.complete(RESULT)

    assert (state.applied, state.status) == (True, "completed")
    assert len(network.seen) == 3
    assert len({(request.body, request.headers["webhook-id"]) for request in network.seen}) == 1
    assert all(signed_by(tools, request) for request in network.seen)
    assert all("authorization" not in request.headers for request in network.seen)


def test_an_event_whose_answer_was_lost_is_applied_once(
    far_broker: TaskBroker, network: FlakyNetwork, client: McpClient
) -> None:
    task = far_broker.create(owner_of(client))
    network.fates[:] = ["lose the answer"]

    state = task.report(status="input_required", input_requests={"sure": QUESTION})

    # Had it been applied again, the key would have been refused as used.
    assert (state.applied, state.reason, state.status) == (False, "duplicate", "input_required")


def test_a_create_whose_answer_was_lost_leaves_one_task(
    far_broker: TaskBroker, network: FlakyNetwork, client: McpClient
) -> None:
    before = [state.ref for state in far_broker.list()]
    network.fates[:] = ["lose the answer", "busy"]

    task = far_broker.create(owner_of(client))

    assert [state.ref for state in far_broker.list()] == [task.ref, *before]


def test_a_refusal_is_not_sent_again(far_broker: TaskBroker, network: FlakyNetwork) -> None:
    with pytest.raises(Problem):
        far_broker.task("no-such-task").read()
    assert len(network.seen) == 1


def test_when_the_attempts_are_used_up_the_error_says_so_without_the_keys(
    far_broker: TaskBroker, network: FlakyNetwork, tools: ToolServer, client: McpClient
) -> None:
    network.fates[:] = ["lose the request", "lose the request", "busy"]
    with pytest.raises(Unreachable) as failure:
        far_broker.create(owner_of(client))
    text = f"{failure.value} {failure.value!r}"
    assert "POST /v1/tasks in 3 attempts" in text
    assert "503 Service Unavailable" in text
    assert failure.value.__cause__ is failure.value.__context__ is None
    for hidden in (tools.key, tools.webhook_secret, client.token):
        assert str(hidden) not in text


def test_progress_that_gets_lost_does_not_end_the_work(
    far_broker: TaskBroker,
    network: FlakyNetwork,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = far_broker.create(owner_of(client))
    network.fates[:] = ["busy", "busy", "busy"]
    task.progress("nobody hears this")
    task.progress("but this")
    assert task.read().status_message == "but this"
    [warning] = [record for record in caplog.records if record.name == "taskbroker_sdk"]
    assert warning.levelno == logging.WARNING


def test_the_end_gets_known_however_long_the_broker_is_away(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.LONGEST_PAUSE", 0.01)
    pages: list[Fate] = ["a login page", "a welcome page", "no such page", "busy"]
    fates: list[Fate] = [*pages, "lose the request", "lose the answer", "busy"]
    with TaskBroker(
        network.url, tools.name, tools.key, tools.webhook_secret, attempts=1, heartbeat=3600
    ) as broker:
        ready = threading.Event()

        def work(_: Task) -> Json:
            ready.wait()
            return RESULT

        task = broker.start(owner_of(client), work)
        network.seen.clear()
        network.fates[:] = fates
        ready.set()
        until(lambda: len(network.seen) == len(fates) + 1)

    assert len({request.headers["webhook-id"] for request in network.seen}) == 1
    with TaskBroker(network.url, tools.name, tools.key) as broker:
        assert broker.task(task.ref).read().result == RESULT


def test_an_outcome_that_is_too_large_for_a_proxy_fails_the_task(
    network: FlakyNetwork, tools: ToolServer, client: McpClient
) -> None:
    ready = threading.Event()

    def work(_: Task) -> Json:
        ready.wait()
        return RESULT

    with TaskBroker(network.url, tools.name, tools.key, heartbeat=3600) as broker:
        task = broker.start(owner_of(client), work)
        network.fates[:] = ["too large"]
        ready.set()
        until(lambda: not network.fates)
        error = at_its_end(task).error
    assert error == {"code": -32603, "message": "the broker refused the outcome of the tool"}


async def test_the_end_gets_known_when_the_backend_is_let_in_again(
    process: BrokerProcess,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.LONGEST_PAUSE", 0.01)
    ready = threading.Event()

    def work(_: Task) -> Json:
        ready.wait()
        return RESULT

    async with process.tool_server("on-leave") as tools:
        with TaskBroker(process.url, tools.name, tools.key) as broker:
            task = await asyncio.to_thread(broker.start, owner_of(client), work)
            await process.run("backend disable on-leave")
            await eventually(lambda: refused(task))
            ready.set()
            await eventually(lambda: "is not reported yet: Not allowed" in caplog.text)
            await process.run("backend enable on-leave")
            await eventually(lambda: not broker._running)
            assert (await asyncio.to_thread(task.read)).result == RESULT


def refused(task: Task) -> bool:
    try:
        task.read()
    except Problem as problem:
        return problem.status == 403
    return False


def test_a_page_that_is_not_the_brokers_says_nothing_of_the_task(
    network: FlakyNetwork, tools: ToolServer, client: McpClient, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    def work(task: Task) -> Json:
        may_end.wait()
        task.check()
        return RESULT

    with TaskBroker(network.url, tools.name, tools.key, heartbeat=0.05) as broker:
        task = broker.start(owner_of(client), work)
        network.fates[:] = ["no such page"]
        until(lambda: "404 Not Found, not a broker's answer" in caplog.text)
        may_end.set()
        assert at_its_end(task).result == RESULT


def test_closing_gives_up_on_a_broker_that_is_away(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = threading.Event()

    def silent(_: Task) -> Json:
        may_end.wait()
        return RESULT

    with TaskBroker(
        network.url, tools.name, tools.key, attempts=2, heartbeat=3600, grace=0
    ) as broker:
        task = broker.start(owner_of(client), silent)
        network.fates[:] = ["busy", "busy"]
    may_end.set()
    assert f"the end of task {task.ref} was not reported: No usable answer" in caplog.text


def test_closing_takes_no_longer_than_the_grace_and_one_round(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._client.LAST_ROUND", 0.2)
    may_end = threading.Event()

    def silent(_: Task) -> Json:
        may_end.wait()
        return RESULT

    with TaskBroker(network.url, tools.name, tools.key, heartbeat=3600, grace=0.1) as broker:
        task = broker.start(owner_of(client), silent)
        network.fates[:] = ["no answer"]
        began = time.monotonic()
    assert time.monotonic() - began < SOON
    may_end.set()
    assert f"the end of task {task.ref} was not reported: the broker did not" in caplog.text


async def test_closing_takes_no_longer_in_asyncio(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._client.LAST_ROUND", 0.2)
    async with AsyncTaskBroker(
        network.url, tools.name, tools.key, heartbeat=3600, grace=0.1
    ) as broker:
        task = await broker.start(owner_of(client), for_ever)
        network.fates[:] = ["no answer"]
        began = time.monotonic()
    assert time.monotonic() - began < SOON
    assert f"the end of task {task.ref} was not reported: the broker did not" in caplog.text


def test_an_event_loop_that_ends_waits_no_longer(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._async.LAST_ROUND", 0.2)

    async def program() -> AsyncTask:
        broker = AsyncTaskBroker(network.url, tools.name, tools.key)
        task = await broker.start(owner_of(client), for_ever)
        network.fates[:] = ["no answer"]
        return task

    began = time.monotonic()
    task = asyncio.run(program())
    assert time.monotonic() - began < SOON
    assert f"the end of task {task.ref} was not reported: the broker did not" in caplog.text


def test_closing_does_not_wait_out_a_pause_but_reports_once_more(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    broker: TaskBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.LONGEST_PAUSE", 3600)
    ready = threading.Event()

    def work(_: Task) -> Json:
        ready.wait()
        return RESULT

    with TaskBroker(network.url, tools.name, tools.key, attempts=1, heartbeat=3600) as closing:
        task = closing.start(owner_of(client), work)
        network.fates[:] = ["busy"]
        ready.set()
        until(lambda: "is not reported yet" in caplog.text)
    assert broker.task(task.ref).read().result == RESULT


async def test_closing_does_not_wait_out_a_pause_in_asyncio(
    network: FlakyNetwork,
    tools: ToolServer,
    client: McpClient,
    broker: TaskBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskbroker_sdk._talks.LONGEST_PAUSE", 3600)
    ready = asyncio.Event()

    async def work(_: AsyncTask) -> Json:
        await ready.wait()
        return RESULT

    async with AsyncTaskBroker(
        network.url, tools.name, tools.key, attempts=1, heartbeat=3600
    ) as closing:
        task = await closing.start(owner_of(client), work)
        network.fates[:] = ["busy"]
        ready.set()
        await eventually(lambda: "is not reported yet" in caplog.text)
    assert broker.task(task.ref).read().result == RESULT


async def for_ever(_: AsyncTask) -> Json:
    await asyncio.Event().wait()
    return RESULT


def test_questions_outlive_an_outage(
    far_broker: TaskBroker, network: FlakyNetwork, client: McpClient
) -> None:
    task = far_broker.create(owner_of(client))
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        answers.append(task.ask({"sure": QUESTION}))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: network.seen[-1].method == "GET")
    network.fates[:] = ["busy"] * 4
    until(lambda: not network.fates)
    asyncio.run(_answer(network.broker_url, client, task))
    thread.join(30)
    assert answers == [{"sure": YES}]


async def _answer(url: str, client: McpClient, task: CreatedTask) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        await McpClient(http, client.token).update(task_id(task), {"sure": YES})


# --- programs ------------------------------------------------------------------------------------


def variables(process: BrokerProcess, tools: ToolServer) -> dict[str, str]:
    return {
        "BROKER_URL": process.url,
        "BROKER_BACKEND": tools.name,
        "BROKER_API_KEY": tools.key,
        "BROKER_WEBHOOK_SECRET": tools.webhook_secret,
    }


ASYNCHRONOUS = """
import asyncio
from taskbroker_sdk import AsyncTaskBroker

async def silent(task):
    await asyncio.Event().wait()

async def program():
    broker = AsyncTaskBroker.from_env()
    task = await broker.start({"authorization": "Bearer somebody"}, silent)
    print(task.ref)
    await task.read()

asyncio.run(program())
"""
SYNCHRONOUS = """
import threading
from taskbroker_sdk import TaskBroker

broker = TaskBroker.from_env(grace=0.1)
task = broker.start({"authorization": "Bearer somebody"}, lambda task: threading.Event().wait())
print(task.ref)
"""


@pytest.mark.parametrize("program", [ASYNCHRONOUS, SYNCHRONOUS], ids=["async", "sync"])
def test_a_program_that_ends_without_closing_says_so_of_its_tasks(
    process: BrokerProcess, tools: ToolServer, broker: TaskBroker, program: str
) -> None:
    environment = {**os.environ, **variables(process, tools)}
    ref = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    error = broker.task(ref.strip()).read().error
    assert error == {"code": -32603, "message": "the tool server was stopped"}


README = (ROOT / "sdk" / "python" / "README.md").read_text()
[TEN_LINES] = re.findall(r"```python ten-lines\n(.*?)```", README, re.DOTALL)


async def test_the_ten_lines_of_the_readme(
    process: BrokerProcess,
    tools: ToolServer,
    client: McpClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables(process, tools).items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    exec(TEN_LINES, names)  # noqa: S102 - what a reader would type

    answer = await names["tools_call"]({"Authorization": f"Bearer {client.token}"})

    seen: dict[str, Any] = {}

    async def is_completed() -> bool:
        seen.update(await client.get(secret(answer["taskId"])))
        return bool(seen["status"] == "completed")

    await eventually(is_completed)
    assert seen["result"]["content"] == [{"type": "text", "text": "3 images resized"}]
    await names["broker"].close()
