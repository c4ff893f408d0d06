"""`AsyncTaskBroker` against the broker: what a tool does, and what its client sees of it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from taskbroker_sdk import (
    AsyncTask,
    AsyncTaskBroker,
    BrokerError,
    CancelRequested,
    Json,
    Problem,
    TaskFailed,
    current_task,
    elicitation,
    owner_from,
    text_result,
)
from taskbroker_sdk._async import AsyncCreatedTask
from tests.support.secrecy import secret
from tests.support.service import McpClient, Service, ToolServer
from tests.support.waiting import eventually

SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
QUESTION = elicitation("Sure?", SCHEMA)
YES = {"action": "accept", "content": {"sure": True}}
RESULT = text_result("größer ✓")


def line_of(service: Service, tools: ToolServer, **options: Any) -> AsyncTaskBroker:
    given = {"heartbeat": 0.02, "grace": 1.0, "http": service.http, **options}
    return AsyncTaskBroker(
        str(service.http.base_url), tools.name, tools.key, tools.webhook_secret, **given
    )


@pytest.fixture
async def tools(service: Service) -> ToolServer:
    """A registered backend."""
    return await service.tool_server()


@pytest.fixture
async def broker(service: Service, tools: ToolServer) -> AsyncIterator[AsyncTaskBroker]:
    """Its line to the broker; whatever it runs is over when the test is."""
    async with line_of(service, tools) as broker:
        yield broker


@pytest.fixture
def client(service: Service) -> McpClient:
    return service.client()


def owner_of(client: McpClient) -> dict[str, Any]:
    return owner_from({"Authorization": f"Bearer {client.token}"})


def task_id(task: AsyncCreatedTask) -> str:
    """What the client gets to know the task by."""
    assert task.create_task_result_legacy["task"]["taskId"]
    return secret(str(task.create_task_result["taskId"]))


async def ended(client: McpClient, task: AsyncCreatedTask) -> dict[str, Any]:
    """What the client sees at the end."""
    seen: dict[str, Any] = {}

    async def is_over() -> bool:
        seen.update(await client.get(task_id(task)))
        return seen["status"] not in ("working", "input_required")

    await eventually(is_over)
    return seen


async def for_ever(_: AsyncTask) -> Json:
    """Work that is silent and never ends by itself."""
    await asyncio.Event().wait()
    return RESULT


# --- start: how work ends ------------------------------------------------------------------------


async def test_what_the_work_returns_completes_the_task(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def work(task: AsyncTask) -> Json:
        await task.progress("half way")
        assert (await task.read()).status_message == "half way"
        return RESULT

    task = await broker.start(owner_of(client), work, tool="resize", poll_interval_ms=50)

    assert task.create_task_result["status"] == "working"
    seen = await ended(client, task)
    assert seen["status"] == "completed"
    assert seen["result"] == {**RESULT, "resultType": "complete"}
    state = await task.read()
    assert (state.tool, state.poll_interval_ms, state.result) == ("resize", 50, RESULT)


async def test_an_error_that_the_work_chose_fails_the_task(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def work(_: AsyncTask) -> Json:
        raise TaskFailed(-32000, "no disk left", {"free": 0})

    task = await broker.start(owner_of(client), work)

    seen = await ended(client, task)
    assert seen["status"] == "failed"
    assert seen["error"] == {"code": -32000, "message": "no disk left", "data": {"free": 0}}


async def test_any_other_exception_is_for_the_log_and_not_for_the_client(
    broker: AsyncTaskBroker, client: McpClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(_: AsyncTask) -> Json:
        raise RuntimeError("the door code is 4711")

    task = await broker.start(owner_of(client), work)

    seen = await ended(client, task)
    assert seen["error"] == {"code": -32603, "message": "internal error in the tool server"}
    assert "4711" not in str(seen)
    [record] = [record for record in caplog.records if record.name == "taskbroker_sdk"]
    assert task.ref in record.getMessage()
    assert record.exc_info is not None
    assert "4711" in str(record.exc_info[1])


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"resultType": "input_required"}, "the broker refused the outcome of the tool"),
        ("a text", "the broker refused the outcome of the tool"),
        ({"x": "y" * 2_000_000}, "the broker refused the outcome of the tool"),
        ({"x": float("nan")}, "the outcome of the tool cannot be sent"),
    ],
    ids=["unfinished", "no object", "too large", "no JSON"],
)
async def test_an_outcome_that_cannot_be_kept_fails_the_task_instead_of_leaving_it_open(
    broker: AsyncTaskBroker, client: McpClient, outcome: Any, said: str
) -> None:
    async def work(_: AsyncTask) -> Json:
        result: Json = outcome
        return result

    task = await broker.start(owner_of(client), work)

    assert (await ended(client, task))["error"] == {"code": -32603, "message": said}


async def test_a_cancel_wish_ends_work_that_is_silent(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    cleaned_up = asyncio.Event()

    async def work(task: AsyncTask) -> Json:
        try:
            return await for_ever(task)
        finally:
            cleaned_up.set()

    task = await broker.start(owner_of(client), work)
    await client.cancel(task_id(task))

    assert (await ended(client, task))["status"] == "cancelled"
    assert cleaned_up.is_set()
    with pytest.raises(CancelRequested, match="as the client asked"):
        task.check()


async def test_a_cancel_wish_is_raised_from_progress_and_no_except_exception_swallows_it(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    may_go_on = asyncio.Event()

    async def work(task: AsyncTask) -> Json:
        await may_go_on.wait()
        try:
            await task.progress("not wanted any more")
        except Exception:  # noqa: BLE001 - as frameworks do around tools
            return text_result("crashed", is_error=True)
        return RESULT

    async with line_of(service, tools, heartbeat=3600) as broker:
        task = await broker.start(owner_of(client), work)
        await client.cancel(task_id(task))
        may_go_on.set()
        seen = await ended(client, task)

    assert seen["status"] == "cancelled"
    assert seen["statusMessage"] == "stopped, as the client asked"


async def test_work_that_finishes_all_the_same_completes_its_task(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def work(task: AsyncTask) -> Json:
        try:
            return await for_ever(task)
        except asyncio.CancelledError:
            return RESULT

    task = await broker.start(owner_of(client), work)
    await client.cancel(task_id(task))

    assert (await ended(client, task))["status"] == "completed"


async def test_work_whose_task_was_ended_by_others_is_cancelled(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    stopped = asyncio.Event()

    async def work(task: AsyncTask) -> Json:
        try:
            return await for_ever(task)
        finally:
            stopped.set()

    task = await broker.start(owner_of(client), work)
    await broker.task(task.ref).fail(-32000, "ended by the operator")

    await asyncio.wait_for(stopped.wait(), 30)
    assert (await ended(client, task))["error"]["message"] == "ended by the operator"


async def test_work_may_decide_for_itself_that_nobody_needs_it(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def work(_: AsyncTask) -> Json:
        raise CancelRequested("the user said no")

    task = await broker.start(owner_of(client), work)

    seen = await ended(client, task)
    assert (seen["status"], seen["statusMessage"]) == ("cancelled", "the user said no")


async def test_functions_deep_inside_the_work_find_their_task(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def deep_inside() -> Json:
        return text_result(current_task().ref)

    async def work(_: AsyncTask) -> Json:
        return await asyncio.create_task(deep_inside())

    tasks = [await broker.start(owner_of(client), work) for _ in range(3)]

    for task in tasks:
        assert (await ended(client, task))["result"]["content"][0]["text"] == task.ref
    with pytest.raises(LookupError):
        current_task()


# --- start: while work runs ----------------------------------------------------------------------


async def test_the_heartbeat_keeps_silent_work_from_being_taken_for_dead(
    service: Service, broker: AsyncTaskBroker, client: McpClient
) -> None:
    owner = owner_of(client)
    alive = await broker.start(owner, for_ever, stall_after_ms=3_000)
    dead = await broker.create(owner, stall_after_ms=3_000)

    for _ in range(2):
        service.clock.advance(seconds=2)
        await eventually(partial(has_moved, alive, (await alive.read()).last_updated_at))
    await service.sweep()

    assert (await client.get(task_id(alive)))["status"] == "working"
    assert (await client.get(task_id(dead)))["error"]["message"] == (
        "the tool server stopped reporting"
    )


async def has_moved(task: AsyncTask, before: datetime) -> bool:
    return (await task.read()).last_updated_at > before


async def test_questions_are_answered_bit_by_bit(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    async def work(task: AsyncTask) -> Json:
        answers = await task.ask({"first": QUESTION, "second": QUESTION}, "two questions")
        return {"content": [], "structuredContent": answers}

    task = await broker.start(owner_of(client), work)

    async def is_asked() -> bool:
        return (await task.read()).status == "input_required"

    await eventually(is_asked)
    seen = await client.get(task_id(task))
    assert seen["statusMessage"] == "two questions"
    assert seen["inputRequests"] == {"first": QUESTION, "second": QUESTION}

    await client.update(task_id(task), {"second": YES})
    state = await task.read()
    assert state.status == "input_required"
    assert state.input_responses == {"second": YES}
    assert state.input_requests == {"first": QUESTION}

    await client.update(task_id(task), {"first": {"action": "decline"}})
    answers = (await ended(client, task))["result"]["structuredContent"]
    assert answers == {"first": {"action": "decline"}, "second": YES}


async def test_whoever_waits_for_an_answer_hears_of_a_cancel_wish(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    task = await broker.create(owner_of(client))
    asking = asyncio.create_task(task.ask({"sure": QUESTION}))

    async def is_asked() -> bool:
        return (await broker.task(task.ref).read()).status == "input_required"

    await eventually(is_asked)
    await client.cancel(task_id(task))

    with pytest.raises(CancelRequested):
        await asking
    assert (await task.cancelled("as you wish")).status == "cancelled"


async def test_a_create_that_is_repeated_does_not_start_the_work_again(
    broker: AsyncTaskBroker, client: McpClient
) -> None:
    starts = []

    async def work(task: AsyncTask) -> Json:
        starts.append(task.ref)
        return await for_ever(task)

    first = await broker.start(owner_of(client), work, external_id="job-81")
    second = await broker.start(owner_of(client), work, external_id="job-81")

    assert first.ref == second.ref
    await client.cancel(task_id(first))
    await ended(client, first)
    over = await broker.start(owner_of(client), work, external_id="job-81")
    assert over.create_task_result["status"] == "cancelled"
    assert starts == [first.ref]


# --- close ---------------------------------------------------------------------------------------


async def test_closing_cancels_the_work_and_says_so(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    begun, cleaned_up = asyncio.Event(), asyncio.Event()

    async def work(task: AsyncTask) -> Json:
        begun.set()
        try:
            return await for_ever(task)
        finally:
            cleaned_up.set()

    async with line_of(service, tools) as broker:
        task = await broker.start(owner_of(client), work)
        await begun.wait()

    assert cleaned_up.is_set()
    seen = await client.get(task_id(task))
    assert seen["error"] == {"code": -32603, "message": "the tool server was stopped"}
    with pytest.raises(BrokerError, match="closed"):
        await broker.start(owner_of(client), work)


async def test_closing_does_not_wait_for_work_that_will_not_end(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    may_end = asyncio.Event()

    async def work(_: AsyncTask) -> Json:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        return RESULT

    async with line_of(service, tools, grace=0.01) as broker:
        task = await broker.start(owner_of(client), work)

    seen = await client.get(task_id(task))
    assert seen["error"]["message"] == "the tool server was stopped"
    may_end.set()


async def test_a_task_that_is_created_while_closing_is_not_left_behind(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    async def work(_: AsyncTask) -> Json:
        pytest.fail("nobody will wait for it")

    broker = line_of(service, tools)
    starting = asyncio.create_task(broker.start(owner_of(client), work))
    await asyncio.sleep(0)  # it begins
    await broker.close()

    seen = await client.get(task_id(await starting))
    assert seen["error"] == {"code": -32603, "message": "the tool server was stopped"}


async def test_a_closed_client_says_so(tools: ToolServer) -> None:
    async with AsyncTaskBroker("http://127.0.0.1:9", tools.name, tools.key) as broker:
        pass
    with pytest.raises(BrokerError, match="client is closed"):
        await broker.task("0193").read()


# --- tasks without start -------------------------------------------------------------------------


async def test_a_task_is_reported_on_by_hand(broker: AsyncTaskBroker, client: McpClient) -> None:
    task = await broker.create(
        owner_of(client), ttl_ms=None, stall_after_ms=5_000, status_message="soon"
    )
    assert (await client.get(task_id(task)))["statusMessage"] == "soon"
    state = await task.report(poll_interval_ms=77, stall_after_ms=None)
    assert (state.poll_interval_ms, state.stall_after_ms) == (77, None)

    state = await task.complete(RESULT)
    assert (state.applied, state.reason, state.status, state.over) == (
        True,
        None,
        "completed",
        True,
    )

    state = await task.fail(-32000, "too late")
    assert (state.applied, state.reason, state.status) == (False, "terminal", "completed")
    with pytest.raises(CancelRequested, match="has ended already: completed"):
        await task.progress("too late as well")


async def test_a_task_may_begin_at_its_end(broker: AsyncTaskBroker, client: McpClient) -> None:
    task = await broker.create(owner_of(client), status="completed", result=RESULT)
    assert (await client.get(task_id(task)))["status"] == "completed"


async def test_without_a_secret_events_carry_the_key(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    broker = AsyncTaskBroker("http://127.0.0.1", tools.name, tools.key, http=service.http)
    task = await broker.create(owner_of(client))
    assert (await task.report(status_message="unsigned")).applied


async def test_a_refusal_says_what_is_wrong(broker: AsyncTaskBroker, client: McpClient) -> None:
    task = await broker.create(owner_of(client))

    with pytest.raises(Problem) as refusal:
        await task.report(status="completed")
    problem = refusal.value
    assert problem.status == 422
    assert [fault.pointer for fault in problem.errors] == ["/data/result"]
    assert problem.document["type"].startswith("urn:")
    assert str(problem) == (
        f"{problem.title}: {problem.detail} [/data/result: {problem.errors[0].detail}]"
    )

    with pytest.raises(Problem, match=r"(?i)not found") as refusal:
        await broker.task("no/such task?").read()
    assert refusal.value.status == 404


async def test_a_key_that_is_not_valid_is_a_problem_that_does_not_quote_it(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    wrong = secret("tbk_" + "w" * 43)
    broker = AsyncTaskBroker("http://127.0.0.1", tools.name, wrong, http=service.http)
    with pytest.raises(Problem) as refusal:
        await broker.create(owner_of(client))
    assert refusal.value.status == 401
    assert wrong not in f"{refusal.value} {refusal.value!r} {refusal.value.document}"


# --- after a restart -----------------------------------------------------------------------------


async def test_a_restarted_server_finds_its_jobs_and_goes_on(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    owner = owner_of(client)
    before = line_of(service, tools)  # and then its process is killed
    task = await before.create(owner, external_id="job-81", tool="resize", stall_after_ms=60_000)
    await before.create(owner, status="completed", result=RESULT)

    async def resize(task: AsyncTask) -> Json:
        return text_result(f"resumed {task.ref}")

    async with line_of(service, tools) as broker:
        found = await broker.find("job-81")
        assert found is not None
        assert (found.ref, found.tool, found.external_id) == (task.ref, "resize", "job-81")
        assert await broker.find("job-82") is None

        working = [state.ref async for state in broker.list(status="working")]
        assert working == [task.ref]
        await broker.resume(task.ref, resize)
        seen = await ended(client, task)
        assert seen["result"]["content"][0]["text"] == f"resumed {task.ref}"

        again = await broker.resume(task.ref, for_ever)  # nothing is left to do
        assert (await again.read()).over


async def test_a_list_goes_on_over_its_pages(broker: AsyncTaskBroker, client: McpClient) -> None:
    owner = owner_of(client)
    made = [(await broker.create(owner)).ref for _ in range(205)]
    listed = [state.ref async for state in broker.list()]
    assert listed == sorted(made, reverse=True), "newest first, by the time in the reference"
