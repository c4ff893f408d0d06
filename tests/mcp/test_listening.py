"""`subscriptions/listen`: clients that are told instead of asking."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.broker.context import Caller
from app.broker.follow import follow_all, own_tasks
from app.db import clients
from app.domain.owners import opaque_token_owner
from tests.support.clock import ShiftedClock
from tests.support.listening import SUBSCRIPTION, listen_request, listening
from tests.support.service import (
    ELICITATION,
    McpClient,
    Service,
    ToolServer,
    networked_service,
    test_settings,
)
from tests.support.waiting import eventually

ANSWER = {"action": "accept", "content": {"sure": True}}
LIMIT = 5


@pytest.fixture
async def online(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    """A broker on a real connection."""
    settings = test_settings(database_url, max_streams_per_owner=LIMIT, max_tasks_per_stream=LIMIT)
    async with networked_service(settings, clock) as service:
        yield service


@pytest.fixture
async def tools(online: Service) -> ToolServer:
    return await online.tool_server()


@pytest.fixture
def client(online: Service) -> McpClient:
    return online.client()


def without_meta(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in ("_meta", "resultType")}


# --- a stream from its beginning to its end ---------------------------------------------------


async def test_a_task_is_told_from_its_state_now_to_its_end(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """Each frame says what `tasks/get` says at that moment."""
    task = await tools.create(client)
    async with listening(online.http, client, [task.id], rpc_id="listen:0") as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"] == "text/event-stream"
        assert stream.response.headers["x-accel-buffering"] == "no"
        assert stream.response.headers["cache-control"] == "no-cache"
        assert await stream.acknowledged() == [task.id]

        async def says_what_get_says() -> str:
            told = await stream.task()
            assert told["_meta"] == {SUBSCRIPTION: "listen:0"}
            assert without_meta(told) == without_meta(await client.get(task.id))
            return str(told["status"])

        assert await says_what_get_says() == "working"
        await tools.report(task, statusMessage="half way")
        assert await says_what_get_says() == "working"
        await tools.ask(task, "sure", "when")
        assert await says_what_get_says() == "input_required"
        await client.update(task.id, {"sure": ANSWER})
        assert await says_what_get_says() == "input_required"
        await client.update(task.id, {"when": ANSWER})
        assert await says_what_get_says() == "working"
        await tools.complete(task, {"content": [{"type": "text", "text": "done"}], "n": 1})
        assert await says_what_get_says() == "completed"

        [end] = await stream.rest()
        assert end == {
            "jsonrpc": "2.0",
            "id": "listen:0",
            "result": {"resultType": "complete", "_meta": {SUBSCRIPTION: "listen:0"}},
        }


@pytest.mark.parametrize("rpc_id", [7, "7", 12345678901234567890, 'with "quotes" and ü'])
async def test_the_subscription_is_named_by_the_id_of_its_request(
    online: Service, tools: ToolServer, client: McpClient, rpc_id: Any
) -> None:
    task = await tools.create(client)
    await tools.complete(task)
    async with listening(online.http, client, [task.id], rpc_id=rpc_id) as stream:
        frames = await stream.rest()
    acknowledged, told, end = frames
    assert acknowledged["params"]["_meta"] == told["params"]["_meta"] == {SUBSCRIPTION: rpc_id}
    assert end["result"]["_meta"] == {SUBSCRIPTION: rpc_id}
    assert end["id"] == rpc_id


async def test_several_tasks_share_a_stream_to_the_end_of_the_last(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    first, second = [await tools.create(client) for _ in range(2)]
    async with listening(online.http, client, [first.id, second.id, first.id]) as stream:
        assert await stream.acknowledged() == [first.id, second.id], "each once"
        assert {(await stream.task())["taskId"] for _ in range(2)} == {first.id, second.id}
        await tools.complete(second)
        assert (await stream.task())["taskId"] == second.id
        await tools.report(first, statusMessage="still at it")
        assert (await stream.task())["statusMessage"] == "still at it"
        await tools.report(first, status="cancelled")
        assert (await stream.task())["status"] == "cancelled"
        assert len(await stream.rest()) == 1


async def test_what_changes_nothing_that_is_shown_is_not_told(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """A wish to cancel waits for the tool server: nothing to see yet."""
    task = await tools.create(client)
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        await stream.task()
        await client.cancel(task.id)
        await tools.report(task, status="cancelled")
        assert (await stream.task())["status"] == "cancelled"


async def test_a_result_comes_byte_for_byte(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client)
    raw = b'{"content": [], "z": 1.0e2, "a": "\\ud83d", "big": 123456789012345678901234567890}'
    body = (
        b'{"type": "task.updated", "data": {"taskRef": "%b", "status": "completed", "result": %b}}'
    )
    event = body % (task.ref.encode(), raw)
    await tools.post_event(event, tools.signed(event))
    headers: dict[str, str | None] = {
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "subscriptions/listen",
    }
    response = await client.post(listen_request([task.id]), headers)
    assert b'{"resultType":"complete",' + raw[1:] in response.content


@pytest.mark.parametrize("line_break", ["\n", "\r", "\r\n"])
async def test_a_result_with_line_breaks_stays_one_frame(
    online: Service, tools: ToolServer, client: McpClient, line_break: str
) -> None:
    """A tool server may write its JSON as it likes."""
    task = await tools.create(client)
    pretty = f'{{"content": [],{line_break}  "n":{line_break} 1}}'
    data = f'{{"taskRef": "{task.ref}", "status": "completed", "result": {pretty}}}'
    event = f'{{"type": "task.updated", "data": {data}}}'.encode()
    await tools.post_event(event, tools.signed(event))
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        assert (await stream.task())["result"]["n"] == 1
        assert len(await stream.rest()) == 1


# --- whose tasks ------------------------------------------------------------------------------


async def test_only_tasks_of_the_caller_are_acknowledged(
    online: Service, tools: ToolServer, client: McpClient, clock: ShiftedClock
) -> None:
    """Foreign, unknown, malformed and expired ids are left out, each in the same way."""
    mine = await tools.create(client)
    foreign = await tools.create(online.client())
    expired = await tools.create(client, ttlMs=1_000)
    clock.advance(seconds=2)
    ids = [foreign.id, mine.id, "x" * 64, "", expired.id]
    async with listening(online.http, client, ids) as stream:
        assert await stream.acknowledged() == [mine.id]
        assert (await stream.task())["taskId"] == mine.id
        await tools.complete(mine)
        await stream.task()
        assert len(await stream.rest()) == 1


async def test_a_stream_about_nobodys_task_ends_at_once(online: Service, client: McpClient) -> None:
    async with listening(online.http, client, ["x" * 64]) as stream:
        assert await stream.acknowledged() == []
        [end] = await stream.rest()
        assert end["result"]["resultType"] == "complete"


@pytest.mark.parametrize("ids", [None, []])
async def test_a_stream_about_other_things_stays_open_and_silent(
    online: Service, client: McpClient, ids: list[str] | None
) -> None:
    """It needs no extension, and nothing of what it asks for is acknowledged."""
    more = {"toolsListChanged": True, "resourceSubscriptions": ["file:///x"]}
    async with listening(online.http, client, ids, more=more) as stream:
        assert await stream.acknowledged() is None
        assert await open_streams(online) == 1
    await eventually(lambda: has_streams(online, 0))


async def test_behind_the_door_of_a_backend_there_are_its_own_tasks(online: Service) -> None:
    one = await online.tool_server("one", mcp_url="http://127.0.0.1:1/mcp")
    other = await online.tool_server("other", mcp_url="http://127.0.0.1:1/mcp")
    client = online.client()
    its, not_its = await one.create(client), await other.create(client)
    through = client.through("one")
    async with listening(online.http, through, [its.id, not_its.id]) as stream:
        assert await stream.acknowledged() == [its.id]
        await stream.task()
        await one.complete(its)
        assert (await stream.task())["status"] == "completed"


async def test_the_extension_has_to_be_declared(online: Service, client: McpClient) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"notifications": {"taskIds": ["x"]}}
    response = await client.request("subscriptions/listen", params, meta=meta)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == -32021
    assert response.json()["error"]["data"] == {
        "requiredCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    }


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"notifications": None},
        {"notifications": []},
        {"notifications": {"taskIds": None}},
        {"notifications": {"taskIds": "x"}},
        {"notifications": {"taskIds": [1]}},
        {"notifications": {"taskIds": ["x"] * (LIMIT + 1)}},
    ],
)
async def test_a_bad_filter_is_refused_with_the_reason(
    client: McpClient, params: dict[str, Any]
) -> None:
    response = await client.request("subscriptions/listen", params)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == -32602
    assert "notifications" in error["message"]


async def test_an_owner_may_have_so_many_streams(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    task, other = await tools.create(client), online.client()
    async with AsyncExitStack() as stack:
        for _ in range(LIMIT):
            stream = await stack.enter_async_context(listening(online.http, client, [task.id]))
            await stream.acknowledged()
        wanted = {"notifications": {"taskIds": [task.id]}}
        one_more = await client.request("subscriptions/listen", wanted)
        assert one_more.status_code == 429
        assert one_more.headers["retry-after"]
        assert "tasks/get" in one_more.json()["error"]["message"]
        his = await tools.create(other)
        async with listening(online.http, other, [his.id]) as stream:
            assert await stream.acknowledged() == [his.id]
    await eventually(lambda: has_streams(online, 0))
    async with listening(online.http, client, [task.id]) as stream:
        assert await stream.acknowledged() == [task.id]


async def test_streams_that_open_at_once_are_counted_as_well(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=online.http.base_url, limits=limits, timeout=30) as http,
        AsyncExitStack() as stack,
    ):

        async def status() -> int:
            stream = await stack.enter_async_context(listening(http, client, [task.id]))
            return stream.response.status_code

        answers = await asyncio.gather(*(status() for _ in range(8 * LIMIT)))
        assert Counter(answers) == {200: LIMIT, 429: 7 * LIMIT}
    await eventually(lambda: has_streams(online, 0))


# --- how it ends ------------------------------------------------------------------------------


async def test_expiry_is_told(
    online: Service, tools: ToolServer, client: McpClient, clock: ShiftedClock
) -> None:
    """As a failure, with the error that `tasks/get` answers from then on."""
    task = await tools.create(client, ttlMs=60_000)
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        await stream.task()
        clock.advance(seconds=61)
        told = await stream.task()
        assert told["status"] == "failed"
        assert told["error"] == await client.error("tasks/get", task.id)
        assert len(await stream.rest()) == 1


async def test_what_expires_before_it_was_told_is_told_as_well(
    online: Service, tools: ToolServer, client: McpClient, clock: ShiftedClock
) -> None:
    task = await tools.create(client, ttlMs=60_000)
    caller = Caller(online.broker.keyring.fingerprints(opaque_token_owner(str(client.token))))
    found = await own_tasks(online.broker, [task.id], caller)
    clock.advance(seconds=61)
    seen = [one async for one in follow_all(online.broker, found, caller)]
    assert [(one.task_id, one.expired) for one in seen] == [(task.id, True)]


async def test_expiry_is_told_as_it_happens(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """Nobody has to look at it."""
    task = await tools.create(client, ttlMs=300)
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        assert [frame.get("method") for frame in await stream.rest()] == [
            "notifications/tasks",
            "notifications/tasks",
            None,
        ]


async def test_who_has_lost_the_credential_is_told_nothing_more(online: Service) -> None:
    tools, client = await online.tool_server(), await online.keyed_client("desktop")
    task = await tools.create(client)
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        await stream.task()
        async with online.broker.db.transaction() as connection:
            await clients.revoke(connection, "desktop", online.clock())

        async def refused() -> bool:
            return (await client.request("server/discover")).status_code == 401

        await eventually(refused)
        await tools.complete(task)
        [end] = await stream.rest()
        assert end["error"]["code"] == -32600
        assert "revoked" in end["error"]["message"]


async def test_who_leaves_leaves_nothing_behind(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    tasks = [await tools.create(client) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for task in tasks:
            stream = await stack.enter_async_context(listening(online.http, client, [task.id]))
            await stream.acknowledged()
        assert await open_streams(online) == 3
    await eventually(lambda: has_streams(online, 0))


async def open_streams(service: Service) -> int:
    for line in (await service.http.get("/metrics")).text.splitlines():
        if line.startswith("taskbroker_streams "):
            return int(float(line.split()[1]))
    raise AssertionError("there is no such metric")


async def has_streams(service: Service, count: int) -> bool:
    return await open_streams(service) == count


# --- what is missed, and what is not ----------------------------------------------------------


async def test_a_change_between_the_last_poll_and_the_stream_is_not_missed(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    """Events rain down while streams open: each stream ends with the outcome."""

    async def one(number: int) -> None:
        task = await tools.create(client)
        ending = asyncio.create_task(tools.complete(task, {"content": [], "n": number}))
        async with listening(online.http, client, [task.id]) as stream:
            await stream.acknowledged()
            *_, told, end = await stream.rest()
            assert told["params"]["result"]["n"] == number
            assert "result" in end
        await ending

    for round_ in range(10):
        await asyncio.gather(*(one(10 * round_ + number) for number in range(LIMIT)))


async def test_a_stream_outlives_a_database_that_is_away(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client)
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        await stream.task()
        await cut_connections(online)
        reported = await tools.report(task, statusMessage="back")
        while reported.status_code == 503:
            reported = await tools.report(task, statusMessage="back")
        assert (await stream.task())["statusMessage"] == "back"


async def cut_connections(service: Service) -> None:
    async with service.broker.db.own_connection() as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_questions_come_as_they_were_asked(
    online: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client)
    await tools.ask(task, "sure")
    async with listening(online.http, client, [task.id]) as stream:
        await stream.acknowledged()
        assert (await stream.task())["inputRequests"] == {"sure": ELICITATION}
