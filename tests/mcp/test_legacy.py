"""What an MCP client of 2025-11-25 sees of its tasks."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.db import clients
from tests.support.clock import ShiftedClock
from tests.support.service import (
    ELICITATION,
    McpClient,
    Service,
    ToolServer,
    networked_service,
    running_service,
    test_settings,
)
from tests.support.waiting import eventually

VERSION = "2025-11-25"
QUESTION: Any = ELICITATION["params"]
RELATED = "io.modelcontextprotocol/related-task"
BOTH = "application/json, text/event-stream"


class LegacyClient:
    """A client of 2025-11-25, written out."""

    def __init__(self, http: httpx.AsyncClient, client: McpClient) -> None:
        self.token = client.token
        self._http = http
        self._path = client.path

    def headers(self, version: str | None = VERSION, accept: str = BOTH) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": accept}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        if version is not None:
            headers["mcp-protocol-version"] = version
        return headers

    async def post(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        version: str | None = VERSION,
        accept: str = BOTH,
    ) -> httpx.Response:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        headers = self.headers(version, accept)
        return await self._http.post(self._path, json=message, headers=headers)

    async def result(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a request, from a plain answer or from the end of a stream."""
        message = _last_message(await self.post(method, params))
        assert "result" in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def error(self, method: str, **params: Any) -> dict[str, Any]:
        response = await self.post(method, params)
        assert response.status_code == 200
        error: dict[str, Any] = _last_message(response)["error"]
        return error

    async def reply(self, rpc_id: str, result: dict[str, Any] | None) -> httpx.Response:
        """Answers a question of the server's; `None` answers with an error."""
        answer = {"error": {"code": -1, "message": "no"}} if result is None else {"result": result}
        message = {"jsonrpc": "2.0", "id": rpc_id, **answer}
        return await self._http.post(self._path, json=message, headers=self.headers())

    async def notify(self, method: str, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        response = await self._http.post(self._path, json=message, headers=self.headers())
        assert response.status_code == 202

    async def messages(self, task_id: str) -> AsyncIterator[dict[str, Any]]:
        """What comes on the stream of `tasks/result`."""
        body = {"jsonrpc": "2.0", "id": 7, "method": "tasks/result", "params": {"taskId": task_id}}
        async with self._http.stream(
            "POST", self._path, json=body, headers=self.headers()
        ) as response:
            assert response.headers["content-type"] == "text/event-stream"
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))


def _last_message(response: httpx.Response) -> dict[str, Any]:
    if response.headers["content-type"] == "text/event-stream":
        [*_, last] = [line for line in response.text.splitlines() if line.startswith("data: ")]
        message: dict[str, Any] = json.loads(last.removeprefix("data: "))
        return message
    answer: dict[str, Any] = response.json()
    return answer


def of_old(service: Service, client: McpClient | None = None) -> LegacyClient:
    return LegacyClient(service.http, client or service.client())


@pytest.fixture
async def tools(service: Service) -> ToolServer:
    return await service.tool_server()


@pytest.fixture
async def online(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    async with networked_service(test_settings(database_url), clock) as service:
        yield service


# --- beginning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "spoken", "tasks"),
    [
        ("2025-11-25", "2025-11-25", True),
        ("2025-06-18", "2025-06-18", False),
        ("2025-03-26", "2025-03-26", False),
        ("1999-01-01", "2025-11-25", True),
    ],
)
async def test_a_version_is_agreed_on(
    service: Service, asked: str, spoken: str, tasks: bool
) -> None:
    client = of_old(service)
    response = await client.post("initialize", {"protocolVersion": asked}, version=None)
    result = response.json()["result"]
    assert result["protocolVersion"] == spoken
    assert result["serverInfo"]["name"] == "task-broker"
    assert result["capabilities"] == ({"tasks": {"cancel": {}, "list": {}}} if tasks else {})
    assert "mcp-session-id" not in response.headers


async def test_what_follows_the_beginning(service: Service) -> None:
    client = of_old(service)
    assert await client.result("ping") == {}
    message = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    response = await service.http.post("/mcp", json=message, headers=client.headers())
    assert (response.status_code, response.content) == (202, b"")
    assert (await service.http.get("/mcp", headers=client.headers())).status_code == 405


async def test_what_is_not_there_is_not_found_in_the_manner_of_the_era(service: Service) -> None:
    client = of_old(service)
    for method in ("tools/list", "tasks/update", "server/discover"):
        assert (await client.error(method, taskId="x"))["code"] == -32601


@pytest.mark.parametrize("version", ["2025-06-18", "2025-03-26"])
async def test_versions_before_have_no_tasks(service: Service, version: str) -> None:
    response = await of_old(service).post("tasks/get", {"taskId": "x"}, version=version)
    assert response.json()["error"]["code"] == -32601


async def test_an_unknown_version_is_refused(service: Service) -> None:
    response = await of_old(service).post("ping", version="2024-01-01")
    assert (response.status_code, response.json()["error"]["code"]) == (400, -32022)


async def test_an_operator_can_switch_the_era_off(database_url: str, clock: ShiftedClock) -> None:
    async with running_service(test_settings(database_url, legacy=False), clock) as service:
        response = await of_old(service).post("initialize", {"protocolVersion": VERSION})
        assert (response.status_code, response.json()["error"]["code"]) == (400, -32022)


async def test_its_use_is_counted(service: Service) -> None:
    await of_old(service).result("ping")
    shown = (await service.http.get("/metrics")).text
    assert 'requests_total{era="legacy",method="ping",outcome="ok"} 1.0' in shown


# --- reading ------------------------------------------------------------------------------------


async def test_a_task_has_the_members_of_its_era(service: Service, tools: ToolServer) -> None:
    client = service.client()
    task = await tools.create(client, ttlMs=60_000, pollIntervalMs=500, statusMessage="on it")
    seen = await of_old(service, client).result("tasks/get", taskId=task.id)
    assert list(seen) == [
        "taskId", "status", "statusMessage", "createdAt", "lastUpdatedAt", "ttl", "pollInterval",
    ]  # fmt: skip
    assert (seen["taskId"], seen["status"], seen["statusMessage"]) == (task.id, "working", "on it")
    assert (seen["ttl"], seen["pollInterval"]) == (60_000, 500)


async def test_a_tool_error_is_a_failed_task_that_says_why(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    task = await tools.create(client)
    content = [{"type": "image"}, {"type": "text", "text": "the disk is full"}]
    await tools.complete(task, {"content": content, "isError": True})
    seen = await of_old(service, client).result("tasks/get", taskId=task.id)
    assert (seen["status"], seen["statusMessage"]) == ("failed", "the disk is full")
    got = await of_old(service, client).result("tasks/result", taskId=task.id)
    assert (got["content"], got["isError"]) == (content, True)
    assert (await client.get(task.id))["status"] == "completed"


async def test_a_task_that_asks_says_how_it_is_answered(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    task = await tools.create(client)
    await tools.ask(task, "sure")
    seen = await of_old(service, client).result("tasks/get", taskId=task.id)
    assert seen["status"] == "input_required"
    assert "tasks/result" in seen["statusMessage"]


ENDINGS: list[dict[str, Any]] = [
    {"status": "working"},
    {"status": "input_required", "inputRequests": {"sure": ELICITATION}},
    {"status": "completed", "result": {"content": []}},
    {"status": "failed", "error": {"code": -1, "message": "no luck"}},
    {"status": "cancelled"},
]


@pytest.mark.parametrize("state", ENDINGS, ids=lambda state: str(state["status"]))
async def test_a_task_is_the_same_in_both_eras(
    service: Service, tools: ToolServer, state: dict[str, Any]
) -> None:
    client = service.client()
    task = await tools.create(client, **state)
    modern = await client.get(task.id)
    legacy = await of_old(service, client).result("tasks/get", taskId=task.id)
    for name in ("taskId", "status", "createdAt", "lastUpdatedAt"):
        assert modern[name] == legacy[name]
    assert modern["ttlMs"] == legacy["ttl"]


@pytest.mark.parametrize("method", ["tasks/get", "tasks/result", "tasks/cancel"])
async def test_nobody_elses_task_is_there(service: Service, tools: ToolServer, method: str) -> None:
    task = await tools.create(service.client())
    stranger = of_old(service)
    expected = {"code": -32602, "message": "Failed to retrieve task: Task not found"}
    for task_id in (task.id, "x", ""):
        assert await stranger.error(method, taskId=task_id) == expected


@pytest.mark.parametrize("method", ["tasks/get", "tasks/result", "tasks/cancel"])
async def test_an_expired_task_is_said_so(
    service: Service, tools: ToolServer, clock: ShiftedClock, method: str
) -> None:
    client = service.client()
    task = await tools.create(client, ttlMs=1_000)
    clock.advance(seconds=2)
    error = await of_old(service, client).error(method, taskId=task.id)
    assert error["message"] == "Failed to retrieve task: Task has expired"


async def test_stray_members_do_not_matter(service: Service, tools: ToolServer) -> None:
    client = service.client()
    task = await tools.create(client)
    stray = {"task": {"ttl": 1}, "_meta": {RELATED: {"taskId": "other"}}}
    seen = await of_old(service, client).result("tasks/get", taskId=task.id, **stray)
    assert seen["taskId"] == task.id


# --- the result ---------------------------------------------------------------------------------


async def test_a_result_is_what_the_call_would_have_returned(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    task = await tools.create(client)
    result = {"content": [], "n": 2**70, "_meta": {"mine": 1, RELATED: {"taskId": "forged"}}}
    await tools.complete(task, result)
    got = await of_old(service, client).result("tasks/result", taskId=task.id)
    assert got == {**result, "_meta": {"mine": 1, RELATED: {"taskId": task.id}}}


async def test_an_error_is_what_the_call_would_have_failed_with(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    error = {"code": -32050, "message": "no luck", "data": {"try": [1, 2]}}
    task = await tools.create(client, status="failed", error=error)
    assert await of_old(service, client).error("tasks/result", taskId=task.id) == error


async def test_a_cancelled_task_has_no_result(service: Service, tools: ToolServer) -> None:
    client = service.client()
    task = await tools.create(client, status="cancelled")
    error = await of_old(service, client).error("tasks/result", taskId=task.id)
    assert error["message"] == "The task was cancelled"


@pytest.mark.parametrize("accept", [BOTH, "application/json"])
@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ({"status": "completed", "result": {"content": []}}, "result"),
        ({"status": "failed", "error": {"code": -5, "message": "no"}}, "error"),
        ({"status": "cancelled"}, "error"),
    ],
    ids=["completed", "failed", "cancelled"],
)
async def test_waiting_for_a_result_ends_when_the_task_does(
    online: Service, accept: str, ending: dict[str, Any], says: str
) -> None:
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    waiting = asyncio.create_task(
        of_old(online, client).post("tasks/result", {"taskId": task.id}, accept=accept)
    )
    await eventually(lambda: _waiters(online, 1))
    await tools.report(task, statusMessage="still at it")
    await tools.report(task, **ending)
    response = await waiting
    assert says in _last_message(response)
    assert response.headers["content-type"] == (
        "text/event-stream" if accept == BOTH else "application/json"
    )
    await eventually(lambda: _waiters(online, 0))


async def test_waiting_ends_when_the_time_of_the_task_does(
    online: Service, clock: ShiftedClock
) -> None:
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client, ttlMs=60_000)
    waiting = asyncio.create_task(of_old(online, client).error("tasks/result", taskId=task.id))
    await eventually(lambda: _waiters(online, 1))
    clock.advance(seconds=61)
    assert (await waiting)["message"] == "Failed to retrieve task: Task has expired"


@pytest.mark.parametrize("accept", [BOTH, "application/json"])
async def test_who_leaves_waits_no_longer(online: Service, accept: str) -> None:
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    waiting = [
        asyncio.create_task(
            of_old(online, client).post("tasks/result", {"taskId": task.id}, accept=accept)
        )
        for _ in range(20)
    ]
    await eventually(lambda: _waiters(online, 20))
    for one in waiting:
        one.cancel()
    await eventually(lambda: _waiters(online, 0))


async def test_a_change_on_another_replica_is_seen(database_url: str, clock: ShiftedClock) -> None:
    settings = test_settings(database_url)
    async with (
        networked_service(settings, clock) as one,
        running_service(settings, clock) as other,
    ):
        tools, client = await one.tool_server(), one.client()
        task = await tools.create(client)
        waiting = asyncio.create_task(of_old(one, client).result("tasks/result", taskId=task.id))
        await eventually(lambda: _waiters(one, 1))
        await tools.at(other).complete(task)
        assert (await waiting)["content"] == []


async def _waiters(service: Service, number: int) -> bool:
    return f"taskbroker_waiters {number}.0" in (await service.http.get("/metrics")).text


async def test_who_withdraws_waits_no_longer(online: Service) -> None:
    """Libraries leave the connection open when their own patience is over."""
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    old, stranger = of_old(online, client), of_old(online)
    waiting = asyncio.create_task(_collect(old.messages(task.id)))
    await eventually(lambda: _waiters(online, 1))

    await stranger.notify("notifications/cancelled", requestId=7)
    await old.notify("notifications/cancelled", requestId=8)
    assert await _waiters(online, 1)
    await old.notify("notifications/cancelled", requestId=7)

    assert await waiting == []
    assert await _waiters(online, 0)


async def _collect(messages: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message async for message in messages]


async def test_who_has_lost_the_credential_gets_no_result(online: Service) -> None:
    tools, client = await online.tool_server(), await online.keyed_client("desktop")
    task = await tools.create(client)
    waiting = asyncio.create_task(_collect(of_old(online, client).messages(task.id)))
    await eventually(lambda: _waiters(online, 1))
    async with online.broker.db.transaction() as connection:
        await clients.revoke(connection, "desktop", online.clock())
    await eventually(lambda: _is_refused(client))
    await tools.complete(task)
    [message] = await waiting
    assert message["error"]["code"] == -32600
    assert "revoked" in message["error"]["message"]


async def _is_refused(client: McpClient) -> bool:
    return (await client.request("server/discover")).status_code == 401


async def test_a_wait_outlives_a_database_that_is_away(online: Service) -> None:
    tools, client = await online.tool_server(), online.client()
    task = await tools.create(client)
    waiting = asyncio.create_task(of_old(online, client).result("tasks/result", taskId=task.id))
    await eventually(lambda: _waiters(online, 1))
    async with online.broker.db.own_connection() as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    await tools.complete(task)
    assert (await waiting)["content"] == []


ODD = "9" * 5_000


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ('{"a": 1, "a": 2}', '{"_meta":{RELATED},"a": 1, "a": 2}'),
        ("{ }", "{_META }"),
        ('{"\\ud83d": 1}', '{_META,"\\ud83d": 1}'),
        (f'{{"n": {ODD}, "_meta": null}}', f'{{"n":{ODD},_META}}'),
        ('{"_meta": {"\\ud83d": 1}}', '{"_meta":{"\\ud83d":1,RELATED}}'),
        (
            f'{{"isError": true, "content": [{ODD}]}}',
            f'{{_META,"isError": true, "content": [{ODD}]}}',
        ),
    ],
    ids=["twice", "empty", "no-text", "null", "meta-no-text", "error"],
)
async def test_whatever_is_legal_json_comes_through(
    service: Service, tools: ToolServer, result: str, expected: str
) -> None:
    client = service.client()
    task = await tools.create(client)
    body = (
        '{"type": "task.updated", "data": {"taskRef": "%s", "status": "completed", "result": %s}}'
    )
    raw = (body % (task.ref, result)).encode()
    assert (await tools.post_event(raw, tools.signed(raw))).status_code == 200

    response = await of_old(service, client).post("tasks/result", {"taskId": task.id})
    related = f'"{RELATED}":{{"taskId":"{task.id}"}}'
    wanted = expected.replace("_META", f'"_meta":{{{related}}}').replace(
        "{RELATED}", f"{{{related}}}"
    )
    wanted = wanted.replace("RELATED", related)
    assert response.text == f'{{"jsonrpc":"2.0","id":1,"result":{wanted}}}'
    assert (await of_old(service, client).post("tasks/get", {"taskId": task.id})).status_code == 200


async def test_an_error_with_any_number_comes_through(service: Service, tools: ToolServer) -> None:
    client = service.client()
    task = await tools.create(client)
    body = (
        '{"type": "task.updated", "data": {"taskRef": "%s", "status": "failed", '
        '"error": {"code": -7, "message": "m", "data": %s}}}'
    )
    raw = (body % (task.ref, ODD)).encode()
    assert (await tools.post_event(raw, tools.signed(raw))).status_code == 200
    response = await of_old(service, client).post("tasks/result", {"taskId": task.id})
    assert f'"error":{{"code": -7, "message": "m", "data": {ODD}}}' in response.text
    counted = 'requests_total{era="legacy",method="tasks/result",outcome="ok"} 1.0'
    assert counted in (await service.http.get("/metrics")).text


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": int("9" * 4_000), "result": {}},
        {"jsonrpc": "2.0", "id": "x" * 64 + ":key", "error": {"code": 1, "message": "m"}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {}}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled"},
    ],
)
async def test_messages_that_mean_nothing_here_are_taken(
    service: Service, message: dict[str, Any]
) -> None:
    client = of_old(service)
    response = await service.http.post("/mcp", json=message, headers=client.headers())
    assert (response.status_code, response.content) == (202, b"")


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": 1, "result": None},
        {"jsonrpc": "2.0", "id": 1, "result": {}, "error": {}},
        {"jsonrpc": "1.0", "id": 1, "result": {}},
        {"id": 1, "result": {}},
    ],
)
async def test_responses_of_a_wrong_shape_are_refused(
    service: Service, message: dict[str, Any]
) -> None:
    client = of_old(service)
    response = await service.http.post("/mcp", json=message, headers=client.headers())
    assert (response.status_code, response.json()["error"]["code"]) == (400, -32600)


@pytest.mark.parametrize("params", [{}, {"taskId": 7}, {"taskId": None}])
async def test_wrong_params_are_an_answer_like_any_other(
    service: Service, params: dict[str, Any]
) -> None:
    response = await of_old(service).post("tasks/get", params)
    assert (response.status_code, response.json()["error"]["code"]) == (200, -32602)


# --- questions ----------------------------------------------------------------------------------


async def test_questions_come_with_the_wait_for_the_result(online: Service) -> None:
    tools, client = await online.tool_server(), online.client()
    old = of_old(online, client)
    task = await tools.create(client)
    await tools.ask(task, "sure", "really")
    messages = old.messages(task.id)

    first, second = await anext(messages), await anext(messages)
    for question in (first, second):
        assert question["method"] == "elicitation/create"
        params = {**QUESTION, "_meta": {RELATED: {"taskId": task.id}}}
        assert question["params"] == params
    assert (
        await old.reply(first["id"], {"action": "accept", "content": {"sure": True}})
    ).status_code == 202
    assert (await client.get(task.id))["status"] == "input_required"
    assert (await old.reply(second["id"], None)).status_code == 202

    answers = (await tools.read(task.ref)).json()["inputResponses"]
    assert answers == {
        "sure": {"action": "accept", "content": {"sure": True}},
        "really": {"action": "cancel"},
    }
    await tools.complete(task)
    assert (await anext(messages))["result"]["content"] == []
    assert [message async for message in messages] == []


async def test_a_client_that_waits_twice_is_asked_once(online: Service) -> None:
    tools, client = await online.tool_server(), online.client()
    old = of_old(online, client)
    task = await tools.create(client)
    first = asyncio.create_task(_collect(old.messages(task.id)))
    await eventually(lambda: _waiters(online, 1))
    second = asyncio.create_task(_collect(old.messages(task.id)))
    await eventually(lambda: _waiters(online, 2))
    await tools.ask(task, "sure")
    await tools.complete(task)
    asked = [message for message in [*await first, *await second] if "method" in message]
    assert len(asked) == 1


@pytest.mark.parametrize("key", ["a:b", "ü\u2028", "k" * 255])
async def test_any_key_can_be_answered(online: Service, key: str) -> None:
    tools, client = await online.tool_server(), online.client()
    old = of_old(online, client)
    task = await tools.create(client)
    await tools.ask(task, key)
    messages = old.messages(task.id)
    question = await anext(messages)
    await old.reply(question["id"], {"action": "decline"})
    assert (await tools.read(task.ref)).json()["inputResponses"] == {key: {"action": "decline"}}
    await tools.complete(task)
    await _collect(messages)


async def test_an_error_answers_a_dialogue_and_nothing_else(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    task = await tools.create(client)
    roots = {"method": "roots/list", "params": {}}
    asked = {"roots": roots, "sure": ELICITATION}
    await tools.report(task, status="input_required", inputRequests=asked)
    for key in asked:
        await of_old(service, client).reply(f"{task.id}:{key}", None)
    answers = (await tools.read(task.ref)).json()["inputResponses"]
    assert answers == {"sure": {"action": "cancel"}}


async def test_nobody_else_can_answer(service: Service, tools: ToolServer) -> None:
    task = await tools.create(service.client())
    await tools.ask(task, "sure")
    stranger = of_old(service)
    for rpc_id in (f"{task.id}:sure", "sure", f"{task.id}:", f"{task.id}"):
        assert (await stranger.reply(rpc_id, {"action": "accept"})).status_code == 202
    assert (await tools.read(task.ref)).json()["inputResponses"] == {}


# --- cancelling ---------------------------------------------------------------------------------


async def test_a_cancelled_task_is_so_before_the_answer(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    task = await tools.create(client)
    seen = await of_old(service, client).result("tasks/cancel", taskId=task.id)
    assert (seen["taskId"], seen["status"]) == (task.id, "cancelled")
    assert (await client.get(task.id))["status"] == "cancelled"
    reply = (await tools.report(task, status="completed", result={})).json()
    assert (reply["applied"], reply["reason"], reply["cancelRequested"]) == (
        False,
        "terminal",
        True,
    )


@pytest.mark.parametrize("state", ENDINGS[2:], ids=lambda state: str(state["status"]))
async def test_an_ended_task_cannot_be_cancelled(
    service: Service, tools: ToolServer, state: dict[str, Any]
) -> None:
    client = service.client()
    task = await tools.create(client, **state)
    error = await of_old(service, client).error("tasks/cancel", taskId=task.id)
    assert error == {
        "code": -32602,
        "message": f"Cannot cancel task: already in terminal status '{state['status']}'",
    }


# --- listing ------------------------------------------------------------------------------------


async def _all(client: LegacyClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = await client.result("tasks/list", **cursor)
        listed += page["tasks"]
        if "nextCursor" not in page:
            return listed
        cursor = {"cursor": page["nextCursor"]}


async def test_a_list_has_every_task_once_while_others_are_made(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    made = await asyncio.gather(*(tools.create(client) for _ in range(120)))
    await tools.create(service.client())
    going_on = asyncio.create_task(_create_some(tools, client))
    listed = [task["taskId"] for task in await _all(of_old(service, client))]
    await going_on
    assert len(listed) == len(set(listed))
    assert {task.id for task in made} <= set(listed)
    seen = await _all(of_old(service, client))
    assert len(seen) == 150
    one = await of_old(service, client).result("tasks/get", taskId=seen[0]["taskId"])
    assert seen[0] == one


async def _create_some(tools: ToolServer, client: McpClient) -> None:
    for _ in range(30):
        await tools.create(client)


async def test_a_cursor_is_good_for_its_owner_as_it_was_given(
    service: Service, tools: ToolServer
) -> None:
    client = service.client()
    await asyncio.gather(*(tools.create(client) for _ in range(60)))
    cursor = (await of_old(service, client).result("tasks/list"))["nextCursor"]
    bad = [cursor[:-2] + "AA", cursor[5:], "", "x", "ä"]
    for presented in bad:
        error = await of_old(service, client).error("tasks/list", cursor=presented)
        assert error["code"] == -32602
    assert (await of_old(service).error("tasks/list", cursor=cursor))["code"] == -32602


async def test_lists_and_ids_outlive_a_rotation_of_keys(
    database_url: str, clock: ShiftedClock
) -> None:
    old = test_settings(database_url)
    newer = test_settings(database_url).secret_keys
    new = old.model_copy(update={"secret_keys": (*newer, *old.secret_keys)})
    async with running_service(old, clock) as before, running_service(new, clock) as after:
        tools, client = await before.tool_server(), before.client()
        first = [await tools.create(client) for _ in range(2)]
        second = [await tools.at(after).create(client) for _ in range(2)]
        listed = await _all(of_old(after, client.at(after)))
    assert {task["taskId"] for task in listed} == {task.id for task in [*first, *second]}


async def test_the_nameless_are_shown_no_list(service: Service) -> None:
    tools = await service.tool_server("open", allow_anonymous=True)
    anonymous = service.anonymous()
    task = await tools.create(anonymous)
    client = of_old(service, anonymous)
    assert (await client.error("tasks/list"))["code"] == -32601
    result = await client.result("initialize", protocolVersion=VERSION)
    assert result["capabilities"] == {"tasks": {"cancel": {}}}
    assert (await client.result("tasks/get", taskId=task.id))["status"] == "working"
