"""`/mcp/{backend}`: the tool server and its tasks behind one URL.

The tool server here is a real one on loopback that notes what reaches it.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from app.asgi import Receive, Send
from tests.support.clock import ShiftedClock
from tests.support.listening import listening
from tests.support.processes import free_port
from tests.support.secrecy import secret
from tests.support.servers import (
    Received,
    Upstream,
    answer_with,
    read_all,
    respond,
    running_upstream,
)
from tests.support.service import (
    TASKS,
    McpClient,
    Service,
    networked_service,
    running_service,
    test_settings,
)
from tests.support.waiting import eventually

NOT_FOUND = {"code": -32602, "message": "Failed to retrieve task: Task not found"}
SSE = [("content-type", "text/event-stream")]


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with running_upstream() as upstream:
        yield upstream


@pytest.fixture
async def online(database_url: str, clock: ShiftedClock) -> AsyncIterator[Service]:
    """A broker on a real connection."""
    settings = test_settings(database_url, gateway_timeout_ms=2_000)
    async with networked_service(settings, clock) as service:
        yield service


async def handle_of(client: McpClient, upstream: Upstream) -> str:
    """The owner handle that the tool server gets with a call of this client."""
    await client.request("tools/call", {"name": "greet"})
    handle = upstream.last.header("task-owner")
    assert handle is not None
    return secret(handle)


# --- what is passed on ------------------------------------------------------------------------


async def test_a_call_reaches_the_tool_server_as_it_was_sent(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    body = b'{ "jsonrpc":"2.0","id":9007199254740993, "method":"tools/call", "params":{"n":1e400} }'

    await client.post(
        body,
        {"mcp-method": "tools/call", "mcp-name": "greet", "mcp-session-id": "s-1", "x-tenant": "a"},
        path="/mcp/tools?region=eu",
    )

    got = upstream.last
    assert (got.method, got.path, got.query, got.body) == ("POST", "/mcp", b"region=eu", body)
    sent = {name: got.header(name) for name in ("mcp-method", "mcp-name", "mcp-session-id")}
    assert sent == {"mcp-method": "tools/call", "mcp-name": "greet", "mcp-session-id": "s-1"}
    assert got.header("x-tenant") == "a"
    assert got.header("authorization") == f"Bearer {client.token}"
    assert got.header("content-length") == str(len(body))


async def test_an_answer_comes_back_as_it_was_given(service: Service, upstream: Upstream) -> None:
    await service.tool_server(mcp_url=upstream.url)
    packed = gzip.compress(b'{"jsonrpc": "2.0", "id": 1, "result": {}}')
    upstream.behaviour = answer_with(
        packed,
        status=418,
        headers=[
            ("content-type", "application/json; charset=utf-8"),
            ("content-encoding", "gzip"),
            ("mcp-session-id", "abc"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("content-length", str(len(packed))),
        ],
    )

    async with service.http.stream("POST", "/mcp/tools", headers=_authorized()) as response:
        raw = b"".join([chunk async for chunk in response.aiter_raw()])

    assert (response.status_code, raw) == (418, packed)
    assert response.headers["mcp-session-id"] == "abc"
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert response.headers["content-type"] == "application/json; charset=utf-8"


def _authorized() -> dict[str, str]:
    return {"authorization": f"Bearer {secret('canary-of-a-caller')}"}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_what_sessions_of_earlier_eras_need_passes_too(
    service: Service, upstream: Upstream, method: str
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    upstream.behaviour = answer_with(b"", status=204, headers=[("mcp-session-id", "s-1")])

    response = await service.http.request(
        method, "/mcp/tools", headers={**_authorized(), "mcp-session-id": "s-1"}
    )

    assert response.status_code == 204
    assert (upstream.last.method, upstream.last.header("mcp-session-id")) == (method, "s-1")


async def test_other_http_methods_stay_outside(service: Service, upstream: Upstream) -> None:
    await service.tool_server(mcp_url=upstream.url)
    response = await service.http.put("/mcp/tools", headers=_authorized())
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST, DELETE")
    assert not upstream.received


async def test_headers_between_two_hops_end_at_the_hop(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    hops = {
        "connection": "close, X-Secret-Hop",
        "x-secret-hop": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "proxy-authorization": "Basic abc",
    }
    upstream.behaviour = answer_with(
        b"{}",
        headers=[
            ("content-type", "application/json"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("x-kept", "1"),
        ],
    )

    response = await service.client().through("tools").request("tools/list", headers={**hops})

    assert not [name for name in hops if name != "connection" and upstream.last.header(name)]
    assert "x-secret-hop" not in (upstream.last.header("connection") or "")
    assert "x-hop" not in response.headers
    assert response.headers["x-kept"] == "1"


async def test_the_tool_server_learns_where_the_request_came_from(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    claims = {"x-forwarded-for": "6.6.6.6", "forwarded": "for=6.6.6.6", "x-forwarded-host": "evil"}

    claims |= {"X_Forwarded_For": "6.6.6.6", "host": "localhost:8080"}
    await online.client().through("tools").request("tools/list", headers={**claims})

    got = upstream.last
    assert got.header("x-forwarded-for") == "127.0.0.1"
    assert got.header("x-forwarded-host") == "localhost:8080"
    assert got.header("x-forwarded-proto") == "http"
    assert got.header("forwarded") == 'for=127.0.0.1;host="localhost:8080";proto=http'
    assert f"http://{got.header('host')}/mcp" == upstream.url
    assert got.header("x_forwarded_for") is None
    assert str(got.header("via")).startswith("1.1 taskbroker-")


async def test_an_address_that_leads_back_here_is_found_out(online: Service) -> None:
    await online.tool_server(mcp_url=f"{online.http.base_url}/mcp/tools")
    client = online.client().through("tools")
    status, message = await _failure(client)
    assert status == 508
    assert "leads back" in message


async def test_a_header_that_is_no_text_is_refused(online: Service, upstream: Upstream) -> None:
    await online.tool_server(mcp_url=upstream.url)
    response = await online.http.post(
        "/mcp/tools",
        headers=[(b"authorization", b"Bearer x"), (b"x-name", b"J\xf6rg")],
        content=b"{}",
    )
    assert response.status_code == 400
    assert "x-name" in response.json()["error"]["message"]
    assert not upstream.received


async def test_the_address_of_a_tool_server_may_have_a_query(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=f"{upstream.url}?key=1")
    client = service.client().through("tools")
    await client.request("tools/list")
    assert upstream.last.query == b"key=1"
    await client.post({}, path="/mcp/tools?region=eu%20west")
    assert upstream.last.query == b"key=1&region=eu%20west"


async def test_a_cookie_of_one_client_is_never_sent_with_anothers_call(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url.replace("127.0.0.1", "localhost"))
    upstream.behaviour = answer_with(b"{}", headers=[("set-cookie", "session=alice; Path=/")])
    await service.client().through("tools").request("tools/list")
    service.http.cookies.clear()  # those of the test itself
    await service.client().through("tools").request("tools/list")
    assert upstream.last.header("cookie") is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}',
        b'{"params": {"a": [{"method": "tasks/get"}]}, "method": "tools/call", "id": 1}',
        b'{"jsonrpc": "2.0", "id": 4, "result": {"action": "accept"}}',
        b'{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]',
        b"no json at all",
        b"",
    ],
    ids=["request", "params-first", "response", "notification", "batch", "nonsense", "empty"],
)
async def test_messages_without_routing_headers_are_passed_on_too(
    service: Service, upstream: Upstream, body: bytes
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    upstream.behaviour = answer_with(b"{}", status=202)
    response = await service.client().through("tools").post(body)
    assert response.status_code == 202
    assert upstream.last.body == body


async def test_a_request_larger_than_the_brokers_own_limit_streams_through(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    argument = "x" * (3 * online.settings.max_body_bytes)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"a": argument}}
    response = await online.client().through("tools").post(message)
    assert response.json()["result"] == {"content": []}
    assert upstream.last.message == message


async def test_a_method_that_stands_behind_too_much_is_not_looked_for(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    message = {"params": {"a": "x" * 2 * online.settings.max_body_bytes}, "method": "tools/call"}
    response = await online.client().through("tools").post(message)
    assert response.status_code == 413
    assert not upstream.received


# --- what is answered here --------------------------------------------------------------------


async def test_tasks_are_answered_at_the_url_that_was_called(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    task = await tools.create({"handle": await handle_of(client, upstream)})
    calls = len(upstream.received)

    assert (await client.get(task.id))["status"] == "working"
    await client.cancel(task.id)
    await tools.report(task, status="cancelled")

    assert (await client.get(task.id))["status"] == "cancelled"
    assert len(upstream.received) == calls


@pytest.mark.parametrize("name", ["tasks/get", r"tasks\/get"], ids=["plain", "escaped"])
async def test_task_methods_are_recognised_without_their_header(
    service: Service, upstream: Upstream, name: str
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    body = b'{"params": {"taskId": "x"}, "id": 5, "jsonrpc": "2.0", "method": "%b"}'
    response = await service.client().through("tools").post(body % name.encode())
    assert response.json() == {"jsonrpc": "2.0", "id": 5, "error": NOT_FOUND}
    assert not upstream.received


async def test_clients_of_earlier_versions_are_not_believed_about_the_method(
    service: Service, upstream: Upstream
) -> None:
    """Their tool servers compare nothing."""
    await service.tool_server(mcp_url=upstream.url)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"taskId": "x"}}
    headers = {"mcp-method": "tools/call", "mcp-protocol-version": "2025-11-25"}
    response = await service.client().through("tools").post(message, {**headers})
    assert "error" in response.json()
    assert not upstream.received


async def test_a_header_that_lies_about_the_method_is_a_mismatch(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    response = await client.request("tools/list", headers={"mcp-method": "tasks/get"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, -32020)
    assert not upstream.received


async def test_only_the_backends_own_tasks_are_behind_its_door(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    others = await service.tool_server("others", mcp_url=upstream.url)
    client = service.client()
    live, done = await others.create(client), await others.create(client)
    await others.complete(done)

    for task in (live, done):
        assert (await client.get(task.id))["taskId"] == task.id
        assert (await client.through("others").get(task.id))["taskId"] == task.id
        for method in ("tasks/get", "tasks/cancel"):
            assert await client.through("tools").error(method, task.id) == NOT_FOUND
    assert not (await others.read(live.ref)).json()["cancelRequested"]


async def test_methods_that_the_extension_removed_are_not_passed_on(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    for method in ("tasks/result", "tasks/list"):
        response = await service.client().through("tools").request(method, {"taskId": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, -32601)
    assert not upstream.received


async def test_subscriptions_go_to_whom_they_are_about(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    task = await tools.create(client)
    await tools.complete(task)

    await client.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    assert upstream.last.message["method"] == "subscriptions/listen"

    calls = len(upstream.received)
    wanted = {"taskIds": [task.id], "toolsListChanged": True}
    response = await client.request("subscriptions/listen", {"notifications": wanted})
    acknowledged, told, end = events(response)
    assert acknowledged["params"]["notifications"] == {"taskIds": [task.id]}
    assert (told["method"], told["params"]["status"]) == ("notifications/tasks", "completed")
    assert end["result"]["resultType"] == "complete"
    assert len(upstream.received) == calls


async def test_a_subscription_to_nobodys_task_stays_here(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    wanted = {"notifications": {"taskIds": ["x" * 64]}}
    response = await service.client().through("tools").request("subscriptions/listen", wanted)
    acknowledged, _ = events(response)
    assert acknowledged["params"]["notifications"] == {"taskIds": []}
    assert not upstream.received


async def test_a_subscription_ends_when_its_client_leaves_the_door(
    online: Service, upstream: Upstream
) -> None:
    tools = await online.tool_server(mcp_url=upstream.url)
    client = online.client().through("tools")
    task = await tools.create(client)
    async with listening(online.http, client, [task.id]) as stream:
        assert await stream.acknowledged() == [task.id]
        await tools.report(task, statusMessage="half way")
        while (await stream.task()).get("statusMessage") != "half way":
            pass
        await eventually(lambda: _shows(online, "taskbroker_streams 1.0"))
    await eventually(lambda: _shows(online, "taskbroker_streams 0.0"))
    assert not upstream.received


@pytest.mark.parametrize("legacy", [True, False])
async def test_a_withdrawn_subscription_ends_here(
    database_url: str, clock: ShiftedClock, upstream: Upstream, legacy: bool
) -> None:
    """Some clients send `notifications/cancelled` as well as closing the stream."""
    async with networked_service(test_settings(database_url, legacy=legacy), clock) as online:
        tools = await online.tool_server(mcp_url=upstream.url)
        client = online.client().through("tools")
        task = await tools.create(client)
        async with listening(online.http, client, [task.id], rpc_id="listen:0") as stream:
            await stream.acknowledged()
            withdrawal = {"method": "notifications/cancelled", "params": {"requestId": "listen:0"}}
            response = await client.post({"jsonrpc": "2.0", **withdrawal})
            assert response.status_code == 202
            assert not [frame for frame in await stream.rest() if "id" in frame]
    assert not upstream.received


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The messages of a stream that has ended."""
    assert response.headers["content-type"] == "text/event-stream"
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


# --- whose call it is -------------------------------------------------------------------------


async def test_a_task_made_for_a_handle_belongs_to_the_caller(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    alice, bob = await service.keyed_client(), service.client()
    handle = await handle_of(alice.through("tools"), upstream)

    task = await tools.create({"handle": handle}, externalId="job-1")

    assert (await alice.get(task.id))["status"] == "working"
    assert await bob.error("tasks/get", task.id) == NOT_FOUND
    again = await tools.create(alice, externalId="job-1")
    assert again == task


async def test_a_handle_from_outside_never_reaches_the_tool_server(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    alice, mallory = service.client().through("tools"), service.client().through("tools")
    stolen = await handle_of(alice, upstream)

    await mallory.request("tools/call", headers={"task-owner": stolen, "Task_Owner": stolen})

    assert upstream.last.header("task-owner") not in (None, stolen)
    assert upstream.last.header("task_owner") is None


async def test_a_handle_is_good_for_one_backend_and_a_quarter_of_an_hour(
    service: Service, upstream: Upstream, clock: ShiftedClock
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    others = await service.tool_server("others")
    handle = await handle_of(service.client().through("tools"), upstream)

    assert await _fault(await others.post_task({"owner": {"handle": handle}})) == "/owner/handle"
    clock.advance(seconds=890)
    await tools.create({"handle": handle})
    clock.advance(seconds=80)
    assert await _fault(await tools.post_task({"owner": {"handle": handle}})) == "/owner/handle"
    fresh = await handle_of(service.client().through("tools"), upstream)
    await tools.create({"handle": fresh})


@pytest.mark.parametrize("handle", ["", "x", "gAAAAAB", "ä" * 40])
async def test_what_is_no_handle_is_refused(service: Service, handle: str) -> None:
    tools = await service.tool_server()
    assert await _fault(await tools.post_task({"owner": {"handle": handle}})) == "/owner/handle"


async def _fault(response: httpx.Response) -> str:
    assert response.status_code == 422, response.text
    [fault] = response.json()["errors"]
    pointer: str = fault["pointer"]
    return pointer


async def test_every_replica_opens_a_handle_also_while_keys_are_rotated(
    database_url: str, clock: ShiftedClock, upstream: Upstream
) -> None:
    old = test_settings(database_url)
    new_key = test_settings(database_url).secret_keys[0]
    new = old.model_copy(update={"secret_keys": (new_key, *old.secret_keys)})
    async with running_service(old, clock) as first, running_service(new, clock) as second:
        tools = await first.tool_server(mcp_url=upstream.url)
        client = first.client().through("tools")
        handle = await handle_of(client, upstream)
        task = await tools.at(second).create({"handle": handle})
        assert (await client.at(second).get(task.id))["status"] == "working"


async def test_anonymous_callers_come_in_where_the_backend_allows_it(
    service: Service, upstream: Upstream
) -> None:
    open_tools = await service.tool_server("open", mcp_url=upstream.url, allow_anonymous=True)
    await service.tool_server("closed", mcp_url=upstream.url)
    anonymous = service.anonymous()

    refused = await anonymous.through("closed").request("tools/list")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert not upstream.received

    handle = await handle_of(anonymous.through("open"), upstream)
    task = await open_tools.create({"handle": handle})
    assert (await anonymous.through("open").get(task.id))["status"] == "working"


async def test_an_unknown_key_stays_outside_and_its_call_is_named(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    unknown = service.client(secret("tbc_unknown-key-of-a-client")).through("tools")
    response = await unknown.request("tools/list", rpc_id="call-1")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert response.json()["id"] == "call-1"
    assert not upstream.received


@pytest.mark.parametrize(
    "path", ["/mcp/nobody", "/mcp/tools/", "/mcp/", "/mcp/a%00b", "/mcp/TOOLS"]
)
async def test_an_unknown_name_is_not_found(service: Service, path: str) -> None:
    await service.tool_server("tools", mcp_url="http://127.0.0.1:9/mcp")
    response = await service.client().post({}, path=path)
    assert response.status_code == 404
    assert "mcp-url" in response.json()["error"]["message"]


async def test_a_backend_without_an_mcp_url_has_no_gateway(service: Service) -> None:
    await service.tool_server()
    assert (await service.client().through("tools").request("tools/list")).status_code == 404


async def test_a_disabled_tool_server_is_not_called_but_its_tasks_can_be_read(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    task = await tools.create(client)
    await service.disable(tools)

    status, message = await _failure(client)
    assert (status, message) == (503, "The operator has disabled this tool server.")
    assert (await client.get(task.id))["status"] == "working"
    assert not upstream.received


@pytest.mark.parametrize("header", ["origin", "host"])
async def test_a_web_page_from_elsewhere_stays_outside(
    service: Service, upstream: Upstream, header: str
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    evil = {"origin": "http://evil.example", "host": "evil.example"}[header]
    response = await service.client().through("tools").request("tools/list", headers={header: evil})
    assert response.status_code == 403
    assert not upstream.received


# --- capabilities -----------------------------------------------------------------------------

DISCOVERED = {
    "resultType": "complete",
    "supportedVersions": ["2026-07-28"],
    "capabilities": {"tools": {"list": 1}, "tasks": {"list": {}}, "extensions": {"x/y": {"a": 1}}},
    "instructions": "Schöne Grüße",
    "ttlMs": 12,
    "cacheScope": "private",
}  # fmt: skip


def _as_json(message: bytes) -> tuple[bytes, list[tuple[str, str]]]:
    return message, [("content-type", "application/json")]


def _as_event(message: bytes) -> tuple[bytes, list[tuple[str, str]]]:
    return b": hello\n\nevent: message\nid: 7\ndata: " + message + b"\n\n", SSE


@pytest.mark.parametrize("form", [_as_json, _as_event], ids=["json", "sse"])
async def test_discovery_comes_back_with_the_tasks_extension(
    service: Service, upstream: Upstream, form: Any
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    body, headers = form(json.dumps({"jsonrpc": "2.0", "id": 1, "result": DISCOVERED}).encode())
    upstream.behaviour = answer_with(body, headers=headers)

    response = await service.client().through("tools").request("server/discover")

    text = response.text
    if form is _as_event:
        assert text.startswith(": hello\n\nevent: message\nid: 7\ndata: ")
        text = text.split("data: ")[1]
    assert json.loads(text)["result"] == {
        **DISCOVERED,
        "capabilities": {"tools": {"list": 1}, "extensions": {"x/y": {"a": 1}, TASKS: {}}},
    }
    assert upstream.last.header("accept-encoding") == "identity"


async def test_a_compressed_discovery_is_unpacked(service: Service, upstream: Upstream) -> None:
    """It was asked for plain."""
    await service.tool_server(mcp_url=upstream.url)
    body = gzip.compress(json.dumps({"id": 1, "result": DISCOVERED}).encode())
    headers = [("content-type", "application/json"), ("content-encoding", "gzip"), ("etag", "x")]
    upstream.behaviour = answer_with(body, headers=headers)
    response = await service.client().through("tools").request("server/discover")
    assert response.json()["result"]["capabilities"]["extensions"][TASKS] == {}
    assert "content-encoding" not in response.headers
    assert "etag" not in response.headers
    assert response.headers["content-length"] == str(len(response.content))


async def test_a_discovery_that_breaks_off_is_a_failure(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    upstream.behaviour = answer_with(
        b'{"id": 1', headers=[("content-type", "application/json"), ("content-length", "99")]
    )
    response = await service.client().through("tools").request("server/discover", rpc_id=3)
    assert (response.status_code, response.json()["id"]) == (502, 3)


async def test_an_error_in_place_of_discovery_comes_back_as_it_is(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    error = b'{"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "no"}}'
    upstream.behaviour = answer_with(error, status=404)
    response = await service.client().through("tools").request("server/discover")
    assert (response.status_code, response.content) == (404, error)


INITIALIZED: dict[str, Any] = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}, "tasks": {"mine": {}}},
}


@pytest.mark.parametrize("form", [_as_json, _as_event], ids=["json", "sse"])
async def test_initialize_offers_the_tasks_of_its_era(
    service: Service, upstream: Upstream, form: Any
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    body, headers = form(json.dumps({"jsonrpc": "2.0", "id": 0, "result": INITIALIZED}).encode())
    upstream.behaviour = answer_with(body, headers=[*headers, ("mcp-session-id", "s-1")])

    response = await service.client().through("tools").post({"id": 0, "method": "initialize"})

    text = response.text.rpartition("data: ")[2]
    assert json.loads(text)["result"]["capabilities"] == {
        "tools": {},
        "tasks": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
    }
    assert response.headers["mcp-session-id"] == "s-1"


async def test_a_version_without_tasks_is_offered_none(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    result = {**INITIALIZED, "protocolVersion": "2025-06-18"}
    upstream.behaviour = answer_with(json.dumps({"id": 0, "result": result}).encode())
    response = await service.client().through("tools").post({"id": 0, "method": "initialize"})
    assert response.json()["result"]["capabilities"] == {"tools": {}}


async def test_the_nameless_are_offered_no_list(service: Service, upstream: Upstream) -> None:
    await service.tool_server(mcp_url=upstream.url, allow_anonymous=True)
    upstream.behaviour = answer_with(json.dumps({"id": 0, "result": INITIALIZED}).encode())
    response = await service.anonymous().through("tools").post({"id": 0, "method": "initialize"})
    assert "list" not in response.json()["result"]["capabilities"]["tasks"]


@pytest.mark.parametrize("keeps_tasks", [False, True])
async def test_with_the_era_switched_off_only_tasks_that_can_be_read_are_promised(
    database_url: str, clock: ShiftedClock, upstream: Upstream, keeps_tasks: bool
) -> None:
    async with running_service(test_settings(database_url, legacy=False), clock) as service:
        await service.tool_server(mcp_url=upstream.url, forward_unknown_tasks=keeps_tasks)
        upstream.behaviour = answer_with(json.dumps({"id": 0, "result": INITIALIZED}).encode())
        response = await service.client().through("tools").post({"id": 0, "method": "initialize"})
        offered = response.json()["result"]["capabilities"]
        assert offered == (INITIALIZED["capabilities"] if keeps_tasks else {"tools": {}})


async def test_an_answer_to_a_question_of_a_task_is_taken_and_any_other_passed_on(
    service: Service, upstream: Upstream
) -> None:
    """Clients of 2025-11-25 answer by messages without a method."""
    tools = await service.tool_server(mcp_url=upstream.url)
    client = service.client()
    task = await tools.create(client)
    await tools.ask(task, "sure")
    reply = {"jsonrpc": "2.0", "id": f"{task.id}:sure", "result": {"action": "decline"}}

    assert (await client.through("tools").post(reply)).status_code == 202
    assert not upstream.received
    answers = (await tools.read(task.ref)).json()["inputResponses"]
    assert answers == {"sure": {"action": "decline"}}

    await client.through("tools").post({**reply, "id": "the tool server's own"})
    assert upstream.last.message["id"] == "the tool server's own"


async def test_an_answer_that_comes_in_pieces_is_known_by_its_end(
    online: Service, upstream: Upstream
) -> None:
    """Some libraries write the id last."""
    tools = await online.tool_server(mcp_url=upstream.url)
    client = online.client()
    task = await tools.create(client)
    await tools.ask(task, "sure")

    async def in_pieces(rpc_id: str) -> AsyncIterator[bytes]:
        yield b'{"jsonrpc": "2.0", "result": {"action": "accept"}, '
        await asyncio.sleep(0)
        yield f'"id": "{rpc_id}"}}'.encode()

    headers = {"authorization": f"Bearer {client.token}", "content-type": "application/json"}
    for rpc_id in ("the tool server's own", f"{task.id}:sure"):
        await online.http.post("/mcp/tools", content=in_pieces(rpc_id), headers=headers)
    assert [received.message["id"] for received in upstream.received] == ["the tool server's own"]
    assert (await tools.read(task.ref)).json()["inputResponses"] == {"sure": {"action": "accept"}}


async def test_a_withdrawal_goes_to_whom_the_request_went(
    online: Service, upstream: Upstream
) -> None:
    tools = await online.tool_server(mcp_url=upstream.url)
    client = online.client().through("tools")
    task = await tools.create(client)
    waiting = asyncio.create_task(
        client.post(
            {"jsonrpc": "2.0", "id": 7, "method": "tasks/result", "params": {"taskId": task.id}}
        )
    )
    await eventually(lambda: _shows(online, "taskbroker_waiters 1.0"))
    for request_id in (8, 7):
        withdrawal = {"method": "notifications/cancelled", "params": {"requestId": request_id}}
        await client.post({"jsonrpc": "2.0", **withdrawal})
    assert [received.message["params"] for received in upstream.received] == [{"requestId": 8}]
    assert (await waiting).status_code == 200
    await eventually(lambda: _shows(online, "taskbroker_waiters 0.0"))


async def test_a_list_behind_a_backends_door_has_its_tasks_only(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url)
    others = await service.tool_server("others", mcp_url=upstream.url)
    client = service.client()
    mine, elsewhere = await tools.create(client), await others.create(client)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tasks/list"}
    for path, expected in (
        ("/mcp/tools", {mine.id}),
        ("/mcp/others", {elsewhere.id}),
        ("/mcp", {mine.id, elsewhere.id}),
    ):
        listed = (await client.post(message, path=path)).json()["result"]["tasks"]
        assert {task["taskId"] for task in listed} == expected
    assert not upstream.received


# --- tool servers that keep some tasks themselves ---------------------------------------------


@pytest.mark.parametrize("task_id", ["theirs", "x" * 64, "", "Ä"])
async def test_unknown_tasks_go_to_a_tool_server_that_keeps_some(
    service: Service, upstream: Upstream, task_id: str
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url, forward_unknown_tasks=True)
    client = service.client().through("tools")
    ours = await tools.create(client)

    response = await client.request("tasks/get", {"taskId": task_id})
    assert response.json()["result"] == {"content": []}
    assert upstream.last.message["params"]["taskId"] == task_id

    calls = len(upstream.received)
    assert (await client.get(ours.id))["taskId"] == ours.id
    assert len(upstream.received) == calls


async def test_an_id_of_the_broker_stays_here_whoever_it_belongs_to(
    service: Service, upstream: Upstream
) -> None:
    """A tool server learns no id of another client, not even from one who has stolen it."""
    tools = await service.tool_server(mcp_url=upstream.url, forward_unknown_tasks=True)
    stolen = await tools.create(service.client())
    assert await service.client().through("tools").error("tasks/get", stolen.id) == NOT_FOUND
    assert not upstream.received


async def test_subscriptions_to_unknown_tasks_go_there_too(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url, forward_unknown_tasks=True)
    client = service.client().through("tools")
    ours = await tools.create(client)
    await tools.complete(ours)

    async def subscribe(*ids: str) -> httpx.Response:
        wanted = {"notifications": {"taskIds": list(ids)}}
        return await client.request("subscriptions/listen", wanted)

    await subscribe("theirs", "x" * 64)
    assert upstream.last.message["params"]["notifications"]["taskIds"] == ["theirs", "x" * 64]

    calls = len(upstream.received)
    acknowledged, *_ = events(await subscribe("theirs", ours.id))
    assert acknowledged["params"]["notifications"] == {"taskIds": [ours.id]}
    assert len(upstream.received) == calls


async def test_a_subscription_to_anothers_task_does_not_go_there(
    service: Service, upstream: Upstream
) -> None:
    tools = await service.tool_server(mcp_url=upstream.url, forward_unknown_tasks=True)
    stolen = await tools.create(service.client())
    wanted = {"notifications": {"taskIds": ["theirs", stolen.id]}}
    response = await service.client().through("tools").request("subscriptions/listen", wanted)
    acknowledged, _ = events(response)
    assert acknowledged["params"]["notifications"] == {"taskIds": []}
    assert not upstream.received


async def test_without_that_an_unknown_task_is_not_found(
    service: Service, upstream: Upstream
) -> None:
    await service.tool_server(mcp_url=upstream.url)
    assert await service.client().through("tools").error("tasks/get", "theirs") == NOT_FOUND
    assert not upstream.received


# --- when the tool server fails ---------------------------------------------------------------


async def _failure(client: McpClient) -> tuple[int, str]:
    response = await client.request("tools/call", {"name": "greet"}, rpc_id="call-7")
    failure = response.json()
    assert failure["id"] == "call-7"
    assert failure["error"]["code"] == -32603
    return response.status_code, str(failure["error"]["message"])


async def test_a_tool_server_that_is_not_there(service: Service) -> None:
    await service.tool_server(mcp_url=f"http://127.0.0.1:{free_port()}/mcp")
    status, message = await _failure(service.client().through("tools"))
    assert (status, message) == (502, "The tool server cannot be reached.")


async def test_a_host_that_has_no_address(service: Service) -> None:
    await service.tool_server(mcp_url="http://tools.invalid/mcp")
    status, message = await _failure(service.client().through("tools"))
    assert (status, message) == (502, "The tool server cannot be reached.")


async def test_a_tool_server_that_does_not_answer(online: Service, upstream: Upstream) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = hang

    status, message = await _failure(online.client().through("tools"))

    assert (status, message) == (504, "The tool server did not answer within 2 seconds.")
    await asyncio.wait_for(upstream.last.disconnected.wait(), 10)


async def test_a_tool_server_that_breaks_off(service: Service) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await service.tool_server(mcp_url=f"http://127.0.0.1:{port}/mcp")
        status, message = await _failure(service.client().through("tools"))
    assert status == 502
    assert "broke the connection off" in message


async def test_something_that_does_not_speak_http(service: Service) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await service.tool_server(mcp_url=f"http://127.0.0.1:{port}/mcp")
        status, _ = await _failure(service.client().through("tools"))
    assert status == 502


@pytest.mark.parametrize("status", [101, 600, 999])
async def test_a_status_that_is_none(online: Service, status: int) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d Odd\r\ncontent-length: 2\r\n\r\n{}" % status)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(odd, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await online.tool_server(mcp_url=f"http://127.0.0.1:{port}/mcp")
        assert (await _failure(online.client().through("tools")))[0] in (502, 504)


async def test_an_answer_that_nobody_asked_for_goes_to_nobody(online: Service) -> None:
    """A tool server that answers twice must not answer the next client's call."""
    calls = 0
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n"
    first_seen, second_sent = asyncio.Event(), asyncio.Event()

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                calls += 1
                await reader.readexactly(2)
                writer.write(answer + b'{"a": %d}' % calls)
                await writer.drain()
                await first_seen.wait()
                writer.write(answer + b'{"a": 9}')
                await writer.drain()
                second_sent.set()
        writer.close()

    async with await asyncio.start_server(twice, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await online.tool_server(mcp_url=f"http://127.0.0.1:{port}/mcp")
        headers = {**_authorized(), "mcp-method": "x", "mcp-protocol-version": "2026-07-28"}
        for number in (1, 2):
            answered = await online.http.post("/mcp/tools", content=b"{}", headers=headers)
            assert answered.json() == {"a": number}
            first_seen.set()
            await second_sent.wait()


async def test_an_answer_without_a_body_may_speak_of_its_length(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = answer_with(
        b"", status=304, headers=[("content-length", "500"), ("etag", "x")]
    )
    response = await online.http.get("/mcp/tools", headers=_authorized())
    assert (response.status_code, response.headers["etag"]) == (304, "x")


async def test_a_redirect_is_the_operators_to_mend(service: Service, upstream: Upstream) -> None:
    await service.tool_server(mcp_url=upstream.url)
    upstream.behaviour = answer_with(b"", status=307, headers=[("location", "/mcp/")])
    status, message = await _failure(service.client().through("tools"))
    assert status == 502
    assert "redirect" in message
    assert len(upstream.received) == 1


async def test_an_answer_over_the_limit(
    database_url: str, clock: ShiftedClock, upstream: Upstream
) -> None:
    settings = test_settings(database_url, gateway_max_answer_bytes=2_000)
    async with networked_service(settings, clock) as service:
        await service.tool_server(mcp_url=upstream.url)
        client = service.client().through("tools")

        body = b"x" * 2_001
        upstream.behaviour = answer_with(body, headers=[("content-length", "2001")])
        assert (await _failure(client))[0] == 502

        upstream.behaviour = answer_with(body)  # of a length that nobody declared
        with pytest.raises(httpx.RemoteProtocolError):
            await client.request("tools/call")

        upstream.behaviour = answer_with(body, headers=SSE)
        assert (await client.request("tools/call")).content == body


async def test_a_hanging_tool_server_does_not_hold_up_another(
    database_url: str, clock: ShiftedClock, upstream: Upstream
) -> None:
    async with networked_service(test_settings(database_url), clock) as online:
        await _call_one_while_another_hangs(online, upstream)


async def _call_one_while_another_hangs(online: Service, upstream: Upstream) -> None:
    await online.tool_server("prompt", mcp_url=upstream.url)
    async with running_upstream() as stuck:
        stuck.behaviour = hang
        await online.tool_server("stuck", mcp_url=stuck.url)
        client = online.client()
        waiting = [
            asyncio.create_task(client.through("stuck").request("tools/call")) for _ in range(50)
        ]
        await eventually(lambda: len(stuck.received) == len(waiting))

        answer = await client.through("prompt").request("tools/call")

        assert answer.status_code == 200
        assert not any(call.done() for call in waiting)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def hang(request: Received, receive: Receive, _: Send) -> None:
    """Takes a request, and waits until its sender has gone."""
    await read_all(request, receive)
    while (await receive())["type"] != "http.disconnect":
        pass
    request.disconnected.set()


# --- streams ----------------------------------------------------------------------------------


class Feed:
    """A tool server that sends an event whenever the test says so."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, request: Received, receive: Receive, send: Send) -> None:
        await read_all(request, receive)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        watching = asyncio.create_task(_until_gone(request, receive))
        while (event := await self.events.get()) is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        watching.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(request: Received, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.disconnected.set()


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_events_arrive_while_the_stream_is_open(
    online: Service, upstream: Upstream, method: str
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = feed = Feed()
    async with online.http.stream(method, "/mcp/tools", headers=_authorized()) as response:
        assert response.headers["content-type"] == "text/event-stream"
        incoming = response.aiter_bytes()
        for number in range(3):
            event = b"data: %d\n\n" % number
            await feed.events.put(event)
            assert await anext(incoming) == event
        await feed.events.put(None)
        assert [chunk async for chunk in incoming] == []


async def test_a_silent_stream_outlives_the_time_for_an_answer(
    database_url: str, clock: ShiftedClock, upstream: Upstream
) -> None:
    settings = test_settings(database_url, gateway_timeout_ms=100)
    async with networked_service(settings, clock) as service:
        await service.tool_server(mcp_url=upstream.url)
        upstream.behaviour = feed = Feed()
        async with service.http.stream("GET", "/mcp/tools", headers=_authorized()) as response:
            upstream.behaviour = hang
            assert (await _failure(service.client().through("tools")))[0] == 504
            await feed.events.put(b"data: late\n\n")
            assert await anext(response.aiter_bytes()) == b"data: late\n\n"
            await feed.events.put(None)


async def test_when_the_client_leaves_the_call_is_cancelled(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = Feed()
    async with online.http.stream("POST", "/mcp/tools", headers=_authorized()) as response:
        assert response.status_code == 200
    await asyncio.wait_for(upstream.last.disconnected.wait(), 10)


async def test_when_the_client_leaves_before_the_answer_the_call_is_cancelled(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = hang
    impatient = asyncio.create_task(online.client().through("tools").request("tools/call"))
    await eventually(lambda: upstream.received)
    impatient.cancel()
    await asyncio.wait_for(upstream.last.disconnected.wait(), 10)


async def test_a_body_is_passed_on_while_it_is_still_being_sent(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    beginning = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"a": "'
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield beginning
        await go_on.wait()
        yield b'"}}'

    async def note_as_it_comes(request: Received, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            request.body += message.get("body", b"")
            more = message.get("more_body", False)
        await respond(send, b"{}")

    upstream.behaviour = note_as_it_comes
    call = asyncio.create_task(
        online.http.post("/mcp/tools", content=slowly(), headers=_authorized())
    )
    await eventually(lambda: upstream.received and upstream.last.body == beginning)
    go_on.set()
    assert (await call).status_code == 200
    assert upstream.last.body == beginning + b'"}}'


async def test_an_answer_that_breaks_off_does_not_look_whole(
    online: Service, upstream: Upstream
) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await online.tool_server(mcp_url=f"http://127.0.0.1:{port}/mcp")
        with pytest.raises(httpx.RemoteProtocolError):
            await online.client().through("tools").request("tools/call")


async def test_an_answer_may_come_before_the_end_of_its_request(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    answered = asyncio.Event()

    async def answer_at_once(_: Received, __: Receive, send: Send) -> None:
        await respond(send, b'{"early": true}', status=413)

    async def until_answered() -> AsyncIterator[bytes]:
        yield b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"a": "'
        await answered.wait()
        yield b'"}}'

    upstream.behaviour = answer_at_once
    request = online.http.build_request(
        "POST", "/mcp/tools", content=until_answered(), headers=_authorized()
    )
    sending = asyncio.create_task(online.http.send(request))
    await eventually(lambda: upstream.received)
    answered.set()
    assert (await sending).status_code == 413


async def test_a_client_that_leaves_in_the_middle_of_its_body_takes_its_call_along(
    online: Service, upstream: Upstream
) -> None:
    await online.tool_server(mcp_url=upstream.url)
    broken_off = asyncio.Event()

    async def note_the_end(request: Received, receive: Receive, _: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            request.body += message["body"]
        broken_off.set()

    upstream.behaviour = note_the_end
    url = online.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /mcp/tools HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer x\r\n"
        b'content-length: 1000\r\n\r\n{"method": "tools/call", "params": {'
    )
    await eventually(lambda: upstream.received and upstream.last.body)
    writer.close()
    await asyncio.wait_for(broken_off.wait(), 10)
    counted = 'taskbroker_gateway_requests_total{backend="tools",outcome="client_gone"} 1.0'
    await eventually(lambda: _shows(online, counted))


async def _shows(service: Service, line: str) -> bool:
    return line in (await service.http.get("/metrics")).text


async def test_open_streams_leave_room_for_calls(online: Service, upstream: Upstream) -> None:
    await online.tool_server(mcp_url=upstream.url)
    upstream.behaviour = Feed()
    streams = [
        asyncio.create_task(online.http.get("/mcp/tools", headers=_authorized())) for _ in range(90)
    ]
    await eventually(lambda: len(upstream.received) == len(streams))
    upstream.behaviour = answer_with(b"{}")
    assert (await online.client().through("tools").request("tools/call")).status_code == 200
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_what_was_passed_on_is_counted(service: Service, upstream: Upstream) -> None:
    await service.tool_server(mcp_url=upstream.url)
    client = service.client().through("tools")
    await client.request("tools/list")
    upstream.behaviour = answer_with(b"{}", status=404)
    await client.request("tools/list")

    shown = (await service.http.get("/metrics")).text

    counter = 'taskbroker_gateway_requests_total{backend="tools",outcome="%s"} 1.0'
    assert counter % "2xx" in shown
    assert counter % "4xx" in shown
    assert 'taskbroker_gateway_answer_seconds_count{backend="tools"} 2.0' in shown
