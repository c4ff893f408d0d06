"""The transport and envelope rules of MCP 2026-07-28, one row for each way to break them.

Every test starts from a request that is right, takes one thing away or changes it, and looks at
the whole answer: HTTP status, headers, JSON-RPC code, id, data.
"""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import pytest

from app.db.embedded import EmbeddedPostgres
from tests.support.clock import ShiftedClock
from tests.support.databases import Databases
from tests.support.service import (
    CAPABILITIES_KEY,
    META,
    TASKS,
    VERSION,
    VERSION_KEY,
    CreatedTask,
    McpClient,
    Service,
    ToolServer,
    running_service,
    test_settings,
)

NO_ID: Any = object()
"""The answer has no id, because the request's could not be read."""
NOT_FOUND = "Failed to retrieve task: Task not found"
TASK_METHODS = ("tasks/get", "tasks/update", "tasks/cancel")

Headers = dict[str, str | None]


@pytest.fixture(scope="module")
async def service(databases: Databases) -> AsyncIterator[Service]:
    """One broker for all rows: a refused request leaves nothing behind."""
    async with (
        databases.fresh() as url,
        running_service(test_settings(url), ShiftedClock()) as service,
    ):
        yield service


@pytest.fixture(scope="module")
async def tools(service: Service) -> ToolServer:
    return await service.tool_server()


@pytest.fixture
async def client(service: Service) -> McpClient:
    return service.client()


@pytest.fixture
async def task(tools: ToolServer, client: McpClient) -> CreatedTask:
    return await tools.create(client)


def refusal(
    response: httpx.Response, status: int, code: int, rpc_id: Any = NO_ID
) -> dict[str, Any]:
    """Checks that a response is a JSON-RPC error as it must be; the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    error: dict[str, Any] = answer.pop("error")
    expected = {"jsonrpc": "2.0"} if rpc_id is NO_ID else {"jsonrpc": "2.0", "id": rpc_id}
    assert answer == expected
    assert type(answer.get("id")) is type(expected.get("id"))
    assert error["code"] == code
    assert error["message"]
    return error


# --- the transport: what is turned away before it is read ----------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
async def test_only_post_is_allowed(service: Service, method: str) -> None:
    response = await service.http.request(method, "/mcp")
    refusal(response, 405, -32600)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/json-seq", "application/x-www-form-urlencoded", "json"],
)
async def test_the_content_type_must_be_json(client: McpClient, content_type: str | None) -> None:
    response = await client.request("server/discover", headers={"content-type": content_type})
    assert "application/json" in refusal(response, 415, -32600)["message"]


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"]
)
async def test_json_may_have_parameters_and_capitals(client: McpClient, content_type: str) -> None:
    response = await client.request("server/discover", headers={"content-type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "application/json",
        "text/event-stream",
        "text/html, image/*",
        "application/*",
        "application/json, text/event-stream;q=0",
        "application/json;q=0.0, */*;q=0",
    ],
)
async def test_accept_must_admit_json_and_event_streams(client: McpClient, accept: str) -> None:
    response = await client.request("server/discover", headers={"accept": accept})
    read_first = ("json" in accept and "json;q=0" not in accept) or accept == "application/*"
    message = refusal(response, 406, -32600, 1 if read_first else NO_ID)["message"]
    assert "application/json" in message
    assert "text/event-stream" in message


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/*, text/*",
        "TEXT/event-stream,Application/JSON",
        "text/event-stream;q=0.5 , application/json; q=1",
    ],
)
async def test_accept_may_use_wildcards_and_weights(client: McpClient, accept: str) -> None:
    assert (await client.request("server/discover", headers={"accept": accept})).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://localhost.evil.example",
        "http://evil.example/localhost",
        "http://localhost@evil.example",
        "localhost",
        "http://[::1",
    ],
)
async def test_a_strange_origin_is_forbidden(client: McpClient, origin: str) -> None:
    response = await client.request("server/discover", headers={"origin": origin})
    assert "Origin" in refusal(response, 403, -32600)["message"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8080", "["])
async def test_on_a_loopback_bind_a_strange_host_is_forbidden(client: McpClient, host: str) -> None:
    response = await client.request("server/discover", headers={"host": host})
    assert "Host" in refusal(response, 403, -32600)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "https://127.0.0.1"},
        {"origin": "http://[::1]:8080"},
        {"host": "localhost:8080"},
        {"host": "[::1]"},
    ],
)
async def test_on_a_loopback_bind_loopback_may_knock(client: McpClient, headers: Headers) -> None:
    assert (await client.request("server/discover", headers=headers)).status_code == 200


async def test_an_operator_can_allow_origins_and_hosts(
    database_url: str, clock: ShiftedClock
) -> None:
    settings = test_settings(
        database_url,
        host="0.0.0.0",  # noqa: S104 - nothing is bound here
        allowed_origins=("https://app.example",),
        allowed_hosts=("broker.example",),
    )
    async with running_service(settings, clock) as service:
        client = service.client()

        async def knock(**headers: str) -> int:
            known: Headers = {"host": "broker.example", **headers}
            return (await client.request("server/discover", headers=known)).status_code

        assert await knock() == 200
        assert await knock(host="Broker.Example:8443") == 200
        assert await knock(host="localhost") == 403
        assert await knock(origin="https://App.example") == 200
        assert await knock(origin="https://app.example.evil") == 403
        assert await knock(origin="http://localhost") == 403


async def test_a_body_over_the_limit_is_refused(service: Service, client: McpClient) -> None:
    limit = service.settings.max_body_bytes
    body = b'{"jsonrpc":"2.0","id":1,"method":"x","params":{}}'
    kept = await client.post(body.ljust(limit))
    refusal(kept, 200, -32601, 1)

    refused = await client.post(body.ljust(limit + 1))

    assert str(limit) in refusal(refused, 413, -32600)["message"]


async def test_a_body_over_the_limit_is_refused_without_a_content_length(service: Service) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(service.settings.max_body_bytes // 1000 + 1):
            yield b" " * 1000

    response = await service.http.post(
        "/mcp", content=chunks(), headers={"content-type": "application/json"}
    )

    assert "content-length" not in response.request.headers
    refusal(response, 413, -32600)


# --- credentials ---------------------------------------------------------------------------------


async def test_without_a_credential_the_answer_is_401(service: Service, tools: ToolServer) -> None:
    response = await service.anonymous().request("tasks/get", {"taskId": "x"})
    refusal(response, 401, -32600, 1)
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer two words",
        "Basic dXNlcjpwYXNz",
        "Bearer tbc_unknown-key-of-the-broker",
        "Bearer tbk_the-key-of-a-tool-server",
        "Bearer caf\u00e9",
    ],
)
async def test_a_credential_that_is_not_valid_is_answered_401(
    service: Service, authorization: str
) -> None:
    client = service.anonymous()
    encoded: Any = authorization.encode("latin-1")
    response = await client.request("server/discover", headers={"authorization": encoded})
    refusal(response, 401, -32600, 1)
    assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    for presented in ("dXNl", "unknown-key", "the-key", "two words"):
        assert presented not in response.text


async def test_the_credential_is_checked_before_the_message_is_read(service: Service) -> None:
    refusal(await service.anonymous().post(b"no json"), 401, -32600)


# --- the envelope --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"no json",
        b'{"jsonrpc":"2.0","id":1,"method":"ping"',
        b'{"jsonrpc":"2.0","id":1,"method":"ping"}}',
        b'{"jsonrpc":"2.0","id":1,"method":"ping",}',
        b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}',
        b"{'jsonrpc':'2.0'}",
        b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1,"method":"\xff"}',
        b'{"jsonrpc":"2.0","id":1,"method":"\x00"}',
        b'{"jsonrpc":"2.0","id":1,"method":1,"params":{',
        b"[" * 100_000,
    ],
)
async def test_what_is_no_json_is_a_parse_error_without_an_id(
    client: McpClient, body: bytes
) -> None:
    assert "Parse error" in refusal(await client.post(body), 400, -32700)["message"]


REQUEST = {"jsonrpc": "2.0", "id": 7, "method": "server/discover", "params": {"_meta": META}}


@pytest.mark.parametrize("body", [[], [REQUEST], [REQUEST, REQUEST], [1, "x", None]])
async def test_a_batch_is_an_invalid_request(client: McpClient, body: Any) -> None:
    assert "batch" in refusal(await client.post(body), 400, -32600)["message"]


@pytest.mark.parametrize("body", ["text", 1, 1.5, True, None])
async def test_a_message_must_be_an_object(client: McpClient, body: Any) -> None:
    refusal(await client.post(body), 400, -32600)


@pytest.mark.parametrize("rpc_id", ["null", "1.0", "0.5", "1e3", "true", "false", "{}", "[1]"])
async def test_an_id_must_be_a_string_or_an_integer(client: McpClient, rpc_id: str) -> None:
    body = json.dumps(REQUEST).replace('"id": 7', f'"id": {rpc_id}').encode()
    assert '"id"' in refusal(await client.post(body), 400, -32600)["message"]


@pytest.mark.parametrize("rpc_id", [0, -1, 10**40, "", "7", "listen:0", 'q"\\\0é'])
async def test_an_error_echoes_a_good_id_with_its_type(client: McpClient, rpc_id: Any) -> None:
    refusal(await client.request("no/such", rpc_id=rpc_id), 404, -32601, rpc_id)


@pytest.mark.parametrize(
    "change",
    [
        {"jsonrpc": "1.0"},
        {"jsonrpc": 2.0},
        {"jsonrpc": None},
        {"method": 1},
        {"method": None},
        {"method": ["server/discover"]},
    ],
)
async def test_jsonrpc_and_method_must_be_right(client: McpClient, change: dict[str, Any]) -> None:
    refusal(await client.post({**REQUEST, **change}), 400, -32600, 7)


@pytest.mark.parametrize("member", ["jsonrpc", "method"])
async def test_jsonrpc_and_method_must_be_there(client: McpClient, member: str) -> None:
    body = {name: value for name, value in REQUEST.items() if name != member}
    refusal(await client.post(body), 400, -32600, 7)


@pytest.mark.parametrize("body", [{}, {"result": {}, "jsonrpc": "2.0"}])
async def test_what_is_no_request_and_has_no_id_is_invalid(client: McpClient, body: Any) -> None:
    refusal(await client.post(body), 400, -32600)


@pytest.mark.parametrize("params", [[], ["x"], "x", 1, None, True])
async def test_params_must_be_an_object(client: McpClient, params: Any) -> None:
    error = refusal(await client.post({**REQUEST, "params": params}), 400, -32602, 7)
    assert "params" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"method": "notifications/initialized"},
        {"method": "notifications/cancelled", "params": {"requestId": 7, "_meta": META}},
        {"method": "no/such/notification", "params": {}},
    ],
)
async def test_a_notification_is_answered_202_without_a_body(
    client: McpClient, message: dict[str, Any]
) -> None:
    response = await client.post({"jsonrpc": "2.0", **message})
    assert response.status_code == 202
    assert response.content == b""
    assert "content-type" not in response.headers


# --- _meta ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "named"),
    [
        pytest.param({}, VERSION_KEY, id="empty"),
        pytest.param({CAPABILITIES_KEY: {}}, VERSION_KEY, id="no version"),
        pytest.param({VERSION_KEY: VERSION}, CAPABILITIES_KEY, id="no capabilities"),
        pytest.param({**META, VERSION_KEY: 20260728}, VERSION_KEY, id="version a number"),
        pytest.param({**META, VERSION_KEY: None}, VERSION_KEY, id="version null"),
        pytest.param({**META, CAPABILITIES_KEY: []}, CAPABILITIES_KEY, id="capabilities a list"),
        pytest.param({**META, CAPABILITIES_KEY: None}, CAPABILITIES_KEY, id="capabilities null"),
        pytest.param(
            {**META, CAPABILITIES_KEY: {"extensions": []}}, "extensions", id="extensions a list"
        ),
    ],
)
async def test_meta_must_have_the_version_and_the_capabilities(
    client: McpClient, meta: dict[str, Any], named: str
) -> None:
    response = await client.request("server/discover", meta=meta, rpc_id="m")
    assert named in refusal(response, 400, -32602, "m")["message"]


@pytest.mark.parametrize("params", [{}, {"_meta": []}, {"_meta": "x"}, {"_meta": None}])
async def test_meta_must_be_there_and_an_object(client: McpClient, params: Any) -> None:
    headers: Headers = {"mcp-protocol-version": VERSION, "mcp-method": "server/discover"}
    response = await client.post({**REQUEST, "params": params}, headers)
    assert "_meta" in refusal(response, 400, -32602, 7)["message"]


async def test_meta_may_have_any_other_member(client: McpClient, task: CreatedTask) -> None:
    more = {"progressToken": 1, "io.modelcontextprotocol/clientInfo": {"name": 7}, "x": None}
    response = await client.request("tasks/get", {"taskId": task.id}, meta={**META, **more})
    assert response.json()["result"]["taskId"] == task.id


async def test_params_may_have_any_other_member(client: McpClient, task: CreatedTask) -> None:
    stray = {"taskId": task.id, "task": {"ttl": 1}, "cursor": None}
    response = await client.request("tasks/get", stray)
    assert response.json()["result"]["taskId"] == task.id


# --- headers that repeat the body ----------------------------------------------------------------


def wrapped(text: bytes) -> str:
    return f"=?base64?{b64encode(text).decode()}?="


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        pytest.param({"mcp-protocol-version": None}, "MCP-Protocol-Version", id="no version"),
        pytest.param({"mcp-protocol-version": ""}, "MCP-Protocol-Version", id="empty version"),
        pytest.param(
            {"mcp-protocol-version": "2025-11-25"}, "MCP-Protocol-Version", id="another version"
        ),
        pytest.param(
            {"mcp-protocol-version": f"{VERSION}, {VERSION}"}, "MCP-Protocol-Version", id="twice"
        ),
        pytest.param({"mcp-method": None}, "Mcp-Method", id="no method"),
        pytest.param({"mcp-method": ""}, "Mcp-Method", id="empty method"),
        pytest.param({"mcp-method": "tasks/cancel"}, "Mcp-Method", id="another method"),
        pytest.param({"mcp-method": "Tasks/Get"}, "Mcp-Method", id="method in capitals"),
        pytest.param({"mcp-method": wrapped(b"tasks/get")}, "Mcp-Method", id="method wrapped"),
        pytest.param({"mcp-name": ""}, "Mcp-Name", id="empty name"),
        pytest.param({"mcp-name": "a" * 64}, "Mcp-Name", id="another name"),
        pytest.param({"mcp-name": wrapped(b"a" * 64)}, "Mcp-Name", id="another name, wrapped"),
        pytest.param({"mcp-name": wrapped(b"\xff\xfe")}, "Mcp-Name", id="wrapped, not UTF-8"),
        pytest.param({"mcp-name": "=?base64?not base64!?="}, "Mcp-Name", id="wrapped, broken"),
        pytest.param({"mcp-name": "=?base64?YQ?="}, "Mcp-Name", id="wrapped, not padded"),
        pytest.param({"mcp-name": "=?base64??="}, "Mcp-Name", id="wrapped, empty"),
    ],
)
async def test_a_header_that_is_missing_or_differs_is_a_mismatch(
    client: McpClient, task: CreatedTask, headers: Headers, named: str
) -> None:
    response = await client.request("tasks/get", {"taskId": task.id}, headers=headers)
    assert named in refusal(response, 400, -32020, 1)["message"]


@pytest.mark.parametrize("method", TASK_METHODS)
async def test_mcp_name_is_compared_for_every_method_of_tasks(
    client: McpClient, task: CreatedTask, method: str
) -> None:
    params = {"taskId": task.id, "inputResponses": {}}
    response = await client.request(method, params, headers={"mcp-name": task.id.swapcase()})
    refusal(response, 400, -32020, 1)
    assert (await client.get(task.id))["status"] == "working"


async def test_mcp_name_may_be_wrapped_in_base64(client: McpClient, task: CreatedTask) -> None:
    name = wrapped(task.id.encode())
    response = await client.request("tasks/get", {"taskId": task.id}, headers={"mcp-name": name})
    assert response.json()["result"]["taskId"] == task.id


async def test_a_wrapped_name_is_compared_as_unicode(client: McpClient) -> None:
    headers: Headers = {"mcp-name": wrapped("täsk ☃".encode())}
    response = await client.request("tasks/get", {"taskId": "täsk ☃"}, headers=headers)
    assert refusal(response, 200, -32602, 1)["message"] == NOT_FOUND


async def test_a_missing_mcp_name_is_tolerated_and_counted(
    service: Service, client: McpClient, task: CreatedTask
) -> None:
    before = await _names_missing(service)

    response = await client.request("tasks/get", {"taskId": task.id}, headers={"mcp-name": None})
    await client.get(task.id)

    assert response.json()["result"]["taskId"] == task.id
    assert await _names_missing(service) == before + 1


async def _names_missing(service: Service) -> float:
    metrics = (await service.http.get("/metrics")).text
    counted = re.search(r"^taskbroker_mcp_name_missing_total (\S+)$", metrics, re.MULTILINE)
    assert counted is not None
    return float(counted[1])


@pytest.mark.parametrize("method", TASK_METHODS)
async def test_with_strict_headers_a_missing_mcp_name_is_refused(
    database_url: str, clock: ShiftedClock, method: str
) -> None:
    async with running_service(test_settings(database_url, strict_headers=True), clock) as service:
        tools, client = await service.tool_server(), service.client()
        task = await tools.create(client)
        params = {"taskId": task.id, "inputResponses": {}}

        response = await client.request(method, params, headers={"mcp-name": None})

        assert "Mcp-Name" in refusal(response, 400, -32020, 1)["message"]
        assert (await client.request(method, params)).status_code == 200


async def test_headers_of_the_legacy_era_are_ignored(client: McpClient, task: CreatedTask) -> None:
    headers: Headers = {"mcp-session-id": "s-1", "last-event-id": "42"}
    response = await client.request("tasks/get", {"taskId": task.id}, headers=headers)
    assert response.json()["result"]["taskId"] == task.id
    assert "mcp-session-id" not in response.headers


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2099-01-01", "2025-11-25", "", "latest", "caf\u00e9"])
async def test_an_unsupported_version_is_answered_with_the_supported_ones(
    client: McpClient, version: str
) -> None:
    encoded: Any = version.encode("latin-1")
    response = await client.request(
        "server/discover",
        meta={**META, VERSION_KEY: version},
        headers={"mcp-protocol-version": encoded},
    )
    error = refusal(response, 400, -32022, 1)
    spoken = [VERSION, "2025-11-25", "2025-06-18", "2025-03-26"]
    supported = [name for name in spoken if name != version]
    assert error["data"] == {"supported": supported, "requested": version}


@pytest.mark.parametrize(
    ("params", "headers"),
    [
        pytest.param({"protocolVersion": "2025-11-25", "capabilities": {}}, {}, id="no header"),
        pytest.param({}, {"mcp-protocol-version": "2025-11-25"}, id="by header"),
        pytest.param(
            {"protocolVersion": "2025-06-18"},
            {"mcp-protocol-version": "2025-11-25", "mcp-session-id": "s-1"},
            id="in a session",
        ),
    ],
)
@pytest.mark.parametrize("method", ["initialize", "ping", "tasks/list", "tasks/result"])
async def test_where_only_the_modern_era_is_spoken_a_legacy_request_is_told_so(
    database_url: str,
    clock: ShiftedClock,
    method: str,
    params: dict[str, Any],
    headers: Headers,
) -> None:
    message = {"jsonrpc": "2.0", "id": 0, "method": method, "params": params}
    async with running_service(test_settings(database_url, legacy=False), clock) as service:
        response = await service.client().post(message, headers)
    error = refusal(response, 400, -32022, 0)
    assert VERSION in error["message"]
    assert error["data"]["supported"] == [VERSION]
    assert error["data"]["requested"] == (
        headers.get("mcp-protocol-version") or params["protocolVersion"]
    )


@pytest.mark.parametrize("params", [{}, {"_meta": {}}, {"_meta": {"progressToken": 1}}])
async def test_there_a_request_of_no_version_is_told_which_header_it_needs(
    database_url: str, clock: ShiftedClock, params: dict[str, Any]
) -> None:
    message = {"jsonrpc": "2.0", "id": 0, "method": "tasks/get", "params": params}
    async with running_service(test_settings(database_url, legacy=False), clock) as service:
        response = await service.client().post(message)
    error = refusal(response, 400, -32020, 0)
    assert "MCP-Protocol-Version" in error["message"]


# --- capabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"extensions": {}},
        {"extensions": {"io.modelcontextprotocol/other": {}}},
        {"extensions": {TASKS: True}},
        {"extensions": {TASKS: None}},
        {"tasks": {}},
        {TASKS: {}},
    ],
)
@pytest.mark.parametrize("method", TASK_METHODS)
async def test_tasks_need_the_capability_on_the_very_request(
    client: McpClient, task: CreatedTask, method: str, capabilities: dict[str, Any]
) -> None:
    meta = {**META, CAPABILITIES_KEY: capabilities}
    answers = [
        await client.request(method, {"taskId": task_id, "inputResponses": {}}, meta=meta)
        for task_id in (task.id, "a" * 64)  # checked before the task is looked up
    ]
    for response in answers:
        error = refusal(response, 400, -32021, 1)
        assert error["data"] == {"requiredCapabilities": {"extensions": {TASKS: {}}}}
    assert answers[0].content == answers[1].content


# --- methods and their params --------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "tasks/result",
        "tasks/list",
        "tools/list",
        "tools/call",
        "initialize",
        "ping",
        "no/such",
        "",
        "TASKS/GET",
    ],
)
async def test_an_unknown_method_is_not_found(
    client: McpClient, task: CreatedTask, method: str
) -> None:
    params = {"taskId": task.id, "notifications": {"taskIds": [task.id]}}
    refusal(await client.request(method, params), 404, -32601, 1)


@pytest.mark.parametrize(
    "params", [{}, {"taskId": 1}, {"taskId": None}, {"taskId": ["x"]}, {"taskId": {}}]
)
@pytest.mark.parametrize("method", TASK_METHODS)
async def test_the_task_id_must_be_a_text(
    client: McpClient, method: str, params: dict[str, Any]
) -> None:
    error = refusal(await client.request(method, params), 400, -32602, 1)
    assert "params.taskId" in error["message"]


@pytest.mark.parametrize(
    "responses",
    [
        pytest.param({}, id="missing"),
        pytest.param({"inputResponses": None}, id="null"),
        pytest.param({"inputResponses": []}, id="a list"),
        pytest.param({"inputResponses": "sure"}, id="a text"),
        pytest.param({"inputResponses": {"sure": "yes"}}, id="a text inside"),
        pytest.param({"inputResponses": {"sure": None}}, id="null inside"),
        pytest.param({"inputResponses": {"sure": {}, "other": [1]}}, id="a list beside"),
    ],
)
async def test_wrong_input_responses_change_nothing(
    client: McpClient, tools: ToolServer, task: CreatedTask, responses: dict[str, Any]
) -> None:
    await tools.ask(task, "sure")

    response = await client.request("tasks/update", {"taskId": task.id, **responses})

    assert "params.inputResponses" in refusal(response, 400, -32602, 1)["message"]
    assert list((await client.get(task.id))["inputRequests"]) == ["sure"]


@pytest.mark.parametrize(
    "task_id", ["", "x", "a" * 63, "a" * 65, "a" * 64, "é" * 64, "a" * 63 + "=", "\0" * 64, "' --"]
)
@pytest.mark.parametrize("method", TASK_METHODS)
async def test_a_malformed_id_looks_like_an_unknown_one(
    client: McpClient, method: str, task_id: str
) -> None:
    params = {"taskId": task_id, "inputResponses": {}}
    name: Headers = {"mcp-name": wrapped(task_id.encode())}
    response = await client.request(method, params, headers=name)
    assert refusal(response, 200, -32602, 1) == {"code": -32602, "message": NOT_FOUND}


@pytest.mark.parametrize("method", TASK_METHODS)
async def test_a_foreign_task_looks_like_an_unknown_one(
    service: Service, task: CreatedTask, method: str
) -> None:
    params = {"taskId": task.id, "inputResponses": {}}
    response = await service.client().request(method, params)
    assert refusal(response, 200, -32602, 1) == {"code": -32602, "message": NOT_FOUND}


@pytest.mark.parametrize("method", TASK_METHODS)
async def test_an_expired_task_says_so_to_its_owner(
    service: Service, client: McpClient, task: CreatedTask, method: str
) -> None:
    service.clock.advance(milliseconds=service.settings.default_ttl_ms)
    error = await client.error(method, task.id, inputResponses={})
    assert error == {"code": -32602, "message": "Failed to retrieve task: Task has expired"}


# --- when the broker cannot ----------------------------------------------------------------------


@pytest.mark.parametrize("method", TASK_METHODS)
async def test_without_a_database_the_answer_is_503(
    service: Service, client: McpClient, task: CreatedTask, method: str, unused_tcp_port: int
) -> None:
    nowhere = test_settings(
        f"postgresql://nobody:a-password@127.0.0.1:{unused_tcp_port}/none",
        secret_keys=service.settings.secret_keys,
    )
    async with running_service(nowhere, service.clock) as cut_off:
        response = await McpClient(cut_off.http, client.token).request(
            method, {"taskId": task.id, "inputResponses": {}}
        )

    message = refusal(response, 503, -32603, 1)["message"]
    assert "database cannot be reached" in message
    assert int(response.headers["retry-after"]) >= 1
    for hidden in ("postgres", "a-password", "127.0.0.1", "Traceback", "SELECT"):
        assert hidden not in response.text


@pytest.mark.parametrize(
    ("token", "rpc_id"),
    [
        pytest.param("opaque-token", 1, id="at the task"),
        pytest.param("tbc_a-key-that-is-looked-up", NO_ID, id="at the credential"),
    ],
)
async def test_an_internal_failure_is_answered_500_and_says_nothing_of_the_inside(
    service: Service, tools: ToolServer, database_url: str, token: str, rpc_id: Any
) -> None:
    """Tables that lack a column stand for everything that ought not to happen."""
    task = await tools.create(service.client("opaque-token"))
    connection = await asyncpg.connect(database_url)
    await connection.execute("ALTER TABLE tasks DROP COLUMN tool")
    await connection.execute("ALTER TABLE clients DROP COLUMN key_hash")
    await connection.close()

    same_keys = test_settings(database_url, secret_keys=service.settings.secret_keys)
    async with running_service(same_keys, service.clock) as broken:
        response = await McpClient(broken.http, token).request("tasks/get", {"taskId": task.id})

    refusal(response, 500, -32603, rpc_id)
    for hidden in ("column", "clients", "Traceback", "SELECT", "SQLSTATE"):
        assert hidden not in response.text


async def test_a_database_that_is_not_migrated_yet_is_waited_for(
    service: Service, postgres: EmbeddedPostgres
) -> None:
    empty = test_settings(postgres.url, secret_keys=service.settings.secret_keys)
    async with running_service(empty, service.clock) as early:
        response = await McpClient(early.http, "tbc_a-key").request("server/discover")
        refusal(response, 503, -32603, 1)
        ready = await early.http.get("/readyz")
        assert (ready.status_code, "run migrate" in ready.text) == (503, True)


async def test_a_body_that_does_not_come_is_not_waited_for(
    service: Service, tools: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.asgi.BODY_SECONDS", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    for path, headers in (
        ("/mcp", {"content-type": "application/json"}),
        (f"/v1/webhooks/{tools.name}", {}),
        ("/v1/tasks", tools.authorization),
    ):
        response = await service.http.post(path, content=never(), headers=headers)
        assert response.status_code == 408, path
